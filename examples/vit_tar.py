"""An example of a dataset: train the vision transformer of examples/vit.py on JPEG images in tar files.

The tar files have the format of WebDataset: a sample is two members with the same name, `000017.jpg` and `000017.cls`.
The dataset reads the tables of contents once. It then reads each image from its place in the tar file, in any order.

    python examples/make_tar_images.py runs/images
    python submit.py examples/vit_tar.yaml

`pipeline/config/user_model.py` describes the names that this module defines. An image (C, H, W) has uint8 values.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from examples.vit import CUTS, blocks, build, loss, metrics, tensor_plan

__all__ = ["CUTS", "blocks", "build", "dataset", "loss", "metrics", "tensor_plan"]
ARRAYS = ("images", "labels")
INPUTS = ("images",)


class TarImages(Dataset[dict[str, Any]]):
    """Images in tar files.

    Args:
        paths: the tar files, not compressed.
        size: height and width of the images in pixels, after cropping.
        is_training: whether to crop at a random place and to flip at random; otherwise the center is cropped.
    """

    def __init__(self, paths: list[str], size: int, is_training: bool) -> None:
        self.files = [os.open(path, os.O_RDONLY) for path in paths]
        self.size = size
        self.is_training = is_training
        rows = []  # for each sample: number of its file, first byte and length of the JPEG, class
        for number, path in enumerate(paths):
            with tarfile.open(path) as tar:
                members = {member.name: member for member in tar}
                for name, member in members.items():
                    if name.endswith(".jpg"):
                        label = tar.extractfile(members[name.removesuffix("jpg") + "cls"])
                        assert label is not None
                        rows.append((number, member.offset_data, member.size, int(label.read())))
        self.rows = np.array(rows, dtype=np.int64)  # An array needs much less memory than a list.

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an image (uint8, C × H × W) and its class."""
        number, offset, length, label = self.rows[index].tolist()
        content = os.pread(self.files[number], length, offset)
        image = torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB"))).permute(2, 0, 1)
        return {"images": self._crop(image), "labels": label}

    def _crop(self, image: Tensor) -> Tensor:
        """Return a part of the image, flipped at random in training."""
        max_top, max_left = image.shape[1] - self.size, image.shape[2] - self.size
        top, left = max_top // 2, max_left // 2
        if self.is_training:  # Sluice seeds torch's generator for each sample.
            top, left = int(torch.randint(max_top + 1, ())), int(torch.randint(max_left + 1, ()))
            if torch.rand(()) < 0.5:
                image = image.flip(2)
                left = max_left - left
        return image[:, top : top + self.size, left : left + self.size]


def dataset(options: dict[str, Any], split: str) -> TarImages:
    """Return the images of a split. `options["source"]` has the files that `data.source` names."""
    prefix = {"train": "train-", "held_out": "held-out-"}[split]
    paths = [path for path in options["source"] if Path(path).name.startswith(prefix)]
    return TarImages(paths, options["size"], split == "train")
