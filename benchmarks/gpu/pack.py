"""Wheels for a machine without a network, at most 60 MB in all.

    python -m benchmarks.gpu.pack wheels                                       here, where git ignores them
    pip install --no-index --no-deps --target /tmp/site wheels/*.whl           there, and PYTHONPATH=/tmp/site

Named is what a machine with PyTorch usually lacks; what it needs of its own (torch, numpy, h5py) must be there already.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import ROOT

PACKAGES = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "submitit", "cloudpickle",
    "typer", "click", "shellingham", "annotated-doc", "rich", "markdown-it-py", "mdurl", "pygments", "pyyaml",
    "tokenizers", "huggingface-hub", "safetensors", "jinja2", "markupsafe", "torchao", "tensorboard", "zstandard",
    "torchtitan==0.2.2", "tyro==1.0.17", "docstring-parser==0.18.0", "typeguard==4.6.0", "torchdata==0.11.0",
    "einops==0.8.2",
)  # fmt: skip
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1"))
MOST_BYTES = 60_000_000


def main() -> None:
    folder = Path(sys.argv[1])
    for package in PACKAGES:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                   "--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]  # fmt: skip
        command += [word for name in PLATFORMS for word in ("--platform", name)]
        command += ["--constraint", str(ROOT / "constraints.txt")]  # what goes together: pydantic wants one core
        subprocess.run([*command, package], check=True, timeout=300)
    size = sum(file.stat().st_size for file in folder.glob("*.whl"))
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
