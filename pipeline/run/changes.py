"""Check which keys of a run's config may still change, and describe changes.

A key may change as long as no existing output depends on its old value. Keys that do not affect results may always
change. Keys that determine the shards may change until the shards are finished. Most other keys may change until the
first checkpoint. Afterwards, `resume` still accepts a larger `train.steps` or `train.epochs`.

A line of changes.jsonl has the changed values in `set`. If the user submitted a corrected config file, the line also
has all values of this file in `submitted`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.base.command import format_command, format_current_command
from pipeline.base.errors import ConfigError, UserError, limit_lines
from pipeline.config.masking import mask_secrets
from pipeline.config.read import COMMAND_LINE, apply_overrides, dump_values, parse_config
from pipeline.config.sections import Config, format_key_patterns, has_policy, list_keys_with
from pipeline.config.types import Policy
from pipeline.run.lines import has_fields, is_mapping


def is_config_change(line: Any) -> bool:
    """Return True if a JSON value has the fields of a line of changes.jsonl."""
    return has_fields(line, {"set": is_mapping}, {"submitted": is_mapping})


def changeable_keys() -> list[str]:
    """Return the keys that `resume` may change at any time, as patterns such as `site.*`."""
    return format_key_patterns(Policy.CHANGEABLE)


def find_training_output(run_dir: Path) -> str | None:
    """Return the newest output of the train stage; None if there is none.

    Training can continue from this output only with the current config.

    Args:
        run_dir: the run directory. In a sweep, the outputs of the points count.

    Returns:
        The path relative to the run directory: the newest checkpoint, even if it is damaged. If there are no
        checkpoints, the path of decisions.jsonl.
    """
    return _find_newest(run_dir, "checkpoints/step-*", "checkpoints/damaged-*", "decisions.jsonl")


def _find_newest(run_dir: Path, *patterns: str) -> str | None:
    """Return the path with the highest step that matches one of `patterns`; None if no path matches.

    The path is relative to `run_dir`. The patterns are also applied in the directories of the sweep points.
    """
    files = [file for pattern in patterns for prefix in ("", "points/*/") for file in run_dir.glob(prefix + pattern)]
    return str(max(files, key=_parse_step).relative_to(run_dir)) if files else None


def _parse_step(path: Path) -> int:
    """Return the step in the name of a file; 0 if the name has no step."""
    match = re.search(r"step-(\d+)", path.name)
    return int(match[1]) if match else 0


def find_dependent_output(run_dir: Path, key: str) -> str | None:
    """Return the existing output in the run directory that depends on the value of a key; None if there is none.

    The result is a path, or a path with a short explanation.
    """
    section = key.partition(".")[0]
    if has_policy(key, Policy.CHANGEABLE):
        return None
    if key == "run.sharing":
        return "config.yaml, for which run.sharing set the file mode"
    if section == "data" and not has_policy(key, Policy.KEEPS_SHARDS) and (run_dir / "data/manifest.json").exists():
        return "data/manifest.json of the finished shards"
    if section == "evaluate":
        return _find_newest(run_dir, "evaluation/step-*")
    return find_training_output(run_dir)


def _find_increased_key(old: Config, new: Config) -> str | None:
    """Return the key that may increase (`train.steps` or `train.epochs`) and is larger in `new`.

    Returns None if no such key is larger, or if the key is not set in both configs. In a search, no key may increase,
    because the rungs depend on the number of steps.
    """
    if old.sweep is not None and old.sweep.search is not None:
        return None
    before = flatten_keys(old.model_dump(mode="json"))
    after = flatten_keys(new.model_dump(mode="json"))
    keys = list_keys_with(Policy.INCREASABLE)
    return next((key for key in keys if before[key] and after[key] and before[key] < after[key]), None)


def find_trained_step(run_dir: Path) -> int | None:
    """Return the step of the newest output of the train stage (:func:`find_training_output`); None if there is none."""
    output = find_training_output(run_dir)
    return None if output is None else _parse_step(Path(output))


def complete_length_change(step: int | None, old: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a changed config in which a new length of sequences applies to later steps only.

    If a run with a checkpoint gets a larger `data.sequence_length`, `train.sequence_schedule` becomes the list of the
    lengths up to the checkpoint and the new length. If `train.sequence_schedule` changes, its last length becomes
    `data.sequence_length`.

    Args:
        step: the step after which the new config applies; None if the run has no training output.
        old: the config of the run.
        values: the values of the changed config, which may be invalid.
    """
    old_values = dump_values(old)
    data = values.get("data")
    train = values.get("train")
    if not isinstance(data, Mapping) or not isinstance(train, Mapping):
        return dict(values)
    length = data.get("sequence_length")
    schedule = train.get("sequence_schedule")
    has_new_length = length != old.data.sequence_length
    has_new_schedule = schedule != old_values["train"].get("sequence_schedule")
    if has_new_schedule and not has_new_length and schedule:
        without_length = {key: value for key, value in data.items() if key != "sequence_length"}
        return {**values, "data": without_length}
    is_larger = isinstance(length, int) and length > old.data.sequence_length
    if has_new_length and not has_new_schedule and is_larger and step is not None and old.allows_sequence_schedule:
        kept = [phase.model_dump() for phase in old.length_phases_until(step)]
        schedule = [*kept, {"from_step": step + 1, "length": length}]
        return {**values, "train": {**train, "sequence_schedule": schedule}}
    return dict(values)


def find_output_of_old_value(run_dir: Path, key: str, old: Config, new: Config) -> str | None:
    """Return the existing output in the run directory that depends on the old value of `key`; None if there is none.

    Unlike `find_dependent_output`, this function allows the weights of a mixture and the length of sequences to change
    for later steps, if the values up to the newest checkpoint stay the same.
    """
    has_schedule = old.train.sequence_schedule or new.train.sequence_schedule
    if key in ("data.sequence_length", "train.sequence_schedule") and has_schedule:
        output = find_training_output(run_dir)
        if output:
            step = _parse_step(Path(output))
            is_same_until_step = old.length_phases_until(step) == new.length_phases_until(step)
            return None if is_same_until_step else f"{output}, and only lengths of later steps may change"
    if key == "data.mixture.weights" and old.data.mixture and new.data.mixture:
        output = find_training_output(run_dir)
        if output:
            step = _parse_step(Path(output))
            is_same_until_step = old.data.mixture.weights_until(step) == new.data.mixture.weights_until(step)
            return None if is_same_until_step else f"{output}, and only weights of later steps may change"
    return find_dependent_output(run_dir, key)


def check_corrections(run_dir: Path, name: str, old: Config, new: Config) -> dict[str, str]:
    """Return the changes of a corrected config: dotted key → description such as `200 → 300`.

    Args:
        run_dir: the run directory.
        name: the run's name in messages.
        old: the config of the run.
        new: the corrected config.

    Raises:
        UserError: if existing output depends on the old value of a changed key. The message contains the commands that
            the user can give instead.
    """
    descriptions = describe_changes(old, new)
    output_by_key = {key: find_output_of_old_value(run_dir, key, old, new) for key in descriptions}
    dependent_outputs = list(dict.fromkeys(filter(None, output_by_key.values())))
    if dependent_outputs:
        increased_key = _find_increased_key(old, new)
        refused = [key for key, output in output_by_key.items() if output and key != increased_key]
        free_number = next(n for n in count(2) if not run_dir.with_name(f"{new.run.name}-{n}").exists())
        lines = limit_lines([f"{key}: {change}" for key, change in descriptions.items()])
        new_name = f"run.name={new.run.name}-{free_number}"
        raise UserError(
            "run.other_config",
            "\n  ".join([f"{name} exists with another config:", *lines])
            + f"\nthese outputs depend on its config: {', '.join(limit_lines(dependent_outputs))}"
            + "".join(f"\n{line}" for line in _describe_resume(name, old, new, refused))
            + f"\nto make another run: {format_current_command(new_name)}",
        )
    return descriptions


def _describe_resume(name: str, old: Config, new: Config, refused: Sequence[str]) -> Iterator[str]:
    """Yield a line with the command that resumes a run, and lines about changes that the command does not contain.

    The command contains the changes that `resume` accepts. If the config would be invalid with only these changes, the
    command contains no changes.

    Args:
        name: the run's name in messages.
        old: the config of the run.
        new: the corrected config.
        refused: changed keys that `resume` does not accept.
    """
    values = flatten_keys(dump_values(new))
    accepted = [key for key in describe_changes(old, new) if key not in refused]

    def is_public(key: str) -> bool:
        """Return True if the value contains no secret."""
        return bool(values[key] == mask_secrets({key: values[key]})[key])

    overrides = [f"{key}={json.dumps(values[key])}" for key in accepted if key in values and is_public(key)]
    problem = ""
    try:
        changed = parse_config(apply_overrides(dump_values(old), overrides), COMMAND_LINE)
    except ConfigError as error:
        overrides = []
        omitted = accepted
        problem = str(error).split("\n")[0]
    else:
        remaining = describe_changes(changed, new)
        omitted = [key for key in accepted if key in remaining]
    yield f"to continue it: {format_command('resume', name, *overrides)}"
    if problem:
        yield f"{', '.join(limit_lines(omitted))}: invalid without the other changes: {problem}"
    elif omitted:  # the value is secret, or the key was removed from a mapping
        keys = ", ".join(limit_lines(omitted))
        yield f"add yourself, because it is not shown or cannot be removed by key=value: {keys}"
    if refused:
        yield f"resume does not accept: {', '.join(limit_lines(list(refused)))}"


def check_resume_changes(run_dir: Path, old: Config, new: Config) -> None:
    """Raise UserError if existing output in `run_dir` depends on the old value of a key that differs in `new`.

    A larger `train.steps` or `train.epochs` is accepted, except in a search.
    """
    increased_key = "train.steps" if old.train.epochs is None else "train.epochs"
    for key, change in describe_changes(old, new).items():
        output = find_output_of_old_value(run_dir, key, old, new)
        if output and key != _find_increased_key(old, new):
            is_search = old.sweep is not None and old.sweep.search is not None
            increasable = "" if is_search else f"a larger {increased_key}, and "
            raise UserError(
                "resume.unchangeable_key",
                f"{key}: {change}: resume cannot change this key, because existing output depends on it: {output}. "
                f"resume accepts {increasable}{', '.join(changeable_keys())}. For any other change, "
                "start a new run: submit the config with another run.name, or continue from a checkpoint of this run "
                "with `fork`",
            )


# -- differences between configs ---------------------------------------------------------------------------------------


def changed_values(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `new` that differ from `old`, as a nested mapping.

    Keys that only `old` has are ignored. If `new` has all keys of `old`, merging the result into `old` gives `new`.
    """
    values: dict[str, Any] = {}
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            value = changed_values(old[key], value)
            if not value:
                continue
        elif key in old and old[key] == value:
            continue
        values[key] = value
    return values


def flatten_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as a flat mapping with dotted keys. `prefix` precedes each key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def describe_changes(old: Config, new: Config) -> dict[str, str]:
    """Return the differences between two configs: dotted key → description such as `200 → 300`. Secrets are masked."""
    before = flatten_keys(dump_values(old))
    after = flatten_keys(dump_values(new))
    masked_before = mask_secrets(before)
    masked_after = mask_secrets(after)
    return {
        key: f"{_shorten(masked_before.get(key))} → {_shorten(masked_after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def _shorten(value: Any) -> str:
    """Return a value as text of at most 120 characters."""
    text = str(value)
    return text if len(text) <= 120 else text[:119] + "…"
