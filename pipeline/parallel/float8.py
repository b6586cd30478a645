"""Matrix products of the blocks in float8, by torchao, for GPUs of compute capability 8.9 and later (Hopper, Ada).

Inputs, weights and gradients are rounded to e4m3 (Micikevicius et al., "FP8 formats for deep learning", arXiv
2209.05433), each row, or each tensor, with a scale taken from what is at hand: torchao's recipes `rowwise` and
`tensorwise`. Nothing is kept between steps, so checkpoints and exactness are those of bf16. Weights, their gradients
and the optimizer's state stay fp32, the rest of the model computes in bf16; evaluation does all in bf16.

Without a GPU the products are emulated: right to the rounding, and slow. That is what the tests run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from pipeline.base.errors import UserError

SIZE_MULTIPLE = 16
"""Both sizes of a matrix must be multiples of it (torch._scaled_mm); other linears stay bf16."""
MIN_CAPABILITY = (8, 9)


def convert_to_float8(blocks: Iterable[nn.Module], device: torch.device, tensor: int, scales: str = "rowwise") -> None:
    """Let the linears of `blocks` multiply in float8, in place; call before they are cut over `tensor` ranks.

    Raises UserError where torchao is missing or the GPU cannot do it.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            f"train.precision: fp8 needs torchao, and importing it says: {error}; pip install -e '.[fp8]', or take bf16"
        ) from error
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"train.precision: fp8 needs compute capability 8.9 and {name} has {found[0]}.{found[1]}; take bf16"
        )
    recipe = Float8LinearConfig.from_recipe_name(scales)
    if device.type != "cuda":
        recipe = replace(recipe, emulate=True)

    def fits(module: nn.Module, _: str) -> bool:
        assert isinstance(module, nn.Linear)
        return all(size % (tensor * SIZE_MULTIPLE) == 0 for size in (module.in_features, module.out_features))

    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=fits, config=recipe)
