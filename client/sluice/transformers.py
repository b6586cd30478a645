"""A callback for the Trainer of Hugging Face: it reports steps, and saves and ends the training in time.

from sluice.transformers import SluiceCallback

trainer = Trainer(callbacks=[SluiceCallback()], …)
trainer.train(resume_from_checkpoint=sluice.last_saved())
"""

from __future__ import annotations

import os
import sys
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import sluice


class SluiceCallback(TrainerCallback):
    """Reports each step and each checkpoint, and saves when the job is about to end. The process then exits with 75."""

    def __init__(self) -> None:
        self._logs: dict[str, Any] = {}
        """What the trainer has logged since the last step."""
        self._is_stopping = False

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Keep the logged numbers for the next report."""
        self._logs.update({name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))})

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Report the step. Save and end the training if the job is about to end."""
        sluice.step(state.global_step, state.max_steps, **self._logs)
        self._logs.clear()
        if sluice.should_stop() and state.global_step < state.max_steps:
            self._is_stopping = True
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report the checkpoint."""
        if state.is_world_process_zero and args.output_dir:
            sluice.saved(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Exit with 75, because the code after `train` must not run before the training is complete."""
        if self._is_stopping:
            sys.exit(75)
