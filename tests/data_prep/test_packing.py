"""Tests that `data.packing: best_fit` keeps documents whole, loses no token, and learns tokens only from true contexts.

The documents of most tests are numbers from which each token's document and position follow, so that a token that was
lost, repeated or moved is found.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.mixture_folder import MixtureFolder
from data_prep.packing import MAX_OPEN_WINDOWS, BestFitPacker, Piece
from data_prep.shard_writer import ShardWriter
from data_prep.tokenizer import load_encoder
from data_prep.work_units import is_held_out
from pipeline.config.datasets import DataConfig
from pipeline.config.read import parse_config
from pipeline.data.manifest import MASK_DOCUMENT_START, MASK_LEARNED, Manifest, ShardEntry, load_manifest
from pipeline.data.samples import TokenDataset
from pipeline.model.decoder import IGNORE_INDEX, Decoder, cross_entropy_sum, init_weights
from pipeline.model.task import DecoderTask
from tests.data_prep import test_records
from tests.data_prep.test_shards import (
    build_shards,
    make_data_config,
    make_documents,
    read_all_files,
    small_units,
    write_jsonl,
)
from tests.support.errors import raises_error
from tests.support.tokenizers import add_post_processor, make_byte_tokenizer, save_tokenizer

__all__ = ["small_units"]
EOS = 0
STRIDE = 1000
"""Token i of document d is STRIDE * (d + 1) + i; the last token of a text is EOS."""
HASH_OF_STREAM = "bc084468f0f26f8fee605916aba4b51a7d642d614d9a6848487668f3819e9c36"
HASH_OF_WINDOWS = "50cabb1c0cce4b179c307c3b5e0ecb57dfe0b01e572814cc39dcada675386652"
"""Hashes of the shards that the last version without `data.packing` wrote for `write_golden_shards`."""
document_sizes = st.lists(st.integers(1, 50), max_size=60)


def make_text(number: int, size: int) -> np.ndarray:
    """Return the tokens of a text: uint32, shape (size,)."""
    tokens = np.arange(size, dtype=np.uint32) + STRIDE * (number + 1)
    tokens[-1] = EOS
    return tokens


def read_arrays(folder: Path, entry: ShardEntry) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the mask of a shard."""
    arrays = entry.arrays
    tokens, mask = (
        np.fromfile(folder / entry.file, arrays[name].dtype, entry.tokens, offset=arrays[name].offset)
        for name in ("tokens", "mask")
    )
    return tokens, mask


# -- the packer ----------------------------------------------------------------------------------------------


def pack_by_search(sizes: Sequence[int], length: int, max_open: int) -> list[list[tuple[int, int, int]]]:
    """Return the windows of a simple implementation that searches all open windows.

    Each piece is the number of its document, and the positions of its first token and after its last token.
    """
    complete: list[list[tuple[int, int, int]]] = []
    windows: list[list[tuple[int, int, int]]] = []  # the open windows, the oldest first

    def find_space(window: list[tuple[int, int, int]]) -> int:
        return length - sum(end - start for _, start, end in window)

    for number, size in enumerate(sizes):
        whole = size // length * length
        complete += [[(number, start, start + length)] for start in range(0, whole, length)]
        if whole == size:
            continue
        candidates = [window for window in windows if find_space(window) >= size - whole]
        if not candidates:
            windows.append([])
            candidates = [windows[-1]]
        window = min(candidates, key=find_space)  # `min` returns the first of several equal windows.
        window.append((number, whole, size))
        fullest = min(windows, key=find_space)
        if find_space(window) == 0 or len(windows) > max_open:
            completed = window if find_space(window) == 0 else fullest
            complete.append(completed)
            windows = [other for other in windows if other is not completed]
    return complete + windows


@settings(max_examples=300, deadline=None)
@given(sizes=document_sizes, length=st.integers(1, 20), max_open=st.integers(1, 6))
def test_each_piece_is_in_the_window_of_the_best_fit(sizes: list[int], length: int, max_open: int) -> None:
    packer = BestFitPacker(length, max_open)
    windows: list[list[Piece]] = []
    for number, size in enumerate(sizes):
        windows += packer.add(make_text(number, size), size)
        assert packer.open_windows <= max_open
    windows += packer.close()
    assert packer.open_windows == 0
    assert packer.cut_documents == sum(size > length for size in sizes)
    packed = [[(piece.document, piece.start, piece.end) for piece in window] for window in windows]
    assert packed == pack_by_search(sizes, length, max_open)
    for window in windows:
        assert 0 < sum(len(piece.tokens) for piece in window) <= length
        for piece in window:
            expected = make_text(piece.document, sizes[piece.document])[piece.start : piece.end]
            np.testing.assert_array_equal(piece.tokens, expected)
            assert piece.text_bytes == (0 if piece.start else sizes[piece.document])
    pieces = [piece for window in windows for piece in window]
    for number, size in enumerate(sizes):
        bounds = sorted((piece.start, piece.end) for piece in pieces if piece.document == number)
        assert [bounds[0][0], *(end for _, end in bounds)] == [*(start for start, _ in bounds), size]
        assert size > length or len(bounds) == 1, "a document that fits into a window is cut"


def test_a_packed_remainder_does_not_keep_the_tokens_of_its_document_in_memory() -> None:
    packer = BestFitPacker(16)
    tokens = np.arange(1, 16 * 1000 + 4)
    packer.add(tokens, 0, np.ones(len(tokens), np.uint8))
    ((piece,),) = packer.close()
    assert piece.mask is not None and piece.tokens.base is None and piece.mask.base is None


def test_the_fixed_limit_of_open_windows_applies() -> None:
    packer = BestFitPacker(64)
    windows = [window for number in range(MAX_OPEN_WINDOWS) for window in packer.add(make_text(number, 40), 0)]
    assert not windows and packer.open_windows == MAX_OPEN_WINDOWS
    (window,) = packer.add(make_text(MAX_OPEN_WINDOWS, 50), 0)
    assert [piece.document for piece in window] == [MAX_OPEN_WINDOWS], "the fullest window is not completed first"


# -- shards --------------------------------------------------------------------------------------------------


def write_packed_shards(
    folder: Path, documents: Sequence[np.ndarray], length: int, limit: int, masks: Sequence[np.ndarray] | None = None
) -> tuple[ShardWriter, tuple[ShardEntry, ...]]:
    """Write documents of one byte per token by best fit. Return the writer and the entries of the shards."""
    (folder / "shards").mkdir()
    writer = ShardWriter(folder, "unit-00000-train", limit, "uint32", {}, length, EOS, packs=True)
    for number, tokens in enumerate(documents):
        writer.add(tokens, len(tokens), None if masks is None else masks[number])
    return writer, writer.close()


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    length=st.integers(2, 20),
    limit=st.integers(21, 200),
    has_masks=st.booleans(),
)
def test_shards_have_each_token_once_and_learn_only_tokens_after_their_predecessor(
    sizes: list[int], length: int, limit: int, has_masks: bool
) -> None:
    # An end-of-text token that is a separate piece would not show its document.
    sizes = [size + 1 if size > 1 and size % length == 1 else size for size in sizes]
    documents = [make_text(number, size) for number, size in enumerate(sizes)]
    random_bits = np.random.default_rng(len(sizes)).integers
    masks = [random_bits(0, 2, size, dtype=np.uint8) for size in sizes] if has_masks else None
    for mask in masks or ():
        mask[0] = MASK_DOCUMENT_START  # The encoder never learns the first token of a record.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer, entries = write_packed_shards(folder, documents, length, limit, masks)
        arrays = [read_arrays(folder, entry) for entry in entries]
    assert sum(entry.documents for entry in entries) == len(sizes)
    assert sum(entry.bytes for entry in entries) == sum(sizes)
    assert writer.cut_documents == sum(size > length for size in sizes)
    assert writer.padding_tokens == sum(len(tokens) for tokens, _ in arrays) - sum(sizes)
    seen: list[int] = []
    short_documents = 0
    for tokens, mask in arrays:
        assert len(tokens) <= limit and len(tokens) % length == 1
        # For each token: its document and its position, or None for padding.
        places: list[tuple[int, int] | None] = []
        for position, token in enumerate(tokens.tolist()):
            before = places[-1] if places else None
            if token != EOS:
                places.append((token // STRIDE - 1, token % STRIDE))
            elif before is not None and before[0] >= 0 and before[1] == sizes[before[0]] - 2:
                places.append((before[0], before[1] + 1))
            else:  # A document of one token, or padding. The number of this document does not matter.
                is_start = bool(mask[position] & MASK_DOCUMENT_START)
                short_documents += is_start
                places.append((-1, 0) if is_start else None)
        seen += [STRIDE * number + position for number, position in filter(None, places) if number >= 0]
        for index, place in enumerate(places):
            previous = places[index - 1] if index else None
            if place is None:
                assert mask[index] == 0, "padding is learned, or starts a document"
                continue
            number, position = place
            continues = previous is not None and number >= 0 and previous == (number, position - 1)
            assert bool(mask[index] & MASK_DOCUMENT_START) == (not continues or index % length == 0)
            if masks is not None:
                expected = continues and bool(masks[number][position] & MASK_LEARNED)
            else:
                ends_other = previous is not None and (previous[0] < 0 or previous[1] == sizes[previous[0]] - 1)
                expected = continues or (position == 0 and ends_other)
            assert bool(mask[index] & MASK_LEARNED) == expected, (index, place, previous)
    assert sorted(seen) == [STRIDE * n + i for n, size in enumerate(sizes) if size > 1 for i in range(size)]
    assert short_documents == sizes.count(1)


def test_a_long_document_is_learned_across_windows_but_not_across_files_or_after_other_tokens(tmp_path: Path) -> None:
    """Windows of 4 tokens, at most 3 windows in a file."""
    documents = [make_text(0, 3), make_text(1, 18), make_text(2, 4), make_text(3, 4), make_text(4, 1)]
    _, entries = write_packed_shards(tmp_path, documents, 4, 13)
    arrays = [read_arrays(tmp_path, entry) for entry in entries]
    start, learned, both = MASK_DOCUMENT_START, MASK_LEARNED, MASK_DOCUMENT_START | MASK_LEARNED
    assert [tokens.tolist() for tokens, _ in arrays] == [
        [*range(2000, 2012), EOS],
        [*range(2012, 2016), 3000, 3001, 3002, EOS, 4000, 4001, 4002, EOS, EOS],
        [1000, 1001, EOS, EOS, 2016, EOS, EOS, EOS, EOS],
    ]
    window = [both, learned, learned, learned]
    assert (
        [mask.tolist() for _, mask in arrays]
        == [
            [start, *window[1:], *window, *window, 0],  # The next windows of a document follow their predecessors.
            # Document 1 continues in another file. Document 2 follows a cut piece, and document 3 follows document 2.
            [start, *window[1:], start, *window[1:], *window, 0],
            # The document of one token fits best after document 0. The remainder then follows an end-of-text token, but
            # it does not start its document.
            [start, learned, learned, both, start, learned, 0, 0, 0],
        ]
    )
    assert [entry.documents for entry in entries] == [1, 2, 2]


def test_a_remainder_directly_after_its_document_is_learned(tmp_path: Path) -> None:
    _, (entry,) = write_packed_shards(tmp_path, [make_text(0, 6)], 4, 100)
    tokens, mask = read_arrays(tmp_path, entry)
    assert tokens.tolist() == [1000, 1001, 1002, 1003, 1004, EOS, EOS, EOS, EOS]
    assert mask.tolist() == [2, 1, 1, 1, 3, 1, 0, 0, 0]


@pytest.mark.parametrize(("window", "expected"), [(None, HASH_OF_STREAM), (16, HASH_OF_WINDOWS)])
def test_shards_without_packing_are_those_of_older_versions(tmp_path: Path, window: int | None, expected: str) -> None:
    (tmp_path / "shards").mkdir()
    writer = ShardWriter(tmp_path, "unit-00000-train", 100, "uint16", {"format_version": 1}, window, 0)
    for number in range(60):
        size = 1 + number * 7 % 37
        tokens = np.arange(1, size + 1, dtype=np.uint16) * (number + 1)
        tokens[-1] = 0
        mask = np.full(size, 1, np.uint8)
        mask[0] = 2
        writer.add(tokens, size, mask if window else None)
    hashes = "".join(entry.sha256 for entry in writer.close())
    assert hashlib.sha256(hashes.encode()).hexdigest() == expected
    assert (writer.padding_tokens, writer.cut_documents) == (0, 0)


# -- the shard stage -----------------------------------------------------------------------------------------


def collect_pieces(folder: Path, entries: Sequence[ShardEntry]) -> list[list[int]]:
    """Return the pieces of packed shards, without padding."""
    pieces = []
    for entry in entries:
        tokens, mask = read_arrays(folder, entry)
        starts = np.flatnonzero(mask & MASK_DOCUMENT_START).tolist()
        for start, end in pairwise([*starts, len(tokens)]):
            unpadded = max((i for i in range(start, end) if mask[i]), default=start) + 1
            pieces.append(tokens[start:unpadded].tolist())
    return pieces


@pytest.mark.parametrize("mode", ["cut", "truncate", "drop"])
@pytest.mark.parametrize("processor", ["qwen", "begin and end", "same token for begin and end"])
def test_text_is_packed_truncated_or_dropped_and_counted(
    tmp_path: Path, small_units: None, mode: Any, processor: str
) -> None:
    length = 128
    texts = make_documents(90)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    file = save_tokenizer(tmp_path, add_post_processor(make_byte_tokenizer(" ".join(texts), 300), processor))
    eos_token = "<|end|>" if processor != "begin and end" else "</s>"
    options = {"tokenizer": {"kind": "file", "path": file, "eos_token": eos_token}, "sequence_length": length}
    base = make_data_config(str(source)).model_dump() | options
    data = DataConfig.model_validate(base | {"packing": "best_fit", "long_documents": mode})
    cut_data = DataConfig.model_validate(base)
    manifest = build_shards(data, tmp_path / mode)
    cut_manifest = build_shards(cut_data, tmp_path / "stream")
    encoder = load_encoder(file, eos_token, "auto")
    train_texts = [text for text in texts if not is_held_out(text.encode(), data.held_out)]
    documents = [tokens.tolist() for tokens in encoder.encode(train_texts)]
    long_count = sum(len(tokens) > length for tokens in documents)
    assert 5 < long_count < 60 and any(len(tokens) % length for tokens in documents)
    expected = []
    for tokens in documents:
        if len(tokens) <= length or mode == "cut":
            expected += [tokens[start : start + length] for start in range(0, len(tokens), length)]
        elif mode == "truncate":
            expected.append(tokens[:length])
    pieces = collect_pieces(tmp_path / mode, manifest.train)
    assert sorted(pieces) == sorted(expected)
    assert manifest.long_documents == long_count
    assert manifest.cut_documents == (long_count if mode == "cut" else 0)
    assert manifest.padding_tokens == manifest.train_tokens - sum(map(len, pieces))
    dropped = long_count if mode == "drop" else 0
    assert manifest.documents - manifest.held_out_documents == len(train_texts) - dropped
    # Held-out text is the same as without packing.
    held_out_hashes = [entry.sha256 for entry in manifest.held_out]
    assert held_out_hashes == [entry.sha256 for entry in cut_manifest.held_out] and held_out_hashes
    assert all(entry.mask_offset is None for entry in manifest.held_out)
    assert manifest.held_out_bytes == cut_manifest.held_out_bytes
    if mode == "cut":
        assert manifest.train_bytes == cut_manifest.train_bytes
    else:
        kept = [
            (text, len(tokens)) for text, tokens in zip(train_texts, documents, strict=True)
            if mode == "truncate" or len(tokens) <= length
        ]  # fmt: skip
        decoded_bytes = 0
        for text, size in kept:
            ids = encoder.tokenizer.encode(text, add_special_tokens=False)
            bos_count = len(encoder.bos_ids) if processor == "begin and end" else 0
            end = ids.offsets[: length - bos_count][-1][1] if size > length else len(text)
            decoded_bytes += len(text[:end].encode())
        assert manifest.train_bytes == decoded_bytes < cut_manifest.train_bytes
    padding, cut = manifest.padding_tokens / manifest.train_tokens, manifest.cut_documents / len(train_texts)
    assert f"packed by best fit: {padding:.1%} padding, {cut:.1%} of the documents cut" in str(manifest)
    assert f"{long_count} longer than a sample (data.long_documents: {mode})" in str(manifest)
    assert "best fit" not in str(cut_manifest) and cut_manifest.padding_tokens == 0


@pytest.mark.parametrize("records", ["text", "prompts"])
def test_any_number_of_tasks_packs_the_same_bytes(tmp_path: Path, small_units: None, records: str) -> None:
    generator = random.Random(2)
    lines = [
        {
            "text": test_records.sample_words(generator, 120),
            "prompt": test_records.sample_words(generator, 9),
            "response": test_records.sample_words(generator, 60),
        }
        for _ in range(200)
    ]
    source = test_records.write_lines(tmp_path / "a.jsonl", lines)
    data = test_records.make_data_config(source, records, packing="best_fit")
    manifests = [build_shards(data, tmp_path / str(tasks), tasks) for tasks in (1, 2, 3)]
    assert len(list((tmp_path / "1/shards").glob("unit-*.json"))) > 3
    assert read_all_files(tmp_path / "1") == read_all_files(tmp_path / "2") == read_all_files(tmp_path / "3")
    assert manifests[0].padding_tokens > 0 and manifests[0].cut_documents > 0
    in_order = build_shards(data.model_copy(update={"packing": "cut"}), tmp_path / "cut")
    held_out_hashes, in_order_hashes = (
        [entry.sha256 for entry in manifest.held_out] for manifest in (manifests[0], in_order)
    )
    assert (held_out_hashes == in_order_hashes) == (records == "text"), "records are packed in both splits"
    if records == "prompts":
        assert manifests[0].documents == in_order.documents
        assert (manifests[0].train_bytes, manifests[0].held_out_bytes) == (
            in_order.train_bytes,
            in_order.held_out_bytes,
        )
        assert manifests[0].train_tokens < in_order.train_tokens, "best fit needs more padding than the order"


def test_the_sources_of_a_mixture_are_packed_on_their_own(tmp_path: Path) -> None:
    texts = make_documents(160)
    tokenizer = save_tokenizer(tmp_path, make_byte_tokenizer(" ".join(texts), 300))
    sources = {}
    for number, name in enumerate(("web", "code")):
        sources[name] = {"source": str(write_jsonl(tmp_path / f"{name}.jsonl", texts[number::2]))}
    data = DataConfig.model_validate(
        {
            "mixture": {"sources": sources, "weights": [{"weights": {"web": 1, "code": 1}}]},
            "tokenizer": {"kind": "file", "path": tokenizer, "eos_token": "<|end|>"},
            "packing": "best_fit", "sequence_length": 64, "held_out": 0.2,
        }
    )  # fmt: skip
    folder = MixtureFolder(data, tmp_path / "data")
    folder.prepare(print)
    folder.shard(0, 1, print)
    assert folder.finalize(print)
    manifest = load_manifest(tmp_path / "data")
    parts = [load_manifest(tmp_path / "data" / name) for name in sources]
    assert manifest.padding_tokens == sum(part.padding_tokens for part in parts)
    assert manifest.cut_documents == sum(part.cut_documents for part in parts) > 0
    dataset = TokenDataset(manifest.train, 64, tmp_path / "data")
    assert dataset.read(np.arange(len(dataset)))["mask"].shape == (manifest.count_training_samples(64), 65)


def test_dropping_all_training_text_is_an_error_that_names_the_keys(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(60)[40:])
    data = make_data_config(str(source), packing="best_fit", long_documents="drop", sequence_length=8)
    with raises_error("data.all_too_long", "data.long_documents: drop", "sequence_length (8)"):
        build_shards(data, tmp_path / "data")


def test_the_summary_of_an_older_manifest_has_the_present_name_of_its_value() -> None:
    manifest = Manifest.model_construct(
        documents=9, held_out_documents=0, rejected_documents=0, train_tokens=5, held_out_tokens=0, long_documents=2,
        long_dialogues="split",
    )  # fmt: skip
    assert str(manifest).endswith("2 longer than a sample (data.long_documents: cut)")
    assert Manifest.model_fields["long_dialogues"].annotation is str, "older manifests have this field"


# -- the loss ------------------------------------------------------------------------------------------------


def make_packed_batch(folder: Path, sizes: Sequence[int], length: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Pack random texts. Return the texts, and a batch of all samples as the data loader returns it."""
    generator = np.random.default_rng(3)
    documents = [np.append(generator.integers(1, 64, size - 1), EOS).astype(np.uint32) for size in sizes]
    _, entries = write_packed_shards(folder, documents, length, 10_000)
    dataset = TokenDataset(entries, length, folder)
    arrays = dataset.read(np.arange(len(dataset)))
    tokens = torch.from_numpy(arrays["tokens"].astype(np.int64))
    return documents, {"tokens": tokens, "mask": torch.from_numpy(arrays["mask"])}


def make_text_config(length: int, **data: Any) -> Any:
    """Return the config of a small decoder for text that is packed by best fit."""
    values = {
        "run": {"name": "packed"}, "data": {"sequence_length": length, "packing": "best_fit", **data},
        "model": {"dim": 16, "layers": 2, "heads": 4}, "train": {"steps": 1},
    }  # fmt: skip
    return parse_config(values, "test")


def test_the_loss_of_packed_text_is_the_sum_over_its_documents(tmp_path: Path) -> None:
    length = 16
    sizes = [5, 40, 7, 16, 3, 20, 11, 1, 33, 2, 9]
    documents, batch = make_packed_batch(tmp_path, sizes, length)
    config = make_text_config(length, document_mask=True)
    task = DecoderTask(config, 64, EOS)
    assert {name: (array.shape[1:], str(array.dtype)[6:]) for name, array in batch.items()} == task.sample_shapes
    model = Decoder(config.model, 64, length)
    init_weights(model, 1, 0.3)
    with torch.no_grad():
        logits = model(*task.model_inputs(batch), **task.document_boundaries(batch))
        loss = task.loss(logits, batch).item()
        expected = 0.0
        count = 0
        for document in documents:
            tokens = torch.from_numpy(document.astype(np.int64))
            for start in range(0, len(tokens), length):
                inputs = tokens[start : start + length][None]
                # The next window of a long document follows directly, its remainder does not.
                is_followed = len(tokens) >= start + 2 * length
                targets = tokens[start + 1 : start + length + is_followed][None]
                expected += (
                    cross_entropy_sum(model(inputs)[:, : targets.shape[1]], targets).item() if len(targets[0]) else 0.0
                )
                count += targets.shape[1]
    entries = task.count_loss_entries(batch)
    assert entries is not None and entries.item() == count
    assert loss == pytest.approx(expected, rel=1e-5)


def test_without_a_document_mask_first_tokens_are_learned_after_an_end_of_text_token(tmp_path: Path) -> None:
    length = 16
    _, batch = make_packed_batch(tmp_path, [5, 9, 40, 2, 6], length)
    masked_targets, targets = (
        DecoderTask(make_text_config(length, document_mask=value), 64, EOS).next_tokens(batch)
        for value in (True, False)
    )
    inputs = batch["tokens"][:, :-1]
    is_additional = (targets != IGNORE_INDEX) & (masked_targets == IGNORE_INDEX)
    assert is_additional.sum() > 1 and (inputs[is_additional] == EOS).all()
    assert ((masked_targets == IGNORE_INDEX) | (masked_targets == targets)).all()


def test_a_token_that_ends_and_starts_documents_belongs_to_the_next_packed_document() -> None:
    """The token is the first token that the next document sees, as without packing. Padding starts no document."""
    task = DecoderTask(make_text_config(8, document_mask=True), 64, EOS, eos_starts_next=True)
    start, learned, both = MASK_DOCUMENT_START, MASK_LEARNED, MASK_DOCUMENT_START | MASK_LEARNED
    # The second sample ends with the remainder of a document, which does not follow the end of its predecessor.
    batch = {
        "tokens": torch.tensor([[5, 6, EOS, 7, EOS, EOS, EOS, EOS, 8], [8, 9, EOS, 7, EOS, 4, 4, 4, EOS]]),
        "mask": torch.tensor(
            [
                [start, learned, learned, both, learned, 0, 0, 0, start],
                [start, learned, learned, both, learned, start, learned, learned, 0],
            ],
            dtype=torch.uint8,
        ),
    }
    starts = task.document_boundaries(batch)["starts_BT"]
    assert [row.nonzero().flatten().tolist() for row in starts] == [[0, 2], [0, 2, 5]]
    targets = [[6, EOS, 7, EOS, *[IGNORE_INDEX] * 4], [9, EOS, 7, EOS, IGNORE_INDEX, 4, 4, IGNORE_INDEX]]
    assert task.next_tokens(batch).tolist() == targets


def test_the_manifest_has_the_counts_of_padding_and_cut_documents(tmp_path: Path) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", make_documents(80)))
    data = make_data_config(source, packing="best_fit", sequence_length=64)
    build_shards(data, tmp_path / "data")
    values = json.loads((tmp_path / "data/manifest.json").read_text())
    assert values["long_dialogues"] == "cut" and values["padding_tokens"] > 0 and values["cut_documents"] > 0
