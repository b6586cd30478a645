"""Tests that training over MPI with each kind of parallelism has the losses and gradient norms of one process."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.test_parallel import FEW_BATCHES, SCHEDULES, STEPS, TIED, train_one_process
from tests.support.mpirun import run_mpirun

pytestmark = pytest.mark.timeout(1200)


def check_layouts(ranks: int, folder: Path, *layouts: dict[str, Any], **sections: dict[str, Any]) -> None:
    """Train on each layout, in one start of `ranks` MPI ranks, and compare all steps with one process.

    Args:
        ranks: number of MPI ranks.
        folder: folder for the files of the test.
        layouts: values of the config section `parallel`.
        sections: other sections of the config.
    """
    cases = [{**sections, "parallel": {"backend": "mpi", **layout}} for layout in layouts]
    (folder / "cases.json").write_text(json.dumps(cases))
    completed = run_mpirun(ranks, "tests.support.mpi_parity", str(folder), timeout=1100)
    assert completed.returncode == 0, completed.stdout
    results_by_rank = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    expected_steps = train_one_process(sections)
    for number, layout in enumerate(layouts):
        steps = results_by_rank[0][number]
        assert all(results[number] == steps for results in results_by_rank), f"ranks differ: {layout}"
        assert len(steps) == STEPS
        for step, (actual, expected) in enumerate(zip(steps, expected_steps, strict=True), 1):
            assert tuple(actual) == pytest.approx(expected, rel=1e-5), f"{layout}, step {step}: (loss, norm)"


@pytest.mark.story
def test_pipeline_with_zero_3_gives_the_result_of_one_process(tmp_path: Path) -> None:
    check_layouts(4, tmp_path, {"pipeline": 2, "zero": 3, "accurate_sums": True}, model=TIED)


@pytest.mark.story
def test_context_parallelism_gives_the_result_of_one_process(tmp_path: Path) -> None:
    check_layouts(4, tmp_path, {"context": 4}, {"context": 2, "zero": 3})


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallelism_gives_the_result_of_one_process(ranks: int, tmp_path: Path) -> None:
    levels = [{"zero": zero, "reduce": reduce} for zero, reduce in product((0, 1, 2, 3), ("auto", "step"))]
    hybrid_layouts = [{"zero": zero, "data": {"replicate": 2, "shard": 2}} for zero in (1, 2, 3)] if ranks == 4 else []
    check_layouts(ranks, tmp_path, *levels, *hybrid_layouts)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "pipeline"), [(2, 2), (4, 2), (4, 4)])
def test_all_pipeline_schedules_give_the_result_of_one_process(ranks: int, pipeline: int, tmp_path: Path) -> None:
    layouts = [
        {"pipeline": pipeline, "schedule": schedule, "virtual_stages": virtual}
        for schedule, virtual in SCHEDULES
        if pipeline * virtual <= 8
    ]
    check_layouts(ranks, tmp_path, *layouts, model={"layers": 8}, train={"micro_batch": 1 if pipeline == 4 else 2})


@pytest.mark.long
@pytest.mark.parametrize("model_overrides", [{}, TIED], ids=["untied", "tied"])
def test_combined_tensor_and_pipeline_and_data_parallelism_gives_the_result_of_one_process(
    model_overrides: dict[str, Any], tmp_path: Path
) -> None:
    """With 8 ranks, tensor and pipeline sizes of 2, the data parallel size is 2."""
    schedules: list[dict[str, Any]] = [{"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}]
    layouts: list[dict[str, Any]] = [
        {"pipeline": 2, "tensor": 2, "zero": zero, **schedule} for zero, schedule in product((0, 3), schedules)
    ]
    layouts.append({"pipeline": 2, "tensor": 2, "schedule": "zbv", "virtual_stages": 2, "zero": 1})
    check_layouts(8, tmp_path, *layouts, model=model_overrides, train=FEW_BATCHES)
