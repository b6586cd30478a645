"""What may still be changed of a run's config, and how a change is written.

A config is corrected as long as nothing is there that the correction would make wrong: until a training has saved, any
key; then those that shape no result, and by `resume` a larger `train.steps` or `train.epochs`. Finished shards keep the
keys that shape them.

A line of changes.jsonl has the values that were `set`; `submitted`, where it is there, is a whole corrected config.
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
    """Return True for a line of changes.jsonl."""
    return has_fields(line, {"set": is_mapping}, {"submitted": is_mapping})


def changeable_keys() -> list[str]:
    """Return what `resume` may change at any time, as messages and docs write it: `site.*`, `train.log_every`."""
    return format_key_patterns(Policy.CHANGEABLE)


def find_training_output(run: Path) -> str | None:
    """What a training, or one of a sweep's, left that only its own config goes on with: its newest checkpoint."""
    return _newest(run, "checkpoints/step-*", "checkpoints/damaged-*", "decisions.jsonl")


def _newest(run: Path, *names: str) -> str | None:
    found = [file for name in names for place in ("", "points/*/") for file in run.glob(place + name)]
    return str(max(found, key=_step).relative_to(run)) if found else None


def _step(path: Path) -> int:
    """The step in a name; 0 where there is none."""
    return int(found[1]) if (found := re.search(r"step-(\d+)", path.name)) else 0


def find_dependent_output(run: Path, key: str) -> str | None:
    """What is in the run's folder that another value of a key would make wrong; None where nothing is."""
    section = key.partition(".")[0]
    if has_policy(key, Policy.CHANGEABLE):
        return None
    if key == "run.sharing":
        return "config.yaml with the mode that it says"
    if section == "data" and not has_policy(key, Policy.KEEPS_SHARDS) and (run / "data/manifest.json").exists():
        return "data/manifest.json of the finished shards"
    if section == "evaluate":
        return _newest(run, "evaluation/step-*")
    return find_training_output(run)


def _larger(old: Config, new: Config) -> str | None:
    """The key by which `new` trains longer than `old`; None where it does not."""
    before = flatten_keys(old.model_dump(mode="json"))
    after = flatten_keys(new.model_dump(mode="json"))
    keys = list_keys_with(Policy.INCREASABLE)
    return next((key for key in keys if before[key] and after[key] and before[key] < after[key]), None)


def find_output_of_old_value(run: Path, key: str, old: Config, new: Config) -> str | None:
    """Return what the value of `key` in `new` would make wrong in the run's folder, or None.

    This is `find_dependent_output`, and the weights of steps that a mixture has already been trained on.
    """
    if key == "data.mixture.weights" and (made := find_training_output(run)) and old.data.mixture and new.data.mixture:
        step = _step(Path(made))
        same = old.data.mixture.weights_until(step) == new.data.mixture.weights_until(step)
        return None if same else f"{made}, and only weights of later steps may change"
    return find_dependent_output(run, key)


def check_corrections(run: Path, name: str, old: Config, new: Config) -> dict[str, str]:
    """What the config `new` of the run `name` in folder `run` corrects, in words by keys.

    Raises UserError where something was made with the old one, with what can be done instead.
    """
    found = describe_changes(old, new)
    made = {key: find_output_of_old_value(run, key, old, new) for key in found}
    if kept := dict.fromkeys(filter(None, made.values())):
        longer = _larger(old, new)
        refused = [key for key, what in made.items() if what and key != longer]
        free = next(number for number in count(2) if not run.with_name(f"{new.run.name}-{number}").exists())
        lines = limit_lines([f"{key}: {words}" for key, words in found.items()])
        raise UserError(
            "run.other_config",
            "\n  ".join([f"{name} exists with another config:", *lines])
            + f"\nwhat it has was made with its own: {', '.join(limit_lines(list(kept)))}"
            + "".join(f"\n{line}" for line in _ways_to_resume(name, old, new, refused))
            + f"\nfor another run beside it: {format_current_command(f'run.name={new.run.name}-{free}')}",
        )
    return found


def _ways_to_resume(name: str, old: Config, new: Config, refused: Sequence[str]) -> Iterator[str]:
    """Yield the command that resumes the run `name` with all of `new` but the `refused` keys, and what it leaves out.

    The command is checked: if its keys do not make a valid config without the others, a plain `resume` is shown.
    """
    found = describe_changes(old, new)
    values = flatten_keys(dump_values(new))
    accepted = [key for key in found if key not in refused]
    shown = {
        key: values[key] for key in accepted if key in values and values[key] == mask_secrets({key: values[key]})[key]
    }
    overrides, problem, left = [f"{key}={json.dumps(value)}" for key, value in shown.items()], "", accepted
    try:
        changed = parse_config(apply_overrides(dump_values(old), overrides), COMMAND_LINE)
    except ConfigError as error:
        overrides, problem = [], str(error).split("\n")[0]
    else:
        still = describe_changes(changed, new)
        left = [key for key in accepted if key in still]
    yield f"to go on with it: {format_command('resume', name, *overrides)}"
    if problem:
        yield f"{', '.join(limit_lines(accepted))}: resume accepts this only together with the rest: {problem}"
    elif left:  # a secret, or a key that is gone from a mapping
        yield f"add yourself, because it is not shown or cannot be removed by key=value: {', '.join(limit_lines(left))}"
    if refused:
        yield f"resume does not accept: {', '.join(limit_lines(list(refused)))}"


def check_resume_changes(run: Path, old: Config, new: Config) -> None:
    """Raise UserError where `new` changes more than `resume` takes of the run in folder `run`."""
    longer = "train.steps" if old.train.epochs is None else "train.epochs"
    for key, words in describe_changes(old, new).items():
        made = find_output_of_old_value(run, key, old, new)
        if made and key != _larger(old, new):
            raise UserError(
                "resume.unchangeable_key",
                f"{key}: {words}: resume cannot change it without changing the result: there is {made}. It takes a "
                f"larger {longer}, and {', '.join(changeable_keys())}. For anything else start a new run: its config "
                "under another run.name",
            )


# -- from one config to the next -----------------------------------------------------------------------------


def changed_values(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `new` that are not those of `old`: merged into `old` they give `new`, if it has all its keys."""
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
    """A nested mapping as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def describe_changes(old: Config, new: Config) -> dict[str, str]:
    """Words such as `200 → 300` for every key that differs, by the dotted key; secrets are masked."""
    before = flatten_keys(dump_values(old))
    after = flatten_keys(dump_values(new))
    shown, then = mask_secrets(before), mask_secrets(after)
    keys = sorted(before.keys() | after.keys())
    return {k: f"{_short(shown.get(k))} → {_short(then.get(k))}" for k in keys if before.get(k) != after.get(k)}


def _short(value: Any) -> str:
    """Return a value as text of at most 120 characters."""
    text = str(value)
    return text if len(text) <= 120 else text[:119] + "…"
