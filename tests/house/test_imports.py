"""The house holds: imports in one direction, no circle, nothing heavy on the login node."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.house.imports import FLOORS, ROOT, arrows_back, circle, file_graph, reached, room, room_graph, sources

HEAVY = {"torch", "numpy", "h5py", "tokenizers", "safetensors", "pyarrow", "mpi4py"}


def test_no_arrow_runs_back() -> None:
    assert arrows_back() == []


def test_no_circle_of_files_or_rooms() -> None:
    assert circle(file_graph()) == []
    assert circle(room_graph()) == []


def test_the_login_node_reaches_nothing_heavy() -> None:
    found = reached("submit")
    assert {"pipeline.config.read", "slurm.show.status", "slurm.submit.chain"} <= found.keys(), "it was followed"
    assert {name: by for name, by in found.items() if name.split(".")[0] in HEAVY} == {}


def test_every_package_has_a_floor() -> None:
    assert {room(path) for path in sources().values()} == {name for floor in FLOORS for name in floor}


def test_every_file_teaches() -> None:
    silent = [name for name, path in sources().items() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


@pytest.mark.parametrize(
    ("file", "line", "told"),
    [
        ("pipeline/base/files.py", "from pipeline.config.sections import Config", "arrow"),
        ("pipeline/run/metrics.py", "from slurm.query.states import call", "arrow"),
        ("pipeline/parallel/traffic.py", "from data_prep.text.units import cut", "arrow"),
        ("slurm/query/states.py", "from slurm.show.status import judge", "arrow"),
        ("pipeline/config/types.py", "from pipeline.config.sections import Config", "circle"),
        ("slurm/show/status.py", "import numpy", "heavy"),
        ("pipeline/config/types.py", "import h5py", "heavy"),
    ],
)
def test_the_test_would_notice(tmp_path: Path, file: str, line: str, told: str) -> None:
    for name in ("pipeline", "slurm", "data_prep"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "submit.py", tmp_path)
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(
        text.replace("from __future__ import annotations\n", f"from __future__ import annotations\n{line}\n", 1)
    )
    assert (tmp_path / file).read_text() != text
    found = {
        "arrow": lambda: arrows_back(tmp_path),
        "circle": lambda: circle(file_graph(tmp_path)),
        "heavy": lambda: HEAVY & reached("submit", tmp_path).keys(),
    }
    assert found[told]()
