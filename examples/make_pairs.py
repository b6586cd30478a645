"""Write synthetic pairs of an image and its caption for examples/clip.py.

    python examples/make_pairs.py FILE [N]

An image shows noisy stripes. Its caption has three words: the direction of the stripes (8 words), their width (4 words)
and their brightness (4 words). The HDF5 file has contiguous datasets: `images` (uint8, N × 1 × 16 × 16) and `words`
(uint8, N × 3, values 0 to 15). N is 8000 by default.
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np

WORDS = (8, 4, 4)
"""Number of different words at each position of a caption."""
SIZE = 16
"""Height and width of an image in pixels."""


def main(path: Path, count: int) -> None:
    """Write `count` pairs to `path`. The pairs are the same in every call."""
    generator = np.random.default_rng(0)
    direction, width, brightness = (generator.integers(0, number, (count, 1, 1)) for number in WORDS)
    angle = np.pi * direction / WORDS[0]
    y, x = np.mgrid[:SIZE, :SIZE]
    phase = generator.uniform(0, 2 * np.pi, (count, 1, 1))
    wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * (0.6 + 0.3 * width) + phase)
    pixels = 70 + 35 * brightness + 40 * wave + generator.normal(0, 10, wave.shape)
    first_words = np.cumsum((0, *WORDS[:-1]))  # The words of different positions have different numbers.
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["images"] = pixels.clip(0, 255).astype(np.uint8)[:, None]
        file["words"] = (np.stack([direction, width, brightness], axis=1)[..., 0, 0] + first_words).astype(np.uint8)
    print(f"{path}: {count} pairs of an image and a caption")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
