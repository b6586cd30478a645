"""Faults that a user may cause in a training of their own.

Each function returns the cause that the run must record (the name of an exit code in lower case).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.catalog import checkpoint_name, find_newest_step, list_checkpoint_steps
from pipeline.config.types import parse_time_limit
from slurm.drill.target import FaultTarget, RunTarget

FILE_SIZE_LIMIT = 1 << 12
"""Files of a rank may not become larger than this number of bytes, while the disk counts as full."""
SAVE_TIMEOUT_S = 86400.0
"""How long to wait for a checkpoint."""
SAVER_START_S = 0.5
"""How long a saver may take until it has made the directory of a checkpoint."""
MIN_TIME_LEFT_S = 90
"""The shortened time limit of a job leaves at least so many seconds before Slurm's signal."""


def kill_a_rank(target: FaultTarget) -> str:
    """Kill one rank (SIGKILL)."""
    target.signal_ranks([target.random.choice(target.list_ranks())], signal.SIGKILL)
    return "crashed"


def stop_a_rank(target: FaultTarget) -> str:
    """Stop one rank (SIGSTOP), so that it no longer responds."""
    target.signal_ranks([target.random.choice(target.list_ranks())], signal.SIGSTOP)
    return "hang"


def send_a_signal(target: FaultTarget) -> str:
    """Send a signal to the job (`scancel --signal`)."""
    name = target.random.choice(["USR1", "USR2", "TERM"])
    target.run_slurm_command("scancel", f"--signal={name}", target.job_id)
    return "stopped"


def requeue_the_job(target: FaultTarget) -> str:
    """Requeue the job (`scontrol requeue`)."""
    target.run_slurm_command("scontrol", "requeue", target.job_id)
    return "requeued"


def damage_a_checkpoint(target: FaultTarget) -> str:
    """Flip a bit of the newest checkpoint or truncate one of its files, and kill the agents with their ranks."""
    file = _stop_ranks_and_choose_file(target)
    size = file.stat().st_size
    if target.random.choice([True, False]):
        os.truncate(file, size // 2)
    else:
        with open(file, "r+b") as opened:
            opened.seek(target.random.randrange(size))
            content = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([content ^ 1 << target.random.randrange(8)]))
    target.kill_agents()
    return "crashed"


def remove_a_checkpoint_file(target: FaultTarget) -> str:
    """Remove a file of the newest checkpoint, and kill the agents with their ranks."""
    _stop_ranks_and_choose_file(target).unlink()
    target.kill_agents()
    return "crashed"


def _stop_ranks_and_choose_file(target: FaultTarget) -> Path:
    """Stop all ranks, so that they save no newer checkpoint. Return a random file of the newest checkpoint."""
    folder = target.run.checkpoints_dir
    target.wait_until("two checkpoints exist", lambda: len(list_checkpoint_steps(folder)) > 1, SAVE_TIMEOUT_S)
    target.signal_ranks(target.list_ranks(), signal.SIGSTOP)
    time.sleep(SAVER_START_S)  # The savers of the ranks still complete a save that has begun.
    target.wait_until("the save in progress ends", lambda: not list(folder.glob(".tmp-*")), SAVE_TIMEOUT_S)
    step = find_newest_step(folder)
    target.damaged_steps.append(step)
    return target.random.choice(sorted((folder / checkpoint_name(step)).iterdir()))


def limit_file_sizes(target: RunTarget) -> str:
    """Let the ranks fail to write, as on a full disk: limit the size of their files (`prlimit`)."""
    target.run_on_ranks(target.list_ranks(), "sh", "-c", _LIMIT_FILE_SIZES, str(FILE_SIZE_LIMIT))
    return "storage"


_LIMIT_FILE_SIZES = """
for pid in $(pgrep -P "$(ps -o ppid= "$@" | tr -d ' ' | sort -u | paste -sd,)"); do
    prlimit --pid "$pid" --fsize="$0" || exit
done
"""
"""Shell script that limits the size of files of some ranks and of their savers, which have the same parent: the limit
is $0, and the process IDs of the ranks are the arguments."""


def shorten_the_time_limit(target: FaultTarget) -> str:
    """Shorten the time limit of the job, so that Slurm ends it soon."""
    job_info = target.run_slurm_command("scontrol", "show", "job", target.job_id)
    run_time = re.search(r"RunTime=(\S+)", job_info)
    used_s = parse_time_limit(run_time[1]) if run_time else 0
    minutes = -(-(used_s + target.run.config.site.signal_s + MIN_TIME_LEFT_S) // 60)
    target.run_slurm_command("scontrol", "update", f"JobId={target.job_id}", f"TimeLimit={int(minutes)}")
    return "time_limit"


@dataclass(frozen=True)
class DrillFault:
    """A fault that `drill` causes."""

    cause: Callable[[RunTarget], str]
    needs_slurm: bool = False
    needs_agents: bool = False
    """Whether the fault is possible only if node agents start the ranks, because only they report process IDs."""
    needs_resume: bool = False
    """Whether a user must resume the run after the fault."""


FAULTS = {
    "kill-rank": DrillFault(kill_a_rank, needs_agents=True),
    "stop-rank": DrillFault(stop_a_rank, needs_agents=True),
    "damage-checkpoint": DrillFault(damage_a_checkpoint, needs_agents=True),
    "remove-checkpoint-file": DrillFault(remove_a_checkpoint_file, needs_agents=True),
    "full-disk": DrillFault(limit_file_sizes, needs_agents=True, needs_resume=True),
    "signal": DrillFault(send_a_signal, needs_slurm=True),
    "requeue": DrillFault(requeue_the_job, needs_slurm=True),
    "time-limit": DrillFault(shorten_the_time_limit, needs_slurm=True),  # The last, because the limit remains.
}
"""The faults in the order in which `drill` causes them, by name."""
