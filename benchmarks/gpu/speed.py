"""Steps of a config on one GPU: time of each, tokens/s, memory.

    python -m benchmarks.gpu.speed STEPS CONFIG [--flash] [key=value …]     one measurement, as JSON

`--flash`: attention without cuDNN's kernel, so that torch takes that of FlashAttention.

It drives pipeline/train/engine.py as the trainer does (forward, backward, clipping, AdamW; random tokens, one rank)
with 32,768 tokens a step; a step ends when its loss is known, which waits for the device.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import IS_FAKE_GPU, ONE_GPU_OVERRIDES

TOKENS = 32_768
"""In a step."""
WARM_UP = 3


LEAST_S, MOST_STEPS = 15.0, 64
"""On a GPU, which is cool after compiling: steps go on so long, or so many."""


def timed(step: Any, steps: int) -> dict[str, Any]:
    """Times of `step(number)`, numbered from 1, each of which returns the loss; the first ones are not counted."""
    import torch

    losses, seconds, since = [], [], 0.0
    least = LEAST_S if torch.cuda.is_available() and not IS_FAKE_GPU else 0.0
    for number in range(1, WARM_UP + max(steps, MOST_STEPS) + 1):
        since = time.time() if number == WARM_UP + 1 else since
        if number > WARM_UP + steps and time.time() - since > least:
            break
        began = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - began)
    counted = seconds[WARM_UP:]
    return {
        "first_s": seconds[0], "step_s": counted, "median_s": statistics.median(counted),
        "spread": (max(counted) - min(counted)) / statistics.median(counted), "losses": [losses[0], losses[-1]],
        "between": [since, time.time()], **device(),
    }  # fmt: skip


def device() -> dict[str, Any]:
    """The device, and what it has held at most, in GiB."""
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__}
    held = {"allocated_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    named = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)  # each frees all that is held, and waits for it
    return {**named, **{name: size / 2**30 for name, size in held.items()}, "retries": retries}


def rates(found: dict[str, Any], model: Any, vocab: int, length: int, tokens: int) -> dict[str, Any]:
    """`found` with tokens/s and TFLOP/s by both definitions of operations per token."""
    from pipeline.model.spec import training_flops_per_token

    per_s = tokens / found["median_s"]
    all_of_them = training_flops_per_token(model, vocab, length)
    looked_up = 0 if model.tie_word_embeddings else 6 * vocab * model.dim
    return {
        **found, "tokens_per_s": per_s, "tflops": per_s * all_of_them / 1e12,
        "tflops_without_embedding": per_s * (all_of_them - looked_up) / 1e12,
    }  # fmt: skip


def refuse_too_large(config: Any, layout: Any, vocab: int, has: float) -> None:
    """Raise MemoryError where `plan` counts more than the bytes of this GPU: the allocator would say it after
    compiling."""
    from planning.memory import estimate_memory, reserved_gpu_bytes
    from planning.timeline import rank_actions

    takes = estimate_memory(config, layout, 0, vocab, rank_actions(layout)[0]).on_gpu(config) + reserved_gpu_bytes(
        layout
    )
    if takes > has:
        raise MemoryError(f"it takes {takes / 2**30:.0f} GiB, and the GPU has {has / 2**30:.0f}")


def measure(config_file: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """One measurement in this process, on the GPU or, where there is none, the CPU."""
    import torch

    from pipeline.base.dist_env import read_rank_info
    from pipeline.comm import groups
    from pipeline.config.read import load_config
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine
    from pipeline.train.optimizer import set_learning_rate

    length = load_config(Path(config_file), [*overrides]).data.sequence_length
    batch = max(4, TOKENS // length) if torch.cuda.is_available() else 4
    config = load_config(Path(config_file), [*ONE_GPU_OVERRIDES, *overrides, f"train.global_batch={batch}"])
    vocab = config.data.tokenizer.vocab_size
    groups.configure_determinism(config)
    world, layout = groups.join_process_group(read_rank_info(os.environ), config), resolve_layout(config, 1)
    if torch.cuda.is_available():
        refuse_too_large(config, layout, vocab, torch.cuda.mem_get_info()[1])
    engine = Engine(config, layout, world, DecoderTask(config, vocab))
    set_learning_rate(engine.optimizer, 1e-5)
    tokens_BT1 = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    tokens_BT1 = tokens_BT1.to(world.device)

    def step(number: int) -> float:
        loss = engine.backward({"tokens": tokens_BT1}, number)
        norm = engine.clip_gradients(config.optimizer.clip_norm)
        values: list[float] = torch.stack([loss, norm.double()]).tolist()
        engine.update_weights(values[1])
        return values[0]

    found = timed(step, steps)
    found["parameters"] = sum(p.numel() for part in engine.parts for p in part.parameters())
    return rates(found, config.model, vocab, length, batch * length)


if __name__ == "__main__":
    overrides = sys.argv[3:]
    if "--flash" in overrides:
        from torch.backends.cuda import enable_cudnn_sdp

        overrides.remove("--flash")
        enable_cudnn_sdp(False)
    print(json.dumps(measure(sys.argv[2], overrides, int(sys.argv[1]))), flush=True)
