"""Train a tiny model on random tokens with one layout after another, in ranks that are forked once."""

from __future__ import annotations

from typing import Any

from pipeline.base.dist_env import RankInfo
from pipeline.config.read import parse_config
from pipeline.config.sections import Config

VOCAB = 64
STEPS = 10
BATCHES = 13
"""Number of global batches, for tests that train more than STEPS steps."""


def tiny_config(ranks: int, **sections: dict[str, Any]) -> Config:
    """Return a config for `ranks` ranks; the keys of `sections` replace those of the same section."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "seed": 5},
        "data": {"sequence_length": 16, "tokenizer": {"vocab_size": 512}},
        "model": {"dim": 16, "layers": 4, "heads": 4, "intermediate_size": 32},
        "train": {"steps": STEPS, "global_batch": 16, "micro_batch": 2},
        "optimizer": {"lr": 2e-3, "clip_norm": 0.1},  # gradients have a norm of about 0.35
        "stages": {"train": {"tasks_per_node": ranks}},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return parse_config(base, "tiny")


def make_batches(config: Config, vocab: int = VOCAB) -> Any:
    """Return global batches of random tokens, int64 of shape (BATCHES, global_batch, T + 1), the same in every call."""
    import torch

    shape = (BATCHES, config.train.global_batch, config.data.sequence_length + 1)
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))


def train_steps(
    rank_info: RankInfo, config: Config, world: Any, steps: int = STEPS, vocab: int = VOCAB
) -> tuple[Any, list[tuple[float, float]]]:
    """Train `steps` steps; return the engine and the loss and gradient norm of each step."""
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    layout = resolve_layout(config, world.size, rank_info.local_world_size, vocab)
    engine = Engine(config, layout, world, DecoderTask(config, vocab))
    return engine, continue_training(engine, rank_info, 0, steps)


def train_rank(rank_info: RankInfo, configs: list[Config], vocab: int = VOCAB) -> list[list[tuple[float, float]]]:
    """Train with each config in turn; return the losses and gradient norms of each."""
    import warnings

    from pipeline.comm import groups

    warnings.filterwarnings("error", message="FSDP2-wrapped module")  # torch 2.13 warns if an output is a view
    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    return [train_steps(rank_info, config, world, vocab=vocab)[1] for config in configs]


def change_layout_rank(
    rank_info: RankInfo, first: Config, others: list[Config], folder: Any, first_steps: int, steps: int
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Train with `first` and save; then load, save and train with each of `others`.

    Each config loads the checkpoint that the previous one saved before it trained its own `steps` steps.

    Args:
        rank_info: this rank.
        first: config of the first engine.
        others: configs with other layouts.
        folder: where checkpoints are saved.
        first_steps: number of steps before the first save.
        steps: number of steps that each config trains after its save.

    Returns:
        For each config: the digest of its checkpoint, and the losses and gradient norms of its `steps` steps.
    """
    import torch.distributed as dist

    from pipeline.checkpoint import catalog
    from pipeline.checkpoint.checkpointer import Checkpointer, compute_digest
    from pipeline.comm import groups

    groups.configure_determinism(first)
    world = groups.join_process_group(rank_info, first)
    results = []
    for number, config in enumerate([first, *others]):
        engine, _ = train_steps(rank_info, config, world, first_steps if number == 0 else 0)
        saver = Checkpointer(
            folder,
            dist.new_group(backend="gloo"),
            keep=9,
            background=False,
            describe={"layout": {}},
            on_saved=lambda *_: None,
        )
        if number:
            for tensor in engine.state_dict().values():
                getattr(tensor, "_local_tensor", tensor).fill_(-1)
            assert saver.restore(engine.state_dict(), lambda *_: None) is not None
            engine.finish_loading()
        saver.save(engine.state_dict(), step=number + 1, samples_consumed=0, extra={})
        results.append(
            (
                compute_digest(folder / catalog.checkpoint_name(number + 1)),
                continue_training(engine, rank_info, first_steps, steps),
            )
        )
        saver.close()
    return results


def resave_rank(rank_info: RankInfo, path: Any, folder: Any) -> str:
    """Restore a run with the layout of its current config, save to `folder` without a step, return the digest."""
    from pipeline.checkpoint import catalog
    from pipeline.checkpoint.checkpointer import Checkpointer, compute_digest
    from pipeline.comm import groups
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.run.directory import Run
    from pipeline.train.trainer import Trainer
    from tests.support.tiny import HarmlessFlag

    run = Run.open(path)
    world = groups.join_process_group(rank_info, run.config)
    trainer = Trainer(run, load_run_manifest(run), rank_info, world, HarmlessFlag())
    assert trainer.start_step
    saver = Checkpointer(
        folder, groups.new_control_group(), keep=1, background=False, describe={"layout": {}}, on_saved=lambda *_: None
    )
    saver.save(trainer.engine.state_dict(), step=1, samples_consumed=0, extra={})
    return compute_digest(folder / catalog.checkpoint_name(1))


def continue_training(engine: Any, rank_info: RankInfo, last_step: int, steps: int) -> list[tuple[float, float]]:
    """Train the `steps` steps after step `last_step`; return their losses and gradient norms.

    Clipping is checked here, because it hardly changes the update of AdamW.
    """
    from pipeline.train.optimizer import LeanAdamW

    limit = engine.config.optimizer.clip_norm
    dp_rank = engine.layout.coordinates(rank_info.rank).dp
    results = []
    for step, batch in list(enumerate(make_batches(engine.config, engine.task.vocab_size), 1))[
        last_step : last_step + steps
    ]:
        loss = engine.backward({"tokens": batch.chunk(engine.layout.dp)[dp_rank]}, step)
        norm = engine.clip_gradients(limit)
        clipped = engine._compute_norm([p for part in engine.parts for p in part.parameters() if p.grad is not None])
        if isinstance(engine.optimizer, LeanAdamW):  # this optimizer clips in its update
            clipped *= engine.optimizer.gradient_factor
        assert abs(clipped - min(norm, limit)) <= 1e-4 * limit or not norm.isfinite(), (clipped, norm)
        engine.update_weights(norm.item())
        results.append((loss.item(), norm.item()))
    return results
