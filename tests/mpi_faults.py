"""What MPI ranks run in tests of faults: a rank that is missing, late, killed, or does something else than the others.

python -m tests.mpi_faults faults|forgetful|early|stuck MARK       under mpirun; MARK only makes it findable
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipeline import mpi
from pipeline.mpi_engine import MpiError, MpiTimeout
from slurm.environment import identify

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


def new_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    group = dist.new_group(ranks, timeout=SHORT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def faults() -> None:
    """One fault after the other, each in a group of its own, for a group is broken after an error."""
    rank, x = dist.get_rank(), torch.ones(4)
    missing, other, silent, backward, uneven = (new_group() for _ in range(5))
    last = "1 did not call it"
    if rank != 1:
        raises(MpiTimeout, f"on rank {rank}: rank {last}", lambda: dist.all_reduce(x, group=missing))
        raises(MpiTimeout, "cannot be used after an error", lambda: dist.broadcast(x, 0, group=missing))
        raises(MpiTimeout, "receive from rank 1, tag 3", lambda: dist.recv(x, 1, group=silent, tag=3))
    dist.barrier()

    y = torch.ones(5 if rank == 2 else 4)
    words = "ranks 0, 1: all_reduce RedOpType.SUM float32x4; rank 2: all_reduce RedOpType.SUM float32x5"
    raises(MpiError, words, lambda: dist.all_reduce(y, group=other))
    dist.barrier()

    model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=backward)
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
    if rank != 2:
        raises(MpiTimeout, "rank 2 did not come within 2 s", new_group)
        print(f"rank {rank} saw all faults", flush=True)
    if rank == 1:
        raise RuntimeError("on purpose")
    dist.barrier()


def forgetful() -> None:
    """Every rank ends without a word."""
    dist.all_reduce(torch.ones(1))


def early() -> None:
    """Rank 0 ends while the others wait for it."""
    mpi.GOODBYE_S = 1.0
    if dist.get_rank() != 0:
        dist.all_reduce(torch.ones(1))


def stuck() -> None:
    """All ranks wait until somebody kills one."""
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    if dist.get_rank() == 0:
        time.sleep(100)
    dist.all_reduce(torch.ones(1))


def main(name: str) -> None:
    mpi.start(identify(os.environ), timedelta(seconds=60))
    {"faults": faults, "forgetful": forgetful, "early": early, "stuck": stuck}[name]()


if __name__ == "__main__":
    main(sys.argv[1])
