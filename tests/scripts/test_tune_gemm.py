"""What can be seen of ``scripts/tune_gemm.py`` without a GPU: its budget, what it leaves out, and what it writes."""

import dataclasses
import importlib
import json
import math
import os
from typing import NamedTuple

import pytest
import torch

import f8sub
from f8sub.kernels import reference
from f8sub.kernels.gemm import block_scales, tuning
from f8sub.kernels.gemm.measured import KERNELS
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
    gemm = tune.BlockGemm("1x128 x 1x128", (8192, 4096, 14336))
    candidate = gemm.candidates[1]
    figures = {
        "scaled_mm": {"us": 1.0, "spread_us": 0.1, "tflops": 900.0, "gb_per_s": 1.0},
        str(candidate.config): {"us": 0.9, "spread_us": 0.1, "tflops": 1000.04, "gb_per_s": 1.0},
    }
    row = gemm.entry(figures, [candidate])
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.of.cache_clear()
    tuning.file_of("Some GPU").write_text(json.dumps({"products": [row]}))
    (found,) = tuning.of("Some GPU", *tune.PAIRS["1x128 x 1x128"])
    assert found.rates == {"scaled_mm": 900.0, "triton": 1000.0}
    assert found.winner == "triton"
    assert found.config == dataclasses.asdict(candidate.config)
    assert tuning.of("Some GPU", *tune.PAIRS["256x256 x 256x256"]) == ()
    tuning.of.cache_clear()


@needs_triton
def test_whole_tensors_are_measured_with_their_accumulation_and_other_pairs_stay(tune, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.of.cache_clear()
    (path := tuning.file_of("Some GPU")).write_text(
        json.dumps({"products": [OLD, {**OLD, "fast_accum": False}]})
    )
    (gemm,) = tune.Dense(pairs=("tensor",), shapes=("8192x4096x1024",)).gemms()
    kernels = gemm.candidates
    assert [kernel.name for kernel in kernels] == ["scaled_mm", "by_row"]
    figures = {
        kernel.name: {"us": 1.0, "spread_us": 0.1, "tflops": 1000.04 + 99 * n}
        for n, kernel in enumerate(kernels)
    }
    row = gemm.entry(figures, kernels)
    path.write_text(json.dumps(tune.with_others({"gpu": "Some GPU", "products": [row]}, path)))
    pair, shape = tune.WHOLE["tensor"][:2], (8192, 4096, 1024)
    found = {fast: tuning.nearest("Some GPU", *pair, shape, fast) for fast in (True, False)}
    assert found[True].rates == {"scaled_mm": 1000.0, "by_row": 1099.0}
    assert found[True].winner == "by_row"
    assert found[False].rates == OLD["rates"]
    tuning.of.cache_clear()
    every = tune.Dense().gemms()
    assert {gemm.pair for gemm in every} == {*tune.PAIRS, *tune.WHOLE}
    for name, (*pair, fast) in tune.WHOLE.items():
        spec = getattr(f8sub.get_recipe("tensorwise"), "fprop" if name == "tensor" else "dgrad")
        assert ([spec.a, spec.b], spec.fast_accum) == (pair, fast)


@needs_triton
def test_operands_of_whole_tensors_show_a_wrong_kernel(tune, monkeypatch):
    """Of both accumulations: half of one scale is far from what a right product may lose."""
    whole = tune.whole
    monkeypatch.setattr(tune, "whole", lambda shape, pair, seed: whole((64, 96, 32), pair, seed, "cpu"))
    for pair in tune.WHOLE:
        kernel = tune.WholeKernel(pair, "scaled_mm")
        assert kernel.check() < 1
        monkeypatch.setitem(
            tune.measured.KERNELS,
            "by_row",
            lambda a, b, dtype, fast: reference.gemm_nt(a, b, dtype, fast) * 0.5,
        )
        assert tune.WholeKernel(pair, "by_row").check() > 1


OLD = {
    "a": "e4m3[allxall]",
    "b": "e4m3[allxall]",
    "shape": (8192, 4096, 1024),
    "rates": {"scaled_mm": 1300.0, "by_row": 1200.0},
    "config": None,
    "fast_accum": True,
}


class Candidate(NamedTuple):
    """One that ``tune_gemm`` checks: it finds an error, or dies."""

    error: float
    dies: bool = False

    def check(self) -> float:
        """The error, in budgets."""
        if self.dies:
            os._exit(1)
        if self.error > 100:
            raise RuntimeError("launch failed")
        return self.error


class Gemm(NamedTuple):
    """One that is timed without a GPU."""

    name: str
    candidates: list[Candidate]

    def timed(self, right: list[Candidate], rounds: int) -> dict[str, dict[str, float]]:
        """As many microseconds as its error, in thousandths."""
        return {
            f"tiles {each.error}": {"us": each.error * 1e3, "spread_us": 0.0, "tflops": 1 / each.error}
            for each in right
        }

    def entry(self, figures: dict[str, dict[str, float]], right: list[Candidate]) -> dict[str, object]:
        """All."""
        return {"right": right, "variants": figures}


@pytest.mark.long
@needs_triton
def test_those_that_are_wrong_hang_or_die_are_not_timed(tune, monkeypatch, capsys):
    monkeypatch.setattr(tune, "machine", lambda _: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    found = [
        Candidate(0.5),
        Candidate(0.25),
        Candidate(1.5),
        Candidate(math.nan),
        Candidate(200.0),
        Candidate(0.1, True),
    ]
    gemms = [Gemm("first", found), Gemm("second", found[2:])]
    (row,) = tune.tune(gemms, 2, 3, None)["products"]
    assert row["right"] == found[:2]
    printed = capsys.readouterr().out
    assert "first: tiles 0.25 <" in printed
    for reason in ("1.50 budgets", "nan budgets", "RuntimeError: launch failed", "its process died"):
        assert f": {reason}\n" in printed
    assert "2 candidates are right" in printed


@needs_triton
def test_each_kind_of_gemm_has_candidates(tune):
    """Those of few rows are others than those of many; grouped products take tiles of every recipe."""
    many, few = (tune.BlockGemm("1x128 x 1x128", (rows, 4096, 4096)) for rows in (8192, 16))
    assert not {each.config for each in many.candidates} & {each.config for each in few.candidates}
    for recipe, gemms in tune.KINDS.items():
        for gemm in gemms:
            spec = getattr(f8sub.get_recipe(recipe), gemm)
            assert len(set(tune.grouped_configs(spec, gemm == "wgrad"))) >= 4


def test_measurements_in_the_package_can_be_read():
    """Of every GPU: winners and tiles are what the backends take."""
    for path in tuning.FOLDER.glob("*.json"):
        document = json.loads(path.read_text())
        assert tuning.file_of(document["gpu"]) == path
        assert document["products"]
        for row in document["products"]:
            measured = tuning.Measured.read(row)
            assert measured.winner in KERNELS
            assert (measured.fast_accum is None) == ("by_row" not in row["rates"])
            assert (row["config"] is None) == ("triton" not in row["rates"])
