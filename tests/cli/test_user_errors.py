"""User mistakes of tests/support/user_mistakes.py: the error contains the facts, and its correction works.

A mistake is rejected at submission, or a stage fails. After the correction, the printed command (or the same command)
must succeed. submit.py runs in this process, and each stage is one forked rank instead of a job. For mistakes that are
rejected at submission, `--dry-run`, which performs the same checks, must succeed afterwards.
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
from pipeline.run.directory import Run
from pipeline.run.events import read_stage_state
from pipeline.run.failure import explain_error
from pipeline.run.points import create_points
from slurm.submit import local_runner
from tests.support.events import write_event
from tests.support.other_user import as_other_user
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, stage_rank, write_corpus
from tests.support.user_mistakes import (
    CUSTOM_CONFIG,
    CUSTOM_MODULE,
    LATER_MISTAKES,
    SUBMISSION_MISTAKES,
    TINY_CONFIG,
    Mistake,
    write_arrays,
)


class Stages:
    """In place of the job of a stage: one forked rank."""

    run = False
    """Whether they run at all."""
    began = False
    """Whether a chain was let through."""

    @classmethod
    def stage(cls, run: Run, stage: str, flag: object, console: Console) -> ExitCode:
        cls.began = True
        if not cls.run or stages.load_stage_module(stage).missing_outputs(run) is None:
            return ExitCode.DONE
        for event in ("submitted", "started"):
            write_event(run, event, stage, job_id=stage, executor="local")
        code, message = run_ranks(1, in_a_rank, run.path, stage)[0]
        if code == ExitCode.DONE:
            return ExitCode.DONE
        words = {"cause": ExitCode(code).name.lower(), "exit_code": code, "message": message}
        write_event(run, "failed", stage, job_id=stage, **words)
        say = partial(console.print, soft_wrap=True)
        return local_runner.report_stage_end(run, stage, read_stage_state(run.read_events(stage)), 0.0, None, say)


def in_a_rank(where: RankInfo, path: Path, stage: str) -> tuple[int, str]:
    """The stage's exit code and words."""
    try:
        return stage_rank(where, path, stage), ""
    except Exception as error:
        return explain_error(error)


def submit_py(words: str) -> int:
    """Type a command; its exit code."""
    Stages.began = False
    sys.argv = [str(CODE_ROOT / "submit.py"), *shlex.split(words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a person, with both configs and what they need; what the door changes is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(local_runner, "run_stage_locally", Stages.stage)
    monkeypatch.setattr(Stages, "run", False)
    for name, text in (("tiny.yaml", TINY_CONFIG), ("own.yaml", CUSTOM_CONFIG), ("own.py", CUSTOM_MODULE)):
        Path(name).write_text(text)
    write_corpus(tmp_path, 60)
    write_arrays("inputs", "labels")()
    umask, handlers = os.umask(0o022), {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield tmp_path
    os.umask(umask)
    gc.enable()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def answer(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed since the last look."""
    seen: Any = capsys.readouterr()
    return str(seen.out + seen.err)


def check_output(mistake: Mistake, output: str) -> None:
    for fact in mistake.facts:
        assert fact in output, f"{fact!r} is missing:\n{output}"
    assert not mistake.code or f"error[{mistake.code}]" in output, output
    assert mistake.runs_stages or "Traceback" not in output


@pytest.mark.parametrize("mistake", SUBMISSION_MISTAKES, ids=lambda mistake: mistake.name)
def test_a_rejected_submission_names_its_correction(mistake: Mistake, capsys: pytest.CaptureFixture[str]) -> None:
    mistake.prepare()
    assert submit_py(mistake.command) == ExitCode.USER_ERROR
    check_output(mistake, answer(capsys))
    assert not Path("runs").exists(), "a rejected submission leaves no run"
    mistake.fix()
    assert submit_py(f"{mistake.retry_command or mistake.command} --dry-run") == ExitCode.DONE, answer(capsys)


QUICK = {"a wrong text_field", "more steps after the training"}
"""Mistakes that run stages and are tested without the marker `story`."""


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(
            mistake,
            id=mistake.name,
            marks=[pytest.mark.story] if mistake.runs_stages and mistake.name not in QUICK else [],
        )
        for mistake in LATER_MISTAKES
    ],
)
def test_a_later_failure_names_its_correction(mistake: Mistake, capsys: pytest.CaptureFixture[str]) -> None:
    Stages.run = mistake.runs_stages
    for command in mistake.earlier_commands:
        assert submit_py(command) == ExitCode.DONE
    mistake.prepare()
    answer(capsys)
    assert submit_py(mistake.command) != ExitCode.DONE
    output = answer(capsys)
    check_output(mistake, output)
    mistake.fix()
    retry_command = mistake.retry_command or mistake.command
    if retry_command == "printed":
        retry_command = re.findall(r"submit\.py (.+)$", output, re.M)[-1]
    assert submit_py(retry_command) == ExitCode.DONE, f"{retry_command}: {answer(capsys)}"
    if mistake.runs_stages and not mistake.retry_command:
        run = Run.open(next(Path("runs").iterdir()))
        assert run.config == load_config(Path(mistake.command.split()[0])), "the run has exactly the corrected config"
    if mistake.runs_stages:
        newest = max(Path().glob("runs/*/metrics.jsonl"), key=lambda file: file.stat().st_mtime_ns)
        steps = [line["step"] for line in read_jsonl(newest)]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2
        assert find_newest_step(newest.parent / "checkpoints") == len(steps)
        assert (newest.parent / f"evaluation/step-{len(steps):08d}.json").exists()
    else:
        assert Stages.began or retry_command == "status"


@pytest.mark.story
def test_a_corrected_run_is_one_that_was_right_from_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """And what was submitted before is known again; a correction of the correction is one, too."""
    Stages.run = True
    right = Path("own.yaml").read_text()
    Path("own.yaml").write_text(right.replace("width: 4", "width: 4, classes: 2").replace("steps: 2", "steps: 3"))
    assert submit_py("own.yaml") != ExitCode.DONE
    Path("own.yaml").write_text(right.replace("width: 4", "width: 8"))
    for name in ("own", "own", "calm"):
        assert submit_py(f"own.yaml run.name={name}") == ExitCode.DONE, answer(capsys)
    assert compute_run_digest(Run(Path("runs/own"))) == compute_run_digest(Run(Path("runs/calm")))
    assert len(Path("runs/own/changes.jsonl").read_text().splitlines()) == 1
    shutil.rmtree("runs/own/checkpoints")
    Path("own.yaml").write_text(right.replace("width: 4", "width: 4, classes: 2").replace("steps: 2", "steps: 3"))
    assert submit_py("own.yaml evaluate.batch=8") != ExitCode.DONE
    assert "corrected model.options.classes: None → 2" in answer(capsys), "also back to what it was made with"


SWEPT = "own.yaml 'sweep={grid: {model.options.width: [4, 8, 16]}}'"
RATES = "tiny.yaml 'sweep={grid: {optimizer.lr: [0.1, 0.2, 0.3]}}'"
EIGHT = """\
def init(name, values, options):
    values.fill_(0.1)
    if options["width"] == 8:
        raise ValueError("not eight")
"""


@pytest.mark.story
def test_a_point_that_failed_leads_back_to_the_whole_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """The others train all the same; the command that is printed can be given twice, for the point alone, too."""
    Stages.run = True
    Path("own.py").write_text(CUSTOM_MODULE + EIGHT)
    assert submit_py(SWEPT) == ExitCode.CRASHED
    said = answer(capsys)
    points = Path("runs/own/points")
    done = {point.name: find_newest_step(point / "checkpoints") for point in sorted(points.iterdir())}
    assert done == {"000": 2, "001": 0, "002": 2}
    assert "continues from points/00" in said and "correct it and submit it under another run.name" in said
    assert said.rindex("point 001: train failed (crashed): ") > said.index("point 002\n"), "and told at the end"
    assert submit_py(SWEPT.replace("8", "5")) == ExitCode.USER_ERROR
    assert "what it has was made with its own: points/00" in answer(capsys)
    (back,) = {*re.findall(r"submit\.py (.+)$", said, re.M)}
    assert back == "resume runs/own --update-code"
    for command in (f"{back.replace('own ', 'own/points/001 ')}", f"{back.replace('own ', 'own/points/001 ')}", back):
        assert submit_py(command) == ExitCode.CRASHED, answer(capsys)
    Path("own.py").write_text(CUSTOM_MODULE + EIGHT.replace("== 8", "== 9"))
    for _ in range(2):
        assert submit_py(back) == ExitCode.DONE, answer(capsys)
    assert find_newest_step(points / "001/checkpoints") == 2 and (points / "001/evaluation/step-00000002.json").exists()


def test_a_point_that_fails_leaves_the_others_alone_and_a_stop_ends_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    codes: dict[str, ExitCode] = {}

    def stage(run: Run, stage: str, flag: object, console: Console) -> ExitCode:
        asked.append(f"{run.path.name} {stage}")
        return codes.get(asked[-1], ExitCode.DONE)

    def points() -> list[str]:
        found = [words for words in asked if words[0] == "0"]
        asked.clear()
        return found

    monkeypatch.setattr(local_runner, "run_stage_locally", stage)
    everything = [f"00{number} {stage}" for number in range(3) for stage in ("train", "evaluate")]
    assert submit_py(RATES) == ExitCode.DONE and points() == everything
    codes |= {"000 train": ExitCode.NON_FINITE, "001 evaluate": ExitCode.CRASHED}
    answer(capsys)
    assert submit_py(RATES) == ExitCode.NON_FINITE and points() == [everything[0], *everything[2:]]
    assert "bits per byte" in answer(capsys), "the table of the points"
    codes["001 train"] = ExitCode.STOPPED
    assert submit_py(RATES) == ExitCode.STOPPED and points() == ["000 train", "001 train"]
    codes["tiny prepare"] = ExitCode.STORAGE
    assert submit_py(RATES) == ExitCode.STORAGE and asked == ["tiny prepare"]


def test_the_code_of_a_point_is_replaced_again_and_again_and_by_its_sweeps(folder: Path) -> None:
    """Its link to that of its sweep is no folder; a killed replacement may have left one, too."""
    config = load_config(Path("own.yaml"), ["sweep={grid: {model.options.width: [4, 8, 16]}}"])
    whole = Run.create(config)
    point = create_points(whole)[1]
    assert point.sweep_or_self.path == whole.path and whole.sweep_or_self is whole
    for number in range(2):
        Path("own.py").write_text(f"{CUSTOM_MODULE}# {number}\n")
        (point.path / ".code.old").symlink_to("../../code")
        point.copy_code()
        assert not point.code_dir.is_symlink() and (point.code_dir / "own.py").read_text().endswith(f"# {number}\n")
        assert (whole.code_dir / "own.py").read_text() == CUSTOM_MODULE and not (point.path / ".code.old").is_symlink()
    whole.copy_code()
    assert point.code_dir.is_symlink() and (point.code_dir / "own.py").read_text().endswith("# 1\n")


def test_a_folder_that_may_not_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit_py("tiny.yaml")
    submit_py("status runs/tiny")  # it imports what that user may not read, where Python is root's
    answer(capsys)
    with as_other_user(folder):
        assert submit_py("status runs/tiny") == ExitCode.STORAGE
    assert "runs/tiny/config.yaml: permission denied: check the owner and mode of the folder" in answer(capsys)
    assert submit_py("status runs/tiny") == ExitCode.DONE


def test_runs_that_may_not_be_read_are_not_taken_for_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit_py("status") == ExitCode.DONE and "no runs below runs" in answer(capsys)
    submit_py("tiny.yaml")
    submit_py("status")
    answer(capsys)
    Path("runs").chmod(0o711)
    with as_other_user(folder):
        assert submit_py("status") == ExitCode.STORAGE
    shown = answer(capsys)
    assert "runs: permission denied" in shown and "no runs" not in shown
    Path("runs").chmod(0o755)
    console = PlainConsole(width=160, record=True)
    with as_other_user(folder):
        print_runs(Path("runs"), console)
    shown = console.export_text()
    assert "runs/tiny cannot be read" in shown and "permission denied" in shown and "no runs" not in shown
