"""`plan CONFIG --html FILE`: the plan as one page of pictures. A child computes (pipeline/planning/figures.py).

Effective time is the closed form of pipeline/planning/goodput.py, with the figures that `plan --goodput` prints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from pipeline.planning.goodput import best_interval_s, effective_ratio
from slurm.page.page import page
from slurm.page.pictures import Bar, curves, lanes
from slurm.show.expected import conditions, known, span
from slurm.submit.children import child

_PARTS = {"weights": 0, "gathered": 5, "gradients": 1, "optimizer": 3, "activations": 2}
_STEP = {"compute": 2, "tensor": 0, "pipeline": 5, "data": 3, "bubble": 6, "optimizer": 1, "slowest rank": 7}
_KINDS = {"F": ("forward", 0), "B": ("backward", 1), "I": ("gradients of inputs", 1), "W": ("gradients of weights", 3)}
_LIMIT = 4
_WIDE = 0.05
"""Of a picture's width: what words need."""


def of_memory(found: Mapping[str, Any]) -> str:
    """Bars of each pipeline rank's parts, and the line that they may not cross."""
    limit, rows = found["limit"], []
    sums = [sum(parts.values()) for parts in found["memory"]]
    x = Scale.over([0.0, *sums, limit or 0.0], "GB of one GPU, activations estimated").rounded()
    for rank, parts in enumerate(found["memory"]):
        at, bars = 0.0, []
        for name, size in parts.items():
            bars.append(
                Bar(at, at + size, _PARTS[name], f"{name} {size:.3f} GB", f"{size:.3g}" * (size > _WIDE * x.high))
            )
            at += size
        if limit:
            bars.append(Bar(limit - x.high / 400, limit, _LIMIT, f"a GPU has {limit:.1f} GB"))
        rows.append((f"pipeline {rank}", bars))
    keys = [(name, colour) for name, colour in _PARTS.items() if any(parts[name] for parts in found["memory"])]
    return lanes("Memory", x, rows, [*keys, *([(f"a GPU has {limit:.1f} GB", _LIMIT)] if limit else [])])


def of_schedule(found: Mapping[str, Any]) -> str:
    """What each pipeline rank does when."""
    scale, unit = (1e3, "milliseconds from the first forward") if "step" in found else (1, "times of a forward")
    x = Scale(0, scale * max(box[-1] for made in found["timeline"] for box in made), unit)
    rows = []
    for rank, made in enumerate(found["timeline"]):
        bars = []
        for kind, stage, micro, start, end in made:
            title = f"{_KINDS[kind][0]} of micro-batch {micro}, stage {stage}: {scale * (end - start):.3g}"
            words = f"{micro}" * (scale * (end - start) > _WIDE / 4 * x.high)
            bars.append(Bar(scale * start, scale * end - x.high / 800, _KINDS[kind][1], title, words))
        rows.append((f"pipeline {rank}", bars))
    kinds = {box[0] for made in found["timeline"] for box in made}
    rem = min(75, 10 + max(len(made) for made in found["timeline"]))
    return lanes("Micro-batches", x, rows, [key for kind, key in _KINDS.items() if kind in kinds], rem=rem)


def of_step(found: Mapping[str, Any]) -> str:
    """Where a step goes."""
    at, bars, step = 0.0, [], found["step"]
    parts = {name: step.get(name, 0.0) for name in _STEP}
    parts["slowest rank"] = max(0.0, step["step"] - sum(parts.values()))
    for name, seconds in parts.items():
        share = f"{100 * seconds / step['step']:.0f} %"
        bars.append(Bar(at, at + seconds, _STEP[name], f"{name} {seconds:.3g} s, {share}", share))
        at += seconds
    keys = [(name, colour) for name, colour in _STEP.items() if parts[name] > step["step"] / 1000]
    return lanes("A step", Scale(0, max(at, step["step"]), "seconds"), [("", []), ("busiest rank", bars)], keys)


def of_operators(found: Mapping[str, Any]) -> str:
    """A roofline (Williams, Waterman and Patterson 2009)."""
    (rate, bandwidth), points = found["roof"], found["operators"]
    ridge, intensities = rate / bandwidth, [at for at, _ in points.values()]
    low, high = min(ridge / 100, *intensities), max(ridge * 10, *intensities)
    roof = [(at, min(rate, at * bandwidth) / 1e12) for at in (low, ridge, high)]
    named = {"what the machine can": roof, **{name: [(at, done / 1e12)] for name, (at, done) in points.items()}}
    heading = "Operators of a forward against the machine"
    return curves(heading, "FLOPs per byte of memory traffic", "TFLOP/s", named, log=True, log_x=True)


def of_failures(config: Config, every_s: float) -> list[str]:
    """Effective time over GPUs, and over the checkpoint interval; `every_s`: the config's own, 0 where not known."""
    figures, per_node, nodes = known(config, {}), config.stages.train.tasks_per_node, config.stages.train.most_nodes
    counts = [nodes * 4**power for power in range(8) if nodes * 4**power * per_node <= 1 << 18] or [nodes]
    jobs = {count: conditions(config, figures, count) for count in counts}
    best = [(count * per_node, 100 * effective_ratio(job, best_interval_s(job))) for count, job in jobs.items()]
    hourly = [(count * per_node, 100 * effective_ratio(job, 3600.0)) for count, job in jobs.items()]
    minutes, marks = [1.25**power for power in range(31)], [every_s / 60] * (every_s > 0)
    between = "minutes of work between two saves" + f" (config: {span(every_s)})" * bool(marks)
    over = {
        f"{count * per_node:,} GPUs": [(at, 100 * effective_ratio(job, 60 * at)) for at in minutes]
        for count, job in list(jobs.items())[::2]
    }
    told, percent = "effective training time, %", {"saving as often as is best": best, "saving each hour": hourly}
    return [
        curves("What failures leave, by size", "GPUs", told, percent, log_x=True),
        curves("What failures leave, by interval", between, told, over, log_x=True, marks=marks),
    ]


def print_plan(config: Path, asked: list[str], file: Path) -> typer.Exit:
    """Print the plan, as without --html, and write its page; also where memory does not suffice."""
    if file.suffix != ".html" or not file.parent.is_dir():
        raise UserError(f"--html {file}: name a file that ends in .html, in a folder that exists")
    with TemporaryDirectory() as folder:
        values = Path(folder, "figures.json")
        left = child("plan", str(config), f"--figures={values}", *asked)
        if not values.exists():
            return left
        found = read_json(values)
    made = config_from_mapping(found["config"], "plan --html")
    drawn: dict[str, list[str]] = {"Memory and time": [of_memory(found)], "The schedule": [of_schedule(found)]}
    summary = {"layout": found["layout"], "fullest rank": f"{max(sum(p.values()) for p in found['memory']):.1f} GB"}
    if step := found.get("step"):
        drawn["Memory and time"].append(of_step(found))
        drawn["Operators"] = [of_operators(found)]
        speed = f"a step in {step['step']:.3g} s, {step['tokens_per_gpu']:,.0f} tokens/s of a GPU, "
        speed += f"MFU {100 * step['mfu']:.1f} %"
        summary |= {"machine": found["gpu"], "predicted": speed}
    every_s = made.checkpoint.every_steps * step["step"] if step else 0.0
    drawn["Failures"] = of_failures(made, every_s)
    told = ["How well this is predicted: docs/planning.md; failures and saves: plan --goodput has figures and sources."]
    shown = dump(masked(json.loads(json.dumps(found["config"]))))
    write_atomic(file, page(made.run.name, f"the plan of {config.name}", summary, drawn, told, shown))
    print(f"with pictures: {file}", flush=True)
    return left
