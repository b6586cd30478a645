"""Compiling the fake GPU against the CUDA build of torch that another Python has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ASKING = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "caffe2_nvrtc")
"""torch's libraries that call CUDA."""
OURS = re.compile(r"cuda[A-Z]|__cuda|cu[A-Z]|cublas|cudnn[A-Z]|nccl[A-Z]|cusolver|cusparse|cufft|curand")
REAL = {
    "ncclGetErrorString", "ncclGetVersion", "ncclGetLastError", "cublasGetVersion_v2", "cublasLtGetVersion",
    "cudnnGetVersion", "cudnnGetProperty", "cudnnGetCudartVersion", "cudnnGetErrorString", "cudnnGetLastErrorString",
}  # fmt: skip
"""What the real libraries answer without a GPU."""


def build(python: Path, folder: Path) -> Path:
    """Compile into `folder`; the library to preload. Raises where `python` has no CUDA build of torch."""
    code = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
    torch = Path(_run(python, "-c", code).strip())
    asked: set[str] = set()
    for name in ASKING:
        lines = _run("nm", "-D", "--undefined-only", torch / "lib" / f"lib{name}.so").splitlines()
        asked |= {line.split()[-1].partition("@")[0] for line in lines}
    triton = torch.parent / "triton/backends/nvidia"
    asked |= set(re.findall(r"\bcu[A-Z]\w+(?=\()", (triton / "driver.c").read_text()))
    written = set(re.findall(r"^CALL .*?(\w+)\(", (HERE / "runtime.c").read_text(), re.MULTILINE))
    rest = sorted(name for name in asked - written - REAL if OURS.match(name))
    (folder / "rest.c").write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in rest))
    headers = next(torch.parent.glob("nvidia/*/include/cuda_runtime_api.h")).parent
    if not (headers / "crt").exists():  # CUDA 13's wheels leave them out; Triton brings them
        (folder / "include").mkdir()
        (folder / "include" / "crt").symlink_to(triton / "include/crt")
    # one library for both: where torch asks for the driver by its name, the one that is loaded already will do
    library = folder / "libcuda.so.1"
    include = [f"-I{headers}", f"-I{folder / 'include'}", f"-I{torch.parent / 'nvidia/cudnn/include'}"]
    how = ["-O1", "-w", "-shared", "-fPIC", *include, "-Wl,-soname,libcuda.so.1"]
    _run("gcc", *how, HERE / "runtime.c", folder / "rest.c", "-o", library, "-lpthread", "-ldl")
    return library


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout
