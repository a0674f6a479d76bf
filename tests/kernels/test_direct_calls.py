"""Operators whose functions Inductor's code calls without the dispatcher."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import f8sub
from f8sub.kernels import cuda, graph_ops, ops
from tests.data_sets import gaussian, generator
from tests.models import equal

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def run(model: nn.Module) -> list[torch.Tensor]:
    x = gaussian((16, 32), generator(1)).requires_grad_()
    y = model(x)
    y.backward(gaussian((16, 48), generator(2)))
    return [y.detach(), x.grad]


def calls() -> tuple[list[list[torch.Tensor]], list[str]]:
    """Results of an eager and of a compiled layer, and what the compiled one's code calls in forward and backward.

    The products are the reference's, which are operators too.
    """
    layers = [nn.Sequential(nn.Linear(32, 48)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    eager, compiled = (
        f8sub.convert_to_float8(each, recipe="blockwise", backend="reference") for each in layers
    )
    with torch._inductor.config.patch(force_disable_caches=True):
        found, code = run_and_get_code(run, torch.compile(compiled, fullgraph=True))
    lines = [line for each in code for line in each.splitlines() if line.startswith("    ") and " = " in line]
    return [found, run(eager)], [line.split(" = ")[1] for line in lines]


def test_generated_code_calls_functions():
    results, called = calls()
    assert equal(*results)
    assert sum(line.startswith("f8sub_") for line in called) >= 5
    assert not any(line.startswith("torch.ops.f8sub") for line in called)


def test_a_function_that_this_version_has_not_is_called_as_an_operator(monkeypatch):
    """As code that Inductor kept on disk would."""
    graph_ops.enter_graph_functions()
    monkeypatch.setattr(graph_ops, "direct", {})
    monkeypatch.setattr(graph_ops, "at_one_place", {})
    results, _ = calls()
    assert equal(*results)


def test_code_for_other_tensors_has_functions_of_its_own():
    """Inductor loads code once that it finds to be equal, and a function keeps launches for tensors of one kind."""

    def quantize(x: torch.Tensor) -> list[torch.Tensor]:
        return ops.quantize_as_one_node(x, None, "e4m3[128x128]", None)

    found = []
    graph_ops.enter_graph_functions()
    for x in (
        gaussian((16, 32), generator(1)),
        gaussian((16, 32), generator(1)).bfloat16(),
        torch.ones(32, 16).t(),
    ):
        with torch._inductor.config.patch(
            force_disable_caches=True, size_asserts=False, benchmark_harness=False
        ):
            _, (code,) = run_and_get_code(torch.compile(quantize, fullgraph=True, dynamic=False), x)
        found.append([line for line in code.splitlines() if graph_ops.function_of_call.__name__ in line])
        torch._dynamo.reset()
    assert [len(lines) for lines in found] == [1, 1, 1]
    assert len({line for (line,) in found}) == 3


@pytest.mark.parametrize("name", ["quantize", "quantize_experts"])
def test_kernels_are_given_weights_as_plain_tensors(name, monkeypatch):
    """Kernels take no other class, and the reference is slow."""
    weight = f8sub.convert_to_float8(nn.Sequential(nn.Linear(128, 128)), recipe="blockwise")[0].weight
    seen: list[torch.Tensor] = []

    def quantizing(w: torch.Tensor, *how: Any, **options: Any) -> Any:
        seen.append(w)
        return kernel(w, *how, **options)

    kernel = getattr(cuda, name)
    monkeypatch.setattr(cuda, name, quantizing)
    function = graph_ops.direct[f"f8sub.{name}.default"]
    if name == "quantize":
        made = function(weight, None, "e4m3[128x128]", None)
        assert equal(made, function(weight.plain, None, "e4m3[128x128]", None))
    else:
        made = function(weight[None], "e4m3[128x128]")
        assert equal(made, function(weight.plain[None], "e4m3[128x128]"))
    assert [type(w) for w in seen] == [torch.Tensor] * 2
    assert seen[0].data_ptr() == seen[1].data_ptr() == weight.data_ptr()


def test_functions_that_change_arguments_are_called_as_operators():
    names = [name.split(".")[1] for name in graph_ops.direct]
    assert "quantize" in names
    assert not any(getattr(torch.ops.f8sub, name).default._schema.is_mutable for name in names)
