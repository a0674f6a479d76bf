"""Selects layers that stay in high precision unless a user says otherwise: heads, routers, adapters, small layers."""

import fnmatch
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch

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
