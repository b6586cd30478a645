"""How a stage last stopped, and how it continues, for `status`: read from the events of its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.run.attempts import ENDS, GOES_ON

_CAUSES = {
    "preempted": "preemption", "time_limit": "its time limit", "node_failure": "a node failure",
    "bad_node": "a bad node", "crashed": "a crash", "out_of_memory": "running out of memory", "hang": "a hang",
    "peer_lost": "losing a rank", "non_finite": "a loss that was not finite", "storage": "a storage error",
    "bad_checkpoint": "a bad checkpoint", "bad_input": "bad inputs", "user_error": "a user error",
    "cancelled": "a cancellation", "stop file": "a stop request", "outputs": "incomplete outputs",
    "placement": "a wrong placement of ranks", "signal": "a signal", "stopped": "a signal",
}  # fmt: skip
"""What is said of a cause. Of `requeued` nothing is: nobody knows more."""
_CONTINUES = {"requeued": "requeued", "retried": "restarted", "handed_over": "handed over to the next job"}
_AGAIN = "submitted again"


@dataclass(frozen=True)
class LastStop:
    """The end of the newest attempt that ended without its stage being done."""

    cause: str | None
    """An exit code's name, a signal, or who asked for it; None if nothing says."""
    step: int | None
    """The step at which a training stopped in order, or its newest checkpoint if it did not; None if there is none."""
    in_order: bool
    """Whether the training stopped at a step boundary, on request."""
    continues: str | None = None
    """How the stage continues, such as `requeued`; None if it does not."""
    attempts: int = 1
    """How many attempts there were so far."""

    @property
    def after(self) -> str:
        """The cause in words: `after preemption`; "" if it is not known."""
        if self.cause in (None, "requeued"):
            return ""
        return f"after {_CAUSES.get(str(self.cause), f'a signal ({self.cause})')}"

    @property
    def details(self) -> str:
        """The step and the number of attempts: `at step 1210 (2 attempts)`."""
        at = "" if self.step is None else f"at step {self.step} "
        if self.step is not None and not self.in_order:
            at = f"with a checkpoint of step {self.step} "
        return f"{at}({self.attempts} attempt{'s'[: self.attempts - 1]})"


def find_last_stop(events: Sequence[Mapping[str, Any]], waiting_job: str | None) -> LastStop | None:
    """Return how a stage last stopped; None if it did not, or is done.

    Args:
        events: All events of the stage, oldest first.
        waiting_job: The job of the stage that waits in the queue, if one does: no attempt runs then.
    """
    tasks: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        tasks.setdefault(event.get("task"), []).append(event)
    if len(tasks) == 1:
        return _of_one(events, waiting_job)
    # what has no task is of the whole stage: jobs that were submitted, and the job behind an array
    found = [_of_one(own, None if task is not None else waiting_job) for task, own in tasks.items()]
    return max((stop for stop in found if stop is not None), key=lambda stop: stop.attempts, default=None)


def _of_one(events: Sequence[Mapping[str, Any]], waiting_job: str | None) -> LastStop | None:
    """`find_last_stop` for the events of one stage, or of one task of its array."""
    last: LastStop | None = None
    started: Mapping[str, Any] | None = None
    """The start of the attempt that has not ended."""
    noted: str | None = None
    stopped_at: int | None = None
    saved: int | None = None
    is_submitted_again, attempts = False, 0

    def stop(cause: object) -> LastStop:
        step = stopped_at if stopped_at is not None else saved
        return LastStop(None if cause is None else str(cause), step, stopped_at is not None)

    for event in events:
        name = event["event"]
        if name == "started":
            last = last if started is None else stop(noted)
            started, noted, stopped_at, is_submitted_again = event, None, None, False
            attempts += 1
        elif name == "stopping":
            noted = event.get("cause") or event.get("by")
        elif name == "stop_requested":
            stopped_at = event.get("step")
        elif name in ("saved", "restored"):
            saved = event["step"]
        elif name == "began_anew":
            saved = None
        elif name in ENDS:
            last, started = None if name == "done" else stop(event.get("cause") or noted), None
        elif name in GOES_ON and last is not None:
            last = replace(last, continues=_CONTINUES[name])
        elif name == "submitted" and event.get("kind") != "afternotok" and "step" not in event:  # by a person
            is_submitted_again = True
    if started is not None and waiting_job is not None:
        same = waiting_job in (started.get("slurm_job"), started.get("job_id"))
        last = replace(stop(noted), continues=_CONTINUES["requeued" if same else "handed_over"])
    if last is None:
        return None
    return replace(last, attempts=attempts, continues=_AGAIN if is_submitted_again else last.continues)
