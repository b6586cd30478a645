"""Orders and devices on CUDA, seen in the log of a fake GPU (tests/fake_gpu): `make test-gpu-fake` runs these."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.fake_gpu.start import Call, FakeGpuRunner, find_calls
from tests.support.ranks import PORTS

pytestmark = pytest.mark.gpu_fake

DEFAULT = "(nil)"
"""The default stream: training computes on it."""


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_weights_are_copied_after_they_are_made_and_before_they_change(start: FakeGpuRunner, mode: str) -> None:
    (calls,) = start(("checkpoint", mode, str(start.folder)))
    saves, staged = find_calls(calls, "note", "save"), find_calls(calls, "note", "staged")
    assert len(saves) == len(staged) == 2
    saving = calls[saves[0] : find_calls(calls, "note", "closed")[0]]
    assert not find_calls(saving, "sync-stream", DEFAULT), "training's stream is never waited for on the host"
    for begin, end in zip(saves, staged, strict=True):
        made = max(place for place in find_calls(calls, "launch", DEFAULT) if place < begin)
        during = calls[made:end]
        copies = [place for place, call in enumerate(during) if call.word == "copy" and call.rest[2] == "device"]
        assert copies, "the weights were copied"
        for copy in copies:
            stream = during[copy].rest[0]
            events = [call.rest[0] for call in during[:copy] if call.word == "record" and call.rest[1] == DEFAULT]
            waits = [call.rest[1] for call in during[:copy] if call.word == "wait" and call.rest[0] == stream]
            assert set(events) & set(waits), "the copy does not wait for the kernel before it"
            assert Call(during[copy].thread, 1, "sync-stream", (stream,)) in during[copy:], "nobody waits for the copy"


def test_no_thread_of_mpi_waits_for_what_training_has_queued(start: FakeGpuRunner) -> None:
    (calls,) = start(("mpi",))
    assert not find_calls(calls, "sync-device")
    ours = [call for call in calls if call.thread != calls[0].thread]
    copies = {call.rest[1:3]: call.rest[0] for call in ours if call.word == "copy"}
    assert {("pinned", "device"), ("device", "pinned")} <= copies.keys(), "through host memory, and back"
    assert DEFAULT not in copies.values()
    assert not find_calls(ours, "sync-stream", DEFAULT)
    begins = next(place for place, call in enumerate(ours) if call.word == "copy")
    assert find_calls(ours[:begins], "sync-event"), "what the tensor waits for is waited for"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_second_save_pins_no_host_memory(start: FakeGpuRunner, mode: str) -> None:
    (calls,) = start(("checkpoint", mode, str(start.folder)))
    first, second = find_calls(calls, "note", "save")
    assert find_calls(calls[first:second], "pin")
    assert not find_calls(calls[second:], "pin")


@pytest.mark.parametrize("program", ["checkpoint async", "checkpoint sync", "loader", "mpi"])
def test_no_thread_of_the_second_rank_touches_the_first_gpu(start: FakeGpuRunner, program: str) -> None:
    name, *arguments = program.split()
    (calls,) = start((name, *arguments, *([str(start.folder)] if name != "mpi" else [])))
    assert [call for call in calls if call.device != 1] == []
    threads = {call.thread for call in calls}
    assert len(threads) >= {"checkpoint async": 3, "checkpoint sync": 1, "loader": 2, "mpi": 4}[program]


def test_ranks_bound_to_the_gpus_of_their_socket_take_one_each(start: FakeGpuRunner) -> None:
    port = str(next(PORTS))
    for rank, calls in enumerate(start(*(("closest", rank, port) for rank in "01"))):
        assert calls[find_calls(calls, "note", "joined")[0]].rest == ("joined", str(rank))
        assert {call.device for call in calls} == {rank}, "NCCL starts on it, and no context is made elsewhere"


def test_weights_are_drawn_where_they_compute(start: FakeGpuRunner) -> None:
    (calls,) = start(("initialize_weights",))
    building = calls[find_calls(calls, "note", "build")[0] : find_calls(calls, "note", "built")[0]]
    embedding = int(calls[find_calls(calls, "note", "built")[0]].rest[1])  # bytes
    copied = [int(call.rest[3]) for call in building if call.word == "copy" and call.rest[2] != "device"]
    assert copied and max(copied) < embedding / 4, "only tables of positions come from the host"
    assert find_calls(building, "launch")


def test_each_phase_has_a_peak_of_its_own(start: FakeGpuRunner) -> None:
    start(("memory",))


def test_memory_that_a_hook_reads_on_another_stream_is_not_given_away(start: FakeGpuRunner) -> None:
    port = str(next(PORTS))
    for calls in start(*(("powersgd", rank, port) for rank in "01")):
        steps = [0, *find_calls(calls, "note", "backward:")]
        assert len(steps) == 4
        for begin, end in pairwise(steps):
            streams = {call.rest[0] for call in calls[begin:end] if call.word == "launch"}
            assert streams > {DEFAULT}, "the hook's second half runs on a stream of its own"
            assert calls[end].rest == ("backward:", "2", "read,", "0", "taken")


def test_neither_a_chunked_loss_nor_a_lean_update_waits_and_logits_are_not_kept(start: FakeGpuRunner) -> None:
    """1,024 tokens and 8,192 ids: 34 MB of logits in fp32, three times, beside 10 MB of anything else."""
    peaks = []
    for calls in start(("low_memory", "16"), ("low_memory", "0")):
        begun, updated = find_calls(calls, "note", "step"), find_calls(calls, "note", "updated")
        assert len(begun) == len(updated) == 3
        peaks.append(int(calls[updated[-1]].rest[1]))
        begin, end = begun[-1], updated[-1]
        assert find_calls(calls[begin:end], "launch"), "a step was made"
        for word in ("sync-stream", "sync-event", "sync-device"):
            assert not find_calls(calls[begin:end], word), f"the host waits: {word}"
    assert peaks[0] + 3 * 0.9 * 1024 * 8192 * 4 < peaks[1], peaks
