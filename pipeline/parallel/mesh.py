"""Which rank does what: the layout of a training over pipeline stages, data parallel replicas and tensor shards.

A layout splits `world` ranks into a mesh of four dimensions, from outermost to innermost:

    pipeline  ×  replicate  ×  shard  ×  tensor

`tensor` is innermost, since it talks most: neighbouring ranks, on one node. `replicate × shard` together are data
parallel (each has its own part of every batch); ranks along `shard` also split parameters, gradients or optimizer
state among them (ZeRO, Rajbhandari et al., arXiv 1910.02054), ranks along `replicate` keep whole copies of that.

`resolve_layout` is a pure function of the config, the number of ranks and the ranks per node. It refuses what cannot
work, with the numbers and the nearest layouts that can, before anything starts: `check`, the rules between sections,
calls it on the login node (so no torch here), the trainer calls it again with the ranks that are really there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from pipeline.base.errors import UserError
from pipeline.config.hugging_face import tokenizer_ids
from pipeline.config.sections import Config
from pipeline.config.types import INT8_BLOCK, StateConfig, refuse_changed

V_SCHEDULES = ("zbv", "dualpipe_v")
"""Rank i holds stages i and 2·pipeline−1−i: the stages run down the ranks and up again, and the loss is on rank 0."""
_MOST = 1024
"""Sizes beyond this are not looked at when something that fits is sought."""
_MOST_IN_SCHEDULE = 10_000
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipe_v")
"""Schedules that compute gradients of inputs and of weights apart, to fill bubbles with the latter."""


class LayoutError(UserError, ValueError):
    """A layout that cannot work; the message has the numbers and what would fit."""


class Coordinates(NamedTuple):
    """Where a rank stands in the mesh; `data` counts replicate × shard."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """How the ranks of one training split its work. Made by `resolve_layout`, which checks it."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    ranks_per_node: int
    micro_batches: int
    """Micro-batches of one step on each data parallel rank."""
    virtual_stages: int
    """Pipeline stages per rank; 1 without a pipeline."""
    schedule: str
    """Pipeline schedule; means nothing without a pipeline."""
    zero: int
    """0 to 3."""
    fsdp: bool
    """Whether FSDP2 holds the weights, and gathers them in the precision's type: on one rank once per step."""
    reduce_each_micro_batch: bool
    """Whether gradients are reduced after each micro-batch, and not once per step."""
    sequence: bool
    """Whether tensor parallel ranks split the sequence between attention and MLP; False without tensor parallelism."""
    stage_layers: tuple[range, ...]
    """The decoder blocks of each pipeline stage."""

    @property
    def data(self) -> int:
        """Data parallel size."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.data * self.tensor

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.pipeline * self.virtual_stages

    @property
    def gathers_blocks(self) -> bool:
        """Whether weights are gathered block by block: ZeRO 3; a pipeline's ranks keep them whole during a step."""
        return self.zero == 3 and self.pipeline == 1

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, tensor)

    def stages_on_rank(self, pipeline: int) -> list[int]:
        """The stages of one pipeline rank, in the order in which a sample passes them."""
        if self.schedule in V_SCHEDULES and self.pipeline > 1:
            return [pipeline, self.stages - 1 - pipeline]
        return [pipeline + self.pipeline * turn for turn in range(self.virtual_stages)]

    @property
    def last_stage_rank(self) -> int:
        """The pipeline rank that holds the last stage, and with it the loss."""
        return next(rank for rank in range(self.pipeline) if self.stages - 1 in self.stages_on_rank(rank))

    def words(self) -> str:
        """Sizes in words: `pipeline 2 × data 2 × tensor 2`."""
        return f"pipeline {self.pipeline} × data {self.data} × tensor {self.tensor}"


def describe_layout(layout: Layout) -> str:
    """Return what the ranks are: `2 data-parallel replicas × pipeline 2 (1f1b) × tensor 2, ZeRO 1 over 2 ranks`."""
    parts = [f"{layout.data} data-parallel replica{'s' * (layout.data > 1)}"]
    if layout.pipeline > 1:
        stages = f", {layout.virtual_stages} stages per rank" if layout.virtual_stages > 1 else ""
        parts.append(f"pipeline {layout.pipeline} ({layout.schedule}{stages})")
    if layout.tensor > 1:
        parts.append(f"tensor {layout.tensor}")
    zero = f", ZeRO {layout.zero} over {layout.shard} ranks" if layout.zero else ""
    return " × ".join(parts) + zero


def resolve_layout(
    config: Config, world: int | None = None, ranks_per_node: int | None = None, vocab_size: int | None = None,
    near: bool = True,
) -> Layout:  # fmt: skip
    """The layout of a training on `world` ranks; without it, on those that `stages.train` asks for.

    `vocab_size` is the tokenizer's, once it is known; without it, the one that the config asks for.
    Raises LayoutError, naming everything that does not fit, and with `near`, which takes long, what of as many does.
    """
    train, wanted, tokenizer = config.stages.train, config.parallel, config.data.tokenizer
    world, per_node = world or train.ranks, ranks_per_node or train.tasks_per_node
    pipeline, tensor, precision = wanted.pipeline, wanted.tensor, config.train.precision
    if tokenizer.path is None:
        vocab_size = vocab_size or tokenizer.vocab_size
    elif pipeline * tensor > 1 and config.model.vocab_size is None:  # else it changes nothing here
        vocab_size = vocab_size or tokenizer_ids(tokenizer.path.expanduser())
    rows = config.model.vocab_size or vocab_size
    if (vocab_size or 0) > (rows or 0):
        raise LayoutError(f"model.vocab_size ({rows}) is less than the {vocab_size} ids of the tokenizer: raise it")
    if misfits := list(_misfits(config, world, per_node, rows)):
        misfits += [_nearest(config, world, per_node, rows)] if near else []
        if world != train.ranks:
            asked = f"{train.most_nodes} node{'s'[: train.most_nodes - 1]} × {train.tasks_per_node}"
            misfits.append(f"stages.train asks for {train.ranks} ranks ({asked}), and these are {world}")
    if problems := [*_contradictions(config), *misfits]:
        raise LayoutError("; ".join(problems))
    data = world // (pipeline * tensor)
    if wanted.data != "auto":
        replicate, shard = wanted.data.replicate, wanted.data.shard
    else:
        replicate, shard = (1, data) if wanted.zero else (data, 1)
    virtual = wanted.virtual_stages if pipeline > 1 else 1
    return Layout(
        pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor, ranks_per_node=per_node,
        micro_batches=config.train.global_batch // (data * config.train.micro_batch),
        virtual_stages=virtual, schedule=wanted.schedule, zero=wanted.zero,
        fsdp=wanted.offload
        or ((world > data or wanted.zero > 0) and (data > 1 or (world == 1 and precision != "fp32"))),
        reduce_each_micro_batch=wanted.zero >= 2 and pipeline == 1 and wanted.reduce != "step",
        sequence=wanted.sequence and tensor > 1 and config.model.target is None,
        stage_layers=split_layers(config, pipeline * virtual, rows or 0),
    )  # fmt: skip


def count_usable_nodes(config: Config, granted: int) -> int:
    """How many of `granted` nodes a training uses: the most that `stages.train.nodes` allows and whose ranks fit.

    The fewest it may have where none fits.
    """
    train = config.stages.train
    for nodes in range(min(granted, train.most_nodes), train.fewest_nodes, -1):
        with suppress(LayoutError):
            resolve_layout(config, nodes * train.tasks_per_node)
            return nodes
    return train.fewest_nodes


def check_config(config: Config, layout: bool = True) -> None:
    """The rules between sections. Raises ValueError for what cannot work together, naming the keys.

    `layout`: whether the ranks must be right for it.
    """
    if config.model.target is not None:
        if "python-stdlib" in config.data.sources:
            raise ValueError("model.target: name the HDF5 files with its samples as data.source")
        refuse_changed(config.data, {"source", "held_out", "verify"}, "it is for text, not for model.target")
    elif "own" in (config.optimizer.name, config.optimizer.schedule):
        raise ValueError(
            "optimizer.name and optimizer.schedule: own is for a model of your own: name model.target, too"
        )
    train = config.stages.train
    for nodes in {train.most_nodes, train.fewest_nodes} if layout else ():
        resolve_layout(config, nodes * train.tasks_per_node)
    if wrong := "; ".join(_contradictions(config)):
        raise LayoutError(wrong)
    for name, row in config.rows.items():
        stage, gpus = config.stages.of(name), config.site_of(name).gpus_per_node
        if row.joined and config.parallel.backend in ("auto", "nccl") and 0 < gpus < stage.per_node:
            key = "site" if stage.gpus_per_node is None else f"stages.{name}"
            raise ValueError(
                f"stages.{name}.tasks_per_node ({stage.per_node}) is more than {key}.gpus_per_node ({gpus}): "
                "each rank needs a GPU of its own; lower it, or use parallel.backend gloo"
            )
    if config.train.steps is not None:
        check_warmup(config, config.train.steps)
    if config.evaluate.task_files and (config.data.held_out == 0 or config.model.target is not None):
        raise ValueError("evaluate.tasks goes with held-out text: not with data.held_out 0, and not with model.target")
    if config.publish is not None and config.sweep is not None:
        raise ValueError("publish is for one training, not for a sweep: leave it out, and `export` the best point")
    if config.train.evaluate_every is not None and config.data.held_out == 0:
        raise ValueError("train.evaluate_every has nothing to look at: data.held_out is 0; hold some out, or leave it")


def check_warmup(config: Config, steps: int) -> None:
    """Raise LayoutError where the warm-up is longer than the training."""
    warmup, train = config.optimizer.warmup_steps, config.train
    if warmup > steps:
        told = f"train.steps ({steps})"
        if train.epochs is not None:
            told = f"the {steps} steps of train.epochs ({train.epochs}): resume with more of them, or start a new run"
        raise LayoutError(f"optimizer.warmup_steps ({warmup}) is more than {told}")


def _between_replicas(config: Config) -> str | None:
    """The option that changes what whole replicas send each other, in words; None where there is none."""
    if config.parallel.local_sgd is not None:
        return f"parallel.local_sgd (every {config.parallel.local_sgd.every})"
    return None if config.parallel.hook.kind == "none" else f"parallel.hook.kind {config.parallel.hook.kind}"


def _contradictions(config: Config) -> Iterator[str]:
    """What is wrong on any number of ranks."""
    wanted, data = config.parallel, config.parallel.data
    if data != "auto" and data.shard > 1 and not wanted.zero:
        yield f"parallel.data.shard ({data.shard}) is for parallel.zero 1 to 3; parallel.zero 0 shards nothing"
    if data != "auto" and data.shard == 1 and data.replicate > 1 and wanted.zero:
        yield f"parallel.zero {wanted.zero} has nothing to split: parallel.data.shard is 1"
    if (option := _between_replicas(config)) is not None:
        if wanted.zero or wanted.offload:
            yield f"{option} is for whole replicas: parallel.zero must be 0 and parallel.offload false"
        if wanted.local_sgd is not None and wanted.hook.kind != "none":
            yield f"{option} does not go with parallel.hook.kind {wanted.hook.kind}: gradients stay at home"
        if wanted.hook.kind in ("powersgd", "topk") and config.train.precision == "fp16":
            yield f"{option} does not go with train.precision fp16, whose gradients change their scale: take bf16"
    if config.optimizer.name == "own":
        cutting = {"zero": wanted.zero, "tensor": wanted.tensor > 1, "pipeline": wanted.pipeline > 1}
        cutting |= {"offload": wanted.offload, "local_sgd": wanted.local_sgd is not None}
        if found := ", ".join(f"parallel.{key}" for key, value in cutting.items() if value):
            yield f"optimizer.name own is for whole replicas, without {found}: leave that out, or take another"
        if config.train.precision == "fp16":
            yield "optimizer.name own does not go with train.precision fp16, which leaves first steps out: take bf16"
    if config.train.loss_chunk is not None and config.model.target is not None:
        yield "train.loss_chunk is for the decoder, whose output layer it knows: leave it out with model.target"
    if config.train.loss_chunk is not None and config.train.precision == "fp16":
        yield "train.loss_chunk does not go with train.precision fp16, whose gradients need their scale: take bf16"
    window, length = config.model.sliding_window, config.data.sequence_length
    if window is not None and length > window:
        yield f"data.sequence_length ({length}) is more than model.sliding_window ({window}): lower it"
    state = config.optimizer.state
    if state.master == "none" and config.train.precision not in ("bf16", "fp8"):
        yield f"optimizer.state.master none is for train.precision bf16 and fp8, not {config.train.precision}"
    if state != StateConfig() and option is not None:
        yield f"optimizer.state (master {state.master}, moments {state.moments}) does not go with {option}"
    if wanted.accurate_sums and wanted.backend != "mpi":
        yield f"parallel.accurate_sums is for parallel.backend mpi, not {wanted.backend}"
    if wanted.reduce == "micro_batch" and wanted.zero < 2:
        yield f"parallel.reduce micro_batch is for parallel.zero 2 and 3; with {wanted.zero} gradients stay whole"


def _misfits(config: Config, world: int, per_node: int, vocab_size: int | None) -> Iterator[str]:
    """Everything that the wanted sizes do not divide or reach on `world` ranks."""
    model, train, wanted = config.model, config.train, config.parallel
    pipeline, tensor = wanted.pipeline, wanted.tensor
    ranks, sizes = pipeline * tensor, f"parallel.pipeline ({pipeline}) × parallel.tensor ({tensor})"
    if wanted.data != "auto":
        ranks *= wanted.data.replicate * wanted.data.shard
        sizes += f" × parallel.data.replicate ({wanted.data.replicate}) × parallel.data.shard ({wanted.data.shard})"
    if world % ranks or (wanted.data != "auto" and world != ranks):
        fails = "does not divide" if wanted.data == "auto" else "is not"
        yield f"{sizes} = {ranks} {fails} the number of training ranks, {world} (stages.train: nodes × tasks_per_node)"
        return
    data, batch, micro = world // (pipeline * tensor), train.global_batch, train.micro_batch
    if batch % (data * micro):
        fits = [n for n in range(1, min(batch // micro, _MOST) + 1) if batch % (n * micro) == 0]
        yield (
            f"train.global_batch ({batch}) is no multiple of train.micro_batch ({micro}) × {data} data parallel "
            f"ranks; with these batches there may be {', '.join(map(str, fits))}"
        )
        return
    if (option := _between_replicas(config)) is not None and pipeline * tensor > 1:
        yield f"{option} is for whole replicas: parallel.pipeline ({pipeline}) and parallel.tensor ({tensor}) must be 1"
    if tensor > 1:
        divided: dict[str, float] = {
            "model.heads": model.heads,
            "model.kv_heads": model.num_kv_heads,
            "model.intermediate_size": model.ffn_size,
            _vocabulary(config, vocab_size): vocab_size or 0,
            "data.sequence_length": config.data.sequence_length if wanted.sequence else 0,
        }
        if config.optimizer.state.moments == "int8":
            rows = {"model.heads × size": model.heads * model.head_size, "model.intermediate_size": model.ffn_size}
            divided |= {f"{name} / {INT8_BLOCK} (moments: int8)": size / INT8_BLOCK for name, size in rows.items()}
        for name, size in divided.items() if model.target is None else ():
            if size % tensor:
                yield f"{name}, {size}, is no multiple of parallel.tensor ({tensor})"
        if train.compile and model.target is not None:
            yield f"parallel.tensor ({tensor}) does not go with train.compile on a model of your own: torch fails in it"
        if world > per_node and per_node % tensor:
            yield (
                f"parallel.tensor ({tensor}) does not divide the {per_node} ranks of a node "
                "(stages.train.tasks_per_node): tensor parallel ranks must share a node"
            )
    if pipeline > 1:
        yield from _pipeline_misfits(config, batch // (data * micro))


def _vocabulary(config: Config, size: int | None) -> str:
    tokenizer = config.data.tokenizer
    if config.model.vocab_size is not None:
        return "model.vocab_size"
    if tokenizer.path is not None:
        return f"the vocabulary (of data.tokenizer.path {tokenizer.path})"
    fewer = f" {tokenizer.vocab_size}: the text gave fewer" if size is not None and size < tokenizer.vocab_size else ""
    return f"the vocabulary (data.tokenizer.vocab_size{fewer})"


def _pipeline_misfits(config: Config, micro_batches: int) -> Iterator[str]:
    """What the schedule asks for. The rules are those of torch.distributed.pipelining."""
    wanted, pipeline, virtual = config.parallel, config.parallel.pipeline, config.parallel.virtual_stages
    schedule = f"parallel.schedule {wanted.schedule}"
    have = f"there are {micro_batches} (train.global_batch / data parallel ranks / train.micro_batch)"
    if micro_batches > _MOST_IN_SCHEDULE:
        yield f"a pipeline's schedule names each micro-batch, and may have {_MOST_IN_SCHEDULE:,}; {have}"
    if pipeline * virtual > config.model.layers:
        yield (
            f"{pipeline} pipeline ranks × parallel.virtual_stages ({virtual}) = {pipeline * virtual} stages are more "
            f"than model.layers ({config.model.layers}): each stage needs a layer"
        )
    if wanted.reduce == "micro_batch":
        yield f"parallel.reduce micro_batch does not go with a pipeline ({pipeline}): that reduces once per step"
    if wanted.schedule.startswith("interleaved"):
        if virtual < 2:
            yield f"{schedule} needs two or more stages per rank: parallel.virtual_stages must not be {virtual}"
        rounds = max(1, micro_batches // pipeline)
        if micro_batches % rounds:
            divide = f"divide into {rounds} rounds (micro-batches // pipeline {pipeline})"
            yield f"{schedule} needs micro-batches that {divide}; {have}"
    elif virtual != (stages := 2 if wanted.schedule in V_SCHEDULES else 1):
        yield f"{schedule} needs parallel.virtual_stages (stages per rank) to be {stages}, not {virtual}"
    least = {"1f1b": pipeline, "dualpipe_v": 2 * pipeline}.get(wanted.schedule, 0)
    if micro_batches < least:
        yield f"{schedule} needs at least {least} micro-batches with {pipeline} pipeline ranks; {have}"
    if wanted.schedule in SPLIT_BACKWARD:
        splits = f"{schedule} computes gradients of weights apart, which does not go with"
        if config.train.compile:
            yield f"{splits} train.compile"
        if config.optimizer.freeze:
            yield f"{splits} optimizer.freeze (torch would lose gradients): take 1f1b or interleaved_1f1b"
        if wanted.activation_checkpointing == "selective":
            yield f"{splits} parallel.activation_checkpointing selective: take full or none"
        if wanted.zero == 3:
            yield f"{splits} parallel.zero 3 (torch would lose gradients): take 1 or 2"


def _nearest(config: Config, world: int, per_node: int, vocab_size: int | None) -> str:
    """Up to three layouts of `world` ranks that fit, the most similar first, in words; a model of one's own uncut."""
    found = []
    sizes = [n for n in range(1, _MOST + 1 if config.model.target is None else 2) if world % n == 0]
    for pipeline, tensor in product(sizes, sizes):
        parallel = config.parallel.model_copy(update={"pipeline": pipeline, "tensor": tensor, "data": "auto"})
        if not any(_misfits(config.model_copy(update={"parallel": parallel}), world, per_node, vocab_size)):
            away = abs(math.log(pipeline / config.parallel.pipeline)) + abs(math.log(tensor / config.parallel.tensor))
            words = f"pipeline {pipeline} × data {world // pipeline // tensor} × tensor {tensor}"
            found.append((round(away, 6), pipeline, tensor, words))
    if not found:
        return f"no layout of {world} ranks fits this model, batch and schedule"
    return f"layouts of {world} ranks that fit: {', or '.join(words for *_, words in sorted(found)[:3])}"


def split_layers(config: Config, stages: int, vocab_size: int) -> tuple[range, ...]:
    """Consecutive decoder blocks for each stage, so that the most expensive stage is as cheap as it can be.

    Cost is the number of values that multiply for each token: a block's weights and its attention over half the
    sequence; the output layer for the last stage; for the first, the embedding's width, as it is only looked up.
    Every stage has at least one block; each further one goes to the cheapest stage, which is optimal for equal blocks.
    """
    model = config.model
    heads = 2 * (model.heads + model.num_kv_heads) * model.head_size
    block = model.dim * (heads + 3 * model.ffn_size) + model.heads * model.head_size * config.data.sequence_length
    extra = [0] * stages
    if model.target is None:
        extra[0] += model.dim
        extra[-1] += model.dim * vocab_size
    # so many blocks every stage gets in any case; only the rest is handed out one by one
    sizes = [max(1, model.layers // stages - max(extra) // block - 2)] * stages if stages > 1 else [model.layers]
    costs = [size * block + more for size, more in zip(sizes, extra, strict=True)]
    for _ in range(model.layers - sum(sizes)):
        cheapest = costs.index(min(costs))
        sizes[cheapest] += 1
        costs[cheapest] += block
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))
