"""The stage `train`: all ranks together train the model from the newest checkpoint to the last step."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from textwrap import shorten

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_last_object
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.catalog import (
    completes_stage,
    describe_missing_checkpoints,
    find_newest_step,
    read_early_stop,
)
from pipeline.data.manifest import count_training_steps, format_amount_read, format_training_length
from pipeline.model.spec import check_targets, list_layers
from pipeline.parallel.mesh import check_tensor_group_on_one_node
from pipeline.run.code import call_in_child_process
from pipeline.run.directory import Run
from pipeline.run.metrics import format_loss, format_speed, is_step_line
from pipeline.run.origin import read_origin
from pipeline.run.stages import Progress
from pipeline.train.lr_schedule import compute_learning_rate


def describe_missing_outputs(run: Run) -> str | None:
    """Return a message if the stage is not done; None if the final checkpoint exists.

    The final checkpoint belongs to the last step, or to an earlier step if a callback completed the stage early. For a
    trial of a search, it belongs to the step at which the trial pauses. This step must also have been evaluated.
    """
    step = find_newest_step(run.checkpoints_dir)
    steps = count_training_steps(run.config, run.data_dir)
    if steps and (step >= steps or is_complete_early(run, step, steps)):
        return None
    pause_step = run.pause_step
    if pause_step is not None and step >= pause_step:
        # If the ranks were stopped after this step, the next attempt evaluates it.
        line = read_last_object(run.metrics_file, is_step_line) or {}
        every = run.config.train.evaluate_every
        is_missing = every and pause_step % every == 0 and line.get("step") == pause_step
        return f"step {step} is not evaluated" if is_missing and "held_out_loss" not in line else None
    message = f"the newest checkpoint is step {step} of {pause_step or steps or 'an unknown number'}"
    return message if step else describe_missing_checkpoints(run) or message


def is_complete_early(run: Run, step: int, steps: int) -> bool:
    """Return True if a callback completed the stage early at `step`, and the stage need not continue.

    Args:
        run: the run.
        step: the step of the newest checkpoint.
        steps: the number of the last step of the stage.
    """
    return completes_stage(run, step, read_early_stop(run.checkpoints_dir, step), steps)


def progress(run: Run) -> Progress:
    """Return how many steps are done, with the loss and the speed of the last step in metrics.jsonl.

    If the number of steps is not known yet, return only the training length that the config requests.
    """
    steps = count_training_steps(run.config, run.data_dir)
    last_line = read_last_object(run.metrics_file, is_step_line)
    if steps is None:
        return Progress(format_training_length(run.config, run.data_dir))
    origin = read_origin(run)
    if last_line is None:
        step = origin.step if origin else 0
        return Progress(f"{step}/{steps} steps", step, steps, "starting")
    step = last_line["step"]
    loss = "-" if last_line["loss"] is None else f"{last_line['loss']:.4f}"
    running_message = f"step {step}/{steps}  {format_loss(last_line)}  {format_speed(last_line)}"
    # A step with longer sequences takes longer.
    tokens = run.config.count_tokens
    remaining_steps = (tokens(steps) - tokens(step)) / max(1, tokens(step) - tokens(step - 1))
    remaining_s = remaining_steps * last_line["step_time_s"]
    is_complete = step == steps or is_complete_early(run, step, steps)
    order_start = origin.order_start.step if origin else 0
    amount_read = format_amount_read(run.config, run.data_dir, step, order_start) if is_complete else ""
    early_note = ""
    if is_complete and step < steps:
        reason = (read_early_stop(run.checkpoints_dir, step) or {}).get("reason")
        early_note = f", completed early ({shorten(str(reason), 120, placeholder='…')})"
    elif not is_complete and step == run.pause_step:
        early_note = ", paused"
    message = f"{step}/{steps} steps{early_note}, {format_loss(last_line)}{amount_read}"
    return Progress(message, step, steps, running_message, loss, remaining_s)


def resume_note(run: Run) -> str | None:
    """Return a note for the user if the stage would start or resume with an unexpected learning rate; None otherwise.

    There are two unexpected cases:

    - The run has not completed a step yet, and its last step will have the learning rate 0.
    - The warm-up is over, and the next step has a higher learning rate than the last completed step. This happens if
      `train.steps` was raised, because the schedule depends on the number of steps of the run.

    If the user's module defines the schedule, the learning rates are unknown, and the result is None.
    """
    optimizer = run.config.optimizer
    steps = count_training_steps(run.config, run.data_dir)
    last_line = read_last_object(run.metrics_file, is_step_line)
    step = last_line["step"] if last_line else 0
    previous_lr = last_line.get("lr") if last_line else None
    # The user's module defines the schedule `own`.
    if optimizer.schedule == "own" or not steps or step >= steps:
        return None
    if last_line is None and steps > 1 and compute_learning_rate(optimizer, steps, steps) == 0:
        return (
            f"note: step {steps}, the last one, has learning rate 0 and changes no weight; if that is not intended, "
            "set optimizer.schedule_counts_from=0, which counts steps as transformers does, or a larger "
            "optimizer.min_lr_ratio"
        )
    # At this step, the position in the schedule is `warmup_steps` (`compute_learning_rate`).
    last_warmup_step = optimizer.warmup_steps + 1 - optimizer.schedule_counts_from
    if not previous_lr or step < last_warmup_step:
        return None
    lr = compute_learning_rate(optimizer, step + 1, steps)
    if lr <= previous_lr * (1 + 1e-9):  # The tolerance allows for rounding.
        return None
    return (
        f"note: the learning rate goes from {previous_lr:.3g} (step {step}) to {lr:.3g}: its schedule now ends at "
        f"step {steps}"
    )


def check_inputs(run: Run) -> None:
    """Raise UserError if a pattern of `optimizer.freeze` or of `adapter.targets` has no effect, or if all is frozen.

    Also raise UserError if transformers cannot build the model. A child process performs the checks that need torch. If
    the user's module defines the model, nothing is checked here.
    """
    config = run.config
    if config.model.backend == "transformers":
        adapter = "null" if config.adapter is None else config.adapter.model_dump_json()
        call_in_child_process(
            "pipeline.model.transformers_task", "check_config", config.model.model_dump_json(), adapter
        )
    elif config.adapter is not None and run.user_model is None:
        check_targets(config.adapter, list_layers(config.model))
    if config.optimizer.freeze and run.user_model is None:
        patterns = json.dumps(config.optimizer.freeze)
        model = config.model.model_dump_json()
        call_in_child_process("pipeline.train.optimizer", "check_freeze", patterns, model)


def preload(run: Run) -> None:
    """Import the modules that the ranks of the stage import, before a node agent forks the ranks."""
    from pipeline.comm import groups  # noqa: F401
    from pipeline.data import verify_shards  # noqa: F401
    from pipeline.resilience import health, watchdog  # noqa: F401
    from pipeline.train import trainer  # noqa: F401

    # The first optimizer step of a rank would import this module.
    importlib.import_module("torch._dynamo")
    if run.config.model.backend == "transformers":
        importlib.import_module("pipeline.model.transformers_task")
        importlib.import_module("transformers.models.auto.modeling_auto")
    if run.config.train.compile:
        importlib.import_module("torch._inductor.compile_fx")


def run_stage(run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Train until the last step, or until the ranks agree to stop.

    Args:
        run: the run.
        rank_info: the rank of this process and the world size.
        options: not used, because only other stages have options.
        flag: set by the signals that request a stop.

    Returns:
        DONE if the stage is complete, STOPPED if a later attempt must continue the stage.

    Raises:
        UserError: if the ranks or the data do not fit the config.
        NodeError: if this node fails its health check.
        CheckpointError: if all checkpoints are damaged or have disappeared, or if the newest intact checkpoint belongs
            to another config or other data.
    """
    check_tensor_group_on_one_node(rank_info, run.config.parallel.tensor)
    startup_durations_s: dict[str, float] = {}
    part_start_time = flag.start_time

    def record_startup_part(part: str) -> None:
        """Record how long this part of the start-up took: the time since the previous part ended."""
        nonlocal part_start_time
        now = time.monotonic()
        startup_durations_s[part] = round(now - part_start_time, 3)
        part_start_time = now

    from pipeline.comm import groups
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.resilience import health
    from pipeline.resilience.watchdog import Watchdog
    from pipeline.train.trainer import Trainer

    record_startup_part("imports")

    watchdog = Watchdog(run, "train", rank_info, flag)
    watchdog.start()
    manifest = load_run_manifest(run)
    groups.configure_determinism(run.config)
    world = groups.join_process_group(rank_info, run.config)
    record_startup_part("rendezvous")
    if run.config.recovery.preflight:
        health.check_health(run, rank_info, world)
        record_startup_part("preflight")
    trainer = Trainer(run, manifest, rank_info, world, flag, watchdog)
    groups.finish_startup(world.device)
    record_startup_part("build_and_load")
    trainer.startup_s = startup_durations_s
    exit_code = trainer.fit()
    watchdog.close()
    groups.leave_process_group()
    return exit_code
