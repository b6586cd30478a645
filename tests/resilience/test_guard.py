"""Bad numbers, the job's own clock, requests by file, blame for a hang, the check at the start; without Slurm."""

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
from pipeline.resilience.guard import BadStepGuard, merge_ranges
from pipeline.run.code import CODE_ROOT as ROOT
from pipeline.run.directory import Run
from slurm.supervise.attempt_end import describe_hung_rank
from tests.support.events import read_event_lines
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny import compute_run_digest, make_run, stage_rank
from tests.train.test_exact import new_run, read_steps

QUICKSTART = ROOT / "configs/quickstart.yaml"
ranges = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 30)), max_size=6)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


@settings(deadline=None, max_examples=200)
@given(ranges, st.integers(0, 100))
def test_positions_are_those_of_a_list_with_the_ranges_deleted(left_out: list[tuple[int, int]], consumed: int) -> None:
    gone = {p for start, count in left_out for p in range(start, start + count)}
    kept = [p for p in range(1000) if p not in gone]
    assert skip_excluded(consumed, merge_ranges(left_out)) == kept[consumed]


@settings(deadline=None, max_examples=50)
@given(ranges, st.integers(0, 5), st.sampled_from([1, 2, 4]))
def test_the_sampler_jumps_over_them(left_out: list[tuple[int, int]], step: int, ranks: int) -> None:
    import numpy as np

    from pipeline.data.sample_order import GlobalOrderSampler, compute_indices

    class Numbers:
        """97 samples of one length."""

        lengths = None
        needs_positions = False

        def __len__(self) -> int:
            return 97

    dataset: Any = Numbers()
    gone = {p for start, count in left_out for p in range(start, start + count)}
    kept = [p for p in range(1000) if p not in gone]
    found: list[int] = []
    for rank in range(ranks):
        sampler = GlobalOrderSampler(
            dataset, global_batch=8, seed=3, samples_consumed=8 * step, excluded_ranges=merge_ranges(left_out),
            num_replicas=ranks, rank=rank,
        )  # fmt: skip
        found += next(iter(sampler)).tolist()
    expected = compute_indices(3, np.array(kept[8 * step : 8 * step + 8]), 97)
    assert found == expected.tolist()


def poisoned_rank(rank_info: RankInfo, path: Path, steps: list[int], sticky: bool) -> int:
    """A rank of a training in which rank 1's loss is no number in some steps (`sticky`: for samples that it knows)."""
    import pipeline.train.trainer as module

    real = module.Trainer.step

    def step(self: Any, number: int, tokens: Any) -> Any:
        if rank_info.rank == 1 and number in steps and (not sticky or not self.guard.excluded_ranges):
            hook = next(iter(self.engine.model.parameters())).register_hook(lambda grad: grad * float("nan"))
            try:
                return real(self, number, tokens)
            finally:
                hook.remove()
        return real(self, number, tokens)

    setattr(module.Trainer, "step", step)  # noqa: B010
    from pipeline.run.failure import explain_error

    try:
        return stage_rank(rank_info, path, "train")
    except BaseException as error:
        return int(explain_error(error)[0])


def test_a_bad_step_is_left_out_by_all_and_a_rerun_repeats_it(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "bad", data)
    assert set(run_ranks(2, poisoned_rank, run.path, [9, 10], False)) == {ExitCode.DONE}
    known = list(read_jsonl(run.metrics_file))
    assert [line["step"] for line in known if "skipped" in line] == [9, 10]
    assert [line["step"] for line in known] == list(range(1, len(known) + 1))
    assert [d["position"] for d in read_jsonl(run.decisions_file)] == [64, 72]
    again = new_run(tmp_path, "again", data)
    shutil.copy(run.decisions_file, again.decisions_file)
    assert set(run_ranks(2, stage_rank, again.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(again) == compute_run_digest(run)
    calm = new_run(tmp_path, "calm", data)
    run_ranks(2, stage_rank, calm.path, "train")
    assert compute_run_digest(calm) != compute_run_digest(run), "the steps were really left out"


@pytest.mark.story
def test_too_many_in_a_row_return_and_leave_the_samples_out(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "row", data, "recovery.skip_bad_steps=2")
    assert set(run_ranks(2, poisoned_rank, run.path, [13, 14, 15], True)) == {ExitCode.NON_FINITE}
    left_out = [d for d in read_jsonl(run.decisions_file) if d["decision"] == "leave_out"]
    assert [(d["position"], d["samples"]) for d in left_out] == [(96, 24)]
    assert set(run_ranks(2, poisoned_rank, run.path, [13, 14, 15], True)) == {ExitCode.DONE}
    assert [step for step, *_ in read_steps(run)] == list(range(1, len(read_steps(run)) + 1))
    again = new_run(tmp_path, "again", data)
    shutil.copy(run.decisions_file, again.decisions_file)
    assert set(run_ranks(2, stage_rank, again.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(again) == compute_run_digest(run) and read_steps(again) == read_steps(run)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(1.0, 2.0), min_size=20, max_size=130), st.floats(-3.0, 12.0))
def test_a_spike_is_a_loss_far_above_the_last_hundred(losses: list[float], deviations: float) -> None:
    import statistics

    config = load_config(QUICKSTART, ["recovery.spike_deviations=5"])
    run = SimpleNamespace(config=config, decisions_file=Path(os.devnull), event=lambda *_, **__: None)
    metrics = [{"step": i, "loss": x} for i, x in enumerate(losses, 1)]
    guard = BadStepGuard(run, decisions=[], metrics=metrics, writes=False)  # type: ignore[arg-type]
    mean, deviation = statistics.fmean(losses[-100:]), statistics.pstdev(losses[-100:])
    if abs(deviations - 5) < 1e-6 or deviation < 1e-6:
        return
    reason = guard.check_step(len(losses) + 1, mean + deviations * deviation, 1.0)
    assert (reason is not None) == (deviations > 5)
    assert reason is None or f"{deviations:.1f} deviations above" in reason
    assert bool(guard.consecutive_bad_steps) == (deviations > 5)


def test_few_losses_know_no_spike() -> None:
    config = load_config(QUICKSTART, ["recovery.spike_deviations=5"])
    run = SimpleNamespace(config=config)
    metrics = [{"step": i, "loss": 1.0 + i / 100} for i in range(1, 20)]
    guard = BadStepGuard(run, decisions=[], metrics=metrics, writes=False)  # type: ignore[arg-type]
    assert guard.check_step(20, 1000.0, 1.0) is None


def test_fp16_gradients_that_stay_bad_are_no_overflow(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "half", data, "train.precision=fp16", "recovery.skip_bad_steps=2")
    assert set(run_ranks(2, poisoned_rank, run.path, list(range(5, 61)), False)) == {ExitCode.NON_FINITE}
    judged = [(d["decision"], d["step"]) for d in read_jsonl(run.decisions_file)]
    assert judged == [("skip", 21), ("skip", 22), ("leave_out", 23)], "16 halvings of the scale come first"


def clocked_rank(rank_info: RankInfo, path: Path, left_s: float | None, save_s: float) -> int:
    """A rank whose job has `left_s` seconds left; without, it is told to leave in step 20, and saves take `save_s`."""
    import pipeline.train.trainer as module

    if left_s is not None:
        os.environ["SLUICE_TIME_LEFT"] = str(left_s)
    real = module.Trainer.step

    def step(self: Any, number: int, tokens: Any) -> Any:
        time.sleep(0.1 if left_s is None else 1.2)
        if rank_info.rank == 0:  # who measures saves; the signal comes to the other
            self.deadline.expected_save_s = max(self.deadline.expected_save_s, save_s)
        if left_s is None and number == 20 and rank_info.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, number, tokens)

    setattr(module.Trainer, "step", step)  # noqa: B010
    return stage_rank(rank_info, path, "train")


@pytest.mark.story
def test_ranks_stop_by_their_own_clock_and_save_where_there_is_time(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "clock", data, "recovery.grace_s=5")
    assert set(run_ranks(2, clocked_rank, run.path, None, 60.0)) == {ExitCode.STOPPED}
    skipped = [e for e in read_event_lines(run, "train") if e["event"] == "save_skipped"]
    assert len(skipped) == 1 and "too late" in skipped[0]["reason"]
    assert [e["step"] for e in read_event_lines(run, "train") if e["event"] == "saved"] == [7, 14]
    assert set(run_ranks(2, clocked_rank, run.path, 25.0, 0.0)) == {ExitCode.STOPPED}
    stop = [e for e in read_event_lines(run, "train") if e["event"] == "stop_requested"][-1]
    assert stop["signal"] == "time limit"
    saved = [e["step"] for e in read_event_lines(run, "train") if e["event"] == "saved"]
    assert saved[-1] == stop["step"] == read_steps(run)[-1][0] > 14
    assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
    calm = new_run(tmp_path, "calm", data)
    run_ranks(2, stage_rank, calm.path, "train")
    assert compute_run_digest(run) == compute_run_digest(calm)


def test_the_save_file_makes_one_checkpoint(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "asked", data, "checkpoint.every_steps=1000")
    run.save_file.touch()
    assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
    saved = [e["step"] for e in read_event_lines(run, "train") if e["event"] == "saved"]
    assert len(saved) == 2 and saved[0] < saved[1] and not run.save_file.exists()


def hang(rank: int, step: int, number: int, phase: str) -> dict[str, Any]:
    operation = {"operation": "gloo:all_reduce", "number": 7}
    return {
        "rank": rank, "host": f"n{rank}", "step": step, "number": number, "phase": phase, "stacks": "its stack",
        "collectives": [operation],
    }  # fmt: skip


def test_who_did_not_arrive() -> None:
    hosts = ["n0", "n1", "n2"]
    behind = [hang(0, 5, 3, "reduce"), hang(1, 5, 1, "forward"), hang(2, 5, 3, "reduce")]
    rank, host, words = describe_hung_rank(behind, hosts, ()).values()
    assert (rank, host) == (1, "n1") and "'forward' of step 5" in words and "its stack" in words and "number 7" in words
    rank, host, words = describe_hung_rank(behind[:1] + behind[2:], hosts, ()).values()
    assert (rank, host) == (1, "n1") and "rank 1 on n1" in words and "step 5" in words
    rank, _, words = describe_hung_rank([hang(r, 5, 2, "reduce") for r in range(3)], hosts, ()).values()
    assert "all ranks were stuck" in words


def sleepy_rank(rank_info: RankInfo, path: Path) -> int:
    """A rank of an evaluation in which rank 1 sleeps for ever in its second batch."""
    from pipeline.evaluate import evaluator
    from pipeline.resilience import watchdog

    real, calls = evaluator.TextHeldOut.compute_sums, []
    setattr(watchdog.Watchdog, "limit_s", lambda self, phase: 4.0 if phase == "batch" else 600.0)  # noqa: B010

    def sums(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if rank_info.rank == 1 and len(calls) == 2:
            time.sleep(600)
        return real(self, *arguments)

    setattr(evaluator.TextHeldOut, "compute_sums", sums)  # noqa: B010
    return stage_rank(rank_info, path, "evaluate")


def test_a_hang_in_an_evaluation_is_told_with_its_stacks(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "sleepy", data, "train.steps=7")
    run_ranks(2, stage_rank, run.path, "train")
    Ranks(2, sleepy_rank, run.path).results(failures_expected=True)
    folder = run.stage_dir("evaluate")
    hang = json.loads((folder / "hang-rank-1.json").read_text())
    assert hang["phase"] == "batch" and "sums" in hang["stacks"]
    assert json.loads((folder / "error-rank-1.json").read_text())["code"] == ExitCode.HANG


def broken_node_rank(rank_info: RankInfo, path: Path, what: str) -> str:
    """The check at the start on a node where something is broken; the error's words."""
    import torch

    from pipeline.base.errors import UserError
    from pipeline.comm import groups
    from pipeline.resilience import health

    run = Run.open(path)
    try:
        if what == "file system":
            real = Path.read_bytes
            Path.read_bytes = lambda self: real(self)[::-1]  # type: ignore[method-assign]
            health.check_this_rank(run, rank_info, torch.device("cpu"))
        elif what == "device":
            torch.Tensor.__matmul__ = lambda self, other: torch.zeros(2, 2)  # type: ignore[method-assign]
            health.check_this_rank(run, rank_info, torch.device("cpu"))
        elif what == "port":
            with socket.socket() as other:
                other.bind(("0.0.0.0", 0))
                other.listen()
                groups.join_process_group(
                    replace(rank_info, world_size=2, master_port=other.getsockname()[1]), run.config
                )
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


def test_the_check_at_the_start_names_what_is_broken(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "node", data)
    host = os.uname().nodename
    assert f"BAD_NODE node.wrong_data: {host}" in run_ranks(1, broken_node_rank, run.path, "file system")[0]
    assert "node.wrong_result" in run_ranks(1, broken_node_rank, run.path, "device")[0]
    assert "node.port_in_use" in run_ranks(1, broken_node_rank, run.path, "port")[0]
    words = run_ranks(3, broken_node_rank, run.path, "a rank that does not come")
    assert words[0].startswith("BAD_NODE node.not_responding") and "rank 2" in words[0], words
    assert words[2] == "slept"
