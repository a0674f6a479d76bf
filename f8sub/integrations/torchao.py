"""f8sub in place of torchao's float8 training, for trainers that call ``torchao.float8.convert_to_float8_training``.

accelerate's ``mixed_precision="fp8"``, axolotl's ``fp8: true`` and NeMo AutoModel's ``fp8:`` do. One call before them::

    f8sub.integrations.torchao.take_over()
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ClassVar

import torch
import torchao.float8
from torchao.float8 import CastConfig, Float8LinearConfig, Float8LinearRecipeName
from torchao.float8.config import ScalingGranularity, ScalingType

import f8sub
from f8sub.integrations.one_line import HIGH_PRECISION, attend_once, refuse_unknown_attention

__all__ = ["TakenOver", "take_over"]

_FLAGS = ("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate", "force_recompute_fp8_weight_in_bwd")
"""Fields that are no part of a recipe. The last has no effect in torchao."""

_GEMMS = (
    ("input", "weight", "output"),
    ("grad_output", "weight_for_grad_input", "grad_input"),
    ("grad_output_for_grad_weight", "input_for_grad_weight", "grad_weight"),
)
"""Of fprop, dgrad and wgrad the casts of operands a and b, and torchao's name for the GEMM."""

_FILLED_UP_TO = 16
"""What torchao pads both dimensions to a multiple of. Source: ``torchao.float8.float8_utils.pad_tensor_for_matmul``."""

_RULED = "round_scales_to_power_of_2"


def _recipe(config: Float8LinearConfig) -> f8sub.Recipe:
    """Return f8sub's recipe of the same name, or one with the same formats.

    Raises:
        Float8ConfigError: a field that f8sub does not know, or formats that no recipe of f8sub has.
    """
    known = {*_FLAGS, _RULED, *(f"cast_config_{cast}" for *casts, _ in _GEMMS for cast in casts)}
    known.update(f"gemm_config_{gemm}" for *_, gemm in _GEMMS)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in known and value != field.default:
            raise f8sub.Float8ConfigError(
                f"Float8LinearConfig({field.name}={value!r}) has no counterpart in f8sub; leave it at "
                f"{field.default!r}, or convert with f8sub.convert_to_float8 and a recipe"
            )
    # Flags are options of a conversion here, and a recipe is compared without them.
    plain = dataclasses.replace(config, **dict.fromkeys(_FLAGS, False))
    for name in Float8LinearRecipeName:
        if plain == Float8LinearConfig.from_recipe_name(name):
            return f8sub.get_recipe(name.value)
    rule = f8sub.ScaleRule.POWER_OF_2 if getattr(config, _RULED) else f8sub.ScaleRule.FLOAT
    fprop, dgrad, wgrad = (
        f8sub.GemmSpec(
            a=_format(getattr(config, f"cast_config_{a}"), rule),
            b=_format(getattr(config, f"cast_config_{b}"), rule),
            fast_accum=getattr(config, f"gemm_config_{theirs}").use_fast_accum,
        )
        for a, b, theirs in _GEMMS
    )
    return f8sub.Recipe(name="a config of torchao", fprop=fprop, dgrad=dgrad, wgrad=wgrad)


def _format(cast: CastConfig, rule: f8sub.ScaleRule) -> f8sub.Float8Format | None:
    """Return the format of an operand; torchao's axis is the one that a GEMM contracts, so a row here."""
    if cast.scaling_type is ScalingType.DISABLED:
        return None
    rows = f8sub.ALL if cast.scaling_granularity is ScalingGranularity.TENSORWISE else 1
    return f8sub.Float8Format(cast.target_dtype, f8sub.Tile(rows, f8sub.ALL), rule)


def _refuse_padding(model: torch.nn.Module, chosen: Callable[[torch.nn.Module, str], bool]) -> None:
    """Raise a Float8ConfigError where torchao would fill up a layer's dimensions, which f8sub does not."""
    for fqn, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not chosen(module, fqn):
            continue
        if module.in_features % _FILLED_UP_TO or module.out_features % _FILLED_UP_TO:
            raise f8sub.Float8ConfigError(
                f"{fqn}: Float8LinearConfig(pad_inner_dim=True) fills up {module.in_features} -> "
                f"{module.out_features} to multiples of {_FILLED_UP_TO}, and f8sub does not; leave the layer out by "
                "the filter function, or leave pad_inner_dim at False to have it stay in high precision"
            )


def convert_to_float8_training(
    module: torch.nn.Module,
    *,
    module_filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> torch.nn.Module:
    """Convert a model as torchao's function of this name is asked to, and print what is in float8 on rank 0.

    As there, all linear layers convert that the filter takes, output heads too, and a model without any stays as it is.
    """
    config = Float8LinearConfig() if config is None else config
    if config.pad_inner_dim:
        _refuse_padding(module, module_filter_fn or (lambda module, fqn: True))
    f8sub.convert_to_float8(
        module,
        _recipe(config),
        filter_fn=module_filter_fn,
        skip_defaults=False,
        strict=False,
        float8_all_gather=config.enable_fsdp_float8_all_gather,
        backend="reference" if config.emulate else "auto",
        # As there: linear layers alone.
        experts=False,
    )
    attend_once(module, TakenOver.attention, emulated=config.emulate)
    _print(f"f8sub: {f8sub.conversion_report(module).summary}")
    return module


def precompute_float8_dynamic_scale_for_fsdp(module: torch.nn.Module) -> None:
    """Call ``f8sub.precompute_scales``."""
    f8sub.precompute_scales(module)


_NAMES = ("convert_to_float8_training", "precompute_float8_dynamic_scale_for_fsdp")
_THEIRS = {name: getattr(torchao.float8, name) for name in _NAMES}
_OURS = {name: globals()[name] for name in _NAMES}


def _replace(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Put functions in the place of others, wherever a module holds these; return the places."""
    swap = {id(old[name]): new[name] for name in _NAMES}
    places = []
    # A trainer that imported a function by its name holds that, whatever ``torchao.float8`` has in its place.
    for module_name, module in list(sys.modules.items()):
        if module_name == __name__ or not hasattr(module, "__dict__"):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in swap:
                setattr(module, name, swap[id(value)])
                places.append(f"{module_name}.{name}")
    return places


class TakenOver:
    """What ``take_over`` replaced; ``give_back()``, or leaving it as a context manager, puts torchao's functions back.

    Attributes:
        attention: what the models attend in, in this process, see ``take_over``.
        places: names by which torchao's functions were found, ``"torchao.float8.convert_to_float8_training"`` first.
    """

    attention: ClassVar[str] = HIGH_PRECISION

    def __init__(self, places: list[str]) -> None:
        self.places = sorted(places)

    def give_back(self) -> None:
        """Put torchao's functions back, wherever f8sub's are now; models that were converted stay in float8."""
        _replace(_OURS, _THEIRS)
        TakenOver.attention = HIGH_PRECISION

    def __enter__(self) -> "TakenOver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def __repr__(self) -> str:
        return f"f8sub takes the place of {', '.join(self.places) or 'nothing more'}"


def take_over(*, attention: str = HIGH_PRECISION) -> TakenOver:
    """Have f8sub convert where a trainer calls torchao's ``convert_to_float8_training``, in this process.

        f8sub.integrations.torchao.take_over()
        accelerator = Accelerator(mixed_precision="fp8", ...)

    ``precompute_float8_dynamic_scale_for_fsdp`` becomes ``precompute_scales``. Both are replaced in every module that
    has imported them, and those that import them later find f8sub's. The fields of ``Float8LinearConfig`` have their
    meaning: recipes of the same name, any other formats that f8sub has, ``emulate`` as the reference backend, and
    ``enable_fsdp_float8_all_gather``. Rank 0 prints what was replaced, and the summary of each conversion.

    Args:
        attention: "float8" has the models that are converted run ``scaled_dot_product_attention`` over 8192 tokens and
            more by cuDNN's float8 kernels, which changes numbers; "float8_forward" with its backward in bf16; see
            ``f8sub.attend_in_float8``. With ``emulate`` sequences of any length, by the reference.

    Returns:
        TakenOver: what was replaced, and the way back.

    Raises:
        Float8ConfigError: no such ``attention``. Later, in the trainer's call: a field of another meaning, formats that
            no recipe of f8sub has, with ``pad_inner_dim`` a layer that torchao would fill up, or what
            ``attend_in_float8`` raises.
    """
    refuse_unknown_attention(attention)
    TakenOver.attention = attention
    taken = TakenOver(_replace(_THEIRS, _OURS))
    _print(repr(taken))
    return taken


def _print(text: str) -> None:
    # torchrun's variable, because trainers start the process group later.
    if os.environ.get("RANK", "0") == "0":
        print(text)  # noqa: T201  (what a call in the trainer's depths did is to be seen)
