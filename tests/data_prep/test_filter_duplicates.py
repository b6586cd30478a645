"""`data.deduplicate` and `data.filter`: against a plain reference, for any number of tasks, kills and late-comers."""

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
from pipeline.base.errors import UserError
from pipeline.config.datasets import DataConfig
from pipeline.config.read import load_config
from pipeline.data.manifest import load_manifest
from tests.data_prep.test_shards import (
    all_bytes,
    check_content,
    config,
    prepare,
    quiet,
    run_tasks,
    shard,
    small_units,
    texts,
    write_jsonl,
)
from tests.support.errors import raises_error
from tests.support.tiny import write_config

__all__ = ["small_units"]


def firsts(documents: list[str]) -> list[str]:
    return list(dict.fromkeys(text for text in documents if text))


@settings(deadline=None, max_examples=8)
@given(picks=st.lists(st.integers(0, 12), min_size=6, max_size=60), tasks=st.integers(1, 5), most=st.integers(1, 9))
def test_of_each_text_the_first_stays_whatever_the_tasks(
    picks: list[int], tasks: int, most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("twice")
    pool = [*texts(12), ""]
    documents = [pool[pick] for pick in picks] + ["at least", "this"]
    half = len(documents) // 2
    write_jsonl(folder / "a.jsonl", documents[:half])
    write_jsonl(folder / "b.jsonl", documents[half:])
    data = config(str(folder / "*.jsonl"), deduplicate=True, held_out=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.work_units.MIN_UNIT_BYTES", 64)
        patch.setattr(duplicates, "_MOST", most)
        patch.setattr(os, "fsync", lambda fd: None)  # slow, and no matter here
        run_tasks(data, folder / "one", 1)
        manifest = run_tasks(data, folder / "data", tasks)
    check_content(data, folder / "data", manifest, firsts(documents))
    kept = len(firsts(documents))
    assert (manifest.documents, manifest.duplicate_documents) == (kept, len([t for t in documents if t]) - kept)
    assert all_bytes(folder / "one") == all_bytes(folder / "data")


@given(
    units=st.lists(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=6), min_size=1, max_size=5),
    draw=st.data(),
)
@settings(deadline=None, max_examples=30)
def test_duplicates_against_a_set(
    units: list[list[bytes]], draw: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, seen = tmp_path_factory.mktemp("units"), set()
    wanted = [[not (text in seen or seen.add(text)) for text in unit] for unit in units]  # type: ignore[func-returns-value]
    keys = [f"{number:064d}" for number in range(len(units))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_MOST", draw.draw(st.integers(1, 5)))
        for unit in draw.draw(st.permutations(range(len(units)))):
            found = Duplicates(folder, keys, units.__getitem__, unit % 2, 2).kept(unit)
            np.testing.assert_array_equal(found, wanted[unit])


FILTER = "def keep(document):\n    return document.get('score', 9) > 3 and 'bad' not in document['text']\n"


def filtered(folder: Path, source: str, code: str = FILTER, **more: object) -> DataConfig:
    (folder / "quality.py").write_text(code)
    return config(source, filter=f"{folder}/quality:keep", held_out=0.0, **more)


def test_a_function_of_ones_own_says_what_is_taken(tmp_path: Path) -> None:
    lines = [{"text": f"document {i}", "score": i % 8} for i in range(40)] + [{"text": "a bad one"}, {"text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["of parquet", "bad"]}), tmp_path / "b.parquet")
    data = filtered(tmp_path, str(tmp_path / "[ab].*"), deduplicate=True)
    manifest = run_tasks(data, tmp_path / "data", 3)
    wanted = [f"document {i}" for i in range(40) if i % 8 > 3] + ["of parquet"]
    check_content(data, tmp_path / "data", manifest, wanted)
    assert (manifest.documents, manifest.filtered_documents, manifest.rejected_documents) == (21, 22, 0)


def test_what_a_filter_leaves_out_is_counted_not_kept(tmp_path: Path) -> None:
    data = filtered(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", ["good", *["bad"] * 50])))
    prepare(data, tmp_path / "data", quiet)
    folder = TextFolder(data, tmp_path / "data")
    rejected: list[tuple[int, int, str]] = []
    assert len([*folder._documents(folder.plan.units[0], [0], left_out := [0], rejected)]) == 1
    assert (left_out, rejected) == ([50], [])


def test_a_changed_filter_is_not_mixed_in(tmp_path: Path, small_units: None) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", texts(120)))
    data = filtered(tmp_path, source, "def keep(document):\n    return len(document['text']) % 2 == 0\n")
    prepare(data, tmp_path / "data", quiet)
    shard(data, tmp_path / "data", 0, 2, quiet)
    filtered(tmp_path, source, "def keep(document):\n    return len(document['text']) % 2 == 1\n")
    shard(data, tmp_path / "data", 1, 2, quiet)  # by the copy, as the other task
    assert TextFolder(data, tmp_path / "data").finalize(quiet)
    expected = [text for text in texts(120) if len(text) % 2 == 0]
    check_content(data, tmp_path / "data", load_manifest(tmp_path / "data"), expected)
    (tmp_path / "data/manifest.json").unlink()
    manifest = run_tasks(data, tmp_path / "data")
    check_content(data, tmp_path / "data", manifest, [text for text in texts(120) if len(text) % 2 == 1])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def keep(document):\n    return document['no']\n", r"a\.jsonl, record 1: it raised KeyError: 'no'"),
        ("def keep(document):\n    print\n", r"a\.jsonl, record 1: it returned None, neither True nor False"),
        ("def keep(document):\n    return 1.0\n", r"a\.jsonl, record 1: it returned 1\.0, neither True nor False"),
        (
            "import numpy\ndef keep(document):\n    return numpy.ones(2, bool)\n",
            r"record 1: it returned array\(\[ True, True\]\), neither True nor False",
        ),
        ("def other(document): ...\n", r"quality\.py has no function 'keep' at its top level"),
        ("def keep(:\n", r"quality\.py is no Python that can be read"),
        ("import no_such_module\ndef keep(document): ...\n", r"cannot be imported: ModuleNotFoundError"),
        ("def keep(document):\n    return False\n", r"empty or held out or left out by .*quality:keep"),
    ],
)
def test_what_is_wrong_with_a_filter_is_told(tmp_path: Path, code: str, message: str) -> None:
    data = filtered(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", texts(9))), code)
    with pytest.raises(UserError, match=message):
        run_tasks(data, tmp_path / "data")


def test_a_filter_may_have_dataclasses_and_say_it_in_numpys_words(tmp_path: Path) -> None:
    code = (
        "from __future__ import annotations\nimport dataclasses, numpy\n"
        "@dataclasses.dataclass\nclass Rule:\n    most: int\n"
        "def keep(document):\n    return numpy.array([len(document['text'])])[0] < Rule(12).most\n"
    )
    data = filtered(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", ["a" * 11, "b" * 12])), code)
    assert run_tasks(data, tmp_path / "data").documents == 1


def test_a_filter_with_changing_results_is_rejected(tmp_path: Path) -> None:
    code = "seen = []\ndef keep(document):\n    seen.append(1)\n    return len(seen) % 3 > 0\n"
    data = filtered(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", texts(50))), code, deduplicate=True)
    with raises_error("data.filter_not_repeatable", "data.filter"):
        run_tasks(data, tmp_path / "data")


def test_a_filter_is_found_beside_the_config_file_and_is_missed_before_a_run(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    data = load_config(path, ["data.filter=quality:keep"]).data
    found = load_config(path, [f"data.filter={tmp_path}/quality.py:keep"]).data
    assert data.filter is not None and data.filter.endswith("/quality:keep")
    with pytest.raises(UserError, match=r"data\.filter: there is no quality\.py in "):
        TextFolder(found, tmp_path / "data").look()
    (tmp_path / "quality.py").write_text(FILTER)
    TextFolder(found, tmp_path / "data").look()


@pytest.mark.parametrize("ending", ["hashes", "twice"])
@pytest.mark.parametrize("damage", [lambda old: b"", lambda old: old[:-8], lambda old: bytes(len(old))])
def test_hashes_that_a_crash_cut_or_emptied_count_as_missing(
    tmp_path: Path, ending: str, damage: Callable[[bytes], bytes]
) -> None:
    units = [[b"a", b"b", b"a"], [b"b", b"c", b"d"]]
    keys = [f"{number:064d}" for number in range(len(units))]
    wanted = [list(Duplicates(tmp_path, keys, units.__getitem__, 0, 1).kept(unit)) for unit in range(2)]
    assert wanted == [[True, True, False], [False, True, True]]
    for path in tmp_path.glob(f"*.{ending}"):
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        fresh = Duplicates(tmp_path, keys, units.__getitem__, 0, 1)
        assert [list(fresh.kept(unit)) for unit in range(2)] == wanted
        assert path.read_bytes() == whole


def test_hashes_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    Duplicates(tmp_path, [f"{0:064d}"], lambda unit: [b"a", b"a"], 0, 1).kept(0)
    assert {path.stat().st_size for path in tmp_path.iterdir()} <= set(synced)


def test_tasks_begin_to_find_doubles_far_from_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = [[f"{unit} {number}".encode() for number in range(8)] for unit in range(4)]
    keys = [f"{number:064d}" for number in range(len(units))]
    for most, ranges in ((2, 16), (100, 4)):  # of few documents there are as many ranges as tasks
        monkeypatch.setattr(duplicates, "_MOST", most)
        orders = []
        for task in range(4):
            found: list[str] = []
            monkeypatch.setattr(Duplicates, "_find", lambda self, path, low, high, found=found: found.append(path.name))
            _ = Duplicates(tmp_path, keys, units.__getitem__, task, 4)._ranges
            orders.append([int(name.split("-")[2]) for name in found])
        assert all(sorted(order) == list(range(ranges)) for order in orders)  # all of them in the end
        own = ranges // 4
        assert [number for order in orders for number in order[:own]] == list(range(ranges))
        assert len({tuple(order[own:]) for order in orders}) == 4, "who is done early should not do what others do"
