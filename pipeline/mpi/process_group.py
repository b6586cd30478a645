# mypy: disable-error-code="override, assignment"
"""`MpiProcessGroup`: a torch.distributed process group with its own MPI communicator.

The class implements every operation that torch's parallelism, checkpoints and object collectives call. Operations have
their names of torch 2.11 (`_allgather_base`, …) and of torch 2.13 (`all_gather_single`, …). torch calls these methods
from Python and, through pybind11's trampolines (torch/csrc/distributed/c10d/PyProcessGroup.hpp), from C++. A method
only checks its arguments and queues the operation. A thread then calls MPI (pipeline/mpi/worker_thread.py).
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
"""Name of the backend in torch. The name `mpi` is taken by torch's own backend."""

MESSAGE_WATCHER = MessageWatcher()
"""The watcher that completes all point-to-point messages of this process."""

MAX_ELEMENTS = 2**31 - 1
"""Maximum number of elements of one rank in an MPI call, because MPI's counts have C's type int."""


class MpiProcessGroup(dist.ProcessGroup):
    """A process group with its own MPI communicator.

    The signatures are those of torch (torch/csrc/distributed/c10d/ProcessGroup.hpp). Each operation returns an
    `MpiWork`. Buffers stay alive until the work is finished. Tensors may be strided. If an operation does not reduce
    values, its tensors may have any type.

    Args:
        comm: the communicator, which no other group uses.
        name: torch's name of the group.
        store: a store that only this group uses.
        ranks: global ranks of the group.
        timeout: default timeout of operations.
    """

    accurate_sums = False
    """Whether all groups sum fp16 and bf16 in fp32."""

    def __init__(self, comm: MPI.Intracomm, name: str, store: dist.Store, ranks: list[int], timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm = comm
        self._name = name
        self._ranks = ranks
        self._timeout = timeout
        self.collective_thread = CollectiveThread(comm, name, store, ranks)

    # -- collectives -------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Reduce each tensor over the ranks, in place. Without `opts`, the reduction is a sum."""
        op: Any = opts.reduceOp.op if opts else dist.ReduceOp.SUM

        def call(buffer: HostBuffer, _: HostBuffer) -> None:
            self.comm.Allreduce(MPI.IN_PLACE, buffer.buffer_spec(), mpi_reduction(op, buffer.host.dtype))

        pairs = [(tensor, tensor) for tensor in tensors]
        return self._submit("all_reduce", call, pairs, opts, f"{op} {describe_tensors(tensors)}", op)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Copy the tensors of rank `opts.rootRank` (default 0) into the tensors of all other ranks."""
        root = opts.rootRank if opts else 0

        def call(source: HostBuffer, target: HostBuffer) -> None:
            self.comm.Bcast(source.buffer_spec() or target.buffer_spec(), root)

        pairs: list[tuple[Operand, Operand]] = [(t, ()) if self.rank() == root else ((), t) for t in tensors]
        return self._submit("broadcast", call, pairs, opts, f"from {root} {describe_tensors(tensors)}")

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Set outputs[i][r] to inputs[i] of rank r. The sizes of inputs may differ between ranks."""

        def call(local: HostBuffer, all_ranks: HostBuffer) -> None:
            self.comm.Allgatherv(local.buffer_spec(), all_ranks.buffer_spec())

        self._check_lists(outputs, inputs)
        facts = " ".join(describe_tensors(tensors) for tensors in outputs)
        return self._submit("all_gather", call, [*zip(inputs, outputs, strict=True)], opts, facts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """Set outputs[i] to the concatenated inputs[i] of all ranks."""

        def call(local: HostBuffer, all_ranks: HostBuffer) -> None:
            # FSDP2 passes this rank's part of the output as the input. MPI then works in place.
            local_address = all_ranks.host.data_ptr() + self.rank() * local.host.nbytes
            send = MPI.IN_PLACE if local.host.data_ptr() == local_address else local.buffer_spec()
            self.comm.Allgather(send, all_ranks.buffer_spec(local.counts))

        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_sizes("all_gather", output, tensor, self.size())
        pairs = [*zip(inputs, outputs, strict=True)]
        return self._submit("all_gather_single", call, pairs, opts, describe_tensors(outputs))

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> MpiWork:
        """Set outputs[0][r] on rank `opts.rootRank` to inputs[0] of rank r. All tensors have the same size."""

        def call(local: HostBuffer, all_ranks: HostBuffer) -> None:
            self.comm.Gatherv(local.buffer_spec(), all_ranks.buffer_spec(), opts.rootRank)

        self._check_lists(outputs, inputs[: len(outputs)])
        pair = (inputs[0], outputs[0] if outputs else ())
        return self._submit("gather", call, [pair], opts, f"to {opts.rootRank} {describe_tensors(inputs)}")

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> MpiWork:
        """Set outputs[0] on rank r to inputs[0][r] of rank `opts.rootRank`. All tensors have the same size."""

        def call(all_ranks: HostBuffer, local: HostBuffer) -> None:
            self.comm.Scatterv(all_ranks.buffer_spec(), local.buffer_spec(), opts.rootRank)

        self._check_lists(inputs, outputs[: len(inputs)])
        pair = (inputs[0] if inputs else (), outputs[0])
        return self._submit("scatter", call, [pair], opts, f"from {opts.rootRank} {describe_tensors(outputs)}")

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """Set outputs[i] to this rank's part of the reduction of inputs[i] over all ranks."""
        op: Any = opts.reduceOp.op if opts else dist.ReduceOp.SUM

        def call(all_ranks: HostBuffer, local: HostBuffer) -> None:
            send = all_ranks.buffer_spec(local.counts)  # mpi4py expects the number of elements that each rank gets.
            self.comm.Reduce_scatter_block(send, local.buffer_spec(), mpi_reduction(op, local.host.dtype))

        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_sizes("reduce_scatter", tensor, output, self.size())
        pairs = [*zip(inputs, outputs, strict=True)]
        return self._submit("reduce_scatter_single", call, pairs, opts, f"{op} {describe_tensors(outputs)}", op)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], input_splits: list[int],
        opts: Any = None,
    ) -> MpiWork:  # fmt: skip
        """Send rows of `tensor` to each rank, and receive rows of `output` from each rank.

        The splits are the numbers of rows for each rank. Empty splits mean equal parts.
        """
        send = split_rows(tensor, input_splits, self.size())
        receive = split_rows(output, output_splits, self.size())

        def call(source: HostBuffer, target: HostBuffer) -> None:
            self._check_counts(send, receive)
            self.comm.Alltoallv(source.buffer_spec(send), target.buffer_spec(receive))

        return self._submit("all_to_all_single", call, [(tensor, output)], opts, str(output.dtype))

    def barrier(self, opts: Any = None) -> MpiWork:
        """Wait for all ranks. Nothing else is done, because every collective first waits for all ranks."""
        return self._submit("barrier", lambda *_: None, [], opts, "")

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        """Run `all_gather_single_coalesced` with one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        """Run `reduce_scatter_single_coalesced` with one tensor."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    allreduce_coalesced = allreduce
    # Names in torch 2.11:
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- messages ----------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MpiWork:
        """Send one tensor to a rank of this group."""
        return self._post_message("send to", self.comm.Isend, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> MpiWork:
        """Receive one tensor from a rank of this group."""
        return self._post_message("receive from", self.comm.Irecv, tensors, rank, tag, is_receive=True)

    def _post_message(
        self, action: str, post: Callable[[Any, int, int], MPI.Request], tensors: list[torch.Tensor],
        rank: int, tag: int, is_receive: bool = False,
    ) -> MpiWork:  # fmt: skip
        """Start to send or receive one tensor.

        Args:
            action: description of the operation, for messages.
            post: method of the communicator that starts the operation and returns its request.
            tensors: the tensor, as the only element.
            rank: the other rank, as its rank in this group.
            tag: MPI's tag of the message.
            is_receive: whether the tensor is received.
        """
        self.collective_thread.check()
        if tensors[0].is_cuda:  # MPI does not support CUDA streams.
            torch.cuda.current_stream(tensors[0].device).synchronize()
        work = MpiWork(
            f"{action} rank {self._ranks[rank]}, tag {tag}, in group {self._name}",
            tensors,
            self._name,
        )
        buffer = HostBuffer(tensors[0], read=not is_receive)
        request = post(buffer.buffer_spec(), rank, tag)
        timeout_s = self._timeout.total_seconds()
        MESSAGE_WATCHER.add(PendingMessage(self.collective_thread, request, work, buffer, is_receive, timeout_s))
        return work

    # -- helpers -----------------------------------------------------------------------------------------

    def _submit(
        self, name: str, call: Callable[[HostBuffer, HostBuffer], object], pairs: Sequence[tuple[Operand, Operand]],
        opts: Any, facts: str, op: Any = None,
    ) -> MpiWork:  # fmt: skip
        """Queue a collective.

        Args:
            name: name of the operation.
            call: function that calls MPI with the buffers of the input and the output of one pair.
            pairs: pairs of input and output. The input or output is empty if this rank has none. Input and output
                are the same tensor if MPI works in place.
            opts: torch's options of the operation.
            facts: text with types and sizes, which must be the same on all ranks.
            op: the reduction; None if the operation does not reduce values.

        Raises:
            ValueError: if MPI cannot reduce values of this type, or if a tensor is too large.
        """
        results = [tensor for source, target in pairs for tensor in list_tensors(target) or list_tensors(source)]
        max_elements = MAX_ELEMENTS * (self.size() if name == "all_gather_single" else 1)
        for tensor in results:
            if op is not None:
                mpi_reduction(op, tensor.dtype)  # This call raises the ValueError before any rank waits.
            if tensor.numel() > max_elements:
                raise ValueError(
                    f"{name} of {tensor.numel():,} elements: MPI supports at most {max_elements:,}; split the tensor"
                )

        def prepare() -> Callable[[], None]:
            """Allocate and fill the buffers of all pairs, and return the function that calls MPI."""
            buffers = []
            for source, target in pairs:
                send = HostBuffer(source, True, op is not None, self.accurate_sums)
                receive = send if target is source else HostBuffer(target, False, op is not None, self.accurate_sums)
                buffers.append((send, receive))

            def call_mpi() -> None:
                """Run the operation, and copy the results into the output tensors."""
                for send, receive in buffers:
                    call(send, receive)
                    if op == dist.ReduceOp.AVG:
                        receive.host.div_(self.size())
                    receive.copy_back()

            return call_mpi

        timeout = opts.timeout if opts is not None and opts.timeout > timedelta(0) else self._timeout
        return self.collective_thread.submit(f"{name} {facts}", prepare, results, timeout)

    def _check_sizes(self, name: str, large: torch.Tensor, small: torch.Tensor, factor: int = 1) -> None:
        """Raise ValueError if `large` does not have the type of `small` and `factor` times its number of elements."""
        if large.numel() != small.numel() * factor or large.dtype != small.dtype:
            raise ValueError(
                f"{name} over {self.size()} ranks: {large.dtype} {tuple(large.shape)} does not fit "
                f"{small.dtype} {tuple(small.shape)}"
            )

    def _check_lists(self, lists: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if a list does not have one tensor per rank.

        Also raise it if the tensor of this rank in `lists[i]` does not have the type and size of `tensors[i]`.
        """
        for tensors_of_ranks, tensor in zip(lists, tensors, strict=True):
            if len(tensors_of_ranks) != self.size():
                raise ValueError(f"{len(tensors_of_ranks)} tensors for the {self.size()} ranks of group {self._name}")
            self._check_sizes("a collective", tensors_of_ranks[self.rank()], tensor)

    def _check_counts(self, send: list[int], receive: list[int]) -> None:
        """Raise MpiError on all ranks if a rank sends another number of elements than the receiver expects.

        The checksum that all collectives compare cannot cover these numbers, because they may differ for each pair of
        ranks. This check needs additional communication, so it is done only with TORCH_DISTRIBUTED_DEBUG=DETAIL.

        Args:
            send: number of elements that this rank sends to each rank.
            receive: number of elements that this rank expects from each rank.
        """
        if dist.get_debug_level() != dist.DebugLevel.DETAIL:
            return
        table = self.comm.allgather((send, receive))
        for (sender, (sent, _)), (receiver, (_, expected)) in itertools.product(enumerate(table), enumerate(table)):
            if sent[receiver] != expected[sender]:
                raise MpiError(
                    f"all_to_all in group {self._name}: rank {self._ranks[sender]} sends {sent[receiver]} elements to "
                    f"rank {self._ranks[receiver]}, which expects {expected[sender]}"
                )

    # -- interface of the backend ------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for the queued operations, then free the communicator. All ranks must call this."""
        self.collective_thread.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of operations."""
        self._timeout = timeout

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND_NAME

    def getGroupName(self) -> str:
        """Return torch's name of this group."""
        return self._name
