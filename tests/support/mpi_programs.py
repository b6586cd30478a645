"""Run communication programs over MPI and over Gloo, and check that the results are equal bit for bit.

    python -m tests.support.mpi_programs sweep random parallel …        under mpirun, in every rank

The arguments are keys of CASES. A program is a list of `Call`s. Each rank makes its inputs from the seed and its rank,
runs the program over both backends and compares the results. Values are small integers, so sums and products are exact
in every type and every order. Some cases check other properties of the MPI backend.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from pipeline.base.dist_env import read_rank_info
from pipeline.mpi import backend as mpi
from pipeline.mpi.process_group import MpiProcessGroup
from tests.support import mpi_parallel, profiled_step

TIMEOUT = timedelta(seconds=150)
"""Time-out of a collective. On two cores, 8 ranks of MPICH, which poll without pauses, needed more than 30 s."""
REDUCING_KINDS = (
    *("all_reduce", "all_reduce_coalesced", "reduce_scatter_single", "reduce_scatter_coalesced"),
    *("old_reduce_scatter_single", "old_reduce_scatter_coalesced"),
)
MOVING_KINDS = (
    *("broadcast", "all_gather", "all_gather_single", "all_gather_coalesced", "gather", "scatter"),
    *("all_to_all_single", "exchange", "to_root", "all_gather_in_place"),
    *("old_all_gather_single", "old_all_gather_coalesced", "old_all_to_all_single"),
)
"""Kinds of calls. `old_` means: use the method of the process group that torch 2.11 calls."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16)
TYPES = (*FLOATS, *INTEGERS, torch.bool, torch.float8_e4m3fn)
GLOO_SUBSTITUTES = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.float8_e4m3fn: torch.float32}
"""Types that Gloo does not support, and the types that replace them."""
SIZES = (1, 3, 0, 17, 1000, 4097, 70001)
"""Numbers of elements per call."""


@dataclass(frozen=True)
class Call:
    """One communication call.

    Attributes:
        kind: one of REDUCING_KINDS and MOVING_KINDS.
        dtype: type of the elements.
        size: number of elements.
        op: name of the reduction in `dist.ReduceOp`.
        group: index of the group in `list_groups`.
        root: source or destination. The rank in the group is `root` modulo the size of the group.
        asynchronous: wait for the call only after all calls of the program have started.
        strided: use tensors that are not contiguous. Only over MPI, because Gloo rejects them.
    """

    kind: str
    dtype: torch.dtype
    size: int
    op: str = "SUM"
    group: int = 0
    root: int = 0
    asynchronous: bool = False
    strided: bool = False


class AliasCheckingComm:
    """A communicator that rejects buffers that share memory, as MPICH does and the MPI standard requires."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._comm, name)

        def call_with_check(*arguments: Any) -> Any:
            """Check the buffers in `arguments`, then call the method."""
            buffers = [a[0] for a in arguments if isinstance(a, list) and isinstance(a[0], MPI.buffer)]
            spans = sorted((buffer.address, buffer.address + buffer.nbytes) for buffer in buffers if buffer.nbytes)
            for (_, end), (start, _) in itertools.pairwise(spans):
                assert end <= start, f"the buffers of {name} share memory"
            return member(*arguments)

        return call_with_check if callable(member) and not isinstance(member, MPI.Group) else member


class AliasCheckingGroup(MpiProcessGroup):
    """The MPI process group on an AliasCheckingComm."""

    def __init__(self, comm: Any, *arguments: Any) -> None:
        super().__init__(AliasCheckingComm(comm), *arguments)  # type: ignore[arg-type]


def list_reductions(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reductions that MPI supports for this type."""
    if dtype == torch.float8_e4m3fn:
        return ()
    if dtype.is_floating_point:
        return ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    return ("SUM", "PRODUCT", "MIN", "MAX")


def list_groups(size: int) -> list[list[int]]:
    """Return the ranks of each group: all, the even ranks, the last two, only the last, all except the first."""
    return [list(range(size)), list(range(0, size, 2)), [size - 2, size - 1], [size - 1], list(range(1, size))]


def make_values(call: Call, count: int, *key: object) -> torch.Tensor:
    """Return `count` small integers of the type of the call. The same `key` gives the same integers."""
    generator = torch.Generator().manual_seed(random.Random(str(key)).getrandbits(40))
    low = 0 if call.dtype in (torch.uint8, torch.uint16, torch.bool) else -2
    return torch.randint(low, 3, (count,), generator=generator).to(call.dtype)


class Runner:
    """Run calls over one backend.

    Args:
        groups: one process group for each of `list_groups`; None if this rank is not a member.
        substitutes: types that the backend does not support, with the types that replace them. Empty for MPI.
    """

    def __init__(self, groups: list[Any], substitutes: dict[torch.dtype, torch.dtype]) -> None:
        self.groups = groups
        self.substitutes = substitutes
        self.is_gloo = bool(substitutes)
        self.members = list_groups(dist.get_world_size())

    def run(self, program: list[Call], seed: int) -> list[list[torch.Tensor]]:
        """Run the program; return the outputs of each call. Each rank waits for asynchronous calls in another order."""
        outputs: list[list[torch.Tensor]] = []
        works: list[tuple[int, Any]] = []
        for number, call in enumerate(program):
            group = self.groups[call.group]
            if group is None:
                outputs.append([])
                continue
            call_works, call_outputs = self.start_call(call, group, (seed, number))
            outputs.append(call_outputs)
            if call_works is not None and call.asynchronous:
                works += [(number, work) for work in call_works]
            else:
                for work in call_works or []:
                    work.wait()
        random.Random(seed * 100 + dist.get_rank()).shuffle(works)
        for number, work in works:
            if number % 2 and not self.is_gloo:
                self.poll_until_complete(work)
            work.wait()
        return [
            [self.convert_output(call, output) for output in call_outputs]
            for call, call_outputs in zip(program, outputs, strict=True)
        ]

    @staticmethod
    def poll_until_complete(work: Any) -> None:
        """Poll a work of `torch.distributed` until it is complete, and check its future."""
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        for single_work in getattr(work, "works", [work]):  # a coalescing manager contains several works
            while not single_work.is_completed():
                assert time.monotonic() < deadline, f"{single_work} is never complete"
                time.sleep(0.0005)
            assert single_work.is_success() and single_work.exception() is None
            single_work.get_future().wait()

    @staticmethod
    def convert_output(call: Call, output: torch.Tensor) -> torch.Tensor:
        """Convert an output to the type of the call."""
        if call.dtype == torch.bool:
            return output.view(torch.uint8) != 0  # Gloo adds bytes, so true may be 2
        return output.to(call.dtype)

    def start_call(self, call: Call, group: Any, key: tuple[int, int]) -> tuple[list[Any] | None, list[torch.Tensor]]:
        """Start one call on inputs that depend on `key` (seed of the program, number of the call) and the rank.

        Returns:
            The works to wait for (None if the call is complete), and the tensors that contain the outputs afterwards.
        """
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        dtype = self.substitutes.get(call.dtype, call.dtype)
        n = call.size
        op = getattr(dist.ReduceOp, call.op)
        root = self.members[call.group][call.root % size]
        is_root = dist.get_rank() == root
        use_old_method = call.kind.startswith("old_") and not self.is_gloo
        kind = call.kind.removeprefix("old_")
        reduce_scatter_options = dist.ReduceScatterOptions()
        reduce_scatter_options.reduceOp = op

        def set_strides(tensor: torch.Tensor) -> torch.Tensor:  # Gloo requires contiguous tensors
            return torch.stack([tensor, tensor], dim=1)[:, 0] if call.strided and not self.is_gloo else tensor

        def make_input(count: int, *part: object) -> torch.Tensor:
            return set_strides(make_values(call, count, *key, rank, *part).to(dtype))

        def make_output(count: int) -> torch.Tensor:
            return set_strides(torch.full((count,), 1, dtype=dtype))

        async_options: dict[str, Any] = {"group": group, "async_op": True}
        x = make_input(n)
        if kind == "all_reduce":
            return [dist.all_reduce(x, op, **async_options)], [x]
        if kind == "all_reduce_coalesced":
            parts = [make_input(n, part) for part in range(3)]
            if self.is_gloo:  # Gloo does not coalesce
                return [dist.all_reduce(part, op, **async_options) for part in parts], parts
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for part in parts:
                    dist.all_reduce(part, op, group=group)
            return [manager], parts
        if kind == "broadcast":
            return [dist.broadcast(x, root, **async_options)], [x]
        if kind == "all_gather":
            parts = [make_output(n) for _ in range(size)]
            return [dist.all_gather(parts, x, **async_options)], parts
        if kind == "all_gather_single":
            out = make_output(n * size)
            if use_old_method:
                return [group._allgather_base(out, x)], [out]
            return [dist.all_gather_into_tensor(out, x, **async_options)], [out]
        if kind == "all_gather_in_place":  # as FSDP2 does
            out = make_output(n * size)
            part_of_rank = out[rank * n : (rank + 1) * n]
            part_of_rank.copy_(x)
            return [dist.all_gather_into_tensor(out, part_of_rank, **async_options)], [out]
        if kind == "all_gather_coalesced":
            outs = [make_output(n * size), make_output(size)]
            parts = [x, make_input(1, "second")]
            if self.is_gloo:
                return [
                    dist.all_gather_into_tensor(o, p, **async_options) for o, p in zip(outs, parts, strict=True)
                ], outs
            if use_old_method:
                return [group.allgather_into_tensor_coalesced(outs, parts)], outs
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for out, part in zip(outs, parts, strict=True):
                    dist.all_gather_into_tensor(out, part, group=group)
            return [manager], outs
        if kind == "gather":
            parts = [make_output(n) for _ in range(size)] if is_root else []
            return [dist.gather(x, parts if is_root else None, root, **async_options)], parts
        if kind == "scatter":
            out = make_output(n)
            rows = [make_input(n, part) for part in range(size)] if is_root else None
            return [dist.scatter(out, rows, root, **async_options)], [out]
        if kind == "reduce_scatter_single":
            out = make_output(n)
            if use_old_method:
                return [group._reduce_scatter_base(out, make_input(n * size), reduce_scatter_options)], [out]
            return [dist.reduce_scatter_tensor(out, make_input(n * size), op, **async_options)], [out]
        if kind == "reduce_scatter_coalesced":
            outs = [make_output(n), make_output(1)]
            parts = [make_input(n * size), make_input(size, "second")]
            if self.is_gloo:
                return [
                    dist.reduce_scatter_tensor(o, p, op, **async_options) for o, p in zip(outs, parts, strict=True)
                ], outs
            if use_old_method:
                return [group.reduce_scatter_tensor_coalesced(outs, parts, reduce_scatter_options)], outs
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for out, part in zip(outs, parts, strict=True):
                    dist.reduce_scatter_tensor(out, part, op, group=group)
            return [manager], outs
        if kind == "all_to_all_single":  # rank a sends a + b elements to rank b
            sizes = [rank + b for b in range(size)]
            out = make_output(sum(sizes))
            if use_old_method:
                return [group.alltoall_base(out, make_input(sum(sizes)), sizes, sizes)], [out]
            return [dist.all_to_all_single(out, make_input(sum(sizes)), sizes, sizes, **async_options)], [out]
        if kind == "exchange":  # every rank sends to the next rank, then receives from the previous rank
            ranks = self.members[call.group]
            out = make_output(n)
            next_rank = ranks[(rank + 1) % size]
            previous_rank = ranks[rank - 1]
            if size == 1:
                return None, [x]
            operations = [
                dist.P2POp(dist.isend, x, next_rank, group),
                dist.P2POp(dist.irecv, out, previous_rank, group),
            ]
            return dist.batch_isend_irecv(operations), [out]
        if kind == "to_root":  # each other rank sends a message to the root, which receives that of the last rank first
            tag = 7 + key[1]  # another tag for each call of the program
            n = max(1, n)  # Gloo does not send empty tensors
            if not is_root:
                return [dist.isend(make_input(n), root, group, tag)], []
            parts = [make_output(n) for _ in range(size)]
            for sender in reversed(range(size)):
                if sender != rank:
                    dist.recv(parts[sender], self.members[call.group][sender], group, tag)
            return None, parts
        raise ValueError(call.kind)


def make_runners() -> tuple[Runner, Runner]:
    """Return a runner over MPI and one over Gloo, with the same groups."""
    runners = []
    for backend, substitutes in ((mpi.BACKEND_NAME, {}), ("gloo", GLOO_SUBSTITUTES)):
        groups = []
        for ranks in list_groups(dist.get_world_size()):
            group = dist.new_group(ranks, backend=backend, timeout=TIMEOUT)
            groups.append(group if dist.get_rank() in ranks else None)
        runners.append(Runner(groups, substitutes))
    return runners[0], runners[1]


def find_difference(runners: tuple[Runner, Runner], program: list[Call], seed: int) -> str | None:
    """Run the program over both backends; return the first difference or the traceback of this rank, otherwise None."""
    try:
        mpi_outputs, gloo_outputs = (runner.run(program, seed) for runner in runners)
    except Exception:  # `raise_on_all_ranks` reports the error on all ranks
        traceback.print_exc()  # print it now, because this rank may wait until the other ranks time out
        return traceback.format_exc()
    for call, actual, expected in zip(program, mpi_outputs, gloo_outputs, strict=True):
        for a, b in zip(actual, expected, strict=True):
            if not torch.equal(a.float(), b.float()):
                return f"{call}: MPI {a.flatten()[:8].tolist()}, Gloo {b.flatten()[:8].tolist()}"
    return None


def raise_on_all_ranks(runners: tuple[Runner, Runner], problem: str | None) -> None:
    """Share the problems of all ranks. If there is any, raise AssertionError on every rank with the first problem."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=runners[1].groups[0])
    for rank, rank_problem in enumerate(problems):
        if rank_problem:
            raise AssertionError(f"rank {rank}: {rank_problem}")


def check_sweep(all_combinations: bool = False) -> None:
    """Run every combination of kind, type and reduction.

    Each combination has the next pair of size and group from a shuffled list. If `all_combinations`, it has all pairs.
    """
    runners = make_runners()
    count = 0
    shapes = list(itertools.product(SIZES, range(5)))
    random.Random(0).shuffle(shapes)
    next_shapes = itertools.cycle(shapes)
    for kind in (*REDUCING_KINDS, *MOVING_KINDS):
        program = []
        for dtype in TYPES:
            for op in list_reductions(dtype) if kind in REDUCING_KINDS else ("SUM",):
                for size, group in shapes if all_combinations else [next(next_shapes)]:
                    program.append(
                        Call(
                            kind,
                            dtype,
                            size,
                            op,
                            group,
                            root=count % 8,
                            asynchronous=count % 3 == 0,
                            strided=count % 4 == 0,
                        )
                    )
                    count += 1
        raise_on_all_ranks(runners, find_difference(runners, program, count))
    if dist.get_rank() == 0:
        print(f"sweep: {count} calls")


CALLS = st.builds(
    lambda kind, dtype, op_index, **fields: Call(
        kind, dtype, op=list_reductions(dtype)[op_index % len(list_reductions(dtype))], **fields
    ),
    st.sampled_from((*REDUCING_KINDS, *MOVING_KINDS)),
    st.sampled_from(TYPES[:-1]),  # without float8, for which MPI has no reductions
    st.integers(0, 4),
    size=st.integers(0, 300),
    group=st.integers(0, 4),
    root=st.integers(0, 7),
    asynchronous=st.booleans(),
    strided=st.booleans(),
)


def check_random_programs(examples: int) -> None:
    """Run random programs on all ranks. Rank 0 generates them with Hypothesis, which shrinks a program that fails."""
    runners = make_runners()

    def run_on_all_ranks(program_and_seed: Any) -> None:
        """Send the program to the other ranks and run it on this rank. None ends the loop of the other ranks."""
        message = [program_and_seed]
        dist.broadcast_object_list(message, src=0, group=runners[1].groups[0])
        if message[0] is not None:
            raise_on_all_ranks(runners, find_difference(runners, *message[0]))

    if dist.get_rank() != 0:
        while True:
            message: list[Any] = [None]
            dist.broadcast_object_list(message, src=0, group=runners[1].groups[0])
            if message[0] is None:
                return
            problem = find_difference(runners, *message[0])
            # Only rank 0 raises the error, because these ranks must run the further programs of Hypothesis.
            problems: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(problems, problem, group=runners[1].groups[0])

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(CALLS, min_size=1, max_size=12), st.integers(0, 1000))
    def run_program(program: list[Call], seed: int) -> None:
        run_on_all_ranks((program, seed))

    try:
        run_program()
    finally:
        run_on_all_ranks(None)


def check_objects() -> None:
    """Check the collectives of Python objects. The checkpoint code uses them."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "padding": "x" * rank})
    assert [item["rank"] for item in gathered] == list(range(size))
    message = [["from", 0] if rank == 0 else None]
    dist.broadcast_object_list(message, src=0)
    assert message == [["from", 0]]
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(range(size)) if rank == 0 else None, src=0)
    assert received == [rank]


def check_accurate_sums() -> None:
    """Check that sums of 16-bit values are rounded only once if the group has `accurate_sums`.

    The terms have few bits and various exponents, so their sum is exact in fp32 but not in 16 bits.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-128, 128, (1000 * size,), generator=generator) * 0.5 ** torch.randint(
        0, 7, (1000 * size,), generator=generator
    )
    gathered = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(gathered, x)
    exact = torch.stack(gathered).sum(0)
    for dtype in (torch.float16, torch.bfloat16):
        AliasCheckingGroup.accurate_sums = True
        average = x.to(dtype)
        total = x.to(dtype)
        part = torch.empty(1000, dtype=dtype)
        dist.all_reduce(average, dist.ReduceOp.AVG)
        dist.all_reduce_coalesced([total])
        dist.reduce_scatter_tensor(part, x.to(dtype))
        AliasCheckingGroup.accurate_sums = False
        assert torch.equal(average, (exact / size).to(dtype)), dtype
        assert torch.equal(total, exact.to(dtype)), dtype
        assert torch.equal(part, exact[rank * 1000 : (rank + 1) * 1000].to(dtype)), dtype


def check_profiled_step() -> None:
    """Check the profile of a step whose parts have known bounds."""
    control_group = dist.new_group(backend="gloo")
    assert isinstance(control_group, dist.ProcessGroup)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    rank = dist.get_rank()
    profiled_step.check_profile(rank, *profiled_step.run_profiled_step(Path(folder[0]), rank, control_group))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


CASES: dict[str, Callable[[], None]] = {
    "sweep": check_sweep,
    "everything": lambda: check_sweep(all_combinations=True),
    "random": lambda: check_random_programs(25),
    "many_random": lambda: check_random_programs(300),
    "objects": check_objects,
    "accurate": check_accurate_sums,
    "parallel": mpi_parallel.check_all,
    "profile": check_profiled_step,
}


def main(names: list[str]) -> None:
    """Run these cases on this rank. At the end, each rank prints that all checks passed."""
    torch.set_num_threads(1)
    mpi.MpiProcessGroup = AliasCheckingGroup  # type: ignore[assignment,misc]
    mpi.start_mpi(read_rank_info(os.environ), TIMEOUT)
    for name in names:
        CASES[name]()
    dist.destroy_process_group()
    mpi.finalize_mpi()
    print("all checks passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
