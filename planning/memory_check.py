"""Host memory of a training: what the ranks of its fullest node hold, and what there is for them.

Ranks on CPUs hold everything in host memory: weights, gradients, optimizer state and activations. Ranks on GPUs hold
there what `parallel.offload` moves, the copy that a checkpoint is written from, and the process itself. The figures are
those of planning/memory.py. No torch: `--dry-run` uses them on the login node.

Whether a training fits: GPU memory as `plan` counts it, and host memory, before anything is queued.

`--dry-run` shows both verdicts; submitting prints the ones that say no. Nothing is refused, because both are estimates.
No torch: what needs it is left to `plan`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pipeline.base.errors import UserError
from pipeline.config.read import make_point_configs
from pipeline.config.sections import Config
from pipeline.parallel.mesh import Layout, resolve_layout
from planning.memory import (
    GB,
    check_gpu_fit,
    describe_overflow,
    describe_size,
    estimate_memory,
    estimate_memory_of_ranks,
    needs_torch,
)
from planning.timeline import rank_actions
from slurm.submit.executor import Executor

PROCESS = 300_000_000
"""Bytes of a rank's process: Python and a CPU build of torch with all that a training imports (290 MB, measured)."""
CUDA_PROCESS = 2_000_000_000
"""The same with CUDA's libraries, and pinned buffers: an assumption."""
CGROUPS = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")
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


def estimate_host_memory(
    config: Config, layout: Layout, vocab: int, on_gpu: bool, one_machine: bool = False
) -> HostMemory:
    """Return what the fullest node of a training of the decoder holds.

    Args:
        config: The config.
        layout: Its layout.
        vocab: The tokenizer's size.
        on_gpu: Whether ranks compute on GPUs.
        one_machine: Whether all ranks run on one machine, whatever the config's number of nodes.
    """
    starts, peaks = [], []
    orders = [[] for _ in range(layout.pp)] if needs_torch(layout) or on_gpu else rank_actions(layout)
    batch = 8 * config.train.global_batch // layout.dp * config.data.sequence_length
    for rank, order in enumerate(orders):
        held = estimate_memory(config, layout, rank, vocab, order, on_cpu=not on_gpu)
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


def local_memory_limit() -> tuple[int, str]:
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
        for line in PROCESS_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = CGROUPS / controllers
                own = Path(path.lstrip("/"))
                groups |= {root / part for part in (own, *own.parents)}
    for group in sorted(groups):
        yield from (group / name for name in _LIMITS)


def requested_memory(config: Config, per_node: int) -> tuple[int, str] | None:
    """Return the bytes per node that a job of the training asks Slurm for, and the keys; None if it does not say."""
    site = config.resolve_site("train")
    if site.mem_gb:
        return int(site.mem_gb * 2**30), "mem_gb"
    cpus = per_node * (site.cpus_per_task or 1)
    for option, times in (("mem-per-cpu", cpus), ("mem-per-gpu", site.gpus_per_node)):
        if (size := _bytes_of(str(site.sbatch.get(option, "")))) and times:
            return size * times, f"sbatch.{option}"
    return None


def allocated_memory(env: Mapping[str, str]) -> tuple[int, str] | None:
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


class MemoryVerdict(NamedTuple):
    """Whether a training fits into one kind of memory."""

    kind: str
    """`GPU` or `host`."""
    fits: bool
    """False also if the config names a GPU that nobody knows; True also if nothing is known."""
    message: str


_SWEPT = ("model", "parallel", "data", "train", "stages", "site")
"""Sections whose keys change what a point of a sweep needs."""


def check_memory(config: Config, executor: Executor, machine: str | None = None) -> list[MemoryVerdict]:
    """Return the verdicts on a config's training; of a sweep, those on a point that does not fit, if there is one.

    Args:
        config: The config.
        executor: Where its jobs would run; not `auto`.
        machine: A machine of configs/machines, or a file, whose GPU to check for instead of the config's.

    Raises:
        UserError: There is no such `machine`.
    """
    swept = config.sweep is not None and any(key.split(".")[0] in _SWEPT for key in config.sweep.points()[0])
    found: list[MemoryVerdict] = []
    for point in make_point_configs(config) if swept else [config]:
        layout, vocab = resolve_layout(point), point.model.vocab_size or point.data.tokenizer.vocab_size
        found = [*_gpu_verdict(point, layout, vocab, machine), *_host_verdict(point, layout, vocab, executor)]
        if not all(one.fits for one in found):
            return [one._replace(message=f"point {point.run.name}: {one.message}") for one in found] if swept else found
    return found


def memory_warnings(config: Config, executor: Executor) -> list[str]:
    """Return a line for each kind of memory that a training does not fit into."""
    found = check_memory(config, executor)
    return [f"warning: {one.kind} memory: {one.message}" for one in found if not one.fits]


def _gpu_verdict(config: Config, layout: Layout, vocab: int, machine: str | None) -> Iterator[MemoryVerdict]:
    """Yield the verdict on the GPU's memory, if the GPU's size is known."""
    kind = "GPU"
    try:
        sizes = gpu_sizes(config, machine)
    except UserError as error:
        if machine is not None:
            raise
        yield MemoryVerdict(kind, False, f"site.machine: {error}")
        return
    if not sizes:
        return
    if config.model.target is not None:
        yield MemoryVerdict(kind, True, "not estimated for model.target")
        return
    if needs_torch(layout):
        yield MemoryVerdict(
            kind, True, f"not estimated here for parallel.schedule {layout.schedule}: `plan CONFIG` does"
        )
        return
    ranks, words, fits = estimate_memory_of_ranks(config, layout, vocab), list[str](), False
    for whence, gib in sizes:
        fit = check_gpu_fit(config, layout, ranks, gib)
        name, fits = f"{whence}: {gib:g} GiB", fits or fit.fits
        left = f"{(fit.size - fit.needed - fit.reserved) / GB:.1f} of {fit.size / GB:.1f} GB are left ({name})"
        words.append(f"fits: {left}" if fit.fits else f"does not fit: {describe_overflow(config, fit, name)}")
    yield MemoryVerdict(kind, fits, "; ".join(words))


def gpu_sizes(config: Config, machine: str | None = None) -> list[tuple[str, float]]:
    """Return where the size of the training's GPUs is from, and the GiB; several if the GPU's type has several sizes.

    In this order: `machine`, `site.gpu_memory_gib`, `site.machine`, `site.gpu_type`. Empty if none says it. Raises
    UserError if there is no such machine.
    """
    site = config.resolve_site("train")
    if machine is None and site.gpu_memory_gib is not None:
        return [("site.gpu_memory_gib", site.gpu_memory_gib)]
    if machine is None and site.machine is None and site.gpu_type is None:
        return []
    from planning.machine import MACHINES, load_machine

    if named := machine or site.machine:
        return [(f"{'--machine' if machine else 'site.machine'} {named}", load_machine(named).memory_gib)]
    whence, kind = f"site.gpu_type {site.gpu_type}", str(site.gpu_type).lower().replace("_", "-")
    if part := re.search(r"\dg\.(\d+)gb", kind):  # a slice of a GPU (MIG)
        return [(whence, float(part[1]))]
    kind = kind.removeprefix("nvidia-")
    model, size = re.match(r"[a-z]+\d+[a-z]*", kind), re.search(r"(\d+)-?gb", kind)
    names = [path.stem for path in MACHINES.glob("*.yaml") if model and path.stem.split("-")[0] == model[0]]
    found = {load_machine(name).memory_gib for name in ([kind] if kind in names else names)}
    if size and float(size[1]) in found:
        found = {float(size[1])}
    return [(whence, gib) for gib in sorted(found)]


def _host_verdict(config: Config, layout: Layout, vocab: int, executor: Executor) -> Iterator[MemoryVerdict]:
    """Yield the verdict on host memory, except for a model of the user's own, whose size is not known."""
    if config.model.target is not None:
        return
    if executor == "slurm":
        site = config.resolve_site("train")
        named = site.gpu_memory_gib is not None or site.machine is not None or site.gpu_type is not None
        on_gpu = site.gpus_per_node > 0 or config.parallel.backend == "nccl" or named
        limit = requested_memory(config, layout.ranks_per_node)
    else:
        on_gpu = has_gpu()
        limit = local_memory_limit() if executor == "local" else allocated_memory(os.environ)
    found = estimate_host_memory(config, layout, vocab, on_gpu, one_machine=executor == "local")
    yield MemoryVerdict("host", *describe_host_memory(found, limit))
