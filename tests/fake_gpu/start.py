"""Starting programs on a machine with fake GPUs, and reading the log of what they did there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.code import CODE_ROOT


@dataclass(frozen=True)
class Call:
    """A line of the log."""

    thread: int
    device: int
    word: str
    rest: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """Programs on a machine with two fake GPUs."""

    python: Path
    preload: Path
    folder: Path

    def __call__(self, *rank_arguments: tuple[str, ...], **more: str) -> list[list[Call]]:
        """One process for each tuple of a name in tests/fake_gpu/programs.py and arguments; their logs.

        more: of an environment.
        """
        logs = [self.folder / f"log-{number}" for number in range(len(rank_arguments))]
        commands = [("-W", "ignore", "-m", "tests.fake_gpu.programs", *arguments) for arguments in rank_arguments]
        self.together(commands, [{**more, "FAKE_GPU_LOG": str(log)} for log in logs])
        return [read(log) for log in logs]

    def together(
        self, commands: Sequence[Sequence[str]], more: Sequence[Mapping[str, str]], timeout: float = 240.0
    ) -> list[str]:
        """What processes with these arguments for Python, and more of an environment, print; all must end well."""
        started = [self._start(arguments, env) for arguments, env in zip(commands, more, strict=True)]
        try:
            said = [process.communicate(timeout=timeout)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)
        return said

    def _start(self, arguments: Sequence[str], more: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.python, *arguments],
            env={**os.environ, **environment(self.preload), **more},
            cwd=CODE_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def environment(preload: Path, gpus: int = 2) -> dict[str, str]:
    """What makes a CUDA build of torch, and Triton, see fake GPUs."""
    return {
        "LD_PRELOAD": str(preload),
        "TRITON_LIBCUDA_PATH": str(preload.parent),
        "FAKE_GPUS": str(gpus),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",  # a machine with real GPUs has a real NVML
    }


def read(log: Path) -> list[Call]:
    """A process's calls in order."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [Call(int(thread), int(device), word, tuple(rest)) for thread, device, word, *rest in lines]


def place_of(calls: list[Call], word: str, *rest: str) -> list[int]:
    """Where the log has calls that begin like this."""
    return [place for place, call in enumerate(calls) if call.word == word and call.rest[: len(rest)] == rest]
