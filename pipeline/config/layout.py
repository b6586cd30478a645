"""Which rank does what: the layout of a training over pipeline stages, data parallel replicas and tensor shards.

A layout splits `world` ranks into a mesh of four dimensions, from outermost to innermost:

    pipeline  ×  replicate  ×  shard  ×  tensor

`tensor` is innermost, since it talks most: neighbouring ranks, on one node. `replicate × shard` together are data
parallel (each has its own part of every batch); ranks along `shard` also split parameters, gradients or optimizer
state among them (ZeRO, Rajbhandari et al., arXiv 1910.02054), ranks along `replicate` keep whole copies of that.

`layout_of` is a pure function of the config, the number of ranks and the ranks per node. It refuses what cannot
work, with the numbers and the nearest layouts that can, before anything starts: `check`, the rules between sections,
calls it on the login node (so no torch here), the trainer calls it again with the ranks that are really there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.config.types import refuse_changed

V_SCHEDULES = ("zbv", "dualpipe_v")
"""Rank i holds stages i and 2·pipeline−1−i: the stages run down the ranks and up again, and the loss is on rank 0."""
_MOST = 1024
"""Sizes beyond this are not looked at when something that fits is sought."""
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
    """How the ranks of one training split its work. Made by `layout_of`, which checks it."""

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

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, tensor)

    def stages_of(self, pipeline: int) -> list[int]:
        """The stages of one pipeline rank, in the order in which a sample passes them."""
        if self.schedule in V_SCHEDULES and self.pipeline > 1:
            return [pipeline, self.stages - 1 - pipeline]
        return [pipeline + self.pipeline * turn for turn in range(self.virtual_stages)]

    @property
    def last_stage_on(self) -> int:
        """The pipeline rank that holds the last stage, and with it the loss."""
        return next(rank for rank in range(self.pipeline) if self.stages - 1 in self.stages_of(rank))

    def random_place(self, rank: int) -> int:
        """What seeds a rank's randomness: the same on ranks that compute the same activations."""
        return rank if self.sequence else rank // self.tensor

    def words(self) -> str:
        """Sizes in words: `pipeline 2 × data 2 × tensor 2`."""
        return _words(self.pipeline, self.data, self.tensor)


def layout_of(
    config: Config, world: int | None = None, ranks_per_node: int | None = None, vocab_size: int | None = None
) -> Layout:
    """The layout of a training on `world` ranks; without it, on those that `stages.train` asks for.

    `vocab_size` is the tokenizer's, once it is known; without it, the one that the config asks for.
    Raises LayoutError, naming everything that does not fit, and the nearest layouts of as many ranks that do.
    """
    train = config.stages.train
    world = world or train.ranks
    per_node = ranks_per_node or train.tasks_per_node
    wanted, tokenizer = config.parallel, config.data.tokenizer
    pipeline, tensor = wanted.pipeline, wanted.tensor
    if vocab_size is None:
        vocab_size = tokenizer.vocab_size if tokenizer.path is None else None
        if tokenizer.path is not None and pipeline * tensor > 1:  # else it changes nothing here
            vocab_size = _size_of(tokenizer.path.expanduser())
    problems = list(_sizes(config, world))
    data = max(1, world // (pipeline * tensor))
    if not problems:
        problems += _misfits(config, pipeline, data, tensor, world > per_node, per_node, vocab_size)
    if problems:
        nearest = _nearest(config, world, per_node, vocab_size)
        raise LayoutError("; ".join(problems) + f"; {_offer(config, world, nearest)}")
    if wanted.data != "auto":
        replicate, shard = wanted.data.replicate, wanted.data.shard
    else:
        replicate, shard = (1, data) if wanted.zero else (data, 1)
    virtual = wanted.virtual_stages if pipeline > 1 else 1
    return Layout(
        pipeline=pipeline,
        replicate=replicate,
        shard=shard,
        tensor=tensor,
        ranks_per_node=per_node,
        micro_batches=config.train.global_batch // (data * config.train.micro_batch),
        virtual_stages=virtual,
        schedule=wanted.schedule,
        zero=wanted.zero,
        reduce_each_micro_batch=wanted.zero >= 2 and pipeline == 1 and wanted.reduce != "step",
        sequence=wanted.sequence and tensor > 1 and config.model.target is None,
        stage_layers=split_layers(config, pipeline * virtual, vocab_size or 0),
    )


@cache
def _size_of(tokenizer: Path) -> int | None:
    """The largest id of a `tokenizer.json` plus one, read without the package that it is for.

    None where that cannot be told: the stage prepare says what is wrong with it.
    """
    try:
        content = json.loads(tokenizer.read_bytes())
        vocabulary = content["model"]["vocab"]  # Unigram: a list by id; all others: ids by token
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + max([*ids, *(token["id"] for token in content.get("added_tokens", ()))])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def usable_nodes(config: Config, granted: int) -> int:
    """How many of `granted` nodes a training uses: the most that `stages.train.nodes` allows and whose ranks fit.

    The fewest it may have where none fits.
    """
    train = config.stages.train
    for nodes in range(min(granted, train.most_nodes), train.fewest_nodes, -1):
        try:
            layout_of(config, nodes * train.tasks_per_node)
        except LayoutError:
            continue
        return nodes
    return train.fewest_nodes


def check(config: Config) -> None:
    """The rules between sections. Raises ValueError for what cannot work together, naming the keys."""
    if config.model.target is not None:
        if "python-stdlib" in config.data.sources:
            raise ValueError("model.target: name the HDF5 files with its samples as data.source")
        refuse_changed(config.data, {"source", "held_out", "verify"}, "it is for text, not for model.target")
    train = config.stages.train
    for nodes in {train.most_nodes, train.fewest_nodes}:
        layout_of(config, nodes * train.tasks_per_node)
    gpus = config.site.gpus_per_node if config.parallel.backend in ("auto", "nccl") else 0
    for name, row in STAGES.items():
        per_node = config.stages.of(name).per_node
        if row.joined and 0 < gpus < per_node:
            raise ValueError(
                f"stages.{name}.tasks_per_node ({per_node}) is more than site.gpus_per_node ({gpus}): "
                "each rank needs a GPU of its own; lower it, or use parallel.backend gloo"
            )
    if config.optimizer.warmup_steps > config.train.steps:
        raise ValueError(
            f"optimizer.warmup_steps ({config.optimizer.warmup_steps}) is more than train.steps ({config.train.steps})"
        )


def _sizes(config: Config, world: int) -> Iterator[str]:
    """What is wrong with the sizes themselves: they must multiply to the number of ranks."""
    wanted = config.parallel
    sizes = f"parallel.pipeline ({wanted.pipeline}) × parallel.tensor ({wanted.tensor})"
    product = wanted.pipeline * wanted.tensor
    if wanted.data != "auto":
        data = wanted.data
        sizes += f" × parallel.data.replicate ({data.replicate}) × parallel.data.shard ({data.shard})"
        product *= data.replicate * data.shard
        if not wanted.zero and data.shard > 1:
            yield f"parallel.data.shard ({data.shard}) is for parallel.zero 1 to 3; parallel.zero 0 shards nothing"
        if wanted.zero and data.shard == 1 and data.replicate > 1:
            yield f"parallel.zero {wanted.zero} has nothing to split: parallel.data.shard is 1"
        if product != world:
            yield f"{sizes} = {product} is not the number of training ranks, {world}{_ranks(config, world)}"
    elif world % product:
        yield f"{sizes} = {product} does not divide the number of training ranks, {world}{_ranks(config, world)}"
    if (option := _between_replicas(config)) is not None:
        if wanted.zero or wanted.offload:
            yield f"{option} is for whole replicas: parallel.zero must be 0 and parallel.offload false"
        if wanted.local_sgd is not None and wanted.hook.kind != "none":
            yield f"{option} does not go with parallel.hook.kind {wanted.hook.kind}: gradients stay at home"
        if wanted.hook.kind in ("powersgd", "topk") and config.train.precision == "fp16":
            yield f"{option} does not go with train.precision fp16, whose gradients change their scale: take bf16"
    if wanted.accurate_sums and wanted.backend != "mpi":
        yield f"parallel.accurate_sums is for parallel.backend mpi, not {wanted.backend}"
    if wanted.reduce == "micro_batch" and wanted.zero < 2:
        yield f"parallel.reduce micro_batch is for parallel.zero 2 and 3; with {wanted.zero} gradients stay whole"
    if wanted.reduce == "micro_batch" and wanted.pipeline > 1:
        yield f"parallel.reduce micro_batch does not go with a pipeline ({wanted.pipeline}): that reduces once per step"


def _between_replicas(config: Config) -> str | None:
    """The option that changes what whole replicas send each other, in words; None where there is none."""
    if config.parallel.local_sgd is not None:
        return f"parallel.local_sgd (every {config.parallel.local_sgd.every})"
    return None if config.parallel.hook.kind == "none" else f"parallel.hook.kind {config.parallel.hook.kind}"


def _ranks(config: Config, world: int) -> str:
    train = config.stages.train
    nodes, rest = divmod(world, train.tasks_per_node)
    planned = not rest and nodes in (train.fewest_nodes, train.most_nodes)
    return f" (stages.train has {nodes} nodes × {train.tasks_per_node} tasks)" if planned else ""


def _misfits(
    config: Config, pipeline: int, data: int, tensor: int, many_nodes: bool, per_node: int, vocab_size: int | None
) -> Iterator[str]:
    """Everything that these three sizes do not divide or reach."""
    model, train = config.model, config.train
    batch, micro = train.global_batch, train.micro_batch
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
        divided = (
            {}
            if model.target
            else {
                "model.heads": model.heads,
                "model.kv_heads": model.num_kv_heads,
                "model.intermediate_size": model.ffn_size,
                _vocabulary(config, vocab_size): vocab_size or 0,
                "data.sequence_length": config.data.sequence_length if config.parallel.sequence else 0,
            }
        )
        for name, size in divided.items():
            if size % tensor:
                yield f"{name}, {size}, is no multiple of parallel.tensor ({tensor})"
        if train.compile:
            yield f"parallel.tensor ({tensor}) does not go with train.compile: torch fails in its backward pass"
        if many_nodes and per_node % tensor:
            yield (
                f"parallel.tensor ({tensor}) does not divide the {per_node} ranks of a node "
                "(stages.train.tasks_per_node): tensor parallel ranks must share a node"
            )
    if pipeline > 1:
        yield from _pipeline_misfits(config, pipeline, batch // (data * micro))


def _vocabulary(config: Config, size: int | None) -> str:
    tokenizer = config.data.tokenizer
    if tokenizer.path is not None:
        return f"the vocabulary (of data.tokenizer.path {tokenizer.path})"
    fewer = f" {tokenizer.vocab_size}: the text gave fewer" if size is not None and size < tokenizer.vocab_size else ""
    return f"the vocabulary (data.tokenizer.vocab_size{fewer})"


def _pipeline_misfits(config: Config, pipeline: int, micro_batches: int) -> Iterator[str]:
    """What the schedule asks for. The rules are those of torch.distributed.pipelining."""
    wanted, virtual = config.parallel, config.parallel.virtual_stages
    schedule = f"parallel.schedule {wanted.schedule}"
    have = f"there are {micro_batches} (train.global_batch / data parallel ranks / train.micro_batch)"
    if pipeline * virtual > config.model.layers:
        yield (
            f"{pipeline} pipeline ranks × parallel.virtual_stages ({virtual}) = {pipeline * virtual} stages are more "
            f"than model.layers ({config.model.layers}): each stage needs a layer"
        )
    if wanted.schedule in ("gpipe", "1f1b") and virtual != 1:
        yield f"{schedule} has one stage per rank: parallel.virtual_stages must be 1, not {virtual}"
    if wanted.schedule.startswith("interleaved"):
        if virtual < 2:
            yield f"{schedule} needs two or more stages per rank: parallel.virtual_stages must not be {virtual}"
        rounds = max(1, micro_batches // pipeline)
        if micro_batches % rounds:
            yield (
                f"{schedule} needs micro-batches that divide into {rounds} rounds (micro-batches // pipeline "
                f"{pipeline}); {have}"
            )
    if wanted.schedule in V_SCHEDULES and virtual != 2:
        yield f"{schedule} has two stages per rank: parallel.virtual_stages must be 2, not {virtual}"
    if wanted.schedule == "1f1b" and micro_batches < pipeline:
        yield f"{schedule} needs at least {pipeline} micro-batches, one per pipeline rank; {have}"
    if wanted.schedule == "dualpipe_v" and micro_batches < 2 * pipeline:
        yield f"{schedule} needs at least {2 * pipeline} micro-batches, two per pipeline rank; {have}"
    if wanted.schedule in SPLIT_BACKWARD:
        splits = f"{schedule} computes gradients of weights apart, which does not go with"
        if config.train.compile:
            yield f"{splits} train.compile"
        if wanted.activation_checkpointing == "selective":
            yield f"{splits} parallel.activation_checkpointing selective: take full or none"
        if wanted.zero == 3:
            yield f"{splits} parallel.zero 3 (torch would lose gradients): take 1 or 2"


def _nearest(config: Config, world: int, per_node: int, vocab_size: int | None) -> list[str]:
    """Up to three layouts of `world` ranks that fit, the most similar first."""
    found = []
    stages, cuts = (config.model.layers, config.model.heads) if config.model.target is None else (1, 1)
    for pipeline in (n for n in range(1, min(world, stages, _MOST) + 1) if world % n == 0):
        rest = world // pipeline
        for tensor in (n for n in range(1, min(rest, cuts, _MOST) + 1) if rest % n == 0):
            data = world // pipeline // tensor
            if not list(_misfits(config, pipeline, data, tensor, world > per_node, per_node, vocab_size)):
                away = abs(math.log(pipeline / config.parallel.pipeline)) + abs(
                    math.log(tensor / config.parallel.tensor)
                )
                found.append((round(away, 6), pipeline, tensor, _words(pipeline, data, tensor)))
    return [words for *_, words in sorted(found)[:3]]


def _offer(config: Config, world: int, nearest: list[str]) -> str:
    if nearest:
        return f"layouts of {world} ranks that fit: {', or '.join(nearest)}"
    return f"no layout of {world} ranks fits this model, batch and schedule"


def _words(pipeline: int, data: int, tensor: int) -> str:
    return f"pipeline {pipeline} × data {data} × tensor {tensor}"


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
