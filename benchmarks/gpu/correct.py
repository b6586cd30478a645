"""Is it right on this GPU?

    python -m benchmarks.gpu.correct ROW [small] [key=value …]     one answer, as JSON; the rows:

ceilings   what the device gives at most: bf16 products of 8192 × 8192 matrices, copies within its memory
products   loss and gradients against fp64 on the CPU: of a small decoder in fp32 and bf16, and of one with the heads,
           the attention and the compiled blocks that the timed rows have
layouts    five steps of one model by all that one GPU can: recomputation, compiling, chunks of the loss, offloading,
           state in fewer bits, fp8
saves      an asynchronous save in the middle of steps holds the weights of its own step, to the bit
stops      a training that is stopped and goes on has the digest of one that was left alone; of fp32 weights, and as
           `stops-compiled` of compiled bf16
chain      prepare → shard → train → evaluate through `python -m pipeline`

A wrong answer is told as `wrong`; the process fails only where it comes to none. `small`: a model for a rehearsal, not
1.2 billion parameters, for `saves`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu import ONE_GPU_OVERRIDES, ROOT
from benchmarks.gpu.trained import stage

DECODER = (
    "model.dim=256", "model.layers=4", "model.heads=8", "model.kv_heads=4", "model.intermediate_size=768",
    "model.tie_word_embeddings=false", "data.tokenizer.vocab_size=4096", "data.sequence_length=256",
    "train.global_batch=8", "train.micro_batch=4", "train.compile=false", "parallel.activation_checkpointing=none",
)  # fmt: skip
WIDE = (
    "model.dim=512", "model.layers=2", "model.heads=4", "model.kv_heads=1", "model.intermediate_size=1536",
    "model.tie_word_embeddings=false", "data.tokenizer.vocab_size=4096", "data.sequence_length=2048",
    "train.global_batch=2", "train.micro_batch=1", "train.compile=true", "train.loss_chunk=512",
    "parallel.activation_checkpointing=selective", "train.precision=bf16", "train.deterministic=false",
)  # fmt: skip
"""Heads of 128 that share one key, compiled, not deterministic: with other kernels than the small decoder's."""
ONE_B = "configs/lm-1b.yaml"
MORE = [word for word in sys.argv[2:] if "=" in word]
"""What was given behind the row's name, for all engines and runs."""
FEWER_BITS = {
    "moments bf16": "optimizer.state={moments: bf16}",
    "moments int8": "optimizer.state={moments: int8}",
    "all bf16": "optimizer.state={master: none, moments: bf16}",
}


def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def ceilings() -> dict[str, Any]:
    import torch

    device, size = ("cuda", 8192) if cuda() else ("cpu", 256)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    big = torch.randn(2**30 if cuda() else 2**20, device=device)
    into = torch.empty_like(big)

    def best(run: Callable[[], object]) -> float:
        times = []
        for _ in range(13):
            began = time.perf_counter()
            run()
            if cuda():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[3:])

    product, copy = best(lambda: a @ b), best(lambda: into.copy_(big))
    return {"product_tflops": 2 * size**3 / product / 1e12, "copy_gb_per_s": 2 * big.nbytes / copy / 1e9}


def engine(*overrides: str, config_file: str = ONE_B) -> tuple[Any, Any, Any]:
    """An engine on this device, its config and its world."""
    import torch

    from pipeline.base.dist_env import read_rank_info
    from pipeline.comm import groups
    from pipeline.config.read import load_config
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    config = load_config(ROOT / config_file, [*ONE_GPU_OVERRIDES, *overrides, *MORE])
    groups.configure_determinism(config)
    # which is for a process's whole life: of several engines each is to have the kernels that it would have alone
    torch.use_deterministic_algorithms(config.train.deterministic)
    world = _world.setdefault("one", None) or groups.join_process_group(read_rank_info(os.environ), config)
    _world["one"] = world
    task = DecoderTask(config, config.data.tokenizer.vocab_size)
    return Engine(config, resolve_layout(config, 1), world, task), config, world


_world: dict[str, Any] = {}


def batch_of(config: Any, device: Any) -> dict[str, Any]:
    import torch

    shape = (config.train.global_batch, config.data.sequence_length + 1)
    drawn = torch.randint(0, config.data.tokenizer.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    return {"tokens": drawn.to(device)}


def products() -> dict[str, Any]:
    import torch

    from pipeline.model.decoder import Decoder

    found: dict[str, Any] = {}
    cases = {
        "fp32": (2e-5, (*DECODER, "train.precision=fp32", "train.deterministic=true")),
        "bf16": (3e-2, (*DECODER, "train.precision=bf16", "train.deterministic=true")),
        "wide": (3e-2, WIDE),
    }
    for name, (most, overrides) in cases.items():
        ours, config, world = engine(*overrides)
        batch = batch_of(config, world.device)
        loss = ours.backward(batch, 1).item()
        vocab, length = config.data.tokenizer.vocab_size, config.data.sequence_length
        exact = Decoder(config.model, vocab, length, range(config.model.layers)).double()
        weights = {key: value.detach().cpu().double() for key, value in ours.task.named_weights(ours.parts[0])}
        exact.load_state_dict(weights, strict=False)
        tokens_BT1 = batch["tokens"].cpu()
        outputs = exact(tokens_BT1[:, :-1])
        total = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), tokens_BT1[:, 1:].flatten(), reduction="mean")
        total.backward()
        wanted = {key: value.grad for key, value in exact.named_parameters() if value.grad is not None}
        worst = largest(
            float((value.grad.cpu().double() - wanted[key]).norm() / wanted[key].norm())
            for key, value in ours.task.named_weights(ours.parts[0])
        )
        far = off(loss, total.item())
        found |= {f"{name}_loss_off": far, f"{name}_worst_gradient_off": worst}
        expect(far < most and worst < most, f"{name}: loss off by {far:.2g}, a gradient by {worst:.2g}")
    return found


def layouts() -> dict[str, Any]:
    import torch

    from pipeline.train.optimizer import set_learning_rate

    variants: dict[str, tuple[str, ...]] = {
        "plain": (),
        "recompute full": ("parallel.activation_checkpointing=full",),
        "recompute selective": ("parallel.activation_checkpointing=selective",),
        "compile": ("train.compile=true",),
        "compile, selective": ("train.compile=true", "parallel.activation_checkpointing=selective"),
        "loss in chunks": ("train.loss_chunk=512",),
        "micro-batch 1": ("train.micro_batch=1",),
        "zero 1": ("parallel.zero=1",),
        "zero 3": ("parallel.zero=3",),
        "weights in host memory": ("parallel.offload=true",),
        "fp8": ("train.precision=fp8",),
        "fp8, compile": ("train.precision=fp8", "train.compile=true"),
        **{name: (state,) for name, state in FEWER_BITS.items()},
        **{f"{name}, compile": (state, "train.compile=true") for name, state in FEWER_BITS.items()},
    }
    losses: dict[str, list[float]] = {}
    for name, overrides in variants.items():
        torch.compiler.reset()
        ours, config, world = engine(*DECODER, "train.precision=bf16", *overrides)
        batch, losses[name] = batch_of(config, world.device), []
        set_learning_rate(ours.optimizer, 1e-3)
        for step in range(1, 6):
            loss = ours.backward(batch, step)
            norm = ours.clip_gradients(config.optimizer.clip_norm)
            value, length = torch.stack([loss, norm.double()]).tolist()
            ours.update_weights(length)
            losses[name].append(value)
    plain = losses["plain"]
    far = {name: largest(map(off, found, plain)) for name, found in losses.items()}
    expect(all(much < (3e-2 if "fp8" in name else 5e-3) for name, much in far.items()), f"losses are off by {far}")
    expect(plain[-1] < plain[0], f"it does not train: {plain}")
    return {"losses": plain, "off": far}


def quickstart(folder: Path, name: str, *more: str) -> list[str]:
    """Overrides of a short training of the quickstart, on the checkout's own documents."""
    return [
        *ONE_GPU_OVERRIDES, f"run.root={folder}", f"run.name={name}", "train.steps=60", "checkpoint.every_steps=20",
        "data.tokenizer={vocab_size: 1024, train_bytes: 200000}", "train.log_every=20", *more, *MORE,
    ]  # fmt: skip


QUICKSTART = ROOT / "configs/quickstart.yaml"


def chain() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sluice-") as made:
        for name in ("prepare", "shard", "train", "evaluate"):
            stage(name, QUICKSTART, *quickstart(Path(made), "chain"))
        (result,) = (Path(made) / "chain/evaluation").glob("step-*.json")
        found = json.loads(result.read_text())
        lines = [json.loads(line) for line in (Path(made) / "chain/metrics.jsonl").read_text().splitlines()]
    expect(lines[-1]["loss"] < lines[0]["loss"], "it does not train")
    return {"losses": [lines[0]["loss"], lines[-1]["loss"]], "bits_per_byte": found["bits_per_byte"]}


def stops(*more: str) -> dict[str, Any]:
    digests = []
    with tempfile.TemporaryDirectory(prefix="sluice-") as made:
        for name in ("calm", "stopped"):
            run = Path(made, name)
            for before in (
                "prepare",
                "shard",
            ):  # a GPU may be through with 60 steps before anybody has asked it to stop
                stage(before, QUICKSTART, *quickstart(run.parent, run.name, "train.steps=120", *more))
            if name == "stopped":
                _stop_at(run, 25)
            stage("train", run)
            command = [sys.executable, "submit.py", "verify", str(run)]
            verified = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            digests.append(verified.stdout.split("digest", 1)[1].split()[0])
    expect(digests[0] == digests[1], f"digests differ: {digests}")
    return {"digest": digests[0]}


def stops_compiled() -> dict[str, Any]:
    return stops("train.precision=bf16", "train.compile=true", FEWER_BITS["moments bf16"])


def _stop_at(run: Path, step: int) -> None:
    """Train until this step, and ask it to stop."""
    training = subprocess.Popen([sys.executable, "-m", "pipeline", "train", str(run)], cwd=ROOT)
    deadline = time.monotonic() + 150
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        if training.poll() is not None or time.monotonic() > deadline:
            training.kill()
            raise RuntimeError(f"the training did not come so far; exit {training.wait(60)}")
        time.sleep(0.02)
    training.send_signal(signal.SIGTERM)
    expect(training.wait(120) == 75, f"it left with {training.returncode}, not with 75 for `stopped`")


def saves(small: bool = False) -> dict[str, Any]:
    """Saves begin after steps 2 and 4, and two more steps are made while each is written.

    The first one pins host memory, which waits for the device. So the second one is looked at, and the device has a
    second of waiting before the update that it is to hold: a copy that does not wait for it takes the weights before.
    """
    import torch

    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.comm import groups
    from pipeline.train.optimizer import set_learning_rate

    overrides = DECODER if small else ("train.global_batch=8", "train.micro_batch=2", "train.loss_chunk=2048")
    ours, config, world = engine(*overrides)
    batch = batch_of(config, world.device)
    set_learning_rate(ours.optimizer, 1e-3)
    wanted: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="sluice-") as made:
        saver = Checkpointer(
            Path(made),
            groups.new_control_group(),
            keep=1,
            background=True,
            describe={},
            on_saved=lambda step, seconds: None,
        )
        for number in range(1, 7):
            ours.backward(batch, number)
            norm = float(ours.clip_gradients(config.optimizer.clip_norm))
            saver.wait_until_staged()
            if number == 4:
                saver.wait_until_saved()
                if cuda():
                    torch.cuda._sleep(2_000_000_000)  # cycles
            ours.update_weights(norm)
            if number in (2, 4):
                wanted = {name: value.detach().clone() for name, value in ours.state_dict().items()}
                began = time.perf_counter()
                saver.save(ours.state_dict(), step=number, samples_consumed=0, extra={})
                stall = time.perf_counter() - began
        saver.wait_until_saved()
        read = {name: torch.zeros_like(value) for name, value in wanted.items()}
        saver.read_tensors(4, read)
        moved = sum(not torch.equal(value, wanted[name]) for name, value in ours.state_dict().items())
        saver.close()
    torn = [name for name, value in read.items() if not torch.equal(value, wanted[name])]
    expect(not torn, f"{len(torn)} of {len(read)} tensors are not those of their step: {torn[:3]}")
    expect(moved > len(wanted) / 2, "the steps after the save changed nothing")
    return {"tensors": len(read), "gib": sum(value.nbytes for value in read.values()) / 2**30, "call_s": stall}


class Wrong(Exception):
    """An answer that is not what it must be."""


def expect(holds: bool, words: str) -> None:
    """Raise Wrong with the words."""
    if not holds:
        raise Wrong(words)


def off(value: float, wanted: float) -> float:
    """By how much of itself what is wanted was missed."""
    return abs(value - wanted) / abs(wanted) if wanted else math.inf


def largest(values: Iterable[float]) -> float:
    """The largest; infinite where one is no number, which `max` may pass over."""
    return max(math.inf if math.isnan(value) else value for value in values)


if __name__ == "__main__":
    more = {"small": True} if "small" in sys.argv[2:] and sys.argv[1] == "saves" else {}
    try:
        answer = globals()[sys.argv[1].replace("-", "_")](**more)
    except Wrong as wrong:
        answer = {"wrong": str(wrong)}
    print(json.dumps(answer), flush=True)
