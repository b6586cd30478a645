"""Watchdog: end a rank that hangs, from a thread, because the main thread cannot notice it.

A stage announces each phase (`enter_phase`): training in each step, evaluation in each batch. If a phase exceeds its
limit, the watchdog writes the phase and the stacks of all threads to `jobs/STAGE/hang-rank-N.json` and exits with HANG.
All ranks notice at about the same time, because one stuck rank blocks the others in a collective. The rank at fault is
the one that is behind: the smallest (step, phase). A rank that cannot write its file (stopped, its node lost) is
recognized by the missing file (slurm/supervise/attempt_end.py).

Limits: start-up and saves have their own, so that slow storage never looks like a hang. A phase of a step may take 20
times the longest of the latest steps, at least five minutes (`recovery.hang_s` overrides this), and always less than
the time-out of a collective. Time in which the whole process was suspended by Slurm is not counted.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import write_json
from pipeline.base.signals import StopFlag
from pipeline.mpi.work import RECENT_COLLECTIVES
from pipeline.run.directory import Run
from pipeline.run.failure import write_error_report
from pipeline.train.callback import Callback, TrainerContext

MIN_LIMIT_S = 300.0
MAX_LIMIT_S = 6000.0
LIMIT_PER_STEP_S = 20.0
"""Limit of a phase, as a multiple of the longest step."""
SUSPENSION_S = 1.0
"""If the thread wakes later than this, its process was suspended (`scontrol suspend`)."""
EXIT_DELAY_S = 3.0
"""Time between report and exit, in addition to the longest step.

It lets the other ranks write their reports: a rank that is stuck early in a step entered its phase before those that
wait for it.
"""
_FLIGHT_RECORDER_KEYS = {
    "operation": "profiling_name", "number": "collective_seq_id", "sizes": "input_sizes", "state": "state",
    "time_ns": "time_created_ns",
}  # fmt: skip
"""Our name of each fact about a collective, and that of torch's flight recorder."""
REPORT_TIMEOUT_S = 30.0
"""Limit for writing the report: the file system may be what hangs."""


class Watchdog(Callback):
    """Watches the phases of one rank. `enter_phase` costs a few hundred nanoseconds."""

    def __init__(self, run: Run, stage: str, rank_info: RankInfo, flag: StopFlag) -> None:
        self.run = run
        self.stage = stage
        self.rank_info = rank_info
        self.flag = flag
        self.limits = run.config.recovery
        self.file = run.stage_dir(stage) / f"hang-rank-{rank_info.rank}.json"
        self._longest_step_s = 0.0
        self._step_count = 0
        # step, number of the phase in it, its name, start time; replaced as a whole, since two threads use it
        self._phase = (0, 0, "start", time.monotonic())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sluice-watchdog", daemon=True)

    def start(self) -> None:
        """Start to watch, in the phase `start`."""
        self.file.unlink(missing_ok=True)
        self._thread.start()

    def enter_phase(self, step: int, phase: str) -> None:
        """Note that this rank begins `phase` of `step`."""
        previous_step, number, _, _ = self._phase
        self._phase = (step, number + 1 if step == previous_step else 0, phase, time.monotonic())

    def on_phase(self, trainer: TrainerContext, step: int, phase: str) -> None:
        """Note the phase."""
        self.enter_phase(step, phase)

    def record_step(self, seconds: float) -> None:
        """Adapt the limit to the longest of the latest steps; the second one replaces the first, which compiles."""
        self._longest_step_s = seconds if self._step_count < 2 else max(seconds, 0.95 * self._longest_step_s)
        self._step_count += 1

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Adapt the limit to the step."""
        self.record_step(trainer.step_s)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def limit_s(self, phase: str) -> float:
        """Return the number of seconds that a phase may take."""
        if phase == "start":
            return self.limits.start_s
        if phase == "save":
            return self.limits.save_s
        return self.limits.hang_s or min(MAX_LIMIT_S, max(MIN_LIMIT_S, LIMIT_PER_STEP_S * self._longest_step_s))

    def _watch(self) -> None:
        suspended_s = 0.0
        last_check = time.monotonic()
        last_phase = self._phase
        while not self._closed.wait(interval_s := min(1.0, self.limit_s("step") / 4)):
            self.flag.poll()
            now = time.monotonic()
            if last_phase is not self._phase:
                suspended_s = 0.0
            suspended_s += max(0.0, now - last_check - interval_s - SUSPENSION_S)
            last_check = now
            last_phase = self._phase
            step, number, phase, start_time = last_phase
            seconds = now - start_time - suspended_s
            if seconds > self.limit_s(phase):
                report = threading.Thread(target=self._report, args=(step, number, phase, seconds), daemon=True)
                report.start()
                report.join(REPORT_TIMEOUT_S)
                time.sleep(EXIT_DELAY_S + self._longest_step_s)
                os._exit(ExitCode.HANG)

    def _report(self, step: int, number: int, phase: str, seconds: float) -> None:
        with tempfile.TemporaryFile() as stacks:
            faulthandler.dump_traceback(stacks.fileno(), all_threads=True)
            stacks.seek(0)
            text = stacks.read().decode(errors="replace")
        rank = self.rank_info.rank
        facts = {"rank": rank, "host": os.uname().nodename, "step": step, "number": number, "phase": phase}
        facts |= {"seconds": round(seconds, 1), "limit_s": self.limit_s(phase), "stacks": text}
        write_json(self.file, {**facts, "collectives": list_recent_collectives()})
        message = f"rank {rank} was in phase '{phase}' of step {step} for {seconds:.0f} s:\n{text}"
        print(message, file=sys.stderr, flush=True)
        write_error_report(self.run, self.stage, self.rank_info, ExitCode.HANG, message)


def list_recent_collectives(count: int = 3) -> list[dict[str, Any]]:
    """Return the last `count` collectives that this rank entered, oldest first.

    They come from torch's flight recorder and from MPI groups. `state` is `scheduled`, `started` or `completed`; those
    of Gloo are always `scheduled`. Source: torch documentation, "Flight Recorder for Debugging Stuck Jobs".
    """
    collectives = [asdict(record) for record in RECENT_COLLECTIVES.copy()]
    # torch may have no recorder
    with suppress(ImportError, AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
        from torch._C import _distributed_c10d as c10d

        # its name since torch 2.13
        name = "_dump_fr_trace_json" if hasattr(c10d, "_dump_fr_trace_json") else "_dump_nccl_trace_json"
        for entry in json.loads(getattr(c10d, name)(True, False))["entries"][-count:]:
            facts = {ours: entry[theirs] for ours, theirs in _FLIGHT_RECORDER_KEYS.items()}
            collectives.append({**facts, "group": entry["process_group"][-1]})
    return sorted(collectives, key=lambda entry: entry["time_ns"])[-count:]
