"""Whether Slurm requeues a preempted job that exits in its grace period.

The answer depends on the controller's version:

- Until 23.11 such a job has ended. To continue, it must request that (`scontrol requeue`).
- Since 24.05 slurmctld requeues it, whatever its exit code, if PreemptMode is REQUEUE and the job may be requeued. It
  marks the job at the start of the grace period, and requeues a marked job at its end (commit a689104d15,
  GRACE_PREEMPT in proc_req.c).

Only an end of the job by itself removes the mark. After `scontrol requeue`, or Slurm's own requeue at the end of the
grace period, the mark remains: the next end of the job, maybe hours later, causes one surplus requeue (ticket 25682,
fixed during 26.05). Therefore a job in its grace period should exit by itself, and a stage must recognize a start after
its end (:func:`requeues_preempted_jobs`).

However, each such exit counts as a failed launch. The fifth one (MaxBatchRequeue) leaves the job held forever (`launch
failure limit exceeded requeued held`; seen on 24.11). So a job exits by itself only a few times, and then requests to
be requeued: one surplus start at the end is better than none.

    python -m slurm.query.preemption JOB    # for batch scripts: fails if this job must request a requeue
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from slurm.query.current_job import JobInfo, read_job_info
from slurm.query.slurm_commands import parse_key_values, read_slurm_config, run_slurm_command

REQUEUES_SINCE = (24, 5)
"""From this version on, Slurm requeues a preempted job that exits in its grace period."""
MIN_REMAINING_EXITS = 2
"""How many such exits must remain: this one, and the last one in case it causes the surplus requeue."""


def controller_version(config: Mapping[str, str]) -> tuple[int, ...]:
    """Return the version of the controller, such as (24, 11). `scontrol` itself may have another version."""
    return tuple(int(part) for part in re.findall(r"\d+", config.get("SLURM_VERSION", ""))[:2])


def should_exit_to_requeue(config: Mapping[str, str], mode: str, info: JobInfo) -> bool:
    """Return True if a job should exit in order to be requeued, rather than request it.

    Args:
        config: the controller's configuration.
        mode: the PreemptMode that applies to the job.
        info: the job.
    """
    limit = config.get("MaxBatchRequeue", "5")
    # counts every restart as such an exit, although some were not; this errs on the safe side
    remaining = (int(limit) if limit.isdigit() else 0) - 1 - info.restarts
    will_be_requeued = info.is_preempted and info.may_requeue and set(mode.upper().split(",")) - {"GANG"} == {"REQUEUE"}
    is_new_enough = controller_version(config) >= REQUEUES_SINCE
    return will_be_requeued and is_new_enough and remaining >= MIN_REMAINING_EXITS


def is_requeued_on_exit(info: JobInfo, exclude: str | None) -> bool:
    """Return :func:`should_exit_to_requeue` for this job and its controller; False if it does not respond.

    Args:
        info: the job.
        exclude: the new list of excluded nodes, which can only be changed after a requested requeue; None for no
            change.
    """
    if not info.is_preempted or exclude is not None:
        return False
    config = read_slurm_config()
    return should_exit_to_requeue(config, _read_preempt_mode(config, info), info)


def requeues_preempted_jobs() -> bool:
    """Return True if this controller may requeue a job that has ended permanently, because it was preempted before."""
    return controller_version(read_slurm_config()) >= REQUEUES_SINCE


def _read_preempt_mode(config: Mapping[str, str], info: JobInfo) -> str:
    """Return the PreemptMode of the job's partition or QOS (slurm.conf(5), PreemptType)."""
    preempt_type = config.get("PreemptType")
    if preempt_type == "preempt/partition_prio":
        output = run_slurm_command("scontrol", "--oneliner", "show", "partition", info.partition)
        return parse_key_values(output or "").get("PreemptMode", "")
    if preempt_type == "preempt/qos":
        command = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", info.qos, "format=PreemptMode")
        mode = (run_slurm_command(*command) or "").strip()
        return config.get("PreemptMode", "") if mode == "cluster" else mode
    return ""


if __name__ == "__main__":
    own_job = read_job_info(sys.argv[1])
    sys.exit(0 if own_job is not None and is_requeued_on_exit(own_job, None) else 1)
