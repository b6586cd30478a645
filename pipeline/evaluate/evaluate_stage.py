"""The evaluate stage: all ranks together compute held-out loss, perplexity and bits per byte of checkpoints.

Ranks have the option `--step N`, `--step newest` or `--step every`. The default follows from `evaluate.every`.
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


def select_steps(run: Run, selection: str | None) -> list[int]:
    """Return the steps to evaluate.

    Args:
        run: the run.
        selection: the number of a step, `newest`, `every`, or None for the default of `evaluate.every`.

    Raises UserError if the selection is invalid or there is no such checkpoint.
    """
    steps = list_checkpoint_steps(run.checkpoints_dir)
    if selection is None:
        selection = "every" if run.config.evaluate.every == "checkpoint" else "newest"
    if selection == "every":
        return steps
    if selection == "newest":
        return [newest] if (newest := find_newest_step(run.checkpoints_dir)) else []
    if not selection.isdecimal():
        raise UserError("cli.invalid_value", f"--step {selection}: expected the number of a step, newest or every")
    if int(selection) not in steps:
        saved = ", ".join(map(str, steps)) or "none"
        message = f"--step {selection}: no such checkpoint in {run.checkpoints_dir}; saved steps: {saved}"
        raise UserError("checkpoint.no_such_step", message)
    return [int(selection)]


def describe_missing_outputs(run: Run) -> str | None:
    """Return why the evaluation is not done; None if every selected checkpoint has a result."""
    if run.config.data.held_out == 0:
        return None
    steps = select_steps(run, None)
    without = [step for step in steps if read_result(run, step) is None]
    if not steps:
        return "there is no checkpoint yet"
    return f"step {without[0]} is not evaluated" if without else None


def check_inputs(run: Run) -> None:
    """Raise UserError if a task file is malformed."""
    files = run.config.evaluate.task_files
    for _, file in zip(derive_task_names(files), files, strict=True):
        read_task_file(file)


def progress(run: Run) -> Progress:
    """Return the newest result."""
    if run.config.data.held_out == 0:
        return Progress("nothing is held out (data.held_out: 0)")
    result = read_newest_result(run)
    if result is None:
        return Progress("-")
    name, value = get_main_metric(result)
    return Progress(f"step {result['step']}: {name} {value:.3f}")


def run_stage(run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Evaluate the selected checkpoints that have no result. Raises CheckpointError if there is no checkpoint."""
    from pipeline.comm import groups
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.evaluate.evaluator import Evaluator
    from pipeline.resilience.watchdog import Watchdog

    if run.config.data.held_out == 0:
        print("evaluate: nothing is held out (data.held_out: 0)", flush=True)
        return ExitCode.DONE
    watchdog = Watchdog(run, "evaluate", rank_info, flag)
    watchdog.start()
    manifest = load_run_manifest(run)
    groups.configure_determinism(run.config)
    world = groups.join_process_group(rank_info, run.config)
    steps = groups.broadcast_from_rank0(groups.new_control_group(), select_steps(run, options.get("step")))
    if not steps:
        message = f"{run.checkpoints_dir} has no intact checkpoint to evaluate; train first"
        raise CheckpointError("checkpoint.none_saved", message)
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
