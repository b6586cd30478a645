"""`status` and `report`: how a run stands and what it came to, read from its directory alone."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline import stages
from pipeline.checkpoint_files import saved_steps
from pipeline.run import Run
from pipeline.stages.evaluate import read_result
from slurm.chain import last_ending, resume_command
from slurm.cluster import jobs_of, uses_slurm
from slurm.follow import clock
from slurm.sweeps import print_points


def state(run: Run, stage: str, events: list[dict[str, Any]]) -> str:
    """One word for a stage: done, running, stopped, failed, cancelled or waiting."""
    if run.holder(stage) is not None:
        return "running"
    if stages.load(stage).missing(run) is None:
        return "done"
    end = last_ending(events)
    if end is None:
        # started and neither ended nor held: its supervisor was killed with everything else
        return "died" if any(e["event"] == "started" for e in events) else "waiting"
    return "incomplete" if end["event"] == "done" else str(end["event"])


def in_slurm(run: Run) -> dict[str, tuple[str, str]]:
    """For each stage with jobs that Slurm still knows as pending, running or dead: a word, and the job with reason."""
    words: dict[str, tuple[str, str]] = {}
    for job in jobs_of(run) if uses_slurm(run) else ():
        if job.state.dead:
            words[job.stage] = ("never", f"job {job.job_id} waits for what cannot happen any more ({job.state.reason})")
        elif job.state.active:
            where = job.state.nodes or job.state.reason
            words[job.stage] = (job.state.state.lower(), f"job {job.job_id} {where}".rstrip())
    return words


def print_status(run: Run, console: Console) -> None:
    """A table of the stages, and why one is not done."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("stage", "state", "progress", "attempts", "time"):
        table.add_column(column)
    reasons = []
    jobs = in_slurm(run)
    for stage in stages.STAGES:
        events = run.read_events(stage)
        word = state(run, stage, events)
        progress = stages.load(stage).progress(run)
        if stage in jobs and word != "done":
            word, job = jobs[stage]
            progress = f"{progress}  {job}"
        seconds = sum(e.get("seconds", 0.0) for e in events if e["event"] in ("done", "failed", "stopped", "cancelled"))
        attempts = sum(e["event"] == "started" for e in events)
        table.add_row(stage, word, progress, str(attempts), clock(seconds))
        end = last_ending(events)
        if word == "failed" and end is not None:
            reasons.append(f"{stage} failed ({end.get('cause')}): {str(end.get('message', '')).rstrip()}")
    console.print(f"run {run.name}" + (f"  code {run.commit[:12]}" if run.commit else ""), highlight=False)
    console.print(table)
    for reason in reasons:
        console.print(reason, highlight=False, markup=False, soft_wrap=True, style="red")
    stuck = any(word == "never" for word, _ in jobs.values())
    idle = (stuck or not jobs) and not any(run.holder(stage) for stage in stages.STAGES)
    if idle and any(stages.load(stage).missing(run) for stage in stages.STAGES):
        console.print(f"to go on: {resume_command(run)}", highlight=False, soft_wrap=True)


def outcome(run: Run) -> str:
    """What the newest evaluation says, against the unigram figure."""
    for step in saved_steps(run.checkpoints):
        result = read_result(run, step)
        if result is not None:
            ratio = result["bits_per_byte"] / (result["unigram_bits_per_byte"] or float("nan"))
            return (
                f"step {step}: held-out loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, "
                f"{result['bits_per_byte']:.3f} bits per byte, {ratio:.2f} × the unigram "
                f"{result['unigram_bits_per_byte']:.3f}"
            )
    return "not evaluated yet"


def print_report(run: Run, console: Console) -> None:
    """Attempts with their ends, then every evaluation."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("stage", "attempt", "ranks", "started", "time", "end"):
        table.add_column(column)
    for stage in stages.STAGES:
        events = run.read_events(stage)
        for number, started in enumerate((e for e in events if e["event"] == "started"), 1):
            end = last_ending([e for e in events if e.get("attempt") == started["attempt"]])
            word = "no word of its end" if end is None else end["event"]
            if end is not None and end.get("cause"):
                word += f" ({end['cause']})"
            time = clock(end["seconds"]) if end else "-"
            table.add_row(stage, str(number), str(started["ranks"]), started["time"][:19], time, word)
    console.print(f"run {run.name}" + (f"  code {run.commit[:12]}" if run.commit else ""), highlight=False)
    console.print(table)
    if run.config.sweep is not None:
        print_points(run, console)
        return
    lost = sum(len(e.get("steps", ())) for e in run.read_events("train") if e["event"] == "lost_work")
    steps = stages.load("train").progress(run)
    console.print(f"training: {steps}; {lost} steps were lost and done again", highlight=False)
    console.print(outcome(run), highlight=False, soft_wrap=True)
