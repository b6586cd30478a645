"""From shards on disk to a batch of tokens on the device: dataset, sampler, background reader.

    shards (HDF5, one contiguous dataset each)
      -> TokenDataset        maps every shard into memory once; `read` copies a whole batch
      -> GlobalOrderSampler  which indices this rank reads at each optimizer step (the order: `pipeline/order.py`)
      -> Batches             a thread reads ahead; the consumer moves a batch to the device and widens it there

**A sample** is T + 1 consecutive tokens of one shard, T = `sequence_length`: inputs are its first T tokens,
targets its last T. Sample j of a shard covers tokens [j*T, j*T + T], so neighbours share one token and every
token but a shard's first is a target once. A shard of n tokens has (n - 1) // T samples. Samples never cross
shards: the (n - 1) % T tokens left at a shard's end are dropped. Samples are numbered through the shards in order.

**Why it is built so** (figures in `benchmarks/results/loader.md`): a contiguous HDF5 dataset is a plain array at a
known offset, so it is mapped without HDF5 and opened once per process; a whole batch is looked up at once and copied
row by row straight into its buffer; tokens stay 2 (or 4) bytes wide until they are on the device; and a thread reads
ahead, because numpy's copies release the GIL, while worker processes would cost many times the reading in copies
between processes.

**What must hold:** a shard must not be truncated while it is mapped (the operating system kills the reader with
SIGBUS): shards are written under another name, renamed, and never changed afterwards. Python keeps one file descriptor
open per mapped shard, so `ulimit -n` must exceed the number of shards.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from pipeline.device_thread import device_thread
from pipeline.errors import InputError, UserError
from pipeline.order import Int64Array, deal, indices_of

if TYPE_CHECKING:
    from pipeline.samples import SampleDataset

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

Batch = Tensor | dict[str, Tensor]

_TYPES = {"uint16": torch.uint16, "uint32": torch.uint32}

_SAMPLES_AHEAD = 4096  # how many sample numbers the sampler computes at once: numpy's cost per call is spread


@dataclass(frozen=True)
class ShardSpan:
    """Where the tokens of one shard lie."""

    path: Path
    """The HDF5 file."""
    tokens: int
    """Number of tokens."""
    offset: int
    """Byte offset of the first token in the file."""
    dtype: str
    """`uint16` or `uint32`."""


class TokenDataset(Dataset[TokenArray]):
    """Samples of `sequence_length` + 1 tokens over a list of shards (see the file's docstring).

    Every shard that holds a sample is opened once, here, and stays mapped. Raises InputError for a shard that is
    missing or too short and for token types that are unknown or differ; UserError if there is not a single sample.
    """

    lengths: Callable[[Int64Array], Int64Array] | None = None
    """All samples have the same."""

    def __init__(self, shards: Sequence[ShardSpan], sequence_length: int) -> None:
        usable = [shard for shard in shards if shard.tokens > sequence_length]
        if not usable:
            tokens, longest = sum(s.tokens for s in shards), max((s.tokens for s in shards), default=0)
            raise UserError(
                f"no training sample: one takes {sequence_length + 1} tokens of one shard (data.sequence_length "
                f"{sequence_length}, and one more), but there are {tokens} tokens in {len(shards)} shards, at most "
                f"{longest} in one; add text or lower data.sequence_length"
            )
        kinds = {shard.dtype: shard.path for shard in usable}
        if len(kinds) > 1 or not kinds.keys() <= _TYPES.keys():
            found = ", ".join(f"{dtype} ({path})" for dtype, path in kinds.items())
            raise InputError(f"shards hold either uint16 or uint32 tokens, all the same; found {found}: shard again")
        self.sequence_length = sequence_length
        self.dtype = next(iter(kinds))
        """Type of the tokens, `uint16` or `uint32`."""
        self._windows = [_windows(shard, sequence_length) for shard in usable]
        self._starts = np.cumsum([0] + [len(windows) for windows in self._windows])  # first sample of each shard

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> TokenArray:
        """Sample `index` as an array of shape (T + 1,), for code that expects a map-style dataset."""
        return self.read(np.array([index], dtype=np.int64))[0]

    def buffer(self, rows: int, pin: bool) -> Tensor:
        """Host memory for so many samples, page-locked with `pin`: shape (rows, T + 1), in the shards' type."""
        return torch.empty((rows, self.sequence_length + 1), dtype=_TYPES[self.dtype], pin_memory=pin)

    def read(self, indices: Int64Array, out: TokenArray | None = None) -> TokenArray:
        """The samples `indices` (int64, shape (B,)) as an array of shape (B, T + 1) in the shards' type.

        Written into `out` where it is given. Raises IndexError for an index outside [0, len(self)).
        """
        if out is None:
            out = np.empty((len(indices), self.sequence_length + 1), dtype=self.dtype)
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"samples {indices.min()} to {indices.max()} asked for; there are {len(self)}")
        shards = np.searchsorted(self._starts, indices, side="right") - 1
        rows = indices - self._starts[shards]
        # The lookup above is vectorised, the copy is not: a shuffled batch has few rows of any one shard, and then one
        # plain copy per row costs half to a third of one index operation per shard.
        for i, (shard, row) in enumerate(zip(shards.tolist(), rows.tolist(), strict=True)):
            out[i] = self._windows[shard][row]
        return out


def _windows(shard: ShardSpan, sequence_length: int) -> TokenArray:
    """The shard's samples as a view of shape (samples, T + 1) on its mapped bytes; rows overlap by one token."""
    try:
        tokens = np.memmap(shard.path, shard.dtype, mode="r", offset=shard.offset, shape=(shard.tokens,))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot map {shard.tokens} {shard.dtype} tokens at byte {shard.offset} of {shard.path}: {error}; "
            "if the shard is missing or damaged, run the shard stage again"
        ) from error
    plain = tokens.view(np.ndarray)  # np.memmap's own indexing costs twice as much
    return np.lib.stride_tricks.sliding_window_view(plain, sequence_length + 1)[::sequence_length]


class GlobalOrderSampler(DistributedSampler[Int64Array]):
    """Which samples this rank reads, one array per optimizer step; endless.

    Optimizer step k of the run takes the run-global samples [k*G, (k + 1)*G), G = `global_batch`, in the order
    of `pipeline/order.py`; rank r of W takes the contiguous positions [r*G/W, (r + 1)*G/W) of them. So the
    layout only splits a batch, and ranks put behind one another are always the same global batch.

    Iterating yields int64 arrays of dataset indices, shape (G/W,), from run-global sample `samples_consumed` on; the
    order jumps over the (position, count) ranges `left_out` (pipeline/guard.py), which move what comes after them.
    Epochs follow one another by themselves: `set_epoch` has no effect. `num_replicas` and `rank` come from the
    default process group if they are not given (in a mesh, give the data parallel size and rank). Raises
    UserError if W does not divide G.

    Where the dataset has `lengths` a rank takes as many samples of the same global batch, but which ones
    is dealt so that the ranks' sums of lengths are even (`pipeline/order.py`, `deal`).
    """

    def __init__(
        self,
        dataset: TokenDataset | SampleDataset,
        *,
        global_batch: int,
        seed: int,
        samples_consumed: int = 0,
        left_out: Sequence[tuple[int, int]] = (),
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)
        if global_batch % self.num_replicas:
            raise UserError(
                f"train.global_batch ({global_batch}) is no multiple of {self.num_replicas} data parallel ranks"
            )
        self.global_batch = global_batch
        self.samples_consumed, self.left_out, self.lengths = (
            samples_consumed,
            sorted(left_out),
            getattr(dataset, "lengths", None),
        )
        self._size = len(dataset)

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
            indices = indices_of(self.seed, positions, self._size)
            if self.lengths:
                yield from (batch[deal(self.lengths(batch), self.num_replicas)[self.rank]] for batch in indices)
            else:
                yield from indices
            first += steps * self.global_batch


class Batches:
    """Iterator over a rank's batches on `device`: int64 tensors `tokens_BT1` of shape (B, T + 1), or dicts of arrays.

    A thread reads what `sampler` yields ahead into (on CUDA page-locked) host memory, with numpy only: no torch
    operation runs there, so it starts no OpenMP pool of its own. It reads and hands over blocks of batches, first of
    one, then of two, four, … up to `BLOCK_BYTES`: waking the other thread costs more than reading a small batch. Up to
    `depth` blocks wait. The consumer copies a batch to the device, without waiting for it on CUDA, and widens it
    there. An exception of the thread is raised by `next` in the place of the batch that failed; the end of a finite
    sampler ends the iteration. Use it as a context manager or call :meth:`close`.
    """

    BLOCK_BYTES = 1 << 20  # handing one over costs little against reading it, and a core's own cache holds it

    def __init__(
        self, dataset: TokenDataset | SampleDataset, sampler: Iterable[Int64Array], device: torch.device, depth: int = 2
    ) -> None:
        self.data_wait_s = 0.0
        """Seconds that the consumer waited for the last batch to be read."""
        self._dataset: Any = dataset
        self._sampler, self._device = sampler, device
        self._block: list[Batch] = []  # what is left of the block in hand, last batch first
        self._ready: queue.SimpleQueue[list[Batch] | BaseException] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # one item per block that may be read ahead
        for _ in range(depth):
            self._room.put(None)
        self._closed = False
        self._end: BaseException | None = None
        # A daemon, so that a trainer that dies without close() is not kept alive by its reader.
        self._thread = device_thread(self._read_ahead, "sluice-batches")
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self.data_wait_s = 0.0
        if not self._block:
            self._take_block()
        # On CUDA torch's host allocator keeps the page-locked buffer until the copy is done.
        batch = self._block.pop()
        if isinstance(batch, dict):
            return {name: array.to(self._device, non_blocking=True) for name, array in batch.items()}
        return batch.to(self._device, non_blocking=True).to(torch.int64)

    def _take_block(self) -> None:
        """Wait for the next block; raise what ended the thread."""
        if self._end is not None:
            raise self._end
        if self._closed:
            raise StopIteration
        start = time.perf_counter()
        block = self._ready.get()
        self.data_wait_s = time.perf_counter() - start
        if isinstance(block, BaseException):
            self._end = block
            raise block
        self._block = block
        self._room.put(None)

    def close(self) -> None:
        """End the thread and wait for it (at most for the batch that it is reading); later `next` calls stop."""
        self._closed = True
        self._block = []
        self._room.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_ahead(self) -> None:
        """The thread: wait for room, read a block, hand it over; whatever ends it is handed over too."""
        asked: list[Int64Array] = []
        size = 1
        try:
            cuda = self._device.type == "cuda"
            try:
                for indices in self._sampler:
                    asked.append(indices)
                    if len(asked) >= size:
                        block = self._read(asked, cuda)
                        if block is None:
                            return
                        size = max(1, min(2 * size, self.BLOCK_BYTES // max(1, _nbytes(block[0]))))
                        asked = []
            finally:
                if asked and not self._closed:  # the sampler ended, or failed, inside a block
                    self._read(asked, cuda)
            raise StopIteration
        except BaseException as error:
            self._ready.put(error)

    def _read(self, asked: list[Int64Array], pin: bool) -> list[Batch] | None:
        """Read batches in one go, in the files' types, each of B samples, and hand them over; None if closed first."""
        self._room.get()
        if self._closed:
            return None
        sizes = [len(indices) for indices in asked]
        host = self._dataset.buffer(sum(sizes), pin)
        block: list[Batch]
        if isinstance(host, dict):
            self._dataset.read(np.concatenate(asked), out={name: array.numpy() for name, array in host.items()})
            rows = zip(*(array.split(sizes) for array in host.values()), strict=True)
            block = [dict(zip(host, arrays, strict=True)) for arrays in rows]
        else:
            self._dataset.read(np.concatenate(asked), out=host.numpy())
            block = list(host.split(sizes))
        self._ready.put(block[::-1])
        return block


def _nbytes(batch: Batch) -> int:
    return sum(array.nbytes for array in batch.values()) if isinstance(batch, dict) else batch.nbytes
