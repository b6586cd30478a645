"""What Slurm and MPI say in plain English, and Sluice must understand: the one table of such patterns.

Where there are columns, `Key=value` or exit codes, those are read (slurm/query/states.py); what stands here has no such
form. Each row has the version in whose output it was seen. Where another version says it otherwise no pattern is found,
and whoever looks for it says less: a cause is vaguer then, not wrong.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """One pattern, and where it was seen."""

    pattern: re.Pattern[str]
    seen: str


SRUN_TASK = Words(re.compile(r"srun: error: (\S+): tasks? (\d+)[-\d,]*: (.*)"), "Slurm 22.05, 24.11")
"""How a task of a step ended: its host, its number (of several the first), and the words of the next rows."""
SRUN_EXITED = Words(re.compile(r"exit code (\d+)"), "Slurm 22.05, 24.11")
"""The code that a task left with. One that a signal killed has the signal's name: :data:`SIGNALS`."""
SRUN_STARVED = Words(re.compile("Out Of Memory"), "Slurm's documentation only")
"""A task that the kernel killed for its memory, by srun."""
STEPD_STARVED = Words(
    re.compile(r"slurmstepd: error: .*oom[-_]kill event", re.IGNORECASE), "Slurm's documentation only"
)
"""The same by slurmstepd, with a hyphen or, later, an underscore."""
SRUN_ERROR = Words(re.compile("error: "), "Slurm 22.05, 24.11")
"""A line of srun that says why nothing was started."""
SBATCH_ERROR = Words(re.compile("^sbatch: (?:error: |fatal: )?(?!Try )(.+)$", re.MULTILINE), "Slurm 22.05, 24.11")
"""Why sbatch refused a job: `error: invalid partition …`, `fatal: …`, `unrecognized option …`, not where to read."""
CONTROLLER_UP = Words(re.compile(" is UP"), "Slurm 22.05, 24.11")
"""`scontrol ping`, of a controller that answers."""
CONTROLLER_DOWN = Words(re.compile(" is DOWN"), "Slurm 22.05")
"""The same, of one that does not."""
NO_SUCH_JOB = Words(re.compile("Invalid job id"), "Slurm 22.05 (its library), 14.11")
"""What squeue fails with where it is asked for a single job that the controller does not know."""
NEVER = Words(re.compile("DependencyNeverSatisfied"), "Slurm 22.05, 24.11")
"""The reason of a job that waits for ever (squeue, %r)."""
HELD = Words(re.compile("^JobHeld(User|Admin)"), "Slurm 22.05")
"""The reason of a job that waits until a person, or an administrator, lets it go."""
MPIRUN_KILLED = Words(
    re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on\s+signal (\d+)"), "Open MPI 4.1.4, 5.0.11"
)
"""A rank that a signal killed: rank, host, signal."""
MPIRUN_EXITED = Words(re.compile(r"Process name: \[.*,(\d+)\]\s+Exit code:\s+(\d+)"), "Open MPI 4.1.4, 5.0.11")
"""A rank that left with a code: rank and code."""

HYDRA_LEFT = Words(re.compile(r"PID (\d+) RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)"), "MPICH 4.0.2, 5.0.2")
"""A process that left with a code, or was killed by the signal of that number: its number and host."""

SIGNALS = {signal.strsignal(number) or "": number for number in range(1, 32)}
"""What srun calls the signal that killed a task: the C library's names (seen: Slurm 22.05 with glibc 2.36)."""
