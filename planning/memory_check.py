"""Whether a training fits: GPU memory as `plan` counts it, and host memory, before anything is queued.

`--dry-run` shows both verdicts; submitting prints the ones that say no. Nothing is refused, because both are estimates.
No torch: what needs it is left to `plan`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.base.errors import UserError
from pipeline.config.read import point_configs
from pipeline.config.sections import Config
from pipeline.parallel.mesh import Layout, resolve_layout
from planning.host_memory import (
    describe_host_memory,
    has_gpu,
    host_memory,
    memory_asked_for,
    memory_here,
    memory_of_allocation,
)  # fmt: skip
from planning.memory import GB, describe_overflow, gpu_fit, memories, needs_torch
from slurm.submit.executor import Executor


class Verdict(NamedTuple):
    """Whether a training fits into one kind of memory."""

    kind: str
    """`GPU` or `host`."""
    fits: bool
    """False also if the config names a GPU that nobody knows; True also if nothing is known."""
    words: str


_SWEPT = ("model", "parallel", "data", "train", "stages", "site")
"""Sections whose keys change what a point of a sweep needs."""


def memory_verdicts(config: Config, executor: Executor, machine: str | None = None) -> list[Verdict]:
    """Return the verdicts on a config's training; of a sweep, those on a point that does not fit, if there is one.

    Args:
        config: The config.
        executor: Where its jobs would run; not `auto`.
        machine: A machine of configs/machines, or a file, whose GPU to check for instead of the config's.

    Raises:
        UserError: There is no such `machine`.
    """
    if config.measure is not None:
        return []
    swept = config.sweep is not None and any(key.split(".")[0] in _SWEPT for key in config.sweep.points()[0])
    found: list[Verdict] = []
    for point in point_configs(config) if swept else [config]:
        layout, vocab = resolve_layout(point), point.model.vocab_size or point.data.tokenizer.vocab_size
        found = [*_gpu_verdict(point, layout, vocab, machine), *_host_verdict(point, layout, vocab, executor)]
        if not all(one.fits for one in found):
            return [one._replace(words=f"point {point.run.name}: {one.words}") for one in found] if swept else found
    return found


def memory_warnings(config: Config, executor: Executor) -> list[str]:
    """Return a line for each kind of memory that a training does not fit into."""
    found = memory_verdicts(config, executor)
    return [f"warning: {one.kind} memory: {one.words}" for one in found if not one.fits]


def _gpu_verdict(config: Config, layout: Layout, vocab: int, machine: str | None) -> Iterator[Verdict]:
    """Yield the verdict on the GPU's memory, if the GPU's size is known."""
    kind = "GPU"
    try:
        sizes = gpu_sizes(config, machine)
    except UserError as error:
        if machine is not None:
            raise
        yield Verdict(kind, False, f"site.machine: {error}")
        return
    if not sizes:
        return
    if config.model.target is not None:
        yield Verdict(kind, True, "not estimated for model.target")
        return
    if needs_torch(layout):
        yield Verdict(kind, True, f"not estimated here for parallel.schedule {layout.schedule}: `plan CONFIG` does")
        return
    ranks, words, fits = memories(config, layout, vocab), list[str](), False
    for whence, gib in sizes:
        fit = gpu_fit(config, layout, ranks, gib)
        name, fits = f"{whence}: {gib:g} GiB", fits or fit.fits
        left = f"{(fit.size - fit.needed - fit.reserved) / GB:.1f} of {fit.size / GB:.1f} GB are left ({name})"
        words.append(f"fits: {left}" if fit.fits else f"does not fit: {describe_overflow(config, fit, name)}")
    yield Verdict(kind, fits, "; ".join(words))


def gpu_sizes(config: Config, machine: str | None = None) -> list[tuple[str, float]]:
    """Return where the size of the training's GPUs is from, and the GiB; several if the GPU's type has several sizes.

    In this order: `machine`, `site.gpu_memory_gib`, `site.machine`, `site.gpu_type`. Empty if none says it. Raises
    UserError if there is no such machine.
    """
    site = config.site_of("train")
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


def _host_verdict(config: Config, layout: Layout, vocab: int, executor: Executor) -> Iterator[Verdict]:
    """Yield the verdict on host memory, except for a model of the user's own, whose size is not known."""
    if config.model.target is not None:
        return
    if executor == "slurm":
        site = config.site_of("train")
        named = site.gpu_memory_gib is not None or site.machine is not None or site.gpu_type is not None
        on_gpu = site.gpus_per_node > 0 or config.parallel.backend == "nccl" or named
        limit = memory_asked_for(config, layout.ranks_per_node)
    else:
        on_gpu = has_gpu()
        limit = memory_here() if executor == "local" else memory_of_allocation(os.environ)
    found = host_memory(config, layout, vocab, on_gpu, one_machine=executor == "local")
    yield Verdict("host", *describe_host_memory(found, limit))
