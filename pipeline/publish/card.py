"""Write the model card of a published version: README.md with front matter for the Hugging Face Hub, and a loss plot.

huggingface.co/docs/hub/model-cards describes the front matter. Its key `model-index` contains the evaluation.
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
from pipeline.run.origin import read_origin

PLOT_FILE = "loss.svg"
_SHOWN_SECTIONS = ("model", "adapter", "data", "train", "optimizer", "parallel")
"""Sections of the config that a card shows. These sections do not describe the machine."""
_PATH_KEYS: dict[str, Any] = {
    "data": {"source": True, "tokenizer": {"path"}, "mixture": {"sources": {"__all__": {"source"}}}},
    "model": {"init_from"},
}
"""Keys with paths in these sections. A card omits these keys."""
_MAX_LISTED_FILES = 100
"""Maximum number of input files that a card lists. If there are more files, the card lists none."""


def write_card(run: Run, folder: Path, step: int, result: Mapping[str, Any] | None, rules: Sequence[str]) -> None:
    """Write README.md to `folder`, and also loss.svg if metrics.jsonl has the losses of at least two steps.

    Args:
        run: the run.
        folder: the folder of the published version.
        step: the step of the published checkpoint. Later steps are ignored.
        result: the evaluation of the step; None if there is none.
        rules: descriptions of the rules that the evaluation passed.
    """
    line_by_step = {
        line["step"]: line for line in lines.read_valid_lines(run.metrics_file, is_step_line) if line["step"] <= step
    }
    step_lines = [line_by_step[number] for number in sorted(line_by_step)]
    config = run.config
    settings = config.publish
    assert settings is not None
    name = settings.name or run.config.run.name
    metrics = {} if result is None else get_metrics_without_errors(result)
    front_matter: dict[str, Any] = {"license": settings.license} if settings.license else {}
    if config.model.target is None:
        library = "transformers" if config.adapter is None else "peft"
        front_matter |= {"library_name": library, "pipeline_tag": "text-generation"}
    # The name of the base model on the Hub is known only if `init_from` is a folder of the Hub's cache.
    if match := re.search(r"models--([^/]+)--([^/]+)", str(config.model.init_from)):
        front_matter["base_model"] = "/".join(match.groups())
    if metrics:
        model_result = {
            "task": {"type": "text-generation" if config.model.target is None else "other"},
            "dataset": {"name": "held-out data of the run", "type": "held-out"},
            "metrics": [{"type": key, "name": key, "value": value} for key, value in metrics.items()],
        }
        front_matter["model-index"] = [{"name": name, "results": [model_result]}]
    sections = config.model_dump(mode="json", include=set(_SHOWN_SECTIONS), exclude_defaults=True, exclude=_PATH_KEYS)
    paragraphs = [
        f"---\n{dump_yaml(front_matter)}---" if front_matter else "",
        f"# {escape_markdown(name)}", settings.description or "",
        f"Step {step:,} of the run {run.config.run.name}, trained with Sluice.",
        f"Licence of the model: {settings.license or 'not given'}. "
        f"Licence of the data: {settings.data_license or 'not given'}.",
        "## Evaluation", _format_metrics_table(result, metrics) if result else "Not evaluated.",
        _format_list("Rules that the evaluation passed:", rules),
        "## Training", _format_list("", _describe_training(run, step_lines)), _write_loss_plot(folder, step_lines),
        "## Data", _format_list("", _describe_data(run)),
        "## Config", f"Values that differ from the defaults:\n\n```yaml\n{dump_yaml(mask_secrets(sections))}```",
    ]  # fmt: skip
    write_atomic(folder / "README.md", "\n\n".join(filter(None, paragraphs)) + "\n")


def _format_metrics_table(result: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """Return the metrics of an evaluation as a Markdown table.

    If the evaluation has standard errors or numbers of items, the table has columns for them.
    """
    rows = []
    for name, value in metrics.items():
        error = result.get(f"{name}{STDERR_SUFFIX}")
        items = result.get(f"{name.rpartition('.')[0]}.{ITEMS_SUFFIX}")
        rows.append(
            [
                escape_markdown(name),
                f"{value:.6g}",
                "" if error is None else f"{error:.2g}",
                "" if items is None else f"{items:,}",
            ]
        )
    titles = ["metric", "value", "standard error", "items"]
    width = 4 if any(row[2] or row[3] for row in rows) else 2
    return "\n".join(f"| {' | '.join(row[:width])} |" for row in [titles, ["---"] * 4, *rows])


def _format_list(heading: str, entries: Sequence[str]) -> str:
    """Return `entries` as a Markdown list, after a heading if `heading` is not empty; "" if there are no entries."""
    if not entries:
        return ""
    return (f"{heading}\n\n" if heading else "") + "\n".join(f"- {entry}" for entry in entries)


def _describe_training(run: Run, step_lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return descriptions of the code, seed, precision, steps, time, energy and initial weights of the run.

    Args:
        run: the run.
        step_lines: the lines of metrics.jsonl, in the order of the steps.
    """
    entries = [f"code: {run.commit or 'not in git'}", f"seed {run.config.run.seed}, {run.config.train.precision}"]
    if step_lines:
        seconds = sum(line["step_time_s"] for line in step_lines)
        ranks = run.config.stages.train.ranks
        losses = [line["loss"] for line in step_lines if line["loss"] is not None]  # null if the loss is not finite
        last_loss = f", last loss {losses[-1]:.4f}" if losses else ""
        entries.append(f"{len(step_lines):,} steps{last_loss}")
        entries.append(f"{seconds / 3600:.3g} hours of steps, each step counted once; {ranks} ranks by the config")
    energy_kwh = sum_gpu_energy_kwh(run.path, [(0.0, inf)])
    description = "energy: not measured"
    if energy_kwh is not None:
        description = f"{energy_kwh:.3g} kWh of the GPUs, by their own sensors"
    entries.append(description)
    if origin := read_origin(run):
        hint = f"its checkpoint has the manifest sha256 {origin.manifest_sha256}"
        entries.append(f"continued from step {origin.step:,} of the run {escape_markdown(origin.name)}; {hint}")
    folder = run.config.model.init_from
    return entries + [
        f"started from {escape_markdown(f'{folder and folder.name}/{name}')}: sha256 {digest}"
        for name, digest in read_source(run).get("files", {}).items()
    ]


def escape_markdown(text: str) -> str:
    """Return text, such as a file name, escaped so that Markdown shows the text unchanged on one line."""
    line = " ".join(make_printable(text).split())
    # an underscore between two letters or digits needs no escape, because it does not begin emphasis
    return re.sub(r"[\\`*\[\]<>|&!#~$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)


def _describe_data(run: Run) -> list[str]:
    """Return descriptions of the training data, with the hashes of the tokenizer and of files."""
    manifest = load_run_manifest(run)
    if isinstance(manifest, Manifest):
        return [
            f"{manifest.documents:,} documents",
            f"{manifest.train_tokens:,} tokens, and {manifest.held_out_tokens:,} held out",
            f"sources: {', '.join(escape_markdown(Path(name).name) for name in manifest.source)}",
            *_list_input_files(run),
            f"tokenizer: sha256 {manifest.tokenizer_sha256}",
            f"everything that the shards were made from: sha256 {manifest.key}",
        ]
    if manifest.dataset is not None:
        target = escape_markdown(str(run.config.model.target))
        return [f"the dataset of {target}: {manifest}, sha256 {manifest.dataset.sha256}"]
    return [
        f"{escape_markdown(Path(entry.file).name)}: {entry.samples:,} samples, sha256 {entry.sha256}"
        for entry in manifest.train
    ]


def _list_input_files(run: Run) -> list[str]:
    """Return a description of each input file, with its hash if it has not changed since `prepare` read it.

    Returns an empty list if there are more than `_MAX_LISTED_FILES` files. data_prep/work_units.py writes units.json.
    """
    folders = run.config.data.mixture.sources if run.config.data.mixture else ("",)
    rows = [row for name in folders for row in read_json(run.data_dir / name / "units.json")["inputs"]]
    entries = []
    for path, size, mtime_ns, *_ in rows if len(rows) <= _MAX_LISTED_FILES else ():
        file = Path(path)
        is_unchanged = file.is_file() and (file.stat().st_size, file.stat().st_mtime_ns) == (size, mtime_ns)
        status = f"sha256 {sha256_file(file)}" if is_unchanged else "changed or removed since it was read"
        entries.append(f"{escape_markdown(file.name)}: {size:,} bytes, {status}")
    return entries


def _write_loss_plot(folder: Path, step_lines: Sequence[Mapping[str, Any]]) -> str:
    """Plot the loss over the steps to loss.svg, and return the Markdown that shows the plot.

    If fewer than two lines have a loss, nothing is plotted and the result is "".
    """
    curve = [(line["step"], line["loss"]) for line in step_lines if line.get("loss") is not None]
    if len(curve) < 2:
        return ""
    numbers, losses = zip(*curve, strict=True)
    x = Scale.from_values(numbers, "optimizer steps", whole=True)
    y = Scale.from_values(losses, "training loss (nats)").extend_to_round_numbers()
    drawing = draw_area(x, y, [Curve("training", downsample(curve))])
    write_atomic(folder / PLOT_FILE, svg_document(drawing))
    return f"![training loss over optimizer steps]({PLOT_FILE})"
