"""Train a causal language model that the package transformers builds (`model.backend: transformers`).

The model is never split over ranks: data parallelism and ZeRO shard its weights, gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeline.base.errors import UserError
from pipeline.config.sections import AdapterConfig, ModelConfig
from pipeline.model import lora
from pipeline.model.spec import check_targets
from pipeline.model.task import DTYPES, TokenTask
from pipeline.model.transformers_model import TransformersModel, build_model
from pipeline.parallel.host_tensor import HostTensor
from pipeline.parallel.mesh import Layout

_CHECKED_TOKENS = 12
"""Number of tokens of the sequences of `TransformersTask.check_model`."""
_MAX_ERROR = 0.1
"""Largest difference of logits that counts as a rounding error, relative to the difference that the check looks for."""


class TransformersTask(TokenTask):
    """Next-token prediction with a model of transformers. The arguments are those of `TokenTask`."""

    def build(self, layers: range) -> TransformersModel:
        """Build the whole model, on the `meta` device."""
        dtype = DTYPES.get(self.config.train.precision)
        return build_with_adapters(self.config.model, self.config.adapter, dtype)

    def blocks(self, part: TransformersModel) -> Sequence[nn.Module]:
        """Return the blocks of the model."""
        return part.blocks

    def fsdp_groups(self, part: TransformersModel) -> Iterable[tuple[list[nn.Module], bool]]:
        """Return one group per block. Embedding and output layer may share weights, so they are in the root group.

        Raises UserError if blocks share weights.
        """
        owners: dict[int, nn.Module] = {}
        for block in part.blocks:
            for name, weight in block.named_parameters():
                if owners.setdefault(id(weight), block) is not block:
                    raise UserError(
                        "config.conflict",
                        f"parallel.zero ({self.config.parallel.zero}) cannot shard {type(part.model).__name__}, whose "
                        f"blocks share the weight {name}: set it to 0",
                    )
        return [([block], True) for block in part.blocks]

    def apply_tensor_parallel(self, part: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
        """Never called, because the config check rejects tensor parallelism."""
        raise NotImplementedError

    @torch.no_grad()
    def init_weights(self, part: TransformersModel, device: torch.device, sample: bool = True) -> None:
        """Set all weights to 0, and all buffers to their values. The caller copies the weights."""
        part.restore_after_allocation(device)
        for parameter in part.parameters():
            parameter.zero_()

    def named_weights(self, part: TransformersModel) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the model of transformers."""
        yield from part.named_weights()

    def list_untrained_weights(self) -> set[str]:
        """Return the names of weights that transformers itself freezes, such as tables of positions."""
        model = build_model(self.config.model)
        return {name for name, weight in model.named_parameters() if not weight.requires_grad}

    @torch.no_grad()
    def check_model(self, part: TransformersModel, device: torch.device) -> None:
        """Check that no token reads later tokens and, with `data.document_mask`, no token reads other documents.

        Not all models of transformers support `position_ids` that start again, and some can also be bidirectional.
        """
        tokens_BT = torch.arange(1, 1 + _CHECKED_TOKENS, device=device).remainder(self.vocab_size)[None]
        changed_BT = tokens_BT.clone()
        changed_BT[0, -1] = 0
        half = _CHECKED_TOKENS // 2
        starts_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
        starts_BT[0, half] = True
        was_training = part.training
        part.eval()
        with torch.compiler.set_stance("force_eager"):  # Compiled blocks expect the length of the training sequences.
            together_BTV = part(tokens_BT)
            changes_BT = (part(changed_BT) - together_BTV).abs().amax(-1)
            separate_BTV = torch.cat([part(tokens_BT[:, :half]), part(tokens_BT[:, half:])], dim=1)
            document_error = (part(tokens_BT, starts_BT=HostTensor(starts_BT)) - separate_BTV).abs().max()
            error_without_mask = (together_BTV - separate_BTV).abs().max()
        unused_names = [] if self.config.parallel.zero else self._list_unused_weights(part, tokens_BT)
        part.train(was_training)
        name = type(part.model).__name__
        if changes_BT[:, :-1].max() > _MAX_ERROR * changes_BT[:, -1].max():
            raise UserError(
                "model.not_causal", f"model.init_from: {name} is no causal language model: a token reads later tokens"
            )
        if self.config.data.document_mask and document_error > _MAX_ERROR * error_without_mask:
            raise UserError(
                "model.no_document_mask",
                f"data.document_mask: {name} does not separate documents by their positions: set it to false",
            )
        if unused_names:
            raise UserError(
                "model.unused_weights",
                f"{name} does not use {len(unused_names)} weights, such as {unused_names[0]}: add them to "
                "optimizer.freeze, or set parallel.zero to 1",
            )

    @torch.enable_grad()
    def _list_unused_weights(self, part: TransformersModel, tokens_BT: Tensor) -> list[str]:
        """Return the names of trained weights that get no gradient, for which DDP would wait forever."""
        with torch.compiler.set_stance("force_eager"):
            part(tokens_BT).float().sum().backward()
        trained = [(name, weight) for name, weight in self.named_weights(part) if weight.requires_grad]
        names = [name for name, weight in trained if weight.grad is None]
        for _, weight in trained:
            weight.grad = None
        return names


def build_with_adapters(
    model: ModelConfig, adapter: AdapterConfig | None = None, dtype: torch.dtype | None = None
) -> TransformersModel:
    """Return the model with the adapters, on the `meta` device. `dtype` is the type of autocast.

    Raises UserError if the model cannot be built, or if a pattern of `adapter.targets` matches no layer.
    """
    part = TransformersModel(build_model(model), dtype)
    if adapter is not None and adapter.base is not None:
        for name, weight in part.named_weights():
            if weight.ndim > 2:
                raise UserError(
                    "model.unsupported_quantization",
                    f"adapter.base {adapter.base} does not quantize {name}, the weight of several experts: remove it",
                )
    if adapter is not None:
        check_targets(adapter, lora.list_layers(part.model))
    lora.add_adapters(part.model, adapter, dtype)
    return part


def check_config(model_json: str, adapter_json: str) -> None:
    """Raise UserError if the model cannot be built, or if a pattern of `adapter.targets` matches no layer.

    Args:
        model_json: the config section `model`, as JSON.
        adapter_json: the config section `adapter`, as JSON; `null` without one.
    """
    adapter = None if adapter_json == "null" else AdapterConfig.model_validate_json(adapter_json)
    _ = build_with_adapters(ModelConfig.model_validate_json(model_json), adapter).blocks
