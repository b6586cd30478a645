"""Tests of stages that run a command: real supervisors, agents and processes on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.base.ports import MASTER_PORTS
from pipeline.config.read import load_config
from pipeline.run import stages
from pipeline.run.code import make_code_env
from pipeline.run.directory import Run
from pipeline.run.failure import retry_command
from pipeline.run.images import read_images
from tests.architecture.imports import ROOT
from tests.run.test_images import decode_png
from tests.support.errors import raises_error
from tests.support.events import read_event_lines

SUM_SCRIPT = """
import os, pathlib, sys, time, sluice

steps, rank = 50, int(os.environ["RANK"])
folder = pathlib.Path("checkpoints")
folder.mkdir(exist_ok=True)
total, first = 0, 1
if path := sluice.last_saved():
    step, total = map(int, pathlib.Path(path).read_text().split())
    first = step + 1
for step in range(first, steps + 1):
    total += step * step
    time.sleep(0.05)
    sluice.step(step, steps, loss=total)
    is_stopping = sluice.should_stop()
    if rank == 0 and (step % 5 == 0 or is_stopping):
        temporary = folder / "temporary"
        temporary.write_text(f"{step} {total}")
        temporary.rename(folder / f"{step:03d}.txt")
        sluice.saved(folder / f"{step:03d}.txt")
    if is_stopping:
        sys.exit()
if rank == 0:
    pathlib.Path("result.txt").write_text(str(total))
"""
STEPS = 50
RESULT = sum(step * step for step in range(1, STEPS + 1))


def make_command_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, section: Mapping[str, Any], files: Mapping[str, str], **sections: Any
) -> Run:
    """Return a run with one stage `main`.

    Args:
        folder: where to make the run, and the working directory that it copies.
        monkeypatch: changes the working directory.
        section: the section of the stage.
        files: the files in the working directory, by name.
        **sections: more sections of the config.
    """
    source = folder / "source"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_text(content)
    config = {"run": {"name": "commands", "root": str(folder / "runs")}, "stages": {"main": dict(section)}, **sections}
    (folder / "config.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(source)
    return Run.create(load_config(folder / "config.yaml"))


def start_supervisor(run: Run, stage: str = "main") -> subprocess.Popen[str]:
    """Start `python -m slurm STAGE RUN`."""
    environment = make_code_env(os.environ, run.code_dir)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.Popen(
        [sys.executable, "-m", "slurm", stage, str(run.path)],
        cwd=run.code_dir, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run_stage(run: Run, stage: str = "main") -> tuple[int, str]:
    """Run a stage to its end. Return the exit code and the output of the supervisor."""
    supervisor = start_supervisor(run, stage)
    output, _ = supervisor.communicate(timeout=120)
    return supervisor.returncode, output


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def find_commands(run: Run) -> list[psutil.Process]:
    """Return the running processes whose working directory is that of the run's commands."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(run.work_dir) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def describe_missing(run: Run) -> str | None:
    """Return why the stage is not done."""
    return stages.load_stage_module(run, "main").describe_missing_outputs(run)


def test_a_command_finds_its_rank_and_the_stage_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT SLUICE_RUN SLUICE_STAGE SLUICE_ATTEMPT"
    script = f'for name in {names}; do eval echo "$name=\\$$name"; done > rank-$RANK.txt'
    section = {"command": "sh script.sh && ls >> rank-$RANK.txt", "tasks_per_node": 2, "outputs": ["rank-*.txt"]}
    run = make_command_run(tmp_path, monkeypatch, section, {"script.sh": script})
    assert describe_missing(run) is not None
    assert run_stage(run)[0] == ExitCode.DONE
    assert describe_missing(run) is None
    for rank in range(2):
        lines = (run.work_dir / f"rank-{rank}.txt").read_text().splitlines()
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank) and variables["WORLD_SIZE"] == "2"
        assert variables["SLUICE_RUN"] == str(run.path) and variables["SLUICE_STAGE"] == "main"
        assert variables["SLUICE_ATTEMPT"] == "1"
        assert variables["MASTER_ADDR"] and int(variables["MASTER_PORT"]) in MASTER_PORTS
        assert "script.sh" in lines
    assert run_stage(run)[0] == ExitCode.DONE
    assert len(read_event_lines(run, "main", "started")) == 1, "a stage that is done must not run again"


def test_a_missing_output_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_command_run(tmp_path, monkeypatch, {"command": "true", "outputs": ["result-*.txt"]}, {})
    code, output = run_stage(run)
    assert code != ExitCode.DONE and "result-*.txt" in output


@pytest.mark.parametrize("victim", ["command", pytest.param("rank", marks=pytest.mark.story)])
def test_a_killed_command_continues_in_place_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    section = {"command": "python sum.py", "tasks_per_node": 2, "outputs": ["result.txt"], "progress": "checkpoints/*"}
    run = make_command_run(tmp_path, monkeypatch, section, {"sum.py": SUM_SCRIPT})
    supervisor = start_supervisor(run)
    wait_until(lambda: len(read_event_lines(run, "main", "saved")) >= 2)
    processes = find_commands(run)
    killed = processes[0] if victim == "command" else processes[0].parent()
    while victim == "rank" and killed is not None and not killed.name().startswith("sluice-rank"):
        killed = killed.parent()
    assert killed is not None
    killed.kill()
    output, _ = supervisor.communicate(timeout=120)
    assert supervisor.returncode == ExitCode.DONE, output
    assert (run.work_dir / "result.txt").read_text() == str(RESULT)
    (failure,) = read_event_lines(run, "main", "failed")
    assert failure["cause"] == "crashed"
    assert len(read_event_lines(run, "main", "retried")) == 1
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == [sum(k * k for k in range(1, step + 1)) for step in range(1, STEPS + 1)]
    assert not find_commands(run)


def test_a_request_to_stop_lets_the_script_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"command": "python sum.py", "outputs": ["result.txt"], "progress": "checkpoints/*"}
    run = make_command_run(tmp_path, monkeypatch, section, {"sum.py": SUM_SCRIPT})
    supervisor = start_supervisor(run)
    wait_until(lambda: run.metrics_file.exists() and len(run.metrics_file.read_text().splitlines()) > 7)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.STOPPED
    saved_step = read_event_lines(run, "main", "saved")[-1]["step"]
    assert saved_step == len(run.metrics_file.read_text().splitlines()), "it must save after the last step"
    assert run_stage(run)[0] == ExitCode.DONE
    assert (run.work_dir / "result.txt").read_text() == str(RESULT)
    assert not read_event_lines(run, "main", "lost_work")


def test_a_script_without_the_client_gets_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal also reaches a process that a shell has started, and its save is waited for."""
    script = """
import os, signal, sys, time
def save(*_):
    time.sleep(1)
    open("saved", "w").close()
    sys.exit(3)
signal.signal(signal.SIGUSR1, save)
open("started", "w").close()
time.sleep(60 if not os.path.exists("saved") else 0)
"""
    section = {"command": "true && python script.py; exit $?", "signal": "USR1", "outputs": ["saved"]}
    run = make_command_run(tmp_path, monkeypatch, section, {"script.py": script})
    supervisor = start_supervisor(run)
    wait_until((run.work_dir / "started").exists)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.STOPPED
    assert (run.work_dir / "saved").exists() and not find_commands(run)
    assert run_stage(run)[0] == ExitCode.DONE


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.story), signal.SIGUSR2])
def test_a_signal_of_slurm_to_all_processes_lets_the_script_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Slurm sends its signals to the processes of the command, too. The shell that runs the command does not wait."""
    section = {"command": "true && python sum.py; exit $?", "outputs": ["result.txt"], "progress": "checkpoints/*"}
    run = make_command_run(tmp_path, monkeypatch, section, {"sum.py": SUM_SCRIPT})
    supervisor = start_supervisor(run)
    wait_until(lambda: run.metrics_file.exists() and len(run.metrics_file.read_text().splitlines()) > 7)
    for process in find_commands(run):
        process.send_signal(number)
    time.sleep(0.5)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.STOPPED
    steps = len(run.metrics_file.read_text().splitlines())
    assert read_event_lines(run, "main", "saved")[-1]["step"] == steps < STEPS
    assert run_stage(run)[0] == ExitCode.DONE
    assert (run.work_dir / "result.txt").read_text() == str(RESULT)


@pytest.mark.parametrize(
    ("code", "cause", "pattern"),
    [
        ("def f(): raise KeyError('alpha')\nf()", "crashed", r"rank 0 on .*(?s:.*)KeyError: 'alpha'"),
        ("raise MemoryError()", "out_of_memory", "MemoryError"),
        ("import sys; print('last words'); sys.exit(5)", "crashed", r"exited with 5(?s:.*)last words"),
        ("import os; os.abort()", "crashed", "SIGABRT"),
        ("import os; print('x', flush=True); os._exit(170)", "crashed", r"exited with 170(?s:.*)x"),
        ("raise RuntimeError('uncorrectable ECC error encountered')", "bad_node", "ECC"),
    ],
)
def test_a_failure_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, cause: str, pattern: str
) -> None:
    section = {"command": "python fail.py"}
    run = make_command_run(
        tmp_path, monkeypatch, section, {"fail.py": code}, recovery={"budgets": {"out_of_memory": 0, "bad_node": 0}}
    )
    assert run_stage(run)[0] != ExitCode.DONE
    (failure,) = read_event_lines(run, "main", "failed")
    assert failure["cause"] == cause and re.search(pattern, failure["message"])


def test_a_command_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the stacks of the command's threads. py-spy is in the folder of Python, as in an environment."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    script = (
        "import sluice, time\ndef wait_for_lost_data(): time.sleep(600)\n"
        "for step in range(1, 4): sluice.step(step)\nwait_for_lost_data()"
    )
    run = make_command_run(
        tmp_path, monkeypatch, {"command": "python hang.py"}, {"hang.py": script}, recovery={"hang_s": 2}
    )
    assert run_stage(run)[0] == ExitCode.HANG
    (failure,) = read_event_lines(run, "main", "failed")
    assert failure["cause"] == "hang" and "step 3" in failure["message"]
    assert "wait_for_lost_data (hang.py:2)" in failure["message"]
    assert not find_commands(run)


def test_images_of_a_script_are_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script also adds invalid images, about which the log has one warning for each name."""
    script = (
        "import sluice\nimport numpy as np\nfor step in (1, 2):\n"
        " sluice.add_image('grey', step, np.full((2, 3), 40 * step, np.uint8))\n"
        " sluice.add_image('../x', step, b'x')\n sluice.add_image('huge', step, bytes(1 << 25))\n"
        " sluice.step(step, 2)\n"
    )
    run = make_command_run(
        tmp_path, monkeypatch, {"command": "python draw.py", "tasks_per_node": 2}, {"draw.py": script}
    )
    code, output = run_stage(run)
    assert code == ExitCode.DONE, output
    images = list(read_images(run.path))
    assert [(image.name, image.step) for image in images] == [("grey", 1), ("grey", 2)]
    assert [decode_png(image.content) for image in images] == [(2, 3, bytes([value] * 6)) for value in (40, 80)]
    log = "".join(path.read_text() for path in run.jobs_dir.rglob("*.log"))
    assert log.count("WARNING: image '../x'") == log.count("WARNING: image 'huge'") == 1


def run_plain_script(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Run:
    """Run examples/plain_script.py in a job, and return the run."""
    files = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    run = make_command_run(folder, monkeypatch, {"command": " ".join(("python plain_script.py", *arguments))}, files)
    code, output = run_stage(run)
    assert code == ExitCode.DONE, output
    return run


def test_a_script_in_plain_torch_uses_the_functions_of_the_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_plain_script(tmp_path, monkeypatch)
    lines = list(read_jsonl(run.metrics_file))
    assert [line["step"] for line in lines] == list(range(1, 201))
    assert all(line["gradient.0"] > 0 and line["gradient.2"] > 0 for line in lines)
    accuracies = [line["held_out_balanced_accuracy"] for line in lines if line["step"] % 50 == 0]
    assert 0.125 < accuracies[0] < accuracies[-1] <= 1
    steps = [("confusions", step) for step in (50, 100, 150, 200)]
    assert [(image.name, image.step) for image in read_images(run.path)] == steps


@pytest.mark.story
def test_a_script_in_plain_torch_finds_a_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_plain_script(tmp_path, monkeypatch, "find")
    lines = list(read_jsonl(run.metrics_file))
    assert [line["lr"] for line in lines] == pytest.approx([1e-5 * 1e5 ** (n / 79) for n in range(len(lines))])
    smoothed = [lines[0]["loss"]]
    for line in lines[1:]:
        smoothed.append(0.7 * smoothed[-1] + 0.3 * line["loss"])
    assert len(lines) == 80 or smoothed[-1] > 4 * min(smoothed)
    (image,) = read_images(run.path)
    suggestion = lines[smoothed.index(min(smoothed))]["lr"] / 10
    assert (image.name, image.step) == ("learning_rate", len(lines))
    assert f"{suggestion:.2g}".encode() in image.content


def test_no_process_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "setsid sleep 300 & sleep 300 & touch started"
    run = make_command_run(tmp_path, monkeypatch, {"command": command}, {})
    assert run_stage(run)[0] == ExitCode.DONE
    assert not find_commands(run)


def test_each_task_of_an_array_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Slurm, one job does the work of all tasks. Task 2 fails at first."""
    command = "echo run >> task-$SLUICE_TASK.txt && test $SLUICE_TASK != 2 -o -e ok"
    run = make_command_run(tmp_path, monkeypatch, {"command": command, "tasks": 4, "outputs": ["task-3.txt"]}, {})
    assert run_stage(run)[0] != ExitCode.DONE
    assert "tasks" in str(describe_missing(run))
    (run.work_dir / "ok").touch()
    assert run_stage(run)[0] == ExitCode.DONE
    assert [(run.work_dir / f"task-{task}.txt").read_text().count("run") for task in (0, 1, 3)] == [1, 1, 1]
    assert (run.work_dir / "task-2.txt").read_text().count("run") >= 2


def test_edits_after_the_submission_do_not_change_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_command_run(tmp_path, monkeypatch, {"command": "sh script.sh"}, {"script.sh": "echo old > result"})
    Path("script.sh").write_text("echo new > result")
    assert run_stage(run)[0] == ExitCode.DONE
    assert (run.work_dir / "result").read_text() == "old\n"


def test_a_script_imports_its_own_modules_and_not_those_of_sluice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user has a module `pipeline`, as Sluice does, and another module on PYTHONPATH."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library/extra.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    files = {"script.py": "import extra, pipeline, sluice; print(pipeline.NAME)", "pipeline.py": "NAME = 'my pipeline'"}
    run = make_command_run(tmp_path, monkeypatch, {"command": "python script.py > result"}, files)
    code, output = run_stage(run)
    assert code == ExitCode.DONE, output
    assert (run.work_dir / "result").read_text() == "my pipeline\n"


def test_update_code_copies_the_directory_of_the_submission_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command fails. The user corrects the script, and continues the run from another directory."""
    run = make_command_run(tmp_path, monkeypatch, {"command": "sh script.sh"}, {"script.sh": "touch kept; exit 3"})
    assert run_stage(run)[0] == ExitCode.CRASHED
    assert "--update-code" in retry_command(run, "crashed")
    Path("script.sh").write_text("echo corrected > result")
    monkeypatch.chdir(tmp_path)
    run.copy_working_dir()
    assert run_stage(run)[0] == ExitCode.DONE
    assert (run.work_dir / "result").read_text() == "corrected\n" and (run.work_dir / "kept").exists()


def test_a_stop_in_the_last_step_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script has reported its last step, sees the request, and exits with 0 before it has written its output."""
    script = (
        "import pathlib, sluice, sys, time\nsluice.step(1, 1)\npathlib.Path('last').touch()\n"
        "while not pathlib.Path('go').exists() and not sluice.should_stop(): time.sleep(0.05)\n"
        "if sluice.should_stop(): sys.exit()\npathlib.Path('output').touch()\n"
    )
    section = {"command": "python script.py", "outputs": ["output"]}
    run = make_command_run(tmp_path, monkeypatch, section, {"script.py": script})
    supervisor = start_supervisor(run)
    wait_until((run.work_dir / "last").exists)
    supervisor.send_signal(signal.SIGTERM)
    output, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.STOPPED, output
    assert not read_event_lines(run, "main", "failed")
    (run.work_dir / "go").touch()
    assert run_stage(run)[0] == ExitCode.DONE and (run.work_dir / "output").exists()


def test_a_stop_is_not_mistaken_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output exists from the first checkpoint on, and the script exits with 0 when it stops."""
    section = {"command": "python sum.py", "outputs": ["checkpoints/*"], "progress": "checkpoints/*"}
    run = make_command_run(tmp_path, monkeypatch, section, {"sum.py": SUM_SCRIPT})
    supervisor = start_supervisor(run)
    wait_until(lambda: read_event_lines(run, "main", "saved"))
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.STOPPED and describe_missing(run) is not None
    assert run_stage(run)[0] == ExitCode.DONE
    assert (run.work_dir / "result.txt").read_text() == str(RESULT)


def test_the_commands_of_the_tasks_of_an_array_have_different_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "echo $MASTER_ADDR:$MASTER_PORT > port-$SLUICE_TASK; sleep 1"
    run = make_command_run(tmp_path, monkeypatch, {"command": command, "tasks": 3}, {})
    assert run_stage(run)[0] == ExitCode.DONE
    assert len({file.read_text() for file in run.work_dir.glob("port-*")}) == 3


def test_plan_is_not_for_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_command_run(tmp_path, monkeypatch, {"command": "true"}, {})
    with raises_error("cli.no_pipeline", "plan", "commands"):
        run.config.require_pipeline("plan")
