"""Threads of ours that touch torch: each on the GPU of the thread that makes it.

CUDA's current device belongs to a thread, and a new thread begins on GPU 0. What asks there for "the" GPU (its stream,
page-locked memory, the end of a future) would wait for another rank's GPU instead of this rank's own, and open a
context on it: half a gigabyte, for each rank of the node. The current stream belongs to a thread, too, and a new thread
begins on the one that training computes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def device_thread(
    work: Callable[[], None], name: str, *, daemon: bool = True, own_stream: bool = False
) -> threading.Thread:
    """A thread, not started yet, that does `work` on the caller's GPU; an ordinary one where no GPU is in use.

    With `own_stream` what it copies and computes there waits for nothing that training has queued.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
            if own_stream:
                torch.cuda.set_stream(torch.cuda.Stream())
        work()

    return threading.Thread(target=run, name=name, daemon=daemon)
