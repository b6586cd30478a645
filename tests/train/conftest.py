"""Fixtures of the tests on a fake GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fake_gpu.build import build_fake_gpu
from tests.fake_gpu.start import FakeGpuRunner


@pytest.fixture(scope="session")
def python() -> Path:
    """Return the path in CUDA_PYTHON: a Python that has a CUDA build of torch. Fail if CUDA_PYTHON is not set."""
    if not (path := os.environ.get("CUDA_PYTHON")):
        pytest.fail("CUDA_PYTHON must name a Python with a CUDA build of torch; `make test-gpu-fake` sets it")
    return Path(path)


@pytest.fixture(scope="session")
def library(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the fake GPU and return the library to preload."""
    return build_fake_gpu(python, tmp_path_factory.mktemp("fake_gpu"))


@pytest.fixture
def gpu_runner(python: Path, library: Path, tmp_path: Path) -> FakeGpuRunner:
    """Return an object that runs programs on two fake GPUs and reads the logs of their CUDA calls."""
    return FakeGpuRunner(python, library, tmp_path)
