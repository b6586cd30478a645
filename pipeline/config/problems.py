"""What is wrong with a config, in words: pydantic's errors as one readable line per problem.

Each line says where the value stands, its key, the value, and what is allowed there or the nearest valid key.
What is allowed is read from the models' JSON Schema, so that no text here repeats the models.

pydantic reports a union (`parallel.data: auto | {replicate, shard}`) once per branch and puts the branch's name into
the key path. :func:`_collapse` turns that into one problem: if a branch got further into the value than the others,
it is the one that was meant and its problems are shown; otherwise the whole value is wrong, and all branches together
say what is allowed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from operator import getitem
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.base.errors import UserError
from pipeline.config.layout import check
from pipeline.config.sections import Config

KeyPath = tuple[str | int, ...]
"""`("data", "source", 0)`: where a value stands in the config."""


class ConfigError(UserError):
    """A config that cannot be used; the message lists every problem on a line of its own."""


def validate(values: Mapping[str, Any], where: str, marks: Mapping[KeyPath, str]) -> Config:
    """The config that `values` (plain YAML values) describe; `marks` tell where each key path stands, else `where`.

    Types are strict as in JSON: `"2"` is no number, `1` no boolean. Raises ConfigError with all problems.
    """
    try:
        config = Config.model_validate_json(json.dumps(values, default=str), strict=True)
        check(config)
        return config
    except ValidationError as error:
        problems = list(_collapse(error.errors(include_url=False), values))
    except ValueError as error:
        problems = [("value_error", (), str(error))]
    lines = [_Problem(kind, at, message, values, where, marks).text() for kind, at, message in problems]
    raise ConfigError("\n".join(dict.fromkeys(lines)))


def dotted(at: KeyPath, *more: str | int) -> str:
    """A key path as a person writes it: `data.source.0`."""
    return ".".join(str(part) if str(part).isprintable() else show(part) for part in (*at, *more))


def show(value: Any) -> str:
    """A value as an error shows it: on one line and not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if text.isprintable() else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


@cache
def model_schema() -> dict[str, Any]:
    """The JSON Schema that pydantic makes of the models."""
    return Config.model_json_schema()


class _Problem:
    """One problem of the config `values`."""

    def __init__(
        self, kind: str, at: KeyPath, message: str, values: Any, where: str, marks: Mapping[KeyPath, str]
    ) -> None:
        self.kind, self.at, self.message = kind, at, message
        self.values, self.default, self.marks = values, where, marks

    def text(self) -> str:
        """The line that is shown."""
        key = dotted(self.at)
        where = self._where(self.at[:-1] if self.kind == "missing" else self.at)
        if self.kind == "missing":
            return f"{where}: {key} is missing; it should be {self._allowed()}"
        if self.kind == "json_invalid":  # pydantic's own limit of nesting
            return f"{where}: {self.message}"
        value = reduce(getitem, self.at, self.values)
        if self.kind == "extra_forbidden":
            return f"{where}: {key}: {show(value)}: there is no such key; {self._valid_keys()}"
        if self.kind == "value_error":
            if isinstance(value, Mapping):  # a rule between several keys: the message names them and their values
                return f"{self._where_named() or where}: {key + ': ' if self.at else ''}{self.message}"
            return f"{where}: {key}: {show(value)}: {self.message}"
        allowed = self._allowed()
        if self.kind == "finite_number":
            allowed = allowed.replace("a number", "a finite number")
        hint = "; put it in quotes" if "text" in allowed and isinstance(value, (bool, int, float)) else ""
        return f"{where}: {key}: {show(value)} should be {allowed}{hint}"

    def _where(self, at: KeyPath) -> str:
        return next((self.marks[at[:n]] for n in range(len(at), 0, -1) if at[:n] in self.marks), self.default)

    def _where_named(self) -> str:
        """Where the keys stand that the message names."""
        names = re.findall(r"[a-z_]+(?:\.[a-z_]+)*", self.message)
        # At the top a bare word such as "data" is more likely just a word.
        paths = ((*self.at, *name.split(".")) for name in names if self.at or "." in name)
        return ", ".join(dict.fromkeys(self.marks[path] for path in paths if path in self.marks))

    def _valid_keys(self) -> str:
        valid = [key for branch in _branches(_schema_at(self.at[:-1])) for key in branch.get("properties", {})]
        near = difflib.get_close_matches(str(self.at[-1]), valid, n=2, cutoff=0.5)
        mean = f"did you mean {' or '.join(near)}? " if near else ""
        return f"{mean}{dotted(self.at[:-1]) or 'the config'} has {', '.join(valid)}"

    def _allowed(self) -> str:
        return _describe(_schema_at(self.at))


def _collapse(errors: list[ErrorDetails], values: Any) -> Iterator[tuple[str, KeyPath, str]]:
    """Kind, key path and message of each problem, one where pydantic has one per branch of a union."""
    unions: dict[KeyPath, list[tuple[str, KeyPath, str]]] = {}
    for error in errors:
        at, union = _without_branches(error, values)
        problem = (error["type"], at, error["msg"].removeprefix("Value error, "))
        if union is None:
            yield problem
        else:
            unions.setdefault(union, []).append(problem)
    for union, problems in unions.items():
        deeper = [problem for problem in problems if len(problem[1]) > len(union) or problem[0] == "value_error"]
        yield from deeper or [("union", union, problems[0][2])]


def _without_branches(error: ErrorDetails, values: Any) -> tuple[KeyPath, KeyPath | None]:
    """An error's key path without the names of union branches, and the path of the outermost union, if any."""
    at: KeyPath = ()
    union: KeyPath | None = None
    for n, part in enumerate(error["loc"], 1):
        is_key = (isinstance(values, Mapping) and part in values) or (
            isinstance(values, list) and isinstance(part, int) and part < len(values)
        )
        if is_key or (error["type"] == "missing" and n == len(error["loc"])):
            at = (*at, part)
            values = values[part] if is_key else None
        elif union is None:
            union = at
    return at, union


# -- what the schema allows ----------------------------------------------------------------------------------


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "greater than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def _resolve(node: dict[str, Any]) -> dict[str, Any]:
    name = node.get("$ref")
    return model_schema()["$defs"][name.rsplit("/", 1)[1]] if name else node


def _branches(node: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a union; of anything else, itself."""
    node = _resolve(node)
    return list(map(_resolve, node.get("anyOf", [node])))


def _schema_at(at: KeyPath) -> dict[str, Any]:
    """The schema of the value at a key path, {} where there is none."""
    node = model_schema()
    for part in at:
        child: dict[str, Any] | None = None
        for branch in _branches(node):
            if isinstance(part, str):
                child = branch.get("properties", {}).get(part) or branch.get("additionalProperties") or None
            else:
                child = dict(enumerate(branch.get("prefixItems", []))).get(part) or branch.get("items")
            if child:
                break
        node = child or {}
    return _resolve(node)


def _describe(node: dict[str, Any]) -> str:
    """What a schema allows: `a whole number, at least 1`."""
    node = _resolve(node)
    if "anyOf" in node:
        return " or ".join(map(_describe, node["anyOf"]))
    if "const" in node:
        return show(node["const"]).strip('"')
    if "enum" in node:
        return "one of " + ", ".join(show(choice).strip('"') for choice in node["enum"])
    if "properties" in node:
        return "a section with the keys " + ", ".join(node["properties"])
    if "prefixItems" in node:
        return "a list of " + " and ".join(map(_describe, node["prefixItems"]))
    if "items" in node:
        return f"a list{' with at least one item' * bool(node.get('minItems'))}, each item {_describe(node['items'])}"
    limits = " and ".join(f"{words} {node[key]}" for key, words in _BOUNDS.items() if key in node)
    return f"{_KINDS.get(node.get('type', ''), '')} {limits}".strip()
