"""Token files of other programs: recognize the format, describe a file by its header or index, and read its tokens.

Training memory-maps files of some formats where they are. `data import` must copy files of the other formats first:

Megatron      NAME.bin with NAME.idx                        mapped in place
llm.c         .bin with a header                            mapped in place
HDF5          dataset `tokens` or `input_ids`               mapped in place if contiguous
datatrove     NAME.ds with .ds.index, .ds.metadata          mapped in place
Arrow         lists in `input_ids` (Hugging Face datasets)  copied by `data import`
WebDataset    .npy in a tar                                 copied by `data import`
nanoGPT       .bin of uint16 tokens without a header        mapped in place
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
BLOCK_TOKENS = 1 << 22
"""Maximum number of tokens, or of elements of an index, that are read at once."""
NANO_GPT = "nanoGPT .bin"
"""Name of the format of .bin files without header and index."""
MAX_DOCUMENT_TOKENS = 1 << 28
"""Maximum number of tokens of a document. If a document seems longer, the end-of-text token is probably wrong."""
MAPPABLE_TYPES = {"uint16": "uint16", "uint32": "uint32", "int32": "uint32"}
"""For each type that training can memory-map, the type as which it is mapped.

int32 can be mapped as uint32, because `scan_tokens` ensures that no id is negative.
"""


class DocumentEnds:
    """An index file with the end of each document, as a token position from the start of the token file.

    The index may be larger than memory, so only the needed elements are read. The ends in a range of tokens are found
    by bisection, with about a hundred small reads. The index is not memory-mapped, because the process would be killed
    if another program truncated the file.
    """

    def __init__(self, path: str, documents: int) -> None:
        self.path = path
        self._documents = documents
        self._file = open_regular_file(path)

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._documents

    def __getitem__(self, document: int) -> int:
        """Return the end of a document."""
        return int(self.read_ends(document, document + 1)[0])

    def read_ends(self, start: int, stop: int) -> Ids:
        """Return the ends of the documents with the numbers [start, stop): shape (stop - start,)."""
        return self.read_numbers(0, start, stop)

    def check(self) -> None:
        """Check the whole index. Raises UserError if it is damaged or belongs to another token file."""
        last_end = 0
        for start in range(0, len(self), BLOCK_TOKENS):
            ends = self.read_ends(start, min(start + BLOCK_TOKENS, len(self)))
            last_end = self.check_order(ends, last_end, sys.maxsize)[-1]

    def find_ends(self, start: int, stop: int) -> Ids:
        """Return the document ends at token positions in (start, stop]: shape (documents,).

        Raises UserError if the ends are out of order.
        """
        first_document = bisect_right(self, start)
        stop_document = bisect_right(self, stop, first_document)
        return self.check_order(self.read_ends(first_document, stop_document), start + 1, stop)

    def check_order(self, values: Ids, minimum: int, maximum: int) -> Ids:
        """Return `values` unchanged. Raises UserError if they decrease or are outside [minimum, maximum]."""
        if len(values) and (values[0] < minimum or values[-1] > maximum or (values[1:] < values[:-1]).any()):
            raise UserError(
                "data.damaged_file",
                f"{self.path} is damaged: the ends of its documents decrease, or lie beyond the end of the file. "
                "Copy the file again",
            )
        return values

    def read_numbers(self, offset: int, start: int, stop: int, dtype: str = "<i8") -> Ids:
        """Return elements [start, stop) of an array of the type `dtype` that begins at byte `offset` of the index file.

        Raises UserError if the file is too short.
        """
        size = np.dtype(dtype).itemsize
        content = os.pread(self._file.fileno(), (stop - start) * size, offset + start * size)
        if len(content) < (stop - start) * size:
            raise UserError(
                "data.damaged_file", f"{self.path} is cut short: it ends before byte {offset + stop * size:,}"
            )
        return np.frombuffer(content, dtype)


class TokenFile(NamedTuple):
    """A token file, or a range of its tokens, as its header and index describe it."""

    path: str
    """Absolute path of the file with the tokens."""
    format: str
    """Name of the format, for messages."""
    dtype: str
    """numpy's name of the tokens' type. Values are little-endian."""
    tokens: int | None = None
    """Number of tokens; None if it is unknown until the file is read."""
    offset: int | None = None
    """Byte at which the tokens start; None if they are not contiguous."""
    document_ends: DocumentEnds | None = None
    """Index of the document ends of the whole file; None if the file has no index."""
    read_rows: Callable[[], Iterator[Ids]] | None = None
    """Function that yields the tokens row by row; None for a file with an `offset`."""
    row_is_document: bool = True
    """Whether each row of `read_rows` is a document."""
    first_token: int = 0
    """Position in the file of the first token of the range."""
    note: str = ""
    """Note for the user, which is appended to a description and starts with a semicolon; empty without a note."""

    @property
    def unmappable_reason(self) -> str | None:
        """Reason why training cannot memory-map the tokens (`their type is int64`); None if it can."""
        if self.offset is None:
            return f"{self.format} does not store them contiguously"
        return None if self.dtype in MAPPABLE_TYPES else f"their type is {self.dtype}"

    def select_range(self, start: int, stop: int) -> TokenFile:
        """Return the range of tokens [start, stop) of a contiguous file as a token file.

        A document belongs to the range in which it ends.
        """
        assert self.offset is not None
        offset = self.offset + start * np.dtype(self.dtype).itemsize
        return self._replace(offset=offset, tokens=stop - start, first_token=self.first_token + start)

    def find_document_ends(self, start: int, stop: int) -> Ids | None:
        """Return the document ends in (start, stop] as distances from `start`: shape (documents,).

        `start` and `stop` are token positions in this range. Return None if the file has no index.
        """
        if self.document_ends is None:
            return None
        start_in_file = self.first_token + start
        return self.document_ends.find_ends(start_in_file, self.first_token + stop) - start_in_file

    def read_tokens(self, start: int, stop: int) -> Ids:
        """Return tokens [start, stop) of a contiguous file. Raises UserError if the file is too short."""
        assert self.offset is not None
        dtype = np.dtype(self.dtype).newbyteorder("<")
        with open_regular_file(self.path) as file:
            tokens = np.fromfile(file, dtype, stop - start, offset=self.offset + start * dtype.itemsize)
        if len(tokens) < stop - start:
            raise UserError(
                "data.damaged_file", f"{self.path} is cut short: it ends before token {stop:,} of {self.tokens:,}"
            )
        return tokens

    def iterate_blocks(self) -> Iterator[Ids]:
        """Yield all tokens, in blocks of at most `BLOCK_TOKENS` or in the rows of the file."""
        if self.read_rows is not None:
            yield from self.read_rows()
            return
        assert self.tokens is not None
        for start in range(0, self.tokens, BLOCK_TOKENS):
            yield self.read_tokens(start, min(start + BLOCK_TOKENS, self.tokens))

    def iterate_documents(self, eos_id: int) -> Iterator[Ids]:
        """Yield the tokens of each document.

        A document is a row of the file or ends where the index says. Without rows and index, a document ends after a
        token `eos_id`, and the last document may lack this token.

        Raises UserError if a document does not end within about `MAX_DOCUMENT_TOKENS`.
        """
        if self.read_rows is not None and self.row_is_document:
            yield from self.read_rows()
            return
        chunks: list[Ids] = []  # the beginning of a document that continues in the next block
        block_start = chunk_tokens = 0
        for block in self.iterate_blocks():
            ends = self.find_document_ends(block_start, block_start + len(block))
            if ends is None:
                ends = np.flatnonzero(block == eos_id) + 1
            document_start = 0
            for end in ends.tolist():
                yield np.concatenate([*chunks, block[document_start:end]])
                chunks = []
                chunk_tokens = 0
                document_start = end
            if document_start < len(block):
                chunks = [*chunks, block[document_start:]]
                chunk_tokens += len(block) - document_start
            if chunk_tokens > MAX_DOCUMENT_TOKENS:
                raise UserError(
                    "data.no_document_end",
                    f"{self.path}: no end-of-text token {eos_id} within {chunk_tokens:,} tokens: use the tokenizer "
                    "that produced the file",
                )
            block_start += len(block)
        if chunks:
            yield np.concatenate(chunks)


class TokenStatistics(NamedTuple):
    """Statistics of all tokens of a file."""

    tokens: int
    max_id: int
    eos_tokens: int
    """Number of end-of-text tokens."""
    unended_documents: int
    """Number of documents, by the index or the rows of the file, that do not end with an end-of-text token."""


def scan_tokens(file: TokenFile, eos_id: int, vocab_size: int) -> TokenStatistics:
    """Read all tokens of a file and return statistics.

    Args:
        file: the token file.
        eos_id: id of the end-of-text token.
        vocab_size: largest id of the tokenizer plus one; 2**32 if the tokenizer is unknown.

    Raises UserError if an id is outside [0, vocab_size) or there is no token. Also raises it for uint16 tokens without
    a header if the tokenizer has more than 2**16 ids.
    """
    if file.format == NANO_GPT and 1 << 16 < vocab_size < 1 << 32:
        raise UserError(
            "data.wrong_token_width",
            f"{file.path}: a .bin file without header or index is read as uint16, but the tokenizer has "
            f"{vocab_size:,} ids: add Megatron's .idx, or write the tokens to HDF5 as a dataset `tokens` of uint32",
        )
    tokens = max_id = eos_tokens = unended = 0
    for block in file.iterate_blocks():
        if len(block) and (int(block.min()) < 0 or int(block.max()) >= vocab_size):
            invalid = int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
            position = file.first_token + tokens + invalid
            raise UserError(
                "data.token_out_of_range",
                f"{file.path}: token {position:,} is {block[invalid]}, but the tokenizer has the ids 0 to "
                f"{vocab_size - 1}: the file is damaged, is not {file.format}, or was made with another tokenizer",
            )
        max_id = max(max_id, int(block.max())) if len(block) else max_id
        eos_tokens += int(np.count_nonzero(block == eos_id))
        if file.read_rows is not None and file.row_is_document:
            unended += int(len(block) > 0 and block[-1] != eos_id)
        elif (ends := file.find_document_ends(tokens, tokens + len(block))) is not None:
            last_tokens = block[np.unique(ends) - 1]  # Empty documents end at the same position.
            unended += int(np.count_nonzero(last_tokens != eos_id))
        tokens += len(block)
    if not tokens:
        raise UserError("data.no_tokens", f"{file.path} contains no tokens: leave it out")
    return TokenStatistics(tokens, max_id, eos_tokens, unended)


def read_file_size(path: str) -> int:
    """Return the size of a file in bytes. Raises UserError for a pipe or a device."""
    with open_regular_file(path) as file:
        return os.fstat(file.fileno()).st_size


def read_head(path: str, count: int) -> bytes:
    """Return the first `count` bytes of a file; b"" if the path does not exist or is a folder.

    Raises UserError for a pipe or a device.
    """
    try:
        with open_regular_file(path) as file:
            return file.read(count)
    except (FileNotFoundError, IsADirectoryError):
        return b""


# -- Megatron-LM -----------------------------------------------------------------------------------------------
#
# NAME.bin contains the tokens, NAME.idx the index (megatron/core/datasets/indexed_dataset.py, `_IndexWriter`). The
# index is little-endian. Its header is `MMIDIDX\0\0`, uint64 version 1, uint8 type, uint64 number of sequences n,
# uint64 number of document boundaries d. These arrays follow: int32 lengths (n,), int64 byte offsets (n,) and int64
# document boundaries (d,). The boundaries are the first sequence of each document, and n at the end. Multimodal data
# also has uint8 modes (n,).

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""The type of the tokens by its code in the header."""


def _megatron_index_path(path: str) -> str:
    """Return the path of the index, given the path of either of Megatron's two files."""
    return path if path.endswith(".idx") else f"{path.removesuffix('.bin')}.idx"


def _is_megatron(path: str, head: bytes) -> bool:
    """Return True if the path is one of Megatron's two files, by the magic number of the index."""
    return (
        path.endswith((".bin", ".idx"))
        and read_head(_megatron_index_path(path), len(_MEGATRON_MAGIC)) == _MEGATRON_MAGIC
    )


def _inspect_megatron(path: str) -> TokenFile:
    """Describe a Megatron file by the header of its index.

    Raises UserError if the version or type is not supported, or if the index is too short or too long for its header.
    """
    index_path = _megatron_index_path(path)
    data_path = f"{index_path.removesuffix('.idx')}.bin"
    index_size = read_file_size(index_path)
    data_size = read_file_size(data_path)
    head = read_head(index_path, _MEGATRON_HEADER.size)
    if len(head) < _MEGATRON_HEADER.size:
        raise UserError(
            "data.damaged_file",
            f"{index_path} is cut short: it has {index_size} bytes, fewer than its header of {_MEGATRON_HEADER.size}",
        )
    _, version, type_code, sequences, boundaries = _MEGATRON_HEADER.unpack(head)
    if version != 1 or type_code not in _MEGATRON_TYPES:
        raise UserError(
            "data.unsupported_file",
            f"{index_path}: version {version} with tokens of type {type_code} is not supported",
        )
    # One length (4 bytes) and one offset (8 bytes) for each sequence. Multimodal data has one more byte (the mode).
    expected_size = _MEGATRON_HEADER.size + 12 * sequences + 8 * boundaries
    if not boundaries or index_size not in (expected_size, expected_size + sequences):
        raise UserError(
            "data.damaged_file",
            f"{index_path} has {index_size} bytes, but {sequences} sequences and {boundaries} document boundaries need "
            f"{expected_size}",
        )
    width = np.dtype(_MEGATRON_TYPES[type_code]).itemsize
    # The last boundary is the end of the last document, so there is one document less than boundaries.
    ends = _MegatronDocumentEnds(index_path, boundaries - 1, data_path, data_size, sequences, width)
    return TokenFile(data_path, "Megatron .bin", _MEGATRON_TYPES[type_code], data_size // width, 0, ends)


class _MegatronDocumentEnds(DocumentEnds):
    """Document ends from Megatron's index, which lists sequences and the first sequence of each document."""

    def __init__(
        self, index_path: str, documents: int, data_path: str, data_size: int, sequences: int, width: int
    ) -> None:
        """Open an index.

        Args:
            index_path: the index.
            documents: number of documents.
            data_path: the file with the tokens.
            data_size: size of this file in bytes.
            sequences: number of sequences in the index.
            width: bytes per token.
        """
        super().__init__(index_path, documents)
        self._data_path = data_path
        self._data_size = data_size
        self._sequences = sequences
        self._width = width
        # Positions in the index, in bytes, of the array of byte offsets and of the array of document boundaries.
        self._offsets_at = _MEGATRON_HEADER.size + 4 * sequences
        self._documents_at = _MEGATRON_HEADER.size + 12 * sequences

    def read_ends(self, start: int, stop: int) -> Ids:
        """Return the ends of the documents with the numbers [start, stop) in tokens: shape (stop - start,)."""
        # A document ends at the byte offset of the next document's first sequence.
        next_sequences = self.check_order(
            self.read_numbers(self._documents_at, start + 1, stop + 1), 0, self._sequences
        )
        # Read the byte offsets of the sequences from `low` to `high`. The size of the token file is appended, because
        # the last document ends there.
        low, high = next_sequences[[0, -1]].tolist() if len(next_sequences) else (0, 0)
        offsets = np.append(self.read_numbers(self._offsets_at, low, min(high + 1, self._sequences)), self._data_size)
        return offsets[next_sequences - low] // self._width

    def check(self) -> None:
        """Check the whole index.

        Raises UserError if the sequences do not cover the token file, or the documents do not cover the sequences.
        """
        damaged_error = UserError(
            "data.damaged_file",
            f"{self.path} is damaged, or is not the index of {self._data_path}: its sequences do not cover the "
            f"{self._data_size} bytes there",
        )
        end = 0
        for start in range(0, self._sequences, BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, self._sequences)
            lengths = self.read_numbers(_MEGATRON_HEADER.size, start, stop, "<i4")
            starts = self.read_numbers(self._offsets_at, start, stop)
            ends = end + np.cumsum(lengths, dtype=np.int64) * self._width
            if (lengths < 0).any() or starts[0] != end or (starts[1:] != ends[:-1]).any():
                raise damaged_error
            end = int(ends[-1])
        if end != self._data_size:
            raise damaged_error
        first_and_last = [self.read_numbers(self._documents_at, index, index + 1)[0] for index in (0, len(self))]
        if first_and_last != [0, self._sequences]:
            raise UserError(
                "data.damaged_file",
                f"{self.path} is damaged: its documents do not cover the sequences 0 to {self._sequences}",
            )
        super().check()


# -- llm.c -----------------------------------------------------------------------------------------------------
#
# A .bin file has a header of 256 int32 and then the tokens (llm.c, dev/data/data_common.py). The header begins with a
# magic number, a version and the number of tokens. The magic number is a date and shows the type of the tokens.
# Documents begin with the end-of-text token, so this token also marks the end of the previous document.

_LLM_C_HEADER_BYTES = 1024
_LLM_C_TYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""The type of the tokens by magic number and version."""
_LLM_C_OTHER_FILES = {
    20240522: "an evaluation file (as for HellaSwag or MMLU): questions with answers",
    20240326: "a model",
    20240327: "a model's state for debugging",
    20240328: "a tokenizer",
    20240527: "the state of a training run",
}
"""Descriptions of llm.c's other files by magic number."""


def _is_llm_c(path: str, head: bytes) -> bool:
    """Return True if the file has a header of llm.c, even if it is a file without tokens."""
    if len(head) < 12:
        return False
    magic, version = struct.unpack_from("<2i", head)
    # A header begins with a date and a small version, and is mostly empty. Unknown formats of llm.c are
    # also recognized.
    is_dated = 20230101 <= magic <= 20391231 and 0 < version < 100
    has_empty_header = len(head) >= 512 and not any(head[64:512])
    return magic in {number for number, _ in _LLM_C_TYPES} or (is_dated and has_empty_header)


def _inspect_llm_c(path: str) -> TokenFile:
    """Describe a file of llm.c by its header.

    Raises UserError if the file does not contain tokens, its version is unknown, or its size does not match the header.
    """
    with open(path, "rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12))
    if magic not in {number for number, _ in _LLM_C_TYPES}:
        content = _LLM_C_OTHER_FILES.get(magic, f"a file with the number {magic}")
        raise UserError("data.not_tokens", f"{path} is {content} of llm.c, not tokens to train on: leave it out")
    if (dtype := _LLM_C_TYPES.get((magic, version))) is None:
        raise UserError("data.unsupported_file", f"{path}: version {version} of llm.c's format {magic} is unknown")
    size = read_file_size(path)
    expected_size = _LLM_C_HEADER_BYTES + tokens * int(dtype[4:]) // 8  # The name of the type ends with its bits.
    if tokens < 0 or size != expected_size:
        raise UserError(
            "data.damaged_file", f"{path} has {size} bytes, but a header and {tokens} tokens need {expected_size}"
        )
    return TokenFile(path, "llm.c .bin", dtype, tokens, _LLM_C_HEADER_BYTES)


# -- HDF5 ------------------------------------------------------------------------------------------------------
#
# The tokens are a dataset of integers, of shape (tokens,), or (rows, T) for consecutive rows. Sluice's shards
# (data_prep/shard_writer.py) and files of other programs have this form. A contiguous dataset is mapped. A chunked or
# compressed dataset is read in blocks of rows. Links, external and virtual datasets are not supported. A child process
# reads the file (data_prep/hdf5_reader.py).

_HDF5_DATASETS = ("tokens", "input_ids")
"""Names of datasets with tokens, in the order in which they are tried."""


def _is_hdf5(path: str, head: bytes) -> bool:
    """Return True if the file begins with the magic number of HDF5."""
    return head.startswith(b"\x89HDF\r\n\x1a\n")


def _inspect_hdf5(path: str) -> TokenFile:
    """Describe an HDF5 file by its dataset of tokens.

    Raises UserError if there is no such dataset, or if it is incomplete, not supported or stored in too large chunks.
    """
    datasets, names = describe_datasets(path, _HDF5_DATASETS, follow_links=False)
    dataset = next((datasets[name] for name in _HDF5_DATASETS if name in datasets), None)
    if dataset is None:
        raise UserError(
            "data.no_array",
            f"{path}: no dataset {' or '.join(_HDF5_DATASETS)}; the file contains {', '.join(names) or 'none'}",
        )
    dtype = dataset.dtype
    if dtype.kind not in "iu" or len(dataset.shape) not in (1, 2) or dataset.is_virtual or dataset.is_external:
        raise UserError(
            "data.wrong_type",
            f"{path}: {dataset.name} is {dtype} of shape {dataset.shape}; tokens are integers with one or two axes",
        )
    tokens = dataset.nbytes // dtype.itemsize
    # Chunks that were never written are not stored, and would be read as zeros.
    has_all_chunks = dataset.stored_chunks >= dataset.expected_chunks
    if not has_all_chunks or dataset.nbytes > MAX_COMPRESSION_RATIO * dataset.stored_bytes:
        raise UserError(
            "data.damaged_file",
            f"{path}: {dataset.name} should have {tokens:,} tokens, but only {dataset.stored_bytes:,} bytes are "
            "stored: the file is incomplete",
        )
    offset = dataset.offset if dtype.byteorder != ">" else None
    # A block of rows needs memory for whole chunks, so a chunk may be at most 8 times as large as a block.
    if dataset.chunks and np.prod(dataset.chunks) > 8 * BLOCK_TOKENS:
        raise UserError(
            "data.too_large",
            f"{path}: the chunks of {dataset.name} have shape {dataset.chunks}, too large to be read one by one: "
            "repack the file",
        )
    read_rows = None if offset is not None else partial(_read_hdf5_blocks, dataset)
    return TokenFile(path, "HDF5", dtype.name, tokens, offset, read_rows=read_rows, row_is_document=False)


def _read_hdf5_blocks(dataset: Dataset) -> Iterator[Ids]:
    """Yield the tokens of a dataset that cannot be mapped, in blocks of rows."""
    rows_at_once = max(1, BLOCK_TOKENS // max(1, int(np.prod(dataset.shape[1:]))))
    for block in read_rows(dataset.path, dataset.name, rows_at_once):
        yield block.ravel()


# -- datatrove -------------------------------------------------------------------------------------------------
#
# NAME.ds contains the tokens without a header, and NAME.ds.index a uint64 array (documents,) of document ends.
# NAME.ds.metadata is text: the first line ends with the bytes per token (`|2` or `|4`), and the second line is the
# number of tokens (datatrove, pipeline/tokens/tokenizer.py, `TokenizedFile`). Old versions omit the bytes per token.
# In this case, they are computed from the size of NAME.ds and the number of tokens. Shuffled files may have no index.

_DATATROVE_METADATA = re.compile(rb"[^\n]*?(?:\|([24]))?\r?\n(\d{1,18})(?:\r?\n.*)?", re.DOTALL)


def _is_datatrove(path: str, head: bytes) -> bool:
    """Return True if the file has the ending of datatrove, and an index or metadata."""
    return path.endswith(".ds") and (os.path.exists(f"{path}.index") or os.path.exists(f"{path}.metadata"))


def _inspect_datatrove(path: str) -> TokenFile:
    """Describe a datatrove file by its metadata and index. Raises UserError if they do not match the file."""
    size = read_file_size(path)
    ends = None
    if os.path.exists(f"{path}.index"):
        index_size = read_file_size(f"{path}.index")
        if index_size % 8:
            raise UserError(
                "data.damaged_file",
                f"{path}.index is cut short: its size of {index_size} bytes is not a multiple of 8",
            )
        ends = DocumentEnds(f"{path}.index", index_size // 8)
    metadata = _DATATROVE_METADATA.fullmatch(read_head(f"{path}.metadata", 1 << 16))
    if metadata is None and os.path.exists(f"{path}.metadata"):
        raise UserError(
            "data.damaged_file", f"{path}.metadata is damaged: its second line should be the number of tokens"
        )
    last_end = ends[len(ends) - 1] if ends else 0
    tokens = int(metadata[2]) if metadata else last_end
    width = int(metadata[1]) if metadata and metadata[1] else size // max(1, tokens)
    if width not in (2, 4) or tokens * width != size or (ends and last_end != tokens):
        raise UserError(
            "data.damaged_file",
            f"{path} has {size} bytes, which does not match the {tokens} tokens of its index and metadata",
        )
    note = f"; {path}.loss is not used: all tokens are learned" if os.path.exists(f"{path}.loss") else ""
    return TokenFile(path, "datatrove .ds", f"uint{8 * width}", tokens, 0, ends, note=note)


# -- Arrow -----------------------------------------------------------------------------------------------------
#
# Files of record batches in Arrow's streaming or file format, as Hugging Face's `datasets` writes them. A row is a
# document, with a list of ids in the column `input_ids` or `tokens`. data_prep/documents.py reads Arrow files of texts.

_ARROW_COLUMNS = ("input_ids", "tokens")
"""Names of columns with lists of ids, in the order in which they are tried."""


def _is_arrow(path: str, head: bytes) -> bool:
    """Return True for the magic number of Arrow's file format, or the first bytes of its streaming format."""
    return head.startswith((b"ARROW1", b"\xff\xff\xff\xff"))


def _inspect_arrow(path: str) -> TokenFile:
    """Describe an Arrow file by its schema. Raises UserError if no column of `_ARROW_COLUMNS` has lists of integers."""
    import pyarrow

    schema, _ = read_arrow_batches(path)
    types = pyarrow.types
    list_types = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    for name in _ARROW_COLUMNS:
        column_type = schema.field(name).type if name in schema.names else pyarrow.null()
        if any(is_type(column_type) for is_type in list_types) and types.is_integer(column_type.value_type):
            return TokenFile(
                path, "Arrow", str(column_type.value_type), read_rows=partial(_read_arrow_rows, path, name)
            )
    raise UserError(
        "data.no_column",
        f"{path}: no column {' or '.join(_ARROW_COLUMNS)} with lists of integers; the columns are {schema.names}. "
        "If the file contains text, set data.source of a run to this file, and data.text_field to the column of text",
    )


def _read_arrow_rows(path: str, name: str) -> Iterator[Ids]:
    """Yield the ids in each row of the column `name`. Raises UserError if a row is null."""
    for batch in read_arrow_batches(path)[1]:
        column = batch.column(batch.schema.names.index(name))
        values = column.flatten()
        if column.null_count or values.null_count:
            raise UserError("data.null_value", f"{path}: a row of column {name} is null: remove it")
        ids = np.asarray(values)
        ends = np.cumsum(column.value_lengths())
        yield from (ids[start:end] for start, end in pairwise([0, *ends.tolist()]))


# -- WebDataset ------------------------------------------------------------------------------------------------
#
# A tar (or .tar.gz) with members KEY.npy, KEY.tokens.npy or KEY.input_ids.npy: arrays of ids, one per document.
# Nothing is unpickled or written to disk. data_prep/documents.py reads tars of texts.


def _is_web_dataset(path: str, head: bytes) -> bool:
    """Return True for a tar by its magic number, or for any file with the name of a tar, which may be compressed."""
    return head[257:262] == b"ustar" or path.endswith((".tar", ".tar.gz", ".tgz"))


def _inspect_web_dataset(path: str) -> TokenFile:
    """Describe a tar by its first array. Raises UserError if there is no array of ids."""
    first_array = next(_read_web_dataset_rows(path), None)
    if first_array is None:
        raise UserError(
            "data.not_tokens",
            f"{path}: no member .npy with token ids; if the file contains texts, set data.source of a run to this file",
        )
    return TokenFile(path, "WebDataset tar", first_array.dtype.name, read_rows=lambda: _read_web_dataset_rows(path))


def _read_web_dataset_rows(path: str) -> Iterator[Ids]:
    """Yield the ids in each array of a tar. Raises UserError if an array is invalid or too large."""
    for name, content in read_tar_members(path, (".npy",)):
        # Members with other names, such as KEY.mask.npy, do not contain ids.
        if name.endswith((".tokens.npy", ".input_ids.npy")) or name.rpartition("/")[2].count(".") == 1:
            if content is None:
                raise UserError(
                    "data.too_large", f"{path}: {name} is too large to be read at once: write smaller arrays"
                )
            yield _parse_npy(f"{path}: {name}", content)


def _parse_npy(name: str, content: bytes) -> Ids:
    """Return the array of a .npy file, flattened in row-major order.

    numpy's reader is not used, because it allocates as much memory as the header states, even if the file is short.

    Args:
        name: name of the file for error messages.
        content: the file.

    Raises UserError if the file is malformed or does not contain integers.
    """
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_column_major, dtype = read_header(file)
        if (
            dtype.kind not in "iu"
            or len(shape) > 2
            or np.prod(shape, dtype=object) * dtype.itemsize != len(values := content[file.tell() :])
        ):
            raise UserError(
                "data.damaged_file",
                f"{name} should have {dtype} of shape {shape}, but does not contain this number of token ids",
            )
        return np.frombuffer(values, dtype).reshape(shape, order="F" if is_column_major else "C").ravel()
    except UserError:
        raise
    except Exception as error:  # numpy parses the header as Python, and may raise many types of exceptions.
        raise UserError("data.damaged_file", f"{name} is not a readable .npy file: {error}") from error


# -- nanoGPT ---------------------------------------------------------------------------------------------------
#
# A .bin file has uint16 tokens without a header. Documents end with the end-of-text token (nanoGPT, data/*/prepare.py:
# `arr.tofile`). The format has no magic number. It is therefore tried last, and files that seem to have another format
# are errors.


def _is_raw(path: str, head: bytes) -> bool:
    """Return True if the file has the ending of nanoGPT's files."""
    return path.endswith(".bin")


def _inspect_raw(path: str) -> TokenFile:
    """Describe a file without a header by its size.

    Raises UserError in these cases:
    - The file has an odd number of bytes.
    - The file has an invalid Megatron index.
    - The file begins with text, or with the magic number of another format.
    - The ids seem to have 4 or 8 bytes. Nearly every second uint16 is then small, because it is a high part of an id.
    """
    size = read_file_size(path)
    index_path = f"{path.removesuffix('.bin')}.idx"
    if os.path.exists(index_path):
        raise UserError(
            "data.damaged_file", f"{path}: its index {index_path} is damaged, or is not an index of Megatron"
        )
    head = read_head(path, 1 << 20)
    # The magic number of the old LZMA format, which begins with 0x5d, is not checked, because common tokens look like
    # it.
    compression = detect_compression(head) if not head.startswith(b"\x5d") else None
    is_like_text = len(head) >= 64 and is_text(head[:1024])
    if other_format := detect_binary_format(head) or compression or ("text" if is_like_text else None):
        raise UserError(
            "data.not_tokens",
            f"{path} seems to be {other_format}, not uint16 tokens: leave it out{format_conversion_hint(other_format)}",
        )
    if size % 2:
        raise UserError(
            "data.damaged_file", f"{path} has {size} bytes, an odd number: it is cut short, or is not uint16 tokens"
        )
    values = np.frombuffer(head[: len(head) // 2 * 2], "<u2")
    # `low` and `high` are the even and odd elements, which would be the low and high halves of ids of 4 bytes. `high`
    # is below 16 for ids below 2^20.
    low, high = values[: len(values) // 2 * 2].reshape(-1, 2).T
    if len(high) >= 32 and np.mean(high < 16) >= 0.99 and low.mean() > 8 * high.mean():
        raise UserError(
            "data.wrong_token_width",
            f"{path}: every second uint16 is (nearly) 0, as in ids of 4 or 8 bytes: add Megatron's .idx, or write the "
            "tokens to HDF5 as a dataset `tokens` of uint32",
        )
    return TokenFile(path, NANO_GPT, "uint16", size // 2, 0)


# -- all formats -----------------------------------------------------------------------------------------------


class TokenFormat(NamedTuple):
    """Two functions that recognize and describe files of one format."""

    matches: Callable[[str, bytes], bool]
    """Function that returns True if a file has this format, given its path and its first 512 bytes."""
    inspect: Callable[[str], TokenFile]
    """Function that describes a file by its header or index. It raises UserError if the file is damaged."""


TOKEN_FORMATS = (
    TokenFormat(_is_megatron, _inspect_megatron),
    TokenFormat(_is_llm_c, _inspect_llm_c),
    TokenFormat(_is_hdf5, _inspect_hdf5),
    TokenFormat(_is_datatrove, _inspect_datatrove),
    TokenFormat(_is_arrow, _inspect_arrow),
    TokenFormat(_is_web_dataset, _inspect_web_dataset),
    TokenFormat(_is_raw, _inspect_raw),
)
"""The formats in the order in which they are tried. The first format that matches is used."""


def inspect_token_file(path: str, check: bool = True) -> TokenFile:
    """Return the description of a token file.

    Args:
        path: the file.
        check: whether to read and check the whole index of documents, if the file has an index.

    Raises UserError with the path if the file has no known format or is damaged.
    """
    with translate_read_errors(path):
        head = read_head(path, 512)
        if not head:
            raise UserError("data.missing_file", f"{path} is missing or empty")
        for token_format in TOKEN_FORMATS:
            if token_format.matches(path, head):
                file = token_format.inspect(path)
                if check and file.document_ends is not None:
                    file.document_ends.check()
                return file
    file_type = detect_file_type(path)
    raise UserError(
        "data.unknown_format",
        f"{path} has no known format of token files (docs/data.md lists them); it seems to be {file_type}"
        f"{format_conversion_hint(file_type.kind)}",
    )


def require_mappable(path: str, check: bool = True) -> TokenFile:
    """Return the description of a token file, as `inspect_token_file` does, if training can memory-map the tokens.

    Raises UserError if they cannot be mapped. The message names the command that converts the file to shards.
    """
    file = inspect_token_file(path, check)
    if file.unmappable_reason:
        command = format_command("data", "import", path, "--to", "DIR", "--tokenizer", "FILE")
        raise UserError(
            "data.not_mappable",
            f"{path}: tokens cannot be mapped because {file.unmappable_reason}: copy them with `{command}`",
        )
    return file


def check_mappable(*paths: str) -> None:
    """Raise UserError if training cannot memory-map one of the token files. Only headers and sizes are checked."""
    for path in paths:
        require_mappable(path, check=False)
