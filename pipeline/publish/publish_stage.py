"""Stage publish: the newest checkpoint, where it is good enough, as a folder that others load.

    publish.to/NAME/step-00001200/
        *.safetensors, config.json …   what `export` writes (pipeline/publish/export.py)
        README.md, loss.svg            the card (pipeline/publish/card.py)
        sluice.json                    what it is of; sealed
        SHA256SUMS                     of all files; `sha256sum -c SHA256SUMS` compares

The folder takes its name by one rename, after everything was synced: whatever is killed in between leaves one whole
version or none. A rule that fails ends the stage before anything is written. A version that is there already is left
as it is. Several runs may publish to one place at once: each fills a temporary folder of its own, the first rename
wins, and a run whose weights are not those of the winner fails with an error that names the folder.

Before an existing version is registered or handed to `publish.run`, all its files are compared with SHA256SUMS. The run
directory notes the sizes and times that they had then, so that `missing` notices a later change without reading them.

Behind all that come an entry in a model registry (pipeline/publish/publish_stage.py) and `publish.run`, a command
of the user's own; what ended well is noted in the run directory, so that a stage that is tried again does not repeat
it.


An entry in an MLflow model registry for each published version, by MLflow's own client.

A version of the registered model has the folder as its source and says in tags what it is of, so that the same step of
the same run is entered once, however often somebody tries. A server takes no plain path of a folder as a source (that
is for its own artifacts), so it is written as `folder:///…`; nothing is uploaded.
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
from pipeline.evaluate.result import TEXT_METRICS, get_main_metric, get_metrics, read_newest_result, read_result
from pipeline.run.directory import Run
from pipeline.run.stages import Progress

SEAL, SUMS = "sluice.json", "SHA256SUMS"
_DONE = "published.json"
"""In the run directory: what ended well behind the newest version that has its name (see `_further`)."""
_COMPARED = "compared"
"""Its key for the version whose files were last compared with their hashes (see `_note_compared`)."""
_SUMS_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)\n")
_NOT_YET = {"registered": "publish.mlflow has no entry yet", "version": "publish.run has not ended well yet"}


def missing_outputs(run: Run) -> str | None:
    """Why the stage is not done; None when the newest checkpoint is published and all ended well that comes behind."""
    step = find_newest_step(run.checkpoints_dir)
    if not step:
        return "there is no checkpoint yet"
    if (lacking := _lacking(run, step)) is not None:
        return lacking or f"step {step} is not published"
    if (changed := _changed_file(run, step)) is not None:
        return f"{changed} has changed since it was published: its hash is not compared yet"
    return next((_NOT_YET[key] for key in _further(run, step)), None)


def progress(run: Run) -> Progress:
    """How far it is."""
    step = find_newest_step(run.checkpoints_dir)
    published = step and _lacking(run, step) is None and _changed_file(run, step) is None
    return Progress(str(_version(run, step)) if step and published else "-")


def check_inputs(run: Run) -> None:
    """Raise UserError for rules that can never be looked at."""
    wanted = _wanted(run)
    figures = [name for name, bounds in wanted.rules.items() if bounds is not None]
    if (figures or wanted.no_worse_than) and run.config.data.held_out == 0:
        raise UserError(
            "publish.no_evaluation",
            "publish.rules and publish.no_worse_than need an evaluation, and data.held_out is 0",
        )
    tasks = [f"{file.stem}." for file in run.config.evaluate.task_files]
    for name in figures if run.config.model.target is None else ():
        if name not in ("loss", *TEXT_METRICS) and not name.startswith(tuple(tasks)):
            there = ", ".join(["loss", *TEXT_METRICS, *(f"{task}accuracy" for task in tasks)])
            raise UserError(
                "publish.unknown_metric",
                f"publish.rules.{name}: the evaluation will have no such figure; it has {there}",
            )
    if wanted.no_worse_than is not None:
        _bar(wanted.no_worse_than)


def run_stage(run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
    """Publish the newest checkpoint. Raises UserError where a rule fails, CheckpointError for a damaged one."""
    wanted, step = _wanted(run), find_newest_step(run.checkpoints_dir)
    if not step:
        raise UserError(
            "publish.no_checkpoint", f"{run.checkpoints_dir} holds no intact checkpoint to publish; train first"
        )
    version = _version(run, step)
    if lacking := _lacking(run, step):
        raise UserError("publish.version_conflict", lacking)
    if lacking is None:
        _compare_hashes(version)
    else:
        _make(run, step, version)
    _note_compared(run, version)
    for key, what in _further(run, step).items():
        if key == "registered":
            _register(run, version, step)
        else:
            _run_command(str(wanted.run), version)
        write_json(run.path / _DONE, {**_object(run.path / _DONE), key: what})
    if _changed_file(run, step) is not None:  # by publish.run
        _compare_hashes(version)
        _note_compared(run, version)
    return ExitCode.DONE


def _wanted(run: Run) -> PublishConfig:
    wanted = run.config.publish
    if wanted is None:
        raise UserError("publish.no_section", "the config has no section publish: give at least publish.to")
    return wanted


def _version(run: Run, step: int) -> Path:
    wanted = _wanted(run)
    return wanted.to / (wanted.name or run.config.run.name) / checkpoint_name(step)


def _make(run: Run, step: int, version: Path) -> None:
    """Write the version, which is not there. Raises UserError if a rule fails, and if another run published different
    weights under this name in the meantime."""
    from pipeline.publish.export import write_model_files

    wanted, result = _wanted(run), read_result(run, step)
    held = _held_rules(wanted, result, step)
    owner = sha256(str(run.path).encode()).hexdigest()[:12] + "-"  # the run's lock is held: what is left is nobody's
    for left in version.parent.glob(f".{version.name}.{owner}*.tmp"):  # by an attempt that was killed
        shutil.rmtree(left)
    ours: dict[str, str] = {}
    try:
        with create_folder_atomically(version, owner) as making:
            print(write_model_files(run, making, str(step), wanted.dtype), flush=True)
            _complete(run, making, step, result, held)
            ours = _read_sums(making)
        print(f"published {version}", flush=True)
    except FolderExistsError:
        if lacking := _lacking(run, step):
            raise UserError("publish.version_conflict", lacking) from None
        theirs = _read_sums(version)
        if _weights_of(theirs) != _weights_of(ours):
            raise UserError(
                "publish.version_conflict",
                f"{version} was published by another run in the meantime, with other weights: give another "
                "publish.name, or the same publish.dtype",
            ) from None
        _compare_hashes(version)
        print(f"{version} was published by another run in the meantime, with the same weights", flush=True)


def _run_command(shell: str, version: Path) -> None:
    """Run `publish.run` in the published folder, which must be our own: the command may execute what is in it."""
    with open_own_folder(version) as held:
        code = subprocess.run(["bash", "-c", shell], cwd=held, check=False).returncode
    if code:
        raise UserError(
            "publish.command_failed", f"publish.run ended with code {code} in {version}, which is published: {shell}"
        )


def _lacking(run: Run, step: int) -> str | None:
    """None where this checkpoint's version is there, "" where nothing is; else what is wrong with what is there.

    Sizes are compared, not hashes: `status` asks this, too.
    """
    version = _version(run, step)
    if not os.path.lexists(version):
        return ""
    if not version.is_dir():
        return f"{version} is no folder: give another publish.name or move it away"
    found = _object(version / SEAL)
    checkpoint = read_checkpoint_manifest(run.checkpoints_dir / checkpoint_name(step))["sha256"]
    if not has_valid_checksum(found) or found.get("checkpoint") != checkpoint:
        return (
            f"{version} is there already and is not of this run's checkpoint: give another publish.name or move it away"
        )
    out = "move the version away, and it is made again"
    sizes = found.get("files")
    if not isinstance(sizes, dict) or not all(isinstance(size, int) for size in sizes.values()):
        return f"{version / SEAL}: 'files' should hold the size of each file: {out}"
    if "README.md" not in sizes or not _weights_of(sizes):
        return f"{version / SEAL}: 'files' names no README.md or no weights (*.safetensors): {out}"
    for name, size in sorted(sizes.items()):
        path = version / name
        if "/" in name or not path.is_file() or path.stat().st_size != size:
            return f"{path} is not as it was published: {out}"
    if (sums := _read_sums(version)).keys() != {*sizes, SEAL}:
        odd = min(sums.keys() ^ {*sizes, SEAL})
        return f"{version / SUMS} does not hold one line for each published file ({odd}): {out}"
    return None


def _read_sums(version: Path) -> dict[str, str]:
    """The hashes in SHA256SUMS by file; none where it is missing, or a line is malformed."""
    with suppress(OSError, UserError, UnicodeDecodeError), open_regular_file(version / SUMS) as file:
        lines = file.read().decode().splitlines(keepends=True)
        if all(found := [_SUMS_LINE.fullmatch(line) for line in lines]):
            return {match[2]: match[1] for match in found if match}
    return {}


def _weights_of(files: Mapping[str, Any]) -> dict[str, Any]:
    """Of a table by file, what is of weights."""
    return {name: value for name, value in files.items() if name.endswith(".safetensors")}


def _compare_hashes(version: Path) -> None:
    """Compare each file of a version with SHA256SUMS. Raises UserError naming the first that differs."""
    for name, digest in sorted(_read_sums(version).items()):
        if sha256_file(version / name) != digest:
            raise UserError(
                "publish.version_changed",
                f"{version / name} is not as it was published: its hash is not that in {SUMS}. Move the version away, "
                "and it is made again",
            )


def _note_compared(run: Run, version: Path) -> None:
    """Note that the version's files have the hashes of SHA256SUMS, with the sizes and times that they have now."""
    write_json(run.path / _DONE, {**_object(run.path / _DONE), _COMPARED: [str(version), _stamps(version)]})


def _changed_file(run: Run, step: int) -> Path | None:
    """A file of the version whose size or time is not the noted one; None where there is none, or no note."""
    version, noted = _version(run, step), _object(run.path / _DONE).get(_COMPARED)
    if not isinstance(noted, list) or noted[:1] != [str(version)]:  # published by another run, or by older code
        return None
    found = _stamps(version)
    was = noted[1] if len(noted) == 2 and isinstance(noted[1], dict) else {}
    return next((version / name for name in sorted(found) if was.get(name) != found[name]), None)


def _stamps(version: Path) -> dict[str, list[int]]:
    """Size and time (ns) of each file that SHA256SUMS names, and of SHA256SUMS."""
    found = {name: (version / name).stat() for name in (*_read_sums(version), SUMS)}
    return {name: [seen.st_size, seen.st_mtime_ns] for name, seen in found.items()}


def _further(run: Run, step: int) -> dict[str, Any]:
    """What is still to do behind the rename, in order, as it is noted once it ended well."""
    wanted, version, done = _wanted(run), str(_version(run, step)), _object(run.path / _DONE)
    asked: dict[str, Any] = {}
    if wanted.mlflow is not None:
        asked["registered"] = [wanted.mlflow.uri, _entry(run), version]
    if wanted.run is not None:
        asked["version"] = version
    return {key: what for key, what in asked.items() if done.get(key) != what}


def _object(file: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where it is missing, torn or no ordinary file."""
    with suppress(FileNotFoundError, UserError):
        if isinstance(found := read_json(file), dict):
            return found
    return {}


def _entry(run: Run) -> str:
    """The model's name in the registry."""
    mlflow = _wanted(run).mlflow
    return (mlflow and mlflow.model) or run.config.run.name


def _register(run: Run, version: Path, step: int) -> None:
    """Enter a version into the registry. Raises UserError where that fails."""
    from pipeline.publish.publish_stage import register_version

    mlflow, figures = _wanted(run).mlflow, get_metrics(read_result(run, step) or {})
    assert mlflow is not None
    sums = [line for line in (version / SUMS).read_text().splitlines(keepends=True) if ".safetensors" in line]
    weights = sha256("".join(sums).encode()).hexdigest()
    tags = {"run": run.config.run.name, "step": step, "weights_sha256": weights, **figures}
    print(register_version(mlflow.uri, _entry(run), version, tags), flush=True)


def _bar(other: Path) -> tuple[str, float]:
    """What the newest evaluation of the run in folder `other` is judged by. Raises UserError where it has none."""
    result = read_newest_result(Run(other))
    if result is None:
        raise UserError("publish.no_evaluation", f"publish.no_worse_than: {other} has no evaluation")
    return get_main_metric(result)


def _held_rules(wanted: PublishConfig, result: Mapping[str, Any] | None, step: int) -> list[str]:
    """Every rule in words, with its number. Raises UserError, naming all that fail, where one does."""
    held: list[str] = []
    failed: list[str] = []
    if result is None:
        if any(wanted.rules.values()) or wanted.no_worse_than:
            raise UserError(
                "publish.no_evaluation", f"nothing was published: step {step} is not evaluated, and publish has rules"
            )
        return held
    figures = get_metrics(result)
    for name, bounds in wanted.rules.items():
        if bounds is None:
            continue
        if name not in figures:
            raise UserError(
                "publish.unknown_metric",
                f"publish.rules.{name}: the evaluation has no such figure; it has {', '.join(figures)}",
            )
        for key, bound, good in (
            ("max", bounds.max, bounds.max is None or figures[name] <= bounds.max),
            ("min", bounds.min, bounds.min is None or figures[name] >= bounds.min),
        ):
            if bound is not None:
                (held if good else failed).append(f"{name} {figures[name]:.6g}, {key} {bound:g}")
    if wanted.no_worse_than is not None:
        (name, ours), (theirs_name, theirs) = get_main_metric(result), _bar(wanted.no_worse_than)
        other = wanted.no_worse_than.name
        if name != theirs_name:
            raise UserError(
                "publish.metric_mismatch",
                f"publish.no_worse_than: this run is judged by {name}, {other} by {theirs_name}",
            )
        words = f"{name} {ours:.6g}, no worse than {theirs:.6g} of {other}"
        (held if ours <= theirs else failed).append(words)
    if failed:
        raise UserError(
            "publish.rules_failed",
            f"nothing was published, step {step} does not keep publish's rules: {'; '.join(failed)}",
        )
    return held


def _complete(run: Run, folder: Path, step: int, result: Mapping[str, Any] | None, held: list[str]) -> None:
    """Add the card, the seal and the checksums to an exported folder, and sync it."""
    from pipeline.publish.card import write_card

    write_card(run, folder, step, result, held)
    checkpoint = read_checkpoint_manifest(run.checkpoints_dir / checkpoint_name(step))["sha256"]
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    what = {"run": run.config.run.name, "step": step, "checkpoint": checkpoint, "rules": held, "files": files}
    write_json(folder / SEAL, add_checksum(what))
    names = sorted(path.name for path in folder.iterdir())
    write_atomic(folder / SUMS, "".join(f"{sha256_file(folder / name)}  {name}\n" for name in names))
    fsync(folder)


_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}
"""Seconds of a request, and how often one is tried again; otherwise a server that is away takes MLflow minutes."""
_SAME = ("run", "step", "weights_sha256")


def register_version(uri: str, model: str, folder: Path, tags: Mapping[str, Any]) -> str:
    """Enter the published `folder` as a version of `model`, unless one is there of the same run, step and weights; what
    was done, in words. Raises UserError where MLflow is missing and, naming it, where the server does not answer or
    refuses."""
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise UserError(
            "publish.missing_package", "publish.mlflow needs MLflow's client: pip install -e '.[mlflow]'"
        ) from error
    server, said = MlflowClient(tracking_uri=uri, registry_uri=uri), {key: str(value) for key, value in tags.items()}
    try:
        if not server.search_registered_models(f"name = '{model}'"):
            try:
                server.create_registered_model(model)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # by another run, since the search
                    raise
        for known in server.search_model_versions(f"name = '{model}'"):
            if all(known.tags.get(key) == said[key] for key in _SAME):
                return f"version {known.version} of {model} at {uri} is it already"
        entry = server.create_model_version(model, f"folder://{folder}", tags=said)
    except MlflowException as error:
        raise UserError(
            "publish.registry_failed", f"publish.mlflow: {uri} made no entry of {folder}, which is published: {error}"
        ) from error
    return f"version {entry.version} of {model} at {uri}"
