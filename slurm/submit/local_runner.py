"""Running the chain of stages on this machine: prepare → shard → train → evaluate, each as a detached job.

A stage that is done is left alone; one that somebody else is running is followed, and a stop that
comes meanwhile ends all who follow: nobody starts again what a person stopped. Ctrl-C or SIGTERM asks the
running stage to stop (once), waits for its save and prints the command that goes on; a second Ctrl-C only stops
watching: the stage goes on with its save by itself. In a batch job (chain.sbatch) it is Slurm that signals: the stage
is told, and followed to its end, for it goes on when the job is put back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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
from pipeline.run import stages
from pipeline.run.directory import Run
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
from pipeline.run.points import create_points
from slurm.query.status import describe_outcome
from slurm.submit.site_environment import SETUP_NOT_RUN

POLL_S = 0.2
LIVE_INTERVAL_S = 1.0
PLAIN_INTERVAL_S = 10.0


def run_chain_locally(run: Run, console: Console) -> ExitCode:
    """Run what is missing, stage after stage. Returns the exit code of the first stage that did not get done.

    A point of a sweep that fails leaves the others alone: of such failures the highest code is returned, after a table.
    A stop, by whomever, ends all.
    """
    run.check_not_cancelled()
    run.stop_file.unlink(missing_ok=True)
    if is_in_allocation(os.environ) and run.config.site.setup:
        console.print(SETUP_NOT_RUN, soft_wrap=True)
    flag = StopFlag().install()
    own, failed = [(run, stages.list_run_stages(run))], ExitCode.DONE
    for one, names in own + [(point, stages.list_point_stages()) for point in create_points(run)]:
        if one is not run:
            console.print(f"point {one.path.name}")
        for stage in names:
            if (code := run_stage_locally(one, stage, flag, console)) == ExitCode.DONE:
                continue
            if one is run or code == ExitCode.STOPPED or flag:
                return code
            failed = max(failed, code)
            break
    if failed != ExitCode.DONE:
        console.print(describe_outcome(run), soft_wrap=True)
    return failed


def run_stage_locally(run: Run, stage: str, flag: StopFlag, console: Console) -> ExitCode:
    """Submit one stage that is not done (or join the one that runs), follow it to its end and say how it ended."""
    from slurm.submit.submitit_job import submit_locally

    say = partial(console.print, soft_wrap=True)
    work, asked, batch = stages.load_stage_module(stage), False, is_in_batch_job(os.environ)
    job: Any = None

    def going() -> bool:
        """Whether it runs and is watched: a first signal is passed on, a second one ends the watching."""
        nonlocal asked
        alive = not job.done() if job else run.lock_holder(stage) is not None
        if not alive:
            return False
        if flag and not asked and (asked := ask_to_stop(run, stage, batch)):
            say("stopping: the stage saves at its next step boundary …")
        return batch or flag.signal_count < 2

    while True:
        run.reload_config()
        run.check_not_cancelled()
        holder = run.lock_holder(stage)
        if holder is None and work.missing_outputs(run) is None:
            say(f"{stage:9} done: {work.progress(run).description}")
            return ExitCode.DONE
        before = read_stage_state(run.read_events(stage))
        leaves = before.stopping_event is not None and before.end_event is None
        if holder:
            say(f"{stage:9} is already running ({holder}); following it")
            watch = format_command("status", run.sweep_or_self.name, "--watch")
            say(f"Ctrl-C stops it, for all who follow; only to watch: {watch}")
        job = None if holder else submit_locally(run, stage)
        seconds = follow_stage(run, stage, going, console)
        run.reload_config()
        if flag.signal_count > 1 and not batch:
            say(f"{stage:9} saves and ends by itself; to go on: {run.resume_command}")
            return ExitCode.STOPPED
        events = [e for e in run.read_events(stage) if job is None or get_job_id(e) == job.job_id]
        told = read_stage_state(events)
        if told.end_event is None and (
            work.missing_outputs(run) is None or (job and not told.start_event and run.lock_holder(stage))
        ):
            continue  # it is done, or somebody else's attempt began in the same moment: join that one
        if isinstance(told.end_event, Stopped) and job is None and not asked and leaves:
            continue  # it was stopping already when we joined it; we were asked to go on
        return report_stage_end(run, stage, told, seconds, job, say)


def ask_to_stop(run: Run, stage: str, batch: bool) -> bool:
    """Ask a running stage to save and leave: a request in the run directory, and one TERM to its supervisor. False
    where that was not reached.

    The file reaches a supervisor that is only just starting; the signal reaches one that runs at once. In a `batch` job
    there is no file: it stands for a person's stop, after which nothing goes on by itself.
    """
    if not batch:
        run.write_request(run.stop_file)
    if holder := run.lock_holder(stage):
        holder.terminate()
    return holder is not None or not batch


def report_stage_end(run: Run, stage: str, told: StageState, seconds: float, job: Any, say: Any) -> ExitCode:
    """Say how the stage ended and what to do next; returns its exit code. `job`: None where it was not ours."""
    end, words = told.end_event, stages.load_stage_module(stage).progress(run).description
    if end is None:
        log = job.paths.stdout if job else run.jobs_dir / stage
        say(f"{stage:9} ended without a word of its supervisor; its log: {log}", style="red")
        if log.is_file():
            output = log.read_text(errors="replace").splitlines()
            printed = [line for line in output if not line.startswith("submitit ")]
            say("\n".join(printed[-15:]), style="red")
        say(f"to try again: {run.resume_command}")
        return ExitCode.CRASHED
    if isinstance(end, Done):
        say(f"{stage:9} done in {format_duration(seconds)}: {words}")
        return ExitCode.DONE
    if not isinstance(end, Failed):
        say(f"{stage:9} {end.name}: {words}\nto go on: {run.resume_command}")
        return ExitCode.STOPPED
    say(f"{stage:9} failed ({end.cause or 'unknown'}): {(end.message or '').rstrip()}", style="red")
    say(f"logs: {run.jobs_dir / stage}\n{describe_remedy(run, end.cause, end.message or '')}")
    return end.code


def _describe_event(event: Event) -> str | None:
    """Return the line to print when an event is written; None if it needs none."""
    if isinstance(event, Restored):
        repeated = f"; repeated steps: {event.lost_steps}" if event.lost_steps else ""
        return f"restored step {event.step}{repeated}"
    if isinstance(event, Damaged):
        return f"step {event.step} is damaged and was set aside: {event.reason}"
    if isinstance(event, Retried):
        return f"restarts automatically after: {event.cause}"
    return None


def follow_stage(run: Run, stage: str, is_running: Callable[[], bool], console: Console) -> float:
    """Print the progress of a stage while `is_running()`; return the seconds that this took."""
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
        nonlocal offset
        for text, end in read_complete_lines(run.events_file, offset):
            event = parse_event(parse_json_or_none(text))
            offset = end
            message = None if event is None or event.stage != stage else _describe_event(event)
            if message is not None:
                console.print(f"{stage:9} {message}", soft_wrap=True)

    with bar:
        while is_running():
            print_new_events()
            if time.monotonic() >= next_update_time:
                next_update_time += LIVE_INTERVAL_S if is_live else PLAIN_INTERVAL_S
                for key, change in run.reload_config().items():
                    console.print(f"{stage:9} changed by another process: {key}: {change}", soft_wrap=True)
                progress = stages.load_stage_module(stage).progress(run)
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
