"""Find the files that a config names. Each item of `data.source` is `python-stdlib`, a glob, a file or a folder.

Each folder is listed once. A file is opened only if its name does not show what it contains. On a parallel file system,
opening a hundred thousand files takes minutes.
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
"""Item of `data.source` that names the modules of Python's standard library."""
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders beside the modules of Python's standard library that are skipped: other packages and tests."""
_INDEX_ENDINGS = {".bin": (".idx",), ".ds": (".ds.index", ".ds.metadata")}
"""Ending of a token file → endings of the files beside the token file that contain document boundaries or the type."""
_DATASET_DICT_FILE = "dataset_dict.json"
"""File that Hugging Face writes to the folder of a DatasetDict."""
_DATASET_STATE_FILE = "state.json"
"""File that Hugging Face writes to the folder of a Dataset. It lists the data files."""
_MAX_FILES_SHOWN = 20
"""Maximum number of files that a message lists, and of files that are opened to see if a folder has documents."""
_OPENING_THREADS = 16
"""Number of threads that open files. Opening a file on a parallel file system takes milliseconds."""


def find_inputs(data: DataConfig, formats: Mapping[str, str] | None = None) -> list[Input]:
    """Return all inputs of a config, in the order of `data.source`, and sorted by path within each item.

    If several items name the same file, it is listed once, at its first position.

    Args:
        data: the section `data` of the config.
        formats: allowed file name endings and their formats; None for the formats of documents.

    Raises UserError as `find_named_files` does. Also raises it if a file cannot be read, is not a regular file, or is a
    text that is too long for one document.
    """
    inputs: dict[str, Input] = {}
    for path, file_format in find_named_files(data, formats):
        with translate_read_errors(path):
            status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(
                "data.not_a_file", f"data.source: {path} is not a regular file but a pipe or device: leave it out"
            )
        if file_format == "text" and status.st_size > documents.MAX_DOCUMENT_BYTES:
            raise UserError(
                "data.too_large",
                f"data.source: {path} would be one document of {status.st_size:,} bytes, more than the limit of "
                f"{documents.MAX_DOCUMENT_BYTES:,}: set data.text_documents: line, or split it into files",
            )
        inputs.setdefault(path, Input(path, status.st_size, status.st_mtime_ns, file_format, stamp_index_files(path)))
    return list(inputs.values())


def stamp_file(path: str) -> list[str | int]:
    """Return path, size in bytes and modification time in nanoseconds of a file."""
    status = os.stat(path)
    return [path, status.st_size, status.st_mtime_ns]


def stamp_index_files(path: str) -> list[list[str | int]]:
    """Return path, size and modification time of each index file of a token file."""
    root, ending = os.path.splitext(path)
    candidates = [root + index_ending for index_ending in _INDEX_ENDINGS.get(ending, ())]
    return [stamp_file(candidate) for candidate in candidates if os.path.isfile(candidate)]


def find_named_files(data: DataConfig, formats: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield path and format of each file that a config names, sorted by path within each item of `data.source`.

    `data.format` or, without this key, the ending of the file name decides the format. If `data.format` is not set,
    files of documents are opened in these cases only:
    - The name has no known ending, and `data.source` names the file itself or has a glob that matches the file. The
      content then decides the format.
    - The name has no known ending, and `data.source` names a folder that contains the file. This case requires that no
      file with a known ending in this folder has documents. The content then decides the format.
    - A JSON, CSV or TSV file is in a folder that `data.source` names. The file may be metadata without documents.
      Therefore its first record must have the field of `data.text_field` or `data.records`.

    Args:
        data: the section `data` of the config.
        formats: allowed file name endings and their formats; None for the formats of documents.

    Raises UserError for an item without files and for files of unknown format. The message describes what the files
    seem to contain.
    """
    recognizer = _DocumentFiles(data) if formats is None else None
    for source in data.sources:
        if source == PYTHON_STDLIB:
            yield from ((path, "text") for path in _list_stdlib_files(sysconfig.get_path("stdlib")))
            continue
        pattern = os.path.expanduser(source)
        endings = recognizer.endings if recognizer else formats or {}
        if os.path.isdir(pattern):
            accepted, refused = _select_in_folder(pattern, recognizer, endings)
        else:
            matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
            paths = _make_absolute(path for path in matches if not os.path.isdir(path))
            accepted, refused = _select_matches(paths, recognizer, endings)
        if refused or not accepted:
            raise _make_no_files_error(source, pattern, refused, recognizer, endings)
        yield from sorted(accepted.items())


class _DocumentFiles:
    """Recognizes files that contain documents, by their names and contents."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        # Plain text may come from any kind of file (None), records only from files of JSON objects, tokens from none.
        allowed_kinds = {"text": None, "tokens": ()}.get(data.records, ("jsonl", "json"))
        self.endings = {
            ending: file_format
            for ending, file_format in ENDINGS.items()
            if allowed_kinds is None or FORMATS[file_format].kind in allowed_kinds
        }
        """Allowed file name endings and their formats."""
        self.kinds = {FORMATS[file_format].kind for file_format in self.endings.values()}
        """Kinds of these formats."""
        self.fields = _RECORD_FIELDS.get(data.records, (data.text_field,))

    def detect_by_name(self, path: str) -> str | None:
        """Return the format of a file by `data.format` or, without this key, by its name; None if it is unknown."""
        kind = self.data.format
        if kind is None:
            file_format = _find_format(path, self.endings)
        else:
            compression = next((ending for ending in COMPRESSIONS if path.endswith(ending)), "")
            compressed = compressed_format(kind, compression)
            file_format = compressed if compression and compressed in FORMATS else kind
        # With `text_documents: line`, the format of a text file is `lines` instead of `text`.
        if file_format and FORMATS[file_format].kind == "text" and self.data.text_documents == "line":
            return f"lines{file_format.removeprefix('text')}"
        return file_format

    def detect_by_content(self, path: str) -> str | None:
        """Return the format of a file by its content; None if it is not certain that the file contains documents."""
        file_type = detect_file_type(path)
        kind = _KINDS_BY_CONTENT.get(file_type.kind)
        if kind not in self.kinds:
            return None
        if file_type.compression is None or kind == "tar":  # The format `tar` includes compressed archives.
            return kind
        compressed = compressed_format(kind, COMPRESSION_ENDINGS[file_type.compression])
        return compressed if compressed in FORMATS else None

    def find_problem(self, path: str, file_format: str) -> str | None:
        """Return why the first record of a file of objects is no document; None if there is no problem."""
        kind = FORMATS[file_format].kind
        try:
            with translate_read_errors(path):
                records = read_objects(path, 0, os.path.getsize(path), kind, self.fields[0])
                first_result = next((record.result for record in records if record.result is not None), None)
            if isinstance(first_result, Exception):
                return str(first_result)
            if first_result is None:  # A CSV file is accepted even if it has only a header.
                return None if kind in ("csv", "tsv") else "it has no object"
            if not any(field in first_result for field in self.fields):
                get_field(first_result, self.fields[0])  # This raises RejectedError, except for a nested field `a.b`.
        except (UserError, RejectedError) as error:
            return str(error).removeprefix(f"{path}: ")
        return None


_RECORD_FIELDS = {"prompts": ("prompt",), "messages": ("messages", "conversations")}
"""For two values of `data.records`: an object must have at least one of these fields."""
_KINDS_BY_CONTENT = {"JSON Lines": "jsonl", "JSON": "json", "Parquet": "parquet", "Arrow": "arrow", "tar": "tar"}
"""For each `FileType.kind` that may contain documents: the kind of its format (see data_prep/documents.py)."""
Selection = tuple[dict[str, str], dict[str, str]]
"""The format of each accepted file by path, and the reason for each refused file by path (empty if unknown)."""


def _select_in_folder(folder: str, recognizer: _DocumentFiles | None, endings: Mapping[str, str]) -> Selection:
    """Select the files of a folder. If at least one file is accepted, the other files are ignored, not refused."""
    # `or ""` only satisfies the type checker, because each listed file has a format.
    if recognizer is None:  # The inputs are not documents, so only the names decide.
        return {path: _find_format(path, endings) or "" for path in _make_absolute(list_files(folder, endings))}, {}
    if recognizer.data.format is not None:  # Take the files with an ending of this format, or else all files.
        kind = recognizer.data.format
        kind_endings = [ending for ending, name in ENDINGS.items() if FORMATS[name].kind == kind]
        paths = _make_absolute(list_files(folder, kind_endings) or list_files(folder, [""]))
        return {path: recognizer.detect_by_name(path) or "" for path in paths}, {}
    formats = {
        path: recognizer.detect_by_name(path) or "" for path in _make_absolute(list_files(folder, recognizer.endings))
    }
    # A JSON, CSV or TSV file may be metadata without documents, so its first records are checked.
    uncertain_paths = [path for path, name in formats.items() if FORMATS[name].kind in ("json", "csv", "tsv")]
    problems = _map_files(lambda path: recognizer.find_problem(path, formats[path]), uncertain_paths)
    refused = {path: problem for path, problem in problems.items() if problem}
    if accepted := {path: name for path, name in formats.items() if path not in refused}:
        return accepted, {}
    # No file with a known ending has documents, so the contents of the other files decide. If none of the first of
    # these files has documents, the rest is not opened.
    other_paths = sorted({*_make_absolute(list_files(folder, [""]))} - {*formats})
    detected_formats = _map_files(recognizer.detect_by_content, other_paths[:_MAX_FILES_SHOWN])
    if any(detected_formats.values()):
        detected_formats |= _map_files(recognizer.detect_by_content, other_paths[_MAX_FILES_SHOWN:])
    accepted = {path: name for path, name in detected_formats.items() if name}
    return accepted, ({} if accepted else {path: refused.get(path, "") for path in sorted({*other_paths, *refused})})


def _select_matches(paths: Sequence[str], recognizer: _DocumentFiles | None, endings: Mapping[str, str]) -> Selection:
    """Select from the files that a glob matches. Every file of unknown format is refused."""
    formats: dict[str, str | None]
    if recognizer is None:
        formats = {path: _find_format(path, endings) for path in paths}
    else:
        formats = {path: recognizer.detect_by_name(path) for path in paths}
        unknown_paths = [path for path, name in formats.items() if name is None]
        # Files of MDS are refused. Their index.json has a known ending, but contains no documents.
        formats |= dict.fromkeys(filter(is_mds, paths))
        for path, name in _map_files(recognizer.detect_by_content, unknown_paths).items():
            # An empty file among others is accepted as a file without lines.
            is_empty = name is None and len(paths) > 1 and detect_file_type(path).kind == "empty"
            formats[path] = "jsonl" if is_empty else name
    accepted = {path: name for path, name in formats.items() if name}
    return accepted, {path: "" for path, name in formats.items() if not name}


def _make_absolute(paths: Iterable[str]) -> list[str]:
    """Return absolute paths, sorted."""
    return sorted(map(os.path.abspath, paths))


Result = TypeVar("Result")


def _map_files(function: Callable[[str], Result], paths: Sequence[str]) -> dict[str, Result]:
    """Return the result of `function` for each path. Several threads call the function, because it opens files."""
    if len(paths) < 2:
        return {path: function(path) for path in paths}
    with ThreadPoolExecutor(_OPENING_THREADS) as pool:
        return dict(zip(paths, pool.map(function, paths), strict=True))


def _find_format(path: str, endings: Mapping[str, str]) -> str | None:
    """Return the format of a file by the ending of its name; None if the name has none of the endings."""
    return next((file_format for ending, file_format in endings.items() if path.endswith(ending)), None)


def _make_no_files_error(
    source: str,
    pattern: str,
    refused: Mapping[str, str],
    recognizer: _DocumentFiles | None,
    endings: Mapping[str, str],
) -> UserError:
    """Return the error for an item of `data.source` that names no file, or names files of unknown format.

    Args:
        source: the item.
        pattern: the item as a path or glob, with `~` expanded.
        refused: the reason for each refused file by path (an empty reason if unknown); empty if there are no files.
        recognizer: recognizes files of documents; None if the inputs are not documents.
        endings: the allowed file name endings.
    """
    uncompressed = ", ".join(ending for ending in endings if not ending.endswith((*COMPRESSIONS,)))
    advice = f"name {uncompressed} files"
    folder = pattern
    if recognizer:
        advice += f" (also compressed: {', '.join(COMPRESSIONS)})"
    if recognizer and recognizer.data.records == "text":
        advice += f", or {PYTHON_STDLIB}"
    if refused:
        verb = "file has" if len(refused) == 1 else "files have"
        problem = f": {len(refused):,} {verb} no supported ending, or no documents; {advice}"
        title = "These files were found:"
    else:
        _check_permissions(source, pattern)
        problem = f" matches no file; {advice}"
        is_glob = glob.has_magic(pattern) and not os.path.isdir(pattern)
        is_folder = is_glob or os.path.isdir(pattern)
        folder = (_strip_glob(pattern) if is_folder else os.path.dirname(pattern)) or os.curdir
        if os.path.isdir(folder):
            paths = sorted(entry.path for entry in os.scandir(folder) if not entry.is_dir())
            refused = {path: "" for path in paths if not os.path.basename(path).startswith(".")}
            title = f"The folder {folder} has:" if refused else f"The folder {folder} has no files."
        else:
            title = f"There is no folder {folder}."
    lines = format_file_list(refused, folder)
    if recognizer and recognizer.data.records != "text":
        lines.append(f"data.records: {recognizer.data.records} needs files of JSON objects.")
    elif recognizer and any(line.endswith(": text") for line in lines):
        lines.append("To read files with other endings as text, set data.format: text.")
    return UserError("data.no_files", "\n".join([f"data.source: {source!r}{problem}", title, *lines]))


def format_file_list(files: Iterable[str] | Mapping[str, str], folder: str) -> list[str]:
    """Return the lines of a message that lists files, says what they seem to contain, and how to convert them.

    At most `_MAX_FILES_SHOWN` files are listed.

    Args:
        files: paths, or a mapping from paths to reasons why the files are not used.
        folder: folder to which the listed paths are relative. If it does not exist, paths are shown unchanged.
    """
    shown = sorted(files)[:_MAX_FILES_SHOWN]
    types = _map_files(detect_file_type, shown)
    reasons = files if isinstance(files, Mapping) else {}
    lines = []
    for path in shown:
        name = os.path.relpath(path, folder) if os.path.isdir(folder) else path
        lines.append(f"  {name}: {types[path]}" + (f": {reasons[path]}" if reasons.get(path) else ""))
    if (more := len([*files]) - len(shown)) > 0:
        lines.append(f"  … and {more:,} more")
    kinds = dict.fromkeys(file_type.kind for file_type in types.values() if file_type.kind in CONVERSIONS)
    return lines + [f"To convert {kind}: {CONVERSIONS[kind]}" for kind in kinds]


def _strip_glob(pattern: str) -> str:
    """Return the leading folders of a glob that contain no wildcards."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern


def _check_permissions(source: str, pattern: str) -> None:
    """Raise UserError if this user may not list the folder that an item of `data.source` names.

    A glob would silently match nothing in such a folder.

    Args:
        source: the item.
        pattern: the item as a path or glob. Only the part of a glob before the first wildcard is checked.
    """
    folder = _strip_glob(pattern) or os.curdir
    try:
        os.listdir(folder)
    except PermissionError as error:
        raise UserError(
            "data.permission_denied",
            f"data.source: {source!r}: {folder}: permission denied: check the owner and mode of the folders",
        ) from error
    except OSError:
        return  # The path does not exist, or is a file.


def list_files(folder: str, endings: Iterable[str]) -> list[str]:
    """Return the files with one of these endings in a folder and its subfolders.

    Symbolic links to folders are followed, but each folder is listed only once. Hidden files and folders are skipped.

    Raises UserError if a folder cannot be listed. Also raises it for the folder of a Hugging Face DatasetDict, because
    the splits of a dataset must not be mixed.
    """
    files: list[str] = []
    suffixes = (*endings,)
    pending_folders = [folder]
    visited_folders = set[str]()
    while pending_folders:  # `pending_folders` contains the folder itself, then the links to folders that are found.
        for current_folder, subfolders, names in os.walk(pending_folders.pop(0), onerror=_raise_list_error):
            real_path = os.path.realpath(current_folder)
            if real_path in visited_folders:
                subfolders.clear()
                continue
            visited_folders.add(real_path)
            if _DATASET_DICT_FILE in names:
                splits = ", ".join(os.path.join(current_folder, name) for name in sorted(subfolders))
                raise UserError(
                    "data.ambiguous_dataset",
                    f"{current_folder} is a DatasetDict of several splits, such as train and test: name one of them: "
                    f"{splits or 'a folder in it'}",
                )
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            pending_folders += filter(os.path.islink, (os.path.join(current_folder, name) for name in subfolders))
            names = _select_dataset_files(current_folder, names)
            matching_names = [name for name in names if name.endswith(suffixes) and not name.startswith(".")]
            files += [os.path.join(current_folder, name) for name in matching_names]
    return files


def _select_dataset_files(folder: str, names: list[str]) -> list[str]:
    """Return the names of files in a folder, without the caches that Hugging Face's `map` and `filter` leave there.

    If the folder has a `state.json` with a list of data files, only the names in this list are returned. Raises
    UserError if a listed file is missing.
    """
    state_file = os.path.join(folder, _DATASET_STATE_FILE)
    with translate_read_errors(state_file):
        state = read_json(state_file) if _DATASET_STATE_FILE in names else None
    entries = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(entries, list):
        return [name for name in names if not (name.startswith("cache-") and name.endswith(".arrow"))]
    listed_names = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    if missing_names := [name for name in listed_names if name not in names]:
        raise UserError(
            "data.missing_file",
            f"{state_file} lists {missing_names[0]!r}, which is not in its folder: restore the file, or save the "
            "dataset again",
        )
    return [name for name in names if name in listed_names]


def _raise_list_error(error: OSError) -> None:
    """Raise UserError with the name of a folder that cannot be listed, given the OSError from `os.walk`."""
    with translate_read_errors(error.filename):
        raise error


def _list_stdlib_files(root: str) -> list[str]:
    """Return the modules of Python's standard library in the folder `root`, sorted by relative path.

    Tests and other packages (`_NOT_STDLIB`) are left out.
    """
    paths = []
    for folder, subfolders, files in os.walk(root, onerror=_raise_list_error):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        paths += [os.path.relpath(os.path.join(folder, name), root) for name in files if name.endswith(".py")]
    if not paths:
        raise UserError("data.no_files", f"data.source: {PYTHON_STDLIB}: no .py file under {root}; name other files")
    return [os.path.join(root, path) for path in sorted(paths)]
