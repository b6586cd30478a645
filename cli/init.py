"""`init`: a small commented config to start from, and with it a module that gives a model of one's own.

What it writes stands in slurm/templates, to be read and changed there.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.base.command import command
from pipeline.base.errors import UserError
from pipeline.run.code import CODE_ROOT

_TEMPLATES = CODE_ROOT / "slurm/templates"
_TEXT = {"my_text.yaml": "my_text.yaml"}
_MODEL = {"my_model.yaml": "my_model.yaml", "my_model.py": "my_model.txt"}
"""What is written, config first, and from which template: in the house a file that ends in .py is a part of it."""


def write_starter(folder: Path, model: bool) -> str:
    """Write the files into `folder`; what to do next. Raises UserError, and writes nothing, where one is there."""
    files = _MODEL if model else _TEXT
    if taken := [name for name in files if (folder / name).exists()]:
        raise UserError(f"{taken[0]} exists already and stays as it is: rename it, or start in another folder")
    for name, template in files.items():
        text = (_TEMPLATES / template).read_text().replace("SCHEMA", str(CODE_ROOT / "configs/schema.json"))
        with open(folder / name, "x") as file:
            file.write(text)
    config = next(iter(files))
    return f"wrote {' and '.join(files)}; name your data in data.source, then: {command(config)}"
