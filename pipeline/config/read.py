"""Reading configs: YAML files, what they extend, and the command line, into one checked `Config`.

    defaults (pipeline/config/sections.py)  <  extended files  <  the file  <  section.key=value on the command line

A file, or a section of it, may say `extends: other.yaml` (or a list, later files win). Inside a section the other
file holds that section's content: `site: {extends: sites/mycluster.yaml, partition: low}`. Names are relative to the
file that says them. Mappings merge key by key; everything else, lists too, is replaced. On the command line the value
is read as YAML (`train.steps=400`, `site.setup=[module load cuda]`); no value at all (`site.account=`) is null.

The YAML is version 1.2's (pipeline/base/yaml12.py). Types are strict: `threads: "2"` and `deterministic: no` are
errors, not guesses.

A file that cannot be read is refused with its first mistake; then all wrong values are told at once, a line each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.base.command import suggest_path
from pipeline.base.errors import ConfigError, UserError, limit_lines
from pipeline.base.files import open_regular_file
from pipeline.base.yaml12 import LocatedKey, dump_yaml, format_value, parse_yaml
from pipeline.config.datasets import CHAT_TEMPLATES
from pipeline.config.hugging_face import SWEPT_FOLDERS, fill_from_folder
from pipeline.config.masking import mask_secrets, mask_unknown_key
from pipeline.config.schema import KeyPath, describe_allowed, describe_replacements, list_section_keys, suggest_keys
from pipeline.config.sections import Config, RunConfig, list_keys_with
from pipeline.config.site import SiteConfig
from pipeline.config.types import Policy
from pipeline.parallel.mesh import check_config

COMMAND_LINE = "command line"
PLACEHOLDER = "…"
"""What stands for a value in a printed command: the user knows the value."""
_MOST_BYTES = 1 << 22
_MOST_PROBLEMS = 1000
_DEEPEST = 20
_NO_PATH = "python-stdlib"
OLDER_DEFAULTS: dict[str, dict[str, Any]] = {"data": {"add_special_tokens": False}}
"""What runs did before a key existed, if it is not the key's default. It holds for runs whose config lacks the key."""


REMOVED_SECTIONS = {
    "goodput": "`plan --goodput --assumptions FILE` reads its keys from a file (see configs/planning/assumptions.yaml)",
    "measure": "`python -m planning.calibrate CONFIG --out FILE` measures a machine",
}
"""Former sections of the config, and what replaces them. Old configs and old runs that have them still load."""
_GOODPUT_DEFAULTS = {
    "preemptions": 0.0, "preempted_s": 3600.0, "repair_hours": 24.0, "together": 0.0, "nodes_together": 1
}  # fmt: skip
"""The values that every run of older code has in its `goodput:` section."""
_reported_sections: set[str] = set()


# -- configs -------------------------------------------------------------------------------------------------


def load_config(path: Path, overrides: Sequence[str] = (), layout: bool = True) -> Config:
    """The config in file `path`, with what it extends and `key=value` overrides; ConfigError lists all problems.

    Those of a sweep's points, too: nothing can be done with a run that has a wrong one. `layout`: as in `check`.
    """
    where = f"{path}, {COMMAND_LINE}" if overrides else str(path)
    config = parse_config(apply_overrides(_read(Path(path)), overrides), where, layout)
    make_point_configs(config)
    return config


def load_run_config(path: Path) -> Config:
    """The config in the `config.yaml` of a run; raises as `load_config` does."""
    config = _run_config(path, _read(path))
    make_point_configs(config)
    return config


def _run_config(path: Path, made: Mapping[str, Any]) -> Config:
    return parse_config(_anchored(merge_values(OLDER_DEFAULTS, made)), str(path))


def make_run_values_dumper(path: Path) -> Callable[[Config], dict[str, Any]]:
    """Return a function that gives the values of a config for the run with the `config.yaml` at `path`.

    Keys that this file lacks are left out if they have the value that their absence stands for: the run's copy of the
    code may be older than the keys.
    """
    made = _read(path)
    absent = _run_config(path, made).model_dump(mode="json")
    return lambda config: _without_new(config.model_dump(mode="json"), made, absent)


def _without_new(values: Mapping[str, Any], made: Mapping[str, Any], absent: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        if key not in made and key in absent and value == absent[key]:
            continue
        inner: list[Any] = [value, made.get(key), absent.get(key)]
        found[key] = _without_new(*inner) if all(isinstance(one, Mapping) for one in inner) else value
    return found


def find_older_defaults(path: Path) -> dict[str, dict[str, Any]]:
    """The keys of BEFORE, by section, that the `config.yaml` of a run lacks."""
    made = _read(path)
    return {
        section: {key: value for key, value in keys.items() if key not in (made.get(section) or {})}
        for section, keys in OLDER_DEFAULTS.items()
    }


def load_site(path: Path | None) -> SiteConfig:
    """The site profile in file `path` (None: the defaults); ConfigError lists all problems."""
    values = {"run": {"name": "any"}, "train": {"steps": 1}, "site": _read(path) if path else {}}
    return parse_config(values, str(path)).site


def parse_config(values: Mapping[str, Any], where: str, layout: bool = True) -> Config:
    """The config that `values` (plain YAML values) describe; keys that do not know where they stand are in `where`.

    Types are strict as in JSON: `"2"` is no number, `1` no boolean. Raises ConfigError with all problems.
    """
    values = _without_removed_sections(values, where)
    try:
        config = Config.model_validate_json(json.dumps(fill_from_folder(values), default=str), strict=True)
        check_config(config, layout)
        return config
    except ValidationError as error:
        raise ConfigError("\n".join(_problems(error, values, where))) from None
    except ValueError as error:
        code = error.code if isinstance(error, UserError) else "config.conflict"
        raise ConfigError(code, f"{where}: {error}") from error


def _without_removed_sections(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `values` without former sections; print once what replaces a section that was used."""
    remaining = {key: value for key, value in values.items() if key not in REMOVED_SECTIONS}
    if isinstance(stages := remaining.get("stages"), Mapping):
        remaining["stages"] = {key: value for key, value in stages.items() if key != "measure"}
    for name, replacement in REMOVED_SECTIONS.items():
        used = values.get(name)
        if isinstance(used, Mapping):
            used = {key: value for key, value in used.items() if value not in (None, _GOODPUT_DEFAULTS.get(key))}
        if used and name not in _reported_sections:
            _reported_sections.add(name)
            print(f"note: {where}: the section `{name}` is ignored: {replacement}", file=sys.stderr, flush=True)
    return remaining


def make_point_configs(config: Config) -> list[Config]:
    """The config of each point. Raises ConfigError, with the point's values, for one that is wrong."""
    if config.sweep is None:
        return []
    base, folder = {**config.model_dump(mode="json"), "sweep": None}, config.run.root / config.run.name / "points"
    configs = []
    for number, values in enumerate(config.sweep.points()):
        where = f"sweep, point {number:03d} ({', '.join(f'{key}={value}' for key, value in values.items())})"
        point = merge_values(base, {"run": {"name": f"{number:03d}", "root": str(folder)}})
        for key, value in values.items():
            point = merge_values(point, _nested(key.split("."), value, where))
            if key == "model.init_from":  # null: the same sizes, with drawn weights
                point["model"] |= config.sweep.sources.get(str(value), {"init_sha256": None, "init_files": None})
        configs.append(parse_config(point, where))
    return configs


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["train.steps=400"]` → `{"train": {"steps": 400}}`; later ones win."""
    changes: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.split(".")
        if not equals or not all(names) or len(names) > _DEEPEST:
            shown = format_value(mask_secrets(override, "site.setup." if "setup" in key else ""))
            raise ConfigError(f"{COMMAND_LINE}: {shown}: write section.key=value")
        if text == PLACEHOLDER:
            raise ConfigError(
                f"{COMMAND_LINE}: {format_key_path(tuple(names))}: write a value in place of {PLACEHOLDER}"
            )
        value = parse_yaml(text, f"{COMMAND_LINE}: {format_key_path(tuple(names))}", COMMAND_LINE)
        changes = merge_values(changes, _nested(names, value, COMMAND_LINE))
    return changes


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`values` with those of the command line over them, and absolute paths."""
    return _anchored(merge_values(values, parse_overrides(overrides)))


def merge_values(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`base` changed by `extra`: mappings merge key by key, anything else of `extra` replaces what `base` has."""
    result = dict(base)
    for key, value in extra.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = merge_values(old, value)
        else:
            result.pop(key, None)  # else the old key stays, with where it stands
            result[key] = value
    return result


def _anchored(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with absolute paths; those that are no text are left to the check of types."""
    if isinstance(run := values.get("run"), dict):
        run.setdefault("root", str(RunConfig.model_fields["root"].default))
    for *sections, name in (*(key.split(".") for key in list_keys_with(Policy.PATH)), *SWEPT_FOLDERS):
        found: list[Any] = [values]
        for inner in sections:
            there = [section for section in found if isinstance(section, dict)]
            found = [one for section in there for one in (section.values() if inner == "*" else [section.get(inner)])]
        for section, key in ((one, key) for one in found if isinstance(one, dict) for key in list(one)):
            if name == "chat_template" and section[key] in CHAT_TEMPLATES:
                continue
            if key == name:  # and knows the file that says it; "command line" is in no folder
                section[key] = _absolute(section[key], os.path.dirname(getattr(key, "where", "")))
    return values


def _absolute(path: Any, folder: str) -> Any:
    if isinstance(path, list):
        return [_absolute(one, folder) for one in path]
    if not isinstance(path, str) or path == _NO_PATH:
        return path
    with suppress(ValueError):  # a null byte, or half a character, in the name of a user
        path = os.path.expanduser(path)
    return os.path.abspath(os.path.join(folder, path))


def _nested(names: Sequence[str], value: Any, where: str) -> dict[str, Any]:
    """`value` under the keys `names`, one in the other."""
    for name in reversed(names):
        value = {LocatedKey(name, where): value}
    return dict(value)


# -- files ---------------------------------------------------------------------------------------------------


def _read(path: Path, by: tuple[str, ...] = ()) -> dict[str, Any]:
    """The mapping in file `path`, with what it extends. `by`: the files, by their real paths, that extend it."""
    name = os.path.normpath(path)
    try:
        real = os.path.realpath(path)
        with open_regular_file(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        text = content.decode("utf-8-sig")
    except (OSError, ValueError, UserError) as error:
        hint = suggest_path(Path(name), "*.y*ml") if isinstance(error, FileNotFoundError) else ""
        hint = "; name a YAML file in it" if isinstance(error, IsADirectoryError) else hint
        raise ConfigError(f"{name}: cannot read it: {getattr(error, 'strerror', None) or error}{hint}") from error
    if real in by or len(by) > _DEEPEST:
        raise ConfigError(f"{name}: files extend one another in a circle, or too many of them")
    values = parse_yaml(text, name)
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name}: it should hold keys and values such as `run: {{name: first}}` (`init` writes some), not "
            + ("nothing" if values is None else format_value(values))
        )
    return _extended(values, path.parent, (*by, real))


def _extended(section: dict[LocatedKey, Any], folder: Path, by: tuple[str, ...]) -> dict[str, Any]:
    """`section` with what it, and what the sections in it, extend."""
    base: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in section.items():
        if key != "extends":
            own[key] = _extended(value, folder, by) if isinstance(value, dict) else value
            continue
        for file in value if isinstance(value, list) else [value]:
            try:
                if not isinstance(file, str) or not file:
                    raise ConfigError(f"{format_value(file)} should be the name of a file, or a list of names")
                base = merge_values(base, _read(folder / file, by))
            except ConfigError as error:
                raise ConfigError(f"{key.where}: extends: {error}") from error
    return merge_values(base, own)


def dump_config(config: Config) -> str:
    """The whole config as YAML; `load_config` reads the same config from it."""
    return dump_yaml(config.model_dump(mode="json"))


# -- problems ------------------------------------------------------------------------------------------------


def format_key_path(at: KeyPath) -> str:
    """A key path as a person writes it: `data.source.0`."""
    return ".".join(text if text.isprintable() and len(text) <= 80 else format_value(text) for text in map(str, at))


def _problems(error: ValidationError, values: Any, where: str) -> list[str]:
    """A line for each wrong value, for the first 20 of them.

    pydantic reports a union (`parallel.data: auto | {replicate, shard}`) once per branch. If one branch got further
    into the value than the others, it is the one that was meant, and only its problems are told.
    """
    found: dict[KeyPath, str] = {}
    for details in error.errors(include_url=False)[:_MOST_PROBLEMS]:
        at, line = _problem(details, values, where)
        if at not in found or details["type"] == "value_error":
            found[at] = line
    further = {at[:end] for at in found for end in range(len(at))}
    uncounted = max(0, error.error_count() - _MOST_PROBLEMS)
    return limit_lines([line for at, line in found.items() if at not in further], uncounted=uncounted)


def _problem(error: ErrorDetails, value: Any, where: str) -> tuple[KeyPath, str]:
    """The key path of what is wrong, and what is said of it; `value` and `where` are the whole config's."""
    at: KeyPath = ()
    for part in error["loc"]:
        if isinstance(value, Mapping) and part in value:
            where = next((key.where for key in value if key == part and isinstance(key, LocatedKey)), where)
        elif not (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            continue  # a branch of a union, which pydantic names in the path too
        at, value = (*at, part), value[part]
    kind, message = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        shown = format_value(mask_unknown_key(value, [str(part) for part in at], suggest_keys(at)))
    else:
        shown = format_value(mask_secrets(value, f"{format_key_path(at)}."))
    if kind == "missing":
        at = (*at, error["loc"][-1])
        return at, f"{where}: {format_key_path(at)} is missing; it should be {describe_allowed(at)}"
    said = ": ".join([where, *[format_key_path(at)] * bool(at)])
    if kind in ("value_error", "json_invalid"):  # one between several keys has their values in its message
        return at, f"{said}: {message}" if isinstance(value, Mapping) else f"{said}: {shown}: {message}"
    if kind == "extra_forbidden":
        section, lines = format_key_path(at[:-1]) or "the config", limit_lines(describe_replacements(at, value))
        hint = "".join(f"{line} " if line.endswith("?") else f"{line}; " for line in lines)
        return at, f"{said}: {shown}: there is no such key; {hint}{section} has {', '.join(list_section_keys(at[:-1]))}"
    should = describe_allowed(at).replace("a number", "a finite number" if kind == "finite_number" else "a number")
    hint = "; put it in quotes" if "text" in should and isinstance(value, (bool, int, float)) else ""
    return at, f"{said}: {shown} should be {should}{hint}"
