"""Describe the result of a drill: a page in Markdown, which is also printed in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.base.text import format_duration
from pipeline.config.types import parse_time_limit
from slurm.drill.drill import DrillResult, FaultResult
from slurm.drill.faults import FAULTS
from slurm.query.slurm_commands import parse_key_values, read_slurm_config, run_slurm_command

SIGNAL_MARGIN_S = 30
"""Seconds that are added to the time of a step and a save, for the recommended `site.signal_s`."""
_CONTINUATIONS = {
    "retried": "restarted in place",
    "requeued": "requeued",
    "handed_over": "handed over to the next job",
    "resumed": "resumed by the drill",
}


def format_page(result: DrillResult) -> str:
    """Return the page of a drill, in Markdown."""
    return "\n".join(_list_lines(result)) + "\n"


def _list_lines(result: DrillResult) -> Iterator[str]:
    """Yield the lines of the page."""
    run = result.run
    yield f"# Drill of {run.name}"
    yield ""
    yield f"**{describe_verdict(result)}**"
    yield ""
    yield f"- with faults: `{run.path}`, digest of step {result.step}: `{result.digest[:16]}`"
    yield f"- undisturbed: `{result.reference.path}`, digest of step {result.step}: `{result.reference_digest[:16]}`"
    yield ""
    yield "| fault | recorded cause | how it continued | seconds to the next step | steps repeated |"
    yield "| --- | --- | --- | ---: | ---: |"
    for fault in result.faults:
        yield _format_row(fault)
    yield ""
    for fault in result.faults:
        description = (FAULTS[fault.name].cause.__doc__ or "").splitlines()[0].rstrip(".")
        yield f"- **{fault.name}:** {'; '.join([description, *fault.notes])}."
    for name, reason in result.skipped.items():
        yield f"- **{name}** was not caused: {reason}."
    yield ""
    yield "## Settings"
    yield ""
    yield from (f"- {line}" for line in recommend_settings(result))


def describe_verdict(result: DrillResult) -> str:
    """Return the result in one sentence."""
    if not result.is_equal:
        return f"The states of step {result.step} differ: the training did not survive the faults exactly."
    unexpected = [fault.name for fault in result.faults if not fault.is_as_expected]
    if unexpected:
        return f"The states are equal, but not every fault was handled as expected: {', '.join(unexpected)}."
    count = len(result.faults)
    if not count:
        return "No fault was caused."
    return f"After {count} fault{'s' * (count != 1)}, the state is equal to that of the undisturbed copy, to the bit."


def _format_row(fault: FaultResult) -> str:
    """Return the row of a fault."""
    cause = fault.recorded_cause or "none"
    if fault.recorded_cause != fault.expected_cause:
        cause += f" (expected: {fault.expected_cause})"
    seconds = "-" if fault.seconds is None else f"{fault.seconds:.1f}"
    if fault.queue_s >= 1:
        seconds += f" ({fault.queue_s:.1f} in the queue)"
    continuation = _CONTINUATIONS.get(fault.continuation, "it did not continue")
    return f"| {fault.name} | {cause} | {continuation} | {seconds} | {fault.repeated_steps} |"


def recommend_settings(result: DrillResult) -> Iterator[str]:
    """Yield what the drill has shown about the settings of the cluster, and the recommended values."""
    site = result.run.config.resolve_site("train")
    needed_s = math.ceil(result.longest_step_s + result.longest_save_s + SIGNAL_MARGIN_S)
    yield (
        f"the longest step took {result.longest_step_s:.1f} s and the longest save {result.longest_save_s:.1f} s, so a "
        f"stop needs about {needed_s} s, with a margin of {SIGNAL_MARGIN_S} s"
    )
    if not result.on_slurm:
        return
    if site.signal_s >= needed_s:
        yield f"`site.signal_s: {site.signal_s}` is long enough"
    else:
        yield f"`site.signal_s: {site.signal_s}` is too short: set `site.signal_s: {needed_s}`"
    kill_wait = read_slurm_config().get("KillWait", "").split(" ")[0]
    requeued = next((fault for fault in result.faults if fault.name == "requeue"), None)
    if requeued is not None:
        kept = "saved" if any("had saved" in note for note in requeued.notes) else "did not save"
        yield (
            f"after `scontrol requeue`, the ranks {kept} before Slurm ended the job"
            + (f" (KillWait: {kill_wait} s)" if kill_wait else "")
        )
        if requeued.continuation != "requeued":
            yield "the job was not requeued: set `site.requeue: false`, so that a successor job continues"
    partition = site.partition
    if partition:
        fields = parse_key_values(run_slurm_command("scontrol", "show", "partition", "--oneliner", partition) or "")
        grace = fields.get("GraceTime", "")
        if grace.isdigit() and int(grace) > 0:
            verdict = "enough" if int(grace) >= needed_s else "too short for a save"
            yield f"a preempted job has {grace} s (GraceTime of {partition}), which is {verdict}: set " + (
                f"`recovery.grace_s: {grace}`"
            )
    limit = next((fault for fault in result.faults if fault.name == "time-limit"), None)
    if limit is not None and limit.is_as_expected:
        hours = format_duration(parse_time_limit(result.run.config.stages.train.time))
        yield f"the time limit of a job ({hours}) only interrupts the training"
