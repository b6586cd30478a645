"""What imports what, read from the sources: for the test of the house, and for whoever wants to see it.

python -m tests.house.imports      rooms and the rooms that each imports
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = (
    ("pipeline/base",), ("pipeline/config",), ("pipeline/mpi",), ("pipeline/run",), ("pipeline/comm",),
    ("pipeline/data",), ("pipeline/checkpoint",), ("pipeline/resilience",), ("pipeline/parallel",),
    ("pipeline/model",), ("pipeline/evaluate",), ("pipeline/publish",), ("pipeline/train",), ("pipeline/planning",),
    ("pipeline",),
    ("data_prep/inputs",), ("data_prep/text",), ("data_prep/tokens",), ("data_prep",),
    ("slurm/query",), ("slurm/show",), ("slurm/track",), ("slurm/page",), ("slurm/submit",), ("slurm/supervise",),
    ("slurm",),
    ("submit.py",),
)  # fmt: skip
"""Rooms from the ground up: a room imports itself and lower ones."""
BUILDINGS = {"pipeline": {"pipeline"}, "data_prep": {"pipeline", "data_prep"}, "slurm": {"pipeline", "slurm"}}
"""And of the other buildings only these; submit.py takes `pipeline` and `slurm`."""


def sources(root: Path = ROOT) -> dict[str, Path]:
    """All modules of the product by name; a package that holds nothing but its docstring is none."""
    found = {}
    for path in (root / "submit.py", *(p for folder in BUILDINGS for p in sorted((root / folder).rglob("*.py")))):
        if path.name != "__init__.py" or len(ast.parse(path.read_text()).body) > 1:
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, *, at_start: bool = False) -> Iterator[str]:
    """What a file imports, anywhere in it or (`at_start`) when it is imported itself: modules, and names in them.

    What stands under `if TYPE_CHECKING` is an import like any other: an arrow that a reader follows.
    """
    tree = ast.parse(path.read_text())
    nodes: Iterator[ast.AST] = _outside_functions(tree) if at_start else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative imports hide where they lead"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from _outside_functions(child)


def room(path: Path, root: Path = ROOT) -> str:
    """The folder of a file; submit.py is a room of its own."""
    inside = path.relative_to(root)
    return inside.parent.as_posix() if len(inside.parts) > 1 else inside.name


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Some circle in a graph, [] where there is none."""
    done: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        found = next((c for other in sorted(graph.get(node, ())) if (c := walk(other, [*way, node]))), [])
        done.add(node)
        return found

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def file_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Each module and the modules of the product that it imports, anywhere in it."""
    modules = sources(root)
    return {
        name: {other for other in imported(path) if other in modules and other != name}
        for name, path in modules.items()
    }


def room_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Each room and the rooms that it imports."""
    modules, found = sources(root), dict[str, set[str]]()
    for name, others in file_graph(root).items():
        here = room(modules[name], root)
        found.setdefault(here, set()).update(room(modules[other], root) for other in others)
        found[here].discard(here)
    return found


def arrows_back(root: Path = ROOT) -> list[str]:
    """Imports that lead to a higher floor, or to a building that is not theirs, in words."""
    modules, wrong = sources(root), []
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    for name, others in file_graph(root).items():
        here = room(modules[name], root)
        for other in sorted(others):
            there = room(modules[other], root)
            building, its = here.split("/")[0], there.split("/")[0]
            allowed = BUILDINGS.get(building, {"pipeline", "slurm"})
            up = here != there and floor.get(there, 99) >= floor.get(here, -1)
            if its not in allowed or up:
                wrong.append(f"{name} imports {other}: {here} may not know {there}")
    return wrong


def reached(start: str, root: Path = ROOT) -> dict[str, str]:
    """Everything that is imported when `start` is, and by whom: through functions, too, where `start` itself or a room
    of the login node (slurm) holds them; the work of a stage (its `main`) is done elsewhere."""
    modules, found, waiting = sources(root), {start: ""}, [start]
    while waiting:
        name = waiting.pop()
        login = name == start or name.split(".")[0] == "slurm"
        for other in imported(modules[name], at_start=not login):
            if other not in found:
                found[other] = name
                if other in modules:
                    waiting.append(other)
    return found


if __name__ == "__main__":
    for name, others in room_graph().items():
        print(f"{name:20} {', '.join(sorted(others))}")
