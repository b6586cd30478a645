"""Tests that tasks which are killed at random moments lose and repeat no finished work and leave no incomplete files.

This holds for the shard stage with each kind of data folder, and for `data import`. A task kills itself with SIGKILL at
a random event: before a rename, at a file system operation (an audit event of Python), at a function call, or when a
timer expires. A process that has imported all modules forks the tasks, which takes milliseconds.

The test of random kills prints its seed. Set SLUICE_TEST_SEED to use the same seed again. Kills by timer are not
reproducible.
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

EVENT_KINDS = ("rename", "file", "call")
"""Events that a task counts: it kills itself before the event with a given number."""
KILL_KINDS = (*EVENT_KINDS, "timer")
RUN_TASKS_SCRIPT = """
import importlib, json, os, signal, sys, threading
from pathlib import Path
for name in ("shard_writer", "tokenizer", "duplicates", "text_folder"):
    importlib.import_module(f"data_prep.{name}")
from tests.data_prep.test_random_kills import WORKLOADS

os.fsync = lambda fd: None  # It is slow, and only matters if the machine crashes.
workload = WORKLOADS[sys.argv[1]](sys.argv[2])
counts = {"rename": 0, "file": 0, "call": 0}

def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)

def count_event(kind, kill_at):
    counts[kind] += 1
    if counts[kind] == kill_at:
        kill_self()

def run_task(path, number, tasks, kind, kill_at):
    sys.stdout = open(os.devnull, "w")
    if kind == "file":
        prefixes = ("open", "os.", "tempfile.", "fcntl.", "glob.")
        sys.addaudithook(lambda event, _: event.startswith(prefixes) and count_event("file", kill_at))
    elif kind == "rename":
        sys.addaudithook(lambda event, _: event == "os.rename" and count_event("rename", kill_at))
    elif kind == "call":
        hook = lambda _, event, __: event.endswith("call") and count_event("call", kill_at)
        threading.setprofile(hook)
        sys.setprofile(hook)
    elif kind == "timer":
        threading.Timer(kill_at, kill_self).start()
    workload.run_task(path, number, tasks)
    sys.setprofile(None)

for line in sys.stdin:
    path, kills = json.loads(line)
    pids = []
    for number, (kind, kill_at) in enumerate(kills):
        if (pid := os.fork()) == 0:
            exit_code = 1
            try:
                run_task(Path(path), number, len(kills), kind, kill_at)
                exit_code = 0
            finally:
                if kind in counts and kill_at == 0:
                    os.write(1, f"{counts[kind]} ".encode())
                os._exit(exit_code)
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""

Stamps = dict[str, tuple[int, int]]
"""Inode and modification time of finished files by name. They change if a task writes a file again."""


def read_stamps(files: list[Path]) -> Stamps:
    """Return the stamps of these files."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


class TextShards:
    """The shard stage with documents.

    Args:
        argument: what a new process needs to open the workload. For this class, this is the data config as JSON.
    """

    kill_ranges = (0.03, 0.3, 1.1)
    """Fractions of the work. Each kill has a random time in the range from 0 to one of these fractions.

    A fraction greater than 1 includes the end of a task.
    """
    min_kills = 6
    """At least this number of tasks must be killed in a test."""

    def __init__(self, argument: str) -> None:
        self.argument = argument

    @classmethod
    def create(cls, folder: Path) -> TextShards:
        """Write the inputs to a folder and return the workload that reads them."""
        source = str(write_jsonl(folder / "a.jsonl", [*make_documents(120), *make_documents(60)]))
        return cls(make_data_config([source]).model_dump_json())

    def open_folder(self, path: Path) -> DataFolder[Any, Any]:
        """Return the data folder at `path`."""
        return TextFolder(DataConfig.model_validate_json(self.argument), path)

    def prepare(self, path: Path) -> None:
        """Prepare the folder for the tasks."""
        self.open_folder(path).prepare(discard_log)

    def run_task(self, path: Path, number: int, tasks: int) -> None:
        """Do the work of task `number` of `tasks`."""
        folder = self.open_folder(path)
        folder.shard(number, tasks, discard_log)
        folder.finalize(discard_log)

    def read_finished_stamps(self, path: Path) -> Stamps:
        """Return the stamps of the units whose files match their hashes."""
        folder = self.open_folder(path)
        stamps: Stamps = {}
        for number in range(folder.unit_count):
            unit = folder.load_unit(number)
            entries = [*unit.train, *unit.held_out] if unit else []
            if unit and not any(entry.find_problem(path / entry.file) for entry in entries):
                shards = [path / entry.file for entry in entries if not entry.is_user_file]
                stamps |= read_stamps([folder.unit_path(number), *shards])
        return stamps

    def read_output_files(self, path: Path) -> dict[str, bytes]:
        """Return the content of all files that the tasks wrote, by name."""
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class DeduplicatedTextShards(TextShards):
    """The shard stage with documents, without duplicates."""

    @classmethod
    def create(cls, folder: Path) -> TextShards:
        source = str(write_jsonl(folder / "a.jsonl", [*make_documents(120), *make_documents(60)]))
        return cls(make_data_config([source], deduplicate=True).model_dump_json())


class TokenShards(TextShards):
    """The shard stage with a token file that is used in place, in many ranges."""

    @classmethod
    def create(cls, folder: Path) -> TextShards:
        tokenizer = write_tokenizer(folder)
        source = str(write_megatron(folder, encode_documents(tokenizer, 4500)))
        return cls(make_tokens_config(source, tokenizer, shard_tokens=1024).model_dump_json())

    def open_folder(self, path: Path) -> DataFolder[Any, Any]:
        return TokensFolder(DataConfig.model_validate_json(self.argument), path)


class SampleShards(TextShards):
    """The shard stage with HDF5 files of samples: most are chunked, so they are unpacked, and some are contiguous."""

    @classmethod
    def create(cls, folder: Path) -> TextShards:
        generator = np.random.default_rng(0)
        for number in range(24):
            storage: dict[str, Any] = {"chunks": (7, 30), "compression": "gzip"} if number % 6 else {}
            with h5py.File(folder / f"{number:02}.h5", "w") as file:
                file.create_dataset("x", data=generator.integers(0, 9, (40, 30), np.uint8), **storage)
                file["y"] = generator.integers(0, 9, 40, np.int32)
        return cls(DataConfig(source=f"{folder}/*.h5", held_out=0.1).model_dump_json())

    def open_folder(self, path: Path) -> DataFolder[Any, Any]:
        model = UserModel("own", Path("own.py"), frozenset(), ("x", "y"), ("x",), ())
        return SamplesFolder(DataConfig.model_validate_json(self.argument), path, PACKAGE, model)


class TokenImport(TextShards):
    """`data import`, whose argument is the folder of inputs.

    Only one of several processes does the work. The others fail, and so does each process after the import is finished.
    """

    kill_ranges = (0.03, 0.1, 0.3)
    min_kills = 4

    @classmethod
    def create(cls, folder: Path) -> TextShards:
        documents = encode_documents(write_tokenizer(folder), 600)
        for number in range(20):
            input_folder = folder / "in" / f"{number:02}"
            input_folder.mkdir(parents=True)
            write_megatron(input_folder, [document[:-1] for document in documents[30 * number : 30 * (number + 1)]])
        return cls(str(folder))

    def prepare(self, path: Path) -> None:
        path.mkdir()

    def run_task(self, path: Path, number: int, tasks: int) -> None:
        tokens_commands._SHARD_TOKENS = 300  # Each input then fills several shards.
        try:
            tokens_commands.run_data_command(
                "import",
                [f"{self.argument}/in"],
                str(path / "to"),
                f"{self.argument}/tokenizer.json",
                "<|endoftext|>",
                packed=False,
            )
        except UserError as error:
            assert error.code in ("data.folder_exists", "data.import_running"), error
        except FileNotFoundError:  # Another process finished after this one had checked for a running import.
            assert tasks > 1
            assert (path / "to").exists()

    def read_finished_stamps(self, path: Path) -> Stamps:
        if (path / "to").exists():
            return read_stamps([*(path / "to/shards").iterdir()])
        part = path / ".to.part"
        lines = read_jsonl(part / "copied.jsonl")
        entries = [ShardEntry(**values) for line in lines for values in line["shards"]]
        assert not [problem for entry in entries if (problem := entry.find_problem(part / entry.file))]
        return read_stamps([part / entry.file for entry in entries])

    def read_output_files(self, path: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in path.rglob("shards/*") if file.is_file()}


WORKLOADS: dict[str, type[TextShards]] = {
    workload.__name__: workload
    for workload in (TextShards, DeduplicatedTextShards, TokenShards, SampleShards, TokenImport)
}


def write_tokenizer(folder: Path) -> Path:
    """Train a small tokenizer and return the path of its file."""
    path = folder / "tokenizer.json"
    path.write_text(train_bpe(TEXTS * 20, VOCAB, "<|endoftext|>"))
    return path


class TaskRunner:
    """Runs tasks of a workload as processes, which kill themselves as requested."""

    def __init__(self, workload: TextShards) -> None:
        command = [sys.executable, "-c", RUN_TASKS_SCRIPT, type(workload).__name__, workload.argument]
        self.process = subprocess.Popen(command, cwd=CODE_ROOT, stdin=-1, stdout=-1, text=True)

    def __enter__(self) -> TaskRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def run(self, folder: Path, kills: list[tuple[str, float]]) -> tuple[list[int], int]:
        """Run one task per entry of `kills` at once, and wait for all of them.

        Args:
            folder: the folder that the tasks fill.
            kills: for each task, a kind of kill and its time: the number of the event, or the seconds of the timer.
                With event 0, the task counts the events and is not killed. A task of the kind `none` is not killed.

        Returns:
            The exit codes, and the number of counted events if there is one task with event 0; otherwise 0.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(folder), kills]) + "\n")
        self.process.stdin.flush()
        # The line is a count for each task with event 0, and then the list of exit codes.
        counts, exit_codes = ("0 " + self.process.stdout.readline()).split("[")
        return json.loads(f"[{exit_codes}"), sum(map(int, counts.split()))


def choose_kill(generator: random.Random, workload: TextShards, limits: dict[str, float]) -> tuple[str, float]:
    """Return a random kind of kill and when it happens. `limits` has the events or seconds of the whole work."""
    kind = generator.choice(KILL_KINDS)
    limit = generator.choice(workload.kill_ranges) * limits[kind]
    return kind, generator.uniform(0, limit) if kind == "timer" else generator.randint(1, int(limit))


@pytest.mark.story
@pytest.mark.parametrize("name", WORKLOADS)
def test_random_kills_lose_and_repeat_no_finished_work(
    tmp_path: Path, name: str, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    seed = int(os.environ.get("SLUICE_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"SLUICE_TEST_SEED={seed}")
    generator = random.Random(seed)
    (tmp_path / "in").mkdir()
    workload = WORKLOADS[name].create(tmp_path / "in")
    folder = tmp_path / "killed"
    limits: dict[str, float] = {"timer": 0.3}
    kill_counts: Counter[str] = Counter()
    finished: Stamps = {}
    temporary_files: set[str] = set()
    with TaskRunner(workload) as runner:
        for kind in EVENT_KINDS:
            workload.prepare(tmp_path / kind)
            exit_codes, limits[kind] = runner.run(tmp_path / kind, [(kind, 0)])
            assert exit_codes == [0]
            assert limits[kind] > 40
        expected_files = workload.read_output_files(tmp_path / "rename")
        workload.prepare(folder)
        for attempt in range(12):
            if attempt == 0:
                kills: list[tuple[str, float]] = [("rename", generator.randint(1, 6))]  # leaves a temporary file
            else:
                kills = [choose_kill(generator, workload, limits) for _ in range(generator.randint(1, 3))]
            exit_codes, _ = runner.run(folder, kills)
            assert set(exit_codes) <= {0, -signal.SIGKILL}, (kills, exit_codes)
            kill_counts += Counter(kind for (kind, _), code in zip(kills, exit_codes, strict=True) if code)
            still_finished = workload.read_finished_stamps(folder)
            assert finished.items() <= still_finished.items(), "a finished file was lost or written again"
            finished = still_finished
            temporary_files |= {path.name for path in folder.rglob("shards/.*.tmp")}
            files = workload.read_output_files(folder).items()
            final_files = {name: content for name, content in files if name.endswith((".h5", ".json"))}
            assert final_files.items() <= expected_files.items(), "a file with its final name is incomplete"
        exit_codes, _ = runner.run(folder, [("none", 0)])
    assert exit_codes == [0]
    assert finished.items() <= workload.read_finished_stamps(folder).items()
    assert workload.read_output_files(folder) == expected_files
    print(
        f"killed: {dict(kill_counts)}, {len(temporary_files)} temporary files, {len(finished)} files finished before "
        "the last attempt"
    )
    assert sum(kill_counts.values()) >= workload.min_kills, kill_counts
    assert temporary_files


def test_finalize_removes_temporary_files_and_succeeds_if_another_task_finishes_first(
    tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks finalize at once. The second removes the temporary file of the first, like that of a killed task.

    The missing file is an error only if no complete manifest exists.
    """
    (tmp_path / "in").mkdir()
    workload = TextShards.create(tmp_path / "in")
    path = tmp_path / "data"
    workload.prepare(path)
    first_task = workload.open_folder(path)
    second_task = workload.open_folder(path)
    first_task.shard(0, 1, discard_log)
    (path / "web").mkdir()  # A mixture has such folders.
    for name in (".manifest.json", ".rejected.jsonl", "web/.manifest.json"):
        (path / f"{name}.77.0a1b2c3d.tmp").write_text("incomplete")
    real_replace = os.replace
    replaced_files: list[str] = []

    def finalize_second_task_before_replace(old: Any, new: Any) -> None:
        replaced_files.append(str(new))
        if len(replaced_files) == 1:
            assert second_task.finalize(discard_log)
        real_replace(old, new)

    monkeypatch.setattr(os, "replace", finalize_second_task_before_replace)
    assert first_task.finalize(discard_log)
    assert len(replaced_files) == 3  # one by the first task, which then fails, and two by the second task
    assert not [*path.rglob("*.tmp")]
    assert first_task.find_shard_problem() is None

    def raise_file_not_found(old: Any, new: Any) -> None:
        raise FileNotFoundError(old)

    (path / "manifest.json").unlink()
    monkeypatch.setattr(os, "replace", raise_file_not_found)
    with pytest.raises(FileNotFoundError):
        first_task.finalize(discard_log)
