"""`plan CONFIG --html FILE`: the plan as one page of pictures. A child computes (planning/figures.py).

Effective time is the closed form of planning/goodput.py, with the figures that `plan --goodput` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from pipeline.base.errors import UserError
from pipeline.base.files import read_json, write_atomic
from pipeline.base.plot import Scale
from pipeline.base.yaml12 import dump
from pipeline.config.masking import masked
from pipeline.config.read import config_from_mapping
from pipeline.config.sections import Config
from pipeline.parallel.mesh import resolve_layout
from planning.expected_goodput import conditions, known, span
from planning.goodput import best_interval_s, effective_ratio
from tracking.figures import Bar, curves, lanes
from tracking.html_page import page

_PARTS = {"weights": 0, "gathered": 5, "gradients": 1, "optimizer": 3, "activations": 2, "CUDA and NCCL": 6}
_KINDS = {"F": ("forward", 0), "B": ("backward", 1), "I": ("gradients of inputs", 1), "W": ("gradients of weights", 3)}
_LIMIT = 4
"""Colours."""


def of_memory(found: Mapping[str, Any]) -> str:
    """Bars of each pipeline rank's parts, and the line that they may not cross."""
    limit, ranks, rows = found["limit"] or 0.0, found["memory"], []
    x = Scale.over([0.0, limit, *(sum(p.values()) for p in ranks)], "GB of one GPU, activations estimated").rounded()
    line = [Bar(limit - x.high / 400, limit, _LIMIT, f"a GPU has {limit:.1f} GB")] if limit else []
    for rank, parts in enumerate(ranks):
        ends = pairwise(accumulate(parts.values(), initial=0.0))
        bars = [Bar(a, b, _PARTS[p], f"{p} {b - a:.3g} GB") for p, (a, b) in zip(parts, ends, strict=True)]
        rows.append((f"pipeline {rank}", bars + line))
    keys = [(name, colour) for name, colour in _PARTS.items() if any(parts.get(name) for parts in ranks)]
    return lanes("Memory", x, rows, keys + [(bar.title, bar.colour) for bar in line])


def of_schedule(found: Mapping[str, Any]) -> str:
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
    return lanes("Micro-batches", x, [*rows.items()], keys, rem=rem)


def of_operators(found: Mapping[str, Any]) -> str:
    """A roofline (Williams, Waterman and Patterson 2009)."""
    (rate, bandwidth), points = found["roof"], found["operators"]
    ridge, at = rate / bandwidth, [intensity for intensity, _ in points.values()]
    ends = min(ridge / 100, *at), ridge, max(ridge * 10, *at)
    named = {"what the machine can": [(at, min(rate, at * bandwidth) / 1e12) for at in ends]}
    named |= {name: [(at, done / 1e12)] for name, (at, done) in points.items()}
    return curves("Operators of a forward", "FLOPs per byte of memory traffic", "TFLOP/s", named, log="xy")


def of_failures(config: Config, every_s: float) -> list[str]:
    """Effective time over GPUs, and over the checkpoint interval; `every_s`: the config's own, 0 where not known."""
    figures, train, percent = known(config, {}), config.stages.train, "effective training time, %"
    counts = [train.most_nodes * 4**power for power in range(8)]
    jobs = {count * train.tasks_per_node: conditions(config, figures, count) for count in counts}
    best = [(gpus, 100 * effective_ratio(job, best_interval_s(job))) for gpus, job in jobs.items()]
    minutes, marks = [1.25**power for power in range(31)], [every_s / 60] * (every_s > 0)
    between = "minutes of work between two saves" + f" (config: {span(every_s)})" * bool(marks)
    named = {f"{n:,} GPUs": [(at, 100 * effective_ratio(jobs[n], 60 * at)) for at in minutes] for n in [*jobs][::2]}
    return [
        curves("What failures leave, saving as often as is best", "GPUs", percent, {"": best}, log="x"),
        curves("What failures leave, by interval", between, percent, named, log="x", marks=marks),
    ]


def print_plan(start: Callable[[str], typer.Exit], title: str, file: Path) -> typer.Exit:
    """Print the plan, as without --html, and write its page; also where memory does not suffice.

    `start` the child that plans, with one more option. Raises UserError for a file that is no page.
    """
    if file.suffix != ".html" or not file.parent.is_dir():
        raise UserError(f"--html {file}: name a file that ends in .html, in a folder that exists")
    with TemporaryDirectory() as folder:
        values = Path(folder, "figures.json")
        left = start(f"--figures={values}")
        if not values.exists():
            return left
        found = read_json(values)
    made, step = config_from_mapping(found["config"], "plan --html"), found.get("step")
    batch, most = made.train.global_batch, max(sum(parts.values()) for parts in found["memory"])
    batch_words = f"{batch:,} sequences, {batch * made.data.sequence_length:,} tokens"
    found["words"] = {"ranks": f"{resolve_layout(made).world_size:,}", "global batch": batch_words} | found["words"]
    if limit := found["limit"]:
        found["words"]["fullest rank"] += f" of {limit:.1f} GB: {'fits' if most <= limit else 'does not fit'}"
    drawn = {"Memory": [of_memory(found)], "The schedule": [of_schedule(found)]}
    if step:
        drawn["Operators"] = [of_operators(found)]
    drawn["Failures"] = of_failures(made, made.checkpoint.every_steps * step["step"] if step else 0.0)
    told = ["How well this is predicted: docs/planning.md; failures and saves: plan --goodput has figures and sources."]
    write_atomic(file, page(made.run.name, title, found["words"], drawn, told, dump(masked(found["config"]))))
    print(f"with pictures: {file}", flush=True)
    return left
