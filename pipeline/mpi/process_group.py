# mypy: disable-error-code="override, assignment"
"""`MpiGroup`: a torch.distributed process group on an MPI communicator of its own.

It has every operation that DDP, FSDP2, DTensor, pipelines, checkpoints and object collectives call, under the names
of torch 2.11 (`_allgather_base`, …) and of 2.13 (`all_gather_single`, …). torch calls these methods from Python
and, through pybind11's trampolines (torch/csrc/distributed/c10d/PyProcessGroup.hpp), from C++. A method only checks
its arguments and describes the MPI call; pipeline/mpi/worker_thread.py says when that runs. Groups are made in
pipeline/mpi/backend.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from pipeline.mpi.ops import HostBuffer, Operand, describe_tensors, list_tensors, mpi_reduction, split_rows
from pipeline.mpi.work import MpiError, MpiWork
from pipeline.mpi.worker_thread import CollectiveThread, MessageWatcher, PendingMessage

BACKEND_NAME = "mpi4py"
"""The backend's name in torch; `mpi` is torch's own."""

MESSAGE_WATCHER = MessageWatcher()
"""All point-to-point messages of this process."""

MAX_ELEMENTS = 2**31 - 1
"""The most elements that a rank may give to one MPI call, which counts in C's int."""


class MpiProcessGroup(dist.ProcessGroup):
    """A process group with an MPI communicator of its own.

    Signatures are torch's (torch/csrc/distributed/c10d/ProcessGroup.hpp); each returns an `MpiWork`. Buffers are
    kept alive until the work is done. Tensors may be strided, and of any type where nothing is reduced.
    """

    accurate = False

    def __init__(self, comm: MPI.Intracomm, name: str, store: dist.Store, ranks: list[int], timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm, self._ranks, self._timeout = comm, ranks, timeout
        self.lane = CollectiveThread(comm, name, store, ranks)

    # -- collectives -------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Reduce each tensor over the ranks, in place."""
        op: Any = opts.reduceOp.op if opts else dist.ReduceOp.SUM

        def call(both: HostBuffer, _: HostBuffer) -> None:
            self.comm.Allreduce(MPI.IN_PLACE, both.spec(), mpi_reduction(op, both.host.dtype))

        pairs = [(tensor, tensor) for tensor in tensors]
        return self._collective("all_reduce", call, pairs, opts, f"{op} {describe_tensors(tensors)}", op)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Rank `opts.rootRank`'s tensors, everywhere."""
        root = opts.rootRank if opts else 0

        def call(source: HostBuffer, target: HostBuffer) -> None:
            self.comm.Bcast(source.spec() or target.spec(), root)

        pairs: list[tuple[Operand, Operand]] = [(t, ()) if self.rank() == root else ((), t) for t in tensors]
        return self._collective("broadcast", call, pairs, opts, f"from {root} {describe_tensors(tensors)}")

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """outputs[i][r] = rank r's inputs[i]; ranks may have different sizes."""

        def call(own: HostBuffer, everyone: HostBuffer) -> None:
            self.comm.Allgatherv(own.spec(), everyone.spec())

        self._check_lists(outputs, inputs)
        facts = " ".join(describe_tensors(parts) for parts in outputs)
        return self._collective("all_gather", call, [*zip(inputs, outputs, strict=True)], opts, facts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """outputs[i] = every rank's inputs[i], one after the other."""

        def call(own: HostBuffer, everyone: HostBuffer) -> None:
            place = everyone.host.data_ptr() + self.rank() * own.host.nbytes
            send = MPI.IN_PLACE if own.host.data_ptr() == place else own.spec()  # as FSDP2 has it
            self.comm.Allgather(send, everyone.spec(own.counts))

        for output, tensor in zip(outputs, inputs, strict=True):
            self._check("all_gather", output, tensor, self.size())
        pairs = [*zip(inputs, outputs, strict=True)]
        return self._collective("all_gather_single", call, pairs, opts, describe_tensors(outputs))

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> MpiWork:
        """On rank `opts.rootRank`: outputs[0][r] = rank r's inputs[0], all of one size."""

        def call(own: HostBuffer, everyone: HostBuffer) -> None:
            self.comm.Gatherv(own.spec(), everyone.spec(), opts.rootRank)

        self._check_lists(outputs, inputs[: len(outputs)])
        pair = (inputs[0], outputs[0] if outputs else ())
        return self._collective("gather", call, [pair], opts, f"to {opts.rootRank} {describe_tensors(inputs)}")

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> MpiWork:
        """outputs[0] = the root's inputs[0][r] on rank r, all of one size."""

        def call(everyone: HostBuffer, own: HostBuffer) -> None:
            self.comm.Scatterv(everyone.spec(), own.spec(), opts.rootRank)

        self._check_lists(inputs, outputs[: len(inputs)])
        pair = (inputs[0] if inputs else (), outputs[0])
        return self._collective("scatter", call, [pair], opts, f"from {opts.rootRank} {describe_tensors(outputs)}")

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """outputs[i] = this rank's part of the reduction of every rank's inputs[i]."""
        op: Any = opts.reduceOp.op if opts else dist.ReduceOp.SUM

        def call(everyone: HostBuffer, own: HostBuffer) -> None:  # mpi4py wants the size of a block in both
            self.comm.Reduce_scatter_block(everyone.spec(own.counts), own.spec(), mpi_reduction(op, own.host.dtype))

        for output, tensor in zip(outputs, inputs, strict=True):
            self._check("reduce_scatter", tensor, output, self.size())
        pairs = [*zip(inputs, outputs, strict=True)]
        return self._collective("reduce_scatter_single", call, pairs, opts, f"{op} {describe_tensors(outputs)}", op)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], input_splits: list[int],
        opts: Any = None,
    ) -> MpiWork:  # fmt: skip
        """Rows of `tensor` to the ranks, rows from the ranks to `output`; empty splits mean equal parts."""
        send, receive = split_rows(tensor, input_splits, self.size()), split_rows(output, output_splits, self.size())

        def call(source: HostBuffer, target: HostBuffer) -> None:
            self._check_counts(send, receive)
            self.comm.Alltoallv(source.spec(send), target.spec(receive))

        return self._collective("all_to_all_single", call, [(tensor, output)], opts, str(output.dtype))

    def barrier(self, opts: Any = None) -> MpiWork:
        """Wait for all ranks: the meeting before each collective is one."""
        return self._collective("barrier", lambda *_: None, [], opts, "")

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        """`all_gather_single_coalesced` of one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        """`reduce_scatter_single_coalesced` of one tensor."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    allreduce_coalesced = allreduce
    # torch 2.11's names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- messages ----------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MpiWork:
        """Send one tensor to a rank of this group."""
        return self._message("send to", self.comm.Isend, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MpiWork:
        """Receive one tensor from a rank of this group."""
        return self._message("receive from", self.comm.Irecv, tensors, rank, tag, receives=True)

    def _message(
        self, what: str, post: Callable[[Any, int, int], MPI.Request], tensors: list[torch.Tensor],
        rank: int, tag: int, receives: bool = False,
    ) -> MpiWork:  # fmt: skip
        self.lane.check()
        if tensors[0].is_cuda:  # MPI knows nothing of streams
            torch.cuda.current_stream(tensors[0].device).synchronize()
        work = MpiWork(
            f"{what} rank {self._ranks[rank]}, tag {tag}, in group {self.lane.name}", tensors, self.lane.name
        )
        staged = HostBuffer(tensors[0], read=not receives)
        request = post(staged.spec(), rank, tag)
        MESSAGE_WATCHER.watch(PendingMessage(self.lane, request, work, staged, receives, self._timeout.total_seconds()))
        return work

    # -- helpers -----------------------------------------------------------------------------------------

    def _collective(
        self, name: str, call: Callable[[HostBuffer, HostBuffer], object], pairs: Sequence[tuple[Operand, Operand]],
        opts: Any, facts: str, op: Any = None,
    ) -> MpiWork:  # fmt: skip
        """Queue a collective: `call` with each of `pairs`, what MPI reads and what it writes.

        A side is empty where this rank has nothing of the kind, and both are one tensor where MPI works in place.
        facts: must be the same on all ranks. op: what reduces the numbers.
        """
        results = [tensor for source, target in pairs for tensor in list_tensors(target) or list_tensors(source)]
        most = MAX_ELEMENTS * (self.size() if name == "all_gather_single" else 1)
        for tensor in results:
            if op is not None:
                mpi_reduction(op, tensor.dtype)  # what cannot be reduced is refused here, before anybody waits
            if tensor.numel() > most:
                raise ValueError(f"{name} of {tensor.numel():,} elements: MPI takes {most:,} at most; cut the tensor")

        def prepare() -> Callable[[], None]:
            staged = []
            for source, target in pairs:
                reads = HostBuffer(source, True, op is not None, self.accurate)
                writes = reads if target is source else HostBuffer(target, False, op is not None, self.accurate)
                staged.append((reads, writes))

            def move() -> None:
                for reads, writes in staged:
                    call(reads, writes)
                    if op == dist.ReduceOp.AVG:
                        writes.host.div_(self.size())
                    writes.back()

            return move

        timeout = opts.timeout if opts is not None and opts.timeout > timedelta(0) else self._timeout
        return self.lane.submit(f"{name} {facts}", prepare, results, timeout)

    def _check(self, name: str, many: torch.Tensor, one: torch.Tensor, times: int = 1) -> None:
        """Check that `many` is of the type of `one`, and `times` as large."""
        if many.numel() != one.numel() * times or many.dtype != one.dtype:
            raise ValueError(
                f"{name} over {self.size()} ranks: {many.dtype} {tuple(many.shape)} does not go with "
                f"{one.dtype} {tuple(one.shape)}"
            )

    def _check_lists(self, lists: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> None:
        """Check that each list has a tensor per rank, and that this rank's is of the size of `tensors[i]`."""
        for parts, tensor in zip(lists, tensors, strict=True):
            if len(parts) != self.size():
                raise ValueError(f"{len(parts)} tensors for the {self.size()} ranks of group {self.lane.name}")
            self._check("a collective", parts[self.rank()], tensor)

    def _check_counts(self, send: list[int], receive: list[int]) -> None:
        """With TORCH_DISTRIBUTED_DEBUG=DETAIL: every rank sends what the other expects, or all ranks raise MpiError.

        Other collectives are always checked, by their signatures; here each pair of ranks has a size of its own.
        """
        if dist.get_debug_level() != dist.DebugLevel.DETAIL:
            return
        table = self.comm.allgather((send, receive))
        for (a, (gives, _)), (b, (_, takes)) in itertools.product(enumerate(table), enumerate(table)):
            if gives[b] != takes[a]:
                raise MpiError(
                    f"all_to_all in group {self.lane.name}: rank {self._ranks[a]} sends {gives[b]} elements to rank "
                    f"{self._ranks[b]}, which expects {takes[a]}"
                )

    # -- what torch wants to know ------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Run what is queued, then free the communicator."""
        self.lane.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of operations that bring none of their own."""
        self._timeout = timeout

    def getBackendName(self) -> str:
        """Torch's name for this kind of group."""
        return BACKEND_NAME

    def getGroupName(self) -> str:
        """The name that torch gave this group."""
        return self.lane.name
