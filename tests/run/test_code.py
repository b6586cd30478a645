"""Test the copy of the source code in a run: its bytecode belongs to its files."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.run import code
from tests.support.errors import raises_error

STAMP = 1_700_000_000
"""Modification time of the source files, in seconds."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a module of a package `slurm` that Python has compiled. The package takes the place of Sluice's code."""
    monkeypatch.setattr(code, "CODE_ROOT", tmp_path / "checkout")
    monkeypatch.setattr(code, "_COPIED_NAMES", ("slurm",))
    source = tmp_path / "checkout/slurm/answer.py"
    source.parent.mkdir(parents=True)
    (source.parent / "__init__.py").touch()
    source.write_text("print(1)\n")
    os.utime(source, (STAMP, STAMP))
    py_compile.compile(str(source), doraise=True)
    return source


def run_copy(run_dir: Path) -> str:
    """Copy the code to `run_dir` and return what the copied module prints."""
    run_dir.mkdir(exist_ok=True)
    code.copy_code(run_dir, [], "runs", 0o022)
    command = [sys.executable, "-c", "import slurm.answer"]
    return subprocess.run(command, cwd=run_dir / "code", capture_output=True, text=True, check=True, timeout=60).stdout


def test_valid_bytecode_is_copied(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.parent / "__init__.py").unlink()
    monkeypatch.setattr(py_compile, "compile", None)  # an error if a file is compiled
    assert run_copy(tmp_path / "run") == "1\n"
    copy = tmp_path / "run/code/slurm/answer.py"
    bytecode = Path(importlib.util.cache_from_source(copy))
    assert bytecode.read_bytes() == Path(importlib.util.cache_from_source(source)).read_bytes()
    assert bytecode.stat().st_mode == copy.stat().st_mode


@pytest.mark.parametrize(("text", "time"), [("print(\n\n\n", STAMP + 1), ("print(\n", STAMP)])
def test_an_invalid_file_is_an_error_although_its_older_version_was_compiled(
    tmp_path: Path, source: Path, text: str, time: int
) -> None:
    """Python recognizes a changed file by its time or its size."""
    source.write_text(text)
    os.utime(source, (time, time))
    with raises_error("run.invalid_code", "slurm/answer.py", source):
        run_copy(tmp_path / "run")
