"""A rehearsed rank against real ones: bytes by group and operation, and the peak of its tensors."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.config.sections import Config
from tests.support.ranks import run_ranks
from tests.support.tiny_training import VOCAB, tiny_config

SIZES = {"dim": 128, "intermediate_size": 256}
Found = dict[str, Any]


def config_of(ranks: int, parallel: dict[str, Any]) -> Config:
    """`parallel` may name a precision, and frozen parameters, too."""
    train = {key: value for key, value in parallel.items() if key == "precision"}
    own = {"freeze": parallel.get("freeze", []), "lr": 2e-3, "clip_norm": 0.1}
    parallel = {key: value for key, value in parallel.items() if key not in ("precision", "freeze")}
    return tiny_config(ranks, parallel=parallel, model=SIZES, train=train, data={"sequence_length": 64}, optimizer=own)


def told(account: Any) -> Found:
    sent: dict[str, int] = {}
    for (_, _, operation), (_, size) in account.sent.items():
        sent[operation] = sent.get(operation, 0) + size
    groups: dict[str, int] = {}
    for (group, _, _), (_, size) in account.sent.items():
        groups[group] = groups.get(group, 0) + size
    return {"sent": sent, "groups": groups, "peak": account.peak, "kinds": account.by_kind()}


def real_rank(rank_info: RankInfo, configs: list[Config]) -> list[Found]:
    """What a step of this rank takes and sends, by the same account and by an independent one.

    A thread of Gloo may release the buffer of a message late, which adds to the peak. The smallest peak of several
    steps is therefore what a step needs.
    """
    import torch

    from pipeline.comm import groups
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine
    from planning.rehearse import TensorAccount, account_step
    from tests.support.communication_counter import CommunicationCounter
    from tests.support.tiny_training import make_batches

    class WithoutGloos(TensorAccount):
        """Gloo reduce-scatters a copy that it makes itself; it is first seen when it is cut."""

        gloos = False

        def call(self, func: Any, args: Any, kwargs: Any) -> Any:
            cuts = func is torch.ops.aten.split.Tensor
            self.gloos = cuts and args[0].untyped_storage()._cdata not in self._live
            return super().call(func, args, kwargs)

        def counts(self, tensor: Any) -> bool:
            return not self.gloos and super().counts(tensor)

    world, found = groups.join_process_group(rank_info, configs[0]), []
    for config in configs:
        layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
        with WithoutGloos() as account:
            engine = Engine(config, layout, world, DecoderTask(config, VOCAB))
            own = make_batches(config)[0].chunk(layout.dp)[layout.coordinates(rank_info.rank).dp].clone()
            steps = []
            for step in range(1, 5):
                with CommunicationCounter() as sent:
                    account_step(engine, account, step, {"tokens": own})
                steps.append(told(account))
        smallest = min(steps[1:], key=lambda found: int(found["peak"]))  # the first step also sets up
        found.append(smallest | {"independent": {k.removeprefix("mesh_"): v for k, v in sent.bytes.items()}})
        del engine
    return found


def fake_rank(rank_info: RankInfo, ranks: list[int], configs: list[Config]) -> list[list[Found]]:
    """The same of rehearsed ranks."""
    from planning.rehearse import rehearse_rank

    return [[told(rehearse_rank(config, rank, VOCAB)) for config in configs] for rank in ranks]


FROZEN = ["model.embed_tokens.*", *(f"model.layers.{number}.*" for number in range(3))]
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2},
        {"pipeline": 2, "freeze": FROZEN},  # the whole first stage
    ],
    4: [
        {}, {"zero": 3, "data": {"replicate": 2, "shard": 2}}, {"pipeline": 2, "zero": 1, "precision": "bf16"},
        {"tensor": 2, "zero": 2, "precision": "bf16", "activation_checkpointing": "selective"},
        {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, {"pipeline": 2, "tensor": 2},
        {"pipeline": 4, "freeze": FROZEN}, {"pipeline": 2, "tensor": 2, "freeze": FROZEN},
    ],
    8: [
        {"zero": 1}, {"tensor": 4}, {"tensor": 2, "zero": 3, "data": {"replicate": 2, "shard": 2}},
        {"pipeline": 2, "tensor": 2, "zero": 1}, {"pipeline": 4},
        {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2},
    ],
}  # fmt: skip


@pytest.mark.story
@pytest.mark.parametrize("ranks", CASES)
def test_a_rehearsed_rank_sends_and_takes_what_a_real_one_does(ranks: int) -> None:
    configs = [config_of(ranks, parallel) for parallel in CASES[ranks]]
    real = run_ranks(ranks, real_rank, configs, timeout=400)
    some = [0, ranks - 1]
    (fake,) = run_ranks(1, fake_rank, some, configs, timeout=400)
    wrong = []
    for number, parallel in enumerate(CASES[ranks]):
        for rank, found in zip(some, fake, strict=True):
            is_real, is_fake = real[rank][number], found[number]
            if is_real["independent"] != is_fake["groups"] or is_real["sent"] != is_fake["sent"]:
                wrong.append(
                    (parallel, rank, is_real["independent"], is_fake["groups"], is_real["sent"], is_fake["sent"])
                )
            if abs(is_fake["peak"] / is_real["peak"] - 1) > 0.02:
                wrong.append((parallel, rank, is_real["peak"], is_fake["peak"], is_real["kinds"], is_fake["kinds"]))
    assert not wrong, "\n".join(map(str, wrong))


# -- what needs no second process ------------------------------------------------------------------------


def lines(config: Config, rank: int) -> list[str]:
    from planning.rehearse import describe_rehearsal

    return list(describe_rehearsal(config, rank))


def lines_rank(rank_info: RankInfo, config: Config, rank: int) -> list[str]:
    return lines(config, rank)


def test_it_tells_what_a_rank_takes_and_sends() -> None:
    config = tiny_config(1024, parallel={"zero": 3}, train={"global_batch": 2048}, model={"layers": 1})
    (told,) = run_ranks(1, lines_rank, config, 1023)
    assert told[0] == "rank 1023 of 1,024: pipeline 0, data 1023, tensor 0"
    table = {tuple(line.split()[:3]) for line in told}
    assert {("shard", "1024", name) for name in ("all-gather", "reduce-scatter", "all-reduce")} <= table
    heads = next(line.split() for line in told if "gathered" in line)
    rehearsed, plan = (
        next(line.split()[1:] for line in told if line.split()[:1] == [name]) for name in ("rehearsed", "plan")
    )
    assert heads == ["weights", "gathered", "gradients", "optimizer", "activations", "sum"]
    assert len(rehearsed) == len(plan) == len(heads)


def names_rank(rank_info: RankInfo, configs: list[Config]) -> list[tuple[list[str], set[str], set[str]]]:
    """The columns of memory in a rehearsal's table, and the groups in it and in `plan`; both as printed."""
    from planning.plan import describe_plan
    from planning.rehearse import describe_rehearsal

    found = []
    for config in configs:
        rehearsed, planned = list(describe_rehearsal(config, 0)), list(describe_plan(config))
        heads = [next(line.split() for line in told if "gathered" in line) for told in (rehearsed, planned)]
        assert heads[0] == heads[1][2:]
        table = rehearsed[next(n for n, line in enumerate(rehearsed) if "calls" in line) + 1 :]
        sends = planned[planned.index("a rank sends per step") + 1 :]
        found.append((heads[0], {line.split()[0] for line in table}, {line.split()[0] for line in sends}))
    return found


def test_its_columns_have_the_names_of_plan() -> None:
    """Also those of groups."""
    every: list[dict[str, Any]] = [
        {}, {"zero": 1}, {"tensor": 4}, {"tensor": 2, "zero": 3}, {"data": {"replicate": 2, "shard": 2}, "zero": 2},
    ]  # fmt: skip
    configs = [tiny_config(4, parallel=parallel, model=SIZES) for parallel in every]
    (found,) = run_ranks(1, names_rank, configs)
    for parallel, (heads, groups, planned) in zip(every, found, strict=True):
        assert heads[-1] == "sum" and planned <= groups <= {*planned, "all"}, parallel


def phases_rank(rank_info: RankInfo, config: Config) -> list[str]:
    from planning.rehearse import rehearse_rank

    phases: list[str] = []
    rehearse_rank(config, 0, VOCAB, phases.append)
    return phases


def test_it_says_what_it_does() -> None:
    (phases,) = run_ranks(1, phases_rank, tiny_config(4, parallel={"zero": 1}, model=SIZES))
    starts = ("making the groups", "building rank 0", "step 1 of 2", "step 2 of 2")
    assert [phase.startswith(start) for phase, start in zip(phases, starts, strict=True)] == [True] * 4


def test_a_long_phase_is_told_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from planning.rehearse import Progress

    monkeypatch.setattr(Progress, "EVERY_S", 0.01)
    with Progress() as progress:
        progress.begin("step 1 of 2")
        end, said = time.monotonic() + 60, ""
        while said.count("step 1 of 2") < 3 and time.monotonic() < end:
            said += capsys.readouterr().err
    assert said.count("step 1 of 2") >= 3


def failing_rank(rank_info: RankInfo, config: Config, rank: int) -> str:
    """What a rehearsal is refused with."""
    from pipeline.base.errors import UserError

    try:
        lines(config, rank)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sections", "rank", "words"),
    [
        ({}, 4, "--rehearse 4: ranks are numbered from 0 to 3"),
        ({}, -1, "--rehearse -1: ranks are numbered from 0 to 3"),
        ({"site": {"gpu_memory_gib": 0.0001}}, 0, "needs 0.0 GB for its tensors"),
        (
            {"optimizer": {"state": {"master": "none"}}, "train": {"precision": "bf16"}},
            0,
            "optimizer.state.master none",
        ),
    ],
)
def test_what_is_refused(sections: dict[str, Any], rank: int, words: str) -> None:
    (told,) = run_ranks(1, failing_rank, tiny_config(4, **sections), rank)
    assert words in told


def test_what_fails_on_the_rank_is_told_with_its_place() -> None:
    (told,) = run_ranks(1, broken_rank, tiny_config(4, parallel={"zero": 3}))
    assert told == "rank 0 fails in forward (test_rehearse.py:LINE): ValueError: out of order"


def broken_rank(rank_info: RankInfo, config: Config) -> str:
    """A block that does not work."""
    import re

    from pipeline.model import decoder

    def forward(*_: Any) -> Any:
        raise ValueError("out of order")

    decoder.MLP.forward = forward  # type: ignore[assignment, method-assign]
    return re.sub(r":\d+", ":LINE", failing_rank(rank_info, config, 0))
