"""Tests of the worker processes that read a user's dataset: the samples, the end of the processes, and errors."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from pipeline.base.errors import LostMountError
from pipeline.config.user_model import find_user_model
from pipeline.data.dataset import describe_dataset
from pipeline.data.dataset_pool import DatasetLoader, DatasetSamples, StreamOrder
from pipeline.data.dataset_worker import IGNORED_SIGNALS, load_state
from pipeline.data.manifest import DatasetEntry, SampleArray
from pipeline.data.sample_order import GlobalOrderSampler, compute_index_range
from pipeline.data.stream_state import select_states
from pipeline.run.code import CODE_ROOT
from pipeline.run.worker import WorkerDiedError
from tests.support.datasets import (
    DATASET_MODULE,
    ITERABLE_MODULE,
    make_request,
    seed_as_documented,
    write_module,
)
from tests.support.errors import raises_error

CPU = torch.device("cpu")
DEADLINE_S = 60.0
NUMBERS = itertools.count()
"""Numbers for the names of modules."""


@pytest.fixture(autouse=True)
def check_nothing_remains() -> Iterator[None]:
    """Check that no process, thread or file descriptor is left after each test."""
    threads_before = set(threading.enumerate())
    fds_before = len(os.listdir("/proc/self/fd"))
    yield
    assert set(threading.enumerate()) == threads_before
    assert wait_until(lambda: not list_data_processes(psutil.Process()))
    # Garbage of earlier tests may be collected meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= fds_before


def list_data_processes(parent: psutil.Process) -> list[psutil.Process]:
    """Return the processes that read datasets, among the descendants of a process."""
    processes = []
    for process in parent.children(recursive=True):
        try:
            if "pipeline.data.dataset_worker" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.NoSuchProcess:
            continue
    return processes


def wait_until(condition: Any) -> bool:
    """Wait until a condition is true; return False if it is still false after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """Return a module with a dataset."""
    return write_module(tmp_path, f"workers{next(NUMBERS)}")


def load_reference(module: Path) -> Any:
    """Import a module in this process."""
    return find_user_model(module.stem, [module.parent]).load(module.parent)


def read_in_this_process(module: Any, seed: int, index: int, position: int) -> dict[str, Any]:
    """Return a training sample as the documentation defines it."""
    seed_as_documented(f"sluice sample {seed} {position}")
    sample = module.dataset({}, "train")[index]
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], np.uint64)))
    return dict(module.transform({"images": sample["images"].numpy(), "labels": sample["labels"]}, generator))


@pytest.mark.parametrize(
    ("workers", "ranks", "start"), [(1, 1, 0), (2, 4, 40), (3, 2, 144)], ids=["one", "four ranks", "end of an epoch"]
)
def test_batches_equal_samples_that_are_read_one_by_one_in_this_process(
    module: Path, workers: int, ranks: int, start: int
) -> None:
    reference = load_reference(module)
    request = make_request(module, workers=workers, seed=5, checks_samples=True)
    rank = ranks - 1
    rows = 16 // ranks
    samples = DatasetSamples(request, rows)
    sampler = GlobalOrderSampler(
        samples, global_batch=16, seed=5, samples_consumed=start, num_replicas=ranks, rank=rank
    )
    torch_state = torch.random.get_rng_state()
    with DatasetLoader(samples, sampler, CPU) as batches:
        batch_list = [next(batches) for _ in range(5)]
    assert torch.equal(torch.random.get_rng_state(), torch_state), "reading must not change the model's random numbers"
    for step, batch in enumerate(batch_list):
        first = start + 16 * step + rank * rows
        for i, index in enumerate(compute_index_range(5, first, rows, 150)):
            expected = read_in_this_process(reference, 5, int(index), first + i)
            assert np.array_equal(batch["images"][i].numpy(), expected["images"])
            assert batch["labels"][i] == index % 8


def test_held_out_samples_depend_only_on_their_numbers(module: Path) -> None:
    reference = load_reference(module).dataset({}, "held_out")
    samples = DatasetSamples(make_request(module, "held_out", workers=2, checks_samples=True), rows=5)
    try:
        arrays = samples.read(np.arange(24)[::-1])
    finally:
        samples.close()
    expected = np.stack([reference[i]["images"].numpy()[:, 2:18, 2:18] for i in reversed(range(24))])
    assert np.array_equal(arrays["images"], expected)
    assert arrays["labels"].tolist() == [i % 8 for i in reversed(range(24))]


def test_a_small_batch_and_many_workers_and_a_finite_sampler(module: Path) -> None:
    request = make_request(module, workers=4)
    numbers = [np.array([[i], [i]]) for i in range(7)]
    with DatasetLoader(DatasetSamples(request, 1), numbers, CPU) as batches:
        assert [int(batch["labels"][0]) for batch in batches] == [0, 1, 2, 3, 4, 5, 6]
        with pytest.raises(StopIteration):
            next(batches)


def test_stop_signals_do_not_end_the_workers(module: Path) -> None:
    request = make_request(module, workers=2)
    samples = DatasetSamples(request, 4)
    sampler = GlobalOrderSampler(samples, global_batch=4, seed=5, num_replicas=1, rank=0)
    with DatasetLoader(samples, sampler, CPU) as batches:
        # The server may not have started yet, so the first signals arrive while Python starts.
        for number in IGNORED_SIGNALS:
            for process in list_data_processes(psutil.Process()):
                process.send_signal(number)
        next(batches)
        for number in IGNORED_SIGNALS:
            for process in list_data_processes(psutil.Process()):
                process.send_signal(number)
        for _ in range(2 * samples.open_pool().slots):  # All batches that were read ahead, and as many later ones.
            next(batches)
        assert len(list_data_processes(psutil.Process())) == 3


KILLED_PROGRAM = """\
import sys, time
from pathlib import Path
import numpy as np
import torch
from pipeline.data.dataset_pool import DatasetLoader, DatasetSamples
from tests.support.datasets import make_request

samples = DatasetSamples(make_request(Path(sys.argv[1]), workers=2, options={"count": 10**6}), 4)
loader = DatasetLoader(samples, (np.tile(np.arange(i, i + 4), (2, 1)) for i in range(0, 10**6, 4)), torch.device("cpu"))
next(loader)
print("reading", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["idle", "busy", "starting"])
def test_no_process_survives_a_killed_rank(tmp_path: Path, state: str) -> None:
    """The workers wait for tasks, compute in the user's code, or the server has just started."""
    source = DATASET_MODULE
    if state == "busy":
        source = source.replace(
            "        pixels =", "        while index > 100 and index < 10**6 - 1: pass\n        pixels ="
        )
    module = write_module(tmp_path, f"killed{next(NUMBERS)}", source)
    program = KILLED_PROGRAM if state != "starting" else KILLED_PROGRAM.replace("next(loader)", "")
    environment = {**os.environ, "PYTHONPATH": str(CODE_ROOT)}
    command = [sys.executable, "-c", program, str(module)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as rank:
        assert rank.stdout is not None
        try:
            assert rank.stdout.readline() == "reading\n"
            process = psutil.Process(rank.pid)
            if state != "starting":
                assert wait_until(lambda: len(list_data_processes(process)) == 3)
            if state == "busy":
                workers = [child for child in list_data_processes(process) if child.ppid() != rank.pid]
                times = [worker.cpu_times().user for worker in workers]
                assert wait_until(
                    lambda: all(
                        worker.cpu_times().user > before + 0.2 for worker, before in zip(workers, times, strict=True)
                    )
                )
            children = list_data_processes(process)
            assert children
        finally:
            rank.kill()
    assert wait_until(lambda: not any(_is_running(child) for child in children))


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- errors --------------------------------------------------------------------------------------------------


def read_batches(module: Path, entry: DatasetEntry | None = None, workers: int = 2) -> None:
    """Read samples 0 to 39 in the workers."""
    request = make_request(module, workers=workers, entry=entry, checks_samples=entry is not None)
    numbers = [np.tile(np.arange(i, i + 4), (2, 1)) for i in range(0, 40, 4)]
    with DatasetLoader(DatasetSamples(request, 4), numbers, CPU) as batches:
        for _ in batches:
            pass


def fail_at_sample_17(statement: str) -> str:
    """Return the source of a module whose dataset executes a statement for sample 17."""
    return DATASET_MODULE.replace(
        "        pixels =", f"        if index == 17:\n            {statement}\n        pixels ="
    )


def find_line(source: str, text: str) -> int:
    """Return the number of the line that contains a text."""
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


def test_an_error_of_the_dataset_names_the_sample_and_the_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = fail_at_sample_17("raise ValueError('not a JPEG')")
    module = write_module(tmp_path, f"failing{next(NUMBERS)}", source)
    line = find_line(source, "not a JPEG")
    with raises_error("data.dataset_failed", "sample 17", f"{module.name}:{line}", "ValueError: not a JPEG"):
        read_batches(module)
    log = capfd.readouterr().err
    assert f'{module.name}", line {line}' in log
    assert "dataset_worker.py" not in log and "torch/utils" not in log


def test_an_error_in_a_library_names_the_line_of_the_user(tmp_path: Path) -> None:
    source = fail_at_sample_17("return np.concatenate([])")
    module = write_module(tmp_path, f"failing{next(NUMBERS)}", source)
    with raises_error("data.dataset_failed", f"{module.name}:{find_line(source, 'concatenate')}", "ValueError"):
        read_batches(module)


@pytest.mark.parametrize(
    ("statement", "error_type", "expected_text"),
    [
        (f"raise OSError({errno.ESTALE}, 'stale', '/data/a.tar')", LostMountError, "/data/a.tar"),
        ("raise MemoryError('of the user')", MemoryError, "of the user"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", MemoryError, "data.workers"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", WorkerDiedError, "SIGSEGV"),
        ("import os; os._exit(3)", WorkerDiedError, "exit code 3"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL); signal.pause()", MemoryError, "server"),
    ],
)
def test_a_fault_that_is_no_mistake_of_the_user_keeps_its_meaning(
    tmp_path: Path, statement: str, error_type: type[Exception], expected_text: str
) -> None:
    module = write_module(tmp_path, f"faulty{next(NUMBERS)}", fail_at_sample_17(statement))
    with pytest.raises(error_type, match=expected_text) as raised:
        read_batches(module)
    assert type(raised.value) is error_type


def test_a_missing_file_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    module = write_module(tmp_path, f"missing{next(NUMBERS)}", fail_at_sample_17("open('/not/there')"))
    with raises_error("data.dataset_failed", "/not/there", "sample 17"):
        read_batches(module)


@pytest.mark.parametrize(
    ("statement", "expected_texts"),
    [
        ("return {'images': torch.zeros(1, 20, 20), 'labels': 1}", ["sample 17", "images", "float32", "uint8"]),
        (
            "return {'images': torch.zeros(1, 8, 20, dtype=torch.uint8), 'labels': 1}",
            ["sample 17", "(1, 8, 16)", "(1, 16, 16)"],
        ),
        ("return {'images': torch.zeros(1, 20, 20, dtype=torch.uint8)}", ["sample 17", "images", "labels"]),
        ("return torch.zeros(3)", ["sample 17", "Tensor", "dict"]),
        ("return {'images': torch.zeros(1, 20, 20, dtype=torch.uint8), 'labels': 'a'}", ["sample 17", "labels", "str"]),
    ],
)
def test_a_sample_with_other_arrays_is_an_error(tmp_path: Path, statement: str, expected_texts: list[str]) -> None:
    module = write_module(tmp_path, f"other{next(NUMBERS)}", fail_at_sample_17(statement))
    with raises_error("data.invalid_dataset", *expected_texts):
        read_batches(module)


@pytest.mark.parametrize(
    ("original_text", "replacement", "code", "expected_texts"),
    [
        ("    return Images(options", "    return list, (options", "data.invalid_dataset", ["sample 0", "type"]),
        ("    return Images(options", "    return object() or (options", "data.invalid_dataset", ["object"]),
        ("def __len__", "def length", "data.invalid_dataset", ["__len__"]),
        ('"count", 150', '"count", 0', "data.invalid_dataset", ["train", "no samples"]),
        ("24, split", "0, split", "data.invalid_dataset", ["held_out", "data.held_out=0"]),
        ("options.get(", "options.gt(", "data.dataset_failed", ['dataset(options, "train")', "gt"]),
        ("def dataset(options, split)", "def dataset(options)", "data.dataset_failed", ["TypeError"]),
        ('"labels": index % 8', '"label": index % 8', "data.invalid_dataset", ["label", "images, labels"]),
        ('"labels": index % 8', '"labels": np.uint16(1)', "data.invalid_dataset", ["uint16", "int32"]),
        ('"labels": index % 8', '"labels": torch.zeros(1, dtype=torch.bfloat16)', "data.dataset_failed", ["sample 0"]),
    ],
)
def test_an_unusable_dataset_is_an_error_in_the_prepare_stage(
    tmp_path: Path, original_text: str, replacement: str, code: str, expected_texts: list[str]
) -> None:
    source = DATASET_MODULE.replace(original_text, replacement)
    assert source != DATASET_MODULE
    module = write_module(tmp_path, f"unusable{next(NUMBERS)}", source)
    with raises_error(code, *expected_texts):
        make_request(module)


def test_another_dataset_than_that_of_the_prepare_stage_is_an_error(tmp_path: Path) -> None:
    entry = make_request(write_module(tmp_path, f"original{next(NUMBERS)}")).entry
    assert entry is not None
    shorter = write_module(tmp_path, f"shorter{next(NUMBERS)}", DATASET_MODULE.replace("150", "149"))
    with raises_error("data.dataset_changed", "149", "150"):
        read_batches(shorter, entry)
    other = write_module(
        tmp_path, f"other{next(NUMBERS)}", DATASET_MODULE.replace("default_rng(index)", "default_rng(9)")
    )
    with raises_error("data.dataset_changed", "first or the last sample", "data.verify=sizes"):
        read_batches(other, entry)


def test_the_hash_of_a_dataset_covers_what_identifies_its_samples(tmp_path: Path) -> None:
    entry = make_request(write_module(tmp_path, f"hashed{next(NUMBERS)}")).entry
    assert entry is not None
    sources = {"changed": "default_rng(index + (index == 149))", "version": "default_rng(index)"}
    module = write_module(
        tmp_path, f"hashed{next(NUMBERS)}", DATASET_MODULE.replace("default_rng(index)", sources["changed"])
    )
    assert make_request(module).entry != entry
    versioned = write_module(tmp_path, f"hashed{next(NUMBERS)}", DATASET_MODULE + "\nDATASET_VERSION = 2\n")
    assert make_request(versioned).entry == entry.model_copy(update={"version": "2"})
    hashes = {entry.sha256, entry.model_copy(update={"version": "2"}).sha256}
    hashes.add(entry.model_copy(update={"samples": 151}).sha256)
    arrays = {**entry.arrays, "labels": SampleArray(dtype="int32", shape=())}
    hashes.add(entry.model_copy(update={"arrays": arrays}).sha256)
    assert len(hashes) == 4
    assert entry.model_copy(update={"sources": ("/elsewhere",)}).sha256 == entry.sha256


# -- iterable datasets ---------------------------------------------------------------------------------------


def open_stream(
    request: Any, rank: int, ranks: int, consumed: int = 0, global_batch: int = 12, excluded: Any = ()
) -> DatasetLoader:
    """Return a loader of an iterable dataset, for one of several data-parallel ranks."""
    samples = DatasetSamples(replace(request, stream=(rank, ranks)), global_batch // ranks)
    sampler = GlobalOrderSampler(
        samples,
        global_batch=global_batch,
        seed=5,
        samples_consumed=consumed,
        excluded_ranges=excluded,
        num_replicas=ranks,
        rank=rank,
        order=lambda positions: positions,
    )
    return DatasetLoader(samples, sampler, CPU, StreamOrder(global_batch, rank, ranks))


@pytest.mark.parametrize(("workers", "ranks"), [pytest.param(1, 1, marks=pytest.mark.story), (3, 2)])
def test_an_iterable_dataset_continues_after_any_step(tmp_path: Path, workers: int, ranks: int) -> None:
    """150 samples are divided among all workers. Each worker begins again after its part."""
    module = write_module(tmp_path, f"stream{next(NUMBERS)}", ITERABLE_MODULE)
    request = make_request(module, workers=workers, seed=5)
    reference = load_reference(module)
    steps = 30
    rank = ranks - 1
    rows = 12 // ranks
    with open_stream(request, rank, ranks) as loader:
        batches = [next(loader) for _ in range(steps)]
    total_workers = workers * ranks
    images = reference.Images(150, True)
    for step, batch in enumerate(batches):
        for row in range(rows):
            drawn = step * rows + row  # samples that this rank has drawn before this one
            worker = rank * workers + drawn % workers
            own = range(worker, 150, total_workers)
            seed_as_documented(f"sluice sample 5 {12 * step + rank * rows + row}")
            expected = images[own[drawn // workers % len(own)]]
            assert torch.equal(batch["images"][row], expected["images"]), (step, row)
    for stop in (1, 25):  # The workers read ahead, which must not change the states after `stop` batches.
        with open_stream(request, rank, ranks) as loader:
            for _ in range(stop):
                next(loader)
            states = loader.states
        expected_drawn = [len(range(number, rows * stop, workers)) for number in range(workers)]
        assert [load_state(state)["drawn"] for state in states] == expected_drawn
        with open_stream(replace(request, states=states), rank, ranks, 12 * stop) as loader:
            for step in range(stop, stop + 3):
                assert torch.equal(next(loader)["images"], batches[step]["images"]), (stop, step)
    excluded = [(12 * stop, 24)]  # Steps that the run excludes are read and dropped.
    with open_stream(replace(request, states=states), rank, ranks, 12 * stop, excluded=excluded) as loader:
        assert torch.equal(next(loader)["images"], batches[stop + 2]["images"])


def test_saved_states_fit_only_the_same_number_of_ranks_and_workers() -> None:
    saved = {"workers": 1, "states": [["YQ=="], ["Yg=="]]}
    assert select_states(saved, 7, 1, 2, 1) == [b"b"]
    with raises_error("data.other_streams", "checkpoint 7", "2 data-parallel ranks", "4 ranks"):
        select_states(saved, 7, 1, 4, 1)
    with raises_error("data.other_streams", "data.workers=1", "3 workers"):
        select_states(saved, 7, 1, 2, 3)


@pytest.mark.parametrize(
    ("original_text", "replacement", "expected_texts"),
    [
        ("def state_dict", "def get_state", ["without state_dict", "__getitem__"]),
        ("def load_state_dict", "def set_state", ["without load_state_dict"]),
        ("else map_style(options, split)", "else Stream(9)", ["held_out", "__getitem__"]),
        ("self.next < len(own)", "False", ["no samples"]),
    ],
)
def test_an_unusable_iterable_dataset_is_an_error(
    tmp_path: Path, original_text: str, replacement: str, expected_texts: list[str]
) -> None:
    assert original_text in ITERABLE_MODULE
    source = ITERABLE_MODULE.replace(original_text, replacement)
    with raises_error("data.invalid_dataset", *expected_texts):
        make_request(write_module(tmp_path, f"unusable{next(NUMBERS)}", source))


def test_a_state_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    source = ITERABLE_MODULE.replace(
        'return {"next": self.next}', 'return {"next": self.next, "samples": self.samples}'
    )
    request = make_request(write_module(tmp_path, f"state{next(NUMBERS)}", source))
    with open_stream(request, 0, 1) as loader, raises_error("data.dataset_failed", "state_dict", "Images"):
        next(loader)


def test_describe_dataset_without_held_out_samples(module: Path) -> None:
    model = find_user_model(module.stem, [module.parent])
    fields = describe_dataset(model, module.parent, {"count": 9}, has_held_out=False)
    assert (fields["samples"], fields["held_out_samples"], [*fields["fingerprints"]]) == (9, 0, ["train"])
