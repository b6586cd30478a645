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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

_FLOATS_16 = (torch.float16, torch.bfloat16)
_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.bool: MPI.C_BOOL,
    torch.float16: MPI.UINT16_T,
    torch.bfloat16: MPI.UINT16_T,
}
_INTEGERS = tuple(dtype for dtype in _TYPES if not dtype.is_floating_point and dtype != torch.bool)
_OPS = {"SUM": MPI.SUM, "AVG": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}
_BIT_OPS = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
_BOOL_OPS = {
    "BXOR": MPI.LXOR,
    "SUM": MPI.LOR,
    "MAX": MPI.LOR,
    "BOR": MPI.LOR,
    "PRODUCT": MPI.LAND,
    "MIN": MPI.LAND,
    "BAND": MPI.LAND,
}
_TORCH_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def spec(tensor: torch.Tensor, counts: int | Sequence[int] | None = None) -> list[Any]:
    """mpi4py's buffer argument for a contiguous tensor.

    counts: elements to or from each rank, where that is not the whole tensor; a list where ranks differ. mpi4py
    checks no bounds: a wrong count overwrites memory.
    """
    kind = _TYPES.get(tensor.dtype)
    scale = 1 if kind else tensor.element_size()
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    if counts is None or isinstance(counts, int):
        return [memory, (tensor.numel() if counts is None else counts) * scale, kind or MPI.BYTE]
    return [memory, [count * scale for count in counts], kind or MPI.BYTE]


def reduction(op: dist.ReduceOp, dtype: torch.dtype) -> MPI.Op:
    """The MPI operation of a torch reduction. Raises ValueError for one that the type does not have."""
    name = _name(op)
    found: MPI.Op | None = None
    if dtype in _FLOATS_16:
        found = _op_16(name, dtype) if name in _TORCH_OPS else None
    elif dtype == torch.bool:
        found = _BOOL_OPS.get(name)
    elif dtype in _TYPES:
        found = _OPS.get(name) or (_BIT_OPS.get(name) if dtype in _INTEGERS else None)
    if found is None or (name == "AVG" and not dtype.is_floating_point):
        raise ValueError(f"the MPI backend cannot reduce {dtype} with {name}")
    return found


def _name(op: dist.ReduceOp) -> str:
    value = getattr(op, "op", op)  # a ReduceOp, or a bare ReduceOp.RedOpType
    return str(value).rpartition(".")[2]


@functools.cache
def _op_16(name: str, dtype: torch.dtype) -> MPI.Op:
    """An operation on 16-bit floats; made once per kind, for MPI has room for few."""
    combine = _TORCH_OPS[name]

    def reduce(source: Any, target: Any, _: MPI.Datatype) -> None:
        if len(target):  # some algorithms reduce empty pieces
            a, b = (torch.frombuffer(memory, dtype=dtype) for memory in (source, target))
            combine(a, b, out=b)

    return MPI.Op.Create(reduce, commute=True)


def reduce_with(
    call: Callable[[Any, Any, MPI.Op], None], source: torch.Tensor, target: torch.Tensor, op: dist.ReduceOp, ranks: int
) -> None:
    """`target` = the reduction of every rank's `source` by `call(send, receive, operation)`.

    Both are a `Staged`'s, made for reducing, and may be the same tensor.
    """
    operation = reduction(op, source.dtype)
    call(MPI.IN_PLACE if target is source else spec(source), spec(target), operation)
    if _name(op) == "AVG":
        target.div_(ranks)


class Staged:
    """Tensors as MPI can read and write them: `host` is the tensor itself, or a contiguous copy in host memory."""

    def __init__(
        self, tensors: torch.Tensor | Sequence[torch.Tensor], read: bool = True, reduces: bool = False,
        accurate: bool = False,
    ) -> None:  # fmt: skip
        """`tensors`: one, or a list for a copy of them all, one after the other; they share their type.

        read: whether MPI reads what they hold now. reduces: whether it computes with it, 16-bit floats, where
        `accurate`, as fp32.
        """
        self.tensors: Sequence[torch.Tensor] = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        one = self.tensors[0]
        small = reduces and one.dtype in _FLOATS_16
        usable = one.is_contiguous() and (not one.is_cuda or (cuda_aware() and not small))
        self.copied = not (usable and isinstance(tensors, torch.Tensor)) or (small and accurate)
        if not self.copied:
            self.host = one.detach()
            return
        kind = torch.float32 if small and accurate else one.dtype
        self.host = torch.empty(sum(self.counts), dtype=kind, pin_memory=one.is_cuda)
        if read:
            for part, tensor in self._parts():
                part.copy_(tensor)

    @property
    def counts(self) -> list[int]:
        """Elements of each tensor."""
        return [tensor.numel() for tensor in self.tensors]

    def back(self) -> None:
        """After MPI wrote `host`: bring it to the tensors."""
        if self.copied:
            for part, tensor in self._parts():
                tensor.copy_(part)

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part, tensor in zip(self.host.split(self.counts), self.tensors, strict=True):
            yield part.view(tensor.shape), tensor.detach()


def rows(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[int]:
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


def sizes(tensors: Sequence[torch.Tensor]) -> str:
    """Types and numbers of elements; shapes may differ between ranks where sizes do not."""
    return " ".join(f"{str(tensor.dtype)[6:]}x{tensor.numel()}" for tensor in tensors)


@functools.cache
def cuda_aware() -> bool:
    """Whether MPI reads GPU memory itself (Open MPI's MPIX_Query_cuda_support; MPICH and Intel MPI lack it)."""
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query is not None and query())
