"""The recipes that tests of contexts enter, and how."""

import torch
from torch import nn

import f8sub

OWN, OTHER = "tensorwise", "rowwise"


def under(*contexts: f8sub.autocast):
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not contexts:
            return model(x)
        with contexts[0]:
            return under(*contexts[1:])(model, x)

    return run
