"""Run the chain of stages on this machine: prepare → shard → train → evaluate. Each stage is a detached process.

- A stage that is done is skipped. If another process runs a stage, this process follows the stage: it prints the
  progress until the stage ends.
- Ctrl-C or SIGTERM stops the stage, also for other processes that follow the stage. The stage saves, and this process
  prints the command that resumes the run. After a second Ctrl-C, this process exits at once, and the stage finishes its
  save.
- In a batch job (chain.sbatch), Slurm sends the signal. The stage then saves and exits, and this process follows the
  stage until it ends. The stage continues when the job is requeued.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipeline.base.command import format_command
from pipeline.base.console import supports_live_output
from pipeline.base.dist_env import is_in_allocation, is_in_batch_job
from pipeline.base.errors import ExitCode
from pipeline.base.files import parse_json_or_none, read_complete_lines
from pipeline.base.signals import StopFlag
from pipeline.base.text import format_duration
from pipeline.config.stages import Stage
from pipeline.run import stages
from pipeline.run.directory import Run, create_points, list_points
from pipeline.run.events import (
    Damaged,
    Done,
    Event,
    Failed,
    Restored,
    Retried,
    StageState,
    Stopped,
    get_job_id,
    parse_event,
    read_stage_state,
)
from pipeline.run.failure import describe_remedy
from pipeline.run.trials import read_study
from pipeline.search.study import RESULT_CAUSES, get_search, update_study
from slurm.query.status import describe_outcome
from slurm.submit.site_environment import SETUP_NOT_RUN

POLL_S = 0.2
"""Pause between two checks of whether the stage has ended."""
LIVE_INTERVAL_S = 1.0
"""How often the progress bar is updated if the output is a terminal."""
PLAIN_INTERVAL_S = 10.0
"""How often progress is printed if the output is not a terminal."""
_MAX_LOG_LINES = 15
"""Number of lines that are printed from the end of the log of a supervisor that wrote no event."""


def run_chain_locally(run: Run, console: Console) -> ExitCode:
    """Run the stages of a run that are not done, one after the other.

    If a sweep point fails, the other points are still run, and a table of the results is printed. If the user stops a
    point, the remaining points are not run.

    Returns:
        DONE if all stages are done. If a stage of the run itself does not complete, or the user stops a point, the exit
        code of that stage. Otherwise, the highest exit code of the sweep points that failed. Failed trials of a search
        do not count if another trial has a value.
    """
    run.check_not_cancelled()
    run.stop_file.unlink(missing_ok=True)  # an earlier request to stop must not stop the stages that start now
    if is_in_allocation(os.environ) and run.config.site.setup:
        console.print(SETUP_NOT_RUN, soft_wrap=True)
    flag = StopFlag().install()
    worst_code = ExitCode.DONE
    failed_trial_code = ExitCode.DONE
    for target, stage_names in _iterate_targets(run):
        if target is not run:
            console.print(_describe_target(target))
        for stage in stage_names:
            if (code := run_stage_locally(target, stage, flag, console)) == ExitCode.DONE:
                continue
            if target is run or code == ExitCode.STOPPED or flag:
                return code
            if target.trial is not None and code.name.lower() in RESULT_CAUSES:
                failed_trial_code = max(failed_trial_code, code)
            else:
                worst_code = max(worst_code, code)
            break
    if failed_trial_code != ExitCode.DONE and read_study(run.path).find_best() is None:
        worst_code = max(worst_code, failed_trial_code)
    if worst_code != ExitCode.DONE:
        console.print(describe_outcome(run), soft_wrap=True)
    return worst_code


def _iterate_targets(run: Run) -> Iterator[tuple[Run, Mapping[str, Stage]]]:
    """Yield the run, then each point of its sweep, with the stages to run.

    In a search, each trial is yielded once for each rung that it must reach. The next trials are decided when all
    trials that were decided before have run.
    """
    if get_search(run) is None:
        points = create_points(run)
        yield run, stages.list_run_stages(run)
        for point in points:
            yield point, stages.list_point_stages(run)
        return
    yielded: set[tuple[str, int | None]] = set()
    while True:
        with run.lock_exclusively():
            update_study(run)
        if not yielded:
            yield run, stages.list_run_stages(run)
        keys = {(point.path.name, point.pause_step): point for point in list_points(run) if not point.is_failed_trial}
        new_keys = [key for key in keys if key not in yielded]
        if not new_keys:
            return
        yielded.update(new_keys)
        for key in new_keys:
            names = stages.list_point_stages(keys[key])
            if any(stages.load_stage_module(keys[key], name).describe_missing_outputs(keys[key]) for name in names):
                yield keys[key], names


def _describe_target(target: Run) -> str:
    """Return the name of a sweep point; for a trial of a search, also its parameters and the step of its rung."""
    if (trial := target.trial) is None:
        return f"point {target.path.name}"
    values = ", ".join(f"{key}={value}" for key, value in trial.parameters.items())
    return f"trial {target.path.name} ({values}) to step {target.pause_step or target.config.train.steps}"


def run_stage_locally(run: Run, stage: str, flag: StopFlag, console: Console) -> ExitCode:
    """Run a stage unless it is done, or follow the stage if another process runs it. Print how the stage ended.

    Args:
        run: the run.
        stage: the stage.
        flag: set when this process receives a signal.
        console: for messages.

    Returns:
        The exit code of the stage; STOPPED if this process stopped following the stage.
    """
    from slurm.submit.submitit_job import submit_locally

    say = partial(console.print, soft_wrap=True)
    stage_module = stages.load_stage_module(run, stage)
    is_batch = is_in_batch_job(os.environ)
    was_stop_requested = False
    job: Any = None

    def should_follow() -> bool:
        """Return True while the stage runs, and request a stop of the stage at the first signal.

        After the second signal, the result is False, except in a batch job.
        """
        nonlocal was_stop_requested
        is_running = not job.done() if job else run.lock_holder(stage) is not None
        if not is_running:
            return False
        if flag and not was_stop_requested:
            was_stop_requested = request_stop(run, stage, is_batch)
            if was_stop_requested:
                say("stopping: the stage saves at its next step boundary …")
        return is_batch or flag.signal_count < 2

    while True:
        run.reload_config()
        run.check_not_cancelled()
        holder = run.lock_holder(stage)
        if holder is None and stage_module.describe_missing_outputs(run) is None:
            say(f"{stage:9} done: {stage_module.progress(run).description}")
            return ExitCode.DONE
        previous_state = read_stage_state(run.read_events(stage))
        was_stopping = previous_state.stopping_event is not None and previous_state.end_event is None
        was_orphaned = holder is not None and holder.is_gone()
        if was_orphaned:
            say(f"{stage:9} lost its supervisor ({holder}); waiting until its ranks have saved and exited")
        elif holder:
            say(f"{stage:9} is already running ({holder}); following it")
            watch_command = format_command("status", run.sweep_or_self.name, "--watch")
            say(f"Ctrl-C stops it, also for other processes that follow it; to watch only: {watch_command}")
        job = None if holder else submit_locally(run, stage)
        seconds = follow_stage(run, stage, should_follow, console)
        run.reload_config()
        if flag.signal_count > 1 and not is_batch:
            say(f"{stage:9} saves and ends by itself; to continue: {run.resume_command}")
            return ExitCode.STOPPED
        # if this process started the stage, only the events of its own attempt count
        events = [event for event in run.read_events(stage) if job is None or get_job_id(event) == job.job_id]
        state = read_stage_state(events)
        if state.end_event is None:
            has_other_runner = job and not state.start_event and run.lock_holder(stage)
            if has_other_runner or (was_orphaned and not flag) or stage_module.describe_missing_outputs(run) is None:
                # the stage is done, or another process started it at the same moment and must be followed, or the ranks
                # without a supervisor have exited: run the stage again
                continue
        if isinstance(state.end_event, Stopped) and job is None and not was_stop_requested and was_stopping:
            continue  # the stage was already stopping before this process followed it: run the stage again
        return report_stage_end(run, stage, state, seconds, job, say)


def request_stop(run: Run, stage: str, is_batch: bool) -> bool:
    """Request that a running stage saves and exits, with the stop file and with SIGTERM to its supervisor.

    The stop file also reaches a supervisor that is still starting. The signal reaches a running supervisor at once. In
    a batch job, no stop file is written: the file would count as a request of the user, and the requeued job would not
    continue the stage.

    Args:
        run: the run.
        stage: the stage.
        is_batch: whether this process is part of a batch job.

    Returns:
        Whether the request will reach the supervisor.
    """
    if not is_batch:
        run.write_request(run.stop_file)
    if holder := run.lock_holder(stage):
        holder.terminate()
    return holder is not None or not is_batch


def report_stage_end(run: Run, stage: str, state: StageState, seconds: float, job: Any, say: Any) -> ExitCode:
    """Print how a stage ended and what to do next. Return the exit code of the stage.

    Args:
        run: the run.
        stage: the stage.
        state: the state of the stage after its end.
        seconds: how long this process followed the stage.
        job: the submitit job; None if another process started the stage.
        say: prints a message to the user.
    """
    end = state.end_event
    description = stages.load_stage_module(run, stage).progress(run).description
    if end is None:
        log = job.paths.stdout if job else run.jobs_dir / stage
        say(f"{stage:9} ended, and its supervisor wrote no event; its log: {log}", style="red")
        if log.is_file():
            output = log.read_text(errors="replace").splitlines()
            # lines of submitit itself are left out
            say("\n".join([line for line in output if not line.startswith("submitit ")][-_MAX_LOG_LINES:]), style="red")
        say(f"to try again: {run.resume_command}")
        return ExitCode.CRASHED
    if isinstance(end, Done):
        say(f"{stage:9} done in {format_duration(seconds)}: {description}")
        return ExitCode.DONE
    if not isinstance(end, Failed):
        say(f"{stage:9} {end.name}: {description}\nto continue: {run.resume_command}")
        return ExitCode.STOPPED
    say(f"{stage:9} failed ({end.cause or 'unknown'}): {(end.message or '').rstrip()}", style="red")
    say(f"logs: {run.jobs_dir / stage}\n{describe_remedy(run, end.cause, end.message or '')}")
    return end.code


def _describe_event(event: Event) -> str | None:
    """Return the message to print for an event while the stage runs; None for events that are not printed."""
    if isinstance(event, Restored):
        repeated = f"; repeated steps: {event.lost_steps}" if event.lost_steps else ""
        source = " from memory" if event.source == "memory" else ""
        return f"restored step {event.step}{source}{repeated}"
    if isinstance(event, Damaged):
        return f"step {event.step} is damaged and was set aside: {event.reason}"
    if isinstance(event, Retried):
        return f"restarts automatically after: {event.cause}"
    return None


def follow_stage(run: Run, stage: str, should_follow: Callable[[], bool], console: Console) -> float:
    """Print the progress and new events of a stage while it runs, and changes of the config by other processes.

    Args:
        run: the run.
        stage: the stage.
        should_follow: returns False once the stage has ended, or if this process must stop following the stage.
        console: where to print.

    Returns:
        How long this took, in seconds.
    """
    start_time = time.monotonic()
    is_live = supports_live_output(console)
    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[stage]:9}"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not is_live)
    task = bar.add_task("starting", total=None, stage=stage)
    next_update_time = start_time if is_live else start_time + PLAIN_INTERVAL_S
    offset = run.events_file.stat().st_size if run.events_file.exists() else 0

    def print_new_events() -> None:
        """Print the messages of events that were written since the last call."""
        nonlocal offset
        for text, end in read_complete_lines(run.events_file, offset):
            event = parse_event(parse_json_or_none(text))
            offset = end
            message = None if event is None or event.stage != stage else _describe_event(event)
            if message is not None:
                console.print(f"{stage:9} {message}", soft_wrap=True)

    with bar:
        while should_follow():
            print_new_events()
            if time.monotonic() >= next_update_time:
                next_update_time += LIVE_INTERVAL_S if is_live else PLAIN_INTERVAL_S
                for key, change in run.reload_config().items():
                    console.print(f"{stage:9} changed by another process: {key}: {change}", soft_wrap=True)
                progress = stages.load_stage_module(run, stage).progress(run)
                remaining = "" if progress.remaining_s is None else f"  {format_duration(progress.remaining_s)} left"
                bar.update(
                    task,
                    completed=progress.completed,
                    total=progress.total or None,
                    description=progress.running_description + remaining,
                )
                if not is_live:
                    console.print(f"{stage:9} {progress.running_description}{remaining}", soft_wrap=True)
            time.sleep(POLL_S)
        print_new_events()
    return time.monotonic() - start_time
