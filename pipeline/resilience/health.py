"""The check at the start of a training: seconds that find a bad node before it costs hours.

First the ranks, which have just met, tell each other their hosts. On its own, each rank checks its device (memory that
is free, a matrix product with a known result), and one rank per node the run's file system (write, sync, read back;
free space and inodes). Together they pass a barrier that names those who do not come, and one all-reduce of the
training's own group. A node that fails is a NodeError: the supervisor notes it, and the job goes on without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from socket import gethostname

import torch
import torch.distributed as dist

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import LOST_MOUNT_ERRNOS, NodeError, PeerLostError, StorageError
from pipeline.comm import groups
from pipeline.run.directory import Run

BARRIER_TIMEOUT = timedelta(seconds=120)
"""How long rank 0 waits for the others."""
GROUP_TIMEOUT = 3 * BARRIER_TIMEOUT
"""How long the others wait for rank 0, which may be waiting itself: the time-out of their group."""
LEAST_FREE_BYTES, LEAST_FREE_INODES = 16 << 20, 100
_SIZE = 256


def check_health(run: Run, place: RankInfo, world: groups.World) -> None:
    """The whole check. Raises NodeError, StorageError or PeerLostError."""
    group = groups.new_control_group(GROUP_TIMEOUT)
    hosts = groups.all_gather_results(
        group, gethostname
    )  # now that all are here: a bad device may hold one up for ever
    check_this_rank(run, place, world.device)
    check_all_ranks(world, group, hosts)


def check_this_rank(run: Run, place: RankInfo, device: torch.device) -> None:
    """This rank's device, and (first rank of a node) the file system. Raises NodeError or StorageError."""
    host = gethostname()
    try:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            if free < 0.5 * total:
                raise NodeError(
                    f"{host}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free on {device} before training: "
                    "somebody else uses it, or a process of an earlier job hangs"
                )
        ones = torch.ones((_SIZE, _SIZE), device=device)
        least, most = (ones @ ones).aminmax()
        if not least == most == _SIZE:
            raise NodeError(f"{host}: {device} multiplies wrongly: {least:g} to {most:g} instead of {_SIZE}")
    except RuntimeError as error:  # what CUDA raises for a broken device
        raise NodeError(f"{host}: {device} does not work: {error}") from error
    if place.local_rank == 0:
        _check_files(run, host)


def _check_files(run: Run, host: str) -> None:
    file = run.jobs_dir / f".check-{host}"
    content = os.urandom(1 << 16)
    try:
        with open(file, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read it from the storage, not from memory
        if file.read_bytes() != content:
            raise NodeError(f"{host}: what is read from {run.path} is not what was written")
    except OSError as error:
        if error.errno in LOST_MOUNT_ERRNOS:
            raise NodeError(f"{host}: {run.path} cannot be used there: {error}") from error
        raise
    finally:
        with suppress(OSError):
            file.unlink()
    space = os.statvfs(run.path)
    free = space.f_bavail * space.f_frsize
    if free < LEAST_FREE_BYTES:
        raise StorageError(f"only {free >> 20} MiB are free in {run.path}: a checkpoint would not fit; free some")
    if space.f_files and space.f_favail < LEAST_FREE_INODES:
        raise StorageError(f"only {space.f_favail} inodes are free in {run.path}: remove some files")


def check_all_ranks(world: groups.World, group: dist.ProcessGroup, hosts: Sequence[str]) -> None:
    """All ranks, within a bound: `group` (Gloo, with PATIENCE) names who does not come; then the training's own group.

    Raises NodeError for the first of `hosts` that did not come: on rank 0, or elsewhere where that is rank 0's; else
    PeerLostError, which blames nobody.
    """
    try:
        dist.monitored_barrier(group, timeout=BARRIER_TIMEOUT, wait_all_ranks=True)
    except RuntimeError as error:
        missing = re.search(r"Ranks? (\d+)[\d, ]* failed to pass", str(error))
        rank = int(missing[1]) if missing else 0
        if rank == world.rank or not (missing or "Timed out" in str(error)):
            raise PeerLostError(f"not all ranks came within {BARRIER_TIMEOUT}: {error}") from error
        message = f"{hosts[rank]}: rank {rank} did not come within {BARRIER_TIMEOUT}: {error}"
        raise NodeError(message, host=hosts[rank]) from error
    total = torch.ones(1 << 16, device=world.device)
    try:
        dist.all_reduce(total, async_op=True).wait(BARRIER_TIMEOUT)
    except RuntimeError as error:
        raise PeerLostError(
            f"an all-reduce over {world.size} ranks did not end within {BARRIER_TIMEOUT}: {error}"
        ) from error
    if not bool((total == world.size).all()):
        raise PeerLostError(f"an all-reduce over {world.size} ranks gives {total.min():g} to {total.max():g}")
