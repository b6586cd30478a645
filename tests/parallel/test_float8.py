"""Tests of float8 training: which matrices are converted, the precision, and errors if float8 is not available.

Float8 is emulated on the CPU. The kernels of GPUs are not tested.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.parallel import float8
from tests.support.ranks import run_ranks
from tests.support.tiny_training import tiny_config, train_steps

CPU = torch.device("cpu")


def make_block(width: int = 64) -> Any:
    """Return a block with a matrix of `width` outputs, a matrix that float8 kernels do not support, and a norm."""
    torch.manual_seed(1)
    return nn.ModuleDict(
        {
            "supported": nn.Linear(64, width, bias=False),
            "unsupported": nn.Linear(64, 24),
            "norm": nn.LayerNorm(64),
        }
    )


def test_only_matrices_that_float8_kernels_support_are_converted() -> None:
    block = make_block(96)
    weight = block.supported.weight
    float8.convert_to_float8([block], CPU, tp=2)
    assert {name: type(child).__name__ for name, child in block.named_children()} == {
        "supported": "Float8Linear",
        "unsupported": "Linear",
        "norm": "LayerNorm",
    }
    # The parameter is still the same, so that checkpoints do not change.
    assert block.supported.weight is weight


def test_a_matrix_is_not_converted_if_its_shards_are_too_narrow() -> None:
    """Of 96 outputs, each of four tensor-parallel ranks has 24, which is not a multiple of 16."""
    block = make_block(96)
    float8.convert_to_float8([block], CPU, tp=4)
    assert type(block.supported).__name__ == "Linear"


@pytest.mark.parametrize("scales", ["rowwise", "tensorwise"])
def test_outputs_and_gradients_in_float8_differ_only_by_rounding_to_e4m3(scales: str) -> None:
    """e4m3 has three bits after the binary point, so that rounding errors are at most 1/16."""
    block = make_block()
    x_ND = torch.randn(32, 64, requires_grad=True)
    exact_output = block.supported(x_ND)
    (exact_gradient,) = torch.autograd.grad(exact_output.square().sum(), x_ND)
    float8.convert_to_float8([block], CPU, tp=1, scales=scales)
    output = block.supported(x_ND)
    (gradient,) = torch.autograd.grad(output.square().sum(), x_ND)
    for actual, exact in ((output, exact_output), (gradient, exact_gradient)):
        error = ((actual - exact).norm() / exact.norm()).item()
        assert 1e-3 < error < 0.08


def test_float8_fails_without_a_gpu_that_supports_it_and_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "fake A100")
    with pytest.raises(UserError) as raised:
        float8.convert_to_float8([], torch.device("cuda"), tp=1)
    assert raised.value.code == "model.no_float8" and "fake A100 has 8.0" in str(raised.value)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError) as raised:
        float8.convert_to_float8([], CPU, tp=1)
    assert raised.value.code == "model.no_torchao" and "pip install -e '.[fp8]'" in str(raised.value)


def train_three_steps(rank_info: RankInfo, configs: list[Config]) -> list[list[tuple[float, float]]]:
    """Return the loss and gradient norm of each of three steps, for each config."""
    from pipeline.comm import groups

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    return [train_steps(rank_info, config, world, 3)[1] for config in configs]


@pytest.mark.story
def test_float8_losses_are_close_to_fp32_in_all_layouts() -> None:
    """The layouts are one rank, ZeRO 3, tensor parallelism, and a pipeline with activation checkpointing."""

    def make_config(ranks: int, precision: str, scales: str = "rowwise", **parallel: Any) -> Config:
        sizes = {"dim": 64, "layers": 2, "intermediate_size": 128}
        batch = {"global_batch": 4, "micro_batch": 2, "precision": precision, "fp8_scales": scales}
        return tiny_config(ranks, model=sizes, parallel=parallel, train=batch)

    cases: list[dict[str, Any]] = [{"zero": 3}, {"tensor": 2}, {"pipeline": 2, "activation_checkpointing": "full"}]
    single_rank_configs = [make_config(1, "fp32"), make_config(1, "fp8"), make_config(1, "fp8", "tensorwise")]
    fp32_steps, rowwise_steps, tensorwise_steps = run_ranks(1, train_three_steps, single_rank_configs)[0]
    assert fp32_steps != rowwise_steps and rowwise_steps != tensorwise_steps, "float8 or its scales have no effect"
    results = [rowwise_steps, tensorwise_steps]
    results += run_ranks(2, train_three_steps, [make_config(2, "fp8", **case) for case in cases])[0]
    results += run_ranks(2, train_three_steps, [make_config(2, "fp8", "tensorwise", **case) for case in cases])[0]
    for steps in results:
        for (loss, norm), (fp32_loss, fp32_norm) in zip(steps, fp32_steps, strict=True):
            assert loss == pytest.approx(fp32_loss, rel=5e-3)
            assert norm == pytest.approx(fp32_norm, rel=0.1)
