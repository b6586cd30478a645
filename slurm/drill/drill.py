"""Train a copy of a run while faults happen, and an undisturbed copy, and compare both.

The copies use the code, the data and the config of the run, except for the keys in :func:`make_overrides`. The first
copy is stopped when all faults have happened, at some step S. The second copy trains without faults until it has saved
step S. The digests of both checkpoints must be equal.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from pipeline.base.command import format_command
from pipeline.base.errors import UserError
from pipeline.base.files import read_last_object
from pipeline.checkpoint.catalog import find_newest_step, list_checkpoint_steps
from pipeline.config.read import dump_config, load_config
from pipeline.run import stages
from pipeline.run.code import make_code_env
from pipeline.run.directory import Run
from pipeline.run.events import (
    Damaged,
    EndEvent,
    Event,
    Failed,
    Ready,
    Resumed,
    RetryEvent,
    Saved,
    Started,
    Stopping,
    StopRequested,
)
from pipeline.run.lines import read_valid_lines
from pipeline.run.metrics import is_step_line
from slurm.drill.faults import FAULTS, DrillFault
from slurm.drill.target import RunTarget
from slurm.query.run_jobs import find_run_jobs
from slurm.query.slurm_commands import NOT_RESPONDING, parse_slurm_time
from slurm.submit.chain import Chain, cancel_run, reset_for_resume

QUEUE_TIMEOUT_S = 7 * 86400.0
"""How long the drill waits for anything that may have to wait in the queue."""
JOB_QUERY_INTERVAL_S = 30.0
"""The pause between two queries whether the job of a copy still exists."""
STOP_TIMEOUT_S = 3600.0
"""How long the drill waits until the train stage has stopped."""


@dataclass
class FaultResult:
    """What happened after one fault."""

    name: str
    expected_cause: str
    recorded_cause: str | None = None
    """The cause that the run recorded; None if it recorded no stop."""
    continuation: str = ""
    """The event with which the run continued: `retried` (in the same job), `requeued`, `handed_over` or `resumed`."""
    seconds: float | None = None
    """From the fault to the end of the next step; None if there was none."""
    queue_s: float = 0.0
    """The part of `seconds` between the end of the attempt and the start of the next one."""
    repeated_steps: int = 0
    """The number of complete steps that were repeated."""
    notes: list[str] = field(default_factory=list)

    @property
    def is_as_expected(self) -> bool:
        """True if the cause was recorded correctly and the run continued."""
        return self.recorded_cause == self.expected_cause and self.seconds is not None


@dataclass
class DrillResult:
    """The result of a drill."""

    run: Run
    """The copy in which the faults happened."""
    reference: Run
    """The undisturbed copy."""
    on_slurm: bool
    faults: list[FaultResult]
    skipped: dict[str, str]
    """Faults that were not caused, and why."""
    step: int = 0
    """The step whose checkpoints were compared."""
    digest: str = ""
    reference_digest: str = ""
    longest_save_s: float = 0.0
    longest_step_s: float = 0.0

    @property
    def is_equal(self) -> bool:
        """True if both copies have the same state."""
        return bool(self.digest) and self.digest == self.reference_digest

    @property
    def has_passed(self) -> bool:
        """True if both copies are equal, and every fault was handled as expected."""
        return self.is_equal and bool(self.faults) and all(fault.is_as_expected for fault in self.faults)


def make_overrides(run: Run, every_steps: int, hang_s: float) -> list[str]:
    """Return the config keys that the copies change.

    Args:
        run: the run.
        every_steps: number of steps between two checkpoints.
        hang_s: after how many seconds without progress a rank counts as hanging.
    """
    train = run.config.stages.train
    budgets = ("preempted", "time_limit", "node_failure", "crash", "out_of_memory", "hang", "bad_node")
    return [
        f"checkpoint.every_steps={every_steps}",
        "checkpoint.keep=3",
        "train.log_every=1",
        f"recovery.hang_s={hang_s:g}",
        "recovery.max_restarts_without_progress=20",
        "track={}",
        "evaluate.every=end",
        # With another number of nodes after a requeue, the result would not be equal to the bit.
        f"stages.train.nodes={{min: {train.max_nodes}, max: {train.max_nodes}, spares: {train.spare_nodes}}}",
        *(f"recovery.budgets.{name}=1000" for name in budgets),
    ]


def copy_run(run: Run, name: str, overrides: Sequence[str]) -> Run:
    """Return a new run with the code, the data and the config of a run.

    Args:
        run: the run.
        name: the name of the copy.
        overrides: changes of the config, as `KEY=VALUE`.

    Raises:
        UserError: if the copy exists already, or cannot be created.
    """
    root = run.path.parent
    if not (run.code_dir / "slurm/drill").is_dir():
        update = format_command("resume", str(run.path), "--update-code")
        raise UserError("drill.old_code", f"{run.path} has code without `drill`. To update its code: {update}")
    if (root / name).exists():
        raise UserError("drill.exists", f"{root / name} exists already: remove it, or choose another --name")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(dump_config(run.config))
        copy = Run.create(load_config(path, [*overrides, f"run.name={name}", f"run.root={root}"]))
    copy.data_dir.rmdir()
    copy.data_dir.symlink_to(run.data_dir.resolve())
    shutil.rmtree(copy.code_dir.resolve())
    shutil.copytree(run.code_dir.resolve(), copy.code_dir.resolve(), symlinks=True)
    return copy


class Drill:
    """Causes faults in a copy of a run.

    Args:
        run: the run, whose data is prepared. It is not changed.
        name: the name of the copy. The undisturbed copy has the suffix `-reference`.
        names: the faults to cause, in this order (`FAULTS`).
        overrides: changes of the config of both copies.
        console: for messages about the progress.
        on_slurm: whether the copies train in Slurm jobs. Otherwise they train on this machine.
        seed: seed of all random choices.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        names: Sequence[str],
        overrides: Sequence[str],
        console: Console,
        *,
        on_slurm: bool,
        seed: int,
    ) -> None:
        self._console = console
        self._on_slurm = on_slurm
        self._names = names
        self._processes: list[subprocess.Popen[bytes]] = []
        """The supervisors that this process has started on this machine."""
        self._overrides = overrides
        self._source = run
        self._reference_name = f"{name}-reference"
        if (reference_path := run.path.parent / self._reference_name).exists():
            raise UserError("drill.exists", f"{reference_path} exists already: remove it, or choose another --name")
        self._next_job_query = 0.0
        self.target = RunTarget(copy_run(run, name, overrides), on_slurm=on_slurm, seed=seed)

    # ---- the stages of the drill

    def run(self) -> DrillResult:
        """Cause the faults, train the undisturbed copy, and return the result."""
        run = self.target.run
        skipped = {name: reason for name in self._names if (reason := self._explain_skip(FAULTS[name]))}
        results: list[FaultResult] = []
        try:
            self._start(run)
            for name in self._names:
                if name in skipped:
                    continue
                if not self._wait_for_save():
                    skipped[name] = "the training ended before this fault: increase train.steps"
                    continue
                self._say(f"{name}: {FAULTS[name].cause.__doc__ or ''}".rstrip("."))
                results.append(self._cause_fault(name))
                if results[-1].seconds is None:
                    break
            step = self._stop_at_checkpoint()
            self._say(f"the undisturbed copy trains to step {step}")
            reference = copy_run(
                self._source,
                self._reference_name,
                [*self._overrides, f"checkpoint.every_steps={step}", "checkpoint.memory_every_steps=null"],
            )
            if run.decisions_file.exists():
                shutil.copy(run.decisions_file, reference.decisions_file)
            self._train_until(reference, step)
        except BaseException:  # Also after Ctrl-C, the Slurm jobs of the copies must not continue. It is raised again.
            self._cancel_copies()
            raise
        finally:
            self._end_processes()
        result = DrillResult(run, reference, self._on_slurm, results, skipped, step)
        result.digest, result.reference_digest = _compute_digests((run, reference), step)
        result.longest_save_s = max((event.seconds or 0.0 for event in self.target.read_events(Saved)), default=0.0)
        result.longest_step_s = max(
            (line["step_time_s"] for line in read_valid_lines(run.metrics_file, is_step_line)), default=0.0
        )
        return result

    def _explain_skip(self, fault: DrillFault) -> str:
        """Return why a fault cannot be caused; "" if it can."""
        config = self.target.run.config
        if fault.needs_slurm and not self._on_slurm:
            return "it needs a Slurm job"
        if fault.needs_agents and not stages.uses_agents(config, "train"):
            return "it needs node agents (recovery.in_place, and a parallel.backend other than mpi)"
        if fault.cause.__name__ == "requeue_the_job" and not config.site.requeue:
            return "site.requeue is false"
        return ""

    def _cause_fault(self, name: str) -> FaultResult:
        """Cause a fault, wait for the next step, and return what happened."""
        target = self.target
        fault = FAULTS[name]
        event_count = len(target.read_events(Event))
        step_before = _read_last_step(target.run)
        start = time.time()
        result = FaultResult(name, "")
        try:
            result.expected_cause = fault.cause(target)
        except (UserError, IndexError) as error:
            result.notes.append(f"it could not be caused: {error}")
            return result
        limit_time = self._read_time_limit() if result.expected_cause == "time_limit" else None

        def list_new_events() -> list[Event]:
            return target.read_events(Event)[event_count:]

        def has_stopped() -> bool:
            return any(isinstance(event, RetryEvent) or _is_final(event) for event in list_new_events())

        target.wait_until(
            f"the train stage stops after {name}", lambda: has_stopped() or self._is_over(), QUEUE_TIMEOUT_S
        )
        if not has_stopped():
            result.notes.append("the job ended, and recorded no end")
            return result
        stop = next(event for event in list_new_events() if isinstance(event, RetryEvent) or _is_final(event))
        assert isinstance(stop, RetryEvent | EndEvent)
        result.recorded_cause = stop.cause
        result.continuation = stop.name
        if fault.needs_resume and isinstance(stop, Failed):
            self._wait_until_ended()
            self._start(target.run)
            result.continuation = "resumed"
        elif not isinstance(stop, RetryEvent):
            result.notes.append(f"the run did not continue: {getattr(stop, 'message', None) or stop.name}")
            return result

        def find_start() -> Ready | None:
            starts = [event for event in list_new_events() if isinstance(event, Ready)]
            return starts[-1] if starts and starts[-1].timestamp > stop.timestamp else None

        def has_new_step() -> bool:
            ready = find_start()
            return ready is not None and _read_last_step(target.run) > ready.step

        target.wait_until(f"the next step after {name}", lambda: has_new_step() or self._is_over(), QUEUE_TIMEOUT_S)
        if not has_new_step():
            result.notes.append("no further step followed")
            return result
        result.seconds = time.time() - start
        ready = find_start()
        assert ready is not None
        result.repeated_steps = max(0, step_before - ready.step)
        next_starts = [event for event in list_new_events() if isinstance(event, Started)]
        result.queue_s = max(0.0, next_starts[-1].timestamp - stop.timestamp) if next_starts and self._on_slurm else 0.0
        result.notes += self._describe_events(start, limit_time, list_new_events())
        self._say(f"  {result.recorded_cause}, {result.continuation}, next step after {result.seconds:.1f} s")
        return result

    def _read_time_limit(self) -> float | None:
        """Return when the job reaches its time limit, in seconds since 1970; None if Slurm does not tell."""
        end_time = re.search(
            r"EndTime=(\S+)", self.target.run_slurm_command("scontrol", "show", "job", self.target.job_id)
        )
        return parse_slurm_time(end_time[1]) or None if end_time else None

    def _describe_events(self, start: float, limit_time: float | None, events: Sequence[Event]) -> list[str]:
        """Return what the events after a fault show about signals, saves and damaged checkpoints.

        Args:
            start: when the fault was caused, in seconds since 1970.
            limit_time: when the job reaches its time limit, in seconds since 1970; None if this does not matter.
            events: the events of the train stage after the fault.
        """
        notes = []
        for event in events:
            if isinstance(event, StopRequested) and limit_time is not None:
                notes.append(f"{event.signal} reached the ranks {limit_time - event.timestamp:.0f} s before the limit")
            elif isinstance(event, StopRequested):
                notes.append(f"{event.signal} reached the ranks within {max(0.0, event.timestamp - start):.1f} s")
            elif isinstance(event, Stopping):
                notes.append(f"{event.by} reached the supervisor within {max(0.0, event.timestamp - start):.1f} s")
            elif isinstance(event, Damaged):
                notes.append(f"the damaged checkpoint of step {event.step} was not used")
            elif isinstance(event, EndEvent) and event.noticed_later:
                notes.append("Slurm ended the job before it could record its end")
            elif isinstance(event, EndEvent) and (
                requests := [each.timestamp for each in events if isinstance(each, StopRequested)]
            ):
                notes.append(f"all ranks had saved and exited {event.timestamp - requests[0]:.1f} s later")
        return notes

    # ---- start, wait, stop

    def _say(self, message: str) -> None:
        """Print a message about the progress of the drill."""
        self._console.print(message, soft_wrap=True, highlight=False)

    def _start(self, run: Run) -> None:
        """Start or resume the train stage of a run."""
        reset_for_resume(run, replaces_jobs=False)
        if self._on_slurm:
            with run.lock_exclusively():
                chain = Chain(run, self._console, resubmit_failed=True)
                chain.inspect_jobs()
                chain.submit("train")
            return
        with open(run.stage_dir("train") / "supervisor.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "slurm", "train", str(run.path)],
                cwd=run.code_dir,
                env=make_code_env(os.environ, run.code_dir),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)

    def _wait_for_save(self) -> bool:
        """Wait until the running attempt has saved a checkpoint. Return False if the stage has ended."""
        target = self.target

        def has_saved() -> bool:
            events = target.read_events(Event)
            starts = [index for index, event in enumerate(events) if isinstance(event, Started)]
            attempt_events = events[starts[-1] :] if starts else []
            if any(_is_final(event) for event in attempt_events):
                return True
            is_running = not any(isinstance(event, EndEvent) for event in attempt_events)
            needs_pids = stages.uses_agents(target.run.config, "train")
            has_pids = bool(target.list_ranks()) or not needs_pids
            return is_running and has_pids and any(isinstance(event, Saved) for event in attempt_events)

        target.wait_until(
            "the train stage has saved a checkpoint", lambda: has_saved() or self._is_over(), QUEUE_TIMEOUT_S
        )
        remaining_steps = (target.run.config.train.steps or math.inf) - _read_last_step(target.run)
        has_steps_left = remaining_steps > 2 * target.run.config.checkpoint.every_steps
        return has_saved() and not self._is_over() and has_steps_left

    def _stop_at_checkpoint(self) -> int:
        """Stop the faulty copy after a checkpoint, and return the newest step with a checkpoint."""
        self._wait_for_save()
        run = self.target.run
        run.write_request(run.stop_file)
        self._wait_until_ended()
        step = find_newest_step(run.checkpoints_dir)
        if not step:
            raise UserError("drill.no_checkpoint", f"{run.path} has no checkpoint: see its logs")
        return step

    def _train_until(self, run: Run, step: int) -> None:
        """Train the undisturbed copy until it has a checkpoint of a step."""
        reference = RunTarget(run, on_slurm=self._on_slurm, seed=0)
        self._start(run)

        def has_step() -> bool:
            return step in list_checkpoint_steps(run.checkpoints_dir) or self._is_over(run)

        reference.wait_until(f"the undisturbed copy has saved step {step}", has_step, QUEUE_TIMEOUT_S)
        if step not in list_checkpoint_steps(run.checkpoints_dir):
            raise UserError("drill.reference_failed", f"the undisturbed copy {run.path} failed: see its logs")
        run.write_request(run.stop_file)
        self._wait_until_ended(run)

    def _is_over(self, run: Run | None = None) -> bool:
        """Return True if the train stage of a copy has ended and will not continue by itself."""
        run = run or self.target.run
        events = [event for event in run.read_events() if event.stage == "train" or isinstance(event, Resumed)]
        if events and _is_final(events[-1]):
            return True
        if not self._on_slurm:
            return all(process.poll() is not None for process in self._processes)
        if time.monotonic() < self._next_job_query:
            return False
        self._next_job_query = time.monotonic() + JOB_QUERY_INTERVAL_S
        jobs = [job for job in find_run_jobs([run]) if job.stage == "train"]
        states = [job.reported_job for job in jobs]
        is_known = bool(states) and not any(state.reason == NOT_RESPONDING for state in states)
        return is_known and not any(state.is_active for state in states) and run.lock_holder("train") is None

    def _cancel_copies(self) -> None:
        """Cancel the copies and their jobs."""
        for name in (self.target.run.path.name, self._reference_name):
            path = self._source.path.parent / name
            if path.exists():
                with suppress(UserError):
                    for message in cancel_run(Run.open(path)):
                        self._say(message)

    def _wait_until_ended(self, run: Run | None = None) -> None:
        """Wait until the train stage of a run has ended, and its lock is free."""
        run = run or self.target.run
        self.target.wait_until("the train stage ends", lambda: run.lock_holder("train") is None, STOP_TIMEOUT_S)
        for process in self._processes:
            process.wait(STOP_TIMEOUT_S)

    def _end_processes(self) -> None:
        """Ask the supervisors on this machine to stop, and wait for them. After an error, they would run on."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            process.wait(STOP_TIMEOUT_S)


def _is_final(event: Event) -> bool:
    """Return True if an event ends the train stage without a retry."""
    return isinstance(event, EndEvent) and (event.name in ("done", "cancelled") or bool(event.final))


def _read_last_step(run: Run) -> int:
    """Return the last step in metrics.jsonl; 0 if there is none."""
    line = read_last_object(run.metrics_file, is_step_line)
    return int(line["step"]) if line else 0


def _compute_digests(runs: Sequence[Run], step: int) -> list[str]:
    """Return the digest of the checkpoint of a step of each run."""
    from pipeline.checkpoint.catalog import checkpoint_name
    from pipeline.checkpoint.checkpointer import compute_digest

    compute: Callable[[Path], str] = compute_digest
    return [compute(run.checkpoints_dir / checkpoint_name(step)) for run in runs]
