"""An imitation of CUDA graphs on a CPU: operators are recorded with their tensors, and replays run them again.

As of a GPU's graph no Python of the step runs in a replay, numbers of the host are constants, tensors are read and
written where they lay, and nothing of a captured step has happened before its first replay. The host may read no value.
Kernels of Triton that are interpreted are recorded, too; they first run in a replay.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from f8sub import capture
from f8sub.graphs import graph_step
from f8sub.kernels import quantize, reference
from f8sub.torch_compat import no_dispatch_modes
from f8sub.weights import amax_table, exchange
from f8sub.weights.master_weight import MasterWeight

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item"}


class Recording(TorchDispatchMode):
    """Runs operators, keeps them with their arguments and results, and what they wrote over."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.kernels: list[str] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()
        self._written: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name() in READS:
            raise RuntimeError("operation not permitted when stream is capturing: the host reads a value")
        kinds = {kind for kind in types if kind not in (torch.Tensor, torch.nn.Parameter)}
        if any(not issubclass(kind, MasterWeight) for kind in kinds):
            return NotImplemented  # consists of other operators
        plain = (_plain(args), _plain(kwargs)) if kinds else (args, kwargs)
        self._save(func, *plain)
        # Of a weight its own dispatch marks the change.
        run = functools.partial(MasterWeight.__torch_dispatch__, func, types) if kinds else None
        found = func(*args, **kwargs) if run is None else run(args, kwargs)
        results = _tensors(_plain(found))
        self._made |= set(map(_memory, results)) - set(map(_memory, _tensors(plain)))
        self.calls.append((func, *plain, results))
        return found

    def add_kernel(self, name: str, run: Callable[[], None]) -> None:
        """Record a launch."""
        self.kernels.append(name)
        self.calls.append((run, (), {}, []))

    def _save(self, func: Any, args: Any, kwargs: Any) -> None:
        for position, name in _written_by(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(value):
                self._written[id(tensor)] = tensor
                memory = _memory(tensor)
                if memory not in self._made and memory not in self._before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    self._before[memory] = whole, whole.clone()

    def undo(self) -> None:
        """Have memory from before as it was."""
        for whole, before in self._before.values():
            whole.copy_(before)

    def replay(self) -> None:
        """Run the operators again, on what their tensors hold now; their versions stay, as those on a GPU do."""
        unseen = torch.autograd._unsafe_preserve_version_counter(tuple(self._written.values()))
        with torch.no_grad(), unseen:
            for func, args, kwargs, results in self.calls:
                found = func(*args, **kwargs)
                namespace = getattr(func, "namespace", None)
                if namespace == "_c10d_functional":
                    pytree.tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, found)
                for old, new in zip(results, _tensors(found), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)
                if namespace == "c10d":
                    for work in pytree.tree_leaves(found):
                        if hasattr(work, "wait"):
                            work.wait()


@functools.cache
def _written_by(func: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator writes to."""
    collective = func.name().startswith("c10d::")
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (collective and position == 0)
    ]


def _plain(value: Any) -> Any:
    """The same nest, with what weights of ours hold in their place. Operators have lists, tuples and dicts alone."""
    if isinstance(value, MasterWeight):
        return value.plain
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    """Those that have memory: wrappers hold others, which operators inside of them made."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return [value]
    nested = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (list, tuple, dict)):
        return []
    return [tensor for each in nested for tensor in _tensors(each)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


recordings: list[Recording] = []
"""What is captured now."""

kernels: list[str] = []
"""Names of the kernels of the last capture."""


class Tape:
    """Takes the place of ``recorded.Recorded``."""

    def __init__(self, stream: Any, pool: Any) -> None:
        self._recording = Recording()

    def capture(self, run: Callable[[], Any]) -> Any:
        recordings.append(self._recording)
        try:
            with self._recording:
                return run()
        finally:
            recordings.pop()
            self._recording.undo()
            kernels[:] = self._recording.kernels

    def replay(self) -> None:
        self._recording.replay()


def _unrecorded(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Gloo copies results from memory of its own while one waits."""

    def call(work: Any, *timeout: Any) -> Any:
        with no_dispatch_modes():
            return wait(work, *timeout)

    return call


def _recorded(run: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(launch: Any) -> None:
        if recordings:
            recordings[-1].add_kernel(launch.kernel.fn.__name__, functools.partial(run, launch))
        else:
            run(launch)

    return call


def imitate(patch: pytest.MonkeyPatch) -> None:
    """Have ``graph_step`` capture and replay on a CPU, until the patch is undone."""
    # Here is no memory of an earlier graph's, for which each capture looks through all that is imported.
    patch.setattr(graph_step, "gc", types.SimpleNamespace(collect=lambda: None))
    patch.setattr(graph_step, "Recorded", Tape)
    patch.setattr(graph_step, "records", lambda device: True)
    patch.setattr(quantize, "quantize_on_cpu", reference.quantize)  # the former reads amaxes on the host
    patch.setattr(amax_table, "no_torch_dispatch", contextlib.nullcontext)
    # As on a GPU: a replay would write to the table while gloo still reduces it.
    patch.setattr(exchange.Exchange, "settles_at_once", True)
    for name, module in list(sys.modules.items()):
        if name.startswith("f8sub.") and hasattr(module, "is_capturing"):
            patch.setattr(module, "is_capturing", lambda tensor: capture.current_capture() is not None)
    patch.setattr(dist.Work, "wait", _unrecorded(dist.Work.wait))
    if (launch := sys.modules.get("f8sub.kernels.triton.launch")) is not None:
        patch.setattr(launch.Launch, "run", _recorded(launch.Launch.run))
    fsdp: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    for name in ("alloc_storage", "free_storage") if fsdp is not None else ():
        patch.setattr(fsdp, name, lambda tensor: None)
