"""The engine runs the model and its optimizer on each rank, with the same interface for every parallel layout.

The engine builds this rank's part of the model. To this part it applies, in this order: float8, tensor parallelism,
activation checkpointing, torch.compile, FSDP or DDP, and the pipeline. The names in `state_dict` do not depend on the
layout, so a checkpoint of one layout can be loaded by another.

Initial weights depend only on the seed and the parameter names (pipeline/model/decoder.py), so they are the same in
every layout. The random numbers of a step, for example for dropout, depend on seed, step, micro-batch and random stream
(`Layout.random_stream`). In a pipeline, the seed of the first micro-batch is used for the whole step. Tensor-parallel
ranks that compute the same activations share a stream and so apply the same dropout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from pipeline.checkpoint.checkpointer import EMA_PREFIX, WEIGHT_PREFIX, StateDict
from pipeline.comm.groups import World, all_gather_results
from pipeline.config.sections import Config
from pipeline.data.loader import Batch
from pipeline.model import lora
from pipeline.model.activation_checkpointing import apply_activation_checkpointing
from pipeline.model.decoder import full_tensor, local_tensor, parameter_seed, write_parameter
from pipeline.model.open_weights import WeightSource
from pipeline.model.spec import EMBEDDING, LM_HEAD
from pipeline.model.task import DTYPES, Task
from pipeline.parallel import batch_norm, data_parallel, float8
from pipeline.parallel.context_parallel import ContextParallel, create_context_group
from pipeline.parallel.host_tensor import HostTensor
from pipeline.parallel.mesh import Layout
from pipeline.parallel.replica_sync import HOOKS_WITH_RESIDUALS, GradientHook, LocalSgd, ReplicaSync
from pipeline.parallel.sample_gather import SampleGather, create_data_parallel_group
from pipeline.train.ema import WeightAverage
from pipeline.train.optimizer import (
    LeanAdamW,
    LossScaler,
    check_elementwise,
    compute_total_norm,
    find_frozen_names,
    initialize_custom_state,
    make_custom_optimizer,
    make_optimizer,
)

if TYPE_CHECKING:  # The import takes half a second, and only runs with pipeline parallelism need it.
    from pipeline.parallel.pipeline_parallel import PipelineRunner


def compute_step_seed(seed: int, step: int, stream: int, micro_batch: int) -> int:
    """Return the seed for the random numbers of one micro-batch on this rank.

    Args:
        seed: the config key `run.seed`.
        step: the number of the step, counted from 1.
        stream: this rank's `Layout.random_stream`.
        micro_batch: the index of the micro-batch in the step, counted from 0.
    """
    text = f"{seed}/{step}/{stream}/{micro_batch}".encode()
    # The shift keeps 63 bits, because torch's seeds are signed 64-bit integers.
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


class Engine:
    """This rank's part of the model, its optimizer, and forward and backward of a step.

    Args:
        config: the run's config.
        layout: the sizes of all kinds of parallelism.
        world: the process group of all ranks.
        task: builds the model and computes its loss.
        compute_timer: a context manager that is entered around each forward pass, to measure this rank's compute time.
        from_scratch: whether the run starts without a checkpoint. Otherwise the caller loads a checkpoint next, so
            initial weights are sampled only if a custom optimizer or a gradient hook may read them before.
        source: weights to start from instead of sampled ones.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        world: World,
        task: Task,
        compute_timer: AbstractContextManager[None] | None = None,
        *,
        from_scratch: bool = True,
        source: WeightSource | None = None,
    ) -> None:
        self.compute_timer: AbstractContextManager[None] = compute_timer or nullcontext()
        self.config = config
        self.layout = layout
        self.world = world
        self.task = task
        parallel = config.parallel
        coordinates = layout.coordinates(world.rank)
        has_full_model = layout.pp == 1 and layout.tp == 1 and layout.zero == 0 and not parallel.offload
        mesh = None if has_full_model else layout.build_device_mesh(world.device.type)
        if layout.cp > 1:
            task.split_sequences(ContextParallel(coordinates.cp, layout.cp, create_context_group(layout)))
        if config.train.gather:
            task.gather_samples(SampleGather(create_data_parallel_group(layout)))
        self.has_distributed_model = mesh is not None
        """Whether the parameters are distributed over ranks: by FSDP, tensor parallelism or a pipeline."""
        self._has_sharded_logits = layout.tp > 1 and parallel.loss_parallel and config.model.target is None
        self.random_stream = layout.random_stream(world.rank)
        self._loss_entries = 0
        """Number of entries of the latest global batch that have a loss: tokens, or samples of a custom model."""
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        """The summed loss of this rank's samples in the latest step: float64, 0-d."""
        self._batch: Batch = {}
        """This rank's batch of the step, from which the pipeline selects the samples of a micro-batch."""
        # Custom optimizers, and gradient hooks with residuals, may read the weights before a checkpoint is loaded.
        has_custom_optimizer = config.optimizer.name == "own"  # The user's module defines the optimizer.
        reads_weights_early = has_custom_optimizer or parallel.hook.kind in HOOKS_WITH_RESIDUALS
        self._needs_initial_weights = from_scratch or reads_weights_early
        self._frozen = find_frozen_names(config.optimizer.freeze, task)
        stage_numbers = layout.stages_on_pipeline_rank(coordinates.pp)
        self.parts = [self._build_part(layout.stage_layers[number], mesh, source) for number in stage_numbers]
        """This rank's pipeline-parallel stages; one module with all layers if there is no pipeline."""
        if has_custom_optimizer:
            named_weights = [each for part in self.parts for each in task.named_weights(part)]
            if self.has_distributed_model:
                check_elementwise(task.user_module.optimizer, named_weights, config.optimizer)
            self.optimizer = make_custom_optimizer(task.user_module.optimizer, named_weights, config.optimizer)
        else:
            blocks = [block for part in self.parts for block in task.blocks(part)]
            named_weights = [each for part in self.parts for each in task.named_weights(part)]
            rounding_seeds = {parameter: parameter_seed(config.run.seed, name) for name, parameter in named_weights}
            self.optimizer = make_optimizer(
                nn.ModuleList(self.parts), config.optimizer, world.device, blocks, rounding_seeds, config.train.compile
            )
        self.ema: WeightAverage | None = None
        """The moving average of this rank's weights; None without `train.ema`."""
        if config.train.ema is not None:
            saved_weights = (each for part in self.parts for each in task.saved_weights(part))
            self.ema = WeightAverage(config.train.ema, saved_weights)
        self._step = 0
        """The number of the latest step whose backward pass has started."""
        self._has_placeholder_state = False
        """Whether the state of a custom optimizer has arbitrary values. `state_dict` creates this state, so that a
        checkpoint can be loaded into its tensors."""
        if from_scratch:
            task.check_model(self.parts[0], world.device)
        self.scaler = LossScaler() if config.train.precision == "fp16" else None
        self.model: nn.Module = self.parts[0]
        """The module whose `forward` is called if there is no pipeline."""
        self.replica_sync = ReplicaSync()
        # Only ranks with the full model, which has a single part, use these parameters.
        trainable = {name: weight for name, weight in task.named_weights(self.parts[0]) if weight.requires_grad}
        self._pipeline: PipelineRunner | None = None
        if layout.pp > 1 and mesh is not None:
            from pipeline.parallel.pipeline_parallel import PipelineRunner

            self._pipeline_group = mesh.get_group("pp")
            self._pipeline = PipelineRunner(
                self.parts,
                stage_numbers,
                layout,
                world.device,
                self._pipeline_group,
                self._compute_scaled_loss,
                self.compute_timer,
            )
        elif mesh is None and parallel.local_sgd is not None:
            self.replica_sync = LocalSgd(parallel.local_sgd, trainable)
        elif task.has_training_step:  # Its gradients are reduced by pipeline/train/training_step.py.
            pass
        # A single rank needs the hook to apply residuals of a checkpoint from several ranks.
        elif mesh is None and (world.size > 1 or parallel.hook.kind in HOOKS_WITH_RESIDUALS):
            ddp = self.model = data_parallel.wrap_with_ddp(self.model, world.device, parallel.bucket_mb)
            if parallel.hook.kind != "none":
                hook = self.replica_sync = GradientHook(parallel.hook, trainable, config.run.seed)
                hook.register(ddp)
            self._rebuild_buckets()

    def _build_part(self, layers: range, mesh: DeviceMesh | None, source: WeightSource | None) -> nn.Module:
        """Build the part of the model that consists of these layers, with this rank's shard of each weight.

        Args:
            layers: the numbers of the decoder blocks. The first part of the model also has the embedding, and the last
                part the output layer.
            mesh: the device mesh; None if this rank has the full model.
            source: the weights to start from. If None, and if initial weights are needed, the weights are sampled.
        """
        config = self.config
        layout = self.layout
        task = self.task
        part = task.build(layers)
        batch_norm.synchronize_batch_norms(config, part, self.world.size, self.world.device)
        if config.optimizer.state.master == "none":  # There are no fp32 master weights, only bf16 weights.
            for parameter in part.parameters():
                parameter.data = parameter.data.bfloat16()
        if config.train.precision == "fp8":
            float8.convert_to_float8(task.blocks(part), self.world.device, layout.tp, config.train.fp8_scales)
        if mesh is not None and layout.tp > 1:
            task.apply_tensor_parallel(part, mesh["tp"], layout)
        for name, parameter in task.named_weights(part):
            parameter.requires_grad_(name not in self._frozen)
        for block in task.blocks(part):
            apply_activation_checkpointing(
                block, config.parallel.activation_checkpointing, is_compiled=config.train.compile
            )
        for module in task.modules_to_compile(part, layout) if config.train.compile else ():
            module.compile()
        if mesh is not None and layout.fsdp:
            data_parallel.apply_fsdp(
                part,
                task.fsdp_groups(part),
                mesh["replicate", "shard"] if layout.state_replicas > 1 else mesh["shard"],
                DTYPES.get(config.train.precision),
                free_after_forward=layout.gathers_blocks and not task.has_training_step,
                offload=config.parallel.offload,
                calls_children=task.has_training_step,
            )
        # `task.build` creates the parameters on the meta device, without memory. Now each rank allocates its shards.
        lora.allocate(part, torch.device("cpu") if config.parallel.offload else self.world.device)
        # Checkpoints do not contain the weights to which adapters are added. A custom model samples them again.
        samples_again = config.adapter is not None and config.model.target is not None
        task.init_weights(part, self.world.device, source is None and (self._needs_initial_weights or samples_again))
        if source is not None:
            source.copy_into(lora.quantize_copied(part, task.base_weights(part), self.world.device))
        if self._needs_initial_weights:
            task.init_adapters(part, self.world.device)
        return part

    def reset_shapes(self) -> None:
        """Accept samples of other shapes from the next step on. All ranks must call this method."""
        if self._pipeline is not None:
            self._pipeline.reset_shapes()
        if self.config.train.compile:
            # Otherwise torch would compile for variable lengths, unlike in an attempt that starts with this length.
            torch.compiler.reset()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # The blocks of the old length do not fit the new length.

    # -- a step ------------------------------------------------------------------------------------------

    def backward(
        self,
        batch: Batch,
        step: int,
        enter_phase: Callable[[str], None] = lambda phase: None,
        wants_attention: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """Run forward and backward of all micro-batches, and store the reduced gradients in the parameters.

        Args:
            batch: this rank's part of the global batch: arrays by name, such as `tokens` (int64, shape (B, T + 1)). B
                is global_batch divided by the data-parallel size. All ranks of a pipeline, and of a tensor-parallel
                group, must pass the same batch.
            step: the number of the step, counted from 1.
            enter_phase: called with the name of each phase when it begins.
            wants_attention: returns True if this rank has a request, such as a stop (pipeline/resilience/stop.py).

        Returns:
            The mean loss over all entries of the global batch that have a loss: float64, 0-d, the same on all ranks. If
            any rank has a request, the returned loss is NaN. In that case, `reduce_loss_again` returns the loss.
        """
        self._loss_entries = self.task.units_per_step
        if (entries := self.task.count_loss_entries(batch)) is not None:
            # The sum counts the batch of a data-parallel replica once for each of its ranks.
            dist.all_reduce(entries)
            self._loss_entries = max(1, int(entries.item()) // self.layout.ranks_per_replica)
        self._step = step
        self.replica_sync.begin_step(step)
        with loss_parallel() if self._has_sharded_logits else nullcontext():
            run_micro_batches = self._run_pipeline if self._pipeline else self._accumulate_gradients
            self._loss = run_micro_batches(batch, step, enter_phase)
        enter_phase("reduce")
        self.replica_sync.reduce_gradients()
        loss = self._reduce_loss(self._loss * math.nan if wants_attention() else self._loss)
        if self.layout.tp > 1:
            self._match_gradient_placements()
        self._add_tied_gradients()
        return loss

    def reduce_loss_again(self) -> Tensor:
        """Return the loss of the latest `backward`, without the NaN of ranks with a request.

        All ranks must call this method.
        """
        return self._reduce_loss(self._loss)

    def _reduce_loss(self, loss: Tensor) -> Tensor:
        """Return the mean loss over the global batch: float64, 0-d, the same on all ranks.

        Args:
            loss: the summed loss of this rank's tokens. All ranks of a tensor-parallel group have the same loss; on
                ranks without the last pipeline-parallel stage, the loss is 0.
        """
        total = loss.clone()
        dist.all_reduce(total)
        return total / (self.layout.tp * self._loss_entries)

    def _accumulate_gradients(self, batch: Batch, step: int, enter_phase: Callable[[str], None]) -> Tensor:
        """Run the micro-batches one after another through the full model. Return the sum of their losses."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        size = self.config.train.micro_batch
        micro_batches = self.task.split_micro_batches(batch, size)
        boundaries = self.task.split_micro_batches(self.task.document_boundaries(batch), size)
        if not boundaries:
            boundaries = [{}] * len(micro_batches)
        for index, (micro_batch, micro_boundaries) in enumerate(zip(micro_batches, boundaries, strict=True)):
            torch.manual_seed(compute_step_seed(self.config.run.seed, step, self.random_stream, index))
            is_last = index == len(micro_batches) - 1
            with data_parallel.gradient_sync(self.model, self.layout, is_last):
                enter_phase("forward")
                with self.compute_timer:
                    loss = self._compute_loss(micro_batch, micro_boundaries)
                enter_phase("backward")
                (loss * self._loss_factor()).backward()
            total += full_tensor(loss.detach())
        return total

    def _run_pipeline(self, batch: Batch, step: int, enter_phase: Callable[[str], None]) -> Tensor:
        """Run all micro-batches through the pipeline.

        Returns:
            The sum of the losses of all micro-batches on the ranks of the last pipeline-parallel stage; 0 on the other
            ranks.
        """
        assert self._pipeline is not None
        # The pipeline runs the micro-batches in its own order, so the whole step uses the seed of the first
        # micro-batch.
        torch.manual_seed(compute_step_seed(self.config.run.seed, step, self.random_stream, 0))
        enter_phase("pipeline")
        self._batch = batch
        inputs = self.task.model_inputs(batch)
        # The pipeline splits this tensor like the inputs, and passes the indices of each micro-batch to
        # `_compute_scaled_loss`.
        rows_B = torch.arange(len(inputs[0]), device=self.world.device)
        scaled_losses = self._pipeline.run_step(
            inputs, self.task.loss_inputs(batch), rows_B, self.task.document_boundaries(batch)
        )
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for loss in scaled_losses:
            total += full_tensor(loss.detach())
        return total / self._loss_factor()

    def _compute_loss(self, batch: Batch, boundaries: Mapping[str, Tensor]) -> Tensor:
        """Run the model on a batch and return the summed loss. This rank must have all layers of the model.

        Args:
            batch: the samples.
            boundaries: where documents begin (`Task.document_boundaries`).
        """
        # DDP and FSDP would move the tensors to the device.
        host_tensors = {name: HostTensor(tensor) for name, tensor in boundaries.items()}
        keywords = {**self.task.loss_inputs(batch), **host_tensors}
        return self.task.loss(self.model(*self.task.model_inputs(batch), **keywords), batch)

    def _compute_scaled_loss(self, outputs: Any, rows_B: Tensor) -> Tensor:
        """Return the summed loss of a micro-batch, scaled for backward.

        Args:
            outputs: the output of the last pipeline-parallel stage.
            rows_B: int64 (B,), the indices of the micro-batch's samples in this rank's batch.
        """
        return self.task.loss(outputs, self.task.select_samples(self._batch, rows_B)) * self._loss_factor()

    def _loss_factor(self) -> float:
        """Return the factor by which a micro-batch's summed loss is multiplied before backward.

        The gradients of all ranks are averaged over `gradient_ranks`. With this factor, the average is the gradient of
        the mean loss over the global batch, times the loss scale of fp16.
        """
        return self.layout.gradient_ranks / self._loss_entries * (1.0 if self.scaler is None else self.scaler.scale)

    def _match_gradient_placements(self) -> None:
        """Redistribute each gradient to the placements of its parameter, because DTensor leaves some partial sums."""
        for parameter in (p for part in self.parts for p in part.parameters()):
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    def clip_gradients(self, limit: float | None, selected: Sequence[nn.Parameter] | None = None) -> Tensor:
        """Clip the gradient of the full model to the norm `limit`. If `limit` is None, do not clip.

        With fp16, the gradients are divided by the loss scale first. `LeanAdamW` clips only in its next step.

        Args:
            limit: the largest norm.
            selected: the parameters whose gradient is clipped; None: all parameters of the model.

        Returns:
            The norm before clipping: fp32, 0-d, the same on all ranks. If a gradient overflowed, the norm is not
            finite. With Local SGD, each replica clips by its own norm, and the result is the root mean square of the
            norms of all replicas.
        """
        candidates = [p for part in self.parts for p in part.parameters()] if selected is None else selected
        parameters = [p for p in candidates if p.grad is not None]
        if self.scaler is not None:
            for parameter in parameters:
                parameter.grad.mul_(1 / self.scaler.scale)  # type: ignore[union-attr]
        norm = self._compute_norm(parameters)
        if limit is not None and isinstance(self.optimizer, LeanAdamW):
            self.optimizer.clip_with_norm(limit, norm)
        elif limit is not None:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return self.replica_sync.combine_norms(norm)

    def _compute_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the L2 norm of the full model's gradient: fp32, 0-d.

        If the parameters are distributed over ranks, each rank sums the squares of its gradients, and an all-reduce
        adds the sums. If a gradient is a DTensor that is replicated on several ranks, each of these ranks divides its
        sum by the number of these ranks. Therefore the gradient counts once. All other gradients are on one rank only.

        If this rank has the full model, the result is the norm of this rank's gradients. All ranks have the same
        gradients, except with Local SGD, where each replica has its own norm.

        Args:
            parameters: this rank's parameters that have a gradient.
        """
        if not self.has_distributed_model:
            return compute_total_norm([p.grad for p in parameters if p.grad is not None])
        # A pipeline with a tied embedding has a second copy of the embedding in its last stage, which must not count.
        uncounted_copy = self._get_output_layer_copy()
        sum_of_squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        gradients_by_copy_count: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            gradient = parameter.grad
            copy_count = 1
            if isinstance(gradient, DTensor):
                sizes_and_placements = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
                copy_count = math.prod(size for size, placement in sizes_and_placements if placement.is_replicate())
            if parameter is not uncounted_copy and gradient is not None:
                gradients_by_copy_count.setdefault(copy_count, []).append(local_tensor(gradient))
        for copy_count, gradients in gradients_by_copy_count.items():
            sum_of_squares += compute_total_norm(gradients).to(sum_of_squares).square() / copy_count
        dist.all_reduce(sum_of_squares)
        return sum_of_squares.sqrt().float()

    def update_weights(self, norm: float, *, is_good: bool = True) -> None:
        """Perform one optimizer step, clear the gradients and update the moving average of the weights.

        Args:
            norm: the norm that `clip_gradients` returned. With fp16, the weights do not change if the norm is not
                finite.
            is_good: whether the weights may change. False if the step is bad and must be skipped.
        """
        is_applied = is_good and (self.scaler is None or self.scaler.update_scale(norm))
        if is_applied:
            self.optimizer.step()
        data_parallel.clear_gradients(self.model, self.optimizer)
        self.replica_sync.end_step(is_applied)
        if is_applied and self.ema is not None:
            self.ema.update(self._step)

    def end_training_step(self, step: int, *, is_applied: bool) -> None:
        """Finish a step of the user's `training_step`. Update the moving average of the weights if they changed."""
        self._step = step
        if is_applied and self.ema is not None:
            self.ema.update(step)

    def _rebuild_buckets(self) -> None:
        """Make DDP rebuild its gradient buckets now, not after the first step.

        In the first backward pass after a start, DDP uses other buckets than in later passes. With three or more ranks,
        this changes the order of summation, so a resumed run would differ in the last bits from an uninterrupted run.
        Therefore this method runs one backward pass and discards its gradients.
        """
        batch = self.task.smallest_batch(self.world.device)
        if batch_norm.list_batch_norms(self.parts[0]):  # Training would change the running statistics.
            self.model.eval()
        self._compute_loss(batch, self.task.document_boundaries(batch)).backward()
        self.model.train()
        data_parallel.clear_gradients(self.model, self.optimizer)
        self.replica_sync.end_step(is_applied=False)

    # -- tied embeddings in a pipeline -------------------------------------------------------------------

    def _get_output_layer_copy(self) -> nn.Parameter | None:
        """Return the output layer's copy of a tied embedding; None if this rank has no such copy.

        Only a pipeline needs a copy, because its first stage has the embedding and its last stage the output layer.
        """
        if self._pipeline is None or not self.config.model.tie_word_embeddings or not self._pipeline.has_last_stage:
            return None
        return self.parts[-1].get_parameter(LM_HEAD)

    def _add_tied_gradients(self) -> None:
        """Set the gradients of both copies of a tied embedding to their sum, so that the copies stay equal."""
        if self._pipeline is None or not self.config.model.tie_word_embeddings or EMBEDDING in self._frozen:
            return
        has_first_stage = self._pipeline.has_first_stage
        copy = self._get_output_layer_copy()
        if has_first_stage and copy is not None:  # In a V schedule, this rank has the first and the last stage.
            embedding = self.parts[0].get_parameter(EMBEDDING)
            assert embedding.grad is not None and copy.grad is not None
            embedding.grad.add_(copy.grad)
            copy.grad.copy_(embedding.grad)
        elif has_first_stage or copy is not None:
            from pipeline.parallel.pipeline_parallel import add_gradient_of_peer

            weight = copy if copy is not None else self.parts[0].get_parameter(EMBEDDING)
            assert weight.grad is not None
            peer = self.layout.last_stage_pipeline_rank if has_first_stage else 0
            add_gradient_of_peer(local_tensor(weight.grad), peer, self._pipeline_group)

    # -- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return this rank's weights, optimizer state and averages, by names that do not depend on the layout.

        With adapters, only their weights are returned. The tensors are not copies: to load a checkpoint, fill them in
        place.
        """
        state: StateDict = {}
        # An optimizer of the user creates its state in its first step. A checkpoint can only be loaded into existing
        # state, so state with arbitrary values is created here.
        if self.config.optimizer.name == "own" and not self.optimizer.state:
            initialize_custom_state(self.optimizer)
            self._has_placeholder_state = True
        for part in self.parts:
            for name, parameter in self.task.saved_weights(part):
                # In a V schedule, a rank has the first and the last stage, which both have the tied embedding.
                if f"{WEIGHT_PREFIX}{name}" not in state:
                    state[f"{WEIGHT_PREFIX}{name}"] = parameter.detach()
                    for key, value in self.optimizer.state.get(parameter, {}).items():
                        state[f"optimizer.{name}.{key}"] = value
            state |= {f"{WEIGHT_PREFIX}{name}": buffer for name, buffer in self.task.saved_buffers(part)}
        if self.ema is not None:
            state |= {f"{EMA_PREFIX}{name}": average for name, average in self.ema.averages.items()}
        return state

    def reset_custom_optimizer(self) -> None:
        """Clear the state of a custom optimizer if `state_dict` created it with arbitrary values.

        Call this method only if no checkpoint was loaded into the state.
        """
        if self._has_placeholder_state:
            self.optimizer.state.clear()

    def checkpoint_state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the tensors to save, and a description of the state that differs between data-parallel replicas.

        All ranks must call this method.
        """
        return self.replica_sync.checkpoint_state(self.state_dict()), self.replica_sync.describe_state()

    @torch.no_grad()
    def copy_weights_to(self, model: nn.Module, group: dist.ProcessGroup, *, averaged: bool = False) -> None:
        """Copy the weights that a checkpoint would contain now to another model. All ranks must call this method.

        Only one parameter at a time is gathered in memory.

        Args:
            model: the target, on all ranks. Its parameters may be sharded.
            group: a Gloo group of all ranks.
            averaged: whether to copy the moving averages of the trained weights (`train.ema`) instead of these weights.
        """
        lora.share_quantized(self.parts[0], model)  # If there are quantized weights, the model has one part.
        shared_weights = {id(module.weight) for module in lora.list_quantized(model)}
        base = [weight for part in self.parts for weight in self.task.base_weights(part)]
        state = {f"{WEIGHT_PREFIX}{name}": parameter.detach() for name, parameter in base}
        state |= self.checkpoint_state()[0]
        if averaged:
            averages = {name: average for name, average in state.items() if name.startswith(EMA_PREFIX)}
            state |= {WEIGHT_PREFIX + name.removeprefix(EMA_PREFIX): average for name, average in averages.items()}
        sending_ranks: dict[str, int] = {}
        if self.layout.pp > 1:  # The lowest rank that has a parameter broadcasts the parameter to all ranks.
            names_by_rank = all_gather_results(group, lambda: list(state))
            for rank, names in reversed(list(enumerate(names_by_rank))):
                sending_ranks |= dict.fromkeys(names, rank)
        for name, parameter in (*self.task.named_weights(model), *self.task.saved_buffers(model)):
            if id(parameter) in shared_weights:
                continue
            key = f"{WEIGHT_PREFIX}{name}"
            if key in state:
                values = full_tensor(state[key].to(self.world.device)).float().contiguous()
            else:
                values = torch.empty(parameter.shape, dtype=torch.float32, device=self.world.device)
            if sending_ranks:
                dist.broadcast(values, sending_ranks[key])
            write_parameter(values, parameter)

    @torch.no_grad()
    def finish_loading(
        self, saved: Mapping[str, Any] | None = None, read: Callable[[StateDict], None] | None = None
    ) -> str | None:
        """Restore the state that `state_dict` does not contain.

        `state_dict` does not contain the state of replicas (`ReplicaSync`). If a rank of a V schedule has both copies
        of a tied embedding, `state_dict` also lacks the second copy and the optimizer state of this copy.

        Call this method after the tensors of `state_dict` were filled from a checkpoint.

        Args:
            saved: the description of the replicas' state that `checkpoint_state` returned when the checkpoint was
                saved; None if the checkpoint has no such state.
            read: fills the tensors of a dict from the checkpoint, by their names; None to restore no state of replicas.

        Returns:
            A message about state of replicas that was dropped or changed; None if all state was restored.
        """
        copy = self._get_output_layer_copy()
        if copy is not None and self._pipeline is not None and self._pipeline.has_first_stage:
            embedding = self.parts[0].get_parameter(EMBEDDING)
            copy.copy_(embedding)
            for key, value in self.optimizer.state.get(embedding, {}).items():
                self.optimizer.state[copy][key].copy_(value)
        if read is not None:
            self.replica_sync.restore_state(self.state_dict(), saved or {}, read)
        return _describe_dropped_state(saved or {}, self.replica_sync.describe_state())


def _describe_dropped_state(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Return a message about state of data-parallel replicas that a restore drops or changes; None if it keeps all.

    Args:
        saved: the result of `ReplicaSync.describe_state` when the checkpoint was saved.
        current: the result of `ReplicaSync.describe_state` for this attempt.
    """
    replicas = saved.get("replicas")  # The number of replicas when the checkpoint was saved.
    same_replicas = replicas == current.get("replicas")
    notes: list[str] = []
    if saved.get("residuals") and not current.get("residuals"):
        notes.append(f"the residuals of {replicas} replicas are dropped")
    elif saved.get("residuals") and not same_replicas:
        notes.append(f"the residuals of {replicas} replicas are summed on {current.get('replicas')}")
    # `rank` is the rank of PowerSGD's low-rank matrices, not the index of a process.
    if saved.get("rank") and saved["rank"] != current.get("rank"):
        notes.append(f"PowerSGD's Q of rank {saved['rank']} is dropped")
    # With `local`, each replica has its own weights (Local SGD). During the warm-up, all replicas must have the same
    # weights. A warm-up that has become longer may not be over yet, so the replicas cannot keep their saved weights.
    keeps_weights = current.get("local") and same_replicas and current["warmup"] <= saved.get("warmup", 0)
    if saved.get("local") and not keeps_weights:
        notes.append(f"all replicas start from the mean of {replicas} replicas")
    if saved.get("outer") and not current.get("outer"):
        notes.append("the outer optimizer's weights and momentum are dropped")
    return "; ".join(notes) or None
