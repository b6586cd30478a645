"""The model on its ranks: what the trainer talks to, whatever the layout.

An engine builds this rank's part of the model and composes the parallelisms around it, from the inside out: cut by
tensor, recomputing, compiled, sharded by data, staged by pipeline. It offers what a step needs: `backward` (all
micro-batches of a step, the loss on all ranks), `clip_gradients` (over the whole model) and `state_dict` by names and
DTensors that know nothing of the layout, so that any layout loads what any other saved.

Initial weights are drawn by name (pipeline/model/decoder.py): every layout starts from the same ones. Random numbers of
a step are seeded by (seed, step, place): a rerun on the same layout draws the same ones, and tensor parallel ranks that
compute the same activations drop the same of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from pipeline.checkpoint.checkpointer import StateDict
from pipeline.comm.groups import World, all_gather_results
from pipeline.config.sections import Config
from pipeline.data.loader import Batch
from pipeline.model.activation_checkpointing import apply_activation_checkpointing
from pipeline.model.decoder import full_tensor, local_tensor, parameter_seed, write_parameter
from pipeline.model.open_weights import OpenWeights
from pipeline.model.spec import EMBEDDING, LM_HEAD
from pipeline.model.task import DTYPES, Task
from pipeline.parallel import data_parallel, float8
from pipeline.parallel.mesh import Layout
from pipeline.parallel.replica_sync import HOOKS_WITH_RESIDUALS, GradientHook, LocalSgd, ReplicaSync
from pipeline.train.optimizer import (
    LeanAdamW,
    LossScaler,
    compute_total_norm,
    find_frozen_names,
    initialize_custom_state,
    make_custom_optimizer,
    make_optimizer,
)

if TYPE_CHECKING:  # importing torch's pipelines costs half a second, for those who have one
    from pipeline.parallel.pipeline_parallel import PipelineRunner


def compute_step_seed(seed: int, step: int, place: int, micro: int) -> int:
    """Seed of everything random in one micro-batch: a function of place and time, not of history."""
    text = f"{seed}/{step}/{place}/{micro}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


class Engine:
    """This rank's stages, its optimizer, and a step's forward and backward."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        world: World,
        task: Task,
        own: AbstractContextManager[None] | None = None,
        *,
        from_scratch: bool = True,
        source: OpenWeights | None = None,
    ) -> None:
        """`own` is entered around forward passes: this rank's own work, before it waits for others.

        from_scratch: whether the training begins; where a checkpoint is loaded at once, weights need not be drawn.
        source: what it begins with instead of drawn weights.
        """
        self.own: AbstractContextManager[None] = own or nullcontext()
        self.config, self.layout, self.world, self.task = config, layout, world, task
        parallel = config.parallel
        uncut = layout.pp == 1 and layout.tp == 1
        mesh = (
            None if uncut and layout.zero == 0 and not parallel.offload else layout.build_device_mesh(world.device.type)
        )
        self._split = mesh is not None
        self._cut_logits = layout.tp > 1 and parallel.loss_parallel and config.model.target is None
        # seeds randomness: the same on ranks that compute the same activations
        self._place = layout.random_stream(world.rank)
        self._entries = task.units_per_step  # what the loss of the global batch is a sum over
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._batch: Batch = {}
        # a user's optimizer, and hooks that keep what they saw, may look at the weights before they are loaded
        self._draw = from_scratch or config.optimizer.name == "own" or parallel.hook.kind in HOOKS_WITH_RESIDUALS
        self._frozen = find_frozen_names(config.optimizer.freeze, task)
        numbers = layout.stages_on_rank(layout.coordinates(world.rank).pp)
        self.parts = [self._build(layout.stage_layers[number], mesh, source) for number in numbers]
        if config.optimizer.name == "own":
            self.optimizer = make_custom_optimizer(
                task.user_module.optimizer, list(task.named_weights(self.parts[0])), config.optimizer
            )
        else:
            blocks = [block for part in self.parts for block in task.blocks(part)]
            named = [each for part in self.parts for each in task.named_weights(part)]
            keys = {parameter: parameter_seed(config.run.seed, name) for name, parameter in named}
            how = config.optimizer, world.device, blocks, keys, config.train.compile
            self.optimizer = make_optimizer(nn.ModuleList(self.parts), *how)
        self._tried_out = False
        self.scaler = LossScaler() if config.train.precision == "fp16" else None
        self.model: nn.Module = self.parts[0]
        """What forward calls where there is no pipeline."""
        self.replica_sync = ReplicaSync()
        trained = {name: parameter for name, parameter in task.named_weights(self.parts[0]) if parameter.requires_grad}
        self._pipeline: PipelineRunner | None = None
        if layout.pp > 1 and mesh is not None:
            from pipeline.parallel.pipeline_parallel import PipelineRunner

            self._stage_group = mesh.get_group("pp")
            self._pipeline = PipelineRunner(
                self.parts, numbers, layout, world.device, self._stage_group, self._weighted_loss, self.own
            )
        elif mesh is None and parallel.local_sgd is not None:
            self.replica_sync = LocalSgd(parallel.local_sgd, trained)
        elif mesh is None and (world.size > 1 or parallel.hook.kind in HOOKS_WITH_RESIDUALS):
            ddp = self.model = data_parallel.wrap_with_ddp(self.model, world.device, parallel.bucket_mb)
            if parallel.hook.kind != "none":
                hook = self.replica_sync = GradientHook(parallel.hook, trained, config.run.seed)
                hook.register(ddp)
            self._fix_buckets()

    def _build(self, layers: range, mesh: DeviceMesh | None, source: OpenWeights | None) -> nn.Module:
        """The part of the model with these blocks, with this rank's share of its weights."""
        config, layout, task = self.config, self.layout, self.task
        part = task.build(layers)
        if config.optimizer.state.master == "none":
            for parameter in part.parameters():
                parameter.data = parameter.data.bfloat16()
        if config.train.precision == "fp8":
            float8.convert_to_float8(task.blocks(part), self.world.device, layout.tp, config.train.fp8_scales)
        if mesh is not None and layout.tp > 1:
            task.apply_tensor_parallel(part, mesh["tp"], layout)
        for name, parameter in task.named_weights(part):
            parameter.requires_grad_(name not in self._frozen)
        for block in task.blocks(part):
            apply_activation_checkpointing(block, config.parallel.activation_checkpointing)
        for piece in task.modules_to_compile(part, layout) if config.train.compile else ():
            piece.compile()
        if mesh is not None and layout.fsdp:
            over = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
            dtype, offload = DTYPES.get(config.train.precision), config.parallel.offload
            groups = task.fsdp_groups(part)
            data_parallel.apply_fsdp(
                part, groups, over, dtype, free_after_forward=layout.gathers_blocks, offload=offload
            )
        part.to_empty(device="cpu" if config.parallel.offload else self.world.device)
        task.init_weights(part, self.world.device, self._draw and source is None)
        if source is not None:
            source.copy_into(task.named_weights(part))
        return part

    # -- a step ------------------------------------------------------------------------------------------

    def backward(
        self,
        batch: Batch,
        step: int,
        enter_phase: Callable[[str], None] = lambda phase: None,
        wants_attention: Callable[[], bool] = bool,
    ) -> Tensor:
        """Run forward and backward of this rank's part of the batch; leave reduced gradients in the parameters.

        Args:
            batch: global_batch / data parallel size samples, by array, such as `tokens` (int64, (B, T + 1)); the same
                on all ranks of a pipeline and of a tensor parallel group.
            enter_phase: called with the name of each phase that begins.
            wants_attention: whether this rank has a request (pipeline/resilience/stop.py).

        Returns:
            The mean loss over the global batch's tokens (samples, entries): float64, 0-d, the same on all ranks. NaN if
            any rank wants attention; then `reduce_loss_again` returns the loss.
        """
        if (entries := self.task.count_loss_entries(batch)) is not None:
            dist.all_reduce(entries)
            self._entries = max(1, int(entries.item()) // self.layout.ranks_per_replica)
        self.replica_sync.begin_step(step)
        with loss_parallel() if self._cut_logits else nullcontext():  # cross-entropy on logits that are cut
            run = self._run_pipeline if self._pipeline else self._accumulate
            self._loss = run(batch, step, enter_phase)
        enter_phase("reduce")
        self.replica_sync.reduce_gradients()
        loss = self._mean(self._loss * math.nan if wants_attention() else self._loss)
        if self.layout.tp > 1:
            self._settle_gradients()
        self._join_tied_gradients()
        return loss

    def reduce_loss_again(self) -> Tensor:
        """Return the loss that `backward` returns if no rank wants attention. All ranks call it."""
        return self._mean(self._loss)

    def _mean(self, part: Tensor) -> Tensor:
        """All ranks' parts of a summed loss as the mean over the global batch."""
        total = part.clone()
        dist.all_reduce(total)
        return total / (self.layout.tp * self._entries)

    def _accumulate(self, batch: Batch, step: int, enter_phase: Callable[[str], None]) -> Tensor:
        """One micro-batch after another through the whole model; this rank's summed loss."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        micro_batches = self.task.split_micro_batches(batch, self.config.train.micro_batch)
        for micro, piece in enumerate(micro_batches):
            torch.manual_seed(compute_step_seed(self.config.run.seed, step, self._place, micro))
            with data_parallel.gradient_sync(self.model, self.layout, micro == len(micro_batches) - 1):
                enter_phase("forward")
                with self.own:
                    loss = self._loss_of(piece)
                enter_phase("backward")
                # gradients are averaged over data parallel ranks: their number makes it the global batch's mean loss
                (loss * self._weight()).backward()
            total += full_tensor(loss.detach())
        return total

    def _run_pipeline(self, batch: Batch, step: int, enter_phase: Callable[[str], None]) -> Tensor:
        """All micro-batches through the pipeline; the summed loss on ranks with the last stage, elsewhere 0."""
        assert self._pipeline is not None
        torch.manual_seed(compute_step_seed(self.config.run.seed, step, self._place, 0))
        enter_phase("pipeline")
        self._batch, inputs = batch, self.task.model_inputs(batch)
        rows = torch.arange(len(inputs[0]), device=self.world.device)
        losses = self._pipeline.run_step(
            inputs, self.task.loss_inputs(batch), rows, self.task.document_boundaries(batch)
        )
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for loss in losses:
            total += full_tensor(loss.detach())
        return total / self._weight()

    def _loss_of(self, batch: Batch) -> Tensor:
        """Summed loss of the whole model."""
        more = {**self.task.loss_inputs(batch), **self.task.document_boundaries(batch)}
        return self.task.loss(self.model(*self.task.model_inputs(batch), **more), batch)

    def _weighted_loss(self, outputs: Any, rows_B: Tensor) -> Tensor:
        return self.task.loss(outputs, self.task.select_samples(self._batch, rows_B)) * self._weight()

    def _weight(self) -> float:
        """Factor of a micro-batch's summed loss before backward."""
        return self.layout.gradient_ranks / self._entries * (1.0 if self.scaler is None else self.scaler.scale)

    def _settle_gradients(self) -> None:
        """Bring gradients to the placements of their parameters: DTensor leaves some as sums still to be taken."""
        for parameter in (p for part in self.parts for p in part.parameters()):
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    def clip_gradients(self, limit: float | None) -> Tensor:
        """Norm of the whole model's gradient, before it is clipped to `limit`; the same on all ranks.

        With fp16 gradients are unscaled here; where any rank's overflowed, the norm is not finite, on all ranks.
        """
        parameters = [p for part in self.parts for p in part.parameters() if p.grad is not None]
        if self.scaler is not None:
            for parameter in parameters:
                parameter.grad.mul_(1 / self.scaler.scale)  # type: ignore[union-attr]
        norm = self._norm(parameters)
        if limit is not None and isinstance(self.optimizer, LeanAdamW):
            self.optimizer.clip_with_norm(limit, norm)
        elif limit is not None:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return self.replica_sync.combine_norms(norm)

    def _norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Norm of the gradients of all ranks' parameters, each counted once: fp32, 0-d.

        Where ranks hold parts, each adds the squares of its own, divided by the number of ranks with the same values.
        """
        if not self._split:
            return compute_total_norm([p.grad for p in parameters if p.grad is not None])
        copy, squares = self._tied_copy(), torch.zeros((), dtype=torch.float64, device=self.world.device)
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            gradient, copies = parameter.grad, 1
            if isinstance(gradient, DTensor):
                sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
                copies = math.prod(size for size, placement in sizes if placement.is_replicate())
            if parameter is not copy and gradient is not None:
                by_copies.setdefault(copies, []).append(local_tensor(gradient))
        for copies, gradients in by_copies.items():
            squares += compute_total_norm(gradients).to(squares).square() / copies
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def update_weights(self, norm: float, *, is_good: bool = True) -> None:
        """Perform one optimizer step, and clear the gradients.

        Args:
            norm: what `clip_gradients` returned. If it has overflowed in fp16, the step is skipped.
            is_good: whether to change the weights.
        """
        is_good = is_good and (self.scaler is None or self.scaler.update_scale(norm))
        if is_good:
            self.optimizer.step()
        data_parallel.clear_gradients(self.model, self.optimizer)
        self.replica_sync.end_step(is_good)

    def _fix_buckets(self) -> None:
        """Make DDP rebuild its gradient buckets now, not after the first step.

        DDP reduces the first backward after a start in other buckets than all later ones; with three ranks or
        more the sums are then taken in another order, and a resumed run differs from an undisturbed one in
        the last bits. One backward whose gradients are thrown away settles the buckets.
        """
        self._loss_of(self.task.smallest_batch(self.world.device)).backward()
        data_parallel.clear_gradients(self.model, self.optimizer)
        self.replica_sync.end_step(is_applied=False)

    # -- tied embeddings on two stages -------------------------------------------------------------------

    def _tied_copy(self) -> nn.Parameter | None:
        """The output layer's copy of a tied embedding that lives in another stage; None where there is none here."""
        if self._pipeline is None or not self.config.model.tie_word_embeddings or not self._pipeline.has_last_stage:
            return None
        return self.parts[-1].get_parameter(LM_HEAD)

    def _join_tied_gradients(self) -> None:
        """Give both copies of a tied embedding the sum of their gradients: updated alike, they stay equal."""
        if self._pipeline is None or not self.config.model.tie_word_embeddings or EMBEDDING in self._frozen:
            return
        first, copy = self._pipeline.has_first_stage, self._tied_copy()
        if first and copy is not None:  # a V shape: both ends are here
            embedding = self.parts[0].get_parameter(EMBEDDING)
            assert embedding.grad is not None and copy.grad is not None
            embedding.grad.add_(copy.grad)
            copy.grad.copy_(embedding.grad)
        elif first or copy is not None:
            from pipeline.parallel.pipeline_parallel import add_gradient_of_peer

            weight = copy if copy is not None else self.parts[0].get_parameter(EMBEDDING)
            assert weight.grad is not None
            add_gradient_of_peer(
                local_tensor(weight.grad), self.layout.last_stage_rank if first else 0, self._stage_group
            )

    # -- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """This rank's weights and optimizer state by layout-independent names; loading fills them in place."""
        state: StateDict = {}
        if self.config.optimizer.name == "own" and not self.optimizer.state:
            initialize_custom_state(self.optimizer)
            self._tried_out = True
        for part in self.parts:
            for name, parameter in self.task.named_weights(part):
                if f"model.{name}" not in state:  # but for the second end of a V with tied embeddings
                    state[f"model.{name}"] = parameter.detach()
                    for key, value in self.optimizer.state.get(parameter, {}).items():
                        state[f"optimizer.{name}.{key}"] = value
        return state

    def reset_custom_optimizer(self) -> None:
        """Clear the state of a custom optimizer. Call after `state_dict()` if there is no checkpoint to load."""
        if self._tried_out:
            self.optimizer.state.clear()

    def checkpoint_state(self) -> tuple[StateDict, dict[str, Any]]:
        """What a checkpoint keeps: tensors, and what a restore must know of replicas that differ. All ranks call it."""
        return self.replica_sync.checkpoint_state(self.state_dict()), self.replica_sync.describe_state()

    @torch.no_grad()
    def copy_weights_to(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        """Give `model`, whole or split in whatever way, the weights that a checkpoint would hold now.

        All ranks call it; `group`: a Gloo group of all. Memory: one whole parameter at a time.
        """
        state, _ = self.checkpoint_state()
        owners: dict[str, int] = {}
        if self.layout.pp > 1:  # each stage has its own: the first rank that has one sends it to all
            for rank, names in reversed(list(enumerate(all_gather_results(group, lambda: list(state))))):
                owners |= dict.fromkeys(names, rank)
        for name, parameter in self.task.named_weights(model):
            key = f"model.{name}"
            if key in state:
                values = full_tensor(state[key].to(self.world.device)).float().contiguous()
            else:
                values = torch.empty(parameter.shape, dtype=torch.float32, device=self.world.device)
            if owners:
                dist.broadcast(values, owners[key])
            write_parameter(values, parameter)

    @torch.no_grad()
    def finish_loading(
        self, kept: Mapping[str, Any] | None = None, read: Callable[[StateDict], None] | None = None
    ) -> str | None:
        """Complete the state after the tensors of `state_dict()` were filled, such as a tied copy of the embedding.

        Args:
            kept: what `checkpoint_state` returned about the replicas.
            read: fills tensors by the names of `checkpoint_state`.

        Returns:
            A description of what differs in the replicas' own state; None if nothing does.
        """
        copy = self._tied_copy()
        if copy is not None and self._pipeline is not None and self._pipeline.has_first_stage:
            embedding = self.parts[0].get_parameter(EMBEDDING)
            copy.copy_(embedding)
            for key, value in self.optimizer.state.get(embedding, {}).items():
                self.optimizer.state[copy][key].copy_(value)
        if read is not None:
            self.replica_sync.restore_state(self.state_dict(), kept or {}, read)
        return _not_kept(kept or {}, self.replica_sync.describe_state())


def _not_kept(kept: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In words what a restore drops or changes of what replicas had of their own; both are `describe`'s."""
    before, replicas = kept.get("replicas"), now.get("replicas")
    notes: list[str] = []
    if kept.get("residuals") and not now.get("residuals"):
        notes.append(f"the residuals of {before} replicas are dropped")
    elif kept.get("residuals") and before != replicas:
        notes.append(f"residuals of {before} replicas summed on {replicas}")
    if kept.get("rank") and kept["rank"] != now.get("rank"):
        notes.append(f"PowerSGD's Q of rank {kept['rank']} is dropped")
    same = now.get("local") and before == replicas and now["warmup"] <= kept.get("warmup", 0)
    if kept.get("local") and not same:
        notes.append(f"all replicas start from the mean of {before}")
    if kept.get("outer") and not now.get("outer"):
        notes.append("the outer optimizer's weights and momentum are dropped")
    return "; ".join(notes) or None
