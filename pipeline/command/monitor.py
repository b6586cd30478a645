"""What the process of a rank does with the messages of its command: metrics, images, checkpoints, progress, hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.base.dist_env import RankInfo
from pipeline.base.files import read_last_object, write_json
from pipeline.command.client_files import ClientFiles
from pipeline.resilience.step_limit import StepLimit
from pipeline.run.directory import Run
from pipeline.run.events import LostWork, Ready, Saved
from pipeline.run.images import ImageWriter
from pipeline.run.metrics import MetricsFile, is_step_line, list_lost_lines, rewind_metrics

PROGRESS_INTERVAL_S = 2.0
"""The shortest pause between two updates of `progress.json`."""
_STACKS_TIMEOUT_S = 20.0
"""Time limit of py-spy for each process."""
_RESERVED = ("step", "step_time_s", "steps_per_s", "time")
"""Keys of a line in metrics.jsonl that a command cannot set."""


class CommandMonitor:
    """Handles the messages of the command of one rank.

    Args:
        run: the run.
        stage: the stage.
        rank_info: the rank.
        client: the files through which the messages arrive.
    """

    def __init__(self, run: Run, stage: str, rank_info: RankInfo, client: ClientFiles) -> None:
        self._run = run
        self._stage = stage
        self._rank = rank_info.rank
        self._client = client
        self._is_rank0 = rank_info.rank == 0
        self._images = ImageWriter(run.path, lambda text: print(text, flush=True))
        records_metrics = self._is_rank0 and run.config.get_stage(stage).records_metrics
        self._metrics = MetricsFile(run.metrics_file) if records_metrics else None
        if self._is_rank0:  # It describes an earlier attempt.
            get_progress_file(run, stage).unlink(missing_ok=True)
        self._limit = StepLimit(run.config.recovery.hang_s)
        self._step = 0
        """The last step that the command has reported in this attempt; 0 if none."""
        self._total = 0
        """The number of steps of the whole training, as the command has reported it; 0 if it is unknown."""
        self._step_time: float | None = None
        """When this step ended, by the clock of the command; None before the first step."""
        self._beat_time = time.monotonic()
        """When the last message arrived."""
        self._progress: dict[str, Any] | None = None
        """The last step, if `progress.json` does not contain it yet."""
        self._progress_time = 0.0
        """When `progress.json` was last written."""

    def handle_messages(self) -> None:
        """Handle the messages that have arrived. Malformed messages are ignored."""
        messages = self._client.read_messages()
        for message in messages:
            if message.get("kind") == "step" and isinstance(message.get("step"), int):
                self._handle_step(message)
            elif message.get("kind") == "saved":
                self._handle_saved(message)
            elif message.get("kind") == "image":
                self._handle_image(message)
        if messages:
            self._beat_time = time.monotonic()

    def _handle_step(self, message: Mapping[str, Any]) -> None:
        """Record a step."""
        step = message["step"]
        self._total = message["total"] if isinstance(message.get("total"), int) else 0
        step_end = float(message.get("time") or time.time())
        duration_s = None if self._step_time is None else max(0.0, step_end - self._step_time)
        if duration_s is not None:
            self._limit.record_step(duration_s)
        if self._step == 0 and self._metrics is not None:
            self._rewind(step - 1)
            self._run.append_event(Ready(stage=self._stage, step=step - 1))
        values = message.get("values")
        values = (
            {key: value for key, value in values.items() if key not in _RESERVED} if isinstance(values, dict) else {}
        )
        if self._metrics is not None and step > self._step:
            seconds = duration_s or 0.0
            line = {"step": step, **values, "step_time_s": round(seconds, 6), "time": round(step_end, 3)}
            self._metrics.write({**line, "steps_per_s": round(1 / seconds, 4) if seconds else 0.0})
        self._step = step
        self._step_time = step_end
        self._progress = {"step": step, "total": message.get("total"), "step_time_s": duration_s, "values": values}
        if time.monotonic() - self._progress_time > PROGRESS_INTERVAL_S:
            self._write_progress()

    def _write_progress(self) -> None:
        """Write `progress.json`, on rank 0, if the last step is not in it yet."""
        if self._is_rank0 and self._progress is not None:
            self._progress_time = time.monotonic()
            write_json(get_progress_file(self._run, self._stage), self._progress)
            self._progress = None

    def close(self) -> None:
        """Handle the last messages, after the command has exited."""
        self.handle_messages()
        self._write_progress()

    def _rewind(self, step: int) -> None:
        """Move the metrics of later steps than `step` to the event `lost_work`, because they are repeated."""
        last_line = read_last_object(self._run.metrics_file, is_step_line)
        if last_line is None or last_line["step"] <= step:
            return
        lost_lines = list_lost_lines(self._run.metrics_file, step)
        steps = [line["step"] for line in lost_lines]
        self._run.append_event(LostWork(stage=self._stage, steps=steps, lines=lost_lines))
        rewind_metrics(self._run.metrics_file, step)
        self._metrics = MetricsFile(self._run.metrics_file)

    def _handle_saved(self, message: Mapping[str, Any]) -> None:
        """Write the event of a checkpoint, on rank 0."""
        if not self._is_rank0:
            return
        step = message.get("step")
        path = message.get("path")
        self._run.append_event(
            Saved(
                stage=self._stage,
                step=step if isinstance(step, int) else self._step,
                path=path if isinstance(path, str) else None,
            )
        )

    def _handle_image(self, message: Mapping[str, Any]) -> None:
        """Write an image, on rank 0. If the message names no file, the image was so large that it was not sent."""
        with suppress(OSError, KeyError):  # The command may have changed the files.
            name, step, shape = message["name"], message["step"], message["shape"]
            if message.get("file") is None:
                self._images.warn(name, step, f"it has {message['size']:,} bytes")
                return
            content = self._client.take_image(message["file"])
            if self._is_rank0:
                self._images.write(name, step, content, shape, message["dtype"])

    @property
    def is_complete(self) -> bool:
        """Whether the command has reported its last step."""
        return 0 < self._total <= self._step

    def _get_limit_s(self) -> float:
        """Return how long the command may report nothing. By default, this allows for an evaluation or a save."""
        recovery = self._run.config.recovery
        return recovery.hang_s or max(recovery.save_s, self._limit.get_s())

    def describe_hang(self) -> str | None:
        """Return a message if the command hangs: it has reported steps, and then nothing for longer than the limit."""
        seconds = time.monotonic() - self._beat_time
        if self._step == 0 or self.is_complete or seconds <= self._get_limit_s():
            return None
        return f"rank {self._rank} has reported no step for {seconds:.0f} s, after step {self._step}"

    def write_hang_report(self, message: str, pids: Sequence[int]) -> str:
        """Write `hang-rank-N.json`. Return the message with the stacks of some processes, if py-spy is installed."""
        stacks = collect_stacks(pids)
        report = {
            "rank": self._rank, "host": os.uname().nodename, "step": self._step, "number": 0, "phase": "step",
            "seconds": round(time.monotonic() - self._beat_time, 1), "limit_s": self._get_limit_s(), "stacks": stacks,
            "collectives": [],
        }  # fmt: skip
        write_json(self._run.stage_dir(self._stage) / f"hang-rank-{self._rank}.json", report)
        return f"{message}\n{stacks}"


def collect_stacks(pids: Sequence[int]) -> str:
    """Return the Python stacks of some processes, from `py-spy dump`; how to get them if py-spy is not installed."""
    program = shutil.which("py-spy")
    if program is None:
        return "for the stacks of its threads, install py-spy on the nodes: pip install py-spy"
    stacks = []
    for pid in pids:
        try:
            result = subprocess.run(
                [program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_STACKS_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if result.returncode == 0:  # It fails for processes that do not run Python.
            stacks.append(result.stdout.strip())
    return "\n".join(stacks) or "py-spy found no Python process, or may not read it"


def get_progress_file(run: Run, stage: str) -> Path:
    """Return the file with the last step that the command of a stage has reported."""
    return run.jobs_dir / stage / "progress.json"
