"""Followers beside the ranks: a process for each sink of the config, and telemetry on each node of the job.

They cost the ranks nothing but what little they compute: they have a lower priority, nobody waits for them while ranks
run, and what goes wrong with them ends in `track/NAME.log`. When the stage's job ends they get `DRAIN_S` to hand over
the rest; what is left then the next one does, or `submit.py track RUN`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.config.stages import STAGES
from pipeline.run.code import CODE_ROOT, start, with_code
from pipeline.run.directory import Run
from slurm.query.site_variables import interpreter
from tracking.registry import SINKS, wanted
from tracking.tracker import names as called_names

DRAIN_S = 10.0


@contextmanager
def followers(run: Run, stage: str, nodes: Sequence[str], on_slurm: bool) -> Iterator[None]:
    """While the block runs, a follower for each sink; `nodes`: of the job on Slurm.

    A sink whose package takes seconds to load has none in stages that are over in seconds: there are no steps.
    """
    names = [name for name in wanted(run.config) if STAGES[stage].joined or SINKS[name].imports is None]
    started = [_start(run, name, [sys.executable]) for name in names]
    if run.config.track.telemetry_s is not None:
        # the supervisor's own node needs no step; with --overlap srun shares what the ranks' step has (srun(1))
        step = ["srun", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        step += ["--cpus-per-task=1", "--mem=0", f"--chdir={run.code}", interpreter(run.config.site)]
        started.append(_start(run, "telemetry", step if on_slurm and len(nodes) > 1 else [sys.executable]))
    try:
        yield
    finally:
        _end(started)


def bring_up_to_date(run: Run, sink: str | None, overrides: Sequence[str]) -> int:
    """Hand over what a sink, or each of the config, does not know yet, one after the other, here; the exit code.

    Raises UserError where the config names none.
    """
    names = [sink] if sink else wanted(run.config)
    if names and run.config.sweep is not None:  # has no steps: its points do
        names = [name for name in names if name not in SINKS or SINKS[name].imports is None]
    elif not names:
        raise UserError(
            f"track: {run.name} names no sink: say --to {'|'.join(SINKS)}, with its keys as track.KEY=VALUE"
        )
    told = [f"track.{sink}=true"] if sink == "tensorboard" else []
    code, (called, sweep) = 0, called_names(run)
    for name in names:
        words = [sys.executable, "-m", "tracking", name, str(run.path), "--once", *told, *overrides]
        left = subprocess.run(words, env=with_code(os.environ, CODE_ROOT)).returncode
        print(f"{called + ' ' if sweep else ''}{name}: {'up to date' if left == 0 else 'not up to date'}", flush=True)
        code = max(code, abs(left))  # of a signal, too
    return code


def _start(run: Run, name: str, program: Sequence[str]) -> subprocess.Popen[bytes]:
    folder: Path = run.path / "track"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.log", "ab") as log:
        return start(run.code, [*program, "-m", "tracking", name, str(run.path)], log, {})


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask them to hand over what is left, wait for `DRAIN_S` in all, and end those that are still there."""
    deadline = time.monotonic() + DRAIN_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in started:
            with suppress(ProcessLookupError):
                process.send_signal(number)
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
