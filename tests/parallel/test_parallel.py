"""Every way to split a training equals one process: loss and gradient norm over ten steps, fp32.

The gradient norm is compared too: a loss alone hides wrong gradients (clipping bugs moved it by 6e-6). Tensor
parallel cases take most of the time here (DTensor's dispatch, on the CPU), so they have fewer micro-batches.
"""

from __future__ import annotations

import json
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.config.sections import Config
from pipeline.train.optimizer import compute_total_norm
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, stage_rank
from tests.support.tiny_training import STEPS, change_layout_rank, tiny_config, train_rank
from tests.train.test_exact import interrupt_training, new_run, read_steps

pytestmark = pytest.mark.timeout(1000)

V = {"pipeline": 2, "virtual_stages": 2}
FEW = {"micro_batch": 4}
LIMIT_S = 900
TIED = {"tie_word_embeddings": True}
CHUNKED = {"loss_chunk": 7}
"""The reference keeps whole logits."""
HALF_MOMENTS = {"optimizer": {"lr": 2e-3, "clip_norm": 0.1, "state": {"moments": "bf16"}}}
NO_MASTER = {"optimizer": {"lr": 2e-3, "clip_norm": 0.1, "state": {"moments": "bf16", "master": "none"}}}
INT8 = {
    "optimizer": {"lr": 2e-3, "clip_norm": 0.1, "state": {"moments": "int8"}},
    "model": {"dim": 128, "intermediate_size": 128},
}
"""Of rows that tensor parallelism cuts between blocks."""
_single: dict[str, list[tuple[float, float]]] = {}


def one_process(sections: dict[str, Any]) -> list[tuple[float, float]]:
    """Losses and norms of one process, computed once for each model and batch."""
    plain = {key: values for key, values in sections.items() if key != "parallel"}
    plain["train"] = {key: value for key, value in plain.get("train", {}).items() if key != "loss_chunk"}
    key = json.dumps(plain, sort_keys=True)
    if key not in _single:
        _single[key] = run_ranks(1, train_rank, [tiny_config(1, **plain)])[0][0]
    return _single[key]


def check(ranks: int, *cases: dict[str, Any]) -> None:
    """Train each case on `ranks` ranks, all in one group of processes."""
    reference = [one_process(case) for case in cases]
    results = run_ranks(ranks, train_rank, [tiny_config(ranks, **case) for case in cases], timeout=LIMIT_S)
    for number, (case, expected) in enumerate(zip(cases, reference, strict=True)):
        for rank in results:
            assert rank[number] == results[0][number], f"ranks differ: {case}"
        for step, (ours, theirs) in enumerate(zip(results[0][number], expected, strict=True), 1):
            assert ours == pytest.approx(theirs, rel=1e-5), f"{case}, step {step}: (loss, norm)"
        assert len(expected) == STEPS


def test_data_parallel_and_zero_equal_one_process() -> None:
    check(
        4,
        {"parallel": {"zero": 0}},
        {"parallel": {"zero": 1}},
        {"parallel": {"zero": 2}},
        {"parallel": {"zero": 3, "reduce": "step"}, "model": TIED},
        {"parallel": {"zero": 3, "data": {"replicate": 2, "shard": 2}}},
        {"parallel": {"zero": 3, "activation_checkpointing": "selective"}},
        {"parallel": {"zero": 3}, "model": TIED, "train": CHUNKED},
        {"parallel": {"zero": 2}, **HALF_MOMENTS},
        {"parallel": {"zero": 3}, "optimizer": INT8["optimizer"]},
        {"parallel": {"zero": 3, "offload": True, "activation_checkpointing": "full"}},
    )


def test_tensor_parallel_equals_one_process() -> None:
    """Where ranks hold the same activations they must drop the same ones: equal to one process with dropout, too."""
    recomputed = {"tensor": 2, "sequence": False, "activation_checkpointing": "full"}
    check(
        2,
        {"parallel": {"tensor": 2}, "train": FEW},
        {"parallel": recomputed, "train": FEW, "model": {**TIED, "dropout": 0.2}},
        {"parallel": {"tensor": 2, "loss_parallel": False}, "train": {"micro_batch": 16}},
        {"parallel": {"tensor": 2}, "train": FEW | CHUNKED},
        {"parallel": {"tensor": 2, "activation_checkpointing": "selective"}, "train": FEW},
        {"parallel": {**recomputed, "activation_checkpointing": "selective"}, "train": FEW, "model": TIED},
    )


def test_pipeline_schedules_equal_one_process() -> None:
    check(
        2,
        {"parallel": {"pipeline": 2}},
        {"parallel": {"pipeline": 2, "schedule": "gpipe", "activation_checkpointing": "selective"}},
        {"parallel": {**V, "schedule": "interleaved_1f1b"}, "model": TIED},
        {"parallel": {**V, "schedule": "interleaved_zero_bubble"}},
        {"parallel": {**V, "schedule": "zbv", "activation_checkpointing": "full"}},
        {"parallel": {**V, "schedule": "dualpipe_v"}, "model": TIED},
        {"parallel": {**V, "schedule": "zbv"}, "train": CHUNKED},
    )


def test_pipeline_with_data_and_tensor_parallel_equals_one_process() -> None:
    check(
        4,
        {"parallel": {"pipeline": 2, "zero": 3}, "model": TIED},
        {"parallel": {**V, "schedule": "zbv", "zero": 1}},
        {"parallel": {"pipeline": 2, "tensor": 2}, "train": FEW, "model": TIED},
        {"parallel": {"tensor": 2, "zero": 3}, "train": FEW},
        {"parallel": {"tensor": 2, "zero": 3}, "train": FEW | CHUNKED},
    )


@pytest.mark.story
def test_all_three_parallelisms_on_eight_ranks_equal_one_process() -> None:
    check(8, {"parallel": {"pipeline": 2, "tensor": 2, "zero": 2}, "train": FEW})


# -- the full matrix -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("model", [{}, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_matrix_of_data_parallel(ranks: int, accumulate: int, model: dict[str, Any]) -> None:
    micro = 16 // ranks // accumulate
    cases = [{"zero": zero, "reduce": reduce} for zero, reduce in product((0, 1, 2, 3), ("auto", "step"))]
    if ranks == 4:
        cases += [{"zero": zero, "data": {"replicate": 2, "shard": 2}} for zero in (1, 2, 3)]
    check(ranks, *({"parallel": case, "model": model, "train": {"micro_batch": micro}} for case in cases))


@pytest.mark.long
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_matrix_of_tensor_parallel(ranks: int, sequence: bool, loss_parallel: bool) -> None:
    parallel = {"tensor": ranks, "sequence": sequence, "loss_parallel": loss_parallel}
    check(ranks, *({"parallel": parallel, "model": model, "train": FEW} for model in ({}, TIED)))


def test_the_norm_of_a_large_gradient_equals_that_of_its_parts() -> None:
    """As layouts that cut it have it. Whole, torch's own would be 7e-4 too small."""
    whole = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(2))
    parts = torch.stack([row.double().square().sum() for row in whole.split(64)]).sum().sqrt().item()
    assert compute_total_norm([whole]).item() == pytest.approx(parts, rel=1e-6)
    assert compute_total_norm([whole.T, torch.zeros(3)]).item() == pytest.approx(parts, rel=1e-6)


@pytest.mark.long
def test_layouts_of_a_model_of_a_realistic_size() -> None:
    """Millions of entries in a tensor, whose squares one process must not add up worse than ranks with pieces do."""
    vocab = 32_768
    model = {"dim": 256, "layers": 8, "heads": 8, "intermediate_size": 704}
    sections: dict[str, Any] = {
        "model": model,
        "train": FEW,
        "optimizer": {"lr": 3e-4, "warmup_steps": 5, "clip_norm": 1.0},
    }
    layouts: list[dict[str, Any]] = [
        {"zero": 3},
        {"tensor": 4},
        {"tensor": 2, "pipeline": 2},
        {"pipeline": 2, "zero": 1},
        {"zero": 0},
    ]
    expected = run_ranks(1, train_rank, [tiny_config(1, **sections)], vocab, timeout=LIMIT_S)[0][0]
    configs = [tiny_config(4, **sections, parallel=parallel) for parallel in layouts]
    for parallel, found in zip(layouts, run_ranks(4, train_rank, configs, vocab, timeout=LIMIT_S)[0], strict=True):
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5), f"{parallel}, step {step}: loss"
            assert ours[1] == pytest.approx(theirs[1], rel=1e-5 if step == 1 else 1e-4), (
                f"{parallel}, step {step}: norm"
            )
    assert len(expected) == STEPS


SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 2),
    ("interleaved_zero_bubble", 4),
    ("zbv", 2),
    ("dualpipe_v", 2),
]


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize(("ranks", "pipeline"), [(2, 2), (4, 2), (4, 4)])
def test_matrix_of_schedules(ranks: int, pipeline: int, schedule: str, virtual: int) -> None:
    """Each schedule × ZeRO level × checkpointing that is not refused (tests/config/test_layout.py), untied and tied."""
    splits = schedule in ("interleaved_zero_bubble", "zbv", "dualpipe_v")
    levels = [zero for zero in (0, 1, 2, 3) if not (splits and zero == 3)] if ranks > pipeline else [0]
    kinds = [kind for kind in ("none", "selective", "full") if not (splits and kind == "selective")]
    cases = []
    for zero, kind, model in product(levels, kinds, ({}, TIED)):
        parallel = {"pipeline": pipeline, "schedule": schedule, "virtual_stages": virtual, "zero": zero}
        more = {"layers": max(4, pipeline * virtual), **model}
        cases.append({"parallel": parallel | {"activation_checkpointing": kind}, "model": more})
    check(ranks, *({**case, "train": {"micro_batch": 1 if pipeline == 4 else 2}} for case in cases))


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [{}, TIED], ids=["untied", "tied"])
def test_matrix_of_all_three(zero: int, model: dict[str, Any]) -> None:
    cases: list[dict[str, Any]] = [{"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}]
    if zero < 3:
        cases.append({"schedule": "zbv", "virtual_stages": 2})
    check(
        8,
        *(
            {"parallel": {"pipeline": 2, "tensor": 2, "zero": zero, **case}, "model": model, "train": FEW}
            for case in cases
        ),
    )


HYBRID = {"data": {"replicate": 2, "shard": 2}}
MIXTURES: list[tuple[int, dict[str, Any]]] = [
    (4, {"pipeline": 2, "offload": True}),
    (4, {"pipeline": 2, "zero": 1, "offload": True}),
    (4, {"tensor": 2, "zero": 2, "offload": True}),
    (4, {"pipeline": 2, "tensor": 2, "offload": True}),
    (4, {"pipeline": 2, "tensor": 2, "schedule": "gpipe"}),
    (4, {**V, "tensor": 2, "schedule": "interleaved_zero_bubble"}),
    (4, {**V, "tensor": 2, "schedule": "dualpipe_v"}),
    (8, {"tensor": 2, "zero": 1, **HYBRID}),
    (8, {"tensor": 2, "zero": 3, **HYBRID}),
    (8, {"pipeline": 2, "zero": 2, **HYBRID}),
    (8, {**V, "schedule": "zbv", "zero": 1, **HYBRID}),
]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [4, 8])
def test_mixtures(ranks: int) -> None:
    """Each kind of thing that is accepted together, once."""
    cases = [parallel for size, parallel in MIXTURES if size == ranks]
    check(ranks, *({"parallel": case, "train": {"micro_batch": 32 // ranks // 4}} for case in cases))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "model"), [(2, {}), (4, TIED), (8, {})])
def test_a_chunked_loss_on_every_kind_of_layout(ranks: int, model: dict[str, Any]) -> None:
    """Against the whole loss of one process."""
    kinds: list[dict[str, Any]] = [{"zero": zero} for zero in (0, 1, 2, 3)]
    kinds += [{"tensor": 2, "sequence": on, "loss_parallel": on} for on in (True, False)]
    kinds += [{"pipeline": 2, "schedule": name, "virtual_stages": count} for name, count in SCHEDULES if count < 4]
    if ranks == 4:
        kinds = [{**V, "schedule": "zbv", "tensor": 2}, {"tensor": 2, "zero": 2}, {"pipeline": 4}]
    if ranks == 8:
        kinds = [{"pipeline": 2, "tensor": 2, "zero": 1}, {"tensor": 2, "zero": 3, **HYBRID}]
    train = CHUNKED | {"micro_batch": {2: 2, 4: 1, 8: 1}[ranks]}
    check(ranks, *({"parallel": kind, "train": train, "model": model} for kind in kinds))


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({"zero": 3}, {}),
        ({"zero": 3, "activation_checkpointing": "selective"}, {}),
        ({"pipeline": 2}, {}),
        ({"pipeline": 2, "activation_checkpointing": "selective"}, {}),
        ({"pipeline": 2, "schedule": "gpipe"}, {}),
        ({**V, "schedule": "interleaved_1f1b", "activation_checkpointing": "full"}, {}),
        ({"tensor": 2}, {}),
        ({"tensor": 2, "activation_checkpointing": "selective"}, {"qk_norm": True}),
        ({"tensor": 2, "sequence": False, "activation_checkpointing": "full"}, {"qk_norm": True, "kv_heads": 2}),
    ],
)
def test_compiled_blocks(parallel: dict[str, Any], model: dict[str, Any]) -> None:
    compiled = tiny_config(2, parallel=parallel, model=model, train={"compile": True, "micro_batch": 4})
    results = run_ranks(2, train_rank, [compiled], timeout=LIMIT_S)
    for ours, theirs in zip(results[0][0], one_process({"train": FEW, "model": model}), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


# -- checkpoints move ----------------------------------------------------------------------------------------

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"zero": 1},
    {"pipeline": 2, "zero": 3},
    {"tensor": 2, "zero": 2},
    {**V, "schedule": "zbv", "zero": 1},
    {"pipeline": 2, "tensor": 2},
    {"zero": 3, "data": {"replicate": 2, "shard": 2}},
    {**V, "schedule": "interleaved_1f1b", "tensor": 2, "sequence": False},
]


def moving(parallel: dict[str, Any], model: dict[str, Any]) -> Config:
    return tiny_config(4, parallel=parallel, train=FEW, model=model)


def check_moves(results: list[Any], steps: int) -> None:
    """Check that all layouts have the same digest and continue with the same losses."""
    (reference, expected), *others = results[0]
    assert len(expected) == steps
    for number, (found, trained) in enumerate(others, 1):
        assert found == reference, f"digest of layout {number}"
        for ours, theirs in zip(trained, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), f"layout {number}"


@pytest.mark.parametrize("model", [pytest.param({}, marks=pytest.mark.long), TIED], ids=["untied", "tied"])
def test_checkpoints_move_from_layout_to_layout(tmp_path: Path, model: dict[str, Any]) -> None:
    """Each layout takes what the one before it saved, the first the last one's: a chain through all eight.

    Two steps more: the first shows the weights, the second the optimizer's state.
    """
    first, *others = [moving(parallel, model) for parallel in LAYOUTS]
    check_moves(run_ranks(4, change_layout_rank, first, [*others, first], tmp_path, 3, 2, timeout=LIMIT_S), 2)


@pytest.mark.long
@pytest.mark.parametrize("saved", range(8))
def test_any_layout_loads_what_any_other_saved(tmp_path: Path, saved: int) -> None:
    configs = [moving(parallel, TIED if saved % 2 else {}) for parallel in LAYOUTS]
    for loaded, config in enumerate(configs):
        folder = tmp_path / str(loaded)
        folder.mkdir()
        check_moves(run_ranks(4, change_layout_rank, configs[saved], [config], folder, 3, 10, timeout=LIMIT_S), 10)


@pytest.mark.story
def test_muon_updates_are_the_same_in_all_layouts(tmp_path: Path) -> None:
    """Cut by ZeRO and tensor parallel they move as in one process; bf16 rounds apart what differs in a last digit."""
    layouts: list[dict[str, Any]] = [{"zero": 3}, {"tensor": 2, "zero": 2}]
    muon = {"name": "muon", "lr": 2e-2, "clip_norm": 0.1}
    alone = run_ranks(1, train_rank, [tiny_config(1, train=FEW, optimizer=muon)])[0][0]
    first, *others = [tiny_config(4, train=FEW, optimizer=muon, parallel=parallel) for parallel in layouts]
    moved = run_ranks(4, change_layout_rank, first, others, tmp_path, 3, 2, timeout=LIMIT_S)[0]
    for found, trained in moved:
        assert found == moved[0][0], "the digest of weights and momentum, saved again"
        for (loss, norm), (its_loss, its_norm) in zip(trained, alone[3:5], strict=True):
            assert loss == pytest.approx(its_loss, rel=1e-5) and norm == pytest.approx(its_norm, rel=1e-3)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(HALF_MOMENTS, marks=pytest.mark.story),
        pytest.param(NO_MASTER, marks=pytest.mark.long),
        pytest.param(INT8, marks=pytest.mark.story),
    ],
    ids=["half", "none", "int8"],
)
def test_stochastic_rounding_is_the_same_in_all_layouts(tmp_path: Path, sections: dict[str, Any]) -> None:
    """What is drawn belongs to the entry of the whole parameter. bf16 weights are read back with the same bits."""
    layouts: list[dict[str, Any]] = [{"zero": 3}, {"tensor": 2, "zero": 2}, {**V, "schedule": "zbv", "zero": 1}, {}]
    low = "master" in sections["optimizer"]["state"]
    more = {**sections, "train": FEW | {"precision": "bf16" if low else "fp32"}}
    more["model"] = TIED | sections.get("model", {})
    alone = run_ranks(1, train_rank, [tiny_config(1, **more)])[0][0]
    first, *others = [tiny_config(4, **more, parallel=parallel) for parallel in layouts]
    moved = run_ranks(4, change_layout_rank, first, others, tmp_path, 3, 2, timeout=LIMIT_S)[0]
    limits = LOW["bf16"] if low else (1e-5, 1e-5)
    if sections is INT8:  # other last digits of a gradient may take the next of 127 levels
        limits = (1e-4, 1e-4)
    for found, trained in moved:
        assert found == moved[0][0], "the digest of weights and moments, saved again"
        for ours, theirs in zip(trained, alone[3:5], strict=True):
            for mine, its, limit in zip(ours, theirs, limits, strict=True):
                assert mine == pytest.approx(its, rel=limit), "(loss, norm)"


def places_rank(rank_info: RankInfo, configs: list[Config]) -> list[int]:
    """Check the positions from which random rounding is derived. Return the number of sharded parameters by config."""
    from pipeline.comm import groups
    from pipeline.model.decoder import full_tensor, local_tensor
    from pipeline.train.optimizer import _make_positions
    from tests.support.tiny_training import train_steps

    world = groups.join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        engine, _ = train_steps(rank_info, config, world, 0)
        sharded = [p for p in engine.parts[0].parameters() if local_tensor(p) is not p]
        for parameter in sharded:
            first, *rest = _make_positions(parameter, 7)
            local_tensor(parameter).detach().copy_(sum(rest, first) % 251)
            first, *rest = _make_positions(torch.empty(parameter.shape), 7)
            assert torch.equal(full_tensor(parameter.detach()), (sum(rest, first) % 251).float()), parameter
        results.append(len(sharded))
    return results


def test_sharded_entries_have_the_same_positions_for_random_rounding_as_whole_parameters() -> None:
    """FSDP shards tensors that tensor parallelism has sharded: strided and uneven shards, and copies."""
    layouts: list[dict[str, Any]] = [{"tensor": 2, "zero": 2}, {"zero": 3, "data": {"replicate": 2, "shard": 2}}]
    configs = [tiny_config(4, **HALF_MOMENTS, parallel=layout, train=FEW) for layout in layouts]
    assert run_ranks(4, places_rank, configs) == [[39, 39]] * 4


# -- stops and moves of whole runs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


BF16 = ("train.precision=bf16", "optimizer.state={master: none, moments: bf16}")
EXACT = {
    "zero 3": ("parallel.zero=3",),
    "zbv": ("parallel.pipeline=2", "parallel.zero=1", "parallel.schedule=zbv", "parallel.virtual_stages=2"),
    "tensor": ("parallel.tensor=2", "parallel.pipeline=2", "train.steps=9"),
    "replicated": ("parallel.tensor=2", "parallel.sequence=false"),
    "chunked": ("parallel.tensor=2", "parallel.pipeline=2", "train.loss_chunk=20"),
    "half moments": ("parallel.zero=3", "optimizer.state.moments=bf16"),
    "int8 moments": ("parallel.zero=3", "optimizer.state.moments=int8"),
    "no master": BF16,
    "no master in a pipeline": (*BF16, "parallel.pipeline=2", "parallel.zero=1", "model.tie_word_embeddings=true"),
    "muon": ("parallel.zero=3", "optimizer.name=muon"),
    "sgd": ("parallel.zero=2", "optimizer.name=sgd"),
    "alone": ("parallel.zero=2", "train.precision=bf16", "stages.train.tasks_per_node=1"),
}


@pytest.mark.parametrize(
    "name",
    [
        "zero 3",
        *(pytest.param(name, marks=pytest.mark.story) for name in EXACT if name not in ("zero 3", "replicated")),
        pytest.param("replicated", marks=pytest.mark.long),
    ],
)
def test_a_stop_does_not_change_the_result_in_any_layout(tmp_path: Path, data: Path, name: str) -> None:
    """Dropout is on. The digest and all metrics equal those of an undisturbed run."""
    more = ("model.layers=4", "train.steps=12", "train.micro_batch=2", "checkpoint.every_steps=4", *EXACT[name])
    more = ("stages.train.tasks_per_node=4", *more)
    calm = new_run(tmp_path, "calm", data, *more)
    run = new_run(tmp_path, "stopped", data, *more)
    ranks = calm.config.stages.train.ranks
    assert set(run_ranks(ranks, stage_rank, calm.path, "train")) == {ExitCode.DONE}
    assert set(interrupt_training(run, ranks, signal.SIGTERM, 3, [ranks - 1])) == {ExitCode.STOPPED}
    assert len(read_steps(run)) < len(read_steps(calm))
    assert set(run_ranks(ranks, stage_rank, run.path, "train")) == {ExitCode.DONE}
    assert read_steps(run) == read_steps(calm) and compute_run_digest(run) == compute_run_digest(calm)


def test_a_run_that_stops_in_one_layout_resumes_in_another(tmp_path: Path, data: Path) -> None:
    """(2, 1, 2) and then (1, 2, 2): the same samples, losses as if nothing had happened, and an evaluation."""
    more = ("model.layers=4", "model.dropout=0.0", "train.steps=12", "train.micro_batch=2", "checkpoint.every_steps=50")
    calm = new_run(tmp_path, "calm", data, *more, "stages.train.tasks_per_node=1")
    assert set(run_ranks(1, stage_rank, calm.path, "train")) == {ExitCode.DONE}
    layout = ("parallel.pipeline=2", "parallel.tensor=2", "stages.train.tasks_per_node=4")
    run = new_run(tmp_path, "moved", data, *more, *layout)
    assert set(interrupt_training(run, 4, signal.SIGTERM, 3, [2])) == {ExitCode.STOPPED}
    run.apply_overrides(["parallel.pipeline=1", "parallel.zero=3"])
    assert set(run_ranks(4, stage_rank, run.path, "train")) == {ExitCode.DONE}
    assert [line[4] for line in read_steps(run)] == [line[4] for line in read_steps(calm)]
    for ours, theirs in zip(read_steps(run), read_steps(calm), strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5) and ours[2] == pytest.approx(theirs[2], rel=1e-4)
    for ready in (run, calm):
        assert set(run_ranks(2, stage_rank, ready.path, "evaluate")) == {ExitCode.DONE}
    ours, theirs = (json.loads(next(r.evaluation_dir.glob("*.json")).read_text())["loss"] for r in (run, calm))
    assert ours == pytest.approx(theirs, rel=1e-5)


# -- precision -----------------------------------------------------------------------------------------------


LOW = {"bf16": (1e-4, 5e-3), "fp16": (2e-5, 1e-3)}
"""Largest relative difference of loss and norm from fp32; one process has 3.5e-5 and 6e-4, 6e-6 and 2e-4."""


def casts_rank(rank_info: RankInfo, config: Config) -> tuple[int, list[tuple[float, float]]]:
    """Return how often single MLP matrices of 32 × 16 are cast to bf16, and losses and norms of the steps."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class CastCounter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and (result.dtype, result.shape) == (torch.bfloat16, (32, 16)):
                self.count += 1
            return result

    with CastCounter() as casts:
        (steps,) = train_rank(rank_info, [config])
    return casts.count, steps


def test_a_single_rank_with_zero_casts_weights_once_per_step() -> None:
    """FSDP casts all weights once per step. Autocast casts each weight in each pass of each micro-batch."""
    train = {"precision": "bf16", "micro_batch": 4}
    configs = [tiny_config(1, parallel={"zero": zero}, train=train) for zero in (0, 1)]
    (autocast_count, _), (fsdp_count, trained) = (run_ranks(1, casts_rank, config)[0] for config in configs)
    assert autocast_count and not fsdp_count
    for ours, theirs in zip(trained, one_process({"train": FEW}), strict=True):
        for mine, exact, limit in zip(ours, theirs, LOW["bf16"], strict=True):
            assert mine == pytest.approx(exact, rel=limit)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.story)])
def test_low_precision_stays_near_fp32(precision: str) -> None:
    """Sharded, which gathers parameters in the low precision, or tensor parallelism; a backward pass in two parts."""
    cases: list[dict[str, Any]] = [{"zero": 3} if precision == "bf16" else {"tensor": 2}]
    cases.append({**V, "schedule": "zbv"})
    configs = [tiny_config(2, parallel=case, train={"precision": precision, "micro_batch": 4}) for case in cases]
    for case, trained in zip(cases, run_ranks(2, train_rank, configs, timeout=240)[0], strict=True):
        for ours, theirs in zip(trained, one_process({"train": FEW}), strict=True):
            for mine, exact, limit in zip(ours, theirs, LOW[precision], strict=True):
                assert mine == pytest.approx(exact, rel=limit), f"{case}: (loss, norm)"


def gradients_rank(rank_info: RankInfo, configs: list[Config]) -> list[dict[str, Any]]:
    """Return the unsharded gradients of this rank's stages after the first step, by parameter name, by config."""
    from pipeline.comm import groups
    from tests.support.tiny_training import make_batches, train_steps

    world = groups.join_process_group(rank_info, configs[0])
    results: list[dict[str, Any]] = []
    for config in configs:
        engine, _ = train_steps(rank_info, config, world, 0)
        engine.backward(
            {"tokens": make_batches(config)[0].chunk(engine.layout.dp)[engine.layout.coordinates(rank_info.rank).dp]}, 1
        )
        engine.clip_gradients(None)  # removes the loss scale of fp16
        weights = [named for part in engine.parts for named in engine.task.named_weights(part)]
        whole = {name: w.grad.full_tensor() if config.parallel.zero else w.grad for name, w in weights}
        results.append({name: gradient.numpy() for name, gradient in whole.items()})
    return results


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_low_precision_errors_do_not_accumulate_over_micro_batches(precision: str) -> None:
    """Gradients of 32 micro-batches are as close to fp32 as those of one, also in pipelines of sharded stages.

    Stages have their weights in low precision during a step, and schedules that split the backward pass accumulate
    gradients of these weights themselves. Norms do not show such errors, because they are orthogonal to the gradient.
    """
    cases: list[dict[str, Any]] = [{"zero": 3}]
    cases += [{"pipeline": 2, "zero": 1, "schedule": name, "virtual_stages": n} for name, n in SCHEDULES if n < 4]
    train = {"global_batch": 64, "micro_batch": 1, "precision": precision}
    configs = [tiny_config(4, parallel=case, train=train) for case in cases]
    exact = run_ranks(1, gradients_rank, [tiny_config(1, train={"global_batch": 64, "micro_batch": 16})])[0][0]
    results = run_ranks(4, gradients_rank, configs, timeout=LIMIT_S)
    for number, case in enumerate(cases):
        found = results[0][number] | results[2][number]  # the stages of both pipeline ranks
        assert found.keys() == exact.keys()
        error = sum(((found[name] - exact[name]) ** 2).sum() for name in exact)
        error = (error / sum((values**2).sum() for values in exact.values())) ** 0.5
        assert 1e-6 < error < (7e-3 if precision == "bf16" else 1e-3), (case, error)


def overflow_rank(rank_info: Any, config: Config) -> tuple[bool, float]:
    """Let a gradient overflow on rank 1. Return whether this rank's weights changed, and its loss scale afterwards."""
    import torch

    from pipeline.comm import groups
    from tests.support.tiny_training import train_steps

    world = groups.join_process_group(rank_info, config)
    engine, _ = train_steps(rank_info, config, world, 1)
    from tests.support.tiny_training import make_batches

    part = engine.layout.coordinates(world.rank).dp
    engine.backward({"tokens": make_batches(config)[1].chunk(engine.layout.dp)[part]}, 2)
    weights = [getattr(p, "_local_tensor", p).clone() for p in engine.parts[0].parameters()]
    if world.rank == 1:
        gradient = next(engine.parts[0].parameters()).grad
        getattr(gradient, "_local_tensor", gradient).view(-1)[0] = torch.inf
    engine.update_weights(engine.clip_gradients(0.5).item())
    after = [getattr(p, "_local_tensor", p) for p in engine.parts[0].parameters()]
    return any(not torch.equal(a, b) for a, b in zip(weights, after, strict=True)), engine.scaler.scale


@pytest.mark.parametrize("parallel", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}])
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks(parallel: dict[str, Any]) -> None:
    config = tiny_config(2, parallel=parallel, train={"precision": "fp16", "micro_batch": 4})
    assert run_ranks(2, overflow_rank, config) == [(False, 2.0**15)] * 2
