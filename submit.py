"""Sluice on the login node: `python submit.py CONFIG.yaml`, `python submit.py status RUN` …

cli/main.py has the list of them, which is what `--help` prints. Nothing here imports torch, numpy or h5py:
on a cluster's shared file system those imports take seconds; what needs torch runs as a child (`verify`).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pipeline.base.command import command, venv_python

_STARTED_BY = "SLUICE_STARTED_BY"
"""The environment variable that names the Python by which submit.py started itself again."""

try:
    from importlib.util import find_spec

    import typer

    from cli import looks
    from cli.looks import Overrides, RunPath
    from cli.main import HELP, SubmitByDefault
    from pipeline.base.console import PlainConsole
    from pipeline.base.errors import ExitCode, UserError, format_error, printable, storage_error
    from slurm.submit.executor import Executor, choose_executor

    if lacking := [name for name in ("pydantic", "submitit", "yaml") if find_spec(name) is None]:
        raise ImportError(f"No module named {lacking[0]!r}")
except ImportError as error:
    if __name__ != "__main__":
        raise
    python = venv_python(Path(__file__))  # nobody has activated it
    # `python` may be a wrapper script that starts an interpreter elsewhere: the variable ends the second round
    if not python.exists() or sys.executable == str(python) or os.environ.get(_STARTED_BY) == str(python):
        print(f"error: {sys.executable}: {error}; `make install` makes {python.parents[1]}", file=sys.stderr)
        sys.exit(2)
    os.execve(python, [str(python), *sys.argv], {**os.environ, _STARTED_BY: str(python)})
os.environ.pop(_STARTED_BY, None)

if TYPE_CHECKING:
    from pipeline.run.directory import Run


VERSION = "0.1.0"


app = typer.Typer(
    cls=SubmitByDefault, no_args_is_help=True, rich_markup_mode=None, help=HELP, pretty_exceptions_enable=False
)
console = PlainConsole(
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
)  # rich takes 80 for a pipe


def _print_version(asked: bool) -> None:
    if asked:
        print(f"sluice {VERSION}")
        raise typer.Exit()


@app.callback()
def anyway(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and do nothing")
    ] = False,
) -> None:
    """Take what comes before a command."""


@app.command()
def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file such as configs/quickstart.yaml")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything, print the plan, do nothing")] = False,
    scripts: Annotated[
        bool, typer.Option("--scripts", help="with --dry-run: the resolved config and sbatch scripts, too")
    ] = False,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="with --dry-run: check the memory of its GPU")
    ] = None,
    executor: Annotated[
        Executor, typer.Option(help="auto: Slurm where it answers, inside salloc its allocation, else this machine")
    ] = "auto",
) -> None:
    """Make the run of a config (or find it) and run the stages that are not done."""
    from cli.submission_checks import check_submission, inputs, note_oversubscription
    from pipeline.config.read import load_config
    from pipeline.run.directory import Run
    from slurm.query.run_jobs import list_running_work, uses_slurm

    if (config / "config.yaml").is_file():
        raise UserError(f"{config} is a run, not a config; to go on with it: {command('resume', str(config))}")
    loaded = load_config(config, overrides or ())
    known, chosen = Run(loaded.run.root / loaded.run.name), executor
    if executor != "slurm" or not dry_run:  # a dry run for Slurm needs none
        chosen = choose_executor(executor, known if known.config_file.exists() and uses_slurm(known) else None)
    rehearsed = check_submission(loaded, chosen == "slurm")
    if dry_run:
        from cli.dry_run import print_plan

        planned = rehearsed.config  # with what `resume` has changed
        notes = [
            *inputs(rehearsed),
            *rehearsed.code_notes,
            *(note_oversubscription(planned) if chosen == "local" else ()),
        ]
        print_plan(planned, chosen, console, notes, scripts=scripts, machine=machine, corrections=rehearsed.corrections)
        return
    if scripts or machine is not None:
        raise UserError("--scripts and --machine go with --dry-run")
    corrections = rehearsed.corrections
    if corrections:
        known.check_not_running(list_running_work(known))
    run = Run.create(loaded)
    if corrections:
        from slurm.submit.chain import reset_for_resume

        for key, words in corrections.items():
            console.print(f"corrected {key}: {words}", soft_wrap=True)
        reset_for_resume(run, asked_anew=True)
    run.code_notes = rehearsed.code_notes
    _go(run, chosen, again=bool(corrections))


@app.command()
def resume(
    run: RunPath,
    overrides: Overrides = None,
    update_code: Annotated[bool, typer.Option(help="run today's code instead of the run's own copy")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything, print what would change and run, do nothing")
    ] = False,
    scripts: Annotated[bool, typer.Option("--scripts", help="with --dry-run: the sbatch scripts, too")] = False,
    executor: Annotated[Executor, typer.Option(help="auto: where the run was before")] = "auto",
) -> None:
    """Go on with a run; may change parallel.*, stages.*, site.*, recovery.*, goodput.*, publish.*, track.*,
    checkpoint.*, data.max_rejected, data.verify, data.mixture.weights, evaluate.every, model.init_files, run.name,
    run.root, train.log_every, train.profile_every, and enlarge train.steps; before a training has saved, any key."""
    from cli.submission_checks import check_jobs
    from pipeline.run.points import make_points
    from slurm.query.run_jobs import list_running_work
    from slurm.submit.chain import reset_for_resume

    if scripts and not dry_run:
        raise UserError("--scripts goes with --dry-run")
    opened = _open(run)
    opened.check_owner()
    chosen = choose_executor(executor, opened)
    asked_anew = any(not change.startswith(("recovery.", "goodput.")) for change in overrides or ())
    with (
        nullcontext() if dry_run else opened.lock_exclusively()
    ):  # two at once: the second finds what the first one changed
        if asked_anew or update_code:
            opened.check_not_running(list_running_work(opened))
        if update_code:
            opened.code_notes = opened.check_model_code()
        if dry_run:
            from cli.resume_preview import print_resume

            print_resume(opened, overrides or [], update_code, chosen, asked_anew, console, scripts=scripts)
            return
        if chosen == "slurm":  # before the changes are recorded
            check_jobs(opened.with_config(opened.preview_overrides(overrides or [], update_code)))
        for one in (opened, *make_points(opened)):
            one.apply_overrides(overrides or [], update_code)
        reset_for_resume(opened, asked_anew=asked_anew)
        if update_code:
            opened.copy_code()
            opened.event("code_updated", commit=opened.commit)
    _go(opened, chosen, again=True)


def _open(run: str) -> Run:
    from pipeline.run.directory import Run

    return Run.open(run)


def _go(run: Run, executor: Executor, *, again: bool) -> None:
    from cli.submission_checks import warnings

    console.print(f"run {run.name}", soft_wrap=True)
    for words in warnings(run, executor):
        console.print(words, soft_wrap=True)
    if executor == "slurm":
        from slurm.submit.chain import submit_chain

        with run.lock_exclusively():  # two at once: the second finds the jobs of the first
            submit_chain(run, console, again=again)
        return
    from slurm.query.status import describe_outcome
    from slurm.submit.local_runner import run_chain_locally

    code = run_chain_locally(run, console)
    if code == ExitCode.DONE:
        console.print(describe_outcome(run), soft_wrap=True)
    raise typer.Exit(code)


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="a run; without it, all below runs/")] = None,
    live: Annotated[bool, typer.Option("--watch", "-w", help="on one screen, until the run ends or q")] = False,
) -> None:
    """Show the stages of a run and how they stand; without RUN, a line for each run below runs/."""
    if run is not None:
        from cli import watch
        from slurm.query import status

        (watch.watch if live else status.print_status)(_open(run), console)
    elif live:
        raise UserError("--watch: of which run? Name one, such as runs/quickstart")
    else:
        from cli.overview import print_runs

        print_runs(Path("runs"), console)


@app.command()
def report(run: RunPath) -> None:
    """Show what a run came to: attempts, hours, losses, evaluation; report.html has the pictures."""
    from planning.goodput import describe_expected_goodput
    from tracking.report import print_report

    print_report(_open(run), console, describe_expected_goodput)


@app.command()
def logs(
    run: RunPath,
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="a stage of the run, such as train")],
    rank: Annotated[str, typer.Option(help="whose log: a rank's number (shard: a task's), or supervisor")] = "0",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on printing until the stage has ended")] = False,
) -> None:
    """Print the log of one rank of a stage, or of its supervisor."""
    from cli.logs import show

    show(_open(run), stage, rank, follow)


@app.command()
def cancel(run: RunPath) -> None:
    """End a run: what runs saves and leaves, nothing starts again until `resume`."""
    from slurm.submit.chain import cancel_run

    for words in cancel_run(_open(run)):
        console.print(words, soft_wrap=True)


def child(*more: str) -> typer.Exit:
    """Hand this command's words, and `more`, on to a child with our own code, which may import torch."""
    from pipeline.run.code import CODE_ROOT, with_code

    words = [sys.executable, "-m", "pipeline", *sys.argv[1:], *more]
    return typer.Exit(subprocess.run(words, env=with_code(os.environ, CODE_ROOT)).returncode)


def in_child(look: Callable[..., None]) -> Callable[..., None]:
    """The command `look`, its words read here."""

    @wraps(look)
    def call(**given: Any) -> None:
        raise child()

    return call


for look in (looks.verify, looks.export, looks.generate, looks.data):
    app.command()(in_child(look))


@app.command()
def track(
    run: RunPath,
    overrides: Overrides = None,
    to: Annotated[
        str | None, typer.Option(help="one tracker, such as tensorboard; default: all that the config enables")
    ] = None,
) -> None:
    """Send trackers the metrics and events that they have not received yet: TensorBoard, W&B, MLflow, Prometheus …"""
    from pipeline.run.points import points
    from planning.goodput import describe_expected_goodput
    from tracking.follower import update_trackers
    from tracking.report import print_report

    opened, codes = _open(run), []
    for one in [opened, *(point for point in points(opened) if point.config_file.exists())]:
        if to == "mlflow" or (to is None and opened.config.track.mlflow):  # it keeps the page
            print_report(one, PlainConsole(quiet=True), describe_expected_goodput)
        codes.append(update_trackers(one, to, overrides or ()))
    raise typer.Exit(max(codes))


@app.command()
def profile(
    run: RunPath,
    ranks: Annotated[str, typer.Option(help="whose steps: such as 0,4-7; all ranks without it")] = "",
    steps: Annotated[int, typer.Option(min=0, max=20, help="how many; 0: show those that are there")] = 3,
) -> None:
    """Record the next steps of a training that runs: where they go, and one trace of all ranks for Perfetto."""
    from cli.profile import ask

    for words in ask(_open(run), ranks, steps):
        console.print(words, soft_wrap=True)


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="where runs will be kept (run.root)")] = Path(
        "runs"
    ),
    check_nodes: Annotated[
        bool, typer.Option("--check-nodes", help="look from two compute nodes whether they see FOLDER (a short srun)")
    ] = False,
    site: Annotated[
        Path | None, typer.Option(metavar="PROFILE", help="a site profile; its partition, account … are asked for")
    ] = None,
) -> None:
    """Say what this cluster, or this machine, offers and what of it Sluice will use or lacks."""
    from cli.doctor import examine, print_findings
    from pipeline.config.read import load_site

    print_findings(examine(folder, check_nodes, load_site(site)), console)


@app.command()
@wraps(looks.plan)
def plan(**given: Any) -> None:
    """As in cli/looks.py, where `--goodput`, `--measure` and `--html` are only named: what they ask is here."""
    kind, config, overrides = looks.kind_of_plan(given), given["config"], given["overrides"] or ()
    if kind == "goodput":
        from planning.goodput import print_goodput

        print_goodput(config, overrides, given["nodes"], console)
    elif kind == "measure":
        from planning import measuring

        raise typer.Exit(measuring.measure(config, overrides, given["measure"], given["machine"], console))
    elif given["html"] is not None:
        from planning.plan import write_plan_page

        raise write_plan_page(child, f"the plan of {config}", given["html"])
    else:
        raise child()


@app.command()
def init(
    model: Annotated[
        bool, typer.Option("--model", help="for a model of one's own, with the module that gives it")
    ] = False,
) -> None:
    """Write a small commented config into this folder, to start from; what exists stays as it is."""
    from cli.init import write_starter

    console.print(write_starter(Path(), model), soft_wrap=True)


@app.command()
def schema() -> None:
    """Print the JSON Schema of configs, for editors."""
    os.environ["SLUICE_DOCSTRINGS"] = "1"  # before the sections are imported (pipeline/config/types.py)
    from pipeline.config.schema import schema_text

    sys.stdout.write(schema_text())


def main() -> None:
    """Run a command; a user's mistake ends in one message, without a traceback."""
    gc.disable()  # a short life with many imports: the collector would take a sixth of it
    try:
        app()
    except (UserError, OSError) as error:
        found = error if isinstance(error, UserError) else storage_error(error)
        if found is None:
            raise
        print(printable(format_error(found)), file=sys.stderr)
        sys.exit(found.exit_code)


if __name__ == "__main__":
    main()
