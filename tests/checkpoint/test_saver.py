"""Tests of savers: checkpoints that another process writes from a buffer in memory."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing as mp
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import StorageError
from pipeline.checkpoint import writer
from pipeline.checkpoint.catalog import checkpoint_name, list_checkpoint_steps
from pipeline.checkpoint.checkpointer import Checkpointer, compute_digest
from pipeline.checkpoint.memory_snapshot import MemorySnapshots, create_buffers
from pipeline.checkpoint.saver import PREVIOUS_SAVERS_VARIABLE, Saver, run_saver, wait_for_previous_savers
from pipeline.checkpoint.writer import SaveError
from pipeline.run.directory import Run
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a run."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Run:
    """Return a run without checkpoints."""
    return make_run(tmp_path, "run", (), data)


class SavingRank:
    """A rank with a saver, as an agent forks it.

    Args:
        rank_info: the rank.
        run: the run.
        before_write: called in the saver before it writes a checkpoint, with the buffers.
        before_hash: called in the saver before it hashes the files.
        buffer_count: the number of buffers of the rank.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        run: Run,
        before_write: Callable[[Sequence[int]], object] = lambda buffers: None,
        before_hash: Callable[[], object] = lambda: None,
        buffer_count: int = 1,
    ) -> None:
        self.buffers = create_buffers(rank_info.rank, buffer_count)
        rank_socket, saver_socket = socket.socketpair()
        self.saver_pid = os.fork()
        if self.saver_pid == 0:
            rank_socket.close()
            writer.dcp.save = _call_before(partial(before_write, self.buffers), writer.dcp.save)
            writer._hash_files_of_rank = _call_before(before_hash, writer._hash_files_of_rank)
            run_saver(Connection(saver_socket.detach()), self.buffers, run)
            os._exit(0)
        saver_socket.close()
        store: dist.Store = dist.HashStore()
        if rank_info.world_size > 1:
            store = dist.TCPStore("127.0.0.1", rank_info.master_port, rank_info.world_size, rank_info.rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank_info.rank, world_size=rank_info.world_size)
        group: Any = dist.new_group(backend="gloo")
        self.snapshots = MemorySnapshots(self.buffers, group, {})
        self.saved_steps: list[int] = []
        self.checkpointer = Checkpointer(
            run.checkpoints_dir,
            dist.new_group(backend="gloo"),
            keep=3,
            background=True,
            manifest_entries={"layout": {}},
            on_saved=lambda step, seconds: self.saved_steps.append(step),
        )
        self.checkpointer.saver = Saver(Connection(rank_socket.detach()), rank_info, self.snapshots)
        self.checkpointer.saver.connect()  # as the trainer does after the first step

    def start_save(self, step: int) -> None:
        """Save a state, and overwrite its tensors as soon as they are copied."""
        state = make_state(step)
        self.checkpointer.save(state, step=step, samples_consumed=8 * step, extra={})
        self.checkpointer.wait_until_staged()
        for tensor in state.values():
            getattr(tensor, "_local_tensor", tensor).fill_(1)


def _call_before(first: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls two functions, and returns the result of the second one."""

    def call_both(*arguments: Any, **options: Any) -> Any:
        first()
        return function(*arguments, **options)

    return call_both


def make_state(step: int) -> dict[str, torch.Tensor]:
    """Return replicated, sharded and empty tensors of several types, which differ between steps."""
    generator = torch.Generator().manual_seed(step)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrix = torch.randn(13, 7, generator=generator)
    return {
        "model.sharded": distribute_tensor(matrix, mesh, [Shard(0)]),  # 13 rows cannot be divided evenly
        "model.columns": distribute_tensor(matrix.to(torch.bfloat16), mesh, [Shard(1)]),
        "model.replicated": distribute_tensor(matrix * 2, mesh, [Replicate()]),
        "model.plain": torch.randint(-9, 9, (70_001,), generator=generator, dtype=torch.int8),
        "model.flag": torch.tensor([True, False]),
        "optimizer.step": torch.tensor(float(step)),
        "model.empty": torch.empty(0, 4),
    }


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file with tensors in a checkpoint."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.distcp"))}


def save_with_both(rank_info: RankInfo, run: Run, folder: Path) -> list[int]:
    """Save two steps with the saver, and the same steps without. Return the steps that were reported as saved."""
    rank = SavingRank(rank_info, run)
    for step in (1, 2):
        rank.start_save(step)
    rank.checkpointer.close()
    checkpointer = Checkpointer(
        folder, rank.checkpointer.group, keep=3, background=False, manifest_entries={}, on_saved=lambda *_: None
    )
    for step in (1, 2):
        checkpointer.save(make_state(step), step=step, samples_consumed=8 * step, extra={})
    return rank.saved_steps


@pytest.mark.parametrize("size", [1, 3])
def test_a_saver_writes_the_same_files_as_the_ranks(tmp_path: Path, run: Run, size: int) -> None:
    """The tensors are overwritten after the copy."""
    folder = tmp_path / "expected"
    folder.mkdir()
    assert run_ranks(size, save_with_both, run, folder) == [[1, 2]] + [[]] * (size - 1)
    for step in (1, 2):
        saved, expected = run.checkpoints_dir / checkpoint_name(step), folder / checkpoint_name(step)
        assert compute_digest(saved) == compute_digest(expected)
        assert hash_files(saved) == hash_files(expected)
    assert [event["step"] for event in read_event_lines(run, "train", "saved")] == [1, 2]


def wait_for_saver_and_exit(rank_info: RankInfo, run: Run) -> None:
    """Start a save that takes a second, and exit after the copy. Another process waits for the saver."""
    rank = SavingRank(rank_info, run, before_write=lambda buffers: time.sleep(1))
    rank.start_save(5)
    os._exit(0)


def test_a_save_is_completed_although_the_ranks_have_exited(run: Run) -> None:
    run_ranks(2, wait_for_saver_and_exit, run)
    deadline = time.monotonic() + 60
    while not list_checkpoint_steps(run.checkpoints_dir):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [event["step"] for event in read_event_lines(run, "train", "saved")] in ([5], [])  # it follows the commit


def save_and_return_error(rank_info: RankInfo, run: Run, fault: str) -> BaseException | None:
    """Let a save fail because of a fault in the saver of rank 1. Return the error of this rank."""

    def die_or_damage(buffers: Sequence[int]) -> None:
        if rank_info.rank == 1 and fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank_info.rank == 1 and fault == "damaged":
            content = os.pread(buffers[0], 1, 5000)[0]
            os.pwrite(buffers[0], bytes([content ^ 4]), 5000)

    def fill_disk() -> None:
        if rank_info.rank == 1 and fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")

    rank = SavingRank(rank_info, run, die_or_damage, fill_disk)
    rank.start_save(5)
    try:
        rank.checkpointer.wait_until_saved()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(("fault", "error_type"), [("die", SaveError), ("full", StorageError), ("damaged", SaveError)])
def test_a_failed_save_raises_an_error_on_all_ranks_and_leaves_nothing(
    run: Run, fault: str, error_type: type[Exception]
) -> None:
    errors = run_ranks(2, save_and_return_error, run, fault)
    assert all(isinstance(error, error_type) for error in errors), errors
    assert list_checkpoint_steps(run.checkpoints_dir) == []


def save_snapshots_during_a_save(rank_info: RankInfo, run: Run) -> None:
    """Save many snapshots while a saver writes a checkpoint from another buffer."""
    go_on = mp.get_context("fork").Event()

    def wait(buffers: Sequence[int]) -> None:
        assert go_on.wait(60)

    rank = SavingRank(rank_info, run, before_write=wait, buffer_count=3)
    rank.start_save(1)
    for step in range(2, 9):
        rank.snapshots.save(make_state(step), step=step, samples_consumed=0, extra={})
        assert rank.snapshots.find_common_step() == step
    assert sorted(rank.snapshots._find_intact_snapshots()) == [1, 7, 8]
    go_on.set()
    rank.checkpointer.wait_until_saved()
    for step in (9, 10, 11):  # the buffer is used again
        rank.snapshots.save(make_state(step), step=step, samples_consumed=0, extra={})
    assert sorted(rank.snapshots._find_intact_snapshots()) == [9, 10, 11]


def test_snapshots_do_not_overwrite_the_buffer_of_a_save_in_progress(run: Run) -> None:
    run_ranks(1, save_snapshots_during_a_save, run)
    assert list_checkpoint_steps(run.checkpoints_dir) == [1]


@pytest.mark.parametrize(("seconds", "is_killed"), [(0.3, False), (60, True)])
def test_a_new_attempt_waits_for_previous_savers_and_kills_them_in_the_end(
    tmp_path: Path, seconds: float, is_killed: bool
) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        time.sleep(seconds)
        os._exit(7)
    os.close(writer)
    start_time = time.monotonic()
    wait_for_previous_savers({PREVIOUS_SAVERS_VARIABLE: f"{pid}:{reader}"}, 2.0)
    assert time.monotonic() - start_time < 30
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if is_killed else 7)
