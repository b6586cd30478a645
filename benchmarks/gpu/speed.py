"""Measure the training steps of a config on one GPU: step time, tokens/s, memory.

    python -m benchmarks.gpu.speed STEPS CONFIG [--flash] [key=value …]     print one measurement as JSON

`--flash`: disable cuDNN's attention, so that torch uses FlashAttention.

This module calls pipeline/train/engine.py as the trainer does (forward, backward, clipping, AdamW), on one rank with
32,768 random tokens per step (on a CPU: four samples). A step ends when its loss is read, which waits for the device.
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
"""Number of tokens per step."""
WARM_UP = 3
"""Number of steps at the start that are not measured."""
MIN_DURATION_S = 15.0
"""Minimum duration of the measurement on a GPU. After compilation, a GPU is cool, and for a while it runs faster."""
MAX_STEPS = 64
"""Maximum number of measured steps, even if they take less than MIN_DURATION_S. STEPS may be larger."""


def time_steps(step: Any, steps: int) -> dict[str, Any]:
    """Measure steps and return the result: times, losses, the device, and start and end of the measurement.

    Args:
        step: function that runs a step and returns its loss. Its argument is the number of the step, from 1.
        steps: minimum number of measured steps, after WARM_UP steps.
    """
    import torch

    losses = []
    seconds = []
    start_time = 0.0
    min_duration_s = MIN_DURATION_S if torch.cuda.is_available() and not IS_FAKE_GPU else 0.0
    for number in range(1, WARM_UP + max(steps, MAX_STEPS) + 1):
        start_time = time.time() if number == WARM_UP + 1 else start_time
        if number > WARM_UP + steps and time.time() - start_time > min_duration_s:
            break
        step_start = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - step_start)
    counted = seconds[WARM_UP:]
    return {
        "first_s": seconds[0], "step_s": counted, "median_s": statistics.median(counted),
        "spread": (max(counted) - min(counted)) / statistics.median(counted), "losses": [losses[0], losses[-1]],
        "between": [start_time, time.time()], **describe_device(),
    }  # fmt: skip


def describe_device() -> dict[str, Any]:
    """Return the name of the device and the version of torch.

    On a GPU, also return the peak memory in GiB, and the number of times that the allocator had to free its cache.
    """
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__}
    peak_bytes = {"allocated_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    names = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    # At each retry, the allocator frees all cached memory and synchronizes, which slows down the step.
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return {**names, **{name: size / 2**30 for name, size in peak_bytes.items()}, "retries": retries}


def add_rates(result: dict[str, Any], model: Any, vocab: int, length: int, tokens: int) -> dict[str, Any]:
    """Return `result` with tokens/s, and with TFLOP/s by both definitions of DEFINITION (benchmarks/gpu/__init__.py).

    Args:
        result: the result of `time_steps`, with `median_s`.
        model: the model's config.
        vocab: size of the vocabulary.
        length: sequence length.
        tokens: number of tokens per step.
    """
    from pipeline.model.spec import training_flops_per_token

    tokens_per_s = tokens / result["median_s"]
    flops = training_flops_per_token(model, vocab, length)
    embedding_flops = 0 if model.tie_word_embeddings else 6 * vocab * model.dim
    return {
        **result, "tokens_per_s": tokens_per_s, "tflops": tokens_per_s * flops / 1e12,
        "tflops_without_embedding": tokens_per_s * (flops - embedding_flops) / 1e12,
    }  # fmt: skip


def check_fits_gpu(config: Any, layout: Any, vocab: int, gpu_bytes: float) -> None:
    """Raise MemoryError if the estimate of `plan` exceeds the memory of the GPU.

    Without this check, the process would fail only after compilation.
    """
    from planning.memory import estimate_memory, reserved_gpu_bytes
    from planning.timeline import rank_actions

    memory = estimate_memory(config, layout, 0, vocab, rank_actions(layout)[0])
    required = memory.on_gpu(config) + reserved_gpu_bytes(layout)
    if required > gpu_bytes:
        raise MemoryError(f"a step takes {required / 2**30:.0f} GiB, and the GPU has {gpu_bytes / 2**30:.0f} GiB")


def measure(config_file: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """Measure the steps of a config in this process and return the result. Without a GPU, the CPU is measured."""
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
    world = groups.join_process_group(read_rank_info(os.environ), config)
    layout = resolve_layout(config, 1)
    if torch.cuda.is_available():
        check_fits_gpu(config, layout, vocab, torch.cuda.mem_get_info()[1])
    engine = Engine(config, layout, world, DecoderTask(config, vocab))
    set_learning_rate(engine.optimizer, 1e-5)
    tokens_BT1 = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    tokens_BT1 = tokens_BT1.to(world.device)

    def step(number: int) -> float:
        """Run a training step and return its loss."""
        loss = engine.backward({"tokens": tokens_BT1}, number)
        norm = engine.clip_gradients(config.optimizer.clip_norm)
        values: list[float] = torch.stack([loss, norm.double()]).tolist()
        engine.update_weights(values[1])
        return values[0]

    result = time_steps(step, steps)
    result["parameters"] = sum(p.numel() for part in engine.parts for p in part.parameters())
    return add_rates(result, config.model, vocab, length, batch * length)


if __name__ == "__main__":
    overrides = sys.argv[3:]
    if "--flash" in overrides:
        from torch.backends.cuda import enable_cudnn_sdp

        overrides.remove("--flash")
        enable_cudnn_sdp(False)
    print(json.dumps(measure(sys.argv[2], overrides, int(sys.argv[1]))), flush=True)
