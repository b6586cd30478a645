"""Copy Sluice's source code into a run, with its git commit and diff, and start processes that use this copy.

The copy also contains the user's modules: a custom model and callbacks. A run gets its copy when it is created.
`resume --update-code` replaces the copy. For a run with such modules and without training output, a corrected config
also replaces the copy. Otherwise, edits of the source files do not affect the run, even if its jobs
are still pending.
"""

from __future__ import annotations

import ast
import json
import os
import py_compile
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from typing import IO, Any

from pipeline.base.errors import ExitCode, UserError
from pipeline.base.ownership import apply_umask
from pipeline.config.user_model import UNREAD_OPTIONS, UserModel, UserModule

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The directory that contains submit.py and the packages: a checkout, or a run's `code/`."""
IMPORT_TIMEOUT_S = 300
"""How long a child process may take. Importing torch is slow if the file system has not cached its files."""
MAX_BUILT_MODELS = 100
"""Maximum number of models of a sweep that `try_code` builds. A build takes milliseconds, for a large model seconds."""
_COPIED_NAMES = (
    "submit.py",
    "setup.py",
    "setup.cfg",
    "cli",
    "slurm",
    "tracking",
    "planning",
    "pipeline",
    "data_prep",
    "client",
)
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

If the function raises UserError, the program prints the message, and then the error code on the last line."""


def try_code(
    code_dir: Path, modules: Sequence[UserModule], options: Sequence[Mapping[str, Any]], excluded_dir: str
) -> list[str]:
    """Try the user's modules: copy the code to a temporary directory, import them there, and build a custom model.

    Args:
        code_dir: the path to which the code will be copied later, for messages.
        modules: the modules.
        options: the arguments of the model's `build`, for each sweep point. If the sequence is empty, the files are
            compiled, but the modules are neither imported nor built.
        excluded_dir: see :func:`copy_code`.

    Returns:
        The dotted keys of `options` that the model never reads. A key is reported if no build reads the key, and no
        string constant in the source of the model equals its last part. The key `layers` is never reported, because
        `build` also receives the layers as its second argument.

    Raises:
        UserError: as :func:`copy_code`, or if a module cannot be imported, the model cannot be built, or this takes
            longer than `IMPORT_TIMEOUT_S`.
    """
    distinct_options = list(dict.fromkeys(map(json.dumps, options)))[:MAX_BUILT_MODELS]
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        copy_dir = Path(folder, "code")
        sources = _copy_sources(copy_dir, modules, excluded_dir)
        _compile_files(copy_dir, code_dir, sources)
        unread_keys: list[str] = []
        for module in modules if distinct_options else ():
            unread_keys += _try_module(copy_dir, module, distinct_options)
        if unread_keys:
            # the files and directories of the user, without those of Sluice
            model_names = {*sources, *(module.root.name for module in modules)} - set(_COPIED_NAMES)
            strings = _collect_strings([copy_dir / name for name in model_names])
            unread_keys = [key for key in unread_keys if key.split(".")[-1] not in strings and key != "layers"]
        return unread_keys


def copy_code(run_dir: Path, modules: Sequence[UserModule], excluded_dir: str, umask: int) -> None:
    """Copy Sluice's source code to the directory `code` in `run_dir`, replacing an older copy.

    The copy includes the top-level packages of the user's modules. If a module is a single file, the copy also
    includes the files and packages in the same directory that this file imports. If copying or compiling fails, the
    older copy stays. If a sweep point has a separate copy, a link to the new copy replaces it.

    Args:
        run_dir: the run directory.
        modules: the user's modules.
        excluded_dir: directories with this name in the user's packages are not copied, because they contain runs.
        umask: permission bits to remove from the copied files.

    Raises:
        UserError: if a user's package or module has the name of a file or package that Sluice copies, or if a file does
            not compile.
        shutil.Error, OSError: if the copy cannot be written.
    """
    code_dir = run_dir / "code"
    new_dir = run_dir / ".code.new"
    old_dir = run_dir / ".code.old"
    for leftover in run_dir.glob(".code.*"):  # left by a process that was killed
        _remove_copy(leftover)
    try:
        _compile_files(new_dir, code_dir, _copy_sources(new_dir, modules, excluded_dir))
        apply_umask(new_dir, umask)  # the copied files have the modes of the source files, which other users may read
        if code_dir.exists():
            os.rename(code_dir, old_dir)
        os.rename(new_dir, code_dir)
        _remove_copy(old_dir)
        for point in run_dir.glob("points/*"):
            point_code = point / code_dir.name
            if not point_code.is_symlink():  # the point has an older copy, not a link to the copy of the sweep
                _remove_copy(point_code)
                point_code.symlink_to(f"../../{code_dir.name}")
    finally:
        _remove_copy(new_dir)


def _remove_copy(code: Path) -> None:
    """Remove a copy of the code, or a sweep point's link to the copy of its sweep."""
    if code.is_symlink():
        code.unlink()
    else:
        shutil.rmtree(code, ignore_errors=True)


def _copy_sources(new_dir: Path, modules: Sequence[UserModule], excluded_dir: str) -> dict[str, Path]:
    """Copy the source files into the directory `new_dir`, which must not exist.

    If git has a commit of Sluice's code, also write the files COMMIT and DIFF with the commit and uncommitted changes.

    Returns:
        For the name of each copied file and directory directly in `new_dir`, the path from which it was copied.

    Raises:
        UserError: if a user's package or module has the name of a file or package that Sluice copies.
    """
    for module in modules:
        # a module inside a package of Sluice itself is copied with this package
        if module.root.name in _COPIED_NAMES and module.root.parent != CODE_ROOT:
            raise UserError(
                "model.reserved_name", f"{module.key}: {module.root} has the name of a package of Sluice; rename it"
            )
    new_dir.mkdir()
    skipped = ("__pycache__", "*.pyc", "*.egg-info")
    skipped_by_source: dict[Path, tuple[str, ...]] = {CODE_ROOT / name: skipped for name in _COPIED_NAMES}
    skipped_of_user = (*skipped, ".*", "*.h5", "*.hdf5", excluded_dir)
    for module in modules:
        if module.root.name not in _COPIED_NAMES:
            skipped_by_source |= dict.fromkeys([module.root, *_find_local_imports(module.root)], skipped_of_user)
    for source, patterns in skipped_by_source.items():
        if source.is_dir():
            shutil.copytree(source, new_dir / source.name, ignore=shutil.ignore_patterns(*patterns))
        elif source.is_file():
            shutil.copy2(source, new_dir)
    if (commit := _run_git("rev-parse", "HEAD")) is not None:
        (new_dir / "COMMIT").write_bytes(commit)
        (new_dir / "DIFF").write_bytes(_run_git("diff", "HEAD") or b"")
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
            # a local name is a package (a folder with __init__.py), a module, or a namespace package
            for name in _list_imported_names(file) - sys.stdlib_module_names:
                package = module.parent / name
                imported = package if (package / "__init__.py").is_file() else package.with_suffix(".py")
                if not imported.exists() and _is_namespace_package(package):
                    imported = package
                if imported.exists() and imported.name not in _COPIED_NAMES and imported not in (module, *imports):
                    imports.add(imported)
                    remaining.append(imported)
    return imports


def _is_namespace_package(folder: Path) -> bool:
    """Return True if Python would import a directory without __init__.py as a namespace package.

    The result is False if a package of the same name is installed, because Python would import that package instead.
    The result is also False if the directory contains no Python files.
    """
    spec = PathFinder.find_spec(folder.name)
    return (spec is None or spec.loader is None) and any(folder.rglob("*.py"))


def _list_imported_names(file: Path) -> set[str]:
    """Return the top-level names in the absolute imports of a file.

    The result is empty if the file does not compile, because `_compile_files` reports this error.
    """
    names: list[str] = []
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(str(node.module))
    return {name.partition(".")[0] for name in names}


def _collect_strings(paths: Sequence[Path]) -> set[str]:
    """Return all string constants in Python files. `paths` are files, or directories of files."""
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_bytes())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _compile_files(copy_dir: Path, code_dir: Path, sources: Mapping[str, Path]) -> None:
    """Compile all Python files of a copy, so that errors are reported before the submission.

    The ranks then do not have to compile the files either. If Python has already compiled a file of Sluice, the
    bytecode is copied. The files of a custom model are always compiled, because Python would not notice two edits of a
    file within a second.

    Args:
        copy_dir: the directory that contains the copy now.
        code_dir: the directory to which the copy will be renamed.
        sources: the result of :func:`_copy_sources`.

    Raises:
        UserError: if a file does not compile. The message names the source file.
    """
    for file in sorted(copy_dir.rglob("*.py")):
        relative_path = file.relative_to(copy_dir)
        source = sources[relative_path.parts[0]].joinpath(*relative_path.parts[1:])
        if relative_path.parts[0] in _COPIED_NAMES and _copy_bytecode(source, file):
            continue
        try:
            py_compile.compile(str(file), dfile=str(code_dir / relative_path), doraise=True)
        except (py_compile.PyCompileError, ValueError) as error:  # ValueError: a null byte
            # the first line names the file and the line number, the last line the error
            lines = str(error).strip().replace(str(code_dir / relative_path), str(source)).splitlines()
            raise UserError(
                "run.invalid_code",
                f"{relative_path}, which the jobs would run, is not valid Python: {lines[-1]} ({lines[0]})",
            ) from error


def _copy_bytecode(source: Path, copy: Path) -> bool:
    """Copy the cached bytecode of a Python file for a copy of the file with the same modification time.

    Args:
        source: the file.
        copy: the copy of the file.

    Returns:
        False if there is no valid bytecode: Python has not compiled the file, or the file has changed since then.
    """
    with suppress(OSError):
        bytecode = Path(cache_from_source(source)).read_bytes()
        status = source.stat()
        copy_status = copy.stat()
        is_same = (int(copy_status.st_mtime), copy_status.st_size) == (int(status.st_mtime), status.st_size)
        # the header of a .pyc file that Python checks by the time of its source file (PEP 552)
        expected_header = MAGIC_NUMBER + struct.pack("<3I", 0, int(status.st_mtime) & 0xFFFFFFFF, status.st_size)
        if is_same and bytecode.startswith(expected_header):
            target = Path(cache_from_source(copy))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(bytecode)
            shutil.copymode(copy, target)
            return True
    return False


def _try_module(code_dir: Path, module: UserModule, options: Sequence[str]) -> list[str]:
    """Import a user's module in a child process. Build a custom model on the meta device, once with each of `options`.

    Args:
        code_dir: the directory of the copied code.
        module: the module.
        options: for each build of a custom model, the arguments of its `build` as a JSON object.

    Returns:
        The dotted keys of `options` that no build reads.

    Raises:
        UserError: if the module cannot be imported, the model cannot be built, or this takes longer than
            `IMPORT_TIMEOUT_S`.
    """
    arguments = ["pipeline.train.callback", "try_callback_module", module.target]
    work = "imported"
    if isinstance(module, UserModel):
        arguments = ["pipeline.model.task", "try_user_model", module.target, *options]
        work = "imported or built"
    slow_work = f"{module.key}: do less at the top level of {module.target}: importing the module"
    result = _run_child(code_dir, *arguments, slow_work=slow_work)
    if result.returncode:
        # the last lines of the traceback show where the error occurred in the user's module
        output = "\n".join(result.stderr.replace(f"{code_dir}{os.sep}", "").rstrip().splitlines()[-5:])
        raise UserError(
            "model.import_failed",
            f"{module.key}: {module.target} cannot be {work} here, so the jobs would fail too:\n{output}",
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


def _run_child(code_dir: Path, *arguments: str, slow_work: str) -> subprocess.CompletedProcess[str]:
    """Run `_CALL_PROGRAM` with the code in `code_dir`, and return the ended process.

    Args:
        code_dir: the directory of the code.
        arguments: the module, the function's name, and the function's arguments.
        slow_work: the subject of the message if the child process takes too long, such as `importing the module`.

    Raises:
        UserError: if the function raises UserError or takes too long.
    """
    command = [sys.executable, "-c", _CALL_PROGRAM, *arguments]
    env = make_code_env(os.environ, code_dir)
    try:
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError("model.slow_import", f"{slow_work} takes more than {IMPORT_TIMEOUT_S} s") from None
    if result.returncode == ExitCode.USER_ERROR:
        message, _, error_code = result.stdout.rstrip().rpartition("\n")
        raise UserError(error_code, message)
    return result


def _run_git(*arguments: str) -> bytes | None:
    """Return the output of a git command in `CODE_ROOT`; None if the command fails or `CODE_ROOT` is no repository.

    The output is not decoded, because the files in a diff may have different encodings.
    """
    if not (CODE_ROOT / ".git").exists():
        return None
    try:
        result = subprocess.run(["git", *arguments], cwd=CODE_ROOT, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def make_code_env(env: Mapping[str, str], code_dir: Path) -> dict[str, str]:
    """Return `env` with the directory `code_dir` first on PYTHONPATH.

    PYTHONSAFEPATH is set, because `python -m` would otherwise search the working directory first, which may contain
    another version of Sluice.
    """
    other_paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(code_dir)]
    return {**env, "PYTHONPATH": os.pathsep.join([str(code_dir), *other_paths]), "PYTHONSAFEPATH": "1"}


def start_process(
    code_dir: Path, command: Sequence[str], log: IO[bytes], variables: Mapping[str, str],
    inherited_fds: Sequence[int] = (), prepare_child: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a process with the code of a run. The process has no standard input.

    Args:
        code_dir: the copy of the code, which is also the working directory.
        command: the command and its arguments.
        log: receives standard output and standard error.
        variables: additional environment variables.
        inherited_fds: file descriptors that the process inherits.
        prepare_child: called in the child process before the command starts.
    """
    return subprocess.Popen(
        command, env={**make_code_env(os.environ, code_dir), **variables}, cwd=code_dir, pass_fds=inherited_fds,
        preexec_fn=prepare_child, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
