"""Finds where NaN or infinity came from, by layer, role and rank.

Of experts, operands and results of their products are searched. Rows that are of no expert may hold anything, and are
left out.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from f8sub.convert.products import products_of
from f8sub.errors import refuse_other_than_a_module
from f8sub.experts.grouped_linear import Multiplied, name_of_read, watching
from f8sub.experts.seams import calls_grouped_linear
from f8sub.kernels.grouped.operands import Groups
from f8sub.linear.float8_linear import Float8Linear
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import is_dtensor, is_metadata_inference
from f8sub.weights.checks import gather_values
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.primary_weight import PrimaryWeight
from f8sub.weights.weight import is_converted, local_tensor, own_parameter, weight_beside_forward


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Names one tensor of one layer that has NaN or infinity.

    Attributes:
        layer: its name in the model.
        role: ``"x"``, ``"w"``, ``"y"``, ``"dy"``, ``"dx"`` or ``"dw"``.
        ranks: those that have it there.
    """

    layer: str
    role: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.role} of {self.layer} on rank{'s' * (len(self.ranks) > 1)} {ranks}"


class Search:
    """Holds what ``find_nonfinite`` found; filled when its context is left.

    Attributes:
        first: where NaN or infinity first was, in the order in which the layers ran; None where it was nowhere.
    """

    def __init__(self) -> None:
        self.first: NonFinite | None = None
        self._seen: list[tuple[str, str]] = []
        self._bad: list[torch.Tensor] = []

    def look(self, layer: str, role: str, tensor: torch.Tensor | None) -> None:
        """Look at a tensor, if there is one, without waiting for it."""
        if tensor is not None:
            self.note(layer, role, self.is_bad(tensor))

    @staticmethod
    def is_bad(tensor: torch.Tensor) -> torch.Tensor:
        """Return whether an element is not finite: bool, (), on the tensor's device."""
        with torch.no_grad():
            local = local_tensor(tensor)
            # Data and scales may both be bad: the values show it.
            if isinstance(local, Float8Tensor):
                local = local.dequantize()
            elif isinstance(local, MasterWeight | PrimaryWeight):
                local = local.plain
            return ~local.detach().isfinite().all()

    def note(self, layer: str, role: str, bad: torch.Tensor) -> None:
        """Remember whether a tensor, the next in the order in which the layers run, is bad: bool, ()."""
        self._seen.append((layer, role))
        self._bad.append(bad)

    def finish(self) -> None:
        """Read what was remembered, on all ranks together, and keep the first."""
        # Here alone the host waits for the device.
        found = [bad.item() for bad in self._bad]
        mine = next(((i, *self._seen[i]) for i, bad in enumerate(found) if bad), None)
        everyone = [mine]
        if dist.is_initialized():
            everyone = gather_values(mine)
        if any(everyone):
            # By the number first: all ranks run layers in one order.
            first = min(other for other in everyone if other is not None)
            ranks = tuple(rank for rank, other in enumerate(everyone) if other == first)
            self.first = NonFinite(first[1], first[2], ranks)

    def __str__(self) -> str:
        return str(self.first or "every tensor is finite")


@contextmanager
def find_nonfinite(model: torch.nn.Module) -> Iterator[Search]:
    """Watch the linear layers and experts of a model for NaN and infinity, through the forwards and backwards inside.

        with f8sub.find_nonfinite(model) as search:
            model(batch).sum().backward()
        print(search)  # dy of layers.3.mlp.up on rank 5

    To repeat a step that went wrong, not to train with: what it finds is read by the host when the context is left, and
    compiled code runs eagerly inside. All ranks enter and leave it together. An exception inside passes through, and
    nothing was searched then.

    Args:
        model: converted or not, sharded or not. Every nn.Linear's x, w, y and dy are watched, in the order in which
            they run; of converted layers dx and dw too, as this rank computed them, before gradients are reduced. A
            rank's w is its own shard, so that the rank is the one whose shard is bad; then what it gathered.
            Experts that ``experts=True`` converts are watched in the same way: products of ``grouped_linear`` under the
            weight's name, but for tokens of no expert; experts whose own forward multiplies otherwise as one module.
            What lies between, such as norms, shows in the x of the layer after it.

    Yields:
        The search; its ``first`` names the layer, the role and the ranks.
    """
    refuse_other_than_a_module("find_nonfinite", model)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    search = Search()
    # Before anything is gathered: this rank's shard.
    shards = {name: search.is_bad(weight_beside_forward(layer)) for name, layer in layers.items()}
    handles = [
        handle
        for name, layer in layers.items()
        for handle in (
            layer.register_forward_pre_hook(
                functools.partial(_before, search, name, shards[name]), with_kwargs=True
            ),
            # Before other hooks, which may put something else in the place of y.
            layer.register_forward_hook(functools.partial(_after, search, name), prepend=True),
        )
    ]
    with ExitStack() as exits:
        for handle in handles:
            exits.callback(handle.remove)
        exits.enter_context(_searching_experts(model, search))
        exits.enter_context(torch.compiler.set_stance("force_eager"))
        yield search
    search.finish()


def _before(
    search: Search, name: str, shard: torch.Tensor, layer: torch.nn.Linear, args: Any, kwargs: dict[str, Any]
) -> None:
    if is_metadata_inference():
        return
    search.look(name, "x", args[0] if args else kwargs.get("input"))
    # First the shard, then what was gathered from all ranks.
    search.note(name, "w", shard)
    search.look(name, "w", weight_beside_forward(layer))


def _after(search: Search, name: str, module: torch.nn.Module, args: Any, y: torch.Tensor) -> None:
    if is_metadata_inference():
        return
    search.look(name, "y", y)
    if y.grad_fn is None:
        return
    y.register_hook(functools.partial(search.look, name, "dy"))
    # A DTensor was made of the product in one more step.
    node = y.grad_fn.next_functions[0][0] if is_dtensor(y) else y.grad_fn
    if isinstance(module, Float8Linear) and node is not None:
        node.register_hook(functools.partial(gradients_seen, search, name))


def gradients_seen(
    search: Search, name: str, gradients: tuple[torch.Tensor | None, ...], dy: tuple[torch.Tensor | None, ...]
) -> None:
    """Look at dx and dw, in a hook of the node that computes both."""
    for role, gradient in zip(("dx", "dw"), gradients, strict=False):
        search.look(name, role, gradient)


@contextmanager
def _searching_experts(model: torch.nn.Module, search: Search) -> Iterator[None]:
    """Look at each product by its weight's full name; at modules whose own forward multiplies otherwise as a whole."""
    watched: dict[torch.nn.Module, tuple[str, list[str]]] = {}
    with ExitStack() as exits:
        for fqn, module in model.named_modules():
            names = [product.attribute for product in products_of(module) if product.groups is not None]
            if not names:
                continue
            if is_converted(module) or calls_grouped_linear(module):
                watched[module] = fqn, names
            else:
                before = functools.partial(_before_experts, search, fqn, names)
                after = functools.partial(_after_experts, search, fqn)
                exits.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                exits.callback(module.register_forward_hook(after, prepend=True).remove)
        exits.enter_context(watching(_Watch(search, watched)))
        yield


class _Watch:
    """Looks at products of the modules, which are given with their names and those of their weights."""

    def __init__(self, search: Search, modules: dict[torch.nn.Module, tuple[str, list[str]]]) -> None:
        self.search, self.modules = search, modules
        self.shards = {
            (module, name): search.is_bad(own_parameter(module, name))
            for module, (_, names) in modules.items()
            for name in names
        }

    def __call__(self, module: Any, product: Multiplied) -> None:
        if is_metadata_inference():
            return
        # A weight that was copied before is of no parameter, and tells no module.
        asked = self.modules if module is None else [each for each in [module] if each in self.modules]
        named = ((m, name_of_read(m, self.modules[m][1], product.weight)) for m in asked)
        found = next(((m, name) for m, name in named if name is not None), None)
        if found is None and module not in self.modules:
            return
        fqn = self.modules[found[0] if found else module][0]
        name = fqn if found is None else f"{fqn}.{found[1]}".lstrip(".")
        # rows behind the last group
        past = product.groups.past
        self.search.look(name, "x", product.x.masked_fill(past, 0))
        if found is not None:
            self.search.note(name, "w", self.shards[found])
        self.search.look(name, "w", product.weight)
        self.search.look(name, "y", product.y)
        if product.y.grad_fn is None:
            return
        # Hooks hold no product: it holds y, which holds them, where no garbage collector sees it.
        product.y.register_hook(functools.partial(_look_at_dy, self.search, name, product.groups))
        for node in _nodes_of(product.y):
            node.register_hook(functools.partial(gradients_seen, self.search, name))


def _nodes_of(y: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes that compute dx and dw of a product in float8: one, or one per expert."""
    for node in (y.grad_fn, *(each for each, _ in y.grad_fn.next_functions)):  # type: ignore[union-attr]
        if node is not None and node.name().startswith(("GroupedMatmul", "Float8Matmul")):
            yield node


def _look_at_dy(search: Search, name: str, groups: Groups, dy: torch.Tensor) -> None:
    search.look(name, "dy", dy.masked_fill(groups.past, 0))


def _before_experts(
    search: Search, fqn: str, names: list[str], module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> None:
    if is_metadata_inference():
        return
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    # x is the first floating-point argument: indices of experts are integers.
    search.look(fqn, "x", next((value for value in given if value.is_floating_point()), None))
    for name in names:
        search.look(f"{fqn}.{name}".lstrip("."), "w", weight_beside_forward(module, name))


def _after_experts(search: Search, fqn: str, module: torch.nn.Module, args: Any, y: Any) -> None:
    if not isinstance(y, torch.Tensor) or is_metadata_inference():
        return
    search.look(fqn, "y", y)
    if y.grad_fn is not None:
        y.register_hook(functools.partial(search.look, fqn, "dy"))
