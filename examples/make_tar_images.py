"""Write synthetic JPEG images for examples/vit_tar.py, as tar files in the format of WebDataset.

    pip install pillow
    python examples/make_tar_images.py FOLDER [N [SIZE]]

An image shows noisy rings, and its class is one of eight distances between the rings. Each tar file has up to 1000
samples. A sample is two members with the same name: `000017.jpg`, and `000017.cls` with the number of its class. One
image in ten is held out. N is 4000 and SIZE, the height and width in pixels, is 40 by default.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 8
_SAMPLES_PER_FILE = 1000


def main(folder: Path, count: int, size: int) -> None:
    """Write `count` images to tar files in `folder`. The images are the same in every call."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = count // 10
    for split, numbers in (("train", range(count - held_out)), ("held-out", range(count - held_out, count))):
        for start in range(0, len(numbers), _SAMPLES_PER_FILE):
            with tarfile.open(folder / f"{split}-{start // _SAMPLES_PER_FILE:03d}.tar", "w") as tar:
                for number in numbers[start : start + _SAMPLES_PER_FILE]:
                    image, label = make_image(number, size)
                    _add_member(tar, f"{number:06d}.jpg", image)
                    _add_member(tar, f"{number:06d}.cls", str(label).encode())
    print(f"{folder}: {count - held_out} + {held_out} held-out images of {size} × {size}")


def make_image(number: int, size: int) -> tuple[bytes, int]:
    """Return a JPEG and its class."""
    generator = np.random.default_rng(number)
    label = int(generator.integers(CLASSES))
    row, column = generator.uniform(0, size, 2)
    y, x = np.mgrid[:size, :size]
    wave = np.cos(np.hypot(y - row, x - column) * 2 * np.pi / (3 + 1.5 * label))
    pixels = 127.5 + 80 * wave[..., None] * generator.uniform(0.5, 1, 3) + generator.normal(0, 20, (size, size, 3))
    content = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(content, "JPEG", quality=90)
    return content.getvalue(), label


def _add_member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to a tar file."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[2:]]
    main(Path(sys.argv[1]), *(numbers + [4000, 40][len(numbers) :]))
