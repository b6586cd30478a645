"""The prediction against what physics says: formulas by hand, monotony, theory of pipelines, torch's schedules."""

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
from benchmarks.others import all_to_all_time, communication_time
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
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

H100 = load_machine("h100")
SMALL = Workload(
    layers=16, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000, sequence=2048, micro_batch=2, global_batch=128
)
PIPED = replace(SMALL, pipeline=4, shard=4, zero=1, tensor=2)

# An ideal machine: nothing costs but arithmetic.
IDEAL = Machine(
    gpu="ideal", memory_gib=1, bandwidth=1e30, multiprocessors=1, peak={"bf16": 1e15}, achievable={"bf16": 1e15},
    attention=Attention(portable=1e15, native=1e15), gpus_per_node=8, inside=Link(bandwidth=1e30, latency=1e-30),
    between=Link(bandwidth=1e30, latency=1e-30),
)  # fmt: skip
PERFECT = Constants(1, 1, 1, 1, 1, 1, 1e-30, 1e-30, 1e-30, 1e-30)


def test_collectives_take_as_long_as_computed_by_hand() -> None:
    """A gigabyte over H100s: 8 in a node, 16 in two nodes, 4 with one in each node."""
    inside, two, apart = CommGroup(8, 8), CommGroup(16, 8), CommGroup(4, 1)
    assert all_gather_time(1e9, inside, H100) == pytest.approx(7 * 3e-6 + 7 / 8 * 1e9 / 450e9)
    assert ring_bandwidth(two, H100) == 400e9  # eight cards of 50 GB/s, less than NVLink's 450
    assert all_gather_time(1e9, two, H100) == pytest.approx(7 * 3e-6 + 8e-6 + 15 / 16 * 1e9 / 400e9)
    assert all_reduce_time(1e9, apart, H100) == pytest.approx(2 * (2 * 8e-6 + 3 / 4 * 1e9 / 50e9))
    assert all_gather_time(1e9, CommGroup(1, 1), H100) == 0.0
    assert send_time(1e9, CommGroup(4, 1), H100, 0.5) == pytest.approx(8e-6 + 1e9 / 25e9)
    assert all_to_all_time(1e9, two, H100) == pytest.approx(1e9 / 2 / 50e9 + 8e-6)  # half of it leaves the node
    assert all_to_all_time(1e9, two, H100, copies=4) == pytest.approx(1e9 / 4 / 50e9 + 8e-6)  # twice, not four times


@pytest.mark.parametrize(("ranks", "stride", "group"), [(8, 1, (8, 8)), (16, 1, (16, 8)), (4, 2, (4, 4)),
                                                        (8, 4, (8, 2)), (64, 8, (64, 1)), (4, 64, (4, 1))])  # fmt: skip
def test_a_group_has_the_number_of_its_ranks_per_node(ranks: int, stride: int, group: tuple[int, int]) -> None:
    found = CommGroup.with_stride(ranks, stride, H100)
    assert (found.ranks, found.in_node) == group


def test_on_an_ideal_machine_only_arithmetic_takes_time() -> None:
    """6 FLOPs per weight and token; attention, half of which is masked, forward and 2.5 times that backward."""
    found = predict_step(SMALL, IDEAL, replace(PERFECT, attention=(1 + 512 / 2048)))
    weights = 16 * (2048 * 128 * 2 * (16 + 8) + 3 * 2048 * 5632) + 2048 * 32000
    tokens = 128 * 2048
    attention = 3.5 * 2 * tokens * 2048 * 2048 * 16
    assert found.step == pytest.approx((6 * weights * tokens + attention) / 1e15, rel=2e-3)
    assert found.mfu == pytest.approx(found.tokens_per_gpu * SMALL.flops_per_token / 1e15)


WORKS = st.builds(
    lambda tensor, pipeline, shard, zero, recompute, fused, micro, batches: replace(
        SMALL, tensor=tensor, pipeline=pipeline, shard=shard, zero=zero if shard > 1 else 0, recompute=recompute,
        fused=fused, micro_batch=micro, global_batch=micro * shard * batches,
    ),
    st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4, 32]), st.integers(0, 3),
    st.sampled_from(["none", "selective", "full"]), st.booleans(), st.sampled_from([1, 2, 4]), st.integers(4, 12),
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(WORKS, st.sampled_from(["layers", "hidden", "ffn", "vocab", "sequence", "global_batch"]))
def test_more_work_takes_longer(work: Workload, name: str) -> None:
    larger = replace(work, **{name: 2 * getattr(work, name)})
    assert predict_step(larger, H100).step > predict_step(work, H100).step
    if name != "global_batch":
        assert estimate_footprint(larger).total > estimate_footprint(work).total


@settings(deadline=None, max_examples=60)
@given(WORKS, st.integers(0, 17))
def test_a_step_is_the_sum_of_its_parts_and_no_faster_than_arithmetic(work: Workload, first: int) -> None:
    """Also where the blocks before the `first` one are frozen."""
    shares = tuple(float(number >= first) for number in range(work.layers))
    work = replace(work, trained=shares, trained_from=first, trained_tables=(first == 0, True))
    found = predict_step(work, H100, replace(Constants(), jitter=1e-12))
    parts = found.compute + found.tensor + found.others + found.pipeline + found.data
    assert parts + found.bubble + found.optimizer == pytest.approx(found.step, rel=1e-6)
    assert min(found.compute, found.bubble + 1e-9, found.data, found.tensor, found.optimizer) >= 0
    blocks = work.layers + 2 * max(0, work.layers - first)
    causal = work.flops_per_token - 2 * blocks * work.heads * work.head * work.sequence
    assert found.tokens_per_gpu * causal < H100.achievable["bf16"]


@settings(deadline=None, max_examples=60)
@given(WORKS, st.sampled_from(["bandwidth", "achievable", "attention", "inside", "between"]))
def test_a_better_machine_is_not_slower(work: Workload, part: str) -> None:
    value = getattr(H100, part)
    better = {name: 2 * size for name, size in value.items()} if isinstance(value, dict) else value
    if isinstance(value, float):
        better = 2 * value
    elif isinstance(value, Attention):
        better = Attention(portable=2 * value.portable, native=2 * value.native)
    elif isinstance(value, Link):
        better = Link(bandwidth=2 * value.bandwidth, latency=value.latency / 2)
    machine = H100.model_copy(update={part: better})
    assert predict_step(work, machine).step <= predict_step(work, H100).step * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(WORKS)
def test_recomputation_costs_time_and_saves_memory(work: Workload) -> None:
    kinds = [replace(work, recompute=kind) for kind in ("none", "selective", "full")]
    steps = [predict_step(made, H100).step for made in kinds]
    assert steps == sorted(steps)
    kept = [
        estimate_footprint(made).activations for made in (replace(made, micro_batch=8, layers=64) for made in kinds)
    ]
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_saves_memory(level: int) -> None:
    works = [replace(SMALL, shard=8, zero=zero) for zero in (level - 1, level)]
    assert estimate_footprint(works[1]).total < estimate_footprint(works[0]).total


def test_the_predicted_bubble_equals_the_theory() -> None:
    """(p − 1) / m of the busy time of equal stages (arXiv 2104.04473, section 2.2), 1/v of it interleaved."""
    even = replace(SMALL, pipeline=4, vocab=1, sequence=4096, micro_batch=1, global_batch=32)
    for virtual, schedule in ((1, "1f1b"), (2, "interleaved_1f1b")):
        made = replace(even, virtual_stages=virtual, schedule=schedule)
        found = predict_step(made, IDEAL, PERFECT)
        assert found.bubble / (found.step - found.bubble) == pytest.approx(3 / 32 / virtual, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb1p", 1), ("zb2p", 1), ("zbv", 2)]
)
def test_rounds_that_are_not_replayed_repeat_the_steady_state(
    schedule: str, virtual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = tuple(1 + 0.1 * (stage % 3) for stage in range(4 * virtual))
    times = (schedule, 4, virtual, 24, forward, tuple(2 * time for time in forward))
    short = predicting._pipeline_span(*times)
    monkeypatch.setattr(predicting, "REPLAYED_ROUNDS", 100)
    assert short == pytest.approx(predicting._pipeline_span.__wrapped__(*times), rel=0.02)


@pytest.mark.parametrize(("ranks", "virtual", "batches"), [(2, 2, 4), (4, 3, 12), (4, 2, 6), (8, 2, 20), (2, 4, 3)])
def test_the_interleaved_order_equals_that_of_torch(ranks: int, virtual: int, batches: int) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    found = get_schedule_ops("Interleaved1F1B", ranks, batches, virtual)
    texts = (" ".join(map(str, order)) for order in found)
    theirs = [[Action(kind, int(at), int(micro)) for at, kind, micro in _ACTION.findall(text)] for text in texts]
    assert build_schedule("interleaved_1f1b", ranks, virtual, batches) == theirs


def test_zero_bubble_schedules_have_a_smaller_bubble() -> None:
    """By the picture: 1f1b, ZB-1p a third of its bubble, ZB-2p none, as its ranks do not wait for the end of a step."""
    idle = {}
    for schedule in ("1f1b", "zb1p", "zb2p"):
        orders = build_schedule(schedule, 4, 1, 16)
        starts = [made[0][1] for made in replay_schedule(orders, 4, lambda action: 2 if action.kind == "B" else 1)]
        rows = draw_text_timeline(orders, 4)
        idle[schedule] = max(len(row.rstrip("·")) - start for row, start in zip(rows, starts, strict=True)) - 48
    assert idle == {"1f1b": 9, "zb1p": 3, "zb2p": 0}


def test_only_the_active_experts_of_a_token_compute() -> None:
    many = replace(SMALL, experts=64, active=2, ffn=2816, expert=8, shard=8, zero=1, global_batch=1024)
    dense = replace(SMALL, shard=8, zero=1, global_batch=1024)
    assert many.flops_per_token == dense.flops_per_token
    one, other = (
        predict_step(many, H100, others=communication_time),
        predict_step(dense, H100, others=communication_time),
    )
    assert one.others > 0 and other.others == 0 and other.compute < one.compute < 1.5 * other.compute


def test_long_attention_overlaps_with_context_parallel_communication() -> None:
    slow = H100.model_copy(update={"inside": Link(bandwidth=1e10, latency=1e-5)})
    short, long = (
        replace(SMALL, context=8, sequence=length, micro_batch=1, global_batch=8) for length in (4096, 2**20)
    )
    assert (
        predict_step(short, slow, others=communication_time).others > 0
        and predict_step(long, slow, others=communication_time).others == 0
    )


@pytest.mark.parametrize("batches", [1, 4])
def test_on_a_slow_network_traffic_determines_the_step_of_zero_3(batches: int) -> None:
    """Each micro-batch gathers bf16 weights forward and backward, and reduces fp32 gradients: 8 bytes per weight."""
    slow = IDEAL.model_copy(update={"between": Link(bandwidth=1e8, latency=1e-30)})
    work = replace(SMALL, vocab=1, shard=64, zero=3, global_batch=64 * 2 * batches)
    weights = 16 * (work.attention_weights + work.expert_weights)
    found = predict_step(work, slow, PERFECT)
    assert found.step == pytest.approx(batches * 8 * weights * 63 / 64 / 8e8, rel=1e-3)
    assert found.data == pytest.approx(found.step - found.compute, rel=1e-6)
    once = predict_step(replace(work, each_micro_batch=False), slow, PERFECT)
    assert once.step == pytest.approx((batches * 4 + 4) * weights * 63 / 64 / 8e8, rel=1e-3)


def test_zero_3_in_a_pipeline_gathers_weights_once_per_step() -> None:
    slow = H100.model_copy(update={"between": Link(bandwidth=1e9, latency=1e-5)})
    alone = replace(SMALL, shard=64, zero=3, global_batch=64 * 2 * 8)
    assert predict_step(alone, slow).data > 4 * predict_step(replace(alone, pipeline=2), slow).data


def test_a_node_has_as_many_gpus_as_the_config_has_ranks_per_node() -> None:
    assert H100.in_nodes_of(4).gpus_per_node == 4 and load_machine("gb200").in_nodes_of(4).gpus_per_node == 72
    spread = replace(SMALL, tensor=8)
    assert predict_step(spread, H100.in_nodes_of(4)).tensor > 1.5 * predict_step(spread, H100).tensor


def test_a_workload_contains_all_relevant_keys_of_the_config() -> None:
    more = ["parallel.tensor=2", "parallel.pipeline=4", "parallel.data=auto", "train.micro_batch=1"]
    config = load_config(ROOT / "configs/lm-8b.yaml", more)
    layout = resolve_layout(config)
    work = workload_from_config(config, layout, config.data.tokenizer.vocab_size)
    assert (
        work.world == layout.world_size == 32 and sum(work.stages) == 32 and work.micro_batches == layout.micro_batches
    )
    assert (work.zero, work.recompute, work.precision, work.fused) == (3, "selective", "bf16", True)


@settings(max_examples=60)
@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 8))
def test_stages_contain_each_block_once(layers: int, pipeline: int, virtual: int) -> None:
    stages = replace(SMALL, layers=layers, pipeline=pipeline, virtual_stages=virtual).stages
    assert sum(stages) == layers and max(stages) - min(stages) <= 1 and min(stages[0], stages[-1]) == min(stages)


@pytest.mark.parametrize("name", sorted(path.stem for path in MACHINES.glob("*.yaml")))
def test_all_included_machines_can_be_used_for_predictions(name: str) -> None:
    machine = load_machine(name)
    assert all(machine.achievable[key] <= machine.peak[key] for key in machine.achievable)
    assert 0.1 < predict_step(PIPED, machine).mfu < 0.9


def test_an_invalid_machine_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    for text, code, fact in (
        ("gpu: x", "plan.invalid_machine", "memory_gib"),
        ("[", "plan.unreadable_file", "m.yaml"),
        ("- 1", "plan.invalid_machine", "m.yaml"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=fact) as error:
            load_machine(str(file))
        assert error.value.code == code


def test_an_unknown_machine_is_an_error() -> None:
    for name, fact in (("nowhere", "a100-40, .*h100"), ("h1000", "did you mean h100"), ("h10", "did you mean h100")):
        with pytest.raises(UserError, match=fact) as error:
            load_machine(name)
        assert error.value.code == "plan.no_such_machine" and name in str(error.value)


def test_an_unsupported_precision_is_an_error() -> None:
    with pytest.raises(UserError, match=r"A100 SXM4 40 GB.*fp8.*bf16, fp32") as error:
        predict_step(replace(SMALL, precision="fp8"), load_machine("a100-40"))
    assert error.value.code == "plan.unsupported_precision"


def test_a_login_node_predicts_without_torch() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from pipeline.config.read import load_config; from planning.machine import load_machine\n"
        "from planning.plan import describe_best_layouts, describe_plan\n"
        "config, machine = load_config(Path('configs/lm-8b.yaml'), ['parallel.data=auto']), load_machine('h100')\n"
        "assert any('predicted for H100' in line for line in describe_plan(config, machine))\n"
        "assert len(list(describe_best_layouts(config, machine, '2', None, []))) > 12\n"
        "assert not {'torch', 'numpy', 'h5py'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
