"""Layouts: what is refused and what is offered instead; group arithmetic against torch's own mesh and schedules."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from data_prep.tokenizer import load_encoder
from pipeline.base.errors import ConfigError, UserError
from pipeline.parallel.mesh import AXES, LayoutError, resolve_layout, split_layers
from tests.support.tiny_training import tiny_config

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"]


def test_a_given_tokenizer_that_cannot_be_cut_is_refused_at_submission(tmp_path: Path) -> None:
    vocabulary = {f"w{n}": n for n in range(32)}
    models_of_33 = {
        "bpe": models.BPE(vocabulary, []),
        "words": models.WordLevel(vocabulary, unk_token="w0"),
        "unigram": models.Unigram([(word, 0.0) for word in vocabulary], unk_id=0),
    }
    for name, model in models_of_33.items():
        tokenizer = Tokenizer(model)
        tokenizer.add_special_tokens(["<|endoftext|>"])
        tokenizer.save(str(path := tmp_path / f"{name}.json"))
        assert load_encoder(path, "<|endoftext|>").vocab_size == 33
        data = {"sequence_length": 16, "tokenizer": {"kind": "file", "path": str(path)}}
        with pytest.raises(UserError) as raised:
            tiny_config(2, parallel={"tensor": 2}, data=data)
        assert raised.value.code == "parallel.indivisible_size"
        assert all(fact in str(raised.value) for fact in (f"{name}.json", "33", "parallel.tensor (2)"))
    (tmp_path / "broken.json").write_text("{}")
    data["tokenizer"] = {"kind": "file", "path": str(tmp_path / "broken.json")}
    tiny_config(2, parallel={"tensor": 2}, data=data)  # what is wrong with it is for prepare to say


def test_a_trained_tokenizer_with_fewer_ids_is_named() -> None:
    config = tiny_config(2, parallel={"tensor": 2}, data={"sequence_length": 16, "tokenizer": {"vocab_size": 512}})
    with pytest.raises(LayoutError) as raised:
        resolve_layout(config, vocab_size=511)
    assert raised.value.code == "parallel.indivisible_size"
    assert all(fact in str(raised.value) for fact in ("data.tokenizer.vocab_size 512", "511", "pipeline 1 × data 2"))


@pytest.mark.parametrize(
    ("ranks", "sections", "code", "facts"),
    [
        (4, {"parallel": {"tensor": 3}}, "parallel.wrong_world_size", ["parallel.tensor (3)", "4"]),
        (
            4,
            {"parallel": {"tensor": 4}, "model": {"kv_heads": 2}},
            "parallel.indivisible_size",
            ["model.kv_heads", "2", "parallel.ten"],
        ),
        (
            2,
            {"parallel": {"tensor": 2}, "model": {"heads": 1, "kv_heads": 1}},
            "parallel.indivisible_size",
            ["model.heads", "1"],
        ),
        (
            2,
            {"parallel": {"tensor": 2}, "data": {"sequence_length": 15}},
            "parallel.indivisible_size",
            ["data.sequence_length", "15"],
        ),
        (
            2,
            {"parallel": {"tensor": 2}, "data": {"sequence_length": 16, "tokenizer": {"vocab_size": 511}}},
            "parallel.indivisible_size",
            ["data.tokenizer.vocab_size", "511", "parallel.tensor (2)"],
        ),
        (8, {"parallel": {"pipeline": 8}}, "parallel.too_many_stages", ["8", "model.layers (4)"]),
        (
            4,
            {"train": {"steps": 1, "global_batch": 6, "micro_batch": 2}},
            "parallel.indivisible_batch",
            ["1", "3", "4"],
        ),
        (
            2,
            {"parallel": {"pipeline": 2, "virtual_stages": 2}},
            "parallel.schedule_mismatch",
            ["1f1b", "parallel.virtual_stages (stages per rank)", "2"],
        ),
        (
            4,
            {"parallel": {"hook": {"kind": "topk"}, "tensor": 2}},
            "config.conflict",
            [
                "parallel.hook.kind",
                "topk",
                "parallel.pipeline (1)",
                "parallel.tensor (2)",
                "4",
                "pipeline 1 × data 4 × tensor 1",
            ],
        ),
        (
            2,
            {"parallel": {"local_sgd": {"every": 8}, "pipeline": 2}},
            "config.conflict",
            ["parallel.local_sgd (every 8)", "parallel.pipeline (2)", "parallel.tensor (1)"],
        ),
        (
            2,
            {"parallel": {"hook": {"kind": "bf16"}, "zero": 1}},
            "config.conflict",
            ["parallel.hook.kind", "bf16", "parallel.zero", "0", "parallel.offload"],
        ),
        (
            2,
            {"parallel": {"hook": {"kind": "fp16"}, "local_sgd": {"every": 8}}},
            "config.conflict",
            ["parallel.local_sgd (every 8)", "parallel.hook.kind", "fp16"],
        ),
        (
            2,
            {"parallel": {"hook": {"kind": "powersgd"}}, "train": {"precision": "fp16"}},
            "config.conflict",
            ["parallel.hook.kind", "powersgd", "train.precision", "fp16"],
        ),
        (2, {"parallel": {"pipeline": 2, "schedule": "interleaved_1f1b"}}, "parallel.schedule_mismatch", []),
        (
            2,
            {"parallel": {"pipeline": 2, "schedule": "zbv"}},
            "parallel.schedule_mismatch",
            ["zbv", "parallel.virtual_stages (stages per rank)", "2"],
        ),
        (
            2,
            {
                "parallel": {"pipeline": 2, "schedule": "dualpipe_v", "virtual_stages": 2},
                "train": {"global_batch": 3, "micro_batch": 1, "steps": 1},
            },
            "parallel.schedule_mismatch",
            ["dualpipe_v", "4", "2", "3"],
        ),
        (
            4,
            {"parallel": {"pipeline": 4}, "train": {"global_batch": 3, "micro_batch": 1, "steps": 1}},
            "parallel.schedule_mismatch",
            ["1f1b", "4", "3"],
        ),
        (
            2,
            {
                "parallel": {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
                "train": {"global_batch": 5, "micro_batch": 1, "steps": 1},
            },
            "parallel.schedule_mismatch",
            ["2", "5"],
        ),
        (
            2,
            {"parallel": {"data": {"shard": 2}}},
            "config.conflict",
            ["parallel.data.shard (2)", "parallel.zero", "1", "3"],
        ),
        (2, {"parallel": {"data": {"replicate": 2}, "zero": 3}}, "config.conflict", ["3", "parallel.data.shard"]),
        (
            4,
            {"parallel": {"data": {"replicate": 2}}},
            "parallel.wrong_world_size",
            ["2", "4", "stages.train", "pipeline 1 × data 4 × tensor 1"],
        ),
        (1, {"train": {"loss_chunk": 8, "precision": "fp16"}}, "config.conflict", ["train.precision", "fp16"]),
        (1, {"optimizer": {"state": {"master": "none"}}}, "config.conflict", ["train.precision", "bf16", "fp32"]),
        (
            2,
            {"optimizer": {"state": {"moments": "int8"}}, "parallel": {"tensor": 2}},
            "parallel.indivisible_size",
            ["model.heads", "64", "0.25", "parallel.tensor (2)"],
        ),
        (1, {"optimizer": {"state": {"moments": "bf16"}, "name": "muon"}}, None, ["optimizer.name", "muon"]),
        (1, {"optimizer": {"state": {"moments": "bf16"}, "name": "sgd"}}, None, ["optimizer.name", "sgd"]),
        (
            2,
            {"optimizer": {"state": {"moments": "bf16"}}, "parallel": {"local_sgd": {"every": 4}}},
            "config.conflict",
            ["fp32", "bf16", "parallel.local_sgd"],
        ),
        (
            2,
            {"optimizer": {"state": {"moments": "bf16"}}, "parallel": {"hook": {"kind": "powersgd"}}},
            "config.conflict",
            ["parallel.hook.kind", "powersgd"],
        ),
        (2, {"parallel": {"accurate_sums": True}}, "config.conflict", ["parallel.backend", "auto"]),
        (2, {"parallel": {"reduce": "micro_batch"}}, "config.conflict", ["parallel.zero", "2", "3", "0"]),
        (2, {"parallel": {"reduce": "micro_batch", "zero": 2, "pipeline": 2}}, "config.conflict", ["2"]),
    ],
)
def test_a_config_that_cannot_work_is_rejected(
    ranks: int, sections: dict[str, Any], code: str | None, facts: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_config(ranks, **sections)
    assert code in (None, raised.value.code)
    assert [fact for fact in facts if fact not in str(raised.value)] == []


def test_a_cut_model_of_ones_own_is_not_compiled() -> None:
    config = tiny_config(2, parallel={"tensor": 2}, train={"compile": True}, model={"qk_norm": True})
    assert resolve_layout(config, 2, 2, 64).tp == 2, "the decoder is"
    own = config.model_copy(update={"model": config.model.model_copy(update={"target": "own"})})
    with pytest.raises(LayoutError, match=r"train\.compile") as raised:
        resolve_layout(own, 2, 2, None)
    assert raised.value.code == "config.conflict"


def test_more_ranks_on_a_node_than_gpus_are_refused() -> None:
    for stage, more in (("train", {}), ("evaluate", {"backend": "nccl"})):
        sections: dict[str, Any] = {"stages": {stage: {"tasks_per_node": 4}}, "parallel": more}
        with pytest.raises(UserError) as raised:
            tiny_config(1, site={"gpus_per_node": 2}, **sections)
        assert raised.value.code == "parallel.too_few_gpus"
        for fact in (f"stages.{stage}.tasks_per_node (4)", "site.gpus_per_node (2)", "parallel.backend"):
            assert fact in str(raised.value)
        for good in ({"site": {"gpus_per_node": 4}}, {"site": {"gpus_per_node": 2}, "parallel": {"backend": "gloo"}}):
            tiny_config(1, **sections | good)


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipe_v"])
@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"steps": 1, "global_batch": 8, "compile": True}},
        {"parallel": {"zero": 3}},
        {"parallel": {"activation_checkpointing": "selective"}},
    ],
)
def test_schedules_that_split_the_backward_pass_refuse_what_that_breaks(schedule: str, sections: Any) -> None:
    both = {"parallel": {"pipeline": 2, "schedule": schedule, "virtual_stages": 2}}
    tiny_config(2, **both)
    merged = sections | {"parallel": sections.get("parallel", {}) | both["parallel"]}
    with pytest.raises(UserError) as raised:
        tiny_config(2, **merged)
    assert raised.value.code == "config.conflict" and f"parallel.schedule {schedule}" in str(raised.value)


def test_tensor_parallel_ranks_share_a_node() -> None:
    config = tiny_config(4, parallel={"tensor": 4})
    assert resolve_layout(config, 4, 4).tp == 4
    with pytest.raises(LayoutError, match=r"stages\.train\.tasks_per_node") as raised:
        resolve_layout(config, 4, 2)
    assert raised.value.code == "parallel.group_on_several_nodes"


def test_without_a_pipeline_its_schedule_means_nothing() -> None:
    """So that a run may `resume` with fewer ranks by one key."""
    layout = resolve_layout(tiny_config(2, parallel={"schedule": "zbv", "virtual_stages": 2}))
    assert (layout.stages, layout.stages_on_rank(0), layout.last_stage_rank) == (1, [0], 0)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_layout_fits_or_what_is_offered_does(data: st.DataObject) -> None:
    draw = data.draw
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32]))
    parallel: dict[str, Any] = {
        "pipeline": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "tensor": draw(st.sampled_from([1, 2, 4, 8])),
        "zero": draw(st.integers(0, 3)),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "virtual_stages": draw(st.integers(1, 3)),
        "sequence": draw(st.booleans()),
    }
    plain = tiny_config(
        1,
        model={"layers": draw(st.integers(1, 12)), "heads": draw(st.sampled_from([2, 4])), "kv_heads": 2},
        train={"global_batch": draw(st.integers(1, 48)), "micro_batch": 1},
    )

    def wanted(**sizes: int) -> Any:
        values = plain.parallel.model_copy(update=parallel | sizes)
        return resolve_layout(plain.model_copy(update={"parallel": values}), ranks, ranks)

    try:
        layout = wanted()
    except LayoutError as error:
        for pipeline, data_size, tensor in re.findall(r"pipeline (\d+) × data (\d+) × tensor (\d+)", str(error)):
            offered = wanted(pipeline=int(pipeline), tensor=int(tensor))
            assert offered.dp == int(data_size)
        return
    assert layout.world_size == ranks
    assert layout.micro_batches * layout.dp == plain.train.global_batch
    blocks = [number for part in layout.stage_layers for number in part]
    assert blocks == list(range(plain.model.layers)) and all(layout.stage_layers)
    stages = [stage for rank in range(layout.pp) for stage in layout.stages_on_rank(rank)]
    assert sorted(stages) == list(range(layout.stages))
    assert layout.stages - 1 in layout.stages_on_rank(layout.last_stage_rank)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SCHEDULES), st.integers(2, 5), st.integers(1, 4), st.integers(1, 24))
def test_torch_takes_every_schedule_that_is_accepted(schedule: str, pipeline: int, virtual: int, batches: int) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    from pipeline.parallel.pipeline_parallel import TORCH_SCHEDULES

    config = tiny_config(1, model={"layers": 20}, train={"global_batch": batches, "micro_batch": 1})
    parallel = {"pipeline": pipeline, "virtual_stages": virtual, "schedule": schedule}
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    try:
        layout = resolve_layout(config, pipeline, pipeline)
    except LayoutError:
        return
    orders = get_schedule_ops(TORCH_SCHEDULES[schedule], pipeline, batches, virtual)
    for rank, actions in enumerate(orders):
        found = {a.stage_index for action in actions if action for a in (action.sub_actions or [action])}
        assert found == set(layout.stages_on_rank(rank))


@settings(deadline=None, max_examples=120, derandomize=True)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=4, max_size=4), st.data())
def test_groups_and_parts_are_those_of_torch(sizes: list[int], data: st.DataObject) -> None:
    """On the fake process group, a mesh of up to 64 ranks in one process: each group's ranks, each rank's part."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pipeline.model.decoder import select_local_part

    pipeline, replicate, shard, tensor = sizes
    world = pipeline * replicate * shard * tensor
    assume(world <= 64)
    rank = data.draw(st.integers(0, world - 1))
    config = tiny_config(
        1, data={"sequence_length": 12}, model={"dim": 24, "heads": 12, "intermediate_size": 12, "layers": 4}
    )
    parallel = {
        "pipeline": pipeline,
        "tensor": tensor,
        "zero": 0 if shard == 1 else data.draw(st.integers(1, 3)),
        "data": "auto" if replicate == 1 or shard == 1 else {"replicate": replicate, "shard": shard},
        "schedule": "gpipe",
    }
    values = type(config.parallel).model_validate(parallel)
    train = config.train.model_copy(update={"micro_batch": 1, "global_batch": replicate * shard})
    layout = resolve_layout(config.model_copy(update={"parallel": values, "train": train}), world, world, 12)
    assert (layout.dp_replicate, layout.dp_shard) == (replicate, shard)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = layout.build_device_mesh("cpu")
        at = layout.coordinates(rank)
        where = {other: layout.coordinates(other) for other in range(world)}
        expected = {
            axis: [
                r for r, there in where.items() if all(getattr(there, a) == getattr(at, a) for a in AXES if a != axis)
            ]
            for axis in AXES
        }
        assert {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in expected} == expected
        rows, columns = (data.draw(st.integers(1, 2 * tensor * shard + 3)) for _ in range(2))
        cut, whole = data.draw(st.sampled_from([0, 1, None])), torch.arange(rows * columns).view(rows, columns)
        inner = Replicate() if cut is None else Shard(cut)
        both = mesh["dp_shard", "tp"]
        placed = [Shard(0), inner]
        like = DTensor.from_local(whole, both, placed, run_check=False, shape=whole.shape, stride=whole.stride())
        once = distribute_tensor(whole, mesh["tp"], [inner], src_data_rank=None).to_local()
        twice = distribute_tensor(once, mesh["dp_shard"], [Shard(0)], src_data_rank=None).to_local()
        part = select_local_part(whole, like)
        assert torch.equal(part, twice) or part.numel() == twice.numel() == 0
    finally:
        dist.destroy_process_group()


def test_ranks_that_are_not_the_configs_are_named() -> None:
    config = tiny_config(1, stages={"train": {"nodes": 2, "tasks_per_node": 2}}, train={"global_batch": 8})
    with pytest.raises(LayoutError) as raised:
        resolve_layout(config, 3)
    assert all(fact in str(raised.value) for fact in ("stages.train", "4 ranks", "2 nodes × 2", "3 run"))


def test_absurd_sizes_take_no_time() -> None:
    huge = tiny_config(1, model={"layers": 2**62})
    assert resolve_layout(huge).stage_layers == (range(2**62),)
    first, second = split_layers(huge, 2, 64)
    assert (first.start, first.stop, second.stop) == (0, second.start, 2**62)
    with pytest.raises(LayoutError):
        resolve_layout(tiny_config(1, train={"global_batch": 3 * 2**22, "micro_batch": 2}), 2**61, 2**61)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 5), st.integers(0, 7), st.integers(0, 3000))
def test_layers_are_balanced_as_well_as_can_be(stages: int, more: int, vocab: int) -> None:
    layers = stages + more
    config = tiny_config(1, model={"layers": layers})
    dim, heads, ffn = 16, 4 * 4, 32
    block = dim * (4 * heads + 3 * ffn) + heads * 16

    def worst(sizes: list[int]) -> int:
        costs = [size * block for size in sizes]
        costs[0] += dim
        costs[-1] += dim * vocab
        return max(costs)

    cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    best = min(worst([b - a for a, b in pairwise(cut)]) for cut in cuts)
    assert worst([len(part) for part in split_layers(config, stages, vocab)]) == best
