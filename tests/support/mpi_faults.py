"""MPI programs with faults: a rank that is missing, late, killed, or calls something else than the others.

    python -m tests.support.mpi_faults PROGRAM MARK      under mpirun, in every rank

PROGRAM is a key of PROGRAMS. The programs ignore MARK. A test finds the processes by MARK in their command lines.
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

SHORT_TIMEOUT = timedelta(seconds=2)


def check_raises(error_type: type[BaseException], text: str, call: Callable[[], object]) -> None:
    """Check that `call` raises an error of this type within 10 s, with `text` in its message."""
    start = time.monotonic()
    try:
        call()
    except error_type as error:
        assert text in str(error), f"{text!r} is not in {error}"
        assert time.monotonic() - start < 10, f"{text} was raised too late"
    else:
        raise AssertionError(f"nothing was raised; expected {error_type.__name__} with {text!r}")


def new_group(timeout: timedelta | None = SHORT_TIMEOUT) -> Any:
    """Return a new group of all ranks.

    If `timeout` is None, the group has the longer time-out of the world group, for calls that must not time out.
    """
    return dist.new_group(timeout=timeout)


def check_faults() -> None:
    """Check the error message of each fault. Most faults need a new group, because an error makes a group unusable.

    This function itself has these faults: calls with different sizes, a rank that skips the backward pass of DDP, sizes
    of an all-to-all that do not match, invalid arguments, and a rank that does not join a new group. At the end, rank 1
    prints that ranks 0 and 1 saw all faults, and raises an error.
    """
    rank = dist.get_rank()
    x = torch.ones(4)
    mismatch_group, backward_group, uneven_group = (new_group(None) for _ in range(3))
    check_missing_rank()
    check_mismatch_after_delay()
    check_stalled_call()

    y = torch.ones(5 if rank == 2 else 4)
    text = "ranks 0, 1: all_reduce RedOpType.SUM float32x4; rank 2: all_reduce RedOpType.SUM float32x5"
    check_raises(MpiError, text, lambda: dist.all_reduce(y, group=mismatch_group))
    dist.barrier()

    model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=backward_group)
    dist.barrier()
    backward_group.set_timeout(SHORT_TIMEOUT)
    if rank != 1:
        check_raises(RuntimeError, "rank 1 did not call it", lambda: model(x).sum().backward())
    dist.barrier()

    send_sizes = [4, 0, 0] if rank == 0 else [0, 0, 0]
    receive_sizes = [5, 0, 0] if rank == 0 else [0, 0, 0]
    text = "rank 0 sends 4 elements to rank 0, which expects 5"
    output = x.new_empty(sum(receive_sizes))
    values = x[: sum(send_sizes)]
    check_raises(
        MpiError,
        text,
        lambda: dist.all_to_all_single(output, values, receive_sizes, send_sizes, uneven_group),
    )
    dist.barrier()

    parts = [torch.ones(5 if r == rank else 4) for r in range(3)]
    check_raises(ValueError, "(5,) does not fit torch.float32 (4,)", lambda: dist.all_gather(parts, x))
    check_raises(ValueError, "cannot reduce torch.int32 with AVG", lambda: dist.all_reduce(y.int(), dist.ReduceOp.AVG))
    too_large = torch.empty(1, dtype=torch.int8).expand(2**31)  # more elements than an MPI count can express
    check_raises(
        ValueError,
        "broadcast of 2,147,483,648 elements",
        lambda: dist.broadcast(too_large, 0),
    )
    if rank != 2:
        check_raises(MpiTimeout, "rank 2 did not join within 2 s", new_group)
    if rank == 0:
        # Rank 1 prints this text for rank 0. With MPICH, output of rank 0 could be lost when rank 1 aborts.
        MPI.COMM_WORLD.send("saw all faults", 1)
    if rank == 1:
        print(MPI.COMM_WORLD.recv(source=0), "saw all faults", flush=True)
        raise RuntimeError("on purpose")
    dist.barrier()


def check_missing_rank() -> None:
    """Check the errors of the other ranks if a rank is missing in a collective or sends no message.

    Rank 1 does not call the all-reduce of `missing_group`, and has no memory for the all-reduce of `no_memory_group`.
    In `late_group`, rank 1 calls late, and rank 2 never calls. Rank 1 sends its message after the receive timed out.
    """
    rank = dist.get_rank()
    x = torch.ones(4)
    received = torch.zeros(4)
    missing_group, no_memory_group, receive_group = (new_group() for _ in range(3))
    late_group = new_group(2 * SHORT_TIMEOUT)
    dist.barrier()
    late_works: list[Any] = [dist.all_reduce(x, group=late_group, async_op=True)] if rank == 0 else []
    if rank == 1:
        host_buffer = mpi_group.HostBuffer
        mpi_group.HostBuffer = raise_memory_error  # type: ignore[assignment,misc]
        check_raises(MemoryError, "no memory", lambda: dist.all_reduce(x, group=no_memory_group))
        mpi_group.HostBuffer = host_buffer  # type: ignore[misc]
        time.sleep(3.3)  # longer than SHORT_TIMEOUT, but shorter than the time-out of `late_group`
        dist.all_reduce(x, group=late_group, async_op=True)
    else:
        works = [dist.all_reduce(x, group=group, async_op=True) for group in (missing_group, no_memory_group)]
        receive = dist.irecv(received, 1, group=receive_group, tag=3)
        assert receive is not None
        for work in works:
            check_raises(MpiTimeout, f"on rank {rank}: rank 1 did not call it", work.wait)
        check_raises(MpiTimeout, "receive from rank 1, tag 3", receive.wait)
        unusable = "cannot be used after an error"
        check_raises(MpiTimeout, unusable, lambda: dist.broadcast(x, 0, group=missing_group))
        check_raises(MpiTimeout, unusable, lambda: dist.recv(received, 1, group=receive_group, tag=3))
    for work in late_works:
        check_raises(MpiTimeout, f"on rank {rank}: rank 2 did not call it", work.wait)
    dist.barrier()
    if rank == 1:
        for receiver in (0, 2):
            dist.send(x, receiver, group=receive_group, tag=3)
    dist.barrier()
    assert not received.any(), "a message was written to the buffer of a receive that had timed out"


def raise_memory_error(*_: object, **__: object) -> None:
    """Replace the constructor of HostBuffer."""
    raise MemoryError("no memory")


def check_mismatch_after_delay() -> None:
    """Check that a mismatch is detected if rank 2 calls with another size and publishes its call later than the others.

    Before the call, all ranks wait in a barrier for rank 1, which sleeps.
    """
    rank = dist.get_rank()
    group = new_group(None)
    time.sleep(1.5 if rank == 1 else 0)
    dist.barrier(group)
    publish_position = group.collective_thread._publish_position

    def publish_position_late(item: Any) -> None:
        time.sleep(0.5 if rank == 2 else 0)
        publish_position(item)

    group.collective_thread._publish_position = publish_position_late
    y = torch.ones(5 if rank == 2 else 4)
    text = "ranks 0, 1: all_reduce RedOpType.SUM float32x4; rank 2: all_reduce RedOpType.SUM float32x5"
    check_raises(MpiError, text, lambda: dist.all_reduce(y, group=group))
    dist.barrier()


class DelayedComm:
    """A communicator that starts an all-reduce 5 s late, as if the process had been suspended."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def Allreduce(self, *arguments: Any) -> None:
        time.sleep(5)
        self.comm.Allreduce(*arguments)


def check_stalled_call() -> None:
    """Check that `wait` raises MpiTimeout if rank 1 stalls after all ranks have called the all-reduce."""
    group = new_group()
    if dist.get_rank() == 1:
        group.comm = DelayedComm(group.comm)
    # a collective of Gloo, which `list_recent_collectives` must also return
    dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    works: list[Any] = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(2)]
    future = works[0].get_future()
    for work in works:
        check_raises(MpiTimeout, "all ranks called it, but it does not end", work.wait)
    check_raises(RuntimeError, "it does not end", future.wait)
    collectives = [(entry["operation"], entry["number"], entry["state"]) for entry in list_recent_collectives()]
    assert collectives[0][0] == "gloo:all_reduce", collectives
    expected = [("all_reduce over MPI", 1, "started"), ("all_reduce over MPI", 2, "scheduled")]
    assert collectives[1:] == expected, collectives
    check_raises(MpiTimeout, "cannot be used after an error", lambda: dist.barrier(group))
    time.sleep(3)  # Meanwhile rank 1 continues and the call completes. This must not cause an error.
    dist.barrier()


def exit_without_cleanup() -> None:
    """Let all ranks exit without destroying their process group."""
    dist.all_reduce(torch.ones(1))


def fail_on_rank0() -> None:
    """Let rank 0 fail while the other ranks wait for rank 0. Their time-out would end much later."""
    mpi.EXIT_TIMEOUT_S = 600.0
    if dist.get_rank() == 0:
        raise RuntimeError("on purpose")
    dist.all_reduce(torch.ones(1))


def exit_early_on_rank0() -> None:
    """Let rank 0 exit while the other ranks wait for rank 0."""
    mpi.EXIT_TIMEOUT_S = 1.0
    if dist.get_rank() != 0:
        dist.all_reduce(torch.ones(1))


def clean_up_slowly_on_rank0() -> None:
    """Let rank 0 finalize MPI more than EXIT_TIMEOUT_S later than the other ranks.

    All ranks call `finalize_mpi`, so this time-out, which applies only to exits without that call, must not end them.
    """
    mpi.EXIT_TIMEOUT_S = 1.0
    if dist.get_rank() == 0:
        time.sleep(3)
    dist.destroy_process_group()
    mpi.finalize_mpi()


def wait_to_be_killed() -> None:
    """Print the PID of each rank, then wait until the test kills a rank."""
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    if dist.get_rank() == 0:
        time.sleep(100)
    dist.all_reduce(torch.ones(1))


PROGRAMS: dict[str, Callable[[], None]] = {
    "faults": check_faults,
    "no-cleanup": exit_without_cleanup,
    "failing-rank": fail_on_rank0,
    "early-exit": exit_early_on_rank0,
    "slow-cleanup": clean_up_slowly_on_rank0,
    "wait": wait_to_be_killed,
}


def main(name: str) -> None:
    """Run a program on this rank."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"  # start the flight recorder, which `list_recent_collectives` reads
    mpi.start_mpi(read_rank_info(os.environ), timedelta(seconds=60))
    PROGRAMS[name]()


if __name__ == "__main__":
    main(sys.argv[1])
