"""Selects which layers are converted, and with which recipe: one reason for every layer that is not.

Layers are named by glob patterns; a pattern that does nothing is a warning, which says what was meant.
"""

import difflib
import fnmatch
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from f8sub.convert.class_swap import extensions
from f8sub.convert.defaults import default_reasons, too_small
from f8sub.errors import Float8ConfigError, Float8Warning, shown, unknown
from f8sub.formats import HIGH_PRECISION, MULTIPLE
from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.saved_input import AUTO, KEEP_X
from f8sub.recipe import Recipe, get_recipe
from f8sub.weights.weight import is_of_tensors


def kind_of(fqn: str) -> str:
    """Return the name with ``*`` for every number: equal layers of a stack of blocks have one kind."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def kinds(fqns: Iterable[str]) -> list[str]:
    """Return each kind once, and the name of a layer that is the only one of its kind."""
    found: dict[str, list[str]] = {}
    for fqn in fqns:
        found.setdefault(kind_of(fqn), []).append(fqn)
    return list(map(name_of, found.values()))


def name_of(fqns: list[str]) -> str:
    """Return the name of one layer, or the kind of several."""
    return fqns[0] if len(fqns) == 1 else kind_of(fqns[0])


def matches(pattern: str, fqn: str) -> bool:
    """Return whether a glob pattern matches ``fqn`` as a run of whole segments; all options that take patterns ask it.

    ``"lm_head"`` matches ``model.lm_head`` and ``lm_head.proj``, never ``lm_head2``; ``"layers.0"`` matches
    ``model.layers.0.mlp.up`` and not ``model.layers.01``; ``"layers.*.up"`` not ``layers.0.mlp.up``.
    """
    # Segment by segment, so that a * never reaches over a dot.
    segments, parts = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(s, p) for s, p in zip(run, parts, strict=True))
        for run in runs_of(segments, len(parts))
    )


def runs_of(segments: list[str], length: int) -> list[list[str]]:
    """Return every run of so many neighbours among the segments of a name."""
    return [segments[i : i + length] for i in range(len(segments) - length + 1)]


FilterFn = Callable[[torch.nn.Module, str], bool]

RecipeOrName = Recipe | str

Choice = TypeVar("Choice")

ALREADY = "already converted"

IN_FLOAT8 = (None, ALREADY)
"""What ``Selection.reasons`` says of layers that are converted now, or were before."""


class LayerChoices(Generic[Choice]):
    """Holds an option of each layer: one for all, or that of the first glob pattern that matches its name.

    Args:
        option: what is chosen, for errors.
        given: the choice, or a mapping from patterns (see ``matches``) to choices.
        read: turns what was given into a choice.
        other: the choice of a layer that no pattern matches.

    Raises:
        Float8ConfigError: a key that is no pattern, or what ``read`` raises.
    """

    def __init__(self, option: str, given: Any, read: Callable[[Any], Choice], other: Choice) -> None:
        self.option, self._other = option, other
        self.is_for_all = not isinstance(given, Mapping)
        # One choice for all is a pattern that matches every name.
        by_pattern = {"*": given} if self.is_for_all else given
        if unknown := [pattern for pattern in by_pattern if not isinstance(pattern, str)]:
            raise Float8ConfigError(
                f"{option} for layers goes by glob patterns over their names, got {unknown[0]!r}; give its name, as "
                "model.named_modules() has it"
            )
        self.by_pattern = {pattern: read(chosen) for pattern, chosen in by_pattern.items()}

    def of(self, fqn: str) -> Choice:
        """Return a layer's choice."""
        pattern = self.pattern_of(fqn)
        return self._other if pattern is None else self.by_pattern[pattern]

    def pattern_of(self, fqn: str) -> str | None:
        """Return the pattern that decides for a layer; None where none matches."""
        return next((pattern for pattern in self.by_pattern if matches(pattern, fqn)), None)


def layer_recipes(recipe: RecipeOrName | Mapping[str, RecipeOrName]) -> LayerChoices[Recipe | None]:
    """Return the recipe of each layer; None where no pattern matches, and the layer stays in high precision.

    Raises:
        Float8ConfigError: an unknown recipe, or a key that is no pattern.
    """
    return LayerChoices("recipe", recipe, get_recipe, None)


def layer_keep_x(keep_x: str | Mapping[str, str]) -> LayerChoices[str]:
    """Return what each layer keeps of x, one of ``KEEP_X``; "auto" where no pattern matches.

    Raises:
        Float8ConfigError: another word, or a key that is no pattern.
    """

    def read(chosen: Any) -> str:
        if chosen not in KEEP_X:
            raise unknown("keep_x", chosen, KEEP_X)
        return str(chosen)

    return LayerChoices("keep_x", keep_x, read, AUTO)


@dataclass(frozen=True)
class Selection:
    """Holds a caller's choice of the layers that ``convert_to_float8`` converts, and of their recipes.

    Attributes:
        recipes: which recipe each layer would get.
        kept: what each would keep of x.
        skip: this and what follows as ``convert_to_float8`` takes them; ``defaults`` is its ``skip_defaults``.

    Raises:
        Float8ConfigError: a pattern that is no string, a filter that takes no module and name, or a limit that is no
            number of features.
    """

    recipes: LayerChoices[Recipe | None]
    kept: LayerChoices[str]
    skip: Sequence[str] = ()
    filter_fqns: Sequence[str] = ()
    filter_fns: Sequence[FilterFn] = ()
    defaults: bool = True
    min_dim: int | None = None

    def __post_init__(self) -> None:
        for option, given in (("skip", self.skip), ("filter_fqns", self.filter_fqns)):
            patterns = given if isinstance(given, Iterable) else [given]
            if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
                raise Float8ConfigError(f"{option} takes patterns of layers' names, got {wrong[0]!r}")
        for function in self.filter_fns:
            _check_filter(function)
        if self.min_dim is not None and (type(self.min_dim) is not int or self.min_dim < 0):
            raise Float8ConfigError(f"min_dim is a number of features or None, got {self.min_dim!r}")

    def reasons(
        self, modules: Mapping[str, torch.nn.Module], linears: Mapping[str, torch.nn.Linear]
    ) -> dict[str, str | None]:
        """Return why each linear layer stays as it is, by name; None where it is converted."""
        by_default = default_reasons(modules, linears) if self.defaults else {}
        found = {fqn: self._why_not(module, fqn, by_default.get(fqn)) for fqn, module in linears.items()}
        if self.defaults or self.min_dim is not None:
            left = {fqn: linears[fqn] for fqn, reason in found.items() if reason is None}
            # After all other reasons: the share of small layers is of those that would be converted.
            found |= too_small(left, self.min_dim)
        # A weight is gathered as float8 for all of its owners or for none.
        owners: dict[int, list[str]] = defaultdict(list)
        for fqn, module in modules.items():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)].append(fqn)
        float8 = {fqn for fqn, reason in found.items() if reason in IN_FLOAT8}
        for fqn in [fqn for fqn, reason in found.items() if reason in (None, by_default.get(fqn))]:
            could = float8 if found[fqn] is None else linears  # those left by default could be converted
            if apart := [owner for owner in owners[id(linears[fqn].weight)] if owner not in could]:
                found[fqn] = f"its weight is tied to {apart[-1]}, which stays in high precision"
        return found

    def why_not_asked(self, module: torch.nn.Module, fqn: str, by_default: str | None = None) -> str | None:
        """Return why a caller's options leave a module as it is; None where they do not."""
        if pattern := next((p for p in self.skip if matches(p, fqn)), None):
            return f"skip={pattern!r}"
        # torchao's and torchtitan's rule: any part of the name, not whole segments.
        if part := next((p for p in self.filter_fqns if p in fqn), None):
            return f"filter_fqns={part!r}"
        if by_default is not None:
            return by_default
        if not all(filter_fn(module, fqn) for filter_fn in self.filter_fns):
            return "filter_fn said no"
        if self.recipes.of(fqn) is None:
            return "no pattern of recipe matches it"
        return None

    def _why_not(self, module: torch.nn.Linear, fqn: str, by_default: str | None) -> str | None:
        if isinstance(module, Float8Linear):
            return ALREADY
        if reason := why_not_class(module):
            return reason
        if reason := self.why_not_asked(module, fqn, by_default):
            return reason
        sizes = module.in_features, module.out_features
        if any(size % MULTIPLE or not size for size in sizes):
            return f"in_features={sizes[0]}, out_features={sizes[1]}: both have to be multiples of {MULTIPLE}"
        return why_not_weight(module.weight)


def why_not_class(module: torch.nn.Linear) -> str | None:
    """Return why a linear layer's class cannot become a float8 one; None where it can.

    What decides is whose forward runs: a subclass that inherits nn.Linear's is converted with all that it adds.
    """
    name = type(module).__name__
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return (
            "nn.MultiheadAttention reads this weight itself and never calls the layer; for float8 write attention "
            "with nn.Linear layers and F.scaled_dot_product_attention"
        )
    # prune and the older weight_norm and spectral_norm of torch.nn.utils make the weight in a hook before forward.
    if torch.nn.utils.parametrize.is_parametrized(module) or "weight" not in module._parameters:
        return "its weight is parametrized"
    if module.weight.dim() != 2:
        return f"its weight is of shape {tuple(module.weight.shape)}, several projections in one"
    # An instance's own forward runs instead of any class's.
    if "forward" in vars(module):
        return f"something replaced the forward of this {name}; convert first, then wrap its forward"
    if type(module).__module__.startswith("torchao."):
        return f"it is torchao's {name}; convert a model by one library"
    if type(module).forward is not torch.nn.Linear.forward and type(module) not in extensions:
        return f"its class {name} overrides nn.Linear's forward"
    return None


def _check_filter(function: Any) -> None:
    """Raise Float8ConfigError for a filter that cannot be called with a module and its name."""
    said = "filter_fn is called with a layer and its name, (module, fqn), and returns True to convert it"
    if not callable(function):
        raise Float8ConfigError(f"{said}; got {shown(function)}")
    try:
        parameters = inspect.signature(function)
    except ValueError:  # a builtin may not say what it takes
        return
    try:
        parameters.bind(None, "")
    except TypeError as error:
        raise Float8ConfigError(f"{said}; got a function of {parameters}") from error


def why_not_weight(weight: torch.Tensor, name: str = "its weight") -> str | None:
    """Return why a weight cannot be quantized, which takes values in high precision; None where it can."""
    if weight.dtype not in HIGH_PRECISION:
        return f"{name} is {weight.dtype}"
    kind = type(weight)
    if is_of_tensors(weight):
        return (
            f"{name} is a {kind.__module__}.{kind.__name__}, a tensor of other tensors, such as one that was quantized "
            "for inference; convert the model with its weights in high precision"
        )
    return None


MOST_SUGGESTIONS = 3
"""Names that a warning about a pattern suggests."""


def idle_patterns(
    names: Sequence[str],
    reasons: Mapping[str, str | None],
    selection: Selection,
    linears: Container[str],
) -> tuple[str, ...]:
    """Return patterns that do nothing, after a warning about those of each option.

    Args:
        names: of all modules.
        reasons: why each layer is not converted, one of ``IN_FLOAT8`` where it is.
        selection: what the caller said.
        linears: the names of the linear layers, which alone have a ``keep_x``.
    """
    converted = [fqn for fqn, reason in reasons.items() if reason in IN_FLOAT8]
    others = {fqn: str(reason) for fqn, reason in reasons.items() if reason not in IN_FLOAT8}
    unmatched = [("skip", p) for p in selection.skip if not any(matches(p, fqn) for fqn in names)]
    unmatched += [("filter_fqns", p) for p in selection.filter_fqns if not any(p in fqn for fqn in names)]
    found = [_with_nearest(f"{option}={p!r} matches nothing", p, names) for option, p in unmatched]
    if found:
        warnings.warn("; ".join(found), Float8Warning, stacklevel=4)
    kept = [fqn for fqn in converted if fqn in linears]
    for choices, layers in ((selection.recipes, converted), (selection.kept, kept)):
        # A pattern that matches and never decides is idle, too: another one before it takes all of its layers.
        busy = set(map(choices.pattern_of, layers))
        patterns = [pattern for pattern in choices.by_pattern if pattern not in busy]
        if choices.is_for_all or not patterns:
            continue
        idle = [f"{pattern!r} {_why_idle(pattern, choices, layers, others)}" for pattern in patterns]
        found += idle
        in_order = any(EARLIER in why for why in idle)
        warnings.warn(
            f"patterns of {choices.option} that decide for no layer: {', '.join(idle)}; "
            + (
                "the first that matches a layer's name decides, so put the finer ones first"
                if in_order
                else "leave them out, or correct what they name"
            ),
            Float8Warning,
            stacklevel=4,
        )
    return tuple(found)


EARLIER = "matches only layers that an earlier pattern matches too"
"""Why a pattern is idle that another order would help."""


def _why_idle(
    pattern: str, choices: LayerChoices[Any], converted: Sequence[str], others: Mapping[str, str]
) -> str:
    # Those that it would decide for come first: no order of the patterns gives it others.
    left = next((fqn for fqn in others if choices.pattern_of(fqn) == pattern), None)
    taken = next((fqn for fqn in converted if matches(pattern, fqn)), None)
    if left is not None:
        apart = f" and that {choices.pattern_of(taken)!r} does not take" if taken is not None else ""
        return f"matches no layer that is converted{apart} ({left}: {others[left]})"
    if taken is not None:
        return f"{EARLIER} ({choices.pattern_of(taken)!r} {taken})"
    return _with_nearest("matches no linear layer", pattern, [*converted, *others])


def _with_nearest(message: str, pattern: str, names: Iterable[str]) -> str:
    """Append to a message about a pattern the runs of segments of ``names`` that look like it."""
    length = len(pattern.split("."))
    # By kind, or a model of 100 equal blocks would have its names compared 100 times.
    kinds = dict.fromkeys(map(kind_of, names))
    runs = dict.fromkeys(".".join(run) for kind in kinds for run in runs_of(kind.split("."), length))
    found = difflib.get_close_matches(pattern, list(runs), MOST_SUGGESTIONS)
    return message + (f" (nearest: {', '.join(found)})" if found else "")
