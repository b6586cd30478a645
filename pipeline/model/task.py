"""The task of a run: how its model is built, reads a batch and computes the loss.

The engine composes the parallelisms, the trainer runs the loop and the evaluator sums results. All of them use a
`Task` to build, parallelize and initialize the model, to read a batch and to compute the loss. A batch is a dict of
arrays from the data loader. `DecoderTask` trains the decoder on tokens, `TransformersTask`
(pipeline/model/transformers_task.py) another language model. `CustomModelTask` trains a model of the user's module on
arrays.
"""

from __future__ import annotations

import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.base.errors import UserError, make_printable
from pipeline.config.sections import Config
from pipeline.config.user_model import LENGTHS_ARRAY, UNREAD_OPTIONS, UserModel
from pipeline.data.loader import Batch
from pipeline.data.manifest import MASK_DOCUMENT_START, MASK_LEARNED, SampleManifest
from pipeline.data.samples import SampleDataset
from pipeline.model import lora
from pipeline.model.decoder import (
    IGNORE_INDEX,
    Decoder,
    apply_tensor_parallel,
    cross_entropy_sum,
    init_weights,
    parameter_seed,
    sample_initial_values,
    write_parameter,
)
from pipeline.model.spec import check_targets, is_adapter_name, training_flops_per_token
from pipeline.parallel.batch_norm import check_batch_norms, iterate_statistics
from pipeline.parallel.context_parallel import ContextParallel
from pipeline.parallel.mesh import Layout
from pipeline.parallel.sample_gather import SampleGather
from pipeline.run.directory import Run

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
"""Autocast type of the forward pass by `train.precision`; other precisions use fp32.

With `fp8`, pipeline/parallel/float8.py also converts some linear layers.
"""
_MAX_CHECKED_SAMPLES = 8
"""Maximum number of different samples that are used to check whether a loss is a sum."""
_SUM_TOLERANCE = 0.05
"""Relative tolerance for sums in bfloat16. The mean of two equal losses differs from their sum by 50 %."""
_EQUAL_TOLERANCE = 0.005
"""Relative tolerance within which two losses of the same samples are equal. bfloat16 has 8 bits of precision."""
_ACROSS_SAMPLES = (
    "Sluice adds up the losses of micro-batches and ranks, each of which has a part of the batch. For a loss that "
    'compares samples with each other (contrastive, in-batch negatives, statistics over the batch), set LOSS = "batch" '
    "in the module, and return the loss of the whole micro-batch, such as a mean."
)
"""Explanation in messages about a loss that depends on several samples."""
_ANY_NUMBER = 'The loss must take any number of samples, unless the module sets LOSS = "batch".'
"""Explanation in messages about a loss that fails for a number of samples other than `train.micro_batch`."""


class Task(ABC):
    """How the model of a run is built, reads a batch and computes the loss.

    A model part is the whole model, or the blocks of one pipeline-parallel stage.
    """

    unit: str
    """The unit that metrics count: `tokens` or `samples`."""
    units_per_step: int
    """Number of units in a global batch."""
    flops_per_unit: int = 0
    """Floating-point operations of forward and backward for one unit; 0 if unknown."""
    sample_shapes: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and type of each array of a sample."""
    user_module: Any = None
    """The user's module of a custom model; None for the decoder."""
    transform: Any = None
    """The `transform` function of the user's module, which changes samples as they are read; None without one."""
    has_batch_loss: bool = False
    """Whether the loss compares the samples of a micro-batch, and is not a sum over samples."""
    has_training_step: bool = False
    """Whether the user's module has a `training_step`, which runs each step (pipeline/train/training_step.py)."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def split_sequences(self, context: ContextParallel) -> None:
        """Split each sequence over several ranks. Call this before `build`; only the decoder supports it."""
        raise NotImplementedError

    def gather_samples(self, gather: SampleGather) -> None:
        """Compute each loss on the samples of all ranks of `gather`; only custom models support it."""
        raise NotImplementedError

    @abstractmethod
    def build(self, layers: range) -> nn.Module:
        """Build the part of the model that has these blocks, on the `meta` device."""

    @abstractmethod
    def blocks(self, part: Any) -> Sequence[nn.Module]:
        """Return the blocks of the part. Activation checkpointing is applied to one block at a time."""

    def modules_to_compile(self, part: Any, layout: Layout) -> Sequence[nn.Module]:
        """Return the modules that are compiled one at a time: the blocks, unless a subclass selects other modules."""
        return self.blocks(part)

    @abstractmethod
    def fsdp_groups(self, part: Any) -> Iterable[tuple[list[nn.Module], bool]]:
        """Return the groups of modules whose weights FSDP gathers together.

        The second member of each pair is whether ZeRO 3 frees these weights after the forward pass. Modules in no group
        belong to the root group.
        """

    @abstractmethod
    def apply_tensor_parallel(self, part: Any, mesh: DeviceMesh, layout: Layout) -> None:
        """Parallelize the part over the tensor-parallel `mesh`, in place."""

    @abstractmethod
    def init_weights(self, part: Any, device: torch.device, sample: bool = True) -> None:
        """Set all initial weights in place. They are sampled on `device`; if `sample` is False, they are 0.

        The weights of adapters are 0 (see `init_adapters`).
        """

    @abstractmethod
    def named_weights(self, part: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the whole model."""

    def base_weights(self, part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter that belongs to no adapter, with its name in the whole model."""
        return ((name, weight) for name, weight in self.named_weights(part) if not is_adapter_name(name))

    def saved_weights(self, part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter that checkpoints contain: those of adapters if there are any, otherwise all."""
        saves_all = self.config.adapter is None
        return ((name, weight) for name, weight in self.named_weights(part) if saves_all or is_adapter_name(name))

    def saved_buffers(self, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield each buffer that checkpoints contain, with its name in the whole model."""
        return iter(())

    @torch.no_grad()
    def init_adapters(self, part: nn.Module, device: torch.device) -> None:
        """Set the initial weights of all adapters in place. They are sampled on `device`."""
        for name, weight in self.named_weights(part):
            if is_adapter_name(name):
                generator = torch.Generator(device=device).manual_seed(parameter_seed(self.config.run.seed, name))
                write_parameter(lora.sample_adapter(name, weight.shape, generator), weight)

    def split_micro_batches(self, batch: Batch, size: int) -> Sequence[Batch]:
        """Split the batch into micro-batches of `size` samples."""
        splits = zip(*(array.split(size) for array in batch.values()), strict=True)
        return [dict(zip(batch, arrays, strict=True)) for arrays in splits]

    def select_samples(self, batch: Batch, rows_B: Tensor) -> Batch:
        """Return the samples of the batch with the indices `rows_B` (int64)."""
        return {name: array[rows_B] for name, array in batch.items()}

    @abstractmethod
    def count_loss_entries(self, batch: Batch) -> Tensor | None:
        """Return the number by which the summed loss of this batch must be divided for a mean, as an int64 scalar.

        Each token or sample with a loss counts 1. A sample with a length counts its length. Return None if the number
        for a global batch is always `units_per_step`.
        """

    def count_units(self, steps: int) -> int:
        """Return the number of units of the first `steps` steps."""
        return steps * self.units_per_step

    @abstractmethod
    def model_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the positional arguments of the model's `forward`."""

    def loss_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the keyword arguments with which the `forward` of the last part returns the loss.

        Return {} if `forward` cannot return the loss. :meth:`loss` then computes the loss from the outputs.
        """
        return {}

    def document_boundaries(self, batch: Batch) -> dict[str, Tensor]:
        """Return the keyword arguments of every part's `forward` that say where documents begin; {} without any.

        The tensors are on the CPU, with samples along the first dimension. On a GPU, this call waits for the GPU, so
        call it once per step.
        """
        return {}

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the summed loss of the batch: an fp32 scalar."""

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Any]:
        """Return additional sums that an evaluation reports, by name."""
        return {}

    def list_untrained_weights(self) -> set[str]:
        """Return the names of weights that the model itself excludes from training."""
        return set()

    def check_model(self, part: Any, device: torch.device) -> None:
        """Raise UserError if the model, with its weights, does not compute what this task expects.

        Call this once, before training starts. All ranks must call it.
        """
        return

    def smallest_batch(self, device: torch.device) -> Batch:
        """Return the smallest batch of zeros that a forward pass accepts.

        The batch has one sample or, with `train.compile`, `train.micro_batch` samples, because compiled shapes are
        fixed.
        """
        rows = self.config.train.micro_batch if self.config.train.compile else 1
        return {
            name: torch.zeros((rows, *shape), dtype=getattr(torch, dtype), device=device)
            for name, (shape, dtype) in self.sample_shapes.items()
        }


class TokenTask(Task):
    """Next-token prediction with a language model.

    A batch has `tokens` (int64, shape (B, sequence_length + 1)) and, if the shards have a mask, `mask` (uint8, the same
    shape). Prompts and dialogues always have a mask. Text that is packed by best fit has a mask only in training.

    Args:
        config: the run's config.
        vocab_size: number of ids of the tokenizer. `model.vocab_size` has priority.
        eos_id: id of the token that ends a document. For data without a mask, `data.document_mask` finds documents by
            this id.
        eos_starts_next: whether `eos_id` is also the first token of the next document, because the tokenizer has one
            token for the end and the beginning of documents.
    """

    unit = "tokens"

    def __init__(self, config: Config, vocab_size: int, eos_id: int = -1, eos_starts_next: bool = False) -> None:
        super().__init__(config)
        self.vocab_size = config.model.vocab_size or vocab_size
        self.eos_id = eos_id
        self._eos_starts_next = eos_starts_next
        self._skips_first_tokens = config.data.document_mask and not config.data.has_loss_mask and not eos_starts_next
        """Whether the first token of each document has no loss, because its input cannot see the token before it."""
        self.set_sequence_length(config.data.sequence_length)

    def set_sequence_length(self, length: int) -> None:
        """Compute the losses of sequences of `length` tokens, at most `data.sequence_length`, from now on."""
        self.sequence_length = length
        self.units_per_step = self.config.train.global_batch * length
        self.flops_per_unit = self.count_flops_per_token(length)
        self.sample_shapes = {"tokens": ((length + 1,), "int64")}
        if self.config.data.has_training_mask:
            self.sample_shapes = {**self.sample_shapes, "mask": ((length + 1,), "uint8")}

    def count_flops_per_token(self, sequence_length: int) -> int:
        """Return the floating-point operations of forward and backward for one token; 0 if unknown."""
        return 0

    def count_units(self, steps: int) -> int:
        """Return the number of tokens of the first `steps` steps."""
        return self.config.count_tokens(steps)

    def count_loss_entries(self, batch: Batch) -> Tensor | None:
        """Return the number of tokens with a loss (int64 scalar); None if all tokens have a loss."""
        if self._all_tokens_have_loss(batch):
            return None
        return (self._whole_next_tokens(batch) != IGNORE_INDEX).sum(dtype=torch.int64)

    def _all_tokens_have_loss(self, batch: Batch) -> bool:
        """Return whether every token of the batch has a loss."""
        return "mask" not in batch and not self._skips_first_tokens

    def model_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the token ids without the last token: int64, shape (B, T); with context parallelism, this rank's."""
        return (self._select_tokens(batch["tokens"][:, :-1]),)

    def _select_tokens(self, x_BT: Tensor) -> Tensor:
        """Return this rank's part of whole sequences."""
        return x_BT

    def next_tokens(self, batch: Batch) -> Tensor:
        """Return the token that follows each input of this rank: int64; IGNORE_INDEX for tokens without a loss."""
        return self._select_tokens(self._whole_next_tokens(batch))

    def _whole_next_tokens(self, batch: Batch) -> Tensor:
        """Return the token that follows each token: int64, shape (B, T); IGNORE_INDEX for tokens without a loss.

        The mask says which tokens have a loss: in prompts and dialogues those of responses, in packed text all tokens
        except padding and some first tokens (data_prep/packing.py). For text with `data.document_mask`, the first token
        of a document has no loss, unless it also ends the previous document.
        """
        tokens = batch["tokens"]
        targets_BT = tokens[:, 1:]
        if "mask" in batch:
            targets_BT = targets_BT.where((batch["mask"][:, 1:] & MASK_LEARNED).ne(0), IGNORE_INDEX)
        if self._skips_first_tokens:
            targets_BT = targets_BT.where(tokens[:, :-1].ne(self.eos_id), IGNORE_INDEX)
        return targets_BT

    def document_boundaries(self, batch: Batch) -> dict[str, Tensor]:
        """Return `starts_BT` (bool, True at the first token of each document) if `data.document_mask` is set."""
        if not self.config.data.document_mask:
            return {}
        if "mask" in batch:
            mask_BT = batch["mask"][:, :-1]
            starts_BT = (mask_BT & MASK_DOCUMENT_START).ne(0)
            if self._eos_starts_next and not self.config.data.has_loss_mask:
                # The end-of-text token before the first token of a packed text starts this text. Such a first token is
                # learned. The first token of the sample has no token before it.
                moved_BT = mask_BT.eq(MASK_DOCUMENT_START | MASK_LEARNED)
                moved_BT[:, :1] = False
                starts_BT = (starts_BT & ~moved_BT) | moved_BT.roll(-1, dims=1)
        elif self._eos_starts_next:
            starts_BT = batch["tokens"][:, :-1].eq(self.eos_id)
        else:
            # A document starts after each end token. roll() moves the last token to the front. This has no effect,
            # because the first token of a sample always starts a document (see TokenPositions).
            starts_BT = batch["tokens"][:, :-1].roll(1, dims=1).eq(self.eos_id)
        return {"starts_BT": starts_BT.cpu()}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the cross-entropy summed over tokens: an fp32 scalar."""
        return cross_entropy_sum(outputs, self.next_tokens(batch))


class DecoderTask(TokenTask):
    """Next-token prediction with the decoder of pipeline/model/decoder.py. The arguments are those of `TokenTask`."""

    def __init__(self, config: Config, vocab_size: int, eos_id: int = -1, eos_starts_next: bool = False) -> None:
        self.context: ContextParallel | None = None
        """How sequences are split over ranks; None if this rank has whole sequences."""
        super().__init__(config, vocab_size, eos_id, eos_starts_next)

    def count_flops_per_token(self, sequence_length: int) -> int:
        """Return the floating-point operations of forward and backward for one token."""
        return training_flops_per_token(self.config.model, self.vocab_size, sequence_length)

    def split_sequences(self, context: ContextParallel) -> None:
        """Use only this rank's tokens of each sequence. Keys and values of the others are gathered."""
        self.context = context

    def build(self, layers: range) -> Decoder:
        """Build the part of the decoder that has these blocks, on the `meta` device."""
        with torch.device("meta"):
            part = Decoder(self.config.model, self.vocab_size, self.config.data.sequence_length, layers)
        lora.add_adapters(part, self.config.adapter, DTYPES.get(self.config.train.precision))
        part.model.context = self.context
        part.compute_dtype = DTYPES.get(self.config.train.precision)
        if part.lm_head is not None and self.config.train.loss_chunk is not None:
            part.lm_head.chunk = self.config.train.loss_chunk
            part.lm_head.compute_dtype = part.compute_dtype
            part.lm_head.compiles_loss = self.config.train.compile
        return part

    def blocks(self, part: Decoder) -> Sequence[nn.Module]:
        """Return the decoder blocks."""
        return list(part.model.blocks)

    def modules_to_compile(self, part: Decoder, layout: Layout) -> Sequence[nn.Module]:
        """Return the blocks; with tensor parallelism, the attention and MLP of each block.

        A parallelized norm is not compiled, because the backward pass of torch 2.13 fails if the norm is compiled
        together with the modules that use its output.
        """
        if layout.tp == 1:
            return self.blocks(part)
        return [module for block in part.model.blocks for module in (block.self_attn, block.mlp)]

    def fsdp_groups(self, part: Decoder) -> Iterable[tuple[list[nn.Module], bool]]:
        """Return one group per block, one for the embedding, and one for the last norm and the output layer.

        The last group is not freed after the forward pass, because the backward pass starts with it.

        Tied weights must be in one group. They therefore stay in the root group, together with the last norm.
        """
        yield from (([block], True) for block in self.blocks(part))
        if not self.config.model.tie_word_embeddings:
            if part.model.embed_tokens is not None:
                yield [part.model.embed_tokens], True
            if part.model.norm is not None and part.lm_head is not None:
                yield [part.model.norm, part.lm_head], False

    def apply_tensor_parallel(self, part: Decoder, mesh: DeviceMesh, layout: Layout) -> None:
        """Parallelize the part over `mesh`, in place.

        With `parallel.loss_parallel`, logits stay sharded, unless `train.loss_chunk` is set. In that case, the output
        layer computes the loss without returning logits.
        """
        shard_logits = self.config.parallel.loss_parallel and self.config.train.loss_chunk is None
        with lora.adapters_set_aside(part, mesh):
            apply_tensor_parallel(part, mesh, sequence_parallel=layout.sequence_parallel, shard_logits=shard_logits)

    def init_weights(self, part: Decoder, device: torch.device, sample: bool = True) -> None:
        """Set all initial weights in place; move the rotary tables to `device`."""
        part.model.rotary.to(device)  # The forward pass uses the tables on this device even if weights are offloaded.
        seed = self.config.run.seed if sample else None
        init_weights(part, seed, self.config.model.initializer_range, device)

    def named_weights(self, part: Decoder) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the whole model."""
        yield from part.named_weights()

    def _select_tokens(self, x_BT: Tensor) -> Tensor:
        """Return this rank's part of whole sequences."""
        return x_BT if self.context is None else self.context.select(x_BT)

    def loss_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the targets if the output layer computes the loss in chunks (`train.loss_chunk`)."""
        return {} if self.config.train.loss_chunk is None else {"targets_BT": self.next_tokens(batch)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the cross-entropy summed over tokens: an fp32 scalar."""
        if outputs.ndim == 0:  # The output layer has computed the loss, because it received `loss_inputs`.
            loss: Tensor = outputs
            return loss
        return super().loss(outputs, batch)


@dataclass
class _Losses:
    """Losses of some samples of a batch, which show whether the loss function is a sum over samples."""

    separate: list[float]
    """Losses of calls with one sample each."""
    together: float
    """Loss of one call with all these samples."""
    repeated: float = math.nan
    """Loss of a second, equal call with all these samples."""
    doubled: float = math.nan
    """Loss of one call that contains each of these samples twice."""

    @property
    def total(self) -> float:
        """Sum of the separate losses."""
        return sum(self.separate)

    @property
    def _tolerance(self) -> float:
        """Largest difference between two sums that counts as a rounding error."""
        return _SUM_TOLERANCE * sum(map(abs, self.separate))

    @property
    def is_inconclusive(self) -> bool:
        """Whether the losses do not show if the loss function is a sum.

        Either all losses are 0, for example for a batch of zeros. Or the loss of all samples is not finite, and at
        least one separate loss is not finite either.
        """
        if math.isfinite(self.together):
            return self.together == 0 and not any(self.separate)
        return not all(map(math.isfinite, self.separate))

    @property
    def is_sum(self) -> bool:
        """Whether the loss of all samples is the sum of their separate losses."""
        return abs(self.together - self.total) <= self._tolerance

    @property
    def is_random(self) -> bool:
        """Whether two equal calls returned different losses, because the loss uses random numbers."""
        return abs(self.repeated - self.together) > _EQUAL_TOLERANCE * abs(self.together)

    @property
    def is_mean(self) -> bool:
        """Whether the loss is a mean, possibly weighted.

        A mean lies between the separate losses, and repeating all samples does not change it.
        """
        is_between = min(self.separate) - self._tolerance <= self.together <= max(self.separate) + self._tolerance
        return is_between and abs(self.doubled - self.together) <= _EQUAL_TOLERANCE * abs(self.together)

    @property
    def constant(self) -> float:
        """Loss of a call without samples, if each sample adds a term that does not depend on the other samples."""
        return 2 * self.together - self.doubled

    @property
    def has_constant(self) -> bool:
        """Whether the loss is a sum over samples plus a constant, which each separate call then also adds."""
        sum_over_samples = self.doubled - self.together
        expected_total = sum_over_samples + len(self.separate) * self.constant
        return abs(self.total - expected_total) <= self._tolerance


class CustomModelTask(Task):
    """A custom model (pipeline/config/user_model.py), trained on the arrays of `manifest`."""

    unit = "samples"

    def __init__(self, run: Run, user_model: UserModel, module: ModuleType, manifest: SampleManifest) -> None:
        super().__init__(run.config)
        self.user_model = user_model
        self.user_module = module
        self.transform = getattr(module, "transform", None)
        if manifest.dataset is not None:
            self.sample_shapes = {name: (array.shape, array.dtype) for name, array in manifest.dataset.arrays.items()}
        else:
            # Only the shapes and types of a sample are needed, so only the first file is mapped.
            manifest_of_first_file = manifest.model_copy(update={"train": manifest.train[:1], "held_out_samples": 0})
            self.sample_shapes = SampleDataset(manifest_of_first_file, run.data_dir, transform=self.transform).shapes
        self.units_per_step = run.config.train.global_batch
        self.options = run.config.model.all_options
        self.has_batch_loss = user_model.has_batch_loss
        self.has_training_step = user_model.has_training_step
        self._is_loss_checked = user_model.has_batch_loss  # Only a sum is checked.
        self._gather: SampleGather | None = None
        """Gathers the samples of a micro-batch from all ranks (`train.gather`); None in an evaluation."""

    def gather_samples(self, gather: SampleGather) -> None:
        """Compute each loss on the samples of all ranks of `gather`."""
        self._gather = gather

    def build(self, layers: range) -> nn.Module:
        """Build the part with these blocks. Raises UserError as :func:`build_user_model` does."""
        part = build_user_model(self.user_model.target, self.user_module, self.options, layers)
        dtype = DTYPES.get(self.config.train.precision)
        if self.config.adapter is not None:
            check_targets(self.config.adapter, lora.list_layers(part))
        lora.add_adapters(part, self.config.adapter, dtype)
        if dtype is not None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            part.forward = torch.autocast(device, dtype)(part.forward)
        return part

    def saved_buffers(self, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the running statistics of batch-norm layers."""
        return iterate_statistics(part)

    def blocks(self, part: nn.Module) -> Sequence[nn.Module]:
        """Return the modules that the user module's `blocks` function returns; [] without such a function."""
        return list(self.user_module.blocks(part)) if "blocks" in self.user_model.names else []

    def fsdp_groups(self, part: nn.Module) -> Iterable[tuple[list[nn.Module], bool]]:
        """Return one group per block."""
        return [([block], True) for block in self.blocks(part)]

    def apply_tensor_parallel(self, part: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
        """Parallelize the part with the user module's `tensor_plan`. Raises UserError if the plan omits a parameter."""
        with lora.adapters_set_aside(part, mesh):
            parallelize_module(part, mesh, self.user_module.tensor_plan(self.options))
        for name, parameter in part.named_parameters():
            if not isinstance(parameter, DTensor):
                raise UserError(
                    "model.incomplete_tensor_plan",
                    f"tensor_plan of {self.user_model.target} does not cover {name}: add it to the plan "
                    "(pipeline.tensor_parallel.Replicated() keeps a module whole on all ranks)",
                )

    @torch.no_grad()
    def init_weights(self, part: nn.Module, device: torch.device, sample: bool = True) -> None:
        """Set all buffers and weights in place.

        Buffers are filled by the `reset_buffers` method of their module. Parameters are filled by the user module's
        `init` function or, without this function, by the default rule (:meth:`_sample_parameter`). If `sample` is
        False, parameters are 0.
        """
        for child in part.modules():
            if buffers := _get_buffers(child):
                child._buffers |= {name: torch.empty_like(buffer, device=device) for name, buffer in buffers.items()}
                if isinstance(child, _BatchNorm):
                    child.reset_running_stats()
                else:
                    child.reset_buffers()  # type: ignore[operator]
        for name, parameter in part.named_parameters():
            if sample and not is_adapter_name(name):
                write_parameter(self._sample_parameter(name, parameter.shape, device), parameter)
            else:
                parameter.zero_()

    def _sample_parameter(self, name: str, shape: torch.Size, device: torch.device) -> Tensor:
        """Return the initial values (fp32) of a whole parameter.

        If the user's module has an `init` function, this function sets the values. Otherwise vectors named `weight` are
        1, other vectors are 0, and tensors with more dimensions are sampled from a normal distribution.
        """
        seed = self.config.run.seed
        if "init" in self.user_model.names:  # The user's function fills a tensor on the CPU.
            values = torch.empty(shape, dtype=torch.float32, device="cpu")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(parameter_seed(seed, name))
                self.user_module.init(name, values, self.options)
            return values
        if len(shape) < 2:
            return torch.full(shape, 1.0 if name.split(".")[-1] == "weight" else 0.0, device=device)
        return sample_initial_values(seed, name, shape, self.config.model.initializer_range, device)

    def named_weights(self, part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name."""
        return part.named_parameters()

    def split_micro_batches(self, batch: Batch, size: int) -> Sequence[Batch]:
        """Split the batch, and trim padded arrays to the longest sample of each micro-batch."""
        micro_batches = super().split_micro_batches(batch, size)
        for micro_batch in micro_batches if self.user_model.padded else ():
            longest = int(micro_batch[LENGTHS_ARRAY].max())
            micro_batch.update({name: micro_batch[name][:, :longest] for name in self.user_model.padded})
        return micro_batches

    def count_loss_entries(self, batch: Batch) -> Tensor | None:
        """Return the sum of the samples' lengths (int64 scalar); None if each sample counts 1."""
        if self.has_batch_loss or not self.user_model.has_lengths:
            return None
        return batch[LENGTHS_ARRAY].sum(dtype=torch.int64)

    def model_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the arrays that `INPUTS` of the user's module names."""
        return tuple(batch[name] for name in self.user_model.inputs)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the summed loss: an fp32 scalar. A batch loss counts once for each sample of `batch`.

        Raises UserError if the user's loss is not a scalar tensor, or not a sum over independent samples.
        """
        count = len(next(iter(batch.values())))
        if self._gather is not None:
            outputs = self._gather.gather_outputs(outputs, count)
            arrays = {name: array for name, array in batch.items() if name not in self.user_model.inputs}
            batch = _GatheredBatch(self._gather.gather_arrays(arrays), self.user_model.target)
        try:
            loss: Tensor = self.user_module.loss(outputs, batch)
        except Exception as error:
            # The train stage starts with a batch of one sample of zeros, and evaluation uses batches of any size. A
            # loss that expects `train.micro_batch` samples fails for these batches. The note therefore names both
            # numbers.
            expected = self.config.train.micro_batch
            if count != expected:
                samples = "1 sample" if count == 1 else f"{count} samples"
                error.add_note(
                    f"loss of {self.user_model.target} was called with {samples}, but train.micro_batch is {expected}. "
                    f"{_ANY_NUMBER}"
                )
            raise
        if not isinstance(loss, Tensor) or loss.ndim:
            raise UserError(
                "model.wrong_loss",
                f"loss of {self.user_model.target} must return a tensor without dimensions: the sum over the batch",
            )
        self._is_loss_checked = self._is_loss_checked or self._check_sum(outputs, batch)
        return loss.float() * count if self.has_batch_loss else loss.float()

    @torch.no_grad()
    def _check_sum(self, outputs: Any, batch: Batch) -> bool:
        """Check that the loss of some samples together is the sum of their separate losses.

        Returns:
            False if another batch must be checked, because the losses of this batch are 0 or not finite. True if the
            loss is a sum. Also True, after printing a line, if no batch can show whether the loss is a sum. There are
            three such cases: the outputs cannot be split by samples, the loss uses random numbers, or the outputs
            contain a number that belongs to no single sample.

        Raises:
            UserError: if the loss is not a sum, or fails for some of the samples.
        """
        count = len(next(iter(batch.values())))
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        arrays = [leaf for leaf in leaves if leaf.ndim]
        if not arrays or not all(len(leaf) % count == 0 for leaf in arrays):
            return self._print_unchecked("the outputs cannot be split by samples")

        def compute_loss(samples: list[int]) -> float:
            """Return the loss of the samples with these indices in one call."""

            def select_samples(array: Any) -> Any:
                """Return the rows of these samples. A value without rows is returned unchanged."""
                if not isinstance(array, Tensor) or not array.ndim:
                    return array
                size = len(array) // count  # A sample may have several consecutive rows.
                # Slices are concatenated, because DTensor does not support indexing by a list.
                return torch.cat([array[sample * size : (sample + 1) * size] for sample in samples])

            selected = {name: select_samples(array) for name, array in batch.items()}
            return self._try_loss(tree_map(select_samples, outputs), selected, len(samples), count)

        # The first sample is used twice, so that there are at least two samples.
        samples = [0, *range(min(count, _MAX_CHECKED_SAMPLES))]
        device = arrays[0].device
        # The check must not change the random numbers of the run.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            losses = _Losses([compute_loss([sample]) for sample in samples], compute_loss(samples))
            if losses.is_inconclusive:
                return False
            if losses.is_sum:
                return True
            losses.repeated = compute_loss(samples)
            losses.doubled = compute_loss([*samples, *samples])
        if losses.is_random:
            return self._print_unchecked("it uses random numbers")
        if losses.has_constant and not losses.is_mean and len(arrays) < len(leaves):
            return self._print_unchecked("the outputs contain a number that belongs to no single sample")
        raise UserError(
            "model.loss_not_a_sum", self._describe_wrong_sum(losses, max(len(leaf) for leaf in arrays) // count)
        )

    def _print_unchecked(self, reason: str) -> bool:
        """Print that the loss was not checked, and return True."""
        print(f"{self.user_model.target}: did not check whether its loss is a sum over samples: {reason}")
        return True

    def _try_loss(self, outputs: Any, batch: Batch, samples: int, count: int) -> float:
        """Return the loss of a batch with `samples` samples, taken from a micro-batch with `count` samples.

        Raises UserError if the loss function fails. The message names the line in the user's module.
        """
        try:
            return float(self.user_module.loss(outputs, batch))
        except Exception as error:  # User code may raise anything.
            folder = self.user_model.root.parent
            this_file = Path(__file__)
            frames = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
            user_frames = [(file, line) for file, line in frames if folder in file.parents and file != this_file]
            file, line = user_frames[-1] if user_frames else (Path(str(self.user_module.__file__)), None)
            location = f"{file.relative_to(folder) if folder in file.parents else file}" + (f":{line}" if line else "")
            arguments = f"1 of the {count} samples of a micro-batch"
            if samples > 1:
                arguments = f"{samples} samples (from a micro-batch of {count}, some of them twice)"
            message = (
                f"loss of {self.user_model.target} fails at {location}: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. Sluice called it with {arguments}, to check that it is a sum over "
                f"samples. It did not fail with the whole micro-batch. {_ANY_NUMBER}"
            )
            raise UserError("model.loss_fails", make_printable(message)) from error

    def _describe_wrong_sum(self, losses: _Losses, rows_per_sample: int) -> str:
        """Describe what is wrong with a loss that is not the sum of its samples' losses, and what to do."""
        name = f"loss of {self.user_model.target}"
        comparison = (
            f"the loss of {len(losses.separate)} samples (the first one twice) is {losses.together:.6g} in one call, "
            f"and {losses.total:.6g} as the sum of separate calls"
        )
        if losses.is_mean:
            return (
                f"{name} is a mean, not a sum: {comparison}. Return the sum over the samples, because training and "
                'evaluation divide by the global batch: reduction="sum" for one value per sample, or '
                'reduction="none" and .flatten(1).mean(1).sum() for a loss that is also a mean over features'
            )
        if losses.has_constant:
            return (
                f"{name} adds {losses.constant:.6g} in each call, regardless of the number of samples: {comparison}. "
                "Multiply this term by the number of samples: Sluice adds up the sums of all micro-batches and divides "
                "by the global batch"
            )
        note = ""
        if rows_per_sample > 1:
            note = (
                f" (The outputs have {rows_per_sample} rows for each sample. The rows of a sample must be next to each "
                "other. If your rows have another order, return several arrays.)"
            )
        return f"{name} depends on the other samples of the batch: {comparison}. {_ACROSS_SAMPLES}{note}"

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Any]:
        """Return the result of the user module's `metrics` function; {} if it has no such function."""
        return self.user_module.metrics(outputs, batch) if "metrics" in self.user_model.names else {}

    def smallest_batch(self, device: torch.device) -> Batch:
        """Return the smallest batch of zeros. Only lengths are not 0.

        Each sample has the full padded length, or the length 1 if no array is padded.
        """
        batch = super().smallest_batch(device)
        if self.has_batch_loss:  # A loss that compares samples may need more than one.
            rows = self.config.train.micro_batch
            batch = {name: array[:1].expand(rows, *array.shape[1:]).clone() for name, array in batch.items()}
        if self.user_model.has_lengths:
            batch[LENGTHS_ARRAY] += max([1, *(self.sample_shapes[name][0][0] for name in self.user_model.padded)])
        return batch


class _GatheredBatch(dict[str, Tensor]):
    """The gathered arrays of a batch, without the inputs of the model."""

    def __init__(self, arrays: Mapping[str, Tensor], target: str) -> None:
        super().__init__(arrays)
        self._target = target

    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            "model.array_not_gathered",
            f"loss of {self._target} reads batch[{name!r}], but with train.gather, `batch` has only arrays that are "
            "not in INPUTS. Return what the loss needs from the model, or remove train.gather",
        )


class _RecordCopies(TorchDispatchMode):
    """Record the tensors on the `meta` device into which values are copied."""

    def __init__(self, recorded: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self.recorded.append(args[0])
        return func(*args, **(kwargs or {}))


class _RecordNewTensors(TorchFunctionMode):
    """Record the tensors that torch.tensor and torch.as_tensor create."""

    def __init__(self, recorded: list[Tensor]) -> None:
        super().__init__()
        self.recorded = recorded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor):
            self.recorded.append(result)
        return result


def build_user_model(target: str, module: ModuleType, options: dict[str, Any], layers: range) -> nn.Module:
    """Build the part of a custom model that has the blocks `layers`, on the `meta` device.

    Raises UserError in these cases:
    - The module's `build` does not return an `nn.Module`.
    - `build` assigns values to weights. These values would be lost.
    - A parameter has two names.
    - A buffer is persistent, so its values would differ between layouts.
    - A module with buffers has no method `reset_buffers`.
    """
    tensors_with_values: list[Tensor] = []
    with torch.device("meta"), _RecordCopies(tensors_with_values), _RecordNewTensors(tensors_with_values):
        part = module.build(options, layers)
    if not isinstance(part, nn.Module):
        raise UserError("model.wrong_build", f"build of {target} must return a torch.nn.Module; it returns {part!r}")
    storages_with_values = {tensor.untyped_storage()._cdata for tensor in tensors_with_values}
    name_by_id: dict[int, str] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        if not parameter.is_meta or parameter.untyped_storage()._cdata in storages_with_values:
            raise UserError(
                "model.weights_in_build",
                f"{target}: build assigns values to {name}. They would be lost, because each rank fills its part of "
                "the model with init(name, values, options). Copy the values there, for example with "
                "values.copy_(weights[name])",
            )
        if name_by_id.setdefault(id(parameter), name) != name:
            raise UserError(
                "model.tied_parameters",
                f"{target}: {name} and {name_by_id[id(parameter)]} are one parameter under two names. Keep it in one "
                "module, and call torch.nn.functional with it in the other places that use it",
            )
    check_batch_norms(target, part)
    for name, child in part.named_modules():
        for buffer in {} if isinstance(child, _BatchNorm) else _get_buffers(child):
            full_name = f"{target}: buffer {name}.{buffer}"
            if buffer not in child._non_persistent_buffers_set:
                raise UserError(
                    "model.persistent_buffer",
                    f"{full_name} is persistent and would differ between layouts: register it with persistent=False",
                )
            if not hasattr(child, "reset_buffers"):
                raise UserError(
                    "model.no_reset_buffers",
                    f"{full_name}: its module has no method reset_buffers() that fills it: add one",
                )
    return part


class _RecordingOptions(dict[str, Any]):
    """Options of a user's model. This dict records which of its keys are read, also in nested mappings."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__((k, _RecordingOptions(v) if isinstance(v, dict) else v) for k, v in values.items())
        self._read_keys: set[str] = set()

    def list_reads(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Yield each key as a dotted name, and whether it was read. Keys inside an unread mapping are omitted."""
        for key, value in dict.items(self):
            yield f"{prefix}{key}", key in self._read_keys
            if key in self._read_keys and isinstance(value, _RecordingOptions):
                yield from value.list_reads(f"{prefix}{key}.")

    def mark_all_read(self) -> None:
        """Record that all keys are read, also those in nested mappings."""
        self._read_all()
        for value in dict.values(self):
            if isinstance(value, _RecordingOptions):
                value.mark_all_read()

    def _read_all(self) -> None:
        """Record that all keys of this mapping are read."""
        self._read_keys |= {*dict.keys(self)}

    def __getitem__(self, key: str) -> Any:
        self._read_keys.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read_keys.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read_keys.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._read_keys.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._read_keys.add(key)
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[str]:  # Iteration, including by ** and dict(), may read every key.
        self._read_all()
        return super().__iter__()

    def keys(self) -> Any:
        self._read_all()
        return super().keys()

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def copy(self) -> Any:
        self._read_all()
        return super().copy()

    def __or__(self, other: Any) -> Any:
        self._read_all()
        return super().__or__(other)

    def __ror__(self, other: Any) -> Any:
        self._read_all()
        return super().__ror__(other)


def try_user_model(target: str, *options: str) -> None:
    """Import a user's module and build the whole model with each of `options` (JSON objects).

    The last line of output is UNREAD_OPTIONS followed by a JSON list of the dotted keys that no build reads. Any error
    of the user's code and each UserError of :func:`build_user_model` is raised.
    """
    module = importlib.import_module(target)
    is_read_by_key: dict[str, bool] = {}
    for values in map(json.loads, options):
        recording_options = _RecordingOptions(values)
        layers = range(values["layers"])
        try:
            try:
                build_user_model(target, module, recording_options, layers)
            except Exception:  # A library may accept only a plain dict. All keys of the options then count as read.
                build_user_model(target, module, values, layers)
                recording_options.mark_all_read()
        except Exception as error:
            if len(options) > 1:
                error.add_note(f"with model.options {values}")
            raise
        for key, is_read in recording_options.list_reads():
            is_read_by_key[key] = is_read or is_read_by_key.get(key, False)
    # The user's module may have printed text without a newline at its end.
    print(f"\n{UNREAD_OPTIONS}{json.dumps([key for key, is_read in is_read_by_key.items() if not is_read])}")


def _get_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are registered on the module itself, not on its children."""
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
