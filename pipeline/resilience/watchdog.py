"""Noticing that a rank is stuck, which its main thread cannot: a thread looks at what the rank does, and how long.

A stage says what it does (`enter`): training in each step, evaluation in each batch. A phase that outlasts its limit
ends the process: the stacks of all its threads and the phase go to `jobs/STAGE/hang-rank-N.json`, and the rank leaves
with HANG. The ranks notice at about the same moment, since in a collective one that is stuck stops all. Who caused it
is the one that is *behind*: the least (step, phase); a rank that cannot even write its file (stopped, its node gone) is
found by its absence (slurm/supervise/failures.py).

Limits: start-up and saves have their own, so that slow storage never looks like a hang; a phase of a step may take 20
times the longest of the last steps, at least five minutes (`recovery.hang_s` sets it by hand), and always less than a
collective may take before it fails by itself. Time in which the whole process stood (Slurm suspended the job) is not
counted.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import write_json
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run
from pipeline.run.failure import report_error

LEAST_S, TIMES, MOST_S = 300.0, 20.0, 6000.0
LATE_S = 1.0
"""A thread that wakes later than so was stopped with its process (`scontrol suspend`): that time counts for nothing."""
OTHERS_S = 3.0
"""How long, beyond the longest step, a rank that noticed waits before it leaves: the others then write their files, too
(one that is stuck early in a step has been in its phase for longer than those that wait for it)."""
_RECORDED = {
    "operation": "profiling_name", "number": "collective_seq_id", "sizes": "input_sizes", "state": "state",
    "time_ns": "time_created_ns",
}  # fmt: skip
"""What we say of a collective, and what torch's flight recorder calls it."""
REPORT_S = 30.0
"""How long the report may take: the file system may be what hangs."""


class Watchdog:
    """One rank's. `enter` costs a few hundred nanoseconds."""

    def __init__(self, run: Run, stage: str, place: RankInfo, flag: StopFlag) -> None:
        self.run, self.stage, self.place, self.flag = run, stage, place, flag
        self.limits = run.config.recovery
        self.file = run.stage_dir(stage) / f"hang-rank-{place.rank}.json"
        self._longest_s, self._steps = 0.0, 0
        self._now = (0, 0, "start", time.monotonic())  # step, phase's number in it, name, since: replaced as a whole
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sluice-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch; the phase is start-up."""
        self.file.unlink(missing_ok=True)
        self._thread.start()

    def enter(self, step: int, phase: str) -> None:
        """This rank begins `phase` of `step`."""
        last, number, _, _ = self._now
        self._now = (step, number + 1 if step == last else 0, phase, time.monotonic())

    def stepped(self, seconds: float) -> None:
        """A step took so long; the limit follows the longest of the last ones, but for the first, which compiles."""
        self._longest_s = seconds if self._steps < 2 else max(seconds, 0.95 * self._longest_s)
        self._steps += 1

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def limit_s(self, phase: str) -> float:
        """How long a phase may take."""
        if phase == "start":
            return self.limits.start_s
        if phase == "save":
            return self.limits.save_s
        return self.limits.hang_s or min(MOST_S, max(LEAST_S, TIMES * self._longest_s))

    def _watch(self) -> None:
        stood, looked, seen = 0.0, time.monotonic(), self._now
        while not self._closed.wait(every := min(1.0, self.limit_s("step") / 4)):
            self.flag.poll()
            now, last = time.monotonic(), looked
            stood = (stood if seen is self._now else 0.0) + max(0.0, now - last - every - LATE_S)
            looked, seen = now, self._now
            step, number, phase, since = seen
            seconds = now - since - stood
            if seconds > self.limit_s(phase):
                report = threading.Thread(target=self._report, args=(step, number, phase, seconds), daemon=True)
                report.start()
                report.join(REPORT_S)
                time.sleep(OTHERS_S + self._longest_s)
                os._exit(ExitCode.HANG)

    def _report(self, step: int, number: int, phase: str, seconds: float) -> None:
        with tempfile.TemporaryFile() as stacks:
            faulthandler.dump_traceback(stacks.fileno(), all_threads=True)
            stacks.seek(0)
            text = stacks.read().decode(errors="replace")
        facts = {"rank": self.place.rank, "host": os.uname().nodename, "step": step, "number": number, "phase": phase}
        facts |= {"seconds": round(seconds, 1), "limit_s": self.limit_s(phase), "stacks": text}
        write_json(self.file, {**facts, "collectives": list_recent_collectives()})
        message = f"rank {self.place.rank} was in phase '{phase}' of step {step} for {seconds:.0f} s:\n{text}"
        print(message, file=sys.stderr, flush=True)
        report_error(self.run, self.stage, self.place, ExitCode.HANG, message)


def list_recent_collectives(count: int = 3) -> list[dict[str, Any]]:
    """The last collectives that this rank entered, oldest first: of torch's flight recorder, and of our MPI groups.

    `state` is `scheduled`, `started` or `completed` (Gloo, too, is recorded, but only as `scheduled`). Source: torch
    documentation, "Flight Recorder for Debugging Stuck Jobs".
    """
    engine = sys.modules.get("pipeline.mpi.worker_thread")
    found: list[dict[str, Any]] = engine.last_collectives() if engine is not None else []
    # where there is no recorder
    with suppress(ImportError, AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
        from torch._C import _distributed_c10d as c10d

        # torch 2.13 gave it a name without NCCL
        name = "_dump_fr_trace_json" if hasattr(c10d, "_dump_fr_trace_json") else "_dump_nccl_trace_json"
        for entry in json.loads(getattr(c10d, name)(True, False))["entries"][-count:]:
            known = {ours: entry[theirs] for ours, theirs in _RECORDED.items()}
            found.append({**known, "group": entry["process_group"][-1]})
    return sorted(found, key=lambda entry: entry["time_ns"])[-count:]
