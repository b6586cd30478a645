"""One function per kind of fault. Each brings it about and returns what must be told: a name, or None for no stop."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import checkpoint_name, find_newest_step, list_checkpoint_steps
from pipeline.run.directory import Run
from tests.cluster import Cluster

PHASES = ("staging", "writing", "hashing", "before the rename", "after the rename")
RANKS = 4


@dataclass
class Scene:
    """What faults act on."""

    cluster: Cluster
    run: Run
    folder: Path
    """Where `inject/` looks."""
    random: random.Random
    stands: bool = False
    """The run does not go on by itself: a person types what `status` prints."""
    foreign: list[str] = field(default_factory=list)
    """Jobs of somebody else, which nobody may touch."""
    poisoned: int = 0
    damaged: list[int] = field(default_factory=list)
    """What was really done: steps poisoned; steps of checkpoints that were damaged."""

    @property
    def job(self) -> str:
        """The training's job."""
        submitted = [e for e in self.run.read_events("train") if e["event"] == "submitted"]
        return str(submitted[-1]["job_id"])

    def ranks(self) -> dict[int, psutil.Process]:
        """The rank processes that run now."""
        found = {}
        for process in self._processes("-m", "pipeline", "train"):
            with contextlib.suppress(psutil.Error, KeyError):
                found[int(process.environ()["SLURM_PROCID"])] = process
        return found

    def supervisor(self) -> psutil.Process:
        """The job's batch step."""
        return self._processes("-m", "slurm", "train")[0]

    def _processes(self, *words: str) -> list[psutil.Process]:
        """The processes of Python that run so and belong to this run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if [w for w in line[1:] if w != "-u"][: len(words)] == list(words) and any(
                    word.startswith(str(self.run.path)) for word in line
                ):
                    found.append(process)
        return found

    def inject(self, kind: str, **more: object) -> None:
        """Leave a fault for a rank; it happens once."""
        rank = 0 if kind == "skew" or "rename" in str(more.get("phase")) else self.random.randrange(RANKS)
        (self.folder / "done.json").unlink(missing_ok=True)
        temporary = self.folder / "inject.tmp"
        temporary.write_text(json.dumps({"kind": kind, "rank": rank, **more}))
        temporary.rename(self.folder / "inject.json")

    def wait(self, what: str, happened: Callable[[], object], timeout: float = 300) -> None:
        """Wait for something. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > deadline:
                log = (self.cluster.directory / "log/slurmctld.log").read_text().splitlines()[-60:]
                facts = [f"{what} did not happen within {timeout:.0f} s", f"job {self.job}:"]
                facts += [self.cluster.output(["squeue", "--states=all"]), *log]
                raise TimeoutError("\n".join(facts))
            time.sleep(0.2)

    def runs(self) -> bool:
        """Whether Slurm has the training's job running; it is SIGNALING for a moment while it is told of its end."""
        return self.cluster.job_state(self.job) in ("RUNNING", "SIGNALING")

    def slow(self, seconds: float) -> None:
        """Let each step take so much longer from now on."""
        temporary = self.folder / "slow.tmp"
        temporary.write_text(str(seconds))
        temporary.rename(self.folder / "slow")

    def happened(self) -> bool:
        """Whether the injected fault was committed."""
        return (self.folder / "done.json").exists()


def kill_a_rank(scene: Scene) -> str:
    """SIGKILL of one rank at any moment."""
    ranks = scene.ranks()
    ranks[scene.random.choice(sorted(ranks))].kill()
    return "crashed"


def preempt(scene: Scene) -> str:
    """A job of a higher partition wants all nodes."""
    scene.cluster.output(["sbatch", "--parsable", "-phigh", "-N4", "-c4", "-o", "/dev/null", "--wrap", "sleep 1"])
    return "preempted"


def preempt_without_grace(scene: Scene) -> str:
    """The same where the site gives no time at all. Without accounting nothing tells it from `scontrol requeue`."""
    scene.cluster.output(["scontrol", "update", "PartitionName=low", "GraceTime=0"])
    preempt(scene)
    scene.wait("the preemption", lambda: not scene.runs(), 60)
    scene.cluster.output(["scontrol", "update", "PartitionName=low", "GraceTime=1"])
    return "requeued"


def crash_a_node(scene: Scene) -> str:
    """A power failure of any node of the job, the first one (with the supervisor) included."""
    node = scene.random.choice(["n1", "n2", "n3", "n4"])
    scene.cluster.crash(node)
    scene.wait("Slurm's notice", lambda: not scene.runs(), 90)
    scene.cluster.boot(node)
    return "node_failure"


def time_limit(scene: Scene) -> str:
    """The time limit comes near: Slurm signals the steps."""
    shown = scene.cluster.output(["scontrol", "show", "job", scene.job])
    ran = shown.split("RunTime=")[1].split()[0].split(":")
    minutes = int(ran[-3].split("-")[-1]) * 60 + int(ran[-2]) + 1 + (int(ran[-1]) > 40)
    scene.slow(1.5)  # Slurm looks at limits twice a minute
    scene.cluster.output(["scontrol", "update", f"JobId={scene.job}", f"TimeLimit={minutes}"])
    scene.wait("the end of this start", lambda: not scene.runs(), 120)
    scene.cluster.output(["scontrol", "update", f"JobId={scene.job}", "TimeLimit=60"])  # the next one has time again
    return "time_limit"


def send_a_signal(scene: Scene) -> str:
    """scancel --signal, as colleagues and scripts do."""
    name = scene.random.choice(["USR1", "USR2", "TERM"])
    scene.cluster.output(["scancel", f"--signal={name}", scene.job])
    return "stopped"


def die_in_a_save(scene: Scene) -> str:
    """SIGKILL of a rank in a certain phase of a save."""
    scene.inject("die_in_save", phase=scene.random.choice(PHASES))
    scene.wait("the death in a save", scene.happened)
    return "crashed"


def damage_the_newest_checkpoint(scene: Scene) -> str:
    """A file of the newest checkpoint is truncated, flipped or gone when the training starts again."""
    scene.wait("a second checkpoint", lambda: len(list_checkpoint_steps(scene.run.checkpoints_dir)) > 1)
    ranks = scene.ranks()
    for process in ranks.values():
        process.send_signal(signal.SIGSTOP)  # nothing is saved while it is being damaged
    step = find_newest_step(scene.run.checkpoints_dir)
    file = scene.random.choice(sorted((scene.run.checkpoints_dir / checkpoint_name(step)).iterdir()))
    size = file.stat().st_size
    how = scene.random.choice(["truncated", "flipped", "missing"])
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        os.truncate(file, size // 2)
    else:
        content = bytearray(file.read_bytes())
        content[scene.random.randrange(size)] ^= 1 << scene.random.randrange(8)
        file.write_bytes(content)
    scene.damaged.append(step)
    for process in ranks.values():
        process.kill()
    return "crashed"


def fill_the_disk(scene: Scene) -> str:
    """The file system fills up before the next save; a person frees it."""
    space = os.statvfs(scene.run.path)
    if space.f_blocks * space.f_frsize > 1 << 30:
        raise RuntimeError(f"{scene.run.path} is on a large disk, which is not for filling (driver.small_disk)")
    filler = scene.run.path.parent / "filler"
    with open(filler, "wb") as file:
        try:
            while True:
                os.write(file.fileno(), b"x" * 65536)
        except OSError:
            pass
    scene.wait("the job's end", lambda: scene.cluster.job_state(scene.job) == "FAILED")
    filler.unlink()
    scene.stands = True
    return "storage"


def poison_a_step(scene: Scene) -> None:
    """The loss of one rank is no number, once."""
    decided = len(list(read_jsonl(scene.run.decisions_file)))
    scene.inject("nan")
    scene.wait("the bad step", scene.happened)
    scene.wait("the decision", lambda: len(list(read_jsonl(scene.run.decisions_file))) > decided, 20)
    scene.poisoned += 1


def sleep_for_ever(scene: Scene) -> str:
    """One rank does not go on, and says nothing."""
    scene.inject("sleep")
    scene.wait("the sleep", scene.happened)
    return "hang"


def skew_a_clock(scene: Scene) -> str:
    """The clock of rank 0, which writes what happens, goes an hour ahead in the next start."""
    scene.inject("skew")
    kill_a_rank(scene)
    return "crashed"


def cut_a_network(scene: Scene) -> str:
    """A node's cable is pulled, and put back once Slurm gave the node up. Needs a cluster with netns."""
    node = scene.random.choice(["n2", "n3", "n4"])
    scene.cluster.cut(node)
    scene.wait("Slurm's notice", lambda: not scene.runs(), 150)
    scene.cluster.heal(node)
    return "node_failure"


def kill_the_supervisor(scene: Scene) -> str:
    """SIGKILL of the batch step: nobody is left to say why it ended, and to put the job back.

    Since 24.05 Slurm does, once, where the job was preempted in its grace time before; that looks like a node's end.
    """
    scene.supervisor().kill()
    scene.wait("the job's end", lambda: not scene.runs())
    scene.wait("what comes of it", lambda: scene.cluster.job_state(scene.job) in ("FAILED", "PENDING", "RUNNING"))
    scene.stands = scene.cluster.job_state(scene.job) == "FAILED"
    return "crashed" if scene.stands else "node_failure"


def freeze_the_controller(scene: Scene) -> str:
    """A rank dies while the controller answers nobody."""
    with scene.cluster.frozen():
        kill_a_rank(scene)
        time.sleep(scene.random.uniform(5, 25))
    return "crashed"


def lose_the_state(scene: Scene) -> str:
    """The controller forgets every job, ends those that it finds, and gives their ids to other people's jobs."""
    held = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]
    last = int(scene.job)
    scene.cluster.lose_state()
    while not scene.foreign or int(scene.foreign[-1]) < last:
        scene.foreign.append(scene.cluster.output(held))
    scene.wait("the end of what ran", lambda: not scene.ranks())
    scene.stands = True
    return "crashed"


QUICK: tuple[Callable[[Scene], str | None], ...] = (
    kill_a_rank,
    preempt,
    preempt_without_grace,
    send_a_signal,
    die_in_a_save,
    damage_the_newest_checkpoint,
    poison_a_step,
    sleep_for_ever,
    skew_a_clock,
    kill_the_supervisor,
)
SLOW: tuple[Callable[[Scene], str | None], ...] = (
    crash_a_node,
    time_limit,
    fill_the_disk,
    cut_a_network,
    freeze_the_controller,
    lose_the_state,
)
