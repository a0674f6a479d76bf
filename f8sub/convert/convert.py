"""nn.Linear to Float8Linear and back: in place, by class swap, before ``fully_shard``."""

import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Never, TypeVar

import torch

from f8sub.convert.checks import (
    check_keep_x,
    refuse_delayed,
    refuse_high_precision,
    refuse_other_recipe,
    refuse_sharded,
    refuse_tied_apart,
)
from f8sub.convert.filters import FilterFn, LayerKeepX, LayerRecipes, RecipeOrName, Selection
from f8sub.convert.foreign_calls import refuse_foreign_recipe, refuse_unknown
from f8sub.convert.linear_subclasses import float8_class, plain_class
from f8sub.convert.nothing_converted import SKIP_REASON, why_nothing
from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.kernels.gemm.select import Plan
from f8sub.linear import sockets
from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.saved_input import AUTO
from f8sub.linear.shared_input import close_scope, open_scope
from f8sub.recipes import DEFAULT
from f8sub.weights.conversion import Conversion
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.precompute_scales import check_ranks_hook, guests_hook, watch_optimizer_steps
from f8sub.weights.weight import Weight, take_place

Model = TypeVar("Model", bound=torch.nn.Module)


def convert_to_float8(  # noqa: PLR0913  (the aliases are the field's names for the same options)
    model: Model,
    recipe: RecipeOrName | Mapping[str, RecipeOrName] = DEFAULT,
    *,
    filter_fn: FilterFn | None = None,
    skip: str | Sequence[str] = (),
    skip_defaults: bool = True,
    min_dim: int | None = None,
    strict: bool = True,
    float8_all_gather: bool = True,
    backend: str = "auto",
    primary_weights: bool = False,
    keep_x: str | Mapping[str, str] = AUTO,
    module_filter_fn: FilterFn | None = None,
    filter_fqns: str | Sequence[str] = (),
    recipe_name: str | None = None,
    enable_fsdp_float8_all_gather: bool | None = None,
    **unknown: Never,
) -> Model:
    """Turn the linear layers of a model into ``Float8Linear``, in place; call it before ``fully_shard``.

    A layer keeps its identity, its class, its hooks, its training mode, its parameters and their ties.
    ``conversion_report`` says what was converted and, for every layer that was not, why.

    Args:
        model: any module, on any device, meta included.
        recipe: one of ``recipe_names()``, or a ``Recipe``; or a mapping from glob patterns, as ``skip`` holds them,
            to either: the first that matches a layer's name decides, and a layer that none matches stays as it is.
            A pattern that decides for no layer is a ``Float8Warning``, and in the report.
        filter_fn: ``(module, fqn) -> bool``, True to convert. ``module_filter_fn`` is torchao's name for it.
        skip: glob patterns over whole segments of a layer's name; a match skips the layer, in addition to
            ``skip_defaults``. One that matches nothing is a ``Float8Warning``.
        skip_defaults: leave output heads, routers of experts, LoRA adapters and layers that are too small to gain
            as they are, see ``f8sub.convert.defaults``; False converts these as well.
        min_dim: leave layers as they are whose smaller dimension is below this. None for the default rule: 512, and
            no limit for a model that has more than a quarter of its FLOPs in smaller layers.
        strict: raise when no layer was converted; False warns instead.
        float8_all_gather: FSDP2 gathers the weights as float8; False gathers them in high precision, as it is
            done in any case for a recipe with a GEMM that reads the weight in high precision.
        backend: ``"auto"`` takes the fastest that can run each GEMM; a backend named is never replaced.
        primary_weights: the weights themselves become float8, 1 byte an element, and their high-precision values the
            masters of ``f8sub.optim.MasterWeights(optimizer)``, once that is constructed.
        keep_x: what is saved of x for wgrad, one of ``KEEP_X``, see ``f8sub.linear.saved_input``; or a mapping from
            glob patterns to them, "auto" where none matches.
        module_filter_fn: see ``filter_fn``.
        filter_fqns: torchtitan's convention: a layer whose name contains one of these strings is skipped, too.
        recipe_name: torchtitan's name for ``recipe``.
        enable_fsdp_float8_all_gather: torchao's and torchtitan's name for ``float8_all_gather``.
        unknown: an error that shows the option of f8sub.

    Returns:
        ``model`` itself.

    Raises:
        Float8ConfigError: unknown option, recipe or backend, a model that is already sharded or converted with
            another recipe, tied layers whose recipes read the weight differently, a ``keep_x`` that a recipe cannot
            take, or, when ``strict``, nothing to convert.
    """
    refuse_unknown(unknown, inspect.signature(convert_to_float8).parameters)
    selection = Selection(
        recipes=LayerRecipes(_recipe_of(recipe, recipe_name)),
        skip=[skip] if isinstance(skip, str) else skip,
        filter_fqns=[filter_fqns] if isinstance(filter_fqns, str) else filter_fqns,
        filter_fn=_all_of(filter_fn, module_filter_fn),
        defaults=skip_defaults,
        min_dim=min_dim,
    )
    kept = LayerKeepX(keep_x)
    if enable_fsdp_float8_all_gather is not None:
        float8_all_gather = enable_fsdp_float8_all_gather
    return _convert_selected(model, selection, kept, backend, strict, float8_all_gather, primary_weights)


def _convert_selected(
    model: Model,
    selection: Selection,
    kept: LayerKeepX,
    backend: str,
    strict: bool,
    float8_all_gather: bool,
    primary_weights: bool,
) -> Model:
    refuse_sharded(model)
    refuse_other_recipe(model, selection.recipes)
    names = _select(model, selection)
    idle = _idle_patterns(model, names, selection, kept)
    if not names:
        _nothing_converted(model, strict)
        return model
    plans = _plans(names, selection.recipes, backend)
    refuse_tied_apart(model, names, plans)
    check_keep_x(plans, names, kept)
    # A GEMM that reads the weight in high precision needs it gathered so.
    gathered = {m: float8_all_gather and None not in plan.recipe.formats("w") for m, plan in plans.items()}
    if primary_weights:
        refuse_delayed(plans, names)
        refuse_high_precision(plans, names, gathered)
    conversion = Conversion(primary_weights, idle)
    conversion.warn_of_reference(plans.values())
    for module, plan in plans.items():
        _convert(module, names[module], plan, conversion, gathered[module], kept.of(names[module]))
    _wrap_weights(list(names), conversion)
    _share_inputs(model)
    _watch(model, conversion)
    return model


def convert_from_float8(model: Model) -> Model:
    """Turn every ``Float8Linear`` back into the nn.Linear it was, in place, with the same parameters.

    Raises:
        Float8ConfigError: the model is sharded; load its state dict into a plain model instead.
    """
    refuse_sharded(model)
    for module in model.modules():
        for hooks, hook in (
            (module._forward_pre_hooks, open_scope),
            (module._forward_hooks, close_scope),
            (module._forward_pre_hooks, check_ranks_hook),
            (module._forward_pre_hooks, guests_hook),
        ):
            for key in [key for key, found in hooks.items() if getattr(found, "func", found) is hook]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
        if isinstance(module, Float8Linear):
            module.converted.discard(module)
            weight = module.weight
            if isinstance(weight, Weight):
                _replace(module, torch.nn.Parameter(weight.plain, weight.requires_grad))
            del module.plan, module.fqn, module.converted, module.float8_all_gather, module.keep_x
            if sockets.scaling is not None:
                sockets.scaling.leave(module)
            module.__class__ = plain_class(module)  # type: ignore[assignment]
    Conversion.forget(model)
    return model


def _select(model: torch.nn.Module, selection: Selection) -> dict[torch.nn.Linear, str]:
    """The layers to convert, by name; every other linear layer gets its reason."""
    names = {module: fqn for fqn, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    reasons = selection.reasons(model)
    for module, reason in reasons.items():
        if reason is not None and not isinstance(module, Float8Linear):
            setattr(module, SKIP_REASON, reason)
    return {module: names[module] for module, reason in reasons.items() if reason is None}


def _idle_patterns(
    model: torch.nn.Module, names: dict[torch.nn.Linear, str], selection: Selection, kept: LayerKeepX
) -> tuple[str, ...]:
    """Patterns that do nothing, after a warning about those of each option."""
    converted, others = [], {}
    for fqn, module in model.named_modules():
        if module in names or isinstance(module, Float8Linear):
            converted.append(fqn)
        elif isinstance(module, torch.nn.Linear):
            others[fqn] = getattr(module, SKIP_REASON)
    found = selection.idle([fqn for fqn, _ in model.named_modules()])
    if found:
        _warn("; ".join(found))
    for choices in (selection.recipes, kept):
        if idle := choices.idle_patterns(converted, others):
            found += idle
            _warn(
                f"patterns of {choices.option} that decide for no layer: {', '.join(idle)}; the first that matches a "
                "layer's name decides, so put the finer ones first"
            )
    return found


def _plans(
    names: dict[torch.nn.Linear, str], recipes: LayerRecipes, backend: str
) -> dict[torch.nn.Linear, Plan]:
    """All of them before the first layer is converted: one that cannot be made leaves the model as it was."""
    return {
        module: Plan.make(recipe, _device_of(module), backend)
        for module, fqn in names.items()
        if (recipe := recipes.of(fqn)) is not None
    }


def _convert(
    module: Any, fqn: str, plan: Plan, conversion: Conversion, float8_all_gather: bool, keep_x: str
) -> None:
    module.__class__ = float8_class(type(module))
    module.plan, module.fqn, module.converted = plan, fqn or "(root)", conversion
    module.float8_all_gather, module.keep_x = float8_all_gather, keep_x
    module.enter_weight()
    if plan.recipe.delayed is not None:
        sockets.scaling_of(plan.recipe).enter(module, plan.recipe)
    module.__dict__.pop(SKIP_REASON, None)


def _wrap_weights(modules: list[Any], conversion: Conversion) -> None:
    """Make master weights of the layers' weights; tied ones stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in modules:
        weight = module.weight
        if isinstance(weight, MasterWeight):
            continue
        if id(weight) not in made:
            master = MasterWeight(weight.detach())
            master.cell.record = conversion.record_of(module, "weight")
            made[id(weight)] = torch.nn.Parameter(master, weight.requires_grad)
        _replace(module, made[id(weight)])


def _replace(module: torch.nn.Linear, parameter: torch.nn.Parameter) -> None:
    """Put ``parameter`` in the weight's place, under the weight's own identity where torch can swap the two."""
    if not take_place(parameter, module.weight):
        module.weight = parameter


def _share_inputs(model: torch.nn.Module) -> None:
    """Hooks under the same id everywhere: dynamo guards on it, and would compile equal blocks one by one."""
    shared: int | None = None
    for module in model.modules():
        if sum(isinstance(child, Float8Linear) for child in module.children()) > 1:
            module.register_forward_pre_hook(open_scope)
            own = module.register_forward_hook(close_scope, always_call=True).id
            shared = own if shared is None else shared
            for hooks in (module._forward_hooks, module._forward_hooks_always_called):
                hooks[shared] = hooks.pop(own)  # type: ignore[assignment]


def _device_of(module: torch.nn.Linear) -> torch.device:
    """Where the layer will run: a layer on meta runs on the accelerator, or on the CPU where there is none."""
    if module.weight.device.type != "meta":
        return module.weight.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _watch(model: torch.nn.Module, conversion: Conversion) -> None:
    """Learn at forwards who shards or replicates the layers, and of every optimizer's steps."""
    Conversion.see(model)
    model.register_forward_pre_hook(functools.partial(check_ranks_hook, conversion))
    if any(guest.is_needed for guest in conversion.guests):
        model.register_forward_pre_hook(functools.partial(guests_hook, conversion))
    watch_optimizer_steps()


def _nothing_converted(model: torch.nn.Module, strict: bool) -> None:
    if count := sum(isinstance(module, Float8Linear) for module in model.modules()):
        _warn(
            f"convert_to_float8 was called again and found nothing more to convert: {count} layers are float8"
        )
        return
    message = f"convert_to_float8 found nothing to convert: {why_nothing(model)}"
    if strict:
        raise Float8ConfigError(message)
    Conversion.see(model)
    _warn(message)


def _warn(message: str) -> None:
    """Warn where ``convert_to_float8`` was called."""
    warnings.warn(message, Float8Warning, stacklevel=5)


def _all_of(*filters: FilterFn | None) -> FilterFn | None:
    given = [f for f in filters if f is not None]
    return (lambda module, fqn: all(f(module, fqn) for f in given)) if given else None


def _recipe_of(recipe: Any, recipe_name: str | None) -> Any:
    """What was given under either name."""
    if recipe_name is not None and recipe not in (DEFAULT, recipe_name):
        raise Float8ConfigError(
            f"recipe={recipe!r} and recipe_name={recipe_name!r} are the same option; give one of them"
        )
    given = recipe_name or recipe
    refuse_foreign_recipe(given)
    return given
