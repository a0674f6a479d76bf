"""What the report says of models of transformers, beside a count of the plain model's calls of torch's functions."""

import copy
import logging
import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

import f8sub
from tests.estimator.zoo import FEW, MANY, build

TOLERANCE = 0.01

FUNCTIONS = (
    *("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "__matmul__", "__rmatmul__", "einsum"),
    *("_grouped_mm", "grouped_mm", "grouped_mm_fallback", "conv1d", "conv2d"),
)


class Calls(TorchFunctionMode):
    """Multiplications by each parameter, by the shapes of what functions take and return.

    Those while a module runs that has the parameter are ``own``, too.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.by: dict[str, float] = {}
        self.own: dict[str, float] = {}
        self._running: list[str] = []
        self._names: dict[int, list[str]] = {}
        for fqn, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._names.setdefault(id(parameter), []).append(f"{fqn}.{name}")
            module.register_forward_pre_hook(lambda *_, fqn=fqn: self._running.append(fqn))
            module.register_forward_hook(lambda *_: self._running.pop() and None)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
        if name in FUNCTIONS and (weight := next(filter(self._names_of, tensors), None)) is not None:
            # A tied weight has several names, of which the first may be an embedding's.
            keys = self._names_of(weight)
            found = _multiplications(name, args, tensors, weight, out)
            self.by[keys[0]] = self.by.get(keys[0], 0.0) + found
            for key in [key for key in keys if key.rpartition(".")[0] in self._running][:1]:
                self.own[key] = self.own.get(key, 0.0) + found
        return out

    def _names_of(self, tensor: torch.Tensor) -> list[str]:
        if tensor.dim() < 2:
            return []
        base = tensor if tensor._base is None else tensor._base
        return self._names.get(id(tensor)) or self._names.get(id(base), [])


def _multiplications(name, args, tensors, weight, out) -> float:
    if name.startswith("conv"):
        return out.numel() * math.prod(weight.shape[1:])
    if name == "einsum":
        subscripts = args[0].partition("->")[0].split(",")
        sizes = {
            c: n
            for each, t in zip(subscripts, tensors, strict=True)
            for c, n in zip(each, t.shape, strict=True)
        }
        return math.prod(sizes.values())
    if name == "linear":
        return out.numel() * weight.shape[-1]
    left = tensors[1] if name in ("addmm", "baddbmm") else tensors[0]
    return out.numel() * left.shape[-1]


def shares(kind: str) -> tuple[f8sub.ConversionReport, f8sub.ConversionReport, float]:
    """The report of a batch, that of what is made up, and the share by calls."""
    model, batch = build(kind)
    plain = copy.deepcopy(model)
    with torch.no_grad(), Calls(plain) as calls:
        plain(**batch)
    f8sub.convert_to_float8(model, experts=True, min_dim=0, strict=False)
    report, made_up = f8sub.conversion_report(model, batch=batch), f8sub.conversion_report(model)
    owners = {fqn for fqn, module in model.named_modules() if isinstance(module, f8sub.Float8Linear)}
    owners |= {other.fqn for other in report.others if other.converted}
    in_float8 = sum(found for name, found in calls.own.items() if name.rpartition(".")[0] in owners)
    return report, made_up, in_float8 / sum(calls.by.values())


def check(kind: str) -> None:
    report, made_up, expected = shares(kind)
    assert report.flops_share == pytest.approx(expected, abs=TOLERANCE)
    assert report.summary.partition("FLOPs (")[2].startswith("counted in one forward of 2 x ")
    if made_up.counted:
        assert made_up.flops_share == pytest.approx(expected, abs=TOLERANCE)
    else:  # the report says that it does not know, and why
        assert "FLOPs (assumed: every layer once per token)" in made_up.summary
        assert "forward of made-up inputs raised" in " ".join(str(made_up).split())


@pytest.mark.parametrize("kind", FEW)
def test_a_few_types_of_models(kind):
    pytest.importorskip("transformers")
    check(kind)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:convert_to_float8 found nothing:f8sub.Float8Warning")
@pytest.mark.parametrize("kind", [kind for kind in MANY if kind not in FEW])
def test_many_types_of_models(kind):
    pytest.importorskip("transformers")
    check(kind)


def test_experts_that_multiply_every_token_and_a_single_shared_one():
    """Shapes and ``top_k`` say 61 % of this Llama 4, and nothing of a weight of (1, N, K)."""
    pytest.importorskip("transformers")
    report, _, _ = shares("llama4_text")
    experts = [other for other in report.others if other.fqn.endswith("experts")]
    assert sum(other.multiplications for other in experts) > 0.8 * sum(
        each.multiplications for each in (*report.layers, *report.others)
    )
    assert report.flops_share < 0.2
    report, made_up, _ = shares("inkling_text")
    assert made_up.counted  # though it looks for packed sequences where it is not traced
    assert any(shape[0] == 1 for other in report.others for shape in other.shapes if other.multiplications)


@pytest.mark.parametrize("kind", ["albert", "mixtral"])
def test_an_estimate_counts_as_the_report_does(kind):
    """ALBERT runs one block four times: shapes say 83 % where it is 94 %."""
    pytest.importorskip("transformers")
    model, _ = build(kind)
    found = f8sub.estimate(model, experts=True)
    report = f8sub.conversion_report(f8sub.convert_to_float8(model, experts=True))
    share = sum(group.flops_share for group in found.groups if group.reason is None)
    assert share == pytest.approx(report.flops_share)
    assert share > 0.9


def test_a_forward_that_fails_on_fake_tensors_is_reported_once(monkeypatch):
    """torch logs the trace of an operator that raises there, over 100 lines, though the report has its error."""
    pytest.importorskip("transformers")
    model, _ = build("llama")
    plain = type(model.model.norm)

    class Norm(plain):
        def forward(self, x):
            return super().forward(x) + x.new_zeros(3)

    model.model.norm.__class__ = Norm
    logged = []
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "filters", [lambda record: bool(logged.append(record))])
    report = f8sub.conversion_report(f8sub.convert_to_float8(model))
    assert "a forward of made-up inputs raised RuntimeError" in report.assumed_because
    assert not logged
    assert not logger.disabled


def test_a_mixer_that_multiplies_by_a_layers_weight_itself():
    pytest.importorskip("transformers")
    report, made_up, _ = shares("jamba")
    for each in (report, made_up):
        read = [layer for layer in each.layers if layer.converted and layer.read_by]
        assert {layer.fqn.rpartition(".")[2] for layer in read} == {"dt_proj"}
        assert all(layer.multiplications and not layer.in_float8 for layer in read)
        assert "skip=['model.layers.*.mamba.dt_proj'] leaves them" in each.summary
        assert not any("dt_proj" in note for note in each.read_in_code)  # it is counted


def test_a_mixer_whose_fused_kernel_would():
    """The kernels are a GPU's, where they are installed: the code says what a count here cannot see."""
    pytest.importorskip("transformers")
    report, _, _ = shares("mamba")
    (note,) = report.read_in_code
    assert note.startswith("MambaMixer.")
    assert "(backbone.layers.*.mixer.out_proj)" in note
    assert note in " ".join(str(report).split())
    assert not f8sub.conversion_report(build("t5")[0]).read_in_code  # which asks for dtypes alone
