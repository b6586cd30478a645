"""A GPU that is not there: what a CUDA build of torch does with devices, streams, events and memory, without a GPU.

`runtime.c` stands in for CUDA's runtime and driver, cuBLAS and NCCL. Preloaded into Python, it makes `torch.cuda` see
`FAKE_GPUS` (1) devices and writes a log of who does what on which device and stream (its words: `runtime.c`).

Real are torch's own parts (caching allocator, dispatch, autograd, DDP, futures, which stream waits for what), memory
that is counted per device, copies, and which thread makes a context where. Not real are kernels and collectives: they
do nothing. So it shows orders, devices and memory; it shows nothing of numbers or speed, and finds no fault that only
a driver, a kernel or NCCL would show.

    make test-gpu-fake                              tests/train/test_fake_gpu.py, in .venv-cuda, which it makes (5 GB)
    make test-gpu-fake CUDA_PYTHON=…/bin/python     the same with a Python that has a CUDA build of torch already

`build.py` compiles it against that torch with gcc (and nm); `programs.py` is what the tests run on it.
"""
