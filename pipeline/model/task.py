"""What a training needs to know about its model: the decoder on tokens, or a custom model on arrays.

The engine composes the parallelisms, the trainer runs the loop and the evaluator sums results. All of them use a
`Task` to build, parallelize and initialize the model, to read a batch and to compute the loss. A batch is a dict of
arrays from the data loader. `DecoderTask` trains the decoder, `CustomModelTask` a model of the user's module.
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.base.errors import UserError, make_printable
from pipeline.config.sections import Config
from pipeline.config.user_model import LENGTHS_ARRAY, UNREAD_OPTIONS, UserModel
from pipeline.data.loader import Batch
from pipeline.data.manifest import MASK_DOCUMENT_START, MASK_LEARNED, Manifest, SampleManifest
from pipeline.data.samples import SampleDataset
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
from pipeline.model.spec import training_flops_per_token
from pipeline.parallel.mesh import Layout
from pipeline.run.directory import Run

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
"""Type of forward passes by precision; others use fp32. float8 is for some matrices (pipeline/parallel/float8.py)."""
_SAMPLES = 8
"""Maximum number of samples that are used to check whether a loss is a sum."""
_ROUNDING = 0.05
"""What sums in bfloat16 may be off; a mean of two is off by a half."""
_SAME = 0.005
"""What two losses of the same samples may differ by, as a share: bfloat16 has 8 bits."""
_ACROSS_SAMPLES = (
    "A loss that compares samples with each other (contrastive, in-batch negatives, statistics over the batch) is not "
    "supported yet: Sluice adds up the losses of micro-batches and ranks, each of which has a part of the batch."
)

_ANY_NUMBER = f"{_ACROSS_SAMPLES} Any other loss must take any number of samples."


class Task(ABC):
    """What a training needs to know about its model. See :class:`DecoderTask` and :class:`CustomModelTask`."""

    unit: str
    """What metrics count: tokens or samples."""
    units_per_step: int
    """Number of units in a global batch."""
    flops_per_unit: int = 0
    """Floating-point operations of training on one unit; 0 if unknown."""
    sample_shapes: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and type of each array of a sample."""
    user_module: Any = None
    """The user's module of a custom model."""
    transform: Any = None
    """The function of the user's module that changes samples as they are read."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def build(self, layers: range) -> nn.Module:
        """Build the part of the model that has these blocks, on the `meta` device."""

    @abstractmethod
    def blocks(self, part: Any) -> Sequence[nn.Module]:
        """Return the modules to which activation checkpointing and compilation are applied one at a time."""

    def modules_to_compile(self, part: Any, layout: Layout) -> Sequence[nn.Module]:
        """Return the modules that are compiled one at a time."""
        return self.blocks(part)

    @abstractmethod
    def fsdp_groups(self, part: Any) -> Iterable[tuple[list[nn.Module], bool]]:
        """Return the modules that FSDP gathers together, and whether ZeRO 3 frees them after forward.

        Everything else belongs to the root group.
        """

    @abstractmethod
    def apply_tensor_parallel(self, part: Any, mesh: DeviceMesh, layout: Layout) -> None:
        """Parallelize the part over the tensor parallel `mesh`, in place."""

    @abstractmethod
    def init_weights(self, part: Any, device: torch.device, sample: bool = True) -> None:
        """Set all initial weights in place, sampled on `device`; zeros if they need not be sampled."""

    @abstractmethod
    def named_weights(self, part: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the whole model."""

    def split_micro_batches(self, batch: Batch, size: int) -> Sequence[Batch]:
        """Split the batch into micro-batches of `size` samples."""
        splits = zip(*(array.split(size) for array in batch.values()), strict=True)
        return [dict(zip(batch, arrays, strict=True)) for arrays in splits]

    def select_samples(self, batch: Batch, rows_B: Tensor) -> Batch:
        """Return these samples of the batch."""
        return {name: array[rows_B] for name, array in batch.items()}

    @abstractmethod
    def count_loss_entries(self, batch: Batch) -> Tensor | None:
        """Return the number of entries (int64, 0-d) in the sum that is the loss of this batch.

        None if a global batch always has `units_per_step` entries.
        """

    @abstractmethod
    def model_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the positional arguments of the model's forward."""

    def loss_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the keyword arguments with which the forward of the last part returns the loss itself."""
        return {}

    def document_boundaries(self, batch: Batch) -> dict[str, Tensor]:
        """Return the keyword arguments of every part that mask attention across documents; {} without a mask."""
        return {}

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the summed loss of the batch: an fp32 scalar."""

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Any]:
        """Return further sums of an evaluation, by name."""
        return {}

    def smallest_batch(self, device: torch.device) -> Batch:
        """Return a batch of zeros that a forward pass accepts: one sample; with `compile`, a micro-batch of samples."""
        rows = self.config.train.micro_batch if self.config.train.compile else 1
        return {
            name: torch.zeros((rows, *shape), dtype=getattr(torch, dtype), device=device)
            for name, (shape, dtype) in self.sample_shapes.items()
        }


class DecoderTask(Task):
    """Next-token prediction with the decoder of pipeline/model/decoder.py.

    A batch has `tokens` (int64, shape (B, sequence_length + 1)) and, for prompts and dialogues, `mask` (uint8, the same
    shape).

    Args:
        config: the run's config.
        vocab_size: size of the tokenizer; `model.vocab_size` has priority.
        eos_id: the token that ends a document, for `data.document_mask` on text.
        end_begins_next: whether `eos_id` is also the first token of the next document, as for tokenizers that have one
            token for both.
    """

    unit = "tokens"

    def __init__(self, config: Config, vocab_size: int, eos_id: int = -1, end_begins_next: bool = False) -> None:
        super().__init__(config)
        has_mask = config.data.has_loss_mask
        self.vocab_size = config.model.vocab_size or vocab_size
        self.sequence_length = config.data.sequence_length
        self.eos_id = eos_id
        self._end_begins_next = end_begins_next
        self._all_tokens_have_loss = not has_mask and (end_begins_next or not config.data.document_mask)
        self.units_per_step = config.train.global_batch * self.sequence_length
        self.flops_per_unit = training_flops_per_token(config.model, self.vocab_size, self.sequence_length)
        self.sample_shapes = {"tokens": ((self.sequence_length + 1,), "int64")}
        if has_mask:
            self.sample_shapes = {**self.sample_shapes, "mask": ((self.sequence_length + 1,), "uint8")}

    def build(self, layers: range) -> Decoder:
        """Build the part of the decoder that has these blocks, on the `meta` device."""
        with torch.device("meta"):
            part = Decoder(self.config.model, self.vocab_size, self.sequence_length, layers)
        part.compute_dtype = DTYPES.get(self.config.train.precision)
        if part.lm_head is not None and self.config.train.loss_chunk is not None:
            part.lm_head.chunk = self.config.train.loss_chunk
            part.lm_head.compute_dtype = part.compute_dtype
        return part

    def blocks(self, part: Decoder) -> Sequence[nn.Module]:
        """Return the decoder blocks."""
        return list(part.model.blocks)

    def modules_to_compile(self, part: Decoder, layout: Layout) -> Sequence[nn.Module]:
        """Return the blocks; with tensor parallelism, the attention and MLP of each block.

        Compiled code must not contain the step from a parallelized norm to its inputs: backward of torch 2.13 fails
        there.
        """
        if layout.tp == 1:
            return self.blocks(part)
        return [module for block in part.model.blocks for module in (block.self_attn, block.mlp)]

    def fsdp_groups(self, part: Decoder) -> Iterable[tuple[list[nn.Module], bool]]:
        """Return a group per block, one for the embedding and one for the last norm and output layer."""
        yield from (([block], True) for block in self.blocks(part))
        if not self.config.model.tie_word_embeddings:  # tied weights must stay in one group, the root's
            if part.model.embed_tokens is not None:
                yield [part.model.embed_tokens], True
            if part.model.norm is not None and part.lm_head is not None:
                yield [part.model.norm, part.lm_head], False

    def apply_tensor_parallel(self, part: Decoder, mesh: DeviceMesh, layout: Layout) -> None:
        """Parallelize the part over `mesh`; logits stay sharded if the loss can use them so."""
        shard_logits = self.config.parallel.loss_parallel and self.config.train.loss_chunk is None
        apply_tensor_parallel(part, mesh, sequence_parallel=layout.sequence_parallel, shard_logits=shard_logits)

    def init_weights(self, part: Decoder, device: torch.device, sample: bool = True) -> None:
        """Set all initial weights in place; move the rotary tables to `device`."""
        part.model.rotary.to(device)  # the tables are used there, even if the weights are offloaded
        seed = self.config.run.seed if sample else None
        init_weights(part, seed, self.config.model.initializer_range, device)

    def named_weights(self, part: Decoder) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the whole model."""
        yield from part.named_weights()

    def count_loss_entries(self, batch: Batch) -> Tensor | None:
        """Return the number of tokens with a loss; None if all have one."""
        if self._all_tokens_have_loss:
            return None
        return (self.next_tokens(batch) != IGNORE_INDEX).sum(dtype=torch.int64)

    def model_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the token ids without the last one: int64, shape (B, T)."""
        return (batch["tokens"][:, :-1],)

    def loss_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the targets if the output layer computes the loss in chunks (`train.loss_chunk`)."""
        return {} if self.config.train.loss_chunk is None else {"targets_BT": self.next_tokens(batch)}

    def next_tokens(self, batch: Batch) -> Tensor:
        """Return the token that follows each input: int64, shape (B, T); IGNORE_INDEX for tokens without a loss.

        There is no loss outside responses, nor on the first token of a document that is masked from the previous one.
        """
        tokens = batch["tokens"]
        targets_BT = tokens[:, 1:]
        if self._all_tokens_have_loss:
            return targets_BT
        if "mask" in batch:
            return targets_BT.where((batch["mask"][:, 1:] & MASK_LEARNED).ne(0), IGNORE_INDEX)
        return targets_BT.where(tokens[:, :-1].ne(self.eos_id), IGNORE_INDEX)

    def document_boundaries(self, batch: Batch) -> dict[str, Tensor]:
        """Return where documents start, if `data.document_mask` is set."""
        if not self.config.data.document_mask:
            return {}
        if "mask" in batch:
            return {"starts_BT": (batch["mask"][:, :-1] & MASK_DOCUMENT_START).ne(0)}
        if self._end_begins_next:
            return {"starts_BT": batch["tokens"][:, :-1].eq(self.eos_id)}
        # the token after each end; the first input starts a document in any case
        return {"starts_BT": batch["tokens"][:, :-1].roll(1, dims=1).eq(self.eos_id)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the cross-entropy summed over tokens: an fp32 scalar."""
        if outputs.ndim == 0:  # the loss itself, because of `loss_inputs`
            loss: Tensor = outputs
            return loss
        return cross_entropy_sum(outputs, self.next_tokens(batch))


@dataclass
class _Losses:
    """Losses of some samples of a batch. They show whether the loss function is a sum over samples."""

    separate: list[float]
    """Losses of the samples, one sample in each call."""
    together: float
    """Loss of all these samples in one call."""
    repeated: float = math.nan
    """Loss of the same call, made again."""
    doubled: float = math.nan
    """Loss of one call with each of these samples twice."""

    @property
    def total(self) -> float:
        """Sum of the separate losses."""
        return sum(self.separate)

    @property
    def _tolerance(self) -> float:
        return _ROUNDING * sum(map(abs, self.separate))

    @property
    def is_inconclusive(self) -> bool:
        """Whether all losses are 0, for example of a batch of zeros, or a loss is not finite."""
        if math.isfinite(self.together):
            return self.together == 0 and not any(self.separate)
        return not all(map(math.isfinite, self.separate))

    @property
    def is_sum(self) -> bool:
        """Whether the loss of all samples is the sum of their separate losses."""
        return abs(self.together - self.total) <= self._tolerance

    @property
    def is_random(self) -> bool:
        """Whether two equal calls returned different losses."""
        return abs(self.repeated - self.together) > _SAME * abs(self.together)

    @property
    def is_mean(self) -> bool:
        """Whether the loss is a mean, possibly weighted.

        It is then between the separate losses, and doubling the samples does not change it.
        """
        is_between = min(self.separate) - self._tolerance <= self.together <= max(self.separate) + self._tolerance
        return is_between and abs(self.doubled - self.together) <= _SAME * abs(self.together)

    @property
    def constant(self) -> float:
        """The loss of zero samples, if each sample adds a term that does not depend on the others."""
        return 2 * self.together - self.doubled

    @property
    def has_constant(self) -> bool:
        """Whether the loss is a sum over samples plus a constant."""
        expected = self.doubled - self.together + len(self.separate) * self.constant
        return abs(self.total - expected) <= self._tolerance


class CustomModelTask(Task):
    """A custom model (pipeline/config/user_model.py), trained on the arrays of `manifest`."""

    unit = "samples"

    def __init__(self, run: Run, facts: UserModel, module: ModuleType, manifest: SampleManifest) -> None:
        super().__init__(run.config)
        self.facts = facts
        self.user_module = module
        self.transform = getattr(module, "transform", None)
        first = manifest.model_copy(update={"train": manifest.train[:1], "held_out_samples": 0})
        self.sample_shapes = SampleDataset(first, run.data_dir, transform=self.transform).shapes
        self.units_per_step = run.config.train.global_batch
        self.options = run.config.model.all_options
        self._is_sum = False

    def build(self, layers: range) -> nn.Module:
        """Build these blocks. Raise UserError as `build_user_model` does."""
        part = build_user_model(self.facts.target, self.user_module, self.options, layers)
        if (dtype := DTYPES.get(self.config.train.precision)) is not None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            part.forward = torch.autocast(device, dtype)(part.forward)
        return part

    def blocks(self, part: nn.Module) -> Sequence[nn.Module]:
        """Return what the module's `blocks` lists; [] without that function."""
        return list(self.user_module.blocks(part)) if "blocks" in self.facts.names else []

    def fsdp_groups(self, part: nn.Module) -> Iterable[tuple[list[nn.Module], bool]]:
        """Return a group per block."""
        return [([block], True) for block in self.blocks(part)]

    def apply_tensor_parallel(self, part: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
        """Parallelize the part with the module's `tensor_plan`. Raise UserError if the plan omits a parameter."""
        parallelize_module(part, mesh, self.user_module.tensor_plan(self.options))
        for name, parameter in part.named_parameters():
            if not isinstance(parameter, DTensor):
                raise UserError(
                    "model.incomplete_tensor_plan",
                    f"tensor_plan of {self.facts.target} does not cover {name}; "
                    "pipeline.tensor_parallel.Replicated() keeps a module whole on all ranks",
                )

    @torch.no_grad()
    def init_weights(self, part: nn.Module, device: torch.device, sample: bool = True) -> None:
        """Fill buffers with their modules' `reset_buffers`, parameters with the user's `init` or the default rule."""
        for child in part.modules():
            if tables := _get_buffers(child):
                child._buffers |= {name: torch.empty_like(table, device=device) for name, table in tables.items()}
                child.reset_buffers()  # type: ignore[operator]
        for name, parameter in part.named_parameters():
            if sample:
                write_parameter(self._initial(name, parameter.shape, device), parameter)
            else:
                parameter.zero_()

    def _initial(self, name: str, shape: torch.Size, device: torch.device) -> Tensor:
        """Return the initial values of a whole parameter: fp32."""
        seed = self.config.run.seed
        if "init" in self.facts.names:  # the user's function fills a tensor on the CPU
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
        for micro_batch in micro_batches if self.facts.padded else ():
            longest = int(micro_batch[LENGTHS_ARRAY].max())
            micro_batch.update({name: micro_batch[name][:, :longest] for name in self.facts.padded})
        return micro_batches

    def count_loss_entries(self, batch: Batch) -> Tensor | None:
        """Return the sum of the samples' lengths, if they have lengths."""
        return batch[LENGTHS_ARRAY].sum(dtype=torch.int64) if self.facts.has_lengths else None

    def model_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the arrays that the module's `inputs` names."""
        return tuple(batch[name] for name in self.facts.inputs)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the summed loss: an fp32 scalar. Raise UserError if it is not a sum over independent samples."""
        try:
            loss: Tensor = self.user_module.loss(outputs, batch)
        except Exception as error:  # training starts with one sample of zeros, and evaluation has batches of any size
            count = len(next(iter(batch.values())))
            expected = self.config.train.micro_batch
            if count != expected:
                samples = "1 sample" if count == 1 else f"{count} samples"
                error.add_note(
                    f"loss of {self.facts.target} was called with {samples}, not with the {expected} of "
                    f"train.micro_batch. {_ANY_NUMBER}"
                )
            raise
        if not isinstance(loss, Tensor) or loss.ndim:
            raise UserError(
                "model.wrong_loss",
                f"loss of {self.facts.target} must return a tensor without dimensions: the batch's sum",
            )
        self._is_sum = self._is_sum or self._check_sum(outputs, batch)
        return loss.float()

    @torch.no_grad()
    def _check_sum(self, outputs: Any, batch: Batch) -> bool:
        """Raise UserError if the loss of some samples is not the sum of their losses one at a time.

        Return False if this batch is inconclusive, because its losses are 0 or not finite. Print a line and return
        True if no batch can show it: the outputs cannot be split by samples, or the loss uses random numbers.
        """
        count = len(next(iter(batch.values())))
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        arrays = [leaf for leaf in leaves if leaf.ndim]
        if not arrays or not all(len(leaf) % count == 0 for leaf in arrays):
            return self._print_unchecked("no array for each sample in outputs")

        def compute_loss(samples: list[int]) -> float:
            def select_samples(array: Any) -> Any:
                if not isinstance(array, Tensor) or not array.ndim:
                    return array
                size = len(array) // count  # consecutive rows of one sample
                # slices, because indexing does not support DTensors
                return torch.cat([array[sample * size : (sample + 1) * size] for sample in samples])

            selected = {name: select_samples(array) for name, array in batch.items()}
            return self._try_loss(tree_map(select_samples, outputs), selected, len(samples), count)

        samples = [0, *range(min(count, _SAMPLES))]  # the first sample twice, so that there are at least two
        device = arrays[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the check must not change the training
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
            return self._print_unchecked("outputs contain a number that belongs to no single sample")
        raise UserError(
            "model.loss_not_a_sum", self._describe_wrong_sum(losses, max(len(leaf) for leaf in arrays) // count)
        )

    def _print_unchecked(self, reason: str) -> bool:
        print(f"{self.facts.target}: whether its loss is a sum over samples was not checked: {reason}")
        return True

    def _try_loss(self, outputs: Any, batch: Batch, samples: int, count: int) -> float:
        """Return the loss of `samples` of a micro-batch's `count` samples.

        Raises UserError, with the line in the user's module, if the loss fails.
        """
        try:
            return float(self.user_module.loss(outputs, batch))
        except Exception as error:  # user code may raise anything
            folder = self.facts.root.parent
            this_file = Path(__file__)
            frames = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
            user_frames = [(file, line) for file, line in frames if folder in file.parents and file != this_file]
            file, line = user_frames[-1] if user_frames else (Path(str(self.user_module.__file__)), None)
            where = f"{file.relative_to(folder) if folder in file.parents else file}" + (f":{line}" if line else "")
            arguments = f"1 of the {count} samples of a micro-batch"
            if samples > 1:
                arguments = f"{samples} samples (some of a micro-batch's {count} given twice)"
            message = (
                f"loss of {self.facts.target} fails at {where}: {type(error).__name__}: {str(error).rstrip('.')}. "
                f"Sluice called it with {arguments}, to check that it is a sum over samples; with the whole "
                f"micro-batch it did not fail. {_ANY_NUMBER}"
            )
            raise UserError("model.loss_fails", make_printable(message)) from error

    def _describe_wrong_sum(self, losses: _Losses, rows_per_sample: int) -> str:
        """Describe what is wrong with a loss that is not the sum of its samples' losses, and what to do."""
        name = f"loss of {self.facts.target}"
        compared = (
            f"{len(losses.separate)} samples (the first one twice) have {losses.together:.6g} together and "
            f"{losses.total:.6g} one at a time"
        )
        if losses.is_mean:
            return (
                f"{name} is a mean, not a sum: {compared}. Leave the mean out "
                '(reduction="sum" in torch.nn.functional): training and evaluation divide by the global batch'
            )
        if losses.has_constant:
            return (
                f"{name} adds {losses.constant:.6g} in each call, whatever the number of samples: {compared}. Multiply "
                "this term by the number of samples: the sums of all micro-batches are added up, and divided by the "
                "global batch"
            )
        note = ""
        if rows_per_sample > 1:
            note = (
                f" (The outputs have {rows_per_sample} rows for each sample, and those of a sample must be next to "
                "each other. If yours are in another order, return several arrays.)"
            )
        return f"{name} depends on the other samples of the batch: {compared}. {_ACROSS_SAMPLES}{note}"

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Any]:
        """Return what the module's `metrics` returns; {} without that function."""
        return self.user_module.metrics(outputs, batch) if "metrics" in self.facts.names else {}

    def smallest_batch(self, device: torch.device) -> Batch:
        """Return the smallest batch; its samples have the full length."""
        batch = super().smallest_batch(device)
        if self.facts.has_lengths:
            batch[LENGTHS_ARRAY] += max([1, *(self.sample_shapes[name][0][0] for name in self.facts.padded)])
        return batch


class _RecordCopies(TorchDispatchMode):
    """Records the tensors on the `meta` device into which values are copied."""

    def __init__(self, recorded: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self.recorded.append(args[0])
        return func(*args, **(kwargs or {}))


class _RecordNewTensors(TorchFunctionMode):
    """Records the tensors that torch.tensor and torch.as_tensor create."""

    def __init__(self, recorded: list[Tensor]) -> None:
        super().__init__()
        self.recorded = recorded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor):
            self.recorded.append(result)
        return result


def build_user_model(target: str, module: ModuleType, options: dict[str, Any], layers: range) -> nn.Module:
    """Build the part of a custom model that has these blocks, on the `meta` device.

    Raises UserError if it assigns values to weights, which would be lost, and if its buffers or tied parameters would
    differ between layouts.
    """
    with_values: list[Tensor] = []
    with torch.device("meta"), _RecordCopies(with_values), _RecordNewTensors(with_values):
        part = module.build(options, layers)
    if not isinstance(part, nn.Module):
        raise UserError("model.wrong_build", f"build of {target} must return a torch.nn.Module; it returns {part!r}")
    lost = {tensor.untyped_storage()._cdata for tensor in with_values}
    seen: dict[int, str] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        if not parameter.is_meta or parameter.untyped_storage()._cdata in lost:
            raise UserError(
                "model.weights_in_build",
                f"{target}: build assigns values to {name}, which would be lost: "
                "each rank fills its part of the model with "
                "init(name, values, options). Let that copy them, such as values.copy_(weights[name])",
            )
        if seen.setdefault(id(parameter), name) != name:
            raise UserError(
                "model.tied_parameters",
                f"{target}: {name} and {seen[id(parameter)]} are one parameter under two names; keep it "
                "in one module and call torch.nn.functional with it wherever else it is used",
            )
    for name, child in part.named_modules():
        for buffer in _get_buffers(child):
            where = f"{target}: buffer {name}.{buffer}"
            if buffer not in child._non_persistent_buffers_set:
                raise UserError(
                    "model.persistent_buffer",
                    f"{where} is persistent and would differ between layouts; use GroupNorm instead of BatchNorm",
                )
            if not hasattr(child, "reset_buffers"):
                raise UserError(
                    "model.no_reset_buffers", f"{where}: its module needs a method reset_buffers() that fills it"
                )
    return part


class _ReadOptions(dict[str, Any]):
    """Options that record which of their keys are read, also in nested mappings."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__((k, _ReadOptions(v) if isinstance(v, dict) else v) for k, v in values.items())
        self._read: set[str] = set()

    def list_reads(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Yield each key as a dotted name, and whether it was read. Keys inside an unread mapping are left out."""
        for key, value in dict.items(self):
            yield f"{prefix}{key}", key in self._read
            if key in self._read and isinstance(value, _ReadOptions):
                yield from value.list_reads(f"{prefix}{key}.")

    def _read_all(self) -> None:
        self._read |= {*dict.keys(self)}

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._read.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[str]:  # ** and dict() call it also
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
    """Import a user's module and build the whole model with each of `options`, as JSON.

    The last line of output is UNREAD_OPTIONS and a JSON list of the dotted keys that none of these builds reads. Raises
    UserError as `build_user_model` does.
    """
    module = importlib.import_module(target)
    is_read_by_key: dict[str, bool] = {}
    for values in map(json.loads, options):
        recording_options = _ReadOptions(values)
        layers = range(values["layers"])
        try:
            try:
                build_user_model(target, module, recording_options, layers)
            except Exception:  # perhaps a library accepts only a plain dict
                build_user_model(target, module, values, layers)
                recording_options.keys()
        except Exception as error:
            if len(options) > 1:
                error.add_note(f"with model.options {values}")
            raise
        for key, is_read in recording_options.list_reads():
            is_read_by_key[key] = is_read or is_read_by_key.get(key, False)
    print(f"\n{UNREAD_OPTIONS}{json.dumps([key for key, is_read in is_read_by_key.items() if not is_read])}")


def _get_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own buffers, without those of its children."""
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


def make_task(run: Run, manifest: Manifest | SampleManifest) -> Task:
    """Return the task of a run. Raises UserError if the user's module cannot be imported or breaks its contract."""
    if isinstance(manifest, Manifest):
        return DecoderTask(run.config, manifest.vocab_size, manifest.eos_id, manifest.bos_ids == (manifest.eos_id,))
    assert run.user_model is not None
    return CustomModelTask(run, run.user_model, run.user_model.load(run.code_dir), manifest)
