"""`data inspect|verify|import PATH…`: what token files are, whether they are whole, and a copy of them as shards.

A copy is a folder of HDF5 shards (data_prep/shard_writer.py) with an end-of-text token behind each document and its
`documents` index: `data.source: DIR` with `data.records: tokens` takes it. It is whole, or not there: until then it is
`.DIR.part`, with a line of notes for each file that is copied, so that the next call goes on behind these.
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

_LOCK, _NOTES = ".lock", "copied.jsonl"
_OURS = re.compile(r"tokens-\d{5,}-\d\d+\.h5|\.tokens-\d{5,}-\d\d+\.h5\.\d+\.[0-9a-f]{8}\.tmp|tmp[a-z0-9_]{8}")
"""Names of shards, of those that are being written (files.replace_atomically), and of temporary files (tempfile)."""
_NO_TOKENIZER = 1 << 32
_SHARD = 500_000_000  # tokens of a file, as data.shard_tokens has it


def run_data_command(
    action: str, paths: Sequence[str], to: str | None, tokenizer: str | None, eos: str, packed: bool
) -> None:
    """Do one of the three. Raises UserError; for `inspect` and `verify`, after all paths were looked at."""
    encoder = load_encoder(tokenizer, eos) if tokenizer else None
    if action != "import":
        _report(action, paths, encoder)
        return
    files = _unique(file for path in paths for file in _files(path))
    if to is None or encoder is None or tokenizer is None:
        raise UserError(
            "data.missing_option", "data import: say where to, --to DIR, and by what they were made, --tokenizer FILE"
        )
    import_tokens(files, Path(to).absolute(), encoder, sha256_file(tokenizer), packed)


def _report(action: str, paths: Sequence[str], encoder: Encoder | None) -> None:
    """Print what each file is, and at the end how many are usable. Raises UserError if some path or file is not."""
    files: list[str] = []
    bad = mapped = copied = 0
    for path in paths:
        try:
            files += _files(path)
        except UserError as error:
            bad += 1
            print(format_error(error))
    files = _unique(files)
    total = bad + len(files)
    for path in files:
        try:
            with translate_read_errors(path):
                file = inspect_token_file(path)
                told = _words(file) + (_read_words(file, encoder) if action == "verify" else "")
            print(told)
            mapped, copied = mapped + (not file.why_not), copied + bool(file.why_not)
        except UserError as error:
            bad += 1
            print(format_error(error))
    print(f"{total:,} in all: {mapped:,} can be used where they lie, {copied:,} to be copied, {bad:,} refused")
    if bad:
        raise UserError(
            "data.unusable_files", f"{bad} of {total} files {'or folders ' * (total > len(files))}will not do"
        )


def _files(path: str) -> list[str]:
    """A file, or all of a folder that may hold tokens. Raises UserError for what is not there, or a folder without."""
    if not os.path.isdir(path):
        if not os.path.lexists(path):
            raise UserError("data.missing_file", f"{path}: there is no such file or folder")
        return [str(Path(path).absolute())]
    found = sorted(map(os.path.abspath, list_files(path, TOKEN_ENDINGS)))
    if not found:
        rows = format_file_list(sorted(list_files(path, [""])), path)
        raise UserError(
            "data.no_files", "\n".join([f"{path}: no file in it ends with {', '.join(TOKEN_ENDINGS)}", *rows])
        )
    return found


def _unique(files: Iterable[str]) -> list[str]:
    """Each once, by the file that holds the tokens: of Megatron's two that is the .bin, whichever is named."""
    found: dict[str, str] = {}
    for path in files:
        index = path.endswith(".idx") and os.path.isfile(path)
        if (real := os.path.realpath(f"{path.removesuffix('.idx')}.bin" if index else path)) in found:
            print(f"{path}: left out, the same tokens as {found[real]}")
        found.setdefault(real, path)
    return [*found.values()]


def _words(file: TokenFile) -> str:
    """A file by its header and index."""
    count = "" if file.tokens is None else f"{file.tokens:,} "
    documents = "" if file.ends is None else f" in {len(file.ends):,} documents"
    how = f"to be copied ({file.why_not})" if file.why_not else f"can be used where they lie, from byte {file.offset}"
    return f"{file.path}: {file.format}, {count}{file.dtype} tokens{documents}; {how}{file.note}"


def _read_words(file: TokenFile, encoder: Encoder | None) -> str:
    """What reading all of it told."""
    seen = scan_tokens(file, encoder.eos_id if encoder else -1, encoder.vocab_size if encoder else _NO_TOKENIZER)
    ended = f", {seen.ended:,} end-of-text tokens, {seen.unended:,} documents without" if encoder else ""
    return f"; {seen.tokens:,} read, largest id {seen.largest}{ended}, sha256 {sha256_file(file.path)}"


def import_tokens(files: Sequence[str], to: Path, encoder: Encoder, tokenizer_sha256: str, packed: bool) -> None:
    """Write the tokens of `files` as shards in a new folder `to`; documents get their end-of-text token, where they
    have none and are not `packed`: rows that go on in the next. Files that were copied before an early end are kept.

    Raises UserError for a folder that exists, or is being made, for a working folder that others may have filled, and
    as `look` and `scan` do.
    """
    if os.path.lexists(to):
        raise UserError("data.folder_exists", f"--to {to}: it exists already: name a new folder")
    folder = to.with_name(f".{to.name}.part")
    to.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    with open_own_folder(folder) as held:
        _require_working_folder(held)
        with open(open_lock_file(held / _LOCK), "rb") as lock:
            if not try_flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB) or not _is_same(folder, held):
                raise UserError(
                    "data.import_running",
                    f"--to {to}: another import fills {folder}: wait for its end, or name another folder",
                )
            _check_content(held)
            words = f"{folder} will be {to} once it is whole; should this end before, the same command goes on"
            print(words, flush=True)
            made = _fill(held, files, encoder, tokenizer_sha256, packed)
            try:
                os.rename(folder, to)
            except OSError as error:
                raise UserError(
                    "data.import_failed", f"--to {to}: cannot rename {folder} to it: {error.strerror}"
                ) from error
            if not _is_same(to, held):
                raise UserError(
                    "data.import_replaced",
                    f"--to {to}: this is not what the import made: {folder} was replaced meanwhile",
                )
            apply_umask(held, read_umask())
            fsync(to.parent)
            for name in (_NOTES, _LOCK):  # not before: who is killed between would copy all again
                (held / name).unlink()
    tokens, documents = sum(one.tokens for one in made), sum(one.documents for one in made)
    print(f"{to}: {tokens:,} tokens in {documents:,} documents; of a config: data.source: {to}, data.records: tokens")
    print(f"what they are: {format_command('data', 'inspect', str(to))}")


def _is_same(path: Path, held: Path) -> bool:
    """Whether `path` itself, not followed, is the folder that `held` leads to."""
    try:
        return os.path.samestat(path.lstat(), held.stat())
    except FileNotFoundError:
        return False


def _require_working_folder(folder: Path) -> None:
    """Raise UserError if the folder holds something, but not the lock that an import makes first."""
    if not os.path.lexists(folder / _LOCK):
        for path in (*folder.iterdir(), *folder.glob(f"{SHARDS_DIR}/*")):
            if path != folder / SHARDS_DIR:
                raise _not_of_import(path)


def _check_content(folder: Path) -> None:
    """Raise UserError for what no import writes into its working folder: it would become data, or be deleted.

    Names that begin with a dot are never data.
    """
    shards = folder / SHARDS_DIR
    with suppress(FileExistsError):
        shards.mkdir(mode=0o700)
    check_own_folder(shards)
    for path in (*folder.iterdir(), *shards.iterdir()):
        is_ours = _is_own_shard(path) if path.parent == shards else path in (folder / _NOTES, shards)
        if not is_ours and not path.name.startswith("."):
            raise _not_of_import(path)


def _not_of_import(path: Path) -> UserError:
    return UserError("data.foreign_file", f"{path} was not written by an import: move it away, or choose another --to")


def _is_own_shard(path: Path) -> bool:
    """Whether this is an ordinary file of ours with a name that an import gives to shards and temporary files."""
    found = path.lstat()
    return bool(_OURS.fullmatch(path.name)) and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _fill(
    folder: Path, files: Sequence[str], encoder: Encoder, tokenizer_sha256: str, packed: bool
) -> list[ShardEntry]:
    """Copy what an earlier call did not copy, delete the shards that belong to none of `files`; return all shards."""
    kind, eos_id = np.dtype(encoder.dtype), np.array([encoder.eos_id], encoder.dtype)
    origin: dict[str, str | int] = {"format_version": FORMAT_VERSION, "tokenizer_sha256": tokenizer_sha256}
    notes, made = _read_notes(folder / _NOTES), list[ShardEntry]()
    for number, path in enumerate(files):
        source, prefix = origin | {"source": path[-1000:]}, f"tokens-{number:05d}"
        key = sha256_json([number, source, encoder.eos_id, packed, stamp_file(path), stamp_index_files(path)])
        entries, how = notes.get(key, []), "copied before"
        if not entries or not all(_is_whole(folder, entry, prefix) for entry in entries):
            writer, file = ShardWriter(folder, prefix, _SHARD, encoder.dtype, source), inspect_token_file(path)
            scan_tokens(file, encoder.eos_id, encoder.vocab_size)  # complains about ids that are none
            for document in file.documents(encoder.eos_id):
                if len(document):
                    ended = packed or document[-1] == encoder.eos_id
                    whole = document.astype(kind) if ended else np.concatenate([document.astype(kind), eos_id])
                    writer.add(whole, 0)
            entries, how = [*writer.close()], "copied"
            append_line(folder / _NOTES, json.dumps({"key": key, "shards": [one.model_dump() for one in entries]}))
        made += entries
        print(f"{path}: {how} ({number + 1} of {len(files)})", flush=True)
    for left_over in {*(folder / SHARDS_DIR).iterdir()} - {folder / one.file for one in made}:
        if _is_own_shard(left_over):
            left_over.unlink()
    return made


def _read_notes(path: Path) -> dict[str, list[ShardEntry]]:
    """Return the shards of each file that an earlier call copied, by the key of the file; make the notes if missing.

    Raises UserError if others may have written them.
    """
    with suppress(FileExistsError):
        path.touch(mode=0o600, exist_ok=False)
    notes: dict[str, list[ShardEntry]] = {}
    with open_own_file(path) as file:
        for line in map(parse_json_or_none, file):
            with suppress(TypeError, KeyError, ValueError):  # a line that a crash tore
                notes[line["key"]] = [ShardEntry(**one) for one in line["shards"]]
    return notes


def _is_whole(folder: Path, entry: ShardEntry, prefix: str) -> bool:
    """Whether a shard that the notes name is there, is one of ours, and has its size and hash."""
    path = folder / entry.file
    is_named_so = re.fullmatch(rf"{SHARDS_DIR}/{prefix}-\d+\.h5", entry.file) is not None
    return is_named_so and path.exists() and _is_own_shard(path) and entry.find_problem(path) is None
