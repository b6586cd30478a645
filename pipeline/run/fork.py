"""Derive the config of a fork: a new run that continues from a checkpoint of another run with a changed config.

The state of the checkpoint must fit the new config, and the result must be what the user expects. Keys for which this
is not the case have the policy `FIXED_IN_FORK`, or are refused by :func:`check_fork_config`.

The history of a fork is that of its origin: the mixture weights and the lengths of sequences up to the checkpoint are
kept, and new ones apply to later steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError, limit_lines
from pipeline.base.files import sha256_file
from pipeline.config.datasets import DataConfig, MixtureConfig
from pipeline.config.read import COMMAND_LINE, apply_overrides, dump_values, merge_values, parse_config
from pipeline.config.sections import Config, format_key_patterns, has_policy, list_keys_with
from pipeline.config.types import Policy
from pipeline.run import changes
from pipeline.run.directory import Run

TOKENIZER_FILE = "tokenizer.json"
"""A fork whose data must be prepared again has a copy of the tokenizer, which `prepare` trained, under this name."""


def make_fork_config(run: Run, step: int, name: str, overrides: Sequence[str]) -> Config:
    """Return the config of a fork.

    Args:
        run: the run with the checkpoint.
        step: the step of the checkpoint.
        name: the name of the fork. It has the same parent directory as `run`, if `overrides` do not set `run.root`.
        overrides: changes of the config, as `KEY=VALUE`.

    Raises:
        ConfigError: if the config is invalid.
        UserError: if a key cannot be changed.
    """
    old_values = dump_values(run.config)
    # The run may have been moved, and the root of a sweep point is inside the sweep.
    old_values = merge_values(old_values, {"run": {"name": name, "root": str(run.sweep_or_self.path.parent)}})
    values = apply_overrides(old_values, overrides)
    if values["run"].get("name") != name:
        raise UserError("fork.name", "run.name: --name sets the name of the fork")
    values = changes.complete_length_change(step, run.config, values)
    values = _complete_weights(step, run.config, values)
    values = _keep_tokenizer(run.config, old_values, values)
    config = parse_config(values, COMMAND_LINE)
    check_fork_config(run, step, config)
    return config


def describe_fork_changes(run: Run, config: Config) -> dict[str, str]:
    """Return how the config of a fork differs from that of `run`: dotted key → description such as `200 → 300`."""
    descriptions = changes.describe_changes(run.config, config)
    return {key: change for key, change in descriptions.items() if key not in ("run.name", "run.root")}


def _complete_weights(step: int, old: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a changed config in which new weights of a mixture apply only to steps after `step`.

    Up to `step`, the weights of new sources are 0. Values of wrong types are not changed, because `parse_config`
    reports them.
    """
    mixture = values["data"].get("mixture") if isinstance(values.get("data"), Mapping) else None
    if old.data.mixture is None or not isinstance(mixture, Mapping):
        return dict(values)
    old_entries = [entry.model_dump() for entry in old.data.mixture.weights]
    try:
        sources = [*mixture["sources"]]
        entries = [{"from_step": 1, **entry} for entry in mixture["weights"]]
        later = [entry for entry in entries if entry["from_step"] > step + 1]
        current = [entry for entry in entries if entry["from_step"] <= step + 1][-1]
    except (TypeError, KeyError, IndexError):
        return dict(values)
    if entries == old_entries and sources == [*old.data.mixture.sources]:
        return dict(values)
    history = [
        {**entry, "weights": dict.fromkeys(sources, 0.0) | entry["weights"]}
        for entry in old_entries
        if entry["from_step"] <= step
    ]
    if current["weights"] != history[-1]["weights"]:
        history.append({**current, "from_step": step + 1})
    return {**values, "data": {**values["data"], "mixture": {**mixture, "weights": [*history, *later]}}}


def _keep_tokenizer(old: Config, old_values: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the path of a copy of the tokenizer if `prepare` would otherwise train another tokenizer."""
    data = values.get("data")
    tokenizer = old.data.tokenizer
    is_trained = old.model.target is None and tokenizer.kind == "byte_bpe"
    if not is_trained or not isinstance(data, Mapping) or data.get("tokenizer") != old_values["data"]["tokenizer"]:
        return dict(values)
    if {**data, "tokenizer": None} == {**old_values["data"], "tokenizer": None} or not _changes_shards(
        old_values, data
    ):
        return dict(values)
    file = Path(values["run"]["root"], values["run"]["name"], TOKENIZER_FILE)
    return merge_values(values, {"data": {"tokenizer": {"kind": "file", "path": str(file)}}})


def _changes_shards(old_data: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    """Return whether a changed key of the section `data` requires other shards."""
    before = changes.flatten_keys({"data": dict(old_data)})
    after = changes.flatten_keys({"data": dict(data)})
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    return any(not has_policy(key, Policy.KEEPS_SHARDS) for key in changed)


def _dump_shard_values(data: DataConfig) -> dict[str, Any]:
    """Return the values of a data section of one source that determine its shards, without the tokenizer."""
    kept_keys = {key.removeprefix("data.") for key in list_keys_with(Policy.KEEPS_SHARDS)}
    if data.has_training_mask:
        kept_keys.remove("sequence_length")
    return data.model_dump(mode="json", exclude={*kept_keys, "tokenizer", "mixture"})


def list_continued_sources(old: Config, new: Config) -> list[str]:
    """Return the sources whose order a fork continues; [""] for the only source, [] if the fork begins a new order.

    A fork begins a new order of samples if it has another seed, or other data without a common mixture.
    """
    if old.run.seed != new.run.seed:
        return []
    if old.data.mixture is not None and new.data.mixture is not None:
        return list(old.data.mixture.sources)
    if old.data.mixture is not None or new.data.mixture is not None:
        return []
    return [""] if _dump_shard_values(old.data) == _dump_shard_values(new.data) else []


def check_fork_config(run: Run, step: int, new: Config) -> None:
    """Raise UserError, with all keys concerned, if a fork of `run` at `step` cannot have the config `new`."""
    old = run.config
    if problems := list(_find_problems(run, step, old, new)):
        fixed = ", ".join(format_key_patterns(Policy.FIXED_IN_FORK))
        hint = ""
        if any(has_policy(key, Policy.FIXED_IN_FORK) for key, _ in problems):
            except_keys = ", ".join(format_key_patterns(Policy.CHANGEABLE_IN_FORK))
            hint = (
                f"\na fork cannot change {fixed}, except {except_keys}: the weights, the optimizer state or the place "
                "in the data would not fit"
            )
        lines = limit_lines([f"{key}: {problem}" for key, problem in problems])
        raise UserError("fork.unchangeable_key", "\n".join(lines) + hint)


def _find_problems(run: Run, step: int, old: Config, new: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that a fork cannot change, with the reason."""
    for key, change in changes.describe_changes(old, new).items():
        if has_policy(key, Policy.FIXED_IN_FORK) and not has_policy(key, Policy.CHANGEABLE_IN_FORK):
            yield key, f"{change}: a fork cannot change this key"
    if not {*old.optimizer.freeze} <= {*new.optimizer.freeze}:
        yield "optimizer.freeze", "a fork can only freeze more: the checkpoint has no optimizer state of frozen weights"
    if old.adapter is not None and old.model.target is not None:
        for key, is_changed in (
            ("run.seed", old.run.seed != new.run.seed),
            ("train.precision", old.train.precision != new.train.precision),
        ):
            if is_changed:
                yield key, "the frozen weights of the custom model depend on it, and the adapter belongs to these"
    if old.length_phases_until(step) != new.length_phases_until(step):
        key = "data.sequence_length" if new.train.sequence_schedule is None else "train.sequence_schedule"
        yield (
            key,
            f"the sequences of the first {step} steps were {_format_lengths(old, step)} tokens long; a fork can "
            "only make later sequences longer, and only of documents that are not packed into samples",
        )
    begins_order = not list_continued_sources(old, new)
    if new.train.epochs is not None and begins_order:
        yield (
            "train.epochs",
            "with other data or another seed, set train.epochs=null and train.steps: epochs are "
            "counted from the first step of the original",
        )
    elif new.train.steps is not None and new.train.steps <= step:
        yield "train.steps", f"{new.train.steps} is not more than the step of the checkpoint ({step}): set a larger one"
    if old.data.mixture is not None and new.data.mixture is not None:
        yield from _find_mixture_problems(old.data, new.data, new.data.mixture)
    elif old.data.sources == new.data.sources and new.data.held_out > old.data.held_out:
        yield (
            "data.held_out",
            f"{old.data.held_out} → {new.data.held_out}: documents on which the model was trained would be held out",
        )
    if new.data.tokenizer != old.data.tokenizer and (problem := _find_tokenizer_problem(run, new)):
        yield "data.tokenizer", problem


def _format_lengths(config: Config, step: int) -> str:
    """Return the lengths of the sequences of the first `step` steps, such as `1024, then 2048`."""
    return ", then ".join(str(phase.length) for phase in config.length_phases_until(step))


def _find_mixture_problems(old: DataConfig, new: DataConfig, mixture: MixtureConfig) -> Iterator[tuple[str, str]]:
    """Yield each source of the original mixture that the new mixture lacks or changes."""
    assert old.mixture is not None
    for name in old.mixture.sources:
        hint = f"keep it, and set its weight to 0 if the fork should not read it; name other data {name}-2, for example"
        if name not in mixture.sources:
            yield f"data.mixture.sources.{name}", f"a fork cannot remove a source: {hint}"
        elif _dump_shard_values(old.for_source(name)) != _dump_shard_values(new.for_source(name)):
            yield f"data.mixture.sources.{name}", f"a fork cannot change a source: {hint}"


def get_tokenizer_copy(config: Config) -> Path:
    """Return the path of the copy of the tokenizer in the directory of a fork. Only some forks have a copy."""
    return config.run.root / config.run.name / TOKENIZER_FILE


def _find_tokenizer_problem(run: Run, new: Config) -> str | None:
    """Return why the tokenizer of the new config is not that of the run; None if it is the same."""
    old = run.config.data.tokenizer
    path = new.data.tokenizer.path
    original = run.data_dir / TOKENIZER_FILE
    if new.data.tokenizer.eos_token != old.eos_token or path is None or not original.exists():
        return "a fork needs the tokenizer of the original"
    if path == get_tokenizer_copy(new) or sha256_file(path) == sha256_file(original):
        return None
    return f"a fork needs the tokenizer of the original: {path} differs from {original}"
