"""What makes a training this training, wherever and however long it runs: kept in each checkpoint, compared before one
is used. So nobody goes on with, or evaluates, the weights of another config or other data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.base.errors import CheckpointError
from pipeline.base.files import has_valid_checksum, read_json, sha256_json
from pipeline.config.datasets import DataConfig
from pipeline.config.masking import mask_secrets
from pipeline.config.sections import Config
from pipeline.data.manifest import Manifest, SampleManifest
from pipeline.data.sample_order import ORDER_VERSION
from pipeline.run.changes import flatten_keys
from pipeline.run.directory import Run

OBSERVATION_KEYS = ("log_every", "evaluate_every", "evaluate_sequences", "profile_every")
"""Keys of `train` that change nothing of what is trained."""
SOURCE_FILE = "source.json"
"""In the run directory: what the weights of an open model were that the training began with."""


def compute_identity(config: Config, manifest: Manifest | SampleManifest) -> dict[str, Any]:
    """Hashes of the config and the data, the values that the first is of, and the version of the order of samples."""
    adds = {"add_special_tokens": DataConfig.model_fields["add_special_tokens"].default}  # the tokens have their hash
    config = config.model_copy(update={"data": config.data.model_copy(update=adds)})
    values = config.model_dump(mode="json", include={"data", "model", "train", "optimizer"}, exclude_defaults=True)
    unlike = {"train": ("steps", "epochs", *OBSERVATION_KEYS), "data": ("verify", "max_rejected", "source")}
    unlike["model"] = ("init_from", "init_files")
    mixture: dict[str, Any] = values.get("data", {}).get("mixture") or {}
    weights = {"weights": mixture.pop("weights")} if mixture else {}
    for source in mixture.get("sources", {}).values():
        source.pop("source")
    for section, keys in unlike.items():
        for key in keys:
            values.get(section, {}).pop(key, None)
    values["seed"] = config.run.seed
    return {
        "config_hash": sha256_json(values),
        "config": mask_secrets(flatten_keys(values)),
        "data_hash": sha256_json([shard.sha256 for shard in manifest.train]),
        "order_version": ORDER_VERSION,
        **weights,
    }


def read_source(run: Run) -> dict[str, Any]:
    """What `source.json` says that the training began with; nothing where its weights were drawn.

    Raises CheckpointError where it is missing or damaged.
    """
    if run.config.model.init_from is None:
        return {}
    file = run.path / SOURCE_FILE
    found: Any = read_json(file) if file.exists() else None
    if not has_valid_checksum(found):
        raise CheckpointError(f"{file} is missing or damaged: put it back as it was, or start a new run")
    return dict(found)


def compute_source_identity(run: Run) -> dict[str, Any]:
    """The hash of what a training began with, of files that nobody asks again; nothing where its weights were drawn.

    Raises CheckpointError as `source_of` does.
    """
    source = read_source(run)
    return {"source_hash": sha256_json(source["files"])} if source else {}


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError where the manifest of a checkpoint is not of the training with the identity `now`."""
    was = saved.get("config") or now["config"]  # older ones have none
    both = {key: (was.get(key, "unset"), now["config"].get(key, "unset")) for key in sorted({**was, **now["config"]})}
    other = "".join(f", {key} {old} → {new}" for key, (old, new) in both.items() if old != new)
    for key in ("config_hash", "data_hash", "order_version", "source_hash"):
        if saved.get(key) != now.get(key):
            raise CheckpointError(
                f"checkpoint {saved['step']} has another {key} than this run now{other}: its config, shards or code "
                "were changed by hand; going on would be another training. Undo that, or start a new run"
            )
    before, after = ([one for one in each.get("weights", []) if one.get("from_step", 1) <= saved["step"]]
                     for each in (saved, now))  # fmt: skip
    if before != after:
        raise CheckpointError(
            f"checkpoint {saved['step']} was trained with the weights {before} of data.mixture, not with {after}: "
            "change those of steps to come alone, or start a new run"
        )


def describe_version_changes(saved: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """In words what a checkpoint was made with and this start has otherwise, by which last digits may differ."""
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return "; ".join(f"{name} {saved.get(name)} → {now.get(name)}" for name in names) or None
