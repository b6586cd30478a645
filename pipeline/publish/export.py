"""The command `export RUN DIR`: write a checkpoint as safetensors, with the files that transformers and vLLM expect.

    model.safetensors, or model-00001-of-00003.safetensors … and model.safetensors.index.json
    config.json, generation_config.json, tokenizer.json, tokenizer_config.json      (not for custom models)

The checkpoint of an adapter is written in peft's format, unless it is merged into the weights of the model:

    adapter_model.safetensors, adapter_config.json, tokenizer.json, tokenizer_config.json

Instead of the weights, the moving average of the weights (`train.ema`) or the mean of the weights of several
checkpoints can be exported.

One process without a GPU or process group reads and writes a few tensors at a time. Memory therefore does not grow with
the model, except if transformers has built the model (`model.backend`) and therefore also writes it. Meanwhile, another
thread verifies the hashes of the checkpoint. The files are written to a temporary folder. If all hashes are right and
all files are synced, this folder is renamed to DIR. A killed export leaves only a folder `.DIR.….tmp`. Two exports of
the same checkpoint have the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.base.errors import CheckpointError, UserError
from pipeline.base.files import create_folder_atomically, fsync, parse_json_or_none, write_atomic, write_json
from pipeline.checkpoint.catalog import (
    checkpoint_name,
    find_checkpoint,
    find_newest_step,
    list_checkpoint_steps,
    read_checkpoint_manifest,
    verify_checkpoint_files,
)
from pipeline.checkpoint.checkpointer import find_weights, iterate_tensors
from pipeline.checkpoint.identity import read_source
from pipeline.checkpoint.model_tokens import GENERATION_CONFIG, find_model_tokens
from pipeline.config.hugging_face import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_WEIGHTS_FILE,
    TOKENIZER_FILE,
    TOKENIZER_SIDE_FILES,
    TRANSFORMERS_VERSION,
    build_config_json,
)
from pipeline.data.manifest import Manifest
from pipeline.data.special_tokens import load_tokenizer
from pipeline.data.verify_shards import load_run_manifest
from pipeline.model import lora
from pipeline.model.open_weights import open_base_weights
from pipeline.model.spec import EMBEDDING, LORA_A, LORA_B
from pipeline.model.transformers_model import save_weights
from pipeline.run.directory import Run

MAX_FILE_BYTES = 5_000_000_000
"""Maximum size of a file of weights in bytes. A file with a single tensor may be larger."""
TYPES = {"fp32": (torch.float32, "F32", "float32"), "bf16": (torch.bfloat16, "BF16", "bfloat16")}
"""Value of the option `--dtype` → the torch data type, and its names in safetensors and in config.json."""
_MEAN_BATCH_ELEMENTS = 1 << 26
"""Number of elements of the weights that are averaged together: 512 MiB in fp64. A larger weight is averaged alone."""
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
"""Prefix of the names of weights in `ADAPTER_FILE`."""

Read = Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]
"""A function that yields the weights with these names, in the same order."""


def export_checkpoint(
    run: Run,
    folder: Path,
    step: str | None,
    dtype: str,
    *,
    merge: bool = False,
    ema: bool = False,
    average: int | None = None,
) -> str:
    """Export one checkpoint, or the mean of several, to a new folder and return a description of the result.

    Args:
        run: the run.
        folder: the new folder.
        step: the step of the (newest) checkpoint; None for the newest checkpoint of the run.
        dtype: a key of `TYPES`.
        merge: whether to add the adapter of the checkpoint to the weights of the model.
        ema: whether to export the moving average of the weights (`train.ema`).
        average: the number of checkpoints whose mean weights are exported; None for one checkpoint.

    Raises:
        UserError: if `folder` exists, if the arguments contradict each other or the config, if there are fewer than
            `average` intact checkpoints, or if no supported model family has the features of this model.
        CheckpointError: if a checkpoint is damaged.
    """
    if folder.exists():
        raise UserError("export.folder_exists", f"{folder} exists already: name a new folder, or remove it")
    if merge and run.config.adapter is None:
        raise UserError("cli.conflict", f"--merge: {run.name} trains no adapter, but all weights: remove --merge")
    if ema:
        require_averages(run)
    if ema and average is not None:
        raise UserError(
            "cli.conflict",
            "--ema and --average cannot be combined: --ema exports the moving average of one checkpoint (train.ema), "
            "--average the mean of several checkpoints: choose one of them",
        )
    if average is not None and run.config.adapter is not None and not merge:
        raise UserError(
            "cli.conflict",
            f"--average: {run.name} trains an adapter, and the product of two mean matrices is not the mean of the "
            "products: add --merge, which averages the merged weights",
        )
    with create_folder_atomically(folder) as temporary:
        description = write_model_files(run, temporary, step, dtype, merge=merge, ema=ema, average=average)
    return f"{folder}: {description}"


def require_averages(run: Run) -> None:
    """Raise UserError if the checkpoints of a run have no moving averages of the weights."""
    if run.config.train.ema is None:
        raise UserError(
            "cli.conflict",
            f"--ema: {run.name} has no moving average of its weights, because it was started without train.ema: remove "
            "--ema",
        )


def write_model_files(
    run: Run,
    folder: Path,
    step: str | None,
    dtype: str,
    *,
    merge: bool = False,
    ema: bool = False,
    average: int | None = None,
) -> str:
    """Write the exported files to an existing empty folder and return a description of the result.

    The other arguments and the errors are as in `export_checkpoint`.
    """
    checkpoints = [find_checkpoint(run, step)] if average is None else _find_newest_checkpoints(run, step, average)
    stored_weights = find_weights(checkpoints[0][0], averaged=ema)
    stored_names = {name: stored_name for name, (stored_name, _) in stored_weights.items()}
    shapes = {name: list(shape) for name, (_, shape) in stored_weights.items()}
    reads: list[Read] = [partial(_read_checkpoint, checkpoint, stored_names) for checkpoint, _ in checkpoints]
    notes: Sequence[str] = ()
    single_file, prefix = SINGLE_WEIGHTS_FILE, ""
    with ThreadPoolExecutor(1) as executor:
        verification = executor.submit(_verify_checkpoints, checkpoints)  # takes as long as the export
        try:
            if merge:
                shapes, reads = _merge_adapter(run, shapes, reads)
            elif run.config.adapter is not None:
                single_file, prefix = ADAPTER_FILE, _PEFT_PREFIX
                write_json(folder / ADAPTER_CONFIG, _build_adapter_config(run, shapes))
            if run.config.model.target is None:
                vocab_size = run.config.model.vocab_size or shapes[EMBEDDING][0]
                # The folder of an adapter contains no model, so it has no config.json.
                has_model = merge or run.config.adapter is None
                notes = _write_config_and_tokenizer(run, folder, vocab_size, dtype, has_model=has_model)
            read = reads[0] if average is None else partial(_read_mean, reads, shapes)
            if run.config.model.backend == "transformers" and not prefix:
                total_bytes = save_weights(
                    run.config.model, read(list(shapes)), TYPES[dtype][0], folder, MAX_FILE_BYTES
                )
            else:
                total_bytes = _write_weights(folder, shapes, read, dtype, single_file, prefix)
        finally:
            verification.result()  # if a checkpoint is damaged, this error explains any other error
    source = f"{run.name}/checkpoints/{checkpoints[0][0].name}"
    if average is not None:
        steps = ", ".join(str(manifest["step"]) for _, manifest in reversed(checkpoints))
        source = f"the mean of steps {steps} of {run.name}"
    elif ema:
        source = f"the moving average in {source}"
    return "\n".join([f"{len(shapes)} tensors, {total_bytes:,} bytes in {dtype}, of {source}", *notes])


def _verify_checkpoints(checkpoints: Iterable[tuple[Path, Mapping[str, Any]]]) -> None:
    """Raise CheckpointError if a file differs from the manifest of its checkpoint."""
    for checkpoint, manifest in checkpoints:
        verify_checkpoint_files(checkpoint, manifest)


def _find_newest_checkpoints(run: Run, step: str | None, count: int) -> list[tuple[Path, dict[str, Any]]]:
    """Return the directories and manifests of the `count` newest intact checkpoints, newest first.

    A checkpoint is intact here if its files have the recorded sizes. The hashes are not verified.

    Args:
        run: the run.
        step: the step of the newest of these checkpoints; None for the newest checkpoint.
        count: the number of checkpoints.

    Raises:
        UserError: if there are fewer intact checkpoints, or the run is a sweep, or the step does not exist.
        CheckpointError: if there is no checkpoint, or the checkpoint of `step` is damaged.
    """
    newest_step = find_newest_step(run.checkpoints_dir) if step in (None, "newest") else 0
    newest_step = newest_step or find_checkpoint(run, step)[1]["step"]
    checkpoints: list[tuple[Path, dict[str, Any]]] = []
    for each in list_checkpoint_steps(run.checkpoints_dir):
        if each > newest_step or len(checkpoints) == count:
            continue
        checkpoint = run.checkpoints_dir / checkpoint_name(each)
        try:
            manifest = read_checkpoint_manifest(checkpoint)
            verify_checkpoint_files(checkpoint, manifest, hashes=False)
        except CheckpointError:
            if each == newest_step:  # The user selected this checkpoint.
                raise
            continue
        checkpoints.append((checkpoint, manifest))
    if len(checkpoints) < count:
        steps = ", ".join(str(manifest["step"]) for _, manifest in reversed(checkpoints)) or "none"
        raise UserError(
            "export.too_few_checkpoints",
            f"--average {count}: {run.name} has only {len(checkpoints)} intact checkpoints up to step {newest_step} "
            f"({steps}): use a smaller number. checkpoint.keep decides how many are kept",
        )
    return checkpoints


def _write_config_and_tokenizer(
    run: Run, folder: Path, vocab_size: int, dtype: str, *, has_model: bool
) -> Sequence[str]:
    """Write the files other than weights for a decoder, and return notes for the user.

    These files are config.json and generation_config.json if `has_model`, the files of the tokenizer and, if there is
    one, the chat template.
    """
    config = run.config
    manifest = load_run_manifest(run)
    assert isinstance(manifest, Manifest)
    length = config.data.sequence_length
    eos_token = config.data.tokenizer.eos_token
    tokens = find_model_tokens(run, manifest, load_tokenizer(run.data_dir / TOKENIZER_FILE, eos_token))
    if has_model:
        config_json = build_config_json(
            config.model, config.metadata.model, vocab_size, length, tokens.ids["eos_token_id"], TYPES[dtype][2]
        )
        write_json(folder / CONFIG_FILE, dict(sorted({**config_json, **tokens.ids}.items())))
        token_ids = {key: value for key, value in tokens.ids.items() if value is not None}
        write_json(folder / GENERATION_CONFIG, {**token_ids, "transformers_version": TRANSFORMERS_VERSION})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "eos_token": tokens.eos_token}
    write_json(folder / "tokenizer_config.json", {**settings, **tokens.texts, "clean_up_tokenization_spaces": False})
    # The files of the initial model's tokenizer replace files of the same names that were written above.
    side_files = read_source(run).get("along", {})
    for name in TOKENIZER_SIDE_FILES:
        if name in side_files and (has_model or name != GENERATION_CONFIG):
            write_atomic(folder / name, _make_compatible(tokens.update_side_file(name, side_files[name])))
    if tokens.chat_template is not None:
        write_atomic(folder / "chat_template.jinja", tokens.chat_template)
    shutil.copyfile(run.data_dir / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    fsync(folder / TOKENIZER_FILE)
    return tokens.notes


def _make_compatible(text: str) -> str:
    """Return the content of a tokenizer's side file with names that both transformers 4 and 5 know.

    If the text is not a JSON object, or has neither `extra_special_tokens` nor `TokenizersBackend`, it is returned
    unchanged.
    """
    content = parse_json_or_none(text.encode())
    if not isinstance(content, dict) or ("extra_special_tokens" not in content and "TokenizersBackend" not in text):
        return text
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    return json.dumps(content, indent=1) + "\n"


def _read_checkpoint(
    checkpoint: Path, stored_names: Mapping[str, str], names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a checkpoint with these names.

    Args:
        checkpoint: the directory of the checkpoint.
        stored_names: the names in the checkpoint, by the names of the weights.
        names: the names of the weights.
    """
    tensors = iterate_tensors(checkpoint, [stored_names[name] for name in names])
    for name, (_, tensor) in zip(names, tensors, strict=True):
        yield name, tensor


def _read_mean(
    reads: Sequence[Read], shapes: Mapping[str, list[int]], names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the means (fp64) of the weights with these names over several checkpoints.

    In fp64, the sum of a few fp32 numbers is almost always exact. The mean is therefore rounded only once, when it is
    converted to the type of the export.

    Args:
        reads: a function for each checkpoint that yields its weights.
        shapes: name → shape.
        names: the names of the weights.
    """
    batches: list[list[str]] = [[]]
    batch_elements = 0
    for name in names:
        elements = torch.Size(shapes[name]).numel()
        if batches[-1] and batch_elements + elements > _MEAN_BATCH_ELEMENTS:
            batches.append([])
            batch_elements = 0
        batches[-1].append(name)
        batch_elements += elements
    for batch in batches:
        sums: dict[str, Tensor] = {}
        for read in reads:
            for name, tensor in read(batch):
                sums[name] = sums[name].add_(tensor) if name in sums else tensor.to(torch.float64, copy=True)
        for name in batch:
            yield name, sums.pop(name).div_(len(reads))


def _merge_adapter(
    run: Run, shapes: Mapping[str, list[int]], reads: Sequence[Read]
) -> tuple[dict[str, list[int]], list[Read]]:
    """Return the shapes of the weights of the model, and functions that read them with an adapter added.

    Args:
        run: the run.
        shapes: the shapes of the weights of the adapter.
        reads: for each checkpoint, a function that yields the weights of the adapter.
    """
    adapter = run.config.adapter
    assert adapter is not None
    read_base, base_shapes = open_base_weights(run)

    def read_merged(read: Read, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights with these names, with the adapter that `read` yields."""
        for name in names:
            weight = read_base(name)
            matrices = [name.removesuffix(".weight") + ending for ending in (LORA_A, LORA_B)]
            if matrices[0] in shapes:
                (_, a_RI), (_, b_OR) = read(matrices)
                weight = lora.merge(weight, a_RI, b_OR, adapter)
            yield name, weight

    return base_shapes, [partial(read_merged, read) for read in reads]


def _build_adapter_config(run: Run, names: Iterable[str]) -> dict[str, Any]:
    """Return the content of peft's adapter_config.json.

    Args:
        run: the run.
        names: the names of the weights of the adapter.
    """
    adapter = run.config.adapter
    assert adapter is not None
    modules = sorted({name.removesuffix(LORA_A) for name in names if name.endswith(LORA_A)}, key=_natural_sort_key)
    # peft adds adapters to all layers whose names end with one of `target_modules`.
    ends = sorted({module.rpartition(".")[2] for module in modules})
    if run.config.model.other_model_key is not None or len(modules) != len(ends) * run.config.model.layers:
        ends = modules
    base = run.config.model.init_from
    alpha = int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM" if run.config.model.target is None else None,
        "base_model_name_or_path": None if base is None else str(base), "r": adapter.rank, "lora_alpha": alpha,
        "lora_dropout": adapter.dropout, "target_modules": ends, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "modules_to_save": None,
    }  # fmt: skip


def _write_weights(
    folder: Path, shapes: Mapping[str, list[int]], read: Read, dtype: str, single_file: str, prefix: str
) -> int:
    """Write the files of weights and, if there are several files, their index. Return the bytes of all weights.

    Args:
        folder: the folder.
        shapes: name → shape.
        read: yields the weights.
        dtype: a key of `TYPES`.
        single_file: the name of the file if there is only one.
        prefix: what precedes each name in the files.
    """
    torch_dtype, safetensors_dtype, _ = TYPES[dtype]
    sizes = {name: torch_dtype.itemsize * torch.Size(shape).numel() for name, shape in shapes.items()}
    names_by_file: list[list[str]] = [[]]  # for each file, the names of its tensors
    for name in sorted(shapes, key=_natural_sort_key):
        if names_by_file[-1] and sum(sizes[other] for other in names_by_file[-1]) + sizes[name] > MAX_FILE_BYTES:
            names_by_file.append([])
        names_by_file[-1].append(name)
    count = len(names_by_file)
    total_bytes = sum(sizes.values())
    files = [
        f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else single_file for number in range(1, count + 1)
    ]
    for file, names in zip(files, names_by_file, strict=True):
        tensors = {name: (safetensors_dtype, shapes[name], sizes[name]) for name in names}
        _write_weights_file(folder / file, tensors, read, torch_dtype, prefix)
    if count > 1:
        weight_map = {name: file for file, names in zip(files, names_by_file, strict=True) for name in names}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return total_bytes


def _write_weights_file(
    file: Path, tensors: Mapping[str, tuple[str, list[int], int]], read: Read, dtype: torch.dtype, prefix: str
) -> None:
    """Write one safetensors file: the length of the header (8 bytes, little-endian), the header (JSON) and the tensors.

    The format is described in the README of github.com/huggingface/safetensors.

    Args:
        file: the new file.
        tensors: name → data type in safetensors, shape, and size in bytes.
        read: yields the tensors.
        dtype: the type to which tensors are converted.
        prefix: what precedes each name in the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (safetensors_dtype, shape, size) in tensors.items():
        header[prefix + name] = {"dtype": safetensors_dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)  # spaces align the tensors to 8 bytes
    with open(file, "wb") as stream:
        stream.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for _, tensor in read(list(tensors)):
            stream.write(tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in a name by value, so that block 10 comes after block 2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
