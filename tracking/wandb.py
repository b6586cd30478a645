"""Send a run to Weights & Biases: one run for all attempts, through W&B's own package, by default offline.

In offline mode, W&B's core process writes a folder for each session below `track/wandb`. `wandb sync` uploads all of
these folders into one run. The tracker reads from the files in the folders which steps they already contain. A file
has LevelDB's log format after a file header of seven bytes, and each record is a protobuf
(wandb/core/internal/transactionlog). In online mode, the server provides the last step.
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

_BLOCK_BYTES = 32768
"""The size of a block in LevelDB's log format."""
_HEADER_BYTES = 7
"""The size of the file header, and also the size of the header of a record: checksum, length and type."""
_WHOLE_RECORD = 1
_LAST_FRAGMENT = 4
"""Types of a record header in LevelDB's log format, after which a record is complete."""
_QUIET_S = 1.0
"""If a file was not written for this long, no core process is writing it."""


def _read_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline file, up to the first incomplete record, which a crash may leave."""
    from wandb.proto import wandb_internal_pb2

    # type checkers do not find this class, because it is created when the module is imported
    record_type: Any = vars(wandb_internal_pb2)["Record"]
    data = file.read_bytes()
    offset = _HEADER_BYTES
    content = b""
    while offset + _HEADER_BYTES <= len(data):
        bytes_left_in_block = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if bytes_left_in_block < _HEADER_BYTES:  # too few bytes for a header; the next header is in the next block
            offset += bytes_left_in_block
            continue
        # a header consists of a checksum of 4 bytes, the length of the data (2 bytes) and the type (1 byte)
        length, fragment_type = struct.unpack_from("<HB", data, offset + 4)
        start = offset + _HEADER_BYTES
        if fragment_type == 0 or start + length > len(data):  # only zeros follow, or the record is incomplete
            return
        content += data[start : start + length]
        offset = start + length
        if fragment_type in (_WHOLE_RECORD, _LAST_FRAGMENT):
            yield record_type.FromString(content)
            content = b""


def read_offline_steps(folder: Path, run_id: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each step, with its values, in the offline files of a run.

    Args:
        folder: the folder that contains the folder `wandb`.
        run_id: the id of the run in W&B.
    """
    for file in sorted(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        for record in _read_records(file):
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                yield record.history.step.num, {key: json.loads(value) for key, value in items.items()}


class Wandb(Tracker):
    """Logs metrics with the names of metrics.jsonl, and `evaluation/NAME` with `evaluation/step` as x-axis."""

    def __init__(self, run: Run, state: TrackerState, reader: RunReader) -> None:
        super().__init__(run, state, reader)
        self._pending_evaluations: list[dict[str, float]] = []
        """Evaluations that were received and not logged yet."""
        config = run.config.track.wandb
        assert config is not None
        folder = run.path / "track"
        run_id = tracker_run_id(run)
        if config.mode == "offline":
            self._wait_until_quiet(folder)
            saved_steps = list(read_offline_steps(folder, run_id))
            # steps without `step_time_s` contain only evaluations (see `flush`)
            state.step = max((step for step, values in saved_steps if "step_time_s" in values), default=0)
            state.evaluations = sorted(
                {int(values["evaluation/step"]) for _, values in saved_steps if "evaluation/step" in values}
            )
            self._last_step = max((step for step, _ in saved_steps), default=0)
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
            self._last_step = max(0, self._session.step - 1)  # `session.step` is the step of the next call of `log`
            state.step = self._last_step

    @staticmethod
    def _wait_until_quiet(folder: Path) -> None:
        """Wait until no file was written for `_QUIET_S`.

        If a follower was killed, its core process still writes for a moment.
        """
        while any(time.time() - file.stat().st_mtime < _QUIET_S for file in folder.glob("wandb/*/*.wandb")):
            time.sleep(0.2)

    def on_steps(self, steps: Sequence[Line]) -> None:
        """Log the steps. If there are pending evaluations, log one of them together with each step."""
        for line in steps:
            evaluation = self._pending_evaluations.pop(0) if self._pending_evaluations else {}
            self._last_step = line["step"]
            self._session.log(dict(flatten_numbers(line)) | evaluation, step=self._last_step, commit=True)

    def on_evaluation(self, result: Line) -> None:
        """Keep the evaluation, to log it together with the next step.

        W&B accepts no values for earlier steps. The step of the evaluated checkpoint is therefore logged as the value
        `evaluation/step`.
        """
        values = {f"evaluation/{name}": value for name, value in flatten_numbers(result)}
        self._pending_evaluations.append(values | {"evaluation/step": float(result["step"])})

    def flush(self) -> None:
        """If the train stage is done, log the pending evaluations after the last step, because no step will follow."""
        if (
            self._pending_evaluations
            and stages.load_stage_module(self.run, self.run.config.metrics_stage).describe_missing_outputs(self.run)
            is None
        ):
            for values in self._pending_evaluations:
                self._last_step += 1
                self._session.log(values, step=self._last_step, commit=True)
            self._pending_evaluations.clear()

    def close(self) -> None:
        """End the session. The next session continues the same run in W&B."""
        self._session.finish()
        if self._session.offline:
            print(f"to upload it to W&B: wandb sync {self.run.path}/track/wandb/offline-run-*", flush=True)
