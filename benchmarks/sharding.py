"""What tokenising costs, beside a bare loop over `tokenizers` and beside datatrove; and the stages at size.

    python -m benchmarks.sharding [--mb 64] [--repetitions 3] [--datatrove PYTHON] [--memory-mb 2048]

The text is the Python library's own sources in documents of 4,000 characters, as .jsonl; a byte-level BPE of 8,192 ids.
`--datatrove`: an interpreter of an environment of its own that has `datatrove[io,processing]` and orjson. Rates are
tokens per second of CPU time (user and system, of all threads) on one core, of what is done after the imports;
repetitions are interleaved, a ratio is the median of theirs. The bare loop reads the lines, takes the texts out of
their JSON and the ids out of the encodings, and writes nothing. Memory is the largest resident set of a process that
shards a file of whole words, with a tokenizer of whole words (it is fast; memory does not depend on it).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.table import write_table
from data_prep.find_inputs import find_inputs
from data_prep.text_folder import TextFolder
from data_prep.work_units import measure_inputs, split_into_units
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.data.manifest import ShardEntry, load_manifest, write_manifest

FILES, UNITS, TIMEOUT_S = 100_000, 10_000, 3600  # units: about so many, or fewer where there is little text

DATATROVE = """
import json, resource, sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from loguru import logger
logger.remove()
folder, tokenizer, out = sys.argv[1:]
steps = [JsonlReader(folder, glob_pattern="text.jsonl"),
         DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>", batch_size=1000,
                           shuffle_documents=False)]
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
steps[1].tokenizer
before = cpu()
data = None
for step in steps:
    data = step(data, 0, 1) if data is not None else step(None, 0, 1)
for _ in data or ():
    pass
print(json.dumps({"cpu": cpu() - before}))
"""


def write_text(path: Path, size: int) -> None:
    """Documents as lines of JSON, `size` bytes of them."""
    root, done = Path(sysconfig.get_path("stdlib")), 0
    sources = sorted(one for one in root.rglob("*.py") if "-packages" not in str(one))
    with open(path, "w", encoding="utf-8") as file:
        for number, source in enumerate(cycle(sources)):
            text = source.read_text("utf-8", errors="ignore")
            for start in range(0, len(text), 4000):
                if done >= size:
                    return
                done += file.write(json.dumps({"id": number, "text": f"{number} {text[start : start + 4000]}"}) + "\n")


def cpu_s() -> float:
    """User and system time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def config_of(folder: Path, **more: Any) -> DataConfig:
    """Of the text in a folder, with the tokenizer there."""
    tokenizer = TokenizerConfig(kind="file", path=folder / "tokenizer.json")
    return DataConfig(source=str(folder / "text.jsonl"), tokenizer=tokenizer, **more)


def bare(folder: Path) -> None:
    """In a process of its own: the loop."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before, tokens, batch = cpu_s(), 0, []
    with open(folder / "text.jsonl", "rb") as file:
        for line in file:
            batch.append(json.loads(line)["text"])
            if len(batch) == 256:
                tokens += sum(len(one.ids) + 1 for one in tokenizer.encode_batch_fast(batch))
                batch = []
    tokens += sum(len(one.ids) + 1 for one in tokenizer.encode_batch_fast(batch))
    print(json.dumps({"cpu": cpu_s() - before, "tokens": tokens}))


def sluice(folder: Path, out: Path, task: int, tasks: int, **more: Any) -> None:
    """In a process of its own: one task of the stage, prepared before."""
    import data_prep.shard_writer

    data = TextFolder(config_of(folder, **more), out)
    assert data_prep.shard_writer and data.encoder and data.plan
    before = cpu_s()
    data.shard(task, tasks, lambda _: None)
    cpu = cpu_s() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    data.finalize(lambda _: None)
    print(json.dumps({"cpu": cpu, "peak": peak}))


def child(core: int, *arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
    """Start something on one core."""
    command = ["taskset", "-c", str(core), python, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, float]:
    """What it printed last."""
    told, _ = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise SystemExit(f"{process.args!r} failed")
    return json.loads(told.splitlines()[-1])


def sharding(folder: Path, name: str, tasks: int = 1, **more: Any) -> tuple[dict[str, float], float]:
    """Shard by so many tasks of one core each; what the last one told, and seconds from start to end."""
    out = folder / name
    subprocess.run(["rm", "-rf", str(out)], check=True, timeout=60)
    TextFolder(config_of(folder, **more), out).prepare(lambda _: None)
    began = time.monotonic()
    arguments = ["-m", "benchmarks.sharding", "--child", str(folder), "--out", str(out), "--more", json.dumps(more)]
    started = [child(task, *arguments, "--task", str(task), "--tasks", str(tasks)) for task in range(tasks)]
    return [result(one) for one in started][-1], time.monotonic() - began


def rates(folder: Path, repetitions: int, datatrove: str | None) -> list[list[str]]:
    """Tokens per CPU second of each."""
    seconds: dict[str, list[float]] = {}
    tokens = 0.0
    for number in range(repetitions):
        found = result(child(0, "-m", "benchmarks.sharding", "--child", str(folder)))
        tokens = found["tokens"]
        seconds.setdefault("bare `encode_batch_fast` loop", []).append(found["cpu"])
        seconds.setdefault("Sluice", []).append(sharding(folder, "one")[0]["cpu"])
        manifest = load_manifest(folder / "one")
        assert manifest.train_tokens + manifest.held_out_tokens == tokens
        seconds.setdefault("Sluice, deduplicate", []).append(sharding(folder, "once", deduplicate=True)[0]["cpu"])
        if datatrove:
            out = folder / f"datatrove-{number}"
            told = result(
                child(0, "-c", DATATROVE, str(folder), str(folder / "tokenizer.json"), str(out), python=datatrove)
            )
            assert sum(one.stat().st_size for one in out.rglob("*.ds")) == 2 * tokens
            seconds.setdefault("datatrove", []).append(told["cpu"])
    base, rows = seconds["bare `encode_batch_fast` loop"], []
    for name, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(base, values, strict=True))
        rows.append([name, f"{tokens / statistics.median(values) / 1e6:.3f} Mtokens per CPU s", f"{ratio:.2f} of bare"])
    if datatrove:
        ratio = statistics.median(a / b for a, b in zip(seconds["datatrove"], seconds["Sluice"], strict=True))
        rows.append(["Sluice ÷ datatrove", f"{ratio:.2f}", "≥ 1.3 wanted"])
    return rows


def at_memory(folder: Path, megabytes: int) -> list[str]:
    """Peak of a task that shards a large file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, "<unknown>": 1, **{f"word{i}": i + 2 for i in range(70_000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    block = "".join(
        json.dumps({"text": " ".join(f"word{(i * j) % 70_000}" for j in range(400))}) + "\n" for i in range(400)
    )
    with open(folder / "text.jsonl", "w") as file:
        for _ in range(megabytes * 2**20 // len(block)):
            file.write(block)
    told, _ = sharding(folder, "large")
    tokens = load_manifest(folder / "large").train_tokens
    return [
        f"peak memory, a file of {megabytes:,} MB, {tokens:,} uint32 tokens",
        f"{told['peak']:,.0f} MB",
        "≤ 1,000 MB",
    ]


def at_size(folder: Path) -> list[list[str]]:
    """Planning many files, and the finalizer of many shards."""
    for number in range(FILES):
        if number % 1000 == 0:
            (folder / f"many/{number // 1000:03d}").mkdir(parents=True)
        (folder / f"many/{number // 1000:03d}/{number:06d}.txt").write_text("some text")
    began = time.process_time(), time.monotonic()
    inputs = find_inputs(DataConfig(source=str(folder / "many")))
    split_into_units(inputs, measure_inputs(inputs, "text"), 1000)
    planned = time.process_time() - began[0], time.monotonic() - began[1]
    synced, os.fsync = os.fsync, lambda fd: None  # of the making, not of what is measured
    small = max(1024, int((folder / "text.jsonl").stat().st_size / 3.5 / 0.9 / UNITS))
    config = config_of(folder, shard_tokens=small, held_out=0.0)
    data = TextFolder(config, folder / "units")
    data.prepare(lambda _: None)
    (folder / "units/shards").mkdir()
    data.build_unit(0)
    first = data.load_unit(0)
    assert first is not None
    units = data.unit_count
    for unit in range(1, units):
        entries: dict[str, list[ShardEntry]] = {"train": [], "held_out": []}
        for split, found in entries.items():
            for entry in getattr(first, split):
                name = entry.file.replace("unit-00000", f"unit-{unit:05d}")
                os.link(folder / "units" / entry.file, folder / "units" / name)
                found.append(entry.model_copy(update={"file": name}))
        lists = {split: tuple(found) for split, found in entries.items()}
        made = first.model_copy(update={"unit": unit, "key": data._unit_key(unit), **lists})
        write_manifest(data.unit_path(unit), made)
    (folder / "units/progress.jsonl").write_text(
        "".join(
            json.dumps({"key": data.manifest_key, "unit": unit, "time": 1, "seconds": 1}) + "\n"
            for unit in range(units)
        )
    )
    os.fsync = synced
    fresh = TextFolder(config, folder / "units")
    began = time.process_time(), time.monotonic()
    told = fresh.measure_progress()
    looked = time.process_time() - began[0], time.monotonic() - began[1]
    began = time.process_time(), time.monotonic()
    assert told[:2] == (units, units) and fresh.finalize(lambda _: None)
    ended = time.process_time() - began[0], time.monotonic() - began[1]
    words = lambda pair: f"{pair[0]:.1f} s of CPU, {pair[1]:.1f} s"  # noqa: E731
    return [
        [f"{len(inputs):,} files listed and cut", words(planned), "≤ 10 s"],
        [f"progress of {units:,} units", words(looked), ""],
        [f"finalizer of {units:,} units", words(ended), "≤ 60 s"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind, default in (
        ("mb", int, 64), ("repetitions", int, 3), ("datatrove", str, None), ("memory-mb", int, 2048),
        ("child", Path, None), ("out", Path, None), ("task", int, 0), ("tasks", int, 1), ("more", str, "{}"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    asked = parser.parse_args()
    if asked.child and asked.out:
        sluice(asked.child, asked.out, asked.task, asked.tasks, **json.loads(asked.more))
        return
    if asked.child:
        bare(asked.child)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.jsonl", asked.mb << 20)
        trained = DataConfig(source=str(folder / "text.jsonl"), tokenizer=TokenizerConfig(vocab_size=8192))
        TextFolder(trained, folder / "trained").prepare(lambda _: None)
        (folder / "tokenizer.json").write_bytes((folder / "trained/tokenizer.json").read_bytes())
        rows = rates(folder, asked.repetitions, asked.datatrove)
        print(rows, flush=True)
        pairs = [
            (sharding(folder, "one")[1], sharding(folder, "two", tasks=2)[1])
            for _ in range(asked.repetitions if (os.cpu_count() or 1) > 1 else 0)
        ]
        if pairs:
            ratio = statistics.median(one / two for one, two in pairs)
            rows.append(["2 tasks of one core each ÷ 1, median of the pairs", f"{ratio:.2f} × as fast", "≥ 1.8 wanted"])
        print(rows[-1], flush=True)
        rows += at_size(folder)
        print(rows[-3:], flush=True)
        rows.append(at_memory(folder, asked.memory_mb))
    write_table(
        "sharding",
        "What sharding costs",
        f"{asked.mb} MB of text, {asked.repetitions} interleaved repetitions; how it is measured: "
        "`benchmarks/sharding.py`.",
        ["what", "measured", ""],
        rows,
    )


if __name__ == "__main__":
    main()
