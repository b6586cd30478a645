"""What a failing rank leaves behind: an exit code, words, and `jobs/STAGE/error-rank-N.json` for the supervisor.

And the command that a person is told then.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress

from pipeline.base.dist_env import RankInfo, read_step_id
from pipeline.base.errors import ExitCode, UserError, find_storage_error, format_error
from pipeline.base.files import write_json
from pipeline.config.read import PLACEHOLDER
from pipeline.config.schema import list_keys, list_section_keys
from pipeline.run.changes import find_dependent_output, find_training_output
from pipeline.run.directory import Run
from pipeline.run.stages import get_array_task

PEERS_LEAVE_S = 5
"""How long ranks that were started by hand may take to leave after one of them failed."""

_NO_MEMORY = re.compile(r"^\w*OutOfMemory|can't allocate memory")
GPU_FAILURE_PATTERN = re.compile(
    r"uncorrectable (ECC|NVLink) error|fallen off the bus|GPU is lost|hardware stack error|or a hardware error"
    r"|device\(s\) is/are busy or unavailable|system not yet initialized"
    r"|Xid \([^)]*\): (48|6[1-4]|74|79|92|94|95|119|120|140)\b"
)
"""What CUDA (cudaGetErrorString, of 13.0), its driver and the kernel's log say of a GPU that fails by itself: it is its
node's fault. Xids by NVIDIA's "XID Errors"; 13, 31, 43 and 45 are mostly the program's own mistakes."""
_PEER_LOST = re.compile(r"^Dist(Backend|Network)Error|\bgloo/|Connection closed by peer|MpiTimeout")
"""What torch's backends say, which through C++ have no types of their own: Gloo names a file of its sources."""


def explain_error(error: BaseException) -> tuple[ExitCode, str]:
    """Exit code and words for what went wrong: a message for a user's mistake, a traceback for a bug."""
    if isinstance(error, UserError):
        return error.exit_code, format_error(error)
    if (storage := find_storage_error(error)) is not None:
        return storage.exit_code, format_error(storage)
    said, text = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    if isinstance(error, MemoryError) or _NO_MEMORY.search(said):
        return ExitCode.OUT_OF_MEMORY, text
    if GPU_FAILURE_PATTERN.search(said):
        return ExitCode.BAD_NODE, text
    lost = _PEER_LOST.search(said) and "address already in use" not in said
    return ExitCode.PEER_LOST if lost else ExitCode.CRASHED, text


def write_error_report(
    run: Run, stage: str, rank_info: RankInfo, code: ExitCode, message: str, host: str | None = None
) -> None:
    """Leave the error for the supervisor; where even that cannot be written, the log has to do."""
    if code == ExitCode.STOPPED:
        return
    task, host = get_array_task(stage, rank_info), host or os.uname().nodename
    rank = rank_info.rank if task is None else task  # in an array each is rank 0 of its own job
    entry = {"time": time.time(), "rank": rank, "code": int(code), "cause": code.name.lower(), "message": message}
    with suppress(OSError):
        write_json(run.stage_dir(stage) / f"error-rank-{rank}.json", {**entry, "host": host})


def abort_peers(rank_info: RankInfo, code: ExitCode, message: str) -> None:
    """Say what failed, where no supervisor sorts it: the culprit at once, ranks that only lost it later, in one line.

    torchrun and mpirun end the other ranks by themselves. srun does not by default, and with NCCL they may hang for
    half an hour: so their step is killed once they had time to leave.
    """
    if code == ExitCode.PEER_LOST:
        time.sleep(1)
        message = f"lost another rank ({message.splitlines()[-1]})"
    elif (step := read_step_id(os.environ)) is not None and rank_info.launcher == "srun":
        wait_and_kill = ["sh", "-c", f'sleep {PEERS_LEAVE_S}; exec scancel --signal=KILL "$0"', step]
        null = subprocess.DEVNULL
        subprocess.Popen(wait_and_kill, stdin=null, stdout=null, stderr=null, start_new_session=True)
    print(f"rank {rank_info.rank} on {os.uname().nodename}: {message}", file=sys.stderr, flush=True)


def retry_command(run: Run, cause: str | None, message: str = "") -> str:
    """Return the command that continues a run after a stage failed.

    It has `--update-code` if the fault may be in the user's own module, and `key=…` for each key of the config that
    the message tells to change and that `resume` takes now.

    Args:
        run: The run, or a point of a sweep.
        cause: The cause in the event of the failure; None if there is none.
        message: The message in that event.
    """
    changes = _changes(run, cause, message)
    update = ["--update-code"] if _may_be_the_modules_fault(run, cause, message, changes) else []
    return " ".join([run.resume_command, *update, *changes])


def describe_remedy(run: Run, cause: str | None, message: str = "") -> str:
    """Return what the user has to do after a failure and the command that continues then, in lines.

    Args: as for `retry_command`.
    """
    retry, made = retry_command(run, cause, message), find_training_output(run.sweep_or_self.path)
    changes = _changes(run, cause, message)
    again = "correct it and give the same command again"
    if made is not None:
        again = "correct it and submit it under another run.name"
    if cause == "storage":
        return f"{_what_storage_needs(run, message)}, then: {retry}"
    if cause == "bad_checkpoint":
        return f"bring an intact checkpoint back into {run.checkpoints_dir}, then: {retry}"
    if _may_be_the_modules_fault(run, cause, message, changes):
        lines = [f"{_what_the_module_needs(run, message)}, then: {retry}"]
        goes_on = f" and continues from {made}, which the old code made" if made else ""
        lines.append(f"the run trains its own copy of the code ({run.code_dir}); --update-code replaces it{goes_on}")
        if made is None or run.sweep_or_self is not run:
            lines.append(f"if the config is wrong instead: {again}")
        return "\n".join(lines)
    if run.config.data.filter and re.search(r"(?:^|error: )data\.filter: ", message, re.MULTILINE):
        return f"correct the function {run.config.data.filter} (data.filter), whose corrected file is used by: {retry}"
    if changes:
        key = ", ".join(change.partition("=")[0] for change in changes)
        lines = [f"to continue with another {key}: {retry}"]
        return "\n".join([*lines, f"or, if the config is wrong: {again}"] if made is None else lines)
    if cause == "user_error":
        return f"once that is repaired: {retry}\nif the config is wrong: {again}"
    if cause == "bad_input":
        return f"once the files are put back or repaired: {retry}"
    copied = run.config.model.target or ("Sluice's own code" if cause == "crashed" else None)
    hint = f"\nif you corrected {copied}, add --update-code: the run has a copy of the code" if copied else ""
    return f"to try again: {retry}{hint}"


_KEY = r"(?<![\w./-])(?P<key>[a-z][a-z_]*(?:\.\w+)+)(?![\w/]|\.\w)"
_VERBS = "set|give|use|take|choose|change|correct|add|raise|increase|enlarge|lower|decrease|reduce|shorten|allow|name"
_ARTICLES = "an? |the |another |other |more |fewer |larger |smaller |higher |longer |shorter "
_ADVISED = re.compile(rf"\b(?:{_VERBS}) (?:{_ARTICLES})*{_KEY}(?:(?:=|: )(?P<value>[\w./+-]*\w))?", re.IGNORECASE)
"""A key that a message says to change, maybe with the value to give it."""
_ONLY_CHOICE = re.compile(r"; there (?:is|are) '([\w.-]+)'(?!,)")
"""The only value that there is, in a message about a wrong one."""
_NOT_TO_CHANGE = ("run.", "model.target", "data.filter")
"""Keys that a message may name although another value is no help: a file has to be corrected, or a new run made."""


def _changes(run: Run, cause: str | None, message: str) -> list[str]:
    """The `key=value` that the message asks for, `…` in place of a value that it does not say."""
    if cause is None:
        return []
    values = {found["key"]: found["value"] for found in _ADVISED.finditer(message) if _is_key(found["key"])}
    if not values and cause in ("user_error", "time_limit"):
        named = (found["key"] for found in re.finditer(_KEY, message))
        values = {key: None for key in named if _is_key(key) and not key.startswith("recovery.")}
    if len(values) == 1 and (choice := _ONLY_CHOICE.findall(message)):
        values = {key: value or (choice[0] if len(choice) == 1 else None) for key, value in values.items()}
    free = [key for key in values if find_dependent_output(run.sweep_or_self.path, key) is None]
    return [f"{key}={values[key] or PLACEHOLDER}" for key in free]


def _is_key(key: str) -> bool:
    """Whether it is a key of the config that a message may ask to change; a section is none."""
    if key.startswith("model.options."):
        return True
    return not key.startswith(_NOT_TO_CHANGE) and key in list_keys(()) and not list_section_keys(tuple(key.split(".")))


def _may_be_the_modules_fault(run: Run, cause: str | None, message: str, changes: Sequence[str]) -> bool:
    """Whether a failure may come from the user's own module: an exception, or an error that names no key to change."""
    if run.config.model.target is None:
        return False
    return (cause == "crashed" and 'File "' in message) or (cause == "user_error" and not changes)


def _what_the_module_needs(run: Run, message: str) -> str:
    """What the user has to correct in the own module: the file and line of a traceback, if it has any of the module."""
    target = str(run.config.model.target)
    own = re.escape(f"{run.code_dir}/{target.partition('.')[0]}")
    frames = re.findall(rf'File "({own}\b[^"]*)", line (\d+)', message)
    if not frames:
        return f"if the fault is in the module {target}, correct it"
    file, line = frames[-1]
    return f"correct {os.path.relpath(file, run.code_dir)}, line {line}"


def _what_storage_needs(run: Run, message: str) -> str:
    """What the user has to do with the file system that a message is about."""
    found = re.search("cannot (?:use|write) (.+?): (?:no space is left|the disk quota)", message)
    if found is None:
        return "once the file system takes files again"
    where = run.path / found[1]  # an absolute path stands for itself
    folder = where if where.is_dir() else where.parent  # it may be on the disk of another machine
    while run.path in folder.parents and not folder.is_dir():
        folder = folder.parent
    return f"free space in {folder}"
