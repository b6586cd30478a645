"""Functions that cause a fault during the train stage of a run.

Each returns the cause that the run must record, or None if the fault must not stop the stage.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from pipeline.base.files import read_jsonl
from pipeline.run.directory import Run
from slurm.drill.faults import (
    damage_a_checkpoint,
    kill_a_rank,
    remove_a_checkpoint_file,
    requeue_the_job,
    send_a_signal,
    stop_a_rank,
)
from tests.cluster import Cluster
from tests.support.events import read_event_lines
from tests.support.ranks import find_rank_processes

Layout = Literal["four nodes", "spare nodes"]
"""Where the four ranks run: on four nodes, or on two of four nodes, so that two nodes are spare nodes."""
SAVE_PHASES = ("staging", "writing", "hashing", "before the rename", "after the rename")
RANKS = 4


@dataclass
class FaultContext:
    """The run, its cluster, and the effects of the faults so far."""

    cluster: Cluster
    run: Run
    folder: Path
    """Folder for requests, which `inject/sitecustomize.py` reads in each rank."""
    random: random.Random
    """Generator of all random choices."""
    layout: Layout = "four nodes"
    needs_resume: bool = False
    """If True, the run does not continue automatically. The user must run the command that `status` prints."""
    foreign_job_ids: list[str] = field(default_factory=list)
    """IDs of jobs of other users, which must not be changed."""
    nan_count: int = 0
    """Number of steps that had a NaN loss."""
    damaged_steps: list[int] = field(default_factory=list)
    """Steps of the checkpoints that were damaged."""

    @property
    def job_id(self) -> str:
        """Return the ID of the newest job of the train stage."""
        return str(read_event_lines(self.run, "train", "submitted")[-1]["job_id"])

    def find_ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the running ranks, by rank."""
        return find_rank_processes(self.run.path)

    def list_ranks(self) -> list[int]:
        """Return the running ranks."""
        return sorted(self.find_ranks())

    def signal_ranks(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to some ranks. Ranks that have ended are ignored."""
        processes = self.find_ranks()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                processes[rank].send_signal(number)

    def kill_agents(self) -> None:
        """Kill all node agents. Their ranks die with them, and the snapshots in memory are lost."""
        for agent in {self.find_agent(rank) for rank in self.list_ranks()}:
            agent.kill()

    def run_slurm_command(self, *command: str) -> str:
        """Run a Slurm command on the cluster and return its output."""
        return self.cluster.output(command)

    def find_agent(self, rank: int) -> psutil.Process:
        """Return the process of the node agent of a running rank."""
        agent = self.find_ranks()[rank].parent()
        assert agent is not None
        return agent

    def list_used_nodes(self) -> list[str]:
        """Return the nodes on which ranks run."""
        return list(read_event_lines(self.run, "train", "ranks_started")[-1]["processes"])

    def find_supervisor(self) -> psutil.Process:
        """Return the process of the supervisor, which runs in the batch step of the job."""
        return self._find_processes("-m", "slurm", "train")[0]

    def _find_processes(self, *arguments: str) -> list[psutil.Process]:
        """Return the Python processes of this run with these first arguments, except the option -u."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                first_arguments = [argument for argument in command[1:] if argument != "-u"][: len(arguments)]
                is_of_run = any(argument.startswith(str(self.run.path)) for argument in command)
                if first_arguments == list(arguments) and is_of_run:
                    processes.append(process)
        return processes

    def inject(self, kind: str, **details: object) -> None:
        """Request a fault that happens once, in a random rank or, for some kinds, in rank 0.

        Only rank 0 writes events and renames checkpoints. So a skewed clock, which changes the times of events, and a
        kill before or after the rename are requested for rank 0.

        Args:
            kind: kind of fault in `inject/sitecustomize.py`.
            details: further conditions, such as the phase of a save.
        """
        needs_rank_0 = kind == "skew" or "rename" in str(details.get("phase"))
        rank = 0 if needs_rank_0 else self.random.randrange(RANKS)
        (self.folder / "done.json").unlink(missing_ok=True)
        temporary = self.folder / "inject.tmp"
        temporary.write_text(json.dumps({"kind": kind, "rank": rank, **details}))
        temporary.rename(self.folder / "inject.json")

    def wait_until(self, description: str, condition: Callable[[], object], timeout: float = 300) -> None:
        """Wait until `condition` returns a true value. Raise TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                log = (self.cluster.directory / "log/slurmctld.log").read_text().splitlines()[-60:]
                lines = [f"waited {timeout:.0f} s until {description}", f"job {self.job_id}:"]
                lines += [self.cluster.output(["squeue", "--states=all"]), *log]
                raise TimeoutError("\n".join(lines))
            time.sleep(0.2)

    def is_running(self) -> bool:
        """Return True if the job of the train stage runs. While Slurm sends it a signal, its state is SIGNALING."""
        return self.cluster.job_state(self.job_id) in ("RUNNING", "SIGNALING")

    def set_step_delay(self, seconds: float) -> None:
        """Delay each step by `seconds` from now on."""
        temporary = self.folder / "delay.tmp"
        temporary.write_text(str(seconds))
        temporary.rename(self.folder / "delay")

    def was_injected(self) -> bool:
        """Return True if the requested fault has happened."""
        return (self.folder / "done.json").exists()


Fault = Callable[[FaultContext], str | None]


def kill_an_agent(context: FaultContext) -> str:
    """Kill the node agent of one rank with SIGKILL at a random moment. The kernel then kills its ranks."""
    context.find_agent(context.random.randrange(RANKS)).kill()
    return "crashed"


def kill_a_rank_and_an_agent(context: FaultContext) -> str:
    """Kill a rank and the agent of another rank at the same time."""
    ranks = context.find_ranks()
    killed, other = context.random.sample(sorted(ranks), 2)
    agent = context.find_agent(other)
    ranks[killed].kill()
    agent.kill()
    return "crashed"


def damage_a_snapshot(context: FaultContext) -> str:
    """Damage the snapshots in memory of a rank, if there are any, then kill all ranks.

    A bit of a snapshot is flipped, or its header is incomplete, as after a save that did not end.
    """
    ranks = context.find_ranks()
    for process in ranks.values():
        process.send_signal(signal.SIGSTOP)  # Otherwise, the ranks could save a newer snapshot.
    rank = context.random.randrange(RANKS)
    agent = context.find_agent(rank)
    buffers = [
        path for path in Path(f"/proc/{agent.pid}/fd").iterdir() if f"sluice-snapshot-{rank}-" in os.readlink(path)
    ]
    for path in context.random.sample(buffers, context.random.randint(0, len(buffers))):
        with open(path, "r+b") as buffer:
            size = os.fstat(buffer.fileno()).st_size
            if size == 0:  # No snapshot was written to this buffer yet.
                continue
            position = context.random.choice([0, context.random.randrange(size)])
            buffer.seek(position)
            content = buffer.read(1)[0]
            buffer.seek(position)
            buffer.write(bytes([content ^ 1 << context.random.randrange(8)]))
    for process in ranks.values():
        process.kill()
    return "crashed"


def preempt(context: FaultContext) -> str:
    """Submit a job to a partition of higher priority that needs all nodes."""
    context.cluster.output(["sbatch", "--parsable", "-phigh", "-N4", "-c4", "-o", "/dev/null", "--wrap", "sleep 1"])
    return "preempted"


def preempt_without_grace(context: FaultContext) -> str:
    """Preempt the job without a grace period. Without accounting, Slurm shows the same as after `scontrol requeue`."""
    context.cluster.output(["scontrol", "update", "PartitionName=low", "GraceTime=0"])
    preempt(context)
    context.wait_until("the job is preempted", lambda: not context.is_running(), 60)
    context.cluster.output(["scontrol", "update", "PartitionName=low", "GraceTime=1"])
    return "requeued"


def crash_a_node(context: FaultContext, *, kills_a_rank: bool = False) -> str:
    """Crash a random node of the job. The first node runs the supervisor.

    Args:
        context: the context.
        kills_a_rank: whether to kill a rank on another node right after the crash.
    """
    node = context.random.choice(context.list_used_nodes())
    start_count = len(read_event_lines(context.run, "train", "started"))
    context.cluster.crash(node)
    if kills_a_rank:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # All ranks may have ended already.
            kill_a_rank(context)
    if context.layout == "spare nodes":
        # Another node replaces the node, or the job is requeued because too few nodes are left.
        is_over = lambda: len(read_event_lines(context.run, "train", "started")) > start_count  # noqa: E731
        context.wait_until("the next attempt starts", is_over, 120)
    else:
        context.wait_until("Slurm notices the crash", lambda: not context.is_running(), 90)
    context.cluster.boot(node)
    return "node_failure"


def kill_a_rank_and_crash_a_node(context: FaultContext) -> str:
    """Crash a node and kill a rank on another node at the same time."""
    return crash_a_node(context, kills_a_rank=True)


def reach_the_time_limit(context: FaultContext) -> str:
    """Reduce the time limit of the job so that the job reaches it within two minutes."""
    job_info = context.cluster.output(["scontrol", "show", "job", context.job_id])
    hours, run_minutes, seconds = job_info.split("RunTime=")[1].split()[0].split(":")[-3:]
    # The next full minute of the run time that is at least 40 s later. Slurm checks limits every 30 s. With less time,
    # it might end the job without the signal that announces the limit.
    minutes = int(hours.split("-")[-1]) * 60 + int(run_minutes) + 1 + (int(seconds) > 20)
    context.set_step_delay(3.0)  # The run must not end before the limit.
    context.cluster.output(["scontrol", "update", f"JobId={context.job_id}", f"TimeLimit={minutes}"])
    context.wait_until("the attempt ends", lambda: not context.is_running(), 180)
    # One hour is enough for the next attempt.
    context.cluster.output(["scontrol", "update", f"JobId={context.job_id}", "TimeLimit=60"])
    return "time_limit"


def kill_a_rank_in_a_save(context: FaultContext) -> str:
    """Kill a rank with SIGKILL in a random phase of a save."""
    context.inject("die_in_save", phase=context.random.choice(SAVE_PHASES))
    context.wait_until("a rank dies in a save", context.was_injected)
    return "crashed"


def fill_the_disk(context: FaultContext) -> str:
    """Fill the file system, so that the next save fails. When the job has failed, free the space again."""
    file_system = os.statvfs(context.run.path)
    if file_system.f_blocks * file_system.f_frsize > 1 << 30:
        raise RuntimeError(f"{context.run.path} is on a large disk; use driver.mount_small_disk")
    filler = context.run.path.parent / "filler"
    with open(filler, "wb") as file:
        try:
            while True:
                os.write(file.fileno(), b"x" * 65536)
        except OSError:
            pass
    context.wait_until("the job has failed", lambda: context.cluster.job_state(context.job_id) == "FAILED")
    filler.unlink()
    context.needs_resume = True
    return "storage"


def make_a_loss_nan(context: FaultContext) -> None:
    """Make the loss of one rank NaN in one step. The run must skip this step."""
    decision_count = len(list(read_jsonl(context.run.decisions_file)))
    context.inject("nan")
    context.wait_until("a step has a NaN loss", context.was_injected)
    context.wait_until(
        "the step is skipped", lambda: len(list(read_jsonl(context.run.decisions_file))) > decision_count, 20
    )
    context.nan_count += 1


def hang_a_rank(context: FaultContext) -> str:
    """Let one rank sleep for an hour in a step."""
    context.inject("sleep")
    context.wait_until("a rank hangs", context.was_injected)
    return "hang"


def skew_a_clock(context: FaultContext) -> str:
    """Set the clock of rank 0, which writes events, an hour ahead in the next attempt, and kill a rank to start it."""
    context.inject("skew")
    kill_a_rank(context)
    return "crashed"


def disconnect_a_node(context: FaultContext) -> str:
    """Disconnect a node from the network until Slurm considers it down. The cluster must have the option `netns`."""
    node = context.random.choice([node for node in context.list_used_nodes() if node != "n1"])
    start_count = len(read_event_lines(context.run, "train", "started"))
    context.cluster.disconnect_node(node)
    context.wait_until(
        "Slurm considers the node lost, or another node replaces it",
        lambda: not context.is_running() or len(read_event_lines(context.run, "train", "started")) > start_count,
        150,
    )
    context.cluster.reconnect_node(node)
    return "node_failure"


def kill_the_supervisor(context: FaultContext) -> str:
    """Kill the supervisor with SIGKILL. Then no process records the cause or requeues the job.

    Since version 24.05, Slurm requeues the job if an earlier start of it was preempted. The run then records a node
    failure, because a node failure looks the same.
    """
    context.find_supervisor().kill()
    context.wait_until("the job ends", lambda: not context.is_running())
    context.wait_until(
        "the job has failed or is requeued",
        lambda: context.cluster.job_state(context.job_id) in ("FAILED", "PENDING", "RUNNING"),
    )
    context.needs_resume = context.cluster.job_state(context.job_id) == "FAILED"
    return "crashed" if context.needs_resume else "node_failure"


def freeze_the_controller(context: FaultContext) -> str:
    """Kill a rank while the controller does not respond."""
    with context.cluster.suspend_controller():
        kill_a_rank(context)
        time.sleep(context.random.uniform(5, 25))
    return "crashed"


def lose_the_controller_state(context: FaultContext) -> str:
    """Restart the controller without its state, so that it forgets all jobs. Jobs of other users then get their IDs.

    The ranks, of which the controller no longer knows, end by themselves.
    """
    submit_held_job = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]
    last_id = int(context.job_id)
    context.cluster.restart_controller_without_state()
    while not context.foreign_job_ids or int(context.foreign_job_ids[-1]) < last_id:
        context.foreign_job_ids.append(context.cluster.output(submit_held_job))
    context.wait_until("all ranks have ended", lambda: not context.find_ranks())
    context.needs_resume = True
    return "crashed"


QUICK_FAULTS: tuple[Fault, ...] = (
    kill_a_rank,
    kill_an_agent,
    kill_a_rank_and_an_agent,
    damage_a_snapshot,
    preempt,
    preempt_without_grace,
    send_a_signal,
    requeue_the_job,
    kill_a_rank_in_a_save,
    damage_a_checkpoint,
    remove_a_checkpoint_file,
    stop_a_rank,
    make_a_loss_nan,
    hang_a_rank,
    skew_a_clock,
    kill_the_supervisor,
)
SLOW_FAULTS: tuple[Fault, ...] = (
    crash_a_node,
    kill_a_rank_and_crash_a_node,
    reach_the_time_limit,
    fill_the_disk,
    disconnect_a_node,
    freeze_the_controller,
    lose_the_controller_state,
)

RESTARTED_IN_PLACE = frozenset(
    fault.__name__
    for fault in (
        kill_a_rank, kill_an_agent, kill_a_rank_and_an_agent, damage_a_snapshot, kill_a_rank_in_a_save,
        damage_a_checkpoint, remove_a_checkpoint_file, stop_a_rank, hang_a_rank, skew_a_clock, freeze_the_controller,
    )
)  # fmt: skip
"""Faults after which the ranks must restart in the same job, without a requeue."""
