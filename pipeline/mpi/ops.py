"""Map tensors and reductions to MPI: datatypes, operations, buffers, and host copies if MPI cannot use a tensor.

MPI has datatypes for most of torch's types, but not for 16-bit floats. 16-bit floats are reduced by custom operations
that run in torch (`MPI.Op.Create`). These operations round each time a rank adds its values, as Gloo and NCCL do. With
`accurate_sums`, 16-bit floats are sent and summed in fp32 and rounded once, which doubles the traffic. Types that MPI
cannot reduce (float8) can still be sent. AVG is a sum followed by a division.

`HostBuffer` copies tensors that MPI cannot use in place to contiguous host memory, which is pinned for a GPU. It copies
strided tensors, lists of tensors, and GPU tensors if MPI is not CUDA-aware. 16-bit floats on a GPU are also copied for
a reduction, because the custom operations read host memory. Copies are synchronous, because MPI does not support CUDA
streams.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

Operand = torch.Tensor | Sequence[torch.Tensor]
"""Input or output of an operation: a tensor, one tensor per rank, or an empty sequence."""
_FLOATS_16 = (torch.float16, torch.bfloat16)
_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.bool: MPI.C_BOOL,
    **dict.fromkeys(_FLOATS_16, MPI.UINT16_T),
    **{
        getattr(torch, kind): getattr(MPI, f"{kind.upper()}_T")
        for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
}
"""MPI's datatype for each type of torch that can be reduced. 16-bit floats are sent as integers of the same size."""
_OPS: dict[str, tuple[MPI.Op, MPI.Op, Callable[..., torch.Tensor]]] = {
    "SUM": (MPI.SUM, MPI.LOR, torch.add),
    "AVG": (MPI.SUM, MPI.OP_NULL, torch.add),
    "PRODUCT": (MPI.PROD, MPI.LAND, torch.mul),
    "MIN": (MPI.MIN, MPI.LAND, torch.minimum),
    "MAX": (MPI.MAX, MPI.LOR, torch.maximum),
}
"""For each reduction: MPI's operation on numbers, MPI's operation on booleans, torch's function for 16-bit floats."""


def mpi_reduction(op: Any, dtype: torch.dtype) -> MPI.Op:
    """Return the MPI operation for a `dist.ReduceOp.RedOpType`.

    Raises ValueError if MPI cannot reduce values of `dtype` with this operation.
    """
    if dtype not in _TYPES or op.name not in _OPS or (op.name == "AVG" and not dtype.is_floating_point):
        raise ValueError(f"the MPI backend cannot reduce {dtype} with {op.name}")
    number_op, boolean_op, torch_function = _OPS[op.name]
    if dtype in _FLOATS_16:
        return _make_16_bit_op(torch_function, dtype)
    return boolean_op if dtype == torch.bool else number_op


@functools.cache
def _make_16_bit_op(torch_function: Callable[..., torch.Tensor], dtype: torch.dtype) -> MPI.Op:
    """Create an operation on 16-bit floats. The result is cached, because MPI supports only a few custom operations."""

    def reduce(source: Any, target: Any, _: MPI.Datatype) -> None:
        """Combine the values of both buffers, and write the result to `target`."""
        if len(target):  # Some algorithms of MPI reduce empty ranges.
            source_values = torch.frombuffer(source, dtype=dtype)
            target_values = torch.frombuffer(target, dtype=dtype)
            torch_function(source_values, target_values, out=target_values)

    return MPI.Op.Create(reduce, commute=True)


def list_tensors(operand: Operand) -> Sequence[torch.Tensor]:
    """Return the tensors of an operand as a sequence."""
    return [operand] if isinstance(operand, torch.Tensor) else operand


class HostBuffer:
    """Memory that MPI can read and write.

    `host` is the tensor itself if MPI can use it in place, otherwise a contiguous copy in host memory.

    Args:
        tensors: a tensor, or tensors of the same type, which are concatenated.
        read: whether MPI reads the current values, so that they must be copied.
        reduces: whether MPI computes with the values.
        accurate_sums: whether MPI computes with 16-bit floats in fp32.
    """

    def __init__(self, tensors: Operand, read: bool = True, reduces: bool = False, accurate_sums: bool = False) -> None:
        tensor_list = list_tensors(tensors)
        first = tensor_list[0] if tensor_list else torch.empty(0)
        self.counts = [tensor.numel() for tensor in tensor_list]
        """Number of elements of each tensor."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """For each tensor that was copied: the part of `host`, and the tensor."""
        uses_16_bit_op = reduces and first.dtype in _FLOATS_16
        dtype = torch.float32 if uses_16_bit_op and accurate_sums else first.dtype
        is_accessible = not first.is_cuda or (is_cuda_aware() and not uses_16_bit_op)
        if is_accessible and first is tensors and first.is_contiguous() and dtype == first.dtype:
            self.host = first.detach()
            return
        self.host = torch.empty(sum(self.counts), dtype=dtype, pin_memory=first.is_cuda)
        for host_values, tensor in zip(self.host.split(self.counts), tensor_list, strict=True):
            self._copies.append((host_values.view(tensor.shape), tensor.detach()))
            if read:
                host_values.view(tensor.shape).copy_(tensor.detach())

    def buffer_spec(self, counts: Sequence[int] = ()) -> list[Any] | None:
        """Return mpi4py's buffer specification: memory, counts and datatype; None without tensors.

        Args:
            counts: number of elements to or from each rank, or one number for all ranks; by default the size of each
                tensor. mpi4py does not check these numbers, so a wrong number overwrites memory.
        """
        if not self.counts:
            return None
        datatype = _TYPES.get(self.host.dtype)
        # Values of other types are sent as bytes.
        mpi_counts = [count * (1 if datatype else self.host.element_size()) for count in counts or self.counts]
        memory = MPI.buffer.fromaddress(self.host.data_ptr(), self.host.nbytes)
        return [memory, mpi_counts if len(mpi_counts) > 1 else mpi_counts[0], datatype or MPI.BYTE]

    def copy_back(self) -> None:
        """Copy the values that MPI wrote to `host` into the tensors, if `host` is a copy."""
        for host_values, tensor in self._copies:
            tensor.copy_(host_values)


def split_rows(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[int]:
    """Return the number of elements that each rank gets if a tensor is split along its first dimension.

    Args:
        tensor: the tensor.
        splits: number of rows for each rank; empty for equal parts.
        ranks: number of ranks.

    Raises:
        ValueError: if the splits do not add up to the number of rows.
    """
    count = tensor.shape[0] if tensor.dim() else 1
    if not splits and count % ranks == 0:
        splits = [count // ranks] * ranks
    if len(splits) != ranks or sum(splits) != count:
        raise ValueError(
            f"all_to_all_single: {count} rows over {ranks} ranks cannot be split as {splits or 'equal parts'}"
        )
    row_size = tensor.numel() // count if count else 0
    return [split * row_size for split in splits]


def describe_tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Return the type and number of elements of each tensor as text, such as `float32x10`.

    Shapes are omitted, because they may differ between ranks.
    """
    return " ".join(f"{str(tensor.dtype)[6:]}x{tensor.numel()}" for tensor in tensors)


@functools.cache
def is_cuda_aware() -> bool:
    """Return True if MPI can access GPU memory (MPIX_Query_cuda_support of Open MPI, MPICH and Cray MPICH).

    If the library does not have this function, as Intel MPI, return False. Copies in host memory work with any library.
    """
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query is not None and query())
