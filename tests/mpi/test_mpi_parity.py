"""Tensor, pipeline and data parallel training over MPI equals one process: loss and gradient norm over ten steps."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.test_parallel import FEW, SCHEDULES, STEPS, TIED, one_process
from tests.support.mpirun import run_mpirun

pytestmark = pytest.mark.timeout(1200)


def check(ranks: int, folder: Path, *layouts: dict[str, Any], **sections: dict[str, Any]) -> None:
    """Train under each of `layouts` with `sections`, all in one world of `ranks` MPI ranks."""
    cases = [{**sections, "parallel": {"backend": "mpi", **layout}} for layout in layouts]
    (folder / "cases.json").write_text(json.dumps(cases))
    done = run_mpirun(ranks, "tests.support.mpi_parity", str(folder), timeout=1100)
    assert done.returncode == 0, done.stdout
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    expected = one_process(sections)
    for number, layout in enumerate(layouts):
        assert all(rank[number] == found[0][number] for rank in found), f"ranks differ: {layout}"
        assert len(found[0][number]) == STEPS
        for step, (ours, theirs) in enumerate(zip(found[0][number], expected, strict=True), 1):
            assert tuple(ours) == pytest.approx(theirs, rel=1e-5), f"{layout}, step {step}: (loss, norm)"


@pytest.mark.story
def test_pipeline_and_zero(tmp_path: Path) -> None:
    check(4, tmp_path, {"pipeline": 2, "zero": 3, "accurate_sums": True}, model=TIED)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel(ranks: int, tmp_path: Path) -> None:
    levels = [{"zero": zero, "reduce": reduce} for zero, reduce in product((0, 1, 2, 3), ("auto", "step"))]
    halves = [{"zero": zero, "data": {"replicate": 2, "shard": 2}} for zero in (1, 2, 3)] if ranks == 4 else []
    check(ranks, tmp_path, *levels, *halves)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "pipeline"), [(2, 2), (4, 2), (4, 4)])
def test_schedules(ranks: int, pipeline: int, tmp_path: Path) -> None:
    kinds = [
        {"pipeline": pipeline, "schedule": schedule, "virtual_stages": virtual}
        for schedule, virtual in SCHEDULES
        if pipeline * virtual <= 8
    ]
    check(ranks, tmp_path, *kinds, model={"layers": 8}, train={"micro_batch": 1 if pipeline == 4 else 2})


@pytest.mark.long
@pytest.mark.parametrize("model", [{}, TIED], ids=["untied", "tied"])
def test_all_three(model: dict[str, Any], tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}]
    cases: list[dict[str, Any]] = [
        {"pipeline": 2, "tensor": 2, "zero": zero, **kind} for zero, kind in product((0, 3), kinds)
    ]
    cases.append({"pipeline": 2, "tensor": 2, "schedule": "zbv", "virtual_stages": 2, "zero": 1})
    check(8, tmp_path, *cases, model=model, train=FEW)
