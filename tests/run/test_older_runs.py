"""Runs made before a key of the config existed: their config.yaml lacks it, and they keep what they did."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from data_prep.text_folder import TextFolder
from pipeline.base.errors import UserError
from pipeline.base.files import add_checksum, sha256_json
from pipeline.checkpoint.identity import compute_identity
from pipeline.config.read import load_config
from pipeline.data.manifest import FORMAT_VERSION, load_manifest
from pipeline.run.directory import Run
from pipeline.run.points import create_points
from tests.support.tiny import make_run, write_config

KEY = "data.add_special_tokens"


def made_before(run: Run) -> Run:
    """The run as if it had been made before the key existed: config.yaml, prepared data and manifest lack it."""
    text = run.config_file.read_text()
    assert len(re.findall(r"^ +add_special_tokens: .*\n", text, re.MULTILINE)) == 1
    run.config_file.write_text(re.sub(r"^ +add_special_tokens: .*\n", "", text, flags=re.MULTILINE))
    for name in ("prepare.json", "manifest.json") if (run.data_dir / "manifest.json").exists() else ():
        values = json.loads((run.data_dir / name).read_text())
        for key in ("bos_ids", "sha256"):
            values.pop(key)
        (run.data_dir / name).write_text(json.dumps(add_checksum(values)))
    return Run.open(run.path)


def test_a_run_without_the_key_means_what_it_meant(tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=(f"{KEY}=false",))
    old, data = made_before(run), run.config.data
    assert old.config.data.add_special_tokens is False
    keys = {"mixture", "text_field", "text_documents", "tokenizer", "shard_tokens", "held_out"}  # and source
    then = data.model_dump(mode="json", include=keys)
    folder = TextFolder(old.config.data, old.data_dir)
    assert folder.key == sha256_json(
        {"format": FORMAT_VERSION, "config": {**then, "source": data.sources}, "code": folder.code}
    )
    assert folder.find_prepare_problem() is None and folder.find_shard_problem() is None
    assert load_manifest(old.data_dir).bos_ids == ()
    now = compute_identity(load_config(tmp_path / "tiny.yaml"), load_manifest(old.data_dir))
    assert compute_identity(old.config, load_manifest(old.data_dir)) == now, "checkpoints of before would be refused"
    assert not any("add_special_tokens" in key for key in now["config"])


def test_the_same_config_file_goes_on_with_a_run_without_the_key(tmp_path: Path) -> None:
    run = made_before(make_run(tmp_path, overrides=(f"{KEY}=false",)))
    config = load_config(tmp_path / "tiny.yaml")
    assert config.data.add_special_tokens == "auto"
    assert Run.preview(config).corrections == {} == Run.create(config).corrections
    assert Run.open(run.path).config.data.add_special_tokens is False
    with pytest.raises(UserError, match=rf"{KEY}: False → auto"):  # one that says so is another config
        Run.create(load_config(tmp_path / "tiny.yaml", [f"{KEY}=auto"]))
    corrected = load_config(tmp_path / "tiny.yaml", ["train.steps=31"])
    assert list(Run.preview(corrected).corrections) == ["train.steps"]
    assert Run.create(corrected).config.data.add_special_tokens is False
    again = Run.open(run.path)
    assert (again.config.train.steps, again.config.data.add_special_tokens) == (31, False)
    assert Run.create(corrected).corrections == {}
    (line,) = (json.loads(one) for one in run.changes_file.read_text().splitlines())
    assert "add_special_tokens" not in line["submitted"]["data"], "the run's own code may not know it"
    assert line["submitted"]["data"].keys() == load_config(run.config_file).model_dump()["data"].keys() - {KEY[5:]}


def test_points_of_a_sweep_without_the_key_do_not_get_it(tmp_path: Path) -> None:
    sweep = load_config(write_config(tmp_path), ["sweep={grid: {optimizer.lr: [0.001, 0.01]}}"])
    run = made_before(Run.create(sweep))
    first, _ = create_points(run)
    assert first.config.data.add_special_tokens is False and "add_special_tokens" not in first.config_file.read_text()
    new, _ = create_points(
        Run.create(load_config(write_config(tmp_path, "new"), ["sweep={grid: {optimizer.lr: [1, 2]}}"]))
    )
    assert load_config(new.config_file) == new.config and "add_special_tokens: auto" in new.config_file.read_text()


def test_a_run_that_has_the_key_keeps_its_own(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert Run.create(load_config(config)).config.data.add_special_tokens == "auto"
    run = Run.create(load_config(write_config(tmp_path, "other"), [f"{KEY}=false"]))
    assert Run.preview(load_config(tmp_path / "other.yaml")).corrections == {KEY: "False → auto"}
    assert Run.open(run.path).config.data.add_special_tokens is False
