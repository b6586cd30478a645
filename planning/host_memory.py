"""Host memory of a training: what the ranks of its fullest node hold, and what there is for them.

Ranks on CPUs hold everything in host memory: weights, gradients, optimizer state and activations. Ranks on GPUs hold
there what `parallel.offload` moves, the copy that a checkpoint is written from, and the process itself. The figures are
those of planning/memory.py. No torch: `--dry-run` uses them on the login node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pipeline.config.sections import Config
from pipeline.parallel.mesh import Layout
from planning.memory import GB, describe_size, memory, needs_torch
from planning.timeline import actions

PROCESS = 300_000_000
"""Bytes of a rank's process: Python and a CPU build of torch with all that a training imports (290 MB, measured)."""
CUDA_PROCESS = 2_000_000_000
"""The same with CUDA's libraries, and pinned buffers: an assumption."""
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files of a memory limit, in versions 2 and 1 of control groups."""
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class HostMemory(NamedTuple):
    """Bytes of the fullest node of a training."""

    ranks: int
    """Ranks on the node."""
    start: int
    """With weights, gradients, optimizer state, and the batches that are read ahead."""
    peak: int
    """With activations, if ranks compute on CPUs, and the copy that a checkpoint is written from."""


def host_memory(config: Config, layout: Layout, vocab: int, on_gpu: bool, one_machine: bool = False) -> HostMemory:
    """Return what the fullest node of a training of the decoder holds.

    Args:
        config: The config.
        layout: Its layout.
        vocab: The tokenizer's size.
        on_gpu: Whether ranks compute on GPUs.
        one_machine: Whether all ranks run on one machine, whatever the config's number of nodes.
    """
    starts, peaks = [], []
    orders = [[] for _ in range(layout.pp)] if needs_torch(layout) or on_gpu else actions(layout)
    batch = 8 * config.train.global_batch // layout.dp * config.data.sequence_length
    for rank, order in enumerate(orders):
        held = memory(config, layout, rank, vocab, order, on_cpu=not on_gpu)
        state = held.weights + held.optimizer
        at_start = batch + (CUDA_PROCESS if on_gpu else PROCESS)
        at_start += state + held.gradients if config.parallel.offload or not on_gpu else 0
        starts.append(at_start)
        peaks.append(at_start + state + (0 if on_gpu else held.gathered + held.activations))
    per_node, fullest = layout.world_size if one_machine else layout.ranks_per_node, (0, 0)
    for first in range(0, layout.world_size, per_node):
        stages = [layout.coordinates(rank).pp for rank in range(first, min(first + per_node, layout.world_size))]
        fullest = max(fullest, (sum(peaks[at] for at in stages), sum(starts[at] for at in stages)))
    return HostMemory(min(per_node, layout.world_size), fullest[1], fullest[0])


def memory_here() -> tuple[int, str]:
    """Return the bytes of this machine's memory that this process and its children may use, and who sets the limit."""
    size, whence = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    for file in _limit_files():
        with suppress(OSError, ValueError):  # `max`: no limit
            if (limit := int(file.read_text())) < size:
                size, whence = limit, f"the limit in {file}"
    return size, whence


def _limit_files() -> Iterator[Path]:
    """Yield the files that may limit this process's memory: those of its control group and of all above it."""
    groups = {CGROUPS, CGROUPS / "memory"}
    with suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = CGROUPS / controllers
                own = Path(path.lstrip("/"))
                groups |= {root / part for part in (own, *own.parents)}
    for group in sorted(groups):
        yield from (group / name for name in _LIMITS)


def memory_asked_for(config: Config, per_node: int) -> tuple[int, str] | None:
    """Return the bytes per node that a job of the training asks Slurm for, and the keys; None if it does not say."""
    site = config.site_of("train")
    if site.mem_gb:
        return int(site.mem_gb * 2**30), "mem_gb"
    cpus = per_node * (site.cpus_per_task or 1)
    for option, times in (("mem-per-cpu", cpus), ("mem-per-gpu", site.gpus_per_node)):
        if (size := _bytes_of(str(site.sbatch.get(option, "")))) and times:
            return size * times, f"sbatch.{option}"
    return None


def memory_of_allocation(env: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the bytes per node of the allocation that this process is in, and the variable; None if unknown."""
    size = _bytes_of(env.get("SLURM_MEM_PER_NODE", ""))
    return (size, "this allocation (SLURM_MEM_PER_NODE)") if size else None


def _bytes_of(text: str) -> int:
    """Return the bytes of a size as sbatch takes it, in MiB if there is no unit; 0 for anything else, and for all."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    return int(found[1]) * _UNITS[found[2].upper() or "M"] if found else 0


@cache
def has_gpu() -> bool:
    """Return whether this machine has a GPU that NVIDIA's or AMD's driver offers; no library is loaded."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def describe_host_memory(found: HostMemory, limit: tuple[int, str] | None) -> tuple[bool, str]:
    """Return whether a node's ranks fit into `limit`, and the verdict in words; unknown limits count as enough."""
    ranks = f"the {found.ranks} ranks of a node hold" if found.ranks > 1 else "the rank of a node holds"
    words = f"{ranks} some {describe_size(found.start)} at the start and {describe_size(found.peak)} at a save"
    if limit is None:
        return True, f"{words}; the node's memory is not known (site.mem_gb)"
    size, whence = limit
    fits = found.peak <= size
    verdict = "fits" if fits else "does not fit"
    return fits, f"{verdict}: {words}, of {size / GB:,.1f} GB ({whence})"
