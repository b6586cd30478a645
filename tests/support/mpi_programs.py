"""What MPI ranks run in tests: communication programs that must give the same over MPI and over Gloo, bit for bit.

    python -m tests.support.mpi_programs sweep random parallel …        under mpirun, in every rank

A program is a list of `Call`s. Each rank makes its inputs from (seed, rank), runs the program over both backends and
compares. Values are small integers, so that sums and products are exact in every type, whatever the order.
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

TIMEOUT = timedelta(seconds=30)
REDUCING = (
    *("all_reduce", "all_reduce_coalesced", "reduce_scatter_single", "reduce_scatter_coalesced"),
    *("old_reduce_scatter_single", "old_reduce_scatter_coalesced"),
)
MOVING = (
    *("broadcast", "all_gather", "all_gather_single", "all_gather_coalesced", "gather", "scatter"),
    *("all_to_all_single", "exchange", "to_root", "all_gather_in_place"),
    *("old_all_gather_single", "old_all_gather_coalesced", "old_all_to_all_single"),
)
"""`old_`: under the names that torch 2.11 calls."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16)
TYPES = (*FLOATS, *INTEGERS, torch.bool, torch.float8_e4m3fn)
GLOO_LACKS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.float8_e4m3fn: torch.float32}
SIZES = (1, 3, 0, 17, 1000, 4097, 70001)


@dataclass(frozen=True)
class Call:
    """One communication: what, over which group, of which type and size."""

    kind: str
    dtype: torch.dtype
    size: int
    op: str = "SUM"
    group: int = 0
    root: int = 0
    asynchronous: bool = False
    strided: bool = False


class Unaliased:
    """A communicator that refuses buffers that share memory, as MPICH does, and the standard demands."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._comm, name)

        def checked(*arguments: Any) -> Any:
            memory = [a[0] for a in arguments if isinstance(a, list) and isinstance(a[0], MPI.buffer)]
            spans = sorted((part.address, part.address + part.nbytes) for part in memory if part.nbytes)
            for (_, end), (start, _) in itertools.pairwise(spans):
                assert end <= start, f"{name}: its buffers share memory"
            return call(*arguments)

        return checked if callable(call) and not isinstance(call, MPI.Group) else call


class UnaliasedGroup(MpiProcessGroup):
    """The process group, on such a communicator."""

    def __init__(self, comm: Any, *rest: Any) -> None:
        super().__init__(Unaliased(comm), *rest)  # type: ignore[arg-type]


def operations(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.float8_e4m3fn:
        return ()
    if dtype.is_floating_point:
        return ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    return ("SUM", "PRODUCT", "MIN", "MAX")


def group_shapes(size: int) -> list[list[int]]:
    """All ranks, the even ones, the last two, one alone, all but one."""
    return [list(range(size)), list(range(0, size, 2)), [size - 2, size - 1], [size - 1], list(range(1, size))]


def values(call: Call, count: int, *key: object) -> torch.Tensor:
    """`count` small integers of the call's type, the same for the same key."""
    generator = torch.Generator().manual_seed(random.Random(str(key)).getrandbits(40))
    low = 0 if call.dtype in (torch.uint8, torch.uint16, torch.bool) else -2
    return torch.randint(low, 3, (count,), generator=generator).to(call.dtype)


class Runner:
    """Runs calls over one backend; `groups[i]` is None where this rank is not a member."""

    def __init__(self, groups: list[Any], lacks: dict[torch.dtype, torch.dtype]) -> None:
        self.groups, self.lacks = groups, lacks
        self.members = group_shapes(dist.get_world_size())

    def run(self, program: list[Call], seed: int) -> list[list[torch.Tensor]]:
        """The outputs of each call; works are waited for in an order of this rank's own."""
        outputs: list[list[torch.Tensor]] = []
        works: list[tuple[int, Any]] = []
        for number, call in enumerate(program):
            group = self.groups[call.group]
            if group is None:
                outputs.append([])
                continue
            work, made = self.start(call, group, (seed, number))
            outputs.append(made)
            if work is not None and call.asynchronous:
                works += [(number, item) for item in work]
            else:
                for item in work or []:
                    item.wait()
        random.Random(seed * 100 + dist.get_rank()).shuffle(works)
        for number, work in works:
            if number % 2 and not self.lacks:
                self.poll(work)
            work.wait()
        return [[self.back(call, o) for o in made] for call, made in zip(program, outputs, strict=True)]

    @staticmethod
    def poll(work: Any) -> None:
        """Ask until the work is over, and its future, too."""
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        for part in getattr(work, "works", [work]):
            while not part.is_completed():
                assert time.monotonic() < deadline, f"{part} never tells that it is over"
                time.sleep(0.0005)
            assert part.is_success() and part.exception() is None
            part.get_future().wait()

    @staticmethod
    def back(call: Call, output: torch.Tensor) -> torch.Tensor:
        if call.dtype == torch.bool:
            return output.view(torch.uint8) != 0  # Gloo adds bytes, so true may be 2
        return output.to(call.dtype)

    def start(self, call: Call, group: Any, key: tuple[int, int]) -> tuple[list[Any] | None, list[torch.Tensor]]:
        """Begin one call: works (None where it is over) and the tensors that hold its outputs in the end."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        dtype, n = self.lacks.get(call.dtype, call.dtype), call.size
        op, root = getattr(dist.ReduceOp, call.op), self.members[call.group][call.root % size]
        at_root = dist.get_rank() == root
        old, kind = call.kind.startswith("old_") and not self.lacks, call.kind.removeprefix("old_")
        reduce = dist.ReduceScatterOptions()
        reduce.reduceOp = op

        def laid(tensor: torch.Tensor) -> torch.Tensor:  # Gloo wants contiguous tensors
            return torch.stack([tensor, tensor], dim=1)[:, 0] if call.strided and not self.lacks else tensor

        def mine(count: int, *more: object, who: int = rank) -> torch.Tensor:
            return laid(values(call, count, *key, who, *more).to(dtype))

        def empty(count: int) -> torch.Tensor:
            return laid(torch.full((count,), 1, dtype=dtype))

        tail: dict[str, Any] = {"group": group, "async_op": True}
        x = mine(n)
        if kind == "all_reduce":
            return [dist.all_reduce(x, op, **tail)], [x]
        if kind == "all_reduce_coalesced":
            parts = [mine(n, part) for part in range(3)]
            if self.lacks:  # Gloo coalesces nothing
                return [dist.all_reduce(part, op, **tail) for part in parts], parts
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for part in parts:
                    dist.all_reduce(part, op, group=group)
            return [manager], parts
        if kind == "broadcast":
            return [dist.broadcast(x, root, **tail)], [x]
        if kind == "all_gather":
            parts = [empty(n) for _ in range(size)]
            return [dist.all_gather(parts, x, **tail)], parts
        if kind == "all_gather_single":
            out = empty(n * size)
            if old:
                return [group._allgather_base(out, x)], [out]
            return [dist.all_gather_into_tensor(out, x, **tail)], [out]
        if kind == "all_gather_in_place":  # as FSDP2 does
            out = empty(n * size)
            own = out[rank * n : (rank + 1) * n]
            own.copy_(x)
            return [dist.all_gather_into_tensor(out, own, **tail)], [out]
        if kind == "all_gather_coalesced":
            outs, parts = [empty(n * size), empty(size)], [x, mine(1, "second")]
            if self.lacks:
                return [dist.all_gather_into_tensor(o, p, **tail) for o, p in zip(outs, parts, strict=True)], outs
            if old:
                return [group.allgather_into_tensor_coalesced(outs, parts)], outs
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for out, part in zip(outs, parts, strict=True):
                    dist.all_gather_into_tensor(out, part, group=group)
            return [manager], outs
        if kind == "gather":
            parts = [empty(n) for _ in range(size)] if at_root else []
            return [dist.gather(x, parts if at_root else None, root, **tail)], parts
        if kind == "scatter":
            out = empty(n)
            rows = [mine(n, part) for part in range(size)] if at_root else None
            return [dist.scatter(out, rows, root, **tail)], [out]
        if kind == "reduce_scatter_single":
            out = empty(n)
            if old:
                return [group._reduce_scatter_base(out, mine(n * size), reduce)], [out]
            return [dist.reduce_scatter_tensor(out, mine(n * size), op, **tail)], [out]
        if kind == "reduce_scatter_coalesced":
            outs, parts = [empty(n), empty(1)], [mine(n * size), mine(size, "second")]
            if self.lacks:
                return [dist.reduce_scatter_tensor(o, p, op, **tail) for o, p in zip(outs, parts, strict=True)], outs
            if old:
                return [group.reduce_scatter_tensor_coalesced(outs, parts, reduce)], outs
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for out, part in zip(outs, parts, strict=True):
                    dist.reduce_scatter_tensor(out, part, op, group=group)
            return [manager], outs
        if kind == "all_to_all_single":  # rank a sends a + b rows to rank b
            out, give = empty(sum(rank + b for b in range(size))), [rank + b for b in range(size)]
            if old:
                return [group.alltoall_base(out, mine(sum(give)), give, give)], [out]
            return [dist.all_to_all_single(out, mine(sum(give)), give, give, **tail)], [out]
        if kind == "exchange":  # everybody with its neighbours, sends first
            ranks = self.members[call.group]
            out, after, before = empty(n), ranks[(rank + 1) % size], ranks[rank - 1]
            if size == 1:
                return None, [x]
            sends = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, out, before, group)]
            return dist.batch_isend_irecv(sends), [out]
        if kind == "to_root":  # the root takes one message from everyone, the last rank's first
            tag, n = 7 + key[1], max(1, n)  # Gloo sends nothing that is empty
            if not at_root:
                return [dist.isend(mine(n), root, group, tag)], []
            parts = [empty(n) for _ in range(size)]
            for sender in reversed(range(size)):
                if sender != rank:
                    dist.recv(parts[sender], self.members[call.group][sender], group, tag)
            return None, parts
        raise ValueError(call.kind)


def both() -> tuple[Runner, Runner]:
    """The same groups over MPI and over Gloo."""
    runners = []
    for backend, lacks in ((mpi.BACKEND_NAME, {}), ("gloo", GLOO_LACKS)):
        groups = []
        for ranks in group_shapes(dist.get_world_size()):
            group = dist.new_group(ranks, backend=backend, timeout=TIMEOUT)
            groups.append(group if dist.get_rank() in ranks else None)
        runners.append(Runner(groups, lacks))
    return runners[0], runners[1]


def difference(runners: tuple[Runner, Runner], program: list[Call], seed: int) -> str | None:
    """What differs on this rank, or what failed."""
    try:
        over_mpi, over_gloo = (runner.run(program, seed) for runner in runners)
    except Exception:  # any error of a random program is a finding: all ranks agree on it, and fail
        traceback.print_exc()  # at once: the others may have to wait for their time-out
        return traceback.format_exc()
    for call, got, expected in zip(program, over_mpi, over_gloo, strict=True):
        for a, b in zip(got, expected, strict=True):
            if not torch.equal(a.float(), b.float()):
                return f"{call}: MPI {a.flatten()[:8].tolist()}, Gloo {b.flatten()[:8].tolist()}"
    return None


def agree(runners: tuple[Runner, Runner], words: str | None) -> None:
    """Raise on every rank what any rank found."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, words, group=runners[1].groups[0])
    for rank, found in enumerate(everyone):
        if found:
            raise AssertionError(f"rank {rank}: {found}")


def sweep(everything: bool = False) -> None:
    """Every kind × type × operation; sizes, groups, roots and asynchrony in turn, or all combinations."""
    runners, count = both(), 0
    shapes = list(itertools.product(SIZES, range(5)))
    random.Random(0).shuffle(shapes)
    turn = itertools.cycle(shapes)
    for kind in (*REDUCING, *MOVING):
        program = []
        for dtype in TYPES:
            for op in operations(dtype) if kind in REDUCING else ("SUM",):
                for size, group in shapes if everything else [next(turn)]:
                    program.append(Call(kind, dtype, size, op, group, count % 8, count % 3 == 0, count % 4 == 0))
                    count += 1
        agree(runners, difference(runners, program, count))
    if dist.get_rank() == 0:
        print(f"sweep: {count} calls")


CALLS = st.builds(
    lambda kind, dtype, op, **rest: Call(kind, dtype, op=operations(dtype)[op % len(operations(dtype))], **rest),
    st.sampled_from((*REDUCING, *MOVING)),
    st.sampled_from(TYPES[:-1]),
    st.integers(0, 4),
    size=st.integers(0, 300),
    group=st.integers(0, 4),
    root=st.integers(0, 7),
    asynchronous=st.booleans(),
    strided=st.booleans(),
)


def random_programs(examples: int) -> None:
    """Rank 0 draws programs (and shrinks one that fails); all ranks run them."""
    runners = both()

    def together(drawn: Any) -> None:
        box = [drawn]
        dist.broadcast_object_list(box, src=0, group=runners[1].groups[0])
        if box[0] is not None:
            agree(runners, difference(runners, *box[0]))

    if dist.get_rank() != 0:
        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=0, group=runners[1].groups[0])
            if box[0] is None:
                return
            words = difference(runners, *box[0])
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, words, group=runners[1].groups[0])

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(CALLS, min_size=1, max_size=12), st.integers(0, 1000))
    def check(program: list[Call], seed: int) -> None:
        together((program, seed))

    try:
        check()
    finally:
        together(None)


def objects() -> None:
    """Collectives of Python objects, which checkpoints use."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "more": "x" * rank})
    assert [item["rank"] for item in everyone] == list(range(size))
    box = [["from", 0] if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert box == [["from", 0]]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None, src=0)
    assert mine == [rank]


def accurate() -> None:
    """16-bit sums: `accurate` rounds once. The terms have few bits and various exponents: exact in fp32, not in 16."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-128, 128, (1000 * size,), generator=generator) * 0.5 ** torch.randint(
        0, 7, (1000 * size,), generator=generator
    )
    gathered = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(gathered, x)
    exact = torch.stack(gathered).sum(0)
    for dtype in (torch.float16, torch.bfloat16):
        UnaliasedGroup.accurate = True
        y, z, out = x.to(dtype), x.to(dtype), torch.empty(1000, dtype=dtype)
        dist.all_reduce(y, dist.ReduceOp.AVG)
        dist.all_reduce_coalesced([z])
        dist.reduce_scatter_tensor(out, x.to(dtype))
        UnaliasedGroup.accurate = False
        assert torch.equal(y, (exact / size).to(dtype)), dtype
        assert torch.equal(z, exact.to(dtype)), dtype
        assert torch.equal(out, exact[rank * 1000 : (rank + 1) * 1000].to(dtype)), dtype


def profile() -> None:
    """Parts of a profiled step whose times are known."""
    side = dist.new_group(backend="gloo")
    assert isinstance(side, dist.ProcessGroup)
    box: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    profiled_step.check_profile(*profiled_step.run_profiled_step(Path(box[0]), dist.get_rank(), side))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0])


CASES: dict[str, Callable[[], None]] = {
    "sweep": sweep,
    "everything": lambda: sweep(everything=True),
    "random": lambda: random_programs(25),
    "many_random": lambda: random_programs(300),
    "objects": objects,
    "accurate": accurate,
    "parallel": mpi_parallel.run_all,
    "profile": profile,
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    mpi.MpiProcessGroup = UnaliasedGroup  # type: ignore[assignment,misc]
    mpi.start_mpi(read_rank_info(os.environ), TIMEOUT)
    for name in names:
        CASES[name]()
    dist.destroy_process_group()
    mpi.finalize_mpi()
    print("good", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
