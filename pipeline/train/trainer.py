"""The training loop: build, restore, step, save, stop.

An interrupted run gives the same result as an uninterrupted one (contract 3 in docs/architecture.md), because:

- the batch of a step depends only on `samples_consumed` (pipeline/data/sample_order.py);
- the gradients of a step depend only on weights, batch, step number and layout (pipeline/train/engine.py);
- all ranks save a checkpoint together, only between steps.

Callbacks do the work around a step, such as metrics, profiles and evaluations (`Trainer._make_callbacks`).
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.base.dist_env import RankInfo, read_time_limit_s
from pipeline.base.errors import CheckpointError, ExitCode, UserError
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.catalog import completes_stage, describe_missing_checkpoints, find_newest_step
from pipeline.checkpoint.checkpointer import Checkpointer, collect_versions
from pipeline.checkpoint.identity import (
    check_identity,
    compute_identity,
    compute_source_identity,
    describe_version_changes,
)
from pipeline.checkpoint.memory_snapshot import MemorySnapshots, open_snapshots
from pipeline.checkpoint.saver import open_saver, wait_for_previous_savers
from pipeline.checkpoint.writer import append_saved_event
from pipeline.comm import groups
from pipeline.config.sections import LengthConfig, check_warmup
from pipeline.data.dataset import TRAIN_SPLIT
from pipeline.data.dataset_pool import DatasetLoader, DatasetSamples, StreamOrder, make_dataset_request
from pipeline.data.loader import Batch, BatchLoader
from pipeline.data.local_copy import LocalCopies
from pipeline.data.manifest import Manifest, SampleManifest, count_training_steps
from pipeline.data.sample_order import (
    GlobalOrderSampler,
    Mixture,
    build_mixture,
    find_order_shift,
    format_epochs,
)
from pipeline.data.samples import DocumentEnds, MappedDataset, SampleDataset, TokenDataset
from pipeline.data.stream_state import gather_states, select_states
from pipeline.data.verify_shards import verify_dataset_files, verify_shards
from pipeline.evaluate.evaluator import Evaluator
from pipeline.model.lora import hash_weights
from pipeline.model.make_task import make_task
from pipeline.model.open_weights import open_initial_weights
from pipeline.model.spec import count_windows
from pipeline.model.task import DecoderTask, TokenTask
from pipeline.parallel.mesh import describe_layout_identity, resolve_layout
from pipeline.parallel.traffic import count_traffic
from pipeline.resilience.guard import BadStepGuard
from pipeline.resilience.stop import EARLY_STOP_REQUEST, SAVE_REQUEST, Deadline, SaveRequests, StopCoordinator
from pipeline.resilience.stragglers import LocalComputeTimer, StragglerDetector
from pipeline.resilience.watchdog import Watchdog
from pipeline.run import lines
from pipeline.run.directory import Run
from pipeline.run.events import (
    Damaged,
    LostWork,
    MixtureReport,
    Paused,
    Ready,
    RestartedFromScratch,
    Restored,
    Saved,
    SaveSkipped,
    StoppedEarly,
    StopRequested,
    read_stage_state,
)
from pipeline.run.images import ImageWriter, unpack_image
from pipeline.run.metrics import is_step_line, list_lost_lines, rewind_metrics
from pipeline.run.origin import read_order_start, read_origin
from pipeline.train.callback import Callback, CallbackList, make_user_callbacks
from pipeline.train.early_stopping import EarlyStopping
from pipeline.train.engine import Engine
from pipeline.train.lr_schedule import compute_learning_rate
from pipeline.train.metrics import (
    ExposedCommMeter,
    HeldOutEvaluation,
    MetricsWriter,
    PeakMemory,
    ProgressLog,
    measure_peak_memory,
)
from pipeline.train.optimizer import set_learning_rate
from pipeline.train.profiler import Profiler
from pipeline.train.training_step import StepHooks, run_training_step


class Trainer:
    """Trains the model on one rank, in one attempt.

    The constructor restores the newest intact checkpoint, if there is one. The constructor, `fit`, `step` and `save`
    communicate, so all ranks must call them together.

    Args:
        run: the run.
        manifest: describes the shards in the run directory.
        rank_info: the rank of this process and the world size, as the launcher set them.
        world: the process group of all ranks, which this rank has joined.
        flag: set by the signals that request a stop.
        watchdog: a watchdog that is already running; None if no thread should check this rank for hangs.
    """

    def __init__(
        self,
        run: Run,
        manifest: Manifest | SampleManifest,
        rank_info: RankInfo,
        world: groups.World,
        flag: StopFlag,
        watchdog: Watchdog | None = None,
    ) -> None:
        config = run.config
        self.run = run
        self.config = config
        self.rank_info = rank_info
        self.world = world
        self.rank = world.rank
        self.device = world.device
        self.manifest = manifest
        vocab_size = manifest.vocab_size if isinstance(manifest, Manifest) else None
        self.layout = resolve_layout(config, world.size, rank_info.local_world_size, vocab_size)
        self.task = make_task(run, manifest)
        """Builds the model and computes its loss. Not related to the tasks of a Slurm job array."""
        # The number of steps is only unknown if there are no shards, but `manifest` describes existing shards.
        self.steps = count_training_steps(config, run.data_dir) or 0
        check_warmup(config, self.steps)
        has_custom_schedule = config.optimizer.schedule == "own"  # The user's module defines the schedule.
        self.compute_learning_rate = (
            self.task.user_module.learning_rate if has_custom_schedule else compute_learning_rate
        )
        self.deadline = Deadline(flag, read_time_limit_s(os.environ), config.recovery.grace_s)
        self.coordinator = StopCoordinator(flag, groups.new_control_group(), self.deadline)
        # A watchdog whose thread is never started records phases and does nothing else.
        self.watchdog = watchdog or Watchdog(run, "train", rank_info, flag)
        self.compute_timer = LocalComputeTimer(world.device)
        self.checkpointer = self._make_checkpointer()
        verify_shards(run, manifest.train, self.checkpointer.group, mode=config.data.verify)
        verify_dataset_files(manifest, self.checkpointer.group)
        self.dataset = self._make_dataset(config.data.sequence_length)
        from_scratch = not self.checkpointer.has_checkpoint()
        self.engine = self._make_engine(from_scratch)
        self.samples_consumed = 0
        """The number of samples of the global batches of all steps so far, also of previous attempts."""
        self.step_s = 0.0
        """Duration of the latest step in seconds, without `overhead_s`."""
        self.data_wait_s = 0.0
        """Seconds for which the latest step waited for its batch."""
        self.overhead_s: dict[str, float] = {}
        """Seconds since the metrics of the previous step that were spent on other work, by name, such as
        `evaluate_s`."""
        self.startup_s: Mapping[str, float] = {}
        """Seconds that each part of this rank's start-up took. Rank 0 writes them to the event `ready`."""
        self.update_number: int | None = None
        """While a `training_step` of the user updates weights: the index of the update in the step, from 0. Otherwise
        None."""
        self.requested_stop_reason: str | None = None
        """The reason that a callback passed to `request_stop`; None if no callback requested a stop."""
        self.early_stop: dict[str, Any] | None = None
        """The entry of the checkpoint that `read_early_stop` describes (pipeline/checkpoint/catalog.py), if a callback
        completed the run early; None otherwise."""
        self._may_request_stop = False
        """Whether there are callbacks that may call `request_stop`."""
        self.early_stopping: EarlyStopping | None = None
        """The callback of `train.early_stopping`; None without this section."""
        self.held_out: HeldOutEvaluation | None = None
        """Evaluates during the training; None without `train.evaluate_every`."""
        self._has_noted_count = False
        """Whether the log says that `compute_held_out_outputs` yields fewer samples than a callback requested."""
        self._images = ImageWriter(run.path, self.log)
        self.pause_step = groups.broadcast_from_rank0(self.coordinator.group, run.pause_step)
        """The step at which the train stage pauses, if the run is a trial of a search; None otherwise."""
        self._stream: DatasetLoader | None = None
        """The loader of an iterable dataset; None without one."""
        self._saved_stream: Mapping[str, Any] | None = None
        """The states of the iterable dataset in the restored checkpoint (`gather_states`); None without them."""
        self._snapshot_interval = config.checkpoint.memory_every_steps
        self.snapshots: MemorySnapshots | None = None
        """The snapshots of this rank in memory; None without node agents, or if the config requests no snapshots."""
        if self._snapshot_interval is not None or self.checkpointer.background:
            entries = self.checkpointer.manifest_entries
            # A background save uses the group of the checkpointer while a snapshot is sent to another node.
            self.snapshots = open_snapshots(os.environ, groups.new_control_group(), entries)
        if self.snapshots is not None:
            self.checkpointer.saver = open_saver(os.environ, rank_info, self.snapshots)
        elif self._snapshot_interval is not None:
            self.log("note: checkpoint.memory_every_steps has no effect, because no node agent runs this rank")
        self.start_step, callback_states = self._restore(from_scratch)
        self.guard = BadStepGuard.load(run, self.coordinator.group)
        self._order_start = read_order_start(run)
        self.mixture: Mixture | None = None
        """The order of the samples of the current length, if the run has several sources."""
        self._first_step = self.start_step + 1
        """The first step of this attempt with the current length of sequences."""
        self.callbacks = CallbackList(self, self._make_callbacks(flag))
        self.callbacks.load_state_dict(callback_states)

    # -- parts -------------------------------------------------------------------------------------------

    def _make_callbacks(self, flag: StopFlag) -> list[Callback]:
        """Return all callbacks in the order in which their hooks are called.

        The user's callbacks are after those of Sluice, so that they get complete metrics. `EarlyStopping` is the last
        one, because a callback of the user may add the metric.

        Args:
            flag: set by the signals that request a stop.
        """
        run = self.run
        world = self.world
        train = self.config.train
        pipeline_ranks = [self.layout.coordinates(rank).pp for rank in range(world.size)]
        self.coordinator.add_request(EARLY_STOP_REQUEST, lambda: self.requested_stop_reason is not None)
        callbacks: list[Callback] = [
            self.watchdog,
            self.deadline,
            ExposedCommMeter(self.engine.model, world),
            PeakMemory(),
            self.guard,
            Profiler(run, self.layout, world, self.coordinator),
        ]
        if train.evaluate_every is not None:
            evaluator = Evaluator(run, self.manifest, world, flag, self.watchdog, self.coordinator)
            copy_weights = partial(self.engine.copy_weights_to, evaluator.model, evaluator.group)
            self.held_out = HeldOutEvaluation(run, evaluator, self.coordinator, copy_weights, self._report_evaluation)
            callbacks.append(self.held_out)
        callbacks += [
            MetricsWriter(run, self.task),
            StragglerDetector(run, self.coordinator.group, pipeline_ranks, self.compute_timer),
            ProgressLog(self.task, train.log_every),
            SaveRequests(run.save_file, self.coordinator, checks_file=world.is_rank0),
        ]
        user_callbacks = [*make_user_callbacks(self.task.user_module, self.config)]
        for user_module in run.callback_modules:
            user_callbacks += make_user_callbacks(user_module.load(run.code_dir), self.config)
        callbacks += user_callbacks
        self._may_request_stop = bool(user_callbacks) or train.early_stopping is not None
        if train.early_stopping is not None:
            origin = read_origin(run)
            self.early_stopping = EarlyStopping(train.early_stopping, origin.step if origin else None)
            callbacks.append(self.early_stopping)
        return callbacks

    def _make_checkpointer(self) -> Checkpointer:
        """Return the checkpointer, whose manifests contain the layout and the identity of this run."""
        layout = describe_layout_identity(self.layout, self.config, self.world.backend, self.device.type)
        group = groups.new_control_group()
        # No rank may look for checkpoints while an earlier attempt still saves one.
        groups.all_gather_results(group, lambda: wait_for_previous_savers(os.environ, self.config.recovery.save_s))
        return Checkpointer(
            self.run.checkpoints_dir,
            group,
            keep=self.config.checkpoint.keep,
            metrics_file=self.run.metrics_file,
            background=self.config.checkpoint.mode == "async",
            manifest_entries={"layout": layout, **compute_identity(self.config, self.manifest)},
            on_saved=self._report_saved,
            on_committed=partial(append_saved_event, self.run),
        )

    def _make_dataset(self, length: int) -> MappedDataset | DatasetSamples:
        """Return the training samples of the run, in the order of the shards.

        Args:
            length: number of tokens of a sample; not used for a custom model.
        """
        if isinstance(self.manifest, SampleManifest):
            if self.manifest.dataset is not None:
                return self._make_dataset_samples(self.manifest)
            seed = self.config.run.seed
            return SampleDataset(self.manifest, self.run.data_dir, transform=self.task.transform, seed=seed)
        data = self.config.data
        balanced_by = None
        # With local SGD and lossy compression, the result depends on which samples a rank has.
        parallel = self.config.parallel
        is_free = parallel.local_sgd is None and parallel.hook.kind not in ("powersgd", "topk")
        if data.document_mask and self.config.train.balance and self.layout.dp > 1 and is_free:
            windows = tuple(count_windows(self.config.model, length))
            balanced_by = DocumentEnds(self.manifest.eos_id, self.manifest.eos_starts_next, windows)
        return TokenDataset(self.manifest.train, length, self.run.data_dir, balanced_by)

    def _make_dataset_samples(self, manifest: SampleManifest, states: Sequence[bytes] = ()) -> DatasetSamples:
        """Return the training samples of the user's dataset, and start the processes that read them.

        Args:
            manifest: the manifest with the dataset.
            states: for an iterable dataset, the saved states of the workers of this rank.
        """
        layout = self.layout
        stream = (layout.coordinates(self.rank).dp, layout.dp)
        request = make_dataset_request(
            self.run, manifest, TRAIN_SPLIT, is_rank0=self.world.is_rank0, stream=stream, states=states
        )
        samples = DatasetSamples(request, self.config.train.global_batch // layout.dp)
        if not samples.is_iterable:  # The processes of an iterable dataset start with its saved state.
            samples.open_pool()
        return samples

    def _make_engine(self, from_scratch: bool) -> Engine:
        """Return the engine.

        Args:
            from_scratch: whether the model gets initial weights: random ones, or open weights (`model.init_from`).
                Otherwise the caller loads a checkpoint next.

        Raises:
            CheckpointError: if the run starts from scratch although it had saved checkpoints, which have disappeared.
        """
        source = None
        if from_scratch:
            groups.all_gather_results(self.checkpointer.group, self._check_no_checkpoint_is_missing)
        if (
            from_scratch or self.config.adapter is not None
        ):  # Checkpoints of an adapter do not contain the open weights.
            source = open_initial_weights(self.run, self.task, self.checkpointer.group, is_first_start=from_scratch)
        engine = Engine(
            self.config,
            self.layout,
            self.world,
            self.task,
            self.compute_timer,
            from_scratch=from_scratch,
            source=source,
        )
        if source is not None:
            source.write_source()
        # The hash of the open weights is known only now, because `write_source` has just written it to the run.
        self.checkpointer.manifest_entries |= compute_source_identity(self.run)
        if self.config.adapter is not None and self.config.model.target is not None:
            base = (weight for part in engine.parts for weight in self.task.base_weights(part))
            self.checkpointer.manifest_entries["base_hash"] = hash_weights(base, self.checkpointer.group)
        return engine

    def _check_no_checkpoint_is_missing(self) -> None:
        """Raise CheckpointError on rank 0 if checkpoints were saved and have disappeared."""
        if self.world.is_rank0 and (problem := describe_missing_checkpoints(self.run)):
            raise CheckpointError("checkpoint.disappeared", problem)

    def _set_sequence_length(self, length: int) -> None:
        """Train on sequences of `length` tokens from the next step on. All ranks must call this method together."""
        if not isinstance(self.task, TokenTask) or length == self.task.sequence_length:
            return
        self.deadline.expect_longer_steps((length / self.task.sequence_length) ** 2)
        self.task.set_sequence_length(length)
        self.engine.reset_shapes()
        self.dataset = self._make_dataset(length)

    @contextlib.contextmanager
    def _open_batches(self, lengths: Sequence[LengthConfig]) -> Iterator[BatchLoader | DatasetLoader]:
        """Yield a loader of this rank's part of each global batch. The loader starts after the consumed samples.

        Args:
            lengths: entries of `Config.length_phases` up to the current one.
        """
        excluded_ranges = self.guard.excluded_ranges
        self.mixture = build_mixture(self.config, self.manifest, excluded_ranges, lengths, self._order_start)
        shift = find_order_shift(lengths, self.config.train.global_batch, excluded_ranges, self._order_start)
        order = self.mixture.compute_indices if self.mixture else None
        stream_order = None
        if isinstance(self.dataset, DatasetSamples) and self.dataset.is_iterable:
            assert isinstance(self.manifest, SampleManifest)
            self.dataset = self._make_dataset_samples(self.manifest, self._select_stream_states())
            dp_rank = self.layout.coordinates(self.rank).dp
            stream_order = StreamOrder(self.config.train.global_batch, dp_rank, self.layout.dp)
            order = partial(np.add, shift)
        sampler = GlobalOrderSampler(
            self.dataset,
            global_batch=self.config.train.global_batch,
            seed=self.config.run.seed,
            samples_consumed=self.samples_consumed,
            excluded_ranges=excluded_ranges,
            num_replicas=self.layout.dp,
            rank=self.layout.coordinates(self.rank).dp,
            order=order,
            shift=shift,
            # With a batch loss, a micro-batch has the same samples in every layout. Each rank reads a different part of
            # an iterable dataset.
            stripe=self.config.train.micro_batch if self.task.has_batch_loss and stream_order is None else None,
        )
        if isinstance(self.dataset, DatasetSamples):
            loader = DatasetLoader(self.dataset, sampler, self.device, stream_order)
            self._stream = None if stream_order is None else loader
            with contextlib.closing(loader):
                yield loader
            return
        # A random key for each start ensures that no rank reads the local copies of a killed job.
        copies_key = groups.broadcast_from_rank0(self.coordinator.group, secrets.token_hex(8))
        write_event = self.run.append_event if self.rank_info.local_rank == 0 else None
        copies = LocalCopies(self.dataset, self.run.data_dir, self.config.site.local_disk, copies_key, write_event)
        with copies, contextlib.closing(BatchLoader(self.dataset, sampler, self.device)) as batches:
            yield batches

    def _select_stream_states(self) -> list[bytes]:
        """Return the saved state of the iterable dataset for each worker of this rank; [] to start at its beginning."""
        # A fork that begins a new order reads other data than its origin.
        begins_order = self.start_step == self._order_start.step
        if self._saved_stream is None or begins_order:
            return []
        dp_rank = self.layout.coordinates(self.rank).dp
        return select_states(self._saved_stream, self.start_step, dp_rank, self.layout.dp, self.config.data.workers)

    # -- one step ----------------------------------------------------------------------------------------

    def step(self, step: int, batch: Batch) -> dict[str, Any]:
        """Perform one optimizer step and return its metrics.

        Args:
            step: the number of the step, counted from 1.
            batch: this rank's part of the global batch: arrays by name, such as `tokens` (int64, shape (B, T + 1)).
                B is global_batch divided by the data-parallel size.
        """
        config = self.config
        engine = self.engine
        lr = self.compute_learning_rate(config.optimizer, step, self.steps)
        lr = self.callbacks.on_learning_rate(step, lr)
        set_learning_rate(engine.optimizer, lr)
        if self.task.has_training_step:
            return self._run_training_step(step, batch, lr)
        enter_phase_of_step = partial(self.enter_phase, step)
        mean_loss = engine.backward(batch, step, enter_phase_of_step, self.coordinator.wants_attention)
        self.callbacks.on_backward_end(step)
        grad_norm = engine.clip_gradients(config.optimizer.clip_norm)
        # Here the CPU waits for the GPU, because loss and norm must be checked before the weights change. One tensor
        # with both numbers needs only one copy from the GPU.
        loss, norm = torch.stack([mean_loss, grad_norm.double()]).tolist()
        # Remove the requests of the previous step. If a rank has a request in this step, `exchange` adds it below.
        self.coordinator.pending_requests.clear()
        # A rank with a request contributes NaN to the reduced loss. So if the loss is NaN, a rank has a request, or the
        # loss itself is NaN. The reduced loss is the same on all ranks, so all ranks enter this branch together.
        if math.isnan(loss):
            self.coordinator.exchange()
            loss = engine.reduce_loss_again().item()
        # At a scale of 1 or less, a smaller scale would not help. The overflow then counts as a bad step.
        is_scaled = engine.scaler is not None and engine.scaler.scale > 1
        has_overflowed = is_scaled and not math.isfinite(norm)
        # Overflows are normal in fp16. The loss scaler skips the step and halves the scale. The callbacks get a norm of
        # 0, so that the bad-step guard, which is a callback, does not count the step as bad.
        skip_reason = self.callbacks.on_before_optimizer_step(step, loss, 0.0 if has_overflowed else norm)
        self.checkpointer.wait_until_staged()  # A background save may still be copying the weights of the last step.
        engine.update_weights(norm, is_good=skip_reason is None)
        self.samples_consumed += config.train.global_batch
        metrics = {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "samples_consumed": self.samples_consumed}
        # The unit is `tokens`, or `samples` if the user's module defines the model.
        metrics[self.task.unit] = self.task.count_units(step)
        if skip_reason is not None:  # A step that only the loss scaler skipped has no such entry.
            metrics["skipped"] = skip_reason
        return metrics

    def _run_training_step(self, step: int, batch: Batch, lr: float) -> dict[str, Any]:
        """Run the `training_step` of the user's module, and return the metrics of the step. See :meth:`step`."""

        def find_skip_reason(update: int, loss: float, norm: float) -> str | None:
            self.update_number = update
            reason = self.callbacks.on_before_optimizer_step(step, loss, norm)
            self.update_number = None
            self.checkpointer.wait_until_staged()  # A background save may still be copying the weights.
            return reason

        hooks = StepHooks(
            partial(self.enter_phase, step),
            partial(self.callbacks.on_backward_end, step),
            find_skip_reason,
            self.coordinator.wants_attention,
        )
        result = run_training_step(self.engine, batch, step, hooks)
        self.guard.end_step(step)
        # Remove the requests of the previous step. If a rank has a request in this step, `exchange` adds it below.
        self.coordinator.pending_requests.clear()
        if result.needs_attention:
            self.coordinator.exchange()
        self.samples_consumed += self.config.train.global_batch
        metrics: dict[str, Any] = {"step": step, **result.metrics, "grad_norm": result.grad_norm, "lr": lr}
        metrics |= {"samples_consumed": self.samples_consumed, self.task.unit: self.task.count_units(step)}
        if result.skip_reason is not None:
            metrics["skipped"] = result.skip_reason
        return metrics

    # -- the loop ----------------------------------------------------------------------------------------

    def fit(self) -> ExitCode:
        """Train until the last step, or until all ranks stop together.

        Returns:
            DONE if the train stage is complete, STOPPED if a later attempt must continue the stage.
        """
        if self.start_step >= self.steps or self.early_stop is not None:
            return ExitCode.DONE
        if self.coordinator.exchange():  # A stop was requested during start-up, so there is nothing new to save.
            return ExitCode.STOPPED
        exit_code: ExitCode | None = None
        while exit_code is None:
            exit_code = self._train_with_one_length()
        return exit_code

    def _train_with_one_length(self) -> ExitCode | None:
        """Train until the last step, a stop, or a change of the length of sequences (`train.sequence_schedule`).

        Returns:
            The exit code if this attempt ends; None if it continues with another length.
        """
        lengths = self.config.length_phases_until(self._first_step)
        next_phases = self.config.length_phases[len(lengths) :]
        last_step = min(self.steps, next_phases[0].from_step - 1) if next_phases else self.steps
        self._set_sequence_length(lengths[-1].length)
        if self.config.train.sequence_schedule is not None:
            self.log(f"from step {self._first_step}: sequences of {lengths[-1].length:,} tokens")
        with self._open_batches(lengths) as loader:
            is_start = self._first_step == self.start_step + 1
            if is_start:
                self._report_ready()
            previous_end = time.perf_counter()
            if is_start:
                self.callbacks.on_start()
                if self.coordinator.stop_reason is not None:  # A stop was requested during the evaluation.
                    return ExitCode.STOPPED
                if self.pause_step is not None and self.start_step >= self.pause_step:
                    self._report_pause(self.start_step)  # Only the evaluation of this step was missing.
                    return ExitCode.DONE
            batch_iterator = iter(loader)
            for step in range(self._first_step, last_step + 1):
                self.enter_phase(step, "data")
                self.callbacks.on_step_begin(step)
                metrics = self.step(step, next(batch_iterator))
                self.callbacks.on_step_end(step, metrics)
                end = time.perf_counter()
                self.step_s = end - previous_end - sum(self.overhead_s.values())
                self.data_wait_s = loader.data_wait_s
                self.callbacks.on_metrics(step, metrics)
                self.overhead_s.clear()
                previous_end = end
                if (exit_code := self._after_step(step)) is not None:
                    return exit_code
        self._first_step = last_step + 1
        return None

    def _after_step(self, step: int) -> ExitCode | None:
        """Save or stop after `step` if necessary. Return the exit code if this attempt ends; None if it continues."""
        if self.checkpointer.saver is not None:
            self.checkpointer.saver.connect()
        requests = self.coordinator.pending_requests
        # After too many consecutive bad steps, the run restarts from the checkpoint before them and excludes their
        # samples. A checkpoint between bad steps would count these samples as consumed. So no checkpoint is saved after
        # a bad step, except the one of the last step.
        may_save = not self.guard.consecutive_bad_steps
        if step == self.steps:
            self.save(step)
            self._finish_saving(step)
            return ExitCode.DONE
        if EARLY_STOP_REQUEST in requests and may_save and not self.coordinator.is_too_late_to_save:
            self._complete_early(step)
            return ExitCode.DONE
        if self.coordinator.stop_reason is not None:
            self._save_and_stop(step, self.coordinator.stop_reason)
            return ExitCode.STOPPED
        if step == self.pause_step:
            self._pause(step)
            return ExitCode.DONE
        if may_save and (step % self.config.checkpoint.every_steps == 0 or SAVE_REQUEST in requests):
            self.save(step)
        elif may_save and self.snapshots and self._snapshot_interval and step % self._snapshot_interval == 0:
            self._save_snapshot(step)
        return None

    def _save_and_stop(self, step: int, reason: str) -> None:
        """Save a checkpoint and stop after `step`.

        If the job may end before a save would finish, or if `step` was a bad step (`BadStepGuard`), skip the save.

        Args:
            step: the step that has just ended.
            reason: why the ranks stop (`StopCoordinator.stop_reason`).
        """
        skip_reason = None
        if self.coordinator.is_too_late_to_save:
            skip_reason = f"too late to save: a save takes {self.deadline.expected_save_s:.1f} s"
        elif self.guard.consecutive_bad_steps:
            skip_reason = "the step was bad, and the run may have to restart from before it"
        if self.world.is_rank0:
            # The field is called `signal`, but the reason may also be that the time limit is near (`LOCAL_DEADLINE`).
            self.run.append_event(StopRequested(stage="train", step=step, signal=reason))
            if skip_reason is not None:
                self.run.append_event(SaveSkipped(stage="train", step=step, reason=skip_reason))
        self.callbacks.on_stop(step, reason)
        if skip_reason is None:
            self.save(step)
        self._finish_saving(step)  # Even without a save after this step, a save in the background may be in progress.
        outcome = f"not saved ({skip_reason}); the next attempt loads the last checkpoint" if skip_reason else "saved"
        self.log(f"stopped after step {step}, {outcome}")

    def _pause(self, step: int) -> None:
        """Save a checkpoint after `step`, at which this trial of a search pauses. A later attempt may continue it."""
        self.callbacks.on_stop(step, "paused")
        self.save(step)
        self._finish_saving(step)
        self._report_pause(step)

    def _report_pause(self, step: int) -> None:
        """Write the event `paused` on rank 0, after the checkpoint of `step` was saved."""
        if self.world.is_rank0:
            self.run.append_event(Paused(stage="train", step=step))
        self.log(f"paused after step {step} of {self.steps}: the search decides whether the trial continues")

    def _complete_early(self, step: int) -> None:
        """Save the final checkpoint after `step`, because a callback called `request_stop`."""
        reason = self._gather_requested_stop_reason()
        assert reason is not None
        self.early_stop = {"reason": reason, "steps": self.steps}
        if self.early_stopping is not None and self._has_exhausted_patience(reason):
            self.early_stop["early_stopping"] = self.early_stopping.describe_condition()
        if self.world.is_rank0:
            self.run.append_event(StoppedEarly(stage="train", step=step, reason=reason))
        self.callbacks.on_stop(step, reason)
        self.save(step)
        self._finish_saving(step)
        self.log(f"complete after step {step} of {self.steps}: {reason}")

    # -- the interface for callbacks (`TrainerContext`) --------------------------------------------------

    def enter_phase(self, step: int, phase: str) -> None:
        """Call `on_phase` of all callbacks. The phases of a first step, which may compile, are all called `start`."""
        self.callbacks.on_phase(step, "start" if step == self._first_step else phase)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with their names in the full model."""
        for part in self.engine.parts:
            yield from self.task.named_weights(part)

    def request_stop(self, reason: str) -> None:
        """Complete the train stage early: all ranks finish the next step, save and exit.

        It is enough if a single rank calls this method. The stage is then done, and no later job continues it.
        """
        if self.requested_stop_reason is None:
            self.requested_stop_reason = reason

    @property
    def loss_scale(self) -> float:
        """The factor by which gradients are too large in `on_backward_end`; 1 unless `train.precision` is fp16."""
        return 1.0 if self.engine.scaler is None else self.engine.scaler.scale

    def compute_held_out_outputs(self, count: int) -> Iterator[tuple[Batch, Any]]:
        """Yield batches of held-out samples and the outputs of the model for them (`TrainerContext`)."""
        if self.held_out is None:
            raise UserError(
                "train.no_evaluations",
                "train.evaluate_every: a callback calls compute_held_out_outputs, which needs evaluations in the train "
                "stage: set train.evaluate_every",
            )
        evaluated = self.held_out.evaluator.held_out.count
        if count > evaluated and not self._has_noted_count:
            self._has_noted_count = True
            self.log(
                f"note: a callback calls compute_held_out_outputs({count}), but evaluations use {evaluated} samples: "
                "raise train.evaluate_sequences for more"
            )
        return self.held_out.compute_outputs(count)

    def add_image(self, name: str, step: int, image: Any) -> None:
        """Add an image to report.html, on rank 0 only (`TrainerContext`)."""
        if self.world.is_rank0:
            self._images.write(name, step, *unpack_image(image))

    def log(self, message: str) -> None:
        """Print a line to the job's output, on rank 0 only."""
        if self.world.is_rank0:
            print(message, flush=True)

    # -- state -------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save a checkpoint of the state after `step`; with `checkpoint.mode: async`, only start the save.

        The metrics of `step` must already be written.
        """
        start_time = time.perf_counter()
        self.enter_phase(step, "save")
        self.checkpointer.wait_until_saved()
        state, extra = self._collect_state(step)
        if self.snapshots is not None and self.checkpointer.saver is None and step < self.steps:
            # The checkpoint may not be complete if this attempt ends soon. A saver writes from a snapshot anyway.
            self.snapshots.save(state, step=step, samples_consumed=self.samples_consumed, extra=extra)
        self.checkpointer.save(state, step=step, samples_consumed=self.samples_consumed, extra=extra)
        self.overhead_s["checkpoint_s"] = self.overhead_s.get("checkpoint_s", 0.0) + time.perf_counter() - start_time

    def _save_snapshot(self, step: int) -> None:
        """Save a snapshot of the state after `step` in memory."""
        assert self.snapshots is not None
        start_time = time.perf_counter()
        self.enter_phase(step, "save")
        state, extra = self._collect_state(step)
        self.snapshots.save(state, step=step, samples_consumed=self.samples_consumed, extra=extra)
        self.overhead_s["checkpoint_s"] = self.overhead_s.get("checkpoint_s", 0.0) + time.perf_counter() - start_time

    def _collect_state(self, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return this rank's tensors after `step`, and the JSON values that a checkpoint also contains."""
        self.callbacks.on_save(step)
        state, replicas = self.engine.checkpoint_state()
        extra: dict[str, Any] = {
            "scaler": self.engine.scaler.state_dict() if self.engine.scaler else {},
            "replicas": replicas,
        }
        if self._stream is not None:
            dp_rank = self.layout.coordinates(self.rank).dp
            extra["stream"] = gather_states(self.coordinator.group, dp_rank, self.layout.dp, self._stream.states)
        if callback_states := self.callbacks.state_dict():
            extra["callbacks"] = callback_states
        if self.early_stop is not None:
            extra["early_stop"] = self.early_stop
        elif (reason := self._gather_requested_stop_reason()) and not self._has_exhausted_patience(reason):
            extra["stop_request"] = reason  # If this attempt ends now, the next attempt carries out the request.
        return state, extra

    def _gather_requested_stop_reason(self) -> str | None:
        """Return why a callback called `request_stop`; None if no callback called this method.

        If callbacks called `request_stop` on several ranks, the reason of the lowest of these ranks is returned. All
        ranks return the same reason, and store it in `requested_stop_reason`.
        """
        if not self._may_request_stop:
            return self.requested_stop_reason  # Only the restored checkpoint can contain a request.
        reasons = groups.all_gather_results(self.coordinator.group, lambda: self.requested_stop_reason)
        self.requested_stop_reason = next((reason for reason in reasons if reason is not None), None)
        return self.requested_stop_reason

    def _has_exhausted_patience(self, reason: str) -> bool:
        """Return True if the reason to stop is that of `train.early_stopping`.

        This callback repeats its request in the next attempt, unless the user has then raised the patience.
        """
        return self.early_stopping is not None and reason == self.early_stopping.reason

    def _finish_saving(self, step: int) -> None:
        """Wait for the save in progress, if there is one, and free the checkpointer's buffers.

        Args:
            step: the step that has just ended. The watchdog reports this step if the save hangs.
        """
        # `self.enter_phase` would call this phase `start` if `step` is the first step of this attempt.
        self.watchdog.enter_phase(step, "save")
        self.checkpointer.close()

    def _restore(self, from_scratch: bool) -> tuple[int, Mapping[str, Any]]:
        """Load the newest intact checkpoint.

        Args:
            from_scratch: whether the engine has initial weights, because no checkpoint existed when the engine was
                built.

        Returns:
            The step of the checkpoint (0 if there is none), and the states of callbacks by class name.

        Raises:
            CheckpointError: if all checkpoints are damaged, if the newest intact checkpoint belongs to another config
                or other data, or if the checkpoints disappeared during the start.
        """
        start_time = time.perf_counter()
        check_manifest = partial(
            check_identity,
            current=self.checkpointer.manifest_entries,
            origin=read_origin(self.run),
            manifest=self.manifest,
        )
        snapshot_step = self._find_newest_snapshot()
        manifest: Mapping[str, Any] | None
        if self.snapshots is not None and snapshot_step:
            manifest = {**self.snapshots.load(snapshot_step, self.engine.state_dict()), "versions": collect_versions()}
        else:
            manifest = self.checkpointer.restore(self.engine.state_dict(), self._report_damaged, check_manifest)
        step = int(manifest["step"]) if manifest else 0
        extra: Mapping[str, Any] = manifest["extra"] if manifest else {}
        notes: dict[str, str | None] = {}
        if manifest is None:
            # If a checkpoint existed when the engine was built, the engine has no initial weights.
            if not from_scratch:
                raise CheckpointError(
                    "checkpoint.disappeared",
                    f"the checkpoints in {self.run.checkpoints_dir} disappeared during the start; try again",
                )
            self.engine.reset_custom_optimizer()
            # Earlier attempts had checkpoints, but the user removed them to restart from scratch.
            if self.world.is_rank0 and read_stage_state(self.run.read_events("train")).saved_step:
                self.run.append_event(RestartedFromScratch(stage="train"))
        else:
            self.samples_consumed = int(manifest["samples_consumed"])
            read_tensors: Callable[[dict[str, torch.Tensor]], None] = partial(self.checkpointer.read_tensors, step)
            if self.snapshots is not None and snapshot_step:
                read_tensors = partial(self.snapshots.read_tensors, step)
            notes["replicas"] = self.engine.finish_loading(extra.get("replicas"), read_tensors)
            notes["versions"] = describe_version_changes(manifest["versions"], collect_versions())
            if extra["scaler"] and self.engine.scaler is not None:
                self.engine.scaler.load_state_dict(extra["scaler"])
            self.requested_stop_reason = extra.get("stop_request")
            self._saved_stream = extra.get("stream")
            early_stop = extra.get("early_stop")
            if completes_stage(self.run, step, early_stop, self.steps):
                self.early_stop = early_stop
        if self.snapshots is not None:
            self.snapshots.discard_after(step)
        if self.world.is_rank0:
            self._rewind_metrics(step, start_time, notes, from_memory=bool(snapshot_step))
        return step, extra.get("callbacks", {})

    def _find_newest_snapshot(self) -> int:
        """Return the step of the newest snapshot in memory; 0 if there is none, or a checkpoint is newer."""
        if self.snapshots is None:
            return 0
        step = self.snapshots.find_common_step()
        newest_step = groups.broadcast_from_rank0(self.checkpointer.group, find_newest_step(self.run.checkpoints_dir))
        return step if step and step >= newest_step and self.snapshots.fetch(step) else 0

    def _rewind_metrics(
        self, step: int, start_time: float, notes: Mapping[str, str | None], *, from_memory: bool
    ) -> None:
        """Remove the metrics of steps after the restored `step`, and write the events `lost_work` and `restored`.

        Also set the expected duration of a save from the `saved` events. Only rank 0 calls this method.

        Args:
            step: the restored step; 0 if there is no checkpoint.
            start_time: when the restore began, by `time.perf_counter`.
            notes: messages about differences from the attempt that saved the checkpoint, under the keys `replicas`
                and `versions`; None for no difference.
            from_memory: whether a snapshot in memory was restored, and not a checkpoint.
        """
        save_durations = [event.seconds for event in self.run.read_events("train", Saved)]
        # The latest save is the best estimate, because storage may have been slower or faster before.
        self.deadline.expected_save_s = next((seconds for seconds in reversed(save_durations) if seconds), 0.0)
        if problem := lines.describe_malformed_lines(self.run.metrics_file, is_step_line):
            self.log(f"WARNING: {problem}")
        lost_lines = list_lost_lines(self.run.metrics_file, step)
        if lost_lines:
            # The event is written before the lines are removed, so a crash in between does not lose the lines.
            steps = [line["step"] for line in lost_lines]
            self.run.append_event(LostWork(stage="train", steps=steps, lines=lost_lines))
        rewind_metrics(self.run.metrics_file, step)
        if step:
            seconds = round(time.perf_counter() - start_time, 3)
            replicas_note = notes.get("replicas") or None
            versions_note = notes.get("versions") or None
            self.run.append_event(
                Restored(
                    stage="train",
                    step=step,
                    seconds=seconds,
                    lost_steps=len(lost_lines),
                    replicas=replicas_note,
                    versions=versions_note,
                    source="memory" if from_memory else None,
                )
            )
            repeated = f", {len(lost_lines)} steps are repeated" if lost_lines else ""
            source = " from memory" if from_memory else ""
            self.log("; ".join(filter(None, [f"restored step {step}{source}{repeated}", replicas_note, versions_note])))

    # -- reports -----------------------------------------------------------------------------------------

    def _report_ready(self) -> None:
        """Write the events `mixture` and `ready`, on rank 0."""
        if not self.world.is_rank0:
            return
        if self.mixture:
            epochs = self.mixture.count_epochs(self.samples_consumed)
            excluded_ranges = self.guard.excluded_ranges
            final_lengths = self.config.length_phases_until(self.steps)
            final_mixture = build_mixture(self.config, self.manifest, excluded_ranges, final_lengths, self._order_start)
            assert final_mixture is not None
            final_epochs = final_mixture.count_epochs(self.config.train.global_batch * self.steps)
            weights = self.mixture.weights.model_dump()["weights"]
            event = MixtureReport(stage="train", weights=weights, epochs=epochs, epochs_at_the_end=final_epochs)
            self.run.append_event(event)
            self.log(
                f"epochs of each source by step {self.steps}: {format_epochs(final_epochs)}; "
                f"so far: {format_epochs(epochs)}"
            )
        self.run.append_event(
            Ready(
                stage="train",
                step=self.start_step,
                startup_s=self.startup_s,
                communication=self.world.transport or None,
                sent_bytes=self._count_sent_bytes() or None,
                extra=measure_peak_memory(self.device),
            )
        )

    def _count_sent_bytes(self) -> dict[str, int]:
        """Return the bytes that a rank sends per step along each axis of the layout, by the name of the axis.

        The bytes of an axis are those of the rank that sends most along this axis. If the task is not a `DecoderTask`,
        return {}.
        """
        if not isinstance(self.task, DecoderTask):
            return {}
        data = self.config.data.model_copy(update={"sequence_length": self.task.sequence_length})
        config = self.config.model_copy(update={"data": data})
        traffic = count_traffic(config, self.layout, self.task.vocab_size)
        return {axis: num_bytes for axis, num_bytes, _ in traffic}

    def _report_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Call `on_evaluation` of all callbacks."""
        self.callbacks.on_evaluation(step, metrics)

    def _report_saved(self, step: int, seconds: float) -> None:
        """Report a committed checkpoint. The checkpointer calls this method on rank 0, in the thread that saves.

        Args:
            step: the step of the checkpoint.
            seconds: the duration of the save in seconds.
        """
        self.callbacks.on_saved(step, seconds)
        self.log(f"saved step {step} ({seconds:.2f} s)")

    def _report_damaged(self, step: int, reason: str) -> None:
        """Report a damaged checkpoint, which was renamed and is not used again. Only rank 0 calls this method."""
        self.log(f"WARNING: {reason}; step {step} is set aside, trying the previous checkpoint")
        self.run.append_event(Damaged(stage="train", step=step, reason=reason))
