"""Tests of checkpoints: saving and loading on any number of ranks, digests, crashes during a save, damaged files."""

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
from pipeline.checkpoint import catalog
from tests.support.ranks import Ranks, run_ranks


def make_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights and optimizer state. The same seed gives the same tensors."""
    generator = torch.Generator().manual_seed(seed)
    state = {f"model.layer{i}.weight": torch.randn(17, 5 + i, generator=generator) for i in range(6)}
    state |= {f"optimizer.layer{i}.weight.exp_avg": torch.randn(17, 5 + i, generator=generator) for i in range(6)}
    state["optimizer.layer0.weight.step"] = torch.tensor(7.0)
    state["model.half"] = torch.randn(9, generator=generator).to(torch.bfloat16)
    return state


def make_empty_state() -> dict[str, torch.Tensor]:
    """Return zero tensors with the names and shapes of `make_state`."""
    return {name: torch.zeros_like(tensor) for name, tensor in make_state().items()}


def has_same_tensors(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Return True if `state` contains all tensors of `expected`."""
    return all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def make_checkpointer(rank_info: RankInfo, folder: Path, background: bool = False, keep: int = 3) -> Any:
    """Join the process group, if this rank has not joined yet, and return a checkpointer for this rank."""
    import torch.distributed as dist

    from pipeline.checkpoint.checkpointer import Checkpointer

    if not dist.is_initialized():
        store = dist.TCPStore("127.0.0.1", rank_info.master_port, rank_info.world_size, is_master=rank_info.rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank_info.rank, world_size=rank_info.world_size)
    group = dist.new_group(backend="gloo")
    return Checkpointer(
        folder, group, keep=keep, background=background, manifest_entries={"layout": {}}, on_saved=lambda *_: None
    )


def save_on_rank(rank_info: RankInfo, folder: Path, background: bool) -> str:
    """Save step 5 on this rank and return the digest of the checkpoint."""
    from pipeline.checkpoint.checkpointer import compute_digest

    checkpointer = make_checkpointer(rank_info, folder, background)
    checkpointer.save(make_state(), step=5, samples_consumed=40, extra={})
    checkpointer.wait_until_saved()
    return compute_digest(folder / catalog.checkpoint_name(5))


def load_on_rank(rank_info: RankInfo, folder: Path) -> bool:
    """Restore step 5 on this rank, and return True if the state equals the saved state."""
    state = make_empty_state()
    manifest = make_checkpointer(rank_info, folder).restore(state, lambda step, reason: None)
    assert manifest is not None and manifest["step"] == 5 and manifest["samples_consumed"] == 40
    return has_same_tensors(state, make_state())


def test_checkpoint_can_be_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    digests = set()
    for size, background in ((1, False), (2, True), (4, False), (4, True)):
        folder = tmp_path / f"{size}-{background}"
        folder.mkdir()
        digests |= set(run_ranks(size, save_on_rank, folder, background))
        for other_size in (1, 3):
            assert all(run_ranks(other_size, load_on_rank, folder))
    assert len(digests) == 1


def compute_changed_digest(rank_info: RankInfo, folder: Path, change: str | None) -> str:
    """Save a state with one change, and return the digest of the checkpoint. If `change` is None, change nothing."""
    from pipeline.checkpoint.checkpointer import compute_digest

    state = make_state()
    if change == "value":
        state["model.layer3.weight"][2, 2] += 1e-6
    elif change == "optimizer":
        state["optimizer.layer1.weight.exp_avg"][0, 0] += 1e-6
    elif change == "average":
        state["ema.layer1.weight"] = torch.ones(3)
    elif change == "name":
        state["model.other"] = state.pop("model.half")
    elif change == "replica":
        state["residual.layer0"] = torch.ones(3)  # each replica may have other values of such state
    checkpointer = make_checkpointer(rank_info, folder)
    checkpointer.save(state, step=1, samples_consumed=0, extra={})
    return compute_digest(folder / catalog.checkpoint_name(1))


def test_digest_depends_only_on_weights_optimizer_state_and_names(tmp_path: Path) -> None:
    digests = {}
    for change in (None, "value", "optimizer", "average", "name", "replica"):
        folder = tmp_path / str(change)
        folder.mkdir()
        digests[change] = run_ranks(1, compute_changed_digest, folder, change)[0]
    assert digests["replica"] == digests[None]
    assert len({digests[change] for change in (None, "value", "optimizer", "average", "name")}) == 5


def change_weights_after_staging(rank_info: RankInfo, folder: Path) -> bool:
    """Save three steps, and overwrite the tensors of each step as soon as they are staged (copied to host memory).

    Return True if the newest checkpoint is that of step 3 and contains the tensors as they were before they were
    overwritten.
    """
    checkpointer = make_checkpointer(rank_info, folder, background=True)
    for step in (1, 2, 3):
        state = make_state(step)
        checkpointer.save(state, step=step, samples_consumed=step, extra={})
        checkpointer.wait_until_staged()
        for tensor in state.values():
            tensor.fill_(-1)
    checkpointer.close()
    state = make_empty_state()
    manifest = make_checkpointer(rank_info, folder).restore(state, lambda step, reason: None)
    return manifest["step"] == 3 and has_same_tensors(state, make_state(3))


def test_background_save_contains_the_weights_at_the_call_of_save(tmp_path: Path) -> None:
    assert all(run_ranks(2, change_weights_after_staging, tmp_path))


def inspect_background_save(rank_info: RankInfo, folder: Path) -> tuple[int, bool]:
    """Save in the background, and delete the state after it was staged.

    Returns:
        `per_thread_copy_ahead` of the DCP writer, and True if a tensor of the state still exists during the write.
    """
    from pipeline.checkpoint import writer as writer_module

    checkpointer = make_checkpointer(rank_info, folder, background=True)
    is_inspected = threading.Event()
    copy_ahead: list[int] = []
    dcp_save = writer_module.dcp.save

    def delayed_dcp_save(state: Any, *, storage_writer: Any, **options: Any) -> Any:
        copy_ahead.append(storage_writer.per_thread_copy_ahead)
        assert is_inspected.wait(240)
        return dcp_save(state, storage_writer=storage_writer, **options)

    writer_module.dcp.save = delayed_dcp_save
    state = make_state()
    references = [weakref.ref(tensor) for tensor in state.values()]
    checkpointer.save(state, step=1, samples_consumed=1, extra={})
    checkpointer.wait_until_staged()
    del state
    exists = any(reference() is not None for reference in references)
    is_inspected.set()
    checkpointer.close()
    return copy_ahead[0], exists


def test_background_write_frees_the_state_and_does_not_wait_for_a_gpu(tmp_path: Path) -> None:
    """If `per_thread_copy_ahead` were positive, the writer would wait for a GPU.

    The state must be freed before the write. With Local SGD, each save creates new tensors (the means over the
    replicas), which would need additional memory during the write.
    """
    assert run_ranks(1, inspect_background_save, tmp_path) == [(0, False)]


def save_five_checkpoints(rank_info: RankInfo, folder: Path) -> None:
    """Save steps 1 to 5 with a checkpointer that keeps two checkpoints."""
    checkpointer = make_checkpointer(rank_info, folder, keep=2)
    for step in range(1, 6):
        checkpointer.save(make_state(step), step=step, samples_consumed=step, extra={})


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    run_ranks(2, save_five_checkpoints, tmp_path)
    assert catalog.list_checkpoint_steps(tmp_path) == [5, 4]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [catalog.checkpoint_name(4), catalog.checkpoint_name(5)]


def hang_in_second_save(rank_info: RankInfo, folder: Path, phase: str) -> None:
    """Save step 1. Then save step 2, and hang in a phase of this save. The test kills the rank in this phase."""
    import torch.distributed.checkpoint as dcp

    from pipeline.checkpoint import writer as writer_module

    checkpointer = make_checkpointer(rank_info, folder)
    checkpointer.save(make_state(1), step=1, samples_consumed=1, extra={})

    def hang(*_: Any, **__: Any) -> None:
        (folder / f"reached-{rank_info.rank}").touch()
        time.sleep(60)

    class HangingWriter(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            super().write_data(plan, planner)
            hang()

    if phase == "writing":
        writer_module.dcp.FileSystemWriter = HangingWriter  # type: ignore
    elif phase == "hashing":
        writer_module._hash_files_of_rank = hang  # type: ignore
    elif phase == "manifest":
        writer_module.write_json = hang
    elif phase == "rename":
        writer_module.os.rename = hang
    elif phase == "after rename":
        checkpointer.on_saved = hang
    checkpointer.save(make_state(2), step=2, samples_consumed=2, extra={})


@pytest.mark.parametrize("phase", ["writing", "hashing", "manifest", "rename", "after rename"])
def test_ranks_killed_in_any_phase_of_a_save_leave_an_intact_checkpoint(tmp_path: Path, phase: str) -> None:
    """The ranks hang in the phase, and the test kills them there. After the rename, the second checkpoint counts."""
    ranks = Ranks(2, hang_in_second_save, tmp_path, phase)
    deadline = time.monotonic() + 240
    while not (tmp_path / "reached-0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for process in ranks.processes:  # after the rename, rank 1 may already have exited
        process.kill()
    ranks.wait_for_results(failures_expected=True)
    assert catalog.list_checkpoint_steps(tmp_path) == ([2, 1] if phase == "after rename" else [1])
    assert run_ranks(2, restore_newest, tmp_path) == [2 if phase == "after rename" else 1] * 2
    assert not list(tmp_path.glob(".tmp-*")), "a restore must remove incomplete checkpoints"


def restore_newest(rank_info: RankInfo, folder: Path) -> int:
    """Restore the newest checkpoint on this rank, check its tensors, and return its step."""
    state = make_empty_state()
    manifest = make_checkpointer(rank_info, folder).restore(state, lambda step, reason: None)
    assert has_same_tensors(state, make_state(manifest["step"]))
    return int(manifest["step"])


@pytest.fixture(scope="module")
def saved_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a checkpoint of step 5 that two ranks saved."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_on_rank, folder, False)
    return folder / catalog.checkpoint_name(5)


def copy_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint of step 5 to the checkpoints directory `folder`. Return the path of the copy."""
    return Path(shutil.copytree(checkpoint, folder / catalog.checkpoint_name(5)))


@settings(max_examples=40, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file_index=st.integers(0, 3))
def test_verification_detects_any_flipped_bit(
    saved_checkpoint: Path, position: float, bit: int, file_index: int
) -> None:
    """`position` is the relative position of the damaged byte in the file."""
    file = sorted(path for path in saved_checkpoint.iterdir() if path.is_file())[file_index]
    original = file.read_bytes()
    data = bytearray(original)
    data[int(len(data) * position)] ^= 1 << bit
    file.write_bytes(data)
    try:
        with pytest.raises(CheckpointError) as raised:
            catalog.verify_checkpoint_files(saved_checkpoint, catalog.read_checkpoint_manifest(saved_checkpoint))
        assert file.name in str(raised.value)
    finally:
        file.write_bytes(original)
    catalog.verify_checkpoint_files(saved_checkpoint, catalog.read_checkpoint_manifest(saved_checkpoint))


def test_find_newest_step_ignores_a_checkpoint_with_a_missing_file(saved_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(saved_checkpoint, tmp_path)
    assert catalog.find_newest_step(tmp_path) == 5
    name = next(iter(json.loads((saved_checkpoint / "manifest.json").read_text())["files"]))
    (checkpoint / name).unlink()
    assert catalog.find_newest_step(tmp_path) == 0


class ExecutingPickle:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def forge_checkpoint(saved_checkpoint: Path, folder: Path, *, is_listed: bool) -> Path:
    """Copy a checkpoint, and replace its `.metadata` by a pickle that executes a command when it is loaded.

    The command creates the file `executed` in `folder`. If `is_listed`, the manifest lists the new `.metadata` with its
    size and hash. Otherwise, the manifest does not list it. Return the path of the copy.
    """
    checkpoint = copy_checkpoint(saved_checkpoint, folder)
    metadata = checkpoint / ".metadata"
    metadata.write_bytes(pickle.dumps(ExecutingPickle(folder / "executed")))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    entry = {"size": metadata.stat().st_size, "sha256": sha256_file(metadata)}
    del manifest["files"][".metadata"]
    if is_listed:
        manifest["files"][".metadata"] = entry
    (checkpoint / "manifest.json").write_text(json.dumps(add_checksum(manifest)))
    return checkpoint


def read_with_each_function(rank_info: RankInfo, checkpoint: Path) -> list[str]:
    """Read a checkpoint with each function that reads checkpoints. Return each error message; "read" for a success."""
    from pipeline.checkpoint.checkpointer import compute_digest, load_checkpoint, load_verified_manifest

    checkpointer = make_checkpointer(rank_info, checkpoint.parent)
    messages = []
    for read, *arguments in (
        (load_checkpoint, make_state(), checkpoint, checkpointer.group),
        (load_checkpoint, make_state(), checkpoint, None),
        (compute_digest, checkpoint),
        (checkpointer.restore, make_state(), lambda *_: None),
    ):
        try:
            load_verified_manifest(checkpoint, checkpointer.group)
            read(*arguments)
            messages.append("read")
        except CheckpointError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("ranks", [1, 2])
def test_metadata_pickle_that_executes_a_command_is_rejected(
    saved_checkpoint: Path, tmp_path: Path, ranks: int
) -> None:
    checkpoint = forge_checkpoint(saved_checkpoint, tmp_path, is_listed=True)
    for messages in run_ranks(ranks, read_with_each_function, checkpoint):
        assert all(f"{checkpoint}/.metadata " in message for message in messages), messages
        assert all("posix.system" in message for message in messages), messages
    assert not (tmp_path / "executed").exists()
    assert checkpoint.is_dir(), "the checkpoint must not be set aside, because the run would continue from an older one"


def test_manifest_that_does_not_list_the_metadata_is_rejected(saved_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = forge_checkpoint(saved_checkpoint, tmp_path, is_listed=False)
    assert catalog.find_newest_step(tmp_path) == 0
    message = run_ranks(1, read_with_each_function, checkpoint)[0][0]
    assert f"{checkpoint}/manifest.json " in message and ".metadata" in message
    assert not (tmp_path / "executed").exists()


MALFORMED_ENTRIES: dict[str, Any] = {
    "file is a number": {"files": {".metadata": 5}},
    "file without size and hash": {"files": {".metadata": {}}},
    "files is a number": {"files": 3},
    "layout is null": {"layout": None},
    "layout is a number": {"layout": 3},
    "samples_consumed is a string": {"samples_consumed": "8"},
}
"""Entries that replace entries of a manifest, by a description of the mistake."""


@pytest.mark.parametrize("case", MALFORMED_ENTRIES)
def test_malformed_manifest_with_a_valid_checksum_is_rejected(
    saved_checkpoint: Path, tmp_path: Path, case: str
) -> None:
    checkpoint = copy_checkpoint(saved_checkpoint, tmp_path)
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | MALFORMED_ENTRIES[case]
    (checkpoint / "manifest.json").write_text(json.dumps(add_checksum(manifest)))
    assert catalog.find_newest_step(tmp_path) == 0
    with pytest.raises(CheckpointError) as raised:
        catalog.verify_checkpoint_files(checkpoint, catalog.read_checkpoint_manifest(checkpoint))
    assert raised.value.code == "checkpoint.malformed" and f"{checkpoint}/manifest.json" in str(raised.value)


def test_verification_rejects_a_pipe_without_waiting_for_it(saved_checkpoint: Path, tmp_path: Path) -> None:
    """Opening a named pipe would block until another process writes to it."""
    checkpoint = copy_checkpoint(saved_checkpoint, tmp_path)
    os.mkfifo(checkpoint / "x")
    manifest = catalog.read_checkpoint_manifest(checkpoint)
    manifest["files"]["x"] = {"size": 0, "sha256": ""}
    with pytest.raises(CheckpointError) as raised:
        catalog.verify_checkpoint_files(checkpoint, manifest)
    assert raised.value.code == "checkpoint.damaged_file" and str(checkpoint / "x") in str(raised.value)


def test_verification_rejects_unlisted_files_and_paths_to_other_directories(
    saved_checkpoint: Path, tmp_path: Path
) -> None:
    """An additional file could be a part of another checkpoint, and a path with `..` leaves the directory."""
    checkpoint = copy_checkpoint(saved_checkpoint, tmp_path)
    manifest = catalog.read_checkpoint_manifest(checkpoint)
    catalog.verify_checkpoint_files(checkpoint, manifest)
    (checkpoint / "__0.metadata").touch()
    with pytest.raises(CheckpointError) as raised:
        catalog.verify_checkpoint_files(checkpoint, manifest)
    assert raised.value.code == "checkpoint.unlisted_file" and "__0.metadata" in str(raised.value)
    (checkpoint / "__0.metadata").rename(tmp_path / "outside")
    manifest["files"]["../outside"] = {"size": 0, "sha256": sha256_file(tmp_path / "outside")}
    with pytest.raises(CheckpointError) as raised:
        catalog.verify_checkpoint_files(checkpoint, manifest)
    assert raised.value.code == "checkpoint.missing_file" and "../outside" in str(raised.value)


def test_metadata_that_refers_to_a_file_outside_of_the_checkpoint_is_rejected(
    saved_checkpoint: Path, tmp_path: Path
) -> None:
    """The metadata of DCP contains the path of the file of each tensor."""
    from torch.distributed.checkpoint import FileSystemReader

    from pipeline.checkpoint.checkpointer import CheckpointReader

    metadata = FileSystemReader(saved_checkpoint).read_metadata()
    assert CheckpointReader(saved_checkpoint).read_metadata().state_dict_metadata == metadata.state_dict_metadata
    next(iter(metadata.storage_data.values())).relative_path = "../__0_0.distcp"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as raised:
        CheckpointReader(tmp_path).read_metadata()
    assert raised.value.code == "checkpoint.unsafe_metadata" and "../__0_0.distcp" in str(raised.value)
