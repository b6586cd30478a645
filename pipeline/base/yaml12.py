"""Read and write YAML by the core schema of YAML 1.2, and record the line of each key.

PyYAML follows YAML 1.1, which has surprising rules: `no` and `on` are booleans, `00:20:00` is a number in base 60, and
`1e-3` is a string. In this module, only true and false are booleans, `1e-3` is a number and `00:20:00` is a string. As
in YAML 1.1, `2_000_000` is a number. Duplicate keys, unknown tags, excessive aliases, and numbers of more than 64 bits
are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import yaml

from pipeline.base.errors import ConfigError

_MAX_VALUES = 100_000
"""The maximum number of values in a document, after aliases are replaced by their values."""


class LocatedKey(str):
    """A key of a mapping: a string that also has a location."""

    where: str
    """The location of the key: `FILE:LINE` or `command line`."""

    def __new__(cls, text: str, where: str) -> LocatedKey:
        """Create the key `text` at the location `where`."""
        key = super().__new__(cls, text)
        key.where = where
        return key


def format_value(value: Any) -> str:
    """Return a value as error messages show it: JSON on one line, at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if text.isprintable() else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


_TAG_PREFIX = "tag:yaml.org,2002:"
_BASES = {"0o": 8, "0x": 16}
"""Prefix of an integer → its base."""
_SCALARS: dict[str, tuple[str, Sequence[str], Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9]+(_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+",
        "-+0123456789",
        lambda text: int(text, _BASES.get(text[:2], 10)),
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
    "str": ("[^\ud800-\udfff]*", "", str),  # a surrogate alone is not a character
}
"""The scalar types of YAML 1.2's core schema (section 10.3.2), plus `_` between digits.

For each type: the pattern of its text, the characters with which a value without a tag may begin, and the conversion
of the text to a value."""


class _Loader(yaml.BaseLoader):
    """Load YAML as plain values with :class:`LocatedKey` as keys."""

    where = ""
    """The location of all keys. If it is "", the location of a key is its line in the file `name`."""
    value_count = 0
    """The number of values constructed so far."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node."""
        # Aliases of aliases can produce an exponential number of values, so the values of an alias must be counted.
        # With an empty cache, PyYAML constructs these values again for each alias.
        self.constructed_objects.clear()
        self.value_count += 1
        if self.value_count > _MAX_VALUES:
            self.raise_problem(node, f"more than {_MAX_VALUES} values; are there aliases of aliases?")
        valid_types = _SCALARS if isinstance(node, yaml.ScalarNode) else ("seq", "map")
        if node.tag.removeprefix(_TAG_PREFIX) not in valid_types:
            self.raise_problem(node, f"the tag {node.tag} is not supported here")
        return super().construct_object(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        """Return the value of a scalar node. A tag or the text of the node determines the type."""
        type_name = node.tag.removeprefix(_TAG_PREFIX)
        pattern, _, convert = _SCALARS[type_name]
        if not re.fullmatch(pattern, node.value):
            self.raise_problem(node, f"{format_value(node.value)} is not a value of type {type_name}")
        value = convert(node.value)
        if isinstance(value, int) and abs(value) >= 2**64:
            self.raise_problem(node, f"{format_value(node.value)}: the number has more than 64 bits")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping. Its keys are strings, even if they look like numbers."""
        result: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.raise_problem(key_node, "a key must be a string, not a list or a mapping")
            if key_node.value in result:
                self.raise_problem(key_node, f"duplicate key {format_value(key_node.value)}")
            # a scalar may be on a later line than its key; messages about a key concern its value
            line = (value_node if isinstance(value_node, yaml.ScalarNode) else key_node).start_mark.line + 1
            result[LocatedKey(key_node.value, self.where or f"{self.name}:{line}")] = self.construct_object(value_node)
        return result

    def raise_problem(self, node: yaml.Node, problem: str) -> NoReturn:
        """Raise the same exception as PyYAML for an invalid document, with the position of `node`."""
        raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Write YAML. Strings are quoted if YAML 1.1 or 1.2 would otherwise read them as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that no anchors and aliases are written for a list that occurs twice."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the node of a string. Strings with invisible characters are quoted, so that the characters are
        escaped.

        Without quotes, a string with U+0085 would be read back with a space instead.
        """
        return self.represent_scalar(f"{_TAG_PREFIX}str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
for _type_name, (_pattern, _first_characters, _) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            _TAG_PREFIX + _type_name, re.compile(rf"(?:{_pattern})\Z"), list(_first_characters)
        )


def dump_yaml(values: Any) -> str:
    """Return plain values (mappings, lists and scalars) as YAML. :func:`parse_yaml` reads the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def parse_yaml(text: str, name: str, where: str = "") -> Any:
    """Return the plain values of one YAML document. Raises ConfigError with line and column if it is invalid.

    Args:
        text: the document.
        name: the file name, for locations and messages.
        where: the location of all keys, such as `command line`. If it is "", the location of a key is its line.
    """
    position: int | None = None
    try:
        loader = _Loader(text)
        loader.name = name
        loader.where = where
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = mark.index if mark else None
        problem = f"{error.problem} ({error.context})" if error.context else str(error.problem)
        if "an alias" in problem:  # the value begins with `*`
            problem += "; put the value in quotes"
        elif r"'\t'" in problem:  # PyYAML writes a tab in this form
            problem += "; indent with spaces"
    except yaml.reader.ReaderError as error:
        position = error.position
        problem = f"the character {chr(error.character)!a} is not allowed"
    except RecursionError:
        problem = "nested too deeply"
    except (ValueError, OverflowError) as error:
        # PyYAML raises these errors for escapes such as "\UFFFFFFFF", and Python for numbers of thousands of digits
        problem = str(error)
    location = name
    if not where and position is not None:  # with `where`, `text` is a short value without useful line numbers
        line = text.count("\n", 0, position) + 1
        column = position - text.rfind("\n", 0, position)
        location = f"{name}:{line}:{column}"
    raise ConfigError("config.invalid_yaml", f"{location}: cannot be read as YAML: {problem}")
