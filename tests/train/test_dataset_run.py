"""Tests of runs whose samples come from the `dataset` function of the user's module.

The modules are in tests/support/datasets.py. Their augmentations use the global generators of random, numpy and torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.model.test_user_model import VIT_CONFIG, train_run
from tests.support.datasets import DATASET_MODULE, ITERABLE_MODULE, write_module
from tests.support.edits import replace_in_file
from tests.support.errors import raises_error
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, run_stage_on_rank
from tests.train.test_exact import interrupt_training, read_steps

STEPS = 24


def make_config(module: str) -> str:
    """Return the template of a config with a module, for `create_prepared_run`."""
    text = VIT_CONFIG.replace("examples.vit", module).replace("steps: 10", f"steps: {STEPS}")
    return text.replace('source: "{folder}/*.h5", held_out: 0.1', "workers: 2").replace("dropout: 0.0", "dropout: 0.1")


def create_run(folder: Path, name: str, module: str, *overrides: str, ranks: int = 1, text: str | None = None) -> Run:
    """Create a run of a module in `folder`, and run its data stages in another process, which imports the module."""
    path = folder / f"{name}.yaml"
    path.write_text((text or make_config(module)).format(name=name, folder=folder))
    with contextlib.chdir(folder):  # model.target is searched in the working directory
        run = Run.create(load_config(path, (*overrides, f"stages.train.tasks_per_node={ranks}")))
    prepare_data(run)
    return run


def prepare_data(run: Run) -> None:
    """Run the stages prepare and shard, and check that their outputs are complete."""
    for stage in ("prepare", "shard"):
        assert run_ranks(1, run_stage_on_rank, run.path, stage) == [ExitCode.DONE]
        assert load_stage_module(run, stage).describe_missing_outputs(run) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a map-style and an iterable dataset."""
    folder = tmp_path_factory.mktemp("datasets")
    write_module(folder, "map_style")
    write_module(folder, "stream", ITERABLE_MODULE)
    return folder


@pytest.mark.parametrize(
    ("module", "ranks"),
    [
        ("map_style", 2),
        *(pytest.param("map_style", ranks, marks=pytest.mark.story) for ranks in (1, 4)),
        *(pytest.param("stream", ranks, marks=pytest.mark.story) for ranks in (1, 2, 4)),
    ],
)
def test_stops_and_kills_do_not_change_the_result(folder: Path, module: str, ranks: int) -> None:
    undisturbed = create_run(folder, f"{module}-{ranks}", module, ranks=ranks)
    steps = train_run(undisturbed, ranks)
    assert len({loss for _, loss, *_ in steps}) == STEPS
    run = create_run(folder, f"{module}-{ranks}-disturbed", module, ranks=ranks)
    assert set(interrupt_training(run, ranks, signal.SIGTERM, 4, [0])) == {ExitCode.STOPPED}
    stopped_at = read_steps(run)[-1][0]
    assert 4 <= stopped_at < STEPS
    # The run saves a checkpoint every 7 steps, so the kill loses some steps.
    interrupt_training(run, ranks, signal.SIGKILL, stopped_at + 3, [ranks - 1])
    assert train_run(run, ranks) == steps
    assert compute_run_digest(run) == compute_run_digest(undisturbed)
    assert read_event_lines(run, "train", "restored")[0]["step"] == stopped_at


@pytest.mark.story
def test_another_layout_and_other_workers_read_the_same_samples(folder: Path) -> None:
    overrides = ("model.options.dropout=0.0", "optimizer.schedule=constant")
    run = create_run(folder, "two-ranks", "map_style", *overrides, ranks=2)
    expected = [loss for _, loss, *_ in train_run(run, 2)]
    run = create_run(folder, "one-rank", "map_style", *overrides, "data.workers=3", "train.steps=9")
    train_run(run, 1)
    run.apply_overrides([f"train.steps={STEPS}", "data.workers=1"])
    losses = [loss for _, loss, *_ in train_run(Run.open(run.path), 2)]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.story
def test_held_out_results_are_equal_on_one_and_two_ranks_and_during_training(folder: Path) -> None:
    run = create_run(folder, "evaluated", "map_style", f"train.evaluate_every={STEPS}", "evaluate.batch=5")
    train_run(run, 1)
    results: list[dict[str, Any]] = []
    for ranks in (1, 2):
        shutil.rmtree(run.evaluation_dir)
        run.evaluation_dir.mkdir()
        assert set(run_ranks(ranks, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}
        results.append(json.loads((run.evaluation_dir / f"{checkpoint_name(STEPS)}.json").read_text()))
    assert results[0] == results[1]
    assert results[0]["samples"] == 24
    assert [line.get("held_out_loss") for line in read_jsonl(run.metrics_file)][-1] == results[0]["loss"]


@pytest.mark.story
def test_an_iterable_dataset_needs_the_same_number_of_ranks(folder: Path) -> None:
    run = create_run(folder, "stream-moved", "stream", "train.steps=5", ranks=2)
    train_run(run, 2)
    run.apply_overrides(["train.steps=9"])
    for ranks, overrides in ((1, ()), (2, ("data.workers=1",))):
        run = Run.open(run.path)
        run.apply_overrides(overrides)
        with pytest.raises(AssertionError, match=r"UserError: checkpoint 5 .* 2 data-parallel ranks with 2 workers"):
            train_run(run, ranks)
    run = Run.open(run.path)
    run.apply_overrides(["data.workers=2"])
    assert len(train_run(run, 2)) == 9


def test_a_checkpoint_of_another_dataset_is_not_used(tmp_path: Path) -> None:
    module = write_module(tmp_path, "replaced")
    run = create_run(tmp_path, "replaced", "replaced", "train.steps=5")
    train_run(run, 1)
    run.apply_overrides(["train.steps=9"])
    copy = run.code_dir / module.name
    replace_in_file(copy, "default_rng(index)", "default_rng(index + 1)")
    with pytest.raises(AssertionError, match="UserError: dataset of replaced: the first or the last sample"):
        train_run(Run.open(run.path), 1)
    # The manifest belongs to another module now, so the prepare stage runs again. The checkpoint has other data.
    prepare = load_stage_module(run, "prepare")
    assert prepare.describe_missing_outputs(run) is not None
    prepare_data(run)
    with pytest.raises(AssertionError, match="CheckpointError: checkpoint 5 has another data_hash"):
        train_run(Run.open(run.path), 1)


FILES_MODULE = DATASET_MODULE.replace(
    "def dataset(options, split):",
    """\
def dataset(options, split):
    for path in options["source"]:
        assert open(path).read() == path.rsplit("/")[-1], path""",
)


def test_the_dataset_receives_the_paths_of_data_source(tmp_path: Path) -> None:
    write_module(tmp_path, "files", FILES_MODULE)
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    config = make_config("files").replace("workers: 2", 'workers: 2, source: "*.txt"')
    run = create_run(tmp_path, "files", "files", "train.steps=3", text=config)
    train_run(run, 1)
    manifest = json.loads((run.data_dir / "manifest.json").read_text())
    assert manifest["dataset"]["sources"] == [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    (tmp_path / "a.txt").write_text("changed")
    run.apply_overrides(["train.steps=4"])
    with pytest.raises(AssertionError, match=r"InputError: data\.source: .*a\.txt has 7 bytes, not 5"):
        train_run(Run.open(run.path), 1)
    with pytest.raises(AssertionError, match=r"UserError: data\.source: there is no file .*none\*\.txt"):
        create_run(tmp_path, "no-files", "files", text=config.replace("*.txt", "none*.txt"))


@pytest.mark.parametrize(
    ("source", "added_array", "overrides", "code", "expected_texts"),
    [
        (DATASET_MODULE, "", ("data.held_out=0.1",), "config.conflict", ["data.held_out (0.1)", "held_out"]),
        (DATASET_MODULE, "'lengths'", (), "model.invalid_module", ["lengths", "dataset"]),
        (DATASET_MODULE.replace("def dataset", "def data"), "", (), "config.conflict", ["data.source", "dataset"]),
        (
            DATASET_MODULE.replace("def dataset", "def data"),
            "",
            ("data.source=a.h5",),
            "config.conflict",
            ["data.workers (2)", "dataset"],
        ),
    ],
)
def test_a_config_that_does_not_fit_a_dataset_is_an_error(
    tmp_path: Path, source: str, added_array: str, overrides: tuple[str, ...], code: str, expected_texts: list[str]
) -> None:
    write_module(tmp_path, "conflict", source.replace('"labels")', f'"labels", {added_array})'))
    with raises_error(code, *expected_texts):
        create_run(tmp_path, "conflict", "conflict", *overrides)


def test_an_iterable_dataset_has_no_epochs(tmp_path: Path) -> None:
    write_module(tmp_path, "epochs", ITERABLE_MODULE)
    with pytest.raises(AssertionError, match=r"UserError: train\.epochs: the dataset of epochs is iterable"):
        create_run(tmp_path, "epochs", "epochs", "train.steps=null", "train.epochs=1")
