"""How much the products of a module of experts change the loss: one row for the module, which is skipped as a whole."""

from collections.abc import Callable

import torch
from typing_extensions import override

from f8sub.features.expert_products.grouped_matmul import GroupedMatmul
from f8sub.features.expert_products.products import GroupedPlan, is_one_by_one
from f8sub.features.experts.grouped_linear import Product, watchers
from f8sub.features.experts.module import Float8Experts
from f8sub.features.sensitivity.sensitivity import Note, Probe, probes
from f8sub.torch_compat import apply


class ExpertsProbe(Probe):
    """Modules of experts, but for those whose recipe multiplies them one by one."""

    @override
    def modules(self, model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
        return {fqn: [getattr(m, name) for name in m.weights] for fqn, m in _experts_of(model).items()}

    @override
    def enter(self, model: torch.nn.Module, note: Note) -> Callable[[], None]:
        modules = _experts_of(model)
        plans = {fqn: module.plan for fqn, module in modules.items()}
        names = {module.fqn: fqn for fqn, module in modules.items()}

        def watch(fqn: str, product: Product) -> None:
            if fqn in names:
                _look(names[fqn], plans[names[fqn]], product, note)

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
    found = {fqn: module for fqn, module in model.named_modules() if isinstance(module, Float8Experts)}
    return {fqn: module for fqn, module in found.items() if not is_one_by_one(module.plan.recipe)}


def _look(fqn: str, plan: GroupedPlan, product: Product, note: Note) -> None:
    x, weight, groups, call, y = product
    with torch.no_grad():
        y8 = apply(GroupedMatmul, x.detach(), weight, groups.ends, call._replace(plan=plan))
        error = y8.float() - y.detach().float()
    note(fqn, error, y, int(groups.ends[-1]) * weight[0].numel())
