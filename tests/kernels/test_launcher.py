"""Launches of what was compiled before: CUDA is handed what Triton's own launch hands it."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.interpreted import needs_triton

pytestmark = needs_triton
ROOT = Path(__file__).parents[2]
Seen = list[tuple[str, tuple[Any, ...]]]
CASES = (
    "tensorwise bf16 both",
    "tensorwise known bf16 both",
    "rowwise bf16 both, ragged",
    "1x128 bf16 both",
    "128x128 bf16 row",
    "rowwise part bf16 row",
    "256x256 bf16 both",
    "amaxes of many fp32 row",
    "transpose fp8 column",
)


@pytest.fixture(scope="module")
def process():
    """One of its own: Triton has one driver a process."""
    with ProcessPoolExecutor(1, get_context("spawn"), _start) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


_seen: Seen = []


def _start() -> None:
    from scripts.bench import no_gpu

    no_gpu.install(lambda kernel, arguments: _seen.append((kernel, arguments)))


def _taken() -> Seen:
    found = _seen.copy()
    _seen.clear()
    return found


def compiled_by_triton() -> list[int]:
    """Counts the launches that come to Triton's own ``run``; from now on."""
    from triton.runtime.jit import JITFunction

    count, run = [0], JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return run(self, *args, **kwargs)

    JITFunction.run = counted
    return count


def same(found: Any, expected: Any) -> bool:
    """One tensor, equal numbers; what profilers are told is made anew for each launch."""
    if isinstance(expected, torch.Tensor):
        return found is expected
    if type(expected).__name__ == "LazyDict":
        return found.data == expected.data
    return bool(found == expected)


def launched_twice(words: str) -> None:
    from tests.kernels.compiled import cases

    case = next(case for case in cases.cases(cases.WHOLE) if case.words == words)
    by_triton = compiled_by_triton()
    for launch in case.launches():
        for _ in range(2):
            launch.run()
        assert by_triton == [1]
        by_triton[0] = 0
        (kernel, arguments), (again, others) = _taken()
        assert kernel == again
        assert len(arguments) == len(others)
        assert all(map(same, others, arguments))
        assert len(arguments) > len(launch.arguments)


@pytest.mark.parametrize("words", CASES)
def test_the_second_launch_is_the_first_without_triton(process, words):
    process(launched_twice, words)


def other_arguments() -> None:
    from f8sub.formats import ALL, Float8Format, Tile
    from f8sub.kernels.triton import launch

    format = Float8Format(torch.float8_e4m3fn, Tile(128, 128))
    aligned, odd = (torch.zeros(256 * 256 + 1, dtype=torch.float16)[i:] for i in (0, 1))
    matrices = [
        aligned[: 256 * 256].view(256, 256),
        odd[: 256 * 256].view(256, 256),
        aligned[: 250 * 256].view(250, 256),
        aligned[: 256 * 256].view(256, 256).bfloat16(),
    ]
    kernels = []
    for x in matrices:
        for _ in range(2):
            (each,) = launch.quantization(x, format, None).launches
            each.run()
        (first, _), (second, _) = _taken()
        assert first == second
        kernels.append(first)
    assert len(set(kernels)) == len(matrices)
    # One that differs in numbers alone is compiled once by Triton, and launched with its own numbers.
    taller = torch.zeros(512, 256, dtype=torch.float16)
    (each,) = launch.quantization(taller, format, None).launches
    for _ in range(2):
        each.run()
    assert [kernel for kernel, _ in _seen] == [kernels[0]] * 2
    for _, arguments in _taken():
        assert arguments[0] == each.programs
        assert 512 in [argument for argument in arguments if type(argument) is int]
    whole = Float8Format(torch.float8_e5m2, Tile(ALL, ALL))
    for each in launch.quantization(taller, whole, whole).launches:
        each.run()
    assert not {kernel for kernel, _ in _taken()} & set(kernels)


def test_other_dtypes_alignments_shapes_and_formats_are_other_kernels(process):
    process(other_arguments)


def bounded() -> None:
    from f8sub.formats import Float8Format, Tile
    from f8sub.kernels.triton import launch, launcher

    launcher._compiled.clear()
    launcher.MOST = 3
    format = Float8Format(torch.float8_e4m3fn, Tile(128, 128))
    for rows in (128, 256, 384, 512, 128):
        (each,) = launch.quantization(torch.zeros(rows, 128), format, None).launches
        each.run()
        assert len(launcher._compiled) <= launcher.MOST
    assert [arguments[0] for _, arguments in _taken()] == [1, 2, 3, 4, 1]


def test_what_is_kept_does_not_grow_without_end(process):
    process(bounded)


def roles(tensors: dict[str, torch.Tensor]) -> list[list[Any]]:
    """What was launched since the last look: kernels with their arguments, tensors by the role that they lie in."""
    scratch: list[int] = []

    def role(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return "profiler" if type(value).__name__ == "LazyDict" else value
        address = value.data_ptr()
        for name, tensor in tensors.items():
            if 0 <= address - tensor.data_ptr() < max(tensor.nbytes, 1):
                return name, address - tensor.data_ptr()
        assert not value.any(), "scratch memory is zero"
        scratch.append(address)
        return "scratch", address - scratch[0]

    return [[kernel, *map(role, arguments)] for kernel, arguments in _taken()]


def prepared(recipe: str, rowwise: bool, columnwise: bool, known: bool) -> None:
    import contextlib

    import f8sub
    from f8sub.kernels.triton import launch, prepared, quantize_cuda, support

    support.takes, support.device_of = lambda x: x.numel() > 0, contextlib.nullcontext
    spec = f8sub.get_recipe(recipe)
    row, col = (spec.fprop.a if rowwise else None), (spec.wgrad.b if columnwise else None)
    found = []
    for seed in range(2):
        x = torch.randn(256, 384, generator=torch.Generator().manual_seed(seed)).bfloat16()
        amax = x.abs().amax().float().view(1, 1) if known else None
        plan = launch.quantization(x, row, col, None, amax)
        for each in plan.launches:
            each.run()
        named = {"x": x, **({} if amax is None else {"amax": amax})}

        def of(operands: Any, named: dict[str, torch.Tensor] = named) -> dict[str, torch.Tensor]:
            given = zip(("row", "col"), operands, strict=True)
            tensors = {
                f"{side} {n}": t for side, o in given if o for n, t in zip("ds", o.tensors, strict=True)
            }
            return {**named, **tensors}

        expected = roles(of((plan.rowwise, plan.columnwise)))
        for _ in range(2):
            made = quantize_cuda.quantize(x, row, col, amax=amax)
            tensors = of((made.rowwise, made.columnwise))
            assert roles(tensors) == expected
            assert len({t.data_ptr() for t in tensors.values()}) == len(tensors)
            for operand, planned in zip(made[:2], plan[1:3], strict=True):
                assert (operand is None) == (planned is None)
                for a, b in zip(
                    operand.tensors if operand else (), planned.tensors if planned else (), strict=True
                ):
                    assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        found.append(expected)
    assert found[0] == found[1]
    assert found[0]
    assert len(prepared._known) == 1


@pytest.mark.parametrize(
    "case",
    [
        ("tensorwise", True, True, True),
        ("tensorwise", True, True, False),
        ("tensorwise", False, True, True),
        ("rowwise", True, True, False),
        ("rowwise", True, False, False),
        ("rowwise", False, True, False),
        ("blockwise", True, True, False),
        ("gridquant", False, True, False),
    ],
    ids=str,
)
def test_what_was_worked_out_once_launches_the_same_over_other_tensors(case):
    with ProcessPoolExecutor(1, get_context("spawn"), _start) as pool:
        pool.submit(prepared, *case).result()


def derived() -> None:
    import contextlib

    import f8sub
    from f8sub.kernels.triton import launch, quantize_cuda, support

    support.takes, support.device_of = lambda x: x.numel() > 0, contextlib.nullcontext
    for recipe in ("tensorwise", "rowwise", "blockwise", "gridquant"):
        spec = f8sub.get_recipe(recipe)
        for _ in range(2):
            w = quantize_cuda.quantize(torch.randn(256, 384).bfloat16(), spec.fprop.b, None).rowwise
            plan = launch.derivation(w, spec.dgrad.b)
            _taken()
            for each in plan.launches:
                each.run()
            given = dict(zip(("data", "scale"), w.tensors, strict=True))
            expected = roles({**given, **dict(zip(("d", "s"), plan.columnwise.tensors, strict=True))})
            for _ in range(2):
                made = quantize_cuda.derive_columnwise(w, spec.dgrad.b)
                assert roles({**given, **dict(zip(("d", "s"), made.tensors, strict=True))}) == expected
                assert [(t.shape, t.stride(), t.dtype) for t in made.tensors] == [
                    (t.shape, t.stride(), t.dtype) for t in plan.columnwise.tensors
                ]
                out = quantize_cuda.transpose(w.data)
                ((_, *arguments),) = roles({"codes": w.data, "out": out})
                assert {("codes", 0), ("out", 0)} <= {a for a in arguments if isinstance(a, tuple)}


def test_columnwise_codes_are_derived_by_what_was_worked_out_once(process):
    process(derived)


def by_groups() -> None:
    import contextlib

    from f8sub.features.expert_operands import tokens_cuda, weights_cuda
    from f8sub.features.expert_operands.groups import Groups
    from f8sub.features.expert_operands.weights import ExpertWeights
    from f8sub.kernels.triton import prepared, support
    from tests.kernels.test_quantize_groups import GROUP_FORMATS, USAGES

    support.takes, support.device_of = lambda x: x.numel() > 0, contextlib.nullcontext
    results: list[Any] = []
    run = prepared.run
    prepared.run = lambda *arguments: results.append(run(*arguments)) or results[-1]  # type: ignore[func-returns-value]

    def launched(call: Callable[[], object], **given: torch.Tensor) -> list[list[Any]]:
        results.clear()
        call()
        made = [tensor for result in results for tensor in result]
        assert len({tensor.data_ptr() for tensor in made}) == len(made)
        return roles({**given, **{f"result {number}": tensor for number, tensor in enumerate(made)}})

    for format in GROUP_FORMATS.values():
        for rowwise, columnwise in USAGES.values():
            row, col = format if rowwise else None, format if columnwise else None
            found = []
            for end in (10, 200, 256):
                x = torch.randn(256, 384).bfloat16()
                where = Groups.of(torch.tensor([3, 3, end], dtype=torch.int32), 256)

                def cast(x: Any = x, where: Any = where, row: Any = row, col: Any = col) -> None:
                    tokens_cuda.quantize(x, where, row, col, 16)

                found.append(launched(cast, x=x, ends=where.ends))
            assert found[0]
            assert found[0] == found[1] == found[2]
        if not format.is_plain:
            continue  # one group of all experts' rows, whose end is no argument
        found = []
        for _ in range(3):
            w = torch.randn(3, 256, 128).bfloat16()
            found.append(launched(lambda w=w, f=format: weights_cuda.quantize(w, f), w=w))
        assert found[0] == found[1] == found[2]
        found = []
        for _ in range(3):
            codes = weights_cuda.quantize(torch.randn(3, 256, 128).bfloat16(), format)
            given = ExpertWeights(codes.data, codes.scale_inv, format)
            _taken()
            found.append(
                launched(
                    lambda given=given, f=format: weights_cuda.derive_columnwise(given, f),
                    codes=given.data,
                    scale=given.scale_inv,
                )
            )
        assert found[0] == found[1] == found[2]
        assert bool(found[0]) == weights_cuda.derives(given, format)


def test_casts_by_groups_launch_the_same_over_other_tensors(process):
    process(by_groups)


@pytest.mark.long
def test_the_script_times_every_operator():
    finished = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / "launches.py"), "--rounds", "2", "--calls", "3"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    for name in ("tensorwise", "rowwise", "blockwise", "gridquant"):
        assert f"{name}: quantize x, both usages" in finished.stdout
    assert "multiply, blockwise" in finished.stdout
