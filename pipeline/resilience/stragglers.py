"""Straggler detection: find ranks that slow down the run.

Step times do not show which rank is slow, because in each collective all ranks wait for the slowest rank. Therefore
each rank measures its local compute time: forward passes, and waiting for data. With ZeRO 3 and tensor parallelism,
forward passes contain collectives, so all ranks of a process group measure equal times. Every `train.log_every` steps,
the ranks compare their times with those of their peers, the ranks with the same pipeline-parallel stages:

- A rank becomes a straggler if its time is above 1.3 times the median of its peers in three checks in a row.
- A straggler has recovered if its time is at most 1.15 times the median of its peers in three checks in a row.

Both changes are written as events. At most once a minute, the relative time of each host in this attempt is written to
`jobs/train/own-times.json`, which `submit.py report` reads.
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
"""A rank is slow if its time, divided by the median of its peers, is above this ratio."""
RECOVERED_RATIO = 1.15
"""A straggler is no longer slow if the ratio is at most this value."""
CONSECUTIVE_CHECKS = 3
"""Number of checks in a row in which a rank must be slow, or no longer slow, before it becomes a straggler or
recovers."""
HOST_FILE_INTERVAL_S = 60.0
"""The pause between two updates of the file with the relative compute times of the hosts."""


class LocalComputeTimer:
    """Measures for how many seconds this rank computes, as a context manager around the computation.

    On a CUDA device, CUDA events measure the time of the device. `add_seconds` adds times that were measured elsewhere.
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
        """Return the seconds measured since the last call. On CUDA, the device must have finished the measured work."""
        device_ms = sum(start.elapsed_time(end) for start, end in self._events)
        seconds: float = self._seconds + device_ms / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds


class StragglerDetector(Callback):
    """Compares the local compute times of all ranks, to find stragglers.

    Rank 0 writes the events, and the file with the relative compute times of the hosts.

    Args:
        run: the run.
        group: a Gloo group of all ranks, used only from the thread that trains.
        pipeline_ranks: for each rank, its position in the pipeline. Ranks with the same position are peers, because
            they do the same work.
        timer: measures the local compute time of this rank.
    """

    def __init__(
        self, run: Run, group: dist.ProcessGroup, pipeline_ranks: Sequence[int], timer: LocalComputeTimer
    ) -> None:
        self.run = run
        self.group = group
        self.pipeline_ranks = pipeline_ranks
        self.timer = timer
        self.hosts = all_gather_results(group, gethostname)
        self._log_every = run.config.train.log_every
        self._stragglers: set[int] = set()
        self._contrary_checks: dict[int, int] = {}
        """For each rank, in how many checks in a row the rank was slow without being a straggler, or was a straggler
        without being slow."""
        self._sums: dict[str, list[float]] = {}
        """For each host, two sums in seconds: the times of its ranks, and the medians of the times of their peers."""
        self._next_host_file_time = 0.0
        """When the file with the relative compute times of the hosts is next updated, by `time.monotonic`."""

    def on_step_end(self, trainer: TrainerContext, step: int, metrics: dict[str, Any]) -> None:
        """Compare the ranks every `train.log_every` steps. Rank 0 adds `compute_spread` to the metrics."""
        if step % self._log_every == 0:
            metrics.update(self.compare_ranks(step, self.timer.read_and_reset()))

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the time for which the rank waited for data."""
        self.timer.add_seconds(trainer.data_wait_s)

    def compare_ranks(self, step: int, seconds: float) -> dict[str, float]:
        """Gather the times of all ranks and update the stragglers. All ranks must call this method in the same steps.

        Args:
            step: the number of the step.
            seconds: the local compute time of this rank since the last call.

        Returns:
            On rank 0, if there are several ranks: `compute_spread`, the time of the slowest rank as a multiple of the
            mean of its peers. Of the pipeline ranks, the largest value counts. Otherwise {}.
        """
        times = [torch.zeros(1) for _ in self.hosts]
        dist.all_gather(times, torch.tensor([seconds], dtype=torch.float32), group=self.group)
        if dist.get_rank(self.group) > 0:
            return {}
        all_seconds = [float(t) for t in times]
        self.update_stragglers(step, all_seconds)
        peers: dict[int, list[float]] = {}
        for rank_s, pipeline_rank in zip(all_seconds, self.pipeline_ranks, strict=True):
            peers.setdefault(pipeline_rank, []).append(rank_s)
        spreads = [max(peer_s) / statistics.fmean(peer_s) for peer_s in peers.values() if sum(peer_s) > 0]
        has_peers = len(all_seconds) > len(peers)
        return {"compute_spread": round(max(spreads), 4)} if spreads and has_peers else {}

    def update_stragglers(self, step: int, seconds: Sequence[float]) -> None:
        """Write an event for each rank that becomes a straggler or recovers.

        At most every `HOST_FILE_INTERVAL_S` seconds, also write the file with the relative compute time of each host:
        the sum of the times of its ranks, divided by the sum of the median times of their peers. The peers of a rank
        are all ranks with the same pipeline rank, including itself.

        Args:
            step: the number of the step.
            seconds: the local compute time of each rank.
        """
        for rank, rank_s in enumerate(seconds):
            pipeline_rank = self.pipeline_ranks[rank]
            peer_seconds = [s for s, peer in zip(seconds, self.pipeline_ranks, strict=True) if peer == pipeline_rank]
            median_s = statistics.median_low(peer_seconds)  # With two ranks, this is the time of the faster one.
            host = self.hosts[rank]
            sums = self._sums.setdefault(host, [0.0, 0.0])
            sums[0] += rank_s
            sums[1] += median_s
            was_straggler = rank in self._stragglers
            limit_ratio = RECOVERED_RATIO if was_straggler else SLOW_RATIO
            is_slow = median_s > 0 and rank_s > limit_ratio * median_s
            self._contrary_checks[rank] = 0 if is_slow == was_straggler else self._contrary_checks.get(rank, 0) + 1
            if self._contrary_checks[rank] < CONSECUTIVE_CHECKS:
                continue
            self._contrary_checks[rank] = 0
            if was_straggler:
                self._stragglers.remove(rank)
                self.run.append_event(Recovered(stage="train", step=step, rank=rank, host=host))
                continue
            self._stragglers.add(rank)
            ratio = round(rank_s / median_s, 2)
            self.run.append_event(Straggler(stage="train", step=step, rank=rank, host=host, ratio=ratio))
            print(f"straggler: rank {rank} on {host} takes {ratio} × the median of its peers", flush=True)
        if time.monotonic() >= self._next_host_file_time:
            self._next_host_file_time = time.monotonic() + HOST_FILE_INTERVAL_S
            ratios = {host: host_s / median_s for host, (host_s, median_s) in self._sums.items() if median_s > 0}
            # `stage_dir` creates the folder if it is missing.
            write_json(self.run.stage_dir("train") / get_compute_times_file(self.run.jobs_dir).name, ratios)
