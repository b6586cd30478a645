"""A transform of one's own: what it draws follows from seed and position alone, whatever the layout, after any stop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from examples import make_images
from pipeline.base.errors import ExitCode, UserError
from pipeline.data.loader import BatchLoader
from pipeline.data.sample_order import GlobalOrderSampler, compute_index_range, permute
from pipeline.data.samples import SampleDataset
from pipeline.data.verify_shards import load_run_manifest
from pipeline.run.directory import Run
from tests.model.test_user_model import VIT_CONFIG, create_prepared_run, train_run
from tests.support.ranks import run_ranks
from tests.support.tiny import stage_rank

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
TEXT = VIT_CONFIG.replace("examples.vit", "cropped").replace("size: 16", "size: 8").replace("patch: 8", "patch: 4")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    make_images.main(folder / "a.h5", 150)
    (folder / "cropped.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def loaded(pictures: Path) -> tuple[Any, Any]:
    """A run's manifest, and its module."""
    run = create_prepared_run(pictures, "read", text=TEXT)
    assert run.user_model is not None
    return load_run_manifest(run), run.user_model.load(run.code_dir)


def cropped(image: Any, random: Any) -> Any:
    """The module's words once more."""
    top, left = random.integers(0, 9, 2)
    image = image[:, top : top + 8, left : left + 8]
    return image[:, :, ::-1] if random.random() < 0.5 else image


def test_batches_are_those_of_a_plain_reader(pictures: Path, loaded: tuple[Any, Any]) -> None:
    manifest, module = loaded
    with h5py.File(pictures / "a.h5") as file:
        images: Any = file["images"][...]
    kept = permute(0, -1, np.arange(135), 150)
    for ranks, start in itertools.product((1, 4), (0, 128)):  # over the end of an epoch
        for rank in range(ranks):
            dataset = SampleDataset(manifest, transform=module.transform, seed=-7)
            sampler = GlobalOrderSampler(
                dataset, global_batch=16, seed=3, samples_consumed=start, num_replicas=ranks, rank=rank
            )
            with BatchLoader(dataset, sampler, torch.device("cpu")) as batches:
                for step in range(3):
                    first = start + 16 * step + rank * (16 // ranks)
                    order = kept[compute_index_range(3, first, 16 // ranks, 135)]
                    batch = next(batches)
                    for i, index in enumerate(order):
                        random = np.random.Generator(np.random.Philox(key=np.array([2**64 - 7, first + i], np.uint64)))
                        assert np.array_equal(batch["images"][i].numpy(), cropped(images[index], random))
                    assert batch["labels"].dtype == torch.int32


def test_held_out_samples_draw_nothing(loaded: tuple[Any, Any]) -> None:
    manifest, module = loaded
    held = SampleDataset(manifest, held_out=True, transform=module.transform)
    plain = SampleDataset(manifest, held_out=True)
    found, whole = (dataset.read(np.arange(len(held))) for dataset in (held, plain))
    assert np.array_equal(found["images"], whole["images"][:, :, 4:12, 4:12])


def test_a_training_with_it_is_the_same_on_two_ranks_and_after_a_stop(pictures: Path) -> None:
    losses = []
    for name, ranks, stops in (("one", 1, ()), ("two", 2, ()), ("stopped", 2, (4,))):
        run = create_prepared_run(pictures, name, "optimizer.schedule=constant", text=TEXT, ranks=ranks)
        for step in (*stops, 10):
            run = stopped_at(run, step)
            found = train_run(run, ranks)
        losses.append([line[1] for line in found])
    assert losses[1] == losses[2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert set(run_ranks(2, stage_rank, run.path, "evaluate")) == {ExitCode.DONE}


def stopped_at(run: Run, step: int) -> Run:
    """The run with so many steps."""
    run.apply_overrides([f"train.steps={step}"])
    return Run.open(run.path)


def test_what_it_gives_is_looked_at(loaded: tuple[Any, Any]) -> None:
    manifest, _ = loaded

    def other_shape(sample: Any, random: Any) -> Any:
        return sample if random is None else {**sample, "images": sample["images"][:, :3]}

    dataset = SampleDataset(manifest, transform=other_shape)
    with pytest.raises(UserError, match=r"transform returned .*\(1, 3, 16\).* with the same shapes and types"):
        dataset.read(np.array([[1], [0]]))
    with pytest.raises(UserError, match="NoneType for sample 0"):
        SampleDataset(manifest, transform=lambda *_: None)  # type: ignore[arg-type]
    for wrong in ({}, {"images": 1, "labels": "a"}, {"images": np.zeros(3, np.uint16), "labels": 1}):
        with pytest.raises(UserError, match="images, labels"):
            SampleDataset(manifest, transform=lambda *_, wrong=wrong: wrong)
