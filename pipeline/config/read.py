"""Read configs: merge YAML files, the files that they extend, and command-line overrides into one checked `Config`.

    defaults (pipeline/config/sections.py)  <  extended files  <  the file  <  section.key=value on the command line

A file, or a section of it, may contain `extends: other.yaml` or a list of files. If several files set a key, the last
file wins. If a section contains `extends`, the extended file contains the keys of this section:
`site: {extends: sites/mycluster.yaml, partition: low}`. Mappings are merged key by key; other values, including lists,
are replaced. Types are strict: `threads: "2"` and `deterministic: no` are errors.

If a file is not valid YAML, its first error is reported. Otherwise, one ConfigError lists all wrong values.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.base.command import suggest_path
from pipeline.base.errors import ConfigError, ConfigProblem, UserError, limit_lines
from pipeline.base.files import add_checksum, has_valid_checksum, open_regular_file, parse_json_or_none
from pipeline.base.yaml12 import LocatedKey, dump_yaml, format_value, parse_yaml
from pipeline.config.datasets import CHAT_TEMPLATES
from pipeline.config.hugging_face import fill_from_folder
from pipeline.config.masking import mask_secrets, mask_unknown_key
from pipeline.config.schema import (
    KeyPath,
    describe_allowed,
    describe_replacements,
    find_similar_key,
    list_section_keys,
    suggest_keys,
)
from pipeline.config.search import Distribution, SearchConfig, round_value, sample_value
from pipeline.config.sections import (
    RENAMED_KEYS,
    RENAMED_VALUES,
    Config,
    RunConfig,
    RunMetadata,
    check_warmup,
    has_policy,
    list_keys_with,
)
from pipeline.config.site import SiteConfig
from pipeline.config.types import Policy, check_unused_keys
from pipeline.parallel.mesh import check_layout

COMMAND_LINE = "command line"
PLACEHOLDER = "…"
"""Printed in a command in place of a value that the user must fill in."""
METADATA_FILE = "run.json"
"""File with the :class:`RunMetadata` of a run, next to its `config.yaml`. Older versions wrote these values into
`config.yaml`."""
_MAX_BYTES = 1 << 22
"""Largest size of a config file in bytes."""
_MAX_PROBLEMS = 1000
"""Largest number of errors that are described; further errors are only counted."""
_MAX_DEPTH = 20
"""Largest number of nested `extends`, and largest number of names in a dotted key."""
_MAX_TRIED_VALUES = 20
"""Number of random values of the other keys with which each value of a search is tried."""
_NOT_A_PATH = "python-stdlib"
"""Value of `data.source` that is not a path."""
OLDER_DEFAULTS: dict[str, dict[str, Any]] = {"data": {"add_special_tokens": False}}
"""Section → key → the value that applies if the `config.yaml` of an existing run does not contain the key. The run is
then older than the key. Only keys with another default today are listed."""


REMOVED_SECTIONS = {
    "goodput": "`plan --goodput --assumptions FILE` reads its keys from a file (see configs/planning/assumptions.yaml)",
    "measure": "`python -m planning.calibrate CONFIG --out FILE` measures a machine",
}
"""Former section of the config → what replaces it. Configs and runs that contain these sections can still be read."""
_GOODPUT_DEFAULTS = {
    "preemptions": 0.0, "preempted_s": 3600.0, "repair_hours": 24.0, "together": 0.0, "nodes_together": 1
}  # fmt: skip
"""The default values of the former section `goodput`, which older versions wrote into every `config.yaml`."""
_reported_names: set[str] = set()
"""Former sections and keys about which this process has already printed a note."""


# -- configs -------------------------------------------------------------------------------------------------


def load_config(path: Path, overrides: Sequence[str] = (), checks_sizes: bool = True) -> Config:
    """Return the config in a file, merged with the files that it extends and with `key=value` overrides.

    Args:
        path: the config file.
        overrides: overrides from the command line. If several overrides set the same key, the last one wins.
        checks_sizes: whether to check that the parallel sizes fit the number of ranks.

    Raises:
        ConfigError: if a file cannot be read, or the config or a point of its sweep is invalid. The message lists all
            problems.
    """
    where = f"{path}, {COMMAND_LINE}" if overrides else str(path)
    config = parse_config(apply_overrides(_read_file(Path(path)), overrides), where, checks_sizes)
    make_point_configs(config)  # raises ConfigError if a point is invalid
    return config


def load_run_config(path: Path) -> Config:
    """Return the config in the `config.yaml` of a run, with the metadata of the run.

    Raises ConfigError if the config or a point of its sweep is invalid, or if `run.json` is damaged. The message lists
    all problems.
    """
    config = _parse_run_config(path, _read_run_values(path))
    make_point_configs(config)  # raises ConfigError if a point is invalid
    return config


def _parse_run_config(path: Path, values: Mapping[str, Any]) -> Config:
    """Return the config with the values of a run.

    If `values` do not contain a key of OLDER_DEFAULTS, the older default is used.

    Args:
        path: the `config.yaml` of the run, for messages.
        values: the values, including metadata.
    """
    return parse_config(_make_paths_absolute(add_older_defaults(values)), str(path))


def _fill_sequence_length(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the last length of `train.sequence_schedule` as `data.sequence_length`, if it is not set."""
    try:
        length = values["train"]["sequence_schedule"][-1]["length"]
        data = dict(values.get("data") or {})
        is_custom_model = (values.get("model") or {}).get("target") is not None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return dict(values)  # There is no schedule, or the checks of the sections report an error.
    if is_custom_model:  # An error says that a custom model has no schedule.
        return dict(values)
    return {**values, "data": {"sequence_length": length, **data}}


def _read_run_values(path: Path) -> dict[str, Any]:
    """Return the values in the `config.yaml` of a run, merged with the values in its `run.json` if this file exists."""
    return merge_values(_read_file(path, report=False), _read_metadata(path.with_name(METADATA_FILE)))


def make_run_values_dumper(path: Path) -> Callable[[Config], dict[str, Any]]:
    """Return a function that returns the values of a config in a form that an existing run's code can read.

    The run's copy of the code may be older than this code, and may not know newer keys and names. Therefore each key
    has the name that the run's `config.yaml` uses. A key that `config.yaml` does not contain is omitted, unless its
    value has changed. The values include the metadata.

    Args:
        path: the `config.yaml` of the run.
    """
    existing = _read_run_values(path)
    defaults = dump_values(_parse_run_config(path, existing))
    use_run_names = make_run_namer(path)
    return lambda config: use_run_names(_omit_new_keys(dump_values(config), existing, defaults))


def _omit_new_keys(
    values: Mapping[str, Any], existing: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `values` without the keys that `existing` does not contain and that have the same value in `defaults`."""
    result = {}
    for key, value in values.items():
        if key not in existing and key in defaults and value == defaults[key]:
            continue
        existing_value = existing.get(key)
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(existing_value, Mapping) and isinstance(default, Mapping):
            result[key] = _omit_new_keys(value, existing_value, default)
        else:
            result[key] = value
    return result


def find_older_defaults(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of OLDER_DEFAULTS for keys that the `config.yaml` of a run, at `path`, does not contain."""
    existing = _read_file(path, report=False)
    return {
        section: {key: value for key, value in keys.items() if key not in (existing.get(section) or {})}
        for section, keys in OLDER_DEFAULTS.items()
        if "train" in existing
    }


def add_older_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an existing run with the entries of OLDER_DEFAULTS for keys that they do not contain."""
    return merge_values(OLDER_DEFAULTS, values) if "train" in values else dict(values)


def load_site(path: Path | None) -> SiteConfig:
    """Return the site profile in a file, or the defaults if `path` is None.

    Raises ConfigError if the file cannot be read or is invalid. The message lists all problems.
    """
    # the keys of `run` and `train` are required in a config, but do not affect `site`
    values = {"run": {"name": "any"}, "train": {"steps": 1}, "site": _read_file(path, section="site") if path else {}}
    return parse_config(values, str(path)).site


def parse_config(values: Mapping[str, Any], where: str, checks_sizes: bool = True) -> Config:
    """Return the config with the given values.

    Types are strict, as in JSON: `"2"` is not a number, and `1` is not a boolean.

    Args:
        values: the sections and their keys, as plain YAML values. They may include metadata (see `dump_values`).
        where: the location that messages name for keys that are not a `LocatedKey`.
        checks_sizes: whether to check that the parallel sizes fit the number of ranks.

    Raises:
        ConfigError: if a value is wrong. The message lists all problems.
    """
    values = _remove_former_sections(use_new_names(values), where)
    try:
        config_values, metadata_values = _split_metadata(_fill_sequence_length(fill_from_folder(values)))
        errors: list[ErrorDetails] = []
        try:
            metadata = RunMetadata.model_validate_json(json.dumps(metadata_values, default=str), strict=True)
        except ValidationError as error:
            errors += error.errors(include_url=False)
        try:
            config = Config.model_validate_json(json.dumps(config_values, default=str), strict=True)
        except ValidationError as error:
            errors += error.errors(include_url=False)
        if errors:
            raise _make_config_error(errors, values, where)
        if config.model.target is not None:
            check_unused_keys(metadata.model, set(), "with model.target, use options")
        longest = metadata.model.max_position_embeddings
        if config.model.backend == "transformers" and longest and config.data.sequence_length > longest:
            raise ValueError(
                f"data.sequence_length ({config.data.sequence_length}) is more than max_position_embeddings "
                f"({longest}) in config.json of model.init_from: shorten the sequences"
            )
        if config.has_pipeline:
            check_layout(config, checks_sizes)
        if (
            config.has_pipeline and config.train.steps is not None
        ):  # with train.epochs, the number of steps is known only after shard
            check_warmup(config, config.train.steps)
    except ConfigError:
        raise
    except (ValueError, UserError) as error:
        code = error.code if isinstance(error, UserError) and error.code else "config.conflict"
        message = f"{where}: {error}"
        raise ConfigError(code, message, [ConfigProblem(code, message, where=where)]) from error
    return config.with_metadata(metadata)


def _remove_former_sections(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `values` without former sections and without `stages.measure`.

    Print a note, once per process, for each former section with values that differ from the former defaults.
    """
    remaining = {key: value for key, value in values.items() if key not in REMOVED_SECTIONS}
    if isinstance(stages := remaining.get("stages"), Mapping):
        remaining["stages"] = {
            key: value
            for key, value in stages.items()
            if key != "measure" or (isinstance(value, Mapping) and "command" in value)
        }
    for name, replacement in REMOVED_SECTIONS.items():
        section = values.get(name)
        if isinstance(section, Mapping):
            section = {key: value for key, value in section.items() if value not in (None, _GOODPUT_DEFAULTS.get(key))}
        if section and name not in _reported_names:
            _reported_names.add(name)
            print(f"note: {where}: the section `{name}` is ignored: {replacement}", file=sys.stderr, flush=True)
    return remaining


def make_point_configs(config: Config, values_of_points: Iterable[Mapping[str, Any]] | None = None) -> list[Config]:
    """Return the config of each point of a sweep; an empty list if the config has no sweep.

    Args:
        config: the config of the sweep.
        values_of_points: the values of each point, by dotted key; None for the points that the config defines. A config
            with a search defines none, so this function then only checks some random values of the search.

    Raises:
        ConfigError: if the config of a point is invalid. The message names the values of the point. For a search, this
            is raised only if none of the random values are valid.
    """
    if config.sweep is None:
        return []
    if values_of_points is None:
        if config.sweep.search is not None:
            _check_search_space(config, config.sweep.search)
        values_of_points = config.sweep.points()
    base = {**dump_values(config), "sweep": None}
    folder = config.run.root / config.run.name / "points"
    configs = []
    for number, values in enumerate(values_of_points):
        where = f"sweep, point {number:03d} ({', '.join(f'{key}={value}' for key, value in values.items())})"
        point = merge_values(base, {"run": {"name": f"{number:03d}", "root": str(folder)}})
        for key, value in values.items():
            point = merge_values(point, _nest(key.split("."), value, where))
            if key == "model.init_from":  # the value null means a model of the same sizes with random weights
                without_folder = {"init_sha256": None, "init_files": None}
                point["model"] |= config.metadata.sweep.sources.get(str(value), without_folder)
        configs.append(parse_config(point, where))
    return configs


def _check_search_space(config: Config, search: SearchConfig) -> None:
    """Raise ConfigError if a value of a search gives no valid config, whatever the values of the other keys.

    Each choice, and both ends of each range, are tried with random values of the other keys.
    """
    generator = random.Random(0)
    for fixed_key, candidates in search.space.items():
        for value in candidates if isinstance(candidates, list) else (candidates.low, candidates.high):
            first_error: ConfigError | None = None
            for _ in range(_MAX_TRIED_VALUES):
                values = {key: sample_value(distribution, generator) for key, distribution in search.space.items()}
                if isinstance(candidates, Distribution):
                    values[fixed_key] = round_value(candidates, float(value))  # type: ignore[arg-type]
                else:
                    values[fixed_key] = value
                try:
                    make_point_configs(config, [values])
                    break
                except ConfigError as error:
                    first_error = first_error or error
            else:
                assert first_error is not None
                raise first_error


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` overrides: `["train.steps=400"]` → `{"train": {"steps": 400}}`.

    Each value is parsed as YAML. An empty value (`site.account=`) means null. If several overrides set the same key,
    the last override wins. Raises ConfigError if an override is not of the form `section.key=value`, or if its value is
    `PLACEHOLDER` or not valid YAML.
    """
    changes: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.split(".")
        if not equals or not all(names) or len(names) > _MAX_DEPTH:
            # an override with a wrong key may still be meant for `site.setup`, which may contain secrets
            masked = format_value(mask_secrets(override, "site.setup." if "setup" in key else ""))
            raise ConfigError("config.invalid_override", f"{COMMAND_LINE}: {masked}: write section.key=value")
        location = f"{COMMAND_LINE}: {format_key_path(tuple(names))}"
        if text == PLACEHOLDER:
            raise ConfigError("config.invalid_override", f"{location}: write a value in place of {PLACEHOLDER}")
        value = _nest(names, parse_yaml(text, location, COMMAND_LINE), COMMAND_LINE)
        changes = merge_values(changes, _rename_keys(value, RENAMED_KEYS, report_where=COMMAND_LINE))
    return changes


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `values`, changed by the overrides from the command line, with absolute paths."""
    return _make_paths_absolute(merge_values(values, parse_overrides(overrides)))


def merge_values(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base`, changed by `extra`: mappings are merged key by key, other values are replaced."""
    result = dict(base)
    for key, value in extra.items():
        old_value = result.get(key)
        if isinstance(old_value, Mapping) and isinstance(value, Mapping):
            result[key] = merge_values(old_value, value)
        else:
            result.pop(key, None)  # otherwise the old key object, which has the old location, would remain
            result[key] = value
    return result


def _nest(names: Sequence[str], value: Any, where: str | None) -> dict[str, Any]:
    """Return `value` in nested mappings with the keys `names`, outermost first.

    Args:
        names: the keys.
        value: the innermost value.
        where: the location of the keys; None if it is not known.
    """
    for name in reversed(names):
        value = {name if where is None else LocatedKey(name, where): value}
    return dict(value)


# -- paths ---------------------------------------------------------------------------------------------------


def _make_paths_absolute(values: dict[str, Any]) -> dict[str, Any]:
    """Make the paths in `values` absolute, also the paths that a sweep varies. Change `values` in place.

    Values of wrong types are not changed, because the later check of types reports them.
    """
    if isinstance(run := values.get("run"), dict):
        # the default also becomes absolute; it is relative to the working directory
        run.setdefault("root", str(RunConfig.model_fields["root"].default))
    for key in list_keys_with(Policy.PATH):
        _make_path_absolute(values, key.split("."))
        if has_policy(key, Policy.SWEEPABLE):
            for kind in ("grid", "random"):
                _make_path_absolute(values, ["sweep", kind, key])
    return values


def _make_path_absolute(values: Any, path: Sequence[str]) -> None:
    """Make the value at the key path `path` of `values` absolute, in place. In `path`, `*` matches every name."""
    if not isinstance(values, dict):
        return
    name, *rest = path
    if rest:
        for inner in values.values() if name == "*" else [values.get(name)]:
            _make_path_absolute(inner, rest)
        return
    for key in list(values):
        is_template_name = name == "chat_template" and values[key] in CHAT_TEMPLATES
        if key == name and not is_template_name:
            # `key` may be a LocatedKey, whose location is FILE:LINE or "command line". For the command line, the folder
            # is "", the working directory.
            folder = os.path.dirname(getattr(key, "where", ""))
            values[key] = _resolve_path(values[key], folder)


def _resolve_path(path: Any, folder: str) -> Any:
    """Return a path, or each path of a list, as an absolute path. A relative path is relative to `folder`."""
    if isinstance(path, list):
        return [_resolve_path(item, folder) for item in path]
    if not isinstance(path, str) or path == _NOT_A_PATH:
        return path
    with suppress(ValueError):  # raised if the user name in `~user` has a null byte or a surrogate
        path = os.path.expanduser(path)
    return os.path.abspath(os.path.join(folder, path))


# -- renamed keys --------------------------------------------------------------------------------------------


def use_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config, with renamed keys under their present names.

    Call this function before you merge values from several sources. Raises ConfigError if both names of a key are set.
    """
    return _rename_keys(values, RENAMED_KEYS)


def make_run_namer(path: Path) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that gives renamed keys the names that the code of an existing run knows.

    If the run's `config.yaml` contains the present name of a key, this name is kept. Otherwise, the key gets its former
    name, because the run's copy of the code may be so old that it knows only the former name.

    Args:
        path: the `config.yaml` of the run.
    """
    existing, _ = _parse_file(path)
    old_names = {new: old for old, new in RENAMED_KEYS.items() if not _has_key(existing, new.split("."))}
    return lambda values: _rename_keys(values, old_names)


def _has_key(values: Any, path: Sequence[str]) -> bool:
    """Return True if nested mappings contain the key path `path`."""
    name, *rest = path
    return isinstance(values, Mapping) and name in values and (not rest or _has_key(values[name], rest))


def _rename_keys(
    values: Mapping[str, Any], names: Mapping[str, str], section: str = "", report_where: str | None = None
) -> dict[str, Any]:
    """Return `values`, with each key in `names` under its new name. Renamed values of these keys are also replaced.

    Args:
        values: the values of a config, or of one section of it.
        names: old dotted key → new dotted key. To restore former names, pass present key → former key.
        section: the dotted key of the section that `values` belong to; "" for a whole config.
        report_where: the location of `values`. If given, a note about renamed keys is printed, once for each key.

    Raises:
        ConfigError: if both names of a key are set.
    """
    result = dict(values)
    prefix = f"{section}." if section else ""
    notes = []
    for old, new in names.items():
        if not old.startswith(prefix):
            continue
        path = old.removeprefix(prefix).split(".")
        new_path = new.removeprefix(prefix).split(".")
        if not _has_key(result, path) or not _can_hold_key(result, new_path):
            continue
        value, where = _get_value_and_location(result, path)
        if _has_key(result, new_path):
            location = f"{where}: " if where else ""
            message = f"{location}{old} is the former name of {new}, which is also set: remove {old}"
            raise ConfigError("config.conflict", message, [ConfigProblem("config.conflict", message, old, None, where)])
        new_values = {**RENAMED_VALUES.get(old, {}), **{v: k for k, v in RENAMED_VALUES.get(new, {}).items()}}
        value = new_values.get(value, value) if isinstance(value, str) else value
        result = merge_values(_remove_key(result, path), _nest(new_path, value, where or None))
        if report_where is not None and old not in _reported_names:
            _reported_names.add(old)
            notes.append(f"{old} is now {new}")
    if notes:
        print(f"note: {report_where}: {', '.join(notes)}", file=sys.stderr, flush=True)
    return result


def _can_hold_key(values: Any, path: Sequence[str]) -> bool:
    """Return True if a key can be set at the key path `path`: every existing value above it is a mapping."""
    name, *rest = path
    return isinstance(values, Mapping) and (not rest or name not in values or _can_hold_key(values[name], rest))


def _get_value_and_location(values: Mapping[str, Any], path: Sequence[str]) -> tuple[Any, str]:
    """Return the value at the key path `path`, and the location of its key; "" if the key is not a `LocatedKey`."""
    for name in path[:-1]:
        values = values[name]
    key = next(key for key in values if key == path[-1])
    return values[key], getattr(key, "where", "")


def _remove_key(values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return `values` without the key at the key path `path`, and without sections that become empty."""
    name, *rest = path
    remaining = _remove_key(values[name], rest) if rest else {}
    return {key: remaining if key == name else value for key, value in values.items() if key != name or remaining}


# -- metadata ------------------------------------------------------------------------------------------------


def dump_values(config: Config) -> dict[str, Any]:
    """Return all values and the metadata of a config as plain YAML values. `parse_config` returns the same config."""
    values = config.model_dump(mode="json")
    if config.has_pipeline:
        values["model"] |= config.metadata.model.model_dump(mode="json")
    if values["sweep"] is not None:
        values["sweep"]["sources"] = config.metadata.sweep.sources
    return values


def dump_metadata(config: Config) -> dict[str, Any]:
    """Return the content of the `run.json` of a run."""
    return add_checksum(config.metadata.model_dump(mode="json"))


def remove_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config without the metadata that `dump_values` adds."""
    return _split_metadata(values)[0]


def _split_metadata(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the config and the values of its metadata, from values in the form of `dump_values`."""
    config_values = dict(values)
    metadata: dict[str, Any] = {}
    for name, field in RunMetadata.model_fields.items():
        section = values.get(name)
        keys = getattr(field.annotation, "model_fields", {})
        if isinstance(section, Mapping):
            metadata[name] = {key: value for key, value in section.items() if key in keys}
            config_values[name] = {key: value for key, value in section.items() if key not in keys}
            if metadata[name] and not config_values[name]:
                del config_values[name]  # The config itself does not have this section.
    return config_values, metadata


def _read_metadata(file: Path) -> dict[str, Any]:
    """Return the values in a `run.json`; an empty dict if the file does not exist, as in runs of older versions.

    Raises ConfigError if the file cannot be read or is damaged.
    """
    try:
        with open_regular_file(file) as stream:
            content = parse_json_or_none(stream.read(_MAX_BYTES + 1))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError("config.unreadable_file", f"{file}: cannot read it: {error.strerror}") from error
    if not has_valid_checksum(content):
        raise ConfigError("run.damaged_file", f"{file} is damaged: restore it, or start a new run")
    values = {"model": content["model"]}
    # without a sweep, the config must not get a section `sweep`
    return {**values, "sweep": content["sweep"]} if content["sweep"]["sources"] else values


# -- files ---------------------------------------------------------------------------------------------------


def _parse_file(path: Path) -> tuple[dict[str, Any], str]:
    """Return the mapping in a YAML file, and the real path of the file.

    Raises ConfigError if the file cannot be read, is not valid YAML or contains no mapping.
    """
    name = os.path.normpath(path)
    try:
        real_path = os.path.realpath(path)
        with open_regular_file(path) as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        text = content.decode("utf-8-sig")
    except (OSError, ValueError, UserError) as error:
        hint = suggest_path(Path(name), "*.y*ml") if isinstance(error, FileNotFoundError) else ""
        if isinstance(error, IsADirectoryError):
            hint = "; name a YAML file in this folder"
        raise ConfigError(
            "config.unreadable_file", f"{name}: cannot read it: {getattr(error, 'strerror', None) or error}{hint}"
        ) from error
    values = parse_yaml(text, name)
    if not isinstance(values, dict):
        description = "nothing" if values is None else format_value(values)
        raise ConfigError(
            "config.wrong_type",
            f"{name}: the file should contain keys and values such as `run: {{name: first}}`, not {description}; "
            "`init` writes an example",
        )
    return values, real_path


def _read_file(path: Path, extended_by: tuple[str, ...] = (), section: str = "", report: bool = True) -> dict[str, Any]:
    """Return the mapping in a file, merged with the files that it extends.

    Args:
        path: the file.
        extended_by: the real paths of the files that extend this file, outermost first.
        section: the dotted key of the section to which the keys in the file belong; "" if the file is a whole config.
        report: whether to print the new names of renamed keys.

    Raises:
        ConfigError: if a file cannot be read, or if files extend one another in a circle or in a chain of more than
            `_MAX_DEPTH` files.
    """
    values, real_path = _parse_file(path)
    if real_path in extended_by or len(extended_by) > _MAX_DEPTH:
        raise ConfigError(
            "config.circular_extends",
            f"{os.path.normpath(path)}: the chain of `extends` is circular, or longer than {_MAX_DEPTH} files",
        )
    renamed = _rename_keys(values, RENAMED_KEYS, section, os.path.normpath(path) if report else None)
    return _merge_extended_files(renamed, path.parent, (*extended_by, real_path), section, report)


def _merge_extended_files(
    values: Mapping[str, Any], folder: Path, extended_by: tuple[str, ...], section: str, report: bool
) -> dict[str, Any]:
    """Return `values`, merged with the files that are named by `extends` in `values` and in sections inside `values`.

    Args:
        values: the mapping in a file, or a section of it.
        folder: the folder of the file.
        extended_by: the real paths of the file and of the files that extend it.
        section: the dotted key of the section that `values` belong to; "" for a whole config.
        report: whether to print the new names of renamed keys.
    """
    base: dict[str, Any] = {}
    own_values: dict[str, Any] = {}
    for key, value in values.items():
        if key != "extends":
            inner_section = f"{section}.{key}" if section else str(key)
            if isinstance(value, dict):
                value = _merge_extended_files(value, folder, extended_by, inner_section, report)
            own_values[key] = value
            continue
        for file in value if isinstance(value, list) else [value]:
            where = getattr(key, "where", "")
            if not isinstance(file, str) or not file:
                message = f"{where}: extends: {format_value(file)} should be the name of a file, or a list of names"
                problem = ConfigProblem("config.wrong_type", message, "extends", file, where)
                raise ConfigError("config.wrong_type", message, [problem])
            try:
                base = merge_values(base, _read_file(folder / file, extended_by, section, report))
            except ConfigError as error:
                message = f"{where}: extends: {error}"
                problem = ConfigProblem(error.code, message, "extends", file, where)
                raise ConfigError(error.code, message, [problem]) from error
    return merge_values(base, own_values)


def dump_config(config: Config) -> str:
    """Return the whole config, without its metadata, as YAML. `load_config` reads the same config from this text."""
    return dump_yaml(config.model_dump(mode="json"))


# -- problems ------------------------------------------------------------------------------------------------


def format_key_path(path: KeyPath) -> str:
    """Return a key path as users write it: `data.source.0`."""
    return ".".join(text if text.isprintable() and len(text) <= 80 else format_value(text) for text in map(str, path))


def _make_config_error(errors: Sequence[ErrorDetails], values: Any, where: str) -> ConfigError:
    """Return an error that lists all problems of a config. The message shows the first `MAX_PROBLEMS_SHOWN`.

    If no branch of a union (`parallel.data: auto | {replicate, shard}`) fits, pydantic reports errors for each branch.
    The user probably meant the branch that has errors deepest inside the value. Therefore, if a key path has an error,
    errors of the sections and lists around it are omitted.
    """
    problem_by_path: dict[KeyPath, ConfigProblem] = {}
    for details in errors[:_MAX_PROBLEMS]:
        path, problem = _describe_problem(details, values, where)
        replaces_previous = (
            path not in problem_by_path
            or details["type"] == "value_error"
            or problem_by_path[path].code == "config.wrong_type"
        )
        if replaces_previous:
            problem_by_path[path] = problem  # this branch of the union gives a more specific message
    prefixes = {path[:end] for path in problem_by_path for end in range(len(path))}
    problems = [problem for path, problem in problem_by_path.items() if path not in prefixes]
    omitted_count = max(0, len(errors) - _MAX_PROBLEMS)
    lines = limit_lines([problem.message for problem in problems], other_count=omitted_count)
    return ConfigError(problems[0].code, "\n".join(lines), problems)


_OUT_OF_RANGE = (
    "greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "too_short", "too_long",
)  # fmt: skip
"""The types of pydantic's errors for values outside the allowed range."""


def _describe_problem(error: ErrorDetails, value: Any, where: str) -> tuple[KeyPath, ConfigProblem]:
    """Return the key path of a wrong value, and the description of its problem.

    Args:
        error: the error that pydantic reports.
        value: the values of the whole config.
        where: the location to name for keys that are not a `LocatedKey`.
    """
    path: KeyPath = ()
    for name in error["loc"]:
        if isinstance(value, Mapping) and name in value:
            where = next((key.where for key in value if key == name and isinstance(key, LocatedKey)), where)
        elif not (isinstance(value, list) and isinstance(name, int) and name < len(value)):
            continue  # pydantic's path also contains the names of union branches, which are not keys
        path = (*path, name)
        value = value[name]
    error_type = error["type"]
    message = error["msg"].removeprefix("Value error, ")
    is_stage = len(path) == 2 and path[0] == "stages" and error_type in ("missing", "model_type")
    if is_stage and (similar := find_similar_key(path)) not in (None, path[-1]):
        key = format_key_path(path)
        line = (
            f"{where}: {key}: there is no such stage; did you mean {similar}? A stage of your own has a key `command`"
        )
        return path, ConfigProblem("config.unknown_key", line, key, None, where)
    if error_type == "missing":
        path = (*path, error["loc"][-1])
        key = format_key_path(path)
        line = f"{where}: {key} is missing; it should be {describe_allowed(path)}"
        return path, ConfigProblem("config.missing_key", line, key, None, where)

    key = format_key_path(path)
    if error_type == "extra_forbidden":
        masked = mask_unknown_key(value, [str(part) for part in path], suggest_keys(path))
    else:
        masked = mask_secrets(value, f"{key}.")
    value_text = format_value(masked)
    location = f"{where}: {key}" if path else where
    if error_type in ("value_error", "json_invalid"):
        if isinstance(value, Mapping):  # keys of a section contradict each other, and the message has their values
            return path, ConfigProblem("config.conflict", f"{location}: {message}", key, None, where)
        return path, ConfigProblem("config.invalid_value", f"{location}: {value_text}: {message}", key, masked, where)
    if error_type == "extra_forbidden":
        section = format_key_path(path[:-1]) or "the config"
        lines = limit_lines(describe_replacements(path, value))
        hint = "".join(f"{line} " if line.endswith("?") else f"{line}; " for line in lines)
        keys = ", ".join(list_section_keys(path[:-1]))
        line = f"{location}: {value_text}: there is no such key; {hint}{section} has {keys}"
        return path, ConfigProblem("config.unknown_key", line, key, masked, where)
    allowed = describe_allowed(path)
    if error_type == "finite_number":
        allowed = allowed.replace("a number", "a finite number")
    # for example a number, where the name of a partition is expected
    hint = "; put the value in quotes" if "text" in allowed and isinstance(value, (bool, int, float)) else ""
    code = "config.out_of_range" if error_type in _OUT_OF_RANGE else "config.wrong_type"
    if error_type == "literal_error" and isinstance(value, str):
        code = "config.invalid_value"
    return path, ConfigProblem(code, f"{location}: {value_text} should be {allowed}{hint}", key, masked, where)
