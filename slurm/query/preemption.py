"""Determine whether Slurm requeues a preempted job that exits in its grace period.

This depends on the controller's version:

- Until 23.11, the job has ended. To continue, it must request a requeue (`scontrol requeue`) before it exits.
- Since 24.05, slurmctld requeues the job, whatever its exit code, if PreemptMode is REQUEUE and the job may be
  requeued. It marks the job at the start of the grace period, and requeues a marked job when the job ends (commit
  a689104d15, GRACE_PREEMPT in proc_req.c).

Only an exit of the job removes the mark. The mark remains after `scontrol requeue`, or if Slurm requeues the job at the
end of the grace period. The next exit of the job, maybe hours later, then causes one surplus requeue (ticket 25682,
fixed during 26.05). Therefore a job should exit in its grace period. Because of a surplus requeue, a job may also start
after its stage has ended (:func:`requeues_preempted_jobs`).

However, each exit in a grace period counts as a failed launch. The fifth exit (MaxBatchRequeue) leaves the job held
forever (`launch failure limit exceeded requeued held`; seen on 24.11). A job therefore exits only a few times without
`scontrol requeue`. Later it requests the requeue: one surplus start is better than a job that is held forever.

    python -m slurm.query.preemption JOB    # for batch scripts: exits with 1 if this job must request a requeue
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
"""How many more exits MaxBatchRequeue must allow: this exit, and the exit that causes a surplus requeue."""


def controller_version(config: Mapping[str, str]) -> tuple[int, ...]:
    """Return the controller's version from its configuration, such as (24, 11); () if it has no version."""
    return tuple(int(part) for part in re.findall(r"\d+", config.get("SLURM_VERSION", ""))[:2])


def should_exit_to_requeue(config: Mapping[str, str], mode: str, info: JobInfo) -> bool:
    """Return True if a job should simply exit in order to be requeued; False if it must request the requeue.

    Args:
        config: the controller's configuration.
        mode: the PreemptMode that applies to the job.
        info: the job.
    """
    limit = config.get("MaxBatchRequeue", "5")  # 5 is Slurm's default
    # The exit number MaxBatchRequeue leaves the job held, so one exit fewer is possible. Some restarts had other causes
    # than an exit in a grace period; counting all of them is on the safe side.
    remaining_exits = (int(limit) if limit.isdigit() else 0) - 1 - info.restarts
    is_requeue_mode = set(mode.upper().split(",")) - {"GANG"} == {"REQUEUE"}
    will_be_requeued = info.is_preempted and info.may_requeue and is_requeue_mode
    is_new_enough = controller_version(config) >= REQUEUES_SINCE
    return will_be_requeued and is_new_enough and remaining_exits >= MIN_REMAINING_EXITS


def is_requeued_on_exit(info: JobInfo, exclude: str | None) -> bool:
    """Return True if Slurm requeues this job when it exits. The result is False if the controller does not respond.

    Args:
        info: the job.
        exclude: the new list of excluded nodes; None for no change. With a new list the result is False, because the
            list can only be changed after `scontrol requeue`.
    """
    if not info.is_preempted or exclude is not None:
        return False
    config = read_slurm_config()
    return should_exit_to_requeue(config, _read_preempt_mode(config, info), info)


def requeues_preempted_jobs() -> bool:
    """Return True if this controller requeues a preempted job that exits; False if the controller does not respond.

    If so, a surplus requeue may start a job after its stage has ended.
    """
    return controller_version(read_slurm_config()) >= REQUEUES_SINCE


def _read_preempt_mode(config: Mapping[str, str], info: JobInfo) -> str:
    """Return the PreemptMode of the job's partition or QOS (slurm.conf(5), PreemptType).

    The result is "" if the cluster preempts no jobs or Slurm does not respond.
    """
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
    job_info = read_job_info(sys.argv[1])
    sys.exit(0 if job_info is not None and is_requeued_on_exit(job_info, None) else 1)
