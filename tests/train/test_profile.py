"""Tests of profiled steps: the parts of a step, merged traces of several ranks, failures, and clock differences."""

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
from pipeline.train.step_trace import PIPELINE, STEP, STEP_PARTS, Span, average_ranks, divide_step, parse_trace
from tests.support.mpirun import run_mpirun
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, stage_rank
from tests.support.tiny_training import tiny_config

WIDE = 40
KINDS = [("compute", "training"), ("compute", "stream 7"), ("wait", "training"), ("copy", "stream 9"), ("host", "x")]
KINDS += [("communication", group) for group in ("world", "tp", PIPELINE)]


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """Generate spans of all kinds in a step of `WIDE` microseconds."""
    generated = []
    for kind, row in draw(st.lists(st.sampled_from(KINDS), max_size=12)):
        start, end = sorted(draw(st.lists(st.integers(0, WIDE), min_size=2, max_size=2, unique=True)))
        generated.append(Span(kind, row, "x", float(start), float(end)))
    return generated


@given(spans())
def test_parts_of_a_step_equal_those_counted_microsecond_by_microsecond(found: list[Span]) -> None:
    counted: dict[str, float] = dict.fromkeys(STEP_PARTS, 0.0)
    by_group: dict[str, float] = {}
    for moment in range(WIDE):
        now = [span for span in found if span.start <= moment < span.end]
        kinds = {span.kind for span in now}
        groups = {span.row for span in now if span.kind == "communication"}
        if "compute" in kinds and "wait" not in kinds:
            counted["compute"] += 1
            continue
        for group in groups:
            by_group[group] = by_group.get(group, 0) + 1
        if groups - {PIPELINE}:
            counted["communication_exposed"] += 1
        elif "copy" in kinds:
            counted["copy"] += 1
        else:
            counted["bubble" if groups else "idle"] += 1
    result = divide_step(found, float(WIDE))
    assert result.pop("exposed_by_group") == pytest.approx({g: n / 1e6 for g, n in by_group.items()})
    assert result == pytest.approx({part: n / 1e6 for part, n in counted.items()})
    assert sum(result.values()) == pytest.approx(WIDE / 1e6)


def test_a_gpu_trace_is_divided_into_its_parts() -> None:
    """The trace has Kineto's format, as torch.profiler exports it with CUDA: kernels by stream, NCCL's with groups."""

    def make_event(cat: str, name: str, start: float, dur: float, tid: int, group: str | None = None) -> dict[str, Any]:
        more = {"Process Group Description": group, "Collective name": "x"} if group else {"stream": tid}
        return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": 1e6 + start, "dur": dur, "args": more}

    events = [
        {"ph": "X", "cat": "user_annotation", "name": STEP, "pid": 77, "tid": 77, "ts": 1e6, "dur": 1000.0},
        make_event("gpu_user_annotation", STEP, 40, 900, 7),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 1e6, "dur": 1000.0},
        make_event("kernel", "sm90_xmma_gemm_f32", -50, 150, 7),  # starts before the step; 0 to 100 counts
        make_event(
            "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 250, 13, "mesh_dp_shard"
        ),  # 100 to 300 exposed
        make_event("kernel", "elementwise_kernel", 150, 50, 7),  # except 150 to 200, which is hidden
        make_event("gpu_memcpy", "Memcpy HtoD", 290, 110, 9),  # 300 to 400
        make_event("kernel", "ncclDevKernel_SendRecv", 500, 100, 20, "mesh_pp"),
        make_event("kernel", "ncclDevKernel_AllGather_RING_LL", 600, 50, 21, "default_pg"),
        make_event("cuda_runtime", "cudaDeviceSynchronize", 600, 400, 77),
    ]
    begin, wide, found = parse_trace(events)
    assert (begin, wide) == (1e6, 1000.0)
    result = {
        name: one if isinstance(one, dict) else round(1e6 * one) for name, one in divide_step(found, wide).items()
    }
    groups = {name: round(1e6 * one) for name, one in result.pop("exposed_by_group").items()}
    assert groups == {"dp_shard": 150, "pp": 100, "world": 50}
    assert result == {"compute": 150, "communication_exposed": 200, "copy": 100, "bubble": 100, "idle": 450}
    assert {span.row for span in found} >= {"stream 7", "stream 9", "training", "dp_shard"}


def test_a_trace_without_its_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="step"):
        parse_trace([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}])


def test_average_ranks_divides_by_the_number_of_all_ranks() -> None:
    found = average_ranks([{"a": 1.0, "by": {"x": 2.0}}, {"a": 3.0, "by": {"y": 1.0}}])
    assert found == {"a": 2.0, "by": {"x": 1.0, "y": 0.5}}


# -- known times -----------------------------------------------------------------------------------------


def known_rank(rank_info: RankInfo, folder: Path) -> tuple[Any, Any]:
    """Profile a step over gloo whose parts have known durations. Return the measured and the known parts."""
    from pipeline.comm import groups
    from tests.support import profiled_step

    groups.join_process_group(rank_info, tiny_config(2))
    return profiled_step.run_profiled_step(folder, rank_info.rank, groups.new_control_group())


def test_parts_over_gloo_have_the_known_durations(tmp_path: Path) -> None:
    from tests.support.profiled_step import COMPUTE_S, check_profile

    ranks = run_ranks(2, known_rank, tmp_path)
    for found, known in ranks:
        check_profile(found, known)
    assert ranks[0][1]["compute"] >= COMPUTE_S and ranks[0][0]["communication_exposed"] > 0.2, (
        "a part of the communication is exposed"
    )
    assert ranks[1][0]["idle"] > 1.0, "the late rank does not wait for its peer"


def test_parts_over_mpi_have_the_known_durations() -> None:
    done = run_mpirun(2, "tests.support.mpi_programs", "profile")
    assert done.stdout.count("good") == 2, done.stdout


# -- whole trainings -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train with two pipeline-parallel stages of two ranks each and two profiled steps. Return the run."""
    layout = ("parallel.pipeline=2", "stages.train.tasks_per_node=4", "train.profile_every=3")
    run = make_run(tmp_path_factory.mktemp("four"), overrides=(*layout, "train.steps=7"))
    assert run_ranks(4, stage_rank, run.path, "train") == [ExitCode.DONE] * 4
    return run


def test_metrics_have_the_parts_of_profiled_steps(four: Run) -> None:
    lines = [json.loads(line) for line in four.metrics_file.read_text().splitlines()]
    assert [line["step"] for line in lines if "profile" in line] == [3, 6]
    for line in lines:
        if "profile" in line:
            profile = line["profile"]
            assert min(profile[part] for part in STEP_PARTS) >= 0 and profile["compute"] > 0 and profile["bubble"] > 0
            assert PIPELINE in profile["exposed_by_group"] and line["profile_s"] > 0
            took = line["step_time_s"] - line["profile_s"]
            assert 0.1 * took < sum(profile[part] for part in STEP_PARTS) < took + 0.02


def test_the_traces_of_four_ranks_are_merged(four: Run) -> None:
    shutil.copy(
        four.profiles_dir / "step-00000006/rank-3.json.gz", four.profiles_dir / "step-00000006/rank-4.json.gz"
    )  # a rank of an earlier layout, whose trace is ignored
    (_, of_step) = folders = sorted(four.profiles_dir.iterdir())
    assert [folder.name for folder in folders] == ["step-00000003", "step-00000006"]
    path, error_ms = merge_traces(of_step, range(4))
    assert 0 < error_ms < 50
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = {(e["pid"], e["name"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    processes = {pid: name for (pid, kind, _), name in named.items() if kind == "process_name"}
    assert sorted(processes) == [1, 2, 3, 4] and processes[3].startswith("rank 2 on ")
    assert "pipeline 1, data 0, tensor 0" in processes[3]
    whole = [e for e in events if e["ph"] == "X"]
    threads = {tid for pid, kind, tid in named if kind == "thread_name"}
    assert {e["tid"] for e in whole} == threads, "each row has a name"
    assert len({(e["pid"], e["tid"]) for e in whole}) == len(threads), "each row belongs to one rank"
    for row in threads:  # a viewer can only draw spans that are nested or do not overlap
        row_spans = sorted((e["ts"], -e["dur"]) for e in whole if e["tid"] == row)
        ends: list[float] = []
        for start, minus in row_spans:
            while ends and ends[-1] <= start + 0.002:
                ends.pop()
            assert not ends or start - minus <= ends[-1] + 0.002
            ends.append(start - minus)
    # a collective runs on all of its ranks at the same time, so its spans overlap
    spent: dict[int, list[tuple[float, float]]] = {}
    for event in whole:
        if event["name"] == "gloo:all_reduce" and named[event["pid"], "thread_name", event["tid"]].endswith("world"):
            spent.setdefault(event["pid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert {len(found) for found in spent.values()} == {len(spent[1])} and len(spent) == 4
    for same in zip(*(sorted(found) for found in spent.values()), strict=True):
        assert max(start for start, _ in same) < min(end for _, end in same) + 1000 * error_ms


def test_profiling_does_not_change_the_result(four: Run, tmp_path: Path) -> None:
    layout = ("parallel.pipeline=2", "stages.train.tasks_per_node=4", "train.steps=7")
    plain = make_run(tmp_path, overrides=layout, data=four.data_dir)
    assert run_ranks(4, stage_rank, plain.path, "train") == [ExitCode.DONE] * 4
    assert compute_run_digest(plain) == compute_run_digest(four) and not plain.profiles_dir.exists()


def test_the_profile_command_lists_earlier_profiles(four: Run) -> None:
    lines = list(profile_steps(four, "", 0))
    assert len(lines) == 4 and lines[0].startswith("step-00000003: ") and "mean of 4 ranks" in lines[0]
    assert sum(int(share.split()[-2]) for share in lines[0].split("(")[0].split(",")) in range(97, 104)
    with pytest.raises(UserError, match="--steps 0"):
        next(profile_steps(four, "", 1))
    with pytest.raises(UserError, match="--ranks 1;2"):
        next(profile_steps(four, "1;2", 1))
    assert not four.profile_file.exists()


@pytest.mark.parametrize("damage", ["torn", "other", "parts", "deep"])
def test_damaged_profiles_are_user_errors(four: Run, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "profiles/step-00000003"
    shutil.copytree(four.profiles_dir / "step-00000003", folder, ignore=shutil.ignore_patterns("trace*"))
    file = folder / ("parts.json" if damage == "parts" else "rank-2.json.gz")
    torn = file.read_bytes()[:-9]
    texts = {"other": b'{"rank": 2}', "deep": b"[" * 100_000}
    file.write_bytes(gzip.compress(texts[damage]) if damage in texts else torn)
    with pytest.raises(UserError, match="step-00000003 is damaged"):
        list(profile_steps(Run(tmp_path), "", 0))
    assert not (folder / "trace.json.gz").exists() or damage == "parts"


FOLDER = b"a folder in place of the request file"


def failing_rank(rank_info: RankInfo, path: Path, request: bytes) -> int:
    """Train with a pending profile request. Rank 1 cannot compress its traces, and rank 0 writes the request."""
    from pipeline.train import profiler

    def fail(*_: Any) -> Any:
        raise OSError("no space left on device")

    if rank_info.rank == 1:
        profiler.gzip = SimpleNamespace(compress=fail)  # type: ignore[assignment]
    if rank_info.rank == 0:
        run = Run.open(path)
        run.profile_taken_file.write_bytes(b'{"steps": 3}')  # a previous attempt crashed during this request
        if request == FOLDER:
            run.profile_file.mkdir()
        else:
            run.profile_file.write_bytes(request)
    with open(path / f"stderr-{rank_info.rank}", "w") as stderr, redirect_stderr(stderr):
        return stage_rank(rank_info, path, "train")


@pytest.mark.parametrize(
    ("request_", "ranks", "steps"),
    [
        (b'{"ranks": [0, 7], "steps": 2}', [0], 2),
        (b"", [0], 1),
        (b"not json", [0], 1),
        (b'{"ranks": [1]}', [], 1),
        (b'{"steps": 0}', [0], 1),
        (FOLDER, [0], 1),
    ],
    ids=["ranks", "empty", "damaged", "fails", "none", "folder"],
)
def test_a_failed_profile_does_not_stop_the_training(
    four: Run, tmp_path: Path, request_: bytes, ranks: list[int], steps: int
) -> None:
    run = make_run(tmp_path, overrides=("train.steps=5",), data=four.data_dir)
    assert run_ranks(2, failing_rank, run.path, request_) == [ExitCode.DONE] * 2
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert len(lines) == 5 and sum("profile" in line for line in lines) == (steps if ranks else 0)
    folders = sorted(run.profiles_dir.glob("step-*/parts.json"))
    assert len(folders) == (steps if ranks else 0) and not run.profile_file.exists()
    assert run.profile_taken_file.exists() == (request_ == FOLDER)
    for folder in folders:
        assert sorted(json.loads(folder.read_text())) == [str(rank) for rank in ranks]
    stderr = [(run.path / f"stderr-{rank}").read_text() for rank in range(2)]
    assert ("the trace failed on rank 1: no space left" in stderr[1]) == (b"[0" not in request_)
    assert ("the request failed on rank 0" in stderr[0]) == (request_ in (b"not json", FOLDER))
    run.apply_overrides(["train.profile_every=2"])  # the key may change after the training has saved a checkpoint


def late_rank(rank_info: RankInfo, path: Path, room_s: float) -> int:
    """Train with a deadline that leaves `room_s` seconds for anything but steps; a profile takes half a second."""
    from pipeline.train import profiler

    profiler.MIN_DURATION_S = 0.1
    save_trace = profiler.Profiler._save_trace

    def save_slowly(self: profiler.Profiler, *more: Any) -> dict[str, Any]:
        time.sleep(0.5)
        return save_trace(self, *more)

    profiler.Profiler._save_trace = save_slowly  # type: ignore[method-assign,assignment]
    # only the deadline of rank 0 expires
    Deadline.should_stop = lambda self, after_s=0.0: rank_info.rank == 0 and after_s > room_s  # type: ignore[method-assign]
    return stage_rank(rank_info, path, "train")


@pytest.mark.parametrize(("room_s", "profiled"), [(0.4, 1), (0.05, 0)])
@pytest.mark.parametrize("is_requested", [False, True])
def test_no_profile_starts_if_no_time_for_a_save_would_remain(
    four: Run, tmp_path: Path, room_s: float, profiled: int, is_requested: bool
) -> None:
    """The duration of the first profile is unknown, that of the second is. A request waits for the next attempt."""
    every = () if is_requested else ("train.profile_every=1",)
    run = make_run(tmp_path, overrides=("train.steps=4", *every), data=four.data_dir)
    if is_requested:
        run.profile_file.write_text('{"steps": 5}')
    assert run_ranks(2, late_rank, run.path, room_s) == [ExitCode.DONE] * 2
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert sum("profile" in line for line in lines) == profiled and len(lines) == 4
    assert run.profile_file.exists() == (is_requested and not profiled)


# -- clocks ----------------------------------------------------------------------------------------------


def shifted_rank(rank_info: RankInfo, shift_ns: int) -> tuple[int, int]:
    """Return offset and error in nanoseconds of this rank's clock, if the clock of rank 1 is ahead by `shift_ns`."""
    from pipeline.comm import groups
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train import profiler

    config = tiny_config(3, train={"global_batch": 12})
    world = groups.join_process_group(rank_info, config)
    agreement = StopCoordinator(StopFlag(), groups.new_control_group())
    created = profiler.Profiler(Run(Path("/nowhere"), config), resolve_layout(config, 3, 3, 64), world, agreement)
    if rank_info.rank == 1:
        profiler.time = SimpleNamespace(time_ns=lambda: time.time_ns() + shift_ns)  # type: ignore[assignment]
    return created._compare_clocks()


def test_clock_offsets_are_within_the_reported_error() -> None:
    shift = 5_000_000_000
    (zero, offset), (error, found), (other, small) = run_ranks(3, shifted_rank, shift)
    assert (zero, offset) == (0, 0)
    assert abs(found + shift) <= error < 50e6 and abs(small) <= other < 50e6


def few_profiles_rank(rank_info: RankInfo, path: Path) -> int:
    """Train, and keep only the two newest profiles."""
    from pipeline.train import profiler

    profiler.MAX_STEPS = 2
    return stage_rank(rank_info, path, "train")


def test_old_profiles_are_removed(four: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=("train.steps=4", "train.profile_every=1"), data=four.data_dir)
    assert run_ranks(2, few_profiles_rank, run.path) == [ExitCode.DONE] * 2
    assert [folder.name for folder in sorted(run.profiles_dir.iterdir())] == ["step-00000003", "step-00000004"]
