"""The index of a checkpoint of ``torch.distributed.checkpoint``, a pickle, read without running what it asks for."""

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from f8sub.errors import Float8ConfigError

_CLASSES = {
    "collections": ("OrderedDict",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("_MEM_FORMAT_ENCODING", "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata"),
        *("MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
    ),
}
"""What ``dcp.save`` puts into an index beside dtypes and paths. None of it does more than hold values."""


class IndexReader(FileSystemReader):
    """Reads an index whose pickle asks for no class but an index's own; torch's reader runs whatever it asks for.

    Tensors are read by ``torch.load(weights_only=True)``, which is torch's way, too. Other entries are pickles, which
    are never read.
    """

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The entries that are tensors."""
        entries = self.read_metadata().state_dict_metadata
        # By its class alone: an entry of bytes could pretend to have a size, and torch would unpickle it.
        return {name: entry for name, entry in entries.items() if type(entry) is TensorStorageMetadata}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            Float8ConfigError: it is damaged, or asks for another class.
        """
        file = Path(self.path) / ".metadata"
        content = file.read_bytes()
        try:
            found = _Unpickler(io.BytesIO(content), file).load()
            entries = found.state_dict_metadata.items()
            if type(found) is not Metadata or not all(isinstance(name, str) for name, _ in entries):
                raise TypeError(type(found).__name__)
        except Float8ConfigError:
            raise
        except Exception as error:  # a damaged pickle fails in every way
            raise Float8ConfigError(f"{file} is no index of torch.distributed.checkpoint: {error}") from error
        return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, file: Path) -> None:
        super().__init__(content)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return pathlib.PurePosixPath  # of the machine that saved it, where paths may be of another kind
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise Float8ConfigError(
            f"{self._file} asks for {module}.{name}, which no index of torch.distributed.checkpoint needs, and could "
            "run code; read it where you trust it, and save it as safetensors"
        )
