"""Synchronization of whole model replicas beyond the gradients that DDP averages.

The engine calls one `ReplicaSync` in each optimizer step:

    begin_step → forward, backward → reduce_gradients → combine_norms → optimizer step (may be skipped) → end_step

- `ReplicaSync` adds nothing to DDP. The class is also used for a single replica.
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
"""Values of `parallel.hook.kind` that keep the part of the gradient that was not sent (see :class:`GradientHook`)."""
MAX_REDUCED_ELEMENTS = 1 << 26
"""Maximum number of elements in one all-reduce (256 MiB in fp32).

The backend mpi needs the limit: an MPI count is below 2^31, and tensors on a GPU may be copied to host memory.
"""
_LOW_PRECISION = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Before torch 2.13, the function all_gather_single is called all_gather_into_tensor.
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
        """Exchange gradients after backward. This class does nothing, because DDP reduces gradients during backward."""

    def combine_norms(self, norm: Tensor) -> Tensor:
        """Return one gradient norm for all replicas, given this replica's `norm`.

        The result is finite only if the norms of all replicas are. With DDP, all replicas have the same norm.
        """
        return norm

    def end_step(self, is_applied: bool) -> None:
        """Finish the step. `is_applied` is True if the optimizer updated the weights."""

    def checkpoint_state(self, state: StateDict) -> StateDict:
        """Return the tensors that a checkpoint stores, given this replica's `state`. All replicas must call this."""
        return state

    def describe_state(self) -> dict[str, Any]:
        """Return metadata about the tensors that `checkpoint_state` adds. `restore_state` needs this metadata."""
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

    - *fp16*, *bf16*: converts the gradient, divided by the number of replicas, to this type. The all-reduce sums in
      the same type.
    - *Top-K* (Aji and Heafield, arXiv 1704.05021; Stich et al., arXiv 1809.07599): sends the largest values of each
      parameter, a fraction `ratio`, as pairs (int32 position, fp32 value). All replicas gather all pairs. During the
      warm-up the fraction falls exponentially from 1 to `ratio` (Lin et al., arXiv 1712.01887, section 3.3).
    - *PowerSGD* (Vogels et al., arXiv 1905.13727, algorithm 1): replaces each matrix M (n × m) by P Qᵀ, with P = M Q
      orthonormalized and Q = Mᵀ P. P and Q are summed over the replicas. The next step starts from Q. Vectors are sent
      uncompressed. So are matrices for which P and Q together are not smaller than M.

    **Error feedback.** Top-K and PowerSGD leave out a part of the gradient, the *residual*. Each replica adds its
    residual to its next gradient. Residuals are in units of the mean gradient: message + residual = gradient / replicas
    + old residual. For any number of replicas, the sum of all residuals is therefore the part of the gradients that the
    optimizer has not received yet. Residuals are stored per parameter, because DDP may rebuild its buckets. Residuals
    are committed only if the optimizer step is applied (`end_step`).

    If there is only one replica, its gradient is used uncompressed, including the residual. The sum of gradient and
    residual is also sent uncompressed if Top-K would send at least as much as an all-reduce (fraction × replicas ≥ 1).

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
        self.powersgd_q: StateDict = {}
        """PowerSGD's Q, from which the next step starts: fp32 of shape (columns, rank), the same on all replicas.

        Only parameters that PowerSGD compresses have a Q.
        """
        self._group: Any = None
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters.items()}
        self._next_residual: StateDict = {}
        self._next_powersgd_q: StateDict = {}
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
                    self.powersgd_q[name] = _sample_matrix(columns, config.rank, f"{seed}/{name}").to(parameter)

    def register(self, model: DistributedDataParallel) -> None:
        """Make `model` reduce its gradient buckets with this hook."""
        self._group = model.process_group
        reduce = {"topk": self._reduce_topk, "powersgd": self._reduce_powersgd}.get(self.config.kind, self._reduce_cast)
        model.register_comm_hook(None, lambda _, bucket: reduce(bucket))

    def end_step(self, is_applied: bool) -> None:
        """Commit the residuals and PowerSGD's Q of the step if its update was applied; discard them otherwise."""
        if is_applied:
            self.residual |= self._next_residual
            self.powersgd_q |= self._next_powersgd_q
        self._next_residual = {}
        self._next_powersgd_q = {}
        self._buffers_in_use.clear()

    @property
    def fraction(self) -> float:
        """Fraction of this step's gradient that Top-K sends."""
        warmup = self.config.warmup_steps
        return float(self.config.ratio ** min(1.0, (self.step - 1) / warmup)) if warmup else self.config.ratio

    # -- communication hooks, one for each kind of compression -------------------------------------------

    def _reduce_cast(self, bucket: dist.GradBucket) -> _Future[Tensor]:
        """Start an all-reduce of a bucket in fp16 or bf16."""
        buffer = bucket.buffer()
        # Divide before the reduction, because the sum could overflow.
        message = buffer.div_(self.replicas).to(_LOW_PRECISION[self.config.kind])
        work = dist.all_reduce(message, group=self._group, async_op=True)
        return _call_when_done(work, lambda: buffer.copy_(message))

    def _reduce_topk(self, bucket: dist.GradBucket) -> _Future[Tensor]:
        """Start an all-gather of the largest values of each gradient in a bucket, and store the residuals.

        If this would send at least as much as an all-reduce, start an all-reduce instead.
        """
        buffer = bucket.buffer()
        named_gradients = list(self._add_residuals(bucket))
        counts = [math.ceil(self.fraction * gradient.numel()) for _, gradient in named_gradients]
        # An all-gather moves 2 × sum(counts) × (replicas - 1) numbers, because each value has a position. A ring
        # all-reduce moves 2 × numel × (replicas - 1) / replicas numbers.
        if self.replicas == 1 or sum(counts) * self.replicas >= buffer.numel():
            return self._reduce_uncompressed(buffer, named_gradients)
        positions: list[Tensor] = []
        values: list[Tensor] = []
        for (name, gradient), count in zip(named_gradients, counts, strict=True):
            flat = gradient.view(-1)
            largest = flat.abs().topk(count, sorted=False).indices
            # Positions count from the start of the buffer.
            positions.append(largest + int(gradient.storage_offset() - buffer.storage_offset()))
            values.append(flat[largest])
            residual = flat.clone()
            residual[largest] = 0  # These values are sent.
            self._next_residual[name] = residual.view_as(gradient)
        # The fp32 values are sent as the int32 numbers with the same bits, so that one collective is enough.
        message = torch.cat([torch.cat(positions).int(), torch.cat(values).view(torch.int32)])
        all_messages = message.new_empty((self.replicas, 2, message.numel() // 2))

        def unpack() -> Tensor:
            """Set the buffer to the sum of the values of all replicas."""
            buffer.zero_()
            # All replicas add in the same order, so they get the same bits.
            for replica_positions, replica_values in all_messages:
                buffer.index_add_(0, replica_positions, replica_values.view(buffer.dtype))
            return buffer

        return _call_when_done(_all_gather(all_messages.view(-1), message, group=self._group, async_op=True), unpack)

    def _reduce_powersgd(self, bucket: dist.GradBucket) -> _Future[Tensor]:
        """All-reduce the matrices P of a bucket, start the all-reduce of the matrices Q, and store the residuals.

        The other gradients of the bucket are reduced uncompressed, together with P. If nothing is compressed (during
        the warm-up, or without matrices), start an all-reduce of the whole bucket.
        """
        buffer = bucket.buffer()
        named_gradients = list(self._add_residuals(bucket))
        should_compress = self.replicas > 1 and self.step > self.config.warmup_steps
        compressed_names = {name for name, _ in named_gradients if should_compress and name in self.powersgd_q}
        if not compressed_names:
            return self._reduce_uncompressed(buffer, named_gradients)
        matrices = [(name, gradient) for name, gradient in named_gradients if name in compressed_names]
        uncompressed = [(name, gradient) for name, gradient in named_gradients if name not in compressed_names]
        self._next_residual.update((name, torch.zeros_like(gradient)) for name, gradient in uncompressed)
        M = [gradient.flatten(1) for _, gradient in matrices]
        products = [m @ self.powersgd_q[name] for m, (name, _) in zip(M, matrices, strict=True)]
        packed_P = _pack(products + [g for _, g in uncompressed])
        dist.all_reduce(packed_P, group=self._group)  # This call waits, because Q depends on the sum.
        sums = _unpack(packed_P, [(len(m), self.config.rank) for m in M] + [g.shape for _, g in uncompressed])
        P = [_orthonormalize(p) for p in sums[: len(M)]]
        Q = []
        for m, p, (name, gradient) in zip(M, P, matrices, strict=True):
            q = m.T @ p
            self._next_residual[name] = (m - p @ q.T).view_as(gradient)
            Q.append(q)
        packed_Q = _pack(Q)
        self._buffers_in_use += [packed_P, packed_Q]  # The matrices P are views of `packed_P`.

        def unpack() -> Tensor:
            """Set the buffer to P Qᵀ of each matrix and to the sums of the other gradients, and store the next Q."""
            for m, p, q, (name, _) in zip(M, P, _unpack(packed_Q, [q.shape for q in Q]), matrices, strict=True):
                # A column of zeros would stay zero in every later step. The next step therefore starts with the old
                # values of this column.
                self._next_powersgd_q[name] = torch.where(q.any(0), q, self.powersgd_q[name])
                torch.mm(p, q.T, out=m)
            for (_, gradient), total in zip(uncompressed, sums[len(M) :], strict=True):
                gradient.copy_(total)
            return buffer

        return _call_when_done(dist.all_reduce(packed_Q, group=self._group, async_op=True), unpack)

    def _add_residuals(self, bucket: dist.GradBucket) -> Iterator[tuple[str, Tensor]]:
        """Add the residuals to the bucket's gradients in place, and yield the name and the sum of each parameter.

        The sums are in units of the mean gradient. The results are views of the bucket's buffer.
        """
        bucket.buffer().div_(self.replicas)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[parameter]
            yield name, gradient.add_(self.residual[name])

    def _reduce_uncompressed(self, buffer: Tensor, named_gradients: Sequence[tuple[str, Tensor]]) -> _Future[Tensor]:
        """Start an all-reduce of a whole bucket. The residuals of its gradients become zero."""
        self._next_residual.update((name, torch.zeros_like(gradient)) for name, gradient in named_gradients)
        return _call_when_done(dist.all_reduce(buffer, group=self._group, async_op=True), lambda: buffer)

    # -- state -------------------------------------------------------------------------------------------

    def checkpoint_state(self, state: StateDict) -> StateDict:
        """Return `state`, this replica's residuals and PowerSGD's Q. The digest of a checkpoint covers only `state`."""
        residuals = {f"replica.{self.rank}.residual.{name}": tensor for name, tensor in self.residual.items()}
        return state | residuals | {f"start.{name}": tensor for name, tensor in self.powersgd_q.items()}

    def describe_state(self) -> dict[str, Any]:
        """Return the number of replicas, whether there are residuals, and PowerSGD's rank (0 without Q)."""
        powersgd_rank = self.config.rank if self.powersgd_q else 0
        return {"replicas": self.replicas, "residuals": bool(self.residual), "rank": powersgd_rank}

    def restore_state(self, state: StateDict, saved: Mapping[str, Any], read: Callable[[StateDict], None]) -> None:
        """Restore residuals and Q. If PowerSGD's rank has changed, Q keeps its initial values.

        If the number of replicas has changed to n, the residuals of saved replica r are added to those of replica
        r mod n.
        """
        if self.powersgd_q and saved.get("rank") == self.config.rank:
            read({f"start.{name}": tensor for name, tensor in self.powersgd_q.items()})
        saved_replicas = int(saved["replicas"]) if self.residual and saved.get("residuals") else 0
        for replica in range(self.rank, saved_replicas, self.replicas):
            saved_residual = {name: torch.empty_like(tensor) for name, tensor in self.residual.items()}
            read({f"replica.{replica}.residual.{name}": tensor for name, tensor in saved_residual.items()})
            for name, tensor in saved_residual.items():
                self.residual[name] = tensor if replica == self.rank else self.residual[name] + tensor


class LocalSgd(ReplicaSync):
    """Local SGD: replicas update their weights independently and average them every `parallel.local_sgd.every` steps.

    Between two averages, replicas exchange only the loss and the gradient norm of each step (a few bytes). With
    `outer_lr` and `outer_momentum`, each average is a step of an outer optimizer: SGD with Nesterov momentum on the
    outer gradient Δ = θ − mean(weights). θ are the weights after the last average (DiLoCo; Douillard et al., arXiv
    2311.08105, algorithm 1):

        momentum ← μ · momentum + Δ        θ ← θ − lr · (Δ + μ · momentum)        all replicas continue from θ

    `lr: 1, μ: 0` is the plain average (McMahan et al., arXiv 1602.05629) and stores no θ. Each replica has separate
    AdamW moments and clips its gradient by its local norm. The metrics show the root mean square of these norms. In the
    first `warmup_steps` steps, gradients are averaged after every backward pass, so replicas stay equal (post-local
    SGD; Lin et al., arXiv 1808.07217, section 3).

    **Checkpoints.** A stop between two averages must not change the result. A checkpoint therefore stores the weights
    and the optimizer state of each replica (`replica.R.…`), and θ and the momentum (`outer.…`). The same number of
    replicas resumes bit-identically. The tensors `model.…`, `optimizer.…` and `ema.…` of the checkpoint are means over
    the replicas. The digest covers these means, evaluation uses them, and a different number of replicas resumes from
    them. A save averages copies of the tensors, so it never changes the replicas.

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
        # All replicas must send the same number of values. If this replica's batch did not use a parameter, the
        # parameter has no gradient, and zeros are sent.
        local = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}
        for name, mean in _average(local, self.replicas).items():
            self.parameters[name].grad = mean

    def combine_norms(self, norm: Tensor) -> Tensor:
        """Return the root mean square of the replicas' gradient norms. The result is finite only if all norms are."""
        square = norm.double().square()
        dist.all_reduce(square)
        return (square / self.replicas).sqrt().to(norm)

    @torch.no_grad()
    def end_step(self, is_applied: bool) -> None:
        """After the warm-up, average the weights every `every` steps, even if this step did not update them.

        In the last step of the warm-up, set θ to the weights, which are still equal on all replicas.
        """
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
        """Return the number of replicas, whether the outer optimizer has a state, and the length of the warm-up."""
        warmup = self.config.warmup_steps
        return {"replicas": self.replicas, "local": True, "outer": bool(self.outer), "warmup": warmup}

    def restore_state(self, state: StateDict, saved: Mapping[str, Any], read: Callable[[StateDict], None]) -> None:
        """Restore the outer optimizer and the state of this replica.

        If the number of replicas has changed, or the warm-up has become longer, keep the means that are in `state`.
        """
        saved_replicas = int(saved.get("replicas", 0)) if saved.get("local") else 0
        self._set_outer_weights()  # If the checkpoint contains θ, the next lines replace this value.
        if saved_replicas and saved.get("outer"):
            read({f"outer.{name}": tensor for name, tensor in self.outer.items()})
        # Replicas must be equal during the warm-up. If the warm-up has become longer, it may not be over yet.
        if saved_replicas == self.replicas and self.config.warmup_steps <= saved.get("warmup", 0):
            read({f"replica.{self.rank}.{name}": tensor for name, tensor in state.items()})

    def _set_outer_weights(self) -> None:
        """Set θ to the current weights."""
        if self.outer:
            self.outer |= {f"at.{name}": p.detach().clone() for name, p in self.parameters.items()}


def _call_when_done(work: Any, function: Callable[[], Tensor]) -> _Future[Tensor]:
    """Return a future of the result of `function`, which is called when `work` is done.

    If `work` fails, the future has the error of `work`.
    """

    def call_function(done: _Future[Any]) -> Tensor:
        """Return the result of `function`, given the finished future of `work`."""
        done.value()  # This raises the error of `work`.
        return function()

    future: _Future[Tensor] = work.get_future().then(call_function)
    return future


def _sample_matrix(rows: int, columns: int, seed: str) -> Tensor:
    """Return a matrix (fp32) of standard normal values that depend only on `seed`."""
    integer_seed = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") >> 1  # 63 bits
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(integer_seed))


def _orthonormalize(A: Tensor) -> Tensor:
    """Orthonormalize the columns of A in place by modified Gram-Schmidt. Unlike in QR, rows of zeros stay zero."""
    for index in range(A.shape[1]):
        column = A[:, index : index + 1]
        rest = A[:, index + 1 :]
        column.div_(column.norm().clamp_min(torch.finfo(A.dtype).tiny))
        rest.sub_(column @ (column.T @ rest))
    return A


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return one vector with the values of all tensors, one tensor after another."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return views of consecutive ranges of the vector `flat`, with these shapes."""
    ranges = flat.split([math.prod(shape) for shape in shapes])
    return [values.view(*shape) for values, shape in zip(ranges, shapes, strict=True)]


def _average(state: StateDict, replicas: int) -> StateDict:
    """Return the mean of each tensor over the replicas, in new memory. All tensors are fp32."""
    flat = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    for chunk in flat.split(MAX_REDUCED_ELEMENTS):
        dist.all_reduce(chunk)
    means = flat.div_(replicas).split([tensor.numel() for tensor in state.values()])
    return {name: mean.view_as(tensor) for (name, tensor), mean in zip(state.items(), means, strict=True)}
