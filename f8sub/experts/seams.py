"""The seams where modules of experts multiply, and how each is found: transformers', torchtitan's, users' own."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from f8sub.errors import Float8ConfigError
from f8sub.experts.grouped_linear import grouped_linear, grouped_swiglu, local_part, sent_swiglu
from f8sub.experts.sent import Sent
from f8sub.torch_compat import apply
from f8sub.weights.weight import MADE_OF, is_converted, own_parameter

AUTO_EXPERTS, AUTO_EXCHANGED = "auto", "auto_expert_parallel"
"""The values of ``experts`` that convert those which gain; the second where each GPU has experts of its own."""
AUTO = AUTO_EXPERTS, AUTO_EXCHANGED

EXPERTS: bool | str = AUTO_EXPERTS
"""The default of ``experts``. docs/experts.md says it, docs/api.md by ``python scripts/tables/api.py --write-docs``."""


def refuse_unknown_experts(experts: Any, tokens: Any) -> None:
    """Raise Float8ConfigError where ``experts`` is no bool and not in ``AUTO``, or ``tokens`` no count and not None."""
    if experts not in (True, False, *AUTO):
        raise Float8ConfigError(
            f"experts is True, False, {AUTO_EXPERTS!r} or {AUTO_EXCHANGED!r}, got {experts!r}"
        )
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise Float8ConfigError(f"tokens is how many one forward has, or None, got {tokens!r}")


Forward = Callable[..., Any]


@dataclass(frozen=True)
class Seam:
    """How a module of experts comes to multiply in float8.

    Attributes:
        forward: what runs in place of its own forward, with the module as the first argument; None where its own
            calls ``grouped_linear``, or a method ``_grouped_mm`` that multiplies.
        weights: names of the weights; None for all of its parameters of three dimensions.
        transposed: whether they are stored as (E, K, N).
        down: name of the weight that multiplies SwiGLU's result, where ``grouped_swiglu`` multiplies; else None.
    """

    forward: Forward | None = None
    weights: tuple[str, ...] | None = None
    transposed: bool = False
    down: str | None = None

    def weights_of(self, module: torch.nn.Module) -> dict[str, bool]:
        """The names of a module's weights, and whether each is stored transposed."""
        return dict.fromkeys(self.weights or _stacked(module), self.transposed)


def _stacked(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's weights of three dimensions; of one that is computed its own, no parameter's."""
    names = [name for name, parameter in module.named_parameters(recurse=False) if _is_stack(parameter)]
    own = vars(module)
    whole = (next((w for end in MADE_OF if (w := name.removesuffix(end)) in own), name) for name in names)
    lists: Any = module._modules.get("parametrizations")
    computed = [] if lists is None else [name for name in lists if own_parameter(module, name).dim() == 3]
    return [*dict.fromkeys(whole), *computed]


_registered: dict[type[torch.nn.Module], Seam] = {}


def register_experts(
    cls: type[torch.nn.Module],
    *,
    weights: str | Collection[str] | None = None,
    transposed: bool = False,
    forward: Forward | None = None,
    down: str | None = None,
) -> None:
    """Have ``convert_to_float8`` convert modules of a class, and of its subclasses, by its option ``experts``.

    Their forward calls ``grouped_linear`` without a recipe, which is in high precision until they are converted. One of
    a converted module that calls none, though it has tokens, is a Float8ConfigError; a warning where "auto" chose it.

    Args:
        cls: the class.
        weights: names of its parameters that are (E, N, K), one matrix an expert, or one name; None for all of three
            dimensions.
        transposed: whether they are stored as (E, K, N) and handed to ``grouped_linear`` with ``transposed=True``.
        forward: runs in place of the class's own, with the module as the first argument; a subclass with a forward of
            its own keeps that. None for the class's.
        down: name of the third weight of ``grouped_swiglu``, where the forward calls that: ``experts="auto"`` then
            counts what SwiGLU in the casts saves.

    Raises:
        Float8ConfigError: no class of modules, or ``down`` is none of ``weights``.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise Float8ConfigError(f"register_experts takes a class of modules, got {cls!r}")
    names = (weights,) if isinstance(weights, str) else weights
    if down is not None and names is not None and down not in names:
        raise Float8ConfigError(f"register_experts: down={down!r} is none of weights={tuple(names)!r}")
    _registered[cls] = Seam(forward, None if names is None else tuple(names), transposed, down)


def seam_of(module: torch.nn.Module) -> Seam | None:
    """The seam of a module, which a converted one keeps; None where it is no module of experts that is known."""
    if is_converted(module):
        return getattr(module._f8sub, "seam", None)
    # What the user registered comes before what is known by its attributes.
    for cls in type(module).__mro__:
        if cls in _registered and not _replaces_another(type(module), cls):
            return _registered[cls]
    stacked = bool(_stacked(module))
    if stacked and all(hasattr(module, name) for name in _OF_TRANSFORMERS):
        weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        # Not in ``routed``: under torch.compile no function has a __qualname__ to compare.
        gate = getattr(type(module), "_apply_gate", None)
        is_gated = (
            module.has_gate
            and not module.has_bias
            and getattr(gate, "__qualname__", "") == "_default_apply_gate"
            and _is_silu(getattr(module, "act_fn", None))
        )
        return Seam(routed, weights, bool(module.is_transposed), weights[1] if is_gated else None)
    # torchtitan's experts, and others with such a method.
    if stacked and callable(getattr(module, "_grouped_mm", None)):
        return Seam()
    return None


def _replaces_another(kind: type[Any], cls: type[Any]) -> bool:
    """Return whether what runs in place of the forward of ``cls`` would run in place of a subclass's own."""
    between = kind.__mro__[: kind.__mro__.index(cls)]
    return _registered[cls].forward is not None and any("forward" in vars(each) for each in between)


def _is_stack(parameter: torch.Tensor) -> bool:
    # A lazy parameter has no dimensions yet.
    return not is_lazy(parameter) and parameter.dim() == 3


def is_registered(cls: type[torch.nn.Module]) -> bool:
    """Return whether ``register_experts`` was given this class."""
    return cls in _registered


def calls_grouped_linear(module: torch.nn.Module) -> bool:
    """Return whether the own forward of a module of experts multiplies by ``grouped_linear``, converted or not."""
    seam = next((_registered[cls] for cls in type(module).__mro__ if cls in _registered), None)
    return seam is not None and seam.forward is None


_OF_TRANSFORMERS = ("is_transposed", "has_gate", "has_bias", "num_experts", "_apply_gate")
"""The attributes that ``use_experts_implementation`` of transformers 5 gives to each of its modules of experts."""


def routed(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The forward of experts of transformers 5: sort tokens by expert, multiply, gate, multiply, and put together.

    Whatever implementation the config asks for. Experts of other ranks have numbers past the last one.
    """
    tokens, top_k = top_k_index.shape
    # Stable: a checkpointed forward that is repeated has to sort the tokens of an expert as before.
    order = top_k_index.flatten().argsort(stable=True)
    expert = top_k_index.flatten()[order]
    experts = local_part(module.down_proj).shape[0]
    # Tokens of other ranks' experts are sorted to the end, past the last group.
    is_here, known = expert < experts, expert.clamp(max=experts - 1)
    # Not ``bincount``, for which the host waits to learn the largest number.
    counts = torch.zeros(experts, dtype=torch.int32, device=expert.device)
    ends = counts.scatter_add_(0, known.long(), is_here.int()).cumsum(0)
    back = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), dtype=order.dtype, device=order.device)
    )
    is_swiglu, is_normed = _is_swiglu(module), getattr(module, "has_post_expert_norm", False)
    how: dict[str, Any] = {"transposed": module.is_transposed}
    if is_swiglu and not is_normed:
        sent = Sent(order, back, top_k_weights.reshape(tokens, top_k))
        made = sent_swiglu(hidden_states, sent, module.gate_up_proj, module.down_proj, ends, **how)
        if made is not None:
            return made
    x = apply(_ByExpert, hidden_states, order, back, top_k)
    if is_swiglu:
        y = grouped_swiglu(x, module.gate_up_proj, None, module.down_proj, ends, **how)
    else:
        y = _by_product(module, x, ends, known)
    if is_normed:
        y = module.post_expert_norm(y)
    # Rows of other ranks' experts have the last expert's bias by now, and must add nothing.
    weights = apply(_ByExpert, top_k_weights.reshape(-1, 1), order, back, 1)
    y = torch.where(is_here[:, None], y * weights, 0)
    # Put back first: ``index_add_`` adds in another order at each call on a GPU.
    found: torch.Tensor = apply(_ByToken, y, order, back)
    return found.view(tokens, top_k, y.shape[1]).sum(1).to(hidden_states.dtype)


class _ByExpert(torch.autograd.Function):
    """Tokens in the order of their experts, each as often as it is sent to one.

    Autograd of an index adds gradients by index, which takes a sort or atomics. ``order`` is a permutation, so that
    backward can read each row from its place, ``back``, and add the rows of a token.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, order: torch.Tensor, back: torch.Tensor, top_k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.sent = len(tokens), top_k
        return tokens[order // top_k]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return dy[back].view(*ctx.sent, dy.shape[1]).sum(1), None, None, None


class _ByToken(torch.autograd.Function):
    """Rows in the order of their experts in that of their tokens again; see ``_ByExpert``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows[back]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return dy[order], None, None


def _is_swiglu(module: Any) -> bool:
    """Return whether experts of transformers have its own gate, with SiLU, and nothing looks at what is between."""
    if module._f8sub.seam.down is None or "_apply_gate" in vars(module) or not _is_silu(module.act_fn):
        return False
    act = module.act_fn
    return act is torch.nn.functional.silu or not (
        act._forward_hooks or act._forward_pre_hooks or act._backward_hooks or act._backward_pre_hooks
    )


def _is_silu(act: Any) -> bool:
    # LFM2's experts have the function.
    return act is torch.nn.functional.silu or f"{type(act).__module__}.{type(act).__name__}" in _SILU


_SILU = "torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"
"""The classes of SiLU that transformers' configs name."""


def _by_product(module: Any, x: torch.Tensor, ends: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the experts' results for their tokens; ``known`` is the expert of each."""

    def multiplied(name: str, x: torch.Tensor) -> torch.Tensor:
        y = grouped_linear(x, getattr(module, name), ends, transposed=module.is_transposed)
        if not module.has_bias:
            return y
        # In float32, so that the tokens' gradients are summed in that.
        return (y + local_part(getattr(module, f"{name}_bias")).float()[known]).to(y.dtype)

    if module.has_gate:
        h = module._apply_gate(multiplied("gate_up_proj", x))
    else:
        h = module.act_fn(multiplied("up_proj", x))
    return multiplied("down_proj", h)
