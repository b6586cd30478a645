"""An example of a custom model: a small vision transformer (Dosovitskiy et al., arXiv 2010.11929) for classification.

`pipeline/config/user_model.py` describes the names that the module of a custom model defines. Shapes: B images of C
channels and H × W pixels are divided into T square patches, which become tokens of width D. The classifier reads the
mean over the tokens, so there is no class token.

    python examples/make_images.py runs/images.h5
    python submit.py examples/vit.yaml
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from pipeline.parallel.tensor_parallel import Replicated

ARRAYS = ("images", "labels")
INPUTS = ("images",)
CUTS = True  # `build` can return a part of the model, for pipeline parallelism


class Patches(nn.Module):
    """Embed the patches of uint8 images (B, C, H, W) as tokens (B, T, D), with a learned position for each patch."""

    def __init__(self, size: int, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Linear(channels * patch * patch, width)
        self.place = nn.Parameter(torch.empty((size // patch) ** 2, width))  # the positions of the patches

    def forward(self, images: Tensor) -> Tensor:
        """Divide the images into patches, flatten and project them, and add the positions."""
        pixels = images.to(self.place.dtype) / 127.5 - 1
        patches = pixels.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))  # B, C, rows, p, columns, p
        embedded: Tensor = self.proj(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)) + self.place
        return embedded


class Block(nn.Module):
    """Attention over all tokens, then an MLP. Both read normalized tokens and add their outputs to the tokens."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens (B, T, D).

        The number of heads follows from the shape, because each tensor-parallel rank has only a part of the heads.
        """
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        hidden: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + hidden


class ViT(nn.Module):
    """The part of the model with the blocks `layers`.

    The part with the first block also embeds the patches. The part with the last block also classifies the images.
    """

    def __init__(self, options: dict[str, Any], layers: range) -> None:
        super().__init__()
        width = options["width"]
        is_last = options["layers"] == layers.stop
        self.patches = None
        if layers.start == 0:
            self.patches = Patches(options["size"], options["channels"], options["patch"], width)
        self.blocks = nn.ModuleDict({str(i): Block(width, options["heads"], options["dropout"]) for i in layers})
        self.norm = nn.LayerNorm(width) if is_last else None
        self.classes = nn.Linear(width, options["classes"]) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Map images, or the tokens of the previous part, to tokens. The last part returns logits (B, classes)."""
        x = x if self.patches is None else self.patches(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.classes is None else self.classes(self.norm(x).mean(1))


def build(options: dict[str, Any], layers: range) -> ViT:
    """Return the part of the model with the blocks `layers`."""
    return ViT(options, layers)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy in nats, summed over the images."""
    return F.cross_entropy(outputs.float(), batch["labels"].long(), reduction="sum")


def metrics(outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the number of images that are classified correctly. Sluice divides it by the number of images."""
    return {"accuracy": (outputs.argmax(-1) == batch["labels"]).sum()}


def blocks(model: ViT) -> list[nn.Module]:
    """Return the blocks of the transformer."""
    return list(model.blocks.values())


def tensor_plan(options: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of tensor parallelism: split attention by heads and the MLP by its hidden width.

    All other modules are replicated.
    """
    plan: dict[str, Any] = {"patches": Replicated(), "norm": Replicated(), "classes": Replicated()}
    for name in ("norm1", "norm2"):
        plan[f"blocks.*.{name}"] = Replicated()
    for name in ("q", "k", "v", "up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("out", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    return plan
