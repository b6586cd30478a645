"""`data.filter: MODULE:FUNCTION`: a Python function of the user's own that says which documents are taken.

    def keep(document: dict) -> bool:      the object of a line of .jsonl; of other formats {data.text_field: text}
        return len(document["text"]) > 200

It is called with each document that has text, maybe more than once, so it must say the same again. The module is one
file, beside the config file or on Python's path. `prepare` copies it to `data/filter.py`, which the tasks run, and
whose hash is part of what the shards are made from: a function that changed gives new shards, never mixed ones.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import reading

FILTER = "filter.py"
Keep = Callable[[Mapping[str, Any]], bool]


class FilterError(Exception):
    """What a filter raised, or gave that is neither True nor False."""


def source_of(target: str) -> Path:
    """The file of a filter `FOLDER/MODULE:FUNCTION`. Raises UserError where it is missing or lacks the function."""
    module, _, function = target.rpartition(":")
    folder, name = os.path.split(module)
    relative = name.removesuffix(".py").replace(".", os.sep) + ".py"
    file = next((path for place in (folder, *sys.path) if (path := Path(place, relative)).is_file()), None)
    if file is None:
        raise UserError(f"data.filter: there is no {relative} in {folder}, nor in a folder of PYTHONPATH")
    try:
        with reading(str(file)):
            body = ast.parse(file.read_bytes(), str(file)).body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"data.filter: {file} is no Python that can be read: {error}") from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in body):
        raise UserError(f"data.filter: {file} has no function {function!r} at its top level")
    return file


def load_filter(file: Path, target: str) -> Keep:
    """The function, of a copy of its file. It raises FilterError; this raises UserError where the file does."""
    function = target.rpartition(":")[2]
    spec = importlib.util.spec_from_file_location("sluice_filter", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a program of others raises
        raise UserError(f"data.filter: {target} cannot be imported: {type(error).__name__}: {error}") from error
    called = getattr(module, function)

    def keep(document: Mapping[str, Any]) -> bool:
        try:
            found = called(document)
        except Exception as error:
            raise FilterError(f"it raised {type(error).__name__}: {shorten(str(error), 300)}") from error
        if type(found).__name__ not in ("bool", "bool_"):  # Python's, or NumPy's
            raise FilterError(f"it returned {shorten(repr(found), 100)}, neither True nor False")
        return bool(found)

    return keep
