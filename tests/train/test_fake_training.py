"""Trainings on a fake GPU (tests/fake_gpu), for `make test-gpu-fake`: what they hold, send, compile and choose."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path

import pytest

from pipeline.base.dist_env import make_local_rank_env
from tests.fake_gpu.peaks import PEAKS, RECOMPUTE
from tests.fake_gpu.start import FakeGpuRunner, find_calls, read_log
from tests.support.ranks import PORTS
from tests.support.tiny import compute_run_digest, make_run

pytestmark = pytest.mark.gpu_fake


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where what is compiled is kept for all tests: the same blocks again and again."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("graphs"))}


@pytest.mark.parametrize(("peak", "name", "more"), PEAKS)
def test_the_most_memory_that_a_step_takes(
    start: FakeGpuRunner, graphs: dict[str, str], peak: float, name: str, more: tuple[str, ...]
) -> None:
    command = ["-W", "ignore", "-m", "benchmarks.gpu.speed", "1", f"configs/{name}.yaml", *more]
    (said,) = start.run_commands([command], [graphs], timeout=400.0)
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert found["allocated_gib"] == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_are_compiled_once_and_for_this_gpu(start: FakeGpuRunner, recompute: str) -> None:
    cache = start.folder / "graphs"
    (calls,) = start(("compile_blocks", recompute), TORCHINDUCTOR_CACHE_DIR=str(cache))
    (counted,) = find_calls(calls, "note")
    assert calls[counted].rest == ("graphs", "1", "breaks", "0"), "four blocks are one kind"
    binaries = list(cache.rglob("*.cubin"))
    assert len(binaries) >= 4
    for binary in binaries:
        content = binary.read_bytes()
        (machine,) = struct.unpack_from("<H", content, 18)
        assert content[:4] == b"\x7fELF" and machine == 190, "EM_CUDA, what ptxas makes"
        flags = content[48:52]  # their first byte names the GPU, since version 8 of the format the second
        assert flags[content[8] >= 8] == 90 and ".target sm_90" in binary.with_suffix(".ptx").read_text()


def test_attention_is_never_the_one_that_holds_all_scores(start: FakeGpuRunner) -> None:
    (calls,) = start(("attention",))
    taken = [call.rest for call in calls if call.word == "note"]
    ways = [("bf16", "cudnn"), ("fp16", "cudnn"), ("fp32", "efficient"), ("bf16", "flash")]  # the last without cuDNN's
    assert taken == [
        (precision, f"_scaled_dot_product_{way}_attention{direction}")
        for precision, way in ways
        for direction in ("", "_backward")
    ]


STEPS, MICRO = 3, 8
"""The eight micro-batches of a step are four of each rank where data parallel ones share them."""
VALUES = 50_080
"""Parameters: two tables of 300 × 32; two blocks of 3,072 (attention), 3 × 32 × 128 and 64 (norms); a norm of 32."""
THIN = 2 * 2 * (300 + 32) + 2 * (2 * (2 * 64 + 2 * 48) + 3 * 2 * (32 + 128) + 64) + 32
"""What PowerSGD of rank 2 sends of them: two columns and two rows of each matrix; vectors as they are."""
SPARSE = 2 * (2 * 960 + 2 * (2 * 103 + 2 * 52 + 3 * 410) + 5 * 4)
"""What a tenth of each parameter is, rounded up: places and values."""
HIDDEN = 32 * 32 // 2
"""A rank's half of the hidden states of a micro-batch: 32 tokens of width 32."""
BF16, COMPILE = "train.precision=bf16", "train.compile=true"

TENSOR = {("reduce-scatter", "bf16"): STEPS * MICRO * 9 * HIDDEN, ("all-gather", "bf16"): STEPS * MICRO * 9 * HIDDEN}
TENSOR_COMPILED = {
    **TENSOR,
    ("reduce-scatter", "bf16"): STEPS * MICRO * 5 * HIDDEN,
    ("all-reduce", "bf16"): STEPS * MICRO * 4 * 2 * HIDDEN,
}
"""A compiled piece gives the gradients of its input as whole sums, from which the cut takes its part."""
# DDP and its hooks reduce once more before the first step, to settle the buckets; one GPU of ZeRO has half of all
# parameters; level 1 adds gradients up before it reduces them, and gathers each parameter once a step. Tensor parallel:
# two blocks, each with attention and MLP, whose inputs are gathered and whose sums go out in bf16, and what goes to the
# output layer; the embedding's sums are fp32.
TRAININGS: dict[str, tuple[tuple[str, ...], dict[tuple[str, str], int]]] = {
    "ddp": ((BF16,), {("all-reduce", "fp32"): (STEPS + 1) * VALUES}),
    "zero 1": (
        ("parallel.zero=1", BF16),
        {("reduce-scatter", "fp32"): STEPS * VALUES // 2, ("all-gather", "bf16"): STEPS * VALUES // 2},
    ),
    "zero 2": (("parallel.zero=2", BF16), {("reduce-scatter", "fp32"): STEPS * MICRO // 2 * VALUES // 2}),
    "zero 3": (("parallel.zero=3", BF16), {("reduce-scatter", "fp32"): STEPS * MICRO // 2 * VALUES // 2}),
    "zero 3, compiled": (
        ("parallel.zero=3", BF16, COMPILE, f"{RECOMPUTE}=selective"),
        {("reduce-scatter", "fp32"): STEPS * MICRO // 2 * VALUES // 2},
    ),
    "tensor 2": (("parallel.tensor=2", BF16), TENSOR),
    "tensor 2, compiled": (("parallel.tensor=2", BF16, COMPILE, "model.qk_norm=true"), TENSOR_COMPILED),
    "hook fp16": (("parallel.hook={kind: fp16}",), {("all-reduce", "fp16"): (STEPS + 1) * VALUES}),
    "hook bf16": (("parallel.hook={kind: bf16}",), {("all-reduce", "bf16"): (STEPS + 1) * VALUES}),
    "hook powersgd": (
        ("parallel.hook={kind: powersgd, rank: 2, warmup_steps: 1}",),
        {("all-reduce", "fp32"): 2 * VALUES + (STEPS - 1) * THIN},
    ),
    "hook topk": (
        ("parallel.hook={kind: topk, ratio: 0.1}",),
        {("all-reduce", "fp32"): 0, ("all-gather", "int32"): (STEPS + 1) * SPARSE},
    ),
    "fp16": (("train.precision=fp16",), {("all-reduce", "fp32"): (STEPS + 1) * VALUES}),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("prepared")).data_dir


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_on_two_gpus(start: FakeGpuRunner, prepared: Path, graphs: dict[str, str], name: str) -> None:
    """Through its own door, `python -m pipeline train RUN`; without the check of devices, for nothing multiplies."""
    overrides, wanted = TRAININGS[name]
    more = (f"train.steps={STEPS}", "checkpoint.every_steps=2", "recovery.preflight=false")
    run = make_run(start.folder, overrides=(*overrides, *more), data=prepared)
    logs, port = [start.folder / f"log-{rank}" for rank in range(2)], next(PORTS)
    envs = [graphs | make_local_rank_env(rank, 2, port) | {"FAKE_GPU_LOG": str(log)} for rank, log in enumerate(logs)]
    start.run_commands([("-W", "ignore", "-m", "pipeline", "train", str(run.path))] * 2, envs)
    assert [line["step"] for line in map(json.loads, run.metrics_file.read_text().splitlines())] == [1, 2, 3]
    manifest = json.loads((run.checkpoints_dir / "step-00000003/manifest.json").read_text())
    assert compute_run_digest(run) and bool(manifest["extra"]["scaler"]) == (name == "fp16")
    for rank, calls in enumerate(map(read_log, logs)):
        assert {call.device for call in calls} == {rank}
        sent: Counter[tuple[str, str]] = Counter()
        for call in calls:
            if call.word in ("all-reduce", "all-gather", "reduce-scatter"):
                sent[call.word, call.rest[1]] += int(call.rest[0])
        assert {key: sent[key] for key in wanted} == wanted, sent
