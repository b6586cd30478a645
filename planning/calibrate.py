"""From timings to a machine: `plan CONFIG --measure FILE`, without torch. measure_stage.py takes the timings.

Rates are those of the operators of the timed step's shapes; links are α and β of the collectives (collectives.py) by
least squares, each timing with the same relative weight. What then is left of real steps is two figures: how many times
unfused operators move their bytes, which each step tells, and what a collective costs beyond its link, which the
difference of two layouts tells. They are taken where the predicted steps are nearest to the timed ones, as ratios.

Timing what all ranks do at the same moment, on their devices: matrix products, attention, copies, messages, steps.

All ranks at once, as a training does it, so that what they share is shared. A figure is the median of repeats on the
slowest rank; what is short is repeated between two looks at the

Stage measure: this machine, timed by the ranks of a training, and a machine file of it.

A run with a section `measure` has this stage alone, and needs no data: tokens are drawn. py takes the timings,
measure.py fits.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError, make_printable
from pipeline.base.files import write_atomic
from pipeline.base.signals import StopFlag
from pipeline.base.yaml12 import dump_yaml
from pipeline.comm.groups import World
from pipeline.config.sections import Config
from pipeline.config.site import MeasureConfig
from pipeline.model.task import DTYPES, DecoderTask
from pipeline.parallel.mesh import Layout, resolve_layout
from pipeline.run.directory import Run, utc_timestamp
from pipeline.run.stages import Progress
from pipeline.train.engine import Engine
from planning.goodput import minimize
from planning.machine import Attention, Exchange, Link, Machine, Overheads, Step, Timings, load_machine
from planning.predict import TILE, make_rank_model, predict_step
from planning.workload import Workload, matrix_shapes, workload_from_config

if TYPE_CHECKING:
    from pipeline.comm.groups import World


_LEAST = 1e-9
"""Seconds of a latency that timings do not show."""
_EAGER, _CALL_S = (0.1, 50.0), (1e-7, 0.1)
"""Between these the fit looks."""
POOR = 0.15
"""A step that is predicted no nearer than that tells that the machine was busy, or is no such machine."""
WARNING = "POOR FIT:"
"""Before what is said of such a step."""


def fit_line(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """a, b ≥ 0 of seconds = a·x + b·y, for rows (x, y, seconds), by least squares of relative errors."""
    scaled = [(x / seconds, y / seconds) for x, y, seconds in rows]
    xx, yy = (math.fsum(one[at] ** 2 for one in scaled) for at in (0, 1))
    xy, x, y = math.fsum(a * b for a, b in scaled), math.fsum(a for a, _ in scaled), math.fsum(b for _, b in scaled)
    det = xx * yy - xy * xy
    a, b = ((x * yy - y * xy) / det, (y * xx - x * xy) / det) if det > 1e-12 * xx * yy else (0.0, y / yy)
    if b <= 0:
        return (x / xx, 0.0)
    return (a, b) if a >= 0 else (0.0, y / yy)


def hops_and_bytes(one: Exchange) -> tuple[float, float]:
    """How often its time has the latency in it, and how many bytes pass a link: as collectives.py counts them."""
    if one.kind == "send":
        return 1.0, float(one.size)
    times = 2 if one.kind == "all_reduce" else 1
    hops = math.ceil(math.log2(one.ranks)) if one.between else one.ranks - 1
    return float(times * hops), times * one.size * (one.ranks - 1) / one.ranks


def fit_link(exchanges: Iterable[Exchange], crowd: float = 1.0) -> Link | None:
    """Latency and bandwidth that fit; None where nothing was exchanged. `crowd`: ranks that shared a core."""
    rows = [(*hops_and_bytes(one), one.seconds / crowd) for one in exchanges]
    if not rows:
        return None
    latency, per_byte = fit_line(rows)
    return Link(latency=max(_LEAST, latency), bandwidth=1 / max(_LEAST**2, per_byte))


def fit_machine(timings: Timings, gpu: str, memory_gib: float, multiprocessors: int, cores: int | None) -> Machine:
    """The machine that was timed. `cores`: of CPUs, how many ranks a node runs at full speed."""
    work, per_node = timings.steps[0].work, timings.steps[0].ranks_per_node
    crowd = max(1.0, per_node / cores) if cores else 1.0
    half_wave = 0.5 * multiprocessors * TILE
    done = math.fsum(2 * (half_wave + m * n) * k for m, n, k, _ in timings.products)
    rate = crowd * done / math.fsum(seconds for *_, seconds in timings.products)
    fastest = crowd * max(2 * m * n * k / seconds for m, n, k, seconds in timings.products)
    copied, copying = timings.copied
    inside = fit_link((one for one in timings.exchanges if not one.between), crowd)
    between = fit_link((one for one in timings.exchanges if one.between), crowd)
    nobody = Link(latency=_LEAST, bandwidth=1 / _LEAST**2)
    machine = Machine(
        gpu=gpu, memory_gib=memory_gib, bandwidth=2 * copied * crowd / copying, multiprocessors=multiprocessors,
        peak={work.precision: max(rate, fastest)}, achievable={work.precision: rate},
        attention=Attention(portable=1.0, native=1.0), gpus_per_node=per_node, inside=inside or between or nobody,
        between=between or inside or nobody, cores=cores,
        measured=Overheads(eager=1.0, call=0.0), timings=timings,
    )  # fmt: skip
    attention = crowd * make_rank_model(work, machine).attention() / timings.attention
    machine = machine.model_copy(update={"attention": Attention(portable=attention, native=attention)})
    return machine.model_copy(update={"measured": _overheads(machine, timings)})


def _overheads(machine: Machine, timings: Timings) -> Overheads:
    """Those that come nearest to the machine's steps, as ratios."""

    def error(eager: float, call: float) -> float:
        tried = machine.model_copy(update={"measured": Overheads(eager=eager, call=call)})
        found = (
            predict_step(one.work, tried.in_nodes_of(one.ranks_per_node)).step / one.seconds for one in timings.steps
        )
        return math.fsum(math.log(ratio) ** 2 for ratio in found)

    def eager_with(call: float) -> float:
        return minimize(lambda eager: error(eager, call), *_EAGER)

    calls = [0.0]
    if len(timings.steps) > 1:  # one step cannot tell the two apart
        calls.append(minimize(lambda call: error(eager_with(call), call), *_CALL_S))
    call = min(calls, key=lambda call: error(eager_with(call), call))
    return Overheads(eager=eager_with(call), call=call)


def compare_steps(machine: Machine) -> Iterator[str]:
    """Each timed step beside what is predicted of it; with a warning where that is no fit."""
    for one in machine.timings.steps if machine.timings else ():
        found = predict_step(one.work, machine.in_nodes_of(one.ranks_per_node)).step
        told = f"{one.work.words()}: predicted {found:.3g} s, timed {one.seconds:.3g} s"
        poor = abs(found / one.seconds - 1) > POOR
        yield f"{WARNING} {told}: measure again on a quiet machine" if poor else told


def write_machine(machine: Machine, file: Path, told: Sequence[str]) -> None:
    """Write `file`, whole or not at all, with comments. Raises UserError where it exists: it is not replaced."""
    comments = "".join(f"# {make_printable(' '.join(words.split()))}\n" for words in told if words)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        write_atomic(temporary, comments + dump_yaml(_short(json.loads(machine.model_dump_json(exclude_none=True)))))
        os.link(temporary, file)
    except FileExistsError:
        raise UserError(
            make_printable(f"{file} exists, and is not replaced: move it away, or name another file")
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _short(value: Any) -> Any:
    """Plain values with as many digits as a timing is worth."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value


REPEATS = 7
_WARM_UP = 2
_SHORT_S = 2e-3
_COPIED = 1 << 26
"""Bytes of a copy: more than caches hold."""
_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of collectives."""
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch before 2.13
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(device: torch.device, call: Callable[[], object], times: int = 1) -> float:
    """Seconds of one call of so many in a row; all ranks call it."""
    found = []
    for _ in range(_WARM_UP + REPEATS):
        dist.all_reduce(torch.zeros(1, device=device))
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            call()
        _wait(device)
        found.append((time.perf_counter() - began) / times)
    slowest = torch.tensor([median(found[_WARM_UP:])], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = float(slowest.item())
    return median_s(device, call, int(_SHORT_S / seconds) + 1) if times == 1 and seconds < _SHORT_S else seconds


def time_operators(config: Config, layout: Layout, world: World, work: Workload) -> Timings:
    """All of it, of the work's shapes."""
    device, dtype = world.device, DTYPES.get(work.precision, torch.float32)
    drawn = partial(torch.randn, dtype=dtype, device=device)
    q, k, v = drawn(3, work.micro_batch, work.heads // work.tensor, work.sequence, work.head)
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    return Timings(
        products=[
            (m, n, k, median_s(device, partial(torch.matmul, drawn(m, k), drawn(n, k).T)))
            for m, n, k in matrix_shapes(work)
        ],
        attention=median_s(device, partial(scaled_dot_product_attention, q, k, v, is_causal=True)),
        copied=(_COPIED, median_s(device, partial(torch.empty_like(source).copy_, source))),
        exchanges=list(time_exchanges(world, layout.ranks_per_node)),
        steps=[time_step(config, layout, world, work)],
    )


def time_exchanges(world: World, per_node: int) -> Iterator[Exchange]:
    """Collectives and messages of several sizes: inside nodes, then between ranks of the same place on theirs."""
    node, place = divmod(world.rank, per_node)
    inside = [range(first, first + per_node) for first in range(0, world.size, per_node)]
    between = [range(first, world.size, per_node) for first in range(per_node)]
    for all_members, number in ((inside, node), (between, place)):
        group = [dist.new_group(list(members)) for members in all_members][number]  # every rank makes every group
        members, ranks = all_members[number], len(all_members[number])
        for size in _SIZES if ranks > 1 else ():
            part, whole = (torch.ones(max(1, size // 4 // ranks) * n, device=world.device) for n in (1, ranks))
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": partial(dist.all_reduce, whole, group=group),
                "all_gather": partial(_ALL_GATHER, whole, part, group=group),
                "reduce_scatter": partial(_REDUCE_SCATTER, part, whole, group=group),
                "send": partial(_there_and_back, members, world.rank, whole),
            }
            for kind, call in calls.items():
                seconds = median_s(world.device, call) / (2 if kind == "send" else 1)
                told = {"kind": kind, "ranks": ranks, "between": all_members is between, "seconds": seconds}
                yield Exchange.model_validate({**told, "size": whole.nbytes})


def _there_and_back(members: range, rank: int, tensor: Tensor) -> None:
    """A message to the neighbour, and its answer; ranks in pairs, a last one alone."""
    place = members.index(rank)
    if (other := place ^ 1) < len(members):
        for sender in (0, 1):
            (dist.send if place % 2 == sender else dist.recv)(tensor, members[other])


def time_step(config: Config, layout: Layout, world: World, work: Workload) -> Step:
    """Real steps of the engine that trains, on drawn tokens."""
    engine, numbers = Engine(config, layout, world, DecoderTask(config, work.vocab)), count(1)
    rows = config.train.global_batch // layout.dp
    drawn = torch.randint(0, work.vocab, (rows, work.sequence + 1), device=world.device)

    def call() -> None:
        engine.backward({"tokens": drawn}, next(numbers))
        engine.update(float(engine.clip(config.optimizer.clip_norm)))

    return Step(work=work, ranks_per_node=layout.ranks_per_node, seconds=median_s(world.device, call))


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
    if run.config.model.target is not None or run.config.train.precision == "fp8" or run.config.data.has_loss_mask:
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
    flag.exit_on_signal()
    look(run)
    import torch

    from pipeline.comm import groups

    config, before, load = run.config, _before(run), os.getloadavg()[0]
    groups.configure_determinism(config)
    world, vocab = groups.join_process_group(place, config), config.model.vocab_size or config.data.tokenizer.vocab_size
    layout = resolve_layout(config, world.size, place.local_world_size, vocab)
    work = workload_from_config(config, layout, vocab)
    if before is not None and before.timings is not None:
        step = time_step(config, layout, world, work)
        timings = before.timings.model_copy(update={"steps": [*before.timings.steps, step]})
        facts = before.gpu, before.memory_gib, before.multiprocessors, before.cores
    else:
        timings = time_operators(config, layout, world, work)
        facts = read_device_facts(world, config.train.threads, layout.ranks_per_node)
    if world.is_rank0:
        told = (
            f"Measured by `plan --measure` on {os.uname().nodename}, {utc_timestamp()}: torch {torch.__version__}, "
            f"backend {world.backend},",
            f"{world.size} ranks, {layout.ranks_per_node} a node: {layout.describe_sizes()}; "
            f"load average {load:.1f} before.",
            "Figures are those that were reached, peaks too. Links are free where one rank measured; on one node those",
            "between nodes are said to be as those inside, with one rank on each node the other way round.",
        )
        machine = fit_machine(timings, *facts)
        write_machine(machine, _wanted(run).file, [*told, "Its steps:", *compare_steps(machine)])
        print(f"written: {_wanted(run).file}", flush=True)
    groups.leave_process_group()
    return ExitCode.DONE


def read_device_facts(world: World, threads: int, per_node: int) -> tuple[str, float, int, int | None]:
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
