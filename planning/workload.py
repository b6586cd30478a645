"""Describe the training run that is predicted: the run of a config, or a published run of any framework.

`Workload` is not a `Config`, so that it can also describe runs that Sluice does not support: other MLPs, experts,
context parallelism and 4-bit floats. Machine files contain workloads (`timings.steps`), so the names of the fields are
part of a file format.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.sections import Config
from pipeline.model.spec import EMBEDDING, LM_HEAD, count_windows
from pipeline.parallel.mesh import Layout
from pipeline.parallel.traffic import find_trained_parameters, stored_weight_bytes


@dataclass(frozen=True)
class Workload:
    """A training run. Sizes are those of the whole model and the whole step, unless stated otherwise."""

    layers: int
    """Number of blocks."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key heads, which is also that of value heads."""
    ffn: int
    """Width of the MLP, or of one expert."""
    vocab: int
    """Number of entries of the vocabulary."""
    sequence: int
    """Sequence length in tokens."""
    micro_batch: int
    """Number of sequences of one forward pass on a data-parallel rank."""
    global_batch: int
    """Number of sequences of one step."""
    head_size: int = 0
    """Width of a head; 0: hidden / heads."""
    matrices: int = 3
    """Number of matrices of an MLP: 3 if the MLP is gated (SwiGLU), otherwise 2."""
    tied: bool = False
    """Whether the output layer shares the embedding's weights."""
    experts: int = 0
    """Number of experts of each block; 0: a dense MLP."""
    active: int = 1
    """Number of experts per token, including shared experts."""
    tensor: int = 1
    """Number of tensor-parallel ranks."""
    pipeline: int = 1
    """Number of pipeline-parallel ranks."""
    context: int = 1
    """Number of context-parallel ranks."""
    expert: int = 1
    """Number of expert-parallel ranks, which are a subset of the data-parallel ranks."""
    replicate: int = 1
    """Number of groups of data-parallel ranks. With ZeRO, the ranks of a group shard the weights."""
    shard: int = 1
    """Number of data-parallel ranks of one group."""
    zero: int = 0
    """ZeRO level, 0 to 3."""
    schedule: str = "1f1b"
    """Name of the pipeline schedule."""
    virtual_stages: int = 1
    """Number of pipeline-parallel stages per rank."""
    stage_layers: tuple[int, ...] = ()
    """Number of blocks of each pipeline-parallel stage; (): split as evenly as possible."""
    precision: str = "bf16"
    """Precision of matrix products: fp32, bf16, fp16, fp8 or fp4."""
    recompute: str = "none"
    """What activation checkpointing recomputes: none; attention; selective (operators between matrix products); half
    (these operators and half of the products); full."""
    fused: bool = False
    """Whether operators between matrix products are fused, by a compiler or by hand."""
    native: bool = False
    """Whether kernels are written for this generation of GPUs, not for the previous generation."""
    scores: bool = False
    """Whether attention writes its scores to memory, as it does without FlashAttention."""
    split_sequence: bool = True
    """Whether tensor-parallel ranks split the residual stream (sequence parallelism)."""
    hide_tensor: bool = False
    """Whether tensor-parallel and expert-parallel communication is split and overlaps with matrix products."""
    hide_data: bool = True
    """Whether data-parallel communication overlaps with forward and backward."""
    each_micro_batch: bool = True
    """Whether ZeRO 2 and 3 reduce gradients after each micro-batch."""
    low_bytes: int = 2
    """Bytes of a weight in messages, and of a value of the residual stream."""
    reduce_bytes: int = 4
    """Bytes of a gradient in messages."""
    trained: tuple[float, ...] | float = 1.0
    """Share of the weights that is trained: one share for each block, or a single share for all blocks."""
    trained_from: int = 0
    """The first block with a backward pass.

    `layers` means that only the last norm and the output layer have one, `layers` + 1 that only the output layer has
    one.
    """
    trained_tables: tuple[bool, bool] = (True, True)
    """Whether each of the two tables (the embedding and the output layer) is trained.

    Both values are equal if the output layer is tied.
    """
    windows: tuple[tuple[int, int], ...] = ()
    """Numbers of tokens that a token reads at most, each with the number of blocks that have this window; (): the whole
    sequence."""
    orthogonal: bool = False
    """Whether whole matrices are gathered for the update, as Muon does."""

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def data(self) -> int:
        """Number of data-parallel ranks."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step on each data-parallel rank."""
        return max(1, self.global_batch // (self.data * self.micro_batch))

    @property
    def stages(self) -> tuple[int, ...]:
        """Number of blocks of each pipeline-parallel stage.

        If the blocks cannot be divided equally, some stages have one block more: first those in the middle, then the
        last one. The reason is that the first and the last stage also have the embedding and the output layer.
        """
        if self.stage_layers:
            return self.stage_layers
        count = self.pipeline * self.virtual_stages
        blocks_per_stage, remainder = divmod(self.layers, count)
        if remainder < count - 1:
            larger = range(max(1, (count - 1 - remainder) // 2 + 1), count)[:remainder]
        else:
            larger = range(1, count)
        return tuple(blocks_per_stage + (stage in larger) for stage in range(count))

    @property
    def mean_window(self) -> float:
        """Number of tokens that a token reads at most, on average over the blocks."""
        return sum(window * blocks for window, blocks in self.windows) / self.layers if self.windows else self.sequence

    @property
    def mean_pairs(self) -> float:
        """Twice the number of tokens that a token reads, on average over tokens and blocks."""
        pairs = sum(blocks * window * (2 * self.sequence - window) for window, blocks in self.windows)
        return pairs / (self.layers * self.sequence) if self.windows else self.sequence

    @property
    def attention_weights(self) -> int:
        """Number of weights of a block's attention."""
        return self.hidden * self.head * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Number of weights of an MLP, or of one expert."""
        return self.matrices * self.hidden * self.ffn

    @property
    def products(self) -> list[tuple[float, float, float, int]]:
        """Matrix products of a block's forward pass on one rank: rows, columns, inner size, and number of products."""
        tokens = self.micro_batch * self.sequence / self.context
        ffn = self.ffn / self.tensor
        query = self.heads * self.head // self.tensor
        key_value = self.kv_heads * self.head // self.tensor
        local_experts = max(1, self.experts // self.expert)
        # Number of tokens that one expert processes. Without experts, the MLP processes all tokens.
        rows = tokens * self.active * self.expert / self.experts if self.experts else tokens
        return [
            (tokens, query + 2 * key_value, self.hidden, 1),  # query, key, value
            (tokens, self.hidden, query, 1),  # attention output
            (rows, ffn * (self.matrices - 1), self.hidden, local_experts),  # MLP in
            (rows, self.hidden, ffn, local_experts),  # MLP out
        ]

    @property
    def gathers_blocks(self) -> bool:
        """Whether weights are gathered block by block: with ZeRO 3, except in a pipeline."""
        return self.zero == 3 and self.pipeline == 1

    @property
    def reduces_blocks(self) -> bool:
        """Whether each micro-batch reduces gradients block by block."""
        return self.zero >= 2 and self.pipeline == 1 and self.each_micro_batch

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each block's weights that is trained."""
        return self.trained if isinstance(self.trained, tuple) else (self.trained,) * self.layers

    def tables(self, rank: int) -> list[bool]:
        """Return, for each table (embedding or output layer) of a pipeline rank, whether the table is trained."""
        embedding, head = self.trained_tables
        return [embedding] * (rank == 0) + [head] * (rank == self.pipeline - 1 and not (self.tied and rank == 0))

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token, forward and backward (Chowdhery et al., arXiv 2204.02311, appendix B).

        Each weight in a matrix product counts 2 FLOPs in the forward pass. The gradients of the input and of the weight
        count 2 FLOPs each. Attention is counted without the causal mask, as in most publications.
        """
        backward_layers = max(0, self.layers - self.trained_from)
        head_gradients = (self.trained_from <= self.layers) + self.trained_tables[1]
        block_weights = self.attention_weights + self.expert_weights * self.active
        products = block_weights * (self.layers + backward_layers + sum(self.shares))
        products += self.vocab * self.hidden * (1 + head_gradients)
        return 2 * products + 4 * (self.layers + 2 * backward_layers) * self.heads * self.head * self.mean_window

    def describe_layout(self) -> str:
        """Describe the layout in one line."""
        text = f"pipeline {self.pipeline} × data {self.data} × tensor {self.tensor}"
        text += f" × context {self.context}" if self.context > 1 else ""
        if self.pipeline > 1:
            text += f" {self.schedule}" + (f" × {self.virtual_stages}" if self.virtual_stages > 1 else "")
        if self.zero:
            text += f" zero {self.zero}" + (f" over {self.shard}" if self.replicate > 1 else "")
        text += f", micro-batch {self.micro_batch}"
        return text if self.recompute == "none" else f"{text}, {self.recompute} checkpointing"


def matrix_shapes(work: Workload) -> list[tuple[int, int, int]]:
    """Return rows, columns and inner size of the matrix products of a block and of the output layer on one rank.

    Each product of the forward pass is followed by the two products of its backward pass.
    """
    forward = [(int(m), int(n), int(k)) for m, n, k, _ in work.products]
    forward.append((work.micro_batch * work.sequence // work.context, work.vocab // work.tensor, work.hidden))
    return [shape for m, n, k in forward for shape in ((m, n, k), (m, k, n), (k, n, m))]


def workload_from_config(config: Config, layout: Layout, vocab: int) -> Workload:
    """Return the workload of a config in a layout."""
    model = config.model
    train = config.train
    parallel = config.parallel
    names, block_shares, first_block = find_trained_parameters(config)
    output_layer = EMBEDDING if model.tie_word_embeddings else LM_HEAD
    return Workload(
        layers=model.layers, hidden=model.dim, heads=model.heads, kv_heads=model.num_kv_heads, ffn=model.ffn_size,
        vocab=vocab, sequence=config.data.sequence_length, micro_batch=train.micro_batch,
        global_batch=train.global_batch, head_size=model.head_size, tied=model.tie_word_embeddings,
        tensor=layout.tp, pipeline=layout.pp, context=layout.cp, replicate=layout.dp_replicate, shard=layout.dp_shard,
        zero=layout.zero, schedule=layout.schedule, virtual_stages=layout.virtual_stages,
        stage_layers=tuple(map(len, layout.stage_layers)), precision=train.precision,
        recompute=parallel.activation_checkpointing, fused=train.compile, split_sequence=layout.sequence_parallel,
        each_micro_batch=layout.reduce_each_micro_batch, low_bytes=4 if train.precision == "fp32" else 2,
        reduce_bytes=4 if layout.fsdp else stored_weight_bytes(config),
        trained=block_shares, trained_from=first_block,
        trained_tables=(EMBEDDING in names, output_layer in names),
        windows=tuple(count_windows(model, config.data.sequence_length)) if model.sliding_window else (),
        orthogonal=config.optimizer.name == "muon",
    )  # fmt: skip
