"""Tests of `checkpoint.keep`: which checkpoints are kept, and that the newest intact checkpoint is never removed."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.dist_env import RankInfo
from pipeline.base.files import add_checksum, sha256_file, write_json
from pipeline.checkpoint import catalog
from pipeline.checkpoint.retention import HeldOutLosses, Retention
from pipeline.config.read import load_config
from pipeline.config.sections import KeepConfig
from pipeline.run.lines import read_valid_lines
from pipeline.run.metrics import is_step_line
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank, write_config

UNIT = 10**6
"""Bytes per unit of size in these tests. The files are sparse."""


def write_checkpoint(folder: Path, step: int, size: int = 1) -> Path:
    """Write a checkpoint with one sparse file of `size` units."""
    checkpoint = folder / catalog.checkpoint_name(step)
    checkpoint.mkdir(parents=True)
    (checkpoint / catalog.METADATA_FILE).touch()
    with open(checkpoint / "__0_0.distcp", "wb") as file:
        file.truncate(size * UNIT)
    files = {
        ".metadata": {"size": 0, "sha256": sha256_file(checkpoint / ".metadata")},
        "__0_0.distcp": {"size": size * UNIT, "sha256": "unused"},
    }
    manifest = {"step": step, "samples_consumed": step, "layout": {}, "files": files}
    write_json(checkpoint / catalog.MANIFEST_FILE, add_checksum(manifest))
    return checkpoint


def damage_checkpoint(checkpoint: Path, kind: str) -> None:
    """Damage a checkpoint so that its files do not have the recorded sizes."""
    if kind == "truncated":
        with open(checkpoint / "__0_0.distcp", "r+b") as file:
            file.truncate(1)
    elif kind == "missing":
        (checkpoint / "__0_0.distcp").unlink()
    elif kind == "manifest":
        (checkpoint / catalog.MANIFEST_FILE).write_text("{")
    else:
        (checkpoint / catalog.MANIFEST_FILE).unlink()


def write_losses(path: Path, losses: dict[int, float | None]) -> None:
    """Write a metrics.jsonl with these held-out losses. The value None is a step that was not evaluated."""
    line = {"step_time_s": 1.0, "tokens_per_s": 1.0, "loss": 2.0}
    lines = [
        {**line, "step": step, **({} if loss is None else {"held_out_loss": loss})} for step, loss in losses.items()
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def select_steps(sizes: dict[int, int], intact: set[int], losses: dict[int, float], keep: KeepConfig) -> set[int]:
    """Return the steps to keep, computed in the simplest way: remove the least valuable one until the rest fits."""
    steps = sorted(sizes)
    last = steps[-keep.last :]
    best = sorted((step for step in steps[::-1] if step in losses), key=losses.__getitem__)[: keep.best or 0]
    multiples = [step for step in steps if keep.every_steps and step % keep.every_steps == 0]
    newest_intact = max(intact, default=None)
    kept = {*last, *best, *multiples, *([] if newest_intact is None else [newest_intact])}

    def rank_value(step: int) -> tuple[Any, ...]:
        """Return a sort key: the step with the smallest key is removed first."""
        if step == newest_intact:
            return (3,)
        if step in last:
            return (2, step)
        return (1, -best.index(step)) if step in best else (0, step)

    while keep.at_most_gb and len(kept) > 1 and sum(sizes[step] for step in kept) * UNIT > keep.at_most_gb * 1e9:
        kept.remove(min(kept, key=rank_value))
    return kept


damage_kinds = st.sampled_from(["truncated", "missing", "manifest", "no manifest"])
keep_rules = st.builds(
    KeepConfig,
    last=st.integers(1, 4),
    every_steps=st.none() | st.integers(1, 6),
    best=st.none() | st.integers(1, 3),
    at_most_gb=st.none() | st.integers(1, 40).map(lambda units: units * UNIT / 1e9),
)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.dictionaries(st.integers(1, 20), st.integers(1, 9), min_size=1, max_size=10),
    damage=st.dictionaries(st.integers(1, 20), damage_kinds),
    losses=st.dictionaries(st.integers(1, 20), st.integers(0, 5).map(float)),
    keep=keep_rules,
)
def test_rules_select_the_kept_checkpoints(
    sizes: dict[int, int], damage: dict[int, str], losses: dict[int, float], keep: KeepConfig
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "checkpoints")
        for step, size in sizes.items():
            write_checkpoint(folder, step, size)
        for step in damage.keys() & sizes.keys():
            damage_checkpoint(folder / catalog.checkpoint_name(step), damage[step])
        write_losses(Path(name, "metrics.jsonl"), {step: losses.get(step) for step in range(1, 21)})
        intact = sizes.keys() - damage.keys()
        newest_intact = catalog.find_newest_step(folder)
        assert newest_intact == max(intact, default=0)
        Retention(folder, keep, Path(name, "metrics.jsonl")).remove_old_checkpoints()
        kept = set(catalog.list_checkpoint_steps(folder))
        assert kept == select_steps(sizes, set(intact), losses, keep)
        assert catalog.find_newest_step(folder) == newest_intact
        assert not list(folder.glob(".tmp-*"))
        for step in kept - damage.keys():
            manifest = catalog.read_checkpoint_manifest(folder / catalog.checkpoint_name(step))
            catalog.verify_checkpoint_files(folder / catalog.checkpoint_name(step), manifest, hashes=False)


def test_a_plain_number_keeps_the_newest(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        write_checkpoint(tmp_path, step)
    Retention(tmp_path, 2).remove_old_checkpoints()
    assert catalog.list_checkpoint_steps(tmp_path) == [50, 40]


def test_damaged_newer_checkpoints_do_not_displace_the_newest_intact_one(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
    for step in (20, 30, 40):
        damage_checkpoint(tmp_path / catalog.checkpoint_name(step), "truncated")
    Retention(tmp_path, 1).remove_old_checkpoints()
    assert catalog.list_checkpoint_steps(tmp_path) == [40, 10]


def test_an_evaluation_that_arrives_late_is_considered(tmp_path: Path) -> None:
    """A stop may prevent the evaluation of step 20. The next attempt replaces metrics.jsonl with its loss."""
    metrics = tmp_path / "metrics.jsonl"
    retention = Retention(tmp_path / "checkpoints", KeepConfig(last=1, best=1), metrics)
    for step in (10, 20):
        write_checkpoint(tmp_path / "checkpoints", step)
    write_losses(metrics, {10: 3.0, 20: None})
    retention.remove_old_checkpoints()
    assert catalog.list_checkpoint_steps(tmp_path / "checkpoints") == [20, 10]
    write_losses(tmp_path / "new", {10: 3.0, 20: 2.0, 30: 2.5})
    (tmp_path / "new").rename(metrics)
    write_checkpoint(tmp_path / "checkpoints", 30)
    retention.remove_old_checkpoints()
    assert catalog.list_checkpoint_steps(tmp_path / "checkpoints") == [30, 20]


@given(
    writes=st.lists(
        st.tuples(st.lists(st.tuples(st.integers(1, 9), st.none() | st.floats(0, 9)), max_size=5), st.booleans()),
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_losses_are_those_of_the_whole_file(writes: list[tuple[list[tuple[int, float | None]], bool]]) -> None:
    """Lines are appended, or the file is replaced. After each change, the losses equal those of a fresh reader."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "metrics.jsonl")
        losses = HeldOutLosses(path)
        for number, (entries, is_replaced) in enumerate(writes):
            part = Path(name, f"part-{number}")
            write_losses(part, dict(entries))
            if is_replaced:
                part.rename(path)
            else:
                with open(path, "a") as file:
                    file.write(part.read_text())
            assert dict(losses.read()) == dict(HeldOutLosses(path).read())


def test_checkpoints_in_removal_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed during a removal leaves no incomplete checkpoint under a final name."""
    for step in (10, 20):
        write_checkpoint(tmp_path, step)

    def die(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        Retention(tmp_path, 1).remove_old_checkpoints()
    assert catalog.list_checkpoint_steps(tmp_path) == [20]
    monkeypatch.undo()
    catalog.remove_partial_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


# -- the config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "code", "facts"),
    [
        (["checkpoint.keep=0"], "config.out_of_range", ["checkpoint.keep"]),
        (["checkpoint.keep={last: 0}"], "config.out_of_range", ["checkpoint.keep.last"]),
        (["checkpoint.keep={every_steps: -5}"], "config.out_of_range", ["checkpoint.keep.every_steps"]),
        (["checkpoint.keep={at_most_gb: -1}"], "config.out_of_range", ["checkpoint.keep.at_most_gb"]),
        (["checkpoint.keep={newest: 3}"], "config.unknown_key", ["checkpoint.keep.newest", "every_steps"]),
        (["checkpoint.keep={best: 2}"], "config.conflict", ["checkpoint.keep.best", "train.evaluate_every"]),
    ],
)
def test_wrong_rules_are_errors(tmp_path: Path, overrides: list[str], code: str, facts: list[str]) -> None:
    config = write_config(tmp_path)
    with raises_error(code, *facts):
        load_config(config, overrides)


def test_rules_do_not_change_the_identity_and_may_change_later(tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=("checkpoint.every_steps=2", "train.steps=4"))
    assert run_ranks(1, run_stage_on_rank, run.path, "train") == [0]
    run.apply_overrides(["checkpoint.keep={last: 1, every_steps: 4}", "train.steps=12", "checkpoint.mode=sync"])
    assert run_ranks(1, run_stage_on_rank, run.path, "train") == [0]
    assert catalog.list_checkpoint_steps(run.checkpoints_dir) == [12, 8, 4]
    run.apply_overrides(["checkpoint.keep=1", "train.steps=14"])
    assert run_ranks(1, run_stage_on_rank, run.path, "train") == [0]
    assert catalog.list_checkpoint_steps(run.checkpoints_dir) == [14]


def train_on_rank(rank_info: RankInfo, path: Path) -> int:
    """Run the train stage on this rank."""
    return run_stage_on_rank(rank_info, path, "train")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_keeps_the_checkpoints_with_the_lowest_losses(tmp_path: Path, mode: str) -> None:
    """A learning rate that is much too high makes the losses go up and down."""
    overrides = (
        "checkpoint.every_steps=2", "checkpoint.keep={last: 1, best: 2}", f"checkpoint.mode={mode}",
        "train.evaluate_every=4", "train.steps=24", "train.evaluate_sequences=4", "optimizer.lr=0.5",
    )  # fmt: skip
    run = make_run(tmp_path, overrides=overrides)
    assert run_ranks(1, train_on_rank, run.path) == [0]
    losses = {
        line["step"]: line["held_out_loss"]
        for line in read_valid_lines(run.metrics_file, is_step_line)
        if "held_out_loss" in line
    }
    assert sorted(losses) == [4, 8, 12, 16, 20, 24]
    best = sorted(losses, key=losses.__getitem__)[:2]
    assert set(catalog.list_checkpoint_steps(run.checkpoints_dir)) == {24, *best}
