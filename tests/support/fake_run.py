"""A run whose files are written as a training would, without one: for tests of what reads them."""

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
from pipeline.run.metrics import MetricsFile, list_lost_lines, rewind_metrics
from tests.support.tiny import write_config


class FakeRun:
    """Writes steps, saves, restores: what a trainer writes, in its order (pipeline/train/trainer.py)."""

    step_s, save_s, evaluate_s = 0.01, 0.002, 0.0

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.run = Run.create(load_config(write_config(folder), overrides))
        self.anew()

    @classmethod
    def of(cls, run: Run) -> FakeRun:
        """Written into a run that is made, such as a point of a sweep."""
        one = cls.__new__(cls)
        one.run = run
        return one.anew()

    def anew(self) -> FakeRun:
        """As if nothing had been done."""
        for name in ("track", "tensorboard", "evaluation"):
            shutil.rmtree(self.run.path / name, ignore_errors=True)
        self.run.evaluation_dir.mkdir()
        self.run.metrics_file.unlink(missing_ok=True)
        self.run.events_file.unlink(missing_ok=True)
        self.step, self.attempt, self._saved, self.to_cut = 0, 0, 0, False
        self.begin()
        return self

    def begin(self) -> None:
        """An attempt begins."""
        self.attempt += 1
        self.run.event("started", "train", job_id=str(self.attempt), attempt=self.attempt, ranks=2)
        self._metrics = MetricsFile(self.run.metrics_file)

    def steps(self, number: int) -> None:
        """Go so many steps."""
        for _ in range(number):
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
        """A checkpoint of the newest step is there."""
        self._saved = self.step
        self.run.event("saved", "train", step=self.step, seconds=0.1)

    def lose(self) -> None:
        """The next attempt begins, and notes what it will cut; until it does, nothing behind the save counts."""
        self.to_cut = True
        self.run.event("failed", "train", job_id=str(self.attempt), cause="crashed", exit_code=1, message="oh")
        self.begin()
        if lost := list_lost_lines(self.run.metrics_file, self._saved):
            self.run.event("lost_work", "train", steps=[line["step"] for line in lost], lines=lost)

    def cut(self) -> None:
        """It cuts, and goes on from there."""
        rewind_metrics(self.run.metrics_file, self._saved)
        self.step, self.to_cut = self._saved, False
        self._metrics = MetricsFile(self.run.metrics_file)
        self.run.event("restored", "train", step=self.step, seconds=0.1)

    def crash(self) -> None:
        """Both."""
        self.lose()
        self.cut()

    def announce(self) -> None:
        """After a restore a look at held-out data is made up for; its step's line may have been read."""
        self._late = {"held_out_loss": 5.0 + self.step}
        self.run.event("held_out", "train", step=self.step, **self._late)

    def write(self) -> None:
        """And its line gets the figure, too."""
        rewind_metrics(self.run.metrics_file, self.step, self._late)
        self._metrics = MetricsFile(self.run.metrics_file)

    def late(self) -> None:
        """Both."""
        self.announce()
        self.write()

    def evaluate(self) -> None:
        """The newest step was evaluated."""
        file = self.run.evaluation_dir / f"step-{self.step:08d}.json"
        write_json(file, {"step": self.step, "loss": 2.5, "checkpoint": "none"})

    def losses(self, name: str = "loss") -> dict[int, float]:
        """What counts of metrics.jsonl now."""
        last = self._saved if self.to_cut else self.step
        found = lines.read_valid_lines(self.run.metrics_file, lines.is_step_line)
        return {line["step"]: line[name] for line in found if line["step"] <= last and name in line}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
