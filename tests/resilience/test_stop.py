"""The agreement between ranks: a hand that is raised, and what all know after it (real ranks over Gloo)."""

from __future__ import annotations

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
from tests.support.tiny import compute_run_digest, make_run, stage_rank
from tests.support.tiny_training import tiny_config

SAID: list[tuple[dict[int, str], dict[int, float], set[int], tuple[str | None, bool, bool]]] = [
    # signals by rank, seconds left by rank, ranks that want a save; what all must know: reason, save, too late
    ({}, {}, set(), (None, False, False)),
    ({1: "SIGUSR1"}, {}, set(), ("SIGUSR1", False, False)),
    ({2: "SIGTERM", 0: "SIGUSR2"}, {}, {1}, ("SIGUSR2", True, False)),
    ({}, {2: 5.0}, set(), ("time limit", False, False)),
    ({0: "SIGTERM"}, {1: 5.0}, set(), ("SIGTERM", False, False)),
    ({}, {0: -1.0}, set(), ("time limit", False, True)),
    ({}, {0: 1000.0}, {0}, (None, True, False)),
]
HANDS = [set(), {0}, {3}, {1, 2}, {0, 1, 2, 3}]


def agree_rank(rank_info: RankInfo) -> list[Any]:
    """What each of SAID leads to on this rank, and whether it raised its hand."""
    from pipeline.base.signals import StopFlag
    from pipeline.comm import groups
    from pipeline.resilience.stop import SAVE_REQUEST, Deadline, StopCoordinator

    groups.join_process_group(rank_info, tiny_config(3, train={"global_batch": 12}))
    group, found = groups.new_control_group(), []
    for signals, left, saves, _ in SAID:
        flag = StopFlag()
        flag.start_time = time.monotonic()
        flag.reason = signals.get(rank_info.rank)
        coordinator = StopCoordinator(flag, group, Deadline(flag, left.get(rank_info.rank), None))
        coordinator.add_request(SAVE_REQUEST, lambda wants_save=rank_info.rank in saves: wants_save)  # type: ignore[misc]
        wants_attention = coordinator.wants_attention()
        assert coordinator.exchange() == (coordinator.stop_reason is not None)
        wants_save = SAVE_REQUEST in coordinator.agreed_requests
        found.append(((coordinator.stop_reason, wants_save, coordinator.is_too_late_to_save), wants_attention))
    return found


def test_all_ranks_know_what_any_of_them_knew() -> None:
    for rank, found in enumerate(run_ranks(3, agree_rank)):
        for (signals, left, saves, expected), (known, hand) in zip(SAID, found, strict=True):
            assert known == expected
            assert hand == (rank in signals or rank in saves or left.get(rank, 1000.0) < 10)


def hand_rank(rank_info: RankInfo, configs: list[Config]) -> list[list[tuple[float, float, float]]]:
    """For each config and each of HANDS: the loss of a step with those hands up, the loss again, and the norm."""
    from pipeline.comm import groups
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine
    from tests.support.tiny_training import VOCAB, make_batches

    world = groups.join_process_group(rank_info, configs[0])
    found: list[list[tuple[float, float, float]]] = []
    for config in configs:
        layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
        engine = Engine(config, layout, world, DecoderTask(config, VOCAB))
        mine = {"tokens": make_batches(config)[0].chunk(layout.dp)[layout.coordinates(rank_info.rank).dp]}
        found.append([])
        for up in HANDS:
            loss = engine.backward(mine, 1, wants_attention=lambda up=up: rank_info.rank in up)  # type: ignore[misc]
            norm = engine.clip_gradients(None).item()
            engine.optimizer.zero_grad(set_to_none=True)
            found[-1].append((loss.item(), engine.reduce_loss_again().item(), norm))
    return found


def test_a_raised_hand_is_seen_by_all_and_changes_no_bit() -> None:
    layouts: list[dict[str, Any]] = [{}, {"zero": 3}, {"pipeline": 2}, {"tensor": 2}]
    configs = [tiny_config(4, parallel=parallel) for parallel in layouts]
    ranks = run_ranks(4, hand_rank, configs)
    for number in range(len(configs)):
        plain, _, norm = ranks[0][number][0]
        for rank in range(4):
            for up, (loss, again, norm_then) in zip(HANDS, ranks[rank][number], strict=True):
                assert (loss != loss) == bool(up), "not a number exactly where a hand is up"
                assert (again, norm_then) == (plain, norm)


def test_a_request_to_save_stands_until_it_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    request = RequestFile(run.save_file)
    assert not request.is_pending()
    run.save_file.touch()
    assert not request.is_pending(), "the file system is asked once a second"
    monkeypatch.setattr(RequestFile, "CHECK_INTERVAL_S", 0.0)
    request = RequestFile(run.save_file)
    assert request.is_pending() and request.is_pending()
    request.accept()
    assert run.save_file.exists() and not request.is_pending(), (
        "its save is under way; killed now, the next start would find it"
    )
    request.complete()
    assert not run.save_file.exists() and not request.is_pending()
    run.save_file.touch()
    request.complete()
    assert run.save_file.exists() and request.is_pending(), "one that no save has answered"
    request.accept()
    run.save_file.unlink()
    time.sleep(0.01)
    run.save_file.touch()
    request.complete()
    assert run.save_file.exists() and request.is_pending(), "one that came while the save was under way"


def test_the_clock_forgets_the_step_that_compiled_and_counts_the_save_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipeline.base.signals import StopFlag
    from pipeline.resilience import stop

    now = 0.0
    monkeypatch.setattr(stop.time, "monotonic", lambda: now)
    flag = StopFlag()
    deadline = stop.Deadline(flag, 100.0, 20.0)
    for seconds, longest in [(60.0, 60.0), (1.0, 1.0), (3.0, 3.0), (1.0, 2.7)]:
        deadline.record_step(seconds)
        assert deadline.longest_step_s == pytest.approx(longest)
    deadline.expected_save_s = 8.0
    assert (deadline.time_remaining_s(), deadline.save_duration_s(), deadline.should_stop()) == (100.0, 8.0, False)
    now = 70.0
    assert deadline.should_stop(), "10 spare, two steps, and two saves with room: one may be in flight"
    flag.reason, flag.signal_time = "SIGTERM", 75.0
    now = 80.0
    assert deadline.time_remaining_s() == 15.0
    deadline.is_saving = True
    assert deadline.save_duration_s() == 16.0


def told_rank(rank_info: RankInfo, path: Path, moment: str) -> int:
    """A rank of a stage in which rank 1 gets a signal at some moment."""
    from pipeline.evaluate import evaluator
    from pipeline.train import trainer

    def then_told(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if rank_info.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            return real(*arguments, **options)

        return call

    owner: Any = {"build": trainer, "first step": trainer.Trainer, "evaluation": evaluator.TextHeldOut}[moment]
    name = {"build": "TokenDataset", "first step": "step", "evaluation": "compute_sums"}[moment]
    setattr(owner, name, then_told(getattr(owner, name)))
    return stage_rank(rank_info, path, "evaluate" if moment == "evaluation" else "train")


def test_told_at_the_start_in_the_first_step_and_in_an_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for moment, saved in [("build", []), ("first step", [1])]:
        assert set(run_ranks(2, told_rank, run.path, moment)) == {ExitCode.STOPPED}
        assert list_checkpoint_steps(run.checkpoints_dir) == saved
    assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
    assert set(run_ranks(2, told_rank, run.path, "evaluation")) == {ExitCode.STOPPED}
    assert not list(run.evaluation_dir.iterdir())
    assert set(run_ranks(2, stage_rank, run.path, "evaluate")) == {ExitCode.DONE}
    calm = make_run(tmp_path, "calm", data=run.data_dir)
    run_ranks(2, stage_rank, calm.path, "train")
    assert compute_run_digest(run) == compute_run_digest(calm)


def blocked_rank(rank_info: RankInfo) -> tuple[bool, bool]:
    """Rank 1 waits in a collective for rank 0 and gets a signal: what its flag says to another thread, before and
    after that looks."""
    import threading

    import torch.distributed as dist

    from pipeline.base.signals import StopFlag
    from pipeline.comm import groups

    flag, seen = StopFlag().install(), []
    groups.join_process_group(rank_info, tiny_config(2))

    def watch() -> None:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        seen.append(bool(flag))
        flag.poll()
        seen.append(bool(flag))

    if rank_info.rank == 0:
        time.sleep(3)
        seen = [False, True]
    else:
        threading.Thread(target=watch).start()
    dist.barrier()
    return seen[0], seen[1]


def test_a_rank_that_is_blocked_in_a_collective_notices_a_signal() -> None:
    assert run_ranks(2, blocked_rank) == [(False, True)] * 2
