"""Tests of custom models (`model.target`).

The models are examples/vit.py on images, and tests/support/ragged.py on samples of different lengths.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import make_images
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import CheckpointError, ExitCode, InputError, UserError
from pipeline.base.files import add_checksum, read_jsonl
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.checkpoint.identity import check_identity
from pipeline.config.read import load_config
from pipeline.config.user_model import UNREAD_OPTIONS, find_user_model, resolve_user_model
from pipeline.data.sample_order import assign_to_ranks
from pipeline.publish.export import export_checkpoint
from pipeline.run.code import CODE_ROOT as ROOT
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from planning.plan import describe_plan
from tests.support.edits import replace_in_file
from tests.support.errors import raises_error
from tests.support.events import read_event_lines
from tests.support.ranks import make_rank_info, run_ranks
from tests.support.tiny import PassiveStopFlag, compute_run_digest, run_stage_on_rank
from tests.support.tiny_training import resave_on_rank
from tests.train.test_exact import interrupt_training, read_steps

VIT_CONFIG = """\
run: {{name: {name}, root: {folder}/runs, seed: 3}}
data: {{source: "{folder}/*.h5", held_out: 0.1}}
model:
  target: examples.vit
  layers: 2
  options: {{width: 16, heads: 2, dropout: 0.0, size: 16, channels: 1, patch: 8, classes: 8}}
train: {{steps: 10, global_batch: 16, micro_batch: 2}}
optimizer: {{lr: 1.0e-2, warmup_steps: 2, clip_norm: 0.5}}
checkpoint: {{every_steps: 7}}
stages: {{shard: {{tasks: 2}}}}
"""
_BEFORE_MODEL, _, _MODEL_AND_LATER = VIT_CONFIG.partition("model:")
RAGGED_CONFIG = (
    _BEFORE_MODEL + "model: {{target: ragged, options: {{width: 4}}}}\ntrain" + _MODEL_AND_LATER.partition("\ntrain")[2]
)


def create_prepared_run(folder: Path, name: str, *overrides: str, text: str = VIT_CONFIG, ranks: int = 1) -> Run:
    """Create a run from the config template `text`, with modules and data in `folder`, and run its data stages."""
    path = folder / f"{name}.yaml"
    path.write_text(text.format(name=name, folder=folder))
    shutil.copy(ROOT / "tests/support/ragged.py", folder)
    with contextlib.chdir(folder):  # model.target is searched in the working directory
        run = Run.create(load_config(path, (*overrides, f"stages.train.tasks_per_node={ranks}")))
    return prepare_data(run)


def prepare_data(run: Run) -> Run:
    """Run the stages prepare and shard, and check that their outputs are complete."""
    for stage in ("prepare", "shard"):
        assert (
            load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
            == ExitCode.DONE
        )
        assert load_stage_module(run, stage).describe_missing_outputs(run) is None
    return run


def train_run(run: Run, ranks: int) -> list[tuple[int, float, float, float, int]]:
    """Run the train stage until it is done, and return its steps as `read_steps` does."""
    assert set(run_ranks(ranks, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    return read_steps(run)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two files of images."""
    folder = tmp_path_factory.mktemp("images")
    make_images.main(folder / "a.h5", 150)
    make_images.main(folder / "b.h5", 90)
    return folder


@pytest.fixture(scope="module")
def series_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of random walks of 1 to 40 values, which are padded to 40 values.

    The padding values are so large that they change every result in which they are not masked.
    """
    folder = tmp_path_factory.mktemp("series")
    generator = np.random.default_rng(0)
    values = generator.normal(0, 0.3, (120, 40)).cumsum(1).astype(np.float32)
    lengths = (40 * generator.random(120) ** 3).astype(np.int32) + 1
    values[np.arange(40) >= lengths[:, None]] = 1e4
    with h5py.File(folder / "series.h5", "w") as file:
        file["series"] = values
        file["lengths"] = lengths
    return folder


def train_in_plain_torch(_: RankInfo, path: Path, steps: int) -> list[tuple[float, float]]:
    """Train the run at `path` in plain torch on one rank, without micro-batches. The arrays are read with h5py.

    Return the loss and the gradient norm of each step.
    """
    import torch

    from pipeline.data.sample_order import compute_index_range, permute
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.model.make_task import make_task
    from pipeline.train.lr_schedule import compute_learning_rate

    run = Run.open(path)
    config = run.config
    user_model = run.user_model
    assert user_model is not None
    samples: dict[str, list[Any]] = {name: [] for name in user_model.arrays}
    for source in sorted(path.parent.parent.glob("*.h5")):
        with h5py.File(source) as file:
            for name, arrays in samples.items():
                arrays += list(file[name][...])
    sample_count = len(samples[user_model.arrays[0]])
    training_count = sample_count - round(sample_count * config.data.held_out)
    training_samples = permute(0, -1, np.arange(training_count), sample_count)
    module = user_model.load(run.code_dir)
    task = make_task(run, load_run_manifest(run))
    assert str(module.__file__).startswith(str(run.code_dir)), "the module is not the copy in the run directory"
    model = task.build(range(config.model.layers)).to_empty(device="cpu")
    task.init_weights(model, torch.device("cpu"))
    groups = [
        {
            "params": [parameter for parameter in model.parameters() if parameter.ndim >= 2],
            "weight_decay": config.optimizer.weight_decay,
        },
        {"params": [parameter for parameter in model.parameters() if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: Any = torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps)
    rate_factors = [1.0, 1.0]  # for each group of parameters
    compute_rate = compute_learning_rate
    if config.optimizer.name == "own":
        optimizer = module.optimizer(list(model.named_parameters()), config.optimizer)
        rate_factors = [1.0, 0.5]  # as in OPTIMIZER_SOURCE, whose second group has half the learning rate
        compute_rate = module.learning_rate
    results = []
    for step in range(1, steps + 1):
        global_batch = config.train.global_batch
        order = compute_index_range(config.run.seed, (step - 1) * global_batch, global_batch, len(training_samples))
        indices = training_samples[order]
        batch = {name: torch.from_numpy(np.stack([arrays[i] for i in indices])) for name, arrays in samples.items()}
        for group, factor in zip(optimizer.param_groups, rate_factors, strict=True):
            group["lr"] = factor * compute_rate(config.optimizer, step, config.train.steps or 0)
        entries = batch["lengths"].sum() if "lengths" in batch else global_batch  # entries that have a loss
        loss = module.loss(model(*(batch[name] for name in user_model.inputs)), batch) / entries
        loss.backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), gradient_norm.item()))
    return results


def check_equal_steps(
    steps: list[tuple[int, float, float, float, int]], expected_steps: list[tuple[float, float]], case: str
) -> None:
    """Compare the losses and gradient norms of 10 steps of `train_run` with those of `train_in_plain_torch`."""
    assert len(steps) == len(expected_steps) == 10
    for (step, loss, gradient_norm, *_), expected in zip(steps, expected_steps, strict=True):
        assert (loss, gradient_norm) == pytest.approx(expected, rel=1e-5), f"{case}, step {step}: (loss, norm)"


# Layouts: the number of ranks, and overrides of the config.
LAYOUTS: list[tuple[int, tuple[str, ...]]] = [
    (1, ("train.micro_batch=16",)),
    (2, ()),
    (2, ("parallel.zero=2",)),
    (2, ("parallel.zero=3", "parallel.activation_checkpointing=selective")),
    (2, ("parallel.tensor=2", "train.micro_batch=8")),
    (2, ("parallel.pipeline=2", "parallel.activation_checkpointing=full")),
]
LONG_LAYOUTS: list[tuple[int, tuple[str, ...]]] = [
    (2, ("parallel.zero=1", "train.compile=true")),
    (2, ("parallel.pipeline=2", "parallel.schedule=gpipe")),
    (4, ("parallel.tensor=2", "parallel.zero=3")),
    (4, ("parallel.tensor=2", "parallel.pipeline=2")),
    (4, ("parallel.pipeline=2", "parallel.zero=2")),
    (2, ("parallel.offload=true", "parallel.zero=3")),
    (4, ("parallel.zero=3", "parallel.data={replicate: 2, shard: 2}")),
]
TWO_STAGES_PER_RANK = ("model.layers=4", "parallel.pipeline=2", "parallel.virtual_stages=2")
SCHEDULE_LAYOUTS: list[tuple[int, tuple[str, ...]]] = [
    (2, (*TWO_STAGES_PER_RANK, f"parallel.schedule={name}"))
    for name in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v")
]
SCHEDULE_LAYOUTS.append((4, (*TWO_STAGES_PER_RANK, "parallel.schedule=zbv", "parallel.tensor=2")))


@pytest.mark.parametrize(
    "layouts",
    [
        LAYOUTS,
        pytest.param(LONG_LAYOUTS, marks=pytest.mark.long),
        pytest.param(SCHEDULE_LAYOUTS, marks=pytest.mark.long),
    ],
    ids=["quick", "long", "schedules"],
)
def test_vit_has_the_losses_of_plain_torch_on_every_layout(
    image_folder: Path, layouts: list[tuple[int, tuple[str, ...]]], tmp_path: Path
) -> None:
    expected_steps = None
    for source in image_folder.glob("*.h5"):
        shutil.copy(source, tmp_path)
    for number, (ranks, overrides) in enumerate(layouts):
        run = create_prepared_run(tmp_path, f"layout{number}", *overrides, ranks=ranks)
        expected_steps = expected_steps or run_ranks(1, train_in_plain_torch, run.path, 10)[0]
        check_equal_steps(train_run(run, ranks), expected_steps, str(overrides))


@pytest.mark.story
def test_the_loss_of_vit_decreases_and_a_stop_does_not_change_the_result(image_folder: Path) -> None:
    """Dropout is on, so steps use random numbers. The results of evaluate must be bit-identical on 1 and 3 ranks."""
    overrides = ("train.steps=60", "model.options.dropout=0.1", "model.options.width=32")
    undisturbed_run = create_prepared_run(image_folder, "undisturbed", *overrides, ranks=2)
    run = create_prepared_run(image_folder, "stopped", *overrides, ranks=2)
    losses = [loss for _, loss, *_ in train_run(undisturbed_run, 2)]
    assert np.mean(losses[-5:]) < 0.75 * losses[0]
    interrupt_training(run, 2, signal.SIGTERM, 20, [1])
    assert 20 <= len(read_steps(run)) < 60
    assert train_run(run, 2) == read_steps(undisturbed_run) and compute_run_digest(run) == compute_run_digest(
        undisturbed_run
    )
    results = []
    for ranks in (1, 3):
        shutil.rmtree(undisturbed_run.evaluation_dir)
        undisturbed_run.evaluation_dir.mkdir()
        assert set(run_ranks(ranks, run_stage_on_rank, undisturbed_run.path, "evaluate")) == {ExitCode.DONE}
        results.append(json.loads((undisturbed_run.evaluation_dir / f"{checkpoint_name(60)}.json").read_text()))
    assert results[0] == results[1], "the results are not bit-identical"
    assert results[0]["samples"] == 24 and 0 < results[0]["accuracy"] <= 1 and "perplexity" not in results[0]
    evaluate_stage = load_stage_module(undisturbed_run, "evaluate")
    assert evaluate_stage.describe_missing_outputs(undisturbed_run) is None
    assert "held-out loss" in evaluate_stage.progress(undisturbed_run).description
    assert {"samples", "samples_per_s"} <= next(iter(read_jsonl(undisturbed_run.metrics_file))).keys()


OPTIMIZER_SOURCE = """

def optimizer(parameters, config):
    matrices = [(name, value) for name, value in parameters if value.ndim > 1]
    vectors = [(name, value) for name, value in parameters if value.ndim < 2]
    return Optimizer([{"params": matrices}, {"params": vectors, "lr": config.lr / 2}], lr=config.lr)


def learning_rate(config, step, steps):
    return config.lr / step


class StepCountingNAdam(torch.optim.NAdam):
    def step(self, closure=None):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


Optimizer = torch.optim.NAdam
"""
"""Source code of a custom optimizer and of a custom learning-rate schedule.

An error test replaces NAdam with `StepCountingNAdam`, which changes a value of its parameter groups.
"""

CUSTOM_OPTIMIZER_OVERRIDES = (
    "model.target=own",
    "optimizer.name=own",
    "optimizer.schedule=own",
    "train.steps=40",
    "train.evaluate_every=20",
    "train.ema={decay: 0.7}",
)


def write_module_with_optimizer(folder: Path) -> Path:
    """Write images, and a module `own.py`: examples/vit.py with a custom optimizer and schedule. Return its path."""
    make_images.main(folder / "a.h5", 150)
    module = folder / "own.py"
    module.write_text(Path(make_images.__file__).with_name("vit.py").read_text() + OPTIMIZER_SOURCE)
    return module


def test_a_custom_optimizer_and_schedule_have_the_steps_of_plain_torch_even_after_a_stop(tmp_path: Path) -> None:
    """The custom optimizer is NAdam, because NAdam's state is not zero before the first step."""
    write_module_with_optimizer(tmp_path)
    overrides = CUSTOM_OPTIMIZER_OVERRIDES
    undisturbed_run = create_prepared_run(tmp_path, "undisturbed", *overrides, ranks=2)
    run = create_prepared_run(tmp_path, "stopped", *overrides, ranks=2)
    steps = train_run(undisturbed_run, 2)
    (expected_steps,) = run_ranks(1, train_in_plain_torch, undisturbed_run.path, 40)
    for (_, loss, gradient_norm, *_), expected in zip(steps, expected_steps, strict=True):
        assert (loss, gradient_norm) == pytest.approx(expected, rel=1e-4)
    assert [lr for *_, lr, _ in read_steps(undisturbed_run)] == [1e-2 / step for step in range(1, 41)]
    interrupt_training(run, 2, signal.SIGTERM, 8, [1])
    assert 8 <= len(read_steps(run)) < 40
    assert train_run(run, 2) == read_steps(undisturbed_run) and compute_run_digest(run) == compute_run_digest(
        undisturbed_run
    )
    for key in ("held_out_accuracy", "held_out_ema_accuracy"):
        accuracies, accuracies_after_stop = (
            {line["step"]: line.get(key) for line in read_jsonl(metrics_file)}
            for metrics_file in (undisturbed_run.metrics_file, run.metrics_file)
        )
        assert accuracies == accuracies_after_stop
        assert [step for step, accuracy in accuracies.items() if accuracy is not None] == [20, 40]


def test_optimizer_own_requires_a_function_of_the_module(tmp_path: Path) -> None:
    write_module_with_optimizer(tmp_path)
    with raises_error("model.incomplete_module", "optimizer.name own", "function optimizer", "examples.vit"):
        create_prepared_run(tmp_path, "lacks", *CUSTOM_OPTIMIZER_OVERRIDES[1:], text=VIT_CONFIG)


RETURN_LBFGS = "    return torch.optim.LBFGS([value for _, value in parameters])\n    matrices"


@pytest.mark.parametrize(
    ("original_text", "replacement", "error_pattern"),
    [
        ("Optimizer = torch.optim.NAdam", "Optimizer = StepCountingNAdam", r"UserError: .* k of its parameter groups"),
        ("    matrices", RETURN_LBFGS, r"UserError: optimizer of model\.target.* closure"),
        ('{"params": matrices}, ', "", r"UserError: optimizer of model\.target.* groups"),
        ("config.lr / step", "None", r"UserError: learning_rate of model\.target.* None"),
        ('{"accuracy": ', '{"ema_loss": ', r"UserError: model\.target: the metric name ema_loss is reserved"),
    ],
)
def test_an_invalid_optimizer_schedule_or_metric_is_an_error(
    tmp_path: Path, original_text: str, replacement: str, error_pattern: str
) -> None:
    """`replacement` replaces `original_text` in the source of the module.

    The optimizers change a value of their parameter groups, need a closure, or lack parameters. The schedule returns
    None. The metric has the name of the loss of the moving average.
    """
    module = write_module_with_optimizer(tmp_path)
    replace_in_file(module, original_text, replacement)
    with pytest.raises(AssertionError, match=error_pattern):
        train_run(create_prepared_run(tmp_path, "invalid", *CUSTOM_OPTIMIZER_OVERRIDES), 1)


def read_callback_example() -> str:
    """Return the code of the example in docs/callbacks.md."""
    (section,) = re.findall(r"^## Your own callback$(.*?)^## ", (ROOT / "docs/callbacks.md").read_text(), re.M | re.S)
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    return str(code)


def read_averages(run: Run) -> list[tuple[int, float, float]]:
    """Return step, loss and average loss of each line of the metrics. The callback adds the average loss."""
    return [(line["step"], line["loss"], line["loss_average"]) for line in read_jsonl(run.metrics_file)]


@pytest.mark.story
def test_a_callback_adds_a_metric_and_stops_early_at_the_same_step_after_stops(tmp_path: Path) -> None:
    """The callback is the example of the documentation, on 1 and 2 ranks.

    The learning rate is so small that the loss does not decrease, so the callback stops the run.
    """
    make_images.main(tmp_path / "a.h5", 150)
    (tmp_path / "own.py").write_text(
        Path(make_images.__file__).with_name("vit.py").read_text() + "\n\n" + read_callback_example()
    )
    overrides = ("model.target=own", "optimizer.lr=1e-7", "train.steps=200")
    undisturbed_run = create_prepared_run(tmp_path, "undisturbed", *overrides, ranks=2)
    train_run(undisturbed_run, 2)
    averages = read_averages(undisturbed_run)
    last_step = averages[-1][0]
    # the callback stops the run 50 steps after the last improvement, which is in step 1 or later
    assert 51 <= last_step < 200 and averages[0][1] == averages[0][2]
    assert load_stage_module(undisturbed_run, "train").describe_missing_outputs(undisturbed_run) is None
    assert [event["step"] for event in read_event_lines(undisturbed_run, "train", "stopped_early")] == [last_step]
    train_run(undisturbed_run, 2)
    assert read_averages(undisturbed_run) == averages, "a train stage that is done must not continue"

    stopped_run = create_prepared_run(tmp_path, "stopped", *overrides, ranks=2)
    assert set(interrupt_training(stopped_run, 2, signal.SIGTERM, 20, [1])) == {ExitCode.STOPPED}
    assert (
        20 <= len(read_averages(stopped_run)) < last_step
        and load_stage_module(stopped_run, "train").describe_missing_outputs(stopped_run) is not None
    )
    train_run(stopped_run, 2)
    assert read_averages(stopped_run) == averages and compute_run_digest(stopped_run) == compute_run_digest(
        undisturbed_run
    )

    single_rank_run = create_prepared_run(
        tmp_path, "alone", *overrides, "checkpoint.every_steps=1", "checkpoint.keep=2"
    )
    train_run(single_rank_run, 1)
    averages_on_one_rank = read_averages(single_rank_run)
    digest_on_one_rank = compute_run_digest(single_rank_run)
    assert averages_on_one_rank[-1][0] == last_step
    # This is the state after a crash: the callback has requested the stop, but the last checkpoint is not saved yet.
    shutil.rmtree(single_rank_run.checkpoints_dir / checkpoint_name(last_step))
    train_run(single_rank_run, 1)
    assert (
        read_averages(single_rank_run) == averages_on_one_rank
        and compute_run_digest(single_rank_run) == digest_on_one_rank
    )


@pytest.mark.story
def test_a_change_of_layout_keeps_weights_and_losses(image_folder: Path, tmp_path: Path) -> None:
    """If a checkpoint is loaded on the new layout and saved again, the new checkpoint has the same digest."""
    overrides = ("optimizer.schedule=constant", "train.steps=14")
    unchanged_lines = train_run(create_prepared_run(image_folder, "unchanged", *overrides), 1)
    run = create_prepared_run(image_folder, "changed", *overrides, "train.steps=10", "parallel.tensor=2", ranks=2)
    train_run(run, 2)
    digest = compute_run_digest(run)
    run.apply_overrides(["train.steps=14", "parallel.tensor=1", "parallel.zero=3"])
    assert set(run_ranks(2, resave_on_rank, run.path, tmp_path)) == {digest}
    for line, unchanged_line in zip(train_run(run, 2), unchanged_lines, strict=True):
        assert line[:3] == pytest.approx(unchanged_line[:3], rel=1e-5)


# -- samples of different lengths ----------------------------------------------------------------------------


INIT_FROM_FILE = """\
    from safetensors import safe_open

    with safe_open(options["weights"], framework="pt") as file:
        values.copy_(file.get_tensor(name))
"""
"""Body of the function `init` of a model that starts from the weights in a file."""


@pytest.mark.story
def test_samples_of_different_lengths_have_the_losses_of_plain_torch(series_folder: Path) -> None:
    expected_steps = None
    layouts: list[tuple[int, tuple[str, ...]]] = [
        (1, ()),
        (2, ()),
        (2, ("parallel.zero=3",)),
        (4, ("train.micro_batch=4",)),
        (4, ("parallel.pipeline=2", "parallel.tensor=2")),
    ]
    for number, (ranks, overrides) in enumerate(layouts):
        run = create_prepared_run(series_folder, f"ragged{number}", *overrides, text=RAGGED_CONFIG, ranks=ranks)
        expected_steps = expected_steps or run_ranks(1, train_in_plain_torch, run.path, 10)[0]
        check_equal_steps(train_run(run, ranks), expected_steps, f"{ranks} ranks {overrides}")


def test_another_model_can_start_from_exported_weights(series_folder: Path) -> None:
    """`init` of the other model loads the weights, on another layout. The held-out loss is the same.

    The one step of the second run hardly changes the weights, because the learning rate is 1e-30.
    """
    run = create_prepared_run(series_folder, "evaluated", "evaluate.batch=5", text=RAGGED_CONFIG, ranks=2)
    train_run(run, 2)
    assert set(run_ranks(2, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}
    result = json.loads(next(run.evaluation_dir.iterdir()).read_text())
    assert result["samples"] == 12 and result["entries"] > 12 and 0 < result["loss"] < 100
    out = series_folder / "weights"
    assert "4 tensors" in export_checkpoint(run, out, None, "fp32")
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    module = (ROOT / "tests/support/ragged.py").read_text()
    assert module.count("    values.normal_(0.0, 0.3)") == 1
    (series_folder / "started.py").write_text(module.replace("    values.normal_(0.0, 0.3)", INIT_FROM_FILE))
    overrides = ("model.target=started", f"model.options.weights={out}/model.safetensors", "parallel.zero=3",
                 "train.steps=1", "optimizer.warmup_steps=0", "optimizer.lr=1.0e-30", "evaluate.batch=5")  # fmt: skip
    second_run = create_prepared_run(series_folder, "started", *overrides, text=RAGGED_CONFIG, ranks=2)
    train_run(second_run, 2)
    assert set(run_ranks(2, run_stage_on_rank, second_run.path, "evaluate")) == {ExitCode.DONE}
    second_result = json.loads(next(second_run.evaluation_dir.iterdir()).read_text())
    assert second_result["loss"] == pytest.approx(result["loss"], rel=1e-6)


def export_adapter_on_rank(_: RankInfo, path: Path, folder: Path) -> dict[str, Any]:
    """Export the adapter, and the model with it. Return the arrays of the model without it.

    This runs in another process than the test, which has imported the package of the module from another folder.
    """
    from pipeline.model.open_weights import open_base_weights

    run = Run.open(path)
    export_checkpoint(run, folder / "adapter", None, "fp32")
    export_checkpoint(run, folder / "merged", None, "fp32", merge=True)
    read_base, shapes = open_base_weights(run)
    return {name: read_base(name).numpy() for name in shapes}


def test_adapters_of_a_custom_model_are_the_same_on_every_layout_and_after_a_stop(image_folder: Path) -> None:
    from safetensors.torch import load_file

    adapter = "adapter={rank: 2, alpha: 8, targets: ['*']}"
    averaged = ("train.evaluate_every=5", "train.ema={decay: 0.7}")
    run = create_prepared_run(image_folder, "adapted", adapter, *averaged)
    steps = train_run(run, 1)
    assert steps[-1][1] < steps[0][1]
    layouts = {"zero": "parallel.zero=3", "tensor": "parallel.tensor=2", "pipeline": "parallel.pipeline=2"}
    for name, override in layouts.items():
        other_run = create_prepared_run(image_folder, f"adapted-{name}", adapter, override, ranks=2)
        check_equal_steps(train_run(other_run, 2), [step[1:3] for step in steps], name)
    stopped_run = create_prepared_run(image_folder, "adapted-stopped", adapter, *averaged)
    interrupt_training(stopped_run, 1, signal.SIGUSR1, 3, [0])
    train_run(stopped_run, 1)
    assert compute_run_digest(stopped_run) == compute_run_digest(run)

    assert run_ranks(1, run_stage_on_rank, run.path, "evaluate") == [ExitCode.DONE]
    result = json.loads(next(run.evaluation_dir.iterdir()).read_text())
    last_line = [*read_jsonl(run.metrics_file)][-1]
    for name in ("loss", "ema_loss"):
        assert result[name] == pytest.approx(last_line[f"held_out_{name}"], rel=1e-6)
    assert result["loss"] != result["ema_loss"]
    (base,) = run_ranks(1, export_adapter_on_rank, run.path, image_folder)
    weights = load_file(image_folder / "adapter/adapter_model.safetensors")
    merged = load_file(image_folder / "merged/model.safetensors")
    assert merged.keys() == base.keys()
    for name, weight in merged.items():
        layer = "base_model.model." + name.removesuffix(".weight")
        difference = weight - base[name]
        if f"{layer}.lora_A.weight" not in weights:
            assert not difference.any()
            continue
        expected = 4 * weights[f"{layer}.lora_B.weight"] @ weights[f"{layer}.lora_A.weight"]
        assert expected.abs().max() > 1e-3 and (difference - expected).abs().max() < 1e-6
    manifest = json.loads((run.checkpoints_dir / "step-00000010/manifest.json").read_text())
    with pytest.raises(CheckpointError, match="base_hash"):
        check_identity(manifest, {**manifest, "base_hash": "other initial weights"})


def test_the_sampler_assigns_a_global_batch_to_ranks_with_balanced_lengths(series_folder: Path) -> None:
    from pipeline.data.sample_order import GlobalOrderSampler, compute_index_range
    from pipeline.data.samples import SampleDataset
    from pipeline.data.verify_shards import load_run_manifest

    run = create_prepared_run(series_folder, "assigned", text=RAGGED_CONFIG)
    dataset: Any = SampleDataset(load_run_manifest(run))  # type: ignore[arg-type]
    batches_by_rank = []
    for rank in range(4):
        steps = iter(
            GlobalOrderSampler(dataset, global_batch=16, seed=3, samples_consumed=32, num_replicas=4, rank=rank)
        )
        batches_by_rank.append([next(steps) for _ in range(9)])
    improved_batches = 0  # batches whose sums of lengths differ less than those of contiguous ranges
    for step, indices_by_rank in enumerate(zip(*batches_by_rank, strict=True)):
        expected = compute_index_range(3, 32 + 16 * step, 16, len(dataset))
        assert sorted(np.concatenate(indices_by_rank)) == sorted(expected)
        sums = [int(dataset.lengths(indices).sum()) for indices in indices_by_rank]
        contiguous_sums = [int(dataset.lengths(indices).sum()) for indices in expected.reshape(4, 4)]
        assert max(sums) <= max(contiguous_sums) and np.ptp(sums) <= dataset.lengths(expected).max()
        improved_batches += np.ptp(sums) < np.ptp(contiguous_sums)
    assert improved_batches >= 8, f"the sums are more even in {improved_batches} of 9 batches only"


@settings(max_examples=200)
@given(st.data(), st.integers(1, 6), st.integers(1, 7))
def test_ranks_get_equally_many_samples_and_no_larger_sum_than_contiguous_ranges(
    data: st.DataObject, ranks: int, samples_per_rank: int
) -> None:
    global_batch = ranks * samples_per_rank
    values = data.draw(st.lists(st.integers(1, 1000), min_size=global_batch, max_size=global_batch))
    lengths = np.array(values, dtype=np.int64)
    assignment = assign_to_ranks(lengths, ranks)  # the samples of each rank
    assert assignment.shape == (ranks, samples_per_rank) and sorted(assignment.ravel()) == list(range(global_batch))
    assert (assign_to_ranks(lengths, ranks) == assignment).all()
    assert lengths[assignment].sum(1).max() <= lengths.reshape(ranks, samples_per_rank).sum(1).max()
    # Each rank gets its samples in the order of decreasing length, so a micro-batch has samples of similar lengths.
    assert (np.diff(lengths[assignment], axis=1) <= 0).all()


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(8, 16))
def test_skewed_lengths_are_assigned_nearly_evenly(seed: int, ranks: int, samples_per_rank: int) -> None:
    """The sums of the ranks differ by at most the longest sample.

    In at least 16 of 20 batches, they differ by less than the sums of contiguous ranges.
    """
    batches = np.random.default_rng(seed).lognormal(4, 1, (20, ranks * samples_per_rank)).astype(np.int64) + 1
    improved_batches = 0
    for lengths in batches:
        sums = lengths[assign_to_ranks(lengths, ranks)].sum(1)
        assert np.ptp(sums) <= lengths.max()
        improved_batches += np.ptp(sums) < np.ptp(lengths.reshape(ranks, samples_per_rank).sum(1))
    assert improved_batches >= 16


def test_contiguous_ranges_are_used_if_the_greedy_assignment_is_worse() -> None:
    """The greedy assignment has the sums 4 + 2 + 1 = 7 and 2 + 2 + 1 = 5, the contiguous ranges have 6 and 6."""
    lengths = np.array([1, 1, 4, 2, 2, 2], dtype=np.int64)
    assert assign_to_ranks(lengths, 2).tolist() == [[2, 0, 1], [3, 4, 5]]


# -- files -----------------------------------------------------------------------------------------------------


def test_a_damaged_user_file_is_an_error_and_stays_in_place(tmp_path: Path) -> None:
    make_images.main(tmp_path / "a.h5", 100)
    run = create_prepared_run(tmp_path, "changed")
    manifest = json.loads((run.data_dir / "manifest.json").read_text())
    assert (manifest["train"][0]["samples"], manifest["held_out_samples"]) == (100, 10)
    assert manifest["train"][0]["arrays"]["images"]["shape"] == [100, 1, 16, 16]
    content = (tmp_path / "a.h5").read_bytes()
    (tmp_path / "a.h5").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # flip a bit of the last byte
    with pytest.raises(AssertionError, match=r"InputError: .*a\.h5 is damaged: .*restore the file"):
        run_ranks(1, run_stage_on_rank, run.path, "train")
    (tmp_path / "a.h5").write_bytes(content[:-1])
    assert f"{len(content) - 1} bytes, not {len(content)}" in str(
        load_stage_module(run, "shard").describe_missing_outputs(run)
    )
    (tmp_path / "a.h5").write_bytes(content)
    assert load_stage_module(run, "shard").describe_missing_outputs(run) is None and len(train_run(run, 1)) == 10


def test_a_damaged_manifest_of_samples_is_detected_and_written_again(tmp_path: Path) -> None:
    make_images.main(tmp_path / "a.h5", 100)
    run = create_prepared_run(tmp_path, "damaged")
    manifest = run.data_dir / "manifest.json"
    intact_text = manifest.read_text()
    manifest.write_text(intact_text.replace('"held_out_samples": 10', '"held_out_samples": 12'))
    assert "manifest.json is damaged" in str(load_stage_module(run, "shard").describe_missing_outputs(run))
    prepare_data(run)
    assert manifest.read_text() == intact_text
    values = json.loads(intact_text)
    values["train"][0]["arrays"]["images"]["offset"] += 1
    manifest.write_text(json.dumps(add_checksum(values)))
    with pytest.raises(AssertionError, match=r"InputError: array images in .*a\.h5 is offset=\d+ .*offset="):
        run_ranks(1, run_stage_on_rank, run.path, "train")


def test_prepare_must_run_again_if_a_file_changes_before_shard_hashes_it(tmp_path: Path) -> None:
    make_images.main(tmp_path / "a.h5", 100)
    run = create_prepared_run(tmp_path, "early")
    # remove the outputs of the shard stage
    (run.data_dir / "manifest.json").unlink()
    (run.data_dir / "shards/unit-00000.json").unlink()
    make_images.main(tmp_path / "a.h5", 50)
    assert f"{tmp_path / 'a.h5'} has changed" in str(load_stage_module(run, "prepare").describe_missing_outputs(run))
    with pytest.raises(InputError, match=r"a\.h5 has changed"):
        load_stage_module(run, "shard").run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    prepare_data(run)
    assert json.loads((run.data_dir / "manifest.json").read_text())["train"][0]["samples"] == 50


IMAGES = np.zeros((4, 1, 16, 16), np.uint8)
LABELS = np.zeros(4, np.uint8)


@pytest.mark.parametrize(
    ("arrays", "code", "expected_texts"),
    [
        ({"images": IMAGES}, "data.no_array", ["examples.vit", "'labels'", "images"]),
        ({"images": IMAGES, "labels": LABELS[:3]}, "data.shape_mismatch", ["images (4, 1, 16, 16)", "labels (3,)"]),
        ({"images": IMAGES, "labels": np.array([b"a"] * 4)}, "data.wrong_type", ["labels", "|S1"]),
        ({"images": IMAGES.astype(">f4"), "labels": LABELS}, "data.wrong_type", ["images", ">f4"]),
    ],
)
def test_a_file_without_usable_arrays_is_an_error_that_names_them(
    tmp_path: Path, arrays: dict[str, Any], code: str, expected_texts: list[str]
) -> None:
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values)
    with raises_error(code, tmp_path / "bad.h5", *expected_texts):
        create_prepared_run(tmp_path, "bad")


def test_files_with_different_shapes_are_an_error_that_names_both(tmp_path: Path) -> None:
    make_images.main(tmp_path / "a.h5", 10)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["images"] = IMAGES[..., :8]
        file["labels"] = LABELS
    with raises_error("data.shape_mismatch", tmp_path / "b.h5", tmp_path / "a.h5", "images", "(4, 1, 16, 8)"):
        create_prepared_run(tmp_path, "bad")


@pytest.mark.parametrize("lengths", [[0, 3], [2, 9]])
def test_lengths_beyond_the_padded_array_are_an_error(tmp_path: Path, lengths: list[int]) -> None:
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        file["series"] = np.zeros((2, 8), np.float32)
        file["lengths"] = np.array(lengths)
    with raises_error("data.out_of_range", tmp_path / "bad.h5", "lengths", *lengths):
        create_prepared_run(tmp_path, "bad", text=RAGGED_CONFIG)


# -- invalid modules -----------------------------------------------------------------------------------------------

MODULE_SOURCE = """\
import torch
ARRAYS = ('x',)
INPUTS = ('x',)
def build(options, layers): return torch.nn.Linear(2, 2)
def loss(outputs, batch): ...
"""
BUILD_WITH_WEIGHTS = """\
def build(options, layers):
    net = torch.nn.Linear(2, 2)
    net.load_state_dict({'weight': WEIGHT, 'bias': WEIGHT[0]})
    return net
WEIGHT = torch.ones(2, 2)
"""


def write_config_of_module(folder: Path, target: str) -> Path:
    """Write a config whose `model.target` is `target` and return its path."""
    path = folder / "config.yaml"
    path.write_text(VIT_CONFIG.format(name="invalid", folder=folder).replace("examples.vit", target))
    return path


@pytest.mark.parametrize(
    ("source", "overrides", "code", "expected_texts"),
    [
        (None, (), "model.no_module", ["nothing_here"]),
        ("ARRAYS = ('x',)\n", (), "model.incomplete_module", ["INPUTS, build, loss"]),
        ("def broken(:\n", (), "model.invalid_module", ["nothing_here.py"]),
        (MODULE_SOURCE.replace("('x',)", "list('x')", 1), (), "model.invalid_module", ["ARRAYS", "nothing_here.py"]),
        (MODULE_SOURCE.replace("INPUTS = ('x',)", "INPUTS = ('y',)"), (), "model.invalid_module", ["y", "ARRAYS"]),
        (MODULE_SOURCE.replace("INPUTS = ('x',)", "INPUTS = ()"), (), "model.invalid_module", ["INPUTS", "ARRAYS"]),
        (MODULE_SOURCE + "PADDED = ('x',)\n", (), "model.invalid_module", ["lengths", "ARRAYS"]),
        (
            MODULE_SOURCE,
            ("parallel.tensor=2",),
            "model.incomplete_module",
            ["parallel.tensor 2", "tensor_plan", "nothing_here"],
        ),
        (MODULE_SOURCE, ("parallel.pipeline=2",), "model.incomplete_module", ["parallel.pipeline 2", "CUTS = True"]),
        (
            MODULE_SOURCE + "CUTS = False\n",
            ("parallel.pipeline=2",),
            "model.incomplete_module",
            ["parallel.pipeline 2", "CUTS = True"],
        ),
        (
            MODULE_SOURCE,
            ("parallel.activation_checkpointing=full",),
            "model.incomplete_module",
            ["parallel.activation_checkpointing full", "function blocks"],
        ),
        (MODULE_SOURCE, ("train.compile=true",), "model.incomplete_module", ["train.compile", "function blocks"]),
        (MODULE_SOURCE, ("model.target=os.path",), "model.no_module", ["os"]),
        (MODULE_SOURCE, ("model.target=a-b",), "config.conflict", ["model: target (a-b)"]),
        (MODULE_SOURCE, ("model.dim=64",), "config.conflict", ["dim (64)", "options"]),
        (MODULE_SOURCE, ("model.options.layers=3",), "config.conflict", ["options.layers", "model.layers"]),
        (MODULE_SOURCE, ("data.sequence_length=64",), "config.conflict", ["sequence_length (64)"]),
        (MODULE_SOURCE, ("data.source=python-stdlib",), "config.conflict", ["model.target", "data.source", "HDF5"]),
    ],
)
def test_an_invalid_module_or_config_is_an_error_before_a_run_directory_exists(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str | None,
    overrides: tuple[str, ...],
    code: str,
    expected_texts: list[str],
) -> None:
    if source is not None:
        (tmp_path / "nothing_here.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with raises_error(code, *expected_texts):
        Run.create(
            load_config(write_config_of_module(tmp_path, "nothing_here"), ("stages.train.tasks_per_node=2", *overrides))
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("added_source", "expected_texts"),
    [
        ("def f(:\n", ["nothing_here.py", "invalid syntax"]),
        pytest.param(
            "import torch_of_tomorrow\n",
            ["nothing_here", "No module named 'torch_of_tomorrow'"],
            marks=pytest.mark.story,
        ),
        pytest.param(
            "WIDTH = depth * 2\n", ["nothing_here", "line 6", "name 'depth' is not defined"], marks=pytest.mark.story
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_before_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added_source: str, expected_texts: list[str]
) -> None:
    """The module becomes invalid before or after the run directory, with a copy of the module, is created."""
    code = "model.invalid_module" if "invalid syntax" in expected_texts else "model.import_failed"
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "nothing_here.py"
    module.write_text(MODULE_SOURCE)
    config = load_config(write_config_of_module(tmp_path, "nothing_here"))
    module.write_text(MODULE_SOURCE + added_source)
    with raises_error(code, *expected_texts):
        Run.preview(config).check_model_code()
    assert not (tmp_path / "runs").exists()
    module.write_text(MODULE_SOURCE)
    Run.preview(config).check_model_code()
    run = Run.create(config)
    assert (run.code_dir / "nothing_here.py").read_text() == MODULE_SOURCE
    module.write_text(MODULE_SOURCE + added_source)
    with raises_error(code, *expected_texts):
        run.check_model_code()
    assert (run.code_dir / "nothing_here.py").read_text() == MODULE_SOURCE, "the copy was replaced by a broken module"


@pytest.mark.parametrize(
    ("added_source", "code", "expected_texts"),
    [
        ("def build(options, layers): return None\n", "model.wrong_build", ["build", "torch.nn.Module", "None"]),
        (
            "def build(options, layers): return torch.nn.Sequential(torch.nn.BatchNorm1d(2, momentum=None))\n",
            "model.batch_norm_options",
            ["batch norm 0", "momentum"],
        ),
        (BUILD_WITH_WEIGHTS, "model.weights_in_build", ["build", "weight", "init(name, values, options)"]),
        (
            BUILD_WITH_WEIGHTS.replace(
                "net.load_state_dict({'weight': WEIGHT, 'bias': WEIGHT[0]})", "net.weight = build_weight()"
            )
            + "def build_weight(): return torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))\n",
            "model.weights_in_build",
            ["build", "weight", "init(name, values, options)"],
        ),
    ],
)
def test_a_model_that_no_layout_can_train_is_an_error_before_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added_source: str, code: str, expected_texts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing_here.py").write_text(MODULE_SOURCE + added_source)
    with raises_error(code, *expected_texts):
        Run.preview(load_config(write_config_of_module(tmp_path, "nothing_here"))).check_model_code()


def test_the_code_copy_contains_all_that_a_module_imports_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indirect imports are copied. Unused modules, and modules that the jobs already have, are not copied."""
    monkeypatch.chdir(tmp_path)
    sources = {
        "nothing_here.py": MODULE_SOURCE + "import random, torch, yaml, numpy\nfrom layers.block import Block\n"
        "def late(): import util\nfrom plain.deeper.block import Wide\n",
        "plain/deeper/block.py": "class Wide: ...\n", "numpy/hook.py": "", "yaml/data.txt": "",
        "layers/__init__.py": "", "layers/block.py": "import deep\nclass Block: ...\n",
        "deep.py": "import os.path, nothing_here\n",
        "util.py": "from pipeline.tensor_parallel import Replicated\n", "pipeline/__init__.py": "", "random.py": "",
        "notes.py": "", "torch/data.txt": "",
    }  # fmt: skip
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    config = load_config(write_config_of_module(tmp_path, "nothing_here"))
    Run.preview(config).check_model_code()
    code = Run.create(config).code_dir
    copied_names = {path.name for path in code.iterdir()}
    # files of Sluice itself
    copied_names -= {
        "submit.py",
        "setup.py",
        "setup.cfg",
        "cli",
        "slurm",
        "tracking",
        "planning",
        "data_prep",
        "client",
    }
    copied_names -= {"COMMIT", "DIFF", "__pycache__"}
    assert copied_names == {"nothing_here.py", "layers", "deep.py", "util.py", "pipeline", "plain"}
    assert (code / "pipeline/base").is_dir() and (code / "layers/block.py").is_file()


def test_a_copied_file_that_does_not_compile_is_an_error_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text(MODULE_SOURCE)
    (package / "late.py").write_text("x = 1\nif x:\nprint(x)\n")  # A function might import it hours later.
    with pytest.raises(UserError, match=r"mine/late.py.*line 3"):
        Run.create(load_config(write_config_of_module(tmp_path, "mine.model")))


def test_an_override_that_needs_a_missing_function_is_an_error_and_not_recorded(series_folder: Path) -> None:
    run = create_prepared_run(series_folder, "resumed", text=RAGGED_CONFIG, ranks=2)
    with raises_error("model.incomplete_module", "activation_checkpointing full", "function blocks", "ragged"):
        run.apply_overrides(["parallel.activation_checkpointing=full"])
    assert not run.changes_file.exists()


def test_a_run_uses_its_copy_of_the_module_after_the_original_is_edited(tmp_path: Path) -> None:
    make_images.main(tmp_path / "a.h5", 60)
    (tmp_path / "mine").mkdir()
    source = tmp_path / "mine" / "net.py"
    source.write_text(Path(make_images.__file__).with_name("vit.py").read_text())
    run = create_prepared_run(tmp_path, "copy", "model.target=mine.net", "train.steps=2")
    source.write_text("raise SystemExit('edited')\n")
    assert len(train_run(run, 1)) == 2


@pytest.mark.parametrize(
    ("source", "error_pattern"),
    [
        ("1 / 0\n", r"bad fails at .*bad\.py:5: ZeroDivisionError: division by zero"),
        ("raise SystemExit('away')\n", r"bad fails at .*bad\.py:5: SystemExit: away"),
        ("class E(BaseException): pass\nraise E('x\\x1b[2J')\n", r"bad fails at .*bad\.py:6: E: x\?\[2J"),
        ("def build(options, layers): return options['width']\n", r"bad fails at .*bad\.py:5: KeyError: 'width'"),
        ("def build(options, layers): return None\n", "bad fails at .* has no attribute 'parameters'"),
    ],
)
def test_plan_reports_the_line_at_which_a_module_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error_pattern: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "bad", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    module_start = "ARRAYS = INPUTS = ('a',)\ndef build(options, layers): ...\ndef loss(outputs, batch): ...\n\n"
    (tmp_path / "bad.py").write_text(module_start + source)
    text = "run: {name: x}\ntrain: {steps: 1}\nmodel: {target: bad}\ndata: {source: x.h5}\n"
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=error_pattern):
        list(describe_plan(load_config(tmp_path / "x.yaml")))


def train_and_catch_error(rank_info: RankInfo, path: Path, text: str | None) -> str:
    """Run the train stage and return code and message of the UserError that it raises; "" if it raises none.

    `text` replaces the source of the module ragged.py; None: no change.
    """
    run = Run.open(path)
    if text is not None:
        (run.code_dir / "ragged.py").write_text(text)
    try:
        run_stage_on_rank(rank_info, path, "train")
    except UserError as error:
        return f"{error.code}: {error}"
    return ""


LOSS_SUM = ".masked_fill(~is_in_series, 0.0).sum()"
"""The end of the loss in ragged.py."""
LOSS_MEAN = ".masked_fill(~is_in_series, 0.0).mean()"
NOT_A_SUM = "model.loss_not_a_sum"
"""Code of the error about a loss that is not a sum over samples."""
IS_A_MEAN = "is a mean"
"""Part of the message of this error if the loss is a mean."""


@pytest.mark.parametrize(
    ("original_text", "replacement", "code", "expected_texts"),
    [
        ("persistent=False", "persistent=True", "model.persistent_buffer", ["time_steps"]),
        ("reset_buffers", "other_name", "model.no_reset_buffers", ["time_steps", "reset_buffers"]),
        (
            "nn.Linear(width, 1)\n",
            "nn.Linear(width, 1)\n        self.again = self.last_layer\n",
            "model.tied_parameters",
            ["last_layer", "again"],
        ),
        ("import torch\n", "import torch\nimport not_installed\n", "model.import_failed", ["'not_installed'"]),
        (LOSS_SUM, "", "model.wrong_loss", ["loss of ragged"]),
        (LOSS_SUM, LOSS_MEAN, NOT_A_SUM, [IS_A_MEAN]),
    ],
)
def test_ranks_report_an_invalid_module(
    series_folder: Path, original_text: str, replacement: str, code: str, expected_texts: list[str]
) -> None:
    text = (ROOT / "tests/support/ragged.py").read_text()
    assert original_text in text
    shutil.rmtree(series_folder / "runs" / "invalid", ignore_errors=True)
    run = create_prepared_run(series_folder, "invalid", text=RAGGED_CONFIG)
    (error,) = run_ranks(1, train_and_catch_error, run.path, text.replace(original_text, replacement, 1))
    assert error.startswith(f"{code}: ") and all(expected_text in error for expected_text in expected_texts), error


def test_a_mean_is_an_error_even_if_the_loss_of_the_first_batch_is_0(series_folder: Path) -> None:
    """DDP starts with a backward pass on a batch of zeros. A loss of 0 does not show whether it is a sum."""
    text = (ROOT / "tests/support/ragged.py").read_text()
    text = text.replace(LOSS_SUM, f'{LOSS_MEAN} * batch["series"].any()')
    run = create_prepared_run(series_folder, "zeros", ranks=2, text=RAGGED_CONFIG)
    error = run_ranks(2, train_and_catch_error, run.path, text)[0]
    assert error.startswith(f"{NOT_A_SUM}: ") and IS_A_MEAN in error


def test_a_mean_is_an_error_if_the_outputs_have_several_rows_per_sample(series_folder: Path) -> None:
    text = (ROOT / "tests/support/ragged.py").read_text()
    for old, new in (
        ("self.last_layer(x)[..., 0]", "self.last_layer(x)[..., 0].flatten()"),
        ("    is_in_series = ", '    outputs = outputs.view(len(batch["lengths"]), -1)\n    is_in_series = '),
        (LOSS_SUM, LOSS_MEAN),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    run = create_prepared_run(series_folder, "flat", text=RAGGED_CONFIG)
    (error,) = run_ranks(1, train_and_catch_error, run.path, text)
    assert error.startswith(f"{NOT_A_SUM}: ") and IS_A_MEAN in error


PAIRS_SOURCE = """
import torch
from torch.nn import functional as F

ARRAYS = INPUTS = ("series",)


class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(40, 4), torch.nn.Linear(40, 4)
        self.scale = torch.nn.Parameter(torch.empty(1))

    def forward(self, series):
        series = series.clamp(-1, 1)
        a, b = self.first(series), self.second(series)
        return RETURNS


def build(options, layers):
    return Pairs()


def loss(outputs, batch):
"""
"""Source code of a model that maps a series to two vectors. Tests replace RETURNS and append the body of `loss`."""
LOGITS = "    a, b = outputs[:2]\n    logits = a @ b.T\n    labels = torch.arange(len(a))\n"
# Bodies of `loss`. In contrastive, centered and standardized losses, a sample depends on the others of the batch.
CONTRASTIVE_LOSS = f'{LOGITS}    return F.cross_entropy(logits, labels, reduction="sum")\n'
CENTERED_LOSS = "    return (outputs[0] - outputs[0].mean(0)).square().sum()\n"
STANDARDIZED_LOSS = "    a = outputs[0] / outputs[0].std(0)\n    return (a.T @ outputs[1]).square().sum()\n"
CROSS_ENTROPY_OF_MATRIX = '    return F.cross_entropy(outputs, torch.arange(len(outputs)), reduction="sum")\n'
INDEPENDENT_LOSS = "    a, b = outputs[:2]\n    return (a - b).square().sum()"
DEPENDS_ON_OTHERS = "depends on the other samples"
"""Part of the error message about such a loss."""


@pytest.mark.parametrize(
    ("returns", "loss", "expected_text", "absent_text"),
    [
        ("a, b", CONTRASTIVE_LOSS, DEPENDS_ON_OTHERS, IS_A_MEAN),
        ("a, b, self.scale.sum()", CONTRASTIVE_LOSS, DEPENDS_ON_OTHERS, IS_A_MEAN),
        ("a, b", CONTRASTIVE_LOSS.replace(', reduction="sum"', ""), DEPENDS_ON_OTHERS, IS_A_MEAN),
        ("a, b", CENTERED_LOSS, DEPENDS_ON_OTHERS, IS_A_MEAN),
        ("a, b", STANDARDIZED_LOSS, DEPENDS_ON_OTHERS, IS_A_MEAN),
        (
            "torch.cat([a, b])",
            "    a, b = outputs.chunk(2)\n    return (a - b).square().sum()\n",
            "2 rows for each",
            IS_A_MEAN,
        ),
        ("a @ b.T", CROSS_ENTROPY_OF_MATRIX, r"pairs.py:25: IndexError", IS_A_MEAN),
        (
            "a, b",
            "    assert len(outputs[0]) > 1, 'no pairs'\n" + CONTRASTIVE_LOSS,
            r"pairs.py:25: AssertionError: no",
            IS_A_MEAN,
        ),
        ("a, b", INDEPENDENT_LOSS.replace("sum", "mean") + "\n", IS_A_MEAN, DEPENDS_ON_OTHERS),
        ("a, b", INDEPENDENT_LOSS + " + 1\n", "adds 1 in each call", IS_A_MEAN),
        ("a, b, self.scale.sum()", INDEPENDENT_LOSS + " + outputs[2] + 1\n", "", IS_A_MEAN),
        ("a, b", INDEPENDENT_LOSS + " * torch.rand(())\n", "", IS_A_MEAN),
        ("a, b", INDEPENDENT_LOSS + "\n", "", IS_A_MEAN),
    ],
)
def test_the_error_names_the_reason_why_a_loss_is_not_a_sum(
    series_folder: Path, returns: str, loss: str, expected_text: str, absent_text: str
) -> None:
    """If `expected_text` is empty, the loss is valid or cannot be checked, so that there is no error."""
    (series_folder / "pairs.py").write_text(PAIRS_SOURCE.replace("RETURNS", returns) + loss)
    shutil.rmtree(series_folder / "runs" / "pairs", ignore_errors=True)
    run = create_prepared_run(series_folder, "pairs", "model.target=pairs", "train.steps=2", text=RAGGED_CONFIG)
    (error,) = run_ranks(1, train_and_catch_error, run.path, None)
    if not expected_text:
        assert error == ""
        return
    assert error.startswith("model.loss_fails: " if "pairs.py:" in expected_text else "model.loss_not_a_sum: ")
    assert expected_text in error and absent_text not in error
    if "pairs.py:" in expected_text:
        assert "1 of the 2 samples" in error or "3 samples" in error
    assert ('reduction="sum"' in error) == (expected_text == IS_A_MEAN)


def train_and_catch_traceback(rank_info: RankInfo, path: Path) -> str:
    """Run the train stage and return the traceback of the exception that it raises; "" if it raises none."""
    try:
        run_stage_on_rank(rank_info, path, "train")
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_traceback_has_a_note_if_a_loss_fails_with_fewer_samples_than_a_micro_batch(
    series_folder: Path, ranks: int
) -> None:
    """With two ranks, DDP starts with a backward pass on one sample, so the error needs a note.

    One rank has no DDP and uses micro-batches of two samples. The loss therefore needs more than one sample on two
    ranks, and more than two samples on one rank.
    """
    source = PAIRS_SOURCE.replace("RETURNS", "a, b") + f"    return outputs[0][{3 - ranks}].sum()\n"
    (series_folder / "pairs.py").write_text(source)
    shutil.rmtree(series_folder / "runs" / "pairs", ignore_errors=True)
    run = create_prepared_run(
        series_folder, "pairs", "model.target=pairs", "train.steps=2", text=RAGGED_CONFIG, ranks=ranks
    )
    for text in run_ranks(ranks, train_and_catch_traceback, run.path):
        assert "pairs.py" in text and "line 25" in text and "IndexError" in text
        assert ("1 sample," in text and "train.micro_batch" in text) == (ranks == 2)


BUILD_HEADER = """\
import dataclasses, json, torch
ARRAYS = INPUTS = ("images", "labels")
@dataclasses.dataclass
class Sizes:
    width: int
    depth: int = 1
    layers: int = 1
def linear(width): return torch.nn.Linear(width, 2)
def loss(outputs, batch): ...
def init(name, values, options): values.fill_(options["by_init"])
def build(options, layers):
"""


@pytest.mark.parametrize(
    ("body", "options", "unread_options"),
    [
        ("return linear(options['width'])", {"width": 2, "widht": 3}, ["widht"]),
        ("return linear(options.get('width', 2))", {"widht": 3, "more": {"a": 1}}, ["widht", "more"]),
        ("return linear(Sizes(**options).width)", {"width": 2, "depth": 3}, []),
        ("return linear(Sizes(**options['sizes']).width)", {"sizes": {"width": 2, "depth": 3}, "other": 2}, ["other"]),
        ("return linear({**options}['width'])", {"width": 2, "any": 3}, []),
        ("return linear((options | {'width': 2})['width'])", {"any": 3}, []),
        ("return linear(options['sizes']['width'])", {"sizes": {"width": 2, "height": 3}}, ["sizes.height"]),
        ("return linear(json.loads(json.dumps(options))['width'])", {"width": 2, "any": 3}, []),
        ("assert type(options) is dict; return linear(options['width'])", {"width": 2, "any": 3, "a": {"b": 1}}, []),
    ],
)
def test_options_that_no_build_reads_are_listed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    options: dict[str, Any],
    unread_options: list[str],
) -> None:
    from pipeline.model.task import try_user_model

    (tmp_path / "net.py").write_text(f"{BUILD_HEADER}    layers = options['layers']\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    # The next test writes a module with the same name. In the same second, Python would use the old bytecode.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    option_sets = [{**options, "layers": layers} for layers in (2, 3)]
    try_user_model("net", *map(json.dumps, option_sets))
    assert json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(UNREAD_OPTIONS)) == unread_options


def test_a_dry_run_notes_each_unread_option_once(tmp_path: Path) -> None:
    """`by_init` is not noted, because another function than `build` may read it: its name is in the source."""
    (tmp_path / "net.py").write_text(f"{BUILD_HEADER}    return linear(options['width'])\n")
    text = VIT_CONFIG.replace("examples.vit", "net").format(name="x", folder=tmp_path)
    options = "options: {width: 2, widht: 3, by_init: 1, sizes: {width: 2}}"
    (tmp_path / "x.yaml").write_text(re.sub("options: .*", options, text))
    make_images.main(tmp_path / "a.h5", 60)
    command = [sys.executable, str(ROOT / "submit.py"), "x.yaml", "--dry-run"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r"model\.options\.([\w.]+)", result.stdout) == ["widht", "sizes"]


def test_a_tensor_plan_that_omits_a_parameter_is_an_error(image_folder: Path) -> None:
    run = create_prepared_run(image_folder, "omits", "parallel.tensor=2", ranks=2)
    module = run.code_dir / "examples" / "vit.py"
    replace_in_file(module, '"norm": Replicated(), ', "")
    with pytest.raises(AssertionError, match=r"UserError: tensor_plan of examples.vit .*norm\.weight"):
        run_ranks(2, run_stage_on_rank, run.path, "train")


def test_find_user_model_reads_a_module_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "examples.vit", raising=False)  # other tests import it
    model = find_user_model("examples.vit", [ROOT])
    assert model.arrays == ("images", "labels") and model.inputs == ("images",) and "tensor_plan" in model.names
    assert "examples.vit" not in sys.modules
    assert resolve_user_model(load_config(Path("configs/quickstart.yaml")), []) is None
