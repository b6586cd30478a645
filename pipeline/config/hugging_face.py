"""A folder in Hugging Face's format: its config.json as the section `model` and back, its tokenizer, its files.

    config.json                                        the model's family and sizes
    model.safetensors, or model.safetensors.index.json and the pieces that it names
    tokenizer.json, tokenizer_config.json              the tokenizer, and which token ends a text

A training that starts from such a folder (`model.init_from`) has its section `model` filled from config.json when its
config is first read; what fills it is frozen in the run's config.yaml, with the hash of config.json beside it, and the
folder is not asked again. What config.json asks for and the decoder does not have is refused by the key that asks: a
model that differs in silence is worse than none. Weights are read by pipeline/model/open_weights.py.

Keys and their defaults are those of transformers' configuration classes (4.57 and 5.23: configuration_llama.py and so
on), which leave out none of those that are needed; rotary positions stand in `rope_parameters` (5) or in `rope_theta`
and `rope_scaling` (4). No torch here: the login node reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular_file, parse_json_or_none, read_json, sha256_file, sha256_json
from pipeline.base.ownership import path_through_fd
from pipeline.config.sections import ModelConfig

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_WEIGHTS_FILE = "model.safetensors"
_LONGEST_NAME = 255
"""Bytes that the name of a file may have (NAME_MAX of Linux)."""
TRANSFORMERS_VERSION = "5.0.0"
"""`transformers_version` of an export. transformers 4.57.3 and later take a tokenizer beside a config.json without a
version, or with an older one, for one with a wrong regular expression of Mistral's, and warn of "incorrect
tokenization". The keys are those that 4 knows as well."""
TOKENIZER_SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What goes with a tokenizer, and is the same after a training: an export takes it along."""
SWEPT_FOLDERS = (("sweep", "grid", "model.init_from"), ("sweep", "random", "model.init_from"))
"""Keys of a sweep that name such folders."""
_QWEN = {
    "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen3": ("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}),
}
"""By `model_type`: the class, and its own defaults of keys that may be left out. Many models (SmolLM2) are llamas."""
_SAME = {
    "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size", "max_position_embeddings": "max_position_embeddings", "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings", "initializer_range": "initializer_range",
}  # fmt: skip
"""Our keys of `model` and theirs, with the same values."""
_MOST = {"layers": 2**12, "vocab_size": 2**24, "max_position_embeddings": 2**40}
"""The largest values of our keys; of other sizes 2^20. Beyond that no machine could even say what is missing."""
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_ONLY = {
    "hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0, "partial_rotary_factor": 1, "use_qk_norm": False,
    "rope_interleaved": False, "is_llama_config": True, "is_encoder_decoder": False, "is_decoder": False,
    "add_cross_attention": False, "tie_encoder_decoder": False,
}  # fmt: skip
"""Keys that may have this value only (or null)."""
_IGNORED = {
    *_SAME.values(), "model_type", "architectures", "attention_bias", "sliding_window", "use_sliding_window",
    "layer_types", "rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "max_window_layers", "_name_or_path",
    "transformers.js_config", "_attn_implementation_autoset", "attn_implementation", "chunk_size_feed_forward",
    "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type", "max_length",
    "do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "tokenizer_class", "max_sequence_length",
}  # fmt: skip
"""Keys that are read here, or that say nothing of what the model computes."""
_ROPE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Which keys a kind of stretched positions has."""


class ModelFolderError(UserError):
    """A folder that a model cannot come from; the message names file and key."""


def fill_from_folder(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config `values` with what the folder `model.init_from` says, and each that a sweep has in its place, where
    they were not asked before; without a folder of its own the sweep itself is as its first point.

    Raises ValueError for a folder that cannot be used and for a key of `model` that disagrees.
    """
    try:
        return _filled(values)
    except ModelFolderError as error:
        raise ValueError(f"model.init_from: {error}") from error


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    model, data, sweep = (values.get(section) or {} for section in ("model", "data", "sweep"))
    if not all(isinstance(section, Mapping) for section in (model, data, sweep)):
        return dict(values)  # said of their types where they are checked
    grids = [sweep[kind] for kind in ("grid", "random") if isinstance(sweep.get(kind), Mapping)]
    lists = [grid["model.init_from"] for grid in grids if isinstance(grid.get("model.init_from"), list)]
    swept = [folder for given in lists for folder in given if isinstance(folder, str)]
    folders = [folder for folder in [model.get("init_from"), *swept] if isinstance(folder, str)]
    if not folders or model.get("target") is not None or model.get("init_sha256") is not None:
        return dict(values)
    sections = {folder: read_model_section(Path(folder)) for folder in folders}
    for folder, section in sections.items():
        place = f"{Path(folder, CONFIG_FILE)} of model.init_from"
        for key, value in section.items():
            if key in model and model[key] != value:
                raise ValueError(
                    f"model.{key} is {json.dumps(model[key])}, but {place} says {json.dumps(value)}: leave it out"
                )
            if any(f"model.{key}" in grid for grid in grids):
                raise ValueError(f"sweep: model.{key} cannot vary, for {place} says it: leave it out")
    found = {**values, "model": {**model, "init_from": folders[0], **sections[folders[0]]}}
    if swept:
        found["sweep"] = {**sweep, "sources": {folder: sections[folder] for folder in swept}}
    if data.get("tokenizer") is None:
        tokenizers = [_tokenizer(Path(folder), section["vocab_size"]) for folder, section in sections.items()]
        found["data"] = {**data, "tokenizer": tokenizers[0]}
        if len({(sha256_file(one["path"]), one["eos_token"]) for one in tokenizers}) > 1:
            raise ModelFolderError(
                "model.tokenizer_conflict",
                "points of a sweep share their tokens, and these folders have several tokenizers",
            )
    return found


def read_model_section(folder: Path) -> dict[str, Any]:
    """What the section `model` gets from the folder: all keys but those that are the user's. Raises FolderError."""
    try:
        with open_inside(folder, CONFIG_FILE) as file:
            content = file.read_bytes()
        ours = parse_model_config(parse_json_or_none(content))
    except OSError as error:
        words = f"{folder / CONFIG_FILE}: cannot read it: {error.strerror}; name a folder with a model's files"
        raise ModelFolderError("model.unreadable_folder", words) from error
    except (ValueError, TypeError) as error:  # the latter of lists where names should be
        raise ModelFolderError("model.unsupported_config", f"{folder / CONFIG_FILE}: {error}") from error
    return {**ours, "init_sha256": hashlib.sha256(content).hexdigest(), "init_files": hash_weight_stats(folder)}


def hash_weight_stats(folder: Path) -> str:
    """A hash of the names, sizes and times of the files with the weights, which costs no reading. Raises FolderError.

    Times in whole seconds: not every file system tells more, and not to every host.
    """
    files = {name: (folder / name).stat() for name in list_weight_files(folder)}
    return sha256_json({name: [file.st_size, int(file.st_mtime)] for name, file in files.items()})


def _tokenizer(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The section `data.tokenizer` for the folder's tokenizer. Raises FolderError."""
    given, end = folder / TOKENIZER_FILE, _end_token(folder)
    if (ids := count_tokenizer_ids(given)) is not None and ids > vocab_size:
        raise ModelFolderError(
            "model.tokenizer_conflict",
            f"{folder / CONFIG_FILE}: vocab_size {vocab_size} is less than the {ids} ids of {given}",
        )
    return {"kind": "file", "path": str(given), "eos_token": end}


@contextmanager
def open_inside(folder: Path, name: str) -> Iterator[Path]:
    """Open the file of this name in the folder; yield a path that leads to this very file (ownership.path_through_fd).

    Raises FileNotFoundError if there is none, and FolderError for a link that leads out of the folder, or for a pipe.
    In the Hub's cache, links may lead from `models--ORG--NAME/snapshots/COMMIT` to `models--ORG--NAME/blobs`.
    """
    path, root = folder / name, Path(os.path.realpath(folder))
    cache = root.parents[1] if root.parent.name == "snapshots" else root
    is_of_hub = cache.name.startswith("models--")
    try:
        stream = open_regular_file(path)
    except (UserError, IsADirectoryError):
        raise ModelFolderError("model.not_a_file", f"{path} is no ordinary file: put one in its place") from None
    with stream, path_through_fd(stream.fileno(), path) as held:
        opened = Path(os.readlink(held))
        if not (opened.is_relative_to(root) or (is_of_hub and opened.is_relative_to(cache / "blobs"))):
            around = cache if is_of_hub else root
            raise ModelFolderError(
                "model.link_outside_folder",
                f"{path} is a link that leads out of {around}: put the file itself in its place",
            )
        yield held


def read_inside(folder: Path, name: str) -> Any:
    """Return the JSON value of a file in the folder; None if there is none. Raises FolderError as `inside` does."""
    with suppress(FileNotFoundError), open_inside(folder, name) as file:
        return parse_json_or_none(file.read_bytes())
    return None


def _is_there(folder: Path, name: str) -> bool:
    """Whether there is such a file. Raises FolderError as `inside` does."""
    with suppress(FileNotFoundError), open_inside(folder, name):
        return True
    return False


def parse_model_config(theirs: Any) -> dict[str, Any]:
    """The section `model` as the content of a config.json says it, null where it says nothing of a key.

    Raises ValueError, naming the key, for what is missing or not supported.
    """
    if not isinstance(theirs, dict):
        raise ValueError("it holds no JSON object: fetch the folder again")
    family = theirs.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {json.dumps(family)} is not supported; there are {', '.join(FAMILIES)}")
    architecture, defaults = FAMILIES[family]
    if (theirs.get("architectures") or [architecture]) != [architecture]:
        raise ValueError(f"architectures {json.dumps(theirs['architectures'])} should be {json.dumps([architecture])}")
    for key, value in theirs.items():
        if value is not None and (value != _ONLY[key] if key in _ONLY else key not in _IGNORED):
            what = "asks for what is not supported" if key in _ONLY else "is not known here, and may mean another model"
            raise ValueError(f"{key} {json.dumps(value)[:80]} {what}")
    if missing := [key for key in _NEEDED if theirs.get(key) is None]:
        raise ValueError(f"{missing[0]} is missing")
    if unknown := set(theirs.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types {min(unknown)} is not supported")
    known = {**_DEFAULTS, **defaults, **theirs}
    ours = {key: known.get(name) for key, name in _SAME.items()}
    ours["qk_norm"] = family == "qwen3"
    ours["attention_bias"] = "qkv" if family == "qwen2" else "all" if known.get("attention_bias") else "none"
    window = known.get("sliding_window") if known.get("use_sliding_window", True) and family != "llama" else None
    kinds, first = known.get("layer_types"), known.get("max_window_layers")
    if kinds:  # an export can say how many see all, and that these come first
        first = kinds.count("full_attention") if kinds == sorted(kinds) else None
    ours |= {"sliding_window": window, "max_window_layers": None if window is None else first}
    ours |= _rope(known)
    try:
        ModelConfig.model_validate_json(json.dumps(ours), strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        names = [f"{_SAME.get(str(key), str(key))}: " for key in wrong["loc"][:1]]
        raise ValueError("".join([*names, wrong["msg"].removeprefix("Value error, ")])) from None
    for key, name in _SAME.items():
        value, most = ours[key], _MOST.get(key, 2**20)
        if isinstance(value, int) and value > most:
            raise ValueError(f"{name} {value} is more than {most}, which no model has")
    return ours


def _rope(known: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and, where positions are stretched, `rope_scaling`."""
    key = "rope_scaling" if known.get("rope_scaling") else "rope_parameters"  # where both are, transformers takes it
    given = dict(known.get(key) or {})
    theta = given.pop("rope_theta", None) or known.get("rope_theta") or 10_000.0
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    if given.pop("partial_rotary_factor", None) not in (None, 1) or any(isinstance(v, dict) for v in given.values()):
        raise ValueError(f"{key} {json.dumps(known[key])} asks for what is not supported")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in _ROPE:
        raise ValueError(f"{key}: {kind} positions are not supported; there are default, {', '.join(_ROPE)}")
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **{n: given.get(n) for n in _ROPE[kind]}}}


def build_config_json(
    model: ModelConfig, vocab_size: int, sequence_length: int, eos_id: int | list[int], dtype: str
) -> dict[str, Any]:
    """The content of a config.json for a trained decoder, which transformers 4 and 5 read alike.

    eos_id: the token that ends a text, or several. dtype: of the weights, such as `float32`. Raises UserError for a
    mixture of features that no family has.
    """
    family = "qwen3" if model.qk_norm else "qwen2" if model.attention_bias == "qkv" else "llama"
    if family == "llama" and model.sliding_window is not None:
        family = "mistral"
    biased, windowed = model.attention_bias != "none", model.sliding_window is not None
    if (family == "qwen3" and model.attention_bias == "qkv") or (family == "mistral" and biased):
        raise UserError(
            "export.unsupported_model",
            f"no open model's format has model.attention_bias {model.attention_bias} as {family} would be",
        )
    if family.startswith("qwen") and windowed and model.max_window_layers is None:
        raise UserError(
            "export.unsupported_model",
            f"model.sliding_window: {family}'s format also says which layers have it: set model.max_window_layers",
        )
    resolved = {**model.model_dump(mode="json"), "kv_heads": model.num_kv_heads, "head_dim": model.head_size}
    resolved |= {"intermediate_size": model.ffn_size, "vocab_size": vocab_size}
    resolved["max_position_embeddings"] = model.max_position_embeddings or sequence_length
    scaling = model.rope_scaling.model_dump(mode="json", exclude_none=True) if model.rope_scaling else None
    theirs = {name: resolved[key] for key, name in _SAME.items()}
    theirs |= {"architectures": [FAMILIES[family][0]], "model_type": family, "hidden_act": "silu", "use_cache": True}
    theirs |= {"attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": eos_id, "torch_dtype": dtype}
    theirs |= {"rope_theta": model.rope_theta, "rope_scaling": scaling, "transformers_version": TRANSFORMERS_VERSION}
    if family in ("llama", "qwen3"):
        theirs["attention_bias"] = biased
    if family.startswith("qwen"):
        theirs["use_sliding_window"] = windowed
    if windowed:
        theirs["sliding_window"] = model.sliding_window
        theirs |= {} if family == "mistral" else {"max_window_layers": model.max_window_layers}
    return dict(sorted(theirs.items()))


def list_weight_files(folder: Path) -> list[str]:
    """The names of the files with the weights. Raises FolderError where none is there, or one is missing or outside."""
    if _is_there(folder, INDEX_FILE):
        index = read_inside(folder, INDEX_FILE)
        table = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise ModelFolderError(
                "model.damaged_index", f"{folder / INDEX_FILE} has no weight_map from tensors to files"
            )
        names = sorted(set(table.values()))
        if wrong := [name for name in names if not _is_name_of_weights(name)]:
            shown = wrong[0] if len(wrong[0]) <= 80 else f"{wrong[0][:80]}…"
            raise ModelFolderError(
                "model.damaged_index", f"{folder / INDEX_FILE} names {shown!r}: no safetensors file in that folder"
            )
    elif _is_there(folder, SINGLE_WEIGHTS_FILE):
        names = [SINGLE_WEIGHTS_FILE]
    else:
        found = sorted(path.name for ending in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{ending}"))
        pickle = f"{found[0]} is a pickle, which may execute anything and is not opened" if found else "none is there"
        raise ModelFolderError(
            "model.no_weights", f"{folder} needs {SINGLE_WEIGHTS_FILE}, or {INDEX_FILE} and its pieces; {pickle}"
        )
    if missing := [name for name in names if not _is_there(folder, name)]:
        raise ModelFolderError("model.missing_file", f"{folder / missing[0]} is missing: fetch the folder again")
    return names


def _is_name_of_weights(name: str) -> bool:
    """Whether a file in the folder can have this name, and it is that of a safetensors file."""
    is_possible = Path(name).name == name and "\0" not in name and len(os.fsencode(name)) <= _LONGEST_NAME
    return is_possible and name.endswith(".safetensors")


def read_tokenizer_files(folder: Path) -> dict[str, str]:
    """The texts of the files in the folder that go with its tokenizer, by name. Raises FolderError."""
    texts = {}
    for name in TOKENIZER_SIDE_FILES:
        with suppress(FileNotFoundError), open_inside(folder, name) as file:
            texts[name] = file.read_text("utf-8", "replace")
    return texts


def read_token_ids(folder: Path) -> dict[str, Any]:
    """What config.json says of the tokens that begin, end and fill up a text."""
    values = read_inside(folder, CONFIG_FILE) or {}
    return {key: values[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in values}


def _end_token(folder: Path) -> str:
    """The token that ends a text: tokenizer_config.json's, else that of config.json's id. Raises FolderError."""
    place = f"{folder / TOKENIZER_FILE}"
    if not _is_there(folder, TOKENIZER_FILE):
        raise ModelFolderError(
            "model.no_tokenizer",
            f"{place} is missing: let transformers' AutoTokenizer save one there, or set data.tokenizer",
        )
    known = read_inside(folder, "tokenizer_config.json")
    end = known.get("eos_token") if isinstance(known, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    wanted = None
    if end is None:
        ids = (read_inside(folder, CONFIG_FILE) or {}).get("eos_token_id")
        wanted = ids[0] if isinstance(ids, list) and ids else ids
        added = check_added_tokens(folder / TOKENIZER_FILE, read_inside(folder, TOKENIZER_FILE))
        end = next((token["content"] for token in added if token["id"] == wanted), None)
    if not isinstance(end, str):
        no_word = "neither tokenizer_config.json nor config.json says which token ends a text"
        why = no_word if wanted is None else f"config.json's eos_token_id {json.dumps(wanted)} is none of added_tokens"
        raise ModelFolderError("model.no_eos_token", f"{place}: {why}: set data.tokenizer")
    return end


def check_added_tokens(tokenizer: Path, content: Any) -> list[dict[str, Any]]:
    """Return `added_tokens` of the content of a `tokenizer.json`: objects with at least an `id` and a `content`.

    Raises FolderError, naming the file and the entry, if it is anything else.
    """
    added = content.get("added_tokens") if isinstance(content, dict) else None
    for number, token in enumerate(added if isinstance(added, list) else [added] if added else []):
        fields = token if isinstance(token, dict) else {}
        if type(fields.get("id")) is not int or not isinstance(fields.get("content"), str):
            raise ModelFolderError(
                "model.invalid_tokenizer",
                f"{tokenizer}: entry {number} of added_tokens has no whole number `id` and text `content`: let "
                "transformers' AutoTokenizer save the file again",
            )
    return added or []


@cache
def count_tokenizer_ids(tokenizer: Path) -> int | None:
    """The largest id of a `tokenizer.json` plus one, read without the package that it is for.

    None where that cannot be told: the stage prepare says what is wrong with it.
    """
    try:
        content = read_json(tokenizer)
        vocabulary = content["model"]["vocab"]  # Unigram: a list by id; all others: ids by token
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + int(max([*ids, *(token["id"] for token in content.get("added_tokens", ()))]))
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
