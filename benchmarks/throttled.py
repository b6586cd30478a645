"""What a training waits for data that lies on a slow file system, without and with copies on the node's own disk.

    python -m benchmarks.throttled [--steps 200] [--rate 8]     # root, and cgroup v1: tests/support/slow_mount.py

A file of 96 million uint16 tokens, used where it lies (`data.records: tokens`), on a file system of which the training
may read so many MB a second, with nothing of it in the page cache. One process, 64 samples of 129 tokens a step, drawn
from all over the file. With `site.local_disk` the training begins on the slow file system and moves to the copy when
that is whole; then the page cache forgets the slow file system again, so that whoever went on reading there would wait.
Without it the page cache keeps what was read: waits end when it has all of the file, which it would not of terabytes.
The figures are `data_wait_s` and `step_time_s` of metrics.jsonl, summed over the steps that are named; a step reads a
megabyte or more, as the kernel reads ahead around each sample.
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
from tests.support.tiny import HarmlessFlag, make_run, write_config

LIMIT_S = 400.0


def run_on(mount: SlowMount, folder: Path, name: str, tokens: int, *overrides: str) -> Run:
    """A run that is ready to train on so many tokens in a file on the mount, in parts of an eighth of it."""
    tokenizer, file = folder / "text/runs/tiny/data/tokenizer.json", mount.folder / "tokens.bin"
    if not file.exists():
        np.random.default_rng(0).integers(0, 299, tokens, dtype=np.uint16).tofile(file)
        (folder / "text").mkdir()
        make_run(folder / "text")
    given = {"kind": "file", "path": str(tokenizer)}
    data = (f"data.source={file}", "data.records=tokens", f"data.tokenizer={json.dumps(given)}", "data.verify=sizes")
    more = (
        "data.held_out=0",
        f"data.shard_tokens={tokens // 8}",
        "checkpoint.every_steps=100000",
        "stages.train.tasks_per_node=1",
    )
    run = Run.create(load_config(write_config(folder, name), (*data, *more, *overrides)))
    for stage in ("prepare", "shard"):
        load_stage_module(stage).run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())
    return run


def start(mount: SlowMount, run: Run, log: Path) -> subprocess.Popen[bytes]:
    """The training, by the run's own copy of the code, as a process that reads the mount slowly."""
    command = mount.run_in_group([sys.executable, "-m", "pipeline", "train", str(run.path)])
    with open(log, "wb") as out:
        environment = {**os.environ, "PYTHONPATH": str(run.code_dir)}
        return subprocess.Popen(command, cwd=run.code_dir, env=environment, stdout=out, stderr=subprocess.STDOUT)


def steps_of(run: Run) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return list(read_jsonl(run.path / "metrics.jsonl"))


def copied(run: Run) -> bool:
    """Whether the node's copies are whole. Raises RuntimeError where there will be none."""
    reports = run.read_events("train", LocalCopy)
    if reports and reports[0].error is not None:
        raise RuntimeError(reports[0].error)
    return bool(reports)


def waited(mount: SlowMount, run: Run, rate: int, log: Path) -> tuple[list[dict[str, float]], int, int]:
    """The training's steps, how many were done when the copies were there, and bytes of the slow device since."""
    mount.drop_page_cache()
    mount.limit_reads(rate)
    process, moved, read = start(mount, run, log), 0, 0
    deadline = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if not moved and copied(run):
                moved = len(steps_of(run)) + 1
                mount.drop_page_cache()
                read = mount.count_bytes_read()
            time.sleep(0.02)
        if process.poll() != 0:
            raise RuntimeError(log.read_text()[-2000:])
        return steps_of(run), moved, mount.count_bytes_read() - read
    finally:
        mount.limit_reads(0)
        process.kill()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=8, help="MB/s")
    arguments = parser.parse_args()
    if reason := find_slow_mount_problem():
        raise SystemExit(reason)
    tokens, rate = 96_000_000, int(arguments.rate * 1e6)
    sizes = ["data.sequence_length=128", "train.global_batch=64", "train.micro_batch=64", "train.threads=1"]
    sizes += [f"train.steps={arguments.steps}", "model.dim=32"]
    rows = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, slow_mount(tokens * 2) as mount:
        folder = Path(name)
        (folder / "disk").mkdir()
        for kind, more in (("slow", ()), ("copied", (f"site.local_disk={folder}/disk",))):
            run = run_on(mount, folder, kind, tokens, *sizes, *more)
            steps, moved, read = waited(mount, run, rate, folder / f"{kind}.log")
            parts = {"slow mount alone": steps} if not more else {"until the copy is there": steps[:moved]}
            parts |= {"from then on": steps[moved:]} if more else {}
            for words, some in parts.items():
                step, wait = (sum(line[key] for line in some) for key in ("step_time_s", "data_wait_s"))
                since = f"{read / 1e6:.1f}" if words == "from then on" else ""
                share = f"{100 * wait / step:.2f} %"
                figures = (f"{len(some)}", f"{step / len(some):.3f}", f"{wait:.3f}", share)
                rows.append(["with `site.local_disk`" if more else "without", words, *figures, since])
    write_table(
        "throttled",
        "What a training waits for a slow file system",
        f"{tokens * 2 / 1e6:.0f} MB of tokens on ext4 that may be read at {arguments.rate:g} MB/s "
        "(cgroup, blkio.throttle.read_bps_device), one process, 64 samples of 129 tokens a step. Target: under 1 % of "
        f"the step once the copy is there. How it is measured: `benchmarks/throttled.py`. torch {torch.__version__}.",
        ["copies", "steps", "number", "s a step", "data_wait_s, sum", "of the step", "MB read of the mount"],
        rows,
    )


if __name__ == "__main__":
    main()
