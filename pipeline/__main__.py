"""The rank's door: `python -m pipeline STAGE RUN`, under srun, mpirun, torchrun, our launcher or alone.

    python -m pipeline train runs/quickstart            one stage of an existing run
    python -m pipeline train configs/quickstart.yaml train.steps=50     makes or finds the run first
    python -m pipeline evaluate RUN --step 100          a named checkpoint (or newest, every)
    python -m pipeline verify|export|generate|plan|data …   what is no stage (cli/looks.py), as submit.py has it

A rank computes, saves and leaves with a code (pipeline/base/errors.py); it never requeues. Where it fails, it leaves
`jobs/STAGE/error-rank-N.json` for the supervisor, with the traceback and the time, so that the first failure can
be told from those that followed it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.base.command import command
from pipeline.base.dist_env import RankInfo, read_rank_info
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.signals import StopFlag
from pipeline.config.read import load_config
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.failure import explain, leave_peers, report_error

LOOKS = ("verify", "export", "generate", "plan", "data")
"""What is no stage, and leaves the run as it is: the commands of cli/looks.py."""
MOST_FILES = 1 << 16
"""So many a rank may have open, if it may: Linux lets a process map no more (vm.max_map_count)."""


def main(arguments: list[str]) -> int:
    """Run one stage; returns the exit code."""
    flag = StopFlag().install()
    gc.disable()  # the collector, walking a growing heap again and again, is a fifth of the time that imports take
    faulthandler.enable()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # login nodes' 1,024 come with the job: too few for shards
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))
    place, run, noting, watched = None, None, False, "SLUICE_SUPERVISED" in os.environ
    began = time.monotonic()
    try:
        if arguments[:1] and arguments[0] in LOOKS:
            flag.leave_at_once()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader may close the pipe early, as `head` does
            from cli.looks import app  # a rank needs no typer

            app(arguments)  # and leave
        asked = parse(arguments)
        place = read_rank_info(os.environ)
        found = find_run(asked.target, asked.overrides, place)
        if not watched:  # the supervisor asked already
            found.check_owner()
            found.check_not_cancelled()
        run = found
        if not watched and place.rank == 0:
            if run.lock_stage(asked.stage) is None:
                raise UserError(f"{asked.stage} of {run.name} is already running ({run.lock_holder(asked.stage)})")
            note(run, asked.stage, place, "started", ranks=place.world_size, host=os.uname().nodename, pid=os.getpid())
        noting = not watched
        code = stages.load(asked.stage).main(run, place, {"step": asked.step} if asked.step else {}, flag)
        if noting and place.rank == 0:
            note_end(run, asked.stage, place, "done" if code == ExitCode.DONE else "stopped", code, began)
        return code
    except BaseException as error:
        if run is None and isinstance(error, SystemExit):  # a look is over, or the command line is none
            return int(error.code or 0)
        code, message = explain(error)
        if run is not None and place is not None:
            report_error(run, asked.stage, place, code, message, getattr(error, "host", None))
            if noting:
                # the culprit writes; rank 0 where the culprit could not
                written = place.rank > 0 or [e["event"] for e in run.read_events(asked.stage)][-1:] == ["failed"]
                if code != ExitCode.PEER_LOST or not written:
                    where = {"rank": place.rank, "host": os.uname().nodename, "message": message}
                    note_end(run, asked.stage, place, "failed", code, began, cause=code.name.lower(), **where)
        if watched or place is None or place.world_size == 1:
            print(message, file=sys.stderr, flush=True)
        else:
            leave_peers(place, code, message)
        return code


def note(run: Run, stage: str, place: RankInfo, event: str, **facts: Any) -> None:
    """Write what a supervisor would write, where none watches: ranks that were started by hand."""
    run.event(
        event, stage, job_id=place.submitted_as or str(os.getpid()),
        attempt=run.count_attempts(stage) + (event == "started"),
        task=None, slurm_job=place.job_id, restarts=place.restart_count, **facts,
    )  # fmt: skip


def note_end(run: Run, stage: str, place: RankInfo, event: str, code: ExitCode, began: float, **facts: Any) -> None:
    """The same of an end; `began`: when this process did."""
    note(run, stage, place, event, exit_code=int(code), seconds=round(time.monotonic() - began, 3), **facts)


def parse(arguments: list[str]) -> argparse.Namespace:
    """What is asked for; a mistake ends the process with the usage, and with the code of a user's mistake."""
    parser = argparse.ArgumentParser(
        "python -m pipeline", allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("stage", choices=[*STAGES, *LOOKS], help="what to do")
    parser.add_argument("target", metavar="RUN|CONFIG", help="a run directory, or a YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="such as train.steps=50, for a CONFIG")
    parser.add_argument("--step", metavar="N", help="which checkpoint: its step, newest or every")
    return parser.parse_intermixed_args(arguments)


def find_run(target: str, overrides: list[str], place: RankInfo) -> Run:
    """The run in directory `target`, or the one that the config `target` describes, made by rank 0."""
    path = Path(target)
    if path.is_dir():
        if overrides:
            raise UserError(f"{overrides[0]}: a run's config is frozen; to change it: {command('resume', target)} …")
        return Run.open(path)
    config = load_config(path, overrides)
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
