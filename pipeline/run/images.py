"""The images of a run, which callbacks and commands add and report.html shows: `images/NAME/step-00000100.png`.

An image is a PNG or SVG file. Callbacks pass it to `trainer.add_image`, and commands to `sluice.add_image`; both use
this module. This module imports neither torch nor numpy, because `report` uses it on the login node.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular_file, write_atomic

MAX_BYTES = 1 << 20
"""Maximum size of the file of an image."""
MAX_PIXEL_BYTES = 1 << 24
"""Maximum size of the pixels of an image that is passed as an array."""
SMALL_WIDTH = 200
"""Images of fewer pixels per row are enlarged in the report."""
KEPT_STEPS = 20
"""For each name, the images of this many last steps are kept."""
MAX_NAMES = 50
"""Maximum number of names of images in a run."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FILE = re.compile(r"step-(\d{8,12})\.(png|svg)")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Image:
    """An image of a run."""

    name: str
    step: int
    path: Path
    content: bytes

    @property
    def media_type(self) -> str:
        """The MIME type."""
        return "image/png" if self.path.suffix == ".png" else "image/svg+xml"

    @property
    def is_small(self) -> bool:
        """Whether the image has so few pixels that it should be enlarged, with visible pixels."""
        return self.path.suffix == ".png" and int.from_bytes(self.content[16:20], "big") < SMALL_WIDTH


def unpack_image(image: Any) -> tuple[bytes, Sequence[int] | None, str]:
    """Return the bytes of an image, and shape and type of its pixels; None and "" for the content of a file.

    Args:
        image: the content of a file as bytes, or an array of numpy, or a tensor of torch.
    """
    if isinstance(image, bytes | bytearray):
        return bytes(image), None, ""
    array = image.detach().cpu().numpy() if hasattr(image, "detach") else image
    return array.tobytes(), tuple(array.shape), str(array.dtype)


def encode_png(pixels: bytes, height: int, width: int, channels: int) -> bytes:
    """Return a PNG file (PNG specification, third edition) with 8 bits per channel.

    Args:
        pixels: the values, row by row.
        height: the number of rows.
        width: the number of pixels of a row.
        channels: 1 for grey values, 3 for red, green and blue.
    """

    def make_chunk(kind: bytes, data: bytes) -> bytes:
        """Return a chunk: length, type, data, and checksum."""
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = width * channels
    # Each row begins with its filter type, 0: no filter.
    rows = b"".join(b"\0" + pixels[row * size : (row + 1) * size] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return _PNG_SIGNATURE + b"".join(make_chunk(kind, data) for kind, data in chunks)


def _find_format(content: bytes) -> str | None:
    """Return `png` or `svg`, the format of a file with this content; None for any other format."""
    if content.startswith(_PNG_SIGNATURE):
        return "png"
    return "svg" if re.match(rb"\s*(<\?xml[^>]*>\s*)?<svg[\s>]", content) else None


class ImageWriter:
    """Writes the images of a run. Problems do not end the training: they are reported once for each name.

    Args:
        run_dir: the run directory.
        log: prints a message.
    """

    def __init__(self, run_dir: Path, log: Callable[[str], None]) -> None:
        self._folder = run_dir / "images"
        self._log = log
        self._reported_names: set[str] = set()

    def write(self, name: str, step: int, data: bytes, shape: Sequence[int] | None = None, dtype: str = "") -> None:
        """Write an image, and remove the oldest one of its name if there are too many.

        Args:
            name: the name of the image.
            step: the step that the image shows.
            data: the content of a file; or pixels, row by row.
            shape: the shape of the pixels, (H, W) or (H, W, 3); None for the content of a file.
            dtype: the type of the pixels, which must be `uint8`.
        """
        if (problem := self._try_write(name, step, data, shape, dtype)) is not None:
            self.warn(name, step, problem)

    def warn(self, name: str, step: int, problem: str) -> None:
        """Report that an image is left out, unless another image of this name was reported before."""
        if name not in self._reported_names:
            self._reported_names.add(name)
            self._log(f"WARNING: image {name!r:.110} of step {step} is left out: {problem}")

    def _try_write(self, name: str, step: int, data: bytes, shape: Sequence[int] | None, dtype: str) -> str | None:
        """Write an image. Return why it cannot be written; None if it was written."""
        if not _NAME.fullmatch(name):
            return "its name must have 1 to 100 letters, digits, '.', '_' and '-'"
        if not 0 <= step < 10**12:
            return "its step must be from 0 to 999999999999"
        if shape is not None:
            is_grey = len(shape) == 2
            if dtype != "uint8" or not (is_grey or (len(shape) == 3 and shape[2] == 3)) or 0 in shape:
                return f"pixels must be uint8 of shape (H, W) or (H, W, 3), not {dtype} of shape {tuple(shape)}"
            if len(data) > MAX_PIXEL_BYTES:
                return f"it has {len(data):,} bytes of pixels; the maximum is {MAX_PIXEL_BYTES:,}"
            data = encode_png(data, shape[0], shape[1], 1 if is_grey else 3)
        if len(data) > MAX_BYTES:
            return f"it has {len(data):,} bytes; the maximum is {MAX_BYTES:,}"
        if (suffix := _find_format(data)) is None:
            return "it is neither a PNG nor an SVG file"
        folder = self._folder / name
        if not folder.exists():
            if len(list(self._folder.glob("*"))) >= MAX_NAMES:
                return f"there are already images of {MAX_NAMES} names"
            folder.mkdir(parents=True)
        path = folder / f"step-{step:08d}.{suffix}"
        write_atomic(path, data)
        files = _list_files(folder)
        outdated = [file for file_step, file in files if file_step == step and file != path]
        for file in [*outdated, *(file for _, file in files[:-KEPT_STEPS])]:
            file.unlink(missing_ok=True)
        return None


def _list_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the images in a folder, with their steps, in the order of the steps."""
    matches = ((_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    return sorted((int(match[1]), file) for match, file in matches if match)


def read_images(run_dir: Path) -> Iterator[Image]:
    """Yield the images of a run by name, those of a name in the order of the steps.

    Files that are no images, or too large, are left out.
    """
    for folder in sorted(path for path in (run_dir / "images").glob("*") if _NAME.fullmatch(path.name)):
        for step, path in _list_files(folder) if folder.is_dir() else []:
            with suppress(OSError, UserError):
                with open_regular_file(path) as file:
                    content = file.read(MAX_BYTES + 1)
                if len(content) <= MAX_BYTES and _find_format(content) == path.suffix[1:]:
                    yield Image(folder.name, step, path, content)
