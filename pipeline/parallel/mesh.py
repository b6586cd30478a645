"""The device mesh: the named axes along which the ranks of a run split its work.

    pp  ×  dp_replicate  ×  dp_shard  ×  cp  ×  tp        from outermost to innermost

This module defines the axes: their sizes, which sizes are allowed, each rank's coordinates and the process groups.
Other modules use an axis by its name and never compute one rank from another. `tp` communicates most, so it is
innermost: its ranks are neighbours on one node. `dp_replicate` and `dp_shard` together are data parallelism (`dp`).
Ranks along `dp_shard` also split parameters, gradients or optimizer state (ZeRO, Rajbhandari et al., arXiv 1910.02054).
Ranks along `cp` split the sequences of the same samples. They have the same parameters, and for gradients and ZeRO they
count as data-parallel ranks.

The login node uses this module to validate configs. Therefore only `Layout.build_device_mesh` imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import UserError
from pipeline.config.hugging_face import count_tokenizer_ids
from pipeline.config.sections import Config
from pipeline.config.types import INT8_BLOCK, StateConfig
from pipeline.model.spec import block_multiplications_per_token, query_width

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the mesh, from outermost to innermost."""
AXIS_KEYS = {"pp": "pipeline", "cp": "context", "tp": "tensor"}
"""The axes that split the model or the sequence, and the keys of their sizes in the section `parallel`. All other axes
are data-parallel."""
V_SCHEDULES = ("zbv", "dualpipe_v")
"""Schedules in which pipeline rank i has the pipeline-parallel stages i and 2·pp−1−i.

A pipeline rank is the position of a rank along the axis `pp`. The last stage, and with it the loss, is on pipeline
rank 0.
"""
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipe_v")
"""Schedules that compute gradients of inputs and of weights separately.

These schedules compute the gradients of weights in bubbles, the times in which a rank waits for other stages.
"""
_MAX_SUGGESTED_SIZE = 1024
"""The largest size of an axis, or of data parallelism, that an error message suggests."""
_MAX_MICRO_BATCHES_IN_SCHEDULE = 10_000
"""Maximum number of micro-batches of a pipeline: a limit on the size of a config, as docs/security.md lists it."""


class LayoutError(UserError, ValueError):
    """Error for a layout that cannot work. The message names the config keys and their values.

    If a size does not fit, the message can also suggest similar layouts that work.
    """


class Problem(NamedTuple):
    """One reason why a layout cannot work, or a note for the user, such as a suggestion of layouts that work."""

    code: str
    """Code of the `UserError`; empty for a note."""
    message: str


class Coordinates(NamedTuple):
    """Position of a rank along each axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    dp: int
    """Position among all data-parallel ranks. This position determines which part of each batch the rank processes."""

    def name_positions(self, mesh: Mesh) -> dict[str, int]:
        """Return the positions by the names that users see: `pipeline`, `data`, `tensor` and other axes in use."""
        names = {"pipeline": self.pp, "data": self.dp}
        return names | ({"context": self.cp} if mesh.cp > 1 else {}) | {"tensor": self.tp}


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes, one field for each of `AXES`."""

    pp: int = 1
    """Pipeline-parallel size."""
    dp_replicate: int = 1
    """Number of copies of the whole (possibly sharded) state."""
    dp_shard: int = 1
    """Number of data-parallel ranks that split parameters, gradients or optimizer state (ZeRO); 1 without ZeRO."""
    cp: int = 1
    """Context-parallel size."""
    tp: int = 1
    """Tensor-parallel size."""

    def size(self, *axes: str) -> int:
        """Return the number of ranks along these axes together."""
        return math.prod(getattr(self, axis) for axis in axes)

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.size("dp_replicate", "dp_shard")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.size(*AXES)

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks over which gradients are averaged: ranks with the same parameters and different tokens."""
        return self.world_size // self.size("pp", "tp")

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that process the same samples."""
        return self.world_size // self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of `rank` along each axis. Consecutive ranks are neighbours along the innermost axis."""
        positions = {}
        for axis in reversed(AXES):
            rank, positions[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**positions, dp=positions["dp_replicate"] * self.dp_shard + positions["dp_shard"])

    def list_groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along these axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            others = tuple(getattr(coordinates, name) for name in AXES if name not in axes)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class Layout(Mesh):
    """How the ranks of a run split its work: the mesh and what each axis does. See :func:`resolve_layout`.

    In this class, a stage is a pipeline-parallel stage.
    """

    ranks_per_node: int
    micro_batches: int
    """Micro-batches per step on each data-parallel rank."""
    virtual_stages: int
    """Stages per rank; 1 without a pipeline."""
    schedule: str
    """Pipeline schedule; ignored without a pipeline."""
    zero: int
    """ZeRO level, 0 to 3."""
    fsdp: bool
    """Whether FSDP2 stores the weights and gathers them in the type of `train.precision`.

    If `parallel.zero` is set and `train.precision` is not fp32, FSDP2 is also used on a single rank. The weights are
    then converted only once per step.
    """
    reduce_each_micro_batch: bool
    """Whether gradients are reduced after each micro-batch instead of once per step."""
    sequence_parallel: bool
    """Whether tensor-parallel ranks shard the hidden states outside of attention and MLP along the sequence."""
    stage_layers: tuple[range, ...]
    """Decoder blocks of each stage."""

    @property
    def state_shards(self) -> int:
        """Number of ranks that split parameters, gradients or optimizer state; 1 without ZeRO."""
        return self.size("dp_shard", "cp") if self.zero else 1

    @property
    def state_replicas(self) -> int:
        """Number of copies of the whole (possibly sharded) state of a pipeline and tensor rank."""
        return self.gradient_ranks // self.state_shards

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Create torch's device mesh, with a process group for each dimension. Every rank must call this.

        Its dimensions are `pp`, `replicate` (:attr:`state_replicas`), `shard` (:attr:`state_shards`) and `tp`.
        """
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.pp, self.state_replicas, self.state_shards, self.tp)
        return init_device_mesh(device_type, shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.pp * self.virtual_stages

    @property
    def hidden_shards(self) -> int:
        """Number of ranks that split the hidden states between blocks along the sequence."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    @property
    def gathers_blocks(self) -> bool:
        """Whether FSDP2 gathers the weights of one block, uses them and frees them (ZeRO 3 without a pipeline).

        Otherwise weights stay gathered until the end of the step.
        """
        return self.zero == 3 and self.pp == 1

    def stages_on_pipeline_rank(self, pp_rank: int) -> list[int]:
        """Return the stages of a pipeline rank, in the order in which samples pass through them."""
        if self.schedule in V_SCHEDULES and self.pp > 1:
            return [pp_rank, self.stages - 1 - pp_rank]
        return [pp_rank + self.pp * number for number in range(self.virtual_stages)]

    @property
    def last_stage_pipeline_rank(self) -> int:
        """The pipeline rank that has the last stage and computes the loss."""
        return next(rank for rank in range(self.pp) if self.stages - 1 in self.stages_on_pipeline_rank(rank))

    def random_stream(self, rank: int) -> int:
        """Return the number of the random stream that a rank uses during a step.

        Tensor-parallel ranks that compute the same activations use the same stream.
        """
        return rank if self.sequence_parallel else rank // self.tp

    def describe_sizes(self) -> str:
        """Return the sizes as text: `pipeline 2 × data 2 × tensor 2`."""
        return _describe_sizes(self.dp, {axis: self.size(axis) for axis in AXIS_KEYS})


def _describe_sizes(dp: int, sizes: Mapping[str, int]) -> str:
    """Return the data-parallel size and the sizes of the other axes as text.

    Pipeline and tensor sizes are included even if they are 1.
    """
    text = f"pipeline {sizes['pp']} × data {dp} × tensor {sizes['tp']}"
    other_axes = [axis for axis, size in sizes.items() if axis not in ("pp", "tp") and size > 1]
    return text + "".join(f" × {AXIS_KEYS[axis]} {sizes[axis]}" for axis in other_axes)


def _get_axis_sizes(config: Config) -> dict[str, int]:
    """Return the configured size of each axis of `AXIS_KEYS`."""
    return {axis: getattr(config.parallel, key) for axis, key in AXIS_KEYS.items()}


def describe_layout(layout: Layout) -> str:
    """Return a layout as text: `2 data-parallel replicas × pipeline 2 (1f1b) × tensor 2, ZeRO 1 over 2 ranks`."""
    parts = [f"{layout.dp} data-parallel replica{'s' * (layout.dp > 1)}"]
    if layout.pp > 1:
        stages = f", {layout.virtual_stages} stages per rank" if layout.virtual_stages > 1 else ""
        parts.append(f"pipeline {layout.pp} ({layout.schedule}{stages})")
    parts += [f"{key} {layout.size(axis)}" for axis, key in AXIS_KEYS.items() if axis != "pp" and layout.size(axis) > 1]
    zero = f", ZeRO {layout.zero} over {layout.state_shards} ranks" if layout.zero else ""
    return " × ".join(parts) + zero


def describe_layout_identity(layout: Layout, config: Config, backend: str, device_type: str) -> dict[str, object]:
    """Return the facts about a layout that checkpoints and events record.

    Two runs of the same config give bit-identical results if these facts are equal.
    """
    parallel = config.parallel
    identity: dict[str, object] = {
        "data_parallel": layout.dp,
        "tensor": layout.tp,
        "pipeline": layout.pp,
        "zero": layout.zero,
        "ranks_per_node": layout.ranks_per_node,
        "micro_batch": config.train.micro_batch,
    }
    # Other axes did not exist when older checkpoints were written, so they are recorded only if they are used.
    identity |= {
        key: layout.size(axis) for axis, key in AXIS_KEYS.items() if key not in identity and layout.size(axis) > 1
    }
    if layout.zero:
        identity |= {"shard": layout.dp_shard, "reduce": "micro_batch" if layout.reduce_each_micro_batch else "step"}
    if layout.tp > 1:
        identity |= {"sequence": layout.sequence_parallel, "loss_parallel": parallel.loss_parallel}
    if layout.pp > 1:
        identity |= {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
    if parallel.hook.kind != "none":
        identity["hook"] = parallel.hook.model_dump()
    if parallel.local_sgd is not None:
        identity["local_sgd"] = parallel.local_sgd.model_dump()
    if parallel.accurate_sums:
        identity["accurate_sums"] = True
    return identity | {
        "offload": parallel.offload,
        "activation_checkpointing": parallel.activation_checkpointing,
        "bucket_mb": parallel.bucket_mb,
        "threads": config.train.threads,
        "precision": config.train.precision,
        "compile": config.train.compile,
        "backend": backend,
        "device": device_type,
    }


def resolve_layout(
    config: Config, world_size: int | None = None, ranks_per_node: int | None = None, vocab_size: int | None = None,
    suggest: bool = True,
) -> Layout:  # fmt: skip
    """Return the layout that a config describes. The result depends on the arguments and on the tokenizer file only.

    Args:
        config: the run's config.
        world_size: number of ranks; by default the number that `stages.train` requests.
        ranks_per_node: number of ranks per node; by default `stages.train.tasks_per_node`.
        vocab_size: number of ids of the tokenizer. If None and `data.tokenizer.path` is set, the number is read from
            this file if the layout depends on it. If None and no path is set, it is `data.tokenizer.vocab_size`.
        suggest: whether an error message suggests layouts that fit. The search for them takes long.

    Raises:
        LayoutError: if the layout cannot work, or if the model has fewer embeddings than the tokenizer has ids. If the
            layout cannot work, the message lists all reasons that were found.
    """
    train = config.stages.train
    parallel = config.parallel
    tokenizer = config.data.tokenizer
    world_size = world_size or train.ranks
    per_node = ranks_per_node or train.tasks_per_node
    sizes = _get_axis_sizes(config)
    pp = sizes["pp"]
    if tokenizer.path is None:
        vocab_size = vocab_size or tokenizer.vocab_size
    elif pp * sizes["tp"] > 1 and config.model.vocab_size is None:
        # Without pipeline and tensor parallelism the vocabulary does not affect the layout.
        vocab_size = vocab_size or count_tokenizer_ids(tokenizer.path.expanduser())
    embedding_rows = config.model.vocab_size or vocab_size
    if (vocab_size or 0) > (embedding_rows or 0):
        raise LayoutError(
            "model.vocab_too_small",
            f"model.vocab_size ({embedding_rows}) is less than the {vocab_size} ids of the tokenizer: raise it",
        )
    problems = list(_find_conflicts(config))
    if misfits := list(_find_misfits(config, world_size, per_node, embedding_rows)):
        problems += misfits
        if suggest:
            problems.append(Problem("", _suggest_layouts(config, world_size, per_node, embedding_rows)))
        if world_size != train.ranks:
            nodes = f"{train.max_nodes} node{'s' * (train.max_nodes > 1)} × {train.tasks_per_node}"
            problems.append(Problem("", f"stages.train requests {train.ranks} ranks ({nodes}), but {world_size} run"))
    _raise_problems(problems)
    dp = world_size // math.prod(sizes.values())
    if parallel.data != "auto":
        replicate = parallel.data.replicate
        shard = parallel.data.shard
    else:
        replicate, shard = (1, dp) if parallel.zero else (dp, 1)
    virtual = parallel.virtual_stages if pp > 1 else 1
    # FSDP2 stores the weights in three cases: with offload; with ZeRO or a split model on several ranks with the same
    # parameters; and with ZeRO on a single rank if the weights must be converted.
    has_shards = pp * sizes["tp"] > 1 or parallel.zero > 0
    splits_state = has_shards and dp * sizes["cp"] > 1
    casts_on_one_rank = has_shards and world_size == 1 and config.train.precision != "fp32"
    return Layout(
        **sizes, dp_replicate=replicate, dp_shard=shard, ranks_per_node=per_node,
        micro_batches=config.train.global_batch // (dp * config.train.micro_batch),
        virtual_stages=virtual, schedule=parallel.schedule, zero=parallel.zero,
        fsdp=parallel.offload or splits_state or casts_on_one_rank,
        reduce_each_micro_batch=parallel.zero >= 2 and pp == 1 and parallel.reduce != "step",
        sequence_parallel=parallel.sequence and sizes["tp"] > 1 and config.model.target is None,
        stage_layers=split_layers(config, pp * virtual, embedding_rows or 0),
    )  # fmt: skip


def _raise_problems(problems: list[Problem]) -> None:
    """Raise LayoutError, if there are problems, with the code of the first problem and the messages of all."""
    if problems:
        raise LayoutError(problems[0].code, "; ".join(problem.message for problem in problems))


def count_usable_nodes(config: Config, granted: int) -> int:
    """Return how many of the `granted` nodes the train stage uses.

    The result is the largest number that is at most `granted`, is allowed by `stages.train.nodes` and gives a valid
    layout. If no such number exists, return the smallest number that `stages.train.nodes` allows.
    """
    train = config.stages.train
    for nodes in range(min(granted, train.max_nodes), train.min_nodes, -1):
        with suppress(LayoutError):
            resolve_layout(config, nodes * train.tasks_per_node)
            return nodes
    return train.min_nodes


def check_tensor_group_on_one_node(rank_info: RankInfo, tp: int) -> None:
    """Raise UserError if the launcher spread a tensor-parallel group over several nodes, as `srun -m cyclic` does.

    A group has `tp` consecutive ranks. If ranks are distributed in blocks, each rank and its local rank are equal
    modulo `tp`. Each rank calls this function and checks only its own numbers.
    """
    if rank_info.local_rank % tp != rank_info.rank % tp:
        first_rank = rank_info.rank - rank_info.rank % tp
        raise UserError(
            "parallel.group_on_several_nodes",
            f"rank {rank_info.rank} has local rank {rank_info.local_rank} on its node, but ranks {first_rank} to "
            f"{first_rank + tp - 1} (parallel.tensor={tp}) must be on one node: distribute ranks in blocks, as "
            "`srun --distribution=block` does",
        )


def check_layout(config: Config, check_sizes: bool = True) -> None:
    """Raise LayoutError if the layout that a config describes cannot work. The message names the config keys.

    Also raise LayoutError if a stage has more ranks per node than GPUs per node, although its backend may be NCCL. A
    stage that requests no GPUs is not checked.

    Args:
        config: a config with valid sections.
        check_sizes: whether to also check the sizes, with the smallest and the largest requested number of nodes.
    """
    train = config.stages.train
    for nodes in {train.max_nodes, train.min_nodes} if check_sizes else ():
        resolve_layout(config, nodes * train.tasks_per_node)
    _raise_problems(list(_find_conflicts(config)))
    may_use_nccl = config.parallel.backend in ("auto", "nccl")
    for name, stage in config.active_stages.items():
        resources = config.stages.get_resources(name)
        gpus = config.resolve_site(name).gpus_per_node
        if stage.is_distributed and may_use_nccl and 0 < gpus < resources.processes_per_node:
            key = "site" if resources.gpus_per_node is None else f"stages.{name}"
            raise LayoutError(
                "parallel.too_few_gpus",
                f"stages.{name}.tasks_per_node ({resources.processes_per_node}) is more than "
                f"{key}.gpus_per_node ({gpus}): each rank needs its own GPU; lower it, or set parallel.backend to gloo",
            )


def _describe_replica_sync(config: Config) -> str | None:
    """Return `parallel.local_sgd` or `parallel.hook.kind` with its value as text; None if neither is set.

    Both options replace DDP's reduction of gradients, so they require whole replicas.
    """
    if config.parallel.local_sgd is not None:
        return f"parallel.local_sgd (every {config.parallel.local_sgd.every})"
    return None if config.parallel.hook.kind == "none" else f"parallel.hook.kind {config.parallel.hook.kind}"


def _find_conflicts(config: Config) -> Iterator[Problem]:
    """Yield the options that cannot be combined, on any number of ranks."""
    for message in _describe_conflicts(config):
        yield Problem("config.conflict", message)


def _describe_conflicts(config: Config) -> Iterator[str]:
    """Yield a message for each conflict of `_find_conflicts`."""
    parallel = config.parallel
    data = parallel.data
    if data != "auto" and data.shard > 1 and not parallel.zero:
        yield f"parallel.data.shard ({data.shard}) requires parallel.zero 1 to 3: parallel.zero 0 shards nothing"
    if data != "auto" and data.shard == 1 and data.replicate > 1 and parallel.zero and parallel.context == 1:
        yield f"parallel.zero {parallel.zero} has nothing to shard: parallel.data.shard is 1"
    if (option := _describe_replica_sync(config)) is not None:
        if parallel.zero or parallel.offload:
            yield f"{option} requires whole replicas: parallel.zero must be 0 and parallel.offload false"
        if parallel.local_sgd is not None and parallel.hook.kind != "none":
            yield (
                f"{option} cannot be combined with parallel.hook.kind {parallel.hook.kind}: local SGD sends no "
                "gradients"
            )
        if parallel.hook.kind in ("powersgd", "topk") and config.train.precision == "fp16":
            yield (
                f"{option} cannot be combined with train.precision fp16, which changes the scale of gradients: use bf16"
            )
    if config.optimizer.name == "own":
        is_set = {"offload": parallel.offload, "local_sgd": parallel.local_sgd is not None}
        if conflicting_keys := ", ".join(f"parallel.{key}" for key, value in is_set.items() if value):
            yield (
                f"optimizer.name own requires whole replicas and cannot be combined with {conflicting_keys}: remove "
                "these keys, or use another optimizer"
            )
    state = config.optimizer.state
    if state != StateConfig() and option is not None:
        yield f"optimizer.state (master {state.master}, moments {state.moments}) cannot be combined with {option}"
    if parallel.accurate_sums and parallel.backend != "mpi":
        yield f"parallel.accurate_sums requires parallel.backend mpi, not {parallel.backend}"
    if parallel.reduce == "micro_batch" and parallel.zero < 2:
        yield (
            f"parallel.reduce micro_batch requires parallel.zero 2 or 3: parallel.zero {parallel.zero} does not shard "
            "gradients"
        )


def _find_misfits(config: Config, world_size: int, per_node: int, vocab_size: int | None) -> Iterator[Problem]:
    """Yield the configured sizes that do not fit the model, the batch or `world_size` ranks.

    If the model cannot be split, or the number of ranks or the batch does not fit, only this problem is yielded.
    """
    train = config.train
    parallel = config.parallel
    pp = parallel.pipeline
    tp = parallel.tensor
    axis_sizes = _get_axis_sizes(config)
    ranks_per_replica = math.prod(axis_sizes.values())
    if config.model.backend == "transformers" and ranks_per_replica > 1:
        for axis, size in axis_sizes.items():
            if size > 1:
                yield Problem(
                    "config.conflict",
                    f"parallel.{AXIS_KEYS[axis]} ({size}) cannot split a model that transformers builds (model.backend "
                    "transformers): set it to 1, and use data parallelism with parallel.zero 1 to 3",
                )
        return
    ranks = ranks_per_replica
    sizes = " × ".join(f"parallel.{AXIS_KEYS[axis]} ({size})" for axis, size in axis_sizes.items())
    if parallel.data != "auto":
        ranks *= parallel.data.replicate * parallel.data.shard
        sizes += f" × parallel.data.replicate ({parallel.data.replicate}) × parallel.data.shard ({parallel.data.shard})"
    if world_size % ranks or (parallel.data != "auto" and world_size != ranks):
        relation = "does not divide" if parallel.data == "auto" else "is not"
        yield Problem(
            "parallel.wrong_world_size",
            f"{sizes} = {ranks} {relation} the number of training ranks, {world_size} "
            "(stages.train: nodes × tasks_per_node)",
        )
        return
    dp = world_size // ranks_per_replica
    batch = train.global_batch
    micro = train.micro_batch
    if batch % (dp * micro):
        sizes_that_fit = [n for n in range(1, min(batch // micro, _MAX_SUGGESTED_SIZE) + 1) if batch % (n * micro) == 0]
        yield Problem(
            "parallel.indivisible_batch",
            f"train.global_batch ({batch}) is not a multiple of train.micro_batch ({micro}) × {dp} data-parallel "
            f"ranks; these batch sizes work with {', '.join(map(str, sizes_that_fit))} data-parallel ranks",
        )
        return
    if (option := _describe_replica_sync(config)) is not None and ranks_per_replica > 1:
        keys = ", ".join(f"parallel.{AXIS_KEYS[axis]} ({size})" for axis, size in axis_sizes.items())
        yield Problem("config.conflict", f"{option} requires whole replicas: {keys} must be 1")
    if parallel.context > 1:
        yield from _find_context_misfits(config)
    if tp > 1:
        yield from _find_tensor_misfits(config, world_size, per_node, vocab_size)
    if pp > 1:
        yield from _find_pipeline_misfits(config, batch // (dp * micro))


def _find_context_misfits(config: Config) -> Iterator[Problem]:
    """Yield why the sequences cannot be split over the ranks of `parallel.context`."""
    parallel = config.parallel
    if config.model.target is not None:
        yield Problem(
            "config.conflict", f"parallel.context ({parallel.context}) is for the decoder: remove it or model.target"
        )
    tensor = parallel.tensor if parallel.sequence else 1
    for name, length in _name_sequence_lengths(config).items():
        if length % (2 * parallel.context * tensor):
            factors = f"2 × parallel.context ({parallel.context})" + f" × parallel.tensor ({tensor})" * (tensor > 1)
            yield Problem("parallel.indivisible_size", f"{name}, {length}, is not a multiple of {factors}")


def _name_sequence_lengths(config: Config) -> dict[str, int]:
    """Return the lengths of the sequences in tokens, by the key that sets each of them."""
    earlier = {f"train.sequence_schedule[{i}].length": each.length for i, each in enumerate(config.length_phases[:-1])}
    return {**earlier, "data.sequence_length": config.data.sequence_length}


def _find_tensor_misfits(config: Config, world_size: int, per_node: int, vocab_size: int | None) -> Iterator[Problem]:
    """Yield every size that `parallel.tensor` must divide but does not, and other conflicts of this option."""
    model = config.model
    parallel = config.parallel
    tp = parallel.tensor
    # Each size must be a multiple of `tp`. A size is 0 if it needs no check.
    sizes: dict[str, float] = {
        "model.heads": model.heads,
        "model.kv_heads": model.num_kv_heads,
        "model.intermediate_size": model.ffn_size,
        _describe_vocabulary(config, vocab_size): vocab_size or 0,
        **(_name_sequence_lengths(config) if parallel.sequence else {}),
    }
    if config.optimizer.state.moments == "int8":
        # Each rank quantizes blocks of `INT8_BLOCK` consecutive elements, so it needs whole blocks. If a size is not a
        # multiple of `INT8_BLOCK`, the quotient is a fraction, and no multiple of `tp`.
        columns = {"model.heads × size": query_width(model), "model.intermediate_size": model.ffn_size}
        sizes |= {f"{name} / {INT8_BLOCK} (moments: int8)": size / INT8_BLOCK for name, size in columns.items()}
    for name, size in sizes.items() if model.target is None else ():
        if size % tp:
            yield Problem("parallel.indivisible_size", f"{name}, {size}, is not a multiple of parallel.tensor ({tp})")
    if config.train.compile and model.target is not None:
        yield Problem(
            "config.conflict",
            f"parallel.tensor ({tp}) cannot be combined with train.compile for a custom model, because torch fails to "
            "compile it",
        )
    if world_size > per_node and per_node % tp:
        yield Problem(
            "parallel.group_on_several_nodes",
            f"parallel.tensor ({tp}) does not divide the {per_node} ranks of a node "
            "(stages.train.tasks_per_node): tensor-parallel ranks must be on one node",
        )


def _describe_vocabulary(config: Config, size: int | None) -> str:
    """Return text that says where the vocabulary size comes from: a config key or a tokenizer file.

    Args:
        config: the run's config.
        size: number of ids of the tokenizer; None if it is unknown.
    """
    tokenizer = config.data.tokenizer
    if config.model.vocab_size is not None:
        return "model.vocab_size"
    if tokenizer.path is not None:
        return f"the vocabulary (of data.tokenizer.path {tokenizer.path})"
    is_smaller = size is not None and size < tokenizer.vocab_size
    requested = f" {tokenizer.vocab_size}: the text has fewer tokens" if is_smaller else ""
    return f"the vocabulary (data.tokenizer.vocab_size{requested})"


def _find_pipeline_misfits(config: Config, micro_batches: int) -> Iterator[Problem]:
    """Yield the requirements of the pipeline that are not met. The rules are those of torch.distributed.pipelining.

    Args:
        config: the run's config, with `parallel.pipeline` above 1.
        micro_batches: micro-batches per step on each data-parallel rank.
    """
    parallel = config.parallel
    pp = parallel.pipeline
    virtual = parallel.virtual_stages
    schedule = f"parallel.schedule {parallel.schedule}"
    actual = _describe_micro_batches(micro_batches)
    if micro_batches > _MAX_MICRO_BATCHES_IN_SCHEDULE:
        yield Problem(
            "parallel.schedule_mismatch",
            f"a pipeline schedule may have at most {_MAX_MICRO_BATCHES_IN_SCHEDULE:,} micro-batches; {actual}",
        )
    if pp * virtual > config.model.layers:
        yield Problem(
            "parallel.too_many_stages",
            f"{pp} pipeline ranks × parallel.virtual_stages ({virtual}) = {pp * virtual} pipeline-parallel stages are "
            f"more than model.layers ({config.model.layers}): each stage needs at least one layer",
        )
    if parallel.reduce == "micro_batch":
        yield Problem(
            "config.conflict",
            f"parallel.reduce micro_batch cannot be combined with a pipeline ({pp}), which reduces once per step",
        )
    for message in _describe_schedule_misfits(parallel.schedule, pp, virtual, micro_batches):
        yield Problem("parallel.schedule_mismatch", f"{schedule} needs {message}")
    if parallel.schedule in SPLIT_BACKWARD:
        conflicts = {
            "train.compile": config.train.compile,
            "optimizer.freeze (torch would lose gradients): use 1f1b or interleaved_1f1b": config.optimizer.freeze,
            "adapter (torch would lose gradients): use 1f1b or interleaved_1f1b": config.adapter is not None,
            "parallel.activation_checkpointing selective: use full or none": parallel.activation_checkpointing
            == "selective",
            "parallel.zero 3 (torch would lose gradients): use 1 or 2": parallel.zero == 3,
        }
        for option, is_set in conflicts.items():
            if is_set:
                yield Problem(
                    "config.conflict",
                    f"{schedule} computes gradients of weights separately, which cannot be combined with {option}",
                )


def _describe_micro_batches(count: int) -> str:
    """Return the number of micro-batches and its formula as text."""
    return f"there are {count} (train.global_batch / data-parallel ranks / train.micro_batch)"


def _describe_schedule_misfits(schedule: str, pp: int, virtual: int, micro_batches: int) -> Iterator[str]:
    """Yield each requirement of a schedule that the stages per rank or the micro-batches do not meet, as text.

    Args:
        schedule: value of `parallel.schedule`.
        pp: pipeline-parallel size.
        virtual: pipeline-parallel stages per rank.
        micro_batches: micro-batches per step on each data-parallel rank.
    """
    actual = _describe_micro_batches(micro_batches)
    if schedule.startswith("interleaved"):
        if virtual < 2:
            yield f"two or more stages per rank: parallel.virtual_stages must not be {virtual}"
        # torch runs the micro-batches in rounds of equal size, with about one micro-batch per pipeline rank.
        rounds = max(1, micro_batches // pp)
        if micro_batches % rounds:
            yield f"micro-batches that divide into {rounds} rounds (micro-batches // pipeline {pp}); {actual}"
    elif virtual != (required := 2 if schedule in V_SCHEDULES else 1):
        yield f"parallel.virtual_stages (stages per rank) to be {required}, not {virtual}"
    minimum = {"1f1b": pp, "dualpipe_v": 2 * pp}.get(schedule, 0)
    if micro_batches < minimum:
        yield f"at least {minimum} micro-batches with {pp} pipeline ranks; {actual}"


def _suggest_layouts(config: Config, world_size: int, per_node: int, vocab_size: int | None) -> str:
    """Return up to three layouts of `world_size` ranks that fit, the most similar first, as text.

    If no layout fits, the text says so. No suggestion splits a custom model, because only its author knows whether it
    can be split, or a model of transformers.
    """
    candidates = []
    largest_size = _MAX_SUGGESTED_SIZE if config.model.other_model_key is None else 1
    sizes = [n for n in range(1, largest_size + 1) if world_size % n == 0]
    context = config.parallel.context
    contexts = [n for n in range(1, context + 1) if context % n == 0]
    for pp, cp, tp in product(sizes, contexts, sizes):
        update = {"pipeline": pp, "context": cp, "tensor": tp, "data": "auto"}
        parallel = config.parallel.model_copy(update=update)
        if not any(_find_misfits(config.model_copy(update={"parallel": parallel}), world_size, per_node, vocab_size)):
            distance = abs(math.log(pp / config.parallel.pipeline)) + abs(math.log(tp / config.parallel.tensor))
            distance += math.log(context / cp)
            axis_sizes = _get_axis_sizes(config) | {"pp": pp, "cp": cp, "tp": tp}
            text = _describe_sizes(world_size // math.prod(axis_sizes.values()), axis_sizes)
            # Rounding lets equal distances compare as equal, so that the smaller pipeline comes first.
            candidates.append((round(distance, 6), pp, tp, text))
    if not candidates:
        return f"no layout of {world_size} ranks fits this model, batch and schedule"
    return f"layouts of {world_size} ranks that fit: {', or '.join(text for *_, text in sorted(candidates)[:3])}"


def split_layers(config: Config, stages: int, vocab_size: int) -> tuple[range, ...]:
    """Assign consecutive decoder blocks to pipeline-parallel stages, and return the blocks of each stage.

    The assignment minimizes the cost of the most expensive stage. The cost of a stage is the number of multiplications
    per token: the weights of its blocks, and attention. The last stage also has the output layer. The first stage also
    has the embedding, which is a lookup and costs only its width.

    Every stage has at least one block. Each further block goes to the stage that is cheapest so far. The assignment is
    optimal if all blocks cost the same. Blocks with and without a window count with their mean.
    """
    model = config.model
    block_cost = block_multiplications_per_token(model, config.data.sequence_length)
    extra_costs = [0] * stages
    if model.target is None:
        extra_costs[0] += model.dim
        extra_costs[-1] += model.dim * vocab_size
    # The loop below is slow for many blocks. Every stage therefore starts with blocks that the loop would give it
    # anyway: the average, minus the blocks that cost as much as the largest extra, minus 2 because both quotients are
    # rounded.
    sizes = [model.layers]
    if stages > 1:
        sizes = [max(1, model.layers // stages - max(extra_costs) // block_cost - 2)] * stages
    costs = [size * block_cost + extra for size, extra in zip(sizes, extra_costs, strict=True)]
    for _ in range(model.layers - sum(sizes)):
        cheapest = costs.index(min(costs))
        sizes[cheapest] += 1
        costs[cheapest] += block_cost
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))
