"""How much the products of a module of experts change the loss: one row for the module, which is skipped as a whole."""

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from f8sub.diagnostics.sensitivity import Note, Probe, probes
from f8sub.experts.grouped_linear import GroupedCall, Product, multiply, watchers
from f8sub.experts.module import Float8Experts
from f8sub.kernels.grouped.gemm import GroupedPlan


class ExpertsProbe(Probe):
    """A row for each module of experts."""

    @override
    def modules(self, model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
        return {fqn: [getattr(m, name) for name in m.weights] for fqn, m in _experts_of(model).items()}

    @override
    def enter(self, model: torch.nn.Module, note: Note) -> Callable[[], None]:
        modules = _experts_of(model)
        plans = {fqn: module.plan for fqn, module in modules.items()}
        names = {module: fqn for fqn, module in modules.items()}

        def watch(module: Any, product: Product) -> None:
            if module in names and product.call is not None:
                _look(names[module], plans[names[module]], product, product.call, note)

        def leave() -> None:
            watchers.remove(watch)
            for fqn, module in modules.items():
                module.plan = plans[fqn]

        for module in modules.values():
            plan = module.plan
            high = plan.recipe.with_high_precision(fprop=True, dgrad=True, wgrad=True)
            module.plan = GroupedPlan.make(high, plan.device, plan.backend)
        watchers.append(watch)
        return leave


probes.append(ExpertsProbe())


def _experts_of(model: torch.nn.Module) -> dict[str, Float8Experts]:
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, Float8Experts)}


def _look(fqn: str, plan: GroupedPlan, product: Product, call: GroupedCall, note: Note) -> None:
    x, weight, groups, _, y = product
    with torch.no_grad():
        y8 = multiply(x.detach(), weight, groups, call._replace(plan=plan))
        error = y8.float() - y.detach().float()
    note(fqn, error, y, int(groups.ends[-1]) * weight[0].numel())
