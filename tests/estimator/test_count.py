"""conversion_report with a batch: what multiplies, by whose weights, and nothing of the model changes.

Expected are products of the sizes in each model, written down here.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Transformer

N, T = 64, 6
"""Features, and tokens of a batch."""


def x_of(*shape: int) -> torch.Tensor:
    return gaussian(shape or (T, N), generator(1))


def report_of(model: nn.Module, batch=None, **options) -> f8sub.ConversionReport:
    model = f8sub.convert_to_float8(model, min_dim=0, **options)
    return f8sub.conversion_report(model, batch=x_of() if batch is None else batch)


class Beside(nn.Module):
    """A layer, and something that multiplies by parameters in its own way."""

    def __init__(self, other, call=lambda other, x: other(x)) -> None:
        super().__init__()
        self.a, self.other, self.call = nn.Linear(N, N), other, call

    def forward(self, x):
        return self.a(x[..., :N].reshape(-1, N)[:T]), self.call(self.other, x)


class Parameters(nn.Module):
    def __init__(self, forward, **shapes) -> None:
        super().__init__()
        self.run = forward
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.run(self, x)


def picked(module, x):
    """Each token's own matrix out of a stack, as mixtures without grouped products do it."""
    return torch.bmm(module.experts[x.argmax(1) % 4], x[:, :, None])


OTHERS = {
    "LSTM": (lambda: nn.LSTM(N, N, num_layers=2), None, T * 2 * 8 * N * N),
    "GRU, both ways": (lambda: nn.GRU(N, N, bidirectional=True), None, T * 2 * 6 * N * N),
    "GRUCell": (lambda: nn.GRUCell(N, N), None, T * 6 * N * N),
    "Bilinear": (lambda: nn.Bilinear(N, N, 8), lambda m, x: m(x, x), T * 8 * N * N),
    "attention of torch": (lambda: nn.MultiheadAttention(N, 2), lambda m, x: m(x, x, x), T * 4 * N * N),
    "convolution": (lambda: nn.Conv1d(N, 8, 3, groups=2), lambda m, x: m(x.t()), 4 * 8 * 3 * N // 2),
    "transposed convolution": (lambda: nn.ConvTranspose1d(N, 8, 3), lambda m, x: m(x.t()), T * 8 * 3 * N),
    "x @ weight": (lambda: Parameters(lambda m, x: x @ m.proj, proj=(N, 7)), None, T * 7 * N),
    "in_proj_weight": (
        lambda: Parameters(lambda m, x: F.linear(x, m.in_proj_weight), in_proj_weight=(5, N)),
        None,
        T * 5 * N,
    ),
    "weight @ x": (lambda: Parameters(lambda m, x: m.proj @ x.t(), proj=(7, N)), None, T * 7 * N),
    "einsum": (
        lambda: Parameters(lambda m, x: torch.einsum("tn,hnd->thd", x, m.heads), heads=(3, N, 4)),
        None,
        T * 3 * N * 4,
    ),
    "one matrix of three dimensions": (
        lambda: Parameters(lambda m, x: torch.bmm(x[None], m.shared), shared=(1, N, 8)),
        None,
        T * 8 * N,
    ),
    "every expert every token": (
        lambda: Parameters(lambda m, x: torch.bmm(x.expand(4, T, N), m.experts), experts=(4, N, 8)),
        None,
        4 * T * 8 * N,
    ),
    "one expert a token": (lambda: Parameters(picked, experts=(4, 8, N)), None, T * 8 * N),
    "a weight that is computed": (
        lambda: Parameters(lambda m, x: x @ (m.v / m.v.norm() * m.g).to(x.dtype), v=(N, 9), g=(9,)),
        None,
        T * 9 * N,
    ),
    "an embedding that makes logits": (
        lambda: nn.Embedding(11, N),
        lambda m, x: F.linear(x, m.weight) + m(torch.arange(T)).sum(),
        T * 11 * N,
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_linear_layer(kind):
    make, call, expected = OTHERS[kind]
    model = Beside(make(), *([call] if call else []))
    report = report_of(model, skip="other")
    share = T * N * N / (T * N * N + expected)
    assert report.flops_share == pytest.approx(share)
    assert report.counted == f"one forward of {T} x {N} float32"
    assert f"{share:.1%} of FLOPs (counted in one forward of {T} x {N} float32)" in report.summary
    on_meta = f8sub.conversion_report(model, batch=torch.empty(T, N, device="meta"))
    assert on_meta.flops_share == pytest.approx(share)
    assert on_meta.counted.endswith(", on meta")


def test_attention_is_no_product_with_weights():
    model = f8sub.convert_to_float8(Transformer(N, 2 * N), skip_defaults=False, skip="lm_head", min_dim=0)
    x = x_of(2, T, N)
    report = f8sub.conversion_report(model, batch=x)
    layers = 2 * (4 * N * N + 3 * 2 * N * N)
    assert report.flops_share == pytest.approx(layers / (layers + 11 * N))
    assert report.of_activations == pytest.approx(2 * 2 * T * N / (layers + 11 * N))
    assert "are not in these shares" in " ".join(str(report).split())


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.a = nn.Embedding(11, N), nn.LayerNorm(N), nn.Linear(N, N)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        return self.a(x) @ x.t()


def test_what_embeddings_make_is_no_weight():
    report = report_of(Embedded(), torch.arange(T))
    assert report.flops_share == 1.0
    assert report.of_activations == pytest.approx(T / N)
    assert not report.others


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.spare, self.lm_head = nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, x, times=3):
        for _ in range(times):
            x = self.block(x)
        return self.lm_head(x)


def test_blocks_that_repeat_and_layers_that_do_not_run():
    report = report_of(Repeated(), {"x": x_of(), "times": 5})
    assert report.flops_share == pytest.approx(5 / 6)
    assert {layer.fqn: layer.runs for layer in report.layers} == {"block": 5, "spare": 0, "lm_head": 1}
    assert "1 converted layer did not run (spare)" in report.summary
    assert "converted, and did not run: tensorwise" in str(report)
    assert f8sub.conversion_report(Repeated(), batch=(x_of(), 1)).flops_share == 0


class Reads(nn.Module):
    """What Mamba's fused kernels do with a layer's weight; ``o`` is called, too, for a part of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, x):
        return F.linear(self.a(x), self.o.weight, self.o.bias), self.o(x[:2])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_a_weight_that_other_code_multiplies_by(recipe):
    report = report_of(Reads(), recipe=recipe)
    assert report.flops_share == pytest.approx((T + 2) / (T + T + 2))
    (layer,) = (layer for layer in report.layers if layer.fqn == "o")
    assert (layer.multiplications, layer.in_float8) == ((T + 2) * N * N, 2 * N * N)
    assert layer.read_by == "the model, a Reads"
    assert (
        "other code multiplies by the weights of 1 converted layer, in high precision: skip=['o']"
        in report.summary
    )
    assert "converted, in part in float8: the model, a Reads, multiplies by its weight" in " ".join(
        str(report).split()
    )
    left = f8sub.conversion_report(f8sub.convert_to_float8(Reads(), skip="o"), batch=x_of())
    assert "multiplies by" not in left.summary


def test_parametrized_layers_are_their_own():
    model = nn.Sequential(nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, N))
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[1])
    report = report_of(model)
    assert report.flops_share == pytest.approx(1 / 3)
    assert not any(layer.read_by for layer in report.layers)


class Restless(nn.Module):
    """A forward that writes to whatever it can, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(N, N), nn.BatchNorm1d(N), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(1))
        self.calls, self.log, self.cache = 0, [], {"last": None}

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        self.log.append(len(x))
        self.cache["last"] = x
        x.mul_(2)
        return self.drop(self.norm(self.a(x)))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_of_the_model_changes(recipe, device):
    model = f8sub.convert_to_float8(Restless(), recipe, min_dim=0)
    hooked = []
    model.register_forward_hook(lambda *_: hooked.append(1))
    model.a.register_forward_pre_hook(lambda *_: hooked.append(1))
    y = model(x_of())
    y.backward(torch.randn_like(y))
    twin = copy.deepcopy(model)
    hooked.clear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    random, hooks = torch.get_rng_state(), [dict(m._forward_pre_hooks) for m in model.modules()]
    batch = {"x": x_of().to(device)}
    report = f8sub.conversion_report(model, batch=batch)
    assert report.flops_share == 1.0
    assert device == "meta" or torch.equal(batch["x"], x_of())
    assert torch.equal(torch.get_rng_state(), random)
    assert not hooked
    assert [dict(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert (model.calls, model.log, len(model.cache["last"])) == (1, [T], T)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
    for each in (model, twin):
        torch.manual_seed(3)
        each.zero_grad()
        each(x_of()).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_settings_of_backends_are_as_they_were():
    model = Beside(nn.LSTM(N, N))
    backends = torch.backends.mkldnn, torch.backends.cudnn
    before = [backend.enabled for backend in backends]
    report_of(model)
    assert [backend.enabled for backend in backends] == before
    assert torch.backends.mha.get_fastpath_enabled()


def test_primary_weights_with_masters_and_without():
    model = f8sub.convert_to_float8(Transformer(N, 2 * N), primary_weights=True)
    expected = f8sub.conversion_report(f8sub.convert_to_float8(Transformer(N, 2 * N)), batch=x_of(2, T, N))
    for _ in range(2):
        assert f8sub.conversion_report(model, batch=x_of(2, T, N)).flops_share == expected.flops_share
        f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))


def test_float8_codes_alone_are_counted_on_meta():
    model = f8sub.convert_to_float8(Beside(nn.Linear(N, N)), min_dim=0, primary_weights=True)
    f8sub.drop_high_precision(model.requires_grad_(False))
    report = f8sub.conversion_report(model, batch=x_of())
    assert f"counted in one forward of {T} x {N} float32, on meta" in report.summary
    assert report.flops_share == 1.0


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(N, N)

    def forward(self, times: int) -> torch.Tensor:
        return self.a(torch.ones(times, N))


def test_a_batch_without_tensors():
    report = f8sub.conversion_report(f8sub.convert_to_float8(Counts(), min_dim=0), batch={"times": 3})
    assert "counted in one forward of a batch without tensors" in report.summary


def speech(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if kind == "frames":
        sizes = {"d_model": N, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 100, "pad_token_id": 0}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        widths = {"encoder_ffn_dim": 2 * N, "decoder_ffn_dim": 2 * N, "num_mel_bins": 8}
        longest = {"max_source_positions": 20, "max_target_positions": 20}
        return transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**sizes, **heads, **widths, **longest)
        )
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    sizes = {"hidden_size": N, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 2 * N}
    return transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(
            **sizes, **convolutions, **positions, num_feat_extract_layers=2, vocab_size=20
        )
    )


@pytest.mark.parametrize(
    ("kind", "told"), [("frames", "1 x 8 x 40 input_features"), ("samples", "1 x 16000 input_values")]
)
def test_models_of_speech_are_counted_with_the_inputs_that_they_take(kind, told):
    with torch.device("meta"):
        model = speech(kind)
    report = f8sub.conversion_report(f8sub.convert_to_float8(model, min_dim=0))
    assert f"counted in one forward of made-up {told} on meta" in report.summary


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(N, N)

    def forward(self, x):
        return self.a(x[x[:, 0] > 0]) if x.sum() > 0 else self.a(x)


def test_a_forward_that_fails():
    model = f8sub.convert_to_float8(Looks(), min_dim=0)
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"counted raised TypeError: .*: give it as model\.forward takes it"
    ):
        f8sub.conversion_report(model, batch={"tokens": x_of()})
    with pytest.raises(f8sub.Float8ConfigError, match="ran on meta, because its tensors are on meta"):
        f8sub.conversion_report(model, batch=x_of().to("meta"))
    assert f8sub.conversion_report(model, batch=x_of()).flops_share == 1.0
    with torch.device("meta"):
        model = f8sub.convert_to_float8(Looks(), min_dim=0)
    with pytest.raises(f8sub.Float8ConfigError, match=r"ran on meta, because a\.weight is on meta"):
        f8sub.conversion_report(model, batch=x_of())


def test_code_of_torchscript_is_not_counted():
    model = nn.Sequential(nn.Linear(N, N), torch.jit.script(nn.Linear(N, N)))
    told = "counted raised TypeError: a RecursiveScriptModule has no Python forward"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.conversion_report(model, batch=x_of())


def test_without_a_batch_shares_are_assumed_and_what_nothing_says_is_named():
    proj = Parameters(lambda m, x: x @ m.proj, proj=(N, 3 * N))
    model = f8sub.convert_to_float8(Beside(proj), min_dim=0)
    report = f8sub.conversion_report(model)
    share = 3 * N * N / (4 * N * N + N)
    assert report.summary.startswith(
        "1 of 1 linear layer in float8, 100.0% of FLOPs (assumed: every layer once per token)"
    )
    assert report.not_counted == ("other.proj",)
    assert report.not_counted_share == pytest.approx(share)
    assert f"not counted: what {share:.1%} of parameters may multiply; batch= counts it" in report.summary
    assert "These may multiply, too, and are not counted: other.proj." in str(report)
    lstm = f8sub.conversion_report(f8sub.convert_to_float8(Beside(nn.LSTM(N, N)), min_dim=0))
    assert lstm.flops_share == pytest.approx(1 / 9)
