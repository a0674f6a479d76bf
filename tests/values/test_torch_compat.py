"""What is missing of torch, or is not as f8sub knows it, is one error that names it and what works without."""

import subprocess
import sys
from inspect import signature
from typing import Any

import pytest
import torch

import f8sub
from f8sub import torch_compat
from f8sub.torch_compat import CONVERSION, EXPERTS, NEEDS, Need, problems, require, require_attributes

KNOWN = r"All of f8sub works with torch 2\.11 to 2\.15: install one of those"


def in_a_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def unseen(monkeypatch):
    """As if nothing had been looked at yet."""
    monkeypatch.setattr(torch_compat, "_found", {})
    monkeypatch.setattr(torch_compat, "_known", set())


BOUND = ["torch._scaled_mm", "torch._C._DisableTorchDispatch", "torch._C._disabled_torch_function_impl"]
BOUND += ["torch.utils._pytree.tree_leaves", "torch.autograd.grad_mode._unsafe_preserve_version_counter"]


@pytest.mark.parametrize("path", [BOUND[0], pytest.param(BOUND[1], marks=pytest.mark.long), BOUND[2]])
def test_a_missing_name_lets_f8sub_be_imported_and_is_told_when_a_model_is_converted(path):
    owner, _, name = path.rpartition(".")
    code = f"""
import torch
del {owner}.{name}
import f8sub
try:
    f8sub.convert_to_float8(torch.nn.Sequential(torch.nn.Linear(16, 32)))
except f8sub.Float8ConfigError as error:
    print(error)
"""
    assert in_a_fresh_process(code).strip() == (
        f"torch {torch.__version__} is not known to f8sub for converting a model: {path} is missing. All of f8sub "
        "works with torch 2.11 to 2.15: install one of those"
    )


def test_every_missing_name_is_told_at_once(unseen, monkeypatch):
    for name in ("_current_graph_task_id", "_storage_Use_Count"):
        monkeypatch.delattr(torch._C, name)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32))
    for _ in range(2):
        with pytest.raises(f8sub.Float8ConfigError, match=KNOWN) as raised:
            f8sub.convert_to_float8(model)
        assert "_C._current_graph_task_id is missing; torch._C._storage_Use_Count is missing." in str(
            raised.value
        )
    assert type(model[0]) is torch.nn.Linear


def taking(parameters: str) -> Any:
    space: dict[str, Any] = {}
    exec(f"def function({parameters}): ...", space)
    return space["function"]


GIVEN = [
    ("a b c", "a, b, c", None),
    ("a c", "a, b=1, *, c", None),
    ("a b c", "a, b, c, d=None, *args, **kwargs", None),
    ("a b c", "a, b", "takes (a, b), and f8sub knows it with (a, b, c)"),
    ("a b", "a, b, c", "takes (a, b, c), and f8sub knows it with (a, b)"),
    ("a b", "b, a", "takes (b, a), and f8sub knows it with (a, b)"),
    ("exactly a b", "a, b", None),
    ("exactly a b", "a, b, c=1", "takes (a, b, c), and f8sub knows it with (a, b)"),
]


@pytest.mark.parametrize(("given", "parameters", "problem"), GIVEN)
def test_parameters(monkeypatch, given, parameters, problem):
    monkeypatch.setattr(torch.cpu, "_function", taking(parameters), raising=False)
    found = problems(Need("a test", "", {"torch.cpu._function": given}))
    assert found == (() if problem is None else (f"torch.cpu._function {problem}",))


def test_what_has_no_signature_is_told(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_function", 3, raising=False)
    assert problems(Need("a test", "", {"torch.cpu._function": "a"})) == (
        "torch.cpu._function is no function with a signature any more",
    )


def test_attributes_are_looked_at_for_each_class():
    class Old:
        mesh = 1

    class New(Old):
        pass

    class Other:
        pass

    need = Need("a test", "take none", {}, {"Old": "mesh device"})
    for _ in range(2):
        with pytest.raises(
            f8sub.Float8ConfigError, match=r"a test: New\.device is missing\..*, or take none$"
        ):
            require_attributes(need, New())
    Old.device = 2
    require_attributes(need, New(), Old())
    with pytest.raises(f8sub.Float8ConfigError, match=r"Other in the place of a class that it knows"):
        require_attributes(need, Other())


def test_a_backend_that_is_not_known_is_not_taken(unseen, monkeypatch):
    from f8sub.kernels.grouped import gemm

    monkeypatch.delattr(torch, "_scaled_grouped_mm")
    row = f8sub.get_recipe("rowwise").fprop.a
    assert gemm._why_not_scaled(row, row, torch.device("cuda")) == (
        f"is not known of torch {torch.__version__}: torch._scaled_grouped_mm is missing"
    )
    require(CONVERSION)
    with pytest.raises(f8sub.Float8ConfigError, match="take another backend"):
        require(EXPERTS)


def test_compiled_code_says_so_too(unseen, monkeypatch):
    monkeypatch.setitem(torch_compat.COMPILATION.names, "torch.compiler._of_another_version", "")
    model = f8sub.convert_to_float8(torch.nn.Sequential(torch.nn.Linear(16, 32)), skip_defaults=False)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"for torch\.compile: .*_of_another_version is missing"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(16, 16))


def test_every_need_says_what_works_without():
    assert [need for need in NEEDS if not need.instead] == [CONVERSION]
    assert not signature(require).parameters.keys() - {"need"}
