"""Check that steps, saves and stops are correct on this GPU.

    python -m benchmarks.gpu.correctness ROW [small] [key=value …]     print the result of one row as JSON

- `ceilings`: measure the peak rates of the device with bf16 products of 8192 × 8192 matrices and copies in its memory.
- `products`: compare loss and gradients with fp64 on the CPU. The models are a small decoder in fp32 and bf16, and a
  wider decoder. Heads, attention and compiled blocks of the wider decoder are like those of the suite `8b`.
- `layouts`: compare the losses of five steps with and without each option on one GPU: recomputation, compilation, loss
  in chunks, offloading, smaller state and fp8.
- `saves`: check that an asynchronous save during steps contains exactly the weights of its step. With `small`, use a
  small model instead of 1.2 billion parameters.
- `stops`: check that a stopped and resumed run has the same digest as an uninterrupted run, with fp32 weights.
- `stops-compiled`: do the same as `stops` with bf16 and torch.compile.
- `chain`: run the stages prepare, shard, train and evaluate with `python -m pipeline`.

A wrong result is printed under the key `wrong`. The process fails only if it has no result.
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
from benchmarks.gpu.trainer_speed import run_stage

DECODER = (
    "model.dim=256", "model.layers=4", "model.heads=8", "model.kv_heads=4", "model.intermediate_size=768",
    "model.tie_word_embeddings=false", "data.tokenizer.vocab_size=4096", "data.sequence_length=256",
    "train.global_batch=8", "train.micro_batch=4", "train.compile=false", "parallel.activation_checkpointing=none",
)  # fmt: skip
"""Overrides of a small decoder."""
WIDE_DECODER = (
    "model.dim=512", "model.layers=2", "model.heads=4", "model.kv_heads=1", "model.intermediate_size=1536",
    "model.tie_word_embeddings=false", "data.tokenizer.vocab_size=4096", "data.sequence_length=2048",
    "train.global_batch=2", "train.micro_batch=1", "train.compile=true", "train.loss_chunk=512",
    "parallel.activation_checkpointing=selective", "train.precision=bf16", "train.deterministic=false",
)  # fmt: skip
"""Overrides of a decoder that uses other kernels than DECODER.

Its heads have width 128 and share one key head. It is compiled and not deterministic.
"""
CONFIG_1B = "configs/lm-1b.yaml"
COMMAND_LINE_OVERRIDES = [argument for argument in sys.argv[2:] if "=" in argument]
"""Overrides of the command line, for all engines and runs."""
SMALLER_STATE = {
    "moments bf16": "optimizer.state={moments: bf16}",
    "moments int8": "optimizer.state={moments: int8}",
    "all bf16": "optimizer.state={master: none, moments: bf16}",
}
"""Overrides that store weights or moments with fewer bits, by name."""


def has_cuda() -> bool:
    """Return whether this process has a CUDA device."""
    import torch

    return torch.cuda.is_available()


def measure_peak_rates() -> dict[str, Any]:
    """Measure the peak rates of this device: the TFLOP/s of a matrix product, and the GB/s of a copy in its memory."""
    import torch

    device = "cuda" if has_cuda() else "cpu"
    size = 8192 if has_cuda() else 256
    a_MM, b_MM = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**30 if has_cuda() else 2**20, device=device)
    target = torch.empty_like(source)

    def measure_median_s(run: Callable[[], object]) -> float:
        """Return the median seconds of ten calls, after three calls that are not measured."""
        times = []
        for _ in range(13):
            start = time.perf_counter()
            run()
            if has_cuda():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:])

    product_s = measure_median_s(lambda: a_MM @ b_MM)
    copy_s = measure_median_s(lambda: target.copy_(source))
    return {"product_tflops": 2 * size**3 / product_s / 1e12, "copy_gb_per_s": 2 * source.nbytes / copy_s / 1e9}


def make_engine(*overrides: str, config_file: str = CONFIG_1B) -> tuple[Any, Any, Any]:
    """Return an engine on this device, its config, and the world of this process.

    Args:
        overrides: config overrides, in addition to ONE_GPU_OVERRIDES and the overrides of the command line.
        config_file: path of the config, relative to the repository.
    """
    import torch

    from pipeline.base.dist_env import read_rank_info
    from pipeline.comm import groups
    from pipeline.config.read import load_config
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    config = load_config(ROOT / config_file, [*ONE_GPU_OVERRIDES, *overrides, *COMMAND_LINE_OVERRIDES])
    groups.configure_determinism(config)
    # This setting is per process, and the previous engine may have had another value.
    torch.use_deterministic_algorithms(config.train.deterministic)
    if "world" not in _shared_world:
        _shared_world["world"] = groups.join_process_group(read_rank_info(os.environ), config)
    world = _shared_world["world"]
    task = DecoderTask(config, config.data.tokenizer.vocab_size)
    return Engine(config, resolve_layout(config, 1), world, task), config, world


_shared_world: dict[str, Any] = {}
"""The world of this process under the key `world`, once it exists. Several engines share it."""


def make_batch(config: Any, device: Any) -> dict[str, Any]:
    """Return a global batch of random tokens: int64, shape (B, T + 1)."""
    import torch

    shape = (config.train.global_batch, config.data.sequence_length + 1)
    tokens = torch.randint(0, config.data.tokenizer.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens.to(device)}


def check_products() -> dict[str, Any]:
    """Compare loss and gradients with fp64 on the CPU, for several precisions and models. Return the relative errors.

    Raises WrongResultError if an error is larger than the tolerance.
    """
    import torch

    from pipeline.model.decoder import Decoder

    result: dict[str, Any] = {}
    cases = {
        "fp32": (2e-5, (*DECODER, "train.precision=fp32", "train.deterministic=true")),
        "bf16": (3e-2, (*DECODER, "train.precision=bf16", "train.deterministic=true")),
        "wide": (3e-2, WIDE_DECODER),
    }
    for name, (tolerance, overrides) in cases.items():
        engine, config, world = make_engine(*overrides)
        batch = make_batch(config, world.device)
        loss = engine.backward(batch, 1).item()
        vocab = config.data.tokenizer.vocab_size
        length = config.data.sequence_length
        fp64_model = Decoder(config.model, vocab, length, range(config.model.layers)).double()
        weights = {key: value.detach().cpu().double() for key, value in engine.task.named_weights(engine.parts[0])}
        fp64_model.load_state_dict(weights, strict=False)
        tokens_BT1 = batch["tokens"].cpu()
        outputs = fp64_model(tokens_BT1[:, :-1])
        fp64_loss = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), tokens_BT1[:, 1:].flatten())
        fp64_loss.backward()
        fp64_gradients = {key: value.grad for key, value in fp64_model.named_parameters() if value.grad is not None}
        gradient_error = find_largest(
            float((value.grad.cpu().double() - fp64_gradients[key]).norm() / fp64_gradients[key].norm())
            for key, value in engine.task.named_weights(engine.parts[0])
        )
        loss_error = relative_difference(loss, fp64_loss.item())
        result |= {f"{name}_loss_off": loss_error, f"{name}_worst_gradient_off": gradient_error}
        check_result(
            loss_error < tolerance and gradient_error < tolerance,
            f"{name}: relative error of the loss {loss_error:.2g}, of a gradient {gradient_error:.2g}",
        )
    return result


def check_layouts() -> dict[str, Any]:
    """Compare the losses of five steps with each option to those without options.

    Return the losses without options, and the largest relative error with each option.

    Raises WrongResultError if an error is larger than the tolerance, or if the loss does not decrease.
    """
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
        **{name: (state,) for name, state in SMALLER_STATE.items()},
        **{f"{name}, compile": (state, "train.compile=true") for name, state in SMALLER_STATE.items()},
    }
    losses: dict[str, list[float]] = {}
    for name, overrides in variants.items():
        torch.compiler.reset()
        engine, config, world = make_engine(*DECODER, "train.precision=bf16", *overrides)
        batch = make_batch(config, world.device)
        losses[name] = []
        set_learning_rate(engine.optimizer, 1e-3)
        for step in range(1, 6):
            loss = engine.backward(batch, step)
            norm = engine.clip_gradients(config.optimizer.clip_norm)
            loss_value, norm_value = torch.stack([loss, norm.double()]).tolist()
            engine.update_weights(norm_value)
            losses[name].append(loss_value)
    plain = losses["plain"]
    errors = {name: find_largest(map(relative_difference, values, plain)) for name, values in losses.items()}
    tolerances = {name: 3e-2 if "fp8" in name else 5e-3 for name in errors}
    check_result(
        all(error < tolerances[name] for name, error in errors.items()), f"relative errors of the losses: {errors}"
    )
    check_result(plain[-1] < plain[0], f"the loss does not decrease: {plain}")
    return {"losses": plain, "off": errors}


def quickstart_overrides(folder: Path, name: str, *overrides: str) -> list[str]:
    """Return the overrides of a short run of the quickstart with the name `name` in `folder`."""
    return [
        *ONE_GPU_OVERRIDES, f"run.root={folder}", f"run.name={name}", "train.steps=60", "checkpoint.every_steps=20",
        "data.tokenizer={vocab_size: 1024, train_bytes: 200000}", "train.log_every=20", *overrides,
        *COMMAND_LINE_OVERRIDES,
    ]  # fmt: skip


QUICKSTART = ROOT / "configs/quickstart.yaml"


def check_chain() -> dict[str, Any]:
    """Run all stages of the quickstart. Return the first and last loss, and the bits per byte of the evaluation.

    Raises WrongResultError if the loss does not decrease.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        for stage in ("prepare", "shard", "train", "evaluate"):
            run_stage(stage, QUICKSTART, *quickstart_overrides(Path(folder), "chain"))
        (evaluation_file,) = (Path(folder) / "chain/evaluation").glob("step-*.json")
        evaluation = json.loads(evaluation_file.read_text())
        lines = [json.loads(line) for line in (Path(folder) / "chain/metrics.jsonl").read_text().splitlines()]
    check_result(lines[-1]["loss"] < lines[0]["loss"], "the loss does not decrease")
    return {"losses": [lines[0]["loss"], lines[-1]["loss"]], "bits_per_byte": evaluation["bits_per_byte"]}


def check_stops(*overrides: str) -> dict[str, Any]:
    """Check that an uninterrupted run and a stopped run have the same digest. Return the digest."""
    digests = []
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        for name in ("uninterrupted", "stopped"):
            run_dir = Path(folder, name)
            # The run has 120 steps, because a GPU may complete 60 steps before it receives the signal.
            run_overrides = quickstart_overrides(run_dir.parent, run_dir.name, "train.steps=120", *overrides)
            for stage in ("prepare", "shard"):
                run_stage(stage, QUICKSTART, *run_overrides)
            if name == "stopped":
                _stop_at(run_dir, 25)
            run_stage("train", run_dir)
            command = [sys.executable, "submit.py", "verify", str(run_dir)]
            verified = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            digests.append(verified.stdout.split("digest", 1)[1].split()[0])
    check_result(digests[0] == digests[1], f"digests differ: {digests}")
    return {"digest": digests[0]}


def check_stops_compiled() -> dict[str, Any]:
    """Do the same as `check_stops` with bf16, torch.compile and moments in bf16."""
    return check_stops("train.precision=bf16", "train.compile=true", SMALLER_STATE["moments bf16"])


def _stop_at(run_dir: Path, step: int) -> None:
    """Start the train stage, and stop it with SIGTERM after step `step`. Check its exit code."""
    training = subprocess.Popen([sys.executable, "-m", "pipeline", "train", str(run_dir)], cwd=ROOT)
    deadline = time.monotonic() + 150
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        if training.poll() is not None or time.monotonic() > deadline:
            training.kill()
            raise RuntimeError(f"the train stage did not reach step {step}; exit {training.wait(60)}")
        time.sleep(0.02)
    training.send_signal(signal.SIGTERM)
    check_result(training.wait(120) == 75, f"exit code {training.returncode}, not 75 for `stopped`")


def check_saves(small: bool = False) -> dict[str, Any]:
    """Save after steps 2 and 4, with two more steps while each save is written, and check the second save.

    The first save pins host memory and thereby waits for the device. Therefore only the second save can copy tensors
    too early. Before the update of step 4, the device is kept busy for a second. If the copy of the second save did not
    wait for this update, it would contain the old weights.

    Raises WrongResultError if a saved tensor differs.

    Args:
        small: whether to use DECODER instead of 1.2 billion parameters.
    """
    import torch

    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.comm import groups
    from pipeline.train.optimizer import set_learning_rate

    overrides = DECODER if small else ("train.global_batch=8", "train.micro_batch=2", "train.loss_chunk=2048")
    engine, config, world = make_engine(*overrides)
    batch = make_batch(config, world.device)
    set_learning_rate(engine.optimizer, 1e-3)
    expected: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        saver = Checkpointer(
            Path(folder),
            groups.new_control_group(),
            keep=1,
            background=True,
            manifest_entries={},
            on_saved=lambda step, seconds: None,
        )
        for step in range(1, 7):
            engine.backward(batch, step)
            norm = float(engine.clip_gradients(config.optimizer.clip_norm))
            saver.wait_until_staged()
            if step == 4:
                saver.wait_until_saved()
                if has_cuda():
                    torch.cuda._sleep(2_000_000_000)  # The unit is clock cycles.
            engine.update_weights(norm)
            if step in (2, 4):
                expected = {name: value.detach().clone() for name, value in engine.state_dict().items()}
                start = time.perf_counter()
                saver.save(engine.state_dict(), step=step, samples_consumed=0, extra={})
                call_s = time.perf_counter() - start
        saver.wait_until_saved()
        saved = {name: torch.zeros_like(value) for name, value in expected.items()}
        saver.read_tensors(4, saved)
        changed = sum(not torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
        saver.close()
    wrong = [name for name, value in saved.items() if not torch.equal(value, expected[name])]
    check_result(not wrong, f"{len(wrong)} of {len(saved)} saved tensors are not those of their step: {wrong[:3]}")
    check_result(changed > len(expected) / 2, "the steps after the save changed less than half of the tensors")
    return {"tensors": len(saved), "gib": sum(value.nbytes for value in saved.values()) / 2**30, "call_s": call_s}


class WrongResultError(Exception):
    """A result that is not correct."""


def check_result(is_correct: bool, message: str) -> None:
    """Raise WrongResultError with the message if the result is not correct."""
    if not is_correct:
        raise WrongResultError(message)


def relative_difference(value: float, expected: float) -> float:
    """Return the relative difference of two values; infinity if the expected value is 0."""
    return abs(value - expected) / abs(expected) if expected else math.inf


def find_largest(values: Iterable[float]) -> float:
    """Return the largest value; infinity if a value is NaN, because `max` may ignore NaN."""
    return max(math.inf if math.isnan(value) else value for value in values)


ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "ceilings": measure_peak_rates,
    "products": check_products,
    "layouts": check_layouts,
    "saves": check_saves,
    "stops": check_stops,
    "stops-compiled": check_stops_compiled,
    "chain": check_chain,
}

if __name__ == "__main__":
    arguments = {"small": True} if "small" in sys.argv[2:] and sys.argv[1] == "saves" else {}
    try:
        result = ROWS[sys.argv[1]](**arguments)
    except WrongResultError as error:
        result = {"wrong": str(error)}
    print(json.dumps(result), flush=True)
