"""The events of a run: one class for each line of events.jsonl, and what a sequence of events means.

`Run.append_event` writes an event, and `Run.read_events` reads all events (pipeline/run/directory.py). A line is a JSON
object: `time`, `event` (the name), `stage`, then the fields of the event's class. :func:`parse_event` also accepts
lines of older and newer versions. Fields that the class does not define are kept in `extra`, and an event without a
class becomes an :class:`UnknownEvent`.

Only :func:`read_stage_state` interprets a sequence of events: whether a stage runs, has ended or is retried, which
budgets the stage used, and how it last stopped.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, ClassVar

from pipeline.base.errors import ExitCode
from pipeline.run.lines import (
    LineCheck,
    has_fields,
    is_count,
    is_duration,
    is_exit_code,
    is_list_of,
    is_number,
    is_text,
    is_timestamp,
)
from pipeline.run.metrics import is_step_line

Seconds = Annotated[float, is_duration]
StepLines = Annotated[list[dict[str, Any]], is_list_of(is_step_line)]
_WRITTEN_IF_NONE = {"written_if_none": True}
"""Metadata of a field that is written as null if it is None. Other fields are left out if they are None."""
_CHECKS: dict[object, LineCheck] = {
    str: is_text,
    int: is_count,
    float: is_number,
    bool: lambda value: isinstance(value, bool),
    list[str]: is_list_of(is_text),
    list[int]: is_list_of(is_count),
}
"""Type of a field → function that checks if a JSON value has this type. Fields of other types are not checked."""


def utc_timestamp() -> str:
    """Return the current time in the format of events: UTC, ISO 8601, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- classes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of events.jsonl."""

    NAME: ClassVar[str] = ""
    """The value of `event` in the file."""
    time: str = field(default_factory=lambda: utc_timestamp())  # a lambda, so that tests can replace utc_timestamp
    stage: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the class does not define: values with arbitrary names, and fields of other versions."""

    @property
    def name(self) -> str:
        """The value of `event` in the file."""
        return self.NAME

    @property
    def timestamp(self) -> float:
        """The time of the event in seconds since 1970."""
        return datetime.fromisoformat(self.time).timestamp()

    def to_line(self) -> dict[str, Any]:
        """Return the JSON object of this event in events.jsonl."""
        line: dict[str, Any] = {"time": self.time, "event": self.name, "stage": self.stage}
        for event_field in dataclasses.fields(self):
            value = getattr(self, event_field.name)
            is_written = value is not None or "written_if_none" in event_field.metadata
            if event_field.name not in _COMMON_FIELDS and is_written:
                line[event_field.name] = value
        return {**line, **self.extra}


_COMMON_FIELDS = frozenset({"time", "event", "stage", "extra", "unknown_name"})
"""Fields that every class has, or that `to_line` writes under another name."""


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of another version of Sluice, which this version does not know."""

    unknown_name: str

    @property
    def name(self) -> str:
        """The value of `event` in the file."""
        return self.unknown_name


@dataclass(frozen=True, kw_only=True)
class Created(Event):
    """The run directory was made."""

    NAME = "created"
    config: str | None = None
    """The path of config.yaml."""
    working_dir: str | None = None
    """The directory that was copied for the commands of the run; None if no stage runs a command."""
    sweep: str | None = None
    """The name of the sweep, if the run is a sweep point."""
    origin: str | None = None
    """The directory of the run from whose checkpoint this run was forked."""
    step: int | None = None
    """The step of this checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Changed(Event):
    """A user changed the config of the run."""

    NAME = "changed"
    set: Mapping[str, Any] | None = None
    """Dotted key → new value, with secrets masked."""


@dataclass(frozen=True, kw_only=True)
class CodeUpdated(Event):
    """A user replaced the run's copy of the code."""

    NAME = "code_updated"
    commit: str | None = field(default=None, metadata=_WRITTEN_IF_NONE)
    """The git commit of the new copy; None if git has no commit."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A user ran `resume`. The event concerns every stage, and resets every retry budget."""

    NAME = "resumed"


@dataclass(frozen=True, kw_only=True)
class CancelRequested(Event):
    """A user ran `cancel`."""

    NAME = "cancel_requested"


# -- submissions


@dataclass(frozen=True, kw_only=True)
class SubmissionEvent(Event):
    """An event about a submission, with the fields that identify the submission and its job."""

    after: list[str] | None = None
    """The IDs of the jobs on which this job depends."""
    executor: str | None = None
    """slurm or local."""
    kind: str | None = None
    """How the job depends on the jobs in `after`, such as `afterok`."""
    tasks: int | None = None
    """Number of tasks, if the job is an array."""
    array_task: int | None = None
    """The index of the array task that this event concerns, in an event that is written before the job ID is known."""
    key: str | None = None
    """Random text that identifies the submission."""
    cluster: str | None = None
    """The name of the Slurm cluster."""
    uid: int | None = None
    """The numeric ID of the user who owns the job."""
    job_name: str | None = None
    step: int | None = None
    """The step of the checkpoint that the job evaluates, if the supervisor of the train stage submitted the job."""

    @property
    def is_successor(self) -> bool:
        """Whether the job starts only if the job that it depends on fails."""
        return self.kind == "afternotok"


@dataclass(frozen=True, kw_only=True)
class Submitting(SubmissionEvent):
    """A process is about to call sbatch."""

    NAME = "submitting"
    stage: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Submitted(SubmissionEvent):
    """A job was submitted."""

    NAME = "submitted"
    stage: str
    job_id: str
    job_submitted: Annotated[float | None, is_number] = None
    """When the job was submitted, in seconds since 1970, if this event was written later."""


@dataclass(frozen=True, kw_only=True)
class NotSubmitted(SubmissionEvent):
    """A submission failed, or Slurm has no job of the submission."""

    NAME = "not_submitted"
    stage: str
    key: str
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationNotSubmitted(Event):
    """The evaluation of a checkpoint could not be submitted while the train stage was running."""

    NAME = "evaluation_not_submitted"
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrialsNotSubmitted(Event):
    """The next trials of a search could not be decided or submitted. The end of the next trial tries again."""

    NAME = "trials_not_submitted"
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class TookOver(Event):
    """A successor job started, and the jobs that depended on its predecessor depend on it now."""

    NAME = "took_over"
    job_id: str
    predecessor: str | None = None
    """The job ID of the predecessor."""
    children: list[str]
    """The IDs of the jobs that depended on the predecessor."""


# -- attempts


@dataclass(frozen=True, kw_only=True)
class AttemptEvent(Event):
    """An event of one attempt of a stage, or of one task of its array."""

    job_id: str | None = field(default=None, metadata=_WRITTEN_IF_NONE)
    """The ID of the job as it was submitted: `ID`, or `ID_TASK` for an array task."""
    task: int | None = field(default=None, metadata=_WRITTEN_IF_NONE)
    """The index of the array task; None for a whole job."""
    attempt: int | None = None
    """The number of the attempt, from 1."""


@dataclass(frozen=True, kw_only=True)
class Started(AttemptEvent):
    """An attempt began."""

    NAME = "started"
    stage: str
    ranks: int | None = None
    host: str | None = None
    pid: int | None = None
    slurm_job: str | None = field(default=None, metadata=_WRITTEN_IF_NONE)
    """The ID of the job in Slurm: `ID`, or `ID_TASK` for an array task; None without Slurm."""
    restarts: int | None = None
    """How often Slurm had restarted the job before."""
    standing: str | None = None
    """The progress marker at the start (slurm/supervise/attempt_end.py)."""
    cluster: str | None = None
    uid: int | None = None
    job_name: str | None = None
    job_submitted: Annotated[float | None, is_number] = None
    """When the job was submitted, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class RanksStarted(AttemptEvent):
    """The node agents have forked the ranks of an attempt."""

    NAME = "ranks_started"
    processes: Mapping[str, Any] | None = None
    """Host → process ids of the ranks on this host, by rank."""
    spares: list[str] | None = None
    """The nodes that have an agent and no ranks."""
    failed: list[str] | None = None
    """The nodes of this job that have failed since its start."""
    replaced: Mapping[str, Any] | None = None
    """Node → the spare node that has replaced it."""


@dataclass(frozen=True, kw_only=True)
class Stopping(AttemptEvent):
    """The supervisor noticed that the attempt stops; the ranks may still save."""

    NAME = "stopping"
    by: str | None = None
    """What stops the attempt: the name of a signal, or the request of a user (`USER_REQUESTS`)."""
    cause: str | None = None
    """The name of an exit code in lower case."""


@dataclass(frozen=True, kw_only=True)
class EndEvent(AttemptEvent):
    """An attempt ended. Each subclass is one kind of end."""

    exit_code: Annotated[int | None, is_exit_code] = None
    cause: str | None = None
    """The name of an exit code in lower case, or what requested the stop."""
    rank: int | None = None
    host: str | None = None
    message: str | None = None
    seconds: Seconds | None = None
    """How long the ranks ran."""
    slurm_job: str | None = None
    restarts: int | None = None
    in_grace: bool | None = None
    """Whether Slurm reported a preemption. Slurm may then start the job again after this event."""
    final: bool | None = None
    """Whether the cause allows a retry, but the budget is used up or the attempt made no progress."""
    noticed_later: bool | None = None
    """Whether a later job wrote the event, because the supervisor of this attempt could not."""

    @property
    def code(self) -> ExitCode:
        """The exit code; CRASHED if the event has none."""
        return ExitCode.CRASHED if self.exit_code is None else ExitCode(self.exit_code)


@dataclass(frozen=True, kw_only=True)
class Done(EndEvent):
    """The stage is done."""

    NAME = "done"


@dataclass(frozen=True, kw_only=True)
class Stopped(EndEvent):
    """The attempt was stopped before the stage was done."""

    NAME = "stopped"


@dataclass(frozen=True, kw_only=True)
class Cancelled(EndEvent):
    """A user cancelled the run or the job."""

    NAME = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Preempted(EndEvent):
    """Slurm preempted the job."""

    NAME = "preempted"


@dataclass(frozen=True, kw_only=True)
class Failed(EndEvent):
    """The attempt failed, or the stage is not retried after a stop."""

    NAME = "failed"


@dataclass(frozen=True, kw_only=True)
class RetryEvent(AttemptEvent):
    """Sluice retries the stage without a request of the user."""

    cause: str | None = None
    """Why the previous attempt ended: the name of an exit code in lower case."""
    budget: str | None = None
    """The key of `recovery.budgets` that limits this retry."""
    progress: bool | None = None
    """Whether the previous attempt made progress, such as a new checkpoint."""
    by: str | None = None
    """`slurm` if Slurm requeues the job by itself."""
    noticed_later: bool | None = None
    """Whether a later job wrote the event, because the supervisor of this attempt could not."""


@dataclass(frozen=True, kw_only=True)
class Requeued(RetryEvent):
    """The job was requeued."""

    NAME = "requeued"


@dataclass(frozen=True, kw_only=True)
class Retried(RetryEvent):
    """The ranks are restarted in the same job."""

    NAME = "retried"
    job_id: str = field(metadata=_WRITTEN_IF_NONE)
    cause: str


@dataclass(frozen=True, kw_only=True)
class HandedOver(RetryEvent):
    """The successor job continues the stage.

    Array tasks and evaluate jobs for one checkpoint also end with this event, but have no successor. `resume` submits
    them again.
    """

    NAME = "handed_over"


END_EVENTS: tuple[type[EndEvent], ...] = (Done, Stopped, Cancelled, Preempted, Failed)
RETRY_EVENTS: tuple[type[RetryEvent], ...] = (Requeued, Retried, HandedOver)


# -- training


@dataclass(frozen=True, kw_only=True)
class Ready(Event):
    """The first step of an attempt begins. `extra` has the peak memory so far."""

    NAME = "ready"
    step: int
    """The last step that is complete."""
    startup_s: Mapping[str, Any] | None = None
    """Name of a phase of the start-up → seconds."""
    communication: str | None = None
    """With MPI groups through mpi4py: the MPI library, and how it accesses GPU memory."""
    sent_bytes: Mapping[str, Any] | None = None
    """Bytes that a rank sends in a step, by process group."""


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """The ranks restored a checkpoint."""

    NAME = "restored"
    step: int
    seconds: Seconds | None = None
    lost_steps: int | None = None
    """Number of steps that have to be repeated."""
    replicas: str | None = None
    """A message about state of replicas that was dropped or changed; None if all state was restored."""
    versions: str | None = None
    """The package versions that changed since the checkpoint was saved, such as `torch 2.8 → 2.9`; None if none did."""
    source: str | None = None
    """`memory` if the ranks restored a snapshot in memory; None for a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint was committed."""

    NAME = "saved"
    step: int
    seconds: Seconds | None = None
    path: str | None = None
    """The checkpoint of a command, as it passed it to `sluice.saved`; None for the pipeline's own checkpoints."""


@dataclass(frozen=True, kw_only=True)
class RestartedFromScratch(Event):
    """A run that had saved checkpoints starts at step 0 again, because the user removed the checkpoints."""

    NAME = "began_anew"


@dataclass(frozen=True, kw_only=True)
class Damaged(Event):
    """A checkpoint is damaged and was renamed, or a shard is damaged."""

    NAME = "damaged"
    step: int | None = None
    file: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """The ranks agreed to stop after a step."""

    NAME = "stop_requested"
    step: int | None = None
    signal: str | None = None


@dataclass(frozen=True, kw_only=True)
class SaveSkipped(Event):
    """The ranks stop without saving."""

    NAME = "save_skipped"
    step: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class StoppedEarly(Event):
    """A callback completed the training before its last step; the ranks save the final checkpoint."""

    NAME = "stopped_early"
    step: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """A trial of a search reached a rung. The ranks save a checkpoint and exit."""

    NAME = "paused"
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class LostWork(Event):
    """Steps that no checkpoint contains are removed from metrics.jsonl and repeated."""

    NAME = "lost_work"
    steps: list[int]
    lines: StepLines
    """The removed lines of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class MixtureReport(Event):
    """How often the run reads each source of a mixture."""

    NAME = "mixture"
    weights: list[dict[str, Any]] | None = None
    """The value of `data.mixture.weights`."""
    epochs: Mapping[str, Any] | None = None
    """Source → number of epochs so far."""
    epochs_at_the_end: Mapping[str, Any] | None = None
    """Source → number of epochs at the last step of the run."""


@dataclass(frozen=True, kw_only=True)
class HeldOut(Event):
    """Results on held-out data for a step that already has a line in metrics.jsonl. The results are in `extra`."""

    NAME = "held_out"
    step: int


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """A checkpoint was evaluated."""

    NAME = "evaluated"
    step: int | None = None
    loss: Annotated[float | None, is_number] = None
    bits_per_byte: Annotated[float | None, is_number] = None


@dataclass(frozen=True, kw_only=True)
class Straggler(Event):
    """A rank takes clearly longer for its computation than its peers, the ranks of the same pipeline-parallel stage."""

    NAME = "straggler"
    step: int | None = None
    rank: int
    host: str
    ratio: float
    """The compute time of the rank, as a multiple of the median of its peers."""


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """A straggler is about as fast as its peers again."""

    NAME = "recovered"
    step: int | None = None
    rank: int
    host: str | None = None


@dataclass(frozen=True, kw_only=True)
class BadStepEvent(Event):
    """The decision of the bad-step guard about a step (pipeline/resilience/guard.py)."""

    step: int | None = None
    position: int | None = None
    """The position of the first sample of the step, or of the excluded samples, in the order of samples."""
    reason: str | None = None
    samples: int | None = None
    """Number of excluded samples."""


@dataclass(frozen=True, kw_only=True)
class BadStepSkipped(BadStepEvent):
    """The update of a bad step is skipped."""

    NAME = "bad_step_skip"


@dataclass(frozen=True, kw_only=True)
class SamplesExcluded(BadStepEvent):
    """The ranks return to a checkpoint and exclude samples."""

    NAME = "bad_step_leave_out"


@dataclass(frozen=True, kw_only=True)
class LocalCopy(Event):
    """A node copied shards to its local disk, or could not copy them."""

    NAME = "local_copy"
    host: str | None = None
    disk: str | None = None
    """The value of `site.local_disk`."""
    files: int | None = None
    bytes: Annotated[int | None, is_number] = None
    seconds: Seconds | None = None
    no_room_for: int | None = None
    """Number of files that did not fit."""
    too_many_files_by: int | None = None
    """By how many files the shards exceed the limit of open files."""
    error: str | None = None


def _list_classes(base: type[Event]) -> list[type[Event]]:
    """Return the subclasses of `base`, at any depth, that have an event name."""
    classes = [event_class for child in base.__subclasses__() for event_class in [child, *_list_classes(child)]]
    return [event_class for event_class in classes if event_class.NAME]


EVENT_CLASSES: Mapping[str, type[Event]] = {event_class.NAME: event_class for event_class in _list_classes(Event)}
"""Name of an event → its class."""


# -- reading -----------------------------------------------------------------------------------------------------------


def _make_check(hint: object) -> LineCheck:
    """Return the function that checks a field with the type `hint`."""
    if typing.get_origin(hint) is Annotated:
        return typing.cast(LineCheck, typing.get_args(hint)[1])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
        return _make_check(hint)
    return _CHECKS.get(hint, lambda value: True)


@cache
def _field_checks(name: str) -> tuple[dict[str, LineCheck], dict[str, LineCheck]]:
    """Return the checks of the required fields of the event `name`, and the checks of its optional fields.

    Both results map the name of a field to a function that checks its value. If no class has the name, only the fields
    of `Event` are checked.
    """
    event_class = EVENT_CLASSES.get(name, Event)
    hints = typing.get_type_hints(event_class, include_extras=True)
    required: dict[str, LineCheck] = {"time": is_timestamp, "event": is_text}
    optional: dict[str, LineCheck] = {}
    for event_field in dataclasses.fields(event_class):
        # `time` and `event` are set above. A line has no other common field under its own name, except `stage`.
        if event_field.name in _COMMON_FIELDS - {"stage"}:
            continue
        has_no_value = event_field.default is dataclasses.MISSING
        has_no_factory = event_field.default_factory is dataclasses.MISSING
        checks = required if has_no_value and has_no_factory else optional
        checks[event_field.name] = _make_check(hints[event_field.name])
    return required, optional


def parse_event(line: Any) -> Event | None:
    """Return the event in a line of events.jsonl that was parsed from JSON; None if the line is malformed."""
    name = line.get("event") if isinstance(line, dict) else None
    if not isinstance(name, str):
        return None
    event_class = EVENT_CLASSES.get(name, Event)
    if not has_fields(line, *_field_checks(event_class.NAME)):
        return None
    # `kind` describes the dependency on the jobs in `after`, so `kind` alone is malformed
    if issubclass(event_class, SubmissionEvent) and line.get("kind") is not None and line.get("after") is None:
        return None
    names = {event_field.name for event_field in dataclasses.fields(event_class)} - {"extra"}
    values = {key: value for key, value in line.items() if key in names and value is not None}
    extra = {key: value for key, value in line.items() if key not in names and key != "event"}
    if event_class is Event:
        return UnknownEvent(unknown_name=name, **values, extra=extra)
    return event_class(**values, extra=extra)


def is_event(line: Any) -> bool:
    """Return True if a line of events.jsonl that was parsed from JSON is an event."""
    return parse_event(line) is not None


# -- meaning -----------------------------------------------------------------------------------------------------------

USER_REQUESTS = frozenset({"cancelled", "stop file"})
"""Values of `Stopping.by` and `EndEvent.cause` for stops that a user requested."""


@dataclass(frozen=True)
class StopInfo:
    """How an attempt ended before its stage was done."""

    cause: str | None
    """The name of an exit code in lower case, a signal, or what requested the stop; None if unknown."""
    step: int | None
    """The step at which the ranks stopped on request, otherwise the newest checkpoint; None if there is neither."""
    is_graceful: bool
    """Whether the ranks stopped on request, after a complete step."""
    retry: type[RetryEvent] | None = None
    """How Sluice retries the stage; None if Sluice does not retry it."""


@dataclass(frozen=True)
class StageState:
    """The state of a stage according to its events.

        started ──────────► open ── stopping ──► open, with the reason of the stop
                             │
                             ├─ done · stopped · cancelled · preempted · failed ──► ended
                             │                                                       │
                             └──────────── requeued · retried · handed_over ◄────────┘   Sluice retries the stage
                                                         │
                                                      started …

    An attempt without an end event is either running or its supervisor died. The events cannot tell which: check the
    stage's lock and the job in Slurm (slurm/query/status.py, slurm/supervise/attempt_end.py).
    """

    start_event: Started | None = None
    """The start of the newest attempt."""
    stopping_event: Stopping | None = None
    """The newest attempt's last `stopping` event: the supervisor noticed a stop."""
    end_event: EndEvent | None = None
    """The end event of the newest attempt; None while it is open."""
    retry_event: RetryEvent | None = None
    """The event that announces a retry after the end event."""
    used_budgets: Mapping[str, int] = field(default_factory=Counter)
    """Number of retries since the last `resume`, by key of `recovery.budgets`."""
    restarts_without_progress: int = 0
    """Number of consecutive retried attempts that made no progress."""
    resumed_by_user: bool = False
    """Whether the user ran `resume` after the newest attempt."""
    attempt_count: int = 0
    """Number of attempts so far."""
    saved_step: int | None = None
    """The step of the newest checkpoint according to the events; None if no event names one."""
    stop_request: StopRequested | None = None
    """The newest attempt's `stop_requested` event: the ranks agreed to stop after a step."""
    is_completing_early: bool = False
    """Whether a callback ended the train stage early in the newest attempt."""
    last_stop: StopInfo | None = None
    """How the newest ended attempt stopped before the stage was done; None if the stage is done or no attempt ended."""
    submitted_again: bool = False
    """Whether a job was submitted after the newest attempt began, except a successor or an evaluation."""

    @property
    def has_failed(self) -> bool:
        """Whether the newest attempt failed and is not retried."""
        return isinstance(self.end_event, Failed) and self.retry_event is None

    @property
    def is_done(self) -> bool:
        """Whether the newest attempt ended with the event `done`."""
        return isinstance(self.end_event, Done)

    @property
    def is_open(self) -> bool:
        """Whether the newest attempt has no end event."""
        return self.start_event is not None and self.end_event is None

    @property
    def is_training(self) -> bool:
        """Whether the newest attempt is training: it is open, and is neither stopping nor completing early."""
        is_stopping = self.stopping_event is not None or self.stop_request is not None
        return self.is_open and not is_stopping and not self.is_completing_early

    @property
    def last_cause(self) -> str | None:
        """Why the newest attempt ended or, while it is open, why it is stopping; None if unknown."""
        event = self.end_event or self.stopping_event
        return None if event is None else event.cause

    @property
    def user_request(self) -> str | None:
        """The user's request that stopped, or is stopping, the newest attempt; None if no user stopped it."""
        if self.end_event is not None:
            reason = self.end_event.cause
        else:
            reason = None if self.stopping_event is None else self.stopping_event.by
        return reason if reason in USER_REQUESTS else None

    def describe_open_stop(self) -> StopInfo:
        """Return how the newest attempt stopped. Call this only if the attempt has stopped but has no end event."""
        cause = None if self.stopping_event is None else self.stopping_event.cause or self.stopping_event.by
        return self._make_stop(cause)

    def _make_stop(self, cause: str | None) -> StopInfo:
        """Return how the newest attempt stopped, with the given cause."""
        stop_step = None if self.stop_request is None else self.stop_request.step
        return StopInfo(cause, self.saved_step if stop_step is None else stop_step, stop_step is not None)

    def advance(self, event: Event) -> StageState:
        """Return the state after one more event."""
        if isinstance(event, Started):
            return replace(
                self,
                start_event=event,
                stopping_event=None,
                end_event=None,
                retry_event=None,
                resumed_by_user=False,
                attempt_count=self.attempt_count + 1,
                stop_request=None,
                is_completing_early=False,
                last_stop=self.describe_open_stop() if self.is_open else self.last_stop,
                submitted_again=False,
            )
        if isinstance(event, Stopping):
            return replace(self, stopping_event=event)
        if isinstance(event, StopRequested):
            return replace(self, stop_request=event)
        if isinstance(event, StoppedEarly):
            return replace(self, is_completing_early=True)
        if isinstance(event, Saved | Restored):
            is_lost_with_job = isinstance(event, Restored) and event.source == "memory"
            return self if is_lost_with_job else replace(self, saved_step=event.step)
        if isinstance(event, RestartedFromScratch):
            return replace(self, saved_step=None)
        if isinstance(event, EndEvent):
            cause = event.cause or self.describe_open_stop().cause
            last_stop = None if isinstance(event, Done) else self._make_stop(cause)
            return replace(self, end_event=event, retry_event=None, resumed_by_user=False, last_stop=last_stop)
        if isinstance(event, RetryEvent):
            has_progress = event.progress is not False  # an event without this field also counts as progress
            return replace(
                self,
                retry_event=event,
                used_budgets=Counter(self.used_budgets) + Counter([str(event.budget)]),
                restarts_without_progress=0 if has_progress else self.restarts_without_progress + 1,
                resumed_by_user=False,
                last_stop=self.last_stop and replace(self.last_stop, retry=type(event)),
            )
        if isinstance(event, Resumed):
            return replace(self, used_budgets=Counter(), restarts_without_progress=0, resumed_by_user=True)
        if isinstance(event, Submitted) and not event.is_successor and event.step is None:
            return replace(self, submitted_again=True)
        return self


def read_stage_state(events: Iterable[Event]) -> StageState:
    """Return the state that follows from `events`, which are in order and concern one stage, array task or job."""
    state = StageState()
    for event in events:
        state = state.advance(event)
    return state


def select_task_events(events: Iterable[Event], stage: str, task: int | None) -> list[Event]:
    """Return the events of a stage, or of one task of its array, and the events that concern every stage.

    If `task` is None, the events of array tasks are left out. Otherwise only events of this task remain of the stage.
    """
    return [
        event
        for event in events
        if isinstance(event, Resumed) or (event.stage == stage and getattr(event, "task", None) == task)
    ]


def get_job_id(event: Event) -> str | None:
    """Return the ID of the job that an event concerns; None for an event that does not concern a single job."""
    return event.job_id if isinstance(event, AttemptEvent | Submitted | TookOver) else None


def split_into_attempts(events: Iterable[Event]) -> tuple[list[Event], list[list[Event]]]:
    """Return the events before the first attempt, and the events of each attempt up to the start of the next one."""
    before: list[Event] = []
    attempts: list[list[Event]] = []
    for event in events:
        if isinstance(event, Started):
            attempts.append([])
        (attempts[-1] if attempts else before).append(event)
    return before, attempts


def find_current_stragglers(events: Iterable[Event]) -> list[Straggler]:
    """Return the newest event of each rank that is a straggler in the last attempt, slowest first."""
    slow: dict[int, Straggler] = {}
    for event in events:
        if isinstance(event, Started):
            slow.clear()
        elif isinstance(event, Straggler):
            slow[event.rank] = event
        elif isinstance(event, Recovered):
            slow.pop(event.rank, None)
    return sorted(slow.values(), key=lambda event: -event.ratio)
