"""The three doors as a person uses them: submit.py, with real jobs, signals, terminals and broken ranks."""

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
from tests.support.tiny import compute_run_digest, slow_down_steps, write_config

SUBMIT = [sys.executable, str(CODE_ROOT / "submit.py")]


def submit(folder: Path, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SUBMIT, *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout)


def processes_of(run: Path) -> list[psutil.Process]:
    """Every process that works for a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(run) in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    left = processes_of(tmp_path)
    for process in left:
        process.kill()
    assert not left, "processes of the run outlived the test"


def wait_for(what: str, there: Callable[[], bool], timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not there():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)


def wait_for_steps(run: Path, steps: int) -> None:
    wait_for(f"step {steps}", lambda: sum(1 for _ in read_jsonl(run / "metrics.jsonl")) >= steps)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny run that went through undisturbed, by submit.py."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, steps=60)
    done = submit(folder, str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "output").write_text(done.stdout)
    return folder


@cache
def undisturbed(folder: Path) -> str:
    """The digest of the finished run in `folder`."""
    return verified(folder)


def verified(folder: Path) -> str:
    """The digest of the run in `folder` by the door for it."""
    done = submit(folder, "verify", "runs/tiny")
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(r"digest ([0-9a-f]{64})", done.stdout.splitlines()[-1])
    assert match, done.stdout
    return match[1]


def test_one_command_goes_from_documents_to_an_evaluated_model(finished: Path) -> None:
    run, output = Run.open(finished / "runs/tiny"), (finished / "output").read_text()
    for word in ("prepare", "shard", "train", "evaluate"):
        assert re.search(rf"^{word} +done", output, re.M), output
    assert "× the unigram" in output
    assert [line["step"] for line in read_jsonl(run.metrics_file)] == list(range(1, 61))
    result = json.loads((run.evaluation_dir / "step-00000060.json").read_text())
    assert {"step", "loss", "perplexity", "bits_per_byte", "unigram_bits_per_byte", "tokens", "bytes"} <= result.keys()
    assert result["bits_per_byte"] < result["unigram_bits_per_byte"]
    assert (run.code_dir / "submit.py").exists() and oct(run.path.stat().st_mode & 0o777) == "0o700"
    events = [(e["stage"], e["event"]) for e in run.read_events()]
    for stage in ("prepare", "shard", "train", "evaluate"):
        assert [e for s, e in events if s == stage and e in ("submitted", "started", "done")] == [
            "submitted", "started", "done",
        ]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_quickstart_learns(tmp_path: Path) -> None:
    done = submit(tmp_path, str(CODE_ROOT / "configs/quickstart.yaml"), timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "runs/quickstart/evaluation/step-00000200.json").read_text())
    assert result["bits_per_byte"] <= 0.9 * result["unigram_bits_per_byte"]


def test_a_second_time_everything_is_done(finished: Path) -> None:
    events = Run.open(finished / "runs/tiny").read_events()
    done = submit(finished, "tiny.yaml", timeout=10)
    assert done.returncode == 0 and len(re.findall(r"^\w+ +done: ", done.stdout, re.M)) == 4, done.stdout
    assert Run.open(finished / "runs/tiny").read_events() == events


def test_the_views(finished: Path) -> None:
    status = submit(finished, "status", "runs/tiny").stdout
    assert len(re.findall(r"^(prepare|shard|train|evaluate) +done", status, re.M)) == 4, status
    report = submit(finished, "report", "runs/tiny").stdout
    assert "60/60 steps" in report and "× the unigram" in report
    assert "step 60/60" in submit(finished, "logs", "runs/tiny", "train").stdout
    assert re.search(r"^runs/tiny +evaluate +done ", submit(finished, "status").stdout, re.M)
    assert "no such directory" in submit(finished, "status", "runs/tinny").stderr
    assert "rank-0.log" in submit(finished, "logs", "runs/tiny", "train", "--rank", "9").stderr
    assert "all stages are done" in submit(finished, "tiny.yaml", "--dry-run").stdout


def test_another_config_under_the_same_name_is_refused(finished: Path) -> None:
    done = submit(finished, "tiny.yaml", "optimizer.lr=0.5")
    assert done.returncode == ExitCode.USER_ERROR and "optimizer.lr: 0.01 → 0.5" in done.stderr


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
def test_the_login_node_imports_nothing_heavy(finished: Path, arguments: list[str]) -> None:
    probe = (
        "import runpy, sys\n"
        f"sys.argv = ['submit.py', *{arguments!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(CODE_ROOT / 'submit.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "import importlib, pkgutil, slurm, tracking; from pipeline.run import stages\n"
        "from pipeline.config.track import TRACKERS\n"
        "own = {row.module for row in TRACKERS.values() if row.package}\n"  # followers' alone
        "packages = (slurm, tracking)\n"
        "names = {m.name for p in packages for m in pkgutil.walk_packages(p.__path__, f'{p.__name__}.')}\n"
        "assert own < names\n"
        "for name in names - own: importlib.import_module(name)\n"
        "for stage in stages.STAGES: stages.load_stage_module(stage)\n"
        "heavy = {'torch', 'numpy', 'h5py', 'tokenizers', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CODE_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=finished, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


class Terminal:
    """submit.py in a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ["TERM"] = "xterm"
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test in the background of a script ignores it
            os.execv(sys.executable, [*SUBMIT, *arguments])
        self.seen = b""

    def read(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.fd], [], [], left)[0]:
                try:
                    self.seen += os.read(self.fd, 65536)
                except OSError:  # the other side is gone
                    return

    def press_ctrl_c(self) -> None:
        os.write(self.fd, b"\x03")

    def wait(self, timeout: float = 240) -> int:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
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
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.seen.decode(errors="replace")).replace("\r", "")


def shared_config(folder: Path, finished: Path) -> Path:
    """The finished run's config for a new run in `folder`, whose data stages are done already."""
    config = write_config(folder, steps=60)
    text = config.read_text().replace(str(folder / "corpus.jsonl"), str(finished / "corpus.jsonl"))
    config.write_text(text)
    (folder / "runs/tiny").mkdir(parents=True)
    shutil.copytree(finished / "runs/tiny/data", folder / "runs/tiny/data")
    return config


def change(path: Path, old: str, new: str) -> None:
    """Edit a file of a run's own copy of the code."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has changed"
    path.write_text(text.replace(old, new))


def slowed_run(folder: Path, finished: Path, *overrides: str) -> Path:
    """The run of `shared_config`; a step takes a tenth of a second more: it still trains when something comes to it."""
    return slow_down_steps(Run.create(load_config(shared_config(folder, finished), overrides)), 0.1).path


@pytest.mark.story
def test_ctrl_c_in_a_terminal_saves_and_says_how_to_go_on(tmp_path: Path, finished: Path) -> None:
    """A save takes longer than the second after which submitit would kill, and the ranks count their signals."""
    run = slowed_run(tmp_path, finished)
    change(
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
    stopped_at = find_newest_step(run / "checkpoints")
    assert stopped_at >= 8 and stopped_at == len(list(read_jsonl(run / "metrics.jsonl")))
    assert [(run / f"signals-{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert re.search(r"train .* step \d+/60 +loss [\d.]+ +[\d,]+ tokens/s +[\d:]+ left", terminal.text)
    requests = [e for e in Run.open(run).read_events("train") if e["event"] == "stop_requested"]
    assert len(requests) == 1 and requests[0]["signal"] == "SIGTERM"
    assert not processes_of(run)
    done = submit(tmp_path, "resume", "runs/tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == undisturbed(finished)


@pytest.mark.parametrize("dumb", [False, True])
def test_where_no_line_can_be_overwritten_progress_is_plain_lines(
    finished: Path, monkeypatch: pytest.MonkeyPatch, dumb: bool
) -> None:
    monkeypatch.setattr(local_runner, "PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(local_runner, "POLL_S", 0.0)
    console = Console(file=io.StringIO(), width=160, force_terminal=dumb, _environ={"TERM": "dumb"})
    ticks = iter([True, True, False])
    local_runner.follow_stage(Run.open(finished / "runs/tiny"), "train", lambda: next(ticks), console)
    shown = cast(io.StringIO, console.file).getvalue()
    assert re.fullmatch(r"(train +step 60/60  loss \d\.\d{4}  [\d,]+ tokens/s  00:00 left\n){2}", shown), shown


def test_sigterm_to_submit_stops_the_stage_and_all_who_follow_it(tmp_path: Path, finished: Path) -> None:
    """Nobody starts again what a person stopped: not the terminal that made it, nor one that only follows."""
    run = slowed_run(tmp_path, finished)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_for_steps(run, 5)
    with open(tmp_path / "second", "w+") as shown:
        second = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=shown)
        wait_for("the second to follow", lambda: "following it" in (tmp_path / "second").read_text())
        process.terminate()
        output = process.communicate(timeout=240)[0]
        assert process.returncode == ExitCode.STOPPED and "resume runs/tiny" in output
        assert second.wait(240) == ExitCode.STOPPED
    output = (tmp_path / "second").read_text()
    assert "Ctrl-C stops it, for all" in output and "submit.py status runs/tiny --watch" in output, output
    assert re.search(r"^train +stopped: \d+/60 steps", output, re.M) and "resume runs/tiny" in output, output
    assert find_newest_step(run / "checkpoints") == len(list(read_jsonl(run / "metrics.jsonl"))) >= 5
    assert [e["event"] for e in Run.open(run).read_events("train")].count("started") == 1


@pytest.mark.story
def test_who_comes_while_it_saves_goes_on(tmp_path: Path, finished: Path) -> None:
    run = slowed_run(tmp_path, finished)
    slow_save = "        if skip_reason is None:\n            time.sleep(3)\n            self.save(step)\n"
    change(run / "code/pipeline/train/trainer.py", slow_save.replace("            time.sleep(3)\n", ""), slow_save)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for_steps(run, 5)
    process.terminate()
    wait_for("the stop", lambda: bool(Run.open(run).read_events("train", "stopping")))
    done = submit(tmp_path, "tiny.yaml")
    assert done.returncode == 0 and "following it" in done.stdout, done.stdout + done.stderr
    assert process.wait(240) == ExitCode.STOPPED
    assert [e["event"] for e in Run.open(run).read_events("train")].count("started") == 2
    assert compute_run_digest(Run(run)) == undisturbed(finished)


@pytest.mark.story
def test_a_killed_rank_ends_its_peers_and_is_named(tmp_path: Path, finished: Path) -> None:
    run = slowed_run(tmp_path, finished, "recovery.crash=1")
    command = [*SUBMIT, "tiny.yaml", "recovery.crash=1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    for steps in (9, 17):  # after the checkpoints of steps 7 and 14
        wait_for_steps(run, steps)
        while find_newest_step(run / "checkpoints") < steps - 3:
            time.sleep(0.02)
        ranks = {p.environ()["SLUICE_RANK"]: p for p in processes_of(run) if "pipeline" in p.cmdline()}
        ranks["1"].kill()
        _, alive = psutil.wait_procs(ranks.values(), timeout=15)
        assert not alive, "the peer outlived the rank that died"
    output = process.communicate(timeout=240)[0]
    assert process.returncode == ExitCode.CRASHED and "restarts automatically after: crashed" in output
    assert re.search(r"^train +restored step \d+; repeated steps: \d+$", output, re.M), output
    assert "rank 1" in output and "SIGKILL" in output and "resume runs/tiny" in output
    assert "recovery.crash: 1" in output, "its budget was one"
    assert submit(tmp_path, "status", "runs/tiny").stdout.count("failed") >= 1
    assert submit(tmp_path, "resume", "runs/tiny").returncode == 0
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == undisturbed(finished)


@pytest.mark.story
def test_the_first_traceback_is_shown_with_its_rank(tmp_path: Path, finished: Path) -> None:
    """A bug in one rank: the run's own copy of the code is broken for rank 1, as a bad edit would break it."""
    config = shared_config(tmp_path, finished)
    assert submit(tmp_path, "tiny.yaml", "--dry-run").returncode == 0
    change(
        Run.create(load_config(config)).code_dir / "pipeline/train/trainer.py",
        "        lr = self.learning_rate(",
        "        if self.world.rank == 1 and step == 3:\n            raise ValueError('a bug of rank one')\n"
        "        lr = self.learning_rate(",
    )
    done = submit(tmp_path, "tiny.yaml", timeout=240)
    assert done.returncode == ExitCode.CRASHED
    assert "rank 1 on" in done.stdout and "ValueError: a bug of rank one" in done.stdout
    assert "Connection closed by peer" not in done.stdout


@pytest.mark.story
def test_cancel_ends_the_run_until_resume(tmp_path: Path, finished: Path) -> None:
    run = slowed_run(tmp_path, finished)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_for_steps(run, 5)
    assert "saves and leaves" in submit(tmp_path, "cancel", "runs/tiny").stdout
    assert "cancelled" in process.communicate(timeout=240)[0]
    assert process.returncode == ExitCode.STOPPED
    again = submit(tmp_path, "tiny.yaml")
    assert again.returncode == ExitCode.USER_ERROR and "was cancelled" in again.stderr
    command = [sys.executable, "-m", "pipeline", "train", str(run)]  # as a template without a supervisor has it
    by_hand = subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=240)
    assert by_hand.returncode == ExitCode.USER_ERROR and "was cancelled" in by_hand.stderr
    assert submit(tmp_path, "resume", "runs/tiny", "stages.evaluate.tasks_per_node=2").returncode == 0
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == undisturbed(finished)


@pytest.mark.story
def test_resume_changes_only_what_leaves_the_result_alone(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs/tiny", tmp_path / "runs/tiny")
    for wrong in ("optimizer.lr=1", "train.steps=10", "model.dim=64"):
        done = submit(tmp_path, "resume", "runs/tiny", wrong)
        assert done.returncode == ExitCode.USER_ERROR and wrong.split("=")[0] in done.stderr
    frozen = (tmp_path / "runs/tiny/config.yaml").read_text()
    done = submit(tmp_path, "resume", "runs/tiny", "train.steps=70")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "runs/tiny/config.yaml").read_text() == frozen
    assert find_newest_step(tmp_path / "runs/tiny/checkpoints") == 70
    assert (tmp_path / "runs/tiny/evaluation/step-00000070.json").exists()


def test_verify_names_a_flipped_bit(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs/tiny", tmp_path / "runs/tiny")
    victim = tmp_path / "runs/tiny/checkpoints/step-00000060/__1_0.distcp"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    done = submit(tmp_path, "verify", "runs/tiny")
    assert done.returncode == 23 and "digest" not in done.stdout
    assert "step-00000060" in done.stderr and victim.name in done.stderr and "Traceback" not in done.stderr
    assert submit(tmp_path, "verify", "runs/tiny", "--step", "56").returncode == 0, "another one is whole"


def test_a_number_that_is_none_is_no_traceback(finished: Path) -> None:
    for arguments in (["verify", "runs/tiny", "--step", "²"], ["logs", "runs/tiny", "train", "--rank", "²"]):
        done = submit(finished, *arguments)
        assert (
            done.returncode == ExitCode.USER_ERROR and arguments[-1] in done.stderr and "Traceback" not in done.stderr
        )


def write_broken_packages(folder: Path) -> None:
    """Packages as a checkout has them, in the middle of a bad edit."""
    for package in ("slurm", "pipeline"):
        (folder / package).mkdir()
        for name in ("__init__", "submission", "run"):
            (folder / package / f"{name}.py").write_text("raise ImportError('the working directory, not the run')")


@pytest.mark.story
def test_a_run_uses_its_own_code_and_not_the_working_directory(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs/tiny", tmp_path / "runs/tiny")
    write_broken_packages(tmp_path)
    assert verified(tmp_path) == undisturbed(finished)
    (tmp_path / "runs/tiny/evaluation/step-00000060.json").unlink()
    done = submit(tmp_path, "resume", "runs/tiny")
    assert done.returncode == 0, done.stdout
    shutil.copy(finished / "tiny.yaml", tmp_path)
    assert submit(tmp_path, "plan", "tiny.yaml").returncode == 0


@pytest.mark.story
def test_two_submits_at_once_share_one_run(tmp_path: Path, finished: Path) -> None:
    shared_config(tmp_path, finished)
    both = [
        subprocess.Popen(
            [*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    run = Run.open(tmp_path / "runs/tiny")
    assert [e["event"] for e in run.read_events()].count("created") == 1
    assert [e["event"] for e in run.read_events("train")].count("started") == 1
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == undisturbed(finished)


@pytest.mark.story
def test_a_killed_supervisor_leaves_no_rank_behind(tmp_path: Path, finished: Path) -> None:
    run = slowed_run(tmp_path, finished)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_for_steps(run, 5)
    working = processes_of(run)
    supervisor = next(p for p in working if "slurm" in p.cmdline())
    ranks = [p for p in working if "pipeline" in p.cmdline()]
    supervisor.kill()
    _, alive = psutil.wait_procs(ranks, timeout=240)
    assert not alive, "ranks go on without their supervisor"
    assert find_newest_step(run / "checkpoints") < 60, "they trained to the end"
    output = process.communicate(timeout=240)[0]
    assert process.returncode == ExitCode.CRASHED and "resume runs/tiny" in output
    assert find_newest_step(run / "checkpoints") == len(list(read_jsonl(run / "metrics.jsonl"))), "they saved and left"
    assert submit(tmp_path, "resume", "runs/tiny").returncode == 0
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == undisturbed(finished)


@pytest.mark.story
def test_submit_may_be_killed_and_the_stage_goes_on(tmp_path: Path, finished: Path) -> None:
    run = slowed_run(tmp_path, finished)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for_steps(run, 3)
    process.kill()
    process.wait(10)
    done = submit(tmp_path, "tiny.yaml")  # joins the training that goes on, or finds it done
    assert done.returncode == 0, done.stdout + done.stderr
    assert [e["event"] for e in Run.open(run).read_events("train")].count("started") == 1
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == undisturbed(finished)


@pytest.mark.story
def test_a_rank_by_hand_does_not_join_a_running_stage(tmp_path: Path, finished: Path) -> None:
    run = slowed_run(tmp_path, finished)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for_steps(run, 3)
    command = [sys.executable, "-m", "pipeline", "train", str(run)]
    by_hand = subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=240)
    assert by_hand.returncode == ExitCode.USER_ERROR and "already running (pid" in by_hand.stderr
    assert process.wait(240) == 0
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == undisturbed(finished)


@pytest.mark.story
def test_a_lone_process_does_every_stage_without_submitit(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=5)
    for stage in ("prepare", "shard", "train", "evaluate"):
        command = [sys.executable, "-m", "pipeline", stage, str(config), "stages.train.tasks_per_node=1"]
        done = subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/tiny/evaluation/step-00000005.json").exists()


@pytest.mark.story
def test_nothing_held_out_is_nothing_to_evaluate(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=3)
    done = submit(tmp_path, str(config), "data.held_out=0")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("nothing is held out") == 2 and "not evaluated" not in done.stdout
    assert "not evaluated" not in submit(tmp_path, "report", "runs/tiny").stdout


@pytest.mark.story
def test_a_full_disk_is_named_by_submit(tmp_path: Path, finished: Path, small_disk: Path) -> None:
    shared_config(tmp_path, finished)
    (small_disk / "runs/tiny").mkdir(parents=True)
    (small_disk / "runs/tiny/data").symlink_to(finished / "runs/tiny/data")
    overrides = [f"run.root={small_disk}/runs", "checkpoint.keep=1", "recovery.preflight=false"]
    Run.create(load_config(tmp_path / "tiny.yaml", overrides))
    filler = small_disk / "filler"
    with open(filler, "wb") as file, pytest.raises(OSError, match="No space"):
        while True:
            os.write(file.fileno(), b"x" * 65536)
    os.truncate(filler, max(0, filler.stat().st_size - 300_000))
    done = submit(tmp_path, "tiny.yaml", *overrides, timeout=240)
    assert done.returncode == ExitCode.STORAGE, done.stdout + done.stderr
    assert "no space" in done.stdout and "Traceback" not in done.stdout + done.stderr
    filler.unlink()
    done = submit(tmp_path, "resume", f"{small_disk}/runs/tiny")
    assert done.returncode == 0, done.stdout + done.stderr
