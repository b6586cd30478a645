"""Deliver training batches. A background thread reads them ahead.

    GlobalOrderSampler   yields the sample indices of this rank for each optimizer step (pipeline/data/sample_order.py)
    MappedDataset        maps every file once; `read` copies a whole batch (pipeline/data/samples.py)
    BatchLoader          reads ahead in a thread, copies each batch to the device and converts its tokens there

Tokens keep their 2 (or 4) bytes until they are on the device. The loader uses a thread instead of worker processes,
because numpy releases the GIL while it copies. Copying batches between processes would take many times as long as
reading them (`benchmarks/results/loader.md`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from pipeline.base.device_thread import device_thread
from pipeline.data.sample_order import Int64Array
from pipeline.data.samples import MappedDataset

Batch = dict[str, Tensor]
"""Arrays by name, with samples along the first dimension.

Text has `tokens` of shape (B, T + 1). Prompts and dialogues also have `mask` of the same shape.
"""
_DEVICE_TYPES = {torch.uint16: torch.int64, torch.uint32: torch.int64}
"""Types of tokens in files, and the types to which they are converted on the device. Other types do not change."""


class BatchLoader(AbstractContextManager["BatchLoader"], Iterator[Batch]):
    """Iterate over this rank's batches on `device`, with tokens as int64.

    A background thread reads batches into host memory (page-locked on CUDA) before they are needed. The thread uses
    numpy only, because a torch operation would start an OpenMP pool in this thread. The consumer is the thread that
    iterates over the loader.

    The background thread hands over blocks of batches, because waking the consumer costs more than reading a small
    batch. The first block has one batch. Each further block has twice as many, up to `BLOCK_BYTES`. At least `DEPTH`
    blocks are read ahead. If the consumer needs less than `AHEAD_S` for them, more blocks are read ahead, up to
    `AHEAD_BYTES`, because a read from shared storage may take seconds.

    The consumer copies each batch to the device and converts the tokens there. If reading fails, `next` raises the
    error in place of the failed block. Iteration ends when a finite sampler ends. Use the loader as a context manager,
    or call :meth:`close`.

    Args:
        dataset: the samples.
        sampler: yields the sample indices of each batch, shape (B,), or (2, B) with positions in the order.
        device: device to which batches are copied.
    """

    DEPTH = 2
    """Number of blocks that are always read ahead."""
    BLOCK_BYTES = 1 << 20
    """Maximum size of a block that has more than one batch.

    Handing over a block of this size is cheap compared with reading it, and the block fits into the cache of a core.
    """
    AHEAD_S = 10.0
    """The loader reads as many batches ahead as the consumer needs in this time, in seconds."""
    AHEAD_BYTES = 1 << 28
    """Maximum size of the batches that are read ahead. `DEPTH` blocks are read ahead even if they are larger."""

    def __init__(self, dataset: MappedDataset, sampler: Iterable[Int64Array], device: torch.device) -> None:
        self.data_wait_s = 0.0
        """Seconds that the last call of `next` waited until its batch had been read."""
        self._dataset = dataset
        self._indices = iter(sampler)
        self._device = device
        self._block: list[Batch] = []  # remaining batches of the current block, last batch first
        # Blocks from the background thread. An exception takes the place of a block and is the last item.
        self._ready: queue.SimpleQueue[list[Batch] | BaseException] = queue.SimpleQueue()
        self._block_size = 1  # number of batches in the next block
        self._changed = threading.Condition()  # protects the attributes below and is notified when they change
        self._waiting_blocks = 0  # blocks that were read, but not taken by the consumer
        self._waiting_batches = 0  # batches in these blocks
        self._target_ahead = 0.0  # number of batches to read ahead, computed from the consumer's speed
        self._max_ahead = 0  # number of batches that fit into `AHEAD_BYTES`
        self._last_taken_time = 0.0  # when the consumer took its last block, in seconds of `time.perf_counter`
        self._last_taken_batches = 0  # number of batches in this block
        self._is_closed = False
        self._end: BaseException | None = None  # the exception that the thread handed over as its last item
        # A daemon thread does not keep the process alive if the trainer fails without calling close().
        self._thread = device_thread(self._read_ahead, "sluice-batches")
        self._thread.start()

    def __next__(self) -> Batch:
        self.data_wait_s = 0.0
        if not self._block:
            self._take_block()
        # The copy to CUDA is asynchronous. torch's host allocator keeps the page-locked buffer until the copy is done.
        return {
            name: array.to(self._device, non_blocking=True).to(_DEVICE_TYPES.get(array.dtype, array.dtype))
            for name, array in self._block.pop().items()
        }

    def _take_block(self) -> None:
        """Take the next block from the background thread.

        Raises StopIteration after :meth:`close` or when the sampler has ended, otherwise the exception with which
        reading failed.
        """
        if self._is_closed:
            raise StopIteration
        start = time.perf_counter()
        block = self._end or self._ready.get()
        now = time.perf_counter()
        self.data_wait_s = now - start
        if isinstance(block, BaseException):
            self._end = block
            raise block
        with self._changed:
            if self._last_taken_batches:
                # The consumer used the batches of its last block from `_last_taken_time` to `start`.
                self._target_ahead = self.AHEAD_S * self._last_taken_batches / max(1e-6, start - self._last_taken_time)
            self._last_taken_time = now
            self._last_taken_batches = len(block)
            self._block = block
            self._waiting_blocks -= 1
            self._waiting_batches -= len(block)
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread and wait until it has read its current block. Later calls of `next` raise StopIteration."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._block = []
        self._thread.join()

    def __exit__(self, *exception_info: object) -> None:
        """Close the loader."""
        self.close()

    def _read_ahead(self) -> None:
        """Read blocks until the sampler ends, reading fails or the loader is closed. Runs in the background thread."""
        has_more = True
        while has_more:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._should_read())
                if self._is_closed:
                    return
            has_more = self._read_block()

    def _read_block(self) -> bool:
        """Read a block and hand it over to the consumer. Return False if there are no further blocks.

        If reading fails or the sampler has ended, hand over the exception instead and return False.
        """
        try:
            batch_indices = list(islice(self._indices, self._block_size))
            if not batch_indices:
                raise StopIteration
            block = self._read_batches(batch_indices)
        except BaseException as error:
            self._ready.put(error)
            return False
        # Even a small batch needs memory for its Python objects, so at least 1 KiB is counted.
        batch_bytes = max(1024, sum(array.nbytes for array in block[0].values()))
        with self._changed:
            self._waiting_blocks += 1
            self._waiting_batches += len(block)
            self._max_ahead = self.AHEAD_BYTES // batch_bytes
        self._ready.put(block)  # From now on, only the consumer uses the block.
        self._block_size = max(1, min(2 * self._block_size, self.BLOCK_BYTES // batch_bytes))
        return True

    def _should_read(self) -> bool:
        """Return True if fewer blocks and batches are waiting than should be read ahead."""
        return self._waiting_blocks < self.DEPTH or self._waiting_batches < min(self._target_ahead, self._max_ahead)

    def _read_batches(self, batch_indices: list[Int64Array]) -> list[Batch]:
        """Read several batches at once and return them in reverse order, in the types of the files."""
        sizes = [indices.shape[-1] for indices in batch_indices]
        host = self._dataset.allocate_batch(sum(sizes), pin=self._device.type == "cuda")
        out = {name: array.numpy() for name, array in host.items()}
        self._dataset.read(np.concatenate(batch_indices, axis=-1), out=out)
        arrays_of_batches = zip(*(array.split(sizes) for array in host.values()), strict=True)
        return [dict(zip(host, arrays, strict=True)) for arrays in arrays_of_batches][::-1]
