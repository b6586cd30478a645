"""Straggler detection: find ranks that are slow themselves.

Step times do not show them, because in a collective all ranks wait for the slowest one. Each rank therefore measures
its local compute time: waiting for data, and forward passes. (With ZeRO 3 and tensor parallelism a forward pass
contains collectives, so ranks that share them look alike.) Every `train.log_every` steps the ranks gather these times.

A rank is a straggler if its time is 1.3 times the median of its peers (ranks with the same pipeline stages) three times
in a row. It has recovered after three times in a row below 1.15. Both are events with the host. `status` names current
stragglers. `jobs/train/own-times.json` rates the hosts of the newest attempt, once a minute, for `report`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist

from pipeline.base.files import write_json
from pipeline.comm.groups import all_gather_results
from pipeline.run.directory import Run
from pipeline.run.events import Recovered, Straggler
from pipeline.run.machines import get_compute_times_file
from pipeline.train.callback import Callback, TrainerContext

SLOW_RATIO = 1.3
"""A rank is slow from this ratio to the median of its peers on."""
RECOVERED_RATIO = 1.15
"""A straggler is no longer slow up to this ratio."""
CONSECUTIVE_CHECKS = 3
"""How often in a row a rank must be slow, or no longer slow, before its state changes."""
HOST_FILE_INTERVAL_S = 60.0


class LocalComputeTimer:
    """Seconds that this rank spent on its own work; on CUDA measured by the device's clock.

    A context manager measures what runs inside it.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0
        self._start_time = 0.0
        self._start_event: torch.cuda.Event | None = None

    def add_seconds(self, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self._seconds += seconds

    def __enter__(self) -> None:
        if self._is_cuda:
            self._start_event = torch.cuda.Event(enable_timing=True)
            self._start_event.record()
        else:
            self._start_time = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._start_event is not None:
            end_event = torch.cuda.Event(enable_timing=True)
            end_event.record()
            self._events.append((self._start_event, end_event))
        else:
            self._seconds += time.perf_counter() - self._start_time

    def read_and_reset(self) -> float:
        """Return the seconds since the last call. On CUDA the measured steps must have ended."""
        seconds: float = self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds


class StragglerDetector(Callback):
    """Gathers the local compute times of all ranks; rank 0 writes events and rates the hosts.

    Args:
        group: a Gloo group of all ranks, used only from the thread that trains.
        peers: for each rank a number that ranks with the same work share.
        timer: measures this rank.
    """

    def __init__(self, run: Run, group: dist.ProcessGroup, peers: Sequence[int], timer: LocalComputeTimer) -> None:
        self.run = run
        self.group = group
        self.peers = peers
        self.timer = timer
        self.hosts = all_gather_results(group, gethostname)
        self._log_every = run.config.train.log_every
        self._stragglers: set[int] = set()
        self._changed_checks: dict[int, int] = {}
        """For each rank how many times in a row its speed contradicted its state."""
        self._sums: dict[str, list[float]] = {}
        """For each host the sums of its ranks' times and of their peers' medians."""
        self._next_host_file = 0.0

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the time that the rank waited for data; compare the ranks every `train.log_every` steps."""
        self.timer.add_seconds(trainer.data_wait_s)
        if step % self._log_every == 0:
            self.compare_ranks(step, self.timer.read_and_reset())

    def compare_ranks(self, step: int, seconds: float) -> None:
        """Compare this rank's time with the others'. All ranks call it at the same steps."""
        times = [torch.zeros(1) for _ in self.hosts]
        dist.all_gather(times, torch.tensor([seconds], dtype=torch.float32), group=self.group)
        if dist.get_rank(self.group) == 0:
            self.update_stragglers(step, [float(t) for t in times])

    def update_stragglers(self, step: int, seconds: Sequence[float]) -> None:
        """Write an event for each rank that became a straggler or recovered.

        Args:
            seconds: local compute time of each rank.
        """
        for rank, own_s in enumerate(seconds):
            peer_seconds = [s for s, peer in zip(seconds, self.peers, strict=True) if peer == self.peers[rank]]
            median_s = statistics.median_low(peer_seconds)  # of two ranks that of the faster one
            host = self.hosts[rank]
            sums = self._sums.setdefault(host, [0.0, 0.0])
            sums[0] += own_s
            sums[1] += median_s
            was_straggler = rank in self._stragglers
            is_slow = median_s > 0 and own_s > (RECOVERED_RATIO if was_straggler else SLOW_RATIO) * median_s
            self._changed_checks[rank] = 0 if is_slow == was_straggler else self._changed_checks.get(rank, 0) + 1
            if self._changed_checks[rank] < CONSECUTIVE_CHECKS:
                continue
            self._changed_checks[rank] = 0
            self._stragglers ^= {rank}
            if was_straggler:
                self.run.append_event(Recovered(stage="train", step=step, rank=rank, host=host))
                continue
            ratio = round(own_s / median_s, 2)
            self.run.append_event(Straggler(stage="train", step=step, rank=rank, host=host, ratio=ratio))
            print(f"straggler: rank {rank} on {host} takes {ratio} × the median of its peers", flush=True)
        if time.monotonic() >= self._next_host_file:
            self._next_host_file = time.monotonic() + HOST_FILE_INTERVAL_S
            ratios = {host: own_s / median_s for host, (own_s, median_s) in self._sums.items() if median_s > 0}
            write_json(self.run.stage_dir("train") / get_compute_times_file(self.run.jobs_dir).name, ratios)
