"""`generate RUN TEXT`: continue a text with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.common import Step, prepare_for_torch
from pipeline.base.errors import make_printable


def generate(
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="a run, or a model folder in Hugging Face format")],
    prompt: Annotated[str, typer.Argument(metavar="TEXT", help="the prompt")],
    max_tokens: Annotated[int, typer.Option(help="maximum number of new tokens")] = 100,
    greedy: Annotated[bool, typer.Option("--greedy", help="always take the most likely token; do not sample")] = False,
    temperature: Annotated[float, typer.Option(help="sampling temperature; below 1 favors likely tokens")] = 1.0,
    top_p: Annotated[float, typer.Option(help="sample from the most likely tokens with this total probability")] = 1.0,
    seed: Annotated[int, typer.Option(help="random seed for sampling")] = 1,
    step: Step = None,
    ema: Annotated[bool, typer.Option("--ema", help="use the moving average of the weights (train.ema)")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="TEXT is a user message: answer it with the chat template")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="with --chat: the system message")] = None,
) -> None:
    """Continue a text, or answer a message, on this machine with a trained model."""
    prepare_for_torch()
    from pipeline.publish.generate import generate_text

    text = generate_text(
        target,
        prompt,
        step=step,
        ema=ema,
        max_tokens=max_tokens,
        temperature=0.0 if greedy else temperature,
        top_p=top_p,
        seed=seed,
        chat=chat,
        system=system,
    )
    print(make_printable(text))
