"""Which norms ``fuse_producers`` recognises, by what their callers do with the result, and why it leaves others."""

import copy

import pytest
import torch
from torch import nn

import f8sub
from f8sub import Float8ConfigError
from f8sub.norm import FusedNorm
from tests.dist.models import seed_weights
from tests.test_feed_forward import assert_equal, results
from tests.test_norm import EPS, WIDTH, Block, LlamaNorm, inputs


class Other(nn.Module):
    """A norm, and ``forward`` of it and of two layers."""

    def __init__(self, forward: object, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=EPS) if norm is None else norm
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.high = nn.LayerNorm(WIDTH)
        self.own = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self, x)


def layers_of(s: Other, x: torch.Tensor) -> torch.Tensor:
    h = s.norm(x)
    return s.first(h) + s.second(h)


class Routed(nn.Module):
    """A router in high precision beside a float8 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(x) * self.router(x).amax(-1, keepdim=True)


class Gemma(LlamaNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1 + self.weight.float())).to(
            x.dtype
        )


NOT_FUSED = {
    "a residual of it": (lambda s, x: s.norm(x) + s.second(s.norm(x)), None, "is read by add"),
    "a module in high precision": (
        lambda s, x: s.first(s.high(s.norm(x))),
        None,
        r"is read by high \(LayerNorm\)",
    ),
    "no module": (lambda s, x: s.first(torch.relu(s.norm(x))), None, "is read by relu"),
    "its caller returns it": (lambda s, x: s.norm(s.first(x)), None, "is read by output"),
    "it is not called": (lambda s, x: s.first(x), None, "is not called"),
    "what it is called by has no graph": (
        lambda s, x: next(s.first(s.norm(x)) for _ in range(x.shape[0])),
        None,
        "cannot be traced",
    ),
    "no eps": (layers_of, nn.RMSNorm(WIDTH), "has no eps"),
    "another norm": (layers_of, Gemma(WIDTH, EPS), r"\(Gemma\) is no RMSNorm"),
    "another width": (lambda s, x: s.first(s.norm(x)[..., :1]), None, "is read by getitem"),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_is_not_fused_is_named(name):
    forward, norm, reason = NOT_FUSED[name]
    model = nn.Sequential(f8sub.convert_to_float8(Other(forward, norm)))
    kind = type(model[0].norm)
    with pytest.raises(Float8ConfigError, match=f"found: 0.norm .*{reason}"):
        f8sub.fuse_producers(model)
    with pytest.raises(Float8ConfigError, match=reason):
        f8sub.fuse_producers(model, modules="0.norm")
    assert type(model[0].norm) is kind


def test_layers_whose_casts_have_no_kernels():
    for recipe in ("mxfp8", "nvfp4", "rowwise_with_gw_hp"):
        model = f8sub.convert_to_float8(Other(layers_of), recipe=recipe)
        with pytest.raises(Float8ConfigError, match="float8 layers alone that its kernels cast for"):
            f8sub.fuse_producers(model)


def test_norms_by_name():
    model = f8sub.convert_to_float8(Block())
    f8sub.fuse_producers(model, modules=["ffn_norm", "feed_forward"])
    assert isinstance(model.ffn_norm, FusedNorm)
    assert type(model.attention_norm) is nn.RMSNorm
    with pytest.raises(Float8ConfigError, match="ffn_norm is fused already"):
        f8sub.fuse_producers(model, modules="nothing")
    assert isinstance(f8sub.fuse_producers(model, modules="attention_norm").attention_norm, FusedNorm)


def test_a_norm_is_fused_without_a_feed_forward():
    model = f8sub.convert_to_float8(seed_weights(Other(layers_of)).bfloat16(), recipe="rowwise")
    fused = f8sub.fuse_producers(copy.deepcopy(model))
    assert isinstance(fused.norm, FusedNorm)
    assert_equal(*([t for t in results(m, *inputs()) if t is not None] for m in (fused, model)))


def test_transformers_llama_has_all_its_blocks_norms_fused():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    fused = f8sub.fuse_producers(f8sub.convert_to_float8(LlamaForCausalLM(config)))
    for layer in fused.model.layers:
        assert isinstance(layer.input_layernorm, FusedNorm)
        assert isinstance(layer.post_attention_layernorm, FusedNorm)
    assert not isinstance(fused.model.norm, FusedNorm)


class Nested(nn.Module):
    """torchtitan 0.3's: q, k and v are layers of a module of the attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = (
            nn.RMSNorm(WIDTH, eps=EPS),
            nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 32))),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(-1, keepdim=True) + self.attention(self.norm(x))


def test_layers_that_are_nested_read_it_alone():
    assert isinstance(f8sub.fuse_producers(f8sub.convert_to_float8(Nested())).norm, FusedNorm)


def test_a_reader_with_matrices_in_high_precision():
    model = nn.Sequential(nn.RMSNorm(WIDTH, eps=EPS), Routed())
    f8sub.convert_to_float8(model, skip="router")
    with pytest.raises(
        Float8ConfigError, match=r"0 is read by 1 \(Routed\), which does not read it by float8 layers"
    ):
        f8sub.fuse_producers(model)


def test_feed_forwards_that_cannot_be_fused_are_named_though_norms_could():
    model = f8sub.convert_to_float8(Block(), recipe={"w1": "rowwise", "*": "tensorwise"})
    with pytest.raises(Float8ConfigError, match="feed_forward has w1 with recipe 'rowwise'"):
        f8sub.fuse_producers(model)
    assert type(model.attention_norm) is nn.RMSNorm
