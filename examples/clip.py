"""An example of a loss that compares samples: a small CLIP (Radford et al., arXiv 2103.00020) of images and captions.

The image and the caption of a pair are mapped to vectors. The loss of a micro-batch is low if each image is closer to
its own caption than to the other captions of the micro-batch, and each caption closer to its own image. So the loss of
a pair depends on the other pairs, which `LOSS = "batch"` declares. Shapes: B pairs, width D.

    python examples/make_pairs.py runs/pairs.h5
    python submit.py examples/clip.yaml
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARRAYS = ("images", "words")
INPUTS = ("images", "words")
LOSS = "batch"


class Clip(nn.Module):
    """Encode images and captions as vectors of one space."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image_encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2),
            nn.GELU(),
            nn.Conv2d(width, width, 3, stride=2),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(9 * width, width),
        )
        self.word_embedding = nn.Embedding(16, width)
        self.text_encoder = nn.Sequential(nn.GELU(), nn.Linear(width, width))
        self.log_scale = nn.Parameter(torch.empty(1))

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vectors of images and of captions, (B, D) of length 1 each, and the scale of their similarity."""
        pixels = images.to(self.log_scale.dtype) / 127.5 - 1
        image_BD = F.normalize(self.image_encoder(pixels), dim=-1)
        text_BD = F.normalize(self.text_encoder(self.word_embedding(words.long()).sum(1)), dim=-1)
        # The scale belongs to no sample, so it has no dimension.
        return image_BD, text_BD, self.log_scale.exp().squeeze(0)


def build(options: dict[str, Any], layers: range) -> Clip:
    """Return the model."""
    return Clip(options["width"])


def init(name: str, values: Tensor, options: dict[str, Any]) -> None:
    """Set initial weights: CLIP's scale of 1 / 0.07; biases 0; other weights normal, scaled to their inputs."""
    if name == "log_scale":
        values.fill_(math.log(1 / 0.07))
    elif values.ndim == 1:
        values.zero_()
    else:
        values.normal_(std=values[0].numel() ** -0.5)


def compute_similarity(outputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the scaled similarity of each image and each caption: fp32, (B, B)."""
    image_BD, text_BD, scale = outputs
    return scale.float() * image_BD.float() @ text_BD.float().T


def loss(outputs: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of finding the caption of an image, and the image of a caption, in nats."""
    similarity_BB = compute_similarity(outputs)
    target_B = torch.arange(len(similarity_BB), device=similarity_BB.device)
    return (F.cross_entropy(similarity_BB, target_B) + F.cross_entropy(similarity_BB.T, target_B)) / 2


def metrics(outputs: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the number of images for which the best caption of the micro-batch has the words of the own caption."""
    best_B = compute_similarity(outputs).argmax(1)
    return {"accuracy": (batch["words"][best_B] == batch["words"]).all(1).sum()}
