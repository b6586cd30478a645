"""The copy of the code that a run's jobs work from, with its git commit and diff; and how a process uses that copy.

It is taken when the run is made, and again by `resume --update-code`: an edit never changes a run that waits.
"""

from __future__ import annotations

import ast
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any

from pipeline.base.errors import ExitCode, UserError
from pipeline.base.ownership import apply_umask
from pipeline.config.user_model import UNREAD_OPTIONS, UserModel

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds submit.py and the packages: a checkout, or a run's `code/`."""


IMPORT_S = 300
"""How long a child may take: torch from a cold file system is slow."""
MOST_BUILT = 100
"""So many different models of a sweep are built before it is made: each takes milliseconds, of large ones seconds."""
_SNAPSHOT = ("submit.py", "setup.py", "setup.cfg", "cli", "slurm", "tracking", "planning", "pipeline", "data_prep")
_CALL = r"""
import importlib, sys
from pipeline.base.errors import UserError
try:
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*sys.argv[3:])
except UserError as error:
    print(error, *getattr(error, "__notes__", ()), error.code, sep="\n")
    sys.exit(error.exit_code)
"""


def try_code(code: Path, model: UserModel, options: Sequence[Mapping[str, Any]], not_this: str) -> list[str]:
    """Make such a copy elsewhere, import the user's own model from it and build it, and leave nothing.

    Returns the keys of `options`, dotted, that the module never reads: no build reads them, and no string in its source
    is such a key, by which something else might.
    options: what its `build` gets, of the first points that differ in it; where there is none, nothing is imported.
    Raises UserError where `copy_code` would, for a module that does not import, and for what no layout can train.
    """
    different = [*dict.fromkeys(map(json.dumps, options))][:MOST_BUILT]
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        new = Path(folder, "code")
        sources = _fill(new, model, not_this)
        _compile(new, code, sources)
        unread = _try_model(new, model.target, different) if different else []
        if unread:
            known = _strings([new / name for name in {*sources, model.root.name} - {*_SNAPSHOT}])
            unread = [key for key in unread if key.split(".")[-1] not in known and key != "layers"]
        return unread


def copy_code(run: Path, model: UserModel | None, not_this: str, umask: int) -> None:
    """Put a copy into `run/code`; an older one is replaced. With a model of the user's own, its top-level package too;
    where that is a single file, what it imports from its own folder.

    `not_this`: the name of a folder in that package that holds runs; `umask`: what others may not. Raises UserError
    for a package with a name of ours, or code that does not compile, shutil.Error or OSError where the copy cannot be
    written; the older one stays then, and nothing of the new.
    """
    code, new, old = run / "code", run / ".code.new", run / ".code.old"
    for left in run.glob(".code.*"):  # by one who was killed in the middle
        _remove(left)
    try:
        _compile(new, code, _fill(new, model, not_this))
        apply_umask(new, umask)  # a checkout may be open to others, and its copies with it
        if code.exists():
            os.rename(code, old)
        os.rename(new, code)
        _remove(old)
        for point in run.glob("points/*"):
            if not (link := point / code.name).is_symlink():  # a copy of its own, older than this one
                _remove(link)
                link.symlink_to(f"../../{code.name}")
    finally:
        _remove(new)


def _remove(code: Path) -> None:
    """A copy, or a point's link to that of its sweep."""
    if code.is_symlink():
        code.unlink()
    else:
        shutil.rmtree(code, ignore_errors=True)


def _fill(new: Path, model: UserModel | None, not_this: str) -> dict[str, Path]:
    """Copy; where each folder and file of `new` comes from, by its name."""
    if model is not None and model.root.name in _SNAPSHOT and model.root.parent != CODE_ROOT:
        raise UserError(
            "model.reserved_name", f"model.target: {model.root} has the name of a package of Sluice; rename it"
        )
    new.mkdir()
    unwanted = ("__pycache__", "*.pyc", "*.egg-info")
    sources: dict[Path, tuple[str, ...]] = {CODE_ROOT / name: unwanted for name in _SNAPSHOT}
    if model is not None and model.root.name not in _SNAPSHOT:
        own = (*unwanted, ".*", "*.h5", "*.hdf5", not_this)
        sources |= dict.fromkeys([model.root, *_beside(model.root)], own)
    for source, names in sources.items():
        if source.is_dir():
            shutil.copytree(source, new / source.name, ignore=shutil.ignore_patterns(*names))
        elif source.is_file():
            shutil.copy2(source, new)
    if (commit := _git("rev-parse", "HEAD")) is not None:
        (new / "COMMIT").write_bytes(commit)
        (new / "DIFF").write_bytes(_git("diff", "HEAD") or b"")
    return {source.name: source for source in sources}


def _beside(module: Path) -> set[Path]:
    """The files and packages in the folder of a module, a single file, that it imports, itself or through others."""
    found: set[Path] = set()
    installed = {"site-packages", "dist-packages"} & {*module.parts}  # the jobs have all of that
    waiting = [] if installed or not module.is_file() else [module]
    while waiting:
        path = waiting.pop()
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            for name in _imported(file) - sys.stdlib_module_names:
                package = module.parent / name
                other = package if (package / "__init__.py").is_file() else package.with_suffix(".py")
                if not other.exists() and _namespace(package):
                    other = package
                if other.exists() and other.name not in _SNAPSHOT and other not in (module, *found):
                    found.add(other)
                    waiting.append(other)
    return found


def _namespace(folder: Path) -> bool:
    """Whether Python would import a folder without an __init__.py: it takes an installed package of that name first."""
    spec = PathFinder.find_spec(folder.name)
    return (spec is None or spec.loader is None) and any(folder.rglob("*.py"))


def _imported(file: Path) -> set[str]:
    """The top-level names that a file imports, anywhere in it; none of what does not compile, which is told later."""
    names: list[str] = []
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(str(node.module))
    return {name.partition(".")[0] for name in names}


def _strings(paths: Sequence[Path]) -> set[str]:
    """All string constants of these Python files, and of those in these folders."""
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_bytes())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _compile(new: Path, code: Path, sources: Mapping[str, Path]) -> None:
    """Compile everything, as if it were in `code` already: a mistake is told today, and no rank need do it again.

    `sources`: what `_fill` returns. Raises UserError naming the file that was copied.
    """
    for file in sorted(new.rglob("*.py")):
        inside = file.relative_to(new)
        try:
            py_compile.compile(str(file), dfile=str(code / inside), doraise=True)
        except (py_compile.PyCompileError, ValueError) as error:  # ValueError: a null byte
            source = sources[inside.parts[0]].joinpath(*inside.parts[1:])
            words = str(error).strip().replace(str(code / inside), str(source)).splitlines()
            raise UserError(
                "run.invalid_code",
                f"{inside}, which the jobs would run, is not valid Python: {words[-1]} ({words[0]})",
            ) from error


def _try_model(code: Path, module: str, options: Sequence[str]) -> list[str]:
    """Import a model and build it without memory, with each of the options, in a process of its own (torch takes
    seconds). Returns the keys of options, dotted, that no build reads."""
    arguments = ["pipeline.model.task", "try_user_model", module, *options]
    done = _child(code, _CALL, *arguments, slow=f"model.target: do less at the top level of {module}: importing it")
    if done.returncode == ExitCode.USER_ERROR:
        message, _, error_code = done.stdout.rstrip().rpartition("\n")
        raise UserError(error_code, message)
    if done.returncode:
        told = "\n".join(done.stderr.replace(f"{code}{os.sep}", "").rstrip().splitlines()[-5:])
        raise UserError(
            "model.import_failed", f"model.target: {module} cannot be imported or built here, and no job could:\n{told}"
        )
    found = [line.removeprefix(UNREAD_OPTIONS) for line in done.stdout.splitlines() if line.startswith(UNREAD_OPTIONS)]
    return list(json.loads(found[-1])) if found else []


def call_in_child_process(module: str, function: str, *arguments: str) -> None:
    """Call a function of ours in a process of its own, for what it imports. Its UserError is raised here, too.

    Any other failure says nothing: the nodes may have a package that is missing here.
    """
    done = _child(CODE_ROOT, _CALL, module, function, *arguments, slow=f"looking at {arguments[0]}")
    if done.returncode == ExitCode.USER_ERROR:
        message, _, error_code = done.stdout.rstrip().rpartition("\n")
        raise UserError(error_code, message)


def _child(code: Path, program: str, *arguments: str, slow: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-c", program, *arguments], make_code_env(os.environ, code)
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        raise UserError("model.slow_import", f"{slow} takes more than {IMPORT_S} s") from None


def _git(*arguments: str) -> bytes | None:
    """Output of a git command in the code's folder; None without git, a repository or a commit. A diff is in the files'
    own encodings."""
    if not (CODE_ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=CODE_ROOT, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def make_code_env(env: Mapping[str, str], code: Path) -> dict[str, str]:
    """The environment with the run's copy of the code first on PYTHONPATH, before what a module file put there.

    PYTHONSAFEPATH: without it `python -m` looks into the working directory, often a checkout, before that.
    """
    rest = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(code)]
    return {**env, "PYTHONPATH": os.pathsep.join([str(code), *rest]), "PYTHONSAFEPATH": "1"}


def start_process(
    code: Path, words: Sequence[str], log: IO[bytes], more: Mapping[str, str], inherited: Sequence[int] = (),
    first: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a process with this code and `more` variables, which reads nothing and prints to `log`.

    `inherited`: descriptors that it gets, too; `first`: what it calls before anything else.
    """
    return subprocess.Popen(
        words, env={**make_code_env(os.environ, code), **more}, cwd=code, pass_fds=inherited, preexec_fn=first,
        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
