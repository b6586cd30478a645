"""Tests of which layouts are rejected and which are suggested instead. Groups and schedules are compared with torch."""

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


def test_a_tokenizer_file_with_an_indivisible_vocabulary_is_rejected(tmp_path: Path) -> None:
    vocabulary = {f"w{n}": n for n in range(32)}
    models_by_name = {
        "bpe": models.BPE(vocabulary, []),
        "words": models.WordLevel(vocabulary, unk_token="w0"),
        "unigram": models.Unigram([(word, 0.0) for word in vocabulary], unk_id=0),
    }
    for name, model in models_by_name.items():
        tokenizer = Tokenizer(model)
        tokenizer.add_special_tokens(["<|endoftext|>"])
        tokenizer.save(str(path := tmp_path / f"{name}.json"))
        assert load_encoder(path, "<|endoftext|>").vocab_size == 33
        data = {"sequence_length": 16, "tokenizer": {"kind": "file", "path": str(path)}}
        with pytest.raises(UserError) as raised:
            tiny_config(2, parallel={"tensor": 2}, data=data)
        assert raised.value.code == "parallel.indivisible_size"
        assert all(
            expected_text in str(raised.value) for expected_text in (f"{name}.json", "33", "parallel.tensor (2)")
        )
    (tmp_path / "broken.json").write_text("{}")
    data["tokenizer"] = {"kind": "file", "path": str(tmp_path / "broken.json")}
    tiny_config(2, parallel={"tensor": 2}, data=data)  # the prepare stage reports that this file is not a tokenizer


def test_a_trained_tokenizer_with_an_indivisible_number_of_ids_is_rejected() -> None:
    config = tiny_config(2, parallel={"tensor": 2}, data={"sequence_length": 16, "tokenizer": {"vocab_size": 512}})
    with pytest.raises(LayoutError) as raised:
        resolve_layout(config, vocab_size=511)
    assert raised.value.code == "parallel.indivisible_size"
    assert all(
        expected_text in str(raised.value)
        for expected_text in ("data.tokenizer.vocab_size 512", "511", "pipeline 1 × data 2")
    )


@pytest.mark.parametrize(
    ("ranks", "sections", "code", "expected_texts"),
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
def test_a_contradictory_or_unsupported_config_is_rejected(
    ranks: int, sections: dict[str, Any], code: str | None, expected_texts: list[str]
) -> None:
    """The error must have the code `code`, unless it is None, and contain all expected texts."""
    with pytest.raises(ConfigError) as raised:
        tiny_config(ranks, **sections)
    assert code in (None, raised.value.code)
    assert [expected_text for expected_text in expected_texts if expected_text not in str(raised.value)] == []


def test_a_custom_model_with_tensor_parallelism_cannot_be_compiled() -> None:
    config = tiny_config(2, parallel={"tensor": 2}, train={"compile": True}, model={"qk_norm": True})
    assert resolve_layout(config, world_size=2, ranks_per_node=2, vocab_size=64).tp == 2, "the decoder can be compiled"
    custom_config = config.model_copy(update={"model": config.model.model_copy(update={"target": "own"})})
    with pytest.raises(LayoutError, match=r"train\.compile") as raised:
        resolve_layout(custom_config, world_size=2, ranks_per_node=2, vocab_size=None)
    assert raised.value.code == "config.conflict"


def test_more_ranks_than_gpus_on_a_node_are_rejected() -> None:
    for stage, parallel in (("train", {}), ("evaluate", {"backend": "nccl"})):
        sections: dict[str, Any] = {"stages": {stage: {"tasks_per_node": 4}}, "parallel": parallel}
        with pytest.raises(UserError) as raised:
            tiny_config(1, site={"gpus_per_node": 2}, **sections)
        assert raised.value.code == "parallel.too_few_gpus"
        for expected_text in (f"stages.{stage}.tasks_per_node (4)", "site.gpus_per_node (2)", "parallel.backend"):
            assert expected_text in str(raised.value)
        tiny_config(1, **sections | {"site": {"gpus_per_node": 4}})
        tiny_config(1, **sections | {"site": {"gpus_per_node": 2}, "parallel": {"backend": "gloo"}})


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipe_v"])
@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"steps": 1, "global_batch": 8, "compile": True}},
        {"parallel": {"zero": 3}},
        {"parallel": {"activation_checkpointing": "selective"}},
    ],
)
def test_schedules_that_split_the_backward_pass_reject_incompatible_options(schedule: str, sections: Any) -> None:
    pipeline = {"pipeline": 2, "schedule": schedule, "virtual_stages": 2}
    tiny_config(2, parallel=pipeline)
    incompatible_sections = sections | {"parallel": sections.get("parallel", {}) | pipeline}
    with pytest.raises(UserError) as raised:
        tiny_config(2, **incompatible_sections)
    assert raised.value.code == "config.conflict" and f"parallel.schedule {schedule}" in str(raised.value)


def test_tensor_parallel_ranks_must_be_on_one_node() -> None:
    config = tiny_config(4, parallel={"tensor": 4})
    assert resolve_layout(config, world_size=4, ranks_per_node=4).tp == 4
    with pytest.raises(LayoutError, match=r"stages\.train\.tasks_per_node") as raised:
        resolve_layout(config, world_size=4, ranks_per_node=2)
    assert raised.value.code == "parallel.group_on_several_nodes"


def test_without_a_pipeline_the_schedule_has_no_effect() -> None:
    """This allows resuming a run with fewer ranks by changing only `parallel.pipeline`."""
    layout = resolve_layout(tiny_config(2, parallel={"schedule": "zbv", "virtual_stages": 2}))
    assert (layout.stages, layout.stages_on_pipeline_rank(0), layout.last_stage_pipeline_rank) == (1, [0], 0)


@settings(max_examples=200)
@given(st.data())
def test_a_layout_is_valid_or_the_error_suggests_a_valid_one(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32]))
    parallel: dict[str, Any] = {
        "pipeline": data.draw(st.sampled_from([1, 2, 3, 4, 8])),
        "tensor": data.draw(st.sampled_from([1, 2, 4, 8])),
        "zero": data.draw(st.integers(0, 3)),
        "schedule": data.draw(st.sampled_from(SCHEDULES)),
        "virtual_stages": data.draw(st.integers(1, 3)),
        "sequence": data.draw(st.booleans()),
    }
    config = tiny_config(
        1,
        model={"layers": data.draw(st.integers(1, 12)), "heads": data.draw(st.sampled_from([2, 4])), "kv_heads": 2},
        train={"global_batch": data.draw(st.integers(1, 48)), "micro_batch": 1},
    )

    def resolve(**sizes: int) -> Any:
        """Return the layout with the drawn values of `parallel`, changed by `sizes`."""
        values = config.parallel.model_copy(update=parallel | sizes)
        return resolve_layout(config.model_copy(update={"parallel": values}), ranks, ranks)

    try:
        layout = resolve()
    except LayoutError as error:
        for pipeline, data_size, tensor in re.findall(r"pipeline (\d+) × data (\d+) × tensor (\d+)", str(error)):
            suggested = resolve(pipeline=int(pipeline), tensor=int(tensor))
            assert suggested.dp == int(data_size)
        return
    assert layout.world_size == ranks
    assert layout.micro_batches * layout.dp == config.train.global_batch
    blocks = [number for part in layout.stage_layers for number in part]
    assert blocks == list(range(config.model.layers)) and all(layout.stage_layers)
    stages = [stage for rank in range(layout.pp) for stage in layout.stages_on_pipeline_rank(rank)]
    assert sorted(stages) == list(range(layout.stages))
    assert layout.stages - 1 in layout.stages_on_pipeline_rank(layout.last_stage_pipeline_rank)


@settings(max_examples=60)
@given(st.sampled_from(SCHEDULES), st.integers(2, 5), st.integers(1, 4), st.integers(1, 24))
def test_torch_supports_every_accepted_schedule(
    schedule: str, pipeline: int, virtual_stages: int, micro_batch_count: int
) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    from pipeline.parallel.pipeline_parallel import TORCH_SCHEDULES

    config = tiny_config(1, model={"layers": 20}, train={"global_batch": micro_batch_count, "micro_batch": 1})
    parallel = {"pipeline": pipeline, "virtual_stages": virtual_stages, "schedule": schedule}
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    try:
        layout = resolve_layout(config, pipeline, pipeline)
    except LayoutError:
        return
    orders = get_schedule_ops(TORCH_SCHEDULES[schedule], pipeline, micro_batch_count, virtual_stages)
    for rank, actions in enumerate(orders):
        stages = {
            sub_action.stage_index for action in actions if action for sub_action in (action.sub_actions or [action])
        }
        assert stages == set(layout.stages_on_pipeline_rank(rank))


@settings(max_examples=120, derandomize=True)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=5, max_size=5), st.data())
def test_groups_and_local_parts_are_the_same_as_in_torch(sizes: list[int], data: st.DataObject) -> None:
    """Compare the ranks of each group and the local part of a tensor, on a fake process group of up to 64 ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pipeline.model.decoder import select_local_part

    pipeline, replicate, shard, context, tensor = sizes
    world_size = pipeline * replicate * shard * context * tensor
    assume(world_size <= 64)
    rank = data.draw(st.integers(0, world_size - 1))
    config = tiny_config(
        1, data={"sequence_length": 288}, model={"dim": 24, "heads": 12, "intermediate_size": 12, "layers": 4}
    )
    parallel = {
        "pipeline": pipeline,
        "tensor": tensor,
        "context": context,
        "zero": 0 if shard == 1 else data.draw(st.integers(1, 3)),
        "data": "auto" if replicate == 1 or shard == 1 else {"replicate": replicate, "shard": shard},
        "schedule": "gpipe",
    }
    parallel_config = type(config.parallel).model_validate(parallel)
    train = config.train.model_copy(update={"micro_batch": 1, "global_batch": replicate * shard})
    layout = resolve_layout(
        config.model_copy(update={"parallel": parallel_config, "train": train}), world_size, world_size, 12
    )
    assert (layout.dp_replicate, layout.dp_shard) == (replicate, shard)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        mesh = layout.build_device_mesh("cpu")
        rank_coordinates = layout.coordinates(rank)

        def list_ranks_along(*axes: str) -> list[int]:
            """Return the ranks whose coordinates equal those of `rank`, except along these axes."""
            other_axes = [name for name in AXES if name not in axes]
            return [
                other
                for other in range(world_size)
                if all(
                    getattr(layout.coordinates(other), name) == getattr(rank_coordinates, name) for name in other_axes
                )
            ]

        has_zero = parallel["zero"] != 0
        expected = {
            "pp": list_ranks_along("pp"),
            "tp": list_ranks_along("tp"),
            # The ranks along `cp` split the state, too.
            "shard": list_ranks_along("dp_shard", "cp") if has_zero else [rank],
            "replicate": list_ranks_along("dp_replicate", *(() if has_zero else ("dp_shard", "cp"))),
        }
        assert {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in expected} == expected
        assert list_ranks_along("cp") in layout.list_groups("cp")
        rows, columns = (data.draw(st.integers(1, 2 * tensor * layout.state_shards + 3)) for _ in range(2))
        split_dim = data.draw(st.sampled_from([0, 1, None]))
        full = torch.arange(rows * columns).view(rows, columns)
        tp_placement = Replicate() if split_dim is None else Shard(split_dim)
        target = DTensor.from_local(
            full,
            mesh["shard", "tp"],
            [Shard(0), tp_placement],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        tp_part = distribute_tensor(full, mesh["tp"], [tp_placement], src_data_rank=None).to_local()
        expected_part = distribute_tensor(tp_part, mesh["shard"], [Shard(0)], src_data_rank=None).to_local()
        part = select_local_part(full, target)
        assert torch.equal(part, expected_part) or part.numel() == expected_part.numel() == 0
    finally:
        dist.destroy_process_group()


def test_an_error_names_both_numbers_of_ranks_if_they_differ_from_the_config() -> None:
    config = tiny_config(1, stages={"train": {"nodes": 2, "tasks_per_node": 2}}, train={"global_batch": 8})
    with pytest.raises(LayoutError) as raised:
        resolve_layout(config, 3)
    assert all(
        expected_text in str(raised.value) for expected_text in ("stages.train", "4 ranks", "2 nodes × 2", "3 run")
    )


def test_very_large_sizes_are_handled_without_loops() -> None:
    huge_config = tiny_config(1, model={"layers": 2**62})
    assert resolve_layout(huge_config).stage_layers == (range(2**62),)
    first_part, second_part = split_layers(huge_config, 2, 64)
    assert (first_part.start, first_part.stop, second_part.stop) == (0, second_part.start, 2**62)
    with pytest.raises(LayoutError):
        resolve_layout(tiny_config(1, train={"global_batch": 3 * 2**22, "micro_batch": 2}), 2**61, 2**61)


@settings(max_examples=150)
@given(st.integers(1, 5), st.integers(0, 7), st.integers(0, 3000))
def test_layers_are_split_with_the_smallest_possible_largest_cost(stages: int, extra_layers: int, vocab: int) -> None:
    layers = stages + extra_layers
    config = tiny_config(1, model={"layers": layers})
    dim = 16
    query_width = 4 * 4  # heads × dimensions of a head
    intermediate_size = 32
    # multiplications per token: four matrices of attention, three of the MLP, and attention over 16 tokens
    block_cost = dim * (4 * query_width + 3 * intermediate_size) + query_width * 16

    def find_largest_cost(sizes: list[int]) -> int:
        """Return the cost of the most expensive stage if the stages have these numbers of layers."""
        costs = [size * block_cost for size in sizes]
        costs[0] += dim
        costs[-1] += dim * vocab
        return max(costs)

    all_bounds = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    smallest_cost = min(find_largest_cost([end - start for start, end in pairwise(bounds)]) for bounds in all_bounds)
    assert find_largest_cost([len(part) for part in split_layers(config, stages, vocab)]) == smallest_cost


def test_an_error_suggests_a_smaller_context() -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_config(8, parallel={"context": 4}, data={"sequence_length": 500}, train={"global_batch": 8})
    assert raised.value.code == "parallel.indivisible_size"
    assert "2 × parallel.context (4)" in str(raised.value)
    assert "pipeline 1 × data 4 × tensor 1 × context 2" in str(raised.value)
