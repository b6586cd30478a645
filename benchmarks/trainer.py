"""The trainer's overhead: Sluice with everything on against an equal model in a bare PyTorch DDP loop.

    python -m benchmarks.trainer [--steps 100] [--pairs 4]

Two figures, each as a ratio Sluice / bare from interleaved pairs of whole runs on two ranks:
- CPU seconds per step (user + system, all threads, both ranks), over the steps after the first five; Sluice with
  agreement on stopping, metrics, asynchronous checkpoints every 50 steps. Target: at most 1.00.
- start: CPU seconds from the start of the process to the end of the first step. Target: at most 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import write_table

ROOT = Path(__file__).resolve().parent.parent
SKIP = 5


def clock() -> float:
    """CPU seconds of this process, user and system, all threads."""
    return time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--child", choices=["sluice", "bare"])
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        (sluice if arguments.child == "sluice" else bare)(arguments.run, arguments.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        parent(Path(folder), arguments.steps, arguments.pairs)


def parent(folder: Path, steps: int, pairs: int) -> None:
    data = make_run(folder, "data", steps)
    results: dict[str, list[dict[str, float]]] = {"sluice": [], "bare": []}
    for pair in range(pairs + 1):  # the first pair warms the page cache and is not counted
        for kind in ("sluice", "bare"):
            run = make_run(folder, f"{kind}-{pair}", steps, data)
            children, child = [], ["--child", kind]
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                for rank in range(2):
                    from pipeline.base.dist_env import make_local_rank_env

                    rank_env = make_local_rank_env(rank, 2, port, listener.fileno() if rank == 0 else None)
                    children.append(
                        subprocess.Popen(
                            [
                                sys.executable,
                                "-m",
                                "benchmarks.trainer",
                                *child,
                                "--run",
                                str(run),
                                "--steps",
                                str(steps),
                            ],
                            env={**os.environ, **rank_env},
                            cwd=ROOT,
                            stdout=subprocess.PIPE,
                            text=True,
                            pass_fds=[listener.fileno()] if rank == 0 else [],
                        )
                    )
                outputs = [child.communicate(timeout=600)[0] for child in children]
            if pair:
                marks = [json.loads(output.splitlines()[-1]) for output in outputs]
                results[kind].append({k: sum(m[k] for m in marks) for k in ("start", "step", "wall")})
                print(kind, pair, results[kind][-1], flush=True)
    rows = []
    for key, name, target in (
        ("step", "CPU s per step, both ranks", 1.00),
        ("start", "CPU s start → first step", 1.05),
    ):
        ours, theirs = ([r[key] for r in results[kind]] for kind in ("sluice", "bare"))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append(
            [
                name,
                f"{statistics.median(ours):.4f}",
                f"{statistics.median(theirs):.4f}",
                f"{statistics.median(ratios):.3f}",
                f"{min(ratios):.3f}-{max(ratios):.3f}",
                f"≤ {target}",
            ]
        )
    header = ["figure", "Sluice", "bare DDP loop", "ratio (median of pairs)", "spread", "target"]
    note = (
        f"Quickstart model, 2 ranks on Gloo, {steps} steps, {pairs} interleaved pairs. The bare loop has its own "
        "decoder (benchmarks/plain_decoder.py) and imports nothing of Sluice. Sluice's ranks keep freed memory "
        "(pipeline/base/host_memory.py), and they import with the garbage collector disabled."
    )
    write_table("trainer", "The trainer against a bare DDP loop", note, header, rows)


def make_run(folder: Path, name: str, steps: int, data: Path | None = None, more: Sequence[str] = ()) -> Path:
    """A run of the quickstart with `steps` steps; `data`: another run whose shards it shares."""
    from pipeline.config.read import load_config
    from pipeline.run.directory import Run

    overrides = [f"run.root={folder}", f"run.name={name}", f"train.steps={steps}", *more]
    run = Run.create(load_config(ROOT / "configs/quickstart.yaml", overrides))
    if data is not None:
        run.data_dir.rmdir()
        run.data_dir.symlink_to(data / "data")
        return run.path
    for stage in ("prepare", "shard"):
        subprocess.run([sys.executable, "-m", "pipeline", stage, str(run.path)], cwd=ROOT, check=True, timeout=600)
    return run.path


def report(marks: list[float], started: float) -> None:
    steps = len(marks) - SKIP
    result = {"start": marks[0], "step": (marks[-1] - marks[SKIP - 1]) / steps, "wall": time.time() - started}
    print(json.dumps(result), flush=True)


def sluice(run: Path, steps: int) -> None:
    """Run the entry point of a rank, and record the clock after each step."""
    started = time.time()
    from pipeline import __main__ as entry_point
    from pipeline.run import stages

    marks: list[float] = []
    load = stages.load_stage_module

    def noting(name: str) -> Any:
        from pipeline.train.trainer import Trainer

        step = Trainer.step

        def wrapped(self: Trainer, *arguments: Any) -> Any:
            record = step(self, *arguments)
            marks.append(clock())
            return record

        Trainer.step = wrapped  # type: ignore
        return load(name)

    stages.load_stage_module = noting  # type: ignore
    code = entry_point.main(["train", str(run)])
    marks.append(clock())  # what the last save cost belongs to the steps
    if code == 0:
        report(marks, started)
    sys.stdout.flush()
    os._exit(code)


def bare(run: Path, steps: int) -> None:
    """Train as a script written by hand does: DDP, AdamW, clipping, accumulation, tokens from a memory map."""
    started = time.time()
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.plain_decoder import PlainDecoder

    torch.set_num_threads(1)
    rank, size = int(os.environ["SLUICE_RANK"]), int(os.environ["SLUICE_WORLD_SIZE"])
    listen = int(os.environ["SLUICE_LISTEN_FD"]) if rank == 0 else None
    port = int(os.environ["SLUICE_MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, master_listen_fd=listen)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    shard = json.loads((run / "data/manifest.json").read_text())["train"][0]
    tokens = np.memmap(run / "data" / shard["file"], np.uint16, "r", shard["offset"], (shard["tokens"],))
    torch.manual_seed(1)
    model = PlainDecoder(4096, 256, dim=256, layers=4, heads=8, kv_heads=4, ffn=704, theta=1e4)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = np.random.default_rng(rank)
    marks = []
    for _ in range(steps):
        for micro in range(2):
            rows = generator.integers(0, len(tokens) - 257, 4)
            batch = torch.from_numpy(np.stack([tokens[r : r + 257] for r in rows]).astype(np.int64))
            ddp.require_backward_grad_sync = micro == 1
            logits = ddp(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        marks.append(clock())
    report([*marks, clock()], started)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
