"""Stage measure: operators, links and real steps of a config, timed in the run's own ranks; a machine file of them.

A run with a section `measure` has this stage alone, and needs no data: tokens are drawn. Everything is timed on all
ranks at once, as a training does it, so that what they share is shared. pipeline/planning/measure.py fits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from pipeline.base.errors import Exit, UserError
from pipeline.base.place import Place
from pipeline.base.signals import StopFlag
from pipeline.planning.machine import Exchange, Machine, Step, Timings, load_machine
from pipeline.planning.measure import fitted, shapes, write_machine
from pipeline.planning.workload import Workload, workload_of
from pipeline.run.directory import Run, now
from pipeline.run.stages import Progress

if TYPE_CHECKING:
    from pipeline.comm.groups import World
    from pipeline.config.layout import Layout
    from pipeline.config.sections import Config

REPEATS = 7
"""Of a step; of an operator three times as many."""
_WARM_UP = 2
_SHORT_S = 2e-3
"""What is shorter is timed several times in a row."""
_COPIES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of collectives."""


def missing(run: Run) -> str | None:
    """Why it is not done; None when the machine file is there."""
    wanted = run.config.measure
    return None if wanted is None or wanted.file.exists() else f"{wanted.file} is not written yet"


def look(run: Run) -> None:
    """Raise UserError for what cannot be measured."""
    config = run.config
    if config.model.target is not None or config.train.precision == "fp8":
        raise UserError("plan --measure: of the decoder, in fp32, bf16 or fp16; not of model.target, nor with fp8")
    if config.measure is not None and config.measure.machine is not None:
        _before(str(config.measure.machine))


def progress(run: Run) -> Progress:
    """How far it is."""
    return Progress(missing(run) or f"{run.config.measure and run.config.measure.file}")


def _before(name: str) -> Machine:
    machine = load_machine(name)
    if machine.timings is None:
        raise UserError(f"{name} was not measured: --measure goes on from files that it wrote itself")
    return machine


def main(run: Run, place: Place, options: Mapping[str, str], flag: StopFlag) -> Exit:
    """Time, fit and write. Raises UserError where the file exists."""
    flag.leave_at_once()
    import torch

    from pipeline.comm import groups
    from pipeline.config.layout import layout_of

    look(run)
    config, wanted = run.config, run.config.measure
    assert wanted is not None
    groups.make_deterministic(config)
    world = groups.join(place, config)
    per_node, vocab = place.local_world_size, config.model.vocab_size or config.data.tokenizer.vocab_size
    layout = layout_of(config, world.size, per_node, vocab)
    work = workload_of(config, layout, vocab)
    before = None if wanted.machine is None else _before(str(wanted.machine))
    clock = Clock(world)
    if before is None:
        timings = Timings(
            products=list(clock.products(work)), attention=clock.attention(work),
            copies=[(size, clock.copy(size)) for size in _COPIES], launch=clock.launch(),
            exchanges=list(clock.exchanges(per_node)), steps=[clock.step(config, layout, work)],
        )  # fmt: skip
    else:
        assert before.timings is not None
        steps = [*before.timings.steps, clock.step(config, layout, work)]
        exchanges = before.timings.exchanges or list(clock.exchanges(per_node))
        timings = before.timings.model_copy(update={"steps": steps, "exchanges": exchanges})
    if world.first:
        if before is not None:
            gpu, gib, units, cores = before.gpu, before.memory_gib, before.multiprocessors, before.cores
        elif world.device.type == "cuda":
            facts = torch.cuda.get_device_properties(world.device)
            gpu, gib, units, cores = facts.name, facts.total_memory / 2**30, facts.multi_processor_count, None
        else:
            cores = max(1, len(os.sched_getaffinity(0)) // config.train.threads)
            gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / per_node
            gpu, units = f"CPU ({os.uname().machine}), train.threads {config.train.threads}", 1
        told = [
            f"Measured by `plan --measure` on {os.uname().nodename}, {now()}, with torch {torch.__version__}, backend "
            f"{world.backend}:",
            f"{world.size} ranks, {per_node} on each node: {layout.words()}; {len(timings.steps)} timed steps.",
            "Figures are those that were reached, peaks too.",
            _alone(world.size, per_node),
        ]
        write_machine(fitted(timings, gpu, gib, units, cores), wanted.file, told)
        print(f"written: {wanted.file}", flush=True)
    groups.leave()
    return Exit.DONE


def _alone(size: int, per_node: int) -> str:
    """What of the links could not be told."""
    if size == 1:
        return "One rank: its links are not known, and taken for free."
    if size == per_node:
        return "One node: what is said of links between nodes is that of those inside."
    return "" if per_node > 1 else "One rank a node: what is said of links inside is that of those between."


class Clock:
    """Times what all ranks do at the same moment, on their devices; medians of the slowest rank."""

    def __init__(self, world: World) -> None:
        import torch

        self.world, self.torch, self.device = world, torch, world.device

    def _wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def _together(self) -> None:
        self.torch.distributed.all_reduce(self.torch.zeros(1, device=self.device))
        self._wait()

    def median_s(self, call: Callable[[], object], repeats: int = 3 * REPEATS, times: int = 1) -> float:
        """Seconds of one call."""
        torch, found = self.torch, []
        for _ in range(_WARM_UP + repeats):
            self._together()
            began = time.perf_counter()
            for _ in range(times):
                call()
            self._wait()
            found.append((time.perf_counter() - began) / times)
        slowest = torch.tensor([median(found[_WARM_UP:])], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        seconds = float(slowest.item())
        if seconds * times < _SHORT_S and times == 1:
            return self.median_s(call, repeats, int(_SHORT_S / seconds) + 1)
        return seconds

    def _drawn(self, work: Workload, *shape: int) -> Any:
        dtype = {"fp32": self.torch.float32, "fp16": self.torch.float16}.get(work.precision, self.torch.bfloat16)
        return self.torch.randn(shape, dtype=dtype, device=self.device)

    def products(self, work: Workload) -> Iterator[tuple[int, int, int, float]]:
        """Each matrix product of the work's shapes."""
        for m, n, k in shapes(work):
            a, b = self._drawn(work, m, k), self._drawn(work, n, k)
            yield m, n, k, self.median_s(partial(self.torch.matmul, a, b.T))

    def attention(self, work: Workload) -> float:
        """One block's, causal, forward."""
        heads = work.micro_batch, work.heads // work.tensor, work.sequence, work.head
        q, k, v = (self._drawn(work, *heads) for _ in range(3))
        attend = self.torch.nn.functional.scaled_dot_product_attention
        return self.median_s(lambda: attend(q, k, v, is_causal=True))

    def copy(self, size: int) -> float:
        """A copy of so many bytes."""
        source = self.torch.ones(size, dtype=self.torch.uint8, device=self.device)
        target = self.torch.empty_like(source)
        return self.median_s(lambda: target.copy_(source))

    def launch(self) -> float:
        """An operator on one number."""
        number = self.torch.zeros(1, device=self.device)
        return self.median_s(lambda: number.add_(1.0))

    def exchanges(self, per_node: int) -> Iterator[Exchange]:
        """Collectives and messages of several sizes: inside nodes, then between ranks of the same place on theirs."""
        dist, size, rank = self.torch.distributed, self.world.size, self.world.rank
        node, place = divmod(rank, per_node)
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch before 2.13
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        ways = {False: [range(first, first + per_node) for first in range(0, size, per_node)]}
        ways[True] = [range(first, size, per_node) for first in range(per_node)]
        for between, all_members in ways.items():
            made = [dist.new_group(list(members)) for members in all_members]  # every rank makes every group
            number = place if between else node
            members, group = all_members[number], made[number]
            for bytes_ in _SIZES if len(members) > 1 else ():
                count = bytes_ // 4 // len(members)
                part = self.torch.ones(count, device=self.device)
                whole = self.torch.ones(count * len(members), device=self.device)
                calls: dict[str, Callable[[], object]] = {
                    "all_reduce": partial(dist.all_reduce, whole, group=group),
                    "all_gather": partial(all_gather, whole, part, group=group),
                    "reduce_scatter": partial(reduce_scatter, part, whole, group=group),
                    "send": partial(self._there_and_back, members, group, whole),
                }
                for kind, call in calls.items():
                    seconds = self.median_s(call, REPEATS) / (2 if kind == "send" else 1)
                    values = {"size": whole.nbytes, "ranks": len(members), "between": between, "seconds": seconds}
                    yield Exchange.model_validate({"kind": kind, **values})

    def _there_and_back(self, members: range, group: Any, tensor: Any) -> None:
        """A message to the neighbour, and its answer; ranks in pairs, a last one alone."""
        dist, place = self.torch.distributed, members.index(self.world.rank)
        if (other := place ^ 1) < len(members):
            for sender in (0, 1):
                (dist.send if place % 2 == sender else dist.recv)(tensor, members[other], group=group)

    def step(self, config: Config, layout: Layout, work: Workload) -> Step:
        """Real steps of the engine that trains, on drawn tokens."""
        from pipeline.model.task import Task
        from pipeline.train.engine import Engine

        task = Task(config, work.vocab)
        engine, numbers = Engine(config, layout, self.world, task), iter(range(1, 1 << 30))
        rows = config.train.global_batch // layout.data
        drawn = self.torch.randint(0, work.vocab, (rows, work.sequence + 1), device=self.device)

        def call() -> None:
            engine.backward({"tokens": drawn}, next(numbers))
            engine.update(float(engine.clip(config.optimizer.clip_norm)))

        return Step(work=work, ranks_per_node=layout.ranks_per_node, seconds=self.median_s(call, REPEATS))
