"""What a finished run holds, altered in all the ways that disks, hands and enemies alter it.

Whoever looks (status, report, plan, verify) and whoever goes on from it (a restore, training, an evaluation) says the
same numbers as of the undisturbed run, or refuses in words. A case is made from its number, so one that fails can be
run again alone.
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
from tests.support.tiny import make_run, stage_rank
from tracking.report import print_report

SMALL = (
    "evaluate.max_sequences=16",
    "train.steps=4",
    "checkpoint.every_steps=2",
    "train.global_batch=2",
    "stages.train.tasks_per_node=1",
    "optimizer.schedule=constant",
)
STEPS = 6
"""The run was made to train 4 steps, which it did, and then asked for so many."""
ODD_LINES = [
    b"{}", b'{"step": 5}', b"null", b"\xff\xfe", b"\x1b[2J", b"[" * 5000, b'{"event": "started"}', b'{"set": {}}', b"",
    b'{"time": "2026-01-01T00:00:00Z", "event": "saved", "stage": "train"}', b"- x", b"run: 5", b"1e999",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run before anything is altered."""
    run = make_run(tmp_path_factory.mktemp("whole"), overrides=SMALL)
    for stage in ("train", "evaluate"):
        assert run_ranks(1, stage_rank, run.path, stage) == [ExitCode.DONE]
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=1)
    write_event(run, "done", "train", job_id="1", attempt=1, task=None, exit_code=0, seconds=1.0)
    (run.stage_dir("train") / "own-times.json").write_text('{\n "n1": 1.0\n}\n')
    run.apply_overrides([f"train.steps={STEPS}"])
    return run.path


def go_on(rank_info: RankInfo, path: Path) -> tuple[str, Any]:
    """In a rank: train to the end, evaluate, verify. The numbers; or the words in which it was refused."""
    from pipeline.checkpoint.checkpointer import verify_checkpoint
    from pipeline.run.failure import explain_error
    from planning.plan import describe_plan

    try:
        for stage in ("train", "evaluate"):
            assert stage_rank(rank_info, path, stage) == ExitCode.DONE
        run = Run.open(path)
        verify_checkpoint(run, None)
        list(describe_plan(run.config))
        step, result = catalog.find_newest_step(run.checkpoints_dir), read_newest_result(run)
        from pipeline.checkpoint.checkpointer import compute_digest

        assert result is not None
        return "numbers", (
            step,
            compute_digest(run.checkpoints_dir / catalog.checkpoint_name(step)),
            result["step"],
            result["loss"],
        )
    except BaseException as error:
        code, words = explain_error(error)
        return ("refused" if words.startswith("error") and code != ExitCode.CRASHED else "traceback"), words


def look(path: Path) -> str:
    """What status and report show of a run, or in which words they refuse it."""
    console = PlainConsole(file=io.StringIO(), width=200, record=True)
    try:
        print_status(Run.open(path), console)
        print_report(Run.open(path), console)
    except (UserError, OSError) as error:
        found = error if isinstance(error, UserError) else find_storage_error(error)
        if found is None:
            raise
        return f"error: {found}"
    return console.export_text()


def files(path: Path) -> list[Path]:
    """What may be altered: all but code, logs and locks, by relative path."""
    found = [one.relative_to(path) for one in sorted(path.rglob("*")) if one.is_file() and one.stat().st_size]
    return [one for one in found if one.parts[0] != "code" and not one.name.startswith(("lock", ".creating", "rank-"))]


def alter(source: random.Random, run: Path) -> str:
    """Alter one file of a run; what was done, in words."""
    target = run / source.choice(files(run))
    content, way = target.read_bytes(), source.randrange(9)
    at = source.randrange(max(1, len(content)))
    name = f"{target.relative_to(run)}"
    if way <= 1:
        new, words = content[:at] + bytes([content[at] ^ 1 << source.randrange(8)]) + content[at + 1 :], f"flip at {at}"
    elif way == 2:
        digits = [i for i, byte in enumerate(content) if 48 <= byte < 58] or [at]
        at = source.choice(digits)
        new, words = content[:at] + str(source.randrange(10)).encode() + content[at + 1 :], f"digit at {at}"
    elif way == 3:
        new, words = content[:at], f"cut at {at}"
    elif way == 4:
        new, words = content[:at] + content[at + source.choice((1, 20, 5000)) :], f"bytes removed at {at}"
    elif way == 5:
        rows = content.splitlines(keepends=True)
        one, other = source.randrange(len(rows)), source.randrange(len(rows))
        if source.random() < 0.5:
            rows[one], rows[other] = rows[other], rows[one]
            new, words = b"".join(rows), f"lines {one} and {other} swapped"
        else:
            del rows[one]
            new, words = b"".join(rows), f"line {one} removed"
    elif way == 6:
        rows = content.splitlines(keepends=True)
        rows.insert(source.randrange(len(rows) + 1), source.choice(ODD_LINES) + b"\n")
        new, words = b"".join(rows), "odd line"
    elif way == 7:
        other_file = run / source.choice(files(run))
        words = f"swapped with {other_file.relative_to(run)}"
        new = other_file.read_bytes()
        other_file.write_bytes(content)
    else:
        target.unlink()
        kind = source.choice(("gone", "folder", "pipe", "circle"))
        if kind == "folder":
            target.mkdir()
        elif kind == "pipe":
            os.mkfifo(target)
        elif kind == "circle":
            target.symlink_to(target.name)
        return f"{name}: {kind}"
    target.write_bytes(new)
    return f"{name}: {words}"


def steps_of(path: Path) -> int:
    """How many steps the altered run says it was asked for: a change that was cut off counts as never asked."""
    try:
        return Run.open(path).config.train.steps or 0
    except (UserError, OSError):
        return STEPS


@pytest.fixture(scope="module")
def numbers(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Those of the undisturbed run, by the steps that it was asked for."""
    found = {}
    for steps in (4, STEPS):
        copy = tmp_path_factory.mktemp("calm") / "tiny"
        shutil.copytree(whole, copy, symlinks=True)
        if steps == 4:
            (copy / "changes.jsonl").unlink()
        kind, found[steps] = run_ranks(1, go_on, copy)[0]
        assert kind == "numbers" and found[steps][0] == found[steps][2] == steps, found
    assert "local compute time per step by host" in look(whole) and "left out" not in look(whole)
    assert has_valid_checksum(json.loads((copy / "evaluation/step-00000006.json").read_text()))
    assert lines.read_required_lines(copy / "changes.jsonl", is_config_change)
    return found


def same(found: Any, wanted: Any) -> bool:
    """The same weights. The last digits of a loss may follow a setting that is no part of the training."""
    return wanted is not None and found[:3] == wanted[:3] and math.isclose(found[3], wanted[3], rel_tol=1e-5)


def one_case(whole: Path, numbers: dict[int, Any], folder: Path, number: int) -> str | None:
    """What is wrong with a case; None where nothing is."""
    path = folder / "tiny"
    shutil.copytree(whole, path, symlinks=True)
    try:
        what = f"case {number}: {alter(random.Random(number), path)}"
        try:
            shown = look(path)
        except Exception as error:
            return f"{what}: look: {type(error).__name__}: {error}"
        if "\x1b" in shown:
            return f"{what}: commands to the terminal"
        steps = steps_of(path)
        kind, found = run_ranks(1, go_on, path)[0]
        if kind == "traceback":
            return f"{what}: {found}"
        if kind == "numbers" and not same(found, numbers.get(steps)):
            return f"{what}: {found} instead of {numbers}"
        return None
    finally:
        shutil.rmtree(path)


LONG = [pytest.param(range(first, first + 100), marks=pytest.mark.long) for first in range(10, 510, 100)]


@pytest.mark.parametrize("cases", [range(10), *LONG], ids=str)
def test_an_altered_run_gives_the_same_numbers_or_is_refused(
    whole: Path, numbers: dict[int, Any], tmp_path: Path, cases: range
) -> None:
    wrong = [words for number in cases if (words := one_case(whole, numbers, tmp_path, number))]
    assert not wrong, "\n".join(wrong)
