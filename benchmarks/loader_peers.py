"""What others' loaders cost for the same samples: run by an interpreter that has them, with nothing of Sluice.

    python -m venv PEERS && PEERS/bin/pip install mosaicml-streaming webdataset datasets
    python -m benchmarks.loader --peers PEERS/bin/python

benchmarks/loader.py calls it: `loader_peers.py make|read NAME FOLDER FLAT`. `read` prints CPU seconds of one shuffled
epoch of batches of int64 pairs, in this process, page cache warm, by each library's own words for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SAMPLES, LENGTH, BATCH = 20_480, 2_048, 8


def pairs(tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of (B, T + 1) uint16 tokens, int64."""
    wide = torch.from_numpy(np.asarray(tokens).astype(np.int64))
    return wide[:, :-1], wide[:, 1:]


def stacked(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of samples with `tokens`."""
    return pairs(np.stack([sample["tokens"] for sample in samples]))


def rows(flat: Path) -> Iterator[np.ndarray]:
    """The samples."""
    tokens = np.memmap(flat, np.uint16, "r")
    for i in range(SAMPLES):
        yield np.asarray(tokens[i * LENGTH : i * LENGTH + LENGTH + 1])


def streaming(folder: Path, flat: Path | None) -> Any:
    """MosaicML streaming, shards on this disk."""
    from streaming import MDSWriter, StreamingDataset

    if flat is not None:
        with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH + 1}"}) as writer:
            for row in rows(flat):
                writer.write({"tokens": row})
        return None
    dataset = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=1, batch_size=BATCH)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH, collate_fn=stacked)


def webdataset(folder: Path, flat: Path | None) -> Any:
    """WebDataset: tars of .npy members, shuffled in a buffer of 1,000."""
    import io
    import tarfile

    import webdataset as wds

    if flat is not None:
        folder.mkdir()
        for shard in range(8):
            with tarfile.open(folder / f"{shard}.tar", "w") as tar:
                for i, row in enumerate(rows(flat)):
                    if i * 8 // SAMPLES == shard:
                        content = io.BytesIO()
                        np.save(content, row)
                        info = tarfile.TarInfo(f"{i:06d}.tokens.npy")
                        info.size = len(content.getvalue())
                        content.seek(0)
                        tar.addfile(info, content)
        return None
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = wds.WebDataset(urls, shardshuffle=8, seed=1).shuffle(1000).decode().rename(tokens="tokens.npy")
    return torch.utils.data.DataLoader(dataset.batched(BATCH, collation_fn=stacked), batch_size=None)


def hf_datasets(folder: Path, flat: Path | None) -> Any:
    """Hugging Face datasets: an Arrow table, shuffled by an index, whole batches as numpy."""
    from datasets import Dataset, Features, Sequence, Value, load_from_disk

    if flat is not None:
        features = Features({"tokens": Sequence(Value("uint16"), length=LENGTH + 1)})
        table = Dataset.from_generator(lambda: ({"tokens": row} for row in rows(flat)), features=features)
        table.save_to_disk(str(folder))
        return None
    table = load_from_disk(str(folder)).with_format("numpy").shuffle(seed=1, keep_in_memory=True)
    return (pairs(batch["tokens"]) for batch in table.iter(BATCH))


PEERS = {"MosaicML streaming": streaming, "WebDataset": webdataset, "Hugging Face datasets": hf_datasets}


def main() -> None:
    what, name, folder, flat = sys.argv[1:]
    torch.set_num_threads(1)
    if what == "make":
        PEERS[name](Path(folder), Path(flat))
        return
    loader = PEERS[name](Path(folder), None)
    for _ in range(2):  # the first epoch warms the page cache
        start, found = time.process_time(), 0
        for inputs, _targets in loader if not isinstance(loader, Iterator) else PEERS[name](Path(folder), None):
            found += len(inputs)
            assert inputs.shape[1] == LENGTH and inputs.dtype == torch.int64
        seconds = time.process_time() - start
        assert found == SAMPLES, found
    print(seconds)


if __name__ == "__main__":
    main()
