"""The data folder of a run, as the stages prepare and shard fill it: with shards of text, or with what is known of a
user's own arrays.

    data_dir/prepare.json            what `prepare` fixed, written last
    data_dir/shards/unit-00003.json  what a task made of one work unit, written last
    data_dir/progress.jsonl          a line for each unit that a task made or found, until the manifest is there
    data_dir/manifest.json           all units together (pipeline/data/manifest.py)

A manifest is written after the files that it describes, so it vouches for them: a crash leaves files without
a manifest, never the reverse. Each one carries a hash of the rest of it (a number that changed is noticed), and a key
of all that it was made from, the code of this package too. When anything of that changes, the key no longer fits and
the file counts as missing.

Once all units are done the inputs may go (scratch file systems purge): they are compared with the disk only while
there is something to make of them. A login node asks what is missing, so h5py, numpy and tokenizers are imported only
where the work is done.


Stripe rule of the shard folder on Lustre: as `site.stripe` says, by default one storage target for each shard.

Every task writes files of its own, so parallelism comes from the number of files; striping each of them over
several targets only makes opening dearer, until shards are so few that targets idle. `lfs setstripe -c 1 DIR` sets
the folder's default, which files inherit when they are created, so it runs before the first shard is written
(Lustre manual, "Managing file layout (striping)"). On other file systems, or without `lfs`, nothing happens; when
`lfs` fails, that is a warning: a shard with another stripe count is slower, not wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from data_prep.documents import Input
from data_prep.find_inputs import PYTHON_STDLIB, find_inputs, find_named_files
from pipeline.base.command import format_command
from pipeline.base.errors import InputError
from pipeline.base.files import append_line, read_file_system_type, read_jsonl, sha256_file, sha256_json
from pipeline.config.datasets import DataConfig
from pipeline.config.site import StripeConfig
from pipeline.data.manifest import (
    SHARDS_DIR,
    KeyedManifest,
    Manifest,
    SampleManifest,
    ShardEntry,
    check_has_sample,
    read_manifest_file,
)

PACKAGE = Path(__file__).resolve().parent
"""The sources that shape the shards' bytes."""
SHARED = (
    "pipeline/data/chat_template.py",
    "pipeline/data/chat_template_worker.py",
    "pipeline/data/special_tokens.py",
)
"""Other modules that shape them, in the folder of `PACKAGE`. Copies of older code do not have them."""
AGAIN = f"run the prepare stage again, e.g. `{format_command('resume', 'RUN')}`"

PROGRESS = "progress.jsonl"
_PACE = 100  # units that were made last tell the pace

Log = Callable[[str], None]
Kind = TypeVar("Kind", bound=KeyedManifest)
Prepared = TypeVar("Prepared", bound=KeyedManifest)
"""`prepare.json`."""
Unit = TypeVar("Unit", bound=KeyedManifest)
"""The manifest of a unit."""


def code_sha256(package: Path) -> str:
    """SHA-256 over names and contents of the sources in folder `package` and below, as 64 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n{sha256_file(path)}\n".encode())
    return digest.hexdigest()


class DataFolder(ABC, Generic[Prepared, Unit]):
    """The content of a data folder and how it is produced. An object reads the result of `prepare` once."""

    words: ClassVar[str]
    """A short description of what `prepare` writes, for messages."""
    prepared_kind: type[Prepared]
    manifest_kind: ClassVar[type[Manifest | SampleManifest]]
    endings: ClassVar[Mapping[str, str] | None] = None
    """Formats of inputs by file name ending; None: those of text."""

    stripe_options = ""
    """Options of the `lfs setstripe` that striped the folder of the shards; empty if it is not on Lustre."""

    task_of_tasks: tuple[int, int] = (0, 1)
    """The number of this task, and how many tasks there are."""

    length = -1
    """`data.sequence_length`; a shard must have more tokens to contain a training sample."""

    def __init__(self, data: DataConfig, path: Path, package: Path = PACKAGE) -> None:
        """`package`: the copy of `data_prep` that fills the folder, such as the one in a run's `code/`."""
        self.data, self.path, self.package = data, path, package

    # -- what differs ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def key(self) -> str:
        """Key of `prepare.json`: a hash of config and code."""

    @property
    @abstractmethod
    def inputs(self) -> Sequence[Input]:
        """The inputs as `prepare` recorded them.

        Raises InputError if its output is missing, damaged, or from another config or code.
        """

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of units. Raises InputError as `inputs` does."""

    @property
    def total(self) -> int:
        """Number of units, without reading the plan if possible."""
        return self.count

    @abstractmethod
    def unit(self, number: int) -> Unit | None:
        """Return the manifest of a unit; None if it is missing, incomplete (by file sizes) or outdated."""

    @abstractmethod
    def prepare_inputs(self, log: Log) -> None:
        """Do the work of `prepare`. Raises UserError for unusable inputs."""

    @abstractmethod
    def build_unit(self, unit: int) -> bool:
        """Build one unit. Return False if a valid one existed.

        Raises InputError for an input that changed since `prepare`, UserError for one that cannot be read, and OSError
        if the file system refuses.
        """

    @abstractmethod
    def combine_units(self, units: Sequence[Unit], log: Log) -> None:
        """Write the manifest of all units. Raises UserError if the data cannot be used for training."""

    # -- what is the same --------------------------------------------------------------------------------

    @cached_property
    def code(self) -> str:
        """Hash of the code that fills the folder."""
        found, others = code_sha256(self.package), [self.package.parent / name for name in SHARED]
        shared = [sha256_file(path) for path in others if path.exists()]
        return sha256_json([found, *shared]) if shared else found

    def unit_path(self, unit: int) -> Path:
        """Return the path of the manifest of a work unit."""
        return self.path / SHARDS_DIR / f"unit-{unit:05d}.json"

    @cached_property
    def _left_over(self) -> dict[int, list[Path]]:
        """Temporary files of killed tasks by unit, listed once when this task starts."""
        found: dict[int, list[Path]] = {}
        for path in (self.path / SHARDS_DIR).glob(".unit-*.tmp"):
            if known := re.match(r"\.unit-(\d+)(-train|-held_out|\.json|\.h5)", path.name):
                found.setdefault(int(known[1]), []).append(path)
        return found

    def remove_leftovers(self, unit: int) -> None:
        """Remove temporary files that killed tasks left of a unit of this task."""
        for path in self._left_over.pop(unit, ()):
            path.unlink(missing_ok=True)

    def load_matching(self, path: Path, kind: type[Kind], key: str) -> Kind:
        """Return the manifest at `path`. Raises InputError if it is missing, damaged, or its key differs."""
        found = read_manifest_file(path, kind, AGAIN)
        if found.key != key:
            what = "another data config, tokenizer or code, or from other inputs"
            raise InputError("data.outdated", f"{path} was made with {what}: {AGAIN}")
        return found

    @cached_property
    def prepared(self) -> Prepared:
        """The content of `prepare.json`.

        Raises InputError if it is missing, damaged, or from another config or code.
        """
        return self.load_matching(self.path / "prepare.json", self.prepared_kind, self.key)

    @property
    def manifest_key(self) -> str:
        """Key of `manifest.json`. Raises InputError as `prepared` does."""
        return self.prepared.key

    def find_prepare_problem(self, *, check_inputs: bool = True) -> str | None:
        """Return why prepare is not done; None if its output is complete and made for this config and code.

        While units are missing, the inputs must also be unchanged since `prepare`. `check_inputs`: check each of them.
        """
        try:
            inputs = self.inputs
        except InputError as error:
            return str(error)
        if not check_inputs or self.find_shard_problem() is None:
            return None
        return next(filter(None, (source.find_problem() for source in inputs)), None)

    def find_shard_problem(self, *, check_user_files: bool = True) -> str | None:
        """Return why the shards are not done; None if all exist with their recorded sizes, for this config and code.

        A file of many parts is checked once. `check_user_files`: also check files that the user owns.
        """
        try:
            manifest = self.load_matching(self.path / "manifest.json", self.manifest_kind, self.manifest_key)
            for entry in {entry.file: entry for entry in (*manifest.train, *manifest.held_out)}.values():
                if check_user_files or not entry.is_user_file:
                    entry.check(self.path, hashes=False)
        except InputError as error:
            return str(error)
        return None

    def progress(self) -> tuple[int, int, float | None]:
        """Return the finished units, all units, and the estimated remaining seconds of all tasks (None if unknown).

        Returns (0, 0, None) before `prepare`. While tasks run, only `progress.jsonl` is read.
        """
        try:
            told, total = self._read_progress(), self.total
        except InputError:
            return 0, 0, None
        if (self.path / "manifest.json").exists() and self.find_shard_problem(check_user_files=False) is None:
            return total, total, None
        if not told and (self.path / "manifest.json").exists():  # something of what was whole is missing
            return sum(self.unit(number) is not None for number in range(total)), total, None
        made = [line for line in told.values() if line["seconds"]][-_PACE:]
        if not made:
            return len(told), total, None
        began = min(line["time"] - line["seconds"] for line in made)
        return len(told), total, (total - len(told)) * (made[-1]["time"] - began) / len(made)

    def _read_progress(self) -> dict[int, dict[str, Any]]:
        """Return the last line of `progress.jsonl` of each unit."""
        lines, key = read_jsonl(self.path / PROGRESS), self.manifest_key
        return {line["unit"]: line for line in lines if line.get("key") == key}

    def look(self) -> list[str]:
        """Check the inputs quickly and return the named files, before a run exists.

        Raises UserError for unusable inputs.
        """
        return self.list_named_files()

    def list_named_files(self) -> list[str]:
        """Return the files that the config names (`find_named_files`), without those of Python's standard library.

        Raises UserError if there are none.
        """
        named = [source for source in self.data.sources if source != PYTHON_STDLIB]
        asked = self.data.model_copy(update={"source": named})
        return [path for path, _ in find_named_files(asked, self.endings)]

    @property
    def fixed(self) -> str:
        """Description of the output of `prepare`. Raises InputError as `prepared` does."""
        return f"{self.words} fixed"

    def describe_result(self) -> str:
        """Return a description of the finished data, such as `: 731 documents, …`; empty if it is not finished."""
        try:
            return f": {self.load_matching(self.path / 'manifest.json', self.manifest_kind, self.manifest_key)}"
        except InputError:
            return ""

    def has_same_inputs(self) -> bool:
        """Return whether the source names the same unchanged files as before."""
        return list(self.inputs) == find_inputs(self.data, self.endings)

    def prepare(self, log: Log) -> None:
        """Write what units are built from. Returns at once if that is done and still valid.

        While units are missing, lists the inputs again and starts over if they have changed.
        """
        if self.find_prepare_problem() is None and (self.find_shard_problem() is None or self.has_same_inputs()):
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.prepare_inputs(log)

    def shard(self, task: int, tasks: int, log: Log, striping: StripeConfig = StripeConfig()) -> None:
        """Build the missing units of task `task` of `tasks`. Raises what `build_unit` raises."""
        units, self.task_of_tasks = range(task, self.count, tasks), (task, tasks)
        self.create_shards_dir(log, striping)
        told = self._read_progress()
        for number, unit in enumerate(units, 1):
            began = time.monotonic()
            made = self.build_unit(unit)
            seconds = time.monotonic() - began if made else 0
            if made or unit not in told:
                line = {"key": self.manifest_key, "unit": unit, "time": time.time(), "seconds": seconds}
                append_line(self.path / PROGRESS, json.dumps(line | {"stripe": self.stripe_options}))
            log(f"shard: unit {unit} {'written' if made else 'was there already'} ({number} of {len(units)})")

    def create_shards_dir(self, log: Log, striping: StripeConfig) -> None:
        """Create the folder of shards, striped by the rule."""
        (self.path / SHARDS_DIR).mkdir(exist_ok=True)
        self.stripe_options = stripe_folder(self.path / SHARDS_DIR, striping, log)

    def check_usable(self, train: Sequence[ShardEntry]) -> None:
        """Raise UserError if there is no training sample; the ranks would, after hours in a queue."""
        check_has_sample(train, self.length)

    def finalize(self, log: Log) -> bool:
        """Write the manifest of all units. Return False if units are missing, which other tasks build.

        File sizes are checked here; the hashes are those of the tasks that wrote the shards. Raises what
        `combine_units` raises.
        """
        told, made = self._read_progress(), {}
        for number in sorted(range(self.count), key=lambda one: one in told):  # a line may be lost, a unit is not
            if (unit := self.unit(number)) is None:  # as a rule the first: few tasks read what all of them made
                return False
            made[number] = unit
        self.stripe_options = next(filter(None, (line.get("stripe") for line in told.values())), self.stripe_options)
        try:
            self.combine_units([made[number] for number in range(self.count)], log)
        except FileNotFoundError:  # another task was first, and took this one's file for a killed one's
            if self.find_shard_problem() is not None:
                raise
        killed = (path for names in (".*.tmp", "*/.[mr]*.tmp") for path in self.path.glob(names))  # a source's, too
        for path in (*killed, self.path / PROGRESS):
            path.unlink(missing_ok=True)
        return True


_TIMEOUT_S = 60


def stripe_folder(
    directory: Path,
    rule: StripeConfig,
    log: Callable[[str], None],
    file_system: Callable[[Path], str] = read_file_system_type,
) -> str:
    """Stripe new files of `directory` by `rule` where it lies on Lustre; the options that `lfs setstripe` took, ""
    where it took none. Never raises for what `lfs` does."""
    lfs = shutil.which("lfs")
    if lfs is None or file_system(directory) != "lustre":
        return ""
    size = [] if rule.size_mb is None else ["-S", f"{rule.size_mb}M"]
    pool = [] if rule.pool is None else ["-p", rule.pool]
    options = ["-c", str(rule.count), *size, *pool]
    command = [lfs, "setstripe", *options, os.fspath(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        log(f"warning: {' '.join(command)} failed, the folder keeps its stripe count: {detail}")
        return ""
    return " ".join(options)
