"""LoRA: train a low-rank addition to each of some linear layers, whose own weights stay frozen.

A layer with the weight W computes `x Wᵀ + (alpha / rank) · x Aᵀ Bᵀ` with A of shape (rank, in) and B of shape (out,
rank). B starts at 0, so the model starts as without adapters (Hu et al., arXiv 2106.09685, section 4.1). A starts as in
peft: uniform in ±1/√in. The parameters are named `….q_proj.lora_A.weight` and `….q_proj.lora_B.weight`.

With tensor parallelism, the adapter is split like its layer: B by rows if W is split by rows, A by columns if W is
split by columns. The other matrix is replicated, and no message is added.

With `adapter.base: nf4`, the weights of all linear layers of the blocks are quantized by torchao when they are copied
into the model (QLoRA; Dettmers et al., arXiv 2305.14314, section 3). Each product dequantizes its weight. The quantized
weights are the same in each start, because they are computed from the same values.

Names of tensors end with their shape: I inputs, O outputs, R rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from pipeline.base.errors import UserError
from pipeline.base.files import sha256_json
from pipeline.comm.groups import all_gather_results
from pipeline.config.sections import AdapterConfig
from pipeline.model.decoder import full_tensor
from pipeline.model.spec import LORA_A, NF4_BLOCK, NF4_SCALE_BLOCK


class FrozenLinear(nn.Linear):
    """A linear layer whose weight may be quantized. It takes the parameters of `linear`, which keep their names.

    Args:
        linear: the layer.
        adapter: the config of the adapters.
    """

    def __init__(self, linear: nn.Linear, adapter: AdapterConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.is_quantized = adapter.base is not None

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer. Shapes (…, I) → (…, O)."""
        if self.is_quantized and torch.is_autocast_enabled(input.device.type):
            # Autocast does not see the product, because torchao replaces it.
            input = input.to(torch.get_autocast_dtype(input.device.type))
        output: Tensor = F.linear(input, self.weight, self.bias)
        return output


class LoraLinear(FrozenLinear):
    """A linear layer with an adapter. The arguments are those of `FrozenLinear`."""

    def __init__(self, linear: nn.Linear, adapter: AdapterConfig) -> None:
        super().__init__(linear, adapter)
        self.scale = adapter.alpha / adapter.rank
        self.dropout = adapter.dropout
        device = linear.weight.device
        self.lora_A = nn.Linear(self.in_features, adapter.rank, bias=False, device=device)
        self.lora_B = nn.Linear(adapter.rank, self.out_features, bias=False, device=device)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer plus that of the adapter. Shapes (…, I) → (…, O)."""
        return super().forward(input) + self._compute_addition(input)

    def _compute_addition(self, x: Tensor) -> Tensor:
        """Return the output of the adapter."""
        a_RI, b_OR = self.lora_A.weight, self.lora_B.weight
        if not isinstance(x, DTensor):
            return F.linear(F.linear(self._drop_some(x), a_RI), b_OR) * self.scale
        # Each rank multiplies its own parts. DTensor would first sum the products with A over the ranks.
        assert isinstance(a_RI, DTensor) and isinstance(b_OR, DTensor)
        placement: Placement = Replicate()
        x_placements = a_placements = b_placements = None
        if b_OR.placements[0].is_shard(0):  # Each rank computes some outputs, so it has a part of each gradient.
            placement = Shard(x.ndim - 1)
            x_placements = a_placements = [Partial()]
        elif a_RI.placements[0].is_shard(1):  # Each rank has some inputs, so it computes a part of each sum.
            placement = Partial()
            b_placements = [Partial()]
        local_x = x.to_local(grad_placements=x_placements)
        a_RI, b_OR = a_RI.to_local(grad_placements=a_placements), b_OR.to_local(grad_placements=b_placements)
        addition = F.linear(F.linear(self._drop_some(local_x), a_RI), b_OR) * self.scale
        return DTensor.from_local(addition, x.device_mesh, [placement], run_check=False)

    def _drop_some(self, x: Tensor) -> Tensor:
        """Apply dropout to the input of the adapter."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


def list_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers that may have adapters: all except the output layer of a language model."""
    # Other classes derived from nn.Linear, such as the output layer of the decoder, have their own `forward`. Models of
    # transformers have a method that returns their output layer.
    get_output_layer: Any = getattr(model, "get_output_embeddings", lambda: None)
    output_layer = get_output_layer()
    modules = model.named_modules()
    return [name for name, module in modules if type(module) is nn.Linear and module is not output_layer]


def add_adapters(model: nn.Module, adapter: AdapterConfig | None, dtype: torch.dtype | None = None) -> None:
    """Replace the linear layers of `model` whose names match a pattern of `adapter.targets`.

    Args:
        model: the model.
        adapter: the config of the adapters; None: change nothing.
        dtype: the type in which autocast multiplies the weights of linear layers. These are also stored in it, except
            those of adapters, which are trained. This halves their memory, and changes no result. None: change no type.
    """
    if adapter is None:
        return
    for name in list_layers(model):
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        if dtype is not None:
            module.weight.data = module.weight.data.to(dtype)
        has_adapter = any(fnmatchcase(name, pattern) for pattern in adapter.targets)
        if has_adapter or adapter.base is not None:
            parent, _, attribute = name.rpartition(".")
            new_module = LoraLinear(module, adapter) if has_adapter else FrozenLinear(module, adapter)
            setattr(model.get_submodule(parent), attribute, new_module)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device, except weights that will be quantized."""
    set_aside = [(module, module.weight) for module in list_quantized(model)]
    for module, _ in set_aside:
        module.weight = None  # type: ignore[assignment]
    model.to_empty(device=device)
    for module, weight in set_aside:
        module.weight = weight


def quantize_copied(
    model: nn.Module, weights: Iterable[tuple[str, nn.Parameter]], device: torch.device
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights for a function that copies values into them. Quantize each after its values are copied.

    Only one weight at a time is not quantized, so the model never takes the memory of its whole weights.

    Args:
        model: the model, after :func:`allocate`.
        weights: all weights of the model that do not belong to adapters, with their names.
        device: the device of the quantized weights.
    """
    modules = {id(module.weight): module for module in list_quantized(model)}
    for name, weight in list(weights):
        if (module := modules.get(id(weight))) is None:
            yield name, weight
            continue
        values = nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
        yield name, values
        module.weight = nn.Parameter(quantize(name, values.detach()), requires_grad=False)


def quantize(name: str, values: Tensor) -> Tensor:
    """Return a quantized copy of a weight (torchao's NF4Tensor, with blocks of 64 elements).

    Args:
        name: the name of the weight.
        values: the weight, on its device and in the type in which it is multiplied.

    Raises:
        UserError: if torchao is missing, or the number of elements is not a multiple of the block size.
    """
    try:
        from torchao.quantization import NF4Tensor
    except ImportError as error:
        raise UserError(
            "model.no_torchao",
            f"adapter.base nf4 needs torchao 0.18 or later: {error}; install 'sluice[nf4]', or remove the key",
        ) from error
    blocks, remainder = divmod(values.numel(), NF4_BLOCK)
    if remainder:
        raise UserError(
            "model.indivisible_weight",
            f"adapter.base nf4: {name} has {values.numel()} elements, not a multiple of {NF4_BLOCK}: remove the key",
        )
    return cast(Tensor, NF4Tensor.from_tensor(values, NF4_BLOCK, math.gcd(blocks, NF4_SCALE_BLOCK)))


def share_quantized(source: nn.Module, target: nn.Module) -> None:
    """Let another model with the same modules use the quantized weights of `source`, without a copy."""
    for module, target_module in zip(list_quantized(source), list_quantized(target), strict=True):
        target_module.weight = module.weight


def list_quantized(model: nn.Module) -> list[FrozenLinear]:
    """Return the layers whose weights are quantized."""
    return [module for module in model.modules() if isinstance(module, FrozenLinear) and module.is_quantized]


@contextmanager
def adapters_set_aside(model: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Remove all adapters while `model` is parallelized in the block. Then split each like its layer.

    torch's styles for linear layers would split the parameters of the adapter like those of the layer.
    """
    adapters = []
    for module in model.modules():
        if isinstance(module, LoraLinear):
            adapters.append((module, module.lora_A, module.lora_B))
            del module.lora_A, module.lora_B
    yield
    for module, lora_a, lora_b in adapters:
        weight = module.weight
        placement = weight.placements[0] if isinstance(weight, DTensor) else Replicate()
        _distribute(lora_a, mesh, Shard(1) if placement.is_shard(1) else Replicate())
        _distribute(lora_b, mesh, Shard(0) if placement.is_shard(0) else Replicate())
        module.lora_A, module.lora_B = lora_a, lora_b


def _distribute(linear: nn.Linear, mesh: DeviceMesh, placement: Placement) -> None:
    """Make the weight a DTensor."""
    linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [placement]))


@torch.no_grad()
def hash_weights(weights: Iterable[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> str:
    """Return the SHA-256 of the weights of all ranks, which does not depend on the layout.

    Args:
        weights: the names and weights of this rank.
        group: a Gloo group of all ranks, which must all call this function.
    """
    own_hashes = {}
    for name, weight in weights:
        values = full_tensor(weight).cpu().contiguous().view(-1).view(torch.uint8)
        own_hashes[name] = hashlib.sha256(values.numpy().data).hexdigest()
    hashes: dict[str, str] = {}
    for hashes_of_rank in all_gather_results(group, lambda: own_hashes):
        hashes |= hashes_of_rank
    return sha256_json(hashes)


@torch.no_grad()
def sample_adapter(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return the initial values of a whole parameter of an adapter (fp32), on the device of `generator`.

    Args:
        name: the name of the parameter.
        shape: (R, I) or (O, R).
        generator: the random generator.
    """
    values = torch.zeros(shape, dtype=torch.float32, device=generator.device)
    if name.endswith(LORA_A):
        bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_ with a = √5, as in peft
        values.uniform_(-bound, bound, generator=generator)
    return values


def merge(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, adapter: AdapterConfig) -> Tensor:
    """Return the weight of a layer that computes the same without its adapter (fp32)."""
    return weight_OI.float() + (b_OR.float() @ a_RI.float()) * (adapter.alpha / adapter.rank)
