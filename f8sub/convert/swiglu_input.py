"""keep_swiglu_input_in_float8: gate and up are rounded to float8, so that backward needs one byte of each element.

[Note] SwiGLU's backward reads gate and up, the two widest results of a Llama block. A forward hook of their layers
rounds them as soon as they are made, and gradients pass as if it had not. What is computed from them, in forward and
again in backward, is then a function of the codes. So compiled code saves the codes, and a product whose codes are
saved is not multiplied again under selective checkpointing.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from f8sub.convert.patterns import matches
from f8sub.errors import Float8ConfigError, Float8Warning, refuse_other_than_a_module
from f8sub.formats import ALL, Float8Format, Operand, ScaleRule, Tile, present
from f8sub.kernels import scales
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph, save_last_node
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import cast, dequantize
from f8sub.torch_compat import apply, is_dtensor, remove_hook

PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"), ("gate", "up"))
"""What transformers, torchtitan and others call the two layers of a SwiGLU, which are children of one module."""

FUSED = ("gate_up_proj",)
"""What transformers calls the two as one layer."""

BLOCK = 128
"""Elements of a row that share a scale. Source: the fine-grained quantization of arXiv 2412.19437, 3.3.2."""

FORMAT = Float8Format(torch.float8_e4m3fn, Tile(1, ALL), ScaleRule.POWER_OF_2)
"""Of the blocks, as rows of a matrix. A power of two is stored in a byte, and loses no bit of a code."""


def keep_swiglu_input_in_float8(
    model: torch.nn.Module, layers: str | Sequence[str] | None = None
) -> list[str]:
    """Round the results of SwiGLU's gate and up layers to float8 from now on, so that compiled code saves a byte each.

    Call it after ``convert_to_float8``, and before ``torch.compile``. It changes numbers: each block of 128 elements of
    a row is cast to e4m3 with a power of two as scale, in forward and wherever forward is repeated; blocks are smaller
    where 128 does not divide the row. Gradients pass unchanged. An element that is not finite becomes NaN, alone. arXiv
    2412.19437 (3.3.3) and arXiv 2410.19313 save these activations so, too.

    Compiled code saves the codes in place of gate and up. Under selective checkpointing, by any policy, it multiplies
    neither layer again. The usual policy saves gate in bf16, which takes as much memory, and multiplies up again, 27 %
    of the products of a Llama 3 8B block's forward. Full checkpointing saves nothing more. Eager code computes the same
    numbers and saves no memory.

    Args:
        model: its linear layers may be converted or not; rows of N elements.
        layers: glob patterns over layers' names, as ``skip`` of ``convert_to_float8``; None for layers called
            ``gate_proj`` and ``up_proj``, ``w1`` and ``w3`` or ``gate`` and ``up`` of one module, and ``gate_up_proj``.

    Returns:
        The names of the layers.

    Raises:
        Float8ConfigError: no linear layer is called so.
    """
    refuse_other_than_a_module("keep_swiglu_input_in_float8", model)
    layers = [layers] if isinstance(layers, str) else layers
    linears = {fqn: each for fqn, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    found = _by_names(model) if layers is None else [f for f in linears if any(matches(p, f) for p in layers)]
    if not found:
        wanted = (
            "gate_proj and up_proj, w1 and w3, gate and up, or gate_up_proj" if layers is None else layers
        )
        raise Float8ConfigError(
            f"no linear layer is called {wanted}; the model has {', '.join(list(linears)[:8]) or 'none'}: give "
            'layers=["PATTERN", ...] for the layers whose results SwiGLU reads'
        )
    if idle := [p for p in layers or () if not any(matches(p, f) for f in found)]:
        warnings.warn(
            f"layers={idle} of keep_swiglu_input_in_float8 match no linear layer", Float8Warning, stacklevel=2
        )
    shared: int | None = None
    for fqn in found:
        layer = linears[fqn]
        # A second call must not round twice.
        remove_hook(round_to_float8, layer)
        own = layer.register_forward_hook(round_to_float8).id
        # Under the same id everywhere: dynamo guards on it, and would compile equal blocks one by one.
        shared = own if shared is None else shared
        layer._forward_hooks[shared] = layer._forward_hooks.pop(own)
    return found


def elements_per_scale(features: int) -> int:
    """Return how many elements of a row of so many share a scale."""
    block = BLOCK
    while features % block:  # dynamo has no gcd of a dynamic size
        block //= 2
    return block


def _by_names(model: torch.nn.Module) -> list[str]:
    found = []
    for fqn, module in model.named_modules():
        linears = [name for name, child in module.named_children() if isinstance(child, torch.nn.Linear)]
        # Both names have to be there: a "gate" alone is a router.
        pairs = [name for pair in PAIRS if set(pair) <= set(linears) for name in pair]
        names = [*pairs, *(name for name in FUSED if name in linears)]
        found += [f"{fqn}.{name}" if fqn else name for name in names]
    return found


def round_to_float8(layer: torch.nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
    """Round a gate or an up layer's result, y [..., N], in its forward hook."""
    if is_dtensor(y):
        made: Any = y
        local = _rounded(made.to_local())
        return type(made).from_local(  # type: ignore[no-any-return]
            local, made.device_mesh, made.placements, run_check=False, shape=made.shape, stride=made.stride()
        )
    return _rounded(y)


def _rounded(y: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = apply(_StraightThrough, y)
    return made


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        block = elements_per_scale(y.shape[-1])
        if torch.compiler.is_compiling():
            enter_graph_functions()
            return _in_graph(y, block)
        # y [..., N] as [rows * N / block, block]: a block is one row, with one scale.
        rows = y.reshape(-1, block)
        return dequantize(present(quantize(rows, FORMAT, None).rowwise), y.dtype).view(y.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        # Straight through: the rounding has no gradient of its own.
        return dy


def exponents_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the exponents of ``scale_from_amax``'s inverse scales, biased as float32's, int32; 1 for an amax of 0.

    Without a division: 32 threads of a GPU hold a block, and each would divide in float64 for itself. The largest power
    of two of at most 448 / amax has 8 less the amax's exponent, or 7 less it where the mantissa exceeds 448's.
    """
    bits = amax.view(torch.int32)
    # 448 is 1.75 * 2**8. Its mantissa is 0x600000: a larger one carries into the exponent.
    carried_beyond_448s_mantissa = 0x1FFFFF
    return (((bits + carried_beyond_448s_mantissa) >> 23) - 8).clamp(min=1)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents << 23).view(torch.float32)


@in_graph
def _in_graph(y: torch.Tensor, block: int) -> torch.Tensor:
    """Round in one node to dynamo, in whose trace by AOT autograd a checkpointing policy can be told what to save."""
    rows = y.reshape(-1, int(block))
    amax = scales.finite_amax(rows, FORMAT.tile)
    exponents = exponents_of(amax)
    # The scale is the inverse power of two: biased exponents of the two add up to 254.
    codes = cast(rows, _powers(254 - exponents), FORMAT.dtype)
    save_last_node()
    stored = exponents.to(torch.uint8)
    # To make the exponents again would take y, and so the product of the layer.
    save_last_node()
    powers = _powers(stored.to(torch.int32))
    return dequantize(Operand(codes, powers, FORMAT), y.dtype).view(y.shape)


class KeptInput(NamedTuple):
    """What compiled code saves of a layer's result that ``keep_swiglu_input_in_float8`` rounds.

    Attributes:
        fqn: the layer's name.
        features: of its result.
        bytes: of a token, codes and scales; in bf16 they would be two for each feature.
    """

    fqn: str
    features: int
    bytes: int


def kept_inputs(model: torch.nn.Module) -> list[KeptInput]:
    """Return the layers of a model whose results ``keep_swiglu_input_in_float8`` rounds."""
    found = []
    for fqn, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and round_to_float8 in layer._forward_hooks.values():
            features = layer.out_features
            # A code is a byte, and so is the exponent of a block.
            found.append(KeptInput(fqn, features, features + features // elements_per_scale(features)))
    return found
