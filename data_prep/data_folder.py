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
    load_sealed,
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
    """What stands in a data folder, and how it comes there. An object reads what `prepare` fixed once."""

    words: ClassVar[str]
    """What `prepare` fixes."""
    prepared_kind: type[Prepared]
    manifest_kind: ClassVar[type[Manifest | SampleManifest]]
    endings: ClassVar[Mapping[str, str] | None] = None
    """The endings that inputs may have, and their formats; None: those of text."""

    striped = ""
    """By which options `lfs setstripe` striped the shards' folder; "" where it is not on Lustre."""

    dealt: tuple[int, int] = (0, 1)
    """Which task of how many this is."""

    length = -1
    """Tokens that a shard must have more than, or nothing could be trained on."""

    def __init__(self, data: DataConfig, path: Path, package: Path = PACKAGE) -> None:
        """`package`: the copy of this package that does the work: a run's own, where another copy asks about it."""
        self.data, self.path, self.package = data, path, package

    # -- what differs ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def key(self) -> str:
        """Of `prepare.json`: config and code."""

    @property
    @abstractmethod
    def inputs(self) -> Sequence[Input]:
        """The inputs as `prepare` saw them. Raises InputError where what it fixed is missing, damaged or of another
        config or code."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of units. Raises InputError as `inputs` does."""

    @property
    def total(self) -> int:
        """The same for whoever only looks."""
        return self.count

    @abstractmethod
    def unit(self, number: int) -> Unit | None:
        """The manifest of a unit; None where it is not made, not whole (by the sizes of its files) or does not fit."""

    @abstractmethod
    def fix(self, log: Log) -> None:
        """Do the work of `prepare`. Raises UserError for inputs that cannot be used."""

    @abstractmethod
    def make(self, unit: int) -> bool:
        """Make one unit; False when it was there and valid.

        Raises InputError naming an input that is not what `prepare` saw, UserError for one that cannot be read,
        OSError where the file system refuses.
        """

    @abstractmethod
    def whole(self, units: Sequence[Unit], log: Log) -> None:
        """Write the manifest of all units. Raises UserError where the whole is not to be used."""

    # -- what is the same --------------------------------------------------------------------------------

    @cached_property
    def code(self) -> str:
        """Hash of the code that does the work."""
        found, others = code_sha256(self.package), [self.package.parent / name for name in SHARED]
        shared = [sha256_file(path) for path in others if path.exists()]
        return sha256_json([found, *shared]) if shared else found

    def unit_path(self, unit: int) -> Path:
        """The manifest of a work unit."""
        return self.path / SHARDS_DIR / f"unit-{unit:05d}.json"

    @cached_property
    def _left_over(self) -> dict[int, list[Path]]:
        """What killed tasks had under way, by unit, when this one began: one look at a folder of many."""
        found: dict[int, list[Path]] = {}
        for path in (self.path / SHARDS_DIR).glob(".unit-*.tmp"):
            if known := re.match(r"\.unit-(\d+)(-train|-held_out|\.json|\.h5)", path.name):
                found.setdefault(int(known[1]), []).append(path)
        return found

    def sweep(self, unit: int) -> None:
        """Remove what killed tasks left of a unit: it is this task's."""
        for path in self._left_over.pop(unit, ()):
            path.unlink(missing_ok=True)

    def fitting(self, path: Path, kind: type[Kind], key: str) -> Kind:
        """The manifest at `path`. Raises InputError where it is missing, damaged or was made from something else."""
        found = load_sealed(path, kind, AGAIN)
        if found.key != key:
            what = "another data config, tokenizer or code, or from other inputs"
            raise InputError("data.outdated", f"{path} was made with {what}: {AGAIN}")
        return found

    @cached_property
    def prepared(self) -> Prepared:
        """What `prepare` fixed. Raises InputError where that is missing, damaged or of another config or code."""
        return self.fitting(self.path / "prepare.json", self.prepared_kind, self.key)

    @property
    def whole_key(self) -> str:
        """Key of `manifest.json`. Raises InputError as `prepared` does."""
        return self.prepared.key

    def prepare_missing(self, *, ask_inputs: bool = True) -> str | None:
        """Why prepare is not done; None when all that it fixes is there, whole, and made for this config and code.

        While there are units to make, the inputs must also be what `prepare` saw: with `ask_inputs` each is asked.
        """
        try:
            inputs = self.inputs
        except InputError as error:
            return str(error)
        if not ask_inputs or self.shard_missing() is None:
            return None
        return next(filter(None, (source.problem() for source in inputs)), None)

    def shard_missing(self, *, ask_users: bool = True) -> str | None:
        """Why the shards are not done; None when all are there with their recorded sizes, for this config and code.

        A file of many parts is asked once, one of the user's own with `ask_users` only.
        """
        try:
            manifest = self.fitting(self.path / "manifest.json", self.manifest_kind, self.whole_key)
            for entry in {entry.file: entry for entry in (*manifest.train, *manifest.held_out)}.values():
                if ask_users or not entry.own:
                    entry.check(self.path, hashes=False)
        except InputError as error:
            return str(error)
        return None

    def progress(self) -> tuple[int, int, float | None]:
        """Units that are done, units in all, and seconds that the others still take, of all tasks together, where that
        is known; (0, 0, None) before `prepare`. While tasks work, one file tells."""
        try:
            told, total = self._told(), self.total
        except InputError:
            return 0, 0, None
        if (self.path / "manifest.json").exists() and self.shard_missing(ask_users=False) is None:
            return total, total, None
        if not told and (self.path / "manifest.json").exists():  # something of what was whole is missing
            return sum(self.unit(number) is not None for number in range(total)), total, None
        made = [line for line in told.values() if line["seconds"]][-_PACE:]
        if not made:
            return len(told), total, None
        began = min(line["time"] - line["seconds"] for line in made)
        return len(told), total, (total - len(told)) * (made[-1]["time"] - began) / len(made)

    def _told(self) -> dict[int, dict[str, Any]]:
        """The last line of `progress.jsonl` of each unit."""
        lines, key = read_jsonl(self.path / PROGRESS), self.whole_key
        return {line["unit"]: line for line in lines if line.get("key") == key}

    def look(self) -> list[str]:
        """`named`, for whoever asks before there is a run. Raises UserError where `fix` would at first sight."""
        return self.named()

    def named(self) -> list[str]:
        """The files that the config names, as `named_files` finds them; the library's own are left out.

        Raises UserError where there are none.
        """
        named = [source for source in self.data.sources if source != PYTHON_STDLIB]
        asked = self.data.model_copy(update={"source": named})
        return [path for path, _ in find_named_files(asked, self.endings)]

    @property
    def fixed(self) -> str:
        """What `prepare` fixed, in words. Raises InputError as `prepared` does."""
        return f"{self.words} fixed"

    def remark(self) -> str:
        """What a person should know of the finished whole: how much it is."""
        try:
            return f": {self.fitting(self.path / 'manifest.json', self.manifest_kind, self.whole_key)}"
        except InputError:
            return ""

    def same_inputs(self) -> bool:
        """Whether the source names the same unchanged files as before."""
        return list(self.inputs) == find_inputs(self.data, self.endings)

    def prepare(self, log: Log) -> None:
        """Fix what units are made from; returns at once when that was done and holds.

        Lists the inputs again as long as there are units to make, and starts over when they have changed.
        """
        if self.prepare_missing() is None and (self.shard_missing() is None or self.same_inputs()):
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.fix(log)

    def shard(self, task: int, tasks: int, log: Log, striping: StripeConfig = StripeConfig()) -> None:
        """Make the units of task `task` of `tasks` that are missing. Raises what `make` raises."""
        units, self.dealt = range(task, self.count, tasks), (task, tasks)
        self.make_room(log, striping)
        told = self._told()
        for number, unit in enumerate(units, 1):
            began = time.monotonic()
            made = self.make(unit)
            seconds = time.monotonic() - began if made else 0
            if made or unit not in told:
                line = {"key": self.whole_key, "unit": unit, "time": time.time(), "seconds": seconds}
                append_line(self.path / PROGRESS, json.dumps(line | {"stripe": self.striped}))
            log(f"shard: unit {unit} {'written' if made else 'was there already'} ({number} of {len(units)})")

    def make_room(self, log: Log, striping: StripeConfig) -> None:
        """Make the folder of shards, striped by the rule."""
        (self.path / SHARDS_DIR).mkdir(exist_ok=True)
        self.striped = stripe_folder(self.path / SHARDS_DIR, striping, log)

    def check_usable(self, train: Sequence[ShardEntry]) -> None:
        """Raise UserError where there is no sample to train on: its ranks would, after hours in a queue."""
        check_has_sample(train, self.length)

    def finalize(self, log: Log) -> bool:
        """Write the manifest of all units; False where some are not made, which other tasks do. Raises what `whole`
        raises. Sizes are checked here; hashes are those of the writing tasks."""
        told, made = self._told(), {}
        for number in sorted(range(self.count), key=lambda one: one in told):  # a line may be lost, a unit is not
            if (unit := self.unit(number)) is None:  # as a rule the first: few tasks read what all of them made
                return False
            made[number] = unit
        self.striped = next(filter(None, (line.get("stripe") for line in told.values())), self.striped)
        try:
            self.whole([made[number] for number in range(self.count)], log)
        except FileNotFoundError:  # another task was first, and took this one's file for a killed one's
            if self.shard_missing() is not None:
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
