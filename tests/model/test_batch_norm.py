"""Tests of custom models with batch norm."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from examples import make_images
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.run.directory import Run
from tests.model.test_batch_loss import run_stage_and_return_code
from tests.model.test_user_model import create_prepared_run, train_run
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, run_stage_on_rank
from tests.train.test_exact import interrupt_training, read_steps

CONFIG = """\
run: {{name: {name}, root: {folder}/runs, seed: 3}}
data: {{source: "{folder}/images.h5", held_out: 0.2}}
model: {{target: cnn, options: {{width: 4}}}}
train: {{steps: 8, global_batch: 16, micro_batch: 8}}
optimizer: {{lr: 1.0e-2, warmup_steps: 2}}
checkpoint: {{every_steps: 5}}
stages: {{shard: {{tasks: 1}}}}
"""
# A bias before batch norm has a gradient of 0, apart from rounding errors, which AdamW would enlarge.
MODULE = """\
import torch
import torch.nn.functional as F
from torch import nn

ARRAYS = ("images", "labels")
INPUTS = ("images",)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 5, stride=3, bias=False)
        self.norm = nn.BatchNorm2d(width, momentum=0.2)
        self.classes = nn.Linear(16 * width, 8, bias=False)
        self.last_norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, images):
        hidden = F.relu(self.norm(self.conv(images.float() / 255)))
        return self.last_norm(self.classes(hidden.flatten(1)))


def build(options, layers):
    return Net(options["width"])


def loss(outputs, batch):
    return F.cross_entropy(outputs.float(), batch["labels"].long(), reduction="sum")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 100 images and the module `cnn`."""
    folder = tmp_path_factory.mktemp("norm")
    make_images.main(folder / "images.h5", 100)
    (folder / "cnn.py").write_text(MODULE)
    return folder


def create_norm_run(folder: Path, name: str, *overrides: str, ranks: int = 1) -> Run:
    """Create a run of the module `cnn`, and run its data stages."""
    return create_prepared_run(folder, name, *overrides, text=CONFIG, ranks=ranks)


def train_in_plain_torch(_: RankInfo, path: Path) -> tuple[list[tuple[float, float]], float, dict[str, list[float]]]:
    """Train the run at `path` with whole batches of 16 samples in a plain loop.

    Return the loss and the gradient norm of each step, the held-out loss, and the running statistics.
    """
    import torch

    from pipeline.data.sample_order import compute_index_range, permute
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.model.make_task import make_task
    from pipeline.train.lr_schedule import compute_learning_rate

    run = Run.open(path)
    config = run.config
    task = make_task(run, load_run_manifest(run))
    loss_function = task.user_module.loss
    with h5py.File(path.parent.parent / "images.h5") as file:
        samples = {name: torch.from_numpy(file[name][...]) for name in ("images", "labels")}
    rows = permute(0, -1, np.arange(100), 100)
    model = task.build(range(1)).to_empty(device="cpu")
    task.init_weights(model, torch.device("cpu"))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps)
    results = []
    for step in range(1, 9):
        chosen = rows[compute_index_range(config.run.seed, (step - 1) * 16, 16, 80)]
        batch = {name: array[chosen] for name, array in samples.items()}
        loss = loss_function(model(batch["images"]), batch) / 16
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or 1.0)
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(config.optimizer, step, 8)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    model.eval()
    batch = {name: array[rows[80:]] for name, array in samples.items()}
    with torch.no_grad():
        held_out_loss = loss_function(model(batch["images"]), batch).item() / 20
    statistics = {
        name: buffer.tolist() for name, buffer in model.named_buffers() if not name.endswith("num_batches_tracked")
    }
    return results, held_out_loss, statistics


def read_statistics(_: RankInfo, path: Path) -> dict[str, list[float]]:
    """Return the running statistics in the newest checkpoint of a run."""
    from pipeline.checkpoint.checkpointer import find_weights, iterate_tensors

    checkpoint = Run.open(path).checkpoints_dir / checkpoint_name(8)
    names = [stored for name, (stored, _) in find_weights(checkpoint).items() if "running" in name]
    return {name.split(".", 1)[1]: tensor.tolist() for name, tensor in iterate_tensors(checkpoint, names)}


def test_batch_norm_has_the_losses_and_statistics_of_plain_torch(folder: Path) -> None:
    """On 2 ranks, the statistics are those of the samples of both ranks."""
    expected: Any = None
    layouts: list[tuple[int, tuple[str, ...]]] = [
        (1, ("train.micro_batch=16",)),
        (2, ()),
        (2, ("parallel.zero=3",)),
        (2, ("parallel.zero=1", "train.evaluate_every=4")),
    ]
    for number, (ranks, overrides) in enumerate(layouts):
        run = create_norm_run(folder, f"layout{number}", *overrides, ranks=ranks)
        expected = expected or run_ranks(1, train_in_plain_torch, run.path)[0]
        train_run(run, ranks)
        steps = [(loss, norm) for _, loss, norm, *_ in read_steps(run)]
        assert np.array(steps) == pytest.approx(np.array(expected[0]), rel=1e-5), (ranks, overrides)
        (statistics,) = run_ranks(1, read_statistics, run.path)
        assert statistics.keys() == expected[2].keys() and len(statistics) == 4
        for name, values in statistics.items():
            assert values == pytest.approx(expected[2][name], rel=1e-5), name
        assert set(run_ranks(2, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}
        result = json.loads((run.evaluation_dir / f"{checkpoint_name(8)}.json").read_text())
        assert result["loss"] == pytest.approx(expected[1], rel=1e-4)
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert lines[-1]["held_out_loss"] == pytest.approx(expected[1], rel=1e-4)


def test_stops_and_kills_do_not_change_a_run_with_batch_norm(folder: Path) -> None:
    undisturbed = create_norm_run(folder, "undisturbed", "train.steps=60", ranks=2)
    train_run(undisturbed, 2)
    run = create_norm_run(folder, "disturbed", "train.steps=60", ranks=2)
    interrupt_training(run, 2, signal.SIGTERM, 12, [1])
    interrupt_training(run, 2, signal.SIGKILL, 27, [0])
    assert train_run(run, 2) == read_steps(undisturbed)
    assert compute_run_digest(run) == compute_run_digest(undisturbed)


def test_batch_norm_with_local_sgd_is_an_error(folder: Path) -> None:
    run = create_norm_run(folder, "local", "parallel.local_sgd={every: 2}", ranks=2)
    assert set(run_ranks(2, run_stage_and_return_code, run.path)) == {"config.conflict"}
