"""The commands that look and leave everything as it is: verify, export, generate, data, plan.

They are declared once. `python -m pipeline …` runs them. submit.py has the same ones, with the same words and the same
help, and starts that as a child: what they import (torch, h5py) takes seconds, so it stands inside the functions.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pipeline.base.errors import UserError, printable
from pipeline.base.files import write_json

RunPath = Annotated[str, typer.Argument(metavar="RUN", help="a run directory such as runs/quickstart")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="such as train.steps=400")]
Step = Annotated[str | None, typer.Option(help="which checkpoint; the newest without it")]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def verify(run: RunPath, step: Step = None) -> None:
    """Hash a checkpoint's files again and print the digest of its weights and optimizer state."""
    from pipeline.run.directory import Run

    opened = Run.open(run)
    from pipeline.checkpoint.checkpointer import verify_checkpoint

    verify_checkpoint(opened, step)


@app.command()
def export(
    run: RunPath,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that does not exist yet")],
    step: Step = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="type of the weights")] = "fp32",
) -> None:
    """Write a checkpoint's weights as safetensors, with config.json and tokenizer: a folder for transformers."""
    from pipeline.run.directory import Run

    opened = Run.open(run)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for large pages: a third less time
    from pipeline.publish.export import export

    print(export(opened, folder.absolute(), step, dtype))


@app.command()
def generate(
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="a run, or a folder in Hugging Face's format")],
    prompt: Annotated[str, typer.Argument(metavar="TEXT", help="what to go on with")],
    max_tokens: Annotated[int, typer.Option(help="how far at most")] = 100,
    greedy: Annotated[bool, typer.Option("--greedy", help="take the likeliest token each time; draw none")] = False,
    temperature: Annotated[float, typer.Option(help="less than 1: likely tokens become likelier")] = 1.0,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest tokens of this probability only")] = 1.0,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 1,
    step: Step = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="TEXT is a user's message: answer it by the chat template")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="with --chat: the system message")] = None,
) -> None:
    """Go on with a text, or answer a message, on this machine: a look at what was learned."""
    from pipeline.publish.generate import generate

    options: dict[str, Any] = {"step": step, "most": max_tokens, "temperature": 0.0 if greedy else temperature}
    print(printable(generate(target, prompt, **options, top_p=top_p, seed=seed, chat=chat, system=system)))


@app.command()
def data(
    action: Annotated[
        Literal["import", "inspect", "verify"],
        typer.Argument(help="copy them as shards; say what they are; read them through"),
    ],
    paths: Annotated[list[str], typer.Argument(metavar="PATH…", help="files of tokens, or folders of them")],
    to: Annotated[str | None, typer.Option(metavar="DIR", help="import: a folder that does not exist yet")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="FILE", help="the tokenizer.json that made them")] = None,
    eos_token: Annotated[str, typer.Option(help="its token between documents")] = "<|endoftext|>",
    packed: Annotated[
        bool, typer.Option("--packed", help="import: rows are no documents, but go on in the next")
    ] = False,
) -> None:
    """Look at tokens that exist (Megatron, nanoGPT, llm.c, datatrove, Arrow, WebDataset, HDF5), or copy them."""
    commands = importlib.import_module("data_prep.tokens.tokens_commands")  # it builds on this package
    commands.main(action, paths, to, tokenizer, eos_token, packed)


def kind_of_plan(given: Mapping[str, Any]) -> str | None:
    """What `plan` is asked for instead of the config's own layout. Raises UserError for what does not go together."""
    kinds = [
        kind
        for kind in ("best", "goodput", "rehearse", "measure")
        if given[kind] is not None and given[kind] is not False
    ]
    if (
        len(kinds) > (given["html"] is None)
        or (given["write"] and kinds != ["best"])
        or (given["nodes"] and kinds not in (["best"], ["goodput"]))
    ):
        raise UserError(
            "plan: --best, --goodput, --rehearse and --measure are asked for one at a time; --write goes with --best, "
            "--nodes with --best or --goodput, --html with none of them"
        )
    return kinds[0] if kinds else None


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, or a run")],
    overrides: Overrides = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="predict the speed on it: one of configs/machines, a file")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="the fastest layouts that fit, instead of the config's own")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="with --best: the first, as a config beside CONFIG")] = False,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="what failures cost, and how often to save; its figures: goodput.*")
    ] = False,
    nodes: Annotated[str | None, typer.Option(metavar="N,M|N..M", help="for --best and --goodput")] = None,
    rehearse: Annotated[
        int | None, typer.Option(metavar="RANK", help="build and step this rank here, without values and peers")
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="time this machine in the config's ranks, for --machine FILE")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="the plan as a page of pictures, too")] = None,
    figures: Annotated[Path | None, typer.Option(hidden=True, help="what the pictures show, as JSON")] = None,
) -> None:
    """Show what the layout of a config means: mesh, memory per rank, pipeline, communication, speed;
    or which is best, what failures cost, what a rank does."""
    given = {"best": best, "goodput": goodput, "rehearse": rehearse, "measure": measure, "html": html}
    kind = kind_of_plan({**given, "write": write, "nodes": nodes})
    if kind in ("goodput", "measure") or (html is not None and figures is None):
        raise UserError("plan --goodput, --measure and --html look into runs and start jobs: ask submit.py for them")
    from pipeline.config.read import COMMAND_LINE, ConfigError, config_from_mapping, load_config, overridden
    from pipeline.run.directory import Run
    from planning.machine import load_machine

    problem: str | None = None
    if config.is_dir():
        values = Run.open(config).config.model_dump(mode="json")
        found = config_from_mapping(overridden(values, overrides or ()), COMMAND_LINE)
    else:
        try:
            found = load_config(config, overrides or ())
        except ConfigError as wrong:
            if not best:
                raise
            from planning.search import ANY_LAYOUT

            problem = str(wrong)
            try:  # another layout may fit
                found = load_config(config, [*(overrides or ()), *ANY_LAYOUT], layout=False)
            except ConfigError:
                raise wrong from None
    name, memory = machine or found.site.machine, found.site.gpu_memory_gib
    known = load_machine(name) if name else None
    if known is not None and (machine or memory is None):  # what if it were this one
        memory = known.memory_gib
    found = found.model_copy(update={"site": found.site.model_copy(update={"gpu_memory_gib": memory})})
    if rehearse is not None:
        from planning.rehearse import describe_rehearsal as rehearsed

        lines = rehearsed(found, rehearse)
    else:
        from planning import plan as layouts

        if figures is not None:
            from planning.plan import compute_plan_figures as shown

            write_json(figures, shown(found, known))
        lines = layouts.describe_plan(found, known)
        if best:
            if known is None or (write and config.is_dir()):
                raise UserError(
                    "--best needs --machine NAME or site.machine, and --write a CONFIG, for runs are frozen"
                )
            lines = layouts.describe_best_layouts(
                found, known, nodes, config if write else None, overrides or [], problem
            )
    for line in lines:
        print(line)
