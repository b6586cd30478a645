"""Run a suite of rows within its time limit (see benchmarks/gpu/__init__.py)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import DEFINITION, IS_FAKE_GPU, ROOT, SMALL_MODEL, get_peak_tflops
from benchmarks.table import write_table

CONFIG_8B = "configs/lm-8b-1gpu.yaml"
CONFIG_1B = "configs/lm-1b.yaml"
BF16 = "optimizer.state={master: none, moments: bf16}"
ACTIVATION_CHECKPOINTING = "parallel.activation_checkpointing"
MIN_ROW_S = 25.0
"""If less time remains, no further row is started."""
DEFAULT_ENV = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/sluice-graphs"}
"""Environment variables of each row, unless they are already set."""
if not IS_FAKE_GPU:
    # The first row of the suite `8b` needs 119 GiB for tensors. On a GPU with 141 GB, fragmentation could fill the
    # remaining memory. This setting reduces fragmentation. It also applies to torchtitan.
    DEFAULT_ENV["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

NVIDIA_SMI_FIELDS = {"clocks.sm": "clock_mhz", "power.draw": "power_w", "temperature.gpu": "temperature_c"}
"""Fields of `nvidia-smi`, and their names in a result."""
PROBLEMS = {"failed", "wrong"}
"""Keys of a result that mark a row without a good result."""
UNITS_BY_FIELD = {"clock_mhz": "MHz", "power_w": "W", "temperature_c": "°C"}


class Row(NamedTuple):
    """A benchmark or check that is one row of the table."""

    name: str
    module: str
    """Module of this package that runs the row."""
    arguments: tuple[str, ...]
    """Command-line arguments of the module."""


def rows_8b(steps: int, model: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of the suite `8b`, the most important rows first. The first row is measured twice.

    Args:
        steps: number of measured steps of each row.
        model: config overrides of all rows.
    """

    def make_row(name: str, *overrides: str) -> Row:
        """Return a row that measures the config of 8.03 billion parameters with `overrides`."""
        return Row(name, "speed", (str(steps), CONFIG_8B, *model, *overrides))

    first = make_row("weights fp32, moments bf16, selective")
    yield first
    yield make_row("all bf16, full", BF16, f"{ACTIVATION_CHECKPOINTING}=full")
    yield make_row("all bf16, selective", BF16)
    yield make_row(
        "fp8 rowwise, weights fp32, moments bf16, selective", "train.precision=fp8", "train.fp8_scales=rowwise"
    )
    yield Row("through the trainer: weights fp32, moments bf16, selective", "trainer_speed",
              (str(steps), CONFIG_8B, *model))  # fmt: skip
    yield first._replace(name=f"{first.name}, again")
    # This row fits into 80 GB.
    yield make_row("weights bf16, moments int8, selective", "optimizer.state={master: none, moments: int8}")
    yield make_row("weights fp32, cast once a step, moments bf16, selective, micro-batch 1", "parallel.zero=1",
              "train.micro_batch=1")  # fmt: skip
    yield make_row(f"{first.name}, FlashAttention instead of cuDNN", "--flash")
    yield make_row("weights fp32, moments int8, selective", "optimizer.state={moments: int8}")
    yield make_row("fp8 tensorwise, weights fp32, moments bf16, selective", "train.precision=fp8",
              "train.fp8_scales=tensorwise")  # fmt: skip
    yield make_row("weights fp32, moments bf16, selective, loss in one chunk, micro-batch 1", "train.loss_chunk=null",
              "train.micro_batch=1")  # fmt: skip
    # Two of the rows above fit into a GPU with 80 GB. All following rows also fit.
    least_memory = (BF16, f"{ACTIVATION_CHECKPOINTING}=full")
    yield Row("through the trainer: all bf16, full", "trainer_speed", (str(steps), CONFIG_8B, *model, *least_memory))
    yield make_row("all bf16, full, again", *least_memory)
    yield make_row("all bf16, selective, micro-batch 1", BF16, "train.micro_batch=1")
    yield make_row("fp8 rowwise, all bf16, full", *least_memory, "train.precision=fp8", "train.fp8_scales=rowwise")


def rows_1b(steps: int, model: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of the suite `1b`: Sluice and torchtitan in turn, then Sluice with other options.

    In the comparison, both have all state in fp32, which is torchtitan's default.

    Args:
        steps: number of measured steps of each row.
        model: config overrides of all rows.
    """
    untied = "model.tie_word_embeddings=false"
    sluice = (str(steps), CONFIG_1B, untied, "train.loss_chunk=2048", *model)
    for again in ("", ", again"):
        yield Row(
            f"Sluice, micro-batch 4, no recomputation{again}", "speed", (*sluice, f"{ACTIVATION_CHECKPOINTING}=none")
        )
        yield Row(f"torchtitan, micro-batch 4, no recomputation{again}", "titan", (str(steps), "4", "none", *model))
    for again in ("", ", again"):
        yield Row(f"Sluice, micro-batch 8, selective{again}", "speed",
                  (*sluice, f"{ACTIVATION_CHECKPOINTING}=selective", "train.micro_batch=8"))  # fmt: skip
        yield Row(f"torchtitan, micro-batch 8, selective{again}", "titan", (str(steps), "8", "selective", *model))
    yield Row("Sluice, micro-batch 4, no recomputation, cast once a step", "speed",
              (*sluice, f"{ACTIVATION_CHECKPOINTING}=none", "parallel.zero=1"))  # fmt: skip
    yield Row("Sluice, micro-batch 4, moments bf16", "speed", (*sluice, "optimizer.state={moments: bf16}"))
    yield Row("Sluice, micro-batch 4, fp8", "speed", (*sluice, "train.precision=fp8"))


def rows_correct(small: bool, overrides: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of the suite `correct`, which check correctness.

    Args:
        small: whether to use a small model, to try out the suite.
        overrides: config overrides of all rows.
    """
    for name in ("ceilings", "products", "layouts", "stops", "stops-compiled", "chain", "saves"):
        yield Row(name, "correctness", (name, *["small"] * small, *overrides))


def measure_row(row: Row, limit_s: float, folder: Path) -> dict[str, Any]:
    """Run a row in a process and return its result.

    Args:
        row: the row.
        limit_s: seconds after which the process is killed.
        folder: folder where the output of a failed row is written.

    Returns:
        The JSON object that the process printed, with the seconds of the process and the medians of the GPU's samples.
        If the process printed no result, the key `failed` describes the error.
    """
    command = [sys.executable, "-m", f"benchmarks.gpu.{row.module}", *row.arguments]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sluice-", ignore_cleanup_errors=True) as temporary:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**DEFAULT_ENV, **os.environ, "TMPDIR": temporary}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        samples: list[tuple[float, list[str]]] = []
        timed_out = False
        try:
            with sample_gpu(samples):
                stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # The process group includes a train stage that the row started.
            stdout, stderr = process.communicate()
            timed_out = True
    duration = {"seconds": round(time.monotonic() - start, 1)}
    # NCCL's log may follow the result, and a process may fail after it has printed its result.
    for line in reversed(stdout.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(result := json.loads(line), dict):
                # `between` has the start and the end of the measured steps.
                start_time, end_time = result.pop("between", (0.0, 0.0))
                return result | duration | summarize_samples(samples, start_time, end_time)
    log = folder / f"{re.sub(r'[^A-Za-z0-9._]+', '-', row.name)}.log"
    log.write_text(f"{stdout}\n{stderr}")
    if timed_out:
        return {"failed": f"not done in {limit_s:.0f} s"} | duration
    return {"failed": describe_failure(stderr) or f"exit {process.returncode}"} | duration


def describe_failure(stderr: str) -> str:
    """Return the last error in the output of a process, without the advice that torch prints after its errors."""
    if "OutOfMemoryError" in stderr:
        return "out of memory"
    lines = [line for line in stderr.splitlines() if line.strip() and "Warning: " not in line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Wrong)\b", line)]
    return (errors or lines or [""])[-1][:200]


@contextlib.contextmanager
def sample_gpu(samples: list[tuple[float, list[str]]]) -> Iterator[None]:
    """Sample clock, power and temperature with `nvidia-smi` during the `with` block.

    Args:
        samples: list to which the time and the values of each sample are appended. Without `nvidia-smi`, nothing is
            appended.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    fields = ",".join(NVIDIA_SMI_FIELDS)
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    stop = threading.Event()

    def sample_until_stopped() -> None:
        """Append a sample every half second. Return at the end of the block, or if `nvidia-smi` does not work."""
        while not stop.wait(0.5):
            try:
                output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
            except (OSError, subprocess.TimeoutExpired):
                return
            samples.append((time.time(), output.split(",")))

    sampler = threading.Thread(target=sample_until_stopped)
    sampler.start()
    try:
        yield
    finally:
        stop.set()
        sampler.join()


def summarize_samples(samples: Iterable[tuple[float, list[str]]], start: float, end: float) -> dict[str, float]:
    """Return the median of each field of NVIDIA_SMI_FIELDS that has numeric values between two times."""
    lines = [values for sample_time, values in samples if start <= sample_time <= end]
    medians: dict[str, float] = {}
    for column, name in enumerate(NVIDIA_SMI_FIELDS.values()):
        values = [line[column] for line in lines if len(line) == len(NVIDIA_SMI_FIELDS)]
        # A value may be "[N/A]" (ValueError), or there may be no samples (StatisticsError).
        with contextlib.suppress(ValueError, statistics.StatisticsError):
            medians[name] = statistics.median(map(float, values))
    return medians


def read_device_name() -> str:
    """Return the name of the GPU; `cpu` without a GPU.

    A child process queries the name, because a CUDA context needs half a gibibyte of GPU memory.
    """
    query = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"
    return subprocess.run([sys.executable, "-c", query], capture_output=True, text=True, timeout=120).stdout.strip()


def run_rows(rows: Iterable[Row], file: Path, limit_s: float, device: str) -> bool:
    """Measure the rows that have no good result in `file` for this device, until the time limit.

    Each row except the last may take at most a third of the time, so that time remains for other rows if a row hangs.

    Returns:
        True if all rows have good results.
    """
    end = time.monotonic() + limit_s
    rows = list(rows)
    good_rows = {
        name
        for (name, result_device), result in read_results(file).items()
        if result_device == device and not result.keys() & PROBLEMS
    }
    all_good = True
    with file.open("a") as lines:
        for row in rows:
            if row.name in good_rows:
                print(f"{row.name}: measured before", flush=True)
                continue
            remaining_s = end - time.monotonic()
            row_limit_s = remaining_s if row == rows[-1] else min(remaining_s, max(MIN_ROW_S, limit_s / 3))
            result: dict[str, Any] = {"failed": "no time was left"}
            if remaining_s > MIN_ROW_S:
                result = measure_row(row, row_limit_s, file.parent)
            all_good &= not result.keys() & PROBLEMS
            lines.write(json.dumps({"row": row.name, "device": device, **result}) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
            print(f"{row.name}: {_format_result(result)}", flush=True)
    return all_good


def read_results(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the last result of each row on each device, by (name of the row, name of the device)."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {(result["row"], result["device"]): result for result in map(json.loads, lines)}


def _format_result(result: dict[str, Any]) -> str:
    """Describe a result in one line."""
    if "failed" in result:
        return str(result["failed"])
    if "median_s" not in result:
        return json.dumps(result)
    mfu = result["tflops"] / (get_peak_tflops(result["device"]) or float("nan"))
    memory = f", {result['allocated_gib']:.1f} GiB" if "allocated_gib" in result else ""
    samples = "".join(f", {result[name]:.0f} {unit}" for name, unit in UNITS_BY_FIELD.items() if name in result)
    return f"{result['tokens_per_s']:,.0f} tokens/s, MFU {mfu:.1%}{memory}, spread {result['spread']:.1%}{samples}"


def write_gpu_table(folder: Path) -> None:
    """Write benchmarks/results/gpu.md from the results of all suites in the folder.

    The page has a table of the rows that measure steps, and below it a table of the checks and failed rows.
    """
    rows = []
    other_rows = []
    devices = set()
    for file in sorted(folder.glob("*.jsonl")):
        for result in read_results(file).values():
            first_cells = [result["device"], file.stem, result["row"]]
            if "median_s" not in result:
                other_rows.append([*first_cells, _format_check(result)])
                continue
            devices.add(f"{result['device']}, torch {result['torch']}")
            peak = get_peak_tflops(result["device"]) or float("nan")
            rows.append([
                *first_cells, f"{result['tokens_per_s']:,.0f}",
                f"{result['median_s']:.3f}", f"{result['spread']:.1%}", f"{result['tflops'] / peak:.1%}",
                f"{result['tflops_without_embedding'] / peak:.1%}",
                f"{result['allocated_gib']:.1f}" if "allocated_gib" in result else "", str(result.get("retries", "")),
                *(f"{result[name]:.0f}" if name in result else "" for name in UNITS_BY_FIELD),
            ])  # fmt: skip
    header = ["device", "suite", "row", "tokens/s", "median step (s)", "spread", "MFU", "without embedding", "GiB"]
    header += ["retries", *UNITS_BY_FIELD.values()]
    # `write_table` appends the description of this machine to the note.
    note = f"{'; '.join(sorted(devices))}.\n\n{DEFINITION}\n\nWritten on"
    write_table("gpu", "One GPU", note, header, rows, (["device", "suite", "row", "result"], other_rows))


def _format_check(result: dict[str, Any]) -> str:
    """Describe the result of a check or of a failed row in one line."""
    if "failed" in result or "wrong" in result:
        return str(result.get("failed") or f"wrong: {result['wrong']}")

    def format_value(value: Any) -> str:
        """Return a value with four significant digits, and a digest with its first eight."""
        if isinstance(value, dict):
            return ", ".join(f"{key} {format_value(entry)}" for key, entry in value.items())
        if isinstance(value, list):
            return ", ".join(map(format_value, value))
        return value[:8] if isinstance(value, str) else f"{value:.4g}"

    values = {key: value for key, value in result.items() if key not in ("row", "device", "seconds")}
    return "; ".join(f"{key}: {format_value(value)}" for key, value in values.items())


def main() -> None:
    """Run a suite or write the table. The exit code is 0 if all rows of the suite have good results."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu")
    parser.add_argument("suite", choices=["correct", "8b", "1b", "table"])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", choices=["whole", "small"], default="whole")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for all rows: train.compile=…")
    arguments = parser.parse_args()
    if arguments.suite == "table":
        write_gpu_table(arguments.out)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    is_small = arguments.model == "small"
    overrides = tuple(arguments.overrides)
    model = (*(SMALL_MODEL if is_small else ()), *overrides)
    rows = {"8b": rows_8b(arguments.steps, model), "1b": rows_1b(arguments.steps, model)}
    rows["correct"] = rows_correct(is_small, overrides)
    print(DEFINITION, flush=True)
    file = arguments.out / f"{arguments.suite}.jsonl"
    all_good = run_rows(rows[arguments.suite], file, arguments.limit, read_device_name())
    sys.exit(0 if all_good else 1)


if __name__ == "__main__":
    main()
