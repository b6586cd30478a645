"""Imports run in one direction, without cycles, and the login node imports nothing heavy."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.architecture.imports import ORDER, ROOT, find_cycle, module_graph, reached, sources, wrong_directions

SLOW_PACKAGES = {"torch", "numpy", "h5py", "tokenizers", "safetensors", "pyarrow", "mpi4py"}
LIGHT_COMMANDS = (
    "main", "submit", "resume", "cancel", "init", "status", "logs", "report", "profile", "track", "doctor", "schema"
)  # fmt: skip
"""Modules of commands that must start fast on a login node: they never import a slow package."""


def test_imports_run_in_one_direction() -> None:
    assert wrong_directions() == []


def test_no_module_imports_itself_through_others() -> None:
    assert find_cycle(module_graph()) == []


@pytest.mark.parametrize("command", LIGHT_COMMANDS)
def test_a_light_command_imports_no_slow_package(command: str) -> None:
    imported = reached(f"cli.{command}")
    assert {name: importer for name, importer in imported.items() if name.split(".")[0] in SLOW_PACKAGES} == {}


def test_the_imports_of_a_command_are_followed() -> None:
    assert {"pipeline.config.read", "slurm.submit.chain", "submitit"} <= reached("cli.submit").keys()


def test_every_package_has_an_order() -> None:
    found: dict[str, set[str]] = {name: set() for name in ORDER}
    for module in sources():
        top, _, rest = module.partition(".")
        if top in ORDER:
            found[top].add(rest.partition(".")[0] if "." in rest else "")
    assert found == {name: {entry for entry in order if "." not in entry} for name, order in ORDER.items()}
    assert {f"{name}.{entry}" for name, order in ORDER.items() for entry in order if "." in entry} <= sources().keys()


def test_every_module_has_a_docstring() -> None:
    assert [name for name, path in sources().items() if not ast.get_docstring(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        ("pipeline/base/files.py", "from pipeline.config.sections import Config", "direction"),
        ("pipeline/run/metrics.py", "from slurm.query.job_states import call", "direction"),
        ("pipeline/parallel/traffic.py", "from data_prep.work_units import cut", "direction"),
        ("slurm/query/job_states.py", "from slurm.submit.chain import submit_chain", "direction"),
        ("pipeline/config/types.py", "from pipeline.config.sections import Config", "cycle"),
        ("slurm/query/status.py", "import numpy", "slow package"),
        ("pipeline/config/types.py", "import h5py", "slow package"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, file: str, line: str, rule: str) -> None:
    for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "submit.py", tmp_path)
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(
        text.replace("from __future__ import annotations\n", f"from __future__ import annotations\n{line}\n", 1)
    )
    assert (tmp_path / file).read_text() != text
    found = {
        "direction": lambda: set(wrong_directions(tmp_path)) - set(wrong_directions()),
        "cycle": lambda: find_cycle(module_graph(tmp_path)),
        "slow package": lambda: SLOW_PACKAGES & reached("cli.status", tmp_path).keys(),
    }
    assert found[rule]()
