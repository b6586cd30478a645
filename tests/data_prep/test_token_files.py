"""Tokens that exist already: each format written here as its makers do, read again, damaged, used where it lies."""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
import random
import re
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import tokens_commands
from data_prep.mixture_folder import MixtureFolder
from data_prep.text_folder import TextFolder
from data_prep.token_files import NANO_GPT, DocumentEnds, TokenFile, inspect_token_file, scan_tokens
from data_prep.tokenizer import load_encoder, train_bpe
from data_prep.tokens_commands import run_data_command
from data_prep.tokens_folder import TokensFolder
from pipeline.base.errors import InputError, UserError
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.data.manifest import ShardEntry, load_manifest
from pipeline.data.samples import map_arrays
from tests.support.requirements import skip_or_fail_in_ci
from tests.support.tokenizers import add_post_processor, make_byte_tokenizer, save_tokenizer

NOBODY = 65534
EOS = 0
VOCAB = 300
Documents = list[list[int]]
TEXTS = ["the model", "a step, then another one", "loss", "éü 漢字 😀", "shard after shard " * 9]


def flat(documents: Documents) -> list[int]:
    return [token for one in documents for token in one]


def megatron(folder: Path, documents: Documents, kind: str = "uint16") -> Path:
    codes = {"int32": 4, "uint16": 8, "int64": 5}
    path, lengths = folder / "m.bin", [len(one) for one in documents]
    path.write_bytes(np.array(flat(documents), kind).tobytes())
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1] * np.dtype(kind).itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, codes[kind], len(lengths), len(lengths) + 1)
    borders = np.arange(len(lengths) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(
        head + np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes() + borders.tobytes()
    )
    return path


def llm_c(folder: Path, documents: Documents) -> Path:
    tokens = np.array(flat(documents), "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    (path := folder / "l.bin").write_bytes(header.tobytes() + tokens.tobytes())
    return path


def nano_gpt(folder: Path, documents: Documents) -> Path:
    np.array(flat(documents), "<u2").tofile(path := folder / "n.bin")
    return path


def datatrove(folder: Path, documents: Documents) -> Path:
    tokens = np.array(flat(documents), "<u4")
    (path := folder / "d.ds").write_bytes(tokens.tobytes())
    ends = np.cumsum([len(one) for one in documents])
    (folder / "d.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends.tolist()))
    (folder / "d.ds.metadata").write_text(f"gpt2|4\n{len(tokens)}\n{len(tokens)} T")
    return path


def hdf5(folder: Path, documents: Documents, **how: object) -> Path:
    with h5py.File(path := folder / "h.h5", "w") as file:
        file.create_dataset("tokens", data=np.array(flat(documents), "<u2"), **how)
    return path


def hdf5_compressed(folder: Path, documents: Documents) -> Path:
    return hdf5(folder, documents, chunks=(min(16, len(flat(documents))),), compression="gzip", shuffle=True)


def arrow(folder: Path, documents: Documents) -> Path:
    table = pyarrow.table({"input_ids": pyarrow.array(documents, pyarrow.list_(pyarrow.int32()))})
    with pyarrow.ipc.new_stream(str(path := folder / "a.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    return path


def web_tar(folder: Path, documents: Documents) -> Path:
    with tarfile.open(path := folder / "w.tar", "w") as tar:
        for number, one in enumerate(documents):
            content = io.BytesIO()
            np.save(content, np.array(one, "<i8"))
            for name, data in ((f"{number:04}.npy", content.getvalue()), (f"{number:04}.json", b"{}")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


Writer = Callable[[Path, Documents], Path]
MAPPED: list[Writer] = [megatron, llm_c, nano_gpt, datatrove, hdf5]
WRITERS: list[Writer] = [*MAPPED, hdf5_compressed, arrow, web_tar]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (path := tmp_path / "tokenizer.json").write_text(train_bpe(TEXTS * 20, VOCAB, "<|endoftext|>"))
    return path


def encoded(tokenizer: Path, count: int = 60) -> Documents:
    encoder = load_encoder(tokenizer, "<|endoftext|>")
    return [one.tolist() for one in encoder.encode([f"{TEXTS[i % 5]} {i}" for i in range(count)])]


def config(source: object, tokenizer: Path, **more: object) -> DataConfig:
    kind = TokenizerConfig(kind="file", path=tokenizer)
    return DataConfig.model_validate(
        {"source": source, "records": "tokens", "tokenizer": kind, "held_out": 0.2, **more}
    )


@pytest.mark.parametrize(
    ("adds", "files", "expected", "warned"),
    [
        ("auto", (True, True), True, False),
        ("auto", (False, False), False, False),
        ("auto", (True, False), False, True),
        (True, (False, False), True, True),
        (False, (True, True), False, False),
    ],
)
def test_tokens_say_whether_documents_begin_with_a_special_token(
    tmp_path: Path, adds: object, files: tuple[bool, bool], expected: bool, warned: bool
) -> None:
    tokenizer = save_tokenizer(tmp_path, add_post_processor(make_byte_tokenizer("a text"), "mistral"))
    for number, begin in enumerate(files):
        encoder = load_encoder(tokenizer, "<|end|>", begin)
        (tmp_path / str(number)).mkdir()
        megatron(tmp_path / str(number), [one.tolist() for one in encoder.encode([f"text {i}" for i in range(60)])])
    said: list[str] = []
    data = config(str(tmp_path / "[01]/*.bin"), tokenizer, add_special_tokens=adds)
    data = data.model_copy(update={"tokenizer": data.tokenizer.model_copy(update={"eos_token": "<|end|>"})})
    folder = TokensFolder(data, tmp_path / "data")
    folder.prepare(said.append)
    assert bool(folder.prepared.bos_ids) is expected
    assert any("data.add_special_tokens" in line for line in said) is warned


def sharded(data: DataConfig, folder: Path, kind: type[TextFolder] = TokensFolder) -> None:
    made = kind(data, folder)
    made.prepare(lambda _: None)
    for task in (1, 0):
        kind(data, folder).shard(task, 2, lambda _: None)
    assert kind(data, folder).finalize(lambda _: None)


def tokens_of(folder: Path, entries: tuple[ShardEntry, ...]) -> list[int]:
    return [token for entry in entries for token in map_arrays(entry, folder / entry.file)["tokens"].tolist()]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, VOCAB - 1), max_size=40), min_size=1, max_size=12))
@pytest.mark.parametrize("write", WRITERS)
def test_each_format_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, write: Writer, bodies: Documents
) -> None:
    documents = [[*one, EOS] for one in bodies]
    file = inspect_token_file(str(write(tmp_path_factory.mktemp("one"), documents)))
    assert [one.tolist() for one in file.documents(EOS)] == documents
    assert np.concatenate(list(file.blocks())).tolist() == flat(documents)
    seen = scan_tokens(file, EOS, VOCAB)
    assert (seen.tokens, seen.ended, seen.unended) == (len(flat(documents)), len(documents), 0)
    assert seen.largest == max(flat(documents))
    assert (file.why_not is None) is (write in MAPPED)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_documents_do_not_depend_on_blocks(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.token_files.BLOCK", size)
    documents = [[5, 6, 7, EOS], [EOS], [], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, EOS], [4, 4]]
    file = inspect_token_file(str(megatron(tmp_path, documents)))
    assert [one.tolist() for one in file.documents(EOS)] == documents
    ends = np.cumsum([len(one) for one in documents]).tolist()
    assert file.ends is not None and list(file.ends.ends(0, len(documents))) == ends
    for start, stop in ((0, 5), (4, 6), (5, 5), (3, 18)):
        inside = file.part(start, stop).ends_in(0, stop - start)
        assert inside is not None and inside.tolist() == [end - start for end in ends if start < end <= stop]
    assert scan_tokens(file, EOS, VOCAB).unended == 2  # [9] and [4, 4]; an empty one ends nothing
    bare = inspect_token_file(str(nano_gpt(tmp_path, documents)))
    assert [len(one) for one in bare.documents(EOS)] == [4, 1, 12, 2]


@pytest.mark.parametrize("write", MAPPED)
def test_a_run_takes_them_where_they_lie(write: Writer, tokenizer: Path, tmp_path: Path) -> None:
    documents = encoded(tokenizer)
    path = write(tmp_path, documents)
    before = path.read_bytes()
    sharded(config(str(path), tokenizer), folder := tmp_path / "data")
    manifest = load_manifest(folder)
    everything = flat(documents)
    train, held_out = (tokens_of(folder, entries) for entries in (manifest.train, manifest.held_out))
    assert train + held_out == everything and train[-1] == EOS
    assert abs(len(held_out) - 0.2 * len(everything)) <= max(map(len, documents)) / 2 + 1
    assert (manifest.documents, manifest.held_out_documents) == (60, held_out.count(EOS))
    texts = [f"{TEXTS[i % 5]} {i}" for i in range(60)][-manifest.held_out_documents :]
    assert manifest.held_out_bytes == sum(len(text.encode()) for text in texts)
    assert {entry.file for entry in manifest.train} == {str(path)} and path.read_bytes() == before
    assert not list((folder / "shards").glob("*.h5")), "nothing was copied"
    path.write_bytes(before[:-2])
    assert "put the file back" in (TokensFolder(config(str(path), tokenizer), folder).find_shard_problem() or "")


@pytest.mark.parametrize("write", WRITERS)
def test_a_copy_holds_the_same_documents_and_a_run_takes_it(write: Writer, tokenizer: Path, tmp_path: Path) -> None:
    documents = encoded(tokenizer)
    given_ = [one[:-1] for one in documents] if write in (megatron, datatrove, arrow, web_tar) else documents
    (tmp_path / "in").mkdir()
    path = write(tmp_path / "in", given_)
    run_data_command("import", [str(path)], str(tmp_path / "copy"), str(tokenizer), "<|endoftext|>", packed=False)
    with h5py.File(tmp_path / "copy/shards/tokens-00000-00.h5") as file:
        assert file["tokens"][:].tolist() == flat(documents)
        assert file["documents"][:].tolist() == [0, *np.cumsum([len(one) for one in documents]).tolist()]
    sharded(config(str(tmp_path / "copy"), tokenizer), folder := tmp_path / "data")
    manifest = load_manifest(folder)
    assert tokens_of(folder, manifest.train) + tokens_of(folder, manifest.held_out) == flat(documents)
    with pytest.raises(UserError, match="exists already"):
        run_data_command("import", [str(path)], str(tmp_path / "copy"), str(tokenizer), "<|endoftext|>", packed=False)


def test_an_import_that_ended_early_goes_on_and_says_so(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.tokens_commands._SHARD", 100)
    (tmp_path / "in").mkdir()
    documents = encoded(tokenizer)
    paths = [tmp_path / "in" / name for name in ("a.bin", "b.bin", "c.bin")]
    for number, path in enumerate(paths):
        nano_gpt(tmp_path, documents[20 * number : 20 * (number + 1)]).rename(path)

    def said() -> list[Any]:
        return re.findall(r"/(\w)\.bin: (copied[ a-z]*) \(", capsys.readouterr().out)

    def copied(to: str) -> list[Any]:
        run_data_command("import", [*map(str, paths)], str(tmp_path / to), str(tokenizer), "<|endoftext|>", False)
        return said()

    def files(to: str) -> dict[str, bytes]:
        return {str(one.relative_to(tmp_path / to)): one.read_bytes() for one in (tmp_path / to).rglob("*.h5")}

    assert copied("whole") == [("a", "copied"), ("b", "copied"), ("c", "copied")] and len(files("whole")) > 6
    whole = paths[2].read_bytes()
    paths[2].write_bytes(struct.pack("<2H", VOCAB, EOS))
    part = tmp_path / ".to.part"
    with pytest.raises(UserError, match=f"token 0 is {VOCAB}"):
        copied("to")
    assert f"{part} will be {tmp_path}/to once it is whole; should this end before, the same" in capsys.readouterr().out
    assert part.is_dir() and not (tmp_path / "to").exists()
    with open(part / ".lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another import fills .*\.to\.part: wait for its end, or name another"):
            copied("to")
    with pytest.raises(UserError):  # files that changed, or are at another place, are copied again
        os.utime(paths[0], (0, 0))
        copied("to")
    assert said() == [("a", "copied"), ("b", "copied before")]
    (part / "shards/tokens-00001-00.h5").write_bytes(b"")
    (part / "shards/tokens-00009-00.h5").write_bytes(b"of a file that was left out")
    paths[2].write_bytes(whole)
    assert copied("to") == [("a", "copied before"), ("b", "copied"), ("c", "copied")]
    assert files("to") == files("whole") and not part.exists()
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["shards"]


def import_one(folder: Path, tokenizer: Path) -> None:
    """Import a file of tokens into `folder/to`."""
    nano_gpt(folder, encoded(tokenizer))
    run_data_command("import", [str(folder / "n.bin")], str(folder / "to"), str(tokenizer), "<|endoftext|>", False)


def make_foreign(path: Path) -> None:
    if os.geteuid() != 0:
        skip_or_fail_in_ci("giving a file to another user needs root")
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def is_link(part: Path, thesis: Path) -> None:
    part.rmdir()
    part.symlink_to(thesis)


def links_to_thesis(part: Path, thesis: Path) -> None:
    (part / ".lock").touch()
    (part / "shards").symlink_to(thesis / "shards")


def is_foreign(part: Path, thesis: Path) -> None:
    (part / "shards").mkdir()
    make_foreign(part)


def shards_are_foreign(part: Path, thesis: Path) -> None:
    (part / ".lock").touch()
    (part / "shards").mkdir()
    make_foreign(part / "shards")


def others_may_write(part: Path, thesis: Path) -> None:
    part.chmod(0o770)


def others_may_write_shards(part: Path, thesis: Path) -> None:
    (part / ".lock").touch()
    (part / "shards").mkdir()
    (part / "shards").chmod(0o757)


def others_may_write_notes(part: Path, thesis: Path) -> None:
    (part / ".lock").touch()
    (part / "copied.jsonl").touch()
    (part / "copied.jsonl").chmod(0o666)


def notes_are_foreign(part: Path, thesis: Path) -> None:
    (part / ".lock").touch()
    (part / "copied.jsonl").touch()
    make_foreign(part / "copied.jsonl")


def notes_are_a_link(part: Path, thesis: Path) -> None:
    (part / ".lock").touch()
    (part / "copied.jsonl").symlink_to(thesis / "notes.txt")


def holds_my_work(part: Path, thesis: Path) -> None:
    (part / "shards").mkdir()
    (part / "shards/tokens-00000-00.h5").write_text("mine")


def working_folder_holds_my_file(part: Path, thesis: Path) -> None:
    (part / ".lock").touch()
    (part / "shards").mkdir()
    (part / "shards/chapter1.h5").write_text("mine")


def working_folder_holds_my_folder(part: Path, thesis: Path) -> None:
    (part / ".lock").touch()
    (part / "shards/tokens-00000-00.h5").mkdir(parents=True)
    (part / "shards/tokens-00000-00.h5/chapter").write_text("mine")


@pytest.mark.parametrize(
    "arrange",
    [
        is_link, links_to_thesis, is_foreign, shards_are_foreign, others_may_write, others_may_write_shards,
        others_may_write_notes, notes_are_foreign, notes_are_a_link, holds_my_work, working_folder_holds_my_file,
        working_folder_holds_my_folder,
    ],
)  # fmt: skip
def test_an_import_uses_no_folder_that_others_could_have_filled_and_deletes_nothing(
    arrange: Callable[[Path, Path], None], tokenizer: Path, tmp_path: Path
) -> None:
    (thesis := tmp_path / "thesis/shards").mkdir(parents=True)
    for name in ("tokens-00000-00.h5", "tokens-00009-00.h5", "chapter.tex", "../notes.txt"):
        (thesis / name).write_text("mine")
    (part := tmp_path / ".to.part").mkdir(mode=0o700)
    arrange(part, thesis.parent)
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(UserError, match=re.escape(str(part))) as error:
            import_one(tmp_path, tokenizer)
        assert "/proc/" not in str(error.value)
        assert {path: path.read_text() for path in before} == before
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("moment", ["before the first shard", "before the left-overs are deleted"])
def test_an_import_whose_folder_is_replaced_meanwhile_writes_and_deletes_nothing_elsewhere(
    moment: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (thesis := tmp_path / "thesis/shards").mkdir(parents=True)
    for name in ("tokens-00000-00.h5", "tokens-00009-00.h5", "chapter.tex"):
        (thesis / name).write_text("mine")

    def replaced(*arguments: Any) -> Any:
        if not (tmp_path / "moved").exists():
            (tmp_path / ".to.part").rename(tmp_path / "moved")
            (tmp_path / ".to.part").symlink_to(thesis.parent)
        return original(*arguments)

    name = "inspect_token_file" if moment == "before the first shard" else "append_line"
    original = getattr(tokens_commands, name)
    monkeypatch.setattr(tokens_commands, name, replaced)
    with pytest.raises(UserError, match=r"/to: .*replaced"):
        import_one(tmp_path, tokenizer)
    assert {path.name: path.read_text() for path in thesis.iterdir()} == dict.fromkeys(
        ("tokens-00000-00.h5", "tokens-00009-00.h5", "chapter.tex"), "mine"
    )


def test_notes_count_only_if_their_shards_hash_right(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.bin").write_bytes(struct.pack("<2H", VOCAB, EOS))
    nano_gpt(tmp_path, documents := encoded(tokenizer))
    files = [str(tmp_path / "n.bin"), str(tmp_path / "b.bin")]

    def import_both() -> str:
        run_data_command("import", files, str(tmp_path / "to"), str(tokenizer), "<|endoftext|>", False)
        return capsys.readouterr().out

    with pytest.raises(UserError, match=f"token 0 is {VOCAB}"):
        import_both()
    notes = tmp_path / ".to.part/copied.jsonl"
    shard = tmp_path / ".to.part/shards/tokens-00000-00.h5"
    shard.write_bytes(shard.read_bytes()[::-1])  # the size stays
    with open(notes, "a") as file:
        file.write('{"key": 1}\n[]\n{"key": "other", "shards": [{"file": 1}]}\n{"key')
    np.array([5, EOS], "<u2").tofile(tmp_path / "b.bin")
    assert "n.bin: copied (1 of 2)" in import_both()
    with h5py.File(tmp_path / "to/shards/tokens-00000-00.h5") as opened:
        assert opened["tokens"][:].tolist() == flat(documents)


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_the_working_folder_is_closed_and_the_whole_has_the_usual_modes(
    umask: int, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a project folder of a group, whose members all have the umask 002; an import that ended resumes."""
    tmp_path.chmod(0o2775)
    original, calls = tokens_commands.append_line, [KeyboardInterrupt]

    def interrupted(*arguments: Any) -> None:
        modes = {name: (tmp_path / ".to.part" / name).stat().st_mode & 0o777 for name in ("", "shards", "copied.jsonl")}
        assert modes == {"": 0o700, "shards": 0o700, "copied.jsonl": 0o600}
        original(*arguments)
        if calls:
            raise calls.pop()

    monkeypatch.setattr(tokens_commands, "append_line", interrupted)
    before = os.umask(umask)
    try:
        with pytest.raises(KeyboardInterrupt):
            import_one(tmp_path, tokenizer)
        os.utime(tmp_path / "n.bin", (0, 0))
        import_one(tmp_path, tokenizer)
    finally:
        os.umask(before)
    for path, mode in ((".", 0o777), ("shards", 0o777), ("shards/tokens-00000-00.h5", 0o666)):
        assert (tmp_path / "to" / path).stat().st_mode & 0o777 == mode & ~umask
    assert (tmp_path / "to").stat().st_mode & 0o2000, "files of a project folder belong to its group"


def test_a_file_that_is_named_twice_is_copied_once(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "meg").mkdir()
    path = megatron(folder, documents := encoded(tokenizer))
    (tmp_path / "link.bin").symlink_to(path)
    named = [str(path), str(path.with_suffix(".idx")), str(folder), str(tmp_path / "link.bin")]
    for action in ("import", "inspect", "verify"):
        run_data_command(action, named, str(tmp_path / "copy"), str(tokenizer), "<|endoftext|>", False)
        said = capsys.readouterr().out
        assert [said.count(f"{one}: left out, the same tokens as {path}") for one in named] == [1, 1, 0, 1]
        assert action == "import" or said.count("Megatron .bin") == 1
    with h5py.File(tmp_path / "copy/shards/tokens-00000-00.h5") as file:
        assert file["tokens"][:].tolist() == flat(documents)
    (lone := folder / "lone.idx").touch()
    with pytest.raises(UserError, match="1 of 2 files will not do"):
        run_data_command("inspect", [str(path), str(lone), str(lone)], None, None, "<|endoftext|>", False)


def test_inspect_and_verify_continue_after_what_cannot_be_read(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "in").mkdir()
    nano_gpt(folder, encoded(tokenizer))
    (empty := tmp_path / "no").mkdir()
    np.arange(99, dtype="<u2").tofile(empty / "a.npy")
    arrow(tmp_path, [[5, EOS]])
    (tmp_path / "cut.bin").write_bytes(b"\x05\x00\x05")
    named = [tmp_path / "none.bin", empty, folder, tmp_path / "cut.bin", tmp_path / "a.arrow", empty / "a.npy"]
    for action in ("inspect", "verify"):
        with pytest.raises(UserError, match="4 of 6 files or folders will not do"):
            run_data_command(action, [*map(str, named)], None, str(tokenizer), "<|endoftext|>", False)
        *said, last = capsys.readouterr().out.splitlines()
        assert last == "6 in all: 1 can be used where they lie, 1 to be copied, 4 refused"
        told = "\n".join(said)
        assert f"error[data.missing_file]: {named[0]}: " in told and "nanoGPT .bin" in told and "Arrow" in told
        assert f"error[data.no_files]: {empty}: " in told and "  a.npy: bare tokens named .npy" in told
        assert f"error[data.unknown_format]: {named[5]} " in told and "rename the file to NAME.bin" in told
        assert "odd number" in told
    run_data_command("inspect", [str(folder)], None, None, "<|endoftext|>", False)
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 in all: 1 can be used")


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ((20240522, 1, 10042, 1000), "evaluation file"),
        ((20240326, 5, 1024, 50257, 12, 12, 768, 50304), "a model of llm.c's"),
        ((20240328, 2, 50257, 50256), "a tokenizer"),
        ((20251231, 1, 7), "a file with the number 20251231"),
    ],
)
def test_other_files_of_llm_c_are_no_tokens(header: tuple[int, ...], told: str, tmp_path: Path) -> None:
    content = np.zeros(256, "<i4")
    content[: len(header)] = header
    path = tmp_path / "hellaswag_val.bin"
    path.write_bytes(content.tobytes() + np.arange(5000, dtype="<u2").tobytes())
    with pytest.raises(UserError, match=told) as error:
        inspect_token_file(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PK\x03\x04" + bytes(60), "zip.*unzip"),
        (gzip.compress(bytes(1000), mtime=0), "gzip"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "pickle"),
        (b"plain text, perhaps a README. " * 10, "text"),
        (b"\x93NUMPY\x01\x00" + bytes(60), "NumPy"),
    ],
    ids=["zip", "gzip", "pickle", "text", "numpy"],
)
def test_what_has_another_mark_is_no_bare_tokens(content: bytes, told: str, tmp_path: Path) -> None:
    (path := tmp_path / "pytorch_model.bin").write_bytes(content + bytes(len(content) % 2))
    with pytest.raises(UserError, match=rf"{path} seems to be {told}"):
        inspect_token_file(str(path))


@pytest.mark.parametrize("first", [(93, 0, 7, 9, 11, 0, 256), (640, 0x717D, 5), (1152, 0x295, 8), (20304, 98, 9)])
def test_tokens_that_look_like_a_short_mark_are_read(first: tuple[int, ...], tmp_path: Path) -> None:
    np.array([*first, *range(1000)], "<u2").tofile(path := tmp_path / "a.bin")
    assert inspect_token_file(str(path)).tokens == len(first) + 1000


def test_of_hdf5_the_dataset_is_read_that_was_looked_at(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "h.h5", "w") as file:
        file["other"] = np.arange(90, 100, dtype="<u2")
        file["tokens"] = h5py.SoftLink("/other")
        file.create_dataset("input_ids", data=np.arange(8, dtype="<u2"), chunks=(4,))
    found = inspect_token_file(str(path))
    assert found.tokens == 8 and np.concatenate(list(found.blocks())).tolist() == [*range(8)]


def test_hdf5_whose_writer_did_not_end_is_refused(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "h.h5", "w") as file:
        file.create_dataset("tokens", (95,), "<u2", chunks=(10,))[:90] = 7
    with pytest.raises(UserError, match=r"tokens claims 95 tokens, and 180 bytes are stored: it is not whole"):
        inspect_token_file(str(path))
    with h5py.File(path, "a") as file:
        file["tokens"][90:] = 8
    assert np.concatenate(list(inspect_token_file(str(path)).blocks())).tolist() == [7] * 90 + [8] * 5


def test_arrow_with_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = arrow(tmp_path, [[1, EOS]])
    path.write_bytes(path.read_bytes().replace(b"input_ids", b"input_\xfbds"))
    with pytest.raises(UserError, match=r"a\.arrow is damaged, or no Arrow"):
        inspect_token_file(str(path))


def refused(path: Path, tokenizer: Path, words: str) -> None:
    data, folder = config(str(path), tokenizer), path.parent / "refused"
    with pytest.raises((UserError, InputError), match=words):
        sharded(data, folder)


def test_rows_of_one_length_and_slices_are_read(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for kind in (pyarrow.list_(pyarrow.int32(), 3), pyarrow.large_list(pyarrow.int64())):
        table = pyarrow.table({"input_ids": pyarrow.array([[0, 0, 0], *rows], kind)}).slice(1)
        with pyarrow.ipc.new_file(str(path := tmp_path / "a.arrow"), table.schema) as file:
            file.write_table(table, max_chunksize=2)
        assert [one.tolist() for one in inspect_token_file(str(path)).documents(EOS)] == rows


@pytest.mark.parametrize("write", MAPPED)
def test_parts_of_a_large_file_are_hashed_apart_and_hold_it_all(write: Writer, tokenizer: Path, tmp_path: Path) -> None:
    documents = encoded(tokenizer, 400)
    path = write(tmp_path, documents)
    manifests = []
    for limit in (1024, 1 << 20):
        sharded(config(str(path), tokenizer, shard_tokens=limit), tmp_path / f"data-{limit}")
        manifests.append(load_manifest(tmp_path / f"data-{limit}"))
    parts, whole = manifests
    assert len(parts.train) > 4 and len(parts.held_out) == 2 and len(whole.train) == len(whole.held_out) == 1
    assert max(entry.tokens for entry in (*parts.train, *parts.held_out)) <= 1024
    for manifest in manifests:
        entries = (*manifest.train, *manifest.held_out)
        read = [map_arrays(entry, Path(entry.file))["tokens"].tolist() for entry in entries]
        assert flat(read) == flat(documents)
        assert sum(entry.documents for entry in entries) == len(documents)
        borders = [border for entry in entries for border in entry.part or ()]
        assert borders == [0, *(edge for edge in borders[1:-1:2] for _ in "ab"), path.stat().st_size]
    same = {"documents", "held_out_documents", "train_tokens", "held_out_tokens", "held_out_bytes"}
    assert parts.model_dump(include=same) == whole.model_dump(include=same)

    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    content[parts.train[2].offset] ^= 1
    path.write_bytes(content)
    bad = [entry for entry in (*parts.train, *parts.held_out) if entry.find_problem(path)]
    assert bad == [parts.train[2], parts.held_out[1]]


def test_a_loss_mask_that_is_not_used_is_told(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = datatrove(tmp_path, encoded(tokenizer))
    (tmp_path / "d.ds.loss").write_bytes(bytes(path.stat().st_size // 4))
    words = f"{path}.loss is not used: all tokens are learned"
    run_data_command("inspect", [str(path)], None, None, "<|endoftext|>", False)
    assert words in capsys.readouterr().out
    lines: list[str] = []
    TokensFolder(config(str(path), tokenizer), tmp_path / "data").prepare(lines.append)
    assert any(words in line for line in lines)


def test_what_a_run_cannot_use_is_refused_with_the_way_out(tokenizer: Path, tmp_path: Path) -> None:
    documents = encoded(tokenizer)
    refused(arrow(tmp_path, documents), tokenizer, r"cannot be mapped, for Arrow .*copy them, `.* data import")
    refused(megatron(tmp_path, documents, "int64"), tokenizer, "for they are int64: copy them")
    refused(megatron(tmp_path, [one[:-1] for one in documents]), tokenizer, "60 documents of its index do not end")
    refused(nano_gpt(tmp_path, [[5, 6, VOCAB, EOS]]), tokenizer, f"token 2 is {VOCAB}, and the tokenizer has the ids 0")
    (empty := tmp_path / "e.bin").touch()
    refused(empty, tokenizer, "missing or empty")


def test_text_of_arrow_and_tar_is_tokenised(tmp_path: Path) -> None:
    texts = [f"document number {i} " + "word " * (i % 17) for i in range(80)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for number, text in enumerate(texts):
            content = text.encode() if number % 2 else json.dumps({"text": text}).encode()
            member = tarfile.TarInfo(f"{number:04}.{'txt' if number % 2 else 'json'}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    found = []
    for ending in ("jsonl", "arrow", "tar"):
        kind = TokenizerConfig(vocab_size=300, train_bytes=20_000)
        data = DataConfig(source=str(tmp_path / f"t.{ending}"), tokenizer=kind, held_out=0.2, shard_tokens=1 << 20)
        sharded(data, folder := tmp_path / ending, TextFolder)
        manifest = load_manifest(folder)
        found.append([sorted(tokens_of(folder, part)) for part in (manifest.train, manifest.held_out)])
        assert manifest.documents == 80
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("write", [one for one in WRITERS if one is not nano_gpt])
def test_a_file_that_is_cut_short_is_refused(write: Writer, tmp_path: Path) -> None:
    """Of bare tokens half a token alone tells; a tar ends with zeros that may go."""
    path = write(tmp_path, [[*range(1, 200), EOS]] * 5)
    whole = path.read_bytes()
    for missing in (3000 if write is web_tar else 4, len(whole) // 3, len(whole) - 600):
        path.write_bytes(whole[:-missing])
        with pytest.raises(UserError, match=r"cut short|damaged|do not fit|but a header|truncated"):
            list(inspect_token_file(str(path)).documents(EOS))
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match="odd number"):
        inspect_token_file(str(tmp_path / "odd.bin"))


def test_a_damaged_header_is_not_the_end_of_a_tar(tmp_path: Path) -> None:
    path = web_tar(tmp_path, [[1, EOS]] * 5)
    content = bytearray(path.read_bytes())
    content[2048 + 150] ^= 255  # the checksum of the second array's header
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged, or no tar"):
        list(inspect_token_file(str(path)).documents(EOS))


@pytest.mark.parametrize("kind", ["<u4", "<i4", "<i8"])
def test_bare_ids_that_are_wider_are_refused(kind: str, tmp_path: Path) -> None:
    (np.arange(108_000) % 100_000).astype(kind).tofile(path := tmp_path / "w.bin")
    with pytest.raises(UserError, match="every other uint16 is"):
        inspect_token_file(str(path))
    file = inspect_token_file(str(nano_gpt(tmp_path, [[*range(100, 300), EOS]] * 9)))
    with pytest.raises(UserError, match="tokenizer has 70,000 ids"):
        scan_tokens(file, EOS, 70_000)


def test_held_out_ends_near_and_a_file_without_such_an_end_is_trained_on_whole(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    long = nano_gpt(tmp_path / "one", [[*[5] * 9, EOS], [*[6] * 200_000, EOS]])
    refused(long, tokenizer, "set data.held_out: 0, or put an end-of-text token")
    said: list[str] = []
    other = nano_gpt(tmp_path, encoded(tokenizer, 600))
    folder = TokensFolder(config([str(long), str(other)], tokenizer, held_out=0.02), tmp_path / "data")
    folder.prepare(said.append)
    folder.shard(0, 1, said.append)
    assert folder.finalize(said.append)
    manifest = load_manifest(tmp_path / "data")
    assert manifest.train[0].tokens == 200_011 and {entry.file for entry in manifest.held_out} == {str(other)}
    assert any("nothing is held out of 1 files" in line and str(long) in line for line in said)
    sharded(config(str(long), tokenizer, held_out=0), tmp_path / "none")


def test_an_array_of_columns_is_read_in_rows(tmp_path: Path) -> None:
    np.save(content := io.BytesIO(), np.asfortranarray(np.arange(6).reshape(2, 3)))
    with tarfile.open(path := tmp_path / "f.tar", "w") as tar:
        member = tarfile.TarInfo("0.npy")
        member.size = len(content.getvalue())
        tar.addfile(member, io.BytesIO(content.getvalue()))
    assert [one.tolist() for one in inspect_token_file(str(path)).blocks()] == [list(range(6))]


def test_held_out_tokens_are_looked_for_once_when_parts_are_made(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = config(str(megatron(tmp_path, encoded(tokenizer, 400))), tokenizer, shard_tokens=1024)
    TokensFolder(data, tmp_path / "data").prepare(print)
    searched: list[int] = []
    real = TokensFolder._border

    def border(folder: TokensFolder, file: TokenFile, eos_id: int) -> int:
        searched.append(1)
        return real(folder, file, eos_id)

    monkeypatch.setattr(TokensFolder, "_border", border)
    folder = TokensFolder(data, tmp_path / "data")
    folder.shard(0, 1, print)
    assert folder.finalize(print) and folder.count > 4 and len(searched) == 1
    assert len(load_manifest(tmp_path / "data").held_out) == 2


@pytest.mark.parametrize("write", [megatron, datatrove])
def test_of_an_index_a_task_reads_what_its_units_cover_and_notices_a_change(
    write: Writer, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = encoded(tokenizer, 4000)
    data = config(str(write(tmp_path, documents)), tokenizer, shard_tokens=1024)
    TokensFolder(data, tmp_path / "data").prepare(print)
    read: list[int] = []
    real = DocumentEnds.numbers

    def numbers(*asked: Any) -> Any:
        read.append((found := real(*asked)).nbytes)
        return found

    monkeypatch.setattr(DocumentEnds, "numbers", numbers)
    monkeypatch.setattr("data_prep.token_files.BLOCK", 256)
    folder = TokensFolder(data, tmp_path / "data")
    (tmp_path / "data/shards").mkdir()
    index = next(path for path in tmp_path.iterdir() if path.suffix in (".idx", ".index"))
    units = folder.count
    assert units > 40 and folder.build_unit(units // 2)
    assert sum(read) < index.stat().st_size / 8, "of the index little more than its part was read"
    inside = json.loads(folder.unit_path(units // 2).read_bytes())["train"][0]
    ends = np.cumsum([len(one) for one in documents])
    start = inside["offset"] // (2 if write is megatron else 4)
    assert inside["documents"] == np.count_nonzero((ends > start) & (ends <= start + inside["tokens"]))

    index.write_bytes(index.read_bytes())
    assert f"input {index} has changed since" in str(folder.find_prepare_problem())
    with pytest.raises(InputError, match=rf"{index.name} has changed since .* put it back, or go on with"):
        folder.build_unit(0)
    assert folder.unit(units // 2) is not None
    TokensFolder(data, tmp_path / "data").prepare(print)
    again = TokensFolder(data, tmp_path / "data")
    assert again.unit(units // 2) is None, "it may have other documents now"
    again.shard(0, 1, lambda _: None)
    assert again.finalize(print) and load_manifest(tmp_path / "data").documents == len(documents)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=9), st.data())
def test_what_ends_in_a_part_is_what_counting_says(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]], data: st.DataObject
) -> None:
    """sequences: of each document the lengths of its sequences, none as well."""
    folder = tmp_path_factory.mktemp("one")
    path = megatron(folder, [[5] * length for one in sequences for length in one] + [[5]])
    borders = np.cumsum([0, *map(len, [*sequences, [1]])])
    count, whole = int(borders[-1]), path.with_suffix(".idx").read_bytes()
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, len(borders))
    path.with_suffix(".idx").write_bytes(head + whole[34 : 34 + 12 * count] + borders.astype("<i8").tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.token_files.BLOCK", 3)
        file = inspect_token_file(str(path))
    ends = np.cumsum([sum(one) for one in [*sequences, [1]]])
    start = data.draw(st.integers(0, int(ends[-1])))
    stop = data.draw(st.integers(start, int(ends[-1])))
    found = file.part(start, stop).ends_in(0, stop - start)
    assert found is not None and file.ends is not None and len(file.ends) == len(ends)
    assert found.tolist() == (ends[(ends > start) & (ends <= stop)] - start).tolist()


def test_an_index_that_is_cut_or_out_of_order_behind_its_check_is_refused(tmp_path: Path) -> None:
    path = megatron(tmp_path, [[*range(1, 9), EOS]] * 50)
    index = path.with_suffix(".idx")
    file, whole = inspect_token_file(str(path)), index.read_bytes()
    with open(index, "r+b") as disk:
        disk.seek(-8 * 26, 2)
        disk.write(struct.pack("<q", 49))
    with pytest.raises(UserError, match=r"m\.idx is damaged: documents end one after another"):
        scan_tokens(file, EOS, VOCAB)
    index.write_bytes(whole[:600])
    with pytest.raises(UserError, match=r"m\.idx is cut short"):
        scan_tokens(file, EOS, VOCAB)


def test_documents_of_a_mixture_are_filtered_beside_tokens(tokenizer: Path, tmp_path: Path) -> None:
    for name in ("one.txt", "two.txt", "three.txt"):
        (tmp_path / name).write_text("the same" if name != "three.txt" else "another")
    sources = {
        "web": {"source": str(nano_gpt(tmp_path, encoded(tokenizer))), "records": "tokens", "held_out": 0.2},
        "words": {"source": str(tmp_path / "*.txt"), "held_out": 0.0},
    }
    mixture = {"sources": sources, "weights": [{"weights": {"web": 1, "words": 1}}]}
    asked = {"mixture": mixture, "tokenizer": {"kind": "file", "path": tokenizer}, "deduplicate": True}
    folder = MixtureFolder(DataConfig.model_validate(asked), tmp_path / "data")
    folder.prepare(print)
    folder.shard(0, 1, print)
    assert folder.finalize(print)
    assert load_manifest(tmp_path / "data").duplicate_documents == 1
    sources["words"] = sources["web"]
    with pytest.raises(ValueError, match="deduplicate and filter are for documents"):
        DataConfig.model_validate(asked)


def test_a_file_in_two_sources_of_a_mixture_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    path = nano_gpt(tmp_path, encoded(tokenizer))
    (tmp_path / "link.bin").symlink_to(path)
    sources = {name: {"source": str(tmp_path / file), "records": "tokens"} for name, file in
               (("web", "n.bin"), ("code", "link.bin"))}  # fmt: skip
    mixture = {"sources": sources, "weights": [{"weights": {"web": 1, "code": 1}}]}
    data = DataConfig.model_validate({"mixture": mixture, "tokenizer": {"kind": "file", "path": tokenizer}})
    with pytest.raises(UserError, match=r"n\.bin is in web and in code"):
        MixtureFolder(data, tmp_path / "data").prepare(print)


def mutated(content: bytes, source: random.Random) -> bytes:
    """Some bytes changed, cut off, doubled, or a length made huge."""
    data = bytearray(content)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(max(1, min(len(data), source.choice([64, 1 << 11, 1 << 30]))))
        match source.randrange(5):
            case 0:
                data[place : place + 1] = bytes([source.randrange(256)])
            case 1:
                del data[place:]
            case 2:
                data[place : place + 8] = source.choice([b"\xff" * 8, b"\x00" * 8, b"\x00" * 7 + b"\x7f"])
            case 3:
                data[place:place] = source.randbytes(source.randint(1, 9))
            case _:
                del data[place : place + source.randint(1, 9)]
    return bytes(data)


WIDTHS = {"megatron": 2, "llm_c": 2, "nano_gpt": 2, "hdf5": 2, "datatrove": 4, "arrow": 4, "web_tar": 8}


def places_of(content: bytes, documents: Documents, width: int) -> list[int]:
    """The byte at which each token lies, document by document."""
    found, behind = list[int](), 0
    for one in documents:
        start = content.index(np.array(one, f"<i{width}").tobytes(), behind)
        found += range(start, behind := start + len(one) * width, width)
    return found


def hurt_span(before: bytes, after: bytes) -> tuple[int, int]:
    """The bytes [start, end) of `before` outside of which `after` is the same."""
    pairs = [*zip(before, after, strict=False)], [*zip(reversed(before), reversed(after), strict=False)]
    start, same = (next((n for n, (old, new) in enumerate(one) if old != new), len(one)) for one in pairs)
    same = min(same, len(before) - start, len(after) - start)
    return start, len(before) - same


def addressed(before: bytes, start: int, end: int, size: int) -> bool:
    """Whether what HDF5 keeps of addresses may be wrong, which has no check in its first version: those of all that
    follows where bytes came in or went, and of chunks their index, a node of keys and addresses."""
    tree = before.find(b"TREE\x01")
    keys = tree + 24, tree + 24 + 32 * int.from_bytes(before[tree + 6 : tree + 8], "little") + 24
    return size != len(before) or (tree >= 0 and start < keys[1] and keys[0] < end)


@pytest.mark.parametrize("write", WRITERS)
def test_damaged_files_are_refused_or_read_right(write: Writer, tmp_path: Path) -> None:
    """A thousand in all. Tokens are what they were where no byte of them was hurt: no damaged header, index or length
    moves, adds or loses one, but of HDF5 and Arrow. One that was hurt may be another: no format has a hash of it."""
    source = random.Random(write.__name__)
    documents = [[source.randrange(1, VOCAB) for _ in range(source.randrange(3, 30))] + [EOS] for _ in range(12)]
    path, refusals, wanted = write(tmp_path, documents), 0, flat(documents)
    files = {one: one.read_bytes() for one in path.parent.iterdir()}
    width = WIDTHS.get(write.__name__)  # of compressed ones no byte may be hurt
    places = places_of(files[path], documents, width) if width else []
    for _ in range(125):
        for other, content in files.items():
            other.write_bytes(content)
        hurt = source.choice(sorted(files))
        hurt.write_bytes(after := mutated(files[hurt], source))
        try:
            file: TokenFile = inspect_token_file(str(path))
            read = [token for one in file.documents(EOS) for token in one.tolist()]
            scan_tokens(file, EOS, VOCAB)
        except UserError as error:
            assert str(tmp_path) in str(error)
            refusals += 1
            continue
        if file.format == NANO_GPT:  # nothing says how long it should be
            assert write is nano_gpt or len(after) < 1024, "of llm.c's no header is left"
            assert read == np.frombuffer(after, "<u2").tolist()
            continue
        start, end = hurt_span(files[hurt], after)
        changed = [place for place, one in enumerate(wanted) if [one] != read[place : place + 1]]
        may = [
            place for place, byte in enumerate(places) if hurt == path and byte < end and start < byte + (width or 0)
        ]
        if "hdf5" in write.__name__ and addressed(files[hurt], start, end, len(after)):
            continue
        if write is arrow and (len(after) != len(files[hurt]) or len(may) * 4 < end - start):
            continue  # more than ids was hurt: its messages have no check either
        assert len(read) == len(wanted) and {*changed} <= {*may}, f"bytes {start} to {end} of {hurt.name}: {changed}"
    assert refusals > 30


def test_many_small_files_share_a_unit_and_give_the_same_manifest(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "in").mkdir()
    documents = encoded(tokenizer, 400)
    for number in range(40):
        nano_gpt(tmp_path, documents[10 * number : 10 * (number + 1)]).rename(folder / f"{number:02}.bin")
    nano_gpt(folder, documents).rename(folder / "large.bin")
    data = config(str(folder), tokenizer, shard_tokens=1024)
    sharded(data, tmp_path / "single")
    single = TokensFolder(data, tmp_path / "single")
    assert all(len(pieces) == 1 for pieces in single.plan.units) and single.count > 80, (
        "few parts are units of their own"
    )
    monkeypatch.setattr("data_prep.tokens_folder.MANY_UNITS", 10)
    for tasks in (1, 3):
        made = TokensFolder(data, tmp_path / str(tasks))
        made.prepare(lambda _: None)
        for task in reversed(range(tasks)):
            TokensFolder(data, tmp_path / str(tasks)).shard(task, tasks, lambda _: None)
        assert TokensFolder(data, tmp_path / str(tasks)).finalize(lambda _: None)
    shared = TokensFolder(data, tmp_path / "3")
    sizes = [sum(piece.end - piece.start for piece in pieces) for pieces in shared.plan.units]
    assert len(sizes) < single.count / 3 and max(sizes) <= 1024
    assert [one for pieces in shared.plan.units for one in pieces] == [one for (one,) in single.plan.units]
    one, several, three = (load_manifest(tmp_path / name) for name in ("single", "1", "3"))
    assert (one.train, one.held_out, one.documents) == (three.train, three.held_out, three.documents)
    assert several == three
    path = folder / "07.bin"
    path.write_bytes(path.read_bytes()[:-2])
    unit = next(number for number, pieces in enumerate(shared.plan.units) if 7 in {piece.input for piece in pieces})
    with pytest.raises(InputError, match=r"07\.bin has changed since"):
        shared.unit_path(unit).unlink()
        TokensFolder(data, tmp_path / "3").build_unit(unit)
