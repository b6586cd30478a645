"""Tests of `train.ema`: averages equal those of plain torch on every layout, and stops do not change them."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.checkpoint.catalog import checkpoint_name, find_newest_step
from pipeline.config.sections import Config
from pipeline.parallel.mesh import resolve_layout
from pipeline.run.directory import Run
from planning.memory import estimate_memory
from planning.rehearse import rehearse_rank
from planning.timeline import rank_actions
from tests.resilience.test_guard import train_with_nan_gradients
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank
from tests.support.tiny_training import (
    STEPS,
    VOCAB,
    change_layouts_on_rank,
    continue_training,
    make_batches,
    tiny_config,
    train_steps,
)
from tests.train.test_exact import check_same_result, create_run, interrupt_training, read_steps

EMA = {"decay": 0.8}
Arrays = dict[str, np.ndarray[Any, Any]]
"""Whole tensors by name."""
Case = dict[str, dict[str, Any]]
"""Sections of a config."""

ONE_RANK: list[Case] = [
    {},
    {"train": {"ema": {**EMA, "every_steps": 3}}},
    {"optimizer": {"freeze": ["model.embed_tokens.*", "model.layers.0.*"]}},
    {"optimizer": {"name": "muon", "lr": 1e-2}},
    {"optimizer": {"state": {"master": "none"}}, "train": {"precision": "bf16"}},
    {"train": {"precision": "bf16"}, "parallel": {"offload": True}},
]
FOUR_RANKS: list[Case] = [
    {"parallel": {"zero": 3}},
    {"parallel": {"tensor": 2, "pipeline": 2}},
    {},
    {"parallel": {"zero": 1}, "train": {"precision": "bf16"}},
    {"parallel": {"context": 2, "zero": 2}, "optimizer": {"freeze": ["*norm*"]}},
    {"parallel": {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2, "zero": 2},
     "model": {"tie_word_embeddings": True}},
    {"parallel": {"pipeline": 2, "tensor": 2}, "model": {"tie_word_embeddings": True}},
    {"parallel": {"zero": 3}, "optimizer": {"state": {"master": "none"}}, "train": {"precision": "bf16"}},
]  # fmt: skip


def make_config(ranks: int, case: Case) -> Config:
    """Return a config with a moving average for a case of `ONE_RANK` or `FOUR_RANKS`."""
    return tiny_config(ranks, **{**case, "train": {"ema": EMA, "global_batch": 16, **case.get("train", {})}})


def gather_tensors(engine: Any, prefix: str) -> Arrays:
    """Return this rank's whole tensors whose names begin with `prefix`, as fp32."""
    from pipeline.model.decoder import full_tensor

    return {
        name.removeprefix(prefix): full_tensor(tensor).float().numpy().copy()
        for name, tensor in engine.state_dict().items()
        if name.startswith(prefix)
    }


def train_and_record(rank_info: RankInfo, configs: list[Config], scale: float | None) -> list[tuple[Arrays, Arrays]]:
    """Train with each config. Return the averages of the engine, and averages of the weights of each step in fp64.

    Args:
        rank_info: this rank.
        configs: the configs.
        scale: the loss scale of fp16 from step 4 on; None for the default.
    """
    from pipeline.comm import groups

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        engine, _ = train_steps(rank_info, config, world, 0)
        ema = config.train.ema
        assert ema is not None
        averages = {name: weight.astype(np.float64) for name, weight in gather_tensors(engine, "model.").items()}
        skipped = 0
        for step in range(1, STEPS + 1):
            if step == 4 and scale is not None:
                engine.scaler.scale = scale
            ((_, norm),) = continue_training(engine, rank_info, step - 1, 1)
            skipped += not math.isfinite(norm)
            if math.isfinite(norm) and step % ema.every_steps == 0:
                for name, weight in gather_tensors(engine, "model.").items():
                    averages[name] = ema.decay * averages[name] + (1 - ema.decay) * weight
        assert bool(skipped) == (scale is not None)
        results.append((gather_tensors(engine, "ema."), averages))
    return results


def average_in_plain_torch(rank_info: RankInfo, config: Config) -> Arrays:
    """Train with plain torch, and return the averages of torch.optim.swa_utils."""
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    from pipeline.model.decoder import Decoder, init_weights

    assert config.train.ema is not None
    model: Any = Decoder(config.model, VOCAB, config.data.sequence_length)
    init_weights(model, config.run.seed, config.model.initializer_range)
    averaged_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.train.ema.decay))
    averaged_model.update_parameters(model)  # The first call copies the initial weights.
    options = config.optimizer
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    for batch in make_batches(config)[:STEPS]:
        logits = model(batch[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm or 0.0)
        optimizer.step()
        optimizer.zero_grad()
        averaged_model.update_parameters(model)
    average: Any = averaged_model.module
    return {name: parameter.detach().numpy() for name, parameter in average.named_weights()}


def check_recorded(results_by_rank: list[list[tuple[Arrays, Arrays]]], configs: list[Config]) -> list[Arrays]:
    """Compare the averages of all ranks with those of the recorded weights. Return the averages of each config."""
    averages_by_config = []
    for results, config in zip(zip(*results_by_rank, strict=True), configs, strict=True):
        averages: Arrays = {}
        all_names = set()
        for ema, expected in results:
            averages |= ema
            all_names |= expected.keys()
            assert ema.keys() <= expected.keys()
            for name, average in ema.items():
                np.testing.assert_allclose(average, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
        frozen_names = all_names - averages.keys()
        assert bool(frozen_names) == bool(config.optimizer.freeze)
        averages_by_config.append(averages)
    return averages_by_config


def check_close(averages: Arrays, expected: Arrays, tolerance: float) -> None:
    """Compare arrays. `tolerance` is relative to the largest value of an array."""
    assert averages.keys() == expected.keys()
    for name, average in averages.items():
        assert abs(average - expected[name]).max() <= tolerance * abs(expected[name]).max(), name


@pytest.fixture(scope="module")
def expected() -> Arrays:
    """Train with plain torch, and return the averages by name."""
    return run_ranks(1, average_in_plain_torch, make_config(1, {}))[0]


def check_equal_to_plain_torch(averages: Arrays, expected: Arrays) -> None:
    """Compare averages with those of plain torch, which computes gradients in another order."""
    check_close(averages, expected, 1e-4)


def test_averages_equal_those_of_torch_on_one_rank(expected: Arrays) -> None:
    configs = [make_config(1, case) for case in ONE_RANK]
    averages = check_recorded(run_ranks(1, train_and_record, configs, None), configs)
    check_equal_to_plain_torch(averages[0], expected)
    assert any((averages[0][name] != averages[1][name]).any() for name in averages[0])


@pytest.mark.story
def test_averages_equal_those_of_torch_on_four_ranks(expected: Arrays) -> None:
    configs = [make_config(4, case) for case in FOUR_RANKS[:2]]
    for averages in check_recorded(run_ranks(4, train_and_record, configs, None), configs):
        check_equal_to_plain_torch(averages, expected)


@pytest.mark.story
def test_averages_of_other_layouts_equal_those_of_the_weights_of_each_step() -> None:
    configs = [make_config(4, case) for case in FOUR_RANKS[2:]]
    check_recorded(run_ranks(4, train_and_record, configs, None), configs)


def test_steps_that_the_loss_scaler_skips_do_not_change_the_average() -> None:
    """The loss scale becomes so large that the gradients of several steps overflow."""
    configs = [make_config(1, {"train": {"precision": "fp16"}})]
    check_recorded(run_ranks(1, train_and_record, configs, 2.0**30), configs)


def test_averages_are_restored_to_the_bit_on_other_layouts(tmp_path: Path) -> None:
    """The digest covers the averages."""
    first_config = make_config(4, {"parallel": {"zero": 3}})
    other_configs = [make_config(4, {"parallel": parallel}) for parallel in ({"tensor": 2, "pipeline": 2}, {})]
    results = run_ranks(4, change_layouts_on_rank, first_config, other_configs, tmp_path, 3, 2)
    assert len({digest for digest, _ in results[0]}) == 1


# -- whole runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory. All runs of this module use this data."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def read_averages(run: Run) -> Arrays:
    """Return the averages in the newest checkpoint of a run."""
    return run_ranks(1, read_averages_on_rank, run.path)[0]


def read_averages_on_rank(_: RankInfo, path: Path) -> Arrays:
    """Return the averages in the newest checkpoint of the run at `path`, and check that all weights have one."""
    from pipeline.checkpoint.checkpointer import CheckpointReader, iterate_tensors

    folder = Run.open(path).checkpoints_dir
    checkpoint = folder / checkpoint_name(find_newest_step(folder))
    names = [*CheckpointReader(checkpoint).read_metadata().state_dict_metadata]
    averages = [name for name in names if name.startswith("ema.")]
    weights = [name for name in names if name.startswith("model.")]
    assert sorted(averages) == sorted("ema." + name.removeprefix("model.") for name in weights)
    return {name.removeprefix("ema."): tensor.numpy() for name, tensor in iterate_tensors(checkpoint, averages)}


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.zero=3",),
        pytest.param(("parallel.local_sgd={every: 3}",), marks=pytest.mark.story),
        pytest.param(("train.precision=fp16", "train.ema.every_steps=2"), marks=pytest.mark.story),
    ],
)
def test_stops_do_not_change_the_averages(tmp_path: Path, data: Path, overrides: tuple[str, ...]) -> None:
    overrides = ("train.ema={decay: 0.8}", "train.steps=16", *overrides)
    undisturbed_run = create_run(tmp_path, "undisturbed", data, *overrides)
    run = create_run(tmp_path, "stopped", data, *overrides)
    assert set(run_ranks(2, run_stage_on_rank, undisturbed_run.path, "train")) == {ExitCode.DONE}
    interrupt_training(run, 2, signal.SIGTERM, 5, [1])
    assert len(read_steps(run)) < 16
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    check_same_result(run, undisturbed_run)
    check_close(read_averages(run), read_averages(undisturbed_run), 0.0)


def test_a_run_continues_its_averages_on_another_layout(tmp_path: Path, data: Path) -> None:
    overrides = ("train.ema={decay: 0.8}", "model.dropout=0.0", "optimizer.schedule=constant")
    undisturbed_run = create_run(tmp_path, "undisturbed", data, *overrides, "train.steps=9")
    run = create_run(tmp_path, "moved", data, *overrides, "train.steps=6", "parallel.zero=3")
    for each in (undisturbed_run, run):
        assert set(run_ranks(2, run_stage_on_rank, each.path, "train")) == {ExitCode.DONE}
    run.apply_overrides(["train.steps=9", "parallel.zero=0", "parallel.pipeline=2"])
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    check_close(read_averages(run), read_averages(undisturbed_run), 1e-3)


def train_with_nan_gradients_and_record(rank_info: RankInfo, path: Path, steps: list[int]) -> int:
    """Run the train stage with NaN gradients in `steps`, and write the weights after each step to a file.

    The file of a skipped step has the suffix `.skipped`. A repeated step replaces its file.
    """
    from pipeline.model.decoder import full_tensor
    from pipeline.train import trainer as module
    from pipeline.train.callback import Callback, TrainerContext

    class Recorder(Callback):
        """Write the weights of each step."""

        def write(self, trainer: TrainerContext, step: int, suffix: str = "") -> None:
            arrays = {name: full_tensor(weight.detach()).numpy() for name, weight in trainer.named_parameters()}
            for file in path.glob(f"weights-{step:03}*"):
                file.unlink(missing_ok=True)
            np.savez(path / f"weights-{step:03}{suffix}.npz", allow_pickle=False, **arrays)

        def on_start(self, trainer: TrainerContext) -> None:
            if trainer.rank == 0 and trainer.start_step == 0:
                self.write(trainer, 0)

        def on_step_end(self, trainer: TrainerContext, step: int, metrics: dict[str, Any]) -> None:
            if trainer.rank == 0:
                self.write(trainer, step, ".skipped" if "skipped" in metrics else "")

    setattr(module, "make_user_callbacks", lambda _, config: [Recorder()])  # noqa: B010
    return train_with_nan_gradients(rank_info, path, steps, True)


def test_bad_steps_do_not_enter_the_average(tmp_path: Path, data: Path) -> None:
    """Step 5 is skipped. After steps 9 to 11, the run restarts from step 7, and excludes the samples of these steps."""
    run = create_run(tmp_path, "bad", data, "train.ema={decay: 0.8}", "recovery.skip_bad_steps=2", "train.steps=14")
    bad_steps = [5, 9, 10, 11]
    assert set(run_ranks(2, train_with_nan_gradients_and_record, run.path, bad_steps)) == {ExitCode.NON_FINITE}
    assert find_newest_step(run.checkpoints_dir) == 7
    assert set(run_ranks(2, train_with_nan_gradients_and_record, run.path, bad_steps)) == {ExitCode.DONE}
    files = sorted(run.path.glob("weights-*"))
    assert len(files) == 15 and [file.name for file in files if "skipped" in file.name] == ["weights-005.skipped.npz"]
    expected = {name: array.astype(np.float64) for name, array in np.load(files[0]).items()}
    for file in files[1:]:
        if "skipped" not in file.name:
            expected = {name: 0.8 * expected[name] + 0.2 * array for name, array in np.load(file).items()}
    averages = read_averages(run)
    assert averages.keys() == expected.keys()
    for name, average in averages.items():
        np.testing.assert_allclose(average, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_the_average_cannot_be_added_after_the_first_checkpoint(tmp_path: Path, data: Path) -> None:
    run = create_run(tmp_path, "late", data, "train.steps=2")
    run.apply_overrides(["train.ema={decay: 0.9}"])
    run.apply_overrides(["train.ema=null"])
    assert run_ranks(1, run_stage_on_rank, run.path, "train") == [ExitCode.DONE]
    with pytest.raises(UserError, match=r"train\.ema.*step-00000002"):
        run.apply_overrides(["train.steps=4", "train.ema={decay: 0.9}"])


@pytest.mark.parametrize("decay", [0.0, 1.0, 1.5])
def test_a_decay_of_0_or_1_is_an_error(decay: float) -> None:
    with pytest.raises(UserError, match=r"train\.ema\.decay"):
        tiny_config(1, train={"ema": {"decay": decay}})


def test_the_planned_memory_of_averages_equals_that_of_a_rehearsal() -> None:
    """The larger memory with the average is exactly 4 bytes for each trained value on the rank."""
    cases: list[Case] = [
        {"parallel": {"tensor": 2, "zero": 3}},
        {"parallel": {"pipeline": 2}, "model": {"tie_word_embeddings": True}},
        {"parallel": {"pipeline": 2}, "optimizer": {"freeze": ["model.embed_tokens.*", "model.layers.[013].*"]}},
    ]
    for case in cases:
        planned, rehearsed = [], []
        for ema in (None, EMA):
            config = make_config(4, {**case, "train": {"ema": ema}})
            layout = resolve_layout(config)
            pp_rank = layout.coordinates(3).pp
            actions = rank_actions(layout)[pp_rank]
            planned.append(estimate_memory(config, layout, pp_rank, VOCAB, actions, on_cpu=True).optimizer)
            rehearsed.append(rehearse_rank(config, 3, VOCAB).peak_by_kind()["optimizer"])
        assert planned[1] - planned[0] == rehearsed[1] - rehearsed[0], case
        assert planned[1] - planned[0] == planned[0] / 2 > 0, "AdamW has two moments of the same size"
