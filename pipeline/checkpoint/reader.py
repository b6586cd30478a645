"""Reading torch's distributed checkpoint (DCP) without believing it: `.metadata` is a pickle, and pickles execute.

The manifest's hashes say that a file is as it was written, not who wrote it. So the pickle may name the classes that
DCP's own metadata is made of (the same in torch 2.11 and 2.13) and nothing else, and what it says of the tensors' files
must lie in the checkpoint. The tensors themselves DCP reads with `weights_only`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from pipeline.base.errors import CheckpointError
from pipeline.checkpoint.catalog import METADATA

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip
"""What `.metadata` may name, by module; types of numbers (`torch.float32`) besides."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        number_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _ALLOWED.get(module, ()) and not number_type:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """DCP's own reader of a checkpoint's files, with a `.metadata` that was read with care and only once."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self._file = checkpoint / METADATA
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # without arguments: DCP then asks for no other file
        """The metadata. Raises CheckpointError, naming the file and what it asks for, where DCP did not write it."""
        if self._metadata is None:
            self._metadata = _read(self._file)
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _read(file: Path) -> Metadata:
    try:
        with open(file, "rb") as stream:
            found = _Unpickler(stream).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}")
        paths = {info.relative_path for info in found.storage_data.values()}
        if outside := [path for path in paths if Path(path).name != path]:
            raise pickle.UnpicklingError(f"it points to {min(outside)}")
    except OSError:
        raise
    except Exception as error:  # a crafted pickle may raise anything
        raise CheckpointError(
            f"{file} was not written by a training ({error}): nothing of it was executed; put an intact copy of this "
            f"checkpoint in its place, or move {file.parent} away"
        ) from error
    return found
