"""Watchdog: a thread that ends this rank if the main thread hangs.

A stage announces each phase (`enter_phase`), for example `forward` of step 5. If a phase takes too long, the watchdog
writes the phase and the stacks of all threads to `jobs/STAGE/hang-rank-N.json`, and exits with HANG. If one rank hangs,
the other ranks wait for this rank in a collective, so their watchdogs do the same. The supervisor then finds the rank
that caused the hang: it wrote no report, or is in an earlier phase than the others (slurm/supervise/attempt_end.py).

Start-up and saves have their own time limits (`recovery.start_s`, `recovery.save_s`). pipeline/resilience/step_limit.py
has the limit of any other phase. If Slurm suspends the process, the time of the suspension does not count.
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
from pipeline.resilience.step_limit import StepLimit
from pipeline.run.directory import Run
from pipeline.run.failure import write_error_report
from pipeline.train.callback import Callback, TrainerContext

SUSPENSION_S = 1.0
"""If the thread wakes up more than this time late, its process was suspended (`scontrol suspend`)."""
EXIT_DELAY_S = 3.0
"""Time between the report and the exit, in addition to the longest recent step.

The rank that hangs entered its phase before the waiting ranks entered theirs, so the hanging rank exceeds its limit
first. The delay gives the waiting ranks time to write their reports before the job ends.
"""
_FLIGHT_RECORDER_KEYS = {
    "operation": "profiling_name", "number": "collective_seq_id", "sizes": "input_sizes", "state": "state",
    "time_ns": "time_created_ns",
}  # fmt: skip
"""Keys of a collective in the hang reports, and the corresponding keys of torch's flight recorder."""
REPORT_TIMEOUT_S = 30.0
"""Time limit for writing the report, because the file system may hang as well."""


class Watchdog(Callback):
    """Watches the phases of this rank. A call of `enter_phase` takes a few hundred nanoseconds.

    Args:
        run: the run.
        stage: the stage.
        rank_info: identifies this rank.
        flag: polled by the thread, because a signal handler does not run while the main thread hangs.
    """

    def __init__(self, run: Run, stage: str, rank_info: RankInfo, flag: StopFlag) -> None:
        self.run = run
        self.stage = stage
        self.rank_info = rank_info
        self.flag = flag
        self.limits = run.config.recovery
        self.report_file = run.stage_dir(stage) / f"hang-rank-{rank_info.rank}.json"
        self._step_limit = StepLimit(self.limits.hang_s)
        # The step, the number of the phase within the step, the name of the phase, and its start time. Two threads use
        # these values, so the values are in one tuple, which is always replaced and read as a unit.
        self._phase = (0, 0, "start", time.monotonic())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sluice-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread. The first phase is `start`."""
        self.report_file.unlink(missing_ok=True)
        self._thread.start()

    def enter_phase(self, step: int, phase: str) -> None:
        """Record that this rank begins `phase` of `step`."""
        previous_step, previous_number, _, _ = self._phase
        phase_number = previous_number + 1 if step == previous_step else 0
        self._phase = (step, phase_number, phase, time.monotonic())

    def on_phase(self, trainer: TrainerContext, step: int, phase: str) -> None:
        """Record that this rank begins `phase` of `step`."""
        self.enter_phase(step, phase)

    def record_step(self, seconds: float) -> None:
        """Adapt the limit of phases to the duration of a step."""
        self._step_limit.record_step(seconds)

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Adapt the limit of phases to the duration of the step."""
        self.record_step(trainer.step_s)

    def close(self) -> None:
        """Stop the thread, if it is running."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def limit_s(self, phase: str) -> float:
        """Return how many seconds a phase may take."""
        if phase == "start":
            return self.limits.start_s
        if phase == "save":
            return self.limits.save_s
        return self._step_limit.get_s()

    def _watch(self) -> None:
        """Check the current phase about once per second. If it exceeds its limit, write reports and exit."""
        suspended_s = 0.0  # Time for which the process was suspended during the current phase.
        last_check = time.monotonic()
        last_phase = self._phase
        # A limit below 4 s is checked more often than once per second. `limit_s("step")` is the limit of every phase
        # except `start` and `save`.
        while not self._closed.wait(interval_s := min(1.0, self.limit_s("step") / 4)):
            self.flag.poll()
            now = time.monotonic()
            if last_phase is not self._phase:
                suspended_s = 0.0
            # If the thread woke up later than planned, beyond a tolerance, the process was suspended.
            suspended_s += max(0.0, now - last_check - interval_s - SUSPENSION_S)
            last_check = now
            last_phase = self._phase
            step, phase_number, phase, start_time = last_phase
            seconds = now - start_time - suspended_s
            if seconds > self.limit_s(phase):
                arguments = (step, phase_number, phase, seconds)
                report_thread = threading.Thread(target=self._report, args=arguments, daemon=True)
                report_thread.start()
                report_thread.join(REPORT_TIMEOUT_S)  # If the file system hangs as well, exit without a report.
                time.sleep(EXIT_DELAY_S + self._step_limit.longest_step_s)
                os._exit(ExitCode.HANG)

    def _report(self, step: int, phase_number: int, phase: str, seconds: float) -> None:
        """Write the hang report (`hang-rank-N.json`), and an error report about the hang (`error-rank-N.json`).

        Args:
            step: the step in which the rank hangs.
            phase_number: the number of the phase within the step, counted from 0.
            phase: the name of the phase.
            seconds: the duration of the phase so far.
        """
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file.fileno(), all_threads=True)
            file.seek(0)
            stacks = file.read().decode(errors="replace")
        rank = self.rank_info.rank
        facts = {"rank": rank, "host": os.uname().nodename, "step": step, "number": phase_number, "phase": phase}
        facts |= {"seconds": round(seconds, 1), "limit_s": self.limit_s(phase), "stacks": stacks}
        write_json(self.report_file, {**facts, "collectives": list_recent_collectives()})
        message = f"rank {rank} was in phase '{phase}' of step {step} for {seconds:.0f} s:\n{stacks}"
        print(message, file=sys.stderr, flush=True)
        write_error_report(self.run, self.stage, self.rank_info, ExitCode.HANG, message)


def list_recent_collectives(count: int = 3) -> list[dict[str, Any]]:
    """Return the last `count` collectives that this rank entered, oldest first.

    torch's flight recorder (torch documentation, "Flight Recorder for Debugging Stuck Jobs") and Sluice's MPI groups
    record the collectives.

    Returns:
        For each collective, the keys of `_FLIGHT_RECORDER_KEYS`, and `group`. `state` is `scheduled`, `started` or
        `completed`; for Gloo, it is always `scheduled`.
    """
    collectives = [asdict(record) for record in RECENT_COLLECTIVES.copy()]
    # The installed torch may have no flight recorder, or one with another format.
    with suppress(ImportError, AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
        from torch._C import _distributed_c10d as c10d

        # torch 2.13 renamed the function.
        name = "_dump_fr_trace_json" if hasattr(c10d, "_dump_fr_trace_json") else "_dump_nccl_trace_json"
        # The arguments are includeCollectives and onlyActive.
        for entry in json.loads(getattr(c10d, name)(True, False))["entries"][-count:]:
            facts = {key: entry[torch_key] for key, torch_key in _FLIGHT_RECORDER_KEYS.items()}
            # `process_group` has the name and the description of the group.
            collectives.append({**facts, "group": entry["process_group"][-1]})
    return sorted(collectives, key=lambda entry: entry["time_ns"])[-count:]
