"""The follower: one process that sends new metrics and events of one run to one tracker.

    python -m tracking.follower TRACKER|telemetry RUN                 until a signal; started by the supervisor
    python -m tracking.follower TRACKER RUN --once [KEY=VALUE …]      once; started by `submit.py track RUN`

The follower polls the files of the run every two seconds and sends the tracker all new lines. `track/TRACKER.json`
records what was sent. If a tracker raises an error, the follower closes the tracker, waits for a growing pause, and
constructs the tracker again. A lock ensures that only one follower serves a tracker of a run. No other process waits
for a follower.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.base.errors import UserError, print_error
from pipeline.base.files import open_lock_file, try_flock, write_json
from pipeline.base.signals import StopFlag
from pipeline.config.read import apply_overrides, dump_values, parse_config
from pipeline.config.sections import TRACKERS
from pipeline.run.code import CODE_ROOT, make_code_env
from pipeline.run.directory import Run
from pipeline.run.events import LostWork, utc_timestamp
from tracking.tracker import (
    RunReader,
    Tracker,
    TrackerState,
    check_tracker_packages,
    create_tracker,
    display_names,
    is_late_held_out,
)  # fmt: skip

POLL_S = 2.0
"""The time between two polls of the run's files."""
MAX_PAUSE_S = 120.0
"""The longest pause after an error of the tracker."""
LOCK_WAIT_S = 20.0
"""How long `--once` waits for another follower of the same tracker. The follower of a job exits earlier than this after
the job has ended."""


class Follower:
    """Sends new metrics and events of one run to one tracker.

    Args:
        run: the run.
        name: the name of the tracker, such as `tensorboard`.
    """

    def __init__(self, run: Run, name: str) -> None:
        self.run = run
        self.name = name
        folder = run.path / "track"
        folder.mkdir(exist_ok=True)
        self._state_file = folder / f"{name}.json"
        self._lock_file = folder / f"{name}.lock"
        self._tracker: Tracker | None = None

    def wait_for_lock(self, flag: StopFlag, once: bool) -> bool:
        """Wait until no other follower serves this tracker of this run, and take the lock.

        The lock is held until this process ends, because its file descriptor is never closed.

        Args:
            flag: set when this process receives a signal.
            once: whether to wait at most `LOCK_WAIT_S` seconds.

        Returns:
            True if this process has the lock, False if a signal ended the wait.

        Raises:
            UserError: if `once` is set and the wait takes too long.
        """
        lock_fd = open_lock_file(self._lock_file)
        deadline = time.monotonic() + LOCK_WAIT_S
        while not try_flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if flag:
                return False
            if once and time.monotonic() > deadline:
                raise UserError(
                    "track.already_followed",
                    f"{self.run.name}: another process already feeds {self.name}, maybe in a running job; it sends "
                    "everything new, so you need not run this command",
                )
            time.sleep(0.2)
        return True

    def catch_up(self) -> None:
        """Send the tracker all new events, steps and evaluations.

        Raises:
            Exception: any exception that the tracker raises.
        """
        if self._tracker is None:
            state = TrackerState.load(self._state_file)
            self._tracker = create_tracker(self.name, self.run, state, RunReader(self.run))
        tracker = self._tracker
        state = tracker.state
        reader = tracker.reader
        offset = state.events
        events = list(reader.read_events(offset))
        try:
            for event, end in events:
                reader.note_event(event)
                changed_steps: list[int] = []  # steps whose values change
                if event["event"] == LostWork.NAME:
                    changed_steps = event["steps"]
                elif is_late_held_out(event):
                    changed_steps = [event["step"]]
                if changed_steps and min(changed_steps) <= state.step:
                    tracker.rewind(min(changed_steps) - 1)  # keeps the values of the step before the first changed step
                tracker.on_event(event)
                offset = end
        finally:  # if an event fails (such as by a rate limit), the tracker does not receive the events before it again
            if offset > state.events:
                self._commit(tracker, events=offset)
        while steps := reader.read_steps(state.step):
            tracker.on_steps(steps)
            self._commit(tracker, step=steps[-1]["step"])
        if results := reader.read_evaluations(state.evaluations):
            for result in results:
                tracker.on_evaluation(result)
            self._commit(tracker, evaluations=[*state.evaluations, *(int(result["step"]) for result in results)])
        if tracker.on_poll():
            self._commit(tracker)

    def _commit(self, tracker: Tracker, **progress: Any) -> None:
        """Flush the tracker, and save its state with the changes in `progress`. The current time becomes `heard`."""
        tracker.flush()
        vars(tracker.state).update(progress, heard=time.time())
        write_json(self._state_file, vars(tracker.state))

    def follow(self, should_continue: Callable[[], bool]) -> bool:
        """Call `catch_up` while `should_continue()` returns True, then once more.

        After a UserError, `catch_up` is not called again. After any other exception, it is called again after a pause.

        Returns:
            Whether the last call succeeded.
        """
        pause_s = POLL_S
        has_succeeded = False
        while True:
            is_last = not should_continue()  # checked first, so that the last call sends all data from before the end
            try:
                self.catch_up()
                pause_s = POLL_S
                has_succeeded = True
            except UserError as error:
                print(f"{utc_timestamp()} {self.name}: {error}", file=sys.stderr, flush=True)
                return False
            except Exception:  # packages of trackers raise many exceptions, and none of them may end this process
                print(f"{utc_timestamp()} {self.name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
                self._close()
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                has_succeeded = False
            if is_last:
                self._close()
                return has_succeeded
            deadline = time.monotonic() + pause_s
            while time.monotonic() < deadline and should_continue():
                time.sleep(0.2)

    def _close(self) -> None:
        """Close the tracker, if one is open. Errors are only printed."""
        if self._tracker is not None:
            tracker = self._tracker
            self._tracker = None
            try:
                tracker.close()
            except Exception:  # no harm is done, because the tracker is not used again
                print(f"{utc_timestamp()} {self.name}: {traceback.format_exc()}", file=sys.stderr, flush=True)


def run_follower(run: Run, name: str, flag: StopFlag, once: bool) -> int:
    """Run a follower until a signal arrives, or send the new data only once. Return the exit code.

    Args:
        run: the run.
        name: the name of the tracker.
        flag: set when this process receives a signal.
        once: whether to send the new data and exit, instead of following the run.
    """
    os.nice(10)  # a lower priority than the ranks, which may run on the same node
    follower = Follower(run, name)
    should_continue = (lambda: False) if once else (lambda: not flag)
    succeeded = follower.wait_for_lock(flag, once) and follower.follow(should_continue)
    return 0 if succeeded else 1


def update_trackers(run: Run, tracker: str | None, overrides: Sequence[str]) -> int:
    """Send trackers what they have not received yet. Each tracker gets a child process.

    A sweep itself, unlike its points, is sent only to trackers that need no package (jsonl, webhook …).

    Args:
        run: the run.
        tracker: the tracker's name; None for all trackers that the config enables, one after the other.
        overrides: changes of the config as `KEY=VALUE`, for this call only.

    Returns:
        0 if all trackers are up to date, otherwise the highest exit code of a child process.

    Raises:
        UserError: if `tracker` is None and the config enables no tracker.
    """
    names = [tracker] if tracker else run.config.track.enabled
    # A sweep itself has events but no steps. Trackers that need a package are mainly for steps, so they are left out.
    # Unknown names are kept, because the child process reports them.
    if names and run.config.sweep is not None:
        names = [name for name in names if name not in TRACKERS or TRACKERS[name].package is None]
    elif not names:
        raise UserError(
            "track.no_tracker",
            f"track: the config of {run.name} enables no tracker; add --to {'|'.join(TRACKERS)} and its keys as "
            "track.KEY=VALUE",
        )
    # all other trackers are enabled by a key that the user must give anyway, such as a URL
    enabling_override = ["track.tensorboard=true"] if tracker == "tensorboard" else []
    worst_code = 0
    run_name, sweep_name = display_names(run)
    for name in names:
        options = ["--once", *enabling_override, *overrides]
        command = [sys.executable, "-m", "tracking.follower", name, str(run.path), *options]
        exit_code = subprocess.run(command, env=make_code_env(os.environ, CODE_ROOT)).returncode
        outcome = "up to date" if exit_code == 0 else "not up to date"
        prefix = f"{run_name} " if sweep_name else ""
        print(f"{prefix}{name}: {outcome}", flush=True)
        worst_code = max(worst_code, abs(exit_code))  # the exit code is negative if a signal ended the process
    return worst_code


def main(arguments: list[str]) -> int:
    """Run a follower, or sample the telemetry of this node. Return the exit code.

    Args:
        arguments: the arguments of the command line, as in the module docstring.
    """
    flag = StopFlag().install()
    try:
        name, path, *options = arguments
        run = Run.open(path)
        run.check_owner()
        if overrides := [option for option in options if "=" in option]:
            values = apply_overrides(dump_values(run.config), overrides)
            run._config = parse_config(values, "command line")  # in this process only
        if name == "telemetry":
            from tracking.telemetry import sample_telemetry

            # the supervisor starts telemetry only if `telemetry_s` is set; a user may start it without this key
            return sample_telemetry(run, run.config.track.telemetry_s or 10.0, flag)
        if name not in run.config.track.enabled:
            raise UserError(
                "track.not_enabled",
                f"track.{name} is not set: set it as KEY=VALUE; the trackers are {', '.join(TRACKERS)}",
            )
        check_tracker_packages(run.config)
        return run_follower(run, name, flag, "--once" in options)
    except Exception as error:
        return print_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
