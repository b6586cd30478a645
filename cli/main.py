"""Sluice turns one YAML file into a trained and evaluated model, here or on a Slurm cluster. To begin:

    python submit.py init                     write my_text.yaml to fill in
    python submit.py my_text.yaml --dry-run   check it, say what would run
    python submit.py my_text.yaml             make the run and run its stages

`sluice`, where `.venv` is activated, is the same as `python submit.py`. CONFIG is a YAML file, RUN a path such as
runs/my-text, KEY=VALUE a key of the config such as train.steps=400. `COMMAND --help` says more of each.

    Run
    CONFIG [KEY=VALUE]…      make the run, or find it; run what is not done
    resume RUN [KEY=VALUE]…  go on where it stood, maybe on other resources
    cancel RUN               end it: it saves; nothing starts before resume
    init [--model]           write a small config to start from

    Look
    status [RUN] [--watch]   how the stages stand; without RUN, all runs
    logs RUN STAGE [-f]      what a rank of a stage, or its supervisor, said
    report RUN               hours, losses, evaluation; a page of pictures
    profile RUN              where the next steps go
    verify RUN               hash a checkpoint again and print its digest
    track RUN                tell TensorBoard, W&B, MLflow … what is new

    Use
    export RUN DIR           the weights as safetensors, for transformers
    generate RUN TEXT        how the model goes on with a text
    data ACTION PATH…        inspect, verify or import tokens that exist

    Plan
    plan CONFIG              a layout's memory, communication and speed
    doctor [FOLDER]          what this cluster, or machine, offers and lacks
    schema                   the JSON Schema of configs, for editors
"""
# The text above is what --help prints: in groups, whole lines of at most 80 columns, where click cuts its own list.

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from pipeline.base.errors import UserError

HELP = re.sub(r"\n\n(?=    )", "\n\n\b\n", __doc__ or "")
"""For click, which would fill indented lines as it does others, were it not for the \\b."""


class SubmitByDefault(TyperGroup):
    """`submit.py CONFIG` is short for `submit.py submit CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `submit` before a first word that is no command. Raises UserError where it is no config, either."""
        words = [a for a in args if not a.startswith("-")]
        if words and words[0] not in self.commands:
            if words[0] == args[0] and not ctx.resilient_parsing:
                self._refuse_no_command(args[0])
            args = ["submit", *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """They stand in the text above, in groups."""

    def _refuse_no_command(self, word: str) -> None:
        from difflib import get_close_matches

        if Path(word).exists() or not word.replace("-", "").isalpha():  # a file's name mostly has more in it
            return
        near = get_close_matches(word, self.commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(self.commands)}"
        raise UserError(f"{word}: there is no such command, and no such file; {hint}")
