"""AttentionState: what one attention module knows of its gradients' past, and which of its calls run in float8."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from f8sub.attention import cudnn, problem
from f8sub.attention.ops import attend
from f8sub.attention.scaling import GRADIENTS, HISTORY
from f8sub.formats import HIGH_PRECISION
from f8sub.torch_compat import TrainingState, autocast_dtype, constant_result, is_dtensor

CHILD = "float8_attention"
"""The name of an attention module's state among its children."""

MIN_LENGTH = 8192
"""Rows of q, and of k, from which on float8 gains time. Source: docs/attention.md, an H200: 0.65 times bf16's speed
with sequences of 2048 tokens, 1.13 times with 8192."""

BACKWARDS_BY_NAME = {"float8": "e4m3", "bf16": problem.HIGH_PRECISION}
"""What users call the formats of backward."""

AUTO, CUDNN, REFERENCE = "auto", "cudnn", "reference"
BACKENDS = (AUTO, CUDNN, REFERENCE)

SDPA = F.scaled_dot_product_attention
"""torch's own: ``context_parallel`` puts another function in its place, which calls it with DTensors."""

KERNELS_DTYPES = (torch.bfloat16, torch.float16)


class AttentionState(TrainingState):
    """Holds the amaxes of one attention module's earlier backwards; the modules that call attention have one each.

    Within a step each rank has a past of its own; after it, that of all ranks, see ``SharedAttention``.

    Attributes:
        fqn: the module's name.
        backward: one of ``BACKWARDS``.
        backend: one of ``BACKENDS``.
        min_length: shorter sequences stay in high precision.
        reason: why the last call that trains and was not compiled stayed in high precision; None where it did not, ""
            before. Until there is one, the last call of any kind.
        history: float32, (HISTORY, 4): amaxes of ``GRADIENTS``, newest first.
        saturated: float32, (4,): how many backwards had an amax that their scale did not hold. Not in the state dict.
        mark: one element, by which backward knows whether it ran before.
    """

    history: torch.Tensor
    saturated: torch.Tensor
    mark: torch.Tensor

    def __init__(self, fqn: str, backward: str, backend: str, min_length: int, device: torch.device) -> None:
        super().__init__()
        self.fqn, self.backward, self.backend, self.min_length = fqn, backward, backend, min_length
        self.reason: str | None = ""
        self._is_asked, self._squares, self._is_of_training = False, None, False
        # Not as inference tensors: backward writes to them.
        with torch.inference_mode(mode=False):
            for name, shape in (("history", (HISTORY, 4)), ("saturated", (4,)), ("mark", (1,))):
                buffer = torch.zeros(shape, dtype=torch.float32, device=device)
                # Of what has no past a checkpoint is that of attention in high precision.
                self.register_buffer(name, buffer, persistent=name == "history" and self.has_past)

    @property
    def has_past(self) -> bool:
        """True if backward reads the history."""
        return self.backward != problem.HIGH_PRECISION

    @property
    def was_trained(self) -> bool:
        """True if the history has a backward pass, of this process or of one before; reads memory of the device."""
        # A pass leaves amaxes, and amaxes of values that are all zero teach the next one nothing.
        return not self.history.is_meta and bool(self.history.any())

    @property
    def saturations(self) -> dict[str, int]:
        """How many backwards saturated, by gradient; reads memory of the device."""
        counts = [0] * len(GRADIENTS) if self.saturated.is_meta else map(int, self.saturated.tolist())
        return dict(zip(GRADIENTS, counts, strict=True))

    def why_not(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        gqa: bool = False,
    ) -> str | None:
        """Return why a call of attention stays in high precision; None where it does not."""
        # Heads on ranks of their own come as plain tensors; a DTensor may be a part of the rows.
        if any(is_dtensor(x) for x in (q, k, v)):
            return "q, k and v are DTensors, as under context parallelism"
        if mask is not None:
            return "the call has a mask"
        if dropout > 0.0:
            return "the call has dropout"
        if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0]:
            return "q, k and v are not (batch, heads, rows, width), with k and v of one shape"
        heads, kv_heads = q.shape[1], k.shape[1]
        if q.shape[3] != k.shape[3] or (heads != kv_heads and not (gqa and heads % kv_heads == 0)):
            return "heads of q and of k do not fit each other"
        if causal and q.shape[2] != k.shape[2]:
            return "the call is causal, with as many rows of q as there are not of k"
        if min(q.shape[2], k.shape[2]) < self.min_length:
            return f"sequences of fewer than {self.min_length} tokens (min_length=)"
        # cuDNN's backward adds to dq in any order.
        if torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms(True)"
        takes = HIGH_PRECISION if self.backend == REFERENCE else KERNELS_DTYPES
        if not q.dtype == k.dtype == v.dtype or q.dtype not in takes:
            return f"q, k and v of {q.dtype}"
        if self.backend == REFERENCE:
            return None
        kernels = why_no_kernel(q.device.type, q.device.index, q.shape[3], self.backward)
        return kernels or cudnn.why_not_lengths(q.shape[2], k.shape[2], self.backward)

    def attend(  # noqa: PLR0913  (torch's signature)
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """``torch.nn.functional.scaled_dot_product_attention``, in float8 where it applies."""
        if self.mark.is_meta and not torch.compiler.is_compiling():
            # A state dict that was loaded with ``assign=True`` moved the model alone.
            self.come_to(query.device)
        # What autocast does in torch's own.
        dtype = autocast_dtype(query.device.type)
        q, k, v = (x if dtype is None else x.to(dtype) for x in (query, key, value))
        reason = self.why_not(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
        # Past nn.Module's own assignment, which takes a microsecond. A trace may not write to what is outside of it.
        # Evaluation has other lengths and masks: its reason does not tell why training is not in float8.
        if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or not self._is_of_training):
            self.__dict__.update(reason=reason, _is_of_training=torch.is_grad_enabled())
        if reason is not None:
            return SDPA(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        backend = REFERENCE if self.backend == REFERENCE else CUDNN
        factor = q.shape[3] ** -0.5 if scale is None else scale
        state = self.history, self.saturated, self.mark
        o = attend(q, k, v, *state, is_causal, factor, backend, self.backward)
        if not torch.compiler.is_compiling() and self._is_asked and torch.is_grad_enabled():
            # A product more than float8 has, in a step of many: autograd need not know of it.
            with torch.no_grad():
                exact = SDPA(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa).float()
                squares = torch.stack([exact.square().sum(), (o - exact).square().sum()])
                self.__dict__.update(_is_asked=False, _squares=squares)
        return o

    def compare_next(self) -> None:
        """Compare the next call that is in float8, and trains, with attention in high precision."""
        self.__dict__.update(_is_asked=True, _squares=None)

    def compared(self) -> torch.Tensor | None:
        """Return the squares of what that call should have returned, and of its error, float32, (2,); then forget."""
        squares: torch.Tensor | None = self._squares
        self.__dict__.update(_is_asked=False, _squares=None)
        return squares


@constant_result
def why_no_kernel(kind: str, index: int | None, width: int, backward: str) -> str | None:
    """Return why cuDNN has no kernel on a device for a head dim; None where it has."""
    device = torch.device(kind) if index is None else torch.device(kind, index)
    return cudnn.why_not(device) or cudnn.why_not_width(width, device, backward)


class InFloat8(TorchFunctionMode):
    """Sends the calls of ``scaled_dot_product_attention`` within it through a state."""

    def __init__(self, state: AttentionState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, attention by the state."""
        # A function mode, because below functions torch has chosen a kernel: dispatch modes see that alone.
        if func is SDPA:
            return self.state.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
