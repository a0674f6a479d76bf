"""A compiled training run next to an eager one, and what torch.compile did meanwhile."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._dynamo.utils import counters

import f8sub
from tests.data_sets import gaussian, generator
from tests.dist.models import seed_weights

WIDTH, HIDDEN = 32, 48


class Mlp(nn.Module):
    """A pre-norm gated MLP: two siblings of one x, then one layer alone.

    No attention: scaled_dot_product_attention under bf16 autocast, compiled, has other gradients by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


class Mlps(nn.Module):
    """Blocks to be compiled one by one."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def mlps(recipe: str | None, blocks: int = 1) -> nn.Module:
    model = seed_weights(Mlps(blocks))
    return model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe)


@dataclass
class Run:
    """Losses, outputs and final parameters of a few steps, and the graphs compiled by the end of each."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(
    model: nn.Module,
    *,
    steps: int = 3,
    rank: int = 0,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> Run:
    """AdamW on random targets; one optimizer step every step, so that weights and scales change."""
    optimizer, run = torch.optim.AdamW(model.parameters(), lr=3e-3), Run()
    for step in range(steps):
        f8sub.precompute_scales(model)
        x = gaussian((2, 12, WIDTH), generator(100 * step + rank))
        with autocast():
            y = model(x)
        y.backward(gaussian(tuple(y.shape), generator(7)).to(y.dtype))
        run.outputs.append(y.detach().clone())
        run.gradients += [whole(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        run.graphs.append(counters["stats"]["unique_graphs"])
    run.parameters = [torch.zeros_like(whole(p)) + whole(p) for p in model.parameters()]
    return run


def compile_blocks(model: nn.Module, backend: str = "aot_eager") -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def differences(found: Run, expected: Run) -> list[str]:
    """Names of what is not bitwise equal."""
    wrong = []
    for name in ("outputs", "gradients", "parameters"):
        pairs = zip(getattr(found, name), getattr(expected, name), strict=True)
        wrong += [f"{name}[{i}]" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return wrong


def decibels(signal: torch.Tensor, found: torch.Tensor) -> float:
    """Signal to noise; 100 for what is as good as equal."""
    noise = (found.float() - signal.float()).norm().clamp(min=1e-5 * signal.float().norm().item())
    return 20 * torch.log10(signal.float().norm() / noise).item()


class SavedShapes:
    """Shape, dtype and address of every tensor that ``run`` saves for backward."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.tensors += inner_tensors(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.y = run()

    def of_size(self, count: int) -> list[tuple[tuple[int, ...], torch.dtype, int]]:
        """Those of ``count`` elements."""
        return [(tuple(t.shape), t.dtype, t.data_ptr()) for t in self.tensors if t.numel() == count]


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(tensor, f8sub.Float8Tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]
