"""What a failing rank leaves behind: an exit code, words, and `jobs/STAGE/error-rank-N.json` for the supervisor."""

from __future__ import annotations

import os
import time
import traceback

from pipeline.errors import Exit, UserError, storage_error
from pipeline.files import write_json
from pipeline.run import Run
from slurm.environment import Place


def explain(error: BaseException) -> tuple[Exit, str]:
    """Exit code and words for what went wrong: a message for a user's mistake, a traceback for a bug."""
    if isinstance(error, UserError):
        return error.code, f"error: {error}"
    if (storage := storage_error(error)) is not None:
        return storage.code, f"error: {storage}"
    text = "".join(traceback.format_exception(error))
    kind, words = type(error).__name__, str(error)
    if isinstance(error, MemoryError) or "OutOfMemory" in kind or "can't allocate memory" in words:
        return Exit.OUT_OF_MEMORY, text
    lost = kind in ("DistBackendError", "DistNetworkError") or "gloo" in words or "Connection closed by peer" in words
    lost |= "MpiTimeout" in f"{kind} {words}"  # through C++ only the words come
    if lost and "address already in use" not in words:
        return Exit.PEER_LOST, text
    return Exit.CRASHED, text


def report_error(
    run: Run | None, stage: str, place: Place | None, code: Exit, message: str, host: str | None = None
) -> None:
    """Leave the error for the supervisor; where even that cannot be written, the log has to do."""
    if run is None or place is None or code == Exit.STOPPED:
        return
    try:
        entry = {
            "time": time.time(),
            "rank": place.rank,
            "code": int(code),
            "cause": code.name.lower(),
            "message": message,
        }
        entry["host"] = host or os.uname().nodename
        write_json(run.stage_folder(stage) / f"error-rank-{place.rank}.json", entry)
    except OSError:
        pass
