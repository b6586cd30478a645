"""Measure this machine with the ranks of a run, and write a machine file for `plan --machine FILE`.

    python -m planning.calibrate CONFIG --out FILE [--machine FILE] [KEY=VALUE …]

If srun, mpirun or torchrun starts this command, each process is one rank. If you start it yourself, it starts the
config's ranks: through srun inside an allocation, otherwise on this machine. The command takes a few minutes and needs
no data. With `--machine`, it only times a step of this config's layout. `--out` then gets the timings of the earlier
machine file and this step.

All ranks measure at the same time, so that they share resources as in a run. A timing is the median of several
repetitions on the slowest rank. `fit_machine` then computes rates from the operators, and latency and bandwidth of
links from collectives. Two overheads (`Overheads`) explain the remaining time of real steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.base.dist_env import RankInfo, make_local_rank_env, read_rank_info
from pipeline.base.errors import ExitCode, UserError, make_printable, print_error
from pipeline.base.files import write_atomic
from pipeline.base.yaml12 import dump_yaml
from pipeline.comm import groups
from pipeline.comm.groups import World
from pipeline.config.read import load_config
from pipeline.config.sections import Config
from pipeline.model.task import DTYPES, DecoderTask
from pipeline.parallel.mesh import Layout, resolve_layout
from pipeline.run.events import utc_timestamp
from pipeline.train.engine import Engine
from planning.goodput import minimize
from planning.machine import Attention, Exchange, Link, Machine, Overheads, Step, Timings, load_machine
from planning.predict import TILE, make_rank_model, predict_step
from planning.workload import Workload, matrix_shapes, workload_from_config

REPEATS = 7
"""Number of timed repetitions of each measurement, after `_WARM_UP_REPEATS` repetitions that are ignored."""
_WARM_UP_REPEATS = 2
_MIN_TIMED_S = 2e-3
"""Calls that take fewer seconds are repeated between two readings of the clock."""
_COPY_BYTES = 1 << 26
"""Size of the copied tensor in bytes. It is larger than caches, so that memory is measured."""
_COLLECTIVE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Sizes of the tensors of timed collectives in bytes."""
# Before torch 2.13, these functions are called all_gather_into_tensor and reduce_scatter_tensor.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MIN_LATENCY_S = 1e-9
"""Smallest latency of a link. It is used if the timings show no latency."""
_MIN_SECONDS_PER_BYTE = _MIN_LATENCY_S**2
"""Smallest inverse bandwidth of a link. It is used if the timings do not depend on the size."""
_EAGER_RANGE = (0.1, 50.0)
"""Range in which the fit searches the overhead `Overheads.eager`."""
_CALL_RANGE_S = (1e-7, 0.1)
"""Range in which the fit searches the overhead `Overheads.call`, in seconds."""
POOR_FIT = 0.15
"""If the relative error of a predicted step is larger, a warning is printed.

Either the machine was busy during the measurement, or planning/predict.py does not describe this machine well.
"""
POOR_FIT_WARNING = "POOR FIT:"
"""Beginning of this warning."""


# -------------------------------------------------------------------------------------------------------------- timing


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished all kernels."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_time_s(device: torch.device, call: Callable[[], object], times: int = 1) -> float:
    """Return the seconds of one call: the median of the repetitions on the slowest rank. All ranks must call this.

    Args:
        device: The rank's device.
        call: The function to measure.
        times: Number of calls between two readings of the clock. If it is 1, it is increased for short calls.
    """
    durations = []
    for _ in range(_WARM_UP_REPEATS + REPEATS):
        dist.all_reduce(torch.zeros(1, device=device))  # Let all ranks start at the same time.
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            call()
        _synchronize(device)
        durations.append((time.perf_counter() - start) / times)
    longest_median = torch.tensor([median(durations[_WARM_UP_REPEATS:])], dtype=torch.float64, device=device)
    dist.all_reduce(longest_median, dist.ReduceOp.MAX)
    seconds = float(longest_median.item())
    if times == 1 and seconds < _MIN_TIMED_S:
        return median_time_s(device, call, int(_MIN_TIMED_S / seconds) + 1)
    return seconds


def time_machine(config: Config, layout: Layout, world: World, work: Workload) -> Timings:
    """Return timings of a copy, of collectives, of a step, and of matrix products and attention.

    Products and attention have the shapes of `work`. All ranks must call this.
    """
    device = world.device
    dtype = DTYPES.get(work.precision, torch.float32)  # `DTYPES` does not contain fp32.
    random_tensor = partial(torch.randn, dtype=dtype, device=device)
    q_BHTD, k_BHTD, v_BHTD = random_tensor(3, work.micro_batch, work.heads // work.tensor, work.sequence, work.head)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    # As in a linear layer, the second matrix is stored transposed.
    products = [
        (m, n, k, median_time_s(device, partial(torch.matmul, random_tensor(m, k), random_tensor(n, k).T)))
        for m, n, k in matrix_shapes(work)
    ]
    attention = partial(scaled_dot_product_attention, q_BHTD, k_BHTD, v_BHTD, is_causal=True)
    return Timings(
        products=products,
        attention=median_time_s(device, attention),
        copied=(_COPY_BYTES, median_time_s(device, partial(torch.empty_like(source).copy_, source))),
        exchanges=list(time_exchanges(world, layout.ranks_per_node)),
        steps=[time_step(config, layout, world, work)],
    )


def time_exchanges(world: World, per_node: int) -> Iterator[Exchange]:
    """Time collectives and messages of several sizes.

    The first timings are those of the ranks of one node. The other timings are those of ranks on different nodes that
    have the same local rank. A group of one rank is not timed.

    Args:
        world: The process group.
        per_node: Number of ranks per node.
    """
    node, local_rank = divmod(world.rank, per_node)
    groups_inside_nodes = [range(first, first + per_node) for first in range(0, world.size, per_node)]
    groups_between_nodes = [range(first, world.size, per_node) for first in range(per_node)]
    for members_of_groups, group_number in ((groups_inside_nodes, node), (groups_between_nodes, local_rank)):
        # Every rank must create every group.
        group = [dist.new_group(list(members)) for members in members_of_groups][group_number]
        members = members_of_groups[group_number]
        ranks = len(members)
        for size in _COLLECTIVE_BYTES if ranks > 1 else ():
            shard_length = max(1, size // 4 // ranks)  # An fp32 value has 4 bytes.
            part = torch.ones(shard_length, device=world.device)
            whole = torch.ones(shard_length * ranks, device=world.device)
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": partial(dist.all_reduce, whole, group=group),
                "all_gather": partial(_ALL_GATHER, whole, part, group=group),
                "reduce_scatter": partial(_REDUCE_SCATTER, part, whole, group=group),
                "send": partial(_send_and_receive, members, world.rank, whole),
            }
            for kind, call in calls.items():
                # `_send_and_receive` transfers two messages, one after the other.
                seconds = median_time_s(world.device, call) / (2 if kind == "send" else 1)
                is_between = members_of_groups is groups_between_nodes
                values = {"kind": kind, "ranks": ranks, "between": is_between, "seconds": seconds}
                yield Exchange.model_validate({**values, "size": whole.nbytes})


def _send_and_receive(members: range, rank: int, tensor: Tensor) -> None:
    """Send a message to the neighbour of this rank in the group, and receive one. All members must call this.

    The members form pairs: positions 0 and 1, 2 and 3, and so on. If their number is odd, the last member does nothing.
    """
    position = members.index(rank)
    neighbour = position ^ 1
    if neighbour < len(members):
        for sender in (0, 1):
            (dist.send if position % 2 == sender else dist.recv)(tensor, members[neighbour])


def time_step(config: Config, layout: Layout, world: World, work: Workload) -> Step:
    """Return a timed step of the training engine, on random tokens. All ranks must call this."""
    engine = Engine(config, layout, world, DecoderTask(config, work.vocab))
    step_numbers = count(1)
    samples = config.train.global_batch // layout.dp
    # All tokens except the last are inputs, and all tokens except the first are targets.
    tokens_BT = torch.randint(0, work.vocab, (samples, work.sequence + 1), device=world.device)

    def run_step() -> None:
        engine.backward({"tokens": tokens_BT}, next(step_numbers))
        engine.update_weights(float(engine.clip_gradients(config.optimizer.clip_norm)))

    seconds = median_time_s(world.device, run_step)
    return Step(work=work, ranks_per_node=layout.ranks_per_node, seconds=seconds)


class DeviceInfo(NamedTuple):
    """The device of a rank."""

    name: str
    memory_gib: float
    """Memory of a GPU, or a rank's share of the node's memory."""
    multiprocessors: int
    """Number of multiprocessors of a GPU; 1 for a CPU."""
    cores: int | None
    """Number of ranks that a node runs at full speed if they compute on CPUs; None on GPUs."""


def read_device_info(world: World, threads: int, per_node: int) -> DeviceInfo:
    """Return the device of this rank. All ranks must call this.

    Args:
        world: The process group.
        threads: Number of CPU threads per rank.
        per_node: Number of ranks per node.
    """
    if world.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(world.device)
        return DeviceInfo(gpu.name, gpu.total_memory / 2**30, gpu.multi_processor_count, None)
    all_ranks_cpus: list[set[int]] = [set()] * world.size
    # Slurm may give each rank different CPUs.
    dist.all_gather_object(all_ranks_cpus, os.sched_getaffinity(0), group=groups.new_control_group())
    first_rank_of_node = world.rank - world.rank % per_node
    cpus_of_node = set().union(*all_ranks_cpus[first_rank_of_node : first_rank_of_node + per_node])
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / per_node
    return DeviceInfo(
        f"CPU ({os.uname().machine}), {threads} × threads", memory_gib, 1, max(1, len(cpus_of_node) // threads)
    )


# ------------------------------------------------------------------------------------------------------------- fitting


def fit_line(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit seconds = a·x + b·y to rows (x, y, seconds) by least squares of relative errors. Return a ≥ 0 and b ≥ 0."""
    # Divided by `seconds`, a row must fit 1 = a·x + b·y. The sums are those of the normal equations.
    scaled = [(x / seconds, y / seconds) for x, y, seconds in rows]
    sum_xx = math.fsum(x**2 for x, _ in scaled)
    sum_yy = math.fsum(y**2 for _, y in scaled)
    sum_xy = math.fsum(x * y for x, y in scaled)
    sum_x = math.fsum(x for x, _ in scaled)
    sum_y = math.fsum(y for _, y in scaled)
    determinant = sum_xx * sum_yy - sum_xy * sum_xy
    if determinant > 1e-12 * sum_xx * sum_yy:
        a = (sum_x * sum_yy - sum_y * sum_xy) / determinant
        b = (sum_y * sum_xx - sum_x * sum_xy) / determinant
    else:  # All rows have about the same ratio of x and y, so the fit cannot distinguish a and b.
        a = 0.0
        b = sum_y / sum_yy
    # If one of the two would be negative, it is 0, and the other is fitted alone.
    if b <= 0:
        return (sum_x / sum_xx, 0.0)
    return (a, b) if a >= 0 else (0.0, sum_y / sum_yy)


def count_hops_and_bytes(exchange: Exchange) -> tuple[float, float]:
    """Return how often an exchange waits for the latency of a link, and how many bytes pass a link.

    The formulas are those of planning/predict.py.
    """
    if exchange.kind == "send":
        return 1.0, float(exchange.size)
    times = 2 if exchange.kind == "all_reduce" else 1
    # ranks exchange data in a tree between nodes, and in a ring inside a node
    hops = math.ceil(math.log2(exchange.ranks)) if exchange.between else exchange.ranks - 1
    return float(times * hops), times * exchange.size * (exchange.ranks - 1) / exchange.ranks


def fit_link(exchanges: Iterable[Exchange], ranks_per_core: float = 1.0) -> Link | None:
    """Return the latency and bandwidth that fit the exchanges; None if there are none.

    Args:
        exchanges: Timed exchanges over this link.
        ranks_per_core: Number of ranks that shared a core. Timings are divided by it, because a rank alone on a core is
            faster by this factor.
    """
    rows = [(*count_hops_and_bytes(exchange), exchange.seconds / ranks_per_core) for exchange in exchanges]
    if not rows:
        return None
    latency, seconds_per_byte = fit_line(rows)
    return Link(latency=max(_MIN_LATENCY_S, latency), bandwidth=1 / max(_MIN_SECONDS_PER_BYTE, seconds_per_byte))


def fit_machine(timings: Timings, gpu: str, memory_gib: float, multiprocessors: int, cores: int | None) -> Machine:
    """Return the machine that fits the timings.

    Args:
        timings: Timings on this machine.
        gpu: Name of the device.
        memory_gib: Memory of the device in GiB.
        multiprocessors: Number of multiprocessors of the device.
        cores: Number of ranks that a node runs at full speed if they compute on CPUs; None for GPUs.
    """
    work = timings.steps[0].work
    per_node = timings.steps[0].ranks_per_node
    ranks_per_core = max(1.0, per_node / cores) if cores else 1.0
    half_wave = 0.5 * multiprocessors * TILE  # On average, half of the last wave of tiles is idle.
    flops = math.fsum(2 * (half_wave + m * n) * k for m, n, k, _ in timings.products)
    rate = ranks_per_core * flops / math.fsum(seconds for *_, seconds in timings.products)
    peak = ranks_per_core * max(2 * m * n * k / seconds for m, n, k, seconds in timings.products)
    copied_bytes, copy_s = timings.copied
    inside = fit_link((exchange for exchange in timings.exchanges if not exchange.between), ranks_per_core)
    between = fit_link((exchange for exchange in timings.exchanges if exchange.between), ranks_per_core)
    no_link = Link(latency=_MIN_LATENCY_S, bandwidth=1 / _MIN_SECONDS_PER_BYTE)
    memory_bandwidth = 2 * copied_bytes * ranks_per_core / copy_s  # A copy reads and writes each byte.
    # `rate` counts the idle half of the last wave as work, so it may be higher than the rate of each product (`peak`).
    machine = Machine(
        gpu=gpu, memory_gib=memory_gib, bandwidth=memory_bandwidth,
        multiprocessors=multiprocessors, peak={work.precision: max(rate, peak)}, achievable={work.precision: rate},
        attention=Attention(portable=1.0, native=1.0), gpus_per_node=per_node, inside=inside or between or no_link,
        between=between or inside or no_link, cores=cores,
        measured=Overheads(eager=1.0, call=0.0), timings=timings,
    )  # fmt: skip
    # At 1 FLOP/s, the predicted seconds are the number of FLOPs of the timed attention.
    attention = ranks_per_core * make_rank_model(work, machine).attention_time() / timings.attention
    machine = machine.model_copy(update={"attention": Attention(portable=attention, native=attention)})
    return machine.model_copy(update={"measured": _fit_overheads(machine, timings)})


def _fit_overheads(machine: Machine, timings: Timings) -> Overheads:
    """Return the overheads with which the predicted steps are nearest to the timed steps.

    The error is the sum over steps of the squared logarithm of predicted seconds divided by timed seconds.
    """

    def compute_error(eager: float, call: float) -> float:
        candidate = machine.model_copy(update={"measured": Overheads(eager=eager, call=call)})
        ratios = (
            predict_step(step.work, candidate.with_gpus_per_node(step.ranks_per_node)).step / step.seconds
            for step in timings.steps
        )
        return math.fsum(math.log(ratio) ** 2 for ratio in ratios)

    def find_best_eager(call: float) -> float:
        return minimize(lambda eager: compute_error(eager, call), *_EAGER_RANGE)

    candidates = [0.0]
    if len(timings.steps) > 1:  # A single step cannot distinguish the two overheads.
        candidates.append(minimize(lambda call: compute_error(find_best_eager(call), call), *_CALL_RANGE_S))
    best_call = min(candidates, key=lambda call: compute_error(find_best_eager(call), call))
    return Overheads(eager=find_best_eager(best_call), call=best_call)


def compare_steps(machine: Machine) -> Iterator[str]:
    """Yield a line for each timed step with its prediction, and with a warning if both differ by more than POOR_FIT."""
    for step in machine.timings.steps if machine.timings else ():
        predicted_s = predict_step(step.work, machine.with_gpus_per_node(step.ranks_per_node)).step
        line = f"{step.work.describe_layout()}: predicted {predicted_s:.3g} s, timed {step.seconds:.3g} s"
        is_poor = abs(predicted_s / step.seconds - 1) > POOR_FIT
        yield f"{POOR_FIT_WARNING} {line}: measure again on an idle machine" if is_poor else line


def write_machine(machine: Machine, file: Path, comments: Sequence[str]) -> None:
    """Write a machine file atomically, with comment lines.

    Raises:
        UserError: If the file exists. It is not replaced.
    """
    text = "".join(f"# {make_printable(' '.join(comment.split()))}\n" for comment in comments if comment)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        write_atomic(
            temporary, text + dump_yaml(_round_numbers(json.loads(machine.model_dump_json(exclude_none=True))))
        )
        os.link(temporary, file)  # Unlike a rename, this fails if the file exists.
    except FileExistsError:
        raise UserError(
            "plan.file_exists", make_printable(f"{file} exists and is not replaced: move it, or name another file")
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _round_numbers(value: Any) -> Any:
    """Round all floats in a value to five significant digits, because timings are not more precise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _round_numbers(item) for key, item in value.items()}
    return [_round_numbers(item) for item in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------------------- command


def check_request(config: Config, out: Path, machine_file: Path | None) -> Machine | None:
    """Check the arguments before the ranks start. Return the machine of `machine_file`; None without this file.

    Raises:
        UserError: If `out` exists, if its folder does not exist, if the config cannot be measured, or if `machine_file`
            is invalid or was not written by this command.
    """
    if out.exists() or not out.absolute().parent.is_dir():
        raise UserError(
            "plan.file_exists" if out.exists() else "plan.no_such_folder",
            make_printable(f"--out {out}: name a file that does not exist yet, in an existing folder"),
        )
    if config.model.other_model_key is not None or config.train.precision == "fp8" or config.data.has_loss_mask:
        raise UserError(
            "plan.unsupported_model",
            "calibration supports the decoder on text in fp32, bf16 or fp16, but not model.target, fp8 or prompts",
        )
    if machine_file is None:
        return None
    machine = load_machine(str(machine_file))
    if machine.timings is None:
        raise UserError(
            "plan.not_measured",
            make_printable(f"--machine {machine_file} has no timings: name a file that this command wrote before"),
        )
    return machine


def run_rank(config: Config, out: Path, previous: Machine | None, rank_info: RankInfo) -> None:
    """Measure as one rank. Rank 0 also fits the machine and writes the file.

    Args:
        config: The config whose layout is measured.
        out: The machine file.
        previous: A machine that was measured earlier, to whose timings a step is added; None: measure everything.
        rank_info: Rank and world size of this process.
    """
    load_average = os.getloadavg()[0]
    groups.configure_determinism(config)
    world = groups.join_process_group(rank_info, config)
    vocab = config.model.vocab_size or config.data.tokenizer.vocab_size
    layout = resolve_layout(config, world.size, rank_info.local_world_size, vocab)
    work = workload_from_config(config, layout, vocab)
    if previous is not None and previous.timings is not None:
        step = time_step(config, layout, world, work)
        timings = previous.timings.model_copy(update={"steps": [*previous.timings.steps, step]})
        device = DeviceInfo(previous.gpu, previous.memory_gib, previous.multiprocessors, previous.cores)
    else:
        timings = time_machine(config, layout, world, work)
        device = read_device_info(world, config.train.threads, layout.ranks_per_node)
    if world.is_rank0:
        machine = fit_machine(timings, *device)
        comments = [
            f"Measured by planning.calibrate on {os.uname().nodename}, {utc_timestamp()}: torch {torch.__version__}, "
            f"backend {world.backend},",
            f"{world.size} ranks, {layout.ranks_per_node} per node: {layout.describe_sizes()}; "
            f"load average {load_average:.1f} before.",
            "All figures are measured, including peak rates. With one rank, communication takes no time. On one node,",
            "links between nodes are assumed to equal those inside; with one rank per node, the reverse.",
            "Steps:",
        ]
        write_machine(machine, out, [*comments, *compare_steps(machine)])
        print(f"written: {out}", flush=True)
    groups.leave_process_group()


def start_ranks(config: Config, arguments: Sequence[str]) -> int:
    """Start the config's ranks with the same arguments, and return the exit code.

    Inside an allocation, srun starts the ranks. Otherwise they start on this machine.
    """
    train = config.stages.train
    command = [sys.executable, "-m", "planning.calibrate", *arguments]
    if os.environ.get("SLURM_JOB_ID"):
        step = ["srun", f"--nodes={train.max_nodes}", f"--ntasks={train.ranks}"]
        return subprocess.run([*step, f"--ntasks-per-node={train.tasks_per_node}", *command]).returncode
    processes: list[subprocess.Popen[bytes]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for rank in range(train.ranks):
            # Rank 0 inherits the listening socket, so that no other program can take the port.
            listen_fd = listener.fileno() if rank == 0 else None
            environment = {**os.environ, **make_local_rank_env(rank, train.ranks, port, listen_fd)}
            fds = () if listen_fd is None else (listen_fd,)
            processes.append(subprocess.Popen(command, env=environment, pass_fds=fds))
    try:
        while all(process.poll() in (None, 0) for process in processes):
            if all(process.poll() == 0 for process in processes):
                return 0
            time.sleep(0.1)
        # The exit code is negative if a signal ended the process.
        return next(abs(code) for process in processes if (code := process.poll()))
    finally:
        for process in processes:
            if process.poll() is None:  # Another rank has failed.
                process.terminate()
            process.wait()


def main(arguments: Sequence[str]) -> int:
    """Run the command. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m planning.calibrate", description="Measure this machine with the ranks of a run."
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the machine file to write")
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="an earlier machine file: use its timings and add a timed step"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the config")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        rank_info = read_rank_info(os.environ)
        previous = check_request(config, options.out, options.machine)
        if rank_info.launcher == "alone" and (config.stages.train.ranks > 1 or os.environ.get("SLURM_JOB_ID")):
            return start_ranks(config, arguments)
        run_rank(config, options.out, previous, rank_info)
        return ExitCode.DONE
    except Exception as error:
        return print_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
