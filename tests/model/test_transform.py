"""Tests of the `transform` of a custom model.

The random numbers that a transform receives depend only on the seed and on the position of the sample in the order of
all samples.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from examples import make_images
from pipeline.base.errors import ExitCode
from pipeline.data.loader import BatchLoader
from pipeline.data.sample_order import GlobalOrderSampler, compute_index_range, permute
from pipeline.data.samples import SampleDataset
from pipeline.data.verify_shards import load_run_manifest
from pipeline.run.directory import Run
from tests.model.test_user_model import VIT_CONFIG, create_prepared_run, train_run
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import run_stage_on_rank

MODULE = """\
import numpy as np
from examples.vit import build, loss, metrics

ARRAYS = ("images", "labels")
INPUTS = ("images",)

def transform(sample, random):
    image = sample["images"]
    top, left = (4, 4) if random is None else random.integers(0, 9, 2)
    image = image[:, top : top + 8, left : left + 8]
    if random is not None and random.random() < 0.5:
        image = image[:, :, ::-1]
    return {"images": image, "labels": np.int32(sample["labels"])}
"""
CONFIG = VIT_CONFIG.replace("examples.vit", "cropped").replace("size: 16", "size: 8").replace("patch: 8", "patch: 4")


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of images and the module `MODULE`, which has a transform."""
    folder = tmp_path_factory.mktemp("images")
    make_images.main(folder / "a.h5", 150)
    (folder / "cropped.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def manifest_and_module(image_folder: Path) -> tuple[Any, Any]:
    """Return the manifest of a run, and the imported module of its model."""
    run = create_prepared_run(image_folder, "read", text=CONFIG)
    assert run.user_model is not None
    return load_run_manifest(run), run.user_model.load(run.code_dir)


def crop_image(image: Any, random: Any) -> Any:
    """Crop and flip an image as `transform` of `MODULE` does."""
    row, column = random.integers(0, 9, 2)
    image = image[:, row : row + 8, column : column + 8]
    return image[:, :, ::-1] if random.random() < 0.5 else image


def test_batches_equal_samples_that_are_read_and_transformed_one_by_one(
    image_folder: Path, manifest_and_module: tuple[Any, Any]
) -> None:
    manifest, module = manifest_and_module
    with h5py.File(image_folder / "a.h5") as file:
        images: Any = file["images"][...]
    # The first 135 entries of a permutation of the 150 samples are the training samples. The others are held out.
    training_samples = permute(0, -1, np.arange(135), 150)
    for ranks, start in itertools.product((1, 4), (0, 128)):  # From sample 128, the steps cross the end of an epoch.
        for rank in range(ranks):
            dataset = SampleDataset(manifest, transform=module.transform, seed=-7)
            sampler = GlobalOrderSampler(
                dataset, global_batch=16, seed=3, samples_consumed=start, num_replicas=ranks, rank=rank
            )
            with BatchLoader(dataset, sampler, torch.device("cpu")) as batches:
                for step in range(3):
                    first_sample = start + 16 * step + rank * (16 // ranks)
                    order = training_samples[compute_index_range(3, first_sample, 16 // ranks, 135)]
                    batch = next(batches)
                    for i, index in enumerate(order):
                        # the key is the seed, here -7 as an unsigned number, and the position of the sample
                        key = np.array([2**64 - 7, first_sample + i], np.uint64)
                        random = np.random.Generator(np.random.Philox(key=key))
                        assert np.array_equal(batch["images"][i].numpy(), crop_image(images[index], random))
                    assert batch["labels"].dtype == torch.int32


def test_held_out_samples_are_cropped_at_the_center_without_random_numbers(
    manifest_and_module: tuple[Any, Any],
) -> None:
    manifest, module = manifest_and_module
    transformed_samples = SampleDataset(manifest, held_out=True, transform=module.transform)
    original_samples = SampleDataset(manifest, held_out=True)
    indices = np.arange(len(transformed_samples))
    images = transformed_samples.read(indices)["images"]
    assert np.array_equal(images, original_samples.read(indices)["images"][:, :, 4:12, 4:12])


def test_losses_are_close_on_two_ranks_and_equal_after_a_stop(image_folder: Path) -> None:
    losses = {}
    for name, ranks, last_steps in (("one rank", 1, (10,)), ("two ranks", 2, (10,)), ("stopped", 2, (4, 10))):
        run_name = name.replace(" ", "-")
        run = create_prepared_run(image_folder, run_name, "optimizer.schedule=constant", text=CONFIG, ranks=ranks)
        for last_step in last_steps:
            run.apply_overrides([f"train.steps={last_step}"])
            run = Run.open(run.path)
            lines = train_run(run, ranks)
        losses[name] = [loss for _, loss, *_ in lines]
    assert losses["stopped"] == losses["two ranks"]
    assert losses["one rank"] == pytest.approx(losses["two ranks"], rel=1e-5)
    assert set(run_ranks(2, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}


def test_a_transform_that_returns_other_arrays_is_an_error(manifest_and_module: tuple[Any, Any]) -> None:
    manifest, _ = manifest_and_module

    def change_shape_of_training_samples(sample: Any, random: Any) -> Any:
        return sample if random is None else {**sample, "images": sample["images"][:, :3]}

    dataset = SampleDataset(manifest, transform=change_shape_of_training_samples)
    # a training sample has another shape than the first transformed sample, which was made without random numbers
    with raises_error("data.invalid_transform", "(1, 3, 16)", "(1, 16, 16)", "sample 1"):
        dataset.read(np.array([[1], [0]]))
    with raises_error("data.invalid_transform", "NoneType", "sample 0"):
        SampleDataset(manifest, transform=lambda *_: None)  # type: ignore[arg-type]
    for invalid in ({}, {"images": 1, "labels": "a"}, {"images": np.zeros(3, np.uint16), "labels": 1}):
        with raises_error("data.invalid_transform", "images, labels"):
            SampleDataset(manifest, transform=lambda *_, invalid=invalid: invalid)
