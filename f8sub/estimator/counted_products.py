"""What multiplies, seen operator by operator, and by whose weights.

[Note: whose weights] An operand is of a weight where it lies in the weight's storage, or was computed of it without
the model's inputs: cast, transposed, normalized, or taken expert by expert. What depends on the inputs is an
activation, but for matrices that are picked out of a stack of them. A product of activations is nobody's.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.torch_compat import DispatchMode, tree_leaves

MATRIX_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "matmul", "_scaled_mm"), 0),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), 1),
}
"""Operators that contract the last dimension of an argument with the next one's; that argument's place."""

GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback")

PICKED = ("index", "index_select", "gather", "embedding")
"""Operators that take some of the matrices of a stack."""

NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")
"""Of operators that are known, whether they multiply or not."""

Key = tuple[str, str]
"""A module's name and that of its parameter."""


class Running:
    """The names of the modules whose forwards run, the innermost last, and how often each ran."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.calls: dict[str, int] = defaultdict(int)

    def wrap(self, fqn: str, forward: Any) -> Any:
        """``forward``, of the module of that name."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls[fqn] += 1
            self.names.append(fqn)
            try:
                return forward(*args, **kwargs)
            finally:
                self.names.pop()

        return run


class Products(DispatchMode):  # type: ignore[misc]
    """Counts multiplications while it is entered.

    Args:
        weights: names of parameters and the tensors; several names of one that is tied.
        inputs: what a forward is given.
        running: what runs.

    Attributes:
        own: multiplications by each weight while its module's forward runs.
        elsewhere: by each weight while another one's does, by the name of that one.
        of_activations: multiplications of activations by each other.
        not_known: operators of other libraries that took a weight, and the weights' names.
    """

    supports_higher_order_operators = True

    def __init__(
        self, weights: Iterable[tuple[Key, torch.Tensor]], inputs: Iterable[torch.Tensor], running: Running
    ) -> None:
        super().__init__()
        self._running = running
        self._active: dict[int, StorageWeakRef] = {}
        self._names: dict[int, tuple[StorageWeakRef, list[Key]]] = {}
        for key, weight in weights:
            if weight.dim() > 1:
                storage = StorageWeakRef(weight.untyped_storage())
                self._names.setdefault(storage.cdata, (storage, []))[1].append(key)
        for tensor in inputs:
            self._activate(tensor)
        self.own: dict[Key, float] = defaultdict(float)
        self.elsewhere: dict[tuple[Key, str], float] = defaultdict(float)
        self.of_activations = 0.0
        self.not_known: dict[str, set[Key]] = defaultdict(set)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and look at it."""
        out = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        space, _, name = ("" if schema is None else schema.name).partition("::")
        given = list(_tensors((args, kwargs)))
        product = _operands(name or str(func), args, given, out)
        if product is not None:
            self._count(*product)
        elif space and space not in NAMESPACES:
            for tensor in given:
                self.not_known[f"{space}.{name}"].update(self._names_of(tensor) or ())
        self._follow(name, given, out, is_product=product is not None)
        return out

    def _count(self, multiplications: float, operands: tuple[torch.Tensor, ...]) -> None:
        names = next(filter(None, map(self._names_of, reversed(operands))), None)
        if names is None:
            self.of_activations += multiplications
            return
        running = self._running.names
        own = max(names, key=lambda key: running.index(_owner(key)) if _owner(key) in running else -1)
        if _owner(own) in running:
            self.own[own] += multiplications
        else:
            self.elsewhere[own, running[-1] if running else ""] += multiplications

    def _follow(self, name: str, given: list[torch.Tensor], out: Any, *, is_product: bool) -> None:
        """Tell what came out: an activation, something of a weight, or neither."""
        active = any(_id(tensor) in self._active for tensor in given)
        known = next(filter(None, map(self._names_of, given)), None)
        if active and known and name in PICKED:
            active = given[0].dim() < 3 or not self._names_of(given[0])
        for tensor in _tensors(out):
            if self._names_of(tensor) is not None or _id(tensor) in self._active:
                continue
            if active:
                self._activate(tensor)
            elif known is not None and not is_product:
                storage = StorageWeakRef(tensor.untyped_storage())
                self._names[storage.cdata] = storage, known

    def _activate(self, tensor: torch.Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        self._active[storage.cdata] = storage

    def _names_of(self, tensor: torch.Tensor) -> list[Key] | None:
        found = self._names.get(_id(tensor))
        return None if found is None else found[1]


def _owner(key: Key) -> str:
    return key[0]


def _id(tensor: torch.Tensor) -> int:
    # References to a storage, although weak ones, keep its address from becoming another one's.
    cdata: int = tensor.untyped_storage()._cdata
    return cdata


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(given) if isinstance(each, torch.Tensor))


def _operands(
    name: str, args: tuple[Any, ...], given: list[torch.Tensor], out: Any
) -> tuple[float, tuple[torch.Tensor, ...]] | None:
    """How much an operator multiplies, and what by what; None where it is no product of matrices."""
    if name in MATRIX_PRODUCTS:
        a, b = given[MATRIX_PRODUCTS[name] :][:2]
        rows = float(a.numel())
        if name in GROUPED and a.dim() == 2 and b.dim() == 3:
            rows = float(_rows_of_groups(a, given) * a.shape[1])
        return rows * (b.shape[-1] if b.dim() > 1 else 1), (a, b)
    if "convolution" in name and "backward" not in name:
        x, w = args[:2]
        transposed = len(args) > 6 and args[6] is True
        positions = x.numel() // x.shape[1] if transposed else out.numel() // w.shape[0]
        return float(positions * w.numel()), (x, w)
    if name == "_trilinear":
        return float(out.numel() * math.prod(args[1].shape[1:])), (args[0], args[2], args[1])
    if "scaled_dot_product" in name or "flex_attention" in name:
        q, k, v = args[:3]
        return float(math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])), ()
    return None


def _rows_of_groups(a: torch.Tensor, given: list[torch.Tensor]) -> int:
    """Rows up to the last group's end, which is known where tensors have values."""
    ends = next((each for each in given if each.dim() == 1 and each.dtype == torch.int32), None)
    if ends is None or ends.is_meta or not ends.numel():
        return a.shape[0]
    return int(ends[-1])
