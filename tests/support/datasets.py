"""A module with a dataset, and what tests need to read its samples in worker processes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.config.user_model import find_user_model
from pipeline.data.dataset import DatasetRequest, describe_dataset, make_dataset_options
from pipeline.data.manifest import DatasetEntry

DATASET_MODULE = """\
import random
import numpy as np
import torch
from torch.utils.data import Dataset
from examples.vit import blocks, build, loss, metrics

ARRAYS = ("images", "labels")
INPUTS = ("images",)


class Images(Dataset):
    def __init__(self, count, is_random):
        self.count = count
        self.is_random = is_random

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 256, (1, 20, 20), dtype=np.uint8)
        image = torch.from_numpy(pixels)
        if self.is_random:
            if random.random() < 0.5:
                image = image.flip(2)
            if np.random.rand() < 0.5:
                image = 255 - image
            image = torch.roll(image, torch.randint(0, 20, (1,)).item(), 1)
        return {"images": image, "labels": index % 8}


def dataset(options, split):
    return Images(options.get("count", 150) if split == "train" else 24, split == "train")


def transform(sample, random):
    top, left = (2, 2) if random is None else random.integers(0, 5, 2)
    return {**sample, "images": sample["images"][:, top : top + 16, left : left + 16]}
"""
"""Samples that use the global generators of random, numpy and torch, and the generator of `transform`."""

ITERABLE_MODULE = (
    DATASET_MODULE.replace("import Dataset", "import Dataset, IterableDataset, get_worker_info")
    .replace("def dataset(", "def map_style(")
    .replace("def transform(", "def unused(")
    .replace("20, 20", "16, 16")
    + """

class Stream(IterableDataset):
    def __init__(self, count):
        self.samples = Images(count, True)
        self.next = 0

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        own = range(number, self.samples.count, workers)
        while self.next < len(own):
            index = own[self.next]
            self.next += 1
            yield self.samples[index]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def dataset(options, split):
    return Stream(options.get("count", 150)) if split == "train" else map_style(options, split)
"""
)
"""The samples of `DATASET_MODULE` as an iterable dataset, which each worker reads in order."""


def seed_as_documented(text: str) -> None:
    """Seed the global generators with the SHA-256 of a text, as Sluice does before each sample."""
    digest = hashlib.sha256(text.encode()).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(np.frombuffer(digest[8:24], "<u4"))
    torch.manual_seed(int.from_bytes(digest[24:], "little") >> 1)


def write_module(folder: Path, name: str, source: str = DATASET_MODULE) -> Path:
    """Write a module and return its path. Each test uses another name, because Python imports a name only once."""
    path = folder / f"{name}.py"
    path.write_text(source)
    return path


def make_request(module: Path, split: str = "train", workers: int = 1, **fields: Any) -> DatasetRequest:
    """Return a request for the dataset of a module, with what the prepare stage would record.

    Args:
        module: the file of the module.
        split: the split.
        workers: number of worker processes.
        **fields: other fields of the request. Without `entry`, the dataset is opened in this process.
    """
    model = find_user_model(module.stem, [module.parent])
    options: Mapping[str, Any] = make_dataset_options(fields.pop("options", {}), ())
    entry = fields.pop("entry", None)
    if entry is None:
        entry = DatasetEntry(**describe_dataset(model, module.parent, options, has_held_out=True))
    return DatasetRequest(model, module.parent, options, split, entry=entry, workers=workers, **fields)
