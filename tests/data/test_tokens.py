"""Tests of the samples of text (compared with a simple reader), of the files that stay open, and of the sampler."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from pipeline.base.errors import InputError
from pipeline.data.loader import BatchLoader
from pipeline.data.manifest import MASK_DOCUMENT_START
from pipeline.data.sample_order import GlobalOrderSampler, compute_index_range
from pipeline.data.samples import DocumentEnds, TokenDataset
from tests.support.errors import raises_error
from tests.support.shards import make_shard_entry, write_shards

CPU = torch.device("cpu")
SHARD_SIZES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=6)
"""Number of tokens of each shard, and bytes before the tokens."""

_opened_paths: list[str] | None = None
"""Paths of files that were opened while a test records them; None if no test records them."""


def _record_opened_files(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened_paths is not None:
        _opened_paths.append(str(arguments[0]))


sys.addaudithook(_record_opened_files)  # Hooks cannot be removed. This one does nothing while `_opened_paths` is None.


def read_token_by_token(contents: list[np.ndarray], length: int) -> list[list[int]]:
    """Return all samples of `length` + 1 tokens, read one token at a time.

    The last token of a sample is also the first token of the next sample of the shard.
    """
    samples = []
    for content in contents:
        start = 0
        while start + length < len(content):
            samples.append([int(content[start + offset]) for offset in range(length + 1)])
            start += length
    return samples


@settings(max_examples=80)
@given(st.data(), SHARD_SIZES, st.integers(1, 20), st.sampled_from(["uint16", "uint32"]))
def test_samples_equal_those_read_token_by_token(
    data: st.DataObject, sizes: list[tuple[int, int]], length: int, dtype: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entries, contents = write_shards(Path(folder), sizes, dtype)
        samples = read_token_by_token(contents, length)
        if not samples:
            with raises_error("data.no_training_sample", f"{sum(n for n, _ in sizes)} tokens"):
                TokenDataset(entries, length)
            return
        dataset = TokenDataset(entries, length)
        assert len(dataset) == len(samples) == sum((max(n, 1) - 1) // length for n, _ in sizes)
        indices = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=12))
        batch = dataset.read(np.array(indices, dtype=np.int64))["tokens"]
        assert batch.dtype == dtype
        assert batch.shape == (len(indices), length + 1)
        assert batch.tolist() == [samples[i] for i in indices]
        assert dataset.read(np.array([len(samples) - 1]))["tokens"][0].tolist() == samples[-1]
        with BatchLoader(dataset, [np.array(indices, dtype=np.int64)], CPU) as batches:
            tokens_BT1 = next(batches)["tokens"]
        assert tokens_BT1.dtype == torch.int64
        assert tokens_BT1.tolist() == [samples[i] for i in indices]


def test_the_largest_token_ids_of_both_types_are_read_correctly(tmp_path: Path) -> None:
    for dtype, ids in (("uint16", [0, 32767, 32768, 65535]), ("uint32", [0, 2**31 - 1, 2**31, 2**32 - 1])):
        path = tmp_path / dtype
        path.write_bytes(np.array(ids, dtype=dtype).tobytes())
        dataset = TokenDataset([make_shard_entry(path, 4, 0, dtype)], 3)
        with BatchLoader(dataset, [np.array([0])], CPU) as batches:
            assert next(batches)["tokens"].tolist() == [ids]


def test_hdf5_shards_are_opened_once(tmp_path: Path) -> None:
    global _opened_paths
    entries = []
    contents = []
    for i in range(3):
        content = np.random.default_rng(i).integers(0, 65536, 101, dtype=np.uint16)
        path = tmp_path / f"tokens-{i}.h5"
        with h5py.File(path, "w") as file:
            file["documents"] = np.arange(7)
            shard = file.create_dataset("tokens", data=content)
            entries.append(make_shard_entry(path, len(content), shard.id.get_offset(), str(shard.dtype)))
        contents.append(content)
    _opened_paths = []
    try:
        dataset = TokenDataset(entries, 10)
        sampler = GlobalOrderSampler(dataset, global_batch=4, seed=1, num_replicas=1, rank=0)
        with BatchLoader(dataset, sampler, CPU) as batches:
            batches_of_20_steps = [next(batches)["tokens"] for _ in range(20)]  # more than two epochs
    finally:
        opened_paths = _opened_paths
        _opened_paths = None
    assert sorted(path for path in opened_paths if path.endswith(".h5")) == [entry.file for entry in entries]
    open_files = [os.readlink(path) for path in _list_descriptors()]  # Python's mmap keeps one descriptor per file.
    assert [open_files.count(entry.file) for entry in entries] == [1, 1, 1]
    samples = read_token_by_token(contents, 10)
    expected_indices = compute_index_range(1, 0, 80, 30)  # 20 steps of 4 samples, from a dataset of 30 samples
    assert torch.cat(batches_of_20_steps).tolist() == [samples[i] for i in expected_indices]


def test_ranges_of_a_file_share_its_descriptor_until_one_is_remapped(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    copy = tmp_path / "copy"
    np.arange(3000, dtype=np.uint16).tofile(path)
    copy.write_bytes(path.read_bytes())
    entries = [make_shard_entry(path, 10, 20 * number, "uint16") for number in range(300)]
    dataset = TokenDataset(entries, 9)
    assert [os.readlink(link) for link in _list_descriptors()].count(str(path)) == 1
    dataset.remap_file(7, copy)
    open_files = [os.readlink(link) for link in _list_descriptors()]
    assert (open_files.count(str(path)), open_files.count(str(copy))) == (1, 1)
    assert dataset.read(np.arange(300))["tokens"].ravel().tolist() == list(range(3000))


def test_reading_a_short_row_does_not_copy_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    tokens = 1 << 22
    np.arange(tokens, dtype=np.uint32).tofile(path)
    dataset = TokenDataset([make_shard_entry(path, tokens, 0, "uint32")], 100)
    tracemalloc.start()
    try:
        assert dataset.read(np.array([9, 40_000]))["tokens"][:, 0].tolist() == [900, 4_000_000]
        assert tracemalloc.get_traced_memory()[1] < tokens, "numpy copied more than the rows"
    finally:
        tracemalloc.stop()


def _list_descriptors() -> list[str]:
    """Return the links to the open files of this process."""
    return [path for name in os.listdir("/proc/self/fd") if os.path.islink(path := f"/proc/self/fd/{name}")]


def test_unusable_shards_are_an_error(tmp_path: Path) -> None:
    entries, _ = write_shards(tmp_path, [(30, 8), (30, 8)], "uint16")
    with raises_error("data.damaged_file", tmp_path / "gone.h5", kind=InputError):
        TokenDataset([entries[0], make_shard_entry(tmp_path / "gone.h5", 30, 0, "uint16")], 5)
    with raises_error("data.damaged_file", entries[1].file, kind=InputError):
        TokenDataset([entries[0], make_shard_entry(Path(entries[1].file), 300, 8, "uint16")], 5)
    with raises_error("data.wrong_type", "float32", entries[1].file, kind=InputError):
        TokenDataset([make_shard_entry(Path(entries[1].file), 15, 8, "float32")], 5)
    with raises_error("data.no_training_sample", "60 tokens in 2 shards", "at most 30"):
        TokenDataset(entries, 30)
    with raises_error("data.no_training_sample", "data.sequence_length"):
        TokenDataset([], 30)


def test_shards_of_different_token_types_are_read_in_the_wider_type(tmp_path: Path) -> None:
    """The sources of a mixture may have different token types."""
    (uint16_shard,), (uint16_tokens,) = write_shards(tmp_path, [(13, 8)], "uint16")
    (tmp_path / "wide").mkdir()
    (uint32_shard,), (uint32_tokens,) = write_shards(tmp_path / "wide", [(11, 4)], "uint32")
    dataset = TokenDataset([uint16_shard, uint32_shard], 5)
    tokens = dataset.read(np.arange(4))["tokens"]
    assert tokens.dtype == "uint32" and tokens.tolist() == read_token_by_token([uint16_tokens, uint32_tokens], 5)
    with BatchLoader(dataset, [np.arange(4)], CPU) as batches:
        assert next(batches)["tokens"].tolist() == tokens.tolist()


@pytest.mark.parametrize("index", [-1, 12])
def test_an_index_out_of_range_is_an_error(tmp_path: Path, index: int) -> None:
    dataset = TokenDataset(write_shards(tmp_path, [(31, 0), (31, 0)], "uint16")[0], 5)
    with pytest.raises(IndexError, match="12"):
        dataset.read(np.array([3, index]))


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 300), st.integers(0, 9))
def test_any_number_of_ranks_reads_the_same_global_batches(
    sample_count: int, quarter: int, consumed: int, seed: int
) -> None:
    global_batch = 4 * quarter  # divisible by 1, 2 and 4 ranks
    steps = 3
    expected = compute_index_range(seed, consumed, steps * global_batch, sample_count).reshape(steps, global_batch)
    with tempfile.TemporaryDirectory() as folder:
        dataset = TokenDataset(write_shards(Path(folder), [(sample_count + 1, 0)], "uint16")[0], 1)
        for world_size in (1, 2, 4):
            samplers = [
                iter(
                    GlobalOrderSampler(
                        dataset,
                        global_batch=global_batch,
                        seed=seed,
                        samples_consumed=consumed,
                        num_replicas=world_size,
                        rank=rank,
                    )
                )
                for rank in range(world_size)
            ]
            for step in range(steps):
                indices_by_rank = [next(sampler) for sampler in samplers]
                assert {indices.dtype.name for indices in indices_by_rank} == {"int64"}
                assert {indices.shape for indices in indices_by_rank} == {(global_batch // world_size,)}
                assert np.concatenate(indices_by_rank).tolist() == expected[step].tolist()


def test_the_sampler_continues_with_the_next_epoch(tmp_path: Path) -> None:
    dataset = TokenDataset(write_shards(tmp_path, [(101, 0)], "uint16")[0], 1)
    sampler = GlobalOrderSampler(dataset, global_batch=16, seed=3, num_replicas=2, rank=1)
    assert isinstance(sampler, DistributedSampler)
    assert len(sampler) == 7
    sampler.set_epoch(5)  # must have no effect
    for step, indices in zip(range(100), sampler, strict=False):
        # rank 1 of 2 reads the second half of each global batch
        assert np.array_equal(indices, compute_index_range(3, 16 * step + 8, 8, 100)), step
    with raises_error("config.conflict", "train.global_batch (16)", 3):
        GlobalOrderSampler(dataset, global_batch=16, seed=3, num_replicas=3, rank=1)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=4),
    kind=st.sampled_from(["mask", "end token", "one token for both"]),
)
def test_the_work_of_attention_is_the_sum_of_squared_document_lengths(rows: list[list[int]], kind: str) -> None:
    """Token 0 ends a document, or with a mask, marks a start. The last token of a row is only a target."""
    tokens = np.array(rows, dtype=np.uint16)
    arrays = {"tokens": tokens}
    if kind == "mask":
        arrays["mask"] = np.where(tokens == 0, MASK_DOCUMENT_START, 0).astype(np.uint8)
    sums = DocumentEnds(0, eos_starts_next=kind == "one token for both").measure_work(arrays)
    for row, total in zip(rows, sums.tolist(), strict=True):
        lengths = [0]
        for position, token in enumerate(row[:-1]):
            is_start = row[position - 1] == 0 if kind == "end token" else token == 0
            if position and is_start:
                lengths.append(0)
            lengths[-1] += 1
        assert total == sum(length**2 for length in lengths)


def test_windows_limit_the_work_of_long_documents() -> None:
    """One block has a window of 4, two blocks read whole documents. The documents have 7 and 2 tokens."""
    tokens = np.array([[1, 1, 1, 1, 1, 1, 0, 1, 1, 1]], dtype=np.uint16)
    ends = DocumentEnds(0, eos_starts_next=False, windows=((9, 2), (4, 1)))
    pairs_in_window = 1 + 2 + 3 + 4 * 4 + 1 + 2
    pairs = 7 * 8 / 2 + 2 * 3 / 2
    # Each document counts twice its pairs, minus the number of its tokens that read fewer tokens than the window.
    assert ends.measure_work({"tokens": tokens}) == 2 * (7**2 + 2**2) + (2 * pairs_in_window - 4 - 2)
    assert 2 * pairs - 9 == 7**2 + 2**2


def test_balanced_ranks_have_even_work_and_together_the_same_samples(tmp_path: Path) -> None:
    """Documents have lengths from a heavy-tailed distribution, so that some fill a sample and most are short."""
    generator = np.random.default_rng(1)
    length, batch, ranks, steps = 256, 64, 4, 10
    tokens = generator.integers(1, 300, length * batch * steps + 1)
    position = 0
    while position < len(tokens):
        position += int(8 * (1 + generator.pareto(1.1)))
        tokens[position - 1 : position] = 0
    path = tmp_path / "tokens"
    path.write_bytes(tokens.astype(np.uint16).tobytes())
    entry = make_shard_entry(path, len(tokens), 0, "uint16")
    ends = DocumentEnds(0, eos_starts_next=False)
    dataset, balanced_dataset = TokenDataset([entry], length, tmp_path), TokenDataset([entry], length, tmp_path, ends)

    def read_batches(source: TokenDataset, rank: int) -> list[Any]:
        """Return the indices that a rank reads in each step."""
        sampler = GlobalOrderSampler(source, global_batch=batch, seed=1, num_replicas=ranks, rank=rank)
        return list(itertools.islice(sampler, steps))

    in_order, balanced = ([read_batches(source, r) for r in range(ranks)] for source in (dataset, balanced_dataset))
    spreads: dict[str, list[float]] = {"in order": [], "balanced": []}
    for step in range(steps):
        assert sorted(np.concatenate([batches[step] for batches in balanced])) == sorted(
            np.concatenate([batches[step] for batches in in_order])
        )
        for name, assigned in (("in order", in_order), ("balanced", balanced)):
            costs = [ends.measure_work(dataset.read(batches[step])).sum() for batches in assigned]
            spreads[name].append(max(costs) / np.mean(costs))
    assert np.mean(spreads["balanced"]) < 1.02 < 1.1 < np.mean(spreads["in order"])
