"""Describe the config keys: as a JSON Schema, as docs/config.md, and in error messages.

All three are generated from the classes of the sections, so they always agree with these classes. `submit.py schema`
prints the JSON Schema for editors (configs/schema.json). `python -m pipeline.config.schema` prints docs/config.md.

Users often type the names of keys that other frameworks use. `OTHER_NAMES` lists these names, so that the error for an
unknown key can name the key of Sluice to use instead.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, get_origin

from pydantic.fields import FieldInfo

from pipeline.config.sections import (
    RENAMED_KEYS,
    Config,
    RunMetadata,
    has_policy,
    list_inner_sections,
    walk_fields,
)
from pipeline.config.types import Policy, Section

KeyPath = tuple[str | int, ...]
"""The keys and list indices that lead to a value in the config, such as `("data", "source", 0)`."""

_TYPE_NAMES = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
"""Type in a JSON Schema → its name in messages and docs/config.md."""
_BOUNDS = {
    "minimum": "at least", "exclusiveMinimum": "greater than", "maximum": "at most", "exclusiveMaximum": "less than",
}  # fmt: skip
"""Key of a JSON Schema with a bound of a number → its description."""


@cache
def _config_schema() -> dict[str, Any]:
    """Return the JSON Schema that pydantic generates from the sections."""
    return Config.model_json_schema()


@cache
def _metadata_schema() -> dict[str, Any]:
    """Return the JSON Schema of the keys in run.json, which older configs contain."""
    return RunMetadata.model_json_schema()


# -- for editors ---------------------------------------------------------------------------------------------


def format_json_schema() -> str:
    """Return the JSON Schema of config files: the schema of the sections, with an `extends` key in every section.

    The schema requires no key, because any key may come from an extended file.
    """
    result = Config.model_json_schema()
    result["title"] = "A run of Sluice"
    extends = {
        "anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}],
        "description": "File, or files, that this one changes; relative to this file. Later files win.",
        "title": "Extends",
    }
    for section in (result, *result["$defs"].values()):
        if "properties" in section:
            section["properties"]["extends"] = extends
            section.pop("required", None)
    return json.dumps(result, indent=1, ensure_ascii=False) + "\n"


# -- for messages --------------------------------------------------------------------------------------------


def describe_allowed(path: KeyPath) -> str:
    """Return a description of the allowed values at a key path: `a whole number at least 1 or null`."""
    nodes = _find_schemas(path, _config_schema()) or _find_schemas(path, _metadata_schema())
    return " or ".join(map(_describe_schema, nodes))


def list_section_keys(path: KeyPath) -> list[str]:
    """Return the keys of the section at a key path."""
    keys = (key for node in _find_schemas(path, _config_schema()) for key in node.get("properties", {}))
    return list(dict.fromkeys(keys))


def suggest_keys(path: KeyPath) -> list[str]:
    """Return the keys that the user may have meant by the unknown key at a key path.

    If another framework has a key with this name, return the corresponding keys of Sluice. Otherwise, return a key with
    this name from another section, and keys with similar names from the same section. If several sections have a key
    with this name (each stage has a `time`), return only the key with the most similar path.
    """
    name = str(path[-1])
    section = ".".join(map(str, path[:-1]))
    section_keys = list_section_keys(path[:-1])
    if counterpart := find_counterpart(path):
        # By `stages.evaluate.nnodes`, the user means `stages.evaluate.nodes`, not `stages.train.nodes`.
        return [_prefer_key_in_section(key, section, section_keys) for key in counterpart.keys]
    same_name = [key for key in list_keys(()) if key.rpartition(".")[2] == name]
    similar_path = difflib.get_close_matches(".".join(map(str, path)), same_name, n=1, cutoff=0.0)
    # after a first suggestion, further keys must be more similar
    return similar_path + difflib.get_close_matches(name, section_keys, n=2, cutoff=0.7 if similar_path else 0.5)


def _prefer_key_in_section(key: str, section: str, section_keys: Sequence[str]) -> str:
    """Return the last name of `key` if `section` has a key with this name, otherwise `key`.

    Args:
        key: a dotted key.
        section: the dotted key of a section; "" for the top level.
        section_keys: the names of the keys in `section`.
    """
    other_section, _, name = key.rpartition(".")
    return name if other_section != section and name in section_keys else key


def describe_replacements(path: KeyPath, value: Any) -> list[str]:
    """Return hints on what to write instead of the unknown key at a key path, and instead of keys in its `value`."""
    counterpart = find_counterpart(path)
    suggestions = suggest_keys(path)
    hints = [counterpart.describe()] if counterpart and counterpart.note else []
    if not hints and suggestions:
        hints = [f"did you mean {' or '.join(suggestions)}?"]
    return hints + [f"{key}: {inner.describe()}" for key, inner in find_inner_counterparts(path, value)]


def find_similar_key(path: KeyPath) -> str | None:
    """Return the key of a section that the user may have meant by another name at a key path; None if none is similar.

    Use this function for sections in which any name is allowed, such as `stages`.
    """
    keys = list_section_keys(path[:-1])
    return next(iter(difflib.get_close_matches(str(path[-1]), keys, n=1, cutoff=0.6)), None)


@cache
def list_keys(path: KeyPath) -> list[str]:
    """Return all keys below a key path, as dotted keys from the root of the config."""
    inner_paths = [(*path, key) for key in list_section_keys(path)]
    return [key for inner in inner_paths for key in (".".join(map(str, inner)), *list_keys(inner))]


def _list_branches(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a union, as a list of schemas; for another schema `node`, a list with this schema.

    Args:
        node: a part of `schema`, which may refer to another part of it (`$ref`).
        schema: the whole JSON Schema.
    """
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    alternatives = node.get("anyOf") or node.get("oneOf")
    if alternatives is None:
        return [node]
    return [branch for alternative in alternatives for branch in _list_branches(alternative, schema)]


def _find_schemas(path: KeyPath, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternative schemas for the value at a key path; an empty list if the key does not exist."""
    nodes = [schema]
    for name in path:
        if isinstance(name, str):
            inner_nodes = [node.get("properties", {}).get(name) or node.get("additionalProperties") for node in nodes]
        else:
            inner_nodes = [
                dict(enumerate(node.get("prefixItems", ()))).get(name) or node.get("items") for node in nodes
            ]
        nodes = [branch for node in inner_nodes if node for branch in _list_branches(node, schema)]
    return nodes


def _describe_schema(node: dict[str, Any]) -> str:
    """Return a description of the values that a JSON Schema without alternatives allows."""
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    if "properties" in node:
        return "a section with the keys " + ", ".join(node["properties"])
    if "prefixItems" in node:
        return "a list of " + " and ".join(map(_describe_schema, node["prefixItems"]))
    if "items" in node:
        item = " or ".join(map(_describe_schema, _list_branches(node["items"], _config_schema())))
        return f"a list{' with at least one item' * bool(node.get('minItems'))}, each item {item}"
    limits = " and ".join(f"{relation} {node[key]}" for key, relation in _BOUNDS.items() if key in node)
    type_name = node.get("type", "anything").replace("object", "keys and values")
    return f"{_TYPE_NAMES.get(type_name, type_name)} {limits}".strip()


# -- names of other frameworks -------------------------------------------------------------------------------


class Counterpart(NamedTuple):
    """The keys of Sluice to use instead of another framework's key."""

    keys: tuple[str, ...]
    """Dotted keys; empty if nothing needs to be set."""
    note: str = ""
    """How the meaning differs; "" if it is the same."""

    def describe(self) -> str:
        """Return the keys to use and the note, as part of an error message."""
        return ": ".join(filter(None, [f"use {' and '.join(self.keys)}" * bool(self.keys), self.note]))


def _names_of(key: str, *names: str) -> dict[str, Counterpart]:
    """Return entries of OTHER_NAMES for names of other frameworks that have the same meaning as the dotted `key`."""
    return dict.fromkeys(names, Counterpart((key,)))


def _names_near(keys: str, note: str, *names: str) -> dict[str, Counterpart]:
    """Return entries of OTHER_NAMES for names of other frameworks that have another meaning than Sluice's keys.

    Args:
        keys: the dotted keys to use instead, separated by spaces; "" if nothing needs to be set.
        note: how the meaning differs.
        names: the names in other frameworks.
    """
    return dict.fromkeys(names, Counterpart(tuple(keys.split()), note))


OTHER_NAMES: Mapping[str, Counterpart] = {
    # batch and length
    **_names_of("train.global_batch", "batch_size", "global_batch_size", "train_batch_size"),
    **_names_of("train.micro_batch", "micro_batch_size", "train_micro_batch_size_per_gpu"),
    **_names_near(
        "train.micro_batch train.global_batch",
        "micro_batch counts the sequences of one forward pass on a rank, global_batch the sequences of a whole step",
        "per_device_train_batch_size", "local_batch_size",
    ),
    **_names_near(
        "train.global_batch train.micro_batch",
        "the number of accumulated micro-batches is derived: global_batch / (micro_batch × data-parallel replicas)",
        "gradient_accumulation_steps", "gradient_accumulation", "accumulate_grad_batches", "grad_accum_steps",
    ),
    **_names_of("evaluate.batch", "per_device_eval_batch_size", "eval_batch_size"),
    **_names_of(
        "data.sequence_length", "block_size", "context_length", "seq_len", "seq_length", "max_seq_length",
        "max_length",
    ),
    # length of the run
    **_names_of("train.steps", "max_steps", "num_steps", "max_iters", "train_iters", "total_steps"),
    **_names_of("train.epochs", "num_epochs", "num_train_epochs", "max_epochs"),
    **_names_near(
        "train.steps train.epochs", "the schedule always ends at the last step",
        "lr_decay_iters", "lr_decay_steps",
    ),
    # optimizer
    **_names_of("optimizer.lr", "learning_rate"),
    **_names_of("optimizer.name", "optimizer", "optimizer.kind", "optimizer.type", "optim"),
    **_names_of(
        "optimizer.clip_norm", "gradient_clipping", "max_grad_norm", "gradient_clip_val", "clip_grad", "grad_clip"
    ),
    **_names_near("optimizer.clip_norm", "clipping is by the norm of the whole gradient", "gradient_clip_algorithm"),
    **_names_near(
        "optimizer.betas", "write both as a list, [beta1, beta2]",
        "adam_beta1", "adam_beta2", "beta1", "beta2",
    ),
    **_names_of("optimizer.eps", "adam_epsilon", "adam_eps"),
    **_names_of("optimizer.warmup_steps", "lr_warmup_iters", "lr_warmup_steps", "warmup_iters", "num_warmup_steps"),
    **_names_near(
        "optimizer.warmup_steps", "it is a number of steps, not a fraction of them",
        "warmup_ratio", "lr_warmup_fraction",
    ),
    **_names_of("optimizer.schedule", "lr_scheduler_type", "lr_scheduler", "lr_decay_style", "decay_type"),
    **_names_near("optimizer.schedule", "`constant` does not decay", "decay_lr"),
    **_names_near("optimizer.min_lr_ratio", "it is a fraction of optimizer.lr, not a learning rate", "min_lr"),
    # arithmetic
    **_names_near(
        "train.precision", "write bf16, fp16, fp8 or fp32",
        "bf16", "fp16", "fp8", "tf32", "bf16.enabled", "fp16.enabled", "mixed_precision", "mixed_precision_param",
    ),
    **_names_of("train.compile", "torch_compile", "compile_model"),
    **_names_of(
        "parallel.activation_checkpointing", "gradient_checkpointing", "recompute_activations",
        "recompute_granularity", "activation_checkpoint", "activation_checkpoint.mode",
    ),
    # layout
    **_names_of("parallel.tensor", "tensor_parallel_degree", "tensor_model_parallel_size", "tensor_parallel_size"),
    **_names_of(
        "parallel.pipeline", "pipeline_parallel_degree", "pipeline_model_parallel_size", "pipeline_parallel_size"
    ),
    **_names_of("parallel.schedule", "pipeline_parallel_schedule"),
    **_names_near(
        "parallel.virtual_stages", "it is the number of stages of each rank",
        "num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size",
    ),
    **_names_of("parallel.data.replicate", "data_parallel_replicate_degree"),
    **_names_of("parallel.data.shard", "data_parallel_shard_degree"),
    **_names_near(
        "parallel.data", "`auto` uses all ranks that are left after tensor and pipeline",
        "data_parallel_size", "data_parallel_degree",
    ),
    **_names_near(
        "", "Sluice has no context parallelism: split long sequences by parallel.tensor with parallel.sequence",
        "context_parallel_degree", "context_parallel_size",
    ),
    **_names_of("parallel.sequence", "sequence_parallel"),
    **_names_of("parallel.zero", "zero_stage", "zero_optimization", "zero_optimization.stage"),
    **_names_near(
        "parallel.zero", "0 is DDP, 1 shards optimizer state, 2 also gradients (SHARD_GRAD_OP), 3 also parameters "
        "(FULL_SHARD)",
        "fsdp", "fsdp_config", "sharding_strategy", "deepspeed", "use_distributed_optimizer",
    ),
    **_names_near(
        "parallel.zero parallel.tensor parallel.pipeline",
        "ddp is zero 0, fsdp and deepspeed_stage_3 are zero 3; tensor and pipeline split the model", "strategy",
    ),
    **_names_of("parallel.offload", "offload_optimizer", "offload_param", "cpu_offload", "enable_cpu_offload"),
    **_names_of("parallel.backend", "ddp_backend", "process_group_backend", "distributed_backend"),
    **_names_near(
        "stages.train.tasks_per_node", "each rank uses one GPU",
        "devices", "gpus", "num_gpus", "nproc_per_node", "num_processes", "ntasks_per_node",
    ),
    **_names_of("stages.train.nodes", "num_nodes", "nnodes", "num_machines"),
    **_names_near("", "ranks use GPUs if there are any; parallel.backend chooses how they communicate", "accelerator"),
    # model
    **_names_of("model.dim", "hidden_size", "n_embd", "d_model", "embed_dim"),
    **_names_of("model.layers", "n_layers", "n_layer", "num_hidden_layers", "num_layers"),
    **_names_of("model.heads", "num_attention_heads", "n_head", "n_heads", "num_heads"),
    **_names_of("model.kv_heads", "num_key_value_heads", "num_query_groups", "n_kv_heads"),
    **_names_of("model.intermediate_size", "ffn_hidden_size", "ffn_dim"),
    **_names_of("model.init_from", "model_name_or_path", "pretrained_model_name_or_path", "hf_assets_path"),
    # data
    **_names_near(
        "data.source", "name files or folders; nothing is downloaded",
        "dataset", "dataset_name", "dataset_path", "train_file", "data_path",
    ),
    **_names_near(
        "data.tokenizer.path", "with data.tokenizer.kind: file",
        "tokenizer_path", "tokenizer_model", "tokenizer_name",
    ),
    **_names_near(
        "", "there are no loader processes: a thread of each rank reads ahead",
        "dataloader_num_workers", "num_workers", "dataloader_pin_memory", "pin_memory",
    ),
    # files, logging, evaluation
    **_names_near(
        "run.root run.name", "a run is the directory ROOT/NAME",
        "output_dir", "out_dir", "default_root_dir", "dump_folder", "save_dir", "save",
    ),
    **_names_of("checkpoint.every_steps", "save_every", "save_steps", "save_interval", "checkpoint_interval"),
    **_names_of("checkpoint.keep", "save_total_limit", "keep_latest_k"),
    **_names_near("checkpoint.keep.best", "the held-out loss decides", "save_top_k", "load_best_model_at_end"),
    **_names_near(
        "", "submit.py continues from the newest checkpoint by itself; `resume RUN` does so after a stop",
        "resume_from_checkpoint", "ckpt_path", "load_checkpoint",
    ),
    **_names_of("train.log_every", "logging_steps", "log_every_n_steps", "log_interval", "log_freq"),
    **_names_near(
        "train.evaluate_every", "it counts steps",
        "eval_steps", "eval_interval", "val_check_interval", "eval_every", "check_val_every_n_epoch",
    ),
    **_names_of("train.evaluate_sequences", "limit_val_batches", "eval_iters"),
    **_names_near(
        "track.tensorboard track.wandb track.mlflow", "each tracker has a separate key",
        "report_to", "logger", "wandb_project", "wandb_log", "enable_wandb", "enable_tensorboard",
    ),
    **_names_of("publish.to", "push_to_hub", "hub_model_id"),
}  # fmt: skip
"""Name of a key of another framework → what to use instead. The frameworks are PyTorch Lightning, Hugging Face's
Trainer, torchtitan, Megatron-LM, DeepSpeed and nanoGPT.

If a name alone is ambiguous, its section precedes the name, as in `fp16.enabled`.
"""


def find_counterpart(path: KeyPath) -> Counterpart | None:
    """Return what to use instead of the key at `path`; None if OTHER_NAMES does not have the key.

    The longest suffix of the path that OTHER_NAMES has is used: `fp16.enabled` takes precedence over `enabled`. Case,
    leading underscores, and the difference between `-` and `_` are ignored.
    """
    names = [str(name).lower().replace("-", "_").lstrip("_") for name in path]
    suffixes = (".".join(names[start:]) for start in range(len(names)))
    return next((OTHER_NAMES[suffix] for suffix in suffixes if suffix in OTHER_NAMES), None)


def find_inner_counterparts(path: KeyPath, value: Any) -> Iterator[tuple[str, Counterpart]]:
    """Yield the name of each key in `value`, also of nested keys, that OTHER_NAMES has, and what to use instead.

    Args:
        path: the key path of `value`.
        value: the value. If it is not a mapping, nothing is yielded.
    """
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if counterpart := find_counterpart((*path, key)):
            yield str(key), counterpart
        elif isinstance(inner, Mapping):
            yield from find_inner_counterparts((*path, key), inner)


# -- docs/config.md ------------------------------------------------------------------------------------------

_PAGE_HEAD = """# Config keys

This page lists every key that a config file may contain. `python submit.py schema` prints the same information as a
JSON Schema for editors. `make generated` creates this page from the files in pipeline/config; do not edit this page.

- **On resume**: this column shows when `resume RUN key=value` may change the key
  ([changing a run](changing.md#what-resume-may-change)):
  - `yes`: at any time.
  - `larger`: the value may be increased at any time.
  - `no`: only until the train stage has saved a checkpoint. Keys of `data` that affect the shards: only until the
    shards are finished. Keys of `evaluate`: only until there is an evaluation result. `run.sharing`: never.
- A key without a default is required if its section is used. The default of a section is a section in which each key
  has its default.
- A relative path starts from the directory of the file that contains the path. A relative path on the command line
  starts from the working directory.
- `extends: FILE`, in any section and at the top level, includes another file.
"""


_FORMER_NAMES = """## Former names

Configs may still use the former name of a key. Sluice then prints the present name of this key once.

"""
_RUN_JSON_KEYS = """## Keys in run.json

Sluice computes these values and stores them in `run.json` in the run directory, not in the config. Configs of older
versions contain these keys and can still be read.

"""


def format_config_page() -> str:
    """Return docs/config.md: every key with its type, its default, its meaning, and whether `resume` may change it.

    The environment variable SLUICE_DOCSTRINGS must have been set when the sections were imported
    (pipeline/config/types.py). Otherwise the keys have no descriptions.
    """
    chapters = [_PAGE_HEAD]
    for name, field in Config.model_fields.items():
        chapters.append(f"## {name}\n\n{field.description}\n\n{_format_table(_list_rows(name, field, {}))}")
    former = [f"| `{old}` | `{new}` |" for old, new in RENAMED_KEYS.items()]
    chapters.append(_FORMER_NAMES + "\n".join(["| former name | present name |", "| --- | --- |", *former, ""]))
    metadata = [
        f"| `{key}` | {_format_cell(field.description or '')} |"
        for key, field in walk_fields(RunMetadata)
        if "." in key  # without the sections themselves
    ]
    chapters.append(_RUN_JSON_KEYS + "\n".join(["| key | meaning |", "| --- | --- |", *metadata, ""]))
    return "\n".join(chapters)


def _format_table(rows: Iterable[str]) -> str:
    """Return a Markdown table of keys with these rows."""
    return "\n".join(["| key | type | default | on resume | meaning |", "| --- | --- | --- | --- | --- |", *rows, ""])


def _list_rows(key: str, field: FieldInfo, key_by_section: dict[type[Section], str]) -> Iterator[str]:
    """Yield a row of a Markdown table for each key below a section.

    Args:
        key: the dotted key of the section.
        field: the field of the section.
        key_by_section: class of a section → its dotted key, for classes that already have rows. Their rows are not
            repeated. This function adds the classes for which it yields rows.
    """
    for section, suffix in list_inner_sections(field.annotation):
        key_by_section[section] = f"{key}{suffix}"
        inner_fields = {f"{key}{suffix}.{inner.alias or name}": inner for name, inner in section.model_fields.items()}
        if section.other_keys is not None:
            inner_fields |= {
                f"{key}{suffix}.*.{name}": inner for name, inner in section.other_keys.model_fields.items()
            }
        for inner_key, inner in inner_fields.items():
            meaning = inner.description or ""
            inner_sections = [inner_section for inner_section, _ in list_inner_sections(inner.annotation)]
            same_keys = [key_by_section[inner_class] for inner_class in inner_sections if inner_class in key_by_section]
            if same_keys:
                meaning += f" This section has the keys of `{same_keys[0]}`."
            cells = [
                f"`{inner_key}`",
                _describe_type(inner_key, inner),
                _format_default(inner),
                _describe_resume(inner_key),
                meaning,
            ]
            yield f"| {' | '.join(map(_format_cell, cells))} |"
            if not same_keys:
                yield from _list_rows(inner_key, inner, key_by_section)


def _describe_type(key: str, field: FieldInfo) -> str:
    """Return a description of the type of a key. For a section, omit the keys, because the rows below list them."""
    # `*` stands for any index of a list, such as 0, or for any name in a mapping, such as `*` itself
    path = tuple(0 if name == "*" and _is_list(key, index) else name for index, name in enumerate(key.split(".")))
    nodes = _find_schemas(path, _config_schema())
    descriptions = ["a section" if "properties" in node else _describe_schema(node) for node in nodes]
    if any(suffix for _, suffix in list_inner_sections(field.annotation)):
        descriptions = ["a mapping of sections" if get_origin(field.annotation) is dict else "a list of sections"]
    return " or ".join(dict.fromkeys(descriptions))


def _is_list(key: str, index: int) -> bool:
    """Return True if the name at position `index` (from 0) of a dotted key stands for an element of a list."""
    path = tuple(key.split(".")[:index])
    return any("items" in node for node in _find_schemas(path, _config_schema()))


def _format_default(field: FieldInfo) -> str:
    """Return the default of a key as JSON; "" for a required key, and for a section because its keys have defaults."""
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True)
    return "" if isinstance(default, Section) else f"`{json.dumps(default, default=str)}`"


def _describe_resume(key: str) -> str:
    """Return whether `resume` may change a key at any time: `yes`, `larger` or `no`."""
    if has_policy(key, Policy.CHANGEABLE):
        return "yes"
    return "larger" if has_policy(key, Policy.INCREASABLE) else "no"


def _format_cell(text: str) -> str:
    """Return text on one line, escaped for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(format_config_page(), end="")
