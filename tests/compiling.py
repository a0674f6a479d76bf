"""A compiled training run next to an eager one, and what torch.compile did meanwhile."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Blocks, precompute, seed_weights

WIDTH, HIDDEN = 32, 48

SHAPES = [(2, 5), (3, 7), (5, 33), (2, 70), (4, 9)]
"""Batch and sequence: tokens of one and of several tiles, in no order, not one a multiple of 16."""


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


def mlps(recipe: str | None, blocks: int = 1) -> nn.Module:
    model = seed_weights(Blocks(*(Mlp() for _ in range(blocks))))
    return model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe)


def gained(recipe: str) -> nn.Module:
    """``mlps`` without norms, whose eps is a float of the model's: for that dynamo calls the backend once more."""
    model = mlps(None)
    model.blocks[0].norm = nn.PReLU()
    return f8sub.convert_to_float8(seed_weights(model), recipe=recipe)


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


def train(model, *, steps=3, rank=0, autocast=nullcontext, shapes=((2, 12),), marked=False) -> Run:
    """AdamW with random cotangents; one optimizer step every step, so that weights and scales change.

    ``shapes`` are batch and sequence of the steps, in turn; ``marked`` says whether both are marked as dynamic.
    """
    optimizer, run = torch.optim.AdamW(model.parameters(), lr=3e-3), Run()
    for step in range(steps):
        precompute(model)
        x = gaussian((*shapes[step % len(shapes)], WIDTH), generator(100 * step + rank))
        if marked:
            torch._dynamo.mark_dynamic(x, (0, 1))
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


Backend = str | Callable[..., Any]


def compile_blocks(model: nn.Module, backend: Backend = "aot_eager", dynamic=None) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True, dynamic=dynamic)
    return model


class Compiler:
    """A backend that counts compilations and keeps Python floats that became inputs, by where dynamo found them."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs = 0
        self.floats: list[str] = []
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1
        # Dynamo hands a float over as a tensor whose value the graph reads.
        self.floats += [node.args[0].name for node in module.graph.nodes if node.target == "item"]
        return self._compile(module, inputs)


def differences(found: Run, expected: Run) -> list[str]:
    """Names of what is not bitwise equal."""
    wrong = []
    for name in ("outputs", "gradients", "parameters"):
        pairs = zip(getattr(found, name), getattr(expected, name), strict=True)
        wrong += [f"{name}[{i}]" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return wrong


class SavedShapes:
    """Shape, dtype and address of every tensor that ``run`` saves for backward."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            inner = tensor.__tensor_flatten__()[0] if isinstance(tensor, f8sub.Float8Tensor) else ()
            self.tensors += [getattr(tensor, name) for name in inner] or [tensor]
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.y = run()

    def of_size(self, count: int) -> list[tuple[tuple[int, ...], torch.dtype, int]]:
        """Those of ``count`` elements."""
        return [(tuple(t.shape), t.dtype, t.data_ptr()) for t in self.tensors if t.numel() == count]


def past_dispatch(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    """A backend of torch.compile whose code writes to memory as Inductor's does: no operator shows it, and no version.

    AOTAutograd counts a version then, of what the compiled function was called with.
    """

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        def run(*args: object) -> object:
            tensors = tuple(each for each in args if isinstance(each, torch.Tensor))  # and DTensors' meshes
            with torch._C._DisableTorchDispatch(), torch.autograd._unsafe_preserve_version_counter(tensors):
                return graph(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)(graph, inputs)
