"""Tests of the order of CUDA calls and of their devices, on a fake GPU (tests/fake_gpu). Run `make test-gpu-fake`."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.fake_gpu.start import Call, FakeGpuRunner, find_calls
from tests.support.ranks import PORTS

pytestmark = pytest.mark.gpu_fake

DEFAULT = "(nil)"
"""CUDA's default stream, on which the training computes."""


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_save_copies_weights_after_the_last_kernel_and_before_the_next_one(start: FakeGpuRunner, mode: str) -> None:
    (calls,) = start(("checkpoint", mode, str(start.folder)))
    saves = find_calls(calls, "note", "save")
    staged = find_calls(calls, "note", "staged")
    assert len(saves) == len(staged) == 2
    saving = calls[saves[0] : find_calls(calls, "note", "closed")[0]]
    assert not find_calls(saving, "sync-stream", DEFAULT), "the host never waits for the stream of the training"
    for save_index, staged_index in zip(saves, staged, strict=True):
        last_kernel = max(index for index in find_calls(calls, "launch", DEFAULT) if index < save_index)
        during = calls[last_kernel:staged_index]
        copies = [index for index, call in enumerate(during) if call.name == "copy" and call.arguments[2] == "device"]
        assert copies, "the weights were copied"
        for copy in copies:
            before = during[:copy]
            stream = during[copy].arguments[0]
            events = [call.arguments[0] for call in before if call.name == "record" and call.arguments[1] == DEFAULT]
            waits = [call.arguments[1] for call in before if call.name == "wait" and call.arguments[0] == stream]
            assert set(events) & set(waits), "the copy does not wait for the kernel before it"
            synchronize = Call(during[copy].thread, 1, "sync-stream", (stream,))
            assert synchronize in during[copy:], "no thread waits for the copy"


def test_mpi_threads_do_not_wait_for_queued_kernels_of_the_training(start: FakeGpuRunner) -> None:
    (calls,) = start(("mpi",))
    assert not find_calls(calls, "sync-device")
    of_other_threads = [call for call in calls if call.thread != calls[0].thread]
    copies = {call.arguments[1:3]: call.arguments[0] for call in of_other_threads if call.name == "copy"}
    assert {("pinned", "device"), ("device", "pinned")} <= copies.keys(), "messages go through host memory"
    assert DEFAULT not in copies.values()
    assert not find_calls(of_other_threads, "sync-stream", DEFAULT)
    first_copy = next(index for index, call in enumerate(of_other_threads) if call.name == "copy")
    assert find_calls(of_other_threads[:first_copy], "sync-event"), "the thread waits for the tensor's last kernel"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_second_save_pins_no_host_memory(start: FakeGpuRunner, mode: str) -> None:
    (calls,) = start(("checkpoint", mode, str(start.folder)))
    first, second = find_calls(calls, "note", "save")
    assert find_calls(calls[first:second], "pin")
    assert not find_calls(calls[second:], "pin")


@pytest.mark.parametrize("program", ["checkpoint async", "checkpoint sync", "loader", "mpi"])
def test_no_thread_of_the_second_rank_uses_the_first_gpu(start: FakeGpuRunner, program: str) -> None:
    name, *arguments = program.split()
    (calls,) = start((name, *arguments, *([str(start.folder)] if name != "mpi" else [])))
    assert [call for call in calls if call.device != 1] == []
    threads = {call.thread for call in calls}
    assert len(threads) >= {"checkpoint async": 3, "checkpoint sync": 1, "loader": 2, "mpi": 4}[program]


def test_ranks_bound_to_the_gpus_of_their_socket_use_one_gpu_each(start: FakeGpuRunner) -> None:
    port = str(next(PORTS))
    for rank, calls in enumerate(start(*(("closest", rank, port) for rank in "01"))):
        assert calls[find_calls(calls, "note", "joined")[0]].arguments == ("joined", str(rank))
        assert {call.device for call in calls} == {rank}, "NCCL starts on this GPU, and no other GPU has a context"


def test_initial_weights_are_generated_on_the_gpu(start: FakeGpuRunner) -> None:
    (calls,) = start(("initialize_weights",))
    building = calls[find_calls(calls, "note", "build")[0] : find_calls(calls, "note", "built")[0]]
    embedding_bytes = int(calls[find_calls(calls, "note", "built")[0]].arguments[1])
    copied_bytes = [
        int(call.arguments[3]) for call in building if call.name == "copy" and call.arguments[2] != "device"
    ]
    assert copied_bytes and max(copied_bytes) < embedding_bytes / 4, "only tables of positions come from the host"
    assert find_calls(building, "launch")


def test_peak_memory_is_measured_for_each_phase(start: FakeGpuRunner) -> None:
    start(("memory",))  # the program checks the peaks


def test_memory_that_a_hook_reads_on_another_stream_is_not_reused(start: FakeGpuRunner) -> None:
    port = str(next(PORTS))
    for calls in start(*(("powersgd", rank, port) for rank in "01")):
        steps = [0, *find_calls(calls, "note", "backward:")]
        assert len(steps) == 4
        for begin, end in pairwise(steps):
            streams = {call.arguments[0] for call in calls[begin:end] if call.name == "launch"}
            assert streams > {DEFAULT}, "the second half of the hook runs on another stream"
            assert calls[end].arguments == ("backward:", "2", "read,", "0", "taken")


def test_a_chunked_loss_saves_the_memory_of_logits_and_the_host_does_not_wait(start: FakeGpuRunner) -> None:
    """1,024 tokens × 8,192 IDs are 34 MB of logits in fp32. They exist three times; everything else takes 10 MB."""
    peaks = []
    for calls in start(("low_memory", "16"), ("low_memory", "0")):
        steps = find_calls(calls, "note", "step")
        updated = find_calls(calls, "note", "updated")
        assert len(steps) == len(updated) == 3
        peaks.append(int(calls[updated[-1]].arguments[1]))
        last_step = calls[steps[-1] : updated[-1]]
        assert find_calls(last_step, "launch"), "the step launched kernels"
        for name in ("sync-stream", "sync-event", "sync-device"):
            assert not find_calls(last_step, name), f"the host waits: {name}"
    assert peaks[0] + 3 * 0.9 * 1024 * 8192 * 4 < peaks[1], peaks
