"""The follower: one process for one sink of one run. It reads the run's files, and nothing waits for it.

It looks every two seconds and hands over what is new; what it handed over it remembers in `track/SINK.json`. A sink
that raises is made anew after a pause that grows. Of two followers of the same sink one waits for the other, by a lock.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import flock, open_lock, write_json
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run, now
from tracking.registry import make
from tracking.run_reader import Record, late
from tracking.tracker import Memory, Sink

LOOK_S = 2.0
LONGEST_PAUSE_S = 120.0
OTHERS_S = 20.0
"""So long another process may go on feeding a sink that somebody wants up to date: more than it has after its job."""


class Follower:
    """Feeds one sink."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        folder = run.path / "track"
        folder.mkdir(exist_ok=True)
        self._file, self._lock = folder / f"{name}.json", folder / f"{name}.lock"
        self._sink: Sink | None = None

    def alone(self, flag: StopFlag, once: bool) -> bool:
        """Wait until no other process feeds this sink of this run; False where a signal came first.

        Raises UserError where somebody waits for the end (`once`) and another process goes on feeding it.
        """
        lock, until = open_lock(self._lock), time.monotonic() + OTHERS_S
        while not flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if flag:
                return False
            if once and time.monotonic() > until:
                raise UserError(f"{self.run.name}: another process feeds {self.name}, maybe in a job that runs")
            time.sleep(0.2)
        return True

    def catch_up(self) -> None:
        """Hand over all that is new. Whatever the sink raises."""
        if self._sink is None:
            memory, record = Memory.read(self._file), Record(self.run)
            self._sink = make(self.name, self.run, memory, record)
        sink = self._sink
        memory, record = sink.memory, sink.record
        told, events = memory.events, list(record.events(memory.events))
        try:
            for event, end in events:
                record.note(event)
                changed = event["steps"] if event["event"] == "lost_work" else [event["step"]] if late(event) else []
                if changed and min(changed) <= memory.step:
                    sink.rewind(min(changed) - 1)
                sink.event(event)
                told = end
        finally:  # a receiver that takes only so many a minute gets on, and hears none of them again
            if told > memory.events:
                self._told(sink, events=told)
        while found := record.steps(memory.step):
            sink.steps(found)
            self._told(sink, step=found[-1]["step"])
        if results := record.evaluations(memory.evaluations):
            for result in results:
                sink.evaluation(result)
            self._told(sink, evaluations=[*memory.evaluations, *(int(result["step"]) for result in results)])
        if sink.look():
            self._told(sink)

    def _told(self, sink: Sink, **what: Any) -> None:
        sink.flush()
        vars(sink.memory).update(what, heard=time.time())
        self._keep(sink.memory)

    def _keep(self, memory: Memory) -> None:
        write_json(self._file, vars(memory))

    def follow(self, going: Callable[[], bool]) -> bool:
        """Catch up again and again while `going()`, and once more; whether that last time went well."""
        pause, well = LOOK_S, False
        while True:
            last = not going()
            try:
                self.catch_up()
                pause, well = LOOK_S, True
            except UserError as error:
                print(f"{now()} {self.name}: {error}", file=sys.stderr, flush=True)
                return False
            except Exception:  # whatever a tracker's package raises: this process is there so that nobody else sees it
                print(f"{now()} {self.name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
                self._close()
                pause, well = min(2 * pause, LONGEST_PAUSE_S), False
            if last:
                self._close()
                return well
            until = time.monotonic() + pause
            while time.monotonic() < until and going():
                time.sleep(0.2)

    def _close(self) -> None:
        if self._sink is not None:
            sink, self._sink = self._sink, None
            try:
                sink.close()
            except Exception:  # it failed before, and is made anew: its last words are for the log
                print(f"{now()} {self.name}: {traceback.format_exc()}", file=sys.stderr, flush=True)


def follow(run: Run, name: str, flag: StopFlag, once: bool) -> int:
    """Feed a sink until a signal comes, or `once`; the exit code."""
    os.nice(10)
    follower = Follower(run, name)
    well = follower.alone(flag, once) and follower.follow((lambda: False) if once else (lambda: not flag))
    return 0 if well else 1
