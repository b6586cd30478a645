"""Write synthetic images for examples/vit.py: noisy stripes in one of eight directions.

    python examples/make_images.py FILE [N]

The HDF5 file has contiguous datasets, as `data.source` requires: `images` (uint8, N × 1 × 16 × 16) and `labels` (uint8,
N). N is 8000 by default.
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np

CLASSES = 8
SIZE = 16
"""Height and width of an image in pixels."""


def main(path: Path, count: int) -> None:
    """Write `count` images to `path`. The images are the same in every call."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, CLASSES, count, dtype=np.uint8)
    angle = np.pi * labels[:, None, None] / CLASSES
    y, x = np.mgrid[:SIZE, :SIZE]
    wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * generator.uniform(0.8, 1.4, (count, 1, 1)))
    pixels = 127.5 + 60 * wave + generator.normal(0, 60, wave.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["images"] = pixels.clip(0, 255).astype(np.uint8)[:, None]
        file["labels"] = labels
    print(f"{path}: {count} images of {SIZE} × {SIZE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
