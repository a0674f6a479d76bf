"""SwiGLU's kernels, interpreted on the CPU, equal torch's operators and then the reference, bitwise."""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.kernels import delayed, fused, producer_ops, producers, reference
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.producers import Wanted
from tests.cuda.products import assert_same_bits
from tests.data_sets import DATA_SETS, make
from tests.kernels.interpreted import interpreter, needs_triton  # noqa: F401
from tests.kernels.quantized import same_bits, with_long
from tests.kernels.test_paired import tiles_of_every_kind

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POWER_OF_2 = ScaleRule.POWER_OF_2
KINDS = {
    "tensorwise": (Float8Format(E4M3, Tile(ALL, ALL)), Float8Format(E5M2, Tile(ALL, ALL))),
    "tensorwise-power_of_2": (Float8Format(E4M3, Tile(ALL, ALL), POWER_OF_2),) * 2,
    "rowwise": (Float8Format(E4M3, Tile(1, ALL), POWER_OF_2),) * 2,
    "1x128": (Float8Format(E4M3, Tile(1, 128), POWER_OF_2),) * 2,
    "1x128-float": (Float8Format(E4M3, Tile(1, 128)), Float8Format(E5M2, Tile(1, 128))),
    "128x128": (Float8Format(E4M3, Tile(128, 128), POWER_OF_2),) * 2,
    "256x256": (Float8Format(E4M3, Tile(256, 256)), Float8Format(E5M2, Tile(256, 256))),
}
"""Formats of h and of the gradients."""

SHAPES = [(130, 144), (1, 300)]
MORE_SHAPES = [(256, 128), (129, 130)]
"""Whole tiles; tiles cut at both edges, where rows are and are not pairs and of whole 16 bytes; a single line."""

on_each_kind = pytest.mark.parametrize("name", KINDS)
on_each_walk = with_long(KINDS, ("rowwise", "1x128"))
on_each_rule = with_long(KINDS, ("1x128",))


def inputs(
    data: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dh, gate and up; what a data set has of large values is finite after the products."""
    made = (make(data, shape, seed, torch.float32).clamp(-1e3, 1e3).to(dtype) for seed in (1, 2, 3))
    return tuple(made)


def unfused(
    x: torch.Tensor,
    row: Float8Format | None,
    col: Float8Format | None,
    past: PastScale | None,
) -> tuple:
    """What the layers would make of h or of a gradient by itself."""
    if past is None:
        return *reference.quantize(x, row, col), None
    return delayed.quantize(x, past, row, col)


def check(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    name: str,
    usages: tuple[bool, bool, bool] = (True, True, True),
    pasts: tuple[PastScale, PastScale, PastScale] | None = None,
) -> None:
    """Forward and backward next to autograd of torch's operators and the reference's casts."""
    h_format, format = KINDS[name]
    dh, gate, up = given
    h_past, *gradient_pasts = pasts or (None, None, None)
    leaves = [tensor.clone().requires_grad_() for tensor in (gate, up)]
    h = torch.nn.functional.silu(leaves[0]) * leaves[1]
    dgate, dup = torch.autograd.grad(h, leaves, dh)
    made = producers.quantize_swiglu(gate, up, h_format, h_past)
    row, col, largest = unfused(h.detach(), h_format, h_format, h_past)
    same_bits(made.row, row)
    same_largest(made.largest, largest)
    row_format, col_format = format if usages[0] else None, format if usages[1] else None
    wanted = Wanted(
        (row_format, col_format),
        (row_format, col_format),
        h_format if usages[2] else None,
        None if pasts is None else tuple(gradient_pasts),
    )
    assert producers.why_no_kernel(wanted, made.scale) is None
    found = producers.quantize_swiglu_backward(dh, gate, up, wanted, made.scale)
    same_bits(found.h_col, col if usages[2] else None)
    for cast, gradient, past in zip((found.dgate, found.dup), (dgate, dup), gradient_pasts, strict=True):
        right = unfused(gradient, row_format, col_format, past)
        same_bits(cast.row, right[0])
        same_bits(cast.col, right[1])
        same_largest(cast.largest, right[2])


def same_largest(found: torch.Tensor | None, right: torch.Tensor | None) -> None:
    assert (found is None) == (right is None)
    if right is not None:
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def shapes(name: str, of: list[tuple[int, int]]) -> None:
    for shape in of:
        check(inputs("gaussian", shape), name)


def each_usage(name: str) -> None:
    for usages in ((True, False, False), (False, True, True), (True, True, False)):
        check(inputs("gaussian", (40, 72)), name, usages)


def data_sets(name: str) -> None:
    for index, data in enumerate(DATA_SETS):
        check(inputs(data, (40, 72), producers.HALF[index % 2]), name)


def not_finite(name: str) -> None:
    for which, bad in enumerate(("nan", "inf", "-inf")):
        given = inputs("gaussian", (40, 72))
        given[which][3, 5] = given[which][17, 40] = float(bad)
        check(given, name)
    check(tuple(torch.full((40, 72), float("nan"), dtype=torch.bfloat16) for _ in range(3)), name)


def pasts_of(name: str) -> Iterator[tuple[PastScale, PastScale, PastScale]]:
    for scales in ((0.0, 0.0, 0.0), (3.0, 500.0, 7e3), (2.0**-20, 2.0**20, 0.0), (1e4, 0.0, 1.0)):
        yield tuple(PastScale(torch.full((1, 1), scale), 1.0, covers=False) for scale in scales)


def of_the_past(name: str) -> None:
    for pasts in pasts_of(name):
        check(inputs("lognormal", (130, 144)), name, pasts=pasts)
        given = inputs("gaussian", (40, 72))
        given[1][3, 5] = float("inf")
        check(given, name, pasts=pasts)


def whole_tiles(name: str) -> None:
    """Of every kind as one of dh, gate and up, and some kinds as all three, by kernels of pairs."""
    kinds = tiles_of_every_kind()
    finite = [make("gaussian", tuple(kinds.shape), seed, torch.bfloat16) for seed in (1, 2, 3)]
    for index in range(3):
        check(tuple(kinds if index == at else tensor for at, tensor in enumerate(finite)), name)
    some = kinds[:, 256:512].contiguous()
    check((some, some, some), name)
    dh, gate, _ = (tensor[:, 256:512].contiguous() for tensor in finite)
    for usages in ((True, False, False), (False, True, True), (True, True, False)):
        check((dh, gate, some), name, usages)
    if name.startswith("tensorwise"):
        for pasts in pasts_of(name):
            check((dh, gate, some), name, pasts=pasts)


def whole_tiles_by_others(name: str) -> None:
    """By the kernels of float16, and of GPUs that compare no pairs."""
    check(inputs("gaussian", (256, 128), torch.float16), name)
    with mock.patch.object(fused, "compares_pairs", return_value=False):
        check(inputs("gaussian", (256, 128)), name)
        check(inputs("lognormal", (128, 256)), name)


def rows_in_parts(name: str) -> None:
    """As rows that are longer than a program holds: of whole parts, and not."""
    from f8sub.kernels.triton import swiglu_launch

    with mock.patch.object(swiglu_launch, "SHORT_ROW", 0), mock.patch.object(swiglu_launch, "ROW_PART", 128):
        for shape in ((40, 256), (33, 300)):
            check(inputs("lognormal", shape), name)
        check((inputs("gaussian", (40, 72))[0], *[torch.full((40, 72), float("nan")).bfloat16()] * 2), name)


def lines(name: str) -> None:
    """Rows that fill a program; more rows than a program goes down for amaxes, by pairs."""
    for shape in ((3, 1024), (2, 2048), (640, 128)):
        check(inputs("gaussian", shape), name)


def paired(given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], name: str) -> list[bool]:
    """Of the backward's launches, whether they are of pairs."""
    from f8sub.kernels.triton import swiglu_launch

    h_format, format = KINDS[name]
    scale = torch.ones(1, 1)
    launches = swiglu_launch.backward(given, (format, format), h_format, scale).launches
    return ["paired" in launched.kernel.fn.__name__ for launched in launches]


def every_gate() -> None:
    """All finite bfloat16 as gate, at every place."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    gate = bits.where(bits.isfinite(), 1.5)
    ones = torch.ones_like(gate)
    check((ones, gate, ones * 2**-60), "1x128")


@needs_triton
@on_each_walk
def test_shapes_and_usages(interpreter, name):  # noqa: F811
    interpreter(shapes, name, SHAPES)
    interpreter(each_usage, name)


@needs_triton
@pytest.mark.long
@on_each_kind
def test_more_shapes(interpreter, name):  # noqa: F811
    interpreter(shapes, name, MORE_SHAPES)


@needs_triton
@on_each_rule
def test_data_sets(interpreter, name):  # noqa: F811
    interpreter(data_sets, name)


@needs_triton
@on_each_rule
def test_elements_that_are_not_finite(interpreter, name):  # noqa: F811
    interpreter(not_finite, name)


PAIRED = {
    "tensorwise": [True, False],
    "tensorwise-power_of_2": [True, False],
    "rowwise": [True, False],
    "1x128": [True],
    "1x128-float": [True],
}
"""Formats of whose launches some are of pairs."""


@needs_triton
@with_long(["tensorwise", "1x128"], ())
def test_whole_tiles(interpreter, name):  # noqa: F811
    interpreter(whole_tiles, name)


@needs_triton
@with_long(["tensorwise", "rowwise", "1x128"], ())
def test_whole_tiles_by_other_kernels(interpreter, name):  # noqa: F811
    interpreter(whole_tiles_by_others, name)


@needs_triton
@pytest.mark.long
def test_lines_that_fill_programs(interpreter):  # noqa: F811
    interpreter(lines, "rowwise")


@needs_triton
@pytest.mark.long
def test_rows_in_parts(interpreter):  # noqa: F811
    interpreter(rows_in_parts, "rowwise")


@needs_triton
@pytest.mark.parametrize("name", PAIRED)
def test_what_is_paired(monkeypatch, name):
    """Whole tiles of bfloat16 that begin at a word, on GPUs that compare pairs."""
    x = torch.zeros(256, 128, dtype=torch.bfloat16)
    assert paired((x, x, x), name) == PAIRED[name]
    for other in (x.half(), x[:250], x[:, :72].contiguous()):
        assert not any(paired((other, other, other), name))
    within = x.new_zeros(x.numel() + 1)[1:].view(x.shape)
    for given in ((within, x, x), (x, within, x), (x, x, within)):
        assert not any(paired(given, name))
    monkeypatch.setattr(fused, "compares_pairs", lambda device: False)
    assert not any(paired((x, x, x), name))


@needs_triton
@pytest.mark.parametrize(("prefetches", "stages", "programs"), [(True, 3, 132), (False, 1, 256)])
def test_tiles_are_prefetched_where_there_is_room(monkeypatch, prefetches, stages, programs):
    from f8sub.kernels.triton import swiglu_launch

    x, (h_format, format) = torch.zeros(2048, 2048, dtype=torch.bfloat16, device="meta"), KINDS["1x128"]
    monkeypatch.setattr(swiglu_launch, "prefetches_tiles", lambda device: prefetches)
    (launched,) = swiglu_launch.backward((x, x, x), (format, format), h_format, None).launches
    assert (launched.arguments["STAGES"], launched.programs) == (stages, programs)


@needs_triton
@pytest.mark.parametrize(("room", "found"), [(232448, True), (101376, False)])
def test_which_gpus_prefetch_tiles(monkeypatch, room, found):
    """Hopper has room, Ada and Blackwell's consumer GPUs have none."""
    from f8sub.kernels.triton import swiglu_launch

    properties = SimpleNamespace(shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    swiglu_launch.prefetches_tiles.cache_clear()
    assert swiglu_launch.prefetches_tiles(torch.device("cuda", 0)) == found
    swiglu_launch.prefetches_tiles.cache_clear()


@needs_triton
@pytest.mark.parametrize("name", ["tensorwise", "tensorwise-power_of_2"])
def test_scales_of_the_past(interpreter, name):  # noqa: F811
    interpreter(of_the_past, name)


@needs_triton
def test_every_bfloat16_as_gate(interpreter):  # noqa: F811
    interpreter(every_gate)


@on_each_kind
def test_without_kernels_it_is_torch_and_the_reference(name):
    """On the CPU nothing is interpreted: the same numbers by torch's operators."""
    check(inputs("lognormal", (40, 72)), name)
    check(inputs("gaussian", (129, 130), torch.float32), name)


def test_what_no_kernel_makes():
    h, dy = KINDS["tensorwise"]
    vectors, _ = KINDS["1x128"]
    scale = torch.ones(1, 1)
    for wanted, part in (
        (Wanted((dy, dy), (dy, None), h), "both gradients alike"),
        (Wanted((dy, h), (dy, h), h), "both usages alike"),
        (Wanted((None, None), (None, None), h), "one usage"),
        (Wanted((dy, dy), (dy, dy), vectors), "tiles of one shape"),
        (
            Wanted((Float8Format(E4M3, Tile(1, 64)),) * 2, (Float8Format(E4M3, Tile(1, 64)),) * 2, None),
            "1x64",
        ),
    ):
        assert part in str(producers.why_no_kernel(wanted, scale))
    assert producers.why_no_kernel(Wanted((dy, dy), (dy, dy), h), None) is not None
    assert producers.why_no_kernel(Wanted((dy, dy), (dy, dy), h), scale) is None


def test_the_gradients_are_those_of_torch_in_float64():
    """The formulas, by numbers that no half precision rounds."""
    dh, gate, up = (tensor.double() for tensor in inputs("gaussian", (16, 24)))
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    right = torch.autograd.grad(gate * torch.sigmoid(gate) * up, leaves, dh)
    for found, expected in zip(producers.swiglu_backward(dh, gate.detach(), up.detach()), right, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_operands_of_two_gradients_are_row_major():
    dh, gate, up = inputs("gaussian", (16, 32))
    h, dy = KINDS["rowwise"]
    found = producers.quantize_swiglu_backward(dh, gate, up, Wanted((dy, dy), (dy, dy), h))
    for operand in (found.dgate.row, found.dgate.col, found.dup.row, found.dup.col, found.h_col):
        assert operand.data.is_contiguous()
    assert_same_bits(found.h_col, reference.quantize(producers.swiglu(gate, up), None, h)[1])


@pytest.mark.parametrize("is_known", [False, True], ids=["", "known"])
@on_each_kind
def test_an_operators_results_are_memory_of_their_own(name, is_known):
    """Of its arguments it returns none, and of its results none twice: torch deprecates both."""
    h, gradient = KINDS[name]
    dh, gate, up = inputs("gaussian", (130, 144))
    whole = h.tile.is_whole
    pasts = [PastScale(torch.full((1, 1), 2.0**n), 0.0, False, is_known) for n in range(3)] if whole else []
    row = producer_ops.quantize_swiglu(gate, up, h, pasts[0] if pasts else None)
    wanted = Wanted((gradient,) * 2, (gradient,) * 2, h, (pasts[1], pasts[2]) if pasts else None)
    gradients = producer_ops.quantize_swiglu_backward(dh, gate, up, wanted, row.scale)
    given = (dh, gate, up, *(past.scale for past in pasts))
    for made, arguments in ((row, given), (gradients, (*given, *([row.scale] if whole else [])))):
        tensors = [t for t in torch.utils._pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
        addresses = {t.untyped_storage().data_ptr() for t in tensors}
        assert len(addresses) == len(tensors)
        assert not addresses & {t.untyped_storage().data_ptr() for t in arguments}
