"""Sluice's client: lets a training script stop in time, report its steps, and name its checkpoints.

    import sluice

    for step in range(first_step, steps):
        ...
        sluice.step(step, steps, loss=loss)
        if step % 100 == 0 or sluice.should_stop():
            save(path)
            sluice.saved(path)
            if sluice.should_stop():
                sys.exit()

A job of Sluice puts this package on PYTHONPATH. It needs nothing except Python 3.8. Without Sluice, all functions do
nothing: `should_stop` returns False, and `time_left` returns None.

Messages are lines of JSON in a file in memory, which the process that started the command reads.
"""

from __future__ import annotations

import json
import math
import operator
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Run", "add_image", "is_running", "last_saved", "saved", "should_stop", "step", "time_left"]

_FOLDER = os.environ.get("SLUICE_CLIENT", "")
_DEADLINE = os.environ.get("SLUICE_DEADLINE", "")
"""When the job ends, by `time.monotonic`, which is the same in all processes of a node; "" without a time limit."""
_RANK = int(os.environ.get("RANK", "0") or 0)
_messages: int | None = None
"""The file descriptor to which messages are appended; None before the first message."""
_images = 0
"""The number of images that were added."""
_MAX_IMAGE_BYTES = 1 << 24
"""Larger images are not sent, because they would fill the memory."""
_stopping = False
_polled = False


def is_running() -> bool:
    """Return True if Sluice runs this process."""
    return bool(_FOLDER)


def should_stop() -> bool:
    """Return True if the script should save now and exit, for example because the job is preempted.

    If torch.distributed is initialized, all ranks must call this function together, and get the same result.
    """
    global _stopping, _polled
    if not _FOLDER:
        return False
    if not _polled:
        _polled = True
        _handle_signal()
        with suppress(OSError):
            Path(_FOLDER, "polled").touch()
    _stopping = _stopping or os.path.exists(os.path.join(_FOLDER, "stop"))
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        flag = torch.tensor([_stopping], dtype=torch.uint8, device=device)  # type: ignore[union-attr]
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        _stopping = bool(flag.item())
    return _stopping


def _handle_signal(*, replace: bool = False) -> None:
    """Let SIGTERM no longer end this process, unless the script has its own handler.

    Slurm sends the signal to all processes of a job. A process that this one forks later still ends.

    Args:
        replace: whether to replace the handler of the script.
    """
    if not _FOLDER:
        return
    pid = os.getpid()

    def stop(number: int, frame: Any) -> None:
        global _stopping
        _stopping = True
        if os.getpid() != pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with suppress(ValueError):  # Only the main thread can install a handler.
        if replace or signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, stop)


def step(number: int, total: int | None = None, **values: Any) -> None:
    """Report that a step has ended. Call this on every rank; the values of rank 0 are recorded in metrics.jsonl.

    Each call also shows that the process does not hang.

    Args:
        number: the number of the step, from 1.
        total: the number of steps of the whole training, if it is known.
        **values: numbers, or tensors with one element, such as `loss=0.5`.
    """
    if not _FOLDER:
        return
    message: dict[str, Any] = {"kind": "step", "step": int(number), "time": time.time()}
    if total is not None:
        message["total"] = int(total)
    if values and _RANK == 0:
        message["values"] = {name: _to_number(value) for name, value in values.items()}
    _send(message)


def saved(path_or_step: str | os.PathLike[str] | int) -> None:
    """Report a complete checkpoint: its path, or the number of its step. Only rank 0 needs to call this."""
    if not _FOLDER:
        return
    if hasattr(path_or_step, "__index__"):  # also an integer of numpy
        _send({"kind": "saved", "step": operator.index(path_or_step)})  # type: ignore[arg-type]
    else:
        _send({"kind": "saved", "path": os.path.abspath(path_or_step)})


def add_image(name: str, step: int, image: Any) -> None:
    """Add an image to report.html. An image of the same name and step is replaced. Only rank 0 needs to call this.

    If the image is invalid or too large, the log of the job has a warning, and the image is left out.

    Args:
        name: letters, digits, `.`, `_` and `-`.
        step: the step that the image shows.
        image: the content of a PNG or SVG file (bytes), at most 1 MiB; or the pixels as an array or tensor of type
            uint8 with the shape (H, W) or (H, W, 3).
    """
    global _images
    if not _FOLDER or _RANK != 0:
        return
    message: dict[str, Any] = {"kind": "image", "name": str(name), "step": int(step), "shape": None, "dtype": ""}
    if not isinstance(image, (bytes, bytearray)):
        if hasattr(image, "detach"):
            image = image.detach().cpu().numpy()
        message.update(shape=list(image.shape), dtype=str(image.dtype))
        image = image.tobytes()
    message["size"] = len(image)
    if len(image) <= _MAX_IMAGE_BYTES:
        _images += 1
        message["file"] = f"image-{os.getpid()}-{_images}"
        try:
            with open(os.path.join(_FOLDER, message["file"]), "wb") as file:
                file.write(image)
        except OSError:
            return
    _send(message)


def last_saved() -> str | None:
    """Return the path that an earlier attempt passed to `saved` last, if it still exists; otherwise None."""
    path = os.environ.get("SLUICE_LAST_SAVED", "")
    return path if path and os.path.exists(path) else None


def time_left() -> float | None:
    """Return the seconds until the time limit of the job; None without a limit."""
    return max(0.0, float(_DEADLINE) - time.monotonic()) if _DEADLINE else None


def _to_number(value: Any) -> float | None:
    """Return a number, or a tensor with one element, as a finite float or an int; None for any other value."""
    try:
        if not isinstance(value, (int, float)):
            value = value.item() if hasattr(value, "item") else float(value)
        return value if math.isfinite(value) else None
    except (TypeError, ValueError, RuntimeError):  # A report must not end the training.
        return None


def _send(message: dict[str, Any]) -> None:
    """Append a message. If that fails, the script continues."""
    global _messages
    try:
        if _messages is None:
            _messages = os.open(os.path.join(_FOLDER, "messages"), os.O_WRONLY | os.O_APPEND)
        os.write(_messages, json.dumps(message).encode() + b"\n")
    except OSError:
        pass


def __getattr__(name: str) -> Any:
    """Import `Run` when it is used, because it needs the packages of Sluice."""
    if name != "Run":
        raise AttributeError(f"module 'sluice' has no attribute {name!r}")
    try:
        from cli.api import Run
    except ImportError as error:
        raise ImportError(f"sluice.Run needs an installation of Sluice in this environment ({error})") from error
    return Run
