"""Running the chain of stages on this machine: prepare → shard → train → evaluate, each as a detached job.

A stage that is done is left alone; one that somebody else is running is followed. Ctrl-C or SIGTERM asks the
running stage to stop (once), waits for its save and prints the command that goes on; a second Ctrl-C only stops
watching: the stage goes on with its save by itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.base.errors import Exit
from pipeline.base.place import in_allocation
from pipeline.base.signals import StopFlag
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.points import points
from slurm.query import attempts
from slurm.query.site_variables import SETUP_NOT_RUN


def run_chain(run: Run, console: Console) -> Exit:
    """Run what is missing, stage after stage. Returns the exit code of the first stage that did not get done."""
    run.refuse_cancelled()
    run.stop_file.unlink(missing_ok=True)
    if in_allocation(os.environ) and run.config.site.setup:
        console.print(SETUP_NOT_RUN, highlight=False, soft_wrap=True)
    flag = StopFlag().install()
    code = _run_stages(run, stages.own_stages(run), flag, console)
    for point in points(run) if code == Exit.DONE else ():
        console.print(f"point {point.path.name}", highlight=False)
        if (code := _run_stages(point, stages.point_stages(), flag, console)) != Exit.DONE:
            break
    return code


def _run_stages(run: Run, names: Sequence[str], flag: StopFlag, console: Console) -> Exit:
    for stage in names:
        work = stages.load(stage)
        if run.holder(stage) is None and work.missing(run) is None:
            console.print(f"{stage:9} done: {work.progress(run).words}", highlight=False, soft_wrap=True)
            continue
        code = run_stage(run, stage, flag, console)
        if code != Exit.DONE:
            return code
    return Exit.DONE


def run_stage(run: Run, stage: str, flag: StopFlag, console: Console) -> Exit:
    """Submit one stage (or join the one that runs), follow it to its end and say how it ended."""
    from slurm.show.follow import follow
    from slurm.submit.local_job import submit_local

    interrupts = Interrupts(run, stage, flag, console)
    while True:
        run.refuse_cancelled()
        holder = run.holder(stage)
        job = None if holder else submit_local(run, stage)
        if holder:
            console.print(f"{stage:9} is already running ({holder}); following it", highlight=False)
        seconds = follow(run, stage, job, interrupts.tick, console)
        if interrupts.left:
            console.print(f"{stage:9} saves and ends by itself; to go on: {run.resume_command}", highlight=False)
            return Exit.STOPPED
        events = run.read_events(stage)
        end = attempts.read(e for e in events if job is None or e.get("job_id") == job.job_id).end
        began = job is None or any(e["event"] == "started" and e.get("job_id") == job.job_id for e in events)
        if not began and run.holder(stage) is not None:
            continue  # somebody else's attempt began in the same moment: join that one
        if end is not None and end["event"] == "stopped" and job is None and not interrupts.asked:
            continue  # it was stopping already when we joined it; we were asked to go on
        return tell(run, stage, end, seconds, job.log if job else None, console)


class Interrupts:
    """What Ctrl-C and SIGTERM to submit.py mean while a stage runs: ask it to stop; the second time, stop watching."""

    def __init__(self, run: Run, stage: str, flag: StopFlag, console: Console) -> None:
        self.run, self.stage, self.flag, self.console = run, stage, flag, console
        self.asked = False

    def tick(self) -> bool:
        """Pass a first signal on, once; whether to go on watching."""
        if self.flag and not self.asked:
            self.asked = True
            ask_to_stop(self.run, self.stage)
            self.console.print("stopping: the stage saves at its next step boundary …", highlight=False)
        return not self.left

    @property
    def left(self) -> bool:
        """Whether the person said it twice."""
        return self.flag.count > 1


def ask_to_stop(run: Run, stage: str) -> None:
    """Ask a running stage to save and leave: a request in the run directory, and one TERM to its supervisor.

    The file reaches a supervisor that is only just starting; the signal reaches one that runs at once.
    """
    run.request(run.stop_file, f"by pid {os.getpid()}")
    holder = run.holder(stage)
    if holder is not None:
        holder.terminate()


def tell(
    run: Run, stage: str, end: Mapping[str, Any] | None, seconds: float, log: Path | None, console: Console
) -> Exit:
    """Say how the stage ended and what to do next; returns its exit code."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True, style=style)

    if end is None and stages.load(stage).missing(run) is None:
        say(f"{stage:9} done: {stages.load(stage).progress(run).words}")
        return Exit.DONE
    if end is None:
        say(f"{stage:9} ended without a word of its supervisor; its log: {log or run.jobs / stage}", "red")
        if log is not None and log.exists():
            lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith("submitit ")]
            say("\n".join(lines[-15:]), "red")
        say(f"to try again: {run.resume_command}")
        return Exit.CRASHED
    again = [e["cause"] for e in run.read_events(stage, "retried") if e["job_id"] == end["job_id"]]
    if again:
        say(f"{stage:9} went on by itself after: {', '.join(again)}")
    if end["event"] == "done":
        from slurm.show.follow import clock

        say(f"{stage:9} done in {clock(seconds)}: {stages.load(stage).progress(run).words}")
        return Exit.DONE
    if end["event"] in ("stopped", "cancelled", "preempted"):
        say(f"{stage:9} {end['event']}: {stages.load(stage).progress(run).words}")
        say(f"to go on: {run.resume_command}")
        return Exit.STOPPED
    say(f"{stage:9} failed ({end.get('cause', 'unknown')}): {end.get('message', '').rstrip()}", "red")
    say(f"logs: {run.jobs / stage}")
    say(f"once that is mended: {run.resume_command}")
    return Exit(end["exit_code"])
