"""Tests of modules with a `training_step`, with examples/gan.py, and of several optimizers."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from examples import make_images
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.config.read import load_config
from pipeline.config.user_model import resolve_user_model
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.model.test_batch_loss import run_stage_and_return_code
from tests.model.test_user_model import create_prepared_run, train_run
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, run_stage_on_rank
from tests.train.test_exact import interrupt_training, read_steps

CONFIG = """\
run: {{name: {name}, root: {folder}/runs, seed: 3}}
data: {{source: "{folder}/images.h5", held_out: 0.1}}
model: {{target: examples.gan, options: {{width: 4}}}}
train: {{steps: 8, global_batch: 16, micro_batch: 4}}
optimizer: {{name: own, lr: 2.0e-3, warmup_steps: 2, clip_norm: 2.0}}
checkpoint: {{every_steps: 5}}
stages: {{shard: {{tasks: 1}}}}
"""
METRICS = ("loss", "generator_loss", "penalty", "grad_norm")
PLAIN_STEP = """

def optimizer(parameters, config):
    return {"all": torch.optim.Adam([parameter for _, parameter in parameters], lr=config.lr)}


def training_step(engine, batch):
    loss = engine.model.discriminator(normalize(batch["images"])).square().mean()
    engine.backward(loss)
    engine.step("all")
    return {"loss": loss}
"""
"""A simple step and optimizer, which tests of errors change."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 120 images."""
    folder = tmp_path_factory.mktemp("images")
    make_images.main(folder / "images.h5", 120)
    return folder


def create_gan_run(folder: Path, name: str, *overrides: str, ranks: int = 1) -> Run:
    """Create a run of the example, and run its data stages."""
    return create_prepared_run(folder, name, *overrides, text=CONFIG, ranks=ranks)


def read_metrics(run: Run) -> list[list[float]]:
    """Return the metrics `METRICS` of each step."""
    return [[line[name] for name in METRICS] for line in read_jsonl(run.metrics_file)]


def train_in_plain_torch(_: RankInfo, path: Path) -> list[list[float]]:
    """Train the run at `path` in a plain loop on one rank, and return the metrics `METRICS` of each step."""
    import torch
    import torch.nn.functional as F

    from pipeline.data.sample_order import compute_index_range, permute
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.model.make_task import make_task
    from pipeline.train.engine import compute_step_seed
    from pipeline.train.lr_schedule import compute_learning_rate

    run = Run.open(path)
    config = run.config
    task = make_task(run, load_run_manifest(run))
    with h5py.File(path.parent.parent / "images.h5") as file:
        images = torch.from_numpy(file["images"][...])
    model: Any = task.build(range(1)).to_empty(device="cpu")
    task.init_weights(model, torch.device("cpu"))
    networks = {"generator": model.generator, "discriminator": model.discriminator}
    optimizers = {
        name: torch.optim.Adam(network.parameters(), lr=1.0, betas=(0.0, 0.99)) for name, network in networks.items()
    }
    training_count = len(images) - round(len(images) * config.data.held_out)
    rows = permute(0, -1, np.arange(training_count), len(images))
    results = []
    for step in range(1, (config.train.steps or 0) + 1):
        lr = compute_learning_rate(config.optimizer, step, config.train.steps or 0)
        order = compute_index_range(config.run.seed, (step - 1) * 16, 16, training_count)
        parts = images[rows[order]].float().div(127.5).sub(1).split(4)
        seeds = iter(compute_step_seed(config.run.seed, step, 0, number) for number in range(1, 9))
        losses = np.zeros(3)
        squared_norm = 0.0

        def update(name: str, factor: float, lr: float = lr) -> float:
            norm = torch.nn.utils.clip_grad_norm_(networks[name].parameters(), 2.0).item()
            optimizers[name].param_groups[0]["lr"] = factor * lr
            optimizers[name].step()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            return norm**2

        for part in parts:
            torch.manual_seed(next(seeds))
            real = part.clone().requires_grad_(True)
            generated = model.generator(torch.randn(4, 16)).detach()
            scores = model.discriminator(real)
            (gradient,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
            penalty = gradient.square().flatten(1).sum(1).mean()
            loss = F.softplus(-scores).mean() + F.softplus(model.discriminator(generated)).mean()
            ((loss + penalty) / 4).backward()
            losses += np.array([loss.item(), 0.0, penalty.item()]) / 4
        squared_norm += update("discriminator", 2.0)
        for _ in parts:
            torch.manual_seed(next(seeds))
            loss = F.softplus(-model.discriminator(model.generator(torch.randn(4, 16)))).mean()
            (loss / 4).backward()
            losses += np.array([0.0, loss.item(), 0.0]) / 4
        squared_norm += update("generator", 1.0)
        results.append([*losses.tolist(), squared_norm**0.5])
    return results


def test_a_training_step_has_the_losses_of_a_plain_loop(folder: Path) -> None:
    run = create_gan_run(folder, "plain")
    (expected,) = run_ranks(1, train_in_plain_torch, run.path)
    train_run(run, 1)
    assert len(expected) == 8 and np.array(read_metrics(run)) == pytest.approx(np.array(expected), rel=1e-6, abs=1e-7)
    assert set(run_ranks(2, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}
    result = json.loads((run.evaluation_dir / f"{checkpoint_name(8)}.json").read_text())
    assert result["samples"] == 12 and result["loss"] > 0


def test_zero_has_the_losses_of_ddp_in_a_training_step(folder: Path) -> None:
    """The step computes gradients of gradients, and calls one network several times before a backward pass."""
    expected: list[list[float]] = []
    for zero in (0, 1, 2, 3):
        run = create_gan_run(folder, f"zero{zero}", f"parallel.zero={zero}", ranks=2)
        train_run(run, 2)
        metrics = read_metrics(run)
        expected = expected or metrics
        assert np.array(metrics) == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6), f"parallel.zero {zero}"
    alone = create_gan_run(folder, "alone")
    train_run(alone, 1)
    # Each rank draws its own noise, so only the penalty of the first step is the same as on one rank.
    assert read_metrics(alone)[0][2] == pytest.approx(expected[0][2], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.story)])
def test_stops_and_kills_do_not_change_a_run_with_a_training_step(folder: Path, ranks: int) -> None:
    zero = 3 if ranks > 1 else 0
    overrides = (
        "train.steps=60", "train.evaluate_every=30", "train.ema={decay: 0.9}", "train.precision=bf16",
        f"parallel.zero={zero}",
    )  # fmt: skip
    undisturbed = create_gan_run(folder, f"undisturbed{ranks}", *overrides, ranks=ranks)
    train_run(undisturbed, ranks)
    run = create_gan_run(folder, f"disturbed{ranks}", *overrides, ranks=ranks)
    assert set(interrupt_training(run, ranks, signal.SIGTERM, 12, [ranks - 1])) == {ExitCode.STOPPED}
    interrupt_training(run, ranks, signal.SIGKILL, 27, [0])
    assert train_run(run, ranks) == read_steps(undisturbed)
    assert read_metrics(run) == read_metrics(undisturbed)
    assert compute_run_digest(run) == compute_run_digest(undisturbed)


def write_module(folder: Path, *replacements: tuple[str, str], step: str | None = None) -> None:
    """Write a module `own.py`: the example with some texts replaced, and optionally with another step."""
    source = (CODE_ROOT / "examples/gan.py").read_text()
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / "own.py").write_text(source if step is None else source + step)


def test_a_bad_update_and_later_ones_of_its_step_are_skipped_in_every_attempt(tmp_path: Path) -> None:
    """In step 4, the generator's loss is infinite, but only while a file exists. The decision holds after a restart."""
    flag = tmp_path / "flag"
    old = "loss = F.softplus(-discriminator(generated)).mean()\n"
    new = f"{old}        if engine.step_number == 4 and Path({str(flag)!r}).exists():\n            loss *= torch.inf\n"
    imports = ("from typing import Any\n", "from pathlib import Path\nfrom typing import Any\n")
    write_module(tmp_path, (old, new), imports)
    make_images.main(tmp_path / "images.h5", 60)
    digests = []
    for name in ("undisturbed", "repeated"):
        flag.touch()
        run = create_gan_run(tmp_path, name, "model.target=own", "checkpoint.every_steps=3")
        train_run(run, 1)
        if name == "repeated":  # As after a crash, the checkpoint of the last step does not exist.
            flag.unlink()
            for step in (6, 8):
                shutil.rmtree(run.checkpoints_dir / checkpoint_name(step))
            train_run(run, 1)
        assert [line["step"] for line in read_jsonl(run.metrics_file) if "skipped" in line] == [4]
        (decision,) = read_jsonl(run.decisions_file)
        assert (decision["decision"], decision["step"], decision["update"]) == ("skip", 4, 1)
        digests.append((compute_run_digest(run), [line["loss"] for line in read_jsonl(run.metrics_file)]))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("old", "new", "overrides", "code"),
    [
        ('engine.step("all")', "pass", (), "model.no_update"),
        ('engine.step("all")', 'engine.step("most")', (), "model.unknown_optimizer"),
        ("engine.backward(loss)", "pass", (), "model.no_gradient"),
        ("engine.backward(loss)", "engine.backward(loss.detach())", (), "model.wrong_loss"),
        ('{"loss": loss}', "None", (), "model.wrong_metrics"),
        ('{"loss": loss}', '{"loss": loss, "lr": 1.0}', (), "model.reserved_metric"),
        ('{"loss": loss}', '{"loss": loss, "text": "none"}', (), "model.wrong_metrics"),
        ("for _, parameter in parameters]", "for _, parameter in parameters[1:]]", (), "model.incomplete_optimizer"),
        ('"all":', '"twice": torch.optim.SGD([parameters[0][1]]), "all":', (), "model.incomplete_optimizer"),
    ],
)  # fmt: skip
def test_a_wrong_step_is_an_error(tmp_path: Path, old: str, new: str, overrides: tuple[str, ...], code: str) -> None:
    assert PLAIN_STEP.count(old) == 1
    write_module(tmp_path, step=PLAIN_STEP.replace(old, new))
    make_images.main(tmp_path / "images.h5", 40)
    run = create_gan_run(tmp_path, "wrong", "model.target=own", *overrides)
    assert run_ranks(1, run_stage_and_return_code, run.path) == [code]


def test_a_parameter_outside_the_networks_is_an_error_with_zero(tmp_path: Path) -> None:
    line = "        super().__init__()\n"
    write_module(tmp_path, (line, f"{line}        self.shift = nn.Parameter(torch.empty(1))\n"), step=PLAIN_STEP)
    make_images.main(tmp_path / "images.h5", 40)
    run = create_gan_run(tmp_path, "outside", "model.target=own", "parallel.zero=1", ranks=2)
    assert set(run_ranks(2, run_stage_and_return_code, run.path)) == {"model.parameter_outside_children"}


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("parallel.tensor=2", "parallel.tensor 2"),
        ("parallel.local_sgd={every: 2}", "parallel.local_sgd"),
        ("parallel.hook={kind: fp16}", "parallel.hook"),
    ],
)
def test_a_layout_that_a_training_step_cannot_use_is_an_error(
    folder: Path, override: str, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "invalid.yaml").write_text(CONFIG.format(name="invalid", folder=folder))
    overrides = (override, "optimizer.name=adamw", "stages.train.tasks_per_node=2")
    config = load_config(folder / "invalid.yaml", overrides)
    with raises_error("config.conflict", fact, "training_step"):
        resolve_user_model(config, [CODE_ROOT])


def test_fp16_scales_losses_and_skips_overflows_in_a_training_step(tmp_path: Path) -> None:
    """The module uses an optimizer of Sluice. The loss is so large that the first scales overflow.

    The learning rate is so small that both runs keep their initial weights.
    """
    step = PLAIN_STEP.replace('engine.step("all")', "engine.step()").replace(".mean()\n", ".mean() * 100\n")
    write_module(tmp_path, step=step)
    make_images.main(tmp_path / "images.h5", 60)
    runs = {}
    for precision in ("fp32", "fp16"):
        runs[precision] = create_gan_run(
            tmp_path,
            precision,
            "model.target=own",
            f"train.precision={precision}",
            "optimizer.name=adamw",
            "optimizer.lr=1e-9",
        )
        train_run(runs[precision], 1)
    lines = list(read_jsonl(runs["fp16"].metrics_file))
    expected = list(read_jsonl(runs["fp32"].metrics_file))
    overflows = sum(line["grad_norm"] is None or not math.isfinite(float(line["grad_norm"])) for line in lines)
    assert 0 < overflows < 8 and not any("skipped" in line for line in lines)
    assert lines[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-2)
    norms = [[line["grad_norm"] for line in each[overflows:]] for each in (lines, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2), "gradients are divided by the scale"
