"""The sequences of rows, each within its time: see benchmarks/gpu/__init__.py."""

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

ONE_GPU, ONE_B = "configs/lm-8b-1gpu.yaml", "configs/lm-1b.yaml"
BF16 = "optimizer.state={master: none, moments: bf16}"
FP32 = "optimizer.state={master: fp32, moments: fp32}"
RECOMPUTE = "parallel.activation_checkpointing"
SHORTEST_S = 25.0
"""With less time left no row is begun."""
KEPT = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/sluice-graphs"}
"""The environment of each row, unless it is there already."""
if not IS_FAKE_GPU:
    # what lies between 119 GiB of tensors may take the rest of the card; both sides have it
    KEPT["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

SAMPLED = {"clocks.sm": "clock_mhz", "power.draw": "power_w", "temperature.gpu": "temperature_c"}
"""What `nvidia-smi` is asked, and its name in a row."""
NOT_WELL = {"failed", "wrong"}
UNITS = {"clock_mhz": "MHz", "power_w": "W", "temperature_c": "°C"}


class Row(NamedTuple):
    """A row's name, and the module of this folder that measures it, with its arguments."""

    name: str
    module: str
    arguments: tuple[str, ...]


def rows_8b(steps: int, model: tuple[str, ...]) -> Iterator[Row]:
    """One model, most wanted first; the first one twice."""

    def row(name: str, *more: str) -> Row:
        return Row(name, "speed", (str(steps), ONE_GPU, *model, *more))

    kept = row("weights fp32, moments bf16, selective")
    yield kept
    yield row("all bf16, full", BF16, f"{RECOMPUTE}=full")
    yield row("all bf16, selective", BF16)
    yield row("fp8 rowwise, weights fp32, moments bf16, selective", "train.precision=fp8", "train.fp8_scales=rowwise")
    yield Row("through the trainer: weights fp32, moments bf16, selective", "trained", (str(steps), ONE_GPU, *model))
    yield kept._replace(name=f"{kept.name}, again")
    yield row("weights bf16, moments int8, selective", "optimizer.state={master: none, moments: int8}")  # fits 80 GB
    yield row("weights fp32, cast once a step, moments bf16, selective, micro-batch 1", "parallel.zero=1",
              "train.micro_batch=1")  # fmt: skip
    yield row(f"{kept.name}, FlashAttention for cuDNN's", "--flash")
    yield row("weights fp32, moments int8, selective", "optimizer.state={moments: int8}")
    yield row("fp8 tensorwise, weights fp32, moments bf16, selective", "train.precision=fp8",
              "train.fp8_scales=tensorwise")  # fmt: skip
    yield row("weights fp32, moments bf16, selective, whole logits, micro-batch 1", "train.loss_chunk=null",
              "train.micro_batch=1")  # fmt: skip
    # of the rows above two fit a card of 80 GB, which takes these
    small = (BF16, f"{RECOMPUTE}=full")
    yield Row("through the trainer: all bf16, full", "trained", (str(steps), ONE_GPU, *model, *small))
    yield row("all bf16, full, again", *small)
    yield row("all bf16, selective, micro-batch 1", BF16, "train.micro_batch=1")
    yield row("fp8 rowwise, all bf16, full", *small, "train.precision=fp8", "train.fp8_scales=rowwise")


def rows_1b(steps: int, model: tuple[str, ...]) -> Iterator[Row]:
    """Ours and torchtitan's in turn: all fp32 states, as torchtitan has them; then what either gains by other means."""
    untied = "model.tie_word_embeddings=false"
    for again in ("", ", again"):
        ours = (str(steps), ONE_B, untied, "train.loss_chunk=2048", *model)
        yield Row(f"ours, micro-batch 4, nothing recomputed{again}", "speed", (*ours, f"{RECOMPUTE}=none"))
        yield Row(f"torchtitan, micro-batch 4, nothing recomputed{again}", "titan", (str(steps), "4", "none", *model))
    for again in ("", ", again"):
        yield Row(f"ours, micro-batch 8, selective{again}", "speed",
                  (*ours, f"{RECOMPUTE}=selective", "train.micro_batch=8"))  # fmt: skip
        yield Row(f"torchtitan, micro-batch 8, selective{again}", "titan", (str(steps), "8", "selective", *model))
    yield Row("ours, micro-batch 4, nothing recomputed, cast once a step", "speed",
              (*ours, f"{RECOMPUTE}=none", "parallel.zero=1"))  # fmt: skip
    yield Row("ours, micro-batch 4, moments bf16", "speed", (*ours, "optimizer.state={moments: bf16}"))
    yield Row("ours, micro-batch 4, fp8", "speed", (*ours, "train.precision=fp8"))


def rows_correct(small: bool, overrides: tuple[str, ...]) -> Iterator[Row]:
    """What must hold before any speed counts."""
    for name in ("ceilings", "products", "layouts", "stops", "stops-compiled", "chain", "saves"):
        yield Row(name, "correct", (name, *["small"] * small, *overrides))


def measure(row: Row, limit_s: float, folder: Path) -> dict[str, Any]:
    """What a row's process says at its end; `failed`: a few words where it did not come to that (a wrong answer did).

    All that a failed one said is left in `folder`; what was compiled in a folder of all rows, for those to come.
    """
    command = [sys.executable, "-m", f"benchmarks.gpu.{row.module}", *row.arguments]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sluice-", ignore_cleanup_errors=True) as made:
        done = subprocess.Popen(
            command, cwd=ROOT, env={**KEPT, **os.environ, "TMPDIR": made}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        samples: list[tuple[float, list[str]]] = []
        late = False
        try:
            with sampled(samples):
                stdout, stderr = done.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)  # a training that the row began, too, or it would keep the card
            stdout, stderr, late = *done.communicate(), True
    took = {"seconds": round(time.monotonic() - began, 1)}
    # NCCL's log may stand behind the answer, and a process that has answered may still fail to leave
    for line in reversed(stdout.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                between = found.pop("between", (0.0, 0.0))
                return found | took | during(samples, *between)
    said = folder / f"{re.sub(r'[^A-Za-z0-9._]+', '-', row.name)}.log"
    said.write_text(f"{stdout}\n{stderr}")
    return {"failed": f"not done in {limit_s:.0f} s" if late else reason(stderr) or f"exit {done.returncode}"} | took


def reason(stderr: str) -> str:
    """What a process failed of: its last error, and not the advice that torch gives behind it."""
    if "OutOfMemoryError" in stderr:
        return "out of memory"
    lines = [line for line in stderr.splitlines() if line.strip() and "Warning: " not in line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Wrong)\b", line)]
    return (errors or lines or [""])[-1][:200]


@contextlib.contextmanager
def sampled(samples: list[tuple[float, list[str]]]) -> Iterator[None]:
    """Add what `nvidia-smi` says of the GPU, asked again and again, to `samples`, with the time; where there is one."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(SAMPLED)}", "--format=csv,noheader,nounits"]
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.5):
            try:
                said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
            except (OSError, subprocess.TimeoutExpired):
                return
            samples.append((time.time(), said.split(",")))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()


def during(samples: Iterable[tuple[float, list[str]]], since: float, until: float) -> dict[str, float]:
    """The medians between two times, while steps were made; of what was told as a number."""
    lines = [values for at, values in samples if since <= at <= until]
    told: dict[str, float] = {}
    for column, name in enumerate(SAMPLED.values()):
        numbers = [line[column] for line in lines if len(line) == len(SAMPLED)]
        with contextlib.suppress(ValueError, statistics.StatisticsError):  # "[N/A]"; no line at all
            told[name] = statistics.median(map(float, numbers))
    return told


def device() -> str:
    """The name of the GPU; asked elsewhere, as whoever asks takes half a gibibyte of it."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120).stdout.strip()


def run(rows: Iterable[Row], file: Path, limit_s: float, on: str) -> bool:
    """Measure the rows that `file` lacks of the device `on` until the time is over; whether all of them are well.

    No row but the last takes more than a third of the time, so that one that hangs leaves some to others.
    """
    end, rows = time.monotonic() + limit_s, list(rows)
    known = {name for (name, where), found in answers(file).items() if where == on and not found.keys() & NOT_WELL}
    well = True
    with file.open("a") as lines:
        for row in rows:
            if row.name in known:
                print(f"{row.name}: known", flush=True)
                continue
            left, most = end - time.monotonic(), max(SHORTEST_S, limit_s / 3)
            found = {"failed": "no time was left"}
            if left > SHORTEST_S:
                found = measure(row, left if row == rows[-1] else min(left, most), file.parent)
            well &= not found.keys() & NOT_WELL
            lines.write(json.dumps({"row": row.name, "device": on, **found}) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
            print(f"{row.name}: {_short(found)}", flush=True)
    return well


def answers(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last that each row said on each device, by their names."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {(found["row"], found["device"]): found for found in map(json.loads, lines)}


def _short(found: dict[str, Any]) -> str:
    if "failed" in found:
        return str(found["failed"])
    if "median_s" not in found:
        return json.dumps(found)
    share = found["tflops"] / (get_peak_tflops(found["device"]) or float("nan"))
    held = f", {found['allocated_gib']:.1f} GiB" if "allocated_gib" in found else ""
    told = "".join(f", {found[name]:.0f} {unit}" for name, unit in UNITS.items() if name in found)
    return f"{found['tokens_per_s']:,.0f} tokens/s, MFU {share:.1%}{held}, spread {found['spread']:.1%}{told}"


def write(folder: Path) -> None:
    """The committed table of all that the folder has."""
    rows, names = [], set()
    for file in sorted(folder.glob("*.jsonl")):
        for found in answers(file).values():
            if "median_s" not in found:
                more = {k: v for k, v in found.items() if k not in ("row", "device", "seconds")}
                words = found.get("failed") or json.dumps(more)
                rows.append([found["device"], file.stem, found["row"], words, *[""] * 9])
                continue
            names.add(f"{found['device']}, torch {found['torch']}")
            peak = get_peak_tflops(found["device"]) or float("nan")
            rows.append([
                found["device"], file.stem, found["row"], f"{found['tokens_per_s']:,.0f}", f"{found['median_s']:.3f}",
                f"{found['spread']:.1%}", f"{found['tflops'] / peak:.1%}",
                f"{found['tflops_without_embedding'] / peak:.1%}",
                f"{found['allocated_gib']:.1f}" if "allocated_gib" in found else "", str(found.get("retries", "")),
                *(f"{found[name]:.0f}" if name in found else "" for name in UNITS),
            ])  # fmt: skip
    header = ["device", "sequence", "row", "tokens/s", "median step (s)", "spread", "MFU", "without embedding", "GiB"]
    header += ["retries", *UNITS.values()]
    write_table("gpu", "One GPU", f"{'; '.join(sorted(names))}.\n\n{DEFINITION}\n\nWritten on", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu")
    parser.add_argument("sequence", choices=["correct", "8b", "1b", "table"])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", choices=["whole", "small"], default="whole")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all rows: train.compile=…")
    asked = parser.parse_args()
    if asked.sequence == "table":
        write(asked.out)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    small, overrides = asked.model == "small", tuple(asked.overrides)
    model = (*(SMALL_MODEL if small else ()), *overrides)
    rows = {"8b": rows_8b(asked.steps, model), "1b": rows_1b(asked.steps, model)}
    rows["correct"] = rows_correct(small, overrides)
    print(DEFINITION, flush=True)
    sys.exit(0 if run(rows[asked.sequence], asked.out / f"{asked.sequence}.jsonl", asked.limit, device()) else 1)


if __name__ == "__main__":
    main()
