"""What becomes of a preempted job that ends by itself in its grace time: that depends on the controller's version.

Until 23.11 it has ended, and whoever wants it to go on asks for that (`scontrol requeue`). Since 24.05 slurmctld puts
it back itself, whatever it left with, where PreemptMode is REQUEUE and the job may be requeued: it marks the job at the
start of the grace time, and the end of a marked job is a requeue (commit a689104d15, GRACE_PREEMPT in proc_req.c). Only
that end takes the mark away. `scontrol requeue`, or Slurm's own at the end of the grace time, leaves it: then the job's
next end, maybe hours later, is one requeue too many (ticket 25682, mended in the course of 26.05). So a job in its
grace time had better just leave, and a stage has to know when it is started after its end (:func:`puts_back`).

Each such end counts as a failed launch, though, and the fifth one (MaxBatchRequeue) leaves the job held for ever
(`launch failure limit exceeded requeued held`; seen on 24.11). So a job leaves by itself a few times only, and asks to
be put back from then on: a start too many at its end is better than none.

    python -m slurm.query.preemption JOB    for a template: fails where that job has to ask
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from slurm.query.current_job import JobInfo, read_job_info
from slurm.query.job_states import parse_key_values, read_slurm_config, run_slurm_command

SINCE = (24, 5)
"""From this version on Slurm puts back what ends in its grace time."""
NEEDED = 2
"""How many such ends must be left: this one, and the last one, if that is to be the requeue too many."""


def controller_version(config: Mapping[str, str]) -> tuple[int, ...]:
    """The controller's, as (24, 11): that of `scontrol` itself may be another one."""
    return tuple(int(part) for part in re.findall(r"\d+", config.get("SLURM_VERSION", ""))[:2])


def should_exit_to_requeue(config: Mapping[str, str], mode: str, facts: JobInfo) -> bool:
    """Whether a job that is to go on had better end than ask to be put back. `mode`: how it would be preempted."""
    allowed = config.get("MaxBatchRequeue", "5")
    left = (int(allowed) if allowed.isdigit() else 0) - 1 - facts.restarts  # some of them were no such ends: let it be
    requeued = facts.is_preempted and facts.may_requeue and set(mode.upper().split(",")) - {"GANG"} == {"REQUEUE"}
    return requeued and controller_version(config) >= SINCE and left >= NEEDED


def is_requeued_on_exit(facts: JobInfo, exclude: str | None) -> bool:
    """:func:`leaves_by_itself`, of this job and its controller; False where that does not answer.

    `exclude`: what its list of excluded nodes must become, which can only be changed once it was put back.
    """
    if not facts.is_preempted or exclude is not None:
        return False
    config = read_slurm_config()
    return should_exit_to_requeue(config, _mode(config, facts), facts)


def requeues_preempted_jobs() -> bool:
    """Whether this controller may put back a job that has ended for good, because it was preempted once."""
    return controller_version(read_slurm_config()) >= SINCE


def _mode(config: Mapping[str, str], facts: JobInfo) -> str:
    """The PreemptMode of a job: its partition's, or its QOS's (slurm.conf(5), PreemptType)."""
    by = config.get("PreemptType")
    if by == "preempt/partition_prio":
        return parse_key_values(
            run_slurm_command("scontrol", "--oneliner", "show", "partition", facts.partition) or ""
        ).get("PreemptMode", "")
    if by == "preempt/qos":
        listing = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", facts.qos, "format=PreemptMode")
        mode = (run_slurm_command(*listing) or "").strip()
        return config.get("PreemptMode", "") if mode == "cluster" else mode
    return ""


if __name__ == "__main__":
    asked = read_job_info(sys.argv[1])
    sys.exit(0 if asked is not None and is_requeued_on_exit(asked, None) else 1)
