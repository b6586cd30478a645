"""The rank's door: `python -m pipeline STAGE RUN`, under srun, mpirun, torchrun, our launcher or alone.

    python -m pipeline train runs/quickstart            one stage of an existing run
    python -m pipeline train configs/quickstart.yaml train.steps=50     makes or finds the run first
    python -m pipeline evaluate RUN --step 100          a named checkpoint (or newest, every)
    python -m pipeline verify RUN [--step N]            hash a checkpoint's files, print its digest
    python -m pipeline export RUN DIR [--step N] [--dtype bf16]   a checkpoint's weights as safetensors
    python -m pipeline generate RUN|FOLDER --prompt=TEXT [--max-tokens N] [--temperature T]   what it goes on with
    python -m pipeline plan RUN|CONFIG [key=value …]   mesh, memory, pipeline and communication of its layout
    python -m pipeline plan CONFIG --machine h100 [--best [--nodes 2..64] [--write]]   and its speed; the best layouts
                                                        (--rehearse RANK: that rank, built and stepped without values)
    python -m pipeline data import|inspect|verify PATH… [--to DIR] [--tokenizer FILE]   files of tokens

A rank computes, saves and leaves with a code (pipeline/base/errors.py); it never requeues. Where it fails, it leaves
`jobs/STAGE/error-rank-N.json` for the supervisor, with the traceback and the time, so that the first failure can
be told from those that followed it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.base.command import command
from pipeline.base.errors import Exit, UserError, printable
from pipeline.base.place import Place, identify
from pipeline.base.signals import StopFlag
from pipeline.config.read import COMMAND_LINE, ConfigError, config_from_mapping, load_config, overridden
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.failure import explain, leave_peers, report_error

LOOKS = ("verify", "export", "generate", "plan", "data")
"""What is no stage, and leaves the run as it is."""


def main(arguments: list[str]) -> int:
    """Run one stage; returns the exit code."""
    flag = StopFlag().install()
    gc.disable()  # the collector, walking a growing heap again and again, is a fifth of the time that imports take
    faulthandler.enable()
    asked = parse(arguments)
    place, run, noting, watched = None, None, False, "SLUICE_SUPERVISED" in os.environ
    began = time.monotonic()
    try:
        if asked.stage in LOOKS:
            flag.leave_at_once()
            look(asked)
            return Exit.DONE
        place = identify(os.environ)
        found = find_run(asked.target, asked.overrides, place)
        if not watched:  # the supervisor asked already
            found.refuse_foreign()
        run = found
        if not watched and place.rank == 0:
            if run.lock(asked.stage) is None:
                raise UserError(f"{asked.stage} of {run.name} is already running ({run.holder(asked.stage)})")
            note(run, asked.stage, place, "started", ranks=place.world_size, host=os.uname().nodename, pid=os.getpid())
        noting = not watched
        code = stages.load(asked.stage).main(run, place, {"step": asked.step} if asked.step else {}, flag)
        if noting and place.rank == 0:
            note_end(run, asked.stage, place, "done" if code == Exit.DONE else "stopped", code, began)
        return code
    except BaseException as error:
        code, message = explain(error)
        if run is not None and place is not None:
            report_error(run, asked.stage, place, code, message, getattr(error, "host", None))
            if noting:
                # the culprit writes; rank 0 where the culprit could not
                written = place.rank > 0 or [e["event"] for e in run.read_events(asked.stage)][-1:] == ["failed"]
                if code != Exit.PEER_LOST or not written:
                    where = {"rank": place.rank, "host": os.uname().nodename, "message": message}
                    note_end(run, asked.stage, place, "failed", code, began, cause=code.name.lower(), **where)
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


def note_end(run: Run, stage: str, place: Place, event: str, code: Exit, began: float, **facts: Any) -> None:
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
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of exported weights")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="what generate goes on with")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=100, help="how far at most")
    parser.add_argument("--temperature", metavar="T", type=float, default=1.0, help="0: the likeliest token each time")
    parser.add_argument("--top-p", metavar="P", type=float, default=1.0, help="only the likeliest of this probability")
    parser.add_argument("--rehearse", metavar="RANK", type=int, help="plan: build and step this rank, without values")
    parser.add_argument("--seed", metavar="S", type=int, default=1, help="of what is drawn")
    parser.add_argument("--machine", metavar="NAME|FILE", help="plan: what to predict for")
    parser.add_argument("--best", action="store_true", help="plan: the fastest layouts that fit")
    parser.add_argument("--nodes", metavar="N|N..M", help="plan --best: on so many nodes")
    parser.add_argument("--write", action="store_true", help="plan --best: the first, as a config beside CONFIG")
    parser.add_argument("--to", metavar="DIR", help="where data import writes")
    parser.add_argument("--tokenizer", metavar="FILE", help="the tokenizer.json that made the tokens")
    parser.add_argument("--eos-token", metavar="NAME", default="<|endoftext|>", help="its token between documents")
    parser.add_argument("--packed", action="store_true", help="rows of tokens are no documents, but go on in the next")
    return parser.parse_intermixed_args(arguments)


def look(asked: argparse.Namespace) -> None:
    """Print what one of `LOOKS` says. A reader that closes the pipe early, as `head` does, ends it."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if asked.stage == "verify":
        from pipeline.checkpoint.verify import verify

        verify(Run.open(asked.target), asked.step)
    elif asked.stage == "export":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for large pages: a third less time
        from pipeline.publish.export import export

        if len(asked.overrides) != 1:
            raise UserError("export RUN DIR: name one folder to write to")
        print(export(Run.open(asked.target), Path(asked.overrides[0]), asked.step, asked.dtype))
    elif asked.stage == "generate":
        from pipeline.publish.generate import generate

        how = {"most": asked.max_tokens, "temperature": asked.temperature, "top_p": asked.top_p, "seed": asked.seed}
        print(printable(generate(Path(asked.target), asked.prompt, step=asked.step, **how)))
    elif asked.stage == "data":
        commands = importlib.import_module("data_prep.tokens.tokens_commands")  # it builds on this package
        commands.main(asked.target, asked.overrides, asked.to, asked.tokenizer, asked.eos_token, asked.packed)
    else:
        path = Path(asked.target)
        if path.is_dir():
            values = Run.open(path).config.model_dump(mode="json")
            config = config_from_mapping(overridden(values, asked.overrides), COMMAND_LINE)
        else:
            try:
                config = load_config(path, asked.overrides)
            except ConfigError as wrong:  # another layout may fit
                from pipeline.planning.search import ANY_LAYOUT

                try:
                    config = load_config(path, [*asked.overrides, *(ANY_LAYOUT if asked.best else ())])
                except ConfigError:
                    raise wrong from None
        from pipeline.planning.machine import load_machine

        name, memory = asked.machine or config.site.machine, config.site.gpu_memory_gib
        machine = load_machine(name) if name else None
        if machine is not None and (asked.machine or memory is None):  # what if it were this one
            memory = machine.memory_gib
        config = config.model_copy(update={"site": config.site.model_copy(update={"gpu_memory_gib": memory})})
        if asked.rehearse is not None:
            from pipeline.planning.rehearse import rehearse

            lines = rehearse(config, asked.rehearse)
        else:
            from pipeline.planning.plan import choose, plan

            lines = plan(config, machine)
            if asked.best:
                if machine is None or (asked.write and path.is_dir()):
                    raise UserError(
                        "--best needs --machine NAME or site.machine, and --write a CONFIG, for runs are frozen"
                    )
                lines = choose(config, machine, asked.nodes, path if asked.write else None, asked.overrides)
        for line in lines:
            print(line)


def find_run(target: str, overrides: list[str], place: Place) -> Run:
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
