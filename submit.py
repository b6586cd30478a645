"""Sluice on the login node: `python submit.py CONFIG.yaml`, `python submit.py status RUN` …

This file only starts the command line (cli/main.py). If the Python that runs this file lacks the required packages, the
file starts itself again with the Python of the virtual environment that `make install` creates in the same folder.
Users therefore do not have to activate the virtual environment.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from pipeline.base.command import venv_python

_STARTED_BY = "SLUICE_STARTED_BY"
"""The environment variable with the path of the Python with which this file has started itself again."""

try:
    from cli.main import main

    # the import above does not need these packages, but most commands do
    if missing_packages := [name for name in ("pydantic", "submitit", "yaml") if find_spec(name) is None]:
        raise ImportError(f"No module named {missing_packages[0]!r}")
except ImportError as error:
    if __name__ != "__main__":
        raise
    python = venv_python(Path(__file__))
    # `python` may be a wrapper script that starts another interpreter. sys.executable then differs from `python`, and
    # only the environment variable prevents an endless loop.
    if not python.exists() or sys.executable == str(python) or os.environ.get(_STARTED_BY) == str(python):
        print(f"error: {sys.executable}: {error}; `make install` creates {python.parents[1]}", file=sys.stderr)
        sys.exit(2)
    os.execve(python, [str(python), *sys.argv], {**os.environ, _STARTED_BY: str(python)})
os.environ.pop(_STARTED_BY, None)

if __name__ == "__main__":
    main()
