"""PEFT's adapters over float8 experts: beside the codes, in high precision, before or after conversion, and merged."""

import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")

import f8sub  # noqa: E402
from f8sub.delayed.state import states_of  # noqa: E402
from f8sub.experts import grouped_linear, seams  # noqa: E402
from f8sub.experts.module import Float8Experts  # noqa: E402
from tests.data_sets import gaussian, generator  # noqa: E402
from tests.experts.adapter_models import (  # noqa: E402
    RANK,
    adapted,
    config,
    fill,
    loss_and_gradients,
    loss_of,
)
from tests.experts.models import (  # noqa: E402
    OwnExperts,
    experts_of,
    layer_of,
    of_transformers,
)
from tests.selection import of_torchtitan_0_3  # noqa: E402

KINDS = ["qwen3_moe", "gpt_oss"]
NAMES = ("gate_up_proj", "down_proj")


def by_expert(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, scores: torch.Tensor, factors: dict[str, Any]
) -> torch.Tensor:
    """Each expert a Float8Linear and a low-rank product beside it, in float32."""
    out = hidden.new_zeros(hidden.shape)
    for expert in range(module.num_experts):
        token, slot = (index == expert).nonzero().unbind(1)
        if not len(token):
            continue

        def multiplied(name: str, x: torch.Tensor, expert: int = expert) -> torch.Tensor:
            weight, (a, b, scaling) = getattr(module, name)[expert], factors[name]
            y = layer_of(weight.t() if module.is_transposed else weight, "rowwise")(x)
            y = (
                y
                + scaling
                * x
                @ a.view(module.num_experts, RANK, -1)[expert].t()
                @ b.view(-1, RANK, module.num_experts)[:, :, expert].t()
            )
            return y + getattr(module, f"{name}_bias")[expert] if module.has_bias else y

        y = multiplied("down_proj", module._apply_gate(multiplied("gate_up_proj", hidden[token])))
        out = out.index_add(0, token, y * scores[token, slot][:, None])
    return out


def adapters(model: nn.Module) -> dict[str, Any]:
    """The two factors and the scale of each weight's adapter."""
    return {
        module.parameter_name: (
            module.lora_A["default"].weight,
            module.lora_B["default"].weight,
            module.scaling["default"],
        )
        for module in model.modules()
        if hasattr(module, "parameter_name")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_is_a_float8_layer_and_an_adapter(kind):
    model = adapted(kind, dtype=torch.float32)
    loss, _ = loss_and_gradients(model)
    plain = of_transformers(kind).float().requires_grad_(False)
    f8sub.convert_to_float8(plain, "rowwise", experts=False, backend="reference")
    factors = {
        name: (a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_(), scaling)
        for name, (a, b, scaling) in adapters(model).items()
    }
    for module in experts_of(plain):
        module.forward = types.MethodType(lambda *given: by_expert(*given, factors), module)
    expected, _ = loss_and_gradients(plain)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, (a, b, _) in adapters(model).items():
        torch.testing.assert_close(a.grad, factors[name][0].grad, rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(b.grad, factors[name][1].grad, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_conversion_and_peft_does_not_matter(kind):
    (loss, gradients), (other, others) = (
        loss_and_gradients(adapted(kind, after=after)) for after in (False, True)
    )
    assert torch.equal(loss, other)
    assert gradients.keys() == others.keys()
    assert len(gradients) == 4
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_codes_alone_compute_as_high_precision_does_and_a_small_adapter_counts():
    """What an adapter adds is less than a step of e4m3: the sum's codes would be the weight's own."""
    model, plain = (adapted("qwen3_moe", primary_weights=primary) for primary in (True, False))
    f8sub.drop_high_precision(model)
    assert torch.equal(loss_and_gradients(model)[0], loss_and_gradients(plain)[0])
    (experts,) = experts_of(model)
    assert experts.down_proj.primary.master is None
    wrapper = next(m for m in model.modules() if getattr(m, "parameter_name", "") == "down_proj")
    fill(model, 0.01)
    x, rng = gaussian((8, 32), generator(2)).bfloat16(), generator(4)
    index = torch.randint(0, 6, (8, 2), generator=rng)
    scores = torch.full((8, 2), 0.5, dtype=torch.bfloat16)
    seen = []
    with grouped_linear.watching(lambda module, product: seen.append(product)):
        with model.disable_adapter():
            without = wrapper(x, index, scores)
        with_them = wrapper(x, index, scores)
    assert not torch.equal(with_them, without)
    # The products in float8 are those of the weight's own codes, with adapters and without.
    assert [p.weight.shape for p in seen[:2]] == [p.weight.shape for p in seen[2:]]
    assert torch.equal(seen[0].y, seen[2].y)


def test_adapters_that_are_off_leave_the_bits():
    model = adapted("qwen3_moe")
    with model.disable_adapter():
        loss = loss_of(model)
    plain = of_transformers("qwen3_moe")
    f8sub.convert_to_float8(plain, "rowwise", experts=True, backend="reference")
    assert torch.equal(loss, loss_of(plain))


def test_several_adapters_add_up():
    model = adapted("qwen3_moe", dtype=torch.float32)
    loss, _ = loss_and_gradients(model)
    model.add_adapter("other", config())
    with torch.no_grad():
        for wrapper in (m for m in model.modules() if hasattr(m, "parameter_name")):
            for layers in (wrapper.lora_A, wrapper.lora_B):
                layers["other"].weight.copy_(layers["default"].weight)
            for name in ("default", "other"):
                wrapper.lora_B[name].weight.mul_(0.5)
    model.base_model.set_adapter(["default", "other"])
    torch.testing.assert_close(loss_and_gradients(model)[0], loss, rtol=1e-6, atol=0)


def test_merging_casts_the_sum():
    model = adapted("qwen3_moe")
    wrappers = [m for m in model.modules() if hasattr(m, "parameter_name")]
    expected = {
        m.parameter_name: m.get_param().detach().clone() + m.get_delta_weight("default") for m in wrappers
    }
    merged = model.merge_and_unload()
    (experts,) = experts_of(merged)
    assert isinstance(experts, Float8Experts)
    fresh = of_transformers("qwen3_moe")
    with torch.no_grad():
        for name in NAMES:
            assert torch.equal(getattr(experts, name).plain, expected[name])
            getattr(experts_of(fresh)[0], name).copy_(expected[name])
    f8sub.convert_to_float8(fresh, "rowwise", experts=True, backend="reference")
    assert torch.equal(loss_of(merged), loss_of(fresh))


def test_codes_alone_are_merged_after_their_values_were_restored():
    model = adapted("qwen3_moe", primary_weights=True)
    f8sub.drop_high_precision(model)
    loss_and_gradients(model)
    with pytest.raises(f8sub.Float8ConfigError, match=r"experts.*restore_high_precision"):
        model.merge_and_unload()
    f8sub.restore_high_precision(model)
    merged = model.merge_and_unload()
    assert isinstance(experts_of(merged)[0], Float8Experts)
    assert loss_of(merged).isfinite()


def test_delayed_scaling_finds_the_histories_of_each_weight():
    model = adapted("qwen3_moe", "delayed")
    assert loss_and_gradients(model)[0].isfinite()
    (experts,) = experts_of(model)
    assert [len(states_of(experts, name)) for name in NAMES] == [1, 1]


def test_another_parametrization_is_multiplied_as_it_is(monkeypatch):
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    monkeypatch.setattr(seams, "_registered", {OwnExperts: seams.Seam()})
    found = []
    for parametrized in (True, False):
        experts = OwnExperts(3, 32, 48)
        if not parametrized:
            experts.up.data *= 2
        f8sub.convert_to_float8(experts, "rowwise", experts=True)
        if parametrized:
            nn.utils.parametrize.register_parametrization(experts, "up", Double())
        found.append(experts(gaussian((16, 32), generator(5)), torch.tensor([5, 5, 16])))
    assert torch.equal(*found)


class Reading(OwnExperts):
    """Reads its weights otherwise than by a grouped product."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        seen = torch.stack([self.down.square().mean(), self.down.transpose(1, 2).relu().amax()])
        return super().forward(x, ends) * seen.sum()


@pytest.mark.parametrize("several", [False, True])
def test_other_code_reads_the_sum(several, monkeypatch):
    from peft.tuners.lora.layer import ParamWrapper

    monkeypatch.setattr(seams, "_registered", {OwnExperts: seams.Seam(), Reading: seams.Seam()})
    found, x, ends = [], gaussian((16, 32), generator(5)), torch.tensor([5, 5, 16])
    for kind in (OwnExperts, Reading):
        experts = f8sub.convert_to_float8(kind(3, 32, 48), "rowwise", experts=True).requires_grad_(False)
        wrapped = ParamWrapper(experts, "default", parameter_name="down", config=config(), r=RANK)
        if several:
            wrapped.update_layer("other", RANK, lora_alpha=8, config=config())
            wrapped.set_adapter(["default", "other"])
        fill(wrapped)
        found.append(wrapped(x, ends).detach())
    deltas = [wrapped.get_delta_weight(name) for name in (["default", "other"] if several else ["default"])]
    whole = (experts.down.plain + sum(deltas)).double()
    torch.testing.assert_close(
        found[1], found[0] * (whole.square().mean() + whole.max()), check_dtype=False, rtol=1e-5, atol=1e-7
    )


def test_torchtitans_experts():
    titan = of_torchtitan_0_3("torchtitan.models.common.moe")
    if not hasattr(titan.GroupedExperts, "_grouped_mm"):
        pytest.skip("torchtitan 0.2 has no seam")
    from peft.tuners.lora.layer import ParamWrapper

    plain = titan.GroupedExperts(titan.GroupedExperts.Config(dim=32, hidden_dim=48, num_experts=3))
    rng = generator(4)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(0.2 * gaussian(tuple(parameter.shape), rng))
    experts = f8sub.convert_to_float8(plain.bfloat16(), "rowwise", experts=True).requires_grad_(False)
    wrapped = ParamWrapper(experts, "default", parameter_name="w2_EDF", config=config(), r=RANK)
    x = gaussian((16, 32), rng).bfloat16()
    base = wrapped(x, torch.tensor([5, 0, 11]))
    assert torch.equal(base, experts(x, torch.tensor([5, 0, 11])))  # PEFT begins with an adapter of zeros
    fill(wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = wrapped(x, torch.tensor([5, 0, 11]))
    y.backward(gaussian(tuple(y.shape), rng).bfloat16())
    assert not torch.equal(y, base)
    assert wrapped.lora_A["default"].weight.grad.any()
