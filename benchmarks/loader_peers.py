"""Measure data loaders of other libraries on the same samples, with a Python that has them and without Sluice.

    python -m venv PEERS && PEERS/bin/pip install mosaicml-streaming webdataset datasets
    python -m benchmarks.loader --peers PEERS/bin/python

benchmarks/loader.py runs this file: `loader_peers.py make|read NAME FOLDER FLAT`. `read` prints the CPU seconds of one
shuffled epoch of batches of int64 pairs (inputs, targets), in this process, with a warm page cache. Each library is
used as its documentation recommends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
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


def iter_samples(flat: Path) -> Iterator[np.ndarray]:
    """Yield the samples of the flat file."""
    tokens = np.memmap(flat, np.uint16, "r")
    for i in range(SAMPLES):
        yield np.asarray(tokens[i * LENGTH : i * LENGTH + LENGTH + 1])


# Each of these functions writes the samples of `flat` to `folder`, or, if `flat` is None, returns a loader of `folder`.


def use_streaming(folder: Path, flat: Path | None) -> Any:
    """MosaicML streaming with shards on the local disk."""
    from streaming import MDSWriter, StreamingDataset

    if flat is not None:
        with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH + 1}"}) as writer:
            for sample in iter_samples(flat):
                writer.write({"tokens": sample})
        return None
    dataset = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=1, batch_size=BATCH)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH, collate_fn=stack_samples)


def use_webdataset(folder: Path, flat: Path | None) -> Any:
    """WebDataset: tar files with .npy members, shuffled in a buffer of 1,000 samples."""
    import io
    import tarfile

    import webdataset as wds

    if flat is not None:
        folder.mkdir()
        for shard in range(8):
            with tarfile.open(folder / f"{shard}.tar", "w") as tar:
                for i, sample in enumerate(iter_samples(flat)):
                    if i * 8 // SAMPLES == shard:
                        content = io.BytesIO()
                        np.save(content, sample)
                        info = tarfile.TarInfo(f"{i:06d}.tokens.npy")
                        info.size = len(content.getvalue())
                        content.seek(0)
                        tar.addfile(info, content)
        return None
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = wds.WebDataset(urls, shardshuffle=8, seed=1).shuffle(1000).decode().rename(tokens="tokens.npy")
    return torch.utils.data.DataLoader(dataset.batched(BATCH, collation_fn=stack_samples), batch_size=None)


def use_hf_datasets(folder: Path, flat: Path | None) -> Any:
    """Hugging Face datasets: an Arrow table, shuffled by an index, read as numpy batches."""
    from datasets import Dataset, Features, Sequence, Value, load_from_disk

    if flat is not None:
        features = Features({"tokens": Sequence(Value("uint16"), length=LENGTH + 1)})
        table = Dataset.from_generator(lambda: ({"tokens": tokens} for tokens in iter_samples(flat)), features=features)
        table.save_to_disk(str(folder))
        return None
    table = load_from_disk(str(folder)).with_format("numpy").shuffle(seed=1, keep_in_memory=True)
    return (make_inputs_and_targets(batch["tokens"]) for batch in table.iter(BATCH))


PEERS = {"MosaicML streaming": use_streaming, "WebDataset": use_webdataset, "Hugging Face datasets": use_hf_datasets}


def main() -> None:
    action, name, folder, flat = sys.argv[1:]
    torch.set_num_threads(1)
    if action == "make":
        PEERS[name](Path(folder), Path(flat))
        return
    loader = PEERS[name](Path(folder), None)
    for _ in range(2):  # the first epoch warms the page cache
        start = time.process_time()
        count = 0
        for inputs, _targets in loader if not isinstance(loader, Iterator) else PEERS[name](Path(folder), None):
            count += len(inputs)
            assert inputs.shape[1] == LENGTH and inputs.dtype == torch.int64
        seconds = time.process_time() - start
        assert count == SAMPLES, count
    print(seconds)


if __name__ == "__main__":
    main()
