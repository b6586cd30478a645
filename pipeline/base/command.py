"""How a command of Sluice is printed: so that it works when it is pasted where it is read.

The person stands in some folder and came by one of two doors, `python …/submit.py` or `sluice`; what is printed goes by
the same one. A job knows neither, and its words are read anywhere: it names the door as the documentation does.
"""

from __future__ import annotations

import difflib
import shlex
import shutil
import sys
from pathlib import Path


def format_command(*words: str) -> str:
    """The command with these words, such as `resume` and a run, quoted for a shell."""
    return " ".join([*_door(sys.argv[0]), *map(shlex.quote, words)])


def format_current_command(*more: str) -> str:
    """The command that was typed, at whatever door, with more words."""
    typed = Path(sys.argv[0])
    if typed.name == "__main__.py":
        return shlex.join(["python", "-m", typed.parent.name, *sys.argv[1:], *more])
    return format_command(*sys.argv[1:], *more)


def suggest_path(path: Path, files: str) -> str:
    """A hint at what there is in place of a missing path: of a name like it, by a pattern for its folder; or ""."""
    names = {str(found.relative_to(path.parent)).removesuffix("/config.yaml") for found in path.parent.glob(files)}
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def venv_python(script: Path) -> Path:
    """The Python of the environment that `make install` makes beside submit.py."""
    return script.resolve().parent / ".venv/bin/python"


def _door(typed: str) -> list[str]:
    path = Path(typed)
    if path.name == "sluice":
        return ["sluice" if shutil.which("sluice") == typed else shlex.quote(typed)]
    if path.name != "submit.py":
        return ["python", "submit.py"]
    for name in ("python", "python3"):
        # any will do where there is a .venv: submit.py goes on in it
        if (found := shutil.which(name)) and (found == sys.executable or venv_python(path).exists()):
            return [name, shlex.quote(typed)]
    return [shlex.quote(sys.executable), shlex.quote(typed)]
