"""Report the failure of a rank, and tell the user what to do about it.

A failing rank exits with a code and writes this code and a message to `jobs/STAGE/error-rank-N.json`. The supervisor
reads this file.
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

PEER_EXIT_S = 5
"""How many seconds the other ranks may take to exit after a rank without a supervisor failed."""

_NO_MEMORY = re.compile(r"^\w*OutOfMemory|can't allocate memory")
GPU_FAILURE_PATTERN = re.compile(
    r"uncorrectable (ECC|NVLink) error|fallen off the bus|GPU is lost|hardware stack error|or a hardware error"
    r"|device\(s\) is/are busy or unavailable|system not yet initialized"
    r"|Xid \([^)]*\): (48|6[1-4]|74|79|92|94|95|119|120|140)\b"
)
"""Messages of CUDA (cudaGetErrorString of 13.0), of its driver and of the kernel's log about a defective GPU. After
such a message, the node counts as bad. An Xid is an error number of the driver; the numbers are from NVIDIA's "XID
Errors". The Xids 13, 31, 43 and 45 are left out, because they mostly result from errors of the program."""
_PEER_LOST = re.compile(r"^Dist(Backend|Network)Error|\bgloo/|Connection closed by peer|MpiTimeout")
"""Messages of torch's communication backends if another rank was lost. C++ errors of the backends have no Python types,
so the text is matched. Messages of Gloo contain the path of a source file in the folder `gloo/`."""


def explain_error(error: BaseException) -> tuple[ExitCode, str]:
    """Return the exit code and the message of an error.

    The message is a traceback, except for a UserError and for a storage error, such as a full disk.
    """
    if isinstance(error, UserError):
        return error.exit_code, format_error(error)
    if (storage := find_storage_error(error)) is not None:
        return storage.exit_code, format_error(storage)
    summary = f"{type(error).__name__}: {error}"
    full_traceback = "".join(traceback.format_exception(error))
    if isinstance(error, MemoryError) or _NO_MEMORY.search(summary):
        return ExitCode.OUT_OF_MEMORY, full_traceback
    if GPU_FAILURE_PATTERN.search(summary):
        return ExitCode.BAD_NODE, full_traceback
    # if a port is in use, torch also raises DistNetworkError, but no other rank was lost
    is_peer_lost = _PEER_LOST.search(summary) and "address already in use" not in summary
    return ExitCode.PEER_LOST if is_peer_lost else ExitCode.CRASHED, full_traceback


def write_error_report(
    run: Run, stage: str, rank_info: RankInfo, code: ExitCode, message: str, host: str | None = None
) -> None:
    """Write `error-rank-N.json` for the supervisor. If the file cannot be written, the failure is ignored.

    Args:
        run: the run.
        stage: the stage.
        rank_info: the rank that failed.
        code: the exit code of the rank. For STOPPED nothing is written.
        message: the message of the error.
        host: the host of the rank; None for this host.
    """
    if code == ExitCode.STOPPED:
        return
    task = get_array_task(run, stage, rank_info)
    host = host or os.uname().nodename
    rank = rank_info.rank if task is None else task  # each task of an array is rank 0 of its job
    report = {"time": time.time(), "rank": rank, "code": int(code), "cause": code.name.lower(), "message": message}
    with suppress(OSError):
        write_json(run.stage_dir(stage) / f"error-rank-{rank}.json", {**report, "host": host})


def abort_peers(rank_info: RankInfo, code: ExitCode, message: str) -> None:
    """Print the error of a rank that runs without a supervisor, and make sure that the other ranks end.

    A rank that only lost another rank waits a second, so that the cause is printed first. Then this rank prints one
    line.

    torchrun and mpirun end the other ranks by themselves. By default, srun does not end them, and with NCCL the ranks
    may hang for half an hour. Under srun, a rank that failed itself therefore kills the job step after `PEER_EXIT_S`.
    """
    if code == ExitCode.PEER_LOST:
        time.sleep(1)
        message = f"lost another rank ({message.splitlines()[-1]})"
    elif (step := read_step_id(os.environ)) is not None and rank_info.launcher == "srun":
        # the shell receives the step ID as "$0"
        wait_and_kill = ["sh", "-c", f'sleep {PEER_EXIT_S}; exec scancel --signal=KILL "$0"', step]
        null = subprocess.DEVNULL
        subprocess.Popen(wait_and_kill, stdin=null, stdout=null, stderr=null, start_new_session=True)
    print(f"rank {rank_info.rank} on {os.uname().nodename}: {message}", file=sys.stderr, flush=True)


def retry_command(run: Run, cause: str | None, message: str = "") -> str:
    """Return the command that continues a run after a stage failed.

    The command has `--update-code` if the error may be in the user's module. The command has `key=value` for each
    config key that the message advises to change and that `resume` can change now.

    Args:
        run: the run, or a point of a sweep.
        cause: the cause in the `failed` event; None if there is no event.
        message: the message in the `failed` event.
    """
    changes = _find_advised_changes(run, cause, message)
    may_be_code_error = _may_be_module_error(run, cause, message, changes) or _may_be_command_error(run, cause)
    options = ["--update-code"] if may_be_code_error else []
    return " ".join([run.resume_command, *options, *changes])


def describe_remedy(run: Run, cause: str | None, message: str = "") -> str:
    """Return a text that says what to do after a failure, and which command then continues the run.

    The arguments are the same as for :func:`retry_command`.
    """
    retry = retry_command(run, cause, message)
    training_output = find_training_output(run.sweep_or_self.path)
    changes = _find_advised_changes(run, cause, message)
    config_remedy = "correct it and give the same command again"
    if training_output is not None:
        config_remedy = "correct it and submit it under another run.name"
    if cause == "storage":
        return f"{_describe_storage_remedy(run, message)}, then: {retry}"
    if cause == "bad_checkpoint":
        return f"bring an intact checkpoint back into {run.checkpoints_dir}, then: {retry}"
    if _may_be_module_error(run, cause, message, changes):
        lines = [f"{_describe_module_remedy(run, message)}, then: {retry}"]
        continuation = f" and continues from {training_output}, which the old code made" if training_output else ""
        lines.append(f"the run executes a copy of the code ({run.code_dir}); --update-code replaces it{continuation}")
        # a run with training output has a config that works, but a point of a sweep may have output of another point
        if training_output is None or run.sweep_or_self is not run:
            lines.append(f"if the config is wrong instead: {config_remedy}")
        return "\n".join(lines)
    if _may_be_command_error(run, cause):
        return f"to try again: {retry}\n--update-code copies the files of the command again, if you have corrected them"
    if run.config.data.filter and _FILTER_ERROR.search(message):
        return f"correct the function {run.config.data.filter} (data.filter), then: {retry}"
    if changes:
        keys = ", ".join(change.partition("=")[0] for change in changes)
        lines = [f"to continue with another {keys}: {retry}"]
        if training_output is None:
            lines.append(f"or, if the config is wrong: {config_remedy}")
        return "\n".join(lines)
    if cause == "user_error":
        return f"after you have corrected the error: {retry}\nif the config is wrong: {config_remedy}"
    if cause == "bad_input":
        return f"after you have restored or repaired the files: {retry}"
    code = ", ".join(run.config.user_targets) or ("Sluice's own code" if cause == "crashed" else None)
    hint = f"\nif you corrected {code}, add --update-code: the run has a copy of the code" if code else ""
    return f"to try again: {retry}{hint}"


# Error messages advise changes of the config in plain text, such as "set train.micro_batch=2". The patterns below find
# these keys and values.
_KEY = r"(?<![\w./-])(?P<key>[a-z][a-z_]*(?:\.\w+)+)(?![\w/]|\.\w)"
_VERBS = "set|give|use|take|choose|change|correct|add|raise|increase|enlarge|lower|decrease|reduce|shorten|allow|name"
_ARTICLES = "an? |the |another |other |more |fewer |larger |smaller |higher |longer |shorter "
_ADVISED = re.compile(rf"\b(?:{_VERBS}) (?:{_ARTICLES})*{_KEY}(?:(?:=|: )(?P<value>[\w./+-]*\w))?", re.IGNORECASE)
"""A key that a message advises to change, possibly with the new value."""
_ONLY_CHOICE = re.compile(r"; there (?:is|are) '([\w.-]+)'(?!,)")
"""The only valid value, in a message that lists the valid values."""
_FILTER_ERROR = re.compile(r"(?:^|error(?:\[[\w.]+\])?: )data\.filter: ", re.MULTILINE)
"""The beginning of an error message about the function of `data.filter`. Older versions wrote no error code."""
_NEVER_CHANGED = ("run.", "model.target", "train.callbacks", "data.filter")
"""Keys for which another value does not help: the user must correct a file, or start a new run."""


def _find_advised_changes(run: Run, cause: str | None, message: str) -> list[str]:
    """Return the changes `key=value` that a message advises. If the message names no value, the value is `…`.

    If the message advises to change one key and lists a single valid value, this value is used.

    If a message about a user error or a time limit contains no advice, the keys in the message are returned, except
    keys of the section `recovery`. Keys on which existing output depends are left out, because `resume` cannot change
    them. Without a cause, the result is empty.
    """
    if cause is None:
        return []
    values = {match["key"]: match["value"] for match in _ADVISED.finditer(message) if _is_key(match["key"])}
    if not values and cause in ("user_error", "time_limit"):
        keys = (match["key"] for match in re.finditer(_KEY, message))
        values = {key: None for key in keys if _is_key(key) and not key.startswith("recovery.")}
    if len(values) == 1 and (choices := _ONLY_CHOICE.findall(message)):
        values = {key: value or (choices[0] if len(choices) == 1 else None) for key, value in values.items()}
    changeable = [key for key in values if find_dependent_output(run.sweep_or_self.path, key) is None]
    return [f"{key}={values[key] or PLACEHOLDER}" for key in changeable]


def _is_key(key: str) -> bool:
    """Return True if `key` is a config key, and another value of it may prevent the error. A section is not a key."""
    if key.startswith("model.options."):
        return True
    return not key.startswith(_NEVER_CHANGED) and key in list_keys(()) and not list_section_keys(tuple(key.split(".")))


def _may_be_module_error(run: Run, cause: str | None, message: str, changes: Sequence[str]) -> bool:
    """Return True if the error may be in the user's module.

    This is the case for a traceback, and for a user error if its message names no key that can be changed. Without a
    custom model, the result is False.
    """
    if not run.config.user_targets:
        return False
    return (cause == "crashed" and 'File "' in message) or (cause == "user_error" and not changes)


def _may_be_command_error(run: Run, cause: str | None) -> bool:
    """Return True if the error may be in the files of a command, of which the run has a copy."""
    return cause == "crashed" and not run.config.has_pipeline


def _describe_module_remedy(run: Run, message: str) -> str:
    """Return what to correct in the user's module: the file and line of its last frame in the message's traceback.

    If the message has no frame of the module, the result names only the module.
    """
    target = " or ".join(run.config.user_targets)
    packages = "|".join(re.escape(name.partition(".")[0]) for name in run.config.user_targets)
    frames = re.findall(rf'File "({re.escape(str(run.code_dir))}/(?:{packages})\b[^"]*)", line (\d+)', message)
    if not frames:
        return f"if the error is in the module {target}, correct it"
    file, line = frames[-1]
    return f"correct {os.path.relpath(file, run.code_dir)}, line {line}"


def _describe_storage_remedy(run: Run, message: str) -> str:
    """Return what to do about a storage error: free space in a folder if the file system is full, otherwise wait."""
    match = re.search("cannot (?:use|write) (.+?): (?:no space is left|the disk quota)", message)
    if match is None:
        return "once the file system accepts files again"
    path = run.path / match[1]  # an absolute path in the message stays as it is
    folder = path if path.is_dir() else path.parent
    # inside the run directory, name a folder that exists. Other paths may be on another machine, so they are kept.
    while run.path in folder.parents and not folder.is_dir():
        folder = folder.parent
    return f"free space in {folder}"
