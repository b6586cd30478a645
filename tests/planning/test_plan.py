"""Tests of `plan`.

Planned memory is compared with the memory of real ranks, and timelines with theory. Other tests check printed lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

from benchmarks.gpu import ONE_GPU_OVERRIDES, ROOT
from cli.main import main
from examples import vit
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.config.sections import Config
from pipeline.model.activation_checkpointing import apply_activation_checkpointing
from pipeline.model.decoder import Decoder
from pipeline.model.task import DecoderTask
from pipeline.parallel.mesh import resolve_layout
from planning.memory import estimate_memory
from planning.plan import describe_plan
from planning.timeline import Action, draw_text_timeline, rank_actions
from tests.fake_gpu.peaks import ACTIVATION_CHECKPOINTING, PEAKS
from tests.parallel.test_parallel import FEW_BATCHES, LAYOUTS, TIED
from tests.support.ranks import run_ranks
from tests.support.tiny_training import VOCAB, tiny_config, train_steps


def measure_state_of_rank(rank_info: RankInfo, configs: list[Config]) -> list[tuple[int, int]]:
    """Return the bytes of weights and of the optimizer's moments on this rank, for each config."""
    import torch.distributed as dist

    from pipeline.comm import groups

    world = groups.join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        state = train_steps(rank_info, config, world, 0)[0].state_dict()
        sizes = {name: getattr(tensor, "_local_tensor", tensor).nbytes for name, tensor in state.items()}
        weights = sum(size for name, size in sizes.items() if name.startswith("model."))
        moments = sum(size for name, size in sizes.items() if "exp_avg" in name or "momentum" in name)
        results.append((weights, moments))
    dist.barrier()  # rank 0 hosts the store, which other ranks may still use to create process groups
    return results


@pytest.mark.parametrize("model", [{}, TIED], ids=["untied", "tied"])
def test_planned_weights_and_optimizer_state_equal_those_of_real_ranks(model: dict[str, Any]) -> None:
    # Pipelines with tied weights are left out: the first and the last rank both hold the embedding, but only one of
    # them has it in its state.
    layouts = [parallel for parallel in LAYOUTS if not (model and parallel.get("pipeline"))]
    configs = [tiny_config(4, parallel=parallel, model=model, train=FEW_BATCHES) for parallel in layouts]
    small_states = [{"moments": "bf16"}, {"moments": "bf16", "master": "none"}, {"master": "none"}]
    bf16 = FEW_BATCHES | {"precision": "bf16"}
    configs += [tiny_config(4, parallel={"zero": 2}, train=bf16, optimizer={"state": state}) for state in small_states]
    freeze_and_int8 = {"freeze": ["model.layers.[01].*", "model.norm.weight"], "state": {"moments": "int8"}}
    wide_model = model | {"dim": 64, "intermediate_size": 128}
    configs += [tiny_config(4, parallel={"zero": 2}, model=wide_model, train=FEW_BATCHES, optimizer=freeze_and_int8)]
    configs += [tiny_config(4, parallel={"zero": 3}, model=model, train=FEW_BATCHES, optimizer={"name": "muon"})]
    measured_by_rank = run_ranks(4, measure_state_of_rank, configs, timeout=240)
    for number, config in enumerate(configs):
        layout = resolve_layout(config, 4, 4, VOCAB)
        for rank in range(4):
            planned = estimate_memory(config, layout, layout.coordinates(rank).pp, VOCAB, [])
            weights, moments = measured_by_rank[rank][number]
            assert (planned.weights, planned.optimizer) == (weights, moments), (config.parallel, rank)


@pytest.mark.parametrize(("kind", "chunk"), [("selective", "null"), ("full", "null"), ("full", "1024")])
def test_the_planned_peak_is_close_to_that_of_a_step_on_fake_tensors(kind: str, chunk: str) -> None:
    """The model has two blocks with the sizes of lm-8b, in bf16."""
    overrides = ["model.layers=2", f"parallel.activation_checkpointing={kind}", "train.micro_batch=1"]
    overrides += [*ONE_GPU_OVERRIDES, "train.global_batch=4", f"train.loss_chunk={chunk}"]
    config = load_config(ROOT / "configs/lm-8b.yaml", overrides)
    vocab = config.data.tokenizer.vocab_size
    length = config.data.sequence_length
    task = DecoderTask(config, vocab)
    with FakeTensorMode():
        model = Decoder(config.model, vocab, length)
        assert model.lm_head is not None
        model.compute_dtype = model.lm_head.compute_dtype = torch.bfloat16
        model.lm_head.chunk = config.train.loss_chunk or 0
        for block in task.blocks(model):
            apply_activation_checkpointing(block, kind)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        batch = {"tokens": torch.zeros((1, length + 1), dtype=torch.int64)}
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            task.loss(model(*task.model_inputs(batch), **task.loss_inputs(batch)), batch).backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    layout = resolve_layout(config)
    planned = estimate_memory(config, layout, 0, vocab, rank_actions(layout)[0], on_cpu=True)
    assert (planned.weights, planned.gradients) == (peak[_MemRefType.PARAM], peak[_MemRefType.GRAD])
    activations = peak[_MemRefType.ACT] + peak[_MemRefType.TEMP]
    assert planned.gathered + planned.activations == pytest.approx(activations, rel=0.05)


def compute_planned_peak_gib(config: Config) -> float:
    """Return the planned peak memory of a config on one rank, in GiB."""
    layout = resolve_layout(config, 1)
    memory = estimate_memory(config, layout, 0, config.data.tokenizer.vocab_size, rank_actions(layout)[0])
    return memory.total / 2**30


@pytest.mark.parametrize(("peak_gib", "name", "overrides"), PEAKS)
def test_the_planned_peak_is_close_to_the_peak_that_torchs_allocator_counted(
    peak_gib: float, name: str, overrides: tuple[str, ...]
) -> None:
    config = load_config(ROOT / f"configs/{name}.yaml", [*ONE_GPU_OVERRIDES, *overrides, "train.global_batch=8"])
    assert compute_planned_peak_gib(config) == pytest.approx(peak_gib, rel=0.03)


@pytest.mark.parametrize(
    ("peak_gib", "local_sgd"), [(27.69, "{every: 2}"), (36.89, "{every: 2, outer_lr: 0.7, outer_momentum: 0.9}")]
)
def test_the_planned_peak_with_local_sgd_includes_saving_a_checkpoint(peak_gib: float, local_sgd: str) -> None:
    """torch's allocator counted the expected peaks on the fake H200. The peak of the step alone is 22.01 GiB."""
    overrides = ["parallel.zero=0", *ONE_GPU_OVERRIDES, "train.micro_batch=1", f"{ACTIVATION_CHECKPOINTING}=full"]
    overrides += [f"parallel.local_sgd={local_sgd}", "train.global_batch=8"]
    config = load_config(ROOT / "configs/lm-1b.yaml", overrides)
    assert compute_planned_peak_gib(config) == pytest.approx(peak_gib, rel=0.03)


@settings(max_examples=40)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(2, 8), st.integers(0, 16))
def test_pipeline_bubbles_equal_the_theory(schedule: str, ranks: int, additional_batches: int) -> None:
    """p ranks are idle for (p - 1) / (m + p - 1) of a step of m micro-batches (arXiv 2104.04473, section 2.2)."""
    batches = ranks + additional_batches
    parallel = {"pipeline": ranks, "schedule": schedule}
    layout = resolve_layout(
        tiny_config(ranks, parallel=parallel, model={"layers": 8}, train={"global_batch": 2 * batches})
    )
    rows = draw_text_timeline(rank_actions(layout), layout.stages)
    idle_fraction = sum(row.count("·") for row in rows) / sum(map(len, rows))
    assert idle_fraction == pytest.approx((ranks - 1) / (batches + ranks - 1))


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_timelines_of_torchs_schedules_contain_each_action_once(schedule: str, ranks: int) -> None:
    """Each stage computes forward and backward of each micro-batch once. The text timeline shows all actions."""
    parallel = {"pipeline": ranks, "schedule": schedule, "virtual_stages": 2}
    config = tiny_config(ranks, parallel=parallel, model={"layers": 8}, train={"global_batch": 16, "micro_batch": 1})
    layout = resolve_layout(config)
    orders = rank_actions(layout)
    actions = [action for order in orders for action in order]
    for stage in range(layout.stages):
        for micro in range(layout.micro_batches):
            kinds = sorted(action.kind for action in actions if (action.stage, action.micro) == (stage, micro))
            assert kinds in (["B", "F"], ["F", "I", "W"])  # I and W: backward for inputs and for weights
    rows = draw_text_timeline(orders, layout.stages)
    # F, I and W have one column, and B has two columns
    assert sum(len(row) - row.count("·") for row in rows) == 3 * layout.stages * layout.micro_batches
    assert len({len(row) for row in rows}) == 1


def test_a_schedule_with_a_deadlock_is_an_error() -> None:
    # the backward pass is before the forward pass of the same micro-batch
    with pytest.raises(RuntimeError, match="deadlock"):
        draw_text_timeline([[Action("B", 0, 0), Action("F", 0, 0)]], 1)


def test_the_plan_lists_mesh_memory_schedule_and_traffic() -> None:
    config = tiny_config(8, parallel={"pipeline": 2, "tensor": 2, "zero": 1}, train=FEW_BATCHES)
    text = "\n".join(describe_plan(config))
    assert "8 ranks: pipeline 2 × data 2 × tensor 2, ZeRO 1 over 2; 2 micro-batches" in text
    batch, length = config.train.global_batch, config.data.sequence_length
    assert f"a step: {batch} samples of {length} tokens: {batch * length}" in text
    # rank 5 is on node 0, has pipeline rank 1, data rank 0 and tensor rank 1, and its stage contains only block 3
    assert "    5     0    1    0    1   3–3" in text
    for group in ("shard", "tensor", "pipeline"):
        assert f"{group:>10} " in text.rsplit("sends", 1)[1]


def test_plan_fails_if_tensor_parallelism_does_not_divide_the_ranks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.plan.prepare_for_torch", lambda: None)  # it would change the signals of this process
    monkeypatch.setattr("sys.argv", ["submit.py", "plan", str(ROOT / "configs/quickstart.yaml"), "parallel.tensor=3"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "parallel.tensor (3) = 3 does not divide the number of training ranks, 2" in capfd.readouterr().err


def test_a_layout_above_the_gpu_memory_fails_after_its_table() -> None:
    def describe_with_memory(gib: float) -> Iterator[str]:
        """Describe the plan of lm-8b-1gpu.yaml for a GPU with this memory."""
        return describe_plan(load_config(ROOT / "configs/lm-8b-1gpu.yaml", [f"site.gpu_memory_gib={gib}"]))

    lines = list(describe_with_memory(140))
    assert any(line.startswith("a GPU has 150.324 GB: about 0.4 for CUDA and NCCL, 22.") for line in lines)
    printed_lines: list[str] = []
    with pytest.raises(UserError, match=r"127\.\d GB.* 0\.4.*118\.1.*110 GiB") as error:
        printed_lines.extend(describe_with_memory(110))
    assert error.value.code == "plan.not_enough_memory"
    assert printed_lines[-1].split()[-1].startswith("127.")


def test_planned_parameters_of_a_custom_model_add_up_to_those_of_the_model() -> None:
    """The last two lines of the plan have the parameters of the two pipeline ranks."""
    pipeline = ("parallel.pipeline=2", "parallel.schedule=zbv", "parallel.virtual_stages=2", "train.micro_batch=1")
    config = load_config(ROOT / "examples/vit.yaml", [*pipeline, "stages.train.tasks_per_node=2"])
    lines = list(describe_plan(config))
    assert any(line.startswith("zbv: a digit is") for line in lines) and any("▓" in line for line in lines)
    full_model = vit.build({**config.model.options, "layers": config.model.layers}, range(config.model.layers))
    counts = [int(line.split()[1].replace(",", "")) for line in lines[-2:]]
    assert sum(counts) == sum(parameter.numel() for parameter in full_model.parameters())
    assert min(counts) > 0


@pytest.mark.parametrize(("name", "billions"), [("lm-1b", 1.236), ("lm-8b", 8.030)])
def test_the_included_configs_have_the_expected_numbers_of_parameters(name: str, billions: float) -> None:
    config = load_config(ROOT / f"configs/{name}.yaml")
    memory = estimate_memory(config, resolve_layout(config), 0, config.data.tokenizer.vocab_size, [])
    assert memory.parameters / 1e9 == pytest.approx(billions, abs=5e-4)
