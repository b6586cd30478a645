"""Stage measure: this machine, timed by the ranks of a training, and a machine file of it.

A run with a section `measure` has this stage alone, and needs no data: tokens are drawn. clock.py takes the timings,
measure.py fits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.signals import StopFlag
from pipeline.config.site import MeasureConfig
from pipeline.parallel.mesh import resolve_layout
from pipeline.run.directory import Run, now
from pipeline.run.stages import Progress
from planning.machine import Machine, load_machine
from planning.measure import WARNING, compared, fitted, write_machine
from planning.workload import workload_of

if TYPE_CHECKING:
    from pipeline.comm.groups import World


def _wanted(run: Run) -> MeasureConfig:
    if run.config.measure is None:
        raise UserError("stage measure is for a run with a section `measure`: plan CONFIG --measure FILE makes one")
    return run.config.measure


def missing(run: Run) -> str | None:
    """Why it is not done; None when the machine file is there."""
    return None if (file := _wanted(run).file).exists() else f"{file} is not written yet"


def progress(run: Run) -> Progress:
    """How far it is; done, with the warnings that stand in the file."""
    if (words := missing(run)) is None:
        lines = (file := _wanted(run).file).read_text(errors="replace").splitlines()
        words = "; ".join([str(file), *(line[2:] for line in lines if line.startswith(f"# {WARNING}"))])
    return Progress(words)


def look(run: Run) -> None:
    """Raise UserError for what cannot be measured."""
    _before(run)
    if run.config.model.target is not None or run.config.train.precision == "fp8" or run.config.data.masked:
        raise UserError("--measure is for the decoder on text, in fp32, bf16 or fp16: no model.target, fp8, prompts")


def _before(run: Run) -> Machine | None:
    """What was measured before, on which this goes on."""
    file = _wanted(run).machine
    machine = None if file is None else load_machine(str(file))
    if machine is not None and machine.timings is None:
        raise UserError(f"{file} was not measured: --measure goes on with a --machine that it wrote itself")
    return machine


def main(run: Run, place: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Time, fit and write. Raises UserError where the file exists."""
    flag.leave_at_once()
    look(run)
    import torch

    from pipeline.comm import groups
    from planning import clock

    config, before, load = run.config, _before(run), os.getloadavg()[0]
    groups.configure_determinism(config)
    world, vocab = groups.join_process_group(place, config), config.model.vocab_size or config.data.tokenizer.vocab_size
    layout = resolve_layout(config, world.size, place.local_world_size, vocab)
    work = workload_of(config, layout, vocab)
    if before is not None and before.timings is not None:
        step = clock.step(config, layout, world, work)
        timings = before.timings.model_copy(update={"steps": [*before.timings.steps, step]})
        facts = before.gpu, before.memory_gib, before.multiprocessors, before.cores
    else:
        timings = clock.operators(config, layout, world, work)
        facts = facts_of(world, config.train.threads, layout.ranks_per_node)
    if world.first:
        told = (
            f"Measured by `plan --measure` on {os.uname().nodename}, {now()}: torch {torch.__version__}, backend "
            f"{world.backend},",
            f"{world.size} ranks, {layout.ranks_per_node} a node: {layout.describe_sizes()}; "
            f"load average {load:.1f} before.",
            "Figures are those that were reached, peaks too. Links are free where one rank measured; on one node those",
            "between nodes are said to be as those inside, with one rank on each node the other way round.",
        )
        machine = fitted(timings, *facts)
        write_machine(machine, _wanted(run).file, [*told, "Its steps:", *compared(machine)])
        print(f"written: {_wanted(run).file}", flush=True)
    groups.leave_process_group()
    return ExitCode.DONE


def facts_of(world: World, threads: int, per_node: int) -> tuple[str, float, int, int | None]:
    """Name, GiB of memory, multiprocessors and cores (in ranks) of what a rank has; all ranks call it."""
    import torch
    import torch.distributed as dist

    from pipeline.comm.groups import new_control_group

    if world.device.type == "cuda":
        found = torch.cuda.get_device_properties(world.device)
        return found.name, found.total_memory / 2**30, found.multi_processor_count, None
    everyone: list[set[int]] = [set()] * world.size
    dist.all_gather_object(
        everyone, os.sched_getaffinity(0), group=new_control_group()
    )  # Slurm gives each rank its own
    first = world.rank - world.rank % per_node
    cores = len(set().union(*everyone[first : first + per_node]))
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / per_node
    return f"CPU ({os.uname().machine}), {threads} × threads", size, 1, max(1, cores // threads)
