"""Run a function in several ranks of `torch.distributed`.

`run_ranks(4, function, *arguments)` calls `function(rank_info, *arguments)` in four processes that can rendezvous. It
returns their results in rank order. If a rank raises an error or exceeds the time-out, the test fails with the
tracebacks. `function` must be defined at the top level of a module, because it is pickled by name.

The processes are forked from a server that has already imported torch. A rank therefore starts in 0.1 s.
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
from pathlib import Path
from typing import Any, cast

import psutil

from pipeline.base.dist_env import RankInfo

PEER_TIMEOUT_S = 30.0
"""Seconds that the other ranks have to return a result after a rank has failed."""
PRELOAD = [
    "torch", "torch.distributed.checkpoint", "pipeline.train.trainer", "pipeline.evaluate.evaluator",
    "pipeline.parallel.pipeline_parallel", "pipeline.resilience.health", "torch._dynamo", "torch._inductor",
    "tests.support.ranks",
]  # fmt: skip
"""Modules that the server imports before it forks ranks.

They include torch._dynamo. Otherwise, the first optimizer step of each rank would import it, which takes 0.5 s.
"""


def _iter_free_ports() -> Iterator[int]:
    """Yield free TCP ports between the well-known and the ephemeral ports.

    Each of up to 8 pytest-xdist workers has its own range of 600 ports.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    worker_range = range(10_000 + worker % 8 * 600, 10_600 + worker % 8 * 600)
    for port in cycle(worker_range[os.getpid() % 600 :]):
        with socket.socket() as probe:
            is_free = probe.connect_ex(("127.0.0.1", port)) != 0
        if is_free:
            yield port


PORTS = _iter_free_ports()


def make_rank_info(rank: int, size: int, port: int) -> RankInfo:
    """Return the RankInfo of one of `size` ranks on this machine, which rendezvous at `port`."""
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


def _run_rank(rank: int, size: int, port: int, pipe: Connection, function: Callable[..., Any], arguments: Any) -> None:
    """Call `function` in this process and send (succeeded, result or traceback) through the pipe."""
    try:
        pipe.send((True, function(make_rank_info(rank, size, port), *arguments)))
    except BaseException:  # also SystemExit and CheckpointException, which do not derive from Exception
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # threads of a process group may survive a failure and block a normal exit


class Ranks:
    """Ranks that are running. `wait_for_results` waits for all of them."""

    def __init__(self, size: int, function: Callable[..., Any], *arguments: Any) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = next(PORTS)
        self.processes = []
        self._pipes = []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(rank, size, port, sender, function, arguments), daemon=True
            )
            process.start()
            sender.close()
            self.processes.append(process)
            self._pipes.append(receiver)

    @property
    def pids(self) -> list[int]:
        """Return the PID of each rank."""
        return [int(process.pid or 0) for process in self.processes]

    def wait_for_results(self, timeout: float = 240.0, failures_expected: bool = False) -> list[Any]:
        """Wait for the ranks and return the result of each rank; None if the rank was killed or failed.

        Args:
            timeout: seconds to wait.
            failures_expected: do not raise an error if ranks failed.

        Raises:
            AssertionError: ranks failed (with their tracebacks), or did not return a result within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * len(self._pipes)
        rank_by_pipe = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        failures = []
        try:
            while rank_by_pipe and (ready := wait(list(rank_by_pipe), max(0.0, deadline - time.monotonic()))):
                for pipe in cast(list[Connection], ready):
                    rank = rank_by_pipe.pop(pipe)
                    succeeded = True
                    value = None
                    with suppress(EOFError):  # the rank was killed
                        succeeded, value = pipe.recv()
                    if succeeded:
                        results[rank] = value
                    else:
                        failures.append(f"rank {rank}:\n{value}")
                        deadline = min(deadline, time.monotonic() + PEER_TIMEOUT_S)
            if rank_by_pipe:
                ranks = ", ".join(map(str, sorted(rank_by_pipe.values())))
                raise AssertionError("\n".join([*failures, f"ranks {ranks} returned no result within {timeout:.0f} s"]))
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
    """Call `function(rank_info, *arguments)` in `size` ranks and return their results."""
    return Ranks(size, function, *arguments).wait_for_results(timeout)


def find_rank_processes(run_path: Path) -> dict[int, psutil.Process]:
    """Return the running ranks of a run that node agents have forked, by rank.

    A forked rank has a process name with its rank, and the command line of the agent, which contains the run.
    """
    process_by_rank = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            name, _, rank = process.name().rpartition("-")
            if name == "sluice-rank" and str(run_path) in process.cmdline():
                process_by_rank[int(rank)] = process
    return process_by_rank
