"""The evaluate stage: all ranks together measure checkpoints on held-out data and task files.

The option `--step` of `python -m pipeline evaluate` selects the checkpoints: `--step N`, `--step newest` or
`--step every`. The default follows from `evaluate.every`.
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
        selection: the number of a step, `newest`, `every`, or None for the default, which follows from
            `evaluate.every`.

    Returns:
        The steps; empty if there is no checkpoint and `selection` is not a number.

    Raises:
        UserError: if the selection is invalid, or if it is a step without a checkpoint.
    """
    steps = list_checkpoint_steps(run.checkpoints_dir)
    if selection is None:
        selection = "every" if run.config.evaluate.every == "checkpoint" else "newest"
    if selection == "every":
        return steps
    if selection == "newest":
        newest_step = find_newest_step(run.checkpoints_dir)
        return [newest_step] if newest_step else []
    if not selection.isdecimal():
        raise UserError("cli.invalid_value", f"--step {selection}: expected the number of a step, newest or every")
    if int(selection) not in steps:
        saved_steps = ", ".join(map(str, steps)) or "none"
        message = f"--step {selection}: no such checkpoint in {run.checkpoints_dir}; saved steps: {saved_steps}"
        raise UserError("checkpoint.no_such_step", message)
    return [int(selection)]


def describe_missing_outputs(run: Run) -> str | None:
    """Return why the evaluation is not done.

    Returns None if every checkpoint that `evaluate.every` selects has a result, or if no data is held out.
    """
    if run.config.data.held_out == 0:
        return None
    steps = select_steps(run, None)
    missing_steps = [step for step in steps if read_result(run, step) is None]
    if not steps:
        return "there is no checkpoint yet"
    return f"step {missing_steps[0]} is not evaluated" if missing_steps else None


def check_inputs(run: Run) -> None:
    """Raise UserError if two task files have the same name, or a task file is malformed."""
    files = run.config.evaluate.task_files
    derive_task_names(files)
    for file in files:
        read_task_file(file)


def progress(run: Run) -> Progress:
    """Return the progress of the stage: the main metric of the newest result."""
    if run.config.data.held_out == 0:
        return Progress("nothing is held out (data.held_out: 0)")
    result = read_newest_result(run)
    if result is None:
        return Progress("-")
    name, value = get_main_metric(result)
    return Progress(f"step {result['step']}: {name} {value:.3f}")


def preload(run: Run) -> None:
    """Import the modules that the ranks of the stage import, before a node agent forks the ranks."""
    from pipeline.comm import groups  # noqa: F401
    from pipeline.data import verify_shards  # noqa: F401
    from pipeline.evaluate import evaluator  # noqa: F401
    from pipeline.resilience import watchdog  # noqa: F401


def run_stage(run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Evaluate the selected checkpoints that have no result, in ascending order of their steps.

    Args:
        run: the run.
        rank_info: the rank of this process and the world size.
        options: may contain `step`, the selection of the checkpoints (:func:`select_steps`).
        flag: set by the signals that request a stop.

    Returns:
        DONE if all selected checkpoints have a result, or if no data is held out; STOPPED if the ranks agreed to stop.

    Raises:
        CheckpointError: if there is no checkpoint, or if a checkpoint is damaged or belongs to another run.
        UserError: if the selection is invalid.
    """
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
