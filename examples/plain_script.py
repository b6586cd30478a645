"""A training script in plain PyTorch that uses the functions of the callbacks in this directory, as a job of Sluice.

    python submit.py run --name plain -- python examples/plain_script.py
    python submit.py run --name plain-find -- python examples/plain_script.py find

The first command trains, and records gradient norms and a confusion matrix. The second one finds a learning rate. The
model classifies stripes of eight directions by their pixels.
"""

from __future__ import annotations

import sys

import sluice
import torch
from gradient_statistics import gradient_norms
from learning_rate_finder import RATES, RangeTest
from torch import nn
from torch.nn.functional import cross_entropy
from validation_images import balanced_accuracy, count_confusions, draw_confusions


def make_images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (count, 256) and labels (count) of noisy stripes."""
    labels_B = torch.randint(8, (count,))
    angle_B11 = torch.pi * labels_B[:, None, None] / 8
    y, x = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    return (torch.sin(x * angle_B11.cos() + y * angle_B11.sin()) + 3 * torch.randn(count, 16, 16)).flatten(1), labels_B


def main(finds_rate: bool, steps: int = 200) -> None:
    """Train, or find a learning rate."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    test = RangeTest()
    for step in range(1, steps + 1):
        if finds_rate:
            optimizer.param_groups[0]["lr"] = RATES[step - 1]
        images_BX, labels_B = make_images(64)
        loss = cross_entropy(model(images_BX), labels_B)
        optimizer.zero_grad()
        loss.backward()
        norms = {f"gradient.{group}": norm for group, norm in gradient_norms(model.named_parameters()).items()}
        optimizer.step()
        metrics = {"loss": loss.item(), "lr": optimizer.param_groups[0]["lr"], **norms}
        if not finds_rate and step % 50 == 0:
            images_BX, labels_B = make_images(800)
            confusions_CC = count_confusions(labels_B, model(images_BX))
            metrics["held_out_balanced_accuracy"] = balanced_accuracy(confusions_CC)
            sluice.add_image("confusions", step, draw_confusions(confusions_CC))
        sluice.step(step, steps, **metrics)
        if finds_rate and test.record(loss.item()):
            sluice.add_image("learning_rate", step, test.draw())
            print(f"the suggested learning rate is {test.suggest():.2g}")
            break


if __name__ == "__main__":
    main(sys.argv[1:] == ["find"])
