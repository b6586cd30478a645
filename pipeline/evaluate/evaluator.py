"""Held-out loss of a checkpoint, the same number whatever the number of ranks.

The held-out tokens are cut into windows of `sequence_length`, the windows into batches of `evaluate.batch`, or of as
many as have 2 GiB of logits: a vocabulary of 128k and windows of 8k take 4.2 GB for each window.
Batch b belongs to rank b mod ranks, so a batch holds the same windows on any layout and its loss is the same
bits; the sums are gathered and added in batch order, in double precision. Each token is predicted once: the
first of a file from the end-of-text token, the first of any other window from the last token before it.
Where training splits the model, one rank may not hold it, and evaluation splits it too: by ZeRO 3, on all ranks.

A model of the user's own is evaluated the same way on its held-out samples (pipeline/data/samples.py).

Bits per byte (loss in bits, per byte of UTF-8 text) does not depend on the tokenizer. Beside it stands the
unigram figure: the entropy of the held-out tokens' own frequencies, in bits per byte: what a model that knew the
frequencies of tokens, and nothing of their order, could reach at best.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from pipeline.base.errors import CheckpointError
from pipeline.base.files import seal, write_json
from pipeline.base.signals import StopFlag
from pipeline.checkpoint import catalog
from pipeline.checkpoint.identity import identity, refuse_other, source_identity
from pipeline.checkpoint.model_tokens import model_tokens
from pipeline.checkpoint.save import load, verified
from pipeline.comm import groups
from pipeline.config.hugging_face import TOKENIZER
from pipeline.data.manifest import Manifest, SampleManifest
from pipeline.data.special_tokens import load_tokenizer
from pipeline.data.verify_shards import verify_shards
from pipeline.evaluate.held_out import SampleHeldOut, TextHeldOut
from pipeline.evaluate.result import result_file, result_words
from pipeline.evaluate.tasks import TaskFile
from pipeline.model.task import DTYPES, make_task
from pipeline.parallel.data_parallel import apply_fsdp
from pipeline.resilience.stop import Agreement
from pipeline.resilience.watchdog import Watchdog
from pipeline.run.directory import Run

LOGITS_BYTES = 2 << 30
"""Of one forward pass, in fp32; with the model's own and the softmax it takes 2 to 3 times as much."""


class Evaluator:
    """One rank of an evaluation; builds the model once and loads one checkpoint after another into it.

    In a training (`within`: its agreement) it measures what the trainer puts into `model`, on so much of what is held
    out as `train.evaluate_sequences` says.
    """

    def __init__(
        self,
        run: Run,
        manifest: Manifest | SampleManifest,
        world: groups.World,
        flag: StopFlag,
        watchdog: Watchdog,
        within: Agreement | None = None,
    ) -> None:
        self.run, self.world, self.watchdog, self.within = run, world, watchdog, within
        self.group = groups.new_control_group()
        self.agreement = within or Agreement(flag, groups.new_control_group())
        config = run.config
        verify_shards(run, manifest.held_out, self.group, how=config.data.verify)
        self.identity = identity(config, manifest)
        if within is None:  # a training that begins notes later what it begins with
            self.identity |= source_identity(run)
        self.task = task = make_task(run, manifest)
        model = task.build(range(config.model.layers))
        parallel = config.parallel
        self.split = world.size > 1 and (parallel.zero == 3 or parallel.tensor > 1 or parallel.pipeline > 1)
        if self.split:  # one rank may not hold it: blocks are gathered as they compute, so results stay the same bits
            mesh, dtype = init_device_mesh(world.device.type, (world.size,)), DTYPES.get(config.train.precision)
            apply_fsdp(model, task.shard_groups(model), mesh, dtype, free_after_forward=True)
        self.model = model.to_empty(device=world.device).eval()
        task.fill(self.model, world.device, draw=False)  # a checkpoint's weights come, or the training's
        self.batch = config.evaluate.batch
        self.held_out: TextHeldOut | SampleHeldOut
        limit = config.evaluate.max_sequences if within is None else config.train.evaluate_sequences
        if isinstance(manifest, Manifest):
            window_bytes = 4 * config.data.sequence_length * task.vocab_size
            self.batch = min(self.batch, max(1, LOGITS_BYTES // window_bytes))
            self.held_out = TextHeldOut(run, task, manifest, limit, world.device)
        else:
            self.held_out = SampleHeldOut(run, task, manifest, limit, world.device)
        self.tasks: list[TaskFile] = []
        if within is None and isinstance(manifest, Manifest) and config.evaluate.task_files:
            tokenizer = load_tokenizer(run.data / TOKENIZER)
            length, most = config.data.sequence_length, config.evaluate.answer_tokens
            options = tokenizer, manifest.eos_id, length, self.batch, most, self.split
            with_end = load_tokenizer(run.data / TOKENIZER, config.data.tokenizer.eos_token)
            bos_ids, end_ids = manifest.bos_ids, model_tokens(run, manifest, with_end).end_ids
            self.tasks = [
                TaskFile(file, *options, bos_ids=bos_ids, end_ids=end_ids) for file in config.evaluate.task_files
            ]

    def evaluate(self, step: int) -> bool:
        """Evaluate the checkpoint of `step` and write its file; False where the ranks agreed to stop before."""
        checkpoint = self.run.checkpoints / catalog.step_name(step)
        try:
            sealed = verified(checkpoint, self.group)
        except CheckpointError as error:
            if self.world.first:  # so that training counts as not done, and goes on from the one before
                catalog.set_aside(self.run.checkpoints, step)
                self.run.event("damaged", "evaluate", step=step, reason=str(error))
            raise
        refuse_other(sealed, self.identity)
        load({f"model.{n}": p.detach() for n, p in self.task.weights(self.model)}, checkpoint, self.group)
        found = self.measure(step)
        if found is None:
            return False
        if self.world.first:
            result = {**found, "checkpoint": sealed["sha256"]}
            write_json(result_file(self.run, step), seal(result))
            known = {key: result[key] for key in ("loss", "bits_per_byte") if key in result}
            self.run.event("evaluated", "evaluate", step=step, **known)
            print(result_words(result), flush=True)
        return True

    @torch.no_grad()
    def measure(self, step: int, *, to_the_end: bool = False) -> dict[str, Any] | None:
        """The result, on every rank, of the weights that `model` has now, those after `step`.

        None where the ranks agreed to stop, unless it goes `to_the_end`.
        """
        found = self._measured(self.held_out, self.batch, step, to_the_end)
        for task in self.tasks:
            if found is not None:
                more = self._measured(task, task.batch, step, to_the_end)
                found = None if more is None else found | more
        self.watchdog.enter(step, "start")  # what comes now, another checkpoint too, depends on storage
        return None if found is None else {"step": step, **found}

    def _measured(
        self, held_out: TextHeldOut | SampleHeldOut | TaskFile, size: int, step: int, to_the_end: bool
    ) -> dict[str, Any] | None:
        """What the sums of all batches of `size` come to; None where the ranks agreed to stop."""
        count = held_out.count
        batches = -(-count // size)
        mine: dict[int, dict[str, float]] = {}
        for first in range(0, batches, self.world.size):
            began = time.monotonic()
            self.watchdog.enter(step, "batch")
            self.agreement.start()
            number = first + self.world.rank
            if number < batches:
                mine[number] = held_out.sums(self.model, number * size, min((number + 1) * size, count))
            elif self.split:  # the others gather weights from this rank too
                held_out.sums(self.model, 0, 1)
            if self.agreement.stop() and not to_the_end:
                return None
            if self.within is None:  # the limits of a training follow its steps
                self.watchdog.stepped(time.monotonic() - began)
                if self.world.first and first // self.world.size % 10 == 0:
                    print(f"evaluating step {step}: batch {first}/{batches}", flush=True)
        merged: dict[int, dict[str, float]] = {}
        for part in groups.all_gather_results(self.group, lambda: mine):
            merged |= part
        return held_out.result([merged[number] for number in range(batches)])
