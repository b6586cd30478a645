"""Rehearse one rank of a run on this machine, without values and peers: `plan CONFIG --rehearse RANK`.

The real training engine (pipeline/train/engine.py) is built and runs two steps, so an error that would otherwise
appear after a day in the queue appears here. Tensors are torch's fake ones (`FakeTensorMode`: shape, type and device,
but no memory), and collectives are those of a fake process group, which returns at once. One core can therefore be any
rank of 16,384. The second step is reported, because the first one also sets up.

`_stand_ins` replaces what needs values or peers. Kernels are those of the CPU and are not compiled; their workspace
and fragmentation are not counted.
"""

from __future__ import annotations

import math
import resource
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from pipeline.base.errors import UserError
from pipeline.comm.groups import World
from pipeline.config.sections import Config
from pipeline.model.decoder import local_tensor
from pipeline.model.spec import hidden_state_shape
from pipeline.model.task import DTYPES, DecoderTask
from pipeline.parallel import data_parallel
from pipeline.parallel.mesh import Layout, Mesh, resolve_layout
from pipeline.parallel.traffic import count_rank_traffic, find_trained_parameters
from pipeline.train import engine as engines
from pipeline.train import optimizer as optimizer_module
from planning.memory import GB, MEMORY_KINDS, estimate_memory
from planning.timeline import rank_actions

KINDS = MEMORY_KINDS
"""What tensors are for; activations are all that is none of the others."""
_OPERATIONS = {
    "_allgather_base_": "all-gather", "allgather_": "all-gather", "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter", "allreduce_": "all-reduce", "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all", "alltoall_base_": "all-to-all", "broadcast_": "broadcast",
    "broadcast": "broadcast", "send": "send",
}  # fmt: skip
"""Torch's operators that send, by their names."""


class _Storage:
    """The memory of one or several tensors."""

    def __init__(self) -> None:
        self.size, self.kind = 0, KINDS[-1]


class TensorAccount(TorchDispatchMode):
    """Memory that tensors take, and what is sent, while it is entered; on real ranks as in a rehearsal."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, _Storage] = {}
        self.now = 0
        """Bytes of all tensors."""
        self._resize = torch.UntypedStorage.resize_
        self.begin()

    def begin(self) -> None:
        """Forget the peak and what was sent."""
        self.peak = self.now
        self._at_peak = [(one, one.size) for one in self._live.values()]
        self.sent: defaultdict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0])
        """Calls and bytes that this rank sends with ring algorithms, by group, its number of ranks, and operation."""

    def by_kind(self) -> dict[str, int]:
        """Return the bytes at the peak by kind."""
        found = dict.fromkeys(KINDS, 0)
        for storage, size in self._at_peak:
            found[storage.kind] += size
        return found

    def is_for(self, kind: str, tensor: Any) -> None:
        """Set the kind of a tensor."""
        if (
            isinstance(tensor, Tensor)
            and (one := self._live.get(local_tensor(tensor).untyped_storage()._cdata)) is not None
        ):
            one.kind = kind

    def __enter__(self) -> TensorAccount:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP frees and takes its weights so
            self._resize(storage, size)
            if storage._cdata in self._live:
                self._live[storage._cdata].kind = "gathered"
                self._took(storage)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def _took(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            self._live[key] = _Storage()
            weakref.finalize(storage, self._gone, key)
        one = self._live[key]
        self.now += size - one.size
        one.size = size
        if self.now > self.peak:
            self.peak, self._at_peak = self.now, [(other, other.size) for other in self._live.values()]

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key).size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as what it is made of
        result = self.call(func, args, kwargs or {})
        for tensor in _tensors(result):
            if self.counts(tensor):
                self._took(tensor.untyped_storage())
        name = func.__name__.split(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name in _OPERATIONS:
            self._sends(_OPERATIONS[name], args, args[0] if func.namespace == "c10d" else result)
        return result

    def counts(self, tensor: Tensor) -> bool:
        """Return whether a tensor takes memory. Wrappers do not, nor do fake tensors for shape inference of DTensor."""
        return not (tensor.is_meta or isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor))

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator."""
        return func(*args, **kwargs)

    def _sends(self, operation: str, args: Any, results: Any) -> None:
        box = next((one for one in args if isinstance(one, torch.ScriptObject)), None)
        group: Any = (
            dist.distributed_c10d._resolve_process_group(args[-1]) if box is None else dist.ProcessGroup.unbox(box)
        )
        size, ranks = sum(tensor.nbytes for tensor in _tensors(results)), group.size()
        if operation not in ("broadcast", "send"):
            times = {"reduce-scatter": ranks, "all-reduce": 2}.get(operation, 1)
            size = times * size * (ranks - 1) // ranks
        entry = self.sent[group.group_desc.removeprefix("mesh_"), ranks, operation]
        entry[0] += 1
        entry[1] += size


class _Fake(TensorAccount):
    """The same of a rank that stands alone: what it sends or receives is done at once, and no number is known."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, Any] = {}

    asked_for_shapes = False
    """Whether DTensor asks, with whole tensors of its own, for the shapes of what an operator gives."""

    def counts(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and not tensor.is_meta and not self.asked_for_shapes

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 0
        if func.namespace == "_c10d_functional":
            return self._held_until_waited_for(func, args, kwargs)
        if func.namespace != "c10d":
            return func(*args, **kwargs)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(args[0])
        work = _create_work_from_future(done).boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _held_until_waited_for(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Keep the input of a collective until its result is waited for, as a real one does; this is not a copy."""
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._held.pop(args[0].untyped_storage()._cdata, None)
            return args[0]
        result = func(*args, **kwargs)
        self._held |= {tensor.untyped_storage()._cdata: args[0] for tensor in _tensors(result)}
        return result


def _tensors(value: Any) -> list[Tensor]:
    """Return all tensors of a tensor, a list, or a list of lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []


@contextmanager
def _stand_ins(account: _Fake, config: Config, layout: Layout) -> Iterator[None]:
    """Replace what needs values or peers inside the block."""

    def outside(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return call

    shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        account.asked_for_shapes = True
        try:
            return shapes(*args, **kwargs)
        finally:
            account.asked_for_shapes = False

    def own_group(ranks: list[int], **options: Any) -> Any:  # tens of thousands of others take minutes
        return dist.new_group(ranks, **options) if dist.get_rank() in ranks else None

    with ExitStack() as stack:
        # these need values that are real even in a rehearsal: numbers of ranks, and weights on the meta device
        for owner, function in (
            (Mesh, Mesh.build_device_mesh),
            (device_mesh.DeviceMesh, device_mesh.DeviceMesh.__init__),
            (DecoderTask, DecoderTask.build),
            (DecoderTask, DecoderTask.apply_tensor_parallel),
            (data_parallel, data_parallel.apply_fsdp),
        ):
            stack.enter_context(_replaced(owner, function, outside(function)))
        stack.enter_context(
            _replaced(ShardingPropagator, ShardingPropagator._propagate_tensor_meta_non_cached, uncounted)
        )
        stack.enter_context(_replaced(device_mesh, dist.new_group, own_group))
        stack.enter_context(_replaced(dist.Reducer, dist.Reducer._rebuild_buckets, lambda _: False))
        if layout.pp > 1:
            stack.enter_context(_told_by_neighbours(config, layout))
        piece = optimizer_module._CHUNK_ENTRIES
        optimizer_module._CHUNK_ENTRIES = 1 << 62  # whole gradients: splitting them needs values
        try:
            yield
        finally:
            optimizer_module._CHUNK_ENTRIES = piece


@contextmanager
def _replaced(owner: Any, function: Any, replacement: Any) -> Iterator[None]:
    """Replace a function of a module or class by another one inside the block."""
    name = function.__name__
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _told_by_neighbours(config: Config, layout: Layout) -> Iterator[None]:
    """Stages of a pipeline tell each other the shapes of what they will send: here each is told what it would be."""
    try:
        from torch.distributed.pipelining._utils import _TensorMeta
        from torch.distributed.pipelining.stage import PipelineStage, _StageBackwardMeta, _StageForwardMeta
    except ImportError as error:
        message = f"--rehearse: pipelines require torch 2.13, but this is {torch.__version__} ({error})"
        raise UserError("plan.torch_too_old", message) from error
    shards = layout.tp if layout.sequence_parallel else 1
    shape = hidden_state_shape(config.model, config.train.micro_batch, config.data.sequence_length, shards)
    dtype = DTYPES.get(config.train.precision, torch.float32) if layout.fsdp else torch.float32

    trained_from = find_trained_parameters(config).first_block

    def receive(stage: Any, source: int) -> Any:  # of what is frozen up to there nobody sends gradients back
        if source > stage.stage_index:
            return _StageBackwardMeta(tuple(meta if meta.requires_grad else None for meta in stage._stage_meta.outputs))
        wanted = layout.stage_layers[stage.stage_index].start > trained_from
        return _StageForwardMeta((_TensorMeta.from_tensor(torch.empty(shape, dtype=dtype, requires_grad=wanted)),))

    with (
        _replaced(PipelineStage, PipelineStage._recv_meta, receive),
        _replaced(PipelineStage, PipelineStage._send_meta, lambda *_: None),
    ):
        yield


def account_step(engine: Any, account: TensorAccount, step: int, batch: dict[str, Tensor]) -> None:
    """Step number `step` of an engine, in an account that is entered; what its tensors are for is noted."""
    account.begin()
    engine.backward(batch, step)
    for parameter in (parameter for part in engine.parts for parameter in part.parameters()):
        account.is_for("weights", parameter.detach())
        account.is_for("gradients", parameter.grad)
    engine.clip_gradients(engine.config.optimizer.clip_norm)
    engine.update_weights(1.0)
    for state in engine.optimizer.state.values():
        for tensor in state.values():
            account.is_for("optimizer", tensor)


class Progress:
    """Prints the phase of a rehearsal to stderr, and every few seconds its duration."""

    EVERY_S = 10.0

    def __init__(self) -> None:
        self._began, self._phase, self._ended = time.monotonic(), "", threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, phase: str) -> None:
        """Print that `phase` starts."""
        self._phase = phase
        self._print()

    def _repeat(self) -> None:
        while not self._ended.wait(self.EVERY_S):
            self._print()

    def _print(self) -> None:
        print(f"rehearse: {time.monotonic() - self._began:>4.0f} s  {self._phase}", file=sys.stderr, flush=True)


def rehearse_rank(
    config: Config, rank: int, vocab: int, begin: Callable[[str], None] = lambda phase: None
) -> TensorAccount:
    """The account of the second step of a rank; `begin` is called with each phase.

    Raises UserError where it would fail, with the reason.
    """
    size, layout = config.stages.train.ranks, resolve_layout(config)
    if not 0 <= rank < size:
        raise UserError(
            "plan.no_such_rank",
            f"--rehearse {rank}: ranks are numbered from 0 to {size - 1} (stages.train: nodes × tasks_per_node)",
        )
    if config.model.target is not None:
        raise UserError("plan.unsupported_model", "--rehearse supports only the decoder, not model.target")
    if config.optimizer.state.master == "none":
        raise UserError(
            "plan.unsupported_option",
            "--rehearse does not support optimizer.state.master none, because torch parameters cannot have fake data; "
            "rehearse with master fp32, whose weights between steps take twice as much memory",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin(f"making the groups of {size:,} ranks")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        account = _Fake()
        with _stand_ins(account, config, layout), FakeTensorMode(allow_non_fake_inputs=True), account:
            world, stages = (
                World(rank, size, torch.device("cpu"), "fake"),
                layout.stages_on_rank(layout.coordinates(rank).pp),
            )
            task = DecoderTask(config, vocab)
            begin(f"building rank {rank}: {sum(len(layout.stage_layers[stage]) for stage in stages)} blocks")
            engine = engines.Engine(config, layout, world, task, from_scratch=False)
            rows = config.train.global_batch // layout.dp
            batch = {
                name: torch.zeros((rows, *shape), dtype=getattr(torch, kind))
                for name, (shape, kind) in task.sample_shapes.items()
            }
            for step in (1, 2):
                begin(f"step {step} of 2: {layout.micro_batches} micro-batches")
                account_step(engine, account, step, batch)
    except UserError:
        raise
    except Exception as error:
        own = [at for at in extract_tb(error.__traceback__) if "site-packages" not in at.filename]
        where = next((at for at in reversed(own) if at.filename != __file__), own[-1])
        place = f"{Path(where.filename).name}:{where.lineno}"
        message = f"rank {rank} fails in {where.name} ({place}): {type(error).__name__}: {error}"
        raise UserError("plan.rank_fails", message) from error
    finally:
        dist.destroy_process_group()
    return account


def group_name(layout: Layout, mesh: str) -> str:
    """Return what `plan` calls a group of ranks, by its name in torch's mesh; a group of all may have torch's own."""
    sizes = {"tensor": layout.tp, "pipeline": layout.pp, "shard": layout.dp_shard, "replicate": layout.dp_replicate}
    if mesh == "default_pg":
        found = next((name for name, size in sizes.items() if size == layout.world_size), "all ranks")
    else:
        found = {"tp": "tensor", "pp": "pipeline", "dp_shard": "shard", "dp_replicate": "replicate"}.get(mesh, mesh)
    return "data" if found == "replicate" and layout.dp_shard == 1 else found


def describe_rehearsal(config: Config, rank: int) -> Iterator[str]:
    """The lines of a rehearsal. Raises UserError where the run would fail, also for want of `site.gpu_memory_gib`."""
    began, layout = time.monotonic(), resolve_layout(config)
    compiled = config.train.compile
    train = config.train.model_copy(update={"compile": False, "evaluate_every": None})
    config = config.model_copy(update={"train": train})
    vocab = config.model.vocab_size or config.data.tokenizer.vocab_size
    with Progress() as progress:
        account = rehearse_rank(config, rank, vocab, progress.begin)
    at = layout.coordinates(rank)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
    yield f"rank {rank} of {layout.world_size:,}: pipeline {at.pp}, data {at.dp}, tensor {at.tp}"
    yield f"two steps without values: {time.monotonic() - began:.0f} s and {taken:.1f} GB of memory here"
    if compiled:
        yield "train.compile is left out: compiled blocks keep less"
    yield ""
    yield "memory of its tensors in GB, when a step takes most"
    yield " " * 10 + "".join(f" {kind:>11}" for kind in (*KINDS, "sum"))
    said = estimate_memory(config, layout, at.pp, vocab, rank_actions(layout)[at.pp], on_cpu=True)
    kinds = account.by_kind()
    for name, sizes in (
        ("rehearsed", [*kinds.values(), account.peak]),
        ("plan", [said.weights, said.gathered, said.gradients, said.optimizer, said.activations, said.total]),
    ):
        yield f"{name:>10}" + "".join(f" {size / GB:>11.3f}" for size in sizes)
    yield ""
    counted = [f"{group} {size / GB:.3f} GB" for group, size, _ in count_rank_traffic(config, layout, vocab, at.pp)]
    yield f"it sends in a step (plan: {', '.join(counted) or 'nothing'})"
    yield f"{'group':>14} {'ranks':>6}  {'operation':<15} {'calls':>7} {'GB':>9}"
    for (mesh, ranks, operation), (calls, size) in sorted(account.sent.items(), key=lambda item: -item[1][1]):
        group = group_name(layout, mesh)
        yield f"{group:>14} {ranks:>6}  {operation:<15} {calls:>7,} {size / GB:>9.3f}"
    room = (config.site.gpu_memory_gib or math.inf) * 2**30
    if account.peak > room and not config.parallel.offload:
        raise UserError(
            "plan.not_enough_memory",
            f"rank {rank} needs {account.peak / GB:.1f} GB for its tensors, and a GPU has {room / GB:.1f} "
            f"({config.site.gpu_memory_gib:g} GiB, by --machine or site.gpu_memory_gib)",
        )
