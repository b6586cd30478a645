"""Synchronization of whole model replicas beyond the gradients that DDP averages.

The engine calls one `ReplicaSync` in each optimizer step:

    begin_step → forward, backward → reduce_gradients → combine_norms → optimizer step (may be skipped) → end_step

- `ReplicaSync` adds nothing to DDP. It is also used for a single replica.
- `GradientHook` compresses the gradients that DDP sends (`parallel.hook`).
- `LocalSgd` averages weights every few steps instead of gradients (`parallel.local_sgd`).
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

from pipeline.checkpoint.checkpointer import StateDict
from pipeline.config.sections import HookConfig, LocalSgdConfig

HOOKS_WITH_RESIDUALS = ("powersgd", "topk")
MAX_REDUCED_ELEMENTS = 1 << 26
"""Maximum number of elements in one all-reduce (256 MiB in fp32).

MPI can count only to 2^31, and it copies tensors that are on a GPU to host memory.
"""
_LOW_PRECISION = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Before torch 2.13, the function is called all_gather_into_tensor.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_Future = torch.futures.Future
"""Type of the result of a communication hook: a future of the bucket's reduced gradients."""


class ReplicaSync:
    """Synchronization of one replica with the others. This class adds nothing to what DDP does."""

    step = 1
    """The optimizer step of the next backward pass."""

    def begin_step(self, step: int) -> None:
        """Start step number `step`."""
        self.step = step

    def reduce_gradients(self) -> None:
        """Exchange gradients after backward."""

    def combine_norms(self, norm: Tensor) -> Tensor:
        """Return one number for the gradient norms of all replicas. It is not finite if any of the norms is not."""
        return norm

    def end_step(self, is_applied: bool) -> None:
        """Finish the step. `is_applied` is True if the optimizer updated the weights."""

    def checkpoint_state(self, state: StateDict) -> StateDict:
        """Return the tensors that a checkpoint stores, given this replica's `state`. Every replica must call this."""
        return state

    def describe_state(self) -> dict[str, Any]:
        """Return metadata about the tensors that `checkpoint_state` adds. `restore_state` needs it."""
        return {}

    def restore_state(self, state: StateDict, saved: Mapping[str, Any], read: Callable[[StateDict], None]) -> None:
        """Restore the tensors that `checkpoint_state` added, on any number of replicas.

        Args:
            state: this replica's state, already restored.
            saved: the result of `describe_state` when the checkpoint was saved.
            read: function that fills tensors in place, by their names in the checkpoint.
        """


class GradientHook(ReplicaSync):
    """Gradient compression: a DDP communication hook and the state that it keeps from step to step.

    - *fp16*, *bf16*: sends the gradient, divided by the number of replicas, in this type. The all-reduce also sums in
      this type.
    - *Top-K* (Aji and Heafield, arXiv 1704.05021; Stich et al., arXiv 1809.07599): sends the largest values of each
      parameter, a fraction `ratio`, as pairs (int32 position, fp32 value). All replicas gather all pairs. During the
      warm-up the fraction falls exponentially from 1 to `ratio` (Lin et al., arXiv 1712.01887, section 3.3).
    - *PowerSGD* (Vogels et al., arXiv 1905.13727, algorithm 1): replaces each matrix M (n × m) by P Qᵀ, with P = M Q
      orthonormalized and Q = Mᵀ P. Both are summed over the replicas. The next step starts from Q. Vectors are sent
      whole, and so are matrices if P and Q are not smaller than M.

    **Error feedback.** Top-K and PowerSGD leave out a part of the gradient, the *residual*. Each replica adds it to its
    next gradient. Residuals are in units of the mean gradient: message + residual = gradient / replicas + old residual.
    For any number of replicas, the sum of all residuals is therefore the part of the gradients that the optimizer has
    not received yet. Residuals are stored per parameter, because DDP may rebuild its buckets. They are committed only
    if the optimizer step is applied (`end_step`).

    The whole gradient, including the residual, is sent if there is only one replica. It is also sent if Top-K would
    send at least as much as an all-reduce (fraction × replicas ≥ 1).

    The hook runs during backward, bucket by bucket, in the same order on all ranks. Every collective must start in the
    hook itself, because the callbacks of futures could run in a different order on other ranks.

    Args:
        config: `parallel.hook`.
        named_parameters: the parameters that DDP reduces, by names that do not depend on the layout.
        seed: seed of PowerSGD's first Q.
    """

    def __init__(self, config: HookConfig, named_parameters: Mapping[str, nn.Parameter], seed: int) -> None:
        self.config = config
        self.rank = dist.get_rank()
        self.replicas = dist.get_world_size()
        self.residual: StateDict = {}
        self.start: StateDict = {}
        """PowerSGD's Q of each parameter: fp32 of shape (columns, rank), the same on all replicas."""
        self._group: Any = None
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters.items()}
        self._next_residual: StateDict = {}
        self._next_start: StateDict = {}
        # Callbacks read these tensors on another CUDA stream. If backward freed them, the compute stream could
        # overwrite their memory too early.
        self._buffers_in_use: list[Tensor] = []
        if config.kind in HOOKS_WITH_RESIDUALS:
            self.residual = {name: torch.zeros_like(parameter) for name, parameter in named_parameters.items()}
        if config.kind == "powersgd":
            for name, parameter in named_parameters.items():
                if parameter.ndim < 2:
                    continue
                rows = len(parameter)
                columns = parameter[0].numel()
                # P and Q are used only if they are smaller than the matrix.
                compressed_size = (rows + columns) * config.rank
                if compressed_size < rows * columns:
                    self.start[name] = _sample_matrix(columns, config.rank, f"{seed}/{name}").to(parameter)

    def register(self, model: DistributedDataParallel) -> None:
        """Let `model` reduce its buckets with this hook."""
        self._group = model.process_group
        reduce = {"topk": self._reduce_topk, "powersgd": self._reduce_powersgd}.get(self.config.kind, self._reduce_cast)
        model.register_comm_hook(None, lambda _, bucket: reduce(bucket))

    def end_step(self, is_applied: bool) -> None:
        """Commit the residuals of the step if its update was applied; discard them otherwise."""
        if is_applied:
            self.residual |= self._next_residual
            self.start |= self._next_start
        self._next_residual = {}
        self._next_start = {}
        self._buffers_in_use.clear()

    @property
    def fraction(self) -> float:
        """Fraction of this step's gradient that Top-K sends."""
        warmup = self.config.warmup_steps
        return float(self.config.ratio ** min(1.0, (self.step - 1) / warmup)) if warmup else self.config.ratio

    # -- kinds of compression ----------------------------------------------------------------------------

    def _reduce_cast(self, bucket: dist.GradBucket) -> _Future[Tensor]:
        """Start an all-reduce of a bucket in fp16 or bf16."""
        buffer = bucket.buffer()
        # Divide before the reduction, because the sum could overflow.
        message = buffer.div_(self.replicas).to(_LOW_PRECISION[self.config.kind])
        work = dist.all_reduce(message, group=self._group, async_op=True)
        return _call_when_done(work, lambda: buffer.copy_(message))

    def _reduce_topk(self, bucket: dist.GradBucket) -> _Future[Tensor]:
        """Start an all-gather of the largest values of each gradient in a bucket, and store the residuals."""
        buffer = bucket.buffer()
        parts = list(self._add_residuals(bucket))
        counts = [math.ceil(self.fraction * gradient.numel()) for _, gradient in parts]
        if self.replicas == 1 or sum(counts) * self.replicas >= buffer.numel():
            return self._reduce_whole(buffer, parts)
        positions: list[Tensor] = []
        values: list[Tensor] = []
        for (name, gradient), count in zip(parts, counts, strict=True):
            flat = gradient.view(-1)
            largest = flat.abs().topk(count, sorted=False).indices
            positions.append(largest + int(gradient.storage_offset() - buffer.storage_offset()))
            values.append(flat[largest])
            residual = flat.clone()
            residual[largest] = 0
            self._next_residual[name] = residual.view_as(gradient)
        message = torch.cat([torch.cat(positions).int(), torch.cat(values).view(torch.int32)])
        all_messages = message.new_empty((self.replicas, 2, message.numel() // 2))

        def unpack() -> Tensor:
            buffer.zero_()
            for position, value in all_messages:  # All ranks add in the same order, so they get the same bits.
                buffer.index_add_(0, position, value.view(buffer.dtype))
            return buffer

        return _call_when_done(_all_gather(all_messages.view(-1), message, group=self._group, async_op=True), unpack)

    def _reduce_powersgd(self, bucket: dist.GradBucket) -> _Future[Tensor]:
        """All-reduce the matrices P of a bucket, start the all-reduce of the matrices Q, and store the residuals."""
        buffer = bucket.buffer()
        parts = list(self._add_residuals(bucket))
        compresses = self.replicas > 1 and self.step > self.config.warmup_steps
        matrices = [part for part in parts if compresses and part[0] in self.start]
        if not matrices:
            return self._reduce_whole(buffer, parts)
        uncompressed = [(name, gradient) for name, gradient in parts if all(name != other for other, _ in matrices)]
        self._next_residual.update((name, torch.zeros_like(gradient)) for name, gradient in uncompressed)
        M = [gradient.flatten(1) for _, gradient in matrices]
        products = [m @ self.start[name] for m, (name, _) in zip(M, matrices, strict=True)]
        first = _pack(products + [g for _, g in uncompressed])
        dist.all_reduce(first, group=self._group)  # This waits, because Q depends on the sum.
        sums = _unpack(first, [(len(m), self.config.rank) for m in M] + [g.shape for _, g in uncompressed])
        P = [_orthonormalize(p) for p in sums[: len(M)]]
        Q = []
        for m, p, (name, gradient) in zip(M, P, matrices, strict=True):
            q = m.T @ p
            self._next_residual[name] = (m - p @ q.T).view_as(gradient)
            Q.append(q)
        second = _pack(Q)
        self._buffers_in_use += [first, second]  # The matrices P are views of `first`.

        def unpack() -> Tensor:
            for m, p, q, (name, _) in zip(M, P, _unpack(second, [q.shape for q in Q]), matrices, strict=True):
                # A column of zeros would stay zero in every later step, so it keeps its old values.
                self._next_start[name] = torch.where(q.any(0), q, self.start[name])
                torch.mm(p, q.T, out=m)
            for (_, gradient), total in zip(uncompressed, sums[len(M) :], strict=True):
                gradient.copy_(total)
            return buffer

        return _call_when_done(dist.all_reduce(second, group=self._group, async_op=True), unpack)

    def _add_residuals(self, bucket: dist.GradBucket) -> Iterator[tuple[str, Tensor]]:
        """Add residuals to the bucket's gradients and yield each parameter's name and sum.

        Sums are in units of the mean gradient. They are views of the bucket's buffer.
        """
        bucket.buffer().div_(self.replicas)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[parameter]
            yield name, gradient.add_(self.residual[name])

    def _reduce_whole(self, buffer: Tensor, parts: Sequence[tuple[str, Tensor]]) -> _Future[Tensor]:
        """Start an all-reduce of the whole buffer. Residuals become zero."""
        self._next_residual.update((name, torch.zeros_like(gradient)) for name, gradient in parts)
        return _call_when_done(dist.all_reduce(buffer, group=self._group, async_op=True), lambda: buffer)

    # -- state -------------------------------------------------------------------------------------------

    def checkpoint_state(self, state: StateDict) -> StateDict:
        """Return `state`, this replica's residuals and PowerSGD's Q. The digest of a checkpoint covers only `state`."""
        residuals = {f"replica.{self.rank}.residual.{name}": tensor for name, tensor in self.residual.items()}
        return state | residuals | {f"start.{name}": tensor for name, tensor in self.start.items()}

    def describe_state(self) -> dict[str, Any]:
        """Return the number of replicas, and which tensors a checkpoint has."""
        powersgd_rank = self.config.rank if self.start else 0
        return {"replicas": self.replicas, "residuals": bool(self.residual), "rank": powersgd_rank}

    def restore_state(self, state: StateDict, saved: Mapping[str, Any], read: Callable[[StateDict], None]) -> None:
        """Restore residuals and Q.

        If the number of replicas has changed to n, the residuals of saved replica r are added to those of replica
        r mod n.
        """
        if self.start and saved.get("rank") == self.config.rank:
            read({f"start.{name}": tensor for name, tensor in self.start.items()})
        saved_replicas = int(saved["replicas"]) if self.residual and saved.get("residuals") else 0
        for replica in range(self.rank, saved_replicas, self.replicas):
            part = {name: torch.empty_like(tensor) for name, tensor in self.residual.items()}
            read({f"replica.{replica}.residual.{name}": tensor for name, tensor in part.items()})
            for name, tensor in part.items():
                self.residual[name] = tensor if replica == self.rank else self.residual[name] + tensor


class LocalSgd(ReplicaSync):
    """Local SGD: replicas update their weights independently and average them every `parallel.local_sgd.every` steps.

    Between two averages, replicas exchange only the loss and the gradient norm of each step (a few bytes). With
    `outer_lr` and `outer_momentum`, each average is a step of an outer optimizer: SGD with Nesterov momentum on the
    outer gradient Δ = θ − mean(weights). θ are the weights after the last average (DiLoCo; Douillard et al., arXiv
    2311.08105, algorithm 1):

        momentum ← μ · momentum + Δ        θ ← θ − lr · (Δ + μ · momentum)        all replicas continue from θ

    `lr: 1, μ: 0` is the plain average (McMahan et al., arXiv 1602.05629) and stores no θ. Each replica has separate
    AdamW moments and clips its gradient by its local norm. The metrics show the root mean square of the norms. In the
    first `warmup_steps` steps, gradients are averaged after every backward pass, so replicas stay equal (post-local
    SGD; Lin et al., arXiv 1808.07217, section 3).

    **Checkpoints.** A stop between two averages must not change the result. A checkpoint therefore stores the weights
    and the optimizer state of each replica (`replica.R.…`), and θ and the momentum (`outer.…`). The same number of
    replicas resumes bit-identically. The checkpoint's `model.…` and `optimizer.…` are means over the replicas. The
    digest covers them, they are evaluated, and another number of replicas starts from them. Saving averages copies and
    never changes the replicas.

    Args:
        config: `parallel.local_sgd`.
        named_parameters: the parameters of the model, by names that do not depend on the layout.
    """

    def __init__(self, config: LocalSgdConfig, named_parameters: Mapping[str, nn.Parameter]) -> None:
        self.config = config
        self.rank = dist.get_rank()
        self.replicas = dist.get_world_size()
        self.parameters = dict(named_parameters)
        self.outer: StateDict = {}
        """State of the outer optimizer: θ (`at.NAME`) and momentum (`momentum.NAME`). Empty for plain averages."""
        if config.outer_lr != 1 or config.outer_momentum:
            self.outer = {f"momentum.{name}": torch.zeros_like(p) for name, p in named_parameters.items()}
            self._set_outer_weights()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average the gradients during the warm-up."""
        if self.step > self.config.warmup_steps:
            return
        # All replicas must send the same number of values. A parameter that this replica's batch did not use has no
        # gradient, so zeros are sent.
        local = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}
        for name, mean in _average(local, self.replicas).items():
            self.parameters[name].grad = mean

    def combine_norms(self, norm: Tensor) -> Tensor:
        """Return the root mean square of the replicas' gradient norms. It is not finite if any of them is not."""
        square = norm.double().square()
        dist.all_reduce(square)
        return (square / self.replicas).sqrt().to(norm)

    @torch.no_grad()
    def end_step(self, is_applied: bool) -> None:
        """Average the weights every `every` steps, even if this step did not update them."""
        if self.step == self.config.warmup_steps:
            self._set_outer_weights()
        if self.step <= self.config.warmup_steps or self.step % self.config.every:
            return
        means = _average({name: parameter.detach() for name, parameter in self.parameters.items()}, self.replicas)
        lr = self.config.outer_lr
        mu = self.config.outer_momentum
        for name, parameter in self.parameters.items():
            if self.outer:
                theta = self.outer[f"at.{name}"]
                momentum = self.outer[f"momentum.{name}"]
                delta = theta - means[name]
                momentum.mul_(mu).add_(delta)
                theta.sub_(delta.add_(momentum, alpha=mu), alpha=lr)
            parameter.copy_(self.outer[f"at.{name}"] if self.outer else means[name])

    def checkpoint_state(self, state: StateDict) -> StateDict:
        """Return the means over the replicas, each replica's `state`, and the state of the outer optimizer."""
        local = {f"replica.{self.rank}.{name}": tensor for name, tensor in state.items()}
        return _average(state, self.replicas) | local | {f"outer.{name}": tensor for name, tensor in self.outer.items()}

    def describe_state(self) -> dict[str, Any]:
        """Return the number of replicas and which tensors a checkpoint has."""
        warmup = self.config.warmup_steps
        return {"replicas": self.replicas, "local": True, "outer": bool(self.outer), "warmup": warmup}

    def restore_state(self, state: StateDict, saved: Mapping[str, Any], read: Callable[[StateDict], None]) -> None:
        """Restore the state of each replica. If their number has changed, all start from the means in `state`."""
        saved_replicas = int(saved.get("replicas", 0)) if saved.get("local") else 0
        self._set_outer_weights()
        if saved_replicas and saved.get("outer"):
            read({f"outer.{name}": tensor for name, tensor in self.outer.items()})
        # Replicas must be equal during the warm-up. If the warm-up was made longer, they also start from the means.
        if saved_replicas == self.replicas and self.config.warmup_steps <= saved.get("warmup", 0):
            read({f"replica.{self.rank}.{name}": tensor for name, tensor in state.items()})

    def _set_outer_weights(self) -> None:
        """Set θ to the current weights."""
        if self.outer:
            self.outer |= {f"at.{name}": p.detach().clone() for name, p in self.parameters.items()}


def _call_when_done(work: Any, function: Callable[[], Tensor]) -> _Future[Tensor]:
    """Return a future of the result of `function`, which is called when `work` is done.

    If `work` fails, the future has its error.
    """

    def call(done: _Future[Any]) -> Tensor:
        done.value()
        return function()

    future: _Future[Tensor] = work.get_future().then(call)
    return future


def _sample_matrix(rows: int, columns: int, seed: str) -> Tensor:
    """Return a matrix (fp32) of standard normal values that depend only on `seed`."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") >> 1
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(number))


def _orthonormalize(A: Tensor) -> Tensor:
    """Orthonormalize the columns of A in place by modified Gram-Schmidt. Unlike in QR, rows of zeros stay zero."""
    for number in range(A.shape[1]):
        column = A[:, number : number + 1]
        rest = A[:, number + 1 :]
        column.div_(column.norm().clamp_min(torch.finfo(A.dtype).tiny))
        rest.sub_(column @ (column.T @ rest))
    return A


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of all tensors in one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return consecutive views of the vector `flat` with these shapes."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def _average(state: StateDict, replicas: int) -> StateDict:
    """Return the mean of each tensor over the replicas, in new memory. All tensors are fp32."""
    flat = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    for part in flat.split(MAX_REDUCED_ELEMENTS):
        dist.all_reduce(part)
    parts = flat.div_(replicas).split([tensor.numel() for tensor in state.values()])
    return {name: part.view_as(old) for (name, old), part in zip(state.items(), parts, strict=True)}
