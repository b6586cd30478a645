"""The commands `data inspect|verify|import PATH…`: describe token files, check them, and copy their tokens into shards.

`import` creates a folder of HDF5 shards (data_prep/shard_writer.py) with an end-of-text token after each document and
an index `documents`. A run uses the folder with `data.source: DIR` and `data.records: tokens`. `import` works in the
folder `.DIR.part` and renames it when it is complete. A file in this folder records which token files have been copied,
so that a repeated command does not copy them again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from data_prep.find_inputs import format_file_list, list_files, stamp_file, stamp_index_files
from data_prep.shard_writer import ShardWriter
from data_prep.token_files import TokenFile, inspect_token_file, scan_tokens
from data_prep.tokenizer import Encoder, load_encoder
from data_prep.tokens_folder import TOKEN_ENDINGS
from pipeline.base.command import format_command
from pipeline.base.errors import UserError, format_error
from pipeline.base.files import (
    append_line,
    fsync,
    open_lock_file,
    parse_json_or_none,
    sha256_file,
    sha256_json,
    translate_read_errors,
    try_flock,
)
from pipeline.base.ownership import apply_umask, check_own_folder, open_own_file, open_own_folder, read_umask
from pipeline.data.manifest import FORMAT_VERSION, SHARDS_DIR, ShardEntry

_LOCK = ".lock"
_NOTES = "copied.jsonl"
"""File in the working folder with a line for each token file that has been copied: its key and its shards."""
_OUR_FILE_NAMES = re.compile(
    r"tokens-\d{5,}-\d\d+\.h5|\.tokens-\d{5,}-\d\d+\.h5\.\d+\.[0-9a-f]{8}\.tmp|tmp[a-z0-9_]{8}"
)
"""Names of shards, of incomplete shards (files.replace_atomically), and of temporary files (tempfile)."""
_MAX_VOCAB_SIZE = 1 << 32
"""Size of the vocabulary if no tokenizer is given. All token ids of 32 bits are then valid."""
_SHARD_TOKENS = 500_000_000
"""Maximum number of tokens per shard, which is also the default of data.shard_tokens."""


def run_data_command(
    action: str, paths: Sequence[str], to: str | None, tokenizer: str | None, eos: str, packed: bool
) -> None:
    """Run `inspect`, `verify` or `import`.

    Args:
        action: name of the command.
        paths: token files, or folders of them.
        to: the new folder for `import`; None for other commands.
        tokenizer: path of the `tokenizer.json`; None if the option is not given.
        eos: text of the end-of-text token.
        packed: for `import`, whether documents can continue in the next row of a file.

    Raises UserError if a path cannot be used. `inspect` and `verify` examine all paths before they raise it.
    """
    encoder = load_encoder(tokenizer, eos) if tokenizer else None
    if action != "import":
        _print_report(action, paths, encoder)
        return
    files = _remove_repeated(file for path in paths for file in _list_token_files(path))
    if to is None or encoder is None or tokenizer is None:
        raise UserError(
            "data.missing_option",
            "data import: --to DIR (the new folder) and --tokenizer FILE (the tokenizer of the tokens) are required",
        )
    import_tokens(files, Path(to).absolute(), encoder, sha256_file(tokenizer), packed)


def _print_report(action: str, paths: Sequence[str], encoder: Encoder | None) -> None:
    """Print a description of each token file, then the numbers of usable and unusable files.

    Raises UserError at the end if a path cannot be used.
    """
    files: list[str] = []
    unusable = mappable = to_copy = 0
    for path in paths:
        try:
            files += _list_token_files(path)
        except UserError as error:
            unusable += 1
            print(format_error(error))
    files = _remove_repeated(files)
    total = unusable + len(files)
    for path in files:
        try:
            with translate_read_errors(path):
                file = inspect_token_file(path)
                description = _describe_file(file) + (_describe_content(file, encoder) if action == "verify" else "")
            print(description)
            if file.unmappable_reason:
                to_copy += 1
            else:
                mappable += 1
        except UserError as error:
            unusable += 1
            print(format_error(error))
    print(f"{total:,} in total: {mappable:,} usable in place, {to_copy:,} must be copied, {unusable:,} unusable")
    if unusable:
        folders = "or folders " * (total > len(files))
        raise UserError("data.unusable_files", f"{unusable} of {total} files {folders}cannot be used, see above")


def _list_token_files(path: str) -> list[str]:
    """Return the absolute path of a file, or the paths of all files in a folder with an ending of `TOKEN_ENDINGS`.

    Raises UserError if the path does not exist or the folder has no such files.
    """
    if not os.path.isdir(path):
        if not os.path.lexists(path):
            raise UserError("data.missing_file", f"{path}: there is no such file or folder")
        return [str(Path(path).absolute())]
    files = sorted(map(os.path.abspath, list_files(path, TOKEN_ENDINGS)))
    if not files:
        lines = format_file_list(sorted(list_files(path, [""])), path)
        raise UserError(
            "data.no_files", "\n".join([f"{path}: no file in it ends with {', '.join(TOKEN_ENDINGS)}", *lines])
        )
    return files


def _remove_repeated(files: Iterable[str]) -> list[str]:
    """Return each token file once, and print which repeated files are left out.

    Megatron's index (.idx) is treated as the .bin file beside it.
    """
    by_real_path: dict[str, str] = {}
    for path in files:
        is_index = path.endswith(".idx") and os.path.isfile(path)
        real_path = os.path.realpath(f"{path.removesuffix('.idx')}.bin" if is_index else path)
        if real_path in by_real_path:
            print(f"{path}: left out, the same tokens as {by_real_path[real_path]}")
        by_real_path.setdefault(real_path, path)
    return [*by_real_path.values()]


def _describe_file(file: TokenFile) -> str:
    """Return a description of a token file, based on its header and index."""
    count = "" if file.tokens is None else f"{file.tokens:,} "
    documents = "" if file.document_ends is None else f" in {len(file.document_ends):,} documents"
    reason = file.unmappable_reason
    usage = f"must be copied ({reason})" if reason else f"usable in place, from byte {file.offset}"
    return f"{file.path}: {file.format}, {count}{file.dtype} tokens{documents}; {usage}{file.note}"


def _describe_content(file: TokenFile, encoder: Encoder | None) -> str:
    """Read a whole token file and return a description of its tokens, with its SHA-256."""
    eos_id = encoder.eos_id if encoder else -1  # No token has the id -1.
    vocab_size = encoder.vocab_size if encoder else _MAX_VOCAB_SIZE
    statistics = scan_tokens(file, eos_id, vocab_size)
    ends = ""
    if encoder:
        ends = f", {statistics.eos_tokens:,} end-of-text tokens, {statistics.unended_documents:,} documents without"
    digest = sha256_file(file.path)
    return f"; {statistics.tokens:,} read, largest id {statistics.max_id}{ends}, sha256 {digest}"


def import_tokens(files: Sequence[str], to: Path, encoder: Encoder, tokenizer_sha256: str, packed: bool) -> None:
    """Write the tokens of `files` as shards in a new folder `to`.

    If an earlier call with the same arguments was interrupted, the shards that it completed are kept.

    Args:
        files: paths of token files.
        to: the new folder.
        encoder: encoder with the end-of-text token, the size of the vocabulary and the element type of the shards.
        tokenizer_sha256: hash of the tokenizer file. Each shard contains this hash as an attribute.
        packed: whether a document can continue in the next row of a file. Otherwise each document that does not end
            with an end-of-text token gets one.

    Raises UserError in these cases:
    - `to` exists, or another process is building it.
    - The working folder may contain files of other programs or users.
    - A file is damaged.
    """
    if os.path.lexists(to):
        raise UserError("data.folder_exists", f"--to {to}: it exists already: name a new folder")
    folder = to.with_name(f".{to.name}.part")
    to.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # `opened` is a path to the open folder, even if another folder is moved to `folder`.
    with open_own_folder(folder) as opened:
        _require_working_folder(opened)
        with open(open_lock_file(opened / _LOCK), "rb") as lock:
            if not try_flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB) or not _is_same_folder(folder, opened):
                raise UserError(
                    "data.import_running",
                    f"--to {to}: another import is writing to {folder}: wait until it ends, or name another folder",
                )
            _check_content(opened)
            print(
                f"{folder} becomes {to} when it is complete; if this is interrupted, the same command continues",
                flush=True,
            )
            shards = _copy_files(opened, files, encoder, tokenizer_sha256, packed)
            try:
                os.rename(folder, to)
            except OSError as error:
                raise UserError(
                    "data.import_failed", f"--to {to}: cannot rename {folder} to it: {error.strerror}"
                ) from error
            if not _is_same_folder(to, opened):
                raise UserError(
                    "data.import_replaced",
                    f"--to {to}: this is not the folder that the import wrote: {folder} was replaced meanwhile",
                )
            apply_umask(opened, read_umask())
            fsync(to.parent)
            # These files are deleted last, because they are needed again if the import is killed earlier.
            for name in (_NOTES, _LOCK):
                (opened / name).unlink()
    tokens = sum(shard.tokens for shard in shards)
    documents = sum(shard.documents for shard in shards)
    print(f"{to}: {tokens:,} tokens in {documents:,} documents; in a config: data.source: {to}, data.records: tokens")
    print(f"to describe its files: {format_command('data', 'inspect', str(to))}")


def _is_same_folder(path: Path, opened: Path) -> bool:
    """Return True if `path` is the folder that is open as `opened`. A symbolic link to the folder is not accepted."""
    try:
        return os.path.samestat(path.lstat(), opened.stat())
    except FileNotFoundError:
        return False


def _require_working_folder(folder: Path) -> None:
    """Raise UserError if the folder has content but not the lock file that an import creates first."""
    if not os.path.lexists(folder / _LOCK):
        for path in (*folder.iterdir(), *folder.glob(f"{SHARDS_DIR}/*")):
            if path != folder / SHARDS_DIR:
                raise _foreign_file_error(path)


def _check_content(folder: Path) -> None:
    """Raise UserError if the working folder has a file that no import writes, because it could be mistaken for data.

    Files with a name that begins with a dot are accepted, because they are never read as data. This function also
    creates the folder of shards.
    """
    shards = folder / SHARDS_DIR
    with suppress(FileExistsError):
        shards.mkdir(mode=0o700)
    check_own_folder(shards)
    for path in (*folder.iterdir(), *shards.iterdir()):
        is_ours = _is_own_shard(path) if path.parent == shards else path in (folder / _NOTES, shards)
        if not is_ours and not path.name.startswith("."):
            raise _foreign_file_error(path)


def _foreign_file_error(path: Path) -> UserError:
    """Return the error for a file in the working folder that no import has written."""
    return UserError("data.foreign_file", f"{path} was not written by an import: move it away, or choose another --to")


def _is_own_shard(path: Path) -> bool:
    """Return True if `path` is a regular file of this user with a name that an import gives to its files."""
    status = path.lstat()
    is_own_name = _OUR_FILE_NAMES.fullmatch(path.name) is not None
    return is_own_name and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _copy_files(
    folder: Path, files: Sequence[str], encoder: Encoder, tokenizer_sha256: str, packed: bool
) -> list[ShardEntry]:
    """Copy the tokens of the files that an earlier call did not copy, and return the shards of all files.

    Shards that belong to none of `files` are deleted. The arguments are those of `import_tokens`; `folder` is the
    working folder.
    """
    dtype = np.dtype(encoder.dtype)
    eos = np.array([encoder.eos_id], encoder.dtype)
    attributes: dict[str, str | int] = {"format_version": FORMAT_VERSION, "tokenizer_sha256": tokenizer_sha256}
    shards_by_key = _read_notes(folder / _NOTES)
    shards = list[ShardEntry]()
    for number, path in enumerate(files):
        file_attributes = attributes | {"source": path[-1000:]}  # HDF5 allows 64 KB of attributes.
        prefix = f"tokens-{number:05d}"
        key = sha256_json([number, file_attributes, encoder.eos_id, packed, stamp_file(path), stamp_index_files(path)])
        entries = shards_by_key.get(key, [])
        result = "copied before"
        if not entries or not all(_is_intact_shard(folder, entry, prefix) for entry in entries):
            writer = ShardWriter(folder, prefix, _SHARD_TOKENS, encoder.dtype, file_attributes)
            file = inspect_token_file(path)
            scan_tokens(file, encoder.eos_id, encoder.vocab_size)  # This checks that all ids are in the vocabulary.
            for document in file.iterate_documents(encoder.eos_id):
                if len(document):
                    tokens = document.astype(dtype)
                    if not packed and document[-1] != encoder.eos_id:
                        tokens = np.concatenate([tokens, eos])
                    writer.add(tokens, text_bytes=0)  # The text is unknown.
            entries = [*writer.close()]
            result = "copied"
            append_line(folder / _NOTES, json.dumps({"key": key, "shards": [entry.model_dump() for entry in entries]}))
        shards += entries
        print(f"{path}: {result} ({number + 1} of {len(files)})", flush=True)
    for leftover in {*(folder / SHARDS_DIR).iterdir()} - {folder / shard.file for shard in shards}:
        if _is_own_shard(leftover):
            leftover.unlink()
    return shards


def _read_notes(path: Path) -> dict[str, list[ShardEntry]]:
    """Return the shards of each token file that an earlier call copied, by the key of the token file.

    If the file `path` does not exist, create it. Raises UserError if another user may have written it.
    """
    with suppress(FileExistsError):
        path.touch(mode=0o600, exist_ok=False)
    shards_by_key: dict[str, list[ShardEntry]] = {}
    with open_own_file(path) as file:
        for line in map(parse_json_or_none, file):
            with suppress(TypeError, KeyError, ValueError):  # The line was not written completely.
                shards_by_key[line["key"]] = [ShardEntry(**entry) for entry in line["shards"]]
    return shards_by_key


def _is_intact_shard(folder: Path, entry: ShardEntry, prefix: str) -> bool:
    """Return True if the shard of an entry in the notes exists, was written by an import, and has the right hash."""
    path = folder / entry.file
    has_shard_name = re.fullmatch(rf"{SHARDS_DIR}/{prefix}-\d+\.h5", entry.file) is not None
    return has_shard_name and path.exists() and _is_own_shard(path) and entry.find_problem(path) is None
