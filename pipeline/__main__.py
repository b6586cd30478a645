"""The rank's door: `python -m pipeline STAGE RUN`, under srun, mpirun, torchrun, our launcher or alone.

    python -m pipeline train runs/quickstart            one stage of an existing run
    python -m pipeline train configs/quickstart.yaml train.steps=50     makes or finds the run first
    python -m pipeline evaluate RUN --step 100          a named checkpoint (or newest, every)
    python -m pipeline verify RUN [--step N]            hash a checkpoint's files, print its digest
    python -m pipeline plan RUN|CONFIG [key=value …]   mesh, memory, pipeline and communication of its layout

A rank computes, saves and leaves with a code (pipeline/base/errors.py); it never requeues. Where it fails, it leaves
`jobs/STAGE/error-rank-N.json` for the supervisor, with the traceback and the time, so that the first failure can
be told from those that followed it.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.base.errors import Exit, UserError
from pipeline.base.place import Place, identify
from pipeline.base.signals import StopFlag
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run, with_absolute_paths
from pipeline.run.failure import explain, leave_peers, report_error

USAGE = f"usage: python -m pipeline {'|'.join(STAGES)}|verify|plan RUN|CONFIG [--step N] [key=value …]"


def main(arguments: list[str]) -> int:
    """Run one stage; returns the exit code."""
    flag = StopFlag().install()
    gc.disable()  # the collector, walking a growing heap again and again, is a fifth of the time that imports take
    faulthandler.enable()
    place, run, stage, watched = None, None, "?", "SLUICE_SUPERVISED" in os.environ
    began, by_hand = time.monotonic(), False
    try:
        stage, target, options, overrides = parse(arguments)
        if stage == "verify":
            from pipeline.checkpoint.verify import verify

            return verify(Run.open(target), options.get("step"))
        if stage == "plan":
            from pipeline.config.read import load_config
            from pipeline.parallel.plan import plan

            config = Run.open(target).config if Path(target).is_dir() else load_config(Path(target), overrides)
            print("\n".join(plan(config)))
            return 0
        place = identify(os.environ)
        found = find_run(target, overrides, place)
        if not watched:  # the supervisor asked already
            found.refuse_foreign()
        run = found
        work = stages.load(stage)
        if not watched and place.rank == 0:
            if run.lock(stage) is None:
                raise UserError(f"{stage} of {run.name} is already running ({run.holder(stage)})")
            note(run, stage, place, "started", ranks=place.world_size, host=os.uname().nodename, pid=os.getpid())
        by_hand = not watched
        code = work.main(run, place, options, flag)
        if by_hand and place.rank == 0:
            event = "done" if code == Exit.DONE else "stopped"
            note(run, stage, place, event, exit_code=int(code), seconds=round(time.monotonic() - began, 3))
        return code
    except BaseException as error:
        code, message = explain(error)
        report_error(run, stage, place, code, message, getattr(error, "host", None))
        if (
            run is not None
            and place is not None
            and by_hand
            and not (code == Exit.PEER_LOST and (place.rank > 0 or run.read_events(stage)[-1]["event"] == "failed"))
        ):  # the culprit writes; rank 0 where the culprit could not
            facts = {"cause": code.name.lower(), "rank": place.rank, "host": os.uname().nodename, "message": message}
            note(run, stage, place, "failed", exit_code=int(code), seconds=round(time.monotonic() - began, 3), **facts)
        if watched or place is None or place.world_size == 1:
            print(message, file=sys.stderr, flush=True)
        else:
            leave_peers(place, code, message)
        return code


def note(run: Run, stage: str, place: Place, event: str, **facts: Any) -> None:
    """Write what a supervisor would write, where none watches: ranks that were started by hand."""
    run.event(
        event, stage, job_id=place.submitted_as or str(os.getpid()), attempt=run.attempts(stage) + (event == "started"),
        task=None, slurm_job=place.job_id, restarts=place.restart_count, **facts,
    )  # fmt: skip


def parse(arguments: list[str]) -> tuple[str, str, dict[str, str], list[str]]:
    """Stage, run or config, options and overrides. Raises UserError with the usage."""
    words: list[str] = []
    options: dict[str, str] = {}
    overrides: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word == "--step":
            options["step"] = next(rest, "")
        elif word.startswith("--step="):
            options["step"] = word.removeprefix("--step=")
        elif word.startswith("-"):
            raise UserError(f"{word}: no such option\n{USAGE}")
        elif "=" in word and len(words) == 2:
            overrides.append(word)
        else:
            words.append(word)
    if len(words) != 2:
        raise UserError(USAGE)
    return words[0], words[1], options, overrides


def find_run(target: str, overrides: list[str], place: Place) -> Run:
    """The run in directory `target`, or the one that the config `target` describes, made by rank 0."""
    path = Path(target)
    if path.is_dir():
        if overrides:
            raise UserError(f"{overrides[0]}: a run's config is frozen; change it with submit.py resume")
        return Run.open(path)
    from pipeline.config.read import load_config

    config = with_absolute_paths(load_config(path, overrides))
    run_folder = config.run.root / config.run.name
    if place.rank == 0:
        return Run.create(config)
    deadline = time.monotonic() + 120
    while not (run_folder / "config.yaml").exists():
        if time.monotonic() > deadline:
            raise UserError(f"rank 0 has not made {run_folder} within two minutes")
        time.sleep(0.05)
    return Run.open(run_folder)


if __name__ == "__main__":
    exit_code = int(main(sys.argv[1:]))
    sys.stdout.flush()
    sys.stderr.flush()
    # threads of a failed process group or save may wait for peers that are gone: never wait for them
    os._exit(exit_code)
