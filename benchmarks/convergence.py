"""Does training with less communication reach the same loss? The quickstart's data and model, shortened.

    python -m benchmarks.convergence [--steps 150]      # writes benchmarks/results/convergence.md

Each variant trains the same samples in the same order on two ranks and is evaluated on the same held-out text. Bytes
are those that the metrics count: what one rank sends in a step, averaged over the training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.table import write_table
from benchmarks.trainer import ROOT, make_run
from pipeline.files import read_jsonl
from pipeline.run import Run

VARIANTS = {
    "baseline": (),
    "fp16": ("parallel.hook.kind=fp16",),
    "bf16": ("parallel.hook.kind=bf16",),
    "PowerSGD, rank 4, warm-up 20": ("parallel.hook={kind: powersgd, rank: 4, warmup_steps: 20}",),
    "Top-K 5 %": ("parallel.hook={kind: topk, ratio: 0.05}",),
    "Top-K 5 %, warm-up 20": ("parallel.hook={kind: topk, ratio: 0.05, warmup_steps: 20}",),
    "Top-K 1 %, warm-up 40": ("parallel.hook={kind: topk, ratio: 0.01, warmup_steps: 40}",),
    "local SGD, every 8": ("parallel.local_sgd.every=8",),
    "local SGD, every 8, outer 0.7 / 0.9": ("parallel.local_sgd={every: 8, outer_lr: 0.7, outer_momentum: 0.9}",),
}
WITHIN = 0.02
SHORTER = ("data.sequence_length=128", "evaluate.max_sequences=400", "checkpoint.every_steps=1000")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_run(Path(folder), "data", steps, more=SHORTER)
        baseline = 0.0
        for number, (name, options) in enumerate(VARIANTS.items()):
            path = make_run(Path(folder), f"run{number}", steps, data, [*SHORTER, *options])
            for command in (["slurm", "train"], ["pipeline", "evaluate"]):
                subprocess.run([sys.executable, "-m", *command, str(path)], cwd=ROOT, check=True, timeout=3600)
            run = Run.open(path)
            loss = json.loads(next(run.evaluation.iterdir()).read_text())["loss"]
            lines = list(read_jsonl(run.metrics))
            sent = statistics.mean(sum(kind["bytes"] for kind in line["comm"]["dp"].values()) for line in lines)
            baseline = baseline or loss
            worse = loss / baseline - 1
            verdict = "yes" if worse <= WITHIN else "no"
            rows.append([name, f"{loss:.4f}", f"{100 * worse:+.2f} %", verdict, f"{sent / 1e6:.3f}"])
            print(rows[-1], flush=True)
    note = (
        f"The quickstart with sequences of 128 tokens and {steps} steps, 2 ranks on Gloo, the same samples for all. "
        "Each variant ran once, with the baseline's learning rate. MB sent: by one rank, mean over all steps."
    )
    header = ["variant", "held-out loss", "against the baseline", f"within {100 * WITHIN:.0f} %", "MB sent per step"]
    write_table("convergence", "Convergence with less communication", note, header, rows)


if __name__ == "__main__":
    main()
