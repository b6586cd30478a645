"""Estimate the memory of one rank: weights, gradients and optimizer state exactly, activations from shapes.

`estimate_memory` follows a rank through the actions of its step and returns the peak. The tensors that torch saves for
the backward pass of each operator were observed on rehearsed ranks (planning/rehearse.py).
tests/planning/test_arithmetic.py compares the estimate with rehearsed ranks. tests/planning/test_plan.py compares it
with torch's allocator on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.config.sections import Config
from pipeline.config.types import INT8_BLOCK, StateConfig
from pipeline.model.spec import ParameterSpec, key_value_width, query_width
from pipeline.parallel.mesh import SPLIT_BACKWARD, Layout
from pipeline.parallel.traffic import (
    find_cross_rank_stages,
    find_trained_parameters,
    is_quantized,
    list_rank_parameters,
    residual_stream_bytes,
    stored_weight_bytes,
    weight_bytes,
)
from planning.timeline import Action, rank_actions

GB = 1e9
CUDA_CONTEXT = 400_000_000
"""Bytes of CUDA's context, with kernels loaded lazily: about 400 MB (github.com/pytorch/pytorch/issues/109888)."""
NCCL_COMMUNICATOR = 688 * 2**20
"""Bytes of NCCL's buffers for each group: 688 MB between three or more A100 (github.com/NVIDIA/nccl/issues/964).

The context and the first group of eight H100 took 1.06 GB together (issue 1685).
"""


def reserved_gpu_bytes(layout: Layout) -> int:
    """Return the bytes of a GPU that CUDA and NCCL use.

    NCCL has a communicator for each mesh axis with several ranks. If there are several such axes, it also has one for
    all ranks.
    """
    axes = sum(size > 1 for size in (layout.pp, layout.state_replicas, layout.state_shards, layout.cp, layout.tp))
    return CUDA_CONTEXT + NCCL_COMMUNICATOR * (axes + (axes > 1))


MEMORY_KINDS = ("weights", "gathered", "gradients", "optimizer", "activations")
"""The fields of `RankMemory` that are in bytes. Tables use the same names."""


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in bytes."""

    parameters: int
    """Number of parameter values in this rank's stages, after tensor parallelism; not bytes."""
    weights: int
    """Weights between steps: in fp32, or in bf16 if there are no master weights."""
    gathered: int
    """Weights that FSDP gathers during a step. Without FSDP: the low-precision copies that autocast makes."""
    gradients: int
    optimizer: int
    """Moments, the moving averages of weights (`train.ema`), and the state of replicas: residuals of gradient
    compression, or local SGD's outer optimizer."""
    activations: int
    """All other memory at the peak of a step, estimated."""

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return self.weights + self.gathered + self.gradients + self.optimizer + self.activations

    def on_gpu(self, config: Config) -> int:
        """Return the bytes in GPU memory. With `parallel.offload`, the other bytes are in host memory."""
        return self.gathered + self.activations if config.parallel.offload else self.total


class GpuFit(NamedTuple):
    """Whether the fullest rank of a layout fits into a GPU. Sizes are in bytes."""

    rank: int
    """The pipeline rank that needs most memory."""
    needed: int
    """Memory of its tensors."""
    reserved: int
    """Memory of CUDA and NCCL."""
    size: float
    """Memory of the GPU."""

    @property
    def fits(self) -> bool:
        """Whether the GPU's memory is enough."""
        return self.needed + self.reserved <= self.size


def check_gpu_fit(config: Config, layout: Layout, ranks: Sequence[RankMemory], gib: float) -> GpuFit:
    """Return whether the pipeline ranks of a layout fit into GPUs of `gib` GiB, with the sizes."""
    bytes_of_ranks = [rank.on_gpu(config) for rank in ranks]
    needed = max(bytes_of_ranks)
    return GpuFit(bytes_of_ranks.index(needed), needed, reserved_gpu_bytes(layout), gib * 2**30)


def describe_overflow(config: Config, fit: GpuFit, source: str) -> str:
    """Describe which rank does not fit, and what to change.

    `source` describes the GPU's memory, and the setting with this value.
    """
    return (
        f"rank {fit.rank} of the pipeline needs {fit.needed / GB:.1f} GB, CUDA and NCCL about "
        f"{fit.reserved / GB:.1f}, and a GPU has {fit.size / GB:.1f} ({source}): lower train.micro_batch "
        f"({config.train.micro_batch}), set parallel.activation_checkpointing to selective or full, set "
        "train.loss_chunk or optimizer.state, or split the model over more ranks (parallel.zero, tensor, pipeline)"
    )


def needs_torch(layout: Layout) -> bool:
    """Return whether `rank_actions` imports torch for this layout.

    It does if the pipeline schedule splits the backward pass, because torch computes such schedules.
    """
    return layout.pp > 1 and layout.schedule in SPLIT_BACKWARD


def describe_size(size: float) -> str:
    """Format a size in bytes as GB: 0.35 GB, 12.5 GB, 1,300 GB."""
    if size < GB:
        return f"{size / GB:.2g} GB"
    return f"{size / GB:,.1f} GB" if size < 100 * GB else f"{size / GB:,.0f} GB"


def estimate_memory_of_ranks(config: Config, layout: Layout, vocab: int) -> list[RankMemory]:
    """Estimate the memory of each pipeline rank."""
    return [estimate_memory(config, layout, rank, vocab, actions) for rank, actions in enumerate(rank_actions(layout))]


def estimate_memory(
    config: Config, layout: Layout, pp_rank: int, vocab: int, actions: Sequence[Action], on_cpu: bool = False
) -> RankMemory:
    """Estimate the memory of a rank.

    Args:
        config: The config.
        layout: Its layout.
        pp_rank: The rank's position in the pipeline.
        vocab: Size of the vocabulary.
        actions: The rank's actions in one step; empty if the peak of activations is not needed.
        on_cpu: Whether the rank uses the CPU's kernels, as in a rehearsal.
    """
    return _RankEstimate(config, layout, pp_rank, vocab, on_cpu).estimate(actions)


class _LossMemory(NamedTuple):
    """Memory of the last norm, the output layer and the loss, in bytes for one micro-batch."""

    saved: int
    """Bytes that are kept from forward to backward."""
    temporary: int
    """Additional bytes while the loss is computed."""


class _RankEstimate:
    """Calculation of the memory of one rank. Arguments are those of `estimate_memory`."""

    def __init__(self, config: Config, layout: Layout, pp_rank: int, vocab: int, on_cpu: bool) -> None:
        self.config = config
        self.layout = layout
        self.pp_rank = pp_rank
        self.vocab = vocab
        self.on_cpu = on_cpu
        self.stages = layout.stages_on_pipeline_rank(pp_rank)
        self.checkpointing = config.parallel.activation_checkpointing
        self.tokens = config.train.micro_batch * config.data.sequence_length // layout.cp
        """Tokens of one micro-batch on this rank and its tensor-parallel ranks."""
        self.sequence_shards = layout.tp if layout.sequence_parallel else 1
        self.fsdp_ranks = layout.state_shards
        length, window = config.data.sequence_length, config.model.sliding_window
        self.uses_ranges = layout.cp > 1 or config.data.document_mask or (window is not None and window < length)
        """Whether attention reads ranges of keys (pipeline/model/attention.py)."""

        self.is_mixed_precision = config.train.precision != "fp32"
        self.compute_bytes = 2 if self.is_mixed_precision else 4
        """Bytes of one value in matrix products."""
        self.stored_bytes = stored_weight_bytes(config)
        """Bytes of one weight between steps, and of its gradient."""
        self.stream_value_bytes = residual_stream_bytes(config, layout)
        """Bytes of one value of the residual stream."""
        self.stream_bytes = self.tokens * self.stream_value_bytes * config.model.dim // self.sequence_shards
        """Bytes of the hidden states between two blocks, for one micro-batch."""
        self.table_bytes = vocab * config.model.dim // layout.tp * self.compute_bytes
        """Bytes of the embedding, or of the output layer, in the precision of products."""

        self.trained_names, _, self.first_trained_block = find_trained_parameters(config)
        self.parameters = list(list_rank_parameters(config, layout, pp_rank, vocab))
        self.trained_parameters = [parameter for parameter in self.parameters if parameter.name in self.trained_names]
        self.block_count = sum(len(layout.stage_layers[stage]) for stage in self.stages)
        self.block_weight_bytes = self._per_block(p.numel for p in self.parameters if p.layer >= 0)
        """Bytes of a block's weights in the precision of products, on average."""
        self.cast_bytes = 0
        """Bytes of the copies of a block's weights that autocast makes."""
        if self.is_mixed_precision and self.stored_bytes == 4 and not layout.fsdp:
            self.cast_bytes = self._per_block(
                p.numel
                for p in self.parameters
                if p.layer >= self.first_trained_block and weight_bytes(config, p) > self.compute_bytes
            )
        self.keeps_sharded_gradients = layout.fsdp and (layout.reduce_each_micro_batch or layout.micro_batches == 1)
        self.gradient_bytes = self.stored_bytes * sum(
            p.fsdp_numel(self.fsdp_ranks) if self.keeps_sharded_gradients else p.numel for p in self.trained_parameters
        )

    def _per_block(self, numels: Iterable[int]) -> int:
        """Return the bytes of these numbers of elements in compute precision, divided by the number of blocks."""
        return self.compute_bytes * sum(numels) // max(1, self.block_count)

    def estimate(self, actions: Sequence[Action]) -> RankMemory:
        """Return the memory of the rank. The peak includes these actions and the update of the weights."""
        loss = self._loss_bytes()
        temporary = self._block_backward_bytes()
        gathered, gathered_at_loss = self._gathered_bytes(loss.temporary, temporary)
        peak = self._peak_of_actions(actions, loss, temporary, gathered, gathered_at_loss)
        trained_values = sum(parameter.fsdp_numel(self.fsdp_ranks) for parameter in self.trained_parameters)
        moments = sum(self._moment_bytes(parameter) for parameter in self.trained_parameters)
        # During the update, this rank has the gradients of its shards and temporary tensors, but no activations.
        peak = max(peak, self.stored_bytes * trained_values + self._update_bytes())
        averages = self._average_bytes()
        state = self.stored_bytes * trained_values + moments + averages
        peak, replica_state = self._add_replica_state(trained_values, state, peak)
        values = sum(parameter.numel for parameter in self.parameters)
        weights = round(
            sum(weight_bytes(self.config, each) * each.fsdp_numel(self.fsdp_ranks) for each in self.parameters)
        )
        if self.config.train.evaluate_every is not None:
            # The evaluator keeps a copy of the weights in fp32 (pipeline/evaluate/evaluator.py), but shares quantized
            # weights. If the model is split, all ranks share one copy. The numbers of elements are already divided by
            # pipeline and tensor parallelism.
            is_split = self.layout.zero == 3 or self.layout.pp * self.layout.tp > 1
            copied_values = sum(each.numel for each in self.parameters if not is_quantized(self.config, each))
            weights += 4 * (copied_values // (self.layout.gradient_ranks if is_split else 1))
        return RankMemory(
            parameters=values,
            weights=weights,
            gathered=gathered,
            gradients=self.gradient_bytes,
            optimizer=moments + averages + replica_state,
            activations=max(0, peak - self.gradient_bytes - gathered),
        )

    # -------------------------------------------------------------------------------------------------------- forward

    def _saved_block_bytes(self, checkpointing: str) -> int:
        """Return the bytes that a block saves for the backward pass of one micro-batch, as observed with torch."""
        model = self.config.model
        is_compiled = self.config.train.compile
        query = query_width(model)
        key_value = key_value_width(model)
        # Flash attention shares keys and values between query heads. Other kernels repeat them for each query head.
        shares_key_value = (self.is_mixed_precision and not self.on_cpu) or self.uses_ranges
        # With context parallelism, the keys and values of the other ranks are saved as well.
        attention = query + 2 * (key_value * self.layout.cp if shares_key_value else query)
        # Without compilation, each product saves a low-precision copy of an fp32 input.
        has_casts = self.is_mixed_precision and self.stream_value_bytes == 4 and self.layout.tp == 1
        casts = 3 if has_casts else 0
        # The first three variables are numbers of saved tensors of width `dim`.
        streams = 1  # in the type of the residual stream
        sums = 0  # in compute precision, split like the residual stream
        whole = 0  # in compute precision, not split
        split_width = 0  # total width of the saved tensors that tensor parallelism splits
        if checkpointing == "selective":
            sums = 1 if is_compiled else 2
            split_width = 2 * query + 2 * key_value + 2 * model.ffn_size
        elif checkpointing != "full" and is_compiled:
            whole = 3
            split_width = attention + query + 3 * model.ffn_size
        elif checkpointing != "full":
            streams = 2
            whole = 2 + casts
            split_width = attention + query + 4 * model.ffn_size
            if self.config.adapter is not None:
                # A product with a frozen weight does not save its input. Norms do not save what their weights need.
                trained_layers = {name.split(".")[-3] for name in self.trained_names}
                groups = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})  # layers with the same input
                counts = [len(trained_layers & layers) for layers in groups]
                whole = sum(counts) if has_casts else sum(map(bool, counts))  # Each adapter casts its input.
                split_width -= 0 if "down_proj" in trained_layers else model.ffn_size
        norm_bytes = 0  # per value of a token's hidden state
        # On a CPU, torch computes a norm in several operators, which save more tensors.
        if self.on_cpu and checkpointing == "none" and self.config.adapter is None:
            norm_bytes = 2 * 4 + 2 * (4 - self.stream_value_bytes)
        per_token = self.stream_value_bytes * streams + self.compute_bytes * sums + norm_bytes
        per_token = per_token * model.dim // self.sequence_shards
        per_token += self.compute_bytes * (whole * model.dim + split_width // self.layout.tp)
        if checkpointing != "full":
            per_token += 4 * model.heads // self.layout.tp  # the log-sum-exp of attention, in fp32
        return self.tokens * per_token

    def _loss_bytes(self) -> _LossMemory:
        """Return the memory of the last norm, the output layer and the loss for one micro-batch."""
        layout = self.layout
        if layout.stages - 1 not in self.stages:
            return _LossMemory(0, 0)
        dim = self.config.model.dim
        chunk = self.config.train.loss_chunk
        vocab_shards = layout.tp if self.config.parallel.loss_parallel else 1
        if chunk is None:
            # The log-softmax in fp32 (4 bytes per logit) is saved. The peak is three times as much, or four times if
            # the logits are split.
            saved = 4 * self.tokens * self.vocab // vocab_shards
            temporary = (12 if vocab_shards > 1 else 8) * self.tokens * self.vocab // vocab_shards
        else:
            # The gradients of the weights and of the hidden states are saved. A chunk also needs its logits and their
            # gradient. Only compiled operations need no fp32 logits. In another phase, a chunk needs its contribution
            # to the gradient of the weights, except on a GPU, where the product of 16-bit values adds to the sum.
            rows = min(chunk, self.tokens)
            saved = self.compute_bytes * (self.vocab // layout.tp + self.tokens) * dim
            is_fused = self.config.train.compile and layout.tp == 1 and not self.on_cpu
            adds_in_place = self.compute_bytes < 4 and not self.on_cpu
            in_chunk = max(
                (self.compute_bytes if is_fused else 4) * rows + self.compute_bytes * rows,
                self.compute_bytes * (rows + (0 if adds_in_place else dim)),
            )
            temporary = (4 * dim + in_chunk) * self.vocab // layout.tp + 2 * self.compute_bytes * self.tokens * dim
            temporary -= saved  # `temporary` does not include the saved bytes.
        saved += self.compute_bytes * self.tokens * dim + self.stream_bytes
        if self.on_cpu:  # The last norm saves more tensors, as the norms of a block do.
            saved += self.tokens * (8 - self.stream_value_bytes) * dim // self.sequence_shards
        if self.cast_bytes:  # Autocast also copies the weights of the output layer.
            saved += self.table_bytes
        if chunk is None and layout.pp > 1:  # The logits are the output of the pipeline-parallel stage, which is kept.
            saved += self.compute_bytes * self.tokens * self.vocab // vocab_shards
        return _LossMemory(saved, temporary)

    # ------------------------------------------------------------------------------------------------------- backward

    def _block_backward_bytes(self) -> int:
        """Return the bytes of temporary tensors in a block's backward pass: recomputed activations and gradients."""
        model = self.config.model
        # Gradients of the residual stream, of the input of a product, and of the two widest tensors of the MLP.
        size = self.stream_bytes + self.compute_bytes * self.tokens * (model.dim + 2 * model.ffn_size // self.layout.tp)
        if self.checkpointing != "none":  # All activations except the stream and the saved products are recomputed.
            size += self._saved_block_bytes("none") + self.cast_bytes - self.stream_bytes
        if self.checkpointing == "selective":
            saved_width = query_width(model) + key_value_width(model) + 2 * model.ffn_size
            size -= self.compute_bytes * self.tokens * saved_width // self.layout.tp
        # A quantized weight is dequantized for each product. torchao needs about ten bytes per element for this.
        size += 10 * max((each.numel for each in self.parameters if is_quantized(self.config, each)), default=0)
        if self.layout.cp > 1:  # The gradients of all keys and values, before and after their reduction.
            width = 2 * key_value_width(model) // self.layout.tp
            size += self.compute_bytes * self.tokens * (self.layout.cp + 1) * width
        # FSDP reduces gradients in fp32. With a pipeline it reduces them at the end of the step.
        if self.layout.fsdp and self.layout.pp == 1 and self.layout.gradient_ranks > 1:
            size += 4 * self.block_weight_bytes // self.compute_bytes
        return size

    def _gathered_bytes(self, loss_temporary: int, block_temporary: int) -> tuple[int, int]:
        """Return the bytes of gathered or cast weights in a block's backward pass, and while the loss is computed."""
        if self.layout.fsdp:
            values = sum(parameter.fsdp_numel(self.fsdp_ranks) for parameter in self.parameters)
            gathered = self.compute_bytes * self.fsdp_ranks * values
            if not self.layout.gathers_blocks:
                return gathered, gathered
            # FSDP gathers a block and the next one. A tied embedding is used at both ends and stays gathered.
            tied_table = self.table_bytes * self.config.model.tie_word_embeddings
            return min(gathered, 2 * self.block_weight_bytes + tied_table), self.table_bytes
        # Compiled blocks recompute casts. In other blocks, autocast frees the casts when the backward pass starts. They
        # do not exist at the same time as its temporary tensors, so only the excess is added. Without checkpointing,
        # `_peak_of_actions` counts the casts.
        casts = 0 if self.checkpointing == "none" or self.config.train.compile else self.cast_bytes * self.block_count
        casts = max(0, casts - max(loss_temporary, block_temporary))
        return casts, casts

    def _peak_of_actions(
        self, actions: Sequence[Action], loss: _LossMemory, temporary: int, gathered: int, gathered_at_loss: int
    ) -> int:
        """Return the peak of activations, gradients and gathered weights over the actions of a step.

        Args:
            actions: The actions of this rank, in order.
            loss: Memory of the output layer and the loss.
            temporary: Bytes of temporary tensors in a block's backward pass.
            gathered: Bytes of gathered or cast weights during a block's backward pass.
            gathered_at_loss: Bytes of gathered or cast weights while the loss is computed.
        """
        layout = self.layout
        saves_all = self.checkpointing == "none"
        saved_block = self._saved_block_bytes(self.checkpointing)
        if saves_all:
            saved_block += self.cast_bytes  # Each micro-batch keeps its own casts until its backward pass.
        sending, receiving = find_cross_rank_stages(layout, self.pp_rank)
        # Pipeline-parallel stages whose input needs a gradient.
        needing_gradients = [
            stage for stage in range(layout.stages) if layout.stage_layers[stage].start > self.first_trained_block
        ]
        # Torch allocates a buffer for the received hidden states and gradients of each micro-batch.
        buffers = len(receiving) + sum(stage + 1 in needing_gradients for stage in sending)
        # Bytes of these buffers and of all saved tensors at the current action.
        held_bytes = self.stream_bytes * layout.micro_batches * buffers
        # Bytes of gradients at the current action. DDP's buckets are allocated before the first action. Other gradients
        # are allocated by backward passes.
        gradients = self.gradient_bytes if layout.gradient_ranks > 1 and not layout.fsdp else 0
        # The gradient of the output layer in fp32, which FSDP reduces last.
        unreduced_table = 0
        if self.keeps_sharded_gradients and layout.micro_batches > 1:
            unreduced_table = 4 * self.table_bytes // self.compute_bytes
        peak = 0
        stages_with_gradients = set[int]()
        for kind, stage, _ in actions:
            trained_blocks = sum(number >= self.first_trained_block for number in layout.stage_layers[stage])
            is_last_stage = stage == layout.stages - 1
            saved_output = loss.saved if is_last_stage else self.stream_bytes * (layout.pp > 1)
            if stage in receiving:
                saved_output -= self.stream_bytes  # The input of the stage is already counted as a buffer.
            if kind == "F":
                held_bytes += trained_blocks * saved_block + saved_output
                continue
            gradients_before = gradients
            if kind != "W":
                if is_last_stage:
                    unreduced = unreduced_table * (stage in stages_with_gradients)
                    peak = max(peak, held_bytes + gradients + loss.temporary + gathered_at_loss + unreduced)
                # In the backward pass of the last block of the stage, the saved output is freed already.
                first_temporary = temporary if kind == "B" else 0
                peak = max(peak, held_bytes + gradients + gathered - saved_output + first_temporary)
                if stage not in stages_with_gradients:
                    gradients = min(self.gradient_bytes, gradients + self.gradient_bytes // len(self.stages))
                stages_with_gradients.add(stage)
            if kind != "B" and self.checkpointing == "full":
                # I and W both recompute the block, and torch keeps both results until the end of the step.
                held_bytes += trained_blocks * (self._saved_block_bytes("none") + self.cast_bytes)
            elif kind != "I":
                held_bytes -= trained_blocks * saved_block + saved_output
            # The next lines describe the backward pass of the first block, before the gradients of the block exist. The
            # tensors that the block saved still exist, although `held_bytes` no longer contains them. With
            # checkpointing, they are part of `temporary`.
            if kind == "B":
                missing_gradients = 0  # bytes of the gradients that do not exist yet
                if not self.keeps_sharded_gradients:
                    missing_values = self.block_weight_bytes // self.compute_bytes
                    missing_values += (stage == 0) * self.table_bytes // self.compute_bytes
                    missing_gradients = self.stored_bytes * missing_values
                current = held_bytes + max(gradients_before, gradients - missing_gradients) + gathered + temporary
                peak = max(peak, current + saves_all * saved_block)
            peak = max(peak, held_bytes + gradients + gathered)
        return peak

    # ------------------------------------------------------------------------------------------------------- optimizer

    def _moment_bytes(self, parameter: ParameterSpec) -> int:
        """Return the bytes of the optimizer's moments of a parameter on this rank."""
        optimizer = self.config.optimizer
        count = parameter.fsdp_numel(self.fsdp_ranks)
        if optimizer.state.moments == "int8" and parameter.is_matrix:
            # Only AdamW supports int8, so there are two moments. Each has one byte per element and one fp32 scale (4
            # bytes) per INT8_BLOCK elements.
            return 2 * (count + 4 * count // INT8_BLOCK)
        has_one_moment = optimizer.name == "sgd" or (optimizer.name == "muon" and parameter.is_matrix_in_block)
        if has_one_moment:
            return 4 * count  # A single moment is in fp32.
        bytes_per_moment = 2 if optimizer.state.moments == "bf16" else 4
        return 2 * bytes_per_moment * count

    def _average_bytes(self) -> int:
        """Return the bytes of the moving averages of the trained weights (`train.ema`) on this rank, which are fp32."""
        if self.config.train.ema is None:
            return 0
        # In a V schedule, a rank has two copies of a tied embedding, and one average of it.
        values_by_name = {each.name: each.fsdp_numel(self.fsdp_ranks) for each in self.trained_parameters}
        return 4 * sum(values_by_name.values())

    def _update_bytes(self) -> int:
        """Return the bytes of temporary tensors when the optimizer updates its largest parameter."""
        optimizer = self.config.optimizer
        if optimizer.name == "muon":
            # The Newton-Schulz iteration holds five bf16 matrices at a time: 10 bytes per element. If the parameter is
            # sharded, Muon also gathers the weight, the gradient and the momentum in fp32: 12 bytes.
            largest = max((p.numel for p in self.trained_parameters if p.is_matrix_in_block), default=0)
            return largest * self.layout.tp * (22 if self.fsdp_ranks * self.layout.tp > 1 else 10)
        if optimizer.state == StateConfig() or self.config.train.compile:
            return 0  # The fused kernel of torch and a compiled update have no temporary tensors.
        # Otherwise, the optimizer updates chunks of at most 2^24 values, with temporary tensors of 40 bytes per value.
        return 40 * min(1 << 24, max((p.fsdp_numel(self.fsdp_ranks) for p in self.trained_parameters), default=0))

    def _add_replica_state(self, values: int, state: int, peak: int) -> tuple[int, int]:
        """Add the state of data-parallel replicas: residuals of gradient compression, or local SGD's outer optimizer.

        Args:
            values: Number of trained values on this rank.
            state: Bytes of their weights and moments.
            peak: Peak of a step without the state of replicas, in bytes.

        Returns:
            The peak with the state of replicas, and the bytes of this state between steps.
        """
        parallel = self.config.parallel
        if parallel.hook.kind in ("topk", "powersgd"):  # At the peak, a step stores both old and new residuals.
            return peak + 4 * values, 4 * values
        if parallel.local_sgd is None:
            return peak, 0
        has_outer_optimizer = parallel.local_sgd.outer_lr != 1 or parallel.local_sgd.outer_momentum > 0
        # The outer optimizer stores the weights at the last average, and a momentum: 4 bytes per value each. The peak
        # may be at a save, which averages the whole state.
        return max(peak, state), 8 * values * has_outer_optimizer
