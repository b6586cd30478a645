"""Reading configs: YAML files, what they extend, and the command line, into one checked `Config`.

    defaults (pipeline/config/sections.py)  <  extended files  <  the file  <  section.key=value on the command line

A file, or a section of it, may say `extends: other.yaml` (or a list, later files win). Inside a section the other
file holds that section's content: `site: {extends: sites/mycluster.yaml, partition: low}`. Names are relative to the
file that says them. Mappings merge key by key; everything else, lists too, is replaced. On the command line the value
is read as YAML (`train.steps=400`, `site.setup=[module load cuda]`); no value at all (`site.account=`) is null.

The YAML is version 1.2's core schema, because the older rules that PyYAML follows surprise people: there `no` and
`on` are booleans, `00:20:00` is a number in base sixty and `1e-3` a text. Here only true and false are booleans,
`1e-3` is a number and `00:20:00` a text; `2_000_000` is a number as before. A key that stands twice is an error.
Types are strict: `threads: "2"` and `deterministic: no` are errors, not guesses.

While the values are read, `_Reader.marks` remembers where each key path stands, so that `pipeline/config/problems.py`
can say for every problem at once: file and line, key, value, what is allowed, the nearest valid key.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import parallel as config_communication
from pipeline.config import recovery as config_recovery
from pipeline.config import sections as config_module
from pipeline.config import site as config_site
from pipeline.config import stages as config_stages
from pipeline.config import sweep as config_sweep
from pipeline.config.problems import ConfigError as ConfigError
from pipeline.config.problems import KeyPath, dotted, model_schema, show, validate
from pipeline.config.sections import Config
from pipeline.config.site import SiteConfig
from pipeline.config.types import field_docstrings

COMMAND_LINE = "command line"

_MAX_NODES = 100_000
_MAX_DEPTH = 20
_PREFIX = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Composes YAML with the scalars of YAML 1.2's core schema (section 10.3.2), plus `_` between digits."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"(?:{_pattern})\Z"), _first)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that a reader of YAML 1.1 or 1.2 would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal lists twice rather than as an anchor and an alias."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Escape what cannot be seen: PyYAML itself folds U+0085 into a blank."""
        return self.represent_scalar(f"{_PREFIX}str", data, style=None if data.isprintable() else '"')


_Dumper.yaml_implicit_resolvers = {
    first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, []) + _Loader.yaml_implicit_resolvers.get(first, [])
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}
_Dumper.add_representer(str, _Dumper.represent_str)


# -- the public functions ------------------------------------------------------------------------------------


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in file `path`, with what it extends and `key=value` overrides; ConfigError lists all problems.

    Those of a sweep's points, too: nothing can be done with a run that has a wrong one.
    """
    reader = _Reader()
    values = reader.file(Path(path), (), ())
    changes = reader.changes(overrides)
    reader.report()
    _mark_changes(reader.marks, values, changes)
    config = validate(merge(values, changes), str(path), reader.marks)
    point_configs(config)
    return config


def load_site(path: Path | None) -> SiteConfig:
    """The site profile in file `path` (None: the defaults); ConfigError lists all problems."""
    reader = _Reader()
    values = reader.file(path, ("site",), ()) if path else {}
    reader.report()
    return validate({"run": {"name": "any"}, "train": {"steps": 1}, "site": values}, str(path), reader.marks).site


def config_from_mapping(mapping: Mapping[str, Any], where: str) -> Config:
    """The config that `mapping` (plain YAML values) describes; errors say that it stands in `where`."""
    return validate(mapping, where, {})


def point_configs(config: Config) -> list[Config]:
    """The config of each point. Raises ConfigError, with the point's values, for one that is wrong."""
    if config.sweep is None:
        return []
    base = {**config.model_dump(mode="json"), "sweep": None}
    configs = []
    for number, values in enumerate(config.sweep.points()):
        root = str(config.run.root / config.run.name / "points")
        point: dict[str, Any] = {"run": {"name": f"{number:03d}", "root": root}}
        for key, value in values.items():
            nested: Any = value
            for name in reversed(key.split(".")):
                nested = {name: nested}
            point = merge(point, nested)
        words = ", ".join(f"{key}={value}" for key, value in values.items())
        configs.append(config_from_mapping(merge(base, point), f"sweep, point {number:03d} ({words})"))
    return configs


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["train.steps=400"]` → `{"train": {"steps": 400}}`; later ones win. ConfigError lists all problems."""
    reader = _Reader()
    changes = reader.changes(overrides)
    reader.report()
    return changes


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`base` changed by `extra`: mappings merge key by key, anything else of `extra` replaces what `base` has."""
    result = dict(base)
    for key, value in extra.items():
        old = result.get(key)
        if isinstance(value, Mapping):
            result[key] = merge(old if isinstance(old, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def dump_config(config: Config) -> str:
    """The whole config as YAML; `load_config` reads the same config from it."""
    values = config.model_dump(mode="json")
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def schema() -> dict[str, Any]:
    """The JSON Schema of config files: the models', and `extends` in every section.

    No key is required in it, because any key may come from an extended file.
    """
    result: dict[str, Any] = json.loads(json.dumps(model_schema()))
    result["title"] = "A run of Sluice"
    extends = {
        "anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}],
        "description": "File, or files, that this one changes; relative to this file. Later files win.",
        "title": "Extends",
    }
    documented: dict[str, dict[str, str]] = {}
    for module in (config_module, config_communication, config_recovery, config_site, config_stages, config_sweep):
        documented |= field_docstrings(inspect.getsource(module))
    for name, section in (("Config", result), *result["$defs"].items()):
        for field, text in documented.get(name, {}).items():
            section["properties"][field]["description"] = text
        if "properties" in section:
            section["properties"]["extends"] = extends
            section.pop("required", None)
    return result


def schema_text() -> str:
    """:func:`schema` as the text of `configs/schema.json`."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


# -- reading -------------------------------------------------------------------------------------------------


class _Reader:
    """Turns YAML files into plain values; remembers where each key path stands, and collects problems."""

    def __init__(self) -> None:
        self.marks: dict[KeyPath, str] = {}
        self.problems: list[str] = []
        self._nodes = 0

    def report(self) -> None:
        """Raise ConfigError if there were problems."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))

    def file(self, path: Path, at: KeyPath, chain: tuple[str, ...], by: str = "") -> dict[str, Any]:
        """The mapping in file `path`, which belongs at key path `at`.

        `chain` are the files that extend it (their real paths) and `by` is where the last of them names it.
        """
        name = os.path.normpath(path)
        try:
            text = path.read_bytes().decode("utf-8-sig")
            problems = len(self.problems)
            value = self._parse(text, name, at, (*chain, os.path.realpath(path)))
            if isinstance(value, dict):
                return value
            if len(self.problems) > problems:
                return {}
            what = "the file is empty" if value is None else f"the file holds {show(value)}"
            problem = f"{what}; it should hold keys and values such as `run: {{name: first}}`"
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 text (byte {error.start + 1})"
        except FileNotFoundError:
            problem = "there is no such file"
        except (OSError, ValueError) as error:
            problem = f"cannot read it: {getattr(error, 'strerror', None) or error}"
        self.problems.append(f"{by}{name}: {problem}")
        return {}

    def changes(self, overrides: Sequence[str]) -> dict[str, Any]:
        """What `section.key=value` texts ask for, as a mapping."""
        result: dict[str, Any] = {}
        for override in overrides:
            key, equals, text = override.partition("=")
            *parents, last = key.split(".")
            if not equals or not all((*parents, last)) or len(parents) > _MAX_DEPTH:
                self.problems.append(f"{COMMAND_LINE}: {show(override)}: write section.key=value")
                continue
            name = f"{COMMAND_LINE}: {dotted((*parents, last))}"
            value = self._parse(text, name, None, ())
            section = result
            for depth, parent in enumerate(parents, 1):
                section = section.setdefault(parent, {})
                if not isinstance(section, dict):
                    above = f"{dotted(tuple(parents[:depth]))} is {show(section)} already, not a section"
                    self.problems.append(f"{name}: {above}")
                    break
            else:
                section.update(merge({last: section.get(last)}, {last: value}))
        return result

    def _parse(self, text: str, name: str, at: KeyPath | None, chain: tuple[str, ...]) -> Any:
        """Values of one YAML document; None after a problem. `at` is None where no places are remembered."""
        try:
            node = yaml.compose(text, Loader=_Loader)
            return None if node is None else self._construct(node, name, at, chain)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f":{mark.line + 1}:{mark.column + 1}" if mark and at is not None else ""
            context = f" ({error.context})" if error.context else ""
            self.problems.append(f"{name}{place}: not YAML: {error.problem}{context}")
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            place = f":{line}" if at is not None else ""
            self.problems.append(f"{name}{place}: not YAML: the character {chr(error.character)!a} is not allowed")
        except RecursionError:
            self.problems.append(f"{name}: nested too deeply")
        except (ValueError, OverflowError) as error:  # PyYAML on escapes such as "\UFFFFFFFF"
            self.problems.append(f"{name}: not YAML: {error}")
        return None

    def _construct(self, node: yaml.Node, name: str, at: KeyPath | None, chain: tuple[str, ...]) -> Any:
        """The plain value of a node; unlike PyYAML's own, it knows the key path."""
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise ValueError(f"more than {_MAX_NODES} values; are there aliases of aliases?")
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node.tag.removeprefix(_PREFIX), node.value)
            except ValueError as error:
                self._refuse(node, name, at, f"{show(node.value)}: {error}")
                return None
        if node.tag not in (_PREFIX + "seq", _PREFIX + "map"):
            self._refuse(node, name, at, f"the tag {node.tag} is not supported")
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self._child(item, item, i, name, at, chain) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        result: dict[str, Any] = {}
        extends: list[tuple[yaml.Node, Any]] = []
        for key, value in node.value:
            where = self._where(key, name, at)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(f"{where}: a key is a word, not a list or a mapping")
            elif key.value in result or (key.value == "extends" and extends):
                self.problems.append(f"{where}: {dotted(at or (), key.value)} stands twice")
            elif key.value == "extends" and at is not None:
                extends.append((value, self._construct(value, name, None, chain)))
            else:
                result[key.value] = self._child(value, key, key.value, name, at, chain)
        base: dict[str, Any] = {}
        if extends and at is not None:
            place, files = extends[0]
            by = f"{self._where(place, name, at)}: {dotted(at, 'extends')}: "
            files = files if isinstance(files, list) else [files]
            if not all(isinstance(file, str) and file and "\0" not in file for file in files):
                self.problems.append(f"{by}{show(files)} should name a file or files")
                files = []
            for file in reversed(files):  # the first to mark a key path is the one whose value counts
                base = merge(self._extend(file, by, name, at, chain), base)
        return merge(base, result)

    def _child(
        self, node: yaml.Node, key: yaml.Node, part: str | int, name: str, at: KeyPath | None, chain: tuple[str, ...]
    ) -> Any:
        if at is None:
            return self._construct(node, name, None, chain)
        path = (*at, part)
        self.marks.setdefault(path, self._where(node if isinstance(node, yaml.ScalarNode) else key, name, at))
        return self._construct(node, name, path, chain)

    def _extend(self, file: str, by: str, name: str, at: KeyPath, chain: tuple[str, ...]) -> dict[str, Any]:
        path = Path(name).parent / file
        if os.path.realpath(path) in chain:
            names = (*map(os.path.basename, chain), path.name)
            self.problems.append(f"{by}{file} extends itself ({' → '.join(names)})")
            return {}
        return self.file(path, at, chain, by)

    def _refuse(self, node: yaml.Node, name: str, at: KeyPath | None, problem: str) -> None:
        self.problems.append(f"{self._where(node, name, at)}: {dotted(at) + ': ' if at else ''}{problem}")

    @staticmethod
    def _where(node: yaml.Node, name: str, at: KeyPath | None) -> str:
        return name if at is None else f"{name}:{node.start_mark.line + 1}"


def _scalar(tag: str, text: str) -> Any:
    """The value of a scalar with a tag of the core schema. Raises ValueError with the reason."""
    plain = text.replace("_", "").lower()
    if tag == "str":
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("half of a surrogate pair is no character")
        return text
    if tag == "null":
        return None
    if tag == "bool" and plain in ("true", "false"):
        return plain == "true"
    if tag == "int":
        value = int(plain, {"0o": 8, "0x": 16}.get(plain[:2], 10))
        if abs(value) >= 2**64:
            raise ValueError("the number has more than 64 bits")
        return value
    if tag == "float":
        return float(re.sub(r"\.(inf|nan)$", r"\1", plain))
    raise ValueError(f"the tag {tag} is not supported here")


def _mark_changes(marks: dict[KeyPath, str], values: Any, changes: Mapping[str, Any], at: KeyPath = ()) -> None:
    """Note in `marks` what `merge(values, changes)` takes from the command line."""
    for key, change in changes.items():
        path, value = (*at, key), values.get(key) if isinstance(values, Mapping) else None
        if not (isinstance(change, Mapping) and isinstance(value, Mapping)):
            marks[path] = COMMAND_LINE
        if isinstance(change, Mapping):
            _mark_changes(marks, value, change, path)
