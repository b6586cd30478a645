"""Programs that tests run on a fake GPU: parts of the pipeline as a rank uses them, on GPU 1 of 2.

`python -m tests.fake_gpu.programs NAME ARGUMENT …` calls one of these functions. A function writes notes into the log
of CUDA calls, so that a test can find the calls between two notes. Computed values are meaningless, because the kernels
of the fake GPU compute nothing.
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
from pipeline.config.read import load_config
from pipeline.config.sections import ModelConfig
from pipeline.data.loader import BatchLoader
from pipeline.data.manifest import ShardEntry
from pipeline.data.samples import TokenDataset
from pipeline.model.decoder import Decoder
from pipeline.model.task import DecoderTask
from pipeline.parallel import replica_sync
from pipeline.parallel.host_tensor import HostTensor
from pipeline.parallel.mesh import resolve_layout
from pipeline.train.engine import Engine
from pipeline.train.metrics import measure_peak_memory
from tests.support.ranks import make_rank_info
from tests.support.tiny_training import VOCAB, make_batches, tiny_config

LARGE_VOCAB = 8192
"""A vocabulary whose logits need much more memory than the rest of the tiny model."""


def write_note(text: str) -> None:
    """Write a note into the log of the fake GPU."""
    ctypes.CDLL(None).fake_gpu_note(text.encode())


def join_on_gpu1(**parallel: Any) -> groups.World:
    """Join a process group of one rank, which uses the second GPU."""
    groups.assign_gpus = lambda ranks, exclusive: [1]
    return groups.join_process_group(make_rank_info(0, 1, 1), tiny_config(1, parallel=parallel))


def join_on_nearest_gpu(rank: str, port: str) -> None:
    """Join a process group as local rank 4 or 5 of 8, and note the GPU that this rank uses.

    This is a node where Slurm has bound these two ranks to the two GPUs nearest to them.
    """
    import torch.distributed as dist

    rank_info = make_rank_info(int(rank), 2, int(port))
    rank_info = dataclasses.replace(rank_info, local_rank=4 + int(rank), local_world_size=8)
    device = groups.join_process_group(rank_info, tiny_config(2)).device
    assert dist.group.WORLD is not None and dist.group.WORLD.bound_device_id == device
    assert collect_versions().items() > {"gpu": "NVIDIA H200 (fake)", "cuda": torch.version.cuda}.items()
    assert collect_versions().keys() > {"cudnn", "nccl"}
    write_note(f"joined {device.index}")
    # The fake NCCL does not wait for other ranks. Without this barrier, rank 0 could exit early and end the store.
    dist.barrier(groups.new_control_group())


def save_two_checkpoints(mode: str, folder: str) -> None:
    """Save two checkpoints, in the background if `mode` is "async".

    Kernels that change the weights run before and after each save.
    """
    weights = torch.zeros(1 << 20, device=join_on_gpu1().device)
    saver = Checkpointer(
        Path(folder),
        groups.new_control_group(),
        keep=2,
        background=mode == "async",
        manifest_entries={"layout": {}},
        on_saved=lambda *_: None,
    )
    for step in (1, 2):
        weights.add_(1)
        write_note("save")
        saver.save({"model.weights": weights}, step=step, samples_consumed=0, extra={})
        saver.wait_until_staged()
        write_note("staged")
        weights.add_(1)
    saver.close()
    write_note("closed")


def load_batches(folder: str) -> None:
    """Load ten batches from a file in `folder`. The thread of the loader writes a note before each read."""

    class NoteWritingDataset(TokenDataset):
        """Write a note before each read."""

        def allocate_batch(self, rows: int, pin: bool = False) -> dict[str, torch.Tensor]:
            write_note("read")
            return super().allocate_batch(rows, pin)

    device = join_on_gpu1().device
    file = Path(folder, "0.h5")
    file.write_bytes(bytes(800))
    shard = ShardEntry.model_construct(file=str(file), tokens=400, offset=0, dtype="uint16")
    dataset = NoteWritingDataset([shard], 8)
    with BatchLoader(dataset, iter(torch.arange(40).view(10, 4).numpy()), device) as batches:
        for _ in range(10):
            assert next(batches)["tokens"].device == device


def communicate_over_mpi() -> None:
    """Run a collective with a callback, as DDP does, and send a message to this rank itself."""
    import torch.distributed as dist

    device = join_on_gpu1(backend="mpi").device
    tensor = torch.ones(1000, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().then(lambda future: future.value()[0].mul_(2)).wait()
    received = torch.empty_like(tensor)
    for message in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, 0), dist.P2POp(dist.isend, tensor, 0)]):
        message.wait()


def initialize_weights() -> None:
    """Generate the initial weights of a tiny model. The last note has the size of the embedding in bytes."""
    config = tiny_config(1)
    world = join_on_gpu1()
    write_note("build")
    Engine(config, resolve_layout(config, 1, 1, VOCAB), world, DecoderTask(config, VOCAB))
    write_note(f"built {4 * VOCAB * config.model.dim}")


def check_peak_memory() -> None:
    """Check the measured peak memory of two phases.

    The first phase allocates and frees a tensor of 1 GB, the second phase one of 0.1 GB.
    """
    device = join_on_gpu1().device
    measure_peak_memory(device)
    for size, peak_gb in ((1e9, 1.0), (1e8, 0.1)):
        allocated = torch.empty(int(size), dtype=torch.uint8, device=device)
        del allocated
        measured = measure_peak_memory(device)
        assert peak_gb <= measured["memory_gb"] < peak_gb + 0.05, measured
        assert measured["memory_reserved_gb"] >= 1.0, "the allocator must keep freed memory"


def train_with_powersgd(rank: str, port: str) -> None:
    """Train three steps with PowerSGD. After each backward pass, allocate tensors of the sizes of the hook's buffers.

    The allocator must not reuse a buffer while a callback of the hook may still read it. The note has the number of
    buffers that callbacks read, and the number of these buffers whose memory was reused ("taken").
    """
    config = tiny_config(2, parallel={"hook": {"kind": "powersgd", "rank": 2, "warmup_steps": 0}})
    rank_info = make_rank_info(int(rank), 2, int(port))
    world = groups.join_process_group(rank_info, config)
    engine = Engine(config, resolve_layout(config, 2, 2, VOCAB), world, DecoderTask(config, VOCAB))
    read_ranges: list[range] = []
    original_pack = replica_sync._pack

    def pack_and_record(tensors: Any) -> torch.Tensor:
        packed = original_pack(tensors)
        read_ranges.append(_get_address_range(packed))
        return packed

    replica_sync._pack = pack_and_record
    for step, batch in enumerate(make_batches(config)[:3], 1):
        read_ranges.clear()
        engine.backward({"tokens": batch.chunk(2)[rank_info.rank].to(world.device)}, step)
        new_tensors = [
            torch.empty(len(addresses), dtype=torch.uint8, device=world.device)
            for addresses in read_ranges
            for _ in range(500)
        ]
        new_ranges = [_get_address_range(tensor) for tensor in new_tensors]
        reused_ranges = [
            addresses
            for addresses in read_ranges
            if any(addresses[0] in new_range or new_range[0] in addresses for new_range in new_ranges)
        ]
        write_note(f"backward: {len(read_ranges)} read, {len(reused_ranges)} taken")
        del new_tensors
        engine.update_weights(1.0)


def train_with_chunked_loss(chunk: str) -> None:
    """Train three steps in bf16 without master weights. Note the peak memory in bytes after each step.

    Args:
        chunk: `train.loss_chunk`; 0 computes the loss without chunks.
    """
    train = {"precision": "bf16", "loss_chunk": int(chunk) or None, "global_batch": 64, "micro_batch": 64}
    config = tiny_config(1, train=train, optimizer={"state": {"moments": "bf16", "master": "none"}})
    world = join_on_gpu1()
    device = world.device
    engine = Engine(config, resolve_layout(config, 1, 1, LARGE_VOCAB), world, DecoderTask(config, LARGE_VOCAB))
    for step, batch in enumerate(make_batches(config)[:3].to(device), 1):
        write_note("step")
        engine.backward({"tokens": batch}, step)
        engine.clip_gradients(1.0)
        engine.update_weights(1.0)
        write_note(f"updated {torch.cuda.max_memory_allocated()}")


def train_compiled_blocks(activation_checkpointing: str) -> None:
    """Train two steps with four compiled blocks. Note the numbers of compiled graphs and of graph breaks."""
    from torch._dynamo.utils import counters

    train = {"precision": "bf16", "compile": True}
    config = tiny_config(1, train=train, parallel={"activation_checkpointing": activation_checkpointing})
    world = join_on_gpu1()
    device = world.device
    engine = Engine(config, resolve_layout(config, 1, 1, VOCAB), world, DecoderTask(config, VOCAB))
    for step, batch in enumerate(make_batches(config)[:2].to(device), 1):
        engine.backward({"tokens": batch}, step)
        engine.clip_gradients(1.0)
        engine.update_weights(1.0)
    assert len(engine.task.blocks(engine.parts[0])) == 4
    write_note(f"graphs {counters['stats']['unique_graphs']} breaks {counters['graph_break'].total()}")


def note_attention_kernels() -> None:
    """Run attention forward and backward in each precision, and note the kernels that torch chooses.

    The last case is bf16 without cuDNN's attention.
    """

    class NoteAttentionKernels(TorchDispatchMode):
        """Write a note for each kernel of attention."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "scaled_dot_product" in str(func):
                write_note(f"{precision} {func._schema.name.removeprefix('aten::')}")
            return func(*args, **(kwargs or {}))

    world = join_on_gpu1()
    model = {"dim": 256, "heads": 4, "kv_heads": 2, "layers": 1}
    for precision, allows_cudnn in (("bf16", True), ("fp16", True), ("fp32", True), ("bf16", False)):
        torch.backends.cuda.enable_cudnn_sdp(allows_cudnn)
        config = tiny_config(1, train={"precision": precision}, model=model)
        engine = Engine(config, resolve_layout(config, 1, 1, VOCAB), world, DecoderTask(config, VOCAB))
        with NoteAttentionKernels():
            engine.backward({"tokens": make_batches(config)[0][:2].to(world.device)}, 1)


def attend_to_documents(compiles: str) -> None:
    """Run a decoder on documents and windows of several lengths, and check that its memory is linear in the tokens.

    Args:
        compiles: "yes" to compile the blocks.
    """
    device = join_on_gpu1().device
    model = ModelConfig(dim=256, layers=2, heads=4, kv_heads=2, sliding_window=100, max_window_layers=1)
    peaks = []
    for length, document in ((4096, 64), (4096, 500), (4096, 33), (16384, 33)):
        decoder = Decoder(model, VOCAB, length).to(device)
        decoder.compute_dtype = torch.bfloat16
        assert decoder.lm_head is not None
        decoder.lm_head.chunk = 1024
        for block in decoder.model.blocks if compiles == "yes" else ():
            block.compile()
        tokens_BT = torch.zeros((2, length), dtype=torch.int64, device=device)
        starts_BT = (torch.arange(length) % document == 0).expand(2, -1)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        write_note("forward")
        loss = decoder(tokens_BT, targets_BT=tokens_BT, starts_BT=HostTensor(starts_BT))
        loss.backward()
        write_note("ended")
        peaks.append(torch.cuda.max_memory_allocated() - base)
    assert peaks[3] < 4.1 * peaks[2], peaks


def train_on_documents(zero: str) -> None:
    """Run forward and backward of two micro-batches, with document boundaries, and note the phases."""
    world = join_on_gpu1()
    model = {"dim": 256, "heads": 4, "kv_heads": 2, "layers": 1}
    data = {"document_mask": True}
    config = tiny_config(1, train={"precision": "bf16"}, model=model, parallel={"zero": int(zero)}, data=data)
    engine = Engine(config, resolve_layout(config, 1, 1, VOCAB), world, DecoderTask(config, VOCAB))
    size = 2 * config.train.micro_batch
    engine.backward({"tokens": make_batches(config)[0][:size].to(world.device)}, 1, write_note)


def train_one_rank_of_eight(config_file: str) -> None:
    """Run two steps of two micro-batches as rank 0 of 8, and note the phases and each peak in bytes.

    Samples consist of documents of 10,000 tokens. Collectives return at once (torch's fake process group).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = load_config(Path(config_file), ["train.global_batch=2"])
    vocab = config.data.tokenizer.vocab_size
    groups.configure_determinism(config)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    world = groups.World(0, 8, torch.device("cuda", 0), "fake")
    task = DecoderTask(config, vocab)
    length = config.data.sequence_length
    starts_BT = (torch.arange(length) % 10_000 == 0).expand(2, -1)
    task.document_boundaries = lambda batch: {"starts_BT": starts_BT}  # type: ignore[method-assign]
    engine = Engine(config, resolve_layout(config), world, task, from_scratch=False)
    tokens_BT = torch.zeros((2, length + 1), dtype=torch.int64, device=world.device)
    for step in (1, 2):
        torch.cuda.reset_peak_memory_stats()
        engine.backward({"tokens": tokens_BT}, step, write_note)
        engine.clip_gradients(config.optimizer.clip_norm)
        engine.update_weights(1.0)
        write_note(f"peak {torch.cuda.max_memory_allocated()}")


def _get_address_range(tensor: torch.Tensor) -> range:
    """Return the addresses of the bytes of a contiguous tensor."""
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    groups.leave_process_group()
