"""Measure the steps of benchmarks/gpu/speed.py in a real run: prepare, shard and `python -m pipeline train`.

    python -m benchmarks.gpu.trainer_speed STEPS CONFIG [key=value …]     print one measurement as JSON

The times come from metrics.jsonl. The run is created in a temporary directory. After the measured steps, the rank is
killed with SIGKILL, because a checkpoint of eight billion parameters would fill the disk of a small machine.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import IS_FAKE_GPU, ONE_GPU_OVERRIDES, ROOT
from benchmarks.gpu.speed import TOKENS, WARM_UP, add_rates, check_fits_gpu

LIMIT_S = 170.0
"""Time limit of a stage. It is less than the time limit of a row (benchmarks/gpu/__main__.py).

This process can therefore report that a stage takes too long.
"""
QUERY_GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu'); "
QUERY_GPU += "print(torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 'inf')"
"""Program that prints the name and the memory of the GPU."""


def write_text_and_tokenizer(folder: Path, vocab: int, tokens: int) -> list[str]:
    """Write a text of at least `tokens` words, and a tokenizer of `vocab` tokens, in which each word is one token.

    Returns:
        Config overrides: the paths of the text and the tokenizer, and the directory of the run, `FOLDER/runs/trained`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    end = "<|endoftext|>"
    # The last id is the end token, which the text must not contain.
    names = {f"w{number}": number for number in range(vocab - 1)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([end])
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = random.Random(1)
    document_length = 1000
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        for _ in range(tokens // document_length + 1):
            text = " ".join(f"w{generator.randrange(vocab - 1)}" for _ in range(document_length))
            file.write(json.dumps({"text": text}) + "\n")
    return [
        f"data.source={folder}/text.jsonl",
        f"data.tokenizer={{kind: file, path: {folder}/tokenizer.json, vocab_size: {vocab}}}",
        f"run.root={folder}/runs",
        "run.name=trained",
    ]


def run_stage(
    name: str, config: str | Path, *overrides: str, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run a stage in a process. Raises RuntimeError with the end of the output if the stage fails.

    Args:
        name: name of the stage.
        config: path of a config or a run directory.
        overrides: config overrides.
        limit_s: seconds after which the process is killed.
    """
    command = [sys.executable, "-m", "pipeline", name, str(config), *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    if done.returncode:
        raise RuntimeError(f"{name}: exit {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done


def measure(config_file: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """Run the train stage in a separate process, and return the result of `steps` steps after WARM_UP steps."""
    from pipeline.config.read import load_config
    from pipeline.parallel.mesh import resolve_layout

    config = load_config(Path(config_file), overrides)
    length = config.data.sequence_length
    vocab = config.data.tokenizer.vocab_size
    has_gpu = os.path.exists("/dev/nvidiactl") or IS_FAKE_GPU
    # A child process queries the GPU, because a CUDA context needs half a gibibyte of GPU memory.
    query = subprocess.run([sys.executable, "-c", QUERY_GPU], capture_output=True, text=True, timeout=120, check=True)
    device, gpu_bytes = query.stdout.splitlines()
    check_fits_gpu(config, resolve_layout(config, 1), vocab, float(gpu_bytes))
    batch = max(4, TOKENS // length) if has_gpu else 4
    step_count = WARM_UP + steps
    with tempfile.TemporaryDirectory(prefix="sluice-") as temporary:
        folder = Path(temporary)
        run_overrides = [
            *ONE_GPU_OVERRIDES,
            *overrides,
            *write_text_and_tokenizer(folder, vocab, (step_count + 4) * batch * (length + 1)),
        ]
        run_overrides += [
            f"train.global_batch={batch}",
            "train.steps=1000",
            "optimizer.warmup_steps=10",
            "data.held_out=0",
        ]
        for stage in ("prepare", "shard"):
            run_stage(stage, config_file, *run_overrides)
        run_dir = folder / "runs/trained"
        training = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "train", str(run_dir)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        deadline = time.monotonic() + LIMIT_S
        start_time = 0.0
        try:
            while len(lines := _read_complete_lines(run_dir / "metrics.jsonl")) < step_count:
                if training.poll() is not None or time.monotonic() > deadline:
                    training.kill()
                    raise RuntimeError(f"only {len(lines)} steps completed\n{training.communicate()[0][-3000:]}")
                start_time = start_time or (time.time() if len(lines) >= WARM_UP else 0.0)
                time.sleep(0.2)
            measured_interval = [start_time, time.time()]
        finally:
            training.kill()
            training.wait(60)
    counted = [line["step_time_s"] for line in lines[WARM_UP:step_count]]
    import torch

    result = {
        "device": device, "torch": torch.__version__,
        "between": measured_interval, "step_s": counted, "median_s": statistics.median(counted),
        "spread": (max(counted) - min(counted)) / statistics.median(counted),
        "losses": [lines[0]["loss"], lines[step_count - 1]["loss"]],
        "data_wait_s": max(line["data_wait_s"] for line in lines[WARM_UP:step_count]),
        **({"allocated_gib": max(line["memory_gb"] for line in lines[:step_count]) * 1e9 / 2**30} if has_gpu else {}),
    }  # fmt: skip
    return add_rates(result, config.model, vocab, length, batch * length)


def _read_complete_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a .jsonl file, without an incomplete last line; [] if the file does not exist."""
    return (
        [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    )


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[2], sys.argv[3:], int(sys.argv[1]))), flush=True)
