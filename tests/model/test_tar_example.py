"""Tests of examples/vit_tar.py: the dataset reads the images of WebDataset tar files, and a run trains on them."""

from __future__ import annotations

import contextlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples import make_tar_images, vit_tar
from pipeline.base.errors import ExitCode
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.support.ranks import run_ranks
from tests.support.tiny import run_stage_on_rank

OPTIONS = {"size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 1100 training images in two tar files, and held-out images."""
    folder = tmp_path_factory.mktemp("tar")
    make_tar_images.main(folder, 1230, 40)
    return folder


def read_tar(path: Path) -> list[tuple[np.ndarray, int]]:
    """Return the images and classes of a tar file, read member by member."""
    with tarfile.open(path) as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    return [
        (
            np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1),
            int(contents[name.removesuffix("jpg") + "cls"]),
        )
        for name, content in contents.items()
        if name.endswith(".jpg")
    ]


def test_held_out_images_are_cropped_at_the_center(folder: Path) -> None:
    paths = sorted(map(str, folder.glob("*.tar")))
    dataset = vit_tar.dataset({**OPTIONS, "source": paths}, "held_out")
    expected = read_tar(folder / "held-out-000.tar")
    assert len(dataset) == len(expected) == 123
    for index, (image, label) in enumerate(expected):
        sample = dataset[index]
        assert np.array_equal(sample["images"].numpy(), image[:, 4:36, 4:36]) and sample["labels"] == label


def test_training_images_are_parts_of_the_images_in_all_files(folder: Path) -> None:
    paths = sorted(map(str, folder.glob("*.tar")))
    dataset = vit_tar.dataset({**OPTIONS, "source": paths}, "train")
    expected = [sample for path in sorted(folder.glob("train-*.tar")) for sample in read_tar(path)]
    assert len(dataset) == len(expected) == 1107
    for index in range(0, 1107, 41):
        image, label = expected[index]
        torch.manual_seed(index)
        sample = dataset[index]
        crops = [
            part[:, top : top + 32, left : left + 32]
            for part in (image, image[:, :, ::-1])
            for top in range(9)
            for left in range(9)
        ]
        assert sample["labels"] == label
        assert any(np.array_equal(sample["images"].numpy(), crop) for crop in crops)


def test_the_config_of_the_example_trains(folder: Path) -> None:
    overrides = (f"data.source={folder}/*.tar", f"run.root={folder}/runs", "train.steps=3", "optimizer.warmup_steps=1")
    with contextlib.chdir(CODE_ROOT):
        run = Run.create(load_config(CODE_ROOT / "examples/vit_tar.yaml", overrides))
    for stage, ranks in (("prepare", 1), ("shard", 1), ("train", 2), ("evaluate", 2)):
        assert set(run_ranks(ranks, run_stage_on_rank, run.path, stage)) == {ExitCode.DONE}
