"""Start the node agents of a job, and let them fork the ranks of an attempt.

An agent is a process on each node that has imported the pipeline and forks ranks (slurm/agent). The agents live as long
as the job, so a restart of the ranks in the same job needs no imports. :class:`AgentPool` starts the agents, exchanges
messages with them and notices if one is lost. :class:`AgentLauncher` starts and controls the ranks of one attempt.

In a Slurm job, srun starts one agent per node, with all resources of the job on the node. A second, short job step has
the options of the ranks, and reports where and with which CPUs, GPUs and variables srun would have started each rank
(slurm/agent/report_placement.py). The agents fork the ranks accordingly. The job may have more nodes than the ranks
need. If the agent of a node is lost, a node without ranks takes its place in the next attempt.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import Any

from pipeline.base.dist_env import TIME_LEFT_VARIABLE, expand_hostlist, make_local_rank_env, read_granted_tasks
from pipeline.base.errors import ExitCode
from pipeline.base.files import raise_open_file_limit
from pipeline.base.ports import listen
from pipeline.run import stages
from pipeline.run.code import start_process
from pipeline.run.directory import Run
from slurm.agent.messages import (
    MAX_MESSAGE_BYTES,
    SAVE_WAIT_S,
    Connection,
    Message,
    RankTask,
    write_address_file,
)
from slurm.submit.site_environment import get_job_python
from slurm.supervise.launch import (
    KILL_WAIT_S,
    RankExit,
    RankLauncher,
    build_rank_command,
    build_rank_options,
    build_site_options,
    terminate_with_parent,
)
from slurm.supervise.slots import Slot, assign_slots, describe_rank

START_TIMEOUT_S = 900.0
"""How long the agents may take to start and import the pipeline. Imports are slow if many nodes read the same files."""
CONNECT_SPREAD_S = 180.0
"""How long after the first agent the other agents may connect. An agent connects before it imports the pipeline."""
PING_INTERVAL_S = 1.0
"""The pause between two questions to an agent whether it still responds."""
SILENT_S = 4.0
"""An agent that has not answered for this time is silent: its node may have failed."""
REPLY_TIMEOUT_S = 60.0
"""An agent that has not answered for this time is lost."""
SUSPENDED_S = 10.0
"""If the pause between two calls of :meth:`AgentPool.poll` is longer, the job may have been suspended. Agents then have
the full time again to answer."""
QUICK_START_S = 5.0
"""How long :meth:`AgentLauncher.start` waits for the answers of agents that are ready."""
EXIT_WAIT_S = 10.0
"""How long agents may take to exit when the supervisor no longer needs them."""
_MAX_FIRST_MESSAGE_CLIENTS = 1 << 16
"""The largest number of connections without a valid first message."""
_MAX_FIRST_MESSAGE_BYTES = 1 << 20
"""The longest valid first message of a connection."""
_FIRST_MESSAGE_TIMEOUT_S = 60.0
"""How long a connection may stay open without a first message."""
_RANK_PLACEMENT_OPTIONS = (
    "cpu-bind", "gpu-bind", "mem-bind", "cpus-per-task", "cpus-per-gpu", "gpus-per-task", "tres-per-task", "tres-bind",
    "distribution", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "threads-per-core",
    "hint", "exact", "whole", "overcommit", "exclusive", "mem", "mem-per-cpu", "mem-per-gpu", "label",
)  # fmt: skip
"""Options of `site.srun` that place or bind ranks. The step of the agents does not have these options."""
_RANK_PLACEMENT_VARIABLES = (
    "SLURM_CPU_BIND", "SLURM_GPU_BIND", "SLURM_MEM_BIND", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK",
    "SLURM_CPUS_PER_GPU", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_GPU", "SLURM_THREADS_PER_CORE", "SLURM_HINT",
    "SLURM_EXACT", "SLURM_WHOLE", "SLURM_OVERCOMMIT", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE",
)  # fmt: skip
"""Variables from which srun would read the same options. The srun of the agents does not get them."""


@dataclass
class _Agent:
    """A connected agent."""

    connection: Connection
    host: str
    pid: int
    is_ready: bool = False
    """Whether the agent has imported the pipeline."""
    port: int | None = None
    """The port that the agent opened for rank 0 of the next attempt."""
    ping_time: float | None = None
    """When the oldest unanswered ping was sent; None if all were answered."""


@dataclass
class _AttemptState:
    """What the agents have reported about the ranks of the current attempt."""

    number: int
    pids: dict[int, int] = field(default_factory=dict)
    exits: list[RankExit] = field(default_factory=list)
    """Exits that :class:`AgentLauncher` has not fetched yet."""
    snapshot_steps: dict[int, int] = field(default_factory=dict)
    """The step of the newest snapshot in memory of each rank that has exited."""


class AgentPool:
    """The agents of a job.

    Args:
        run: the run.
        stage: the stage.
        node_count: the number of nodes, each of which gets an agent. There may be more nodes than the ranks need.
        ranks_per_node: the number of ranks on each node.
        lock_fd: the file descriptor of the stage's lock. The agents and the ranks inherit it.
        on_slurm: whether srun starts the agents. Otherwise there is one agent on this machine.
        excluded_nodes: nodes of the job that get no agent, by their names in Slurm.

    Raises:
        UserError: if `site.container` is set, and a path cannot be mounted in the container.
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        node_count: int,
        ranks_per_node: int,
        lock_fd: int,
        *,
        on_slurm: bool,
        excluded_nodes: Sequence[str] = (),
    ) -> None:
        self._run = run
        self._stage = stage
        self.node_count = node_count if on_slurm else 1
        self._ranks_per_node = ranks_per_node
        self._slot_count = node_count * ranks_per_node
        self._excluded_nodes = excluded_nodes
        self._lock_fd = lock_fd
        self.on_slurm = on_slurm
        self._folder = run.stage_dir(stage)
        self.log = self._folder / ("agents.log" if on_slurm else "agent-0.log")
        """The output of srun, which starts the agents; outside Slurm, the output of the agent."""
        self._log_start = 0
        self._address_file = self._folder / "agents.json"
        self._token = secrets.token_hex(32)
        self._listener: socket.socket | None = None
        self._new_connections: dict[int, tuple[Connection, float]] = {}
        """Connections without a first message, by file descriptor, and the times at which they were accepted."""
        self._agents: dict[int, _Agent] = {}
        """The connected agents, by the index of their node in the agents' job step."""
        self._slots: dict[int, Slot] = {}
        """The reported slots, by the index of their task. Only in a Slurm job."""
        self._nodes: list[int] = []
        """The nodes that the ranks use, in the order in which they get ranks: indexes in :class:`Slot`."""
        self._assigned_slots: list[Slot] = []
        """The slot of each rank of the current attempt. Only in a Slurm job."""
        self._agent_by_node: dict[int, int] = {}
        """The key in `_agents` of each node, by the index of the node in :class:`Slot`."""
        self._node_names: list[str] = []
        """The name of each node in Slurm, by the index of the node in :class:`Slot`."""
        self.replacements: dict[str, str] = {}
        """The name of each node that has been replaced → the name of the node that replaced it."""
        self._programs: list[subprocess.Popen[bytes]] = []
        """The program that starts the agents and, in a Slurm job, the one that reports the placement of ranks."""
        self._losses: dict[int, str] = {}
        """Why agents are lost, by their keys in `_agents`."""
        self._silent_hosts: list[str] = []
        """Hosts whose agents are lost because they did not answer."""
        self.rank_count = 0
        """The number of ranks of the current attempt."""
        self.was_ready = False
        """Whether the agents have been able to fork ranks."""
        self.job_deadline: float | None = None
        """When the job reaches its time limit, by the monotonic clock; None if unknown or unlimited."""
        self._start_deadline = 0.0
        self._first_hello: float | None = None
        """When the first agent connected, by the monotonic clock."""
        self._next_ping_time = 0.0
        self._last_poll_time = time.monotonic()
        self.attempt = _AttemptState(0)
        self.failure: str | None = None
        """Why the agents cannot start ranks, now and later; None if nothing has failed."""
        self.failure_code = ExitCode.CRASHED
        """The exit code that describes `failure`."""
        self._commands = self._build_commands()

    # ---- start and end

    @property
    def is_started(self) -> bool:
        """True if :meth:`start` was called."""
        return self._listener is not None

    @property
    def is_ready(self) -> bool:
        """True if agents can fork ranks: at first all agents; later those that are not lost."""
        if self.was_ready:
            return self.failure is None
        has_slots = not self.on_slurm or len(self._slots) == self._slot_count
        has_agents = len(self._agents) == self.node_count and all(agent.is_ready for agent in self._agents.values())
        return self.failure is None and has_agents and has_slots

    def can_run(self, rank_count: int) -> bool:
        """Return True if the agents that are left can fork so many ranks."""
        if not self.on_slurm:
            return self.is_ready and bool(self._agents)
        return (
            self.was_ready and self.failure is None and len(self._list_usable_nodes()) >= self.count_nodes(rank_count)
        )

    def count_nodes(self, rank_count: int) -> int:
        """Return how many nodes the ranks need."""
        return -(-rank_count // self._ranks_per_node)

    def _list_usable_nodes(self) -> list[int]:
        """Return the nodes whose agents are not lost, as indexes in :class:`Slot`."""
        return [node for node, agent in sorted(self._agent_by_node.items()) if agent in self._agents]

    def start(self) -> None:
        """Start the agents. They connect later, so call :meth:`poll` until :attr:`is_ready`."""
        raise_open_file_limit()
        self._listener = listen(self._slot_count + self.node_count + 8, local=not self.on_slurm)
        self._listener.setblocking(False)
        hosts = _list_own_hosts() if self.on_slurm else ["127.0.0.1"]
        write_address_file(self._address_file, hosts, self._listener.getsockname()[1], self._token)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._start_deadline = time.monotonic() + START_TIMEOUT_S
        self._start_next_program()

    def _start_next_program(self) -> None:
        """Start the first program that was not started yet.

        The second program starts when all agents are connected. slurmd 22.05 can crash if several job steps start on a
        node at the same time.
        """
        command = self._commands[len(self._programs)]
        variables = {"SLUICE_SUPERVISED": "1"}
        with open(self.log, "ab") as log:
            program = start_process(
                self._run.code_dir, command, log, variables, (self._lock_fd,), terminate_with_parent
            )
        self._programs.append(program)

    def _build_commands(self) -> list[list[str]]:
        """Return the command that starts the agents and, in a Slurm job, the one that reports placements."""
        arguments = ["-m", "slurm.agent", self._stage, str(self._run.path), str(self._address_file)]
        if not self.on_slurm:
            return [[sys.executable, *arguments]]
        site = self._run.config.resolve_site(self._stage)
        rank_command = build_rank_command(self._run, self._stage)
        unset = [option for name in _RANK_PLACEMENT_VARIABLES for option in ("-u", name)]
        variables = [f"{name}={value}" for name, value in rank_command.variables.items()]
        has_node_range = stages.continues_without_node(self._run.config, self._stage)
        exclude = [f"--exclude={','.join(self._excluded_nodes)}"] if self._excluded_nodes else []
        options = [
            option
            for option in rank_command.srun
            if option.removeprefix("--").partition("=")[0] not in _RANK_PLACEMENT_OPTIONS
        ]
        agents = [
            *("env", *unset, *variables, "srun", *options),
            *(f"--nodes={self.node_count}", f"--ntasks={self.node_count}", "--ntasks-per-node=1", "--overlap"),
            *("--distribution=block", "--cpu-bind=none", "--mem=0", "--kill-on-bad-exit=0", "--wait=0"),
            *(["--no-kill"] if has_node_range else []),
            *exclude,
            *(["--gpu-bind=none"] if site.gpus_per_node else []),
            *("--open-mode=append", "--unbuffered", f"--output={self._folder}/agent-%n.log"),
            *(f"--chdir={self._run.code_dir}", *rank_command.program, *arguments),
        ]
        program = Path(self._run.code_dir) / "slurm/agent/report_placement.py"
        # A job with a range of nodes is submitted without this option (slurm/submit/sbatch.py).
        per_node = [f"--ntasks-per-node={self._ranks_per_node}"] if has_node_range else []
        placement = [
            *(
                "srun",
                *build_rank_options(self._run.config.get_stage(self._stage), self._slot_count, self.node_count),
                "--overlap",
                *exclude,
            ),
            *per_node,
            *build_site_options(site),
            *(get_job_python(site), "-I", "-S", str(program), str(self._address_file)),
        ]
        return [agents, placement]

    def close(self) -> None:
        """End the agents, and wait for their programs to exit."""
        for agent in self._agents.values():
            with suppress(ConnectionError):
                agent.connection.send("exit")
        self._wait_for_disconnections(SAVE_WAIT_S + EXIT_WAIT_S)
        deadline = time.monotonic() + EXIT_WAIT_S
        while any(program.poll() is None for program in self._programs):
            if time.monotonic() > deadline or not self._agents:
                for program in self._programs:
                    with suppress(ProcessLookupError):
                        # srun ends its step if it receives INT twice within a second (srun(1)).
                        is_late = time.monotonic() > deadline + KILL_WAIT_S
                        program.send_signal(signal.SIGINT if self.on_slurm and not is_late else signal.SIGKILL)
            time.sleep(0.05 if self._agents else 0.2)
        for connection in (*(agent.connection for agent in self._agents.values()), *self._list_new_connections()):
            connection.close()
        self._agents.clear()
        self._new_connections.clear()
        if self._listener is not None:
            self._listener.close()
        with suppress(OSError):
            self._address_file.unlink()

    def _wait_for_disconnections(self, timeout_s: float) -> None:
        """Wait until all agents that respond have closed their connections: at once, or after the save in progress."""
        deadline = time.monotonic() + timeout_s
        connected = {agent.connection for agent in self._agents.values() if agent.is_ready and agent.ping_time is None}
        while connected and time.monotonic() < deadline:
            readable, _, _ = select.select(connected, [], [], max(0.0, deadline - time.monotonic()))
            for connection in readable:
                try:
                    connection.receive()
                except ConnectionError:
                    connected.remove(connection)

    def restart_on(self, node_count: int) -> None:
        """Start again with fewer nodes. Call this if the agents could not start, perhaps because of a spare node."""
        print(f"{self.failure}\nstarting again without spare nodes", file=sys.stderr, flush=True)
        self.close()
        self._slots.clear()
        self._losses.clear()
        self._programs.clear()
        self.failure = None
        self.failure_code = ExitCode.CRASHED
        self._first_hello = None
        self.node_count = node_count
        self._slot_count = node_count * self._ranks_per_node
        self._commands = self._build_commands()
        self.start()

    # ---- messages

    def _list_new_connections(self) -> list[Connection]:
        """Return the connections without a first message."""
        return [connection for connection, _ in self._new_connections.values()]

    def poll(self, timeout_s: float = 0.0) -> None:
        """Handle connections and messages, waiting up to `timeout_s` seconds for the first one. Notice lost agents."""
        if self._listener is None:
            return
        node_by_descriptor = {agent.connection.fileno(): node for node, agent in self._agents.items()}
        poller = select.poll()  # select.select accepts no descriptor from 1024 on
        for descriptor in (self._listener.fileno(), *self._new_connections, *node_by_descriptor):
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(1000 * timeout_s):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._new_connections:
                self._read_first_message(descriptor)
            elif (node := node_by_descriptor[descriptor]) in self._agents:
                self._read_messages(node)
        self._check_agents()

    def _accept(self) -> None:
        """Accept all waiting connections."""
        assert self._listener is not None
        with suppress(OSError):  # No connection is waiting, or a client has gone away.
            while len(self._new_connections) < _MAX_FIRST_MESSAGE_CLIENTS:
                connected, _ = self._listener.accept()
                connection = Connection(connected, max_message_bytes=_MAX_FIRST_MESSAGE_BYTES)
                self._new_connections[connection.fileno()] = (connection, time.monotonic())

    def _read_first_message(self, descriptor: int) -> None:
        """Read the first message of a connection: an agent or a placement, with the token."""
        connection, _ = self._new_connections[descriptor]
        try:
            messages = connection.receive()
        except ConnectionError:
            messages = [{"kind": "closed"}]
        if not messages:
            return
        del self._new_connections[descriptor]
        message = messages[0]
        token = str(message.get("token", "")).encode(errors="replace")
        has_token = compare_digest(token, self._token.encode())
        if has_token and message["kind"] == "hello":
            connection.max_message_bytes = MAX_MESSAGE_BYTES
            self._agents[message["node"]] = _Agent(connection, message["host"], message["pid"])
            self._first_hello = self._first_hello or time.monotonic()
            for later_message in messages[1:]:
                self._handle(message["node"], later_message)
            return
        if has_token and message["kind"] == "placement":
            policy = message["memory_policy"]
            self._slots[message["task"]] = Slot(
                node=message["node"],
                task=message["task"],
                host=message["host"],
                environment=message["environment"],
                cpus=message["cpus"],
                memory_policy=(policy[0], policy[1]) if policy else None,
            )
        connection.close()

    def _read_messages(self, node: int) -> None:
        """Handle the messages that have arrived from an agent."""
        agent = self._agents[node]
        try:
            for message in agent.connection.receive():
                self._handle(node, message)
        except ConnectionError as error:
            self._lose(node, f"its agent (process {agent.pid}) ended: {error}")

    def _handle(self, node: int, message: Message) -> None:
        """Handle a message of the agent of a node (slurm/agent/messages.py)."""
        agent = self._agents[node]
        match message["kind"]:
            case "ready":
                agent.is_ready = True
            case "failed" if self.failure is None:
                self.failure = f"{agent.host}:\n{message['message']}"
                self.failure_code = ExitCode(message["code"])
            case "pong":
                agent.ping_time = None
            case "listening":
                agent.port = message["port"]
            case "forked" if message["attempt"] == self.attempt.number:
                self.attempt.pids |= {int(rank): pid for rank, pid in message["pids"].items()}
            case "exited" if message["attempt"] == self.attempt.number:
                code = int(ExitCode.OUT_OF_MEMORY) if message["out_of_memory"] else message["code"]
                self.attempt.exits.append(RankExit(message["rank"], code, agent.host))
                self.attempt.snapshot_steps[message["rank"]] = message["snapshot_step"]

    def _check_agents(self) -> None:
        """Send pings, and notice agents that are lost or cannot start."""
        now = time.monotonic()
        for descriptor, (connection, accept_time) in list(self._new_connections.items()):
            if now - accept_time > _FIRST_MESSAGE_TIMEOUT_S:
                connection.close()
                del self._new_connections[descriptor]
        was_suspended = now - self._last_poll_time > SUSPENDED_S
        self._last_poll_time = now
        for node, agent in list(self._agents.items()):
            if agent.ping_time is not None and was_suspended:
                agent.ping_time = now
            if agent.ping_time is not None and now - agent.ping_time > REPLY_TIMEOUT_S:
                self._silent_hosts.append(agent.host)
                self._lose(node, f"its agent (process {agent.pid}) did not answer for {REPLY_TIMEOUT_S:.0f} s")
        if now >= self._next_ping_time:
            self._next_ping_time = now + PING_INTERVAL_S
            for node, agent in list(self._agents.items()):
                if agent.is_ready and agent.ping_time is None:
                    agent.ping_time = now
                    self._send(node, "ping")
        if self.failure is None and not self.is_ready:
            self.failure = self._find_start_failure(now) or self._find_uneven_slots()
            are_connected = len(self._agents) == self.node_count
            if self.failure is None and are_connected and len(self._programs) < len(self._commands):
                self._start_next_program()

    def _find_uneven_slots(self) -> str | None:
        """Return why the slots cannot be used, if srun has distributed them unevenly over the nodes."""
        counts = Counter(slot.node for slot in self._slots.values())
        if len(self._slots) < self._slot_count or set(counts.values()) == {self._ranks_per_node}:
            return None
        counts_by_host = {slot.host: counts[slot.node] for slot in self._slots.values()}
        return f"srun put these numbers of ranks on the nodes, instead of {self._ranks_per_node} each: {counts_by_host}"

    def _find_start_failure(self, now: float) -> str | None:
        """Return why the agents cannot start; None if they may still start."""
        agents_program, *placement_programs = self._programs
        has_failed = agents_program.poll() is not None or any(
            program.poll() not in (None, 0) for program in placement_programs
        )
        # With --no-kill, srun does not fail if it cannot start a task on one of the nodes.
        is_late = self._first_hello is not None and now > self._first_hello + CONNECT_SPREAD_S
        if not has_failed and is_late and len(self._agents) < self.node_count:
            self.failure_code = ExitCode.NODE_FAILURE
            hosts = ", ".join(sorted(agent.host for agent in self._agents.values()))
            return f"only the agents on {hosts} have connected, of {self.node_count} nodes, in {CONNECT_SPREAD_S:.0f} s"
        if not has_failed and now < self._start_deadline:
            return None
        what = "srun could not start the agents of the ranks" if self.on_slurm else "the agent of the ranks exited"
        if not has_failed:
            what = f"the agents of the ranks were not ready within {START_TIMEOUT_S:.0f} s"
        logs = [self.log, *sorted(self._folder.glob("agent-*.log"))]
        texts = [self.log.read_bytes()[self._log_start :].decode(errors="replace")]
        texts += [log.read_text(errors="replace") for log in logs[1:3] if log != self.log]
        last_lines = "\n".join(line for text in texts for line in text.splitlines()[-10:])
        return f"{what}; the end of {self.log}:\n{last_lines}"

    def _lose(self, node: int, reason: str) -> None:
        """Record that an agent is lost. The kernel or the agent itself ends its ranks."""
        agent = self._agents.pop(node)
        agent.connection.close()
        self._losses[node] = f"{agent.host} was lost: {reason}"
        print(self._losses[node], file=sys.stderr, flush=True)
        if not self.was_ready and self.failure is None:
            self.failure = self._losses[node]

    def _send(self, node: int, kind: str, **fields: Any) -> None:
        """Send a message to the agent of a node. If that fails, the agent is lost."""
        try:
            self._agents[node].connection.send(kind, **fields)
        except ConnectionError as error:
            self._lose(node, str(error))

    def list_silent_hosts(self) -> list[str]:
        """Return the hosts whose agents have not answered for `SILENT_S` seconds, or are lost for this reason."""
        now = time.monotonic()
        return self._silent_hosts + [
            agent.host
            for agent in self._agents.values()
            if agent.ping_time is not None and now - agent.ping_time > SILENT_S
        ]

    def wait_for_answers(self, timeout_s: float) -> None:
        """Wait until each agent answers a question. Agents that do not answer within `timeout_s` seconds are lost."""
        self.poll()
        deadline = time.monotonic() + timeout_s
        for node, agent in list(self._agents.items()):
            if agent.is_ready and agent.ping_time is None:
                agent.ping_time = time.monotonic()
                self._send(node, "ping")
        while (silent_nodes := self._list_unanswered()) and time.monotonic() < deadline:
            self.poll(0.05)
        for node in silent_nodes:
            agent = self._agents[node]
            self._silent_hosts.append(agent.host)
            self._lose(node, f"its agent (process {agent.pid}) did not answer for {timeout_s:.0f} s")

    def _list_unanswered(self) -> list[int]:
        """Return the keys of the agents that have not answered a ping yet."""
        return [node for node, agent in self._agents.items() if agent.ping_time is not None]

    def exclude(self, names: Collection[str]) -> None:
        """End the agents on nodes that have failed, so that these nodes get no ranks any more.

        Args:
            names: the names of the nodes in Slurm.
        """
        for node in self._list_usable_nodes():
            if self._node_names[node] in names:
                key = self._agent_by_node[node]
                with suppress(ConnectionError):
                    self._agents[key].connection.send("exit")
                self._lose(key, "the node has failed")

    def list_lost_nodes(self) -> list[str]:
        """Return the names of the nodes whose agents are lost, as Slurm names them."""
        lost_nodes = self._agent_by_node.keys() - set(self._list_usable_nodes())
        return [self._node_names[node] for node in sorted(lost_nodes)]

    def list_used_nodes(self) -> list[str]:
        """Return the names of the nodes of the current attempt's ranks, as Slurm names them."""
        return [self._node_names[node] for node in self._nodes]

    def list_spare_nodes(self) -> list[str]:
        """Return the names of the nodes that have an agent and no ranks, as Slurm names them."""
        return [self._node_names[node] for node in self._list_usable_nodes() if node not in self._nodes]

    # ---- ranks

    def open_port(self, rank_count: int) -> None:
        """Choose the nodes of the ranks, and ask the agent of rank 0 to open a port, which :meth:`fork_ranks` needs.

        If too few agents are left, only set `failure`.
        """
        if self.was_ready and not self.can_run(rank_count):
            self.failure = "too few agents are left: " + "; ".join(self._losses.values())
            return
        self.rank_count = rank_count
        if self.on_slurm:
            if not self.was_ready:
                self._agent_by_node = self._find_agents()
                self._node_names = expand_hostlist(self._slots[0].environment["SLURM_STEP_NODELIST"])
            self._nodes = self._choose_nodes(self.count_nodes(rank_count))
            slots = [self._slots[task] for task in sorted(self._slots)]
            self._assigned_slots = assign_slots(slots, self._nodes, self._ranks_per_node, self._get_distribution())
        self.was_ready = True
        agent = self._get_agent(0)
        self._agents[agent].port = None
        self._send(agent, "listen", backlog=rank_count + 8, local=not self.on_slurm)

    def _get_distribution(self) -> str:
        """Return how srun distributes ranks: a value of its option `--distribution`."""
        _, granted = read_granted_tasks(os.environ) or ([], "block")
        return str(self._run.config.resolve_site(self._stage).srun.get("distribution") or granted)

    def _choose_nodes(self, count: int) -> list[int]:
        """Return the nodes of the next attempt. A node that has its agent keeps its place."""
        usable_nodes = self._list_usable_nodes()
        previous_nodes = self._nodes[:count] or usable_nodes[:count]
        free_nodes = [node for node in usable_nodes if node not in previous_nodes]
        nodes = []
        for node in previous_nodes:
            if node in usable_nodes:
                nodes.append(node)
                continue
            nodes.append(free_nodes.pop(0))
            if nodes[-1] not in self._nodes:  # Otherwise, the job continues on fewer nodes.
                replaced, replacing = self._node_names[node], self._node_names[nodes[-1]]
                self.replacements[replaced] = replacing
                print(f"{replacing} replaces {replaced}", flush=True)
        return nodes + free_nodes[: count - len(nodes)]

    @property
    def has_port(self) -> bool:
        """True if the agent of rank 0 has opened a port."""
        agent = self._get_agent(0)
        return agent in self._agents and self._agents[agent].port is not None

    def fork_ranks(self, attempt: int) -> None:
        """Let the agents fork the ranks of an attempt."""
        self.attempt = _AttemptState(attempt)
        port = self._agents[self._get_agent(0)].port
        assert port is not None
        tasks_by_agent: dict[int, list[RankTask]] = {}
        for task in self._list_tasks(port):
            tasks_by_agent.setdefault(self._get_agent(task.rank), []).append(task)
        for agent, tasks in tasks_by_agent.items():
            if agent in self._agents:
                self._send(agent, "fork", attempt=attempt, ranks=[asdict(task) for task in tasks])

    def _list_tasks(self, port: int) -> Iterator[RankTask]:
        """Yield the ranks to fork. Rank 0 listens on `port`."""
        checkpoint = self._run.config.checkpoint
        is_training = self._run.config.get_stage(self._stage).is_training
        has_snapshots = is_training and checkpoint.memory_every_steps is not None
        has_saver = is_training and checkpoint.mode == "async"
        memory: dict[str, Any] = {
            "snapshot_buffers": 2 * has_snapshots + has_saver,
            "copy_buffers": 2 * ((has_snapshots or has_saver) and checkpoint.memory_copies == 2),
            "has_saver": has_saver,
        }
        time_left = {name: os.environ[name] for name in (TIME_LEFT_VARIABLE,) if name in os.environ}
        if self.job_deadline is not None:  # The variable was set before the agents started.
            time_left[TIME_LEFT_VARIABLE] = str(max(0.0, self.job_deadline - time.monotonic()))
        for rank in range(self.rank_count):
            log = str(self._folder / f"rank-{rank}.log")
            if not self.on_slurm:
                environment = make_local_rank_env(rank, self.rank_count, port)
                yield RankTask(rank, environment | time_left, log, listens=rank == 0, **memory)
                continue
            slot = self._assigned_slots[rank]
            environment = dict(slot.environment)  # the variables that srun has set, if all slots have their ranks
            if (slot.task, self.rank_count) != (rank, self._slot_count):
                environment = describe_rank(rank, self._assigned_slots, self._node_names)
            master_host = self._node_names[self._assigned_slots[0].node]
            environment |= {"SLUICE_MASTER_HOST": master_host, "SLUICE_MASTER_PORT": str(port)} | time_left
            yield RankTask(rank, environment, log, slot.cpus, slot.memory_policy, listens=rank == 0, **memory)

    def get_snapshot_step(self) -> int:
        """Return the newest step of which every rank of the ended attempt may have a snapshot in memory; 0 if none."""
        steps = self.attempt.snapshot_steps
        is_complete = bool(steps) and len(steps) == self.rank_count and self.failure is None
        return min(steps.values()) if is_complete else 0

    def _get_agent(self, rank: int) -> int:
        """Return the key of the agent of a rank."""
        return self._agent_by_node[self._assigned_slots[rank].node] if self.on_slurm else 0

    def _find_agents(self) -> dict[int, int]:
        """Return the key of the agent of each node, by the index of the node in :class:`Slot`.

        Slurm could order the nodes of the two steps differently. Therefore the agent on the host of the slot is used,
        unless several agents have this hostname.
        """
        agent_by_node = {}
        for slot in self._slots.values():
            agents = [key for key, agent in self._agents.items() if agent.host == slot.host]
            agent_by_node[slot.node] = agents[0] if len(agents) == 1 else slot.node
        return agent_by_node

    @property
    def has_running_ranks(self) -> bool:
        """True if a rank of the current attempt has not exited, as far as its agent knows."""
        ranks_with_agent = set(self.attempt.pids).difference(self.find_ranks_without_agent())
        return not ranks_with_agent <= self.attempt.snapshot_steps.keys()

    def find_ranks_without_agent(self) -> list[int]:
        """Return the ranks whose agent is lost."""
        return [rank for rank in range(self.rank_count) if self._get_agent(rank) not in self._agents]

    def describe_loss(self, rank: int) -> str:
        """Return why the agent of a rank is lost; "" if it is not lost."""
        return self._losses.get(self._get_agent(rank), "")

    def get_host(self, rank: int) -> str:
        """Return the host of a rank."""
        return self._assigned_slots[rank].host if self.on_slurm else os.uname().nodename

    def signal_ranks(self, number: int) -> None:
        """Send a signal to all ranks."""
        for node in list(self._agents):
            self._send(node, "signal", number=int(number))


class AgentLauncher(RankLauncher):
    """Lets the agents fork the ranks of one attempt.

    Args:
        run: the run.
        stage: the stage.
        rank_count: the number of ranks.
        pool: the agents.
        attempt: the number of the attempt.
    """

    def __init__(self, run: Run, stage: str, rank_count: int, pool: AgentPool, attempt: int) -> None:
        super().__init__(run, stage, rank_count)
        self._pool = pool
        self._attempt = attempt
        self._has_opened_port = False
        self._are_forked = False
        self._running_ranks: set[int] = set()
        self._pending_exits: list[RankExit] = []
        """Exits of ranks that no agent reports."""

    def start(self) -> None:
        """Start the agents if they do not run yet. If they are ready, let them fork the ranks."""
        self._running_ranks = set(range(self.rank_count))
        if not self._pool.is_started:
            self._pool.start()
        deadline = time.monotonic() + QUICK_START_S
        self._advance()
        while self._has_opened_port and not self._are_forked and time.monotonic() < deadline:
            self._pool.poll(0.05)
            self._advance()

    def _advance(self) -> None:
        """Take the next step towards running ranks: wait for the agents, open a port, fork."""
        if self._are_forked or not self._running_ranks:
            return
        needed_nodes = self._pool.count_nodes(self.rank_count)
        if self._pool.failure is not None and not self._pool.was_ready and needed_nodes < self._pool.node_count:
            self._pool.restart_on(needed_nodes)
        elif self._pool.failure is not None:
            self._end_all(RankExit(0, int(self._pool.failure_code), description=self._pool.failure))
        elif self._pool.is_ready and not self._has_opened_port:
            self._has_opened_port = True
            self._pool.open_port(self.rank_count)
        elif self._has_opened_port and (lost_ranks := self._pool.find_ranks_without_agent()):
            rank = lost_ranks[0]
            description = self._pool.describe_loss(rank)
            self._end_all(RankExit(rank, -signal.SIGKILL, self._pool.get_host(rank), description))
        elif self._has_opened_port and self._pool.has_port:
            self._are_forked = True
            self._pool.fork_ranks(self._attempt)

    def _end_all(self, first_exit: RankExit) -> None:
        """Record that no rank runs. `first_exit` is the exit of the first rank."""
        self._pending_exits.append(first_exit)
        self._running_ranks.clear()

    @property
    def is_running(self) -> bool:
        """True while any rank is running or will be started, or an exit has not been fetched with :meth:`poll`."""
        return bool(self._running_ranks or self._pending_exits)

    @property
    def rank_processes(self) -> dict[int, tuple[str, int]]:
        """Host and process id of each rank; empty until all agents have forked their ranks."""
        pids = self._pool.attempt.pids if self._are_forked else {}
        return {rank: (self._pool.get_host(rank), pids[rank]) for rank in sorted(pids)} if self._has_all(pids) else {}

    def _has_all(self, pids: dict[int, int]) -> bool:
        return len(pids) == self.rank_count

    def poll(self) -> list[RankExit]:
        """Return the exits of the ranks that have exited since the last call."""
        self._pool.poll()
        self._advance()
        exits = self._pending_exits
        self._pending_exits = []
        if not self._are_forked:
            return exits
        exits += self._pool.attempt.exits
        self._pool.attempt.exits = []
        self._running_ranks -= {rank_exit.rank for rank_exit in exits}
        # The exits of these ranks cannot be reported any more. The kernel kills the ranks of a dead agent.
        for rank in self._running_ranks.intersection(self._pool.find_ranks_without_agent()):
            description = self._pool.describe_loss(rank)
            exits.append(RankExit(rank, -signal.SIGKILL, self._pool.get_host(rank), description))
            self._running_ranks.discard(rank)
        return exits

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to every running rank. Ranks that are not forked yet are not forked any more."""
        if self._are_forked:
            self._pool.signal_ranks(signal_number)
        elif self._running_ranks:
            self._end_all(RankExit(0, -signal_number))

    def kill(self) -> None:
        """Kill all ranks and wait for them to exit, at most `KILL_WAIT_S` seconds. Their exits are not reported."""
        self.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_WAIT_S
        while self.is_running and time.monotonic() < deadline:
            self._pool.poll(0.01)
            self.poll()
        self._running_ranks.clear()
        self._pending_exits.clear()


def _list_own_hosts() -> list[str]:
    """Return names and addresses of this machine, under which agents on other nodes try to connect to it."""
    names = [os.environ.get("SLURMD_NODENAME"), os.uname().nodename]
    hosts = [name for name in names if name]
    with suppress(OSError):
        addresses: Sequence[Any] = socket.getaddrinfo(os.uname().nodename, None, type=socket.SOCK_STREAM)
        hosts += [address[4][0] for address in addresses]
    return list(dict.fromkeys(hosts))
