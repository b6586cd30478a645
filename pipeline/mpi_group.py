# mypy: disable-error-code="override, assignment"
"""`MpiGroup`: a torch.distributed process group on an MPI communicator of its own.

It has every operation that DDP, FSDP2, DTensor, pipelines, checkpoints and object collectives call, under the names
of torch 2.11 (`_allgather_base`, …) and of 2.13 (`all_gather_single`, …). torch calls these methods from Python
and, through pybind11's trampolines (torch/csrc/distributed/c10d/PyProcessGroup.hpp), from C++. A method only checks
its arguments and describes the MPI call; pipeline/mpi_engine.py says when that runs. Groups are made in
pipeline/mpi.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from mpi4py import MPI

from pipeline.mpi_engine import AllWork, Lane, Messages, MpiError, MpiWork
from pipeline.mpi_ops import Staged, packed, reduce_with, reduction, rows, sizes, spec, unpack

NAME = "mpi4py"
"""The backend's name in torch; `mpi` is torch's own."""

MESSAGES = Messages()
"""All point-to-point messages of this process."""


class MpiGroup(dist.ProcessGroup):
    """A process group with an MPI communicator of its own.

    Signatures are torch's (torch/csrc/distributed/c10d/ProcessGroup.hpp); each returns an `MpiWork`. Buffers are
    kept alive until the work is done. Tensors may be strided, and of any type where nothing is reduced.
    """

    accurate = False
    observer: ClassVar[Callable[[MpiGroup, str, list[torch.Tensor], MpiWork, float], None] | None] = None
    """Is told of each operation that moves data: its group, kind, results, work, and perf_counter at its start."""

    def __init__(self, comm: MPI.Intracomm, name: str, store: dist.Store, ranks: list[int], timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm, self._timeout = comm, timeout
        self.lane = Lane(comm, name, store, ranks)
        self._ranks = ranks
        self._coalesced: list[MpiWork] | None = None

    # -- collectives -------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Reduce each tensor over the ranks, in place."""
        op = opts.reduceOp if opts else dist.ReduceOp.SUM

        def run() -> None:
            for tensor in tensors:
                staged = Staged(tensor)
                self._reduce(self.comm.Allreduce, staged.host, staged.host, op)
                staged.back()

        return self._submit("all_reduce", run, tensors, opts, sizes(tensors), op)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Rank `opts.rootRank`'s tensors, everywhere."""
        root = opts.rootRank if opts else 0

        def run() -> None:
            for tensor in tensors:
                staged = Staged(tensor, read=self.rank() == root)
                self.comm.Bcast(spec(staged.host), root)
                if self.rank() != root:
                    staged.back()

        return self._submit("broadcast", run, tensors, opts, (root, sizes(tensors)))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> MpiWork:
        """Reduce to rank `opts.rootRank`; elsewhere the tensors stay as they are."""
        root, op = opts.rootRank, opts.reduceOp

        def run() -> None:
            for tensor in tensors:
                staged = Staged(tensor)
                target = staged.host if self.rank() == root else torch.empty_like(staged.host)
                self._reduce(lambda a, b, o: self.comm.Reduce(a, b, o, root), staged.host, target, op)
                if self.rank() == root:
                    staged.back()

        return self._submit("reduce", run, tensors, opts, (root, sizes(tensors)), op)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """outputs[i][r] = rank r's inputs[i]; ranks may have different sizes."""
        self._one_each(outputs, inputs)

        def run() -> None:
            for parts, tensor in zip(outputs, inputs, strict=True):
                counts = [part.numel() for part in parts]
                flat = tensor.new_empty(sum(counts), device="cpu")
                self.comm.Allgatherv(spec(Staged(tensor).host), spec(flat, counts))
                unpack(flat, parts)

        results = [part for parts in outputs for part in parts]
        return self._submit("all_gather", run, results, opts, sizes(results))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """outputs[i] = every rank's inputs[i], one after the other."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check(output.numel() == tensor.numel() * self.size(), "all_gather", output, tensor)

        def run() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                staged = Staged(output, read=False)
                self.comm.Allgather(spec(Staged(tensor).host), spec(staged.host, tensor.numel()))
                staged.back()

        return self._submit("all_gather_single", run, outputs, opts, sizes(outputs))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        """`all_gather_single_coalesced` of one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> MpiWork:
        """On rank `opts.rootRank`: outputs[0][r] = rank r's inputs[0], all of one size."""
        root, tensor = opts.rootRank, inputs[0]
        if self.rank() == root:
            self._one_each(outputs, inputs)

        def run() -> None:
            host = Staged(tensor).host
            if self.rank() != root:
                self.comm.Gatherv(spec(host), None, root)
                return
            counts = [part.numel() for part in outputs[0]]
            flat = torch.empty(sum(counts), dtype=tensor.dtype)
            self.comm.Gatherv(spec(host), spec(flat, counts), root)
            unpack(flat, outputs[0])

        results = outputs[0] if self.rank() == root else [tensor]
        return self._submit("gather", run, results, opts, (root, sizes(inputs)))

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> MpiWork:
        """outputs[0] = the root's inputs[0][r] on rank r, all of one size."""
        root = opts.rootRank
        if self.rank() == root:
            self._one_each(inputs, outputs)

        def run() -> None:
            staged = Staged(outputs[0], read=False)
            send = None
            if self.rank() == root:
                flat = packed(inputs[0])
                send = spec(flat, [part.numel() for part in inputs[0]])
            self.comm.Scatterv(send, spec(staged.host), root)
            staged.back()

        return self._submit("scatter", run, outputs, opts, (root, sizes(outputs)))

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> MpiWork:
        """outputs[i] = the reduction of every rank's inputs[i][own rank]; ranks may have different sizes."""
        op = opts.reduceOp if opts else dist.ReduceOp.SUM
        self._one_each(inputs, outputs)

        def run() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                counts = [part.numel() for part in parts]
                staged = Staged(output, read=False)

                def call(a: Any, b: Any, o: MPI.Op, counts: list[int] = counts) -> None:
                    self.comm.Reduce_scatter(a, b, counts, o)

                self._reduce(call, packed(parts), staged.host, op)
                staged.back()

        parts = [part for row in inputs for part in row]
        return self._submit("reduce_scatter", run, outputs, opts, sizes(parts), op)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """outputs[i] = this rank's part of the reduction of every rank's inputs[i]."""
        op = opts.reduceOp if opts else dist.ReduceOp.SUM
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check(tensor.numel() == output.numel() * self.size(), "reduce_scatter", output, tensor)

        def block(send: Any, receive: Any, o: MPI.Op) -> None:  # mpi4py wants the size of a block in both
            self.comm.Reduce_scatter_block([send[0], *receive[1:]], receive, o)

        def run() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                staged = Staged(output, read=False)
                self._reduce(block, Staged(tensor).host, staged.host, op)
                staged.back()

        return self._submit("reduce_scatter_single", run, outputs, opts, sizes(outputs), op)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        """`reduce_scatter_single_coalesced` of one tensor."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], input_splits: list[int],
        opts: Any = None,
    ) -> MpiWork:  # fmt: skip
        """Rows of `tensor` to the ranks, rows from the ranks to `output`; empty splits mean equal parts."""
        send, receive = rows(tensor, input_splits, self.size()), rows(output, output_splits, self.size())

        def run() -> None:
            self._check_counts(send, receive)
            staged = Staged(output, read=False)
            self.comm.Alltoallv(spec(Staged(tensor).host, send), spec(staged.host, receive))
            staged.back()

        return self._submit("all_to_all_single", run, [output], opts, str(output.dtype))

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """outputs[r] = rank r's inputs[own rank]; any sizes."""
        self._one_each([outputs], inputs[:1], sized=False)
        self._one_each([inputs], outputs[:1], sized=False)

        def run() -> None:
            send, receive = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
            self._check_counts(send, receive)
            flat = torch.empty(sum(receive), dtype=outputs[0].dtype)
            source = packed(inputs)
            self.comm.Alltoallv(spec(source, send), spec(flat, receive))
            unpack(flat, outputs)

        return self._submit("all_to_all", run, outputs, opts, str(outputs[0].dtype))

    def barrier(self, opts: Any = None) -> MpiWork:
        """Wait for all ranks: the meeting before each collective is one."""
        return self._submit("barrier", lambda: None, [], opts, "")

    # torch 2.11's names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- messages ----------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MpiWork:
        """Send one tensor to a rank of this group."""
        host = Staged(tensors[0]).host
        work = self._message(f"send to rank {self._ranks[rank]}, tag {tag}", tensors)
        if MpiGroup.observer is not None:
            MpiGroup.observer(self, "send", tensors, work, time.perf_counter())
        request = self.comm.Isend(spec(host), rank, tag)
        MESSAGES.watch(request, work, lambda _, keep=host: None, self._timeout)  # type: ignore[misc]
        return work

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MpiWork:
        """Receive one tensor from a rank of this group, MPI.ANY_SOURCE for any."""
        tensor = tensors[0]
        staged = Staged(tensor, read=False)
        who = "any rank" if rank == MPI.ANY_SOURCE else f"rank {self._ranks[rank]}"
        work = self._message(f"receive from {who}, tag {tag}", tensors)

        def received(status: MPI.Status) -> None:
            if (came := status.Get_count(MPI.BYTE)) != tensor.nbytes:
                raise MpiError(f"{work.what}: {came} bytes came, {tensor.nbytes} were expected")
            work.sender = status.source
            staged.back()

        MESSAGES.watch(self.comm.Irecv(spec(staged.host), rank, tag), work, received, self._timeout)
        return work

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> MpiWork:
        """Receive one tensor from whoever sends first; `_source_rank()` of the work tells."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _message(self, what: str, tensors: list[torch.Tensor]) -> MpiWork:
        if tensors[0].is_cuda:  # MPI knows nothing of streams
            torch.cuda.current_stream(tensors[0].device).synchronize()
        work = MpiWork(f"{what}, in group {self.lane.name}", tensors)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # -- helpers -----------------------------------------------------------------------------------------

    def _submit(
        self, name: str, run: Callable[[], None], results: list[torch.Tensor], opts: Any, facts: object,
        op: Any = None,
    ) -> MpiWork:  # fmt: skip
        """Queue a collective whose `facts` must be the same on all ranks."""
        if op is not None:
            for tensor in results:
                reduction(op, tensor.dtype)  # what cannot be reduced is refused here, before anybody waits
        timeout = opts.timeout if opts is not None and opts.timeout > timedelta(0) else self._timeout
        signature = f"{name} {facts}" if op is None else f"{name} {getattr(op, 'op', op)} {facts}"
        started = time.perf_counter()
        work = self.lane.submit(signature, run, results, timeout)
        if MpiGroup.observer is not None and results:
            MpiGroup.observer(self, name.removesuffix("_single"), results, work, started)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reduce(
        self, call: Callable[[Any, Any, MPI.Op], None], source: torch.Tensor, target: torch.Tensor, op: Any
    ) -> None:
        reduce_with(call, source, target, op, self.size(), self.accurate)

    def _check(self, good: bool, name: str, output: torch.Tensor, tensor: torch.Tensor) -> None:
        if not good or output.dtype != tensor.dtype:
            raise ValueError(
                f"{name} over {self.size()} ranks: {output.dtype} {tuple(output.shape)} does not go with "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )

    def _one_each(
        self, lists: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], sized: bool = True
    ) -> None:
        """Check that each list has a tensor per rank, and that this rank's is of the size (`sized`) of `tensors[i]`."""
        for parts, tensor in zip(lists, tensors, strict=True):
            if len(parts) != self.size():
                raise ValueError(f"{len(parts)} tensors for the {self.size()} ranks of group {self.lane.name}")
            own = parts[self.rank()]
            self._check(not sized or own.numel() == tensor.numel(), "a collective", own, tensor)

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

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        parts, self._coalesced = self._coalesced or [], None
        return AllWork(parts)

    def shutdown(self) -> None:
        """Run what is queued, then free the communicator."""
        self.lane.close()

    def abort(self) -> None:
        """End all ranks of the program now."""
        MPI.COMM_WORLD.Abort(1)

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of operations that bring none of their own."""
        self._timeout = timeout

    def getBackendName(self) -> str:
        """Torch's name for this kind of group."""
        return NAME

    def getGroupName(self) -> str:
        """The name that torch gave this group."""
        return self.lane.name
