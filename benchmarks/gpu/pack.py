"""Download wheels for a GPU machine without network, at most 60 MB in total.

    python -m benchmarks.gpu.pack wheels                                 on this machine (git ignores `wheels`)
    pip install --no-index --no-deps --target /tmp/site wheels/*.whl     on the GPU machine

On the GPU machine, set PYTHONPATH=/tmp/site. PACKAGES are the packages that a machine with PyTorch usually does not
have. The GPU machine must have torch, numpy and h5py.
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
"""Python version of the GPU machine."""
PLATFORMS = tuple(f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1"))
MAX_BYTES = 60_000_000


def main() -> None:
    """Download the wheels of PACKAGES to a folder. Exits with an error if they are larger than MAX_BYTES."""
    folder = Path(sys.argv[1])
    for package in PACKAGES:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                   "--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]  # fmt: skip
        command += [argument for name in PLATFORMS for argument in ("--platform", name)]
        # Constraints give compatible versions. For example, pydantic requires one version of pydantic-core.
        command += ["--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*command, package], check=True, timeout=300)
    size = sum(file.stat().st_size for file in folder.glob("*.whl"))
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB")
    if size > MAX_BYTES:
        sys.exit(f"more than {MAX_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
