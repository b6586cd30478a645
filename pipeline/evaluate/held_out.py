"""What is held out, as the evaluator sees it: windows of text, or samples of a user's own arrays; sums and their
result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.base.errors import UserError
from pipeline.data.manifest import Manifest, SampleManifest
from pipeline.data.samples import SampleDataset, map_file
from pipeline.model.decoder import loss_sum
from pipeline.model.head import IGNORED
from pipeline.model.task import Task
from pipeline.run.directory import Run

_TAKEN = {"step", "loss", "entries", "samples", "checkpoint"}


class SampleHeldOut:
    """The held-out samples; `sums` and `result` are what the evaluator asks."""

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
        entries, metrics = self.task.entries(batch), self.task.metrics(outputs, batch)
        if taken := _TAKEN & metrics.keys():
            raise UserError(f"metrics: {min(taken)} has a meaning of its own in an evaluation; choose another name")
        loss, counted = self.task.loss(outputs, batch), stop - start if entries is None else entries
        return {name: float(value) for name, value in {"loss": loss, "entries": counted, **metrics}.items()}

    def result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Means over all held-out samples, or over their entries, from the sums of all batches."""
        totals = {name: math.fsum(part[name] for part in sums) for name in sums[0]}
        entries = totals.pop("entries")
        means = {name: total / entries for name, total in totals.items()}
        return {**means, "samples": self.count, "entries": int(entries)}


class TextHeldOut:
    """The held-out windows of text, the first `limit` of them."""

    def __init__(self, run: Run, manifest: Manifest, limit: int | None, device: torch.device) -> None:
        self.vocab_size, self.eos_id, self.device = manifest.vocab_size, manifest.eos_id, device
        self.length = length = run.config.data.sequence_length
        windows = [(s, start) for s in manifest.held_out for start in range(0, s.tokens, length)]
        self.windows = windows[:limit]
        self.count = len(self.windows)
        self._tokens = {shard.file: map_file(shard, run.data)["tokens"] for shard in manifest.held_out}
        ends = {shard.file: min(start + length, shard.tokens) for shard, start in self.windows}
        self._covered = [(shard, ends[shard.file]) for shard in manifest.held_out if shard.file in ends]
        """The files, and how many of its tokens the windows cover."""

    def sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Summed loss of these windows."""
        inputs_BT = np.full((stop - start, self.length), self.eos_id, np.int64)
        targets_BT = np.full((stop - start, self.length), IGNORED, np.int64)
        for row, (shard, first) in enumerate(self.windows[start:stop]):
            tokens = self._tokens[shard.file][first : first + self.length]
            targets_BT[row, : len(tokens)] = tokens
            inputs_BT[row, 1 : len(tokens)] = tokens[:-1]
            if first > 0:
                inputs_BT[row, 0] = self._tokens[shard.file][first - 1]
        logits_BTV = model(torch.from_numpy(inputs_BT).to(self.device))
        return {"loss": loss_sum(logits_BTV, torch.from_numpy(targets_BT).to(self.device)).item()}

    def result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Mean loss and what follows from it, from the sums of all batches."""
        counts, text_bytes = np.zeros(self.vocab_size, np.int64), 0
        for shard, covered in self._covered:
            counts += np.bincount(self._tokens[shard.file][:covered], minlength=self.vocab_size)
            text_bytes += round(shard.bytes * covered / shard.tokens)  # all of them, but for a limit
        tokens = sum(covered for _, covered in self._covered)
        present = counts[counts > 0].astype(np.float64)
        loss = math.fsum(part["loss"] for part in sums) / tokens
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss / math.log(2) * tokens / text_bytes,
            "unigram_bits_per_byte": float(-(present * np.log2(present / present.sum())).sum()) / text_bytes,
            "tokens": tokens,
            "bytes": text_bytes,
        }
