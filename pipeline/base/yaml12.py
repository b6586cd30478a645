"""YAML 1.2's core schema, plain values only, and keys that know on which line they stand.

The older rules that PyYAML follows surprise people: there `no` and `on` are booleans, `00:20:00` is a number in base
sixty and `1e-3` a text. Here only true and false are booleans, `1e-3` is a number and `00:20:00` a text; `2_000_000` is
a number as before. A key that stands twice is an error, and so are tags, aliases without end, and numbers of more than
64 bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import yaml

from pipeline.base.errors import ConfigError

_MOST_VALUES = 100_000


class LocatedKey(str):
    """A key of a mapping that knows where it stands; to everybody else it is its text."""

    where: str

    def __new__(cls, text: str, where: str) -> LocatedKey:
        """The key `text`, which stands at `where`: file and line, or the command line."""
        key = super().__new__(cls, text)
        key.where = where
        return key


def format_value(value: Any) -> str:
    """A value as an error shows it: on one line and not too long."""
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
    "str": ("[^\ud800-\udfff]*", "", str),  # half of a surrogate pair is no character
}
"""YAML 1.2's core schema (section 10.3.2), plus `_` between digits: what each type looks like, the characters that it
may begin with where no tag says its type, and its value."""


class _Loader(yaml.BaseLoader):
    """Gives plain values for YAML, whose keys know where they stand."""

    where = ""
    """Where all keys stand; "": in the file `name`, each on its line."""
    values = 0

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node."""
        self.constructed_objects.clear()  # what an alias stands for counts again: aliases of aliases could be endless
        self.values += 1
        if self.values > _MOST_VALUES:
            self.refuse(node, f"more than {_MOST_VALUES} values; are there aliases of aliases?")
        if node.tag.removeprefix(_PREFIX) not in (_SCALARS if isinstance(node, yaml.ScalarNode) else ("seq", "map")):
            self.refuse(node, f"the tag {node.tag} is not supported here")
        return super().construct_object(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        """The value of a node with one of the types above, which a tag may have asked for."""
        kind = node.tag.removeprefix(_PREFIX)
        pattern, _, convert = _SCALARS[kind]
        if not re.fullmatch(pattern, node.value):
            self.refuse(node, f"{format_value(node.value)} is no {kind}")
        value = convert(node.value)
        if isinstance(value, int) and abs(value) >= 2**64:
            self.refuse(node, f"{format_value(node.value)}: the number has more than 64 bits")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping; its keys are texts, whatever they look like."""
        result: dict[Hashable, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.refuse(key, "a key is a word, not a list or a mapping")
            if key.value in result:
                self.refuse(key, f"{format_value(key.value)} stands twice")
            line = (value if isinstance(value, yaml.ScalarNode) else key).start_mark.line + 1
            result[LocatedKey(key.value, self.where or f"{self.name}:{line}")] = self.construct_object(value)
        return result

    def refuse(self, node: yaml.Node, problem: str) -> NoReturn:
        """Raise what PyYAML raises for its own problems."""
        raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that a reader of YAML 1.1 or 1.2 would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal lists twice rather than as an anchor and an alias."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Escape what cannot be seen: PyYAML itself folds U+0085 into a blank."""
        return self.represent_scalar(f"{_PREFIX}str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
for _tag, (_pattern, _first, _) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def dump_yaml(values: Any) -> str:
    """Plain values as YAML; :func:`parse` gives them back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def parse_yaml(text: str, name: str, where: str = "") -> Any:
    """Plain values of one YAML document, called `name`. Its keys stand at `where`; "": on its lines."""
    at: int | None = None
    try:
        loader = _Loader(text)
        loader.name, loader.where = name, where
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at, what = mark.index if mark else None, f"{error.problem}{f' ({error.context})' if error.context else ''}"
        what += "; put it in quotes" if "an alias" in what else "; indent with blanks" if r"'\t'" in what else ""
    except yaml.reader.ReaderError as error:
        at, what = error.position, f"the character {chr(error.character)!a} is not allowed"
    except RecursionError:
        what = "nested too deeply"
    except (ValueError, OverflowError) as error:  # PyYAML on escapes such as "\UFFFFFFFF", Python on 5,000 digits
        what = str(error)
    line = "" if where or at is None else f":{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"
    raise ConfigError("config.invalid_yaml", f"{name}{line}: cannot be read as YAML: {what}")
