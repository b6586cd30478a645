"""Running the chain of stages on this machine: prepare → shard → train → evaluate, each as a detached job.

A stage that is done is left alone; one that somebody else is running is followed. Ctrl-C or SIGTERM asks the
running stage to stop (once), waits for its save and prints the command that goes on; a second Ctrl-C only stops
watching: the stage goes on with its save by itself.
"""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import suppress
from typing import Any

from rich.console import Console

from pipeline import stages
from pipeline.errors import Exit, UserError
from pipeline.run import Run
from pipeline.signals import StopFlag
from slurm.follow import clock, follow

ENDINGS = ("done", "stopped", "cancelled", "failed")


def resume_command(run: Run) -> str:
    """What a person types to go on."""
    return f"python submit.py resume {shlex.quote(run.name)}"


def run_chain(run: Run, console: Console) -> Exit:
    """Run what is missing, stage after stage. Returns the exit code of the first stage that did not get done."""
    if run.cancelled_file.exists():
        raise UserError(f"{run.name} was cancelled; to go on all the same: {resume_command(run)}")
    run.stop_file.unlink(missing_ok=True)
    flag = StopFlag().install()
    for stage in stages.STAGES:
        work = stages.load(stage)
        if work.missing(run) is None:
            console.print(f"{stage:9} done: {work.progress(run)}", highlight=False, soft_wrap=True)
            continue
        code = run_stage(run, stage, flag, console)
        if code != Exit.DONE:
            return code
    return Exit.DONE


def run_stage(run: Run, stage: str, flag: StopFlag, console: Console) -> Exit:
    """Submit one stage (or join the one that runs), follow it to its end and say how it ended."""
    from slurm.submission import submit_local

    before = len(run.read_events(stage))
    holder = run.holder(stage)
    if holder is not None:
        console.print(f"{stage:9} is already running (pid {holder}); following it", highlight=False)
        job = None
    else:
        job = submit_local(run, stage)
    interrupts = Interrupts(run, stage, flag, console)
    seconds = follow(
        run, stage, lambda: job.running if job else run.holder(stage) is not None, interrupts.tick, console
    )
    if interrupts.left:
        return Exit.STOPPED
    end = last_ending(run.read_events(stage)[before if job else 0 :])
    return tell(run, stage, end, seconds, str(job.log) if job else str(run.jobs / stage), console)


class Interrupts:
    """What Ctrl-C and SIGTERM to submit.py mean while a stage runs."""

    def __init__(self, run: Run, stage: str, flag: StopFlag, console: Console) -> None:
        self.run, self.stage, self.flag, self.console = run, stage, flag, console
        self.asked = False
        self.left = False

    def tick(self) -> None:
        """Pass a first signal on, once."""
        if self.flag and not self.asked:
            self.asked = True
            ask_to_stop(self.run, self.stage)
            self.console.print("stopping: the stage saves at its next step boundary …", highlight=False)


def ask_to_stop(run: Run, stage: str) -> None:
    """Ask a running stage to save and leave: a request in the run directory, and one TERM to its supervisor.

    The file reaches a supervisor that is only just starting; the signal reaches one that runs at once.
    """
    run.request(run.stop_file, f"by pid {os.getpid()}")
    holder = run.holder(stage)
    if holder is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(holder, signal.SIGTERM)


def last_ending(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last event that tells how an attempt ended."""
    return next((e for e in reversed(events) if e["event"] in ENDINGS), None)


def tell(run: Run, stage: str, end: dict[str, Any] | None, seconds: float, log: str, console: Console) -> Exit:
    """Say how the stage ended and what to do next; returns its exit code."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True, style=style)

    if end is None:
        say(f"{stage:9} ended without a word of its supervisor; its log: {log}", "red")
        say(f"to try again: {resume_command(run)}")
        return Exit.CRASHED
    if end["event"] == "done":
        say(f"{stage:9} done in {clock(seconds)}: {stages.load(stage).progress(run)}")
        return Exit.DONE
    if end["event"] in ("stopped", "cancelled"):
        say(f"{stage:9} {end['event']}: {stages.load(stage).progress(run)}")
        say(f"to go on: {resume_command(run)}")
        return Exit.STOPPED
    say(f"{stage:9} failed ({end.get('cause', 'unknown')}): {end.get('message', '').rstrip()}", "red")
    say(f"logs: {run.jobs / stage}")
    say(f"once that is mended: {resume_command(run)}")
    return Exit(end["exit_code"])
