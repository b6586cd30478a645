"""Tests of callbacks of the user: the examples, whose numbers are compared with plain code, and `train.callbacks`."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest

from examples import make_images
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import checkpoint_name, find_newest_step
from pipeline.run.directory import Run
from pipeline.run.failure import describe_remedy
from pipeline.run.images import read_images
from pipeline.run.stages import load_stage_module
from slurm.supervise.attempt_end import keep_user_frames
from tests.architecture.imports import ROOT
from tests.model.test_user_model import VIT_CONFIG, create_prepared_run, train_run
from tests.run.test_images import decode_png
from tests.support.errors import raises_error
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank
from tests.train.test_exact import check_same_result, create_run, interrupt_training, read_steps
from tests.train.test_held_out import run_stage_and_stop_during_evaluation

WITH_GRADIENTS = ("train.callbacks=[examples.gradient_statistics]", "train.steps=3", "model.dropout=0")
GROUPS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
LAYOUTS = {
    "one": (1, ()),
    "ddp": (2, ()),
    "zero3": (2, ("parallel.zero=3",)),
    "zero1": (2, ("parallel.zero=1",)),
    "tensor": (2, ("parallel.tensor=2",)),
    "pipeline": (2, ("parallel.pipeline=2", "model.tie_word_embeddings=true")),
    "fp16": (2, ("train.precision=fp16", "parallel.zero=2")),
}  # fmt: skip
"""Layouts by name: the number of ranks, and overrides."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory. The runs of the decoder use this data."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of images."""
    folder = tmp_path_factory.mktemp("images")
    make_images.main(folder / "a.h5", 240)
    return folder


# -- examples/gradient_statistics.py -------------------------------------------------------------------------


def compute_norms_in_plain_torch(_: RankInfo, path: Path) -> dict[str, float]:
    """Return the norms of the gradients of the first step by group, for the run at `path`."""
    import torch
    from torch.nn.functional import cross_entropy

    from pipeline.data.manifest import load_manifest
    from pipeline.data.sample_order import compute_index_range
    from pipeline.model.decoder import Decoder, init_weights

    run = Run.open(path)
    config = run.config
    manifest = load_manifest(run.data_dir)
    length = config.data.sequence_length
    samples = []
    for shard in manifest.train:
        tokens = np.fromfile(run.data_dir / shard.file, shard.dtype, shard.tokens, offset=shard.offset).astype(np.int64)
        samples += [tokens[i : i + length + 1] for i in range(0, len(tokens) - length, length)]
    model = Decoder(config.model, manifest.vocab_size, length)
    init_weights(model, config.run.seed, config.model.initializer_range)
    indices = compute_index_range(config.run.seed, 0, config.train.global_batch, len(samples))
    batch = torch.from_numpy(np.stack([samples[i] for i in indices]))
    cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    norms = {}
    for group in GROUPS:
        parameters = [p for name, p in model.named_parameters() if f"{name}.".startswith(f"{group}.")]
        if parameters:
            norms[group] = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm().item()
    return norms


@pytest.mark.parametrize(
    "layout",
    [
        "ddp",
        "zero3",
        *(pytest.param(name, marks=pytest.mark.story) for name in LAYOUTS if name not in ("ddp", "zero3")),
    ],
)
def test_gradient_norms_are_those_of_plain_torch_on_every_layout(tmp_path: Path, data: Path, layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    run = create_run(tmp_path, "norms", data, *WITH_GRADIENTS, *overrides, f"stages.train.tasks_per_node={ranks}")
    train_run(run, ranks)
    (expected_norms,) = run_ranks(1, compute_norms_in_plain_torch, run.path)
    assert len(expected_norms) >= 4
    lines = list(read_jsonl(run.metrics_file))
    norms = {name.removeprefix("gradient."): value for name, value in lines[0].items() if name.startswith("gradient.")}
    tolerance = 1e-2 if layout == "fp16" else 1e-4
    assert norms == pytest.approx(expected_norms, rel=tolerance)
    assert len(lines) == 3
    for line in lines:
        squares = [value**2 for name, value in line.items() if name.startswith("gradient.")]
        assert sum(squares) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-4)


# -- examples/learning_rate_finder.py ------------------------------------------------------------------------

FINDER = ("train.callbacks=[examples.learning_rate_finder]", "train.steps=100")


def test_the_learning_rate_finder_raises_the_rate_and_completes_the_run(tmp_path: Path, data: Path) -> None:
    """An interrupted test has the same result."""
    run = create_run(tmp_path, "find", data, *FINDER)
    train_run(run, 2)
    lines = list(read_jsonl(run.metrics_file))
    count = len(lines) - 1
    rates = [1e-5 * 1e5 ** (index / 79) for index in range(80)]
    assert [line["lr"] for line in lines] == pytest.approx([*rates[:count], 0.0])
    smoothed: list[float] = []
    for line in lines[:-1]:
        smoothed.append(0.7 * smoothed[-1] + 0.3 * line["loss"] if smoothed else line["loss"])
    assert count == 80 or smoothed[-1] > 4 * min(smoothed)
    suggestion = rates[int(np.argmin(smoothed))] / 10
    (event,) = read_event_lines(run, "train", "stopped_early")
    assert event["step"] == len(lines) and event["reason"].endswith(f" {suggestion:.2g}")
    assert 1e-5 < suggestion < 0.1
    (image,) = read_images(run.path)
    assert (image.name, image.step, image.media_type) == ("learning_rate", count, "image/svg+xml")
    assert f"{suggestion:.2g}".encode() in image.content

    stopped_run = create_run(tmp_path, "stopped", data, *FINDER)
    assert set(interrupt_training(stopped_run, 2, signal.SIGTERM, 20, [1])) == {ExitCode.STOPPED}
    interrupt_training(stopped_run, 2, signal.SIGKILL, 40, [0])
    train_run(stopped_run, 2)
    check_same_result(stopped_run, run)
    assert [image.content for image in read_images(stopped_run.path)] == [image.content]


# -- examples/validation_images.py ---------------------------------------------------------------------------

WITH_VALIDATION = (
    "train.callbacks=[examples.validation_images]", "train.evaluate_every=4", "train.evaluate_sequences=40",
    "train.steps=12", "evaluate.batch=7", "checkpoint.every_steps=4", "optimizer.lr=1e-2",
)  # fmt: skip


def create_validation_run(folder: Path, name: str, *overrides: str, ranks: int = 1) -> Run:
    """Return a run of examples/vit.py with the callback."""
    return create_prepared_run(folder, name, *WITH_VALIDATION, *overrides, ranks=ranks)


def count_confusions_in_plain_torch(rank_info: RankInfo, path: Path, step: int) -> list[list[int]]:
    """Return the confusions of the first 40 held-out images, with the weights of a checkpoint."""
    import torch

    from examples import vit
    from pipeline.checkpoint.checkpointer import load_checkpoint
    from pipeline.comm import groups
    from pipeline.data.sample_order import permute

    run = Run.open(path)
    groups.join_process_group(rank_info, run.config)
    model = vit.build(run.config.model.all_options, range(run.config.model.layers)).eval()
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    load_checkpoint(weights, run.checkpoints_dir / checkpoint_name(step), groups.new_control_group())
    with h5py.File(path.parent.parent / "a.h5") as file:
        count = len(file["labels"])
        training_count = count - round(count * run.config.data.held_out)
        indices = permute(0, -1, np.arange(training_count, count), count)[:40]
        images, labels = (torch.from_numpy(file[name][...][indices]) for name in ("images", "labels"))
    confusions = [[0] * 8 for _ in range(8)]
    for label, logits in zip(labels, model(images), strict=True):
        confusions[int(label)][int(logits.argmax())] += 1
    return confusions


@pytest.mark.parametrize(
    ("ranks", "overrides"), [pytest.param(1, (), marks=pytest.mark.story), (2, ("parallel.zero=3",))]
)
def test_the_validation_metric_and_its_images_are_those_of_plain_torch(
    image_folder: Path, tmp_path: Path, ranks: int, overrides: tuple[str, ...]
) -> None:
    run = create_validation_run(image_folder, f"validation-{ranks}", *overrides, ranks=ranks)
    train_run(run, ranks)
    lines = {line["step"]: line for line in read_jsonl(run.metrics_file)}
    images = {image.step: image for image in read_images(run.path)}
    assert set(images) == {4, 8, 12} and {image.name for image in images.values()} == {"confusions"}
    for step, image in images.items():
        (confusions,) = run_ranks(1, count_confusions_in_plain_torch, run.path, step)
        recalls = [row[label] / sum(row) for label, row in enumerate(confusions) if sum(row)]
        assert lines[step]["held_out_balanced_accuracy"] == pytest.approx(sum(recalls) / len(recalls))
        assert "held_out_balanced_accuracy" not in lines[step - 1]
        height, width, pixels = decode_png(image.content)
        assert (height, width) == (128, 128)
        grey = np.frombuffer(pixels, np.uint8).reshape(8, 16, 8, 16)
        for true, row in enumerate(confusions):
            for predicted, number in enumerate(row):
                expected = 255 * (1 - number / max(1, sum(row)))
                assert np.abs(grey[true, :, predicted].astype(float) - expected).max() <= 0.51


@pytest.mark.story
def test_a_stop_during_an_evaluation_does_not_lose_the_metric_of_a_callback(image_folder: Path) -> None:
    """The metric also ends the training (`train.early_stopping`)."""
    stopping = "train.early_stopping={metric: balanced_accuracy, patience: 2}"
    overrides = (stopping, "train.steps=200", "optimizer.lr=1e-6")
    undisturbed_run = create_validation_run(image_folder, "undisturbed", *overrides, ranks=2)
    train_run(undisturbed_run, 2)
    run = create_validation_run(image_folder, "interrupted", *overrides, ranks=2)
    for step in (4, 8):
        assert run_ranks(2, run_stage_and_stop_during_evaluation, run.path, "train", step) == [ExitCode.STOPPED] * 2
    train_run(run, 2)
    check_same_result(run, undisturbed_run)
    values, expected_values = (
        {line["step"]: line.get("held_out_balanced_accuracy") for line in read_jsonl(each.metrics_file)}
        for each in (run, undisturbed_run)
    )
    assert values == expected_values
    last_step = find_newest_step(run.checkpoints_dir)
    assert 13 <= last_step < 200 and last_step % 4 == 1
    assert {step for step, value in values.items() if value is not None} == set(range(4, last_step, 4))


# -- train.callbacks -----------------------------------------------------------------------------------------

FAILING = """
from pipeline.train.callback import Callback

class Failing(Callback):
    def on_step_end(self, trainer, step, metrics):
        if step == 2:
            1 / 0

def callbacks(config):
    return [Failing()]
"""


@pytest.mark.parametrize(
    ("text", "module", "code", "facts"),
    [
        (None, "absent.module", "model.no_module", ["train.callbacks", "absent"]),
        ("x = 1\n", "mine", "model.incomplete_module", ["train.callbacks", "mine.py", "callbacks"]),
        ("def callbacks(\n", "mine", "model.invalid_module", ["train.callbacks", "mine.py"]),
        ("def callbacks(config): pass\n", "slurm", "model.incomplete_module", ["train.callbacks", "slurm"]),
        ("def callbacks(config): pass\n", "mine.vit", "model.no_module", ["train.callbacks", "mine.vit"]),
    ],
)
def test_a_module_that_cannot_be_used_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, module: str, code: str, facts: list[str]
) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with raises_error(code, *facts):
        create_run(tmp_path, "invalid", tmp_path, f"train.callbacks=[{module}]")
    assert not (tmp_path / "runs/invalid/config.yaml").exists()


def test_a_module_with_the_name_of_another_one_is_an_error(image_folder: Path) -> None:
    """The working directory has a folder `examples`, and the model is the one of Sluice's folder of this name."""
    (image_folder / "other/examples").mkdir(parents=True)
    (image_folder / "other/examples/mine.py").write_text("def callbacks(config):\n    return []\n")
    with pytest.MonkeyPatch.context() as context:
        context.syspath_prepend(str(image_folder / "other"))
        with raises_error("model.no_module", "train.callbacks", "examples.mine"):
            create_prepared_run(image_folder, "same", "train.callbacks=[examples.mine]", text=VIT_CONFIG)


def test_a_module_that_cannot_be_imported_is_an_error_before_the_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    (tmp_path / "mine.py").write_text("import absent_package\ndef callbacks(config):\n    return []\n")
    monkeypatch.chdir(tmp_path)
    run = create_run(tmp_path, "unimportable", data, "train.callbacks=[mine]")
    with raises_error("model.import_failed", "train.callbacks", "absent_package", "mine.py"):
        run.check_model_code()


def test_resume_changes_the_callbacks_only_together_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    """The callback fails in step 2. The message names its file and line; a corrected file is copied again."""
    (tmp_path / "mine.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    run = create_run(tmp_path, "changed", data, "train.steps=4")
    with raises_error("run.not_copied", "train.callbacks", "mine", "--update-code"):
        run.apply_overrides(["train.callbacks=[mine]"])
    run.apply_overrides(["train.callbacks=[mine]"], new_code=True)
    run.copy_code()
    with pytest.raises(AssertionError, match="ZeroDivisionError") as caught:
        run_ranks(2, run_stage_on_rank, run.path, "train")
    message = str(caught.value)[str(caught.value).index("Traceback") :]
    assert "trainer.py" in message
    shortened = keep_user_frames(run, message)
    assert "mine.py" in shortened and "trainer.py" not in shortened
    assert re.search(r"mine\.py.*line 7|line 7.*mine\.py", describe_remedy(run, "crashed", message))
    assert "--update-code" in describe_remedy(run, "crashed", message)
    (tmp_path / "mine.py").write_text(FAILING.replace("1 / 0", "metrics['mine'] = 5"))
    run.copy_code()
    train_run(run, 2)
    assert [line.get("mine") for line in read_jsonl(run.metrics_file)] == [None, 5, None, None]


@pytest.mark.story
def test_callbacks_do_not_change_the_result(tmp_path: Path, data: Path) -> None:
    """Callbacks that only measure are no part of the identity of checkpoints, and may be added at any time."""
    expected_run = create_run(tmp_path, "without", data, "train.steps=12")
    train_run(expected_run, 2)
    run = create_run(tmp_path, "added", data, "train.steps=8")
    train_run(run, 2)
    run.apply_overrides(["train.steps=12", "train.callbacks=[examples.gradient_statistics]"], new_code=True)
    run.copy_code()
    assert (run.code_dir / "examples/gradient_statistics.py").exists()
    train_run(run, 2)
    assert ["gradient.lm_head" in line for line in read_jsonl(run.metrics_file)] == [False] * 8 + [True] * 4
    # The schedule of the first steps ended at step 8, so only the weights of a run with the same steps can be equal.
    assert [step for step, *_ in read_steps(run)] == [step for step, *_ in read_steps(expected_run)]
    other_run = create_run(tmp_path, "with", data, "train.steps=12", "train.callbacks=[examples.gradient_statistics]")
    train_run(other_run, 2)
    assert compute_run_digest(other_run) == compute_run_digest(expected_run)
    assert load_stage_module(other_run, "train").describe_missing_outputs(other_run) is None


def test_each_example_has_fewer_than_60_lines() -> None:
    for name in ("gradient_statistics", "learning_rate_finder", "validation_images"):
        assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) < 60, name
