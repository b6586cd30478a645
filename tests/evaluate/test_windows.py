"""Tests of the windows of held-out text that an evaluation uses, compared with a list of all windows."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.manifest import MixturePart, ShardEntry
from pipeline.evaluate.evaluator import TextHeldOut


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `one.bin`, a file of 4,000 tokens. The value of each token is its position in the file."""
    folder = tmp_path_factory.mktemp("tokens")
    np.arange(4000, dtype=np.uint16).tofile(folder / "one.bin")
    return folder


def make_held_out(folder: Path, part_sizes: list[tuple[str, int]], limit: int | None) -> TextHeldOut:
    """Return held-out text in windows of 8 tokens.

    Args:
        folder: the folder with `one.bin`.
        part_sizes: source and number of tokens of each part of the file.
        limit: maximum number of windows.
    """
    starts = np.cumsum([0, *(size for _, size in part_sizes)]).tolist()
    entries = [
        ShardEntry.model_construct(
            # a token has two bytes
            file="one.bin", part=(2 * start, 2 * (start + size)), tokens=size, offset=2 * start, dtype="uint16",
            mask_offset=None, bytes=size,
        )
        for start, (_, size) in zip(starts, part_sizes, strict=False)
    ]  # fmt: skip
    parts = [
        MixturePart(name=name, train=0, held_out=len(list(group)))
        for name, group in groupby(part_sizes, key=lambda part: part[0])
    ]
    manifest: Any = SimpleNamespace(held_out=entries, parts=parts if parts[1:] else (), vocab_size=4000, eos_id=0)
    data = SimpleNamespace(sequence_length=8, has_loss_mask=False)
    run: Any = SimpleNamespace(data_dir=folder, config=SimpleNamespace(data=data))
    task: Any = SimpleNamespace()
    return TextHeldOut(run, task, manifest, limit, torch.device("cpu"))


PART_SIZES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 90)), min_size=1, max_size=12)


@given(PART_SIZES.map(lambda part_sizes: sorted(part_sizes, key=lambda part: part[0])), st.none() | st.integers(1, 40))
def test_the_windows_equal_those_of_a_list_of_all_windows(
    folder: Path, part_sizes: list[tuple[str, int]], limit: int | None
) -> None:
    held_out = make_held_out(folder, part_sizes, limit)
    starts = np.cumsum([0, *(size for _, size in part_sizes)]).tolist()
    windows_by_source: dict[str, list[tuple[int, int]]] = {}
    for start, (source, size) in zip(starts, part_sizes, strict=False):
        windows_by_source.setdefault(source, []).extend((start, window_start) for window_start in range(0, size, 8))
    window_counts = [len(windows) for windows in windows_by_source.values()]
    if limit is not None:
        source_count = len(windows_by_source)
        # The windows within the limit are assigned to the sources in turn.
        window_counts = [len(range(number, limit, source_count)) for number in range(source_count)]
    expected: list[tuple[int, int]] = []
    for source_windows, window_count in zip(windows_by_source.values(), window_counts, strict=True):
        expected += source_windows[:window_count]
    windows = [held_out._locate_window(number) for number in range(held_out.count)]
    assert [(shard.offset // 2, window_start) for shard, window_start in windows] == expected
    for shard, window_start in windows:  # The value of each token is its position in the file.
        assert int(held_out._arrays[shard.name]["tokens"][window_start]) == shard.offset // 2 + window_start
    # where the last window of each part ends, by the start of the part
    end_by_part = {shard.offset // 2: window_start + 8 for shard, window_start in windows}
    assert [(shard.offset // 2, count) for shard, count in held_out._tokens_in_windows] == [
        (start, min(end, size))
        for start, (_, size) in zip(starts, part_sizes, strict=False)
        if (end := end_by_part.get(start))
    ]


def test_a_limit_is_divided_equally_among_the_sources(folder: Path) -> None:
    held_out = make_held_out(folder, [("a", 90), ("b", 90), ("c", 90)], 10)
    assert [count // 8 for _, count in held_out._tokens_in_windows] == [4, 3, 3]
