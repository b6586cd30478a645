"""Tests of `data.deduplicate` and `data.filter`.

Their results equal those of simple implementations, for any number of tasks and after crashes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import duplicates
from data_prep.duplicates import Duplicates
from data_prep.text_folder import TextFolder
from pipeline.config.datasets import DataConfig
from pipeline.config.read import load_config
from pipeline.data.manifest import load_manifest
from tests.data_prep.test_shards import (
    build_shards,
    check_shards,
    discard_log,
    make_data_config,
    make_documents,
    read_all_files,
    run_prepare,
    run_shard_task,
    small_units,
    write_jsonl,
)
from tests.support.errors import raises_error
from tests.support.tiny import write_config

__all__ = ["small_units"]


def remove_duplicates(documents: list[str]) -> list[str]:
    """Return the texts that are not empty, each at its first position."""
    return list(dict.fromkeys(text for text in documents if text))


@settings(max_examples=8)
@given(
    indices=st.lists(st.integers(0, 12), min_size=6, max_size=60),
    tasks=st.integers(1, 5),
    range_hashes=st.integers(1, 9),
)
def test_the_first_of_equal_documents_is_kept_for_any_number_of_tasks(
    indices: list[int], tasks: int, range_hashes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("twice")
    choices = [*make_documents(12), ""]
    documents = [choices[index] for index in indices] + ["at least", "this"]
    half = len(documents) // 2
    write_jsonl(folder / "a.jsonl", documents[:half])
    write_jsonl(folder / "b.jsonl", documents[half:])
    data = make_data_config(str(folder / "*.jsonl"), deduplicate=True, held_out=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.work_units.MIN_UNIT_BYTES", 64)
        patch.setattr(duplicates, "_MAX_RANGE_HASHES", range_hashes)
        patch.setattr(os, "fsync", lambda fd: None)  # fsync is slow, and matters only if the machine crashes
        build_shards(data, folder / "one", 1)
        manifest = build_shards(data, folder / "data", tasks)
    unique_documents = remove_duplicates(documents)
    check_shards(data, folder / "data", manifest, unique_documents)
    assert manifest.documents == len(unique_documents)
    assert manifest.duplicate_documents == len([text for text in documents if text]) - len(unique_documents)
    assert read_all_files(folder / "one") == read_all_files(folder / "data")


@given(
    units=st.lists(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=6), min_size=1, max_size=5),
    data=st.data(),
)
@settings(max_examples=30)
def test_first_occurrences_equal_those_of_a_set(
    units: list[list[bytes]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("units")
    earlier_texts: set[bytes] = set()
    expected: list[list[bool]] = []
    for unit in units:
        expected.append([])
        for text in unit:
            expected[-1].append(text not in earlier_texts)
            earlier_texts.add(text)
    keys = [f"{number:064d}" for number in range(len(units))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_MAX_RANGE_HASHES", data.draw(st.integers(1, 5)))
        for number in data.draw(st.permutations(range(len(units)))):
            duplicates_of_task = Duplicates(folder, keys, units.__getitem__, task=number % 2, tasks=2)
            is_first = duplicates_of_task.find_first_occurrences(number)
            np.testing.assert_array_equal(is_first, expected[number])


FILTER_CODE = "def keep(document):\n    return document.get('score', 9) > 3 and 'bad' not in document['text']\n"


def make_config_with_filter(folder: Path, source: str, code: str = FILTER_CODE, **options: object) -> DataConfig:
    """Return a data config with a filter of this code."""
    (folder / "quality.py").write_text(code)
    return make_data_config(source, filter=f"{folder}/quality:keep", held_out=0.0, **options)


def test_a_filter_decides_which_documents_are_used(tmp_path: Path) -> None:
    lines = [{"text": f"document {i}", "score": i % 8} for i in range(40)] + [{"text": "a bad one"}, {"text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["of parquet", "bad"]}), tmp_path / "b.parquet")
    data = make_config_with_filter(tmp_path, str(tmp_path / "[ab].*"), deduplicate=True)
    manifest = build_shards(data, tmp_path / "data", 3)
    expected = [f"document {i}" for i in range(40) if i % 8 > 3] + ["of parquet"]
    check_shards(data, tmp_path / "data", manifest, expected)
    assert (manifest.documents, manifest.filtered_documents, manifest.rejected_documents) == (21, 22, 0)


def test_filtered_documents_are_counted_and_not_listed_as_rejected(tmp_path: Path) -> None:
    data = make_config_with_filter(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", ["good", *["bad"] * 50])))
    run_prepare(data, tmp_path / "data", discard_log)
    folder = TextFolder(data, tmp_path / "data")
    rejected_documents: list[tuple[int, int, str]] = []
    line_counts = [0]  # one entry for the only input range
    filtered_counts = [0]
    documents = [*folder._read_documents(folder.plan.units[0], line_counts, filtered_counts, rejected_documents)]
    assert len(documents) == 1
    assert filtered_counts == [50]
    assert rejected_documents == []


def test_a_filter_that_changes_between_tasks_is_used_only_after_prepare_runs_again(
    tmp_path: Path, small_units: None
) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", make_documents(120)))
    data = make_config_with_filter(tmp_path, source, "def keep(document):\n    return len(document['text']) % 2 == 0\n")
    run_prepare(data, tmp_path / "data", discard_log)
    run_shard_task(data, tmp_path / "data", 0, 2, discard_log)
    make_config_with_filter(tmp_path, source, "def keep(document):\n    return len(document['text']) % 2 == 1\n")
    run_shard_task(data, tmp_path / "data", 1, 2, discard_log)  # uses the copy, like the other task
    assert TextFolder(data, tmp_path / "data").finalize(discard_log)
    expected = [text for text in make_documents(120) if len(text) % 2 == 0]
    check_shards(data, tmp_path / "data", load_manifest(tmp_path / "data"), expected)
    (tmp_path / "data/manifest.json").unlink()
    manifest = build_shards(data, tmp_path / "data")
    check_shards(data, tmp_path / "data", manifest, [text for text in make_documents(120) if len(text) % 2 == 1])


@pytest.mark.parametrize(
    ("code", "error_code", "expected_texts"),
    [
        (
            "def keep(document):\n    return document['no']\n",
            "data.filter_failed",
            ["a.jsonl", "record 1", "KeyError: 'no'"],
        ),
        ("def keep(document):\n    print\n", "data.filter_failed", ["a.jsonl", "record 1", "None"]),
        ("def keep(document):\n    return 1.0\n", "data.filter_failed", ["a.jsonl", "record 1", "1.0"]),
        (
            "import numpy\ndef keep(document):\n    return numpy.ones(2, bool)\n",
            "data.filter_failed",
            ["record 1", "array([ True, True])"],
        ),
        ("def other(document): ...\n", "data.invalid_filter", ["quality.py", "'keep'"]),
        ("def keep(:\n", "data.invalid_filter", ["quality.py", "line 1"]),
        ("import no_such_module\ndef keep(document): ...\n", "data.invalid_filter", ["ModuleNotFoundError"]),
        ("def keep(document):\n    return False\n", "data.no_documents", ["quality:keep"]),
    ],
)
def test_an_invalid_or_failing_filter_is_an_error_that_says_why(
    tmp_path: Path, code: str, error_code: str, expected_texts: list[str]
) -> None:
    data = make_config_with_filter(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", make_documents(9))), code)
    with raises_error(error_code, *expected_texts):
        build_shards(data, tmp_path / "data")


def test_a_filter_may_define_dataclasses_and_return_a_numpy_bool(tmp_path: Path) -> None:
    code = (
        "from __future__ import annotations\nimport dataclasses, numpy\n"
        "@dataclasses.dataclass\nclass Rule:\n    limit: int\n"
        "def keep(document):\n    return numpy.array([len(document['text'])])[0] < Rule(12).limit\n"
    )
    data = make_config_with_filter(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", ["a" * 11, "b" * 12])), code)
    assert build_shards(data, tmp_path / "data").documents == 1


def test_a_filter_with_changing_results_is_rejected(tmp_path: Path) -> None:
    code = "calls = []\ndef keep(document):\n    calls.append(1)\n    return len(calls) % 3 > 0\n"
    data = make_config_with_filter(
        tmp_path, str(write_jsonl(tmp_path / "a.jsonl", make_documents(50))), code, deduplicate=True
    )
    with raises_error("data.filter_not_repeatable", "data.filter"):
        build_shards(data, tmp_path / "data")


def test_a_missing_filter_is_an_error_before_the_stages_start(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    data = load_config(path, ["data.filter=quality:keep"]).data
    data_with_path = load_config(path, [f"data.filter={tmp_path}/quality.py:keep"]).data
    assert data.filter is not None and data.filter.endswith("/quality:keep"), "the path is not relative to the config"
    with raises_error("data.no_filter", "data.filter", "quality.py"):
        TextFolder(data_with_path, tmp_path / "data").check_inputs()
    (tmp_path / "quality.py").write_text(FILTER_CODE)
    TextFolder(data_with_path, tmp_path / "data").check_inputs()


@pytest.mark.parametrize("ending", ["hashes", "twice"])
@pytest.mark.parametrize("damage", [lambda old: b"", lambda old: old[:-8], lambda old: bytes(len(old))])
def test_files_of_hashes_that_a_crash_damaged_are_written_again(
    tmp_path: Path, ending: str, damage: Callable[[bytes], bytes]
) -> None:
    units = [[b"a", b"b", b"a"], [b"b", b"c", b"d"]]
    keys = [f"{number:064d}" for number in range(len(units))]
    first_task = Duplicates(tmp_path, keys, units.__getitem__, task=0, tasks=1)
    expected = [list(first_task.find_first_occurrences(unit)) for unit in range(2)]
    assert expected == [[True, True, False], [False, True, True]]
    for path in tmp_path.glob(f"*.{ending}"):
        intact = path.read_bytes()
        path.write_bytes(damage(intact))
        next_task = Duplicates(tmp_path, keys, units.__getitem__, task=0, tasks=1)
        assert [list(next_task.find_first_occurrences(unit)) for unit in range(2)] == expected
        assert path.read_bytes() == intact


def test_files_of_hashes_are_synced_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced_sizes: list[int] = []
    real_fsync = os.fsync

    def record_size_and_sync(fd: int) -> None:
        synced_sizes.append(os.fstat(fd).st_size)
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", record_size_and_sync)
    Duplicates(tmp_path, [f"{0:064d}"], lambda unit: [b"a", b"a"], task=0, tasks=1).find_first_occurrences(0)
    assert {path.stat().st_size for path in tmp_path.iterdir()} <= set(synced_sizes)


def test_tasks_search_for_duplicates_in_different_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = [[f"{unit} {number}".encode() for number in range(8)] for unit in range(4)]
    keys = [f"{number:064d}" for number in range(len(units))]
    for range_hashes, ranges in ((2, 16), (100, 4)):  # with few documents, there are as many ranges as tasks
        monkeypatch.setattr(duplicates, "_MAX_RANGE_HASHES", range_hashes)
        orders = []
        for task in range(4):
            order: list[int] = []

            def record_range(self: Duplicates, path: Path, low: int, high: int, order: list[int] = order) -> None:
                order.append(int(path.name.split("-")[2]))  # the name is unit-KEY-RANGE-of-RANGES.twice

            monkeypatch.setattr(Duplicates, "_find_duplicates", record_range)
            _ = Duplicates(tmp_path, keys, units.__getitem__, task, 4)._duplicate_files
            orders.append(order)
        assert all(sorted(order) == list(range(ranges)) for order in orders), "a task did not complete all ranges"
        ranges_per_task = ranges // 4
        assert [number for order in orders for number in order[:ranges_per_task]] == list(range(ranges))
        # tasks that finish their own ranges early continue with the other ranges in different orders
        assert len({tuple(order[ranges_per_task:]) for order in orders}) == 4
