"""The run directory: the only state there is.

    runs/NAME/
      config.yaml      the resolved config, frozen when the run is made
      run.json         what Sluice computed about the run then, such as hashes of the files that training starts from
      changes.jsonl    what `resume RUN key=value`, or a corrected config, changed since (config.yaml never changes)
      code/            the code that the jobs run, copied when the run is made, with its git commit and diff
      jobs/STAGE/      logs by rank, submitit's files, error reports, the lock of the running attempt
      data/            tokenizer, work units, shards, manifest.json, rejected.jsonl
      checkpoints/     step-00000100/ …
      metrics.jsonl    one line per optimizer step
      events.jsonl     submitted, started, restored, saved, stop_requested, failed, done …
      evaluation/      step-00000100.json …
      decisions.jsonl  bad steps that were left out (pipeline/resilience/guard.py); bad_nodes.jsonl: nodes to avoid
      stop, save, cancelled   requests, by anybody who may write here: save and leave; save; leave and stay ended

Any process may die at any moment: whoever comes next reads this directory and goes on. The login node reads
it too, so nothing here imports torch, numpy or h5py.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, overload

from pipeline.base.command import format_command, suggest_path
from pipeline.base.errors import UserError, find_storage_error, limit_lines
from pipeline.base.files import (
    add_checksum,
    append_line,
    open_lock_file,
    open_regular_file,
    read_jsonl,
    try_flock,
    write_atomic,
    write_json,
)
from pipeline.base.ownership import check_run_ownership
from pipeline.base.yaml12 import dump_yaml
from pipeline.config.masking import mask_secrets
from pipeline.config.read import (
    METADATA_FILE,
    OLDER_DEFAULTS,
    apply_overrides,
    dump_config,
    dump_metadata,
    dump_values,
    find_older_defaults,
    load_config,
    load_run_config,
    make_point_configs,
    make_run_namer,
    make_run_values_dumper,
    merge_values,
    parse_config,
    remove_metadata,
    use_new_names,
)
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.config.user_model import UserModel, resolve_user_model
from pipeline.run import changes, lines
from pipeline.run.code import CODE_ROOT, copy_code, try_code
from pipeline.run.events import Changed, Created, Event, Started, parse_event, utc_timestamp

E = TypeVar("E", bound=Event)
_UMASK = {"private": 0o077, "group": 0o027, "all": 0o022}


@dataclass(frozen=True)
class LockHolder:
    """The process that took a stage's lock: a supervisor, or a rank started by hand."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def terminate(self) -> None:
        """Send it TERM, where it is on this host (a pid means nothing on another)."""
        if self.pid and self.host == os.uname().nodename:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGTERM)


class Run:
    """One run directory. Constructing reads nothing; `create` and `open` are the ways to get one."""

    def __init__(self, path: Path, config: Config | None = None) -> None:
        """`config`: what it will have, where it is not made yet."""
        self.path = Path(os.path.realpath(path))
        self.code_dir = self.path / "code"
        self.jobs_dir = self.path / "jobs"
        self.data_dir = self.path / "data"
        self.checkpoints_dir = self.path / "checkpoints"
        self.evaluation_dir, self.profiles_dir = self.path / "evaluation", self.path / "profiles"
        self.metrics_file = self.path / "metrics.jsonl"
        self.events_file = self.path / "events.jsonl"
        self.changes_file = self.path / "changes.jsonl"
        self.config_file = self.path / "config.yaml"
        self.metadata_file = self.path / METADATA_FILE
        self.decisions_file = self.path / "decisions.jsonl"
        self.stop_file, self.save_file = self.path / "stop", self.path / "save"
        self.profile_file, self.profile_taken_file = self.path / "profile", self.path / "profile.taken"
        self.cancelled_file = self.path / "cancelled"
        self._config = None if self.config_file.exists() else config
        self._read_at = (0, 0)
        """The state of changes.jsonl that the config is of."""
        self._changed: tuple[tuple[int, int], dict[str, str]] = ((0, 0), {})
        """What `changed_keys` found, with the state of changes.jsonl that it read."""
        self.corrections: dict[str, str] = {}
        """What the config that it was rehearsed with corrects, in words by keys."""
        self.code_notes: list[str] = []
        """What a trial of the model's code found that is no error."""

    # -- making and finding ------------------------------------------------------------------------------

    @classmethod
    def preview(cls, config: Config) -> Run:
        """The run of `config` as it is, or would be made. Makes nothing.

        Raises UserError where `create` would, but for what `check_model_code` finds.
        """
        run = cls(config.run.root / config.run.name, config)
        if run.config_file.exists():
            run.check_owner()
            run.check_not_cancelled()
            config = run._as_old(config)
            run.corrections = run._corrected(config)
            if run.corrections:
                run._config = config
                resolve_user_model(config, run._folders)
            return run
        there = next(path for path in (run.path, *run.path.parents) if os.path.lexists(path))
        try:
            with tempfile.TemporaryDirectory(prefix=".sluice-", dir=there) as probe:
                Path(probe, run.path.relative_to(there)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise run._unmakeable(error) from error
        if there == run.path:
            run.check_owner()
        resolve_user_model(config, _sources())
        return run

    @classmethod
    def create(cls, config: Config) -> Run:
        """Make the run of `config`, or find it where it was made before with the same config, or one to be corrected.

        Raises UserError where a run of this name exists with another config that something was made with, naming what
        differs and what can be done, or where the code cannot work.
        """
        umask = _UMASK[config.run.sharing]
        os.umask(umask)
        run = cls(config.run.root / config.run.name)
        if not run.config_file.exists():
            resolve_user_model(config, _sources())  # what cannot work leaves nothing behind
        if not run.path.exists():
            try:
                run.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise run._unmakeable(error) from error
            run.path.chmod(run.path.stat().st_mode & ~umask)  # a default ACL of the folder above overrules the umask
        run.check_owner()
        with run.lock_exclusively():  # two at once: the second finds the run made
            if run.config_file.exists():
                run._correct(run._as_old(config))
                return run
            for folder in (run.jobs_dir, run.data_dir, run.checkpoints_dir, run.evaluation_dir):
                folder.mkdir(exist_ok=True)
            run._config = config  # as it would be read back
            run.copy_code()
            write_json(run.metadata_file, dump_metadata(config))
            write_atomic(run.config_file, dump_config(config))
            run.append_event(Created(config=str(run.config_file)))
        return run

    def _unmakeable(self, error: OSError) -> UserError:
        message = f"run.root: cannot make {self.path}: {error.strerror}; choose another run.root"
        return find_storage_error(OSError(error.errno, error.strerror), self.path) or UserError(
            "run.not_writable", message
        )

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run in directory `path`. Raises UserError where there is none."""
        run = cls(Path(path))
        if not run.config_file.is_file():
            near = suggest_path(Path(path), "*/config.yaml") or suggest_path(Path("runs", path), "*/config.yaml")
            hint = "it has no config.yaml" if run.path.is_dir() else f"there is no such directory{near}"
            if run.path.is_file():
                hint = "it is a file"
                with suppress(UserError):
                    of = load_config(Path(path)).run
                    hint = f"it is a config, that of the run {cls(of.root / of.name).name}"
            raise UserError("run.not_a_run", f"{path} is not a run: {hint} (a run is a path such as runs/quickstart)")
        os.umask(_UMASK[run.config.run.sharing])
        return run

    @property
    def name(self) -> str:
        """The path that a person types for this run: relative to the working directory where that is shorter."""
        try:
            return str(self.path.relative_to(Path.cwd()))
        except ValueError:
            return str(self.path)

    @property
    def title(self) -> str:
        """The first line of what is shown of it."""
        return f"run {self.name}" + (f"  code {self.commit[:12]}" if self.commit else "")

    @property
    def sweep_or_self(self) -> Run:
        """What a person goes on with: of a point the sweep, else this run."""
        sweep = Run(self.path.parents[1]) if self.path.parent.name == "points" else self
        return sweep if sweep.config_file.exists() else self

    @property
    def resume_command(self) -> str:
        """What a person types to go on."""
        return format_command("resume", self.sweep_or_self.name)

    def check_owner(self) -> None:
        """Raise UserError where somebody else may have written what is executed here. Call it before anything is."""
        check_run_ownership(self.path)

    # -- config ------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The config as it holds now: config.yaml with all changes applied."""
        if self._config is None:
            self._read_at = self._changes_stamp()
            values = dump_values(load_run_config(self.config_file))
            for change in lines.read_required_lines(self.changes_file, changes.is_config_change):
                values = (
                    merge_values(OLDER_DEFAULTS, use_new_names(change["submitted"]))
                    if "submitted" in change
                    else merge_values(values, use_new_names(change["set"]))
                )
            changed = f" with {self.changes_file.name}" if self.changes_file.exists() else ""
            self._config = parse_config(values, f"{self.config_file}{changed}")
        return self._config

    def reload_config(self) -> dict[str, str]:
        """Read the config again if another process changed it, and return what changed, in words by dotted keys.

        Processes that follow a run call it. A stage keeps the config that it started with.
        """
        if not self.config_file.exists() or self._read_at == self._changes_stamp():
            return {}
        before, self._config = self.config, None
        self.__dict__.pop("user_model", None)
        return changes.describe_changes(before, self.config)

    def _changes_stamp(self) -> tuple[int, int]:
        """Return size and modification time of changes.jsonl; zeros if there is none."""
        with suppress(FileNotFoundError):
            state = self.changes_file.stat()
            return state.st_size, state.st_mtime_ns
        return 0, 0

    def changed_keys(self) -> dict[str, str]:
        """Return what changes.jsonl changes, in words such as `200 → 300` by dotted keys. Secrets are masked."""
        stamp = self._changes_stamp()
        if stamp != self._changed[0]:
            found = (
                changes.describe_changes(load_run_config(self.config_file), self.config)
                if self.changes_file.exists()
                else {}
            )
            self._changed = stamp, found
        return self._changed[1]

    def describe_changes(self) -> str:
        """Return the values in effect that differ from those in config.yaml, on one line; "" if none differ."""
        found = [f"{key}: {words}" for key, words in self.changed_keys().items()]
        return (
            f"in effect, unlike in config.yaml ({self.changes_file.name}): {'; '.join(limit_lines(found))}"
            if found
            else ""
        )

    def _as_old(self, config: Config) -> Config:
        """`config` with what this run did before a key existed, for keys that neither `config` nor the run sets."""
        for section, keys in find_older_defaults(self.config_file).items():
            given = getattr(config, section)
            old = {key: value for key, value in keys.items() if key not in given.model_fields_set}
            config = config.model_copy(update={section: given.model_copy(update=old)}) if old else config
        return config

    def apply_overrides(self, overrides: Sequence[str], new_code: bool = False) -> None:
        """Apply `resume RUN key=value …`: what makes nothing wrong that is there, and a larger `train.steps`.

        `new_code`: `copy_code` follows. Raises UserError for any other key, and ConfigError where the changed
        config is wrong.
        """
        if overrides:
            self._record(self.preview_overrides(overrides, new_code))

    def preview_overrides(self, overrides: Sequence[str], new_code: bool = False) -> Config:
        """Return the config that `apply_overrides` would record. Record nothing. Raises as `apply_overrides` does."""
        if not overrides:
            return self.config
        config = parse_config(apply_overrides(dump_values(self.config), overrides), "command line")
        changes.check_resume_changes(self.path, self.config, config)
        make_point_configs(config)
        resolve_user_model(config, _sources() if new_code else [self.code_dir])
        return config

    def with_config(self, config: Config) -> Run:
        """Return this run as it would be with `config`, for a dry run: nothing is written."""
        run = Run(self.path)
        run._config, run._read_at = config, run._changes_stamp()
        return run

    def _record(self, config: Config, **more: Any) -> None:
        change = changes.changed_values(dump_values(self.config), dump_values(config))
        change = make_run_namer(self.config_file)(change)
        append_line(self.changes_file, json.dumps(add_checksum({"time": utc_timestamp(), "set": change, **more})))
        self.append_event(Changed(set=mask_secrets(changes.flatten_keys(change))))
        self._config, self._read_at = config, self._changes_stamp()

    def _corrected(self, config: Config) -> dict[str, str]:
        """What `config` corrects, in words by keys; nothing where it was submitted before, whatever `resume` changed.

        Raises UserError where something that is there keeps the run to its own config, with what can be done.
        """
        asked = [
            line["submitted"]
            for line in lines.read_required_lines(self.changes_file, changes.is_config_change)
            if line.get("submitted")
        ]
        before = merge_values(OLDER_DEFAULTS, use_new_names(asked[-1])) if asked else None
        if config == (parse_config(before, str(self.changes_file)) if before else load_run_config(self.config_file)):
            return {}
        return changes.check_corrections(self.path, self.name, self.config, config)

    def _correct(self, config: Config) -> None:
        """Go on as if the run had been made with `config`. Raises UserError as `_corrected` does."""
        self.corrections = self._corrected(config)
        if not self.corrections:
            return
        self.check_not_running([stage for stage in STAGES if self.lock_holder(stage)])
        if config.model.target is not None and self.will_copy_code:
            copy_code(
                self.path, resolve_user_model(config, _sources()), config.run.root.name, _UMASK[config.run.sharing]
            )
        for name in ("config.yaml", "changes.jsonl"):
            for file in self.path.glob(f"points/*/{name}"):
                file.unlink()  # they are made again, from this config
        self._record(config, submitted=make_run_values_dumper(self.config_file)(config))

    def check_not_running(self, busy: Sequence[str]) -> None:
        """Raise UserError where something, in words, is `busy` with what would be replaced."""
        if busy:
            raise UserError(
                "run.stage_running",
                f"{', '.join(busy)} is running with what would be replaced: wait for the end, or bring it about with "
                f"{format_command('cancel', self.name)}",
            )

    @cached_property
    def user_model(self) -> UserModel | None:
        """The module that gives its model, in the run's code, once it is made; None where that is the decoder."""
        return resolve_user_model(self.config, self._folders)

    @property
    def will_copy_code(self) -> bool:
        """Whether its copy of the code is yet to be taken: with a corrected config maybe the module was mended, too."""
        return not self.config_file.exists() or (
            bool(self.corrections) and changes.find_training_output(self.path) is None
        )

    @property
    def _folders(self) -> list[Path]:
        return _sources() if self.will_copy_code else [self.code_dir]

    # -- events ------------------------------------------------------------------------------------------

    def append_event(self, event: Event) -> None:
        """Append an event to events.jsonl."""
        append_line(self.events_file, json.dumps(event.to_line(), default=str))

    @overload
    def read_events(self, stage: str | None = None) -> list[Event]: ...
    @overload
    def read_events(self, stage: str | None, *classes: type[E]) -> list[E]: ...
    def read_events(self, stage: str | None = None, *classes: type[Event]) -> Sequence[Event]:
        """Return the events, oldest first, without malformed lines.

        Args:
            stage: if given, only events of this stage.
            classes: if given, only events of these classes.
        """
        events = filter(None, map(parse_event, read_jsonl(self.events_file)))
        return [
            event
            for event in events
            if (stage is None or event.stage == stage) and (not classes or isinstance(event, classes))
        ]

    def count_attempts(self, stage: str) -> int:
        """Return how often the stage was started so far."""
        return len(self.read_events(stage, Started))

    # -- requests of a person ----------------------------------------------------------------------------

    def write_request(self, file: Path) -> None:
        """Write a stop or cancel request."""
        write_atomic(file, f"{utc_timestamp()} by pid {os.getpid()}\n")

    def check_not_cancelled(self) -> None:
        """Raise UserError where a person cancelled the run."""
        if self.cancelled_file.exists():
            raise UserError("run.cancelled", f"{self.name} was cancelled; to continue it: {self.resume_command}")

    def clear_requests(self) -> None:
        """Forget stop and cancel requests: a person said to go on."""
        for file in (self.stop_file, self.cancelled_file):
            file.unlink(missing_ok=True)

    # -- who is running ----------------------------------------------------------------------------------

    def stage_dir(self, stage: str) -> Path:
        """`jobs/STAGE`, made where it is missing."""
        folder = self.jobs_dir / stage
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def lock_stage(self, stage: str, task: int | None = None, patience_s: float = 1.0) -> int | None:
        """Take the stage's lock (a task of an array: its own) and write who holds it; None where somebody does.

        The returned descriptor is handed on to the ranks: the lock is free once the last of them is gone.
        """
        name = "lock" if task is None else f"lock-{task}"
        fd = open_lock_file(self.stage_dir(stage) / name)
        deadline = time.monotonic() + patience_s  # somebody who only looks (`lock_holder`) has it for a moment, too
        while not try_flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() > deadline:
                os.close(fd)
                return None
            time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
        return fd

    def describe_write_error(self) -> str | None:
        """Why nothing can be written into the run directory now; None where something can."""
        probe = self.path / f".probe-{os.uname().nodename}-{os.getpid()}"
        try:
            write_atomic(probe, bytes(1 << 16))
            probe.unlink()
        except OSError as error:
            return str(find_storage_error(error, self.path) or f"cannot write {self.path}: {error.strerror}")
        return None

    def lock_holder(self, stage: str) -> LockHolder | None:
        """Who runs the stage, or a task of its array (one of them); None where nobody does."""
        for lock in sorted((self.jobs_dir / stage).glob("lock*")):
            with open(open_lock_file(lock, os.O_RDONLY), "rb") as file:
                if not try_flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB):
                    pid, _, host = file.read(200).decode(errors="replace").strip().partition(" ")
                    return LockHolder(int(pid) if pid.isdigit() else 0, host)
        return None

    # -- code --------------------------------------------------------------------------------------------

    @contextmanager
    def lock_exclusively(self, patience_s: float = math.inf) -> Iterator[None]:
        """Wait until nobody else makes this run, changes it, replaces its code or submits its jobs.

        Who holds it waits for no job, so a job may ask for it. What somebody else changed meanwhile is read again.
        After `patience_s` seconds it goes on without the lock, which a suspended process may hold.
        """
        deadline, at_once = time.monotonic() + patience_s, 0 if math.isinf(patience_s) else fcntl.LOCK_NB
        with open(open_lock_file(self.path / ".creating"), "rb") as lock:
            while not try_flock(lock.fileno(), fcntl.LOCK_EX | at_once) and time.monotonic() < deadline:
                time.sleep(0.2)
            self._config = None
            yield

    @property
    def is_being_submitted(self) -> bool:
        """Whether another process makes, changes or submits it right now."""
        with suppress(OSError), open(open_lock_file(self.path / ".creating", os.O_RDONLY), "rb") as lock:
            return not try_flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False

    def check_model_code(self) -> list[str]:
        """Raise UserError where the model of the user's own that `copy_code` would copy does not compile, or cannot
        be imported or built, in a sweep with the options of each point.

        Returns a note, if any of `model.options` is never read.
        """
        config, model = self.config, resolve_user_model(self.config, _sources())
        if model is not None:
            own = config.site.python is not None or config.site.container is not None  # their packages may not be here
            options = [] if own else [point.model.all_options for point in make_point_configs(config) or [config]]
            if unread := try_code(self.code_dir, model, options, config.run.root.name):
                names = ", ".join(f"model.options.{key}" for key in unread)
                return [f"note: {model.target} never reads {names}: check the spelling, or remove it"]
        return []

    def copy_code(self) -> None:
        """Copy Sluice's code and the package of a custom model into `code/`, with its git commit and uncommitted diff.

        Call it under `lock_exclusively`. An older copy is replaced; it stays if the new one cannot be made.

        Raises:
            UserError: A file does not compile.
            shutil.Error, OSError: The copy cannot be written (`errors.storage_error` explains both).
        """
        config = self.config
        copy_code(self.path, resolve_user_model(config, _sources()), config.run.root.name, _UMASK[config.run.sharing])

    @property
    def commit(self) -> str | None:
        """The git commit of the run's code, with `+` where it had uncommitted changes; None outside git."""
        with suppress(FileNotFoundError):
            with open_regular_file(self.code_dir / "COMMIT") as file:
                commit = file.read().decode(errors="replace").strip()
            return commit + ("+" if (self.code_dir / "DIFF").stat().st_size else "")
        return None


def _sources() -> list[Path]:
    """Where a model of the user's own is looked for, before Python's own places."""
    return [Path.cwd(), CODE_ROOT]


# -- points of a sweep -------------------------------------------------------------------------------


def list_points(run: Run) -> list[Run]:
    """Return the runs of a sweep's points; empty if `run` is not a sweep.

    No directory is made: a point that does not exist yet has the config that it will have.
    """
    return [Run(run.path / "points" / config.run.name, config) for config in make_point_configs(run.config)]


def create_points(run: Run) -> list[Run]:
    """Return the runs of a sweep's points, and make the directories that are missing."""
    points = list_points(run)
    missing = [point for point in points if not point.config_file.exists()]
    if not missing:
        return points
    get_values = make_run_values_dumper(run.config_file)
    for point in missing:
        for folder in (point.jobs_dir, point.checkpoints_dir, point.evaluation_dir):
            folder.mkdir(parents=True, exist_ok=True)
        for link in (point.data_dir, point.code_dir):
            if not os.path.lexists(link):
                link.symlink_to(f"../../{link.name}")
        values = get_values(point.config)
        if run.metadata_file.exists():  # otherwise the code of the run is older and reads all values from config.yaml
            write_json(point.metadata_file, dump_metadata(point.config))
            values = remove_metadata(values)
        write_atomic(point.config_file, dump_yaml(values))
        point.append_event(Created(config=str(point.config_file), sweep=run.config.run.name))
    return points
