"""Check whether a run fits into GPU memory and host memory, before anything is queued.

`--dry-run` shows a verdict on each kind of memory, and `submit` prints a warning if memory is not enough. A verdict
never stops a submission, because the needed memory is only estimated (planning/memory.py). This module does not import
torch, because `--dry-run` runs on the login node.

Ranks on CPUs keep weights, gradients, optimizer state and activations in host memory. Ranks on GPUs use host memory for
the process itself, for the copy from which a checkpoint is written, and for the state that `parallel.offload` moves.
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
from planning.timeline import Action, rank_actions
from slurm.submit.executor import Executor

PROCESS_BYTES = 300_000_000
"""Memory of a rank's process: Python and a CPU build of torch with all modules of a run (290 MB, measured)."""
CUDA_PROCESS_BYTES = 2_000_000_000
"""Assumed memory of a rank's process with CUDA's libraries and pinned buffers."""
CGROUPS = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")
_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
"""Files that contain a memory limit, in versions 2 and 1 of control groups."""
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class HostMemory(NamedTuple):
    """Host memory of the fullest node of a run, in bytes."""

    ranks: int
    """Number of ranks on the node."""
    start: int
    """Memory at the start: processes and prefetched batches. On CPUs and with `parallel.offload`, also weights,
    gradients and optimizer state."""
    peak: int
    """Memory during a save. It includes the copy from which the checkpoint is written, and activations on CPUs."""


def estimate_host_memory(
    config: Config, layout: Layout, vocab: int, on_gpu: bool, one_machine: bool = False
) -> HostMemory:
    """Return the host memory of the fullest node of a run that trains the decoder.

    Args:
        config: The config.
        layout: Its layout.
        vocab: Size of the vocabulary.
        on_gpu: Whether ranks compute on GPUs.
        one_machine: Whether all ranks run on one machine, regardless of the config's number of nodes.
    """
    # Without actions, the estimate contains no activations. On GPUs, activations are not in host memory. On CPUs,
    # activations are not counted if computing the actions needs torch.
    no_actions: list[list[Action]] = [[] for _ in range(layout.pp)]
    actions_of_ranks = no_actions if needs_torch(layout) or on_gpu else rank_actions(layout)
    # Bytes of a rank's samples of one step. A token id has 8 bytes.
    batch = 8 * config.train.global_batch // layout.dp * config.data.sequence_length
    # Memory of each pipeline rank in bytes: at the start, and at the peak.
    starts = []
    peaks = []
    for pp_rank, actions in enumerate(actions_of_ranks):
        memory = estimate_memory(config, layout, pp_rank, vocab, actions, on_cpu=not on_gpu)
        state = memory.weights + memory.optimizer
        start = batch + (CUDA_PROCESS_BYTES if on_gpu else PROCESS_BYTES)
        if config.parallel.offload or not on_gpu:
            start += state + memory.gradients
        starts.append(start)
        # A save copies weights and optimizer state.
        peaks.append(start + state + (0 if on_gpu else memory.gathered + memory.activations))
    per_node = layout.world_size if one_machine else layout.ranks_per_node
    fullest = (0, 0)
    for first in range(0, layout.world_size, per_node):
        ranks = range(first, min(first + per_node, layout.world_size))
        pp_ranks = [layout.coordinates(rank).pp for rank in ranks]
        peak = sum(peaks[pp_rank] for pp_rank in pp_ranks)
        start = sum(starts[pp_rank] for pp_rank in pp_ranks)
        fullest = max(fullest, (peak, start))
    peak, start = fullest
    return HostMemory(min(per_node, layout.world_size), start, peak)


def local_memory_limit() -> tuple[int, str]:
    """Return the bytes of memory that this process and its children may use, and a description of the limit.

    The limit is the memory of this machine, or the lowest limit of the process's control groups if this is lower.
    """
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    source = "this machine"
    for file in _list_limit_files():
        with suppress(OSError, ValueError):  # The text `max` means that there is no limit.
            if (limit := int(file.read_text())) < size:
                size = limit
                source = f"the limit in {file}"
    return size, source


def _list_limit_files() -> Iterator[Path]:
    """Yield the files that may limit this process's memory: those of its control group and of all groups above it."""
    groups = {CGROUPS, CGROUPS / "memory"}  # The root group of version 2, and that of version 1 for memory.
    with suppress(OSError):
        for line in PROCESS_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):  # The line of version 2 has no controllers.
                root = CGROUPS / controllers
                process_group = Path(path.lstrip("/"))
                groups |= {root / group for group in (process_group, *process_group.parents)}
    for group in sorted(groups):
        yield from (group / name for name in _LIMIT_FILES)


def requested_memory(config: Config, per_node: int) -> tuple[int, str] | None:
    """Return the bytes per node that a job of stage train requests from Slurm, and the key with this value.

    Return None if no key sets the memory.
    """
    site = config.resolve_site("train")
    if site.mem_gb:
        return int(site.mem_gb * 2**30), "mem_gb"
    cpus = per_node * (site.cpus_per_task or 1)
    for option, count in (("mem-per-cpu", cpus), ("mem-per-gpu", site.gpus_per_node)):
        if (size := _parse_slurm_memory(str(site.sbatch.get(option, "")))) and count:
            return size * count, f"sbatch.{option}"
    return None


def allocated_memory(env: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the bytes per node of this process's allocation, and the variable with this value; None if unknown."""
    size = _parse_slurm_memory(env.get("SLURM_MEM_PER_NODE", ""))
    return (size, "this allocation (SLURM_MEM_PER_NODE)") if size else None


def _parse_slurm_memory(text: str) -> int:
    """Return the bytes of a size in the format of sbatch, whose default unit is MiB.

    Return 0 if `text` is malformed. The size 0 itself requests all memory of the node, so the bytes are also unknown.
    """
    size = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    return int(size[1]) * _UNITS[size[2].upper() or "M"] if size else 0


@cache
def has_gpu() -> bool:
    """Return whether this machine has a GPU with NVIDIA's or AMD's driver, without loading a library."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def describe_host_memory(memory: HostMemory, limit: tuple[int, str] | None) -> tuple[bool, str]:
    """Return whether a node's ranks fit into its memory, and a description.

    Args:
        memory: The memory that the ranks need.
        limit: Bytes of the node's memory, and the setting with this value. None: unknown, which counts as enough.
    """
    ranks = f"the {memory.ranks} ranks of a node need" if memory.ranks > 1 else "the rank of a node needs"
    need = f"{ranks} about {describe_size(memory.start)} at the start and {describe_size(memory.peak)} during a save"
    if limit is None:
        return True, f"{need}; the node's memory is unknown (site.mem_gb)"
    size, source = limit
    fits = memory.peak <= size
    verdict = "fits" if fits else "does not fit"
    return fits, f"{verdict}: {need}, of {size / GB:,.1f} GB ({source})"


class MemoryVerdict(NamedTuple):
    """Whether a run fits into one kind of memory."""

    kind: str
    """`GPU` or `host`."""
    fits: bool
    """Whether the run fits. False if the config names an unknown GPU. True if the size of the memory is unknown, or if
    the needed memory is not estimated."""
    message: str
    """Description of the needed and the available memory."""


_MEMORY_SECTIONS = ("model", "parallel", "data", "train", "stages", "site")
"""Sections of the config whose keys affect memory, so that the points of a sweep may need different amounts."""


_MAX_ESTIMATED_LAYERS = 100_000
"""Models of more layers do not fit any machine. Memory is not estimated, because an estimate lists all parameters."""


def check_memory(config: Config, executor: Executor, machine: str | None = None) -> list[MemoryVerdict]:
    """Return the verdicts on a config.

    The points of a sweep may need different amounts of memory. If a point does not fit, return the verdicts on the
    first such point, otherwise those on the last point.

    Args:
        config: The config.
        executor: The executor of its jobs; not `auto`.
        machine: A machine of configs/machines, or a machine file. It replaces the config's GPU.

    Raises:
        UserError: There is no such `machine`, or its file is invalid.
    """
    # The values of a search are not known yet.
    differs_by_point = config.sweep is not None and any(
        key.split(".")[0] in _MEMORY_SECTIONS for values in config.sweep.points()[:1] for key in values
    )
    verdicts: list[MemoryVerdict] = []
    for point in make_point_configs(config) if differs_by_point else [config]:
        layout = resolve_layout(point)
        vocab = point.model.vocab_size or point.data.tokenizer.vocab_size
        if point.model.other_model_key is None and point.model.layers > _MAX_ESTIMATED_LAYERS:
            verdicts = [MemoryVerdict("host", False, f"does not fit: model.layers is {point.model.layers:,}")]
        else:
            verdicts = [
                *_check_gpu_memory(point, layout, vocab, machine),
                *_check_host_memory(point, layout, vocab, executor),
            ]
        if not all(verdict.fits for verdict in verdicts):
            if not differs_by_point:
                return verdicts
            return [verdict._replace(message=f"point {point.run.name}: {verdict.message}") for verdict in verdicts]
    return verdicts


def memory_warnings(config: Config, executor: Executor) -> list[str]:
    """Return a warning for each kind of memory into which a run does not fit."""
    verdicts = check_memory(config, executor)
    return [f"warning: {verdict.kind} memory: {verdict.message}" for verdict in verdicts if not verdict.fits]


def _check_gpu_memory(config: Config, layout: Layout, vocab: int, machine: str | None) -> Iterator[MemoryVerdict]:
    """Yield the verdict on GPU memory. Yield nothing if the config does not give the size of the GPU.

    If the GPU may have several sizes, the run fits if it fits into one of them. If `site.machine` is invalid, the
    verdict is negative. If `machine` is invalid, raise UserError.
    """
    kind = "GPU"
    try:
        sizes = list_gpu_sizes(config, machine)
    except UserError as error:
        if machine is not None:
            raise
        yield MemoryVerdict(kind, False, f"site.machine: {error}")
        return
    if not sizes:
        return
    if (key := config.model.other_model_key) is not None:
        yield MemoryVerdict(kind, True, f"not estimated for {key}")
        return
    if needs_torch(layout):
        message = f"not estimated here for parallel.schedule {layout.schedule}: run `plan CONFIG`"
        yield MemoryVerdict(kind, True, message)
        return
    ranks = estimate_memory_of_ranks(config, layout, vocab)
    messages = []
    fits_any = False
    for source, gib in sizes:
        fit = check_gpu_fit(config, layout, ranks, gib)
        name = f"{source}: {gib:g} GiB"
        if fit.fits:
            fits_any = True
            remaining = (fit.size - fit.needed - fit.reserved) / GB
            messages.append(f"fits: {remaining:.1f} of {fit.size / GB:.1f} GB remain ({name})")
        else:
            messages.append(f"does not fit: {describe_overflow(config, fit, name)}")
    yield MemoryVerdict(kind, fits_any, "; ".join(messages))


def list_gpu_sizes(config: Config, machine: str | None = None) -> list[tuple[str, float]]:
    """Return the possible sizes of the run's GPUs in GiB, each with the setting that gives the size.

    The first of these settings that is set decides: `machine`, `site.gpu_memory_gib`, `site.machine`, `site.gpu_type`.
    GPUs of one type may exist in several sizes. Return [] if nothing is set, or if the GPU type is unknown.

    Raises:
        UserError: There is no such machine, or its file is invalid.
    """
    site = config.resolve_site("train")
    if machine is None and site.gpu_memory_gib is not None:
        return [("site.gpu_memory_gib", site.gpu_memory_gib)]
    if machine is None and site.machine is None and site.gpu_type is None:
        return []
    from planning.machine import MACHINES, load_machine

    if name := machine or site.machine:
        return [(f"{'--machine' if machine else 'site.machine'} {name}", load_machine(name).memory_gib)]
    source = f"site.gpu_type {site.gpu_type}"
    gpu_type = str(site.gpu_type).lower().replace("_", "-")
    if mig_slice := re.search(r"\dg\.(\d+)gb", gpu_type):  # such as a100-3g.20gb, with 20 GB
        return [(source, float(mig_slice[1]))]
    gpu_type = gpu_type.removeprefix("nvidia-")
    model = re.match(r"[a-z]+\d+[a-z]*", gpu_type)  # such as h100
    size = re.search(r"(\d+)-?gb", gpu_type)  # such as 80gb
    names = [path.stem for path in MACHINES.glob("*.yaml") if model and path.stem.split("-")[0] == model[0]]
    sizes = {load_machine(name).memory_gib for name in ([gpu_type] if gpu_type in names else names)}
    if size and float(size[1]) in sizes:
        sizes = {float(size[1])}
    return [(source, gib) for gib in sorted(sizes)]


def _check_host_memory(config: Config, layout: Layout, vocab: int, executor: Executor) -> Iterator[MemoryVerdict]:
    """Yield the verdict on host memory. Yield nothing for a model other than the decoder: its size is unknown."""
    if config.model.other_model_key is not None:
        return
    if executor == "slurm":
        site = config.resolve_site("train")
        config_names_gpu = site.gpu_memory_gib is not None or site.machine is not None or site.gpu_type is not None
        on_gpu = site.gpus_per_node > 0 or config.parallel.backend == "nccl" or config_names_gpu
        limit = requested_memory(config, layout.ranks_per_node)
    else:
        on_gpu = has_gpu()
        limit = local_memory_limit() if executor == "local" else allocated_memory(os.environ)
    memory = estimate_host_memory(config, layout, vocab, on_gpu, one_machine=executor == "local")
    yield MemoryVerdict("host", *describe_host_memory(memory, limit))
