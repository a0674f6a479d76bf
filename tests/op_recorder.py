"""A CUDA graph for CPUs: operators that are recorded with the very tensors they ran on, and run again by a replay."""

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from f8sub.tensor.float8_tensor import Float8Tensor


class OpRecorder(TorchDispatchMode):
    """Within it operators run and are recorded; ``replay`` runs them again, and no Python around them.

    Results are written to where they were. Other than a CUDA graph it reuses no memory, and what is recorded runs, too.

    Raises:
        RuntimeError: within it, where the host reads a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: the host reads a value")
        if any(issubclass(kind, Float8Tensor) for kind in types):
            return NotImplemented  # a product of operands: the operators that it consists of are recorded
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def without(self, name: str) -> "OpRecorder":
        """The same, less the operators of that name, of which there are some."""
        other = OpRecorder()
        other.calls = [call for call in self.calls if call[0]._schema.name != name]
        if len(other.calls) == len(self.calls):
            raise ValueError(f"no {name} was recorded")
        return other

    def replay(self) -> None:
        with torch.no_grad(), torch._C._DisableTorchDispatch():  # no subclass sees what it does
            for func, args, kwargs, out in self.calls:
                own = {storage_of(t) for t in tensors_of((args, kwargs))}
                written = [t for t in tensors_of(out) if storage_of(t) not in own]
                if not written and not func._schema.is_mutable:
                    continue  # views
                for tensor, again in zip(tensors_of(out), tensors_of(func(*args, **kwargs)), strict=True):
                    if storage_of(tensor) not in own:
                        tensor.copy_(again)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
