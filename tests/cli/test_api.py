"""Tests of the Python API, `from sluice import Run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.api import Run
from tests.support.errors import raises_error

SCRIPT = """
import sys, time
import sluice
for step in range(1, 6):
    sluice.step(step, 5, loss=step * float(sys.argv[1]))
"""


def write_config(folder: Path, command: str) -> Path:
    """Write a script and a config with one stage that runs a command. Return the config."""
    (folder / "script.py").write_text(SCRIPT)
    config = {
        "run": {"name": "api", "root": str(folder / "runs")},
        "parameters": {"factor": 1.0},
        "stages": {"main": {"command": command}},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder / "config.yaml"


def test_a_run_is_submitted_awaited_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, "python3 script.py {factor}")
    run = Run.submit(config, executor="local", parameters={"factor": 0.5}, **{"run.name": "half"})
    assert run.path == tmp_path / "runs/half"
    assert run.wait(timeout_s=60) == "done"
    assert run.metrics()["step"] == [1, 2, 3, 4, 5]
    assert run.metrics()["loss"] == [0.5, 1.0, 1.5, 2.0, 2.5]
    (status,) = run.status()
    assert (status["stage"], status["state"]) == ("main", "done")
    assert Run(run.path).metrics() == run.metrics()


@pytest.mark.story
def test_a_failure_is_a_state_with_a_problem_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.submit(write_config(tmp_path, "test {factor} = 2.0"), executor="local")
    assert run.wait(timeout_s=60) == "failed"
    (status,) = run.status()
    assert "exited with 1" in status["problem"]
    run.resume(executor="local", **{"parameters.factor": 2.0})
    assert run.wait(timeout_s=60) == "done"


def test_mistakes_are_errors_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, "true")
    with raises_error("config.unknown_key", "stages.main.node"):
        Run.submit(config, executor="local", **{"stages.main.node": 2})
    assert not (tmp_path / "runs").exists()
    with raises_error("run.not_a_run", "nothing"):
        Run(tmp_path / "nothing")


def test_waiting_can_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.submit(write_config(tmp_path, "sleep 60"), executor="local")
    with pytest.raises(TimeoutError):
        run.wait(timeout_s=1)
    run.cancel()
    assert run.wait(timeout_s=60) == "cancelled"
