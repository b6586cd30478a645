"""Callbacks that measure a run: metrics.jsonl, held-out loss, peak memory, exposed communication, progress in the log.

`exposed_comm_s` is the time of a step in which a rank only waits for other ranks. The time is measured only for DDP on
CPUs, over Gloo or MPI, from the last local gradient until the loss is reduced over all ranks. In between, DDP waits for
its buckets, a communication hook compresses the last bucket, and the loss is summed. For other layouts and for GPUs,
use a profile (pipeline/train/profiler.py). The bytes that a rank sends are not measured but computed from the layout
(pipeline/parallel/traffic.py).
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.base.errors import UserError
from pipeline.base.files import read_last_object
from pipeline.comm.groups import World, broadcast_from_rank0
from pipeline.data.loader import Batch
from pipeline.evaluate.evaluator import Evaluator
from pipeline.evaluate.result import HELD_OUT_PREFIX, add_ema_metrics, format_held_out, get_extra_metrics
from pipeline.model.task import Task
from pipeline.resilience.stop import EARLY_STOP_REQUEST, StopCoordinator
from pipeline.run.directory import Run
from pipeline.run.events import HeldOut
from pipeline.run.metrics import MetricsFile, is_step_line, rewind_metrics
from pipeline.train.callback import Callback, TrainerContext

OVERHEADS = ("checkpoint_s", "evaluate_s", "profile_s")
"""Keys of the times that were not spent on a step, in the order in which a line of metrics.jsonl has them."""


class ExposedCommMeter(Callback):
    """Adds `exposed_comm_s` to the metrics of a step, if the time of communication can be measured.

    Args:
        model: the module whose `forward` is called.
        world: the process group of all ranks.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        is_ddp = isinstance(model, DistributedDataParallel)
        self._is_measurable = world.size > 1 and world.device.type == "cpu" and is_ddp
        self._last_gradient_time = 0.0
        """When the latest gradient of this rank was computed, by `time.perf_counter`."""
        self._exposed_s = 0.0
        """Seconds of exposed communication in the latest step."""
        for parameter in model.parameters() if self._is_measurable else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, _: Tensor) -> None:
        """Record the time, because autograd has just computed the gradient of a parameter."""
        self._last_gradient_time = time.perf_counter()

    def record_backward_end(self) -> None:
        """Measure the time since the last gradient. Call this method as soon as the loss is reduced over all ranks."""
        self._exposed_s = time.perf_counter() - self._last_gradient_time

    def read_metrics(self) -> dict[str, float]:
        """Return `exposed_comm_s` of the latest step, in seconds; {} if the time cannot be measured."""
        return {"exposed_comm_s": round(self._exposed_s, 6)} if self._is_measurable else {}

    def on_backward_end(self, trainer: TrainerContext, step: int) -> None:
        """Measure the exposed communication of the step."""
        self.record_backward_end()

    def on_step_end(self, trainer: TrainerContext, step: int, metrics: dict[str, Any]) -> None:
        """Add `exposed_comm_s` to the metrics."""
        metrics.update(self.read_metrics())


def measure_peak_memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory in GB (1e9 bytes), and reset the peak of a GPU.

    Returns:
        On a GPU, the peaks since the last call: `memory_gb` of tensors, and `memory_reserved_gb` of the memory that
        torch's allocator reserved. On a CPU, `memory_gb` of the process since it started.
    """
    if device.type == "cpu":
        max_rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # On Linux in KiB (getrusage(2)).
        return {"memory_gb": round(max_rss_kib * 1024 / 1e9, 3)}
    allocated = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory_gb": round(allocated / 1e9, 3), "memory_reserved_gb": round(reserved / 1e9, 3)}


class PeakMemory(Callback):
    """Adds the peak memory of a step to its metrics; on a CPU, the peak since the process started."""

    def on_step_begin(self, trainer: TrainerContext, step: int) -> None:
        """Reset the peak of a GPU, so that the peak of the step does not include start-up, evaluations and saves."""
        measure_peak_memory(trainer.device)

    def on_step_end(self, trainer: TrainerContext, step: int, metrics: dict[str, Any]) -> None:
        """Add the peak to the metrics."""
        metrics.update(measure_peak_memory(trainer.device))


class HeldOutEvaluation(Callback):
    """Measures the loss on held-out data after every `train.evaluate_every`-th step.

    With `train.ema`, the loss of the moving average of the weights is measured also.

    `_evaluate_if_due` describes what happens if the ranks stop after such a step.
    """

    def __init__(
        self,
        run: Run,
        evaluator: Evaluator,
        coordinator: StopCoordinator,
        copy_weights: Callable[..., None],
        report: Callable[[int, dict[str, float]], None],
    ) -> None:
        """Create the callback.

        Args:
            run: the run.
            evaluator: computes the held-out loss.
            coordinator: has the requests and the reason to stop that the ranks last exchanged.
            copy_weights: copies the current weights into the model of `evaluator`; with `averaged=True`, their moving
                averages (`train.ema`). Called on all ranks.
            report: called on all ranks with the step and the metrics of each completed evaluation. It may add metrics.
        """
        self.run = run
        self.evaluator = evaluator
        self.coordinator = coordinator
        self._copy_weights = copy_weights
        self._report = report
        every = run.config.train.evaluate_every
        assert every is not None
        self._every_steps = every
        self._reported_step: int | None = None
        """The step of the latest evaluation that was passed to `report`; None if the restored checkpoint, of an earlier
        version of Sluice, does not contain it."""
        self._has_averages = run.config.train.ema is not None

    def on_start(self, trainer: TrainerContext) -> None:
        """Evaluate the restored step if a stop prevented its evaluation in the previous attempt.

        Add the result to the line of the step in metrics.jsonl. If the line already has a result, an attempt has added
        it after the checkpoint was saved, and then crashed. Callbacks get the result again, because their states in the
        checkpoint do not contain it.
        """
        step = trainer.start_step
        recorded: dict[str, float | None] | None = None
        if step and trainer.rank == 0:
            line = read_last_object(self.run.metrics_file, is_step_line) or {}
            if line.get("step") == step:
                recorded = {name: value for name, value in line.items() if name.startswith(HELD_OUT_PREFIX)}
        recorded = broadcast_from_rank0(self.coordinator.group, recorded)
        if recorded is None:
            return
        if f"{HELD_OUT_PREFIX}loss" in recorded:
            if self._reported_step not in (None, step):
                self._reported_step = step
                # Null represents infinity and NaN, which JSON cannot represent.
                self._report(step, {name: math.nan if value is None else value for name, value in recorded.items()})
            return
        metrics = self._evaluate_if_due(trainer, step)
        if metrics and trainer.rank == 0:
            # Followers (tracking/) may have read the line of this step already, so they get these metrics from the
            # event. The event is written first. Otherwise, after a crash in between, the line would have the metrics,
            # but followers would never get them.
            self.run.append_event(HeldOut(stage="train", step=step, extra=metrics))
            rewind_metrics(self.run.metrics_file, step, metrics)

    def on_step_end(self, trainer: TrainerContext, step: int, metrics: dict[str, Any]) -> None:
        """Evaluate the step if `train.evaluate_every` selects it, and add the result to its metrics."""
        metrics.update(self._evaluate_if_due(trainer, step))

    def _evaluate_if_due(self, trainer: TrainerContext, step: int) -> dict[str, float]:
        """Return the held-out metrics of `step`. Return {} if the step is not evaluated, or not completely.

        A step is evaluated if `train.evaluate_every` selects it. If the ranks stop after the step or during its
        evaluation, the next attempt evaluates the step instead. After the last step of the run, or if a callback
        completes the run early, there is no next attempt. The step is then evaluated even if the ranks stop.
        """
        is_last = step == trainer.steps or EARLY_STOP_REQUEST in self.coordinator.pending_requests
        if step % self._every_steps or (self.coordinator.stop_reason is not None and not is_last):
            return {}
        start_time = time.perf_counter()
        trainer.enter_phase(step, "held-out")
        self._copy_weights()
        result = self.evaluator.measure(step, ignore_stop=is_last)
        if result is not None and self._has_averages:
            self._copy_weights(averaged=True)
            ema_result = self.evaluator.measure(step, ignore_stop=is_last)
            result = None if ema_result is None else add_ema_metrics(result, ema_result)
        trainer.overhead_s["evaluate_s"] = trainer.overhead_s.get("evaluate_s", 0.0) + time.perf_counter() - start_time
        if result is None:
            return {}
        results = {"loss": result["loss"], **get_extra_metrics(result)}
        metrics = {f"{HELD_OUT_PREFIX}{name}": value for name, value in results.items()}
        self._reported_step = step
        self._report(step, metrics)
        trainer.log(f"step {step}: {format_held_out(metrics)}")
        return metrics

    def compute_outputs(self, count: int) -> Iterator[tuple[Batch, Any]]:
        """Yield batches of held-out samples and the outputs of the model with the current weights, on all ranks.

        All ranks must call this method together, and consume all batches.

        Args:
            count: the number of samples, at most `train.evaluate_sequences`.
        """
        self._copy_weights()
        return self.evaluator.compute_outputs(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the latest evaluation that callbacks have got; 0 if there was none."""
        return {"step": self._reported_step or 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this step."""
        self._reported_step = state["step"]


class MetricsWriter(Callback):
    """Writes the line of each step to metrics.jsonl, on rank 0."""

    def __init__(self, run: Run, task: Task) -> None:
        self.run = run
        self.task = task
        self._metrics = MetricsFile(None)  # This object writes nothing. `on_start` replaces it on rank 0.

    def on_start(self, trainer: TrainerContext) -> None:
        """Open metrics.jsonl on rank 0. Until now, a restore or an evaluation could replace the file."""
        if trainer.rank == 0:
            self._metrics = MetricsFile(self.run.metrics_file)

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the line of the step, with its metrics, its times, and the speed in tokens or samples per second.

        Raises UserError if a callback added a metric that cannot be converted to JSON.
        """
        # The metrics `step_time_s` and `tokens_per_s` include the time of other work, such as saves.
        step_s = trainer.step_s + sum(trainer.overhead_s.values())
        units_per_s = self.task.units_per_step / step_s  # Tokens per second; for a custom model, samples per second.
        line = {
            **metrics,
            "time": round(time.time(), 3),
            "step_time_s": round(step_s, 6),
            "data_wait_s": round(trainer.data_wait_s, 6),
            f"{self.task.unit}_per_s": round(units_per_s, 1),
        }
        if self.task.flops_per_unit:
            line["tflops"] = round(units_per_s * self.task.flops_per_unit / 1e12, 6)
        line |= {name: round(trainer.overhead_s[name], 6) for name in OVERHEADS if trainer.overhead_s.get(name)}
        try:
            self._metrics.write(line)
        except TypeError as error:
            raise UserError(
                "model.callback_metric",
                f"a callback added a metric to step {step} that is not JSON: {error}. Convert tensors with .item()",
            ) from error

    def on_save(self, trainer: TrainerContext, step: int) -> None:
        """Sync metrics.jsonl, so that it has the lines of all steps up to the checkpoint."""
        self._metrics.sync()


class ProgressLog(Callback):
    """Prints a line about the first step, each `train.log_every`-th step, and each skipped step."""

    def __init__(self, task: Task, log_every: int) -> None:
        self.task = task
        self.log_every = log_every

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the line of the step if one is due."""
        if "skipped" in metrics:
            trainer.log(f"step {step} is skipped: {metrics['skipped']}")
        elif step % self.log_every == 0 or step == 1:
            speed = f"{self.task.units_per_step / trainer.step_s:,.0f} {self.task.unit}/s"
            trainer.log(
                f"step {step}/{trainer.steps}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}  "
                f"lr {metrics['lr']:.2e}  {speed}"
            )
