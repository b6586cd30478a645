"""Tests of the command `fork`: keys that cannot change, output, dry runs, and what is created."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.fork import create_fork, plan_fork
from cli.main import app
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import read_json, read_jsonl
from pipeline.checkpoint import catalog
from pipeline.config.read import load_config
from pipeline.config.sections import format_key_patterns, has_policy, walk_fields
from pipeline.config.types import Policy
from pipeline.run.directory import Run, create_points
from pipeline.run.events import Created
from pipeline.run.origin import read_origin
from pipeline.run.stages import load_stage_module
from tests.architecture.imports import ROOT
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank, write_config


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a run with checkpoints of the steps 2, 4 and 6."""
    overrides = ("train.steps=6", "checkpoint.every_steps=2", "checkpoint.keep=9")
    run = make_run(tmp_path_factory.mktemp("original"), "a", overrides)
    assert run_ranks(1, run_stage_on_rank, run.path, "train") == [ExitCode.DONE]
    return run


def run_fork(run: Run, *arguments: str) -> Result:
    """Run the command `fork`, without starting the new run."""
    return CliRunner().invoke(app, ["fork", str(run.path), *arguments])


def list_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return modification time (ns) and size (bytes) of all files in a folder, by path."""
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["model.dim=64"], ["model.dim"]),
        (["model.vocab_size=400"], ["model.vocab_size"]),
        (["model.tie_word_embeddings=true"], ["model.tie_word_embeddings"]),
        (["optimizer.name=sgd"], ["optimizer.name"]),
        (["optimizer.state.moments=bf16"], ["optimizer.state.moments"]),
        (["train.global_batch=16"], ["train.global_batch"]),
        (["train.steps=3"], ["train.steps"]),
        (["train.steps=4", "model.layers=1"], ["train.steps", "model.layers"]),
        (["data.sequence_length=16"], ["data.sequence_length"]),
        (["train.sequence_schedule=[{from_step: 1, length: 16}, {from_step: 9, length: 32}]"], ["train.sequence"]),
        (["data.held_out=0.3"], ["data.held_out"]),
        (["data.tokenizer.vocab_size=400"], ["data.tokenizer"]),
        (["data.tokenizer={eos_token: <eos>}"], ["data.tokenizer"]),
        (["run.seed=8", "train.steps=null", "train.epochs=3"], ["train.epochs"]),
        (["sweep={grid: {optimizer.lr: [1.0e-3, 2.0e-3]}}"], ["sweep"]),
        (["train.ema.decay=0.9"], ["train.ema"]),
    ],
)
def test_keys_that_would_be_silently_wrong_are_refused(original: Run, overrides: list[str], keys: list[str]) -> None:
    files = list_files(original.path.parent)
    with raises_error("fork.unchangeable_key", *keys):
        plan_fork(original, "b", "4", overrides, update_code=False)
    assert list_files(original.path.parent) == files


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.lr=1e-4", "optimizer.schedule=wsd", "optimizer.decay_fraction=1.0", "optimizer.clip_norm=null"],
        ["train.steps=9", "train.micro_batch=2", "train.precision=bf16", "train.evaluate_every=2"],
        ["data.document_mask=true", "data.verify=sizes", "data.held_out=0.05"],
        ["model.dropout=0.3", "model.rope_theta=50000.0", "run.seed=5"],
        ["parallel.zero=2", "stages.train.tasks_per_node=4", "site.partition=low", "publish={to: /tmp/models}"],
        ["checkpoint.keep={last: 1, every_steps: 4}", "evaluate.batch=2", "optimizer.freeze=['*.q_proj.*']"],
        ["train.steps=null", "train.epochs=2", "data.sequence_length=48"],
    ],
)
def test_other_keys_may_change(original: Run, overrides: list[str]) -> None:
    planned = plan_fork(original, "b", "4", overrides, update_code=False)
    changed = {override.partition("=")[0] for override in overrides}
    described = set(planned.origin.changes)
    assert all(any(key.startswith(name) for key in described) for name in changed - {"publish"})


def test_every_key_of_the_model_is_fixed_except_some() -> None:
    """A new key of `model` must not silently change the meaning of the weights."""
    changeable = {key for key, _ in walk_fields() if has_policy(key, Policy.CHANGEABLE_IN_FORK)}
    fixed = {key for key, _ in walk_fields() if has_policy(key, Policy.FIXED_IN_FORK)}
    assert {"model.dropout", "model.rope_theta", "adapter.dropout"} <= changeable <= fixed
    assert {
        "model.dim",
        "adapter.rank",
        "optimizer.name",
        "optimizer.state.moments",
        "sweep.grid",
    } <= fixed - changeable
    assert not has_policy("optimizer.lr", Policy.FIXED_IN_FORK)


def test_the_documentation_lists_the_fixed_keys() -> None:
    page = (ROOT / "docs/checkpoints.md").read_text()
    for policy in (Policy.FIXED_IN_FORK, Policy.CHANGEABLE_IN_FORK):
        assert all(f"`{key}`" in page for key in format_key_patterns(policy))


def test_a_fork_has_the_code_the_data_and_the_past_of_its_original(original: Run) -> None:
    (original.code_dir / "marker.py").write_text("")
    planned = plan_fork(original, "c", "4", ["optimizer.lr=5e-3"], update_code=False)
    fork = create_fork(planned)
    assert (fork.code_dir / "marker.py").exists()
    assert fork.config.optimizer.lr == 5e-3 and fork.config.run.name == "c"
    assert fork.config.metadata == original.config.metadata
    assert catalog.list_checkpoint_steps(fork.checkpoints_dir) == [4]
    assert load_stage_module(fork, "shard").describe_missing_outputs(fork) is None
    origin = read_origin(fork)
    assert origin is not None and (origin.run, origin.step) == (str(original.path), 4)
    assert dict(origin.changes) == {"optimizer.lr": "0.01 → 0.005"}
    losses = {line["step"]: line["loss"] for line in read_jsonl(original.metrics_file)}
    assert {line["step"]: line["loss"] for line in origin.recent_metrics} == {
        step: losses[step] for step in (1, 2, 3, 4)
    }
    [created] = fork.read_events(None, Created)
    assert (created.origin, created.step) == (str(original.path), 4)
    progress = load_stage_module(fork, "train").progress(fork)
    assert (progress.completed, progress.total) == (4, 6)
    assert fork.path.stat().st_mode & 0o777 == 0o700
    # The fork of a moved original is complete.
    shutil.move(original.path, original.path.with_name("moved"))
    assert load_stage_module(fork, "shard").describe_missing_outputs(fork) is None
    shutil.move(original.path.with_name("moved"), original.path)
    (original.code_dir / "marker.py").unlink()


def test_the_current_code_is_used_on_request(original: Run) -> None:
    (original.code_dir / "old.py").write_text("")
    fork = create_fork(plan_fork(original, "d", "2", [], update_code=True))
    assert not (fork.code_dir / "old.py").exists() and (fork.code_dir / "pipeline/run/origin.py").exists()
    (original.code_dir / "old.py").unlink()
    (original.code_dir / "pipeline/run/origin.py").rename(original.code_dir / "hidden")
    with raises_error("fork.old_code", "--update-code"):
        plan_fork(original, "e", "2", [], update_code=False)
    (original.code_dir / "hidden").rename(original.code_dir / "pipeline/run/origin.py")


def test_an_existing_name_a_sweep_and_missing_checkpoints_are_errors(original: Run, tmp_path: Path) -> None:
    (original.path.parent / "taken").mkdir()
    with raises_error("run.exists", original.path.parent / "taken"):
        plan_fork(original, "taken", "2", [], update_code=False)
    with raises_error("checkpoint.no_such_step", "--step 3", "6, 4, 2"):
        plan_fork(original, "b", "3", [], update_code=False)
    with raises_error("fork.name", "--name"):
        plan_fork(original, "b", "2", ["run.name=x"], update_code=False)
    with raises_error("config.invalid_value", "run.name"):
        plan_fork(original, "b/c", "2", [], update_code=False)
    sweep = Run.create(load_config(write_config(tmp_path, "sweep"), ["sweep={grid: {optimizer.lr: [1.0e-3, 2.0e-3]}}"]))
    first = create_points(sweep)[0]
    with raises_error("run.is_a_sweep", first.path):
        plan_fork(sweep, "b", "2", [], update_code=False)


def test_a_sweep_point_can_be_forked(tmp_path: Path) -> None:
    overrides = ("sweep={grid: {optimizer.lr: [1.0e-3, 2.0e-3]}}", "train.steps=4", "checkpoint.every_steps=2")
    sweep = make_run(tmp_path, "sweep", overrides)
    point = create_points(sweep)[1]
    assert run_ranks(1, run_stage_on_rank, point.path, "train") == [ExitCode.DONE]
    fork = create_fork(plan_fork(point, "b", "2", ["train.steps=6"], update_code=False))
    assert fork.path == sweep.path.parent / "b" and fork.config.optimizer.lr == 2e-3 and fork.config.sweep is None
    assert run_ranks(1, run_stage_on_rank, fork.path, "train") == [ExitCode.DONE]
    assert not fork.data_dir.is_symlink() and not fork.code_dir.is_symlink()


def test_a_failed_fork_leaves_nothing(original: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_fork(original, "b", "2", [], update_code=False)
    names = {path.name for path in original.path.parent.iterdir()}

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cli.fork.link_folders", fail)
    with pytest.raises(OSError, match="No space left"):
        create_fork(planned)
    assert {path.name for path in original.path.parent.iterdir()} == names


def test_decisions_about_earlier_steps_are_kept(original: Run) -> None:
    """The samples 8 to 15 are excluded. So the 32 samples of 4 steps end before the position 40."""
    lines = [
        {"decision": "leave_out", "position": 8, "samples": 8, "step": 2, "reason": "test"},
        {"decision": "skip", "position": 32, "step": 4, "reason": "test"},
        {"decision": "skip", "position": 40, "step": 5, "reason": "test"},
        {"decision": "leave_out", "position": 40, "samples": 8, "step": 6, "reason": "test"},
    ]
    original.decisions_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        planned = plan_fork(original, "b", "4", ["run.seed=4"], update_code=False)
    finally:
        original.decisions_file.unlink()
    assert list(planned.decisions) == lines[:2]
    assert planned.origin.order_start == (4, 40)


def test_the_command_prints_the_plan_and_writes_nothing(original: Run) -> None:
    files = list_files(original.path.parent)
    result = run_fork(
        original, "--name", "b", "--step", "4", "--dry-run", "--executor", "local", "optimizer.lr=5e-3", "train.steps=8"
    )
    assert result.exit_code == 0, result.output
    assert list_files(original.path.parent) == files
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert f"origin step 4 of {original.path}" in lines
    assert {"changes optimizer.lr: 0.01 → 0.005", "changes train.steps: 6 → 8", "done prepare, shard"} <= {*lines}
    metrics = {line["step"]: line["lr"] for line in read_jsonl(original.metrics_file)}
    assert any(line.startswith(f"lr {metrics[4]:.3g} at step 4 of the original") for line in lines)
    result = run_fork(original, "--name", "b", "--scripts")
    assert isinstance(result.exception, UserError) and result.exception.code == "cli.conflict"
    result = run_fork(original)
    assert isinstance(result.exception, UserError) and result.exception.code == "fork.name"


def test_status_shows_the_origin(original: Run) -> None:
    fork = create_fork(plan_fork(original, "shown", "4", ["optimizer.lr=5e-3"], update_code=False))
    result = CliRunner().invoke(app, ["status", str(fork.path)])
    assert result.exit_code == 0, result.output
    assert f"forked from step 4 of {original.path}, with optimizer.lr: 0.01 → 0.005" in result.output
    assert "4/6" in result.output


def test_the_origin_has_a_checksum(original: Run) -> None:
    fork = create_fork(plan_fork(original, "sealed", "4", [], update_code=False))
    file = fork.path / "origin.json"
    values = read_json(file)
    file.write_text(json.dumps({**values, "step": 5}))
    with raises_error("checkpoint.damaged_origin", file):
        read_origin(fork)
