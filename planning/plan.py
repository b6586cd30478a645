"""Describe a config's layout and its consequences before anything runs: `plan CONFIG`, as text or as a page.

The text lists the mesh, memory, pipeline schedule, communication and predicted speed. `plan --html` writes a page with
figures of the memory, the schedule, the operators and the expected cost of failures (planning/goodput.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from traceback import extract_tb

from pipeline.base.errors import UserError, make_printable
from pipeline.base.files import write_atomic
from pipeline.base.html_page import Bar, draw_curves, draw_lanes, format_page
from pipeline.base.plot import Scale
from pipeline.base.yaml12 import dump_yaml
from pipeline.config.masking import mask_secrets
from pipeline.config.sections import Config
from pipeline.config.user_model import UserModel, resolve_user_model
from pipeline.data.manifest import format_training_length
from pipeline.parallel.mesh import Layout, resolve_layout
from pipeline.parallel.traffic import AxisTraffic, count_traffic
from pipeline.run.code import CODE_ROOT
from planning.goodput import (
    GoodputAssumptions,
    best_interval_s,
    collect_goodput_figures,
    effective_ratio,
    format_span,
    job_conditions,
)  # fmt: skip
from planning.machine import Machine
from planning.memory import (
    GB,
    MEMORY_KINDS,
    RankMemory,
    check_gpu_fit,
    describe_overflow,
    estimate_memory_of_ranks,
    reserved_gpu_bytes,
)  # fmt: skip
from planning.predict import StepPrediction, make_rank_model, predict_step, replay_step
from planning.search import parse_node_counts, predict_configured_layout, search_layouts, write_choice
from planning.timeline import draw_text_timeline, rank_actions
from planning.workload import Workload, matrix_shapes, workload_from_config

TIMELINE_COLUMNS = 100
"""Maximum width of the text timeline. The rest of a longer timeline is not shown."""
_RANKS_SHOWN_PER_END = 32
"""If the list of ranks is long, this number of ranks is shown at its start, and the same number at its end."""
_RESERVED = "CUDA and NCCL"
"""Name of the memory that CUDA and NCCL use, in the figure. `MEMORY_KINDS` does not contain this kind of memory."""
_MEMORY_COLOURS = {"weights": 0, "gathered": 5, "gradients": 1, "optimizer": 3, "activations": 2, _RESERVED: 6}
_ACTION_NAMES_AND_COLOURS = {
    "F": ("forward", 0), "B": ("backward", 1), "I": ("gradients of inputs", 1), "W": ("gradients of weights", 3)
}  # fmt: skip
_LIMIT_COLOUR = 4
_PRODUCT_NAMES = ("query, key, value", "attention output", "MLP in", "MLP out", "output layer")
"""Names of the matrix products of a forward pass, in the order of `matrix_shapes`."""


# ---------------------------------------------------------------------------------------------------------------- text


def vocab_size(config: Config) -> int:
    """Return the size of the vocabulary: `model.vocab_size` or, if it is not set, `data.tokenizer.vocab_size`."""
    return config.model.vocab_size or config.data.tokenizer.vocab_size


def describe_plan(config: Config, machine: Machine | None = None) -> Iterator[str]:
    """Yield the lines of the plan. Memory, communication and speed are left out for models other than the decoder.

    Args:
        config: The config.
        machine: The machine for which the speed is predicted; None for no prediction.

    Raises:
        UserError: If the memory of a GPU is not enough. It is raised after the lines about memory.
    """
    custom_model = resolve_user_model(config, [Path.cwd(), CODE_ROOT])
    layout = resolve_layout(config)
    vocab = vocab_size(config)
    zero = f", ZeRO {layout.zero} over {layout.state_shards}" if layout.zero else ""
    yield (
        f"{layout.world_size} ranks: {layout.describe_sizes()}{zero}; "
        f"{layout.micro_batches} micro-batches per step each"
    )
    batch = config.train.global_batch
    length = config.data.sequence_length
    tokens = f" of {length:,} tokens: {batch * length:,}" if custom_model is None else ""
    yield f"a step: {batch:,} samples{tokens}"
    if len(config.length_phases) > 1:
        yield f"train.sequence_schedule: all numbers are for sequences of the last length, {length:,} tokens"
    if config.train.epochs is not None:
        yield format_training_length(config, config.run.root / config.run.name / "data")
    if config.data.tokenizer.kind == "file" and config.model.vocab_size is None:
        yield f"the tokenizer's size is not known yet: assuming {vocab} ids (data.tokenizer.vocab_size)"
    yield ""
    yield from _describe_mesh(layout)
    if layout.pp > 1:
        yield ""
        yield from _describe_schedule(layout)
    yield ""
    if config.model.backend == "transformers":
        yield f"{config.model.describe()}: memory and communication are not estimated"
        yield f"parameters {_count_transformers_parameters(config):,}"
        return
    if custom_model is not None:
        yield f"{custom_model.target}: memory and communication are not estimated"
        yield f"{'pp':>5} {'parameters':>15}" + (", before tensor parallelism" if layout.tp > 1 else "")
        counts = _count_custom_parameters(config, layout, custom_model)
        yield from (f"{rank:>5} {count:>15,}" for rank, count in enumerate(counts))
        return
    yield from _describe_memory(config, layout, vocab)
    yield ""
    yield "a rank sends per step"
    traffic = list(count_traffic(config, layout, vocab)) or [AxisTraffic("-", 0, "nothing")]
    yield from (f"{group:>10} {size / GB:>9.3f} GB  {description}" for group, size, description in traffic)
    if machine is not None:
        yield ""
        yield from describe_prediction(config, layout, vocab, machine)


def _count_transformers_parameters(config: Config) -> int:
    """Return the number of parameters of a model that transformers builds, without adapters."""
    from pipeline.model.transformers_model import build_model

    return sum(parameter.numel() for parameter in build_model(config.model).parameters())


def _describe_mesh(layout: Layout) -> Iterator[str]:
    """Yield a table of ranks with their node, coordinates and blocks. A long table lacks the ranks in the middle."""
    cp_title = f" {'cp':>4}" if layout.cp > 1 else ""
    yield f"{'rank':>5} {'node':>5} {'pp':>4} {'dp':>4}{cp_title} {'tp':>4}   blocks of each stage"
    for rank in range(layout.world_size):
        if _RANKS_SHOWN_PER_END <= rank < layout.world_size - _RANKS_SHOWN_PER_END:
            if rank == _RANKS_SHOWN_PER_END:
                yield f"{'…':>5}"
            continue
        at = layout.coordinates(rank)
        blocks_of_stages = (layout.stage_layers[stage] for stage in layout.stages_on_pipeline_rank(at.pp))
        blocks = ", ".join(f"{stage_blocks.start}–{stage_blocks.stop - 1}" for stage_blocks in blocks_of_stages)
        cp = f" {at.cp:>4}" if layout.cp > 1 else ""
        yield f"{rank:>5} {rank // layout.ranks_per_node:>5} {at.pp:>4} {at.dp:>4}{cp} {at.tp:>4}   {blocks}"


def _describe_schedule(layout: Layout) -> Iterator[str]:
    """Yield the legend and the text timeline of the pipeline schedule."""
    rows = draw_text_timeline(rank_actions(layout), layout.stages)
    idle = sum(row.count("·") for row in rows) / sum(map(len, rows))
    yield f"{layout.schedule}: a digit is the forward of a micro-batch, a digit with ▒ its backward; a separate ▒ is"
    yield f"gradients of inputs, ▓ of weights; · is waiting: {100 * idle:.0f} % if all stages take equally long"
    for rank, row in enumerate(rows):
        yield f"{rank:>5} {row[:TIMELINE_COLUMNS]}{'…' if len(row) > TIMELINE_COLUMNS else ''}"


def _describe_memory(config: Config, layout: Layout, vocab: int) -> Iterator[str]:
    """Yield the memory of each pipeline rank. Raises UserError if a rank needs more than `site.gpu_memory_gib`."""
    yield "memory per rank in GB (activations are estimated; without fragmentation and libraries)"
    yield f"{'pp':>5} {'parameters':>15}" + "".join(f" {title:>11}" for title in (*MEMORY_KINDS, "sum"))
    ranks = estimate_memory_of_ranks(config, layout, vocab)
    for rank, memory in enumerate(ranks):
        sizes = [*(getattr(memory, kind) for kind in MEMORY_KINDS), memory.total]
        yield f"{rank:>5} {memory.parameters:>15,}" + "".join(f" {size / GB:>11.3f}" for size in sizes)
    if config.parallel.offload:
        yield "offload: weights, gradients and optimizer are in host memory; gathered and activations on the device"
    if config.site.gpu_memory_gib is not None:
        yield _describe_free_memory(config, layout, ranks, config.site.gpu_memory_gib)


def _describe_free_memory(config: Config, layout: Layout, ranks: Sequence[RankMemory], gib: float) -> str:
    """Return a line that says how much of a GPU's memory remains. Raises UserError if the ranks do not fit.

    Args:
        config: The config.
        layout: Its layout.
        ranks: Memory of each pipeline rank.
        gib: Memory of a GPU in GiB.
    """
    fit = check_gpu_fit(config, layout, ranks, gib)
    if not fit.fits:
        size_and_source = f"{gib:g} GiB, by --machine or site.gpu_memory_gib"
        raise UserError("plan.not_enough_memory", describe_overflow(config, fit, size_and_source))
    free = (fit.size - fit.needed - fit.reserved) / GB
    reserved = f"about {fit.reserved / GB:.1f} for CUDA and NCCL"
    return f"a GPU has {fit.size / GB:.3f} GB: {reserved}, {free:.3f} remain for fragmentation"


def describe_prediction(config: Config, layout: Layout, vocab: int, machine: Machine) -> Iterator[str]:
    """Yield the lines about the predicted speed on a machine."""
    step = predict_step(workload_from_config(config, layout, vocab), machine.with_gpus_per_node(layout.ranks_per_node))
    yield f"predicted for {machine.gpu}: {step.step:.3g} s per step, {step.tokens_per_gpu:,.0f} tokens/s per GPU,"
    total = step.tokens_per_gpu * layout.world_size
    yield f"{total:,.0f} in all; MFU {100 * step.mfu:.1f} % (full attention counted); accuracy: docs/planning.md"
    names = ("compute", "tensor", "pipeline", "data", "bubble", "optimizer")
    shares = {name: getattr(step, name) / step.step for name in names}
    shares["the slowest rank"] = 1 - sum(shares.values())  # the remainder is the wait for the slowest rank
    listed = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if share >= 5e-4)
    yield f"the step is {listed} (tensor, pipeline, data: exposed communication)"


def _count_custom_parameters(config: Config, layout: Layout, custom_model: UserModel) -> Iterator[int]:
    """Yield the number of parameters of each pipeline rank of a custom model.

    The model is built on the `meta` device, so it takes no memory. Raises UserError if the user's code fails.
    """
    import torch

    options = config.model.all_options
    for pp_rank in range(layout.pp):
        try:
            module = custom_model.load(custom_model.root.parent)
            with torch.device("meta"):
                parts = [
                    module.build(options, layout.stage_layers[stage])
                    for stage in layout.stages_on_pipeline_rank(pp_rank)
                ]
            count = sum(parameter.numel() for part in parts for parameter in part.parameters())
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # The user's code may raise anything.
            frame = extract_tb(error.__traceback__)[-1]
            message = f"{custom_model.target} fails at {frame.filename}:{frame.lineno}: {type(error).__name__}: {error}"
            raise UserError("model.build_failed", make_printable(f"model.target: {message}")) from error
        yield count


def describe_best_layouts(
    config: Config,
    machine: Machine,
    nodes: str | None,
    write: Path | None,
    overrides: list[str],
    problem: str | None = None,
) -> Iterator[str]:
    """Yield the lines of `plan --best`.

    Args:
        config: The config.
        machine: The machine for which layouts are searched.
        nodes: Numbers of nodes such as `16,2048` or `2..64`; None for the config's number.
        write: The path of the config. The best layout is written to a new file next to the config. None: nothing is
            written.
        overrides: `KEY=VALUE` of the command line, which are also written to the new file.
        problem: Why the config's own layout is invalid; None if it is valid.

    Raises:
        UserError: If the model is custom, `nodes` is invalid, no layout fits, or the new file exists already.
    """
    if (key := config.model.other_model_key) is not None:
        raise UserError("plan.unsupported_model", f"--best supports only the decoder, not {key}")
    vocab = vocab_size(config)
    configured = predict_configured_layout(config, machine, vocab) if problem is None else None
    node_counts = parse_node_counts(nodes or str(config.stages.train.max_nodes))
    rows, best = search_layouts(config, machine, vocab, node_counts, configured)
    yield f"layouts on {machine.gpu}; tokens/s per GPU, GB of the fullest GPU"
    yield from rows
    if problem is not None:
        yield f"the config's own layout is invalid: {problem}"
    if write is not None:
        yield f"written: {write_choice(best, write, overrides)}"


# ---------------------------------------------------------------------------------------------------------------- page


@dataclass(frozen=True)
class TimedAction:
    """An action of a pipeline rank, with its start and end.

    Times are in seconds if the step is predicted. Otherwise the unit is the duration of one forward pass.
    """

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class PlanFigures:
    """The data that the figures of a plan show."""

    facts: dict[str, str]
    """Names and values of the summary."""
    memory: list[dict[str, float]]
    """GB by kind, for each pipeline rank."""
    gpu_memory: float | None
    """GB of a GPU; None if unknown."""
    timeline: list[list[TimedAction]]
    """Actions of each pipeline rank in the first rounds of micro-batches of a step (`REPLAYED_ROUNDS`)."""
    step: StepPrediction | None
    """The predicted step; None without a machine."""
    operators: dict[str, tuple[float, float]]
    """FLOPs per byte of memory traffic and predicted FLOP/s of each operator of a forward pass, by name.

    Empty without a machine.
    """
    roof: tuple[float, float] | None
    """The machine's FLOP/s and its memory bandwidth in bytes per second; None without a machine."""


def compute_plan_figures(config: Config, machine: Machine | None) -> PlanFigures:
    """Return the data of the figures. The step and the operators are predicted only if a machine is given.

    Raises UserError if the model is custom, or if the machine does not support the precision.
    """
    if (key := config.model.other_model_key) is not None:
        raise UserError("plan.unsupported_model", f"--html supports only the decoder, not {key}")
    layout = resolve_layout(config)
    vocab = vocab_size(config)
    work = workload_from_config(config, layout, vocab)
    kinds: tuple[str, ...] = MEMORY_KINDS
    if config.parallel.offload:  # The other kinds are in host memory.
        kinds = ("gathered", "activations")
    gib = config.site.gpu_memory_gib
    reserved = {} if gib is None else {_RESERVED: reserved_gpu_bytes(layout) / GB}
    ranks = estimate_memory_of_ranks(config, layout, vocab)
    memory = [{kind: getattr(rank, kind) / GB for kind in kinds} | reserved for rank in ranks]
    fullest = max(sum(parts.values()) for parts in memory)
    gpu_memory = None if gib is None else gib * 2**30 / GB
    verdict = ""
    if gpu_memory is not None:
        verdict = f" of {gpu_memory:.1f} GB: {'fits' if fullest <= gpu_memory else 'does not fit'}"
    batch = config.train.global_batch
    facts = {
        "ranks": f"{layout.world_size:,}",
        "global batch": f"{batch:,} sequences, {batch * config.data.sequence_length:,} tokens",
        "layout": layout.describe_sizes(),
        "fullest rank": f"{fullest:.1f} GB{verdict}",
    }
    step = None
    operators: dict[str, tuple[float, float]] = {}
    roof = None
    # Without a prediction, a backward pass takes twice as long as a forward pass.
    forward = (1.0,) * len(work.stages)
    backward = (2.0,) * len(work.stages)
    if machine is not None:
        machine = machine.with_gpus_per_node(layout.ranks_per_node)
        step = predict_step(work, machine)
        forward = step.forward
        backward = step.backward
        speed = f"{step.step:.3g} s, {step.tokens_per_gpu:,.0f} tokens/s per GPU, MFU {100 * step.mfu:.1f} %"
        facts |= {"machine": machine.gpu, "step": speed}
        operators = _compute_operators(work, machine)
        roof = (machine.rate(work.precision), machine.bandwidth)
    timeline = _compute_timeline(work, forward, backward)
    return PlanFigures(facts, memory, gpu_memory, timeline, step, operators, roof)


def _compute_timeline(
    work: Workload, forward: tuple[float, ...], backward: tuple[float, ...]
) -> list[list[TimedAction]]:
    """Return the actions of each pipeline rank in the first rounds of micro-batches of a step (`REPLAYED_ROUNDS`).

    Args:
        work: The workload.
        forward: Duration of a micro-batch's forward pass, by stage.
        backward: Duration of its backward pass, by stage.
    """
    actions_of_ranks, duration, _ = replay_step(
        work.schedule, work.pipeline, work.virtual_stages, work.micro_batches, forward, backward
    )
    return [
        [TimedAction(*action, start, start + duration(action)) for action, start in actions]
        for actions in actions_of_ranks
    ]


def _compute_operators(work: Workload, machine: Machine) -> dict[str, tuple[float, float]]:
    """Return FLOPs per byte of memory traffic and predicted FLOP/s of each operator of a forward pass."""
    rank = make_rank_model(work, machine)
    value_bytes = 4 if work.precision == "fp32" else 2
    operators = {}
    forward_shapes = matrix_shapes(work)[::3]  # Each forward product is followed by two products of its backward pass.
    for name, (m, n, k) in zip(_PRODUCT_NAMES, forward_shapes, strict=True):
        traffic: float = value_bytes * (m * k + k * n + m * n)
        flops: float = 2 * m * n * k
        operators[name] = flops / traffic, flops / rank.product_time(m, n, k, work.precision)
    # The causal mask leaves half of the 4 FLOPs per score and channel.
    flops = 2 * rank.tokens * work.sequence * work.heads * work.head / work.tensor
    # Attention reads queries, keys and values, and writes an output of the size of the queries.
    traffic = value_bytes * 2 * rank.tokens * (work.heads + work.kv_heads) * work.head / work.tensor
    operators["attention"] = flops / traffic, flops / rank.attention_time()
    return operators


def draw_memory(ranks: Sequence[Mapping[str, float]], gpu_memory: float | None) -> str:
    """Draw the memory of each pipeline rank by kind, and the memory of a GPU as a limit.

    Args:
        ranks: GB by kind of each rank.
        gpu_memory: GB of a GPU; None if unknown.
    """
    limit = gpu_memory or 0.0
    totals = (sum(gb_by_kind.values()) for gb_by_kind in ranks)
    x = Scale.from_values([0.0, limit, *totals], "GB of one GPU, activations estimated").extend_to_round_numbers()
    limit_width = x.high / 400
    limit_bars = [Bar(limit - limit_width, limit, _LIMIT_COLOUR, f"a GPU has {limit:.1f} GB")] if limit else []
    lanes = []
    for rank, gb_by_kind in enumerate(ranks):
        starts_and_ends = pairwise(accumulate(gb_by_kind.values(), initial=0.0))
        bars = [
            Bar(start, end, _MEMORY_COLOURS[kind], f"{kind} {end - start:.3g} GB")
            for kind, (start, end) in zip(gb_by_kind, starts_and_ends, strict=True)
        ]
        lanes.append((f"pipeline {rank}", bars + limit_bars))
    kinds = {kind for gb_by_kind in ranks for kind, size in gb_by_kind.items() if size}
    legend = [(kind, colour) for kind, colour in _MEMORY_COLOURS.items() if kind in kinds]
    return draw_lanes("Memory", x, lanes, legend + [(bar.title, bar.colour) for bar in limit_bars])


def draw_schedule(timeline: Sequence[Sequence[TimedAction]], is_predicted: bool) -> str:
    """Draw the actions of each pipeline rank over time.

    Args:
        timeline: Actions of each rank.
        is_predicted: Whether times are in seconds. Otherwise the unit is the duration of one forward pass.
    """
    scale, unit = (1e3, "milliseconds from the first forward") if is_predicted else (1.0, "durations of a forward")
    x = Scale(0, scale * max(action.end for actions in timeline for action in actions), unit)
    lanes = []
    for rank, actions in enumerate(timeline):
        bars = []
        for action in actions:
            start = scale * action.start
            end = scale * action.end
            name, colour = _ACTION_NAMES_AND_COLOURS[action.kind]
            title = f"{name} of micro-batch {action.micro_batch}, stage {action.stage}: {end - start:.3g}"
            is_wide_enough_for_text = end - start > x.high / 80
            text = f"{action.micro_batch}" if is_wide_enough_for_text else ""
            gap = x.high / 800
            bars.append(Bar(start, end - gap, colour, title, text))
        lanes.append((f"pipeline {rank}", bars))
    kinds = {action.kind for actions in timeline for action in actions}
    legend = [name_and_colour for kind, name_and_colour in _ACTION_NAMES_AND_COLOURS.items() if kind in kinds]
    min_width_rem = min(75, 10 + 3 * max(len(actions) for actions in timeline) // 2)
    return draw_lanes("Micro-batches", x, lanes, legend, min_width_rem=min_width_rem)


def draw_roofline(operators: Mapping[str, tuple[float, float]], roof: tuple[float, float]) -> str:
    """Draw the operators below the machine's roofline (Williams, Waterman and Patterson 2009).

    Args:
        operators: FLOPs per byte of memory traffic and FLOP/s of each operator, by name.
        roof: The machine's FLOP/s and its memory bandwidth in bytes per second.
    """
    rate, bandwidth = roof
    ridge = rate / bandwidth
    intensities = [intensity for intensity, _ in operators.values()]
    limit_intensities = min(ridge / 100, *intensities), ridge, max(ridge * 10, *intensities)
    limit = [(intensity, min(rate, intensity * bandwidth) / 1e12) for intensity in limit_intensities]
    points = {"limit of the machine": limit}
    points |= {name: [(intensity, flops / 1e12)] for name, (intensity, flops) in operators.items()}
    return draw_curves("Operators of a forward", "FLOPs per byte of memory traffic", "TFLOP/s", points, log="xy")


def draw_effective_time(config: Config, configured_interval_s: float) -> list[str]:
    """Draw the effective training time over the number of GPUs, and over the checkpoint interval.

    Args:
        config: The config.
        configured_interval_s: Seconds between two checkpoints of the config; 0 if unknown.
    """
    assumptions = GoodputAssumptions()
    inputs = collect_goodput_figures(config, {}, assumptions)
    train = config.stages.train
    node_counts = [train.max_nodes * 4**power for power in range(8)]
    jobs = {count * train.tasks_per_node: job_conditions(inputs, assumptions, count) for count in node_counts}
    ratios_at_best = [(gpus, 100 * effective_ratio(job, best_interval_s(job))) for gpus, job in jobs.items()]
    minutes = [1.25**power for power in range(31)]  # 1 minute to 13 hours
    x = "minutes of work between two saves"
    marks = []
    if configured_interval_s > 0:
        x += f" (config: {format_span(configured_interval_s)})"
        marks.append(configured_interval_s / 60)
    y = "effective training time, %"
    by_gpus = {
        f"{gpus:,} GPUs": [(minute, 100 * effective_ratio(jobs[gpus], 60 * minute)) for minute in minutes]
        for gpus in [*jobs][::2]  # Every second number keeps the figure readable.
    }
    return [
        draw_curves("Effective time at the best interval", "GPUs", y, {"": ratios_at_best}, log="x"),
        draw_curves("Effective time by interval", x, y, by_gpus, log="x", marks=marks),
    ]


def check_page_path(file: Path) -> None:
    """Raise UserError if a page cannot be written to `file`."""
    if file.suffix != ".html" or not file.parent.is_dir():
        raise UserError("plan.html_path", f"--html {file}: name a file that ends in .html, in an existing folder")


def write_plan_page(config: Config, figures: PlanFigures, title: str, file: Path) -> None:
    """Write the plan as a page of figures."""
    sections = {
        "Memory": [draw_memory(figures.memory, figures.gpu_memory)],
        "Schedule": [draw_schedule(figures.timeline, is_predicted=figures.step is not None)],
    }
    if figures.roof is not None:
        sections["Operators"] = [draw_roofline(figures.operators, figures.roof)]
    step_s = figures.step.step if figures.step is not None else 0.0
    sections["Failures"] = draw_effective_time(config, config.checkpoint.every_steps * step_s)
    notes = ["Accuracy of the predictions: docs/planning.md. `plan --goodput` prints the inputs of the last figures."]
    text = dump_yaml(mask_secrets(config.model_dump(mode="json", exclude_defaults=True)))
    write_atomic(file, format_page(config.run.name, title, figures.facts, sections, notes, text))
