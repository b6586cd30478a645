"""The copy of the code that a run's jobs work from, with its git commit and diff; and how a process uses that copy.

It is taken when the run is made, and again by `resume --update-code`: an edit never changes a run that waits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.trust import normalise
from pipeline.config.user_model import UserModel

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds submit.py and the packages: a checkout, or a run's `code/`."""


_SNAPSHOT = ("submit.py", "setup.py", "setup.cfg", "pipeline", "slurm", "data_prep")


def copy_code(run: Path, model: UserModel | None, not_this: str, umask: int) -> None:
    """Put a copy into `run/code`; an older one is replaced. With a model of the user's own, its top-level package too.

    `not_this`: the name of a folder in that package that holds runs; `umask`: what others may not. Raises UserError for
    a package with a name of ours, shutil.Error or OSError where the copy cannot be written; the older one stays then,
    and nothing of the new.
    """
    if model is not None and model.root.name in _SNAPSHOT and model.root.parent != CODE_ROOT:
        raise UserError(f"model.target: {model.root} has the name of a package of Sluice; rename it")
    code, new, old = run / "code", run / ".code.new", run / ".code.old"
    for left in run.glob(".code.*"):  # by one who was killed in the middle
        shutil.rmtree(left)
    try:
        _fill(new, model, not_this)
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
