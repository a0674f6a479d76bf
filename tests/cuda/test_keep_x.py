"""What is kept of x on a GPU: the same numbers each way, and no byte more where attention saved it."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import f8sub
from tests.data_sets import gaussian, generator
from tests.kept_x import EXACT, Block, model_of

WIDTH, HEADS, TOKENS = 256, 4, 128
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
CASES = [case for case in EXACT if case[0] not in ("mxfp8", "nvfp4")]


class Attention(Block):
    """Its last layer reads what attention saved."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.attention(x))


def attention(recipe: str, keep_x: str) -> nn.Module:
    return model_of(recipe, keep_x, Attention().to("cuda", torch.bfloat16))


def x_of() -> torch.Tensor:
    return gaussian((2, TOKENS, WIDTH), generator(1)).to("cuda", torch.bfloat16).requires_grad_()


def held(model: nn.Module) -> tuple[torch.Tensor, int]:
    """y, and the bytes that a forward leaves behind."""
    x = x_of()
    model(x)  # the weights' codes are kept, too
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = model(x)
    return y, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_auto_adds_nothing_to_what_attention_saves(backend):
    codes = 2 * TOKENS * WIDTH
    with sdpa_kernel(backend):
        found = {way: held(attention("tensorwise", way))[1] for way in ("auto", "float8", "high_precision")}
    # q, k and v share an x, the caller's; an allocation is of whole 512 bytes.
    assert abs(found["float8"] - found["auto"] - codes) <= 2048
    assert abs(found["high_precision"] - found["auto"] + codes) <= 2048


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("recipe", "way"), CASES, ids=["-".join(case) for case in CASES])
def test_all_ways_have_the_same_numbers(recipe, way, compiled):
    """Compiled by Inductor, which keeps float32 between what it fuses, they are as close as that lets them be."""
    results = []
    for keep_x in (way, "float8"):
        torch._dynamo.reset()
        layer = nn.Sequential(nn.Linear(WIDTH, 512, dtype=torch.bfloat16))
        model = model_of(recipe, keep_x, layer.cuda())
        run = torch.compile(model, fullgraph=True) if compiled else model
        for _ in range(2):
            x = x_of()
            y = run(x)
            y.backward(gaussian(tuple(y.shape), generator(2)).to(y))
            f8sub.precompute_scales(model)
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for found, expected in zip(*results, strict=True):
        if compiled:
            assert (found - expected).float().norm() <= 1e-2 * expected.float().norm()
        else:
            assert torch.equal(found, expected)
