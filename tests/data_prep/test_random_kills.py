"""Tasks of the stage shard that die of SIGKILL at random moments, again and again: nothing is lost, nothing done twice.

A task is killed just before a file gets its name, at a random one of all things that it asks of the file system (an
audit event of Python's: open, listdir …), at a random call of any function, or by the clock, in the middle of whatever
it is at. All tasks are processes; one that has imported everything forks them, which takes milliseconds. The seed is
printed where the test fails; SLUICE_TEST_SEED takes it again (kills by the clock will fall otherwise).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep.text.text_folder import TextFolder
from pipeline.config.datasets import DataConfig
from pipeline.run.code import CODE_ROOT
from tests.data_prep.test_shards import all_bytes, config, prepare, quiet, run_tasks, small_units, texts, write_jsonl

__all__ = ["small_units"]

WAYS = ("name", "file", "call", "clock")
TASKS = """
import importlib, json, os, signal, sys, threading
from pathlib import Path
from data_prep.text.text_folder import TextFolder
from pipeline.config.datasets import DataConfig
for name in ("shard_file", "tokenizer", "duplicates", "rejected"):
    importlib.import_module(f"data_prep.text.{name}")

os.fsync = lambda fd: None  # slow, and of no matter here
data, path = DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])
count = {"name": 0, "file": 0, "call": 0}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def step(way, fatal):
    count[way] += 1
    if count[way] == fatal:
        die()

def task(number, tasks, way, fatal):
    if way == "file":
        asked = ("open", "os.", "tempfile.", "fcntl.", "glob.")
        sys.addaudithook(lambda event, _: event.startswith(asked) and step("file", fatal))
    elif way == "name":
        sys.addaudithook(lambda event, _: event == "os.rename" and step("name", fatal))
    elif way == "call":
        hook = lambda _, event, __: event.endswith("call") and step("call", fatal)
        threading.setprofile(hook)
        sys.setprofile(hook)
    elif way == "clock":
        threading.Timer(fatal, die).start()
    folder = TextFolder(data, path)
    folder.shard(number, tasks, lambda _: None)
    folder.finalize(lambda _: None)
    sys.setprofile(None)

for line in sys.stdin:
    fates, pids = json.loads(line), []
    for number, (way, fatal) in enumerate(fates):
        if (pid := os.fork()) == 0:
            end = 1
            try:
                task(number, len(fates), way, fatal)
                end = 0
            finally:
                if way in count and fatal == 0:
                    os.write(1, f"{count[way]} ".encode())
                os._exit(end)
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


class Tasks:
    """Starts the tasks of the stage on a data folder, each with its fate, and waits for all of them."""

    def __init__(self, data: DataConfig, folder: Path) -> None:
        command = [sys.executable, "-c", TASKS, data.model_dump_json(), str(folder)]
        self.process = subprocess.Popen(command, cwd=CODE_ROOT, stdin=-1, stdout=-1, text=True)

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def run(self, fates: list[tuple[str, float]]) -> tuple[list[int], int]:
        """Exit codes, and what was counted of a single task whose count to die at is 0."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(fates) + "\n")
        self.process.stdin.flush()
        counted, codes = ("0 " + self.process.stdout.readline()).split("[")
        return json.loads(f"[{codes}"), sum(map(int, counted.split()))


def done_units(data: DataConfig, folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each file of the units that are whole by their hashes: who writes one anew changes them."""
    whole = TextFolder(data, folder)
    found: dict[str, tuple[int, int]] = {}
    for unit in range(whole.count):
        if (made := whole.unit(unit, hashes=True)) is not None:
            files = [whole.unit_path(unit), *(folder / entry.file for entry in (*made.train, *made.held_out))]
            found |= {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}
    return found


@pytest.mark.parametrize("deduplicate", [False, True])
def test_random_kills_lose_and_repeat_nothing(
    tmp_path: Path, deduplicate: bool, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    chance = random.Random(seed := int(os.environ.get("SLUICE_TEST_SEED", random.SystemRandom().randrange(2**32))))
    print(f"SLUICE_TEST_SEED={seed}")
    documents = [*texts(120), *texts(60)]
    more: dict[str, Any] = {"deduplicate": True} if deduplicate else {}
    data = config([str(write_jsonl(tmp_path / "a.jsonl", documents))], **more)
    run_tasks(data, tmp_path / "undisturbed")
    right, killed = all_bytes(tmp_path / "undisturbed"), tmp_path / "killed"
    most = {"clock": 0.3}
    for way in ("name", "file", "call"):
        prepare(data, tmp_path / way, quiet)
        with Tasks(data, tmp_path / way) as tasks:
            codes, most[way] = tasks.run([(way, 0)])
            assert codes == [0] and most[way] > 50
    prepare(data, killed, quiet)
    seen: Counter[str] = Counter()
    before: dict[str, tuple[int, int]] = {}
    half: set[str] = set()
    with Tasks(data, killed) as tasks:
        for number in range(12):
            fates: list[tuple[str, float]] = (
                [] if number else [("name", chance.randint(1, 6))]
            )  # so a half file is left
            for _ in range(chance.randint(1, 3)):
                way = chance.choice(WAYS)
                upto = chance.choice((0.03, 0.3, 1.1)) * most[way]  # soon, so that it takes many, and at the end
                fates.append((way, chance.uniform(0, upto) if way == "clock" else chance.randint(1, int(upto))))
            codes, _ = tasks.run(fates)
            assert set(codes) <= {0, -signal.SIGKILL}, (fates, codes)
            seen += Counter(way for (way, _), code in zip(fates, codes, strict=True) if code)
            now = done_units(data, killed)
            assert before.items() <= now.items(), "a unit that was done is lost, or was done again"
            before = now
            half |= {path.name for path in (killed / "shards").glob(".unit-*.tmp")}
            named = {name: text for name, text in all_bytes(killed).items() if name.endswith((".h5", ".json"))}
            assert named.items() <= right.items(), "a file has its name, and is not whole"
        codes, _ = tasks.run([("none", 0)])
    assert codes == [0] and before.items() <= done_units(data, killed).items()
    unnamed = (".manifest.json.", ".rejected.jsonl.")  # of a killed finalizer: another one might be at work on it
    assert {name: text for name, text in all_bytes(killed).items() if not name.startswith(unnamed)} == right
    print(f"killed: {dict(seen)}, {len(half)} half files, {len(before)} files done before the last round")
    assert sum(seen.values()) >= 6 and half, (seen, half)
