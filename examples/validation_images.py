"""Measure the balanced accuracy of examples/vit.py on held-out images, and add a confusion matrix to the report.

    python submit.py examples/vit.yaml train.evaluate_every=50 train.evaluate_sequences=800 \
        'train.callbacks=[examples.validation_images]'

The balanced accuracy is the mean over the classes of the fraction of their images that are classified correctly. It is
no mean over images, so the function `metrics` of a model cannot compute it. `train.early_stopping` can use it:
`train.early_stopping={metric: balanced_accuracy}`. examples/plain_script.py uses the same functions in a script.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IMAGES = 800
"""Number of held-out images, at most `train.evaluate_sequences`."""


def count_confusions(labels_B: Tensor, logits_BC: Tensor) -> Tensor:
    """Return int64 (C, C): entry i, j is the number of images of class i that were classified as class j."""
    classes = logits_BC.shape[1]
    pairs_B = labels_B.long() * classes + logits_BC.argmax(1)
    return torch.bincount(pairs_B, minlength=classes**2).view(classes, classes).cpu()


def balanced_accuracy(confusions_CC: Tensor) -> float:
    """Return the mean over the classes that occur of the fraction of images that were classified correctly."""
    totals_C = confusions_CC.sum(1)
    return float((confusions_CC.diagonal() / totals_C)[totals_C > 0].mean())


def draw_confusions(confusions_CC: Tensor) -> Tensor:
    """Return a picture (uint8) with a square for each entry: the darker, the larger its share of the row."""
    shares_CC = confusions_CC / confusions_CC.sum(1, keepdim=True).clamp(min=1)
    return (255 * (1 - shares_CC)).round().byte().repeat_interleave(16, 0).repeat_interleave(16, 1)


def callbacks(config: Any) -> list[Any]:
    """Return the callback."""
    from pipeline.train.callback import Callback  # Here, because other scripts import this module without Sluice.

    class ValidationImages(Callback):
        def on_evaluation(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            batches = list(trainer.compute_held_out_outputs(IMAGES))
            confusions_CC = torch.stack([count_confusions(batch["labels"], logits) for batch, logits in batches]).sum(0)
            metrics["held_out_balanced_accuracy"] = balanced_accuracy(confusions_CC)
            trainer.add_image("confusions", step, draw_confusions(confusions_CC))

    return [ValidationImages()]
