"""Tests that a device thread uses the GPU of the thread that creates it (see also tests/train/test_fake_gpu.py)."""

from __future__ import annotations

import threading

import pytest
import torch

from pipeline.base.device_thread import device_thread


def run_and_record_calls(monkeypatch: pytest.MonkeyPatch, cuda_initialized: bool) -> list[tuple[str, object]]:
    """Create a device thread while GPU 3 is the current GPU of this thread, and run the device thread.

    Return each call of `torch.cuda.set_device` and each call of the thread's function, in order: the name of the thread
    that made the call, and the GPU number or "work".
    """
    calls: list[tuple[str, object]] = []

    def record(argument: object) -> None:
        calls.append((threading.current_thread().name, argument))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda_initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", record)
    thread = device_thread(lambda: record("work"), "device thread")
    assert thread.daemon and not device_thread(lambda: None, "other", daemon=False).daemon
    thread.start()
    thread.join(10)
    return calls


def test_thread_selects_the_gpu_of_its_creator_before_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_and_record_calls(monkeypatch, cuda_initialized=True) == [
        ("device thread", 3),
        ("device thread", "work"),
    ]


def test_thread_selects_no_gpu_if_cuda_is_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_and_record_calls(monkeypatch, cuda_initialized=False) == [("device thread", "work")]
