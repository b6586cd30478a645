"""Slurm's commands: run them, parse what they print, and recognize messages that have no machine-readable form.

Every call has a time limit, because the commands block while the controller is down. If a command prints columns or
`Key=value` fields, or if its exit code is sufficient, no message is parsed. Otherwise the messages of the command are
matched with the patterns at the end of this module.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

from pipeline.base.errors import UserError

TIMEOUT_S = 30
"""The time limit of a command, unless the caller sets another one."""
INTERACTIVE_TIMEOUT_S = 10.0
"""The time limit of a command for which a user waits. After this time, the controller counts as not responding."""
NOT_RESPONDING = "no Slurm controller answers here"
"""The beginning of the error message if the controller does not respond. Also the reason of jobs whose state is unknown
because the controller does not respond (slurm/query/job_states.py)."""
_USER_VARIABLES = ("SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_", "SLURM_TIME_FORMAT")
"""Prefixes of environment variables with which users filter and format the output of Slurm's commands. These variables
are not passed to the commands, because the output is parsed."""
_RETRY_DELAY_S = 30.0
"""The pause before a controller that did not respond is queried for its settings again."""


# -- running -----------------------------------------------------------------------------------------------------------


def run_slurm_command(
    *command: str, timeout_s: float | None = None, nothing_found: re.Pattern[str] | None = None
) -> str | None:
    """Return the output of a Slurm command; None if the command fails or does not end in time.

    Args:
        command: the command and its arguments.
        timeout_s: the time limit; `TIMEOUT_S` if None.
        nothing_found: matches the error message with which the command reports that nothing was found. If it matches,
            the command counts as successful.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(_USER_VARIABLES)}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S if timeout_s is None else timeout_s, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    is_empty = nothing_found is not None and nothing_found.search(result.stderr) is not None
    return result.stdout if result.returncode == 0 or is_empty else None


def is_slurm_responding() -> bool:
    """Return True if a Slurm controller responds, False if this machine belongs to no Slurm cluster.

    Raises:
        UserError: if this machine belongs to a cluster, but the controller does not respond. An error is raised so that
            the caller does not run the stages on this machine instead.
    """
    if shutil.which("sbatch") is None:
        return False
    try:
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=INTERACTIVE_TIMEOUT_S)
        is_up = CONTROLLER_UP.search(ping.stdout) is not None
        is_down = not is_up and CONTROLLER_DOWN.search(ping.stdout) is not None
    except OSError:
        return False
    except subprocess.TimeoutExpired:
        is_up = False
        is_down = True
    if is_down:
        raise UserError(
            "slurm.not_responding",
            f"{NOT_RESPONDING} (scontrol ping): try again later, or use --executor local to train on this machine",
        )
    return is_up  # on a machine that has Slurm's commands but no cluster, scontrol reports no controller


# -- the cluster -------------------------------------------------------------------------------------------------------

_settings_by_conf: dict[str | None, dict[str, str]] = {}
"""Cached settings of a cluster, by the value of SLURM_CONF."""
_retry_times: dict[str | None, float] = {}
"""When a controller that did not respond may be queried again, by the value of SLURM_CONF."""


def cluster_name() -> str | None:
    """Return the name of the local cluster; None if the controller does not respond.

    In a job, the name is taken from the environment, and the controller is not queried.

    Raises:
        UserError: if this process is not in a job, and the environment sends Slurm's commands to another cluster.
    """
    if os.environ.get("SLURM_JOB_ID") and (name := os.environ.get("SLURM_CLUSTER_NAME")):
        return name
    require_single_cluster(os.environ)
    return cluster_settings().get("ClusterName")


def require_single_cluster(env: Mapping[str, str]) -> None:
    """Raise UserError if variables in `env` send Slurm's commands to a cluster other than the local cluster."""
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        value = env.get(name, "")
        if value not in ("", env.get("SLURM_CLUSTER_NAME")):
            raise UserError(
                "slurm.other_cluster",
                f"{name}={value}: all jobs of a run must be on the local cluster (sbatch -M is not supported). Unset "
                f"the variable; to use the cluster {value}, log in to it",
            )


def cluster_settings() -> dict[str, str]:
    """Return the settings of the local cluster (slurm.conf); empty if the controller does not respond.

    The settings are queried once and then cached. If the controller does not respond, it is not queried again for
    `_RETRY_DELAY_S`. A caller that polls therefore does not wait for the time limit at each poll.
    """
    conf = os.environ.get("SLURM_CONF")
    if conf not in _settings_by_conf and time.monotonic() >= _retry_times.get(conf, 0.0):
        settings = read_slurm_config(INTERACTIVE_TIMEOUT_S)
        if settings.get("ClusterName"):
            _settings_by_conf[conf] = settings
        else:
            _retry_times[conf] = time.monotonic() + _RETRY_DELAY_S
    return _settings_by_conf.get(conf, {})


def read_slurm_config(timeout_s: float | None = None) -> dict[str, str]:
    """Return the settings of slurm.conf, and the controller's version; empty if the controller does not respond."""
    return parse_slurm_config(run_slurm_command("scontrol", "show", "config", timeout_s=timeout_s) or "")


# -- parsing -----------------------------------------------------------------------------------------------------------


def parse_key_values(text: str) -> dict[str, str]:
    """Parse the `Key=value` fields of one job, node or partition in the output of `scontrol show`.

    If a key occurs several times, its first value counts. Slurm prints the fields whose text users choose (comment,
    command, paths) last. Therefore this text cannot replace the value of another field.
    """
    return dict(reversed(re.findall(r"(?<!\S)([^\s=]+)=(\S*)", text)))


def parse_slurm_config(text: str) -> dict[str, str]:
    """Parse the output of `scontrol show config`. A name may have an index, such as `SlurmctldHost[0]`."""
    return dict(re.findall(r"^(\w+(?:\[\d+\])?)[^\S\n]*=[^\S\n]*(.*?)[^\S\n]*$", text, re.MULTILINE))


def parse_slurm_time(text: str) -> float:
    """Convert a time that Slurm prints, in local time, to seconds since 1970; 0 for `Unknown`."""
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return 0.0


# -- messages ----------------------------------------------------------------------------------------------------------
#
# "Seen" in the docstring of a pattern lists the versions that print the message. If another version words the message
# differently, the pattern does not match. The reported cause is then less specific, but not wrong.

SRUN_TASK = re.compile(r"srun: error: (\S+): tasks? (\d+)[-\d,]*: (.*)")
"""How a task of a step ended: host, task number and description. If several tasks ended, the number of the first task.

Seen: Slurm 22.05, 24.11."""
SRUN_EXITED = re.compile(r"exit code (\d+)")
"""The exit code of a task, in the description of `SRUN_TASK`. If a signal killed the task, the description has the name
of the signal instead (`SIGNAL_BY_NAME`).

Seen: Slurm 22.05, 24.11."""
SRUN_OUT_OF_MEMORY = re.compile("Out Of Memory")
"""srun: the kernel killed a task because it was out of memory.

Seen: Slurm's documentation only."""
STEPD_OUT_OF_MEMORY = re.compile(r"slurmstepd: error: .*oom[-_]kill event", re.IGNORECASE)
"""slurmstepd: the kernel killed a task because it was out of memory; newer versions write an underscore.

Seen: Slurm's documentation only."""
SRUN_ERROR = re.compile("error: ")
"""A line of srun that explains why nothing was started.

Seen: Slurm 22.05, 24.11."""
SBATCH_ERROR = re.compile("^sbatch: (?:error: |fatal: )?(?!Try )(.+)$", re.MULTILINE)
"""Why sbatch refused a job: `error: invalid partition …`, `fatal: …`, `unrecognized option …`. The hint `Try …` does
not match.

Seen: Slurm 22.05, 24.11."""
SBATCH_NO_REPLY = re.compile("timed out|nable to contact|Zero Bytes|endpoint|nection (?:fail|re)|shutdown|not respond")
"""sbatch received no reply (`Socket timed out on send/recv operation`, `Unable to contact slurm controller (connect
failure)`). The controller may have accepted the job. The other alternatives match further messages of slurm_errno.c.
`nable` and `nection` lack their first letters, so that they match whether the word begins with a capital or not.

Seen: Slurm 22.05."""
CONTROLLER_UP = re.compile(" is UP")
"""`scontrol ping`: a controller responds.

Seen: Slurm 22.05, 24.11."""
CONTROLLER_DOWN = re.compile(" is DOWN")
"""`scontrol ping`: a controller does not respond.

Seen: Slurm 22.05."""
NO_SUCH_JOB = re.compile("Invalid job id")
"""squeue was queried for a single job that the controller does not have.

Seen: Slurm 22.05 (its library), 14.11."""
DEPENDENCY_NEVER_SATISFIED = re.compile("DependencyNeverSatisfied")
"""The reason (squeue, %r) of a job that stays pending forever.

Seen: Slurm 22.05, 24.11."""
JOB_HELD = re.compile("^JobHeld(User|Admin)")
"""The reason of a job that is pending until its user, or an administrator, releases it.

Seen: Slurm 22.05."""
MPIRUN_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on\s+signal (\d+)")
"""mpirun of Open MPI: a signal killed a rank. Groups: rank, host, number of the signal.

Seen: Open MPI 4.1.4, 5.0.11."""
MPIRUN_EXITED = re.compile(r"Process name: \[.*,(\d+)\]\s+Exit code:\s+(\d+)")
"""mpirun of Open MPI: a rank exited. Groups: rank and exit code.

Seen: Open MPI 4.1.4, 5.0.11."""
HYDRA_EXITED = re.compile(r"PID (\d+) RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)")
"""mpirun of MPICH: a process exited, or a signal killed it. Groups: PID, host, and exit code or number of the signal.

Seen: MPICH 4.0.2, 5.0.2."""

SIGNAL_BY_NAME = {signal.strsignal(number) or "": number for number in range(1, 32)}
"""Number of a signal, by the name that srun prints if the signal killed a task. srun uses the names of the C library
(seen: Slurm 22.05 with glibc 2.36)."""
