"""What the tests run on a fake GPU: parts of the pipeline as a rank uses them, on GPU 1 of 2, with notes in the log.

`python -m tests.fake_gpu.programs NAME ARGUMENT …` calls one of these functions. Numbers mean nothing here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.checkpoint.checkpointer import Checkpointer, collect_versions
from pipeline.comm import groups
from pipeline.data.loader import BatchLoader
from pipeline.data.manifest import ShardEntry
from pipeline.data.samples import TokenDataset
from pipeline.model.task import DecoderTask
from pipeline.parallel import replica_sync
from pipeline.parallel.mesh import resolve_layout
from pipeline.train.engine import Engine
from pipeline.train.metrics import measure_peak_memory
from tests.support.ranks import make_rank_info
from tests.support.tiny_training import VOCAB, make_batches, tiny_config

LARGE = 8192
"""A vocabulary beside which the rest is small."""


def note(text: str) -> None:
    ctypes.CDLL(None).fake_gpu_note(text.encode())


def join(**parallel: Any) -> groups.World:
    """The only rank, but on the second GPU."""
    groups.assign_gpus = lambda ranks, exclusive: [1]
    return groups.join_process_group(make_rank_info(0, 1, 1), tiny_config(1, parallel=parallel))


def closest(rank: str, port: str) -> None:
    """Ranks 4 and 5 of 8 on a node, bound to the two GPUs of their socket."""
    import torch.distributed as dist

    here = dataclasses.replace(make_rank_info(int(rank), 2, int(port)), local_rank=4 + int(rank), local_world_size=8)
    device = groups.join_process_group(here, tiny_config(2)).device
    assert dist.group.WORLD is not None and dist.group.WORLD.bound_device_id == device
    assert collect_versions().items() > {"gpu": "NVIDIA H200 (fake)", "cuda": torch.version.cuda}.items()
    assert collect_versions().keys() > {"cudnn", "nccl"}
    note(f"joined {device.index}")
    dist.barrier(groups.new_control_group())  # the fake's NCCL waits for nobody, and rank 0 takes the store along


def checkpoint(mode: str, folder: str) -> None:
    """Two saves, each after a kernel that changes the weights and before another one."""
    weights = torch.zeros(1 << 20, device=join().device)
    saver = Checkpointer(
        Path(folder),
        groups.new_control_group(),
        keep=2,
        background=mode == "async",
        describe={"layout": {}},
        on_saved=lambda *_: None,
    )
    for step in (1, 2):
        weights.add_(1)
        note("save")
        saver.save({"model.weights": weights}, step=step, samples_consumed=0, extra={})
        saver.wait_until_staged()
        note("staged")
        weights.add_(1)
    saver.close()
    note("closed")


def loader(folder: str) -> None:
    """A few batches; its thread says where it is."""

    class Noting(TokenDataset):
        def allocate_batch(self, rows: int, pin: bool = False) -> dict[str, torch.Tensor]:
            note("read")
            return super().allocate_batch(rows, pin)

    device = join().device
    file = Path(folder, "0.h5")
    file.write_bytes(bytes(800))
    shard = ShardEntry.model_construct(file=str(file), tokens=400, offset=0, dtype="uint16")
    dataset = Noting([shard], 8)
    with BatchLoader(dataset, iter(torch.arange(40).view(10, 4).numpy()), device) as ready:
        for _ in range(10):
            assert next(ready)["tokens"].device == device


def mpi() -> None:
    """A collective with a callback, as DDP has it, and a message to this rank itself."""
    import torch.distributed as dist

    device = join(backend="mpi").device
    tensor = torch.ones(1000, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().then(lambda done: done.value()[0].mul_(2)).wait()
    received = torch.empty_like(tensor)
    for message in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, 0), dist.P2POp(dist.isend, tensor, 0)]):
        message.wait()


def draw() -> None:
    """The initial weights of a tiny model."""
    config, world = tiny_config(1), join()
    note("build")
    Engine(config, resolve_layout(config, 1, 1, VOCAB), world, DecoderTask(config, VOCAB))
    note(f"built {4 * VOCAB * config.model.dim}")


def memory() -> None:
    """Peaks of two phases: one takes 1 GB and frees it, the next takes 0.1."""
    device = join().device
    measure_peak_memory(device)
    for size, most in ((1e9, 1.0), (1e8, 0.1)):
        taken = torch.empty(int(size), dtype=torch.uint8, device=device)
        del taken
        found = measure_peak_memory(device)
        assert most <= found["memory_gb"] < most + 0.05, found
        assert found["memory_reserved_gb"] >= 1.0, "the allocator keeps what was freed"


def powersgd(rank: str, port: str) -> None:
    """Three steps; after each backward it asks for memory in the sizes that the hook's callbacks read."""
    config = tiny_config(2, parallel={"hook": {"kind": "powersgd", "rank": 2, "warmup_steps": 0}})
    here = make_rank_info(int(rank), 2, int(port))
    world = groups.join_process_group(here, config)
    engine = Engine(config, resolve_layout(config, 2, 2, VOCAB), world, DecoderTask(config, VOCAB))
    read: list[range] = []  # bytes
    packed = replica_sync._pack

    def noted(tensors: Any) -> torch.Tensor:
        made = packed(tensors)
        read.append(_bytes(made))
        return made

    replica_sync._pack = noted
    for step, batch in enumerate(make_batches(config)[:3], 1):
        read.clear()
        engine.backward({"tokens": batch.chunk(2)[here.rank].to(world.device)}, step)
        new = [torch.empty(len(one), dtype=torch.uint8, device=world.device) for one in read for _ in range(500)]
        taken = [one for one in read if any(one[0] in _bytes(other) or _bytes(other)[0] in one for other in new)]
        note(f"backward: {len(read)} read, {len(taken)} taken")
        del new
        engine.update_weights(1.0)


def lean(chunk: str) -> None:
    """Steps of a bf16 training that keeps no master, with or without chunks of its loss, and the peak of each."""
    low = {"precision": "bf16", "loss_chunk": int(chunk) or None, "global_batch": 64, "micro_batch": 64}
    config = tiny_config(1, train=low, optimizer={"state": {"moments": "bf16", "master": "none"}})
    device = (world := join()).device
    engine = Engine(config, resolve_layout(config, 1, 1, LARGE), world, DecoderTask(config, LARGE))
    engine.state_dict()
    for step, batch in enumerate(make_batches(config)[:3].to(device), 1):
        note("step")
        engine.backward({"tokens": batch}, step)
        engine.clip_gradients(1.0)
        engine.update_weights(1.0)
        note(f"updated {torch.cuda.max_memory_allocated()}")


def compiled(recompute: str) -> None:
    """Steps of four compiled blocks: how many graphs were compiled."""
    from torch._dynamo.utils import counters

    train = {"precision": "bf16", "compile": True}
    config = tiny_config(1, train=train, parallel={"activation_checkpointing": recompute})
    device = (world := join()).device
    engine = Engine(config, resolve_layout(config, 1, 1, VOCAB), world, DecoderTask(config, VOCAB))
    for step, batch in enumerate(make_batches(config)[:2].to(device), 1):
        engine.backward({"tokens": batch}, step)
        engine.clip_gradients(1.0)
        engine.update_weights(1.0)
    assert len(engine.task.blocks(engine.parts[0])) == 4
    note(f"graphs {counters['stats']['unique_graphs']} breaks {counters['graph_break'].total()}")


def attention() -> None:
    """Which of torch's attentions each precision takes, forward and backward."""

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "scaled_dot_product" in str(func):
                note(f"{precision} {func._schema.name.removeprefix('aten::')}")
            return func(*args, **(kwargs or {}))

    world = join()
    model = {"dim": 256, "heads": 4, "kv_heads": 2, "layers": 1}
    for precision, cudnn in (("bf16", True), ("fp16", True), ("fp32", True), ("bf16", False)):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        config = tiny_config(1, train={"precision": precision}, model=model)
        engine = Engine(config, resolve_layout(config, 1, 1, VOCAB), world, DecoderTask(config, VOCAB))
        with Noting():
            engine.backward({"tokens": make_batches(config)[0][:2].to(world.device)}, 1)


def _bytes(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    groups.leave_process_group()
