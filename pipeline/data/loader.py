"""Deliver training batches: which samples this rank reads, and a thread that reads them ahead.

    MappedDataset        maps every file once; `read` copies a whole batch (pipeline/data/samples.py)
    GlobalOrderSampler   the sample indices of this rank for each optimizer step (pipeline/data/sample_order.py)
    BatchLoader          a thread reads ahead; the consumer copies each batch to the device and widens its tokens there

Tokens keep their 2 (or 4) bytes until they are on the device. A thread reads, not worker processes, because numpy
releases the GIL while it copies. Copying batches between processes would cost many times the reading
(`benchmarks/results/loader.md`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from pipeline.base.device_thread import device_thread
from pipeline.base.errors import UserError
from pipeline.data.sample_order import Int64Array, assign_to_ranks, compute_indices
from pipeline.data.samples import MappedDataset

Batch = dict[str, Tensor]
"""Arrays by name, samples along the first dimension; of text `tokens` alone, shape (B, T + 1)."""
_WIDE = {torch.uint16: torch.int64, torch.uint32: torch.int64}  # these are tokens
_SAMPLES_AHEAD = 4096  # sample numbers computed at once, to amortize numpy's cost per call


class GlobalOrderSampler(DistributedSampler[Int64Array]):
    """Yield the sample indices that this rank reads in each optimizer step; endless.

    Step k of the run takes the samples [k * G, (k + 1) * G) of the run, G = `global_batch`, in the order of
    `pipeline/data/sample_order.py`. Rank r of W takes the positions [r * G / W, (r + 1) * G / W) of them. The layout
    therefore only splits a batch: the ranks' samples together are always the same global batch.

    Each item is an int64 array of dataset indices, shape (G / W,). If the dataset needs positions, the shape is
    (2, G / W): indices, then positions in the order. If the dataset has lengths, the samples of a global batch are
    assigned to ranks so that the sums of their lengths are balanced (`assign_to_ranks`).

    Epochs follow each other without a call of `set_epoch`, which has no effect.

    Args:
        dataset: the samples.
        global_batch: G, the samples of an optimizer step over all ranks.
        seed: of the order, for data of one source.
        samples_consumed: run-global number of the first sample.
        left_out: (position, count) ranges of the order to skip (pipeline/resilience/guard.py).
        num_replicas, rank: data parallel size and rank; None: those of the default process group.
        order: returns the dataset indices of sample numbers; None: the order of one source with this `seed`.

    Raises UserError if W does not divide G.
    """

    def __init__(
        self,
        dataset: MappedDataset,
        *,
        global_batch: int,
        seed: int,
        samples_consumed: int = 0,
        left_out: Sequence[tuple[int, int]] = (),
        num_replicas: int | None = None,
        rank: int | None = None,
        order: Callable[[Int64Array], Int64Array] | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)
        if global_batch % self.num_replicas:
            ranks = self.num_replicas
            raise UserError(
                "config.conflict",
                f"train.global_batch ({global_batch}) is not a multiple of the {ranks} data parallel ranks",
            )
        self.global_batch = global_batch
        self.samples_consumed, self.left_out = samples_consumed, sorted(left_out)
        self.lengths, self.needs_positions, self._size = dataset.lengths, dataset.needs_positions, len(dataset)
        self.order = order or partial(compute_indices, seed, n=self._size)

    def __len__(self) -> int:
        """Return the optimizer steps of one epoch, ceil(n / G). Iteration does not end there."""
        return -(-self._size // self.global_batch)

    def __iter__(self) -> Iterator[Int64Array]:
        local = self.global_batch // (1 if self.lengths else self.num_replicas)
        steps = max(1, min(_SAMPLES_AHEAD // local, len(self)))  # at most one epoch at once
        first = self.samples_consumed + (0 if self.lengths else self.rank * local)
        offsets = self.global_batch * np.arange(steps, dtype=np.int64)[:, None] + np.arange(local, dtype=np.int64)
        while True:
            positions = first + offsets
            for start, count in self.left_out:
                positions[positions >= start] += count
            for batch in np.stack([self.order(positions), positions], axis=1):
                if self.lengths:
                    batch = batch[:, assign_to_ranks(self.lengths(batch[0]), self.num_replicas)[self.rank]]
                yield batch if self.needs_positions else batch[0]
            first += steps * self.global_batch


class BatchLoader(AbstractContextManager["BatchLoader"], Iterator[Batch]):
    """Iterate over this rank's batches on `device`; tokens are int64 there.

    A background thread reads ahead of the consumer into host memory (page-locked on CUDA). It uses numpy only: a torch
    operation would start an OpenMP pool in this thread.

    The thread hands over blocks of batches, because waking the consumer costs more than reading a small batch. The
    first block has one batch, and each further block has twice as many, up to `BLOCK_BYTES`. Up to `DEPTH` blocks are
    read ahead, or more if the consumer would need less than `AHEAD_S` for them, because a read from shared storage may
    take seconds.

    The consumer copies each batch to the device and converts its tokens there. An error of the reader is raised by
    `next` in place of the failed block. Iteration ends when a finite sampler ends. Use the loader as a context manager,
    or call :meth:`close`.

    Args:
        dataset: the samples.
        sampler: the sample indices of each batch, shape (B,), or (2, B) with positions.
        device: where batches are delivered.
    """

    DEPTH = 2
    BLOCK_BYTES = 1 << 20
    """Handing over a block of this size is cheap compared with reading it, and it fits into a core's cache."""
    AHEAD_S = 10.0
    AHEAD_BYTES = 1 << 28
    """Maximum size of what is read ahead beyond `DEPTH` blocks."""

    def __init__(self, dataset: MappedDataset, sampler: Iterable[Int64Array], device: torch.device) -> None:
        self.data_wait_s = 0.0
        """Seconds that the consumer waited for the last batch to be read."""
        self._dataset = dataset
        self._indices = iter(sampler)
        self._device = device
        self._block: list[Batch] = []  # the rest of the current block, last batch first
        self._ready: queue.SimpleQueue[list[Batch] | BaseException] = queue.SimpleQueue()
        self._block_size = 1  # batches of the next block
        self._room = threading.Condition()  # guards what follows
        self._waiting_blocks = 0
        self._waiting = 0  # batches that are read, but not taken
        self._ahead = 0.0  # batches to read ahead
        self._max_ahead = 0
        self._taken_time = 0.0  # when the last block was taken
        self._taken = 0  # its number of batches
        self._is_closed = False
        self._end: BaseException | None = None
        # A daemon thread does not keep a trainer alive that fails without calling close().
        self._thread = device_thread(self._read_ahead, "sluice-batches")
        self._thread.start()

    def __next__(self) -> Batch:
        self.data_wait_s = 0.0
        if not self._block:
            self._take_block()
        # On CUDA torch's host allocator keeps the page-locked buffer until the copy has finished.
        return {
            name: array.to(self._device, non_blocking=True).to(_WIDE.get(array.dtype, array.dtype))
            for name, array in self._block.pop().items()
        }

    def _take_block(self) -> None:
        """Take the next block from the thread. Raises what ended the reading."""
        if self._is_closed:
            raise StopIteration
        start = time.perf_counter()
        block = self._end or self._ready.get()
        now = time.perf_counter()
        self.data_wait_s = now - start
        if isinstance(block, BaseException):
            self._end = block
            raise block
        with self._room:
            if self._taken:
                self._ahead = self.AHEAD_S * self._taken / max(1e-6, start - self._taken_time)
            self._taken_time = now
            self._taken = len(block)
            self._block = block
            self._waiting_blocks -= 1
            self._waiting -= len(block)
            self._room.notify()

    def close(self) -> None:
        """Stop the thread and wait for it, at most for the block that it is reading. Further `next` calls stop."""
        with self._room:
            self._is_closed = True
            self._room.notify()
        self._block = []
        self._thread.join()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_ahead(self) -> None:
        """Wait for room and read a block, until there are no more (runs in the thread)."""
        has_more = True
        while has_more:
            with self._room:
                self._room.wait_for(lambda: self._is_closed or self._has_room())
                if self._is_closed:
                    return
            has_more = self._read_block()

    def _read_block(self) -> bool:
        """Read a block and hand it over, or the exception that ends the reading. Return whether there may be more."""
        try:
            requested = list(islice(self._indices, self._block_size))
            if not requested:
                raise StopIteration
            block = self._read_batches(requested)
        except BaseException as error:
            self._ready.put(error)
            return False
        batch_bytes = max(1024, sum(array.nbytes for array in block[0].values()))  # at least the Python objects
        with self._room:
            self._waiting_blocks += 1
            self._waiting += len(block)
            self._max_ahead = self.AHEAD_BYTES // batch_bytes
        self._ready.put(block)  # from here on it belongs to the consumer
        self._block_size = max(1, min(2 * self._block_size, self.BLOCK_BYTES // batch_bytes))
        return True

    def _has_room(self) -> bool:
        return self._waiting_blocks < self.DEPTH or self._waiting < min(self._ahead, self._max_ahead)

    def _read_batches(self, requested: list[Int64Array]) -> list[Batch]:
        """Read several batches at once, in the types of the files. Return them last batch first."""
        sizes = [indices.shape[-1] for indices in requested]
        host = self._dataset.buffer(sum(sizes), pin=self._device.type == "cuda")
        out = {name: array.numpy() for name, array in host.items()}
        self._dataset.read(np.concatenate(requested, axis=-1), out=out)
        parts = zip(*(array.split(sizes) for array in host.values()), strict=True)
        return [dict(zip(host, arrays, strict=True)) for arrays in parts][::-1]
