"""Float8Callback: scales after each step of the Trainer of transformers. attend_causally: no mask, and no wait."""

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from f8sub.errors import Float8ConfigError, shown
from f8sub.weights.precompute_scales import precompute_scales, register_precompute_hook

__all__ = ["Float8Callback", "attend_causally"]

_NAME = "sdpa_without_mask"
"""Of an attention that transformers makes no mask for, because none is registered for it."""


def attend_causally(model: PreTrainedModel) -> None:
    """Have a decoder of transformers attend causally without a mask.

    For training on whole sequences, without padding and without several sequences in one. The result is that of
    ``attn_implementation="sdpa"``, bitwise. Without a cache transformers looks at the positions in each forward,
    whether they are of one sequence, and the host waits for the GPU there (5.24). In a CUDA graph it cannot look, and
    gives attention a mask, with which it is slower and rounds otherwise. So ``graph_step`` asks for this.

    Args:
        model: of transformers, whose layers attend to all tokens before a token.

    Raises:
        Float8ConfigError: no model of transformers, or one whose layers attend to a window or in chunks, and need
            a mask.
    """
    if not isinstance(model, PreTrainedModel):
        raise Float8ConfigError(f"attend_causally takes a model of transformers, got {shown(model)}")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds or window is not None:
        found = ", ".join(sorted(kinds)) or f"a window of {window} tokens"
        raise Float8ConfigError(
            f"attend_causally: {type(model).__name__} has layers with {found}, which need a mask; leave it as it is, "
            "and capture no CUDA graph of it"
        )
    AttentionInterface.register(_NAME, sdpa_attention_forward)
    model.set_attn_implementation(_NAME)


class Float8Callback(TrainerCallback):
    """Computes the scales of a converted model once the Trainer sharded and loaded it, and after each optimizer step.

        model = f8sub.convert_to_float8(model)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Float8Callback()])

    A training that fails or is repeated leaves one hook. Where the model was not converted, ``train()`` raises
    Float8ConfigError.
    """

    def __init__(self) -> None:
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Compute the scales, and register the hook on this training's optimizer."""
        # A training that failed did not come to its end.
        self.on_train_end(args, state, control)
        precompute_scales(given["model"])
        self._hook = register_precompute_hook(given["optimizer"], given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
