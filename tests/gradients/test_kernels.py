"""The kernels, interpreted: the bytes and the sums of plain PyTorch; and where the parts of a row lie."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from f8sub import capture
from f8sub.gradients import wire
from f8sub.gradients.wire import GradientChunks, Layout, chunk_size, layout_of
from f8sub.kernels.triton import support
from tests.data_sets import edge_values, gaussian, generator
from tests.kernels.interpreted import needs_triton

SHAPES = [(64, 96), (1, 16), (3, 7), (33, 129), (256,), (5, 0), (8, 3, 32)]
"""Whole blocks, one row, rows that no number of ranks divides, a vector, none, experts."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of all magnitudes, with NaN, infinity, zeros of both signs, and a vector that no multiple of 16 bytes begins."""
    rng = generator(3)
    scale = 30 if dtype == torch.float32 else 4
    made = []
    for shape in SHAPES:
        x = gaussian(shape, rng) * 10.0 ** (scale * (2 * torch.rand(shape, generator=rng) - 1))
        made.append(x.to(dtype))
    made[0][3, 5], made[0][4, 6], made[0][5, 7] = float("nan"), float("inf"), -float("inf")
    made[3][:2] = torch.tensor([0.0, -0.0, 0.0])[:, None].expand(3, 129)[:2]
    made.append(torch.cat([v.flatten() for v in edge_values(dtype).values()]))
    made.append(gaussian((513,), rng).to(dtype)[1:])
    return made


def sources(of: list[torch.Tensor], layout: Layout) -> list[GradientChunks]:
    return [GradientChunks(g.reshape(-1), c.size, g.numel()) for g, c in zip(of, layout.chunks, strict=True)]


def read(packed: torch.Tensor, layout: Layout) -> Iterator[torch.Tensor]:
    """The bytes that somebody reads."""
    for chunk in layout.chunks:
        yield packed[:, chunk.code_at : chunk.code_at + chunk.size * (1 if layout.codes else 2)]
        yield packed[:, chunk.scale_at : chunk.scale_at + (chunk.blocks if layout.codes else 0)]


def bytes_and_sums(device: str, codes: bool) -> None:
    for dtype, (ranks, hosts), out in zip(DTYPES, ((3, 1), (4, 2), (5, 1)), DTYPES, strict=True):
        of = [gradient.to(device) for gradient in gradients(dtype)]
        layout = layout_of(tuple(chunk_size(g.shape, ranks) for g in of), codes=codes)
        found = []
        for by_kernels in (True, False):
            with mock.patch.object(support, "takes", lambda x, by_kernels=by_kernels: by_kernels):
                packed = wire.pack(sources(of, layout), layout, ranks, hosts)
                total = torch.empty(layout.numel, dtype=out, device=device)
                wire.add(packed, layout, 0.3, total)
            found.append((packed.cpu(), total.cpu()))
        (ours, sums), (right, right_sums) = found
        for a, b in zip(read(ours, layout), read(right, layout), strict=True):
            if codes:
                assert torch.equal(a, b)
            else:  # a bfloat16 NaN has many bit patterns
                a, b = (x.contiguous().view(torch.bfloat16) for x in (a, b))
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert right_sums.isfinite().any()
        torch.testing.assert_close(sums, right_sums, rtol=0, atol=0, equal_nan=True)


def launches_of_all_kinds() -> list[tuple[object, ...]]:
    """A launch for each dtype and alignment; tables are made once."""
    of = [torch.zeros(64, 32), torch.zeros(3, 5), torch.zeros(64, 32).bfloat16()]
    layout = layout_of(tuple(chunk_size(g.shape, 2) for g in of))
    out = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
    first, second = (wire.pack_launches(sources(of, layout), layout, 1, out) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for name in ("chunks_ptr", "chunk_of_program_ptr", "sources_ptr"):
            assert a.arguments[name] is b.arguments[name]
    return [(str(one.arguments["ELEMENT"]), one.arguments["ALIGNED"], one.programs) for one in first]


@needs_triton
@pytest.mark.parametrize("codes", [True, False], ids=["e4m3", "bf16"])
def test_bytes_and_sums_are_the_references(interpreter, codes):
    interpreter(bytes_and_sums, "cpu", codes)


@needs_triton
def test_one_launch_for_gradients_of_a_kind(interpreter):
    assert interpreter(launches_of_all_kinds) == [("fp32", True, 2), ("fp32", False, 2), ("bf16", True, 2)]


def test_a_row_of_the_wire():
    """Codes, exponents, and nothing else but what begins them at multiples of 16 bytes."""
    layout = layout_of((1000, 7, 0, 128))
    assert [chunk.code_at for chunk in layout.chunks] == [0, 1008, 1024, 1024]
    assert [chunk.out_at for chunk in layout.chunks] == [0, 1000, 1007, 1007]
    assert [chunk.scale_at for chunk in layout.chunks] == [1152, 1160, 1161, 1161]
    assert (layout.row_bytes, layout.numel) == (1168, 1135)
    assert layout_of((1000, 7, 0, 128)) is layout
    wider = layout_of((1000, 7, 0, 128), codes=False)
    assert [chunk.code_at for chunk in wider.chunks] == [0, 2000, 2016, 2016]
    assert wider.row_bytes == 2016 + 256


def launches_of_a_graph() -> None:
    """While a graph is captured: addresses are written by the graph itself, and tables of launches before are kept."""
    of = [gaussian((64, 32), generator(1)), gaussian((3, 5), generator(2))]
    layout = layout_of(tuple(chunk_size(g.shape, 2) for g in of))
    out = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
    launched = wire.pack_launches(sources(of, layout), layout, 1, out)
    with mock.patch.object(capture, "is_capturing", return_value=True):
        moved = [g.clone() for g in of]
        captured = wire.pack_launches(sources(moved, layout), layout, 1, out)
    for a, b in zip(launched, captured, strict=True):
        assert a.arguments["sources_ptr"] is not b.arguments["sources_ptr"]
        for name in ("chunks_ptr", "chunk_of_program_ptr"):
            assert a.arguments[name] is b.arguments[name]
            assert capture._in_graphs[a.arguments[name].data_ptr()] is a.arguments[name]
    found = [number for one in captured for number in one.arguments["sources_ptr"].tolist()]
    assert found == [g.data_ptr() for g in moved]


@needs_triton
def test_a_graph_writes_the_addresses_of_its_own_gradients(interpreter):
    interpreter(launches_of_a_graph)
