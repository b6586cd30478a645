"""Synthetic pictures for examples/vit.py: stripes in one of eight directions, under noise. `make_images.py FILE [N]`.

Writes HDF5 with contiguous datasets, as `data.source` takes it: `images` (uint8, N × 1 × 16 × 16), `labels` (uint8, N).
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np

CLASSES, SIZE = 8, 16


def main(path: Path, count: int) -> None:
    """Draw and write `count` pictures; the same ones in every call."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, CLASSES, count, dtype=np.uint8)
    angle = np.pi * labels[:, None, None] / CLASSES
    y, x = np.mgrid[:SIZE, :SIZE]
    wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * draw.uniform(0.8, 1.4, (count, 1, 1)))
    pixels = 127.5 + 60 * wave + draw.normal(0, 60, wave.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["images"] = pixels.clip(0, 255).astype(np.uint8)[:, None]
        file["labels"] = labels
    print(f"{path}: {count} pictures of {SIZE} × {SIZE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
