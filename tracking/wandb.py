"""Weights & Biases: one run over all attempts, by its own library; offline unless the config says otherwise.

Offline its core writes a folder of each session below `track/wandb`; `wandb sync` sends them all into the one run.
Which step is in them already is read from these files: LevelDB's log format with a header of seven bytes, each record a
protobuf (wandb/core/internal/transactionlog). Online the server says it.
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
from tracking.run_reader import Line, Record
from tracking.tracker import Memory, Sink, figures, identity, names, shown_config

_BLOCK = 32768
_QUIET_S = 1.0


def records(file: Path) -> Iterator[Any]:
    """The records of an offline file, up to the first that is not whole (a crash tore it)."""
    from wandb.proto import wandb_internal_pb2

    entry: Any = vars(wandb_internal_pb2)["Record"]  # made when its module is read
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if _BLOCK - at % _BLOCK < 7:  # no header fits into the rest of a block
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0 or at + 7 + length > len(data):
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield entry.FromString(parts)
            parts = b""


def steps_in(folder: Path, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each step, with its values, that the offline files of run `name` hold."""
    for file in sorted(folder.glob(f"wandb/offline-run-*/run-{name}.wandb")):
        for record in records(file):
            if record.WhichOneof("record_type") == "history":
                items = {one.key or "/".join(one.nested_key): one.value_json for one in record.history.item}
                yield record.history.step.num, {key: json.loads(value) for key, value in items.items()}


class Wandb(Sink):
    """A run's history: the names of metrics.jsonl, and `evaluation/NAME` beside `evaluation/step`."""

    def __init__(self, run: Run, memory: Memory, record: Record) -> None:
        super().__init__(run, memory, record)
        self._evaluated: list[dict[str, float]] = []
        wanted = run.config.track.wandb
        assert wanted is not None
        folder, name = run.path / "track", identity(run)
        if wanted.mode == "offline":
            self._wait_until_quiet(folder)
            found = list(steps_in(folder, name))
            memory.step = max((step for step, values in found if "step_time_s" in values), default=0)
            told = {int(values["evaluation/step"]) for _, values in found if "evaluation/step" in values}
            memory.evaluations, self._row = sorted(told), max((step for step, _ in found), default=0)
        os.environ.setdefault("WANDB_SILENT", "true")
        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True,
            x_transaction_log_flush_interval=1.0,
        )  # fmt: skip
        called, group = names(run)
        self._session = wandb.init(
            project=wanted.project, entity=wanted.entity, name=called, group=group, id=name, resume="allow",
            mode=wanted.mode, dir=folder, config=shown_config(run), settings=settings,
        )  # fmt: skip
        self._session.define_metric("evaluation/*", step_metric="evaluation/step")
        if wanted.mode == "online":
            memory.step = self._row = max(0, self._session.step - 1)

    def _wait_until_quiet(self, folder: Path) -> None:
        """A core whose follower was killed still writes for a moment."""
        while any(time.time() - file.stat().st_mtime < _QUIET_S for file in folder.glob("wandb/*/*.wandb")):
            time.sleep(0.2)

    def steps(self, found: Sequence[Line]) -> None:
        """Log them, each under its own number, and what was evaluated with the first that follows."""
        for line in found:
            more = self._evaluated.pop(0) if self._evaluated else {}
            self._row = line["step"]
            self._session.log(dict(figures(line)) | more, step=self._row, commit=True)

    def evaluation(self, found: Line) -> None:
        """Log it with a step to come, for numbers never go back; behind all, where none comes. Its own is beside it."""
        values = {f"evaluation/{name}": value for name, value in figures(found)}
        self._evaluated.append(values | {"evaluation/step": float(found["step"])})

    def flush(self) -> None:
        """Nothing more comes of a training that is done."""
        if self._evaluated and stages.load("train").missing(self.run) is None:
            for values in self._evaluated:
                self._row += 1
                self._session.log(values, step=self._row, commit=True)
            self._evaluated.clear()

    def close(self) -> None:
        """End the session; the run goes on in the next one."""
        self._session.finish()
        if self._session.offline:
            print(f"to send it to W&B: wandb sync {self.run.path}/track/wandb/offline-run-*", flush=True)
