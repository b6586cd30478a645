"""Tensors and reductions in MPI's words: datatypes, buffers, operations, and host copies of what MPI cannot read.

MPI knows most of torch's types. It has no 16-bit floats, so their reductions are operations of our own that run in
torch (`MPI.Op.Create`), rounding at every hop as Gloo and NCCL do; `accurate` sums in fp32 and rounds once, at
twice the bytes. Types that MPI cannot reduce (float8) still travel. AVG is a sum and a division.

What MPI cannot use in place goes through a contiguous copy in host memory, pinned for a GPU (`Staged`): strided tensors
and lists of tensors, those on a GPU where MPI is not CUDA-aware, and there 16-bit floats to reduce, for our operations
read host memory. Copies are over when they return: MPI knows nothing of streams.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

Operand = torch.Tensor | Sequence[torch.Tensor]
"""What an operation reads or writes: a tensor, one per rank, or nothing."""
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
_OPS: dict[str, tuple[MPI.Op, MPI.Op, Callable[..., torch.Tensor]]] = {
    "SUM": (MPI.SUM, MPI.LOR, torch.add),
    "AVG": (MPI.SUM, MPI.OP_NULL, torch.add),
    "PRODUCT": (MPI.PROD, MPI.LAND, torch.mul),
    "MIN": (MPI.MIN, MPI.LAND, torch.minimum),
    "MAX": (MPI.MAX, MPI.LOR, torch.maximum),
}
"""What reduces numbers, booleans, and, in torch, 16-bit floats."""


def mpi_reduction(op: Any, dtype: torch.dtype) -> MPI.Op:
    """The MPI operation of a `dist.ReduceOp.RedOpType`. Raises ValueError for one that the type does not have."""
    if dtype not in _TYPES or op.name not in _OPS or (op.name == "AVG" and not dtype.is_floating_point):
        raise ValueError(f"the MPI backend cannot reduce {dtype} with {op.name}")
    numbers, booleans, combine = _OPS[op.name]
    if dtype in _FLOATS_16:
        return _op_16(combine, dtype)
    return booleans if dtype == torch.bool else numbers


@functools.cache
def _op_16(combine: Callable[..., torch.Tensor], dtype: torch.dtype) -> MPI.Op:
    """An operation on 16-bit floats; made once per kind, for MPI has room for few."""

    def reduce(source: Any, target: Any, _: MPI.Datatype) -> None:
        if len(target):  # some algorithms reduce empty pieces
            a, b = (torch.frombuffer(memory, dtype=dtype) for memory in (source, target))
            combine(a, b, out=b)

    return MPI.Op.Create(reduce, commute=True)


def list_tensors(side: Operand) -> Sequence[torch.Tensor]:
    """The tensors of one side of an operation."""
    return [side] if isinstance(side, torch.Tensor) else side


class HostBuffer:
    """Tensors as MPI can read and write them: `host` is the tensor itself, or a contiguous copy in host memory."""

    def __init__(self, tensors: Operand, read: bool = True, reduces: bool = False, accurate: bool = False) -> None:
        """`tensors`: one, or a list for a copy of them all, one after the other; they share their type.

        read: whether MPI reads what they hold now. reduces: whether it computes with it, 16-bit floats, where
        `accurate`, as fp32.
        """
        parts = list_tensors(tensors)
        one = parts[0] if parts else torch.empty(0)
        self.counts = [tensor.numel() for tensor in parts]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        small = reduces and one.dtype in _FLOATS_16
        kind = torch.float32 if small and accurate else one.dtype
        reachable = not one.is_cuda or (is_cuda_aware() and not small)
        if reachable and one is tensors and one.is_contiguous() and kind == one.dtype:
            self.host = one.detach()
            return
        self.host = torch.empty(sum(self.counts), dtype=kind, pin_memory=one.is_cuda)
        for part, tensor in zip(self.host.split(self.counts), parts, strict=True):
            self._copies.append((part.view(tensor.shape), tensor.detach()))
            if read:
                part.view(tensor.shape).copy_(tensor.detach())

    def spec(self, counts: Sequence[int] = ()) -> list[Any] | None:
        """mpi4py's buffer argument, None without tensors.

        counts: elements to or from each rank, one number where ranks are alike; by default all of each tensor. mpi4py
        checks no bounds: a wrong count overwrites memory.
        """
        if not self.counts:
            return None
        kind = _TYPES.get(self.host.dtype)
        numbers = [count * (1 if kind else self.host.element_size()) for count in counts or self.counts]
        memory = MPI.buffer.fromaddress(self.host.data_ptr(), self.host.nbytes)
        return [memory, numbers if len(numbers) > 1 else numbers[0], kind or MPI.BYTE]

    def back(self) -> None:
        """After MPI wrote `host`: bring it to the tensors."""
        for part, tensor in self._copies:
            tensor.copy_(part)


def split_rows(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[int]:
    """Elements that go to, or come from, each rank when `splits` are its rows; without splits, equal parts.

    Raises ValueError where rows and splits do not go together.
    """
    count = tensor.shape[0] if tensor.dim() else 1
    if not splits and count % ranks == 0:
        splits = [count // ranks] * ranks
    if len(splits) != ranks or sum(splits) != count:
        raise ValueError(
            f"all_to_all_single: {count} rows over {ranks} ranks cannot be split as {splits or 'equal parts'}"
        )
    row = tensor.numel() // count if count else 0
    return [split * row for split in splits]


def describe_tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Types and numbers of elements; shapes may differ between ranks where sizes do not."""
    return " ".join(f"{str(tensor.dtype)[6:]}x{tensor.numel()}" for tensor in tensors)


@functools.cache
def is_cuda_aware() -> bool:
    """Whether MPI reads GPU memory itself, as it says (MPIX_Query_cuda_support of Open MPI, MPICH and Cray's MPICH).

    What cannot be asked (Intel MPI) gets copies in host memory, which any MPI takes: so no library is refused.
    """
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query is not None and query())
