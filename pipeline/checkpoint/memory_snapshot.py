"""Snapshots of the training state in memory that outlives the rank.

A node agent owns buffers for each rank (memfd_create(2)). The ranks that it forks inherit them. After a restart in
place, the ranks load the newest step of which all ranks have an intact snapshot, unless there is a newer checkpoint.

- With `checkpoint.memory_every_steps`, there are two buffers. A rank writes its snapshots to them in turn, so one
  complete snapshot exists while the other buffer is written.
- With `checkpoint.mode: async`, there is one buffer more, because an asynchronous save also writes a snapshot, and
  another process writes the checkpoint from it (pipeline/checkpoint/saver.py). The buffer is not overwritten during
  that time.
- With `checkpoint.memory_copies: 2`, each rank also sends its snapshots to the rank with the same local rank on the
  next node, which writes them to two more buffers. If a node is replaced, its new ranks get their snapshots back from
  there.

A buffer contains, in this order: a header (`_HEADER`), the tensors, and an index in JSON. The header is written last
and removed first, so a snapshot that was not completed has no header. The header has a checksum of tensors and index,
which shows a damaged snapshot.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.comm.groups import all_gather_results

StateDict = dict[str, torch.Tensor]
"""This rank's tensors by name. A tensor may be a DTensor."""

BUFFERS_VARIABLE = "SLUICE_SNAPSHOT_FDS"
"""The environment variable with the file descriptors of the buffers for this rank's own snapshots, separated by
commas."""
COPIES_VARIABLE = "SLUICE_SNAPSHOT_COPY_FDS"
"""The environment variable with the file descriptors of the buffers for the snapshots of another rank, separated by
commas."""
_MAGIC = b"sluice-1"
_HEADER = struct.Struct("<8sQQQ32s")
"""Magic bytes, step, bytes of the tensors, bytes of the index, checksum."""
_DATA_START = 4096
_ALIGNMENT = 4096
_SPARE_BYTES = 1 << 21
"""Sizes of buffers are multiples of this number of bytes, and at least so many bytes are spare."""
_MESSAGE_BYTES = 1 << 30
"""Snapshots are sent to other ranks in messages of this size."""
_CHECKSUM_BLOCK = 1 << 16
"""Bytes that are added up to one 64-bit number for the checksum."""


def create_buffers(rank: int, count: int) -> tuple[int, ...]:
    """Create empty buffers for a rank, and return their file descriptors. A node agent calls this function."""
    return tuple(os.memfd_create(f"sluice-snapshot-{rank}-{index}") for index in range(count))


def read_snapshot_step(buffers: Sequence[int]) -> int:
    """Return the step of the newest complete snapshot in some buffers; 0 if there is none. It may be damaged."""
    return max((_read_header(buffer)[0] for buffer in buffers), default=0)


class MappedSnapshot(NamedTuple):
    """A snapshot in the memory of a process that only reads it."""

    tensors: StateDict
    """The tensors by name, which are not copied: they change if the buffer changes."""
    is_intact: Callable[[], bool]
    """Returns False if the buffer has changed since the snapshot was written."""


def map_snapshot(descriptor: int) -> MappedSnapshot:
    """Return the snapshot in a buffer, without a copy.

    Args:
        descriptor: the file descriptor of a buffer with a complete snapshot.
    """
    _, data_bytes, index_bytes, checksum = _read_header(descriptor)
    end = _DATA_START + data_bytes
    memory = mmap.mmap(descriptor, end + index_bytes)
    index = json.loads(memory[end:])
    tensors = {}
    for name, (offset, dtype_name, shape) in index["tensors"].items():
        dtype = getattr(torch, dtype_name.removeprefix("torch."))
        count = math.prod(shape)
        # Each tensor has a separate storage, because DCP would copy tensors that share a storage.
        flat = (
            torch.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.view(shape)
    content = torch.frombuffer(memory, dtype=torch.uint8, offset=_DATA_START)
    return MappedSnapshot(tensors, lambda: _compute_checksum(content) == checksum)


def _read_header(buffer: int) -> tuple[int, int, int, bytes]:
    """Return step, bytes of the tensors, bytes of the index, and checksum; the step 0 if it is not complete."""
    header = os.pread(buffer, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        return 0, 0, 0, b""
    magic, step, data_bytes, index_bytes, checksum = _HEADER.unpack(header)
    return (step, data_bytes, index_bytes, checksum) if magic == _MAGIC else (0, 0, 0, b"")


class _Buffer:
    """One of the buffers of this rank, mapped into memory."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory: Tensor | None = None
        """The whole buffer as bytes; None if it is not mapped."""

    def map(self, size: int) -> Tensor:
        """Return the first `size` bytes of the buffer. The buffer grows if it is smaller."""
        if self._memory is None or len(self._memory) < size:
            # With some spare bytes, the buffer need not grow again if the numbers in the index get longer.
            new_size = -(-(size + _SPARE_BYTES) // _SPARE_BYTES) * _SPARE_BYTES
            size_bytes = max(new_size, os.fstat(self.descriptor).st_size)
            os.ftruncate(self.descriptor, size_bytes)
            if self._memory is not None and torch.cuda.is_available():
                torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._memory = torch.frombuffer(mmap.mmap(self.descriptor, size_bytes), dtype=torch.uint8)
            if torch.cuda.is_available():
                # Copies from the GPU to pinned memory are several times faster.
                torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size_bytes, 0)
        return self._memory[:size]


class MemorySnapshots:
    """Writes and reads the snapshots of this rank. All ranks must make the same calls in the same order.

    Args:
        buffers: the file descriptors of the buffers for the snapshots of this rank.
        group: a Gloo group of all ranks, which nothing else uses at the same time.
        identity: JSON values that describe the run and its layout. Snapshots with another identity are not used.
        copies: the file descriptors of the buffers for the snapshots of another rank; empty to keep no copies.
        hosts: the host of each rank; empty if all ranks are on one host.
    """

    def __init__(
        self,
        buffers: Sequence[int],
        group: dist.ProcessGroup,
        identity: Mapping[str, Any],
        *,
        copies: Sequence[int] = (),
        hosts: Sequence[str] = (),
    ) -> None:
        self._buffers = [_Buffer(descriptor) for descriptor in buffers]
        self._copies = [_Buffer(descriptor) for descriptor in copies]
        """The buffers for the snapshots of `_source`."""
        self._group = group
        rank = dist.get_rank(group)
        self._targets = _pair_ranks(hosts or [""] * dist.get_world_size(group))
        self._target = self._targets[rank]
        """The rank to which this rank sends its snapshots."""
        self._source = self._targets.index(rank)
        """The rank from which this rank gets snapshots."""
        if self._target == rank:  # There is only one node, or the nodes have different numbers of ranks.
            self._copies = []
        self._newest_copy: _Buffer | None = None
        """The buffer with the newest snapshot that `_source` has sent. It is not overwritten next."""
        self._steps_by_rank: list[tuple[list[int], list[int]]] = []
        """For each rank, the steps of its intact snapshots, and the steps of the intact copies that it keeps."""
        self._newest: _Buffer | None = None
        """The buffer with the newest snapshot that this object has written or loaded. It is not overwritten next."""
        self._protected: _Buffer | None = None
        """A buffer that is not overwritten, because another process reads it."""
        self._identity = json.loads(json.dumps({**identity, "rank": dist.get_rank(group)}))

    def save(
        self,
        state: StateDict,
        *,
        step: int,
        samples_consumed: int,
        extra: Mapping[str, Any],
        protect: bool = False,
    ) -> int:
        """Write a snapshot to the buffer with the oldest snapshot, and send it to another rank if copies are kept.

        Args:
            state: this rank's tensors by name. They must not change during the call.
            step: the number of the step after which the state is saved.
            samples_consumed: the number of samples in all steps so far.
            extra: JSON values.
            protect: whether later calls must not overwrite this snapshot before :meth:`release`.

        Returns:
            The index of the buffer.
        """
        buffer = _choose_buffer(self._buffers, self._newest, self._protected)
        if protect:
            self._protected = buffer
        tensors = {name: _get_local(tensor) for name, tensor in state.items()}
        offsets: dict[str, int] = {}
        end = _DATA_START
        for name, tensor in tensors.items():
            offsets[name] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        index = {
            "step": step,
            "samples_consumed": samples_consumed,
            "extra": dict(extra),
            "identity": self._identity,
            "tensors": {
                name: [offsets[name], str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()
            },
        }
        index_content = json.dumps(index).encode()
        memory = buffer.map(end + len(index_content))
        memory[: _HEADER.size].zero_()  # From here on, the buffer has no complete snapshot.
        for name, tensor in tensors.items():
            target = memory[offsets[name] : offsets[name] + tensor.nbytes].view(tensor.dtype)
            target.copy_(tensor.reshape(-1), non_blocking=True)
        memory[end:].copy_(torch.frombuffer(bytearray(index_content), dtype=torch.uint8))
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        checksum = _compute_checksum(memory[_DATA_START:])
        header = _HEADER.pack(_MAGIC, step, end - _DATA_START, len(index_content), checksum)
        memory[: _HEADER.size].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self._newest = buffer
        if self._copies:
            copy = _choose_buffer(self._copies, self._newest_copy)
            self._exchange(memory, self._target, copy, self._source)
            self._newest_copy = copy
        return self._buffers.index(buffer)

    def release(self) -> None:
        """Allow that the buffer of a protected snapshot is overwritten."""
        self._protected = None

    def _exchange(self, sent: Tensor | None, target: int, received: _Buffer | None, source: int) -> None:
        """Send a snapshot, and receive another one. None: this rank sends or receives nothing."""
        requests = []
        size = torch.zeros(1, dtype=torch.int64)
        if sent is not None:
            requests.append(dist.isend(torch.tensor([len(sent)]), target, group=self._group))
        if received is not None:
            dist.recv(size, source, group=self._group)
        parts = [] if sent is None else list(sent.split(_MESSAGE_BYTES))
        requests += [dist.isend(part, target, group=self._group) for part in parts]
        if received is not None:
            memory = received.map(int(size))
            memory[: _HEADER.size].zero_()  # A part of the old snapshot may remain if this rank ends now.
            for part in memory.split(_MESSAGE_BYTES):
                dist.recv(part, source, group=self._group)
        for request in requests:
            assert request is not None
            request.wait()

    def find_common_step(self) -> int:
        """Return the newest step of which intact snapshots of all ranks exist, of this run and layout; 0 if none.

        Before :meth:`load`, call :meth:`fetch`, because the snapshot of a rank may only exist as a copy.
        """
        source_identity = {**self._identity, "rank": self._source}
        self._steps_by_rank = all_gather_results(
            self._group,
            lambda: (
                sorted(self._find_intact_snapshots()),
                sorted(self._find_intact_snapshots(self._copies, source_identity)),
            ),
        )
        available = [
            {*own_steps, *self._steps_by_rank[target][1]}
            for (own_steps, _), target in zip(self._steps_by_rank, self._targets, strict=True)
        ]
        return max(set.intersection(*available), default=0)

    def fetch(self, step: int) -> bool:
        """Get back the snapshots of ranks that have none of their own. Return False if this fails on any rank.

        Args:
            step: the result of :meth:`find_common_step`.
        """
        rank = dist.get_rank(self._group)
        is_missing = step not in self._steps_by_rank[rank][0]
        is_missing_at_source = self._source != rank and step not in self._steps_by_rank[self._source][0]
        sent = None
        if is_missing_at_source:
            copy, _ = self._find_intact_snapshots(self._copies, {**self._identity, "rank": self._source})[step]
            _, data_bytes, index_bytes, _ = _read_header(copy.descriptor)
            sent = copy.map(_DATA_START + data_bytes + index_bytes)
        # The copies are sent in the opposite direction, from the target back to the source.
        self._exchange(sent, self._source, self._buffers[0] if is_missing else None, self._target)
        return all(all_gather_results(self._group, lambda: step in self._find_intact_snapshots()))

    def discard_after(self, step: int) -> None:
        """Discard all snapshots of steps after the restored `step`, and keep those of `step` until newer ones exist.

        Otherwise, snapshots of the previous attempt could later be taken for those of this attempt.

        Args:
            step: the step that was restored; 0 if the training starts from scratch.
        """
        for buffer in (*self._buffers, *self._copies):
            if _read_header(buffer.descriptor)[0] > step:
                buffer.map(_HEADER.size)[:].zero_()
        self._newest = _find_step(self._buffers, step)
        self._newest_copy = _find_step(self._copies, step)

    def _find_intact_snapshots(
        self, buffers: Sequence[_Buffer] | None = None, identity: Mapping[str, Any] | None = None
    ) -> dict[int, tuple[_Buffer, dict[str, Any]]]:
        """Return the intact snapshots in some buffers by step, with their indexes.

        Args:
            buffers: the buffers; None for those with this rank's own snapshots.
            identity: the identity that the snapshots must have; None for that of this rank.
        """
        snapshots = {}
        for buffer in self._buffers if buffers is None else buffers:
            step, data_bytes, index_bytes, checksum = _read_header(buffer.descriptor)
            size = _DATA_START + data_bytes + index_bytes
            if not step or size > os.fstat(buffer.descriptor).st_size:
                continue
            memory = buffer.map(size)
            if _compute_checksum(memory[_DATA_START:]) != checksum:
                continue
            index = json.loads(memory[size - index_bytes :].numpy().tobytes())
            if index["step"] == step and index["identity"] == (identity or self._identity):
                snapshots[step] = (buffer, index)
        return snapshots

    def load(self, step: int, state: StateDict) -> dict[str, Any]:
        """Fill tensors in place from the snapshot of `step`, and return its index.

        Args:
            step: the result of :meth:`find_common_step`.
            state: tensors by name, on the layout with which the snapshot was saved; {} to read only the index.
        """
        buffer, index = self._find_intact_snapshots()[step]
        self._newest = buffer
        for name, tensor in state.items():
            offset, dtype, shape = index["tensors"][name]
            local = _get_local(tensor)
            if str(local.dtype) != dtype or list(local.shape) != shape:
                raise ValueError(f"{name}: the snapshot has {dtype} {shape}, not {local.dtype} {list(local.shape)}")
            source = buffer.map(offset + local.nbytes)[offset:].view(local.dtype)
            local.copy_(source.view(local.shape))
        return index

    def read_tensors(self, step: int, state: StateDict) -> None:
        """Fill tensors in place, as :meth:`load`."""
        if state:
            self.load(step, state)


def open_snapshots(
    environment: Mapping[str, str], group: dist.ProcessGroup, identity: Mapping[str, Any]
) -> MemorySnapshots | None:
    """Return the snapshots of this rank; None if no node agent has created buffers for all ranks.

    Args:
        environment: the environment variables of this rank.
        group: a Gloo group of all ranks.
        identity: see :class:`MemorySnapshots`.
    """
    buffers, copies = (
        [int(descriptor) for descriptor in environment.get(name, "").split(",") if descriptor]
        for name in (BUFFERS_VARIABLE, COPIES_VARIABLE)
    )
    if not all(all_gather_results(group, lambda: bool(buffers))):
        return None
    hosts = all_gather_results(group, lambda: os.uname().nodename)
    return MemorySnapshots(buffers, group, identity, copies=copies, hosts=hosts)


def _pair_ranks(hosts: Sequence[str]) -> list[int]:
    """Return, for each rank, the rank to which it sends its snapshots: that with the same position on the next host.

    If there is only one host, or the hosts have different numbers of ranks, each rank is paired with itself.

    Args:
        hosts: the host of each rank.
    """
    ranks_by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_by_host.setdefault(host, []).append(rank)
    groups = list(ranks_by_host.values())
    targets = list(range(len(hosts)))
    if len({len(ranks) for ranks in groups}) == 1:
        for ranks, next_ranks in zip(groups, [*groups[1:], groups[0]], strict=True):
            for rank, target in zip(ranks, next_ranks, strict=True):
                targets[rank] = target
    return targets


def _find_step(buffers: Sequence[_Buffer], step: int) -> _Buffer | None:
    """Return the buffer with a snapshot of a step; None if there is none."""
    return next((buffer for buffer in buffers if step and _read_header(buffer.descriptor)[0] == step), None)


def _choose_buffer(buffers: Sequence[_Buffer], newest: _Buffer | None, protected: _Buffer | None = None) -> _Buffer:
    """Return the buffer to overwrite: the one with the earliest step, but neither `newest` nor `protected`.

    The other buffers may have an even later step, of another layout or of steps that are repeated now. If there is only
    one buffer, it is overwritten.
    """
    candidates = [buffer for buffer in buffers if buffer not in (newest, protected)] or list(buffers)
    return min(candidates, key=lambda buffer: _read_header(buffer.descriptor)[0])


def _get_local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _compute_checksum(content: Tensor) -> bytes:
    """Return a checksum of bytes: the SHA-256 of 64-bit sums of blocks. This takes little longer than to read them.

    Any changed bit changes the checksum.
    """
    block_count = len(content) // _CHECKSUM_BLOCK
    whole_bytes = block_count * _CHECKSUM_BLOCK
    sums = content[:whole_bytes].view(torch.int64).view(block_count, _CHECKSUM_BLOCK // 8).sum(dim=1)
    digest = hashlib.sha256(sums.numpy().tobytes())
    digest.update(content[whole_bytes:].numpy().tobytes())
    return digest.digest()
