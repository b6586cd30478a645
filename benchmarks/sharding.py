"""Compare tokenization with a bare loop over `tokenizers` and with datatrove; measure the stages with many files.

    python -m benchmarks.sharding [--mb 64] [--repetitions 3] [--datatrove PYTHON] [--memory-mb 2048]

The text is the source code of Python's standard library in documents of 4,000 characters, as .jsonl. The tokenizer is a
byte-level BPE of 8,192 tokens. `--datatrove` names the Python of another environment that has
`datatrove[io,processing]` and orjson. Rates are tokens per CPU second (user and system time, all threads) on one core
after the imports. Repetitions are interleaved, and a ratio is the median of the ratios of all repetitions. The bare
loop reads lines, parses JSON and encodes, but writes nothing. Memory is the peak resident set of a process that shards
a large file. This process uses a fast word-level tokenizer, because memory does not depend on the tokenizer.
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

FILES = 100_000
"""Number of input files in `measure_many_files`."""
UNITS = 10_000
"""Approximate number of work units in `measure_many_files`. It is smaller if there is little text."""
TIMEOUT_S = 3600

DATATROVE_PROGRAM = """
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
steps[1].tokenizer  # Load the tokenizer before the measurement.
before = cpu()
data = None
for step in steps:
    data = step(data, 0, 1) if data is not None else step(None, 0, 1)
for _ in data or ():
    pass
print(json.dumps({"cpu": cpu() - before}))
"""


def write_text(path: Path, size: int) -> None:
    """Write documents with about `size` bytes of source code to `path`, as JSON Lines."""
    root = Path(sysconfig.get_path("stdlib"))
    written = 0
    sources = sorted(file for file in root.rglob("*.py") if "-packages" not in str(file))
    with open(path, "w", encoding="utf-8") as file:
        for number, source in enumerate(cycle(sources)):
            text = source.read_text("utf-8", errors="ignore")
            for start in range(0, len(text), 4000):
                if written >= size:
                    return
                document = {"id": number, "text": f"{number} {text[start : start + 4000]}"}
                written += file.write(json.dumps(document) + "\n")


def read_cpu_seconds() -> float:
    """Return the user and system seconds of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def make_config(folder: Path, **fields: Any) -> DataConfig:
    """Return a DataConfig that reads `text.jsonl` and `tokenizer.json` from `folder`.

    Args:
        folder: the folder.
        fields: further fields of DataConfig.
    """
    tokenizer = TokenizerConfig(kind="file", path=folder / "tokenizer.json")
    return DataConfig(source=str(folder / "text.jsonl"), tokenizer=tokenizer, **fields)


def tokenize_bare(folder: Path) -> None:
    """Run the bare loop in this process. Print its CPU seconds and its number of tokens as JSON."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cpu_start = read_cpu_seconds()
    tokens = 0  # including one end token per document
    batch = []
    with open(folder / "text.jsonl", "rb") as file:
        for line in file:
            batch.append(json.loads(line)["text"])
            if len(batch) == 256:
                tokens += sum(len(encoding.ids) + 1 for encoding in tokenizer.encode_batch_fast(batch))
                batch = []
    tokens += sum(len(encoding.ids) + 1 for encoding in tokenizer.encode_batch_fast(batch))
    print(json.dumps({"cpu": read_cpu_seconds() - cpu_start, "tokens": tokens}))


def run_array_task(folder: Path, out: Path, task: int, tasks: int, **fields: Any) -> None:
    """Run array task `task` of `tasks` of stage shard in this process. Print CPU seconds and peak memory as JSON.

    The stage prepare must have run. The peak memory is in MB.
    """
    import data_prep.shard_writer

    data = TextFolder(make_config(folder, **fields), out)
    # Load the module, the tokenizer and the plan before the measurement.
    assert data_prep.shard_writer and data.encoder and data.plan
    cpu_start = read_cpu_seconds()
    data.shard(task, tasks, lambda _: None)
    cpu_s = read_cpu_seconds() - cpu_start
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    data.finalize(lambda _: None)
    print(json.dumps({"cpu": cpu_s, "peak": peak_mb}))


def start_on_core(core: int, *arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
    """Start Python on one core."""
    command = ["taskset", "-c", str(core), python, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for_result(process: subprocess.Popen[str]) -> dict[str, float]:
    """Wait for a process and return the JSON object in its last line of output. Exits if the process failed."""
    output, _ = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise SystemExit(f"{process.args!r} failed")
    return json.loads(output.splitlines()[-1])


def shard_text(folder: Path, name: str, tasks: int = 1, **fields: Any) -> tuple[dict[str, float], float]:
    """Shard `text.jsonl` of `folder` with array tasks of one core each.

    Args:
        folder: folder with the text and the tokenizer.
        name: folder inside `folder` for the output. It is deleted first.
        tasks: number of array tasks.
        fields: further fields of DataConfig.

    Returns:
        What the last array task prints (see :func:`run_array_task`), and the wall seconds of all array tasks together.
    """
    out = folder / name
    subprocess.run(["rm", "-rf", str(out)], check=True, timeout=60)
    TextFolder(make_config(folder, **fields), out).prepare(lambda _: None)
    start = time.monotonic()
    arguments = ["-m", "benchmarks.sharding", "--child", str(folder), "--out", str(out), "--more", json.dumps(fields)]
    processes = [start_on_core(task, *arguments, "--task", str(task), "--tasks", str(tasks)) for task in range(tasks)]
    return [wait_for_result(process) for process in processes][-1], time.monotonic() - start


def measure_rates(folder: Path, repetitions: int, datatrove: str | None) -> list[list[str]]:
    """Return the table rows with the tokens per CPU second of each program.

    Args:
        folder: folder with the text and the tokenizer.
        repetitions: number of measurements of each program.
        datatrove: path of a Python that has datatrove; None: it is not measured.
    """
    seconds: dict[str, list[float]] = {}
    tokens = 0.0
    for number in range(repetitions):
        bare = wait_for_result(start_on_core(0, "-m", "benchmarks.sharding", "--child", str(folder)))
        tokens = bare["tokens"]
        seconds.setdefault("bare `encode_batch_fast` loop", []).append(bare["cpu"])
        seconds.setdefault("Sluice", []).append(shard_text(folder, "one")[0]["cpu"])
        manifest = load_manifest(folder / "one")
        assert manifest.train_tokens + manifest.held_out_tokens == tokens
        seconds.setdefault("Sluice, deduplicate", []).append(shard_text(folder, "once", deduplicate=True)[0]["cpu"])
        if datatrove:
            out = folder / f"datatrove-{number}"
            arguments = ["-c", DATATROVE_PROGRAM, str(folder), str(folder / "tokenizer.json"), str(out)]
            result = wait_for_result(start_on_core(0, *arguments, python=datatrove))
            assert sum(file.stat().st_size for file in out.rglob("*.ds")) == 2 * tokens
            seconds.setdefault("datatrove", []).append(result["cpu"])
    bare_seconds = seconds["bare `encode_batch_fast` loop"]
    rows = []
    for name, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(bare_seconds, values, strict=True))
        rate = tokens / statistics.median(values) / 1e6
        rows.append([name, f"{rate:.3f} Mtokens per CPU s", f"{ratio:.2f} of bare"])
    if datatrove:
        ratio = statistics.median(a / b for a, b in zip(seconds["datatrove"], seconds["Sluice"], strict=True))
        rows.append(["Sluice ÷ datatrove", f"{ratio:.2f}", "≥ 1.3"])
    return rows


def measure_memory(folder: Path, megabytes: int) -> list[str]:
    """Return the table row with the peak memory of an array task that shards a file of `megabytes` MB."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    # More than 65,536 tokens make the stage write uint32 tokens.
    vocabulary = {"<|endoftext|>": 0, "<unknown>": 1, **{f"word{i}": i + 2 for i in range(70_000)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    text_block = "".join(
        json.dumps({"text": " ".join(f"word{(i * j) % 70_000}" for j in range(400))}) + "\n" for i in range(400)
    )
    with open(folder / "text.jsonl", "w") as file:
        for _ in range(megabytes * 2**20 // len(text_block)):
            file.write(text_block)
    result, _ = shard_text(folder, "large")
    tokens = load_manifest(folder / "large").train_tokens
    return [
        f"peak memory, a file of {megabytes:,} MB, {tokens:,} uint32 tokens",
        f"{result['peak']:,.0f} MB",
        "≤ 1,000 MB",
    ]


def measure_many_files(folder: Path) -> list[list[str]]:
    """Return the table rows about many input files and many work units.

    The rows have the time to list the files and split them into work units, to read the progress of the work units, and
    to finalize the shards. Only the first work unit is tokenized. The other work units are links to its files.
    """
    cpu_start = 0.0
    wall_start = 0.0

    def start_timer() -> None:
        """Start to measure CPU and wall time."""
        nonlocal cpu_start, wall_start
        cpu_start = time.process_time()
        wall_start = time.monotonic()

    def format_elapsed() -> str:
        """Return the CPU and wall time since `start_timer`."""
        return f"{time.process_time() - cpu_start:.1f} s of CPU, {time.monotonic() - wall_start:.1f} s"

    for number in range(FILES):
        if number % 1000 == 0:
            (folder / f"many/{number // 1000:03d}").mkdir(parents=True)
        (folder / f"many/{number // 1000:03d}/{number:06d}.txt").write_text("some text")
    start_timer()
    inputs = find_inputs(DataConfig(source=str(folder / "many")))
    split_into_units(inputs, measure_inputs(inputs, "text"), 1000)
    planning_time = format_elapsed()
    fsync = os.fsync
    os.fsync = lambda fd: None  # This saves time while the work units are written, which is not measured.
    # A token has about 3.5 bytes of text. Work units are planned for 0.9 of `shard_tokens` (data_prep/work_units.py).
    shard_tokens = max(1024, int((folder / "text.jsonl").stat().st_size / 3.5 / 0.9 / UNITS))
    config = make_config(folder, shard_tokens=shard_tokens, held_out=0.0)
    data = TextFolder(config, folder / "units")
    data.prepare(lambda _: None)
    (folder / "units/shards").mkdir()
    data.build_unit(0)
    first_unit = data.load_unit(0)
    assert first_unit is not None
    unit_count = data.unit_count
    # Make all other work units from links to the files of the first one, so that only their metadata differs.
    for unit in range(1, unit_count):
        entries: dict[str, list[ShardEntry]] = {"train": [], "held_out": []}
        for split, split_entries in entries.items():
            for entry in getattr(first_unit, split):
                name = entry.file.replace("unit-00000", f"unit-{unit:05d}")
                os.link(folder / "units" / entry.file, folder / "units" / name)
                split_entries.append(entry.model_copy(update={"file": name}))
        fields = {split: tuple(split_entries) for split, split_entries in entries.items()}
        manifest = first_unit.model_copy(update={"unit": unit, "key": data._unit_key(unit), **fields})
        write_manifest(data.unit_path(unit), manifest)
    (folder / "units/progress.jsonl").write_text(
        "".join(
            json.dumps({"key": data.manifest_key, "unit": unit, "time": 1, "seconds": 1}) + "\n"
            for unit in range(unit_count)
        )
    )
    os.fsync = fsync
    reopened = TextFolder(config, folder / "units")
    start_timer()
    progress = reopened.measure_progress()
    progress_time = format_elapsed()
    start_timer()
    assert progress[:2] == (unit_count, unit_count) and reopened.finalize(lambda _: None)
    return [
        [f"{len(inputs):,} files listed and split into units", planning_time, "≤ 10 s"],
        [f"progress of {unit_count:,} units", progress_time, ""],
        [f"finalizer of {unit_count:,} units", format_elapsed(), "≤ 60 s"],
    ]


def main() -> None:
    """Measure everything and write benchmarks/results/sharding.md. With `--child`, do the work of a child process."""
    parser = argparse.ArgumentParser()
    for name, kind, default in (
        ("mb", int, 64), ("repetitions", int, 3), ("datatrove", str, None), ("memory-mb", int, 2048),
        ("child", Path, None), ("out", Path, None), ("task", int, 0), ("tasks", int, 1), ("more", str, "{}"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    arguments = parser.parse_args()
    if arguments.child and arguments.out:
        run_array_task(arguments.child, arguments.out, arguments.task, arguments.tasks, **json.loads(arguments.more))
        return
    if arguments.child:
        tokenize_bare(arguments.child)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.jsonl", arguments.mb << 20)
        config = DataConfig(source=str(folder / "text.jsonl"), tokenizer=TokenizerConfig(vocab_size=8192))
        TextFolder(config, folder / "trained").prepare(lambda _: None)
        (folder / "tokenizer.json").write_bytes((folder / "trained/tokenizer.json").read_bytes())
        rows = measure_rates(folder, arguments.repetitions, arguments.datatrove)
        print(rows, flush=True)
        pairs = [
            (shard_text(folder, "one")[1], shard_text(folder, "two", tasks=2)[1])
            for _ in range(arguments.repetitions if (os.cpu_count() or 1) > 1 else 0)
        ]
        if pairs:
            ratio = statistics.median(one_task_s / two_tasks_s for one_task_s, two_tasks_s in pairs)
            rows.append(["2 tasks of one core each ÷ 1, median of the pairs", f"{ratio:.2f} × as fast", "≥ 1.8"])
        print(rows[-1], flush=True)
        rows += measure_many_files(folder)
        print(rows[-3:], flush=True)
        rows.append(measure_memory(folder, arguments.memory_mb))
    note = (
        f"{arguments.mb} MB of text, {arguments.repetitions} interleaved repetitions. Method: `benchmarks/sharding.py`."
    )
    write_table("sharding", "Speed and memory of sharding", note, ["figure", "result", "target"], rows)


if __name__ == "__main__":
    main()
