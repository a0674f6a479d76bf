"""Small models by name: plain, with buffers, and with one weight under two names."""

import torch
from torch import nn

from tests.models import seed_weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 256, bias=False)
        self.down = nn.Linear(256, 256, bias=False)


class Buffered(Net):
    """With a router's bias, which is a buffer of float32, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.linspace(0, 1, 7))
        self.register_buffer("steps", torch.tensor(2**40 + 1))


class Tied(Net):
    """The last layer's weight is that of the embedding, which comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        self.lm_head = nn.Linear(256, 64, bias=False)
        self.lm_head.weight = self.embed.weight


def plain() -> nn.Module:
    return seed_weights(Net())


def buffered() -> nn.Module:
    return seed_weights(Buffered())


def tied() -> nn.Module:
    return seed_weights(Tied())


NETS = {"plain": plain, "buffered": buffered, "tied": tied}
