"""What a file seems to be, by its first bytes and its name, and how to convert what is not read.

Names decide first (data_prep/inputs/listing.py). Content decides for names that tell nothing, and messages name it. The
table of docs/data.md, "What is not read", is the one below.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import struct
import zlib
from typing import NamedTuple

from data_prep.inputs.compression import HEAD, open_decompressed
from pipeline.base.errors import UserError

BOM = codecs.BOM_UTF8
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
UTF16_ADVICE = "text in UTF-16: convert it, iconv -f UTF-16 -t UTF-8 FILE > NEW"

_BINARY: list[tuple[str, bytes | re.Pattern[bytes]]] = [
    ("Parquet", re.compile(rb"PAR1[\x00-\x08\x0e-\x1f]")),  # PAR1 is a protein, too
    ("Arrow", re.compile(rb"ARROW1\0\0|\xff{4}[\x00-\xff]{2}[\x00-\x0f]\x00", re.DOTALL)),
    ("tar", re.compile(rb"[\x00-\xff]{257}ustar(?:\0|  \0)", re.DOTALL)),
    ("HDF5", b"\x89HDF\r\n\x1a\n"),
    ("NumPy .npy", b"\x93NUMPY"),
    ("zip", re.compile(rb"PK(?:\x03\x04|\x05\x06)")),
    ("LZ4", b"\x04\x22\x4d\x18"),
    ("Snappy", b"\xff\x06\x00\x00sNaPpY"),
    ("7-Zip", b"7z\xbc\xaf\x27\x1c"),
    ("RAR", b"Rar!\x1a\x07"),
    ("ORC", re.compile(rb"ORC[\x00-\x08]")),
    ("Avro", b"Obj\x01"),
    ("SQLite", b"SQLite format 3\0"),
    (
        "pickle",
        re.compile(
            rb"\x80[\x04\x05]\x95[\x00-\xff]{5}\0{3}|\x80[\x02\x03]c[\w.]{3,}\n|\x80\x02\x8a\nl\xfc\x9cF", re.DOTALL
        ),
    ),
    ("PDF", b"%PDF-"),
    ("Megatron index", b"MMIDIDX\0\0"),
    ("safetensors", re.compile(rb"[\x00-\xff]{5}\x00{3}\{[\" ]", re.DOTALL)),
]
_MDS = re.compile(r"\.mds(\.\w+)?$")  # compressed: .mds.zstd
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # all but line ends, tabs, form feeds and escape

CONVERSIONS = {
    "MosaicML MDS": (
        'with the package mosaicml-streaming: set_ = streaming.StreamingDataset(local="FOLDER", batch_size=1); write '
        'json.dumps({"text": row["text"]}) of each of its rows as a line of a .jsonl file'
    ),
    "TFRecord": (
        "with the package tensorflow: tf.train.Example.FromString(row.numpy()) for row in "
        'tf.data.TFRecordDataset("FILE"); write json.dumps({"text": example.features.feature["text"]'
        ".bytes_list.value[0].decode()}) as a line of a .jsonl file"
    ),
    "bare tokens named .npy": (
        "uint16 tokens, as OLMo writes them: link or rename the file to NAME.bin and set data.records: tokens. uint32: "
        'h5py.File("NAME.h5", "w")["tokens"] = numpy.fromfile("FILE", "<u4")'
    ),
    "NumPy .npy": (
        'tokens: h5py.File("NAME.h5", "w")["tokens"] = numpy.load("FILE").ravel().astype("<u4") and set data.records: '
        "tokens; or put them into a WebDataset .tar"
    ),
    "HDF5": "tokens are read with data.records: tokens, samples with model.target; texts: write them to .jsonl",
    "zip": "unpack it: unzip FILE",
    "7-Zip": "unpack it: 7z x FILE",
    "RAR": "unpack it: unrar x FILE",
    "LZ4": "unpack it: lz4 -d FILE",
    "Snappy": "unpack it, and compress it with zstd",
    "ORC": 'pyarrow.parquet.write_table(pyarrow.orc.read_table("FILE"), "NAME.parquet")',
    "Avro": "with the package fastavro: write json.dumps of each record of fastavro.reader as a line of a .jsonl file",
    "SQLite": "write json.dumps of each row as a line of a .jsonl file",
    "pickle": "load it, and write the texts to .jsonl",
    "PDF": "extract the text, for example pdftotext FILE NAME.txt",
    "web archive": "extract the text with datatrove or trafilatura, to .jsonl",
    "XML or HTML": "extract the text; to take the markup for text, set data.format: text",
    "UTF-16 text": "iconv -f UTF-16 -t UTF-8 FILE > NEW",
}
"""What is not read, or not without a word of the user's, and what to do about it."""


class Seems(NamedTuple):
    """What a file seems to be."""

    kind: str
    """`JSON Lines`, `JSON`, `Parquet`, `text`, …, as in `CONVERSIONS`."""
    compression: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}, compressed with {self.compression}" if self.compression else self.kind


def advice(kind: str) -> str:
    """Return how to convert files of a kind, behind a colon; "" if nothing is known."""
    return f". To convert it: {CONVERSIONS[kind]}" if kind in CONVERSIONS else ""


def binary_kind(head: bytes) -> str | None:
    """Return the name of the binary format that a file with these first bytes has, None if there is no known mark."""
    for name, mark in _BINARY:
        if head.startswith(mark) if isinstance(mark, bytes) else mark.match(head):
            return name
    return "TFRecord" if _is_tfrecord(head) else None


def seems(path: str) -> Seems:
    """Return what a file seems to be. Never raises for its content, or for a file that cannot be read."""
    try:
        with open_decompressed(path) as (_, head, compression):
            return Seems(_kind(path, head), compression)
    except UserError as error:
        return Seems(str(error).removeprefix(f"{path}: "))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        return Seems(f"not readable: {getattr(error, 'strerror', None) or error}")


def _kind(path: str, head: bytes) -> str:
    if not head:
        return "empty"
    if is_mds(path):
        return "MosaicML MDS"
    if known := binary_kind(head):
        return known
    if ".npy" in os.path.basename(path):
        return "bare tokens named .npy"
    if head.startswith(UTF16):
        return "UTF-16 text"
    if not is_text(head):
        return "tokens, perhaps (data.records: tokens)" if path.endswith((".bin", ".ds")) else "binary data"
    start = head.removeprefix(BOM).lstrip()
    if start.startswith(b"WARC/"):
        return "web archive"
    if re.match(rb"<(\?xml|!doctype|html)", start, re.IGNORECASE):
        return "XML or HTML"
    columns = {".csv": "CSV", ".tsv": "TSV"}.get(os.path.splitext(path)[1])
    return columns or json_kind(head) or "text"


def is_mds(path: str) -> bool:
    """Return whether a file is a shard of MosaicML's, or the index of a folder of them, by the names alone."""
    folder, name = os.path.split(path)
    if name == "index.json":
        return any(map(_MDS.search, os.listdir(folder or os.curdir)))
    return _MDS.search(name) is not None


def is_text(head: bytes) -> bool:
    """Return whether these first bytes of a file are UTF-8 without control characters."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD)
    except UnicodeDecodeError:
        return False
    return not _CONTROL.search(head)


def json_kind(head: bytes) -> str | None:
    """Return `JSON Lines`, `JSON` (an array, or objects of several lines) or None for the first bytes of a text."""
    start = head.removeprefix(BOM).decode(errors="ignore").lstrip()
    if not start.startswith(("{", "[")):
        return None
    line, *rest = start.split("\n")
    value = _value(line)
    if isinstance(value, dict):
        return "JSON Lines"
    if isinstance(value, list):
        return "JSON Lines" if "".join(rest).lstrip().startswith("[") else "JSON"
    if start.startswith("["):
        return "JSON" if re.match(r"\[\s*([{\]]|$)", start) else None
    if line.strip() == "{":
        return "JSON"
    try:
        _, end = json.JSONDecoder().raw_decode(start)
        several = end > len(line) or line[end:].lstrip().startswith("{")
        return "JSON" if several else "JSON Lines"
    except (ValueError, RecursionError):
        # The first line is broken, or longer than what was read.
        is_long = not rest and len(head) >= HEAD
        return "JSON Lines" if is_long or any(isinstance(_value(one), dict) for one in rest if one[:1] == "{") else None


def _value(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_tfrecord(head: bytes) -> bool:
    """Whether the first record's length has its checksum (tensorflow/core/lib/io/record_writer.h)."""
    if len(head) < 16:
        return False
    length, masked = struct.unpack_from("<QI", head)
    if length >= 1 << 40:
        return False
    crc = 0xFFFFFFFF
    for byte in head[:8]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == masked
