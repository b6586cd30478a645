"""Ranks for tests: processes forked from a server that has imported torch already (0.1 s instead of seconds).

`run_ranks(4, function, *arguments)` calls `function(rank_info, *arguments)` in four processes that can rendezvous and
returns their results in rank order. A rank that raises, dies or outlasts the time-out fails the test, with the
first traceback. `function` must stand at the top level of a module (it is pickled by name).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from pipeline.base.dist_env import RankInfo

PEER_TIMEOUT_S = 30.0
"""From the first failure of a rank to the answers of the others."""
PRELOAD = [
    "torch", "torch.distributed.checkpoint", "pipeline.train.trainer", "pipeline.evaluate.evaluator",
    "pipeline.parallel.pipeline_parallel", "pipeline.resilience.health", "torch._dynamo", "torch._inductor",
    "tests.support.ranks",
]  # fmt: skip
"""What the server imports. The optimizer's first step imports torch._dynamo: in each rank that took half a second."""


def _ports() -> Iterator[int]:
    """Ports below those that the kernel gives to connections, and above well-known ones; other ones in each worker."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = range(10_000 + worker % 8 * 600, 10_600 + worker % 8 * 600)
    for port in cycle(own[os.getpid() % 600 :]):
        with socket.socket() as probe:
            free = probe.connect_ex(("127.0.0.1", port)) != 0
        if free:
            yield port


PORTS = _ports()


def make_rank_info(rank: int, size: int, port: int) -> RankInfo:
    return RankInfo(
        launcher="local",
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        master_host="127.0.0.1",
        master_port=port,
        job_id=None,
        restart_count=0,
    )


def _child(rank: int, size: int, port: int, pipe: Connection, function: Callable[..., Any], arguments: Any) -> None:
    try:
        pipe.send((True, function(make_rank_info(rank, size, port), *arguments)))
    except BaseException:  # whatever ends a rank is shown by the test, SystemExit and CheckpointException too
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # threads of a process group may outlive a failure


class Ranks:
    """Started ranks; `results()` waits for all of them."""

    def __init__(self, size: int, function: Callable[..., Any], *arguments: Any) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = next(PORTS)
        self.processes, self._pipes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(rank, size, port, theirs, function, arguments), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(mine)

    @property
    def pids(self) -> list[int]:
        return [int(p.pid or 0) for p in self.processes]

    def results(self, timeout: float = 240.0, failures_expected: bool = False) -> list[Any]:
        """Each rank's result; None for a rank that was killed. Raises AssertionError with the tracebacks."""
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * len(self._pipes)
        waiting, failures = {pipe: rank for rank, pipe in enumerate(self._pipes)}, []
        try:
            while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
                for pipe in cast(list[Connection], ready):
                    rank, good, value = waiting.pop(pipe), True, None
                    with suppress(EOFError):  # one that was killed
                        good, value = pipe.recv()
                    if good:
                        results[rank] = value
                    else:
                        failures.append(f"rank {rank}:\n{value}")
                        deadline = min(deadline, time.monotonic() + PEER_TIMEOUT_S)
            if waiting:
                silent = ", ".join(map(str, sorted(waiting.values())))
                raise AssertionError("\n".join([*failures, f"ranks {silent} gave no answer within {timeout:.0f} s"]))
        finally:
            for process in self.processes:
                process.join(max(0.1, min(5.0, deadline - time.monotonic())))
                if process.is_alive():
                    process.kill()
                    process.join(5)
        if failures and not failures_expected:
            raise AssertionError("\n".join(failures))
        return results


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 240.0) -> list[Any]:
    """Run `function(rank_info, *arguments)` on `size` ranks and return their results."""
    return Ranks(size, function, *arguments).results(timeout)
