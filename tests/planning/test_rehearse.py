"""A rehearsed rank against real ones: bytes by group and operation, and the peak of its tensors."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.base.place import Place
from pipeline.config.sections import Config
from tests.support.layouts import VOCAB, tiny_config
from tests.support.ranks import run_ranks

SIZES = {"dim": 128, "intermediate_size": 256}
Found = dict[str, Any]


def config_of(ranks: int, parallel: dict[str, Any], **train: Any) -> Config:
    return tiny_config(ranks, parallel=parallel, model=SIZES, train=train, data={"sequence_length": 64})


def told(account: Any) -> Found:
    sent: dict[str, int] = {}
    for (_, _, operation), (_, size) in account.sent.items():
        sent[operation] = sent.get(operation, 0) + size
    groups: dict[str, int] = {}
    for (group, _, _), (_, size) in account.sent.items():
        groups[group] = groups.get(group, 0) + size
    return {"sent": sent, "groups": groups, "peak": account.peak, "kinds": account.by_kind()}


def real_rank(place: Place, configs: list[Config]) -> list[Found]:
    """What the second step of this rank takes and sends, by the same account and by an independent one."""
    from pipeline.comm import groups
    from pipeline.config.layout import layout_of
    from pipeline.model.task import Task
    from pipeline.planning.rehearse import Account, one_step
    from pipeline.train.engine import Engine
    from tests.support.layouts import batches
    from tests.support.sent import Sent

    world, found = groups.join(place, configs[0]), []
    for config in configs:
        layout = layout_of(config, world.size, place.local_world_size, VOCAB)
        with Account() as account:
            engine = Engine(config, layout, world, Task(config, VOCAB))
            own = batches(config)[0].chunk(layout.data)[layout.coordinates(place.rank).data].clone()
            for step in (1, 2):
                with Sent() as sent:
                    one_step(engine, account, step, {"tokens": own})
        found.append(told(account) | {"independent": {k.removeprefix("mesh_"): v for k, v in sent.bytes.items()}})
        del engine
    return found


def fake_rank(place: Place, ranks: list[int], configs: list[Config]) -> list[list[Found]]:
    """The same of rehearsed ranks."""
    from pipeline.planning.rehearse import rehearsed

    return [[told(rehearsed(config, rank, VOCAB)) for config in configs] for rank in ranks]


CASES: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2}],
    4: [
        {}, {"zero": 3, "data": {"replicate": 2, "shard": 2}}, {"tensor": 2, "zero": 2}, {"pipeline": 2, "zero": 1},
        {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, {"pipeline": 2, "tensor": 2},
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
    real = run_ranks(ranks, real_rank, configs)
    some = sorted({0, 1, ranks // 2, ranks - 1})
    ((fake),) = run_ranks(1, fake_rank, some, configs)
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
