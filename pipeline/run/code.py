"""Copy Sluice's source code into a run, with its git commit and diff, and start processes that use this copy.

The copy also contains the code of a custom model. It is made when the run is created, and again by
`resume --update-code`. Later edits of the source files therefore do not affect jobs that are still pending.
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
"""The directory that contains submit.py and the packages: a checkout, or a run's `code/`."""
IMPORT_TIMEOUT_S = 300
"""How long a child process may take: importing torch from a cold file system is slow."""
MAX_BUILT_MODELS = 100
"""Maximum number of models of a sweep that `try_code` builds. A build takes milliseconds; of a large model, seconds."""
_COPIED_NAMES = ("submit.py", "setup.py", "setup.cfg", "cli", "slurm", "tracking", "planning", "pipeline", "data_prep")
"""Files and directories of `CODE_ROOT` that are copied."""
_CALL_PROGRAM = r"""
import importlib, sys
from pipeline.base.errors import UserError
try:
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*sys.argv[3:])
except UserError as error:
    print(error, *getattr(error, "__notes__", ()), error.code, sep="\n")
    sys.exit(error.exit_code)
"""
"""A program that calls a function. Its arguments are the module, the function's name, and the function's arguments.

If the function raises UserError, the program prints the message and the error code as the last line."""


def try_code(code: Path, model: UserModel, options: Sequence[Mapping[str, Any]], excluded_dir: str) -> list[str]:
    """Try a custom model: copy the code to a temporary directory, and import and build the model there.

    Args:
        code: the path of the future copy, for messages.
        model: the custom model.
        options: the arguments of the model's `build`, for each sweep point. If there are none, nothing is imported.
        excluded_dir: see :func:`copy_code`.

    Returns:
        The dotted keys of `options` that the module never reads: no build reads them, and no string in the source of
        the module equals their last part. The key `layers` is never reported.

    Raises:
        UserError: as :func:`copy_code`, or if the module cannot be imported or its model cannot be built.
    """
    distinct_options = list(dict.fromkeys(map(json.dumps, options)))[:MAX_BUILT_MODELS]
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        copy = Path(folder, "code")
        sources = _copy_sources(copy, model, excluded_dir)
        _compile_files(copy, code, sources)
        unread_keys = _try_model(copy, model.target, distinct_options) if distinct_options else []
        if unread_keys:
            model_names = {*sources, model.root.name} - set(_COPIED_NAMES)
            strings = _collect_strings([copy / name for name in model_names])
            unread_keys = [key for key in unread_keys if key.split(".")[-1] not in strings and key != "layers"]
        return unread_keys


def copy_code(run: Path, model: UserModel | None, excluded_dir: str, umask: int) -> None:
    """Copy Sluice's source code into `run/code`, replacing an older copy.

    The copy includes the top-level package of a custom model. If the model's module is a single file, the copy also
    includes the files and packages in the same directory that this file imports. If copying or compiling fails, the
    older copy stays.

    Args:
        run: the run directory.
        model: the custom model; None for Sluice's built-in decoder model.
        excluded_dir: the name of directories in the model's package to skip, because they contain runs.
        umask: permission bits to remove from the copied files.

    Raises:
        UserError: if the custom model's package has the same name as a package of Sluice, or a file does not compile.
        shutil.Error, OSError: if the copy cannot be written.
    """
    code = run / "code"
    new = run / ".code.new"
    old = run / ".code.old"
    for leftover in run.glob(".code.*"):  # left by a process that was killed
        _remove_copy(leftover)
    try:
        _compile_files(new, code, _copy_sources(new, model, excluded_dir))
        apply_umask(new, umask)  # other users may have access to the source files
        if code.exists():
            os.rename(code, old)
        os.rename(new, code)
        _remove_copy(old)
        for point in run.glob("points/*"):
            point_code = point / code.name
            if not point_code.is_symlink():  # the point has an older copy, not a link to the copy of the sweep
                _remove_copy(point_code)
                point_code.symlink_to(f"../../{code.name}")
    finally:
        _remove_copy(new)


def _remove_copy(code: Path) -> None:
    """Remove a copy of the code, or a sweep point's link to the copy of its sweep."""
    if code.is_symlink():
        code.unlink()
    else:
        shutil.rmtree(code, ignore_errors=True)


def _copy_sources(new: Path, model: UserModel | None, excluded_dir: str) -> dict[str, Path]:
    """Copy the source files into the directory `new`, which must not exist.

    Returns:
        For the name of each file and directory directly in `new`, the path from which it was copied.
    """
    if model is not None and model.root.name in _COPIED_NAMES and model.root.parent != CODE_ROOT:
        raise UserError(
            "model.reserved_name", f"model.target: {model.root} has the name of a package of Sluice; rename it"
        )
    new.mkdir()
    skipped = ("__pycache__", "*.pyc", "*.egg-info")
    skipped_by_source: dict[Path, tuple[str, ...]] = {CODE_ROOT / name: skipped for name in _COPIED_NAMES}
    if model is not None and model.root.name not in _COPIED_NAMES:
        skipped_in_model = (*skipped, ".*", "*.h5", "*.hdf5", excluded_dir)
        skipped_by_source |= dict.fromkeys([model.root, *_find_local_imports(model.root)], skipped_in_model)
    for source, patterns in skipped_by_source.items():
        if source.is_dir():
            shutil.copytree(source, new / source.name, ignore=shutil.ignore_patterns(*patterns))
        elif source.is_file():
            shutil.copy2(source, new)
    if (commit := _run_git("rev-parse", "HEAD")) is not None:
        (new / "COMMIT").write_bytes(commit)
        (new / "DIFF").write_bytes(_run_git("diff", "HEAD") or b"")
    return {source.name: source for source in skipped_by_source}


def _find_local_imports(module: Path) -> set[Path]:
    """Return the files and packages in a module's directory that the module imports, also indirectly.

    The result is empty if the module is a package, or is installed in site-packages, where the jobs can import it.
    """
    imports: set[Path] = set()
    is_installed = bool({"site-packages", "dist-packages"} & {*module.parts})
    remaining = [] if is_installed or not module.is_file() else [module]
    while remaining:
        path = remaining.pop()
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            for name in _list_imported_names(file) - sys.stdlib_module_names:
                package = module.parent / name
                other = package if (package / "__init__.py").is_file() else package.with_suffix(".py")
                if not other.exists() and _is_namespace_package(package):
                    other = package
                if other.exists() and other.name not in _COPIED_NAMES and other not in (module, *imports):
                    imports.add(other)
                    remaining.append(other)
    return imports


def _is_namespace_package(folder: Path) -> bool:
    """Return True if Python would import this directory, which has no __init__.py, as a namespace package.

    The result is False if a package of the same name is installed, because Python would import that package instead.
    """
    spec = PathFinder.find_spec(folder.name)
    return (spec is None or spec.loader is None) and any(folder.rglob("*.py"))


def _list_imported_names(file: Path) -> set[str]:
    """Return the top-level names that a file imports; empty if it does not compile (`_compile_files` reports this)."""
    names: list[str] = []
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(str(node.module))
    return {name.partition(".")[0] for name in names}


def _collect_strings(paths: Sequence[Path]) -> set[str]:
    """Return all string constants in these Python files and directories."""
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_bytes())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _compile_files(new: Path, code: Path, sources: Mapping[str, Path]) -> None:
    """Compile all files. Errors are then reported before the submission, and ranks do not have to compile.

    Args:
        new: the directory that contains the copy now.
        code: the directory to which the copy will be renamed.
        sources: the result of :func:`_copy_sources`.

    Raises:
        UserError: if a file does not compile. The message names the source file.
    """
    for file in sorted(new.rglob("*.py")):
        inside = file.relative_to(new)
        try:
            py_compile.compile(str(file), dfile=str(code / inside), doraise=True)
        except (py_compile.PyCompileError, ValueError) as error:  # ValueError: a null byte
            source = sources[inside.parts[0]].joinpath(*inside.parts[1:])
            lines = str(error).strip().replace(str(code / inside), str(source)).splitlines()
            raise UserError(
                "run.invalid_code",
                f"{inside}, which the jobs would run, is not valid Python: {lines[-1]} ({lines[0]})",
            ) from error


def _try_model(code: Path, module: str, options: Sequence[str]) -> list[str]:
    """Import a custom model and build it on the meta device, once with each of `options`, in a child process.

    Args:
        code: the directory of the copied code.
        module: the dotted name of the model's module.
        options: the arguments of `build`, as JSON objects.

    Returns:
        The dotted keys of the options that no build reads.

    Raises:
        UserError: if the module cannot be imported or the model cannot be built.
    """
    arguments = ["pipeline.model.task", "try_user_model", module, *options]
    slow_work = f"model.target: do less at the top level of {module}: importing it"
    result = _run_child(code, *arguments, slow_work=slow_work)
    if result.returncode:
        output = "\n".join(result.stderr.replace(f"{code}{os.sep}", "").rstrip().splitlines()[-5:])
        raise UserError(
            "model.import_failed",
            f"model.target: {module} cannot be imported or built here, and no job could:\n{output}",
        )
    lines = [
        line.removeprefix(UNREAD_OPTIONS) for line in result.stdout.splitlines() if line.startswith(UNREAD_OPTIONS)
    ]
    return list(json.loads(lines[-1])) if lines else []


def call_in_child_process(module: str, function: str, *arguments: str) -> None:
    """Call a function of Sluice in a child process, because the function imports slow packages such as torch.

    A failure other than a UserError is ignored, because a package that is missing here may exist on the nodes.

    Args:
        module: the module of the function.
        function: the name of the function.
        arguments: the arguments of the function. If the function takes too long, the message names the first argument.

    Raises:
        UserError: if the function raises UserError or takes too long.
    """
    _run_child(CODE_ROOT, module, function, *arguments, slow_work=f"checking {arguments[0]}")


def _run_child(code: Path, *arguments: str, slow_work: str) -> subprocess.CompletedProcess[str]:
    """Run `_CALL_PROGRAM` with the code in `code`, and return the ended process.

    Args:
        code: the directory of the code.
        arguments: the module, the function's name, and the function's arguments.
        slow_work: the subject of the message if the child process takes too long, such as `importing it`.

    Raises:
        UserError: if the function raises UserError or takes too long.
    """
    command = [sys.executable, "-c", _CALL_PROGRAM, *arguments]
    env = make_code_env(os.environ, code)
    try:
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError("model.slow_import", f"{slow_work} takes more than {IMPORT_TIMEOUT_S} s") from None
    if result.returncode == ExitCode.USER_ERROR:
        message, _, error_code = result.stdout.rstrip().rpartition("\n")
        raise UserError(error_code, message)
    return result


def _run_git(*arguments: str) -> bytes | None:
    """Return the output of a git command; None without git, a repository or a commit.

    The output is not decoded, because the files in a diff may have different encodings.
    """
    if not (CODE_ROOT / ".git").exists():
        return None
    try:
        result = subprocess.run(["git", *arguments], cwd=CODE_ROOT, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def make_code_env(env: Mapping[str, str], code: Path) -> dict[str, str]:
    """Return `env` with the directory `code` first on PYTHONPATH.

    PYTHONSAFEPATH is set, because `python -m` would otherwise search the working directory first, which may contain
    another version of Sluice.
    """
    other_paths = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(code)]
    return {**env, "PYTHONPATH": os.pathsep.join([str(code), *other_paths]), "PYTHONSAFEPATH": "1"}


def start_process(
    code: Path, command: Sequence[str], log: IO[bytes], variables: Mapping[str, str],
    inherited_fds: Sequence[int] = (), prepare_child: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a process with the code of a run. The process has no standard input.

    Args:
        code: the copy of the code, which is also the working directory.
        command: the command and its arguments.
        log: receives standard output and standard error.
        variables: additional environment variables.
        inherited_fds: file descriptors that the process inherits.
        prepare_child: called in the child process before the command starts.
    """
    return subprocess.Popen(
        command, env={**make_code_env(os.environ, code), **variables}, cwd=code, pass_fds=inherited_fds,
        preexec_fn=prepare_child, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
