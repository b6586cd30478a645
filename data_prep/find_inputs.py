"""Which files a config names: each item of `data.source` is `python-stdlib`, a glob, a file, or a folder.

A folder is looked at once, and of each file size and time alone are asked: on a parallel file system opening a hundred
thousand files takes minutes.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from data_prep import documents
from data_prep.documents import ENDINGS, FORMATS, Input, RejectedError, compressed_format, get_field, read_objects
from data_prep.file_type import COMPRESSION_ENDINGS, COMPRESSIONS, CONVERSIONS, detect_file_type, is_mds
from pipeline.base.errors import UserError
from pipeline.base.files import read_json, translate_read_errors
from pipeline.config.datasets import DataConfig

PYTHON_STDLIB = "python-stdlib"
_NO_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BESIDE = {".bin": (".idx",), ".ds": (".ds.index", ".ds.metadata")}
"""What says of a file of tokens (data_prep/tokens) where documents end, and of which type they are."""
Answer = TypeVar("Answer")
_DATASET_DICT, _STATE = "dataset_dict.json", "state.json"


def find_inputs(data: DataConfig, formats: Mapping[str, str] | None = None) -> list[Input]:
    """All inputs of the config, in the order of `data.source` and sorted by path within each of its items.

    `formats`: the endings that may stand there and what they are; without it, those of texts.
    A file that two items name counts once, at its first place. Raises UserError as `named_files` does, and naming the
    file for one that cannot be read, or a text that is too long for one document.
    """
    found: dict[str, Input] = {}
    for path, file_format in find_named_files(data, formats):
        with translate_read_errors(path):
            seen = os.stat(path)
        if not stat.S_ISREG(seen.st_mode):
            raise UserError(
                "data.not_a_file", f"data.source: {path} is no ordinary file, but a pipe or a device: leave it out"
            )
        if file_format == "text" and seen.st_size > documents.MAX_DOCUMENT_BYTES:
            out = f"{documents.MAX_DOCUMENT_BYTES:,} may be: set data.text_documents: line, or cut it into files"
            raise UserError(
                "data.too_large", f"data.source: {path} has {seen.st_size:,} bytes and would be one document; {out}"
            )
        found.setdefault(path, Input(path, seen.st_size, seen.st_mtime_ns, file_format, stamp_index_files(path)))
    return list(found.values())


def stamp_file(path: str) -> list[str | int]:
    """Path, size and time of a file."""
    return [path, (seen := os.stat(path)).st_size, seen.st_mtime_ns]


def stamp_index_files(path: str) -> list[list[str | int]]:
    """Those of what is read with a file of tokens."""
    root, ending = os.path.splitext(path)
    return [*map(stamp_file, filter(os.path.isfile, (root + other for other in _BESIDE.get(ending, ()))))]


def find_named_files(data: DataConfig, formats: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Path and format of each file that the config names, sorted by path within each item of `data.source`.

    formats: the endings that files may have, and their formats; None: those of documents. Names tell. Of files of
    documents these are opened: those whose name tells nothing, if a glob matches them or a folder has no others; and in
    folders JSON, CSV and TSV, which may be about the data: they are taken if they have the field of `data.text_field`.

    Raises UserError, with what the files seem to be, for an item without a file, and for files of no known format.
    """
    documents = _Documents(data) if formats is None else None
    for source in data.sources:
        if source == PYTHON_STDLIB:
            yield from ((path, "text") for path in _stdlib_files(sysconfig.get_path("stdlib")))
            continue
        pattern = os.path.expanduser(source)
        endings = documents.endings if documents else formats or {}
        if os.path.isdir(pattern):
            found, others = _in_folder(pattern, documents, endings)
        else:
            matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
            found, others = _of_glob(_absolute(one for one in matches if not os.path.isdir(one)), documents, endings)
        if others or not found:
            raise _unrecognised(source, pattern, others, documents, endings)
        yield from sorted(found.items())


class _Documents:
    """Which files hold documents, by their names and what is in them."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        kinds = {"text": None, "tokens": ()}.get(data.records, ("jsonl", "json"))
        self.endings = {end: kind for end, kind in ENDINGS.items() if kinds is None or FORMATS[kind].kind in kinds}
        self.kinds = {FORMATS[kind].kind for kind in self.endings.values()}
        self.fields = _FIELDS.get(data.records, (data.text_field,))

    def by_name(self, path: str) -> str | None:
        """Return the format of a file by its name, or by `data.format`; None if the name tells nothing."""
        kind = self.data.format
        if kind is None:
            found = _by_ending(path, self.endings)
        else:
            packed = next((ending for ending in COMPRESSIONS if path.endswith(ending)), "")
            found = compressed_format(kind, packed) if packed and compressed_format(kind, packed) in FORMATS else kind
        return found and self._lines(found)

    def _lines(self, found: str) -> str:
        is_text = FORMATS[found].kind == "text" and self.data.text_documents == "line"
        return f"lines{found.removeprefix('text')}" if is_text else found

    def by_content(self, path: str) -> str | None:
        """Return the format of a file by its content, None if it is not clear that documents are in it."""
        found = detect_file_type(path)
        kind = _BY_CONTENT.get(found.kind)
        if kind not in self.kinds:
            return None
        if found.compression is None or kind == "tar":
            return kind
        packed = compressed_format(kind, COMPRESSION_ENDINGS[found.compression])
        return packed if packed in FORMATS else None

    def why_not(self, path: str, file_format: str) -> str | None:
        """Return why a file of objects has no documents by its first record, None if it has some."""
        kind = FORMATS[file_format].kind
        try:
            with translate_read_errors(path):
                records = read_objects(path, 0, os.path.getsize(path), kind, self.fields[0])
                first = next((one.found for one in records if one.found is not None), None)
            if isinstance(first, Exception):
                return str(first)
            if first is None:
                return None if kind in ("csv", "tsv") else "no object in it"  # a header is all right
            if not any(field in first for field in self.fields):
                get_field(first, self.fields[0])
        except (UserError, RejectedError) as error:
            return str(error).removeprefix(f"{path}: ")
        return None


_FIELDS = {"prompts": ("prompt",), "messages": ("messages", "conversations")}
_BY_CONTENT = {"JSON Lines": "jsonl", "JSON": "json", "Parquet": "parquet", "Arrow": "arrow", "tar": "tar"}
_MOST_NAMED = 20
"""Files that a message lists, and so many files of a folder are opened to see whether there is anything in it."""
_AT_ONCE = 16  # files that are opened: on a parallel file system one takes milliseconds
Found = tuple[dict[str, str], dict[str, str]]
"""The formats of files by path, and of files that are not taken what they seem to be."""


def _in_folder(folder: str, documents: _Documents | None, endings: Mapping[str, str]) -> Found:
    """The files of a folder; if none is taken, the first of them."""
    if documents is None:
        found = {path: _by_ending(path, endings) or "" for path in _absolute(list_files(folder, endings))}
        return found, {}
    if documents.data.format is not None:
        kind = documents.data.format
        own = [ending for ending, known in ENDINGS.items() if FORMATS[known].kind == kind]
        paths = _absolute(list_files(folder, own) or list_files(folder, [""]))
        return {path: documents.by_name(path) or "" for path in paths}, {}
    named = {path: documents.by_name(path) or "" for path in _absolute(list_files(folder, documents.endings))}
    doubtful = [path for path, known in named.items() if FORMATS[known].kind in ("json", "csv", "tsv")]
    reasons = _each(lambda path: documents.why_not(path, named[path]), doubtful)
    left_out = {path: reason for path, reason in reasons.items() if reason}
    if taken := {path: known for path, known in named.items() if path not in left_out}:
        return taken, {}
    paths = sorted({*_absolute(list_files(folder, [""]))} - {*named})
    known = _each(documents.by_content, paths[:_MOST_NAMED])
    if any(known.values()):
        known |= _each(documents.by_content, paths[_MOST_NAMED:])
    taken = {path: kind for path, kind in known.items() if kind}
    return taken, ({} if taken else {path: left_out.get(path, "") for path in sorted({*paths, *left_out})})


def _of_glob(paths: Sequence[str], documents: _Documents | None, endings: Mapping[str, str]) -> Found:
    """The files that a glob matches; all of them should be taken."""
    if documents is None:
        named = {path: _by_ending(path, endings) for path in paths}
    else:
        named = {path: documents.by_name(path) for path in paths}
        unknown = [path for path, kind in named.items() if kind is None]
        named |= dict.fromkeys(filter(is_mds, paths))
        for path, kind in _each(documents.by_content, unknown).items():
            named[path] = kind or ("jsonl" if detect_file_type(path).kind == "empty" and len(paths) > 1 else None)
    return {path: kind for path, kind in named.items() if kind}, {path: "" for path, kind in named.items() if not kind}


def _absolute(paths: Iterable[str]) -> list[str]:
    return sorted(map(os.path.abspath, paths))


def _each(function: Callable[[str], Answer], paths: Sequence[str]) -> dict[str, Answer]:
    """The answers for files that are opened, several at once."""
    if len(paths) < 2:
        return {path: function(path) for path in paths}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(paths, pool.map(function, paths), strict=True))


def _by_ending(path: str, endings: Mapping[str, str]) -> str | None:
    return next((kind for ending, kind in endings.items() if path.endswith(ending)), None)


def _unrecognised(
    source: str, pattern: str, others: Mapping[str, str], documents: _Documents | None, endings: Mapping[str, str]
) -> UserError:
    """The error for an item of data.source that names no file, or files of no known format (`others`, and why)."""
    plain = ", ".join(end for end in endings if not end.endswith((*COMPRESSIONS,)))
    wanted, folder = f"name {plain} files", pattern
    if documents:
        wanted += f" (also compressed: {', '.join(COMPRESSIONS)})"
    if documents and documents.data.records == "text":
        wanted += f", or {PYTHON_STDLIB}"
    if others:
        several = len(others) != 1
        what = f": {len(others):,} file{'s have' if several else ' has'} no supported ending, or no documents; {wanted}"
        listed = "What is there:"
    else:
        _check_listable(source, pattern)
        what = f" matches no file; {wanted}"
        is_glob = glob.has_magic(pattern) and not os.path.isdir(pattern)
        folder = (_fixed(pattern) if is_glob or os.path.isdir(pattern) else os.path.dirname(pattern)) or os.curdir
        if os.path.isdir(folder):
            there = sorted(one.path for one in os.scandir(folder) if not one.is_dir())
            others = {path: "" for path in there if not os.path.basename(path).startswith(".")}
            listed = f"The folder {folder} has:" if others else f"The folder {folder} has no files."
        else:
            listed = f"There is no folder {folder}."
    rows = format_file_list(others, folder)
    if documents and documents.data.records != "text":
        rows.append(f"data.records: {documents.data.records} is read from objects of JSON.")
    elif documents and any(row.endswith(": text") for row in rows):
        rows.append("To read files of other names as text set data.format: text.")
    return UserError("data.no_files", "\n".join([f"data.source: {source!r}{what}", listed, *rows]))


def format_file_list(files: Iterable[str] | Mapping[str, str], folder: str) -> list[str]:
    """Return lines that name the first files, what they seem to be (a mapping: and why they are not taken), and how to
    convert that. Paths are relative to `folder`, if it is one."""
    shown = sorted(files)[:_MOST_NAMED]
    kinds = _each(detect_file_type, shown)
    reasons = files if isinstance(files, Mapping) else {}
    rows = []
    for path in shown:
        name = os.path.relpath(path, folder) if os.path.isdir(folder) else path
        rows.append(f"  {name}: {kinds[path]}" + (f": {reasons[path]}" if reasons.get(path) else ""))
    if (more := len([*files]) - len(shown)) > 0:
        rows.append(f"  … and {more:,} more")
    unread = dict.fromkeys(one.kind for one in kinds.values() if one.kind in CONVERSIONS)
    return rows + [f"To convert {kind}: {CONVERSIONS[kind]}" for kind in unread]


def _fixed(pattern: str) -> str:
    """The beginning of a glob that is a path."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern


def _check_listable(source: str, pattern: str) -> None:
    """Raise UserError if permissions hide what an item of data.source names: a glob finds nothing there.

    `pattern`: the item as a path, or as a glob, of which the fixed beginning is checked.
    """
    fixed = _fixed(pattern)
    try:
        os.listdir(fixed or os.curdir)
    except PermissionError as error:
        raise UserError(
            "data.permission_denied",
            f"data.source: {source!r}: {fixed or os.curdir}: permission denied: check the owner and mode of the "
            "folders",
        ) from error
    except OSError:
        return  # it does not exist, or is a file


def list_files(folder: str, endings: Iterable[str]) -> list[str]:
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
                raise UserError(
                    "data.ambiguous_dataset",
                    f"{inside} holds a DatasetDict of parts, such as train and test: name one: {parts}",
                )
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
    with translate_read_errors(state := os.path.join(folder, _STATE)):
        told = read_json(state) if _STATE in names else None
    files = told.get("_data_files") if isinstance(told, dict) else None
    if not isinstance(files, list):
        return [name for name in names if not (name.startswith("cache-") and name.endswith(".arrow"))]
    own = [one.get("filename") for one in files if isinstance(one, dict)]
    if gone := [name for name in own if name not in names]:
        raise UserError(
            "data.missing_file",
            f"{state} names {gone[0]!r}, which is not in its folder: put it there, or save the dataset again",
        )
    return [name for name in names if name in own]


def _refuse(error: OSError) -> None:
    with translate_read_errors(error.filename):
        raise error


def _stdlib_files(root: str) -> list[str]:
    """The library's own modules under `root`, without its tests and what was installed, by relative path."""
    paths = []
    for folder, names, files in os.walk(root, onerror=_refuse):
        names[:] = [name for name in names if name not in _NO_LIBRARY]
        paths += [os.path.relpath(os.path.join(folder, name), root) for name in files if name.endswith(".py")]
    if not paths:
        raise UserError("data.no_files", f"data.source: {PYTHON_STDLIB}: no .py file under {root}; name other files")
    return [os.path.join(root, path) for path in sorted(paths)]
