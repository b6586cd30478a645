"""Threads that use torch on the GPU of the thread that creates them.

CUDA's current device is a property of each thread, and a new thread starts with GPU 0. Code that uses the current
device (its stream, page-locked memory, the completion of a future) would then use another rank's GPU. Each rank of the
node would also open a context on GPU 0, which takes half a gigabyte. The current stream is a property of each thread as
well. A new thread starts with the stream on which the train stage computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def device_thread(
    work: Callable[[], None], name: str, *, daemon: bool = True, own_stream: bool = False
) -> threading.Thread:
    """Return a thread, not yet started, that calls `work` on the caller's GPU.

    If CUDA is not initialized, the thread selects neither a GPU nor a new stream.

    Args:
        work: the function to call.
        name: the name of the thread.
        daemon: whether the process may exit while the thread runs.
        own_stream: whether the thread uses a new CUDA stream. The copies and kernels of the thread then do not wait for
            the work that the train stage has queued.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run_on_device() -> None:
        """Select the GPU, and possibly a new stream, in the new thread. Then call `work`."""
        if device is not None:
            torch.cuda.set_device(device)
            if own_stream:
                torch.cuda.set_stream(torch.cuda.Stream())
        work()

    return threading.Thread(target=run_on_device, name=name, daemon=daemon)
