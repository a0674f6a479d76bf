"""Selects which layers are converted: one reason for every layer that is not.

Output heads, routers of experts, adapters and small layers stay in high precision unless a user says otherwise.
"""

import fnmatch
import functools
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from f8sub.convert.class_swap import extensions
from f8sub.convert.patterns import (
    EARLIER,
    LayerChoices,
    layer_keep_x,
    layer_recipes,
    matches,
    why_idle,
    with_nearest,
)
from f8sub.convert.products import without_shape
from f8sub.errors import Float8ConfigError, Float8Warning, shown
from f8sub.experts.seams import seam_of
from f8sub.formats import HIGH_PRECISION, MULTIPLE
from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.saved_input import AUTO
from f8sub.recipe import Recipe
from f8sub.recipes import DEFAULT
from f8sub.weights.weight import is_converted, is_of_tensors, parameters_of

FilterFn = Callable[[torch.nn.Module, str], bool]

ALREADY = "already converted"

IN_FLOAT8 = (None, ALREADY)
"""What ``Selection.reasons`` says of layers that are converted now, or were before."""

FOR_ALL, KEPT = layer_recipes(DEFAULT), layer_keep_x(AUTO)
"""The recipe of every layer, and what each keeps of x, where nobody asks for others."""


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

    recipes: LayerChoices[Recipe | None] = FOR_ALL
    kept: LayerChoices[str] = KEPT
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

    def reasons_of_experts(
        self, modules: Mapping[str, torch.nn.Module], wanted: bool
    ) -> dict[str, str | None]:
        """Return the same of all modules of experts; ``wanted`` says whether those are converted that can be."""
        found: dict[str, str | None] = {}
        for fqn, module in experts_of(modules).items():
            if is_converted(module):
                found[fqn] = ALREADY
            elif wanted:
                found[fqn] = self.why_not_asked(module, fqn) or why_not_experts(module)
            else:
                found[fqn] = "pass experts=True to convert"
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
        if not self.recipes.is_for_all and self.recipes.of(fqn) is None:
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


def experts_of(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the modules of experts by name: those that are converted, and those whose seam is known."""
    return {
        fqn: module
        for fqn, module in modules.items()
        if not isinstance(module, torch.nn.Linear) and (is_converted(module) or seam_of(module) is not None)
    }


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
    if is_lazy(module.weight):
        return without_shape(module, "weight")
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


def why_not_experts(module: torch.nn.Module) -> str | None:
    """Return why a module of experts cannot be converted; None where it can."""
    # A forward on the instance would hide that of the class it is swapped for.
    if "forward" in vars(module):
        return f"something replaced the forward of this {type(module).__name__}; convert first"
    seam = seam_of(module)
    names = () if seam is None else tuple(seam.weights_of(module))
    # Where ``register_experts`` was given no names, they are known now.
    if seam is not None and seam.down is not None and seam.down not in names:
        return f"register_experts: down={seam.down!r} is none of weights={names!r}"
    for name in names:
        weight = module._parameters.get(name)
        if weight is None and parameters_of(module, name):
            return f"{name} is parametrized"
        if weight is None or weight.dim() != 3:
            return f"{name} is no parameter of three dimensions, one matrix an expert"
        if any(size % MULTIPLE for size in weight.shape[1:]):
            return f"{name} is {tuple(weight.shape)}: the last two have to be multiples of {MULTIPLE}"
        if (reason := why_not_weight(weight, name)) is not None:
            return reason
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
    found = [with_nearest(f"{option}={p!r} matches nothing", p, names) for option, p in unmatched]
    if found:
        warnings.warn("; ".join(found), Float8Warning, stacklevel=4)
    kept = [fqn for fqn in converted if fqn in linears]
    for choices, layers in ((selection.recipes, converted), (selection.kept, kept)):
        # A pattern that matches and never decides is idle, too: another one before it takes all of its layers.
        busy = set(map(choices.pattern_of, layers))
        patterns = [pattern for pattern in choices.by_pattern if pattern not in busy]
        if choices.is_for_all or not patterns:
            continue
        idle = [f"{pattern!r} {why_idle(pattern, choices, layers, others)}" for pattern in patterns]
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


MIN_DIM = 512
"""A layer gains nothing in float8 where its smaller dimension is below this.

Source: ``scripts/bench/small_layers.py`` on an H200, 2026-11-23: bf16's time over float8's, forward and backward of
8192 tokens, the larger dimension 4096, recipes of one scale a tensor, a row, 1x128 and 256x256.

| smaller dimension | a layer by itself | beside a 4096x4096 layer that shares its x, both layers' time |
| --- | --- | --- |
| 256 | 0.51 to 0.68 | 0.96 to 1.00 |
| 512 | 0.70 to 0.93 | 0.99 to 1.02 |
| 1024 | 0.97 to 1.14 | 1.08 to 1.10 |

Layers of LoRA's size, 16 to 64, have 0.37 to 0.58 of bf16's speed.
"""

MOST_SMALL = 0.25
"""Share of a model's FLOPs in layers below ``MIN_DIM`` up to which these stay in high precision.

A model that has more of them there is small as a whole, such as those of tests and quick starts: whoever converts it
tries float8 out. In Qwen2-0.5B, whose k and v are the only small ones, they have 2 % of the linear layers' FLOPs; in
torchtitan's debug model of DeepSeek-V3, of 256 features, 48 %.
"""


class NameSegment(NamedTuple):
    """Names one segment, ``segments[at]``, of a linear layer's name; modules and linear layers of its model by name."""

    modules: Mapping[str, torch.nn.Module]
    linears: Mapping[str, torch.nn.Linear]
    segments: list[str]
    at: int

    def name(self, length: int) -> str:
        """Return the layer's name, or that of a module around it: the first ``length`` segments."""
        return ".".join(self.segments[:length])


def _is_beside_experts(place: NameSegment) -> bool:
    around = place.modules[place.name(place.at)]
    return any("expert" in name for name, _ in around.named_children())


def _makes_outputs(place: NameSegment) -> bool:
    """Return whether the module at that place is a head, and the layer computes its outputs.

    - The module is not a part of a numbered block: of a list, or of a Sequential that has several of one class. - No
    other linear layer comes after that module among those of its parent, other heads excepted. - The head's next layer
    does not take what the layer returns, told by their sizes: hidden layers are no outputs.
    """
    modules, linears, segments, at = place
    for i in (i for i in range(at) if segments[i].isdigit()):
        container, block = modules[place.name(i)], modules[place.name(i + 1)]
        same_type = [child for child in container.children() if type(child) is type(block)]
        if not isinstance(container, torch.nn.Sequential) or len(same_type) > 1:
            return False
    names = (name.split(".") for name in linears)
    children = [name[at] for name in names if name[:at] == segments[:at] and len(name) > at]
    # Siblings after this one: heads come last in a model, and layers of a block with such a name do not.
    if not HEADS.issuperset(children[len(children) - children[::-1].index(segments[at]) :]):
        return False
    head, fqn = place.name(at + 1), place.name(len(segments))
    own = [name for name in linears if name == head or name.startswith(f"{head}.")]
    following = dict(pairwise(own)).get(fqn)
    return following is None or linears[following].in_features != linears[fqn].out_features


class HighPrecisionRule(NamedTuple):
    """Describes layers that stay in high precision.

    Attributes:
        reason: as reports show it.
        names: glob patterns; one matches a segment of the layer's name.
        holds: whether the layer is one of those, by the place of that segment.
    """

    reason: str
    names: tuple[str, ...]
    holds: Callable[[NameSegment], bool] = lambda place: True


ADAPTER, ROUTER, HEAD = "LoRA adapter (default)", "router of experts (default)", "output head (default)"

_MOSTLY_HEADS = (
    "head",  # timm, GPT-style code
    "heads",  # torchvision
    "score",  # transformers' *ForSequenceClassification of decoders
    "classifier",  # of encoders
    "classification_head",  # of encoder-decoders
    "ctc_head",  # of speech encoders
    "embed_out",  # GPT-NeoX
    "value_head",
    "v_head",  # TRL
    "reward_head",
)

RULES = (
    # PEFT's names, torchtitan's and diffusers'; the last three are PEFT's kinds that have linear layers beside LoRA.
    HighPrecisionRule(
        ADAPTER,
        (
            *("lora_[ABab]", "lora_up", "lora_down", "lora_embedding_*", "lora_magnitude_vector"),
            *("lily_*", "peanut_*", "shadow_*"),
        ),
    ),
    # transformers and torchtitan call what chooses a mixture's experts so, or hold it in a module of that name.
    HighPrecisionRule(ROUTER, ("router",)),
    # Layers of a feed-forward have these names as well.
    HighPrecisionRule(ROUTER, ("gate", "gating", "*_gate"), _is_beside_experts),
    # Nothing else has these names; the second is of models that make sounds.
    HighPrecisionRule(HEAD, ("lm_head", "*_lm_head")),
    # torchtitan 0.2, Llama's reference code. It has to be the layer's own: BERT's blocks have an ``output.dense``.
    HighPrecisionRule(
        HEAD, ("output",), lambda place: place.at == len(place.segments) - 1 and _makes_outputs(place)
    ),
    # Other layers have these names as well.
    HighPrecisionRule(HEAD, _MOSTLY_HEADS, _makes_outputs),
)
"""The first that takes a layer says the reason."""

HEADS = {name for rule in RULES if rule.reason == HEAD for name in rule.names}

SIZES = "vocab_size", "num_embeddings"
"""What names in configurations end with that say how many words or codes there are."""

OUTPUTS = "get_output_embeddings"
"""What models of transformers answer with the module that makes their logits; None where they have none."""


def default_reasons(
    modules: Mapping[str, torch.nn.Module], linears: Mapping[str, torch.nn.Linear]
) -> dict[str, str]:
    """Return the linear layers that stay in high precision for their name and place, or as heads, with each reason.

    Args:
        modules: all modules of the model by name.
        linears: all of its linear layers by name, in the model's order.
    """
    found = {}
    for fqn in linears:
        segments = fqn.split(".")
        places = [NameSegment(modules, linears, segments, at) for at in range(len(segments))]
        taken_by = (
            rule
            for rule in RULES
            for place in places
            if _is_one_of(segments[place.at], rule.names) and rule.holds(place)
        )
        if rule := next(taken_by, None):
            found[fqn] = rule.reason
    heads = {*_declared_heads(modules), *_of_vocabularies(modules, linears)}
    return found | {fqn: HEAD for fqn, linear in linears.items() if linear in heads and fqn not in found}


def _declared_heads(modules: Mapping[str, torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the output heads that modules name themselves, whatever they call them."""
    for module in modules.values():
        if not callable(told := getattr(module, OUTPUTS, None)):
            continue
        try:
            head = told()
        except (AttributeError, NotImplementedError, TypeError):  # no head, or another method
            continue
        if isinstance(head, torch.nn.Module):
            yield from head.modules()


def _of_vocabularies(
    modules: Mapping[str, torch.nn.Module], linears: Mapping[str, torch.nn.Linear]
) -> Iterator[torch.nn.Linear]:
    """Yield the linear layers that make as many features as a vocabulary has, which no other linear layer takes.

    The configurations around a layer tell the sizes of vocabularies. Layers of numbered blocks are hidden ones.
    """
    taken = {linear.in_features for linear in linears.values()}
    sizes = {fqn: _vocabularies(module) for fqn, module in modules.items() if hasattr(module, "config")}
    for fqn, linear in linears.items():
        around = (size for name, size in sizes.items() if not name or fqn.startswith(f"{name}."))
        if linear.out_features in taken or any(segment.isdigit() for segment in fqn.split(".")):
            continue
        if any(linear.out_features in found for found in around):
            yield linear


def _vocabularies(module: torch.nn.Module) -> set[int]:
    """Return the sizes of vocabularies that a module's configuration has, and those inside of it."""
    found, left, seen = set(), [module.config], set()
    while left:
        config = left.pop()
        if id(config) in seen or not hasattr(config, "__dict__"):
            continue
        seen.add(id(config))
        for name, value in vars(config).items():
            # Types of tokens are no outputs; a codebook of images has embeddings in place of words.
            if isinstance(value, int) and name.endswith(SIZES) and name != "type_vocab_size":
                found.add(value)
            elif name.endswith("config"):
                left.append(value)
    return found


def too_small(linears: Mapping[str, torch.nn.Linear], min_dim: int | None) -> dict[str, str]:
    """Return the layers whose smaller dimension is below ``min_dim``, with the reason of each.

    Args:
        linears: all layers that would be converted otherwise, by name.
        min_dim: None for ``MIN_DIM``, unless ``is_small`` says that the model is one to try float8 with: then none of
            its layers is left out for its size.
    """
    sizes = {fqn: (linear.in_features, linear.out_features) for fqn, linear in linears.items()}
    if min_dim is None and is_small(sizes.values()):
        return {}
    limit, why = (MIN_DIM, " (default)") if min_dim is None else (min_dim, "")
    reason = f"smaller dimension below min_dim={limit}{why}"
    return {fqn: reason for fqn, size in sizes.items() if min(size) < limit}


def is_small(sizes: Collection[tuple[int, int]]) -> bool:
    """Return whether more than ``MOST_SMALL`` of the FLOPs are in layers whose smaller dimension is below ``MIN_DIM``.

    ``sizes`` are the features in and out of each layer.
    """
    # K * N stands for a layer's FLOPs: all layers see the same number of rows.
    below = sum(math.prod(size) for size in sizes if min(size) < MIN_DIM)
    return below > sum(map(math.prod, sizes)) * MOST_SMALL


@functools.cache
def _is_one_of(segment: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(segment, pattern) for pattern in patterns)
