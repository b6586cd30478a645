"""Health check at the start of a training, to find a bad node within seconds.

First the ranks exchange their hosts. Each rank then checks its device (free memory, a matrix product with a known
result), and one rank per node checks the run's file system (write, sync, read; free space and inodes). Finally all
ranks pass a barrier, which names those that do not arrive, and one all-reduce of the training's own group. A failure of
a node is a NodeError. The supervisor records it, and the job continues without that node.
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
"""How long rank 0 waits for the other ranks."""
GROUP_TIMEOUT = 3 * BARRIER_TIMEOUT
"""How long the other ranks wait for rank 0, which may itself be waiting: the time-out of the group."""
MIN_FREE_BYTES = 16 << 20
MIN_FREE_INODES = 100
_MATRIX_SIZE = 256


def check_health(run: Run, rank_info: RankInfo, world: groups.World) -> None:
    """Check node and process group on all ranks. Raises NodeError, StorageError or PeerLostError."""
    group = groups.new_control_group(GROUP_TIMEOUT)
    # Exchanged first, because a bad device may block a rank forever.
    hosts = groups.all_gather_results(group, gethostname)
    check_this_rank(run, rank_info, world.device)
    check_all_ranks(world, group, hosts)


def check_this_rank(run: Run, rank_info: RankInfo, device: torch.device) -> None:
    """Check this rank's device and, on the first rank of a node, the file system. Raises NodeError or StorageError."""
    host = gethostname()
    try:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            if free < 0.5 * total:
                raise NodeError(
                    "node.device_busy",
                    f"{host}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free on {device} before training: "
                    "another process uses it, or one of an earlier job hangs",
                )
        ones = torch.ones((_MATRIX_SIZE, _MATRIX_SIZE), device=device)
        smallest, largest = (ones @ ones).aminmax()
        if not smallest == largest == _MATRIX_SIZE:
            raise NodeError(
                "node.wrong_result",
                f"{host}: a matrix product on {device} is wrong: {smallest:g} to {largest:g} instead of {_MATRIX_SIZE}",
            )
    except RuntimeError as error:  # what CUDA raises for a broken device
        raise NodeError("node.device_failed", f"{host}: {device} does not work: {error}") from error
    if rank_info.local_rank == 0:
        _check_files(run, host)


def _check_files(run: Run, host: str) -> None:
    file = run.jobs_dir / f".check-{host}"
    content = os.urandom(1 << 16)
    try:
        with open(file, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is read from storage
        if file.read_bytes() != content:
            raise NodeError("node.wrong_data", f"{host}: data read from {run.path} differs from what was written")
    except OSError as error:
        if error.errno in LOST_MOUNT_ERRNOS:
            raise NodeError("node.lost_mount", f"{host}: {run.path} cannot be used on this node: {error}") from error
        raise
    finally:
        with suppress(OSError):
            file.unlink()
    space = os.statvfs(run.path)
    free = space.f_bavail * space.f_frsize
    if free < MIN_FREE_BYTES:
        raise StorageError(
            "storage.full", f"only {free >> 20} MiB are free in {run.path}: a checkpoint would not fit. Free some space"
        )
    if space.f_files and space.f_favail < MIN_FREE_INODES:
        raise StorageError(
            "storage.no_inodes", f"only {space.f_favail} inodes are free in {run.path}: remove some files"
        )


def check_all_ranks(world: groups.World, group: dist.ProcessGroup, hosts: Sequence[str]) -> None:
    """Check that all ranks respond within a time limit, on `group` and then on the training's own group.

    Args:
        group: a Gloo group of all ranks with the time-out GROUP_TIMEOUT.
        hosts: the host of each rank.

    Raises:
        NodeError: a rank did not arrive; on rank 0, and on the other ranks if it is rank 0.
        PeerLostError: another rank failed; on the remaining ranks.
    """
    try:
        dist.monitored_barrier(group, timeout=BARRIER_TIMEOUT, wait_all_ranks=True)
    except RuntimeError as error:
        missing = re.search(r"Ranks? (\d+)[\d, ]* failed to pass", str(error))
        rank = int(missing[1]) if missing else 0
        if rank == world.rank or not (missing or "Timed out" in str(error)):
            message = f"not all ranks arrived within {BARRIER_TIMEOUT}: {error}"
            raise PeerLostError("rank.lost_peer", message) from error
        message = f"{hosts[rank]}: rank {rank} did not arrive within {BARRIER_TIMEOUT}: {error}"
        raise NodeError("node.not_responding", message, host=hosts[rank]) from error
    total = torch.ones(1 << 16, device=world.device)
    try:
        dist.all_reduce(total, async_op=True).wait(BARRIER_TIMEOUT)
    except RuntimeError as error:
        message = f"an all-reduce over {world.size} ranks did not complete within {BARRIER_TIMEOUT}: {error}"
        raise PeerLostError("rank.lost_peer", message) from error
    if not bool((total == world.size).all()):
        message = f"an all-reduce over {world.size} ranks returned {total.min():g} to {total.max():g}"
        raise PeerLostError("rank.wrong_result", message)
