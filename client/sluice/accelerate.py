"""A hook for training loops with accelerate: it reports steps, saves, and continues from the last checkpoint.

from sluice.accelerate import SluiceHook

hook = SluiceHook(accelerator, every_n_steps=1000)
for step in range(hook.resume() + 1, steps + 1):
    …
    hook.end_step(step, steps, loss=loss)
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from accelerate import Accelerator

import sluice


class SluiceHook:
    """Saves with `accelerator.save_state`, also when the job is about to end. The process then exits with 75.

    Args:
        accelerator: the accelerator, after `prepare`.
        folder: the directory of the checkpoints.
        every_n_steps: the number of steps between two checkpoints; None to save only before the job ends.
    """

    def __init__(self, accelerator: Accelerator, folder: str = "checkpoints", every_n_steps: int | None = None) -> None:
        self._accelerator = accelerator
        self._folder = folder
        self._every_n_steps = every_n_steps

    def resume(self) -> int:
        """Load the last checkpoint, and return its step; 0 if there is none. All processes must call this."""
        path = sluice.last_saved()
        match = re.search(r"step-(\d+)$", path or "")
        if path is None or match is None:
            return 0
        self._accelerator.load_state(path)
        return int(match[1])

    def end_step(self, step: int, total: int | None = None, **values: Any) -> None:
        """Report the end of a step, and save if a checkpoint is due. All processes must call this.

        Args:
            step: the number of the step, from 1.
            total: the number of steps of the whole training, if it is known.
            **values: numbers, or tensors with one element, such as `loss=0.5`.
        """
        sluice.step(step, total, **values)
        is_stopping = sluice.should_stop()
        if is_stopping or (self._every_n_steps and step % self._every_n_steps == 0):
            path = os.path.join(self._folder, f"step-{step:08d}")
            self._accelerator.save_state(path)
            self._accelerator.wait_for_everyone()
            if self._accelerator.is_main_process:
                sluice.saved(path)
        if is_stopping:
            sys.exit(75)
