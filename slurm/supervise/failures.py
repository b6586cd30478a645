"""What ended an attempt: told from how ranks left, and from what they wrote about a failure or a hang.

A rank that a signal or a lack of memory killed writes no report; its peers report a lost connection (or abort over it):
they are blamed last. Among reports the earliest counts. Of ranks that hang, all of which say where they are, the one
that is furthest behind is to blame, and one without a sign of life before that.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.base.errors import ExitCode
from pipeline.run.directory import Run
from pipeline.run.failure import GPU_FAILURE_PATTERN
from slurm.supervise.launch import RankExit


@dataclass
class AttemptEnd:
    """How an attempt ended: a code, who asked for a stop, and more facts for its event."""

    code: ExitCode
    stop_reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def list_reports(run: Run, stage: str, kind: str, task: int | None = None) -> list[Path]:
    """What ranks left of a kind: `error`, `hang` or `*`. A task of an array has its own, and others beside it."""
    return list(run.stage_dir(stage).glob(f"{kind}-rank-{'*' if task is None else task}.json"))


def _read(run: Run, stage: str, kind: str, task: int | None = None) -> list[dict[str, Any]]:
    found = []
    for path in list_reports(run, stage, kind, task):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_bytes()))
    return found


def get_rank_log(run: Run, stage: str, rank: int) -> Path:
    """What a rank printed, in all attempts; `rank`: its number, or that of its task of an array."""
    return run.stage_dir(stage) / f"rank-{rank}.log"


def measure_log_sizes(run: Run, stage: str) -> dict[Path, int]:
    """Where an attempt begins in the ranks' logs."""
    return {path: path.stat().st_size for path in run.stage_dir(stage).glob("rank-*.log")}


def _broken_gpu(log: Path, begins: int) -> str | None:
    """The first line from `begins` on that speaks of a GPU that fails: NCCL's own thread aborts without a report."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(begins)
        for line in file:
            if GPU_FAILURE_PATTERN.search(words := line.decode(errors="replace")):
                return words.strip()
    return None


def keep_user_frames(run: Run, message: str) -> str:
    """A message whose traceback has the frames of the user's own module alone, where it has any; logs have them all."""
    own = f"{run.code_dir}/{str(run.config.model.target).partition('.')[0]}"
    others = rf'^  File "(?!{re.escape(own)}\b).*\n(?: {{4}}.*\n)*'
    cut = re.sub(others, "", message, flags=re.M)
    return cut if '  File "' in cut else message


def find_failure(
    run: Run, stage: str, first: list[RankExit], task: int | None = None, begins: Mapping[Path, int] | None = None
) -> AttemptEnd:
    """What failed first, among the ranks that were `first` seen to leave badly (in one look, so maybe several).

    `begins`: what `log_sizes` said before they started.
    """
    errors = _read(run, stage, "error", task)
    told = {report["rank"] for report in errors}
    killed = [
        left for left in first if left.code < 0 or (left.code == ExitCode.OUT_OF_MEMORY and left.rank not in told)
    ]
    culprits = [left for left in killed if left.code != -signal.SIGABRT]
    for left in (left for left in first if left.code == -signal.SIGABRT and left.rank not in told):
        log = get_rank_log(run, stage, left.rank if task is None else task)
        if words := _broken_gpu(log, (begins or {}).get(log, 0)):
            host = left.host or os.uname().nodename
            facts = {"rank": left.rank, "host": host, "message": f"rank {left.rank} on {host}:\n{words}"}
            return AttemptEnd(ExitCode.BAD_NODE, facts=facts)
    blamed = [report for report in errors if report["code"] != ExitCode.PEER_LOST]
    if blamed and not culprits:
        report = min(blamed, key=lambda report: float(report["time"]))
        code, rank, host = ExitCode(report["code"]), report["rank"], report["host"]
        message = f"rank {rank} on {host}:\n{keep_user_frames(run, report['message'])}"
    else:
        left = (culprits or killed or first)[0]
        code = (
            ExitCode(left.code) if left.code in set(ExitCode) else ExitCode.CRASHED
        )  # it could not even write its report
        rank, host = left.rank, left.host or os.uname().nodename
        log = get_rank_log(run, stage, rank if task is None else task)
        hints = {-signal.SIGKILL: " (out of memory, or somebody's kill)", ExitCode.OUT_OF_MEMORY: " (out of memory)"}
        message = left.description or f"rank {rank} on {host} {left}{hints.get(left.code, '')}; its log: {log}"
    if code in (ExitCode.CRASHED, ExitCode.PEER_LOST) and (reason := run.describe_write_error()) is not None:
        code, message = ExitCode.STORAGE, f"{reason}\n{message}"  # ranks cannot report a full disk in files on it
    return AttemptEnd(code, facts={"rank": rank, "host": host, "message": message})


def find_hung_rank(run: Run, stage: str, hosts: Sequence[str]) -> dict[str, Any] | None:
    """Rank, host and message of the rank that did not arrive; None where none wrote about a hang."""
    hangs = _read(run, stage, "hang")
    if not hangs:
        return None
    return describe_hung_rank(hangs, hosts, {report["rank"] for report in _read(run, stage, "error")})


def describe_hung_rank(
    hangs: Iterable[Mapping[str, Any]], hosts: Sequence[str], heard: Container[int]
) -> dict[str, Any]:
    """Who did not arrive: rank, host and a message. `hosts`: one for each rank; `heard`: who left other words."""
    order = sorted(hangs, key=lambda hang: (hang["step"], hang["number"], hang["rank"]))
    last, front, stuck = order[0], order[-1], {hang["rank"] for hang in order}
    others = f"the others were in phase '{front['phase']}' of step {front['step']}"
    silent = [rank for rank in range(len(hosts)) if rank not in stuck and rank not in heard]
    if silent:
        names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in silent)
        message = f"{names} gave no sign of life; {others}"
        return {"rank": silent[0], "host": hosts[silent[0]], "message": message}
    where = f"rank {last['rank']} on {last['host']}"
    if (last["step"], last["number"]) == (front["step"], front["number"]):
        message = f"all ranks were stuck in phase '{last['phase']}' of step {last['step']}; {where}"
    else:
        message = f"{where} did not arrive: it was in phase '{last['phase']}' of step {last['step']}; {others}"
    if collectives := last["collectives"]:
        message += f"; its last collective was {collectives[-1]['operation']} number {collectives[-1]['number']}"
    return {"rank": last["rank"], "host": last["host"], "message": f"{message}\n{last['stacks']}"}
