"""On a GPU whose tensor cores a recipe does not fit, a conversion says that it is slow, and what would not be."""

import warnings

import pytest
import torch
from torch import nn

import f8sub
from f8sub.kernels.gemm import select
from f8sub.kernels.gemm.select import Plan
from f8sub.recipe import recipe_names
from tests.convert.models import K, mlp

GPUS = {"hopper": ((9, 0), "13.0"), "ada": ((8, 9), "12.8")}


@pytest.fixture
def gpu(monkeypatch, request):
    """A CUDA device by capability alone: where models on meta are converted for."""
    capability, cuda = GPUS[request.param]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: CUDA)
    caches = (Plan.make, select.support.why_no_triton, select.triton_mm.why_not_device)
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
        model.up.follow(CUDA)
    model.down.follow(CUDA)  # pytest makes an error of another warning
    assert "mxfp8, reference" in repr(model.up)


def test_a_cpu_has_nothing_native_and_meta_multiplies_nothing_so_neither_is_told():
    model = f8sub.convert_to_float8(mlp(), "mxfp8")
    model.up.follow(torch.device("meta"))
