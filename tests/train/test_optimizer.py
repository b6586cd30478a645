"""Tests of optimizers and learning-rate schedules, which are compared with those of torch and transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from pipeline.config.sections import ModelConfig, OptimizerConfig
from pipeline.model.decoder import Decoder, init_weights
from pipeline.train.lr_schedule import compute_learning_rate
from pipeline.train.optimizer import LeanAdamW, create_zero_moments, make_optimizer, set_learning_rate

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_each_trained_parameter_is_in_one_group_and_only_matrices_have_weight_decay(tied: bool) -> None:
    model = Decoder(ModelConfig(dim=16, layers=2, heads=2, tie_word_embeddings=tied), 50, 8)
    model.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
    config = OptimizerConfig(weight_decay=0.3, lr=0.01, betas=(0.8, 0.9), eps=1e-6)
    optimizer = make_optimizer(model, config, CPU)
    weight_decays = {
        id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
    }
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(weight_decays)
    trained_parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert weight_decays.keys() == {id(parameter) for parameter in trained_parameters.values()}
    for name, parameter in trained_parameters.items():
        assert weight_decays[id(parameter)] == (0.0 if "norm" in name else 0.3), name
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (0.01, (0.8, 0.9), 1e-6, True)
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_the_first_step_equals_the_adamw_formula() -> None:
    """In the first step, the bias corrections of both moments cancel (arXiv 1711.05101, algorithm 2)."""
    model = torch.nn.Linear(4, 3)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1, lr=0.01, eps=1e-8), CPU)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        decay = 0.1 if parameter.ndim == 2 else 0.0
        gradient = parameter.grad
        expected = initial[name] * (1 - 0.01 * decay) - 0.01 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected)


def test_initialized_state_equals_the_state_that_torch_creates_in_the_first_step() -> None:
    results = []
    for keeps_initialized_state in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 3)
        optimizer = make_optimizer(model, OptimizerConfig(), CPU)
        assert len(optimizer.state) == 2
        if not keeps_initialized_state:
            optimizer.state.clear()  # the first step of torch's optimizer creates the state again
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
        results.append([*model.parameters(), *moments])
    assert all(torch.equal(tensor, other_tensor) for tensor, other_tensor in zip(*results, strict=True))


@pytest.mark.parametrize("optimizer_name", ["sgd", "muon"])
def test_steps_are_bit_identical_to_those_of_torch(optimizer_name: str) -> None:
    """Both models get the same gradients. With muon, AdamW updates all parameters except the matrices of the blocks."""
    config = OptimizerConfig(name=optimizer_name, weight_decay=0.3, lr=0.01, momentum=0.8)  # type: ignore[arg-type]
    models = [Decoder(ModelConfig(dim=16, layers=2, heads=2), 50, 8) for _ in range(2)]
    for model in models:
        init_weights(model, 1, 0.1)
    model, torch_model = models
    torch_optimizers: list[torch.optim.Optimizer] = []
    decayed = {name: parameter for name, parameter in torch_model.named_parameters() if parameter.ndim == 2}
    if optimizer_name == "muon":
        matrices = [decayed.pop(name) for name in list(decayed) if "layers" in name]
        assert len(matrices) == 2 * 7 and len(decayed) == 2
        options = {"weight_decay": 0.3, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}
        torch_optimizers.append(torch.optim.Muon(matrices, lr=0.01, **options))  # type: ignore[arg-type]
    vectors = [parameter for parameter in torch_model.parameters() if parameter.ndim < 2]
    groups = [{"params": list(decayed.values()), "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    if optimizer_name == "sgd":
        torch_optimizers.append(torch.optim.SGD(groups, lr=0.01, momentum=0.8))
    else:
        torch_optimizers.append(torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True))
    optimizer = make_optimizer(model, config, CPU, list(model.model.blocks))
    pairs = list(zip(model.parameters(), torch_model.parameters(), strict=True))
    for step in range(3):
        torch.manual_seed(step)
        for parameter, torch_parameter in pairs:
            parameter.grad = torch.randn_like(parameter)
            torch_parameter.grad = parameter.grad.clone()
        optimizer.step()
        for torch_optimizer in torch_optimizers:
            torch_optimizer.step()
    assert all(torch.equal(parameter, torch_parameter) for parameter, torch_parameter in pairs)


SHAPE = (40, 150)
"""Shape of the trained matrix. Int8 moments have one scale per block of 64 entries: a row has two blocks and a rest."""


def make_lean_adamw(
    dtypes: tuple[torch.dtype, torch.dtype], compiled: bool = False
) -> tuple[LeanAdamW, torch.nn.Parameter]:
    """Return a LeanAdamW for one matrix of shape `SHAPE`, and the matrix.

    `dtypes` are those of the matrix and of the moments.
    """
    torch.manual_seed(1)
    matrix = torch.nn.Parameter(torch.randn(SHAPE).to(dtypes[0]))
    config = OptimizerConfig(weight_decay=0.3, lr=0.01)
    rounding_seed = 7
    optimizer = LeanAdamW([{"params": [matrix], "weight_decay": 0.3}], config, {matrix: rounding_seed}, compiled)
    optimizer.state[matrix] = {"step": torch.zeros(()), **create_zero_moments(matrix, dtypes[1])}
    return optimizer, matrix


def run_steps(optimizer: LeanAdamW, matrix: torch.nn.Parameter, steps: int = 5) -> list[torch.Tensor]:
    """Return weights and dequantized moments after some steps, in which clipping and the learning rate change."""
    for step in range(steps):
        torch.manual_seed(step)
        matrix.grad = torch.randn(SHAPE).to(matrix.dtype)
        optimizer.clip_with_norm(step + 1.0, torch.linalg.vector_norm(matrix.grad.float()))
        set_learning_rate(optimizer, 0.01 / (step + 1))
        optimizer.step()
    _, first_moment, second_moment, *scales = optimizer.state[matrix].values()
    if scales:
        first_scale, second_scale = (scale.repeat_interleave(64, dim=1)[:, : SHAPE[1]] for scale in scales)
        first_moment = first_moment.float()
        first_moment = first_moment * first_moment.abs() * first_scale
        second_moment = ((second_moment.float() + 128).square() * second_scale).square()
    return [matrix.detach(), first_moment, second_moment]


def test_lean_adamw_equals_adamw_within_the_precision_of_its_moments() -> None:
    """In fp32, only rounding differs. Updating the matrix in chunks gives bit-identical results."""
    optimizer, matrix = make_lean_adamw((torch.float32, torch.float32))
    torch_matrix = torch.nn.Parameter(matrix.detach().clone())
    torch_adamw = torch.optim.AdamW([torch_matrix], lr=0.01, betas=(0.9, 0.95), weight_decay=0.3)
    results = run_steps(optimizer, matrix)
    for step in range(5):
        torch.manual_seed(step)
        torch_matrix.grad = torch.randn(SHAPE)
        torch.nn.utils.clip_grad_norm_([torch_matrix], step + 1.0)
        set_learning_rate(torch_adamw, 0.01 / (step + 1))
        torch_adamw.step()
    torch_state = torch_adamw.state[torch_matrix]
    expected = [torch_matrix.detach(), torch_state["exp_avg"], torch_state["exp_avg_sq"]]
    for actual, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-6)
    for dtype, min_error, max_error in ((torch.bfloat16, 1e-3, 1e-2), (torch.int8, 5e-3, 3e-2)):
        optimizer, matrix = make_lean_adamw((torch.float32, dtype))
        results = run_steps(optimizer, matrix)
        assert optimizer.state[matrix]["exp_avg"].dtype == dtype
        chunked_optimizer, chunked_matrix = make_lean_adamw((torch.float32, dtype))
        chunked_optimizer._chunk_size = 400
        chunked_results = run_steps(chunked_optimizer, chunked_matrix)
        assert all(torch.equal(actual, chunked) for actual, chunked in zip(results, chunked_results, strict=True))
        for moment, exact in zip(results[1:], expected[1:], strict=True):
            assert min_error < (moment.float() - exact).norm() / exact.norm() < max_error


def test_int8_moments_are_unbiased_and_second_moments_stay_positive() -> None:
    """In 40 steps, one gradient of each block is 1 and the others are 1e-5, a sixth of a quantization level.

    In 60 further steps, all gradients are 0. Then 0.9^60 of the first moments and 0.95^60 of the second moments remain.
    """
    optimizer, matrix = make_lean_adamw((torch.float32, torch.int8))
    matrix.grad = torch.full(SHAPE, 1e-5)
    matrix.grad[:, ::64] = 1.0
    is_small = torch.ones(SHAPE, dtype=torch.bool)
    is_small[:, ::64] = False
    for step in range(40):
        optimizer.step()
        _, mean, square = run_steps(optimizer, matrix, 0)  # only reads the moments
        assert (square > 0).all()
        assert mean[~is_small].mean() == pytest.approx(1 - 0.9 ** (step + 1), rel=0.02)
    assert mean[is_small].mean() == pytest.approx(1e-5, rel=0.2)
    assert (mean[is_small] == 0).float().mean() > 0.5
    matrix.grad.zero_()
    for _ in range(60):
        optimizer.step()
    _, mean, square = run_steps(optimizer, matrix, 0)
    assert mean.abs().max() < 0.02
    assert square.min() > 0 and square.max() < 0.2


def test_bf16_weights_change_on_average_like_fp32_weights() -> None:
    """Each update is a 13th of the smallest update that rounding to nearest would keep.

    The standard deviation shows that random roundings are independent between entries and between steps.
    """
    optimizer, matrix = make_lean_adamw((torch.bfloat16, torch.bfloat16))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    initial_weight = 1.5
    spacing = 2**-7  # of bf16 numbers between 1 and 2
    steps = 100
    lr = 3e-4
    matrix.data.fill_(initial_weight)
    for _ in range(steps):  # with a constant gradient, each step changes a weight by lr
        matrix.grad = torch.ones_like(matrix)
        set_learning_rate(optimizer, lr)
        optimizer.step()
    changes = initial_weight - matrix.detach().double()
    assert changes.mean() == pytest.approx(steps * lr, rel=0.03)
    probability = lr / spacing
    expected_std = spacing * (steps * probability * (1 - probability)) ** 0.5
    assert changes.std() == pytest.approx(expected_std, rel=0.1)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_lean_adamw_compiles_once_for_all_steps(dtype: torch.dtype) -> None:
    """Compiled code may round an fp32 value differently. That seldom changes the result of a random rounding."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = run_steps(*make_lean_adamw((torch.bfloat16, dtype), compiled=True))
    eager = run_steps(*make_lean_adamw((torch.bfloat16, dtype)))
    for actual, expected in zip(compiled, eager, strict=True):
        differs = (actual.float() - expected.float()).abs() > 1e-5 * expected.float().abs()
        assert differs.float().mean() < 0.02
        torch.testing.assert_close(actual.float(), expected.float(), rtol=1e-2, atol=5e-2)


def record_learning_rates(make_scheduler: Any, steps: int, lr: float, **options: Any) -> list[float]:
    """Return the learning rate of a torch scheduler before each of its steps; `options` are those of the scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make_scheduler(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@settings(max_examples=40)
@given(st.integers(0, 20), st.integers(1, 60), st.floats(0, 1), st.floats(1e-6, 1.0))
def test_schedules_equal_those_of_torch(warmup: int, decay: int, ratio: float, lr: float) -> None:
    """The schedule has `warmup` steps and then `decay` steps, of which the last one has the rate `ratio` * `lr`."""
    steps = warmup + decay

    def compute_rates(schedule: str, first_step: int, last_step: int) -> list[float]:
        """Return the learning rates of the steps `first_step` to `last_step`."""
        config = OptimizerConfig(lr=lr, min_lr_ratio=ratio, warmup_steps=warmup, schedule=schedule)  # type: ignore[arg-type]
        return [compute_learning_rate(config, step, steps) for step in range(first_step, last_step + 1)]

    if warmup:
        expected = record_learning_rates(
            lr_scheduler.LinearLR, warmup, lr, start_factor=1 / warmup, total_iters=warmup - 1
        )
        for schedule in ("constant", "linear", "cosine", "wsd"):
            # A warm-up of one step starts at the peak, but LinearLR without iterations stays at its start value.
            assert compute_rates(schedule, 1, warmup) == pytest.approx(expected if warmup > 1 else [lr])
    cosine = record_learning_rates(lr_scheduler.CosineAnnealingLR, decay + 1, lr, T_max=decay, eta_min=ratio * lr)
    assert compute_rates("cosine", warmup + 1, steps) == pytest.approx(cosine[1:], rel=1e-6, abs=1e-12)
    linear = record_learning_rates(
        lr_scheduler.LinearLR, decay + 1, lr, start_factor=1.0, end_factor=ratio, total_iters=decay
    )
    assert compute_rates("linear", warmup + 1, steps) == pytest.approx(linear[1:], rel=1e-6, abs=1e-12)
    assert compute_rates("constant", warmup + 1, steps) == pytest.approx([lr] * decay)


@settings(max_examples=60)
@given(st.integers(0, 20), st.integers(1, 60), st.floats(0, 1), st.floats(0.01, 1), st.floats(1e-6, 1.0))
def test_schedules_counted_from_0_equal_those_of_transformers(
    warmup: int, after_warmup: int, ratio: float, fraction: float, lr: float
) -> None:
    """Transformers counts steps from 0. If Sluice counts from 1, the default, each rate is used one step earlier.

    `fraction` is the part of all steps in which the rate of the schedule wsd decays.
    """
    from transformers import optimization

    steps = warmup + after_warmup
    decay = min(after_warmup, max(1, round(fraction * steps)))
    schedulers = {
        "constant": optimization.get_constant_schedule_with_warmup,
        "linear": optimization.get_linear_schedule_with_warmup,
        "cosine": optimization.get_cosine_with_min_lr_schedule_with_warmup,
        "wsd": optimization.get_wsd_schedule,
    }
    options: dict[str, dict[str, Any]] = {
        "constant": {},
        "linear": {"num_training_steps": steps},
        "cosine": {"num_training_steps": steps, "min_lr_rate": ratio},
        "wsd": {"num_training_steps": steps, "num_decay_steps": decay, "min_lr_ratio": ratio, "decay_type": "linear"},
    }
    for schedule, make_scheduler in schedulers.items():
        min_ratio = 0.0 if schedule == "linear" else ratio  # transformers' linear schedule always ends at 0
        expected = record_learning_rates(make_scheduler, steps + 1, lr, num_warmup_steps=warmup, **options[schedule])
        for counts_from in (0, 1):
            keys = {"lr": lr, "min_lr_ratio": min_ratio, "warmup_steps": warmup, "decay_fraction": fraction}
            config = OptimizerConfig(**keys, schedule=schedule, schedule_counts_from=counts_from)  # type: ignore[arg-type]
            rates = [compute_learning_rate(config, step, steps) for step in range(1, steps + 1)]
            # The warm-up of transformers' wsd is not compared, because it starts at the smallest rate and not at 0.
            first_step = warmup if schedule == "wsd" else 0
            expected_rates = pytest.approx(expected[counts_from:][first_step:steps], rel=1e-6, abs=1e-12)
            assert rates[first_step:] == expected_rates, (schedule, counts_from)
    # a linear schedule with a minimum rate, which transformers does not have
    linear = OptimizerConfig(lr=lr, min_lr_ratio=ratio, warmup_steps=warmup, schedule="linear", schedule_counts_from=0)
    expected = record_learning_rates(
        optimization.get_linear_schedule_with_warmup, steps, lr, **options["linear"], num_warmup_steps=warmup
    )
    expected_with_min_rate = [ratio * lr + (1 - ratio) * rate for rate in expected]
    rates = [compute_learning_rate(linear, step, steps) for step in range(1, steps + 1)]
    assert rates[:warmup] == pytest.approx(expected[:warmup])
    assert rates[warmup:] == pytest.approx(expected_with_min_rate[warmup:])


def test_schedules_count_steps_from_1_by_default() -> None:
    """The rates are bit-identical to those before `schedule_counts_from` existed, so that old runs can resume."""
    config = OptimizerConfig(lr=0.3, min_lr_ratio=0.0, warmup_steps=3, schedule="linear")
    assert [compute_learning_rate(config, step, 7) for step in range(1, 8)] == [
        *(0.3 * step / 3 for step in (1, 2, 3)),
        *(0.3 * (1 - (1 - (7 - step) / 4)) for step in (4, 5, 6)),
        0.0,
    ]


def test_schedule_counts_from_is_an_error_with_a_custom_schedule() -> None:
    with pytest.raises(ValueError, match="schedule_counts_from"):
        OptimizerConfig(schedule="own", schedule_counts_from=0)


def test_wsd_is_constant_and_then_decays_linearly() -> None:
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.2, warmup_steps=10, schedule="wsd", decay_fraction=0.25)
    values = [compute_learning_rate(config, step, 100) for step in range(1, 101)]
    assert values[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert values[10:75] == [1.0] * 65
    assert values[75:] == pytest.approx([1 - 0.8 * i / 25 for i in range(1, 26)])


@settings(max_examples=100)
@given(st.data(), st.sampled_from(["constant", "cosine", "linear", "wsd"]), st.integers(1, 200), st.floats(0.01, 1))
def test_rates_are_positive_and_monotonic_with_the_expected_peak_and_end(
    data: st.DataObject, schedule: str, steps: int, fraction: float
) -> None:
    warmup = data.draw(st.integers(0, steps))
    config = OptimizerConfig(
        lr=2.0,
        min_lr_ratio=0.1,
        warmup_steps=warmup,
        schedule=schedule,  # type: ignore[arg-type]
        decay_fraction=fraction,
    )
    values = [compute_learning_rate(config, step, steps) for step in range(1, steps + 1)]
    assert all(0 < value <= 2.0 and math.isfinite(value) for value in values)
    if warmup:
        assert values[warmup - 1] == 2.0
    assert values[: warmup or 0] == sorted(values[: warmup or 0])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    if warmup < steps:
        assert values[-1] == pytest.approx(2.0 if schedule == "constant" else 0.2)
