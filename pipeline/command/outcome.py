"""Explain why a command failed, from its exit code and its output."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from pipeline.base.errors import ExitCode
from pipeline.run.failure import GPU_FAILURE_PATTERN

MAX_OUTPUT_BYTES = 1 << 20
"""How much of the end of the output is searched."""
_SHOWN_LINES = 20
"""How many of the last lines are shown if the output contains no traceback."""
_SEARCHED_LINES = 300
"""How many of the last lines are searched for a traceback."""
_MAX_TRACEBACK_LINES = 100
_TRACEBACK = "Traceback (most recent call last):"
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP) out of memory|^MemoryError|std::bad_alloc|[Cc]an(?:no|')t allocate memory",
    re.MULTILINE,
)
_PEER_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|DistBackendError|DistNetworkError|ncclRemoteError|remote process exited"
    r"|Watchdog caught collective operation timeout|\bgloo/|peer .*timed out"
)
"""Messages of torch's communication backends, of NCCL and of Gloo if another rank was lost."""


def explain_exit(code: int, output: str) -> tuple[ExitCode, str]:
    """Return the cause of a failure, and a message with the first traceback or the last lines of the output.

    Args:
        code: the exit code of the command; minus the number of a signal that ended it.
        output: the end of its output.
    """
    names = {number.value: number.name for number in signal.Signals}
    ending = f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exited with {code}"
    excerpt = find_traceback(output) or "\n".join(output.rstrip().splitlines()[-_SHOWN_LINES:])
    message = f"the command {ending}; its output ended with:\n{excerpt}" if excerpt else f"the command {ending}"
    if GPU_FAILURE_PATTERN.search(excerpt):
        return ExitCode.BAD_NODE, message
    if _OUT_OF_MEMORY.search(excerpt):
        return ExitCode.OUT_OF_MEMORY, message
    last_line = excerpt.rstrip().rpartition("\n")[2]
    if _PEER_LOST.search(last_line) and "address already in use" not in last_line:
        return ExitCode.PEER_LOST, message
    return ExitCode.CRASHED, message


def find_traceback(output: str) -> str | None:
    """Return the first traceback in the last lines of the output of a Python program; None if there is none.

    If an error was raised while another was handled, the tracebacks of both are returned. Earlier lines are not
    searched, because the program may have handled and printed an error long before its end.
    """
    lines = output.splitlines()[-_SEARCHED_LINES:]
    start = next((number for number, line in enumerate(lines) if _TRACEBACK in line), None)
    if start is None:
        return None
    prefix = lines[start].partition(_TRACEBACK)[0]  # for example `[rank1]: `
    end = start + 1
    for number in range(start + 1, min(len(lines), start + _MAX_TRACEBACK_LINES)):
        line = lines[number].removeprefix(prefix)
        is_chained = line.startswith(("During handling", "The above exception", _TRACEBACK)) or not line.strip()
        if line[:1].isspace() or is_chained:
            continue
        end = number + 1  # the line with the type and the message of an error
        following = [text.removeprefix(prefix) for text in lines[number + 1 : number + 4]]
        if not any(text.startswith(("During handling", "The above exception")) for text in following):
            break
    return "\n".join(text.removeprefix(prefix) for text in lines[start:end])


def read_end(file: Path, start: int) -> str:
    """Return the end of a log, at most `MAX_OUTPUT_BYTES`, but nothing before the byte `start`."""
    with open(file, "rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(start, size - MAX_OUTPUT_BYTES))
        return stream.read().decode(errors="replace")
