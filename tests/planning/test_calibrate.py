"""Tests of planning.calibrate: fits to computed and recorded timings, machine files, and a real calibration."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import UserError
from pipeline.comm import groups
from pipeline.config import read
from pipeline.config.read import load_config, parse_config
from pipeline.run.code import CODE_ROOT
from planning import predict
from planning.calibrate import (
    POOR_FIT_WARNING,
    check_request,
    compare_steps,
    fit_line,
    fit_link,
    fit_machine,
    read_device_facts,
    write_machine,
)
from planning.machine import Exchange, Machine, Overheads, Step, Timings, load_machine
from planning.plan import describe_plan
from planning.predict import CommGroup, predict_step
from planning.workload import Workload, matrix_shapes
from tests.support.ranks import run_ranks

WORK = Workload(
    layers=4, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=4096, sequence=256, micro_batch=4, global_batch=16,
    shard=2, precision="fp32", low_bytes=4, tied=True,
)  # fmt: skip
CUT = replace(WORK, tensor=2)
RATE, COPIED_S = 1.7e11, 0.0103
RECORDED = Timings(
    products=[(m, n, k, 2 * m * n * k / RATE) for m, n, k in matrix_shapes(WORK)], attention=2.6e-3,
    copied=(1 << 26, COPIED_S),
    exchanges=[
        Exchange(kind="all_gather", size=1 << 20, ranks=2, between=False, seconds=4e-4),
        Exchange(kind="all_reduce", size=1 << 24, ranks=2, between=False, seconds=1.2e-2),
    ],
    steps=[Step(work=WORK, ranks_per_node=2, seconds=0.59)],
)  # fmt: skip
TWO_STEPS = RECORDED.model_copy(update={"steps": [*RECORDED.steps, Step(work=CUT, ranks_per_node=4, seconds=1.13)]})


def make_exchanges(machine: Machine, between: bool) -> list[Exchange]:
    """Return exchanges of several sizes and numbers of ranks, with the durations that planning/predict.py predicts."""
    found = []
    for ranks in (2, 4, 8):
        group = CommGroup(ranks, 1 if between else ranks)
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            for kind, seconds in (
                ("all_reduce", predict.all_reduce_time(size, group, machine)),
                ("all_gather", predict.all_gather_time(size, group, machine)),
                ("reduce_scatter", predict.all_gather_time(size, group, machine)),
                ("send", predict.send_time(size, group, machine)),
            ):
                values = {"kind": kind, "size": size, "ranks": ranks, "between": between, "seconds": seconds}
                found.append(Exchange.model_validate(values))
    return found


@pytest.mark.parametrize("name", ["h100", "a100-80", "mi300x"])
@pytest.mark.parametrize("between", [False, True])
def test_the_fit_recovers_latency_and_bandwidth(name: str, between: bool) -> None:
    """The timings are computed from the link's latency α and its bandwidth 1/β."""
    machine = load_machine(name)
    link, found = machine.between if between else machine.inside, fit_link(make_exchanges(machine, between))
    assert found is not None
    assert found.latency == pytest.approx(link.latency) and found.bandwidth == pytest.approx(link.bandwidth)
    assert fit_link([]) is None


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-8))
@settings(max_examples=50)
def test_fit_line_recovers_the_coefficients(a: float, b: float) -> None:
    rows = [(1.0, float(y), a + b * y) for y in (1, 1 << 10, 1 << 20, 1 << 26)]
    assert fit_line(rows) == pytest.approx((a, b), rel=1e-6)


def test_timings_that_fit_no_line_give_a_positive_bandwidth() -> None:
    """Caches can make small messages faster than any latency allows. The fitted latency is then minimal."""
    assert fit_line([(1.0, 1e3, 1e-9), (1.0, 1e6, 1e-3)])[0] >= 0
    flat = fit_line([(1.0, 1e3, 1e-3), (1.0, 1e6, 0.9e-3)])
    assert flat[0] > 0 and flat[1] == 0.0
    slower = fit_link([Exchange(kind="send", size=4096, ranks=2, between=False, seconds=1.0)])
    assert slower is not None and slower.bandwidth > 0


def test_the_fitted_machine_predicts_its_timed_steps() -> None:
    """The fit has one layout, and then two, of which the second has twice as many ranks as cores."""
    one = fit_machine(RECORDED, "CPU", 8, 1, 2)
    assert predict_step(WORK, one).step == pytest.approx(0.59, rel=1e-3)
    assert one.achievable["fp32"] == pytest.approx(RATE, rel=0.1)  # with half a wave of tiles idle
    assert one.bandwidth == pytest.approx(2 * (1 << 26) / COPIED_S)
    assert one.measured is not None and one.measured.call == 0.0
    crowded = fit_machine(RECORDED, "CPU", 8, 1, 1)  # what two ranks on one core took, one takes half of
    assert predict_step(WORK, crowded).step == pytest.approx(0.59, rel=1e-3)
    for figure in (lambda m: m.achievable["fp32"], lambda m: m.bandwidth, lambda m: m.inside.bandwidth,
                   lambda m: m.attention.portable, lambda m: 1 / m.inside.latency):  # fmt: skip
        assert figure(crowded) == pytest.approx(2 * figure(one))
    two = fit_machine(TWO_STEPS, "CPU", 8, 1, 2)
    for step in TWO_STEPS.steps:
        assert predict_step(step.work, two.in_nodes_of(step.ranks_per_node)).step == pytest.approx(
            step.seconds, rel=5e-3
        )
    assert two.measured is not None and 1e-3 < two.measured.call < 1e-2


def test_the_fit_recovers_the_overheads_of_predicted_steps() -> None:
    """This also holds if several ranks shared a core when the timings were measured."""
    for cores in (1, 2):
        machine = fit_machine(TWO_STEPS, "CPU", 8, 1, cores)
        given = Overheads(eager=2.5, call=2e-3)
        machine = machine.model_copy(update={"measured": given})
        steps = [
            Step(work=w, ranks_per_node=n, seconds=predict_step(w, machine.in_nodes_of(n)).step)
            for w, n in ((WORK, 2), (CUT, 4))
        ]
        again = fit_machine(TWO_STEPS.model_copy(update={"steps": steps}), "CPU", 8, 1, cores).measured
        assert again is not None
        assert (again.eager, again.call) == pytest.approx((2.5, 2e-3), rel=0.01)


def test_ranks_that_share_a_core_take_turns() -> None:
    """Twice the ranks on the same cores take as long for the same total work, and waiting costs no extra time."""
    machine = fit_machine(RECORDED, "CPU", 8, 1, 2)
    half = predict_step(replace(WORK, shard=4), machine.in_nodes_of(4))
    assert half.step == pytest.approx(predict_step(WORK, machine).step, rel=0.15)
    assert (
        predict_step(replace(WORK, shard=4), machine.model_copy(update={"cores": 4}).in_nodes_of(4)).step
        < 0.6 * half.step
    )
    piped = replace(WORK, shard=1, pipeline=4, global_batch=4)  # one micro-batch: three of four ranks wait
    assert (
        predict_step(piped, machine.in_nodes_of(4)).step < 1.2 * predict_step(replace(piped, pipeline=1), machine).step
    )


def test_zero_on_cpus_includes_the_copies_and_calls_of_fsdp() -> None:
    """Compared with plain data parallelism, FSDP copies tensors and calls a collective for each block."""
    machine, work = fit_machine(TWO_STEPS, "CPU", 8, 1, 2), replace(WORK, tied=False)
    plain = predict_step(replace(work, replicate=2, shard=1), machine).step
    found = [predict_step(replace(work, zero=zero), machine).step / plain for zero in (1, 2, 3)]
    assert found == pytest.approx([1.08, 1.13, 1.28], abs=0.03)


def test_a_written_machine_file_loads_as_the_same_machine(tmp_path: Path) -> None:
    """Numbers keep five digits. An existing file is not replaced, and no temporary file remains."""
    machine, file = fit_machine(TWO_STEPS, "CPU", 8, 1, 2), tmp_path / "own.yaml"
    write_machine(machine, file, ["told\nand not: a key"])
    text = file.read_text()
    assert text.startswith("# ") and "\nand not" not in text
    again = load_machine(str(file))
    assert again.timings is not None and again.timings.steps[1].work == CUT
    assert predict_step(WORK, again).step == pytest.approx(predict_step(WORK, machine).step, rel=1e-3)
    with pytest.raises(UserError, match=r"own\.yaml"):
        write_machine(machine, file, [])
    assert file.read_text() == text and list(tmp_path.iterdir()) == [file]


def test_a_poor_fit_has_a_warning() -> None:
    """The same layout was timed twice, and took twice as long the second time, so no overheads fit both."""
    again = Step(work=WORK, ranks_per_node=2, seconds=1.2)
    busy = fit_machine(RECORDED.model_copy(update={"steps": [*RECORDED.steps, again]}), "CPU", 8, 1, 2)
    comparisons = list(compare_steps(busy))
    assert len(comparisons) == 2
    for comparison, timed in zip(comparisons, (0.59, 1.2), strict=True):
        assert comparison.startswith(POOR_FIT_WARNING)
        assert re.search(rf"predicted 0\.84\d s, timed {timed} s", comparison), comparison


def test_a_good_fit_has_no_warning(tmp_path: Path) -> None:
    machine = fit_machine(TWO_STEPS, "CPU", 8, 1, 2)
    comparisons = list(compare_steps(machine))
    expected = "pipeline 1 × data 2 × tensor 2, micro-batch 4: predicted 1.13 s, timed 1.13 s"
    assert comparisons[1].startswith(expected), comparisons
    write_machine(machine, tmp_path / "own.yaml", comparisons)
    assert f"# {comparisons[0]}\n# {comparisons[1]}\n" in (tmp_path / "own.yaml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("heads: 8", "heads: 0", "work.heads is 0"), ("eager:", "eagerly:", "measured.eager"),
     ("call: ", "call: -", "call"), ("kind: all_gather", "kind: gossip", "kind"), ("cores: 2", "cores: 0", "cores")],
)  # fmt: skip
def test_invalid_machine_files_are_user_errors(tmp_path: Path, old: str, new: str, words: str) -> None:
    write_machine(fit_machine(TWO_STEPS, "CPU", 8, 1, 2), tmp_path / "own.yaml", [])
    text = (tmp_path / "own.yaml").read_text()
    assert old in text
    (tmp_path / "bad.yaml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=words):
        load_machine(str(tmp_path / "bad.yaml"))


def test_plan_predicts_another_layout_with_the_machine_file(tmp_path: Path) -> None:
    write_machine(fit_machine(TWO_STEPS, "CPU", 8, 1, 2), tmp_path / "own.yaml", [])
    config = load_config(Path("configs/quickstart.yaml"), ["parallel.pipeline=2"])
    plan = "\n".join(describe_plan(config, load_machine(str(tmp_path / "own.yaml"))))
    assert "predicted for CPU: 0." in plan
    with pytest.raises(UserError, match=r"CPU.*bf16.*fp32"):
        list(describe_plan(config.model_copy(update={"train": config.train.model_copy(update={"precision": "bf16"})}),
                  load_machine(str(tmp_path / "own.yaml"))))  # fmt: skip


CONFIG = load_config(Path("configs/quickstart.yaml"))


def test_an_existing_output_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    assert check_request(CONFIG, file, None) is None
    file.touch()
    for path, code in ((file, "plan.file_exists"), (tmp_path / "none" / "own.yaml", "plan.no_such_folder")):
        with pytest.raises(UserError, match=re.escape(str(path))) as error:
            check_request(CONFIG, path, None)
        assert error.value.code == code


def test_only_a_measured_machine_can_be_extended(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    with pytest.raises(UserError, match=r"h100\.yaml") as error:
        check_request(CONFIG, file, Path("configs/machines/h100.yaml"))
    assert error.value.code == "plan.not_measured"
    measured = tmp_path / "measured.yaml"
    write_machine(fit_machine(TWO_STEPS, "CPU", 8, 1, 2), measured, [])
    machine = check_request(CONFIG, file, measured)
    assert machine is not None and machine.timings is not None


def test_fp8_cannot_be_measured(tmp_path: Path) -> None:
    train = CONFIG.train.model_copy(update={"precision": "fp8"})
    with pytest.raises(UserError) as error:
        check_request(CONFIG.model_copy(update={"train": train}), tmp_path / "own.yaml", None)
    assert error.value.code == "plan.unsupported_model"


@pytest.mark.parametrize("section", ["goodput: {failures: 3.0}", "measure: {file: /tmp/own.yaml}"])
def test_a_config_with_a_former_section_still_loads(
    tmp_path: Path, section: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(read, "_reported", set())
    path = tmp_path / "old.yaml"
    path.write_text(Path("configs/quickstart.yaml").read_text() + f"\n{section}\n")
    assert [load_config(path).train.steps for _ in range(2)] == [CONFIG.train.steps] * 2
    (note,) = capsys.readouterr().err.splitlines()
    assert str(path) in note and section.partition(":")[0] in note and "plan" in note


def test_a_run_of_older_code_loads_without_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    values = CONFIG.model_dump(mode="json")
    values["goodput"] = {"failures": None, "preemptions": 0.0, "preempted_s": 3600.0, "nodes_together": 1}
    values["measure"] = None
    values["stages"]["measure"] = values["stages"]["train"]
    assert parse_config(values, "old").model_dump() == CONFIG.model_dump()
    assert capsys.readouterr().err == ""


def read_facts_with_cpus(
    rank_info: RankInfo, each: dict[int, set[int]], per_node: int
) -> tuple[str, float, int, int | None]:
    """Return the device facts of a rank that may use only the CPUs `each[rank]`."""
    os.sched_getaffinity = lambda pid: each[rank_info.rank]
    return read_device_facts(
        groups.join_process_group(rank_info, load_config(Path("configs/quickstart.yaml"))), 1, per_node
    )


def test_the_number_of_cores_includes_all_ranks_of_a_node() -> None:
    """With Slurm's task/affinity, each rank sees only its CPUs. Ranks of other nodes do not count."""
    for each, per_node, cores in (
        ([{0}, {1}, {2}, {4}], 4, [4, 4, 4, 4]), ([{0, 1}, {1}, {0}, {0}], 2, [2, 2, 1, 1]),
    ):  # fmt: skip
        found = run_ranks(4, read_facts_with_cpus, dict(enumerate(each)), per_node)
        assert [facts[-1] for facts in found] == cores


def time_small_exchanges(rank_info: RankInfo) -> list[Exchange]:
    """Time exchanges of fewer bytes than four for each rank."""
    from planning import calibrate

    calibrate._COLLECTIVE_BYTES = (4,)  # type: ignore[assignment]
    found = [
        *calibrate.time_exchanges(
            groups.join_process_group(rank_info, load_config(Path("configs/quickstart.yaml"))), rank_info.world_size
        )
    ]
    dist.barrier()  # who leaves takes the store along
    return found


def test_exchanges_with_fewer_values_than_ranks_send_one_value_per_rank() -> None:
    assert {one.size for found in run_ranks(2, time_small_exchanges) for one in found} == {8}


@pytest.mark.story
def test_local_ranks_measure_this_machine(tmp_path: Path) -> None:
    """Two ranks measure one layout, then extend the file by another layout. Existing files are not replaced."""
    small = ["model.dim=64", "model.layers=2", "data.sequence_length=32"]
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"

    def calibrate(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "planning.calibrate", "configs/quickstart.yaml", *small, *arguments]
        return subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=300)

    done = calibrate(f"--out={first}")
    assert done.returncode == 0 and str(first) in done.stdout, done.stdout + done.stderr
    timings = load_machine(str(first)).timings
    assert timings is not None and len(timings.products) == 15 and len(timings.steps) == 1
    assert {one.kind for one in timings.exchanges} == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    assert {(one.ranks, one.between) for one in timings.exchanges} == {(2, False)}
    assert os.uname().nodename in first.read_text().splitlines()[0]
    done = calibrate(f"--out={second}", f"--machine={first}", "parallel.tensor=2")
    assert done.returncode == 0, done.stdout + done.stderr
    machine = load_machine(str(second))
    assert machine.timings is not None and [one.work.tensor for one in machine.timings.steps] == [1, 2]
    assert machine.timings.exchanges == timings.exchanges
    command = [sys.executable, "submit.py", "plan", "configs/quickstart.yaml", *small, f"--machine={second}"]
    plan = subprocess.run([*command, "parallel.pipeline=2"], cwd=CODE_ROOT, capture_output=True, text=True, timeout=300)
    assert "predicted for CPU" in plan.stdout
    content = first.read_text()
    again = calibrate(f"--out={first}")
    assert again.returncode == 2 and "plan.file_exists" in again.stderr
    assert first.read_text() == content
