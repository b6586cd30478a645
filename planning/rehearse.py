"""Rehearse one rank of a run on this machine, without values and without other ranks: `plan CONFIG --rehearse RANK`.

The rehearsal builds the real training engine (pipeline/train/engine.py) and runs two steps. It finds errors that would
otherwise appear only when the job starts. Tensors are fake (`FakeTensorMode`): they have shape, type and device, but no
memory. Collectives are those of a fake process group, which returns at once. One core can therefore rehearse any rank
of 16,384. The second step is reported, because the first step also initializes state.

`_replace_functions_for_rehearsal` replaces functions that need values or other ranks. Kernels are those of the CPU and
are not compiled. The workspace of kernels and fragmentation are not counted.
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
from pipeline.parallel import context_parallel, data_parallel
from pipeline.parallel.mesh import Layout, resolve_layout
from pipeline.parallel.traffic import count_rank_traffic, find_trained_parameters
from pipeline.train import engine as engines
from pipeline.train import optimizer as optimizer_module
from planning.memory import GB, MEMORY_KINDS, estimate_memory
from planning.timeline import rank_actions

_COLLECTIVES = {
    "_allgather_base_": "all-gather", "allgather_": "all-gather", "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter", "allreduce_": "all-reduce", "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all", "alltoall_base_": "all-to-all", "broadcast_": "broadcast",
    "broadcast": "broadcast", "send": "send",
}  # fmt: skip
"""Name of the collective, for each operator of torch that sends data."""


class _Storage:
    """The memory of one tensor, or of several tensors that share it."""

    def __init__(self) -> None:
        self.size = 0
        """Size in bytes."""
        self.kind = "activations"
        """One of `MEMORY_KINDS`. Memory counts as activations until another kind is set."""


class TensorAccount(TorchDispatchMode):
    """Context manager that counts the memory of tensors and the bytes that a rank sends.

    It works on real ranks and, as `_FakeAccount`, on rehearsed ranks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, _Storage] = {}
        """The storages that exist now, by their addresses (`_cdata`)."""
        self.current = 0
        """Bytes of all tensors at this moment."""
        self._resize = torch.UntypedStorage.resize_
        self.reset()

    def reset(self) -> None:
        """Reset the peak to the current memory, and the sent bytes to zero."""
        self.peak = self.current
        self._at_peak = [(storage, storage.size) for storage in self._live.values()]
        self.sent: defaultdict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0])
        """Number of calls, and bytes that this rank sends with ring algorithms.

        The key has the name of the group, its number of ranks, and the operation.
        """

    def peak_by_kind(self) -> dict[str, int]:
        """Return the bytes at the peak by kind."""
        sizes = dict.fromkeys(MEMORY_KINDS, 0)
        for storage, size in self._at_peak:
            sizes[storage.kind] += size
        return sizes

    def set_kind(self, kind: str, tensor: Any) -> None:
        """Set the kind of memory of a tensor, also in the peak that was recorded before.

        Objects that are not tensors are ignored.
        """
        if isinstance(tensor, Tensor):
            storage = self._live.get(local_tensor(tensor).untyped_storage()._cdata)
            if storage is not None:
                storage.kind = kind

    def __enter__(self) -> TensorAccount:
        """Start counting."""

        # FSDP frees and allocates the memory of gathered weights with resize_().
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            self._resize(storage, size)
            if storage._cdata in self._live:
                self._live[storage._cdata].kind = "gathered"
                self._update_storage(storage)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        """Stop counting."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def _update_storage(self, storage: torch.UntypedStorage) -> None:
        """Record the size of a storage that is new or was resized."""
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._live:
            self._live[key] = _Storage()
            weakref.finalize(storage, self._remove_storage, key)
        counted = self._live[key]
        self.current += size - counted.size
        counted.size = size
        if self.current > self.peak:
            self.peak = self.current
            self._at_peak = [(live, live.size) for live in self._live.values()]

    def _remove_storage(self, key: int) -> None:
        """Subtract the size of a storage that was freed."""
        self.current -= self._live.pop(key).size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count the memory of its results and the bytes that it sends."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # Torch calls this method again with the local tensors.
        result = self.run_operator(func, args, kwargs or {})
        for tensor in _list_tensors(result):
            if self.takes_memory(tensor):
                self._update_storage(tensor.untyped_storage())
        name = func.__name__.split(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name in _COLLECTIVES:
            # Operators of `c10d` change their first argument. Those of `_c10d_functional` return new tensors.
            self._count_sent(_COLLECTIVES[name], args, args[0] if func.namespace == "c10d" else result)
        return result

    def takes_memory(self, tensor: Tensor) -> bool:
        """Return whether a tensor takes memory.

        Tensors on the `meta` device and wrapper subclasses such as DTensor take no memory of their own. Fake tensors,
        with which DTensor infers shapes, take no memory either.
        """
        return not (tensor.is_meta or isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor))

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator."""
        return func(*args, **kwargs)

    def _count_sent(self, operation: str, args: Any, results: Any) -> None:
        """Count the bytes that this rank sends in a collective, with ring algorithms.

        Args:
            operation: One of the values of `_COLLECTIVES`.
            args: Arguments of the operator.
            results: Tensors that the operator returns or changes.
        """
        boxed_group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if boxed_group is None:
            group: Any = dist.distributed_c10d._resolve_process_group(args[-1])
        else:
            group = dist.ProcessGroup.unbox(boxed_group)
        ranks = group.size()
        size = sum(tensor.nbytes for tensor in _list_tensors(results))
        if operation not in ("broadcast", "send"):
            # The result of a reduce-scatter is only a shard. An all-reduce is a reduce-scatter and an all-gather.
            times = {"reduce-scatter": ranks, "all-reduce": 2}.get(operation, 1)
            size = times * size * (ranks - 1) // ranks
        calls_and_bytes = self.sent[group.group_desc.removeprefix("mesh_"), ranks, operation]
        calls_and_bytes[0] += 1
        calls_and_bytes[1] += size


class _FakeAccount(TensorAccount):
    """The account of a rehearsed rank. Collectives complete at once, and tensors have no values."""

    is_inferring_shapes = False
    """Whether DTensor is inferring the shapes of an operator's results, on fake tensors that must not be counted."""

    def __init__(self) -> None:
        super().__init__()
        self._collective_inputs: dict[int, Any] = {}

    def takes_memory(self, tensor: Tensor) -> bool:
        """Return whether a tensor takes memory.

        Fake tensors count as if they had memory, except those on the `meta` device and those with which DTensor infers
        shapes.
        """
        return isinstance(tensor, FakeTensor) and not tensor.is_meta and not self.is_inferring_shapes

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. Collectives complete at once.

        Fake tensors have no values. If an operator reads a value, the result is 1.0 for floating point and 0 otherwise.
        """
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 0
        if func.namespace == "_c10d_functional":
            return self._call_functional_collective(func, args, kwargs)
        if func.namespace != "c10d":
            return func(*args, **kwargs)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(args[0])
        work = _create_work_from_future(done).boxed()
        # Some operators return only a work, others also the tensors that they change.
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _call_functional_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a functional collective, and keep its input until `wait_tensor`, as a real collective does."""
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._collective_inputs.pop(args[0].untyped_storage()._cdata, None)
            return args[0]
        result = func(*args, **kwargs)
        self._collective_inputs |= {tensor.untyped_storage()._cdata: args[0] for tensor in _list_tensors(result)}
        return result


def _list_tensors(value: Any) -> list[Tensor]:
    """Return all tensors of a tensor, a list, or a list of lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _list_tensors(part)] if isinstance(value, list | tuple) else []


@contextmanager
def _replace_functions_for_rehearsal(account: _FakeAccount, config: Config, layout: Layout) -> Iterator[None]:
    """Replace functions that need values or other ranks inside the `with` block."""

    def run_without_fakes(function: Any) -> Any:
        """Return a function that calls `function` with real tensors."""

        def call_without_fakes(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return call_without_fakes

    infer_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    def infer_shapes_without_counting(*args: Any, **kwargs: Any) -> Any:
        account.is_inferring_shapes = True
        try:
            return infer_shapes(*args, **kwargs)
        finally:
            account.is_inferring_shapes = False

    def create_group_of_this_rank(ranks: list[int], **options: Any) -> Any:
        # All ranks together may have tens of thousands of groups. To create all of them would take minutes.
        return dist.new_group(ranks, **options) if dist.get_rank() in ranks else None

    with ExitStack() as stack:
        # These functions need real values even in a rehearsal: rank numbers, and weights on the `meta` device.
        for owner, function in (
            (Layout, Layout.build_device_mesh),
            (device_mesh.DeviceMesh, device_mesh.DeviceMesh.__init__),
            (DecoderTask, DecoderTask.build),
            (DecoderTask, DecoderTask.apply_tensor_parallel),
            (data_parallel, data_parallel.apply_fsdp),
        ):
            stack.enter_context(_replace_function(owner, function, run_without_fakes(function)))
        stack.enter_context(
            _replace_function(
                ShardingPropagator, ShardingPropagator._propagate_tensor_meta_non_cached, infer_shapes_without_counting
            )
        )
        for module in (device_mesh, context_parallel):
            stack.enter_context(_replace_function(module, dist.new_group, create_group_of_this_rank))
        # DDP would rebuild its buckets in an order that rank 0 broadcasts.
        stack.enter_context(_replace_function(dist.Reducer, dist.Reducer._rebuild_buckets, lambda _: False))
        if layout.pp > 1:
            stack.enter_context(_replace_shape_messages(config, layout))
        original_chunk_size = optimizer_module._NORM_CHUNK_SIZE
        # Gradients are not split into chunks, because splitting them needs values.
        optimizer_module._NORM_CHUNK_SIZE = 1 << 62
        try:
            yield
        finally:
            optimizer_module._NORM_CHUNK_SIZE = original_chunk_size


@contextmanager
def _replace_function(owner: Any, function: Any, replacement: Any) -> Iterator[None]:
    """Replace a function of a module or class by another one inside the `with` block."""
    name = function.__name__
    original = vars(owner)[name]  # Unlike `getattr`, this does not unwrap static and class methods.
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _replace_shape_messages(config: Config, layout: Layout) -> Iterator[None]:
    """Give each pipeline-parallel stage the shapes that its neighbours would send, inside the `with` block.

    In a real run, neighbouring stages exchange the shapes of hidden states and gradients before the first step.
    """
    try:
        from torch.distributed.pipelining._utils import _TensorMeta
        from torch.distributed.pipelining.stage import PipelineStage, _StageBackwardMeta, _StageForwardMeta
    except ImportError as error:
        message = f"--rehearse: pipelines require torch 2.13, but this is {torch.__version__} ({error})"
        raise UserError("plan.torch_too_old", message) from error
    shape = hidden_state_shape(
        config.model, config.train.micro_batch, config.data.sequence_length, layout.hidden_shards
    )
    # The residual stream has the type of the embedding's weights. Without FSDP, the weights of a rehearsal are fp32.
    dtype = DTYPES.get(config.train.precision, torch.float32) if layout.fsdp else torch.float32
    trained_from = find_trained_parameters(config).first_block

    def receive_meta(stage: Any, source: int) -> Any:
        """Return the shapes that the neighbouring stage with the number `source` would send."""
        if source > stage.stage_index:  # The next stage sends the gradients of outputs that require gradients.
            metas = tuple(meta if meta.requires_grad else None for meta in stage._stage_meta.outputs)
            return _StageBackwardMeta(metas)
        requires_grad = layout.stage_layers[stage.stage_index].start > trained_from
        hidden_states = torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
        return _StageForwardMeta((_TensorMeta.from_tensor(hidden_states),))

    with (
        _replace_function(PipelineStage, PipelineStage._recv_meta, receive_meta),
        _replace_function(PipelineStage, PipelineStage._send_meta, lambda *_: None),
    ):
        yield


def run_counted_step(engine: Any, account: TensorAccount, step: int, batch: dict[str, Tensor]) -> None:
    """Run a step of an engine, count its memory and sent bytes, and set the kinds of its tensors.

    Args:
        engine: The training engine.
        account: The account, which must be entered as a context manager. It is reset first.
        step: Number of the step.
        batch: The samples of this rank.
    """
    account.reset()
    engine.backward(batch, step)
    for parameter in (parameter for part in engine.parts for parameter in part.parameters()):
        account.set_kind("weights", parameter.detach())
        account.set_kind("gradients", parameter.grad)
    engine.clip_gradients(engine.config.optimizer.clip_norm)
    engine.update_weights(1.0)  # With any finite norm, the weights are updated.
    for state in engine.optimizer.state.values():
        for tensor in state.values():
            account.set_kind("optimizer", tensor)
    for average in engine.ema.averages.values() if engine.ema else ():
        account.set_kind("optimizer", average)


class Progress:
    """Context manager that prints the phase of a rehearsal to stderr when it starts, and every few seconds."""

    INTERVAL_S = 10.0

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._phase = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Progress:
        """Start the thread that repeats the phase."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread."""
        self._done.set()
        self._thread.join()

    def start_phase(self, phase: str) -> None:
        """Print that `phase` starts."""
        self._phase = phase
        self._print()

    def _repeat(self) -> None:
        """Print the phase every `INTERVAL_S` seconds until the thread is stopped."""
        while not self._done.wait(self.INTERVAL_S):
            self._print()

    def _print(self) -> None:
        """Print the seconds since the start, and the phase."""
        print(f"rehearse: {time.monotonic() - self._start:>4.0f} s  {self._phase}", file=sys.stderr, flush=True)


def rehearse_rank(
    config: Config, rank: int, vocab: int, start_phase: Callable[[str], None] = lambda phase: None
) -> TensorAccount:
    """Rehearse a rank and return the account of its second step.

    Args:
        config: The config.
        rank: Number of the rank.
        vocab: Size of the vocabulary.
        start_phase: Called with a description of each phase.

    Raises:
        UserError: The rank does not exist, the config cannot be rehearsed, or the rank would fail.
    """
    world_size = config.stages.train.ranks
    layout = resolve_layout(config)
    if not 0 <= rank < world_size:
        raise UserError(
            "plan.no_such_rank",
            f"--rehearse {rank}: ranks are numbered from 0 to {world_size - 1} (stages.train: nodes × tasks_per_node)",
        )
    if (key := config.model.other_model_key) is not None:
        raise UserError("plan.unsupported_model", f"--rehearse supports only the decoder, not {key}")
    if config.adapter is not None and config.adapter.base is not None:
        raise UserError("plan.unsupported_option", "--rehearse does not support adapter.base: remove it")
    if config.optimizer.state.master == "none":
        raise UserError(
            "plan.unsupported_option",
            "--rehearse does not support optimizer.state.master none: torch cannot replace data of fake parameters. "
            "Use master fp32: between steps, its weights take twice the memory of the weights of master none",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start_phase(f"making the groups of {world_size:,} ranks")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        account = _FakeAccount()
        with (
            _replace_functions_for_rehearsal(account, config, layout),
            FakeTensorMode(allow_non_fake_inputs=True),
            account,
        ):
            stages = layout.stages_on_pipeline_rank(layout.coordinates(rank).pp)
            start_phase(f"building rank {rank}: {sum(len(layout.stage_layers[stage]) for stage in stages)} blocks")
            task = DecoderTask(config, vocab)
            world = World(rank, world_size, torch.device("cpu"), "fake")
            engine = engines.Engine(config, layout, world, task, from_scratch=False)
            rows = config.train.global_batch // layout.dp
            batch = {
                name: torch.zeros((rows, *shape), dtype=getattr(torch, dtype))
                for name, (shape, dtype) in task.sample_shapes.items()
            }
            for step in (1, 2):
                start_phase(f"step {step} of 2: {layout.micro_batches} micro-batches")
                run_counted_step(engine, account, step, batch)
    except UserError:
        raise
    except Exception as error:
        frames = [frame for frame in extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        # The innermost frame of Sluice's code, outside of this module if possible.
        frame = next((frame for frame in reversed(frames) if frame.filename != __file__), frames[-1])
        location = f"{Path(frame.filename).name}:{frame.lineno}"
        message = f"rank {rank} fails in {frame.name} ({location}): {type(error).__name__}: {error}"
        raise UserError("plan.rank_fails", message) from error
    finally:
        dist.destroy_process_group()
    return account


def group_name(layout: Layout, mesh_group: str) -> str:
    """Return the name that `plan` prints for a group of torch's device mesh, or of all ranks (`default_pg`)."""
    sizes = {"tensor": layout.tp, "pipeline": layout.pp}
    sizes |= {"shard": layout.state_shards, "replicate": layout.state_replicas}
    if mesh_group == "default_pg":
        name = next((name for name, size in sizes.items() if size == layout.world_size), "all ranks")
    else:
        names = {"tp": "tensor", "pp": "pipeline", "cp": "context"}
        name = names.get(mesh_group, mesh_group)
    return "data" if name == "replicate" and not layout.zero else name


def describe_rehearsal(config: Config, rank: int) -> Iterator[str]:
    """Rehearse a rank and yield the lines of `plan --rehearse`.

    Raises:
        UserError: The run would fail, or the rank needs more than `site.gpu_memory_gib`. With `parallel.offload`, the
            needed memory is not compared.
    """
    start = time.monotonic()
    layout = resolve_layout(config)
    is_compiled = config.train.compile
    # The rehearsal neither compiles nor evaluates, so the estimate below must not include these options either.
    train = config.train.model_copy(update={"compile": False, "evaluate_every": None})
    config = config.model_copy(update={"train": train})
    vocab = config.model.vocab_size or config.data.tokenizer.vocab_size
    with Progress() as progress:
        account = rehearse_rank(config, rank, vocab, progress.start_phase)
    coordinates = layout.coordinates(rank)
    process_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
    yield (
        f"rank {rank} of {layout.world_size:,}: "
        + ", ".join(f"{name} {position}" for name, position in coordinates.name_positions(layout).items())
    )
    yield f"two steps without values took {time.monotonic() - start:.0f} s and {process_gb:.1f} GB of memory here"
    if is_compiled:
        yield "train.compile is ignored: compiled blocks save less for backward"
    yield ""
    yield "memory of its tensors in GB, at the peak of a step"
    yield " " * 10 + "".join(f" {kind:>11}" for kind in (*MEMORY_KINDS, "sum"))
    actions = rank_actions(layout)[coordinates.pp]
    estimate = estimate_memory(config, layout, coordinates.pp, vocab, actions, on_cpu=True)
    for name, sizes in (
        ("rehearsed", [*account.peak_by_kind().values(), account.peak]),
        ("plan", [*(getattr(estimate, kind) for kind in MEMORY_KINDS), estimate.total]),
    ):
        yield f"{name:>10}" + "".join(f" {size / GB:>11.3f}" for size in sizes)
    yield ""
    traffic = count_rank_traffic(config, layout, vocab, coordinates.pp)
    planned = ", ".join(f"{group} {size / GB:.3f} GB" for group, size, _ in traffic)
    yield f"bytes sent per step (plan: {planned or 'nothing'})"
    yield f"{'group':>14} {'ranks':>6}  {'operation':<15} {'calls':>7} {'GB':>9}"
    for (mesh_group, ranks, operation), (calls, size) in sorted(account.sent.items(), key=lambda item: -item[1][1]):
        group = group_name(layout, mesh_group)
        yield f"{group:>14} {ranks:>6}  {operation:<15} {calls:>7,} {size / GB:>9.3f}"
    gpu_bytes = (config.site.gpu_memory_gib or math.inf) * 2**30
    if account.peak > gpu_bytes and not config.parallel.offload:
        raise UserError(
            "plan.not_enough_memory",
            f"rank {rank} needs {account.peak / GB:.1f} GB for its tensors, and a GPU has {gpu_bytes / GB:.1f} "
            f"({config.site.gpu_memory_gib:g} GiB, by --machine or site.gpu_memory_gib)",
        )
