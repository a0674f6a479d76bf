"""conversion_report: equal layers in one row, what is no nn.Linear, and shares of the whole model.

On a GPU whose tensor cores a recipe does not fit, a conversion says that it is slow, and what would not be.
"""

import warnings

import pytest
import torch
from torch import nn

import f8sub
from f8sub import recipe_names
from f8sub.errors import first_and_more
from f8sub.kernels.gemm import select
from f8sub.kernels.gemm.select import Plan
from f8sub.text_table import plural
from tests.convert.models import K, N, mlp
from tests.models import Transformer


def report_of(model: nn.Module, **options) -> f8sub.ConversionReport:
    return f8sub.conversion_report(f8sub.convert_to_float8(model, **options))


def rows(report: f8sub.ConversionReport) -> dict[str, list[str]]:
    """Cells of each row, by the layers' name."""
    lines = [line.split() for line in str(report).splitlines() if line.startswith("  ")]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 3 and cells[3] == "x"}


def test_the_first_line_is_the_summary():
    report = report_of(mlp(), recipe="tensorwise")
    layers = {layer.fqn: layer for layer in report.layers}
    assert (layers["up"].in_features, layers["up"].out_features, layers["up"].converted) == (K, N, True)
    share, own = 2 * K * N / (2 * K * N + K * 16), 2 * K * N / (2 * K * N + K * 16 + N + K + 16)
    assert report.flops_share == pytest.approx(share)
    assert report.parameters_share == pytest.approx(own)
    assert report.summary == (
        f"2 of 3 linear layers in float8, {share:.1%} of FLOPs (assumed: every layer once per token), {own:.1%} of "
        "parameters (tensorwise, scaled_mm)"
    )
    lines = str(report).splitlines()
    assert lines[0] == report.summary
    assert lines[2:6:3] == ["in float8: tensorwise, scaled_mm", "not in float8: output head (default)"]


@pytest.mark.parametrize("gemms", [{"dgrad"}, {"dgrad", "wgrad"}])
def test_what_stays_in_high_precision_is_said_once(gemms):
    recipe = f8sub.get_recipe("tensorwise").with_high_precision(**dict.fromkeys(gemms, True))
    how = report_of(mlp(), recipe=recipe).layers[0].detail
    assert all(how.count(gemm) == 1 for gemm in gemms)
    (named,) = {
        layer.detail for layer in report_of(mlp(), recipe="rowwise_with_gw_hp").layers if layer.converted
    }
    # A CPU's _scaled_mm takes no scales of rows in torch 2.11.
    backend = "reference" if torch.__version__.startswith("2.11.") else "scaled_mm"
    assert named == f"rowwise_with_gw_hp, {backend}, wgrad in high precision"


def test_numbers_agree_with_their_nouns():
    model = nn.Sequential(nn.Linear(K, K))
    assert report_of(model).summary.startswith("1 of 1 linear layer in float8")
    with pytest.warns(f8sub.Float8Warning, match="nothing more to convert; the model has 1 module in float8"):
        f8sub.convert_to_float8(model)
    assert (plural(0, "layer"), plural(1, "layer"), plural(2000, "layer")) == (
        "0 layers",
        "1 layer",
        "2,000 layers",
    )
    assert (first_and_more(["a"]), first_and_more(["a", "b", "c"])) == ("a", "a and 2 more")


def test_a_model_that_was_not_converted():
    report = f8sub.conversion_report(mlp())
    assert report.flops_share == 0
    assert "not in float8: convert_to_float8 has not seen it" in str(report)
    assert f8sub.conversion_report(nn.ReLU()).flops_share == 0


def test_equal_layers_are_one_row_and_a_large_model_fits_a_screen():
    with torch.device("meta"):
        model = Transformer(1024, 4096, blocks=48, classes=32000)
    text = str(report := report_of(model))
    cells = rows(report)
    square, all_of_it = 1024 * 1024, 48 * (4 + 3 * 4) * 1024 * 1024 + 32000 * 1024
    assert cells["blocks.*.q"][:5] == ["48", "1024", "x", "1024", f"{48 * square / all_of_it:.1%}"]
    assert cells["lm_head"][:4] == ["1", "32000", "x", "1024"]
    assert len(cells) == 8
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines()[1:])) <= 100


class Moe(nn.Module):
    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Module(), nn.Module()
        self.router.top_k, self.router.weight = top_k, nn.Parameter(torch.empty(8, K))
        self.experts.w1 = nn.Parameter(torch.empty(8, N, K))
        self.experts.w2 = nn.Parameter(torch.empty(8, K, N))
        self.position = nn.Parameter(torch.empty(1, 5, K))
        self.shared = nn.Linear(K, N)


@pytest.mark.parametrize(
    ("top_k", "used", "words"), [(2, 2, "2 of 8 used by a token"), (0, 8, "all 8 counted")]
)
def test_experts_count_as_often_as_a_token_uses_them(top_k, used, words):
    report = report_of(Moe(top_k))
    parameters = 8 * 2 * N * K
    routing = 8 * K
    assert report.flops_share == pytest.approx(N * K / (N * K + routing + parameters * used / 8))
    assert report.parameters_share == pytest.approx(N * K / (N * K + N + routing + 5 * K + parameters))
    assert [other.fqn for other in report.others] == ["router", "experts"]
    assert words in " ".join(str(report).split())


def test_top_k_of_a_config_and_experts_in_a_list():
    model = nn.Module()
    model.config = type("Config", (), {"num_experts_per_tok": 1})()
    model.mlp = nn.Module()
    model.mlp.experts = nn.ModuleList(nn.Linear(K, N) for _ in range(4))
    model.up = nn.Linear(K, N)
    report = report_of(model, skip="up")
    assert report.flops_share == pytest.approx(1 / 2)
    assert [layer.multiplications for layer in report.layers] == [K * N / 4] * 4 + [K * N]


def test_attention_of_torch_and_convolutions():
    layer = nn.TransformerEncoderLayer(64, 2, 128)
    assert report_of(layer).flops_share == pytest.approx(2 * 128 / (2 * 128 + 4 * 64))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Embedding(10, 16), nn.Linear(16, 16))
    report = report_of(model)
    assert (report.flops_share, report.others[0].multiplications) == (1.0, None)
    assert rows(report)["0"] == ["1", "16", "x", "3", "x", "3", "x", "3", "?", f"{432 / 880:.1%}"]


GPUS = {"hopper": ((9, 0), "13.0"), "ada": ((8, 9), "12.8")}


@pytest.fixture
def gpu(monkeypatch, request):
    """A CUDA device by capability alone: where models on meta are converted for."""
    capability, cuda = GPUS[request.param]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: CUDA)
    caches = (Plan.make, select.support.why_no_triton, select.blockwise.why_not_device)
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


CUDA = torch.device("cuda")
NATIVE = {"hopper": {"mxfp8", "nvfp4"}, "ada": {"blockwise", "gridquant", "mxfp8", "nvfp4"}}


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(K, K), nn.Linear(K, K))


@pytest.mark.parametrize("gpu", GPUS, indirect=True)
def test_a_conversion_warns_once_and_names_what_would_be_native(gpu):
    f8sub.convert_to_float8(on_meta(), "mxfp8", backend="reference")  # who asks for it is not told
    for recipe in recipe_names():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f8sub.convert_to_float8(on_meta(), recipe)
        assert len(caught) == (recipe in NATIVE[gpu]), recipe
        for warning in caught:
            text = str(warning.message)
            assert warning.category is f8sub.Float8Warning
            assert warning.filename == __file__
            assert f"fprop, dgrad, wgrad of recipe {recipe!r}: no native float8 GEMM on Some GPU (SM " in text
            assert "about 30 times as long as bf16" in text
            native = set(recipe_names()) - NATIVE[gpu]
            assert f"Native there: {', '.join(sorted(native))}. " in text


@pytest.mark.parametrize("gpu", ["hopper"], indirect=True)
def test_layers_that_come_to_the_gpu_later_warn_once(gpu):
    model = f8sub.convert_to_float8(mlp(), "mxfp8")
    with pytest.warns(f8sub.Float8Warning, match="no native float8 GEMM"):
        model.up._f8sub.follow(CUDA)
    model.down._f8sub.follow(CUDA)  # pytest makes an error of another warning
    assert "mxfp8, reference" in repr(model.up)


def test_a_cpu_has_nothing_native_and_meta_multiplies_nothing_so_neither_is_told():
    model = f8sub.convert_to_float8(mlp(), "mxfp8")
    model.up._f8sub.follow(torch.device("meta"))
