"""Snapshots of the training state in memory that outlives the rank (`checkpoint.memory_every_steps`).

A node agent owns two buffers for each rank (memfd_create(2)). The ranks that it forks inherit them. A rank writes its
snapshots to the two buffers in turn, so one complete snapshot exists while the other buffer is written. After a restart
in place, the ranks load the newest step of which all ranks have an intact snapshot, if it is newer than the newest
checkpoint.

A buffer contains, in this order: a header (`_HEADER`), the tensors, and an index in JSON. The header is written last
and removed first, so a snapshot that was not completed has no header. The header has a checksum of tensors and index,
which shows a damaged snapshot.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.comm.groups import all_gather_results

StateDict = dict[str, torch.Tensor]

BUFFERS_VARIABLE = "SLUICE_SNAPSHOT_FDS"
"""The environment variable with the file descriptors of the two buffers of this rank, separated by a comma."""
_MAGIC = b"sluice-1"
_HEADER = struct.Struct("<8sQQQ32s")
"""Magic bytes, step, bytes of the tensors, bytes of the index, checksum."""
_DATA_START = 4096
_ALIGNMENT = 4096
_SPARE_BYTES = 1 << 21
"""Sizes of buffers are multiples of this number of bytes, and at least so many bytes are spare."""
_CHECKSUM_BLOCK = 1 << 16
"""Bytes that are added up to one 64-bit number for the checksum."""


def create_buffers(rank: int) -> tuple[int, int]:
    """Create two empty buffers for a rank, and return their file descriptors. A node agent calls this function."""
    first, second = (os.memfd_create(f"sluice-snapshot-{rank}-{index}") for index in range(2))
    return first, second


def read_snapshot_step(buffers: tuple[int, int]) -> int:
    """Return the step of the newest complete snapshot in two buffers; 0 if there is none. It may be damaged."""
    return max(_read_header(buffer)[0] for buffer in buffers)


def _read_header(buffer: int) -> tuple[int, int, int, bytes]:
    """Return step, bytes of the tensors, bytes of the index, and checksum; the step 0 if it is not complete."""
    header = os.pread(buffer, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        return 0, 0, 0, b""
    magic, step, data_bytes, index_bytes, checksum = _HEADER.unpack(header)
    return (step, data_bytes, index_bytes, checksum) if magic == _MAGIC else (0, 0, 0, b"")


class _Buffer:
    """One of the two buffers of this rank, mapped into memory."""

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
        buffers: the file descriptors of the two buffers of this rank.
        group: a Gloo group of all ranks, which nothing else uses at the same time.
        identity: JSON values that describe the run and its layout. Snapshots with another identity are not used.
    """

    def __init__(self, buffers: tuple[int, int], group: dist.ProcessGroup, identity: Mapping[str, Any]) -> None:
        self._buffers = (_Buffer(buffers[0]), _Buffer(buffers[1]))
        self._group = group
        self._newest: _Buffer | None = None
        """The buffer with the newest snapshot that this object has written or loaded. It is not overwritten next."""
        self._identity = json.loads(json.dumps({**identity, "rank": dist.get_rank(group)}))

    def save(self, state: StateDict, *, step: int, samples_consumed: int, extra: Mapping[str, Any]) -> None:
        """Write a snapshot to the buffer with the older snapshot.

        Args:
            state: this rank's tensors by name. They must not change during the call.
            step: the number of the step after which the state is saved.
            samples_consumed: the number of samples in all steps so far.
            extra: JSON values.
        """
        # A buffer may have a later step, of another layout or of steps that are repeated now.
        candidates = [buffer for buffer in self._buffers if buffer is not self._newest]
        buffer = min(candidates, key=lambda buffer: _read_header(buffer.descriptor)[0])
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

    def find_common_step(self) -> int:
        """Return the newest step of which all ranks have an intact snapshot of this run and layout; 0 if none."""
        steps_by_rank = all_gather_results(self._group, lambda: sorted(self._find_intact_snapshots()))
        return max(set(steps_by_rank[0]).intersection(*steps_by_rank[1:]), default=0)

    def _find_intact_snapshots(self) -> dict[int, tuple[_Buffer, dict[str, Any]]]:
        """Return the intact snapshots of this rank by step, with their indexes."""
        snapshots = {}
        for buffer in self._buffers:
            step, data_bytes, index_bytes, checksum = _read_header(buffer.descriptor)
            size = _DATA_START + data_bytes + index_bytes
            if not step or size > os.fstat(buffer.descriptor).st_size:
                continue
            memory = buffer.map(size)
            if _compute_checksum(memory[_DATA_START:]) != checksum:
                continue
            index = json.loads(memory[size - index_bytes :].numpy().tobytes())
            if index["step"] == step and index["identity"] == self._identity:
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
    text = environment.get(BUFFERS_VARIABLE)
    if not all(all_gather_results(group, lambda: bool(text))):
        return None
    first, second = map(int, str(text).split(","))
    return MemorySnapshots((first, second), group, identity)


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
