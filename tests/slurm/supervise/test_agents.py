"""Tests of the node agents on this machine: real agents, which fork real ranks or ranks of a tiny train stage."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.errors import ExitCode
from pipeline.checkpoint.catalog import find_newest_step
from pipeline.run.code import make_code_env
from pipeline.run.directory import Run
from slurm.agent.messages import Connection, connect, write_address_file
from slurm.agent.oom import count_oom_kills
from slurm.supervise import agents
from slurm.supervise.agents import AgentPool
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank, slow_down_steps

OPTIONS = ("train.steps=24", "checkpoint.every_steps=2", "recovery.budgets.crash=20")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a run for which the prepare and shard stages are done."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


@pytest.fixture(scope="module")
def undisturbed_digest(tmp_path_factory: pytest.TempPathFactory, data: Path) -> str:
    """Return the digest of an undisturbed run, whose ranks were started without an agent."""
    run = make_run(tmp_path_factory.mktemp("undisturbed"), "undisturbed", OPTIONS, data)
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    return compute_run_digest(run)


def start_supervisor(run: Run) -> subprocess.Popen[str]:
    """Start `python -m slurm train RUN`."""
    command = [sys.executable, "-m", "slurm", "train", str(run.path)]
    environment = make_code_env(os.environ, run.code_dir)
    return subprocess.Popen(
        command, cwd=run.code_dir, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def find_agents(parent_pid: int) -> list[psutil.Process]:
    """Return the running agents that a process has started."""
    agents = []
    for child in psutil.Process(parent_pid).children():
        with suppress(psutil.Error):  # The child may have ended.
            if "slurm.agent" in child.cmdline():
                agents.append(child)
    return agents


def wait_until(condition: Callable[[], object], description: str, timeout: float = 120) -> None:
    """Wait until `condition` returns a true value."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{description} did not happen within {timeout:.0f} s"
        time.sleep(0.02)


def read_pids(run: Run) -> list[int]:
    """Return the process ids of the ranks of the newest attempt, by rank."""
    (pids,) = read_event_lines(run, "train", "ranks_started")[-1]["processes"].values()
    return [pids[rank] for rank in sorted(pids, key=int)]


def count_events(run: Run, name: str) -> int:
    """Return the number of events of the train stage with this name."""
    return len(read_event_lines(run, "train", name))


def wait_for_event(run: Run, name: str, count: int) -> None:
    """Wait until the train stage has `count` events with this name."""
    wait_until(lambda: count_events(run, name) >= count, f"{name} number {count}")


def test_killed_ranks_are_forked_again_by_the_same_agent(tmp_path: Path, data: Path, undisturbed_digest: str) -> None:
    """A rank is killed three times, then it is stopped and killed. The result is that of an undisturbed run."""
    run = slow_down_steps(make_run(tmp_path, "killed", OPTIONS, data), 0.1)
    supervisor = start_supervisor(run)
    agent_pids = set()
    for kill in range(3):
        wait_for_event(run, "ready", kill + 1)
        wait_for_event(run, "saved", count_events(run, "saved") + 1)
        pids = read_pids(run)
        assert [psutil.Process(pid).name() for pid in pids] == ["sluice-rank-0", "sluice-rank-1"]
        agent_pids |= {psutil.Process(pid).ppid() for pid in pids}
        if kill == 2:
            os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[kill % 2], signal.SIGKILL)
    output, _ = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0, output
    assert len(agent_pids) == 1, "a restart must not start a new agent"
    failures = read_event_lines(run, "train", "failed")
    assert [(event["cause"], event["rank"]) for event in failures] == [("crashed", 0), ("crashed", 1), ("crashed", 0)]
    assert count_events(run, "retried") == 3
    assert compute_run_digest(run) == undisturbed_digest
    assert not any(psutil.pid_exists(pid) for pid in agent_pids)


def kill_a_rank_in_a_slow_save(run: Run) -> None:
    """Train, and kill a rank while the savers write the first checkpoint, which takes two seconds. Wait for the end."""
    replace_in_file(
        run.code_dir / "pipeline/checkpoint/writer.py",
        '        step = manifest["step"]\n',
        '        step = manifest["step"]\n'
        "        dist.barrier(self._group)\n"
        f"        if step == 6: open({str(run.path / 'writing')!r}, 'w').close(); time.sleep(2)\n",
    )
    supervisor = start_supervisor(run)
    wait_until((run.path / "writing").exists, "a save")
    os.kill(read_pids(run)[1], signal.SIGKILL)
    output, _ = supervisor.communicate(timeout=120)
    assert supervisor.returncode == (ExitCode.DONE if run.config.recovery.budgets.crash else ExitCode.CRASHED), output


def test_a_save_goes_on_although_a_rank_dies(tmp_path: Path, data: Path, undisturbed_digest: str) -> None:
    """The next attempt waits for the save, and restores the state from the memory from which it was written."""
    options = (*OPTIONS, "checkpoint.every_steps=6")
    run = slow_down_steps(make_run(tmp_path, "saving", options, data), 0.1)
    kill_a_rank_in_a_slow_save(run)
    (restored,) = read_event_lines(run, "train", "restored")
    assert (restored["step"], restored["source"]) == (6, "memory")
    assert [event["step"] for event in read_event_lines(run, "train", "saved")] == [6, 12, 18, 24]
    assert compute_run_digest(run) == undisturbed_digest


@pytest.mark.story
def test_an_agent_finishes_a_save_before_it_exits(tmp_path: Path, data: Path) -> None:
    options = (*OPTIONS, "checkpoint.every_steps=6", "recovery.budgets.crash=0")
    run = slow_down_steps(make_run(tmp_path, "ended", options, data), 0.1)
    kill_a_rank_in_a_slow_save(run)
    assert find_newest_step(run.checkpoints_dir) == 6
    assert not list(run.checkpoints_dir.glob(".tmp-*"))


@pytest.mark.story
def test_ranks_die_with_their_agent_and_a_new_agent_continues(
    tmp_path: Path, data: Path, undisturbed_digest: str
) -> None:
    run = slow_down_steps(make_run(tmp_path, "orphaned", OPTIONS, data), 0.1)
    supervisor = start_supervisor(run)
    wait_until(lambda: count_events(run, "saved") > 0, "a save")
    pids = read_pids(run)
    agent = psutil.Process(pids[0]).ppid()
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the ranks", 20)
    output, _ = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0, output
    (failure,) = read_event_lines(run, "train", "failed")
    assert failure["cause"] == "crashed" and str(agent) in failure["message"]
    assert compute_run_digest(run) == undisturbed_digest


def test_a_signal_during_the_start_of_the_agent_stops_the_stage(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path, "early", OPTIONS, data)
    supervisor = start_supervisor(run)
    wait_until((run.stage_dir("train") / "agents.json").exists, "the start of the agent")
    supervisor.send_signal(signal.SIGTERM)
    output, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.STOPPED, output
    assert not read_event_lines(run, "train", "ranks_started")


def test_ranks_get_a_signal_that_arrived_before_they_were_forked(tmp_path: Path, data: Path) -> None:
    """Slurm sends the signal of a preemption only to the processes of job steps. At that time, the agent imports."""
    run = make_run(tmp_path, "signalled", OPTIONS, data)
    supervisor = start_supervisor(run)
    found: list[psutil.Process] = []

    def find_agent() -> bool:
        found[:] = [agent for agent in find_agents(supervisor.pid) if agent.cpu_times().user > 0.3]
        return bool(found)

    wait_until(find_agent, "the start of the agent")
    found[0].send_signal(signal.SIGUSR2)
    output, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.STOPPED, output
    assert count_events(run, "ranks_started") == 1 and not count_events(run, "ready"), "the ranks ignored the signal"


def test_an_agent_that_cannot_import_the_pipeline_is_reported(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path, "broken", OPTIONS, data)
    (run.code_dir / "pipeline/train/trainer.py").write_text("raise ImportError('no package flux')\n")
    supervisor = start_supervisor(run)
    output, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.CRASHED, output
    (failure,) = read_event_lines(run, "train", "failed")
    assert "no package flux" in failure["message"] and "Traceback" in failure["message"]


# ---- messages


@pytest.fixture
def pool(tmp_path: Path, data: Path) -> Iterator[AgentPool]:
    """Return a started pool of one agent."""
    run = make_run(tmp_path, "pool", OPTIONS, data)
    lock_fd = os.open(run.path, os.O_RDONLY)
    pool = AgentPool(run, "train", 1, 1, lock_fd, on_slurm=False)
    pool.start()
    yield pool
    pool.close()
    os.close(lock_fd)


def test_a_connection_without_the_token_is_closed_and_only_the_owner_can_read_the_token(
    tmp_path: Path, pool: AgentPool
) -> None:
    address_file = next((tmp_path / "runs/pool").rglob("agents.json"))
    assert address_file.stat().st_mode & 0o777 == 0o600
    address = json.loads(address_file.read_text())
    assert len(address["token"]) >= 32
    for token in ("", address["token"][:-1], address["token"] + "0"):
        connected = socket.create_connection(("127.0.0.1", address["port"]))
        intruder = Connection(connected)
        intruder.send("hello", token=token, node=0, host="intruder", pid=1)
        closed = False
        for _ in range(200):
            pool.poll(0.01)
            try:
                assert intruder.receive() == []
            except ConnectionError:
                closed = True
                break
        assert closed, "a connection without the token must be closed"
    deadline = time.monotonic() + 60
    while not pool.is_ready and time.monotonic() < deadline:
        pool.poll(0.1)
    assert pool.is_ready and pool.get_host(0) == os.uname().nodename


@pytest.mark.parametrize("is_suspended", [False, True])
def test_an_agent_that_does_not_answer_is_lost_unless_the_supervisor_was_suspended_too(
    pool: AgentPool, monkeypatch: pytest.MonkeyPatch, is_suspended: bool
) -> None:
    """The agent is stopped for two seconds. Here, it may take one second to answer."""
    monkeypatch.setattr(agents, "REPLY_TIMEOUT_S", 1.0)
    monkeypatch.setattr(agents, "SUSPENDED_S", 0.5)
    monkeypatch.setattr(agents, "PING_INTERVAL_S", 0.1)

    def poll_until(condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            pool.poll(0.05)

    poll_until(lambda: pool.is_ready, 60)
    (agent,) = find_agents(os.getpid())
    agent.suspend()
    poll_until(lambda: False, 0.3)
    if is_suspended:
        time.sleep(2)
        agent.resume()
    poll_until(lambda: pool.failure is not None, 2)
    assert (pool.failure is None) == is_suspended
    agent.resume()


def test_a_node_whose_agent_does_not_connect_counts_as_failed(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun is replaced by a program that starts the agent of only one of two nodes."""
    monkeypatch.setattr(agents, "CONNECT_SPREAD_S", 0.5)
    run = make_run(tmp_path, "pool", OPTIONS, data)
    folder = tmp_path / "bin"
    folder.mkdir()
    srun = folder / "srun"
    srun.write_text(
        '#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nSLURM_NODEID=0 exec ' + sys.executable + ' "$@"\n'
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    lock_fd = os.open(run.path, os.O_RDONLY)
    pool = AgentPool(run, "train", 2, 1, lock_fd, on_slurm=True)
    pool.start()
    deadline = time.monotonic() + 60
    while pool.failure is None and time.monotonic() < deadline:
        pool.poll(0.05)
    pool.close()
    os.close(lock_fd)
    assert pool.failure_code == ExitCode.NODE_FAILURE and os.uname().nodename in str(pool.failure)


messages = st.lists(
    st.dictionaries(st.text(max_size=5).filter(lambda key: key != "kind"), st.text(max_size=200), max_size=3),
    max_size=5,
)


@given(messages, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_messages_arrive_whole_and_in_order_however_they_are_split(
    sent: list[dict[str, str]], sizes: list[int]
) -> None:
    ours, theirs = socket.socketpair()
    other_ends = socket.socketpair()
    writer = Connection.__new__(Connection)
    writer._socket = other_ends[0]
    for fields in sent:
        writer.send("data", **{f"_{key}": value for key, value in fields.items()})
    other_ends[0].close()
    content = b""
    while chunk := other_ends[1].recv(1 << 16):
        content += chunk
    reader = Connection.__new__(Connection)
    reader._socket = ours
    reader._received = bytearray()
    reader.max_message_bytes = 1 << 24
    received = []
    position = 0
    for size in [*sizes, len(content)]:
        theirs.sendall(content[position : position + size])
        position += size
        received += reader.receive()
    assert received == [{"kind": "data", **{f"_{key}": value for key, value in fields.items()}} for fields in sent]
    for end in (ours, theirs, other_ends[1]):
        end.close()


@pytest.mark.parametrize(
    "line", [b"[1]\n", b"{}\n", b"[" * 100_000 + b"\n", b'{"kind": 3}\n', b"not JSON\n", b"\xff\n"]
)
def test_an_invalid_message_closes_the_connection(line: bytes) -> None:
    ours, theirs = socket.socketpair()
    reader = Connection.__new__(Connection)
    reader._socket = ours
    reader._received = bytearray()
    reader.max_message_bytes = 1 << 24
    theirs.sendall(line)
    with pytest.raises(ConnectionError):
        reader.receive()
    ours.close()
    theirs.close()


def test_connect_tries_each_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        write_address_file(tmp_path / "agents.json", ["192.0.2.invalid", "127.0.0.1"], port, "secret")
        connection, token = connect(tmp_path / "agents.json")
        assert token == "secret"
        connection.close()
    with pytest.raises(ConnectionError, match=str(port)):
        connect(tmp_path / "agents.json")


# ---- out of memory


def test_kills_are_counted_in_the_cgroups_of_the_job_only(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    job = tmp_path / "system.slice/slurmstepd.scope/job_7"
    step = job / "step_0/user/task_0"
    step.mkdir(parents=True)
    for folder, kills in ((step, 1), (job, 2), (job.parent, 40)):
        (folder / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\n")
    membership.write_text("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
    assert count_oom_kills(tmp_path, membership) == 3
    (tmp_path / "memory/slurm/uid_0/job_7/step_0").mkdir(parents=True)
    (tmp_path / "memory/slurm/uid_0/job_7/step_0/memory.oom_control").write_text("under_oom 0\noom_kill 5\n")
    membership.write_text("9:memory:/slurm/uid_0/job_7/step_0\n3:cpuset:/slurm\n")
    assert count_oom_kills(tmp_path, membership) == 5
    assert count_oom_kills(tmp_path, tmp_path / "missing") == 0
