"""Run code that may crash, in child processes. Examples are a C library that reads a damaged file, or a user's code.

A worker is a process `python -m MODULE`. A worker answers many requests, because its start takes some tenths of a
second. A request is a line with a JSON value. An answer has one or more parts. Each part is a line with a JSON object,
followed by raw bytes:

    {"end": false, "bytes": 4096, "value": …} NEWLINE and 4096 bytes        any number of these
    {"end": true, "bytes": 0, "value": …} NEWLINE                           the last part

If the worker dies, :class:`WorkerPool` raises :class:`WorkerDiedError`, and the next request starts a new worker. The
time limit applies to each part of an answer. It counts processor time, so that a request does not fail on a suspended
or busy machine.
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

_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that stop a job. All processes of the job may receive them. A worker ignores them and instead exits when its
standard input is closed."""


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
    """The workers of one module. A worker is started when it is needed, and kept for the next request.

    Args:
        module: the module that each worker runs. This module calls :func:`serve_requests`.
        cpu_s: the processor time that each part of an answer may take, in seconds.
        memory_bytes: the number of bytes that a worker may allocate; None for no limit.
    """

    def __init__(self, module: str, cpu_s: int, memory_bytes: int | None = None) -> None:
        self._command = [sys.executable, "-m", module, str(cpu_s), str(memory_bytes or 0)]
        self._cpu_s = cpu_s
        self._idle: list[subprocess.Popen[bytes]] = []
        self._owner_pid = os.getpid()
        atexit.register(self.close)

    def request(self, request: Any) -> Any:
        """Send a request and return the JSON value of its answer, which must have one part. Raises WorkerDiedError."""
        (answer,) = self.stream(request)
        return answer.value

    def stream(self, request: Any) -> Iterator[AnswerPart]:
        """Send a request and yield the parts of its answer. Raises WorkerDiedError."""
        if self._owner_pid != os.getpid():  # this process was forked, and its parent uses the pipes of the idle workers
            self._idle = []
            self._owner_pid = os.getpid()
        process = self._idle.pop() if self._idle else self._start()
        try:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._make_death_error(process) from None
            is_end = False
            while not is_end:
                try:
                    header = json.loads(process.stdout.readline())
                    content = process.stdout.read(header["bytes"])
                except ValueError:  # the worker died before it sent a complete header
                    header = {"bytes": -1}  # differs from every length, so the error below is raised
                    content = b""
                if len(content) != header["bytes"]:
                    raise self._make_death_error(process)
                is_end = header["end"]
                if is_end:  # before `yield`, because a caller may not ask for more, and `finally` kills a busy worker
                    self._idle.append(process)
                yield AnswerPart(header["value"], content)
        finally:
            if process not in self._idle:  # the worker died, or the caller stopped reading the answer
                _kill_worker(process)

    def close(self) -> None:
        """Kill the idle workers. Do nothing in a forked process."""
        while self._idle and self._owner_pid == os.getpid():
            _kill_worker(self._idle.pop())

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a worker."""
        # imported here, because workers also import this module, but do not need pipeline.run.code
        from pipeline.run.code import CODE_ROOT, make_code_env

        # with a fixed hash seed, sets have the same order in each worker
        environment = {**make_code_env(os.environ, CODE_ROOT), "PYTHONHASHSEED": "0"}
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def _make_death_error(self, process: subprocess.Popen[bytes]) -> WorkerDiedError:
        """Return an error that says why a worker died. Call this when a pipe to the worker was closed unexpectedly."""
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
    """Answer requests until standard input is closed. The module of a worker calls this function.

    Args:
        answer: returns the parts of the answer to a request, at least one.
    """
    for signal_number in _IGNORED_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # at the time limit the process dies, even inside a library
    cpu_s, memory_bytes = map(int, sys.argv[1:3])
    if memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory_bytes + _read_address_space_size()
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with answers
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # waiting for a request takes no processor time
        # each part is sent after the next part is known, because the last part must be marked as the last one
        unsent_part = None
        for part in answer(request):
            if unsent_part is not None:
                _send_part(output, unsent_part, is_end=False)
                signal.setitimer(signal.ITIMER_PROF, cpu_s)
            unsent_part = part
        assert unsent_part is not None
        _send_part(output, unsent_part, is_end=True)


def _send_part(output: IO[bytes], part: AnswerPart, is_end: bool) -> None:
    """Write a part of an answer. `is_end` marks the last part."""
    header = {"end": is_end, "bytes": len(part.content), "value": part.value}
    output.write(json.dumps(header).encode() + b"\n")
    output.write(part.content)
    output.flush()


def _read_address_space_size() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
