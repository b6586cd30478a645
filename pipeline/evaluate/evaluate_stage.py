"""Stage evaluate: held-out loss, perplexity and bits per byte of checkpoints, in all ranks together.

Options of the rank door: `--step N`, `--step newest` or `--step every`; without it, what `evaluate.every` says.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import CheckpointError, ExitCode, UserError
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.catalog import find_newest_step, list_checkpoint_steps
from pipeline.evaluate.result import get_main_metric, read_newest_result, read_result
from pipeline.evaluate.task_files import derive_task_names, read_task_file
from pipeline.run.directory import Run
from pipeline.run.stages import Progress


def wanted(run: Run, which: str | None) -> list[int]:
    """The steps to evaluate: `which` is a number, `newest`, `every`, or None for what the config says.

    Raises UserError where it is none of these, or there is no such checkpoint.
    """
    steps = list_checkpoint_steps(run.checkpoints_dir)
    if which is None:
        which = "every" if run.config.evaluate.every == "checkpoint" else "newest"
    if which == "every":
        return steps
    if which == "newest":
        return [newest] if (newest := find_newest_step(run.checkpoints_dir)) else []
    if not which.isdecimal():
        raise UserError(f"--step {which}: give a step's number, newest or every")
    if int(which) not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"--step {which}: no such checkpoint in {run.checkpoints_dir}; there are: {there}")
    return [int(which)]


def missing_outputs(run: Run) -> str | None:
    """Why evaluation is not done; None when every wanted checkpoint has its result."""
    if run.config.data.held_out == 0:
        return None
    steps = wanted(run, None)
    without = [step for step in steps if read_result(run, step) is None]
    if not steps:
        return "there is no checkpoint yet"
    return f"step {without[0]} is not evaluated" if without else None


def check_inputs(run: Run) -> None:
    """Raise UserError for tasks that are none."""
    files = run.config.evaluate.task_files
    for _, file in zip(derive_task_names(files), files, strict=True):
        read_task_file(file)


def progress(run: Run) -> Progress:
    """How far it is."""
    if run.config.data.held_out == 0:
        return Progress("nothing is held out (data.held_out: 0)")
    result = read_newest_result(run)
    if result is None:
        return Progress("-")
    name, value = get_main_metric(result)
    return Progress(f"step {result['step']}: {name} {value:.3f}")


def run_stage(run: Run, place: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Evaluate what is wanted and not there yet. Raises CheckpointError where there is no checkpoint at all."""
    from pipeline.comm import groups
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.evaluate.evaluator import Evaluator
    from pipeline.resilience.watchdog import Watchdog

    if run.config.data.held_out == 0:
        print("evaluate: nothing is held out (data.held_out: 0)", flush=True)
        return ExitCode.DONE
    watchdog = Watchdog(run, "evaluate", place, flag)
    watchdog.start()
    manifest = load_run_manifest(run)
    groups.configure_determinism(run.config)
    world = groups.join_process_group(place, run.config)
    steps = groups.broadcast_from_rank0(groups.new_control_group(), wanted(run, options.get("step")))
    if not steps:
        raise CheckpointError(f"{run.checkpoints_dir} holds no intact checkpoint to evaluate; train first")
    steps = groups.broadcast_from_rank0(
        groups.new_control_group(), [step for step in steps if read_result(run, step) is None]
    )
    evaluator = Evaluator(run, manifest, world, flag, watchdog)
    groups.finish_startup(world.device)
    for step in sorted(steps):
        if not evaluator.evaluate(step):
            return ExitCode.STOPPED
    watchdog.close()
    groups.leave_process_group()
    return ExitCode.DONE
