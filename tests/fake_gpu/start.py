"""Start programs on fake GPUs and read the logs of their calls."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.code import CODE_ROOT


@dataclass(frozen=True)
class Call:
    """A line of the log: a call of CUDA or NCCL (see runtime.c), or a note of the program (`note`)."""

    thread: int
    device: int
    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class FakeGpuRunner:
    """Run programs with two fake GPUs.

    Args:
        python: Python with a CUDA build of torch.
        preload: library of the fake GPU.
        folder: folder for logs.
    """

    python: Path
    preload: Path
    folder: Path

    def run_programs(self, *programs: tuple[str, ...], timeout: float = 240.0, **variables: str) -> list[list[Call]]:
        """Run programs at the same time, each in its own process.

        Args:
            programs: for each process, the name of a function of tests/fake_gpu/programs.py and its arguments.
            timeout: the limit in seconds.
            variables: further environment variables of all processes.

        Returns:
            The calls of each process.
        """
        logs = [self.folder / f"log-{number}" for number in range(len(programs))]
        commands = [("-W", "ignore", "-m", "tests.fake_gpu.programs", *program) for program in programs]
        self.run_commands(commands, [{**variables, "FAKE_GPU_LOG": str(log)} for log in logs], timeout)
        return [read_log(log) for log in logs]

    def run_commands(
        self, commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]], timeout: float = 240.0
    ) -> list[str]:
        """Run processes at the same time and return their outputs. Each must exit with code 0.

        Args:
            commands: arguments of Python for each process.
            variables: further environment variables of each process.
            timeout: the limit in seconds.
        """
        processes = [self._start(*process) for process in zip(commands, variables, strict=True)]
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
        return outputs

    def _start(self, arguments: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start Python with these arguments and environment variables."""
        return subprocess.Popen(
            [self.python, *arguments],
            env={**os.environ, **make_fake_gpu_environment(self.preload), **variables},
            cwd=CODE_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def make_fake_gpu_environment(preload: Path, gpus: int = 2) -> dict[str, str]:
    """Return the environment variables with which a CUDA build of torch and Triton see fake GPUs."""
    return {
        "LD_PRELOAD": str(preload),
        "TRITON_LIBCUDA_PATH": str(preload.parent),
        "FAKE_GPUS": str(gpus),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",  # torch must not query the real NVML, which has no fake GPUs
    }


def read_log(log: Path) -> list[Call]:
    """Return the calls of a process in order."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [Call(int(thread), int(device), name, tuple(arguments)) for thread, device, name, *arguments in lines]


def find_calls(calls: list[Call], name: str, *arguments: str) -> list[int]:
    """Return the indices of the calls with this name and these first arguments."""
    count = len(arguments)
    return [index for index, call in enumerate(calls) if call.name == name and call.arguments[:count] == arguments]
