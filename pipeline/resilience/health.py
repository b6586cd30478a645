"""Health check at the start of the train stage (`recovery.preflight`), to find a bad node within seconds.

Each rank checks its device: free memory, and a matrix product with a known result. One rank per node checks the file
system of the run: write, sync and read, free space and inodes. Then all ranks pass a barrier, which reports the ranks
that do not arrive, and perform one all-reduce on the process group of the run.

If a node has failed, NodeError is raised. The supervisor records the node, and the next attempt excludes the node.
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
"""How long rank 0 waits for the other ranks at the barrier, and all ranks for the all-reduce."""
GROUP_TIMEOUT = 3 * BARRIER_TIMEOUT
"""The time-out of the group: how long the other ranks wait for rank 0. This time is longer than `BARRIER_TIMEOUT`,
because rank 0 first waits for the other ranks."""
MIN_FREE_BYTES = 16 << 20
"""The file system counts as full if fewer bytes are free: 16 MiB."""
MIN_FREE_INODES = 100
"""The file system counts as full if fewer inodes are free."""
_MATRIX_SIZE = 256
"""Rows and columns of the two matrices of ones, whose product has this number in each entry."""


def check_health(run: Run, rank_info: RankInfo, world: groups.World) -> None:
    """Check the nodes and the process group. All ranks must call this function.

    Raises:
        NodeError: if a node has failed.
        StorageError: if the file system is full.
        PeerLostError: if another rank has failed.
    """
    group = groups.new_control_group(GROUP_TIMEOUT)
    # The ranks exchange their hosts first. If a bad device then blocks a rank forever, the error can name its host.
    hosts = groups.all_gather_results(group, gethostname)
    check_this_rank(run, rank_info, world.device)
    check_all_ranks(world, group, hosts)


def check_this_rank(run: Run, rank_info: RankInfo, device: torch.device) -> None:
    """Check this rank's device. The first rank of each node also checks the file system.

    Raises:
        NodeError: if the device or the file system does not work on this node, or if less than half of the memory of a
            GPU is free.
        StorageError: if the file system is full.
    """
    host = gethostname()
    try:
        if device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            if free_bytes < 0.5 * total_bytes:
                raise NodeError(
                    "node.device_busy",
                    f"{host}: only {free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are free on {device} before "
                    "training: another process uses the device, or a process of an earlier job still hangs",
                )
        ones = torch.ones((_MATRIX_SIZE, _MATRIX_SIZE), device=device)
        smallest, largest = (ones @ ones).aminmax()
        if not smallest == largest == _MATRIX_SIZE:
            raise NodeError(
                "node.wrong_result",
                f"{host}: a matrix product on {device} is wrong: {smallest:g} to {largest:g} instead of {_MATRIX_SIZE}",
            )
    except RuntimeError as error:  # torch raises this if a CUDA device is broken.
        raise NodeError("node.device_failed", f"{host}: {device} does not work: {error}") from error
    if rank_info.local_rank == 0:
        _check_file_system(run, host, rank_info.rank)


def _check_file_system(run: Run, host: str, rank: int) -> None:
    """Write and read a file in the run directory, and check for free space and inodes.

    The rank is a part of the file's name, because several nodes may have the same hostname.

    Raises:
        NodeError: if the file system does not work on this node.
        StorageError: if there is too little free space, or there are too few inodes.
    """
    file = run.jobs_dir / f".check-{host}-{rank}"
    content = os.urandom(1 << 16)
    try:
        with open(file, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
            # Drop the file from the page cache, so that it is read from storage.
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if file.read_bytes() != content:
            raise NodeError("node.wrong_data", f"{host}: data read from {run.path} differs from what was written")
    except OSError as error:
        if error.errno in LOST_MOUNT_ERRNOS:
            raise NodeError("node.lost_mount", f"{host}: {run.path} cannot be used on this node: {error}") from error
        raise
    finally:
        with suppress(OSError):
            file.unlink()
    status = os.statvfs(run.path)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < MIN_FREE_BYTES:
        raise StorageError(
            "storage.full",
            f"only {free_bytes >> 20} MiB are free in {run.path}: a checkpoint would not fit. Free some space",
        )
    # `f_files` is 0 if the file system does not count inodes.
    if status.f_files and status.f_favail < MIN_FREE_INODES:
        raise StorageError(
            "storage.no_inodes", f"only {status.f_favail} inodes are free in {run.path}: remove some files"
        )


def check_all_ranks(world: groups.World, group: dist.ProcessGroup, hosts: Sequence[str]) -> None:
    """Check that all ranks respond within a time limit, on `group` and then on the process group of the run.

    Args:
        world: the process group of the run.
        group: a Gloo group of all ranks with the time-out `GROUP_TIMEOUT`.
        hosts: the host of each rank.

    Raises:
        NodeError: on rank 0, if another rank does not arrive; on the other ranks, if rank 0 does not arrive.
        PeerLostError: if this rank cannot determine which node failed, or if the all-reduce does not complete or
            returns a wrong result.
    """
    try:
        dist.monitored_barrier(group, timeout=BARRIER_TIMEOUT, wait_all_ranks=True)
    except RuntimeError as error:
        # On rank 0, the error names the ranks that did not arrive. On other ranks, a timeout means that rank 0 did not
        # arrive. Any other error does not show which rank failed.
        failed_ranks = re.search(r"Ranks? (\d+)[\d, ]* failed to pass", str(error))
        failed_rank = int(failed_ranks[1]) if failed_ranks else 0
        is_rank_known = failed_ranks is not None or "Timed out" in str(error)
        if failed_rank == world.rank or not is_rank_known:
            message = f"not all ranks arrived within {BARRIER_TIMEOUT}: {error}"
            raise PeerLostError("rank.lost_peer", message) from error
        host = hosts[failed_rank]
        message = f"{host}: rank {failed_rank} did not arrive within {BARRIER_TIMEOUT}: {error}"
        raise NodeError("node.not_responding", message, host=host) from error
    total = torch.ones(1 << 16, device=world.device)
    try:
        dist.all_reduce(total, async_op=True).wait(BARRIER_TIMEOUT)
    except RuntimeError as error:
        message = f"an all-reduce over {world.size} ranks did not complete within {BARRIER_TIMEOUT}: {error}"
        raise PeerLostError("rank.lost_peer", message) from error
    if not bool((total == world.size).all()):
        message = f"an all-reduce over {world.size} ranks returned {total.min():g} to {total.max():g}"
        raise PeerLostError("rank.wrong_result", message)
