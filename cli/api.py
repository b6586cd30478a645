"""Submit and watch runs from Python: `from sluice import Run` in a script or a notebook.

    run = Run.submit("config.yaml", **{"train.steps": 400})
    run.wait()
    print(run.metrics()["loss"][-1])

Errors are raised as :class:`pipeline.base.errors.UserError`, whose text says what to do.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.submit import check_submission
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.run import directory
from pipeline.run.code import CODE_ROOT
from pipeline.run.lines import read_valid_lines
from pipeline.run.metrics import is_step_line
from slurm.query.run_jobs import uses_slurm
from slurm.query.status import StatusPoller
from slurm.submit.chain import cancel_run, submit_chain
from slurm.submit.executor import Executor, choose_executor

POLL_S = 1.0
"""The pause between two checks in :meth:`Run.wait`. Slurm is queried less often."""


class Run:
    """A run: its directory, and the process that runs its stages on this machine, if there is one.

    Args:
        path: the run directory.

    Raises:
        UserError: if the directory is not a run.
    """

    def __init__(self, path: str | Path) -> None:
        self._run = directory.Run.open(path)
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"Run({self._run.name!r})"

    @classmethod
    def submit(cls, config: str | Path, executor: Executor = "auto", **overrides: Any) -> Run:
        """Create the run of a config, or find it, and start the stages that are not done. Do not wait for them.

        Args:
            config: the config file.
            executor: where to run: `slurm`, `allocation`, `local`, or `auto`, as for `sluice CONFIG --executor`.
            **overrides: values of config keys: `**{"train.steps": 400}`, or sections: `train={"steps": 400}`.

        Raises:
            UserError: if the config is invalid, or a job cannot be submitted.
        """
        changes = _list_overrides(overrides)
        loaded = load_config(Path(config), changes)
        existing = directory.Run(loaded.run.root / loaded.run.name)
        is_on_slurm = existing.config_file.exists() and uses_slurm(existing)
        chosen = choose_executor(executor, existing if is_on_slurm else None)
        if check_submission(loaded, chosen == "slurm").corrections:
            raise UserError(
                "run.exists", f"{existing.name} exists with another config: choose another run.name, or remove it"
            )
        created = directory.Run.create(loaded)
        run = cls(created.path)
        if chosen == "slurm":
            with created.lock_exclusively():
                submit_chain(created, Console(file=io.StringIO()), resubmit_failed=False)
        else:
            run._start([str(config), *changes, "--executor", chosen])
        return run

    def _start(self, arguments: list[str]) -> None:
        """Start a command of Sluice, which runs stages on this machine or in this allocation."""
        with open(self._run.jobs_dir / "api.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(CODE_ROOT / "submit.py"), *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._run.path

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until no stage runs or waits in the queue. Return `done`, or the state of the first other stage.

        Args:
            timeout_s: how long to wait; None to wait as long as necessary.

        Raises:
            TimeoutError: if the time is over. The run continues.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poller = StatusPoller(self._run)
        while True:
            is_running = self._process is not None and self._process.poll() is None
            statuses = poller.poll()
            active = [status for status in (*statuses, *poller.point_statuses) if status.is_active]
            if not is_running and not active:
                break
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self._run.name} is not complete after {timeout_s:.0f} s")
            time.sleep(POLL_S)
        states = [status.state for status in (*statuses, *poller.point_statuses)]
        return next((state for state in states if state != "done"), "done")

    def status(self) -> list[dict[str, Any]]:
        """Return the status of each stage: `stage`, `state`, `problem`, and the columns of `sluice status`."""
        statuses = StatusPoller(self._run).poll()
        return [
            {"stage": status.stage, "state": status.state, "problem": status.problem, **status.cells}
            for status in statuses
        ]

    def metrics(self) -> dict[str, list[Any]]:
        """Return the lines of metrics.jsonl as columns of equal length. A value that a line lacks is None."""
        lines = list(read_valid_lines(self._run.metrics_file, is_step_line))
        names = dict.fromkeys(name for line in lines for name in line)
        return {name: [line.get(name) for line in lines] for name in names}

    def cancel(self) -> None:
        """Let the run save and stop. It continues only after :meth:`resume`."""
        cancel_run(self._run)

    def resume(self, executor: Executor = "auto", **overrides: Any) -> None:
        """Continue the run, optionally with other values of config keys, as `sluice resume` does.

        Raises:
            UserError: if a key cannot be changed, or a job cannot be submitted.
        """
        arguments = ["resume", str(self.path), *_list_overrides(overrides), "--executor", executor]
        self._start(arguments)
        assert self._process is not None
        if choose_executor(executor, self._run) == "slurm" and self._process.wait():
            raise UserError("run.not_resumed", (self._run.jobs_dir / "api.log").read_text().strip())


def _list_overrides(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return overrides such as `train.steps=400` for values by key; a mapping is a section."""
    overrides = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            overrides += _list_overrides(value, f"{prefix}{key}.")
        else:
            overrides.append(f"{prefix}{key}={json.dumps(value)}")
    return overrides
