"""`data inspect|verify|import PATH…`: inspect, verify or import files that already contain tokens."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from cli.common import prepare_for_torch


def data(
    action: Annotated[
        Literal["import", "inspect", "verify"],
        typer.Argument(
            help="inspect: print format and size; verify: also read all tokens; import: copy the tokens as shards"
        ),
    ],
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="token files, or folders of token files")],
    to: Annotated[str | None, typer.Option(metavar="DIR", help="import: a folder that does not exist yet")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="the tokenizer.json that produced the tokens")
    ] = None,
    eos_token: Annotated[str, typer.Option(help="end-of-text token of this tokenizer")] = "<|endoftext|>",
    packed: Annotated[
        bool, typer.Option("--packed", help="import: rows are not documents; each row continues in the next one")
    ] = False,
) -> None:
    """Inspect, verify or import existing tokens (Megatron, nanoGPT, llm.c, datatrove, Arrow, WebDataset, HDF5)."""
    prepare_for_torch()
    from data_prep.tokens_commands import run_data_command

    run_data_command(action, paths, to, tokenizer, eos_token, packed)
