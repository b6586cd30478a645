"""Measure the data loaders of other libraries on the same samples, in a Python environment without Sluice.

    python -m venv PEERS && PEERS/bin/pip install mosaicml-streaming webdataset datasets
    python -m benchmarks.loader --peers PEERS/bin/python

benchmarks/loader.py runs this file: `loader_peers.py make|read NAME FOLDER FLAT_FILE`. `make` writes the samples of a
flat file of tokens in the format of a library. `read` prints the CPU seconds of one shuffled epoch of batches of int64
pairs (inputs, targets), with a warm page cache. Each library is used as its documentation recommends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SAMPLES = 20_480
LENGTH = 2_048
BATCH = 8


def make_inputs_and_targets(tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the targets (the inputs shifted by one) of a batch.

    Args:
        tokens: uint16 array of shape (B, T + 1).

    Returns: inputs and targets, both int64 of shape (B, T).
    """
    tokens_int64 = torch.from_numpy(np.asarray(tokens).astype(np.int64))
    return tokens_int64[:, :-1], tokens_int64[:, 1:]


def stack_samples(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a batch of samples, which are dicts with `tokens`."""
    return make_inputs_and_targets(np.stack([sample["tokens"] for sample in samples]))


def iter_samples(flat_file: Path) -> Iterator[np.ndarray]:
    """Yield the samples of the flat file of tokens."""
    tokens = np.memmap(flat_file, np.uint16, "r")
    for i in range(SAMPLES):
        yield np.asarray(tokens[i * LENGTH : i * LENGTH + LENGTH + 1])


def write_streaming(folder: Path, flat_file: Path) -> None:
    """Write the samples as MDS shards, the format of MosaicML streaming."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH + 1}"}) as writer:
        for sample in iter_samples(flat_file):
            writer.write({"tokens": sample})


def load_streaming(folder: Path) -> Any:
    """Return a loader that reads MDS shards from the local disk with MosaicML streaming."""
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=1, batch_size=BATCH)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH, collate_fn=stack_samples)


def write_webdataset(folder: Path, flat_file: Path) -> None:
    """Write the samples as eight tar files with one .npy member per sample."""
    import io
    import tarfile

    folder.mkdir()
    for shard in range(8):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for i, sample in enumerate(iter_samples(flat_file)):
                if i * 8 // SAMPLES == shard:
                    content = io.BytesIO()
                    np.save(content, sample)
                    info = tarfile.TarInfo(f"{i:06d}.tokens.npy")
                    info.size = len(content.getvalue())
                    content.seek(0)
                    tar.addfile(info, content)


def load_webdataset(folder: Path) -> Any:
    """Return a loader that reads the tar files with WebDataset and shuffles in a buffer of 1,000 samples."""
    import webdataset as wds

    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = wds.WebDataset(urls, shardshuffle=8, seed=1).shuffle(1000).decode().rename(tokens="tokens.npy")
    return torch.utils.data.DataLoader(dataset.batched(BATCH, collation_fn=stack_samples), batch_size=None)


def write_hf_datasets(folder: Path, flat_file: Path) -> None:
    """Write the samples as an Arrow table with Hugging Face datasets."""
    from datasets import Dataset, Features, Sequence, Value

    features = Features({"tokens": Sequence(Value("uint16"), length=LENGTH + 1)})
    table = Dataset.from_generator(
        lambda: ({"tokens": tokens} for tokens in iter_samples(flat_file)), features=features
    )
    table.save_to_disk(str(folder))


def load_hf_datasets(folder: Path) -> Any:
    """Return an iterator that reads the Arrow table, shuffled by an index, as numpy batches."""
    from datasets import load_from_disk

    table = load_from_disk(str(folder)).with_format("numpy").shuffle(seed=1, keep_in_memory=True)
    return (make_inputs_and_targets(batch["tokens"]) for batch in table.iter(BATCH))


PEERS: dict[str, tuple[Callable[[Path, Path], None], Callable[[Path], Any]]] = {
    "MosaicML streaming": (write_streaming, load_streaming),
    "WebDataset": (write_webdataset, load_webdataset),
    "Hugging Face datasets": (write_hf_datasets, load_hf_datasets),
}
"""Two functions for each library.

The first function writes the samples of a flat file of tokens to a folder. The second function returns a loader that
yields the batches of one shuffled epoch from this folder.
"""


def main() -> None:
    """Write the samples in the format of a library (`make`), or print the CPU seconds of its loader (`read`)."""
    action, name, folder, flat_file = sys.argv[1:]
    torch.set_num_threads(1)
    write_samples, make_loader = PEERS[name]
    if action == "make":
        write_samples(Path(folder), Path(flat_file))
        return
    loader = make_loader(Path(folder))
    for _ in range(2):  # The first epoch warms the page cache.
        start = time.process_time()
        count = 0
        # An iterator (Hugging Face datasets) yields only one epoch, so each epoch needs a new one.
        for inputs, _targets in loader if not isinstance(loader, Iterator) else make_loader(Path(folder)):
            count += len(inputs)
            assert inputs.shape[1] == LENGTH and inputs.dtype == torch.int64
        seconds = time.process_time() - start
        assert count == SAMPLES, count
    print(seconds)


if __name__ == "__main__":
    main()
