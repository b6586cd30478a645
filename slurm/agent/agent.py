"""The node agent: import the pipeline, fork the ranks of this node, send them signals, and report how they exit.

The agent waits for three things at once: messages of the supervisor, signals, and exits of ranks (SIGCHLD). Python's
signal handlers do nothing here. The kernel wakes the agent through a socket (signal.set_wakeup_fd).

If the connection to the supervisor is lost, the ranks of this node end: first with TERM, so that they can save, and
later with KILL. If the node of the supervisor has failed, the agent then requeues the job.

With `checkpoint.mode: async`, the agent also forks a saver for each rank of the train stage, which writes its
checkpoints (pipeline/checkpoint/saver.py). The agent sends no signals to savers. They exit when their rank has exited
and the save in progress has ended.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.base.files import raise_open_file_limit
from pipeline.base.ports import listen_on_master_port
from pipeline.base.signals import STOP_SIGNALS
from pipeline.run.directory import Run
from pipeline.run.events import utc_timestamp
from pipeline.run.failure import explain_error
from pipeline.run.stages import load_stage_module
from slurm.agent.child import Child
from slurm.agent.messages import SAVE_WAIT_S, Connection, Message, RankTask, connect
from slurm.agent.oom import count_oom_kills
from slurm.agent.requeue import requeue_after_loss_of_supervisor

STOP_GRACE_S = 60.0
"""How long the ranks may take to exit after TERM, in addition to the time for a save (`recovery.save_s`), if the
supervisor has exited."""


class Agent:
    """The agent of this node.

    Args:
        stage: the stage whose ranks the agent forks.
        run_path: the run directory.
        address_file: the file with the address of the supervisor.
        early_signals: stop signals that arrived before this object existed.
    """

    def __init__(self, stage: str, run_path: Path, address_file: Path, early_signals: Sequence[int] = ()) -> None:
        self._stage = stage
        self._run_path = run_path
        self._address_file = address_file
        self._rank_by_pid: dict[int, int] = {}
        """The running ranks, by their process ids."""
        self._pending_signals = list(early_signals)
        """Stop signals that arrived while no rank was running. The ranks get them when they are forked."""
        self._attempt = 0
        """The attempt of the running ranks."""
        self._listener: socket.socket | None = None
        """The port that the agent opened for rank 0 of the next attempt."""
        self._snapshot_buffers: dict[int, tuple[int, ...]] = {}
        """The file descriptors of the buffers for the snapshots of each rank."""
        self._copy_buffers: dict[int, tuple[int, ...]] = {}
        """The file descriptors of the buffers in which each rank keeps the snapshots of another rank."""
        self._saver_pipes: dict[int, int] = {}
        """The running savers: the reading end of a pipe to each, by their process ids. Nothing is sent through the
        pipe. It reaches its end when the saver exits."""
        self._oom_kills = 0
        """The number of processes that the kernel has killed for lack of memory in this agent's cgroups."""
        self._connection: Connection

    def run(self) -> int:
        """Serve the supervisor until it sends `exit` or the connection is lost. Return the exit code."""
        wake_up = _install_signal_handlers()
        raise_open_file_limit()
        self._connection, token = connect(self._address_file)
        node = int(os.environ.get("SLURM_NODEID") or 0)
        try:
            self._connection.send("hello", token=token, node=node, host=os.uname().nodename, pid=os.getpid())
            try:
                preload(Run.open(self._run_path), self._stage)
            except BaseException as error:
                code, message = explain_error(error)
                self._connection.send("failed", code=int(code), message=message)
                return int(code)
            self._oom_kills = count_oom_kills()
            self._connection.send("ready")
            self._serve(wake_up)
        except ConnectionError as error:
            print(f"{utc_timestamp()} the supervisor is gone ({error})", flush=True)
            run = Run.open(self._run_path)
            self._end_ranks(signal.SIGTERM, STOP_GRACE_S + run.config.recovery.save_s, wake_up)
            self._wait_for_savers(wake_up)
            requeue_after_loss_of_supervisor(run, self._stage, node)
        finally:
            self._end_ranks(signal.SIGKILL, STOP_GRACE_S, wake_up)
            self._wait_for_savers(wake_up)
        return 0

    def _serve(self, wake_up: socket.socket) -> None:
        """Handle messages, signals and exits until the supervisor sends `exit`.

        Raises:
            ConnectionError: if the connection was closed.
        """
        while True:
            readable, _, _ = select.select([self._connection.fileno(), wake_up.fileno()], [], [], 1.0)
            if wake_up.fileno() in readable:
                self._handle_signals(wake_up)
            if self._connection.fileno() in readable:
                for message in self._connection.receive():
                    if message["kind"] == "exit":
                        return
                    self._handle(message)

    def _handle(self, message: Message) -> None:
        """Handle a message of the supervisor (slurm/agent/messages.py)."""
        match message["kind"]:
            case "ping":
                self._connection.send("pong")
            case "listen":
                self._listen(message["backlog"], message["local"])
            case "fork":
                self._signal_ranks(signal.SIGKILL)  # There are only ranks if they did not exit when they were killed.
                self._attempt = message["attempt"]
                self._oom_kills = count_oom_kills()
                tasks = [RankTask(**arguments) for arguments in message["ranks"]]
                for buffers in (self._snapshot_buffers, self._copy_buffers):
                    for rank in buffers.keys() - {task.rank for task in tasks}:  # The rank has moved to another node.
                        for buffer in buffers.pop(rank):
                            os.close(buffer)
                previous_savers = dict(self._saver_pipes)
                pids = {task.rank: self._fork(task, previous_savers) for task in tasks}
                self._rank_by_pid = {pid: rank for rank, pid in pids.items()}
                if self._listener is not None:
                    self._listener.close()  # Rank 0 has inherited it.
                    self._listener = None
                for number in self._pending_signals:
                    self._signal_ranks(number)
                self._pending_signals.clear()
                self._connection.send("forked", attempt=self._attempt, pids=pids)
                self._report_exits()  # A rank may have exited before it was in `_rank_by_pid`.
            case "signal":
                self._signal_ranks(message["number"])

    def _listen(self, backlog: int, local: bool) -> None:
        """Open a free port for rank 0, and report it. If `local`, only this machine can connect."""
        if self._listener is not None:
            self._listener.close()
        self._listener = listen_on_master_port(backlog, local=local)
        self._connection.send("listening", port=self._listener.getsockname()[1])

    def _fork(self, task: RankTask, previous_savers: Mapping[int, int]) -> int:
        """Fork a rank, and its saver if it has one. Return the process id of the rank.

        Args:
            task: the rank.
            previous_savers: the savers of earlier attempts: the reading end of a pipe to each, by their process ids.
        """
        agent_pid = os.getpid()
        child = Child(task, self._stage, self._run_path, agent_pid, *self._create_buffers(task))
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that arrives before the child has its own handlers must not wake the agent.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        rank_socket, saver_socket = socket.socketpair()
        with rank_socket, saver_socket:
            if task.has_saver:
                self._fork_saver(child, rank_socket, saver_socket)
            pid = os.fork()
            if pid == 0:
                listen_fd = self._detach_listener() if task.listens else None
                self._close_in_child()
                saver_socket.close()
                child.run_rank(listen_fd, rank_socket.detach() if task.has_saver else None, previous_savers)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return pid

    def _fork_saver(self, child: Child, rank_socket: socket.socket, saver_socket: socket.socket) -> None:
        """Fork the saver of a rank.

        Args:
            child: the rank.
            rank_socket: the end of their connection that the rank gets.
            saver_socket: the end that the saver gets.
        """
        pipe, saver_pipe = os.pipe()  # Only the saver keeps the writing end, so it is closed when the saver exits.
        pid = os.fork()
        if pid == 0:
            self._close_in_child()
            rank_socket.close()
            child.run_saver(saver_socket.detach())
        os.close(saver_pipe)
        self._saver_pipes[pid] = pipe

    def _create_buffers(self, task: RankTask) -> tuple[Sequence[int], Sequence[int]]:
        """Return the buffers of a rank for its own snapshots and for those of another rank. Create missing ones."""
        if not task.snapshot_buffers:
            return (), ()
        from pipeline.checkpoint.memory_snapshot import create_buffers

        if task.rank not in self._snapshot_buffers:
            self._snapshot_buffers[task.rank] = create_buffers(task.rank, task.snapshot_buffers)
            self._copy_buffers[task.rank] = create_buffers(task.rank, task.copy_buffers)
        return self._snapshot_buffers[task.rank], self._copy_buffers[task.rank]

    def _detach_listener(self) -> int | None:
        """Return the file descriptor of the port for rank 0, which this object then no longer closes."""
        return self._listener.detach() if self._listener is not None else None

    def _close_in_child(self) -> None:
        """Close what a forked child must not keep open."""
        self._connection.close()
        if self._listener is not None:
            self._listener.close()

    def _handle_signals(self, wake_up: socket.socket) -> None:
        """Report exits of ranks, and pass stop signals on to the ranks. Slurm may have sent them only to this agent."""
        numbers = set(wake_up.recv(4096))
        for number in sorted(numbers & set(STOP_SIGNALS)):
            if self._rank_by_pid:
                self._signal_ranks(number)
            else:
                self._pending_signals.append(number)
        if signal.SIGCHLD in numbers:
            self._report_exits()

    def _signal_ranks(self, number: int) -> None:
        """Send a signal to all running ranks."""
        for pid in self._rank_by_pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _report_exits(self) -> None:
        """Report the ranks that have exited since the last call."""
        self._reap_savers()
        for pid, rank in list(self._rank_by_pid.items()):
            exited_pid, status = os.waitpid(pid, os.WNOHANG)
            if exited_pid == 0:
                continue
            del self._rank_by_pid[pid]
            with suppress(ProcessLookupError):  # Only ranks that run a command have a process group of their own.
                os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(status)
            previous_kills = self._oom_kills
            self._oom_kills = count_oom_kills()
            out_of_memory = code == -signal.SIGKILL and self._oom_kills > previous_kills
            snapshot_step = 0
            if rank in self._snapshot_buffers:
                from pipeline.checkpoint.memory_snapshot import read_snapshot_step

                snapshot_step = read_snapshot_step(self._snapshot_buffers[rank])
            self._connection.send(
                "exited",
                attempt=self._attempt,
                rank=rank,
                code=code,
                out_of_memory=out_of_memory,
                snapshot_step=snapshot_step,
            )

    def _end_ranks(self, number: signal.Signals, timeout_s: float, wake_up: socket.socket) -> None:
        """Send a signal to all ranks and wait until they have exited, at most `timeout_s` seconds."""
        self._signal_ranks(number)
        deadline = time.monotonic() + timeout_s
        while self._rank_by_pid and time.monotonic() < deadline:
            select.select([wake_up], [], [], 1.0)
            with suppress(BlockingIOError):
                wake_up.recv(4096)
            for pid in list(self._rank_by_pid):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self._rank_by_pid[pid]
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)

    def _wait_for_savers(self, wake_up: socket.socket) -> None:
        """Wait until the saves in progress have ended, at most `SAVE_WAIT_S` seconds. Then kill the savers."""
        deadline = time.monotonic() + SAVE_WAIT_S
        while self._saver_pipes and time.monotonic() < deadline:
            select.select([wake_up], [], [], 1.0)
            with suppress(BlockingIOError):
                wake_up.recv(4096)
            self._reap_savers()
        for pid in self._saver_pipes:
            os.kill(pid, signal.SIGKILL)

    def _reap_savers(self) -> None:
        """Forget the savers that have exited."""
        for pid, pipe in list(self._saver_pipes.items()):
            exited_pid, status = os.waitpid(pid, os.WNOHANG)
            if exited_pid:
                del self._saver_pipes[pid]
                os.close(pipe)
                if os.WIFSIGNALED(status):  # If memory was lacking, no rank was killed for this reason.
                    print(f"{utc_timestamp()} a saver was killed by signal {os.WTERMSIG(status)}", flush=True)
                    self._oom_kills = count_oom_kills()


def _install_signal_handlers() -> socket.socket:
    """Return a socket that receives the number of each signal as a byte: stop signals and SIGCHLD."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reader


def preload(run: Run, stage: str) -> None:
    """Import what the ranks of a stage import, and prepare the process for forks.

    The objects that exist now are frozen (gc.freeze), so that the garbage collector of a rank does not write to memory
    that the ranks share with the agent.
    """
    gc.disable()  # The collector would scan the growing heap repeatedly, a fifth of the time of all imports.
    module = load_stage_module(run, stage)
    import_modules = getattr(module, "preload", None)
    if import_modules is not None:
        import_modules(run)
    gc.freeze()
    threads = threading.enumerate()
    if len(threads) > 1:
        names = ", ".join(thread.name for thread in threads[1:])
        print(f"warning: threads run in the agent, so a forked rank may hang: {names}", flush=True)


faulthandler.enable()
