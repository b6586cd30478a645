"""The model card of a published version: README.md with the front matter that the Hub reads, and a picture of the loss.

Front matter: huggingface.co/docs/hub/model-cards, with `model-index` for the evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from pipeline.base.errors import make_printable
from pipeline.base.files import read_json, sha256_file, write_atomic
from pipeline.base.plot import Curve, Scale, downsample, draw_area, svg_document
from pipeline.base.yaml12 import dump_yaml
from pipeline.checkpoint.identity import read_source
from pipeline.config.masking import mask_secrets
from pipeline.data.manifest import Manifest
from pipeline.data.verify_shards import load_run_manifest
from pipeline.evaluate.result import ITEMS_SUFFIX, STDERR_SUFFIX, get_metrics_without_errors
from pipeline.run import lines
from pipeline.run.directory import Run
from pipeline.run.machines import sum_gpu_energy_kwh
from pipeline.run.metrics import is_step_line

PICTURE = "loss.svg"
_TOLD = ("model", "data", "train", "optimizer", "parallel")
"""The sections of the config that a card shows: how the model came about, not where."""
_PLACES: dict[str, Any] = {
    "data": {"source": True, "tokenizer": {"path"}, "mixture": {"sources": {"__all__": {"source"}}}},
    "model": {"init_from"},
}
"""Keys in them that say where."""
_FILES = 100
"""Sources are named one by one where they are no more than these."""


def write_card(run: Run, folder: Path, step: int, result: Mapping[str, Any] | None, rules: Sequence[str]) -> None:
    """Write README.md and, where steps are recorded, loss.svg into `folder`."""
    found = {
        line["step"]: line for line in lines.read_valid_lines(run.metrics_file, is_step_line) if line["step"] <= step
    }
    steps = [found[number] for number in sorted(found)]
    config, wanted = run.config, run.config.publish
    assert wanted is not None
    name = wanted.name or run.config.run.name
    measures = {} if result is None else get_metrics_without_errors(result)
    front: dict[str, Any] = {"license": wanted.license} if wanted.license else {}
    if config.model.target is None:
        front |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if cached := re.search(r"models--([^/]+)--([^/]+)", str(config.model.init_from)):  # a folder of the Hub's cache
        front["base_model"] = "/".join(cached.groups())  # of another nobody knows the Hub's name
    task = {"type": "text-generation" if config.model.target is None else "other"}
    metrics = [{"type": key, "name": key, "value": value} for key, value in measures.items()]
    if metrics:
        told = {"task": task, "dataset": {"name": "held-out data of the run", "type": "held-out"}, "metrics": metrics}
        front["model-index"] = [{"name": name, "results": [told]}]
    sections = config.model_dump(mode="json", include=set(_TOLD), exclude_defaults=True, exclude=_PLACES)
    text = [
        f"---\n{dump_yaml(front)}---" if front else "", f"# {escape_markdown(name)}", wanted.description or "",
        f"Step {step:,} of the run {run.config.run.name}, trained with Sluice.",
        f"Licence of the model: {wanted.license or 'not given'}. Of the data: {wanted.data_license or 'not given'}.",
        "## Evaluation", _table(result, measures) if result else "Not evaluated.", _list("Rules that it kept:", rules),
        "## Training", _list("", _training(run, steps)), _picture(folder, steps),
        "## Data", _list("", _data(run)),
        "## Config", f"What differs from the defaults:\n\n```yaml\n{dump_yaml(mask_secrets(sections))}```",
    ]  # fmt: skip
    write_atomic(folder / "README.md", "\n\n".join(part for part in text if part) + "\n")


def _table(result: Mapping[str, Any], measures: Mapping[str, float]) -> str:
    """The measures of an evaluation as a table, with standard errors and numbers of items if it has any."""
    rows = []
    for name, value in measures.items():
        error, items = (
            result.get(f"{name}{STDERR_SUFFIX}"),
            result.get(f"{name.rpartition('.')[0]}.{ITEMS_SUFFIX}"),
        )
        rows.append(
            [
                escape_markdown(name),
                f"{value:.6g}",
                "" if error is None else f"{error:.2g}",
                "" if items is None else f"{items:,}",
            ]
        )
    titles = ["figure", "value", "standard error", "items"]
    width = 4 if any(row[2] or row[3] for row in rows) else 2
    return "\n".join(f"| {' | '.join(row[:width])} |" for row in [titles, ["---"] * 4, *rows])


def _list(heading: str, entries: Sequence[str]) -> str:
    if not entries:
        return ""
    return (f"{heading}\n\n" if heading else "") + "\n".join(f"- {entry}" for entry in entries)


def _training(run: Run, steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is known of how it was trained."""
    told = [f"code: {run.commit or 'not in git'}", f"seed {run.config.run.seed}, {run.config.train.precision}"]
    if steps:
        seconds, ranks = sum(line["step_time_s"] for line in steps), run.config.stages.train.ranks
        told.append(f"{len(steps):,} steps, last loss {steps[-1]['loss']:.4f}")
        told.append(f"{seconds / 3600:.3g} hours of steps, each counted once; ranks: {ranks}, as the config asks")
    energy = sum_gpu_energy_kwh(run.path, [(0.0, inf)])
    told.append("energy: not measured" if energy is None else f"{energy:.3g} kWh of the GPUs, by their own sensors")
    start, folder = read_source(run).get("files", {}), run.config.model.init_from
    return told + [
        f"began with {escape_markdown(f'{folder and folder.name}/{name}')}: sha256 {digest}"
        for name, digest in start.items()
    ]


def escape_markdown(text: str) -> str:
    """Return `text`, such as the name of a file, so that Markdown shows it as it is, in one line."""
    line = " ".join(make_printable(text).split())
    return re.sub(r"[\\`*\[\]<>|&!#~$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)


def _data(run: Run) -> list[str]:
    """What it was trained on, by hashes."""
    manifest = load_run_manifest(run)
    if isinstance(manifest, Manifest):
        return [
            f"{manifest.documents:,} documents",
            f"{manifest.train_tokens:,} tokens, and {manifest.held_out_tokens:,} held out",
            f"sources: {', '.join(escape_markdown(Path(name).name) for name in manifest.source)}",
            *_sources(run),
            f"tokenizer: sha256 {manifest.tokenizer_sha256}",
            f"all that shards were made from: {manifest.key}",
        ]
    return [
        f"{escape_markdown(Path(entry.file).name)}: {entry.samples:,} samples, sha256 {entry.sha256}"
        for entry in manifest.train
    ]


def _sources(run: Run) -> list[str]:
    """Each input file with its hash, where it is as it was when it was cut into units (data_prep/work_units.py)."""
    folders = run.config.data.mixture.sources if run.config.data.mixture else ("",)
    rows = [row for name in folders for row in read_json(run.data_dir / name / "units.json")["inputs"]]
    told = []
    for path, size, mtime_ns, *_ in rows if len(rows) <= _FILES else ():
        file = Path(path)
        same = file.is_file() and (file.stat().st_size, file.stat().st_mtime_ns) == (size, mtime_ns)
        words = f"sha256 {sha256_file(file)}" if same else "not there any more as it was read"
        told.append(f"{escape_markdown(file.name)}: {size:,} bytes, {words}")
    return told


def _picture(folder: Path, steps: Sequence[Mapping[str, Any]]) -> str:
    """Draw the loss over the steps; the line that shows it, "" where there is nothing to draw."""
    curve = [(line["step"], line["loss"]) for line in steps if line.get("loss") is not None]
    if len(curve) < 2:
        return ""
    numbers, losses = zip(*curve, strict=True)
    x, y = Scale.over(numbers, "optimizer steps", whole=True), Scale.over(losses, "training loss (nats)")
    write_atomic(folder / PICTURE, svg_document(draw_area(x, y.rounded(), [Curve("training", downsample(curve))])))
    return f"![training loss over optimizer steps]({PICTURE})"
