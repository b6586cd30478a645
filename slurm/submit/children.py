"""Commands of submit.py that need torch or h5py, and so run in a child: `verify`, `export`, `generate`, `data`."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

RunPath = Annotated[str, typer.Argument(metavar="RUN", help="a run directory such as runs/quickstart")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="such as train.steps=400")]


class DataAction(StrEnum):
    """What is done with files of tokens."""

    IMPORT = "import"
    INSPECT = "inspect"
    VERIFY = "verify"


def child(*arguments: str, step: str | None = None) -> typer.Exit:
    """Run `python -m pipeline` with our own code; it may import torch."""
    from pipeline.run.code import CODE_ROOT, with_code

    words = [sys.executable, "-m", "pipeline", *arguments, *([f"--step={step}"] if step else [])]
    return typer.Exit(subprocess.run(words, env=with_code(os.environ, CODE_ROOT)).returncode)


def verify(
    run: RunPath, step: Annotated[str | None, typer.Option(help="which checkpoint; the newest without it")] = None
) -> None:
    """Hash a checkpoint's files again and print the digest of its weights and optimizer state."""
    from pipeline.run.directory import Run

    # our code, not the run's: it may be anybody's
    raise child("verify", str(Run.open(run).path), step=step)


def export(
    run: RunPath,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that does not exist yet")],
    step: Annotated[str | None, typer.Option(help="which checkpoint; the newest without it")] = None,
    dtype: Annotated[str, typer.Option(help="type of the weights: fp32 or bf16")] = "fp32",
) -> None:
    """Write a checkpoint's weights as safetensors, with config.json and tokenizer: a folder for transformers."""
    from pipeline.run.directory import Run

    raise child("export", str(Run.open(run).path), str(folder.absolute()), f"--dtype={dtype}", step=step)


def generate(
    target: Annotated[str, typer.Argument(metavar="RUN|DIR", help="a run, or a folder in Hugging Face's format")],
    prompt: Annotated[str, typer.Argument(metavar="TEXT", help="what to go on with")],
    max_tokens: Annotated[int, typer.Option(help="how far at most")] = 100,
    greedy: Annotated[bool, typer.Option("--greedy", help="take the likeliest token each time; draw none")] = False,
    temperature: Annotated[float, typer.Option(help="less than 1: likely tokens become likelier")] = 1.0,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest tokens of this probability only")] = 1.0,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 1,
    step: Annotated[str | None, typer.Option(help="which checkpoint; the newest without it")] = None,
) -> None:
    """Go on with a text, on this machine: a look at what was learned."""
    how = [f"--temperature={0.0 if greedy else temperature}", f"--top-p={top_p}", f"--seed={seed}"]
    raise child("generate", target, f"--prompt={prompt}", f"--max-tokens={max_tokens}", *how, step=step)


def data(
    action: Annotated[DataAction, typer.Argument(help="copy them as shards; say what they are; read them through")],
    paths: Annotated[list[str], typer.Argument(metavar="PATH…", help="files of tokens, or folders of them")],
    to: Annotated[str | None, typer.Option(metavar="DIR", help="import: a folder that does not exist yet")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="FILE", help="the tokenizer.json that made them")] = None,
    eos_token: Annotated[str, typer.Option(help="its token between documents")] = "<|endoftext|>",
    packed: Annotated[
        bool, typer.Option("--packed", help="import: rows are no documents, but go on in the next")
    ] = False,
) -> None:
    """Look at tokens that exist (Megatron, nanoGPT, llm.c, datatrove, Arrow, WebDataset, HDF5), or copy them."""
    options = {"--to": to, "--tokenizer": tokenizer, "--eos-token": eos_token}
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    raise child("data", action.value, *given, *["--packed"] * packed, "--", *paths)


def add_to(app: typer.Typer) -> None:
    """Give submit.py these commands."""
    for one in (verify, export, generate, data):
        app.command()(one)
