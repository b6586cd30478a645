"""Compare the parallel training methods of torch over MPI with training in one process.

Losses and gradient norms must be close. The methods are DDP, FSDP, HSDP, tensor parallelism and pipeline schedules.
"""

from __future__ import annotations

import tempfile
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

WIDTH = 16
HIDDEN = 48
BATCH = 48
STEPS = 3


def make_layers(count: int) -> nn.Sequential:
    """Return `count` blocks with the same weights in every rank."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)) for _ in range(count)]
    return nn.Sequential(*blocks)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a step, each of shape (BATCH, WIDTH), the same in every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def compute_mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def compute_squared_norm(parameters: Any) -> torch.Tensor:
    """Return the sum of the squares of all gradients."""
    total = torch.zeros(())
    for parameter in parameters:
        grad = parameter.grad
        total += (grad.full_tensor() if isinstance(grad, DTensor) else grad).square().sum()
    return total


def train_model(model: nn.Module, samples: slice = slice(None), group: Any = None) -> list[float]:
    """Train on `samples` of each batch.

    Returns:
        The loss and the gradient norm of each step, alternately. The loss is averaged over `group`, if given.
    """
    results = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        x, y = (tensor[samples] for tensor in make_batch(step))
        loss = compute_mean_loss(model(x), y)
        loss.backward()
        loss = loss.detach().clone()
        if group is not None:
            dist.all_reduce(loss, dist.ReduceOp.AVG, group=group)
        results += [loss.item(), compute_squared_norm(model.parameters()).sqrt().item()]
        optimizer.step()
        optimizer.zero_grad()
    return results


def check_close(name: str, actual: list[float], expected: list[float]) -> None:
    """Raise AssertionError if a value differs from that of one process by more than 1e-5 of the value."""
    for a, b in zip(actual, expected, strict=True):
        assert abs(a - b) <= 1e-5 * abs(b), f"{name}: {actual}, one process {expected}"


def select_samples(rank: int, size: int) -> slice:
    """Return the samples of a batch for the data parallel rank `rank` of `size`."""
    return slice(rank * BATCH // size, (rank + 1) * BATCH // size)


def check_data_parallel() -> None:
    """Compare DDP, FSDP and (with an even number of ranks) HSDP with one process."""
    size = dist.get_world_size()
    world = dist.group.WORLD
    samples = select_samples(dist.get_rank(), size)
    expected = train_model(make_layers(2))
    ddp = DistributedDataParallel(make_layers(2), bucket_cap_mb=1)
    check_close("DDP", train_model(ddp, samples, world), expected)
    meshes = {"FSDP": init_device_mesh("cpu", (size,))}
    if size % 2 == 0:
        meshes["HSDP"] = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for name, mesh in meshes.items():
        model = make_layers(2)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        check_close(name, train_model(model, samples, world), expected)
        check_checkpoint(model)


def check_checkpoint(model: nn.Module) -> None:
    """Save a sharded model, set its weights to zero, load the checkpoint, and compare the weights."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    saved_parts = [parameter.to_local().clone() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    dcp.save(model.state_dict(), checkpoint_id=Path(folder[0]) / "saved")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=Path(folder[0]) / "saved")
    for parameter, saved_part in zip(model.parameters(), saved_parts, strict=True):
        assert isinstance(parameter, DTensor) and torch.equal(parameter.to_local(), saved_part)


def check_tensor_parallel() -> None:
    """Compare tensor parallelism with one process. With a multiple of 4 ranks, combine it with FSDP over 2 ranks."""
    size = dist.get_world_size()
    dp_size = 2 if size % 4 == 0 else 1
    mesh = init_device_mesh("cpu", (dp_size, size // dp_size), mesh_dim_names=("data", "tensor"))
    model = make_layers(2)
    for layer in model:
        parallelize_module(layer, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["data"])
    group = mesh.get_group("data")
    samples = select_samples(dist.get_rank(group), dp_size)
    check_close("TP", train_model(model, samples, group), train_model(make_layers(2)))


def check_pipeline_parallel() -> None:
    """Compare pipeline schedules with one process.

    Each rank has two layers: one pipeline-parallel stage with 1F1B, or two with the zero-bubble schedule. The weights
    are not updated, and each step has another batch.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    full_model = make_layers(2 * size)
    expected = []
    for step in range(STEPS):
        x, y = make_batch(step)
        loss = compute_mean_loss(full_model(x), y)
        loss.backward()
        expected += [loss.item(), compute_squared_norm(full_model.parameters()).sqrt().item()]
        full_model.zero_grad()
    schedules = (("1F1B", 1, Schedule1F1B), ("zero bubble", 2, ScheduleInterleavedZeroBubble))
    for name, stages_per_rank, schedule_class in schedules:
        layers = list(make_layers(2 * size))
        layers_per_stage = 2 // stages_per_rank
        stages = []
        for stage_index in range(rank, size * stages_per_rank, size):
            module = nn.Sequential(*layers[stage_index * layers_per_stage : (stage_index + 1) * layers_per_stage])
            stages.append(
                PipelineStage(module, stage_index, size * stages_per_rank, torch.device("cpu"), group=dist.group.WORLD)
            )
        make_schedule: Any = schedule_class
        schedule = make_schedule(
            stages if stages_per_rank > 1 else stages[0], n_microbatches=2 * size, loss_fn=compute_mean_loss
        )
        results = []
        for step in range(STEPS):
            x, y = make_batch(step)
            losses: list[torch.Tensor] = []
            inputs = [x] if rank == 0 else []
            loss_arguments: dict[str, Any] = {"target": y, "losses": losses} if rank == size - 1 else {}
            schedule.step(*inputs, **loss_arguments)
            loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
            squared_norm = torch.stack([compute_squared_norm(stage.submod.parameters()) for stage in stages]).sum()
            sums = torch.stack([loss, squared_norm])
            dist.all_reduce(sums)
            results += [sums[0].item(), sums[1].sqrt().item()]
            for stage in stages:
                stage.submod.zero_grad()
        check_close(name, results, expected)


def check_all() -> None:
    """Run all comparisons."""
    check_data_parallel()
    check_tensor_parallel()
    check_pipeline_parallel()
