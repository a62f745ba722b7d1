"""A reader of torch.distributed's checkpoints that runs nothing from them.

Their `.metadata` is a pickle, which torch loads as it is: code could hide there. Here it may name the classes that say
where tensors lie, and nothing else; and all that is stored must be tensors, which torch loads with weights_only.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_CLASSES = {
    *((dcp_metadata.__name__, name) for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}  # fmt: skip


class Reader(FileSystemReader):
    def read_metadata(self, *arguments: Any, **keywords: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise pickle.UnpicklingError("its .metadata is something else")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"{name!r} is no tensor")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Their shapes and types, by name."""
        found = self.read_metadata().state_dict_metadata
        return {name: (entry.size, entry.properties.dtype) for name, entry in found.items()}  # type: ignore[union-attr]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = getattr(torch, name, None) if module == "torch" else None
        if isinstance(known, torch.dtype):
            return known
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its .metadata asks for {module}.{name}")
