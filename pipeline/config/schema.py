"""What a config may hold, as the models' JSON Schema says it: for editors, and in words for whoever made a mistake.

`python submit.py schema` writes `configs/schema.json`, with the docstring of each field (pipeline/config/types.py). The
words come from the same schema, so that no text repeats what a model says.
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from typing import Any

from pipeline.config.other_names import counterpart, inner_counterparts
from pipeline.config.sections import Config

KeyPath = tuple[str | int, ...]
"""`("data", "source", 0)`: where a value stands in the config."""

_KINDS = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
_BOUNDS = {
    "minimum": "at least", "exclusiveMinimum": "greater than", "maximum": "at most", "exclusiveMaximum": "less than",
}  # fmt: skip


@cache
def model_schema() -> dict[str, Any]:
    """The JSON Schema that pydantic makes of the models."""
    return Config.model_json_schema()


# -- for editors ---------------------------------------------------------------------------------------------


def format_json_schema() -> str:
    """The JSON Schema of config files, `configs/schema.json`: the models', and `extends` in every section.

    No key is required in it, because any key may come from an extended file.
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


# -- in words ------------------------------------------------------------------------------------------------


def describe_allowed(at: KeyPath) -> str:
    """What may stand at a key path: `a whole number at least 1 or null`."""
    return " or ".join(map(_words, _schemas_at(at)))


def list_section_keys(at: KeyPath) -> list[str]:
    """The keys of the section at a key path."""
    return [key for node in _schemas_at(at) for key in node.get("properties", {})]


def suggest_keys(at: KeyPath) -> list[str]:
    """The keys that may be meant by one that its section does not have.

    What other programs call so; else the key of that name in another section, of several (each stage has a `time`) the
    one whose path is most like the given one, and keys of its own section with a name like it.
    """
    name, path = str(at[-1]), ".".join(map(str, at))
    if known := counterpart(at):
        return list(known.keys)
    namesakes = [key for key in list_keys(()) if key.rpartition(".")[2] == name]
    near = difflib.get_close_matches(path, namesakes, n=1, cutoff=0.0)
    return near + difflib.get_close_matches(name, list_section_keys(at[:-1]), n=2, cutoff=0.7 if near else 0.5)


def describe_replacements(at: KeyPath, value: Any) -> list[str]:
    """Return what to write instead of the unknown key at a key path, and instead of the keys in its `value`."""
    known, near = counterpart(at), suggest_keys(at)
    own = [known.describe()] if known and known.note else [f"did you mean {' or '.join(near)}?"] if near else []
    return own + [f"{key}: {found.describe()}" for key, found in inner_counterparts(at, value)]


@cache
def list_keys(at: KeyPath) -> list[str]:
    """All keys below a key path, each with its whole path."""
    below = [(*at, key) for key in list_section_keys(at)]
    return [found for path in below for found in (".".join(map(str, path)), *list_keys(path))]


def _branches(node: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a union; of anything else, itself."""
    if "$ref" in node:
        node = model_schema()["$defs"][node["$ref"].rpartition("/")[2]]
    return [branch for choice in node["anyOf"] for branch in _branches(choice)] if "anyOf" in node else [node]


def _schemas_at(at: KeyPath) -> list[dict[str, Any]]:
    """What the value at a key path must follow: one of these."""
    nodes = [model_schema()]
    for part in at:
        if isinstance(part, str):
            inner = [node.get("properties", {}).get(part) or node.get("additionalProperties") for node in nodes]
        else:
            inner = [dict(enumerate(node.get("prefixItems", ()))).get(part) or node.get("items") for node in nodes]
        nodes = [branch for node in inner if node for branch in _branches(node)]
    return nodes


def _words(node: dict[str, Any]) -> str:
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    if "properties" in node:
        return "a section with the keys " + ", ".join(node["properties"])
    if "prefixItems" in node:
        return "a list of " + " and ".join(map(_words, node["prefixItems"]))
    if "items" in node:
        item = " or ".join(map(_words, _branches(node["items"])))
        return f"a list{' with at least one item' * bool(node.get('minItems'))}, each item {item}"
    limits = " and ".join(f"{words} {node[key]}" for key, words in _BOUNDS.items() if key in node)
    kind = node.get("type", "anything").replace("object", "keys and values")
    return f"{_KINDS.get(kind, kind)} {limits}".strip()
