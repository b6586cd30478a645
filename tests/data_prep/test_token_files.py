"""Tests that files of tokens in each supported format can be inspected, used in place and imported.

Damaged and unsuitable files must be rejected.
"""

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
from data_prep.token_files import NANO_GPT, DocumentEnds, TokenFile, TokenStatistics, inspect_token_file, scan_tokens
from data_prep.tokenizer import load_encoder, train_bpe
from data_prep.tokens_commands import run_data_command
from data_prep.tokens_folder import TokensFolder
from pipeline.base.errors import InputError, UserError
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.data.manifest import ShardEntry, load_manifest
from pipeline.data.samples import map_arrays
from tests.support.errors import raises_error
from tests.support.requirements import skip_or_fail_in_ci
from tests.support.tokenizers import add_post_processor, make_byte_tokenizer, save_tokenizer

OTHER_UID = 65534
"""The user `nobody`."""
EOS = 0
"""Token ID of the end-of-text token."""
VOCAB = 300
Documents = list[list[int]]
"""The token IDs of each document."""
TEXTS = ["the model", "a step, then another one", "loss", "éü 漢字 😀", "shard after shard " * 9]


def flatten(documents: Documents) -> list[int]:
    """Return the tokens of all documents, concatenated."""
    return [token for document in documents for token in document]


# Each of the following functions writes documents in one format and returns the path of the file with the tokens.


def write_megatron(folder: Path, documents: Documents, dtype: str = "uint16") -> Path:
    """Write a .bin file of tokens and an .idx file, which has the length and start of each document."""
    type_codes = {"int32": 4, "uint16": 8, "int64": 5}
    path = folder / "m.bin"
    lengths = [len(document) for document in documents]
    path.write_bytes(np.array(flatten(documents), dtype).tobytes())
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1] * np.dtype(dtype).itemsize
    # magic number, version, type of the tokens, sequences, and documents plus 1
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, type_codes[dtype], len(lengths), len(lengths) + 1)
    document_indices = np.arange(len(lengths) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(
        header + np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes() + document_indices.tobytes()
    )
    return path


def write_llm_c(folder: Path, documents: Documents) -> Path:
    """Write a file of llm.c: a header of 256 numbers, and tokens."""
    tokens = np.array(flatten(documents), "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)  # magic number, version, token count
    (path := folder / "l.bin").write_bytes(header.tobytes() + tokens.tobytes())
    return path


def write_nano_gpt(folder: Path, documents: Documents) -> Path:
    """Write a file of nanoGPT: tokens without a header."""
    np.array(flatten(documents), "<u2").tofile(path := folder / "n.bin")
    return path


def write_datatrove(folder: Path, documents: Documents) -> Path:
    """Write a .ds file of tokens, an .index file with the ends of the documents, and a .metadata file."""
    tokens = np.array(flatten(documents), "<u4")
    (path := folder / "d.ds").write_bytes(tokens.tobytes())
    ends = np.cumsum([len(document) for document in documents])
    (folder / "d.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends.tolist()))
    (folder / "d.ds.metadata").write_text(f"gpt2|4\n{len(tokens)}\n{len(tokens)} T")
    return path


def write_hdf5(folder: Path, documents: Documents, **options: object) -> Path:
    """Write an HDF5 file with a dataset `tokens`; `options` are those of the dataset."""
    with h5py.File(path := folder / "h.h5", "w") as file:
        file.create_dataset("tokens", data=np.array(flatten(documents), "<u2"), **options)
    return path


def write_compressed_hdf5(folder: Path, documents: Documents) -> Path:
    """Write an HDF5 file whose dataset has compressed chunks of 16 tokens."""
    return write_hdf5(folder, documents, chunks=(min(16, len(flatten(documents))),), compression="gzip", shuffle=True)


def write_arrow(folder: Path, documents: Documents) -> Path:
    """Write an Arrow stream with a column `input_ids` and one row per document."""
    table = pyarrow.table({"input_ids": pyarrow.array(documents, pyarrow.list_(pyarrow.int32()))})
    with pyarrow.ipc.new_stream(str(path := folder / "a.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    return path


def write_webdataset_tar(folder: Path, documents: Documents) -> Path:
    """Write a tar file with a .npy file and an empty .json file for each document."""
    with tarfile.open(path := folder / "w.tar", "w") as tar:
        for number, document in enumerate(documents):
            content = io.BytesIO()
            np.save(content, np.array(document, "<i8"))
            for name, data in ((f"{number:04}.npy", content.getvalue()), (f"{number:04}.json", b"{}")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


Writer = Callable[[Path, Documents], Path]
MAPPABLE_WRITERS: list[Writer] = [write_megatron, write_llm_c, write_nano_gpt, write_datatrove, write_hdf5]
"""Writers of the formats that a run uses in place, by mapping the file into memory."""
WRITERS: list[Writer] = [*MAPPABLE_WRITERS, write_compressed_hdf5, write_arrow, write_webdataset_tar]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Train a BPE tokenizer on `TEXTS` and return the path of its file."""
    (path := tmp_path / "tokenizer.json").write_text(train_bpe(TEXTS * 20, VOCAB, "<|endoftext|>"))
    return path


def encode_documents(tokenizer: Path, count: int = 60) -> Documents:
    """Return `count` different documents that end with the end-of-text token."""
    encoder = load_encoder(tokenizer, "<|endoftext|>")
    return [document.tolist() for document in encoder.encode([f"{TEXTS[i % 5]} {i}" for i in range(count)])]


def make_config(source: object, tokenizer: Path, **fields: object) -> DataConfig:
    """Return a config for files of tokens. `fields` replace or add values."""
    tokenizer_config = TokenizerConfig(kind="file", path=tokenizer)
    return DataConfig.model_validate(
        {"source": source, "records": "tokens", "tokenizer": tokenizer_config, "held_out": 0.2, **fields}
    )


@pytest.mark.parametrize(
    ("add_special_tokens", "files_have_bos", "expected_bos", "expected_warning"),
    [
        ("auto", (True, True), True, False),
        ("auto", (False, False), False, False),
        ("auto", (True, False), False, True),
        (True, (False, False), True, True),
        (False, (True, True), False, False),
    ],
)
def test_add_special_tokens_auto_detects_whether_the_documents_begin_with_bos(
    tmp_path: Path,
    add_special_tokens: object,
    files_have_bos: tuple[bool, bool],
    expected_bos: bool,
    expected_warning: bool,
) -> None:
    """`expected_bos` is whether text that is tokenized later, such as a prompt, begins with the bos token."""
    tokenizer = save_tokenizer(tmp_path, add_post_processor(make_byte_tokenizer("a text"), "mistral"))
    for number, has_bos in enumerate(files_have_bos):
        encoder = load_encoder(tokenizer, "<|end|>", has_bos)
        (tmp_path / str(number)).mkdir()
        write_megatron(
            tmp_path / str(number), [document.tolist() for document in encoder.encode([f"text {i}" for i in range(60)])]
        )
    log: list[str] = []
    data = make_config(str(tmp_path / "[01]/*.bin"), tokenizer, add_special_tokens=add_special_tokens)
    data = data.model_copy(update={"tokenizer": data.tokenizer.model_copy(update={"eos_token": "<|end|>"})})
    folder = TokensFolder(data, tmp_path / "data")
    folder.prepare(log.append)
    assert bool(folder.prepared.bos_ids) is expected_bos
    assert any("data.add_special_tokens" in line for line in log) is expected_warning


def run_stages(data: DataConfig, folder: Path, folder_type: type[TextFolder] = TokensFolder) -> None:
    """Run the prepare stage, and the shard stage in two tasks."""
    folder_type(data, folder).prepare(lambda _: None)
    for task in (1, 0):
        folder_type(data, folder).shard(task, 2, lambda _: None)
    assert folder_type(data, folder).finalize(lambda _: None)


def read_entries(folder: Path, entries: tuple[ShardEntry, ...]) -> list[int]:
    """Return the tokens of these shards, concatenated."""
    return [token for entry in entries for token in map_arrays(entry, folder / entry.file)["tokens"].tolist()]


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(1, VOCAB - 1), max_size=40), min_size=1, max_size=12))
@pytest.mark.parametrize("write", WRITERS)
def test_each_format_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, write: Writer, documents_without_eos: Documents
) -> None:
    documents = [[*document, EOS] for document in documents_without_eos]
    file = inspect_token_file(str(write(tmp_path_factory.mktemp("one"), documents)))
    assert [document.tolist() for document in file.iterate_documents(EOS)] == documents
    assert np.concatenate(list(file.iterate_blocks())).tolist() == flatten(documents)
    statistics = scan_tokens(file, EOS, VOCAB)
    tokens = flatten(documents)
    assert statistics == TokenStatistics(
        tokens=len(tokens), max_id=max(tokens), eos_tokens=len(documents), unended_documents=0
    )
    assert (file.unmappable_reason is None) is (write in MAPPABLE_WRITERS)


@pytest.mark.parametrize("block_tokens", [1, 3, 7])
def test_documents_do_not_depend_on_the_block_size(
    block_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.token_files.BLOCK_TOKENS", block_tokens)
    documents = [[5, 6, 7, EOS], [EOS], [], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, EOS], [4, 4]]
    file = inspect_token_file(str(write_megatron(tmp_path, documents)))
    assert [document.tolist() for document in file.iterate_documents(EOS)] == documents
    ends = np.cumsum([len(document) for document in documents]).tolist()
    assert file.document_ends is not None and list(file.document_ends.read_ends(0, len(documents))) == ends
    for start, stop in ((0, 5), (4, 6), (5, 5), (3, 18)):
        ends_in_range = file.select_range(start, stop).find_document_ends(0, stop - start)
        expected_ends = [end - start for end in ends if start < end <= stop]
        assert ends_in_range is not None and ends_in_range.tolist() == expected_ends
    assert scan_tokens(file, EOS, VOCAB).unended_documents == 2  # [9] and [4, 4]. The empty document is not counted.
    file_without_index = inspect_token_file(str(write_nano_gpt(tmp_path, documents)))  # documents end only after EOS
    assert [len(document) for document in file_without_index.iterate_documents(EOS)] == [4, 1, 12, 2]


@pytest.mark.parametrize("write", MAPPABLE_WRITERS)
def test_a_run_uses_mappable_files_in_place(write: Writer, tokenizer: Path, tmp_path: Path) -> None:
    documents = encode_documents(tokenizer)
    path = write(tmp_path, documents)
    original_content = path.read_bytes()
    run_stages(make_config(str(path), tokenizer), folder := tmp_path / "data")
    manifest = load_manifest(folder)
    all_tokens = flatten(documents)
    train, held_out = (read_entries(folder, entries) for entries in (manifest.train, manifest.held_out))
    assert train + held_out == all_tokens and train[-1] == EOS
    assert abs(len(held_out) - 0.2 * len(all_tokens)) <= max(map(len, documents)) / 2 + 1
    assert (manifest.documents, manifest.held_out_documents) == (60, held_out.count(EOS))
    texts = [f"{TEXTS[i % 5]} {i}" for i in range(60)][-manifest.held_out_documents :]
    assert manifest.held_out_bytes == sum(len(text.encode()) for text in texts)
    assert {entry.file for entry in manifest.train} == {str(path)} and path.read_bytes() == original_content
    assert not list((folder / "shards").glob("*.h5")), "tokens were copied"
    path.write_bytes(original_content[:-2])
    problem = TokensFolder(make_config(str(path), tokenizer), folder).find_shard_problem()
    assert problem and str(path) in problem and "resume" not in problem, "resume cannot repair a user's file"


@pytest.mark.parametrize("write", WRITERS)
def test_a_copy_has_the_same_documents_and_a_run_can_use_it(write: Writer, tokenizer: Path, tmp_path: Path) -> None:
    documents = encode_documents(tokenizer)
    # These formats store where documents end. Files of these formats often lack end tokens, which `import` adds.
    written_documents = (
        [document[:-1] for document in documents]
        if write in (write_megatron, write_datatrove, write_arrow, write_webdataset_tar)
        else documents
    )
    (tmp_path / "in").mkdir()
    path = write(tmp_path / "in", written_documents)
    run_data_command("import", [str(path)], str(tmp_path / "copy"), str(tokenizer), "<|endoftext|>", packed=False)
    with h5py.File(tmp_path / "copy/shards/tokens-00000-00.h5") as file:
        assert file["tokens"][:].tolist() == flatten(documents)
        assert file["documents"][:].tolist() == [0, *np.cumsum([len(document) for document in documents]).tolist()]
    run_stages(make_config(str(tmp_path / "copy"), tokenizer), folder := tmp_path / "data")
    manifest = load_manifest(folder)
    assert read_entries(folder, manifest.train) + read_entries(folder, manifest.held_out) == flatten(documents)
    with raises_error("data.folder_exists", tmp_path / "copy"):
        run_data_command("import", [str(path)], str(tmp_path / "copy"), str(tokenizer), "<|endoftext|>", packed=False)


def test_a_failed_import_is_locked_while_it_runs_and_continues_with_unchanged_copies(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.tokens_commands._SHARD_TOKENS", 100)
    (tmp_path / "in").mkdir()
    documents = encode_documents(tokenizer)
    paths = [tmp_path / "in" / name for name in ("a.bin", "b.bin", "c.bin")]
    for number, path in enumerate(paths):
        write_nano_gpt(tmp_path, documents[20 * number : 20 * (number + 1)]).rename(path)

    def read_results() -> list[Any]:
        """Return the name of each file in the output, and whether it was copied now or before."""
        return re.findall(r"/(\w)\.bin: (copied[ a-z]*) \(", capsys.readouterr().out)

    def import_files(name: str) -> list[Any]:
        run_data_command(
            "import", [*map(str, paths)], str(tmp_path / name), str(tokenizer), "<|endoftext|>", packed=False
        )
        return read_results()

    def read_shards(name: str) -> dict[str, bytes]:
        folder = tmp_path / name
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.h5")}

    assert (
        import_files("whole") == [("a", "copied"), ("b", "copied"), ("c", "copied")] and len(read_shards("whole")) > 6
    )
    intact_content = paths[2].read_bytes()
    paths[2].write_bytes(struct.pack("<2H", VOCAB, EOS))
    part = tmp_path / ".to.part"  # the working folder of an import into `to`
    with raises_error("data.token_out_of_range", "token 0", VOCAB):
        import_files("to")
    assert str(part) in capsys.readouterr().out
    assert part.is_dir() and not (tmp_path / "to").exists()
    with open(part / ".lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with raises_error("data.import_running", part):
            import_files("to")
    os.utime(paths[0], (0, 0))  # a file that changed is copied again
    with raises_error("data.token_out_of_range"):
        import_files("to")
    assert read_results() == [("a", "copied"), ("b", "copied before")]
    (part / "shards/tokens-00001-00.h5").write_bytes(b"")
    (part / "shards/tokens-00009-00.h5").write_bytes(b"a shard of a file that is no longer imported")
    paths[2].write_bytes(intact_content)
    assert import_files("to") == [("a", "copied before"), ("b", "copied"), ("c", "copied")]
    assert read_shards("to") == read_shards("whole") and not part.exists()
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["shards"]


def import_one_file(folder: Path, tokenizer: Path) -> None:
    """Import a token file into `folder/to`. Until it is complete, `folder/.to.part` is the working folder."""
    write_nano_gpt(folder, encode_documents(tokenizer))
    run_data_command(
        "import", [str(folder / "n.bin")], str(folder / "to"), str(tokenizer), "<|endoftext|>", packed=False
    )


def give_to_other_user(path: Path) -> None:
    """Change the owner of a file, a folder or a link."""
    if os.geteuid() != 0:
        skip_or_fail_in_ci("changing the owner of a file needs root")
    os.chown(path, OTHER_UID, OTHER_UID, follow_symlinks=False)


# Each of the following functions changes the working folder `part` of an import so that the import must reject it.
# `other` is a folder with files of the user. The import must not change these files.


def link_folder(part: Path, other: Path) -> None:
    part.rmdir()
    part.symlink_to(other)


def link_shards(part: Path, other: Path) -> None:
    (part / ".lock").touch()
    (part / "shards").symlink_to(other / "shards")


def give_folder_to_other_user(part: Path, other: Path) -> None:
    (part / "shards").mkdir()
    give_to_other_user(part)


def give_shards_to_other_user(part: Path, other: Path) -> None:
    (part / ".lock").touch()
    (part / "shards").mkdir()
    give_to_other_user(part / "shards")


def make_folder_group_writable(part: Path, other: Path) -> None:
    part.chmod(0o770)


def make_shards_world_writable(part: Path, other: Path) -> None:
    (part / ".lock").touch()
    (part / "shards").mkdir()
    (part / "shards").chmod(0o757)


def make_copied_list_world_writable(part: Path, other: Path) -> None:
    (part / ".lock").touch()
    (part / "copied.jsonl").touch()
    (part / "copied.jsonl").chmod(0o666)


def give_copied_list_to_other_user(part: Path, other: Path) -> None:
    (part / ".lock").touch()
    (part / "copied.jsonl").touch()
    give_to_other_user(part / "copied.jsonl")


def link_copied_list(part: Path, other: Path) -> None:
    (part / ".lock").touch()
    (part / "copied.jsonl").symlink_to(other / "notes.txt")


def add_shard_without_lock(part: Path, other: Path) -> None:
    (part / "shards").mkdir()
    (part / "shards/tokens-00000-00.h5").write_text("user data")


def add_user_file(part: Path, other: Path) -> None:
    (part / ".lock").touch()
    (part / "shards").mkdir()
    (part / "shards/chapter1.h5").write_text("user data")


def add_user_folder(part: Path, other: Path) -> None:
    (part / ".lock").touch()
    (part / "shards/tokens-00000-00.h5").mkdir(parents=True)
    (part / "shards/tokens-00000-00.h5/chapter").write_text("user data")


@pytest.mark.parametrize(
    "prepare_working_folder",
    [
        link_folder,
        link_shards,
        give_folder_to_other_user,
        give_shards_to_other_user,
        make_folder_group_writable,
        make_shards_world_writable,
        make_copied_list_world_writable,
        give_copied_list_to_other_user,
        link_copied_list,
        add_shard_without_lock,
        add_user_file,
        add_user_folder,
    ],
)
def test_an_import_rejects_a_working_folder_that_it_cannot_have_created_and_changes_nothing(
    prepare_working_folder: Callable[[Path, Path], None], tokenizer: Path, tmp_path: Path
) -> None:
    (thesis := tmp_path / "thesis/shards").mkdir(parents=True)
    for name in ("tokens-00000-00.h5", "tokens-00009-00.h5", "chapter.tex", "../notes.txt"):
        (thesis / name).write_text("user data")
    (part := tmp_path / ".to.part").mkdir(mode=0o700)
    prepare_working_folder(part, thesis.parent)
    original_texts = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(UserError) as error:
            import_one_file(tmp_path, tokenizer)
        assert str(part) in str(error.value) and "/proc/" not in str(error.value)
        assert {path: path.read_text() for path in original_texts} == original_texts
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("moment", ["before the first shard", "before leftovers are deleted"])
def test_an_import_whose_working_folder_is_replaced_by_a_link_changes_nothing_in_its_target(
    moment: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (thesis := tmp_path / "thesis/shards").mkdir(parents=True)
    for name in ("tokens-00000-00.h5", "tokens-00009-00.h5", "chapter.tex"):
        (thesis / name).write_text("user data")

    def replace_folder_and_call(*arguments: Any) -> Any:
        if not (tmp_path / "moved").exists():
            (tmp_path / ".to.part").rename(tmp_path / "moved")
            (tmp_path / ".to.part").symlink_to(thesis.parent)
        return original_function(*arguments)

    name = "inspect_token_file" if moment == "before the first shard" else "append_line"
    original_function = getattr(tokens_commands, name)
    monkeypatch.setattr(tokens_commands, name, replace_folder_and_call)
    with raises_error("data.import_replaced", tmp_path / "to"):
        import_one_file(tmp_path, tokenizer)
    assert {path.name: path.read_text() for path in thesis.iterdir()} == dict.fromkeys(
        ("tokens-00000-00.h5", "tokens-00009-00.h5", "chapter.tex"), "user data"
    )


def test_a_file_is_copied_again_if_its_shards_are_damaged(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.bin").write_bytes(struct.pack("<2H", VOCAB, EOS))
    write_nano_gpt(tmp_path, documents := encode_documents(tokenizer))
    files = [str(tmp_path / "n.bin"), str(tmp_path / "b.bin")]

    def import_both() -> str:
        run_data_command("import", files, str(tmp_path / "to"), str(tokenizer), "<|endoftext|>", packed=False)
        return capsys.readouterr().out

    with raises_error("data.token_out_of_range", "token 0", VOCAB):
        import_both()
    copied_list = tmp_path / ".to.part/copied.jsonl"
    shard = tmp_path / ".to.part/shards/tokens-00000-00.h5"
    shard.write_bytes(shard.read_bytes()[::-1])  # same size
    with open(copied_list, "a") as file:  # add malformed lines
        file.write('{"key": 1}\n[]\n{"key": "other", "shards": [{"file": 1}]}\n{"key')
    np.array([5, EOS], "<u2").tofile(tmp_path / "b.bin")
    assert "n.bin: copied (1 of 2)" in import_both()
    with h5py.File(tmp_path / "to/shards/tokens-00000-00.h5") as opened:
        assert opened["tokens"][:].tolist() == flatten(documents)


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_the_working_folder_is_private_and_the_result_follows_the_umask(
    umask: int, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder has mode 0700 before and after an interruption, also in a setgid folder of a group."""
    tmp_path.chmod(0o2775)
    original_append_line = tokens_commands.append_line
    interruptions = [KeyboardInterrupt]

    def append_and_interrupt(*arguments: Any) -> None:
        modes = {name: (tmp_path / ".to.part" / name).stat().st_mode & 0o777 for name in ("", "shards", "copied.jsonl")}
        assert modes == {"": 0o700, "shards": 0o700, "copied.jsonl": 0o600}
        original_append_line(*arguments)
        if interruptions:
            raise interruptions.pop()

    monkeypatch.setattr(tokens_commands, "append_line", append_and_interrupt)
    original_umask = os.umask(umask)
    try:
        with pytest.raises(KeyboardInterrupt):
            import_one_file(tmp_path, tokenizer)
        os.utime(tmp_path / "n.bin", (0, 0))
        import_one_file(tmp_path, tokenizer)
    finally:
        os.umask(original_umask)
    for path, mode in ((".", 0o777), ("shards", 0o777), ("shards/tokens-00000-00.h5", 0o666)):
        assert (tmp_path / "to" / path).stat().st_mode & 0o777 == mode & ~umask
    assert (tmp_path / "to").stat().st_mode & 0o2000, "the setgid bit of the parent folder is not inherited"


def test_a_file_named_twice_is_copied_once(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "meg").mkdir()
    path = write_megatron(folder, documents := encode_documents(tokenizer))
    (tmp_path / "link.bin").symlink_to(path)
    arguments = [str(path), str(path.with_suffix(".idx")), str(folder), str(tmp_path / "link.bin")]
    for action in ("import", "inspect", "verify"):
        run_data_command(action, arguments, str(tmp_path / "copy"), str(tokenizer), "<|endoftext|>", packed=False)
        output = capsys.readouterr().out
        # The file is used for the first argument. It is left out, under the same path, when the folder is searched.
        assert [output.count(f"{argument}: left out") for argument in arguments] == [1, 1, 0, 1]
        assert action == "import" or output.count("Megatron .bin") == 1
    with h5py.File(tmp_path / "copy/shards/tokens-00000-00.h5") as file:
        assert file["tokens"][:].tolist() == flatten(documents)
    (index_without_tokens := folder / "lone.idx").touch()
    with raises_error("data.unusable_files", "1 of 2"):
        run_data_command(
            "inspect",
            [str(path), str(index_without_tokens), str(index_without_tokens)],
            None,
            None,
            "<|endoftext|>",
            packed=False,
        )


def test_inspect_and_verify_continue_after_unusable_paths(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "in").mkdir()
    write_nano_gpt(folder, encode_documents(tokenizer))
    (unsupported := tmp_path / "no").mkdir()
    np.arange(99, dtype="<u2").tofile(unsupported / "a.npy")
    write_arrow(tmp_path, [[5, EOS]])
    missing = tmp_path / "none.bin"
    truncated = tmp_path / "cut.bin"
    truncated.write_bytes(b"\x05\x00\x05")
    paths = [missing, unsupported, folder, truncated, tmp_path / "a.arrow", unsupported / "a.npy"]
    for action in ("inspect", "verify"):
        with raises_error("data.unusable_files", "4 of 6"):
            run_data_command(action, [*map(str, paths)], None, str(tokenizer), "<|endoftext|>", packed=False)
        *lines, summary = capsys.readouterr().out.splitlines()
        # in total, usable in place, must be copied, unusable
        assert re.findall(r"\d+", summary) == ["6", "1", "1", "4"]
        output = "\n".join(lines)
        assert f"error[data.missing_file]: {missing}: " in output and "nanoGPT .bin" in output and "Arrow" in output
        assert f"error[data.no_files]: {unsupported}: " in output and "  a.npy: " in output
        assert f"error[data.unknown_format]: {unsupported}/a.npy " in output and "NAME.bin" in output
        assert f"error[data.damaged_file]: {truncated} " in output
    run_data_command("inspect", [str(folder)], None, None, "<|endoftext|>", packed=False)
    assert re.findall(r"\d+", capsys.readouterr().out.splitlines()[-1]) == ["1", "1", "0", "0"]


@pytest.mark.parametrize(
    ("header", "expected_text"),
    [
        ((20240522, 1, 10042, 1000), "evaluation file"),
        ((20240326, 5, 1024, 50257, 12, 12, 768, 50304), "a model"),
        ((20240328, 2, 50257, 50256), "a tokenizer"),
        ((20251231, 1, 7), "20251231"),
    ],
)
def test_files_of_llm_c_without_training_tokens_are_rejected(
    header: tuple[int, ...], expected_text: str, tmp_path: Path
) -> None:
    header_numbers = np.zeros(256, "<i4")
    header_numbers[: len(header)] = header
    path = tmp_path / "hellaswag_val.bin"
    path.write_bytes(header_numbers.tobytes() + np.arange(5000, dtype="<u2").tobytes())
    with raises_error("data.not_tokens", path, expected_text):
        inspect_token_file(str(path))


@pytest.mark.parametrize(
    ("content", "format_name"),
    [
        (b"PK\x03\x04" + bytes(60), "zip"),
        (gzip.compress(bytes(1000), mtime=0), "gzip"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "pickle"),
        (b"plain text, perhaps a README. " * 10, "text"),
        (b"\x93NUMPY\x01\x00" + bytes(60), "NumPy"),
    ],
    ids=["zip", "gzip", "pickle", "text", "numpy"],
)
def test_a_file_of_another_format_is_not_read_as_tokens_without_a_header(
    content: bytes, format_name: str, tmp_path: Path
) -> None:
    (path := tmp_path / "pytorch_model.bin").write_bytes(content + bytes(len(content) % 2))
    with raises_error("data.not_tokens", path, format_name):
        inspect_token_file(str(path))


@pytest.mark.parametrize(
    "first_tokens", [(93, 0, 7, 9, 11, 0, 256), (640, 0x717D, 5), (1152, 0x295, 8), (20304, 98, 9)]
)
def test_tokens_that_resemble_a_short_magic_number_are_read(first_tokens: tuple[int, ...], tmp_path: Path) -> None:
    np.array([*first_tokens, *range(1000)], "<u2").tofile(path := tmp_path / "a.bin")
    assert inspect_token_file(str(path)).tokens == len(first_tokens) + 1000


def test_hdf5_links_are_not_followed(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "h.h5", "w") as file:
        file["other"] = np.arange(90, 100, dtype="<u2")
        file["tokens"] = h5py.SoftLink("/other")
        file.create_dataset("input_ids", data=np.arange(8, dtype="<u2"), chunks=(4,))
    file = inspect_token_file(str(path))
    assert file.tokens == 8 and np.concatenate(list(file.iterate_blocks())).tolist() == [*range(8)]


def test_an_hdf5_dataset_with_missing_chunks_is_rejected(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "h.h5", "w") as file:
        file.create_dataset("tokens", (95,), "<u2", chunks=(10,))[:90] = 7
    with raises_error("data.damaged_file", path, "tokens", 95, 180):
        inspect_token_file(str(path))
    with h5py.File(path, "a") as file:
        file["tokens"][90:] = 8
    assert np.concatenate(list(inspect_token_file(str(path)).iterate_blocks())).tolist() == [7] * 90 + [8] * 5


def test_arrow_with_an_invalid_column_name_is_rejected(tmp_path: Path) -> None:
    path = write_arrow(tmp_path, [[1, EOS]])
    path.write_bytes(path.read_bytes().replace(b"input_ids", b"input_\xfbds"))
    with raises_error("data.damaged_file", path):
        inspect_token_file(str(path))


def check_rejected(path: Path, tokenizer: Path, code: str, *expected_texts: object) -> None:
    """Check that the stages reject a file with this error, whose message contains the expected texts."""
    with raises_error(code, path.parent, *expected_texts):
        run_stages(make_config(str(path), tokenizer), path.parent / "rejected")


def test_arrow_lists_of_fixed_size_and_sliced_tables_are_read(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for list_type in (pyarrow.list_(pyarrow.int32(), 3), pyarrow.large_list(pyarrow.int64())):
        table = pyarrow.table({"input_ids": pyarrow.array([[0, 0, 0], *rows], list_type)}).slice(1)
        with pyarrow.ipc.new_file(str(path := tmp_path / "a.arrow"), table.schema) as file:
            file.write_table(table, max_chunksize=2)
        assert [document.tolist() for document in inspect_token_file(str(path)).iterate_documents(EOS)] == rows


@pytest.mark.parametrize("write", MAPPABLE_WRITERS)
def test_a_large_file_is_split_into_ranges_that_each_have_a_hash(
    write: Writer, tokenizer: Path, tmp_path: Path
) -> None:
    documents = encode_documents(tokenizer, 400)
    path = write(tmp_path, documents)
    manifests = []
    for shard_tokens in (1024, 1 << 20):
        data_dir = tmp_path / f"data-{shard_tokens}"
        run_stages(make_config(str(path), tokenizer, shard_tokens=shard_tokens), data_dir)
        manifests.append(load_manifest(data_dir))
    split_manifest, unsplit_manifest = manifests
    assert len(split_manifest.train) > 4 and len(split_manifest.held_out) == 2
    assert len(unsplit_manifest.train) == len(unsplit_manifest.held_out) == 1
    split_entries = (*split_manifest.train, *split_manifest.held_out)
    assert max(entry.tokens for entry in split_entries) <= 1024
    for manifest in manifests:
        entries = (*manifest.train, *manifest.held_out)
        tokens_of_entries = [map_arrays(entry, Path(entry.file))["tokens"].tolist() for entry in entries]
        assert flatten(tokens_of_entries) == flatten(documents)
        assert sum(entry.documents for entry in entries) == len(documents)
        bounds = [bound for entry in entries for bound in entry.part or ()]
        # Each range of bytes begins at the end of the previous range.
        assert bounds == [0, *(bound for bound in bounds[1:-1:2] for _ in range(2)), path.stat().st_size]
    compared_fields = {"documents", "held_out_documents", "train_tokens", "held_out_tokens", "held_out_bytes"}
    assert split_manifest.model_dump(include=compared_fields) == unsplit_manifest.model_dump(include=compared_fields)

    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    content[split_manifest.train[2].offset] ^= 1
    path.write_bytes(content)
    damaged_entries = [entry for entry in split_entries if entry.find_problem(path)]
    assert damaged_entries == [split_manifest.train[2], split_manifest.held_out[1]]


def test_an_unused_loss_mask_is_reported(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_datatrove(tmp_path, encode_documents(tokenizer))
    (tmp_path / "d.ds.loss").write_bytes(bytes(path.stat().st_size // 4))
    warning = f"{path}.loss is not used"
    run_data_command("inspect", [str(path)], None, None, "<|endoftext|>", packed=False)
    assert warning in capsys.readouterr().out
    lines: list[str] = []
    TokensFolder(make_config(str(path), tokenizer), tmp_path / "data").prepare(lines.append)
    assert any(warning in line for line in lines)


def test_files_that_a_run_cannot_use_are_rejected(tokenizer: Path, tmp_path: Path) -> None:
    documents = encode_documents(tokenizer)
    check_rejected(write_arrow(tmp_path, documents), tokenizer, "data.not_mappable", "Arrow", "data import")
    check_rejected(write_megatron(tmp_path, documents, "int64"), tokenizer, "data.not_mappable", "int64")
    file_without_eos = write_megatron(tmp_path, [document[:-1] for document in documents])
    check_rejected(file_without_eos, tokenizer, "data.unended_documents", "60 documents", "data import")
    file_with_wrong_id = write_nano_gpt(tmp_path, [[5, 6, VOCAB, EOS]])
    check_rejected(file_with_wrong_id, tokenizer, "data.token_out_of_range", "token 2", VOCAB)
    (empty_file := tmp_path / "e.bin").touch()
    check_rejected(empty_file, tokenizer, "data.missing_file", empty_file)


def test_text_gives_the_same_tokens_from_arrow_tar_and_jsonl(tmp_path: Path) -> None:
    texts = [f"document number {i} " + "word " * (i % 17) for i in range(80)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for number, text in enumerate(texts):
            content = text.encode() if number % 2 else json.dumps({"text": text}).encode()
            member = tarfile.TarInfo(f"{number:04}.{'txt' if number % 2 else 'json'}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    tokens = []
    for ending in ("jsonl", "arrow", "tar"):
        data = DataConfig(
            source=str(tmp_path / f"t.{ending}"),
            tokenizer=TokenizerConfig(vocab_size=300, train_bytes=20_000),
            held_out=0.2,
            shard_tokens=1 << 20,
        )
        run_stages(data, folder := tmp_path / ending, TextFolder)
        manifest = load_manifest(folder)
        tokens.append([sorted(read_entries(folder, entries)) for entries in (manifest.train, manifest.held_out)])
        assert manifest.documents == 80
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("write", [writer for writer in WRITERS if writer is not write_nano_gpt])
def test_a_truncated_file_is_rejected(write: Writer, tmp_path: Path) -> None:
    """Remove a few bytes, a third, or all but 600 bytes from the end.

    A nanoGPT file does not contain its length. It is rejected only if half a token remains, which the end of the test
    checks. A tar file ends with zeros that may be missing, so more bytes must be removed from it.
    """
    path = write(tmp_path, [[*range(1, 200), EOS]] * 5)
    content = path.read_bytes()
    for removed_bytes in (3000 if write is write_webdataset_tar else 4, len(content) // 3, len(content) - 600):
        path.write_bytes(content[:-removed_bytes])
        with raises_error("data.damaged_file", path.stem):
            list(inspect_token_file(str(path)).iterate_documents(EOS))
    (three_bytes := tmp_path / "odd.bin").write_bytes(b"abc")
    with raises_error("data.damaged_file", three_bytes):
        inspect_token_file(str(three_bytes))


def test_a_damaged_tar_header_is_rejected_and_does_not_end_the_file(tmp_path: Path) -> None:
    path = write_webdataset_tar(tmp_path, [[1, EOS]] * 5)
    content = bytearray(path.read_bytes())
    content[2048 + 150] ^= 255  # the checksum of the second array's header
    path.write_bytes(content)
    with raises_error("data.damaged_file", path):
        list(inspect_token_file(str(path)).iterate_documents(EOS))


@pytest.mark.parametrize("dtype", ["<u4", "<i4", "<i8"])
def test_token_ids_wider_than_uint16_without_a_header_are_rejected(dtype: str, tmp_path: Path) -> None:
    (np.arange(108_000) % 100_000).astype(dtype).tofile(path := tmp_path / "w.bin")
    with raises_error("data.wrong_token_width", path):
        inspect_token_file(str(path))
    file = inspect_token_file(str(write_nano_gpt(tmp_path, [[*range(100, 300), EOS]] * 9)))
    with raises_error("data.wrong_token_width", "70,000"):
        scan_tokens(file, EOS, 70_000)


def test_a_file_without_a_document_end_near_its_end_is_not_split(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    unsplittable = write_nano_gpt(tmp_path / "one", [[*[5] * 9, EOS], [*[6] * 200_000, EOS]])
    with raises_error("data.no_held_out", "data.held_out: 0"):
        run_stages(make_config(str(unsplittable), tokenizer), tmp_path / "rejected")
    log: list[str] = []
    splittable = write_nano_gpt(tmp_path, encode_documents(tokenizer, 600))
    data = make_config([str(unsplittable), str(splittable)], tokenizer, held_out=0.02)
    folder = TokensFolder(data, tmp_path / "data")
    folder.prepare(log.append)
    folder.shard(0, 1, log.append)
    assert folder.finalize(log.append)
    manifest = load_manifest(tmp_path / "data")
    assert manifest.train[0].tokens == 200_011 and {entry.file for entry in manifest.held_out} == {str(splittable)}
    assert any(line.startswith("shard: nothing is held out") and str(unsplittable) in line for line in log)
    run_stages(make_config(str(unsplittable), tokenizer, held_out=0), tmp_path / "none")


def test_a_column_major_array_is_read_in_rows(tmp_path: Path) -> None:
    np.save(content := io.BytesIO(), np.asfortranarray(np.arange(6).reshape(2, 3)))
    with tarfile.open(path := tmp_path / "f.tar", "w") as tar:
        member = tarfile.TarInfo("0.npy")
        member.size = len(content.getvalue())
        tar.addfile(member, io.BytesIO(content.getvalue()))
    assert [document.tolist() for document in inspect_token_file(str(path)).iterate_blocks()] == [list(range(6))]


def test_the_start_of_held_out_tokens_is_searched_once_for_all_ranges(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_config(str(write_megatron(tmp_path, encode_documents(tokenizer, 400))), tokenizer, shard_tokens=1024)
    TokensFolder(data, tmp_path / "data").prepare(print)
    searched_files: list[TokenFile] = []
    original_search = TokensFolder._find_held_out_start

    def record_and_search(folder: TokensFolder, file: TokenFile, eos_id: int) -> int:
        searched_files.append(file)
        return original_search(folder, file, eos_id)

    monkeypatch.setattr(TokensFolder, "_find_held_out_start", record_and_search)
    folder = TokensFolder(data, tmp_path / "data")
    folder.shard(0, 1, print)
    assert folder.finalize(print) and folder.unit_count > 4 and len(searched_files) == 1
    assert len(load_manifest(tmp_path / "data").held_out) == 2


@pytest.mark.parametrize("write", [write_megatron, write_datatrove])
def test_a_task_reads_its_part_of_an_index_and_detects_a_change(
    write: Writer, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = encode_documents(tokenizer, 4000)
    data = make_config(str(write(tmp_path, documents)), tokenizer, shard_tokens=1024)
    TokensFolder(data, tmp_path / "data").prepare(print)
    bytes_read: list[int] = []
    original_read = DocumentEnds.read_numbers

    def read_and_record_size(*arguments: Any) -> Any:
        numbers = original_read(*arguments)
        bytes_read.append(numbers.nbytes)
        return numbers

    monkeypatch.setattr(DocumentEnds, "read_numbers", read_and_record_size)
    monkeypatch.setattr("data_prep.token_files.BLOCK_TOKENS", 256)
    folder = TokensFolder(data, tmp_path / "data")
    (tmp_path / "data/shards").mkdir()
    index = next(path for path in tmp_path.iterdir() if path.suffix in (".idx", ".index"))
    units = folder.unit_count
    assert units > 40 and folder.build_unit(units // 2)
    assert sum(bytes_read) < index.stat().st_size / 8, "much more than the unit's part of the index was read"
    entry = json.loads(folder.unit_path(units // 2).read_bytes())["train"][0]
    ends = np.cumsum([len(document) for document in documents])
    start = entry["offset"] // (2 if write is write_megatron else 4)  # bytes per token
    assert entry["documents"] == np.count_nonzero((ends > start) & (ends <= start + entry["tokens"]))

    index.write_bytes(index.read_bytes())  # the modification time changes
    assert str(index) in str(folder.find_prepare_problem())
    with raises_error("data.input_changed", index, kind=InputError):
        folder.build_unit(0)
    assert folder.load_unit(units // 2) is not None
    TokensFolder(data, tmp_path / "data").prepare(print)
    prepared_again = TokensFolder(data, tmp_path / "data")
    assert prepared_again.load_unit(units // 2) is None, "the unit of the old index was reused"
    prepared_again.shard(0, 1, lambda _: None)
    assert prepared_again.finalize(print) and load_manifest(tmp_path / "data").documents == len(documents)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=9), st.data())
def test_the_document_ends_in_a_range_equal_the_sums_of_sequence_lengths(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]], data: st.DataObject
) -> None:
    """`sequences` contains, for each document, the lengths of its sequences. A document may have none."""
    folder = tmp_path_factory.mktemp("one")
    path = write_megatron(folder, [[5] * length for lengths in sequences for length in lengths] + [[5]])
    document_indices = np.cumsum([0, *map(len, [*sequences, [1]])])
    count = int(document_indices[-1])
    index = path.with_suffix(".idx").read_bytes()
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, len(document_indices))
    # After the header of 34 bytes, the index has a length (4 bytes) and a start (8 bytes) for each sequence.
    arrays = index[34 : 34 + 12 * count] + document_indices.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(header + arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.token_files.BLOCK_TOKENS", 3)
        file = inspect_token_file(str(path))
    ends = np.cumsum([sum(lengths) for lengths in [*sequences, [1]]])
    start = data.draw(st.integers(0, int(ends[-1])))
    stop = data.draw(st.integers(start, int(ends[-1])))
    relative_ends = file.select_range(start, stop).find_document_ends(0, stop - start)
    assert relative_ends is not None and file.document_ends is not None and len(file.document_ends) == len(ends)
    assert relative_ends.tolist() == (ends[(ends > start) & (ends <= stop)] - start).tolist()


def test_an_index_that_is_damaged_after_its_check_is_rejected(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, [[*range(1, 9), EOS]] * 50)
    index = path.with_suffix(".idx")
    file = inspect_token_file(str(path))
    intact_index = index.read_bytes()
    with open(index, "r+b") as index_file:  # change one of the 51 document indices at the end of the file
        index_file.seek(-8 * 26, 2)
        index_file.write(struct.pack("<q", 49))
    with raises_error("data.damaged_file", index, "is damaged"):
        scan_tokens(file, EOS, VOCAB)
    index.write_bytes(intact_index[:600])
    with raises_error("data.damaged_file", index, "cut short"):
        scan_tokens(file, EOS, VOCAB)


def test_deduplicate_applies_to_the_text_of_a_mixture_and_needs_a_source_of_text(
    tokenizer: Path, tmp_path: Path
) -> None:
    for name in ("one.txt", "two.txt", "three.txt"):
        (tmp_path / name).write_text("the same" if name != "three.txt" else "another")
    sources = {
        "web": {
            "source": str(write_nano_gpt(tmp_path, encode_documents(tokenizer))),
            "records": "tokens",
            "held_out": 0.2,
        },
        "words": {"source": str(tmp_path / "*.txt"), "held_out": 0.0},
    }
    mixture = {"sources": sources, "weights": [{"weights": {"web": 1, "words": 1}}]}
    data_settings = {"mixture": mixture, "tokenizer": {"kind": "file", "path": tokenizer}, "deduplicate": True}
    folder = MixtureFolder(DataConfig.model_validate(data_settings), tmp_path / "data")
    folder.prepare(print)
    folder.shard(0, 1, print)
    assert folder.finalize(print)
    assert load_manifest(tmp_path / "data").duplicate_documents == 1
    sources["words"] = sources["web"]
    with pytest.raises(ValueError, match="deduplicate"):
        DataConfig.model_validate(data_settings)


def test_a_file_in_two_sources_of_a_mixture_is_rejected(tokenizer: Path, tmp_path: Path) -> None:
    path = write_nano_gpt(tmp_path, encode_documents(tokenizer))
    (tmp_path / "link.bin").symlink_to(path)
    sources = {name: {"source": str(tmp_path / file), "records": "tokens"} for name, file in
               (("web", "n.bin"), ("code", "link.bin"))}  # fmt: skip
    mixture = {"sources": sources, "weights": [{"weights": {"web": 1, "code": 1}}]}
    data = DataConfig.model_validate({"mixture": mixture, "tokenizer": {"kind": "file", "path": tokenizer}})
    with raises_error("data.duplicate_source", "n.bin", "web", "code"):
        MixtureFolder(data, tmp_path / "data").prepare(print)


def damage_content(content: bytes, generator: random.Random) -> bytes:
    """Return the content after one to four random changes: bytes are replaced, removed or inserted, or it is cut."""
    data = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        position = generator.randrange(max(1, min(len(data), generator.choice([64, 1 << 11, 1 << 30]))))
        match generator.randrange(5):
            case 0:
                data[position : position + 1] = bytes([generator.randrange(256)])
            case 1:
                del data[position:]
            case 2:
                data[position : position + 8] = generator.choice([b"\xff" * 8, b"\x00" * 8, b"\x00" * 7 + b"\x7f"])
            case 3:
                data[position:position] = generator.randbytes(generator.randint(1, 9))
            case _:
                del data[position : position + generator.randint(1, 9)]
    return bytes(data)


TOKEN_BYTES = {
    "write_megatron": 2, "write_llm_c": 2, "write_nano_gpt": 2, "write_hdf5": 2, "write_datatrove": 4, "write_arrow": 4,
    "write_webdataset_tar": 8,
}  # fmt: skip
"""Bytes per token in the files of each writer."""


def find_token_offsets(content: bytes, documents: Documents, width: int) -> list[int]:
    """Return the byte offset of each token in the content of a file; `width` is the number of bytes per token."""
    offsets = list[int]()
    end = 0
    for document in documents:
        start = content.index(np.array(document, f"<i{width}").tobytes(), end)
        end = start + len(document) * width
        offsets += range(start, end, width)
    return offsets


def find_changed_span(before: bytes, after: bytes) -> tuple[int, int]:
    """Return the range [start, end) of bytes of `before` that differ in `after`. All other bytes are the same."""

    def count_equal_bytes(pairs: list[tuple[int, int]]) -> int:
        """Return the number of equal pairs before the first pair that differs."""
        return next((count for count, (byte, other_byte) in enumerate(pairs) if byte != other_byte), len(pairs))

    start = count_equal_bytes([*zip(before, after, strict=False)])
    equal_at_end = count_equal_bytes([*zip(reversed(before), reversed(after), strict=False)])
    equal_at_end = min(equal_at_end, len(before) - start, len(after) - start)
    return start, len(before) - equal_at_end


def may_break_addresses(before: bytes, start: int, end: int, new_size: int) -> bool:
    """Return True if a change of the bytes [start, end) may have made addresses in an HDF5 file wrong.

    Version 0 of the format has no checksums, so a wrong address is not detected. Inserted or removed bytes move
    everything after them. The index of the chunks is a node ("TREE"): a header of 24 bytes, a key (24 bytes) and an
    address (8 bytes) for each entry, and a last key.
    """
    node = before.find(b"TREE\x01")
    keys_start = node + 24
    entries = int.from_bytes(before[node + 6 : node + 8], "little")
    keys_end = keys_start + 32 * entries + 24
    return new_size != len(before) or (node >= 0 and start < keys_end and keys_start < end)


@pytest.mark.parametrize("write", WRITERS)
def test_damaged_files_are_rejected_or_read_correctly(write: Writer, tmp_path: Path) -> None:
    """Damage a file, or its index file, 125 times at random.

    Damage of a header, an index or a length must not move, add or remove a token, except in HDF5 and Arrow. Because no
    format has checksums, a token may have another value, but only if its own bytes were damaged.
    """
    generator = random.Random(write.__name__)
    documents = [[generator.randrange(1, VOCAB) for _ in range(generator.randrange(3, 30))] + [EOS] for _ in range(12)]
    path = write(tmp_path, documents)
    rejections = 0
    expected_tokens = flatten(documents)
    files = {file: file.read_bytes() for file in path.parent.iterdir()}
    width = TOKEN_BYTES.get(write.__name__)  # None if tokens are compressed, because no byte belongs to only one token
    offsets = find_token_offsets(files[path], documents, width) if width else []
    for _ in range(125):
        for original_file, content in files.items():
            original_file.write_bytes(content)
        damaged_file = generator.choice(sorted(files))
        before = files[damaged_file]
        damaged_file.write_bytes(after := damage_content(before, generator))
        try:
            file: TokenFile = inspect_token_file(str(path))
            tokens = [token for document in file.iterate_documents(EOS) for token in document.tolist()]
            scan_tokens(file, EOS, VOCAB)
        except UserError as error:
            assert str(tmp_path) in str(error)
            rejections += 1
            continue
        if file.format == NANO_GPT:  # a file of this format does not contain its length
            assert write is write_nano_gpt or len(after) < 1024, "a file with the header of llm.c was read as nanoGPT"
            assert tokens == np.frombuffer(after, "<u2").tolist()
            continue
        start, end = find_changed_span(before, after)
        changed_tokens = [
            number for number, token in enumerate(expected_tokens) if [token] != tokens[number : number + 1]
        ]
        damaged_tokens = [
            number
            for number, offset in enumerate(offsets)
            if damaged_file == path and offset < end and start < offset + (width or 0)
        ]
        if "hdf5" in write.__name__ and may_break_addresses(before, start, end, len(after)):
            continue
        if write is write_arrow and (len(after) != len(before) or len(damaged_tokens) * 4 < end - start):
            continue  # bytes between the IDs were also damaged, and Arrow's messages have no checksums
        assert len(tokens) == len(expected_tokens), f"bytes {start} to {end} of {damaged_file.name}"
        assert {*changed_tokens} <= {*damaged_tokens}, (
            f"bytes {start} to {end} of {damaged_file.name}: {changed_tokens}"
        )
    assert rejections > 30


def test_many_small_files_share_work_units_and_give_the_same_manifest(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "in").mkdir()
    documents = encode_documents(tokenizer, 400)
    for number in range(40):
        write_nano_gpt(tmp_path, documents[10 * number : 10 * (number + 1)]).rename(folder / f"{number:02}.bin")
    write_nano_gpt(folder, documents).rename(folder / "large.bin")
    data = make_config(str(folder), tokenizer, shard_tokens=1024)
    run_stages(data, tmp_path / "single")
    folder_of_single_ranges = TokensFolder(data, tmp_path / "single")
    single_range_plan = folder_of_single_ranges.plan
    assert all(len(ranges) == 1 for ranges in single_range_plan.units) and folder_of_single_ranges.unit_count > 80
    monkeypatch.setattr("data_prep.tokens_folder.MANY_UNITS", 10)  # from then on, work units have several ranges
    for tasks in (1, 3):
        TokensFolder(data, tmp_path / str(tasks)).prepare(lambda _: None)
        for task in reversed(range(tasks)):
            TokensFolder(data, tmp_path / str(tasks)).shard(task, tasks, lambda _: None)
        assert TokensFolder(data, tmp_path / str(tasks)).finalize(lambda _: None)
    shared_plan = TokensFolder(data, tmp_path / "3").plan
    unit_tokens = [sum(token_range.end - token_range.start for token_range in ranges) for ranges in shared_plan.units]
    assert len(unit_tokens) < folder_of_single_ranges.unit_count / 3 and max(unit_tokens) <= 1024
    all_ranges = [token_range for ranges in shared_plan.units for token_range in ranges]
    assert all_ranges == [token_range for (token_range,) in single_range_plan.units]
    manifest, manifest_of_1_task, manifest_of_3_tasks = (
        load_manifest(tmp_path / name) for name in ("single", "1", "3")
    )
    assert manifest_of_1_task == manifest_of_3_tasks
    for field in ("train", "held_out", "documents"):
        assert getattr(manifest, field) == getattr(manifest_of_3_tasks, field)
    path = folder / "07.bin"
    path.write_bytes(path.read_bytes()[:-2])
    unit = next(
        number for number, ranges in enumerate(shared_plan.units) if 7 in {token_range.input for token_range in ranges}
    )
    TokensFolder(data, tmp_path / "3").unit_path(unit).unlink()
    with raises_error("data.input_changed", path, kind=InputError):
        TokensFolder(data, tmp_path / "3").build_unit(unit)
