"""Reads checkpoints one tensor, or a part of one, at a time."""

import contextlib
import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from f8sub.errors import Float8ConfigError

CONFIG = "config.json"


class Checkpoint:
    """Tensors in a folder of safetensors, read by slices.

    Args:
        folder: with ``model.safetensors``, or an index and its files.
        needs_config: whether a folder without ``config.json`` is an error.

    Raises:
        Float8ConfigError: the folder is none of these, or safetensors is not installed.
    """

    def __init__(self, folder: Path, *, needs_config: bool = True) -> None:
        try:
            import safetensors
        except ImportError as error:
            raise Float8ConfigError(
                "a checkpoint is read with safetensors, which is not installed: pip install safetensors"
            ) from error
        self._safetensors = safetensors
        self.folder = folder
        """Where it is."""
        self._files: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        if not folder.exists():
            raise Float8ConfigError(
                f"no folder {folder} on this machine, and nothing is downloaded; hf download NAME --local-dir FOLDER "
                "does that"
            )
        has_config = needs_config or (folder / CONFIG).exists()
        self.config: dict[str, Any] = json_of(folder, CONFIG) if has_config else {}
        self._where = self._found()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def slice_of(self, name: str) -> Any:
        """Return a tensor of which nothing was read yet, with ``get_shape``, ``get_dtype`` and indices."""
        file = self._where[name]
        try:
            return self._open(file).get_slice(name)
        except self._safetensors.SafetensorError as error:
            raise Float8ConfigError(
                f"{self.folder / file} has no {name}, which the index says it has: {error}"
            ) from error

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading a value."""
        return tuple(self.slice_of(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        values: torch.Tensor = self.slice_of(name)[...]
        return values

    def _found(self) -> dict[str, str]:
        index, file = "model.safetensors.index.json", "model.safetensors"
        if (self.folder / file).exists():  # whatever an index beside it says, as transformers has it
            return dict.fromkeys(self._open(file).keys(), file)
        if not (self.folder / index).exists():
            raise Float8ConfigError(f"{self.folder} has neither {file} nor {index}{_instead(self.folder)}")
        # Names to files, as transformers writes it.
        where = json_of(self.folder, index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise Float8ConfigError(f"{self.folder / index} has no weight_map from names to files")
        missing = sorted({file for file in where.values() if not (self.folder / file).exists()})
        if missing:
            raise Float8ConfigError(
                f"{self.folder} lacks {', '.join(missing)}, which its index names{_instead(self.folder)}"
            )
        return dict(where)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                opened = self._safetensors.safe_open(self.folder / file, "pt")
            except self._safetensors.SafetensorError as error:
                raise Float8ConfigError(
                    f"{self.folder / file} is cut short or no safetensors file: {error}{_pointer(self.folder / file)}"
                ) from error
            # Files stay open, mapped into memory: a model of hundreds of files is read tensor by tensor.
            self._files[file] = self._stack.enter_context(opened)
        return self._files[file]


class DcpCheckpoint:
    """The tensors in a checkpoint of ``torch.distributed.checkpoint``.

    Raises:
        Float8ConfigError: its ``.metadata`` is damaged, or asks for classes that no index needs.
    """

    def __init__(self, folder: Path) -> None:
        # Imported here: torch.distributed.checkpoint is 80 modules that training need not load.
        from f8sub.checkpoint.dcp_index import IndexReader

        self._folder, self._reader = folder, IndexReader(folder)
        self._entries = self._reader.tensors()
        self.config: dict[str, Any] = json_of(folder, CONFIG) if (folder / CONFIG).exists() else {}

    def __enter__(self) -> "DcpCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no file is open between reads."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; Float8ConfigError where the index's parts of it do not cover it."""
        self._reader.check(name)
        return tuple(self._entries[name].size)

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor; Float8ConfigError where the files do not have all of it."""
        self._reader.check(name)
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        entry = self._entries[name]
        found = {name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")}
        try:
            with warnings.catch_warnings():
                # no_dist=True asks for exactly that.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(found, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, Exception) as error:  # a damaged file fails in every way
            failures = getattr(error, "failures", {})
            why = next((failure[0] for failure in failures.values()), error)
            raise Float8ConfigError(
                f"{self._folder}: a file of it that holds {name} cannot be read: {why}"
            ) from error
        return found[name]


def opened(folder: Path) -> Checkpoint | DcpCheckpoint:
    """Open a checkpoint of either kind.

    Raises:
        Float8ConfigError: it is none, or a damaged one.
    """
    return (
        DcpCheckpoint(folder) if (folder / ".metadata").exists() else Checkpoint(folder, needs_config=False)
    )


def prefix_of(there: Collection[str], wanted: Collection[str]) -> str:
    """Return the prefix of the model's names in a checkpoint, such as "model.".

    Args:
        there: names in the checkpoint.
        wanted: names in the model.

    Raises:
        Float8ConfigError: several models in the checkpoint have all the names.
    """
    names = set(there)
    found: set[str] = set()
    for first in wanted:
        found = {name.removesuffix(first) for name in names if name.endswith(f".{first}")}
        if found or first in names:
            break
    # A name such as "norm.weight" ends many others: the prefix is the one with which most names are there.
    fits = {prefix: sum(prefix + name in names for name in wanted) for prefix in ("", *sorted(found))}
    if fits[""] == len(wanted):
        return ""
    most = max(fits.values())
    best = [prefix for prefix, count in fits.items() if count == most]
    if len(best) > 1 and most:
        raise Float8ConfigError(
            f"the checkpoint has the model several times, with the prefixes {', '.join(map(repr, best))}; give prefix="
        )
    return best[0]


def json_of(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a file of JSON.

    Raises:
        Float8ConfigError: it is not there, or no JSON object.
    """
    try:
        found: Any = json.loads((folder / name).read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Float8ConfigError(f"{folder} has no {name}, as Hugging Face's checkpoints have") from error
    except ValueError as error:
        raise Float8ConfigError(f"{folder / name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Float8ConfigError(f"{folder / name} is no JSON object but a {type(found).__name__}")
    return found


def _pointer(file: Path) -> str:
    """Return the advice for a file in whose place git left a pointer; "" for any other."""
    with file.open("rb") as opened:
        is_pointer = opened.read(20).startswith(b"version https://git-")
    return "; it is a pointer of git-lfs, and git lfs pull fetches the file" if is_pointer else ""


def _instead(folder: Path) -> str:
    """Return a note on what a folder has that is no checkpoint yet, or of another kind; "" for neither."""
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return "; it has a pickled checkpoint, which load_state_dict of a model in high precision reads"
    if any(folder.glob("*.distcp")):
        return "; its .distcp files have no .metadata, so saving it was cut short"
    return ""


def some(names: Sequence[str]) -> str:
    """Return the first of many names."""
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
