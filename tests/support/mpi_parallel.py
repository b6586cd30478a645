"""Every kind of parallel training that torch offers, over MPI, against one process: losses and gradient norms."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, HIDDEN, BATCH, STEPS = 16, 48, 48, 3


def layers(count: int) -> nn.Sequential:
    """`count` blocks, the same in every rank."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)) for _ in range(count)]
    return nn.Sequential(*blocks)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def norm_squared(parameters: Any) -> torch.Tensor:
    total = torch.zeros(())
    for parameter in parameters:
        grad = parameter.grad
        total += (grad.full_tensor() if isinstance(grad, DTensor) else grad).square().sum()
    return total


def train(model: nn.Module, part: slice = slice(None), group: Any = None) -> list[float]:
    """Losses and gradient norms of some steps on this rank's `part` of the batch; means over `group`."""
    numbers = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        x, y = (tensor[part] for tensor in batch(step))
        loss = mean_loss(model(x), y)
        loss.backward()
        loss = loss.detach().clone()
        if group is not None:
            dist.all_reduce(loss, dist.ReduceOp.AVG, group=group)
        numbers += [loss.item(), norm_squared(model.parameters()).sqrt().item()]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def close(name: str, got: list[float], expected: list[float]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert abs(a - b) <= 1e-5 * abs(b), f"{name}: {got}, one process {expected}"


def own_part(rank: int, size: int) -> slice:
    return slice(rank * BATCH // size, (rank + 1) * BATCH // size)


def data_parallel() -> None:
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    expected = train(layers(2))
    close("DDP", train(DistributedDataParallel(layers(2), bucket_cap_mb=1), own_part(rank, size), world), expected)
    meshes = {"FSDP": init_device_mesh("cpu", (size,))}
    if size % 2 == 0:
        meshes["HSDP"] = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for name, mesh in meshes.items():
        model = layers(2)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        close(name, train(model, own_part(rank, size), world), expected)
        checkpoint(model)


def checkpoint(model: nn.Module) -> None:
    """Save a sharded model, spoil it, load it."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, src=0)
    before = [parameter.to_local().clone() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    dcp.save(model.state_dict(), checkpoint_id=Path(box[0]) / "saved")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=Path(box[0]) / "saved")
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert isinstance(parameter, DTensor) and torch.equal(parameter.to_local(), old)


def tensor_parallel() -> None:
    size = dist.get_world_size()
    data = 2 if size % 4 == 0 else 1
    mesh = init_device_mesh("cpu", (data, size // data), mesh_dim_names=("data", "tensor"))
    model = layers(2)
    for layer in model:
        parallelize_module(layer, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["data"])
    group = mesh.get_group("data")
    close("TP", train(model, own_part(dist.get_rank(group), data), group), train(layers(2)))


def pipeline() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = layers(2 * size)
    expected = []
    for step in range(STEPS):
        loss = mean_loss(whole(batch(step)[0]), batch(step)[1])
        loss.backward()
        expected += [loss.item(), norm_squared(whole.parameters()).sqrt().item()]
        whole.zero_grad()
    for name, chunks, schedule in (("1F1B", 1, Schedule1F1B), ("zero bubble", 2, ScheduleInterleavedZeroBubble)):
        everything, stages = layers(2 * size), []
        for chunk in range(chunks):
            number, each = rank + chunk * size, 2 // chunks
            module = nn.Sequential(*list(everything)[number * each : (number + 1) * each])
            stages.append(PipelineStage(module, number, size * chunks, torch.device("cpu"), group=dist.group.WORLD))
        made: Any = schedule
        runner = made(stages if chunks > 1 else stages[0], n_microbatches=2 * size, loss_fn=mean_loss)
        numbers = []
        for step in range(STEPS):
            x, y = batch(step)
            losses: list[torch.Tensor] = []
            inputs = [x] if rank == 0 else []
            outputs: dict[str, Any] = {"target": y, "losses": losses} if rank == size - 1 else {}
            runner.step(*inputs, **outputs)
            total = torch.stack(losses).mean().detach() if losses else torch.zeros(())
            squares = torch.stack([norm_squared(stage.submod.parameters()) for stage in stages]).sum()
            both = torch.stack([total, squares])
            dist.all_reduce(both)
            numbers += [both[0].item(), both[1].sqrt().item()]
            for stage in stages:
                stage.submod.zero_grad()
        close(name, numbers, expected)


def run_all() -> None:
    cases: list[Callable[[], None]] = [data_parallel, tensor_parallel, pipeline]
    for case in cases:
        case()
