"""Tests of the images of a run: PNG files, limits, and what the report shows."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run import images
from pipeline.run.images import ImageWriter, encode_png, read_images, unpack_image

SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><text>x</text></svg>'


def decode_png(content: bytes) -> tuple[int, int, bytes]:
    """Return height, width and pixels of a PNG file whose rows have no filter. Check all checksums."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks = {}
    position = 8
    while position < len(content):
        (length,) = struct.unpack(">I", content[position : position + 4])
        body = content[position + 4 : position + 8 + length]
        (checksum,) = struct.unpack(">I", content[position + 8 + length : position + 12 + length])
        assert checksum == zlib.crc32(body)
        chunks[body[:4]] = body[4:]
        position += 12 + length
    assert position == len(content) and list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert depth == 8
    size = width * {0: 1, 2: 3}[colour]
    rows = zlib.decompress(chunks[b"IDAT"])
    assert len(rows) == height * (size + 1)
    assert all(rows[row * (size + 1)] == 0 for row in range(height))
    return height, width, b"".join(rows[row * (size + 1) + 1 : (row + 1) * (size + 1)] for row in range(height))


def write(folder: Path, name: str, step: int, image: Any) -> list[str]:
    """Write an image with a new writer, and return the warnings."""
    warnings: list[str] = []
    ImageWriter(folder, warnings.append).write(name, step, *unpack_image(image))
    return warnings


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_a_png_file_has_the_pixels(height: int, width: int, channels: int, random: Any) -> None:
    pixels = random.randbytes(height * width * channels)
    assert decode_png(encode_png(pixels, height, width, channels)) == (height, width, pixels)


@pytest.mark.parametrize("kind", ["numpy", "transposed", "torch", "bytes"])
def test_arrays_tensors_and_files_are_accepted(tmp_path: Path, kind: str) -> None:
    pixels = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    image: Any = {
        "numpy": pixels,
        "transposed": np.asfortranarray(pixels),
        "torch": torch.from_numpy(pixels).requires_grad_(False),
        "bytes": encode_png(pixels.tobytes(), 2, 5, 3),
    }[kind]
    assert write(tmp_path, "picture", 7, image) == []
    (read,) = read_images(tmp_path)
    assert (read.name, read.step) == ("picture", 7)
    assert decode_png(read.content) == (2, 5, pixels.tobytes())


@pytest.mark.parametrize(
    ("name", "step", "image", "fact"),
    [
        ("../x", 1, SVG, "'../x'"),
        ("", 1, SVG, "name"),
        ("a/b", 1, SVG, "a/b"),
        ("a", -1, SVG, "step"),
        ("a", 1, b"GIF89a", "PNG"),
        ("a", 1, b"<html><svg></svg></html>", "PNG"),
        ("a", 1, SVG + b" " * (1 << 20), "1,048,576"),
        ("a", 1, np.zeros((2, 2), np.float32), "float32"),
        ("a", 1, np.zeros((2, 2, 4), np.uint8), "(2, 2, 4)"),
        ("a", 1, np.zeros((0, 2), np.uint8), "(0, 2)"),
        ("a", 1, np.zeros((5000, 5000), np.uint8), "25,000,000"),
        ("a", 1, np.random.default_rng(0).integers(0, 256, (2000, 2000), np.uint8), "1,048,576"),
    ],
)
def test_an_invalid_image_is_left_out_with_one_warning(
    tmp_path: Path, name: str, step: int, image: Any, fact: str
) -> None:
    warnings: list[str] = []
    writer = ImageWriter(tmp_path / "run", warnings.append)
    for _ in range(2):
        writer.write(name, step, *unpack_image(image))
    assert len(warnings) == 1 and fact in warnings[0]
    assert list(read_images(tmp_path / "run")) == [] and not list(tmp_path.rglob("*.png"))


def test_the_images_of_the_last_steps_are_kept(tmp_path: Path) -> None:
    for step in range(10, 10 * images.KEPT_STEPS + 60, 10):
        assert write(tmp_path, "a", step, SVG) == []
    assert write(tmp_path, "b", 5, SVG) == []
    read = list(read_images(tmp_path))
    assert [image.step for image in read if image.name == "a"] == list(range(60, 10 * images.KEPT_STEPS + 60, 10))
    assert [image.step for image in read if image.name == "b"] == [5]


def test_an_image_replaces_that_of_the_same_step(tmp_path: Path) -> None:
    write(tmp_path, "a", 5, SVG)
    write(tmp_path, "a", 5, np.full((1, 1), 9, np.uint8))
    (image,) = read_images(tmp_path)
    assert decode_png(image.content) == (1, 1, b"\x09")


def test_the_number_of_names_is_limited(tmp_path: Path) -> None:
    for number in range(images.MAX_NAMES):
        assert write(tmp_path, f"n{number}", 1, SVG) == []
    (warning,) = write(tmp_path, "one-more", 1, SVG)
    assert str(images.MAX_NAMES) in warning
    assert write(tmp_path, "n3", 2, SVG) == []
