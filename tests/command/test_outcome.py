"""Tests of the explanation of failed commands."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.errors import ExitCode
from pipeline.command.outcome import explain_exit, find_traceback

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'


def run_python(code: str) -> str:
    """Return the output of a Python program that fails."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    return result.stderr


def test_the_first_traceback_is_found_whole() -> None:
    output = run_python("print('a')\ntry:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e")
    found = find_traceback(f"step 1\n{output}\nTraceback (most recent call last):\n  later\nValueError: second\n")
    assert found is not None and found.strip() == output.strip()
    assert "ZeroDivisionError" in found and "KeyError: 'x'" in found and "second" not in found


def test_a_prefix_of_each_line_is_removed() -> None:
    output = run_python("raise ValueError('x')")
    prefixed = "".join(f"[rank1]: {line}\n" for line in output.splitlines())
    assert str(find_traceback(f"hello\n{prefixed}bye")).strip() == output.strip()


def test_an_error_that_was_handled_long_before_the_end_is_not_the_cause() -> None:
    handled = TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory\n"
    cause, message = explain_exit(1, handled + "step\n" * 500 + TRACEBACK + "KeyError: 'x'\n")
    assert cause == ExitCode.CRASHED and "KeyError" in message and "OutOfMemory" not in message


@given(st.text(max_size=200))
def test_any_output_is_explained(output: str) -> None:
    cause, message = explain_exit(1, output)
    assert cause != ExitCode.DONE and message.startswith("the command exited with 1")


@pytest.mark.parametrize(
    ("code", "output", "cause"),
    [
        (1, TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out_of_memory"),
        (1, TRACEBACK + "RuntimeError: [..] Connection closed by peer [10.0.0.1]:123", "peer_lost"),
        (1, TRACEBACK + "torch.distributed.DistBackendError: NCCL error: remote process exited", "peer_lost"),
        (1, TRACEBACK + "DistNetworkError: EADDRINUSE, message: address already in use", "crashed"),
        (1, TRACEBACK + "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "bad_node"),
        (134, "terminate called after throwing an instance of 'std::bad_alloc'\n", "out_of_memory"),
        (-11, "", "crashed"),
        (2, "usage: train.py [-h]\n", "crashed"),
    ],
)
def test_the_cause_is_recognized_in_the_output(code: int, output: str, cause: str) -> None:
    assert explain_exit(code, output)[0].name.lower() == cause
