"""Entry point of a rank: `python -m pipeline STAGE RUN`, started by srun, mpirun, torchrun, the supervisor or by hand.

    python -m pipeline train runs/quickstart                          run one stage of an existing run
    python -m pipeline train configs/quickstart.yaml train.steps=50   create the run first, if it does not exist
    python -m pipeline evaluate RUN --step 100                        evaluate one checkpoint (a step, newest or every)

A rank computes, saves and exits with a code (pipeline/base/errors.py). A rank never requeues its job. If a rank fails,
it writes the traceback and the time to `jobs/STAGE/error-rank-N.json`. The supervisor reads these reports to find the
rank that failed first.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.base.command import format_command
from pipeline.base.dist_env import RankInfo, read_rank_info
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import raise_open_file_limit
from pipeline.base.signals import StopFlag
from pipeline.config.read import load_config
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.events import Done, EndEvent, Failed, Started, Stopped
from pipeline.run.failure import abort_peers, explain_error, write_error_report

CREATE_TIMEOUT_S = 120
"""How many seconds the other ranks wait for rank 0 to create the run."""


def main(arguments: list[str], flag: StopFlag | None = None) -> int:
    """Run one stage as one rank, and return the exit code.

    Args:
        arguments: the command line.
        flag: the installed flag of this process's signals; None to install one.
    """
    flag = flag or StopFlag().install()
    gc.disable()  # The garbage collector would scan the growing heap repeatedly, a fifth of the time of all imports.
    faulthandler.enable()
    raise_open_file_limit()
    start_time = time.monotonic()
    rank_info: RankInfo | None = None
    run: Run | None = None
    is_supervised = "SLUICE_SUPERVISED" in os.environ
    writes_events = False
    try:
        options = parse_arguments(arguments)
        rank_info = read_rank_info(os.environ)
        opened_run = open_run(options.target, options.overrides, rank_info)
        opened_run.config.get_stage(options.stage)  # If there is no such stage, no report can be written for it.
        if not is_supervised:  # A supervisor has already made these checks.
            opened_run.check_owner()
            opened_run.check_not_cancelled()
        run = opened_run  # From here on, errors are reported in the run directory.
        if not is_supervised and rank_info.rank == 0:
            if run.lock_stage(options.stage) is None:
                raise UserError(
                    "run.stage_running",
                    f"{options.stage} of {run.name} is already running ({run.lock_holder(options.stage)})",
                )
            run.append_event(
                Started(
                    stage=options.stage,
                    job_id=_get_job_id(rank_info),
                    attempt=run.count_attempts(options.stage) + 1,
                    ranks=rank_info.world_size,
                    host=os.uname().nodename,
                    pid=os.getpid(),
                    slurm_job=rank_info.job_id,
                    restarts=rank_info.restart_count,
                )
            )
        writes_events = not is_supervised
        stage_options = {"step": options.step} if options.step else {}
        code = stages.load_stage_module(run, options.stage).run_stage(run, rank_info, stage_options, flag)
        if writes_events and rank_info.rank == 0:
            event_class = Done if code == ExitCode.DONE else Stopped
            _write_end_event(run, options.stage, rank_info, event_class, code, start_time)
        return code
    except BaseException as error:
        if run is None and isinstance(error, SystemExit):  # argparse has printed the usage.
            return int(error.code or 0)
        code, message = explain_error(error)
        if run is not None and rank_info is not None:
            write_error_report(run, options.stage, rank_info, code, message, getattr(error, "host", None))
            if writes_events:
                # A rank that failed itself writes the event. If it could not, rank 0 writes the event.
                events = run.read_events(options.stage)
                is_written = rank_info.rank > 0 or (bool(events) and isinstance(events[-1], Failed))
                if code != ExitCode.PEER_LOST or not is_written:
                    fields = {"rank": rank_info.rank, "host": os.uname().nodename, "message": message}
                    cause = code.name.lower()
                    _write_end_event(run, options.stage, rank_info, Failed, code, start_time, cause=cause, **fields)
        if is_supervised or rank_info is None or rank_info.world_size == 1:
            with suppress(OSError):  # The log may be on a full disk. The exit code still shows the cause.
                print(message, file=sys.stderr, flush=True)
        else:
            abort_peers(rank_info, code, message)
        return code


def _get_job_id(rank_info: RankInfo) -> str:
    """Return the ID of the job as it was submitted; the ID of this process if there is no job."""
    return rank_info.submitted_as or str(os.getpid())


def _write_end_event(
    run: Run,
    stage: str,
    rank_info: RankInfo,
    event_class: type[EndEvent],
    code: ExitCode,
    start_time: float,
    **extra_fields: Any,
) -> None:
    """Write the event that ends an attempt. Call this only without a supervisor, which would write the event itself.

    Args:
        run: the run.
        stage: the stage.
        rank_info: identifies the job and this rank.
        event_class: the class of the event.
        code: the exit code of this process.
        start_time: when this process started, by `time.monotonic`.
        **extra_fields: further fields of the event.
    """
    run.append_event(
        event_class(
            stage=stage,
            job_id=_get_job_id(rank_info),
            attempt=run.count_attempts(stage),
            slurm_job=rank_info.job_id,
            restarts=rank_info.restart_count,
            exit_code=int(code),
            seconds=round(time.monotonic() - start_time, 3),
            **extra_fields,
        )
    )


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line. If it is invalid, print the usage and exit with ExitCode.USER_ERROR."""
    parser = argparse.ArgumentParser(
        "python -m pipeline",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", help="the stage to run")
    parser.add_argument("target", metavar="RUN|CONFIG", help="a run directory, or a YAML file with a config")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="change keys of CONFIG: train.steps=50")
    parser.add_argument("--step", metavar="N", help="the checkpoint to evaluate: its step, newest or every")
    return parser.parse_intermixed_args(arguments)


def open_run(target: str, overrides: list[str], rank_info: RankInfo) -> Run:
    """Return the run that the command line names. If it names a config, rank 0 creates the run.

    Args:
        target: a run directory, or a YAML file with a config.
        overrides: changes of the config, such as `train.steps=50`.
        rank_info: this rank.

    Raises:
        UserError: if `target` is a run directory and there are `overrides`, if the config is invalid, or if rank 0 did
            not create the run in time.
    """
    path = Path(target)
    if path.is_dir():
        if overrides:
            raise UserError(
                "run.frozen_config",
                f"{overrides[0]}: the config of a run is frozen; to change it: {format_command('resume', target)} …",
            )
        return Run.open(path)
    config = load_config(path, overrides)
    folder = config.run.root / config.run.name
    if rank_info.rank == 0:
        return Run.create(config)
    deadline = time.monotonic() + CREATE_TIMEOUT_S
    while not (folder / "config.yaml").exists():
        if time.monotonic() > deadline:
            raise UserError("run.not_created", f"rank 0 did not create {folder} within {CREATE_TIMEOUT_S} s")
        time.sleep(0.05)
    return Run.open(folder)


if __name__ == "__main__":
    exit_code = int(main(sys.argv[1:]))
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.flush()
    # Exit without joining threads, because threads of a failed process group or save may wait for lost ranks forever.
    os._exit(exit_code)
