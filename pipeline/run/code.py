"""The copy of the code that a run's jobs work from, with its git commit and diff; and how a process uses that copy.

It is taken when the run is made, and again by `resume --update-code`: an edit never changes a run that waits.
"""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.trust import normalise
from pipeline.config.user_model import UserModel

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds submit.py and the packages: a checkout, or a run's `code/`."""


IMPORT_S = 300
"""How long the import of a model of the user's own may take: torch from a cold file system is slow."""
_SNAPSHOT = ("submit.py", "setup.py", "setup.cfg", "pipeline", "slurm", "data_prep")


def copy_code(run: Path, model: UserModel | None, not_this: str, umask: int, try_model: bool) -> None:
    """Put a copy into `run/code`; an older one is replaced. With a model of the user's own, its top-level package too.

    `not_this`: the name of a folder in that package that holds runs; `umask`: what others may not; `try_model`: whether
    to import that model once. Raises UserError for a package with a name of ours, or code that does not compile or
    import, shutil.Error or OSError where the copy cannot be written; the older one stays then, and nothing of the new.
    """
    if model is not None and model.root.name in _SNAPSHOT and model.root.parent != CODE_ROOT:
        raise UserError(f"model.target: {model.root} has the name of a package of Sluice; rename it")
    code, new, old = run / "code", run / ".code.new", run / ".code.old"
    for left in run.glob(".code.*"):  # by one who was killed in the middle
        shutil.rmtree(left)
    try:
        _fill(new, model, not_this)
        _compile(new, code)
        if model is not None and try_model:
            _import(new, model.target)
        normalise(new, umask)  # a checkout may be open to others, and its copies with it
        if code.exists():
            os.rename(code, old)
        os.rename(new, code)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _fill(new: Path, model: UserModel | None, not_this: str) -> None:
    new.mkdir()
    unwanted = ("__pycache__", "*.pyc", "*.egg-info")
    sources: dict[Path, tuple[str, ...]] = {CODE_ROOT / name: unwanted for name in _SNAPSHOT}
    if model is not None and model.root.name not in _SNAPSHOT:
        sources[model.root] = (*unwanted, ".*", "*.h5", "*.hdf5", not_this)
    for source, names in sources.items():
        if source.is_dir():
            shutil.copytree(source, new / source.name, ignore=shutil.ignore_patterns(*names))
        elif source.is_file():
            shutil.copy2(source, new)
    if (commit := _git("rev-parse", "HEAD")) is not None:
        (new / "COMMIT").write_bytes(commit)
        (new / "DIFF").write_bytes(_git("diff", "HEAD") or b"")


def _compile(new: Path, code: Path) -> None:
    """Compile everything, as if it were in `code` already: a mistake is told today, and no rank need do it again."""
    for file in sorted(new.rglob("*.py")):
        inside = file.relative_to(new)
        try:
            py_compile.compile(str(file), dfile=str(code / inside), doraise=True)
        except (py_compile.PyCompileError, ValueError) as error:  # ValueError: a null byte
            words = str(error).strip().splitlines()
            raise UserError(f"{inside}, which the jobs would run, is no Python: {words[-1]} ({words[0]})") from error


def _import(code: Path, module: str) -> None:
    """Import a model in a process of its own, with everything that it imports (torch, mostly: that takes seconds)."""
    command = [sys.executable, "-c", "import importlib, sys; importlib.import_module(sys.argv[1])", module]
    env = with_code(os.environ, code)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        words = f"model.target: importing {module} takes more than {IMPORT_S} s; do less at its top level"
        raise UserError(words) from None
    if done.returncode:
        told = "\n".join(done.stderr.replace(f"{code}{os.sep}", "").rstrip().splitlines()[-4:])
        raise UserError(f"model.target: {module} cannot be imported here, and no job could:\n{told}")


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


def with_code(env: Mapping[str, str], code: Path) -> dict[str, str]:
    """The environment with the run's copy of the code first on PYTHONPATH, before what a module file put there.

    PYTHONSAFEPATH: without it `python -m` looks into the working directory, often a checkout, before that.
    """
    rest = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(code)]
    return {**env, "PYTHONPATH": os.pathsep.join([str(code), *rest]), "PYTHONSAFEPATH": "1"}
