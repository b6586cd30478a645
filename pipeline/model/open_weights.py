"""Initialize a model from the safetensors files of an open model's folder, for any parallel layout.

The ranks share the reading of the file headers and exchange the results, so all of them find the same tensors and raise
the same error. Each rank then copies only its own part of each tensor. Meanwhile threads hash the files, each on one
rank, which also reads them ahead.

A safetensors file is a JSON header with names, types, shapes and offsets, followed by the tensors, so it can execute
nothing. The folder is read once, when the training starts. `source.json` in the run directory then records it. Its hash
is part of each checkpoint (pipeline/checkpoint/identity.py), and its copies of the tokenizer's files serve an export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from pipeline.base.errors import UserError
from pipeline.base.files import add_checksum, sha256_file, translate_read_errors, write_json
from pipeline.checkpoint.identity import SOURCE_FILE
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
from pipeline.model.decoder import local_slices, local_tensor
from pipeline.model.spec import LM_HEAD
from pipeline.model.task import Task
from pipeline.run.directory import Run

TensorSpecs = dict[str, tuple[list[int], str]]
"""Shape and type of tensors, by name."""
_TYPES = ("F64", "F32", "F16", "BF16")
_UNUSED_SUFFIX = ".rotary_emb.inv_freq"
"""Suffix of a table that older Llamas store with their weights, although it follows from the config."""


@dataclass(frozen=True)
class OpenWeights:
    """A folder whose tensors match the model."""

    folder: Path
    files: Mapping[str, str]
    """Name of the file that contains each tensor."""
    write_source: Callable[[], object] = lambda: None
    """Write `source.json` once all files are hashed. All ranks call it after copying their weights."""

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


def open_initial_weights(run: Run, task: Task, group: dist.ProcessGroup) -> OpenWeights | None:
    """Open the folder from which the run's decoder starts; None if its weights are sampled.

    All ranks of the Gloo `group` call it. Raises UserError on all of them if the folder has changed since the run was
    made, if a file is not safetensors, and if a tensor is missing, unexpected or has another shape or type.
    """
    model = run.config.model
    metadata = run.config.metadata.model
    if model.init_from is None:
        return None
    folder, rank, ranks = model.init_from, dist.get_rank(group), dist.get_world_size(group)

    def hash_file(name: str) -> str:
        with translate_read_errors(str(folder / name)), open_inside(folder, name) as file:
            return sha256_file(file)

    def read_own_headers() -> dict[str, TensorSpecs]:
        with translate_read_errors(str(folder / CONFIG_FILE)), open_inside(folder, CONFIG_FILE) as file:
            if sha256_file(file) != metadata.init_sha256:
                raise UserError(
                    "model.folder_changed",
                    f"{folder / CONFIG_FILE} was changed since this run was made from it: make a new run",
                )
        names = list_weight_files(folder)[rank::ranks]
        if metadata.init_files not in (None, hash_weight_stats(folder)):
            raise UserError(
                "model.folder_changed",
                f"{folder}: files with its weights were changed since this run was made from it, by size or time: make "
                "a new run",
            )
        return {name: read_tensor_specs(folder, name) for name in names}

    seen = {name: found for part in all_gather_results(group, read_own_headers) for name, found in part.items()}
    whole = dict(task.named_weights(task.build(range(model.layers))))
    source = match_tensors(folder, seen, whole, tied=model.tie_word_embeddings)
    threads = ThreadPoolExecutor(4)
    digests = {name: threads.submit(hash_file, name) for name in sorted(seen)[rank::ranks]}

    def write_source() -> None:
        parts = all_gather_results(group, lambda: {name: digest.result() for name, digest in digests.items()})
        hashes = dict(sorted(each for part in parts for each in part.items()))
        all_gather_results(group, lambda: _write_source(run, folder, hashes) if rank == 0 else None)

    return replace(source, write_source=write_source)


def _write_source(run: Run, folder: Path, hashes: Mapping[str, str]) -> None:
    """Record the files that the training starts from."""
    own = run.config.data.tokenizer.path == folder / TOKENIZER_FILE
    files = {CONFIG_FILE: run.config.metadata.model.init_sha256, **hashes}
    kept = {"along": read_tokenizer_files(folder), "token_ids": read_token_ids(folder)} if own else {"along": {}}
    write_json(run.path / SOURCE_FILE, add_checksum({"folder": str(folder), "files": files, **kept}))


def read_tensor_specs(folder: Path, file_name: str) -> TensorSpecs:
    """Return shape and type of each tensor in a safetensors file. Raises UserError if it is not a safetensors file."""
    file = folder / file_name
    try:
        with (
            translate_read_errors(str(file)),
            open_inside(folder, file_name) as path,
            safe_open(path, framework="pt") as content,
        ):
            names = content.keys()
            slices = {name: content.get_slice(name) for name in names}
            return {name: (list(piece.get_shape()), str(piece.get_dtype())) for name, piece in slices.items()}
    except SafetensorError as error:
        raise UserError(
            "model.not_safetensors",
            f"{file} is no safetensors file ({error}): nothing of it was executed; fetch it again, or let transformers "
            "save the model as safetensors",
        ) from error


def match_tensors(
    folder: Path, specs: Mapping[str, TensorSpecs], whole: Mapping[str, nn.Parameter], *, tied: bool
) -> OpenWeights:
    """Match the tensors of a folder with a model.

    Args:
        specs: tensors of each file.
        whole: parameters of the whole model.
        tied: whether the output layer shares the embedding, so that its tensor is ignored.

    Raises UserError if tensors are missing, repeated or unexpected, or have another shape or type.
    """
    files: dict[str, str] = {}
    tensors: dict[str, tuple[list[int], str]] = {}
    for name, content in sorted(specs.items()):
        if twice := sorted(content.keys() & files.keys()):
            raise UserError(
                "model.duplicate_tensor",
                f"{folder}: {twice[0]} stands in {files[twice[0]]} and in {name}: keep one of them",
            )
        files |= dict.fromkeys(content, name)
        tensors |= content
    for name, parameter in whole.items():
        shape, kind = tensors.get(name, (None, None))
        if shape is None:
            raise UserError(
                "model.missing_tensor",
                f"{folder}: there is no tensor {name} in its safetensors files: fetch the folder again",
            )
        if shape != list(parameter.shape):
            raise UserError(
                "model.wrong_shape",
                f"{folder}: {name} has the shape {shape}, and {CONFIG_FILE} asks for {list(parameter.shape)}",
            )
        if kind not in _TYPES:
            raise UserError(
                "model.wrong_type",
                f"{folder}: {name} is of type {kind}, not one of {', '.join(_TYPES)}: take one that is",
            )
    unknown = sorted(name for name in tensors.keys() - whole.keys() if not name.endswith(_UNUSED_SUFFIX))
    if unknown and not (tied and unknown == [LM_HEAD]):
        raise UserError(
            "model.unexpected_tensor",
            f"{folder}: {CONFIG_FILE} says nothing of {unknown[0]}, so the model would not be that one",
        )
    return OpenWeights(folder, files)
