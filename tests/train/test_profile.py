"""Tests of profiled steps.

The tests cover the division of the time of a step into parts, merged traces of several ranks, failed profiles, and
differences between the clocks of ranks.
"""

from __future__ import annotations

import gzip
import json
import shutil
import time
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.profile import merge_traces, profile_steps
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.signals import StopFlag
from pipeline.resilience.stop import Deadline, StopCoordinator
from pipeline.run.directory import Run
from pipeline.train.step_trace import (
    PIPELINE,
    STEP,
    STEP_PARTS,
    Span,
    average_parts_over_ranks,
    divide_step,
    parse_trace,
)
from tests.support.mpirun import run_mpirun
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank
from tests.support.tiny_training import tiny_config

STEP_US = 40
"""Duration of a generated step in microseconds."""
KINDS_AND_ROWS = [
    ("compute", "training"), ("compute", "stream 7"), ("wait", "training"), ("copy", "stream 9"), ("host", "x"),
    *(("communication", group) for group in ("world", "tp", PIPELINE)),
]  # fmt: skip
"""Kinds of spans, and the row of the trace viewer that shows the span: a thread, a CUDA stream or a process group."""


@st.composite
def generate_spans(draw: st.DrawFn) -> list[Span]:
    """Generate up to 12 spans of random kinds within a step of `STEP_US` microseconds."""
    spans = []
    for kind, row in draw(st.lists(st.sampled_from(KINDS_AND_ROWS), max_size=12)):
        start, end = sorted(draw(st.lists(st.integers(0, STEP_US), min_size=2, max_size=2, unique=True)))
        spans.append(Span(kind, row, "x", float(start), float(end)))
    return spans


@given(generate_spans())
def test_parts_of_a_step_equal_those_counted_microsecond_by_microsecond(spans: list[Span]) -> None:
    part_us: dict[str, float] = dict.fromkeys(STEP_PARTS, 0.0)
    exposed_us: dict[str, float] = {}
    for microsecond in range(STEP_US):
        active_spans = [span for span in spans if span.start <= microsecond < span.end]
        kinds = {span.kind for span in active_spans}
        groups = {span.row for span in active_spans if span.kind == "communication"}
        if "compute" in kinds and "wait" not in kinds:
            part_us["compute"] += 1
            continue
        for group in groups:
            exposed_us[group] = exposed_us.get(group, 0) + 1
        if groups - {PIPELINE}:
            part_us["communication_exposed"] += 1
        elif "copy" in kinds:
            part_us["copy"] += 1
        else:
            part_us["bubble" if groups else "idle"] += 1
    parts = divide_step(spans, float(STEP_US))
    assert parts.pop("exposed_by_group") == pytest.approx({group: us / 1e6 for group, us in exposed_us.items()})
    assert parts == pytest.approx({part: us / 1e6 for part, us in part_us.items()})
    assert sum(parts.values()) == pytest.approx(STEP_US / 1e6)


def test_a_gpu_trace_is_divided_into_its_parts() -> None:
    """The trace has the format that torch.profiler exports with CUDA.

    Kernels have their stream, and NCCL kernels also have their process group.
    """

    def make_event(cat: str, name: str, start: float, dur: float, tid: int, group: str | None = None) -> dict[str, Any]:
        """Return a complete event of a trace. `start` is in microseconds from the start of the step at 1e6."""
        args = {"Process Group Description": group, "Collective name": "x"} if group else {"stream": tid}
        return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": 1e6 + start, "dur": dur, "args": args}

    events = [
        {"ph": "X", "cat": "user_annotation", "name": STEP, "pid": 77, "tid": 77, "ts": 1e6, "dur": 1000.0},
        make_event("gpu_user_annotation", STEP, 40, 900, 7),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 1e6, "dur": 1000.0},
        make_event("kernel", "sm90_xmma_gemm_f32", -50, 150, 7),  # starts before the step; only 0 to 100 counts
        # 100 to 300 is exposed, except 150 to 200, when elementwise_kernel computes
        make_event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 250, 13, "mesh_shard"),
        make_event("kernel", "elementwise_kernel", 150, 50, 7),
        make_event("gpu_memcpy", "Memcpy HtoD", 290, 110, 9),  # 300 to 400
        make_event("kernel", "ncclDevKernel_SendRecv", 500, 100, 20, "mesh_pp"),
        make_event("kernel", "ncclDevKernel_AllGather_RING_LL", 600, 50, 21, "default_pg"),
        make_event("cuda_runtime", "cudaDeviceSynchronize", 600, 400, 77),
    ]
    begin, duration, spans = parse_trace(events)
    assert (begin, duration) == (1e6, 1000.0)
    parts = divide_step(spans, duration)
    exposed_us = {group: round(1e6 * seconds) for group, seconds in parts.pop("exposed_by_group").items()}
    assert exposed_us == {"shard": 150, "pp": 100, "world": 50}
    part_us = {part: round(1e6 * seconds) for part, seconds in parts.items()}
    assert part_us == {"compute": 150, "communication_exposed": 200, "copy": 100, "bubble": 100, "idle": 450}
    assert {span.row for span in spans} >= {"stream 7", "stream 9", "training", "shard"}


def test_a_trace_without_the_span_of_the_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="step"):
        parse_trace([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}])


def test_the_average_divides_by_the_number_of_all_ranks_also_if_some_have_no_value() -> None:
    average = average_parts_over_ranks([{"a": 1.0, "by": {"x": 2.0}}, {"a": 3.0, "by": {"y": 1.0}}])
    assert average == {"a": 2.0, "by": {"x": 1.0, "y": 0.5}}


# -- parts with known bounds ------------------------------------------------------------------------------


def profile_known_step_on_rank(rank_info: RankInfo, folder: Path) -> tuple[Any, Any]:
    """Profile a step over gloo whose parts have known bounds. Return the profiled parts and the measured times."""
    from pipeline.comm import groups
    from tests.support import profiled_step

    groups.join_process_group(rank_info, tiny_config(2))
    return profiled_step.run_profiled_step(folder, rank_info.rank, groups.new_control_group())


def test_parts_over_gloo_are_within_their_bounds(tmp_path: Path) -> None:
    """A part of the communication of rank 0 is exposed. Rank 1 calls the collective late and does not wait for it."""
    from tests.support.profiled_step import check_profile

    for rank, result in enumerate(run_ranks(2, profile_known_step_on_rank, tmp_path)):
        check_profile(rank, *result)


@pytest.mark.story
def test_parts_over_mpi_are_within_their_bounds() -> None:
    completed = run_mpirun(2, "tests.support.mpi_programs", "profile")
    assert completed.stdout.count("all checks passed") == 2, completed.stdout


# -- training runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_ranks_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train 7 steps with two pipeline-parallel stages of two ranks each. Steps 3 and 6 are profiled. Return the run."""
    overrides = ("parallel.pipeline=2", "stages.train.tasks_per_node=4", "train.profile_every=3", "train.steps=7")
    run = make_run(tmp_path_factory.mktemp("four_ranks_run"), overrides=overrides)
    assert run_ranks(4, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 4
    return run


def test_metrics_have_the_parts_of_profiled_steps(four_ranks_run: Run) -> None:
    lines = [json.loads(line) for line in four_ranks_run.metrics_file.read_text().splitlines()]
    assert [line["step"] for line in lines if "profile" in line] == [3, 6]
    for line in lines:
        if "profile" in line:
            profile = line["profile"]
            assert min(profile[part] for part in STEP_PARTS) >= 0 and profile["compute"] > 0 and profile["bubble"] > 0
            assert PIPELINE in profile["exposed_by_group"] and line["profile_s"] > 0
            step_s = line["step_time_s"] - line["profile_s"]
            assert 0.1 * step_s < sum(profile[part] for part in STEP_PARTS) < step_s + 0.02


def test_the_traces_of_four_ranks_are_merged(four_ranks_run: Run) -> None:
    folders = sorted(four_ranks_run.profiles_dir.iterdir())
    assert [folder.name for folder in folders] == ["step-00000003", "step-00000006"]
    # The trace of rank 4 is ignored. Such a file remains if an earlier attempt had more ranks.
    shutil.copy(folders[1] / "rank-3.json.gz", folders[1] / "rank-4.json.gz")
    path, error_ms = merge_traces(folders[1], range(4))
    assert 0 < error_ms < 50
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {
        (event["pid"], event["name"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"
    }
    process_names = {pid: name for (pid, kind, _), name in names.items() if kind == "process_name"}
    assert sorted(process_names) == [1, 2, 3, 4] and process_names[3].startswith("rank 2 on ")
    assert "pipeline 1, data 0, tensor 0" in process_names[3]
    spans = [event for event in events if event["ph"] == "X"]
    threads = {tid for pid, kind, tid in names if kind == "thread_name"}
    assert {span["tid"] for span in spans} == threads, "each row must have a name"
    assert len({(span["pid"], span["tid"]) for span in spans}) == len(threads), "each row must belong to one rank"
    tolerance_us = 0.002  # times are rounded
    for row in threads:  # a viewer can only draw spans that are nested or do not overlap
        row_spans = sorted((span["ts"], -span["dur"]) for span in spans if span["tid"] == row)
        ends: list[float] = []
        for start, negative_duration in row_spans:
            end = start - negative_duration
            while ends and ends[-1] <= start + tolerance_us:
                ends.pop()
            assert not ends or end <= ends[-1] + tolerance_us
            ends.append(end)
    # A collective runs on all of its ranks at the same time. Its spans overlap, except for the clock error.
    collectives: dict[int, list[tuple[float, float]]] = {}
    for event in spans:
        if event["name"] == "gloo:all_reduce" and names[event["pid"], "thread_name", event["tid"]].endswith("world"):
            collectives.setdefault(event["pid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(collectives) == 4
    assert {len(rank_spans) for rank_spans in collectives.values()} == {len(collectives[1])}
    for same_collective in zip(*(sorted(rank_spans) for rank_spans in collectives.values()), strict=True):
        last_start = max(start for start, _ in same_collective)
        first_end = min(end for _, end in same_collective)
        assert last_start < first_end + 1000 * error_ms


def test_profiling_does_not_change_the_result(four_ranks_run: Run, tmp_path: Path) -> None:
    overrides = ("parallel.pipeline=2", "stages.train.tasks_per_node=4", "train.steps=7")
    unprofiled_run = make_run(tmp_path, overrides=overrides, data=four_ranks_run.data_dir)
    assert run_ranks(4, run_stage_on_rank, unprofiled_run.path, "train") == [ExitCode.DONE] * 4
    assert compute_run_digest(unprofiled_run) == compute_run_digest(four_ranks_run)
    assert not unprofiled_run.profiles_dir.exists()


def test_the_profile_command_lists_earlier_profiles(four_ranks_run: Run) -> None:
    lines = list(profile_steps(four_ranks_run, ranks="", steps=0))
    assert len(lines) == 4 and lines[0].startswith("step-00000003: ") and "mean of 4 ranks" in lines[0]
    percentages = [int(share.split()[-2]) for share in lines[0].split("(")[0].split(",")]
    assert sum(percentages) in range(97, 104), "each percentage is rounded"
    # the train stage is not running, so new steps cannot be profiled, and the error proposes --steps 0
    with pytest.raises(UserError, match="--steps 0"):
        next(profile_steps(four_ranks_run, ranks="", steps=1))
    with pytest.raises(UserError, match="--ranks 1;2"):
        next(profile_steps(four_ranks_run, ranks="1;2", steps=1))
    assert not four_ranks_run.profile_file.exists()


@pytest.mark.parametrize("damage", ["truncated", "no events", "truncated parts", "deeply nested"])
def test_damaged_profiles_are_user_errors(four_ranks_run: Run, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "profiles/step-00000003"
    shutil.copytree(four_ranks_run.profiles_dir / "step-00000003", folder, ignore=shutil.ignore_patterns("trace*"))
    file = folder / ("parts.json" if damage == "truncated parts" else "rank-2.json.gz")
    truncated = file.read_bytes()[:-9]
    contents = {"no events": b'{"rank": 2}', "deeply nested": b"[" * 100_000}
    file.write_bytes(gzip.compress(contents[damage]) if damage in contents else truncated)
    with pytest.raises(UserError, match="step-00000003 is damaged"):
        list(profile_steps(Run(tmp_path), ranks="", steps=0))
    assert not (folder / "trace.json.gz").exists()


REQUEST_IS_FOLDER = b"a folder in place of the request file"
"""Value of `request` that means: create a folder with the name of the request file."""


def train_with_failing_profiles_on_rank(rank_info: RankInfo, path: Path, request: bytes) -> int:
    """Train with a pending profile request, whose file rank 0 writes. Rank 1 fails to compress its traces."""
    from pipeline.train import profiler

    def fail(*_: Any) -> Any:
        raise OSError("no space left on device")

    if rank_info.rank == 1:
        profiler.gzip = SimpleNamespace(compress=fail)  # type: ignore[assignment]
    if rank_info.rank == 0:
        run = Run.open(path)
        run.accepted_profile_request_file.write_bytes(b'{"steps": 3}')  # a previous attempt crashed during this request
        if request == REQUEST_IS_FOLDER:
            run.profile_file.mkdir()
        else:
            run.profile_file.write_bytes(request)
    with open(path / f"stderr-{rank_info.rank}", "w") as stderr, redirect_stderr(stderr):
        return run_stage_on_rank(rank_info, path, "train")


@pytest.mark.parametrize(
    ("request_content", "profiled_ranks", "profiled_steps"),
    [
        (b'{"ranks": [0, 7], "steps": 2}', [0], 2),
        (b"", [0], 1),
        (b"not json", [0], 1),
        (b'{"ranks": [1]}', [], 1),
        (b'{"steps": 0}', [0], 1),
        (REQUEST_IS_FOLDER, [0], 1),
    ],
    ids=["an unknown rank", "an empty request", "invalid JSON", "only a failing rank", "no steps", "a folder"],
)
def test_a_failed_profile_does_not_stop_the_run(
    four_ranks_run: Run, tmp_path: Path, request_content: bytes, profiled_ranks: list[int], profiled_steps: int
) -> None:
    run = make_run(tmp_path, overrides=("train.steps=5",), data=four_ranks_run.data_dir)
    assert run_ranks(2, train_with_failing_profiles_on_rank, run.path, request_content) == [ExitCode.DONE] * 2
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    expected_profiles = profiled_steps if profiled_ranks else 0
    assert len(lines) == 5 and sum("profile" in line for line in lines) == expected_profiles
    parts_files = sorted(run.profiles_dir.glob("step-*/parts.json"))
    assert len(parts_files) == expected_profiles and not run.profile_file.exists()
    assert run.accepted_profile_request_file.exists() == (request_content == REQUEST_IS_FOLDER)
    for file in parts_files:
        assert sorted(json.loads(file.read_text())) == [str(rank) for rank in profiled_ranks]
    stderr = [(run.path / f"stderr-{rank}").read_text() for rank in range(2)]
    rank_1_is_profiled = b"[0" not in request_content  # the only request with rank 0 in its list has no rank 1
    assert ("the trace failed on rank 1: no space left" in stderr[1]) == rank_1_is_profiled
    is_unreadable = request_content in (b"not json", REQUEST_IS_FOLDER)
    assert ("the request failed on rank 0" in stderr[0]) == is_unreadable
    run.apply_overrides(["train.profile_every=2"])  # the key may change after the run has saved a checkpoint


def train_with_deadline_on_rank(rank_info: RankInfo, path: Path, remaining_s: float) -> int:
    """Train with a deadline that leaves `remaining_s` seconds in addition to a step. A profile takes 0.5 s."""
    from pipeline.train import profiler

    profiler.MIN_DURATION_S = 0.1
    save_trace = profiler.Profiler._save_trace

    def save_slowly(self: profiler.Profiler, *arguments: Any) -> dict[str, Any]:
        time.sleep(0.5)
        return save_trace(self, *arguments)

    profiler.Profiler._save_trace = save_slowly  # type: ignore[method-assign,assignment]
    # Only the deadline of rank 0 expires.
    Deadline.should_stop = lambda self, after_s=0.0: rank_info.rank == 0 and after_s > remaining_s  # type: ignore[method-assign]
    return run_stage_on_rank(rank_info, path, "train")


@pytest.mark.parametrize(("remaining_s", "expected_profiles"), [(0.4, 1), (0.05, 0)])
@pytest.mark.parametrize("is_requested", [False, True])
def test_no_profile_starts_if_no_time_for_a_save_would_remain(
    four_ranks_run: Run, tmp_path: Path, remaining_s: float, expected_profiles: int, is_requested: bool
) -> None:
    """Before the first profile, a duration of `MIN_DURATION_S` (0.1 s) is assumed.

    With 0.4 s left, the first profile starts. It takes longer than 0.4 s, so no second one starts. With 0.05 s left,
    no profile starts. In this case, a request remains for the next attempt.
    """
    overrides = () if is_requested else ("train.profile_every=1",)
    run = make_run(tmp_path, overrides=("train.steps=4", *overrides), data=four_ranks_run.data_dir)
    if is_requested:
        run.profile_file.write_text('{"steps": 5}')
    assert run_ranks(2, train_with_deadline_on_rank, run.path, remaining_s) == [ExitCode.DONE] * 2
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert sum("profile" in line for line in lines) == expected_profiles and len(lines) == 4
    assert run.profile_file.exists() == (is_requested and not expected_profiles)


# -- clocks ----------------------------------------------------------------------------------------------


def compare_clocks_on_rank(rank_info: RankInfo, shift_ns: int) -> tuple[int, int]:
    """Set the clock of rank 1 ahead by `shift_ns`, and compare the clocks of all ranks with that of rank 0.

    Return the maximum error and the offset of this rank's clock, in nanoseconds.
    """
    from pipeline.comm import groups
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train import profiler

    config = tiny_config(3, train={"global_batch": 12})
    world = groups.join_process_group(rank_info, config)
    coordinator = StopCoordinator(StopFlag(), groups.new_control_group())
    layout = resolve_layout(config, 3, 3, 64)
    rank_profiler = profiler.Profiler(Run(Path("/nowhere"), config), layout, world, coordinator)
    if rank_info.rank == 1:
        profiler.time = SimpleNamespace(time_ns=lambda: time.time_ns() + shift_ns)  # type: ignore[assignment]
    return rank_profiler._compare_clocks()


def test_clock_offsets_are_within_the_reported_error() -> None:
    shift_ns = 5_000_000_000
    result_of_rank_0, (error_1, offset_1), (error_2, offset_2) = run_ranks(3, compare_clocks_on_rank, shift_ns)
    assert result_of_rank_0 == (0, 0)
    assert abs(offset_1 + shift_ns) <= error_1 < 50e6
    assert abs(offset_2) <= error_2 < 50e6


def train_with_few_profiles_on_rank(rank_info: RankInfo, path: Path) -> int:
    """Train, and keep only the two newest profiles."""
    from pipeline.train import profiler

    profiler.MAX_STEPS = 2
    return run_stage_on_rank(rank_info, path, "train")


def test_old_profiles_are_removed(four_ranks_run: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=("train.steps=4", "train.profile_every=1"), data=four_ranks_run.data_dir)
    assert run_ranks(2, train_with_few_profiles_on_rank, run.path) == [ExitCode.DONE] * 2
    assert [folder.name for folder in sorted(run.profiles_dir.iterdir())] == ["step-00000003", "step-00000004"]
