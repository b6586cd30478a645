"""Check limits of the cluster before the first job of a chain is submitted.

Otherwise Slurm would refuse a job in the middle of the chain. Asked are: how large arrays may be (`scontrol show
config`, which is read anyway) and, if the cluster enforces limits, how many jobs the QOS or the association allows a
user (`sacctmgr`). What cannot be asked is not checked: sbatch decides.
"""

from __future__ import annotations

import getpass
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from slurm.query.job_states import cluster_settings, parse_key_values, run_slurm_command

_TIMEOUT_S = 10.0


def check_limits(config: Config, planned: Mapping[str, Sequence[int]]) -> None:
    """Raise UserError if Slurm would refuse one of the planned jobs.

    `planned`: by stage, how many tasks each submission has; 1 for a job that is no array.
    """
    if not any(map(sum, planned.values())):
        return
    settings = cluster_settings()
    _check_arrays(config, planned, settings)
    if "limits" in settings.get("AccountingStorageEnforce", "").lower():
        _check_number(config, planned, settings.get("ClusterName", ""))


def _check_arrays(config: Config, planned: Mapping[str, Sequence[int]], settings: Mapping[str, str]) -> None:
    limits = {"MaxArraySize": settings.get("MaxArraySize", "")}
    if found := re.search(r"max_array_tasks=(\d+)", settings.get("SchedulerParameters", "")):
        limits["SchedulerParameters: max_array_tasks"] = found[1]
    for name, text in limits.items():
        for stage, sizes in planned.items():
            if text.isdigit() and max(sizes, default=0) > int(text) > 0:
                if config.sweep is not None and STAGES[stage].is_per_point:
                    raise UserError(
                        f"sweep: an array of {max(sizes)} points; on this cluster an array has at most {text} tasks "
                        f"({name}): use fewer"
                    )
                raise UserError(
                    f"stages.{stage}.tasks: {max(sizes)}; on this cluster an array has at most {text} tasks ({name}): "
                    f"set stages.{stage}.tasks={text} or less"
                )


def _check_number(config: Config, planned: Mapping[str, Sequence[int]], cluster: str) -> None:
    """Refuse more jobs than the QOS, or if it has no limit the association, allows a user to have in the queue."""
    columns = "DefaultAccount,Account,Partition,DefaultQOS,MaxSubmitJobs"
    associations = _show("user", getpass.getuser(), "withassoc", "where", f"cluster={cluster}", columns=columns)
    of_qos = dict(_show("qos", columns="Name,MaxSubmitJobsPerUser"))
    numbers, limits, parts = Counter[tuple[str, str]](), dict[tuple[str, str], int](), list[str | None]()
    for stage, sizes in planned.items():
        wanted = {name: _asked_for(config, stage, name) for name in ("account", "partition", "qos")}
        for default, account, partition, default_qos, limit in associations if sum(sizes) else ():
            if account != (wanted["account"] or default) or partition not in ("", wanted["partition"]):
                continue
            qos = wanted["qos"] or default_qos or "normal"
            key, text = ("QOS", qos), of_qos.get(qos, "")
            # the limit of an account does not count jobs of the user's own associations with partitions
            if not text and not any(row[1] == account and row[2] for row in associations):
                key, text = ("account", account), limit
            if text.isdigit():
                numbers[key] += sum(sizes)
                limits[key] = int(text)
                parts.append(wanted["partition"])
            break
    if not limits:
        return
    shown = run_slurm_command(
        "squeue", "--me", "-h", "-r", "-t", "PENDING,RUNNING,SUSPENDED", "-o", "%q|%a", timeout_s=_TIMEOUT_S
    )
    queued = Counter[tuple[str, str]]()
    for line in (shown or "").splitlines():
        qos, _, account = line.partition("|")
        queued.update([("QOS", qos), ("account", account)])
    for key, number in numbers.items():
        if queued[key] + number > limits[key] and not any(map(_has_qos, parts)):
            each = ", ".join(f"{stage} {sum(sizes)}" for stage, sizes in planned.items() if sizes)
            raise UserError(
                f"this needs {number} more jobs ({each}; each task of an array is one). {key[0]} {key[1]} allows you "
                f"{limits[key]} jobs at a time (MaxSubmitJobs), and {queued[key]} are in the queue. Wait until fewer "
                "are, or ask for fewer: stages.shard.tasks=1, fewer points of a sweep"
            )


def _asked_for(config: Config, stage: str, name: str) -> str | None:
    """Return the account, partition or QOS that a stage's job gets: the config's, or that of the shell (SBATCH_*)."""
    site = config.resolve_site(stage)
    found = getattr(site, name) or site.sbatch.get(name) or os.environ.get(f"SBATCH_{name.upper()}")
    return None if found is None else str(found)


def _has_qos(partition: str | None) -> bool:
    """Whether a partition (None: any) has a QOS of its own, whose limits count in the place of the others."""
    shown = run_slurm_command("scontrol", "--oneliner", "show", "partition", *([partition] if partition else []))
    return any(parse_key_values(line).get("QoS", "N/A") != "N/A" for line in (shown or "QoS=unknown").splitlines())


def _show(*words: str, columns: str) -> list[list[str]]:
    """Rows of `sacctmgr show`; none if it is not there, or not allowed."""
    shown = run_slurm_command("sacctmgr", "-n", "-P", "show", *words, f"format={columns}", timeout_s=_TIMEOUT_S)
    rows = [line.split("|") for line in (shown or "").splitlines()]
    return [row for row in rows if len(row) == columns.count(",") + 1]
