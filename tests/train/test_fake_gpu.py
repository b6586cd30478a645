"""Tests of the order of CUDA calls and of their devices, on a fake GPU (tests/fake_gpu). Run `make test-gpu-fake`."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.gpu import ROOT
from pipeline.config.read import load_config
from pipeline.parallel.mesh import resolve_layout
from planning.memory import estimate_memory, reserved_gpu_bytes
from planning.timeline import rank_actions
from tests.fake_gpu.start import Call, FakeGpuRunner, find_calls
from tests.support.ranks import PORTS

pytestmark = pytest.mark.gpu_fake

DEFAULT_STREAM = "(nil)"
"""CUDA's default stream as the log shows it. The train stage computes on this stream."""


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_save_copies_weights_after_the_last_kernel_and_before_the_next_one(
    gpu_runner: FakeGpuRunner, mode: str
) -> None:
    (calls,) = gpu_runner.run_programs(("save_two_checkpoints", mode, str(gpu_runner.folder)))
    saves = find_calls(calls, "note", "save")
    staged = find_calls(calls, "note", "staged")
    assert len(saves) == len(staged) == 2
    calls_of_saves = calls[saves[0] : find_calls(calls, "note", "closed")[0]]
    assert not find_calls(calls_of_saves, "sync-stream", DEFAULT_STREAM), (
        "the host waits for the kernels of the train stage"
    )
    for save_index, staged_index in zip(saves, staged, strict=True):
        last_kernel = max(index for index in find_calls(calls, "launch", DEFAULT_STREAM) if index < save_index)
        save = calls[last_kernel:staged_index]
        # argument 2 of a copy is its source
        copies = [index for index, call in enumerate(save) if call.name == "copy" and call.arguments[2] == "device"]
        assert copies, "no weights were copied"
        for copy in copies:
            earlier_calls = save[:copy]
            stream = save[copy].arguments[0]
            events = {
                call.arguments[0]
                for call in earlier_calls
                if call.name == "record" and call.arguments[1] == DEFAULT_STREAM
            }
            waits = {call.arguments[1] for call in earlier_calls if call.name == "wait" and call.arguments[0] == stream}
            assert events & waits, "the copy does not wait for the kernel before it"
            synchronize = Call(save[copy].thread, device=1, name="sync-stream", arguments=(stream,))
            assert synchronize in save[copy:], "no thread waits for the copy"


def test_mpi_threads_do_not_wait_for_queued_kernels_of_the_training(gpu_runner: FakeGpuRunner) -> None:
    (calls,) = gpu_runner.run_programs(("communicate_over_mpi",))
    assert not find_calls(calls, "sync-device")
    mpi_calls = [call for call in calls if call.thread != calls[0].thread]
    streams_of_copies = {call.arguments[1:3]: call.arguments[0] for call in mpi_calls if call.name == "copy"}
    assert {("pinned", "device"), ("device", "pinned")} <= streams_of_copies.keys(), (
        "messages must go through host memory"
    )
    assert DEFAULT_STREAM not in streams_of_copies.values()
    assert not find_calls(mpi_calls, "sync-stream", DEFAULT_STREAM)
    first_copy = next(index for index, call in enumerate(mpi_calls) if call.name == "copy")
    assert find_calls(mpi_calls[:first_copy], "sync-event"), "the thread must wait for the tensor's last kernel"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_second_save_pins_no_host_memory(gpu_runner: FakeGpuRunner, mode: str) -> None:
    (calls,) = gpu_runner.run_programs(("save_two_checkpoints", mode, str(gpu_runner.folder)))
    first_save, second_save = find_calls(calls, "note", "save")
    assert find_calls(calls[first_save:second_save], "pin")
    assert not find_calls(calls[second_save:], "pin")


@pytest.mark.parametrize(
    ("program", "min_threads"),
    [
        (("save_two_checkpoints", "async", "FOLDER"), 3),
        (("save_two_checkpoints", "sync", "FOLDER"), 1),
        (("load_batches", "FOLDER"), 2),
        (("communicate_over_mpi",), 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_no_thread_of_a_rank_on_gpu_1_uses_gpu_0(
    gpu_runner: FakeGpuRunner, program: tuple[str, ...], min_threads: int
) -> None:
    command = tuple(str(gpu_runner.folder) if argument == "FOLDER" else argument for argument in program)
    (calls,) = gpu_runner.run_programs(command)
    assert [call for call in calls if call.device != 1] == []
    assert len({call.thread for call in calls}) >= min_threads


def test_ranks_bound_to_the_gpus_of_their_socket_use_one_gpu_each(gpu_runner: FakeGpuRunner) -> None:
    port = str(next(PORTS))
    for rank, calls in enumerate(gpu_runner.run_programs(*(("join_on_nearest_gpu", rank, port) for rank in "01"))):
        assert calls[find_calls(calls, "note", "joined")[0]].arguments == ("joined", str(rank))
        assert {call.device for call in calls} == {rank}, "a rank or its NCCL uses another GPU"


def test_initial_weights_are_generated_on_the_gpu(gpu_runner: FakeGpuRunner) -> None:
    (calls,) = gpu_runner.run_programs(("initialize_weights",))
    (build_index,) = find_calls(calls, "note", "build")
    (built_index,) = find_calls(calls, "note", "built")
    build_calls = calls[build_index:built_index]
    embedding_bytes = int(calls[built_index].arguments[1])
    bytes_from_host = [
        int(call.arguments[3]) for call in build_calls if call.name == "copy" and call.arguments[2] != "device"
    ]
    assert bytes_from_host and max(bytes_from_host) < embedding_bytes / 4, "weights were copied from the host"
    assert find_calls(build_calls, "launch")


def test_peak_memory_is_measured_for_each_phase(gpu_runner: FakeGpuRunner) -> None:
    gpu_runner.run_programs(("check_peak_memory",))


def test_memory_that_a_hook_reads_on_another_stream_is_not_reused(gpu_runner: FakeGpuRunner) -> None:
    port = str(next(PORTS))
    for calls in gpu_runner.run_programs(*(("train_with_powersgd", rank, port) for rank in "01")):
        step_ends = [0, *find_calls(calls, "note", "backward:")]
        assert len(step_ends) == 4
        for begin, end in pairwise(step_ends):
            streams = {call.arguments[0] for call in calls[begin:end] if call.name == "launch"}
            assert streams > {DEFAULT_STREAM}, "the second half of the hook must run on another stream"
            assert calls[end].arguments == ("backward:", "2", "read,", "0", "taken")


def test_a_chunked_loss_saves_the_memory_of_logits_and_the_host_does_not_wait(gpu_runner: FakeGpuRunner) -> None:
    """A step has 1,024 tokens, so the logits for a vocabulary of 8,192 need 34 MB in fp32.

    Without chunks, memory contains three tensors of this size. Everything else needs 10 MB.
    """
    peaks = []
    for calls in gpu_runner.run_programs(("train_with_chunked_loss", "16"), ("train_with_chunked_loss", "0")):
        steps = find_calls(calls, "note", "step")
        updated = find_calls(calls, "note", "updated")
        assert len(steps) == len(updated) == 3
        peaks.append(int(calls[updated[-1]].arguments[1]))
        last_step = calls[steps[-1] : updated[-1]]
        assert find_calls(last_step, "launch")
        for name in ("sync-stream", "sync-event", "sync-device"):
            assert not find_calls(last_step, name), f"the host waits: {name}"
    peak_with_chunks, peak_without_chunks = peaks
    assert peak_with_chunks + 3 * 0.9 * 1024 * 8192 * 4 < peak_without_chunks, peaks


@pytest.mark.parametrize("compiles", ["no", "yes"])
def test_attention_to_documents_needs_linear_memory_and_does_not_wait_for_the_gpu(
    gpu_runner: FakeGpuRunner, compiles: str
) -> None:
    (calls,) = gpu_runner.run_programs(("attend_to_documents", compiles))
    begins, ends = find_calls(calls, "note", "forward"), find_calls(calls, "note", "ended")
    assert len(begins) == len(ends) == 4
    for begin, end in zip(begins, ends, strict=True):
        passes = calls[begin:end]
        assert find_calls(passes, "launch")
        if compiles == "no":  # When Triton chooses a kernel, it waits for the GPU.
            assert not [call for call in passes if call.name.startswith("sync")]


@pytest.mark.parametrize("zero", ["0", "3"])
def test_training_on_documents_does_not_wait_for_the_gpu_in_a_micro_batch(gpu_runner: FakeGpuRunner, zero: str) -> None:
    """DDP and FSDP must not move the boundaries of documents to the GPU, from which they would have to be read back."""
    (calls,) = gpu_runner.run_programs(("train_on_documents", zero))
    micro_batches = calls[find_calls(calls, "note", "forward")[0] : find_calls(calls, "note", "reduce")[0]]
    assert len(find_calls(micro_batches, "note", "forward")) == 2
    assert not [call for call in micro_batches if call.name.startswith("sync")]


def test_a_rank_trains_on_131072_tokens_within_the_planned_memory(gpu_runner: FakeGpuRunner) -> None:
    """Rank 0 of 8 of configs/lm-8b-128k.yaml, with 32 compiled blocks, ZeRO 3 and documents kept apart."""
    config_file = ROOT / "configs/lm-8b-128k.yaml"
    (calls,) = gpu_runner.run_programs(("train_one_rank_of_eight", str(config_file)), timeout=560.0)
    peaks = [int(calls[index].arguments[1]) for index in find_calls(calls, "note", "peak")]
    config = load_config(config_file, ["train.global_batch=2"])
    layout = resolve_layout(config)
    planned = estimate_memory(config, layout, 0, config.data.tokenizer.vocab_size, rank_actions(layout)[0])
    assert peaks[1] == pytest.approx(planned.total, rel=0.05)
    assert planned.on_gpu(config) + reserved_gpu_bytes(layout) < 79.6 * 2**30
    forward, reduce = (find_calls(calls, "note", name) for name in ("forward", "reduce"))
    assert len(forward) == 4
    assert not [call for call in calls[forward[2] : reduce[1]] if call.name.startswith("sync")]
