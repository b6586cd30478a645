"""Test submit.py on one machine with real processes: signals, terminals, failing ranks and concurrent commands."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import cast

import psutil
import pytest
from rich.console import Console

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import find_newest_step
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from slurm.submit import local_runner
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.ranks import find_rank_processes
from tests.support.tiny import compute_run_digest, slow_down_steps, write_config

SUBMIT = [sys.executable, str(CODE_ROOT / "submit.py")]


def run_submit(folder: Path, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run submit.py in `folder` and return its result."""
    return subprocess.run([*SUBMIT, *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout)


def find_processes(run: Path) -> list[psutil.Process]:
    """Return every process with the path of the run in its command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(run) in argument for argument in process.info["cmdline"] or ())
    ]


@pytest.fixture(autouse=True)
def check_that_no_process_is_left(tmp_path: Path) -> Iterator[None]:
    """After the test, kill all processes of its runs. If there are any, the test fails."""
    yield
    processes = find_processes(tmp_path)
    for process in processes:
        process.kill()
    assert not processes, "processes of a run still ran at the end of the test"


def wait_for(description: str, condition: Callable[[], bool], timeout: float = 240) -> None:
    """Wait until `condition` returns True. Fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{description} did not happen within {timeout:.0f} s"
        time.sleep(0.02)


def count_steps(run: Path) -> int:
    """Return the number of steps in metrics.jsonl."""
    return sum(1 for _ in read_jsonl(run / "metrics.jsonl"))


def count_starts(run: Path) -> int:
    """Return the number of attempts of the train stage."""
    return len(read_event_lines(Run.open(run), "train", "started"))


def wait_for_steps(run: Path, steps: int) -> None:
    """Wait until metrics.jsonl has this many steps."""
    wait_for(f"step {steps}", lambda: count_steps(run) >= steps)


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `runs/tiny`, a run that submit.py completed, and `output`, the output of submit.py."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, steps=60)
    result = run_submit(folder, str(config))
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "output").write_text(result.stdout)
    return folder


@cache
def read_finished_digest(folder: Path) -> str:
    """Return the digest of the completed run in `folder`. The command runs only once."""
    return verify(folder)


def verify(folder: Path) -> str:
    """Return the digest that the command `verify` prints for the run in `folder`."""
    result = run_submit(folder, "verify", "runs/tiny")
    assert result.returncode == 0, result.stderr
    match = re.fullmatch(r"digest ([0-9a-f]{64})", result.stdout.splitlines()[-1])
    assert match, result.stdout
    return match[1]


def test_one_command_trains_and_evaluates_a_model_from_documents(finished_folder: Path) -> None:
    run = Run.open(finished_folder / "runs/tiny")
    output = (finished_folder / "output").read_text()
    for stage in ("prepare", "shard", "train", "evaluate"):
        assert re.search(rf"^{stage} +done", output, re.M), output
    assert "unigram" in output
    assert [line["step"] for line in read_jsonl(run.metrics_file)] == list(range(1, 61))
    result = json.loads((run.evaluation_dir / "step-00000060.json").read_text())
    assert {"step", "loss", "perplexity", "bits_per_byte", "unigram_bits_per_byte", "tokens", "bytes"} <= result.keys()
    assert result["bits_per_byte"] < result["unigram_bits_per_byte"]
    assert (run.code_dir / "submit.py").exists() and oct(run.path.stat().st_mode & 0o777) == "0o700"
    for stage in ("prepare", "shard", "train", "evaluate"):
        events = read_event_lines(run, stage, "submitted", "started", "done")
        assert [event["event"] for event in events] == ["submitted", "started", "done"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_quickstart_learns(tmp_path: Path) -> None:
    result = run_submit(tmp_path, str(CODE_ROOT / "configs/quickstart.yaml"), timeout=3000)
    assert result.returncode == 0, result.stdout + result.stderr
    evaluation = json.loads((tmp_path / "runs/quickstart/evaluation/step-00000200.json").read_text())
    assert evaluation["bits_per_byte"] <= 0.9 * evaluation["unigram_bits_per_byte"]


def test_a_second_submit_finds_all_stages_done(finished_folder: Path) -> None:
    events = read_event_lines(Run.open(finished_folder / "runs/tiny"))
    result = run_submit(finished_folder, "tiny.yaml", timeout=10)
    assert result.returncode == 0 and len(re.findall(r"^\w+ +done: ", result.stdout, re.M)) == 4, result.stdout
    assert read_event_lines(Run.open(finished_folder / "runs/tiny")) == events


def test_status_report_and_logs_show_a_finished_run(finished_folder: Path) -> None:
    status = run_submit(finished_folder, "status", "runs/tiny").stdout
    assert len(re.findall(r"^(prepare|shard|train|evaluate) +done", status, re.M)) == 4, status
    report = run_submit(finished_folder, "report", "runs/tiny").stdout
    assert "60/60 steps" in report and "unigram" in report
    assert "step 60/60" in run_submit(finished_folder, "logs", "runs/tiny", "train").stdout
    assert re.search(r"^runs/tiny +evaluate +done ", run_submit(finished_folder, "status").stdout, re.M)
    assert "error[run.not_a_run]" in run_submit(finished_folder, "status", "runs/tinny").stderr
    assert "rank-0.log" in run_submit(finished_folder, "logs", "runs/tiny", "train", "--rank", "9").stderr
    dry_run = run_submit(finished_folder, "tiny.yaml", "--dry-run")
    assert dry_run.returncode == 0 and "done" in dry_run.stdout, dry_run.stdout


def test_another_config_for_an_existing_run_is_rejected(finished_folder: Path) -> None:
    result = run_submit(finished_folder, "tiny.yaml", "optimizer.lr=0.5")
    assert result.returncode == ExitCode.USER_ERROR and "optimizer.lr: 0.01 → 0.5" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["tiny.yaml", "--dry-run"],
        ["status", "runs/tiny"],
        ["status"],
        ["report", "runs/tiny"],
        ["logs", "runs/tiny", "train"],
        ["schema"],
        ["tiny.yaml"],
        ["resume", "runs/tiny"],
    ],
)
def test_commands_of_the_login_node_import_no_slow_package(finished_folder: Path, arguments: list[str]) -> None:
    """Run a command, then import all modules of `slurm` and `tracking` and all stages, in a new process.

    None of these imports a package such as torch. The modules of trackers with a package of their own are excluded.
    """
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['submit.py', *{arguments!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(CODE_ROOT / 'submit.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "import importlib, pkgutil, slurm, tracking; from pipeline.config.stages import STAGES\n"
        "from pipeline.config.sections import TRACKERS\n"
        # only followers import these modules
        "trackers = {tracker.module for tracker in TRACKERS.values() if tracker.package}\n"
        "packages = (slurm, tracking)\n"
        "names = {m.name for p in packages for m in pkgutil.walk_packages(p.__path__, f'{p.__name__}.')}\n"
        "assert trackers < names\n"
        "for name in names - trackers: importlib.import_module(name)\n"
        "for stage in STAGES.values(): importlib.import_module(stage.module)\n"
        "slow = {'torch', 'numpy', 'h5py', 'tokenizers', 'pyarrow'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CODE_ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=finished_folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr


class Terminal:
    """A process of submit.py in a new pseudo-terminal.

    Args:
        folder: the working directory.
        arguments: the arguments of submit.py.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ["TERM"] = "xterm"
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the background, pytest and its children ignore SIGINT
            os.execv(sys.executable, [*SUBMIT, *arguments])
        self.output = b""

    def read(self, seconds: float) -> None:
        """Read the output for `seconds`, or until submit.py exits."""
        deadline = time.monotonic() + seconds
        while (remaining_s := deadline - time.monotonic()) > 0:
            if select.select([self.fd], [], [], remaining_s)[0]:
                try:
                    self.output += os.read(self.fd, 65536)
                except OSError:  # submit.py has exited
                    return

    def press_ctrl_c(self) -> None:
        """Send the character of Ctrl-C to the terminal."""
        os.write(self.fd, b"\x03")

    def wait(self, timeout: float = 240) -> int:
        """Wait until submit.py exits and return its exit code."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.read(0.1)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.read(0.2)
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"submit.py did not end: {self.text}")

    @property
    def text(self) -> str:
        """Return the output so far, without control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output.decode(errors="replace")).replace("\r", "")


def write_config_with_copied_data(folder: Path, finished_folder: Path) -> Path:
    """Write a config for a new run in `folder`, and copy the data of the completed run into the new run directory.

    Return the path of the config.
    """
    config = write_config(folder, steps=60)
    text = config.read_text().replace(str(folder / "corpus.jsonl"), str(finished_folder / "corpus.jsonl"))
    config.write_text(text)
    (folder / "runs/tiny").mkdir(parents=True)
    shutil.copytree(finished_folder / "runs/tiny/data", folder / "runs/tiny/data")
    return config


def create_slow_run(folder: Path, finished_folder: Path, *overrides: str) -> Path:
    """Create a run with a copy of the data of the completed run. Each step takes 0.1 s longer. Return its path."""
    return slow_down_steps(
        Run.create(load_config(write_config_with_copied_data(folder, finished_folder), overrides)), 0.1
    ).path


@pytest.mark.story
def test_ctrl_c_in_a_terminal_saves_and_prints_the_resume_command(tmp_path: Path, finished_folder: Path) -> None:
    """The save takes 3 s. submitit would kill the job one second after its signal.

    Each rank must receive one signal. The edited code writes the number of signals to a file.
    """
    run = create_slow_run(tmp_path, finished_folder)
    replace_in_file(
        run / "code/pipeline/train/trainer.py",
        "        if skip_reason is None:\n            self.save(step)\n",
        "        if skip_reason is None:\n            time.sleep(3)\n            self.save(step)\n"
        "        (self.run.path / f'signals-{self.world.rank}').write_text(str(self.deadline.flag.signal_count))\n",
    )
    terminal = Terminal(tmp_path, "tiny.yaml")
    wait_for_steps(run, 8)
    terminal.press_ctrl_c()
    assert terminal.wait() == ExitCode.STOPPED, terminal.text
    assert "submit.py resume runs/tiny" in terminal.text
    saved_step = find_newest_step(run / "checkpoints")
    assert saved_step >= 8 and saved_step == count_steps(run)
    assert [(run / f"signals-{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert re.search(r"train .* step \d+/60 +loss [\d.]+ +[\d,]+ tokens/s", terminal.text)
    [request] = read_event_lines(Run.open(run), "train", "stop_requested")
    assert request["signal"] == "SIGTERM"
    assert not find_processes(run)
    result = run_submit(tmp_path, "resume", "runs/tiny")
    assert result.returncode == 0, result.stdout + result.stderr
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == read_finished_digest(finished_folder)


@pytest.mark.parametrize("is_dumb_terminal", [False, True])
def test_progress_is_printed_as_lines_if_lines_cannot_be_overwritten(
    finished_folder: Path, monkeypatch: pytest.MonkeyPatch, is_dumb_terminal: bool
) -> None:
    monkeypatch.setattr(local_runner, "PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(local_runner, "POLL_S", 0.0)
    console = Console(file=io.StringIO(), width=160, force_terminal=is_dumb_terminal, _environ={"TERM": "dumb"})
    is_running = iter([True, True, False])
    local_runner.follow_stage(Run.open(finished_folder / "runs/tiny"), "train", lambda: next(is_running), console)
    output = cast(io.StringIO, console.file).getvalue()
    assert re.fullmatch(r"(train +step 60/60  loss \d\.\d{4}  [\d,]+ tokens/s  00:00 left\n){2}", output), output


@pytest.mark.story
def test_sigterm_to_submit_stops_the_stage_and_all_its_followers(tmp_path: Path, finished_folder: Path) -> None:
    """A second submit.py follows the stage that the first one has started. Neither of them restarts the stage."""
    run = create_slow_run(tmp_path, finished_folder)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_for_steps(run, 5)
    second_output = tmp_path / "second"
    with open(second_output, "w+") as output_file:
        second_process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=output_file)
        wait_for("the second submit.py", lambda: "following it" in second_output.read_text())
        process.terminate()
        output = process.communicate(timeout=240)[0]
        assert process.returncode == ExitCode.STOPPED and "resume runs/tiny" in output
        assert second_process.wait(240) == ExitCode.STOPPED
    output = second_output.read_text()
    assert "Ctrl-C" in output and "submit.py status runs/tiny --watch" in output, output
    assert re.search(r"^train +stopped: \d+/60 steps", output, re.M) and "resume runs/tiny" in output, output
    assert find_newest_step(run / "checkpoints") == count_steps(run) >= 5
    assert count_starts(run) == 1


@pytest.mark.story
def test_a_submit_during_the_last_save_continues_the_run(tmp_path: Path, finished_folder: Path) -> None:
    """After SIGTERM, the save waits until a user has run submit.py again."""
    run = create_slow_run(tmp_path, finished_folder)
    save = "        if skip_reason is None:\n            self.save(step)\n"
    wait = f"            while not os.path.exists({str(tmp_path / 'may-save')!r}):\n                time.sleep(0.1)\n"
    replace_in_file(run / "code/pipeline/train/trainer.py", save, save.replace("None:\n", f"None:\n{wait}"))
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for_steps(run, 5)
    process.terminate()
    wait_for("the stop", lambda: bool(read_event_lines(Run.open(run), "train", "stopping")))
    second_output = tmp_path / "second"
    with open(second_output, "w+") as output_file:
        second_process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=output_file)
        wait_for("the second submit.py", lambda: "following it" in second_output.read_text())
        (tmp_path / "may-save").touch()
        assert second_process.wait(240) == 0, second_output.read_text()
    assert process.wait(240) == ExitCode.STOPPED
    assert count_starts(run) == 2
    assert compute_run_digest(Run(run)) == read_finished_digest(finished_folder)


@pytest.mark.story
def test_a_killed_rank_ends_its_peers_and_is_named(tmp_path: Path, finished_folder: Path) -> None:
    """The budget allows one retry after a crash. The rank is killed twice, so the stage fails until `resume`."""
    run = create_slow_run(tmp_path, finished_folder, "recovery.budgets.crash=1")
    command = [*SUBMIT, "tiny.yaml", "recovery.budgets.crash=1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    for steps, saved_step in ((9, 7), (17, 14)):  # kill the rank after the save of `saved_step`
        wait_for_steps(run, steps)
        deadline = time.monotonic() + 240
        while find_newest_step(run / "checkpoints") < saved_step:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process_by_rank = find_rank_processes(run)
        process_by_rank[1].kill()
        _, alive = psutil.wait_procs(process_by_rank.values(), timeout=15)
        assert not alive, "the other rank must also end"
    output = process.communicate(timeout=240)[0]
    assert process.returncode == ExitCode.CRASHED
    assert re.search(r"^train +restored step \d+", output, re.M), output
    assert "rank 1" in output and "SIGKILL" in output and "resume runs/tiny" in output
    assert "recovery.budgets.crash: 1" in output
    assert run_submit(tmp_path, "status", "runs/tiny").stdout.count("failed") >= 1
    assert run_submit(tmp_path, "resume", "runs/tiny").returncode == 0
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == read_finished_digest(finished_folder)


@pytest.mark.story
def test_the_first_traceback_is_shown_with_its_rank(tmp_path: Path, finished_folder: Path) -> None:
    """The test edits the run's copy of the code so that rank 1 raises an exception in step 3."""
    config = write_config_with_copied_data(tmp_path, finished_folder)
    assert run_submit(tmp_path, "tiny.yaml", "--dry-run").returncode == 0
    replace_in_file(
        Run.create(load_config(config)).code_dir / "pipeline/train/trainer.py",
        "        lr = self.compute_learning_rate(",
        "        if self.world.rank == 1 and step == 3:\n            raise ValueError('bug in rank one')\n"
        "        lr = self.compute_learning_rate(",
    )
    result = run_submit(tmp_path, "tiny.yaml", timeout=240)
    assert result.returncode == ExitCode.CRASHED
    assert "rank 1 on" in result.stdout and "ValueError: bug in rank one" in result.stdout
    assert "closed by peer" not in result.stdout, "the error of the other rank must not be shown"


@pytest.mark.story
def test_cancel_ends_the_run_until_resume(tmp_path: Path, finished_folder: Path) -> None:
    """Until `resume`, neither submit.py nor a rank without a supervisor may continue the run."""
    run = create_slow_run(tmp_path, finished_folder)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_for_steps(run, 5)
    assert run_submit(tmp_path, "cancel", "runs/tiny").returncode == 0
    assert "cancelled" in process.communicate(timeout=240)[0]
    assert process.returncode == ExitCode.STOPPED
    result = run_submit(tmp_path, "tiny.yaml")
    assert result.returncode == ExitCode.USER_ERROR and "error[run.cancelled]" in result.stderr
    command = [sys.executable, "-m", "pipeline", "train", str(run)]  # as in a template without a supervisor
    result = subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == ExitCode.USER_ERROR and "error[run.cancelled]" in result.stderr
    assert run_submit(tmp_path, "resume", "runs/tiny", "stages.evaluate.tasks_per_node=2").returncode == 0
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == read_finished_digest(finished_folder)


@pytest.mark.story
def test_resume_rejects_changes_of_the_result_except_more_steps(finished_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_folder / "runs/tiny", tmp_path / "runs/tiny")
    for override in ("optimizer.lr=1", "train.steps=10", "model.dim=64"):
        result = run_submit(tmp_path, "resume", "runs/tiny", override)
        assert result.returncode == ExitCode.USER_ERROR and override.split("=")[0] in result.stderr
    original_config = (tmp_path / "runs/tiny/config.yaml").read_text()
    result = run_submit(tmp_path, "resume", "runs/tiny", "train.steps=70")
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "runs/tiny/config.yaml").read_text() == original_config
    assert find_newest_step(tmp_path / "runs/tiny/checkpoints") == 70
    assert (tmp_path / "runs/tiny/evaluation/step-00000070.json").exists()


@pytest.mark.story
def test_verify_names_the_file_with_a_flipped_bit(finished_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_folder / "runs/tiny", tmp_path / "runs/tiny")
    damaged_file = tmp_path / "runs/tiny/checkpoints/step-00000060/__1_0.distcp"
    content = bytearray(damaged_file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged_file.write_bytes(content)
    result = run_submit(tmp_path, "verify", "runs/tiny")
    assert result.returncode == ExitCode.BAD_CHECKPOINT and "digest" not in result.stdout
    assert "step-00000060" in result.stderr and damaged_file.name in result.stderr and "Traceback" not in result.stderr
    assert run_submit(tmp_path, "verify", "runs/tiny", "--step", "56").returncode == 0, (
        "another checkpoint must be intact"
    )


@pytest.mark.story
def test_a_malformed_number_is_a_user_error_without_traceback(finished_folder: Path) -> None:
    for arguments in (["verify", "runs/tiny", "--step", "²"], ["logs", "runs/tiny", "train", "--rank", "²"]):
        result = run_submit(finished_folder, *arguments)
        assert result.returncode == ExitCode.USER_ERROR
        assert arguments[-1] in result.stderr and "Traceback" not in result.stderr


def write_broken_packages(folder: Path) -> None:
    """Write packages with the names of packages of Sluice. Importing them raises an error."""
    for package in ("slurm", "pipeline"):
        (folder / package).mkdir()
        for name in ("__init__", "submission", "run"):
            (folder / package / f"{name}.py").write_text("raise ImportError('imported from the working directory')")


@pytest.mark.story
def test_a_run_uses_its_copy_of_the_code_and_not_the_working_directory(finished_folder: Path, tmp_path: Path) -> None:
    """The commands `verify`, `resume` and `plan` run in a folder with broken packages `slurm` and `pipeline`."""
    shutil.copytree(finished_folder / "runs/tiny", tmp_path / "runs/tiny")
    write_broken_packages(tmp_path)
    assert verify(tmp_path) == read_finished_digest(finished_folder)
    (tmp_path / "runs/tiny/evaluation/step-00000060.json").unlink()
    result = run_submit(tmp_path, "resume", "runs/tiny")
    assert result.returncode == 0, result.stdout
    shutil.copy(finished_folder / "tiny.yaml", tmp_path)
    assert run_submit(tmp_path, "plan", "tiny.yaml").returncode == 0


@pytest.mark.story
def test_two_concurrent_submits_share_one_run(tmp_path: Path, finished_folder: Path) -> None:
    """One process creates the run and starts the stages, the other one follows them."""
    write_config_with_copied_data(tmp_path, finished_folder)
    processes = [
        subprocess.Popen(
            [*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    run = Run.open(tmp_path / "runs/tiny")
    assert [event["event"] for event in read_event_lines(run)].count("created") == 1
    assert count_starts(run.path) == 1
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == read_finished_digest(finished_folder)


@pytest.mark.story
def test_ranks_save_and_exit_if_their_supervisor_is_killed(tmp_path: Path, finished_folder: Path) -> None:
    """submit.py reports the crash. After `resume`, the result must equal that of an undisturbed run."""
    run = create_slow_run(tmp_path, finished_folder)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_for_steps(run, 5)
    processes = find_processes(run)
    supervisor = next(process for process in processes if "slurm" in process.cmdline())
    ranks = list(find_rank_processes(run).values())
    assert len(ranks) == 2
    supervisor.kill()
    _, alive = psutil.wait_procs(ranks, timeout=240)
    assert not alive, "ranks must not run without their supervisor"
    assert find_newest_step(run / "checkpoints") < 60, "the ranks must stop before the last step"
    output = process.communicate(timeout=240)[0]
    assert process.returncode == ExitCode.CRASHED and "resume runs/tiny" in output
    assert find_newest_step(run / "checkpoints") == count_steps(run), "the ranks must save their last step"
    assert run_submit(tmp_path, "resume", "runs/tiny").returncode == 0
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == read_finished_digest(finished_folder)


@pytest.mark.story
def test_a_stage_continues_after_submit_is_killed(tmp_path: Path, finished_folder: Path) -> None:
    run = create_slow_run(tmp_path, finished_folder)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for_steps(run, 3)
    process.kill()
    process.wait(10)
    result = run_submit(tmp_path, "tiny.yaml")  # follows the running stage, or finds it done
    assert result.returncode == 0, result.stdout + result.stderr
    assert count_starts(run) == 1
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == read_finished_digest(finished_folder)


@pytest.mark.story
def test_a_rank_without_a_supervisor_does_not_join_a_running_stage(tmp_path: Path, finished_folder: Path) -> None:
    run = create_slow_run(tmp_path, finished_folder)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for_steps(run, 3)
    command = [sys.executable, "-m", "pipeline", "train", str(run)]
    result = subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == ExitCode.USER_ERROR and "pid" in result.stderr
    assert process.wait(240) == 0
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == read_finished_digest(finished_folder)


@pytest.mark.story
def test_each_stage_runs_in_one_process_without_submit_py(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=5)
    for stage in ("prepare", "shard", "train", "evaluate"):
        command = [sys.executable, "-m", "pipeline", stage, str(config), "stages.train.tasks_per_node=1"]
        result = subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "runs/tiny/evaluation/step-00000005.json").exists()


@pytest.mark.story
def test_evaluate_reports_that_no_data_is_held_out(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=3)
    result = run_submit(tmp_path, str(config), "data.held_out=0")
    assert result.returncode == 0, result.stdout
    # The stage prints this itself, and submit.py shows it as the progress of the stage.
    assert result.stdout.count("nothing is held out") == 2 and "not evaluated" not in result.stdout
    assert "not evaluated" not in run_submit(tmp_path, "report", "runs/tiny").stdout


@pytest.mark.story
def test_submit_reports_a_full_disk_without_a_traceback(
    tmp_path: Path, finished_folder: Path, small_disk: Path
) -> None:
    """The disk has no space for a checkpoint. `resume` must finish the run when there is space again."""
    write_config_with_copied_data(tmp_path, finished_folder)
    (small_disk / "runs/tiny").mkdir(parents=True)
    (small_disk / "runs/tiny/data").symlink_to(finished_folder / "runs/tiny/data")
    overrides = [f"run.root={small_disk}/runs", "checkpoint.keep=1", "recovery.preflight=false"]
    Run.create(load_config(tmp_path / "tiny.yaml", overrides))
    filler = small_disk / "filler"
    with open(filler, "wb") as file, pytest.raises(OSError, match="No space"):
        while True:
            os.write(file.fileno(), b"x" * 65536)
    os.truncate(filler, max(0, filler.stat().st_size - 300_000))  # 300 kB are free: too little for a checkpoint
    result = run_submit(tmp_path, "tiny.yaml", *overrides, timeout=240)
    assert result.returncode == ExitCode.STORAGE, result.stdout + result.stderr
    assert "no space" in result.stdout and "Traceback" not in result.stdout + result.stderr
    filler.unlink()
    result = run_submit(tmp_path, "resume", f"{small_disk}/runs/tiny")
    assert result.returncode == 0, result.stdout + result.stderr
