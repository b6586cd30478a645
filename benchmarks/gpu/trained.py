"""The same steps through the whole product: words to shards, then `python -m pipeline train`, times from metrics.jsonl.

    python -m benchmarks.gpu.trained STEPS CONFIG [key=value …]     one measurement, as JSON

The run is made in a temporary folder. Training is ended by SIGKILL when it has made its steps: a checkpoint of eight
billion parameters would fill the disk of a small machine.
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
from benchmarks.gpu.speed import TOKENS, WARM_UP, rates, refuse_too_large

LIMIT_S = 170.0
"""Less than a row may take (benchmarks/gpu/__main__.py), so that its own words are told."""
GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu'); "
GPU += "print(torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 'inf')"


def words(folder: Path, vocab: int, tokens: int) -> list[str]:
    """Text of `tokens` words, and a tokenizer that knows `vocab` of them; the keys that name both."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    end = "<|endoftext|>"
    names = {f"w{number}": number for number in range(vocab - 1)}  # the end is no word: text may not name it
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([end])
    tokenizer.save(str(folder / "tokenizer.json"))
    draw, long = random.Random(1), 1000
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        for _ in range(tokens // long + 1):
            text = " ".join(f"w{draw.randrange(vocab - 1)}" for _ in range(long))
            file.write(json.dumps({"text": text}) + "\n")
    known = f"{{kind: file, path: {folder}/tokenizer.json, vocab_size: {vocab}}}"
    return [
        f"data.source={folder}/text.jsonl",
        f"data.tokenizer={known}",
        f"run.root={folder}/runs",
        "run.name=trained",
    ]


def stage(name: str, config: str | Path, *overrides: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run one stage in a process; its output. Raises RuntimeError where it fails."""
    command = [sys.executable, "-m", "pipeline", name, str(config), *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    if done.returncode:
        raise RuntimeError(f"{name}: exit {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done


def measure(config_file: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """One measurement; the training is a process of its own."""
    from pipeline.config.read import load_config
    from pipeline.parallel.mesh import resolve_layout

    asked = load_config(Path(config_file), overrides)
    length, vocab = asked.data.sequence_length, asked.data.tokenizer.vocab_size
    cuda = os.path.exists("/dev/nvidiactl") or IS_FAKE_GPU
    # asked elsewhere: whoever asks takes half a gibibyte of it
    told = subprocess.run([sys.executable, "-c", GPU], capture_output=True, text=True, timeout=120, check=True)
    name, size = told.stdout.splitlines()
    refuse_too_large(asked, resolve_layout(asked, 1), vocab, float(size))
    batch, wanted = max(4, TOKENS // length) if cuda else 4, WARM_UP + steps
    with tempfile.TemporaryDirectory(prefix="sluice-") as made:
        folder = Path(made)
        more = [*ONE_GPU_OVERRIDES, *overrides, *words(folder, vocab, (wanted + 4) * batch * (length + 1))]
        more += [f"train.global_batch={batch}", "train.steps=1000", "optimizer.warmup_steps=10", "data.held_out=0"]
        for before in ("prepare", "shard"):
            stage(before, config_file, *more)
        run = folder / "runs/trained"
        training = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "train", str(run)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        deadline, since = time.monotonic() + LIMIT_S, 0.0
        try:
            while len(lines := _lines(run / "metrics.jsonl")) < wanted:
                if training.poll() is not None or time.monotonic() > deadline:
                    training.kill()
                    raise RuntimeError(f"{len(lines)} steps were made\n{training.communicate()[0][-3000:]}")
                since = since or (time.time() if len(lines) >= WARM_UP else 0.0)
                time.sleep(0.2)
            between = [since, time.time()]
        finally:
            training.kill()
            training.wait(60)
    counted = [line["step_time_s"] for line in lines[WARM_UP:wanted]]
    import torch

    found = {
        "device": name, "torch": torch.__version__,
        "between": between, "step_s": counted, "median_s": statistics.median(counted),
        "spread": (max(counted) - min(counted)) / statistics.median(counted),
        "losses": [lines[0]["loss"], lines[wanted - 1]["loss"]],
        "data_wait_s": max(line["data_wait_s"] for line in lines[WARM_UP:wanted]),
        **({"allocated_gib": max(line["memory_gb"] for line in lines[:wanted]) * 1e9 / 2**30} if cuda else {}),
    }  # fmt: skip
    return rates(found, asked.model, vocab, length, batch * length)


def _lines(file: Path) -> list[dict[str, Any]]:
    """All whole lines."""
    return (
        [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    )


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[2], sys.argv[3:], int(sys.argv[1]))), flush=True)
