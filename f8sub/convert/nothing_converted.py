"""What the error of a conversion that found nothing says: why each layer was left, and what to do."""

import warnings
from collections import defaultdict

import torch

from f8sub.convert.checks import SKIP_REASON, is_converted
from f8sub.convert.layer_kinds import kind_of, name_of
from f8sub.convert.other_weights import other_weights
from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.weights.conversion import Conversion

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
    """Why no layer of a model was converted, and what to do; ``strict`` where that is an error."""
    classes = {other.detail.partition(":")[0]: other.reason for other in other_weights(model)}
    whys = [f"{name} ({reason})" if reason else name for name, reason in classes.items()]
    others = f"; nor does f8sub convert its {', '.join(whys)}" if whys else ""
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
    found = f"0 of {count} linear layers ({listed}){others}"
    return f"{found}. {do[0].upper()}{do[1:]}" if do else found


def nothing_converted(model: torch.nn.Module, strict: bool) -> None:
    """A ``Float8ConfigError`` that says why; a warning where that is not ``strict``, or all was converted before."""
    if count := sum(map(is_converted, model.modules())):
        warnings.warn(
            f"convert_to_float8 was called again and found nothing more to convert: {count} layers are float8",
            Float8Warning,
            stacklevel=4,
        )
        return
    message = f"convert_to_float8 found nothing to convert: {why_nothing(model, strict)}"
    if strict:
        raise Float8ConfigError(message)
    Conversion.see(model)
    warnings.warn(message, Float8Warning, stacklevel=4)
