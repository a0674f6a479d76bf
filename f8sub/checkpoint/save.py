"""save_float8: a checkpoint of a model's own float8 data, in safetensors, that inference engines load."""

import json
import os
import shutil
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from f8sub.checkpoint import layouts
from f8sub.checkpoint.names import Rename, unwrapped
from f8sub.checkpoint.stream import (
    Exported,
    Progress,
    examined,
    stream,
)
from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.torch_compat import is_fsdp_module
from f8sub.weights.checks import gather_values

SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in a file, as Hugging Face's ``save_pretrained`` has it."""


def save_float8(  # noqa: PLR0913  (what float8_weights takes, and how files are)
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    *,
    layout: str = "auto",
    dtype: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
    rename: Rename | None = None,
    shard_bytes: int = SHARD_BYTES,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> None:
    """Save the codes that a model's forward multiplies as a checkpoint that inference engines load.

    Every rank of the model calls it; the first one writes, block by block. The folder appears when it is complete.

    Args:
        model: as in ``float8_weights``.
        folder: to make; it may exist if it is empty.
        layout: as in ``float8_weights``.
        dtype: as in ``float8_weights``.
        config: what ``config.json`` holds beside ``quantization_config``. None for ``model.config``, if it has one.
        rename: as in ``float8_weights``.
        shard_bytes: of tensors in one file; a larger model has several. An index names them, or the one.
        group: the ranks of the model, where others have none of it; None for all.
        progress: given the names of the parameters on the rank that writes, it returns them again, to show how far it
            is: ``tqdm.tqdm``.

    Raises:
        Float8ConfigError: see ``float8_weights``; or the folder has something in it or cannot be replaced, safetensors
            is not installed, or ``config`` or ``shard_bytes`` is none.
        Float8NumericsError: a weight has NaN or infinity.
        OSError: the first rank could not write; on every rank, with nothing left of it.
    """
    # Made on every rank, before anything is gathered: what cannot be written is an error of all of them.
    if config is not None and not isinstance(config, Mapping):
        raise Float8ConfigError(f"config is a mapping, which config.json holds, or None; got {config!r}")
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise Float8ConfigError(f"shard_bytes is a number of bytes, 1 or more, got {shard_bytes!r}")
    exported = examined(model, layout, dtype)
    model = unwrapped(model)
    written = {**(config_of(model, dtype) if config is None else config)}
    written["quantization_config"] = exported.config(rename)
    text = json.dumps(written, indent=2, sort_keys=True, default=as_json)
    warn_of_transformers(model, exported)
    # Only one rank sees the folder, and if it alone raised, the others would wait in the first all-gather for ever.
    _together(lambda: check_target(Path(folder)), group)
    is_writer, failure = _is_writer(group), None
    tensors = stream(model, exported, dtype, rename, progress if is_writer else None)
    if is_writer:
        failure = write(Path(folder), tensors, text, shard_bytes)
    else:
        deque(tensors, maxlen=0)
    _together(lambda: _raise(failure), group)


def check_target(target: Path) -> None:
    """Check that a folder can be made.

    Raises:
        Float8ConfigError: it has something in it or cannot be replaced, or safetensors is not installed.
    """
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise Float8ConfigError(
            "save_float8 writes with safetensors, which is not installed: pip install safetensors"
        ) from error
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Float8ConfigError(
            f"{target} exists and is not an empty folder, and nothing is overwritten: name another folder, or "
            "remove this one"
        )
    if target.is_symlink() or target.resolve() == Path.cwd():
        raise Float8ConfigError(f"{target} is a link or the working folder; name a folder to create")


def warn_of_transformers(model: torch.nn.Module, exported: Exported) -> None:
    """Warn of what transformers does not read of a model of its own."""
    if exported.layout == layouts.COMPRESSED and hasattr(getattr(model, "config", None), "model_type"):
        pieces = [
            piece for several in exported.pieces.values() for piece in several if piece.expert is not None
        ]
        experts = {piece.name.removesuffix(".weight") for piece in pieces} & exported.formats.keys()
        classes = {type(module).__name__ for module in model.modules()}
        told = layouts.unread_by_transformers(exported.formats, sorted(experts), classes)
        if told is not None:
            warnings.warn(told, Float8Warning, stacklevel=3)


def as_json(value: object) -> str:
    """Return the text that ``config.json`` has for a dtype; Float8ConfigError for any other value unknown to JSON."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise Float8ConfigError(f"config has {value!r}, which JSON does not hold")


def _is_writer(group: dist.ProcessGroup | None) -> bool:
    # The group's first rank, which need not be the job's.
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _together(action: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Do something on the rank that writes, and have every rank raise what it raised.

    Raises:
        Exception: of the action.
    """
    failure: Exception | None = None
    if _is_writer(group):
        try:
            action()
        except (Float8ConfigError, OSError) as error:
            failure = error
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        # The type and the arguments of the error, as JSON: ``gather_values`` sends nothing else.
        said = (
            None if failure is None else [arg if isinstance(arg, int) else str(arg) for arg in failure.args]
        )
        told = gather_values([isinstance(failure, OSError), said], group)[0]
        if failure is None and told[1] is not None:
            failure = (OSError if told[0] else Float8ConfigError)(*told[1])
    if failure is not None:
        raise failure


def _raise(error: OSError | None) -> None:
    if error is not None:
        raise error


def config_of(model: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the config that transformers reads with a model; {} where the model is none of its own."""
    model = model._modules.get("_orig_mod") or model  # what torch.compile returned was sharded
    own: Any = getattr(model, "config", None)
    config = dict(own.to_dict()) if hasattr(own, "to_dict") else {}
    # fully_shard gives a module a class of its own: one of FSDPModule and of the model's.
    own_class: type = type(model)
    if is_fsdp_module(model):
        of_fsdp = torch.distributed.fsdp.FSDPModule
        own_class = next(cls for cls in own_class.__mro__ if not issubclass(cls, of_fsdp))
    config["architectures"] = [own_class.__name__]
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def write(
    target: Path, tensors: Iterator[tuple[str, torch.Tensor]], config: str, shard_bytes: int
) -> OSError | None:
    """Write all files beside ``target``, then give the folder its name; return the error, if there was one.

    What is left of ``tensors`` is taken in any case: gathering them is a collective.
    """
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        # mkdtemp makes a folder that its owner alone may read.
        partial.chmod(0o755)
        _write_files(partial, tensors, shard_bytes)
        (partial / "config.json").write_text(config + "\n")
        # safetensors creates files that their owner alone may read, whatever the umask; engines run as other users.
        for path in partial.glob("*.safetensors"):
            shutil.copymode(partial / "config.json", path)
        # A full disk shows up here, before the folder gets its name.
        for path in (*partial.iterdir(), partial):
            _sync(path)
        # A rename is atomic: readers see no folder or a complete one.
        partial.replace(target)
    except OSError as error:
        deque(tensors, maxlen=0)
        return error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return None


def _write_files(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    files: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > shard_bytes:
            _write_file(folder, len(files), pending)
            files.append(list(pending))
            pending, size = {}, 0
        # On the CPU: a file of several GB is collected here, one block at a time, and a GPU has no room for that.
        pending[name] = tensor.cpu().contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    _write_file(folder, len(files), pending)
    files.append(list(pending))
    where = {}
    for index, names in enumerate(files):
        # How many files there are is known only now, and is part of each name.
        called = "model" if len(files) == 1 else f"model-{index + 1:05}-of-{len(files):05}"
        (folder / f"part-{index}").rename(folder / f"{called}.safetensors")
        where.update(dict.fromkeys(names, f"{called}.safetensors"))
    # For one file, too: torch's QuantizedHuggingFaceStorageReader finds scales by the index.
    index_of = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index_of, indent=2, sort_keys=True) + "\n"
    )


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk: only then do some disks report being full."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _write_file(folder: Path, index: int, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / f"part-{index}"
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"could not write {path}: {error}") from error
