"""Run code that may crash in child processes: a C library that reads a damaged file, or the program of a user.

A worker is `python -m MODULE`. It answers many requests, because its start takes some tenths of a second. A request is
a line with a JSON value. An answer has one or more parts: a line with a JSON object, followed by raw bytes:

    {"end": false, "bytes": 4096, "value": …} NEWLINE and 4096 bytes        any number of these
    {"end": true, "bytes": 0, "value": …} NEWLINE                           the last part

If the worker dies, :class:`WorkerPool` raises :class:`WorkerDiedError`, and the next request starts a new worker. The
time limit of a request counts processor time, so that a request does not fail on a suspended or busy machine.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import IO, Any, NamedTuple

_STOPPED_BY_CALLER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a job sends to all of its processes. The worker ignores them, and exits at the end of its input."""


class WorkerDiedError(Exception):
    """A worker died while it answered a request.

    Args:
        message: why the worker died.
        signal: the number of the signal that killed the worker; None if the worker exited by itself.
    """

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class AnswerPart(NamedTuple):
    """A part of an answer."""

    value: Any
    """A JSON value."""
    content: bytes = b""
    """Raw bytes that follow the JSON value."""


class WorkerPool:
    """The workers of one module. They are started when they are needed, and kept for the next request.

    Args:
        module: the module that each worker runs. It calls :func:`serve_requests`.
        cpu_s: the processor time that each part of an answer may take, in seconds.
        memory: the number of bytes that a worker may allocate; None for no limit.
    """

    def __init__(self, module: str, cpu_s: int, memory: int | None = None) -> None:
        self._command = [sys.executable, "-m", module, str(cpu_s), str(memory or 0)]
        self._cpu_s = cpu_s
        self._idle: list[subprocess.Popen[bytes]] = []
        self._owner = os.getpid()
        atexit.register(self.close)

    def request(self, request: Any) -> Any:
        """Send a request, and return the value of its answer, which must have one part. Raises WorkerDiedError."""
        (answer,) = self.stream(request)
        return answer.value

    def stream(self, request: Any) -> Iterator[AnswerPart]:
        """Send a request and yield the parts of its answer. Raises WorkerDiedError."""
        if self._owner != os.getpid():  # this process was forked: the pipes belong to its parent
            self._idle = []
            self._owner = os.getpid()
        process = self._idle.pop() if self._idle else self._start()
        try:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._describe_death(process) from None
            is_end = False
            while not is_end:
                try:
                    head = json.loads(process.stdout.readline())
                    content = process.stdout.read(head["bytes"])
                except ValueError:
                    head = {"bytes": -1}
                    content = b""
                if len(content) != head["bytes"]:
                    raise self._describe_death(process)
                is_end = head["end"]
                if is_end:
                    self._idle.append(process)
                yield AnswerPart(head["value"], content)
        finally:
            if process not in self._idle:  # the worker died, or the caller stopped reading the answer
                _kill_worker(process)

    def close(self) -> None:
        """End the idle workers."""
        while self._idle and self._owner == os.getpid():
            _kill_worker(self._idle.pop())

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a worker."""
        # imported here, because workers also import this module, but do not need pipeline.run.code
        from pipeline.run.code import CODE_ROOT, make_code_env

        # with a fixed hash seed, sets have the same order in each worker
        environment = {**make_code_env(os.environ, CODE_ROOT), "PYTHONHASHSEED": "0"}
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def _describe_death(self, process: subprocess.Popen[bytes]) -> WorkerDiedError:
        """Return an error that says why a worker died. Call this when the output of the worker has ended."""
        code = process.wait()
        if code >= 0:
            return WorkerDiedError(f"it ended with exit code {code}")
        message = f"it ended with {signal.Signals(-code).name}"
        if code == -signal.SIGPROF:
            message = f"it took more than {self._cpu_s} s of processor time"
        elif code == -signal.SIGKILL:
            message = "it was killed (SIGKILL), perhaps because no memory was left"
        return WorkerDiedError(message, -code)


def _kill_worker(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and wait for its end."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):  # the pipe may contain a request that the worker did not read
            if pipe is not None:
                pipe.close()
    process.wait()


def serve_requests(answer: Callable[[Any], Iterable[AnswerPart]]) -> None:
    """Answer the requests on standard input until it ends. The module of a worker calls this function.

    Args:
        answer: returns the parts of the answer to a request, at least one.
    """
    for number in _STOPPED_BY_CALLER:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # at the time limit the process dies, even inside a library
    cpu_s, memory = map(int, sys.argv[1:3])
    if memory:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory + _read_virtual_memory()
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with answers
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # waiting for a request takes no processor time
        # each part is sent after the next part is known, because the last part must be marked as the last one
        unsent = None
        for part in answer(request):
            if unsent is not None:
                _send_part(output, unsent, is_end=False)
                signal.setitimer(signal.ITIMER_PROF, cpu_s)
            unsent = part
        assert unsent is not None
        _send_part(output, unsent, is_end=True)


def _send_part(output: IO[bytes], part: AnswerPart, is_end: bool) -> None:
    """Write a part of an answer. `is_end`: whether it is the last part."""
    head = {"end": is_end, "bytes": len(part.content), "value": part.value}
    output.write(json.dumps(head).encode() + b"\n")
    output.write(part.content)
    output.flush()


def _read_virtual_memory() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
