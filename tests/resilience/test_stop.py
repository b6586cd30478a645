"""Tests of coordinated stopping. Ranks exchange requests over Gloo, and all ranks stop or save after the same step."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.checkpoint.catalog import list_checkpoint_steps
from pipeline.config.sections import Config
from pipeline.resilience.stop import RequestFile
from pipeline.run.directory import Run
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank
from tests.support.tiny_training import tiny_config

EXCHANGES: list[tuple[dict[int, str], dict[int, float], set[int], tuple[str | None, bool, bool]]] = [
    # Each entry has: signals by rank, seconds until the time limit by rank, the ranks with a request to save, and the
    # result on all ranks. The result is: the stop reason, a save was requested, it is too late to save.
    ({}, {}, set(), (None, False, False)),
    ({1: "SIGUSR1"}, {}, set(), ("SIGUSR1", False, False)),
    ({2: "SIGTERM", 0: "SIGUSR2"}, {}, {1}, ("SIGUSR2", True, False)),
    ({}, {2: 5.0}, set(), ("time limit", False, False)),
    ({0: "SIGTERM"}, {1: 5.0}, set(), ("SIGTERM", False, False)),
    ({}, {0: -1.0}, set(), ("time limit", False, True)),
    ({}, {0: 1000.0}, {0}, (None, True, False)),
]
REQUESTING_RANKS = [set(), {0}, {3}, {1, 2}, {0, 1, 2, 3}]
"""For each step, the ranks that have a request during the step."""


def exchange_requests(rank_info: RankInfo) -> list[Any]:
    """Run all of EXCHANGES on this rank.

    Returns:
        For each exchange: the result, and True if this rank wanted the attention of the others (`wants_attention`).
    """
    from pipeline.base.signals import StopFlag
    from pipeline.comm import groups
    from pipeline.resilience.stop import SAVE_REQUEST, Deadline, StopCoordinator

    groups.join_process_group(rank_info, tiny_config(3, train={"global_batch": 12}))
    group = groups.new_control_group()
    results = []
    for signals, seconds_left, saving_ranks, _ in EXCHANGES:
        flag = StopFlag()
        flag.start_time = time.monotonic()
        flag.reason = signals.get(rank_info.rank)
        coordinator = StopCoordinator(flag, group, Deadline(flag, seconds_left.get(rank_info.rank), None))
        requests_save = rank_info.rank in saving_ranks
        coordinator.add_request(SAVE_REQUEST, lambda requests_save=requests_save: requests_save)  # type: ignore[misc]
        wants_attention = coordinator.wants_attention()
        assert coordinator.exchange() == (coordinator.stop_reason is not None)
        agreed_to_save = SAVE_REQUEST in coordinator.pending_requests
        results.append(((coordinator.stop_reason, agreed_to_save, coordinator.is_too_late_to_save), wants_attention))
    return results


def test_exchange_gives_all_ranks_the_requests_of_any_rank() -> None:
    """A rank wants attention if it has a signal, a request to save, or less than 10 s until its time limit."""
    for rank, results in enumerate(run_ranks(3, exchange_requests)):
        for exchange, (result, wants_attention) in zip(EXCHANGES, results, strict=True):
            signals, seconds_left, saving_ranks, expected = exchange
            assert result == expected
            assert wants_attention == (rank in signals or rank in saving_ranks or seconds_left.get(rank, 1000.0) < 10)


def run_steps_with_requests(rank_info: RankInfo, configs: list[Config]) -> list[list[tuple[float, float, float]]]:
    """For each config, run a step for each of REQUESTING_RANKS, without an update of the weights.

    Returns:
        For each config and step: the loss, the loss after a second reduction, and the gradient norm.
    """
    from pipeline.comm import groups
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine
    from tests.support.tiny_training import VOCAB, make_batches

    world = groups.join_process_group(rank_info, configs[0])
    results: list[list[tuple[float, float, float]]] = []
    for config in configs:
        layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
        engine = Engine(config, layout, world, DecoderTask(config, VOCAB))
        batch = {"tokens": make_batches(config)[0].chunk(layout.dp)[layout.coordinates(rank_info.rank).dp]}
        results.append([])
        for ranks in REQUESTING_RANKS:
            has_request = rank_info.rank in ranks
            loss = engine.backward(batch, 1, wants_attention=lambda has_request=has_request: has_request)  # type: ignore[misc]
            norm = engine.clip_gradients(None).item()
            engine.optimizer.zero_grad(set_to_none=True)
            results[-1].append((loss.item(), engine.reduce_loss_again().item(), norm))
    return results


def test_request_makes_the_loss_nan_on_all_ranks_and_reducing_it_again_restores_it() -> None:
    """Ranks signal a request through the loss, which each step reduces anyway. Gradients must not change."""
    layouts: list[dict[str, Any]] = [{}, {"zero": 3}, {"pipeline": 2}, {"tensor": 2}]
    configs = [tiny_config(4, parallel=parallel, train={"micro_batch": 4}) for parallel in layouts]
    results_by_rank = run_ranks(4, run_steps_with_requests, configs)
    for number in range(len(configs)):
        expected_loss, _, expected_norm = results_by_rank[0][number][0]  # the step without a request
        for rank in range(4):
            steps = results_by_rank[rank][number]
            for requesting_ranks, (loss, loss_again, norm) in zip(REQUESTING_RANKS, steps, strict=True):
                assert math.isnan(loss) == bool(requesting_ranks)
                assert (loss_again, norm) == (expected_loss, expected_norm)


def test_save_request_is_pending_until_a_save_completes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user creates the file `save`. `accept` marks the start of a save, `complete` its end."""
    run = Run(tmp_path)
    request = RequestFile(run.save_file)
    assert not request.is_pending()
    run.save_file.touch()
    assert not request.is_pending(), "the file system must be queried at most once a second"
    monkeypatch.setattr(RequestFile, "CHECK_INTERVAL_S", 0.0)
    request = RequestFile(run.save_file)
    assert request.is_pending() and request.is_pending()
    request.accept()  # a save for this request begins
    assert not request.is_pending()
    assert run.save_file.exists(), "if the run is killed during the save, the next attempt must find the request"
    request.complete()
    assert not run.save_file.exists() and not request.is_pending()
    run.save_file.touch()
    request.complete()
    assert run.save_file.exists() and request.is_pending(), "a request that was not accepted must not be removed"
    request.accept()
    run.save_file.unlink()
    time.sleep(0.01)
    run.save_file.touch()
    request.complete()
    assert run.save_file.exists() and request.is_pending(), "a new request during the save must not be removed"


def test_deadline_ignores_the_first_step_and_includes_a_save_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is at 100 s, and the grace period after a signal is 20 s. The first step takes 60 s.

    The longest step slowly decreases if later steps are shorter.
    """
    from pipeline.base.signals import StopFlag
    from pipeline.resilience import stop

    now = 0.0
    monkeypatch.setattr(stop.time, "monotonic", lambda: now)
    flag = StopFlag()
    deadline = stop.Deadline(flag, 100.0, 20.0)
    for step_s, longest_s in [(60.0, 60.0), (1.0, 1.0), (3.0, 3.0), (1.0, 2.7)]:
        deadline.record_step(step_s)
        assert deadline.longest_step_s == pytest.approx(longest_s)
    deadline.expected_save_s = 8.0
    assert (deadline.time_remaining_s(), deadline.save_duration_s(), deadline.should_stop()) == (100.0, 8.0, False)
    now = 70.0
    assert deadline.should_stop(), "30 s remain, but 10 s, 2 × 2.7 s for steps and 2.5 × 8 s for saves must be reserved"
    flag.reason = "SIGTERM"
    flag.signal_time = 75.0
    now = 80.0
    assert deadline.time_remaining_s() == 15.0, "the grace period ends at 95 s"
    deadline.is_saving = True
    assert deadline.save_duration_s() == 16.0, "the save in progress must end before the next save"


def run_stage_with_signal(rank_info: RankInfo, path: Path, moment: str) -> int:
    """Run a stage on this rank and return the exit code. Rank 1 receives SIGUSR1 at `moment`.

    `moment` is `start-up` or `first step` for the train stage, or `evaluation` for the evaluate stage.
    """
    from pipeline.evaluate import evaluator
    from pipeline.train import trainer

    def send_signal_before(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if rank_info.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            return function(*arguments, **options)

        return call

    functions: dict[str, tuple[Any, str]] = {
        "start-up": (trainer, "TokenDataset"),
        "first step": (trainer.Trainer, "step"),
        "evaluation": (evaluator.TextHeldOut, "compute_sums"),
    }
    owner, name = functions[moment]
    setattr(owner, name, send_signal_before(getattr(owner, name)))
    return run_stage_on_rank(rank_info, path, "evaluate" if moment == "evaluation" else "train")


def test_ranks_stop_on_a_signal_during_start_up_first_step_and_evaluation(tmp_path: Path) -> None:
    """After these stops, the result of the run must equal that of an undisturbed run."""
    run = make_run(tmp_path)
    for moment, saved_steps in [("start-up", []), ("first step", [1])]:
        assert set(run_ranks(2, run_stage_with_signal, run.path, moment)) == {ExitCode.STOPPED}
        assert list_checkpoint_steps(run.checkpoints_dir) == saved_steps
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert set(run_ranks(2, run_stage_with_signal, run.path, "evaluation")) == {ExitCode.STOPPED}
    assert not list(run.evaluation_dir.iterdir())
    assert set(run_ranks(2, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}
    undisturbed = make_run(tmp_path, "undisturbed", data=run.data_dir)
    run_ranks(2, run_stage_on_rank, undisturbed.path, "train")
    assert compute_run_digest(run) == compute_run_digest(undisturbed)


def poll_flag_during_collective(rank_info: RankInfo) -> tuple[bool, bool]:
    """Send a signal to rank 1 while its main thread is blocked in a barrier, and poll its flag in another thread.

    Returns:
        On rank 1: whether the flag was set before and after the poll. Rank 0 returns the expected values.
    """
    import threading

    import torch.distributed as dist

    from pipeline.base.signals import StopFlag
    from pipeline.comm import groups

    flag = StopFlag().install()
    flag_values: list[bool] = []
    groups.join_process_group(rank_info, tiny_config(2))

    def send_and_poll() -> None:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        flag_values.append(bool(flag))
        flag.poll()
        flag_values.append(bool(flag))

    if rank_info.rank == 0:
        time.sleep(3)
        flag_values = [False, True]
    else:
        threading.Thread(target=send_and_poll).start()
    dist.barrier()
    return flag_values[0], flag_values[1]


def test_poll_notices_a_signal_while_the_main_thread_is_blocked_in_a_collective() -> None:
    assert run_ranks(2, poll_flag_during_collective) == [(False, True)] * 2
