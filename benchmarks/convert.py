"""What it costs to come from an open model's folder and to become one: import and export of 3.2 billion weights.

    python -m benchmarks.convert [--layers 28] [--folder /tmp]

A Llama 3.2 3B of random bf16 weights (6.4 GB, its largest tensor 0.79 GB). Import is what a training does before its
first step: look, hash, fill one rank's weights (bf16); then a checkpoint of the weights alone is saved. Export reads
that checkpoint, hashes it, and writes the folder. Each runs in a process of its own; its peak memory is VmHWM less what
it had before. They are compared with reading the source's bytes and writing the result's in pieces of 16 MB, with one
fsync, right before and right after; the page cache is emptied of the files before each. Takes 26 GB of disk, and gives
them back.
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

PIECE = 1 << 24
SIZES = {
    "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "head_dim": 128,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip


def make_source(folder: Path, layers: int) -> None:
    """The open model: a file for the embedding and one for every four layers."""
    import torch
    from safetensors.torch import save_file

    from data_prep.tokenizer import train_bpe
    from pipeline.config.hugging_face import parse_model_config
    from pipeline.config.sections import ModelConfig
    from pipeline.model.decoder import Decoder

    config = {**SIZES, "num_hidden_layers": layers}
    with torch.device("meta"):
        model = Decoder(ModelConfig(**parse_model_config(config)), 128256, 64)
    pieces: dict[str, dict[str, Any]] = {}
    for name, weight in model.named_weights():
        number = int(name.split(".")[2]) // 4 + 1 if ".layers." in name else 0
        pieces.setdefault(f"model-{number:05}.safetensors", {})[name] = weight
    folder.mkdir()
    for file, weights in pieces.items():
        drawn = {name: torch.randn(weight.shape, dtype=torch.bfloat16) for name, weight in weights.items()}
        save_file(drawn, folder / file, {"format": "pt"})
    index = {name: file for file, weights in pieces.items() for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(train_bpe(["the model of a run"], 300, "<|end|>"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')


def make_run(folder: Path, source: Path) -> Path:
    """A run that begins with it, its few shards ready."""
    from pipeline.config.read import load_config
    from pipeline.run.directory import Run
    from pipeline.run.stages import load_stage_module
    from tests.support.ranks import make_rank_info
    from tests.support.tiny import HarmlessFlag, write_corpus

    file = folder / "run.yaml"
    file.write_text(
        f"run: {{name: run, root: {folder}}}\ndata: {{source: {write_corpus(folder)}, sequence_length: 64}}\n"
        f"model: {{init_from: {source}}}\ntrain: {{steps: 1}}\n"
    )
    run = Run.create(load_config(file))
    for stage in ("prepare", "shard"):
        load_stage_module(stage).run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())
    return run.path


def memory(key: str) -> float:
    """VmRSS or VmHWM (its peak) of this process, in GB. Source: proc(5)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024 / 1e9


@contextmanager
def measured(results: dict[str, float], name: str) -> Iterator[None]:
    """Seconds of the block, of the clock and of CPUs, and by how much the peak of memory was above what was, in GB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, started, computed = memory("VmRSS"), time.perf_counter(), time.process_time()
    yield
    results[name] = time.perf_counter() - started
    results[f"{name}, CPU"] = time.process_time() - computed
    results[f"{name}, memory"] = memory("VmHWM") - before


def import_and_save(path: Path, results: dict[str, float]) -> None:
    import torch

    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.checkpoint.identity import compute_source_identity
    from pipeline.comm import groups
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.model.task import make_task
    from pipeline.run.directory import Run
    from tests.support.ranks import PORTS, make_rank_info

    run = Run.open(path)
    world = groups.join_process_group(make_rank_info(0, 1, next(PORTS)), run.config)
    task, group = make_task(run, load_run_manifest(run)), groups.new_control_group()
    with measured(results, "import"):
        source = open_initial_weights(run, task, group)
        part = task.build(range(run.config.model.layers)).to(torch.bfloat16).to_empty(device=world.device)
        part.tie_weights()  # type: ignore[operator]
        assert source is not None
        source.copy_into(task.named_weights(part))
        source.write_source()
    saver = Checkpointer(
        run.checkpoints_dir, group, keep=1, background=False, describe={"layout": {}, **compute_source_identity(run)},
        on_saved=lambda *_: None,
    )  # fmt: skip
    with measured(results, "save"):
        state = {f"model.{name}": weight.detach() for name, weight in task.named_weights(part)}
        saver.save(state, step=1, samples_consumed=0, extra={})


def export_again(path: Path, results: dict[str, float]) -> None:
    from pipeline.publish.export import export_checkpoint
    from pipeline.run.directory import Run

    with measured(results, "export"):
        print(export_checkpoint(Run.open(path), path.parent / "exported", None, "bf16"), file=sys.stderr)


CHILDREN: dict[str, Callable[[Path, dict[str, float]], None]] = {"import": import_and_save, "export": export_again}


def child(what: str, run: Path) -> dict[str, float]:
    """What the part says, in a new process."""
    command = [sys.executable, "-m", "benchmarks.convert", "--child", what, "--run", str(run)]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1" if what == "export" else "0"}  # as pipeline/__main__.py
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def forget(folder: Path) -> int:
    """Empty the page cache of the files in `folder`; their bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return sum(path.stat().st_size for path in files)


def plain(source: Path, scratch: Path, write: bool) -> tuple[float, float]:
    """Seconds of reading all bytes of `source`, and of writing as many with fsync: of the clock, and of CPUs."""
    size, piece = forget(source), os.urandom(PIECE)
    started, computed = time.perf_counter(), time.process_time()
    for path in source.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(PIECE):
                    pass
    if write:
        with open(scratch, "wb", buffering=0) as out:
            for _ in range(size // PIECE):
                out.write(piece)
            os.fsync(out.fileno())
    seconds = time.perf_counter() - started, time.process_time() - computed
    scratch.unlink(missing_ok=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--child", choices=CHILDREN)
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        results: dict[str, float] = {}
        CHILDREN[arguments.child](arguments.run, results)
        print(json.dumps(results))
        return
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source, scratch = folder / "open", folder / "scratch"
        make_source(source, arguments.layers)
        run = make_run(folder, source)
        for what, given in (("import", source), ("export", run / "checkpoints")):
            both, alone = [plain(given, scratch, True)], [plain(given, scratch, False)]
            size = forget(given)
            found = child(what, run)
            both.append(plain(given, scratch, True))
            alone.append(plain(given, scratch, False))
            print(what, size, found, both, alone, flush=True)
            ways = {"import": alone, "save": [], "import, save": both} if what == "import" else {"export": both}
            if what == "import":
                for kind in ("", ", CPU"):
                    found[f"import, save{kind}"] = found[f"import{kind}"] + found[f"save{kind}"]
            for words, times in ways.items():
                row = [words, f"{size / 1e9:.2f}"]
                for number, kind in enumerate(("", ", CPU")):
                    spent, plainly = found[words + kind], sum(pair[number] for pair in times) / max(1, len(times))
                    row += [f"{spent:.1f}", *([f"{plainly:.1f}", f"{spent / plainly:.2f}"] if times else ["-", "-"])]
                most = found.get(f"{words}, memory")
                rows.append([*row, "-" if most is None else f"{most:.2f}"])
    header = ["what", "GB", "s", "bytes alone", "ratio", "CPU s", "bytes alone", "ratio", "peak memory, GB more"]
    note = (
        "A Llama of random bf16 weights on one process; `python -m benchmarks.convert`. Bytes alone: reading them, "
        "and, but for the import alone, writing as many, with fsync, before and after. SHA-256 of all bytes is in the "
        "figures: import hashes what it reads, a save what it wrote, an export what it reads."
    )
    write_table("convert", "From an open model's folder, and to one", note, header, rows)


if __name__ == "__main__":
    main()
