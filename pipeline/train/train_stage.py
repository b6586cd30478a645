"""Stage train: from where the checkpoints stand to the last step, in all ranks together."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_last_object
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.catalog import describe_missing_checkpoints, find_newest_step
from pipeline.data.manifest import amount_words, steps_of, steps_words
from pipeline.parallel.mesh import check_tensor_group_on_one_node
from pipeline.run.code import call_in_child_process
from pipeline.run.directory import Run
from pipeline.run.lines import metric
from pipeline.run.metrics import loss_words, speed_words
from pipeline.run.stages import Progress
from pipeline.train.lr_schedule import compute_learning_rate


def missing(run: Run) -> str | None:
    """Why training is not done; None when the checkpoint of the last step is there."""
    step, steps = find_newest_step(run.checkpoints_dir), steps_of(run.config, run.data_dir)
    if steps and step >= steps:
        return None
    words = f"the newest checkpoint is step {step} of {steps or 'an unknown number'}"
    return words if step else describe_missing_checkpoints(run) or words


def progress(run: Run) -> Progress:
    """How far it is."""
    steps, last = steps_of(run.config, run.data_dir), read_last_object(run.metrics_file, metric)
    if steps is None:
        return Progress(steps_words(run.config, run.data_dir))
    if last is None:
        return Progress(f"0/{steps} steps", 0, steps, "starting")
    step, loss = last["step"], "-" if last["loss"] is None else f"{last['loss']:.4f}"
    running = f"step {step}/{steps}  {loss_words(last)}  {speed_words(last)}"
    left_s = (steps - step) * last["step_time_s"]
    amount = amount_words(run.config, run.data_dir, step) if step == steps else ""
    return Progress(f"{step}/{steps} steps, {loss_words(last)}{amount}", step, steps, running, loss, left_s)


def note(run: Run) -> str | None:
    """What the learning rate does that a person may not expect: the last step is at 0, or the rate rises again.

    It rises after a larger `train.steps`, because the schedule goes by the last step.
    """
    optimizer, steps, last = (
        run.config.optimizer,
        steps_of(run.config, run.data_dir),
        read_last_object(run.metrics_file, metric),
    )
    step, before = (last["step"], last.get("lr")) if last else (0, None)
    if optimizer.schedule == "own" or not steps or step >= steps:
        return None
    if last is None and steps > 1 and compute_learning_rate(optimizer, steps, steps) == 0:
        return (
            f"note: step {steps}, the last one, has learning rate 0 and changes no weight; if that is not intended: "
            "optimizer.schedule_counts_from=0, as in transformers, or a larger optimizer.min_lr_ratio"
        )
    if not before or step < optimizer.warmup_steps + 1 - optimizer.schedule_counts_from:
        return None
    if (lr := compute_learning_rate(optimizer, step + 1, steps)) <= before * (1 + 1e-9):
        return None
    return f"note: the learning rate goes from {before:.3g} (step {step}) to {lr:.3g}: its schedule now ends at {steps}"


def look(run: Run) -> None:
    """Raise UserError for patterns of `optimizer.freeze` that do not fit the decoder, asked of torch, elsewhere."""
    if run.config.optimizer.freeze and run.user_model is None:
        patterns, model = json.dumps(run.config.optimizer.freeze), run.config.model.model_dump_json()
        call_in_child_process("pipeline.train.optimizer", "check_freeze", patterns, model)


def main(run: Run, place: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Train. Returns DONE at the last step and STOPPED where a signal was agreed on before."""
    check_tensor_group_on_one_node(place, run.config.parallel.tensor)
    startup_s: dict[str, float] = {}
    since = flag.start_time

    def mark(part: str) -> None:
        """Note how long a part of the start took."""
        nonlocal since
        startup_s[part], since = round(time.monotonic() - since, 3), time.monotonic()

    from pipeline.comm import groups
    from pipeline.data.verify_shards import manifest_of
    from pipeline.resilience import health
    from pipeline.resilience.watchdog import Watchdog
    from pipeline.train.trainer import Trainer

    mark("imports")

    watchdog = Watchdog(run, "train", place, flag)
    watchdog.start()
    manifest = manifest_of(run)
    groups.configure_determinism(run.config)
    world = groups.join_process_group(place, run.config)
    mark("rendezvous")
    if run.config.recovery.preflight:
        health.check_health(run, place, world)
        mark("preflight")
    trainer = Trainer(run, manifest, place, world, flag, watchdog)
    groups.finish_startup(world.device)
    mark("build_and_load")
    trainer.startup_s = startup_s
    result = trainer.fit()
    watchdog.close()
    groups.leave_process_group()
    return result
