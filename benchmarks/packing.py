"""Measure the padding and the cut documents of each way to pack documents into samples (`data.packing`).

    python -m benchmarks.packing

The documents are the files of the Python standard library (`data.source: python-stdlib`), and the parts of these files
between blank lines. All documents are packed as one work unit. The second table draws document lengths at random from
the files, to compare limits of open windows on more documents.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.table import write_table
from data_prep.find_inputs import PYTHON_STDLIB, find_inputs
from data_prep.packing import MAX_OPEN_WINDOWS, BestFitPacker
from data_prep.tokenizer import Encoder, train_bpe
from pipeline.config.datasets import DataConfig, TokenizerConfig

LENGTHS = (512, 2048, 8192)
LIMITS = (16, 64, MAX_OPEN_WINDOWS, 1024, 1 << 30)
DRAWN_DOCUMENTS = 100_000
EOS_TOKEN = "<|endoftext|>"


def read_texts() -> list[str]:
    """Return the files of the Python standard library."""
    paths = [Path(source.path) for source in find_inputs(DataConfig(source=PYTHON_STDLIB))]
    return [text for path in paths if (text := path.read_text(errors="replace"))]


def make_encoder(texts: Sequence[str]) -> Encoder:
    """Return an encoder with a tokenizer that is trained on every tenth text, with the default size."""
    from tokenizers import Tokenizer

    config = TokenizerConfig()
    tokenizer = Tokenizer.from_str(train_bpe(texts[::10], config.vocab_size, EOS_TOKEN))
    tokenizer.encode_special_tokens = True
    return Encoder(tokenizer, 0, config.vocab_size, "uint16")


def cut_stream(sizes: np.ndarray, length: int) -> tuple[int, int]:
    """Return the padding tokens and the number of cut documents if the documents are one stream."""
    ends = np.cumsum(sizes)
    return int(-ends[-1] % length), int(((ends - sizes) // length != (ends - 1) // length).sum())


def keep_in_order(sizes: np.ndarray, length: int) -> tuple[int, int]:
    """Return the padding tokens and the number of cut documents if documents are kept whole and in order."""
    position = padding = 0
    for size in sizes.tolist():
        remaining = -position % length
        if size > remaining:
            padding += remaining
            position += remaining
        position += size
    return padding + -position % length, int((sizes > length).sum())


def pack_best_fit(sizes: np.ndarray, length: int, max_open: int = MAX_OPEN_WINDOWS) -> tuple[int, int]:
    """Return the padding tokens and the number of cut documents with best fit."""
    tokens = np.zeros(sizes.max(), np.uint16)
    packer = BestFitPacker(length, max_open)
    windows = sum(len(packer.add(tokens[:size], 0)) for size in sizes.tolist()) + len(packer.close())
    return windows * length - int(sizes.sum()), packer.cut_documents


def format_result(sizes: np.ndarray, padding: int, cut: int) -> list[str]:
    """Return the cells with the fraction of padding among all tokens, and the fraction of cut documents."""
    return [f"{padding / (padding + sizes.sum()):.2%}", f"{cut / len(sizes):.1%}"]


def main() -> None:
    """Measure all ways of packing, and write benchmarks/results/packing.md."""
    texts = read_texts()
    encoder = make_encoder(texts)
    parts = [part for text in texts for part in text.split("\n\n") if part.strip()]
    rows: list[list[str]] = []
    sizes_by_source = {}
    for name, documents in (("files", texts), ("parts of files", parts)):
        sizes = np.array([len(tokens) for tokens in encoder.encode(documents)])
        sizes_by_source[name] = sizes
        for length in LENGTHS:
            for method, pack in (("cut", cut_stream), ("in order", keep_in_order), ("best fit", pack_best_fit)):
                rows.append([name, f"{length:,}", method, *format_result(sizes, *pack(sizes, length))])
    limit_rows = []
    files = np.random.default_rng(1).choice(sizes_by_source["files"], DRAWN_DOCUMENTS)
    for length in LENGTHS:
        for limit in LIMITS:
            start = time.process_time()
            padding, _ = pack_best_fit(files, length, limit)
            seconds = time.process_time() - start
            limit_text = f"{limit:,}" if limit < 1 << 30 else "unlimited"
            cells = [f"{padding / (padding + files.sum()):.2%}", f"{1e6 * seconds / len(files):.1f} µs"]
            limit_rows.append([f"{length:,}", limit_text, *cells])
    counts = ", ".join(
        f"{len(sizes):,} {name} with a mean of {sizes.mean():,.0f} tokens" for name, sizes in sizes_by_source.items()
    )
    note = (
        f"The Python standard library: {counts}. `in order` is how prompts and dialogues are packed without best fit. "
        f"The second table has {DRAWN_DOCUMENTS:,} documents whose lengths are drawn from those of the files."
    )
    header = ["documents", "tokens of a sample", "packing", "padding", "cut documents"]
    limit_header = ["tokens of a sample", "open windows", "padding", "CPU time per document"]
    write_table("packing", "Packing documents into samples", note, header, rows, (limit_header, limit_rows))


if __name__ == "__main__":
    main()
