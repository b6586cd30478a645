"""Measure the import and export of an open model with 3.2 billion weights.

    python -m benchmarks.convert [--layers 28] [--folder /tmp]

The model is a Llama 3.2 3B with random bf16 weights (6.4 GB, largest tensor 0.79 GB). The import does what the
train stage does before its first step: it checks and hashes the files, and fills the bf16 weights of one rank. Then a
checkpoint of the weights is saved. The export reads this checkpoint, hashes it and writes the exported directory.
Import and export run in separate processes. The peak memory increase of each is VmHWM at its end minus VmRSS at its
start (proc(5)).

The times are compared with plain I/O: reading the bytes of the source, and writing the same number of bytes in chunks
of 16 MB with one fsync. Plain I/O is measured before and after each import and export. The files are removed from the
page cache before each measurement. The benchmark needs 26 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.table import write_table

CHUNK_BYTES = 1 << 24
"""Size of a chunk of plain I/O."""
MODEL_CONFIG = {
    "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "head_dim": 128,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
"""Keys of the model's config.json, except the number of layers."""


def make_source(folder: Path, layers: int) -> None:
    """Write the open model: a weight file for the embedding and the last norm, and one for every four layers."""
    import torch
    from safetensors.torch import save_file

    from data_prep.tokenizer import train_bpe
    from pipeline.config.hugging_face import parse_model_config
    from pipeline.config.sections import ModelConfig
    from pipeline.model.decoder import Decoder

    config = {**MODEL_CONFIG, "num_hidden_layers": layers}
    with torch.device("meta"):
        section = {key: value for key, value in parse_model_config(config).items() if key in ModelConfig.model_fields}
        model = Decoder(ModelConfig(**section), 128256, 64)
    weights_by_file: dict[str, dict[str, Any]] = {}
    for name, weight in model.named_weights():
        number = int(name.split(".")[2]) // 4 + 1 if ".layers." in name else 0
        weights_by_file.setdefault(f"model-{number:05}.safetensors", {})[name] = weight
    folder.mkdir()
    for file, weights in weights_by_file.items():
        tensors = {name: torch.randn(weight.shape, dtype=torch.bfloat16) for name, weight in weights.items()}
        save_file(tensors, folder / file, {"format": "pt"})
    index = {name: file for file, weights in weights_by_file.items() for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(train_bpe(["the model of a run"], 300, "<|end|>"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')


def make_run(folder: Path, source: Path) -> Path:
    """Create a run that starts from the open model, with prepared data; return its path."""
    from pipeline.config.read import load_config
    from pipeline.run.directory import Run
    from pipeline.run.stages import load_stage_module
    from tests.support.ranks import make_rank_info
    from tests.support.tiny import PassiveStopFlag, write_corpus

    file = folder / "run.yaml"
    file.write_text(
        f"run: {{name: run, root: {folder}}}\ndata: {{source: {write_corpus(folder)}, sequence_length: 64}}\n"
        f"model: {{init_from: {source}}}\ntrain: {{steps: 1}}\n"
    )
    run = Run.create(load_config(file))
    for stage in ("prepare", "shard"):
        load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    return run.path


def read_memory_gb(key: str) -> float:
    """Return the value of `key` in /proc/self/status (proc(5)) in GB: `VmRSS`, or `VmHWM`, the peak of VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024 / 1e9


@contextmanager
def measure_block(results: dict[str, float], name: str) -> Iterator[None]:
    """Measure the `with` block. Add its seconds, its CPU seconds and its peak memory increase in GB to `results`."""
    Path("/proc/self/clear_refs").write_text("5")  # This resets VmHWM.
    memory_before = read_memory_gb("VmRSS")
    start = time.perf_counter()
    cpu_start = time.process_time()
    yield
    results[name] = time.perf_counter() - start
    results[f"{name}, CPU"] = time.process_time() - cpu_start
    results[f"{name}, memory"] = read_memory_gb("VmHWM") - memory_before


def import_and_save(path: Path, results: dict[str, float]) -> None:
    """Import the open model of a run, then save a checkpoint of its weights. Add both measurements to `results`."""
    import torch

    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.checkpoint.identity import compute_source_identity
    from pipeline.comm import groups
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.model.make_task import make_task
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.run.directory import Run
    from tests.support.ranks import PORTS, make_rank_info

    run = Run.open(path)
    world = groups.join_process_group(make_rank_info(0, 1, next(PORTS)), run.config)
    task = make_task(run, load_run_manifest(run))
    group = groups.new_control_group()
    with measure_block(results, "import"):
        source = open_initial_weights(run, task, group)
        part = task.build(range(run.config.model.layers)).to(torch.bfloat16).to_empty(device=world.device)
        part.tie_weights()  # type: ignore[operator]
        assert source is not None
        source.copy_into(task.named_weights(part))
        source.write_source()
    saver = Checkpointer(
        run.checkpoints_dir, group, keep=1, background=False, on_saved=lambda *_: None,
        manifest_entries={"layout": {}, **compute_source_identity(run)},
    )  # fmt: skip
    with measure_block(results, "save"):
        state = {f"model.{name}": weight.detach() for name, weight in task.named_weights(part)}
        saver.save(state, step=1, samples_consumed=0, extra={})


def export_run(path: Path, results: dict[str, float]) -> None:
    """Export the newest checkpoint of a run, and add the measurement to `results`."""
    from pipeline.publish.export import export_checkpoint
    from pipeline.run.directory import Run

    with measure_block(results, "export"):
        print(export_checkpoint(Run.open(path), path.parent / "exported", None, "bf16"), file=sys.stderr)


MEASUREMENTS: dict[str, Callable[[Path, dict[str, float]], None]] = {"import": import_and_save, "export": export_run}
"""Functions that are measured in a child process, by the value of `--child`."""


def run_child(name: str, run: Path) -> dict[str, float]:
    """Run a function of MEASUREMENTS in a new process, and return the results that it adds."""
    command = [sys.executable, "-m", "benchmarks.convert", "--child", name, "--run", str(run)]
    # The command `export` sets 1 (cli/export.py), so that torch allocates huge pages. The train stage does not set 1.
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1" if name == "export" else "0"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def drop_page_cache(folder: Path) -> int:
    """Remove the files in `folder` from the page cache and return their total size in bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return sum(path.stat().st_size for path in files)


def measure_plain_io(source: Path, scratch: Path, write: bool) -> tuple[float, float]:
    """Read all files of `source`, and write as many bytes if `write` is set. Return the seconds and the CPU seconds.

    Args:
        source: the folder to read.
        scratch: a file that is written if `write` is set, and deleted afterwards.
        write: whether to also write the same number of bytes to `scratch`, with fsync.
    """
    size = drop_page_cache(source)
    chunk = os.urandom(CHUNK_BYTES)
    start = time.perf_counter()
    cpu_start = time.process_time()
    for path in source.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(CHUNK_BYTES):
                    pass
    if write:
        with open(scratch, "wb", buffering=0) as out:
            for _ in range(size // CHUNK_BYTES):
                out.write(chunk)
            os.fsync(out.fileno())
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu_start
    scratch.unlink(missing_ok=True)
    return seconds, cpu_seconds


def main() -> None:
    """Measure import and export, and write benchmarks/results/convert.md. With `--child`, run one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--child", choices=MEASUREMENTS)
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        results: dict[str, float] = {}
        MEASUREMENTS[arguments.child](arguments.run, results)
        print(json.dumps(results))
        return
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source = folder / "open"
        scratch = folder / "scratch"
        make_source(source, arguments.layers)
        run = make_run(folder, source)
        for action, input_folder in (("import", source), ("export", run / "checkpoints")):
            read_and_write_times = [measure_plain_io(input_folder, scratch, write=True)]
            read_times = [measure_plain_io(input_folder, scratch, write=False)]
            size = drop_page_cache(input_folder)
            results = run_child(action, run)
            read_and_write_times.append(measure_plain_io(input_folder, scratch, write=True))
            read_times.append(measure_plain_io(input_folder, scratch, write=False))
            print(action, size, results, read_and_write_times, read_times, flush=True)
            # For each row of the table, the times of the plain I/O with which the row is compared.
            plain_times = {"export": read_and_write_times}
            if action == "import":
                plain_times = {"import": read_times, "save": [], "import, save": read_and_write_times}
                for suffix in ("", ", CPU"):
                    results[f"import, save{suffix}"] = results[f"import{suffix}"] + results[f"save{suffix}"]
            for row_name, times in plain_times.items():
                row = [row_name, f"{size / 1e9:.2f}"]
                for index, suffix in enumerate(("", ", CPU")):  # wall seconds, then CPU seconds
                    seconds = results[row_name + suffix]
                    row.append(f"{seconds:.1f}")
                    if times:
                        plain_s = sum(pair[index] for pair in times) / len(times)
                        row += [f"{plain_s:.1f}", f"{seconds / plain_s:.2f}"]
                    else:
                        row += ["-", "-"]
                memory_gb = results.get(f"{row_name}, memory")
                rows.append([*row, "-" if memory_gb is None else f"{memory_gb:.2f}"])
    header = ["action", "GB", "s", "plain I/O", "ratio", "CPU s", "plain I/O", "ratio", "peak memory increase, GB"]
    note = (
        "A Llama of random bf16 weights in one process. Plain I/O: reading the bytes and, except for `import`, writing "
        "the same number of bytes with fsync; the mean of one measurement before and one after. The times include the "
        "SHA-256 of all bytes that import and export read, and that save writes."
    )
    write_table("convert", "Import and export of an open model", note, header, rows)


if __name__ == "__main__":
    main()
