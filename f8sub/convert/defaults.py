"""Which layers stay in high precision unless a user says otherwise: heads, routers, adapters, small layers."""

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import torch

HEAD, ROUTER, ADAPTER = "output head (default)", "router of experts (default)", "LoRA adapter (default)"
"""The reasons, as reports show them."""

ALWAYS_HEADS = ("lm_head",)
"""Output heads wherever they stand: nothing else has this name."""

HEADS = (
    "output",  # torchtitan 0.2, Llama's reference code
    "head",  # timm, GPT-style code
    "heads",  # torchvision
    "score",  # transformers' *ForSequenceClassification of decoders
    "classifier",  # of encoders
    "classification_head",  # of encoder-decoders
    "embed_out",  # GPT-NeoX
    "value_head",
    "v_head",  # TRL
    "reward_head",
)
"""Names of output heads that other layers have as well; ``output_heads`` says when they are one."""

OWN_NAMES = ("output",)
"""Of these, those that have to be the layer's own name: ``output.dense`` is a layer of BERT's blocks."""

ROUTERS = ("router",)
"""transformers and torchtitan call what chooses a mixture's experts so, or hold it in a module of that name."""

GATES = ("gate", "gating", "*_gate")
"""Names of routers that layers of a feed-forward have as well: they are routers beside experts."""

ADAPTERS = ("lora_[ABab]", "lora_up", "lora_down", "lora_embedding_*", "lora_magnitude_vector")
"""PEFT's names, torchtitan's and diffusers'."""

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


def default_reasons(model: torch.nn.Module, linears: Mapping[str, torch.nn.Linear]) -> dict[str, str]:
    """The linear layers that stay in high precision for their name and place, with the reason of each.

    Args:
        model: the model.
        linears: all of its linear layers by name, in the model's order.
    """
    modules = dict(model.named_modules())
    found = dict.fromkeys(output_heads(modules, linears), HEAD)
    for fqn in linears:
        segments = fqn.split(".")
        if any(_is_one_of(segment, ADAPTERS) for segment in segments):
            found[fqn] = ADAPTER
        elif any(_is_router(modules, segments, i) for i in range(len(segments))):
            found[fqn] = ROUTER
    return found


def too_small(linears: Iterable[torch.nn.Linear], min_dim: int | None) -> dict[torch.nn.Linear, str]:
    """The layers whose smaller dimension is below ``min_dim``, with the reason of each.

    Args:
        linears: all layers that would be converted otherwise.
        min_dim: None for ``MIN_DIM``, unless ``is_small`` says that the model is one to try float8 with: then none of
            its layers is left out for its size.
    """
    sizes = {linear: (linear.in_features, linear.out_features) for linear in linears}
    if min_dim is None and is_small(sizes.values()):
        return {}
    limit, why = (MIN_DIM, " (default)") if min_dim is None else (min_dim, "")
    reason = f"smaller dimension below min_dim={limit}{why}"
    return {linear: reason for linear, size in sizes.items() if min(size) < limit}


def is_small(sizes: Collection[tuple[int, int]]) -> bool:
    """Whether more than ``MOST_SMALL`` of the FLOPs are in layers whose smaller dimension is below ``MIN_DIM``.

    Args:
        sizes: features in and out of each layer.
    """
    below = sum(math.prod(size) for size in sizes if min(size) < MIN_DIM)
    return below > sum(map(math.prod, sizes)) * MOST_SMALL


def output_heads(
    modules: Mapping[str, torch.nn.Module], linears: Mapping[str, torch.nn.Linear]
) -> Iterable[str]:
    """Names of the layers that make a model's outputs.

    A layer is one where a segment of its name is ``lm_head``; or is one of ``HEADS``, and

    - no other linear layer comes after that module among those of its parent, other heads excepted,
    - it is not a part of a numbered block: of a list, or of a Sequential that has several of one class, and
    - the layer's outputs are not what the next layer of the head takes: hidden layers of a head are no outputs.

    Args:
        modules: all modules by name.
        linears: all linear layers by name, in the model's order.
    """
    for fqn in linears:
        segments = fqn.split(".")
        for i, segment in enumerate(segments):
            if segment in ALWAYS_HEADS or (
                segment in HEADS
                and (segment not in OWN_NAMES or i == len(segments) - 1)
                and not _in_a_block(modules, segments[:i])
                and _is_last(linears, segments[:i], segment)
                and _makes_outputs(linears, ".".join(segments[: i + 1]), fqn)
            ):
                yield fqn
                break


def _is_last(linears: Mapping[str, torch.nn.Linear], parent: Sequence[str], name: str) -> bool:
    """Whether no layer of the parent comes after those of its child ``name``, other heads excepted."""
    depth = len(parent)
    children = [
        segments[depth]
        for segments in (fqn.split(".") for fqn in linears)
        if segments[:depth] == list(parent) and len(segments) > depth
    ]
    after = children[len(children) - children[::-1].index(name) :]
    return all(child in HEADS or child in ALWAYS_HEADS for child in after)


def _makes_outputs(linears: Mapping[str, torch.nn.Linear], head: str, fqn: str) -> bool:
    """Whether no layer of the head takes what the layer ``fqn`` of it makes, told by their sizes."""
    own = [name for name in linears if name == head or name.startswith(f"{head}.")]
    following = dict(pairwise(own)).get(fqn)
    return following is None or linears[following].in_features != linears[fqn].out_features


def _in_a_block(modules: Mapping[str, torch.nn.Module], segments: Sequence[str]) -> bool:
    """Whether a module is in a numbered block: of a list, or of a Sequential that has several of one class."""
    for i, segment in enumerate(segments):
        if segment.isdigit():
            container, block = modules[".".join(segments[:i])], modules[".".join(segments[: i + 1])]
            alike = [child for child in container.children() if type(child) is type(block)]
            if not isinstance(container, torch.nn.Sequential) or len(alike) > 1:
                return True
    return False


def _is_router(modules: Mapping[str, torch.nn.Module], segments: Sequence[str], i: int) -> bool:
    """Whether the module that ends with segment ``i`` chooses experts: by its name, or as a gate beside them."""
    if segments[i] in ROUTERS:
        return True
    if not _is_one_of(segments[i], GATES):
        return False
    return any("expert" in name for name, _ in modules[".".join(segments[:i])].named_children())


def _is_one_of(segment: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(segment, pattern) for pattern in patterns)
