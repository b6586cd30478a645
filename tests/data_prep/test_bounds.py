"""Tests of damaged and malicious inputs: files of wrong sizes, and files that would fill memory or crash a library."""

from __future__ import annotations

import csv
import gc
import gzip
import io
import json
import resource
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
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

from data_prep import documents, hdf5_reader
from data_prep.documents import MAX_JSON_DEPTH, Document, Input, read_documents, read_tar_members
from data_prep.token_files import inspect_token_file, scan_tokens
from pipeline.run.worker import WorkerPool
from tests.model.test_user_model import VIT_CONFIG, create_prepared_run
from tests.support.errors import raises_error

TIMEOUT_S = 120


def read_all_documents(path: Path, file_format: str, end: int | None = None) -> list[Document]:
    """Return all documents of a file.

    `end` is the end of the range to read, which is the number of row groups if the file is Parquet. None means the size
    of the file.
    """
    size = path.stat().st_size
    source = Input(str(path), size, path.stat().st_mtime_ns, file_format)
    return list(read_documents(source, 0, size if end is None else end, "text"))


# -- HDF5 --------------------------------------------------------------------------------------------------


def change_row_count(path: Path, old: int, new: int) -> None:
    """Make each dataset of `old` rows claim `new` rows. The stored data stay unchanged."""
    content = path.read_bytes()
    assert struct.pack("<Q", old) in content
    path.write_bytes(content.replace(struct.pack("<Q", old), struct.pack("<Q", new)))


@pytest.mark.parametrize("layout", ["contiguous", "compact"])
def test_a_token_dataset_whose_size_differs_from_its_shape_is_rejected(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "t.h5"
    tokens = np.arange(1065, dtype="<u2")
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(getattr(h5py.h5d, layout.upper()))
        space = h5py.h5s.create_simple((1065,))
        element_type = h5py.h5t.py_create(tokens.dtype)
        dataset = h5py.h5d.create(file.id, b"tokens", element_type, space, properties)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, tokens)
    assert scan_tokens(inspect_token_file(str(path)), 0, 2000).tokens == 1065
    change_row_count(path, 1065, 41)
    # libhdf5 itself rejects the compact dataset. Its message does not contain the sizes.
    expected_texts = ("tokens", "(41,)", "82 bytes", "2,130 bytes") if layout == "contiguous" else ()
    with raises_error("data.damaged_file", path, *expected_texts):
        inspect_token_file(str(path))


def test_a_dataset_with_more_chunks_than_its_shape_needs_is_rejected(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "t.h5", "w") as file:
        file.create_dataset("tokens", data=np.arange(1065, dtype="<u2"), chunks=(100,), compression="gzip")
    assert scan_tokens(inspect_token_file(str(path)), 0, 2000).tokens == 1065
    change_row_count(path, 1065, 41)
    with raises_error("data.damaged_file", path, "tokens", "1 chunks", "11"):
        inspect_token_file(str(path))


def test_a_sample_array_whose_size_differs_from_its_shape_is_rejected(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file["images"] = np.zeros((50, 1, 16, 16), np.uint8)
        file["labels"] = np.zeros(50, np.int32)
    change_row_count(path, 50, 41)
    with raises_error("data.damaged_file", path, "labels", "(41,)", "200 bytes"):
        create_prepared_run(tmp_path, "run", text=VIT_CONFIG)


@pytest.mark.parametrize(
    ("failure", "code", "expected_text"),
    [
        ("crash", "data.damaged_file", "SIGSEGV"),
        ("loop", "data.damaged_file", "1 s of processor time"),
        ("kill", "data.reader_failed", "SIGKILL"),
        ("memory", "data.out_of_memory", "memory"),
        ("import", "data.missing_package", "h5py"),
    ],
)
def test_each_failure_of_the_hdf5_reader_raises_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, code: str, expected_text: str
) -> None:
    with h5py.File(path := tmp_path / "t.h5", "w") as file:
        file.create_dataset("tokens", data=np.arange(40, dtype="<u2"), chunks=(10,), compression="gzip")
    monkeypatch.setattr(hdf5_reader, "_READER", reader := WorkerPool("tests.support.failing_hdf5", 1))
    monkeypatch.setenv("FAIL_BY", failure)
    with raises_error(code, path, expected_text):
        list(hdf5_reader.read_rows(str(path), "tokens", 10))
    monkeypatch.delenv("FAIL_BY")
    reader.close()
    tokens = scan_tokens(inspect_token_file(str(path)), 0, 2000).tokens
    assert tokens == 40, "a new reader process did not answer the next request"
    reader.close()


def test_a_crash_while_reading_samples_is_an_error_with_the_file_and_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(path := tmp_path / "t.h5", "w") as file:
        file.create_dataset("images", data=np.zeros((40, 1, 16, 16), np.uint8), chunks=(10, 1, 16, 16))
        file["labels"] = np.zeros(40, np.int32)
    monkeypatch.setattr(hdf5_reader, "_READER", reader := WorkerPool("tests.support.failing_hdf5", 1))
    monkeypatch.setattr("data_prep.samples_folder._BLOCK_BYTES", 2560)  # one chunk of images
    monkeypatch.setenv("FAIL_BY", "crash")
    with raises_error("data.damaged_file", path, "images"):
        create_prepared_run(tmp_path, "run", text=VIT_CONFIG)
    reader.close()


def test_two_hdf5_reads_at_once_do_not_mix_and_one_may_end_early(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "t.h5", "w") as file:
        file["tokens"] = np.arange(40)
        file["input_ids"] = np.arange(7)
    blocks_of_10: Any = hdf5_reader.read_rows(str(path), "tokens", 10)
    blocks_of_3 = hdf5_reader.read_rows(str(path), "input_ids", 3)
    assert next(blocks_of_10).tolist() == [*range(10)]
    assert next(blocks_of_3).tolist() == [0, 1, 2]
    blocks_of_10.close()
    assert next(blocks_of_3).tolist() == [3, 4, 5]
    assert np.concatenate([*hdf5_reader.read_rows(str(path), "input_ids", 2)]).tolist() == [*range(7)]
    with raises_error("data.damaged_file", path):  # the file has no dataset `images`
        next(hdf5_reader.read_rows(str(path), "images", 2))


# -- lines -------------------------------------------------------------------------------------------------

MAX_CHARACTERS = 12
"""Characters of the longest document that the next test accepts."""


def write_lines(path: Path, lines: list[bytes]) -> Path:
    """Write the lines as documents, in the format of the file's ending, and return the path."""
    content = b"".join(line + b"\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(content))
    elif path.suffix in (".parquet", ".arrow"):
        table = pyarrow.table({"text": pyarrow.array(lines, pyarrow.binary())})
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table)
    elif path.suffix == ".tar":
        with tarfile.open(path, "w") as tar:
            for number, line in enumerate(lines):
                member = tarfile.TarInfo(f"{number}.txt")
                member.size = len(line)
                tar.addfile(member, io.BytesIO(line))
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "file_format"),
    [
        ("a.txt", "lines"), ("a.jsonl", "jsonl"), ("a.jsonl.gz", "gzip"), ("a.jsonl.zst", "zstd"),
        ("a.parquet", "parquet"), ("a.arrow", "arrow"), ("a.tar", "tar"),
    ],
)  # fmt: skip
def test_a_line_or_row_that_is_too_long_is_rejected_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file_format: str
) -> None:
    is_json = file_format in ("jsonl", "gzip", "zstd")
    wrap: Callable[[str], bytes] = (lambda text: f'{{"text":"{text}"}}'.encode()) if is_json else str.encode
    max_bytes = len(wrap("x" * MAX_CHARACTERS))
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", max_bytes)
    texts = ["one", "x" * MAX_CHARACTERS, "y" * (MAX_CHARACTERS + 1), "z" * MAX_CHARACTERS, "long" * 1000, "last"]
    path = write_lines(tmp_path / name, [wrap(text) for text in texts])
    documents_read = read_all_documents(path, file_format, 1 if file_format == "parquet" else None)
    assert [(document.line, document.text) for document in documents_read if document.reason is None] == [
        (number, text) for number, text in enumerate(texts, 1) if len(text) <= MAX_CHARACTERS
    ]
    assert {document.line: "longer than" in str(document.reason) for document in documents_read if document.reason} == {
        3: True,
        5: True,
    }


@settings(max_examples=100)
@given(content=st.binary(max_size=60).map(lambda data: bytes(b"ab\n"[byte % 3] for byte in data)), data=st.data())
def test_a_line_that_is_too_long_is_rejected_once_however_the_file_is_split(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "long.txt"
    path.write_bytes(content)
    boundaries = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content)), max_size=6))})
    source = Input(str(path), len(content), 0, "lines")
    documents_read: list[str | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "MAX_DOCUMENT_BYTES", 3)
        patch.setattr(documents, "_BLOCK_BYTES", 2)
        for start, end in pairwise(boundaries):
            documents_read += [
                document.text if document.reason is None else None
                for document in read_documents(source, start, end, "text")
            ]
    lines = content.decode().split("\n")
    if not lines[-1]:  # nothing follows the last newline, so it does not begin a line
        lines.pop()
    assert documents_read == [line if len(line) <= 3 else None for line in lines]


# Functions make the large contents, so that they are not in memory while the tests are collected.
EXPANDING_LINES: dict[str, Callable[[], bytes]] = {
    "line": lambda: b'{"text": "' + b"x" * 200_000_000 + b'"}\n',
    "objects": lambda: b'{"text": "x", "more": [' + b"{}," * 22_000_000 + b"0]}\n",
    "strings": lambda: b'{"text": "x", "more": [' + b'"\\\\\\"a",' * 7_000_000 + b"0]}\n",
}
"""A line of 200 MB, and two lines within `MAX_DOCUMENT_BYTES` that would need 4 GB as Python objects."""


@pytest.mark.parametrize("kind", EXPANDING_LINES)
def test_a_small_compressed_file_that_expands_is_rejected_within_1_gb(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(EXPANDING_LINES[kind]() + b'{"text": "next"}\n'))
    assert path.stat().st_size < 300_000
    program = (
        "import sys, json\n"
        "from data_prep.documents import Input, read_documents\n"
        "documents = read_documents(Input(sys.argv[1], 1, 0, 'gzip'), 0, 1, 'text')\n"
        "print(json.dumps([(document.line, document.text, document.reason) for document in documents]))\n"
    )
    max_bytes = 1_000_000_000  # of address space; Python and its modules need a tenth of it
    process = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=TIMEOUT_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes)),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    (line, text, reason), next_document = json.loads(process.stdout)
    assert (line, text) == (1, "") and ("longer than" if kind == "line" else "values") in reason
    assert next_document == [2, "next", None]


def test_the_json_depth_limit_does_not_depend_on_the_call_stack(tmp_path: Path) -> None:
    def make_nested_json(depth: int) -> bytes:
        return b'{"text": "x", "more": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    path = write_lines(
        tmp_path / "a.jsonl", [make_nested_json(n) for n in (MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1, 500, 100_000)]
    )

    def read_in_nested_calls(depth: int) -> list[Document]:
        return read_in_nested_calls(depth - 1) if depth else read_all_documents(path, "jsonl")

    for depth in (0, 500):
        documents_read = read_in_nested_calls(depth)
        assert [document.text for document in documents_read] == ["x", "", "", ""]
        assert {document.reason for document in documents_read[1:]} == {
            f"JSON that nests more than {MAX_JSON_DEPTH} deep"
        }


def test_a_long_line_of_many_strings_and_few_values_is_read(tmp_path: Path) -> None:
    text = "[{,:" * 5_000_000  # these characters begin and separate values only outside of strings
    documents_read = read_all_documents(
        write_lines(tmp_path / "a.jsonl", [json.dumps({"text": text, "id": 1}).encode()]), "jsonl"
    )
    assert [document.text == text for document in documents_read] == [True]


@pytest.fixture
def restored_csv_limit() -> Iterator[None]:
    """Restore the field size limit of Python's csv module. Reading a file changes it for the whole process."""
    limit = csv.field_size_limit()
    yield
    csv.field_size_limit(limit)


@pytest.mark.usefixtures("restored_csv_limit")
def test_a_csv_row_of_many_lines_is_rejected_if_it_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 40)
    (path := tmp_path / "a.csv").write_text("id,text\n1," + '"' + "line\n" * 7 + '"\n2,next\n')
    assert [document.text for document in read_all_documents(path, "csv")] == ["line\n" * 7, "next"]
    (path := tmp_path / "b.csv").write_text("id,text\n" + '1,"\n",' * 100 + "\n2,next\n")
    with raises_error("data.too_large", path, "line", "40 bytes"):
        read_all_documents(path, "csv")


# -- tar ---------------------------------------------------------------------------------------------------


def make_header(member_type: bytes, size: int, name: str = "x") -> bytes:
    """Return the 512 bytes of a tar header."""
    member = tarfile.TarInfo(name)
    member.type = member_type
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def make_extended_header(member_type: bytes, content: bytes) -> bytes:
    """Return an extended header, which describes the next member, with padding to a multiple of 512 bytes."""
    return make_header(member_type, len(content)) + content + b"\0" * (-len(content) % 512)


def make_pax_record(key: str, value: str) -> bytes:
    """Return a record `LENGTH KEY=VALUE` of a pax header. LENGTH includes its own digits."""
    length = len(key) + len(value) + len(" =\n")
    length += len(str(length + len(str(length))))
    return f"{length} {key}={value}\n".encode()


TAR_MEMBER = make_header(tarfile.REGTYPE, 5, "a.txt") + b"hello".ljust(512, b"\0")
TAR_END = b"\0" * 1024
"""The end of a tar file."""
SPARSE_RECORDS = (
    make_pax_record("GNU.sparse.major", "1")
    + make_pax_record("GNU.sparse.minor", "0")
    + make_pax_record("GNU.sparse.name", "a.txt")
)


@pytest.mark.parametrize(
    ("make_members", "expected_text"),
    [
        (
            lambda: make_extended_header(tarfile.XHDTYPE, make_pax_record("comment", "x" * 100_000_000)) + TAR_MEMBER,
            "extended header",
        ),
        (
            lambda: (
                make_extended_header(tarfile.XGLTYPE, make_pax_record("comment", "x" * 100_000) * 1000) + TAR_MEMBER
            ),
            "extended header",
        ),
        (lambda: make_extended_header(tarfile.GNUTYPE_LONGNAME, b"x" * 100_000_000) + TAR_MEMBER, "extended header"),
        (lambda: make_extended_header(tarfile.GNUTYPE_LONGLINK, b"x" * 100_000) + TAR_MEMBER, "extended header"),
        (lambda: make_header(tarfile.XHDTYPE, -512) + TAR_MEMBER, "extended header"),
        (lambda: make_extended_header(tarfile.GNUTYPE_LONGNAME, b"x") * 2000 + TAR_MEMBER, "extended headers"),
        (
            lambda: make_extended_header(tarfile.XHDTYPE, make_pax_record("comment", "x")) * 2000 + TAR_MEMBER,
            "extended headers",
        ),
        (
            lambda: b"".join(
                make_extended_header(tarfile.XGLTYPE, make_pax_record(f"k{i}", "x" * 60_000)) + TAR_MEMBER
                for i in range(9)
            ),
            "global headers",
        ),
        (lambda: make_extended_header(tarfile.XHDTYPE, SPARSE_RECORDS) + TAR_MEMBER, "sparse"),
        (lambda: make_header(tarfile.GNUTYPE_SPARSE, 0, "a.txt"), "sparse"),
    ],
    ids=[
        "long pax value",
        "long global pax value",
        "long name",
        "long link",
        "negative size",
        "many names",
        "many pax",
        "many global",
        "sparse",
        "old sparse",
    ],
)
@pytest.mark.parametrize("is_compressed", [False, True], ids=["tar", "gzip"])
def test_a_tar_with_large_or_unsupported_headers_is_rejected(
    tmp_path: Path, make_members: Callable[[], bytes], expected_text: str, is_compressed: bool
) -> None:
    """`make_members` returns the content of a tar file without its end. The content has up to 100 MB."""
    content = make_members() + TAR_END
    path = tmp_path / "a.tar"
    path.write_bytes(gzip.compress(content, 1) if is_compressed else content)
    with raises_error("data.damaged_file", path, expected_text):
        read_all_documents(path, "tar")


def test_tar_members_with_long_names_and_comments_are_read(tmp_path: Path) -> None:
    for number, tar_format in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        with tarfile.open(
            path := tmp_path / f"{number}.tar", "w", format=tar_format, pax_headers={"comment": "x" * 99}
        ) as tar:
            for name in ("a" * 300, "ü" * 90):
                member = tarfile.TarInfo(f"{name}.txt")
                member.size = len(b"hello")
                member.linkname = "l" * 200
                tar.addfile(member, io.BytesIO(b"hello"))
        assert [document.text for document in read_all_documents(path, "tar")] == ["hello", "hello"]


def test_a_tar_sample_whose_members_are_too_large_together_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_MAX_SAMPLE_BYTES", 1000)
    content = b"".join(make_header(tarfile.REGTYPE, 5, f"a.{i}.txt") + b"hello".ljust(512, b"\0") for i in range(201))
    (path := tmp_path / "a.tar").write_bytes(content + TAR_END)
    with raises_error("data.too_large", path, "'a'", "1,000 bytes"):
        read_all_documents(path, "tar")


def test_headers_of_earlier_members_are_not_kept_in_memory(tmp_path: Path) -> None:
    (path := tmp_path / "a.tar").write_bytes(make_header(tarfile.REGTYPE, 0, "a.bin") * 1000 + TAR_MEMBER + TAR_END)
    members = read_tar_members(str(path), (".txt",))
    assert next(members) == ("a.txt", b"hello")
    assert sum(isinstance(value, tarfile.TarInfo) for value in gc.get_objects()) < 50
