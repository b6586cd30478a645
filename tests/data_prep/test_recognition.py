"""Which files are recognised, by name and by content, and what is read from them."""

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
from tests.data_prep.test_shards import all_bytes, config, run_tasks, texts
from tests.support.errors import raises_error

TEXTS = ["first", 'a "quoted", text\nof two lines', "dritter: äöü 漢字 😀", "\ufeff no mark here"]
LINES = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)).encode()
OBJECTS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
CSV = (
    'id,text\r\n1,first\r\n2,"a ""quoted"", text\nof two lines"\r\n3,dritter: äöü 漢字 😀\r\n4,\ufeff no mark here\r\n'
).encode()
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
BASES = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": json.dumps(OBJECTS).encode(),
    ".csv": CSV,
    ".tsv": CSV.replace(b",", b"\t").replace(b'"\t text', b'", text'),
}


def documents_of(path: Path | str, **how: Any) -> list[Document]:
    """The documents of all files that a source names."""
    data = DataConfig(source=str(path), **how)
    found = []
    for one in find_inputs(data):
        end = len(read_row_group_sizes(one.path, data.text_field)) if one.format == "parquet" else one.size
        found += list(read_documents(one, 0, end, data.text_field))
    return found


def read(path: Path | str, **how: Any) -> list[str]:
    found = documents_of(path, **how)
    assert [one.reason for one in found] == [None] * len(found)
    return [one.text for one in found]


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("ending", BASES)
def test_usual_names_are_read(ending: str, packed: str, tmp_path: Path) -> None:
    (tmp_path / f"a{ending}{packed}").write_bytes(PACK[packed](BASES[ending]))
    assert read(tmp_path) == TEXTS


@pytest.mark.parametrize("packed", PACK)
def test_texts_may_be_compressed(packed: str, tmp_path: Path) -> None:
    (tmp_path / f"a.txt{packed}").write_bytes(PACK[packed]("é\nb\n".encode()))
    assert read(tmp_path) == ["é\nb\n"]
    assert read(tmp_path, text_documents="line") == ["é", "b"]


@pytest.mark.parametrize("packed", PACK)
def test_tars_may_be_compressed(packed: str, tmp_path: Path) -> None:
    with tarfile.open(fileobj=(content := io.BytesIO()), mode="w") as tar:
        for number, text in enumerate(TEXTS):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    (tmp_path / f"a.tar{packed}").write_bytes(PACK[packed](content.getvalue()))
    assert read(tmp_path) == [text.removeprefix("\ufeff") for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", LINES),
        ("a.json", json.dumps(OBJECTS, indent=2).encode()),
        ("a.json", b"".join(json.dumps(one, indent=2).encode() for one in OBJECTS)),
        ("a.jsonl", json.dumps(OBJECTS).encode()),
        ("a.jsonl", json.dumps(OBJECTS, indent=2).encode()),
        ("a.jsonl", b"\n".join(json.dumps(one, indent=2).encode() for one in OBJECTS)),
        ("a.jsonl", gzip.compress(LINES, mtime=0)),
        ("a.json", zstandard.compress(json.dumps(OBJECTS).encode())),
        ("a.csv", bz2.compress(CSV)),
        ("a.jsonl.gz", LINES),  # as a browser leaves it
        ("a.json.gz", lzma.compress(json.dumps(OBJECTS).encode())),
        ("a.gz", gzip.compress(LINES, mtime=0)),
        ("part-00000", LINES),
        ("part-00000", zstandard.compress(json.dumps(OBJECTS).encode())),
        ("corpus.data", json.dumps(OBJECTS).encode()),
    ],
)
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.floats(0, 1), max_size=4))
def test_content_decides_and_any_cut_gives_each_document_once(
    name: str, content: bytes, cuts: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("in") / name
    path.write_bytes(content)
    for source in (path, path.parent):
        (found,) = find_inputs(DataConfig(source=str(source)))
        borders = (
            sorted({0, len(content), *(int(one * len(content)) for one in cuts)}) if found.splits else [0, len(content)]
        )
        pieces = [read_documents(found, start, end, "text") for start, end in pairwise(borders)]
        assert [one.text for piece in pieces for one in piece] == TEXTS


def test_one_object_is_one_document(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.json").write_text(json.dumps({"text": text}, indent=2 * (number % 2) or None))
    assert read(tmp_path) == TEXTS


def test_parquet_and_arrow_of_any_name(tmp_path: Path) -> None:
    table = pyarrow.table({"text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "part-0")
    with pyarrow.ipc.new_file(tmp_path / "part-1", table.schema) as file:
        file.write_table(table)
    assert read(tmp_path) == TEXTS * 2
    (tmp_path / "part-2").touch()
    assert read(tmp_path / "part-*") == TEXTS * 2
    (tmp_path / "part-3").symlink_to("nowhere")
    assert "part-3: not readable: No such file" in refusal(tmp_path / "part-*")


def test_no_task_count_changes_what_is_written_of_files_whose_content_decides(tmp_path: Path) -> None:
    (folder := tmp_path / "in").mkdir()
    objects = [{"text": text} for text in texts(400)]
    (folder / "a.jsonl").write_bytes(gzip.compress(json.dumps(objects[:150]).encode()))
    (folder / "b.json").write_text("".join(json.dumps(one) + "\n" for one in objects[150:300]))
    (folder / "c.json").write_text(json.dumps(objects[300:]))
    for tasks in (1, 5):
        manifest = run_tasks(config(str(folder)), tmp_path / str(tasks), tasks)
        assert manifest.documents == 400 and not manifest.rejected_documents
    assert all_bytes(tmp_path / "1") == all_bytes(tmp_path / "5")


def test_a_folder_gives_all_usual_names_and_leaves_out_what_is_about_the_data(tmp_path: Path) -> None:
    for number, (ending, content) in enumerate(BASES.items()):
        (tmp_path / f"{number}{ending}").write_bytes(content)
    (tmp_path / "dataset_info.json").write_text('{"features": {"text": "string"}}')
    (tmp_path / "labels.csv").write_text("id,label\n1,2\n")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "part-0").write_bytes(LINES)
    (tmp_path / "README.md").write_text("# text")
    assert read(tmp_path) == TEXTS * len(BASES)
    (tmp_path / "labels.csv").write_text("id,text\n1,2\n")
    assert read(tmp_path) == [*TEXTS * len(BASES), "2"]


def test_format_overrides_what_names_say(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(LINES)
    (tmp_path / "b.md").write_text("# text")
    assert read(tmp_path / "a.txt", format="jsonl") == TEXTS
    assert read(tmp_path / "b.md", format="text") == ["# text"]
    assert read(tmp_path, format="text") == [LINES.decode()]  # of a folder the usual endings
    assert [one.text for one in documents_of(tmp_path, format="jsonl")] == [*TEXTS, ""]  # or all, if there are none
    (tmp_path / "c.gz").write_bytes(gzip.compress(CSV))
    assert read(tmp_path / "c.gz", format="csv") == TEXTS
    (tmp_path / "d.json").write_text('{"text": "cut\n{"text": "whole"}\n')
    assert [one.text for one in documents_of(tmp_path / "d.json", format="jsonl")] == ["", "whole"]
    with pytest.raises(ValueError, match="format: it is for documents"):
        DataConfig.model_validate({"format": "text", "records": "tokens", "source": "a.bin"})
    with pytest.raises(ValueError, match="format: csv holds no objects"):
        DataConfig.model_validate({"format": "csv", "records": "prompts", "source": "a.csv"})


def refusal(path: Path | str, **how: Any) -> str:
    with pytest.raises(UserError) as error:
        read(path, **how)
    return str(error.value)


def test_what_is_not_read_is_named_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(np.arange(1000, dtype="<u2").tobytes())
    np.save(tmp_path / "b.npy", np.arange(1000))
    record = b"\x0a\x02hi"
    (tmp_path / "c.tfrecord").write_bytes(struct.pack("<QI", len(record), 0) + record)
    (tmp_path / "d").write_bytes(bytes.fromhex("1000000000000000d0b5fe56") + b"a" * 20)
    (tmp_path / "e.zip").write_bytes(b"PK\x03\x04....")
    (tmp_path / "f.md").write_text("text")
    told = refusal(tmp_path)
    assert "a.npy: bare tokens named .npy\n" in told and "rename the file to NAME.bin" in told
    assert "b.npy: NumPy .npy\n" in told and "numpy.load" in told
    assert "c.tfrecord: binary data\n" in told, "its checksum is wrong"
    assert "e.zip: zip\n" in told and "unzip FILE" in told
    assert "f.md: text\n" in told and "data.format: text" in told
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/index.json").write_text('{"shards": [], "version": 2}')
    (tmp_path / "shards/shard.00000.mds").write_bytes(b"\x01\0\0\0\x08\0\0\0")
    for source in (tmp_path / "shards", tmp_path / "shards/index.json", tmp_path / "shards/*.mds"):
        told = refusal(source)
        assert "MosaicML MDS" in told and "streaming.StreamingDataset" in told


def test_a_name_with_mds_in_it_may_be_text(tmp_path: Path) -> None:
    (tmp_path / "notes.mds.v2.jsonl").write_bytes(LINES)
    (tmp_path / "index.json").write_bytes(json.dumps(OBJECTS).encode())
    assert read(tmp_path / "*") == TEXTS * 2


def test_tfrecord_is_known_by_its_checksum(tmp_path: Path) -> None:
    """The first twelve bytes that TensorFlow writes for a record of 16 bytes."""
    (tmp_path / "a.dat").write_bytes(tfrecord(b"a" * 16))
    told = refusal(tmp_path)
    assert "a.dat: TFRecord\n" in told and "tf.data.TFRecordDataset" in told
    (tmp_path / "b.jsonl").write_bytes(tfrecord(b"a" * 16))
    assert "it seems to be TFRecord, not text" in refusal(tmp_path / "b.jsonl")


def tfrecord(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + masked_crc(length) + record + masked_crc(record)


def masked_crc(content: bytes) -> bytes:
    """CRC-32C bit by bit, rotated and shifted (tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15) | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8 & 0xFFFFFFFF)


def test_a_message_names_twenty_files_at_most(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.html").write_text("<html>")
    told = refusal(tmp_path)
    assert told.count(": XML or HTML\n") == 20 and "… and 280 more" in told and len(told) < 2000
    assert "matches no file" in (told := refusal(tmp_path / "*.txt")) and "… and 280 more" in told
    assert "There is no folder" in refusal(tmp_path / "nothing/*.txt")


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".txt", ".jsonl.gz", ".json.xz", ".csv.bz2"])
def test_a_byte_order_mark_is_skipped_and_utf_16_is_refused(ending: str, tmp_path: Path) -> None:
    base, _, packed = ending[1:].partition(".")
    content = BASES.get(f".{base}", b"text\nmore")
    pack = PACK[f".{packed}" if packed else ""]
    path = tmp_path / f"a{ending}"
    path.write_bytes(pack(b"\xef\xbb\xbf" + content))
    assert read(path) == (["text\nmore"] if base == "txt" else TEXTS)
    assert read(path, text_documents="line") == (["text", "more"] if base == "txt" else TEXTS)
    path.write_bytes(pack(content.decode().encode("utf-16")))
    told = documents_of(path)[0].reason if base == "txt" else refusal(path)
    assert "UTF-16" in (told or "") and "iconv" in (told or "")
    assert "UTF-16" in refusal(path, text_documents="line") or base != "txt"


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
def test_columns_of_any_text_are_read(ending: str, column: pyarrow.Array, tmp_path: Path) -> None:
    nested = pyarrow.StructArray.from_arrays([pyarrow.StructArray.from_arrays([column], ["content"])], ["message"])
    table = pyarrow.table({"id": range(4), "text": column, "a.b": column, "chat": nested})
    write_table(table, tmp_path / f"a{ending}", rows=4)
    for field in ("text", "a.b", "chat.message.content"):
        assert read(tmp_path, text_field=field) == TEXTS
    told = refusal(tmp_path, text_field="chat.message")
    assert "'chat.message'" in told and "struct" in told and "chat.message.content" in told
    with raises_error("data.no_column", "'chat.other'", "message in chat"):
        read(tmp_path, text_field="chat.other")
    with raises_error("data.wrong_column_type", "'id'", "int64"):
        read(tmp_path, text_field="id.text")


def write_table(table: pyarrow.Table, path: Path, rows: int = 2) -> None:
    """`rows` at once; pyarrow cannot cut every kind of column."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
        return
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_missing_struct_is_a_rejected_row(ending: str, tmp_path: Path) -> None:
    rows = [{"content": "a"}, None, {"content": None}, {"content": "b"}]
    write_table(pyarrow.table({"message": rows}), tmp_path / f"a{ending}")
    found = documents_of(tmp_path, text_field="message.content")
    assert [one.text for one in found] == ["a", "", "", "b"]
    assert [one.reason is None for one in found] == [True, False, False, True]


def test_a_field_of_an_object_in_an_object(tmp_path: Path) -> None:
    lines = [
        {"message": {"content": "in"}},
        {"message.content": "as named", "message": {"content": "no"}},
        {"message": 1},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = documents_of(tmp_path, text_field="message.content")
    assert [one.text for one in found] == ["in", "as named", ""]
    assert found[2].reason is not None and "no field 'message.content'" in found[2].reason


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_rows_of_csv_that_are_wrong(name: str, tmp_path: Path) -> None:
    content = b'id;text\n1;good\n2;too;many\n3\n4;"x"y\n\n5;\xe9\n6;"two\nlines"\n7;last'
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = {one.line: (one.text, one.reason) for one in documents_of(path)}
    assert [line for line, (_, reason) in found.items() if reason] == [3, 4, 5, 7]
    assert {line: text for line, (text, _) in found.items() if text} == {2: "good", 8: "two\nlines", 10: "last"}
    assert "3 fields" in str(found[3]) and "invalid UTF-8: byte 0xe9" in str(found[7])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('id,text\n1,a\n2,"never closed\n3,b\n', "row in line 3 has an unclosed quote"),
        ("id,body\n1,a\n", "no column 'text' (data.text_field) in the first line, which has 'id', 'body'"),
        ("text,text\n1,a\n", "more than one column 'text'"),
    ],
)
def test_csv_that_cannot_be_read_is_refused(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert told in refusal(tmp_path / "a.csv") and "a.csv" in refusal(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("")
    with raises_error("data.no_column", tmp_path / "b.csv", "'text'"):
        read(tmp_path / "b.csv")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('[{"text": "a"}, {"text": "b"', "value 2 is broken JSON"),
        ('[{"text": "a"}, {"text": "b"}', "it ends after value 2 of the array"),
        ('[{"text": "a"} {"text": "b"}]', "'{' follows value 1 of the array"),
        ('[{"text": "a"},\n{"text": "b"}]\n[]', "'[' follows the end of the array"),
        ('{"text": "a"}{"text": "b"}{"tex', "value 3 is broken JSON"),
    ],
)
def test_json_that_ends_early_is_refused(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    assert f"cannot read {tmp_path}/a.json: " in (found := refusal(tmp_path / "a.json")) and told in found


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_json_does_not_depend_on_blocks(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.documents._BLOCK_BYTES", block)
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
    found = documents_of(tmp_path / "a.json")
    assert [one.text for one in found] == [values[0]["text"], "", "", "", "", "end", ""]  # type: ignore[index]
    assert [one.line for one in found if one.reason] == [2, 3, 4, 5, 7]
    (tmp_path / "b.json").write_bytes(b'[{"text": "good"}, {"text": "b\xe9d"}, {"text": "\\udce9"}]')
    bad = documents_of(tmp_path / "b.json")
    assert (
        bad[0].text == "good" and "invalid UTF-8: byte 0xe9" in str(bad[1].reason) and "surrogate" in str(bad[2].reason)
    )
    (tmp_path / "c.json").write_text(" [ ] ")
    assert documents_of(tmp_path / "c.json") == []


def test_a_broken_object_is_one_rejected_document(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "a", }')
    (found,) = documents_of(tmp_path / "a.json")
    assert found.reason is not None and found.reason.startswith("broken JSON: ")


def test_a_value_or_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.documents.MAX_DOCUMENT_BYTES", 1 << 17)
    monkeypatch.setattr("data_prep.documents._BLOCK_BYTES", 1 << 12)
    long = json.dumps({"text": "a" * (1 << 18)}).encode()
    for name, content in {
        "a.json": b"[" + long + b"]",
        "a.csv": b"text\n" + b"a" * (1 << 18),
        "b.csv": b'text\n"' + b"a\n" * (1 << 17) + b'"\n',
    }.items():
        (tmp_path / name).write_bytes(content)
        told = refusal(tmp_path / name)
        assert f"cannot read {tmp_path}/{name}: " in told and "longer than 131,072" in told
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a" * (1 << 18)))
    assert "longer than 131,072" in str(documents_of(tmp_path / "a.txt.gz")[0].reason)


def test_json_of_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.documents.MAX_JSON_VALUES", 1000)
    monkeypatch.setattr("data_prep.documents._BLOCK_BYTES", 1 << 10)
    (tmp_path / "a.json").write_text(
        json.dumps([{"text": "a, [b" * 4000}, {"text": "b", "more": [1] * 4000}], indent=1)
    )
    assert "value has more than 1,000 values" in refusal(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a, [b" * 4000}, {"text": "b"}] * 2, indent=1))
    assert read(tmp_path / "a.json") == ["a, [b" * 4000, "b"] * 2


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress])
def test_streams_one_after_another_are_read_and_damage_in_a_later_one_is_noticed(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    parts = [pack(LINES[:50]), pack(b""), pack(LINES[50:])]
    path = tmp_path / "a.jsonl.bz2"
    path.write_bytes(b"".join(parts))
    assert read(path) == TEXTS
    path.write_bytes(parts[0] + parts[1] + b"x" + parts[2][1:])
    assert f"cannot read {path}: " in refusal(path)
    path.write_bytes(b"".join(parts)[:-3])
    assert f"cannot read {path}: " in refusal(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.txt.bz2", "a.csv.zst"])
def test_a_file_that_is_called_compressed_and_is_neither_that_nor_text_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x00" + PACK["." + name.rpartition(".")[2]](LINES)[1:])
    assert f"cannot read {tmp_path}/{name}: it is damaged, or not compressed" in refusal(tmp_path / name)


def test_zstd_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refusal(tmp_path / "a.jsonl.zst")
