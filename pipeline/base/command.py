"""Format commands of Sluice in messages so that users can paste them into their shell.

Users start Sluice from any folder, as `python …/submit.py` or as `sluice`. A printed command uses the same entry point.
A job does not know which entry point was used, and users may read its messages in any folder. Therefore jobs print
`python submit.py`, as in the documentation.
"""

from __future__ import annotations

import difflib
import shlex
import shutil
import sys
from pathlib import Path


def format_command(*arguments: str) -> str:
    """Return the command with these arguments, such as `resume` and a run directory, quoted for a shell."""
    return " ".join([*_format_entry_point(sys.argv[0]), *map(shlex.quote, arguments)])


def format_current_command(*extra_arguments: str) -> str:
    """Return the command that started this process, with further arguments."""
    entry_point = Path(sys.argv[0])
    if entry_point.name == "__main__.py":
        return shlex.join(["python", "-m", entry_point.parent.name, *sys.argv[1:], *extra_arguments])
    return format_command(*sys.argv[1:], *extra_arguments)


def suggest_path(path: Path, pattern: str) -> str:
    """Return a suggestion (`; did you mean …?`) for a missing path; "" if no existing path has a similar name.

    Args:
        path: the missing path.
        pattern: a glob pattern for the candidates, relative to the folder of `path`. If a candidate is the
            `config.yaml` of a run, its folder is suggested instead.
    """
    candidates = path.parent.glob(pattern)
    names = {str(candidate.relative_to(path.parent)).removesuffix("/config.yaml") for candidate in candidates}
    similar_names = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {path.with_name(similar_names[0])}?" if similar_names else ""


def venv_python(script: Path) -> Path:
    """Return the path of Python in the virtual environment that `make install` creates next to submit.py."""
    return script.resolve().parent / ".venv/bin/python"


def _format_entry_point(program: str) -> list[str]:
    """Return the quoted arguments that start Sluice with the same entry point as this process.

    If this process was started neither as `sluice` nor by submit.py, for example in a job, return `python submit.py`.

    Args:
        program: the value of sys.argv[0].
    """
    path = Path(program)
    if path.name == "sluice":  # the name alone is enough if the shell finds this program by it
        return ["sluice" if shutil.which("sluice") == program else shlex.quote(program)]
    if path.name != "submit.py":
        return ["python", "submit.py"]
    for name in ("python", "python3"):
        # The short name is enough if it is the Python of this process. If a .venv exists, any Python works, because
        # submit.py restarts itself with the Python of the .venv.
        if (python := shutil.which(name)) and (python == sys.executable or venv_python(path).exists()):
            return [name, shlex.quote(program)]
    return [shlex.quote(sys.executable), shlex.quote(program)]
