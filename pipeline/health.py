"""The check at the start of a training: seconds that find a bad node before it costs hours.

On its own, each rank checks its device (memory that is free, a matrix product with a known result), and one rank per
node the run's file system (write, sync, read back; free space and inodes). Together they pass a barrier that names
those who do not come, and one all-reduce of the training's own group. A node that fails is a NodeError: the supervisor
notes it, and the job goes on without it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.errors import NodeError, PeerLostError, StorageError
from pipeline.groups import World
from pipeline.run import Run
from slurm.environment import Place

TOGETHER = timedelta(seconds=120)
LEAST_FREE_BYTES, LEAST_FREE_INODES = 16 << 20, 100
_SIZE = 256


def check_alone(run: Run, place: Place, device: torch.device) -> None:
    """This rank's device, and (first rank of a node) the file system. Raises NodeError or StorageError."""
    host = os.uname().nodename
    try:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            if free < 0.5 * total:
                raise NodeError(
                    f"{host}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free on {device} before training: "
                    "somebody else uses it, or a process of an earlier job hangs"
                )
        ones = torch.ones((_SIZE, _SIZE), device=device)
        found = float((ones @ ones).sum())
        if found != float(_SIZE**3):
            raise NodeError(f"{host}: {device} multiplies wrongly: {found} instead of {float(_SIZE**3)}")
    except RuntimeError as error:  # what CUDA raises for a broken device
        raise NodeError(f"{host}: {device} does not work: {error}") from error
    if place.local_rank == 0:
        _check_files(run, host, place.node_rank)


def _check_files(run: Run, host: str, node: int) -> None:
    file = run.jobs / f".check-{node}"
    content = os.urandom(1 << 16)
    try:
        with open(file, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        if file.read_bytes() != content:
            raise NodeError(f"{host}: what is read from {run.path} is not what was written")
    finally:
        with suppress(OSError):
            file.unlink()
    space = os.statvfs(run.path)
    free = space.f_bavail * space.f_frsize
    if free < LEAST_FREE_BYTES:
        raise StorageError(f"only {free >> 20} MiB are free in {run.path}: a checkpoint would not fit; free some")
    if space.f_files and space.f_favail < LEAST_FREE_INODES:
        raise StorageError(f"only {space.f_favail} inodes are free in {run.path}: remove some files")


def check_together(place: Place, world: World, group: dist.ProcessGroup) -> None:
    """All ranks, within a bound: `group` (Gloo) names those who do not come; then the training's own group.

    Raises NodeError on rank 0, for the first host that did not come, and PeerLostError elsewhere.
    """
    try:
        dist.monitored_barrier(group, timeout=TOGETHER, wait_all_ranks=True)
    except RuntimeError as error:
        missing = [int(number) for number in re.findall(r"\d+", str(error).partition("anks")[2])]
        if place.rank or not missing or missing[0] >= world.size:
            raise PeerLostError(f"not all ranks came within {TOGETHER}: {error}") from error
        node = missing[0] // place.local_world_size
        host = place.hosts[node] if node < len(place.hosts) else f"node {node}"
        raise NodeError(f"{host}: rank {missing[0]} did not come within {TOGETHER}: {error}", host) from error
    total = torch.ones(1 << 16, device=world.device)
    dist.all_reduce(total)
    if not bool((total == world.size).all()):
        raise NodeError(f"an all-reduce over {world.size} ranks gives {total.min():g} to {total.max():g}")
