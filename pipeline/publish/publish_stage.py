"""Stage publish: the newest checkpoint, where it is good enough, as a folder that others load.

    publish.to/NAME/step-00001200/
        *.safetensors, config.json …   what `export` writes (pipeline/publish/export.py)
        README.md, loss.svg            the card (pipeline/publish/card.py)
        sluice.json                    what it is of; sealed
        SHA256SUMS                     of all files; `sha256sum -c SHA256SUMS` compares

The folder takes its name by one rename, after everything was synced: whatever is killed in between leaves one whole
version or none. A rule that fails ends the stage before anything is written. A version that is there already is left
as it is. `publish.run` is a command of the user's own behind all that; that it ended well is noted in the run
directory, so that a stage that is tried again does not repeat it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.base.errors import Exit, UserError
from pipeline.base.files import fsync, intact, read_json, seal, sha256_file, write_atomic, write_json
from pipeline.base.place import Place
from pipeline.base.signals import StopFlag
from pipeline.checkpoint.saved import newest_step, read_manifest, step_name
from pipeline.config.checkpoints import PublishConfig
from pipeline.evaluate.result import TEXT_FIGURES, figure, figures_of, newest_result, read_result
from pipeline.run.directory import Run
from pipeline.run.stages import Progress

SEAL, SUMS = "sluice.json", "SHA256SUMS"
_RAN = "published.json"
"""In the run directory: the version behind which `publish.run` ended well."""


def missing(run: Run) -> str | None:
    """Why the stage is not done; None when the newest checkpoint is published and the user's command ended well."""
    step, wanted = newest_step(run.checkpoints), _wanted(run)
    if not step:
        return "there is no checkpoint yet"
    if (lacking := _lacking(run, step)) is not None:
        return lacking or f"step {step} is not published"
    if wanted.run is not None and _ran(run) != str(_version(run, step)):
        return "publish.run has not ended well yet"
    return None


def progress(run: Run) -> Progress:
    """How far it is."""
    step = newest_step(run.checkpoints)
    return Progress(str(_version(run, step)) if step and _lacking(run, step) is None else "-")


def look(run: Run) -> None:
    """Raise UserError for rules that can never be looked at."""
    wanted = _wanted(run)
    figures = [name for name, bounds in wanted.rules.items() if bounds is not None]
    if (figures or wanted.no_worse_than) and run.config.data.held_out == 0:
        raise UserError("publish.rules and publish.no_worse_than need an evaluation, and data.held_out is 0")
    tasks = [f"{file.stem}." for file in run.config.evaluate.task_files]
    for name in figures if run.config.model.target is None else ():
        if name not in ("loss", *TEXT_FIGURES) and not name.startswith(tuple(tasks)):
            there = ", ".join(["loss", *TEXT_FIGURES, *(f"{task}accuracy" for task in tasks)])
            raise UserError(f"publish.rules.{name}: the evaluation will have no such figure; it has {there}")
    if wanted.no_worse_than is not None:
        _bar(wanted.no_worse_than)


def main(run: Run, place: Place, options: Mapping[str, str], flag: StopFlag) -> Exit:
    """Publish the newest checkpoint. Raises UserError where a rule fails, CheckpointError for a damaged one."""
    from pipeline.publish.export import export

    wanted, step = _wanted(run), newest_step(run.checkpoints)
    if not step:
        raise UserError(f"{run.checkpoints} holds no intact checkpoint to publish; train first")
    version = _version(run, step)
    if (lacking := _lacking(run, step)) is not None:
        if lacking:
            raise UserError(lacking)
        result = read_result(run, step)
        held = _held_rules(wanted, result, step)
        version.parent.mkdir(parents=True, exist_ok=True)
        for left in version.parent.glob(f"*.{version.name}.making*"):  # by an attempt that was killed
            shutil.rmtree(left)
        making = version.with_name(f".{version.name}.making")
        print(export(run, making, str(step), wanted.dtype), flush=True)
        _complete(run, making, step, result, held)
        os.rename(making, version)
        fsync(version.parent)
        print(f"published {version}", flush=True)
    if wanted.run is not None and _ran(run) != str(version):
        code = subprocess.run(["bash", "-c", wanted.run], cwd=version, check=False).returncode
        if code:
            raise UserError(f"publish.run ended with code {code} in {version}, which is published: {wanted.run}")
        write_json(run.path / _RAN, {"version": str(version)})
    return Exit.DONE


def _wanted(run: Run) -> PublishConfig:
    wanted = run.config.publish
    if wanted is None:
        raise UserError("the config has no section publish: give at least publish.to")
    return wanted


def _version(run: Run, step: int) -> Path:
    wanted = _wanted(run)
    return wanted.to / (wanted.name or run.config.run.name) / step_name(step)


def _lacking(run: Run, step: int) -> str | None:
    """None where this checkpoint's version is there, "" where nothing is; else what is wrong with what is there."""
    version = _version(run, step)
    if not version.exists():
        return ""
    try:
        found = read_json(version / SEAL)
    except (FileNotFoundError, UserError):
        found = None
    checkpoint = read_manifest(run.checkpoints / step_name(step))["sha256"]
    if not isinstance(found, dict) or not intact(found) or found.get("checkpoint") != checkpoint:
        return (
            f"{version} is there already and is not of this run's checkpoint: give another publish.name or move it away"
        )
    held = {path.name: path.stat().st_size for path in version.iterdir()}
    if odd := [name for name, size in found.get("files", {}).items() if held.get(name) != size]:
        return f"{version / min(odd)} is not as it was published: move the version away, and it is made again"
    return None


def _ran(run: Run) -> Any:
    try:
        found = read_json(run.path / _RAN)
    except (FileNotFoundError, UserError):
        return None
    return found.get("version") if isinstance(found, dict) else None


def _bar(other: Path) -> tuple[str, float]:
    """What the newest evaluation of the run in folder `other` is judged by. Raises UserError where it has none."""
    result = newest_result(Run(other))
    if result is None:
        raise UserError(f"publish.no_worse_than: {other} has no evaluation")
    return figure(result)


def _held_rules(wanted: PublishConfig, result: Mapping[str, Any] | None, step: int) -> list[str]:
    """Every rule in words, with its number. Raises UserError, naming all that fail, where one does."""
    held: list[str] = []
    failed: list[str] = []
    if result is None:
        if any(wanted.rules.values()) or wanted.no_worse_than:
            raise UserError(f"nothing was published: step {step} is not evaluated, and publish has rules")
        return held
    figures = figures_of(result)
    for name, bounds in wanted.rules.items():
        if bounds is None:
            continue
        if name not in figures:
            raise UserError(f"publish.rules.{name}: the evaluation has no such figure; it has {', '.join(figures)}")
        for key, bound, good in (
            ("max", bounds.max, bounds.max is None or figures[name] <= bounds.max),
            ("min", bounds.min, bounds.min is None or figures[name] >= bounds.min),
        ):
            if bound is not None:
                (held if good else failed).append(f"{name} {figures[name]:.6g}, {key} {bound:g}")
    if wanted.no_worse_than is not None:
        (name, ours), (theirs_name, theirs) = figure(result), _bar(wanted.no_worse_than)
        other = wanted.no_worse_than.name
        if name != theirs_name:
            raise UserError(f"publish.no_worse_than: this run is judged by {name}, {other} by {theirs_name}")
        words = f"{name} {ours:.6g}, no worse than {theirs:.6g} of {other}"
        (held if ours <= theirs else failed).append(words)
    if failed:
        raise UserError(f"nothing was published, step {step} does not keep publish's rules: {'; '.join(failed)}")
    return held


def _complete(run: Run, folder: Path, step: int, result: Mapping[str, Any] | None, held: list[str]) -> None:
    """Add the card, the seal and the checksums to an exported folder, and sync it."""
    from pipeline.publish.card import write_card

    write_card(run, folder, step, result, held)
    checkpoint = read_manifest(run.checkpoints / step_name(step))["sha256"]
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    what = {"run": run.config.run.name, "step": step, "checkpoint": checkpoint, "rules": held, "files": files}
    write_json(folder / SEAL, seal(what))
    names = sorted(path.name for path in folder.iterdir())
    write_atomic(folder / SUMS, "".join(f"{sha256_file(folder / name)}  {name}\n" for name in names))
    fsync(folder)
