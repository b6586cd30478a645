"""Write the files of a training run without training, for tests of code that reads these files."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from pipeline.base.files import write_json
from pipeline.config.read import load_config
from pipeline.run import lines
from pipeline.run.directory import Run
from pipeline.run.metrics import MetricsFile, is_step_line, list_lost_lines, rewind_metrics
from tests.support.events import write_event
from tests.support.tiny import write_config


class FakeRun:
    """Write steps, saves and restores in the order in which the trainer writes them (pipeline/train/trainer.py).

    Attributes:
        run: the run whose files are written.
        step: the newest step.
        attempt: number of the current attempt, from 1.
        has_lines_to_remove: True if metrics.jsonl has lines after the newest checkpoint that no longer count.
    """

    step_s = 0.01
    """Value of `step_time_s`, in seconds."""
    save_s = 0.002
    """Value of `checkpoint_s`, in seconds."""
    evaluate_s = 0.0
    """Value of `evaluate_s`, in seconds. 0: the lines have no such key."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.run = Run.create(load_config(write_config(folder), overrides))
        self.reset()

    @classmethod
    def from_run(cls, run: Run) -> FakeRun:
        """Return a FakeRun that writes into an existing run, such as a sweep point."""
        fake = cls.__new__(cls)
        fake.run = run
        return fake.reset()

    def reset(self) -> FakeRun:
        """Remove all metrics, events, evaluations and tracker files, and start the first attempt."""
        for name in ("track", "tensorboard", "evaluation"):
            shutil.rmtree(self.run.path / name, ignore_errors=True)
        self.run.evaluation_dir.mkdir()
        self.run.metrics_file.unlink(missing_ok=True)
        self.run.events_file.unlink(missing_ok=True)
        self.step = 0
        self.attempt = 0
        self.has_lines_to_remove = False
        self._saved_step = 0
        self.start_attempt()
        return self

    def start_attempt(self) -> None:
        """Write the event `started` of the next attempt."""
        self.attempt += 1
        write_event(self.run, "started", "train", job_id=str(self.attempt), attempt=self.attempt, ranks=2)
        self._metrics = MetricsFile(self.run.metrics_file)

    def write_steps(self, count: int) -> None:
        """Write the lines of the next `count` steps."""
        for _ in range(count):
            self.step += 1
            loss = 10.0 / self.step + self.attempt
            line = {
                "step": self.step, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "samples_consumed": 8 * self.step,
                "tokens": 256 * self.step, "time": round(time.time(), 6), "step_time_s": self.step_s,
                "tokens_per_s": 256.0, "data_wait_s": 0.0, "exposed_comm_s": 0.001, "checkpoint_s": self.save_s,
                "memory_gb": 1.5,
            }  # fmt: skip
            line |= {"evaluate_s": self.evaluate_s} if self.evaluate_s else {}
            self._metrics.write(line)

    def save(self) -> None:
        """Write the event `saved` of a checkpoint of the newest step."""
        self._saved_step = self.step
        write_event(self.run, "saved", "train", step=self.step, seconds=0.1)

    def fail_and_restart(self) -> None:
        """End this attempt with a crash and start the next one.

        The lines after the newest checkpoint no longer count. They remain in metrics.jsonl until `restore`. The event
        `lost_work` of the new attempt contains them.
        """
        self.has_lines_to_remove = True
        write_event(
            self.run, "failed", "train", job_id=str(self.attempt), cause="crashed", exit_code=1, message="an error"
        )
        self.start_attempt()
        if lost := list_lost_lines(self.run.metrics_file, self._saved_step):
            write_event(self.run, "lost_work", "train", steps=[line["step"] for line in lost], lines=lost)

    def restore(self) -> None:
        """Remove the lines after the newest checkpoint and continue from it."""
        rewind_metrics(self.run.metrics_file, self._saved_step)
        self.step = self._saved_step
        self.has_lines_to_remove = False
        self._metrics = MetricsFile(self.run.metrics_file)
        write_event(self.run, "restored", "train", step=self.step, seconds=0.1)

    def crash(self) -> None:
        """Crash, start the next attempt, and restore the newest checkpoint."""
        self.fail_and_restart()
        self.restore()

    def announce_held_out_loss(self) -> None:
        """Write the event of a held-out evaluation that ran after a restore.

        A reader of metrics.jsonl may have read the line of this step already.
        """
        self._late_values = {"held_out_loss": 5.0 + self.step}
        write_event(self.run, "held_out", "train", step=self.step, **self._late_values)

    def add_held_out_loss(self) -> None:
        """Add the loss of `announce_held_out_loss` to the line of its step in metrics.jsonl."""
        rewind_metrics(self.run.metrics_file, self.step, self._late_values)
        self._metrics = MetricsFile(self.run.metrics_file)

    def evaluate_late(self) -> None:
        """Write the event with the held-out loss, then add the loss to metrics.jsonl."""
        self.announce_held_out_loss()
        self.add_held_out_loss()

    def write_evaluation(self) -> None:
        """Write the evaluation file of the newest step."""
        file = self.run.evaluation_dir / f"step-{self.step:08d}.json"
        write_json(file, {"step": self.step, "loss": 2.5, "checkpoint": "none"})

    def read_values(self, name: str = "loss") -> dict[int, float]:
        """Return the value `name` by step, from the lines of metrics.jsonl that still count."""
        last_step = self._saved_step if self.has_lines_to_remove else self.step
        valid_lines = lines.read_valid_lines(self.run.metrics_file, is_step_line)
        return {line["step"]: line[name] for line in valid_lines if line["step"] <= last_step and name in line}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
