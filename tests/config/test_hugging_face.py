"""Tests of converting config.json of open models to the model section and back, and of checking model folders."""

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
SMALL_MODEL: dict[str, Any] = {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "vocab_size": 300}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {**LLAMA3_ROPE, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
        },
        {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3_ROPE, "rope_type": "llama3"}, "head_dim": 64},
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
"""The published config.json of each model (transformers 4), and some of the expected values of the model section."""


def split_section(section: dict[str, Any]) -> tuple[ModelConfig, ModelMetadata]:
    """Return the config and the metadata of a section that `parse_model_config` returned."""
    metadata = {key: value for key, value in section.items() if key in ModelMetadata.model_fields}
    return make_model_config(section), ModelMetadata(**metadata)


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_published_models_are_read_and_written_back(name: str) -> None:
    published_json, expected_values = PUBLISHED_MODELS[name]
    section = parse_model_config(published_json)
    assert section | expected_values == section
    eos_id = published_json["eos_token_id"]
    written_json = build_config_json(
        *split_section(section), published_json["vocab_size"], sequence_length=64, eos_id=eos_id, dtype="bfloat16"
    )
    # The export may set keys that the published file leaves to their defaults, such as head_dim.
    set_values = {key: value for key, value in section.items() if value is not None}
    assert parse_model_config(written_json) | set_values == parse_model_config(written_json)
    # transformers 5 must read the same values from both files, except for keys that do not change the model.
    published_config, written_config = (
        transformers.AutoConfig.for_model(**config).to_dict() for config in (published_json, written_json)
    )
    different_keys = {
        key
        for key in published_config.keys() | written_config.keys()
        if published_config.get(key) != written_config.get(key)
    }
    assert different_keys <= {
        "bos_token_id", "head_dim", "transformers_version", "max_window_layers", "sliding_window", "is_llama_config",
        "rope_interleaved", "_name_or_path", "use_mrope",
    }, {key: (published_config.get(key), written_config.get(key)) for key in different_keys}  # fmt: skip


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_config_saved_by_transformers_5_is_read(tmp_path: Path, family: str) -> None:
    rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": 300}
    getattr(transformers, f"{family}Config")(**sizes, rope_parameters=rope_parameters).save_pretrained(tmp_path)
    section = parse_model_config(json.loads((tmp_path / "config.json").read_bytes()))
    assert section["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert (section["rope_theta"], section["dim"], section["vocab_size"]) == (77.0, 32, 300)


def test_missing_keys_have_the_defaults_of_their_family() -> None:
    minimal = {**SIZES, "vocab_size": 300}
    assert parse_model_config({**minimal, "model_type": "llama"})["kv_heads"] is None  # the number of heads
    assert parse_model_config({**minimal, "model_type": "llama"})["rms_norm_eps"] == 1e-6
    with_8_heads = {**minimal, "num_attention_heads": 8}
    assert parse_model_config({**with_8_heads, "model_type": "mistral"})["kv_heads"] == 8
    assert parse_model_config({**with_8_heads, "model_type": "mistral"})["sliding_window"] == 4096
    with_32_heads = {**minimal, "num_attention_heads": 32, "model_type": "qwen3"}
    assert (parse_model_config(with_32_heads)["kv_heads"], parse_model_config(with_32_heads)["head_dim"]) == (32, 128)


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        ({"model_type": "gemma3"}, 'model_type "gemma3"'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: dynamic"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters: dynamic"),
        (
            {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"rope_type": "longrope"}},
            "rope_scaling: longrope",  # if both keys exist, transformers also uses this one
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters: dynamic"),
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
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000"),
        ({"intermediate_size": 2**21}, "intermediate_size 2097152"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "kv_heads (3)"),
    ],
)
def test_an_unsupported_value_raises_an_error_that_names_the_key(change: dict[str, Any], expected_text: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_model_config({**SMALL_MODEL, **change})
    assert expected_text in str(raised.value)


def test_malformed_values_raise_no_error_except_value_and_type_errors() -> None:
    keys = ["model_type", "architectures", "layer_types", "rope_scaling", "rope_parameters", "rope_theta", "head_dim"]
    for key in [*keys, "hidden_act", "sliding_window", "attention_bias", "tie_word_embeddings", *SMALL_MODEL]:
        for value in ([["a"]], {"type": ["a"]}, "text", -1, 1.5, float("nan")):
            for family in ("llama", "qwen3"):
                with contextlib.suppress(ValueError, TypeError):
                    make_model_config(parse_model_config({**SMALL_MODEL, "model_type": family, key: value}))


@pytest.mark.parametrize(
    ("changes", "sliding_window", "full_attention_layers"),
    [
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, 64, 1),
        ({"use_sliding_window": True, "sliding_window": 64}, 64, 28),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, 4096, 1),
        ({"sliding_window": 64}, None, None),
        ({"model_type": "mistral", "sliding_window": 64}, 64, None),
        ({"model_type": "mistral", "sliding_window": None}, None, None),
        ({"model_type": "llama", "sliding_window": 64}, None, None),  # transformers also ignores the key in this family
    ],
)
def test_a_sliding_window_is_written_as_it_was_read(
    changes: dict[str, Any], sliding_window: int | None, full_attention_layers: int | None
) -> None:
    original_json = {**SMALL_MODEL, "model_type": "qwen2", **changes}
    section = parse_model_config(original_json)
    assert (section["sliding_window"], section["max_window_layers"]) == (sliding_window, full_attention_layers)
    written_json = build_config_json(*split_section(section), 300, sequence_length=64, eos_id=2, dtype="float32")
    assert parse_model_config(written_json) | {"head_dim": None, "max_position_embeddings": None} == section
    original_config, written_config = (
        transformers.AutoConfig.for_model(**config) for config in (original_json, written_json)
    )
    assert getattr(original_config, "layer_types", None) == getattr(written_config, "layer_types", None)


def write_model_folder(path: Path, **config: Any) -> Path:
    """Create a folder with config.json, an empty weight file and a tokenizer, and return its path.

    Args:
        path: the folder to create.
        config: the keys of config.json to change.
    """
    path.mkdir()
    write_json(path / "config.json", {**SMALL_MODEL, **config})
    (path / "model.safetensors").touch()
    write_json(path / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 2, "content": "</s>"}]})
    write_json(path / "tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    return path


def test_the_config_of_a_run_loads_without_the_model_folder(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "open", eos_token_id=[2, 3])
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: a}\ntrain: {steps: 1}\nmodel: {init_from: open, dropout: 0.1, layers: 2}\n")
    config = load_config(file)
    assert (config.model.dim, config.model.num_kv_heads, config.model.dropout) == (32, 2, 0.1)
    assert config.model.init_from == folder
    assert config.data.tokenizer.path == folder / "tokenizer.json"
    assert config.data.tokenizer.eos_token == "<end>"
    (folder / "tokenizer_config.json").unlink()
    assert load_config(file).data.tokenizer.eos_token == "</s>"
    frozen_config_file = tmp_path / "config.yaml"
    frozen_config_file.write_text(dump_config(config))
    write_json(tmp_path / "run.json", dump_metadata(config))
    for path in folder.iterdir():
        path.unlink()
    assert load_run_config(frozen_config_file) == config
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert raised.value.code == "model.unreadable_folder"
    assert str(file) in str(raised.value) and "open/config.json" in str(raised.value)


@pytest.mark.parametrize(
    ("override", "code", "expected_texts"),
    [
        ("model.dim=64", "model.contradicts_folder", ["model.dim", "64", "32", "open/config.json"]),
        (
            "model.rope_scaling={rope_type: linear, factor: 2.0}", "model.contradicts_folder",
            ["model.rope_scaling", "open/config.json", "null"],
        ),
        ("sweep={grid: {model.dim: [32]}}", "model.contradicts_folder", ["sweep: model.dim", "open/config.json"]),
        ("data.tokenizer.vocab_size=400", "model.vocab_too_small", ["model.vocab_size (300)", "400"]),
        ("model.target=my.model", "config.conflict", ["init_from"]),
        ("model.kv_heads=null", "model.contradicts_folder", ["model.kv_heads", "null", "2"]),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_the_folder_is_rejected(
    tmp_path: Path, override: str, code: str, expected_texts: list[str]
) -> None:
    write_model_folder(tmp_path / "open", model_type="mistral", sliding_window=64)
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: a}\ntrain: {steps: 1}\nmodel: {init_from: open}\ndata: {sequence_length: 64}\n")
    load_config(file)
    with pytest.raises(ConfigError) as raised:
        load_config(file, [override])
    assert raised.value.code == code
    assert all(expected_text in str(raised.value) for expected_text in expected_texts)


def test_the_config_of_a_sweep_over_model_folders_loads_without_the_folders(tmp_path: Path) -> None:
    rope_scaling = {"rope_type": "llama3", **LLAMA3_ROPE}
    first_folder = write_model_folder(tmp_path / "first", rope_scaling=rope_scaling)
    second_folder = write_model_folder(tmp_path / "second", hidden_size=64)
    file = tmp_path / "run.yaml"
    text = "run: {name: a}\ntrain: {steps: 1}\nmodel: {dropout: 0.1}\nsweep: {grid: {model.init_from: [%s]}}\n"
    file.write_text(text % "first, null, second")
    config = load_config(file)
    points = make_point_configs(config)
    models = [(point.model.init_from, point.model.dim, point.model.rope_scaling is None) for point in points]
    assert models == [(first_folder, 32, False), (None, 32, False), (second_folder, 64, True)]
    digests = [point.metadata.model.init_sha256 for point in points]
    assert digests[1] is None and digests[0] != digests[2]
    assert config.data.tokenizer.path == first_folder / "tokenizer.json"
    assert [point.model.dropout for point in points] == [0.1] * 3
    write_json(second_folder / "tokenizer.json", {"model": {"vocab": {"b": 0}}})
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert raised.value.code == "model.tokenizer_conflict"
    frozen_config_file = tmp_path / "config.yaml"
    frozen_config_file.write_text(dump_config(config))
    write_json(tmp_path / "run.json", dump_metadata(config))
    for path in (*first_folder.iterdir(), *second_folder.iterdir()):
        path.unlink()
    run_config = load_run_config(frozen_config_file)
    assert run_config == config and make_point_configs(run_config) == points
    file.write_text(text % "first, 3")
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert raised.value.code == "model.unreadable_folder"
    assert "first/config.json" in str(raised.value)


def test_a_link_out_of_the_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"eos_token": "<end>"}')
    hub_cache = tmp_path / "models--a--b"
    (hub_cache / "blobs").mkdir(parents=True)
    (hub_cache / "snapshots").mkdir()
    folder = write_model_folder(hub_cache / "snapshots/0a1b")
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{name: a}}\ntrain: {{steps: 1}}\nmodel: {{init_from: {folder}}}\n")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).rename(hub_cache / "blobs" / name)  # the layout of the cache of the Hugging Face Hub
        (folder / name).symlink_to(f"../../blobs/{name}")
        load_config(file)
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ConfigError) as raised:
            load_config(file)
        assert raised.value.code == "model.link_outside_folder"
        assert str(folder / name) in str(raised.value)
        (folder / name).unlink()
        (hub_cache / "blobs" / name).rename(folder / name)


@pytest.mark.parametrize(
    ("folder_path", "target_path", "is_allowed"),
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
def test_links_may_lead_only_into_the_folder_or_to_blobs_of_its_hub_cache(
    tmp_path: Path, folder_path: str, target_path: str, is_allowed: bool
) -> None:
    for path in (tmp_path / folder_path, (tmp_path / target_path).parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    folder = write_model_folder(tmp_path / folder_path)
    file = tmp_path / target_path
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
def test_a_tokenizer_file_that_is_a_link_out_of_the_folder_or_a_pipe_is_rejected(tmp_path: Path, name: str) -> None:
    folder = write_model_folder(tmp_path / "open")
    (folder / name).write_text("original")
    assert read_tokenizer_files(folder)[name] == "original"
    (folder / name).unlink()
    (tmp_path / "secret").write_text("secret text")
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


def test_a_file_that_is_replaced_after_the_check_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a link replaces the file after it was opened, the opened file is read.

    A check by path is not enough. The test replaces `realpath`, so that it reports the folder for each path in it. The
    link must be rejected nevertheless, because the opened file is outside of the folder.
    """
    (tmp_path / "secret").write_text('{"model_type": "secret"}')
    folder = write_model_folder(tmp_path / "open")
    real_realpath = os.path.realpath
    with open_inside(folder, "config.json") as file:
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(tmp_path / "secret")
        assert json.loads(file.read_text())["model_type"] != "secret"
    monkeypatch.setattr(
        os.path, "realpath", lambda path: str(folder) if str(path).startswith(str(folder)) else real_realpath(path)
    )
    with pytest.raises(ModelFolderError) as raised:
        read_model_section(folder)
    assert raised.value.code == "model.link_outside_folder"


@pytest.mark.parametrize(
    ("index", "replaced_names", "code", "expected_text"),
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
def test_a_damaged_or_malicious_folder_is_rejected(
    tmp_path: Path, index: Any, replaced_names: list[str], code: str, expected_text: str
) -> None:
    """Write `index`, if any, as model.safetensors.index.json. Replace the files `replaced_names` with empty files.

    A file whose name begins with `|` is replaced with a pipe.
    """
    folder = write_model_folder(tmp_path / "open", eos_token_id=7)
    (folder / "model.safetensors").unlink()
    if index is not None:
        write_json(folder / "model.safetensors.index.json", index)
    for name in replaced_names:
        (folder / name.removeprefix("|")).unlink(missing_ok=True)
        os.mkfifo(folder / name[1:]) if name[0] == "|" else (folder / name).touch()
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: a}\ntrain: {steps: 1}\nmodel: {init_from: open}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert raised.value.code == code
    assert expected_text in str(raised.value)


@pytest.mark.parametrize(
    "added_tokens", ["all", [3], [{"id": 2}], [{"id": "2", "content": "</s>"}], {"2": "</s>"}, [[]]]
)
def test_malformed_added_tokens_raise_an_error_that_names_the_file(tmp_path: Path, added_tokens: Any) -> None:
    folder = write_model_folder(tmp_path / "open", eos_token_id=7)
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": added_tokens})
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: a}\ntrain: {steps: 1}\nmodel: {init_from: open}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert f"{folder}/tokenizer.json" in str(caught.value) and "added_tokens" in str(caught.value)
    write_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    with pytest.raises(UserError) as raised:
        build_chat_json(folder / "tokenizer.json", "</s>")
    assert f"{folder}/tokenizer.json" in str(raised.value) and "added_tokens" in str(raised.value)


def test_a_window_in_some_blocks_only_is_not_exported_as_mistral() -> None:
    model = ModelConfig(dim=32, heads=4, layers=4, sliding_window=16, max_window_layers=2)
    with pytest.raises(UserError) as raised:
        build_config_json(model, ModelMetadata(), 300, sequence_length=64, eos_id=2, dtype="float32")
    assert raised.value.code == "export.unsupported_model" and "model.max_window_layers 2" in str(raised.value)
