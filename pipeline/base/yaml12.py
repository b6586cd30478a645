"""Read and write YAML by the core schema of YAML 1.2, and record the line of each key.

PyYAML follows YAML 1.1, whose rules are surprising: `no` and `on` are booleans, `00:20:00` is a number in base 60, and
`1e-3` is a string. Here, only true and false are booleans, `1e-3` is a number and `00:20:00` a string. `2_000_000` is
still a number. Duplicate keys, unknown tags, excessive aliases, and numbers of more than 64 bits are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import yaml

from pipeline.base.errors import ConfigError

_MAX_VALUES = 100_000


class LocatedKey(str):
    """A key of a mapping: a string with its location `where`, which is FILE:LINE or the command line."""

    where: str

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


_PREFIX = "tag:yaml.org,2002:"
_BASES = {"0o": 8, "0x": 16}
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
    "str": ("[^\ud800-\udfff]*", "", str),  # half of a surrogate pair is not a character
}
"""The scalar types of YAML 1.2's core schema (section 10.3.2), plus `_` between digits.

For each type: the pattern of its text, the characters with which a value without a tag may begin, and the conversion
of the text to a value."""


class _Loader(yaml.BaseLoader):
    """Load YAML as plain values with :class:`LocatedKey` as keys."""

    where = ""
    """The location of all keys; if "", each key is located at its line in the file `name`."""
    value_count = 0

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node."""
        # Without its cache, PyYAML constructs the target of an alias again, so that the values of aliases are counted.
        # Otherwise, aliases of aliases could produce an exponential number of values.
        self.constructed_objects.clear()
        self.value_count += 1
        if self.value_count > _MAX_VALUES:
            self.raise_problem(node, f"more than {_MAX_VALUES} values; are there aliases of aliases?")
        if node.tag.removeprefix(_PREFIX) not in (_SCALARS if isinstance(node, yaml.ScalarNode) else ("seq", "map")):
            self.raise_problem(node, f"the tag {node.tag} is not supported here")
        return super().construct_object(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        """Return the value of a scalar node, whose type may be set by a tag."""
        type_name = node.tag.removeprefix(_PREFIX)
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
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.raise_problem(key, "a key must be a string, not a list or a mapping")
            if key.value in result:
                self.raise_problem(key, f"duplicate key {format_value(key.value)}")
            line = (value if isinstance(value, yaml.ScalarNode) else key).start_mark.line + 1
            result[LocatedKey(key.value, self.where or f"{self.name}:{line}")] = self.construct_object(value)
        return result

    def raise_problem(self, node: yaml.Node, problem: str) -> NoReturn:
        """Raise the exception that PyYAML raises for problems of its own."""
        raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Write YAML in which each string is quoted that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that a list that occurs twice is written twice, not as an anchor and an alias."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Quote a string with invisible characters, which are then escaped. PyYAML itself folds U+0085 into a space."""
        return self.represent_scalar(f"{_PREFIX}str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
for _tag, (_pattern, _first, _) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def dump_yaml(values: Any) -> str:
    """Return plain values as YAML. :func:`parse_yaml` returns the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def parse_yaml(text: str, name: str, where: str = "") -> Any:
    """Return the plain values of one YAML document. Raises ConfigError with line and column if it is invalid.

    Args:
        text: the document.
        name: the file name, for locations and messages.
        where: the location of all keys, such as the command line; if "", each key is located at its line.
    """
    position: int | None = None
    try:
        loader = _Loader(text)
        loader.name, loader.where = name, where
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = mark.index if mark else None
        problem = f"{error.problem} ({error.context})" if error.context else str(error.problem)
        if "an alias" in problem:
            problem += "; put it in quotes"
        elif r"'\t'" in problem:
            problem += "; indent with spaces"
    except yaml.reader.ReaderError as error:
        position = error.position
        problem = f"the character {chr(error.character)!a} is not allowed"
    except RecursionError:
        problem = "nested too deeply"
    except (ValueError, OverflowError) as error:
        # from PyYAML for escapes such as "\UFFFFFFFF", from Python for numbers of thousands of digits
        problem = str(error)
    location = name
    if not where and position is not None:
        line = text.count("\n", 0, position) + 1
        column = position - text.rfind("\n", 0, position)
        location = f"{name}:{line}:{column}"
    raise ConfigError("config.invalid_yaml", f"{location}: cannot be read as YAML: {problem}")
