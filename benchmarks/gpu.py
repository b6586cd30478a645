"""What one GPU makes of a config: tokens/s, TFLOP/s, MFU, memory, and what each option gains.

    python -m benchmarks.gpu                                      configs/lm-1b.yaml and configs/lm-8b.yaml
    python -m benchmarks.gpu --configs configs/lm-1b.yaml --steps 20
    python -m benchmarks.gpu --one configs/lm-1b.yaml train.micro_batch=8      one measurement, as JSON

It drives pipeline/train/engine.py as the trainer does (forward, backward, clipping, AdamW; random tokens, one rank),
four micro-batches a step. Every row is a process of its own, so that one that runs out of memory takes nothing along.

The first lines printed, and those above the table, define MFU and name the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.table import RESULTS, write_table

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ["configs/lm-1b.yaml", "configs/lm-8b.yaml"]
PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4, "GH200": 989.4, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}
"""Dense bf16, from the vendor's data sheets (SXM where there are several)."""
DEFINITION = """\
MFU (model FLOP utilisation): 6 N + 12 L H Q T operations per token, times tokens/s, over the GPU's dense bf16
peak. N: all parameters, the embedding too; L layers, H heads of width Q, T tokens of context; no discount for the
causal mask, nothing for what is recomputed (pipeline/model/decoder.py, `flops_per_token`). The bar: 57.8 % for
configs/lm-8b.yaml (8.03 billion parameters) on one H200, 10,471 tokens/s; the aim: 65 %."""
ACCUMULATE = 4
ALONE = (
    "parallel.data=auto", "parallel.zero=0", "parallel.tensor=1", "parallel.pipeline=1", "stages.train.nodes=1",
    "stages.train.tasks_per_node=1",
)  # fmt: skip
OPTIONS: list[tuple[str, tuple[str, ...]]] = [
    ("as it is", ()),
    ("without compile", ("train.compile=false",)),
    ("no activation checkpointing", ("parallel.activation_checkpointing=none",)),
    ("selective activation checkpointing", ("parallel.activation_checkpointing=selective",)),
    ("full activation checkpointing", ("parallel.activation_checkpointing=full",)),
    ("micro-batch 1", ("train.micro_batch=1",)),
    ("micro-batch 1, selective", ("train.micro_batch=1", "parallel.activation_checkpointing=selective")),
    ("micro-batch 1, full", ("train.micro_batch=1", "parallel.activation_checkpointing=full")),
    ("micro-batch 8", ("train.micro_batch=8",)),
    ("fp32 instead of bf16", ("train.precision=fp32",)),
    ("fp8 instead of bf16", ("train.precision=fp8",)),
    ("whole logits", ("train.loss_chunk=null",)),
    ("moments in bf16", ("optimizer.state={moments: bf16}",)),
    ("moments in bf16, no master", ("optimizer.state={master: none, moments: bf16}",)),
    ("weights and optimizer in host memory", ("parallel.offload=true",)),
]
LIMIT_S = 600


def peak_of(name: str) -> float | None:
    """Dense bf16 peak of a device in TFLOP/s; None where it is not known."""
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


def measure(config_file: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """One measurement in this process, on the GPU or, where there is none, the CPU."""
    import torch

    from pipeline.base.place import identify
    from pipeline.comm import groups
    from pipeline.config.layout import layout_of
    from pipeline.config.read import load_config
    from pipeline.model.decoder import flops_per_token
    from pipeline.model.task import Task
    from pipeline.train.engine import Engine
    from pipeline.train.optimizer import set_learning_rate

    micro = load_config(Path(config_file), [*ALONE, *overrides, "train.global_batch=64"]).train.micro_batch
    config = load_config(Path(config_file), [*ALONE, *overrides, f"train.global_batch={ACCUMULATE * micro}"])
    vocab, length = config.data.tokenizer.vocab_size, config.data.sequence_length
    groups.make_deterministic(config)
    world = groups.join(identify(os.environ), config)
    engine = Engine(config, layout_of(config, 1), world, Task(config, vocab))
    set_learning_rate(engine.optimizer, 1e-5)
    cuda = world.device.type == "cuda"
    shape = (config.train.global_batch, length + 1)
    tokens_BT1 = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1)).to(world.device)

    def step(number: int) -> float:
        loss = engine.backward({"tokens": tokens_BT1}, number)
        norm = engine.clip(config.optimizer.clip_norm)
        values: list[float] = torch.stack([loss, norm.double()]).tolist()
        engine.update(values[1])
        return values[0]

    first_loss = step(1)
    for number in (2, 3):
        step(number)
    started = time.perf_counter()
    for number in range(steps):
        last_loss = step(4 + number)  # reads the loss, which waits for the device
    seconds = time.perf_counter() - started
    tokens_per_s = steps * config.train.global_batch * length / seconds
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for part in engine.parts for p in part.parameters()),
        "tokens_per_s": tokens_per_s,
        "tflops": tokens_per_s * flops_per_token(config.model, vocab, length) / 1e12,
        "memory_gib": memory,
        "losses": [first_loss, last_loss],
    }


def run_one(config: str, overrides: tuple[str, ...], steps: int) -> dict[str, Any] | str:
    """The same in a process of its own; a few words where it failed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--steps", str(steps), "--one", config, *overrides]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not done in {LIMIT_S} s"
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    print(done.stderr[-2000:], file=sys.stderr)
    return "out of memory" if "OutOfMemoryError" in done.stderr else done.stderr.strip().splitlines()[-1][:80]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--one", nargs="+", metavar="CONFIG key=value")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], arguments.one[1:], arguments.steps)))
        return
    import torch

    print(DEFINITION, flush=True)
    if not torch.cuda.is_available():
        if not (RESULTS / "gpu.md").exists():
            note = f"Not measured yet: no GPU was at hand.\n\n{DEFINITION}\n\nWritten on"
            write_table("gpu", "One GPU", note, ["config", "MFU"], [["all", "-"]])
        sys.exit("no GPU here: nothing was measured")
    name = torch.cuda.get_device_name()
    peak = peak_of(name)
    rows = []
    for config in arguments.configs:
        for option, overrides in OPTIONS:
            found = run_one(config, overrides, arguments.steps)
            if isinstance(found, str):
                cells = [found, "", "", ""]
            else:
                mfu = f"{found['tflops'] / peak:.1%}" if peak else "?"
                cells = [f"{found['tokens_per_s']:,.0f}", f"{found['tflops']:.0f}", mfu, f"{found['memory_gib']:.1f}"]
            rows.append([config, option, *cells])
            print(" ".join(rows[-1]), flush=True)
    note = (
        f"{name}, torch {torch.__version__}, peak taken as {peak} TFLOP/s; {arguments.steps} steps after 3 of warm-up, "
        f"{ACCUMULATE} micro-batches a step.\n\n{DEFINITION}\n\nWritten on"
    )
    header = ["config", "option", "tokens/s", "TFLOP/s", "MFU", "GiB"]
    write_table("gpu", "One GPU", note, header, rows)


if __name__ == "__main__":
    main()
