"""The training loop, from top to bottom: build, restore, step, save, stop.

`Trainer.step` is one optimizer step and fits on a screen. What makes a run exact (contract 3) stands here in
three places: the batch of a step is a function of `samples_consumed` alone (pipeline/data/sample_order.py); a step's
gradients are a function of weights, batch, step number and layout (engine.py); and a checkpoint is taken at step
boundaries only, by all ranks together.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from pipeline.base.dist_env import RankInfo, read_time_left
from pipeline.base.errors import CheckpointError, ExitCode
from pipeline.base.files import read_last_object
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.catalog import describe_missing_checkpoints
from pipeline.checkpoint.checkpointer import Checkpointer, collect_versions
from pipeline.checkpoint.identity import (
    check_identity,
    compute_identity,
    compute_source_identity,
    describe_version_changes,
)
from pipeline.comm import groups
from pipeline.data.loader import Batches, GlobalOrderSampler
from pipeline.data.local_copy import LocalCopies
from pipeline.data.manifest import Manifest, SampleManifest, steps_of
from pipeline.data.sample_order import epoch_words, mixture_of
from pipeline.data.samples import MappedDataset, SampleDataset, TokenDataset
from pipeline.data.verify_shards import verify_shards
from pipeline.evaluate.evaluator import Evaluator
from pipeline.evaluate.result import HELD_OUT_PREFIX, format_held_out, get_extra_metrics
from pipeline.model.task import Batch, DecoderTask, make_task
from pipeline.parallel.mesh import check_warmup, describe_layout_identity, resolve_layout
from pipeline.parallel.traffic import count_traffic
from pipeline.publish.open_weights import open_weights
from pipeline.resilience.guard import BadStepGuard, select_recent_metrics
from pipeline.resilience.stop import Deadline, RequestFile, StopCoordinator
from pipeline.resilience.stragglers import LocalComputeTimer, StragglerDetector
from pipeline.resilience.watchdog import Watchdog
from pipeline.run import lines
from pipeline.run.directory import Run
from pipeline.run.metrics import Metrics, lost_lines, rewind
from pipeline.train.engine import Engine
from pipeline.train.lr_schedule import compute_learning_rate
from pipeline.train.meter import ExposedCommMeter, measure_peak_memory
from pipeline.train.optimizer import set_learning_rate
from pipeline.train.profiler import Profiler


class Trainer:
    """One rank of one attempt of one training."""

    def __init__(
        self,
        run: Run,
        manifest: Manifest | SampleManifest,
        place: RankInfo,
        world: groups.World,
        flag: StopFlag,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Build everything and restore the newest checkpoint. `watchdog`: one that was started; none watches here."""
        config = run.config
        self.run, self.config, self.place, self.world = run, config, place, world
        vocab = manifest.vocab_size if isinstance(manifest, Manifest) else None
        self.layout = resolve_layout(config, world.size, place.local_world_size, vocab)
        self.task = make_task(run, manifest)
        counted: Iterable[tuple[str, int, str]] = ()
        if isinstance(self.task, DecoderTask):  # nothing is known about the shapes of a custom model
            counted = count_traffic(config, self.layout, self.task.vocab_size)
        self.sent_bytes = {group: size for group, size, _ in counted}
        """What a rank sends in a step, by group, as `plan` counts."""
        own = config.optimizer.schedule == "own"
        self.learning_rate = self.task.user_module.learning_rate if own else compute_learning_rate
        self.clock = Deadline(flag, read_time_left(os.environ), config.recovery.grace_s)
        self.agreement = StopCoordinator(flag, groups.new_control_group(), self.clock)
        self.save_request = RequestFile(run.save_file)
        self.profiler = Profiler(run, self.layout, world, self.agreement)
        if world.is_rank0:
            self.agreement.wants_save, self.agreement.wants_profile = self.save_request, self.profiler.request
        self.watchdog = watchdog or Watchdog(run, "train", place, flag)
        self.own = LocalComputeTimer(world.device)
        peers = [self.layout.coordinates(rank).pp for rank in range(world.size)]
        self.stragglers = StragglerDetector(run, self.agreement.group, peers)
        self.checkpointer = Checkpointer(
            run.checkpoints_dir,
            groups.new_control_group(),
            keep=config.checkpoint.keep,
            background=config.checkpoint.mode == "async",
            describe={
                "layout": describe_layout_identity(self.layout, config, world.backend, world.device.type),
                **compute_identity(config, manifest),
            },
            on_saved=self._log_saved,
        )
        verify_shards(run, manifest.train, self.checkpointer.group, how=config.data.verify)
        self.dataset: MappedDataset
        if isinstance(manifest, SampleManifest):
            self.dataset = SampleDataset(manifest, run.data_dir, transform=self.task.transform, seed=config.run.seed)
        else:
            self.dataset = TokenDataset(manifest.train, config.data.sequence_length, run.data_dir)
        self.steps = steps_of(config, run.data_dir) or 0
        check_warmup(config, self.steps)
        fresh = not self.checkpointer.found()
        if fresh:
            groups.all_gather_results(self.checkpointer.group, self._refuse_gone)
        source = open_weights(run, self.task, self.checkpointer.group) if fresh else None
        self.engine = Engine(config, self.layout, world, self.task, self.own, fresh=fresh, source=source)
        if source is not None:
            source.note()
        self.checkpointer.describe |= compute_source_identity(run)
        self.evaluator: Evaluator | None = None
        if config.train.evaluate_every is not None:
            self.evaluator = Evaluator(run, manifest, world, flag, self.watchdog, self.agreement)
        self.meter = ExposedCommMeter(self.engine.model, world)
        self.samples_consumed = 0
        self.start_step = self._restore(fresh)
        self.guard = self._make_guard()
        self.mixture = mixture_of(config, manifest, self.guard.left_out)
        self.metrics = Metrics(run.metrics_file if world.is_rank0 else None)
        self._checkpoint_s = self._evaluate_s = 0.0
        self.startup_s: Mapping[str, float] = {}
        """What the start of rank 0 took, by part."""

    # -- one step ----------------------------------------------------------------------------------------

    def step(self, step: int, batch: Batch) -> dict[str, Any]:
        """Optimizer step number `step` (from 1) on this rank's part of the global batch; the step's line of metrics.

        batch: global_batch / data parallel size samples, by array, such as `tokens` (int64, shape (B, T + 1)).
        """
        config, engine = self.config, self.engine
        lr = self.learning_rate(config.optimizer, step, self.steps)
        set_learning_rate(engine.optimizer, lr)
        measure_peak_memory(self.world.device)  # of the start, of a look at held-out data, of a save
        mean_loss = engine.backward(batch, step, lambda phase: self._enter(step, phase), self.agreement.hand)
        self.meter.reduced()
        grad_norm = engine.clip(config.optimizer.clip_norm)
        # the one moment at which a GPU is waited for: nothing may change the weights before the numbers are known
        loss, norm = torch.stack([mean_loss, grad_norm.double()]).tolist()
        self.agreement.save = self.agreement.profile = False
        if math.isnan(loss):  # on all ranks alike: one of them has something to say, or the loss is not a number
            self.agreement.start()
            self.agreement.stop()
            loss = engine.loss_again().item()
        scaled = engine.scaler is not None and engine.scaler.scale > 1
        overflow = scaled and not math.isfinite(norm)  # the scaler leaves such a step out, and tries a smaller scale
        bad = self.guard.judge(step, loss, 0.0 if overflow else norm)
        self.checkpointer.wait_staged()
        engine.update(norm, good=bad is None)
        self.samples_consumed += config.train.global_batch
        line = {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "samples_consumed": self.samples_consumed}
        line |= {self.task.unit: step * self.task.units_per_step, **self.meter.take()}
        line |= measure_peak_memory(self.world.device)
        return line if bad is None else {**line, "skipped": bad}

    def _enter(self, step: int, phase: str) -> None:
        """Tell the watchdog; the first step after a start compiles, and belongs to the start-up."""
        self.watchdog.enter(step, "start" if step == self.start_step + 1 else phase)

    # -- the loop ----------------------------------------------------------------------------------------

    def fit(self) -> ExitCode:
        """Train from where the run stands to the last step, or until all ranks agree to stop."""
        config = self.config.train
        if self.start_step >= self.steps:
            return ExitCode.DONE
        self.agreement.start()
        if self.agreement.stop():  # asked to stop during start-up: nothing new to save
            return ExitCode.STOPPED
        sampler = GlobalOrderSampler(
            self.dataset,
            global_batch=config.global_batch,
            seed=self.config.run.seed,
            samples_consumed=self.samples_consumed,
            left_out=self.guard.left_out,
            num_replicas=self.layout.dp,
            rank=self.layout.coordinates(self.world.rank).dp,
            order=self.mixture.indices if self.mixture else None,
        )
        key = groups.broadcast_from_rank0(self.agreement.group, secrets.token_hex(8))
        tell = partial(self.run.event, stage="train") if self.place.local_rank == 0 else None
        copies = LocalCopies(self.dataset, self.run.data_dir, self.config.site.local_disk, key, tell)
        with copies, contextlib.closing(Batches(self.dataset, sampler, self.world.device)) as batches:
            return self._loop(iter(batches), batches)

    def _loop(self, ready: Iterator[Batch], batches: Batches) -> ExitCode:
        steps, every = self.steps, self.config.checkpoint.every_steps
        if self.world.is_rank0:
            how = {"communication": self.world.transport, "sent_bytes": self.sent_bytes}
            told = {key: value for key, value in how.items() if value} | measure_peak_memory(self.world.device)
            if self.mixture:
                at_end = self.mixture.epochs(self.config.train.global_batch * steps)
                now, weights = self.mixture.epochs(self.samples_consumed), self.mixture.weights.model_dump()["weights"]
                self.run.event("mixture", "train", weights=weights, epochs=now, epochs_at_the_end=at_end)
                self._print(f"epochs of each source by step {steps}: {epoch_words(at_end)}; so far: {epoch_words(now)}")
            self.run.event("ready", "train", step=self.start_step, startup_s=self.startup_s, **told)
        previous_end = time.perf_counter()
        if not self._make_up():
            return ExitCode.STOPPED
        for step in range(self.start_step + 1, steps + 1):
            self._enter(step, "data")
            self.profiler.begin(step)
            line = self.step(step, next(ready))
            line |= self.profiler.end(step, kept=self.agreement.reason is None)
            line |= self._held_out(step)
            end, other_s = time.perf_counter(), self._checkpoint_s + self._evaluate_s + self.profiler.seconds
            self.metrics.write(line | self._rates(end - previous_end, batches.data_wait_s))
            self._look_back(step, end - previous_end - other_s, batches.data_wait_s, line)
            previous_end = end
            if self.agreement.profile:
                self.profiler.ask()
            if self.agreement.reason is not None and step < steps:
                return self._leave(step)
            due = step % every == 0 or self.agreement.save
            if step == steps or (due and not self.guard.in_a_row):  # a row of bad steps may end in a return
                self.save(step)
        self.watchdog.enter(steps, "save")
        self.checkpointer.close()
        return ExitCode.DONE

    def _held_out(self, step: int) -> dict[str, float]:
        """What the line of `step` says of held-out data; nothing where it is not due, or where all agreed to stop.

        Nobody comes back to the last step: it is looked at in any case.
        """
        every, last = self.config.train.evaluate_every, step == self.steps
        if self.evaluator is None or every is None or step % every or (self.agreement.reason is not None and not last):
            return {}
        started = time.perf_counter()
        self._enter(step, "held-out")
        self.engine.copy_weights(self.evaluator.model, self.evaluator.group)
        found = self.evaluator.measure(step, to_the_end=last)
        self._evaluate_s += time.perf_counter() - started
        if found is None:
            return {}
        line = {
            f"{HELD_OUT_PREFIX}{name}": value
            for name, value in {"loss": found["loss"], **get_extra_metrics(found)}.items()
        }
        self._print(f"step {step}: {format_held_out(line)}")
        return line

    def _make_up(self) -> bool:
        """Look at held-out data after the restored step, where a stop came first; False where one comes again."""
        step, lacks = self.start_step, False
        if self.evaluator is not None and step and self.world.is_rank0:
            line = read_last_object(self.run.metrics_file, lines.metric) or {}
            lacks = line.get("step") == step and f"{HELD_OUT_PREFIX}loss" not in line
        if self.evaluator is None or not groups.broadcast_from_rank0(self.agreement.group, lacks):
            return True
        if (more := self._held_out(step)) and self.world.is_rank0:
            self.run.event("held_out", "train", step=step, **more)  # first: who reads on takes the figures from it
            rewind(self.run.metrics_file, step, more)
            self.metrics = Metrics(self.run.metrics_file)  # it is a new file
        return self.agreement.reason is None

    def _look_back(self, step: int, seconds: float, data_wait_s: float, line: Mapping[str, Any]) -> None:
        """What a step leaves behind beside its line: limits that follow its time, stragglers, words in the log."""
        self.clock.stepped(seconds)
        self.watchdog.stepped(seconds)
        self.own.add(data_wait_s)
        if step % self.config.train.log_every == 0:
            self.stragglers.gather(step, self.own.take())
        if "skipped" in line:
            self._print(f"step {step} is left out: {line['skipped']}")
        elif step % self.config.train.log_every == 0 or step == 1:
            speed = f"{self.task.units_per_step / seconds:,.0f} {self.task.unit}/s"
            self._print(
                f"step {step}/{self.steps}  loss {line['loss']:.4f}  grad norm {line['grad_norm']:.3f}  "
                f"lr {line['lr']:.2e}  {speed}"
            )

    def _leave(self, step: int) -> ExitCode:
        """The ranks agreed to stop after `step`: save, where there is time for it."""
        why_not = None
        if self.agreement.too_late:
            why_not = f"too late to save: a save takes {self.clock.save_s:.1f} s"
        elif self.guard.in_a_row:
            why_not = "in a row of bad steps, which may end in a return"
        if self.world.is_rank0:
            self.run.event("stop_requested", "train", step=step, signal=self.agreement.reason)
            if why_not is not None:
                self.run.event("save_skipped", "train", step=step, reason=why_not)
        if why_not is None:
            self.save(step)
        self.watchdog.enter(step, "save")
        self.checkpointer.close()
        self._print(f"stopped after step {step}, " + (f"{why_not}; the last checkpoint counts" if why_not else "saved"))
        return ExitCode.STOPPED

    def _rates(self, step_s: float, data_wait_s: float) -> dict[str, Any]:
        per_s = self.task.units_per_step / step_s
        values = {
            "time": round(time.time(), 3),
            "step_time_s": round(step_s, 6),
            "data_wait_s": round(data_wait_s, 6),
            f"{self.task.unit}_per_s": round(per_s, 1),
            **({"tflops": round(per_s * self.task.flops_per_unit / 1e12, 6)} if self.task.flops_per_unit else {}),
        }
        spent = {"checkpoint_s": self._checkpoint_s, "evaluate_s": self._evaluate_s, "profile_s": self.profiler.seconds}
        values |= {name: round(seconds, 6) for name, seconds in spent.items() if seconds}
        self._checkpoint_s = self._evaluate_s = self.profiler.seconds = 0.0
        return values

    # -- state -------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Begin a checkpoint of the state after `step`; the step's metrics are written first."""
        started = time.perf_counter()
        self._enter(step, "save")
        self.metrics.sync()
        self.checkpointer.finish()
        self.clock.saving = True
        self.save_request.begun()
        state, replicas = self.engine.saved_state()
        extra = {"scaler": self.engine.scaler.state() if self.engine.scaler else {}, "replicas": replicas}
        self.checkpointer.save(state, step=step, samples_consumed=self.samples_consumed, extra=extra)
        self._checkpoint_s += time.perf_counter() - started

    def _refuse_gone(self) -> None:
        """Raise CheckpointError, on rank 0, where a training would begin anew because its checkpoints went away."""
        if not self.world.is_rank0:
            return
        if words := describe_missing_checkpoints(self.run):
            raise CheckpointError(words)

    def _restore(self, fresh: bool) -> int:
        """Take up the newest intact checkpoint; the step it holds, 0 for a `fresh` start."""

        def on_damaged(step: int, reason: str) -> None:
            self._print(f"WARNING: {reason}; step {step} is set aside, trying the one before")
            self.run.event("damaged", "train", step=step, reason=reason)

        fits = partial(
            check_identity, now=self.checkpointer.describe
        )  # first: other weights may not even have its shape
        started = time.perf_counter()
        notes: dict[str, str | None] = {}
        manifest: Mapping[str, Any] | None = self.checkpointer.restore(self.engine.state(), on_damaged, fits)
        step = int(manifest["step"]) if manifest else 0
        if manifest is None:
            if not fresh:  # weights were not drawn
                raise CheckpointError(
                    f"the checkpoints in {self.run.checkpoints_dir} went away during the start; try again"
                )
            self.engine.begin_anew()
            if self.world.is_rank0 and self.run.read_events("train", "saved", "restored"):
                self.run.event("began_anew", "train")
        else:
            self.samples_consumed = int(manifest["samples_consumed"])
            read = partial(self.checkpointer.read, step)
            notes["replicas"] = self.engine.loaded(manifest["extra"].get("replicas"), read)
            notes["versions"] = describe_version_changes(manifest["versions"], collect_versions())
            if manifest["extra"]["scaler"] and self.engine.scaler is not None:
                self.engine.scaler.load(manifest["extra"]["scaler"])
        if self.world.is_rank0:
            saves = [event.get("seconds") for event in self.run.read_events("train", "saved")]
            self.clock.save_s = next((seconds for seconds in reversed(saves) if seconds), 0.0)
            if words := lines.odd(self.run.metrics_file, lines.metric):
                self._print(f"WARNING: {words}")
            lost = lost_lines(self.run.metrics_file, step)
            if lost:  # noted before it is cut, so that no crash in between loses it twice
                self.run.event("lost_work", "train", steps=[line["step"] for line in lost], lines=lost)
            rewind(self.run.metrics_file, step)
            if step:
                seconds = round(time.perf_counter() - started, 3)
                more = {name: note for name, note in notes.items() if note}
                self.run.event("restored", "train", step=step, seconds=seconds, lost_steps=len(lost), **more)
                again = f", {len(lost)} steps are done again" if lost else ""
                self._print("; ".join([f"restored step {step}{again}", *more.values()]))
        return step

    # -- words -------------------------------------------------------------------------------------------

    def _make_guard(self) -> BadStepGuard:
        """The judge of bad numbers, from what rank 0 reads of the steps before."""

        def read() -> tuple[list[Any], list[Any]]:
            if not self.world.is_rank0:
                return [], []
            metrics = select_recent_metrics(lines.read(self.run.metrics_file, lines.metric))
            return lines.read_all(self.run.decisions_file, lines.decision), metrics

        decisions, metrics = groups.all_gather_results(self.agreement.group, read)[0]
        return BadStepGuard(self.run, decisions=decisions, metrics=metrics, writes=self.world.is_rank0)

    def _log_saved(self, step: int, seconds: float) -> None:
        self.clock.save_s, self.clock.saving = max(self.clock.save_s, seconds), False
        self.save_request.done()
        self.run.event("saved", "train", step=step, seconds=round(seconds, 3))
        self._print(f"saved step {step} ({seconds:.2f} s)")

    def _print(self, text: str) -> None:
        if self.world.is_rank0:
            print(text, flush=True)
