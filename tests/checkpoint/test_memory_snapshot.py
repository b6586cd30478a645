"""Tests of snapshots in memory: intact, torn and damaged ones, and a train stage that restarts from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.base.errors import ExitCode
from pipeline.checkpoint.memory_snapshot import MemorySnapshots, create_buffers, read_snapshot_step
from pipeline.run.code import make_code_env
from pipeline.run.directory import Run
from tests.support.cluster_runs import count_steps
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.ranks import find_rank_processes, run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank, slow_down_steps

IDENTITY = {"layout": {"data": 1}}


@pytest.fixture(scope="module")
def group() -> Any:
    """Return a Gloo group that contains only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def buffers() -> Any:
    """Return the file descriptors of two new buffers."""
    descriptors = create_buffers(0, 2)
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def make_state(step: int) -> dict[str, torch.Tensor]:
    """Return tensors of several types and sizes, which differ between steps."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(257, 131, generator=generator),
        "model.b": torch.randn(3, generator=generator).to(torch.bfloat16),
        "optimizer.a.step": torch.tensor(float(step)),
        "optimizer.a.moment": torch.randint(-9, 9, (70_001,), generator=generator, dtype=torch.int8),
        "model.empty": torch.empty(0, 4),
    }


def save(buffers: tuple[int, ...], group: Any, step: int) -> None:
    """Save a snapshot of `make_state(step)` as a new process would do."""
    snapshots = MemorySnapshots(buffers, group, IDENTITY)
    snapshots.save(make_state(step), step=step, samples_consumed=8 * step, extra={"scaler": {"scale": step}})


def load(buffers: tuple[int, ...], group: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the newest intact step and its tensors, as a new process would load them; (0, {}) if there is none."""
    snapshots = MemorySnapshots(buffers, group, IDENTITY)
    step = snapshots.find_common_step()
    state = {name: torch.zeros_like(tensor) for name, tensor in make_state(1).items()}
    if step == 0:
        return 0, {}
    index = snapshots.load(step, state)
    assert index["samples_consumed"] == 8 * step and index["extra"] == {"scaler": {"scale": step}}
    return step, state


def assert_equal_state(actual: dict[str, torch.Tensor], step: int) -> None:
    """Check that the tensors are those of `make_state(step)`."""
    for name, tensor in make_state(step).items():
        assert torch.equal(actual[name], tensor), name


def test_the_newest_snapshot_is_loaded(buffers: tuple[int, ...], group: Any) -> None:
    assert load(buffers, group) == (0, {}) and read_snapshot_step(buffers) == 0
    for step in (3, 6, 9):
        save(buffers, group, step)
        loaded_step, state = load(buffers, group)
        assert loaded_step == step == read_snapshot_step(buffers)
        assert_equal_state(state, step)


@pytest.mark.parametrize("position", [4096, 5000, 4096 + 257 * 131 * 4 + 4097, -1])
@pytest.mark.parametrize("bit", [0, 7])
def test_after_a_flipped_bit_the_older_snapshot_is_loaded(
    buffers: tuple[int, ...], group: Any, position: int, bit: int
) -> None:
    save(buffers, group, 3)
    save(buffers, group, 6)
    newest = buffers[1]
    if position < 0:  # a position in the index, which follows the tensors
        position += os.pread(newest, os.fstat(newest).st_size, 0).rindex(b"}") + 1
    (value,) = os.pread(newest, 1, position)
    os.pwrite(newest, bytes([value ^ 1 << bit]), position)
    loaded_step, state = load(buffers, group)
    assert loaded_step == 3
    assert_equal_state(state, 3)


def test_a_save_that_does_not_end_leaves_the_older_snapshot(
    buffers: tuple[int, ...], group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(buffers, group, 3)
    save(buffers, group, 6)
    with monkeypatch.context() as patches:
        patches.setattr("pipeline.checkpoint.memory_snapshot._compute_checksum", lambda content: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save(buffers, group, 9)
    loaded_step, state = load(buffers, group)
    assert loaded_step == 6
    assert_equal_state(state, 6)


def test_snapshots_of_another_layout_are_not_used(buffers: tuple[int, ...], group: Any) -> None:
    save(buffers, group, 3)
    assert MemorySnapshots(buffers, group, {"layout": {"data": 2}}).find_common_step() == 0


def find_common_step_on_rank(rank_info: Any, steps_by_rank: list[list[int]]) -> int:
    """Save snapshots of other steps on each rank, and return the common step."""
    snapshots = MemorySnapshots(create_buffers(rank_info.rank, 2), make_group_on_rank(rank_info), IDENTITY)
    for step in steps_by_rank[rank_info.rank]:
        snapshots.save(make_state(step), step=step, samples_consumed=0, extra={})
    return snapshots.find_common_step()


def test_new_snapshots_replace_later_steps_of_another_layout(buffers: tuple[int, ...], group: Any) -> None:
    """After each save, the previous snapshot is still intact."""
    other = MemorySnapshots(buffers, group, {"layout": {"data": 2}})
    for step in (38, 40):
        other.save(make_state(step), step=step, samples_consumed=0, extra={})
    snapshots = MemorySnapshots(buffers, group, IDENTITY)
    for step in (21, 22, 23):
        snapshots.save(make_state(step), step=step, samples_consumed=8 * step, extra={})
        assert snapshots.find_common_step() == step
    assert sorted(snapshots._find_intact_snapshots()) == [22, 23]


@pytest.mark.parametrize(
    ("steps_by_rank", "expected_step"),
    [([[3, 6], [3, 6, 9]], 6), ([[3], [3, 6]], 3), ([[3, 6], []], 0), ([[3, 6], [9, 12]], 0)],
)
def test_all_ranks_load_the_newest_step_that_all_have(steps_by_rank: list[list[int]], expected_step: int) -> None:
    assert run_ranks(2, find_common_step_on_rank, steps_by_rank) == [expected_step] * 2


# ---- copies on the next node


def make_group_on_rank(rank_info: Any) -> Any:
    """Return a Gloo group of all ranks."""
    store = dist.TCPStore("127.0.0.1", rank_info.master_port, rank_info.world_size, rank_info.rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank_info.rank, world_size=rank_info.world_size)
    return dist.group.WORLD


def restore_copies_on_rank(
    rank_info: Any, hosts: list[str], lost_ranks: list[int], damaged_own: list[int], damaged_copies: list[int]
) -> int:
    """Save snapshots of the steps 1 to 3, lose some of them, and load the newest one.

    Returns:
        The loaded step; 0 if nothing could be loaded.
    """
    rank = rank_info.rank
    group = make_group_on_rank(rank_info)
    buffers = create_buffers(rank, 4)
    snapshots = MemorySnapshots(buffers[:2], group, IDENTITY, copies=buffers[2:], hosts=hosts)
    for step in (1, 2, 3):
        snapshots.save(make_state(100 * rank + step), step=step, samples_consumed=8 * step, extra={})
    if rank in damaged_own:
        flip_newest_snapshot(buffers, of_copies=False)
    if rank in damaged_copies:
        flip_newest_snapshot(buffers, of_copies=True)
    if rank in lost_ranks:
        buffers = create_buffers(rank, 4)
    snapshots = MemorySnapshots(buffers[:2], group, IDENTITY, copies=buffers[2:], hosts=hosts)  # as after a restart
    step = snapshots.find_common_step()
    if step == 0 or not snapshots.fetch(step):
        return 0
    state = {name: torch.zeros_like(tensor) for name, tensor in make_state(1).items()}
    snapshots.load(step, state)
    assert_equal_state(state, 100 * rank + step)
    snapshots.discard_after(step)
    assert read_snapshot_step(buffers) == step
    # The next snapshot must not overwrite the snapshot that was just loaded.
    snapshots.save(state, step=step + 1, samples_consumed=0, extra={})
    assert {step, step + 1} <= snapshots._find_intact_snapshots().keys()
    return step


def flip_newest_snapshot(buffers: tuple[int, ...], *, of_copies: bool) -> None:
    """Flip a bit of the newest snapshot of a rank, or of the newest copy that it keeps for another rank."""
    newest = max(buffers[2:] if of_copies else buffers[:2], key=lambda buffer: read_snapshot_step((buffer, buffer)))
    content = os.pread(newest, 1, 5000)[0]
    os.pwrite(newest, bytes([content ^ 16]), 5000)


@pytest.mark.parametrize(
    ("lost_ranks", "damaged_own", "damaged_copies", "expected_step"),
    [
        ([], [], [], 3),
        ([2, 3], [], [], 3),  # the second node was replaced
        ([0, 1], [], [], 3),
        ([2, 3], [], [1], 2),  # rank 1 keeps the copies of rank 3
        ([], [0], [], 3),  # the copy on rank 2 is intact
        ([], [0], [2], 2),
        ([0, 1, 2, 3], [], [], 0),
        ([1, 3], [], [], 0),  # all copies of ranks 1 and 3 are lost, too
    ],
)
def test_copies_on_the_next_node_replace_lost_snapshots(
    lost_ranks: list[int], damaged_own: list[int], damaged_copies: list[int], expected_step: int
) -> None:
    hosts = ["n1", "n1", "n2", "n2"]
    steps = run_ranks(4, restore_copies_on_rank, hosts, lost_ranks, damaged_own, damaged_copies)
    assert steps == [expected_step] * 4


def test_copies_are_on_another_host_if_ranks_are_distributed_cyclically() -> None:
    hosts = ["n1", "n2", "n1", "n2"]
    assert run_ranks(4, restore_copies_on_rank, hosts, [0, 2], [], []) == [3] * 4


# ---- a train stage

OPTIONS = ("train.ema={decay: 0.9}", "train.steps=60", "checkpoint.every_steps=1000", "recovery.budgets.crash=20")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a run for which the prepare and shard stages are done."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def wait_for_count(count: Callable[[], int], expected: int) -> None:
    """Wait until `count()` returns at least `expected`."""
    deadline = time.monotonic() + 120
    while count() < expected:
        assert time.monotonic() < deadline, "the run does not continue"
        time.sleep(0.02)


def train_with_kills(run: Run, kills: int, memory_every_steps: int) -> list[dict[str, Any]]:
    """Train a run, and kill a rank several times. Return the `restored` events of the stage."""
    command = [sys.executable, "-m", "slurm", "train", str(run.path)]
    environment = make_code_env(os.environ, run.code_dir)
    supervisor = subprocess.Popen(
        command, cwd=run.code_dir, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for kill in range(kills):
        wait_for_count(lambda: len(read_event_lines(run, "train", "ready")), kill + 1)
        wait_for_count(lambda: count_steps(run.path), count_steps(run.path) + memory_every_steps + 1)
        find_rank_processes(run.path)[kill % 2].send_signal(signal.SIGKILL)
    output, _ = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0, output
    return read_event_lines(run, "train", "restored")


@pytest.mark.story
@pytest.mark.parametrize("memory_every_steps", [1, 3])
def test_a_restart_in_place_loads_the_newest_snapshot_and_repeats_few_steps(
    tmp_path: Path, data: Path, memory_every_steps: int
) -> None:
    """No checkpoint exists before the last step. The result is that of an undisturbed run."""
    undisturbed = make_run(tmp_path, "undisturbed", OPTIONS, data)
    assert set(run_ranks(2, run_stage_on_rank, undisturbed.path, "train")) == {ExitCode.DONE}
    options = (*OPTIONS, f"checkpoint.memory_every_steps={memory_every_steps}")
    run = slow_down_steps(make_run(tmp_path, "killed", options, data), 0.15)
    restored = train_with_kills(run, 3, memory_every_steps)
    assert [event["source"] for event in restored] == ["memory"] * 3
    assert all(event["lost_steps"] <= memory_every_steps for event in restored)
    assert compute_run_digest(run) == compute_run_digest(undisturbed)


@pytest.mark.story
def test_a_damaged_snapshot_of_one_rank_makes_all_ranks_load_the_older_one(tmp_path: Path, data: Path) -> None:
    """Rank 1 writes a wrong checksum in every snapshot of an even step before the last one, which is saved to disk."""
    undisturbed = make_run(tmp_path, "undisturbed", OPTIONS, data)
    assert set(run_ranks(2, run_stage_on_rank, undisturbed.path, "train")) == {ExitCode.DONE}
    run = slow_down_steps(make_run(tmp_path, "damaged", (*OPTIONS, "checkpoint.memory_every_steps=1"), data), 0.15)
    replace_in_file(
        run.code_dir / "pipeline/checkpoint/memory_snapshot.py",
        "        header = _HEADER.pack(",
        '        checksum = bytes(32) if self._identity["rank"] and step in range(0, 60, 2) else checksum\n'
        "        header = _HEADER.pack(",
    )
    restored = train_with_kills(run, 2, 1)
    assert all(event["source"] == "memory" and event["step"] % 2 == 1 for event in restored)
    assert compute_run_digest(run) == compute_run_digest(undisturbed)
