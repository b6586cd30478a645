"""torch.distributed over MPI on the stock torch wheel: starting it, making groups, and ending it.

HPC sites start programs with mpirun or `srun --mpi`, and their MPI knows the site's network. torch's wheels have no
MPI; this brings it, through mpi4py. The process group itself is in pipeline/mpi/process_group.py, how operations run,
time out and fail in pipeline/mpi/worker_thread.py, types and reductions in pipeline/mpi/ops.py.

    start(place, timeout)      instead of dist.init_process_group, in every rank of mpirun or `srun --mpi=…`
    leave()                    at a normal end, after dist.destroy_process_group

`leave` waits for all ranks, however long one of them still clears up: where one dies, the launcher ends the others. A
process that ends without `leave` says goodbye at exit: it waits a few seconds for the others, and if they do not come,
or an exception ends it, it aborts all ranks. So no rank is left waiting for one that is gone.
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

mpi4py.rc.finalize = False  # `leave` and `_goodbye` do; at exit a rank could wait for ever for one that is gone
# ranks that share cores give way while they wait; Open MPI reads this when it starts
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

from mpi4py import MPI  # noqa: E402  (starts MPI, with the settings above)

from pipeline.mpi.ops import is_cuda_aware  # noqa: E402
from pipeline.mpi.process_group import BACKEND_NAME, MESSAGE_WATCHER, MpiProcessGroup  # noqa: E402
from pipeline.mpi.work import MpiTimeout  # noqa: E402
from pipeline.mpi.worker_thread import CollectiveThread, format_ranks, watch_deadlines  # noqa: E402

GOODBYE_S = 10.0

T = TypeVar("T")


def start_mpi(rank_info: RankInfo, timeout: timedelta, accurate: bool = False) -> None:
    """Make the default process group of all MPI ranks.

    accurate: sums of fp16 and bf16 are taken in fp32, in all groups. Raises UserError where MPI and the launcher do
    not agree on who this process is, or MPI cannot serve several threads.
    """
    _agree(rank_info)
    world = MPI.COMM_WORLD
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError("parallel.backend: mpi: this MPI library was built without MPI_THREAD_MULTIPLE")
    atexit.register(_goodbye)
    device_thread(watch_deadlines, "mpi deadlines").start()
    device_thread(MESSAGE_WATCHER.look_for_ever, "mpi messages", own_stream=True).start()
    MpiProcessGroup.accurate = accurate
    dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    store_at = functools.partial(dist.TCPStore, world_size=world.size, wait_for_workers=False, timeout=timeout)
    store = store_at("localhost", 0, is_master=True) if world.rank == 0 else None
    port = world.bcast(store and store.port)
    store = store or store_at(rank_info.master_host, port, is_master=False)
    dist.init_process_group(BACKEND_NAME, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def all_gather_objects(rank_info: RankInfo, value: T) -> list[T]:
    """All ranks' values, in rank order; all call it, before `start` or after. Raises UserError as that does."""
    _agree(rank_info)
    return MPI.COMM_WORLD.allgather(value)


def _agree(rank_info: RankInfo) -> None:
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank_info.rank, rank_info.world_size):
        raise UserError(
            f"parallel.backend: mpi: MPI says rank {world.rank} of {world.size}, but {rank_info.launcher} says "
            f"{rank_info.rank} of {rank_info.world_size}: start the ranks with the mpirun of {mpi_library()}, or with "
            "srun --mpi=pmix (or pmi2); where there are several, MPI4PY_LIBMPI=/path/libmpi.so names another library"
        )


def mpi_library() -> str:
    """The MPI library that was loaded."""
    return " ".join(MPI.Get_library_version().split(",")[0].splitlines()[0].split())


def describe_transport() -> str:
    """The library, and how it takes tensors on a GPU."""
    return f"{mpi_library()}, GPU memory {'directly' if is_cuda_aware() else 'through copies in pinned host memory'}"


def finalize_mpi() -> None:
    """Finalize MPI, together with all ranks; after this no MPI call is possible."""
    if not MPI.Is_finalized():
        atexit.unregister(_goodbye)
        _goodbye(patient=True)


def _goodbye(patient: bool = False) -> None:
    """Finalize when all ranks are about to; abort all of them when this one failed or another does not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    if hasattr(sys, "last_value") or CollectiveThread.broken:  # Python puts there what ended the program
        MPI.COMM_WORLD.Abort(1)
    here, deadline = MPI.COMM_WORLD.Ibarrier(), time.monotonic() + GOODBYE_S
    while not (MESSAGE_WATCHER.idle and here.Test()):
        if time.monotonic() > deadline and not (patient and MESSAGE_WATCHER.idle):
            print(f"not all ranks came to the end within {GOODBYE_S:.0f} s: aborting", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(1)
        time.sleep(0.001)
    MPI.Finalize()


def _create(options: Any, _: Any) -> MpiProcessGroup:
    """What torch calls in every rank of a new group: `options` is its `_DistributedBackendOptions`."""
    world = MPI.COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(world.size))
    _gather_members(options, ranks)
    # members only; new_group is called in the same order everywhere, the tag is one more safeguard
    tag = zlib.crc32(options.group_id.encode()) % 32768  # the least that MPI promises
    comm = world.Create_group(world.group.Incl(ranks), tag)
    return MpiProcessGroup(comm, options.group_id, options.store, ranks, options.timeout)


def _gather_members(options: Any, ranks: Sequence[int]) -> None:
    """Wait until all members are here: making a communicator has no time-out of its own."""
    store = options.store
    store.set(f"here/{options.group_rank}", "")
    if store.add("count", 1) == len(ranks):
        store.set("all", "")
    try:
        store.wait(["all"], options.timeout)
    except dist.DistStoreError:
        absent = [rank for i, rank in enumerate(ranks) if not store.check([f"here/{i}"])]
        raise MpiTimeout(
            f"new group {options.group_id} of ranks {ranks}: {format_ranks(absent)} did not come within "
            f"{options.timeout.total_seconds():g} s"
        ) from None
