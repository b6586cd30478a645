"""Compare the trainer with a bare PyTorch DDP loop that trains an equal model.

    python -m benchmarks.trainer [--steps 100] [--pairs 4]

The results are two ratios, Sluice divided by the bare loop, from interleaved pairs of runs on two ranks:
- CPU seconds per step (user + system, all threads, both ranks) after the first five steps. Unlike the bare loop, Sluice
  coordinates stops, writes metrics and saves asynchronously every 50 steps. Target: at most 1.00.
- CPU seconds from the start of the process to the end of the first step. Target: at most 1.05.
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
WARM_UP_STEPS = 5


def main() -> None:
    """Compare the trainer with the bare loop. With `--child`, train one rank of a measured run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--child", choices=["sluice", "bare"])
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        if arguments.child == "sluice":
            train_with_sluice(arguments.run)
        else:
            train_bare(arguments.run, arguments.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), arguments.steps, arguments.pairs)


def compare(folder: Path, steps: int, pairs: int) -> None:
    """Measure pairs of runs, one with Sluice and one with the bare loop, and write the table.

    Args:
        folder: where the runs are created.
        steps: number of steps of each run.
        pairs: number of measured pairs. One more pair runs first, to warm the page cache.
    """
    from pipeline.base.dist_env import make_local_rank_env

    data = make_run(folder, "data", steps)
    results: dict[str, list[dict[str, float]]] = {"sluice": [], "bare": []}
    for pair in range(pairs + 1):  # The first pair only warms the page cache.
        for kind in ("sluice", "bare"):
            run_dir = make_run(folder, f"{kind}-{pair}", steps, data)
            command = [sys.executable, "-m", "benchmarks.trainer", "--child", kind]
            command += ["--run", str(run_dir), "--steps", str(steps)]
            children = []
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                for rank in range(2):
                    rank_env = make_local_rank_env(rank, 2, port, listener.fileno() if rank == 0 else None)
                    children.append(
                        subprocess.Popen(
                            command,
                            env={**os.environ, **rank_env},
                            cwd=ROOT,
                            stdout=subprocess.PIPE,
                            text=True,
                            pass_fds=[listener.fileno()] if rank == 0 else [],
                        )
                    )
                outputs = [child.communicate(timeout=600)[0] for child in children]
            if pair:
                rank_results = [json.loads(output.splitlines()[-1]) for output in outputs]
                total = {key: sum(result[key] for result in rank_results) for key in ("start", "step", "wall")}
                results[kind].append(total)
                print(kind, pair, total, flush=True)
    rows = []
    for key, name, target in (
        ("step", "CPU s per step, both ranks", 1.00),
        ("start", "CPU s start → first step", 1.05),
    ):
        sluice, bare = ([result[key] for result in results[kind]] for kind in ("sluice", "bare"))
        ratios = [a / b for a, b in zip(sluice, bare, strict=True)]
        rows.append(
            [
                name,
                f"{statistics.median(sluice):.4f}",
                f"{statistics.median(bare):.4f}",
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
    write_table("trainer", "The trainer compared with a bare DDP loop", note, header, rows)


def make_run(folder: Path, name: str, steps: int, data: Path | None = None, overrides: Sequence[str] = ()) -> Path:
    """Create a run of the quickstart and return its path.

    Args:
        folder: parent of the run directory.
        name: name of the run.
        steps: number of steps.
        data: path of another run whose data is used; None: run the stages prepare and shard.
        overrides: further overrides of config keys.
    """
    from pipeline.config.read import load_config
    from pipeline.run.directory import Run

    overrides = [f"run.root={folder}", f"run.name={name}", f"train.steps={steps}", *overrides]
    run = Run.create(load_config(ROOT / "configs/quickstart.yaml", overrides))
    if data is not None:
        run.data_dir.rmdir()
        run.data_dir.symlink_to(data / "data")
        return run.path
    for stage in ("prepare", "shard"):
        subprocess.run([sys.executable, "-m", "pipeline", stage, str(run.path)], cwd=ROOT, check=True, timeout=600)
    return run.path


def print_result(cpu_times: list[float], start_time: float) -> None:
    """Print the result of a rank as JSON: CPU seconds of the start and of a step, and wall seconds of the process.

    Args:
        cpu_times: CPU seconds of the process after each step and, as last item, after the last save.
        start_time: time at the start of the process.
    """
    steps = len(cpu_times) - WARM_UP_STEPS
    step_s = (cpu_times[-1] - cpu_times[WARM_UP_STEPS - 1]) / steps
    print(json.dumps({"start": cpu_times[0], "step": step_s, "wall": time.time() - start_time}), flush=True)


def train_with_sluice(run_dir: Path) -> None:
    """Run the train stage on this rank with the entry point `python -m pipeline`, and print the result of the rank."""
    start_time = time.time()
    from pipeline import __main__ as entry_point
    from pipeline.run import stages

    cpu_times: list[float] = []
    load = stages.load_stage_module

    def load_and_patch(run: Any, name: str) -> Any:
        """Load the module of a stage after replacing `Trainer.step` by a method that records the CPU time."""
        from pipeline.train.trainer import Trainer

        step = Trainer.step

        def step_and_record(self: Trainer, *arguments: Any) -> Any:
            """Run a step, and record the CPU time of the process after the step."""
            result = step(self, *arguments)
            cpu_times.append(time.process_time())
            return result

        Trainer.step = step_and_record  # type: ignore
        return load(run, name)

    stages.load_stage_module = load_and_patch  # type: ignore
    code = entry_point.main(["train", str(run_dir)])
    cpu_times.append(time.process_time())  # The time of the last save counts as time of the steps.
    if code == 0:
        print_result(cpu_times, start_time)
    sys.stdout.flush()
    os._exit(code)


def train_bare(run_dir: Path, steps: int) -> None:
    """Train as a handwritten script does, and print the result of the rank.

    The script uses DDP, AdamW, gradient clipping, gradient accumulation, and tokens from a memory map.
    """
    start_time = time.time()
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.plain_decoder import PlainDecoder

    torch.set_num_threads(1)
    rank = int(os.environ["SLUICE_RANK"])
    world_size = int(os.environ["SLUICE_WORLD_SIZE"])
    listen_fd = int(os.environ["SLUICE_LISTEN_FD"]) if rank == 0 else None
    port = int(os.environ["SLUICE_MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, master_listen_fd=listen_fd)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    shard = json.loads((run_dir / "data/manifest.json").read_text())["train"][0]
    tokens = np.memmap(run_dir / "data" / shard["file"], np.uint16, "r", shard["offset"], (shard["tokens"],))
    torch.manual_seed(1)
    # The sizes of the model and of the batches are those of configs/quickstart.yaml.
    model = PlainDecoder(4096, 256, dim=256, layers=4, heads=8, kv_heads=4, ffn=704, theta=1e4)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = np.random.default_rng(rank)
    cpu_times = []
    for _ in range(steps):
        for micro_batch in range(2):
            offsets = generator.integers(0, len(tokens) - 257, 4)
            batch = torch.from_numpy(np.stack([tokens[i : i + 257] for i in offsets]).astype(np.int64))
            ddp.require_backward_grad_sync = micro_batch == 1
            logits = ddp(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        cpu_times.append(time.process_time())
    print_result([*cpu_times, time.process_time()], start_time)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
