"""The run directory, which contains the whole state of a run.

    runs/NAME/
      config.yaml      the config with all default values; this file never changes
      run.json         metadata computed when the run is made, such as hashes of the initial weights
      origin.json      the checkpoint of another run with which this run began, if it is a fork
      changes.jsonl    changes of the config by `resume RUN key=value` or by submitting a corrected config
      code/            the code that the jobs run, copied when the run is made, with its git commit and diff
      work/            the working directory of stages with a command, copied when the run is made
      jobs/STAGE/      logs by rank, submitit's files, error reports, the lock of the running attempt
      data/            tokenizer, work units, shards, manifest.json, rejected.jsonl
      checkpoints/     step-00000100/ …
      metrics.jsonl    one line per optimizer step
      events.jsonl     submitted, started, restored, saved, stop_requested, failed, done …
      evaluation/      step-00000100.json …
      images/NAME/     step-00000100.png …, written by callbacks or commands (pipeline/run/images.py)
      decisions.jsonl  skipped updates and excluded samples (pipeline/resilience/guard.py)
      search/          the trials of a search and their results, Optuna's copy of them
      bad_nodes.jsonl  nodes that failed and are avoided for some time
      stop             exists if a user requested to save and exit
      save             exists if a user requested to save
      cancelled        exists if a user requested to save, exit and not restart
      profile          a user's request to profile steps; renamed to profile.taken when the train stage accepts it

Any process may die at any moment; the next process reads this directory and continues. Commands on the login node also
use this module, so it imports no torch, numpy or h5py.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    create_folder_atomically,
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
    add_older_defaults,
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
from pipeline.config.user_model import (
    UserModel,
    UserModule,
    resolve_callback_modules,
    resolve_user_model,
    resolve_user_modules,
)
from pipeline.run import changes, lines
from pipeline.run.code import CODE_ROOT, copy_code, try_code
from pipeline.run.events import Changed, Created, Event, Started, parse_event, utc_timestamp
from pipeline.run.trials import STUDY_FILE, Trial, read_study
from pipeline.run.work_dir import check_working_dir, copy_working_dir

E = TypeVar("E", bound=Event)
_UMASK = {"private": 0o077, "group": 0o027, "all": 0o022}
"""Value of `run.sharing` → the permission bits that files of the run do not have."""


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a stage's lock: a supervisor, or a rank that a user started directly."""

    pid: int
    """The process ID; 0 if the lock file does not contain one."""
    host: str

    def __str__(self) -> str:
        """Return the process ID and the host, for messages."""
        return f"pid {self.pid} on {self.host}"

    def is_gone(self) -> bool:
        """Return True if the process was on this host and has exited. Processes that it started hold the lock then."""
        if not self.pid or self.host != os.uname().nodename:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def terminate(self) -> None:
        """Send SIGTERM to the process, if it is on this host."""
        if self.pid and self.host == os.uname().nodename:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGTERM)


class Run:
    """One run directory. Use :meth:`create` or :meth:`open`, because the constructor does not read the config.

    Args:
        path: the run directory.
        config: the config of a run that does not exist yet. If config.yaml exists, this argument is ignored.
    """

    def __init__(self, path: Path, config: Config | None = None) -> None:
        self.path = Path(os.path.realpath(path))
        self.code_dir = self.path / "code"
        self.jobs_dir = self.path / "jobs"
        self.work_dir = self.path / "work"
        self.data_dir = self.path / "data"
        self.checkpoints_dir = self.path / "checkpoints"
        self.evaluation_dir = self.path / "evaluation"
        self.profiles_dir = self.path / "profiles"
        self.metrics_file = self.path / "metrics.jsonl"
        self.events_file = self.path / "events.jsonl"
        self.changes_file = self.path / "changes.jsonl"
        self.config_file = self.path / "config.yaml"
        self.metadata_file = self.path / METADATA_FILE
        self.decisions_file = self.path / "decisions.jsonl"
        self.stop_file = self.path / "stop"
        self.save_file = self.path / "save"
        self.profile_file = self.path / "profile"
        self.accepted_profile_request_file = self.path / "profile.taken"
        self.cancelled_file = self.path / "cancelled"
        self._config = None if self.config_file.exists() else config
        self._config_stamp = (0, 0)
        """Size and modification time of changes.jsonl when the config was read."""
        self._changed_keys: tuple[tuple[int, int], dict[str, str]] = ((0, 0), {})
        """Size and modification time of changes.jsonl, and the result of `changed_keys` at that time."""
        self.corrections: dict[str, str] = {}
        """Changes by a corrected config that the user submitted: dotted key → description."""
        self.code_notes: list[str] = []
        """Notes for the user that `check_model_code` returned."""

    # -- creating and opening ------------------------------------------------------------------------------------------

    @classmethod
    def preview(cls, config: Config) -> Run:
        """Return the run that `create` would return for `config`, without creating or changing the run.

        If the run does not exist, a temporary directory is created and removed, to check that this is possible.

        Raises:
            UserError: as `create`, and if the run was cancelled. Unlike `create`, this method does not check that no
                stage is running. It does not compile the code of a custom model (see `check_model_code`).
        """
        run = cls(config.run.root / config.run.name, config)
        if run.config_file.exists():
            run.check_owner()
            run.check_not_cancelled()
            config = run._apply_older_defaults(config)
            run.corrections = run._find_corrections(config)
            if run.corrections:
                run._config = config
                if not run.will_copy_code:
                    run._check_callbacks_are_copied(config)
                resolve_user_modules(config, run._model_folders)  # raises UserError if a module cannot be used
            return run
        run.check_can_create()
        resolve_user_modules(config, _source_folders())  # raises UserError if a module cannot be used
        if config.stages.commands:
            check_working_dir(Path.cwd(), [config.run.root])
        return run

    def check_can_create(self) -> None:
        """Raise UserError if the run directory cannot be created. It may exist without a config."""
        existing_parent = next(path for path in (self.path, *self.path.parents) if os.path.lexists(path))
        try:
            with tempfile.TemporaryDirectory(prefix=".sluice-", dir=existing_parent) as probe:
                Path(probe, self.path.relative_to(existing_parent)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._make_creation_error(error) from error
        if existing_parent == self.path:
            self.check_owner()

    @classmethod
    def create_from(
        cls, config: Config, values: Mapping[str, Any], created: Created, fill: Callable[[Run], None]
    ) -> Run:
        """Create a run with existing files, such as a checkpoint, and return it.

        The run directory appears when it is complete. If the process fails before, no run exists. Also set the umask
        of this process, according to `run.sharing`.

        Args:
            config: the config.
            values: the values for config.yaml, in a form that the code of the run can read.
            created: the first event of the run.
            fill: called with the run, whose directory still has a temporary name. This function writes the code and the
                other files.

        Raises:
            UserError: if the run directory exists, or cannot be made.
            OSError: if a file cannot be written (see `find_storage_error`).
        """
        umask = _UMASK[config.run.sharing]
        os.umask(umask)
        run = cls(config.run.root / config.run.name)
        run.check_does_not_exist()
        with create_folder_atomically(run.path) as folder:
            folder.chmod(folder.stat().st_mode & ~umask)  # a default ACL of the parent overrides the umask
            new_run = cls(folder, config)
            new_run._make_folders()
            fill(new_run)
            write_json(new_run.metadata_file, dump_metadata(config))
            write_atomic(new_run.config_file, dump_yaml(values))
            new_run.append_event(created)
        return run

    def check_does_not_exist(self) -> None:
        """Raise UserError if the run directory exists."""
        if os.path.lexists(self.path):
            raise UserError("run.exists", f"{self.path} exists already: choose another name, or remove it")

    def _make_folders(self) -> None:
        """Make the directories of a new run."""
        for folder in (self.jobs_dir, self.data_dir, self.checkpoints_dir, self.evaluation_dir):
            folder.mkdir(exist_ok=True)

    @classmethod
    def create(cls, config: Config) -> Run:
        """Create the run of `config` and return it. If the run exists, change its config to `config`.

        Also set the umask of this process, according to `run.sharing`.

        Raises:
            UserError: in one of these cases:

                - The run exists with another config, and existing output depends on that config. The message names the
                  differences and the possible commands.
                - The run exists with another config, and a stage is running.
                - The custom model is not found, or its code does not compile.
                - The run belongs to another user, or its directory cannot be made.
        """
        umask = _UMASK[config.run.sharing]
        os.umask(umask)
        run = cls(config.run.root / config.run.name)
        if not run.config_file.exists():
            resolve_user_modules(config, _source_folders())  # raises UserError before anything is written
        if not run.path.exists():
            try:
                run.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise run._make_creation_error(error) from error
            run.path.chmod(run.path.stat().st_mode & ~umask)  # a default ACL of the parent overrides the umask
        run.check_owner()
        with run.lock_exclusively():  # if two processes create the run at once, the second process finds the run
            if run.config_file.exists():
                run._apply_corrections(run._apply_older_defaults(config))
                return run
            run._make_folders()
            run._config = config
            run.copy_code()
            run.copy_working_dir()
            write_json(run.metadata_file, dump_metadata(config))
            write_atomic(run.config_file, dump_config(config))
            working_dir = str(Path.cwd()) if config.stages.commands else None
            run.append_event(Created(config=str(run.config_file), working_dir=working_dir))
        return run

    def _make_creation_error(self, error: OSError) -> UserError:
        """Return the UserError to raise if making the run directory failed with `error`."""
        message = f"run.root: cannot make {self.path}: {error.strerror}; choose another run.root"
        # `error` may name a parent directory. Without its file name, the message names the run directory.
        return find_storage_error(OSError(error.errno, error.strerror), self.path) or UserError(
            "run.not_writable", message
        )

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Return the run in directory `path`, and set the umask of this process according to `run.sharing`.

        Raises UserError if `path` is not a run directory.
        """
        run = cls(Path(path))
        if not run.config_file.is_file():
            suggestion = suggest_path(Path(path), "*/config.yaml") or suggest_path(Path("runs", path), "*/config.yaml")
            hint = "it has no config.yaml" if run.path.is_dir() else f"there is no such directory{suggestion}"
            if run.path.is_file():
                hint = "it is a file"
                with suppress(UserError):
                    section = load_config(Path(path)).run
                    hint = f"it is the config of the run {cls(section.root / section.name).name}"
            raise UserError("run.not_a_run", f"{path} is not a run: {hint} (a run is a path such as runs/quickstart)")
        os.umask(_UMASK[run.config.run.sharing])
        return run

    @property
    def name(self) -> str:
        """The path of the run as users type it: relative to the working directory if the run is inside of it."""
        try:
            return str(self.path.relative_to(Path.cwd()))
        except ValueError:
            return str(self.path)

    @property
    def title(self) -> str:
        """The name of the run and the git commit of its code: the first line of `status` and `report`."""
        return f"run {self.name}" + (f"  code {self.commit[:12]}" if self.commit else "")

    @property
    def sweep_or_self(self) -> Run:
        """The run that users name in commands: the sweep of a sweep point, otherwise this run."""
        sweep = Run(self.path.parents[1]) if self.path.parent.name == "points" else self
        return sweep if sweep.config_file.exists() else self

    @property
    def trial(self) -> Trial | None:
        """The trial of a search that this run is; None for other runs."""
        if self.path.parent.name != "points" or not self.path.name.isdecimal():
            return None
        trials = read_study(self.path.parents[1]).trials
        number = int(self.path.name)
        return trials[number] if number < len(trials) else None

    @property
    def is_failed_trial(self) -> bool:
        """Whether this run is a trial of a search that has failed, so that it does not run again."""
        return self.trial is not None and self.trial.has_failed

    @property
    def pause_step(self) -> int | None:
        """The step at which the train stage pauses, because this run is a trial of a search; None for no pause."""
        return None if self.trial is None else read_study(self.path.parents[1]).get_pause_step(int(self.path.name))

    @property
    def resume_command(self) -> str:
        """The command that continues this run. For a sweep point, the command continues the sweep."""
        return format_command("resume", self.sweep_or_self.name)

    def check_owner(self) -> None:
        """Raise UserError if another user owns or may write to code of this run. Call this before running the code."""
        check_run_ownership(self.path)

    # -- config --------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The config in effect: config.yaml with all changes applied."""
        if self._config is None:
            self._config_stamp = self._changes_stamp()
            values = dump_values(load_run_config(self.config_file))
            for change in lines.read_required_lines(self.changes_file, changes.is_config_change):
                if "submitted" in change:  # a corrected config replaces all values
                    values = add_older_defaults(use_new_names(change["submitted"]))
                else:
                    values = merge_values(values, use_new_names(change["set"]))
            source = str(self.config_file)
            if self.changes_file.exists():
                source += f" with {self.changes_file.name}"
            self._config = parse_config(values, source)
        return self._config

    def reload_config(self) -> dict[str, str]:
        """Read the config again if another process changed it.

        Commands that wait for a run or display it continuously call this method. A running stage does not call it, and
        keeps the config with which the stage started.

        Returns:
            The changes: dotted key → description such as `200 → 300`; empty if nothing changed.
        """
        if not self.config_file.exists() or self._config_stamp == self._changes_stamp():
            return {}
        before = self.config
        self._config = None
        for cached in ("user_model", "callback_modules"):  # these properties depend on the config
            self.__dict__.pop(cached, None)
        return changes.describe_changes(before, self.config)

    def _changes_stamp(self) -> tuple[int, int]:
        """Return size (bytes) and modification time (ns) of changes.jsonl; zeros if the file does not exist."""
        with suppress(FileNotFoundError):
            status = self.changes_file.stat()
            return status.st_size, status.st_mtime_ns
        return 0, 0

    def changed_keys(self) -> dict[str, str]:
        """Return the changes in changes.jsonl: dotted key → description such as `200 → 300`. Secrets are masked."""
        stamp = self._changes_stamp()
        if stamp != self._changed_keys[0]:
            descriptions: dict[str, str] = {}
            if self.changes_file.exists():
                descriptions = changes.describe_changes(load_run_config(self.config_file), self.config)
            self._changed_keys = (stamp, descriptions)
        return self._changed_keys[1]

    def describe_changes(self) -> str:
        """Return the values in effect that differ from those in config.yaml, on one line; "" if none differ."""
        values = [f"{key}: {change}" for key, change in self.changed_keys().items()]
        if not values:
            return ""
        return f"in effect, unlike in config.yaml ({self.changes_file.name}): {'; '.join(limit_lines(values))}"

    def _apply_older_defaults(self, config: Config) -> Config:
        """Return `config` with the defaults of the version that made this run.

        The older defaults apply to keys that neither `config` nor config.yaml sets.
        """
        for section_name, older_defaults in find_older_defaults(self.config_file).items():
            section = getattr(config, section_name)
            new_values = {key: value for key, value in older_defaults.items() if key not in section.model_fields_set}
            if new_values:
                config = config.model_copy(update={section_name: section.model_copy(update=new_values)})
        return config

    def apply_overrides(self, overrides: Sequence[str], new_code: bool = False) -> None:
        """Apply and record the changes of `resume RUN key=value …`.

        Keys on which no existing output depends may change. `train.steps` or `train.epochs` may increase.

        Args:
            overrides: changes such as `train.steps=200`.
            new_code: whether the caller then calls `copy_code`. If so, a custom model is searched in the source
                directories, otherwise in the run's copy of the code.

        Raises:
            ConfigError: the changed config is invalid.
            UserError: a key cannot be changed.
        """
        if overrides:
            self._record_config(self.preview_overrides(overrides, new_code))

    def preview_overrides(self, overrides: Sequence[str], new_code: bool = False) -> Config:
        """Return the config that `apply_overrides` would record, without recording it. Raises the same errors."""
        if not overrides:
            return self.config
        values = apply_overrides(dump_values(self.config), overrides)
        step = changes.find_trained_step(self.path)
        config = parse_config(changes.complete_length_change(step, self.config, values), "command line")
        changes.check_resume_changes(self.path, self.config, config)
        # these calls only check the points of a sweep and the user's modules
        make_point_configs(config)
        if not new_code:
            self._check_callbacks_are_copied(config)
        resolve_user_modules(config, _source_folders() if new_code else [self.code_dir])
        return config

    def _check_callbacks_are_copied(self, config: Config) -> None:
        """Raise UserError if the run has no copy of a module of `train.callbacks`, because it named others before."""
        for target in config.train.callbacks:
            path = self.code_dir / target.partition(".")[0]
            if not path.exists() and not path.with_suffix(".py").exists():
                change = f"train.callbacks={json.dumps(config.train.callbacks)}"
                command = format_command("resume", self.sweep_or_self.name, "--update-code", change)
                raise UserError(
                    "run.not_copied",
                    f"train.callbacks: the run has no copy of {target}; --update-code replaces its copy of the code: "
                    f"{command}",
                )

    def with_config(self, config: Config) -> Run:
        """Return a copy of this run with `config` in effect. Nothing is written, so a dry run can use the copy."""
        run = Run(self.path)
        run._config = config
        run._config_stamp = run._changes_stamp()
        return run

    def _record_config(self, config: Config, **extra_fields: Any) -> None:
        """Make `config` the config of the run: append its differences to changes.jsonl and write a `changed` event.

        Args:
            config: the new config.
            **extra_fields: further fields of the line in changes.jsonl.
        """
        change = changes.changed_values(dump_values(self.config), dump_values(config))
        change = make_run_namer(self.config_file)(change)
        line = add_checksum({"time": utc_timestamp(), "set": change, **extra_fields})
        append_line(self.changes_file, json.dumps(line))
        self.append_event(Changed(set=mask_secrets(changes.flatten_keys(change))))
        self._config = config
        self._config_stamp = self._changes_stamp()

    def _find_corrections(self, config: Config) -> dict[str, str]:
        """Return how the submitted `config` differs from the run's config: dotted key → description.

        The result is empty if `config` equals the config that was submitted last. Later changes by `resume` then stay
        in effect.

        Raises:
            UserError: if existing output depends on the old config. The message contains the commands that the user can
                give instead.
        """
        submitted = [
            line["submitted"]
            for line in lines.read_required_lines(self.changes_file, changes.is_config_change)
            if line.get("submitted")
        ]
        if submitted:
            last_values = add_older_defaults(use_new_names(submitted[-1]))
            last_submitted = parse_config(last_values, str(self.changes_file))
        else:
            last_submitted = load_run_config(self.config_file)
        if config == last_submitted:
            return {}
        return changes.check_corrections(self.path, self.name, self.config, config)

    def _apply_corrections(self, config: Config) -> None:
        """Replace the config of the run with `config`, if `config` differs from the config that was submitted last.

        Raises:
            UserError: as `_find_corrections`, or if a stage is running.
        """
        self.corrections = self._find_corrections(config)
        if not self.corrections:
            return
        self.check_not_running([stage for stage in self.config.active_stages if self.lock_holder(stage)])
        if not self.will_copy_code:
            self._check_callbacks_are_copied(config)
        elif modules := resolve_user_modules(config, _source_folders()):
            copy_code(self.path, modules, config.run.root.name, _UMASK[config.run.sharing])
        for name in ("config.yaml", "changes.jsonl"):
            for file in self.path.glob(f"points/*/{name}"):
                # create_points writes config.yaml again, from the new config, which replaces all earlier changes
                file.unlink()
        (self.path / STUDY_FILE).unlink(missing_ok=True)  # no trial has output yet: the new config gets new trials
        self._record_config(config, submitted=make_run_values_dumper(self.config_file)(config))

    def check_not_running(self, running_stages: Sequence[str]) -> None:
        """Raise UserError if `running_stages` is not empty, because a change would replace files that the stages use.

        Args:
            running_stages: names or descriptions of the stages and jobs that are running.
        """
        if running_stages:
            raise UserError(
                "run.stage_running",
                f"{', '.join(running_stages)} is running and uses files that this command would replace: wait until it "
                f"ends, or cancel it: {format_command('cancel', self.name)}",
            )

    @cached_property
    def user_model(self) -> UserModel | None:
        """The module of a custom model; None if the model is the built-in decoder model."""
        return resolve_user_model(self.config, self._model_folders)

    @cached_property
    def callback_modules(self) -> list[UserModule]:
        """The modules of `train.callbacks`."""
        return resolve_callback_modules(self.config, self._model_folders)

    @property
    def will_copy_code(self) -> bool:
        """Whether a submission will copy the code into the run: for a new run, and for some corrected configs.

        A corrected config replaces the copy if there is no training output yet, because the user may also have
        corrected the module of a custom model. Without a custom model, `_apply_corrections` keeps the copy.
        """
        return not self.config_file.exists() or (
            bool(self.corrections) and changes.find_training_output(self.path) is None
        )

    @property
    def _model_folders(self) -> list[Path]:
        """The directories to search for a custom model: the sources if they will be copied, otherwise `code_dir`."""
        return _source_folders() if self.will_copy_code else [self.code_dir]

    # -- events --------------------------------------------------------------------------------------------------------

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

    # -- requests of users ---------------------------------------------------------------------------------------------

    def write_request(self, file: Path) -> None:
        """Write `file`, which requests to stop or to cancel the run (`stop_file` or `cancelled_file`)."""
        write_atomic(file, f"{utc_timestamp()} by pid {os.getpid()}\n")

    def check_not_cancelled(self) -> None:
        """Raise UserError if a user cancelled the run."""
        if self.cancelled_file.exists():
            raise UserError("run.cancelled", f"{self.name} was cancelled; to continue it: {self.resume_command}")

    def clear_requests(self) -> None:
        """Remove the requests to stop and to cancel. Call this if a user resumes the run."""
        for file in (self.stop_file, self.cancelled_file):
            file.unlink(missing_ok=True)

    # -- locks of stages -----------------------------------------------------------------------------------------------

    def stage_dir(self, stage: str) -> Path:
        """Return the directory `jobs/STAGE`. Create it if it is missing."""
        folder = self.jobs_dir / stage
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def lock_stage(self, stage: str, task: int | None = None, timeout_s: float = 1.0) -> int | None:
        """Take the lock of a stage, or of one task of its array, and write the pid and host of this process into it.

        The lock of the whole stage does not lock the tasks of its array.

        Args:
            stage: the stage.
            task: the index of the array task; None for a job without an array.
            timeout_s: how long to wait for the lock, in seconds.

        Returns:
            The file descriptor; None if another process holds the lock. Ranks that this process starts inherit the
            descriptor, so the lock is released when the last rank exits.
        """
        name = "lock" if task is None else f"lock-{task}"
        fd = open_lock_file(self.stage_dir(stage) / name)
        # wait, because lock_holder() takes the lock for a moment to test it
        deadline = time.monotonic() + timeout_s
        while not try_flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() > deadline:
                os.close(fd)
                return None
            time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
        return fd

    def describe_write_error(self) -> str | None:
        """Return why this process cannot write to the run directory now; None if it can."""
        probe = self.path / f".probe-{os.uname().nodename}-{os.getpid()}"
        try:
            write_atomic(probe, bytes(1 << 16))
            probe.unlink()
        except OSError as error:
            return str(find_storage_error(error, self.path) or f"cannot write {self.path}: {error.strerror}")
        return None

    def lock_holder(self, stage: str) -> LockHolder | None:
        """Return the process that holds the lock of the stage, or of a task of its array; None if there is none."""
        for lock in sorted((self.jobs_dir / stage).glob("lock*")):
            with open(open_lock_file(lock, os.O_RDONLY), "rb") as file:
                # the lock to test with is shared, so that two such tests at the same time do not disturb each other
                if not try_flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB):
                    pid, _, host = file.read(200).decode(errors="replace").strip().partition(" ")
                    return LockHolder(int(pid) if pid.isdigit() else 0, host)
        return None

    # -- code ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def lock_exclusively(self, timeout_s: float = math.inf) -> Iterator[None]:
        """Hold the lock under which a process creates this run, changes it, replaces its code or submits its jobs.

        A process that holds this lock never waits for a job, so jobs may also take the lock. The config is read again
        after taking the lock, because another process may have changed the config.

        Args:
            timeout_s: how long to wait for the lock, in seconds. After this time, the `with` block runs without the
                lock, because a suspended process may hold the lock.
        """
        deadline = time.monotonic() + timeout_s
        wait_flag = 0 if math.isinf(timeout_s) else fcntl.LOCK_NB  # without a limit, flock itself waits
        with open(open_lock_file(self.path / ".creating"), "rb") as lock:
            while not try_flock(lock.fileno(), fcntl.LOCK_EX | wait_flag) and time.monotonic() < deadline:
                time.sleep(0.2)
            self._config = None
            yield

    @property
    def is_being_submitted(self) -> bool:
        """Whether another process holds the lock of `lock_exclusively`."""
        with suppress(OSError), open(open_lock_file(self.path / ".creating", os.O_RDONLY), "rb") as lock:
            return not try_flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False

    def check_model_code(self) -> list[str]:
        """Try to import the user's modules that `copy_code` would copy, and to build the custom model, if there is one.

        In a sweep, the model is built with the options of each point. If the jobs use another Python or a container,
        the modules are only compiled.

        Returns:
            A list with a note if the model never reads some of `model.options`, or if transformers builds it; otherwise
            an empty list.

        Raises:
            UserError: if a module does not compile or cannot be imported, or if the model cannot be built.
        """
        config = self.config
        modules = resolve_user_modules(config, _source_folders())
        if modules:
            # the Python or container of the jobs may have packages that are missing here
            has_other_python = config.site.python is not None or config.site.container is not None
            options: list[Mapping[str, Any]] = []
            if not has_other_python:
                options = [point_config.model.all_options for point_config in make_point_configs(config) or [config]]
            if unread_keys := try_code(self.code_dir, modules, options, config.run.root.name):
                names = ", ".join(f"model.options.{key}" for key in unread_keys)
                return [f"note: {config.model.target} never reads {names}: check the spelling, or remove it"]
        if config.model.backend == "transformers":
            return [f"note: the model is {config.model.describe()} (model.backend transformers)"]
        return []

    def copy_code(self) -> None:
        """Copy Sluice's source code and the packages of the user's modules into `code/`, replacing an older copy.

        Call this under `lock_exclusively`. The files COMMIT and DIFF contain the git commit and the uncommitted changes
        of Sluice's code. If copying or compiling fails, the older copy stays.

        Raises:
            UserError: if a file does not compile.
            shutil.Error, OSError: if the copy cannot be written (see `find_storage_error`).
        """
        config = self.config
        modules = resolve_user_modules(config, _source_folders())
        copy_code(self.path, modules, config.run.root.name, _UMASK[config.run.sharing])

    def copy_working_dir(self) -> None:
        """Copy the working directory of the submission into `work/` of this run and of its points, if commands need it.

        When the run is made, this is the working directory of this process. Later, the same directory is copied again.

        Raises:
            UserError: if the directory has too many files, they are too large, or it no longer exists.
            OSError: if the copy cannot be written (see `find_storage_error`).
        """
        if not self.config.stages.commands:
            return
        created = self.read_events(None, Created)
        source = Path(created[0].working_dir) if created and created[0].working_dir else Path.cwd()
        if not source.is_dir():
            raise UserError("work.missing", f"{source}, from which {self.name} was submitted, no longer exists")
        excluded = [self.config.run.root, self.path]
        for run in (self, *(point for point in list_points(self) if point.work_dir.exists())):
            copy_working_dir(source, run.work_dir, excluded, _UMASK[self.config.run.sharing])

    @property
    def commit(self) -> str | None:
        """The git commit of the run's code, with `+` if there were uncommitted changes; None if git has no commit."""
        with suppress(FileNotFoundError):
            with open_regular_file(self.code_dir / "COMMIT") as file:
                commit = file.read().decode(errors="replace").strip()
            return commit + ("+" if (self.code_dir / "DIFF").stat().st_size else "")
        return None


def _source_folders() -> list[Path]:
    """Return the directories that are searched for a custom model before Python's module search path."""
    return [Path.cwd(), CODE_ROOT]


# -- points of a sweep -------------------------------------------------------------------------------------------------


def list_point_values(run: Run) -> list[Mapping[str, Any]]:
    """Return the values of each point of a sweep, by dotted key; empty if `run` is not a sweep.

    For a search, these are the values of the trials so far.
    """
    sweep = run.config.sweep
    if sweep is None:
        return []
    if sweep.search is not None:
        return [trial.parameters for trial in read_study(run.path).trials]
    return [*sweep.points()]


def list_points(run: Run) -> list[Run]:
    """Return the runs of a sweep's points, in the order of the sweep; empty if `run` is not a sweep.

    No directory is made. For a point that does not exist yet, the result has the config that the point will get.
    """
    configs = make_point_configs(run.config, list_point_values(run))
    return [Run(run.path / "points" / config.run.name, config) for config in configs]


def create_points(run: Run) -> list[Run]:
    """Make the directories of a sweep's points that do not exist yet, and return the runs of all points.

    In the directory of a point, `data` and `code` are links to `data` and `code` of the sweep.
    """
    points = list_points(run)
    missing = [point for point in points if not point.config_file.exists()]
    if not missing:
        return points
    get_values = make_run_values_dumper(run.config_file)
    for point in missing:
        for folder in (point.jobs_dir, point.checkpoints_dir, point.evaluation_dir):
            folder.mkdir(parents=True, exist_ok=True)
        if run.work_dir.exists() and not point.work_dir.exists():
            shutil.copytree(run.work_dir, point.work_dir, symlinks=True)
        for link in (point.data_dir, point.code_dir):
            if not os.path.lexists(link):
                link.symlink_to(f"../../{link.name}")
        values = get_values(point.config)
        if run.metadata_file.exists():  # runs of older versions lack this file: their config.yaml has all values
            write_json(point.metadata_file, dump_metadata(point.config))
            values = remove_metadata(values)
        write_atomic(point.config_file, dump_yaml(values))
        point.append_event(Created(config=str(point.config_file), sweep=run.config.run.name))
    return points
