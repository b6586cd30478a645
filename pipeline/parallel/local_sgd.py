"""Local SGD: replicas step alone, and average their weights every `parallel.local_sgd.every` steps.

Between two averages nothing is sent but the step's loss and gradient norm (a few bytes). With `outer_lr` and
`outer_momentum` the averages are steps of an outer optimizer, SGD with Nesterov momentum on the outer gradient
Δ = θ − mean(weights), θ the weights of the last average (DiLoCo; Douillard et al., arXiv 2311.08105, algorithm 1):

    momentum ← μ · momentum + Δ        θ ← θ − lr · (Δ + μ · momentum)        all replicas go on from θ

`lr: 1, μ: 0` is the plain average (McMahan et al., arXiv 1602.05629), and keeps no θ. Each replica's AdamW keeps its
own moments. The gradient is clipped by each replica's own norm; the metrics show the root of the mean of their squares.
In the first `warmup_steps` gradients are averaged instead, after every backward: the replicas stay one (post-local SGD;
Lin et al., arXiv 1808.07217, section 3).

**Checkpoints.** A stop may come inside a round, and must not change the result. So a checkpoint holds each replica's
weights and optimizer (`replica.R.…`), θ and the momentum (`outer.…`), from which the same number of replicas goes on
with the same bits. Its `model.…` and `optimizer.…`, which the digest covers, which are evaluated, and from which
another number of replicas starts, are the means over the replicas. Saving averages copies, never the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.parallel import LocalSgdConfig
from pipeline.parallel.replicas import ReplicaSync, StateDict

AT_ONCE = 1 << 26
"""Elements of one all-reduce (256 MiB): MPI counts to 2^31 only, and copies what lies on a GPU."""


class LocalSgd(ReplicaSync):
    """One replica's part in the averages."""

    def __init__(self, config: LocalSgdConfig, names: Mapping[str, nn.Parameter]) -> None:
        """`names`: the model's parameters, by names that know nothing of the layout."""
        self.config, self.rank, self.replicas = config, dist.get_rank(), dist.get_world_size()
        self.parameters = dict(names)
        self.outer: StateDict = {}
        """`at.NAME`: θ, `momentum.NAME`; empty for plain averages."""
        if config.outer_lr != 1 or config.outer_momentum:
            self.outer = {f"momentum.{name}": torch.zeros_like(p) for name, p in names.items()}
            self._begin()

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients during the warm-up."""
        if self.step > self.config.warmup_steps:
            return
        # zeros where a replica's batch did not use a parameter: another's may have, and all must send as much
        own = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}
        for name, mean in _mean(own, self.replicas).items():
            self.parameters[name].grad = mean

    def together(self, norm: Tensor) -> Tensor:
        """One number for all replicas' gradient norms, not finite where one of them is not."""
        square = norm.double().square()
        dist.all_reduce(square)
        return (square / self.replicas).sqrt().to(norm)

    @torch.no_grad()
    def end(self, good: bool) -> None:
        """Average the weights where the step ends a round, whether or not it changed them."""
        if self.step == self.config.warmup_steps:
            self._begin()
        if self.step <= self.config.warmup_steps or self.step % self.config.every:
            return
        means = _mean({name: parameter.detach() for name, parameter in self.parameters.items()}, self.replicas)
        lr, mu = self.config.outer_lr, self.config.outer_momentum
        for name, parameter in self.parameters.items():
            if self.outer:
                at, momentum = self.outer[f"at.{name}"], self.outer[f"momentum.{name}"]
                delta = at - means[name]
                momentum.mul_(mu).add_(delta)
                at.sub_(delta.add_(momentum, alpha=mu), alpha=lr)
            parameter.copy_(self.outer[f"at.{name}"] if self.outer else means[name])

    def saved(self, state: StateDict) -> StateDict:
        """What a checkpoint keeps, from this replica's `state`. Every replica must call it."""
        mine = {f"replica.{self.rank}.{name}": tensor for name, tensor in state.items()}
        return _mean(state, self.replicas) | mine | {f"outer.{name}": tensor for name, tensor in self.outer.items()}

    def describe(self) -> dict[str, Any]:
        """What a restore must know of it."""
        warmup = self.config.warmup_steps
        return {"replicas": self.replicas, "local": True, "outer": bool(self.outer), "warmup": warmup}

    def restore(self, state: StateDict, kept: Mapping[str, Any], read: Callable[[StateDict], None]) -> None:
        """Take up what `saved` kept; `state` holds the means already."""
        before = int(kept.get("replicas", 0)) if kept.get("local") else 0
        self._begin()
        if before and kept.get("outer"):
            read({f"outer.{name}": tensor for name, tensor in self.outer.items()})
        if before == self.replicas and self.config.warmup_steps <= kept.get("warmup", 0):  # else they must become one
            read({f"replica.{self.rank}.{name}": tensor for name, tensor in state.items()})

    def _begin(self) -> None:
        """θ are today's weights."""
        if self.outer:
            self.outer |= {f"at.{name}": p.detach().clone() for name, p in self.parameters.items()}


def _mean(state: StateDict, replicas: int) -> StateDict:
    """The mean of each tensor over the replicas, in new memory. All tensors are fp32."""
    flat = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    for part in flat.split(AT_ONCE):
        dist.all_reduce(part)
    parts = flat.div_(replicas).split([tensor.numel() for tensor in state.values()])
    return {name: part.view_as(old) for (name, old), part in zip(state.items(), parts, strict=True)}
