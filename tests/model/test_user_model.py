"""Models of one's own: the vision transformer of examples/, and samples of different lengths
(tests/support/ragged.py)."""

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
from pipeline.base.errors import ExitCode, InputError, UserError
from pipeline.base.files import add_checksum, read_jsonl
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.config.read import load_config
from pipeline.config.user_model import UNREAD_OPTIONS, find_user_model, resolve_user_model
from pipeline.data.sample_order import assign_to_ranks
from pipeline.publish.export import export_checkpoint
from pipeline.run.code import CODE_ROOT as ROOT
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from planning.plan import describe_plan
from tests.support.errors import raises_error
from tests.support.events import read_event_lines
from tests.support.ranks import make_rank_info, run_ranks
from tests.support.tiny import HarmlessFlag, compute_run_digest, stage_rank
from tests.support.tiny_training import resave_rank
from tests.train.test_exact import interrupt_training, read_steps

VIT = """\
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
RAGGED = VIT.replace("examples.vit", "tests.support.ragged").replace(
    "2, heads: 2, dropout: 0.0, size: 16, channels: 1, patch", "2"
)
RAGGED = VIT.split("model:")[0] + "model: {{target: ragged, options: {{width: 4}}}}\ntrain" + VIT.split("\ntrain")[1]


def new_run(folder: Path, name: str, *more: str, text: str = VIT, ranks: int = 1) -> Run:
    path = folder / f"{name}.yaml"
    path.write_text(text.format(name=name, folder=folder))
    shutil.copy(ROOT / "tests/support/ragged.py", folder)
    with contextlib.chdir(folder):  # where modules are looked for
        run = Run.create(load_config(path, (*more, f"stages.train.tasks_per_node={ranks}")))
    return prepared(run)


def prepared(run: Run) -> Run:
    for stage in ("prepare", "shard"):
        assert load_stage_module(stage).run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag()) == ExitCode.DONE
        assert load_stage_module(stage).missing_outputs(run) is None
    return run


def trained(run: Run, ranks: int) -> list[tuple[int, float, float, float, int]]:
    assert set(run_ranks(ranks, stage_rank, run.path, "train")) == {ExitCode.DONE}
    return read_steps(run)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    make_images.main(folder / "a.h5", 150)
    make_images.main(folder / "b.h5", 90)
    return folder


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random walks of 1 to 40 values, padded with what shows where it is not masked out."""
    folder = tmp_path_factory.mktemp("series")
    draw = np.random.default_rng(0)
    values = draw.normal(0, 0.3, (120, 40)).cumsum(1).astype(np.float32)
    lengths = (40 * draw.random(120) ** 3).astype(np.int32) + 1
    values[np.arange(40) >= lengths[:, None]] = 1e4
    with h5py.File(folder / "series.h5", "w") as file:
        file["series"], file["lengths"] = values, lengths
    return folder


def plain_rank(rank_info: RankInfo, path: Path, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step by the plainest code: whole batch at once, arrays read by h5py."""
    import torch

    from pipeline.data.sample_order import compute_index_range, permute
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.model.task import make_task
    from pipeline.train.lr_schedule import compute_learning_rate

    run = Run.open(path)
    config, facts = run.config, run.user_model
    assert facts is not None
    samples: dict[str, list[Any]] = {name: [] for name in facts.arrays}
    for source in sorted(path.parent.parent.glob("*.h5")):
        with h5py.File(source) as file:
            for name, arrays in samples.items():
                arrays += list(file[name][...])
    count = len(samples[facts.arrays[0]])
    kept = permute(0, -1, np.arange(count - round(count * config.data.held_out)), count)
    module, task = facts.load(run.code_dir), make_task(run, load_run_manifest(run))
    assert str(module.__file__).startswith(str(run.code_dir)), "the run's own copy"
    model = task.build(range(config.model.layers)).to_empty(device="cpu")
    task.init_weights(model, torch.device("cpu"))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: Any = torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps)
    factors, rate = [1.0, 1.0], compute_learning_rate
    if config.optimizer.name == "own":
        optimizer, factors = module.optimizer(list(model.named_parameters()), config.optimizer), [1.0, 0.5]
        rate = module.learning_rate
    results = []
    for step in range(1, steps + 1):
        size = config.train.global_batch
        chosen = kept[compute_index_range(config.run.seed, (step - 1) * size, size, len(kept))]
        batch = {name: torch.from_numpy(np.stack([arrays[i] for i in chosen])) for name, arrays in samples.items()}
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = factor * rate(config.optimizer, step, config.train.steps or 0)
        total = batch["lengths"].sum() if "lengths" in batch else size
        loss = module.loss(model(*(batch[name] for name in facts.inputs)), batch) / total
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


def compare(ours: list[tuple[int, float, float, float, int]], plain: list[tuple[float, float]], case: str) -> None:
    assert len(ours) == len(plain) == 10
    for line, (loss, norm) in zip(ours, plain, strict=True):
        assert line[1:3] == pytest.approx((loss, norm), rel=1e-5), f"{case}, step {line[0]}: (loss, norm)"


LAYOUTS: list[tuple[int, tuple[str, ...]]] = [
    (1, ("train.micro_batch=16",)),
    (2, ()),
    (2, ("parallel.zero=2",)),
    (2, ("parallel.zero=3", "parallel.activation_checkpointing=selective")),
    (2, ("parallel.tensor=2", "train.micro_batch=8")),
    (2, ("parallel.pipeline=2", "parallel.activation_checkpointing=full")),
]
MORE: list[tuple[int, tuple[str, ...]]] = [
    (2, ("parallel.zero=1", "train.compile=true")),
    (2, ("parallel.pipeline=2", "parallel.schedule=gpipe")),
    (4, ("parallel.tensor=2", "parallel.zero=3")),
    (4, ("parallel.tensor=2", "parallel.pipeline=2")),
    (4, ("parallel.pipeline=2", "parallel.zero=2")),
    (2, ("parallel.offload=true", "parallel.zero=3")),
    (4, ("parallel.zero=3", "parallel.data={replicate: 2, shard: 2}")),
]
V = ("model.layers=4", "parallel.pipeline=2", "parallel.virtual_stages=2")
STAGED: list[tuple[int, tuple[str, ...]]] = [
    (2, (*V, f"parallel.schedule={name}"))
    for name in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v")
]
STAGED.append((4, (*V, "parallel.schedule=zbv", "parallel.tensor=2")))


@pytest.mark.parametrize(
    "cases", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.long), pytest.param(STAGED, marks=pytest.mark.long)]
)
def test_every_layout_of_the_example_equals_plain_code(
    pictures: Path, cases: list[tuple[int, tuple[str, ...]]], tmp_path: Path
) -> None:
    plain = None
    for source in pictures.glob("*.h5"):
        shutil.copy(source, tmp_path)
    pictures = tmp_path
    for number, (ranks, more) in enumerate(cases):
        run = new_run(pictures, f"layout{number}", *more, ranks=ranks)
        plain = plain or run_ranks(1, plain_rank, run.path, 10)[0]
        compare(trained(run, ranks), plain, str(more))


def test_it_learns_and_a_stop_changes_nothing(pictures: Path) -> None:
    """With dropout, so that randomness inside a step is tested too; then the same number on 1 and 3 ranks."""
    more = ("train.steps=60", "model.options.dropout=0.1", "model.options.width=32")
    calm, run = (new_run(pictures, name, *more, ranks=2) for name in ("calm", "stopped"))
    losses = [line[1] for line in trained(calm, 2)]
    assert np.mean(losses[-5:]) < 0.75 * losses[0]
    interrupt_training(run, 2, signal.SIGTERM, 20, [1])
    assert 20 <= len(read_steps(run)) < 60
    assert trained(run, 2) == read_steps(calm) and compute_run_digest(run) == compute_run_digest(calm)
    found = []
    for ranks in (1, 3):
        shutil.rmtree(calm.evaluation_dir)
        calm.evaluation_dir.mkdir()
        assert set(run_ranks(ranks, stage_rank, calm.path, "evaluate")) == {ExitCode.DONE}
        found.append(json.loads((calm.evaluation_dir / f"{checkpoint_name(60)}.json").read_text()))
    assert found[0] == found[1], "equal to the last bit"
    assert found[0]["samples"] == 24 and 0 < found[0]["accuracy"] <= 1 and "perplexity" not in found[0]
    assert (
        load_stage_module("evaluate").missing_outputs(calm) is None
        and "held-out loss" in load_stage_module("evaluate").progress(calm).description
    )
    assert {"samples", "samples_per_s"} <= next(iter(read_jsonl(calm.metrics_file))).keys()


OWN = """

def optimizer(parameters, config):
    matrices = [(name, value) for name, value in parameters if value.ndim > 1]
    vectors = [(name, value) for name, value in parameters if value.ndim < 2]
    return Kind([{"params": matrices}, {"params": vectors, "lr": config.lr / 2}], lr=config.lr)


def learning_rate(config, step, steps):
    return config.lr / step


class Counting(torch.optim.NAdam):
    def step(self, closure=None):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


Kind = torch.optim.NAdam
"""


def test_an_optimizer_and_a_schedule_of_ones_own(tmp_path: Path) -> None:
    """Its state is not zero before the first step; the steps are those of plain code, a stop changes no bit of them."""
    make_images.main(tmp_path / "a.h5", 150)
    (tmp_path / "own.py").write_text(Path(make_images.__file__).with_name("vit.py").read_text() + OWN)
    more = (
        "model.target=own",
        "optimizer.name=own",
        "optimizer.schedule=own",
        "train.steps=40",
        "train.evaluate_every=20",
    )
    with pytest.raises(UserError, match=r"optimizer\.name own needs a function optimizer"):
        new_run(tmp_path, "lacks", *more[1:], text=VIT)
    calm, run = (new_run(tmp_path, name, *more, ranks=2) for name in ("calm", "stopped"))
    for (_, loss, norm, *_), plain in zip(trained(calm, 2), run_ranks(1, plain_rank, calm.path, 40)[0], strict=True):
        assert (loss, norm) == pytest.approx(plain, rel=1e-4)
    assert [line[3] for line in read_steps(calm)] == [1e-2 / step for step in range(1, 41)]
    interrupt_training(run, 2, signal.SIGTERM, 8, [1])
    assert 8 <= len(read_steps(run)) < 40
    assert trained(run, 2) == read_steps(calm) and compute_run_digest(run) == compute_run_digest(calm)
    curves = [
        {line["step"]: line.get("held_out_accuracy") for line in read_jsonl(one.metrics_file)} for one in (calm, run)
    ]
    assert curves[0] == curves[1] and [step for step, found in curves[0].items() if found is not None] == [20, 40]
    text = (tmp_path / "own.py").read_text()
    lbfgs = "    return torch.optim.LBFGS([value for _, value in parameters])\n    matrices"
    for old, new, words in (
        (
            "Kind = torch.optim.NAdam",
            "Kind = Counting",
            r"the option k of its parameter groups",
        ),
        ("    matrices", lbfgs, r"optimizer of model\.target must perform a step without a closure"),
        ('{"params": matrices}, ', "", r"optimizer of model\.target must return .* is in none of its groups"),
        ("config.lr / step", "None", r"learning_rate of model\.target must return a finite number; it returned None"),
    ):
        (tmp_path / "own.py").write_text(text.replace(old, new, 1))
        with pytest.raises(AssertionError, match=words):
            trained(new_run(tmp_path, f"bad{len(new)}", *more), 1)


def read_callback_example() -> str:
    """Return the code of the example in docs/models.md."""
    (section,) = re.findall(r"^## Callbacks$(.*?)^## ", (ROOT / "docs/models.md").read_text(), re.M | re.S)
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    return str(code)


def read_averages(run: Run) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["loss_average"]) for line in read_jsonl(run.metrics_file)]


def test_a_callback_adds_a_metric_and_completes_the_training_at_the_same_step_after_stops(tmp_path: Path) -> None:
    """The example of the documentation, on 1 and 2 ranks; the learning rate is too small for any progress."""
    make_images.main(tmp_path / "a.h5", 150)
    (tmp_path / "own.py").write_text(
        Path(make_images.__file__).with_name("vit.py").read_text() + "\n\n" + read_callback_example()
    )
    overrides = ("model.target=own", "optimizer.lr=1e-7", "train.steps=200")
    undisturbed = new_run(tmp_path, "undisturbed", *overrides, ranks=2)
    trained(undisturbed, 2)
    averages = read_averages(undisturbed)
    last = averages[-1][0]
    assert 51 <= last < 200 and averages[0][1] == averages[0][2]
    assert load_stage_module("train").missing_outputs(undisturbed) is None
    assert [event["step"] for event in read_event_lines(undisturbed, "train", "stopped_early")] == [last]
    trained(undisturbed, 2)
    assert read_averages(undisturbed) == averages, "a training that is complete is not continued"

    stopped = new_run(tmp_path, "stopped", *overrides, ranks=2)
    assert set(interrupt_training(stopped, 2, signal.SIGTERM, 20, [1])) == {ExitCode.STOPPED}
    assert 20 <= len(read_averages(stopped)) < last and load_stage_module("train").missing_outputs(stopped) is not None
    trained(stopped, 2)
    assert read_averages(stopped) == averages and compute_run_digest(stopped) == compute_run_digest(undisturbed)

    alone = new_run(tmp_path, "alone", *overrides, "checkpoint.every_steps=1", "checkpoint.keep=2")
    trained(alone, 1)
    averages_alone = read_averages(alone)
    digest_alone = compute_run_digest(alone)
    assert averages_alone[-1][0] == last
    shutil.rmtree(alone.checkpoints_dir / checkpoint_name(last))  # the stop is requested, but not carried out
    trained(alone, 1)
    assert read_averages(alone) == averages_alone and compute_run_digest(alone) == digest_alone


@pytest.mark.story
def test_moved_to_another_layout_the_weights_stay(pictures: Path, tmp_path: Path) -> None:
    """Loaded under the new layout and saved again they are the same; losses go on as those of an unmoved run."""
    steady = ("optimizer.schedule=constant", "train.steps=14")
    calm = trained(new_run(pictures, "unmoved", *steady), 1)
    run = new_run(pictures, "moved", *steady, "train.steps=10", "parallel.tensor=2", ranks=2)
    trained(run, 2)
    before = compute_run_digest(run)
    run.apply_overrides(["train.steps=14", "parallel.tensor=1", "parallel.zero=3"])
    assert set(run_ranks(2, resave_rank, run.path, tmp_path)) == {before}
    for ours, theirs in zip(trained(run, 2), calm, strict=True):
        assert ours[:3] == pytest.approx(theirs[:3], rel=1e-5)


# -- samples of different lengths ----------------------------------------------------------------------------


FROM_FILE = """\
    from safetensors import safe_open

    with safe_open(options["weights"], framework="pt") as file:
        values.copy_(file.get_tensor(name))
"""


def test_samples_of_different_lengths_equal_plain_code(series: Path) -> None:
    plain = None
    cut = ("parallel.pipeline=2", "parallel.tensor=2")
    more: tuple[str, ...]
    for ranks, more in [(1, ()), (2, ()), (2, ("parallel.zero=3",)), (4, ("train.micro_batch=4",)), (4, cut)]:
        run = new_run(series, f"ragged{ranks}{len(more)}", *more, text=RAGGED, ranks=ranks)
        plain = plain or run_ranks(1, plain_rank, run.path, 10)[0]
        compare(trained(run, ranks), plain, f"{ranks} ranks {more}")


def test_evaluation_of_different_lengths(series: Path) -> None:
    run = new_run(series, "evaluated", "evaluate.batch=5", text=RAGGED, ranks=2)
    trained(run, 2)
    assert set(run_ranks(2, stage_rank, run.path, "evaluate")) == {ExitCode.DONE}
    result = json.loads(next(run.evaluation_dir.iterdir()).read_text())
    assert result["samples"] == 12 and result["entries"] > 12 and 0 < result["loss"] < 100
    # the weights leave by name, and another model's `init` takes them up, under another layout
    out = series / "weights"
    assert "4 tensors" in export_checkpoint(run, out, None, "fp32")
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    module = (ROOT / "tests/support/ragged.py").read_text()
    assert module.count("    values.normal_(0.0, 0.3)") == 1
    (series / "started.py").write_text(module.replace("    values.normal_(0.0, 0.3)", FROM_FILE))
    more = ("model.target=started", f"model.options.weights={out}/model.safetensors", "parallel.zero=3")
    still = ("train.steps=1", "optimizer.warmup_steps=0", "optimizer.lr=1.0e-30", "evaluate.batch=5")
    again = new_run(series, "started", *more, *still, text=RAGGED, ranks=2)
    trained(again, 2)
    assert set(run_ranks(2, stage_rank, again.path, "evaluate")) == {ExitCode.DONE}
    assert json.loads(next(again.evaluation_dir.iterdir()).read_text())["loss"] == pytest.approx(
        result["loss"], rel=1e-6
    )


def test_ranks_read_the_same_global_batch_with_even_sums(series: Path) -> None:
    from pipeline.data.sample_order import GlobalOrderSampler, compute_index_range
    from pipeline.data.samples import SampleDataset
    from pipeline.data.verify_shards import load_run_manifest

    run = new_run(series, "dealt", text=RAGGED)
    dataset: Any = SampleDataset(load_run_manifest(run))  # type: ignore[arg-type]
    hands = []
    for rank in range(4):
        steps = iter(
            GlobalOrderSampler(dataset, global_batch=16, seed=3, samples_consumed=32, num_replicas=4, rank=rank)
        )
        hands.append([next(steps) for _ in range(9)])
    better = 0
    for step, dealt in enumerate(zip(*hands, strict=True)):
        expected = compute_index_range(3, 32 + 16 * step, 16, len(dataset))
        assert sorted(np.concatenate(dealt)) == sorted(expected)
        sums = [int(dataset.lengths(hand).sum()) for hand in dealt]
        plain = [int(dataset.lengths(hand).sum()) for hand in expected.reshape(4, 4)]
        assert max(sums) <= max(plain) and np.ptp(sums) <= dataset.lengths(expected).max()
        better += np.ptp(sums) < np.ptp(plain)
    assert better >= 8, "of 9 batches"


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 6), st.integers(1, 7))
def test_a_deal_is_fair_and_never_worse(data: st.DataObject, ranks: int, room: int) -> None:
    size = ranks * room
    values = data.draw(st.lists(st.integers(1, 1000), min_size=size, max_size=size))
    lengths = np.array(values, dtype=np.int64)
    hands = assign_to_ranks(lengths, ranks)
    assert hands.shape == (ranks, room) and sorted(hands.ravel()) == list(range(size))
    assert (assign_to_ranks(lengths, ranks) == hands).all()
    assert lengths[hands].sum(1).max() <= lengths.reshape(ranks, room).sum(1).max()
    assert (np.diff(lengths[hands], axis=1) <= 0).all(), "the longest first, so that micro-batches hold like lengths"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(8, 16))
def test_a_deal_of_skewed_lengths_is_nearly_even(seed: int, ranks: int, room: int) -> None:
    """Sums differ by no more than the longest sample; of equal runs of positions they differ by more, nearly always."""
    batches = np.random.default_rng(seed).lognormal(4, 1, (20, ranks * room)).astype(np.int64) + 1
    better = 0
    for lengths in batches:
        dealt = lengths[assign_to_ranks(lengths, ranks)].sum(1)
        assert np.ptp(dealt) <= lengths.max()
        better += np.ptp(dealt) < np.ptp(lengths.reshape(ranks, room).sum(1))
    assert better >= 16


def test_a_greedy_deal_that_would_be_worse_is_not_taken() -> None:
    lengths = np.array([6, 1, 1, 4, 4, 4], dtype=np.int64)
    greedy = 4 + 4 + 4
    hands = assign_to_ranks(lengths, 2)
    assert lengths[hands].sum(1).max() <= min(greedy, 12)


# -- files -----------------------------------------------------------------------------------------------------


def test_a_file_that_changed_is_noticed_and_left_alone(tmp_path: Path) -> None:
    make_images.main(tmp_path / "a.h5", 100)
    run = new_run(tmp_path, "changed")
    manifest = json.loads((run.data_dir / "manifest.json").read_text())
    assert (manifest["train"][0]["samples"], manifest["held_out_samples"]) == (100, 10)
    assert manifest["train"][0]["arrays"]["images"]["shape"] == [100, 1, 16, 16]
    content = (tmp_path / "a.h5").read_bytes()
    (tmp_path / "a.h5").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(AssertionError, match=r"a\.h5 is damaged: .*restore the file"):
        run_ranks(1, stage_rank, run.path, "train")
    (tmp_path / "a.h5").write_bytes(content[:-1])
    assert "as in its manifest" in str(load_stage_module("shard").missing_outputs(run))
    (tmp_path / "a.h5").write_bytes(content)
    assert load_stage_module("shard").missing_outputs(run) is None and len(trained(run, 1)) == 10


def test_a_manifest_of_samples_that_changed_is_noticed_and_mended(tmp_path: Path) -> None:
    make_images.main(tmp_path / "a.h5", 100)
    run = new_run(tmp_path, "sealed")
    manifest = run.data_dir / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"held_out_samples": 10', '"held_out_samples": 12'))
    assert "manifest.json is damaged: its content does not match its own hash" in str(
        load_stage_module("shard").missing_outputs(run)
    )
    prepared(run)
    assert manifest.read_text() == whole
    values = json.loads(whole)
    values["train"][0]["arrays"]["images"]["offset"] += 1
    manifest.write_text(json.dumps(add_checksum(values)))
    with pytest.raises(AssertionError, match=r"array images in .*a\.h5 is offset=\d+ .*offset="):
        run_ranks(1, stage_rank, run.path, "train")


def test_a_file_that_changes_before_it_is_hashed_is_prepared_again(tmp_path: Path) -> None:
    make_images.main(tmp_path / "a.h5", 100)
    run = new_run(tmp_path, "early")
    (run.data_dir / "manifest.json").unlink()
    (run.data_dir / "shards/unit-00000.json").unlink()
    make_images.main(tmp_path / "a.h5", 50)
    assert "has changed since" in str(load_stage_module("prepare").missing_outputs(run))
    with pytest.raises(InputError, match="has changed since"):
        load_stage_module("shard").run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())
    prepared(run)
    assert json.loads((run.data_dir / "manifest.json").read_text())["train"][0]["samples"] == 50


IMAGES, LABELS = np.zeros((4, 1, 16, 16), np.uint8), np.zeros(4, np.uint8)


@pytest.mark.parametrize(
    ("arrays", "code", "facts"),
    [
        ({"images": IMAGES}, "data.no_array", ["examples.vit", "'labels'", "images"]),
        ({"images": IMAGES, "labels": LABELS[:3]}, "data.shape_mismatch", ["images (4, 1, 16, 16)", "labels (3,)"]),
        ({"images": IMAGES, "labels": np.array([b"a"] * 4)}, "data.wrong_type", ["labels", "|S1"]),
        ({"images": IMAGES.astype(">f4"), "labels": LABELS}, "data.wrong_type", ["images", ">f4"]),
    ],
)
def test_files_that_the_model_cannot_use_are_named(
    tmp_path: Path, arrays: dict[str, Any], code: str, facts: list[str]
) -> None:
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values)
    with raises_error(code, tmp_path / "bad.h5", *facts):
        new_run(tmp_path, "bad")


def test_files_of_different_shapes_are_named(tmp_path: Path) -> None:
    make_images.main(tmp_path / "a.h5", 10)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["images"], file["labels"] = IMAGES[..., :8], LABELS
    with raises_error("data.shape_mismatch", tmp_path / "b.h5", tmp_path / "a.h5", "images", "(4, 1, 16, 8)"):
        new_run(tmp_path, "bad")


@pytest.mark.parametrize("lengths", [[0, 3], [2, 9]])
def test_lengths_outside_the_padding_are_refused(tmp_path: Path, lengths: list[int]) -> None:
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        file["series"], file["lengths"] = np.zeros((2, 8), np.float32), np.array(lengths)
    with raises_error("data.out_of_range", tmp_path / "bad.h5", "lengths", *lengths):
        new_run(tmp_path, "bad", text=RAGGED)


# -- refusals ----------------------------------------------------------------------------------------------------

WHOLE = """\
import torch
ARRAYS = ('x',)
INPUTS = ('x',)
def build(options, layers): return torch.nn.Linear(2, 2)
def loss(outputs, batch): ...
"""
LOADS = """\
def build(options, layers):
    net = torch.nn.Linear(2, 2)
    net.load_state_dict({'weight': WEIGHT, 'bias': WEIGHT[0]})
    return net
WEIGHT = torch.ones(2, 2)
"""


@pytest.mark.parametrize(
    ("source", "more", "words"),
    [
        (None, (), r"there is no module nothing_here"),
        ("ARRAYS = ('x',)\n", (), r"lacks INPUTS, build, loss at its top level"),
        ("def broken(:\n", (), r"broken\.py|Python"),
        (WHOLE.replace("('x',)", "list('x')", 1), (), r"ARRAYS in "),
        (WHOLE.replace("INPUTS = ('x',)", "INPUTS = ('y',)"), (), r"y of .* is not among its ARRAYS"),
        (WHOLE + "PADDED = ('x',)\n", (), r"lengths of .* is not among its ARRAYS"),
        (WHOLE, ("parallel.tensor=2",), r"parallel.tensor 2 needs a function tensor_plan: nothing_here has none"),
        (WHOLE, ("parallel.pipeline=2",), r"parallel.pipeline 2 needs CUTS = True"),
        (WHOLE + "CUTS = False\n", ("parallel.pipeline=2",), r"parallel.pipeline 2 needs CUTS = True"),
        (WHOLE, ("parallel.activation_checkpointing=full",), r"activation_checkpointing full needs a function blocks"),
        (WHOLE, ("train.compile=true",), r"train.compile needs a function blocks"),
        (WHOLE, ("model.target=os.path",), r"there is no module os"),
        (WHOLE, ("model.target=a-b",), r"model: target \(a-b\)"),
        (WHOLE, ("model.dim=64",), r"dim \(64\) .*options"),
        (WHOLE, ("model.options.layers=3",), r"options.layers is model.layers"),
        (WHOLE, ("data.sequence_length=64",), r"sequence_length \(64\)"),
        (WHOLE, ("data.source=python-stdlib",), r"model.target: .*data.source .*HDF5"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, more: tuple[str, ...], words: str
) -> None:
    if source is not None:
        (tmp_path / "nothing_here.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(VIT.format(name="bad", folder=tmp_path).replace("examples.vit", "nothing_here"))
    with pytest.raises(UserError, match=words):
        Run.create(load_config(tmp_path / "bad.yaml", ("stages.train.tasks_per_node=2", *more)))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("def helper(:\n", r"nothing_here.py .*invalid syntax"),
        (
            "import torch_of_tomorrow\n",
            r"nothing_here cannot be imported or built here(.|\n)*No module named 'torch_of_tomorrow'",
        ),
        (
            "WIDTH = depth * 2\n",
            r"cannot be imported or built here, and no job could:(.|\n)*line 6(.|\n)*name 'depth' is not defined",
        ),
    ],
)
def test_a_module_that_fails_is_told_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "nothing_here.py"
    (tmp_path / "bad.yaml").write_text(VIT.format(name="bad", folder=tmp_path).replace("examples.vit", "nothing_here"))
    config = load_config(tmp_path / "bad.yaml")
    module.write_text(WHOLE + last)
    with pytest.raises(UserError, match=words):
        Run.preview(config).check_model_code()
    assert not (tmp_path / "runs").exists()
    module.write_text(WHOLE)
    Run.preview(config).check_model_code()
    run = Run.create(config)
    assert (run.code_dir / "nothing_here.py").read_text() == WHOLE
    module.write_text(WHOLE + last)
    with pytest.raises(UserError, match=words):
        run.check_model_code()
    assert (run.code_dir / "nothing_here.py").read_text() == WHOLE, "the copy that works stays"


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("def build(options, layers): return None\n", "must return a torch.nn.Module; it returns None"),
        ("def build(options, layers): return torch.nn.BatchNorm1d(2)\n", "running_mean is persistent .* GroupNorm"),
        (LOADS, r"build assigns values to weight.* init\(name, values, options\)"),
        (
            LOADS.replace("net.load_state_dict({'weight': WEIGHT, 'bias': WEIGHT[0]})", "net.weight = made()")
            + "def made(): return torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))\n",
            "build assigns values to weight",
        ),
    ],
)
def test_a_model_that_no_layout_can_train_is_told_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(VIT.format(name="bad", folder=tmp_path).replace("examples.vit", "nothing_here"))
    (tmp_path / "nothing_here.py").write_text(WHOLE + last)
    with pytest.raises(UserError, match=words):
        Run.preview(load_config(tmp_path / "bad.yaml")).check_model_code()


def test_what_a_single_file_imports_from_its_folder_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what that imports; not what nobody imports, nor what the jobs have anyway."""
    monkeypatch.chdir(tmp_path)
    sources = {
        "nothing_here.py": WHOLE + "import random, torch, yaml, numpy\nfrom layers.block import Block\n"
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
    (tmp_path / "bad.yaml").write_text(VIT.format(name="bad", folder=tmp_path).replace("examples.vit", "nothing_here"))
    config = load_config(tmp_path / "bad.yaml")
    Run.preview(config).check_model_code()
    code = Run.create(config).code_dir
    own = {path.name for path in code.iterdir()} - {
        "submit.py",
        "setup.py",
        "setup.cfg",
        "cli",
        "slurm",
        "tracking",
        "planning",
        "data_prep",
        "COMMIT",
    }
    assert own - {"DIFF", "__pycache__"} == {"nothing_here.py", "layers", "deep.py", "util.py", "pipeline", "plain"}
    assert (code / "pipeline/base").is_dir() and (code / "layers/block.py").is_file()


def test_a_copied_file_that_does_not_compile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text(WHOLE)
    (package / "late.py").write_text("x = 1\nif x:\nprint(x)\n")  # imported inside a function, an hour later
    (tmp_path / "bad.yaml").write_text(VIT.format(name="bad", folder=tmp_path).replace("examples.vit", "mine.model"))
    with pytest.raises(UserError, match=r"mine/late.py.*line 3"):
        Run.create(load_config(tmp_path / "bad.yaml"))


def test_resume_refuses_what_the_module_lacks(series: Path) -> None:
    run = new_run(series, "resumed", text=RAGGED, ranks=2)
    with pytest.raises(UserError, match=r"activation_checkpointing full needs a function blocks: ragged has none"):
        run.apply_overrides(["parallel.activation_checkpointing=full"])
    assert not run.changes_file.exists()


def test_the_run_keeps_its_own_copy(tmp_path: Path) -> None:
    """Found in the working directory; an edit afterwards, or another directory, changes nothing."""
    make_images.main(tmp_path / "a.h5", 60)
    (tmp_path / "mine").mkdir()
    source = tmp_path / "mine" / "net.py"
    source.write_text(Path(make_images.__file__).with_name("vit.py").read_text())
    run = new_run(tmp_path, "copy", "model.target=mine.net", "train.steps=2")
    source.write_text("raise SystemExit('edited')\n")
    assert len(trained(run, 1)) == 2


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("1 / 0\n", r"bad fails at .*bad\.py:5: ZeroDivisionError: division by zero"),
        ("raise SystemExit('away')\n", r"bad fails at .*bad\.py:5: SystemExit: away"),
        ("class E(BaseException): pass\nraise E('x\\x1b[2J')\n", r"bad fails at .*bad\.py:6: E: x\?\[2J"),
        ("def build(options, layers): return options['width']\n", r"bad fails at .*bad\.py:5: KeyError: 'width'"),
        ("def build(options, layers): return None\n", "bad fails at .* has no attribute 'parameters'"),
    ],
)
def test_a_module_that_fails_is_named_by_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "bad", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    head = "ARRAYS = INPUTS = ('a',)\ndef build(options, layers): ...\ndef loss(outputs, batch): ...\n\n"
    (tmp_path / "bad.py").write_text(head + source)
    text = "run: {name: x}\ntrain: {steps: 1}\nmodel: {target: bad}\ndata: {source: x.h5}\n"
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=says):
        list(describe_plan(load_config(tmp_path / "x.yaml")))


def build_rank(rank_info: RankInfo, path: Path, text: str | None) -> str:
    """What the trainer says of a module whose source is `text`; None: as it is."""
    run = Run.open(path)
    if text is not None:
        (run.code_dir / "ragged.py").write_text(text)
    try:
        stage_rank(rank_info, path, "train")
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("persistent=False", "persistent=True", "times is persistent and would differ between layouts"),
        ("reset_buffers", "other_name", "buffer .times: its module has no method reset_buffers"),
        (
            "nn.Linear(width, 1)\n",
            "nn.Linear(width, 1)\n        self.again = self.last\n",
            "one parameter under two names",
        ),
        (
            "import torch\n",
            "import torch\nimport not_installed\n",
            "cannot be imported: No module named 'not_installed'",
        ),
        (".masked_fill(~real, 0.0).sum()", "", "must return a tensor without dimensions"),
        (".masked_fill(~real, 0.0).sum()", ".masked_fill(~real, 0.0).mean()", "is a mean, not a sum: "),
    ],
)
def test_what_a_module_may_not_do_is_told_by_the_ranks(series: Path, old: str, new: str, words: str) -> None:
    text = (ROOT / "tests/support/ragged.py").read_text()
    assert old in text
    shutil.rmtree(series / "runs" / "told", ignore_errors=True)
    run = new_run(series, "told", text=RAGGED)
    assert words in run_ranks(1, build_rank, run.path, text.replace(old, new, 1))[0]


def test_a_mean_is_told_although_the_first_batch_is_of_zeros(series: Path) -> None:
    """DDP's first backward is one of zeros, whose loss may be 0, of which nothing can be said."""
    text = (ROOT / "tests/support/ragged.py").read_text()
    mean = text.replace(".masked_fill(~real, 0.0).sum()", '.masked_fill(~real, 0.0).mean() * batch["series"].any()')
    run = new_run(series, "zeros", ranks=2, text=RAGGED)
    assert "is a mean, not a sum: " in run_ranks(2, build_rank, run.path, mean)[0]


def test_a_mean_is_told_where_rows_of_all_samples_stand_below_each_other(series: Path) -> None:
    text = (ROOT / "tests/support/ragged.py").read_text()
    for old, new in (
        ("self.last(x)[..., 0]", "self.last(x)[..., 0].flatten()"),
        ("    real = ", '    outputs = outputs.view(len(batch["lengths"]), -1)\n    real = '),
        (".masked_fill(~real, 0.0).sum()", ".masked_fill(~real, 0.0).mean()"),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    assert "is a mean, not a sum: " in run_ranks(1, build_rank, new_run(series, "flat", text=RAGGED).path, text)[0]


PAIRS = """
import torch
from torch.nn import functional as F

ARRAYS = INPUTS = ("series",)


class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(40, 4), torch.nn.Linear(40, 4)
        self.scale = torch.nn.Parameter(torch.empty(1))

    def forward(self, series):
        series = series.clamp(-1, 1)
        a, b = self.one(series), self.two(series)
        return RETURNS


def build(options, layers):
    return Pairs()


def loss(outputs, batch):
"""
CONTRASTIVE = "    a, b = outputs[:2]\n    logits = a @ b.T\n    labels = torch.arange(len(a))\n"
INFO_NCE = f'{CONTRASTIVE}    return F.cross_entropy(logits, labels, reduction="sum")\n'
CENTRED = "    return (outputs[0] - outputs[0].mean(0)).square().sum()\n"
STANDARDIZED = "    a = outputs[0] / outputs[0].std(0)\n    return (a.T @ outputs[1]).square().sum()\n"
OF_MATRIX = '    return F.cross_entropy(outputs, torch.arange(len(outputs)), reduction="sum")\n'
INDEPENDENT = "    a, b = outputs[:2]\n    return (a - b).square().sum()"
ACROSS = "depends on the other samples of the batch"
MEAN = "is a mean, not a sum"


@pytest.mark.parametrize(
    ("returns", "loss", "words", "not_words"),
    [
        ("a, b", INFO_NCE, ACROSS, MEAN),
        ("a, b, self.scale.sum()", INFO_NCE, ACROSS, "not checked"),
        ("a, b", INFO_NCE.replace(', reduction="sum"', ""), ACROSS, MEAN),
        ("a, b", CENTRED, ACROSS, MEAN),
        ("a, b", STANDARDIZED, ACROSS, MEAN),
        (
            "torch.cat([a, b])",
            "    a, b = outputs.chunk(2)\n    return (a - b).square().sum()\n",
            "2 rows for each",
            MEAN,
        ),
        ("a @ b.T", OF_MATRIX, r"pairs.py:25: IndexError", MEAN),
        ("a, b", "    assert len(outputs[0]) > 1, 'no pairs'\n" + INFO_NCE, r"pairs.py:25: AssertionError: no", MEAN),
        ("a, b", INDEPENDENT.replace("sum", "mean") + "\n", MEAN, ACROSS),
        ("a, b", INDEPENDENT + " + 1\n", "adds 1 in each call", MEAN),
        ("a, b, self.scale.sum()", INDEPENDENT + " + outputs[2] + 1\n", "nothing", MEAN),
        ("a, b", INDEPENDENT + " * torch.rand(())\n", "nothing", MEAN),
        ("a, b", INDEPENDENT + "\n", "nothing", MEAN),
    ],
)
def test_what_is_wrong_with_a_loss_is_what_is_said(
    series: Path, returns: str, loss: str, words: str, not_words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other samples in it, a mean, a failure with fewer samples; what cannot be checked is let through."""
    (series / "pairs.py").write_text(PAIRS.replace("RETURNS", returns) + loss)
    shutil.rmtree(series / "runs" / "pairs", ignore_errors=True)
    run = new_run(series, "pairs", "model.target=pairs", "train.steps=2", text=RAGGED)
    (said,) = run_ranks(1, build_rank, run.path, None)
    assert words in said and not_words not in said
    if "pairs.py:" in words:
        assert "1 of the 2 samples" in said or "3 samples" in said
    if words != MEAN:
        assert 'reduction="sum"' not in said


def failing_rank(rank_info: RankInfo, path: Path) -> str:
    """The traceback of the error that ends a training."""
    try:
        stage_rank(rank_info, path, "train")
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return "nothing"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_fails_with_the_one_sample_of_the_start_is_told_so(series: Path, ranks: int) -> None:
    """DDP's first backward is of one sample; one process has none, and its batches are as large as asked for."""
    source = PAIRS.replace("RETURNS", "a, b") + f"    return outputs[0][{3 - ranks}].sum()\n"
    (series / "pairs.py").write_text(source)
    shutil.rmtree(series / "runs" / "pairs", ignore_errors=True)
    run = new_run(series, "pairs", "model.target=pairs", "train.steps=2", text=RAGGED, ranks=ranks)
    for said in run_ranks(ranks, failing_rank, run.path):
        assert "pairs.py" in said and "line 25" in said and "IndexError" in said
        assert ("called with 1 sample" in said) == (ranks == 2)


BUILDS = """\
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
    ("body", "options", "unread"),
    [
        ("return linear(options['width'])", {"width": 2, "widht": 3}, ["widht"]),
        ("return linear(options.get('width', 2))", {"widht": 3, "more": {"a": 1}}, ["widht", "more"]),
        ("return linear(Sizes(**options).width)", {"width": 2, "depth": 3}, []),
        ("return linear(Sizes(**options['sizes']).width)", {"sizes": {"width": 2, "depth": 3}, "other": 2}, ["other"]),
        ("return linear({**options}['width'])", {"width": 2, "any": 3}, []),
        ("return linear((options | {'width': 2})['width'])", {"any": 3}, []),
        ("return linear(options['sizes']['width'])", {"sizes": {"width": 2, "height": 3}}, ["sizes.height"]),
        ("return linear(json.loads(json.dumps(options))['width'])", {"width": 2, "any": 3}, []),
        ("assert type(options) is dict; return linear(options['width'])", {"width": 2, "any": 3}, []),
    ],
)
def test_the_options_that_a_build_reads_are_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    options: dict[str, Any],
    unread: list[str],
) -> None:
    from pipeline.model.task import try_user_model

    (tmp_path / "net.py").write_text(f"{BUILDS}    layers = options['layers']\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the next module of this name may be of the same second
    points = [{**options, "layers": layers} for layers in (2, 3)]
    try_user_model("net", *map(json.dumps, points))
    assert json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(UNREAD_OPTIONS)) == unread


def test_options_that_the_module_never_reads_are_noted_once(tmp_path: Path) -> None:
    """By the dry run; not those that another function than `build` may read, by a string in the source."""
    (tmp_path / "net.py").write_text(f"{BUILDS}    return linear(options['width'])\n")
    text = VIT.replace("examples.vit", "net").format(name="x", folder=tmp_path)
    options = "options: {width: 2, widht: 3, by_init: 1, sizes: {width: 2}}"
    (tmp_path / "x.yaml").write_text(re.sub("options: .*", options, text))
    make_images.main(tmp_path / "a.h5", 60)
    command = [sys.executable, str(ROOT / "submit.py"), "x.yaml", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"model\.options\.([\w.]+)", done.stdout) == ["widht", "sizes"]


def test_a_plan_that_forgets_a_parameter_is_refused(pictures: Path) -> None:
    run = new_run(pictures, "forgets", "parallel.tensor=2", ranks=2)
    module = run.code_dir / "examples" / "vit.py"
    module.write_text(module.read_text().replace('"norm": Replicated(), ', ""))
    with pytest.raises(AssertionError, match=r"tensor_plan of examples.vit does not cover norm\.weight"):
        run_ranks(2, stage_rank, run.path, "train")


def test_the_example_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "examples.vit", raising=False)  # other tests import it
    found = find_user_model("examples.vit", [ROOT])
    assert found.arrays == ("images", "labels") and found.inputs == ("images",) and "tensor_plan" in found.names
    assert "examples.vit" not in sys.modules
    assert resolve_user_model(load_config(Path("configs/quickstart.yaml")), []) is None
