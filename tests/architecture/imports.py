"""Find the imports between the modules of Sluice, by parsing their source code.

`python -m tests.architecture.imports` prints each package and the packages that it imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_IMPORTS = {
    "pipeline": set[str](),
    "data_prep": {"pipeline"},
    "slurm": {"pipeline"},
    "tracking": {"pipeline", "slurm"},
    "planning": {"pipeline", "slurm"},
    "cli": {"pipeline", "data_prep", "slurm", "tracking", "planning"},
    "submit": {"cli", "pipeline"},
}
"""Each top-level package, and the other top-level packages that it may import."""
PACKAGE_ORDER = {
    "pipeline": (
        "base", "config", "model.spec", "parallel.mesh", "config.read", "mpi", "run", "search", "comm", "data",
        "checkpoint", "train.callback", "resilience", "command", "parallel", "model", "evaluate", "publish", "train",
        "",
    ),
    "slurm": ("query", "submit", "agent", "supervise", "drill", ""),
}  # fmt: skip
"""The order of the subpackages of a top-level package. Each may import itself and those before it.

"" represents the modules directly in the top-level package. A module such as `parallel.mesh` has a separate position if
it is listed by its name.
"""


def list_modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the paths of all product modules by module name, except packages that contain only a docstring."""
    modules = {}
    package_files = (path for name in ALLOWED_IMPORTS for path in sorted((root / name).rglob("*.py")))
    for path in (root / "submit.py", *package_files):
        if path.name != "__init__.py" or len(ast.parse(path.read_text()).body) > 1:
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


def list_imports(path: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """Yield the modules that a file imports, and the dotted names that it imports from modules.

    Args:
        path: the file.
        at_import_only: whether to omit imports that do not run when the file is imported. These are in functions or
            under `if TYPE_CHECKING`.
    """
    tree = ast.parse(path.read_text())
    nodes: Iterator[ast.AST] = _walk_outside_functions(tree) if at_import_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: use absolute imports"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _walk_outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below `node`, except those in functions and under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        is_type_checking_block = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not is_type_checking_block and not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from _walk_outside_functions(child)


def get_package(module: str, modules: Mapping[str, Path]) -> str:
    """Return the package that contains a module, such as `pipeline.train`."""
    return module if modules[module].name == "__init__.py" else module.rpartition(".")[0] or module


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes of a cycle in a graph; an empty list if there is no cycle.

    Args:
        graph: the successors of each node.
    """
    finished: set[str] = set()

    def find_cycle_from(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return []
        cycles = (find_cycle_from(other, [*path, node]) for other in sorted(graph.get(node, ())))
        first_cycle = next((cycle for cycle in cycles if cycle), [])
        finished.add(node)
        return first_cycle

    return next((cycle for node in sorted(graph) if (cycle := find_cycle_from(node, []))), [])


def build_module_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the product modules that each product module imports."""
    modules = list_modules(root)
    return {
        name: {other for other in list_imports(path) if other in modules and other != name}
        for name, path in modules.items()
    }


def build_package_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the packages that each package imports."""
    modules = list_modules(root)
    graph: dict[str, set[str]] = {}
    for name, imported_modules in build_module_graph(root).items():
        package = get_package(name, modules)
        graph.setdefault(package, set()).update(get_package(other, modules) for other in imported_modules)
        graph[package].discard(package)
    return graph


def find_forbidden_imports(root: Path = ROOT) -> list[str]:
    """Return the imports that `ALLOWED_IMPORTS` or `PACKAGE_ORDER` forbid, each in the form `MODULE imports MODULE`."""
    forbidden = []
    for name, imported_modules in build_module_graph(root).items():
        top_package, _, subpackage = name.partition(".")
        for other in sorted(imported_modules):
            other_top_package, _, other_subpackage = other.partition(".")
            if top_package != other_top_package:
                allowed = other_top_package in ALLOWED_IMPORTS[top_package]
            elif top_package in PACKAGE_ORDER:
                order = PACKAGE_ORDER[top_package]
                allowed = order.index(_find_order_entry(other_subpackage, order)) <= order.index(
                    _find_order_entry(subpackage, order)
                )
            else:
                allowed = True
            if not allowed:
                forbidden.append(f"{name} imports {other}")
    return forbidden


def _find_order_entry(module_below_top: str, order: tuple[str, ...]) -> str:
    """Return the entry of `order` that contains a module.

    Args:
        module_below_top: the name of the module without its top-level package.
        order: the subpackages of the top-level package.
    """
    if module_below_top in order:
        return module_below_top
    return module_below_top.partition(".")[0] if "." in module_below_top else ""


def find_reachable_imports(start: str, root: Path = ROOT) -> dict[str, str]:
    """Return the modules and names that `start` imports directly or indirectly, each with the module that imports it.

    `start` itself is also in the result, with an empty string. Imports inside functions count in `start` and in the
    packages cli and slurm, because status and submission must stay fast.
    """
    modules = list_modules(root)
    importers = {start: ""}
    queue = [start]
    while queue:
        name = queue.pop()
        follow_functions = name == start or name.split(".")[0] in ("cli", "slurm")
        for other in list_imports(modules[name], at_import_only=not follow_functions):
            if other not in importers:
                importers[other] = name
                if other in modules:
                    queue.append(other)
    return importers


if __name__ == "__main__":
    for name, others in build_package_graph().items():
        print(f"{name:20} {', '.join(sorted(others))}")
