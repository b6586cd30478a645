"""From mapped samples to a batch on the device: sampler and background reader.

    pipeline/data/samples.py  maps every file into memory once; `read` copies a whole batch
      -> GlobalOrderSampler   which indices this rank reads at each optimizer step (see sample_order.py)
      -> Batches              a thread reads ahead; the consumer moves a batch to the device and widens its tokens there

Tokens stay 2 (or 4) bytes wide until they are on the device; and a thread reads ahead, because numpy's copies release
the GIL, while worker processes would cost many times the reading in copies between processes
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
_SAMPLES_AHEAD = 4096  # how many sample numbers the sampler computes at once: numpy's cost per call is spread


class GlobalOrderSampler(DistributedSampler[Int64Array]):
    """Which samples this rank reads, one array per optimizer step; endless.

    Optimizer step k of the run takes the run-global samples [k*G, (k + 1)*G), G = `global_batch`, in the order
    of `pipeline/data/sample_order.py`; rank r of W takes the contiguous positions [r*G/W, (r + 1)*G/W) of them. So the
    layout only splits a batch, and ranks put behind one another are always the same global batch.

    Iterating yields int64 arrays of dataset indices, shape (G/W,), from run-global sample `samples_consumed` on; the
    order jumps over the (position, count) ranges `left_out` (pipeline/resilience/guard.py), which move what comes after
    them. Epochs follow one another by themselves: `set_epoch` has no effect. `num_replicas` and `rank` come from the
    default process group if they are not given (in a mesh, give the data parallel size and rank). Raises UserError if W
    does not divide G.

    Where the dataset is `numbered` the arrays have the shape (2, G/W), positions in the order behind indices. Where it
    has `lengths` a rank takes as many samples of the same global batch, but which ones
    is dealt so that the ranks' sums of lengths are even (`pipeline/data/sample_order.py`, `deal`).
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
        """`order`: dataset indices of sample numbers; without it those of one source, by `seed`."""
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)
        if global_batch % self.num_replicas:
            ranks = self.num_replicas
            raise UserError(
                "config.conflict", f"train.global_batch ({global_batch}) is no multiple of {ranks} data parallel ranks"
            )
        self.global_batch = global_batch
        self.samples_consumed, self.left_out = samples_consumed, sorted(left_out)
        self.lengths, self.needs_positions, self._size = dataset.lengths, dataset.needs_positions, len(dataset)
        self.order = order or partial(compute_indices, seed, n=self._size)

    def __len__(self) -> int:
        """Optimizer steps of one epoch, a last partial one counted: ceil(n / G). Iterating does not end there."""
        return -(-self._size // self.global_batch)

    def __iter__(self) -> Iterator[Int64Array]:
        local = self.global_batch // (1 if self.lengths else self.num_replicas)  # to be dealt, all of it is looked at
        steps = max(1, min(_SAMPLES_AHEAD // local, len(self)))  # not many epochs of a small dataset
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
    """Iterator over a rank's batches on `device`; tokens are int64 there.

    A thread reads what `sampler` yields ahead into (on CUDA page-locked) host memory, with numpy only: no torch
    operation runs there, so it starts no OpenMP pool of its own. It reads and hands over blocks of batches, first of
    one, then of two, four, … up to `BLOCK_BYTES`: waking the other thread costs more than reading a small batch. Up to
    `DEPTH` blocks wait, and more where the consumer would be through with them in less than `AHEAD_S`: shared storage
    may take seconds for a read. A consumer that took less than `HURRIED_S` per batch reads the next block itself
    while the thread rests: two threads that both want Python's lock all the time are slower than one. The consumer
    copies a batch to the device, without waiting for it on CUDA, and widens it there. What reading raises, `next`
    raises in the place of the block that failed; the end of a finite sampler ends the iteration. Use it as a context
    manager or call :meth:`close`.
    """

    DEPTH = 2
    BLOCK_BYTES = 1 << 20  # handing one over costs little against reading it, and a core's own cache holds it
    AHEAD_S = 10.0
    AHEAD_BYTES = 1 << 28
    """What may wait beyond `DEPTH` blocks, at most."""
    HURRIED_S = 2e-4
    """No training step is so short."""

    def __init__(self, dataset: MappedDataset, sampler: Iterable[Int64Array], device: torch.device) -> None:
        self.data_wait_s = 0.0
        """Seconds that the consumer waited for the last batch to be read."""
        self._dataset, self._indices, self._device = dataset, iter(sampler), device
        self._block: list[Batch] = []  # what is left of the block in hand, last batch first
        self._ready: queue.SimpleQueue[list[Batch] | BaseException] = queue.SimpleQueue()
        self._reading = threading.Lock()  # held from asking the sampler for a block until it is handed over
        self._size = 1  # batches of the next block
        self._room = threading.Condition()
        self._blocks = self._waiting = 0  # blocks and batches that are read and not taken
        self._ahead, self._most_ahead = 0.0, 0  # batches that should wait, and that may
        self._taken_at, self._taken = 0.0, 0  # when the last block was taken, and its batches
        self._hurried = self._closed = False
        self._end: BaseException | None = None
        # A daemon, so that a trainer that dies without close() is not kept alive by its reader.
        self._thread = device_thread(self._read_ahead, "sluice-batches")
        self._thread.start()

    def __next__(self) -> Batch:
        self.data_wait_s = 0.0
        if not self._block:
            self._take_block()
        # On CUDA torch's host allocator keeps the page-locked buffer until the copy is done.
        return {
            name: array.to(self._device, non_blocking=True).to(_WIDE.get(array.dtype, array.dtype))
            for name, array in self._block.pop().items()
        }

    def _take_block(self) -> None:
        """The next block; raise what ended reading."""
        if self._closed:
            raise StopIteration
        start = time.perf_counter()
        with self._room:
            self._hurried = start - self._taken_at < self.HURRIED_S * self._taken
            self._wake()
        block = self._end or (self._take_or_read() if self._hurried else self._ready.get())
        now = time.perf_counter()
        self.data_wait_s = now - start
        if isinstance(block, BaseException):
            self._end = block
            raise block
        with self._room:
            if self._taken:
                self._ahead = self.AHEAD_S * self._taken / max(1e-6, start - self._taken_at)
            self._taken_at, self._taken, self._block = now, len(block), block
            self._blocks -= 1
            self._waiting -= len(block)
            self._wake()

    def _take_or_read(self) -> list[Batch] | BaseException:
        """The next block: the thread's where it read one, or was about to."""
        with self._reading:
            if self._ready.empty():
                self._read_block()
            return self._ready.get()

    def _wake(self) -> None:
        """Let the thread look whether there is room; one that rests is let rest, waking it costs."""
        if not self._hurried:
            self._room.notify()

    def close(self) -> None:
        """End the thread and wait for it (at most for the block that it is reading); later `next` calls stop."""
        with self._room:
            self._closed = True
            self._room.notify()
        self._block = []
        self._thread.join()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_ahead(self) -> None:
        """The thread: wait for room and read a block, until there is no more."""
        more = True
        while more:
            with self._room:
                self._room.wait_for(lambda: self._closed or (self._has_room() and not self._hurried))
                if self._closed:
                    return
            with self._reading:
                more = self._read_block()

    def _read_block(self) -> bool:
        """Ask for a block, read it, hand it over; what ends reading is handed over too. Whether there may be more."""
        try:
            if not (asked := list(islice(self._indices, self._size))):
                raise StopIteration
            block = self._read(asked)
        except BaseException as error:
            self._ready.put(error)
            return False
        batch_bytes = max(1024, sum(array.nbytes for array in block[0].values()))  # Python's objects, at least
        with self._room:
            self._blocks += 1
            self._waiting += len(block)
            self._most_ahead = self.AHEAD_BYTES // batch_bytes
        self._ready.put(block)  # the consumer's from here on
        self._size = max(1, min(2 * self._size, self.BLOCK_BYTES // batch_bytes))
        return True

    def _has_room(self) -> bool:
        return self._blocks < self.DEPTH or self._waiting < min(self._ahead, self._most_ahead)

    def _read(self, asked: list[Int64Array]) -> list[Batch]:
        """Read batches in one go, in the files' types; the last one first."""
        sizes = [indices.shape[-1] for indices in asked]
        host = self._dataset.buffer(sum(sizes), pin=self._device.type == "cuda")
        self._dataset.read(np.concatenate(asked, axis=-1), out={name: array.numpy() for name, array in host.items()})
        parts = zip(*(array.split(sizes) for array in host.values()), strict=True)
        return [dict(zip(host, arrays, strict=True)) for arrays in parts][::-1]
