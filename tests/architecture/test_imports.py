"""Tests that imports follow the order of packages without cycles, and that commands for the login node start fast."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.architecture.imports import (
    PACKAGE_ORDER,
    ROOT,
    build_module_graph,
    find_cycle,
    find_forbidden_imports,
    find_reachable_imports,
    list_modules,
)

SLOW_PACKAGES = {"torch", "numpy", "h5py", "tokenizers", "safetensors", "pyarrow", "mpi4py"}
LIGHT_COMMANDS = (
    "main", "submit", "resume", "cancel", "init", "status", "logs", "report", "profile", "track", "doctor", "schema"
)  # fmt: skip
"""Modules of commands that must start fast on a login node. They must not import a slow package."""


def test_imports_follow_the_order_of_packages() -> None:
    assert find_forbidden_imports() == []


def test_imports_have_no_cycles() -> None:
    assert find_cycle(build_module_graph()) == []


@pytest.mark.parametrize("command", LIGHT_COMMANDS)
def test_a_light_command_imports_no_slow_package(command: str) -> None:
    importers = find_reachable_imports(f"cli.{command}")
    assert {name: importer for name, importer in importers.items() if name.split(".")[0] in SLOW_PACKAGES} == {}


def test_reachable_imports_include_indirect_imports() -> None:
    assert {"pipeline.config.read", "slurm.submit.chain", "submitit"} <= find_reachable_imports("cli.submit").keys()


def test_the_order_lists_every_subpackage() -> None:
    subpackages: dict[str, set[str]] = {name: set() for name in PACKAGE_ORDER}
    for module in list_modules():
        top_package, _, module_below_top = module.partition(".")
        if top_package in PACKAGE_ORDER:
            subpackages[top_package].add(module_below_top.partition(".")[0] if "." in module_below_top else "")
    assert subpackages == {
        name: {entry for entry in order if "." not in entry} for name, order in PACKAGE_ORDER.items()
    }
    assert {
        f"{name}.{entry}" for name, order in PACKAGE_ORDER.items() for entry in order if "." in entry
    } <= list_modules().keys()


def test_every_module_has_a_docstring() -> None:
    assert [name for name, path in list_modules().items() if not ast.get_docstring(ast.parse(path.read_text()))] == []


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
def test_a_forbidden_import_is_detected(tmp_path: Path, file: str, line: str, rule: str) -> None:
    for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "submit.py", tmp_path)
    original_text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(
        original_text.replace(
            "from __future__ import annotations\n", f"from __future__ import annotations\n{line}\n", 1
        )
    )
    assert (tmp_path / file).read_text() != original_text
    checks = {
        "direction": lambda: set(find_forbidden_imports(tmp_path)) - set(find_forbidden_imports()),
        "cycle": lambda: find_cycle(build_module_graph(tmp_path)),
        "slow package": lambda: SLOW_PACKAGES & find_reachable_imports("cli.status", tmp_path).keys(),
    }
    assert checks[rule]()
