"""Reads the index of a checkpoint of ``torch.distributed.checkpoint``, a pickle, without running what it asks for."""

import io
import itertools
import math
import pathlib
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

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

    _index: Metadata | None = None

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return the entries that are tensors."""
        entries = self.read_metadata().state_dict_metadata
        # By its class alone: an entry of bytes could pretend to have a size, and torch would unpickle it.
        return {name: entry for name, entry in entries.items() if type(entry) is TensorStorageMetadata}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index, which is read once.

        Raises:
            Float8ConfigError: it is damaged, or asks for another class.
        """
        if self._index is None:
            self._index = self._read(Path(self.path) / ".metadata")
        return self._index

    def check(self, name: str) -> None:
        """Check that the parts of a tensor cover it, each element once, and that the index names a file for each.

        torch's loader leaves what no part covers as it was, which is memory without values.

        Raises:
            Float8ConfigError: they do not.
        """
        entry = self.tensors()[name]
        files = self.read_metadata().storage_data
        wrong = _uncovered(tuple(entry.size), entry.chunks)
        starts = [tuple(each.offsets) for each in entry.chunks if math.prod(tuple(each.sizes))]
        lost = [start for start in starts if MetadataIndex(name, start) not in files]
        if wrong is None and lost:
            wrong = f"it names no file for the part at {lost[0]}"
        if wrong is not None:
            raise Float8ConfigError(
                f"{self.path}: its index does not cover {name} of {tuple(entry.size)} once: {wrong}. The checkpoint is "
                "damaged, or one rank alone saved what is sharded over several; save it with dcp.save on all ranks"
            )

    @staticmethod
    def _read(file: Path) -> Metadata:
        content = file.read_bytes()
        try:
            # First: unpickling allocates whatever the bytes ask for.
            _check_bounds(content)
            found = _Unpickler(io.BytesIO(content), file).load()
            _check_types(found)
        except Float8ConfigError:
            raise
        except Exception as error:  # a damaged pickle fails in every way
            raise Float8ConfigError(f"{file} is no index of torch.distributed.checkpoint: {error}") from error
        found_index: Metadata = found
        return found_index


def _check_bounds(content: bytes) -> None:
    """Check that a pickle asks for no more memory than it has bytes; ValueError where it does.

    A memo of 4 billion places would be filled with zeros before anything is read.
    """
    for operation, argument, _ in pickletools.genops(content):
        is_place = operation.name in ("PUT", "BINPUT", "LONG_BINPUT")
        if is_place and int(argument or 0) > len(content):
            raise ValueError(f"a memo of {argument} places in a pickle of {len(content)} bytes")


def _check_types(found: Any) -> None:
    """Check that an index is one down to its numbers; TypeError where it is not."""
    if type(found) is not Metadata or not isinstance(found.storage_data, dict):
        raise TypeError(f"it is a {type(found).__name__}")
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is a name")
        if type(entry) is not TensorStorageMetadata:
            continue
        if not isinstance(entry.properties, TensorProperties) or not isinstance(
            entry.properties.dtype, torch.dtype
        ):
            raise TypeError(f"{name} has no dtype")
        if not _is_sizes(entry.size, len(entry.size)):
            raise TypeError(f"{name} has the size {entry.size!r}")
        for chunk in entry.chunks:
            if type(chunk) is not ChunkStorageMetadata or not all(
                _is_sizes(each, len(entry.size)) for each in (chunk.offsets, chunk.sizes)
            ):
                raise TypeError(f"{name} has the part {chunk!r}")
    for key, info in found.storage_data.items():
        is_place = type(getattr(info, "offset", None)) is int and type(getattr(info, "length", None)) is int
        if type(key) is not MetadataIndex or not is_place or min(info.offset, info.length) < 0:
            raise TypeError(f"{key!r} is stored at {info!r}")
        path = Path(info.relative_path)
        # A path out of the folder would have the reader open any file of the machine.
        if path.is_absolute() or ".." in path.parts:
            raise TypeError(f"{key!r} is stored in {info.relative_path}, which is not in the folder")


def _is_sizes(found: Any, dims: int) -> bool:
    return isinstance(found, tuple) and len(found) == dims and all(type(n) is int and n >= 0 for n in found)


def _uncovered(shape: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> str | None:
    """Return why the parts of a tensor are not all of it, each element once; None where they are."""
    parts = [(tuple(c.offsets), tuple(c.sizes)) for c in chunks if math.prod(tuple(c.sizes))]
    for first, sizes in parts:
        if any(at + size > extent for at, size, extent in zip(first, sizes, shape, strict=True)):
            return f"the part of {sizes} at {first} reaches beyond it"
    if shape:
        # Along the dimension that most cuts are along few parts begin before another one ends.
        along = max(range(len(shape)), key=lambda dim: len({first[dim] for first, _ in parts}))
        parts.sort(key=lambda part: part[0][along])
        for index, (first, sizes) in enumerate(parts):
            end = first[along] + sizes[along]
            rest = itertools.islice(parts, index + 1, None)
            for other, others in itertools.takewhile(lambda part: part[0][along] < end, rest):  # noqa: B023
                starts_ends = zip(first, sizes, other, others, strict=True)
                if all(a < c + d and c < a + b for a, b, c, d in starts_ends):
                    return f"the parts at {first} and {other} overlap"
    # No two overlap, so they cover the tensor exactly if their elements are as many.
    found, elements = sum(math.prod(sizes) for _, sizes in parts), math.prod(shape)
    return None if found == elements else f"its parts have {found} of {elements} elements"


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
