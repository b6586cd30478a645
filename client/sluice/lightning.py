"""A callback for Lightning: it reports steps, and saves and ends the training in time.

from sluice.lightning import SluiceCallback

trainer = Trainer(callbacks=[SluiceCallback(every_n_steps=1000)], …)
trainer.fit(model, ckpt_path=sluice.last_saved())
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import sluice

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the package before it was renamed
    from pytorch_lightning import Callback, LightningModule, Trainer


class SluiceCallback(Callback):
    """Reports each step, and saves a checkpoint when the job is about to end. The process then exits with 75.

    Args:
        folder: the directory of the checkpoints.
        every_n_steps: the number of optimizer steps between two checkpoints; None to save only before the job ends.
    """

    def __init__(self, folder: str = "checkpoints", every_n_steps: int | None = None) -> None:
        self._folder = Path(folder)
        self._every_n_steps = every_n_steps
        self._last_step = 0
        self._is_stopping = False
        self._is_due = False  # a checkpoint must be saved at the end of the epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count at the restored step. Replace Lightning's handler of SIGTERM, which ends without a save."""
        self._last_step = trainer.global_step
        sluice._handle_signal(replace=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step. Save if a checkpoint is due, or if the job is about to end."""
        step = trainer.global_step
        if step == self._last_step:  # The gradients are still being accumulated.
            return
        self._last_step = step
        total = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
        values = {name.replace("/", "_"): value for name, value in trainer.callback_metrics.items()}
        if isinstance(outputs, dict) and "loss" in outputs:
            values["loss"] = outputs["loss"]
        sluice.step(step, None if total == float("inf") else int(total), **values)
        self._is_stopping = sluice.should_stop()
        self._is_due = self._is_stopping or bool(self._every_n_steps and step % self._every_n_steps == 0)
        if self._is_due and not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if that is due after the last step of an epoch. A checkpoint before this hook would repeat the epoch."""
        if self._is_due:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        """Save a checkpoint, and end the training if the job is about to end."""
        self._is_due = False
        path = self._folder / f"step-{trainer.global_step:08d}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            sluice.saved(path)
        if self._is_stopping:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exit with 75, because the code after `fit` must not run before the training is complete."""
        if self._is_stopping:
            sys.exit(75)
