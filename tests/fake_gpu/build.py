"""Compile the fake GPU for the CUDA build of torch that another Python has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
TORCH_LIBRARIES = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "caffe2_nvrtc")
"""The libraries of torch that call CUDA."""
CUDA_NAME = re.compile(r"cuda[A-Z]|__cuda|cu[A-Z]|cublas|cudnn[A-Z]|nccl[A-Z]|cusolver|cusparse|cufft|curand")
"""Matches the beginning of the functions of CUDA's libraries."""
REAL_FUNCTIONS = {
    "ncclGetErrorString", "ncclGetVersion", "ncclGetLastError", "cublasGetVersion_v2", "cublasLtGetVersion",
    "cudnnGetVersion", "cudnnGetProperty", "cudnnGetCudartVersion", "cudnnGetErrorString", "cudnnGetLastErrorString",
}  # fmt: skip
"""Functions that are not replaced, because those of the real libraries work without a GPU."""


def build_fake_gpu(python: Path, folder: Path) -> Path:
    """Compile the fake GPU into `folder`, for the torch of `python`. Return the library to preload.

    Raises:
        RuntimeError: `python` has no CUDA build of torch, or the compiler failed.
    """
    code = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
    torch = Path(_run(python, "-c", code).strip())
    required: set[str] = set()  # names of functions that torch and Triton call
    for name in TORCH_LIBRARIES:
        lines = _run("nm", "-D", "--undefined-only", torch / "lib" / f"lib{name}.so").splitlines()
        required |= {line.split()[-1].partition("@")[0] for line in lines}
    triton = torch.parent / "triton/backends/nvidia"
    required |= set(re.findall(r"\bcu[A-Z]\w+(?=\()", (triton / "driver.c").read_text()))
    implemented = set(re.findall(r"^CALL .*?(\w+)\(", (SOURCES / "runtime.c").read_text(), re.MULTILINE))
    no_ops = sorted(name for name in required - implemented - REAL_FUNCTIONS if CUDA_NAME.match(name))
    (folder / "no_ops.c").write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in no_ops))
    headers = next(torch.parent.glob("nvidia/*/include/cuda_runtime_api.h")).parent
    if not (headers / "crt").exists():  # the wheels of CUDA 13 do not have these headers, but Triton does
        (folder / "include").mkdir()
        (folder / "include" / "crt").symlink_to(triton / "include/crt")
    # the preloaded library has the name of the driver, so torch finds it when it loads the driver by name
    library = folder / "libcuda.so.1"
    include = [f"-I{headers}", f"-I{folder / 'include'}", f"-I{torch.parent / 'nvidia/cudnn/include'}"]
    options = ["-O1", "-w", "-shared", "-fPIC", *include, "-Wl,-soname,libcuda.so.1"]
    _run("gcc", *options, SOURCES / "runtime.c", folder / "no_ops.c", "-o", library, "-lpthread", "-ldl")
    return library


def _run(*command: str | Path) -> str:
    """Run a command and return its output. Raise RuntimeError if it fails."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{result.stderr}")
    return result.stdout
