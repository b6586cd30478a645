"""Stages that run a command: the process of each rank starts the command, watches it, and explains its end.

A process of the stage sets the variables that `torchrun` sets (RANK, WORLD_SIZE, MASTER_ADDR …), and runs the command
with `sh -c` in the working directory of the run. When the ranks shall stop, it asks the command to save and exit:
through the file that `sluice.should_stop` reads, or by a signal if the command has never called this function.

The process becomes the parent of the processes that the command leaves behind (a subreaper, prctl(2)), so that it
finds and ends them all. They are also in its process group, so that the node agent ends them if this process is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.base.dist_env import RankInfo, read_time_limit_s
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import read_json, write_json
from pipeline.base.ports import listen_on_master_port
from pipeline.base.prctl import become_subreaper, set_parent_death_signal
from pipeline.base.signals import STOP_SIGNALS, StopFlag
from pipeline.command.client_files import CLIENT_PATH, ClientFiles
from pipeline.command.monitor import CommandMonitor, get_progress_file
from pipeline.command.outcome import explain_exit, read_end
from pipeline.config.stages import CommandStage, fill_placeholders
from pipeline.run.directory import Run
from pipeline.run.events import Saved, Started
from pipeline.run.stages import Progress, get_array_task

TEMPORARY_FAILURE = 75
"""Exit code of a command that has saved its state and wants to run again (EX_TEMPFAIL of sysexits.h)."""
KILL_WAIT_S = 10.0
"""How long to wait until the processes of a command have exited after KILL."""
HANG_EXIT_DELAY_S = 3.0
"""The pause between a hang report and the exit. Ranks that wait for the hanging rank then write their reports, too."""
SIGNAL_SPREAD_S = 2.0
"""The longest time between the arrivals of a signal at two processes, if Slurm sends it to all processes of a job."""
POLL_S = 0.1
"""The pause between two checks of the command and of the request to stop."""


class CommandError(UserError):
    """A command has failed.

    Args:
        exit_code: the cause.
        message: how the command ended, with the end of its output.
    """

    def __init__(self, exit_code: ExitCode, message: str) -> None:
        super().__init__("command.failed", message)
        self.exit_code = exit_code  # type: ignore[misc]


def make_stage_module(stage: str) -> CommandModule:
    """Return the functions of a stage that runs a command."""
    return CommandModule(stage)


class CommandModule:
    """The functions of a stage that runs a command (pipeline/run/stages.py).

    Args:
        stage: the stage.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def _get_section(self, run: Run) -> CommandStage:
        """Return the section of the stage in the config."""
        return run.config.stages.commands[self.stage]

    def _get_command(self, run: Run) -> str:
        """Return the command with the values of its parameters."""
        return fill_placeholders(self._get_section(run).command, run.config.parameters)

    # -- outputs and progress ----------------------------------------------------------------------------

    def describe_missing_outputs(self, run: Run) -> str | None:
        """Return why the stage is not done: the command has not exited with 0, or an output is missing."""
        section = self._get_section(run)
        unfinished = [task for task in range(section.tasks) if not self._is_finished(run, task)]
        if unfinished and section.tasks > 1:
            return f"{len(unfinished)} of {section.tasks} tasks have not exited with 0"
        if unfinished:
            return "the command has not exited with 0"
        for pattern in section.outputs:
            if next(find_files(run, pattern), None) is None:
                return f"there is no {pattern} in {run.work_dir}"
        return None

    def _get_marker(self, run: Run, task: int, rank: int) -> Path:
        """Return the file that shows that the command of a rank has exited with 0."""
        return run.jobs_dir / self.stage / "finished" / f"task-{task}-rank-{rank}.json"

    def _is_finished(self, run: Run, task: int) -> bool:
        """Return True if the commands of all ranks of a task have exited with 0, and are still those of the config."""
        command = self._get_command(run)
        first = self._read_marker(run, task, 0)
        if first is None:
            return False
        markers = [first, *(self._read_marker(run, task, rank) for rank in range(1, first["world_size"]))]
        return all(marker == {"world_size": first["world_size"], "command": command} for marker in markers)

    def _read_marker(self, run: Run, task: int, rank: int) -> dict[str, Any] | None:
        """Return the content of a marker; None if there is none."""
        with suppress(OSError, ValueError):
            marker = read_json(self._get_marker(run, task, rank))
            if isinstance(marker, dict) and isinstance(marker.get("world_size"), int):
                return marker
        return None

    def progress(self, run: Run) -> Progress:
        """Return how many tasks have finished, the last step, or the newest file that shows the progress."""
        section = self._get_section(run)
        if section.tasks > 1:
            finished = sum(self._is_finished(run, task) for task in range(section.tasks))
            return Progress(f"{finished}/{section.tasks} tasks", finished, section.tasks, f"{finished}/{section.tasks}")
        is_done = self.describe_missing_outputs(run) is None
        if (report := _read_progress_report(run, self.stage)) is not None:
            return _describe_step(report, is_done)
        newest, count = self._find_newest_file(run)
        if newest is not None:
            name = os.path.relpath(newest, run.work_dir)
            return Progress(f"{count} file{'s' * (count != 1)}, newest {name}", running_description=f"newest {name}")
        return Progress("finished" if is_done else "-")

    def describe_saved_progress(self, run: Run) -> str:
        """Return a string that changes when a file that shows the progress is new or has changed."""
        newest, count = self._find_newest_file(run)
        saved_count = len(run.read_events(self.stage, Saved))
        finished = sum(self._is_finished(run, task) for task in range(self._get_section(run).tasks))
        stamp = _read_mtime_ns(newest) if newest is not None else 0
        return f"{count} files, newest {newest} of {stamp}, {saved_count} saved, {finished} tasks finished"

    def _find_newest_file(self, run: Run) -> tuple[Path | None, int]:
        """Return the newest file that matches `progress`, None if there is none, and the number of these files."""
        pattern = self._get_section(run).progress
        files = list(find_files(run, pattern)) if pattern is not None else []
        return max(files, key=_read_mtime_ns, default=None), len(files)

    # -- running the command -----------------------------------------------------------------------------

    def run_stage(self, run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
        """Run the command of this rank; in the job after an array, those of all unfinished tasks, one after the other.

        Raises:
            CommandError: if the command failed.
        """
        section = self._get_section(run)
        if rank_info.listen_fd is not None:
            os.close(rank_info.listen_fd)  # The command of rank 0 listens on this port itself.
        if section.tasks == 1:
            return self._run_command(run, rank_info, None, flag)
        task = get_array_task(run, self.stage, rank_info)
        own_tasks = range(rank_info.rank, section.tasks, rank_info.world_size) if task is None else [task]
        for own_task in own_tasks:
            if not self._is_finished(run, own_task):
                with listen_on_master_port(1, local=True) as server:
                    port = server.getsockname()[1]  # Other tasks may run on this node at the same time.
                alone = replace(
                    rank_info, rank=0, world_size=1, local_rank=0, local_world_size=1, master_host="127.0.0.1",
                    master_port=port,
                )  # fmt: skip
                code = self._run_command(run, alone, own_task, flag)
                if code != ExitCode.DONE:
                    return code
        return ExitCode.DONE

    def _run_command(self, run: Run, rank_info: RankInfo, task: int | None, flag: StopFlag) -> ExitCode:
        """Run the command once, and wait until all its processes have exited."""
        if flag:
            return ExitCode.STOPPED
        section = self._get_section(run)
        command = self._get_command(run)
        marker = self._get_marker(run, task or 0, rank_info.rank)
        marker.parent.mkdir(exist_ok=True)
        marker.unlink(missing_ok=True)
        become_subreaper()
        with suppress(PermissionError):  # The leader of a session already has its own group.
            os.setpgid(0, 0)
        output = Path(os.path.realpath("/proc/self/fd/1"))
        output_start = output.stat().st_size if output.is_file() else 0
        with ClientFiles(f"{run.path} {self.stage} {task} {rank_info.rank}") as client:
            process = subprocess.Popen(
                ["sh", "-c", command],
                cwd=run.work_dir,
                env={**make_environment(run, self.stage, rank_info, task, flag), **client.environment},
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: _prepare_child(section),
            )
            monitor = CommandMonitor(run, self.stage, rank_info, client)
            try:
                code = self._wait(process, section, flag, client, monitor)
            finally:
                _kill_children()
        # After a request to stop, 0 does not mean that the work is complete, unless the last step was reported.
        if code == 0 and (not flag or monitor.is_complete):
            write_json(marker, {"world_size": rank_info.world_size, "command": command})
            return ExitCode.DONE
        if flag or code == TEMPORARY_FAILURE:
            return ExitCode.STOPPED
        text = read_end(output, output_start) if output.is_file() else ""
        cause, message = explain_exit(code, text)
        if code == -signal.SIGKILL and cause == ExitCode.CRASHED:
            os.kill(os.getpid(), signal.SIGKILL)  # The agent finds out whether the kernel killed it for lack of memory.
        raise CommandError(cause, message)

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        section: CommandStage,
        flag: StopFlag,
        client: ClientFiles,
        monitor: CommandMonitor,
    ) -> int:
        """Wait until the command has exited; after a request to stop, which is passed on, also its other processes.

        Returns:
            The exit code of the command; minus the number of a signal that ended it.

        Raises:
            CommandError: if the command hangs.
        """
        is_signalled = False
        while (code := process.poll()) is None or (flag and list_children()):
            monitor.handle_messages()
            # After a request to stop, the supervisor limits the time of the last save.
            if not flag and (problem := monitor.describe_hang()) is not None:
                message = monitor.write_hang_report(problem, list_children())
                time.sleep(HANG_EXIT_DELAY_S)
                raise CommandError(ExitCode.HANG, message)
            flag.poll()
            if flag and not is_signalled:
                is_signalled = True
                client.request_stop()
                if not client.is_polling:
                    _signal_children(signal.Signals[f"SIG{section.signal}"])
            time.sleep(POLL_S)
        # Slurm sends a signal to all processes of the job, and the command may have received it first.
        deadline = time.monotonic() + SIGNAL_SPREAD_S
        while -code in STOP_SIGNALS and (list_children() if flag else time.monotonic() < deadline):
            flag.poll()
            time.sleep(POLL_S)
        monitor.close()
        # A shell returns 128 + N if its command was ended by the signal N.
        return 128 - code if code - 128 in {number.value for number in signal.Signals} else code


def _read_mtime_ns(path: Path) -> int:
    """Return when a file was last changed; 0 if it has disappeared, or is a link to nothing."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _read_progress_report(run: Run, stage: str) -> dict[str, Any] | None:
    """Return the last step that the command has reported; None if there is none."""
    with suppress(OSError, ValueError):
        report = read_json(get_progress_file(run, stage))
        if isinstance(report, dict) and isinstance(report.get("step"), int):
            return report
    return None


def _describe_step(report: Mapping[str, Any], is_done: bool) -> Progress:
    """Return the progress of a command that reports its steps."""
    step, total, duration_s = report["step"], report.get("total") or 0, report.get("step_time_s")
    values = report.get("values") or {}
    loss = values.get("loss")
    loss_text = f"{loss:.4f}" if isinstance(loss, int | float) else ""
    count = f"step {step}/{total}" if total else f"step {step}"
    description = ", ".join(filter(None, [count, f"loss {loss_text}" * bool(loss_text), "finished" * is_done]))
    remaining_s = (total - step) * duration_s if total and isinstance(duration_s, int | float) else None
    return Progress(description, step, total, description, loss_text, remaining_s)


def _prepare_child(section: CommandStage) -> None:
    """Prepare the forked process that will run the command: it dies with this one, and ignores other stop signals.

    Before a time limit, Slurm sends SIGUSR2 to all processes of the job, which would end the command. A command may
    still install handlers.
    """
    set_parent_death_signal(signal.SIGKILL)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL if number.name == f"SIG{section.signal}" else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def list_children() -> list[int]:
    """Return the process ids of all running descendants of this process, from proc(5). Zombies are left out."""
    parent_by_pid: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            # The name of the program, in parentheses, may contain any characters.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parent_by_pid[int(folder.name)] = int(parent)
    descendants: list[int] = []
    parents = {os.getpid()}
    while parents:
        parents = {pid for pid, parent in parent_by_pid.items() if parent in parents}
        descendants += parents
    return sorted(descendants)


def _signal_children(number: signal.Signals) -> None:
    """Send a signal to all running descendants of this process."""
    for pid in list_children():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _kill_children() -> None:
    """Kill what the command has left running, for example the workers of a data loader."""
    deadline = time.monotonic() + KILL_WAIT_S
    while list_children() and time.monotonic() < deadline:
        _signal_children(signal.SIGKILL)
        time.sleep(0.01)


def find_files(run: Run, pattern: str) -> Iterator[Path]:
    """Yield the files that match a pattern, relative to the working directory of the run, or absolute."""
    if os.path.isabs(pattern):
        yield from Path("/").glob(pattern.lstrip("/"))
    else:
        yield from run.work_dir.glob(pattern)


def make_environment(run: Run, stage: str, rank_info: RankInfo, task: int | None, flag: StopFlag) -> dict[str, str]:
    """Return the variables of the command of a rank: those of this process, of `torchrun`, and of Sluice.

    The command can import the package `sluice`, but not the packages of Sluice that this process uses, because they
    could hide packages of the user.

    Args:
        run: the run.
        stage: the stage.
        rank_info: the rank.
        task: the number of the array task; None without an array.
        flag: has the start time of this process.
    """
    starts = run.read_events(stage, Started)
    saved_paths = [event.path for event in run.read_events(stage, Saved) if event.path is not None]
    variables: dict[str, object] = {
        "RANK": rank_info.rank,
        "LOCAL_RANK": rank_info.local_rank,
        "WORLD_SIZE": rank_info.world_size,
        "LOCAL_WORLD_SIZE": rank_info.local_world_size,
        "GROUP_RANK": rank_info.rank // rank_info.local_world_size,
        "MASTER_ADDR": rank_info.master_host,
        "MASTER_PORT": rank_info.master_port,
        # Libraries such as Lightning recognize torchrun by this variable, and then do not read the variables of Slurm.
        "TORCHELASTIC_RUN_ID": rank_info.job_id or "sluice",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "SLUICE_RUN": run.path,
        "SLUICE_STAGE": stage,
        "SLUICE_ATTEMPT": max(1, len([event for event in starts if event.task == task])),
    }
    if task is not None:
        variables["SLUICE_TASK"] = task
    if saved_paths:
        variables["SLUICE_LAST_SAVED"] = saved_paths[-1]
    if (time_left_s := read_time_limit_s(os.environ)) is not None:
        variables["SLUICE_DEADLINE"] = flag.start_time + time_left_s
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    user_paths = [path for path in paths if path and path != str(run.code_dir)]
    environment["PYTHONPATH"] = os.pathsep.join([str(CLIENT_PATH), *user_paths])
    # `make_code_env` has set this variable, but a script must find the modules in its own directory.
    environment.pop("PYTHONSAFEPATH", None)
    return environment
