"""The supervisor's own decisions, with ranks that only pretend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config_file import load_config
from pipeline.errors import Exit
from pipeline.run import Run
from pipeline.signals import StopFlag
from slurm import supervisor
from slurm.launch import Left
from slurm.supervisor import Supervisor
from tests.tiny import write_config


class Pretended:
    """Ranks that leave with `code` after some looks; `act` is called with each look's number before."""

    code: int = Exit.STOPPED
    looks = 3
    act: Callable[[int], None] = staticmethod(lambda look: None)

    def __init__(self, run: Run, stage: str, size: int, keep_open: Any) -> None:
        self.size, self.running, self._looks = size, True, 0

    def start(self) -> None: ...

    def send(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def poll(self) -> list[Left]:
        self._looks += 1
        self.act(self._looks)
        self.running = self._looks < self.looks
        return [] if self.running else [Left(0, self.code)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(load_config(write_config(tmp_path)))


def supervised(run: Run, monkeypatch: pytest.MonkeyPatch, flag: StopFlag | None = None, **pretend: Any) -> Supervisor:
    """A supervisor of `train` with such ranks."""
    ranks = type("Ranks", (Pretended,), {k: staticmethod(v) if callable(v) else v for k, v in pretend.items()})
    monkeypatch.setattr(supervisor, "LocalRanks", ranks)
    monkeypatch.setattr(supervisor, "REQUEST_POLL_S", 0.0)
    return Supervisor(run, "train", flag or StopFlag())


@pytest.mark.parametrize("look", [1, 2, 3])
@pytest.mark.parametrize(("code", "cause"), [(Exit.STOPPED, "stop file"), (Exit.CRASHED, "crashed")])
def test_a_stop_file_is_not_lost_behind_another_stop(
    run: Run, monkeypatch: pytest.MonkeyPatch, look: int, code: Exit, cause: str
) -> None:
    """A signal was noticed first; the file comes while the ranks save, or as they leave."""
    flag = StopFlag()
    flag._set(15)
    one = supervised(run, monkeypatch, flag, code=code, act=lambda n: run.stop_file.touch() if n == look else None)
    one.batch = True  # it would be requeued
    monkeypatch.setattr(Supervisor, "_leave", lambda *words: pytest.fail("a person said stop"))
    assert one.supervise() == code
    assert run.read_events("train")[-1]["cause"] == cause and not run.stop_file.exists()
