"""Profiled steps: recorded by torch.profiler on the ranks, divided into parts, kept for a look at all ranks together.

A step is profiled where `train.profile_every` says so, or where somebody asked (`submit.py profile`, a request in the
run directory, agreed upon as a request to save is: pipeline/resilience/stop.py). Before it every profiled rank learns
how far its clock is from rank 0's, by a few round trips, and all begin together. After it each rank divides its own
trace (pipeline/train/step_trace.py) and writes the spans to `profiles/step-N/rank-R.json.gz`; rank 0's line of metrics
gets the mean. The ranks merge nothing: slurm/show/profiles.py does.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.base.files import write_json
from pipeline.comm.groups import World, from_rank0
from pipeline.config.layout import Layout
from pipeline.mpi.work import MpiWork
from pipeline.resilience.stop import Request
from pipeline.run.directory import Run
from pipeline.train.step_trace import PIPELINE, STEP, parts, read

ROUND_TRIPS = 5
MOST_SPANS, MOST_STEPS = 100_000, 20
"""The longest spans of a rank's step are kept, and the newest steps of a run."""


class Profiler:
    """This rank's part; all ranks call everything together."""

    def __init__(self, run: Run, layout: Layout, world: World, group: dist.ProcessGroup) -> None:
        """`group`: for control, of all ranks."""
        self.run, self.layout, self.world, self.group = run, layout, world, group
        self.every = run.config.train.profile_every
        self.request = Request(run.profile_file)
        self.seconds = 0.0
        """What profiling took, but for the step itself, since somebody set it to 0."""
        self._asked: Mapping[str, Any] = {}
        self._left = 0
        self._due, self._began, self._clock = False, 0.0, (0, 0)
        self._recorder: profile | None = None
        self._step = record_function(STEP)

    def ask(self) -> None:
        """There is a request: begin with the next step."""
        asked: Any = None
        if self.world.first:
            self.request.begun()
            with suppress(OSError, ValueError):
                asked = json.loads(self.request.file.read_bytes())
        asked = from_rank0(self.group, asked)
        self._asked = asked if isinstance(asked, dict) else {}
        with self._careful("the request"):
            self._left = min(int(self._asked.get("steps", 1)), MOST_STEPS)

    def begin(self, step: int) -> None:
        """Step number `step` begins: record it, where it is due."""
        every = self.every is not None and step % self.every == 0
        self._due, self._began = every or self._left > 0, time.perf_counter()
        if not self._due:
            return
        wanted = None if every else self._asked.get("ranks")
        ranks = [rank for rank in range(self.world.size) if wanted is None or rank in wanted]
        self._clock = self._compare_clocks(ranks)
        if self.world.rank in ranks:
            with self._careful("the start"):
                gpu = [ProfilerActivity.CUDA] if self.world.device.type == "cuda" else []
                recorder = profile(activities=[ProfilerActivity.CPU, *gpu])
                recorder.start()
                self._recorder, MpiWork.recorded = recorder, []
        dist.barrier(self.group)
        self.seconds += time.perf_counter() - self._began
        self._step = record_function(STEP)
        self._step.__enter__()

    def end(self, step: int) -> dict[str, Any]:
        """The step is over; what its line of metrics says of it, on rank 0: seconds by part, the mean of the ranks."""
        if not self._due:
            return {}
        if self.world.device.type == "cuda":  # its last kernels belong to it
            torch.cuda.synchronize()
        self._step.__exit__(None, None, None)
        self._began = time.perf_counter()
        mine: dict[str, Any] | None = None
        if self._recorder is not None:
            with self._careful("the trace"):
                mine = self._keep(step, self._recorder)
        self._recorder = MpiWork.recorded = None
        everyone: list[dict[str, Any] | None] = [None] * self.world.size
        dist.all_gather_object(everyone, mine, group=self.group)
        self._left = max(0, self._left - 1)
        known = {rank: one for rank, one in enumerate(everyone) if one}
        if self.world.first:
            with self._careful("the folder"):
                for folder in sorted(self.run.profiles.glob("step-*"))[:-MOST_STEPS]:
                    shutil.rmtree(folder)
                if known:
                    write_json(self._folder(step) / "parts.json", known)
            if self._left == 0:
                self.request.done()
        self.seconds += time.perf_counter() - self._began
        return {"profile": _mean(list(known.values()))} if known else {}

    def _folder(self, step: int) -> Path:
        folder = self.run.profiles / f"step-{step:08}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _careful(self, what: str) -> Iterator[None]:
        """No profile is worth a training: say what went wrong, and go on."""
        try:
            yield
        except Exception as error:
            print(f"WARNING: profile: {what} failed on rank {self.world.rank}: {error}", file=sys.stderr, flush=True)

    def _compare_clocks(self, ranks: list[int]) -> tuple[int, int]:
        """Nanoseconds to add to this rank's clock to have rank 0's, and how far that may be off.

        The shortest of some round trips counts: rank 0 read its clock within it (Cristian, "Probabilistic clock
        synchronization", Distributed Computing 3, 1989).
        """
        best, now = (0, 0), torch.zeros(1, dtype=torch.int64)
        for rank in ranks[1:] if ranks[:1] == [0] else ranks:
            for trip in range(ROUND_TRIPS if self.world.rank in (0, rank) else 0):
                if self.world.first:
                    dist.recv(now, rank, group=self.group)
                    dist.send(now.fill_(time.time_ns()), rank, group=self.group)
                    continue
                asked = time.time_ns()
                dist.send(now, 0, group=self.group)
                dist.recv(now, 0, group=self.group)
                answered = time.time_ns()
                offset, error = int(now.item()) - (asked + answered) // 2, (answered - asked) // 2
                best = min(best, (offset, error), key=lambda one: one[1]) if trip else (offset, error)
        return best

    def _keep(self, step: int, recorder: profile) -> dict[str, Any]:
        """Write this rank's spans; its seconds by part."""
        recorder.stop()
        with tempfile.TemporaryDirectory() as folder:
            recorder.export_chrome_trace(f"{folder}/trace.json")
            trace = json.loads(Path(folder, "trace.json").read_bytes())
        base = trace["baseTimeNanoseconds"]
        named = {one["pg_name"]: one["pg_desc"] for one in trace.get("distributedInfo", {}).get("pg_config", ())}
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        called = _gloo_calls() if any(event["name"].startswith("gloo:") for event in events) else []
        for event in events:
            if event["name"].startswith("gloo:"):
                at = base + round(1000 * event["ts"])
                event |= {"cat": "communication", "args": {_GROUP: _group_of(event["name"], at, called)}}
        for what, group, start, end in MpiWork.recorded or ():
            more = {_GROUP: f"mesh_{PIPELINE}" if "tag" in what else named.get(group, group)}
            times = {"ts": (start - base) / 1000, "dur": (end - start) / 1000}
            events.append({"ph": "X", "name": f"mpi:{what}", "cat": "communication", "args": more, **times})
        begin, wide, spans = read(events)
        found, place = parts(spans, wide), self.layout.coordinates(self.world.rank)
        kept = sorted(spans, key=lambda span: span.start - span.end)[:MOST_SPANS]
        offset, error = self._clock
        told = {
            "rank": self.world.rank, "host": os.uname().nodename, "place": place._asdict(), "step_us": wide,
            "begin_ns": base + round(1000 * begin) + offset, "clock_error_ns": error, "spans": kept,
        }  # fmt: skip
        path = self._folder(step) / f"rank-{self.world.rank}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(told).encode(), 1))
        return found


_GROUP = "Process Group Description"
"""Kineto's name for it in the trace of an NCCL kernel."""


def _gloo_calls() -> list[tuple[int, str, str]]:
    """When (ns since 1970) which operation was called in which group, by torch's flight recorder; oldest first."""
    with suppress(ImportError, AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
        from torch._C import _distributed_c10d as c10d

        entries = json.loads(c10d._dump_fr_trace_json(True, False))["entries"]  # type: ignore[attr-defined]
        return sorted((e["time_created_ns"], e["profiling_name"], e["process_group"][1]) for e in entries)
    return []


def _group_of(name: str, at: int, called: list[tuple[int, str, str]]) -> str:
    """The group of what began at `at` under this name: of the last call before it. Messages are a pipeline's."""
    if name in ("gloo:send", "gloo:recv"):
        return f"mesh_{PIPELINE}"
    before = called[: bisect_right(called, at, key=lambda call: call[0])]
    return next((group for _, called_name, group in reversed(before) if called_name == name), "collectives")


def _mean(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each figure over the ranks that have it, also of those inside."""
    names = dict.fromkeys(name for one in found for name in one)
    values = {name: [one[name] for one in found if name in one] for name in names}
    return {n: _mean(v) if isinstance(v[0], dict) else round(fmean(v), 6) for n, v in values.items()}
