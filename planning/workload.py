"""What is trained and how it is split, as the prediction sees it: of a config, or of a published run of any framework.

A plain dataclass, so that nothing of Sluice's config has to fit: other MLPs, experts, context parallel, float4.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.sections import Config
from pipeline.model.spec import EMBEDDING, LM_HEAD
from pipeline.parallel.mesh import Layout
from pipeline.parallel.traffic import find_trained_parameters, stored_weight_bytes


@dataclass(frozen=True)
class Workload:
    """One training. Sizes are of the whole model and the whole step."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    """Width of the MLP; with experts, of one expert."""
    vocab: int
    sequence: int
    """Tokens."""
    micro_batch: int
    """Sequences of one forward on one data parallel rank."""
    global_batch: int
    """Sequences of one step."""
    head_size: int = 0
    """0: hidden / heads."""
    matrices: int = 3
    """Matrices of an MLP: 3 gated (SwiGLU), 2 not."""
    tied: bool = False
    """Whether the output layer shares the embedding's weights."""
    experts: int = 0
    """Experts of each block; 0: a dense MLP."""
    active: int = 1
    """Experts that a token visits, shared ones included."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Ranks, of the data parallel ones, that split the experts."""
    replicate: int = 1
    shard: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    """Blocks of each stage; (): as even as can be."""
    precision: str = "bf16"
    recompute: str = "none"
    """none; attention; selective: what is between matrix products; half: that and half of these; full."""
    fused: bool = False
    """Whether what is between matrix products is fused: by a compiler, or by hand."""
    native: bool = False
    """Whether kernels were made for this GPU, and not for the one before."""
    scores: bool = False
    """Whether attention writes its scores to memory, as it did before FlashAttention."""
    split_sequence: bool = True
    """Whether tensor parallel ranks split the residual stream."""
    hide_tensor: bool = False
    """Whether tensor and expert parallel communication runs beside the matrix products, in pieces."""
    hide_data: bool = True
    """Whether data parallel communication runs beside forward and backward."""
    each_micro_batch: bool = True
    """Whether ZeRO 2 and 3 reduce gradients after each micro-batch."""
    low_bytes: int = 2
    """Of a weight on the wire, and of a value of the stream."""
    reduce_bytes: int = 4
    """Of a gradient on the wire."""
    trained: tuple[float, ...] | float = 1.0
    """Share of the weights that is trained: of each block, or of every one."""
    trained_from: int = 0
    """The first block that backward passes through; behind the last block comes the last norm, then the output."""
    trained_tables: tuple[bool, bool] = (True, True)
    """Whether the embedding is trained, and the output layer; a tied one as the embedding."""
    orthogonal: bool = False
    """Whether whole matrices are gathered for the update, as Muon's are."""

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def data(self) -> int:
        """Data parallel ranks."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """All ranks."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Of one step on each data parallel rank."""
        return max(1, self.global_batch // (self.data * self.micro_batch))

    @property
    def stages(self) -> tuple[int, ...]:
        """Blocks of each stage; of what is left over the first and the last, with embedding and output, get least."""
        count = self.pipeline * self.virtual_stages
        each, over = divmod(self.layers, count)
        first = count - 1 - over if over < count - 1 else 0
        taking = range(max(1, first // 2 + 1), count)[:over] if over < count - 1 else range(1, count)
        return self.stage_layers or tuple(each + (at in taking) for at in range(count))

    @property
    def attention_weights(self) -> int:
        """Of one block."""
        return self.hidden * self.head * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Of one MLP, or one expert."""
        return self.matrices * self.hidden * self.ffn

    @property
    def products(self) -> list[tuple[float, float, float, int]]:
        """Rows, columns, inner size of a rank's matrix products in a block's forward, and how many are so."""
        tokens, inner = self.micro_batch * self.sequence / self.context, self.ffn / self.tensor
        query, shared = self.heads * self.head // self.tensor, self.kv_heads * self.head // self.tensor
        here = max(1, self.experts // self.expert)  # experts on this rank, and rows for each
        rows = tokens * self.active * self.expert / self.experts if self.experts else tokens
        attention = [(tokens, query + 2 * shared, self.hidden, 1), (tokens, self.hidden, query, 1)]
        return [*attention, (rows, inner * (self.matrices - 1), self.hidden, here), (rows, self.hidden, inner, here)]

    @property
    def gathers_blocks(self) -> bool:
        """Whether weights are gathered block by block: ZeRO 3; a pipeline's ranks keep them whole during a step."""
        return self.zero == 3 and self.pipeline == 1

    @property
    def reduces_blocks(self) -> bool:
        """Whether gradients are reduced block by block in each micro-batch."""
        return self.zero >= 2 and self.pipeline == 1 and self.each_micro_batch

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each block the share of its weights that is trained."""
        return self.trained if isinstance(self.trained, tuple) else (self.trained,) * self.layers

    def tables(self, rank: int) -> list[bool]:
        """Of each table (embedding, output layer) that a pipeline rank has, whether it is trained."""
        embedding, head = self.trained_tables
        return [embedding] * (rank == 0) + [head] * (rank == self.pipeline - 1 and not (self.tied and rank == 0))

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token, forward and backward: 2 per weight that multiplies, 2 more where its input's gradient
        is wanted and 2 where its own is; and attention with the causal half left in, as most print it (Chowdhery et
        al., arXiv 2204.02311, appendix B)."""
        back = max(0, self.layers - self.trained_from)
        head = (self.trained_from <= self.layers) + self.trained_tables[1]
        blocks = self.attention_weights + self.expert_weights * self.active
        products = blocks * (self.layers + back + sum(self.shares)) + self.vocab * self.hidden * (1 + head)
        return 2 * products + 4 * (self.layers + 2 * back) * self.heads * self.head * self.sequence

    def describe_layout(self) -> str:
        """How it is split, in a few words."""
        zero = f" zero {self.zero}" + (f" over {self.shard}" if self.replicate > 1 else "") if self.zero else ""
        turns = f" {self.schedule}" + (f" × {self.virtual_stages}" if self.virtual_stages > 1 else "")
        again = "" if self.recompute == "none" else f", {self.recompute} again"
        ranks = f"pipeline {self.pipeline} × data {self.data} × tensor {self.tensor}"
        return f"{ranks}{turns * (self.pipeline > 1)}{zero}, micro-batch {self.micro_batch}{again}"


def matrix_shapes(work: Workload) -> list[tuple[int, int, int]]:
    """Rows, columns, inner size of a rank's matrix products: a block and the output layer, forward and backward."""
    forward = [(int(m), int(n), int(k)) for m, n, k, _ in work.products]
    forward.append((work.micro_batch * work.sequence, work.vocab // work.tensor, work.hidden))
    return [shape for m, n, k in forward for shape in ((m, n, k), (m, k, n), (k, n, m))]


def workload_from_config(config: Config, layout: Layout, vocab: int) -> Workload:
    """What a config trains, in this layout."""
    model, train, parallel = config.model, config.train, config.parallel
    low = train.precision != "fp32"
    names, shares, first = find_trained_parameters(config)
    return Workload(
        layers=model.layers, hidden=model.dim, heads=model.heads, kv_heads=model.num_kv_heads, ffn=model.ffn_size,
        vocab=vocab, sequence=config.data.sequence_length, micro_batch=train.micro_batch,
        global_batch=train.global_batch, head_size=model.head_size, tied=model.tie_word_embeddings,
        tensor=layout.tp, pipeline=layout.pp, replicate=layout.dp_replicate, shard=layout.dp_shard,
        zero=layout.zero, schedule=layout.schedule, virtual_stages=layout.virtual_stages,
        stage_layers=tuple(map(len, layout.stage_layers)), precision=train.precision,
        recompute=parallel.activation_checkpointing, fused=train.compile, split_sequence=layout.sequence_parallel,
        each_micro_batch=layout.reduce_each_micro_batch, low_bytes=2 if low else 4,
        reduce_bytes=4 if layout.fsdp else stored_weight_bytes(config),
        trained=shares, trained_from=first,
        trained_tables=(EMBEDDING in names, (EMBEDDING if model.tie_word_embeddings else LM_HEAD) in names),
        orthogonal=config.optimizer.name == "muon",
    )  # fmt: skip
