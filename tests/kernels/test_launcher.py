"""Launches of what was compiled before: CUDA is handed what Triton's own launch hands it."""

import contextlib
import ctypes
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pytest
import torch

from f8sub import ALL, Float8Format, Operand, Tile
from tests.kernels import interpreted
from tests.kernels.interpreted import needs_triton
from tests.selection import long_but

pytestmark = needs_triton
Seen = list[tuple[str, tuple[Any, ...]]]
CASES = (
    *("tensorwise bf16 both", "tensorwise known bf16 both", "rowwise bf16 both, ragged", "1x128 bf16 both"),
    *("128x128 bf16 row", "rowwise part bf16 row", "256x256 bf16 both", "amaxes of many fp32 row"),
    "transpose fp8 column",
)


def _in_a_process() -> Iterator[Callable[..., Any]]:
    """One of its own: Triton has one driver a process. It is forked from one that has imported what all need."""
    forks = get_context("forkserver")
    forks.set_forkserver_preload([__name__, "scripts.bench.no_gpu", "tests.kernels.compiled.cases"])
    with ProcessPoolExecutor(1, forks, _start) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


process = pytest.fixture(scope="module")(_in_a_process)
fresh_process = pytest.fixture(_in_a_process)
"""That has launched nothing yet, whose cached launches count."""

_seen: Seen = []
TENSOR, ROW, VECTORS = (
    Float8Format(torch.float8_e4m3fn, Tile(*edges)) for edges in ((ALL, ALL), (1, ALL), (1, 128))
)


def _start() -> None:
    from scripts.bench import no_gpu

    os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"  # what Triton 3.10 is to do; our kernels ask for the other
    no_gpu.install(lambda kernel, arguments: _seen.append((kernel, with_addresses(arguments))))


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
    _seen.clear()
    by_triton = compiled_by_triton()
    for launch in case.launches():
        for _ in range(2):
            launch.run()
        assert by_triton == [1]
        by_triton[0] = 0
        assert launch.compiled.metadata.enable_fp_fusion is True
        (kernel, arguments), (again, others) = _taken()
        assert kernel == again
        assert len(arguments) == len(others)
        assert all(map(same, others, arguments))
        assert len(arguments) > len(launch.arguments)


@pytest.mark.parametrize("words", long_but(CASES[:3], CASES))
def test_the_second_launch_is_the_first_without_triton(process, words):
    process(launched_twice, words)


def other_arguments() -> None:
    from f8sub.kernels.triton import quantize_launch

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
            (each,) = quantize_launch.quantization(x, format, None).launches
            each.run()
        (first, _), (second, _) = _taken()
        assert first == second
        kernels.append(first)
    assert len(set(kernels)) == len(matrices)
    # One that differs in numbers alone does not come to Triton, and is launched with its own numbers.
    by_triton = compiled_by_triton()
    taller = torch.zeros(512, 256, dtype=torch.float16)
    (each,) = quantize_launch.quantization(taller, format, None).launches
    each.run()
    assert by_triton == [0]
    ((kernel, arguments),) = _taken()
    assert kernel == kernels[0]
    assert arguments[0] == each.programs
    assert 512 in [argument for argument in arguments if type(argument) is int]
    whole = Float8Format(torch.float8_e5m2, Tile(ALL, ALL))
    for each in quantize_launch.quantization(taller, whole, whole).launches:
        each.run()
    assert not {kernel for kernel, _ in _taken()} & set(kernels)


def test_other_dtypes_alignments_shapes_and_formats_are_other_kernels(fresh_process):
    fresh_process(other_arguments)


def rows_of_steps() -> None:
    """Tokens in groups, as many as come: no kernel is compiled for their number."""
    from f8sub.kernels.cuda import token_launches

    kernels = []
    for tokens in (20008, 24000, 20016, 23992):
        x, ends = torch.empty(tokens, 2048, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)
        for formats in ((TENSOR, TENSOR), (ROW, ROW), (VECTORS, VECTORS)):
            for each in token_launches(x, ends, *formats, 128).launches:
                each.run()
        kernels.append([kernel for kernel, _ in _taken()])
    assert len(set(map(tuple, kernels))) == 1


def test_tokens_of_another_number_are_no_other_kernels(process):
    process(rows_of_steps)


def parts_of_weights() -> None:
    """Into two memories in turn, as FSDP2 has them: one launch, with what the first one was handed."""
    from f8sub.kernels.triton import quantize_launch, support

    x, scale = torch.zeros(128, 256), torch.ones(1, 1)
    part = support.ShardSlice(x, TENSOR, torch.bfloat16, (0, 0), scale, 256)
    made = quantize_launch.SliceCasts([part], [0])
    memories = [torch.zeros(128 * 256, dtype=torch.uint8) for _ in range(2)]
    (launch,) = made.launches(memories[0])
    tables = {name: each for name, each in launch.arguments.items() if isinstance(each, torch.Tensor)}
    del tables["out_ptr"]
    by_triton, found = compiled_by_triton(), []
    with mock.patch.object(support, "device_of", contextlib.nullcontext):
        for memory in (*memories, *memories):
            made.run(memory)
            found.append(roles({"memory": memory, **tables}))
    assert by_triton == [1]
    assert len(found[0]) == 1
    assert found == [found[0]] * 4


def test_parts_of_weights_are_launched_without_triton(process):
    process(parts_of_weights)


def bounded() -> None:
    from f8sub.kernels.triton import launch as launcher
    from f8sub.kernels.triton import quantize_launch

    launcher._compiled.clear()
    launcher.MOST = 3
    format = Float8Format(torch.float8_e4m3fn, Tile(128, 128))
    for rows in (128, 256, 384, 512, 128):
        (each,) = quantize_launch.quantization(torch.zeros(rows, 128), format, None).launches
        each.run()
        assert len(launcher._compiled) <= launcher.MOST
    assert [arguments[0] for _, arguments in _taken()] == [1, 2, 3, 4, 1]


def test_what_is_kept_does_not_grow_without_end(process):
    process(bounded)


class Address(int):
    """A number that was handed over in place of a tensor, with the first element that lay there at the launch."""

    def __new__(cls, address: int) -> "Address":
        found = super().__new__(cls, address)
        found.element = ctypes.c_int32.from_address(address).value
        return found


def with_addresses(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """No size or stride of these tests has more than 32 bits."""
    return tuple(Address(value) if type(value) is int and value >> 32 else value for value in arguments)


def roles(tensors: dict[str, torch.Tensor]) -> list[list[Any]]:
    """What was launched since the last look: kernels with their arguments, tensors by the role that they lie in."""
    scratch: list[int] = []

    def role_at(address: int, is_zero: Callable[[], bool]) -> Any:
        for name, tensor in tensors.items():
            if 0 <= address - tensor.data_ptr() < max(tensor.nbytes, 1):
                return name, address - tensor.data_ptr()
        assert is_zero(), "scratch memory is zero"
        scratch.append(address)
        return "scratch", address - scratch[0]

    def role(value: Any) -> Any:
        if hasattr(value, "block_shape"):
            return {**vars(value), "base": role(value.base)}, value.base.dtype
        if isinstance(value, torch.Tensor):
            return role_at(value.data_ptr(), lambda: not value.any())
        if isinstance(value, Address):
            return role_at(value, lambda: value.element == 0)
        # Where no hook is set, launches that were prepared tell hooks nothing.
        return None if type(value).__name__ in ("LazyDict", "HookChain") else value

    return [[kernel, *map(role, arguments)] for kernel, arguments in _taken()]


def returning(run: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    """``run``, which also leaves what it returns in ``results``."""
    return lambda *arguments: results.append(run(*arguments)) or results[-1]


def over_other_tensors(draw: Callable[[], dict[str, torch.Tensor]], call: Callable[..., object]) -> bool:
    """Whether a call launches; the first one works out what those over tensors that are drawn later launch too.

    They have results of their own, of one layout, and scratch memory that is zero.
    """
    from f8sub.kernels.triton import launch as launcher
    from f8sub.kernels.triton import prepared

    found, known, results = [], [], []
    worked_out, launch, kept = [], launcher.Launch.run, set()
    for _ in range(3):
        given = draw()
        _taken()
        results.clear()
        with (
            mock.patch.object(launcher, "run", returning(launcher.run, results)),
            mock.patch.object(prepared, "run", returning(prepared.run, results)),
            mock.patch.object(launcher.Launch, "run", lambda self: worked_out.append(self) or launch(self)),
        ):
            call(**given)
        known.append((len(prepared.cache), len(worked_out)))
        kept.update(map(weakref.ref, given.values()))
        made = [tensor for result in results if result is not None for tensor in result]
        assert len({tensor.data_ptr() for tensor in made}) == len(made)
        named = given | {f"result {number}": tensor for number, tensor in enumerate(made)}
        found.append(([(t.shape, t.stride(), t.dtype) for t in made], roles(named)))
    assert found[0] == found[1] == found[2]
    # The first two calls work launches out, the third does not.
    assert known[1] == known[2]
    assert known[1][1] == 2 * known[0][1]
    del given, named, made
    worked_out.clear()
    gc.collect()
    assert not any(reference() is not None for reference in kept), "no tensor of a call lives on"
    return bool(found[0][1])


def prepared(recipe: str) -> None:
    """Each usage, with an amax that is known, columns of codes, and codes transposed."""
    import f8sub
    from f8sub.kernels import cuda

    interpreted.take_any_device()
    spec = f8sub.get_recipe(recipe)
    format, columns = spec.fprop.b, spec.dgrad.b

    def matrix() -> dict[str, torch.Tensor]:
        return {"x": torch.randn(256, 384).bfloat16()}

    def with_amax() -> dict[str, torch.Tensor]:
        x = matrix()["x"]
        return {"x": x, "amax": x.abs().amax().float().view(1, 1)}

    def codes() -> dict[str, torch.Tensor]:
        made = cuda.quantize(matrix()["x"], format, None).rowwise
        return {"data": made.data, "scale_inv": made.scale_inv}

    usages = [(spec.fprop.a, spec.wgrad.b), (spec.fprop.a, None), (None, spec.wgrad.b)]
    for row, col in (pair for pair in usages if any(pair)):
        assert over_other_tensors(matrix, lambda x, row=row, col=col: cuda.quantize(x, row, col))
        if format.tile.is_whole:
            assert over_other_tensors(
                with_amax, lambda x, amax, row=row, col=col: cuda.quantize(x, row, col, amax=amax)
            )
    assert over_other_tensors(
        codes,
        lambda data, scale_inv: cuda.derive_columnwise(Operand(data, scale_inv, format), columns),
    )
    assert over_other_tensors(codes, lambda data, scale_inv: cuda.transpose(data))


def placed(recipe: str) -> None:
    """A call in compiled code launches what the operator's function does, and soon looks nothing up; any alignment."""
    import f8sub
    from f8sub.kernels import ops
    from f8sub.kernels.gemm.block_scales import flat
    from f8sub.kernels.graph_ops import at_one_place, direct
    from f8sub.kernels.triton import prepared

    interpreted.take_any_device()
    spec = f8sub.get_recipe(recipe)
    names, columns = (spec.fprop.a.name, spec.wgrad.b.name), spec.dgrad.b
    memory = torch.randn(8 + 256 * 384).bfloat16()
    amax = memory.abs().amax().float().view(1, 1) if spec.fprop.a.tile.is_whole else None
    made = direct[str(ops.quantize_as_one_node)](memory[8:].view(256, 384), None, spec.fprop.b.name, None)
    weight = Operand(*made, spec.fprop.b)
    scale_inv = flat(weight) if weight.scale_inv.dim() == 2 and not weight.format.tile.is_whole else made[1]
    aligned, odd = (memory[begin:][: 256 * 384].view(256, 384) for begin in (8, 4))
    calls = {
        ops.quantize_as_one_node: [(x, amax, *names) for x in (aligned, aligned, aligned, odd, aligned)],
        ops.derive_columnwise: 4 * [(made[0], scale_inv, made[0], spec.fprop.b.name, columns.name)],
    }
    for operator, given in calls.items():
        function, place = direct[str(operator)], at_one_place[str(operator)]()
        for arguments in given:
            _taken()
            expected = function(*arguments)
            told = (
                dict(zip("ab", arguments[:2], strict=True))
                if arguments[1] is not None
                else {"a": arguments[0]}
            )
            right = roles(told | {str(n): tensor for n, tensor in enumerate(expected)})
            found = place(*arguments)
            assert roles(told | {str(n): tensor for n, tensor in enumerate(found)}) == right
            laid = [(t.shape, t.stride(), t.dtype) for t in found]
            assert laid == [(t.shape, t.stride(), t.dtype) for t in expected]
        with mock.patch.object(prepared, "key_of", side_effect=AssertionError("looked up")):
            place(*given[0])


@pytest.mark.parametrize("recipe", ["tensorwise", "gridquant"])
def test_a_call_of_compiled_code_launches_the_same(fresh_process, recipe):
    fresh_process(placed, recipe)


def by_column(scale: torch.Tensor) -> torch.Tensor:
    """Scales of blocks as quantizers leave them: those of a block of K one after the other."""
    return scale.t().contiguous().t()


def products(pair: str, kinds: tuple[str, ...]) -> None:
    """By our kernels for Hopper, of whole matrices, of few rows, and by groups; small ones are made in parts."""
    from f8sub.kernels.gemm import blockwise
    from f8sub.kernels.gemm.tuning import Rows
    from f8sub.kernels.grouped import gemm
    from tests.kernels import grouped
    from tests.kernels.products import operands

    interpreted.take_any_device()
    for module in (blockwise, gemm):
        module.multiprocessors = lambda device: 132
    formats = grouped.PAIRS[pair]

    def named(a: Operand, b: Operand, rows: Rows | None = None) -> dict[str, torch.Tensor]:
        in_blocks = (f.tile.rows == 1 and f.tile.cols != ALL for f in formats)
        scales = [
            by_column(x.scale_inv) if cut else x.scale_inv for x, cut in zip((a, b), in_blocks, strict=True)
        ]
        return {
            "a": a.data,
            "a_scale": scales[0],
            "b": b.data,
            "b_scale": scales[1],
            **(rows._asdict() if rows else {}),
        }

    def call(product: Callable[..., object], given: dict[str, Any], *how: Any) -> None:
        pairs = (("a", "a_scale"), ("b", "b_scale"))
        x, y = (
            Operand(given[data], given[scale], f) for (data, scale), f in zip(pairs, formats, strict=True)
        )
        product(x, y, *how)

    if not formats[0].tile.cols == formats[1].tile.cols == ALL:
        for rows in (256, 16):
            shape = rows, 1024, 256
            config = blockwise.default_config(shape, 132)
            assert over_other_tensors(
                lambda shape=shape: named(*operands(formats, shape)),
                lambda config=config, **given: call(blockwise.multiply, given, torch.bfloat16, config),
            )
    # With ``TAIL`` 256 rows: scales of 1x128 are copied where rows are no multiple of 16.
    counts = [130, 0, 119]
    for kind in kinds:
        case = {"by_rows": grouped.ByRows, "over_rows": grouped.OverRows}[kind]
        product = getattr(gemm, f"triton_{kind}")
        *_, rows = case(formats, counts, 256, 384).operands()

        def draw(case=case) -> dict[str, torch.Tensor]:
            found = named(*case(formats, counts, 256, 384).operands())
            del found["total"]
            return found

        assert over_other_tensors(
            draw,
            lambda product=product, total=rows.total, **given: call(
                product,
                given,
                Rows(given["first"], given["ends"], given["placed"], total),
                torch.bfloat16,
                True,
            ),
        )


PRODUCTS = [
    ("1x128 x 128x128", ("by_rows",)),
    ("rowwise", ("by_rows", "over_rows")),
    ("1x128 x 1x128", ("over_rows",)),
    ("tensorwise e5m2", ("by_rows", "over_rows")),
    ("256x256", ("by_rows", "over_rows")),
]
"""Formats, and the products by groups that recipes have of them."""


@pytest.mark.parametrize(("pair", "kinds"), long_but(PRODUCTS[:3:2], PRODUCTS))
def test_what_was_worked_out_multiplies_other_tensors(fresh_process, pair, kinds):
    fresh_process(products, pair, kinds)


def laid_out(a: Operand) -> Operand:
    return a._replace(scale_inv=by_column(a.scale_inv))


def odd(a: Operand) -> Operand:
    """The same, whose codes begin where nothing is loaded from."""
    flat = torch.empty(a.data.numel() + 1, dtype=torch.uint8)[1:].view(a.data.shape)
    return a._replace(data=flat.copy_(a.data.view(torch.uint8)).view(a.data.dtype))


def copied(codes: bool) -> None:
    """Codes that begin where nothing is loaded from, or scales that lie row by row, which products copy."""
    from f8sub.kernels.gemm import blockwise
    from f8sub.kernels.triton import prepared
    from tests.kernels.products import operands

    interpreted.take_any_device()
    blockwise.multiprocessors = lambda device: 132
    shape = 256, 384, 256
    config = blockwise.default_config(shape, 132)
    for data in ("gaussian", "row_outliers", "gaussian"):
        a, b = operands((VECTORS, VECTORS), shape, data)
        a, b = odd(laid_out(a)) if codes else a._replace(scale_inv=a.scale_inv.contiguous()), laid_out(b)
        blockwise.multiply(a, b, torch.bfloat16, config)
        ((_, arguments),) = _taken()
        a_codes, b_codes, a_scale, b_scale = (x.base for x in arguments if hasattr(x, "block_shape"))
        assert torch.equal(a_codes.float(), a.data.float())
        assert a_codes.data_ptr() % 16 == 0
        assert b_codes is b.data
        assert torch.equal(a_scale, a.scale_inv.t())
        assert torch.equal(b_scale, b.scale_inv.t())
    assert list(prepared.cache.values()) == [None]


@pytest.mark.parametrize("codes", [True, False], ids=["codes", "scales"])
def test_products_of_copies_are_worked_out_each_time(fresh_process, codes):
    fresh_process(copied, codes)


def crowded() -> None:
    """Three kinds that come again and again, between kinds that come once."""
    from f8sub.kernels import cuda
    from f8sub.kernels.triton import launch, prepared

    interpreted.take_any_device()
    prepared.MOST = 3
    again = [torch.zeros(rows, 128, dtype=torch.bfloat16) for rows in (128, 256, 384)]
    for x in (*again, *again):
        cuda.quantize(x, VECTORS, None)
    kept = dict(prepared.cache)
    assert len(kept) == 3
    for rows in range(16, 160, 16):
        cuda.quantize(torch.zeros(rows, 256, dtype=torch.bfloat16), VECTORS, None)
        assert len(launch._seen_once) <= prepared.MOST
    assert prepared.cache == kept


def test_kinds_that_come_once_displace_none_that_is_kept(fresh_process):
    fresh_process(crowded)


def as_operators() -> None:
    """Scales of blocks have one dimension, in the memory that the kernel fills."""
    import f8sub
    from f8sub.kernels import ops

    interpreted.take_any_device()
    x = torch.zeros(384, 256, dtype=torch.bfloat16)
    for recipe in map(f8sub.get_recipe, ("blockwise", "gridquant")):
        names = recipe.fprop.a.name, recipe.wgrad.b.name
        found = []
        for _ in range(3):
            made = ops.quantize_as_one_node(x, None, *names)
            found.append([(t.shape, t.stride(), t.dtype) for t in made])
        assert found[0] == found[1] == found[2]
        assert [t.dim() for t in made] == [2, 1, 2, 1]
        _, arguments = _taken()[-1]
        assert {t.data_ptr() for t in made} <= {value for value in arguments if isinstance(value, int)}


def test_results_of_operators_lie_as_those_that_were_worked_out(fresh_process):
    fresh_process(as_operators)


def watched() -> None:
    """A prepared launch, before a profiler sets a hook and after; the launcher is handed the chain of hooks."""
    from triton import knobs

    from f8sub.kernels import cuda

    interpreted.take_any_device()
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        for _ in range(3):
            cuda.quantize(x, VECTORS, None)
        assert not {"LazyDict", "HookChain"} & {type(value).__name__ for value in _taken()[-1][1]}
        hook = print
        chain.add(hook)
        cuda.quantize(x, VECTORS, None)
        ((_, arguments),) = _taken()
        (told,) = (value.data for value in arguments if type(value).__name__ == "LazyDict")
        assert told["stream"] == arguments[3]
        assert [chain] == [value for value in arguments if getattr(value, "calls", None)]
        chain.remove(hook)


def test_hooks_are_told_of_prepared_launches(fresh_process):
    fresh_process(watched)


def squared() -> None:
    """A product of a matrix with itself, then of two."""
    from f8sub.kernels.gemm import blockwise
    from tests.kernels.products import operands

    interpreted.take_any_device()
    blockwise.multiprocessors = lambda device: 132
    shape = 256, 256, 384
    config = blockwise.default_config((256, 384, 256), 132)
    a, b = map(laid_out, operands((VECTORS, VECTORS), shape))
    for right in (a, a, b, b, b, a):
        blockwise.multiply(a, right, torch.bfloat16, config)
        ((_, arguments),) = _taken()
        *codes, a_scale, b_scale = (x.base.data_ptr() for x in arguments if hasattr(x, "block_shape"))
        assert codes == [a.data.data_ptr(), right.data.data_ptr()]
        assert [a_scale, b_scale] == [a.scale_inv.data_ptr(), right.scale_inv.data_ptr()]


def test_a_matrix_times_itself_is_another_kind(fresh_process):
    fresh_process(squared)


@pytest.mark.parametrize(
    "recipe", long_but(["tensorwise", "rowwise"], ["tensorwise", "rowwise", "blockwise", "gridquant"])
)
def test_what_was_worked_out_launches_the_same_over_other_tensors(fresh_process, recipe):
    fresh_process(prepared, recipe)


def attention() -> None:
    """Launches of several kernels that are prepared together, around cuDNN's attention."""
    from f8sub.attention import casts
    from f8sub.attention.problem import E4M3, Problem

    interpreted.take_any_device()

    def qkv() -> dict[str, torch.Tensor]:
        sizes = zip("qkv", (4, 2, 2), strict=True)
        return {n: torch.randn(2, 128, h, 64).bfloat16().transpose(1, 2) for n, h in sizes}

    def backward() -> dict[str, torch.Tensor]:
        return {"do": qkv()["q"], "inverse": torch.rand(4), "history": torch.rand(16, 4)}

    def gradients() -> dict[str, torch.Tensor]:
        codes = {name: x.to(E4M3.dtype) for name, x in qkv().items()}
        floats = {name: torch.rand(4) for name in ("scales", "inverse", "amaxes", "saturated")}
        return codes | floats | {"history": torch.rand(16, 4)}

    def finish(q, k, v, scales, inverse, amaxes, saturated, history) -> object:
        scales = casts.BackwardScales(scales, inverse, torch.rand(2))
        kept = casts.Remembered(history, saturated)
        return casts.finish_backward((q, k, v), scales, amaxes, kept, 448.0, torch.bfloat16)

    problem = Problem.of(*qkv().values(), True, 0.1)
    assert over_other_tensors(qkv, casts.cast_forward)
    assert over_other_tensors(
        backward, lambda do, inverse, history: casts.cast_backward(problem, do, inverse, history, E4M3)
    )
    assert over_other_tensors(gradients, finish)


def test_what_attention_prepares_together_launches_the_same_over_other_tensors(fresh_process):
    fresh_process(attention)
