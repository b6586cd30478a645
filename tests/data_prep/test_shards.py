"""Tests that documents become the same shards for any number of tasks, any format and any division into work units."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import work_units
from data_prep.text_folder import TextFolder
from data_prep.tokenizer import load_encoder
from data_prep.work_units import is_held_out
from pipeline.base.errors import InputError
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.data.manifest import Manifest, ShardEntry, load_manifest
from pipeline.run.code import CODE_ROOT as ROOT
from tests.support.errors import raises_error


def discard_log(_: str) -> None:
    """Ignore a log line."""


def make_data_config(source: Any, **options: Any) -> DataConfig:
    """Return a config with small shards and a small tokenizer."""
    tokenizer = TokenizerConfig(vocab_size=options.pop("vocab_size", 300), train_bytes=20_000)
    return DataConfig(source=source, tokenizer=tokenizer, **{"shard_tokens": 1024, "held_out": 0.2, **options})


def make_documents(count: int) -> list[str]:
    """Return different documents of up to about 2,000 characters.

    Some contain characters outside ASCII, or the name of the end-of-text token.
    """
    parts = ["def", "return", "self", "éü", "漢字", "<|endoftext|>", "\n\t", "{}", "0123", "import", "😀"]
    return [" ".join(parts[(i * 7 + j * j) % len(parts)] for j in range(i % 251 + 1)) + f"#{i}" for i in range(count)]


def write_jsonl(path: Path, documents: Sequence[str], field: str = "text") -> Path:
    """Write one JSON object per line, and a blank line after each tenth object. Return `path`."""
    lines = [json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(documents)]
    path.write_text("".join(line + ("\n\n" if i % 10 == 9 else "\n") for i, line in enumerate(lines)), "utf-8")
    return path


def build_shards(data: DataConfig, data_dir: Path, tasks: int = 1) -> Manifest:
    """Run prepare, all tasks of shard in reverse order, and finalize. Return the manifest."""
    run_prepare(data, data_dir, discard_log)
    for task in reversed(range(tasks)):
        run_shard_task(data, data_dir, task, tasks, discard_log)
    return run_finalize(data, data_dir, discard_log)


def run_prepare(data: DataConfig, data_dir: Path, log: Callable[[str], None]) -> None:
    """Run the prepare stage."""
    TextFolder(data, data_dir).prepare(log)


def run_shard_task(data: DataConfig, data_dir: Path, task: int, tasks: int, log: Callable[[str], None]) -> None:
    """Run one task of the shard stage."""
    TextFolder(data, data_dir).shard(task, tasks, log)


def run_finalize(data: DataConfig, data_dir: Path, log: Callable[[str], None]) -> Manifest:
    """Write the manifest of all units, as the last task of the shard stage does, and return it."""
    assert TextFolder(data, data_dir).finalize(log)
    return load_manifest(data_dir)


def build_unit(data: DataConfig, data_dir: Path, unit: int) -> bool:
    """Build one work unit. Return False if it exists already."""
    (data_dir / "shards").mkdir(exist_ok=True)
    return TextFolder(data, data_dir).build_unit(unit)


def count_units(data: DataConfig, data_dir: Path) -> tuple[int, int]:
    """Return the number of finished units and of all units."""
    return TextFolder(data, data_dir).measure_progress()[:2]


def read_all_files(data_dir: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder, including hidden files, by relative path."""
    return {str(path.relative_to(data_dir)): path.read_bytes() for path in data_dir.rglob("*") if path.is_file()}


def read_tokens(data_dir: Path, entry: ShardEntry) -> np.ndarray:
    """Return the tokens of a shard, which are read as the loader does: from the file, at the offset in the manifest."""
    return np.fromfile(data_dir / entry.file, entry.dtype, entry.tokens, offset=entry.offset)


def read_shard_documents(data_dir: Path, manifest: Manifest, entries: Sequence[ShardEntry]) -> list[list[int]]:
    """Return the documents of a split as lists of tokens, without the end-of-text token.

    The dataset `documents` of each file has the position at which each document starts. A document may continue in the
    next file. Also checks that HDF5 and a direct read of the file return the same tokens.
    """
    unfinished: list[int] = []
    documents: list[list[int]] = []
    for entry in entries:
        with h5py.File(data_dir / entry.file, "r") as file:
            tokens = file["tokens"][:]
            starts = file["documents"][:]
            assert file["tokens"].chunks is None and file["tokens"].compression is None
            assert (tokens.dtype, starts.dtype) == (np.dtype(entry.dtype), np.dtype(np.int64))
            assert file.attrs["tokenizer_sha256"].decode() == manifest.tokenizer_sha256
        np.testing.assert_array_equal(tokens, read_tokens(data_dir, entry))
        assert entry.offset % 8 == 0  # A memory map of the tokens is then aligned.
        assert 0 < len(tokens) == entry.tokens == starts[-1] and len(starts) == entry.documents + 1
        if starts[0]:
            assert unfinished, "the file starts inside a document, but the previous file has no unfinished document"
        bounds = [0, *starts] if starts[0] else starts
        for start, end in pairwise(bounds):
            if start == end:
                continue
            unfinished += tokens[start:end].tolist()
            if unfinished[-1] == manifest.eos_id:
                documents.append(unfinished[:-1])
                unfinished = []
    assert not unfinished
    return documents


def check_shards(data: DataConfig, data_dir: Path, manifest: Manifest, expected: Sequence[str]) -> None:
    """Check that the shards contain each nonempty document of `expected` once and in order, in the right split.

    The tokens of each document must be the same as when the document is encoded alone.
    """
    encoder = load_encoder(data_dir / "tokenizer.json", data.tokenizer.eos_token)
    for entries, held_out in ((manifest.train, False), (manifest.held_out, True)):
        texts = [text for text in expected if text and is_held_out(text.encode(), data.held_out) is held_out]
        tokens = [encoder.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        assert read_shard_documents(data_dir, manifest, entries) == tokens
        assert sum(entry.documents for entry in entries) == len(texts)
        assert sum(entry.bytes for entry in entries) == sum(len(text.encode()) for text in texts)
        assert all(entry.tokens <= data.shard_tokens for entry in entries)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide an input of a few kilobytes into several work units."""
    monkeypatch.setattr(work_units, "MIN_UNIT_BYTES", 64)


def test_any_number_of_tasks_writes_the_same_bytes(tmp_path: Path) -> None:
    expected = make_documents(150)
    write_jsonl(tmp_path / "a.jsonl", expected[:100])
    write_jsonl(tmp_path / "b.jsonl", expected[100:])
    data = make_data_config([str(tmp_path / "*.jsonl")])
    manifests = {tasks: build_shards(data, tmp_path / f"{tasks}", tasks) for tasks in (1, 2, 5)}
    assert len(list((tmp_path / "1" / "shards").glob("unit-*.json"))) > 4
    assert read_all_files(tmp_path / "1") == read_all_files(tmp_path / "2") == read_all_files(tmp_path / "5")
    check_shards(data, tmp_path / "1", manifests[1], expected)


def test_shards_built_at_different_times_have_the_same_bytes(tmp_path: Path) -> None:
    data = make_data_config([str(write_jsonl(tmp_path / "a.jsonl", make_documents(20)))])
    build_shards(data, tmp_path / "now")
    time.sleep(1.1)
    build_shards(data, tmp_path / "later")
    assert read_all_files(tmp_path / "now") == read_all_files(tmp_path / "later")


def test_all_formats_produce_the_same_tokens(tmp_path: Path) -> None:
    expected = make_documents(80)
    plain = write_jsonl(tmp_path / "a.jsonl", expected).read_bytes()
    half = len(plain) // 2
    # Two gzip members and two zstandard frames, like the output of `cat a.gz b.gz`.
    with open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(gzip.compress(plain[:half]) + gzip.compress(plain[half:]))
    with open(tmp_path / "a.jsonl.zst", "wb") as file:
        file.write(zstandard.compress(plain[:half]) + zstandard.compress(plain[half:]))
    for name, kind in (("a", pyarrow.string()), ("b", pyarrow.large_string())):
        table = pyarrow.table(
            {"id": range(80), "nested": [{"x": 1, "y": 2}] * 80, "text": pyarrow.array(expected, kind)}
        )
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
    (tmp_path / "tokenizer").mkdir()
    run_prepare(make_data_config([str(tmp_path / "a.jsonl")]), tmp_path / "tokenizer", discard_log)
    for ending in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"):
        # The source is a list of a glob that matches one file, and of a path.
        data = make_data_config([str(tmp_path / f"[a]{ending}"), str(tmp_path / "b.parquet")]).model_copy(
            update={"tokenizer": TokenizerConfig(kind="file", path=tmp_path / "tokenizer" / "tokenizer.json")}
        )
        manifest = build_shards(data, tmp_path / ending, 2)
        check_shards(data, tmp_path / ending, manifest, expected + expected)


text_lists = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=12)


@settings(max_examples=40)
@given(documents=text_lists, count=st.integers(1, 9))
def test_each_document_is_in_one_shard_for_any_number_of_units(
    documents: list[str], count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("units")
    documents.append("x")
    write_jsonl(folder / "a.jsonl", documents)
    data = make_data_config([str(folder / "a.jsonl")], max_rejected=0.0)
    if all(is_held_out(text.encode(), 0.2) for text in documents if text):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.prepare_text.count_units", lambda *_: count)
        manifest = build_shards(data, folder / "data")
    check_shards(data, folder / "data", manifest, documents)


def test_document_longer_than_a_shard_is_written_to_several_files(tmp_path: Path) -> None:
    long_document = "".join(chr(0x4E00 + i * 37 % 20000) for i in range(3000))
    expected = ["short", long_document, "", "short", "last"]
    data = make_data_config([str(write_jsonl(tmp_path / "a.jsonl", expected))], held_out=0.0, vocab_size=257)
    manifest = build_shards(data, tmp_path / "data")
    assert 0 in [entry.documents for entry in manifest.train]
    check_shards(data, tmp_path / "data", manifest, expected)


def test_no_empty_shard_is_written_if_the_last_shard_ends_with_a_document(tmp_path: Path) -> None:
    expected = ["a" * 1023, "b" * 1023]
    data = make_data_config([str(write_jsonl(tmp_path / "a.jsonl", expected))], held_out=0.0, vocab_size=257)
    manifest = build_shards(data, tmp_path / "data")
    assert [entry.tokens for entry in manifest.train] == [1024, 1024]
    assert manifest.held_out == ()
    check_shards(data, tmp_path / "data", manifest, expected)


def test_existing_units_are_kept_and_a_unit_with_a_damaged_shard_is_rebuilt(tmp_path: Path) -> None:
    data = make_data_config([str(write_jsonl(tmp_path / "a.jsonl", make_documents(60)))])
    manifest = build_shards(data, tmp_path / "data")
    original_files = read_all_files(tmp_path / "data")
    total = count_units(data, tmp_path / "data")[1]
    assert not any(build_unit(data, tmp_path / "data", unit) for unit in range(total))
    damaged_shard = tmp_path / "data" / manifest.train[0].file
    content = bytearray(damaged_shard.read_bytes())
    content[-1] ^= 1
    damaged_shard.write_bytes(content)
    assert [build_unit(data, tmp_path / "data", unit) for unit in range(total)].count(True) == 1
    assert read_all_files(tmp_path / "data") == original_files


def test_changed_config_rebuilds_all_units_and_removes_outdated_files(tmp_path: Path) -> None:
    source = [str(write_jsonl(tmp_path / "a.jsonl", make_documents(150)))]
    build_shards(make_data_config(source), tmp_path / "data")
    changed_data = make_data_config(source, shard_tokens=4096)
    with raises_error("data.outdated", tmp_path / "data/prepare.json", kind=InputError):
        run_shard_task(changed_data, tmp_path / "data", 0, 1, discard_log)
    build_shards(changed_data, tmp_path / "data", 2)
    build_shards(changed_data, tmp_path / "from_scratch")
    assert read_all_files(tmp_path / "data") == read_all_files(tmp_path / "from_scratch")


def test_shard_fails_if_an_input_has_changed_until_prepare_runs_again(tmp_path: Path, small_units: None) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    data = make_data_config([str(tmp_path / "*.jsonl")])
    run_prepare(data, tmp_path / "data", discard_log)
    path.write_bytes(path.read_bytes() + b'{"text": "one more"}\n')
    with raises_error("data.input_changed", path, kind=InputError):
        run_shard_task(data, tmp_path / "data", 0, 1, discard_log)
    write_jsonl(tmp_path / "b.jsonl", ["from a new file"])
    manifest = build_shards(data, tmp_path / "data")
    check_shards(data, tmp_path / "data", manifest, [*make_documents(30), "one more", "from a new file"])


document_counts = st.lists(st.integers(0, 30), min_size=1, max_size=6)


@settings(max_examples=10)
@given(
    old_counts=document_counts,
    changed_file=st.integers(0, 5),
    new_count=st.integers(0, 40),
    shard_tokens=st.sampled_from([1024, 2048, 8192]),
)
def test_changed_input_rebuilds_only_its_units_with_the_same_bytes_as_from_scratch(
    old_counts: list[int],
    changed_file: int,
    new_count: int,
    shard_tokens: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Files have `old_counts` documents. The file with index `changed_file` changes to `new_count` documents."""
    folder = tmp_path_factory.mktemp("changed")
    write_jsonl(folder / "vocabulary.jsonl", make_documents(40))
    run_prepare(make_data_config(str(folder / "vocabulary.jsonl")), folder / "tokenizer", discard_log)
    for index, count in enumerate([20, *old_counts]):
        write_jsonl(folder / f"part-{index}.jsonl", make_documents(count))
    tokenizer = TokenizerConfig(kind="file", path=folder / "tokenizer/tokenizer.json")
    data = make_data_config(str(folder / "part-*.jsonl"), shard_tokens=shard_tokens)
    data = data.model_copy(update={"tokenizer": tokenizer})
    build_shards(data, folder / "data", 2)
    (folder / "data/manifest.json").unlink()  # Inputs are checked only while the manifest is missing.
    old_plan = work_units.read_plan(folder / "data/units.json")
    write_jsonl(folder / f"part-{changed_file % len(old_counts) + 1}.jsonl", make_documents(new_count))
    lines: list[str] = []
    run_prepare(data, folder / "data", discard_log)
    run_shard_task(data, folder / "data", 0, 1, lines.append)
    run_finalize(data, folder / "data", discard_log)
    build_shards(data, folder / "from_scratch")
    assert read_all_files(folder / "data") == read_all_files(folder / "from_scratch")
    new_plan = work_units.read_plan(folder / "data/units.json")
    old_ranges, new_ranges = (
        [[(plan.inputs[number], *span) for number, *span in unit] for unit in plan.units]
        for plan in (old_plan, new_plan)
    )
    unchanged_units = [unit for unit, (old, new) in enumerate(zip(old_ranges, new_ranges, strict=False)) if old == new]
    assert [unit for unit, line in enumerate(lines) if "exists already" in line] == unchanged_units


def test_unit_fails_if_its_input_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from data_prep.tokenizer import Encoder

    path = write_jsonl(tmp_path / "a.jsonl", make_documents(5))
    data = make_data_config([str(path)])
    run_prepare(data, tmp_path / "data", discard_log)
    original_encode = Encoder.encode

    def change_input_and_encode(self: Encoder, batch: list[str]) -> list[np.ndarray]:
        os.utime(path, (1, 1))
        return original_encode(self, batch)

    monkeypatch.setattr(Encoder, "encode", change_input_and_encode)
    with raises_error("data.input_changed", path, kind=InputError):
        build_unit(data, tmp_path / "data", 0)
    assert count_units(data, tmp_path / "data")[0] == 0


def test_stages_succeed_after_the_source_is_removed_if_the_shards_exist(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(20))
    data = make_data_config([str(path)])
    build_shards(data, tmp_path / "data")
    original_files = read_all_files(tmp_path / "data")
    path.unlink()
    run_prepare(data, tmp_path / "data", discard_log)
    run_shard_task(data, tmp_path / "data", 0, 1, discard_log)
    run_finalize(data, tmp_path / "data", discard_log)
    assert read_all_files(tmp_path / "data") == original_files


def test_rejected_documents_are_listed_with_file_and_line(tmp_path: Path, small_units: None) -> None:
    valid_documents = make_documents(40)
    lines = [json.dumps({"text": text}).encode() for text in valid_documents]
    invalid_lines: dict[int, tuple[bytes, str]] = {  # by index in `lines`: the line and the expected reason
        0: (b"\xff", "invalid UTF-8: byte 0xff at byte 0"),
        7: (b'{"text": "cut', "broken JSON: Unterminated string"),
        8: (b'{"id": 3, "bo\\ud800dy": ""}', "no field 'text'; there are 'id', 'bo\\ud800dy'"),
        20: (b'{"text": null}', "field 'text' is not a string but NoneType"),
        33: (b'["text"]', "not a JSON object but list"),
        44: (b'{"text": "\\ud800"}', "field 'text' contains a lone surrogate"),
        45: (b"[" * 100_000, "JSON that nests more than 100 deep"),
    }
    for index in sorted(invalid_lines):
        lines.insert(index, invalid_lines[index][0])
    lines.insert(3, b"")  # A blank line is not a document, but it counts as a line.
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes("first\nsecond é\n".encode() + b"third \xe9\nfourth")
    chunk_with_null = pyarrow.array(["one", None, "three"]).cast(pyarrow.binary())
    chunk_with_invalid_utf8 = pyarrow.array([b"ok", b"\xc3", "漢".encode()])
    column = pyarrow.chunked_array([chunk_with_null, chunk_with_invalid_utf8]).cast(pyarrow.binary())
    table = pyarrow.table({"text": column})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=2)

    data = make_data_config([str(tmp_path / f"{name}*") for name in "abc"], max_rejected=0.5)
    # the blank line moves all lines after it
    expected = [
        (tmp_path / "a.jsonl", index + 1 + (index >= 3), reason) for index, (_, reason) in sorted(invalid_lines.items())
    ]
    expected += [
        (tmp_path / "b.txt", 3, "invalid UTF-8: byte 0xe9 at byte 22"),
        (tmp_path / "c.parquet", 2, "field 'text' is null"),
        (tmp_path / "c.parquet", 5, "invalid UTF-8: byte 0xc3 at byte 0"),
    ]
    manifest = build_shards(data, tmp_path / "data", 3)
    assert count_units(data, tmp_path / "data")[1] >= 4
    rows = [json.loads(line) for line in (tmp_path / "data" / "rejected.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in rows] == [(str(path), line) for path, line, _ in expected]
    for row, (_, _, reason) in zip(rows, expected, strict=True):
        assert row["reason"].startswith(reason)
    assert (manifest.rejected_documents, manifest.documents) == (10, 44)
    result = TextFolder(data, tmp_path / "data").describe_result()
    assert "10 documents rejected" in result
    assert "data/rejected.jsonl" in result
    check_shards(data, tmp_path / "data", manifest, [*valid_documents, "one", "three", "ok", "漢"])

    data_with_lower_limit = data.model_copy(update={"max_rejected": 0.18})  # 10 of 54 are 18.5 %
    expected_texts = (
        "10 of 54 documents",
        "18.52%",
        f"{tmp_path}/a.jsonl line 1",
        "invalid UTF-8",
        "data.max_rejected",
    )
    with raises_error("data.too_many_rejected", *expected_texts):
        run_finalize(data_with_lower_limit, tmp_path / "data", discard_log)
    run_finalize(data.model_copy(update={"max_rejected": 10 / 54}), tmp_path / "data", discard_log)


@pytest.mark.parametrize(
    ("valid", "invalid", "max_rejected", "is_accepted"),
    [
        (30, 1, 0.001, True),
        (9, 5, 0.001, True),
        (3, 3, 0.001, True),
        (3, 4, 0.001, False),  # more than half of the documents
        (60, 6, 0.001, False),  # more than five, which are always allowed
        (30, 1, 0.0, False),  # 0 allows no unreadable document
    ],
)
def test_a_few_unreadable_documents_are_accepted_in_small_inputs(
    valid: int, invalid: int, max_rejected: float, is_accepted: bool, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(valid))
    with open(path, "a") as file:
        file.write("{broken\n" * invalid)
    data = make_data_config(str(path), max_rejected=max_rejected, held_out=0.0)
    if is_accepted:
        assert build_shards(data, tmp_path / "data").rejected_documents == invalid
        return
    with raises_error("data.too_many_rejected", f"{invalid} of {valid + invalid} documents", "data.max_rejected"):
        build_shards(data, tmp_path / "data")
    assert len((tmp_path / "data/rejected.jsonl").read_text().splitlines()) == invalid


def test_held_out_documents_have_the_configured_fraction_and_depend_only_on_the_text(tmp_path: Path) -> None:
    expected = [f"document {i}" for i in range(2000)] * 2  # each document twice, 2,000 lines apart
    data = make_data_config([str(write_jsonl(tmp_path / "a.jsonl", expected))], held_out=0.1)
    manifest = build_shards(data, tmp_path / "data")
    fraction = manifest.held_out_documents / manifest.documents
    assert abs(fraction - 0.1) < 4 * (0.1 * 0.9 / 2000) ** 0.5  # four standard deviations
    check_shards(data, tmp_path / "data", manifest, expected)
    # The SHA-256 of this document starts with 1a5d, which is 0.10299 as a fraction of all hashes.
    assert is_held_out(b"document 12", 0.1030)
    assert not is_held_out(b"document 12", 0.1029)


@pytest.mark.parametrize(
    ("documents", "options", "expected_texts"),
    [
        (["a", "b"], {"held_out": 0.999999}, ["data.held_out (0.999999)"]),
        (["", ""], {"held_out": 0.0}, ["a.jsonl", "data.held_out (0.0)"]),
        (["a", "b"], {"text_field": "body"}, ["a.jsonl line 1", "'body'", "'id', 'text'", "data.text_field"]),
        (None, {}, ["a.jsonl line 1", "JSON"]),  # None: a CSV table in a file named .jsonl
    ],
)
def test_prepare_fails_if_no_document_is_left_to_train_on(
    tmp_path: Path, documents: list[str] | None, options: Any, expected_texts: list[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents or [])
    if documents is None:
        path.write_text("name,text\n1,a table\n")
    data = make_data_config([str(path)], **options)
    with raises_error("data.no_documents", *expected_texts):
        run_prepare(data, tmp_path / "data", discard_log)
    assert not (tmp_path / "data/prepare.json").exists()


def test_no_file_remains_in_the_folder_of_shards_if_a_write_fails(tmp_path: Path) -> None:
    """Limit the size of files, so that writes fail as on a full disk."""
    data = make_data_config([str(write_jsonl(tmp_path / "a.jsonl", make_documents(150)))], shard_tokens=100_000)
    run_prepare(data, tmp_path / "data", discard_log)
    (tmp_path / "data/shards").mkdir()
    script = (
        "import resource, signal, sys; from pathlib import Path; from pipeline.config.sections import DataConfig\n"
        "from data_prep.text_folder import TextFolder\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "for limit in (0, 100, 2048, 4096, 20_000):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "    try: TextFolder(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])).build_unit(0)\n"
        "    except OSError as error: print(limit, error.errno)\n"
    )
    command = [sys.executable, "-c", script, data.model_dump_json(), str(tmp_path / "data")]
    child = subprocess.run(command, cwd=ROOT, timeout=240, capture_output=True, text=True)
    expected = "".join(f"{limit} {errno.EFBIG}\n" for limit in (0, 100, 2048, 4096, 20_000))
    assert (child.returncode, child.stdout, child.stderr) == (0, expected, "")
    assert list((tmp_path / "data" / "shards").iterdir()) == []


def test_python_stdlib_is_read_without_its_tests_and_installed_packages(tmp_path: Path) -> None:
    data = DataConfig(source="python-stdlib", tokenizer=TokenizerConfig(vocab_size=300, train_bytes=50_000))
    run_prepare(data, tmp_path / "data", discard_log)
    plan = work_units.read_plan(tmp_path / "data" / "units.json")
    assert len(plan.units) == 4
    names = [Path(source.path).parts for source in plan.inputs]
    assert not [parts for parts in names if {"site-packages", "dist-packages", "test", "tests"} & set(parts)]
    assert any(parts[-2:] == ("json", "decoder.py") for parts in names)
    assert build_unit(data, tmp_path / "data", 3)
