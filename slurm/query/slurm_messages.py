"""What Slurm and MPI say in plain English, and Sluice must understand: the one table of such patterns.

Use the columns, `Key=value` fields and exit codes where they exist (slurm/query/job_states.py); these texts have no
such form. The docstring of each pattern names the version in whose output it was seen. If another version words it
differently, the pattern does not match, and the reported cause is less specific, but not wrong.
"""

from __future__ import annotations

import re
import signal

SRUN_TASK = re.compile(r"srun: error: (\S+): tasks? (\d+)[-\d,]*: (.*)")
"""How a task of a step ended: its host, its number (of several the first), and the words of the next rows.

Seen: Slurm 22.05, 24.11."""
SRUN_EXITED = re.compile(r"exit code (\d+)")
"""The code that a task left with. One that a signal killed has the signal's name: :data:`SIGNALS`.

Seen: Slurm 22.05, 24.11."""
SRUN_OUT_OF_MEMORY = re.compile("Out Of Memory")
"""A task that the kernel killed for its memory, by srun.

Seen: Slurm's documentation only."""
STEPD_OUT_OF_MEMORY = re.compile(r"slurmstepd: error: .*oom[-_]kill event", re.IGNORECASE)
"""The same by slurmstepd, with a hyphen or, later, an underscore.

Seen: Slurm's documentation only."""
SRUN_ERROR = re.compile("error: ")
"""A line of srun that says why nothing was started.

Seen: Slurm 22.05, 24.11."""
SBATCH_ERROR = re.compile("^sbatch: (?:error: |fatal: )?(?!Try )(.+)$", re.MULTILINE)
"""Why sbatch refused a job: `error: invalid partition …`, `fatal: …`, `unrecognized option …`, not where to
read.

Seen: Slurm 22.05, 24.11."""
SBATCH_NO_REPLY = re.compile("timed out|nable to contact|Zero Bytes|endpoint|nection (?:fail|re)|shutdown|not respond")
"""What sbatch fails with if it got no answer (`Socket timed out on send/recv operation`, `Unable to contact slurm
controller (connect failure)`): the controller may have taken the job. The other words are in slurm_errno.c.

Seen: Slurm 22.05."""
CONTROLLER_UP = re.compile(" is UP")
"""`scontrol ping`, of a controller that answers.

Seen: Slurm 22.05, 24.11."""
CONTROLLER_DOWN = re.compile(" is DOWN")
"""The same, of one that does not.

Seen: Slurm 22.05."""
NO_SUCH_JOB = re.compile("Invalid job id")
"""What squeue fails with where it is asked for a single job that the controller does not know.

Seen: Slurm 22.05 (its library), 14.11."""
DEPENDENCY_NEVER_SATISFIED = re.compile("DependencyNeverSatisfied")
"""The reason of a job that waits for ever (squeue, %r).

Seen: Slurm 22.05, 24.11."""
JOB_HELD = re.compile("^JobHeld(User|Admin)")
"""The reason of a job that waits until a person, or an administrator, lets it go.

Seen: Slurm 22.05."""
MPIRUN_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on\s+signal (\d+)")
"""A rank that a signal killed: rank, host, signal.

Seen: Open MPI 4.1.4, 5.0.11."""
MPIRUN_EXITED = re.compile(r"Process name: \[.*,(\d+)\]\s+Exit code:\s+(\d+)")
"""A rank that left with a code: rank and code.

Seen: Open MPI 4.1.4, 5.0.11."""
HYDRA_EXITED = re.compile(r"PID (\d+) RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)")
"""A process that left with a code, or was killed by the signal of that number: its number and host.

Seen: MPICH 4.0.2, 5.0.2."""

SIGNAL_BY_NAME = {signal.strsignal(number) or "": number for number in range(1, 32)}
"""What srun calls the signal that killed a task: the C library's names (seen: Slurm 22.05 with glibc 2.36)."""
