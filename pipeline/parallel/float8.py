"""Compute the matrix products of the blocks in float8 with torchao, on GPUs of compute capability 8.9 or later.

Inputs, weights and gradients are rounded to e4m3 (Micikevicius et al., "FP8 formats for deep learning", arXiv
2209.05433). Each row (torchao's recipe `rowwise`) or each tensor (`tensorwise`) has a scale that is computed from its
current values. Nothing is stored between steps, so checkpoints and bit-exact resume work as with bf16. Weights, their
gradients and the optimizer state stay fp32. The rest of the model, and evaluation, compute in bf16.

On the CPU the products are emulated, which is slow but correct up to rounding. The tests use the emulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from pipeline.base.errors import UserError

SIZE_MULTIPLE = 16
"""On each rank, both dimensions of a matrix must be multiples of this number (torch._scaled_mm).

Linear layers of other sizes stay in bf16.
"""
MIN_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with float8 products (Ada; Hopper has 9.0)."""


def convert_to_float8(blocks: Iterable[nn.Module], device: torch.device, tp: int, scales: str = "rowwise") -> None:
    """Convert the linear layers of `blocks` to float8, in place. Must be called before tensor parallelism is applied.

    Args:
        blocks: modules whose linear layers are converted.
        device: device on which the blocks will compute.
        tp: tensor-parallel size, by which the dimensions of a layer are divided later.
        scales: which values share a scale: `rowwise` or `tensorwise`, as torchao names its recipes.

    Raises:
        UserError: if torchao is missing or the GPU does not support float8.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            "model.no_torchao",
            f"train.precision: fp8 needs torchao, but it cannot be imported: {error}; run pip install -e '.[fp8]', or "
            "use bf16",
        ) from error
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(
            "model.no_float8",
            f"train.precision: fp8 needs compute capability 8.9, but {name} has {capability[0]}.{capability[1]}; "
            "use bf16",
        )
    recipe = Float8LinearConfig.from_recipe_name(scales)
    if device.type != "cuda":
        recipe = replace(recipe, emulate=True)

    def has_float8_sizes(module: nn.Module, _: str) -> bool:
        assert isinstance(module, nn.Linear)
        return all(size % (tp * SIZE_MULTIPLE) == 0 for size in (module.in_features, module.out_features))

    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=has_float8_sizes, config=recipe)
