"""Measure what snapshots in memory and asynchronous saves cost the training loop.

    python -m benchmarks.snapshots [--blocks 8]

One rank trains a model with about 300 MB of state, so that a core is free for a background save. The steps are divided
into blocks of 10 steps, in turn: without saves, with one snapshot in memory, with one asynchronous save that a saver
writes, and with one that a thread of the rank writes. All blocks belong to one run, so a change of the machine's speed
affects all kinds of blocks.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.table import write_table
from benchmarks.trainer import make_run
from pipeline.base.dist_env import RankInfo
from tests.support.ranks import run_ranks

STEPS_PER_BLOCK = 10
KINDS = ("none", "snapshot", "save by a saver", "save by a thread")


def train_rank(rank_info: RankInfo, run_path: Path) -> list[tuple[float, float, bool]]:
    """Train on this rank. Return wall and CPU seconds of each step, and whether a save was in progress at its start."""
    from pipeline.base.signals import StopFlag
    from pipeline.checkpoint.memory_snapshot import BUFFERS_VARIABLE, create_buffers
    from pipeline.checkpoint.saver import SAVER_VARIABLE, run_saver
    from pipeline.comm import groups
    from pipeline.data.manifest import load_manifest
    from pipeline.run.directory import Run
    from pipeline.train.trainer import Trainer

    run = Run.open(run_path)
    buffers = create_buffers(0, 3)
    rank_socket, saver_socket = socket.socketpair()
    if os.fork() == 0:
        rank_socket.close()
        run_saver(Connection(saver_socket.detach()), buffers, run)
        os._exit(0)
    saver_socket.close()
    os.environ |= {BUFFERS_VARIABLE: ",".join(map(str, buffers)), SAVER_VARIABLE: str(rank_socket.detach())}
    groups.configure_determinism(run.config)
    world = groups.join_process_group(rank_info, run.config)
    trainer = Trainer(run, load_manifest(run.data_dir), rank_info, world, StopFlag())
    starts: list[tuple[float, float, bool]] = []
    step, save, save_snapshot = trainer.step, trainer.save, trainer._save_snapshot
    saver = trainer.checkpointer.saver
    assert saver is not None

    def get_kind(number: int) -> str:
        """Return the kind of the block that begins after step `number`."""
        return KINDS[number // STEPS_PER_BLOCK % len(KINDS)]

    def step_and_record(number, batch):  # type: ignore[no-untyped-def]
        """Record the times at the start of a step, and run the step."""
        thread = trainer.checkpointer._thread
        starts.append((time.perf_counter(), time.process_time(), thread is not None and thread.is_alive()))
        return step(number, batch)

    def save_in_some_blocks(number: int) -> None:
        """Save a snapshot, a checkpoint or nothing, depending on the kind of the block."""
        kind = get_kind(number)
        if kind == "snapshot":
            save_snapshot(number)
        elif kind.startswith("save"):
            trainer.checkpointer.wait_until_saved()
            snapshots = trainer.snapshots
            trainer.checkpointer.saver = saver if kind == "save by a saver" else None
            trainer.snapshots = snapshots if kind == "save by a saver" else None
            save(number)
            trainer.snapshots = snapshots

    trainer.step = step_and_record  # type: ignore[method-assign]
    trainer.save = save_in_some_blocks  # type: ignore[assignment,method-assign]
    trainer.fit()
    starts.append((time.perf_counter(), time.process_time(), False))
    return [(after[0] - before[0], after[1] - before[1], before[2]) for before, after in pairwise(starts)]


def main() -> None:
    """Measure one run, and write benchmarks/results/snapshots.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each kind")
    arguments = parser.parse_args()
    step_count = STEPS_PER_BLOCK * len(KINDS) * (arguments.blocks + 2)
    with tempfile.TemporaryDirectory() as name:
        overrides = [
            f"checkpoint.every_steps={STEPS_PER_BLOCK}", f"checkpoint.memory_every_steps={STEPS_PER_BLOCK}",
            "checkpoint.mode=async", "checkpoint.keep=1", "model.dim=512", "model.layers=6", "train.micro_batch=2",
            "train.global_batch=2", "optimizer.warmup_steps=1", "stages.train.tasks_per_node=1",
        ]  # fmt: skip
        run = make_run(Path(name), "snapshots", step_count, None, overrides)
        (steps,) = run_ranks(1, train_rank, run, timeout=1800)
    blocks: dict[str, list[list[tuple[float, float, bool]]]] = {kind: [] for kind in KINDS}
    # The save at the end of step N belongs to the block that begins after step N. The first two rounds are a
    # warm-up, because each buffer must be allocated.
    for first in range(2 * STEPS_PER_BLOCK * len(KINDS), len(steps) - STEPS_PER_BLOCK + 1, STEPS_PER_BLOCK):
        # The duration of a step lasts until the start of the next step, so the call that saves belongs to the step
        # before it: shift the block by one step.
        blocks[KINDS[first // STEPS_PER_BLOCK % len(KINDS)]].append(steps[first - 1 : first - 1 + STEPS_PER_BLOCK])
    base_wall = statistics.median(step[0] for block in blocks["none"] for step in block)
    base_cpu = statistics.median(sum(step[1] for step in block) for block in blocks["none"])
    rows = []
    for kind, kind_blocks in blocks.items():
        wall = statistics.median(sum(step[0] for step in block) for block in kind_blocks) / STEPS_PER_BLOCK
        cpu = statistics.median(sum(step[1] for step in block) for block in kind_blocks)
        beside = [step[0] for block in kind_blocks for step in block[1:] if step[2]]
        ratio = f"{statistics.median(beside) / base_wall:.3f} ({len(beside)} steps)" if beside else "-"
        rows.append([kind, f"{wall:.3f}", f"{cpu / STEPS_PER_BLOCK:.3f}", f"{cpu / base_cpu:.4f}", ratio])
    header = ["in 10 steps", "wall s per step", "CPU s per step", "CPU, ratio", "step beside the save, ratio"]
    note = (
        f"One rank, about 300 MB of state, {arguments.blocks} blocks of {STEPS_PER_BLOCK} steps of each kind, in turn, "
        "in one run; medians of blocks. CPU: all threads of the rank, without the saver. Step beside the save: steps "
        "that begin while the save is written in the background, compared with the steps of the blocks without saves."
    )
    write_table("snapshots", "Cost of snapshots in memory and of asynchronous saves", note, header, rows)


if __name__ == "__main__":
    main()
