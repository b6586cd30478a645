# mypy: disable-error-code="override, assignment"
"""`MpiGroup`: a torch.distributed process group on an MPI communicator of its own.

It has every operation that DDP, FSDP2, DTensor, pipelines, checkpoints and object collectives call, under the names
of torch 2.11 (`_allgather_base`, …) and of 2.13 (`all_gather_single`, …). torch calls these methods from Python
and, through pybind11's trampolines (torch/csrc/distributed/c10d/PyProcessGroup.hpp), from C++. A method only checks
its arguments and describes the MPI call; pipeline/mpi/lane.py says when that runs. Groups are made in
pipeline/mpi/start.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from pipeline.mpi.lane import Lane, Messages
from pipeline.mpi.ops import Staged, reduce_with, reduction, rows, sizes, spec
from pipeline.mpi.work import AllWork, MpiError, MpiWork

NAME = "mpi4py"
"""The backend's name in torch; `mpi` is torch's own."""

MESSAGES = Messages()
"""All point-to-point messages of this process."""

MOST = 2**31 - 1
"""The most elements that a rank may give to one MPI call, which counts in C's int."""


class MpiGroup(dist.ProcessGroup):
    """A process group with an MPI communicator of its own.

    Signatures are torch's (torch/csrc/distributed/c10d/ProcessGroup.hpp); each returns an `MpiWork`. Buffers are
    kept alive until the work is done. Tensors may be strided, and of any type where nothing is reduced.
    """

    accurate = False

    def __init__(self, comm: MPI.Intracomm, name: str, store: dist.Store, ranks: list[int], timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm, self._timeout = comm, timeout
        self.lane = Lane(comm, name, store, ranks)
        self._ranks = ranks
        self._coalesced: list[MpiWork] | None = None

    # -- collectives -------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Reduce each tensor over the ranks, in place."""
        op: Any = opts.reduceOp if opts else dist.ReduceOp.SUM

        def run() -> Iterator[None]:
            everything = [Staged(tensor, reduces=True, accurate=self.accurate) for tensor in tensors]
            yield
            for staged in everything:
                reduce_with(self.comm.Allreduce, staged.host, staged.host, op, self.size())
                staged.back()

        return self._submit("all_reduce", run, tensors, opts, sizes(tensors), op)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Rank `opts.rootRank`'s tensors, everywhere."""
        root = opts.rootRank if opts else 0

        def run() -> Iterator[None]:
            everything = [Staged(tensor, read=self.rank() == root) for tensor in tensors]
            yield
            for staged in everything:
                self.comm.Bcast(spec(staged.host), root)
                if self.rank() != root:
                    staged.back()

        return self._submit("broadcast", run, tensors, opts, (root, sizes(tensors)))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> MpiWork:
        """Reduce to rank `opts.rootRank`; elsewhere the tensors stay as they are."""
        root, op = opts.rootRank, opts.reduceOp

        def run() -> Iterator[None]:
            everything = [Staged(tensor, reduces=True, accurate=self.accurate) for tensor in tensors]
            yield
            for staged in everything:
                if self.rank() == root:
                    reduce_with(
                        lambda a, b, o: self.comm.Reduce(a, b, o, root), staged.host, staged.host, op, self.size()
                    )
                    staged.back()
                else:
                    self.comm.Reduce(spec(staged.host), None, reduction(op, staged.host.dtype), root)

        return self._submit("reduce", run, tensors, opts, (root, sizes(tensors)), op)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """outputs[i][r] = rank r's inputs[i]; ranks may have different sizes."""
        self._one_each(outputs, inputs)

        def run() -> Iterator[None]:
            pairs = [(Staged(t), Staged(parts, read=False)) for parts, t in zip(outputs, inputs, strict=True)]
            yield
            for own, everyone in pairs:
                self.comm.Allgatherv(spec(own.host), spec(everyone.host, everyone.counts))
                everyone.back()

        results = [part for parts in outputs for part in parts]
        return self._submit("all_gather", run, results, opts, sizes(results))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """outputs[i] = every rank's inputs[i], one after the other."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check(output.numel() == tensor.numel() * self.size(), "all_gather", output, tensor)

        def run() -> Iterator[None]:
            pairs = [(Staged(t), Staged(output, read=False)) for output, t in zip(outputs, inputs, strict=True)]
            yield
            for own, everyone in pairs:
                place = everyone.host.data_ptr() + self.rank() * own.host.nbytes
                send = MPI.IN_PLACE if own.host.data_ptr() == place else spec(own.host)  # as FSDP2 has it
                self.comm.Allgather(send, spec(everyone.host, own.host.numel()))
                everyone.back()

        return self._submit("all_gather_single", run, outputs, opts, sizes(outputs))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        """`all_gather_single_coalesced` of one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> MpiWork:
        """On rank `opts.rootRank`: outputs[0][r] = rank r's inputs[0], all of one size."""
        root, tensor = opts.rootRank, inputs[0]
        if self.rank() == root:
            self._one_each(outputs, inputs)

        def run() -> Iterator[None]:
            own, everyone = Staged(tensor), Staged(outputs[0], read=False) if self.rank() == root else None
            yield
            receive = None if everyone is None else spec(everyone.host, everyone.counts)
            self.comm.Gatherv(spec(own.host), receive, root)
            if everyone is not None:
                everyone.back()

        results = outputs[0] if self.rank() == root else [tensor]
        return self._submit("gather", run, results, opts, (root, sizes(inputs)))

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> MpiWork:
        """outputs[0] = the root's inputs[0][r] on rank r, all of one size."""
        root = opts.rootRank
        if self.rank() == root:
            self._one_each(inputs, outputs)

        def run() -> Iterator[None]:
            own, everyone = Staged(outputs[0], read=False), Staged(inputs[0]) if self.rank() == root else None
            yield
            send = None if everyone is None else spec(everyone.host, everyone.counts)
            self.comm.Scatterv(send, spec(own.host), root)
            own.back()

        return self._submit("scatter", run, outputs, opts, (root, sizes(outputs)))

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> MpiWork:
        """outputs[i] = the reduction of every rank's inputs[i][own rank]; ranks may have different sizes."""
        op: Any = opts.reduceOp if opts else dist.ReduceOp.SUM
        self._one_each(inputs, outputs)

        def run() -> Iterator[None]:
            pairs = self._pairs(outputs, inputs)
            yield
            for staged, everyone in pairs:

                def call(a: Any, b: Any, o: MPI.Op, everyone: Staged = everyone) -> None:
                    self.comm.Reduce_scatter(a, b, everyone.counts, o)

                reduce_with(call, everyone.host, staged.host, op, self.size())
                staged.back()

        parts = [part for row in inputs for part in row]
        return self._submit("reduce_scatter", run, outputs, opts, sizes(parts), op)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """outputs[i] = this rank's part of the reduction of every rank's inputs[i]."""
        op: Any = opts.reduceOp if opts else dist.ReduceOp.SUM
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check(tensor.numel() == output.numel() * self.size(), "reduce_scatter", output, tensor)

        def block(send: Any, receive: Any, o: MPI.Op) -> None:  # mpi4py wants the size of a block in both
            self.comm.Reduce_scatter_block([send[0], *receive[1:]], receive, o)

        def run() -> Iterator[None]:
            pairs = self._pairs(outputs, inputs)
            yield
            for staged, everyone in pairs:
                reduce_with(block, everyone.host, staged.host, op, self.size())
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

        def run() -> Iterator[None]:
            source, staged = Staged(tensor), Staged(output, read=False)
            yield
            self._check_counts(send, receive)
            self.comm.Alltoallv(spec(source.host, send), spec(staged.host, receive))
            staged.back()

        return self._submit("all_to_all_single", run, [output], opts, str(output.dtype))

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """outputs[r] = rank r's inputs[own rank]; any sizes."""
        self._one_each([outputs], inputs[:1], sized=False)
        self._one_each([inputs], outputs[:1], sized=False)

        def run() -> Iterator[None]:
            source, staged = Staged(inputs), Staged(outputs, read=False)
            yield
            self._check_counts(source.counts, staged.counts)
            self.comm.Alltoallv(spec(source.host, source.counts), spec(staged.host, staged.counts))
            staged.back()

        return self._submit("all_to_all", run, outputs, opts, str(outputs[0].dtype))

    def barrier(self, opts: Any = None) -> MpiWork:
        """Wait for all ranks: the meeting before each collective is one."""
        return self._submit("barrier", lambda: iter([None]), [], opts, "")

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
        request = self.comm.Isend(spec(host), rank, tag)
        MESSAGES.watch(self.lane, request, work, host, None, self._timeout)
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

        request = self.comm.Irecv(spec(staged.host), rank, tag)
        MESSAGES.watch(self.lane, request, work, staged.host, received, self._timeout)
        return work

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> MpiWork:
        """Receive one tensor from whoever sends first; `_source_rank()` of the work tells."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _message(self, what: str, tensors: list[torch.Tensor]) -> MpiWork:
        self.lane.check()
        if tensors[0].is_cuda:  # MPI knows nothing of streams
            torch.cuda.current_stream(tensors[0].device).synchronize()
        work = MpiWork(f"{what}, in group {self.lane.name}", tensors)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # -- helpers -----------------------------------------------------------------------------------------

    def _submit(
        self, name: str, run: Callable[[], Iterator[None]], results: list[torch.Tensor], opts: Any, facts: object,
        op: Any = None,
    ) -> MpiWork:  # fmt: skip
        """Queue a collective whose `facts` must be the same on all ranks."""
        if op is not None:
            for tensor in results:
                reduction(op, tensor.dtype)  # what cannot be reduced is refused here, before anybody waits
        most = MOST * (self.size() if name == "all_gather_single" else 1)
        for tensor in results:
            if tensor.numel() > most:
                raise ValueError(f"{name} of {tensor.numel():,} elements: MPI takes {most:,} at most; cut the tensor")
        timeout = opts.timeout if opts is not None and opts.timeout > timedelta(0) else self._timeout
        signature = f"{name} {facts}" if op is None else f"{name} {getattr(op, 'op', op)} {facts}"
        work = self.lane.submit(signature, run, results, timeout)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _pairs(
        self, outputs: list[torch.Tensor], inputs: Sequence[torch.Tensor | list[torch.Tensor]]
    ) -> list[tuple[Staged, Staged]]:
        """Outputs and inputs of a reduce-scatter, as MPI can use them."""
        how = {"reduces": True, "accurate": self.accurate}
        return [(Staged(o, read=False, **how), Staged(i, **how)) for o, i in zip(outputs, inputs, strict=True)]

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
