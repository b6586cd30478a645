"""Gradient compression between whole replicas: what DDP sends of each bucket (`parallel.hook`).

- *fp16*, *bf16*: the gradient, divided by the number of replicas, in half the bytes; summed in that type.
- *Top-K* (Aji and Heafield, arXiv 1704.05021; Stich et al., arXiv 1809.07599): of each parameter the `ratio` of its
  values that are largest, as (int32 place, fp32 value), gathered by all. During the warm-up the fraction falls from 1
  to `ratio` in equal proportions (Lin et al., arXiv 1712.01887, section 3.3).
- *PowerSGD* (Vogels et al., arXiv 1905.13727, algorithm 1): of each matrix M (n × m) the product P Qᵀ, P = M Q made
  orthonormal, Q = Mᵀ P, both summed over the replicas; Q is where the next step begins. Vectors, and matrices whose
  P and Q are no smaller, go whole.

**Error feedback.** Each replica adds what Top-K and PowerSGD left out, the *residual*, to its next gradient. Residuals
are in units of the mean gradient: a replica's message and residual add up to gradient / replicas + old residual, so
the sum of all residuals is what the weights have not seen yet, whatever the number of replicas. They are kept per
parameter, not per bucket: DDP may put parameters into other buckets. A step's residuals count only once its update does
(`end`): those of a step that is left out, or of the backward that settles the buckets, are forgotten with it.

Where Top-K would send no less than an all-reduce (fraction × replicas ≥ 1), and with one replica, the whole gradient
goes, residual and all.

A hook runs in backward, bucket by bucket, in the same order on all ranks. Every collective starts in its body: one that
started in a future's callback could come in another order on another rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.config.parallel import HookConfig
from pipeline.parallel.replicas import ReplicaSync, StateDict

HOOKS_WITH_RESIDUALS = ("powersgd", "topk")
_SMALL = {"fp16": torch.float16, "bf16": torch.bfloat16}
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
_Future = torch.futures.Future  # of a bucket's reduced gradients


class GradientHook(ReplicaSync):
    """The hook of one replica, and what it remembers from step to step."""

    def __init__(self, config: HookConfig, names: Mapping[str, nn.Parameter], seed: int) -> None:
        """`names`: the parameters that DDP reduces, by names that know nothing of the layout."""
        self.config, self.rank, self.replicas = config, dist.get_rank(), dist.get_world_size()
        self.residual: StateDict = {}
        self.start: StateDict = {}
        """PowerSGD's Q by parameter, fp32 of shape (columns, rank); the same on all replicas."""
        self._group: Any = None
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in names.items()}
        self._next: tuple[StateDict, StateDict] = ({}, {})
        self._held: list[Tensor] = []
        """What callbacks read on a stream of their own: freed in backward, the compute stream could write over it."""
        if config.kind in HOOKS_WITH_RESIDUALS:
            self.residual = {name: torch.zeros_like(parameter) for name, parameter in names.items()}
        if config.kind == "powersgd":
            for name, parameter in names.items():
                if parameter.ndim < 2:
                    continue
                rows, columns = len(parameter), parameter[0].numel()
                if (rows + columns) * config.rank < rows * columns:  # else it sends no less
                    self.start[name] = _draw(columns, config.rank, f"{seed}/{name}").to(parameter)

    def register(self, model: DistributedDataParallel) -> None:
        """Let `model` reduce its buckets through this hook."""
        self._group = model.process_group
        send = {"topk": self._topk, "powersgd": self._powersgd}.get(self.config.kind, self._cast)
        model.register_comm_hook(None, lambda _, bucket: send(bucket))

    def end(self, good: bool) -> None:
        """The step's update was made, or (not `good`) left out."""
        residual, start = self._next
        if good:
            self.residual |= residual
            self.start |= start
        self._next = ({}, {})
        self._held.clear()

    @property
    def fraction(self) -> float:
        """What Top-K sends of this step's gradient."""
        warmup = self.config.warmup_steps
        return float(self.config.ratio ** min(1.0, (self.step - 1) / warmup)) if warmup else self.config.ratio

    # -- the kinds ---------------------------------------------------------------------------------------

    def _cast(self, bucket: dist.GradBucket) -> _Future[Tensor]:
        buffer = bucket.buffer()
        small = buffer.div_(self.replicas).to(_SMALL[self.config.kind])  # divided first: the sum must not overflow
        return _when_done(dist.all_reduce(small, group=self._group, async_op=True), lambda: buffer.copy_(small))

    def _topk(self, bucket: dist.GradBucket) -> _Future[Tensor]:
        buffer, parts = bucket.buffer(), list(self._with_residuals(bucket))
        counts = [math.ceil(self.fraction * gradient.numel()) for _, gradient in parts]
        if self.replicas == 1 or sum(counts) * self.replicas >= buffer.numel():
            return self._whole(buffer, parts)
        places: list[Tensor] = []
        values: list[Tensor] = []
        for (name, gradient), count in zip(parts, counts, strict=True):
            flat = gradient.view(-1)
            largest = flat.abs().topk(count, sorted=False).indices
            places.append(largest + int(gradient.storage_offset() - buffer.storage_offset()))
            values.append(flat[largest])
            left = flat.clone()
            left[largest] = 0
            self._next[0][name] = left.view_as(gradient)
        message = torch.cat([torch.cat(places).int(), torch.cat(values).view(torch.int32)])
        everyone = message.new_empty((self.replicas, 2, message.numel() // 2))

        def unpack() -> Tensor:
            buffer.zero_()
            for place, value in everyone:  # one replica after the other: the same order, the same bits, on all ranks
                buffer.index_add_(0, place, value.view(buffer.dtype))
            return buffer

        return _when_done(_all_gather(everyone.view(-1), message, group=self._group, async_op=True), unpack)

    def _powersgd(self, bucket: dist.GradBucket) -> _Future[Tensor]:
        buffer, parts = bucket.buffer(), list(self._with_residuals(bucket))
        late = self.replicas > 1 and self.step > self.config.warmup_steps
        matrices = [part for part in parts if late and part[0] in self.start]
        if not matrices:
            return self._whole(buffer, parts)
        whole = [(name, gradient) for name, gradient in parts if all(name != other for other, _ in matrices)]
        self._next[0].update((name, torch.zeros_like(gradient)) for name, gradient in whole)
        M = [gradient.flatten(1) for _, gradient in matrices]
        first = _packed(
            [m @ self.start[name] for m, (name, _) in zip(M, matrices, strict=True)] + [g for _, g in whole]
        )
        dist.all_reduce(first, group=self._group)  # waited for here, as the second half is made of it
        sums = _unpacked(first, [(len(m), self.config.rank) for m in M] + [g.shape for _, g in whole])
        P = [_orthonormal(p) for p in sums[: len(M)]]
        second = []
        for m, p, (name, gradient) in zip(M, P, matrices, strict=True):
            q = m.T @ p
            self._next[0][name] = (m - p @ q.T).view_as(gradient)
            second.append(q)
        packed = _packed(second)
        self._held += [first, packed]  # P is a view of the first

        def unpack() -> Tensor:
            for m, p, q, (name, _) in zip(M, P, _unpacked(packed, [q.shape for q in second]), matrices, strict=True):
                # a column that came out zero would stay so for ever
                self._next[1][name] = torch.where(q.any(0), q, self.start[name])
                torch.mm(p, q.T, out=m)
            for (_, gradient), total in zip(whole, sums[len(M) :], strict=True):
                gradient.copy_(total)
            return buffer

        return _when_done(dist.all_reduce(packed, group=self._group, async_op=True), unpack)

    def _with_residuals(self, bucket: dist.GradBucket) -> Iterator[tuple[str, Tensor]]:
        """Each parameter of the bucket with its share of the mean gradient, residual included: views of the buffer."""
        bucket.buffer().div_(self.replicas)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[parameter]
            yield name, gradient.add_(self.residual[name])

    def _whole(self, buffer: Tensor, parts: Sequence[tuple[str, Tensor]]) -> _Future[Tensor]:
        """All of it: nothing is left out."""
        self._next[0].update((name, torch.zeros_like(gradient)) for name, gradient in parts)
        return _when_done(dist.all_reduce(buffer, group=self._group, async_op=True), lambda: buffer)

    # -- state -------------------------------------------------------------------------------------------

    def saved(self, state: StateDict) -> StateDict:
        """What a checkpoint keeps: `state`, and beside the digest each replica's residuals and PowerSGD's Q."""
        mine = {f"replica.{self.rank}.residual.{name}": tensor for name, tensor in self.residual.items()}
        return state | mine | {f"start.{name}": tensor for name, tensor in self.start.items()}

    def describe(self) -> dict[str, Any]:
        """What a restore must know of it."""
        columns = self.config.rank if self.start else 0
        return {"replicas": self.replicas, "residuals": bool(self.residual), "rank": columns}

    def restore(self, state: StateDict, kept: Mapping[str, Any], read: Callable[[StateDict], None]) -> None:
        """Take up what `saved` kept, on any number of replicas.

        `read` fills tensors by their names. Replica r's residuals go to replica r mod today's number: none is lost.
        """
        if self.start and kept.get("rank") == self.config.rank:
            read({f"start.{name}": tensor for name, tensor in self.start.items()})
        before = int(kept["replicas"]) if self.residual and kept.get("residuals") else 0
        for replica in range(self.rank, before, self.replicas):
            part = {name: torch.empty_like(tensor) for name, tensor in self.residual.items()}
            read({f"replica.{replica}.residual.{name}": tensor for name, tensor in part.items()})
            for name, tensor in part.items():
                self.residual[name] = tensor if replica == self.rank else self.residual[name] + tensor


def _when_done(work: Any, then: Callable[[], Tensor]) -> _Future[Tensor]:
    """A future of `then()`, called when `work` has ended; its error, where it failed."""

    def call(done: _Future[Any]) -> Tensor:
        done.value()
        return then()

    future: _Future[Tensor] = work.get_future().then(call)
    return future


def _draw(rows: int, columns: int, seed: str) -> Tensor:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") >> 1
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(number))


def _orthonormal(A: Tensor) -> Tensor:
    """Its columns made orthonormal in place, by modified Gram-Schmidt: rows that are zero stay zero, unlike in QR."""
    for number in range(A.shape[1]):
        column, rest = A[:, number : number + 1], A[:, number + 1 :]
        column.div_(column.norm().clamp_min(torch.finfo(A.dtype).tiny))
        rest.sub_(column @ (column.T @ rest))
    return A


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpacked(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of `flat` in these shapes, one after another."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
