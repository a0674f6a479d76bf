"""Checkpoints that are read one tensor, or a part of one, at a time."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from f8sub.errors import Float8ConfigError


class Checkpoint:
    """Tensors in a folder of safetensors, read by slices."""

    def __init__(self, folder: Path) -> None:
        try:
            import safetensors
        except ImportError as error:
            raise Float8ConfigError(
                "a checkpoint is read with safetensors, which is not installed"
            ) from error
        self._safetensors = safetensors
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        self.config = self._json("config.json")
        self._where = self._found()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def slice_of(self, name: str) -> Any:
        """A tensor of which nothing was read yet, with ``get_shape``, ``get_dtype`` and indices."""
        return self._open(self._where[name]).get_slice(name)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        values: torch.Tensor = self.slice_of(name)[...]
        return values

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._folder / name).read_text())
        except FileNotFoundError as error:
            raise Float8ConfigError(
                f"{self._folder} has no {name}, as Hugging Face's checkpoints have"
            ) from error
        except ValueError as error:
            raise Float8ConfigError(f"{self._folder / name} is no JSON: {error}") from error
        return found

    def _found(self) -> dict[str, str]:
        index = "model.safetensors.index.json"
        if (self._folder / index).exists():
            where = self._json(index).get("weight_map", {})
            missing = sorted({file for file in where.values() if not (self._folder / file).exists()})
            if missing:
                raise Float8ConfigError(f"{self._folder} lacks {', '.join(missing)}, which its index names")
            return dict(where)
        file = "model.safetensors"
        if not (self._folder / file).exists():
            raise Float8ConfigError(f"{self._folder} has neither {file} nor {index}")
        return dict.fromkeys(self._open(file).keys(), file)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                opened = self._safetensors.safe_open(self._folder / file, "pt")
            except self._safetensors.SafetensorError as error:
                raise Float8ConfigError(
                    f"{self._folder / file} is cut short or no safetensors file: {error}"
                ) from error
            self._files[file] = self._stack.enter_context(opened)
        return self._files[file]


class DcpCheckpoint:
    """A checkpoint of ``torch.distributed.checkpoint``; entries of the model, by names without ``prefix``."""

    def __init__(self, folder: Path, prefix: str) -> None:
        # Imported here: torch.distributed.checkpoint is 80 modules that training need not load.
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._reader, self._prefix = FileSystemReader(folder), prefix
        self._entries: dict[str, Any] = {
            name.removeprefix(prefix): entry
            for name, entry in self._reader.read_metadata().state_dict_metadata.items()
            if name.startswith(prefix) and hasattr(entry, "size")
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        from torch.distributed.checkpoint.state_dict_loader import load

        entry = self._entries[name]
        found = {self._prefix + name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")}
        load(found, storage_reader=self._reader, no_dist=True)
        return found[self._prefix + name]


def some(names: Sequence[str]) -> str:
    """The first of many names."""
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
