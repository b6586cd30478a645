"""The base class of all data folders. The stages prepare and shard fill the data folder of a run.

    data_dir/prepare.json            the decisions of `prepare`; written last by `prepare`
    data_dir/shards/unit-00003.json  the shards of one work unit; written last by the array task that builds the unit
    data_dir/progress.jsonl          a line for each work unit that a task has built or found; removed at the end
    data_dir/manifest.json           all shards (pipeline/data/manifest.py)

A manifest is written after the files that it describes. After a crash there may be files without a manifest, but no
manifest without its files. Each manifest has a checksum and a key. The key is the hash of the inputs, the config and
the code of this package. If the key differs, the file counts as missing.

The inputs are needed only until all shards exist. Commands on login nodes also check which files are missing, and must
start fast. The modules of data folders therefore import h5py, numpy and tokenizers, and modules that need these
packages, only inside functions.
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
"""Folder of the code that determines the content of shards."""
SHARED_MODULES = (
    "pipeline/data/chat_template.py",
    "pipeline/data/chat_template_worker.py",
    "pipeline/data/special_tokens.py",
)
"""Other modules that determine the content of shards, relative to the parent folder of `PACKAGE`.

The code of older runs does not have these modules.
"""
RUN_PREPARE_AGAIN = f"run the prepare stage again, e.g. `{format_command('resume', 'RUN')}`"

PROGRESS_FILE = "progress.jsonl"
_PACE_UNITS = 100
"""Maximum number of recently built work units from which the remaining time is estimated."""

Log = Callable[[str], None]
"""Function that writes a message to the log of the stage."""
Kind = TypeVar("Kind", bound=KeyedManifest)
Prepared = TypeVar("Prepared", bound=KeyedManifest)
"""Type of the content of `prepare.json`."""
Unit = TypeVar("Unit", bound=KeyedManifest)
"""Type of the manifest of a work unit."""


def hash_code(package: Path) -> str:
    """Return the SHA-256 of the paths and contents of all Python files under a folder, as 64 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n{sha256_file(path)}\n".encode())
    return digest.hexdigest()


class DataFolder(ABC, Generic[Prepared, Unit]):
    """A data folder: reads and checks its files, and builds missing files. An object reads `prepare.json` only once.

    Args:
        data: the section `data` of the config.
        path: the data folder.
        package: folder of the code of `data_prep` that builds the files, such as the folder in a run's `code/`. The
            hash of the code is part of all keys.
    """

    prepared_label: ClassVar[str]
    """A short description of the output of `prepare`, for messages."""
    prepared_kind: type[Prepared]
    """The class with the content of `prepare.json`."""
    manifest_kind: ClassVar[type[Manifest | SampleManifest]]
    """The class with the content of `manifest.json`."""
    endings: ClassVar[Mapping[str, str] | None] = None
    """Formats of inputs by file name ending; None for the formats of text."""

    stripe_options = ""
    """Options with which `lfs setstripe` striped the folder of shards; empty if the folder is not on Lustre."""

    array_task: tuple[int, int] = (0, 1)
    """Index of this Slurm array task, and number of array tasks."""

    sequence_length = -1
    """`data.sequence_length`. A shard must have more tokens to contain a training sample.

    The shard stage sets this value. With -1, this is not checked.
    """

    def __init__(self, data: DataConfig, path: Path, package: Path = PACKAGE) -> None:
        self.data = data
        self.path = path
        self.package = package

    # -- defined by each kind of data folder -------------------------------------------------------------

    @property
    @abstractmethod
    def key(self) -> str:
        """Key that `prepare.json` must have: the hash of config and code."""

    @property
    @abstractmethod
    def inputs(self) -> Sequence[Input]:
        """Inputs as `prepare` recorded them.

        Raises InputError if the output of `prepare` is missing, damaged, or from another config or code.
        """

    @property
    @abstractmethod
    def unit_count(self) -> int:
        """Number of work units. Raises InputError as `inputs` does."""

    @property
    def quick_unit_count(self) -> int:
        """Number of work units, from `prepare.json` alone if possible. Raises InputError as `inputs` does."""
        return self.unit_count

    @abstractmethod
    def load_unit(self, number: int) -> Unit | None:
        """Return the manifest of a work unit; None if it is missing or outdated, or a file of it has another size."""

    @abstractmethod
    def prepare_inputs(self, log: Log) -> None:
        """Check the inputs and write `prepare.json`. Raises UserError if the inputs cannot be used."""

    @abstractmethod
    def build_unit(self, unit: int) -> bool:
        """Build the files of one work unit. Return False if they already exist.

        Raises InputError if an input has changed since `prepare`, UserError if an input cannot be read, and OSError if
        writing fails.
        """

    @abstractmethod
    def combine_units(self, units: Sequence[Unit], log: Log) -> None:
        """Write `manifest.json`, given the manifests of all work units in order.

        Raises UserError if the data cannot be used for training.
        """

    # -- common to all data folders ----------------------------------------------------------------------

    @cached_property
    def code_hash(self) -> str:
        """Hash of the code that builds the files of the folder."""
        package_hash = hash_code(self.package)
        shared_files = [self.package.parent / name for name in SHARED_MODULES]
        shared_hashes = [sha256_file(path) for path in shared_files if path.exists()]
        return sha256_json([package_hash, *shared_hashes]) if shared_hashes else package_hash

    def unit_path(self, unit: int) -> Path:
        """Return the path of the manifest of a work unit."""
        return self.path / SHARDS_DIR / f"unit-{unit:05d}.json"

    @cached_property
    def _leftovers(self) -> dict[int, list[Path]]:
        """Temporary files of killed array tasks by work unit. The folder is listed only once, on first use."""
        leftovers: dict[int, list[Path]] = {}
        for path in (self.path / SHARDS_DIR).glob(".unit-*.tmp"):
            if match := re.match(r"\.unit-(\d+)(-train|-held_out|\.json|\.h5)", path.name):
                leftovers.setdefault(int(match[1]), []).append(path)
        return leftovers

    def remove_leftovers(self, unit: int) -> None:
        """Remove the temporary files that killed array tasks left for a work unit, which this task now builds."""
        for path in self._leftovers.pop(unit, ()):
            path.unlink(missing_ok=True)

    def load_manifest_with_key(self, path: Path, kind: type[Kind], key: str) -> Kind:
        """Return the manifest at `path`. Raises InputError if it is missing or damaged, or its key is not `key`."""
        manifest = read_manifest_file(path, kind, RUN_PREPARE_AGAIN)
        if manifest.key != key:
            raise InputError(
                "data.outdated",
                f"{path} was made with another data config, tokenizer or code, or from other inputs: "
                f"{RUN_PREPARE_AGAIN}",
            )
        return manifest

    @cached_property
    def prepared(self) -> Prepared:
        """Content of `prepare.json`.

        Raises InputError if the file is missing, damaged, or from another config or code.
        """
        return self.load_manifest_with_key(self.path / "prepare.json", self.prepared_kind, self.key)

    @property
    def manifest_key(self) -> str:
        """Key that `manifest.json` must have. Raises InputError as `prepared` does."""
        return self.prepared.key

    def find_prepare_problem(self, *, check_inputs: bool = True) -> str | None:
        """Return why the prepare stage is not done; None if its output is valid for this config and code.

        If some shards do not exist yet, the inputs must also be unchanged since `prepare`. `check_inputs` determines
        whether this is checked.
        """
        try:
            inputs = self.inputs
        except InputError as error:
            return str(error)
        if not check_inputs or self.find_shard_problem() is None:
            return None
        return next(filter(None, (source.find_problem() for source in inputs)), None)

    def find_shard_problem(self, *, check_user_files: bool = True) -> str | None:
        """Return why the shard stage is not done; None if its output is valid for this config and code.

        The output is valid if all files of `manifest.json` exist with the sizes listed there. A file that is split into
        many parts is checked once. `check_user_files` determines whether files outside the folder are checked.
        """
        try:
            manifest = self.load_manifest_with_key(self.path / "manifest.json", self.manifest_kind, self.manifest_key)
            for entry in {entry.file: entry for entry in (*manifest.train, *manifest.held_out)}.values():
                if check_user_files or not entry.is_user_file:
                    entry.check(self.path, hashes=False)
        except InputError as error:
            return str(error)
        return None

    def measure_progress(self) -> tuple[int, int, float | None]:
        """Return the number of finished work units, the number of all work units, and the estimated remaining time.

        The time is in seconds for all array tasks together, and None if it is unknown. Before `prepare`, return
        (0, 0, None). While tasks run, `progress.jsonl` is enough, so the manifests of the work units are not read.
        """
        try:
            lines_by_unit = self._read_progress()
            total = self.quick_unit_count
        except InputError:
            return 0, 0, None
        has_manifest = (self.path / "manifest.json").exists()
        if has_manifest and self.find_shard_problem(check_user_files=False) is None:
            return total, total, None
        if has_manifest and not lines_by_unit:  # All units were built once, but some files are missing now.
            return sum(self.load_unit(number) is not None for number in range(total)), total, None
        # A unit that a task found already built has 0 seconds.
        recent_lines = [line for line in lines_by_unit.values() if line["seconds"]][-_PACE_UNITS:]
        if not recent_lines:
            return len(lines_by_unit), total, None
        # All tasks together built these units in the time from the first start to the last end.
        start_time = min(line["time"] - line["seconds"] for line in recent_lines)
        seconds_per_unit = (recent_lines[-1]["time"] - start_time) / len(recent_lines)
        return len(lines_by_unit), total, (total - len(lines_by_unit)) * seconds_per_unit

    def _read_progress(self) -> dict[int, dict[str, Any]]:
        """Return the last line of `progress.jsonl` for each work unit, by the number of the unit."""
        key = self.manifest_key
        return {line["unit"]: line for line in read_jsonl(self.path / PROGRESS_FILE) if line.get("key") == key}

    def check_inputs(self) -> list[str]:
        """Return the files that the config names, after a quick check that needs no run directory.

        Raises UserError if the check shows that the inputs cannot be used.
        """
        return self.list_named_files()

    def list_named_files(self) -> list[str]:
        """Return the files that the config names (`find_named_files`), without those of Python's standard library.

        Raises UserError if the config names no file.
        """
        user_sources = [source for source in self.data.sources if source != PYTHON_STDLIB]
        data = self.data.model_copy(update={"source": user_sources})
        return [path for path, _ in find_named_files(data, self.endings)]

    def describe_prepared(self) -> str:
        """Return a description of the output of `prepare`. Raises InputError as `prepared` does."""
        return f"{self.prepared_label} are ready"

    def describe_result(self) -> str:
        """Return a description of the finished data, such as `: 731 documents, …`; empty without a valid manifest."""
        try:
            manifest = self.load_manifest_with_key(self.path / "manifest.json", self.manifest_kind, self.manifest_key)
        except InputError:
            return ""
        return f": {manifest}"

    def has_same_inputs(self) -> bool:
        """Return True if `data.source` still names the files that `prepare` recorded, and these have not changed."""
        return list(self.inputs) == find_inputs(self.data, self.endings)

    def prepare(self, log: Log) -> None:
        """Do the work of the prepare stage.

        Nothing is done if the output of the stage is valid, and either all shards exist or the inputs are still the
        same. If some shards do not exist yet and the inputs have changed, the stage starts over.
        """
        if self.find_prepare_problem() is None and (self.find_shard_problem() is None or self.has_same_inputs()):
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.prepare_inputs(log)

    def shard(self, task: int, tasks: int, log: Log, striping: StripeConfig = StripeConfig()) -> None:
        """Build the missing work units of array task `task` of `tasks`. Raises what `build_unit` raises.

        Args:
            task: index of this array task, from 0.
            tasks: number of array tasks.
            log: function that writes a message.
            striping: `site.stripe`, for a folder on Lustre.
        """
        units = range(task, self.unit_count, tasks)
        self.array_task = (task, tasks)
        self.create_shards_dir(log, striping)
        lines_by_unit = self._read_progress()
        for number, unit in enumerate(units, 1):
            start_time = time.monotonic()
            is_new = self.build_unit(unit)
            seconds = time.monotonic() - start_time if is_new else 0
            if is_new or unit not in lines_by_unit:
                line = {"key": self.manifest_key, "unit": unit, "time": time.time(), "seconds": seconds}
                append_line(self.path / PROGRESS_FILE, json.dumps(line | {"stripe": self.stripe_options}))
            log(f"shard: unit {unit} {'written' if is_new else 'exists already'} ({number} of {len(units)})")

    def create_shards_dir(self, log: Log, striping: StripeConfig) -> None:
        """Create the folder of shards. On Lustre, also set how its files are striped."""
        (self.path / SHARDS_DIR).mkdir(exist_ok=True)
        self.stripe_options = stripe_folder(self.path / SHARDS_DIR, striping, log)

    def check_has_training_sample(self, train: Sequence[ShardEntry]) -> None:
        """Raise UserError if the shards have no training sample.

        Without this check, the ranks of the train stage would fail, possibly after hours in a queue.
        """
        check_has_sample(train, self.sequence_length)

    def finalize(self, log: Log) -> bool:
        """Write `manifest.json`. Return False if work units are missing, because other array tasks still build them.

        Only file sizes are checked here, because the tasks that wrote the shards computed the hashes. Raises what
        `combine_units` raises.
        """
        lines_by_unit = self._read_progress()
        units: dict[int, Unit] = {}
        # Units without a line in progress.jsonl are loaded first, because they are usually missing. All units must be
        # loaded, because a line may be lost although its unit exists.
        for number in sorted(range(self.unit_count), key=lambda unit: unit in lines_by_unit):
            if (unit := self.load_unit(number)) is None:
                return False
            units[number] = unit
        recorded_stripes = (line.get("stripe") for line in lines_by_unit.values())
        self.stripe_options = next(filter(None, recorded_stripes), self.stripe_options)
        try:
            self.combine_units([units[number] for number in range(self.unit_count)], log)
        except FileNotFoundError:
            # Another task may have finished first and removed this task's temporary file.
            if self.find_shard_problem() is not None:
                raise
        # The second pattern matches temporary files of manifest.json and rejected.jsonl in the folders of the sources
        # of a mixture.
        leftovers = (path for pattern in (".*.tmp", "*/.[mr]*.tmp") for path in self.path.glob(pattern))
        for path in (*leftovers, self.path / PROGRESS_FILE):
            path.unlink(missing_ok=True)
        return True


# -- striping on Lustre ----------------------------------------------------------------------------------
#
# By default (`site.stripe`) each shard is on one storage target. There are many shards, and the tasks write them at the
# same time, so many targets work in parallel. If a file is striped over several targets, opening it becomes slower.
# Striping is only useful if there are so few shards that targets would be idle.

_LFS_TIMEOUT_S = 60
"""Timeout of `lfs setstripe`."""


def stripe_folder(
    directory: Path,
    rule: StripeConfig,
    log: Callable[[str], None],
    file_system: Callable[[Path], str] = read_file_system_type,
) -> str:
    """Set with `lfs setstripe` how new files of a directory on Lustre are striped.

    Files inherit the striping of their directory when they are created (Lustre manual, "Managing file layout
    (striping)"). This function must therefore run before the first shard is written. If `lfs` fails, only a warning is
    logged, because a shard with another stripe count is slower but not wrong.

    Args:
        directory: the directory.
        rule: `site.stripe`.
        log: function that writes a message.
        file_system: function that returns the type of the file system of a path.

    Returns: the options of `lfs setstripe`, or "" if the command was not run or failed.
    """
    lfs = shutil.which("lfs")
    if lfs is None or file_system(directory) != "lustre":
        return ""
    size = [] if rule.size_mb is None else ["-S", f"{rule.size_mb}M"]
    pool = [] if rule.pool is None else ["-p", rule.pool]
    options = ["-c", str(rule.count), *size, *pool]
    command = [lfs, "setstripe", *options, os.fspath(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LFS_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        log(f"warning: {' '.join(command)} failed, the folder keeps its stripe count: {detail}")
        return ""
    return " ".join(options)
