"""The publish stage: write the newest checkpoint, if it fulfils the rules, to a folder that other programs can load.

    publish.to/NAME/step-00001200/
        *.safetensors, config.json …   the exported model (pipeline/publish/export.py)
        README.md, loss.svg            the model card (pipeline/publish/card.py)
        sluice.json                    run, step, checkpoint, rules and file sizes
        SHA256SUMS                     hashes of all files; `sha256sum -c SHA256SUMS` verifies them

This folder is called a version. It is written under a temporary name, synced and then renamed, so a killed stage leaves
a complete version or none. An existing version is never changed. If several runs publish the same version, the first
rename wins, and a run with other weights fails. After the rename, the stage registers the version in a model registry
and runs the user's command `publish.run`. The run directory records which of these actions succeeded, so a retry does
not repeat them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import (
    FolderExistsError,
    add_checksum,
    create_folder_atomically,
    fsync,
    has_valid_checksum,
    open_regular_file,
    read_json,
    sha256_file,
    write_atomic,
    write_json,
)
from pipeline.base.ownership import open_own_folder
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.catalog import checkpoint_name, find_newest_step, read_checkpoint_manifest
from pipeline.config.sections import PublishConfig
from pipeline.evaluate.result import (
    EMA_PREFIX,
    TEXT_METRICS,
    get_main_metric,
    get_metrics,
    read_newest_result,
    read_result,
    remove_ema_metrics,
)
from pipeline.run.directory import Run
from pipeline.run.stages import Progress

DESCRIPTION_FILE = "sluice.json"
CHECKSUMS_FILE = "SHA256SUMS"
_STATE_FILE = "published.json"
"""File in the run directory. It records which actions after the rename succeeded (see `_list_remaining_actions`)."""
_VERIFIED_KEY = "compared"
"""Key in `_STATE_FILE` with the last verified version and the stamps of its files (see `_record_verification`)."""
_CHECKSUM_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)\n")
"""A line of SHA256SUMS: the hash and the name of a file."""
_MISSING_ACTIONS = {
    "registered": "the version is not registered yet (publish.mlflow)",
    "version": "publish.run has not succeeded yet",
}
"""Key of a remaining action (see `_list_remaining_actions`) → why the stage is not done."""


def describe_missing_outputs(run: Run) -> str | None:
    """Return why the stage is not done; None if the newest checkpoint is published and no action remains."""
    step = find_newest_step(run.checkpoints_dir)
    if not step:
        return "there is no checkpoint yet"
    if (problem := _find_version_problem(run, step)) is not None:
        return problem or f"step {step} is not published"
    if (changed_file := _find_changed_file(run, step)) is not None:
        return f"{changed_file} has changed since it was published and must be verified again"
    return next((_MISSING_ACTIONS[key] for key in _list_remaining_actions(run, step)), None)


def progress(run: Run) -> Progress:
    """Return the progress of the stage: the folder of the published version, or `-`."""
    step = find_newest_step(run.checkpoints_dir)
    if not step or _find_version_problem(run, step) is not None or _find_changed_file(run, step) is not None:
        return Progress("-")
    return Progress(str(_version_path(run, step)))


def check_inputs(run: Run) -> None:
    """Raise UserError if the rules in the config cannot be checked.

    This is the case if there will be no evaluation, or if the run in `publish.no_worse_than` has no evaluation. It is
    also the case if the evaluation of the decoder will not have a metric that `publish.rules` names. The metrics of a
    custom model are not known yet.
    """
    settings = _require_section(run)
    metrics = [name for name, bounds in settings.rules.items() if bounds is not None]
    if (metrics or settings.no_worse_than) and run.config.data.held_out == 0:
        raise UserError(
            "publish.no_evaluation",
            "publish.rules and publish.no_worse_than need an evaluation, but data.held_out is 0: increase it, or "
            "remove the rules",
        )
    for name in metrics if run.config.train.ema is not None else ():
        if name.startswith(EMA_PREFIX):
            raise UserError(
                "publish.unknown_metric",
                f"publish.rules.{name}: the stage publishes the weights, not their moving average (train.ema): use "
                f"{name.removeprefix(EMA_PREFIX)}",
            )
    task_prefixes = [f"{file.stem}." for file in run.config.evaluate.task_files]
    for name in metrics if run.config.model.target is None else ():
        if name not in ("loss", *TEXT_METRICS) and not name.startswith(tuple(task_prefixes)):
            available = ", ".join(["loss", *TEXT_METRICS, *(f"{prefix}accuracy" for prefix in task_prefixes)])
            raise UserError(
                "publish.unknown_metric",
                f"publish.rules.{name}: the evaluation will have no such metric; it will have {available}",
            )
    if settings.no_worse_than is not None:
        _read_reference_metric(settings.no_worse_than)  # raises UserError if the other run has no evaluation


def run_stage(run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Publish the newest checkpoint, and perform the actions after it that have not succeeded yet.

    Raises:
        UserError: if a rule or an action fails, if there is no checkpoint, or if the version exists with other files.
        CheckpointError: if the checkpoint is damaged.
    """
    settings = _require_section(run)
    step = find_newest_step(run.checkpoints_dir)
    if not step:
        raise UserError(
            "publish.no_checkpoint", f"{run.checkpoints_dir} has no intact checkpoint to publish: train first"
        )
    version = _version_path(run, step)
    if problem := _find_version_problem(run, step):
        raise UserError("publish.version_conflict", problem)
    if problem is None:  # The version exists and contains this checkpoint.
        _verify_checksums(version)
    else:  # "": the version does not exist.
        _write_version(run, step, version)
    _record_verification(run, version)
    for key, state in _list_remaining_actions(run, step).items():
        if key == "registered":
            _register(run, version, step)
        else:
            _run_command(str(settings.run), version)
        write_json(run.path / _STATE_FILE, {**_read_object(run.path / _STATE_FILE), key: state})
    if _find_changed_file(run, step) is not None:  # `publish.run` may change files of the version
        _verify_checksums(version)
        _record_verification(run, version)
    return ExitCode.DONE


def _require_section(run: Run) -> PublishConfig:
    """Return the section `publish` of the config. Raises UserError if the config does not have this section."""
    settings = run.config.publish
    if settings is None:
        raise UserError("publish.no_section", "the config has no section publish: set at least publish.to")
    return settings


def _version_path(run: Run, step: int) -> Path:
    """Return the folder of the published version of a step."""
    settings = _require_section(run)
    return settings.to / (settings.name or run.config.run.name) / checkpoint_name(step)


def _write_version(run: Run, step: int, version: Path) -> None:
    """Write the version of a step to the folder `version`.

    Raises UserError if a rule fails, or if another run has published other weights as this version in the meantime.
    """
    from pipeline.publish.export import write_model_files

    settings = _require_section(run)
    result = _read_result_of_weights(run, step)
    passed_rules = _check_rules(settings, result, step)
    owner = sha256(str(run.path).encode()).hexdigest()[:12] + "-"
    # This process has the lock of the stage, so killed attempts left these temporary folders.
    for leftover in version.parent.glob(f".{version.name}.{owner}*.tmp"):
        shutil.rmtree(leftover)
    own_checksums: dict[str, str] = {}
    try:
        with create_folder_atomically(version, owner) as temporary:
            print(write_model_files(run, temporary, str(step), settings.dtype), flush=True)
            _add_card_and_checksums(run, temporary, step, result, passed_rules)
            own_checksums = _read_checksums(temporary)
        print(f"published {version}", flush=True)
    except FolderExistsError:
        if problem := _find_version_problem(run, step):
            raise UserError("publish.version_conflict", problem) from None
        published_checksums = _read_checksums(version)
        if _select_weights(published_checksums) != _select_weights(own_checksums):
            raise UserError(
                "publish.version_conflict",
                f"another run has just published {version} with other weights: set another publish.name or the same "
                "publish.dtype",
            ) from None
        _verify_checksums(version)
        print(f"another run has just published {version} with the same weights", flush=True)


def _run_command(shell: str, version: Path) -> None:
    """Run the command `shell` (`publish.run`) in the published folder.

    Raises UserError if the command fails, or if another user owns or may write to the folder. The command may execute
    files of the folder.
    """
    with open_own_folder(version) as folder:
        code = subprocess.run(["bash", "-c", shell], cwd=folder, check=False).returncode
    if code:
        raise UserError(
            "publish.command_failed", f"publish.run exited with code {code} in {version}, which is published: {shell}"
        )


def _find_version_problem(run: Run, step: int) -> str | None:
    """Return why the checkpoint of a step is not published: None if it is, "" if the version does not exist.

    File sizes are compared, but not hashes, because `status` also calls this function and must be fast.
    """
    version = _version_path(run, step)
    if not os.path.lexists(version):
        return ""
    if not version.is_dir():
        return f"{version} is not a folder: set another publish.name or move it away"
    description = _read_object(version / DESCRIPTION_FILE)
    checkpoint = read_checkpoint_manifest(run.checkpoints_dir / checkpoint_name(step))["sha256"]
    if not has_valid_checksum(description) or description.get("checkpoint") != checkpoint:
        return f"{version} exists already and is not this run's checkpoint: set another publish.name or move it away"
    remedy = "move the version away, and it is published again"
    sizes = description.get("files")
    if not isinstance(sizes, dict) or not all(isinstance(size, int) for size in sizes.values()):
        return f"{version / DESCRIPTION_FILE}: 'files' should contain the size of each file: {remedy}"
    if "README.md" not in sizes or not _select_weights(sizes):
        return f"{version / DESCRIPTION_FILE}: 'files' names no README.md or no weights (*.safetensors): {remedy}"
    for name, size in sorted(sizes.items()):
        path = version / name
        if "/" in name or not path.is_file() or path.stat().st_size != size:
            return f"{path} has changed since it was published: {remedy}"
    if (checksums := _read_checksums(version)).keys() != {*sizes, DESCRIPTION_FILE}:
        name = min(checksums.keys() ^ {*sizes, DESCRIPTION_FILE})
        return f"{version / CHECKSUMS_FILE} does not have one line per published file ({name}): {remedy}"
    return None


def _read_checksums(version: Path) -> dict[str, str]:
    """Return the content of SHA256SUMS: file name → hash. Empty if the file cannot be read or a line is malformed."""
    with suppress(OSError, UserError, UnicodeDecodeError), open_regular_file(version / CHECKSUMS_FILE) as file:
        lines = file.read().decode().splitlines(keepends=True)
        if all(matches := [_CHECKSUM_LINE.fullmatch(line) for line in lines]):
            return {match[2]: match[1] for match in matches if match}
    return {}


def _select_weights(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `files` for files with weights. `files` maps file names to any values."""
    return {name: value for name, value in files.items() if name.endswith(".safetensors")}


def _verify_checksums(version: Path) -> None:
    """Raise UserError if the hash of a file of a version differs from its hash in SHA256SUMS."""
    for name, digest in sorted(_read_checksums(version).items()):
        if sha256_file(version / name) != digest:
            raise UserError(
                "publish.version_changed",
                f"{version / name} has changed since it was published: its hash is not the one in {CHECKSUMS_FILE}. "
                "Move the version away, and it is published again",
            )


def _record_verification(run: Run, version: Path) -> None:
    """Record that the files of a version have the right hashes, together with their current sizes and times."""
    write_json(
        run.path / _STATE_FILE,
        {**_read_object(run.path / _STATE_FILE), _VERIFIED_KEY: [str(version), _read_file_stamps(version)]},
    )


def _find_changed_file(run: Run, step: int) -> Path | None:
    """Return a file of the version if its size or time has changed since the last verification; None if none has.

    Returns None also if no verification was recorded. In this case, another run or an older version of Sluice published
    the version.
    """
    version = _version_path(run, step)
    verification = _read_object(run.path / _STATE_FILE).get(_VERIFIED_KEY)
    if not isinstance(verification, list) or verification[:1] != [str(version)]:
        return None
    stamps = _read_file_stamps(version)
    verified_stamps = verification[1] if len(verification) == 2 and isinstance(verification[1], dict) else {}
    return next((version / name for name in sorted(stamps) if verified_stamps.get(name) != stamps[name]), None)


def _read_file_stamps(version: Path) -> dict[str, list[int]]:
    """Return for each file that SHA256SUMS names, and for SHA256SUMS, its size and modification time (ns)."""
    statuses = {name: (version / name).stat() for name in (*_read_checksums(version), CHECKSUMS_FILE)}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in statuses.items()}


def _list_remaining_actions(run: Run, step: int) -> dict[str, Any]:
    """Return the actions after the rename that have not succeeded yet, in order: key → value to record after success.

    The key `registered` means the registration in the model registry, and `version` means the command `publish.run`.
    """
    settings = _require_section(run)
    version = str(_version_path(run, step))
    succeeded = _read_object(run.path / _STATE_FILE)
    actions: dict[str, Any] = {}
    if settings.mlflow is not None:
        actions["registered"] = [settings.mlflow.uri, _registered_model_name(run), version]
    if settings.run is not None:
        actions["version"] = version
    return {key: value for key, value in actions.items() if succeeded.get(key) != value}


def _read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing, malformed or not a regular file."""
    with suppress(FileNotFoundError, UserError):
        if isinstance(content := read_json(file), dict):
            return content
    return {}


def _registered_model_name(run: Run) -> str:
    """Return the name of the model in the registry: `publish.mlflow.model`, or the name of the run."""
    mlflow = _require_section(run).mlflow
    return (mlflow and mlflow.model) or run.config.run.name


def _register(run: Run, version: Path, step: int) -> None:
    """Register a version in the model registry. Raises UserError if the registration fails."""
    mlflow = _require_section(run).mlflow
    assert mlflow is not None
    metrics = get_metrics(_read_result_of_weights(run, step) or {})
    # the lines of the weights and, if there are several files of weights, of their index
    weight_lines = [
        line for line in (version / CHECKSUMS_FILE).read_text().splitlines(keepends=True) if ".safetensors" in line
    ]
    weights_hash = sha256("".join(weight_lines).encode()).hexdigest()
    tags = {"run": run.config.run.name, "step": step, "weights_sha256": weights_hash, **metrics}
    print(register_version(mlflow.uri, _registered_model_name(run), version, tags), flush=True)


def _read_result_of_weights(run: Run, step: int) -> dict[str, Any] | None:
    """Return the evaluation of a step without the metrics of the moving average, which is not published.

    Return None if the step is not evaluated.
    """
    result = read_result(run, step)
    return remove_ema_metrics(result) if result is not None and run.config.train.ema is not None else result


def _read_reference_metric(run_dir: Path) -> tuple[str, float]:
    """Return the name and value of the main metric in a run's newest evaluation.

    Raises UserError if the run has no evaluation.
    """
    result = read_newest_result(Run(run_dir))
    if result is None:
        raise UserError(
            "publish.no_evaluation", f"publish.no_worse_than: {run_dir} has no evaluation: evaluate this run first"
        )
    return get_main_metric(result)


def _check_rules(settings: PublishConfig, result: Mapping[str, Any] | None, step: int) -> list[str]:
    """Return a description of every rule, with the values that were compared; [] if there are no rules.

    Args:
        settings: the section `publish` of the config.
        result: the evaluation of the step; None if the step is not evaluated.
        step: the step.

    Raises:
        UserError: if a rule fails, or cannot be checked. The message names all failed rules.
    """
    passed: list[str] = []
    failed: list[str] = []
    if result is None:
        if any(settings.rules.values()) or settings.no_worse_than:
            raise UserError(
                "publish.no_evaluation", f"nothing was published: publish has rules, but step {step} is not evaluated"
            )
        return passed
    metrics = get_metrics(result)
    for name, bounds in settings.rules.items():
        if bounds is None:
            continue
        if name not in metrics:
            raise UserError(
                "publish.unknown_metric",
                f"publish.rules.{name}: the evaluation has no such metric; it has {', '.join(metrics)}",
            )
        for key, bound, is_met in (
            ("max", bounds.max, bounds.max is None or metrics[name] <= bounds.max),
            ("min", bounds.min, bounds.min is None or metrics[name] >= bounds.min),
        ):
            if bound is not None:
                (passed if is_met else failed).append(f"{name} {metrics[name]:.6g}, {key} {bound:g}")
    if settings.no_worse_than is not None:
        name, value = get_main_metric(result)
        other_name, other_value = _read_reference_metric(settings.no_worse_than)
        other = settings.no_worse_than.name
        if name != other_name:
            raise UserError(
                "publish.metric_mismatch",
                f"publish.no_worse_than: the main metric is {name} in this run, but {other_name} in {other}",
            )
        # the main metric is a loss or bits per byte, so a lower value is better
        rule = f"{name} {value:.6g}, no worse than {other_value:.6g} of {other}"
        (passed if value <= other_value else failed).append(rule)
    if failed:
        raise UserError(
            "publish.rules_failed",
            f"nothing was published: step {step} does not fulfil the rules of publish: {'; '.join(failed)}",
        )
    return passed


def _add_card_and_checksums(
    run: Run, folder: Path, step: int, result: Mapping[str, Any] | None, rules: list[str]
) -> None:
    """Add the model card, sluice.json and SHA256SUMS to an exported folder, and sync the folder."""
    from pipeline.publish.card import write_card

    write_card(run, folder, step, result, rules)
    checkpoint = read_checkpoint_manifest(run.checkpoints_dir / checkpoint_name(step))["sha256"]
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    description = {"run": run.config.run.name, "step": step, "checkpoint": checkpoint, "rules": rules, "files": files}
    write_json(folder / DESCRIPTION_FILE, add_checksum(description))
    names = sorted(path.name for path in folder.iterdir())
    write_atomic(folder / CHECKSUMS_FILE, "".join(f"{sha256_file(folder / name)}  {name}\n" for name in names))
    fsync(folder)


_MLFLOW_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}
"""Timeout and retries of a request. With its defaults, MLflow waits minutes for a server that does not respond."""
_IDENTITY_TAGS = ("run", "step", "weights_sha256")
"""Tags that identify a version in the registry."""


def register_version(uri: str, model: str, folder: Path, tags: Mapping[str, Any]) -> str:
    """Register a published folder as a version of a model in MLflow. Nothing is uploaded.

    If a version with the same `_IDENTITY_TAGS` exists, no further version is registered. The source of the version is
    `folder:///…`, because servers accept plain paths only for their own artifacts.

    Args:
        uri: the URL of the server.
        model: the name of the registered model. It is created if it does not exist.
        folder: the published folder.
        tags: the tags of the version, including `_IDENTITY_TAGS`.

    Returns:
        A description of the result.

    Raises:
        UserError: if MLflow is not installed, or the server does not respond or reports an error.
    """
    for name, value in _MLFLOW_TIMEOUTS.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise UserError(
            "publish.missing_package", "publish.mlflow needs the MLflow client: pip install -e '.[mlflow]'"
        ) from error
    server = MlflowClient(tracking_uri=uri, registry_uri=uri)
    text_tags = {key: str(value) for key, value in tags.items()}
    try:
        if not server.search_registered_models(f"name = '{model}'"):
            try:
                server.create_registered_model(model)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run created it after the search
                    raise
        for existing in server.search_model_versions(f"name = '{model}'"):
            if all(existing.tags.get(key) == text_tags[key] for key in _IDENTITY_TAGS):
                return f"version {existing.version} of {model} at {uri} exists already"
        new_version = server.create_model_version(model, f"folder://{folder}", tags=text_tags)
    except MlflowException as error:
        raise UserError(
            "publish.registry_failed", f"publish.mlflow: {uri} did not register {folder}, which is published: {error}"
        ) from error
    return f"version {new_version.version} of {model} at {uri}"
