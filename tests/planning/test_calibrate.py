"""Tests of `python -m planning.calibrate`: fits to computed and recorded timings, machine files, and a real run."""

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
    read_device_info,
    write_machine,
)
from planning.machine import Exchange, Machine, Overheads, Step, Timings, load_machine
from planning.plan import describe_plan
from planning.predict import CommGroup, predict_step
from planning.workload import Workload, matrix_shapes
from tests.support.ranks import run_ranks

WORKLOAD = Workload(
    layers=4, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=4096, sequence=256, micro_batch=4, global_batch=16,
    shard=2, precision="fp32", low_bytes=4, tied=True,
)  # fmt: skip
TENSOR_WORKLOAD = replace(WORKLOAD, tensor=2)
"""The same model with tensor parallelism: twice as many ranks."""
PRODUCT_FLOPS = 1.7e11
"""FLOP/s of the recorded matrix products."""
COPY_S = 0.0103
"""Seconds of the recorded copy."""
STEP_S = 0.59
"""Seconds of the recorded step."""
ONE_STEP = Timings(
    products=[(m, n, k, 2 * m * n * k / PRODUCT_FLOPS) for m, n, k in matrix_shapes(WORKLOAD)], attention=2.6e-3,
    copied=(1 << 26, COPY_S),
    exchanges=[
        Exchange(kind="all_gather", size=1 << 20, ranks=2, between=False, seconds=4e-4),
        Exchange(kind="all_reduce", size=1 << 24, ranks=2, between=False, seconds=1.2e-2),
    ],
    steps=[Step(work=WORKLOAD, ranks_per_node=2, seconds=STEP_S)],
)  # fmt: skip
TWO_STEPS = ONE_STEP.model_copy(
    update={"steps": [*ONE_STEP.steps, Step(work=TENSOR_WORKLOAD, ranks_per_node=4, seconds=1.13)]}
)


def fit_cpu_machine(timings: Timings, cores: int = 2) -> Machine:
    """Return the machine that fits timings of ranks on the CPU of a node with `cores` cores and 8 GiB of memory."""
    return fit_machine(timings, "CPU", memory_gib=8, multiprocessors=1, cores=cores)


def make_exchanges(machine: Machine, between_nodes: bool) -> list[Exchange]:
    """Return exchanges (collectives and messages) with the durations that planning/predict.py predicts.

    The exchanges have several sizes and numbers of ranks.

    Args:
        machine: the machine on which the durations are predicted.
        between_nodes: True if each rank is on a different node, False if all ranks are on one node.
    """
    exchanges = []
    for ranks in (2, 4, 8):
        group = CommGroup(ranks, ranks_per_node=1 if between_nodes else ranks)
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            for kind, seconds in (
                ("all_reduce", predict.all_reduce_time(size, group, machine)),
                ("all_gather", predict.all_gather_time(size, group, machine)),
                ("reduce_scatter", predict.all_gather_time(size, group, machine)),
                ("send", predict.send_time(size, group, machine)),
            ):
                values = {"kind": kind, "size": size, "ranks": ranks, "between": between_nodes, "seconds": seconds}
                exchanges.append(Exchange.model_validate(values))
    return exchanges


@pytest.mark.parametrize("name", ["h100", "a100-80", "mi300x"])
@pytest.mark.parametrize("between_nodes", [False, True])
def test_the_fit_recovers_latency_and_bandwidth(name: str, between_nodes: bool) -> None:
    """The timings are computed from the latency and the bandwidth of the link."""
    machine = load_machine(name)
    link = machine.between if between_nodes else machine.inside
    fitted_link = fit_link(make_exchanges(machine, between_nodes))
    assert fitted_link is not None
    assert fitted_link.latency == pytest.approx(link.latency)
    assert fitted_link.bandwidth == pytest.approx(link.bandwidth)


def test_fit_link_returns_none_without_exchanges() -> None:
    assert fit_link([]) is None


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-8))
@settings(max_examples=50)
def test_fit_line_recovers_the_coefficients(latency: float, seconds_per_byte: float) -> None:
    rows = [(1.0, float(size), latency + seconds_per_byte * size) for size in (1, 1 << 10, 1 << 20, 1 << 26)]
    assert fit_line(rows) == pytest.approx((latency, seconds_per_byte), rel=1e-6)


def test_fitted_latency_and_bandwidth_are_valid_if_timings_fit_no_line() -> None:
    """Caches can make a small message faster than any latency allows, or a large message faster than a small one."""
    assert fit_line([(1.0, 1e3, 1e-9), (1.0, 1e6, 1e-3)])[0] >= 0
    latency, seconds_per_byte = fit_line([(1.0, 1e3, 1e-3), (1.0, 1e6, 0.9e-3)])
    assert latency > 0 and seconds_per_byte == 0.0
    link = fit_link([Exchange(kind="send", size=4096, ranks=2, between=False, seconds=1.0)])
    assert link is not None and link.bandwidth > 0


def test_the_fitted_machine_predicts_its_timed_steps() -> None:
    """The machine is fitted to one step, and then to two steps. The second step has four ranks on two cores."""
    machine = fit_cpu_machine(ONE_STEP)
    assert predict_step(WORKLOAD, machine).step == pytest.approx(STEP_S, rel=1e-3)
    # The prediction assumes that some matrix tiles are partly unused, so the fitted rate exceeds the recorded rate.
    assert machine.achievable["fp32"] == pytest.approx(PRODUCT_FLOPS, rel=0.1)
    assert machine.bandwidth == pytest.approx(2 * (1 << 26) / COPY_S)
    assert machine.measured is not None and machine.measured.call == 0.0
    machine = fit_cpu_machine(TWO_STEPS)
    for step in TWO_STEPS.steps:
        prediction = predict_step(step.work, machine.with_gpus_per_node(step.ranks_per_node))
        assert prediction.step == pytest.approx(step.seconds, rel=5e-3)
    assert machine.measured is not None and 1e-3 < machine.measured.call < 1e-2


def test_fitted_rates_double_if_two_ranks_shared_the_measured_core() -> None:
    """A rank that has the core for itself computes twice as fast as one of two ranks that share the core."""
    two_cores = fit_cpu_machine(ONE_STEP)
    one_core = fit_cpu_machine(ONE_STEP, cores=1)
    assert predict_step(WORKLOAD, one_core).step == pytest.approx(STEP_S, rel=1e-3)

    def list_rates(machine: Machine) -> list[float]:
        """Return all fitted values that are rates."""
        link = machine.inside
        rates = [machine.achievable["fp32"], machine.bandwidth, machine.attention.portable]
        return [*rates, link.bandwidth, 1 / link.latency]

    assert list_rates(one_core) == pytest.approx([2 * rate for rate in list_rates(two_cores)])


def test_the_fit_recovers_the_overheads_of_predicted_steps() -> None:
    """The second step has four ranks, which share cores. On one core, the two ranks of the first step share it too."""
    for cores in (1, 2):
        machine = fit_cpu_machine(TWO_STEPS, cores=cores)
        machine = machine.model_copy(update={"measured": Overheads(eager=2.5, call=2e-3)})
        steps = [
            Step(work=work, ranks_per_node=ranks, seconds=predict_step(work, machine.with_gpus_per_node(ranks)).step)
            for work, ranks in ((WORKLOAD, 2), (TENSOR_WORKLOAD, 4))
        ]
        overheads = fit_cpu_machine(TWO_STEPS.model_copy(update={"steps": steps}), cores=cores).measured
        assert overheads is not None
        assert (overheads.eager, overheads.call) == pytest.approx((2.5, 2e-3), rel=0.01)


def test_ranks_that_share_cores_take_as_long_as_fewer_ranks() -> None:
    """On two cores, four ranks take as long as two ranks for the same global batch. On four cores, they are faster."""
    machine = fit_cpu_machine(ONE_STEP)
    four_ranks_workload = replace(WORKLOAD, shard=4)
    on_two_cores_s = predict_step(four_ranks_workload, machine.with_gpus_per_node(4)).step
    assert on_two_cores_s == pytest.approx(predict_step(WORKLOAD, machine).step, rel=0.15)
    four_cores = machine.model_copy(update={"cores": 4})
    assert predict_step(four_ranks_workload, four_cores.with_gpus_per_node(4)).step < 0.6 * on_two_cores_s


def test_waiting_pipeline_ranks_leave_their_core_to_other_ranks() -> None:
    """With one micro-batch, three of four pipeline-parallel ranks wait at any time.

    A step therefore takes hardly longer than on one rank.
    """
    machine = fit_cpu_machine(ONE_STEP)
    pipeline_workload = replace(WORKLOAD, shard=1, pipeline=4, global_batch=4)
    one_rank_s = predict_step(replace(pipeline_workload, pipeline=1), machine).step
    assert predict_step(pipeline_workload, machine.with_gpus_per_node(4)).step < 1.2 * one_rank_s


def test_predicted_zero_steps_on_cpus_include_the_copies_and_calls_of_fsdp() -> None:
    """FSDP copies tensors and calls a collective for each block. DDP needs neither, so it is faster."""
    machine = fit_cpu_machine(TWO_STEPS)
    work = replace(WORKLOAD, tied=False)
    ddp_s = predict_step(replace(work, replicate=2, shard=1), machine).step
    ratios = [predict_step(replace(work, zero=zero), machine).step / ddp_s for zero in (1, 2, 3)]
    assert ratios == pytest.approx([1.08, 1.13, 1.28], abs=0.03)


def test_a_written_machine_file_loads_as_the_same_machine(tmp_path: Path) -> None:
    """A comment with a line break adds no key. An existing file is not replaced, and no temporary file remains.

    The prediction may differ slightly, because the file has only five digits of each number.
    """
    machine = fit_cpu_machine(TWO_STEPS)
    file = tmp_path / "own.yaml"
    write_machine(machine, file, ["a comment\nand not: a key"])
    text = file.read_text()
    assert text.startswith("# ") and "\nand not" not in text
    loaded_machine = load_machine(str(file))
    assert loaded_machine.timings is not None and loaded_machine.timings.steps[1].work == TENSOR_WORKLOAD
    assert predict_step(WORKLOAD, loaded_machine).step == pytest.approx(predict_step(WORKLOAD, machine).step, rel=1e-3)
    with pytest.raises(UserError, match=r"own\.yaml"):
        write_machine(machine, file, [])
    assert file.read_text() == text and list(tmp_path.iterdir()) == [file]


def test_compare_steps_warns_of_a_poor_fit() -> None:
    """The same layout is timed twice, and takes twice as long the second time. No overheads fit both steps."""
    slow_step = Step(work=WORKLOAD, ranks_per_node=2, seconds=1.2)
    machine = fit_cpu_machine(ONE_STEP.model_copy(update={"steps": [*ONE_STEP.steps, slow_step]}))
    comparisons = list(compare_steps(machine))
    assert len(comparisons) == 2
    for comparison, seconds in zip(comparisons, (STEP_S, 1.2), strict=True):
        assert comparison.startswith(POOR_FIT_WARNING)
        # the prediction is the geometric mean of the two times
        assert re.search(rf"predicted 0\.84\d s, timed {seconds} s", comparison), comparison


def test_a_good_fit_has_no_warning_and_its_comparison_is_written_as_a_comment(tmp_path: Path) -> None:
    machine = fit_cpu_machine(TWO_STEPS)
    comparisons = list(compare_steps(machine))
    expected = "pipeline 1 × data 2 × tensor 2, micro-batch 4: predicted 1.13 s, timed 1.13 s"
    assert comparisons[1].startswith(expected), comparisons
    write_machine(machine, tmp_path / "own.yaml", comparisons)
    assert f"# {comparisons[0]}\n# {comparisons[1]}\n" in (tmp_path / "own.yaml").read_text()


@pytest.mark.parametrize(
    ("original_text", "replacement", "key"),
    [("heads: 8", "heads: 0", "work.heads is 0"), ("eager:", "eagerly:", "measured.eager"),
     ("call: ", "call: -", "call"), ("kind: all_gather", "kind: gossip", "kind"), ("cores: 2", "cores: 0", "cores")],
)  # fmt: skip
def test_invalid_machine_files_are_user_errors(tmp_path: Path, original_text: str, replacement: str, key: str) -> None:
    write_machine(fit_cpu_machine(TWO_STEPS), tmp_path / "own.yaml", [])
    text = (tmp_path / "own.yaml").read_text()
    assert original_text in text
    (tmp_path / "invalid.yaml").write_text(text.replace(original_text, replacement))
    with pytest.raises(UserError, match=key):
        load_machine(str(tmp_path / "invalid.yaml"))


def test_plan_predicts_a_layout_that_was_not_measured(tmp_path: Path) -> None:
    write_machine(fit_cpu_machine(TWO_STEPS), tmp_path / "own.yaml", [])
    config = load_config(Path("configs/quickstart.yaml"), ["parallel.pipeline=2"])
    plan = "\n".join(describe_plan(config, load_machine(str(tmp_path / "own.yaml"))))
    assert "predicted for CPU: 0." in plan


def test_plan_fails_if_the_machine_file_has_no_rate_for_the_precision(tmp_path: Path) -> None:
    write_machine(fit_cpu_machine(TWO_STEPS), tmp_path / "own.yaml", [])
    config = load_config(Path("configs/quickstart.yaml"), ["train.precision=bf16"])
    with pytest.raises(UserError, match=r"CPU.*bf16.*fp32"):
        list(describe_plan(config, load_machine(str(tmp_path / "own.yaml"))))


QUICKSTART = load_config(Path("configs/quickstart.yaml"))


def test_calibration_fails_if_the_output_file_exists_or_its_folder_does_not(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    assert check_request(QUICKSTART, file, None) is None
    file.touch()
    for path, code in ((file, "plan.file_exists"), (tmp_path / "none" / "own.yaml", "plan.no_such_folder")):
        with pytest.raises(UserError, match=re.escape(str(path))) as error:
            check_request(QUICKSTART, path, None)
        assert error.value.code == code


def test_only_a_measured_machine_can_be_extended(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    with pytest.raises(UserError, match=r"h100\.yaml") as error:
        check_request(QUICKSTART, file, Path("configs/machines/h100.yaml"))
    assert error.value.code == "plan.not_measured"
    measured = tmp_path / "measured.yaml"
    write_machine(fit_cpu_machine(TWO_STEPS), measured, [])
    machine = check_request(QUICKSTART, file, measured)
    assert machine is not None and machine.timings is not None


def test_fp8_cannot_be_measured(tmp_path: Path) -> None:
    train = QUICKSTART.train.model_copy(update={"precision": "fp8"})
    with pytest.raises(UserError) as error:
        check_request(QUICKSTART.model_copy(update={"train": train}), tmp_path / "own.yaml", None)
    assert error.value.code == "plan.unsupported_model"


@pytest.mark.parametrize("section", ["goodput: {failures: 3.0}", "measure: {file: /tmp/own.yaml}"])
def test_a_config_with_a_removed_section_loads_with_one_note(
    tmp_path: Path, section: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(read, "_reported_names", set())
    path = tmp_path / "old.yaml"
    path.write_text(Path("configs/quickstart.yaml").read_text() + f"\n{section}\n")
    assert [load_config(path).train.steps for _ in range(2)] == [QUICKSTART.train.steps] * 2
    (note,) = capsys.readouterr().err.splitlines()
    assert str(path) in note and section.partition(":")[0] in note and "plan" in note


def test_the_config_of_a_run_with_removed_sections_loads_without_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    values = QUICKSTART.model_dump(mode="json")
    values["goodput"] = {"failures": None, "preemptions": 0.0, "preempted_s": 3600.0, "nodes_together": 1}
    values["measure"] = None
    values["stages"]["measure"] = values["stages"]["train"]
    assert parse_config(values, "old").model_dump() == QUICKSTART.model_dump()
    assert capsys.readouterr().err == ""


def read_cores_of_rank(rank_info: RankInfo, cpus: list[set[int]], ranks_per_node: int) -> int | None:
    """Return the number of cores that a rank reports for its node, if each rank may only use the CPUs `cpus[rank]`."""
    os.sched_getaffinity = lambda pid: cpus[rank_info.rank]
    return read_device_info(groups.join_process_group(rank_info, QUICKSTART), threads=1, per_node=ranks_per_node).cores


def test_the_number_of_cores_includes_the_cpus_of_all_ranks_of_a_node() -> None:
    """With Slurm's task/affinity, each rank sees only its own CPUs. The CPUs of other nodes do not count."""
    assert run_ranks(4, read_cores_of_rank, [{0}, {1}, {2}, {4}], 4) == [4, 4, 4, 4]
    assert run_ranks(4, read_cores_of_rank, [{0, 1}, {1}, {0}, {0}], 2) == [2, 2, 1, 1]


def time_small_exchanges(rank_info: RankInfo) -> list[Exchange]:
    """Time exchanges of tensors of four bytes: one fp32 value, which is less than a value for each rank."""
    from planning import calibrate

    calibrate._COLLECTIVE_BYTES = (4,)  # type: ignore[assignment]
    world = groups.join_process_group(rank_info, QUICKSTART)
    exchanges = list(calibrate.time_exchanges(world, rank_info.world_size))
    dist.barrier()  # rank 0 hosts the rendezvous store, so no rank may exit while another one uses the store
    return exchanges


def test_exchanges_with_fewer_values_than_ranks_send_one_value_per_rank() -> None:
    exchanges = [exchange for exchanges in run_ranks(2, time_small_exchanges) for exchange in exchanges]
    assert {exchange.size for exchange in exchanges} == {8}


@pytest.mark.story
def test_calibration_measures_this_machine_and_extends_a_machine_file(tmp_path: Path) -> None:
    """Two ranks measure one layout and write a first machine file.

    A second calibration measures another layout. It writes a second file, which also has the timings of the first file.
    A third calibration fails, because its output file exists.
    """
    small_model = ["model.dim=64", "model.layers=2", "data.sequence_length=32"]
    first_file = tmp_path / "first.yaml"
    second_file = tmp_path / "second.yaml"

    def run_calibrate(*arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the calibration of a small model."""
        command = [sys.executable, "-m", "planning.calibrate", "configs/quickstart.yaml", *small_model, *arguments]
        return subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=300)

    completed = run_calibrate(f"--out={first_file}")
    assert completed.returncode == 0 and str(first_file) in completed.stdout, completed.stdout + completed.stderr
    timings = load_machine(str(first_file)).timings
    # three products for each of the four matrices of a block and for the output layer: one forward, two backward
    assert timings is not None and len(timings.products) == 3 * 5 and len(timings.steps) == 1
    kinds = {exchange.kind for exchange in timings.exchanges}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    assert {(exchange.ranks, exchange.between) for exchange in timings.exchanges} == {(2, False)}
    assert os.uname().nodename in first_file.read_text().splitlines()[0]
    completed = run_calibrate(f"--out={second_file}", f"--machine={first_file}", "parallel.tensor=2")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    machine = load_machine(str(second_file))
    assert machine.timings is not None and [step.work.tensor for step in machine.timings.steps] == [1, 2]
    assert machine.timings.exchanges == timings.exchanges
    command = [sys.executable, "submit.py", "plan", "configs/quickstart.yaml", *small_model, f"--machine={second_file}"]
    plan = subprocess.run([*command, "parallel.pipeline=2"], cwd=CODE_ROOT, capture_output=True, text=True, timeout=300)
    assert "predicted for CPU" in plan.stdout
    content = first_file.read_text()
    completed = run_calibrate(f"--out={first_file}")
    assert completed.returncode == 2 and "plan.file_exists" in completed.stderr
    assert first_file.read_text() == content
