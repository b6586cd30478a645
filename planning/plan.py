"""What the pictures of a plan show, as plain values: memory, the schedule with its durations, operators, the step.

`plan --html` asks for them in a child, for schedules may need torch; planning/plan.py draws.

`plan CONFIG`: what a layout means, before anything runs: mesh, memory, pipeline, communication, speed.

`plan CONFIG --html FILE`: the plan as one page of pictures. A child computes (planning/plan.py).

Effective time is the closed form of planning/goodput.py, with the figures that `plan --goodput` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from traceback import extract_tb
from typing import Any

from pipeline.base.errors import UserError, make_printable
from pipeline.base.files import write_atomic
from pipeline.base.html_page import Bar, draw_curves, draw_lanes, format_page
from pipeline.base.plot import Scale
from pipeline.base.yaml12 import dump_yaml
from pipeline.config.masking import mask_secrets
from pipeline.config.read import parse_config
from pipeline.config.sections import Config
from pipeline.config.user_model import UserModel, resolve_user_model
from pipeline.data.manifest import steps_words
from pipeline.parallel.mesh import Layout, resolve_layout
from pipeline.parallel.traffic import count_traffic
from pipeline.run.code import CODE_ROOT
from planning.goodput import best_interval_s, collect_goodput_figures, effective_ratio, format_span, job_conditions
from planning.machine import Machine
from planning.memory import (
    GB,
    MEMORY_KINDS,
    RankMemory,
    check_gpu_fit,
    describe_overflow,
    estimate_memory_of_ranks,
    reserved_gpu_bytes,
)
from planning.predict import make_rank_model, predict_step, replay_step
from planning.search import parse_node_counts, predict_own_layout, search_layouts, write_choice
from planning.timeline import draw_text_timeline, rank_actions
from planning.workload import Workload, matrix_shapes, workload_from_config

_PRODUCTS = ("query, key, value", "attention's output", "MLP in", "MLP out", "output layer")


def compute_plan_figures(config: Config, machine: Machine | None) -> dict[str, Any]:
    """By picture; those of speed where there is a machine. Raises UserError for a model of one's own."""
    if config.model.target is not None:
        raise UserError("--html is for the decoder, whose sizes it knows; not for model.target")
    layout, vocab = resolve_layout(config), config.model.vocab_size or config.data.tokenizer.vocab_size
    work = workload_from_config(config, layout, vocab)
    kinds = ["gathered", "activations"]
    if not config.parallel.offload:  # else these are in host memory
        kinds = ["weights", "gathered", "gradients", "optimizer", "activations"]
    size = config.site.gpu_memory_gib
    own = {} if size is None else {"CUDA and NCCL": reserved_gpu_bytes(layout) / GB}
    parts = [
        {kind: getattr(held, kind) / GB for kind in kinds} | own
        for held in estimate_memory_of_ranks(config, layout, vocab)
    ]
    found: dict[str, Any] = {
        "config": config.model_dump(mode="json", exclude_defaults=True),
        "words": {
            "layout": layout.describe_sizes(),
            "fullest rank": f"{max(sum(part.values()) for part in parts):.1f} GB",
        },
        "memory": parts,
        "limit": None if size is None else size * 2**30 / GB,
    }
    forward, backward = (1.0,) * len(work.stages), (2.0,) * len(work.stages)
    if machine is not None:
        machine = machine.in_nodes_of(layout.ranks_per_node)
        step = predict_step(work, machine)
        forward, backward = step.forward, step.backward
        speed = f"{step.step:.3g} s, {step.tokens_per_gpu:,.0f} tokens/s of a GPU, MFU {100 * step.mfu:.1f} %"
        found["words"] |= {"machine": machine.gpu, "a step": speed}
        found |= {"step": asdict(step), "operators": _operators(work, machine)}
        found |= {"roof": [machine.rate(work.precision), machine.bandwidth]}
    return found | {"timeline": _timeline(work, forward, backward)}


def _timeline(work: Workload, forward: tuple[float, ...], backward: tuple[float, ...]) -> list[list[list[Any]]]:
    """By pipeline rank: kind, stage, micro-batch, start and end of each action of the first rounds."""
    done, duration, _ = replay_step(
        work.schedule, work.pipeline, work.virtual_stages, work.micro_batches, forward, backward
    )
    return [[[*action, start, start + duration(action)] for action, start in made] for made in done]


def _operators(work: Workload, machine: Machine) -> dict[str, tuple[float, float]]:
    """FLOPs per byte of memory traffic, and predicted FLOP/s, of operators of a forward."""
    rank, width = make_rank_model(work, machine), 4 if work.precision == "fp32" else 2
    found = {}
    for name, (m, n, k) in zip(_PRODUCTS, matrix_shapes(work)[::3], strict=True):
        size = width * (m * k + k * n + m * n)
        found[name] = 2 * m * n * k / size, 2 * m * n * k / rank.product(m, n, k, work.precision)
    done = 2 * rank.tokens * work.sequence * work.heads * work.head / work.tensor
    moved = width * 2 * rank.tokens * (work.heads + work.kv_heads) * work.head / work.tensor
    found["attention"] = done / moved, done / rank.attention()
    return found


COLUMNS = 100
"""Width of the timeline's picture; a longer one is cut."""
_SHOWN = 32
"""So many of the first ranks, and of the last ones, have a line."""


def _own_parameters(config: Config, layout: Layout, facts: UserModel) -> Iterator[int]:
    """Values of each pipeline rank's stages of a model of the user's own, which is built without memory."""
    import torch

    options = config.model.all_options
    for rank in range(layout.pp):
        try:
            module = facts.load(facts.root.parent)
            with torch.device("meta"):
                parts = [module.build(options, layout.stage_layers[stage]) for stage in layout.stages_on_rank(rank)]
            count = sum(parameter.numel() for part in parts for parameter in part.parameters())
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # it is anybody's code
            at = extract_tb(error.__traceback__)[-1]
            told = f"{facts.target} fails at {at.filename}:{at.lineno}: {type(error).__name__}: {error}"
            raise UserError(make_printable(f"model.target: {told}")) from error
        yield count


def _room(config: Config, layout: Layout, ranks: Sequence[RankMemory]) -> str:
    """What is left of a GPU, in words. Raises UserError where it is nothing."""
    gib = config.site.gpu_memory_gib or 0
    fit = check_gpu_fit(config, layout, ranks, gib)
    if not fit.fits:
        raise UserError(describe_overflow(config, fit, f"{gib:g} GiB, by --machine or site.gpu_memory_gib"))
    left = (fit.size - fit.needed - fit.reserved) / GB
    own = f"some {fit.reserved / GB:.1f} for CUDA and NCCL"
    return f"a GPU has {fit.size / GB:.3f} GB: {own}, {left:.3f} are left for fragmentation"


def describe_prediction(config: Config, layout: Layout, vocab: int, machine: Machine) -> Iterator[str]:
    """What a step takes on a machine."""
    found = predict_step(workload_from_config(config, layout, vocab), machine.in_nodes_of(layout.ranks_per_node))
    yield f"predicted for {machine.gpu}: a step in {found.step:.3g} s, {found.tokens_per_gpu:,.0f} tokens/s of a GPU,"
    whole = found.tokens_per_gpu * layout.world_size
    yield f"{whole:,.0f} of all; MFU {100 * found.mfu:.1f} % (attention counted whole); how well: docs/planning.md"
    names = ("compute", "tensor", "pipeline", "data", "bubble", "optimizer")
    shares = {name: getattr(found, name) / found.step for name in names}
    shares["the slowest rank"] = 1 - sum(shares.values())
    words = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if share >= 5e-4)
    yield f"of the step {words} (tensor, pipeline, data: communication that nothing hides)"


def describe_best_layouts(
    config: Config, machine: Machine, nodes: str | None, write: Path | None, said: list[str], problem: str | None = None
) -> Iterator[str]:
    """The lines of `--best`; `write`: the config beside which the first is written, with the overrides `said`.

    `problem`: why the config's own layout cannot work; None if it can.
    """
    if config.model.target is not None:
        raise UserError("--best is for the decoder, whose sizes it knows; not for model.target")
    vocab = config.model.vocab_size or config.data.tokenizer.vocab_size
    own = predict_own_layout(config, machine, vocab) if problem is None else None
    lines, first = search_layouts(
        config, machine, vocab, parse_node_counts(nodes or str(config.stages.train.max_nodes)), own
    )
    yield f"layouts on {machine.gpu}; tokens/s are of one GPU, GB of its fullest"
    yield from lines
    if problem is not None:
        yield f"the config's own layout cannot work: {problem}"
    if write is not None:
        yield f"written: {write_choice(first, write, said)}"


def describe_plan(config: Config, machine: Machine | None = None) -> Iterator[str]:
    """The lines of the plan. Raises UserError, after the memory, where that is more than `site.gpu_memory_gib`."""
    facts = resolve_user_model(config, [Path.cwd(), CODE_ROOT])
    layout, vocab = resolve_layout(config), config.model.vocab_size or config.data.tokenizer.vocab_size
    zero = f", ZeRO {layout.zero} over {layout.dp_shard}" if layout.zero else ""
    yield (
        f"{layout.world_size} ranks: {layout.describe_sizes()}{zero}; "
        f"{layout.micro_batches} micro-batches of a step each"
    )
    batch, length = config.train.global_batch, config.data.sequence_length
    yield f"a step: {batch:,} samples" + (f" of {length:,} tokens: {batch * length:,}" if facts is None else "")
    if config.train.epochs is not None:
        yield steps_words(config, config.run.root / config.run.name / "data")
    if config.data.tokenizer.kind == "file" and config.model.vocab_size is None:
        yield f"the tokenizer's size is not known yet: {vocab} ids are assumed (data.tokenizer.vocab_size)"
    yield ""
    yield f"{'rank':>5} {'node':>5} {'pp':>4} {'dp':>4} {'tp':>4}   stages and blocks"
    for rank in range(layout.world_size):
        if _SHOWN <= rank < layout.world_size - _SHOWN:
            if rank == _SHOWN:
                yield f"{'…':>5}"
            continue
        at = layout.coordinates(rank)
        blocks = (layout.stage_layers[stage] for stage in layout.stages_on_rank(at.pp))
        words = ", ".join(f"{part.start}–{part.stop - 1}" for part in blocks)
        yield f"{rank:>5} {rank // layout.ranks_per_node:>5} {at.pp:>4} {at.dp:>4} {at.tp:>4}   {words}"
    orders = rank_actions(layout)
    if layout.pp > 1:
        rows = draw_text_timeline(orders, layout.stages)
        idle = sum(row.count("·") for row in rows) / sum(map(len, rows))
        yield ""
        yield f"{layout.schedule}: a digit is a micro-batch's forward, digit and ▒ its backward; ▒ and ▓ apart are its"
        yield f"gradients of inputs and of weights; · is waiting, {100 * idle:.0f} % if all stages take the same time"
        yield from (f"{rank:>5} {row[:COLUMNS]}{'…' if len(row) > COLUMNS else ''}" for rank, row in enumerate(rows))
    if facts is not None:
        yield ""
        yield f"{facts.target}: memory and communication are not estimated"
        yield f"{'pp':>5} {'parameters':>15}" + (", before tensor parallelism cuts them" if layout.tp > 1 else "")
        yield from (f"{rank:>5} {count:>15,}" for rank, count in enumerate(_own_parameters(config, layout, facts)))
        return
    yield ""
    yield "memory of a rank in GB (activations are an estimate; without fragmentation and the libraries' own)"
    yield f"{'pp':>5} {'parameters':>15}" + "".join(f" {head:>11}" for head in (*MEMORY_KINDS, "sum"))
    found = estimate_memory_of_ranks(config, layout, vocab)
    for rank, part in enumerate(found):
        sizes = [*(getattr(part, kind) for kind in MEMORY_KINDS), part.total]
        yield f"{rank:>5} {part.parameters:>15,}" + "".join(f" {size / GB:>11.3f}" for size in sizes)
    if config.parallel.offload:
        yield "offload: weights, gradients and optimizer are in host memory; gathered and activations on the device"
    if config.site.gpu_memory_gib is not None:
        yield _room(config, layout, found)
    yield ""
    yield "a rank sends in a step"
    sent = list(count_traffic(config, layout, vocab))
    yield from (f"{group:>10} {size / GB:>9.3f} GB  {words}" for group, size, words in sent or [("-", 0, "nothing")])
    if machine is not None:
        yield ""
        yield from describe_prediction(config, layout, vocab, machine)


_PARTS = {"weights": 0, "gathered": 5, "gradients": 1, "optimizer": 3, "activations": 2, "CUDA and NCCL": 6}
_KINDS = {"F": ("forward", 0), "B": ("backward", 1), "I": ("gradients of inputs", 1), "W": ("gradients of weights", 3)}
_LIMIT = 4
"""Colours."""


def draw_memory(found: Mapping[str, Any]) -> str:
    """Bars of each pipeline rank's parts, and the line that they may not cross."""
    limit, ranks, rows = found["limit"] or 0.0, found["memory"], []
    x = Scale.over([0.0, limit, *(sum(p.values()) for p in ranks)], "GB of one GPU, activations estimated").rounded()
    line = [Bar(limit - x.high / 400, limit, _LIMIT, f"a GPU has {limit:.1f} GB")] if limit else []
    for rank, parts in enumerate(ranks):
        ends = pairwise(accumulate(parts.values(), initial=0.0))
        bars = [Bar(a, b, _PARTS[p], f"{p} {b - a:.3g} GB") for p, (a, b) in zip(parts, ends, strict=True)]
        rows.append((f"pipeline {rank}", bars + line))
    keys = [(name, colour) for name, colour in _PARTS.items() if any(parts.get(name) for parts in ranks)]
    return draw_lanes("Memory", x, rows, keys + [(bar.title, bar.colour) for bar in line])


def draw_schedule(found: Mapping[str, Any]) -> str:
    """What each pipeline rank does when."""
    scale, unit = (1e3, "milliseconds from the first forward") if "step" in found else (1.0, "times of a forward")
    x = Scale(0, scale * max(box[-1] for made in found["timeline"] for box in made), unit)
    rows: dict[str, list[Bar]] = {}
    for rank, made in enumerate(found["timeline"]):
        for kind, stage, micro, *ends in made:
            start, end = (scale * at for at in ends)
            title = f"{_KINDS[kind][0]} of micro-batch {micro}, stage {stage}: {end - start:.3g}"
            bar = Bar(start, end - x.high / 800, _KINDS[kind][1], title, f"{micro}" * (end - start > x.high / 80))
            rows.setdefault(f"pipeline {rank}", []).append(bar)
    kinds = {box[0] for made in found["timeline"] for box in made}
    keys, rem = (
        [key for kind, key in _KINDS.items() if kind in kinds],
        min(75, 10 + 3 * max(map(len, rows.values())) // 2),
    )
    return draw_lanes("Micro-batches", x, [*rows.items()], keys, min_width_rem=rem)


def draw_roofline(found: Mapping[str, Any]) -> str:
    """A roofline (Williams, Waterman and Patterson 2009)."""
    (rate, bandwidth), points = found["roof"], found["operators"]
    ridge, at = rate / bandwidth, [intensity for intensity, _ in points.values()]
    ends = min(ridge / 100, *at), ridge, max(ridge * 10, *at)
    named = {"what the machine can": [(at, min(rate, at * bandwidth) / 1e12) for at in ends]}
    named |= {name: [(at, done / 1e12)] for name, (at, done) in points.items()}
    return draw_curves("Operators of a forward", "FLOPs per byte of memory traffic", "TFLOP/s", named, log="xy")


def draw_failures(config: Config, every_s: float) -> list[str]:
    """Effective time over GPUs, and over the checkpoint interval; `every_s`: the config's own, 0 where not known."""
    figures, train, percent = collect_goodput_figures(config, {}), config.stages.train, "effective training time, %"
    counts = [train.max_nodes * 4**power for power in range(8)]
    jobs = {count * train.tasks_per_node: job_conditions(config, figures, count) for count in counts}
    best = [(gpus, 100 * effective_ratio(job, best_interval_s(job))) for gpus, job in jobs.items()]
    minutes, marks = [1.25**power for power in range(31)], [every_s / 60] * (every_s > 0)
    between = "minutes of work between two saves" + f" (config: {format_span(every_s)})" * bool(marks)
    named = {f"{n:,} GPUs": [(at, 100 * effective_ratio(jobs[n], 60 * at)) for at in minutes] for n in [*jobs][::2]}
    return [
        draw_curves("What failures leave, saving as often as is best", "GPUs", percent, {"": best}, log="x"),
        draw_curves("What failures leave, by interval", between, percent, named, log="x", marks=marks),
    ]


def check_page_path(file: Path) -> None:
    """Raise UserError if `file` does not name a page in an existing folder."""
    if file.suffix != ".html" or not file.parent.is_dir():
        raise UserError(
            "plan.html_path", f"--html {file}: the name must end in .html, and its folder {file.parent} must exist"
        )


def write_plan_page(found: Mapping[str, Any], title: str, file: Path) -> None:
    """Write the plan with charts as one HTML page; `found`: the values of `compute_plan_figures`."""
    made, step = parse_config(found["config"], "plan --html"), found.get("step")
    batch, most = made.train.global_batch, max(sum(parts.values()) for parts in found["memory"])
    batch_words = f"{batch:,} sequences, {batch * made.data.sequence_length:,} tokens"
    words = {"ranks": f"{resolve_layout(made).world_size:,}", "global batch": batch_words} | found["words"]
    if limit := found["limit"]:
        words["fullest rank"] += f" of {limit:.1f} GB: {'fits' if most <= limit else 'does not fit'}"
    drawn = {"Memory": [draw_memory(found)], "The schedule": [draw_schedule(found)]}
    if step:
        drawn["Operators"] = [draw_roofline(found)]
    drawn["Failures"] = draw_failures(made, made.checkpoint.every_steps * step["step"] if step else 0.0)
    told = ["How well this is predicted: docs/planning.md; failures and saves: plan --goodput has figures and sources."]
    write_atomic(file, format_page(made.run.name, title, words, drawn, told, dump_yaml(mask_secrets(found["config"]))))
