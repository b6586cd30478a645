"""`drill RUN`: cause faults in a copy of a run, and check that it survives them."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.common import Overrides, RunPath, console, prepare_for_torch
from pipeline.base.errors import UserError
from pipeline.base.files import write_atomic
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.submit.executor import Executor, choose_executor


def drill(
    run_path: RunPath,
    overrides: Overrides = None,
    faults: Annotated[
        str | None, typer.Option(metavar="A,B", help="which faults, in this order; default: all that are possible here")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="steps between two checkpoints of the copy")] = 10,
    hang_s: Annotated[float, typer.Option(min=1, help="seconds after which a rank of the copy counts as hanging")] = 60,
    name: Annotated[str | None, typer.Option(help="name of the copy; default: RUN-drill")] = None,
    seed: Annotated[int, typer.Option(help="seed of the random choices")] = 0,
    executor: Annotated[Executor, typer.Option(help="where to train; auto: where the run was before")] = "auto",
) -> None:
    """Cause faults in a copy of a run, and compare it with an undisturbed copy.

    RUN itself is not changed. Its data must be prepared. Both copies train on the resources of the train stage, one
    after the other. KEY=VALUE changes the config of both copies, such as stages.train.time=00:30:00.
    """
    run = Run.open(run_path)
    run.config.require_pipeline("drill")
    if run.config.sweep is not None:
        raise UserError("drill.sweep", f"{run.name} is a sweep: give the directory of one of its points")
    for stage in ("prepare", "shard"):
        missing = stages.load_stage_module(run, stage).describe_missing_outputs(run)
        if missing is not None:
            raise UserError("drill.not_prepared", f"{run.name} has no data yet ({missing}): {run.resume_command}")
    prepare_for_torch()
    from slurm.drill.drill import Drill, make_overrides
    from slurm.drill.faults import FAULTS
    from slurm.drill.page import format_page

    names = list(FAULTS) if faults is None else faults.split(",")
    if unknown := [each for each in names if each not in FAULTS]:
        raise UserError("drill.unknown_fault", f"--faults: {unknown[0]} is not one of {', '.join(FAULTS)}")
    on_slurm = choose_executor(executor, run) == "slurm"
    all_overrides = [*make_overrides(run, every, hang_s), *(overrides or ())]
    result = Drill(
        run, name or f"{run.path.name}-drill", names, all_overrides, console, on_slurm=on_slurm, seed=seed
    ).run()
    page = format_page(result)
    file = result.run.path / "drill.md"
    write_atomic(file, page)
    console.print(f"\n{page}\nwritten to {file}", soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(0 if result.has_passed else 1)
