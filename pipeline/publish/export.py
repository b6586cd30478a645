"""`export RUN DIR`: a checkpoint's weights as safetensors, with what transformers, vLLM and others ask for beside them.

    model.safetensors, or model-00001-of-00003.safetensors … and model.safetensors.index.json
    config.json, generation_config.json, tokenizer.json, tokenizer_config.json      (not of a model of one's own)

One process, no GPU, no process group: tensors are read from the checkpoint a few at a time and written at once, so that
memory does not grow with the model, while another thread compares the checkpoint with its hashes. The folder takes its
name by one rename, after all hashes were right and everything was synced: it is whole, or not there. What a kill leaves
is called `.DIR.….tmp`. The same checkpoint gives the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipeline.base.errors import UserError
from pipeline.base.files import create_folder_atomically, fsync, parse_json_or_none, write_atomic, write_json
from pipeline.checkpoint.catalog import find_checkpoint, verify_checkpoint_files
from pipeline.checkpoint.checkpointer import CheckpointReader, iterate_tensors
from pipeline.checkpoint.identity import read_source
from pipeline.checkpoint.model_tokens import GENERATION, model_tokens
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
from pipeline.model.spec import EMBEDDING
from pipeline.run.directory import Run

PIECE_BYTES = 5_000_000_000
"""Most of a file, but for one with a single larger tensor."""
TYPES = {"fp32": (torch.float32, "F32", "float32"), "bf16": (torch.bfloat16, "BF16", "bfloat16")}
"""By the option's value: torch's type, and its name in safetensors and in config.json."""
_PREFIX = "model."
"""Before the names of weights in a checkpoint."""


def export_checkpoint(run: Run, folder: Path, which: str | None, dtype: str) -> str:
    """Write the weights of one checkpoint (the newest without `which`) in the type `dtype`; what was done, in words.

    Raises UserError where `folder` exists, or no format has such a model; CheckpointError as `verify` does.
    """
    if folder.exists():
        raise UserError("export.folder_exists", f"{folder} exists already: name a folder that does not, or remove it")
    with create_folder_atomically(folder) as making:
        return f"{folder}: {write_model_files(run, making, which, dtype)}"


def write_model_files(run: Run, folder: Path, which: str | None, dtype: str) -> str:
    """What `export` writes, into an empty `folder`; what was done, in words. Raises as `export` does."""
    checkpoint, manifest = find_checkpoint(run, which)
    entries = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    shapes = {
        name.removeprefix(_PREFIX): list(entry.size)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(_PREFIX)
    }
    notes: Sequence[str] = ()
    with ThreadPoolExecutor(1) as other:
        intact = other.submit(verify_checkpoint_files, checkpoint, manifest)  # takes as long as all else
        try:
            if run.config.model.target is None:
                notes = _write_words(run, folder, shapes[EMBEDDING][0], dtype)
            total = _write_weights(folder, shapes, checkpoint, dtype)
        finally:
            intact.result()  # what is damaged explains what failed
    words = f"{len(shapes)} tensors, {total:,} bytes in {dtype}, of {run.name}/checkpoints/{checkpoint.name}"
    return "\n".join([words, *notes])


def _write_words(run: Run, folder: Path, vocab_size: int, dtype: str) -> Sequence[str]:
    """The decoder's config and its tokenizer; what a user of them has to know."""
    manifest, config = load_run_manifest(run), run.config
    assert isinstance(manifest, Manifest)
    length, eos_token = config.data.sequence_length, config.data.tokenizer.eos_token
    tokens = model_tokens(run, manifest, load_tokenizer(run.data_dir / TOKENIZER_FILE, eos_token))
    theirs = build_config_json(
        config.model, config.metadata.model, vocab_size, length, tokens.ids["eos_token_id"], TYPES[dtype][2]
    )
    write_json(folder / CONFIG_FILE, dict(sorted({**theirs, **tokens.ids}.items())))
    known = {key: value for key, value in tokens.ids.items() if value is not None}
    write_json(folder / GENERATION, {**known, "transformers_version": TRANSFORMERS_VERSION})
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "eos_token": tokens.eos_token}
    write_json(folder / "tokenizer_config.json", {**kind, **tokens.names, "clean_up_tokenization_spaces": False})
    kept = read_source(run).get("along", {})
    for name in TOKENIZER_SIDE_FILES:
        if name in kept:
            write_atomic(folder / name, _for_both(tokens.corrected(name, kept[name])))
    if tokens.chat_template is not None:
        write_atomic(folder / "chat_template.jinja", tokens.chat_template)
    shutil.copyfile(run.data_dir / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    fsync(folder / TOKENIZER_FILE)
    return tokens.notes


def _for_both(text: str) -> str:
    """A file that goes with a tokenizer; what transformers 5 wrote and 4 does not know, in the words that both do."""
    found = parse_json_or_none(text.encode())
    if not isinstance(found, dict) or ("extra_special_tokens" not in found and "TokenizersBackend" not in text):
        return text
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    return json.dumps(found, indent=1) + "\n"


def _write_weights(folder: Path, shapes: Mapping[str, list[int]], checkpoint: Path, dtype: str) -> int:
    """All pieces and, of several, the index; the bytes of all weights."""
    kind, code, _ = TYPES[dtype]
    sizes = {name: kind.itemsize * torch.Size(shape).numel() for name, shape in shapes.items()}
    pieces: list[list[str]] = [[]]
    for name in sorted(shapes, key=_natural):
        if pieces[-1] and sum(sizes[one] for one in pieces[-1]) + sizes[name] > PIECE_BYTES:
            pieces.append([])
        pieces[-1].append(name)
    many, total = len(pieces), sum(sizes.values())
    files = [
        f"model-{number:05}-of-{many:05}.safetensors" if many > 1 else SINGLE_WEIGHTS_FILE
        for number in range(1, many + 1)
    ]
    for file, names in zip(files, pieces, strict=True):
        _write_piece(folder / file, {name: (code, shapes[name], sizes[name]) for name in names}, checkpoint, kind)
    if many > 1:
        table = {name: file for file, names in zip(files, pieces, strict=True) for name in names}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": table})
    return total


def _write_piece(
    file: Path, what: Mapping[str, tuple[str, list[int], int]], checkpoint: Path, kind: torch.dtype
) -> None:
    """One safetensors file: the header's length (8 bytes, little-endian), the header (JSON), the numbers.

    The format is described in the README of github.com/huggingface/safetensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (code, shape, size) in what.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that numbers are aligned
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in iterate_tensors(checkpoint, [_PREFIX + name for name in what]):
            stream.write(tensor.to(kind).contiguous().view(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def _natural(name: str) -> list[tuple[int, str]]:
    """So that block 10 comes after block 2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
