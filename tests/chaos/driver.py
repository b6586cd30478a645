"""Runs one training through a sequence of faults and checks what it came to."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import find_newest_step
from pipeline.config.read import load_config
from pipeline.run.attempts import END_EVENTS, RETRY_EVENTS
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.chaos.faults import QUICK, SLOW, Scene
from tests.cluster import Cluster
from tests.support.tiny import compute_run_digest, write_config

STEPS_PER_FAULT = 22
SLOW_S = "0.15"
"""How much longer each step takes: time enough for faults to fall into it."""
OVERRIDES = (
    "stages.train.nodes=4", "stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1",
    "checkpoint.every_steps=4", "train.log_every=5", "recovery.hang_s=15", "evaluate.max_sequences=2",
    "recovery.crash=1000", "recovery.hang=1000", "recovery.fruitless=50",
)  # fmt: skip


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A folder on a file system of its own that a fault may fill. Enter it before the cluster: nodes see it then."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-chaos-", dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=300m,mode=755", "sluice-chaos", str(folder)]
    subprocess.run(mount, check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)
        folder.rmdir()


@dataclass
class Told:
    """One fault and what was made of it."""

    fault: str
    expected: str | None
    told: str | None
    seconds: float


def submit(cluster: Cluster | None, folder: Path, *arguments: str) -> str:
    """Run submit.py, with the faults' folder where a rank can find it; its output. Raises RuntimeError if it fails."""
    path = os.pathsep.join([str(Path(__file__).parent / "inject"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CHAOS": str(folder / "chaos")}
    environment |= cluster.environment() if cluster else {}
    command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


class Story:
    """A training and its faults in `folder` (which all nodes see); `data`: shards to use, made here where None."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int, count: int, data: Path | None = None) -> None:
        self.cluster, self.folder, self.seed = cluster, folder, seed
        self.random = random.Random(seed)
        self.steps = STEPS_PER_FAULT * (count + 1)
        self.count = count
        self.config = write_config(folder, "chaos", self.steps)
        (folder / "chaos").mkdir()
        (folder / "chaos/slow").write_text(SLOW_S)
        self.run = Run.create(load_config(self.config, OVERRIDES))
        if data is not None:
            self.run.data_dir.rmdir()
            shutil.copytree(data, self.run.data_dir)

    def go(self, faults: Sequence[Callable[[Scene], str | None]]) -> list[Told]:
        """Submit the training, bring about the faults one after another, wait for the end; what was told of each."""
        scene = self.scene = Scene(self.cluster, self.run, self.folder / "chaos", self.random)
        submit(self.cluster, self.folder, str(self.config), *OVERRIDES)
        told: list[Told] = []
        for fault in faults:
            self._wait_for_progress(scene)
            time.sleep(self.random.uniform(0, 1.0))
            self._wait_for_progress(scene)  # something of the fault before may have come late
            before = len(self.run.read_events("train"))
            started = time.monotonic()
            expected = fault(scene)
            cause = None
            if scene.stands:  # only then can anything be told
                scene.wait("what status prints", self._type_what_status_prints)
                scene.stands = False
            if expected is not None:
                scene.wait(f"an end after {fault.__name__}", partial(self._ending, before))
                cause = self._ending(before)
            scene.slow(float(SLOW_S))
            told.append(Told(fault.__name__, expected, cause, time.monotonic() - started))
        (self.folder / "chaos/slow").write_text("0.0")

        def over() -> bool:
            self._undrain()
            return find_newest_step(self.run.checkpoints_dir) == self.steps

        scene.wait("the end of the training", over, 240)
        scene.wait("its last event", lambda: self.run.read_events("train")[-1]["event"] == "done", 60)
        return told

    def _type_what_status_prints(self) -> bool:
        """Go on with the command that `status` names, if it does by now."""
        shown = submit(self.cluster, self.folder, "status", str(self.run.path))
        if (command := re.search(r"^to (?:go on|continue): .*submit\.py (.+)$", shown, re.MULTILINE)) is None:
            return False
        submit(self.cluster, self.folder, *shlex.split(command[1]))
        return True

    def _ending(self, before: int) -> str | None:
        """The cause that was told since event number `before`."""
        for event in self.run.read_events("train")[before:]:
            if event["event"] in RETRY_EVENTS or event.get("cause") == "storage" or event.get("noticed_later"):
                return str(event["cause"])
            if event["event"] == "failed" and "not tried again" in str(event.get("message")):
                return f"gave up: {event['cause']}"
        return None

    def _wait_for_progress(self, scene: Scene) -> None:
        """Until the attempt that runs has saved something, so that the next stop is not a fruitless one.

        Raises RuntimeError where there is no attempt any more.
        """

        def progressed() -> bool:
            events = self.run.read_events("train")
            state = self.cluster.job_state(scene.job)
            if state in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT"):
                raise RuntimeError(f"the training's job is {state} before its time: {events[-3:]}")
            if state != "RUNNING":
                self._undrain()
                return False
            starts = [i for i, e in enumerate(events) if e["event"] == "started"]
            since = events[starts[-1] :] if starts else []
            names = {e["event"] for e in since}
            return "saved" in names and names.isdisjoint((*RETRY_EVENTS, *END_EVENTS, "resumed"))

        scene.wait("progress", progressed)

    def _undrain(self) -> None:
        """What an administrator does: Slurm 24.11 drains a node that still has the job that a frozen controller, awake
        again, starts anew ("Duplicate jobid")."""
        for node in self.cluster.output(["sinfo", "-hN", "--states=drain", "--format=%N"]).split():
            self.cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"])

    # -- what it came to -----------------------------------------------------------------------------------

    def check(self, told: Sequence[Told], undisturbed: str) -> list[str]:
        """Everything that is wrong with the outcome; nothing is what we want."""
        wrong = [f"{t.fault}: told as {t.told}" for t in told if t.told != t.expected]
        lines = list(read_jsonl(self.run.metrics_file))
        if [line["step"] for line in lines] != list(range(1, self.steps + 1)):
            wrong.append("not every step stands once in metrics.jsonl")
        batch = self.run.config.train.global_batch
        if [line["samples_consumed"] for line in lines] != [batch * (i + 1) for i in range(self.steps)]:
            wrong.append("not every sample was consumed once")
        events = self.run.read_events("train")
        damaged: set[int] = set()
        for event in events:
            if event["event"] == "damaged":
                damaged.add(event["step"])
            elif event["event"] == "saved":
                damaged.discard(event["step"])
            elif event["event"] == "restored" and event["step"] in damaged:
                wrong.append(f"the damaged checkpoint {event['step']} was loaded")
        if unseen := set(self.scene.damaged) - {event["step"] for event in events if event["event"] == "damaged"}:
            wrong.append(f"damage to the checkpoints {sorted(unseen)} was not seen")
        if touched := [job for job in self.scene.foreign if self.cluster.job_state(job) != "PENDING"]:
            wrong.append(f"jobs of others were touched: {', '.join(touched)}")
        skipped = {line["position"] for line in self.decisions() if line["decision"] == "skip"}
        if len(skipped) != self.scene.poisoned:
            wrong.append(f"{len(skipped)} steps were left out, {self.scene.poisoned} were poisoned")
        if (found := compute_run_digest(self.run)) != undisturbed:
            wrong.append(f"the digest is {found}, undisturbed {undisturbed}")
        return wrong

    def decisions(self) -> list[dict[str, Any]]:
        """The steps that were left out."""
        return list(read_jsonl(self.run.decisions_file))


def undisturbed(folder: Path, like: Story, cluster: Cluster | None = None) -> str:
    """The digest of an undisturbed run of the same layout and recorded decisions; no `cluster`: on this machine."""
    run = Run.create(load_config(like.config, [*OVERRIDES, f"run.root={folder}"]))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(like.run.data_dir)
    if like.run.decisions_file.exists():
        shutil.copy(like.run.decisions_file, run.decisions_file)
    (like.folder / "chaos/inject.json").unlink(missing_ok=True)
    where = [] if cluster else ["--executor", "local"]
    submit(cluster, like.folder, str(like.config), *OVERRIDES, f"run.root={folder}", *where)
    deadline = time.monotonic() + 240
    while find_newest_step(run.checkpoints_dir) < like.steps and time.monotonic() < deadline:
        time.sleep(0.2)
    return compute_run_digest(run)


def draw(seed: int, count: int) -> list[Callable[[Scene], str | None]]:
    """A sequence of faults; the slow kinds are drawn less often."""
    chooser = random.Random(seed)
    kinds = [*QUICK, *QUICK, *SLOW]
    return [chooser.choice(kinds) for _ in range(count)]
