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
from contextlib import suppress

from pipeline.base.errors import Exit, UserError, storage_error
from pipeline.base.files import write_json
from pipeline.base.place import Place, step_id
from pipeline.run.changes import trained
from pipeline.run.directory import Run
from pipeline.run.stages import task_of

PEERS_LEAVE_S = 5
"""How long ranks that were started by hand may take to leave after one of them failed."""

_NO_MEMORY = re.compile(r"^\w*OutOfMemory|can't allocate memory")
BROKEN_GPU = re.compile(
    r"uncorrectable (ECC|NVLink) error|fallen off the bus|GPU is lost|hardware stack error|or a hardware error"
    r"|device\(s\) is/are busy or unavailable|system not yet initialized"
    r"|Xid \([^)]*\): (48|6[1-4]|74|79|92|94|95|119|120|140)\b"
)
"""What CUDA (cudaGetErrorString, of 13.0), its driver and the kernel's log say of a GPU that fails by itself: it is its
node's fault. Xids by NVIDIA's "XID Errors"; 13, 31, 43 and 45 are mostly the program's own mistakes."""
_PEER_LOST = re.compile(r"^Dist(Backend|Network)Error|\bgloo/|Connection closed by peer|MpiTimeout")
"""What torch's backends say, which through C++ have no types of their own: Gloo names a file of its sources."""


def explain(error: BaseException) -> tuple[Exit, str]:
    """Exit code and words for what went wrong: a message for a user's mistake, a traceback for a bug."""
    if isinstance(error, UserError):
        return error.code, f"error: {error}"
    if (storage := storage_error(error)) is not None:
        return storage.code, f"error: {storage}"
    said, text = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    if isinstance(error, MemoryError) or _NO_MEMORY.search(said):
        return Exit.OUT_OF_MEMORY, text
    if BROKEN_GPU.search(said):
        return Exit.BAD_NODE, text
    lost = _PEER_LOST.search(said) and "address already in use" not in said
    return Exit.PEER_LOST if lost else Exit.CRASHED, text


def report_error(run: Run, stage: str, place: Place, code: Exit, message: str, host: str | None = None) -> None:
    """Leave the error for the supervisor; where even that cannot be written, the log has to do."""
    if code == Exit.STOPPED:
        return
    task, host = task_of(stage, place), host or os.uname().nodename
    rank = place.rank if task is None else task  # in an array each is rank 0 of its own job
    entry = {"time": time.time(), "rank": rank, "code": int(code), "cause": code.name.lower(), "message": message}
    with suppress(OSError):
        write_json(run.stage_folder(stage) / f"error-rank-{rank}.json", {**entry, "host": host})


def leave_peers(place: Place, code: Exit, message: str) -> None:
    """Say what failed, where no supervisor sorts it: the culprit at once, ranks that only lost it later, in one line.

    torchrun and mpirun end the other ranks by themselves. srun does not by default, and with NCCL they may hang for
    half an hour: so their step is killed once they had time to leave.
    """
    if code == Exit.PEER_LOST:
        time.sleep(1)
        message = f"lost another rank ({message.splitlines()[-1]})"
    elif (step := step_id(os.environ)) is not None and place.launcher == "srun":
        wait_and_kill = ["sh", "-c", f'sleep {PEERS_LEAVE_S}; exec scancel --signal=KILL "$0"', step]
        null = subprocess.DEVNULL
        subprocess.Popen(wait_and_kill, stdin=null, stdout=null, stderr=null, start_new_session=True)
    print(f"rank {place.rank} on {os.uname().nodename}: {message}", file=sys.stderr, flush=True)


def retry_command(run: Run, cause: str | None) -> str:
    """What a person types after a stage failed of `cause`: maybe of a bug in their own module, mended by then."""
    bug = run.config.model.target is not None and cause in ("crashed", "user_error")
    return f"{run.resume_command}{' --update-code' if bug else ''}"


def once_mended(run: Run, cause: str | None) -> str:
    """The same with what it means, and what else there is, in lines."""
    retry, made = retry_command(run, cause), trained(run.whole.path)
    said = [f"once that is mended: {retry}"]
    if made is None:
        said.append("where the config is wrong: correct it and give the same command again")
    elif retry != run.resume_command:
        target = run.config.model.target
        said.append(f"--update-code takes {target} as it is then, and goes on from {made}, which the old one made")
    if made is not None and run.whole is not run:
        said.append("where the config is wrong: correct it and submit it under another run.name")
    return "\n".join(said)
