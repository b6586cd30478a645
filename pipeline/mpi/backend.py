"""torch.distributed over MPI with torch's standard wheels: start MPI, create groups, finalize MPI.

HPC sites start programs with mpirun or `srun --mpi`, and their MPI is configured for the network of the site. The
wheels of torch contain no MPI backend. This module provides an MPI backend with mpi4py. Every rank calls:

    start_mpi(rank_info, timeout)    instead of dist.init_process_group
    finalize_mpi()                   after dist.destroy_process_group, unless the rank fails

`finalize_mpi` waits for all ranks without a time limit. If a rank exits without calling `finalize_mpi`, an exit handler
waits a few seconds for the other ranks to exit. If the other ranks do not exit, or if an exception ended this rank, the
handler aborts all ranks. Otherwise the other ranks might wait forever for this rank.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import mpi4py
import torch.distributed as dist

from pipeline.base.device_thread import device_thread
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import UserError

# At exit, mpi4py could wait forever for a rank that has died. `finalize_mpi` or `_finalize_or_abort` finalizes MPI.
mpi4py.rc.finalize = False
# Ranks that share cores yield while they wait. Open MPI reads this variable when it starts.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

from mpi4py import MPI  # noqa: E402  (This import starts MPI with the settings above.)

from pipeline.mpi.ops import is_cuda_aware  # noqa: E402
from pipeline.mpi.process_group import BACKEND_NAME, MESSAGE_WATCHER, MpiProcessGroup  # noqa: E402
from pipeline.mpi.work import MpiTimeout  # noqa: E402
from pipeline.mpi.worker_thread import CollectiveThread, format_ranks, watch_deadlines  # noqa: E402

EXIT_TIMEOUT_S = 10.0
"""Seconds that a rank waits for the other ranks if it exits without calling `finalize_mpi`."""

T = TypeVar("T")


def start_mpi(rank_info: RankInfo, timeout: timedelta, accurate_sums: bool = False) -> None:
    """Create the default process group of all MPI ranks.

    Args:
        rank_info: rank and world size according to the launcher.
        timeout: default timeout of the group's operations.
        accurate_sums: whether all groups sum fp16 and bf16 in fp32.

    Raises:
        UserError: if MPI and the launcher disagree about rank or world size, or if MPI does not support threads.
    """
    _check_rank(rank_info)
    world = MPI.COMM_WORLD
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            "mpi.no_threads",
            f"parallel.backend: mpi: {mpi_library()} was built without MPI_THREAD_MULTIPLE; use another MPI library",
        )
    atexit.register(_finalize_or_abort)
    device_thread(watch_deadlines, "mpi deadlines").start()
    device_thread(MESSAGE_WATCHER.watch_forever, "mpi messages", own_stream=True).start()
    MpiProcessGroup.accurate_sums = accurate_sums
    dist.Backend.register_backend(BACKEND_NAME, _create_group, extended_api=True, devices=["cpu", "cuda"])
    connect = functools.partial(dist.TCPStore, world_size=world.size, wait_for_workers=False, timeout=timeout)
    store = connect("localhost", 0, is_master=True) if world.rank == 0 else None
    port = world.bcast(store and store.port)
    store = store or connect(rank_info.master_host, port, is_master=False)
    dist.init_process_group(BACKEND_NAME, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def all_gather_objects(rank_info: RankInfo, value: T) -> list[T]:
    """Return the values of all ranks, in rank order. All ranks must call this, before or after `start_mpi`.

    Raises:
        UserError: if MPI and the launcher disagree about rank or world size.
    """
    _check_rank(rank_info)
    return MPI.COMM_WORLD.allgather(value)


def _check_rank(rank_info: RankInfo) -> None:
    """Raise UserError if MPI and the launcher disagree about rank or world size."""
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank_info.rank, rank_info.world_size):
        raise UserError(
            "mpi.rank_mismatch",
            f"parallel.backend: mpi: this process is rank {world.rank} of {world.size} in MPI, but rank "
            f"{rank_info.rank} of {rank_info.world_size} in {rank_info.launcher}: start the ranks with the mpirun of "
            f"{mpi_library()}, or with srun --mpi=pmix (or pmi2); if there are several MPI libraries, "
            "MPI4PY_LIBMPI=/path/libmpi.so selects another one",
        )


def mpi_library() -> str:
    """Return name and version of the MPI library that was loaded."""
    return " ".join(MPI.Get_library_version().split(",")[0].splitlines()[0].split())


def describe_transport() -> str:
    """Return text that names the MPI library and how it accesses tensors on a GPU."""
    return f"{mpi_library()}, GPU memory {'directly' if is_cuda_aware() else 'through copies in pinned host memory'}"


def finalize_mpi() -> None:
    """Finalize MPI together with all ranks. No MPI call is possible afterwards."""
    if not MPI.Is_finalized():
        atexit.unregister(_finalize_or_abort)
        _finalize_or_abort(waits_for_all_ranks=True)


def _finalize_or_abort(waits_for_all_ranks: bool = False) -> None:
    """Finalize MPI together with all ranks, or abort all ranks.

    All ranks are aborted if this rank or one of its groups has failed. All ranks are also aborted after
    `EXIT_TIMEOUT_S` if a message of this rank is still pending or another rank has not reached this function. With
    `waits_for_all_ranks`, this rank waits for other ranks without a time limit.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Python sets `sys.last_value` if an unhandled exception ends the process.
    if hasattr(sys, "last_value") or CollectiveThread.has_failed_group:
        MPI.COMM_WORLD.Abort(1)
    all_ranks_exit = MPI.COMM_WORLD.Ibarrier()
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while not (MESSAGE_WATCHER.is_idle and all_ranks_exit.Test()):
        if time.monotonic() > deadline and not (waits_for_all_ranks and MESSAGE_WATCHER.is_idle):
            print(f"not all ranks exited within {EXIT_TIMEOUT_S:.0f} s: aborting", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(1)
        time.sleep(0.001)
    MPI.Finalize()


def _create_group(options: Any, _: Any) -> MpiProcessGroup:
    """Create a process group. torch calls this function in every member.

    Args:
        options: torch's `_DistributedBackendOptions` of the group.
    """
    world = MPI.COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(world.size))
    _wait_for_members(options, ranks)
    # Only members call this function. torch creates groups in the same order on all ranks. If ranks create different
    # groups at the same time, their tags differ and MPI does not connect them.
    tag = zlib.crc32(options.group_id.encode()) % 32768  # MPI guarantees tags up to 32767.
    comm = world.Create_group(world.group.Incl(ranks), tag)
    return MpiProcessGroup(comm, options.group_id, options.store, ranks, options.timeout)


def _wait_for_members(options: Any, ranks: Sequence[int]) -> None:
    """Wait until all members are creating the group, because MPI's `Create_group` has no timeout.

    Raises MpiTimeout with the missing ranks if a member does not call this in time.
    """
    store = options.store
    store.set(f"joined/{options.group_rank}", "")
    if store.add("count", 1) == len(ranks):
        store.set("all", "")
    try:
        store.wait(["all"], options.timeout)
    except dist.DistStoreError:
        absent = [rank for group_rank, rank in enumerate(ranks) if not store.check([f"joined/{group_rank}"])]
        raise MpiTimeout(
            f"new group {options.group_id} of ranks {ranks}: {format_ranks(absent)} did not join within "
            f"{options.timeout.total_seconds():g} s"
        ) from None
