"""Test the mistakes of tests/support/user_mistakes.py: the error names the facts, and the correction works.

A mistake is rejected at submission, or a stage fails. After the correction, the printed command or the same command
must succeed. After a mistake that is rejected at submission, the command is repeated with `--dry-run`, which performs
the same checks. submit.py runs in this process, and each stage runs as one forked rank instead of as a job.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.main import main
from cli.status import print_runs
from pipeline.base.console import PlainConsole
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.base.signals import STOP_SIGNALS
from pipeline.checkpoint.catalog import find_newest_step
from pipeline.config.read import load_config
from pipeline.run import stages
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run, create_points
from pipeline.run.events import read_stage_state
from pipeline.run.failure import explain_error
from slurm.submit import local_runner
from tests.support.events import write_event
from tests.support.other_user import as_other_user
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, run_stage_on_rank, write_corpus
from tests.support.user_mistakes import (
    CUSTOM_CONFIG,
    CUSTOM_MODULE,
    LATER_MISTAKES,
    SUBMISSION_MISTAKES,
    TINY_CONFIG,
    Mistake,
    write_arrays,
)


class FakeRunner:
    """A replacement for `local_runner.run_stage_locally`. It runs a stage as one forked rank."""

    runs_stages = False
    """If False, stages are not run and count as done."""
    was_called = False
    """True if the last command has run a stage."""

    @classmethod
    def run_stage(cls, run: Run, stage: str, flag: object, console: Console) -> ExitCode:
        """Run a stage if `runs_stages` is True and the stage is not done. Return the exit code."""
        cls.was_called = True
        if not cls.runs_stages or stages.load_stage_module(run, stage).describe_missing_outputs(run) is None:
            return ExitCode.DONE
        for event in ("submitted", "started"):
            write_event(run, event, stage, job_id=stage, executor="local")
        code, message = run_ranks(1, run_stage_and_catch_error, run.path, stage)[0]
        if code == ExitCode.DONE:
            return ExitCode.DONE
        cause = ExitCode(code).name.lower()
        write_event(run, "failed", stage, job_id=stage, cause=cause, exit_code=code, message=message)
        print_line = partial(console.print, soft_wrap=True)
        state = read_stage_state(run.read_events(stage))
        return local_runner.report_stage_end(run, stage, state, 0.0, None, print_line)


def run_stage_and_catch_error(rank_info: RankInfo, path: Path, stage: str) -> tuple[int, str]:
    """Run a stage in this rank. Return its exit code and error message; "" without an error."""
    try:
        return run_stage_on_rank(rank_info, path, stage), ""
    except Exception as error:
        return explain_error(error)


def run_submit(arguments: str) -> int:
    """Run submit.py in this process. `arguments` is split as in a shell. Return the exit code."""
    FakeRunner.was_called = False
    sys.argv = [str(CODE_ROOT / "submit.py"), *shlex.split(arguments)]
    with pytest.raises(SystemExit) as exit_info:
        main()
    return int(exit_info.value.code or 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write both configs, their inputs and the module into a new working directory, and yield its path.

    Afterwards, restore what submit.py changes in a process: umask, garbage collection and signal handlers.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(local_runner, "run_stage_locally", FakeRunner.run_stage)
    monkeypatch.setattr(FakeRunner, "runs_stages", False)
    Path("tiny.yaml").write_text(TINY_CONFIG)
    Path("classifier.yaml").write_text(CUSTOM_CONFIG)
    Path("classifier.py").write_text(CUSTOM_MODULE)
    write_corpus(tmp_path, 60)
    write_arrays("inputs", "labels")()
    umask = os.umask(0o022)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield tmp_path
    os.umask(umask)
    gc.enable()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def read_output(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was printed since the last call."""
    captured: Any = capsys.readouterr()
    return str(captured.out + captured.err)


def check_output(mistake: Mistake, output: str) -> None:
    """Check that the output has the facts and the code of a mistake. A traceback may occur only if stages run."""
    for fact in mistake.facts:
        assert fact in output, f"{fact!r} is missing:\n{output}"
    assert not mistake.code or f"error[{mistake.code}]" in output, output
    assert mistake.runs_stages or "Traceback" not in output


QUICK_MISTAKES = {"a wrong text_field"}
"""Mistakes that import torch in a new process or run stages, and are tested without the marker `story`."""


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(
            mistake,
            id=mistake.name,
            marks=[pytest.mark.story]
            if mistake.command.startswith("classifier.yaml") and mistake.name not in QUICK_MISTAKES
            else [],
        )
        for mistake in SUBMISSION_MISTAKES
    ],
)
def test_a_rejected_submission_names_its_correction(mistake: Mistake, capsys: pytest.CaptureFixture[str]) -> None:
    mistake.prepare()
    assert run_submit(mistake.command) == ExitCode.USER_ERROR
    check_output(mistake, read_output(capsys))
    assert not Path("runs").exists(), "a rejected submission must not create a run"
    mistake.fix()
    assert run_submit(f"{mistake.retry_command or mistake.command} --dry-run") == ExitCode.DONE, read_output(capsys)


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(
            mistake,
            id=mistake.name,
            marks=[pytest.mark.story] if mistake.runs_stages and mistake.name not in QUICK_MISTAKES else [],
        )
        for mistake in LATER_MISTAKES
    ],
)
def test_a_later_failure_names_its_correction(mistake: Mistake, capsys: pytest.CaptureFixture[str]) -> None:
    """A command fails, usually after the run was created. When the mistake is corrected, the run must finish.

    The command to repeat is the failed command, another command of the user, or the one that the error prints.
    """
    FakeRunner.runs_stages = mistake.runs_stages
    for command in mistake.earlier_commands:
        assert run_submit(command) == ExitCode.DONE
    mistake.prepare()
    read_output(capsys)
    assert run_submit(mistake.command) != ExitCode.DONE
    output = read_output(capsys)
    check_output(mistake, output)
    mistake.fix()
    retry_command = mistake.retry_command or mistake.command
    if retry_command == "printed":
        retry_command = re.findall(r"submit\.py (.+)$", output, re.M)[-1]
    assert run_submit(retry_command) == ExitCode.DONE, f"{retry_command}: {read_output(capsys)}"
    if mistake.runs_stages and not mistake.retry_command:
        run = Run.open(next(Path("runs").iterdir()))
        assert run.config == load_config(Path(mistake.command.split()[0])), "the run must have the corrected config"
    if mistake.runs_stages:
        metrics_file = max(Path().glob("runs/*/metrics.jsonl"), key=lambda file: file.stat().st_mtime_ns)
        steps = [line["step"] for line in read_jsonl(metrics_file)]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2
        assert find_newest_step(metrics_file.parent / "checkpoints") == len(steps)
        assert (metrics_file.parent / f"evaluation/step-{len(steps):08d}.json").exists()
    else:
        assert FakeRunner.was_called or retry_command == "status", "the corrected command did not run any stage"


@pytest.mark.story
def test_a_corrected_run_equals_one_that_was_correct_from_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a wrong number of classes fails. The corrected config is submitted twice, then also as a new run.

    At the end, the checkpoints are removed, and the wrong config is submitted again. The run was created with the wrong
    config, but the change back to it must also be shown.
    """
    FakeRunner.runs_stages = True
    correct_config = Path("classifier.yaml").read_text()
    Path("classifier.yaml").write_text(
        correct_config.replace("width: 4", "width: 4, classes: 2").replace("steps: 2", "steps: 3")
    )
    assert run_submit("classifier.yaml") != ExitCode.DONE
    Path("classifier.yaml").write_text(correct_config.replace("width: 4", "width: 8"))
    for name in ("classifier", "classifier", "correct"):
        assert run_submit(f"classifier.yaml run.name={name}") == ExitCode.DONE, read_output(capsys)
    assert compute_run_digest(Run(Path("runs/classifier"))) == compute_run_digest(Run(Path("runs/correct")))
    assert len(Path("runs/classifier/changes.jsonl").read_text().splitlines()) == 1
    shutil.rmtree("runs/classifier/checkpoints")
    Path("classifier.yaml").write_text(
        correct_config.replace("width: 4", "width: 4, classes: 2").replace("steps: 2", "steps: 3")
    )
    assert run_submit("classifier.yaml evaluate.batch=8") != ExitCode.DONE
    output = read_output(capsys)
    assert "model.options.classes: None → 2" in output, "a change back to the original value must also be shown"


WIDTH_SWEEP = "classifier.yaml 'sweep={grid: {model.options.width: [4, 8, 16]}}'"
LR_SWEEP = "tiny.yaml 'sweep={grid: {optimizer.lr: [0.1, 0.2, 0.3]}}'"
FAIL_WITH_WIDTH_8 = """\
def init(name, values, options):
    values.fill_(0.1)
    if options["width"] == 8:
        raise ValueError("not eight")
"""


@pytest.mark.story
def test_a_failed_sweep_point_prints_a_command_for_the_whole_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """The other points still train. The printed command can be repeated, also for the failed point alone.

    After the module is corrected, the command completes the sweep.
    """
    FakeRunner.runs_stages = True
    Path("classifier.py").write_text(CUSTOM_MODULE + FAIL_WITH_WIDTH_8)
    assert run_submit(WIDTH_SWEEP) == ExitCode.CRASHED
    output = read_output(capsys)
    points = Path("runs/classifier/points")
    newest_steps = {point.name: find_newest_step(point / "checkpoints") for point in sorted(points.iterdir())}
    assert newest_steps == {"000": 2, "001": 0, "002": 2}, "only point 001, with width 8, must fail"
    assert "points/00" in output and "run.name" in output
    assert output.rindex("point 001: train failed (crashed): ") > output.index("point 002\n"), (
        "the error must be printed again at the end"
    )
    # points 000 and 002 have checkpoints, so the values of the sweep cannot change
    assert run_submit(WIDTH_SWEEP.replace("8", "5")) == ExitCode.USER_ERROR
    assert "points/00" in read_output(capsys)
    (printed_command,) = {*re.findall(r"submit\.py (.+)$", output, re.M)}
    assert printed_command == "resume runs/classifier --update-code"
    point_command = printed_command.replace("runs/classifier ", "runs/classifier/points/001 ")
    for command in (point_command, point_command, printed_command):
        assert run_submit(command) == ExitCode.CRASHED, read_output(capsys)
    Path("classifier.py").write_text(CUSTOM_MODULE + FAIL_WITH_WIDTH_8.replace("== 8", "== 9"))
    for _ in range(2):
        assert run_submit(printed_command) == ExitCode.DONE, read_output(capsys)
    assert find_newest_step(points / "001/checkpoints") == 2 and (points / "001/evaluation/step-00000002.json").exists()


def test_a_failed_point_does_not_stop_the_others_but_a_signal_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`codes` has the exit code of each stage that must fail, by run or point and stage, such as `000 train`."""
    calls: list[str] = []
    codes: dict[str, ExitCode] = {}

    def run_stage(run: Run, stage: str, flag: object, console: Console) -> ExitCode:
        calls.append(f"{run.path.name} {stage}")
        return codes.get(calls[-1], ExitCode.DONE)

    def take_point_calls() -> list[str]:
        """Return the calls for points, such as `000 train`, and clear `calls`."""
        point_calls = [call for call in calls if call[0] == "0"]
        calls.clear()
        return point_calls

    monkeypatch.setattr(local_runner, "run_stage_locally", run_stage)
    all_calls = [f"00{number} {stage}" for number in range(3) for stage in ("train", "evaluate")]
    assert run_submit(LR_SWEEP) == ExitCode.DONE and take_point_calls() == all_calls
    codes |= {"000 train": ExitCode.NON_FINITE, "001 evaluate": ExitCode.CRASHED}
    read_output(capsys)
    assert run_submit(LR_SWEEP) == ExitCode.NON_FINITE and take_point_calls() == [all_calls[0], *all_calls[2:]]
    assert "bits per byte" in read_output(capsys), "the table of the points is missing"
    codes["001 train"] = ExitCode.STOPPED
    assert run_submit(LR_SWEEP) == ExitCode.STOPPED and take_point_calls() == ["000 train", "001 train"]
    codes["tiny prepare"] = ExitCode.STORAGE
    assert run_submit(LR_SWEEP) == ExitCode.STORAGE and calls == ["tiny prepare"]


def test_the_code_of_a_point_can_be_replaced_repeatedly_and_by_the_code_of_its_sweep(folder: Path) -> None:
    """At first, the code of a point is a link to the code of its sweep. A replacement must not follow the link.

    `.code.old` is what an earlier replacement leaves if it is killed.
    """
    config = load_config(Path("classifier.yaml"), ["sweep={grid: {model.options.width: [4, 8, 16]}}"])
    sweep = Run.create(config)
    point = create_points(sweep)[1]
    assert point.sweep_or_self.path == sweep.path and sweep.sweep_or_self is sweep
    for number in range(2):
        Path("classifier.py").write_text(f"{CUSTOM_MODULE}# {number}\n")
        (point.path / ".code.old").symlink_to("../../code")
        point.copy_code()
        assert not point.code_dir.is_symlink()
        assert (point.code_dir / "classifier.py").read_text().endswith(f"# {number}\n")
        assert (sweep.code_dir / "classifier.py").read_text() == CUSTOM_MODULE
        assert not (point.path / ".code.old").is_symlink()
    sweep.copy_code()
    assert point.code_dir.is_symlink()
    assert (point.code_dir / "classifier.py").read_text().endswith("# 1\n")


def test_an_unreadable_run_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_submit("tiny.yaml")
    run_submit("status runs/tiny")  # imports modules that the other user may not be able to read
    read_output(capsys)
    with as_other_user(folder):
        assert run_submit("status runs/tiny") == ExitCode.STORAGE
    assert "runs/tiny/config.yaml: permission denied" in read_output(capsys)
    assert run_submit("status runs/tiny") == ExitCode.DONE


def test_unreadable_runs_are_reported_as_unreadable_and_not_as_missing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With mode 711, another user cannot list `runs`. With mode 755, that user can list it, but cannot read the run."""
    assert run_submit("status") == ExitCode.DONE and "no runs below runs" in read_output(capsys)
    run_submit("tiny.yaml")
    run_submit("status")
    read_output(capsys)
    Path("runs").chmod(0o711)
    with as_other_user(folder):
        assert run_submit("status") == ExitCode.STORAGE
    output = read_output(capsys)
    assert "runs: permission denied" in output and "no runs" not in output
    Path("runs").chmod(0o755)
    console = PlainConsole(width=160, record=True)
    with as_other_user(folder):
        print_runs(Path("runs"), console)
    output = console.export_text()
    assert "runs/tiny cannot be read" in output and "permission denied" in output and "no runs" not in output
