"""Tests of `plan --rehearse`.

A rehearsed rank is compared with real ranks: sent bytes by group and operation, and the peak memory of the tensors.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from tests.support.ranks import run_ranks
from tests.support.tiny_training import VOCAB, make_batches, tiny_config

MODEL_SIZES = {"dim": 128, "intermediate_size": 256}
Measurement = dict[str, Any]


def make_config(ranks: int, options: dict[str, Any]) -> Config:
    """Return a tiny config. `options` are keys of `parallel`, and may also have `precision` and `freeze`."""
    train = {key: value for key, value in options.items() if key == "precision"}
    optimizer = {"freeze": options.get("freeze", []), "lr": 2e-3, "clip_norm": 0.1}
    parallel = {key: value for key, value in options.items() if key not in ("precision", "freeze")}
    return tiny_config(
        ranks, parallel=parallel, model=MODEL_SIZES, train=train, data={"sequence_length": 64}, optimizer=optimizer
    )


def summarize(account: Any) -> Measurement:
    """Return the sent bytes by operation and by group, the peak memory, and the peak memory by kind of tensor."""
    by_operation: dict[str, int] = {}
    by_group: dict[str, int] = {}
    for (group, _, operation), (_, size) in account.sent.items():
        by_operation[operation] = by_operation.get(operation, 0) + size
        by_group[group] = by_group.get(group, 0) + size
    return {"sent": by_operation, "groups": by_group, "peak": account.peak, "kinds": account.peak_by_kind()}


def measure_real_rank(rank_info: RankInfo, configs: list[Config]) -> list[Measurement]:
    """Measure a step of this rank for each config, with the account of a rehearsal and with an independent counter.

    A thread of Gloo may release the buffer of a message late, which adds to the peak. The smallest peak of several
    steps is therefore the memory that a step needs.
    """
    import torch

    from pipeline.comm import groups
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine
    from planning.rehearse import TensorAccount, run_counted_step
    from tests.support.communication_counter import CommunicationCounter

    class AccountWithoutGlooCopies(TensorAccount):
        """An account that ignores the copy that Gloo's reduce-scatter makes.

        The first operator that uses this copy splits it.
        """

        is_gloo_copy = False

        def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
            is_split = func is torch.ops.aten.split.Tensor
            self.is_gloo_copy = is_split and args[0].untyped_storage()._cdata not in self._live
            return super().run_operator(func, args, kwargs)

        def takes_memory(self, tensor: Any) -> bool:
            return not self.is_gloo_copy and super().takes_memory(tensor)

    world = groups.join_process_group(rank_info, configs[0])
    measurements = []
    for config in configs:
        layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
        with AccountWithoutGlooCopies() as account:
            engine = Engine(config, layout, world, DecoderTask(config, VOCAB))
            tokens_BT = make_batches(config)[0].chunk(layout.dp)[layout.coordinates(rank_info.rank).dp].clone()
            steps = []
            for step in range(1, 5):
                with CommunicationCounter() as counter:
                    run_counted_step(engine, account, step, {"tokens": tokens_BT})
                steps.append(summarize(account))
        # the first step needs more memory, because it allocates the optimizer's state
        smallest = min(steps[1:], key=lambda measurement: int(measurement["peak"]))
        counted_bytes = {group.removeprefix("mesh_"): size for group, size in counter.bytes.items()}
        measurements.append(smallest | {"independent": counted_bytes})
        del engine
    return measurements


def measure_rehearsed_ranks(rank_info: RankInfo, ranks: list[int], configs: list[Config]) -> list[list[Measurement]]:
    """Rehearse each rank of `ranks` with each config, and return the measurements."""
    from planning.rehearse import rehearse_rank

    return [[summarize(rehearse_rank(config, rank, VOCAB)) for config in configs] for rank in ranks]


FIRST_THREE_LAYERS = ["model.embed_tokens.*", *(f"model.layers.{number}.*" for number in range(3))]
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2},
        {"pipeline": 2, "freeze": FIRST_THREE_LAYERS},  # the first pipeline-parallel stage is frozen
        {"context": 2}, {"context": 2, "zero": 3, "activation_checkpointing": "selective"},
    ],
    4: [
        {}, {"zero": 3, "data": {"replicate": 2, "shard": 2}}, {"pipeline": 2, "zero": 1, "precision": "bf16"},
        {"tensor": 2, "zero": 2, "precision": "bf16", "activation_checkpointing": "selective"},
        {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, {"pipeline": 2, "tensor": 2},
        {"context": 4}, {"context": 2, "tensor": 2}, {"context": 2, "pipeline": 2, "precision": "bf16"},
        {"pipeline": 4, "freeze": FIRST_THREE_LAYERS}, {"pipeline": 2, "tensor": 2, "freeze": FIRST_THREE_LAYERS},
    ],
    8: [
        {"zero": 1}, {"tensor": 4}, {"tensor": 2, "zero": 3, "data": {"replicate": 2, "shard": 2}},
        {"pipeline": 2, "tensor": 2, "zero": 1}, {"pipeline": 4},
        {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2},
    ],
}  # fmt: skip


@pytest.mark.story
@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in CASES if ranks > 2)])
def test_traffic_and_memory_of_a_rehearsed_rank_equal_those_of_a_real_rank(ranks: int) -> None:
    configs = [make_config(ranks, options) for options in CASES[ranks]]
    real_measurements = run_ranks(ranks, measure_real_rank, configs, timeout=400)
    compared_ranks = [0, ranks - 1]
    (rehearsed_measurements,) = run_ranks(1, measure_rehearsed_ranks, compared_ranks, configs, timeout=400)
    differences = []
    for rank, rehearsed_by_config in zip(compared_ranks, rehearsed_measurements, strict=True):
        for options, real, rehearsed in zip(CASES[ranks], real_measurements[rank], rehearsed_by_config, strict=True):
            if real["independent"] != rehearsed["groups"] or real["sent"] != rehearsed["sent"]:
                differences.append((options, rank, real, rehearsed))
            if abs(rehearsed["peak"] / real["peak"] - 1) > 0.02:
                differences.append((options, rank, real, rehearsed))
    assert not differences, "\n".join(map(str, differences))


# -- tests that need one process -------------------------------------------------------------------------


def rehearse_in_rank(rank_info: RankInfo, config: Config, rank: int) -> list[str] | tuple[str, str]:
    """Return the lines of a rehearsal, or the code and message of its error."""
    from planning.rehearse import describe_rehearsal

    try:
        return list(describe_rehearsal(config, rank))
    except UserError as error:
        return error.code, str(error)


def find_row(lines: list[str], name: str) -> list[str]:
    """Return the columns of the line whose first column is `name`."""
    return next(line.split()[1:] for line in lines if line.split()[:1] == [name])


def test_a_rehearsal_prints_memory_and_traffic() -> None:
    config = tiny_config(1024, parallel={"zero": 3}, train={"global_batch": 2048}, model={"layers": 1})
    (lines,) = run_ranks(1, rehearse_in_rank, config, 1023)
    assert re.search("1023 of 1,024.*pipeline 0.*data 1023.*tensor 0", lines[0])
    traffic = {tuple(line.split()[:3]) for line in lines}
    assert {("shard", "1024", name) for name in ("all-gather", "reduce-scatter", "all-reduce")} <= traffic
    kinds = find_row(lines, "weights")
    assert kinds == ["gathered", "gradients", "optimizer", "activations", "sum"]
    assert len(find_row(lines, "rehearsed")) == len(find_row(lines, "plan")) == 1 + len(kinds)


def read_names(rank_info: RankInfo, configs: list[Config]) -> list[tuple[list[str], set[str], set[str]]]:
    """Return the printed names: the memory columns of a rehearsal, and the groups of a rehearsal and of `plan`.

    Check that a rehearsal and `plan` have the same memory columns.
    """
    from planning.plan import describe_plan
    from planning.rehearse import describe_rehearsal

    names = []
    for config in configs:
        rehearsal = list(describe_rehearsal(config, 0))
        plan = list(describe_plan(config))
        columns, plan_columns = (
            next(line.split() for line in lines if "gathered" in line) for lines in (rehearsal, plan)
        )
        assert columns == plan_columns[2:]  # the first two columns of the plan are the pipeline rank and parameters
        traffic = rehearsal[next(number for number, line in enumerate(rehearsal) if "calls" in line) + 1 :]
        plan_traffic = plan[plan.index("a rank sends per step") + 1 :]
        groups = {line.split()[0] for line in traffic}
        names.append((columns, groups, {line.split()[0] for line in plan_traffic}))
    return names


@pytest.mark.story
def test_a_rehearsal_uses_the_names_of_plan() -> None:
    parallels: list[dict[str, Any]] = [
        {}, {"zero": 1}, {"tensor": 4}, {"tensor": 2, "zero": 3}, {"data": {"replicate": 2, "shard": 2}, "zero": 2},
    ]  # fmt: skip
    configs = [tiny_config(4, parallel=parallel, model=MODEL_SIZES, train={"micro_batch": 4}) for parallel in parallels]
    (names,) = run_ranks(1, read_names, configs)
    for parallel, (columns, groups, planned_groups) in zip(parallels, names, strict=True):
        assert columns[-1] == "sum"
        assert planned_groups <= groups <= {*planned_groups, "all"}, parallel


def record_phases(rank_info: RankInfo, config: Config) -> list[str]:
    """Return the phases that a rehearsal reports."""
    from planning.rehearse import rehearse_rank

    phases: list[str] = []
    rehearse_rank(config, 0, VOCAB, phases.append)
    return phases


def test_a_rehearsal_reports_its_phases() -> None:
    (phases,) = run_ranks(1, record_phases, tiny_config(4, parallel={"zero": 1}, model=MODEL_SIZES))
    expected_texts = ("groups", "rank 0", "step 1 of 2", "step 2 of 2")
    assert [text in phase for phase, text in zip(phases, expected_texts, strict=True)] == [True] * 4


def test_a_long_phase_is_printed_repeatedly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from planning.rehearse import Progress

    monkeypatch.setattr(Progress, "INTERVAL_S", 0.01)
    with Progress() as progress:
        progress.start_phase("step 1 of 2")
        deadline = time.monotonic() + 60
        output = ""
        while output.count("step 1 of 2") < 3 and time.monotonic() < deadline:
            output += capsys.readouterr().err
    assert output.count("step 1 of 2") >= 3


@pytest.mark.parametrize(
    ("sections", "rank", "code", "expected_text"),
    [
        ({}, 4, "plan.no_such_rank", "from 0 to 3"),
        ({}, -1, "plan.no_such_rank", "from 0 to 3"),
        ({"site": {"gpu_memory_gib": 0.0001}}, 0, "plan.not_enough_memory", "site.gpu_memory_gib"),
        (
            {"optimizer": {"state": {"master": "none"}}, "train": {"precision": "bf16"}},
            0,
            "plan.unsupported_option",
            "optimizer.state.master none",
        ),
    ],
)
def test_an_impossible_rehearsal_is_an_error(
    sections: dict[str, Any], rank: int, code: str, expected_text: str
) -> None:
    ((error_code, message),) = run_ranks(1, rehearse_in_rank, tiny_config(4, **sections), rank)
    assert error_code == code
    assert expected_text in message


def rehearse_failing_block(rank_info: RankInfo, config: Config) -> list[str] | tuple[str, str]:
    """Rehearse a model whose MLP raises an exception."""
    from pipeline.model import decoder

    def forward(*_: Any) -> Any:
        raise ValueError("out of order")

    decoder.MLP.forward = forward  # type: ignore[assignment, method-assign]
    return rehearse_in_rank(rank_info, config, 0)


def test_a_failing_rank_is_reported_with_its_location() -> None:
    ((code, message),) = run_ranks(1, rehearse_failing_block, tiny_config(4, parallel={"zero": 3}))
    assert code == "plan.rank_fails"
    assert re.search(r"rank 0 .*forward.*test_rehearse\.py:\d+.*ValueError: out of order", message)
