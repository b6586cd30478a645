"""Tasks that die of SIGKILL at random moments, again and again: nothing is lost, nothing done twice, nothing half-made
stays. Of the stage shard, for each kind of data folder, and of `data import`.

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

import h5py
import numpy as np
import pytest

from data_prep import tokens_commands
from data_prep.data_folder import PACKAGE, DataFolder
from data_prep.samples_folder import SamplesFolder
from data_prep.text_folder import TextFolder
from data_prep.tokenizer import train_bpe
from data_prep.tokens_folder import TokensFolder
from pipeline.base.errors import UserError
from pipeline.base.files import read_jsonl
from pipeline.config.datasets import DataConfig
from pipeline.config.user_model import UserModel
from pipeline.data.manifest import ShardEntry
from pipeline.run.code import CODE_ROOT
from tests.data_prep.test_shards import discard_log, make_data_config, make_documents, small_units, write_jsonl
from tests.data_prep.test_token_files import TEXTS, VOCAB, encode_documents, write_megatron
from tests.data_prep.test_token_files import make_config as make_tokens_config

__all__ = ["small_units"]

WAYS = ("name", "file", "call", "clock")
TASKS = """
import importlib, json, os, signal, sys, threading
from pathlib import Path
for name in ("shard_writer", "tokenizer", "duplicates", "text_folder"):
    importlib.import_module(f"data_prep.{name}")
from tests.data_prep.test_random_kills import KINDS

os.fsync = lambda fd: None  # slow, and of no matter here
kind = KINDS[sys.argv[1]](sys.argv[2])
count = {"name": 0, "file": 0, "call": 0}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def step(way, fatal):
    count[way] += 1
    if count[way] == fatal:
        die()

def task(path, number, tasks, way, fatal):
    sys.stdout = open(os.devnull, "w")
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
    kind.work(path, number, tasks)
    sys.setprofile(None)

for line in sys.stdin:
    (path, fates), pids = json.loads(line), []
    for number, (way, fatal) in enumerate(fates):
        if (pid := os.fork()) == 0:
            end = 1
            try:
                task(Path(path), number, len(fates), way, fatal)
                end = 0
            finally:
                if way in count and fatal == 0:
                    os.write(1, f"{count[way]} ".encode())
                os._exit(end)
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""

Done = dict[str, tuple[int, int]]
"""Inode and time of each file that was done: who writes one anew changes them."""


def stamps(files: list[Path]) -> Done:
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


class Shard:
    """The stage shard, on documents."""

    reach = (0.03, 0.3, 1.1)
    """Up to which parts of a task's work it is killed: soon, so that it takes many, and at the end."""
    least = 6
    """So many are killed."""

    def __init__(self, told: str) -> None:
        """told: the data's config."""
        self.told, self.data = told, DataConfig.model_validate_json(told)

    @classmethod
    def new(cls, folder: Path) -> Shard:
        source = str(write_jsonl(folder / "a.jsonl", [*make_documents(120), *make_documents(60)]))
        return cls(make_data_config([source]).model_dump_json())

    def folder(self, path: Path) -> DataFolder[Any, Any]:
        return TextFolder(self.data, path)

    def prepare(self, path: Path) -> None:
        self.folder(path).prepare(discard_log)

    def work(self, path: Path, number: int, tasks: int) -> None:
        folder = self.folder(path)
        folder.shard(number, tasks, discard_log)
        folder.finalize(discard_log)

    def done(self, path: Path) -> Done:
        """Those of the units that are whole by their hashes."""
        whole, found = self.folder(path), Done()
        for unit in range(whole.unit_count):
            made = whole.load_unit(unit)
            entries = [*made.train, *made.held_out] if made else []
            if made and not any(entry.find_problem(path / entry.file) for entry in entries):
                own = [path / entry.file for entry in entries if not entry.is_user_file]
                found |= stamps([whole.unit_path(unit), *own])
        return found

    def files(self, path: Path) -> dict[str, bytes]:
        """All that it wrote."""
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class Deduplicated(Shard):
    @classmethod
    def new(cls, folder: Path) -> Shard:
        source = str(write_jsonl(folder / "a.jsonl", [*make_documents(120), *make_documents(60)]))
        return cls(make_data_config([source], deduplicate=True).model_dump_json())


class Tokens(Shard):
    """On tokens that are used where they lie, in many parts."""

    @classmethod
    def new(cls, folder: Path) -> Shard:
        (tokenizer := folder / "tokenizer.json").write_text(train_bpe(TEXTS * 20, VOCAB, "<|endoftext|>"))
        source = str(write_megatron(folder, encode_documents(tokenizer, 4500)))
        return cls(make_tokens_config(source, tokenizer, shard_tokens=1024).model_dump_json())

    def folder(self, path: Path) -> DataFolder[Any, Any]:
        return TokensFolder(self.data, path)


class Arrays(Shard):
    """On samples in chunks, which are unpacked, some in one piece among them."""

    @classmethod
    def new(cls, folder: Path) -> Shard:
        draw = np.random.default_rng(0)
        for number in range(24):
            how: dict[str, Any] = {"chunks": (7, 30), "compression": "gzip"} if number % 6 else {}
            with h5py.File(folder / f"{number:02}.h5", "w") as file:
                file.create_dataset("x", data=draw.integers(0, 9, (40, 30), np.uint8), **how)
                file["y"] = draw.integers(0, 9, 40, np.int32)
        return cls(DataConfig(source=f"{folder}/*.h5", held_out=0.1).model_dump_json())

    def folder(self, path: Path) -> DataFolder[Any, Any]:
        model = UserModel("own", Path("own.py"), frozenset(), ("x", "y"), ("x",), ())
        return SamplesFolder(self.data, path, PACKAGE, model)


class Import(Shard):
    """`data import`; of several at once one works, and the others say so; once it is done none works any more."""

    reach, least = (0.03, 0.1, 0.3), 4

    def __init__(self, told: str) -> None:
        self.told, self.source = told, told

    @classmethod
    def new(cls, folder: Path) -> Shard:
        (tokenizer := folder / "tokenizer.json").write_text(train_bpe(TEXTS * 20, VOCAB, "<|endoftext|>"))
        documents = encode_documents(tokenizer, 600)
        for number in range(20):
            (inside := folder / "in" / f"{number:02}").mkdir(parents=True)
            write_megatron(inside, [one[:-1] for one in documents[30 * number : 30 * (number + 1)]])
        return cls(str(folder))

    def prepare(self, path: Path) -> None:
        path.mkdir()

    def work(self, path: Path, number: int, tasks: int) -> None:
        tokens_commands._SHARD_TOKENS = 300  # some of each file
        tokenizer = f"{self.source}/tokenizer.json"
        try:
            tokens_commands.run_data_command(
                "import", [f"{self.source}/in"], str(path / "to"), tokenizer, "<|endoftext|>", False
            )
        except UserError as error:
            assert error.code in ("data.folder_exists", "data.import_running"), error
        except FileNotFoundError:  # it began between the other's last look and its end
            assert tasks > 1 and (path / "to").exists()

    def done(self, path: Path) -> Done:
        if (path / "to").exists():
            return stamps([*(path / "to/shards").iterdir()])
        lines = read_jsonl(path / ".to.part/copied.jsonl")
        entries = [ShardEntry(**one) for line in lines for one in line["shards"]]
        assert not [words for one in entries if (words := one.find_problem(path / ".to.part" / one.file))]
        return stamps([path / ".to.part" / one.file for one in entries])

    def files(self, path: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in path.rglob("shards/*") if file.is_file()}


KINDS: dict[str, type[Shard]] = {one.__name__: one for one in (Shard, Deduplicated, Tokens, Arrays, Import)}


class Tasks:
    """Starts the tasks of a kind on a folder, each with its fate, and waits for all of them."""

    def __init__(self, kind: Shard) -> None:
        command = [sys.executable, "-c", TASKS, type(kind).__name__, kind.told]
        self.process = subprocess.Popen(command, cwd=CODE_ROOT, stdin=-1, stdout=-1, text=True)

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def run(self, folder: Path, fates: list[tuple[str, float]]) -> tuple[list[int], int]:
        """Exit codes, and what was counted of a single task whose count to die at is 0."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(folder), fates]) + "\n")
        self.process.stdin.flush()
        counted, codes = ("0 " + self.process.stdout.readline()).split("[")
        return json.loads(f"[{codes}"), sum(map(int, counted.split()))


@pytest.mark.parametrize("name", KINDS)
def test_random_kills_lose_and_repeat_nothing(
    tmp_path: Path, name: str, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    chance = random.Random(seed := int(os.environ.get("SLUICE_TEST_SEED", random.SystemRandom().randrange(2**32))))
    print(f"SLUICE_TEST_SEED={seed}")
    (tmp_path / "in").mkdir()
    kind, killed, most = KINDS[name].new(tmp_path / "in"), tmp_path / "killed", {"clock": 0.3}
    seen: Counter[str] = Counter()
    before: Done = {}
    half: set[str] = set()
    with Tasks(kind) as tasks:
        for way in ("name", "file", "call"):
            kind.prepare(tmp_path / way)
            codes, most[way] = tasks.run(tmp_path / way, [(way, 0)])
            assert codes == [0] and most[way] > 40
        right = kind.files(tmp_path / "name")
        kind.prepare(killed)
        for number in range(12):
            fates: list[tuple[str, float]] = [] if number else [("name", chance.randint(1, 6))]  # leaves a half file
            for _ in range(chance.randint(1, 3) if number else 0):
                way = chance.choice(WAYS)
                upto = chance.choice(kind.reach) * most[way]
                fates.append((way, chance.uniform(0, upto) if way == "clock" else chance.randint(1, int(upto))))
            codes, _ = tasks.run(killed, fates)
            assert set(codes) <= {0, -signal.SIGKILL}, (fates, codes)
            seen += Counter(way for (way, _), code in zip(fates, codes, strict=True) if code)
            now = kind.done(killed)
            assert before.items() <= now.items(), "what was done is lost, or was done again"
            before = now
            half |= {path.name for path in killed.rglob("shards/.*.tmp")}
            named = {name: text for name, text in kind.files(killed).items() if name.endswith((".h5", ".json"))}
            assert named.items() <= right.items(), "a file has its name, and is not whole"
        codes, _ = tasks.run(killed, [("none", 0)])
    assert codes == [0] and before.items() <= kind.done(killed).items()
    assert kind.files(killed) == right
    print(f"killed: {dict(seen)}, {len(half)} half files, {len(before)} files done before the last round")
    assert sum(seen.values()) >= kind.least and half, (seen, half)


def test_what_a_killed_task_left_of_a_manifest_goes_and_who_loses_it_to_another_is_done(
    tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks find all units made at once; the one that is first takes the other's file for a killed one's."""
    (tmp_path / "in").mkdir()
    kind, path = Shard.new(tmp_path / "in"), tmp_path / "data"
    kind.prepare(path)
    first, second = kind.folder(path), kind.folder(path)
    first.shard(0, 1, discard_log)
    left = [path / f".{name}.77.0a1b2c3d.tmp" for name in ("manifest.json", "rejected.jsonl")]
    (path / "web").mkdir()  # of a mixture
    left.append(path / "web/.manifest.json.77.0a1b2c3d.tmp")
    for one in left:
        one.write_text("half")
    replace, asked = os.replace, list[str]()

    def replaced(old: Any, new: Any) -> None:
        asked.append(str(new))
        if len(asked) == 1:
            assert second.finalize(discard_log)
        replace(old, new)

    monkeypatch.setattr(os, "replace", replaced)
    assert first.finalize(discard_log) and len(asked) == 3
    assert not [*path.rglob("*.tmp")] and first.find_shard_problem() is None

    def gone(old: Any, new: Any) -> None:
        raise FileNotFoundError(old)

    (path / "manifest.json").unlink()
    monkeypatch.setattr(os, "replace", gone)
    with pytest.raises(FileNotFoundError):
        first.finalize(discard_log)
