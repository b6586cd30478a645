"""The loader's cost: CPU seconds to read one shuffled epoch, against raw np.memmap and torch's DataLoader.

    python -m benchmarks.loader [--repetitions 9] [--peers PYTHON]     # benchmarks/loader_peers.py says which

20,480 samples of 2,048 uint16 tokens (and one more as the last target) in batches of 8: Sluice reads them from 8 HDF5
shards, the others from one flat file. CPU seconds are user and system time of all threads; the page cache is warm.
Repetitions are interleaved, each loader once per round, and a ratio is the median of the rounds' ratios. All read the
same samples in the same order, and that is checked. A loader is compared with the raw loop that delivers the same: the
shards' own uint16 arrays, or what a training step takes, a pair of int64 tensors (inputs, targets). The table's rows
consume the batches without work, which is the worst case for a thread that reads ahead. What a training sees is
measured with a step of 1 ms behind each batch, and is the number to compare.

Besides, what an epoch asks of the file system, by strace in a process of its own; and the first batch of a run that
begins at 90 % of an epoch of 10⁹ tokens beside that of one that begins at 0, in pairs, from making the sampler on.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader_peers import BATCH, LENGTH, PEERS, SAMPLES, pairs
from benchmarks.table import write_table
from pipeline.data.loader import BatchLoader
from pipeline.data.manifest import ShardEntry
from pipeline.data.sample_order import GlobalOrderSampler, compute_index_range
from pipeline.data.samples import TokenDataset

SHARDS = 8
STEP_S = 1e-3
ASKS = "open,openat,stat,lstat,newfstatat,statx,access,fstat,lseek,getdents64,readlink"
CPU = torch.device("cpu")
ARRAYS, PAIRS = "uint16 array", "int64 pair"
RAW = ("raw memmap, per sample", "raw memmap, whole batch")
ONCE = "raw memmap, whole batch, widened once"  # inputs and targets are views of it, as ours are
Pair = tuple[torch.Tensor, torch.Tensor]


def make_data(folder: Path) -> tuple[list[ShardEntry], Path]:
    """HDF5 shards, and one flat file with the same samples (each shard's last token is the next one's first)."""
    tokens = np.random.default_rng(0).integers(0, 65536, SAMPLES * LENGTH + 1, dtype=np.uint16)
    spans, size = [], SAMPLES // SHARDS * LENGTH
    for i in range(SHARDS):
        path = folder / f"tokens-{i}.h5"
        with h5py.File(path, "w") as file:
            shard = file.create_dataset("tokens", data=tokens[i * size : (i + 1) * size + 1])
            place = {"tokens": len(shard), "offset": shard.id.get_offset(), "dtype": "uint16"}
            spans.append(ShardEntry.model_construct(file=str(path), **place))
    flat = folder / "tokens.bin"
    tokens.tofile(flat)
    return spans, flat


def widened(tokens: np.ndarray) -> Pair:
    """Inputs and targets of samples of shape (…, T + 1)."""
    return torch.from_numpy(tokens[..., :-1].astype(np.int64)), torch.from_numpy(tokens[..., 1:].astype(np.int64))


class PerSample(Dataset[Pair]):
    """The usual map-style dataset: one slice of the map per sample."""

    def __init__(self, tokens: np.memmap[Any, Any]) -> None:
        self.tokens = tokens

    def __getitem__(self, i: int) -> Pair:
        return widened(self.tokens[i * LENGTH : i * LENGTH + LENGTH + 1])


class WholeBatch(PerSample):
    """One index operation for the whole batch, as DataLoader's `__getitems__` allows."""

    def __getitems__(self, indices: list[int]) -> Pair:
        return widened(self.tokens[np.array(indices)[:, None] * LENGTH + np.arange(LENGTH + 1)])


def loaders(spans: list[ShardEntry], flat: Path) -> dict[tuple[str, str], Callable[[], Iterator[Any]]]:
    """Each reads one epoch when it is called: (what it delivers, name) to iterator over batches."""
    dataset, tokens = TokenDataset(spans, LENGTH), np.memmap(flat, np.uint16, "r")
    order = compute_index_range(1, 0, SAMPLES, SAMPLES).reshape(-1, BATCH)
    per_sample, whole_batch = PerSample(tokens), WholeBatch(tokens)

    def stacked(indices: np.ndarray) -> Pair:
        inputs, targets = zip(*(per_sample[i] for i in indices), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def batches() -> Iterator[Pair]:
        sampler = GlobalOrderSampler(dataset, global_batch=BATCH, seed=1, num_replicas=1, rank=0)
        with BatchLoader(dataset, sampler, CPU) as reader:
            for batch in islice(reader, len(sampler)):
                yield batch["tokens"][:, :-1], batch["tokens"][:, 1:]

    return {
        (ARRAYS, RAW[0]): lambda: (
            np.stack([tokens[i * LENGTH : i * LENGTH + LENGTH + 1] for i in indices]) for indices in order
        ),
        (ARRAYS, RAW[1]): lambda: (tokens[indices[:, None] * LENGTH + np.arange(LENGTH + 1)] for indices in order),
        (ARRAYS, "Sluice, `TokenDataset.read`"): lambda: (dataset.read(indices)["tokens"] for indices in order),
        (PAIRS, RAW[0]): lambda: map(stacked, order),
        (PAIRS, RAW[1]): lambda: (whole_batch.__getitems__(indices) for indices in order.tolist()),
        (PAIRS, ONCE): lambda: (pairs(tokens[indices[:, None] * LENGTH + np.arange(LENGTH + 1)]) for indices in order),
        (PAIRS, "DataLoader, no workers, per sample"): lambda: iter(
            DataLoader(per_sample, batch_sampler=order.tolist())
        ),
        (PAIRS, "DataLoader, no workers, whole batch"): lambda: iter(
            DataLoader(whole_batch, batch_sampler=order.tolist(), collate_fn=lambda batch: batch)
        ),
        (PAIRS, "Sluice, sampler and `BatchLoader`"): batches,
    }


def beside_steps(spans: list[ShardEntry], read: Callable[[], Iterator[Pair]], repetitions: int) -> tuple[float, float]:
    """CPU seconds of an epoch whose every batch is followed by a step that sleeps, less those of sleeping: of the raw
    loop `read`, and of our sampler and `BatchLoader`, whose first epoch (its memory is new) is left out. Medians."""
    dataset = TokenDataset(spans, LENGTH)
    sampler = GlobalOrderSampler(dataset, global_batch=BATCH, seed=1, num_replicas=1, rank=0)
    found: list[list[float]] = []
    with BatchLoader(dataset, sampler, CPU) as reader:
        ours = ((batch["tokens"][:, :-1], batch["tokens"][:, 1:]) for batch in reader)
        for _ in range(repetitions + 1):
            found.append([])
            for batches in (repeat(None), read(), ours):
                start = time.process_time()
                for _batch in islice(batches, SAMPLES // BATCH):
                    time.sleep(STEP_S)
                found[-1].append(time.process_time() - start)
    idle, raw, own = (statistics.median(values) for values in zip(*found[1:], strict=True))
    return raw - idle, own - idle


def same(batch: Any, expected: np.ndarray) -> bool:
    """Whether a batch, in either shape, is `expected` (B, T + 1)."""
    if isinstance(batch, np.ndarray):
        return np.array_equal(batch, expected)
    return np.array_equal(batch[0], expected[:, :-1]) and np.array_equal(batch[1], expected[:, 1:])


def spans_of(folder: Path) -> list[ShardEntry]:
    """What `make_data` left, looked up again."""
    spans = []
    for path in sorted(folder.glob("tokens-*.h5")):
        with h5py.File(path) as file:
            shard = file["tokens"]
            place = {"tokens": len(shard), "offset": shard.id.get_offset(), "dtype": "uint16"}
            spans.append(ShardEntry.model_construct(file=str(path), **place))
    return spans


def asked_of_the_disk(folder: Path) -> str:
    """Calls that name a shard's file in one epoch of a process, by kind."""
    names = ", ".join(f"{span.file!r}: ({span.tokens}, {span.offset})" for span in spans_of(folder))
    code = f"""
import torch
from itertools import islice
from pipeline.data.loader import BatchLoader
from pipeline.data.sample_order import GlobalOrderSampler
from pipeline.data.manifest import ShardEntry
from pipeline.data.samples import TokenDataset
files = {{{names}}}
dataset = TokenDataset([ShardEntry.model_construct(file=name, tokens=tokens, offset=offset, dtype="uint16")
                        for name, (tokens, offset) in files.items()], {LENGTH})
sampler = GlobalOrderSampler(dataset, global_batch={BATCH}, seed=1, num_replicas=1, rank=0)
with BatchLoader(dataset, sampler, torch.device("cpu")) as reader:
    for batch in islice(reader, len(sampler)):
        pass
"""
    trace = folder / "trace"
    command = ["strace", "-f", "-y", "-e", f"trace={ASKS}", "-o", str(trace), sys.executable, "-c", code]
    subprocess.run(command, check=True, timeout=300)
    calls = Counter(
        found[1] for line in trace.read_text().splitlines()
        if "tokens-" in line and (found := re.match(r"\d+ +(\w+)\(", line))
    )  # fmt: skip
    return ", ".join(f"{count} {name}" for name, count in sorted(calls.items()))


def first_batches(folder: Path, pairs: int = 40) -> tuple[float, float, float]:
    """CPU seconds to the first batch at 0 and at 90 % of an epoch of 10⁹ tokens, and the median of their ratios."""
    path, tokens = folder / "sparse.h5", 10**9 + 1
    with open(path, "wb") as file:
        file.truncate(2 * tokens)
    entry = ShardEntry.model_construct(file=str(path), tokens=tokens, offset=0, dtype="uint16")
    dataset = TokenDataset([entry], LENGTH)
    seconds: list[tuple[float, float]] = []
    for _ in range(pairs):
        pair = []
        for consumed in (0, len(dataset) * 9 // 10):
            start = time.process_time()
            sampler = GlobalOrderSampler(
                dataset, global_batch=BATCH, seed=1, samples_consumed=consumed, num_replicas=1, rank=0
            )
            with BatchLoader(dataset, sampler, CPU) as reader:
                next(reader)
                pair.append(time.process_time() - start)
        seconds.append((pair[0], pair[1]))
    at_start, at_90 = zip(*seconds, strict=True)
    return statistics.median(at_start), statistics.median(at_90), statistics.median(b / a for a, b in seconds)


def peers_of(python: str, folder: Path, flat: Path) -> dict[str, float]:
    """CPU seconds of an epoch with each of the others' loaders, median of three processes."""
    found = {}
    for name in PEERS:
        command = [python, str(Path(__file__).with_name("loader_peers.py"))]
        where = [name, str(folder / name.split()[0]), str(flat)]
        subprocess.run([*command, "make", *where], check=True, timeout=600, stdout=subprocess.DEVNULL)
        reads = [subprocess.check_output([*command, "read", *where], timeout=600, text=True) for _ in range(3)]
        found[name] = statistics.median(float(read.split()[-1]) for read in reads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--peers")
    arguments = parser.parse_args()
    repetitions = arguments.repetitions
    torch.set_num_threads(1)
    opened: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        spans, flat = make_data(Path(folder))
        sys.addaudithook(lambda event, args: opened.update([str(args[0])]) if event == "open" else None)
        all_loaders = loaders(spans, flat)
        readers = [read() for read in all_loaders.values()]
        for batches in zip(*readers, strict=True):  # also warms the page cache
            if not all(same(batch, batches[0]) for batch in batches):
                raise SystemExit("the loaders do not deliver the same samples")
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in all_loaders}
        for _ in range(repetitions):
            for key, read in all_loaders.items():
                start = time.process_time()
                for _batch in read():
                    pass
                seconds[key].append(time.process_time() - start)
        opens = {opened[str(span.file)] for span in spans}
        peers = peers_of(arguments.peers, Path(folder), flat) if arguments.peers else {}
        waiting = beside_steps(spans, all_loaders[PAIRS, RAW[1]], repetitions)
        asked, (at_0, at_90, ratio) = asked_of_the_disk(Path(folder)), first_batches(Path(folder))
    rows = []
    for (kind, name), values in seconds.items():
        ratios = [statistics.median(a / b for a, b in zip(values, seconds[kind, raw], strict=True)) for raw in RAW]
        median = statistics.median(values)
        spread = f"{min(values):.3f} - {max(values):.3f}"
        per_sample = f"{median / SAMPLES * 1e6:.1f}"
        target = "" if not name.startswith("Sluice") else "≤ 0.9 of the whole batch" if kind == PAIRS else "≤ 0.5"
        rows.append([name, kind, f"{median:.3f}", spread, per_sample, *(f"{ratio:.2f}" for ratio in ratios), target])
    ours = statistics.median(seconds[PAIRS, "Sluice, sampler and `BatchLoader`"])
    once = zip(seconds[PAIRS, "Sluice, sampler and `BatchLoader`"], seconds[PAIRS, ONCE], strict=True)
    next(row for row in rows if row[0].startswith("Sluice, sampler"))[-1] += (
        f"; {statistics.median(a / b for a, b in once):.2f} of it widened once"
    )
    for name, value in peers.items():
        limit = 0.25 if name.startswith("Hugging") else 0.1
        per_sample = f"{value / SAMPLES * 1e6:.1f}"
        target = f"Sluice is {ours / value:.3f} of it (≤ {limit})"
        rows.append([name, PAIRS, f"{value:.3f}", "", per_sample, "", "", target])
    write_table(
        "loader",
        "What reading one epoch costs",
        f"{SAMPLES:,} samples of {LENGTH:,} uint16 tokens, shuffled, batch {BATCH}; {repetitions} interleaved "
        f"repetitions, CPU seconds of all threads. Sluice opened each of its {SHARDS} shards "
        f"{' or '.join(map(str, sorted(opens)))} time in this process, over all repetitions. How it is measured: "
        f"`benchmarks/loader.py`. torch {torch.__version__}, numpy {np.__version__}.\n\n"
        f"Of the file system an epoch asks, for the {SHARDS} shards and {SAMPLES:,} samples, in all: {asked}. "
        f"The first batch at 0 took {at_0 * 1e3:.2f} ms of CPU, at 90 % of an epoch of 10⁹ tokens "
        f"{at_90 * 1e3:.2f} ms: {ratio:.2f} × (≤ 1.2).\n\n"
        f"With a step of {STEP_S * 1e3:g} ms asleep behind each batch, as trainings read: {waiting[1]:.3f} s for the "
        f"epoch, the raw whole batch {waiting[0]:.3f} s: {waiting[1] / waiting[0]:.2f} ×.",
        [
            "loader",
            "delivers",
            "CPU s",
            "min - max",
            "µs per sample",
            "÷ raw per sample",
            "÷ raw whole batch",
            "target",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
