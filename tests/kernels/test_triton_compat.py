"""Names that differ between versions of Triton are looked for in one place, which says what a version lacks."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from tests.kernels.interpreted import needs_triton

pytestmark = needs_triton
HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
ASYNC_COPY = "triton.experimental.gluon.language.nvidia.ampere.async_copy"
LOADS = "async_load", "async_copy_global_to_shared"


def imported_anew() -> ModuleType:
    """The module as it is where Triton is what it is now."""
    from f8sub.kernels.triton import triton_compat

    spec = importlib.util.find_spec(triton_compat.__name__)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_this_version_has_all_names():
    made = imported_anew()
    assert made.why_not() is None
    assert made.why_no_gluon() is None
    assert made.INTERPRETED is False


@pytest.mark.parametrize(("module", "name"), [(f"{HOPPER}.tma", "load_block"), (ASYNC_COPY, "load_pointers")])
@pytest.mark.parametrize("has", [LOADS, LOADS[:1], LOADS[1:]], ids=["both", "3.9's", "3.7's"])
def test_a_load_has_the_newest_name_that_there_is(monkeypatch, module, name, has):
    """3.9 has the older name, too, for an error: what is loaded by it is not compiled."""
    module = importlib.import_module(module)
    for each in LOADS:
        monkeypatch.delattr(module, each, raising=False)
    for each in has:
        monkeypatch.setattr(module, each, object(), raising=False)
    made = imported_anew()
    assert getattr(made, name) is getattr(module, has[0])
    assert made.why_no_gluon() is None


def says(reason: str | None, name: str) -> None:
    import triton

    assert reason is not None
    assert triton.__version__ in reason
    assert name in reason
    assert "known to work with 3.6, 3.7, 3.8 and 3.9" in reason


def test_what_gluon_lacks_is_told_of_the_kernels_for_hopper_alone(monkeypatch):
    module = importlib.import_module(ASYNC_COPY)
    for each in LOADS:
        monkeypatch.delattr(module, each, raising=False)
    made = imported_anew()
    says(made.why_no_gluon(), "ampere.async_copy.async_load or async_copy_global_to_shared")
    assert made.why_not() is None


def test_a_triton_without_gluon_has_the_other_kernels(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("triton.experimental")]:
        monkeypatch.setitem(sys.modules, name, None)
    made = imported_anew()
    assert made.why_not() is None
    says(made.why_no_gluon(), "triton.experimental.gluon")


def test_what_triton_lacks_is_told_of_all_kernels(monkeypatch):
    monkeypatch.delattr(importlib.import_module("triton.compiler"), "CompiledKernel")
    made = imported_anew()
    says(made.why_not(), "triton.compiler.CompiledKernel")
    says(made.why_no_gluon(), "triton.compiler.CompiledKernel")


@pytest.fixture
def hopper(monkeypatch):
    """A device that is an H200 by name."""
    from f8sub.kernels.gemm import blockwise
    from f8sub.kernels.triton import support

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    caches = support.why_no_triton, blockwise.why_not_device
    for cache in caches:
        cache.cache_clear()
    yield torch.device("cuda", 0)
    for cache in caches:
        cache.cache_clear()


def test_devices_have_no_kernels_of_what_a_version_lacks(hopper, monkeypatch):
    from f8sub.kernels.gemm import blockwise
    from f8sub.kernels.triton import support, triton_compat

    assert support.why_no_triton(hopper) is None
    assert blockwise.why_not_device(hopper) is None
    support.why_no_triton.cache_clear()
    blockwise.why_not_device.cache_clear()
    monkeypatch.setitem(triton_compat._missing, "triton.experimental", ["a.name"])
    assert support.why_no_triton(hopper) is None
    says(blockwise.why_not_device(hopper), "a.name")
    support.why_no_triton.cache_clear()
    monkeypatch.setitem(triton_compat._missing, "triton", ["another.name"])
    says(support.why_no_triton(hopper), "another.name")


def test_products_are_added_with_one_rounding_whatever_triton_does_by_default(monkeypatch):
    """Products of blocks have other bits else, casts the same ones by more instructions.

    Triton 3.10 is to have another default, which this variable chooses in others.
    """
    from tests.kernels.compiled import cases, compiler, gemms, gradients, grouped

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    by_groups = next(case for case in grouped.cases() if "1x128 x 1x128" in case.words)
    rows = next(case for case in cases.launches("1x128", "bf16", cases.WHOLE, "row"))
    sums = next(case for case in gradients.cases() if case.words == "add fp32 e4m3")
    launches = [
        gemms.launch_of(gemms.cases()[0]),
        grouped.launch_of(by_groups),
        gradients.launch_of(sums),
        rows.launches()[rows.index],
    ]
    for launch in launches:
        made = compiler.compiled(launch)
        assert made.metadata.enable_fp_fusion is True
        assert "fma.rn.f32" in made.asm["ptx"]
        assert "add.f32" not in made.asm["ptx"]
