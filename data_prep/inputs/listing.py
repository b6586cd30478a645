"""Which files a config names: each item of `data.source` is `python-stdlib`, a glob, a file, or a folder.

A folder is looked at once, and of each file size and time alone are asked: on a parallel file system opening a hundred
thousand files takes minutes.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Mapping

from data_prep.inputs.sources import ENDINGS, JSON_LINES, LONGEST, Input
from pipeline.base.errors import UserError
from pipeline.base.files import read_json, reading
from pipeline.config.datasets import DataConfig

PYTHON_STDLIB = "python-stdlib"
_NO_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BESIDE = {".bin": (".idx",), ".ds": (".ds.index", ".ds.metadata")}
"""What says of a file of tokens (data_prep/tokens) where documents end, and of which type they are."""
_DATASET_DICT, _STATE = "dataset_dict.json", "state.json"


def find_inputs(data: DataConfig, formats: Mapping[str, str] | None = None) -> list[Input]:
    """All inputs of the config, in the order of `data.source` and sorted by path within each of its items.

    `formats`: the endings that may stand there and what they are; without it, those of texts.
    A file that two items name counts once, at its first place. Raises UserError naming the item for a glob
    without a match, and naming the file for an ending that no format has, a file that cannot be read, or a text that is
    too long for one document.
    """
    found: dict[str, Input] = {}
    for path, file_format in named_files(data, formats or endings_of(data)):
        with reading(path):
            seen = os.stat(path)
        if not stat.S_ISREG(seen.st_mode):
            raise UserError(f"data.source: {path} is no ordinary file, but a pipe or a device: leave it out")
        if file_format == "text" and seen.st_size > LONGEST:
            out = f"{LONGEST:,} may be: set data.text_documents: line, where a line is one, or cut it into files"
            raise UserError(f"data.source: {path} has {seen.st_size:,} bytes and would be one document; {out}")
        found.setdefault(path, Input(path, seen.st_size, seen.st_mtime_ns, file_format, beside(path)))
    return list(found.values())


def stamp(path: str) -> list[str | int]:
    """Path, size and time of a file."""
    return [path, (seen := os.stat(path)).st_size, seen.st_mtime_ns]


def beside(path: str) -> list[list[str | int]]:
    """Those of what is read with a file of tokens."""
    root, ending = os.path.splitext(path)
    return [*map(stamp, filter(os.path.isfile, (root + other for other in _BESIDE.get(ending, ()))))]


def endings_of(data: DataConfig) -> Mapping[str, str]:
    """The endings that files of documents may have, and their formats: all, or those of lines that hold records."""
    return ENDINGS if data.records == "text" else {end: kind for end, kind in ENDINGS.items() if kind in JSON_LINES}


def named_files(data: DataConfig, formats: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Path and format of each file that the config names, by names alone. Raises UserError as `find_inputs` does."""
    for source in data.sources:
        if source == PYTHON_STDLIB:
            paths = _stdlib_files(sysconfig.get_path("stdlib"))
        else:
            pattern = os.path.expanduser(source)
            if os.path.isdir(pattern):
                matches = files_in(pattern, formats)
            else:
                matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
                matches = [path for path in matches if not os.path.isdir(path)]
            paths = sorted(map(os.path.abspath, matches))
            if not paths:
                _check_listable(source, pattern)
                others = f", or {PYTHON_STDLIB}" if formats is ENDINGS else ""
                raise UserError(f"data.source: {source!r} matches no file; name {', '.join(formats)} files{others}")
        yield from ((path, "text" if source == PYTHON_STDLIB else _format(path, data, formats)) for path in paths)


def _check_listable(source: str, pattern: str) -> None:
    """Raise UserError if permissions hide what an item of data.source names: a glob finds nothing there.

    `pattern`: the item as a path, or as a glob, of which the fixed beginning is checked.
    """
    fixed = pattern
    while glob.has_magic(fixed):
        fixed = os.path.dirname(fixed)
    try:
        os.listdir(fixed or os.curdir)
    except PermissionError as error:
        raise UserError(
            f"data.source: {source!r}: {fixed or os.curdir}: permission denied: check the owner and mode of the folders"
        ) from error
    except OSError:
        return  # it does not exist, or is a file


def files_in(folder: str, endings: Iterable[str]) -> list[str]:
    """The files in a folder, and in the folders in it, with such an ending; one look at each folder, none at the files.

    A folder that links lead to as well counts once. Raises UserError for one that cannot be listed, and for the folder
    of a Hugging Face DatasetDict, whose parts are not meant to be mixed.
    """
    found, wanted, left, seen = [], (*endings,), [folder], set[str]()
    while left:  # what lies there, then what links lead to
        for inside, folders, names in os.walk(left.pop(0), onerror=_refuse):
            if (real := os.path.realpath(inside)) in seen:
                folders.clear()
                continue
            seen.add(real)
            if _DATASET_DICT in names:
                parts = ", ".join(os.path.join(inside, name) for name in sorted(folders)) or "a folder in it"
                raise UserError(f"{inside} holds a DatasetDict of parts, such as train and test: name one: {parts}")
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            left += filter(os.path.islink, (os.path.join(inside, name) for name in folders))
            names = _of_dataset(inside, names)
            names = [name for name in names if name.endswith(wanted) and not name.startswith(".")]
            found += [os.path.join(inside, name) for name in names]
    return found


def _of_dataset(folder: str, names: list[str]) -> list[str]:
    """Without what Hugging Face's `map` and `filter` leave beside the data, copies of it; `state.json` names the data.

    Raises UserError where a file that it names is not there.
    """
    with reading(state := os.path.join(folder, _STATE)):
        told = read_json(state) if _STATE in names else None
    files = told.get("_data_files") if isinstance(told, dict) else None
    if not isinstance(files, list):
        return [name for name in names if not (name.startswith("cache-") and name.endswith(".arrow"))]
    own = [one.get("filename") for one in files if isinstance(one, dict)]
    if gone := [name for name in own if name not in names]:
        raise UserError(
            f"{state} names {gone[0]!r}, which is not in its folder: put it there, or save the dataset again"
        )
    return [name for name in names if name in own]


def _refuse(error: OSError) -> None:
    with reading(error.filename):
        raise error


def _stdlib_files(root: str) -> list[str]:
    """The library's own modules under `root`, without its tests and what was installed, by relative path."""
    paths = []
    for folder, names, files in os.walk(root, onerror=_refuse):
        names[:] = [name for name in names if name not in _NO_LIBRARY]
        paths += [os.path.relpath(os.path.join(folder, name), root) for name in files if name.endswith(".py")]
    if not paths:
        raise UserError(f"data.source: {PYTHON_STDLIB}: no .py file under {root}; name other files")
    return [os.path.join(root, path) for path in sorted(paths)]


def _format(path: str, data: DataConfig, formats: Mapping[str, str]) -> str:
    for ending, file_format in formats.items():
        if path.endswith(ending):
            return "lines" if file_format == "text" and data.text_documents == "line" else file_format
    raise UserError(f"data.source: {path}: no supported ending; there are {', '.join(formats)}")
