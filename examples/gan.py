"""An example of a training step with two networks and two optimizers: a small GAN (Goodfellow et al., arXiv 1406.2661).

The generator maps noise to images. The discriminator tells real from generated images. Each step updates first the
discriminator, with a penalty on its gradient at real images (Mescheder et al., arXiv 1801.04406), and then the
generator. Shapes: B images of 16 × 16 pixels, N = noise values.

    python examples/make_images.py runs/images.h5
    python submit.py examples/gan.yaml
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARRAYS = ("images",)
INPUTS = ("images",)
ELEMENTWISE = True  # Adam updates each entry of a parameter on its own, so ZeRO may split parameters.
NOISE = 16


class Gan(nn.Module):
    """A generator and a discriminator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 16 * width),
            nn.SiLU(),
            nn.Unflatten(1, (width, 4, 4)),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.SiLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, 1, 3, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(16 * width, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the discriminator's scores (B,) of uint8 images. Only evaluations call this function."""
        scores_B: Tensor = self.discriminator(normalize(images)).squeeze(1)
        return scores_B


def normalize(images: Tensor) -> Tensor:
    """Return uint8 images as fp32 values from -1 to 1."""
    return images.float() / 127.5 - 1


def build(options: dict[str, Any], layers: range) -> Gan:
    """Return both networks."""
    return Gan(options["width"])


def init(name: str, values: Tensor, options: dict[str, Any]) -> None:
    """Set initial weights: biases 0; other weights normal, scaled to their inputs."""
    if values.ndim == 1:
        values.zero_()
    else:
        values.normal_(std=values[0].numel() ** -0.5)


def optimizer(parameters: list[tuple[str, nn.Parameter]], config: Any) -> dict[str, torch.optim.Optimizer]:
    """Return an optimizer for each network. The discriminator learns twice as fast."""
    generator = [parameter for name, parameter in parameters if name.startswith("generator.")]
    discriminator = [parameter for name, parameter in parameters if name.startswith("discriminator.")]
    return {
        "generator": torch.optim.Adam(generator, lr=config.lr, betas=(0.0, 0.99)),
        "discriminator": torch.optim.Adam(discriminator, lr=2 * config.lr, betas=(0.0, 0.99)),
    }


def training_step(engine: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Update the discriminator, then the generator. Return the losses of both."""
    generator, discriminator = engine.model.generator, engine.model.discriminator
    losses = {"loss": 0.0, "generator_loss": 0.0, "penalty": 0.0}
    batch_size = len(batch["images"])

    for part in engine.micro_batches(batch):
        real = normalize(part["images"]).requires_grad_(True)
        with torch.no_grad():
            generated = generator(torch.randn(len(real), NOISE, device=engine.device))
        real_scores = discriminator(real)
        (gradient,) = torch.autograd.grad(real_scores.sum(), real, create_graph=True)
        penalty = gradient.square().flatten(1).sum(1).mean()
        loss = F.softplus(-real_scores).mean() + F.softplus(discriminator(generated)).mean()
        engine.backward(loss + penalty)
        losses["loss"] += loss.item() * len(real) / batch_size
        losses["penalty"] += penalty.item() * len(real) / batch_size
    engine.step("discriminator")

    for part in engine.micro_batches(batch):
        count = len(part["images"])
        generated = generator(torch.randn(count, NOISE, device=engine.device))
        loss = F.softplus(-discriminator(generated)).mean()
        engine.backward(loss)
        losses["generator_loss"] += loss.item() * count / batch_size
    engine.step("generator")
    return losses


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the discriminator's loss on real images, summed over the images. Only evaluations call this function."""
    return F.softplus(-outputs.float()).sum()
