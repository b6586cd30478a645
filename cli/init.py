"""`init`: write a small commented config to start from. The templates are in slurm/templates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.common import console
from pipeline.base.command import format_command
from pipeline.base.errors import UserError
from pipeline.run.code import CODE_ROOT

_TEMPLATES = CODE_ROOT / "slurm/templates"
_TEXT_FILES = {"my_text.yaml": "my_text.yaml"}
_MODEL_FILES = {"my_model.yaml": "my_model.yaml", "my_model.py": "my_model.txt"}
"""Name of the template, by name of the file to write. The name of the Python template ends in .txt, because tools would
check a .py file as code of Sluice."""


def init(
    model: Annotated[
        bool, typer.Option("--model", help="for a custom model: also write a Python module that defines it")
    ] = False,
) -> None:
    """Write a small commented config into this folder. Existing files are not changed."""
    console.print(write_starter(Path(), model), soft_wrap=True)


def write_starter(folder: Path, model: bool) -> str:
    """Write a config to start from into `folder`. Return a message that says what to do next.

    Args:
        folder: the folder.
        model: whether to write the files for a custom model: a config and a Python module.

    Raises:
        UserError: if one of the files exists. In this case, nothing is written.
    """
    files = _MODEL_FILES if model else _TEXT_FILES
    if existing := [name for name in files if (folder / name).exists()]:
        raise UserError(
            "cli.file_exists", f"{existing[0]} exists and was not changed: rename it, or start in another folder"
        )
    for name, template in files.items():
        # in a config, SCHEMA stands for the path of the JSON Schema, which editors read
        text = (_TEMPLATES / template).read_text().replace("SCHEMA", str(CODE_ROOT / "configs/schema.json"))
        with open(folder / name, "x") as file:
            file.write(text)
    config = next(iter(files))
    return f"wrote {' and '.join(files)}; set data.source to your data, then run: {format_command(config)}"
