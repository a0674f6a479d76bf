"""doctor: every recipe is run and compared, what is wrong is found, and the advice fits the machine."""

import dataclasses
import json
import sys

import pytest
import torch

import f8sub
from f8sub import torch_compat
from f8sub.__main__ import main
from f8sub.diagnostics import doctor, proofs
from f8sub.diagnostics import machine as machines
from f8sub.diagnostics.doctor import Diagnosis, look_at_torch, page
from f8sub.diagnostics.machine import GpuFacts, Machine
from f8sub.diagnostics.proofs import (
    Cast,
    Product,
    Proof,
    error_in_bounds,
    prove,
    why_not,
)
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.reference import quantize

H200 = GpuFacts("NVIDIA H200", 8, (9, 0), 141 * 2**30)
ON_HOPPER = ["blockwise", "delayed", "gridquant", "rowwise", "rowwise_with_gw_hp", "tensorwise"]
NOTHING = dict.fromkeys(machines.PEERS)


def machine(**changes) -> Machine:
    found = Machine(
        system="Linux x86_64",
        python="3.11.7",
        torch="2.13.0+cu130",
        cuda="13.0",
        driver="580.65.06",
        triton="3.7.1",
        nccl="2.28.3",
        gpus=(H200,),
        gpus_without_torch=8,
        problem=None,
        variables={},
        peers=NOTHING | {"transformers": "5.23.0"},
    )
    return dataclasses.replace(found, **changes)


def by_plan(plan: Plan) -> Proof:
    """What ``prove`` would return of a plan all of whose parts are right."""
    products = tuple(
        Product(gemm, backend, None if backend is None else 0.5, None, why_not(plan, gemm))
        for gemm, backend in plan.gemms.items()
    )
    return Proof(plan.recipe.name, plan.device.type, products, (Cast("x", "ours", True, None),))


@pytest.fixture
def on_an_h200():
    """The diagnosis of a machine with H200s, whose kernels cannot be run here."""
    fakes = pytest.importorskip("scripts.bench.fake_h200")
    pytest.importorskip("triton")
    with fakes.fake_h200():
        device = torch.device("cuda", 0)
        # The plans of this device are those of a GPU that is not there.
        plans = [Plan.make.__wrapped__(Plan, f8sub.get_recipe(name), device) for name in f8sub.recipe_names()]
        found = tuple(map(by_plan, plans))
        table, missing = doctor._gemm_table(machine())
        advice = tuple(doctor._advice(machine(), found, torch.device("cpu"), missing))
    return Diagnosis("0.1.0", machine(), found, table, advice)


@pytest.mark.parametrize("recipe", f8sub.recipe_names())
def test_every_recipe_is_right_here(recipe):
    proof = prove(f8sub.get_recipe(recipe), torch.device("cpu"))
    assert proof.is_right
    assert not proof.is_native
    assert proof.verdict == "no speed"
    assert {cast.operand for cast in proof.casts} == {"x", "w", "dy"}
    errors = [product.error for product in proof.products if product.backend is not None]
    assert all(0 < error <= 1 for error in errors)
    assert len(errors) == (2 if recipe == "rowwise_with_gw_hp" else 3)


def test_a_wrong_product_is_found(monkeypatch):
    right = proofs.gemm_nt
    monkeypatch.setattr(proofs, "gemm_nt", lambda *given: right(*given) * 1.02)
    proof = prove(f8sub.get_recipe("tensorwise"), torch.device("cpu"))
    assert not proof.is_right
    assert proof.verdict == "failed"
    found = Diagnosis("0.1.0", machine(gpus=()), (proof,), None, ())
    assert found.status == 1
    assert "times the bound" in page(found)


def test_a_product_that_is_nan_or_raises_is_found(monkeypatch):
    def missing(*given):
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    def nan(*given):
        return torch.full((1,), torch.nan)

    for broken, words in ((missing, "no kernel image"), (nan, "NaN or infinity")):
        monkeypatch.setattr(proofs, "gemm_nt", broken)
        proof = prove(f8sub.get_recipe("rowwise"), torch.device("cpu"))
        assert proof.verdict == "failed"
        assert words in page(Diagnosis("0.1.0", machine(gpus=()), (proof,), None, ()))


@pytest.mark.parametrize("which", ["codes", "scales"])
def test_one_wrong_bit_of_a_cast_is_found(monkeypatch, which):
    right = proofs.quantize

    def flipped(*given):
        made = right(*given)
        operand = made.rowwise or made.columnwise
        changed = operand.data if which == "codes" else operand.scale_inv
        changed.view(torch.uint8).flatten()[3] ^= 1
        return made

    monkeypatch.setattr(proofs, "quantize", flipped)
    proof = prove(f8sub.get_recipe("blockwise"), torch.device("cpu"))
    assert [cast.is_right for cast in proof.casts] == [False] * 3
    assert "the cast of dy failed" in page(Diagnosis("0.1.0", machine(gpus=()), (proof,), None, ()))


def test_the_bound_is_that_of_the_accumulator():
    """An error in units of the bound: rounding to bf16 is within it; the next bf16 number but one is not."""
    rng = torch.Generator().manual_seed(1)
    format = f8sub.get_recipe("tensorwise").fprop.a
    a, b = (quantize(torch.randn(32, 64, generator=rng), format, None).rowwise for _ in range(2))
    exact = (a.data.double() * a.scale_inv.double()) @ (b.data.double() * b.scale_inv.double()).t()
    assert error_in_bounds(exact.bfloat16(), a, b, None) <= 1
    assert error_in_bounds((exact * 1.01).bfloat16(), a, b, None) > 1
    assert error_in_bounds((exact * 1.01).bfloat16(), a, b, 64) < error_in_bounds(
        (exact * 1.01).bfloat16(), a, b, None
    )
    assert error_in_bounds(exact.bfloat16() * torch.nan, a, b, None) == float("inf")


def test_on_an_h200(on_an_h200):
    assert on_an_h200.native == ON_HOPPER
    assert on_an_h200.status == 0
    assert on_an_h200.gemm_table == "measured for an NVIDIA H200, and shipped"
    text = page(on_an_h200)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("f8sub 0.1.0: 6 of 8 recipes are native on this machine")
    assert "mxfp8, nvfp4: torch._scaled_mm multiplies scales of one byte on SM 10.0" in text
    assert "8 x NVIDIA H200, SM 9.0, 141 GiB" in text
    assert any("NCCL_MAX_CTAS" in sentence for sentence in on_an_h200.advice)


def test_an_hopper_that_was_not_measured():
    h100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3", count=1)
    table, missing = doctor._gemm_table(machine(gpus=(h100,)))
    assert missing
    assert "scripts/tune_gemm.py" in table
    advice = doctor._advice(machine(gpus=(h100,)), (), torch.device("cpu"), missing)
    assert any("tune_gemm.py" in sentence for sentence in advice)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": ()}, "built for CUDA 13.0, finds none"),
        ({"gpus": (), "cuda": None}, "built without CUDA: pip install torch"),
        ({"gpus": (), "problem": "the driver is too old"}, "cannot use it: the driver is too old"),
        ({"gpus": (), "gpus_without_torch": 0}, "There is no GPU for torch"),
        ({"gpus": (dataclasses.replace(H200, capability=(8, 0)),)}, "SM 8.0 has no float8 tensor cores"),
        ({"cuda": "12.8"}, "12.9 has them"),
        ({"cuda": "ROCm 7.0"}, "e4m3fnuz"),
        ({"triton": None}, "pip install triton"),
        ({"gpus": (H200, dataclasses.replace(H200, name="another"))}, "several kinds"),
        ({"variables": {"TRITON_INTERPRET": "1"}}, "Unset TRITON_INTERPRET"),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "Unset CUDA_LAUNCH_BLOCKING"),
        ({"variables": {"TORCHDYNAMO_DISABLE": "1"}}, "torch.compile is turned off"),
        ({"torch": "2.11.0", "peers": NOTHING | {"torchtitan": "0.3.0"}}, "needs torch 2.13 or newer"),
        ({"peers": NOTHING | {"torchao": "0.17.0"}}, "older than 0.18"),
        ({"peers": NOTHING}, "pip install transformers"),
    ],
)
def test_advice(changes, words):
    found = list(doctor._advice(machine(**changes), (), torch.device("cpu"), False))
    assert any(words in sentence for sentence in found), found


def test_variables_are_those_that_matter(monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("SOME_SECRET", "x")
    found = machines.look().variables
    assert (found["NCCL_MAX_CTAS"], found["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("16", "1")
    assert "SOME_SECRET" not in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_the_command(capsys):
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "no recipe is native" in text
    assert max(map(len, text.splitlines())) <= 80
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["native"], found["status"], len(found["proofs"])) == ([], 1, len(f8sub.recipe_names()))
    assert all(proof["right"] for proof in found["proofs"])


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    def fails(index):
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    found = machines.look()
    assert (found.gpus, found.problem) == ((), "The NVIDIA driver on your system is too old")


def test_nvidia_smi_that_fails_is_none_at_all(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nimport sys; sys.exit(9)\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machines.look().gpus_without_torch == 0
    program.write_text(f"#!{sys.executable}\nprint('580.65.06')\nprint('580.65.06')\n")
    found = machines.look()
    assert (found.gpus_without_torch, found.driver) == (2, "580.65.06")


def test_torch_has_what_f8sub_needs_and_a_layer_is_gathered():
    found = look_at_torch()
    assert [names.purpose for names in found] == [need.purpose for need in torch_compat.NEEDS]
    assert [names for names in found if names.problem] == []
    text = page(Diagnosis("0.1.0", machine(), (), None, (), found))
    assert "Private names of torch that f8sub needs\n  present, for: converting" in text
    assert not torch.distributed.is_initialized()


def test_what_torch_lacks_is_told_with_what_works_without(monkeypatch):
    monkeypatch.setattr(torch_compat, "_found", {})
    monkeypatch.setitem(torch_compat.REDUCTION.names, "torch.distributed.fsdp.FSDPModule.set_reducer", "")
    found = look_at_torch()
    (advice,) = doctor._of_torch(found, machine())
    assert advice == (
        "torch 2.13.0+cu130 is not known to f8sub for reduce_gradients_in_float8: install torch 2.11 to 2.15, or do "
        "without reduce_gradients_in_float8."
    )
    native = Proof("tensorwise", "cuda", (), ())
    diagnosed = Diagnosis("0.1.0", machine(), (native,), None, (advice,), found)
    assert (diagnosed.status, dataclasses.replace(diagnosed, torch_names=()).status) == (1, 0)
    assert "set_reducer is" in page(dataclasses.replace(diagnosed, proofs=()))
    assert any(each["problem"] for each in diagnosed.as_dict()["torch_names"])


def test_what_goes_wrong_in_a_sharded_layer_is_told(monkeypatch):
    monkeypatch.setattr(torch_compat, "_known", set())
    monkeypatch.setitem(torch_compat.GATHER.attributes, "FSDPParam", "policy_of")
    (gather,) = (names for names in look_at_torch() if names.problem is not None)
    assert gather.purpose == torch_compat.GATHER.purpose
    assert "FSDPParam.policy_of is missing" in gather.problem
