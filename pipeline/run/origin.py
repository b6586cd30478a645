"""The origin of a fork: the checkpoint of another run with which the run begins.

`origin.json` in the run directory records the origin. It is written when the run is made, and never changes. Commands
on the login node also use this module, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.base.errors import CheckpointError, limit_lines
from pipeline.base.files import add_checksum, has_valid_checksum, read_json, write_json
from pipeline.run.directory import Run

ORIGIN_FILE = "origin.json"
"""File in the run directory that describes the checkpoint with which a fork began."""
SOURCE_FILE = "source.json"
"""File in the run directory that describes the open weights from which the run started (`model.init_from`)."""


class OrderStart(NamedTuple):
    """Where the order of the training samples begins. A fork with other data begins it at its first step."""

    step: int = 0
    """The last step before the order begins."""
    position: int = 0
    """The number of earlier samples: those of the steps up to `step`, and those that the run excluded."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint with which a run begins, and what its run did until then."""

    run: str
    """The path of the other run's directory."""
    step: int
    """The step of the checkpoint."""
    manifest_sha256: str
    """The hash of the checkpoint's manifest, which is also in the manifest."""
    changes: Mapping[str, str]
    """Changes of the config: dotted key → description such as `200 → 300`. Secrets are masked."""
    order_start: OrderStart
    """Where the order of the training samples of this run begins."""
    source_hashes: Mapping[str, str]
    """Name of a source whose order this run continues → hash of its training shards. The name of the only source is ""
    without a mixture. Empty if this run begins a new order."""
    tokenizer_sha256: str | None
    """The hash of the tokenizer; None for a custom model."""
    recent_metrics: list[dict[str, Any]]
    """Step, loss, learning rate and, if the step was skipped, the reason of the last steps until the checkpoint. The
    bad-step guard compares later losses with them."""

    @property
    def name(self) -> str:
        """The name of the other run."""
        return Path(self.run).name

    def __str__(self) -> str:
        """Return a description of the checkpoint, such as `step 100 of /home/me/runs/a`."""
        return f"step {self.step} of {self.run}"

    def write(self, run_dir: Path) -> None:
        """Write the origin of the run in `run_dir`."""
        write_json(run_dir / ORIGIN_FILE, add_checksum(asdict(self)))


def read_origin(run: Run) -> Origin | None:
    """Return the origin of a run; None if the run is not a fork.

    Raises CheckpointError if the file is damaged.
    """
    file = run.path / ORIGIN_FILE
    try:
        values: Any = read_json(file)
    except FileNotFoundError:
        return None
    names = {field.name for field in fields(Origin)}
    if not has_valid_checksum(values) or not names <= values.keys():
        raise CheckpointError(
            "checkpoint.damaged_origin", f"{file} is damaged: restore the file, or fork the run again"
        )
    known_values = {name: values[name] for name in names}
    return Origin(**{**known_values, "order_start": OrderStart(*values["order_start"])})


def read_order_start(run: Run) -> OrderStart:
    """Return where the order of the training samples of a run begins. Raises CheckpointError as `read_origin` does."""
    origin = read_origin(run)
    return OrderStart() if origin is None else origin.order_start


def describe_origin(run: Run) -> str:
    """Return the origin of a fork and the changes of its config, on one line; "" if the run is not a fork."""
    origin = read_origin(run)
    if origin is None:
        return ""
    changes = limit_lines([f"{key}: {change}" for key, change in origin.changes.items()])
    return f"forked from {origin}" + (f", with {'; '.join(changes)}" if changes else "")
