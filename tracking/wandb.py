"""Weights & Biases: one run for all attempts, through its own package; offline unless the config says otherwise.

Offline, its core process writes a folder for each session below `track/wandb`; `wandb sync` uploads them all into one
run. The tracker reads from their files which steps they already contain. A file has LevelDB's log format with a header
of seven bytes, and each record is a protobuf (wandb/core/internal/transactionlog). Online, the server provides the last
step.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import wandb

from pipeline.run import stages
from pipeline.run.directory import Run
from tracking.tracker import (
    Line,
    RunReader,
    Tracker,
    TrackerState,
    display_names,
    flat_config,
    flatten_numbers,
    tracker_run_id,
)  # fmt: skip

_BLOCK = 32768
_HEADER = 7
_QUIET_S = 1.0
"""A file that was not written for this long belongs to no running core."""


def _read_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline file, up to the first incomplete one, which a crash may leave."""
    from wandb.proto import wandb_internal_pb2

    record_type: Any = vars(wandb_internal_pb2)["Record"]  # created when the module is imported
    data = file.read_bytes()
    at = _HEADER
    parts = b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block is too short for a header
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0 or at + _HEADER + length > len(data):
            return
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record_type.FromString(parts)
            parts = b""


def read_offline_steps(folder: Path, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each step, with its values, that the offline files of run `name` contain."""
    for file in sorted(folder.glob(f"wandb/offline-run-*/run-{name}.wandb")):
        for record in _read_records(file):
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                yield record.history.step.num, {key: json.loads(value) for key, value in items.items()}


class Wandb(Tracker):
    """History with the names of metrics.jsonl, and `evaluation/NAME` over `evaluation/step`."""

    def __init__(self, run: Run, state: TrackerState, reader: RunReader) -> None:
        super().__init__(run, state, reader)
        self._pending_evaluations: list[dict[str, float]] = []
        config = run.config.track.wandb
        assert config is not None
        folder = run.path / "track"
        run_id = tracker_run_id(run)
        if config.mode == "offline":
            self._wait_until_quiet(folder)
            saved = list(read_offline_steps(folder, run_id))
            state.step = max((step for step, values in saved if "step_time_s" in values), default=0)
            state.evaluations = sorted(
                {int(values["evaluation/step"]) for _, values in saved if "evaluation/step" in values}
            )
            self._last_step = max((step for step, _ in saved), default=0)
        os.environ.setdefault("WANDB_SILENT", "true")
        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True,
            x_transaction_log_flush_interval=1.0,
        )  # fmt: skip
        name, group = display_names(run)
        self._session = wandb.init(
            project=config.project, entity=config.entity, name=name, group=group, id=run_id, resume="allow",
            mode=config.mode, dir=folder, config=flat_config(run), settings=settings,
        )  # fmt: skip
        self._session.define_metric("evaluation/*", step_metric="evaluation/step")
        if config.mode == "online":
            self._last_step = max(0, self._session.step - 1)
            state.step = self._last_step

    @staticmethod
    def _wait_until_quiet(folder: Path) -> None:
        """Wait for the core process of a killed follower, which still writes for a moment."""
        while any(time.time() - file.stat().st_mtime < _QUIET_S for file in folder.glob("wandb/*/*.wandb")):
            time.sleep(0.2)

    def on_steps(self, steps: Sequence[Line]) -> None:
        """Log the steps under their own numbers, each with one pending evaluation."""
        for line in steps:
            evaluation = self._pending_evaluations.pop(0) if self._pending_evaluations else {}
            self._last_step = line["step"]
            self._session.log(dict(flatten_numbers(line)) | evaluation, step=self._last_step, commit=True)

    def on_evaluation(self, result: Line) -> None:
        """Keep the evaluation for the next step, because W&B's steps never go back; `evaluation/step` has its own."""
        values = {f"evaluation/{name}": value for name, value in flatten_numbers(result)}
        self._pending_evaluations.append(values | {"evaluation/step": float(result["step"])})

    def flush(self) -> None:
        """Log the pending evaluations after the last step, if the training is done and no step will follow."""
        if self._pending_evaluations and stages.load_stage_module("train").describe_missing_outputs(self.run) is None:
            for values in self._pending_evaluations:
                self._last_step += 1
                self._session.log(values, step=self._last_step, commit=True)
            self._pending_evaluations.clear()

    def close(self) -> None:
        """End the session; the next one continues the run."""
        self._session.finish()
        if self._session.offline:
            print(f"to upload it to W&B: wandb sync {self.run.path}/track/wandb/offline-run-*", flush=True)
