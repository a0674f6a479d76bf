"""The operands and results of experts' products, searched for NaN and infinity.

Rows that are of no expert may hold anything, and are left out.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from typing_extensions import override

from f8sub.diagnostics.find_nonfinite import (
    Probe,
    Search,
    gradients_seen,
    probes,
)
from f8sub.experts.adapters import is_of, own_parameter
from f8sub.experts.grouped_linear import Product, watchers
from f8sub.experts.module import Float8Experts
from f8sub.experts.seams import calls_grouped_linear, seam_of
from f8sub.kernels.grouped.operands import Groups
from f8sub.torch_compat import is_metadata_inference


class ExpertsProbe(Probe):
    """Each product by its weight's full name; modules whose own forward multiplies otherwise as a whole."""

    @override
    def begin(self, model: torch.nn.Module, search: Search) -> Callable[[], None]:
        watched: dict[torch.nn.Module, tuple[str, list[str]]] = {}
        handles = []
        for fqn, module in model.named_modules():
            seam = seam_of(module)
            if isinstance(module, Float8Experts):
                watched[module] = fqn, list(module.weights)
            elif seam is not None and calls_grouped_linear(module):
                watched[module] = fqn, list(seam.weights_of(module))
            elif seam is not None:
                before = functools.partial(_before, search, fqn, list(seam.weights_of(module)))
                after = functools.partial(_after, search, fqn)
                handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after, prepend=True),
                ]
        watch = _Watch(search, watched)
        watchers.append(watch)

        def leave() -> None:
            watchers.remove(watch)
            for handle in handles:
                handle.remove()

        return leave


probes.append(ExpertsProbe())


class _Watch:
    """Looks at products of the modules, which are given with their names and those of their weights."""

    def __init__(self, search: Search, modules: dict[torch.nn.Module, tuple[str, list[str]]]) -> None:
        self.search, self.modules = search, modules
        self.shards = {
            (module, name): search.is_bad(own_parameter(module, name))
            for module, (_, names) in modules.items()
            for name in names
        }

    def __call__(self, module: Any, product: Product) -> None:
        if is_metadata_inference():
            return
        # A weight that was copied before is of no parameter, and tells no module.
        asked = self.modules if module is None else [each for each in [module] if each in self.modules]
        found = next(((m, n) for m in asked for n in self.modules[m][1] if _is_of(product, m, n)), None)
        if found is None and module not in self.modules:
            return
        fqn = self.modules[found[0] if found else module][0]
        name = fqn if found is None else f"{fqn}.{found[1]}".lstrip(".")
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


def _is_of(product: Product, module: torch.nn.Module, name: str) -> bool:
    return is_of(product.weight, own_parameter(module, name))


def _nodes_of(y: torch.Tensor) -> Iterator[Any]:
    """The nodes that make dx and dw of a product in float8: one, or one an expert."""
    for node in (y.grad_fn, *(each for each, _ in y.grad_fn.next_functions)):  # type: ignore[union-attr]
        if node is not None and node.name().startswith(("GroupedMatmul", "Float8Matmul")):
            yield node


def _look_at_dy(search: Search, name: str, groups: Groups, dy: torch.Tensor) -> None:
    search.look(name, "dy", dy.masked_fill(groups.past, 0))


def _before(
    search: Search, fqn: str, names: list[str], module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> None:
    if is_metadata_inference():
        return
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    search.look(fqn, "x", next((value for value in given if value.is_floating_point()), None))
    for name in names:
        search.look(f"{fqn}.{name}".lstrip("."), "w", module._parameters[name])


def _after(search: Search, fqn: str, module: torch.nn.Module, args: Any, y: Any) -> None:
    if not isinstance(y, torch.Tensor) or is_metadata_inference():
        return
    search.look(fqn, "y", y)
    if y.grad_fn is not None:
        y.register_hook(functools.partial(search.look, fqn, "dy"))
