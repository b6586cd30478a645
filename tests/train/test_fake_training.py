"""Tests of the memory, collectives, compiled blocks and kernels of training on a fake GPU (`make test-gpu-fake`)."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path

import pytest

from pipeline.base.dist_env import make_local_rank_env
from tests.fake_gpu.peaks import ACTIVATION_CHECKPOINTING, PEAKS
from tests.fake_gpu.start import FakeGpuRunner, find_calls, read_log
from tests.support.ranks import PORTS
from tests.support.tiny import compute_run_digest, make_run

pytestmark = pytest.mark.gpu_fake


@pytest.fixture(scope="module")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment variable that sets a compiler cache for all tests, because they compile the same blocks."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("graphs"))}


@pytest.mark.parametrize(("peak_gib", "config_name", "overrides"), PEAKS)
def test_the_peak_memory_of_a_step_is_unchanged(
    gpu_runner: FakeGpuRunner,
    compiler_cache: dict[str, str],
    peak_gib: float,
    config_name: str,
    overrides: tuple[str, ...],
) -> None:
    command = ["-W", "ignore", "-m", "benchmarks.gpu.speed", "1", f"configs/{config_name}.yaml", *overrides]
    (output,) = gpu_runner.run_commands([command], [compiler_cache], timeout=400.0)
    measured = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert measured["allocated_gib"] == pytest.approx(peak_gib, rel=0.01)


@pytest.mark.parametrize("activation_checkpointing", ["none", "selective", "full"])
def test_blocks_are_compiled_once_for_this_gpu(gpu_runner: FakeGpuRunner, activation_checkpointing: str) -> None:
    cache = gpu_runner.folder / "graphs"
    (calls,) = gpu_runner.run_programs(
        ("train_compiled_blocks", activation_checkpointing), TORCHINDUCTOR_CACHE_DIR=str(cache)
    )
    (note,) = find_calls(calls, "note")
    assert calls[note].arguments == ("graphs", "1", "breaks", "0"), "all four blocks must share one graph"
    binaries = list(cache.rglob("*.cubin"))
    assert len(binaries) >= 4
    for binary in binaries:
        content = binary.read_bytes()
        (machine,) = struct.unpack_from("<H", content, 18)
        assert content[:4] == b"\x7fELF" and machine == 190, "the binary must be an ELF file for the machine EM_CUDA"
        # The first byte of the flags is the architecture (90). Since version 8 of the format, it is the second byte.
        flags = content[48:52]
        format_version = content[8]
        assert (
            flags[1 if format_version >= 8 else 0] == 90 and ".target sm_90" in binary.with_suffix(".ptx").read_text()
        )


def test_attention_never_uses_the_kernel_that_stores_all_scores(gpu_runner: FakeGpuRunner) -> None:
    (calls,) = gpu_runner.run_programs(("note_attention_kernels",))
    chosen_kernels = [call.arguments for call in calls if call.name == "note"]
    # the last case disables cuDNN's attention
    expected = [("bf16", "cudnn"), ("fp16", "cudnn"), ("fp32", "efficient"), ("bf16", "flash")]
    assert chosen_kernels == [
        (precision, f"_scaled_dot_product_{kernel}_attention{direction}")
        for precision, kernel in expected
        for direction in ("", "_backward")
    ]


STEPS = 3
MICRO_BATCHES = 8
"""Micro-batches of a step. Two data parallel ranks have four each."""
PARAMETER_COUNT = 50_080
"""Parameters: two tables of 300 × 32; two blocks of 3,072 (attention), 3 × 32 × 128 and 64 (norms); a norm of 32."""
POWERSGD_VALUE_COUNT = 2 * 2 * (300 + 32) + 2 * (2 * (2 * 64 + 2 * 48) + 3 * 2 * (32 + 128) + 64) + 32
"""Values that PowerSGD of rank 2 sends: two columns and two rows of each matrix, and all values of vectors."""
TOPK_VALUE_COUNT = 2 * (2 * 960 + 2 * (2 * 103 + 2 * 52 + 3 * 410) + 5 * 4)
"""Values that top-k sends: an index and a value for a tenth of the entries of each parameter, rounded up."""
HIDDEN_VALUE_COUNT = 32 * 32 // 2
"""A rank's half of the hidden states of a micro-batch: 32 tokens of width 32."""
BF16 = "train.precision=bf16"
COMPILE = "train.compile=true"

TENSOR = {
    ("reduce-scatter", "bf16"): STEPS * MICRO_BATCHES * 9 * HIDDEN_VALUE_COUNT,
    ("all-gather", "bf16"): STEPS * MICRO_BATCHES * 9 * HIDDEN_VALUE_COUNT,
}
TENSOR_COMPILED = {
    **TENSOR,
    ("reduce-scatter", "bf16"): STEPS * MICRO_BATCHES * 5 * HIDDEN_VALUE_COUNT,
    ("all-reduce", "bf16"): STEPS * MICRO_BATCHES * 4 * 2 * HIDDEN_VALUE_COUNT,
}
"""A compiled block all-reduces the gradients of its inputs, and each rank then takes its part of the sum."""
# For each case: overrides, and the number of values by collective and dtype.
# - DDP and its hooks reduce once more before the first step, to determine the buckets.
# - With ZeRO, each GPU has half of all parameters. Level 1 accumulates gradients before it reduces them, and gathers
#   each parameter once per step.
# - With tensor parallelism, both blocks gather the inputs of attention and MLP and reduce their outputs in bf16. The
#   input of the output layer is also gathered. The backward pass reduces where the forward pass gathers, and the other
#   way round. These are 9 gathers and 9 reductions. The embedding's sums are fp32.
CASES: dict[str, tuple[tuple[str, ...], dict[tuple[str, str], int]]] = {
    "ddp": ((BF16,), {("all-reduce", "fp32"): (STEPS + 1) * PARAMETER_COUNT}),
    "zero 1": (
        ("parallel.zero=1", BF16),
        {
            ("reduce-scatter", "fp32"): STEPS * PARAMETER_COUNT // 2,
            ("all-gather", "bf16"): STEPS * PARAMETER_COUNT // 2,
        },
    ),
    "zero 2": (
        ("parallel.zero=2", BF16),
        {("reduce-scatter", "fp32"): STEPS * MICRO_BATCHES // 2 * PARAMETER_COUNT // 2},
    ),
    "zero 3": (
        ("parallel.zero=3", BF16),
        {("reduce-scatter", "fp32"): STEPS * MICRO_BATCHES // 2 * PARAMETER_COUNT // 2},
    ),
    "zero 3, compiled": (
        ("parallel.zero=3", BF16, COMPILE, f"{ACTIVATION_CHECKPOINTING}=selective"),
        {("reduce-scatter", "fp32"): STEPS * MICRO_BATCHES // 2 * PARAMETER_COUNT // 2},
    ),
    "tensor 2": (("parallel.tensor=2", BF16), TENSOR),
    "tensor 2, compiled": (("parallel.tensor=2", BF16, COMPILE, "model.qk_norm=true"), TENSOR_COMPILED),
    "hook fp16": (("parallel.hook={kind: fp16}",), {("all-reduce", "fp16"): (STEPS + 1) * PARAMETER_COUNT}),
    "hook bf16": (("parallel.hook={kind: bf16}",), {("all-reduce", "bf16"): (STEPS + 1) * PARAMETER_COUNT}),
    "hook powersgd": (
        ("parallel.hook={kind: powersgd, rank: 2, warmup_steps: 1}",),
        {("all-reduce", "fp32"): 2 * PARAMETER_COUNT + (STEPS - 1) * POWERSGD_VALUE_COUNT},
    ),
    "hook topk": (
        ("parallel.hook={kind: topk, ratio: 0.1}",),
        {("all-reduce", "fp32"): 0, ("all-gather", "int32"): (STEPS + 1) * TOPK_VALUE_COUNT},
    ),
    "fp16": (("train.precision=fp16",), {("all-reduce", "fp32"): (STEPS + 1) * PARAMETER_COUNT}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory. All runs of this module use this data."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_send_the_expected_number_of_values(
    gpu_runner: FakeGpuRunner, data: Path, compiler_cache: dict[str, str], name: str
) -> None:
    """The ranks run `python -m pipeline train RUN`.

    The check of the devices is off, because the kernels of the fake GPU compute nothing.
    """
    case_overrides, expected = CASES[name]
    overrides = (f"train.steps={STEPS}", "checkpoint.every_steps=2", "recovery.preflight=false")
    run = make_run(gpu_runner.folder, overrides=(*case_overrides, *overrides), data=data)
    logs = [gpu_runner.folder / f"log-{rank}" for rank in range(2)]
    port = next(PORTS)
    envs = [
        compiler_cache | make_local_rank_env(rank, 2, port) | {"FAKE_GPU_LOG": str(log)}
        for rank, log in enumerate(logs)
    ]
    gpu_runner.run_commands([("-W", "ignore", "-m", "pipeline", "train", str(run.path))] * 2, envs)
    assert [line["step"] for line in map(json.loads, run.metrics_file.read_text().splitlines())] == [1, 2, 3]
    manifest = json.loads((run.checkpoints_dir / "step-00000003/manifest.json").read_text())
    assert compute_run_digest(run) and bool(manifest["extra"]["scaler"]) == (name == "fp16")
    for rank, calls in enumerate(map(read_log, logs)):
        assert {call.device for call in calls} == {rank}
        sent_values: Counter[tuple[str, str]] = Counter()
        for call in calls:
            if call.name in ("all-reduce", "all-gather", "reduce-scatter"):
                sent_values[call.name, call.arguments[1]] += int(call.arguments[0])
        assert {key: sent_values[key] for key in expected} == expected, sent_values
