"""Measure how much a save slows down training, with synchronous and asynchronous checkpoints.

    python -m benchmarks.checkpoint [--steps 28] [--rounds 4]

Two ranks train a model with about 300 MB of state, and save every 8 steps. The stall of a save is the time that it adds
to the run: 8 × the difference between the mean step times with and without saves. The stall includes the call of
`save`, slower steps afterwards, and the wait for the previous save. Each round consists of three runs, one after the
other: without saves, with synchronous saves and with asynchronous saves.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.table import write_table
from benchmarks.trainer import make_run
from pipeline.base.dist_env import RankInfo
from tests.support.ranks import run_ranks

SAVE_EVERY_STEPS = 8
WARM_UP_STEPS = 4


def train_rank(rank_info: RankInfo, run_path: Path, mode: str) -> tuple[float, float]:
    """Train on this rank. Return the mean seconds per step, and the mean seconds of a call of `save`.

    Warm-up steps and the first save do not count.

    Args:
        rank_info: this rank.
        run_path: the run directory.
        mode: `sync`, `async`, or `none`: no checkpoint is saved, and the second value is 0.
    """
    from pipeline.base.signals import StopFlag
    from pipeline.comm import groups
    from pipeline.data.manifest import load_manifest
    from pipeline.run.directory import Run
    from pipeline.train.trainer import Trainer

    run = Run.open(run_path)
    groups.configure_determinism(run.config)
    world = groups.join_process_group(rank_info, run.config)
    trainer = Trainer(run, load_manifest(run.data_dir), rank_info, world, StopFlag())
    step_starts = []
    save_times = []
    step = trainer.step
    save = trainer.save

    def step_and_record(number, batch):  # type: ignore[no-untyped-def]
        """Record the start time of a step, and run the step."""
        step_starts.append(time.perf_counter())
        return step(number, batch)

    def save_and_record(number: int) -> None:
        """Save a checkpoint, and record the duration of the call. With the mode `none`, do nothing."""
        if mode == "none":
            return
        start = time.perf_counter()
        save(number)
        save_times.append(time.perf_counter() - start)

    trainer.step = step_and_record  # type: ignore[method-assign]
    trainer.save = save_and_record  # type: ignore[assignment,method-assign]
    trainer.fit()
    step_starts.append(time.perf_counter())
    step_s = (step_starts[-1] - step_starts[WARM_UP_STEPS]) / (len(step_starts) - 1 - WARM_UP_STEPS)
    return step_s, statistics.mean(save_times[1:]) if save_times else 0.0


def main() -> None:
    """Measure the runs of all rounds, and write benchmarks/results/checkpoint.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=WARM_UP_STEPS + 24)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    results: dict[str, list[tuple[float, float]]] = {"none": [], "sync": [], "async": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_run(folder, "data", arguments.steps)
        for number in range(arguments.rounds):
            for mode in results:
                # With the mode `none`, `train_rank` replaces the method that saves, so this value has no effect.
                overrides = [
                    f"checkpoint.mode={'sync' if mode == 'none' else mode}",
                    f"checkpoint.every_steps={SAVE_EVERY_STEPS}",
                    *("checkpoint.keep=1", "model.dim=512", "model.layers=6", "train.micro_batch=2"),
                    *("train.global_batch=4", "optimizer.warmup_steps=1"),
                ]
                run_dir = make_run(folder, f"{mode}-{number}", arguments.steps, data, overrides)
                rank_results = run_ranks(2, train_rank, run_dir, mode, timeout=600)
                results[mode].append(max(rank_results))  # of the slower rank
                print(number, mode, rank_results, flush=True)
    steps_without_saves = [step_s for step_s, _ in results["none"]]
    rows = []
    for mode, times_of_rounds in results.items():
        stalls = [
            (step_s - step_without_saves_s) * SAVE_EVERY_STEPS
            for (step_s, _), step_without_saves_s in zip(times_of_rounds, steps_without_saves, strict=True)
        ]
        call_s = statistics.median(save_s for _, save_s in times_of_rounds)
        row = [mode, f"{statistics.median(step_s for step_s, _ in times_of_rounds):.3f}"]
        spread = f"{min(stalls):.2f} to {max(stalls):.2f}"
        row += ["-"] * 3 if mode == "none" else [f"{statistics.median(stalls):.2f}", spread, f"{call_s:.3f}"]
        rows.append(row)
    header = ["mode", "median s per step", "median stall per save, s", "spread", "time in the call, s"]
    note = (
        f"About 300 MB of state, 2 ranks, a save every {SAVE_EVERY_STEPS} steps, {arguments.rounds} rounds. Stall: the "
        "time that a save adds to the steps until the next save. Time in the call: the time until the call that saves "
        "returns."
    )
    write_table("checkpoint", "Stall of a checkpoint", note, header, rows)


if __name__ == "__main__":
    main()
