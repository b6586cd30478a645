"""Stopping together: the ranks agree at a step boundary, and everybody leaves alike.

A signal may reach one rank, some, or all, at different moments; a rank that simply left would hang the others
in their next collective. So a signal only sets a flag (pipeline/signals.py). Once a step each rank contributes
its flag to a small all-reduce on a Gloo group of its own: it starts before the optimizer's work and is read after
it, so nobody waits for it. Any flag stops all ranks after the same step; then they save together.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeline.signals import StopFlag


class Agreement:
    """Once per step: `start()`, some work, then `stop()`: the same answer on every rank."""

    def __init__(self, flag: StopFlag, group: dist.ProcessGroup) -> None:
        self.flag, self.group = flag, group
        self._votes = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Contribute this rank's flag as it stands now."""
        self._votes.fill_(int(bool(self.flag)))
        self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def stop(self) -> bool:
        """Whether any rank's flag was set when it called `start`."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._votes.item())
