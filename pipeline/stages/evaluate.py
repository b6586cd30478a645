"""Stage evaluate: held-out loss, perplexity and bits per byte of checkpoints, in all ranks together.

Options of the rank door: `--step N`, `--step newest` or `--step every`; without it, what `evaluate.every` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint_files import newest_step, read_manifest, saved_steps, step_name
from pipeline.errors import CheckpointError, Exit, UserError
from pipeline.run import Run
from pipeline.signals import StopFlag
from slurm.environment import Place

NEEDS: tuple[str, ...] = ("train",)


def result_file(run: Run, step: int) -> Path:
    """Where the evaluation of a step is written."""
    return run.evaluation / f"{step_name(step)}.json"


def read_result(run: Run, step: int) -> dict[str, Any] | None:
    """The evaluation of a step, None where there is none, or none of this checkpoint."""
    try:
        result = json.loads(result_file(run, step).read_bytes())
        if result["checkpoint"] == read_manifest(run.checkpoints / step_name(step))["sha256"]:
            return dict(result)
    except (FileNotFoundError, ValueError, KeyError, TypeError, CheckpointError):
        pass
    return None


def newest_result(run: Run) -> dict[str, Any] | None:
    """The evaluation of the newest checkpoint that has one."""
    return next((result for step in saved_steps(run.checkpoints) if (result := read_result(run, step))), None)


def result_words(result: Mapping[str, Any]) -> str:
    """An evaluation in one line, text against the unigram figure."""
    words = f"step {result['step']}: held-out loss {result['loss']:.4f}"
    if "bits_per_byte" not in result:
        known = ("step", "loss", "samples", "entries", "checkpoint")
        return words + "".join(f", {name} {value:.4f}" for name, value in result.items() if name not in known)
    ratio = result["bits_per_byte"] / (result["unigram_bits_per_byte"] or float("nan"))
    return (
        f"{words}, perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.3f} bits per byte, "
        f"{ratio:.2f} × the unigram {result['unigram_bits_per_byte']:.3f}"
    )


def figure(result: Mapping[str, Any]) -> tuple[str, float]:
    """What evaluations are compared by, the less the better: bits per byte of text, else the loss."""
    name, key = ("bits per byte", "bits_per_byte") if "bits_per_byte" in result else ("held-out loss", "loss")
    return name, result[key]


def wanted(run: Run, which: str | None) -> list[int]:
    """The steps to evaluate: `which` is a number, `newest`, `every`, or None for what the config says.

    Raises UserError where it is none of these, or there is no such checkpoint.
    """
    steps = saved_steps(run.checkpoints)
    if which is None:
        which = "every" if run.config.evaluate.every == "checkpoint" else "newest"
    if which == "every":
        return steps
    if which == "newest":
        newest = newest_step(run.checkpoints)
        return [newest] if newest else []
    if not which.isdecimal():
        raise UserError(f"--step {which}: give a step's number, newest or every")
    if int(which) not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"--step {which}: no such checkpoint in {run.checkpoints}; there are: {there}")
    return [int(which)]


def missing(run: Run) -> str | None:
    """Why evaluation is not done; None when every wanted checkpoint has its result."""
    if run.config.data.held_out == 0:
        return None
    steps = wanted(run, None)
    without = [step for step in steps if read_result(run, step) is None]
    if not steps:
        return "there is no checkpoint yet"
    return f"step {without[0]} is not evaluated" if without else None


def progress(run: Run) -> str:
    """A phrase for `status`."""
    if run.config.data.held_out == 0:
        return "nothing is held out (data.held_out: 0)"
    result = newest_result(run)
    if result is None:
        return "-"
    name, value = figure(result)
    return f"step {result['step']}: {name} {value:.3f}"


def main(run: Run, place: Place, options: Mapping[str, str], flag: StopFlag) -> Exit:
    """Evaluate what is wanted and not there yet. Raises CheckpointError where there is no checkpoint at all."""
    from pipeline import groups
    from pipeline.evaluator import Evaluator
    from pipeline.inputs import manifest_of
    from pipeline.watchdog import Watchdog

    if run.config.data.held_out == 0:
        print("evaluate: nothing is held out (data.held_out: 0)", flush=True)
        return Exit.DONE
    watchdog = Watchdog(run, "evaluate", place, flag)
    watchdog.start()
    manifest = manifest_of(run)
    groups.make_deterministic(run.config)
    world = groups.join(place, run.config)
    steps = groups.from_rank0(groups.side_group(), wanted(run, options.get("step")))
    if not steps:
        raise CheckpointError(f"{run.checkpoints} holds no intact checkpoint to evaluate; train first")
    steps = groups.from_rank0(groups.side_group(), [step for step in steps if read_result(run, step) is None])
    evaluator = Evaluator(run, manifest, world, flag, watchdog)
    groups.end_of_startup()
    for step in sorted(steps):
        if not evaluator.evaluate(step):
            return Exit.STOPPED
    watchdog.close()
    groups.leave()
    return Exit.DONE
