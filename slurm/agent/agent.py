"""The node agent: import the pipeline, fork the ranks of this node, send them signals, and report how they exit.

The agent waits for three things at once: messages of the supervisor, signals, and exits of ranks (SIGCHLD). Python's
signal handlers do nothing here. The kernel wakes the agent through a socket (signal.set_wakeup_fd).

If the connection to the supervisor is lost, the ranks of this node end: first with TERM, so that they can save, and
later with KILL. If the node of the supervisor has failed, the agent then requeues the job.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pipeline.base.files import raise_open_file_limit
from pipeline.base.signals import STOP_SIGNALS, StopFlag
from pipeline.run.directory import Run
from pipeline.run.events import utc_timestamp
from pipeline.run.failure import explain_error
from pipeline.run.stages import load_stage_module
from slurm.agent.messages import Connection, Message, RankTask, connect, listen
from slurm.agent.oom import count_oom_kills
from slurm.agent.requeue import requeue_after_loss_of_supervisor

STOP_GRACE_S = 60.0
"""How long the ranks may take to exit after TERM, in addition to the time for a save (`recovery.save_s`), if the
supervisor has exited."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
"""Operations of prctl(2) (linux/prctl.h): the signal when the parent dies, and the name of the process."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of the system call set_mempolicy(2), by architecture."""


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
        """The file descriptors of the buffers for snapshots, by rank."""
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
            requeue_after_loss_of_supervisor(run, self._stage, node)
        finally:
            self._end_ranks(signal.SIGKILL, STOP_GRACE_S, wake_up)
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
                for rank in self._snapshot_buffers.keys() - {task.rank for task in tasks}:
                    for buffer in self._snapshot_buffers.pop(rank):  # The rank has moved to another node.
                        os.close(buffer)
                pids = {task.rank: self._fork(task) for task in tasks}
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
        self._listener = listen(backlog, local=local)
        self._connection.send("listening", port=self._listener.getsockname()[1])

    def _fork(self, task: RankTask) -> int:
        """Fork a rank and return its process id."""
        agent_pid = os.getpid()
        buffers = None
        if task.snapshot_buffers:
            from pipeline.checkpoint.memory_snapshot import create_buffers

            if task.rank not in self._snapshot_buffers:
                self._snapshot_buffers[task.rank] = create_buffers(task.rank, task.snapshot_buffers)
            buffers = self._snapshot_buffers[task.rank]
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that arrives before the rank has its own handlers must not wake the agent.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        pid = os.fork()
        if pid == 0:
            listen_fd = self._listener.detach() if task.listens and self._listener is not None else None
            self._connection.close()
            _run_rank(task, self._stage, self._run_path, agent_pid, listen_fd, buffers)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return pid

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
        for pid, rank in list(self._rank_by_pid.items()):
            exited_pid, status = os.waitpid(pid, os.WNOHANG)
            if exited_pid == 0:
                continue
            del self._rank_by_pid[pid]
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
    module = load_stage_module(stage)
    import_modules = getattr(module, "preload", None)
    if import_modules is not None:
        import_modules(run)
    gc.freeze()
    threads = threading.enumerate()
    if len(threads) > 1:
        names = ", ".join(thread.name for thread in threads[1:])
        print(f"warning: threads run in the agent, so a forked rank may hang: {names}", flush=True)


def _run_rank(
    task: RankTask,
    stage: str,
    run_path: Path,
    agent_pid: int,
    listen_fd: int | None,
    snapshot_buffers: tuple[int, ...] | None,
) -> NoReturn:
    """Become a rank, run the stage, and exit. Call this in a forked child whose stop signals are blocked.

    Args:
        task: the rank.
        stage: the stage.
        run_path: the run directory.
        agent_pid: the process id of the agent.
        listen_fd: a socket that listens for the other ranks; None except for rank 0.
        snapshot_buffers: the file descriptors of the buffers for snapshots; None without snapshots.
    """
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        flag = StopFlag().install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, f"sluice-rank-{task.rank}".encode())
        if os.getppid() != agent_pid:
            os._exit(1)  # The agent died before the kernel was asked to report that.
        os.environ.update(task.environment)
        if listen_fd is not None:
            os.environ["SLUICE_LISTEN_FD"] = str(listen_fd)
        if snapshot_buffers is not None:
            os.environ["SLUICE_SNAPSHOT_FDS"] = ",".join(map(str, snapshot_buffers))
        log = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)  # The umask removes permissions.
        with suppress(OSError):  # The disk may be full. The stage then fails with a message about it.
            os.write(log, f"--- {utc_timestamp()} rank {task.rank}\n".encode())
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        if task.cpus:
            os.sched_setaffinity(0, task.cpus)
        if task.memory_policy is not None:
            _set_memory_policy(libc, *task.memory_policy)
        from pipeline.__main__ import main

        code = main([stage, str(run_path)], flag)
    except BaseException:
        # Also SystemExit and KeyboardInterrupt: this process must never return into the code of the agent, of which it
        # is a copy. `finally` ends the process, so the traceback would be lost if it were not printed here.
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Exit without joining threads, because threads of a failed process group or save may wait for lost ranks
        # forever.
        os._exit(code)


def _set_memory_policy(libc: ctypes.CDLL, mode: int, node_mask: int) -> None:
    """Set the NUMA policy of this process. If the kernel refuses, print the reason: the rank works nevertheless."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None and libc.syscall(number, mode, ctypes.byref(ctypes.c_ulong(node_mask)), 64):
        print(f"the NUMA policy cannot be set: {os.strerror(ctypes.get_errno())}", flush=True)


faulthandler.enable()
