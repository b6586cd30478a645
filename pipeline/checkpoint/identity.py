"""The identity of a training: hashes of its config and data, saved in each checkpoint and compared before it is loaded.

It prevents a run from continuing with, or evaluating, weights of another config or other data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.base.errors import CheckpointError
from pipeline.base.files import has_valid_checksum, read_json, sha256_json
from pipeline.config.datasets import DataConfig
from pipeline.config.masking import mask_secrets
from pipeline.config.sections import Config, list_keys_with, remove_key
from pipeline.config.types import Policy
from pipeline.data.manifest import Manifest, SampleManifest
from pipeline.data.sample_order import ORDER_VERSION
from pipeline.run.changes import flatten_keys
from pipeline.run.directory import Run

SOURCE_FILE = "source.json"
"""File in the run directory that describes the open weights from which the training started."""


def compute_identity(config: Config, manifest: Manifest | SampleManifest) -> dict[str, Any]:
    """Return hashes of config and data, the values of the former, and the version of the sample order."""
    default = {
        "add_special_tokens": DataConfig.model_fields["add_special_tokens"].default
    }  # the tokens are hashed instead
    config = config.model_copy(update={"data": config.data.model_copy(update=default)})
    values = config.model_dump(mode="json", include={"data", "model", "train", "optimizer"}, exclude_defaults=True)
    metadata = config.metadata.model.model_dump(mode="json", exclude_defaults=True)
    if metadata:  # it was part of the config, and still is of the hash
        values["model"] = {**values.get("model", {}), **metadata}
    mixture: dict[str, Any] = values.get("data", {}).get("mixture") or {}
    weights = {"weights": mixture.pop("weights")} if mixture else {}
    for path in list_keys_with(Policy.NOT_IN_IDENTITY):
        remove_key(values, path.split("."))
    values["seed"] = config.run.seed
    return {
        "config_hash": sha256_json(values),
        "config": mask_secrets(flatten_keys(values)),
        "data_hash": sha256_json([shard.sha256 for shard in manifest.train]),
        "order_version": ORDER_VERSION,
        **weights,
    }


def read_source(run: Run) -> dict[str, Any]:
    """Return the content of `source.json`; empty if the training started from initialized weights.

    Raises CheckpointError if the file is missing or damaged.
    """
    if run.config.model.init_from is None:
        return {}
    file = run.path / SOURCE_FILE
    found: Any = read_json(file) if file.exists() else None
    if not has_valid_checksum(found):
        raise CheckpointError(
            "checkpoint.damaged_source", f"{file} is missing or damaged: restore the file, or start a new run"
        )
    return dict(found)


def compute_source_identity(run: Run) -> dict[str, Any]:
    """Return the hash of the open weights from which a training started; empty if there are none.

    Raises CheckpointError as `read_source` does.
    """
    source = read_source(run)
    return {"source_hash": sha256_json(source["files"])} if source else {}


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the manifest `saved` does not belong to the training with the identity `now`."""
    saved_config = saved.get("config") or now["config"]  # older checkpoints have none
    keys = sorted({**saved_config, **now["config"]})
    values = {key: (saved_config.get(key, "unset"), now["config"].get(key, "unset")) for key in keys}
    changes = "".join(f", {key} {old} → {new}" for key, (old, new) in values.items() if old != new)
    for key in ("config_hash", "data_hash", "order_version", "source_hash"):
        if saved.get(key) != now.get(key):
            raise CheckpointError(
                "checkpoint.other_training",
                f"checkpoint {saved['step']} has another {key} than this run now{changes}. The config, shards or code "
                "were changed by hand, so that it would continue as another training. Undo the change, or start a new "
                "run",
            )

    def effective_weights(identity: Mapping[str, Any]) -> list[Any]:
        return [entry for entry in identity.get("weights", []) if entry.get("from_step", 1) <= saved["step"]]

    before = effective_weights(saved)
    after = effective_weights(now)
    if before != after:
        raise CheckpointError(
            "checkpoint.other_training",
            f"checkpoint {saved['step']} was trained with the weights {before} of data.mixture, not with {after}. Only "
            "change weights of later steps, or start a new run",
        )


def describe_version_changes(saved: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Describe which versions differ from those of a checkpoint, because results may then differ in the last digits."""
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return "; ".join(f"{name} {saved.get(name)} → {now.get(name)}" for name in names) or None
