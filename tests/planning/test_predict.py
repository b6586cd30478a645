"""Tests of predicted step times.

Predictions are compared with formulas, with the theory of pipelines and with torch's schedules. More work or a slower
machine must not make a step faster.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.footprint import estimate_footprint
from benchmarks.gpu import ROOT
from benchmarks.others import all_to_all_time, expert_and_context_time
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.model.spec import training_flops_per_token
from pipeline.parallel.mesh import resolve_layout
from planning import predict as predicting
from planning.machine import MACHINES, Attention, Link, Machine, load_machine
from planning.predict import (
    CommGroup,
    Constants,
    all_gather_time,
    all_reduce_time,
    predict_step,
    ring_bandwidth,
    send_time,
)
from planning.timeline import _ACTION, Action, build_schedule, draw_text_timeline, replay_schedule
from planning.workload import Workload, workload_from_config
from tests.support.tiny_training import VOCAB, tiny_config

H100 = load_machine("h100")
SMALL_WORKLOAD = Workload(
    layers=16, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000, sequence=2048, micro_batch=2, global_batch=128
)
PIPELINE_WORKLOAD = replace(SMALL_WORKLOAD, pipeline=4, shard=4, zero=1, tensor=2)

IDEAL_MACHINE = Machine(
    gpu="ideal", memory_gib=1, bandwidth=1e30, multiprocessors=1, peak={"bf16": 1e15}, achievable={"bf16": 1e15},
    attention=Attention(portable=1e15, native=1e15), gpus_per_node=8, inside=Link(bandwidth=1e30, latency=1e-30),
    between=Link(bandwidth=1e30, latency=1e-30),
)  # fmt: skip
"""A machine on which only arithmetic takes time, at 1e15 FLOP/s."""
PERFECT_CONSTANTS = Constants(
    matmul=1, portable=1, attention=1, memory=1, eager=1, link=1, launch=1e-30, hidden=1e-30, overlap_slowdown=1e-30,
    jitter=1e-30,
)  # fmt: skip
"""Constants without losses and overheads."""


def test_collectives_take_as_long_as_computed_by_hand() -> None:
    """The tensors have one gigabyte, and the GPUs are H100s."""
    one_node = CommGroup(ranks=8, ranks_per_node=8)
    two_nodes = CommGroup(ranks=16, ranks_per_node=8)
    four_nodes = CommGroup(ranks=4, ranks_per_node=1)
    assert all_gather_time(1e9, one_node, H100) == pytest.approx(7 * 3e-6 + 7 / 8 * 1e9 / 450e9)
    assert ring_bandwidth(two_nodes, H100) == 400e9  # eight network cards of 50 GB/s: less than the 450 of NVLink
    assert all_gather_time(1e9, two_nodes, H100) == pytest.approx(7 * 3e-6 + 8e-6 + 15 / 16 * 1e9 / 400e9)
    assert all_reduce_time(1e9, four_nodes, H100) == pytest.approx(2 * (2 * 8e-6 + 3 / 4 * 1e9 / 50e9))
    assert all_gather_time(1e9, CommGroup(1, 1), H100) == 0.0
    assert send_time(1e9, four_nodes, H100, share=0.5) == pytest.approx(8e-6 + 1e9 / 25e9)
    # Half of the bytes leave the node. If they are four copies of the same bytes, each of the two nodes receives one.
    assert all_to_all_time(1e9, two_nodes, H100) == pytest.approx(1e9 / 2 / 50e9 + 8e-6)
    assert all_to_all_time(1e9, two_nodes, H100, copies=4) == pytest.approx(1e9 / 4 / 50e9 + 8e-6)


@pytest.mark.parametrize(
    ("ranks", "stride", "ranks_per_node"), [(8, 1, 8), (16, 1, 8), (4, 2, 4), (8, 4, 2), (64, 8, 1), (4, 64, 1)]
)
def test_a_group_with_a_stride_has_this_number_of_ranks_per_node(ranks: int, stride: int, ranks_per_node: int) -> None:
    group = CommGroup.with_stride(ranks, stride, H100)
    assert (group.ranks, group.ranks_per_node) == (ranks, ranks_per_node)


def test_on_an_ideal_machine_only_arithmetic_takes_time() -> None:
    """A step needs 6 FLOPs per weight and token, and the FLOPs of attention.

    Half of the attention is masked. The backward pass computes 2.5 times as much attention as the forward pass.
    """
    # the prediction divides the rate of attention by 1 + 512 / sequence length; this constant cancels the factor
    constants = replace(PERFECT_CONSTANTS, attention=(1 + 512 / 2048))
    prediction = predict_step(SMALL_WORKLOAD, IDEAL_MACHINE, constants)
    weights = 16 * (2048 * 128 * 2 * (16 + 8) + 3 * 2048 * 5632) + 2048 * 32000
    tokens = 128 * 2048
    attention = 3.5 * 2 * tokens * 2048 * 2048 * 16
    assert prediction.step == pytest.approx((6 * weights * tokens + attention) / 1e15, rel=2e-3)
    assert prediction.mfu == pytest.approx(prediction.tokens_per_gpu * SMALL_WORKLOAD.flops_per_token / 1e15)


WORKLOADS = st.builds(
    lambda tensor, pipeline, shard, zero, recompute, fused, micro_batch, micro_batches: replace(
        SMALL_WORKLOAD, tensor=tensor, pipeline=pipeline, shard=shard, zero=zero if shard > 1 else 0,
        recompute=recompute, fused=fused, micro_batch=micro_batch, global_batch=micro_batch * shard * micro_batches,
    ),
    st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4, 32]), st.integers(0, 3),
    st.sampled_from(["none", "selective", "full"]), st.booleans(), st.sampled_from([1, 2, 4]), st.integers(4, 12),
)  # fmt: skip
"""Random workloads."""


@settings(max_examples=60)
@given(WORKLOADS, st.sampled_from(["layers", "hidden", "ffn", "vocab", "sequence", "global_batch"]))
def test_more_work_takes_longer(work: Workload, name: str) -> None:
    larger = replace(work, **{name: 2 * getattr(work, name)})
    assert predict_step(larger, H100).step > predict_step(work, H100).step
    if name != "global_batch":
        assert estimate_footprint(larger).total > estimate_footprint(work).total


@settings(max_examples=60)
@given(WORKLOADS, st.integers(0, 17))
def test_a_step_is_the_sum_of_its_parts_and_no_faster_than_arithmetic(work: Workload, first_trained: int) -> None:
    """The blocks before `first_trained` are frozen."""
    shares = tuple(float(number >= first_trained) for number in range(work.layers))
    work = replace(work, trained=shares, trained_from=first_trained, trained_tables=(first_trained == 0, True))
    step = predict_step(work, H100, replace(Constants(), jitter=1e-12))
    parts = step.compute + step.tensor + step.others + step.pipeline + step.data + step.bubble + step.optimizer
    assert parts == pytest.approx(step.step, rel=1e-6)
    assert min(step.compute, step.bubble + 1e-9, step.data, step.tensor, step.optimizer) >= 0
    block_passes = work.layers + 2 * max(0, work.layers - first_trained)
    # `flops_per_token` includes the masked half of attention, which is not computed
    causal_flops = work.flops_per_token - 2 * block_passes * work.heads * work.head * work.sequence
    assert step.tokens_per_gpu * causal_flops < H100.achievable["bf16"]


@settings(max_examples=60)
@given(WORKLOADS, st.sampled_from(["bandwidth", "achievable", "attention", "inside", "between"]))
def test_a_better_machine_is_not_slower(work: Workload, field: str) -> None:
    value = getattr(H100, field)
    better_value = {name: 2 * rate for name, rate in value.items()} if isinstance(value, dict) else value
    if isinstance(value, float):
        better_value = 2 * value
    elif isinstance(value, Attention):
        better_value = Attention(portable=2 * value.portable, native=2 * value.native)
    elif isinstance(value, Link):
        better_value = Link(bandwidth=2 * value.bandwidth, latency=value.latency / 2)
    better_machine = H100.model_copy(update={field: better_value})
    assert predict_step(work, better_machine).step <= predict_step(work, H100).step * (1 + 1e-9)


@settings(max_examples=40)
@given(WORKLOADS)
def test_recomputation_costs_time_and_saves_memory(work: Workload) -> None:
    workloads = [replace(work, recompute=kind) for kind in ("none", "selective", "full")]
    step_times = [predict_step(workload, H100).step for workload in workloads]
    assert step_times == sorted(step_times)
    large_workloads = [replace(workload, micro_batch=8, layers=64) for workload in workloads]
    activations = [estimate_footprint(workload).activations for workload in large_workloads]
    assert activations == sorted(activations, reverse=True)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_each_zero_level_saves_memory(level: int) -> None:
    lower_level, workload = (replace(SMALL_WORKLOAD, shard=8, zero=zero) for zero in (level - 1, level))
    assert estimate_footprint(workload).total < estimate_footprint(lower_level).total


def test_the_predicted_bubble_equals_the_theory() -> None:
    """The bubble of p equal stages is (p − 1) / m of the busy time of m micro-batches.

    With v interleaved stages per rank, it is 1/v of that (arXiv 2104.04473, section 2.2).
    """
    # with a vocabulary of one token, the embedding and the output layer do not make their stages slower than the others
    equal_stages = replace(SMALL_WORKLOAD, pipeline=4, vocab=1, sequence=4096, micro_batch=1, global_batch=32)
    for virtual, schedule in ((1, "1f1b"), (2, "interleaved_1f1b")):
        work = replace(equal_stages, virtual_stages=virtual, schedule=schedule)
        prediction = predict_step(work, IDEAL_MACHINE, PERFECT_CONSTANTS)
        busy_s = prediction.step - prediction.bubble
        assert prediction.bubble / busy_s == pytest.approx(3 / 32 / virtual, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb1p", 1), ("zb2p", 1), ("zbv", 2)]
)
def test_an_extrapolated_pipeline_takes_as_long_as_a_fully_replayed_one(
    schedule: str, virtual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction replays only two rounds of micro-batches, and assumes that each other round takes equally long."""
    forward = tuple(1 + 0.1 * (stage % 3) for stage in range(4 * virtual))
    backward = tuple(2 * seconds for seconds in forward)
    arguments = (schedule, 4, virtual, 24, forward, backward)
    extrapolated_span = predicting._pipeline_span(*arguments)
    monkeypatch.setattr(predicting, "REPLAYED_ROUNDS", 100)
    # `__wrapped__` is the function without its cache, which has the extrapolated result
    assert extrapolated_span == pytest.approx(predicting._pipeline_span.__wrapped__(*arguments), rel=0.02)


@pytest.mark.parametrize(("ranks", "virtual", "batches"), [(2, 2, 4), (4, 3, 12), (4, 2, 6), (8, 2, 20), (2, 4, 3)])
def test_the_interleaved_order_equals_that_of_torch(ranks: int, virtual: int, batches: int) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    torch_orders = get_schedule_ops("Interleaved1F1B", ranks, batches, virtual)
    texts = (" ".join(map(str, order)) for order in torch_orders)
    expected = [
        [Action(kind, int(stage), int(micro)) for stage, kind, micro in _ACTION.findall(text)] for text in texts
    ]
    assert build_schedule("interleaved_1f1b", ranks, virtual, batches) == expected


def test_zero_bubble_schedules_have_a_smaller_bubble() -> None:
    """ZB-1p has a third of the bubble of 1f1b. ZB-2p has no bubble, because ranks do not wait at the end of a step."""
    bubbles = {}
    for schedule in ("1f1b", "zb1p", "zb2p"):
        orders = build_schedule(schedule, 4, 1, 16)
        times = replay_schedule(orders, 4, lambda action: 2 if action.kind == "B" else 1)
        rows = draw_text_timeline(orders, 4)
        # the time between the first and the last action of a rank, minus the time of its 16 micro-batches
        spans = [len(row.rstrip("·")) - actions[0][1] for row, actions in zip(rows, times, strict=True)]
        bubbles[schedule] = max(spans) - 16 * 3
    assert bubbles == {"1f1b": 9, "zb1p": 3, "zb2p": 0}


def test_only_the_active_experts_of_a_token_compute() -> None:
    moe_workload = replace(SMALL_WORKLOAD, experts=64, active=2, ffn=2816, expert=8, shard=8, zero=1, global_batch=1024)
    dense_workload = replace(SMALL_WORKLOAD, shard=8, zero=1, global_batch=1024)
    assert moe_workload.flops_per_token == dense_workload.flops_per_token
    moe_step = predict_step(moe_workload, H100, others=expert_and_context_time)
    dense_step = predict_step(dense_workload, H100, others=expert_and_context_time)
    assert moe_step.others > 0 and dense_step.others == 0
    assert dense_step.compute < moe_step.compute < 1.5 * dense_step.compute


def test_long_attention_overlaps_with_context_parallel_communication() -> None:
    slow_machine = H100.model_copy(update={"inside": Link(bandwidth=1e10, latency=1e-5)})
    short_sequences = replace(SMALL_WORKLOAD, context=8, sequence=4096, micro_batch=1, global_batch=8)
    long_sequences = replace(short_sequences, sequence=2**20)
    assert predict_step(short_sequences, slow_machine, others=expert_and_context_time).others > 0
    assert predict_step(long_sequences, slow_machine, others=expert_and_context_time).others == 0


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_on_a_slow_network_traffic_determines_the_step_of_zero_3(micro_batches: int) -> None:
    """Each micro-batch gathers bf16 weights forward and backward, and reduces fp32 gradients: 8 bytes per weight.

    If gradients are reduced once per step, a micro-batch sends 4 bytes per weight, and the step sends 4 more bytes.
    """
    slow_machine = IDEAL_MACHINE.model_copy(update={"between": Link(bandwidth=1e8, latency=1e-30)})
    work = replace(SMALL_WORKLOAD, vocab=1, shard=64, zero=3, global_batch=64 * 2 * micro_batches)
    weights = 16 * (work.attention_weights + work.expert_weights)
    bytes_per_s = 8 * 1e8  # the network cards of the eight GPUs of a node
    prediction = predict_step(work, slow_machine, PERFECT_CONSTANTS)
    assert prediction.step == pytest.approx(micro_batches * 8 * weights * 63 / 64 / bytes_per_s, rel=1e-3)
    assert prediction.data == pytest.approx(prediction.step - prediction.compute, rel=1e-6)
    reduced_once = predict_step(replace(work, each_micro_batch=False), slow_machine, PERFECT_CONSTANTS)
    assert reduced_once.step == pytest.approx((micro_batches * 4 + 4) * weights * 63 / 64 / bytes_per_s, rel=1e-3)


def test_zero_3_in_a_pipeline_gathers_weights_once_per_step() -> None:
    slow_machine = H100.model_copy(update={"between": Link(bandwidth=1e9, latency=1e-5)})
    without_pipeline = replace(SMALL_WORKLOAD, shard=64, zero=3, global_batch=64 * 2 * 8)
    with_pipeline = replace(without_pipeline, pipeline=2)
    assert predict_step(without_pipeline, slow_machine).data > 4 * predict_step(with_pipeline, slow_machine).data


def test_tensor_parallelism_across_nodes_is_slower_than_inside_a_node() -> None:
    """In a GB200 rack, fast links connect all 72 GPUs, so these count as one node even if a node has four GPUs."""
    assert H100.with_gpus_per_node(4).gpus_per_node == 4
    assert load_machine("gb200").with_gpus_per_node(4).gpus_per_node == 72
    work = replace(SMALL_WORKLOAD, tensor=8)
    assert predict_step(work, H100.with_gpus_per_node(4)).tensor > 1.5 * predict_step(work, H100).tensor


def test_workload_from_config_reads_layout_and_training_keys() -> None:
    overrides = ["parallel.tensor=2", "parallel.pipeline=4", "parallel.data=auto", "train.micro_batch=1"]
    config = load_config(ROOT / "configs/lm-8b.yaml", overrides)
    layout = resolve_layout(config)
    work = workload_from_config(config, layout, config.data.tokenizer.vocab_size)
    assert work.world == layout.world_size == 32
    assert sum(work.stages) == 32 and work.micro_batches == layout.micro_batches
    assert (work.zero, work.recompute, work.precision, work.fused) == (3, "selective", "bf16", True)


@settings(max_examples=60)
@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 8))
def test_pipeline_stages_contain_all_blocks_evenly(layers: int, pipeline: int, virtual: int) -> None:
    """Stages differ by at most one block. The first or the last stage has the smallest number of blocks."""
    stages = replace(SMALL_WORKLOAD, layers=layers, pipeline=pipeline, virtual_stages=virtual).stages
    assert sum(stages) == layers and max(stages) - min(stages) <= 1
    assert min(stages[0], stages[-1]) == min(stages)


@pytest.mark.parametrize("name", sorted(path.stem for path in MACHINES.glob("*.yaml")))
def test_predicted_mfu_on_each_included_machine_is_plausible(name: str) -> None:
    machine = load_machine(name)
    assert all(machine.achievable[key] <= machine.peak[key] for key in machine.achievable)
    assert 0.1 < predict_step(PIPELINE_WORKLOAD, machine).mfu < 0.9


def test_an_invalid_machine_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    for text, code, expected_text in (
        ("gpu: x", "plan.invalid_machine", "memory_gib"),
        ("[", "plan.unreadable_file", "m.yaml"),
        ("- 1", "plan.invalid_machine", "m.yaml"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=expected_text) as error:
            load_machine(str(file))
        assert error.value.code == code


def test_an_unknown_machine_is_an_error_that_names_similar_machines() -> None:
    for name, expected_text in (
        ("nowhere", "a100-40, .*h100"),
        ("h1000", "did you mean h100"),
        ("h10", "did you mean h100"),
    ):
        with pytest.raises(UserError, match=expected_text) as error:
            load_machine(name)
        assert error.value.code == "plan.no_such_machine" and name in str(error.value)


def test_an_unsupported_precision_is_an_error() -> None:
    with pytest.raises(UserError, match=r"A100 SXM4 40 GB.*fp8.*bf16, fp32") as error:
        predict_step(replace(SMALL_WORKLOAD, precision="fp8"), load_machine("a100-40"))
    assert error.value.code == "plan.unsupported_precision"


def test_plan_predicts_and_searches_layouts_without_importing_torch() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from pipeline.config.read import load_config; from planning.machine import load_machine\n"
        "from planning.plan import describe_best_layouts, describe_plan\n"
        "config, machine = load_config(Path('configs/lm-8b.yaml'), ['parallel.data=auto']), load_machine('h100')\n"
        "assert any('predicted for H100' in line for line in describe_plan(config, machine))\n"
        "assert len(list(describe_best_layouts(config, machine, '2', None, []))) > 12\n"
        "assert not {'torch', 'numpy', 'h5py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_windows_shorten_attention_in_plan_as_in_training() -> None:
    model = {"dim": 1024, "heads": 8, "layers": 2, "sliding_window": 256, "max_window_layers": 1}
    config, full = (
        tiny_config(1, model=values, data={"sequence_length": 4096})
        for values in (model, {**model, "sliding_window": None})
    )
    work, full_work = (workload_from_config(each, resolve_layout(each), VOCAB) for each in (config, full))
    difference = full_work.flops_per_token - work.flops_per_token
    assert difference == training_flops_per_token(full.model, VOCAB, 4096) - training_flops_per_token(
        config.model, VOCAB, 4096
    )
    assert predict_step(work, H100).step < predict_step(full_work, H100).step
