"""Tests that the shard stage unpacks files of samples with chunked arrays, and unpacks damaged copies again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pipeline.base.errors import ExitCode
from pipeline.data.samples import SampleDataset
from pipeline.data.verify_shards import load_run_manifest
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.model.test_user_model import VIT_CONFIG, create_prepared_run, prepare_data, train_run
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import run_stage_on_rank

LAYOUTS: dict[str, dict[str, Any]] = {
    "gzip": {"chunks": (7, 1, 16, 16), "compression": "gzip", "shuffle": True},
    "single": {"chunks": (1, 1, 16, 16), "compression": "lzf"},
    "wide": {"chunks": (50, 1, 4, 4)},
}
"""Storage layouts of the images in an HDF5 file, as options of `create_dataset`."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read arrays in blocks of about a dozen images, which have 256 bytes each."""
    monkeypatch.setattr("data_prep.samples_folder._BLOCK_BYTES", 3000)


def write_images(path: Path, **options: Any) -> None:
    """Write 50 images with these options of `create_dataset`, and contiguous labels."""
    rng = np.random.default_rng(len(path.name))  # `a.h5` and `b.h5` have the same images
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=rng.integers(0, 256, (50, 1, 16, 16), np.uint8), **options)
        file["labels"] = rng.integers(0, 8, 50, np.int32)


def make_run(folder: Path, layouts: dict[str, dict[str, Any]]) -> Run:
    """Return a prepared run whose source is a file of images for each storage layout."""
    folder.mkdir()
    for name, options in layouts.items():
        write_images(folder / f"{name}.h5", **options)
    return create_prepared_run(folder, "run", text=VIT_CONFIG)


def test_training_on_chunked_arrays_equals_training_on_contiguous_arrays(tmp_path: Path) -> None:
    contiguous_run = make_run(tmp_path / "contiguous", {name: {} for name in LAYOUTS})
    chunked_run = make_run(tmp_path / "chunked", {**LAYOUTS, "single": {}})
    contiguous_entries, chunked_entries = (load_run_manifest(run).train for run in (contiguous_run, chunked_run))
    assert [entry.is_user_file for entry in contiguous_entries] == [True] * 3
    assert [entry.file for entry in chunked_entries] == [  # the contiguous file is used in place
        "shards/unit-00000.h5", str(tmp_path / "chunked/single.h5"), "shards/unit-00002.h5",
    ]  # fmt: skip
    # The train split has 135 samples: three files of 50, of which a tenth is held out.
    contiguous_samples, chunked_samples = (
        SampleDataset(load_run_manifest(run), run.data_dir).read(np.arange(135))  # type: ignore[arg-type]
        for run in (contiguous_run, chunked_run)
    )
    assert all(np.array_equal(contiguous_samples[name], chunked_samples[name]) for name in ("images", "labels"))
    assert train_run(contiguous_run, 1) == train_run(chunked_run, 1)
    assert set(run_ranks(2, run_stage_on_rank, chunked_run.path, "evaluate")) == {ExitCode.DONE}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_a_missing_or_damaged_copy_is_unpacked_again(tmp_path: Path, layout: str) -> None:
    run = make_run(tmp_path / "run", {"a": LAYOUTS[layout], "b": LAYOUTS[layout]})
    shards = [run.data_dir / entry.file for entry in load_run_manifest(run).train]
    contents = [path.read_bytes() for path in shards]
    first_inode = shards[0].stat().st_ino
    shards[1].unlink()
    assert "unit-00001.h5" in str(load_stage_module(run, "shard").describe_missing_outputs(run))
    prepare_data(run)
    assert shards[0].stat().st_ino == first_inode, "the intact shard was written again"
    assert [path.read_bytes() for path in shards] == contents
    shards[0].write_bytes(contents[0][:-1] + b"x")
    with pytest.raises(AssertionError, match="is damaged"):
        run_ranks(1, run_stage_on_rank, run.path, "train")
    assert load_stage_module(run, "shard").describe_missing_outputs(run) is not None
    prepare_data(run)
    assert [path.read_bytes() for path in shards] == contents


def test_a_changed_file_is_unpacked_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": LAYOUTS["gzip"]})
    (run.data_dir / "manifest.json").unlink()
    write_images(tmp_path / "run/a.h5", chunks=(10, 1, 16, 16))
    assert f"{tmp_path}/run/a.h5 has changed" in str(load_stage_module(run, "prepare").describe_missing_outputs(run))
    prepare_data(run)
    with h5py.File(tmp_path / "run/a.h5") as file, h5py.File(run.data_dir / "shards/unit-00000.h5") as shard:
        assert np.array_equal(file["images"][...], shard["images"][...])


def test_a_damaged_chunk_is_an_error_with_the_file_and_leaves_no_shard(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_images(folder / "a.h5", **LAYOUTS["gzip"])
    with h5py.File(folder / "a.h5") as file:
        chunk = file["images"].id.get_chunk_info(3)
    with open(folder / "a.h5", "r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\0" * chunk.size)
    with raises_error("data.damaged_file", folder / "a.h5"):
        create_prepared_run(folder, "run", text=VIT_CONFIG)
    assert not list((folder / "runs/run/data/shards").glob("*unit-00000*"))
