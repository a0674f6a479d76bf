"""A stand-in for an inference engine, which the scripts beside this send weights to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


class Engine:
    """What vLLM's model runner is to a trainer: it loads names and tensors as they are in a checkpoint."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.bytes = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights."""
        self.bytes = 0
        for name, tensor in weights:
            self.weights[name] = tensor
            self.bytes += tensor.nbytes

    def digests(self) -> dict[str, str]:
        """A digest of the values that each float8 layer multiplies."""
        found = {}
        for name, scale in self.weights.items():
            if name.endswith("weight_scale"):
                fqn = name.removesuffix(".weight_scale")
                found[fqn] = digest(self.weights[f"{fqn}.weight"].float() * scale)
        return found


def digest(values: torch.Tensor) -> str:
    """Of a tensor's values in float32."""
    return hashlib.sha256(values.float().cpu().contiguous().numpy().tobytes()).hexdigest()
