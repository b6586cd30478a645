"""Tests that text files are recognized by their names and contents, and that their documents are read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import struct
import sys
import tarfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.documents import Document, read_documents, read_row_group_sizes
from data_prep.find_inputs import find_inputs
from pipeline.base.errors import UserError
from pipeline.config.datasets import DataConfig
from tests.data_prep.test_shards import build_shards, make_data_config, make_documents, read_all_files
from tests.support.errors import raises_error

TEXTS = ["first", 'a "quoted", text\nof two lines', "dritter: äöü 漢字 😀", "\ufeff no mark here"]
JSON_LINES = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)).encode()
JSON_OBJECTS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
CSV_CONTENT = (
    'id,text\r\n1,first\r\n2,"a ""quoted"", text\nof two lines"\r\n3,dritter: äöü 漢字 😀\r\n4,\ufeff no mark here\r\n'
).encode()
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
CONTENTS = {  # by ending
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": json.dumps(JSON_OBJECTS).encode(),
    ".csv": CSV_CONTENT,
    # The second call restores the comma inside the second text.
    ".tsv": CSV_CONTENT.replace(b",", b"\t").replace(b'"\t text', b'", text'),
}


def read_all_documents(path: Path | str, **options: Any) -> list[Document]:
    """Return the documents of all files that a source names."""
    data = DataConfig(source=str(path), **options)
    documents: list[Document] = []
    for source in find_inputs(data):
        end = len(read_row_group_sizes(source.path, data.text_field)) if source.format == "parquet" else source.size
        documents += read_documents(source, 0, end, data.text_field)
    return documents


def read_texts(path: Path | str, **options: Any) -> list[str]:
    """Return the texts of all files that a source names. No document may be rejected."""
    documents = read_all_documents(path, **options)
    assert [document.reason for document in documents] == [None] * len(documents)
    return [document.text for document in documents]


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("ending", CONTENTS)
def test_files_with_known_endings_are_read(ending: str, compression: str, tmp_path: Path) -> None:
    (tmp_path / f"a{ending}{compression}").write_bytes(COMPRESSORS[compression](CONTENTS[ending]))
    assert read_texts(tmp_path) == TEXTS


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_compressed_text_files_are_read(compression: str, tmp_path: Path) -> None:
    (tmp_path / f"a.txt{compression}").write_bytes(COMPRESSORS[compression]("é\nb\n".encode()))
    assert read_texts(tmp_path) == ["é\nb\n"]
    assert read_texts(tmp_path, text_documents="line") == ["é", "b"]


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_compressed_tar_files_are_read(compression: str, tmp_path: Path) -> None:
    with tarfile.open(fileobj=(content := io.BytesIO()), mode="w") as tar:
        for number, text in enumerate(TEXTS):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    (tmp_path / f"a.tar{compression}").write_bytes(COMPRESSORS[compression](content.getvalue()))
    assert read_texts(tmp_path) == [text.removeprefix("\ufeff") for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", JSON_LINES),
        ("a.json", json.dumps(JSON_OBJECTS, indent=2).encode()),
        ("a.json", b"".join(json.dumps(value, indent=2).encode() for value in JSON_OBJECTS)),
        ("a.jsonl", json.dumps(JSON_OBJECTS).encode()),
        ("a.jsonl", json.dumps(JSON_OBJECTS, indent=2).encode()),
        ("a.jsonl", b"\n".join(json.dumps(value, indent=2).encode() for value in JSON_OBJECTS)),
        ("a.jsonl", gzip.compress(JSON_LINES, mtime=0)),
        ("a.json", zstandard.compress(json.dumps(JSON_OBJECTS).encode())),
        ("a.csv", bz2.compress(CSV_CONTENT)),
        ("a.jsonl.gz", JSON_LINES),  # a browser may decompress a file and keep its name
        ("a.json.gz", lzma.compress(json.dumps(JSON_OBJECTS).encode())),
        ("a.gz", gzip.compress(JSON_LINES, mtime=0)),
        ("part-00000", JSON_LINES),
        ("part-00000", zstandard.compress(json.dumps(JSON_OBJECTS).encode())),
        ("corpus.data", json.dumps(JSON_OBJECTS).encode()),
    ],
)
@settings(max_examples=12)
@given(splits=st.lists(st.floats(0, 1), max_size=4))
def test_the_format_is_detected_from_the_content_and_input_ranges_yield_each_document_once(
    name: str, content: bytes, splits: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("in") / name
    path.write_bytes(content)
    for source in (path, path.parent):
        (text_input,) = find_inputs(DataConfig(source=str(source)))
        inner_boundaries = [int(fraction * len(content)) for fraction in splits] if text_input.splits else []
        boundaries = sorted({0, len(content), *inner_boundaries})
        ranges = [read_documents(text_input, start, end, "text") for start, end in pairwise(boundaries)]
        assert [document.text for documents in ranges for document in documents] == TEXTS


def test_a_json_file_with_one_object_is_one_document(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.json").write_text(json.dumps({"text": text}, indent=2 * (number % 2) or None))
    assert read_texts(tmp_path) == TEXTS


def test_parquet_and_arrow_files_without_an_ending_are_read_and_a_broken_link_is_an_error(tmp_path: Path) -> None:
    table = pyarrow.table({"text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "part-0")
    with pyarrow.ipc.new_file(tmp_path / "part-1", table.schema) as file:
        file.write_table(table)
    assert read_texts(tmp_path) == TEXTS * 2
    (tmp_path / "part-2").touch()
    assert read_texts(tmp_path / "part-*") == TEXTS * 2
    (tmp_path / "part-3").symlink_to("nowhere")
    assert "part-3: not readable: No such file" in read_and_get_error_message(tmp_path / "part-*")


def test_any_number_of_tasks_writes_the_same_shards_if_file_names_are_misleading(tmp_path: Path) -> None:
    (folder := tmp_path / "in").mkdir()
    objects = [{"text": text} for text in make_documents(400)]
    (folder / "a.jsonl").write_bytes(gzip.compress(json.dumps(objects[:150]).encode()))
    (folder / "b.json").write_text("".join(json.dumps(value) + "\n" for value in objects[150:300]))
    (folder / "c.json").write_text(json.dumps(objects[300:]))
    for tasks in (1, 5):
        manifest = build_shards(make_data_config(str(folder)), tmp_path / str(tasks), tasks)
        assert manifest.documents == 400 and not manifest.rejected_documents
    assert read_all_files(tmp_path / "1") == read_all_files(tmp_path / "5")


def test_files_of_a_folder_that_contain_no_documents_are_ignored(tmp_path: Path) -> None:
    for number, (ending, content) in enumerate(CONTENTS.items()):
        (tmp_path / f"{number}{ending}").write_bytes(content)
    (tmp_path / "dataset_info.json").write_text('{"features": {"text": "string"}}')
    (tmp_path / "labels.csv").write_text("id,label\n1,2\n")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "part-0").write_bytes(JSON_LINES)
    (tmp_path / "README.md").write_text("# text")
    assert read_texts(tmp_path) == TEXTS * len(CONTENTS)
    (tmp_path / "labels.csv").write_text("id,text\n1,2\n")
    assert read_texts(tmp_path) == [*TEXTS * len(CONTENTS), "2"]


def test_data_format_overrides_the_file_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(JSON_LINES)
    (tmp_path / "b.md").write_text("# text")
    assert read_texts(tmp_path / "a.txt", format="jsonl") == TEXTS
    assert read_texts(tmp_path / "b.md", format="text") == ["# text"]
    assert read_texts(tmp_path, format="text") == [JSON_LINES.decode()]  # only a.txt has an ending of this format
    # no file has an ending of the format jsonl, so all files are read
    assert [document.text for document in read_all_documents(tmp_path, format="jsonl")] == [*TEXTS, ""]
    (tmp_path / "c.gz").write_bytes(gzip.compress(CSV_CONTENT))
    assert read_texts(tmp_path / "c.gz", format="csv") == TEXTS
    (tmp_path / "d.json").write_text('{"text": "cut\n{"text": "whole"}\n')
    assert [document.text for document in read_all_documents(tmp_path / "d.json", format="jsonl")] == ["", "whole"]
    with pytest.raises(ValueError, match="format"):
        DataConfig.model_validate({"format": "text", "records": "tokens", "source": "a.bin"})
    with pytest.raises(ValueError, match="csv"):
        DataConfig.model_validate({"format": "csv", "records": "prompts", "source": "a.csv"})


def read_and_get_error_message(path: Path | str, **options: Any) -> str:
    """Return the message of the UserError that reading a source raises."""
    with pytest.raises(UserError) as error:
        read_texts(path, **options)
    return str(error.value)


def test_an_error_names_unsupported_files_and_how_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(np.arange(1000, dtype="<u2").tobytes())
    np.save(tmp_path / "b.npy", np.arange(1000))
    record = b"\x0a\x02hi"
    (tmp_path / "c.tfrecord").write_bytes(struct.pack("<QI", len(record), 0) + record)
    (tmp_path / "d").write_bytes(bytes.fromhex("1000000000000000d0b5fe56") + b"a" * 20)
    (tmp_path / "e.zip").write_bytes(b"PK\x03\x04....")
    (tmp_path / "f.md").write_text("text")
    message = read_and_get_error_message(tmp_path)
    assert "a.npy: bare tokens named .npy\n" in message and "rename the file to NAME.bin" in message
    assert "b.npy: NumPy .npy\n" in message and "numpy.load" in message
    for name in ("c.tfrecord", "d"):
        assert f"{name}: binary data\n" in message, "a record with a wrong checksum was accepted"
    assert "e.zip: zip\n" in message and "unzip FILE" in message
    assert "f.md: text\n" in message and "data.format: text" in message
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/index.json").write_text('{"shards": [], "version": 2}')
    (tmp_path / "shards/shard.00000.mds").write_bytes(b"\x01\0\0\0\x08\0\0\0")
    for source in (tmp_path / "shards", tmp_path / "shards/index.json", tmp_path / "shards/*.mds"):
        message = read_and_get_error_message(source)
        assert "MosaicML MDS" in message and "streaming.StreamingDataset" in message


def test_text_files_with_names_of_the_mds_format_are_read(tmp_path: Path) -> None:
    (tmp_path / "notes.mds.v2.jsonl").write_bytes(JSON_LINES)
    (tmp_path / "index.json").write_bytes(json.dumps(JSON_OBJECTS).encode())
    assert read_texts(tmp_path / "*") == TEXTS * 2


def test_a_tfrecord_file_is_recognized_by_its_checksum(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(make_tfrecord(b"a" * 16))
    message = read_and_get_error_message(tmp_path)
    assert "a.dat: TFRecord\n" in message and "tf.data.TFRecordDataset" in message
    (tmp_path / "b.jsonl").write_bytes(make_tfrecord(b"a" * 16))
    with raises_error("data.wrong_format", tmp_path / "b.jsonl", "TFRecord"):
        read_texts(tmp_path / "b.jsonl")


def make_tfrecord(record: bytes) -> bytes:
    """Return a TFRecord file of one record."""
    length = struct.pack("<Q", len(record))
    return length + compute_masked_crc(length) + record + compute_masked_crc(record)


def compute_masked_crc(content: bytes) -> bytes:
    """Return the masked CRC-32C as TensorFlow defines it (tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15) | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8 & 0xFFFFFFFF)


def test_an_error_lists_at_most_twenty_files_and_the_number_of_the_others(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.html").write_text("<html>")
    message = read_and_get_error_message(tmp_path)
    assert message.count(": XML or HTML\n") == 20
    assert "280" in message
    assert len(message) < 2000
    assert "280" in read_and_get_error_message(tmp_path / "*.txt")
    with raises_error("data.no_files", tmp_path / "nothing"):
        read_texts(tmp_path / "nothing/*.txt")


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".txt", ".jsonl.gz", ".json.xz", ".csv.bz2"])
def test_a_byte_order_mark_is_removed_and_utf_16_is_rejected(ending: str, tmp_path: Path) -> None:
    base, _, compression = ending[1:].partition(".")
    content = CONTENTS.get(f".{base}", b"text\nmore")
    compress = COMPRESSORS[f".{compression}" if compression else ""]
    path = tmp_path / f"a{ending}"
    path.write_bytes(compress(b"\xef\xbb\xbf" + content))
    assert read_texts(path) == (["text\nmore"] if base == "txt" else TEXTS)
    assert read_texts(path, text_documents="line") == (["text", "more"] if base == "txt" else TEXTS)
    path.write_bytes(compress(content.decode().encode("utf-16")))
    # A .txt file is a single document, which is rejected. Other files are errors.
    message = read_all_documents(path)[0].reason if base == "txt" else read_and_get_error_message(path)
    assert "UTF-16" in (message or "") and "iconv" in (message or "")
    if base == "txt":
        assert "UTF-16" in read_and_get_error_message(path, text_documents="line")


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(TEXTS, pyarrow.string_view()),
        pyarrow.array(TEXTS, pyarrow.large_string()),
        pyarrow.array(TEXTS).dictionary_encode(),
        pyarrow.array([text.encode() for text in TEXTS], pyarrow.binary_view()),
    ],
    ids=lambda column: str(column.type)[:12],
)
@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_text_columns_of_all_types_are_read_and_other_columns_are_errors(
    ending: str, column: pyarrow.Array, tmp_path: Path
) -> None:
    struct_column = pyarrow.StructArray.from_arrays(
        [pyarrow.StructArray.from_arrays([column], ["content"])], ["message"]
    )
    table = pyarrow.table({"id": range(4), "text": column, "a.b": column, "chat": struct_column})
    write_table(table, tmp_path / f"a{ending}", rows=4)
    for field in ("text", "a.b", "chat.message.content"):
        assert read_texts(tmp_path, text_field=field) == TEXTS
    message = read_and_get_error_message(tmp_path, text_field="chat.message")
    assert "'chat.message'" in message and "struct" in message and "chat.message.content" in message
    with raises_error("data.no_column", "'chat.other'", "message in chat"):
        read_texts(tmp_path, text_field="chat.other")
    with raises_error("data.wrong_column_type", "'id'", "int64"):
        read_texts(tmp_path, text_field="id.text")


def write_table(table: pyarrow.Table, path: Path, rows: int = 2) -> None:
    """Write a table in row groups or record batches of `rows` rows.

    pyarrow cannot slice every type of column. For such columns, `rows` must be the number of all rows.
    """
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
        return
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_row_with_a_missing_struct_or_value_is_rejected(ending: str, tmp_path: Path) -> None:
    rows = [{"content": "a"}, None, {"content": None}, {"content": "b"}]
    write_table(pyarrow.table({"message": rows}), tmp_path / f"a{ending}")
    documents = read_all_documents(tmp_path, text_field="message.content")
    assert [document.text for document in documents] == ["a", "", "", "b"]
    assert [document.reason is None for document in documents] == [True, False, False, True]


def test_text_field_names_a_nested_key_but_an_exact_key_is_preferred(tmp_path: Path) -> None:
    lines = [
        {"message": {"content": "nested"}},
        {"message.content": "exact key", "message": {"content": "nested key"}},
        {"message": 1},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(value) + "\n" for value in lines))
    documents = read_all_documents(tmp_path, text_field="message.content")
    assert [document.text for document in documents] == ["nested", "exact key", ""]
    assert documents[2].reason is not None and "no field 'message.content'" in documents[2].reason


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_invalid_csv_rows_are_rejected_and_the_others_are_read(name: str, tmp_path: Path) -> None:
    content = b'id;text\n1;good\n2;too;many\n3\n4;"x"y\n\n5;\xe9\n6;"two\nlines"\n7;last'
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    documents = {document.line: (document.text, document.reason) for document in read_all_documents(path)}
    assert [line for line, (_, reason) in documents.items() if reason] == [3, 4, 5, 7]
    assert {line: text for line, (text, _) in documents.items() if text} == {2: "good", 8: "two\nlines", 10: "last"}
    assert "3 fields" in str(documents[3]) and "invalid UTF-8: byte 0xe9" in str(documents[7])


@pytest.mark.parametrize(
    ("content", "code", "expected_texts"),
    [
        ('id,text\n1,a\n2,"never closed\n3,b\n', "data.damaged_file", ["line 3", "quote"]),
        ("id,body\n1,a\n", "data.no_column", ["'text'", "data.text_field", "'id', 'body'"]),
        ("text,text\n1,a\n", "data.no_column", ["more than one", "'text'"]),
    ],
)
def test_a_csv_file_with_an_open_quote_or_without_a_text_column_is_an_error(
    content: str, code: str, expected_texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(content)
    with raises_error(code, tmp_path / "a.csv", *expected_texts):
        read_texts(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("")
    with raises_error("data.no_column", tmp_path / "b.csv", "'text'"):
        read_texts(tmp_path / "b.csv")


@pytest.mark.parametrize(
    ("content", "expected_text"),
    [
        ('[{"text": "a"}, {"text": "b"', "value 2"),
        ('[{"text": "a"}, {"text": "b"}', "value 2"),
        ('[{"text": "a"} {"text": "b"}]', "'{' follows value 1"),
        ('[{"text": "a"},\n{"text": "b"}]\n[]', "'[' follows the end"),
        ('{"text": "a"}{"text": "b"}{"tex', "value 3"),
    ],
)
def test_incomplete_or_malformed_json_is_an_error_that_names_the_value(
    content: str, expected_text: str, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(content)
    with raises_error("data.damaged_file", tmp_path / "a.json", expected_text):
        read_texts(tmp_path / "a.json")


@pytest.mark.parametrize("block_bytes", [1, 2, 7, 1 << 20])
def test_documents_of_a_json_file_do_not_depend_on_the_block_size(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.documents._BLOCK_BYTES", block_bytes)
    values = [
        {"text": 'é\\ud83d " ] } ,' * 9},
        1.5e3,
        ["text"],
        "text",
        None,
        {"text": "end", "more": [1, {"a": -12}]},
        12,
    ]
    content = json.dumps(values, ensure_ascii=False, indent=1).encode()
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf \n" + content + b" \n")
    documents = read_all_documents(tmp_path / "a.json")
    assert [document.text for document in documents] == [values[0]["text"], "", "", "", "", "end", ""]  # type: ignore[index]
    assert [document.line for document in documents if document.reason] == [2, 3, 4, 5, 7]
    (tmp_path / "b.json").write_bytes(b'[{"text": "good"}, {"text": "b\xe9d"}, {"text": "\\udce9"}]')
    intact, invalid_utf8, lone_surrogate = read_all_documents(tmp_path / "b.json")
    assert intact.text == "good"
    assert "invalid UTF-8: byte 0xe9" in str(invalid_utf8.reason)
    assert "surrogate" in str(lone_surrogate.reason)
    (tmp_path / "c.json").write_text(" [ ] ")
    assert read_all_documents(tmp_path / "c.json") == []


def test_a_json_file_with_one_invalid_object_is_one_rejected_document(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "a", }')
    (document,) = read_all_documents(tmp_path / "a.json")
    assert document.reason is not None and document.reason.startswith("broken JSON: ")


def test_a_value_row_or_line_that_is_too_long_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.documents.MAX_DOCUMENT_BYTES", 1 << 17)
    monkeypatch.setattr("data_prep.documents._BLOCK_BYTES", 1 << 12)
    long_object = json.dumps({"text": "a" * (1 << 18)}).encode()
    for name, content in {
        "a.json": b"[" + long_object + b"]",
        "a.csv": b"text\n" + b"a" * (1 << 18),
        "b.csv": b'text\n"' + b"a\n" * (1 << 17) + b'"\n',
    }.items():
        (tmp_path / name).write_bytes(content)
        with raises_error("data.too_large", tmp_path / name, "131,072"):
            read_texts(tmp_path / name)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a" * (1 << 18)))
    assert "longer than 131,072" in str(read_all_documents(tmp_path / "a.txt.gz")[0].reason)


def test_json_with_too_many_values_is_an_error_unless_they_are_in_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.documents.MAX_JSON_VALUES", 1000)
    monkeypatch.setattr("data_prep.documents._BLOCK_BYTES", 1 << 10)
    (tmp_path / "a.json").write_text(
        json.dumps([{"text": "a, [b" * 4000}, {"text": "b", "more": [1] * 4000}], indent=1)
    )
    with raises_error("data.too_large", tmp_path / "a.json", "1,000"):
        read_texts(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a, [b" * 4000}, {"text": "b"}] * 2, indent=1))
    assert read_texts(tmp_path / "a.json") == ["a, [b" * 4000, "b"] * 2


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress])
def test_a_file_of_several_compressed_streams_is_read_and_rejected_if_a_later_stream_is_damaged(
    compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    streams = [compress(JSON_LINES[:50]), compress(b""), compress(JSON_LINES[50:])]
    path = tmp_path / "a.jsonl.bz2"
    path.write_bytes(b"".join(streams))
    assert read_texts(path) == TEXTS
    path.write_bytes(streams[0] + streams[1] + b"x" + streams[2][1:])
    with raises_error("data.damaged_file", path):
        read_texts(path)
    path.write_bytes(b"".join(streams)[:-3])
    with raises_error("data.damaged_file", path):
        read_texts(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.txt.bz2", "a.csv.zst"])
def test_a_file_named_as_compressed_is_rejected_if_it_is_neither_compressed_nor_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x00" + COMPRESSORS["." + name.rpartition(".")[2]](JSON_LINES)[1:])
    with raises_error("data.damaged_file", tmp_path / name):
        read_texts(tmp_path / name)


def test_a_zstd_file_without_pyarrow_is_an_error_that_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(JSON_LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises_error("data.missing_package", tmp_path / "a.jsonl.zst", "pip install pyarrow"):
        read_texts(tmp_path / "a.jsonl.zst")
