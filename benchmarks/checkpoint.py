"""What a checkpoint costs the training: step time with saves, sync and async, against the same steps without.

    python -m benchmarks.checkpoint [--steps 24] [--rounds 4]

Two ranks, a model whose state is about 300 MB, a save every 8 steps. "Stall" is the difference of the mean step
time to the run without saves, times 8: what one save adds to the training, wherever it hides (the call itself, a
slower next step, the wait for the one before). The runs of a round follow each other, in turn.
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

EVERY = 8
SKIP = 4


def train(rank_info: RankInfo, run_path: Path, mode: str, steps: int) -> tuple[float, float]:
    """Seconds per step, and seconds in which the trainer was inside `save`, per save."""
    from pipeline.base.signals import StopFlag
    from pipeline.comm import groups
    from pipeline.data.manifest import load_manifest
    from pipeline.run.directory import Run
    from pipeline.train.trainer import Trainer

    run = Run.open(run_path)
    groups.configure_determinism(run.config)
    world = groups.join_process_group(rank_info, run.config)
    trainer = Trainer(run, load_manifest(run.data_dir), rank_info, world, StopFlag())
    marks, inside = [], []
    step, save = trainer.step, trainer.save

    def timed_step(number, batch):  # type: ignore[no-untyped-def]
        marks.append(time.perf_counter())
        return step(number, batch)

    def timed_save(number: int) -> None:
        if mode == "none":
            return
        started = time.perf_counter()
        save(number)
        inside.append(time.perf_counter() - started)

    trainer.step, trainer.save = timed_step, timed_save  # type: ignore
    trainer.fit()
    marks.append(time.perf_counter())
    return (marks[-1] - marks[SKIP]) / (len(marks) - 1 - SKIP), statistics.mean(inside[1:]) if inside else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=SKIP + 24)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    results: dict[str, list[tuple[float, float]]] = {"none": [], "sync": [], "async": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_run(folder, "data", arguments.steps)
        for number in range(arguments.rounds):
            for mode in results:
                more = [f"checkpoint.mode={'sync' if mode == 'none' else mode}", f"checkpoint.every_steps={EVERY}"]
                more += ["checkpoint.keep=1", "model.dim=512", "model.layers=6", "train.micro_batch=2"]
                more += ["train.global_batch=4", "optimizer.warmup_steps=1"]
                run = make_run(folder, f"{mode}-{number}", arguments.steps, data, more)
                figures = run_ranks(2, train, run, mode, arguments.steps, timeout=600)
                results[mode].append(max(figures))
                print(number, mode, figures, flush=True)
    base = [step for step, _ in results["none"]]
    rows = []
    for mode, pairs in results.items():
        stalls = [(step - b) * EVERY for (step, _), b in zip(pairs, base, strict=True)]
        inside = statistics.median(i for _, i in pairs)
        row = [mode, f"{statistics.median(s for s, _ in pairs):.3f}"]
        spread = f"{min(stalls):.2f} to {max(stalls):.2f}"
        row += ["-"] * 3 if mode == "none" else [f"{statistics.median(stalls):.2f}", spread, f"{inside:.3f}"]
        rows.append(row)
    header = ["saving", "s per step (median)", "stall per save, s (median)", "spread", "inside the call, s"]
    note = f"About 300 MB of state, 2 ranks, a save every {EVERY} steps, {arguments.rounds} rounds in turn."
    write_table("checkpoint", "The stall of a checkpoint", note, header, rows)


if __name__ == "__main__":
    main()
