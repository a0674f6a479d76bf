"""Why a model has no layer to convert, and what to do."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from f8sub.convert.patterns import kind_of, name_of

SKIP_REASON = "float8_skip_reason"
"""Attribute that ``convert_to_float8`` leaves on a linear layer it did not convert."""

ADVICE = {
    "loosen skip, filter_fqns or filter_fn": ("skip=", "filter_fqns=", "filter_fn"),
    "give recipe a pattern that matches": ("no pattern of recipe",),
    "pass skip_defaults=False": ("(default)",),
    "pass a smaller min_dim": ("min_dim=",),
}
"""What to do where no layer was converted, by words of the reasons."""

classes_of_others: Callable[[torch.nn.Module], Sequence[str]] | None = None
"""Where a feature says which classes of a model multiply by weights and are no nn.Linear."""


def why_nothing(model: torch.nn.Module) -> str:
    """Why no layer of a model was converted, and what to do."""
    classes = dict.fromkeys(() if classes_of_others is None else classes_of_others(model))
    others = f"; nor does f8sub convert its {', '.join(classes)}" if classes else ""
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    count = 0
    for fqn, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            count += 1
            reasons[getattr(module, SKIP_REASON)][kind_of(fqn or "(root)")].append(fqn or "(root)")
    if not count:
        return f"the model has no nn.Linear layer{others}. Pass strict=False if that is as it should be"
    listed = "; ".join(
        f"{', '.join(map(name_of, kinds.values()))}: {reason}" for reason, kinds in reasons.items()
    )
    advice = [
        what for what, words in ADVICE.items() if any(word in reason for reason in reasons for word in words)
    ]
    do = ", ".join([*advice, "or pass strict=False"]).removeprefix("or ")
    return f"0 of {count} linear layers ({listed}){others}. {do[0].upper()}{do[1:]}"
