"""Tests of the input files that a config names, their split into work units, and the sample for the tokenizer."""

from __future__ import annotations

import builtins
import errno
import gzip
import io
import os
import tarfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.documents import Document, Input, read_documents, read_row_group_sizes
from data_prep.find_inputs import find_inputs, list_files
from data_prep.prepare_text import take_sample
from data_prep.text_folder import TextFolder, make_batches
from data_prep.work_units import MIN_UNIT_BYTES, count_units, measure_inputs, split_into_units
from pipeline.config.datasets import DataConfig, TokenizerConfig
from tests.support.errors import raises_error


def make_input(path: Path, file_format: str) -> Input:
    """Return the input for a file, with a given format."""
    stat = path.stat()
    return Input(str(path), stat.st_size, stat.st_mtime_ns, file_format)


def read_texts(path: Path, file_format: str) -> list[str]:
    """Return the texts of all documents of a file."""
    source = make_input(path, file_format)
    return [document.text for document in read_documents(source, 0, path.stat().st_size, "text")]


def list_paths(source: Path) -> list[str]:
    """Return the paths of the inputs that a source names."""
    return [source.path for source in find_inputs(DataConfig(source=str(source)))]


@settings(max_examples=150)
@given(content=st.binary(max_size=80).map(lambda data: bytes(b"ab\r\n\xff"[byte % 5] for byte in data)), data=st.data())
def test_input_ranges_yield_every_line_once_with_its_number(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(content)
    boundaries = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content)), max_size=6))})
    source = make_input(path, "lines")
    documents = []
    lines_before = 0
    for start, end in pairwise(boundaries):
        range_documents = list(read_documents(source, start, end, "text"))
        documents += [
            (lines_before + document.line, document.text, document.reason is None) for document in range_documents
        ]
        lines_before += len(range_documents)
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    expected = []
    for number, line in enumerate(lines, 1):
        is_valid = b"\xff" not in line
        text = (line[:-1] if line.endswith(b"\r") else line).decode() if is_valid else ""
        expected.append((number, text, is_valid))
    assert documents == expected


FORMATS = st.sampled_from(["text", "lines", "jsonl", "gzip", "parquet"])


@settings(max_examples=200)
@given(
    files=st.lists(st.tuples(FORMATS, st.lists(st.integers(0, 2000), min_size=1, max_size=4)), min_size=1, max_size=12),
    count=st.integers(1, 10),
)
def test_units_cover_every_input_once_and_in_order(files: list[tuple[str, list[int]]], count: int) -> None:
    inputs = [Input(f"f{index}", sizes[0], 0, file_format) for index, (file_format, sizes) in enumerate(files)]
    row_groups = {index: sizes for index, (file_format, sizes) in enumerate(files) if file_format == "parquet"}
    weights = [row_groups.get(index, [source.text_bytes]) for index, source in enumerate(inputs)]
    units = split_into_units(inputs, weights, count)
    assert len(units) <= count and all(units)
    ranges = [input_range for unit in units for input_range in unit]
    assert ranges == sorted(ranges)
    for index, source in enumerate(inputs):
        spans = [(start, end) for number, start, end in ranges if number == index]
        length = len(row_groups[index]) if source.format == "parquet" else source.size
        if length == 0:
            assert spans == []
            continue
        assert (spans[0][0], spans[-1][1]) == (0, length)
        assert all(end == next_start for (_, end), (next_start, _) in pairwise(spans))
        assert all(start < end for start, end in spans)
        if source.format in ("text", "gzip"):
            assert len(spans) == 1
    total = sum(map(sum, weights))
    if all(source.splits for source in inputs) and total >= count:
        unit_sizes = [sum(end - start for _, start, end in unit) for unit in units]
        # a boundary may be moved by up to a 64th of a unit
        assert max(unit_sizes) - min(unit_sizes) <= max(1, 2 * (total // count // 64) - 1)


def test_a_file_that_grows_a_little_does_not_change_how_other_files_are_split() -> None:
    old_inputs = [Input(f"f{index}", 1_000_003 * (index + 1), 0, "jsonl") for index in range(9)]
    new_inputs = [source._replace(size=source.size + 40 * (source.path == "f4")) for source in old_inputs]

    def split_other_files(inputs: list[Input]) -> list[Any]:
        """Return the ranges of each work unit, except those of file 4."""
        units = split_into_units(inputs, measure_inputs(inputs, "text"), 23)
        return [[input_range for input_range in unit if input_range.input != 4] for unit in units]

    assert split_other_files(old_inputs) == split_other_files(new_inputs)


def test_a_file_of_ten_terabytes_is_split_without_reading_it() -> None:
    """Use a file that does not exist, so that opening it is an error."""
    inputs = [Input("/nowhere/all.jsonl", 10**13, 0, "jsonl")]
    weights = measure_inputs(inputs, "text")
    units = split_into_units(
        inputs, weights, count_units(sum(map(sum, weights)), shard_tokens=500_000_000, bytes_per_token=4.0)
    )
    ranges = [input_range for unit in units for input_range in unit]
    assert 4_000 < len(units) < 8_000
    assert [input_range.start for input_range in ranges[1:]] == [input_range.end for input_range in ranges[:-1]]
    assert (ranges[0].start, ranges[-1].end) == (0, 10**13)
    sizes = [input_range.end - input_range.start for input_range in ranges]
    assert max(sizes) < 1.1 * min(sizes)


def test_the_unit_count_depends_on_the_shard_size_and_units_have_a_minimum_size() -> None:
    # The arguments are the bytes of text, the tokens of a shard, and the bytes per token.
    assert count_units(10, 1_000_000, 4.0) == 1
    assert count_units(2 * MIN_UNIT_BYTES, 1_000_000, 4.0) == 2
    assert count_units(4_000_000, 10_000_000, 4.0) == 4
    assert count_units(4_000_000_000, 10_000_000, 4.0) == 112  # 100 full shards, with a tenth of each unused


def test_globs_are_sorted_and_a_file_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "sub/d.txt", "folder.txt/e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    inputs = find_inputs(DataConfig(source=["c.jsonl", "**/*.txt", "a.txt"]))
    assert [os.path.relpath(source.path, tmp_path) for source in inputs] == ["c.jsonl", "a.txt", "b.txt", "sub/d.txt"]
    assert [source.format for source in inputs] == ["jsonl", "text", "text", "text"]
    assert find_inputs(DataConfig(source="a.txt", text_documents="line"))[0].format == "lines"
    assert all(os.path.isabs(source.path) for source in inputs)


def test_an_existing_name_with_glob_characters_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "part[1].txt").write_text("x")
    assert len(find_inputs(DataConfig(source=str(tmp_path / "part[1].txt")))) == 1


def test_a_source_that_cannot_be_used_is_an_error_that_names_it(tmp_path: Path) -> None:
    with raises_error("data.no_files", "data.source", "'nothing/*.txt'"):
        find_inputs(DataConfig(source="nothing/*.txt"))
    with raises_error("data.no_files", "data.source", "'missing.jsonl'"):
        find_inputs(DataConfig(source=["missing.jsonl"]))
    (tmp_path / "data.md").write_text("x")
    with raises_error("data.no_files", ".txt, .jsonl", "data.md: text\n"):
        find_inputs(DataConfig(source=str(tmp_path / "*")))
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with raises_error("data.unreadable_file", tmp_path / "gone.txt", "No such file"):
        find_inputs(DataConfig(source=str(tmp_path / "*.txt")))
    (tmp_path / "empty.txt").write_text("")
    with raises_error("data.no_text", tmp_path / "empty.txt"):
        TextFolder(DataConfig(source=str(tmp_path / "empty.txt")), tmp_path / "data").prepare(print)


def test_text_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = " first\r\n\ufeffsecond\x00\u2028\n\n"
    path.write_bytes(text.encode())
    assert read_texts(path, "text") == [text]
    assert read_texts(path, "lines") == [" first", "\ufeffsecond\x00\u2028", ""]


def test_lines_of_a_zstd_file_do_not_depend_on_the_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.file_type._BLOCK_BYTES", 5)
    path = tmp_path / "a.jsonl.zst"
    content = "".join(f'{{"text": "é{i}"}}\n' for i in range(300)).encode()
    path.write_bytes(
        zstandard.compress(content[:1000]) + zstandard.compress(b"") + zstandard.compress(content[1000:-1])
    )
    assert read_texts(path, "zstd") == [f"é{i}" for i in range(300)]


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "replaced"])
def test_a_damaged_compressed_file_is_an_error_that_names_it(tmp_path: Path, ending: str, damage: str) -> None:
    path = tmp_path / f"a{ending}"
    content = b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(5000))
    if ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [str(i * i) for i in range(5000)]}), path)
    elif ending == ".jsonl.gz":
        path.write_bytes(gzip.compress(content))
    else:
        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(content))
    intact = path.read_bytes()
    position = len(intact) // 3
    damaged_contents = {
        "truncated": intact[:-20],
        "overwritten": intact[:position] + b"\0\1\2" * 9 + intact[position + 27 :],
        "replaced": b"x",
    }
    path.write_bytes(damaged_contents[damage])
    file_format = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix, "parquet")
    with raises_error("data.damaged_file", path):
        end = len(read_row_group_sizes(str(path), "text")) if ending == ".parquet" else path.stat().st_size
        list(read_documents(make_input(path, file_format), 0, end, "text"))


def test_parquet_without_a_text_column_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), path)
    with raises_error("data.no_column", path, "'text'", "data.text_field", "id, body"):
        read_row_group_sizes(str(path), "text")
    with raises_error("data.wrong_column_type", path, "'id'", "data.text_field", "int64"):
        read_row_group_sizes(str(path), "id")


def sample_texts(data: DataConfig, limit: int) -> list[str]:
    """Return a sample of the texts of all inputs of a config: at most `limit` bytes."""
    inputs = find_inputs(data)
    return take_sample(data, inputs, measure_inputs(inputs, "text"), limit)


def test_the_sample_is_spread_over_the_source_without_held_out_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i:05d}\n" for i in range(10_000)))
    data = DataConfig(source=str(path), text_documents="line", held_out=0.0, tokenizer=TokenizerConfig(vocab_size=300))
    inputs = find_inputs(data)
    weights = measure_inputs(inputs, "text")
    sample = take_sample(data, inputs, weights, 11_000)
    assert 9_000 < sum(map(len, sample)) <= 11_000
    line_numbers = [int(text[5:]) for text in sample if len(text) == 10]
    # Each tenth of the file is in the sample with more than 50 lines.
    assert [sum(1000 * k <= n < 1000 * (k + 1) for n in line_numbers) > 50 for k in range(10)] == [True] * 10
    all_lines = take_sample(data, inputs, weights, 200_000)
    assert all_lines == [f"line {i:05d}" for i in range(10_000)]
    train_lines = take_sample(data.model_copy(update={"held_out": 0.5}), inputs, weights, 200_000)
    assert 4_700 < len(train_lines) < 5_300
    archive = tmp_path / "b.jsonl.gz"  # a compressed file is one range, which yields the whole sample
    archive.write_bytes(gzip.compress(b'{"text": "abcdefghij"}\n' * 10_000))
    compressed_data = data.model_copy(update={"source": str(archive)})
    assert sum(map(len, sample_texts(compressed_data, 1_003))) == 1_003
    uneven_file = tmp_path / "c.jsonl"  # the first half has little text, so more is sampled from the second half
    lines = [f'{{"padding": "{"-" * 80}", "text": "x"}}\n'] * 1000 + [f'{{"text": "{"y" * 90}"}}\n'] * 1000
    uneven_file.write_text("".join(lines))
    uneven_data = data.model_copy(update={"source": str(uneven_file)})
    assert 49_000 < sum(map(len, sample_texts(uneven_data, 50_000))) <= 50_000


def test_sampling_with_a_filter_that_excludes_nearly_everything_stops_early(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "line {i:05d}"}}\n' for i in range(20_000)))
    inputs = find_inputs(data := DataConfig(source=str(path), held_out=0.0))
    filter_calls: list[str] = []  # the texts for which the filter was called

    def sample_with_filter(kept_texts: set[str]) -> list[str]:
        filter_calls.clear()

        def keep(document: Mapping[str, str]) -> bool:
            filter_calls.append(document["text"])
            return document["text"] in kept_texts

        return take_sample(data, inputs, measure_inputs(inputs, "text"), 3072, document_filter=keep)

    assert sample_with_filter({"line 00300"}) == ["line 00300"]
    assert len(filter_calls) < 10_000
    assert sample_with_filter({"line 19990"}) == ["line 19990"]  # sampling continues until one document is found
    assert sample_with_filter(set()) == []
    assert len(filter_calls) == 20_000


def test_a_dataset_dict_is_an_error_that_names_its_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "set" / split).mkdir(parents=True)
        (tmp_path / "set" / split / "data-0.arrow").write_bytes(b"x")
    (tmp_path / "set/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    splits = f"{tmp_path}/set/test, {tmp_path}/set/train"
    with raises_error("data.ambiguous_dataset", splits):
        find_inputs(DataConfig(source=str(tmp_path / "set")))
    with raises_error("data.ambiguous_dataset", splits):
        list_files(str(tmp_path), (".arrow",))
    assert list_paths(tmp_path / "set/train") == [str(tmp_path / "set/train/data-0.arrow")]


def test_files_that_several_links_lead_to_are_listed_once(tmp_path: Path) -> None:
    (tmp_path / "in/s/deep").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    for name in ("in/s/a.txt", "in/s/deep/b.txt", "out/c.txt"):
        (tmp_path / name).write_text("text")
    for name, target in {
        "a": "s",
        "latest": "s",
        "loop": ".",
        "s/deep/up": "../..",
        "x": "../out",
        "y": "../out",
    }.items():
        (tmp_path / "in" / name).symlink_to(target)
    expected = [f"{tmp_path}/in/{name}" for name in ("s/a.txt", "s/deep/b.txt", "x/c.txt")]
    assert list_paths(tmp_path / "in") == expected


def test_a_folder_that_cannot_be_listed_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    real_scandir = os.scandir

    def scandir_or_fail(path: str) -> object:
        if str(path).endswith("closed"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_or_fail)
    with raises_error("data.unreadable_file", tmp_path / "closed", "Input/output error"):
        find_inputs(DataConfig(source=str(tmp_path)))


def test_a_folder_is_listed_without_opening_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/.hidden/no.txt", "b/two.txt", "a.txt", "c/one.txt", "c/no.md", ".no.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    opened_paths: list[str] = []
    for module, name in ((os, "scandir"), (os, "open"), (builtins, "open")):
        original = getattr(module, name)

        def record_path_and_open(path: Any, *arguments: Any, original: Any = original, **options: Any) -> Any:
            opened_paths.append(str(path))
            return original(path, *arguments, **options)

        monkeypatch.setattr(module, name, record_path_and_open)
    assert [os.path.relpath(path, tmp_path) for path in list_paths(tmp_path)] == ["a.txt", "b/two.txt", "c/one.txt"]
    assert sorted(opened_paths) == [str(tmp_path), *(f"{tmp_path}/{name}" for name in "bc")]


def test_a_tar_sample_with_text_and_metadata_is_one_document(tmp_path: Path) -> None:
    members = {
        "a/1.json": b'{"text": "no", "id": 1}', "a/1.txt": b"yes", "a/2.json": b'{"text": "alone"}',
        "a/3.txt": b"first", "a/3.meta.json": b"{}", "b/3.txt": b"of another folder",
    }  # fmt: skip
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    documents = list(read_documents(make_input(tmp_path / "a.tar", "tar"), 0, 1, "text"))
    assert [document.text for document in documents] == ["yes", "alone", "first", "of another folder"]
    assert [document.line for document in documents] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("state", "expected_names"),
    [
        ('{"_data_files": [{"filename": "data-0.arrow"}], "_fingerprint": "a"}', ["data-0.arrow"]),
        (None, ["data-0.arrow", "tmp.arrow"]),
        ('{"step": 3}', ["data-0.arrow", "tmp.arrow"]),
        ("{", ["data-0.arrow", "tmp.arrow"]),
    ],
)
def test_cached_copies_beside_a_hugging_face_dataset_are_ignored(
    state: str | None, expected_names: list[str], tmp_path: Path
) -> None:
    for name in ("data-0.arrow", "cache-1f3a.arrow", "cache-1f3a_00001_of_00002.arrow", "tmp.arrow"):
        (tmp_path / name).write_bytes(b"x")
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    expected = [str(tmp_path / name) for name in expected_names]
    assert list_paths(tmp_path) == expected
    assert sorted(list_files(str(tmp_path), (".arrow",))) == expected


@pytest.mark.parametrize("name", ['"data-1.arrow"', "null", "[1]", '"../data-0.arrow"'])
def test_a_hugging_face_dataset_is_an_error_if_a_listed_file_is_missing_or_invalid(name: str, tmp_path: Path) -> None:
    (tmp_path / "data-0.arrow").write_bytes(b"x")
    (tmp_path / "state.json").write_text(f'{{"_data_files": [{{"filename": "data-0.arrow"}}, {{"filename": {name}}}]}}')
    with raises_error("data.missing_file", tmp_path / "state.json"):
        list_files(str(tmp_path), (".arrow",))


def test_a_text_file_larger_than_the_document_limit_is_an_error_unless_lines_are_documents(tmp_path: Path) -> None:
    for path, size in ((tmp_path / "long.txt", (1 << 26) + 1), (tmp_path / "limit.txt", 1 << 26)):
        path.touch()
        os.truncate(path, size)
    with raises_error("data.too_large", tmp_path / "long.txt", "67,108,865 bytes", "data.text_documents: line"):
        find_inputs(DataConfig(source=str(tmp_path / "*.txt")))
    assert len(find_inputs(DataConfig(source=str(tmp_path / "*.txt"), text_documents="line"))) == 2
    assert len(find_inputs(DataConfig(source=str(tmp_path / "limit.txt")))) == 1


def test_the_size_of_tokenizer_batches_is_limited_on_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document(1, "x" * 40_000)] * 300
    sizes = {}
    for cores in (1, 16, 128):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        batches = list(make_batches(iter(documents)))
        assert [document for batch in batches for document in batch] == documents
        sizes[cores] = max(sum(len(document.text) for document in batch) for batch in batches)
    assert sizes[1] < (1 << 18) + 40_000
    assert sizes[16] == sizes[128] < (1 << 22) + 40_000
