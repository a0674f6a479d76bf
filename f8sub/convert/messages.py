"""Words the errors and warnings of a conversion: foreign names, nothing converted, x encoded again, slow GEMMs."""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from f8sub import errors
from f8sub.convert.checks import Chosen
from f8sub.convert.products import SKIP_REASON, kind_of, name_of, other_weights
from f8sub.errors import Float8ConfigError, Float8Warning, first_and_more, nearest, shown
from f8sub.kernels.gemm.select import REFERENCE, Plan
from f8sub.linear.saved_input import RECOMPUTE
from f8sub.recipe import Recipe, get_recipe, recipe_names
from f8sub.weights.conversion import Conversion, LayerGuest
from f8sub.weights.weight import is_converted

CALL = "f8sub.convert_to_float8(model, recipe='tensorwise', filter_fn=lambda module, fqn: ..., float8_all_gather=True)"

MEANT = {
    "config": "recipe",
    "fp8_recipe": "recipe",
    "fp8_format": 'recipe=f8sub.get_recipe("delayed", fp8_format=...)',
    "emulate": 'backend="reference"',
    "precompute_float8_dynamic_scale_for_fsdp": "f8sub.precompute_scales(model) after every optimizer.step()",
    "module_filter_func": "filter_fn",
    **dict.fromkeys(
        (
            *(
                "exclude",
                "exclude_layers",
                "exclude_modules",
                "ignore",
                "ignored_layers",
                "modules_to_ignore",
            ),
            *("modules_to_not_convert", "skip_layers", "skip_modules"),
        ),
        "skip",
    ),
    "round_scales_to_power_of_2": 'recipe="rowwise" or "blockwise", or a recipe with f8sub.ScaleRule.POWER_OF_2',
    **dict.fromkeys(
        ("cast_config_input", "cast_config_weight", "cast_config_grad_output"),
        "recipe=f8sub.Recipe(...), with a format for each operand",
    ),
    **dict.fromkeys(
        ("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight", "use_fast_accum"),
        "recipe=f8sub.Recipe(...) of three f8sub.GemmSpec(fast_accum=...)",
    ),
    **dict.fromkeys(
        ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax", "interval"),
        'recipe=f8sub.get_recipe("delayed", ...), which has it',
    ),
    "power_of_2_scales": 'recipe=f8sub.get_recipe("blockwise", power_of_2_scales=...)',
    "save_original_input": 'keep_x="high_precision"',
}
"""Options of other libraries' calls, and what stands for each in f8sub's."""

NOT_NEEDED = {
    "pad_inner_dim": "f8sub fills up rows of x, and leaves a layer whose K or N it cannot take in high precision",
    "force_recompute_fp8_weight_in_bwd": "f8sub never saves an unsharded float8 weight for backward",
}
"""Options that f8sub does without, and why."""


NAMES = {
    "convert_to_float8_training": "f8sub.convert_to_float8(model)",
    "Float8LinearConfig": "f8sub.convert_to_float8(model, recipe=...)",
    "precompute_float8_dynamic_scale_for_fsdp": "f8sub.precompute_scales(model)",
    "WeightWithDynamicFloat8CastTensor": "a parameter of f8sub.Float8Linear, saved as a plain tensor",
    "CastConfig": "a format of f8sub.Recipe, or Recipe.with_high_precision(...)",
    "Float8GemmConfig": "f8sub.GemmSpec(fast_accum=...)",
    "Float8ColwiseParallel": "f8sub.tensor_parallel.Float8ColwiseParallel",
    "Float8RowwiseParallel": "f8sub.tensor_parallel.Float8RowwiseParallel",
    "PrepareFloat8ModuleInput": "f8sub.tensor_parallel.PrepareFloat8ModuleInput",
    "Linear": "an nn.Linear that f8sub.convert_to_float8(model) converts",
    "LayerNormLinear": "a norm and an nn.Linear under torch.compile",
    "LayerNormMLP": "a norm and nn.Linear layers under torch.compile",
    "GroupedLinear": "f8sub.grouped_linear",
    "fp8_autocast": "f8sub.autocast(recipe=, enabled=), and nothing around the usual forward",
    "Float8CurrentScaling": 'the recipe "tensorwise"',
    "Float8BlockScaling": 'the recipe "blockwise"',
    "MXFP8BlockScaling": 'the recipe "mxfp8"',
    "NVFP4BlockScaling": 'the recipe f8sub.get_recipe("nvfp4", stochastic_rounding=True, hadamard=True)',
    "DelayedScaling": 'the recipe f8sub.get_recipe("delayed", ...)',
    "CustomRecipe": "f8sub.Recipe",
    "quantized_model_init": "f8sub.convert_to_float8(model, primary_weights=True)",
    "fp8_model_init": "f8sub.convert_to_float8(model, primary_weights=True)",
    "FusedAdam": "f8sub.optim.MasterWeights(torch.optim.AdamW(...))",
    "Float8Converter": "f8sub.titan.Float8Converter",
    "titan": "a module that is imported by itself: import f8sub.titan",
}
"""Names of other libraries' modules, as docs/migration.md has them, and what stands for each in f8sub."""


def no_attribute(name: str, known: Iterable[str]) -> AttributeError | ImportError:
    """Return the error for an attribute that f8sub lacks, with what stands for a foreign name, or the nearest names.

    Args:
        name: that was asked for.
        known: f8sub's own.
    """
    # Another library's name has a counterpart here; a misspelt one of f8sub's has near names.
    meant = NAMES.get(name)
    return errors.no_attribute("f8sub", name, known, meant)


def refuse_foreign(model: Any, recipe: Any, unknown: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise a ``Float8ConfigError`` that says what stands here for the arguments of another library's call.

    Args:
        model: what was given as one.
        recipe: what was given as one, torchao's filter function or config for instance.
        unknown: keywords that ``convert_to_float8`` does not have.
        options: those that it has.
    """
    for name, value in unknown.items():
        meant = MEANT.get(name) or next(iter(nearest(name, options)), None)
        advice = f"use {meant}; " if meant else ""
        if name in NOT_NEEDED:
            advice = f"leave it out: {NOT_NEEDED[name]}; "
        raise Float8ConfigError(
            f"convert_to_float8 has no option {name!r}, got {name}={shown(value)}: {advice}f8sub's call is {CALL}"
        )
    if not isinstance(model, torch.nn.Module):
        raise Float8ConfigError(
            f"convert_to_float8 takes a model, a torch.nn.Module, got {shown(model)}: f8sub's call is {CALL}"
        )
    if recipe is None or isinstance(recipe, str | Recipe | Mapping):
        return
    # torchao's second argument is a filter function, and nothing else that is callable is given there.
    if callable(recipe):
        raise Float8ConfigError(
            "the second argument of convert_to_float8 is the recipe, got a function; a filter is given by name: "
            f"{CALL}"
        )
    raise Float8ConfigError(
        f"recipe is one of {recipe_names()} or an f8sub.Recipe, got {shown(recipe)}: f8sub's call is {CALL}"
    )


ADVICE = {
    "loosen skip, filter_fqns or filter_fn": ("skip=", "filter_fqns=", "filter_fn"),
    "give recipe a pattern that matches": ("no pattern of recipe",),
    "pass skip_defaults=False": ("(default)",),
    "pass a smaller min_dim": ("min_dim=",),
    "fill the dimensions up to multiples of 16": ("have to be multiples of",),
    "leave out the other library's conversion": ("convert a model by one library",),
}
"""What to do where no layer was converted, by words of the reasons."""


def why_nothing(model: torch.nn.Module, strict: bool) -> str:
    """Describe why no layer of a model was converted, and what to do; ``strict`` where that is an error."""
    classes = {other.detail.partition(":")[0]: other.reason for other in other_weights(model)}
    whys = [f"{name} ({reason})" if reason else name for name, reason in classes.items()]
    others = f"; nor does f8sub convert its {', '.join(whys)}" if whys else ""
    # By reason, and within it by kind of layer: a model of 80 blocks gets one line for each reason.
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    count = 0
    for fqn, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            count += 1
            reasons[getattr(module, SKIP_REASON)][kind_of(fqn or "(root)")].append(fqn or "(root)")
    if not count:
        return f"the model has no nn.Linear layer{others}" + (
            ". Pass strict=False if that is as it should be" if strict else ""
        )
    listed = "; ".join(
        f"{', '.join(map(name_of, kinds.values()))}: {reason}" for reason, kinds in reasons.items()
    )
    advice = [
        what for what, words in ADVICE.items() if any(word in reason for reason in reasons for word in words)
    ]
    do = ", ".join([*advice, *["or pass strict=False"] * strict]).removeprefix("or ")
    found = f"0 of {count} linear layer{'s' * (count > 1)} ({listed}){others}"
    return f"{found}. {do[0].upper()}{do[1:]}" if do else found


def nothing_converted(model: torch.nn.Module, strict: bool) -> None:
    """Raise a ``Float8ConfigError`` that says why; warn where not ``strict``, or where all was converted before."""
    if count := sum(map(is_converted, model.modules())):
        warnings.warn(
            "convert_to_float8 was called again and found nothing more to convert; the model has "
            f"{count} module{'s' * (count > 1)} in float8",
            Float8Warning,
            stacklevel=4,
        )
        return
    message = f"convert_to_float8 found nothing to convert: {why_nothing(model, strict)}"
    if strict:
        raise Float8ConfigError(message)
    # So that precompute_scales, which a script calls all the same, does nothing instead of raising.
    Conversion.see(model)
    warnings.warn(message, Float8Warning, stacklevel=4)


def reencodes(recipe: Recipe) -> bool:
    """Return whether "recompute" gives other data than "float8": re-scaled, where no byte transpose will do."""
    rowwise, columnwise = recipe.formats("x")
    return not (rowwise is None or columnwise is None or rowwise.tile.is_transpose_of(columnwise.tile))


def warn_of_reencoding(chosen: Sequence[Chosen]) -> None:
    """Warn once where layers that are to be converted keep x so."""
    rounded = [
        f"{layer.fqn} ({layer.plan.recipe.name})"
        for layer in chosen
        if layer.keep_x == RECOMPUTE and reencodes(layer.plan.recipe)
    ]
    if rounded:
        warnings.warn(
            f"keep_x='recompute' re-scales the codes of x by columns in {first_and_more(rounded)}: "
            "what falls below a column's smallest code is rounded again or lost; keep_x='high_precision' or 'auto' "
            "keeps the numbers",
            Float8Warning,
            stacklevel=4,
        )


REFERENCE_TIMES_BF16 = 30
"""How many times as long as bf16 a layer takes on a GPU whose GEMMs are the reference's.

Source: ``scripts/bench/small_layers.py`` on an H200, 2026-11-23, forward and backward of 4096x4096 with 8192 tokens in
eager code: 30 times with e8m0 scales of 1x32, 37 times with e2m1.
"""


def reference_warning(plans: Iterable[Plan]) -> str | None:
    """Return the warning for users whose GEMMs run by the reference on a GPU unasked; None where no GEMM does."""
    slow = {
        plan.recipe.name: plan
        for plan in plans
        if plan.device.type not in ("cpu", "meta")
        and plan.backend != REFERENCE
        and REFERENCE in plan.gemms.values()
    }
    if not slow:
        return None
    listed = "; ".join(
        f"{', '.join(gemm for gemm, used in plan.gemms.items() if used == REFERENCE)} of recipe {name!r}"
        for name, plan in slow.items()
    )
    device = next(iter(slow.values())).device
    plans_there = (Plan.make(get_recipe(name), device) for name in recipe_names())
    # Which recipes have kernels depends on the device and the torch: ask the same selection that layers use.
    native = [plan.recipe.name for plan in plans_there if REFERENCE not in plan.gemms.values()]
    return (
        f"{listed}: no native float8 GEMM on {_shown(device)}, so the reference backend multiplies, which takes about "
        f"{REFERENCE_TIMES_BF16} times as long as bf16. Native there: {', '.join(native) or 'no recipe'}. "
        f"backend={REFERENCE!r} says that you want this, and ends the warning"
    )


def _shown(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (SM {major}.{minor}, CUDA {torch.version.cuda})"


class ReferenceWarning(LayerGuest):
    """Warns once per conversion of GEMMs that run by the reference on a GPU."""

    def __init__(self) -> None:
        self._warned = False

    @override
    def planned(self, conversion: Conversion, plans: Sequence[Plan]) -> None:
        if not self._warned and (message := reference_warning(plans)):
            # Layers that move to a device later are planned again.
            self._warned = True
            warnings.warn(message, Float8Warning, stacklevel=4)
