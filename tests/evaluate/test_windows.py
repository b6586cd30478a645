"""Which windows of held-out text are looked at, by a plain list of all of them."""

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
    folder = tmp_path_factory.mktemp("tokens")
    np.arange(4000, dtype=np.uint16).tofile(folder / "one.bin")
    return folder


def held_out(folder: Path, sizes: list[tuple[str, int]], limit: int | None) -> TextHeldOut:
    """Of parts of one file, each of a source and so many tokens, windows of 8."""
    starts = np.cumsum([0, *(size for _, size in sizes)]).tolist()
    entries = [
        ShardEntry.model_construct(
            file="one.bin", part=(2 * start, 2 * (start + size)), tokens=size, offset=2 * start, dtype="uint16",
            mask_offset=None, bytes=size,
        )
        for start, (_, size) in zip(starts, sizes, strict=False)
    ]  # fmt: skip
    parts = [
        MixturePart(name=name, train=0, held_out=len(list(some)))
        for name, some in groupby(sizes, key=lambda size: size[0])
    ]
    manifest: Any = SimpleNamespace(held_out=entries, parts=parts if parts[1:] else (), vocab_size=4000, eos_id=0)
    run: Any = SimpleNamespace(data_dir=folder, config=SimpleNamespace(data=SimpleNamespace(sequence_length=8)))
    task: Any = SimpleNamespace()
    return TextHeldOut(run, task, manifest, limit, torch.device("cpu"))


SIZES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 90)), min_size=1, max_size=12)


@given(SIZES.map(lambda sizes: sorted(sizes, key=lambda size: size[0])), st.none() | st.integers(1, 40))
def test_the_windows_are_those_of_a_plain_list(folder: Path, sizes: list[tuple[str, int]], limit: int | None) -> None:
    found = held_out(folder, sizes, limit)
    starts = np.cumsum([0, *(size for _, size in sizes)]).tolist()
    every: dict[str, list[tuple[int, int]]] = {}
    for start, (source, size) in zip(starts, sizes, strict=False):
        every.setdefault(source, []).extend((start, first) for first in range(0, size, 8))
    shares = [len(windows) for windows in every.values()]
    if limit is not None:
        shares = [len(range(number, limit, len(every))) for number in range(len(every))]  # dealt out in turn
    wanted = [window for windows, share in zip(every.values(), shares, strict=True) for window in windows[:share]]
    windows = [found._window(number) for number in range(found.count)]
    assert [(shard.offset // 2, first) for shard, first in windows] == wanted
    for shard, first in windows:  # each part of the file has its own tokens
        assert int(found._arrays[shard.name]["tokens"][first]) == shard.offset // 2 + first
    covered = {shard.offset // 2: first + 8 for shard, first in windows}
    assert [(shard.offset // 2, many) for shard, many in found._covered] == [
        (start, min(end, size)) for start, (_, size) in zip(starts, sizes, strict=False) if (end := covered.get(start))
    ]


def test_a_source_gets_as_many_as_another(folder: Path) -> None:
    found = held_out(folder, [("a", 90), ("b", 90), ("c", 90)], 10)
    assert [many // 8 for _, many in found._covered] == [4, 3, 3]
