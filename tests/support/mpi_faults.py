"""What MPI ranks run in tests of faults: a rank that is missing, late, killed, or does something else than the others.

python -m tests.support.mpi_faults faults|forgetful|failing|early|slow|stuck MARK      under mpirun; MARK makes it
findable
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from pipeline.base.dist_env import read_rank_info
from pipeline.mpi import backend as mpi
from pipeline.mpi import process_group as mpi_group
from pipeline.mpi.work import MpiError, MpiTimeout
from pipeline.resilience.watchdog import list_recent_collectives

SHORT = timedelta(seconds=2)


def raises(kind: type[BaseException], words: str, call: Callable[[], object]) -> None:
    started = time.monotonic()
    try:
        call()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
        assert time.monotonic() - started < 10, f"{words} came late"
    else:
        raise AssertionError(f"nothing was raised; expected {kind.__name__} with {words!r}")


def new_group(timeout: timedelta | None = SHORT) -> Any:
    """A group of all ranks; None: with the time-out of the world, for what is not meant to time out."""
    return dist.new_group(timeout=timeout)


def faults() -> None:
    """One fault after the other, each in a group of its own, for a group is broken after an error."""
    rank, x = dist.get_rank(), torch.ones(4)
    other, backward, uneven = (new_group(None) for _ in range(3))
    last = "1 did not call it"
    absent()
    stale()
    stalled()

    y = torch.ones(5 if rank == 2 else 4)
    words = "ranks 0, 1: all_reduce RedOpType.SUM float32x4; rank 2: all_reduce RedOpType.SUM float32x5"
    raises(MpiError, words, lambda: dist.all_reduce(y, group=other))
    dist.barrier()

    model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=backward)
    dist.barrier()
    backward.set_timeout(SHORT)
    if rank != 1:
        raises(RuntimeError, f"rank {last}", lambda: model(x).sum().backward())
    dist.barrier()

    gives = [4, 0, 0] if rank == 0 else [0, 0, 0]
    takes = [5, 0, 0] if rank == 0 else [0, 0, 0]
    words = "rank 0 sends 4 elements to rank 0, which expects 5"
    raises(
        MpiError, words, lambda: dist.all_to_all_single(x.new_empty(sum(takes)), x[: sum(gives)], takes, gives, uneven)
    )
    dist.barrier()

    parts = [torch.ones(5 if r == rank else 4) for r in range(3)]
    raises(ValueError, "(5,) does not go with torch.float32 (4,)", lambda: dist.all_gather(parts, x))
    raises(ValueError, "cannot reduce torch.int32 with AVG", lambda: dist.all_reduce(y.int(), dist.ReduceOp.AVG))
    many = torch.empty(1, dtype=torch.int8).expand(2**31)
    raises(ValueError, "broadcast of 2,147,483,648 elements: MPI takes 2,147,483,647", lambda: dist.broadcast(many, 0))
    if rank != 2:
        raises(MpiTimeout, "rank 2 did not come within 2 s", new_group)
    if rank == 0:
        MPI.COMM_WORLD.send("saw all faults", 1)  # an abort is quicker than another rank's last words, with MPICH
    if rank == 1:
        print(MPI.COMM_WORLD.recv(source=0), "saw all faults", flush=True)
        raise RuntimeError("on purpose")
    dist.barrier()


def absent() -> None:
    """Rank 1 does not call, has no memory for it, or calls at the last moment, when rank 2 never does."""
    rank, x, box = dist.get_rank(), torch.ones(4), torch.zeros(4)
    missing, poor, silent, late = (*(new_group() for _ in range(3)), new_group(2 * SHORT))
    dist.barrier()
    works: list[Any] = [dist.all_reduce(x, group=late, async_op=True)] if rank == 0 else []
    if rank == 1:
        staged = mpi_group.HostBuffer
        mpi_group.HostBuffer = no_memory  # type: ignore[assignment,misc]
        raises(MemoryError, "no memory", lambda: dist.all_reduce(x, group=poor))
        mpi_group.HostBuffer = staged  # type: ignore[misc]
        time.sleep(3.3)
        dist.all_reduce(x, group=late, async_op=True)
    else:
        lost = [dist.all_reduce(x, group=group, async_op=True) for group in (missing, poor)]
        message = dist.irecv(box, 1, group=silent, tag=3)
        assert message is not None
        for work in lost:
            raises(MpiTimeout, f"on rank {rank}: rank 1 did not call it", work.wait)
        raises(MpiTimeout, "receive from rank 1, tag 3", message.wait)
        raises(MpiTimeout, "cannot be used after an error", lambda: dist.broadcast(x, 0, group=missing))
        raises(MpiTimeout, "cannot be used after an error", lambda: dist.recv(box, 1, group=silent, tag=3))
    for work in works:
        raises(MpiTimeout, f"on rank {rank}: rank 2 did not call it", work.wait)
    dist.barrier()
    if rank == 1:
        for to in (0, 2):
            dist.send(x, to, group=silent, tag=3)
    dist.barrier()
    assert not box.any(), "a message came into a buffer that had been given up"


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError("no memory")


def stale() -> None:
    """Ranks that once waited for rank 1 differ in their next call; rank 2 tells of it later than the others."""
    rank, group = dist.get_rank(), new_group(None)
    time.sleep(1.5 if rank == 1 else 0)
    dist.barrier(group)
    tell = group.lane._tell

    def late(item: Any) -> None:
        time.sleep(0.5 if rank == 2 else 0)
        tell(item)

    group.lane._tell = late
    y = torch.ones(5 if rank == 2 else 4)
    words = "ranks 0, 1: all_reduce RedOpType.SUM float32x4; rank 2: all_reduce RedOpType.SUM float32x5"
    raises(MpiError, words, lambda: dist.all_reduce(y, group=group))
    dist.barrier()


class Stopping:
    """A communicator whose all-reduce does not begin for a while, as if its process had been stopped."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def Allreduce(self, *arguments: Any) -> None:
        time.sleep(5)
        self.comm.Allreduce(*arguments)


def stalled() -> None:
    """Rank 1 stops after the ranks have met."""
    group = new_group()
    if dist.get_rank() == 1:
        group.comm = Stopping(group.comm)
    dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    works: list[Any] = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(2)]
    future = works[0].get_future()
    for work in works:
        raises(MpiTimeout, "all ranks called it, but it does not end", work.wait)
    raises(RuntimeError, "it does not end", future.wait)
    seen = [(entry["operation"], entry["number"], entry["state"]) for entry in list_recent_collectives()]
    ours = [("all_reduce over MPI", 1, "started"), ("all_reduce over MPI", 2, "scheduled")]
    assert seen[0][0] == "gloo:all_reduce" and seen[1:] == ours, seen
    raises(MpiTimeout, "cannot be used after an error", lambda: dist.barrier(group))
    time.sleep(3)  # rank 1 goes on, and the call ends after all: nobody may mind
    dist.barrier()


def forgetful() -> None:
    """Every rank ends without a word."""
    dist.all_reduce(torch.ones(1))


def failing() -> None:
    """Rank 0 fails while the others wait for it, long before anybody would miss it."""
    mpi.GOODBYE_S = 600.0
    if dist.get_rank() == 0:
        raise RuntimeError("on purpose")
    dist.all_reduce(torch.ones(1))


def early() -> None:
    """Rank 0 ends while the others wait for it."""
    mpi.GOODBYE_S = 1.0
    if dist.get_rank() != 0:
        dist.all_reduce(torch.ones(1))


def slow() -> None:
    """Rank 0 clears up for longer than ranks wait that end without a word."""
    mpi.GOODBYE_S = 1.0
    if dist.get_rank() == 0:
        time.sleep(3)
    dist.destroy_process_group()
    mpi.finalize_mpi()


def stuck() -> None:
    """All ranks wait until somebody kills one."""
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    if dist.get_rank() == 0:
        time.sleep(100)
    dist.all_reduce(torch.ones(1))


def main(name: str) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"
    mpi.start_mpi(read_rank_info(os.environ), timedelta(seconds=60))
    ends = {"forgetful": forgetful, "failing": failing, "early": early, "slow": slow, "stuck": stuck}
    {"faults": faults, **ends}[name]()


if __name__ == "__main__":
    main(sys.argv[1])
