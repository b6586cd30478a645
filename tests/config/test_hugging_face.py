"""config.json of open models, as published and as transformers writes them, to the section `model` and back."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import transformers

from data_prep.records import build_chat_json
from pipeline.base.errors import UserError
from pipeline.base.files import write_json
from pipeline.config.hugging_face import (
    ModelFolderError,
    build_config_json,
    make_model_config,
    open_inside,
    parse_model_config,
    read_model_section,
    read_tokenizer_files,
)
from pipeline.config.read import (
    ConfigError,
    dump_config,
    dump_metadata,
    load_config,
    load_run_config,
    make_point_configs,
)
from pipeline.config.sections import ModelConfig, ModelMetadata

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL: dict[str, Any] = {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "vocab_size": 300}
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SmolLM2-135M": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
            "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
            "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
            "vocab_size": 49152,
        },
        {"dim": 576, "kv_heads": 3, "rope_theta": 100000, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64,
            "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
            "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
        },
        {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "head_dim": 64},
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "rope_theta": 10000.0,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "use_cache": True,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": 4096,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
            "vocab_size": 32000,
        },
        {"sliding_window": 4096, "attention_bias": "none", "kv_heads": 8},
    ),
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
            "transformers_version": "4.40.1", "use_mrope": None, "use_sliding_window": False, "vocab_size": 151936,
        },
        {"attention_bias": "qkv", "qk_norm": False, "vocab_size": 151936, "rope_theta": 1000000.0},
    ),
    "Qwen3-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
            "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 1024,
            "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
            "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        },
        {"qk_norm": True, "attention_bias": "none", "head_dim": 128},
    ),
}  # fmt: skip
"""config.json of models as they were published, by transformers 4, and some of what they mean."""


def split_section(section: dict[str, Any]) -> tuple[ModelConfig, ModelMetadata]:
    """Return the config and the metadata in what `parse_model_config` returns."""
    metadata = {key: value for key, value in section.items() if key in ModelMetadata.model_fields}
    return make_model_config(section), ModelMetadata(**metadata)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_and_written_back(name: str) -> None:
    theirs, means = PUBLISHED[name]
    section = parse_model_config(theirs)
    assert section | means == section
    written = build_config_json(*split_section(section), theirs["vocab_size"], 64, theirs["eos_token_id"], "bfloat16")
    said = {key: value for key, value in section.items() if value is not None}
    assert parse_model_config(written) | said == parse_model_config(written)  # the width of a head may be new in words
    # transformers 5 takes both spellings to mean the same
    before, after = (transformers.AutoConfig.for_model(**config).to_dict() for config in (theirs, written))
    told = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert told <= {"bos_token_id", "head_dim", "transformers_version", "max_window_layers", "sliding_window"} | (
        {"is_llama_config", "rope_interleaved", "_name_or_path", "use_mrope"}
    ), {key: (before.get(key), after.get(key)) for key in told}


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_transformers_5_saves_is_read(tmp_path: Path, family: str) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": 300}
    getattr(transformers, f"{family}Config")(**sizes, rope_parameters=rope).save_pretrained(tmp_path)
    section = parse_model_config(json.loads((tmp_path / "config.json").read_bytes()))
    assert section["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert (section["rope_theta"], section["dim"], section["vocab_size"]) == (77.0, 32, 300)


def test_keys_that_are_left_out_have_their_familys_defaults() -> None:
    bare = {**SIZES, "vocab_size": 300}
    assert parse_model_config({**bare, "model_type": "llama"})["kv_heads"] is None  # as many as heads
    assert parse_model_config({**bare, "model_type": "llama"})["rms_norm_eps"] == 1e-6
    eight = {**bare, "num_attention_heads": 8}
    assert parse_model_config({**eight, "model_type": "mistral"})["kv_heads"] == 8
    assert parse_model_config({**eight, "model_type": "mistral"})["sliding_window"] == 4096
    wide = {**bare, "num_attention_heads": 32, "model_type": "qwen3"}
    assert (parse_model_config(wide)["kv_heads"], parse_model_config(wide)["head_dim"]) == (32, 128)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"model_type": "gemma3"}, 'model_type "gemma3"'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: dynamic"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters: dynamic"),
        (
            {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"rope_type": "longrope"}},
            "rope_scaling: longrope",  # transformers takes it, whatever the newer key says
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters: yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling"),
        ({"mlp_bias": True}, "mlp_bias true"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config {"bits": 4}'),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"layer_types": ["linear_attention"]}, "layer_types linear_attention"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000"),
        ({"intermediate_size": 2**21}, "intermediate_size 2097152"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "kv_heads (3)"),
    ],
)
def test_an_unsupported_key_is_named(change: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_model_config({**SMALL, **change})
    assert fact in str(raised.value)


def test_malformed_values_raise_no_unexpected_error() -> None:
    keys = ["model_type", "architectures", "layer_types", "rope_scaling", "rope_parameters", "rope_theta", "head_dim"]
    for key in [*keys, "hidden_act", "sliding_window", "attention_bias", "tie_word_embeddings", *SMALL]:
        for value in ([["a"]], {"type": ["a"]}, "text", -1, 1.5, float("nan")):
            for family in ("llama", "qwen3"):
                with contextlib.suppress(ValueError, TypeError):
                    make_model_config(parse_model_config({**SMALL, "model_type": family, key: value}))


@pytest.mark.parametrize(
    ("more", "window", "first"),
    [
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, 64, 1),
        ({"use_sliding_window": True, "sliding_window": 64}, 64, 28),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, 4096, 1),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, 4096, None),
        ({"sliding_window": 64}, None, None),
        ({"model_type": "mistral", "sliding_window": 64}, 64, None),
        ({"model_type": "mistral", "sliding_window": None}, None, None),
        ({"model_type": "llama", "sliding_window": 64}, None, None),  # means nothing to transformers
    ],
)
def test_a_sliding_window_is_written_as_it_was_read(
    more: dict[str, Any], window: int | None, first: int | None
) -> None:
    theirs = {**SMALL, "model_type": "qwen2", **more}
    section = parse_model_config(theirs)
    assert (section["sliding_window"], section["max_window_layers"]) == (window, first)
    if "layer_types" in more and first is None:
        with pytest.raises(UserError) as raised:
            build_config_json(*split_section(section), 300, 64, 2, "float32")
        assert raised.value.code == "export.unsupported_model" and "model.max_window_layers" in str(raised.value)
        return
    written = build_config_json(*split_section(section), 300, 64, 2, "float32")
    assert parse_model_config(written) | {"head_dim": None, "max_position_embeddings": None} == section
    before, after = (transformers.AutoConfig.for_model(**config) for config in (theirs, written))
    assert getattr(before, "layer_types", None) == getattr(after, "layer_types", None)


def folder_with(path: Path, **config: Any) -> Path:
    path.mkdir()
    write_json(path / "config.json", {**SMALL, **config})
    (path / "model.safetensors").touch()
    write_json(path / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 2, "content": "</s>"}]})
    write_json(path / "tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    return path


def test_a_config_is_filled_once(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "open", eos_token_id=[2, 3])
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: a}\ntrain: {steps: 1}\nmodel: {init_from: open, dropout: 0.1, layers: 2}\n")
    config = load_config(file)
    assert (config.model.dim, config.model.num_kv_heads, config.model.dropout) == (32, 2, 0.1)
    assert config.model.init_from == folder
    assert config.data.tokenizer.path == folder / "tokenizer.json"
    assert config.data.tokenizer.eos_token == "<end>"
    (folder / "tokenizer_config.json").unlink()
    assert load_config(file).data.tokenizer.eos_token == "</s>"
    frozen = tmp_path / "config.yaml"
    frozen.write_text(dump_config(config))
    write_json(tmp_path / "run.json", dump_metadata(config))
    for path in folder.iterdir():
        path.unlink()
    assert load_run_config(frozen) == config
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert raised.value.code == "model.unreadable_folder"
    assert str(file) in str(raised.value) and "open/config.json" in str(raised.value)


@pytest.mark.parametrize(
    ("override", "code", "facts"),
    [
        ("model.dim=64", "model.contradicts_folder", ["model.dim", "64", "32", "open/config.json"]),
        (
            "model.rope_scaling={rope_type: linear, factor: 2.0}", "model.contradicts_folder",
            ["model.rope_scaling", "open/config.json", "null"],
        ),
        ("sweep={grid: {model.dim: [32]}}", "model.contradicts_folder", ["sweep: model.dim", "open/config.json"]),
        ("data.sequence_length=65", "config.conflict", ["data.sequence_length (65)", "model.sliding_window (64)"]),
        ("data.tokenizer.vocab_size=400", "model.vocab_too_small", ["model.vocab_size (300)", "400"]),
        ("model.target=my.model", "config.conflict", ["init_from"]),
        ("model.kv_heads=null", "model.contradicts_folder", ["model.kv_heads", "null", "2"]),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_the_folder_is_rejected(
    tmp_path: Path, override: str, code: str, facts: list[str]
) -> None:
    folder_with(tmp_path / "open", model_type="mistral", sliding_window=64)
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: a}\ntrain: {steps: 1}\nmodel: {init_from: open}\ndata: {sequence_length: 64}\n")
    load_config(file)
    with pytest.raises(ConfigError) as raised:
        load_config(file, [override])
    assert raised.value.code == code
    assert all(fact in str(raised.value) for fact in facts)


def test_a_sweep_over_folders_asks_each_of_them_once(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", **LLAMA3}
    first, second = folder_with(tmp_path / "first", rope_scaling=rope), folder_with(tmp_path / "second", hidden_size=64)
    file = tmp_path / "run.yaml"
    text = "run: {name: a}\ntrain: {steps: 1}\nmodel: {dropout: 0.1}\nsweep: {grid: {model.init_from: [%s]}}\n"
    file.write_text(text % "first, null, second")
    config = load_config(file)
    found = [(p.model.init_from, p.model.dim, p.model.rope_scaling is None) for p in make_point_configs(config)]
    assert found == [(first, 32, False), (None, 32, False), (second, 64, True)]
    digests = [point.metadata.model.init_sha256 for point in make_point_configs(config)]
    assert digests[1] is None and digests[0] != digests[2] and config.data.tokenizer.path == first / "tokenizer.json"
    assert [point.model.dropout for point in make_point_configs(config)] == [0.1] * 3
    write_json(second / "tokenizer.json", {"model": {"vocab": {"b": 0}}})
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert raised.value.code == "model.tokenizer_conflict"
    frozen = tmp_path / "config.yaml"
    frozen.write_text(dump_config(config))
    write_json(tmp_path / "run.json", dump_metadata(config))
    for path in (*first.iterdir(), *second.iterdir()):
        path.unlink()
    opened = load_run_config(frozen)
    assert opened == config and make_point_configs(opened) == make_point_configs(config)
    file.write_text(text % "first, 3")
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert raised.value.code == "model.unreadable_folder"
    assert "first/config.json" in str(raised.value)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"eos_token": "<end>"}')
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    folder = folder_with(cache / "snapshots/0a1b")
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{name: a}}\ntrain: {{steps: 1}}\nmodel: {{init_from: {folder}}}\n")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).rename(cache / "blobs" / name)  # as the Hub's cache has it
        (folder / name).symlink_to(f"../../blobs/{name}")
        load_config(file)
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ConfigError) as raised:
            load_config(file)
        assert raised.value.code == "model.link_outside_folder"
        assert str(folder / name) in str(raised.value)
        (folder / name).unlink()
        (cache / "blobs" / name).rename(folder / name)


@pytest.mark.parametrize(
    ("place", "target", "is_allowed"),
    [
        ("models--a--b/snapshots/0a1b", "models--a--b/blobs/f00d", True),
        ("models--a--b/snapshots/0a1b", "models--a--b/snapshots/0a1b/other.json", True),
        ("models--a--b/snapshots/0a1b", "models--a--b/refs/main", False),
        ("models--a--b/snapshots/0a1b", "models--a--b/snapshots/other/config.json", False),
        ("models--a--b/snapshots/0a1b", "models--a--c/blobs/f00d", False),
        ("project/snapshots/0a1b", "project/private.json", False),
        ("project/snapshots/0a1b", "project/blobs/f00d", False),
        ("project/0a1b", "project/blobs/f00d", False),
    ],
)
def test_links_below_snapshots_lead_to_the_blobs_of_a_cache_of_the_hub_only(
    tmp_path: Path, place: str, target: str, is_allowed: bool
) -> None:
    for path in (tmp_path / place, (tmp_path / target).parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    folder, file = folder_with(tmp_path / place), tmp_path / target
    file.parent.mkdir(exist_ok=True)
    (folder / "config.json").rename(file)
    (folder / "config.json").symlink_to(file)
    if is_allowed:
        assert read_model_section(folder)["dim"] == 32
    else:
        with pytest.raises(ModelFolderError) as raised:
            read_model_section(folder)
        assert raised.value.code == "model.link_outside_folder"
        assert str(folder / "config.json") in str(raised.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_what_belongs_to_a_tokenizer_is_no_link_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path / "open")
    (folder / name).write_text("theirs")
    assert read_tokenizer_files(folder)[name] == "theirs"
    (folder / name).unlink()
    (tmp_path / "secret").write_text("mine")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ModelFolderError) as raised:
        read_tokenizer_files(folder)
    assert raised.value.code == "model.link_outside_folder"
    assert str(folder / name) in str(raised.value)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelFolderError) as raised:
        read_tokenizer_files(folder)
    assert raised.value.code == "model.not_a_file"
    assert str(folder / name) in str(raised.value)


def test_what_was_checked_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced by a link behind the check: the file that was opened is read."""
    (tmp_path / "secret").write_text('{"model_type": "mine"}')
    folder, original = folder_with(tmp_path / "open"), os.path.realpath
    with open_inside(folder, "config.json") as file:
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(tmp_path / "secret")
        assert json.loads(file.read_text())["model_type"] != "mine"
    monkeypatch.setattr(
        os.path, "realpath", lambda path: str(folder) if str(path).startswith(str(folder)) else original(path)
    )
    with pytest.raises(ModelFolderError) as raised:
        read_model_section(folder)
    assert raised.value.code == "model.link_outside_folder"


@pytest.mark.parametrize(
    ("index", "replaced", "code", "fact"),
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, [], "model.damaged_index", "'../secret.safetensors'"),
        ({"weight_map": {"a": "/etc/secret.safetensors"}}, [], "model.damaged_index", "'/etc/secret.safetensors'"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, ["pytorch_model.bin"], "model.damaged_index", "pytorch_model.bin"),
        ({"weight_map": {"a": "b.safetensors"}}, [], "model.missing_file", "b.safetensors"),
        ({"weight_map": {"a": "b" * 5000 + ".safetensors"}}, [], "model.damaged_index", "'bbbb"),
        ({"weight_map": {"a": "b\0.safetensors"}}, [], "model.damaged_index", "'b"),
        ({"weight_map": {"a": 1}}, [], "model.damaged_index", "weight_map"),
        ([], [], "model.damaged_index", "weight_map"),
        (None, ["pytorch_model.bin"], "model.no_weights", "pytorch_model.bin is a pickle"),
        (None, [], "model.no_weights", "model.safetensors"),
        ({"weight_map": {"a": "b.safetensors"}}, ["|b.safetensors"], "model.not_a_file", "b.safetensors"),
        (
            {"weight_map": {"a": "b.safetensors"}}, ["|tokenizer.json", "b.safetensors"], "model.not_a_file",
            "tokenizer.json",
        ),
        ({"weight_map": {"a": "b.safetensors"}}, ["|config.json", "b.safetensors"], "model.not_a_file", "config.json"),
        (
            {"weight_map": {"a": "b.safetensors"}}, ["b.safetensors", "config.json"], "model.unsupported_config",
            "config.json",
        ),
        (
            {"weight_map": {"a": "b.safetensors"}}, ["b.safetensors", "tokenizer_config.json"], "model.no_eos_token",
            "eos_token_id 7",
        ),
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_folder_is_rejected(
    tmp_path: Path, index: Any, replaced: list[str], code: str, fact: str
) -> None:
    """Each file of `replaced` is empty; one that begins with `|` is a pipe."""
    folder = folder_with(tmp_path / "open", eos_token_id=7)
    (folder / "model.safetensors").unlink()
    if index is not None:
        write_json(folder / "model.safetensors.index.json", index)
    for name in replaced:
        (folder / name.removeprefix("|")).unlink(missing_ok=True)
        os.mkfifo(folder / name[1:]) if name[0] == "|" else (folder / name).touch()
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: a}\ntrain: {steps: 1}\nmodel: {init_from: open}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert raised.value.code == code
    assert fact in str(raised.value)


@pytest.mark.parametrize("added", ["all", [3], [{"id": 2}], [{"id": "2", "content": "</s>"}], {"2": "</s>"}, [[]]])
def test_malformed_added_tokens_are_named(tmp_path: Path, added: Any) -> None:
    folder = folder_with(tmp_path / "open", eos_token_id=7)
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": added})
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: a}\ntrain: {steps: 1}\nmodel: {init_from: open}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert f"{folder}/tokenizer.json" in str(error.value) and "added_tokens" in str(error.value)
    write_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    with pytest.raises(UserError) as refused:
        build_chat_json(folder / "tokenizer.json", "</s>")
    assert f"{folder}/tokenizer.json" in str(refused.value) and "added_tokens" in str(refused.value)
