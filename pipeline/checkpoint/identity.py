"""The identity of a run: hashes of its config and its data. Each checkpoint contains the identity of its run.

Before a run loads a checkpoint, to continue or to evaluate it, the run compares both identities. This prevents a run
from loading weights that were trained with another config or with other data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.base.errors import CheckpointError
from pipeline.base.files import has_valid_checksum, read_json, sha256_json
from pipeline.config.datasets import DataConfig, restore_hashed_names
from pipeline.config.masking import mask_secrets
from pipeline.config.sections import Config, list_keys_with, remove_key
from pipeline.config.types import Policy
from pipeline.data.manifest import Manifest, SampleManifest, hash_sources, list_data_hashes
from pipeline.data.sample_order import ORDER_VERSION
from pipeline.run.changes import flatten_keys
from pipeline.run.directory import Run
from pipeline.run.origin import SOURCE_FILE, Origin


def compute_identity(config: Config, manifest: Manifest | SampleManifest) -> dict[str, Any]:
    """Return the entries of a checkpoint's manifest that identify the run.

    These entries are hashes of config and data, the config values that are hashed, and the version of the sample order.
    If the data is a mixture, the weights of the mixture are a separate entry, because the user may change the weights
    of later steps. If the length of sequences changes during the run, the lengths are also a separate entry, and the
    hash has the first length.

    Args:
        config: the config of the run.
        manifest: describes the shards of the run.
    """
    # `add_special_tokens` is set to its default, so that the key is not in the hash of the config. The hash of the data
    # already covers the tokens that this key adds.
    phases = config.length_phases
    data_values = {
        "add_special_tokens": DataConfig.model_fields["add_special_tokens"].default,
        "sequence_length": phases[0].length,
    }
    config = config.model_copy(update={"data": config.data.model_copy(update=data_values)})
    sections = {"data", "model", "adapter", "train", "optimizer"}
    values = config.model_dump(mode="json", include=sections, exclude_defaults=True)
    restore_hashed_names(values.get("data", {}))
    metadata = config.metadata.model.model_dump(mode="json", exclude_defaults=True)
    if metadata:  # Earlier versions stored the metadata in the config, so the hash must still include it.
        values["model"] = {**values.get("model", {}), **metadata}
    mixture: dict[str, Any] = values.get("data", {}).get("mixture") or {}
    weights = {"weights": mixture.pop("weights")} if mixture else {}
    for path in list_keys_with(Policy.NOT_IN_IDENTITY):
        remove_key(values, path.split("."))
    if isinstance(manifest, SampleManifest) and manifest.dataset is not None and not values.get("data"):
        values.pop("data", None)  # A section without keys must not differ from a missing section.
    values["seed"] = config.run.seed
    lengths = {"lengths": [phase.model_dump() for phase in phases]} if len(phases) > 1 else {}
    return {
        "config_hash": sha256_json(values),
        "config": mask_secrets(flatten_keys(values)),
        "data_hash": sha256_json(list_data_hashes(manifest)),
        "order_version": ORDER_VERSION,
        **weights,
        **lengths,
    }


def read_source(run: Run) -> dict[str, Any]:
    """Return the content of `source.json`; {} if the run did not start from open weights (`model.init_from`).

    Raises CheckpointError if the file is missing or damaged.
    """
    if run.config.model.init_from is None:
        return {}
    file = run.path / SOURCE_FILE
    source: Any = read_json(file) if file.exists() else None
    if not has_valid_checksum(source):
        raise CheckpointError(
            "checkpoint.damaged_source", f"{file} is missing or damaged: restore the file, or start a new run"
        )
    return dict(source)


def compute_source_identity(run: Run) -> dict[str, Any]:
    """Return the hash of the open weights from which the run started, as `source_hash`; {} without open weights.

    Raises CheckpointError if `source.json` is missing or damaged.
    """
    source = read_source(run)
    return {"source_hash": sha256_json(source["files"])} if source else {}


def check_origin(
    saved: Mapping[str, Any], current: Mapping[str, Any], origin: Origin, manifest: Manifest | SampleManifest
) -> None:
    """Raise CheckpointError if a fork cannot begin with the checkpoint of its origin.

    The config may differ. The fork must have the same open weights, tokenizer and version of the sample order, and the
    same shards of all sources whose order it continues.

    Args:
        saved: the manifest of the checkpoint.
        current: the current identity of the fork.
        origin: the origin of the fork.
        manifest: describes the shards of the fork.
    """
    hashes = hash_sources(manifest)
    changed_sources = [name for name, digest in origin.source_hashes.items() if hashes.get(name) != digest]
    changed = [f"source {name}" if name else "data" for name in changed_sources]
    if isinstance(manifest, Manifest) and manifest.tokenizer_sha256 != origin.tokenizer_sha256:
        changed.append("tokenizer")
    keys = ("order_version", "source_hash", "base_hash")
    changed += [key for key in keys if saved.get(key) != current.get(key)]
    if changed:
        raise CheckpointError(
            "checkpoint.other_origin",
            f"{origin} has another {', '.join(changed)} than this fork has now. If the input files have changed since "
            "the original read them, restore them; otherwise fork the run again",
        )


def check_identity(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    origin: Origin | None = None,
    manifest: Manifest | SampleManifest | None = None,
) -> None:
    """Raise CheckpointError if a checkpoint does not belong to this run.

    The hashes and the version of the sample order must be equal, and also the weights of the mixture for the steps up
    to the checkpoint. The weights for later steps may differ. For the checkpoint of a fork's origin, only the
    conditions of :func:`check_origin` apply.

    Args:
        saved: the manifest of the checkpoint, which contains an identity.
        current: the current identity of the run (:func:`compute_identity`, :func:`compute_source_identity`).
        origin: the origin of the run if it is a fork.
        manifest: describes the shards of the run; needed for a fork.
    """
    if origin is not None and manifest is not None and saved["sha256"] == origin.manifest_sha256:
        check_origin(saved, current, origin, manifest)
        return
    saved_config = saved.get("config") or current["config"]  # Manifests of older versions do not contain the config.
    keys = sorted({**saved_config, **current["config"]})
    old_and_new_values = {key: (saved_config.get(key, "unset"), current["config"].get(key, "unset")) for key in keys}
    changes = "".join(f", {key} {old} → {new}" for key, (old, new) in old_and_new_values.items() if old != new)
    for key in ("config_hash", "data_hash", "order_version", "source_hash", "base_hash"):
        if saved.get(key) != current.get(key):
            raise CheckpointError(
                "checkpoint.other_training",
                f"checkpoint {saved['step']} has another {key} than the run has now{changes}. The config, the shards "
                "or the code were changed by hand, so the results would differ from those of the original run. Undo "
                "the change, or start a new run",
            )

    def get_entries_in_effect(identity: Mapping[str, Any], name: str) -> list[Any]:
        """Return the items of the entry `name` that apply to steps up to the step of the checkpoint."""
        return [item for item in identity.get(name, []) if item.get("from_step", 1) <= saved["step"]]

    saved_weights = get_entries_in_effect(saved, "weights")
    current_weights = get_entries_in_effect(current, "weights")
    if saved_weights != current_weights:
        raise CheckpointError(
            "checkpoint.other_training",
            f"checkpoint {saved['step']} was trained with the weights {saved_weights} of data.mixture, but the config "
            f"now has {current_weights}. Only change weights of later steps, or start a new run",
        )
    # The hash of the config contains the first length.
    saved_lengths = get_entries_in_effect(saved, "lengths")[1:]
    current_lengths = get_entries_in_effect(current, "lengths")[1:]
    if saved_lengths != current_lengths:
        raise CheckpointError(
            "checkpoint.other_training",
            f"checkpoint {saved['step']} was trained with the lengths {saved_lengths} of train.sequence_schedule after "
            f"the first, but the config now has {current_lengths}. Only change lengths of later steps, or start a new "
            "run",
        )


def describe_version_changes(saved: Mapping[str, str], current: Mapping[str, str]) -> str | None:
    """Return a message with the versions that differ from those of a checkpoint; None if all versions are equal.

    If versions differ, results may differ in the last digits.

    Args:
        saved: the versions in the manifest of the checkpoint (`collect_versions`), by name.
        current: the versions of this process.
    """
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    return "; ".join(f"{name} {saved.get(name)} → {current.get(name)}" for name in names) or None
