"""Train a tiny model on random tokens, with one or several layouts in turn, in forked ranks."""

from __future__ import annotations

from typing import Any

from pipeline.base.dist_env import RankInfo
from pipeline.config.read import parse_config
from pipeline.config.sections import Config

VOCAB = 64
"""Size of the vocabulary."""
STEPS = 10
"""Steps of a training run, if the test does not set another number."""
BATCHES = 13
"""Number of global batches, for tests that train more than STEPS steps."""


def tiny_config(ranks: int, **sections: dict[str, Any]) -> Config:
    """Return a config for `ranks` ranks. The keys in `sections` replace or extend those of the default config."""
    config: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "seed": 5},
        "data": {"sequence_length": 16, "tokenizer": {"vocab_size": 512}},
        "model": {"dim": 16, "layers": 4, "heads": 4, "intermediate_size": 32},
        "train": {"steps": STEPS, "global_batch": 16, "micro_batch": 2},
        "optimizer": {"lr": 2e-3, "clip_norm": 0.1},  # gradients have a norm of about 0.35
        "stages": {"train": {"tasks_per_node": ranks}},
    }
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    return parse_config(config, "tiny")


def make_batches(config: Config, vocab: int = VOCAB) -> Any:
    """Return global batches of random tokens: int64 of shape (BATCHES, train.global_batch, sequence length + 1).

    Every call returns the same tokens.
    """
    import torch

    shape = (BATCHES, config.train.global_batch, config.data.sequence_length + 1)
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))


def train_steps(
    rank_info: RankInfo, config: Config, world: Any, steps: int = STEPS, vocab: int = VOCAB
) -> tuple[Any, list[tuple[float, float]]]:
    """Train `steps` steps. Return the engine, and (loss, gradient norm) of each step."""
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    layout = resolve_layout(config, world.size, rank_info.local_world_size, vocab)
    engine = Engine(config, layout, world, DecoderTask(config, vocab))
    return engine, continue_training(engine, rank_info, 0, steps)


def train_configs(
    rank_info: RankInfo, configs: list[Config], vocab: int = VOCAB, steps: int = STEPS
) -> list[list[tuple[float, float]]]:
    """Train `steps` steps with each config. Return, for each config, (loss, gradient norm) of each step."""
    import warnings

    from pipeline.comm import groups

    warnings.filterwarnings("error", message="FSDP2-wrapped module")  # torch 2.13 warns if an output is a view
    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    return [train_steps(rank_info, config, world, steps, vocab)[1] for config in configs]


def change_layouts_on_rank(
    rank_info: RankInfo, first_config: Config, other_configs: list[Config], folder: Any, first_steps: int, steps: int
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Train with `first_config`, then continue with each of `other_configs`.

    The first config trains `first_steps` steps. Each other config loads the checkpoint of the previous config instead.
    Each config then saves a checkpoint and trains `steps` further steps, which are the same for all configs.

    Args:
        rank_info: this rank.
        first_config: config of the first engine.
        other_configs: configs with other layouts.
        folder: folder for the checkpoints.
        first_steps: number of steps before the first checkpoint.
        steps: number of steps that each config trains after its checkpoint.

    Returns:
        For each config: the digest of its checkpoint, and (loss, gradient norm) of each of its `steps` steps.
    """
    import torch.distributed as dist

    from pipeline.checkpoint import catalog
    from pipeline.checkpoint.checkpointer import Checkpointer, compute_digest
    from pipeline.comm import groups

    groups.configure_determinism(first_config)
    world = groups.join_process_group(rank_info, first_config)
    results = []
    for number, config in enumerate([first_config, *other_configs]):
        engine, _ = train_steps(rank_info, config, world, first_steps if number == 0 else 0)
        checkpointer = Checkpointer(
            folder,
            dist.new_group(backend="gloo"),
            keep=9,
            background=False,
            manifest_entries={"layout": {}},
            on_saved=lambda *_: None,
        )
        if number:
            for tensor in engine.state_dict().values():  # so that `restore` must load every tensor
                getattr(tensor, "_local_tensor", tensor).fill_(-1)
            assert checkpointer.restore(engine.state_dict(), lambda *_: None) is not None
            engine.finish_loading()
        checkpointer.save(engine.state_dict(), step=number + 1, samples_consumed=0, extra={})
        digest = compute_digest(folder / catalog.checkpoint_name(number + 1))
        results.append((digest, continue_training(engine, rank_info, first_steps, steps)))
        checkpointer.close()
    return results


def resave_on_rank(rank_info: RankInfo, path: Any, folder: Any) -> str:
    """Restore the run at `path` with the layout of its config, save it to `folder` at once, and return the digest."""
    from pipeline.checkpoint import catalog
    from pipeline.checkpoint.checkpointer import Checkpointer, compute_digest
    from pipeline.comm import groups
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.run.directory import Run
    from pipeline.train.trainer import Trainer
    from tests.support.tiny import PassiveStopFlag

    run = Run.open(path)
    world = groups.join_process_group(rank_info, run.config)
    trainer = Trainer(run, load_run_manifest(run), rank_info, world, PassiveStopFlag())
    assert trainer.start_step > 0, "the trainer restored no checkpoint"
    checkpointer = Checkpointer(
        folder,
        groups.new_control_group(),
        keep=1,
        background=False,
        manifest_entries={"layout": {}},
        on_saved=lambda *_: None,
    )
    checkpointer.save(trainer.engine.state_dict(), step=1, samples_consumed=0, extra={})
    return compute_digest(folder / catalog.checkpoint_name(1))


def continue_training(engine: Any, rank_info: RankInfo, last_step: int, steps: int) -> list[tuple[float, float]]:
    """Train the `steps` steps after step `last_step`. Return (loss, gradient norm) of each step.

    Also check the norm after clipping. An error in the clipping would hardly change the losses, because the update of
    AdamW does not depend on the scale of the gradients.
    """
    from pipeline.train.optimizer import LeanAdamW

    limit = engine.config.optimizer.clip_norm
    dp_rank = engine.layout.coordinates(rank_info.rank).dp
    results = []
    batches = make_batches(engine.config, engine.task.vocab_size)
    for step, batch in list(enumerate(batches, 1))[last_step : last_step + steps]:
        loss = engine.backward({"tokens": batch.chunk(engine.layout.dp)[dp_rank]}, step)
        norm = engine.clip_gradients(limit)
        parameters = [p for part in engine.parts for p in part.parameters() if p.grad is not None]
        clipped_norm = engine._compute_norm(parameters)
        if isinstance(engine.optimizer, LeanAdamW):  # multiplies the gradients by this factor only in its update
            clipped_norm *= engine.optimizer.gradient_factor
        assert abs(clipped_norm - min(norm, limit)) <= 1e-4 * limit or not norm.isfinite(), (clipped_norm, norm)
        engine.update_weights(norm.item())
        results.append((loss.item(), norm.item()))
    return results
