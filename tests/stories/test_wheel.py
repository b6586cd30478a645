"""Test that the wheel works outside of a checkout, in a new virtual environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from pipeline.run.code import CODE_ROOT

pytestmark = pytest.mark.story
SOURCES = (
    "cli",
    "slurm",
    "tracking",
    "planning",
    "pipeline",
    "data_prep",
    "configs",
    "client",
    "submit.py",
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
)


def run_command(command: list[str], folder: Path, timeout: int = 120) -> str:
    """Run a command without environment variables of Python and Slurm. Check that it succeeds. Return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLURM"))}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and install it into a virtual environment. Return the path of the command `sluice` in it.

    The environment takes the dependencies of the wheel from the environment that runs the tests.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    environment = folder / "environment"
    source.mkdir()
    for name in SOURCES:  # build from a copy, because the build leaves files in the folder
        path = CODE_ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run_command(
        [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), "."], source, 300
    )
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    (wheel,) = folder.glob("*.whl")
    run_command([*pip, "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)], folder, 300)
    packages = Path(
        run_command([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    )
    # This .pth file adds the folder with the dependencies. If Sluice is installed there in editable mode, the code of
    # the checkout is still not importable: Python ignores .pth files in folders that a .pth file adds.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    locations = run_command(
        [str(python), "-c", "import pipeline, submit; print(pipeline.__file__, submit.__file__)"], folder
    )
    assert all(Path(path).is_relative_to(packages) for path in locations.split())
    return environment / "bin/sluice"


def test_the_wheel_works_outside_a_checkout(sluice: Path, tmp_path: Path) -> None:
    """The commands `init`, `submit`, `status`, `plan` and `report` must find the files that they need in the wheel."""
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / f"texts/{number}.txt").write_text(f"{number}: the quick brown fox jumps over the lazy dog. " * 400)
    run_command([str(sluice), "init"], tmp_path)
    config = (tmp_path / "my_text.yaml").read_text()
    schema = Path(config.split("$schema=", 1)[1].split("\n", 1)[0])
    assert schema.is_file() and schema.is_relative_to(sluice.parents[1])
    overrides = ["train.steps=4", "optimizer.warmup_steps=1", "checkpoint.every_steps=2"]
    overrides += ["data.tokenizer.vocab_size=300", "data.sequence_length=32"]
    overrides += ["model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=1"]
    run_command([str(sluice), "my_text.yaml", "--executor", "local", *overrides], tmp_path, 300)
    status = run_command([str(sluice), "status", "runs/my-text"], tmp_path)
    assert [line.split()[1] for line in status.splitlines() if line.split()[:1] == ["train"]] == ["done"]
    assert "h100" in run_command([str(sluice), "plan", "my_text.yaml", "--machine", "h100"], tmp_path).lower()
    run_command([str(sluice), "report", "runs/my-text"], tmp_path)
    assert (tmp_path / "runs/my-text/report.html").is_file()


def test_the_wheel_contains_every_file_of_the_packages(sluice: Path) -> None:
    (packages,) = sluice.parents[1].glob("lib/python*/site-packages")
    source_files = [
        path.relative_to(CODE_ROOT)
        for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep", "configs", "client")
        for path in (CODE_ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert [str(path) for path in source_files if not (packages / path).is_file()] == []
