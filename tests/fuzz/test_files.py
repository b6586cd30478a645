"""Tests that a run with a randomly damaged file has the results of an undamaged run, or fails with an error message.

This holds for commands that read the run (status, report, plan, verify) and for stages that continue it (train,
evaluate). The number of a case is the seed of its damage, so that a failed case can be repeated alone.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.console import PlainConsole
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError, find_storage_error
from pipeline.base.files import has_valid_checksum
from pipeline.checkpoint import catalog
from pipeline.evaluate.result import read_newest_result
from pipeline.run import lines
from pipeline.run.changes import is_config_change
from pipeline.run.directory import Run
from slurm.query.status import print_status
from tests.support.events import write_event
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank
from tracking.report import print_report

OVERRIDES = (
    "evaluate.max_sequences=16",
    "train.steps=4",
    "checkpoint.every_steps=2",
    "train.global_batch=2",
    "stages.train.tasks_per_node=1",
    "optimizer.schedule=constant",
)
STEPS = 6
"""New value of `train.steps` after the run has trained 4 steps."""
MALFORMED_LINES = [
    b"{}", b'{"step": 5}', b"null", b"\xff\xfe", b"\x1b[2J", b"[" * 5000, b'{"event": "started"}', b'{"set": {}}', b"",
    b'{"time": "2026-01-01T00:00:00Z", "event": "saved", "stage": "train"}', b"- x", b"run: 5", b"1e999",
]  # fmt: skip


@pytest.fixture(scope="module")
def undamaged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run, train and evaluate it, and return its directory."""
    run = make_run(tmp_path_factory.mktemp("undamaged"), overrides=OVERRIDES)
    for stage in ("train", "evaluate"):
        assert run_ranks(1, run_stage_on_rank, run.path, stage) == [ExitCode.DONE]
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=1)
    write_event(run, "done", "train", job_id="1", attempt=1, task=None, exit_code=0, seconds=1.0)
    (run.stage_dir("train") / "own-times.json").write_text('{\n "n1": 1.0\n}\n')
    run.apply_overrides([f"train.steps={STEPS}"])
    return run.path


def continue_run(rank_info: RankInfo, path: Path) -> tuple[str, Any]:
    """Train to the end, evaluate, verify and plan a run in this rank.

    Returns:
        One of three outcomes:
        "results", and the step and digest of the newest checkpoint with the step and loss of its evaluation;
        "rejected", and the error message;
        "traceback", and the traceback of an unexpected error.
    """
    from pipeline.checkpoint.checkpointer import compute_digest, verify_checkpoint
    from pipeline.run.failure import explain_error
    from planning.plan import describe_plan

    try:
        for stage in ("train", "evaluate"):
            assert run_stage_on_rank(rank_info, path, stage) == ExitCode.DONE
        run = Run.open(path)
        verify_checkpoint(run, None)
        list(describe_plan(run.config))
        step = catalog.find_newest_step(run.checkpoints_dir)
        result = read_newest_result(run)
        assert result is not None
        return "results", (
            step,
            compute_digest(run.checkpoints_dir / catalog.checkpoint_name(step)),
            result["step"],
            result["loss"],
        )
    except BaseException as error:
        exit_code, message = explain_error(error)
        is_error_message = message.startswith("error") and exit_code != ExitCode.CRASHED
        return "rejected" if is_error_message else "traceback", message


def show_run(path: Path) -> str:
    """Return the output of status and report for a run, or their error message."""
    console = PlainConsole(file=io.StringIO(), width=200, record=True)
    try:
        print_status(Run.open(path), console)
        print_report(Run.open(path), console)
    except (UserError, OSError) as error:
        user_error = error if isinstance(error, UserError) else find_storage_error(error)
        if user_error is None:
            raise
        return f"error: {user_error}"
    return console.export_text()


def list_files(path: Path) -> list[Path]:
    """Return the paths of the files to damage, relative to the run: all non-empty files except code, logs and locks."""
    files = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file() and file.stat().st_size]
    return [
        file for file in files if file.parts[0] != "code" and not file.name.startswith(("lock", ".creating", "rank-"))
    ]


def damage_file(generator: random.Random, run: Path) -> str:
    """Damage one file of a run and return a description of the damage."""
    target_file = run / generator.choice(list_files(run))
    content = target_file.read_bytes()
    damage_kind = generator.randrange(9)
    position = generator.randrange(max(1, len(content)))
    if damage_kind <= 1:
        flipped_byte = bytes([content[position] ^ 1 << generator.randrange(8)])
        damaged_content = content[:position] + flipped_byte + content[position + 1 :]
        description = f"bit flipped at {position}"
    elif damage_kind == 2:
        digit_positions = [number for number, byte in enumerate(content) if 48 <= byte < 58] or [position]
        position = generator.choice(digit_positions)
        damaged_content = content[:position] + str(generator.randrange(10)).encode() + content[position + 1 :]
        description = f"digit changed at {position}"
    elif damage_kind == 3:
        damaged_content = content[:position]
        description = f"truncated at {position}"
    elif damage_kind == 4:
        damaged_content = content[:position] + content[position + generator.choice((1, 20, 5000)) :]
        description = f"bytes removed at {position}"
    elif damage_kind == 5:
        file_lines = content.splitlines(keepends=True)
        first_line = generator.randrange(len(file_lines))
        second_line = generator.randrange(len(file_lines))
        if generator.random() < 0.5:
            file_lines[first_line], file_lines[second_line] = file_lines[second_line], file_lines[first_line]
            description = f"lines {first_line} and {second_line} swapped"
        else:
            del file_lines[first_line]
            description = f"line {first_line} removed"
        damaged_content = b"".join(file_lines)
    elif damage_kind == 6:
        file_lines = content.splitlines(keepends=True)
        file_lines.insert(generator.randrange(len(file_lines) + 1), generator.choice(MALFORMED_LINES) + b"\n")
        damaged_content = b"".join(file_lines)
        description = "malformed line added"
    elif damage_kind == 7:
        other_file = run / generator.choice(list_files(run))
        damaged_content = other_file.read_bytes()
        other_file.write_bytes(content)
        description = f"swapped with {other_file.relative_to(run)}"
    else:
        target_file.unlink()
        replacement = generator.choice(("nothing", "folder", "pipe", "link to itself"))
        if replacement == "folder":
            target_file.mkdir()
        elif replacement == "pipe":
            os.mkfifo(target_file)
        elif replacement == "link to itself":
            target_file.symlink_to(target_file.name)
        return f"{target_file.relative_to(run)}: replaced by {replacement}"
    target_file.write_bytes(damaged_content)
    return f"{target_file.relative_to(run)}: {description}"


def read_requested_steps(path: Path) -> int:
    """Return `train.steps` of the damaged run, or STEPS if its config cannot be read.

    The damage may have removed the line of changes.jsonl that sets the number of steps.
    """
    try:
        return Run.open(path).config.train.steps or 0
    except (UserError, OSError):
        return STEPS


@pytest.fixture(scope="module")
def expected_results(undamaged_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Return the results of the undamaged run with 4 steps and with `STEPS` steps, by number of steps."""
    results = {}
    for steps in (4, STEPS):
        copy = tmp_path_factory.mktemp("undisturbed") / "tiny"
        shutil.copytree(undamaged_run, copy, symlinks=True)
        if steps == 4:
            (copy / "changes.jsonl").unlink()
        outcome, results[steps] = run_ranks(1, continue_run, copy)[0]
        assert outcome == "results", results
        assert results[steps][0] == results[steps][2] == steps, results
    # status and report must use all files of the undamaged run, and its files must pass their checks
    output = show_run(undamaged_run)
    assert "local compute time per step by host" in output
    assert "left out" not in output
    assert has_valid_checksum(json.loads((copy / "evaluation/step-00000006.json").read_text()))
    assert lines.read_required_lines(copy / "changes.jsonl", is_config_change)
    return results


def is_same_result(actual: Any, expected: Any) -> bool:
    """Return True if steps and weights are equal and the loss differs only by rounding.

    The damage may change settings of the evaluation that affect rounding.
    """
    return expected is not None and actual[:3] == expected[:3] and math.isclose(actual[3], expected[3], rel_tol=1e-5)


def find_problem(undamaged_run: Path, expected_results: dict[int, Any], folder: Path, number: int) -> str | None:
    """Damage a copy of the run and run all commands on it. Return a description of the first problem, or None."""
    path = folder / "tiny"
    shutil.copytree(undamaged_run, path, symlinks=True)
    try:
        description = f"case {number}: {damage_file(random.Random(number), path)}"
        try:
            output = show_run(path)
        except Exception as error:
            return f"{description}: status or report: {type(error).__name__}: {error}"
        if "\x1b" in output:
            return f"{description}: control sequences in the output"
        steps = read_requested_steps(path)
        outcome, result = run_ranks(1, continue_run, path)[0]
        if outcome == "traceback":
            return f"{description}: {result}"
        if outcome == "results" and not is_same_result(result, expected_results.get(steps)):
            return f"{description}: {result} instead of {expected_results}"
        return None
    finally:
        shutil.rmtree(path)


LONG_CASES = [pytest.param(range(first, first + 100), marks=pytest.mark.long) for first in range(10, 510, 100)]


@pytest.mark.parametrize("cases", [pytest.param(range(10), marks=pytest.mark.story), *LONG_CASES], ids=str)
def test_damaged_run_has_the_same_results_or_is_rejected(
    undamaged_run: Path, expected_results: dict[int, Any], tmp_path: Path, cases: range
) -> None:
    results = (find_problem(undamaged_run, expected_results, tmp_path, number) for number in cases)
    problems = [problem for problem in results if problem]
    assert not problems, "\n".join(problems)
