"""Evaluation of a model on held-out data and on tasks; the same numbers for any number of ranks.

The held-out tokens are split into windows of `sequence_length`, and the windows into batches of `evaluate.batch`, or of
as many as have 2 GiB of logits (a vocabulary of 128k and windows of 8k need 4.2 GB for each window). Batch b belongs to
rank b mod ranks. A batch therefore contains the same windows on any layout, and its loss is bit-identical. The sums are
gathered and added in batch order, in double precision. Each token is predicted once: the first of a file from the
end-of-text token, the first of any other window from the last token before it. If training splits the model because one
rank may not hold it, evaluation splits it by ZeRO 3 on all ranks.

Bits per byte (the loss in bits per byte of UTF-8 text) does not depend on the tokenizer. For comparison there is the
unigram entropy: the best that a model could reach that knows the frequencies of the held-out tokens, but not their
order. A custom model is evaluated the same way on its held-out samples (pipeline/data/samples.py).

Tasks follow EleutherAI's lm-evaluation-harness (`multiple_choice`, `acc` and `acc_norm`; docs/evaluation.md).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipeline.base.errors import CheckpointError, UserError
from pipeline.base.files import add_checksum, write_json
from pipeline.base.signals import StopFlag
from pipeline.checkpoint import catalog
from pipeline.checkpoint.checkpointer import load_checkpoint, load_verified_manifest
from pipeline.checkpoint.identity import check_identity, compute_identity, compute_source_identity
from pipeline.checkpoint.model_tokens import model_tokens
from pipeline.comm import groups
from pipeline.config.hugging_face import TOKENIZER_FILE
from pipeline.data.manifest import MASK_LEARNED, Manifest, SampleManifest, ShardEntry
from pipeline.data.samples import SampleDataset, map_arrays, map_whole_file
from pipeline.data.special_tokens import encode_prompt, load_tokenizer
from pipeline.data.verify_shards import verify_shards
from pipeline.evaluate.result import ITEMS_SUFFIX, STDERR_SUFFIX, format_result, result_file
from pipeline.evaluate.task_files import TaskItem, read_task_file
from pipeline.model.decoder import IGNORE_INDEX, cross_entropy_sum
from pipeline.model.task import DTYPES, DecoderTask, Task, make_task
from pipeline.parallel.data_parallel import apply_fsdp
from pipeline.resilience.stop import StopCoordinator
from pipeline.resilience.watchdog import Watchdog
from pipeline.run.directory import Run
from pipeline.run.events import Damaged, Evaluated

LOGITS_BYTES = 2 << 30
"""Size of the logits of one forward pass in fp32; the model's own and the softmax need 2 to 3 times as much."""


class Evaluator:
    """One rank of an evaluation. It builds the model once and loads one checkpoint after another into it.

    Args:
        within: the coordinator of a training. The trainer then copies weights into `model`, and
            `train.evaluate_sequences` limits the held-out data.
    """

    def __init__(
        self,
        run: Run,
        manifest: Manifest | SampleManifest,
        world: groups.World,
        flag: StopFlag,
        watchdog: Watchdog,
        within: StopCoordinator | None = None,
    ) -> None:
        self.run, self.world, self.watchdog, self.within = run, world, watchdog, within
        self.group = groups.new_control_group()
        self.coordinator = within or StopCoordinator(flag, groups.new_control_group())
        config = run.config
        verify_shards(run, manifest.held_out, self.group, how=config.data.verify)
        self.identity = compute_identity(config, manifest)
        if within is None:  # a training that begins notes later what it begins with
            self.identity |= compute_source_identity(run)
        self.task = task = make_task(run, manifest)
        model = task.build(range(config.model.layers))
        parallel = config.parallel
        self.split = world.size > 1 and (parallel.zero == 3 or parallel.tensor > 1 or parallel.pipeline > 1)
        if self.split:  # one rank may not hold it: blocks are gathered as they compute, so results stay the same bits
            mesh, dtype = init_device_mesh(world.device.type, (world.size,)), DTYPES.get(config.train.precision)
            apply_fsdp(model, task.fsdp_groups(model), mesh, dtype, free_after_forward=True)
        self.model = model.to_empty(device=world.device).eval()
        task.init_weights(self.model, world.device, sample=False)  # a checkpoint's weights come, or the training's
        self.batch = config.evaluate.batch
        self.held_out: TextHeldOut | SampleHeldOut
        limit = config.evaluate.max_sequences if within is None else config.train.evaluate_sequences
        if isinstance(manifest, Manifest):
            assert isinstance(task, DecoderTask)
            window_bytes = 4 * config.data.sequence_length * task.vocab_size
            self.batch = min(self.batch, max(1, LOGITS_BYTES // window_bytes))
            self.held_out = TextHeldOut(run, task, manifest, limit, world.device)
        else:
            self.held_out = SampleHeldOut(run, task, manifest, limit, world.device)
        self.tasks: list[TaskFile] = []
        if within is None and isinstance(manifest, Manifest) and config.evaluate.task_files:
            tokenizer = load_tokenizer(run.data_dir / TOKENIZER_FILE)
            length, most = config.data.sequence_length, config.evaluate.answer_tokens
            options = tokenizer, manifest.eos_id, length, self.batch, most, self.split
            with_end = load_tokenizer(run.data_dir / TOKENIZER_FILE, config.data.tokenizer.eos_token)
            bos_ids, end_ids = manifest.bos_ids, model_tokens(run, manifest, with_end).end_ids
            self.tasks = [
                TaskFile(file, *options, bos_ids=bos_ids, end_ids=end_ids) for file in config.evaluate.task_files
            ]

    def evaluate(self, step: int) -> bool:
        """Evaluate the checkpoint of `step` and write the result; return False if the ranks agreed to stop before."""
        checkpoint = self.run.checkpoints_dir / catalog.checkpoint_name(step)
        try:
            sealed = load_verified_manifest(checkpoint, self.group)
        except CheckpointError as error:
            if self.world.is_rank0:  # so that training counts as not done, and goes on from the one before
                catalog.set_checkpoint_aside(self.run.checkpoints_dir, step)
                self.run.append_event(Damaged(stage="evaluate", step=step, reason=str(error)))
            raise
        check_identity(sealed, self.identity)
        load_checkpoint(
            {f"model.{n}": p.detach() for n, p in self.task.named_weights(self.model)}, checkpoint, self.group
        )
        found = self.measure(step)
        if found is None:
            return False
        if self.world.is_rank0:
            result = {**found, "checkpoint": sealed["sha256"]}
            write_json(result_file(self.run, step), add_checksum(result))
            figures = {key: result[key] for key in ("loss", "bits_per_byte") if key in result}
            self.run.append_event(Evaluated(stage="evaluate", step=step, **figures))
            print(format_result(result), flush=True)
        return True

    @torch.no_grad()
    def measure(self, step: int, *, ignore_stop: bool = False) -> dict[str, Any] | None:
        """Return the result of the weights in `model`, those after `step`, on every rank.

        None if the ranks agreed to stop, unless `ignore_stop` is set.
        """
        found = self._measured(self.held_out, self.batch, step, ignore_stop)
        for task in self.tasks:
            if found is not None:
                more = self._measured(task, task.batch, step, ignore_stop)
                found = None if more is None else found | more
        self.watchdog.enter_phase(step, "start")  # what comes now, another checkpoint too, depends on storage
        return None if found is None else {"step": step, **found}

    def _measured(
        self, held_out: TextHeldOut | SampleHeldOut | TaskFile, size: int, step: int, ignore_stop: bool
    ) -> dict[str, Any] | None:
        """Return the result from the sums of all batches of `size`; None if the ranks agreed to stop."""
        count = held_out.count
        batches = -(-count // size)
        mine: dict[int, dict[str, float]] = {}
        for first in range(0, batches, self.world.size):
            began = time.monotonic()
            self.watchdog.enter_phase(step, "batch")
            self.coordinator.start_exchange()
            number = first + self.world.rank
            if number < batches:
                mine[number] = held_out.sums(self.model, number * size, min((number + 1) * size, count))
            elif self.split:  # the others gather weights from this rank too
                held_out.sums(self.model, 0, 1)
            if self.coordinator.finish_exchange() and not ignore_stop:
                return None
            if self.within is None:  # the limits of a training follow its steps
                self.watchdog.record_step(time.monotonic() - began)
                if self.world.is_rank0 and first // self.world.size % 10 == 0:
                    print(f"evaluating step {step}: batch {first}/{batches}", flush=True)
        merged: dict[int, dict[str, float]] = {}
        for part in groups.all_gather_results(self.group, lambda: mine):
            merged |= part
        return held_out.result([merged[number] for number in range(batches)])


_BLOCK = 1 << 24
_RESERVED_NAMES = {"step", "loss", "entries", "samples", "checkpoint"}


class SampleHeldOut:
    """Held-out samples of a custom model."""

    def __init__(self, run: Run, task: Task, manifest: SampleManifest, limit: int | None, device: torch.device) -> None:
        self.task, self.device = task, device
        self.dataset = SampleDataset(manifest, run.data_dir, held_out=True, transform=task.transform)
        self.count = min(len(self.dataset), limit or len(self.dataset))

    def sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Return summed loss and metrics of these samples, and the number of their entries."""
        arrays = self.dataset.read(np.arange(start, stop, dtype=np.int64))
        whole = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        (batch,) = self.task.split_micro_batches(whole, stop - start)
        outputs = model(*self.task.model_inputs(batch))
        entries, metrics = self.task.count_loss_entries(batch), self.task.metrics(outputs, batch)
        if reserved := _RESERVED_NAMES & metrics.keys():
            message = f"model.target: the metric name {min(reserved)} is reserved in an evaluation; choose another name"
            raise UserError("model.reserved_metric", message)
        loss = self.task.loss(outputs, batch)
        counted = stop - start if entries is None else entries
        return {name: float(value) for name, value in {"loss": loss, "entries": counted, **metrics}.items()}

    def result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return means over all held-out samples, or over their entries, from the sums of all batches."""
        totals = {name: math.fsum(part[name] for part in sums) for name in sums[0]}
        entries = totals.pop("entries")
        means = {name: total / entries for name, total in totals.items()}
        return {**means, "samples": self.count, "entries": int(entries)}


class TextHeldOut:
    """Held-out windows of text, at most `limit` of them."""

    def __init__(
        self, run: Run, task: DecoderTask, manifest: Manifest, limit: int | None, device: torch.device
    ) -> None:
        self.task, self.vocab_size, self.eos_id, self.device = task, manifest.vocab_size, manifest.eos_id, device
        self.length = length = run.config.data.sequence_length
        names = [part.name for part in manifest.parts for _ in range(part.held_out)]
        self._sources = dict(zip((shard.name for shard in manifest.held_out), names, strict=False))
        """Source of each file of a mixture."""
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
        whole = cache(map_whole_file)
        self._arrays = {shard.name: map_arrays(shard, run.data_dir / shard.file, whole) for shard in self._shards}
        self._covered = [(shard, min(count * length, shard.tokens)) for shard, count in taken]
        """Files, and how many of their tokens the windows cover."""

    def _window(self, number: int) -> tuple[ShardEntry, int]:
        """Return the file of a window, and the index of its first token in it."""
        at = bisect_right(self._starts, number) - 1
        return self._shards[at], (number - self._starts[at]) * self.length

    def sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Return the summed loss of these windows, and the number of their tokens; the same for each source."""
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
        batch = {name: torch.from_numpy(arrays[name]).to(self.device) for name in self.task.sample_shapes}
        targets_BT = self.task.next_tokens(batch).masked_fill(torch.from_numpy(beyond_BT).to(self.device), IGNORE_INDEX)
        logits_BTV = model(*self.task.model_inputs(batch), **self.task.document_boundaries(batch))
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
        """Return the mean loss and derived metrics from the sums of all batches.

        Bytes are those of learned text. If documents are masked from each other, nothing predicts their first tokens;
        in bits per byte these count with the mean loss.
        """
        counts, text_bytes = np.zeros(self.vocab_size, np.int64), 0
        for shard, covered in self._covered:
            arrays, whole = self._arrays[shard.name], shard.tokens
            found = arrays["tokens"][:covered]
            if "mask" in arrays:
                learned = arrays["mask"] & MASK_LEARNED != 0
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


class TaskFile:
    """Scores one task file; `batch` items are evaluated at once.

    - Multiple choice uses the log-likelihood of each choice after the prompt. `accuracy_norm` divides it by the
      length of the choice in characters. The tokens of a choice are those of prompt and choice without those of the
      prompt. If they do not fit into a window, its beginning is dropped.
    - A prompt begins with the special tokens with which the training documents begin.
    - A free answer is decoded greedily until the end of its line, or a token that ends an answer, as `generate` does.
      It is correct if it equals the expected answer, except for surrounding blanks.

    The standard error is that of a mean of zeros and ones: sqrt(p (1 - p) / (n - 1)).
    """

    def __init__(
        self,
        file: Path,
        tokenizer: Tokenizer,
        end: int,
        length: int,
        rows: int,
        answer_tokens: int,
        together: bool,
        bos_ids: Sequence[int] = (),
        end_ids: Sequence[int] = (),
    ) -> None:
        """Read the items.

        Args:
            end: the token that ends a text.
            length: the maximum number of tokens of a sequence.
            rows: the number of sequences in one forward pass.
            together: whether all ranks must call the model equally often, because it is split over them.
            bos_ids: tokens before each prompt, as before the training documents.
            end_ids: other tokens that end an answer, such as the one that closes the answers of a dialogue.
        """
        self.name, self.items = file.stem, read_task_file(file)
        self.tokenizer, self.end, self.length, self.together = tokenizer, end, length, together
        self.answer_tokens, self.rows, self.bos_ids, self.end_ids = answer_tokens, rows, bos_ids, {end, *end_ids}
        self.width = max(1, *(len(item.choices) for item in self.items))
        self.count, self.batch = len(self.items), max(1, rows // self.width)
        if not self.items[0].choices and answer_tokens >= length:
            message = f"evaluate.answer_tokens ({answer_tokens}) must be below data.sequence_length ({length})"
            raise UserError("evaluate.too_long", message)
        if self.items[0].choices:
            self._pairs = [[self._pair(item, choice) for choice in item.choices] for item in self.items]

    def sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Return how many of these items are answered correctly."""
        items = self.items[start:stop]
        if items[0].choices:
            return self._chosen(model, start, stop)
        said = self._answers(model, items)
        right = sum(one.split("\n")[0].strip() == item.answer for item, one in zip(items, said, strict=True))
        return {"accuracy": float(right)}

    def result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return the metrics, prefixed with the name of the file."""
        found: dict[str, Any] = {ITEMS_SUFFIX: self.count}
        for key in sums[0]:
            share = math.fsum(part[key] for part in sums) / self.count
            found |= {
                key: share,
                f"{key}{STDERR_SUFFIX}": math.sqrt(share * (1 - share) / max(1, self.count - 1)),
            }
        return {f"{self.name}.{key}": value for key, value in found.items()}

    def _ids(self, text: str) -> list[int]:
        return encode_prompt(self.tokenizer, text, self.bos_ids)

    def _pair(self, item: TaskItem, choice: str) -> tuple[list[int], int]:
        """Return the tokens of prompt and choice, and the number of the latter."""
        prompt = item.prompt.rstrip()  # a token may hold the blank that comes before a word
        before = self._ids(prompt) or [self.end]
        whole = self._ids(item.prompt + ("" if item.prompt[-1:].isspace() else " ") + choice)
        whole = whole if prompt or self.bos_ids else [self.end, *whole]
        count = len(whole) - len(before)
        if not 0 < count <= self.length:
            raise UserError(
                "evaluate.too_long",
                f"evaluate.tasks: {self.name}: a choice of {count} tokens does not fit into data.sequence_length "
                f"({self.length}): {choice[:60]!r}",
            )
        return whole[-self.length - 1 :], count

    def _logits(self, model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return `logits_BTV` of sequences of tokens, which are padded at the end."""
        longest = max(map(len, rows))
        tokens_BT = torch.tensor([[*row, *[self.end] * (longest - len(row))] for row in rows])
        logits_BTV: Tensor = model(tokens_BT.to(next(model.parameters()).device))
        return logits_BTV

    def _chosen(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Count correct choices by log-likelihood, with and without length normalization; a fixed number of passes."""
        pairs = [pair for item in self._pairs[start:stop] for pair in item]
        scores: list[float] = []
        for first in range(0, self.batch * self.width, self.rows):
            some = pairs[first : first + self.rows]
            if not some and not self.together:
                break
            logits_BTV = self._logits(model, [ids[:-1] for ids, _ in some] or [[self.end]])
            for (ids, count), logits_TV in zip(some, logits_BTV, strict=False):
                at_TV = logits_TV[len(ids) - 1 - count : len(ids) - 1].float().log_softmax(dim=-1)
                scores.append(at_TV.gather(1, torch.tensor(ids[-count:], device=at_TV.device)[:, None]).sum().item())
        right, right_norm, at = 0, 0, 0
        for item in self.items[start:stop]:
            item_scores = scores[at : at + len(item.choices)]
            at += len(item.choices)
            normed = [score / len(choice) for score, choice in zip(item_scores, item.choices, strict=True)]
            right += item_scores.index(max(item_scores)) == item.correct_choice
            right_norm += normed.index(max(normed)) == item.correct_choice
        return {"accuracy": float(right), "accuracy_norm": float(right_norm)}

    def _answers(self, model: nn.Module, items: Sequence[TaskItem]) -> list[str]:
        """Return the greedily decoded answers, up to the end of a line or text."""
        rows = [(self._ids(item.prompt) or [self.end])[-self.length + self.answer_tokens :] for item in items]
        begun = [len(row) for row in rows]
        said = [""] * len(rows)
        over = [False] * len(rows)
        for _ in range(self.answer_tokens):
            if all(over) and not self.together:
                break
            logits_BTV = self._logits(model, rows)
            for number, row in enumerate(rows):
                token = int(logits_BTV[number, len(row) - 1].argmax())
                if over[number]:
                    continue
                if token in self.end_ids:  # no part of the answer, also if the tokenizer does not call it special
                    over[number] = True
                    continue
                row.append(token)
                said[number] = self.tokenizer.decode(row[begun[number] :]).lstrip()
                over[number] = "\n" in said[number]
        return said
