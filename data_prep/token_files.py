"""One file of tokens as its header or index describes it, and reading it block by block.

Where `offset` is known, tokens lie one after another from there on, little-endian, so that a loader maps them; else
`rows` reads them. Documents are known by an index (`ends`), by the rows, or by the end-of-text tokens between them.


Megatron-LM's NAME.bin with NAME.idx: all tokens behind one another, and an index of sequences and documents.

The index (megatron/core/datasets/indexed_dataset.py, `_IndexWriter`), little-endian: `MMIDIDX\0\0`, uint64 version 1,
uint8 type, uint64 sequences n, uint64 d, then int32 lengths (n,), int64 byte offsets (n,), int64 documents (d,), the
sequences at which they begin with n at the end; of multimodal sets uint8 modes (n,) besides.


llm.c's .bin: 256 int32 of header, then the tokens (llm.c, dev/data/data_common.py).

Of the header: a magic number that tells the type, its version, and how many tokens follow. Documents *begin* with the
end-of-text token there, so each document's token stands at the end of the one before.


HDF5 with a dataset `tokens` or `input_ids` of integers: our own shards (data_prep/shard_writer.py), and others'.

Of shape (tokens,), or (rows, T), which is read as one row behind the other. A contiguous dataset is mapped where it
lies; chunked and compressed ones are read by whole blocks of rows. What leads elsewhere (links, external and virtual
data) is not followed. The file is read in a child process (data_prep/hdf5_reader.py).


datatrove's NAME.ds: raw tokens, with NAME.ds.index and NAME.ds.metadata beside them.

The index is uint64, shape (documents,): where each document ends. The metadata's first line ends with `|2` or `|4`, the
bytes of a token, and its second says how many there are (datatrove, pipeline/tokens/tokenizer.py, `TokenizedFile`). Old
versions left the width out, and shuffled files may have no index: then the sizes tell.


Arrow files, as Hugging Face's `datasets` leaves them on disk: streams (or files) of record batches.

A row is a document: its list of ids in `input_ids` (or `tokens`). Texts in them are a format of
data_prep/documents.py.


WebDataset: a tar (or .tar.gz) whose members `KEY.npy`, `KEY.tokens.npy` or `KEY.input_ids.npy` are arrays of ids.

An array is a document. Nothing is unpickled, and nothing unpacked to disk. Tars of texts are a format of
data_prep/documents.py.


A .bin of bare uint16 tokens, as nanoGPT writes it (data/*/prepare.py: `arr.tofile`), documents ended by their token.

There is nothing in it to tell it by, so it comes last: what has another format's mark is not taken for it, and ids that
the tokenizer does not have betray what was no such file.


Which formats of tokens there are: a row and a file for each; the first whose mark is found is taken.

Megatron      NAME.bin with NAME.idx                        mapped where they lie
llm.c         .bin with a header                            mapped
HDF5          `tokens` or `input_ids`                       mapped where contiguous
datatrove     NAME.ds with .ds.index, .ds.metadata          mapped
Arrow         lists in `input_ids`: Hugging Face's          copied (`data import`)
WebDataset    .npy in a tar                                 copied
nanoGPT       .bin of bare uint16                           mapped
"""

from __future__ import annotations

import io
import os
import re
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data_prep.documents import MAX_COMPRESSION_RATIO, read_arrow_batches, read_tar_members
from data_prep.file_type import (
    detect_binary_format,
    detect_compression,
    detect_file_type,
    format_conversion_hint,
    is_text,
)
from data_prep.hdf5_reader import Dataset, describe_datasets, read_rows
from pipeline.base.command import format_command
from pipeline.base.errors import UserError
from pipeline.base.files import open_regular_file, translate_read_errors

Ids = npt.NDArray[np.integer]
BLOCK = 1 << 22
NANO_GPT = "nanoGPT .bin"
MAX_DOCUMENT_TOKENS = 1 << 28
"""Tokens of one document: beyond that its end was missed."""
MAPPABLE_TYPES = {"uint16": "uint16", "uint32": "uint32", "int32": "uint32"}
"""Types that a loader takes, and as what; ids are checked to be no negative ones."""


class DocumentEnds:
    """Where documents end, in tokens from the file's start, by an index beside it that may be larger than the memory.

    It is read at the places that are asked for: what lies in a part is found by halving, some hundred small reads. It
    is not mapped: a file that is cut off meanwhile would end the process.
    """

    def __init__(self, path: str, documents: int) -> None:
        self.path, self._documents, self._file = path, documents, open_regular_file(path)

    def __len__(self) -> int:
        """How many documents there are."""
        return self._documents

    def __getitem__(self, document: int) -> int:
        """Where one ends."""
        return int(self.ends(document, document + 1)[0])

    def ends(self, start: int, stop: int) -> Ids:
        """Where documents [start, stop) end: shape (stop - start,)."""
        return self.numbers(0, start, stop)

    def check(self) -> None:
        """Read all. Raises UserError where the index is damaged, or not that of the file."""
        last = 0
        for start in range(0, len(self), BLOCK):
            last = self.ordered(self.ends(start, min(start + BLOCK, len(self))), last, sys.maxsize)[-1]

    def within(self, start: int, stop: int) -> Ids:
        """The ends in (start, stop]: shape (documents,). Raises UserError as `ordered` does."""
        first = bisect_right(self, start)
        return self.ordered(self.ends(first, bisect_right(self, stop, first)), start + 1, stop)

    def ordered(self, found: Ids, least: int, most: int) -> Ids:
        """What was found. Raises UserError where one is less than the one before, or beyond the bounds."""
        if len(found) and (found[0] < least or found[-1] > most or (found[1:] < found[:-1]).any()):
            raise UserError(
                "data.damaged_file", f"{self.path} is damaged: documents end one after another, and not beyond the file"
            )
        return found

    def numbers(self, at: int, start: int, stop: int, kind: str = "<i8") -> Ids:
        """Those at the places [start, stop), counted from byte `at`. Raises UserError where the index ends before."""
        size = np.dtype(kind).itemsize
        found = os.pread(self._file.fileno(), (stop - start) * size, at + start * size)
        if len(found) < (stop - start) * size:
            raise UserError("data.damaged_file", f"{self.path} is cut short: it ends before byte {at + stop * size:,}")
        return np.frombuffer(found, kind)


class TokenFile(NamedTuple):
    """What is known of a file before its tokens are read."""

    path: str
    """Of the file that holds the tokens, absolute."""
    format: str
    dtype: str
    """Name of their type, little-endian."""
    tokens: int | None = None
    """How many; None where only reading tells."""
    offset: int | None = None
    """Where they start, in bytes; None where they do not lie in one piece."""
    ends: DocumentEnds | None = None
    """Where each document of the file ends, by its index."""
    rows: Callable[[], Iterator[Ids]] | None = None
    """The tokens of a file without an `offset`, in parts."""
    row_is_document: bool = True
    """Whether each of these parts is a document."""
    before: int = 0
    """Tokens of the file in front of these."""
    note: str = ""
    """What a person should know besides, behind a semicolon."""

    @property
    def why_not(self) -> str | None:
        """Why no loader can map it; None where one can."""
        if self.offset is None:
            return f"{self.format} does not hold them in one piece"
        return None if self.dtype in MAPPABLE_TYPES else f"they are {self.dtype}"

    def part(self, start: int, stop: int) -> TokenFile:
        """Tokens [start, stop) of what lies in one piece, as if they were all; a document counts where it ends."""
        assert self.offset is not None
        offset = self.offset + start * np.dtype(self.dtype).itemsize
        return self._replace(offset=offset, tokens=stop - start, before=self.before + start)

    def ends_in(self, start: int, stop: int) -> Ids | None:
        """How many tokens behind `start` the documents end that end in (start, stop], by the index, shape (documents,);
        None without one."""
        start, stop = self.before + start, self.before + stop
        return None if self.ends is None else self.ends.within(start, stop) - start

    def read(self, start: int, stop: int) -> Ids:
        """Tokens [start, stop) of what lies in one piece. Raises UserError where the file is too short for that."""
        assert self.offset is not None
        kind = np.dtype(self.dtype).newbyteorder("<")
        with open_regular_file(self.path) as file:
            found = np.fromfile(file, kind, stop - start, offset=self.offset + start * kind.itemsize)
        if len(found) < stop - start:
            raise UserError(
                "data.damaged_file", f"{self.path} is cut short: it ends before token {stop:,} of {self.tokens:,}"
            )
        return found

    def blocks(self) -> Iterator[Ids]:
        """All tokens, a few million at a time, or a document."""
        if self.rows is not None:
            yield from self.rows()
            return
        assert self.tokens is not None
        for start in range(0, self.tokens, BLOCK):
            yield self.read(start, min(start + BLOCK, self.tokens))

    def documents(self, eos_id: int) -> Iterator[Ids]:
        """The documents; without an index each ends with a token `eos_id`, the last perhaps without one.

        Raises UserError where one does not end.
        """
        if self.rows is not None and self.row_is_document:
            yield from self.rows()
            return
        parts: list[Ids] = []
        before = waiting = 0
        for block in self.blocks():
            borders = self.ends_in(before, before + len(block))
            if borders is None:
                borders = np.flatnonzero(block == eos_id) + 1
            start = 0
            for end in borders.tolist():
                yield np.concatenate([*parts, block[start:end]])
                parts, waiting, start = [], 0, end
            if start < len(block):
                parts, waiting = [*parts, block[start:]], waiting + len(block) - start
            if waiting > MAX_DOCUMENT_TOKENS:
                raise UserError(
                    "data.no_document_end",
                    f"{self.path}: no token {eos_id} within {waiting:,} tokens: name their own tokenizer",
                )
            before += len(block)
        if parts:
            yield np.concatenate(parts)


class TokenStatistics(NamedTuple):
    """What reading all tokens told."""

    tokens: int
    largest: int
    ended: int
    """End-of-text tokens."""
    unended: int
    """Documents of the index that do not end with one."""


def scan_tokens(file: TokenFile, eos_id: int, vocab_size: int) -> TokenStatistics:
    """Read all tokens. Raises UserError naming the place of the first id outside
    [0, vocab_size), for no token, and for bare uint16 where the tokenizer (below 2**32 ids) has more.
    """
    if file.format == NANO_GPT and 1 << 16 < vocab_size < 1 << 32:
        raise UserError(
            "data.wrong_token_width",
            f"{file.path}: a bare .bin is read as uint16, and the tokenizer has {vocab_size:,} ids: put Megatron's "
            ".idx beside it, or write the tokens to HDF5, as a dataset `tokens` of uint32",
        )
    tokens = largest = ended = unended = 0
    for block in file.blocks():
        if len(block) and (int(block.min()) < 0 or int(block.max()) >= vocab_size):
            bad = int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
            place = file.before + tokens + bad
            raise UserError(
                "data.token_out_of_range",
                f"{file.path}: token {place:,} is {block[bad]}, and the tokenizer has the ids 0 to "
                f"{vocab_size - 1}: the file is damaged, no {file.format}, or of another tokenizer",
            )
        largest = max(largest, int(block.max())) if len(block) else largest
        ended += int(np.count_nonzero(block == eos_id))
        if file.rows is not None and file.row_is_document:
            unended += int(len(block) > 0 and block[-1] != eos_id)
        elif (ends := file.ends_in(tokens, tokens + len(block))) is not None:
            unended += int(np.count_nonzero(block[np.unique(ends) - 1] != eos_id))  # no empty ones
        tokens += len(block)
    if not tokens:
        raise UserError("data.no_tokens", f"{file.path} holds no tokens: leave it out")
    return TokenStatistics(tokens, largest, ended, unended)


def read_file_size(path: str) -> int:
    """Bytes of a file. Raises UserError for a pipe or a device."""
    with open_regular_file(path) as file:
        return os.fstat(file.fileno()).st_size


def read_head(path: str, count: int) -> bytes:
    """The first bytes of a file; b"" where there is none. Raises UserError for a pipe or a device."""
    try:
        with open_regular_file(path) as file:
            return file.read(count)
    except (FileNotFoundError, IsADirectoryError):
        return b""


_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def _megatron_index_path(path: str) -> str:
    return path if path.endswith(".idx") else f"{path.removesuffix('.bin')}.idx"


def _is_megatron(path: str, head: bytes) -> bool:
    """Whether it is one of the two files."""
    return (
        path.endswith((".bin", ".idx"))
        and read_head(_megatron_index_path(path), len(_MEGATRON_MAGIC)) == _MEGATRON_MAGIC
    )


def _inspect_megatron(path: str) -> TokenFile:
    """Read the index's header. Raises UserError where the index is not as long as that says."""
    index = _megatron_index_path(path)
    data = f"{index.removesuffix('.idx')}.bin"
    size, whole = read_file_size(index), read_file_size(data)
    head = read_head(index, _MEGATRON_HEADER.size)
    if len(head) < _MEGATRON_HEADER.size:
        raise UserError(
            "data.damaged_file", f"{index} is cut short: it has {size} bytes, its header {_MEGATRON_HEADER.size}"
        )
    _, version, code, count, documents = _MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in _MEGATRON_TYPES:
        raise UserError(
            "data.unsupported_file", f"{index}: version {version} with tokens of type {code} is no index that is known"
        )
    wanted = _MEGATRON_HEADER.size + 12 * count + 8 * documents
    if not documents or size not in (wanted, wanted + count):
        raise UserError(
            "data.damaged_file",
            f"{index} has {size} bytes, but {count} sequences and {documents} borders take {wanted}",
        )
    width = np.dtype(_MEGATRON_TYPES[code]).itemsize
    ends = _MegatronDocumentEnds(index, documents - 1, data, whole, count, width)
    return TokenFile(data, "Megatron .bin", _MEGATRON_TYPES[code], whole // width, 0, ends)


class _MegatronDocumentEnds(DocumentEnds):
    def __init__(self, index: str, documents: int, data: str, whole: int, count: int, width: int) -> None:
        """`count` sequences of the `combine_units` bytes of `data`, `width` bytes a token."""
        super().__init__(index, documents)
        self._data, self._whole, self._count, self._width = data, whole, count, width
        self._offsets, self._firsts = _MEGATRON_HEADER.size + 4 * count, _MEGATRON_HEADER.size + 12 * count

    def ends(self, start: int, stop: int) -> Ids:
        firsts = self.ordered(self.numbers(self._firsts, start + 1, stop + 1), 0, self._count)
        low, high = firsts[[0, -1]].tolist() if len(firsts) else (0, 0)
        offsets = np.append(self.numbers(self._offsets, low, min(high + 1, self._count)), self._whole)
        return offsets[firsts - low] // self._width

    def check(self) -> None:
        what = f"its sequences are not what {self._whole} bytes hold"
        damaged, end = UserError("data.damaged_file", f"{self.path} is damaged, or not that of {self._data}: {what}"), 0
        for start in range(0, self._count, BLOCK):
            stop = min(start + BLOCK, self._count)
            lengths, starts = (
                self.numbers(_MEGATRON_HEADER.size, start, stop, "<i4"),
                self.numbers(self._offsets, start, stop),
            )
            ends = end + np.cumsum(lengths, dtype=np.int64) * self._width
            if (lengths < 0).any() or starts[0] != end or (starts[1:] != ends[:-1]).any():
                raise damaged
            end = int(ends[-1])
        if end != self._whole:
            raise damaged
        if [self.numbers(self._firsts, place, place + 1)[0] for place in (0, len(self))] != [0, self._count]:
            raise UserError(
                "data.damaged_file", f"{self.path} is damaged: its documents do not go from sequence 0 to {self._count}"
            )
        super().check()


_LLM_C_HEADER_BYTES = 1024
_LLM_C_TYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
_LLM_C_OTHER_FILES = {
    20240522: "an evaluation file (as for HellaSwag or MMLU): questions with answers",
    20240326: "a model",
    20240327: "a model's state for debugging",
    20240328: "a tokenizer",
    20240527: "a training's state",
}


def _is_llm_c(path: str, head: bytes) -> bool:
    """Whether a header of llm.c's is there, of tokens or of something else."""
    if len(head) < 12:
        return False
    magic, version = struct.unpack_from("<2i", head)
    is_dated = 20230101 <= magic <= 20391231 and 0 < version < 100 and len(head) >= 512 and not any(head[64:512])
    return magic in {known for known, _ in _LLM_C_TYPES} or is_dated


def _inspect_llm_c(path: str) -> TokenFile:
    """Read the header. Raises UserError where the file is not of the length that it says."""
    with open(path, "rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12))
    if magic not in {known for known, _ in _LLM_C_TYPES}:
        what = _LLM_C_OTHER_FILES.get(magic, f"a file with the number {magic}")
        raise UserError("data.not_tokens", f"{path} is {what} of llm.c's, and no tokens to train on: leave it out")
    if (dtype := _LLM_C_TYPES.get((magic, version))) is None:
        raise UserError("data.unsupported_file", f"{path}: version {version} of llm.c's format {magic} is not known")
    size, wanted = read_file_size(path), _LLM_C_HEADER_BYTES + tokens * int(dtype[4:]) // 8
    if tokens < 0 or size != wanted:
        raise UserError("data.damaged_file", f"{path} has {size} bytes, but a header and {tokens} tokens take {wanted}")
    return TokenFile(path, "llm.c .bin", dtype, tokens, _LLM_C_HEADER_BYTES)


_HDF5_DATASETS = ("tokens", "input_ids")


def _is_hdf5(path: str, head: bytes) -> bool:
    """Whether it has the mark of HDF5."""
    return head.startswith(b"\x89HDF\r\n\x1a\n")


def _inspect_hdf5(path: str) -> TokenFile:
    """Find the dataset. Raises UserError where there is none that holds tokens."""
    found, there = describe_datasets(path, _HDF5_DATASETS, follow_links=False)
    dataset = next((found[name] for name in _HDF5_DATASETS if name in found), None)
    if dataset is None:
        raise UserError(
            "data.no_array", f"{path}: no dataset {' or '.join(_HDF5_DATASETS)}; there are {', '.join(there) or 'none'}"
        )
    name, kind, shape = dataset.name, dataset.dtype, dataset.shape
    if kind.kind not in "iu" or len(shape) not in (1, 2) or dataset.is_virtual or dataset.is_external:
        raise UserError(
            "data.wrong_type", f"{path}: {name} is {kind} of shape {shape}; tokens are integers in one or two axes"
        )
    tokens, stored = dataset.nbytes // kind.itemsize, dataset.stored
    # A chunk that was never written would be read as zeros.
    if dataset.stored_chunks < dataset.grid or dataset.nbytes > MAX_COMPRESSION_RATIO * stored:
        raise UserError(
            "data.damaged_file",
            f"{path}: {name} claims {tokens:,} tokens, and {stored:,} bytes are stored: it is not whole",
        )
    mapped = dataset.offset if kind.byteorder != ">" else None
    if dataset.chunks and np.prod(dataset.chunks) > 8 * BLOCK:
        raise UserError(
            "data.too_large",
            f"{path}: {name} has chunks of {dataset.chunks}, too large to be read one by one: repack it",
        )
    rows = None if mapped is not None else partial(_hdf5_rows, dataset)
    return TokenFile(path, "HDF5", kind.name, tokens, mapped, rows=rows, row_is_document=False)


def _hdf5_rows(dataset: Dataset) -> Iterator[Ids]:
    """What is not mapped, block by block."""
    step = max(1, BLOCK // max(1, int(np.prod(dataset.shape[1:]))))
    for block in read_rows(dataset.path, dataset.name, step):
        yield block.ravel()


_DATATROVE_METADATA = re.compile(rb"[^\n]*?(?:\|([24]))?\r?\n(\d{1,18})(?:\r?\n.*)?", re.DOTALL)


def _is_datatrove(path: str, head: bytes) -> bool:
    """Whether it is a .ds with index or metadata."""
    return path.endswith(".ds") and (os.path.exists(f"{path}.index") or os.path.exists(f"{path}.metadata"))


def _inspect_datatrove(path: str) -> TokenFile:
    """Read what stands beside it. Raises UserError where that does not fit the file."""
    size, ends = read_file_size(path), None
    if os.path.exists(f"{path}.index"):
        if (held := read_file_size(f"{path}.index")) % 8:
            raise UserError("data.damaged_file", f"{path}.index is cut short: it is no row of 8-byte numbers")
        ends = DocumentEnds(f"{path}.index", held // 8)
    told = _DATATROVE_METADATA.fullmatch(read_head(f"{path}.metadata", 1 << 16))
    if told is None and os.path.exists(f"{path}.metadata"):
        raise UserError(
            "data.damaged_file", f"{path}.metadata is damaged: its second line should be the number of tokens"
        )
    last = ends[len(ends) - 1] if ends else 0
    tokens = int(told[2]) if told else last
    width = int(told[1]) if told and told[1] else size // max(1, tokens)
    if width not in (2, 4) or tokens * width != size or (ends and last != tokens):
        raise UserError(
            "data.damaged_file", f"{path} has {size} bytes, which its index and metadata do not fit: {tokens} tokens"
        )
    note = f"; {path}.loss is not used: all tokens are learned" if os.path.exists(f"{path}.loss") else ""
    return TokenFile(path, "datatrove .ds", f"uint{8 * width}", tokens, 0, ends, note=note)


_ARROW_COLUMNS = ("input_ids", "tokens")


def _is_arrow(path: str, head: bytes) -> bool:
    """Whether it has the mark of a file, or of a stream's first message."""
    return head.startswith((b"ARROW1", b"\xff\xff\xff\xff"))


def _inspect_arrow(path: str) -> TokenFile:
    """Read the schema. Raises UserError where no column holds ids."""
    import pyarrow

    schema, _ = read_arrow_batches(path)
    for name in _ARROW_COLUMNS:
        kind = schema.field(name).type if name in schema.names else pyarrow.null()
        types = pyarrow.types
        lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        if any(test(kind) for test in lists) and pyarrow.types.is_integer(kind.value_type):
            return TokenFile(path, "Arrow", str(kind.value_type), rows=partial(_arrow_rows, path, name))
    raise UserError(
        "data.no_column",
        f"{path}: no column {' or '.join(_ARROW_COLUMNS)} with lists of integers; there are {schema.names}. "
        "Where it is text, name it in data.source of a run, with data.text_field",
    )


def _arrow_rows(path: str, name: str) -> Iterator[Ids]:
    for batch in read_arrow_batches(path)[1]:
        column = batch.column(batch.schema.names.index(name))
        values, lengths = column.flatten(), column.value_lengths()
        if column.null_count or values.null_count:
            raise UserError("data.null_value", f"{path}: a row of {name} is null: filter it out")
        ids, ends = np.asarray(values), np.cumsum(lengths)
        yield from (ids[start:end] for start, end in pairwise([0, *ends.tolist()]))


def _is_web_dataset(path: str, head: bytes) -> bool:
    """Whether it is a tar, or compressed and called one."""
    return head[257:262] == b"ustar" or path.endswith((".tar", ".tar.gz", ".tgz"))


def _inspect_web_dataset(path: str) -> TokenFile:
    """Read up to the first array. Raises UserError where there is none."""
    first = next(_web_dataset_rows(path), None)
    if first is None:
        raise UserError(
            "data.not_tokens", f"{path}: no member .npy with ids; where it holds texts, name it in data.source of a run"
        )
    return TokenFile(path, "WebDataset tar", first.dtype.name, rows=lambda: _web_dataset_rows(path))


def _web_dataset_rows(path: str) -> Iterator[Ids]:
    for name, content in read_tar_members(path, (".npy",)):
        if name.endswith((".tokens.npy", ".input_ids.npy")) or name.rpartition("/")[2].count(".") == 1:
            if content is None:
                raise UserError(
                    "data.too_large", f"{path}: {name} is too large to be read at once: write smaller arrays"
                )
            yield _parse_npy(f"{path}: {name}", content)


def _parse_npy(where: str, content: bytes) -> Ids:
    """The array of a .npy. (numpy's own reader would make room for what the header claims.)"""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, columns, kind = read(file)
        if (
            kind.kind not in "iu"
            or len(shape) > 2
            or np.prod(shape, dtype=object) * kind.itemsize != len(rest := content[file.tell() :])
        ):
            raise UserError(
                "data.damaged_file", f"{where} claims {kind} of shape {shape}, and is no array of so many ids"
            )
        return np.frombuffer(rest, kind).reshape(shape, order="F" if columns else "C").ravel()
    except UserError:
        raise
    except Exception as error:  # numpy reads the header as Python, and has all kinds for what is none
        raise UserError("data.damaged_file", f"{where} is no .npy that can be read: {error}") from error


def _is_raw(path: str, head: bytes) -> bool:
    """Whether it is called so."""
    return path.endswith(".bin")


def _inspect_raw(path: str) -> TokenFile:
    """Count them. Raises UserError for an odd number of bytes, for an index beside it that is none, for text, for what
    has another format's mark, or where every other word of the first megabyte is next to nothing: the upper half of a
    wider id."""
    size, index = read_file_size(path), f"{path.removesuffix('.bin')}.idx"
    if os.path.exists(index):
        raise UserError("data.damaged_file", f"{path}: {index} beside it is damaged, or no index of Megatron's")
    head = read_head(path, 1 << 20)
    packed = detect_compression(head) if not head.startswith(b"\x5d") else None  # xz's old mark is two likely tokens
    if known := detect_binary_format(head) or packed or ("text" if len(head) >= 64 and is_text(head[:1024]) else None):
        raise UserError(
            "data.not_tokens",
            f"{path} seems to be {known}, and no uint16 tokens: leave it out{format_conversion_hint(known)}",
        )
    if size % 2:
        raise UserError(
            "data.damaged_file", f"{path} has {size} bytes, an odd number: it is cut short, or no uint16 tokens"
        )
    words = np.frombuffer(head[: len(head) // 2 * 2], "<u2")
    low, high = words[: len(words) // 2 * 2].reshape(-1, 2).T
    if len(high) >= 32 and np.mean(high < 16) >= 0.99 and low.mean() > 8 * high.mean():
        raise UserError(
            "data.wrong_token_width",
            f"{path}: every other uint16 is (nearly) 0, as in ids of 4 or 8 bytes, and nothing beside it says so: put "
            "Megatron's .idx beside it, or write them to HDF5, as a dataset `tokens` of uint32",
        )
    return TokenFile(path, NANO_GPT, "uint16", size // 2, 0)


class TokenFormat(NamedTuple):
    """How a format of token files is recognized and read."""

    matches: Callable[[str, bytes], bool]
    """Return whether the file at a path, which starts with these bytes (512 at most), has this format."""
    inspect: Callable[[str], TokenFile]
    """Describe the file by its header or index. Raises UserError if it is damaged."""


TOKEN_FORMATS = (
    TokenFormat(_is_megatron, _inspect_megatron),
    TokenFormat(_is_llm_c, _inspect_llm_c),
    TokenFormat(_is_hdf5, _inspect_hdf5),
    TokenFormat(_is_datatrove, _inspect_datatrove),
    TokenFormat(_is_arrow, _inspect_arrow),
    TokenFormat(_is_web_dataset, _inspect_web_dataset),
    TokenFormat(_is_raw, _inspect_raw),
)
"""The first format that matches is taken."""


def inspect_token_file(path: str, check: bool = True) -> TokenFile:
    """What a file holds. Raises UserError, naming it, where it is of no format, or damaged.

    check: whether an index of its documents is read through for that.
    """
    with translate_read_errors(path):
        head = read_head(path, 512)
        if not head:
            raise UserError("data.missing_file", f"{path} is missing or empty")
        for known in TOKEN_FORMATS:
            if known.matches(path, head):
                found = known.inspect(path)
                if check and found.ends is not None:
                    found.ends.check()
                return found
    kind = detect_file_type(path)
    raise UserError(
        "data.unknown_format",
        f"{path} is no file of tokens that is known (docs/data.md has the formats); it seems to be {kind}"
        f"{format_conversion_hint(kind.kind)}",
    )


def require_mappable(path: str, check: bool = True) -> TokenFile:
    """The same of a file that a run takes where it lies. Raises UserError with the way out for another one."""
    found = inspect_token_file(path, check)
    if found.why_not:
        words = format_command("data", "import", path, "--to", "DIR", "--tokenizer", "FILE")
        raise UserError(
            "data.not_mappable", f"{path}: tokens cannot be mapped, for {found.why_not}: copy them, `{words}`"
        )
    return found


def check_mappable(*paths: str) -> None:
    """Raise UserError where a run cannot take one of the files where it lies, at first sight."""
    for path in paths:
        require_mappable(path, check=False)
