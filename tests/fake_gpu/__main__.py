"""Python on a machine with one fake H200: `python -m tests.fake_gpu PYTHON …`, where PYTHON has a CUDA build of torch.

python -m tests.fake_gpu .venv-cuda/bin/python -m benchmarks.gpu 8b --out FOLDER      a rehearsal at full size
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fake_gpu.build import build
from tests.fake_gpu.start import environment

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="sluice-") as made:
        preload = build(Path(sys.argv[1]), Path(made))
        sys.exit(subprocess.run(sys.argv[1:], env=os.environ | environment(preload, gpus=1)).returncode)
