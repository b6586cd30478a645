"""Damage and refusals: each ends in an error that names the thing, and nothing is lost.

The rank's own code runs in forked ranks; a full disk is a small tmpfs, which needs root.
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
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny import compute_run_digest, make_run, stage_rank, write_config
from tests.train.test_exact import STEPS, interrupted, lines, new_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[str, list[Any]]:
    """Digest and metrics of a run that nothing disturbed."""
    run = new_run(tmp_path_factory.mktemp("calm"), "calm", data)
    assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
    return compute_run_digest(run), lines(run)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    """A run that was stopped in its middle."""
    run = new_run(tmp_path_factory.mktemp("stopped"), "stopped", data)
    interrupted(run, 2, signal.SIGTERM, 25, [0])
    return run


def door_rank(rank_info: Any, path: Path, stage: str) -> tuple[int, str]:
    """The rank's door with its errors explained, inside a forked rank: exit code and message."""
    from pipeline.__main__ import explain_error, write_error_report

    run = Run.open(path)
    try:
        return stage_rank(rank_info, path, stage), ""
    except BaseException as error:
        code, message = explain_error(error)
        write_error_report(run, stage, rank_info, code, message)
        return int(code), message


def flip_bit(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    path.write_bytes(data)


def own_data(folder: Path, data: Path, name: str, *more: str) -> Run:
    """A run with a copy of the data that a test may damage."""
    run = make_run(folder, name, (f"train.steps={STEPS}", *more), data)
    run.data_dir.unlink()
    shutil.copytree(data, run.data_dir)
    return run


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_shard_is_named_set_aside_and_written_again(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path, "tiny", ("train.steps=3",))  # the same config as when it was sharded: units can be redone
    shard = sorted((run.data_dir / "shards").glob("*train*.h5"))[0]
    whole = shard.read_bytes()
    if damage == "truncated":
        os.truncate(shard, len(whole) // 2)
    elif damage == "flipped":
        flip_bit(shard)
    else:
        shard.unlink()
    for code, message in run_ranks(2, door_rank, run.path, "train"):
        assert code == ExitCode.BAD_INPUT
        assert shard.name in message and "Traceback" not in message and "resume" in message
    from pipeline.run.stages import load_stage_module

    assert load_stage_module("shard").missing_outputs(run) is not None
    assert run_ranks(2, stage_rank, run.path, "shard") == [ExitCode.DONE, ExitCode.DONE]
    assert shard.read_bytes() == whole
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE, ExitCode.DONE]


@pytest.mark.parametrize(
    "damage",
    ["flipped", "metadata", *(pytest.param(n, marks=pytest.mark.story) for n in ("truncated", "missing", "manifest"))],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(
    tmp_path: Path, stopped: Run, calm: tuple[str, list[Any]], damage: str
) -> None:
    run = Run(shutil.copytree(stopped.path, tmp_path / "damaged", symlinks=True))
    newest, before = list_checkpoint_steps(run.checkpoints_dir)[:2]
    folder = run.checkpoints_dir / checkpoint_name(newest)
    victim = {"manifest": folder / "manifest.json", "metadata": folder / ".metadata"}.get(
        damage, folder / "__1_0.distcp"
    )
    if damage == "truncated":
        os.truncate(victim, 100)
    elif damage == "missing":
        victim.unlink()
    else:
        flip_bit(victim)
    assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
    events = run.read_events("train")
    assert [e["step"] for e in events if e["event"] == "damaged"] == [newest]
    assert victim.name in next(e["reason"] for e in events if e["event"] == "damaged")
    assert [e["step"] for e in events if e["event"] == "restored"] == [before]
    assert (run.checkpoints_dir / f"damaged-{checkpoint_name(newest)}").is_dir(), "set aside, not removed"
    assert (compute_run_digest(run), lines(run)) == calm


def test_no_intact_checkpoint_is_an_error_not_a_start_from_zero(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "lost", data)
    interrupted(run, 2, signal.SIGTERM, 10, [0])
    for step in list_checkpoint_steps(run.checkpoints_dir):
        flip_bit(run.checkpoints_dir / checkpoint_name(step) / "__0_0.distcp")
    before = lines(run)
    for _attempt in range(2):  # the second one finds no step-… at all, and must not take that for a fresh start
        for code, message in run_ranks(2, door_rank, run.path, "train"):
            assert code == ExitCode.BAD_CHECKPOINT and "error[checkpoint." in message and "Traceback" not in message
        assert lines(run) == before


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.story), "async"])
def test_a_full_disk_is_named_and_the_checkpoints_before_it_stay(
    tmp_path: Path, data: Path, small_disk: Path, calm: tuple[str, list[Any]], mode: str
) -> None:
    options = (f"checkpoint.mode={mode}", "checkpoint.keep=2", "recovery.preflight=false")
    run = new_run(tmp_path, "full", data, f"run.root={small_disk}", *options)
    interrupted(run, 2, signal.SIGTERM, 10, [0])
    saved = find_newest_step(run.checkpoints_dir)
    filler = small_disk / "filler"
    with open(filler, "wb") as file, pytest.raises(OSError):
        while True:
            os.write(file.fileno(), b"x" * 65536)
    os.truncate(filler, filler.stat().st_size - 65536)
    answers = run_ranks(2, door_rank, run.path, "train")
    assert {code for code, _ in answers} <= {ExitCode.STORAGE, ExitCode.PEER_LOST}, answers
    message = next(message for code, message in answers if code == ExitCode.STORAGE)
    assert "no space" in message and str(small_disk) in message and "Traceback" not in message
    assert find_newest_step(run.checkpoints_dir) == saved
    filler.unlink()
    assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
    assert (compute_run_digest(run), lines(run)) == calm


def test_a_read_only_run_is_named(tmp_path: Path, data: Path, small_disk: Path) -> None:
    run = new_run(tmp_path, "frozen", data, f"run.root={small_disk}")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=10)
    code, message = run_ranks(1, door_rank, run.path, "train")[0]
    assert code == ExitCode.STORAGE and "read-only" in message and "Traceback" not in message
    done = submit(["resume", str(run.path)])
    assert done.returncode == ExitCode.STORAGE and "read-only" in done.stderr and "Traceback" not in done.stderr


def submit(arguments: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd)


def test_a_disk_too_small_for_a_run_is_named_and_nothing_stays_on_it(tmp_path: Path, small_disk: Path) -> None:
    config = write_config(tmp_path)
    filler = small_disk / "filler"
    with open(filler, "wb") as file, pytest.raises(OSError):
        while True:
            os.write(file.fileno(), b"x" * 65536)
    os.truncate(filler, filler.stat().st_size - 300_000)  # a part of the code has room
    before = shutil.disk_usage(small_disk).free
    (left := small_disk / "tiny" / ".code.123.tmp").mkdir(parents=True)
    (left / "half").write_bytes(bytes(1000))
    done = submit([str(config), f"run.root={small_disk}"])
    assert done.returncode == ExitCode.STORAGE and "Traceback" not in done.stderr, done.stderr
    assert "no space" in done.stderr and str(small_disk) in done.stderr
    assert not list((small_disk / "tiny").glob(".code*")) and shutil.disk_usage(small_disk).free == before
    filler.unlink()
    run = Run.create(load_config(config, [f"run.root={small_disk}"]))
    assert (run.code_dir / "submit.py").exists()


def test_a_bug_while_a_refusal_is_handled_stays_a_bug() -> None:
    def raised(error: Exception, named: bool) -> Exception:
        try:
            try:
                raise PermissionError(errno.EACCES, "Permission denied", "some/file")
            except OSError as refusal:
                raise error from (refusal if named else None)
        except type(error) as found:
            return found

    assert find_storage_error(raised(KeyError("a bug"), named=False)) is None
    for found in (
        raised(RuntimeError(), named=True),
        raised(RuntimeError("[enforce fail at inline_container.cc]"), False),
    ):
        assert "cannot use some/file: permission denied" in str(find_storage_error(found))


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (errno.ESHUTDOWN, "runs/a", ExitCode.BAD_NODE),  # as of a Lustre client that was evicted
        (errno.EIO, None, ExitCode.BAD_NODE),
        (errno.ENOTCONN, None, ExitCode.CRASHED),  # a socket's
        (errno.ENOSPC, "runs/a", ExitCode.STORAGE),
    ],
)
def test_a_node_that_lost_its_file_system_is_a_bad_node(number: int, name: str | None, code: ExitCode) -> None:
    found, message = explain_error(OSError(number, os.strerror(number), name))
    assert found == code and (name is None or name in message)


def test_a_typo_in_the_config_is_one_message(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace("global_batch", "global_bach"))
    done = submit([str(path)])
    assert done.returncode == ExitCode.USER_ERROR and "Traceback" not in done.stderr
    for word in (path.name, "train.global_bach", "global_batch"):
        assert word in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "corpus.jsonl").unlink()
    done = submit([str(path)])
    assert done.returncode == ExitCode.USER_ERROR, done.stdout + done.stderr
    assert "corpus.jsonl' matches no file" in done.stderr and "Traceback" not in done.stdout + done.stderr


def test_a_checkpoint_that_was_killed_while_written_is_never_read(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "torn", data)
    interrupted(run, 2, signal.SIGTERM, 10, [0])
    newest = list_checkpoint_steps(run.checkpoints_dir)[0]
    shutil.copytree(run.checkpoints_dir / checkpoint_name(newest), run.checkpoints_dir / ".tmp-step-00000050")
    ranks = Ranks(2, stage_rank, run.path, "train")
    assert set(ranks.results()) == {ExitCode.DONE}
    assert not list(run.checkpoints_dir.glob(".tmp-*"))
    assert max(list_checkpoint_steps(run.checkpoints_dir)) == STEPS


def test_a_diff_in_any_encoding_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "submit.py").write_bytes("# grün\n".encode("latin-1"))
    git = ["git", "-C", str(checkout), "-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True, timeout=240)
    (checkout / "submit.py").write_bytes("# rötlich\n".encode("latin-1"))
    monkeypatch.setattr("pipeline.run.code.CODE_ROOT", checkout)
    run = Run.create(load_config(write_config(tmp_path)))
    assert "# rötlich".encode("latin-1") in (run.code_dir / "DIFF").read_bytes()
    assert run.commit is not None and run.commit.endswith("+")
