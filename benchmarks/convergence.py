"""Compare the held-out loss of the quickstart with variants that send less data, or store less state.

    python -m benchmarks.convergence             # 40 minutes; writes benchmarks/results/convergence.md
    python -m benchmarks.convergence states      # 25 minutes; writes benchmarks/results/states.md

In states.md, the text after the first table was written by hand. The second command removes this text.

All variants train on two ranks with the data, model and learning rate of the quickstart, on the same samples in the
same order, for 200 steps. They are evaluated on the same held-out text. After 200 steps, the loss of Top-K at 5 % and
of local SGD is more than 2 % above the loss of the baseline. Both therefore also train with a longer warm-up, and with
more steps. The bytes that one rank sends are computed by the formulas of docs/communication.md.
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
"""Number of steps of most variants."""
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
"""Number of steps, and options of the gradient hook or of local SGD, by the name in the table."""
RANKS = 2
MAX_INCREASE = 0.02
"""Largest accepted relative increase of the loss by a variant that sends less."""
MAX_INCREASE_BY_STATES = 0.005
"""Largest accepted relative increase of the loss by a variant that stores less."""
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
"""Config overrides by the name in the table.

A name starts with a precision. The variant whose name is only this precision is the reference.
"""
COMMON_OVERRIDES = ("evaluate.max_sequences=400", f"checkpoint.every_steps={STEPS}")


def count_bytes_sent(config: Config, vocab: int, steps: int) -> float:
    """Return the bytes that one rank sends in `steps` steps, including the warm-up.

    Args:
        config: the run's config.
        vocab: size of the vocabulary.
        steps: number of steps.
    """
    hook = config.parallel.hook
    local_sgd = config.parallel.local_sgd
    with torch.device("meta"):
        shapes = [p.shape for p in Decoder(config.model, vocab, config.data.sequence_length).parameters()]
    count = sum(shape.numel() for shape in shapes)
    values = 0.0  # number of fp32 values in an all-reduce that would send the same number of bytes
    for step in range(1, steps + 1):
        if local_sgd is not None:
            values += count if step <= local_sgd.warmup_steps or step % local_sgd.every == 0 else 0
        elif hook.kind == "topk":
            # The ranks gather the largest entries of all ranks: a value and an index, 4 bytes each. If whole gradients
            # have fewer bytes, the ranks send whole gradients.
            fraction = hook.ratio ** (min(1.0, (step - 1) / hook.warmup_steps) if hook.warmup_steps else 1.0)
            values += min(1.0, fraction * RANKS) * count
        elif hook.kind == "powersgd" and step > hook.warmup_steps:
            values += sum(
                min(shape.numel(), hook.rank * sum(shape)) if len(shape) > 1 else shape.numel() for shape in shapes
            )
        else:
            values += count / 2 if hook.kind in ("fp16", "bf16") else count
    # In a ring all-reduce of n fp32 values, each rank sends 2 · 4 n · (RANKS - 1) / RANKS bytes.
    return 8 * values * (RANKS - 1) / RANKS


def train_and_evaluate(folder: Path, name: str, steps: int, data: Path, *overrides: str) -> tuple[float, Run]:
    """Train a run and evaluate it; return its held-out loss and the run.

    Args:
        folder: where the run is created.
        name: name of the run.
        steps: number of steps.
        data: directory of a run whose shards are used.
        overrides: config overrides.
    """
    path = make_run(folder, name, steps, data, [*COMMON_OVERRIDES, *overrides])
    for command in (["slurm", "train"], ["pipeline", "evaluate"]):
        subprocess.run([sys.executable, "-m", *command, str(path)], cwd=ROOT, check=True, timeout=3600)
    run = Run.open(path)
    return json.loads(next(run.evaluation_dir.iterdir()).read_text())["loss"], run


def compare_states() -> None:
    """Train the variants that store less state, and write the table."""
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = make_run(Path(folder), "data", STEPS, overrides=COMMON_OVERRIDES)
        for number, (name, overrides) in enumerate(STATES.items()):
            losses[name], _ = train_and_evaluate(Path(folder), f"run{number}", STEPS, data, *overrides)
            print(name, losses[name], flush=True)
    write_states(losses)


def write_states(losses: dict[str, float]) -> None:
    """Write the table of the held-out losses by variant."""
    rows = []
    for name, loss in losses.items():
        increase = loss / losses[name.split(",")[0]] - 1
        verdict = "yes" if increase <= MAX_INCREASE_BY_STATES else "no"
        rows.append([name, f"{loss:.4f}", f"{100 * increase:+.2f} %", verdict])
    header = ["precision, and what is stored", "held-out loss", "compared with the precision alone", "within 0.5 %"]
    note = (
        f"The quickstart on 2 ranks over Gloo, {STEPS} steps, with the same samples in the same order. "
        "Each variant ran once."
    )
    write_table("states", "Convergence with smaller state", note, header, rows)


def compare_communication() -> None:
    """Train the variants that send less, and write the table."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_run(Path(folder), "data", STEPS, overrides=COMMON_OVERRIDES)
        baseline_loss = 0.0
        for number, (name, (steps, options)) in enumerate(VARIANTS.items()):
            section = "local_sgd" if options.startswith("every") else "hook"
            override = f"parallel.{section}={{{options}}}"
            loss, run = train_and_evaluate(Path(folder), f"run{number}", steps, data, override)
            bytes_sent = count_bytes_sent(run.config, load_manifest(run.data_dir).vocab_size, steps)
            baseline_loss = baseline_loss or loss  # the loss of the first variant
            increase = loss / baseline_loss - 1
            verdict = "yes" if increase <= MAX_INCREASE else "no"
            mb_sent = [f"{bytes_sent / steps / 1e6:.2f}", f"{bytes_sent / 1e6:.0f}"]
            rows.append([name, str(steps), f"{loss:.4f}", f"{100 * increase:+.2f} %", verdict, *mb_sent])
            print(rows[-1], flush=True)
    note = (
        "The quickstart on 2 ranks over Gloo, with the same samples in the same order and the same learning rate. Each "
        "variant ran once. MB sent: by one rank."
    )
    within = f"within {100 * MAX_INCREASE:.0f} %"
    header = ["variant", "steps", "held-out loss", "compared with the baseline", within]
    header += ["MB sent per step", "MB sent in total"]
    write_table("convergence", "Convergence with less communication", note, header, rows)


if __name__ == "__main__":
    compare_states() if sys.argv[1:] == ["states"] else compare_communication()
