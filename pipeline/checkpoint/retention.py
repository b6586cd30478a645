"""Decide which checkpoints are kept (`checkpoint.keep`), and remove the others after each save.

The process that commits checkpoints also removes them: rank 0, or its saver (pipeline/checkpoint/saver.py). It decides
again after each save, from the names of the checkpoints and, if a rule needs them, from their sizes and held-out
losses. The train stage evaluates a step before it saves the step. If a stop prevents the evaluation, the step is the
newest one, which is always kept, until the next attempt has evaluated it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.errors import CheckpointError
from pipeline.base.files import parse_json_or_none, read_complete_lines
from pipeline.checkpoint import catalog
from pipeline.config.sections import KeepConfig
from pipeline.run.metrics import is_step_line

_LOSS_KEY = "held_out_loss"
"""The key of the held-out loss in a line of metrics.jsonl."""


def rank_kept_steps(
    steps: Collection[int], keep: KeepConfig, losses: Mapping[int, float], newest_intact: int
) -> list[int]:
    """Return the steps that the rules keep if their size has no limit, the most valuable step first.

    The order is: the newest intact checkpoint; the checkpoints of `last`, the newest first; those of `best`, the lowest
    loss first; those of `every_steps`, the newest first.

    Args:
        steps: the steps of all checkpoints.
        keep: the rules.
        losses: the held-out losses by step. Steps that were not evaluated are missing.
        newest_intact: the newest step whose checkpoint is intact; 0 if there is none.
    """
    newest_first = sorted(steps, reverse=True)
    evaluated = sorted((step for step in newest_first if step in losses), key=lambda step: losses[step])
    multiples = [step for step in newest_first if keep.every_steps is not None and step % keep.every_steps == 0]
    first = [newest_intact] if newest_intact in steps else []
    return list(dict.fromkeys([*first, *newest_first[: keep.last], *evaluated[: keep.best or 0], *multiples]))


def limit_total_size(ranked_steps: Sequence[int], sizes: Mapping[int, int], max_bytes: float) -> list[int]:
    """Return the first of `ranked_steps` whose checkpoints together have at most `max_bytes`; at least one step.

    Args:
        ranked_steps: steps, the most valuable step first.
        sizes: the sizes of their checkpoints in bytes.
        max_bytes: the limit in bytes.
    """
    kept: list[int] = []
    total = 0
    for step in ranked_steps:
        total += sizes[step]
        if kept and total > max_bytes:
            break
        kept.append(step)
    return kept


class HeldOutLosses:
    """The held-out losses in a metrics.jsonl that grows.

    Each line is read once. If the file was replaced, which a restore and a late evaluation do, it is read again.

    Args:
        path: metrics.jsonl; None if there are no losses.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._losses: dict[int, float] = {}
        self._inode = 0
        self._end = 0
        """The offset of the first byte that was not read yet."""

    def read(self) -> Mapping[int, float]:
        """Return the losses of all evaluated steps, by step."""
        if self._path is None or not self._path.exists():
            return {}
        status = self._path.stat()
        if status.st_ino != self._inode or status.st_size < self._end:
            self._losses, self._inode, self._end = {}, status.st_ino, 0
        for text, end in read_complete_lines(self._path, self._end):
            self._end = end
            # Only few lines have the key. Parsing the lines of a million steps would take several seconds.
            line: Any = parse_json_or_none(text) if _LOSS_KEY.encode() in text else None
            if is_step_line(line) and line.get(_LOSS_KEY) is not None:
                self._losses[line["step"]] = line[_LOSS_KEY]
        return self._losses


class Retention:
    """Removes the checkpoints of a run that its rules do not keep.

    Args:
        folder: the directory of all checkpoints.
        keep: the value of `checkpoint.keep`.
        metrics_file: metrics.jsonl, which has the held-out losses; None if there are none.
    """

    def __init__(self, folder: Path, keep: int | KeepConfig, metrics_file: Path | None = None) -> None:
        self._folder = folder
        self._keep = KeepConfig.from_value(keep)
        self._losses = HeldOutLosses(metrics_file)
        self._sizes: dict[tuple[int, int], int] = {}
        """Step and inode of a checkpoint's directory → its size in bytes."""

    def remove_old_checkpoints(self) -> None:
        """Remove all checkpoints that the rules do not keep. The newest intact checkpoint is never removed."""
        keep = self._keep
        steps = catalog.list_checkpoint_steps(self._folder)
        has_size_limit = keep.at_most_gb is not None
        if len(steps) <= keep.last and not has_size_limit:
            return
        losses = self._losses.read() if keep.best else {}
        # Intact means: all files have the recorded sizes.
        ranked = rank_kept_steps(steps, keep, losses, catalog.find_newest_step(self._folder))
        if keep.at_most_gb is not None:
            ranked = limit_total_size(ranked, {step: self._measure(step) for step in ranked}, keep.at_most_gb * 1e9)
        for step in sorted(set(steps) - set(ranked)):
            catalog.remove_checkpoint(self._folder, step)

    def _measure(self, step: int) -> int:
        """Return the size of a checkpoint in bytes: the recorded sizes, or the actual ones if no manifest is intact."""
        checkpoint = self._folder / catalog.checkpoint_name(step)
        key = (step, checkpoint.stat().st_ino)
        if key not in self._sizes:
            try:
                files = catalog.read_checkpoint_manifest(checkpoint)["files"]
                self._sizes[key] = sum(entry["size"] for entry in files.values())
            except CheckpointError:
                paths = (path for path in checkpoint.iterdir() if path.name != catalog.MANIFEST_FILE)
                self._sizes[key] = sum(path.stat().st_size for path in paths)
        return self._sizes[key]
