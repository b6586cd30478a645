"""Does training with less communication reach the same loss? The quickstart, with each way to send less.

    python -m benchmarks.convergence        # 45 minutes; writes benchmarks/results/convergence.md

Moments in bf16 send nothing less; they stand here, since they change the result as little, or as much.

All train on two ranks with the quickstart's own data, model, learning rate and 200 steps, on the same samples in the
same order, and are evaluated on the same held-out text. Top-K at 5 % and local SGD, which do not come within 2 % of the
baseline's loss so soon, train again with a longer warm-up, and with more steps. Bytes are what one rank sends, by the
formulas of docs/communication.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.table import write_table
from benchmarks.trainer import ROOT, make_run
from pipeline.config.sections import Config
from pipeline.data.manifest import load_manifest
from pipeline.model.decoder import Decoder
from pipeline.run.directory import Run

STEPS = 200
VARIANTS: dict[str, tuple[int, str]] = {
    "baseline": (STEPS, "kind: none"),
    "fp16": (STEPS, "kind: fp16"),
    "bf16": (STEPS, "kind: bf16"),
    "PowerSGD, rank 32, warm-up 20": (STEPS, "kind: powersgd, rank: 32, warmup_steps: 20"),
    "Top-K 5 %, warm-up 40": (STEPS, "kind: topk, ratio: 0.05, warmup_steps: 40"),
    "Top-K 5 %, warm-up 160": (STEPS, "kind: topk, ratio: 0.05, warmup_steps: 160"),
    "Top-K 5 %, warm-up 40, longer": (300, "kind: topk, ratio: 0.05, warmup_steps: 40"),
    "Top-K 1 %, warm-up 40": (STEPS, "kind: topk, ratio: 0.01, warmup_steps: 40"),
    "moments in bf16": (STEPS, "optimizer.state={moments: bf16}"),
    "local SGD, every 8": (STEPS, "every: 8"),
    "local SGD, every 8, longer": (250, "every: 8"),
    "local SGD, every 8, warm-up 100": (STEPS, "every: 8, warmup_steps: 100"),
}
WITHIN, RANKS = 0.02, 2
ALL = ("evaluate.max_sequences=400", f"checkpoint.every_steps={STEPS}")


def bytes_sent(config: Config, vocab: int, steps: int) -> float:
    """What a rank sends in a training of so many steps, warm-ups included."""
    hook, local = config.parallel.hook, config.parallel.local_sgd
    with torch.device("meta"):
        shapes = [p.shape for p in Decoder(config.model, vocab, config.data.sequence_length).parameters()]
    count, values = sum(shape.numel() for shape in shapes), 0.0  # all-reduced in fp32, or as many bytes otherwise
    for step in range(1, steps + 1):
        if local is not None:
            values += count if step <= local.warmup_steps or step % local.every == 0 else 0
        elif hook.kind == "topk":
            fraction = hook.ratio ** (min(1.0, (step - 1) / hook.warmup_steps) if hook.warmup_steps else 1.0)
            values += min(1.0, fraction * RANKS) * count
        elif hook.kind == "powersgd" and step > hook.warmup_steps:
            values += sum(min(s.numel(), hook.rank * sum(s)) if len(s) > 1 else s.numel() for s in shapes)
        else:
            values += count / 2 if hook.kind in ("fp16", "bf16") else count
    return 8 * values * (RANKS - 1) / RANKS


def main() -> None:
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_run(Path(folder), "data", STEPS, more=ALL)
        baseline = 0.0
        for number, (name, (steps, how)) in enumerate(VARIANTS.items()):
            section = "local_sgd" if how.startswith("every") else "hook"
            option = how if "=" in how else f"parallel.{section}={{{how}}}"
            path = make_run(Path(folder), f"run{number}", steps, data, [*ALL, option])
            for command in (["slurm", "train"], ["pipeline", "evaluate"]):
                subprocess.run([sys.executable, "-m", *command, str(path)], cwd=ROOT, check=True, timeout=3600)
            run = Run.open(path)
            loss = json.loads(next(run.evaluation.iterdir()).read_text())["loss"]
            sent = bytes_sent(run.config, load_manifest(run.data).vocab_size, steps)
            baseline = baseline or loss
            worse = loss / baseline - 1
            verdict = "yes" if worse <= WITHIN else "no"
            figures = f"{loss:.4f}", f"{100 * worse:+.2f} %", verdict, f"{sent / steps / 1e6:.2f}", f"{sent / 1e6:.0f}"
            rows.append([name, str(steps), *figures])
            print(rows[-1], flush=True)
    note = (
        "The quickstart on 2 ranks over Gloo, the same samples in the same order for all, with the baseline's learning "
        "rate; each ran once. MB sent: by one rank."
    )
    within = f"within {100 * WITHIN:.0f} %"
    header = ["variant", "steps", "held-out loss", "against the baseline", within, "MB sent per step", "MB in all"]
    write_table("convergence", "Convergence with less communication", note, header, rows)


if __name__ == "__main__":
    main()
