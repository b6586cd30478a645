"""`plan CONFIG`: predict the memory, communication and speed of the layout of a config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli.common import Overrides, console, prepare_for_torch
from pipeline.base.errors import ConfigError, UserError
from pipeline.config.read import COMMAND_LINE, apply_overrides, dump_values, load_config, parse_config
from pipeline.config.sections import Config
from pipeline.run.directory import Run


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, or a run directory")],
    overrides: Overrides = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="also predict speed on this machine; default: site.machine")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="list the fastest layouts that fit, instead of the config's own layout")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="with --best: write the fastest as a config beside CONFIG")
    ] = False,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="predict the cost of failures and the best checkpoint interval")
    ] = False,
    nodes: Annotated[
        str | None, typer.Option(metavar="N,M|N..M", help="with --best or --goodput: numbers of nodes")
    ] = None,
    rehearse: Annotated[
        int | None,
        typer.Option(metavar="RANK", help="run a step of this rank on this machine, without data and other ranks"),
    ] = None,
    assumptions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="with --goodput: inputs, as in configs/planning/assumptions.yaml"),
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(hidden=True, help="replaced by `python -m planning.calibrate`")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="also write the plan with charts to this file")
    ] = None,
) -> None:
    """Predict what a config's layout means: mesh, memory per rank, pipeline schedule, communication and speed."""
    if measure is not None:
        raise UserError(
            "plan.measure_replaced",
            f"plan --measure was replaced: run `python -m planning.calibrate {config} --out {measure}`, inside an "
            "allocation to measure its nodes",
        )
    mode_count = best + goodput + (rehearse is not None)
    if mode_count > 1 or (mode_count and html is not None):
        raise UserError("plan.conflict", "plan: use only one of --best, --goodput, --rehearse and --html")
    if write and not best:
        raise UserError("plan.conflict", "plan: --write requires --best")
    if nodes and not (best or goodput):
        raise UserError("plan.conflict", "plan: --nodes requires --best or --goodput")
    if assumptions is not None and not goodput:
        raise UserError("plan.conflict", "plan: --assumptions requires --goodput")
    changes = overrides or []
    if goodput:
        from planning.goodput import print_goodput

        print_goodput(config, changes, nodes, console, assumptions)
    else:
        _print_layout(config, changes, machine, best, write, nodes, rehearse, html)


def _print_layout(
    path: Path,
    overrides: list[str],
    machine_name: str | None,
    best: bool,
    write: bool,
    node_ranges: str | None,
    rehearsed_rank: int | None,
    html: Path | None,
) -> None:
    """Print the plan of the config's layout, the best layouts, or the rehearsal of a rank.

    Args:
        path: a config file or a run directory.
        overrides: changes of the config as `KEY=VALUE`.
        machine_name: the name of a machine, or a file that describes one; None for `site.machine`.
        best: whether to print the best layouts.
        write: whether to also write the best layout as a config.
        node_ranges: the numbers of nodes for the best layouts, such as `2,4` or `2..8`; None for those of the config.
        rehearsed_rank: the rank to rehearse; None to print a plan.
        html: the file to which to write the plan with charts; None to write no file.
    """
    prepare_for_torch()
    from planning.machine import load_machine

    if html is not None:
        from planning.plan import check_page_path

        check_page_path(html)
    config, layout_problem = _load(path, overrides, any_layout=best)
    name = machine_name or config.site.machine
    memory_gib = config.site.gpu_memory_gib
    machine = load_machine(name) if name else None
    # the memory of `--machine` takes precedence over `site.gpu_memory_gib`, which takes precedence over `site.machine`
    if machine is not None and (machine_name or memory_gib is None):
        memory_gib = machine.memory_gib
    config = config.model_copy(update={"site": config.site.model_copy(update={"gpu_memory_gib": memory_gib})})
    if rehearsed_rank is not None:
        from planning.rehearse import describe_rehearsal

        _print_lines(describe_rehearsal(config, rehearsed_rank))
    elif best:
        from planning.plan import describe_best_layouts

        if machine is None:
            raise UserError("plan.no_machine", "plan: --best requires --machine NAME, or site.machine in the config")
        if write and path.is_dir():
            raise UserError(
                "plan.conflict", f"plan: --write requires a CONFIG; {path} is a run, and its config is frozen"
            )
        _print_lines(
            describe_best_layouts(config, machine, node_ranges, path if write else None, overrides, layout_problem)
        )
    else:
        from planning.plan import describe_plan

        if html is None:
            _print_lines(describe_plan(config, machine))
            return
        from planning.plan import compute_plan_figures, write_plan_page

        figures = compute_plan_figures(config, machine)
        try:
            _print_lines(describe_plan(config, machine))
        finally:
            # `describe_plan` raises UserError if the memory does not suffice; the page shows how much is missing
            write_plan_page(config, figures, f"the plan of {path}", html)
            print(f"with figures: {html}", flush=True)


def _load(path: Path, overrides: Sequence[str], any_layout: bool) -> tuple[Config, str | None]:
    """Load the config of a file or a run.

    Args:
        path: a config file or a run directory.
        overrides: changes of the config as `KEY=VALUE`.
        any_layout: whether to also load a config file whose layout is invalid. The keys that `--best` searches are then
            reset (`planning.search.ANY_LAYOUT`).

    Returns:
        The config, and why its layout is invalid; None if the layout is valid.
    """
    if path.is_dir():
        values = dump_values(Run.open(path).config)
        config = parse_config(apply_overrides(values, overrides), COMMAND_LINE)
        config.require_pipeline("plan")
        return config, None
    try:
        config = load_config(path, overrides)
        config.require_pipeline("plan")
        return config, None
    except ConfigError as error:
        if not any_layout:
            raise
        from planning.search import ANY_LAYOUT

        try:
            return load_config(path, [*overrides, *ANY_LAYOUT], checks_sizes=False), str(error)
        except ConfigError:
            raise error from None


def _print_lines(lines: Iterable[str]) -> None:
    """Print each line as soon as it is available."""
    for line in lines:
        print(line)
