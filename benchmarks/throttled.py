"""Measure how long a run waits for data on a slow file system, with and without copies on the node's local disk.

    python -m benchmarks.throttled [--steps 200] [--rate 8]     # needs root and cgroup v1 (tests/support/slow_mount.py)

The data is a file of 96 million uint16 tokens, which the run reads in place (`data.records: tokens`). A control group
limits how many bytes per second the rank reads from the file system. The page cache is empty at the start. One rank
trains with 64 samples of 129 tokens per step, from all parts of the file. Because the kernel reads ahead around each
sample, a step reads at least a megabyte.

- With `site.local_disk`, the rank first reads from the slow file system, and reads the copy as soon as the copy is
  complete. The benchmark then empties the page cache of the slow file system, so that any further read from this file
  system would wait.
- Without `site.local_disk`, the page cache keeps what was read. The waits end when the cache has the whole file. This
  would not happen with terabytes of data.

The results are the sums of `data_wait_s` and `step_time_s` in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.table import write_table
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from pipeline.run.events import LocalCopy
from pipeline.run.stages import load_stage_module
from tests.support.ranks import make_rank_info
from tests.support.slow_mount import SlowMount, find_slow_mount_problem, slow_mount
from tests.support.tiny import PassiveStopFlag, make_run, write_config

TRAINING_TIMEOUT_S = 400.0
"""Time limit of one run."""


def create_run_on_mount(mount: SlowMount, folder: Path, name: str, tokens: int, *overrides: str) -> Run:
    """Create a run that reads a file of tokens on the mount, and run its stages prepare and shard.

    The file is divided into eight shards.

    Args:
        mount: the slow file system. The file of tokens is created if it does not exist.
        folder: where the run is created, and a small run whose tokenizer is used.
        name: name of the run.
        tokens: number of tokens of the file.
        overrides: config overrides.
    """
    tokenizer = folder / "text/runs/tiny/data/tokenizer.json"
    file = mount.folder / "tokens.bin"
    if not file.exists():
        np.random.default_rng(0).integers(0, 299, tokens, dtype=np.uint16).tofile(file)
        (folder / "text").mkdir()
        make_run(folder / "text")
    tokenizer_config = json.dumps({"kind": "file", "path": str(tokenizer)})
    run_overrides = (
        f"data.source={file}",
        "data.records=tokens",
        f"data.tokenizer={tokenizer_config}",
        "data.verify=sizes",
        "data.held_out=0",
        f"data.shard_tokens={tokens // 8}",
        "checkpoint.every_steps=100000",
        "stages.train.tasks_per_node=1",
    )
    run = Run.create(load_config(write_config(folder, name), (*run_overrides, *overrides)))
    for stage in ("prepare", "shard"):
        load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    return run


def start_training(mount: SlowMount, run: Run, log: Path) -> subprocess.Popen[bytes]:
    """Start the train stage with the run's copy of the code, in the control group that limits reads from the mount.

    Args:
        mount: the slow file system, with its control group.
        run: the run.
        log: file for the output of the process.
    """
    command = mount.wrap_command([sys.executable, "-m", "pipeline", "train", str(run.path)])
    with open(log, "wb") as out:
        environment = {**os.environ, "PYTHONPATH": str(run.code_dir)}
        return subprocess.Popen(command, cwd=run.code_dir, env=environment, stdout=out, stderr=subprocess.STDOUT)


def read_steps(run: Run) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl."""
    return list(read_jsonl(run.path / "metrics.jsonl"))


def has_complete_copies(run: Run) -> bool:
    """Return whether the copies on the local disk are complete. Raises RuntimeError if copying failed."""
    reports = run.read_events("train", LocalCopy)
    if reports and reports[0].error is not None:
        raise RuntimeError(reports[0].error)
    return bool(reports)


def measure_training(
    mount: SlowMount, run: Run, bytes_per_s: int, log: Path
) -> tuple[list[dict[str, float]], int, int]:
    """Run the train stage while the read bandwidth from the mount is limited to `bytes_per_s`.

    Returns:
        The lines of metrics.jsonl; the number of steps until the copies were complete; and the bytes read from the
        mount's device afterwards. Without copies, the number of steps is 0, and all bytes are counted.
    """
    mount.drop_page_cache()
    mount.limit_reads(bytes_per_s)
    process = start_training(mount, run, log)
    steps_until_copied = 0
    bytes_until_copied = 0
    deadline = time.monotonic() + TRAINING_TIMEOUT_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if not steps_until_copied and has_complete_copies(run):
                steps_until_copied = len(read_steps(run)) + 1  # including the step that is running now
                mount.drop_page_cache()
                bytes_until_copied = mount.count_bytes_read()
            time.sleep(0.02)
        if process.poll() != 0:
            raise RuntimeError(log.read_text()[-2000:])
        return read_steps(run), steps_until_copied, mount.count_bytes_read() - bytes_until_copied
    finally:
        mount.limit_reads(0)
        process.kill()
        process.wait(60)


def main() -> None:
    """Measure a run without and a run with copies on the local disk, and write benchmarks/results/throttled.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=8, help="MB/s")
    arguments = parser.parse_args()
    if reason := find_slow_mount_problem():
        raise SystemExit(reason)
    tokens = 96_000_000
    bytes_per_s = int(arguments.rate * 1e6)
    sizes = ["data.sequence_length=128", "train.global_batch=64", "train.micro_batch=64", "train.threads=1"]
    sizes += [f"train.steps={arguments.steps}", "model.dim=32"]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, slow_mount(tokens * 2) as mount:
        folder = Path(name)
        (folder / "disk").mkdir()

        def add_row(copies: str, phase: str, steps: list[dict[str, float]], mb_read: str = "") -> None:
            """Add a row of the table from the lines of metrics.jsonl for some steps."""
            step_s, wait_s = (sum(line[key] for line in steps) for key in ("step_time_s", "data_wait_s"))
            figures = (f"{len(steps)}", f"{step_s / len(steps):.3f}", f"{wait_s:.3f}", f"{100 * wait_s / step_s:.2f} %")
            rows.append([copies, phase, *figures, mb_read])

        run = create_run_on_mount(mount, folder, "slow", tokens, *sizes)
        steps, _, _ = measure_training(mount, run, bytes_per_s, folder / "slow.log")
        add_row("without", "all steps", steps)
        local_disk = f"site.local_disk={folder}/disk"
        run = create_run_on_mount(mount, folder, "copied", tokens, *sizes, local_disk)
        steps, copied_at, bytes_read = measure_training(mount, run, bytes_per_s, folder / "copied.log")
        add_row("with `site.local_disk`", "until the copy is complete", steps[:copied_at])
        add_row("with `site.local_disk`", "afterwards", steps[copied_at:], f"{bytes_read / 1e6:.1f}")
    write_table(
        "throttled",
        "Waiting for data on a slow file system",
        f"{tokens * 2 / 1e6:.0f} MB of tokens on ext4, from which the process can read {arguments.rate:g} MB/s "
        "(cgroup, blkio.throttle.read_bps_device). One process, 64 samples of 129 tokens per step. Target: waits are "
        "less than 1 % of the step time when the copy is complete. Method: `benchmarks/throttled.py`. torch "
        f"{torch.__version__}.",
        [
            "copies",
            "phase",
            "steps",
            "s per step",
            "sum of data_wait_s",
            "share of the step time",
            "MB read of the mount",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
