"""What is held out, as the evaluator sees it: windows of text, or samples of a user's own arrays; sums and their
result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.base.errors import UserError
from pipeline.data.manifest import Manifest, SampleManifest, ShardEntry
from pipeline.data.samples import SampleDataset
from pipeline.model.decoder import loss_sum
from pipeline.model.task import Batch, Task
from pipeline.run.directory import Run


class SampleHeldOut:
    """The held-out samples in an evaluation (pipeline/evaluate/evaluator.py)."""

    def __init__(self, task: Task, manifest: SampleManifest, limit: int | None, device: torch.device) -> None:
        self.task, self.device = task, device
        self.dataset = SampleDataset(manifest, held_out=True)
        self.count = min(len(self.dataset), limit or len(self.dataset))

    def sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Summed loss and metrics of these samples, and what they are sums over."""
        arrays = self.dataset.read(np.arange(start, stop, dtype=np.int64))
        whole = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        (batch,) = self.task.micro_batches(whole, stop - start)
        outputs = model(*self.task.inputs(batch))
        entries = self.task.entries(batch)
        sums = {
            "loss": self.task.loss(outputs, batch).item(),
            "entries": float(stop - start if entries is None else entries),
        }
        return sums | {name: float(value) for name, value in self._metrics(outputs, batch).items()}

    def _metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Any]:
        metrics = self.task.metrics(outputs, batch)
        if taken := {"step", "loss", "entries", "samples", "checkpoint"} & metrics.keys():
            raise UserError(f"metrics: {min(taken)} has a meaning of its own in an evaluation; choose another name")
        return metrics

    def result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Means over all held-out samples, or over their entries, from the sums of all batches."""
        totals = {name: math.fsum(part[name] for part in sums) for name in sums[0]}
        entries = totals.pop("entries")
        means = {name: total / entries for name, total in totals.items()}
        return {**means, "samples": self.count, "entries": int(entries)}


IGNORED = -100
"""Target of padding: cross-entropy leaves it out."""


class TextHeldOut:
    """The held-out windows of text; `sums` and `result` are what the evaluator asks."""

    def __init__(self, run: Run, manifest: Manifest, device: torch.device) -> None:
        self.config, self.manifest, self.device = run.config, manifest, device
        length = self.config.data.sequence_length
        self.windows = [(s, start) for s in manifest.held_out for start in range(0, s.tokens, length)]
        if self.config.evaluate.max_sequences is not None:
            self.windows = self.windows[: self.config.evaluate.max_sequences]
        self.count = len(self.windows)
        self._maps = {
            s.file: np.memmap(run.data / s.file, s.dtype, "r", s.offset, (s.tokens,)) for s in manifest.held_out
        }

    def sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Summed loss of these windows."""
        windows = self.windows[start:stop]
        length = self.config.data.sequence_length
        inputs_BT = np.full((len(windows), length), self.manifest.eos_id, np.int64)
        targets_BT = np.full((len(windows), length), IGNORED, np.int64)
        for row, (entry, first) in enumerate(windows):
            tokens, count = self._maps[entry.file], self._length(entry, first)
            targets_BT[row, :count] = tokens[first : first + count]
            inputs_BT[row, 1:count] = tokens[first : first + count - 1]
            if first > 0:
                inputs_BT[row, 0] = tokens[first - 1]
        logits_BTV = model(torch.from_numpy(inputs_BT).to(self.device))
        return {"loss": loss_sum(logits_BTV, torch.from_numpy(targets_BT).to(self.device)).item()}

    def result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Mean loss and what follows from it, from the sums of all batches."""
        tokens = sum(self._length(entry, start) for entry, start in self.windows)
        loss = math.fsum(part["loss"] for part in sums) / tokens
        unigram_bits, text_bytes = self._unigram()
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss / math.log(2) * tokens / text_bytes,
            "unigram_bits_per_byte": unigram_bits / text_bytes,
            "tokens": tokens,
            "bytes": text_bytes,
        }

    def _length(self, entry: ShardEntry, start: int) -> int:
        """Tokens of the window at `start`: the last one of a file is shorter."""
        return min(self.config.data.sequence_length, entry.tokens - start)

    def _evaluated(self) -> Iterator[tuple[ShardEntry, int]]:
        """Each held-out file and how many of its tokens the windows cover."""
        covered: dict[str, int] = {}
        for entry, start in self.windows:
            covered[entry.file] = start + self._length(entry, start)
        for entry in self.manifest.held_out:
            if entry.file in covered:
                yield entry, covered[entry.file]

    def _unigram(self) -> tuple[float, int]:
        """Total bits under the tokens' own frequencies, and the bytes of text they stand for."""
        counts, text_bytes = np.zeros(self.manifest.vocab_size, np.int64), 0
        for entry, covered in self._evaluated():
            counts += np.bincount(self._maps[entry.file][:covered], minlength=self.manifest.vocab_size)
            text_bytes += round(entry.bytes * covered / entry.tokens)  # all of them, but for max_sequences
        present = counts[counts > 0].astype(np.float64)
        return float(-(present * np.log2(present / present.sum())).sum()), text_bytes
