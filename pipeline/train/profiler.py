"""Profiled steps: recorded by torch.profiler on the ranks, divided into parts, saved for a view of all ranks together.

A step is profiled if `train.profile_every` says so or the user requested it (`submit.py profile`). A request is a file
in the run directory that the ranks agree on, like a request to save (pipeline/resilience/stop.py). Before the step each
profiled rank measures the offset of its clock to rank 0's by a few round trips, and all start together. After the step
each rank divides its own trace (pipeline/train/step_trace.py) and writes the spans to
`profiles/step-N/rank-R.json.gz`. The metrics of the step get the mean. The ranks merge nothing: cli/profile.py does.

torch records the thread that started the profile, with autograd's threads, and Gloo's operations from call to end. MPI
operations are added from Sluice's own records. If profiling fails, a warning is printed and the training continues.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.base.files import open_regular_file, write_json
from pipeline.comm.groups import World, broadcast_from_rank0
from pipeline.mpi.work import MpiWork
from pipeline.parallel.mesh import Layout
from pipeline.resilience.stop import PROFILE_REQUEST, RequestFile, StopCoordinator
from pipeline.resilience.watchdog import list_recent_collectives
from pipeline.run.directory import Run
from pipeline.train.callback import Callback, TrainerContext
from pipeline.train.step_trace import GROUP, PIPELINE, STEP, average_ranks, divide_step, parse_trace

ROUND_TRIPS = 5
MAX_CALLS = 1000
"""The number of recent collectives among which the group of a Gloo operation is looked up."""
MAX_SPANS = 100_000
"""The longest spans of a rank's step are saved."""
MAX_STEPS = 20
"""The newest profiled steps of a run are kept, and one request may ask for so many."""
MAX_TRACE_BYTES = 300_000_000
"""Largest trace of a step that is read, which takes several times as much memory."""
MIN_DURATION_S = 30.0
"""Assumed duration of a profile until one took longer."""


class Profiler(Callback):
    """Profiles steps on this rank. All ranks call all methods together."""

    def __init__(self, run: Run, layout: Layout, world: World, coordinator: StopCoordinator) -> None:
        """Use the group and the deadline of `coordinator`: no profile starts if the deadline leaves no time for it."""
        self.run = run
        self.layout = layout
        self.world = world
        self.coordinator = coordinator
        self.group = coordinator.group
        self.deadline = coordinator.deadline
        self.request = RequestFile(run.profile_file)
        coordinator.add_request(PROFILE_REQUEST, self.request.is_pending if world.is_rank0 else lambda: False)
        self.overhead_s = 0.0
        """Seconds spent on profiling, without the step itself, since the latest step's metrics."""
        self._longest_s = MIN_DURATION_S
        self._steps_left = 0
        self._requested_steps = 0
        self._ranks: Sequence[int] = range(world.size)
        self._clock_error_and_offset_ns = (0, 0)
        self._step: record_function | None = None
        self._recorder: profile | None = None
        if world.is_rank0:  # a request that the previous attempt did not survive is not repeated
            with suppress(OSError):
                run.profile_taken_file.unlink()

    def on_step_begin(self, trainer: TrainerContext, step: int) -> None:
        """Start to record the step if it is due."""
        self.begin_step(step)

    def on_step_end(self, trainer: TrainerContext, step: int, metrics: dict[str, Any]) -> None:
        """Stop recording; add the step's parts to its metrics. Ranks that stop now have no time to save a trace."""
        metrics.update(self.end_step(step, save=self.coordinator.stop_reason is None))
        if self.overhead_s:
            trainer.overhead_s["profile_s"] = self.overhead_s
            self.overhead_s = 0.0

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Accept the request that the ranks agreed on."""
        if PROFILE_REQUEST in self.coordinator.agreed_requests:
            self.accept_request()

    def accept_request(self) -> None:
        """Profile from the next step on, or leave the request to the next attempt if time is short."""
        requested: list[Any] = [0, None]
        if self.world.is_rank0 and self.deadline.should_stop(self._longest_s):
            self.request.defer()
        elif self.world.is_rank0:
            requested = [1, None]
            with self._warn_on_error("the request"):  # an empty file requests one step of all ranks
                os.replace(self.request.file, self.run.profile_taken_file)
                with open_regular_file(self.run.profile_taken_file) as file:
                    content = json.loads(file.read() or b"{}")
                requested = [min(max(1, int(content.get("steps", 1))), MAX_STEPS), content.get("ranks")]
            self.request.accept()
        self._steps_left, ranks = broadcast_from_rank0(self.group, requested)
        self._requested_steps = self._steps_left
        self._ranks = ranks or range(self.world.size)

    def begin_step(self, step: int) -> None:
        """Start to record `step` if it is due."""
        every = self.run.config.train.profile_every
        start_time = time.perf_counter()
        if not self._steps_left and (every is None or step % every):
            return
        # the deadline of rank 0 knows how long a save takes
        if broadcast_from_rank0(self.group, self.deadline.should_stop(self._longest_s)):
            if self._steps_left == self._requested_steps > 0 and self.world.is_rank0:
                with suppress(OSError):
                    os.replace(self.run.profile_taken_file, self.request.file)
                self.request.defer()
            self._steps_left = 0
            return
        self._clock_error_and_offset_ns = self._compare_clocks()
        with self._warn_on_error("the start"):
            if self.world.rank in self._ranks:
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would log each start and stop
                gpu = [ProfilerActivity.CUDA] if self.world.device.type == "cuda" else []
                recorder = profile(activities=[ProfilerActivity.CPU, *gpu])
                recorder.start()
                self._recorder = recorder
                MpiWork.recorded = []
        dist.barrier(self.group)
        self.overhead_s += time.perf_counter() - start_time
        self._step = record_function(STEP)
        self._step.__enter__()

    def end_step(self, step: int, *, save: bool) -> dict[str, Any]:
        """Stop recording `step`; return its parts in seconds, the mean of the ranks; empty if nothing is saved."""
        if self._step is None:
            return {}
        if self.world.device.type == "cuda":  # the last kernels belong to the step
            torch.cuda.synchronize()
        self._step.__exit__(None, None, None)
        start_time = time.perf_counter()
        folder = self.run.profiles_dir / f"step-{step:08}"
        parts: dict[str, Any] | None = None
        with self._warn_on_error("the trace"):
            if self._recorder is not None:
                self._recorder.stop()
            if self._recorder is not None and save:
                folder.mkdir(parents=True, exist_ok=True)
                parts = self._save_trace(folder / f"rank-{self.world.rank}.json.gz", self._recorder)
        self._step = None
        self._recorder = None
        MpiWork.recorded = None
        all_ranks_parts: list[Any] = [None] * self.world.size
        dist.all_gather_object(all_ranks_parts, parts, group=self.group)
        parts_by_rank = {rank: found for rank, found in enumerate(all_ranks_parts) if found}
        self._steps_left = max(0, self._steps_left - 1)
        if self._steps_left == 0:
            self._ranks = range(self.world.size)
        if self.world.is_rank0:
            self._update_folder(folder, parts_by_rank)
        self.overhead_s += time.perf_counter() - start_time
        self._longest_s = max(self._longest_s, self.overhead_s)
        return {"profile": average_ranks(list(parts_by_rank.values()))} if parts_by_rank else {}

    def _update_folder(self, folder: Path, parts_by_rank: Mapping[int, Any]) -> None:
        """Write the parts of all ranks, remove old profiles, and remove the request after its last step."""
        with self._warn_on_error("the folder"):
            if parts_by_rank:
                write_json(folder / "parts.json", parts_by_rank)
            for old in sorted(self.run.profiles_dir.glob("step-*"), key=os.path.getmtime)[:-MAX_STEPS]:
                shutil.rmtree(old)
        if self._steps_left == 0:
            with self._warn_on_error("the request"):
                self.run.profile_taken_file.unlink(missing_ok=True)

    @contextmanager
    def _warn_on_error(self, activity: str) -> Iterator[None]:
        """Print an error as a warning: a profile must not end a training."""
        try:
            yield
        except Exception as error:
            print(
                f"WARNING: profile: {activity} failed on rank {self.world.rank}: {error}", file=sys.stderr, flush=True
            )

    def _compare_clocks(self) -> tuple[int, int]:
        """Return the error of this rank's clock after correction, and the correction to rank 0's clock, in nanoseconds.

        The shortest of several round trips counts: rank 0 read its clock within it (Cristian, "Probabilistic clock
        synchronization", Distributed Computing 3, 1989).
        """
        trips = [(0, 0)] if self.world.is_rank0 else []
        clock = torch.zeros(1, dtype=torch.int64)
        for rank in [rank for rank in range(1, self.world.size) for _ in range(ROUND_TRIPS)]:
            if self.world.is_rank0:
                dist.recv(clock, rank, group=self.group)
                dist.send(clock.fill_(time.time_ns()), rank, group=self.group)
            elif rank == self.world.rank:
                sent_ns = time.time_ns()
                dist.send(clock, 0, group=self.group)
                dist.recv(clock, 0, group=self.group)
                received_ns = time.time_ns()
                trips.append(((received_ns - sent_ns) // 2, int(clock.item()) - (sent_ns + received_ns) // 2))
        return min(trips)

    def _save_trace(self, file: Path, recorder: profile) -> dict[str, Any]:
        """Write the spans of this rank's step to `file`; return the step's parts in seconds."""
        with tempfile.NamedTemporaryFile(suffix=".json") as exported:
            recorder.export_chrome_trace(exported.name)
            if (size := os.path.getsize(exported.name)) > MAX_TRACE_BYTES:
                raise ValueError(
                    f"torch's trace has {size:,} bytes, more than {MAX_TRACE_BYTES:,}: use fewer micro-batches"
                )
            trace = json.loads(Path(exported.name).read_bytes())  # torch replaced the file, so open it by its name
        base_ns = trace["baseTimeNanoseconds"]
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        self._add_groups_of_gloo(events, base_ns)
        names = {group["pg_name"]: group["pg_desc"] for group in trace.get("distributedInfo", {}).get("pg_config", ())}
        for name, group, start_ns, end_ns in MpiWork.recorded or ():
            arguments = {GROUP: PIPELINE if "tag" in name else names.get(group, group)}
            times = {"ts": (start_ns - base_ns) / 1000, "dur": (end_ns - start_ns) / 1000}
            events.append({"name": name, "cat": "communication", "args": arguments, **times})
        begin_us, step_us, spans = parse_trace(events)
        error_ns, offset_ns = self._clock_error_and_offset_ns
        position = self.layout.coordinates(self.world.rank)
        content = {
            "rank": self.world.rank, "host": os.uname().nodename, "clock_error_ns": error_ns,
            "place": {"pipeline": position.pp, "data": position.dp, "tensor": position.tp},
            "step_us": step_us, "begin_ns": base_ns + round(1000 * begin_us) + offset_ns,
            "spans": sorted(spans, key=lambda span: span.start - span.end)[:MAX_SPANS],
        }  # fmt: skip
        file.write_bytes(gzip.compress(json.dumps(content).encode(), 1))
        return divide_step(spans, step_us)

    def _add_groups_of_gloo(self, events: Sequence[dict[str, Any]], base_ns: int) -> None:
        """Mark Gloo's operations as communication, with the group that the flight recorder knows."""
        calls = [(call["time_ns"], call["operation"], call["group"]) for call in list_recent_collectives(MAX_CALLS)]
        for event in events:
            if event["name"].startswith("gloo:"):
                before = bisect_right(calls, base_ns + 1000 * event["ts"], key=lambda call: call[0])
                groups = [group for _, name, group in calls[:before] if name == event["name"]]
                # The recorder has no messages, which only a pipeline sends; that of torch 2.11 has no calls at all.
                groups = groups or [PIPELINE if event["name"][5:9] in ("send", "recv") else "unknown"]
                event.update({"cat": "communication", "args": {GROUP: groups[-1]}})
