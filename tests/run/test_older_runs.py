"""Test runs of older versions. Their config.yaml lacks a key or has older names of keys.

Such runs must continue without a change of their data, their config and the identity of their checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.text_folder import TextFolder
from pipeline.base.errors import UserError
from pipeline.base.files import add_checksum, sha256_json, write_json
from pipeline.base.yaml12 import dump_yaml
from pipeline.checkpoint.identity import compute_identity
from pipeline.config.read import dump_values, load_config, load_run_config, make_point_configs, parse_config
from pipeline.config.sections import Config
from pipeline.data.manifest import FORMAT_VERSION, load_manifest
from pipeline.run.directory import Run, create_points
from tests.support.edits import replace_in_file
from tests.support.tiny import make_run, write_config

NEWER_KEY = "data.add_special_tokens"
"""A config key that older versions did not have. They behaved as with the value false; the default is now `auto`."""
HASH_WITHOUT_MODEL = "890de3d88de74d804a8a78e150ea728598c672fd0f38fad83d1a4181e430048a"
HASH_WITH_INITIAL_MODEL = "96bdd6d53ebd2210755da3bfea47735fc92c07fe5aec39d9929f1b58be61f85c"
"""Hashes of configs, as the last version without `run.json` computed them."""
HASH_WITH_LONG_DIALOGUES = "fff7a560f8ad93947f1befe9be436e402f90bcd2aa2ef7fbafcaf93bdab925ca"
"""Hash of a config with `long_dialogues: truncate`, as the last version with this key computed it."""


def remove_add_special_tokens(run: Run) -> Run:
    """Remove NEWER_KEY from config.yaml, and `bos_ids` from prepare.json and manifest.json, as in an older run.

    Returns:
        The run, opened again.
    """
    text = run.config_file.read_text()
    assert len(re.findall(r"^ +add_special_tokens: .*\n", text, re.MULTILINE)) == 1
    run.config_file.write_text(re.sub(r"^ +add_special_tokens: .*\n", "", text, flags=re.MULTILINE))
    for name in ("prepare.json", "manifest.json") if (run.data_dir / "manifest.json").exists() else ():
        values = json.loads((run.data_dir / name).read_text())
        for key in ("bos_ids", "sha256"):
            values.pop(key)
        (run.data_dir / name).write_text(json.dumps(add_checksum(values)))
    return Run.open(run.path)


def test_a_run_without_add_special_tokens_keeps_its_data_and_its_identity(tmp_path: Path) -> None:
    """The hash that identifies the data of a run must not depend on the new config key if the run lacks the key."""
    run = make_run(tmp_path, overrides=(f"{NEWER_KEY}=false",))
    data = run.config.data
    older_run = remove_add_special_tokens(run)
    assert older_run.config.data.add_special_tokens is False
    # all keys of older versions that affect the data, except `source`
    older_keys = {"mixture", "text_field", "text_documents", "tokenizer", "shard_tokens", "held_out"}
    older_values = data.model_dump(mode="json", include=older_keys)
    folder = TextFolder(older_run.config.data, older_run.data_dir)
    assert folder.key == sha256_json(
        {"format": FORMAT_VERSION, "config": {**older_values, "source": data.sources}, "code": folder.code_hash}
    )
    assert folder.find_prepare_problem() is None and folder.find_shard_problem() is None
    manifest = load_manifest(older_run.data_dir)
    assert manifest.bos_ids == ()
    identity = compute_identity(load_config(tmp_path / "tiny.yaml"), manifest)
    assert compute_identity(older_run.config, manifest) == identity, "older checkpoints must remain valid"
    assert not any("add_special_tokens" in key for key in identity["config"])


def test_the_same_config_file_continues_a_run_without_add_special_tokens(tmp_path: Path) -> None:
    """The file does not set the key, and its default has changed. This must not count as a change of the run."""
    run = remove_add_special_tokens(make_run(tmp_path, overrides=(f"{NEWER_KEY}=false",)))
    config = load_config(tmp_path / "tiny.yaml")
    assert config.data.add_special_tokens == "auto"
    assert Run.preview(config).corrections == {} == Run.create(config).corrections
    assert Run.open(run.path).config.data.add_special_tokens is False
    # an override is a change, even if its value is the default
    with pytest.raises(UserError, match=rf"{NEWER_KEY}: False → auto"):
        Run.create(load_config(tmp_path / "tiny.yaml", [f"{NEWER_KEY}=auto"]))
    corrected_config = load_config(tmp_path / "tiny.yaml", ["train.steps=31"])
    assert list(Run.preview(corrected_config).corrections) == ["train.steps"]
    assert Run.create(corrected_config).config.data.add_special_tokens is False
    reopened_run = Run.open(run.path)
    assert (reopened_run.config.train.steps, reopened_run.config.data.add_special_tokens) == (31, False)
    assert Run.create(corrected_config).corrections == {}
    (line,) = map(json.loads, run.changes_file.read_text().splitlines())
    submitted_keys = line["submitted"]["data"].keys()
    assert "add_special_tokens" not in submitted_keys, "the copy of the code in the run does not know this key"
    assert submitted_keys == load_config(run.config_file).model_dump()["data"].keys() - {"add_special_tokens"}


def test_points_of_a_sweep_have_add_special_tokens_only_if_the_sweep_has_it(tmp_path: Path) -> None:
    older_sweep = remove_add_special_tokens(
        Run.create(load_config(write_config(tmp_path), ["sweep={grid: {optimizer.lr: [0.001, 0.01]}}"]))
    )
    point, _ = create_points(older_sweep)
    assert point.config.data.add_special_tokens is False and "add_special_tokens" not in point.config_file.read_text()
    newer_sweep = Run.create(load_config(write_config(tmp_path, "new"), ["sweep={grid: {optimizer.lr: [1, 2]}}"]))
    point, _ = create_points(newer_sweep)
    assert load_config(point.config_file) == point.config
    assert "add_special_tokens: auto" in point.config_file.read_text()


def test_a_run_with_add_special_tokens_keeps_its_value(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert Run.create(load_config(config)).config.data.add_special_tokens == "auto"
    run = Run.create(load_config(write_config(tmp_path, "other"), [f"{NEWER_KEY}=false"]))
    assert Run.preview(load_config(tmp_path / "other.yaml")).corrections == {NEWER_KEY: "False → auto"}
    assert Run.open(run.path).config.data.add_special_tokens is False


# -- renamed keys and run.json -----------------------------------------------------------------------------------------


def rewrite_as_older_run(run: Run) -> Run:
    """Rewrite the files of a run as they were in versions without `recovery.budgets` and `run.json`.

    Returns:
        The run, opened again.
    """
    values = dump_values(load_run_config(run.config_file))
    recovery = values["recovery"]
    recovery |= recovery.pop("budgets")
    recovery["fruitless"] = recovery.pop("max_restarts_without_progress")
    run.config_file.write_text(dump_yaml(values))
    run.metadata_file.unlink()
    return Run.open(run.path)


def write_config_with_initial_model(folder: Path, **sections: Any) -> Path:
    """Write a config with `model.init_from`, and the model in Hugging Face format. Return the path of the config.

    Args:
        folder: folder for the config, and for the model in `open`.
        sections: further sections of the config.
    """
    model = folder / "open"
    model.mkdir()
    sizes = {
        "model_type": "mistral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096,
        "sliding_window": 512,
    }  # fmt: skip
    write_json(model / "config.json", sizes)
    (model / "model.safetensors").touch()
    write_json(model / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 2, "content": "</s>"}]})
    write_json(model / "tokenizer_config.json", {"eos_token": "</s>"})
    values = {
        "run": {"name": "tuned", "root": str(folder / "runs")}, "train": {"steps": 4},
        "model": {"init_from": str(model)}, "data": {"sequence_length": 64}, **sections,
    }  # fmt: skip
    (folder / "tuned.yaml").write_text(dump_yaml(values))
    return folder / "tuned.yaml"


def hash_config(config: Config) -> str:
    """Return `config_hash` of the identity that checkpoints of a run with this config have."""
    return str(compute_identity(config, SimpleNamespace(train=[]))["config_hash"])  # type: ignore[arg-type]


def test_computed_metadata_is_in_run_json_and_not_in_config_yaml(tmp_path: Path) -> None:
    """Sluice computes the metadata from the files of the initial model, such as their hashes."""
    config = load_config(write_config_with_initial_model(tmp_path))
    run = Run.create(config)
    text = run.config_file.read_text()
    for key in ("init_sha256", "init_files", "max_position_embeddings"):
        assert f"  {key}:" not in text
    content = json.loads(run.metadata_file.read_text())
    sha256 = hashlib.sha256((tmp_path / "open/config.json").read_bytes()).hexdigest()
    assert content["model"]["init_sha256"] == sha256
    assert content["model"]["max_position_embeddings"] == 4096
    for file in (tmp_path / "open").iterdir():
        file.unlink()
    assert Run.open(run.path).config == config, "the folder of the model must not be read again"


def test_max_window_layers_is_read_from_the_run_json_of_older_versions(tmp_path: Path) -> None:
    """The key was metadata, because a window had no effect yet."""
    config = load_config(write_config_with_initial_model(tmp_path))
    run = Run.create(config.model_copy(update={"model": config.model.model_copy(update={"max_window_layers": 1})}))
    replace_in_file(run.config_file, "  max_window_layers: 1\n", "")
    content = json.loads(run.metadata_file.read_text())
    write_json(run.metadata_file, add_checksum({**content, "model": {**content["model"], "max_window_layers": 1}}))
    assert Run.open(run.path).config.model.max_window_layers == 1


def test_a_damaged_run_json_is_an_error(tmp_path: Path) -> None:
    run = Run.create(load_config(write_config_with_initial_model(tmp_path)))
    replace_in_file(run.metadata_file, " 4096", " 4097")
    with pytest.raises(UserError) as error:
        Run.open(run.path)
    assert error.value.code == "run.damaged_file"
    assert str(run.metadata_file) in str(error.value)


def test_a_run_has_the_same_config_and_identity_in_the_files_of_older_code(tmp_path: Path) -> None:
    run = Run.create(load_config(write_config_with_initial_model(tmp_path)))
    config = Run.open(run.path).config
    older_config = rewrite_as_older_run(run).config
    assert older_config == config and older_config.metadata.model.init_sha256
    assert hash_config(older_config) == hash_config(config)


def test_the_identity_of_a_config_equals_that_of_versions_without_run_json() -> None:
    """In these versions, `init_sha256`, `init_files` and the other keys of `model` below were keys of the config."""
    base = {"run": {"name": "x"}, "train": {"steps": 3}}
    model = {"init_sha256": "ab" * 32, "init_files": "f", "max_position_embeddings": 77, "max_window_layers": 0}
    assert hash_config(parse_config(base, "x")) == HASH_WITHOUT_MODEL
    assert hash_config(parse_config({**base, "model": model, "recovery": {"crash": 9}}, "x")) == HASH_WITH_INITIAL_MODEL


def test_resume_writes_keys_under_the_names_that_the_code_of_the_run_reads(tmp_path: Path) -> None:
    """Older code knows `recovery.crash` and `recovery.fruitless` instead of the current names."""
    for name, is_older in (("new", False), ("old", True)):
        run = Run.create(load_config(write_config(tmp_path, name)))
        run = rewrite_as_older_run(run) if is_older else run
        run.apply_overrides(["recovery.budgets.crash=7", "recovery.fruitless=8", "recovery.hang_s=50"])
        (line,) = (json.loads(line) for line in run.changes_file.read_text().splitlines())
        expected: dict[str, Any] = {"budgets": {"crash": 7}, "max_restarts_without_progress": 8}
        if is_older:
            expected = {"crash": 7, "fruitless": 8}
        assert line["set"] == {"recovery": {**expected, "hang_s": 50.0}}
        recovery = Run.open(run.path).config.recovery
        assert (recovery.budgets.crash, recovery.max_restarts_without_progress, recovery.hang_s) == (7, 8, 50)


def test_the_identity_of_a_config_does_not_depend_on_the_name_of_long_documents() -> None:
    tokenizer = {"kind": "file", "path": "/tmp/tokenizer.json"}
    for name in ("long_dialogues", "long_documents"):
        data = {"source": "/tmp/a.jsonl", "records": "prompts", "tokenizer": tokenizer, name: "truncate"}
        config = parse_config({"run": {"name": "x"}, "train": {"steps": 3}, "data": data}, "x")
        assert hash_config(config) == HASH_WITH_LONG_DIALOGUES
        identity = compute_identity(config, SimpleNamespace(train=[]))  # type: ignore[arg-type]
        assert identity["config"]["data.long_dialogues"] == "truncate", "checkpoints contain the former name"


@pytest.mark.parametrize("mode", ["split", "drop"])
def test_a_run_with_long_dialogues_continues_and_gets_values_that_its_code_reads(tmp_path: Path, mode: str) -> None:
    config_file = write_config(tmp_path)
    overrides = ["data.records=prompts"]
    run = Run.create(load_config(config_file, [*overrides, f"data.long_dialogues={mode}"]))
    present_mode = "cut" if mode == "split" else mode
    assert run.config.data.long_documents == present_mode
    values = dump_values(load_run_config(run.config_file))
    assert values["data"].pop("long_documents") == present_mode and values["data"].pop("packing") == "cut"
    values["data"]["long_dialogues"] = mode
    run.config_file.write_text(dump_yaml(values))
    older_run = Run.open(run.path)
    assert older_run.config == run.config and hash_config(older_run.config) == hash_config(run.config)
    corrected_config = load_config(config_file, [*overrides, f"data.long_documents={present_mode}", "train.steps=5"])
    assert Run.preview(corrected_config).corrections == {"train.steps": "30 → 5"}
    Run.create(corrected_config)
    Run.open(run.path).apply_overrides(["data.long_documents=cut", "train.steps=6"])
    submitted, changed = (json.loads(line) for line in run.changes_file.read_text().splitlines())
    assert submitted["submitted"]["data"]["long_dialogues"] == mode
    assert not {"long_documents", "packing"} & submitted["submitted"]["data"].keys()
    if mode == "drop":
        assert changed["set"]["data"] == {"long_dialogues": "split"}
    assert Run.open(run.path).config.data.long_documents == "cut"


def test_a_corrected_run_of_older_code_gets_values_that_its_code_reads(tmp_path: Path) -> None:
    config_file = write_config_with_initial_model(tmp_path)
    run = rewrite_as_older_run(Run.create(load_config(config_file)))
    corrected_config = load_config(config_file, ["train.steps=5", "recovery.crash=7"])
    assert Run.create(corrected_config).config == corrected_config
    (line,) = (json.loads(line) for line in run.changes_file.read_text().splitlines())
    assert line["submitted"]["recovery"]["crash"] == 7 and "budgets" not in line["submitted"]["recovery"]
    assert line["submitted"]["model"]["init_sha256"] == corrected_config.metadata.model.init_sha256
    assert Run.open(run.path).config == corrected_config
    assert Run.create(corrected_config).corrections == {}


def test_changed_weights_of_the_initial_model_are_a_correction(tmp_path: Path) -> None:
    config_file = write_config_with_initial_model(tmp_path)
    run = Run.create(load_config(config_file))
    (tmp_path / "open/model.safetensors").write_bytes(b"other")
    corrected_config = load_config(config_file)
    assert list(Run.preview(corrected_config).corrections) == ["model.init_files"]
    assert Run.create(corrected_config).config == corrected_config == Run.open(run.path).config


@pytest.mark.parametrize("is_older", [False, True])
def test_points_of_a_sweep_over_models_are_written_for_the_code_of_the_run(tmp_path: Path, is_older: bool) -> None:
    """The first of two points starts from a model, the second point does not."""
    config_file = write_config_with_initial_model(
        tmp_path, sweep={"grid": {"model.init_from": [str(tmp_path / "open"), None]}}
    )
    run = Run.create(load_config(config_file))
    run = rewrite_as_older_run(run) if is_older else run
    first_point, second_point = create_points(run)
    assert first_point.metadata_file.exists() == (not is_older)
    text = first_point.config_file.read_text()
    assert ("  init_sha256:" in text) == ("  fruitless:" in text) == is_older
    for file in (tmp_path / "open").iterdir():
        file.unlink()
    configs = make_point_configs(Run.open(run.path).config)
    assert [Run.open(point.path).config for point in (first_point, second_point)] == configs
    assert configs[0].metadata.model.init_sha256 is not None and configs[1].metadata.model.init_sha256 is None
