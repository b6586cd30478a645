"""Measure how many samples per second the worker processes of a dataset read, compared with torch's DataLoader.

    python -m benchmarks.dataset [--rounds 5] [--workers 1 2]

The dataset is that of examples/vit_tar.py: JPEG images of 256 × 256 in tar files, a random crop of 224 × 224 and a
random flip. The DataLoader has the same dataset, sampler order, batch size and number of workers, and torch's defaults
otherwise: workers are forked, and each reads ahead two batches. It sets no seed for each sample.

In each round, both loaders read the same batches, one after the other. The consumer does nothing with the batches, so
the workers limit the speed. The first batches are not measured, because both loaders fill their buffers with them. A
ratio is the median of the ratios of all rounds. CPU time is that of all processes. Before the measurement, the
benchmark checks that both loaders read the same labels in the same order, and arrays of the same shapes and types.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils.data import DataLoader

from benchmarks.table import write_table
from examples import make_tar_images, vit_tar
from pipeline.config.user_model import find_user_model
from pipeline.data.dataset import TRAIN_SPLIT, DatasetRequest, describe_dataset
from pipeline.data.dataset_pool import DatasetLoader, DatasetSamples
from pipeline.data.manifest import DatasetEntry
from pipeline.data.sample_order import GlobalOrderSampler, compute_index_range
from pipeline.run.code import CODE_ROOT

IMAGES = 600
IMAGE_SIZE = 256
CROP_SIZE = 224
BATCH = 32
UNMEASURED_BATCHES = 8
MEASURED_BATCHES = 30
HEADER = (
    "workers", "loader", "samples/s", "÷ DataLoader", "min - max", "target", "CPU µs per sample", "÷ DataLoader",
    "s to the first batch",
)  # fmt: skip
CPU = torch.device("cpu")


class TorchOrder:
    """The batches of `GlobalOrderSampler` as lists, which torch's DataLoader needs."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the numbers of the samples of each batch, without end."""
        step = 0
        while True:
            yield compute_index_range(1, step * BATCH, BATCH, self.samples).tolist()
            step += 1


def open_sluice(request: DatasetRequest) -> DatasetLoader:
    """Return Sluice's loader."""
    samples = DatasetSamples(request, BATCH)
    return DatasetLoader(samples, GlobalOrderSampler(samples, global_batch=BATCH, seed=1, num_replicas=1, rank=0), CPU)


def open_torch(dataset: Any, workers: int) -> DataLoader[Any]:
    """Return torch's loader."""
    return DataLoader(dataset, batch_sampler=TorchOrder(len(dataset)), num_workers=workers)


class Measurement(NamedTuple):
    """The measurement of a loader in one round."""

    samples_per_s: float
    cpu_us: float
    """Microseconds of CPU per sample, of this process and the workers."""
    first_s: float
    """Seconds from the start of the workers to the first batch."""


def measure(batches: Iterator[Any], start: float) -> Measurement:
    """Measure a loader whose workers were started at `start`, by time.perf_counter()."""
    next(batches)
    first_s = time.perf_counter() - start
    for _ in islice(batches, UNMEASURED_BATCHES):
        pass
    cpu_s = read_cpu_s()
    measured_start = time.perf_counter()
    for _ in islice(batches, MEASURED_BATCHES):
        pass
    seconds = time.perf_counter() - measured_start
    samples = MEASURED_BATCHES * BATCH
    return Measurement(samples / seconds, (read_cpu_s() - cpu_s) / samples * 1e6, first_s)


def read_cpu_s() -> float:
    """Return the seconds of CPU that this process and its descendants have used."""
    process = psutil.Process()
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def check_same_images(request: DatasetRequest, dataset: vit_tar.TarImages) -> None:
    """Check that both loaders read the same images in the same order, apart from the random crop and flip."""
    with open_sluice(request) as loader:
        for sluice_batch, torch_batch in islice(zip(loader, open_torch(dataset, 1), strict=False), 3):
            assert torch.equal(sluice_batch["labels"], torch_batch["labels"])
            for name, array in sluice_batch.items():
                assert (array.shape, array.dtype) == (torch_batch[name].shape, torch_batch[name].dtype)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_tar_images.main(Path(folder), IMAGES, IMAGE_SIZE)
        values = {"source": sorted(map(str, Path(folder).glob("*.tar"))), "size": CROP_SIZE}
        model = find_user_model("examples.vit_tar", [CODE_ROOT])
        entry = DatasetEntry(**describe_dataset(model, CODE_ROOT, values, has_held_out=False))
        dataset = vit_tar.dataset(values, TRAIN_SPLIT)
        check_same_images(DatasetRequest(model, CODE_ROOT, values, TRAIN_SPLIT, entry=entry), dataset)
        for workers in options.workers:
            request = DatasetRequest(model, CODE_ROOT, values, TRAIN_SPLIT, seed=1, entry=entry, workers=workers)
            rounds: list[tuple[Measurement, Measurement]] = []
            for _ in range(options.rounds):
                start = time.perf_counter()
                with open_sluice(request) as loader:
                    sluice = measure(loader, start)
                start = time.perf_counter()
                rounds.append((sluice, measure(iter(open_torch(dataset, workers)), start)))
            ratios = [sluice.samples_per_s / peer.samples_per_s for sluice, peer in rounds]
            cpu_ratios = [sluice.cpu_us / peer.cpu_us for sluice, peer in rounds]
            ratio_cells = [
                [f"{statistics.median(ratios):.3f}", f"{min(ratios):.2f} - {max(ratios):.2f}", "≥ 0.95"],
                ["1", "", ""],
            ]
            cpu_cells = [f"{statistics.median(cpu_ratios):.3f}", "1"]
            for name, measurements, cells, cpu_ratio in zip(
                ("Sluice", "DataLoader"), zip(*rounds, strict=True), ratio_cells, cpu_cells, strict=True
            ):
                speed, cpu_us, first_s = (statistics.median(values) for values in zip(*measurements, strict=True))
                rows.append([str(workers), name, f"{speed:.0f}", *cells, f"{cpu_us:.0f}", cpu_ratio, f"{first_s:.2f}"])
    write_table(
        "dataset",
        "Samples per second of a dataset",
        f"JPEG images of {IMAGE_SIZE} × {IMAGE_SIZE} from tar files, random crop of {CROP_SIZE} × {CROP_SIZE} and "
        f"random flip, batch {BATCH}; {options.rounds} interleaved rounds of {MEASURED_BATCHES} batches. Other "
        "programs used the machine as well, so compare the ratios, not the speeds. Method: `benchmarks/dataset.py`. "
        f"torch {torch.__version__}.",
        HEADER,
        rows,
    )


if __name__ == "__main__":
    main()
