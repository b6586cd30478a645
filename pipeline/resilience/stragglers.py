"""Which rank is slow by itself. Step times cannot tell: in a collective everybody waits for the slowest.

Each rank measures its own part of a step, mostly before any rank waits for another: waiting for data, and the forward
passes. (With ZeRO 3 and tensor parallelism a forward pass has collectives itself: ranks that share them look alike.)
Every `log_every` steps the ranks gather that time. A rank that took 1.3 times the median of its peers (those that hold
the same pipeline stages) three times in a row is a straggler: events.jsonl has it with its host, and again when it has
recovered, which takes three times in a row below 1.15. `status` names those that have not. `jobs/train/own-times.json`
ranks the hosts of the newest attempt, once a minute, for `report`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist

from pipeline.base.files import write_json
from pipeline.comm import groups
from pipeline.run.directory import Run
from pipeline.run.metrics import own_times_file

RATIO, RECOVERED, IN_A_ROW, RANK_EVERY_S = 1.3, 1.15, 3, 60.0
"""From what ratio on a rank is slow, and up to what it no longer is, if so many times in a row."""


class LocalComputeTimer:
    """Seconds that a rank spent on its own work since the last :meth:`take`; on CUDA by the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0
        self._begun: Any = None

    def add(self, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        self._seconds += seconds

    def __enter__(self) -> None:
        if self._cuda:
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()
        else:
            self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._events.append((self._begun, end))
        else:
            self._seconds += time.perf_counter() - self._begun

    def take(self) -> float:
        """The seconds, and start anew. On CUDA the steps they belong to must have ended."""
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds


class StragglerDetector:
    """On every rank: gathers; on rank 0: ranks the hosts and writes events."""

    def __init__(self, run: Run, group: dist.ProcessGroup, peers: Sequence[int]) -> None:
        """`group`: a Gloo group of all ranks whose other users take turns with this one.

        `peers`: for each rank something that those with the same work share.
        """
        self.run, self.group, self.peers = run, group, peers
        self.hosts = groups.all_gather_results(group, gethostname)
        self._slow: set[int] = set()
        self._otherwise: dict[int, int] = {}
        """For each rank how many times in a row it was not as it is known."""
        self._sums: dict[str, list[float]] = {}
        self._next = 0.0

    def gather(self, step: int, seconds: float) -> None:
        """Compare this rank's own time with the others'. Every rank must call it at the same steps."""
        times = [torch.zeros(1) for _ in self.hosts]
        dist.all_gather(times, torch.tensor([seconds], dtype=torch.float32), group=self.group)
        if dist.get_rank(self.group) == 0:
            self.judge(step, [float(t) for t in times])

    def judge(self, step: int, seconds: Sequence[float]) -> None:
        """Count the ranks that are slow, and name those that stay so."""
        for rank, own in enumerate(seconds):
            like = [s for s, peer in zip(seconds, self.peers, strict=True) if peer == self.peers[rank]]
            median, host = statistics.median_low(like), self.hosts[rank]  # of two ranks the faster one's
            sums = self._sums.setdefault(host, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + own, sums[1] + median
            known = rank in self._slow
            slow = median > 0 and own > (RECOVERED if known else RATIO) * median
            self._otherwise[rank] = 0 if slow == known else self._otherwise.get(rank, 0) + 1
            if self._otherwise[rank] < IN_A_ROW:
                continue
            self._otherwise[rank] = 0
            self._slow ^= {rank}
            if known:
                self.run.event("recovered", "train", step=step, rank=rank, host=host)
                continue
            ratio = round(own / median, 2)
            self.run.event("straggler", "train", step=step, rank=rank, host=host, ratio=ratio)
            print(f"straggler: rank {rank} on {host} takes {ratio} × the median of its peers", flush=True)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + RANK_EVERY_S
            ratios = {host: own / median for host, (own, median) in self._sums.items() if median > 0}
            write_json(self.run.stage_dir("train") / own_times_file(self.run).name, ratios)
