"""Checkpoints: layouts move, digests agree, background saves see the moment they were asked for, old ones go."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import CheckpointError
from pipeline.base.files import add_checksum, sha256_file
from pipeline.checkpoint import catalog as files
from tests.support.ranks import Ranks, run_ranks


def make_state(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    state = {f"model.layer{i}.weight": torch.randn(17, 5 + i, generator=draw) for i in range(6)}
    state |= {f"optimizer.layer{i}.weight.exp_avg": torch.randn(17, 5 + i, generator=draw) for i in range(6)}
    state["optimizer.layer0.weight.step"] = torch.tensor(7.0)
    state["model.half"] = torch.randn(9, generator=draw).to(torch.bfloat16)
    return state


def checkpointer(rank_info: RankInfo, folder: Path, background: bool = False, keep: int = 3) -> Any:
    import torch.distributed as dist

    from pipeline.checkpoint.checkpointer import Checkpointer

    if not dist.is_initialized():
        store = dist.TCPStore("127.0.0.1", rank_info.master_port, rank_info.world_size, is_master=rank_info.rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank_info.rank, world_size=rank_info.world_size)
    group = dist.new_group(backend="gloo")
    return Checkpointer(
        folder, group, keep=keep, background=background, describe={"layout": {}}, on_saved=lambda *_: None
    )


def save_rank(rank_info: RankInfo, folder: Path, background: bool) -> str:
    from pipeline.checkpoint.checkpointer import compute_digest

    saver = checkpointer(rank_info, folder, background)
    saver.save(make_state(), step=5, samples_consumed=40, extra={})
    saver.wait_until_saved()
    return compute_digest(folder / files.checkpoint_name(5))


def load_rank(rank_info: RankInfo, folder: Path) -> bool:
    state = {name: torch.zeros_like(tensor) for name, tensor in make_state().items()}
    manifest = checkpointer(rank_info, folder).restore(state, lambda step, reason: None)
    assert manifest is not None and manifest["step"] == 5 and manifest["samples_consumed"] == 40
    return all(torch.equal(state[name], tensor) for name, tensor in make_state().items())


def test_any_number_of_ranks_saves_and_loads_the_same(tmp_path: Path) -> None:
    digests = set()
    for size, background in ((1, False), (2, True), (4, False), (4, True)):
        folder = tmp_path / f"{size}-{background}"
        folder.mkdir()
        digests |= set(run_ranks(size, save_rank, folder, background))
        for other in (1, 3):
            assert all(run_ranks(other, load_rank, folder))
    assert len(digests) == 1


def digest_rank(rank_info: RankInfo, folder: Path, change: str | None) -> str:
    from pipeline.checkpoint.checkpointer import compute_digest

    state = make_state()
    if change == "value":
        state["model.layer3.weight"][2, 2] += 1e-6
    elif change == "optimizer":
        state["optimizer.layer1.weight.exp_avg"][0, 0] += 1e-6
    elif change == "name":
        state["model.other"] = state.pop("model.half")
    elif change == "beside":
        state["residual.layer0"] = torch.ones(3)  # no weight and no optimizer state: outside the digest
    saver = checkpointer(rank_info, folder)
    saver.save(state, step=1, samples_consumed=0, extra={})
    return compute_digest(folder / files.checkpoint_name(1))


def test_the_digest_covers_weights_optimizer_and_names_and_nothing_else(tmp_path: Path) -> None:
    digests = {}
    for change in (None, "value", "optimizer", "name", "beside"):
        folder = tmp_path / str(change)
        folder.mkdir()
        digests[change] = run_ranks(1, digest_rank, folder, change)[0]
    assert digests["beside"] == digests[None]
    assert len({digests[c] for c in (None, "value", "optimizer", "name")}) == 4


def background_rank(rank_info: RankInfo, folder: Path) -> bool:
    """Change the weights as soon as staging is done, long before the files are written."""
    saver = checkpointer(rank_info, folder, background=True)
    for step in (1, 2, 3):
        state = make_state(step)
        saver.save(state, step=step, samples_consumed=step, extra={})
        saver.wait_until_staged()
        for tensor in state.values():
            tensor.fill_(-1)
    saver.close()
    state = {name: torch.zeros_like(tensor) for name, tensor in make_state().items()}
    manifest = checkpointer(rank_info, folder).restore(state, lambda step, reason: None)
    return manifest["step"] == 3 and all(torch.equal(state[n], t) for n, t in make_state(3).items())


def test_a_background_save_holds_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    assert all(run_ranks(2, background_rank, tmp_path))


def writing_rank(rank_info: RankInfo, folder: Path) -> tuple[int, bool]:
    """How far the writer copies ahead, and whether what it writes keeps the state itself alive."""
    from pipeline.checkpoint import checkpointer as checkpoint

    saver, looked, ahead = checkpointer(rank_info, folder, background=True), threading.Event(), []
    save = checkpoint.dcp.save

    def late(state: Any, *, storage_writer: Any, **options: Any) -> Any:
        ahead.append(storage_writer.per_thread_copy_ahead)
        assert looked.wait(240)
        return save(state, storage_writer=storage_writer, **options)

    checkpoint.dcp.save = late
    state = make_state()
    alive = [weakref.ref(tensor) for tensor in state.values()]
    saver.save(state, step=1, samples_consumed=1, extra={})
    saver.wait_until_staged()
    del state
    kept = any(tensor() is not None for tensor in alive)
    looked.set()
    saver.close()
    return ahead[0], kept


def test_the_writer_needs_neither_a_gpu_nor_the_state(tmp_path: Path) -> None:
    """What it copies ahead, it copies on the GPU that is current; replicas' own state is replaced in each step."""
    assert run_ranks(1, writing_rank, tmp_path) == [(0, False)]


def retention_rank(rank_info: RankInfo, folder: Path) -> None:
    saver = checkpointer(rank_info, folder, keep=2)
    for step in range(1, 6):
        saver.save(make_state(step), step=step, samples_consumed=step, extra={})


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run_ranks(2, retention_rank, tmp_path)
    assert files.list_checkpoint_steps(tmp_path) == [5, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == [files.checkpoint_name(4), files.checkpoint_name(5)]


def slow_phase_rank(rank_info: RankInfo, folder: Path, phase: str) -> None:
    """Save step 1, then die inside one phase of saving step 2 (the parent kills us there)."""
    import torch.distributed.checkpoint as dcp

    from pipeline.checkpoint import checkpointer as checkpoint

    saver = checkpointer(rank_info, folder)
    saver.save(make_state(1), step=1, samples_consumed=1, extra={})

    def hang(*_: Any, **__: Any) -> None:
        (folder / f"reached-{rank_info.rank}").touch()
        time.sleep(60)

    class Half(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            super().write_data(plan, planner)
            hang()

    if phase == "writing":
        checkpoint.dcp.FileSystemWriter = Half  # type: ignore
    elif phase == "hashing":
        checkpoint._hash_files_of_rank = hang  # type: ignore
    elif phase == "manifest":
        checkpoint.write_json = hang
    elif phase == "rename":
        checkpoint.os.rename = hang
    elif phase == "after rename":
        saver.on_saved = hang
    saver.save(make_state(2), step=2, samples_consumed=2, extra={})


@pytest.mark.parametrize("phase", ["writing", "hashing", "manifest", "rename", "after rename"])
def test_killed_in_any_phase_of_a_save(tmp_path: Path, phase: str) -> None:
    ranks = Ranks(2, slow_phase_rank, tmp_path, phase)
    deadline = time.monotonic() + 240
    while not (tmp_path / "reached-0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for process in ranks.processes:  # after the rename rank 1 may be done and gone
        process.kill()
    ranks.results(failures_expected=True)
    assert files.list_checkpoint_steps(tmp_path) == ([2, 1] if phase == "after rename" else [1])
    assert run_ranks(2, newest_rank, tmp_path) == [2 if phase == "after rename" else 1] * 2
    assert not list(tmp_path.glob(".tmp-*")), "what the crash left is cleared at the next start"


def newest_rank(rank_info: RankInfo, folder: Path) -> int:
    state = {name: torch.zeros_like(tensor) for name, tensor in make_state().items()}
    manifest = checkpointer(rank_info, folder).restore(state, lambda step, reason: None)
    assert all(torch.equal(state[n], t) for n, t in make_state(manifest["step"]).items())
    return int(manifest["step"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_rank, folder, False)
    return folder / files.checkpoint_name(5)


@settings(max_examples=40, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), choice=st.integers(0, 3))
def test_any_flipped_bit_in_any_file_is_found(saved: Path, position: float, bit: int, choice: int) -> None:
    victim = sorted(p for p in saved.iterdir() if p.is_file())[choice]
    original = victim.read_bytes()
    data = bytearray(original)
    data[int(len(data) * position)] ^= 1 << bit
    victim.write_bytes(data)
    try:
        with pytest.raises(CheckpointError) as caught:
            files.verify_checkpoint_files(saved, files.read_checkpoint_manifest(saved))
        assert victim.name in str(caught.value)
    finally:
        victim.write_bytes(original)
    files.verify_checkpoint_files(saved, files.read_checkpoint_manifest(saved))


def test_the_newest_step_needs_its_files(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / files.checkpoint_name(5))
    assert files.find_newest_step(tmp_path) == 5
    name = next(iter(json.loads((saved / "manifest.json").read_text())["files"]))
    (tmp_path / files.checkpoint_name(5) / name).unlink()
    assert files.find_newest_step(tmp_path) == 0


class Malice:
    """A pickle of this leaves a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def forged(saved: Path, folder: Path, *, listed: bool) -> Path:
    """A copy of a checkpoint whose `.metadata` executes something, with a manifest that fits."""
    checkpoint = Path(shutil.copytree(saved, folder / files.checkpoint_name(5)))
    metadata = checkpoint / ".metadata"
    metadata.write_bytes(pickle.dumps(Malice(folder / "executed")))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    entry = {"size": metadata.stat().st_size, "sha256": sha256_file(metadata)}
    manifest["files"] = {name: kept for name, kept in manifest["files"].items() if name != ".metadata"}
    manifest["files"] |= {".metadata": entry} if listed else {}
    (checkpoint / "manifest.json").write_text(json.dumps(add_checksum(manifest)))
    return checkpoint


def doors_rank(rank_info: RankInfo, checkpoint: Path) -> list[str]:
    """What all that reads a checkpoint says to it, after the files were compared with the manifest."""
    from pipeline.checkpoint.checkpointer import compute_digest, load_checkpoint, load_verified_manifest

    saver = checkpointer(rank_info, checkpoint.parent)
    told = []
    for read, *arguments in (
        (load_checkpoint, make_state(), checkpoint, saver.group),
        (load_checkpoint, make_state(), checkpoint, None),
        (compute_digest, checkpoint),
        (saver.restore, make_state(), lambda *_: None),
    ):
        try:
            load_verified_manifest(checkpoint, saver.group)
            read(*arguments)
            told.append("read")
        except CheckpointError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pickle_that_executes_something_is_refused_by_name(saved: Path, tmp_path: Path, ranks: int) -> None:
    checkpoint = forged(saved, tmp_path, listed=True)
    for told in run_ranks(ranks, doors_rank, checkpoint):
        assert all(f"{checkpoint}/.metadata " in words and "not executed" in words for words in told), told
        assert all("posix.system" in words for words in told), told
    assert not (tmp_path / "executed").exists()
    assert checkpoint.is_dir(), "it stays where it is: nobody goes on from an older one in silence"


def test_a_manifest_that_does_not_list_the_pickle_is_refused(saved: Path, tmp_path: Path) -> None:
    checkpoint = forged(saved, tmp_path, listed=False)
    assert files.find_newest_step(tmp_path) == 0
    for words in run_ranks(1, doors_rank, checkpoint)[0][:1]:
        assert f"{checkpoint}/manifest.json does not list .metadata" in words
    assert not (tmp_path / "executed").exists()


SHAPES: dict[str, Any] = {
    "an entry that is none": {"files": {".metadata": 5}},
    "an entry without size and hash": {"files": {".metadata": {}}},
    "files that are none": {"files": 3},
    "no layout": {"layout": None},
    "a layout that is none": {"layout": 3},
    "samples that are none": {"samples_consumed": "8"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_manifest_of_another_shape_is_refused_though_its_hash_fits(saved: Path, tmp_path: Path, shape: str) -> None:
    checkpoint = Path(shutil.copytree(saved, tmp_path / files.checkpoint_name(5)))
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | SHAPES[shape]
    (checkpoint / "manifest.json").write_text(json.dumps(add_checksum(manifest)))
    assert files.find_newest_step(tmp_path) == 0
    with pytest.raises(CheckpointError) as caught:
        files.verify_checkpoint_files(checkpoint, files.read_checkpoint_manifest(checkpoint))
    assert caught.value.code == "checkpoint.malformed" and f"{checkpoint}/manifest.json" in str(caught.value)


def test_a_pipe_among_the_files_keeps_nobody_waiting(saved: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(saved, tmp_path / files.checkpoint_name(5)))
    os.mkfifo(checkpoint / "x")
    manifest = files.read_checkpoint_manifest(checkpoint)
    manifest["files"]["x"] = {"size": 0, "sha256": ""}
    with pytest.raises(CheckpointError) as caught:
        files.verify_checkpoint_files(checkpoint, manifest)
    assert caught.value.code == "checkpoint.damaged_file" and str(checkpoint / "x") in str(caught.value)


def test_files_beside_the_listed_ones_and_names_that_lead_elsewhere_are_refused(saved: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(saved, tmp_path / files.checkpoint_name(5)))
    manifest = files.read_checkpoint_manifest(checkpoint)
    files.verify_checkpoint_files(checkpoint, manifest)
    (checkpoint / "__0.metadata").touch()
    with pytest.raises(CheckpointError) as caught:
        files.verify_checkpoint_files(checkpoint, manifest)
    assert caught.value.code == "checkpoint.unlisted_file" and "__0.metadata" in str(caught.value)
    (checkpoint / "__0.metadata").rename(tmp_path / "outside")
    manifest["files"]["../outside"] = {"size": 0, "sha256": sha256_file(tmp_path / "outside")}
    with pytest.raises(CheckpointError) as caught:
        files.verify_checkpoint_files(checkpoint, manifest)
    assert caught.value.code == "checkpoint.missing_file" and "../outside" in str(caught.value)


def test_metadata_that_points_out_of_the_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    from pipeline.checkpoint.checkpointer import CheckpointReader

    metadata = FileSystemReader(saved).read_metadata()
    assert CheckpointReader(saved).read_metadata().state_dict_metadata == metadata.state_dict_metadata
    next(iter(metadata.storage_data.values())).relative_path = "../__0_0.distcp"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(tmp_path).read_metadata()
    assert caught.value.code == "checkpoint.unsafe_metadata" and "../__0_0.distcp" in str(caught.value)
