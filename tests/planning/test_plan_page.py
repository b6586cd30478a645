"""Tests of `plan --html`: the figures agree with the text of `plan`, and the page is self-contained."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.parallel.mesh import resolve_layout
from pipeline.run.code import CODE_ROOT
from planning.machine import load_machine
from planning.memory import reserved_gpu_bytes
from planning.plan import (
    PlanFigures,
    check_page_path,
    compute_plan_figures,
    describe_plan,
    draw_effective_time,
    draw_memory,
    draw_roofline,
    draw_schedule,
)
from planning.predict import _pipeline_span, predict_step
from planning.workload import workload_from_config

H100 = load_machine("h100")
PIPELINED = (
    "parallel.pipeline=4", "parallel.tensor=2", "parallel.data=auto", "parallel.zero=1", "train.micro_batch=1",
    "parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=2", "train.global_batch=32",
)  # fmt: skip


def compute_lm_8b_figures(*overrides: str, with_h100: bool = True) -> PlanFigures:
    """Return the numbers that `plan --html` draws for lm-8b.yaml with these overrides.

    Without the machine file of an H100, no times are predicted.
    """
    config = load_config(CODE_ROOT / "configs/lm-8b.yaml", [*overrides, "site.gpu_memory_gib=79.6"])  # 85.5 GB
    return compute_plan_figures(config, H100 if with_h100 else None)


@pytest.mark.parametrize("overrides", [PIPELINED, (), ("parallel.zero=3", "train.micro_batch=2")])
def test_memory_in_the_figures_agrees_with_the_printed_table(overrides: tuple[str, ...]) -> None:
    config = load_config(CODE_ROOT / "configs/lm-8b.yaml", [*overrides])
    # a row of the table: pipeline-parallel stage, parameters, and gigabytes of five parts and of their sum
    rows = [line.split() for line in describe_plan(config) if re.match(r" +\d+ +[\d,]+( +\d+\.\d{3}){6}$", line)]
    figures = compute_lm_8b_figures(*overrides)
    reserved_gb = reserved_gpu_bytes(resolve_layout(config)) / 1e9
    ranks = [list(parts.values()) for parts in figures.memory]
    assert len(rows) == len(ranks) == config.parallel.pipeline
    for row, parts in zip(rows, ranks, strict=True):
        assert [float(cell) for cell in row[2:7]] == pytest.approx(parts[:5], abs=5e-4)
        assert parts[5:] == pytest.approx([reserved_gb])
    assert figures.facts["fullest rank"].startswith(f"{max(map(sum, ranks)):.1f} GB of 85.5 GB: ")
    assert max(map(sum, ranks)) == pytest.approx(max(float(row[7]) for row in rows) + reserved_gb, abs=2e-3)


def test_gpu_memory_with_offload_has_only_gathered_weights_and_activations() -> None:
    (parts,) = compute_lm_8b_figures("parallel.zero=3", "parallel.offload=true").memory
    assert list(parts) == ["gathered", "activations", "CUDA and NCCL"]
    assert "CUDA and NCCL" in draw_memory([parts], 80.0)


def test_the_drawn_schedule_takes_the_predicted_time() -> None:
    """The schedule shows all micro-batches, because it leaves out micro-batches only if there are many.

    No rank runs two actions at once.
    """
    timeline = compute_lm_8b_figures(*PIPELINED).timeline
    config = load_config(CODE_ROOT / "configs/lm-8b.yaml", PIPELINED)
    layout = resolve_layout(config)
    step = predict_step(workload_from_config(config, layout, 128256), H100.with_gpus_per_node(layout.ranks_per_node))
    # forward and backward of each micro-batch on 4 pipeline ranks with 2 stages each
    assert sum(len(actions) for actions in timeline) == 4 * 2 * 2 * layout.micro_batches
    span, _ = _pipeline_span(layout.schedule, 4, 2, layout.micro_batches, step.forward, step.backward)
    assert max(action.end for actions in timeline for action in actions) == pytest.approx(span)
    for actions in timeline:
        assert all(action.end <= following.start + 1e-12 for action, following in pairwise(actions))


def test_no_operator_is_above_the_roofline() -> None:
    for overrides in ((), PIPELINED):
        figures = compute_lm_8b_figures(*overrides)
        assert figures.roof is not None
        peak_flops, bandwidth = figures.roof
        for intensity, flops in figures.operators.values():
            assert 0 < flops <= min(peak_flops, intensity * bandwidth)


def test_figures_name_their_axes_and_units() -> None:
    figures = compute_lm_8b_figures(*PIPELINED)
    assert figures.roof is not None
    config = load_config(CODE_ROOT / "configs/lm-8b.yaml", PIPELINED)
    figures_by_unit = {
        "GB of one GPU": draw_memory(figures.memory, figures.gpu_memory),
        "milliseconds": draw_schedule(figures.timeline, is_predicted=True),
        "TFLOP/s": draw_roofline(figures.operators, figures.roof),
        "minutes": draw_effective_time(config, configured_interval_s=600.0)[1],
        "GPUs": draw_effective_time(config, configured_interval_s=0.0)[0],
    }
    for unit, figure in figures_by_unit.items():
        assert figure.startswith("<figure") and re.search(rf'class="title"[^>]*>[^<]*{unit}', figure), unit
    unpredicted_timeline = compute_lm_8b_figures(with_h100=False).timeline
    assert "durations of a forward" in draw_schedule(unpredicted_timeline, is_predicted=False)
    assert draw_memory(figures.memory, figures.gpu_memory).count("a GPU has 85.5 GB</title>") == 4


def test_the_page_is_self_contained_and_is_written_even_if_the_layout_does_not_fit(tmp_path: Path) -> None:
    """The layout does not fit into the GPU's memory, so the command fails after it has written the page."""
    page = tmp_path / "plan.html"
    arguments = [str(CODE_ROOT / "configs/lm-8b.yaml"), "--machine=h100", f"--html={page}", "run.name=a-b"]
    completed = subprocess.run(
        [sys.executable, "submit.py", "plan", *arguments, "parallel.zero=0", "parallel.data=auto"],
        cwd=CODE_ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert completed.returncode == 2 and "plan.not_enough_memory" in completed.stderr
    assert str(page) in completed.stdout
    text = page.read_text()
    assert "<dd>256 sequences, 1,048,576 tokens</dd>" in text
    assert "<dt>ranks</dt><dd>32</dd>" in text
    assert re.search(r"<dd>\d+\.\d GB of 85\.5 GB: does not fit</dd>", text)
    assert text.count("<figure") == 5 and "<h1>a-b</h1>" in text
    without_config = re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)="|url\(|https?://(?!www\.w3\.org)', without_config)


def test_the_page_file_must_be_html_in_an_existing_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "plan.yaml", tmp_path / "no" / "plan.html"):
        with pytest.raises(UserError) as error:
            check_page_path(path)
        assert error.value.code == "plan.html_path" and str(path) in str(error.value)
