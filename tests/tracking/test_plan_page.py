"""`plan --html`: the figures are those of the text, the page needs nothing else, mistakes are told in words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.parallel.mesh import resolve_layout
from pipeline.run.code import CODE_ROOT
from planning.machine import load_machine
from planning.memory import reserved_gpu_bytes
from planning.plan import (
    check_page_path,
    compute_plan_figures,
    describe_plan,
    draw_failures,
    draw_memory,
    draw_roofline,
    draw_schedule,
)
from planning.predict import _pipeline_span, predict_step
from planning.workload import workload_from_config

H100 = load_machine("h100")
PIPED = (
    "parallel.pipeline=4", "parallel.tensor=2", "parallel.data=auto", "parallel.zero=1", "train.micro_batch=1",
    "parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=2", "train.global_batch=32",
)  # fmt: skip


def found(*overrides: str, machine: bool = True) -> dict[str, Any]:
    """As the child writes it, read again."""
    config = load_config(CODE_ROOT / "configs/lm-8b.yaml", [*overrides, "site.gpu_memory_gib=79.6"])
    values: dict[str, Any] = json.loads(json.dumps(compute_plan_figures(config, H100 if machine else None)))
    return values


@pytest.mark.parametrize("overrides", [PIPED, (), ("parallel.zero=3", "train.micro_batch=2")])
def test_memory_is_that_of_the_text(overrides: tuple[str, ...]) -> None:
    config = load_config(CODE_ROOT / "configs/lm-8b.yaml", [*overrides])
    rows = [line.split() for line in describe_plan(config) if re.match(r" +\d+ +[\d,]+( +\d+\.\d{3}){6}$", line)]
    values, own = found(*overrides), reserved_gpu_bytes(resolve_layout(config)) / 1e9
    shown = [list(parts.values()) for parts in values["memory"]]
    assert len(rows) == len(shown) == config.parallel.pipeline
    for row, parts in zip(rows, shown, strict=True):
        assert [float(cell) for cell in row[2:7]] == pytest.approx(parts[:5], abs=5e-4)
        assert parts[5:] == pytest.approx([own]), "what plan refuses at counts it, too"
    assert values["words"]["fullest rank"] == f"{max(map(sum, shown)):.1f} GB"
    assert max(map(sum, shown)) == pytest.approx(max(float(row[7]) for row in rows) + own, abs=2e-3)


def test_offload_leaves_the_card_to_what_is_gathered() -> None:
    (parts,) = found("parallel.zero=3", "parallel.offload=true")["memory"]
    assert list(parts) == ["gathered", "activations", "CUDA and NCCL"] and "CUDA and NCCL" in draw_memory(
        {"memory": [parts], "limit": 80.0}
    )


def test_the_schedule_takes_what_is_predicted() -> None:
    """All micro-batches are shown where they are few, and no rank does two things at once."""
    values = found(*PIPED)
    config = load_config(CODE_ROOT / "configs/lm-8b.yaml", PIPED)
    layout = resolve_layout(config)
    step = predict_step(workload_from_config(config, layout, 128256), H100.in_nodes_of(layout.ranks_per_node))
    made = values["timeline"]
    assert sum(len(row) for row in made) == 4 * 2 * 2 * layout.micro_batches
    span, _ = _pipeline_span(layout.schedule, 4, 2, layout.micro_batches, step.forward, step.backward)
    assert max(box[-1] for row in made for box in row) == pytest.approx(span)
    for row in made:
        assert all(one[4] <= two[3] + 1e-12 for one, two in pairwise(row))


def test_no_operator_is_above_the_roof() -> None:
    for overrides in ((), PIPED):
        values = found(*overrides)
        rate, bandwidth = values["roof"]
        for at, done in values["operators"].values():
            assert 0 < done <= min(rate, at * bandwidth)


def test_pictures_name_their_axes_and_units() -> None:
    values = found(*PIPED)
    config = load_config(CODE_ROOT / "configs/lm-8b.yaml", PIPED)
    drawn = {
        "GB of one GPU": draw_memory(values), "milliseconds": draw_schedule(values),
        "TFLOP/s": draw_roofline(values), "minutes": draw_failures(config, 600.0)[1],
        "GPUs": draw_failures(config, 0.0)[0],
    }  # fmt: skip
    for unit, figure in drawn.items():
        assert figure.startswith("<figure") and re.search(rf'class="title"[^>]*>[^<]*{unit}', figure), unit
    assert "times of a forward" in draw_schedule(found(machine=False))
    assert draw_memory(values).count("a GPU has 85.5 GB</title>") == 4


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """Through the door, for a layout that does not fit: the page is there, and the command says no."""
    page = tmp_path / "plan.html"
    words = [str(CODE_ROOT / "configs/lm-8b.yaml"), "--machine=h100", f"--html={page}", "run.name=a-b"]
    done = subprocess.run(
        [sys.executable, "submit.py", "plan", *words, "parallel.zero=0", "parallel.data=auto"],
        cwd=CODE_ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "rank 0 of the pipeline needs" in done.stderr and f"pictures: {page}" in done.stdout
    text = page.read_text()
    assert (
        "<dd>256 sequences, 1,048,576 tokens</dd>" in text
        and "<dt>ranks</dt><dd>32</dd>" in text
        and re.search(r"<dd>\d+\.\d GB of 85\.5 GB: does not fit</dd>", text)
    )
    assert text.count("<figure") == 5 and "<h1>a-b</h1>" in text
    assert not re.search(
        r'(src|href)="|url\(|https?://(?!www\.w3\.org)', re.sub(r"<pre>.*?</pre>", "", text, flags=re.S)
    )


def test_a_page_in_a_missing_folder_is_refused_before_planning(tmp_path: Path) -> None:
    for wrong in (tmp_path / "plan.yaml", tmp_path / "no" / "plan.html"):
        with pytest.raises(UserError) as error:
            check_page_path(wrong)
        assert error.value.code == "plan.html_path" and str(wrong) in str(error.value)


def test_an_unreadable_config_writes_no_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    command = [sys.executable, "submit.py", "plan", str(tmp_path / "none.yaml"), f"--html={page}"]
    done = subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "none.yaml" in done.stderr and not page.exists()
