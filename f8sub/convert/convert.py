"""Converts nn.Linear to Float8Linear and back: in place, by class swap, before ``fully_shard``."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from f8sub.convert.attention import (
    AttentionNearLayers,
    SharedAttention,
    leave_out_of_exports,
    revert_attention,
    share_attention_hook,
)
from f8sub.convert.checks import (
    Chosen,
    refuse_other_recipe,
    refuse_sharded,
    refuse_tied_apart,
    warn_of_quantized_origin,
)
from f8sub.convert.class_swap import FusedEncoders, float8_class, plain_class
from f8sub.convert.experts import ExpertsChoice
from f8sub.convert.keep_x import KeepX, SharedInputs, refuse_unkeepable
from f8sub.convert.messages import ReferenceWarning, nothing_converted, refuse_foreign, warn_of_reencoding
from f8sub.convert.patterns import RecipeOrName, layer_keep_x, layer_recipes
from f8sub.convert.primary_weights import PrimaryLayers, PrimaryWeights, refuse_without_master
from f8sub.convert.products import SKIP_REASON
from f8sub.convert.selection import IN_FLOAT8, FilterFn, Selection, idle_patterns
from f8sub.convert.swiglu_input import round_to_float8
from f8sub.delayed.histories import DelayedHistories, DelayedLayers, share_histories_hook
from f8sub.errors import Float8ConfigError, refuse_other_than_a_module
from f8sub.experts.module import StoredTransposed, revert_experts
from f8sub.experts.seams import AUTO_EXCHANGED, EXPERTS, refuse_unknown_experts
from f8sub.kernels.gemm.select import Plan
from f8sub.linear.float8_linear import WEIGHT, Float8Linear, LinearState
from f8sub.linear.saved_input import AUTO
from f8sub.linear.shared_input import close_scope, open_scope
from f8sub.recipes import DEFAULT
from f8sub.torch_compat import CONVERSION, remove_hook, require
from f8sub.weights.checks import Fsdp1, ShardChecks, warn_of_fsdp1
from f8sub.weights.conversion import Conversion
from f8sub.weights.master_weight import MasterWeight, master_parameter
from f8sub.weights.non_finite import HeldWeights, SkippedSteps
from f8sub.weights.precompute_scales import warn_of_replaced, watch_writes
from f8sub.weights.weight import Weight, conversion_of, is_converted, take_place

Model = TypeVar("Model", bound=torch.nn.Module)

GUESTS = (HeldWeights, SkippedSteps, SharedAttention, DelayedHistories, ShardChecks, PrimaryWeights)
"""Who takes part in what the weights of a conversion do together, in the order in which they are asked."""
LAYER_GUESTS = (
    *(DelayedLayers, ReferenceWarning, KeepX, StoredTransposed, FusedEncoders, SharedInputs),
    *(PrimaryLayers, Fsdp1, AttentionNearLayers),
)
"""Who takes part in what happens to its layers, in that order."""


ALIASES = {
    "recipe_name": "recipe",
    "module_filter_fn": "filter_fn",
    "filter_fqns": "skip",
    "enable_fsdp_float8_all_gather": "float8_all_gather",
}
"""Options of ``convert_to_float8`` by torchao's and torchtitan's names, and what f8sub calls them."""


def convert_to_float8(  # noqa: PLR0913  (what is converted, to what, and how)
    model: Model,
    recipe: RecipeOrName | Mapping[str, RecipeOrName] | None = None,
    *,
    filter_fn: FilterFn | None = None,
    skip: str | Sequence[str] = (),
    skip_defaults: bool = True,
    min_dim: int | None = None,
    strict: bool = True,
    float8_all_gather: bool = True,
    backend: str = "auto",
    primary_weights: bool = False,
    experts: bool | str = EXPERTS,
    tokens: int | None = None,
    keep_x: str | Mapping[str, str] = AUTO,
    **other: Any,
) -> Model:
    """Turn the linear layers of a model into ``Float8Linear``, in place; call it before ``fully_shard``.

    A layer keeps its identity, its class, its hooks, its training mode, its parameters and their ties.
    ``conversion_report`` says what was converted and, for every layer that was not, why.

    Args:
        model: any module, on any device, meta included.
        recipe: one of ``recipe_names()``, or a ``Recipe``; or a mapping from glob patterns, as ``skip`` holds them,
            to either: the first that matches a layer's name decides, and a layer that none matches stays as it is.
            A pattern that decides for no layer is a ``Float8Warning``, and in the report. None for "tensorwise".
        filter_fn: ``(module, fqn) -> bool``, True to convert.
        skip: glob patterns over whole segments of a layer's name; a match skips the layer, in addition to
            ``skip_defaults``. One that matches nothing is a ``Float8Warning``.
        skip_defaults: leave output heads, routers of experts, LoRA adapters and layers that are too small to gain
            as they are, see ``f8sub.convert.selection``; False converts these as well.
        min_dim: leave layers as they are whose smaller dimension is below this. None for the default rule: 512, and
            no limit for a model that has more than a quarter of its FLOPs in smaller layers.
        strict: raise when no layer was converted; False warns instead.
        float8_all_gather: FSDP2 gathers weights as float8; False in high precision, as in any case those that a GEMM
            of the recipe reads in high precision.
        backend: ``"auto"`` takes the fastest that can run each GEMM; a backend named is never replaced.
        primary_weights: the weights themselves become float8, 1 byte per element, and their high-precision values the
            masters of ``f8sub.optim.MasterWeights(optimizer)``, once that is constructed.
        experts: "auto" converts experts of mixtures that are predicted to be 1.1 times as fast in float8 or more: those
            of transformers and torchtitan, and what ``register_experts`` was given. In a job of several ranks FSDP2 is
            taken to gather them; "auto_expert_parallel" is for experts on GPUs of their own, and asks for 1.25. The
            report says which stay in high precision, and why. True converts all that can be, False none. ``skip``,
            recipes by patterns and filter functions hold for them; ``min_dim`` and ``keep_x`` are of linear layers.
        tokens: of one forward, on all GPUs that share experts. Without it "auto" converts experts that gain with 2,048
            tokens each or fewer; the report says how many they need, and the first forward warns where it has fewer.
        keep_x: what is saved of x, one of ``KEEP_X``, see ``f8sub.convert.keep_x``; or a mapping from patterns to it.
        other: torchao's and torchtitan's names for the same: ``recipe_name``, ``enable_fsdp_float8_all_gather``,
            ``module_filter_fn``, and ``filter_fqns``, strings of which none may be in a layer's name. Any other keyword
            is an error that shows f8sub's.

    Returns:
        ``model`` itself.

    Raises:
        Float8ConfigError: unknown option, recipe or backend, an option under two names with two values, a
            filter that takes no module and name, a model that is already sharded or converted with another recipe, tied
            layers whose recipes read the weight differently, a ``keep_x`` that a recipe cannot take, a torch that is
            not known, or, when ``strict``, nothing to convert.
    """
    options = [name for name in inspect.signature(convert_to_float8).parameters if name != "other"]
    # Any keyword gets this far, so that an option of another library is answered with f8sub's name for it.
    unknown = {name: value for name, value in other.items() if name not in ALIASES}
    refuse_foreign(model, recipe, unknown, [*options, *ALIASES])
    recipe = _one_of("recipe", recipe, other)
    # True is the default, so it counts as not given: an alias that says False is then no contradiction.
    gathered = _one_of("float8_all_gather", None if float8_all_gather else False, other)
    filter_fqns: str | Sequence[str] = other.get("filter_fqns", ())
    selection = Selection(
        recipes=layer_recipes(DEFAULT if recipe is None else recipe),
        kept=layer_keep_x(keep_x),
        skip=[skip] if isinstance(skip, str) else skip,
        filter_fqns=[filter_fqns] if isinstance(filter_fqns, str) else filter_fqns,
        filter_fns=[given for given in (filter_fn, other.get("module_filter_fn")) if given is not None],
        defaults=skip_defaults,
        min_dim=min_dim,
    )
    of_features = {"primary_weights": primary_weights, "experts": experts, "tokens": tokens}
    return _convert_selected(model, selection, backend, strict, gathered is not False, of_features)


def _has_other_ranks() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _one_of(name: str, given: Any, other: Mapping[str, Any]) -> Any:
    """Return an option's value, or its alias's; None where neither was given, Float8ConfigError where they differ."""
    alias = next(alias for alias, of in ALIASES.items() if of == name)
    by_alias = other.get(alias)
    if given is not None and by_alias is not None and given != by_alias:
        raise Float8ConfigError(
            f"{name}={given!r} and {alias}={by_alias!r} are the same option; give one of them"
        )
    return by_alias if given is None else given


def _convert_selected(
    model: Model,
    selection: Selection,
    backend: str,
    strict: bool,
    float8_all_gather: bool,
    of_features: dict[str, Any],
) -> Model:
    require(CONVERSION)
    refuse_unknown_experts(of_features["experts"], of_features["tokens"])
    # Before anything else is looked at: sharded weights have other shapes, classes and owners.
    refuse_sharded(model)
    refuse_other_recipe(model, selection.recipes)
    modules = dict(model.named_modules())
    linears = {fqn: module for fqn, module in modules.items() if isinstance(module, torch.nn.Linear)}
    reasons = selection.reasons(modules, linears)
    # FSDP2 shards the model later, so that it is taken to be what other ranks are for.
    of_features["exchanged"] = of_features["experts"] == AUTO_EXCHANGED
    of_features["gathered"] = float8_all_gather and not of_features["exchanged"] and _has_other_ranks()
    choice = ExpertsChoice(modules, of_features, backend)
    of_experts = choice.reasons(selection)
    asked = reasons | of_experts
    for fqn, reason in asked.items():
        # A call before this one may have left a reason on a layer that is converted now.
        if reason in IN_FLOAT8:
            modules[fqn].__dict__.pop(SKIP_REASON, None)
        else:
            # On the module, so that conversion_report and repr need no record of this call.
            setattr(modules[fqn], SKIP_REASON, reason)
    idle = idle_patterns(list(modules), asked, selection, linears)
    # All plans before the first layer is converted: one that cannot be made leaves the model as it was.
    chosen = []
    for fqn, reason in reasons.items():
        if reason is None and (recipe := selection.recipes.of(fqn)) is not None:
            plan = Plan.make(recipe, _device_of(linears[fqn]), backend)
            # A GEMM that reads the weight in high precision needs it gathered so.
            gathered = float8_all_gather and None not in recipe.formats("w")
            chosen.append(Chosen(linears[fqn], fqn, plan, gathered, selection.kept.of(fqn)))
    planned = [
        choice.planned(fqn, recipe, float8_all_gather)
        for fqn, reason in of_experts.items()
        if reason is None and (recipe := selection.recipes.of(fqn)) is not None
    ]
    if not chosen and not planned:
        nothing_converted(model, strict)
        return model
    # Everything that can be refused is, before the first class is swapped: an error leaves the model as it was.
    refuse_tied_apart(model, chosen)
    warn_of_quantized_origin(model)
    refuse_unkeepable(chosen)
    warn_of_reencoding(chosen)
    refuse_without_master(chosen, of_features)
    # From here on the model changes.
    conversion = Conversion({**of_features, "idle_patterns": idle}, GUESTS, LAYER_GUESTS)
    for guest in conversion.layer_guests:
        guest.planned(conversion, [layer.plan for layer in chosen])
    for layer in chosen:
        _convert(layer, conversion)
    for convert in planned:
        convert(conversion)
    _wrap_weights(conversion)
    Conversion.see(model)
    # Learn at forwards who shards the layers, and of every optimizer's steps.
    model.register_forward_pre_hook(functools.partial(check_ranks_hook, conversion))
    watch_writes()
    for guest in conversion.layer_guests:
        guest.converted(model, conversion)
    leave_out_of_exports(model)
    return model


def _convert(layer: Chosen, conversion: Conversion) -> None:
    module, fqn, plan, gathered, keep_x = layer
    state = LinearState(plan, fqn or "(root)", conversion, gathered, WEIGHT, keep_x)
    # By its class: hooks, optimizers and names go on to refer to this very module.
    state.convert(module, float8_class(type(module)))


def _wrap_weights(conversion: Conversion) -> None:
    """Turn the weights of a conversion into master weights; tied ones stay tied."""
    # By identity of the old parameter: each of its owners gets the same new one.
    made: dict[int, torch.nn.Parameter] = {}
    for record in conversion.records:
        weight = record.module._parameters[record.name]
        # Converted before, or tied to a weight that was.
        if isinstance(weight, MasterWeight):
            continue
        if id(weight) not in made:
            made[id(weight)] = master_parameter(weight, record)
        if made[id(weight)] is not weight:
            setattr(record.module, record.name, made[id(weight)])


def replace_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Put ``parameter`` in a weight's place, under the weight's own identity where torch can swap the two."""
    if not take_place(parameter, getattr(module, name)):
        setattr(module, name, parameter)


def _device_of(module: torch.nn.Linear) -> torch.device:
    """Return the device where the layer will run: for meta the accelerator, or the CPU where there is none."""
    if module.weight.device.type != "meta":
        return module.weight.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def check_ranks_hook(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Compare the ranks in a forward pre-hook of a converted model, before any weight is gathered, once.

    Layers that another library replaced since are a Float8Warning: nothing else of f8sub need ever be called.
    """
    if not torch.compiler.is_compiling():
        conversion.refresh(gathered=True)
        warn_of_replaced(module, stacklevel=6)
        # What was compared stays so, and a hook costs every forward.
        remove_hook(check_ranks_hook, module)


HOOKS = (
    check_ranks_hook,
    share_histories_hook,
    share_attention_hook,
    open_scope,
    close_scope,
    round_to_float8,
    warn_of_fsdp1,
)
"""The hooks that a conversion puts on modules."""


def convert_from_float8(model: Model) -> Model:
    """Turn every ``Float8Linear`` back into the nn.Linear it was, in place, with the same parameters.

    Attention that ``attend_in_float8`` changed is in high precision again.

    Raises:
        Float8ConfigError: the model is sharded; load its state dict into a plain model instead. Or a converted module
            has parametrizations.
    """
    refuse_other_than_a_module("convert_from_float8", model)
    refuse_sharded(
        model,
        "convert_from_float8 takes a model before it is sharded; load the state dict into a plain model instead",
    )
    _refuse_parametrized(model)
    module: Any
    for module in model.modules():
        for hook in HOOKS:
            remove_hook(hook, module)
        revert_attention(module)
        if (conversion := conversion_of(module)) is None:
            continue
        for name, weight in list(module._parameters.items()):  # under other names, too, where it is pruned
            if isinstance(weight, Weight):
                replace_parameter(module, name, torch.nn.Parameter(weight.plain, weight.requires_grad))
        # First: ``revert_experts`` and ``left`` find a module that has no record any more.
        conversion.discard(module)
        if isinstance(module, Float8Linear):
            module._f8sub.revert(module, plain_class(module))
        else:
            revert_experts(module)
    Conversion.forget(model)
    return model


def _refuse_parametrized(model: torch.nn.Module) -> None:
    """Refuse parametrized modules: their class is one that torch derived from the float8 class."""
    found = [m for m in model.modules() if is_converted(m) and "parametrizations" in m._modules]
    if found:
        fqns = ", ".join(module._f8sub.fqn for module in found)  # type: ignore[misc, union-attr]
        raise Float8ConfigError(
            f"{fqns}: convert_from_float8 cannot give back the class of a module that has parametrizations; call "
            "torch.nn.utils.parametrize.remove_parametrizations for them before"
        )
