"""Describe the config keys: as a JSON Schema, as docs/config.md, and in error messages.

All three are generated from the classes of the sections, so they cannot disagree with them. `submit.py schema` prints
the JSON Schema for editors (configs/schema.json). `python -m pipeline.config.schema` prints docs/config.md.

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

_KINDS = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
_BOUNDS = {
    "minimum": "at least", "exclusiveMinimum": "greater than", "maximum": "at most", "exclusiveMaximum": "less than",
}  # fmt: skip


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
    return [key for node in _find_schemas(path, _config_schema()) for key in node.get("properties", {})]


def suggest_keys(path: KeyPath) -> list[str]:
    """Return the keys that the user may have meant by the unknown key at a key path.

    If another framework has a key with this name, return the corresponding keys of Sluice. Otherwise, return a key with
    this name from another section, and keys with similar names from the same section. If several sections have a key
    with this name (each stage has a `time`), return only the key with the most similar path.
    """
    name = str(path[-1])
    section = ".".join(map(str, path[:-1]))
    own_keys = list_section_keys(path[:-1])
    if known := find_counterpart(path):
        # By `stages.evaluate.nnodes`, the user means `stages.evaluate.nodes`, not `stages.train.nodes`.
        return [_prefer_own_key(key, section, own_keys) for key in known.keys]
    same_name = [key for key in list_keys(()) if key.rpartition(".")[2] == name]
    similar_path = difflib.get_close_matches(".".join(map(str, path)), same_name, n=1, cutoff=0.0)
    return similar_path + difflib.get_close_matches(name, own_keys, n=2, cutoff=0.7 if similar_path else 0.5)


def _prefer_own_key(key: str, section: str, own_keys: Sequence[str]) -> str:
    """Return the name of the same key in `section` if it has one, otherwise the dotted key.

    Args:
        key: a dotted key.
        section: the dotted key of a section; "" for the top level.
        own_keys: the names of the keys in `section`.
    """
    other_section, _, name = key.rpartition(".")
    return name if other_section != section and name in own_keys else key


def describe_replacements(path: KeyPath, value: Any) -> list[str]:
    """Return hints on what to write instead of the unknown key at a key path and the keys in its `value`."""
    known = find_counterpart(path)
    similar = suggest_keys(path)
    hints = [known.describe()] if known and known.note else []
    if not hints and similar:
        hints = [f"did you mean {' or '.join(similar)}?"]
    return hints + [f"{key}: {inner.describe()}" for key, inner in find_inner_counterparts(path, value)]


@cache
def list_keys(path: KeyPath) -> list[str]:
    """Return all keys below a key path, as dotted keys from the root of the config."""
    inner_paths = [(*path, key) for key in list_section_keys(path)]
    return [key for inner in inner_paths for key in (".".join(map(str, inner)), *list_keys(inner))]


def _list_branches(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a union, or the node itself if it is not a union."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    if "anyOf" not in node:
        return [node]
    return [branch for choice in node["anyOf"] for branch in _list_branches(choice, schema)]


def _find_schemas(path: KeyPath, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternative schemas for the value at a key path; an empty list if there is no such key."""
    nodes = [schema]
    for part in path:
        if isinstance(part, str):
            inner = [node.get("properties", {}).get(part) or node.get("additionalProperties") for node in nodes]
        else:
            inner = [dict(enumerate(node.get("prefixItems", ()))).get(part) or node.get("items") for node in nodes]
        nodes = [branch for node in inner if node for branch in _list_branches(node, schema)]
    return nodes


def _describe_schema(node: dict[str, Any]) -> str:
    """Return a description of the values that a JSON Schema without alternatives allows."""
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
    kind = node.get("type", "anything").replace("object", "keys and values")
    return f"{_KINDS.get(kind, kind)} {limits}".strip()


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


def _same(key: str, *names: str) -> dict[str, Counterpart]:
    """Return entries of OTHER_NAMES for `names`, which mean the same as the dotted `key`."""
    return dict.fromkeys(names, Counterpart((key,)))


def _other(keys: str, note: str, *names: str) -> dict[str, Counterpart]:
    """Return entries of OTHER_NAMES for `names` with another meaning than our keys.

    Args:
        keys: the dotted keys to use instead, separated by blanks; "" if nothing needs to be set.
        note: how the meaning differs.
        names: the names in other frameworks.
    """
    return dict.fromkeys(names, Counterpart(tuple(keys.split()), note))


OTHER_NAMES: Mapping[str, Counterpart] = {
    # batch and length
    **_same("train.global_batch", "batch_size", "global_batch_size", "train_batch_size"),
    **_same("train.micro_batch", "micro_batch_size", "train_micro_batch_size_per_gpu"),
    **_other(
        "train.micro_batch train.global_batch",
        "micro_batch counts the sequences of one forward pass on a rank, global_batch the sequences of a whole step",
        "per_device_train_batch_size", "local_batch_size",
    ),
    **_other(
        "train.global_batch train.micro_batch",
        "the number of accumulated micro-batches is derived: global_batch / (micro_batch × data-parallel replicas)",
        "gradient_accumulation_steps", "gradient_accumulation", "accumulate_grad_batches", "grad_accum_steps",
    ),
    **_same("evaluate.batch", "per_device_eval_batch_size", "eval_batch_size"),
    **_same(
        "data.sequence_length", "block_size", "context_length", "seq_len", "seq_length", "max_seq_length",
        "max_length",
    ),
    # length of the run
    **_same("train.steps", "max_steps", "num_steps", "max_iters", "train_iters", "total_steps"),
    **_same("train.epochs", "num_epochs", "num_train_epochs", "max_epochs"),
    **_other(
        "train.steps train.epochs", "the schedule always ends at the last step",
        "lr_decay_iters", "lr_decay_steps",
    ),
    # optimizer
    **_same("optimizer.lr", "learning_rate"),
    **_same("optimizer.name", "optimizer", "optimizer.kind", "optimizer.type", "optim"),
    **_same("optimizer.clip_norm", "gradient_clipping", "max_grad_norm", "gradient_clip_val", "clip_grad", "grad_clip"),
    **_other("optimizer.clip_norm", "clipping is by the norm of the whole gradient", "gradient_clip_algorithm"),
    **_other(
        "optimizer.betas", "write both as a list, [beta1, beta2]",
        "adam_beta1", "adam_beta2", "beta1", "beta2",
    ),
    **_same("optimizer.eps", "adam_epsilon", "adam_eps"),
    **_same("optimizer.warmup_steps", "lr_warmup_iters", "lr_warmup_steps", "warmup_iters", "num_warmup_steps"),
    **_other(
        "optimizer.warmup_steps", "it is a number of steps, not a fraction of them",
        "warmup_ratio", "lr_warmup_fraction",
    ),
    **_same("optimizer.schedule", "lr_scheduler_type", "lr_scheduler", "lr_decay_style", "decay_type"),
    **_other("optimizer.schedule", "`constant` does not decay", "decay_lr"),
    **_other("optimizer.min_lr_ratio", "it is a fraction of optimizer.lr, not a learning rate", "min_lr"),
    # arithmetic
    **_other(
        "train.precision", "write bf16, fp16, fp8 or fp32",
        "bf16", "fp16", "fp8", "tf32", "bf16.enabled", "fp16.enabled", "mixed_precision", "mixed_precision_param",
    ),
    **_same("train.compile", "torch_compile", "compile_model"),
    **_same(
        "parallel.activation_checkpointing", "gradient_checkpointing", "recompute_activations",
        "recompute_granularity", "activation_checkpoint", "activation_checkpoint.mode",
    ),
    # layout
    **_same("parallel.tensor", "tensor_parallel_degree", "tensor_model_parallel_size", "tensor_parallel_size"),
    **_same(
        "parallel.pipeline", "pipeline_parallel_degree", "pipeline_model_parallel_size", "pipeline_parallel_size"
    ),
    **_same("parallel.schedule", "pipeline_parallel_schedule"),
    **_other(
        "parallel.virtual_stages", "it is the number of stages of each rank",
        "num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size",
    ),
    **_same("parallel.data.replicate", "data_parallel_replicate_degree"),
    **_same("parallel.data.shard", "data_parallel_shard_degree"),
    **_other(
        "parallel.data", "`auto` uses all ranks that are left after tensor and pipeline",
        "data_parallel_size", "data_parallel_degree",
    ),
    **_other(
        "", "Sluice has no context parallelism: split long sequences by parallel.tensor with parallel.sequence",
        "context_parallel_degree", "context_parallel_size",
    ),
    **_same("parallel.sequence", "sequence_parallel"),
    **_same("parallel.zero", "zero_stage", "zero_optimization", "zero_optimization.stage"),
    **_other(
        "parallel.zero", "0 is DDP, 1 shards optimizer state, 2 also gradients (SHARD_GRAD_OP), 3 also parameters "
        "(FULL_SHARD)",
        "fsdp", "fsdp_config", "sharding_strategy", "deepspeed", "use_distributed_optimizer",
    ),
    **_other(
        "parallel.zero parallel.tensor parallel.pipeline",
        "ddp is zero 0, fsdp and deepspeed_stage_3 are zero 3; tensor and pipeline split the model", "strategy",
    ),
    **_same("parallel.offload", "offload_optimizer", "offload_param", "cpu_offload", "enable_cpu_offload"),
    **_same("parallel.backend", "ddp_backend", "process_group_backend", "distributed_backend"),
    **_other(
        "stages.train.tasks_per_node", "each rank uses one GPU",
        "devices", "gpus", "num_gpus", "nproc_per_node", "num_processes", "ntasks_per_node",
    ),
    **_same("stages.train.nodes", "num_nodes", "nnodes", "num_machines"),
    **_other("", "ranks use GPUs if there are any; parallel.backend chooses how they communicate", "accelerator"),
    # model
    **_same("model.dim", "hidden_size", "n_embd", "d_model", "embed_dim"),
    **_same("model.layers", "n_layers", "n_layer", "num_hidden_layers", "num_layers"),
    **_same("model.heads", "num_attention_heads", "n_head", "n_heads", "num_heads"),
    **_same("model.kv_heads", "num_key_value_heads", "num_query_groups", "n_kv_heads"),
    **_same("model.intermediate_size", "ffn_hidden_size", "ffn_dim"),
    **_same("model.init_from", "model_name_or_path", "pretrained_model_name_or_path", "hf_assets_path"),
    # data
    **_other(
        "data.source", "name files or folders; nothing is downloaded",
        "dataset", "dataset_name", "dataset_path", "train_file", "data_path",
    ),
    **_other(
        "data.tokenizer.path", "with data.tokenizer.kind: file",
        "tokenizer_path", "tokenizer_model", "tokenizer_name",
    ),
    **_other(
        "", "there are no loader processes: a thread of each rank reads ahead",
        "dataloader_num_workers", "num_workers", "dataloader_pin_memory", "pin_memory",
    ),
    # files, logging, evaluation
    **_other(
        "run.root run.name", "a run is the directory ROOT/NAME",
        "output_dir", "out_dir", "default_root_dir", "dump_folder", "save_dir", "save",
    ),
    **_same("checkpoint.every_steps", "save_every", "save_steps", "save_interval", "checkpoint_interval"),
    **_same("checkpoint.keep", "save_total_limit", "save_top_k", "keep_latest_k"),
    **_other(
        "", "submit.py continues from the newest checkpoint by itself; `resume RUN` does so after a stop",
        "resume_from_checkpoint", "ckpt_path", "load_checkpoint",
    ),
    **_same("train.log_every", "logging_steps", "log_every_n_steps", "log_interval", "log_freq"),
    **_other(
        "train.evaluate_every", "it counts steps",
        "eval_steps", "eval_interval", "val_check_interval", "eval_every", "check_val_every_n_epoch",
    ),
    **_same("train.evaluate_sequences", "limit_val_batches", "eval_iters"),
    **_other(
        "track.tensorboard track.wandb track.mlflow", "each tracker has a separate key",
        "report_to", "logger", "wandb_project", "wandb_log", "enable_wandb", "enable_tensorboard",
    ),
    **_same("publish.to", "push_to_hub", "hub_model_id"),
}  # fmt: skip
"""What to use instead of the keys of PyTorch Lightning, Hugging Face's Trainer, torchtitan, Megatron-LM, DeepSpeed and
nanoGPT, by the names of these keys.

A name includes its section if the bare name is ambiguous.
"""


def find_counterpart(path: KeyPath) -> Counterpart | None:
    """Return what to use instead of the key at `path`; None if OTHER_NAMES does not have it.

    The longest end of the path that OTHER_NAMES has decides: `fp16.enabled` takes precedence over `enabled`.
    """
    names = [str(part).lower().replace("-", "_").lstrip("_") for part in path]
    ends = (".".join(names[start:]) for start in range(len(names)))
    return next((OTHER_NAMES[end] for end in ends if end in OTHER_NAMES), None)


def find_inner_counterparts(path: KeyPath, value: Any) -> Iterator[tuple[str, Counterpart]]:
    """Yield the name of each key in `value` that OTHER_NAMES has, and what to use instead.

    Args:
        path: the key path of `value`.
        value: the value. Only a mapping has keys.
    """
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if known := find_counterpart((*path, key)):
            yield str(key), known
        elif isinstance(inner, Mapping):
            yield from find_inner_counterparts((*path, key), inner)


# -- docs/config.md ------------------------------------------------------------------------------------------

_PAGE_HEAD = """# Config keys

Every key that a config file may contain. `python submit.py schema` prints the same as a JSON Schema for editors.

This page is generated from pipeline/config/sections.py by `make generated`; do not edit it.

- **On resume**: the column says when `resume RUN key=value` may change the key
  ([changing a run](changing.md#what-resume-may-change)):
  - `yes`: at any time.
  - `larger`: the value may be increased at any time.
  - `no`: only until the train stage has saved a checkpoint. Keys of `data` that affect the shards: only until the
    shards are finished. Keys of `evaluate`: only until there is an evaluation result. `run.sharing`: never.
- A key without a default is required if its section is used. The default of a section is a section in which each key
  has its default.
- Paths are relative to the file that contains them.
- `extends: FILE`, in any section and at the top level, includes another file.
"""


_FORMER_NAMES = """## Former names

Configs may still use the former name of a key. Sluice then prints the present name once.

"""
_RUN_JSON_KEYS = """## Keys in run.json

Sluice computes these values and stores them in `run.json` in the run directory, not in the config. Configs of older
versions contain these keys and can still be read. Set `model.max_window_layers` by hand only if you export a model that
was trained from scratch with `model.sliding_window`.

"""


def format_config_page() -> str:
    """Return docs/config.md: every key with its type, its default, its meaning, and whether `resume` may change it.

    The environment variable SLUICE_DOCSTRINGS must have been set when the sections were imported
    (pipeline/config/types.py). Otherwise they have no descriptions.
    """
    parts = [_PAGE_HEAD]
    for name, field in Config.model_fields.items():
        parts.append(f"## {name}\n\n{field.description}\n\n{_format_table(_list_rows(name, field, {}))}")
    former = [f"| `{old}` | `{new}` |" for old, new in RENAMED_KEYS.items()]
    parts.append(_FORMER_NAMES + "\n".join(["| former name | present name |", "| --- | --- |", *former, ""]))
    metadata = [
        f"| `{key}` | {_format_cell(field.description or '')} |"
        for key, field in walk_fields(RunMetadata)
        if "." in key
    ]
    parts.append(_RUN_JSON_KEYS + "\n".join(["| key | meaning |", "| --- | --- |", *metadata, ""]))
    return "\n".join(parts)


def _format_table(rows: Iterable[str]) -> str:
    return "\n".join(["| key | type | default | on resume | meaning |", "| --- | --- | --- | --- | --- |", *rows, ""])


def _list_rows(key: str, field: FieldInfo, printed: dict[type[Section], str]) -> Iterator[str]:
    """Yield a row of a Markdown table for each key below a section.

    Args:
        key: the dotted key of the section.
        field: the field of the section.
        printed: the dotted key of each class of sections that already has rows. Its rows are not repeated. This
            function adds the classes for which it yields rows.
    """
    for section, suffix in list_inner_sections(field.annotation):
        printed[section] = f"{key}{suffix}"
        for name, inner in section.model_fields.items():
            inner_key = f"{key}{suffix}.{inner.alias or name}"
            meaning = inner.description or ""
            same = [printed[kind] for kind, _ in list_inner_sections(inner.annotation) if kind in printed]
            if same:
                meaning += f" It has the keys of `{same[0]}`."
            cells = [
                f"`{inner_key}`",
                _describe_type(inner_key, inner),
                _format_default(inner),
                _describe_resume(inner_key),
                meaning,
            ]
            yield f"| {' | '.join(map(_format_cell, cells))} |"
            if not same:
                yield from _list_rows(inner_key, inner, printed)


def _describe_type(key: str, field: FieldInfo) -> str:
    """Return a description of the type of a key. For a section, omit the keys, because the rows below list them."""
    path = tuple(0 if part == "*" and _is_list(key, number) else part for number, part in enumerate(key.split(".")))
    nodes = _find_schemas(path, _config_schema())
    described = ["a section" if "properties" in node else _describe_schema(node) for node in nodes]
    if any(suffix for _, suffix in list_inner_sections(field.annotation)):
        described = ["a mapping of sections" if get_origin(field.annotation) is dict else "a list of sections"]
    return " or ".join(dict.fromkeys(described))


def _is_list(key: str, number: int) -> bool:
    """Return True if part `number` of a dotted key, counted from 0, is an index of a list."""
    path = tuple(key.split(".")[:number])
    return any("items" in node for node in _find_schemas(path, _config_schema()))


def _format_default(field: FieldInfo) -> str:
    """Return the default of a key as YAML; "" for a required key, and for a section because its keys have defaults."""
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
