"""A GPU that is not there: what a CUDA build of torch does with devices, streams, events and memory, without a GPU.

`runtime.c` stands in for CUDA's runtime and driver, cuBLAS, cuDNN and NCCL. Preloaded into Python, it makes torch and
Triton see `FAKE_GPUS` (1) devices and writes a log of who does what on which device and stream (its words: there).

Real are torch's own parts (caching allocator, dispatch, autograd, DDP, FSDP, futures, which stream waits for what),
memory that is counted per device, which thread makes a context where, and torch.compile down to ptxas' binaries. Not
real are kernels and collectives: they do nothing, and copies of more than 64 KiB neither. So it shows orders, devices
and memory, what is compiled, sent and chosen, of models of any size; it shows nothing of numbers or speed, and finds no
fault that only a driver, a kernel or NCCL would show. What libraries would take of a GPU's memory for themselves is not
known: cuDNN's workspaces and NCCL's buffers count nothing.

    make test-gpu-fake                              tests/train/test_fake_*.py, in .venv-cuda, which it makes (5 GB)
    make test-gpu-fake CUDA_PYTHON=…/bin/python     the same with a Python that has a CUDA build of torch already
    python -m tests.fake_gpu …/bin/python …         anything that this Python can run

`build.py` compiles it against that torch with gcc (and nm); `programs.py` is what the tests run on it, by `start.py`.
"""
