"""What can be seen of ``scripts/tune_gemm.py`` without a GPU: its budget, what it writes, and that it says so."""

import dataclasses
import importlib
import json

import pytest
import torch

from f8sub.kernels import reference
from f8sub.kernels.gemm import block_scales, tuning
from tests.kernels.interpreted import needs_triton


@pytest.fixture
def tune():
    return importlib.import_module("scripts.tune_gemm")


@needs_triton
def test_its_budget_tells_a_wrong_scale_from_a_rounding(tune):
    for pair in tune.PAIRS:
        a, b = tune.made((72, 400, 56), pair, 1, "cpu")
        assert block_scales.is_laid_out(a)
        assert block_scales.is_laid_out(b)
        right = reference.gemm_nt(a, b, torch.float32, False)
        assert tune.excess(right, a, b, slice(None)) < 0.01
        assert tune.excess(right.bfloat16(), a, b, slice(None, None, 3)) < 1
        a.scale_inv[0, 1] *= 1.125
        assert tune.excess(right, a, b, slice(None)) > 1


@needs_triton
def test_what_it_writes_is_what_is_looked_up(tune, monkeypatch, tmp_path):
    config = tune.configs()[1]
    figures = {
        "scaled_mm": {"us": 1.0, "spread_us": 0.1, "tflops": 900.0, "gb_per_s": 1.0},
        str(config): {"us": 0.9, "spread_us": 0.1, "tflops": 1000.04, "gb_per_s": 1.0},
    }
    shape = (8192, 4096, 14336)
    row = tune.product("1x128 x 1x128", shape, figures, [config])
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.of.cache_clear()
    tuning.file_of("Some GPU").write_text(json.dumps({"products": [row]}))
    (found,) = tuning.of("Some GPU", *tune.PAIRS["1x128 x 1x128"])
    assert found.rates == {"scaled_mm": 900.0, "triton": 1000.0}
    assert found.winner == "triton"
    assert found.config == dataclasses.asdict(config)
    assert tuning.of("Some GPU", *tune.PAIRS["256x256 x 256x256"]) == ()
    tuning.of.cache_clear()


def test_measurements_in_the_package_can_be_read():
    """Of every GPU: winners and tiles are what the backends take."""
    for path in tuning.FOLDER.glob("*.json"):
        document = json.loads(path.read_text())
        assert tuning.file_of(document["gpu"]) == path
        assert document["products"]
        for row in document["products"]:
            measured = tuning.Measured(tuple(row["shape"]), row["rates"], row["config"])
            assert measured.winner in ("scaled_mm", "triton")
            assert (row["config"] is None) == ("triton" not in row["rates"])
