"""Evaluate a model on held-out data and on task files. The results are the same for any number of ranks.

Rank r computes the batches b with b mod (number of ranks) = r. A batch contains the same samples for any number of
ranks, so its loss has the same bits. The sums of all batches are gathered and added in the order of the batches, in
double precision. If the train stage splits the model (ZeRO 3, tensor or pipeline parallelism), the evaluation shards it
over all ranks, as ZeRO 3 does.

`TextHeldOut` evaluates held-out text. `SampleHeldOut` evaluates the held-out samples of a custom model
(pipeline/data/samples.py). `TaskFile` evaluates a task file. docs/evaluation.md describes the metrics.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipeline.base.errors import CheckpointError, UserError
from pipeline.base.files import add_checksum, write_json
from pipeline.base.signals import StopFlag
from pipeline.checkpoint import catalog
from pipeline.checkpoint.checkpointer import find_weights, load_checkpoint, load_verified_manifest
from pipeline.checkpoint.identity import check_identity, compute_identity, compute_source_identity
from pipeline.checkpoint.model_tokens import find_model_tokens
from pipeline.comm import groups
from pipeline.config.hugging_face import TOKENIZER_FILE
from pipeline.data.dataset import HELD_OUT_SPLIT
from pipeline.data.dataset_pool import DatasetSamples, make_dataset_request
from pipeline.data.loader import Batch
from pipeline.data.manifest import MASK_LEARNED, Manifest, SampleManifest, ShardEntry
from pipeline.data.samples import SampleDataset, map_arrays, map_whole_file
from pipeline.data.special_tokens import encode_prompt, load_tokenizer
from pipeline.data.verify_shards import verify_dataset_files, verify_shards
from pipeline.evaluate.result import (
    EMA_PREFIX,
    ITEMS_SUFFIX,
    STDERR_SUFFIX,
    add_ema_metrics,
    format_result,
    result_file,
)
from pipeline.evaluate.task_files import TaskItem, read_task_file
from pipeline.model.decoder import IGNORE_INDEX, Decoder, cross_entropy_sum
from pipeline.model.lora import allocate, hash_weights, quantize_copied
from pipeline.model.make_task import make_task
from pipeline.model.open_weights import open_initial_weights
from pipeline.model.task import DTYPES, Task, TokenTask
from pipeline.parallel.data_parallel import apply_fsdp
from pipeline.resilience.stop import StopCoordinator
from pipeline.resilience.watchdog import Watchdog
from pipeline.run.directory import Run
from pipeline.run.events import Damaged, Evaluated
from pipeline.run.origin import read_origin

LOGITS_BYTES = 2 << 30
"""Maximum size of the fp32 logits of one forward pass, which limits the batch.

For example, the logits of one window of 8k tokens take 4.2 GB if the vocabulary has 128k tokens. The logits in the
model's data type and the softmax take 2 to 3 times as much in addition.
"""


class Evaluator:
    """One rank of an evaluation. The model is built once, and checkpoints are loaded into it one after another.

    Args:
        run: the run.
        manifest: the manifest of the shards or of the samples.
        world: all ranks, and the device of this rank.
        flag: set if a signal requests a stop.
        watchdog: detects a hang of this rank.
        training_coordinator: the stop coordinator of the trainer if the train stage evaluates its current weights;
            None in the evaluate stage. If it is given, the trainer copies the weights into `model`, and
            `train.evaluate_sequences` limits the held-out data.
    """

    def __init__(
        self,
        run: Run,
        manifest: Manifest | SampleManifest,
        world: groups.World,
        flag: StopFlag,
        watchdog: Watchdog,
        training_coordinator: StopCoordinator | None = None,
    ) -> None:
        self.run = run
        self.world = world
        self.watchdog = watchdog
        self.is_in_training = training_coordinator is not None
        self.group = groups.new_control_group()
        self.coordinator = training_coordinator or StopCoordinator(flag, groups.new_control_group())
        config = run.config
        verify_shards(run, manifest.held_out, self.group, mode=config.data.verify)
        verify_dataset_files(manifest, self.group)
        self.manifest = manifest
        self.origin = read_origin(run)
        self.identity = compute_identity(config, manifest)
        if not self.is_in_training:  # In the train stage, `source.json` may not exist yet: a new run writes it later.
            self.identity |= compute_source_identity(run)
        self.task = task = make_task(run, manifest)
        model = task.build(range(config.model.layers))
        parallel = config.parallel
        self.is_sharded = world.size > 1 and (parallel.zero == 3 or parallel.tensor > 1 or parallel.pipeline > 1)
        """Whether each rank has only a shard of the weights. All ranks must then call the model equally many times."""
        if self.is_sharded:  # Each block is gathered before it computes, so the results are bit-identical.
            mesh = init_device_mesh(world.device.type, (world.size,))
            dtype = DTYPES.get(config.train.precision)
            apply_fsdp(model, task.fsdp_groups(model), mesh, dtype, free_after_forward=True)
        allocate(model, world.device)
        self.model = model.eval()
        # Checkpoints of an adapter do not contain the weights to which it is added. The trainer copies all weights.
        needs_base = config.adapter is not None and not self.is_in_training
        source = open_initial_weights(run, task, self.group, is_first_start=False) if needs_base else None
        task.init_weights(self.model, world.device, sample=needs_base and source is None)
        if source is not None:
            source.copy_into(quantize_copied(self.model, task.base_weights(self.model), world.device))
        elif needs_base:
            self.identity["base_hash"] = hash_weights(task.base_weights(self.model), self.group)
        self.batch_size = config.evaluate.batch
        self.held_out: TextHeldOut | SampleHeldOut
        limit = config.train.evaluate_sequences if self.is_in_training else config.evaluate.max_sequences
        if isinstance(manifest, Manifest):
            assert isinstance(task, TokenTask)
            window_bytes = 4 * config.data.sequence_length * task.vocab_size
            self.batch_size = min(self.batch_size, max(1, LOGITS_BYTES // window_bytes))
            # Only the decoder can compute the loss of a long window in chunks.
            computes_loss_in_chunks = False
            if window_bytes > LOGITS_BYTES and isinstance(model, Decoder):
                assert model.lm_head is not None
                computes_loss_in_chunks = True
                model.lm_head.chunk = max(1, LOGITS_BYTES // (4 * task.vocab_size))
                model.lm_head.compute_dtype = model.compute_dtype
            self.held_out = TextHeldOut(
                run, task, manifest, limit, world.device, computes_loss_in_chunks=computes_loss_in_chunks
            )
        else:
            self.held_out = SampleHeldOut(run, task, manifest, limit, world.device, is_rank0=world.is_rank0)
            if task.has_batch_loss:
                self.batch_size = config.train.micro_batch
        self.tasks: list[TaskFile] = []
        if not self.is_in_training and isinstance(manifest, Manifest) and config.evaluate.task_files:
            tokenizer = load_tokenizer(run.data_dir / TOKENIZER_FILE)
            # To find the EOS token in the text of a chat template, the tokenizer must have it as a special token.
            tokenizer_with_eos = load_tokenizer(run.data_dir / TOKENIZER_FILE, config.data.tokenizer.eos_token)
            end_ids = find_model_tokens(run, manifest, tokenizer_with_eos).end_ids
            self.tasks = [
                TaskFile(
                    file,
                    tokenizer,
                    eos_id=manifest.eos_id,
                    sequence_length=config.data.sequence_length,
                    sequences_per_pass=self.batch_size,
                    answer_tokens=config.evaluate.answer_tokens,
                    is_sharded=self.is_sharded,
                    bos_ids=manifest.bos_ids,
                    end_ids=end_ids,
                )
                for file in config.evaluate.task_files
            ]

    def evaluate(self, step: int) -> bool:
        """Evaluate the checkpoint of `step`, also the moving average of its weights (`train.ema`). Write the result.

        Returns:
            False if the ranks agreed to stop before the evaluation was complete.

        Raises:
            CheckpointError: if the checkpoint is damaged or belongs to another run. A damaged checkpoint is renamed, so
                that it is not used again.
        """
        checkpoint = self.run.checkpoints_dir / catalog.checkpoint_name(step)
        try:
            checkpoint_manifest = load_verified_manifest(checkpoint, self.group)
        except CheckpointError as error:
            if self.world.is_rank0:  # The train stage is then incomplete and resumes from the previous checkpoint.
                catalog.set_checkpoint_aside(self.run.checkpoints_dir, step)
                self.run.append_event(Damaged(stage="evaluate", step=step, reason=str(error)))
            raise
        check_identity(checkpoint_manifest, self.identity, self.origin, self.manifest)
        metrics = self._measure_checkpoint(checkpoint, step)
        if metrics is not None and self.run.config.train.ema is not None:
            ema_metrics = self._measure_checkpoint(checkpoint, step, averaged=True)
            metrics = None if ema_metrics is None else add_ema_metrics(metrics, ema_metrics)
        if metrics is None:
            return False
        if self.world.is_rank0:
            result = {**metrics, "checkpoint": checkpoint_manifest["sha256"]}
            write_json(result_file(self.run, step), add_checksum(result))
            event_fields = {key: result[key] for key in ("loss", "bits_per_byte") if key in result}
            self.run.append_event(Evaluated(stage="evaluate", step=step, **event_fields))
            print(format_result(result), flush=True)
        return True

    def _measure_checkpoint(self, checkpoint: Path, step: int, *, averaged: bool = False) -> dict[str, Any] | None:
        """Load the weights of a checkpoint, or with `averaged` their moving averages, and return the result of them.

        Return None if the ranks agreed to stop.
        """
        stored_weights = find_weights(checkpoint, averaged=averaged)
        saved = (*self.task.saved_weights(self.model), *self.task.saved_buffers(self.model))
        weights = {stored_weights[name][0]: weight.detach() for name, weight in saved}
        load_checkpoint(weights, checkpoint, self.group)
        return self.measure(step)

    @torch.no_grad()
    def measure(self, step: int, *, ignore_stop: bool = False) -> dict[str, Any] | None:
        """Evaluate the weights in `model` and return the result, on every rank.

        Args:
            step: the step after which `model` has these weights.
            ignore_stop: whether to finish the evaluation even if the ranks agreed to stop.

        Returns:
            The result; None if the ranks agreed to stop and `ignore_stop` is False.
        """
        result: dict[str, Any] = {"step": step}
        is_stopped = False
        datasets_and_sizes = [(self.held_out, self.batch_size), *((task, task.batch_size) for task in self.tasks)]
        for dataset, batch_size in datasets_and_sizes:
            sums = self._sum_batches(dataset, batch_size, step, ignore_stop)
            is_stopped = sums is None
            if sums is None:
                break
            result |= dataset.compute_result(sums)
        # Next, another checkpoint may be loaded, which can take long. Therefore the limit of a start applies.
        self.watchdog.enter_phase(step, "start")
        return None if is_stopped else result

    def compute_outputs(self, count: int) -> Iterator[tuple[Batch, Any]]:
        """Yield batches of the first `count` held-out samples, and the outputs of `model` for them, on every rank.

        All ranks must call this method together, and consume all batches.
        """
        count = min(count, self.held_out.count)
        for start in range(0, count, self.batch_size):
            with torch.no_grad():
                result = self.held_out.compute_outputs(self.model, start, min(start + self.batch_size, count))
            yield result

    def _sum_batches(
        self, dataset: TextHeldOut | SampleHeldOut | TaskFile, batch_size: int, step: int, ignore_stop: bool
    ) -> list[dict[str, float]] | None:
        """Return the sums of each batch of `dataset`, on every rank.

        Returns None if the ranks agreed to stop, unless `ignore_stop` is set.
        """
        batch_count = -(-dataset.count // batch_size)
        sums_of_rank: dict[int, dict[str, float]] = {}
        for first_batch in range(0, batch_count, self.world.size):
            start_time = time.monotonic()
            self.watchdog.enter_phase(step, "batch")
            self.coordinator.start_exchange()  # The exchange takes place while the batch is computed.
            batch_index = first_batch + self.world.rank
            if batch_index < batch_count:
                stop = min((batch_index + 1) * batch_size, dataset.count)
                sums_of_rank[batch_index] = dataset.compute_sums(self.model, batch_index * batch_size, stop)
            elif self.is_sharded:  # The other ranks need this rank's shards of the weights.
                dataset.compute_sums(self.model, 0, 1)
            if self.coordinator.finish_exchange() and not ignore_stop:
                return None
            if not self.is_in_training:  # During training, the watchdog's limits follow from the training steps.
                self.watchdog.record_step(time.monotonic() - start_time)
                if self.world.is_rank0 and first_batch // self.world.size % 10 == 0:
                    print(f"evaluating step {step}: batch {first_batch}/{batch_count}", flush=True)
        sums: dict[int, dict[str, float]] = {}
        for rank_sums in groups.all_gather_results(self.group, lambda: sums_of_rank):
            sums |= rank_sums
        return [sums[batch_index] for batch_index in range(batch_count)]


_COUNTED_TOKENS = 1 << 24
"""Number of tokens that are counted at once. `np.bincount` converts these tokens to int64, which takes memory."""
_RESERVED_NAMES = {"step", "loss", "entries", "samples", "checkpoint"}
"""Keys of a result that the metrics of a custom model must not have."""


def _round_to_micro_batches(count: int, micro_batch: int) -> int:
    """Return the largest multiple of `micro_batch` that is at most `count`. Raises UserError if it is 0."""
    if count < micro_batch:
        raise UserError(
            "evaluate.too_few_samples",
            f'a model with LOSS = "batch" is evaluated with train.micro_batch ({micro_batch}) samples at a time, but '
            f"only {count} held-out samples are evaluated: raise data.held_out, train.evaluate_sequences or "
            "evaluate.max_sequences, or lower train.micro_batch",
        )
    return count - count % micro_batch


class SampleHeldOut:
    """The held-out samples of a custom model; if `limit` is given, only the first `limit` samples.

    The loss of a micro-batch (LOSS = "batch") is computed on whole micro-batches, so the last samples may be left out.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        manifest: SampleManifest,
        limit: int | None,
        device: torch.device,
        *,
        is_rank0: bool,
    ) -> None:
        self.task = task
        self.device = device
        self.has_averages = run.config.train.ema is not None
        self.dataset: SampleDataset | DatasetSamples
        if manifest.dataset is not None:
            request = make_dataset_request(run, manifest, HELD_OUT_SPLIT, is_rank0=is_rank0)
            self.dataset = DatasetSamples(request, run.config.evaluate.batch)
        else:
            self.dataset = SampleDataset(manifest, run.data_dir, held_out=True, transform=task.transform)
        self.count = min(len(self.dataset), limit or len(self.dataset))
        if task.has_batch_loss:
            self.count = _round_to_micro_batches(self.count, run.config.train.micro_batch)

    def compute_sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Return the sums of loss and metrics over the samples [start, stop), and the number of loss entries."""
        batch, outputs = self.compute_outputs(model, start, stop)
        entries = self.task.count_loss_entries(batch)
        metrics = self.task.metrics(outputs, batch)
        reserved_prefix = (EMA_PREFIX,) if self.has_averages else ()
        if reserved := [name for name in metrics if name in _RESERVED_NAMES or name.startswith(reserved_prefix)]:
            message = f"model.target: the metric name {min(reserved)} is reserved in an evaluation; choose another name"
            raise UserError("model.reserved_metric", message)
        loss = self.task.loss(outputs, batch)
        entry_count = stop - start if entries is None else entries
        return {name: float(value) for name, value in {"loss": loss, "entries": entry_count, **metrics}.items()}

    def compute_outputs(self, model: nn.Module, start: int, stop: int) -> tuple[Batch, Any]:
        """Return the arrays of the samples [start, stop), and the outputs of the model for them."""
        arrays = self.dataset.read(np.arange(start, stop, dtype=np.int64))
        samples = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        (batch,) = self.task.split_micro_batches(samples, stop - start)  # Trimmed to the longest sample.
        return batch, model(*self.task.model_inputs(batch))

    def compute_result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return the loss and metrics, averaged over the entries of the loss, and the numbers of samples and entries.

        An entry is a sample. If the samples have lengths, an entry is one element of a sample, such as a token.

        Args:
            sums: the results of :meth:`compute_sums` for all batches.
        """
        totals = {name: math.fsum(batch_sums[name] for batch_sums in sums) for name in sums[0]}
        entries = totals.pop("entries")
        means = {name: total / entries for name, total in totals.items()}
        return {**means, "samples": self.count, "entries": int(entries)}


class TextHeldOut:
    """Held-out text, split into windows of `sequence_length` tokens; at most `limit` windows.

    Each token is predicted once. The first token of a file is predicted from an end-of-text token. The first token of
    any other window is predicted from the last token of the previous window. If attention is masked across documents,
    the first token of a document is not predicted.

    The learned text consists of the tokens on which the loss is computed: all tokens, or only the responses.

    Bits per byte (the loss in bits per byte of UTF-8 text) does not depend on the tokenizer. The unigram entropy is
    reported for comparison: a model that knows only the frequencies of the held-out tokens can at best reach this
    value.
    """

    def __init__(
        self,
        run: Run,
        task: TokenTask,
        manifest: Manifest,
        limit: int | None,
        device: torch.device,
        *,
        computes_loss_in_chunks: bool = False,
    ) -> None:
        self.task = task
        self._computes_loss_in_chunks = computes_loss_in_chunks
        """Whether the output layer computes the loss of one window at a time, because its logits would be too large."""
        self.vocab_size = manifest.vocab_size
        self.eos_id = manifest.eos_id
        self.device = device
        self.length = run.config.data.sequence_length
        self._has_mask = run.config.data.has_loss_mask
        # `manifest.held_out` has the files in the order of the sources.
        names = [part.name for part in manifest.parts for _ in range(part.held_out)]
        self._sources = dict(zip((shard.name for shard in manifest.held_out), names, strict=False))
        """Name of a file → name of its source in the mixture; empty without a mixture."""
        shards_by_source: dict[str | None, list[ShardEntry]] = {}
        for shard in manifest.held_out:
            shards_by_source.setdefault(self._sources.get(shard.name), []).append(shard)
        window_counts: list[tuple[ShardEntry, int]] = []
        """Pairs of a file and its number of windows. The windows are not listed, because there may be billions."""
        for source_number, shards in enumerate(shards_by_source.values()):
            # Each source has the same share of the limit. The first sources get one window more if it is not divisible.
            remaining = (limit + len(shards_by_source) - 1 - source_number) // len(shards_by_source) if limit else None
            for shard in shards:
                count = -(-shard.tokens // self.length)
                if remaining is not None:
                    count = min(count, remaining)
                    remaining -= count
                if count:
                    window_counts.append((shard, count))
        self._shards = [shard for shard, _ in window_counts]
        self._first_windows = list(accumulate((count for _, count in window_counts), initial=0))
        """For each file, the index of its first window. The last entry is the total number of windows."""
        self.count = self._first_windows[-1]
        map_file = cache(map_whole_file)
        self._arrays = {shard.name: map_arrays(shard, run.data_dir / shard.file, map_file) for shard in self._shards}
        self._tokens_in_windows = [(shard, min(count * self.length, shard.tokens)) for shard, count in window_counts]
        """Pairs of a file and the number of its tokens that are in windows."""

    def _locate_window(self, number: int) -> tuple[ShardEntry, int]:
        """Return the file of window `number`, and the index in this file of the window's first token."""
        index = bisect_right(self._first_windows, number) - 1
        return self._shards[index], (number - self._first_windows[index]) * self.length

    def _read_batch(self, start: int, stop: int) -> tuple[Batch, Tensor, list[ShardEntry]]:
        """Return the windows [start, stop), their targets (int64, shape (B, T)), and the file of each window.

        The target of a token that is not predicted is `IGNORE_INDEX`.
        """
        shape = stop - start, self.length + 1
        arrays: dict[str, Any] = {"tokens": np.full(shape, self.eos_id, np.int64), "mask": np.zeros(shape, np.uint8)}
        is_padding_BT = np.ones((stop - start, self.length), np.bool_)
        windows = [self._locate_window(number) for number in range(start, stop)]
        for row, (shard, first) in enumerate(windows):
            previous = 1 if first else 0  # Before a file's first token, the array already has an end-of-text token.
            for name, array in self._arrays[shard.name].items():
                values = array[first - previous : first + self.length]
                arrays[name][row, 1 - previous : 1 - previous + len(values)] = values
            is_padding_BT[row, : shard.tokens - first] = False
        names = ("tokens", "mask") if self._has_mask else ("tokens",)
        batch = {name: torch.from_numpy(arrays[name]).to(self.device) for name in names}
        padding_BT = torch.from_numpy(is_padding_BT).to(self.device)
        targets_BT = self.task.next_tokens(batch).masked_fill(padding_BT, IGNORE_INDEX)
        return batch, targets_BT, [shard for shard, _ in windows]

    def compute_outputs(self, model: nn.Module, start: int, stop: int) -> tuple[Batch, Any]:
        """Return the windows [start, stop) with their `targets`, and the logits (B, T, V) of the model for them."""
        batch, targets_BT, _ = self._read_batch(start, stop)
        logits_BTV = model(*self.task.model_inputs(batch), **self.task.document_boundaries(batch))
        return {**batch, "targets": targets_BT}, logits_BTV

    def compute_sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Return the summed loss and the number of tokens of the windows [start, stop), also for each source."""
        batch, targets_BT, shards = self._read_batch(start, stop)
        inputs = self.task.model_inputs(batch)
        boundaries = self.task.document_boundaries(batch)
        if self._computes_loss_in_chunks:
            assert stop - start == 1, "a batch of long windows has one window"
            loss = model(*inputs, targets_BT=targets_BT, **boundaries).item()
        else:
            logits_BTV = model(*inputs, **boundaries)
            loss = cross_entropy_sum(logits_BTV, targets_BT).item()
        sums = {"loss": loss, "tokens": float((targets_BT != IGNORE_INDEX).sum())}
        sources = [self._sources.get(shard.name) for shard in shards]
        for source in filter(None, dict.fromkeys(sources)):
            rows = [row for row, row_source in enumerate(sources) if row_source == source]
            source_loss = loss
            if not self._computes_loss_in_chunks:
                source_loss = cross_entropy_sum(logits_BTV[rows], targets_BT[rows]).item()
            sums[f"{source}.loss"] = source_loss
            sums[f"{source}.tokens"] = float((targets_BT[rows] != IGNORE_INDEX).sum())
        return sums

    def compute_result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return the mean loss and derived metrics, from the sums of all batches.

        `bytes` is the size of the learned text. If attention is masked across documents, the first token of a document
        is not predicted. For the bits per byte, the mean loss is used as the loss of these tokens.
        """
        token_counts, text_bytes = self._count_learned_text()
        text_bytes = max(1, text_bytes)
        tokens = math.fsum(batch_sums["tokens"] for batch_sums in sums)
        positive_counts = token_counts[token_counts > 0].astype(np.float64)
        unigram_bits = float(-(positive_counts * np.log2(positive_counts / positive_counts.sum())).sum())
        loss = math.fsum(batch_sums["loss"] for batch_sums in sums) / max(1, tokens)
        source_losses = {}
        for source in dict.fromkeys(self._sources[shard.name] for shard in self._shards if self._sources):
            source_loss = math.fsum(batch_sums.get(f"{source}.loss", 0.0) for batch_sums in sums)
            source_tokens = math.fsum(batch_sums.get(f"{source}.tokens", 0.0) for batch_sums in sums)
            source_losses[f"{source}.loss"] = source_loss / max(1, source_tokens)
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),  # exp(710) would overflow.
            "bits_per_byte": loss / math.log(2) * float(positive_counts.sum()) / text_bytes,
            "unigram_bits_per_byte": unigram_bits / text_bytes,
            "tokens": int(tokens),
            "bytes": text_bytes,
            **source_losses,
        }

    def _count_learned_text(self) -> tuple[npt.NDArray[np.int64], int]:
        """Return how often each token occurs in the learned text of all windows, and the size of this text in bytes."""
        token_counts = np.zeros(self.vocab_size, np.int64)
        text_bytes = 0
        for shard, token_count in self._tokens_in_windows:
            arrays = self._arrays[shard.name]
            learned_in_file = shard.tokens
            tokens = arrays["tokens"][:token_count]
            if "mask" in arrays:
                is_learned = arrays["mask"] & MASK_LEARNED != 0
                learned_in_file = max(1, int(is_learned.sum()))
                tokens = tokens[is_learned[:token_count]]
            for start in range(0, len(tokens), _COUNTED_TOKENS):
                token_counts += np.bincount(tokens[start : start + _COUNTED_TOKENS], minlength=self.vocab_size)
            # If a limit applies, the bytes of the text in windows are estimated in proportion to its tokens.
            text_bytes += round(shard.bytes * len(tokens) / learned_in_file)
        return token_counts, text_bytes


class TaskFile:
    """One task file, scored as in EleutherAI's lm-evaluation-harness (`multiple_choice` with `acc` and `acc_norm`).

    - In multiple choice, the choice with the highest log-likelihood after the prompt is selected. `accuracy_norm`
      divides the log-likelihood by the length of the choice in characters. Prompt and choice are tokenized together,
      and the tokens after those of the prompt belong to the choice. If both do not fit into `sequence_length`, the
      beginning of the prompt is dropped.
    - A prompt begins with the special tokens with which the training documents begin.
    - A free answer is decoded greedily until the end of a line, or until a token that ends an answer, as `generate`
      does. The answer is correct if it equals the expected answer, except for white space at the beginning and the end.

    The standard error of an accuracy p over n items is sqrt(p (1 - p) / (n - 1)).
    """

    def __init__(
        self,
        file: Path,
        tokenizer: Tokenizer,
        *,
        eos_id: int,
        sequence_length: int,
        sequences_per_pass: int,
        answer_tokens: int,
        is_sharded: bool,
        bos_ids: Sequence[int] = (),
        end_ids: Sequence[int] = (),
    ) -> None:
        """Read the items and tokenize choices.

        Args:
            file: the task file.
            tokenizer: the tokenizer of the model.
            eos_id: the ID of the token that ends a text.
            sequence_length: the maximum number of tokens of a sequence.
            sequences_per_pass: the maximum number of sequences in one forward pass.
            answer_tokens: the maximum number of tokens of a free answer.
            is_sharded: whether the model is sharded. All ranks must then call the model the same number of times.
            bos_ids: the IDs of the special tokens before each prompt.
            end_ids: the IDs of other tokens that end an answer, such as the token that ends an answer of a dialogue.
        """
        self.name = file.stem
        self.items = read_task_file(file)
        self.tokenizer = tokenizer
        self.eos_id = eos_id
        self.sequence_length = sequence_length
        self.is_sharded = is_sharded
        self.answer_tokens = answer_tokens
        self.sequences_per_pass = sequences_per_pass
        self.bos_ids = bos_ids
        self.end_ids = {eos_id, *end_ids}
        self.max_choices = max(1, *(len(item.choices) for item in self.items))
        self.count = len(self.items)
        self.batch_size = max(1, sequences_per_pass // self.max_choices)
        """Number of items that are evaluated together."""
        if not self.items[0].choices and answer_tokens >= sequence_length:
            raise UserError(
                "evaluate.too_long",
                f"evaluate.answer_tokens ({answer_tokens}) must be below data.sequence_length ({sequence_length})",
            )
        if self.items[0].choices:
            self._choices = [[self._encode_choice(item, choice) for choice in item.choices] for item in self.items]

    def compute_sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Return the number of correct answers to the items [start, stop), for each metric."""
        if self.items[start].choices:
            return self._score_choices(model, start, stop)
        items = self.items[start:stop]
        answers = self._generate_answers(model, items)
        correct_count = sum(
            answer.split("\n")[0].strip() == item.answer for item, answer in zip(items, answers, strict=True)
        )
        return {"accuracy": float(correct_count)}

    def compute_result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return the metrics of the file, from the sums of all batches. Their names begin with the name of the file."""
        metrics: dict[str, Any] = {ITEMS_SUFFIX: self.count}
        for name in sums[0]:
            share = math.fsum(batch_sums[name] for batch_sums in sums) / self.count
            metrics[name] = share
            metrics[f"{name}{STDERR_SUFFIX}"] = math.sqrt(share * (1 - share) / max(1, self.count - 1))
        return {f"{self.name}.{name}": value for name, value in metrics.items()}

    def _encode(self, text: str) -> list[int]:
        """Return the token IDs of a prompt, with the special tokens before it."""
        return encode_prompt(self.tokenizer, text, self.bos_ids)

    def _encode_choice(self, item: TaskItem, choice: str) -> tuple[list[int], int]:
        """Return the last `sequence_length` + 1 token IDs of prompt and choice, and the number of tokens of the choice.

        If the prompt is empty and no special tokens precede it, the EOS token is used as the prompt. Raises UserError
        if the choice has no tokens or more than `sequence_length` tokens.
        """
        prompt = item.prompt.rstrip()  # The space before a word may be part of the word's token.
        prompt_ids = self._encode(prompt) or [self.eos_id]
        ids = self._encode(item.prompt + ("" if item.prompt[-1:].isspace() else " ") + choice)
        ids = ids if prompt or self.bos_ids else [self.eos_id, *ids]
        count = len(ids) - len(prompt_ids)
        if not 0 < count <= self.sequence_length:
            raise UserError(
                "evaluate.too_long",
                f"evaluate.tasks: {self.name}: a choice of {count} tokens does not fit into data.sequence_length "
                f"({self.sequence_length}): {choice[:60]!r}",
            )
        return ids[-self.sequence_length - 1 :], count

    def _compute_logits(self, model: nn.Module, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits (B, T, V) of sequences of token IDs, which are padded at the end."""
        max_length = max(map(len, sequences))
        tokens_BT = torch.tensor([[*ids, *[self.eos_id] * (max_length - len(ids))] for ids in sequences])
        logits_BTV: Tensor = model(tokens_BT.to(next(model.parameters()).device))
        return logits_BTV

    def _score_choices(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """Return for how many items the correct choice has the highest log-likelihood.

        `accuracy` compares the log-likelihoods, and `accuracy_norm` compares the log-likelihoods per character. If the
        model is sharded, the number of forward passes is the same for all batches.
        """
        encoded_choices = [choice for choices in self._choices[start:stop] for choice in choices]
        scores: list[float] = []
        for first in range(0, self.batch_size * self.max_choices, self.sequences_per_pass):
            sequences = encoded_choices[first : first + self.sequences_per_pass]
            if not sequences and not self.is_sharded:
                break
            logits_BTV = self._compute_logits(model, [ids[:-1] for ids, _ in sequences] or [[self.eos_id]])
            # Without sequences, `logits_BTV` has a row that is only computed for the other ranks.
            for (ids, count), logits_TV in zip(sequences, logits_BTV, strict=False):
                choice_TV = logits_TV[len(ids) - 1 - count : len(ids) - 1].float().log_softmax(dim=-1)
                choice_ids_T1 = torch.tensor(ids[-count:], device=choice_TV.device)[:, None]
                scores.append(choice_TV.gather(1, choice_ids_T1).sum().item())
        correct_count = 0
        correct_norm_count = 0
        remaining_scores = iter(scores)
        for item in self.items[start:stop]:
            item_scores = [next(remaining_scores) for _ in item.choices]
            norm_scores = [score / len(choice) for score, choice in zip(item_scores, item.choices, strict=True)]
            correct_count += item_scores.index(max(item_scores)) == item.correct_choice
            correct_norm_count += norm_scores.index(max(norm_scores)) == item.correct_choice
        return {"accuracy": float(correct_count), "accuracy_norm": float(correct_norm_count)}

    def _generate_answers(self, model: nn.Module, items: Sequence[TaskItem]) -> list[str]:
        """Return the greedily decoded answers, up to the end of a line or a text, or up to `answer_tokens` tokens."""
        max_prompt_tokens = self.sequence_length - self.answer_tokens
        sequences = [(self._encode(item.prompt) or [self.eos_id])[-max_prompt_tokens:] for item in items]
        prompt_lengths = [len(ids) for ids in sequences]
        answers = [""] * len(sequences)
        is_complete = [False] * len(sequences)
        for _ in range(self.answer_tokens):
            if all(is_complete) and not self.is_sharded:
                break
            logits_BTV = self._compute_logits(model, sequences)
            for index, ids in enumerate(sequences):
                token = int(logits_BTV[index, len(ids) - 1].argmax())
                if is_complete[index]:
                    continue
                # The end token is not part of the answer, even if the tokenizer does not treat it as a special token.
                if token in self.end_ids:
                    is_complete[index] = True
                    continue
                ids.append(token)
                # White space before the answer is removed, so a line end there does not complete the answer.
                answers[index] = self.tokenizer.decode(ids[prompt_lengths[index] :]).lstrip()
                is_complete[index] = "\n" in answers[index]
        return answers
