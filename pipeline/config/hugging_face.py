"""Read and write models in Hugging Face's format: convert config.json from and to the section `model`, find files.

    config.json                                        the family and the sizes of the model
    model.safetensors, or model.safetensors.index.json and the files that it names
    tokenizer.json, tokenizer_config.json              the tokenizer, and the token that ends a text

If `model.init_from` is set, config.json sets the section `model` when the config is first read. The run stores these
values and a hash of config.json, and does not derive them from the folder again. A key of config.json that the decoder
does not support is an error, because ignoring it would silently train another model. Keys and defaults follow the
configuration classes of transformers 4.57 and 5.23. The login node imports this module, so it does not import torch.

The package transformers builds models of all other families (`model.backend: transformers`). It is imported only for
these models. Nothing from the folder is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular_file, parse_json_or_none, read_json, sha256_file, sha256_json
from pipeline.base.ownership import path_through_fd
from pipeline.config.sections import ModelConfig, ModelMetadata

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_WEIGHTS_FILE = "model.safetensors"
_MAX_NAME_BYTES = 255
"""Largest length of a file name in bytes (NAME_MAX of Linux)."""
TRANSFORMERS_VERSION = "5.0.0"
"""`transformers_version` of an export. If config.json has no version or an older one, transformers 4.57.3 and later
warn of "incorrect tokenization", because old tokenizers of Mistral had a wrong regular expression. Transformers 4 also
supports all keys of an export."""
TOKENIZER_SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Further files of a tokenizer. Training does not change these files, so an export copies them."""
_QWEN = {
    "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen3": ("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}),
}
"""`model_type` → the class of transformers, and the defaults of this class for keys that may be missing. Many models,
such as SmolLM2, have the type llama."""
_SAME_VALUES = {
    "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size", "max_position_embeddings": "max_position_embeddings", "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings", "initializer_range": "initializer_range",
}  # fmt: skip
"""Key of the section `model` → key of config.json that has the same value."""
_MAX_VALUES = {"layers": 2**12, "vocab_size": 2**24, "max_position_embeddings": 2**40}
"""Largest accepted values; other sizes may be up to `_MAX_SIZE`. Larger values would exhaust the memory before training
starts."""
_MAX_SIZE = 2**20
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
"""The defaults of keys that may be missing, for all families."""
_REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_FIXED_VALUES = {
    "hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0, "partial_rotary_factor": 1, "use_qk_norm": False,
    "rope_interleaved": False, "is_llama_config": True, "is_encoder_decoder": False, "is_decoder": False,
    "add_cross_attention": False, "tie_encoder_decoder": False,
}  # fmt: skip
"""Keys of config.json that must have this value or be null."""
_IGNORED_KEYS = {
    *_SAME_VALUES.values(), "model_type", "architectures", "attention_bias", "sliding_window", "use_sliding_window",
    "layer_types", "rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "max_window_layers", "_name_or_path",
    "transformers.js_config", "_attn_implementation_autoset", "attn_implementation", "chunk_size_feed_forward",
    "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type", "max_length",
    "do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "tokenizer_class", "max_sequence_length",
}  # fmt: skip
"""Keys of config.json that this module reads, or that do not affect what the model computes. A key is an error if it is
neither in this set nor in `_FIXED_VALUES`, unless its value is null."""
_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
    ),
}  # fmt: skip
"""Type of `rope_scaling` → its keys."""


_REJECTED_KEYS = ("transformers_weights", "fusion_config", "distributed_config", "kernel_config")
"""Keys of config.json with which transformers would read other files or change the model."""


class ModelFolderError(UserError):
    """A folder does not contain a usable model. The message names the file and the key."""


def fill_from_folder(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config `values` with the keys that the folders of `model.init_from` set. A sweep may name folders too.

    If `values` contain the hash of config.json, the folder was read before and is not read again. With `model.target`,
    no folder is read either. If only the sweep names folders, the section `model` gets the values of the first folder.
    Without `data.tokenizer`, the tokenizer of the folder is used.

    Raises:
        ModelFolderError: if a folder cannot be used, or if a key of `model` contradicts the folder.
    """
    try:
        return _fill_from_folder(values)
    except ModelFolderError as error:
        raise ModelFolderError(error.code, f"model.init_from: {error}") from error


def _fill_from_folder(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `fill_from_folder`, or raise its errors without `model.init_from` in the message."""
    model, data, sweep = (values.get(section) or {} for section in ("model", "data", "sweep"))
    if not all(isinstance(section, Mapping) for section in (model, data, sweep)):
        return dict(values)  # the later check of types reports a section that is not a mapping
    grids = [sweep[kind] for kind in ("grid", "random") if isinstance(sweep.get(kind), Mapping)]
    folder_lists = [grid["model.init_from"] for grid in grids if isinstance(grid.get("model.init_from"), list)]
    swept_folders = [folder for folders in folder_lists for folder in folders if isinstance(folder, str)]
    folders = [folder for folder in [model.get("init_from"), *swept_folders] if isinstance(folder, str)]
    if not folders or model.get("target") is not None or model.get("init_sha256") is not None:
        return dict(values)
    sections = {folder: read_model_section(Path(folder), model.get("backend")) for folder in folders}
    for folder, section in sections.items():
        _check_not_contradicted(folder, section, model, grids)
    new_values = {**values, "model": {**model, "init_from": folders[0], **sections[folders[0]]}}
    if swept_folders:
        new_values["sweep"] = {**sweep, "sources": {folder: sections[folder] for folder in swept_folders}}
    if data.get("tokenizer") is None:
        tokenizers = [
            _read_tokenizer_section(Path(folder), section["vocab_size"]) for folder, section in sections.items()
        ]
        new_values["data"] = {**data, "tokenizer": tokenizers[0]}
        if len({(sha256_file(tokenizer["path"]), tokenizer["eos_token"]) for tokenizer in tokenizers}) > 1:
            raise ModelFolderError(
                "model.tokenizer_conflict",
                "all points of a sweep use the same tokens, but these folders have different tokenizers",
            )
    return new_values


def _check_not_contradicted(
    folder: str, section: Mapping[str, Any], model: Mapping[str, Any], grids: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ModelFolderError if the config sets a key to another value than the folder, or if a sweep varies the key.

    Args:
        folder: the folder with the model.
        section: the keys of the section `model` that the folder sets.
        model: the section `model` of the config.
        grids: the mappings `sweep.grid` and `sweep.random` that the config has.
    """
    source = f"{Path(folder, CONFIG_FILE)} of model.init_from"
    for key, value in section.items():
        if key in model and model[key] != value:
            raise ModelFolderError(
                "model.contradicts_folder",
                f"model.{key} is {json.dumps(model[key])}, but {json.dumps(value)} in {source}: remove it",
            )
        if any(f"model.{key}" in grid for grid in grids):
            raise ModelFolderError(
                "model.contradicts_folder", f"sweep: model.{key} cannot vary, because {source} sets it: remove it"
            )


def read_model_section(folder: Path, backend: str | None = None) -> dict[str, Any]:
    """Return the values that a folder sets in the section `model`, including metadata (`ModelMetadata`).

    Args:
        folder: the folder.
        backend: the key `model.backend`; None if the config does not set it.

    Raises:
        ModelFolderError: if config.json cannot be read, if the backend does not support the model, or if the files
            with the weights are missing.
    """
    try:
        with open_inside(folder, CONFIG_FILE) as file:
            content = file.read_bytes()
        parsed_content = parse_json_or_none(content)
        if uses_transformers(parsed_content, backend):
            section = parse_transformers_config(parsed_content)
        else:
            section = parse_model_config(parsed_content)
    except OSError as error:
        message = f"{folder / CONFIG_FILE}: cannot read it: {error.strerror}; name a folder with the files of a model"
        raise ModelFolderError("model.unreadable_folder", message) from error
    except (ValueError, TypeError) as error:  # TypeError: the value of a key is a list instead of a name
        raise ModelFolderError("model.unsupported_config", f"{folder / CONFIG_FILE}: {error}") from error
    return {**section, "init_sha256": hashlib.sha256(content).hexdigest(), "init_files": hash_weight_stats(folder)}


def uses_transformers(content: Any, backend: str | None) -> bool:
    """Return True if transformers builds the model that the content of a config.json describes.

    Args:
        content: the parsed content.
        backend: the key `model.backend`; None if the config does not set it.
    """
    if backend is not None:
        return backend == "transformers"
    family = content.get("model_type") if isinstance(content, dict) else None
    return isinstance(family, str) and family not in FAMILIES


def make_model_config(section: Mapping[str, Any]) -> ModelConfig:
    """Return the section `model` without metadata, from a result of `read_model_section`."""
    return ModelConfig(**{key: value for key, value in section.items() if key in ModelConfig.model_fields})


def hash_weight_stats(folder: Path) -> str:
    """Return a hash of the names, sizes and modification times of the weight files, without reading their content.

    Times are in whole seconds, because some file systems store no fractions or do not show them to other hosts.
    """
    files = {name: (folder / name).stat() for name in list_weight_files(folder)}
    return sha256_json({name: [file.st_size, int(file.st_mtime)] for name, file in files.items()})


def _read_tokenizer_section(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the section `data.tokenizer` for the tokenizer of the folder.

    Raises ModelFolderError if the tokenizer is missing or damaged, or has more than `vocab_size` token IDs.
    """
    file = folder / TOKENIZER_FILE
    eos_token = _read_eos_token(folder)
    if (id_count := count_tokenizer_ids(file)) is not None and id_count > vocab_size:
        raise ModelFolderError(
            "model.tokenizer_conflict",
            f"{folder / CONFIG_FILE}: vocab_size {vocab_size} is less than the {id_count} ids of {file}",
        )
    return {"kind": "file", "path": str(file), "eos_token": eos_token}


@contextmanager
def open_inside(folder: Path, name: str) -> Iterator[Path]:
    """Open a file in the folder and yield a path that leads to exactly this file (see `path_through_fd`).

    The file may be a link to another file in the folder. In the cache of the Hugging Face Hub, a link may also lead
    from `models--ORG--NAME/snapshots/COMMIT` to `models--ORG--NAME/blobs`.

    Raises:
        FileNotFoundError: if the file does not exist.
        ModelFolderError: if the file is a link out of the folder, or not a regular file.
    """
    path = folder / name
    root = Path(os.path.realpath(folder))
    hub_cache = root.parents[1] if root.parent.name == "snapshots" else root
    is_in_hub_cache = hub_cache.name.startswith("models--")
    try:
        stream = open_regular_file(path)
    except (UserError, IsADirectoryError):
        raise ModelFolderError("model.not_a_file", f"{path} is not a regular file: replace it with one") from None
    with stream, path_through_fd(stream.fileno(), path) as fd_path:
        real_path = Path(os.readlink(fd_path))
        is_in_blobs = is_in_hub_cache and real_path.is_relative_to(hub_cache / "blobs")
        if not real_path.is_relative_to(root) and not is_in_blobs:
            allowed_folder = hub_cache if is_in_hub_cache else root
            raise ModelFolderError(
                "model.link_outside_folder",
                f"{path} is a link that leads out of {allowed_folder}: replace it with the file",
            )
        yield fd_path


def read_inside(folder: Path, name: str) -> Any:
    """Return the JSON value of a file in the folder; None if the file does not exist or is not valid JSON.

    Raises ModelFolderError if the file is a link out of the folder, or not a regular file.
    """
    with suppress(FileNotFoundError), open_inside(folder, name) as file:
        return parse_json_or_none(file.read_bytes())
    return None


def _has_file(folder: Path, name: str) -> bool:
    """Return True if the file exists in the folder.

    Raises ModelFolderError if the file is a link out of the folder, or not a regular file.
    """
    with suppress(FileNotFoundError), open_inside(folder, name):
        return True
    return False


def parse_model_config(content: Any) -> dict[str, Any]:
    """Return the section `model`, including metadata, for the parsed content of a config.json.

    If config.json does not set a key, the default of the model family is used, or None if there is no default. Raises
    ValueError, which names the key of config.json, if a required key is missing or a value is not supported.
    """
    if not isinstance(content, dict):
        raise ValueError("the content is not a JSON object: download the folder again")
    family = content.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {json.dumps(family)} is not supported; supported are {', '.join(FAMILIES)}")
    architecture, defaults = FAMILIES[family]
    if (content.get("architectures") or [architecture]) != [architecture]:
        raise ValueError(f"architectures {json.dumps(content['architectures'])} should be {json.dumps([architecture])}")
    for key, value in content.items():
        is_allowed = value == _FIXED_VALUES[key] if key in _FIXED_VALUES else key in _IGNORED_KEYS
        if value is not None and not is_allowed:
            problem = "is not supported" if key in _FIXED_VALUES else "is not a known key and may change the model"
            raise ValueError(f"{key} {json.dumps(value)[:80]} {problem}")
    if missing := [key for key in _REQUIRED_KEYS if content.get(key) is None]:
        raise ValueError(f"{missing[0]} is missing")
    if unknown_types := set(content.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types {min(unknown_types)} is not supported")
    hf_config = {**_DEFAULTS, **defaults, **content}
    section = {key: hf_config.get(name) for key, name in _SAME_VALUES.items()}
    section["qk_norm"] = family == "qwen3"
    section["attention_bias"] = "qkv" if family == "qwen2" else "all" if hf_config.get("attention_bias") else "none"
    # Mistral has a window without the key use_sliding_window, and Llama never has a window.
    has_window = hf_config.get("use_sliding_window", True) and family != "llama"
    window = hf_config.get("sliding_window") if has_window else None
    layer_types = hf_config.get("layer_types")
    full_layers = hf_config.get("max_window_layers")
    if layer_types:
        # In these families, only the first layers may have full attention. The layer types are then sorted, because
        # "full_attention" comes before "sliding_attention".
        if window is not None and layer_types != sorted(layer_types):
            raise ValueError("layer_types is not supported if layers with full attention follow others")
        full_layers = layer_types.count("full_attention")
    section |= {"sliding_window": window, "max_window_layers": None if window is None else full_layers}
    section |= _parse_rope(hf_config)
    _check_model_section(section)
    return section


def parse_transformers_config(content: Any) -> dict[str, Any]:
    """Return the section `model`, including metadata, for a model that transformers builds.

    Args:
        content: the parsed content of a config.json.

    Raises:
        ValueError: if the installed transformers has no causal language model for the content, or Sluice cannot train
            the model.
    """
    if not isinstance(content, dict):
        raise ValueError("the content is not a JSON object: download the folder again")
    family = content.get("model_type")
    try:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise ValueError(
            f"model_type {json.dumps(family)} needs the package transformers ({error}): install "
            f"'sluice[transformers]', or use a model of type {', '.join(FAMILIES)}"
        ) from None
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family) if isinstance(family, str) else None
    if architecture is None:
        raise ValueError(
            f"model_type {json.dumps(family)} is not supported; supported are {', '.join(FAMILIES)}, and the causal "
            "language models of the installed transformers"
        )
    if (content.get("architectures") or [architecture]) != [architecture] or not is_text_model(architecture):
        architectures = json.dumps(content.get("architectures") or [architecture])
        raise ValueError(f"architectures {architectures}: only causal language models of text can be trained")
    if content.get("quantization_config") is not None:
        raise ValueError("quantization_config is not supported: use the model with weights in bf16 or fp32")
    if keys := [key for key in _REJECTED_KEYS if content.get(key) is not None]:
        raise ValueError(f"{keys[0]} is not supported: remove it")
    if content.get("output_router_logits"):
        raise ValueError("output_router_logits true is not supported, because it adds a loss: set it to false")
    try:
        hf_config = AutoConfig.for_model(**content)
        sizes = {name: getattr(hf_config, name) for name in ("num_hidden_layers", "vocab_size")}
    except Exception as error:  # The classes of transformers raise errors of many types.
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(f"transformers cannot read it: {type(error).__name__}: {first_line}") from error
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value <= _MAX_VALUES["vocab_size"]:
            raise ValueError(f"{name} {json.dumps(value)} is not the size of a model")
    longest = getattr(hf_config, "max_position_embeddings", None)
    return {
        "backend": "transformers",
        "options": {**content, "architectures": [architecture]},
        "layers": sizes["num_hidden_layers"],
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": longest if type(longest) is int and longest > 0 else None,
    }


def is_text_model(architecture: str) -> bool:
    """Return True if the class of transformers is a language model of text, and not also of images or sound."""
    return not architecture.endswith("ForConditionalGeneration")


def _check_model_section(section: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the key of config.json, if a value has the wrong type or is out of range."""
    for section_class in (ModelConfig, ModelMetadata):
        values = {key: value for key, value in section.items() if key in section_class.model_fields}
        try:
            section_class.model_validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            details = error.errors()[0]
            names = [f"{_SAME_VALUES.get(str(key), str(key))}: " for key in details["loc"][:1]]
            raise ValueError("".join([*names, details["msg"].removeprefix("Value error, ")])) from None
    for key, name in _SAME_VALUES.items():
        value = section[key]
        max_value = _MAX_VALUES.get(key, _MAX_SIZE)
        if isinstance(value, int) and value > max_value:
            raise ValueError(f"{name} {value} is more than {max_value}, which no model has")


def _parse_rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys `rope_theta` and `rope_scaling` of the section `model` for the content of a config.json.

    Transformers 5 writes both values into `rope_parameters`. Transformers 4 writes them into `rope_theta` and
    `rope_scaling`. Raises ValueError if the decoder does not support the rotary positions.
    """
    # If a file has both keys, transformers uses `rope_scaling`, so this function does the same.
    key = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    rope = dict(hf_config.get(key) or {})
    theta = rope.pop("rope_theta", None) or hf_config.get("rope_theta") or 10_000.0
    rope_type = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    if rope.pop("partial_rotary_factor", None) not in (None, 1) or any(isinstance(v, dict) for v in rope.values()):
        raise ValueError(f"{key} {json.dumps(hf_config[key])} is not supported")
    if rope_type == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if rope_type not in _ROPE_KEYS:
        raise ValueError(f"{key}: {rope_type} is not supported; supported are default, {', '.join(_ROPE_KEYS)}")
    keys = [name for name in _ROPE_KEYS[rope_type] if rope.get(name) is not None]
    scaling = {"rope_type": rope_type, **{name: rope[name] for name in keys}}
    if rope_type == "yarn":
        if unknown_keys := [name for name, value in rope.items() if name not in scaling and value is not None]:
            raise ValueError(f"{key}: {unknown_keys[0]} is not supported for yarn")
        scaling.setdefault("original_max_position_embeddings", hf_config.get("max_position_embeddings"))
    return {"rope_theta": theta, "rope_scaling": scaling}


def build_config_json(
    model: ModelConfig,
    metadata: ModelMetadata,
    vocab_size: int,
    sequence_length: int,
    eos_id: int | list[int],
    dtype: str,
) -> dict[str, Any]:
    """Return the content of a config.json for a trained language model.

    For the decoder, transformers 4 and 5 can read it. For a model of transformers, it is the content of the folder from
    which training started, with the new type.

    Args:
        model: the section `model`.
        metadata: the other values of the config.json from which the section `model` was read.
        vocab_size: the number of rows of the embedding.
        sequence_length: the longest sequence in tokens, used if `metadata.max_position_embeddings` is None.
        eos_id: the id, or several ids, of the tokens that end a text.
        dtype: the type of the weights, such as `float32`.

    Raises:
        UserError: if no supported model family has this combination of features.
    """
    if model.backend == "transformers":
        type_key = "dtype" if "dtype" in model.options else "torch_dtype"
        return dict(sorted({**model.options, type_key: dtype}.items()))
    family = "qwen3" if model.qk_norm else "qwen2" if model.attention_bias == "qkv" else "llama"
    if family == "llama" and model.sliding_window is not None:
        family = "mistral"
    has_bias = model.attention_bias != "none"
    has_window = model.sliding_window is not None
    if family == "mistral" and model.max_window_layers:
        raise UserError(
            "export.unsupported_model",
            f"model.max_window_layers {model.max_window_layers}: the format of mistral, which has the other features "
            "of this model, has the window in all blocks",
        )
    if (family == "qwen3" and model.attention_bias == "qkv") or (family == "mistral" and has_bias):
        raise UserError(
            "export.unsupported_model",
            f"model.attention_bias {model.attention_bias}: the format of {family}, which has the other features of "
            "this model, does not support it",
        )
    values = {**model.model_dump(mode="json"), "kv_heads": model.num_kv_heads, "head_dim": model.head_size}
    values |= {"intermediate_size": model.ffn_size, "vocab_size": vocab_size}
    values["max_position_embeddings"] = metadata.max_position_embeddings or sequence_length
    scaling = None
    if model.rope_scaling is not None:
        keys = {"rope_type", *_ROPE_KEYS[model.rope_scaling.rope_type]}
        scaling = model.rope_scaling.model_dump(mode="json", exclude_none=True, include=keys)
    content = {name: values[key] for key, name in _SAME_VALUES.items()}
    content |= {"architectures": [FAMILIES[family][0]], "model_type": family, "hidden_act": "silu", "use_cache": True}
    content |= {"attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": eos_id, "torch_dtype": dtype}
    content |= {"rope_theta": model.rope_theta, "rope_scaling": scaling, "transformers_version": TRANSFORMERS_VERSION}
    if family in ("llama", "qwen3"):
        content["attention_bias"] = has_bias
    if family.startswith("qwen"):
        content["use_sliding_window"] = has_window
    if has_window:
        content["sliding_window"] = model.sliding_window
        content |= {} if family == "mistral" else {"max_window_layers": model.max_window_layers or 0}
    return dict(sorted(content.items()))


def list_weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights.

    Raises ModelFolderError if the folder has no safetensors weights, if the index is damaged, or if a file is missing
    or outside the folder.
    """
    if _has_file(folder, INDEX_FILE):
        index = read_inside(folder, INDEX_FILE)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        has_names = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
        if not weight_map or not has_names:
            raise ModelFolderError(
                "model.damaged_index", f"{folder / INDEX_FILE} has no weight_map from tensors to files"
            )
        names = sorted(set(weight_map.values()))
        if invalid_names := [name for name in names if not _is_safetensors_name(name)]:
            shown_name = invalid_names[0] if len(invalid_names[0]) <= 80 else f"{invalid_names[0][:80]}…"
            raise ModelFolderError(
                "model.damaged_index",
                f"{folder / INDEX_FILE} names {shown_name!r}, which is not a safetensors file in that folder",
            )
    elif _has_file(folder, SINGLE_WEIGHTS_FILE):
        names = [SINGLE_WEIGHTS_FILE]
    else:
        pickles = sorted(path.name for ending in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{ending}"))
        reason = "neither exists"
        if pickles:
            reason = f"{pickles[0]} is a pickle, which could execute any code, so it is not read"
        raise ModelFolderError(
            "model.no_weights", f"{folder} must contain {SINGLE_WEIGHTS_FILE}, or {INDEX_FILE} and its files; {reason}"
        )
    if missing := [name for name in names if not _has_file(folder, name)]:
        raise ModelFolderError("model.missing_file", f"{folder / missing[0]} is missing: download the folder again")
    return names


def _is_safetensors_name(name: str) -> bool:
    """Return True if `name` is a valid file name without folders that ends in `.safetensors`."""
    is_possible = Path(name).name == name and "\0" not in name and len(os.fsencode(name)) <= _MAX_NAME_BYTES
    return is_possible and name.endswith(".safetensors")


def read_tokenizer_files(folder: Path) -> dict[str, str]:
    """Return the files in TOKENIZER_SIDE_FILES that the folder contains: name → text."""
    texts = {}
    for name in TOKENIZER_SIDE_FILES:
        with suppress(FileNotFoundError), open_inside(folder, name) as file:
            texts[name] = file.read_text("utf-8", "replace")
    return texts


def read_token_ids(folder: Path) -> dict[str, Any]:
    """Return the keys of config.json with the IDs of the tokens that begin, end and pad a text."""
    values = read_inside(folder, CONFIG_FILE) or {}
    return {key: values[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in values}


def _read_eos_token(folder: Path) -> str:
    """Return the token that ends a text: from tokenizer_config.json, or by its ID in config.json.

    Raises ModelFolderError if the folder has no tokenizer, or if neither file names the token.
    """
    tokenizer_file = folder / TOKENIZER_FILE
    if not _has_file(folder, TOKENIZER_FILE):
        raise ModelFolderError(
            "model.no_tokenizer",
            f"{tokenizer_file} is missing: save it with AutoTokenizer of transformers, or set data.tokenizer",
        )
    side_file = read_inside(folder, "tokenizer_config.json")
    token = side_file.get("eos_token") if isinstance(side_file, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    eos_id = None
    if token is None:
        ids = (read_inside(folder, CONFIG_FILE) or {}).get("eos_token_id")
        eos_id = ids[0] if isinstance(ids, list) and ids else ids
        added_tokens = check_added_tokens(tokenizer_file, read_inside(folder, TOKENIZER_FILE))
        token = next((entry["content"] for entry in added_tokens if entry["id"] == eos_id), None)
    if not isinstance(token, str):
        reason = "neither tokenizer_config.json nor config.json has the token that ends a text"
        if eos_id is not None:
            reason = f"eos_token_id {json.dumps(eos_id)} of config.json is not among added_tokens"
        raise ModelFolderError("model.no_eos_token", f"{tokenizer_file}: {reason}: set data.tokenizer")
    return token


def check_added_tokens(tokenizer: Path, content: Any) -> list[dict[str, Any]]:
    """Return the list `added_tokens` in the content of a `tokenizer.json`; an empty list if there is none.

    Args:
        tokenizer: the path of the file, for the message.
        content: the parsed content of the file.

    Raises:
        ModelFolderError: if an entry has no whole number `id` or no text `content`. The message names the entry.
    """
    added_tokens = content.get("added_tokens") if isinstance(content, dict) else None
    # a value that is not a list is checked as if it were the only entry
    tokens = added_tokens if isinstance(added_tokens, list) else [added_tokens] if added_tokens else []
    for number, token in enumerate(tokens):
        fields = token if isinstance(token, dict) else {}
        if type(fields.get("id")) is not int or not isinstance(fields.get("content"), str):
            raise ModelFolderError(
                "model.invalid_tokenizer",
                f"{tokenizer}: entry {number} of added_tokens has no whole number `id` and text `content`: save the "
                "file again with AutoTokenizer of transformers",
            )
    return added_tokens or []


@cache
def count_tokenizer_ids(tokenizer: Path) -> int | None:
    """Return the largest token id in a `tokenizer.json` plus one, without importing the package tokenizers.

    Returns None if the file has no IDs or cannot be read. The stage `prepare` later reports the problem.
    """
    try:
        content = read_json(tokenizer)
        # for Unigram a list indexed by ID, for all other models a mapping from token to ID
        vocabulary = content["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + int(max([*ids, *(token["id"] for token in content.get("added_tokens", ()))]))
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
