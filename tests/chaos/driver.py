"""Submit a run, cause a sequence of faults during its train stage, and check the outcome."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import find_newest_step
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from pipeline.run.events import END_EVENTS, RETRY_EVENTS
from tests.chaos.faults import QUICK_FAULTS, RESTARTED_IN_PLACE, SLOW_FAULTS, Fault, FaultContext, Layout
from tests.cluster import Cluster
from tests.support.events import read_event_lines
from tests.support.tiny import compute_run_digest, write_config

RETRY_NAMES = frozenset(event_class.NAME for event_class in RETRY_EVENTS)
END_NAMES = frozenset(event_class.NAME for event_class in END_EVENTS)
STEPS_PER_FAULT = 22
"""Steps per fault. They are enough for a checkpoint before the fault and for the steps that are repeated after it."""
STEP_DELAY_S = "0.15"
"""Seconds that are added to each step, so that a fault can happen within a step."""
OVERRIDES = (
    "stages.evaluate.tasks_per_node=1",
    "checkpoint.every_steps=4", "train.log_every=5", "recovery.hang_s=15", "evaluate.max_sequences=2",
    "recovery.budgets.crash=1000", "recovery.budgets.hang=1000", "recovery.max_restarts_without_progress=50",
)  # fmt: skip
WITH_SNAPSHOTS = "checkpoint.memory_every_steps=2"
OVERRIDES_BY_LAYOUT: Mapping[Layout, tuple[str, ...]] = {
    "four nodes": ("stages.train.nodes=4", "stages.train.tasks_per_node=1"),
    "spare nodes": ("stages.train.nodes={min: 2, max: 2, spares: 2}", "stages.train.tasks_per_node=2"),
}


@contextlib.contextmanager
def mount_small_disk() -> Iterator[Path]:
    """Mount a file system of 300 MB, which a fault may fill. Yield its path.

    Mount it before the cluster starts. Otherwise, the nodes do not see it.
    """
    folder = Path(tempfile.mkdtemp(prefix="sluice-chaos-", dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=300m,mode=755", "sluice-chaos", str(folder)]
    subprocess.run(mount, check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)
        folder.rmdir()


@dataclass
class FaultResult:
    """The result of one fault.

    Attributes:
        fault: name of the function that caused the fault.
        expected_cause: the cause that the run should record; None if the fault must not stop the stage.
        recorded_cause: the cause that the run recorded; None if the stage did not stop.
        continuation: name of the event after which the stage continued, such as `retried`; None if there was none.
        seconds: time from the start of the fault until the cause was recorded.
    """

    fault: str
    expected_cause: str | None
    recorded_cause: str | None
    continuation: str | None
    seconds: float


def run_submit(cluster: Cluster | None, folder: Path, *arguments: str) -> str:
    """Run submit.py with `inject/` in PYTHONPATH and return its output. Raise RuntimeError if it fails."""
    path = os.pathsep.join([str(Path(__file__).parent / "inject"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CHAOS": str(folder / "chaos")}
    environment |= cluster.environment() if cluster else {}
    command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    if result.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {result.stdout}{result.stderr}")
    return result.stdout


class ChaosRun:
    """A run in `folder`, and methods that cause faults during its train stage and check the outcome.

    Args:
        cluster: cluster that runs the jobs.
        folder: folder for the config, the run and the requests for faults. All nodes can read it.
        seed: seed of random choices.
        count: number of faults. It determines the number of steps of the run.
        layout: where the ranks run; None to choose the layout by the seed.
    """

    def __init__(self, cluster: Cluster, folder: Path, seed: int, count: int, layout: Layout | None = None) -> None:
        layout = layout or ("spare nodes" if seed % 2 == 0 else "four nodes")
        self.overrides = (*OVERRIDES, *OVERRIDES_BY_LAYOUT[layout])
        if seed % 4 in (1, 2):
            self.overrides += (WITH_SNAPSHOTS,)
        self.cluster = cluster
        self.folder = folder
        self.random = random.Random(seed)
        self.steps = STEPS_PER_FAULT * (count + 1)
        self.config = write_config(folder, "chaos", self.steps)
        (folder / "chaos").mkdir()
        (folder / "chaos/delay").write_text(STEP_DELAY_S)
        self.run = Run.create(load_config(self.config, self.overrides))
        self.context = FaultContext(cluster, self.run, folder / "chaos", self.random, layout)

    def run_faults(self, faults: Sequence[Fault]) -> list[FaultResult]:
        """Submit the run, cause the faults one after another, and wait until the train stage is done.

        Returns:
            The result of each fault.
        """
        context = self.context
        run_submit(self.cluster, self.folder, str(self.config), *self.overrides)
        results: list[FaultResult] = []
        for fault in faults:
            self._wait_for_progress()
            time.sleep(self.random.uniform(0, 1.0))
            self._wait_for_progress()  # The previous fault may have stopped the stage again.
            event_count = len(read_event_lines(self.run, "train"))
            start = time.monotonic()
            expected_cause = fault(context)
            cause = continuation = None
            if context.needs_resume:  # The cause is recorded only when the user resumes the run.
                context.wait_until("status prints a command", self._run_command_of_status)
                context.needs_resume = False
            if expected_cause is not None:
                find_stop = partial(self._find_recorded_stop, event_count)
                context.wait_until(f"the train stage stops after {fault.__name__}", find_stop)
                cause, continuation = find_stop() or (None, None)
            context.set_step_delay(float(STEP_DELAY_S))
            seconds = time.monotonic() - start
            results.append(FaultResult(fault.__name__, expected_cause, cause, continuation, seconds))
            print(f"    {fault.__name__}: {cause}, {continuation}, {seconds:.1f} s", flush=True)
        (self.folder / "chaos/delay").write_text("0.0")

        def has_last_checkpoint() -> bool:
            self._resume_drained_nodes()
            return find_newest_step(self.run.checkpoints_dir) == self.steps

        context.wait_until("the last checkpoint is saved", has_last_checkpoint, 240)
        context.wait_until("the stage is done", lambda: read_event_lines(self.run, "train")[-1]["event"] == "done", 60)
        return results

    def _run_command_of_status(self) -> bool:
        """Run the command that `status` prints to continue the run. Return False if `status` does not print one yet."""
        output = run_submit(self.cluster, self.folder, "status", str(self.run.path))
        if (command := re.search(r"^to continue: .*submit\.py (.+)$", output, re.MULTILINE)) is None:
            return False
        run_submit(self.cluster, self.folder, *shlex.split(command[1]))
        return True

    def _find_recorded_stop(self, event_count: int) -> tuple[str, str] | None:
        """Return cause and event name of the first stop after the first `event_count` events; None if there is none.

        If the stage has failed permanently, the cause starts with "gave up", except for the cause "storage".
        """
        for event in read_event_lines(self.run, "train")[event_count:]:
            # `noticed_later`: a later job recorded the cause, because the supervisor of the attempt could not
            if event["event"] in RETRY_NAMES or event.get("cause") == "storage" or event.get("noticed_later"):
                return str(event["cause"]), event["event"]
            if event["event"] == "failed" and "not retried" in str(event.get("message")):
                return f"gave up: {event['cause']}", event["event"]
        return None

    def _wait_for_progress(self) -> None:
        """Wait until the running attempt has saved a checkpoint.

        If a fault stopped the attempt earlier, the attempt would count as one without progress.

        Raises:
            RuntimeError: the job of the train stage has ended.
        """

        def has_saved_checkpoint() -> bool:
            """Return True if the newest attempt runs and has saved a checkpoint."""
            events = read_event_lines(self.run, "train")
            state = self.cluster.job_state(self.context.job_id)
            if state in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT"):
                raise RuntimeError(f"the job of the train stage ended early as {state}: {events[-3:]}")
            if state != "RUNNING":
                self._resume_drained_nodes()
                return False
            starts = [i for i, event in enumerate(events) if event["event"] == "started"]
            attempt_events = events[starts[-1] :] if starts else []
            names = {event["event"] for event in attempt_events}
            return "saved" in names and names.isdisjoint({*RETRY_NAMES, *END_NAMES, "resumed"})

        self.context.wait_until("the train stage has saved a checkpoint", has_saved_checkpoint)

    def _resume_drained_nodes(self) -> None:
        """Return drained nodes to service, as an administrator would do.

        After the controller was suspended, it may start a job that a node still runs. Slurm 24.11 then drains the node
        ("Duplicate jobid").
        """
        for node in self.cluster.output(["sinfo", "-hN", "--states=drain", "--format=%N"]).split():
            self.cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"])

    def find_problems(self, results: Sequence[FaultResult], undisturbed_digest: str) -> list[str]:
        """Return a description of each difference from the expected outcome (see tests/chaos/__init__.py)."""
        problems = [
            f"{result.fault}: recorded as {result.recorded_cause}, expected {result.expected_cause}"
            for result in results
            if result.recorded_cause != result.expected_cause
        ]
        problems += [
            f"{result.fault}: the job was not restarted in place ({result.continuation})"
            for result in results
            if result.fault in RESTARTED_IN_PLACE and result.continuation != "retried"
        ]
        lines = list(read_jsonl(self.run.metrics_file))
        if [line["step"] for line in lines] != list(range(1, self.steps + 1)):
            problems.append("metrics.jsonl does not contain every step once")
        batch = self.run.config.train.global_batch
        if [line["samples_consumed"] for line in lines] != [batch * (i + 1) for i in range(self.steps)]:
            problems.append("not every sample was consumed once")
        events = read_event_lines(self.run, "train")
        damaged_steps: set[int] = set()
        for event in events:
            if event["event"] == "damaged":
                damaged_steps.add(event["step"])
            elif event["event"] == "saved":
                damaged_steps.discard(event["step"])
            elif event["event"] == "restored" and event["step"] in damaged_steps:
                problems.append(f"the damaged checkpoint {event['step']} was loaded")
        reported_steps = {event["step"] for event in events if event["event"] == "damaged"}
        # A damaged checkpoint is only noticed if the ranks do not restore a newer snapshot from memory.
        snapshot_steps = [event["step"] for event in events if event.get("source") == "memory"]
        unreported_steps = {
            step
            for step in self.context.damaged_steps
            if step not in reported_steps
            and not any(step <= snapshot_step < step + 4 for snapshot_step in snapshot_steps)
        }
        if unreported_steps:
            problems.append(f"damage to the checkpoints {sorted(unreported_steps)} was not reported")
        foreign_job_ids = self.context.foreign_job_ids
        if changed_ids := [job_id for job_id in foreign_job_ids if self.cluster.job_state(job_id) != "PENDING"]:
            problems.append(f"jobs of other users are no longer pending: {', '.join(changed_ids)}")
        decisions = read_jsonl(self.run.decisions_file)
        skipped_positions = {line["position"] for line in decisions if line["decision"] == "skip"}
        if len(skipped_positions) != self.context.nan_count:
            problems.append(f"{len(skipped_positions)} steps were skipped, {self.context.nan_count} had a NaN loss")
        if (digest := compute_run_digest(self.run)) != undisturbed_digest:
            problems.append(f"the digest is {digest}, that of the undisturbed run {undisturbed_digest}")
        return problems


def compute_undisturbed_digest(folder: Path, chaos_run: ChaosRun, cluster: Cluster | None = None) -> str:
    """Repeat a run without faults, with the same layout and recorded decisions. Return the digest of the repetition.

    Args:
        folder: `run.root` of the repetition.
        chaos_run: the run to repeat.
        cluster: cluster for the jobs; None to run the stages on this machine.
    """
    run = Run.create(load_config(chaos_run.config, [*chaos_run.overrides, f"run.root={folder}"]))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(chaos_run.run.data_dir)
    if chaos_run.run.decisions_file.exists():
        shutil.copy(chaos_run.run.decisions_file, run.decisions_file)
    (chaos_run.folder / "chaos/inject.json").unlink(missing_ok=True)
    executor = [] if cluster else ["--executor", "local"]
    run_submit(cluster, chaos_run.folder, str(chaos_run.config), *chaos_run.overrides, f"run.root={folder}", *executor)
    deadline = time.monotonic() + 240
    while find_newest_step(run.checkpoints_dir) < chaos_run.steps and time.monotonic() < deadline:
        time.sleep(0.2)
    return compute_run_digest(run)


def choose_faults(seed: int, count: int) -> list[Fault]:
    """Return a random sequence of faults. Slow faults are half as likely as quick ones."""
    generator = random.Random(seed)
    kinds = [*QUICK_FAULTS, *QUICK_FAULTS, *SLOW_FAULTS]
    return [generator.choice(kinds) for _ in range(count)]
