"""Threads of ours begin on the GPU of the thread that makes them; tests/train/test_fake_gpu.py has the real ones."""

from __future__ import annotations

import threading

import pytest
import torch

from pipeline.base.device_thread import device_thread


def calls_of(monkeypatch: pytest.MonkeyPatch, initialized: bool) -> list[tuple[str, object]]:
    """What a thread does, in order: its choice of a GPU, and its work."""
    calls: list[tuple[str, object]] = []

    def note(what: object) -> None:
        calls.append((threading.current_thread().name, what))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", note)
    thread = device_thread(lambda: note("work"), "mine")
    assert thread.daemon and not device_thread(lambda: None, "other", daemon=False).daemon
    thread.start()
    thread.join(10)
    return calls


def test_a_thread_chooses_its_makers_gpu_before_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of(monkeypatch, initialized=True) == [("mine", 3), ("mine", "work")]


def test_without_a_gpu_in_use_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of(monkeypatch, initialized=False) == [("mine", "work")]
