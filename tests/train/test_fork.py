"""Tests of forks: the state, the order of the samples, and the independence of the original."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli.fork import check_fork, create_fork, plan_fork
from cli.main import app
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import CheckpointError, ExitCode
from pipeline.base.files import add_checksum, read_json, read_jsonl, write_json
from pipeline.base.signals import StopFlag
from pipeline.checkpoint import catalog
from pipeline.config.datasets import MixtureConfig
from pipeline.config.sections import LengthConfig
from pipeline.data.manifest import load_manifest
from pipeline.data.sample_order import Mixture, compute_index_range, find_order_shift
from pipeline.run.code import CODE_ROOT as ROOT
from pipeline.run.directory import Run
from pipeline.run.origin import OrderStart, read_origin
from pipeline.run.stages import load_stage_module
from tests.model.test_user_model import VIT_CONFIG, create_prepared_run, image_folder
from tests.publish.test_open_weights import make_run_from_model, save_model_with_tokenizer
from tests.support.errors import raises_error
from tests.support.ranks import Ranks, make_rank_info, run_ranks
from tests.support.tiny import (
    PassiveStopFlag,
    compute_run_digest,
    make_run,
    run_stage_on_rank,
    write_corpus,
)

__all__ = ["image_folder"]  # a fixture

STEPS = 12
SAVES = ("checkpoint.every_steps=4", "checkpoint.keep=9")
LAYOUTS = {1: (), 2: ("parallel.zero=1",)}
"""Number of ranks → the layout."""


def make_fork(run: Run, name: str, step: int, *overrides: str) -> Run:
    """Create a fork with the code of this process, as the command `fork` does, and prepare its data if necessary."""
    planned = plan_fork(run, name, str(step), overrides, update_code=False)
    check_fork(planned, on_slurm=False)
    fork = create_fork(planned)
    for stage in ("prepare", "shard"):
        module = load_stage_module(fork, stage)
        if module.describe_missing_outputs(fork) is not None:
            module.run_stage(fork, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    return fork


def train(run: Run, ranks: int = 1) -> Run:
    """Run the train stage until it is done, and return the run."""
    assert set(run_ranks(ranks, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    return run


def read_steps(run: Run, after: int = 0) -> list[tuple[float, ...]]:
    """Return step, loss, gradient norm, learning rate and consumed samples of the steps after `after`."""
    keys = ("step", "loss", "grad_norm", "lr", "samples_consumed")
    return [tuple(line[key] for key in keys) for line in read_jsonl(run.metrics_file) if line["step"] > after]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[int, Run]:
    """Train undisturbed runs with dropout, by number of ranks."""
    folder = tmp_path_factory.mktemp("originals")
    return {
        ranks: train(create_run(folder, f"ranks{ranks}", data, f"train.steps={STEPS}", *layout), ranks)
        for ranks, layout in LAYOUTS.items()
    }


def create_run(folder: Path, name: str, data: Path, *overrides: str) -> Run:
    """Create a run on the existing data in `data`, which has the input file from which the data was prepared."""
    source = f"data.source={data.parents[2] / 'corpus.jsonl'}"
    return make_run(folder, name, (*SAVES, source, *overrides), data)


# -- state ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_an_unchanged_fork_equals_its_original(originals: dict[int, Run], ranks: int) -> None:
    original = originals[ranks]
    fork = make_fork(original, f"same{ranks}", 4)
    assert read_steps(fork) == []
    train(fork, ranks)
    assert compute_run_digest(fork) == compute_run_digest(original)
    assert read_steps(fork) == read_steps(original, after=4)
    second = train(make_fork(fork, f"same-again{ranks}", 8), ranks)
    assert compute_run_digest(second) == compute_run_digest(original)
    assert read_steps(second) == read_steps(original, after=8)
    # The checkpoint of the origin can also be forked again, and the layout may change.
    third = make_fork(fork, f"same-origin{ranks}", 4, "parallel.zero=0", "train.steps=5")
    assert len(read_steps(train(third, 3 - ranks))) == 1


def test_a_changed_fork_equals_a_run_whose_state_is_loaded_by_hand(
    originals: dict[int, Run], data: Path, tmp_path: Path
) -> None:
    """The reference run has the config of the fork. The checkpoint is copied, and gets the identity of this run."""
    changes = (
        "optimizer.lr=3e-3", "optimizer.schedule=wsd", "optimizer.decay_fraction=0.4", "train.steps=10",
        "optimizer.weight_decay=0.3", "train.micro_batch=2", "optimizer.betas=[0.8, 0.9]",
    )  # fmt: skip
    reference = create_run(tmp_path, "reference", data, *changes)
    [identity] = run_ranks(1, compute_identity_on_rank, reference.path)
    name = catalog.checkpoint_name(8)
    shutil.copytree(originals[1].checkpoints_dir / name, reference.checkpoints_dir / name)
    manifest = reference.checkpoints_dir / name / catalog.MANIFEST_FILE
    write_json(manifest, add_checksum({**read_json(manifest), **identity}))
    train(reference)
    fork = train(make_fork(originals[1], "changed", 8, *changes))
    assert read_steps(fork) == read_steps(reference)
    assert compute_run_digest(fork) == compute_run_digest(reference)
    assert read_steps(fork) != read_steps(originals[1], after=8)[:2]


def compute_identity_on_rank(_: RankInfo, path: Path) -> dict[str, Any]:
    """Return the identity of a run."""
    from pipeline.checkpoint.identity import compute_identity

    run = Run.open(path)
    return compute_identity(run.config, load_manifest(run.data_dir))


def test_only_the_recorded_checkpoint_may_have_another_config(originals: dict[int, Run]) -> None:
    original = originals[1]
    fork = make_fork(original, "strict", 4, "optimizer.lr=1e-3")
    name = catalog.checkpoint_name(8)
    shutil.copytree(original.checkpoints_dir / name, fork.checkpoints_dir / name)
    with pytest.raises(AssertionError, match=r"checkpoint 8 has another config_hash"):
        run_ranks(1, run_stage_on_rank, fork.path, "train")
    shutil.rmtree(fork.checkpoints_dir / name)
    train(fork)
    # The fork's own checkpoints follow the usual rules.
    text = fork.config_file.read_text()
    fork.config_file.write_text(text.replace("lr: 0.001", "lr: 0.002"))
    with pytest.raises(AssertionError, match=r"checkpoint 12 has another config_hash"):
        run_ranks(1, run_stage_on_rank, fork.path, "evaluate")


@pytest.mark.parametrize("adapter", ["null", "{rank: 2}"])
def test_a_fork_of_a_run_from_open_weights_equals_its_original(tmp_path: Path, adapter: str) -> None:
    """The checkpoint of an adapter does not contain the open weights. Without an adapter, they are not needed again."""
    source = tmp_path / "model"
    save_model_with_tokenizer(source)
    overrides = (f"adapter={adapter}", "checkpoint.every_steps=2", "checkpoint.keep=9")
    original = train(make_run_from_model(tmp_path, "original", source, 6, *overrides))
    if adapter == "null":
        shutil.rmtree(source)
    fork = train(make_fork(original, "fork", 2))
    assert compute_run_digest(fork) == compute_run_digest(original)
    assert read_steps(fork) == read_steps(original, after=2)
    assert run_ranks(1, run_stage_on_rank, fork.path, "evaluate") == [ExitCode.DONE]
    # The base weights must be those of the original.
    source_file = fork.path / "source.json"
    values = read_json(source_file)
    write_json(source_file, add_checksum({**values, "files": dict.fromkeys(values["files"], "other")}))
    for step in (4, 6):
        catalog.remove_checkpoint(fork.checkpoints_dir, step)
    with pytest.raises(AssertionError, match=r"has another source_hash than this fork"):
        run_ranks(1, run_stage_on_rank, fork.path, "train")


def test_a_fork_of_a_custom_model_uses_the_code_of_its_original(tmp_path: Path, image_folder: Path) -> None:
    """The module is not in the working directory of the fork. Its current source would not even compile."""
    overrides = ("train.steps=6", "checkpoint.every_steps=2", "checkpoint.keep=9")
    module = image_folder / "my_vit.py"
    shutil.copy(ROOT / "examples/vit.py", module)
    text = VIT_CONFIG.replace("examples.vit", "my_vit")
    original = train(create_prepared_run(image_folder, "fork-original", *overrides, text=text))
    source = module.read_text()
    module.write_text("syntax error")
    try:
        fork = train(make_fork(original, "custom", 2))
        assert compute_run_digest(fork) == compute_run_digest(original)
        assert read_steps(fork) == read_steps(original, after=2)
        with raises_error("fork.unchangeable_key", "model.options"):
            plan_fork(original, "other", "2", ["model.options.width=8"], update_code=False)
        result = CliRunner().invoke(app, ["fork", str(original.path), "--name", "x", "--step", "2", "--dry-run"])
        assert result.exit_code == 0, result.output
    finally:
        module.write_text(source)


# -- independence of the original ------------------------------------------------------------------------------


def test_each_run_survives_the_removal_of_the_other(tmp_path: Path) -> None:
    original = train(make_run(tmp_path, "original", ("train.steps=8", *SAVES)))
    fork = make_fork(original, "fork", 4)
    name = catalog.checkpoint_name(4)
    file = fork.checkpoints_dir / name / catalog.METADATA_FILE
    assert file.stat().st_nlink == 2
    # The original removes the checkpoint, as its retention does.
    catalog.remove_checkpoint(original.checkpoints_dir, 4)
    catalog.verify_checkpoint_files(fork.checkpoints_dir / name, catalog.read_checkpoint_manifest(file.parent))
    second = make_fork(fork, "second", 4)
    catalog.remove_checkpoint(fork.checkpoints_dir, 4)
    digest = compute_run_digest(original)
    shutil.rmtree(original.path)
    shutil.rmtree(fork.path)
    assert load_stage_module(second, "shard").describe_missing_outputs(second) is None
    assert compute_run_digest(train(second)) == digest


def test_a_running_run_can_be_forked(tmp_path: Path, originals: dict[int, Run], data: Path) -> None:
    run = create_run(tmp_path, "running", data, f"train.steps={STEPS}", "checkpoint.mode=sync")
    ranks = Ranks(1, train_slowly_on_rank, run.path)
    deadline = time.monotonic() + 120
    while not catalog.list_checkpoint_steps(run.checkpoints_dir) and time.monotonic() < deadline:
        time.sleep(0.02)
    fork = make_fork(run, "fork", 4)
    assert run.lock_holder("train") is None  # the ranks of this test take no lock
    assert ranks.wait_for_results() == [ExitCode.DONE]
    assert compute_run_digest(run) == compute_run_digest(train(fork)) == compute_run_digest(originals[1])


def train_slowly_on_rank(rank_info: RankInfo, path: Path) -> int:
    """Run the train stage. Each step takes a tenth of a second longer."""
    from pipeline.train.trainer import Trainer

    step = Trainer.step

    def slow_step(self: Any, *arguments: Any) -> Any:
        time.sleep(0.1)
        return step(self, *arguments)

    Trainer.step = slow_step  # type: ignore[assignment, method-assign]
    return run_stage_on_rank(rank_info, path, "train")


def test_a_damaged_checkpoint_is_not_forked(tmp_path: Path, data: Path) -> None:
    original = train(create_run(tmp_path, "original", data, "train.steps=4"))
    checkpoint = original.checkpoints_dir / catalog.checkpoint_name(4)
    file = next(checkpoint.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    planned = plan_fork(original, "fork", "4", ["train.steps=8"], update_code=False)
    with raises_error("checkpoint.damaged_file", "__0_0.distcp", kind=CheckpointError):
        create_fork(planned)
    assert [path.name for path in original.path.parent.iterdir()] == ["original"]


def test_a_fork_without_its_checkpoint_does_not_start_from_scratch(originals: dict[int, Run]) -> None:
    fork = make_fork(originals[1], "lost", 4)
    shutil.rmtree(fork.checkpoints_dir / catalog.checkpoint_name(4))
    problem = load_stage_module(fork, "train").describe_missing_outputs(fork)
    assert problem is not None and "step 4" in problem and str(originals[1].path) in problem
    with pytest.raises(AssertionError, match=r"has no intact checkpoint"):
        run_ranks(1, run_stage_on_rank, fork.path, "train")
    (fork.path / "origin.json").write_text("{}")
    with raises_error("checkpoint.damaged_origin", fork.path / "origin.json", kind=CheckpointError):
        read_origin(fork)


# -- the order of the samples ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    step=st.integers(0, 30),
    excluded=st.integers(0, 20),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True).map(sorted),
    weights=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any), min_size=1, max_size=3),
    gaps=st.lists(st.integers(1, 9), min_size=3, max_size=3),
)
def test_an_order_that_begins_later_equals_an_order_that_begins_at_the_first_step(
    step: int, excluded: int, lengths: list[int], weights: list[list[int]], gaps: list[int]
) -> None:
    """Shift an order by `step` steps and `excluded` samples, which belong to the steps before."""
    batch = 4
    position = batch * step + excluded
    ranges = [(0, excluded)] if excluded and step else []
    position = batch * step + (excluded if ranges else 0)
    first_steps = np.cumsum([1, *gaps])

    def make_lengths(offset: int) -> list[LengthConfig]:
        """Return the lengths with their first steps shifted by `offset`."""
        return [
            LengthConfig(from_step=int(first) + (offset if index else 0), length=length)
            for index, (first, length) in enumerate(zip(first_steps, lengths, strict=False))
        ]

    def make_mixture(offset: int, ranges: Sequence[tuple[int, int]], start: OrderStart) -> Mixture:
        """Return a mixture with its first steps shifted by `offset`."""
        entries = [
            {
                "from_step": int(first) + (offset if index else 0),
                "weights": dict(zip("ab", map(float, values), strict=True)),
            }
            for index, (first, values) in enumerate(zip(first_steps, weights, strict=False))
        ]
        config = MixtureConfig.model_validate(
            {"sources": {"a": {"source": "a"}, "b": {"source": "b"}}, "weights": entries}
        )
        return Mixture(7, {"a": 13, "b": 9}, config, batch, ranges, make_lengths(offset), start)

    start = OrderStart(step, position)
    shift = find_order_shift(make_lengths(step), batch, ranges, start)
    assert shift == find_order_shift(make_lengths(0), batch, []) - position
    samples = np.arange(200, dtype=np.int64)
    shifted, fresh = make_mixture(step, ranges, start), make_mixture(0, [], OrderStart())
    assert np.array_equal(shifted.compute_indices(samples + position), fresh.compute_indices(samples))
    assert shifted.count_epochs(position) == {"a": 0.0, "b": 0.0}


def read_batches_on_rank(rank_info: RankInfo, path: Path, count: int) -> list[Any]:
    """Restore the newest checkpoint of a run, and return the tokens of its next global batches."""
    from pipeline.comm import groups
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.train.trainer import Trainer

    run = Run.open(path)
    world = groups.join_process_group(rank_info, run.config)
    trainer = Trainer(run, load_run_manifest(run), rank_info, world, StopFlag())
    lengths = run.config.length_phases_until(trainer.start_step + 1)
    trainer._set_sequence_length(lengths[-1].length)
    with trainer._open_batches(lengths) as loader:
        return [batch["tokens"].numpy().copy() for _, batch in zip(range(count), loader, strict=False)]


def read_samples(data_dir: Path, length: int, indices: Any, source: str | None = None) -> Any:
    """Return training samples of `length` tokens, read without the loader. `source`: a source of a mixture."""
    from pipeline.data.samples import TokenDataset

    folder = data_dir if source is None else data_dir / source
    dataset = TokenDataset(load_manifest(folder).train, length, folder)
    return dataset.read(np.asarray(indices))["tokens"].astype(np.int64)


def count_samples(data_dir: Path, length: int) -> int:
    """Return the number of training samples of `length` tokens in a data folder."""
    return load_manifest(data_dir).count_training_samples(length)


def test_other_data_begins_at_its_beginning_and_keeps_the_tokenizer(originals: dict[int, Run], tmp_path: Path) -> None:
    original = originals[1]
    corpus = tmp_path / "other.jsonl"
    corpus.write_text(write_corpus(tmp_path, documents=90).read_text().replace("model", "teacher"))
    fork = make_fork(original, "other-data", 8, f"data.source={corpus}", "train.steps=20", "data.shard_tokens=3000")
    old_tokenizer, new_tokenizer = (run.data_dir / "tokenizer.json" for run in (original, fork))
    assert old_tokenizer.read_bytes() == new_tokenizer.read_bytes()
    size = count_samples(fork.data_dir, 32)
    batches = run_ranks(1, read_batches_on_rank, fork.path, 3)[0]
    expected = read_samples(fork.data_dir, 32, compute_index_range(3, 0, 24, size))
    assert np.array_equal(np.concatenate(batches), expected)
    train(fork)
    # A fork of this fork continues its order.
    second = make_fork(fork, "other-data-2", 16)
    batches = run_ranks(1, read_batches_on_rank, second.path, 1)[0]
    assert np.array_equal(batches[0], read_samples(fork.data_dir, 32, compute_index_range(3, 64, 8, size)))
    assert load_manifest(original.data_dir).train_tokens != load_manifest(fork.data_dir).train_tokens


def test_another_seed_begins_a_new_order(originals: dict[int, Run]) -> None:
    fork = make_fork(originals[1], "seed", 8, "run.seed=9")
    size = count_samples(fork.data_dir, 32)
    batches = run_ranks(1, read_batches_on_rank, fork.path, 1)[0]
    assert np.array_equal(batches[0], read_samples(fork.data_dir, 32, compute_index_range(9, 0, 8, size)))


def test_longer_sequences_continue_at_the_same_place(originals: dict[int, Run]) -> None:
    """After 8 steps of 8 samples of 32 tokens, sample number 32 of 64 tokens is next."""
    fork = make_fork(originals[1], "longer", 8, "data.sequence_length=64")
    assert [phase.from_step for phase in fork.config.length_phases] == [1, 9]
    size = count_samples(fork.data_dir, 64)
    batches = run_ranks(1, read_batches_on_rank, fork.path, 1)[0]
    assert np.array_equal(batches[0], read_samples(fork.data_dir, 64, compute_index_range(3, 32, 8, size)))


def test_changed_input_files_are_not_used_silently(tmp_path: Path) -> None:
    """The shards of the original are gone, and the input file has changed since."""
    original = train(make_run(tmp_path, "original", ("train.steps=4", *SAVES)))
    manifest = original.data_dir / "manifest.json"
    planned = plan_fork(original, "fork", "4", ["train.steps=8"], update_code=False)
    fork = create_fork(planned)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("model", "tutor"))
    shutil.rmtree(fork.data_dir)
    assert manifest.exists()
    for stage in ("prepare", "shard"):
        load_stage_module(fork, stage).run_stage(fork, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    with pytest.raises(AssertionError, match=r"has another data, tokenizer than this fork"):
        run_ranks(1, run_stage_on_rank, fork.path, "train")


# -- mixtures ------------------------------------------------------------------------------------------------


def make_mixture_run(folder: Path, data: Path) -> Run:
    """Create a run on a mixture of the sources `web` and `code`."""
    tokenizer = folder / "tokenizer.json"
    shutil.copy(data / "tokenizer.json", tokenizer)
    lines = write_corpus(folder).read_text().splitlines(keepends=True)
    for name, part in (("web", lines[:150]), ("code", lines[150:220]), ("math", lines[220:])):
        (folder / f"{name}.jsonl").write_text("".join(part))
    mixture = {
        "sources": {name: {"source": str(folder / f"{name}.jsonl")} for name in ("web", "code")},
        "weights": [{"from_step": 1, "weights": {"web": 3, "code": 1}}],
    }
    overrides = ("train.steps=8", "data.source=python-stdlib", f"data.mixture={json.dumps(mixture)}", *SAVES)
    tokenizer_value = json.dumps({"kind": "file", "path": str(tokenizer), "vocab_size": 4096, "train_bytes": 20000000})
    return make_run(folder, "mixture", (*overrides, f"data.tokenizer={tokenizer_value}"))


def test_a_source_that_is_added_begins_at_its_beginning(tmp_path: Path, data: Path) -> None:
    original = train(make_mixture_run(tmp_path, data))
    weights = [{"weights": {"web": 1, "code": 1, "math": 2}}]
    fork = make_fork(
        original,
        "more",
        4,
        f"data.mixture.sources.math={json.dumps({'source': str(tmp_path / 'math.jsonl')})}",
        f"data.mixture.weights={json.dumps(weights)}",
    )
    mixture = fork.config.data.mixture
    assert mixture is not None
    assert [(entry.from_step, entry.weights) for entry in mixture.weights] == [
        (1, {"web": 3, "code": 1, "math": 0}), (5, {"web": 1, "code": 1, "math": 2}),
    ]  # fmt: skip
    shared = [name for name in ("web", "code", "math") if (original.data_dir / name).exists()]
    assert shared == ["web", "code"]
    for name in shared:  # these sources were not prepared again
        assert (fork.data_dir / name / "units.json").stat().st_nlink == 2
    batches = run_ranks(1, read_batches_on_rank, fork.path, 1)[0]
    # In 4 steps, 24 samples of web and 8 of code were read. The next 8 samples are 2 of web, 2 of code and 4 of math.
    seeds = {"web": 24, "code": 8, "math": 0}
    counts = {"web": 2, "code": 2, "math": 4}
    expected = [
        sample.tobytes()
        for name, start in seeds.items()
        for sample in read_samples(
            fork.data_dir,
            32,
            compute_index_range(source_seed(3, name), start, counts[name], count_samples(fork.data_dir / name, 32)),
            name,
        )
    ]
    assert sorted(sample.tobytes() for sample in batches[0]) == sorted(expected)
    train(fork)
    with raises_error("fork.unchangeable_key", "data.mixture.sources.web"):
        plan_fork(original, "x", "4", [f"data.mixture.sources.web.source={tmp_path}/math.jsonl"], update_code=False)


def source_seed(seed: int, name: str) -> int:
    """Return the seed of the order of a source, as the class `Mixture` documents it."""
    import hashlib

    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])


def test_a_mixture_may_replace_a_single_source(originals: dict[int, Run], tmp_path: Path) -> None:
    lines = write_corpus(tmp_path).read_text().splitlines(keepends=True)
    (tmp_path / "web.jsonl").write_text("".join(lines[:200]))
    (tmp_path / "math.jsonl").write_text("".join(lines[200:]))
    mixture = {
        "sources": {name: {"source": str(tmp_path / f"{name}.jsonl")} for name in ("web", "math")},
        "weights": [{"from_step": 1, "weights": {"web": 1, "math": 1}}],
    }
    fork = make_fork(originals[1], "to-mixture", 8, "data.source=python-stdlib", f"data.mixture={json.dumps(mixture)}")
    origin = read_origin(fork)
    assert origin is not None and origin.order_start == OrderStart(8, 64) and origin.source_hashes == {}
    batches = run_ranks(1, read_batches_on_rank, fork.path, 1)[0]
    expected = [
        sample.tobytes()
        for name in ("web", "math")
        for sample in read_samples(
            fork.data_dir,
            32,
            compute_index_range(source_seed(3, name), 0, 4, count_samples(fork.data_dir / name, 32)),
            name,
        )
    ]
    assert sorted(sample.tobytes() for sample in batches[0]) == sorted(expected)
    train(fork)
