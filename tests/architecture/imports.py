"""What imports what, read from the sources.

python -m tests.architecture.imports      the packages and the packages that each imports
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "pipeline": set[str](),
    "data_prep": {"pipeline"},
    "slurm": {"pipeline"},
    "tracking": {"pipeline", "slurm"},
    "planning": {"pipeline", "slurm"},
    "cli": {"pipeline", "data_prep", "slurm", "tracking", "planning"},
    "submit": {"cli", "pipeline"},
}
"""Top-level packages, and the other ones that each may import."""
ORDER = {
    "pipeline": (
        "base", "config", "model.spec", "parallel.mesh", "config.read", "mpi", "run", "comm", "data", "checkpoint",
        "train.callback", "resilience", "parallel", "model", "evaluate", "publish", "train", "",
    ),
    "slurm": ("query", "submit", "supervise", ""),
}  # fmt: skip
"""Subpackages of a top-level package: each may import itself and those before it. "" is the package's own modules.

A module that is listed by its own name, such as `parallel.mesh`, has a place of its own in this order.
"""


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Return all modules of the product by name, except packages that hold only a docstring."""
    found = {}
    for path in (root / "submit.py", *(p for name in MAY_IMPORT for p in sorted((root / name).rglob("*.py")))):
        if path.name != "__init__.py" or len(ast.parse(path.read_text()).body) > 1:
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, *, at_start: bool = False) -> Iterator[str]:
    """Yield the modules, and the names in them, that a file imports.

    at_start: only those that run when the file is imported, without those in functions or under `if TYPE_CHECKING`.
    """
    tree = ast.parse(path.read_text())
    nodes: Iterator[ast.AST] = _outside_functions(tree) if at_start else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: use absolute imports"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not is_for_types and not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from _outside_functions(child)


def package_of(module: str, modules: Mapping[str, Path]) -> str:
    """Return the package that holds a module, such as `pipeline.train`."""
    return module if modules[module].name == "__init__.py" else module.rpartition(".")[0] or module


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes of a cycle in a graph; [] if there is none."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return []
        found = next((c for other in sorted(graph.get(node, ())) if (c := visit(other, [*path, node]))), [])
        finished.add(node)
        return found

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def module_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return each module of the product with the modules of the product that it imports."""
    modules = sources(root)
    return {
        name: {other for other in imported(path) if other in modules and other != name}
        for name, path in modules.items()
    }


def package_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return each package with the packages that it imports."""
    modules, found = sources(root), dict[str, set[str]]()
    for name, others in module_graph(root).items():
        package = package_of(name, modules)
        found.setdefault(package, set()).update(package_of(other, modules) for other in others)
        found[package].discard(package)
    return found


def wrong_directions(root: Path = ROOT) -> list[str]:
    """Return the imports that `MAY_IMPORT` or `ORDER` forbid, each as a sentence."""
    wrong = []
    for name, others in module_graph(root).items():
        top, _, rest = name.partition(".")
        for other in sorted(others):
            other_top, _, other_rest = other.partition(".")
            if top != other_top:
                allowed = other_top in MAY_IMPORT[top]
            elif top in ORDER:
                order = ORDER[top]
                allowed = order.index(_position(other_rest, order)) <= order.index(_position(rest, order))
            else:
                allowed = True
            if not allowed:
                wrong.append(f"{name} imports {other}")
    return wrong


def _position(rest: str, order: tuple[str, ...]) -> str:
    """Return the entry of `order` that holds a module, whose name is `rest` below its top-level package."""
    if rest in order:
        return rest
    return rest.partition(".")[0] if "." in rest else ""


def reached(start: str, root: Path = ROOT) -> dict[str, str]:
    """Return everything that is imported when `start` is, and the module that imports it.

    Imports inside functions count for `start` and for the packages cli and slurm: status and submission must stay fast.
    """
    modules, found, waiting = sources(root), {start: ""}, [start]
    while waiting:
        name = waiting.pop()
        follow_functions = name == start or name.split(".")[0] in ("cli", "slurm")
        for other in imported(modules[name], at_start=not follow_functions):
            if other not in found:
                found[other] = name
                if other in modules:
                    waiting.append(other)
    return found


if __name__ == "__main__":
    for name, others in package_graph().items():
        print(f"{name:20} {', '.join(sorted(others))}")
