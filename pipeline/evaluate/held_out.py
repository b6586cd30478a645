"""What is held out, as the evaluator sees it: windows of text, or samples of a user's own arrays; sums and their
result."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.base.errors import UserError
from pipeline.data.manifest import LEARNED, Manifest, SampleManifest, ShardEntry
from pipeline.data.samples import SampleDataset, map_file, map_whole
from pipeline.model.decoder import cross_entropy_sum
from pipeline.model.head import IGNORE_INDEX
from pipeline.model.task import Task
from pipeline.run.directory import Run

_BLOCK = 1 << 24
_TAKEN = {"step", "loss", "entries", "samples", "checkpoint"}


class SampleHeldOut:
    """The held-out samples; `sums` and `result` are what the evaluator asks."""

    def __init__(self, run: Run, task: Task, manifest: SampleManifest, limit: int | None, device: torch.device) -> None:
        self.task, self.device = task, device
        self.dataset = SampleDataset(manifest, run.data, held_out=True, transform=task.transform)
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

    def __init__(self, run: Run, task: Task, manifest: Manifest, limit: int | None, device: torch.device) -> None:
        self.task, self.vocab_size, self.eos_id, self.device = task, manifest.vocab_size, manifest.eos_id, device
        self.length = length = run.config.data.sequence_length
        names = [part.name for part in manifest.parts for _ in range(part.held_out)]
        self._sources = dict(zip((shard.name for shard in manifest.held_out), names, strict=False))
        """Of a mixture, the source of each file."""
        by_source: dict[str | None, list[ShardEntry]] = {}
        for shard in manifest.held_out:
            by_source.setdefault(self._sources.get(shard.name), []).append(shard)
        taken: list[tuple[ShardEntry, int]] = []  # files, and how many of their windows; all together may be billions
        for number, shards in enumerate(by_source.values()):
            left = (limit + len(by_source) - 1 - number) // len(by_source) if limit else None  # as many of each source
            for shard in shards:
                count = -(-shard.tokens // length)
                if left is not None:
                    left -= (count := min(count, left))
                taken += [(shard, count)] if count else []
        self._shards = [shard for shard, _ in taken]
        self._starts = list(accumulate((count for _, count in taken), initial=0))
        self.count = self._starts[-1]
        whole = cache(map_whole)
        self._arrays = {shard.name: map_file(shard, run.data / shard.file, whole) for shard in self._shards}
        self._covered = [(shard, min(count * length, shard.tokens)) for shard, count in taken]
        """The files, and how many of its tokens the windows cover."""

    def _window(self, number: int) -> tuple[ShardEntry, int]:
        """The file of a window, and its first token there."""
        at = bisect_right(self._starts, number) - 1
        return self._shards[at], (number - self._starts[at]) * self.length

    def sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Summed loss of these windows, and how many tokens it is of."""
        shape = stop - start, self.length + 1
        arrays: dict[str, Any] = {"tokens": np.full(shape, self.eos_id, np.int64), "mask": np.zeros(shape, np.uint8)}
        beyond_BT = np.ones((stop - start, self.length), np.bool_)
        windows = [self._window(number) for number in range(start, stop)]
        for row, (shard, first) in enumerate(windows):
            before = 1 if first else 0  # a file's first token follows an end-of-text token
            for name, array in self._arrays[shard.name].items():
                piece = array[first - before : first + self.length]
                arrays[name][row, 1 - before : 1 - before + len(piece)] = piece
            beyond_BT[row, : shard.tokens - first] = False
        batch = {name: torch.from_numpy(arrays[name]).to(self.device) for name in self.task.shapes}
        targets_BT = self.task.next_tokens(batch).masked_fill(torch.from_numpy(beyond_BT).to(self.device), IGNORE_INDEX)
        logits_BTV = model(*self.task.inputs(batch), **self.task.borders(batch))
        found = {
            "loss": cross_entropy_sum(logits_BTV, targets_BT).item(),
            "tokens": float((targets_BT != IGNORE_INDEX).sum()),
        }
        names = [self._sources.get(shard.name) for shard, _ in windows]
        for name in filter(None, dict.fromkeys(names)):
            rows = [row for row, other in enumerate(names) if other == name]
            found[f"{name}.loss"] = cross_entropy_sum(logits_BTV[rows], targets_BT[rows]).item()
            found[f"{name}.tokens"] = float((targets_BT[rows] != IGNORE_INDEX).sum())
        return found

    def result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Mean loss and what follows from it, from the sums of all batches.

        Bytes are those of what is learned. First tokens of documents that see no other, which nothing predicts, count
        in bits per byte as the mean.
        """
        counts, text_bytes = np.zeros(self.vocab_size, np.int64), 0
        for shard, covered in self._covered:
            arrays, whole = self._arrays[shard.name], shard.tokens
            found = arrays["tokens"][:covered]
            if "mask" in arrays:
                learned = arrays["mask"] & LEARNED != 0
                found, whole = found[learned[:covered]], max(1, int(learned.sum()))
            for start in range(0, len(found), _BLOCK):  # each is widened to int64
                counts += np.bincount(found[start : start + _BLOCK], minlength=self.vocab_size)
            text_bytes += round(shard.bytes * len(found) / whole)  # all of them, but for a limit
        tokens, text_bytes = math.fsum(part["tokens"] for part in sums), max(1, text_bytes)
        present = counts[counts > 0].astype(np.float64)
        loss = math.fsum(part["loss"] for part in sums) / max(1, tokens)
        more = {}
        for name in dict.fromkeys(self._sources[shard.name] for shard in self._shards if self._sources):
            of_source = [[part.get(f"{name}.{what}", 0.0) for part in sums] for what in ("loss", "tokens")]
            more[f"{name}.loss"] = math.fsum(of_source[0]) / max(1, math.fsum(of_source[1]))
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss / math.log(2) * float(present.sum()) / text_bytes,
            "unigram_bits_per_byte": float(-(present * np.log2(present / present.sum())).sum()) / text_bytes,
            "tokens": int(tokens),
            "bytes": text_bytes,
            **more,
        }
