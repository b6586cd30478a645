"""Count the processes that the kernel killed because a cgroup of this process exceeded its memory limit."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def count_oom_kills(root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of processes killed for lack of memory in the cgroups of this process; 0 if it is unknown.

    In cgroup v2, `memory.events` of a cgroup also counts kills in the cgroups below it. So the count of the topmost
    cgroup with a count would include other jobs. The sum over all cgroups from this process's upwards grows with each
    kill of a rank, and is only compared with earlier sums, so kills that are counted several times do no harm. Cgroups
    above the job are left out.

    Args:
        root: the directory in which cgroups are mounted.
        membership: the file that lists the cgroups of this process (cgroups(7)).
    """
    total = 0
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base = root / controllers if controllers else root
            file_name = "memory.oom_control" if controllers else "memory.events"
            for folder in _list_job_cgroups(path):
                with suppress(OSError):
                    counts = re.findall(r"^oom_kill (\d+)$", (base / folder / file_name).read_text(), re.MULTILINE)
                    total += sum(map(int, counts))
    return total


def _list_job_cgroups(path: str) -> list[str]:
    """Return the cgroups from a process's own up to that of its Slurm job, as relative paths.

    Outside a job, only the process's own cgroup is returned.
    """
    parts = path.strip("/").split("/")
    depth = next((index + 1 for index, part in enumerate(parts) if re.fullmatch(r"job_\d+", part)), len(parts))
    return ["/".join(parts[:end]) for end in range(len(parts), depth - 1, -1)]
