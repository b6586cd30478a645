"""The optimizer's groups, and the learning rate against closed forms and torch's own schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from pipeline.config.sections import ModelConfig, OptimizerConfig
from pipeline.model.decoder import Decoder, init_weights
from pipeline.train.lean_adamw import LeanAdamW
from pipeline.train.optimizer import learning_rate, make_optimizer, set_learning_rate

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_in_one_group(tied: bool) -> None:
    model = Decoder(ModelConfig(dim=16, layers=2, heads=2, tie_word_embeddings=tied), 50, 8)
    model.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
    config = OptimizerConfig(weight_decay=0.3, lr=0.01, betas=(0.8, 0.9), eps=1e-6)
    optimizer = make_optimizer(model, config, CPU)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decays)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert decays.keys() == {id(p) for p in trained.values()}
    for name, parameter in trained.items():
        assert decays[id(parameter)] == (0.0 if "norm" in name else 0.3), name
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (0.01, (0.8, 0.9), 1e-6, True)
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_step_is_adamw() -> None:
    """The first step from the formula (arXiv 1711.05101, algorithm 2): both moments' corrections cancel."""
    model = torch.nn.Linear(4, 3)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1, lr=0.01, eps=1e-8), CPU)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        decay = 0.1 if parameter.ndim == 2 else 0.0
        gradient = parameter.grad
        expected = start[name] * (1 - 0.01 * decay) - 0.01 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected)


def test_filled_state_is_the_state_before_the_first_step() -> None:
    results = []
    for fill in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 3)
        optimizer = make_optimizer(model, OptimizerConfig(), CPU)
        assert len(optimizer.state) == 2
        if not fill:
            optimizer.state.clear()  # torch's own first step makes it
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        results.append([*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_steps_are_those_of_torch(name: str) -> None:
    """To the bit, on the same gradients: Muon for the blocks' matrices, AdamW for the rest."""
    config = OptimizerConfig(name=name, weight_decay=0.3, lr=0.01, momentum=0.8)  # type: ignore[arg-type]
    models = [Decoder(ModelConfig(dim=16, layers=2, heads=2), 50, 8) for _ in range(2)]
    for model in models:
        init_weights(model, 1, 0.1)
    ours, plain = models
    optimizers: list[torch.optim.Optimizer] = []
    decayed = {n: p for n, p in plain.named_parameters() if p.ndim == 2}
    if name == "muon":
        matrices = [decayed.pop(n) for n in list(decayed) if "layers" in n]
        assert len(matrices) == 2 * 7 and len(decayed) == 2
        options = {"weight_decay": 0.3, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(matrices, lr=0.01, **options))  # type: ignore[arg-type]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": list(decayed.values()), "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    if name == "sgd":
        optimizers.append(torch.optim.SGD(groups, lr=0.01, momentum=0.8))
    else:
        optimizers.append(torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True))
    optimizer = make_optimizer(ours, config, CPU, list(ours.model.blocks))
    for step in range(3):
        torch.manual_seed(step)
        for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        for each in (optimizer, *optimizers):
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def lean(dtypes: tuple[torch.dtype, torch.dtype], compiled: bool = False) -> tuple[LeanAdamW, torch.nn.Parameter]:
    """AdamW on one matrix; its dtype, and the moments'."""
    torch.manual_seed(1)
    matrix = torch.nn.Parameter(torch.randn(40, 30).to(dtypes[0]))
    config = OptimizerConfig(weight_decay=0.3, lr=0.01)
    optimizer = LeanAdamW([{"params": [matrix], "weight_decay": 0.3}], config, {matrix: 7}, compiled)
    moments = {key: torch.zeros_like(matrix, dtype=dtypes[1]) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[matrix] = {"step": torch.zeros(()), **moments}
    return optimizer, matrix


def stepped(optimizer: LeanAdamW, matrix: torch.nn.Parameter, steps: int = 5) -> list[torch.Tensor]:
    """Weights and moments after some steps, with a rate that changes."""
    for step in range(steps):
        torch.manual_seed(step)
        matrix.grad = torch.randn(40, 30).to(matrix.dtype)
        optimizer.clip_with_norm(step + 1.0, torch.linalg.vector_norm(matrix.grad.float()))
        set_learning_rate(optimizer, 0.01 / (step + 1))
        optimizer.step()
    return [matrix.detach(), *(optimizer.state[matrix][key] for key in ("exp_avg", "exp_avg_sq"))]


def test_lean_adamw_is_adamw() -> None:
    """In fp32 to rounding; kept in bf16 within what its 8 bits say, and the same in pieces."""
    optimizer, matrix = lean((torch.float32, torch.float32))
    exact = torch.nn.Parameter(matrix.detach().clone())
    plain = torch.optim.AdamW([exact], lr=0.01, betas=(0.9, 0.95), weight_decay=0.3)
    found = stepped(optimizer, matrix)
    for step in range(5):
        torch.manual_seed(step)
        exact.grad = torch.randn(40, 30)
        torch.nn.utils.clip_grad_norm_([exact], step + 1.0)
        set_learning_rate(plain, 0.01 / (step + 1))
        plain.step()
    whole = [exact.detach(), plain.state[exact]["exp_avg"], plain.state[exact]["exp_avg_sq"]]
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    half, in_pieces = lean((torch.float32, torch.bfloat16)), lean((torch.float32, torch.bfloat16))
    in_pieces[0]._at_once = 100
    results = stepped(*half), stepped(*in_pieces)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for ours, theirs in zip(results[0][1:], whole[1:], strict=True):
        assert ours.dtype == torch.bfloat16
        assert 1e-3 < (ours.float() - theirs).norm() / theirs.norm() < 1e-2


def test_bf16_weights_move_on_average_as_fp32_ones_would() -> None:
    """By updates of a 13th of what rounding to the nearest would notice; neighbours and steps draw on their own."""
    optimizer, matrix = lean((torch.bfloat16, torch.bfloat16))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    start, spacing, steps, rate = 1.5, 2**-7, 100, 3e-4
    matrix.data.fill_(start)
    for _ in range(steps):  # with a gradient that stays the same, each step is of lr
        matrix.grad = torch.ones_like(matrix)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    moved = start - matrix.detach().double()
    assert moved.mean() == pytest.approx(steps * rate, rel=0.03)
    chance = rate / spacing
    assert moved.std() == pytest.approx(spacing * (steps * chance * (1 - chance)) ** 0.5, rel=0.1), "independent draws"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_lean_adamw_compiles_once_for_all_steps() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = stepped(*lean((torch.bfloat16, torch.bfloat16), compiled=True))
    for ours, theirs in zip(compiled, stepped(*lean((torch.bfloat16, torch.bfloat16))), strict=True):
        assert (ours != theirs).float().mean() < 0.02, "fp32 may round otherwise, and seldom turn what is drawn"
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=1e-3)


def rates(scheduler_of: type, steps: int, lr: float, **options: float) -> list[float]:
    """Rates of a torch scheduler before each of its steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = scheduler_of(optimizer, **options)
    result = []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return result


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(1, 60), st.floats(0, 1), st.floats(1e-6, 1.0))
def test_schedules_are_those_of_torch(warmup: int, after: int, ratio: float, lr: float) -> None:
    steps = warmup + after

    def ours(schedule: str, first: int, last: int) -> list[float]:
        config = OptimizerConfig(lr=lr, min_lr_ratio=ratio, warmup_steps=warmup, schedule=schedule)  # type: ignore[arg-type]
        return [learning_rate(config, step, steps) for step in range(first, last + 1)]

    if warmup:
        expected = rates(lr_scheduler.LinearLR, warmup, lr, start_factor=1 / warmup, total_iters=warmup - 1)
        for schedule in ("constant", "linear", "cosine", "wsd"):
            # a warm-up of one step is at its peak at once, where LinearLR with no iterations stays at its start
            assert ours(schedule, 1, warmup) == pytest.approx(expected if warmup > 1 else [lr])
    cosine = rates(lr_scheduler.CosineAnnealingLR, after + 1, lr, T_max=after, eta_min=ratio * lr)
    assert ours("cosine", warmup + 1, steps) == pytest.approx(cosine[1:], rel=1e-6, abs=1e-12)
    linear = rates(lr_scheduler.LinearLR, after + 1, lr, start_factor=1.0, end_factor=ratio, total_iters=after)
    assert ours("linear", warmup + 1, steps) == pytest.approx(linear[1:], rel=1e-6, abs=1e-12)
    assert ours("constant", warmup + 1, steps) == pytest.approx([lr] * after)


def test_wsd_is_stable_then_falls() -> None:
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.2, warmup_steps=10, schedule="wsd", decay_fraction=0.25)
    values = [learning_rate(config, step, 100) for step in range(1, 101)]
    assert values[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert values[10:75] == [1.0] * 65
    assert values[75:] == pytest.approx([1 - 0.8 * i / 25 for i in range(1, 26)])


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(["constant", "cosine", "linear", "wsd"]), st.integers(1, 200), st.floats(0.01, 1))
def test_bounds_and_ends(data: st.DataObject, schedule: str, steps: int, fraction: float) -> None:
    warmup = data.draw(st.integers(0, steps))
    config = OptimizerConfig(
        lr=2.0,
        min_lr_ratio=0.1,
        warmup_steps=warmup,
        schedule=schedule,  # type: ignore[arg-type]
        decay_fraction=fraction,
    )
    values = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
    assert all(0 < value <= 2.0 and math.isfinite(value) for value in values)
    if warmup:
        assert values[warmup - 1] == 2.0
    assert values[: warmup or 0] == sorted(values[: warmup or 0])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    if warmup < steps:
        assert values[-1] == pytest.approx(2.0 if schedule == "constant" else 0.2)


@pytest.mark.parametrize("step", [0, 11])
def test_a_step_outside_the_training_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        learning_rate(OptimizerConfig(), step, 10)
