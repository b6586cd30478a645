"""Tests of bad steps, deadlines, save requests, reports of hangs, and the health check of nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.data.sample_order import skip_excluded
from pipeline.resilience.guard import BadStepGuard
from pipeline.run.code import CODE_ROOT as ROOT
from pipeline.run.decisions import merge_ranges
from pipeline.run.directory import Run
from slurm.supervise.attempt_end import describe_hung_rank
from tests.support.events import read_event_lines
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank
from tests.train.test_exact import create_run, read_steps

QUICKSTART = ROOT / "configs/quickstart.yaml"
position_ranges = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 30)), max_size=6)
"""Lists of ranges of excluded positions: (first position, count)."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a tiny run for which the prepare and shard stages are done."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def list_included_positions(excluded: list[tuple[int, int]]) -> list[int]:
    """Return the positions from 0 to 999 that are in none of the excluded ranges."""
    excluded_positions = {position for start, count in excluded for position in range(start, start + count)}
    return [position for position in range(1000) if position not in excluded_positions]


@settings(deadline=None, max_examples=200)
@given(position_ranges, st.integers(0, 100))
def test_skip_excluded_returns_the_position_of_the_next_sample(
    excluded: list[tuple[int, int]], samples_consumed: int
) -> None:
    """After n consumed samples, the next sample is at the n-th position (from 0) that is not excluded."""
    expected_position = list_included_positions(excluded)[samples_consumed]
    assert skip_excluded(samples_consumed, merge_ranges(excluded)) == expected_position


@settings(deadline=None, max_examples=50)
@given(position_ranges, st.integers(0, 5), st.sampled_from([1, 2, 4]))
def test_sampler_skips_excluded_ranges(excluded: list[tuple[int, int]], step: int, ranks: int) -> None:
    """The samples that all ranks together read in a step must be those at the next positions that are not excluded."""
    import numpy as np

    from pipeline.data.sample_order import GlobalOrderSampler, compute_indices

    class Dataset:
        """A dataset of 97 samples of the same length."""

        lengths = None
        needs_positions = False

        def __len__(self) -> int:
            return 97

    dataset: Any = Dataset()
    indices: list[int] = []
    for rank in range(ranks):
        sampler = GlobalOrderSampler(
            dataset, global_batch=8, seed=3, samples_consumed=8 * step, excluded_ranges=merge_ranges(excluded),
            num_replicas=ranks, rank=rank,
        )  # fmt: skip
        indices += next(iter(sampler)).tolist()
    positions = list_included_positions(excluded)[8 * step : 8 * step + 8]
    assert indices == compute_indices(3, np.array(positions), 97).tolist()


def train_with_nan_gradients(rank_info: RankInfo, path: Path, steps: list[int], until_excluded: bool) -> int:
    """Run the train stage on this rank, with NaN gradients on rank 1 in `steps`. Return the exit code.

    If `until_excluded`, gradients are NaN only as long as the run excludes no samples.
    """
    import pipeline.train.trainer as module

    original_step = module.Trainer.step

    def step_with_nan(self: Any, number: int, tokens: Any) -> Any:
        if rank_info.rank == 1 and number in steps and not (until_excluded and self.guard.excluded_ranges):
            hook = next(iter(self.engine.model.parameters())).register_hook(lambda grad: grad * float("nan"))
            try:
                return original_step(self, number, tokens)
            finally:
                hook.remove()
        return original_step(self, number, tokens)

    setattr(module.Trainer, "step", step_with_nan)  # noqa: B010
    from pipeline.run.failure import explain_error

    try:
        return run_stage_on_rank(rank_info, path, "train")
    except BaseException as error:
        return int(explain_error(error)[0])


@pytest.mark.story
def test_all_ranks_skip_a_bad_step_and_a_rerun_repeats_the_decision(tmp_path: Path, data: Path) -> None:
    """The rerun has normal gradients, but reads the decisions of the first run, so it must skip the same steps."""
    run = create_run(tmp_path, "bad", data)
    assert set(run_ranks(2, train_with_nan_gradients, run.path, [9, 10], False)) == {ExitCode.DONE}
    metrics = list(read_jsonl(run.metrics_file))
    assert [line["step"] for line in metrics if "skipped" in line] == [9, 10]
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    # a step has 8 samples, so step 9 begins at position 8 * 8 and step 10 at position 9 * 8
    assert [decision["position"] for decision in read_jsonl(run.decisions_file)] == [64, 72]
    rerun = create_run(tmp_path, "rerun", data)
    shutil.copy(run.decisions_file, rerun.decisions_file)
    assert set(run_ranks(2, run_stage_on_rank, rerun.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(rerun) == compute_run_digest(run)
    undisturbed = create_run(tmp_path, "undisturbed", data)
    run_ranks(2, run_stage_on_rank, undisturbed.path, "train")
    assert compute_run_digest(undisturbed) != compute_run_digest(run), "skipping the steps must change the weights"


@pytest.mark.story
def test_too_many_consecutive_bad_steps_exclude_their_samples(tmp_path: Path, data: Path) -> None:
    """Two bad steps may be skipped. After the third one, the run fails and excludes the 24 samples of these steps.

    The next attempt succeeds without these samples.
    """
    run = create_run(tmp_path, "consecutive", data, "recovery.skip_bad_steps=2")
    bad_steps = [13, 14, 15]
    assert set(run_ranks(2, train_with_nan_gradients, run.path, bad_steps, True)) == {ExitCode.NON_FINITE}
    exclusions = [decision for decision in read_jsonl(run.decisions_file) if decision["decision"] == "leave_out"]
    # step 13 begins at position 12 * 8
    assert [(decision["position"], decision["samples"]) for decision in exclusions] == [(96, 24)]
    assert set(run_ranks(2, train_with_nan_gradients, run.path, bad_steps, True)) == {ExitCode.DONE}
    assert [step for step, *_ in read_steps(run)] == list(range(1, len(read_steps(run)) + 1))
    rerun = create_run(tmp_path, "rerun", data)
    shutil.copy(run.decisions_file, rerun.decisions_file)
    assert set(run_ranks(2, run_stage_on_rank, rerun.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(rerun) == compute_run_digest(run) and read_steps(rerun) == read_steps(run)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(1.0, 2.0), min_size=20, max_size=130), st.floats(-3.0, 12.0))
def test_loss_far_above_the_last_hundred_losses_is_bad(losses: list[float], deviations: float) -> None:
    """The limit is 5 standard deviations above the mean. The tested loss is `deviations` of them above the mean."""
    import statistics

    config = load_config(QUICKSTART, ["recovery.spike_deviations=5"])
    run = SimpleNamespace(config=config, decisions_file=Path(os.devnull), event=lambda *_, **__: None)
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    guard = BadStepGuard(run, decisions=[], metrics=metrics, writes_decisions=False)  # type: ignore[arg-type]
    mean = statistics.fmean(losses[-100:])
    deviation = statistics.pstdev(losses[-100:])
    if abs(deviations - 5) < 1e-6 or deviation < 1e-6:  # too close to the limit for rounding errors
        return
    reason = guard.check_step(len(losses) + 1, mean + deviations * deviation, grad_norm=1.0)
    assert (reason is not None) == (deviations > 5)
    assert reason is None or f"{deviations:.1f} deviations above" in reason
    assert bool(guard.consecutive_bad_steps) == (deviations > 5)


def test_loss_spikes_are_detected_only_after_20_losses() -> None:
    """19 losses are not enough to compute a deviation."""
    config = load_config(QUICKSTART, ["recovery.spike_deviations=5"])
    run = SimpleNamespace(config=config)
    metrics = [{"step": step, "loss": 1.0 + step / 100} for step in range(1, 20)]
    guard = BadStepGuard(run, decisions=[], metrics=metrics, writes_decisions=False)  # type: ignore[arg-type]
    assert guard.check_step(20, loss=1000.0, grad_norm=1.0) is None


def test_fp16_steps_are_bad_if_gradients_are_nan_at_loss_scale_1(tmp_path: Path, data: Path) -> None:
    """Gradients are NaN from step 5. At first, each such step only halves the loss scale."""
    run = create_run(tmp_path, "half", data, "train.precision=fp16", "recovery.skip_bad_steps=2")
    steps = list(range(5, 61))
    assert set(run_ranks(2, train_with_nan_gradients, run.path, steps, False)) == {ExitCode.NON_FINITE}
    decisions = [(decision["decision"], decision["step"]) for decision in read_jsonl(run.decisions_file)]
    expected = [("skip", 21), ("skip", 22), ("leave_out", 23)]
    assert decisions == expected, "steps 5 to 20 must halve the loss scale from 2**16 to 1"


def train_near_deadline(rank_info: RankInfo, path: Path, time_left_s: float | None, save_s: float) -> int:
    """Run the train stage on a rank of a job that must stop. Return the exit code.

    Args:
        rank_info: this rank.
        path: the run directory.
        time_left_s: seconds until the time limit of the job; None: rank 1 receives SIGTERM in step 20 instead.
        save_s: seconds that the deadline expects for a save, at least.
    """
    import pipeline.train.trainer as module

    if time_left_s is not None:
        os.environ["SLUICE_TIME_LEFT"] = str(time_left_s)
    original_step = module.Trainer.step

    def slow_step(self: Any, number: int, tokens: Any) -> Any:
        time.sleep(0.1 if time_left_s is None else 1.2)
        if rank_info.rank == 0:  # only rank 0 measures the duration of saves
            self.deadline.expected_save_s = max(self.deadline.expected_save_s, save_s)
        if time_left_s is None and number == 20 and rank_info.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original_step(self, number, tokens)

    setattr(module.Trainer, "step", slow_step)  # noqa: B010
    return run_stage_on_rank(rank_info, path, "train")


@pytest.mark.story
def test_ranks_stop_at_the_deadline_and_save_only_if_there_is_time(tmp_path: Path, data: Path) -> None:
    """In the first attempt, a save would take 60 s, but the grace period is 5 s. In the second, 25 s are enough."""
    run = create_run(tmp_path, "deadline", data, "recovery.grace_s=5")
    assert set(run_ranks(2, train_near_deadline, run.path, None, 60.0)) == {ExitCode.STOPPED}
    skip_events = read_event_lines(run, "train", "save_skipped")
    assert len(skip_events) == 1 and "too late" in skip_events[0]["reason"]
    assert [event["step"] for event in read_event_lines(run, "train", "saved")] == [7, 14]
    assert set(run_ranks(2, train_near_deadline, run.path, 25.0, 0.0)) == {ExitCode.STOPPED}
    stop_event = read_event_lines(run, "train", "stop_requested")[-1]
    assert stop_event["signal"] == "time limit"
    saved_steps = [event["step"] for event in read_event_lines(run, "train", "saved")]
    assert saved_steps[-1] == stop_event["step"] == read_steps(run)[-1][0] > 14
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    undisturbed = create_run(tmp_path, "undisturbed", data)
    run_ranks(2, run_stage_on_rank, undisturbed.path, "train")
    assert compute_run_digest(run) == compute_run_digest(undisturbed)


def test_save_file_requests_one_checkpoint(tmp_path: Path, data: Path) -> None:
    """Without the request, the run would save only its last step."""
    run = create_run(tmp_path, "requested", data, "checkpoint.every_steps=1000")
    run.save_file.touch()
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    saved_steps = [event["step"] for event in read_event_lines(run, "train", "saved")]
    assert len(saved_steps) == 2 and saved_steps[0] < saved_steps[1] and not run.save_file.exists()


def make_hang_report(rank: int, *, phase_number: int, phase: str) -> dict[str, Any]:
    """Return the content of `hang-rank-N.json` for a hang in step 5. Phases are numbered in the order of a step."""
    operation = {"operation": "gloo:all_reduce", "number": 7}
    return {
        "rank": rank, "host": f"n{rank}", "step": 5, "number": phase_number, "phase": phase,
        "stacks": "stacks of threads", "collectives": [operation],
    }  # fmt: skip


def test_describe_hung_rank_names_the_rank_behind_the_others() -> None:
    """The rank in the earliest phase holds up the others. Without such a rank, all ranks wait in the same phase."""
    hosts = ["n0", "n1", "n2"]
    reports = [
        make_hang_report(0, phase_number=3, phase="reduce"), make_hang_report(1, phase_number=1, phase="forward"),
        make_hang_report(2, phase_number=3, phase="reduce"),
    ]  # fmt: skip
    rank, host, message = describe_hung_rank(reports, hosts, ()).values()
    assert (rank, host) == (1, "n1")
    assert "'forward' of step 5" in message and "stacks of threads" in message and "number 7" in message

    rank, host, message = describe_hung_rank([reports[0], reports[2]], hosts, ()).values()
    assert (rank, host) == (1, "n1"), "a rank without a report must count as behind the others"
    assert "rank 1 on n1" in message and "step 5" in message

    equal_reports = [make_hang_report(rank, phase_number=2, phase="reduce") for rank in range(3)]
    rank, _, message = describe_hung_rank(equal_reports, hosts, ()).values()
    assert "all ranks" in message and "'reduce' of step 5" in message


def evaluate_with_hang(rank_info: RankInfo, path: Path) -> int:
    """Run the evaluate stage on this rank. Rank 1 hangs in its second batch. Return the exit code."""
    from pipeline.evaluate import evaluator
    from pipeline.resilience import watchdog

    original_compute_sums = evaluator.TextHeldOut.compute_sums
    call_count = 0
    # the watchdog ends a batch after 4 s
    setattr(watchdog.Watchdog, "limit_s", lambda self, phase: 4.0 if phase == "batch" else 600.0)  # noqa: B010

    def hanging_compute_sums(self: Any, *arguments: Any) -> Any:
        nonlocal call_count
        call_count += 1
        if rank_info.rank == 1 and call_count == 2:
            time.sleep(600)
        return original_compute_sums(self, *arguments)

    setattr(evaluator.TextHeldOut, "compute_sums", hanging_compute_sums)  # noqa: B010
    return run_stage_on_rank(rank_info, path, "evaluate")


@pytest.mark.story
def test_hang_in_an_evaluation_writes_reports_with_stacks(tmp_path: Path, data: Path) -> None:
    run = create_run(tmp_path, "hang", data, "train.steps=7")
    run_ranks(2, run_stage_on_rank, run.path, "train")
    Ranks(2, evaluate_with_hang, run.path).wait_for_results(failures_expected=True)
    folder = run.stage_dir("evaluate")
    report = json.loads((folder / "hang-rank-1.json").read_text())
    assert report["phase"] == "batch" and "hanging_compute_sums" in report["stacks"]
    assert json.loads((folder / "error-rank-1.json").read_text())["code"] == ExitCode.HANG


def check_broken_node(rank_info: RankInfo, path: Path, broken: str) -> str:
    """Run the health check of this rank while something is broken.

    Args:
        rank_info: this rank.
        path: the run directory.
        broken: `file system` (reads return wrong data), `device` (wrong results), `port` (in use), or `rank` (rank 2
            sleeps).

    Returns:
        Name of the exit code, code and message of the error; "passed" without an error; "slept" for the rank that
        sleeps.
    """
    import torch

    from pipeline.base.errors import UserError
    from pipeline.comm import groups
    from pipeline.resilience import health

    run = Run.open(path)
    try:
        if broken == "file system":
            original_read_bytes = Path.read_bytes
            Path.read_bytes = lambda self: original_read_bytes(self)[::-1]  # type: ignore[method-assign]
            health.check_this_rank(run, rank_info, torch.device("cpu"))
        elif broken == "device":
            torch.Tensor.__matmul__ = lambda self, other: torch.zeros(2, 2)  # type: ignore[method-assign]
            health.check_this_rank(run, rank_info, torch.device("cpu"))
        elif broken == "port":
            with socket.socket() as other_server:
                other_server.bind(("0.0.0.0", 0))
                other_server.listen()
                port = other_server.getsockname()[1]
                groups.join_process_group(replace(rank_info, world_size=2, master_port=port), run.config)
        else:
            world = groups.join_process_group(rank_info, run.config)
            from datetime import timedelta

            health.BARRIER_TIMEOUT = timedelta(seconds=2)
            group = groups.new_control_group(timedelta(seconds=30))
            hosts = groups.all_gather_results(group, health.gethostname)
            if rank_info.rank == 2:
                time.sleep(6)
                return "slept"
            health.check_all_ranks(world, group, hosts)
    except UserError as error:
        return f"{error.exit_code.name} {error.code}: {error}"
    return "passed"


@pytest.mark.story
def test_health_check_reports_what_is_broken(tmp_path: Path, data: Path) -> None:
    run = create_run(tmp_path, "broken", data)
    host = os.uname().nodename
    assert f"BAD_NODE node.wrong_data: {host}" in run_ranks(1, check_broken_node, run.path, "file system")[0]
    assert "node.wrong_result" in run_ranks(1, check_broken_node, run.path, "device")[0]
    assert "node.port_in_use" in run_ranks(1, check_broken_node, run.path, "port")[0]
    results = run_ranks(3, check_broken_node, run.path, "rank")
    assert results[0].startswith("BAD_NODE node.not_responding") and "rank 2" in results[0], results
    assert results[2] == "slept"
