"""Profiled steps: recorded by torch.profiler on the ranks, divided into parts, kept for a look at all ranks together.

A step is profiled where `train.profile_every` says so, or where somebody asked (`submit.py profile`, a request in the
run directory, agreed upon as a request to save is: pipeline/resilience/stop.py). Before it every profiled rank learns
how far its clock is from rank 0's, by a few round trips, and all begin together. After it each rank divides its own
trace (pipeline/train/step_trace.py) and writes the spans to `profiles/step-N/rank-R.json.gz`; rank 0's line of metrics
gets the mean. The ranks merge nothing: cli/profile.py does.

torch records the thread that began the profile, with autograd's, and Gloo's operations from their call to their end.
Ours over MPI are added from their own account. What goes wrong is said in the log, and the training goes on.
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
from collections.abc import Iterator
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
from pipeline.resilience.stop import RequestFile, StopCoordinator
from pipeline.resilience.watchdog import list_recent_collectives
from pipeline.run.directory import Run
from pipeline.train.step_trace import GROUP, PIPELINE, STEP, average_ranks, divide_step, parse_trace

ROUND_TRIPS, CALLS = 5, 1000
MOST_SPANS, MOST_STEPS = 100_000, 20
"""The longest spans of a rank's step are kept, and the newest steps of a run."""
MOST_BYTES = 300_000_000
"""Of torch's own trace of a step; reading one takes some times as much memory."""
LEAST_S = 30.0
"""A profile counts as so long, until one took longer: nobody knows before the first."""


class Profiler:
    """This rank's part; all ranks call everything together."""

    def __init__(self, run: Run, layout: Layout, world: World, agreement: StopCoordinator) -> None:
        """`agreement`: its group is for control, of all ranks; none is begun that its clock has no time for."""
        self.run, self.layout, self.world, self.group, self.clock = run, layout, world, agreement.group, agreement.clock
        self.request = RequestFile(run.profile_file)
        self.seconds = 0.0
        """What profiling took, but for the step itself, since somebody set it to 0."""
        self._longest_s = LEAST_S
        self._left, self._asked, self._ranks = 0, 0, range(world.size)
        self._clock = 0, 0
        self._step: record_function | None = None
        self._recorder: profile | None = None
        if world.is_rank0:  # what an attempt did not survive is not done again
            with suppress(OSError):
                run.profile_taken_file.unlink()

    def ask(self) -> None:
        """There is a request: begin with the next step, or leave it to the next attempt."""
        asked: list[Any] = [0, None]
        if self.world.is_rank0 and self.clock.due(self._longest_s):
            self.request.leave()
        elif self.world.is_rank0:
            asked = [1, None]
            with self._careful("the request"):  # an empty file asks for one step of all ranks
                os.replace(self.request.file, self.run.profile_taken_file)
                with open_regular_file(self.run.profile_taken_file) as file:
                    found = json.loads(file.read() or b"{}")
                asked = [min(max(1, int(found.get("steps", 1))), MOST_STEPS), found.get("ranks")]
            self.request.begun()
        self._left, ranks = broadcast_from_rank0(self.group, asked)
        self._asked = self._left
        self._ranks = ranks or range(self.world.size)

    def begin(self, step: int) -> None:
        """Step number `step` begins: record it, where it is due."""
        every, began = self.run.config.train.profile_every, time.perf_counter()
        if not self._left and (every is None or step % every):
            return
        if broadcast_from_rank0(self.group, self.clock.due(self._longest_s)):  # its clock knows how long a save takes
            if self._left == self._asked > 0 and self.world.is_rank0:
                with suppress(OSError):
                    os.replace(self.run.profile_taken_file, self.request.file)
                self.request.leave()
            self._left = 0
            return
        self._clock = self._compare_clocks()
        with self._careful("the start"):
            if self.world.rank in self._ranks:
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells the log when it starts and stops
                gpu = [ProfilerActivity.CUDA] if self.world.device.type == "cuda" else []
                recorder = profile(activities=[ProfilerActivity.CPU, *gpu])
                recorder.start()
                self._recorder, MpiWork.recorded = recorder, []
        dist.barrier(self.group)
        self.seconds += time.perf_counter() - began
        self._step = record_function(STEP)
        self._step.__enter__()

    def end(self, step: int, *, kept: bool) -> dict[str, Any]:
        """The step is over; what its line of metrics says of it, on rank 0: seconds by part, the mean of the ranks.

        Not `kept` where the ranks stop now, who have no time for it.
        """
        if self._step is None:
            return {}
        if self.world.device.type == "cuda":  # its last kernels belong to it
            torch.cuda.synchronize()
        self._step.__exit__(None, None, None)
        began, folder = time.perf_counter(), self.run.profiles_dir / f"step-{step:08}"
        mine: dict[str, Any] | None = None
        with self._careful("the trace"):
            if self._recorder is not None:
                self._recorder.stop()
            if self._recorder is not None and kept:
                folder.mkdir(parents=True, exist_ok=True)
                mine = self._keep(folder / f"rank-{self.world.rank}.json.gz", self._recorder)
        self._step = self._recorder = MpiWork.recorded = None
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, mine, group=self.group)
        known = {rank: one for rank, one in enumerate(everyone) if one}
        self._left = max(0, self._left - 1)
        if self._left == 0:
            self._ranks = range(self.world.size)
        if self.world.is_rank0:
            with self._careful("the folder"):
                if known:
                    write_json(folder / "parts.json", known)
                for old in sorted(self.run.profiles_dir.glob("step-*"), key=os.path.getmtime)[:-MOST_STEPS]:
                    shutil.rmtree(old)
            if self._left == 0:
                with self._careful("the request"):
                    self.run.profile_taken_file.unlink(missing_ok=True)
        self.seconds += time.perf_counter() - began
        self._longest_s = max(self._longest_s, self.seconds)
        return {"profile": average_ranks(list(known.values()))} if known else {}

    @contextmanager
    def _careful(self, what: str) -> Iterator[None]:
        """No profile is worth a training: say what went wrong, and go on."""
        try:
            yield
        except Exception as error:
            print(f"WARNING: profile: {what} failed on rank {self.world.rank}: {error}", file=sys.stderr, flush=True)

    def _compare_clocks(self) -> tuple[int, int]:
        """How far this rank's clock may be off rank 0's after the correction, and that correction; in nanoseconds.

        The shortest of some round trips counts: rank 0 read its clock within it (Cristian, "Probabilistic clock
        synchronization", Distributed Computing 3, 1989).
        """
        trips, now = [(0, 0)] if self.world.is_rank0 else [], torch.zeros(1, dtype=torch.int64)
        for rank in [rank for rank in range(1, self.world.size) for _ in range(ROUND_TRIPS)]:
            if self.world.is_rank0:
                dist.recv(now, rank, group=self.group)
                dist.send(now.fill_(time.time_ns()), rank, group=self.group)
            elif rank == self.world.rank:
                asked = time.time_ns()
                dist.send(now, 0, group=self.group)
                dist.recv(now, 0, group=self.group)
                answered = time.time_ns()
                trips.append(((answered - asked) // 2, int(now.item()) - (asked + answered) // 2))
        return min(trips)

    def _keep(self, file: Path, recorder: profile) -> dict[str, Any]:
        """Write what was recorded of this rank; its seconds by part."""
        with tempfile.NamedTemporaryFile(suffix=".json") as exported:
            recorder.export_chrome_trace(exported.name)
            if (size := os.path.getsize(exported.name)) > MOST_BYTES:
                raise ValueError(f"torch's trace has {size:,} bytes, more than {MOST_BYTES:,}: fewer micro-batches")
            trace = json.loads(Path(exported.name).read_bytes())  # torch puts another file there
        base, events = trace["baseTimeNanoseconds"], [one for one in trace["traceEvents"] if one["ph"] == "X"]
        called = [(call["time_ns"], call["operation"], call["group"]) for call in list_recent_collectives(CALLS)]
        for event in events:
            if event["name"].startswith("gloo:"):
                at = bisect_right(called, base + 1000 * event["ts"], key=lambda call: call[0])
                groups = [group for _, name, group in called[:at] if name == event["name"]]
                # messages are not among the calls, and here only a pipeline sends any; torch 2.11 notes no calls at all
                groups = groups or [PIPELINE if event["name"][5:9] in ("send", "recv") else "unknown"]
                event |= {"cat": "communication", "args": {GROUP: groups[-1]}}
        named = {one["pg_name"]: one["pg_desc"] for one in trace.get("distributedInfo", {}).get("pg_config", ())}
        for what, group, start, end in MpiWork.recorded or ():
            more = {GROUP: PIPELINE if "tag" in what else named.get(group, group)}
            times = {"ts": (start - base) / 1000, "dur": (end - start) / 1000}
            events.append({"name": what, "cat": "communication", "args": more, **times})
        begin, step_us, spans = parse_trace(events)
        error, offset = self._clock
        position = self.layout.coordinates(self.world.rank)
        told = {
            "rank": self.world.rank, "host": os.uname().nodename, "clock_error_ns": error,
            "place": {"pipeline": position.pp, "data": position.dp, "tensor": position.tp},
            "step_us": step_us, "begin_ns": base + round(1000 * begin) + offset,
            "spans": sorted(spans, key=lambda span: span.start - span.end)[:MOST_SPANS],
        }  # fmt: skip
        file.write_bytes(gzip.compress(json.dumps(told).encode(), 1))
        return divide_step(spans, step_us)
