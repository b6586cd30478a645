"""Does training that sends less, or keeps less, reach the same loss? The quickstart, with each way to do so.

    python -m benchmarks.convergence             # 40 minutes; writes benchmarks/results/convergence.md
    python -m benchmarks.convergence states      # 25 minutes; writes benchmarks/results/states.md

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
    "local SGD, every 8": (STEPS, "every: 8"),
    "local SGD, every 8, longer": (250, "every: 8"),
    "local SGD, every 8, warm-up 100": (STEPS, "every: 8, warmup_steps: 100"),
}
WITHIN, WITHIN_STATES, RANKS = 0.02, 0.005, 2
BF16 = "train.precision=bf16"
STATES: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp32, loss in chunks of 256 tokens": ("train.loss_chunk=256",),
    "fp32, moments in bf16": ("optimizer.state={moments: bf16}",),
    "fp32, moments in int8": ("optimizer.state={moments: int8}",),
    "bf16": (BF16,),
    "bf16, no master, moments in bf16": (BF16, "optimizer.state={master: none, moments: bf16}"),
    "bf16, no master, moments in int8": (BF16, "optimizer.state={master: none, moments: int8}"),
}
"""Arithmetic, and what is not fp32 between steps or not whole; compared with the same arithmetic alone."""
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


def trained(folder: Path, name: str, steps: int, data: Path, *options: str) -> tuple[float, Run]:
    """The held-out loss after a training with these options, and its run."""
    path = make_run(folder, name, steps, data, [*ALL, *options])
    for command in (["slurm", "train"], ["pipeline", "evaluate"]):
        subprocess.run([sys.executable, "-m", *command, str(path)], cwd=ROOT, check=True, timeout=3600)
    run = Run.open(path)
    return json.loads(next(run.evaluation_dir.iterdir()).read_text())["loss"], run


def states() -> None:
    """The table of what is kept in fewer bits."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = make_run(Path(folder), "data", STEPS, overrides=ALL)
        for number, (name, options) in enumerate(STATES.items()):
            found[name], _ = trained(Path(folder), f"run{number}", STEPS, data, *options)
            print(name, found[name], flush=True)
    write_states(found)


def write_states(found: dict[str, float]) -> None:
    """Write the table of these held-out losses."""
    rows = []
    for name, loss in found.items():
        worse = loss / found[name.split(",")[0]] - 1
        rows.append([name, f"{loss:.4f}", f"{100 * worse:+.2f} %", "yes" if worse <= WITHIN_STATES else "no"])
    header = ["arithmetic, and what is kept", "held-out loss", "against the arithmetic alone", "within 0.5 %"]
    note = f"The quickstart on 2 ranks over Gloo, {STEPS} steps, the same samples in the same order; each ran once."
    write_table("states", "Convergence with states in fewer bits", note, header, rows)


def main() -> None:
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_run(Path(folder), "data", STEPS, overrides=ALL)
        baseline = 0.0
        for number, (name, (steps, how)) in enumerate(VARIANTS.items()):
            section = "local_sgd" if how.startswith("every") else "hook"
            loss, run = trained(Path(folder), f"run{number}", steps, data, f"parallel.{section}={{{how}}}")
            sent = bytes_sent(run.config, load_manifest(run.data_dir).vocab_size, steps)
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
    states() if sys.argv[1:] == ["states"] else main()
