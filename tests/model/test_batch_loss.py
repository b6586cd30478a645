"""Tests of losses that compare the samples of a micro-batch (LOSS = "batch"), with examples/clip.py."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import make_pairs
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.config.read import load_config
from pipeline.config.user_model import resolve_user_model
from pipeline.data.sample_order import GlobalOrderSampler, IndexedDataset, Int64Array
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.model.test_user_model import create_prepared_run, train_run
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, run_stage_on_rank
from tests.train.test_exact import interrupt_training, read_steps

CONFIG = """\
run: {{name: {name}, root: {folder}/runs, seed: 3}}
data: {{source: "{folder}/pairs.h5", held_out: 0.2}}
model: {{target: examples.clip, options: {{width: 8}}}}
train: {{steps: 12, global_batch: 16, micro_batch: 4}}
optimizer: {{lr: 1.0e-2, warmup_steps: 2, clip_norm: 0.5}}
checkpoint: {{every_steps: 5}}
stages: {{shard: {{tasks: 1}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 130 pairs of an image and a caption."""
    folder = tmp_path_factory.mktemp("pairs")
    make_pairs.main(folder / "pairs.h5", 130)
    return folder


def create_clip_run(folder: Path, name: str, *overrides: str, ranks: int = 1) -> Run:
    """Create a run of the example, and run its data stages."""
    return create_prepared_run(folder, name, *overrides, text=CONFIG, ranks=ranks)


def train_in_plain_torch(_: RankInfo, path: Path, micro_batch: int) -> tuple[list[tuple[float, float]], float]:
    """Train the run at `path` in a plain loop. The arrays are read with h5py.

    Returns:
        The loss and the gradient norm of each step; and the mean loss of the held-out micro-batches of 4 samples.
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
    with h5py.File(path.parent.parent / "pairs.h5") as file:
        samples = {name: torch.from_numpy(file[name][...]) for name in ("images", "words")}
    count = len(samples["images"])
    training_count = count - round(count * config.data.held_out)
    rows = permute(0, -1, np.arange(count), count)
    model = task.build(range(1)).to_empty(device="cpu")
    task.init_weights(model, torch.device("cpu"))
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps)
    results = []
    global_batch = config.train.global_batch
    for step in range(1, 13):
        order = compute_index_range(config.run.seed, (step - 1) * global_batch, global_batch, training_count)
        losses = []
        for chosen in np.split(rows[order], global_batch // micro_batch):
            batch = {name: array[chosen] for name, array in samples.items()}
            loss = loss_function(model(batch["images"], batch["words"]), batch)
            (loss * micro_batch / global_batch).backward()
            losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(config.optimizer, step, 12)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm or 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results.append((float(np.mean(losses)), norm.item()))
    held_out = rows[training_count:]
    held_out_losses = []
    with torch.no_grad():
        for chosen in np.split(held_out[: len(held_out) // 4 * 4], len(held_out) // 4):
            batch = {name: array[chosen] for name, array in samples.items()}
            held_out_losses.append(loss_function(model(batch["images"], batch["words"]), batch).item())
    return results, float(np.mean(held_out_losses))


def check_equal_steps(run: Run, expected: list[tuple[float, float]], case: object) -> None:
    """Compare the losses and gradient norms of all steps with those of a plain loop."""
    steps = read_steps(run)
    assert len(steps) == len(expected) == 12
    for (step, loss, norm, *_), (expected_loss, expected_norm) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-6), f"{case}: loss of step {step}"
        assert norm == pytest.approx(expected_norm, rel=1e-5, abs=1e-6), f"{case}: norm of step {step}"


def test_a_batch_loss_has_the_losses_of_a_plain_loop_on_every_layout(folder: Path) -> None:
    """The micro-batches are the same in all layouts, so the losses are too."""
    expected: list[tuple[float, float]] = []
    for number, (ranks, overrides) in enumerate([(1, ()), (2, ()), (2, ("parallel.zero=3",))]):
        run = create_clip_run(folder, f"layout{number}", *overrides, ranks=ranks)
        if not expected:
            expected, expected_held_out = run_ranks(1, train_in_plain_torch, run.path, 4)[0]
        train_run(run, ranks)
        check_equal_steps(run, expected, (ranks, overrides))
        assert set(run_ranks(ranks, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}
        result = json.loads((run.evaluation_dir / f"{checkpoint_name(12)}.json").read_text())
        assert result["loss"] == pytest.approx(expected_held_out, rel=1e-5), "26 samples: 6 micro-batches, 2 left out"
        assert result["samples"] == 24 and 0 <= result["accuracy"] <= 1


def test_gathered_samples_have_the_losses_of_one_rank_with_a_larger_micro_batch(folder: Path) -> None:
    expected: list[tuple[float, float]] = []
    for number, overrides in enumerate([(), ("parallel.zero=2",), ("parallel.zero=3",)]):
        run = create_clip_run(folder, f"gathered{number}", "train.gather=true", *overrides, ranks=2)
        expected = expected or run_ranks(1, train_in_plain_torch, run.path, 8)[0][0]
        train_run(run, 2)
        check_equal_steps(run, expected, overrides)
    smaller = create_clip_run(folder, "not_gathered", ranks=2)
    train_run(smaller, 2)
    assert read_steps(smaller)[0][1] < expected[0][0] - 0.1, "a micro-batch of 4 has fewer negatives than one of 8"


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.story)])
def test_stops_and_kills_do_not_change_a_run_with_a_batch_loss(folder: Path, ranks: int) -> None:
    overrides = ("train.gather=true", "train.steps=60", "train.evaluate_every=30", "train.evaluate_sequences=8")
    undisturbed = create_clip_run(folder, f"undisturbed{ranks}", *overrides, ranks=ranks)
    train_run(undisturbed, ranks)
    run = create_clip_run(folder, f"disturbed{ranks}", *overrides, ranks=ranks)
    interrupt_training(run, ranks, signal.SIGTERM, 12, [ranks - 1])
    interrupt_training(run, ranks, signal.SIGKILL, 27, [0])
    assert train_run(run, ranks) == read_steps(undisturbed)
    assert compute_run_digest(run) == compute_run_digest(undisturbed)


@given(ranks=st.integers(1, 4), turns=st.integers(1, 4), stripe=st.integers(1, 5), consumed_steps=st.integers(0, 3))
def test_with_a_stripe_the_turns_of_all_ranks_are_consecutive_samples(
    ranks: int, turns: int, stripe: int, consumed_steps: int
) -> None:
    class Samples(IndexedDataset):
        def __len__(self) -> int:
            return 10_000

        def lengths(self, indices: Int64Array) -> Int64Array:
            return indices + 1

    global_batch = ranks * turns * stripe
    batches = [
        next(
            iter(
                GlobalOrderSampler(
                    Samples(), global_batch=global_batch, seed=1, samples_consumed=consumed_steps * global_batch,
                    num_replicas=ranks, rank=rank, order=lambda positions: positions, stripe=stripe,
                )
            )
        )
        for rank in range(ranks)
    ]  # fmt: skip
    dealt = np.stack(batches).reshape(ranks, turns, stripe).transpose(1, 0, 2).reshape(-1)
    assert dealt.tolist() == list(range(consumed_steps * global_batch, (consumed_steps + 1) * global_batch))


def write_module(folder: Path, old: str, new: str) -> None:
    """Write a module `pairs.py`: the example with one text replaced."""
    source = (CODE_ROOT / "examples/clip.py").read_text()
    assert source.count(old) >= 1
    (folder / "pairs.py").write_text(source.replace(old, new))


@pytest.mark.parametrize(
    ("line", "overrides", "facts"),
    [
        ('LOSS = "mean"', (), ("LOSS", "pairs.py", "sum", "batch")),
        ('LOSS = "sum"', ("train.gather=true",), ("train.gather", "LOSS", "pairs")),
        ('LOSS = "batch"', ("train.gather=true", "parallel.local_sgd={every: 2}"), ("train.gather", "local_sgd")),
    ],
)
def test_an_invalid_kind_of_loss_is_an_error(
    folder: Path, line: str, overrides: tuple[str, ...], facts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(folder, '\nLOSS = "batch"', f"\n{line}")
    (folder / "pairs.yaml").write_text(CONFIG.format(name="invalid", folder=folder))
    monkeypatch.chdir(folder)
    config = load_config(folder / "pairs.yaml", ("model.target=pairs", *overrides))
    with raises_error("model.invalid_module" if "mean" in line else "config.conflict", *facts):
        resolve_user_model(config, [folder])


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("self.log_scale.exp().squeeze(0)", "self.log_scale.exp()", "model.outputs_without_samples"),
        ("similarity_BB = compute", 'batch["images"]; similarity_BB = compute', "model.array_not_gathered"),
    ],
)
def test_what_cannot_be_gathered_is_an_error(tmp_path: Path, old: str, new: str, code: str) -> None:
    make_pairs.main(tmp_path / "pairs.h5", 60)
    write_module(tmp_path, old, new)
    run = create_clip_run(tmp_path, "wrong", "model.target=pairs", "train.gather=true", ranks=2)
    assert set(run_ranks(2, run_stage_and_return_code, run.path)) == {code}


def run_stage_and_return_code(rank_info: RankInfo, path: Path) -> str:
    """Run the train stage on this rank, and return the code of the UserError with which it fails."""
    try:
        run_stage_on_rank(rank_info, path, "train")
    except UserError as error:
        return error.code
    return ""


def test_too_few_held_out_samples_for_a_micro_batch_are_an_error(tmp_path: Path) -> None:
    make_pairs.main(tmp_path / "pairs.h5", 60)
    run = create_clip_run(tmp_path, "few", "train.evaluate_every=5", "train.evaluate_sequences=3", ranks=1)
    assert run_ranks(1, run_stage_and_return_code, run.path) == ["evaluate.too_few_samples"]
