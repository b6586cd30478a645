"""Held-out loss of a checkpoint, the same number whatever the number of ranks.

The held-out tokens are cut into windows of `sequence_length`, the windows into batches of `evaluate.batch`.
Batch b belongs to rank b mod ranks, so a batch holds the same windows on any layout and its loss is the same
bits; the sums are gathered and added in batch order, in double precision. Each token is predicted once: the
first of a file from the end-of-text token, the first of any other window from the last token before it.
Where training splits the model, one rank may not hold it, and evaluation splits it too: by ZeRO 3, on all ranks.

Bits per byte (loss in bits, per byte of UTF-8 text) does not depend on the tokenizer. Beside it stands the
unigram figure: the entropy of the held-out tokens' own frequencies, in bits per byte: what a model that knew the
frequencies of tokens, and nothing of their order, could reach at best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from data_prep.manifest import Manifest, ShardEntry
from pipeline import checkpoint_files as files
from pipeline import groups
from pipeline.checkpoint import load, verified
from pipeline.data_parallel import shard
from pipeline.engine import DTYPES
from pipeline.errors import CheckpointError
from pipeline.files import write_json
from pipeline.inputs import verify_shards
from pipeline.model import Decoder, init_weights, loss_sum
from pipeline.run import Run
from pipeline.signals import StopFlag
from pipeline.stop import Agreement

IGNORED = -100
"""Target of padding: cross-entropy leaves it out."""


class Evaluator:
    """One rank of an evaluation; builds the model once and loads one checkpoint after another into it."""

    def __init__(self, run: Run, manifest: Manifest, world: groups.World, flag: StopFlag) -> None:
        self.run, self.manifest, self.world = run, manifest, world
        self.group = groups.side_group()
        self.agreement = Agreement(flag, groups.side_group())
        verify_shards(run, manifest.held_out, self.group, hashes=True)
        config = run.config
        with torch.device("meta"):
            model = Decoder(config.model, manifest.vocab_size, config.data.sequence_length)
        model.compute_dtype = DTYPES.get(config.train.precision)
        parallel = config.parallel
        self.split = world.size > 1 and (parallel.zero == 3 or parallel.tensor > 1 or parallel.pipeline > 1)
        if self.split:  # one rank may not hold it: blocks are gathered as they compute, so results stay the same bits
            shard(model, init_device_mesh(world.device.type, (world.size,)), free_after_forward=True)
        self.model = model.to_empty(device=world.device).eval()
        init_weights(self.model, config.run.seed, config.model.initializer_range)
        self.windows = [
            (s, start) for s in manifest.held_out for start in range(0, s.tokens, config.data.sequence_length)
        ]
        if config.evaluate.max_sequences is not None:
            self.windows = self.windows[: config.evaluate.max_sequences]
        self._maps = {
            s.file: np.memmap(run.data / s.file, s.dtype, "r", s.offset, (s.tokens,)) for s in manifest.held_out
        }

    def evaluate(self, step: int) -> bool:
        """Evaluate the checkpoint of `step` and write its file; False where the ranks agreed to stop before."""
        checkpoint = self.run.checkpoints / files.step_name(step)
        try:
            sealed = verified(checkpoint, self.group)
        except CheckpointError as error:
            if self.world.first:  # so that training counts as not done, and goes on from the one before
                files.set_aside(self.run.checkpoints, step)
                self.run.event("damaged", "evaluate", step=step, reason=str(error))
            raise
        load({f"model.{n}": p.detach() for n, p in self.model.named_weights()}, checkpoint, self.group)
        sums = self._batch_sums(step)
        if sums is None:
            return False
        if self.world.first:
            tokens = sum(self._length(entry, start) for entry, start in self.windows)
            loss = math.fsum(sums) / tokens
            unigram_bits, text_bytes = self._unigram()
            result = {
                "step": step,
                "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),
                "bits_per_byte": loss / math.log(2) * tokens / text_bytes,
                "unigram_bits_per_byte": unigram_bits / text_bytes,
                "tokens": tokens,
                "bytes": text_bytes,
                "checkpoint": sealed["sha256"],
            }
            write_json(self.run.evaluation / f"{files.step_name(step)}.json", result)
            self.run.event("evaluated", "evaluate", step=step, loss=loss, bits_per_byte=result["bits_per_byte"])
            print(
                f"step {step}: held-out loss {loss:.4f}, perplexity {result['perplexity']:.2f}, "
                f"{result['bits_per_byte']:.4f} bits per byte (unigram {result['unigram_bits_per_byte']:.4f})",
                flush=True,
            )
        return True

    def _batch_sums(self, step: int) -> list[float] | None:
        """Summed loss of every batch, in batch order, on every rank; None where the ranks agreed to stop."""
        size = self.run.config.evaluate.batch
        batches = range(0, len(self.windows), size)
        mine: dict[int, float] = {}
        for first in range(0, len(batches), self.world.size):
            self.agreement.start()
            number = first + self.world.rank
            if number < len(batches):
                start = batches[number]
                mine[number] = self._batch_loss(self.windows[start : start + size])
            elif self.split:  # the others gather weights from this rank too
                self._batch_loss(self.windows[:1])
            if self.agreement.stop():
                return None
            if self.world.first and first // self.world.size % 10 == 0:
                print(f"evaluating step {step}: batch {first}/{len(batches)}", flush=True)
        merged: dict[int, float] = {}
        for part in groups.agree(self.group, lambda: mine):
            merged |= part
        return [merged[number] for number in range(len(batches))]

    @torch.no_grad()
    def _batch_loss(self, windows: list[tuple[ShardEntry, int]]) -> float:
        length = self.run.config.data.sequence_length
        inputs_BT = np.full((len(windows), length), self.manifest.eos_id, np.int64)
        targets_BT = np.full((len(windows), length), IGNORED, np.int64)
        for row, (entry, start) in enumerate(windows):
            tokens, count = self._maps[entry.file], self._length(entry, start)
            targets_BT[row, :count] = tokens[start : start + count]
            inputs_BT[row, 1:count] = tokens[start : start + count - 1]
            if start > 0:
                inputs_BT[row, 0] = tokens[start - 1]
        logits_BTV = self.model(torch.from_numpy(inputs_BT).to(self.world.device))
        return loss_sum(logits_BTV, torch.from_numpy(targets_BT).to(self.world.device)).item()

    def _length(self, entry: ShardEntry, start: int) -> int:
        """Tokens of the window at `start`: the last one of a file is shorter."""
        return min(self.run.config.data.sequence_length, entry.tokens - start)

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
