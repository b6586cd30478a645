"""A fake GPU: run a CUDA build of torch without a GPU and log what it does with devices, streams and memory.

`runtime.c` replaces CUDA's runtime and driver, cuBLAS, cuDNN and NCCL. Preloaded into Python, it makes torch and Triton
see `FAKE_GPUS` (default 1) devices. It logs each call with its thread, device and stream.

- Real: torch's own parts (caching allocator, dispatch, autograd, DDP, FSDP, futures, stream waits), memory counted per
  device, the creation of contexts by threads, torch.compile including the binaries of ptxas.
- Not real: kernels, collectives, and copies of more than 64 KiB do nothing. Computed values and times are meaningless,
  and faults of drivers, kernels and NCCL are not found. Memory excludes workspaces of cuDNN and buffers of NCCL.

    make test-gpu-fake                              tests/train/test_fake_*.py in .venv-cuda, which it creates (5 GB)
    make test-gpu-fake CUDA_PYTHON=…/bin/python     the same with a Python that already has a CUDA build of torch
    python -m tests.fake_gpu …/bin/python …         any program of this Python

`build.py` compiles the library for that torch with gcc and nm. `start.py` runs `programs.py` on it for the tests.
"""
