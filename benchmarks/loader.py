"""Measure the CPU seconds to read one shuffled epoch, compared with raw np.memmap and torch's DataLoader.

    python -m benchmarks.loader [--repetitions 9] [--peers PYTHON]     # benchmarks/loader_peers.py describes PYTHON

The data is 20,480 samples of 2,048 uint16 tokens (plus the last target) in batches of 8. Sluice reads 8 HDF5 shards,
and the other loaders read one flat file. The benchmark checks that all loaders read the same samples in the same order.
CPU seconds are user and system time of all threads, with a warm page cache. Each round measures each loader once. A
ratio is the median of the ratios of all rounds. A loader is compared with the raw loops that return the same kind of
batch: uint16 arrays, or pairs of int64 tensors (inputs, targets).

In the rows of the table, the batches are not used. This is the worst case for a thread that reads ahead. The note above
the table has the relevant result, with a step of 1 ms after each batch, as during training. It also has the system
calls of an epoch (with strace), and the time of the first batch at 0 and at 90 % of an epoch of 10⁹ tokens.
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

from benchmarks.loader_peers import BATCH, LENGTH, PEERS, SAMPLES, make_inputs_and_targets
from benchmarks.table import write_table
from pipeline.data.loader import BatchLoader
from pipeline.data.manifest import ShardEntry
from pipeline.data.sample_order import GlobalOrderSampler, compute_index_range
from pipeline.data.samples import TokenDataset

SHARDS = 8
STEP_S = 1e-3
"""Duration of the step that `measure_with_steps` simulates."""
SYSTEM_CALLS = "open,openat,stat,lstat,newfstatat,statx,access,fstat,lseek,getdents64,readlink"
CPU = torch.device("cpu")
ARRAYS = "uint16 array"
PAIRS = "int64 pair"
RAW_LOOPS = ("raw memmap, per sample", "raw memmap, per batch")
"""Names of the raw loops with which the loaders are compared."""
RAW_VIEWS = "raw memmap, per batch, inputs and targets are views"
SLUICE = "Sluice, sampler and `BatchLoader`"
Pair = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets of a batch, or of a sample."""


def make_data(folder: Path) -> tuple[list[ShardEntry], Path]:
    """Write HDF5 shards and a flat file with the same samples. The last token of a shard is the first of the next."""
    tokens = np.random.default_rng(0).integers(0, 65536, SAMPLES * LENGTH + 1, dtype=np.uint16)
    size = SAMPLES // SHARDS * LENGTH
    entries = []
    for i in range(SHARDS):
        path = folder / f"tokens-{i}.h5"
        with h5py.File(path, "w") as file:
            shard = file.create_dataset("tokens", data=tokens[i * size : (i + 1) * size + 1])
            entries.append(
                ShardEntry.model_construct(
                    file=str(path), tokens=len(shard), offset=shard.id.get_offset(), dtype="uint16"
                )
            )
    flat_file = folder / "tokens.bin"
    tokens.tofile(flat_file)
    return entries, flat_file


def convert_to_pair(tokens: np.ndarray) -> Pair:
    """Return inputs and targets of samples of shape (…, T + 1), each converted to int64."""
    return torch.from_numpy(tokens[..., :-1].astype(np.int64)), torch.from_numpy(tokens[..., 1:].astype(np.int64))


class SampleDataset(Dataset[Pair]):
    """The usual map-style dataset: one slice of the memory map per sample."""

    def __init__(self, tokens: np.memmap[Any, Any]) -> None:
        self.tokens = tokens

    def __getitem__(self, i: int) -> Pair:
        """Return the inputs and targets of sample `i`."""
        return convert_to_pair(self.tokens[i * LENGTH : i * LENGTH + LENGTH + 1])


class BatchDataset(SampleDataset):
    """A dataset with one index operation per batch, as DataLoader's `__getitems__` allows."""

    def __getitems__(self, indices: list[int]) -> Pair:
        """Return the inputs and targets of a batch."""
        return convert_to_pair(self.tokens[np.array(indices)[:, None] * LENGTH + np.arange(LENGTH + 1)])


def make_loaders(entries: list[ShardEntry], flat_file: Path) -> dict[tuple[str, str], Callable[[], Iterator[Any]]]:
    """Return the loaders by (kind of batch, name). A loader is a function that returns the batches of one epoch."""
    dataset = TokenDataset(entries, LENGTH)
    tokens = np.memmap(flat_file, np.uint16, "r")
    order = compute_index_range(1, 0, SAMPLES, SAMPLES).reshape(-1, BATCH)
    sample_dataset = SampleDataset(tokens)
    batch_dataset = BatchDataset(tokens)

    def stack_samples(indices: np.ndarray) -> Pair:
        """Read the samples with these indices one by one, and return them as a batch."""
        inputs, targets = zip(*(sample_dataset[i] for i in indices), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def read_with_sluice() -> Iterator[Pair]:
        """Yield the batches of one epoch, as the trainer reads them."""
        sampler = GlobalOrderSampler(dataset, global_batch=BATCH, seed=1, num_replicas=1, rank=0)
        with BatchLoader(dataset, sampler, CPU) as reader:
            for batch in islice(reader, len(sampler)):
                yield batch["tokens"][:, :-1], batch["tokens"][:, 1:]

    return {
        (ARRAYS, RAW_LOOPS[0]): lambda: (
            np.stack([tokens[i * LENGTH : i * LENGTH + LENGTH + 1] for i in indices]) for indices in order
        ),
        (ARRAYS, RAW_LOOPS[1]): lambda: (
            tokens[indices[:, None] * LENGTH + np.arange(LENGTH + 1)] for indices in order
        ),
        (ARRAYS, "Sluice, `TokenDataset.read`"): lambda: (dataset.read(indices)["tokens"] for indices in order),
        (PAIRS, RAW_LOOPS[0]): lambda: map(stack_samples, order),
        (PAIRS, RAW_LOOPS[1]): lambda: (batch_dataset.__getitems__(indices) for indices in order.tolist()),
        (PAIRS, RAW_VIEWS): lambda: (
            make_inputs_and_targets(tokens[indices[:, None] * LENGTH + np.arange(LENGTH + 1)]) for indices in order
        ),
        (PAIRS, "DataLoader, no workers, per sample"): lambda: iter(
            DataLoader(sample_dataset, batch_sampler=order.tolist())
        ),
        (PAIRS, "DataLoader, no workers, per batch"): lambda: iter(
            DataLoader(batch_dataset, batch_sampler=order.tolist(), collate_fn=lambda batch: batch)
        ),
        (PAIRS, SLUICE): read_with_sluice,
    }


def measure_with_steps(
    entries: list[ShardEntry], read_raw: Callable[[], Iterator[Pair]], repetitions: int
) -> tuple[float, float]:
    """Measure an epoch in which a step that sleeps follows each batch.

    Returns:
        Median CPU seconds of the raw loop and of Sluice, minus the median of a loop that only sleeps. The first
        repetition does not count, because Sluice allocates its buffers in it.
    """
    dataset = TokenDataset(entries, LENGTH)
    sampler = GlobalOrderSampler(dataset, global_batch=BATCH, seed=1, num_replicas=1, rank=0)
    rounds: list[list[float]] = []
    with BatchLoader(dataset, sampler, CPU) as reader:
        sluice_batches = ((batch["tokens"][:, :-1], batch["tokens"][:, 1:]) for batch in reader)
        for _ in range(repetitions + 1):
            rounds.append([])
            for batches in (repeat(None), read_raw(), sluice_batches):
                start = time.process_time()
                for _batch in islice(batches, SAMPLES // BATCH):
                    time.sleep(STEP_S)
                rounds[-1].append(time.process_time() - start)
    sleep_s, raw_s, sluice_s = (statistics.median(values) for values in zip(*rounds[1:], strict=True))
    return raw_s - sleep_s, sluice_s - sleep_s


def is_batch_equal(batch: Any, expected: np.ndarray) -> bool:
    """Return True if a batch (an array or a pair) has the tokens `expected` of shape (B, T + 1)."""
    if isinstance(batch, np.ndarray):
        return np.array_equal(batch, expected)
    return np.array_equal(batch[0], expected[:, :-1]) and np.array_equal(batch[1], expected[:, 1:])


def count_system_calls(entries: list[ShardEntry], folder: Path) -> str:
    """Return how often a process that reads one epoch calls each of SYSTEM_CALLS for the files of the shards."""
    names = ", ".join(f"{entry.file!r}: ({entry.tokens}, {entry.offset})" for entry in entries)
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
    command = ["strace", "-f", "-y", "-e", f"trace={SYSTEM_CALLS}", "-o", str(trace), sys.executable, "-c", code]
    subprocess.run(command, check=True, timeout=300)
    calls = Counter(
        match[1] for line in trace.read_text().splitlines()
        if "tokens-" in line and (match := re.match(r"\d+ +(\w+)\(", line))
    )  # fmt: skip
    return ", ".join(f"{count} {name}" for name, count in sorted(calls.items()))


def measure_first_batches(folder: Path, pairs: int = 40) -> tuple[float, float, float]:
    """Measure the first batch at 0 and at 90 % of an epoch of 10⁹ tokens, including the creation of the sampler.

    Returns:
        The median CPU seconds at 0 %, the median CPU seconds at 90 %, and the median of the ratios of all pairs.
    """
    path = folder / "sparse.h5"
    tokens = 10**9 + 1
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


def measure_peers(python: str, folder: Path, flat_file: Path) -> dict[str, float]:
    """Return the CPU seconds of an epoch for each other library: the median of three processes.

    Args:
        python: path of a Python that has these libraries.
        folder: where the libraries write the samples in their formats.
        flat_file: the flat file with the samples.
    """
    seconds = {}
    for name in PEERS:
        command = [python, str(Path(__file__).with_name("loader_peers.py"))]
        arguments = [name, str(folder / name.split()[0]), str(flat_file)]
        subprocess.run([*command, "make", *arguments], check=True, timeout=600, stdout=subprocess.DEVNULL)
        outputs = [subprocess.check_output([*command, "read", *arguments], timeout=600, text=True) for _ in range(3)]
        seconds[name] = statistics.median(float(output.split()[-1]) for output in outputs)
    return seconds


def main() -> None:
    """Check that all loaders return the same samples, measure them, and write benchmarks/results/loader.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--peers")
    arguments = parser.parse_args()
    repetitions = arguments.repetitions
    torch.set_num_threads(1)
    open_counts_by_file: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        entries, flat_file = make_data(Path(folder))
        sys.addaudithook(lambda event, args: open_counts_by_file.update([str(args[0])]) if event == "open" else None)
        loaders = make_loaders(entries, flat_file)
        readers = [read() for read in loaders.values()]
        for batches in zip(*readers, strict=True):  # This loop also warms the page cache.
            if not all(is_batch_equal(batch, batches[0]) for batch in batches):
                raise SystemExit("the loaders do not return the same samples")
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in loaders}
        for _ in range(repetitions):
            for key, read in loaders.items():
                start = time.process_time()
                for _batch in read():
                    pass
                seconds[key].append(time.process_time() - start)
        open_counts_of_shards = {open_counts_by_file[str(entry.file)] for entry in entries}
        peers = measure_peers(arguments.peers, Path(folder), flat_file) if arguments.peers else {}
        raw_s, sluice_s = measure_with_steps(entries, loaders[PAIRS, RAW_LOOPS[1]], repetitions)
        system_calls = count_system_calls(entries, Path(folder))
        at_0, at_90, ratio = measure_first_batches(Path(folder))
    rows = []
    for (kind, name), values in seconds.items():
        ratios = [
            statistics.median(a / b for a, b in zip(values, seconds[kind, raw], strict=True)) for raw in RAW_LOOPS
        ]
        median = statistics.median(values)
        spread = f"{min(values):.3f} - {max(values):.3f}"
        per_sample = f"{median / SAMPLES * 1e6:.1f}"
        target = ""
        if name.startswith("Sluice"):
            target = "≤ 0.9 of raw per batch" if kind == PAIRS else "≤ 0.5"
        values_of_row = [f"{median:.3f}", spread, per_sample, *(f"{raw_ratio:.2f}" for raw_ratio in ratios)]
        rows.append([name, kind, *values_of_row, target])
    sluice_median = statistics.median(seconds[PAIRS, SLUICE])
    ratios_to_views = [a / b for a, b in zip(seconds[PAIRS, SLUICE], seconds[PAIRS, RAW_VIEWS], strict=True)]
    (sluice_row,) = [row for row in rows if row[0] == SLUICE]
    sluice_row[-1] += f"; {statistics.median(ratios_to_views):.2f} of raw with views"
    for name, value in peers.items():
        limit = 0.25 if name.startswith("Hugging") else 0.1
        per_sample = f"{value / SAMPLES * 1e6:.1f}"
        target = f"Sluice needs {sluice_median / value:.3f} of it (≤ {limit})"
        rows.append([name, PAIRS, f"{value:.3f}", "", per_sample, "", "", target])
    write_table(
        "loader",
        "CPU time to read one epoch",
        f"{SAMPLES:,} samples of {LENGTH:,} uint16 tokens, shuffled, batch {BATCH}; {repetitions} interleaved "
        f"repetitions, CPU seconds of all threads. In all repetitions together, Sluice opened each of its {SHARDS} "
        f"shards {' or '.join(map(str, sorted(open_counts_of_shards)))} time. Method: `benchmarks/loader.py`. "
        f"torch {torch.__version__}, numpy {np.__version__}.\n\n"
        f"System calls of an epoch for the {SHARDS} shards and {SAMPLES:,} samples: {system_calls}. "
        f"The first batch took {at_0 * 1e3:.2f} ms of CPU at the start of an epoch of 10⁹ tokens, and "
        f"{at_90 * 1e3:.2f} ms at 90 % of the epoch. Ratio: {ratio:.2f} (target: ≤ 1.2).\n\n"
        f"With a step of {STEP_S * 1e3:g} ms (sleep) after each batch, as during training: {sluice_s:.3f} s for the "
        f"epoch; with raw memmap, per batch: {raw_s:.3f} s. Ratio: {sluice_s / raw_s:.2f}.",
        [
            "loader",
            "batches",
            "CPU s",
            "min - max",
            "µs per sample",
            "÷ raw per sample",
            "÷ raw per batch",
            "target",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
