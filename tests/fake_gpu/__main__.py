"""Run a Python program with one fake H200: `python -m tests.fake_gpu PYTHON …`. PYTHON has a CUDA build of torch.

For example, rehearse a benchmark at full size:

    python -m tests.fake_gpu .venv-cuda/bin/python -m benchmarks.gpu 8b --out FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fake_gpu.build import build_fake_gpu
from tests.fake_gpu.start import make_fake_gpu_environment

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        preload = build_fake_gpu(Path(sys.argv[1]), Path(folder))
        sys.exit(subprocess.run(sys.argv[1:], env=os.environ | make_fake_gpu_environment(preload, gpus=1)).returncode)
