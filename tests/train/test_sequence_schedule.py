"""Tests of sequences that grow during a run: `train.sequence_schedule`, and `resume RUN data.sequence_length=…`."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.errors import CheckpointError, ConfigError, ExitCode, UserError
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.identity import check_identity, compute_identity
from pipeline.config.read import parse_config
from pipeline.config.sections import LengthConfig
from pipeline.data.manifest import count_training_steps, load_manifest
from pipeline.data.sample_order import compute_index_range, convert_count, find_order_shift, skip_excluded
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank
from tests.support.tiny_training import tiny_config
from tests.train.test_exact import interrupt_training, read_steps, run_stage_and_record_samples
from tests.train.test_mixture_run import prepare_mixture_run

SCHEDULE = [{"from_step": 0, "length": 16}, {"from_step": 6, "length": 32}, {"from_step": 11, "length": 80}]
"""Lengths of the sequences of a run of 16 steps. The checkpoints of steps 7 and 14 are within a phase."""
FIRST_LENGTH_STEPS = [(1, 16), (6, 32), (11, 80)]
"""The first step with each length."""


def make_growing_run(folder: Path, name: str, data: Path | None = None, *overrides: str) -> Run:
    """Create a run of 16 steps with `SCHEDULE` on existing data; None: prepare the data."""
    schedule = f"train.sequence_schedule={json.dumps(SCHEDULE)}"
    steps = ("train.steps=16", "train.evaluate_every=8")
    return make_run(folder, name, (*steps, "data.sequence_length=80", schedule, *overrides), data)


@pytest.fixture(scope="module")
def growing_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a run with `SCHEDULE` on two ranks and return it."""
    run = make_growing_run(tmp_path_factory.mktemp("growing"), "growing")
    assert run_ranks(2, run_stage_and_record_samples, run.path, "train") == [ExitCode.DONE] * 2
    return run


def read_batches(run: Run) -> dict[int, list[list[int]]]:
    """Return the samples of the global batch of each step, as lists of tokens."""
    lines = sorted(read_jsonl(run.path / "samples.jsonl"), key=lambda line: (line["step"], line["rank"]))
    batches: dict[int, list[list[int]]] = {}
    for line in lines:
        batches.setdefault(line["step"], []).extend(line["samples"])
    return batches


def read_all_samples(run: Run, length: int) -> list[list[int]]:
    """Return all training samples of `length` tokens, as lists of `length` + 1 tokens."""
    samples: list[list[int]] = []
    for shard in load_manifest(run.data_dir).train:
        tokens = np.fromfile(run.data_dir / shard.file, shard.dtype, shard.tokens, offset=shard.offset)
        samples += [tokens[i : i + length + 1].tolist() for i in range(0, len(tokens) - length, length)]
    return samples


def test_each_length_continues_at_the_same_place_in_the_tokens(growing_run: Run) -> None:
    batches = read_batches(growing_run)
    batch = growing_run.config.train.global_batch
    tokens = 0
    for (first_step, length), (end, _) in zip(FIRST_LENGTH_STEPS, [*FIRST_LENGTH_STEPS[1:], (17, 0)], strict=True):
        samples = read_all_samples(growing_run, length)
        first_sample = -(-tokens // length)
        count = (end - first_step) * batch
        indices = compute_index_range(growing_run.config.run.seed, first_sample, count, len(samples))
        read = [sample for step in range(first_step, end) for sample in batches[step]]
        assert read == [samples[i] for i in indices]
        tokens = (first_sample + count) * length


def test_metrics_count_the_tokens_of_each_length(growing_run: Run) -> None:
    batch = growing_run.config.train.global_batch
    lengths = [16] * 5 + [32] * 5 + [80] * 6
    counts = [line["tokens"] for line in read_jsonl(growing_run.metrics_file)]
    assert counts == [batch * sum(lengths[: i + 1]) for i in range(16)]
    progress = load_stage_module(growing_run, "train").progress(growing_run)
    assert f"{batch * sum(lengths):,} tokens" in progress.description


def test_losses_equal_those_of_one_process(growing_run: Run, tmp_path: Path) -> None:
    """Dropout is off, because its masks depend on the layout."""
    runs = []
    for world_size, overrides in ((1, ()), (4, ("parallel.pipeline=2", "stages.train.tasks_per_node=4"))):
        run = make_growing_run(tmp_path, f"r{world_size}", growing_run.data_dir, "model.dropout=0", *overrides)
        assert run_ranks(world_size, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * world_size
        runs.append(run)
    expected, parallel = ([[line["loss"], line["grad_norm"]] for line in read_jsonl(run.metrics_file)] for run in runs)
    assert np.array(parallel) == pytest.approx(np.array(expected), rel=1e-5)


@pytest.mark.parametrize("stop_step", [4, 9, 13])
def test_a_stop_does_not_change_the_result(growing_run: Run, tmp_path: Path, stop_step: int) -> None:
    check_stop(growing_run, make_growing_run(tmp_path, "stopped", growing_run.data_dir), stop_step)


@pytest.mark.story
def test_a_stop_does_not_change_the_result_of_compiled_code(growing_run: Run, tmp_path: Path) -> None:
    overrides = ("train.compile=true", "data.document_mask=true")
    run = make_growing_run(tmp_path, "undisturbed", growing_run.data_dir, *overrides)
    assert run_ranks(2, run_stage_on_rank, run.path, "train", timeout=300) == [ExitCode.DONE] * 2
    check_stop(run, make_growing_run(tmp_path, "stopped", growing_run.data_dir, *overrides), 8)


def check_stop(undisturbed_run: Run, run: Run, stop_step: int) -> None:
    """Train `run` on two ranks, with a stop after `stop_step` or later, and compare the results."""
    interrupt_training(run, 2, signal.SIGTERM, stop_step, [1])
    assert len(read_steps(run)) < 16
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert compute_run_digest(run) == compute_run_digest(undisturbed_run)
    assert read_steps(run) == read_steps(undisturbed_run)


def test_a_new_length_at_a_checkpoint_equals_a_schedule(growing_run: Run, tmp_path: Path) -> None:
    """Two runs with `data.sequence_length` 16 grow at their newest checkpoints, of steps 5 and 10."""
    run = make_run(
        tmp_path,
        "resumed",
        ("train.steps=5", "data.sequence_length=16", "checkpoint.every_steps=5", "optimizer.schedule=constant"),
        growing_run.data_dir,
    )
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    run.apply_overrides(["data.sequence_length=32", "train.steps=10"])
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    run = Run.open(run.path)
    run.apply_overrides(["data.sequence_length=80", "train.steps=16"])
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    recorded = Run.open(run.path).config
    assert [(phase.from_step, phase.length) for phase in recorded.length_phases] == FIRST_LENGTH_STEPS
    assert recorded.data.sequence_length == 80
    scheduled = make_growing_run(tmp_path, "scheduled", growing_run.data_dir, "optimizer.schedule=constant")
    assert run_ranks(2, run_stage_on_rank, scheduled.path, "train") == [ExitCode.DONE] * 2
    assert read_steps(run) == read_steps(scheduled)
    assert compute_run_digest(run) == compute_run_digest(scheduled)


def test_only_lengths_of_later_steps_may_change(growing_run: Run, tmp_path: Path) -> None:
    run_path = tmp_path / "growing"
    shutil.copytree(growing_run.path, run_path, symlinks=True)
    for step in (14, 16):  # The run continues from the checkpoint of step 7.
        shutil.rmtree(run_path / f"checkpoints/step-{step:08}")
    changed_past = [SCHEDULE[0], {"from_step": 7, "length": 32}, SCHEDULE[2]]
    with pytest.raises(UserError, match=r"train\.sequence_schedule.*step-00000007"):
        Run.open(run_path).apply_overrides([f"train.sequence_schedule={json.dumps(changed_past)}"])
    changed_future = [*SCHEDULE[:2], {"from_step": 12, "length": 96}]
    Run.open(run_path).apply_overrides([f"train.sequence_schedule={json.dumps(changed_future)}"])
    run = Run.open(run_path)
    assert run.config.data.sequence_length == 96
    assert run_ranks(2, run_stage_on_rank, run_path, "train") == [ExitCode.DONE] * 2
    equal = [old == new for old, new in zip(read_steps(growing_run), read_steps(run), strict=True)]
    assert all(equal[:10]) and not any(equal[10:])
    assert len(read_batches(growing_run)[11][0]) == 81


def test_each_source_of_a_mixture_continues_at_the_same_place_in_its_tokens(tmp_path: Path) -> None:
    """Of 16 steps, 8 and more have other weights, and 5 and more have longer samples."""
    run = prepare_mixture_run(tmp_path, "mixed")
    schedule = [{"from_step": 0, "length": 16}, {"from_step": 5, "length": 32}]
    run.apply_overrides([f"train.sequence_schedule={json.dumps(schedule)}"])
    assert run_ranks(2, run_stage_and_record_samples, run.path, "train") == [ExitCode.DONE] * 2
    manifest = load_manifest(run.data_dir)
    owners: dict[tuple[int, ...], str] = {}
    first_shard = 0
    for part in manifest.parts:
        for shard in manifest.train[first_shard : first_shard + part.train]:
            tokens = np.fromfile(run.data_dir / shard.file, shard.dtype, shard.tokens, offset=shard.offset)
            for length in (16, 32):
                for i in range(0, len(tokens) - length, length):
                    owners[tuple(tokens[i : i + length + 1].tolist())] = part.name
        first_shard += part.train
    batches = read_batches(run)
    counts = {step: [owners[tuple(sample)] for sample in batches[step]].count("code") for step in batches}
    assert [counts[step] for step in range(1, 17)] == [2] * 8 + [4] * 8
    read = [tuple(sample) for step in range(5, 17) for sample in batches[step]]
    assert len(set(read)) == len(read), "no sample is read twice within an epoch"
    losses = read_steps(run)
    for step in (14, 16):
        shutil.rmtree(run.checkpoints_dir / f"step-{step:08}")
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert read_steps(run) == losses


def test_the_identity_of_a_run_with_default_keys_does_not_change_if_its_sequences_grow() -> None:
    values: dict[str, Any] = {"run": {"name": "x"}, "train": {"steps": 9}}
    manifest: Any = SimpleNamespace(train=[])
    identity = compute_identity(parse_config(values, "x.yaml"), manifest)
    values["train"]["sequence_schedule"] = [{"from_step": 0, "length": 1024}, {"from_step": 6, "length": 2048}]
    grown_identity = compute_identity(parse_config(values, "x.yaml"), manifest)
    assert grown_identity["config_hash"] == identity["config_hash"]
    check_identity({**identity, "step": 5}, grown_identity)
    with pytest.raises(CheckpointError, match="sequence_schedule"):
        check_identity({**identity, "step": 6}, grown_identity)


@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs_count_tokens(growing_run: Run, tmp_path: Path, epochs: int) -> None:
    run = make_growing_run(tmp_path, "epochs", growing_run.data_dir, "train.steps=null", f"train.epochs={epochs}")
    steps = count_training_steps(run.config, run.data_dir)
    samples = load_manifest(run.data_dir).count_training_samples(80)
    batch = run.config.train.global_batch
    assert steps is not None
    # Each change of the length skips less than one sample.
    assert steps == pytest.approx(10 + (epochs * samples - batch * 5 * (16 + 32) / 80) / batch, abs=1.5)


# -- the order -------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5)), min_size=1, max_size=5),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 40)), max_size=3),
)
def test_the_order_never_goes_back_in_the_tokens(
    phases: list[tuple[int, int]], batch: int, excluded: list[tuple[int, int]]
) -> None:
    """The first sample of each length begins at the end of the samples before, or less than one sample later."""
    lengths = [LengthConfig(from_step=1, length=phases[0][1])]
    for steps, growth in phases[1:]:
        previous = lengths[-1]
        lengths.append(LengthConfig(from_step=previous.from_step + steps, length=previous.length + growth))
    excluded_ranges, end = [], 0
    for start, count in sorted(excluded):
        excluded_ranges.append((end + start, count))
        end += start + count
    for i in range(1, len(lengths)):
        start = skip_excluded((lengths[i].from_step - 1) * batch, excluded_ranges)
        end_of_previous = (start + find_order_shift(lengths[:i], batch, excluded_ranges)) * lengths[i - 1].length
        first_token = (start + find_order_shift(lengths[: i + 1], batch, excluded_ranges)) * lengths[i].length
        assert 0 <= first_token - end_of_previous < lengths[i].length


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_converted_count_is_the_smallest_with_all_tokens(count: int, length: int, new_length: int) -> None:
    converted = convert_count(count, length, new_length)
    assert (converted - 1) * new_length < count * length <= converted * new_length
    assert convert_count(np.array([count]), length, new_length).tolist() == [converted]


# -- invalid configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"sequence_schedule": []}}, "sequence_schedule"),
        ({"train": {"sequence_schedule": [{"from_step": 2, "length": 8}]}}, "from_step"),
        ({"train": {"sequence_schedule": [SCHEDULE[0], {"from_step": 1, "length": 32}]}}, "increase"),
        ({"train": {"sequence_schedule": [SCHEDULE[0], {"from_step": 5, "length": 16}]}}, "larger"),
        ({"train": {"sequence_schedule": SCHEDULE}, "data": {"sequence_length": 64}}, r"64.*80"),
        ({"train": {"sequence_schedule": SCHEDULE}, "data": {"records": "prompts"}}, "packed"),
        ({"train": {"sequence_schedule": SCHEDULE}, "data": {"packing": "best_fit"}}, "packed"),
        ({"train": {"sequence_schedule": SCHEDULE}, "model": {"target": "my.Model"}}, "decoder"),
    ],
)
def test_an_invalid_schedule_is_an_error(sections: dict[str, dict[str, Any]], message: str) -> None:
    config: dict[str, Any] = {"run": {"name": "x"}, "data": {"source": "x.jsonl"}, "train": {"steps": 20}}
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    with pytest.raises(ConfigError, match=message):
        parse_config(config, "x.yaml")


def test_the_last_length_becomes_the_sequence_length() -> None:
    config = parse_config({"run": {"name": "x"}, "train": {"steps": 9, "sequence_schedule": SCHEDULE}}, "x.yaml")
    assert config.data.sequence_length == 80


def test_each_length_must_fit_the_layout() -> None:
    from pipeline.parallel.mesh import resolve_layout

    schedule = [{"from_step": 0, "length": 20}, {"from_step": 5, "length": 32}]
    sections: dict[str, dict[str, Any]] = {"data": {"sequence_length": 32}, "train": {"sequence_schedule": schedule}}
    resolve_layout(tiny_config(2, parallel={"context": 2}, **sections), 2, 2, 64)
    with pytest.raises(UserError, match=r"sequence_schedule\[0\]\.length, 20"):
        resolve_layout(tiny_config(4, parallel={"context": 4}, **sections), 4, 4, 64)
