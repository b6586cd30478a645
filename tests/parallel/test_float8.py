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


def block(width: int = 64) -> Any:
    torch.manual_seed(1)
    return nn.ModuleDict({"fits": nn.Linear(64, width, bias=False), "odd": nn.Linear(64, 24), "norm": nn.LayerNorm(64)})


def test_only_matrices_that_float8_kernels_support_are_converted() -> None:
    part = block(96)
    weight = part.fits.weight
    float8.convert_to_float8([part], CPU, tp=2)
    assert {name: type(child).__name__ for name, child in part.named_children()} == {
        "fits": "Float8Linear",
        "odd": "Linear",
        "norm": "LayerNorm",
    }
    assert part.fits.weight is weight, "the parameters stay: checkpoints do not see it"
    part = block(96)
    float8.convert_to_float8([part], CPU, tp=4)  # 96 / 4 = 24 columns on a rank
    assert type(part.fits).__name__ == "Linear"


@pytest.mark.parametrize("scales", ["rowwise", "tensorwise"])
def test_products_differ_only_by_rounding_to_e4m3(scales: str) -> None:
    part = block()
    x_ND = torch.randn(32, 64, requires_grad=True)
    exact = part.fits(x_ND)
    (want,) = torch.autograd.grad(exact.square().sum(), x_ND)
    float8.convert_to_float8([part], CPU, tp=1, scales=scales)
    rounded = part.fits(x_ND)
    (got,) = torch.autograd.grad(rounded.square().sum(), x_ND)
    for ours, theirs in ((rounded, exact), (got, want)):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        assert 1e-3 < error < 0.08, "e4m3 has three bits after the point: rounding errors up to 1/16"


def test_a_gpu_without_float8_and_a_missing_torchao_are_user_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "fake A100")
    with pytest.raises(UserError) as raised:
        float8.convert_to_float8([], torch.device("cuda"), tp=1)
    assert raised.value.code == "model.no_float8" and "fake A100 has 8.0" in str(raised.value)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError) as raised:
        float8.convert_to_float8([], CPU, tp=1)
    assert raised.value.code == "model.no_torchao" and "pip install -e '.[fp8]'" in str(raised.value)


def float8_rank(rank_info: RankInfo, configs: list[Config]) -> list[list[tuple[float, float]]]:
    """Return losses and gradient norms of three steps with each config."""
    from pipeline.comm import groups

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    return [train_steps(rank_info, config, world, 3)[1] for config in configs]


@pytest.mark.story
def test_losses_in_all_layouts_are_close_to_those_of_one_rank() -> None:
    """The layouts are ZeRO 3, tensor parallelism, and a pipeline with activation checkpointing."""

    def config(ranks: int, precision: str, scales: str = "rowwise", **parallel: Any) -> Config:
        sizes = {"dim": 64, "layers": 2, "intermediate_size": 128}
        batch = {"global_batch": 4, "micro_batch": 2, "precision": precision, "fp8_scales": scales}
        return tiny_config(ranks, model=sizes, parallel=parallel, train=batch)

    cases: list[dict[str, Any]] = [{"zero": 3}, {"tensor": 2}, {"pipeline": 2, "activation_checkpointing": "full"}]
    alone = [config(1, "fp32"), config(1, "fp8"), config(1, "fp8", "tensorwise")]
    exact, *found = run_ranks(1, float8_rank, alone)[0]
    assert exact != found[0] != found[1]
    found += run_ranks(2, float8_rank, [config(2, "fp8", **case) for case in cases])[0]
    found += run_ranks(2, float8_rank, [config(2, "fp8", "tensorwise", **case) for case in cases])[0]
    for trained in found:
        for (loss, norm), (want, want_norm) in zip(trained, exact, strict=True):
            assert loss == pytest.approx(want, rel=5e-3) and norm == pytest.approx(want_norm, rel=0.1)
