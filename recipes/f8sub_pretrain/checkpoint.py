"""Checkpoints that are whole or refused: DCP, and a manifest of digests that is written last."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.json"
_DCP_INDEX = ".metadata"
_STEP_PREFIX = "step-"


class CheckpointError(RuntimeError):
    """A checkpoint that is not whole or belongs to another run, or one that could not be written."""


class Checkpoints:
    """The checkpoints of one run: ``folder/step-00000100`` and so on.

    A step's folder holds the tensors as torch.distributed.checkpoint writes them, state.json with the plain
    values, config.json with what transformers reads of the model, and manifest.json with the size and SHA-256 of
    each of these files. The manifest is written last
    and in one piece, so a checkpoint that a crash cut short has none. Loading verifies it before anything
    opens the files it lists, and opens no other file. All ranks call each method (but ``names``) together,
    and all see the same folder.

    Args:
        folder: Where they are.
        keep_latest_k: Older whole checkpoints are deleted; 0 keeps all.
        asynchronous: ``save`` copies the tensors to the host and returns; the files are written, and then the
            manifest, while training goes on. One save at a time: the next one waits for it, as ``wait`` does.
    """

    def __init__(self, folder: Path, keep_latest_k: int = 0, asynchronous: bool = False) -> None:
        self.folder = folder
        self._keep_latest_k = keep_latest_k
        # Its collectives run beside the training's, so they have a group of their own.
        self._group = dist.new_group(backend="gloo") if asynchronous else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._saving: Future[None] | None = None

    def names(self) -> list[str]:
        """Give the names of the checkpoints there, whole or not, oldest first."""
        found = self.folder.glob(f"{_STEP_PREFIX}*") if self.folder.is_dir() else ()
        return sorted(path.name for path in found if path.name.removeprefix(_STEP_PREFIX).isdigit())

    @staticmethod
    def step_of(name: str) -> int:
        """Give the steps trained before a checkpoint, by its name; 0 for a name that ``save`` does not give."""
        digits = name.removeprefix(_STEP_PREFIX)
        return int(digits) if digits.isdigit() else 0

    def save(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        state: dict[str, Any],
        config: dict[str, Any] | None = None,
    ) -> str:
        """Write one checkpoint.

        Args:
            step: The steps trained so far.
            tensors: Tensors and DTensors; a plain tensor that only one rank has is saved from there.
            state: Values that JSON can hold, the same on all ranks.
            config: What config.json holds, by which ``python -m f8sub export`` knows the model; None for no file.

        Returns:
            The checkpoint's name.

        Raises:
            CheckpointError: On all ranks, if some rank could not write its part of this one, or of one that was
                being written when this was called. There is no manifest then.
        """
        self.wait()
        name = f"{_STEP_PREFIX}{step:08d}"
        target = self.folder / name
        self._together(name, lambda: self._make(target, state, config) if dist.get_rank() == 0 else None)
        writer = dcp.FileSystemWriter(target)
        if self._thread is None:
            self._write(name, step, functools.partial(dcp.save, tensors, storage_writer=writer))
        else:
            written: Any = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
            self._saving = self._thread.submit(self._write, name, step, written.result)
        return name

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is whole.

        Raises:
            CheckpointError: See ``save``.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _make(self, target: Path, state: dict[str, Any], config: dict[str, Any] | None) -> None:
        _remove(target)
        target.mkdir(parents=True)
        (target / STATE).write_text(json.dumps(state, indent=1))
        if config is not None:
            (target / CONFIG).write_text(json.dumps(config, indent=1))

    def _write(self, name: str, step: int, save_tensors: Callable[[], object]) -> None:
        """Write the tensors, then the manifest."""
        target = self.folder / name

        def write() -> None:
            save_tensors()

        def digest() -> dict[str, dict[str, Any]]:
            return {file: _digest(target / file) for file in _share(sorted(p.name for p in target.iterdir()))}

        def finish() -> None:
            manifest = {"step": step, "files": dict(sorted(entries.items()))}
            _write_at_once(target / MANIFEST, json.dumps(manifest, indent=1))
            whole = [other for other in self.names() if (self.folder / other / MANIFEST).exists()]
            for other in whole[: -self._keep_latest_k] if self._keep_latest_k else ():
                _remove(self.folder / other)

        self._together(name, write)
        entries = {file: entry for part in self._together(name, digest) for file, entry in part.items()}
        self._together(name, lambda: finish() if dist.get_rank() == 0 else None)

    def _together(self, name: str, part: Callable[[], Any]) -> list[Any]:
        """Do every rank's part; one rank alone must not leave the others waiting."""
        done, problems = None, {}
        try:
            done = part()
        except OSError as error:
            problems = {dist.get_rank(): str(error)}
        except CheckpointException as error:  # of DCP, which gives all ranks' to each
            problems = {rank: str(failure[0]) for rank, failure in error.failures.items()}
        everyones = _gathered((done, problems), self._group)
        found = {rank: text for _, problems in everyones for rank, text in problems.items()}
        if found:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(found.items()))
            raise CheckpointError(f"Checkpoint {name} in {self.folder} was not written ({listed}).")
        return [done for done, _ in everyones]

    def problem(self, name: str) -> str:
        """Say what is wrong with a checkpoint, having opened nothing but the manifest and the files it lists.

        Args:
            name: The checkpoint.

        Returns:
            What is wrong, the same text on all ranks; empty if the checkpoint is whole.
        """
        folder = self.folder / name
        if not folder.is_dir():
            found = "there is no such checkpoint"
            problems = [f"{found} (there are {', '.join(self.names()) or 'none'})"]
        else:
            try:
                files = _read_manifest(folder / MANIFEST)
                problems = [
                    text for file in _share(sorted(files)) if (text := _difference(folder, file, files[file]))
                ]
            except CheckpointError as error:
                problems = [str(error)]
            except OSError as error:
                problems = [f"it cannot be read ({error})"]
        everyones = [problem for part in _gathered(problems) for problem in part]
        return "; ".join(dict.fromkeys(everyones))

    def newest_whole(self, before: str = "") -> tuple[str, dict[str, str]]:
        """Find the newest whole checkpoint.

        Args:
            before: Only look at checkpoints older than this one.

        Returns:
            Its name, empty if there is none, and what is wrong with each newer one.
        """
        broken: dict[str, str] = {}
        names: list[str] = _gathered(self.names())[0]
        for name in reversed([name for name in names if not before or name < before]):
            broken[name] = self.problem(name)
            if not broken[name]:
                del broken[name]
                return name, broken
        return "", broken

    def load(
        self, name: str, tensors: dict[str, torch.Tensor], optional: frozenset[str] = frozenset()
    ) -> dict[str, Any]:
        """Verify a checkpoint, then fill tensors from it in place.

        Args:
            name: The checkpoint.
            tensors: What to fill, of the names and shapes that were saved.
            optional: Those of them that stay as they are where the checkpoint lacks them.

        Returns:
            The plain values that were saved with it.

        Raises:
            CheckpointError: If it is not whole (the message names the newest whole one before it), or if it
                holds tensors of other names or shapes.
        """
        if problem := self.problem(name):
            older, _ = self.newest_whole(before=name)
            advice = (
                f"Resume with --checkpoint.resume {older}"
                if older
                else "No checkpoint before it is whole; without --checkpoint.resume training starts at step 1"
            )
            raise CheckpointError(f"Checkpoint {name} in {self.folder} is refused: {problem}. {advice}.")
        reader = _VerifiedReader(self.folder / name)
        wanted: dict[str, torch.Tensor] = {}
        try:
            saved = reader.read_metadata().state_dict_metadata
            wanted = {key: tensor for key, tensor in tensors.items() if key in saved or key not in optional}
            problem = _other_tensors(name, saved, wanted)
        except CheckpointError as error:
            problem = str(error)
        # One rank alone must not leave the others waiting in dcp.load.
        if problems := [text for text in _gathered(problem) if text]:
            raise CheckpointError(problems[0])
        try:
            dcp.load(wanted, storage_reader=reader)
        except CheckpointException as error:  # no Exception, and raised on all ranks
            failures = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
            raise CheckpointError(
                f"Checkpoint {name} in {self.folder} could not be read ({failures})."
            ) from error
        state: dict[str, Any] = json.loads((self.folder / name / STATE).read_text())
        return state


class _VerifiedReader(dcp.FileSystemReader):
    """Reads tensors only, from the files of the manifest; unpickles no class but those of DCP's index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        files = _read_manifest(self._folder / MANIFEST)
        with (self._folder / _DCP_INDEX).open("rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(
                    f"Checkpoint {self._folder} is refused: {key} is no tensor but a pickle."
                )
        for key, place in metadata.storage_data.items():
            if place.relative_path not in files:
                raise CheckpointError(
                    f"Checkpoint {self._folder} is refused: {key.fqn} is in {place.relative_path!r}, which "
                    "the manifest does not list."
                )
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"The checkpoint's {_DCP_INDEX} is refused: it asks for {module}.{name}.")


_INDEX_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # Python 3.13
}


def _other_tensors(name: str, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    advice = "Resume with the model and optimizer settings of the run that saved it."
    for key, tensor in tensors.items():
        if key not in saved:
            return f"Checkpoint {name} has no tensor {key}. {advice}"
        if saved[key].size != tensor.size():
            there, here = tuple(saved[key].size), tuple(tensor.size())
            return f"Checkpoint {name} has {key} of shape {there}, this run's is {here}. {advice}"
    return ""


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"it has no {MANIFEST}, so saving it was cut short")
    try:
        files = json.loads(path.read_text())["files"]
        entries = {
            str(file): {"bytes": int(e["bytes"]), "sha256": str(e["sha256"])} for file, e in files.items()
        }
    except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    for file in entries:
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise CheckpointError(f"its {MANIFEST} lists {file!r}, which is not a file of its folder")
    for file in (_DCP_INDEX, STATE):
        if file not in entries:
            raise CheckpointError(f"its {MANIFEST} does not list {file}")
    return entries


def _difference(folder: Path, file: str, entry: dict[str, Any]) -> str:
    path = folder / file
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return f"{file} is not a regular file"
    if not path.exists():
        return f"{file} is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{file} has {size} bytes where the manifest says {entry['bytes']}"
    if _digest(path) != entry:
        return f"the digest of {file} differs from the manifest's"
    return ""


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _share(files: list[str]) -> list[str]:
    return files[dist.get_rank() :: dist.get_world_size()]


def _gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _write_at_once(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    if folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
