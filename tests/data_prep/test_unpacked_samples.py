"""Samples in chunks: unpacked by the shard stage, trained on as those in one piece, made again where harmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pipeline.base.errors import ExitCode, UserError
from pipeline.data.samples import SampleDataset
from pipeline.data.verify_shards import load_run_manifest
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.model.test_user_model import VIT, new_run, prepared, trained
from tests.support.ranks import run_ranks
from tests.support.tiny import stage_rank

WAYS: dict[str, dict[str, Any]] = {
    "gzip": {"chunks": (7, 1, 16, 16), "compression": "gzip", "shuffle": True},
    "single": {"chunks": (1, 1, 16, 16), "compression": "lzf"},
    "wide": {"chunks": (50, 1, 4, 4)},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.samples_folder._BLOCK_BYTES", 3000)  # a dozen pictures


def write(path: Path, **options: Any) -> None:
    """50 pictures, the labels in one piece."""
    draw = np.random.default_rng(len(path.name))
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=draw.integers(0, 256, (50, 1, 16, 16), np.uint8), **options)
        file["labels"] = draw.integers(0, 8, 50, np.int32)


def make_run(folder: Path, ways: dict[str, dict[str, Any]], *more: str) -> Run:
    folder.mkdir()
    for name, options in ways.items():
        write(folder / f"{name}.h5", **options)
    return new_run(folder, "run", *more, text=VIT)


def test_a_training_on_them_is_that_on_files_in_one_piece(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", {name: {} for name in WAYS})
    packed = make_run(tmp_path / "packed", {**WAYS, "single": {}})
    first, second = (load_run_manifest(run).train for run in (plain, packed))
    assert [entry.is_user_file for entry in first] == [True] * 3
    assert [entry.file for entry in second] == [  # the one in one piece is used where it lies
        "shards/unit-00000.h5", str(tmp_path / "packed/single.h5"), "shards/unit-00002.h5",
    ]  # fmt: skip
    found = [SampleDataset(load_run_manifest(run), run.data_dir).read(np.arange(135)) for run in (plain, packed)]  # type: ignore[arg-type]
    assert all(np.array_equal(found[0][name], found[1][name]) for name in ("images", "labels"))
    assert trained(plain, 1) == trained(packed, 1)
    assert set(run_ranks(2, stage_rank, packed.path, "evaluate")) == {ExitCode.DONE}


@pytest.mark.parametrize("way", WAYS)
def test_a_harmed_one_is_made_again_and_no_other(tmp_path: Path, way: str) -> None:
    run = make_run(tmp_path / "run", {"a": WAYS[way], "b": WAYS[way]})
    shards = [run.data_dir / entry.file for entry in load_run_manifest(run).train]
    before = [(path.read_bytes(), path.stat().st_ino) for path in shards]
    shards[1].unlink()
    assert "unit-00001.h5 is missing" in str(load_stage_module("shard").missing_outputs(run))
    prepared(run)
    assert shards[0].stat().st_ino == before[0][1] and [path.read_bytes() for path in shards] == [b for b, _ in before]
    shards[0].write_bytes(before[0][0][:-1] + b"x")
    with pytest.raises(AssertionError, match="is damaged"):
        run_ranks(1, stage_rank, run.path, "train")
    assert load_stage_module("shard").missing_outputs(run) is not None
    prepared(run)
    assert [path.read_bytes() for path in shards] == [b for b, _ in before]


def test_files_that_changed_are_unpacked_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": WAYS["gzip"]})
    (run.data_dir / "manifest.json").unlink()
    write(tmp_path / "run/a.h5", chunks=(10, 1, 16, 16))
    assert "has changed since" in str(load_stage_module("prepare").missing_outputs(run))
    prepared(run)
    with h5py.File(tmp_path / "run/a.h5") as file, h5py.File(run.data_dir / "shards/unit-00000.h5") as made:
        assert np.array_equal(file["images"][...], made["images"][...])


def test_what_cannot_be_unpacked_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder / "a.h5", **WAYS["gzip"])
    with h5py.File(folder / "a.h5") as file:
        (place_of, size) = next((c.byte_offset, c.size) for c in [file["images"].id.get_chunk_info(3)])
    with open(folder / "a.h5", "r+b") as raw:
        raw.seek(place_of)
        raw.write(b"\0" * size)
    with pytest.raises(UserError, match=r"cannot read .*a\.h5"):
        new_run(folder, "run", text=VIT)
    assert not list((folder / "runs/run/data/shards").glob("*unit-00000*"))
