"""Test stages with damaged files, full disks and read-only disks. The error names the file, and no checkpoint is lost.

The stages run in forked ranks. The full disk is a small tmpfs. Only root can mount it.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import ExitCode, find_storage_error
from pipeline.checkpoint.catalog import checkpoint_name, find_newest_step, list_checkpoint_steps
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from pipeline.run.failure import explain_error
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank, write_config
from tests.train.test_exact import STEPS, create_run, interrupt_training, read_steps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a run for which the prepare and shard stages are done."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[str, list[Any]]:
    """Return the digest and the metrics of an undisturbed run."""
    run = create_run(tmp_path_factory.mktemp("reference"), "reference", data)
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    return compute_run_digest(run), read_steps(run)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    """Return a run that was stopped after 25 steps."""
    run = create_run(tmp_path_factory.mktemp("stopped"), "stopped", data)
    interrupt_training(run, 2, signal.SIGTERM, step=25, signaled_ranks=[0])
    return run


def run_stage_and_report(rank_info: Any, path: Path, stage: str) -> tuple[int, str]:
    """Run a stage in this rank. Report an error as `python -m pipeline` does. Return the exit code and the message."""
    from pipeline.__main__ import explain_error, write_error_report

    run = Run.open(path)
    try:
        return run_stage_on_rank(rank_info, path, stage), ""
    except BaseException as error:
        code, message = explain_error(error)
        write_error_report(run, stage, rank_info, code, message)
        return int(code), message


def flip_bit(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def fill_disk(filler: Path, free_bytes: int) -> None:
    """Write the file `filler` until only `free_bytes` are free on its file system."""
    with open(filler, "wb") as file, pytest.raises(OSError):
        while True:
            os.write(file.fileno(), b"x" * 65536)
    os.truncate(filler, filler.stat().st_size - free_bytes)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_shard_is_an_error_until_the_shard_stage_writes_it_again(tmp_path: Path, damage: str) -> None:
    """The damage is a truncated or missing file, or a flipped bit. The file that is written again must be identical."""
    run = make_run(tmp_path, "tiny", ("train.steps=3",))
    shard = sorted((run.data_dir / "shards").glob("*train*.h5"))[0]
    content = shard.read_bytes()
    if damage == "truncated":
        os.truncate(shard, len(content) // 2)
    elif damage == "flipped":
        flip_bit(shard)
    else:
        shard.unlink()
    for code, message in run_ranks(2, run_stage_and_report, run.path, "train"):
        assert code == ExitCode.BAD_INPUT
        assert shard.name in message and "Traceback" not in message and "resume" in message
    from pipeline.run.stages import load_stage_module

    assert load_stage_module(run, "shard").describe_missing_outputs(run) is not None
    assert run_ranks(2, run_stage_on_rank, run.path, "shard") == [ExitCode.DONE, ExitCode.DONE]
    assert shard.read_bytes() == content
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE, ExitCode.DONE]


@pytest.mark.parametrize(
    "damage",
    [
        "flipped",
        "metadata",
        *(pytest.param(damage, marks=pytest.mark.story) for damage in ("truncated", "missing", "manifest")),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_is_loaded(
    tmp_path: Path, stopped_run: Run, reference: tuple[str, list[Any]], damage: str
) -> None:
    """With `manifest` and `metadata`, a bit of this file is flipped. Otherwise, a tensor file is damaged."""
    run = Run(shutil.copytree(stopped_run.path, tmp_path / "damaged", symlinks=True))
    newest, previous = list_checkpoint_steps(run.checkpoints_dir)[:2]
    folder = run.checkpoints_dir / checkpoint_name(newest)
    file_names = {"manifest": "manifest.json", "metadata": ".metadata"}
    damaged_file = folder / file_names.get(damage, "__1_0.distcp")
    if damage == "truncated":
        os.truncate(damaged_file, 100)
    elif damage == "missing":
        damaged_file.unlink()
    else:
        flip_bit(damaged_file)
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    (event,) = read_event_lines(run, "train", "damaged")
    assert event["step"] == newest and damaged_file.name in event["reason"]
    assert [event["step"] for event in read_event_lines(run, "train", "restored")] == [previous]
    assert (run.checkpoints_dir / f"damaged-{checkpoint_name(newest)}").is_dir(), (
        "a damaged checkpoint must not be removed"
    )
    assert (compute_run_digest(run), read_steps(run)) == reference


def test_train_fails_instead_of_starting_from_scratch_if_all_checkpoints_are_damaged(
    tmp_path: Path, data: Path
) -> None:
    """Otherwise, hours of training would be lost without a notice to the user."""
    run = create_run(tmp_path, "lost", data)
    interrupt_training(run, 2, signal.SIGTERM, step=10, signaled_ranks=[0])
    for step in list_checkpoint_steps(run.checkpoints_dir):
        flip_bit(run.checkpoints_dir / checkpoint_name(step) / "__0_0.distcp")
    steps_before = read_steps(run)
    for _ in range(2):  # the second attempt finds only checkpoints that were set aside, and must also fail
        for code, message in run_ranks(2, run_stage_and_report, run.path, "train"):
            assert code == ExitCode.BAD_CHECKPOINT and "error[checkpoint." in message and "Traceback" not in message
        assert read_steps(run) == steps_before


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.story), "async"])
def test_a_full_disk_is_an_error_and_earlier_checkpoints_remain(
    tmp_path: Path, data: Path, small_disk: Path, reference: tuple[str, list[Any]], mode: str
) -> None:
    """When the disk has space again, the run completes with the result of an undisturbed run."""
    options = (f"checkpoint.mode={mode}", "checkpoint.keep=2", "recovery.preflight=false")
    run = create_run(tmp_path, "full", data, f"run.root={small_disk}", *options)
    interrupt_training(run, 2, signal.SIGTERM, step=10, signaled_ranks=[0])
    saved_step = find_newest_step(run.checkpoints_dir)
    filler = small_disk / "filler"
    fill_disk(filler, free_bytes=65536)
    results = run_ranks(2, run_stage_and_report, run.path, "train")
    assert {code for code, _ in results} <= {ExitCode.STORAGE, ExitCode.PEER_LOST}, results
    message = next(message for code, message in results if code == ExitCode.STORAGE)
    assert "no space" in message and str(small_disk) in message and "Traceback" not in message
    assert find_newest_step(run.checkpoints_dir) == saved_step
    filler.unlink()
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert (compute_run_digest(run), read_steps(run)) == reference


def test_a_read_only_run_directory_is_an_error(tmp_path: Path, data: Path, small_disk: Path) -> None:
    run = create_run(tmp_path, "frozen", data, f"run.root={small_disk}")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=10)
    code, message = run_ranks(1, run_stage_and_report, run.path, "train")[0]
    assert code == ExitCode.STORAGE and "read-only" in message and "Traceback" not in message
    result = run_submit(["resume", str(run.path)])
    assert result.returncode == ExitCode.STORAGE and "read-only" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("target", ["missing", "tiny.yaml"])
def test_a_rank_whose_log_is_on_a_full_disk_exits_with_the_code_of_its_error(tmp_path: Path, target: str) -> None:
    """Without a run directory, or with an invalid config. /dev/full refuses every write."""
    (tmp_path / "tiny.yaml").write_text("train: {stepz: 3}\n")
    command = [sys.executable, "-m", "pipeline", "train", str(tmp_path / target)]
    with open("/dev/full", "w") as log:
        result = subprocess.run(command, cwd=CODE_ROOT, stdout=log, stderr=log, timeout=120)
    assert result.returncode == ExitCode.USER_ERROR


def run_submit(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run submit.py and return its result."""
    command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_disk_without_space_for_a_run_is_an_error_and_no_file_remains(tmp_path: Path, small_disk: Path) -> None:
    """A temporary folder that a killed submit.py left in the run directory is also removed."""
    config = write_config(tmp_path)
    filler = small_disk / "filler"
    fill_disk(filler, free_bytes=300_000)  # enough for a part of the code
    free_before = shutil.disk_usage(small_disk).free
    temporary_folder = small_disk / "tiny" / ".code.123.tmp"
    temporary_folder.mkdir(parents=True)
    (temporary_folder / "file").write_bytes(bytes(1000))
    result = run_submit([str(config), f"run.root={small_disk}"])
    assert result.returncode == ExitCode.STORAGE and "Traceback" not in result.stderr, result.stderr
    assert "no space" in result.stderr and str(small_disk) in result.stderr
    assert not list((small_disk / "tiny").glob(".code*")) and shutil.disk_usage(small_disk).free == free_before
    filler.unlink()
    run = Run.create(load_config(config, [f"run.root={small_disk}"]))
    assert (run.code_dir / "submit.py").exists()


def test_an_exception_in_the_handler_of_a_storage_error_is_not_a_storage_error() -> None:
    """An exception is a storage error only if an OSError is its cause (`raise … from …`).

    The file writer of torch is the exception: after a failed write, it raises a new error without a cause. The message
    of this error contains "inline_container.cc".
    """

    def raise_after_permission_error(error: Exception, is_cause: bool) -> Exception:
        """Raise `error` while a PermissionError is handled, and return it. If `is_cause`, set the cause of `error`."""
        try:
            try:
                raise PermissionError(errno.EACCES, "Permission denied", "some/file")
            except OSError as permission_error:
                raise error from (permission_error if is_cause else None)
        except type(error) as raised:
            return raised

    assert find_storage_error(raise_after_permission_error(KeyError("a bug"), is_cause=False)) is None
    for error in (
        raise_after_permission_error(RuntimeError(), is_cause=True),
        raise_after_permission_error(RuntimeError("[enforce fail at inline_container.cc]"), is_cause=False),
    ):
        message = str(find_storage_error(error))
        assert "some/file" in message and "permission denied" in message


@pytest.mark.parametrize(
    ("error_number", "file_name", "code"),
    [
        (errno.ESHUTDOWN, "runs/a", ExitCode.BAD_NODE),  # an evicted Lustre client reports this
        (errno.EIO, None, ExitCode.BAD_NODE),
        (errno.ENOTCONN, None, ExitCode.CRASHED),  # without a file name, this is an error of a socket
        (errno.ENOSPC, "runs/a", ExitCode.STORAGE),
    ],
)
def test_an_error_of_the_file_system_client_counts_as_a_bad_node(
    error_number: int, file_name: str | None, code: ExitCode
) -> None:
    actual_code, message = explain_error(OSError(error_number, os.strerror(error_number), file_name))
    assert actual_code == code and (file_name is None or file_name in message)


def test_a_misspelled_config_key_is_an_error(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    replace_in_file(path, "global_batch", "global_bach")
    result = run_submit([str(path)])
    assert result.returncode == ExitCode.USER_ERROR and "Traceback" not in result.stderr
    for fact in (path.name, "train.global_bach", "global_batch"):
        assert fact in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_missing_data_source_is_an_error(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "corpus.jsonl").unlink()
    result = run_submit([str(path)])
    assert result.returncode == ExitCode.USER_ERROR, result.stdout + result.stderr
    assert "error[data.no_files]" in result.stderr and "corpus.jsonl" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_the_temporary_checkpoint_of_a_killed_save_is_removed(tmp_path: Path, data: Path) -> None:
    """The test copies a checkpoint to a folder with the name that the checkpointer uses during a save."""
    run = create_run(tmp_path, "torn", data)
    interrupt_training(run, 2, signal.SIGTERM, step=10, signaled_ranks=[0])
    newest = list_checkpoint_steps(run.checkpoints_dir)[0]
    shutil.copytree(run.checkpoints_dir / checkpoint_name(newest), run.checkpoints_dir / ".tmp-step-00000050")
    ranks = Ranks(2, run_stage_on_rank, run.path, "train")
    assert set(ranks.wait_for_results()) == {ExitCode.DONE}
    assert not list(run.checkpoints_dir.glob(".tmp-*"))
    assert max(list_checkpoint_steps(run.checkpoints_dir)) == STEPS


def test_the_saved_diff_keeps_its_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run saves the output of `git diff`. A tracked file is encoded in Latin-1, not in UTF-8."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "submit.py").write_bytes("# grün\n".encode("latin-1"))
    git = ["git", "-C", str(checkout), "-c", "user.name=user", "-c", "user.email=user@localhost"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True, timeout=240)
    (checkout / "submit.py").write_bytes("# rötlich\n".encode("latin-1"))
    monkeypatch.setattr("pipeline.run.code.CODE_ROOT", checkout)
    run = Run.create(load_config(write_config(tmp_path)))
    assert "# rötlich".encode("latin-1") in (run.code_dir / "DIFF").read_bytes()
    assert run.commit is not None and run.commit.endswith("+"), "`+` must mark uncommitted changes"
