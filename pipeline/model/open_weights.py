"""Initialize a model from the safetensors files in the folder of an open-weights model, for any parallel layout.

Each rank reads the headers of some files. The ranks exchange the headers, so all ranks match the same tensors and raise
the same error. Each rank then copies only its part of each tensor. Meanwhile, threads hash the files. Each file is
hashed by one rank, which also brings the file into the page cache.

A safetensors file is a JSON header with names, types, shapes and offsets, followed by the tensors. It cannot execute
code. The folder is read once, when training starts, and recorded in `source.json` of the run directory. The hash of
`source.json` is part of each checkpoint (pipeline/checkpoint/identity.py). Export uses the copies of tokenizer files in
`source.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipeline.base.errors import UserError
from pipeline.base.files import add_checksum, sha256_file, translate_read_errors, write_json
from pipeline.comm.groups import all_gather_results
from pipeline.config.hugging_face import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    hash_weight_stats,
    list_weight_files,
    open_inside,
    read_token_ids,
    read_tokenizer_files,
)
from pipeline.config.sections import ModelConfig, ModelMetadata
from pipeline.data.verify_shards import load_run_manifest
from pipeline.model import lora
from pipeline.model.decoder import local_slices, local_tensor
from pipeline.model.make_task import make_task
from pipeline.model.spec import LM_HEAD
from pipeline.model.task import Task
from pipeline.model.transformers_model import STORED_TYPES, PretrainedWeights
from pipeline.run.directory import Run
from pipeline.run.origin import SOURCE_FILE

TensorSpecs = dict[str, tuple[list[int], str]]
"""Shape and safetensors dtype of each tensor, by name."""
_UNUSED_SUFFIX = ".rotary_emb.inv_freq"
"""Suffix of a table that older Llama models store with their weights, although it follows from the config."""


class WeightSource(Protocol):
    """Weights from which training starts."""

    @property
    def write_source(self) -> Callable[[], object]:
        """Function that writes `source.json` once all files are hashed. All ranks call it after copying weights."""

    def read(self, name: str) -> Tensor:
        """Return a whole weight, in one process."""

    def copy_into(self, weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Copy this rank's part of each weight to its parameter. All ranks must call this function.

        Args:
            weights: parameters with their names in the whole model.
        """


@dataclass(frozen=True)
class OpenWeights:
    """A model folder whose tensors match the model."""

    folder: Path
    files: Mapping[str, str]
    """Name of the file that contains each tensor."""
    write_source: Callable[[], object] = lambda: None
    """See `WeightSource`."""

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in the type in which it is stored."""
        with open_inside(self.folder, self.files[name]) as path, safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    @torch.no_grad()
    def copy_into(self, weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Copy this rank's part of each tensor to its parameter and convert it to the parameter's type.

        Args:
            weights: parameters with their names in the whole model.
        """
        for name, parameter in weights:
            part = local_tensor(parameter)
            if part.numel():
                with open_inside(self.folder, self.files[name]) as path, safe_open(path, framework="pt") as file:
                    part.copy_(file.get_slice(name)[local_slices(parameter)])


def open_initial_weights(
    run: Run, task: Task, group: dist.ProcessGroup, *, is_first_start: bool = True
) -> WeightSource | None:
    """Open the folder with the initial weights (`model.init_from`); return None if the weights are sampled.

    Args:
        run: the run.
        task: builds the model.
        group: a Gloo group. All its ranks must call this function.
        is_first_start: whether to hash the files, and to write `source.json` (`OpenWeights.write_source`). Later, it is
            enough that sizes and modification times of the files are unchanged.

    All ranks raise UserError if:

    - the folder has changed since the run was created,
    - a file is not a safetensors file,
    - a tensor is missing, is unexpected, or has the wrong shape or type.
    """
    model = run.config.model
    metadata = run.config.metadata.model
    if model.init_from is None:
        return None
    folder = model.init_from
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)

    def hash_file(name: str) -> str:
        """Return the SHA-256 of a file of the folder."""
        with translate_read_errors(str(folder / name)), open_inside(folder, name) as file:
            return sha256_file(file)

    def read_headers_of_rank() -> dict[str, TensorSpecs]:
        """Check that the folder has not changed, and read the headers of this rank's share of the weight files."""
        _check_unchanged(folder, metadata)
        return {name: read_tensor_specs(folder, name) for name in list_weight_files(folder)[rank::world_size]}

    specs_by_file: dict[str, TensorSpecs] = {}
    for specs_of_rank in all_gather_results(group, read_headers_of_rank):
        specs_by_file |= specs_of_rank
    parameters = dict(task.base_weights(task.build(range(model.layers))))
    weights = _match_folder(model, specs_by_file, parameters, group)
    if not is_first_start:
        return weights
    threads = ThreadPoolExecutor(4)  # The threads continue while the caller copies the weights.
    pending_hashes = {name: threads.submit(hash_file, name) for name in sorted(specs_by_file)[rank::world_size]}

    def write_source() -> None:
        """Collect the hashes of all ranks. Rank 0 then writes `source.json`."""
        hashes: dict[str, str] = {}
        for hashes_of_rank in all_gather_results(
            group, lambda: {name: pending.result() for name, pending in pending_hashes.items()}
        ):
            hashes |= hashes_of_rank
        all_gather_results(
            group, lambda: _write_source(run, folder, dict(sorted(hashes.items()))) if rank == 0 else None
        )

    return replace(weights, write_source=write_source)


def open_unchanged_folder(run: Run, parameters: Mapping[str, nn.Parameter]) -> WeightSource:
    """Open the folder in `model.init_from`, in one process.

    Args:
        run: the run, whose config has `model.init_from`.
        parameters: the parameters of the whole model without adapters, by name.

    Raises:
        UserError: as :func:`open_initial_weights` does.
    """
    assert run.config.model.init_from is not None
    _check_unchanged(run.config.model.init_from, run.config.metadata.model)
    return open_folder(run.config.model, parameters)


def open_folder(model: ModelConfig, parameters: Mapping[str, nn.Parameter]) -> WeightSource:
    """Open the folder `model.init_from`, in one process.

    Args:
        model: the section `model`.
        parameters: the parameters of the whole model without adapters, by name.

    Raises:
        UserError: if a tensor does not match the parameters, as :func:`open_initial_weights` does.
    """
    folder = model.init_from
    assert folder is not None
    specs_by_file = {name: read_tensor_specs(folder, name) for name in list_weight_files(folder)}
    return _match_folder(model, specs_by_file, parameters, None)


def _match_folder(
    model: ModelConfig,
    specs_by_file: Mapping[str, TensorSpecs],
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup | None,
) -> OpenWeights | PretrainedWeights:
    """Return the weights of the folder `model.init_from`, read by Sluice or by transformers.

    Args:
        model: the section `model`.
        specs_by_file: the tensors of each file.
        parameters: the parameters of the whole model without adapters, by name.
        group: a Gloo group of all ranks; None for one process.
    """
    folder = model.init_from
    assert folder is not None
    if model.backend == "transformers":
        return PretrainedWeights(model, _collect_types(folder, specs_by_file), group)
    return match_tensors(folder, specs_by_file, parameters, is_tied=model.tie_word_embeddings)


def open_base_weights(run: Run) -> tuple[Callable[[str], Tensor], dict[str, list[int]]]:
    """Return a function that reads a weight of the model to which a run adds an adapter, and the shapes of all weights.

    If training uses quantized weights, the function returns their values. Raises UserError as
    :func:`open_initial_weights` does.
    """
    task = make_task(run, load_run_manifest(run))
    model = task.build(range(run.config.model.layers))
    parameters = dict(task.base_weights(model))
    shapes = {name: list(weight.shape) for name, weight in parameters.items()}
    if run.config.model.target is None:
        source = open_unchanged_folder(run, parameters)
        quantized_weights = {id(module.weight) for module in lora.list_quantized(model)}

        def read(name: str) -> Tensor:
            values, weight = source.read(name), parameters[name]
            return lora.quantize(name, values.to(weight.dtype)).float() if id(weight) in quantized_weights else values

        return read, shapes
    model.to_empty(device="cpu")
    task.init_weights(model, torch.device("cpu"))
    weights = dict(task.base_weights(model))
    return lambda name: weights[name].detach(), shapes


def _check_unchanged(folder: Path, metadata: ModelMetadata) -> None:
    """Raise UserError if config.json, or size or modification time of a weight file, is not as in `metadata`."""
    with translate_read_errors(str(folder / CONFIG_FILE)), open_inside(folder, CONFIG_FILE) as file:
        if sha256_file(file) != metadata.init_sha256:
            raise UserError(
                "model.folder_changed",
                f"{folder / CONFIG_FILE} has changed since this run was created from it: start a new run",
            )
    # None: an older version, which did not record this hash, created the run.
    if metadata.init_files not in (None, hash_weight_stats(folder)):
        raise UserError(
            "model.folder_changed",
            f"{folder}: the size or modification time of a weight file has changed since this run was created from "
            "it: start a new run",
        )


def _write_source(run: Run, folder: Path, hashes: Mapping[str, str]) -> None:
    """Write `source.json`: the folder, and the SHA-256 of its config and weight files.

    If the run uses the tokenizer of the folder, also write the tokenizer's files (key `along`) and the ids of its
    special tokens.
    """
    uses_tokenizer_of_folder = run.config.data.tokenizer.path == folder / TOKENIZER_FILE
    files = {CONFIG_FILE: run.config.metadata.model.init_sha256, **hashes}
    tokenizer: dict[str, object] = {"along": {}}
    if uses_tokenizer_of_folder:
        tokenizer = {"along": read_tokenizer_files(folder), "token_ids": read_token_ids(folder)}
    write_json(run.path / SOURCE_FILE, add_checksum({"folder": str(folder), "files": files, **tokenizer}))


def read_tensor_specs(folder: Path, file_name: str) -> TensorSpecs:
    """Return shape and type of each tensor in a safetensors file. Raises UserError for any other file."""
    file = folder / file_name
    try:
        with (
            translate_read_errors(str(file)),
            open_inside(folder, file_name) as path,
            safe_open(path, framework="pt") as content,
        ):
            names = content.keys()
            slices = {name: content.get_slice(name) for name in names}
            return {name: (list(tensor.get_shape()), str(tensor.get_dtype())) for name, tensor in slices.items()}
    except SafetensorError as error:
        raise UserError(
            "model.not_safetensors",
            f"{file} is not a safetensors file ({error}). None of its content was executed. Download it again, or save "
            "the model as safetensors with transformers",
        ) from error


def _collect_types(folder: Path, specs_by_file: Mapping[str, TensorSpecs]) -> frozenset[str]:
    """Return the types of all tensors of floating-point numbers. Raise UserError if a type is not supported.

    Integers are not weights, but stored tables, such as those of GPT-NeoX. Transformers ignores them or reports them.
    """
    types: dict[str, str] = {}
    for specs in specs_by_file.values():
        types |= {dtype: name for name, (_, dtype) in specs.items() if dtype.startswith(("F", "BF"))}
    for dtype, name in types.items():
        _check_type(folder, name, dtype)
    return frozenset(types)


def _check_type(folder: Path, name: str, dtype: str | None) -> None:
    """Raise UserError unless the type of the tensor `name` is supported."""
    if dtype not in STORED_TYPES:
        raise UserError(
            "model.wrong_type",
            f"{folder}: tensor {name} has type {dtype}, but only {', '.join(STORED_TYPES)} are supported: use a "
            "version of the model with one of these types",
        )


def match_tensors(
    folder: Path, specs: Mapping[str, TensorSpecs], parameters: Mapping[str, nn.Parameter], *, is_tied: bool
) -> OpenWeights:
    """Match the tensors of a folder with the parameters of a model.

    Args:
        folder: the model folder.
        specs: tensors of each file.
        parameters: parameters of the whole model, by name.
        is_tied: whether the output layer shares the embedding. If so, a tensor of the output layer is ignored.

    Raises UserError if a tensor is missing, repeated or unexpected, or has the wrong shape or type. Tensors with
    `_UNUSED_SUFFIX` are not unexpected.
    """
    files: dict[str, str] = {}
    tensors: TensorSpecs = {}
    for file_name, file_tensors in sorted(specs.items()):
        if duplicates := sorted(file_tensors.keys() & files.keys()):
            raise UserError(
                "model.duplicate_tensor",
                f"{folder}: tensor {duplicates[0]} is in both {files[duplicates[0]]} and {file_name}: remove one of "
                "them",
            )
        files |= dict.fromkeys(file_tensors, file_name)
        tensors |= file_tensors
    for name, parameter in parameters.items():
        shape, dtype = tensors.get(name, (None, None))
        if shape is None:
            raise UserError(
                "model.missing_tensor",
                f"{folder}: its safetensors files have no tensor {name}: download the folder again",
            )
        if shape != list(parameter.shape):
            raise UserError(
                "model.wrong_shape",
                f"{folder}: tensor {name} has shape {shape}, but {CONFIG_FILE} requires {list(parameter.shape)}",
            )
        _check_type(folder, name, dtype)
    unexpected = sorted(name for name in tensors.keys() - parameters.keys() if not name.endswith(_UNUSED_SUFFIX))
    if unexpected and not (is_tied and unexpected == [LM_HEAD]):
        raise UserError(
            "model.unexpected_tensor",
            f"{folder}: the model that {CONFIG_FILE} describes has no parameter for tensor {unexpected[0]}, so the "
            "loaded model would differ from the original",
        )
    return OpenWeights(folder, files)
