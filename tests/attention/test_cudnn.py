"""What cuDNN is handed: every address is that of the tensor, or of the scale, by whose number it goes."""

import types

import pytest
import torch

from f8sub.attention import cudnn, ops
from f8sub.attention.scaling import HISTORY
from tests.attention.imitation import imitate
from tests.data_sets import generator

SHAPES = {"grouped": (2, 4, 2, 24, 24, 16), "other lengths": (1, 2, 2, 16, 40, 32)}


def results(
    backend: str, backward: str, shape: tuple[int, ...], by_rows: bool, call=ops.attend
) -> list[torch.Tensor]:
    """Of two steps with one state: o, gradients, and the state."""
    batch, heads, kv_heads, rows, cols, width = shape
    state = [torch.zeros(n) for n in ((HISTORY, 4), 4, 1)]
    found = []
    for step in range(2):
        given = []
        for i, (h, length) in enumerate(((heads, rows), (kv_heads, cols), (kv_heads, cols), (heads, rows))):
            x = (
                torch.randn(batch, length, h, width, generator=generator(10 * step + i))
                .bfloat16()
                .transpose(1, 2)
            )
            given.append((x if by_rows else x.contiguous()).requires_grad_(i < 3))
        *qkv, do = given
        o = call(*qkv, *state, rows == cols, width**-0.5, backend, backward)
        found += [o.detach(), *torch.autograd.grad(o, qkv, do)]
    return [*found, *state]


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backward", ["e4m3", "e5m2", "bf16"])
def test_graphs_are_handed_what_the_reference_is(monkeypatch, backward, shape, by_rows):
    imitate(monkeypatch)
    found, expected = (results(backend, backward, shape, by_rows) for backend in ("cudnn", "reference"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    kinds = {"forward", "bf16 backward" if backward == "bf16" else "backward"}
    # One graph for all steps, whatever else is computed in one.
    assert sorted(graph.graph.kind for graph in cudnn._graphs.values()) == sorted(kinds)


@pytest.mark.parametrize("backward", ["e4m3", "bf16"])
def test_the_function_of_eager_code_is_the_operator(backward):
    shape = SHAPES["grouped"]
    by_operator = results("reference", backward, shape, True, lambda *given: ops.attention(*given)[0])
    assert all(
        torch.equal(a, b)
        for a, b in zip(by_operator, results("reference", backward, shape, True), strict=True)
    )


def test_a_handle_is_given_each_stream_once(monkeypatch):
    """And follows when the stream becomes another one."""
    calls = []
    package = types.SimpleNamespace(
        create_handle=lambda: "handle", set_stream=lambda **given: calls.append(given)
    )
    streams = iter((1, 1, 2, 2, 1))
    monkeypatch.setattr(cudnn, "_frontend", lambda: package)
    monkeypatch.setattr(cudnn, "_local", types.SimpleNamespace())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=next(streams))
    )
    assert [cudnn._handle(torch.device("cuda", 0)) for _ in range(5)] == ["handle"] * 5
    assert [call["stream"] for call in calls] == [1, 2, 1]
