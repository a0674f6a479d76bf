"""Launches of casts by groups: CUDA is handed what Triton's own launch hands it."""

import itertools

import pytest
import torch

from f8sub import Float8Format
from tests.kernels.interpreted import needs_triton, take_any_device
from tests.kernels.test_launcher import fresh_process, over_other_tensors  # noqa: F401
from tests.kernels.test_quantize_groups import GROUP_FORMATS, USAGES


def by_groups(names: tuple[str, ...]) -> None:
    from f8sub.kernels import cuda
    from f8sub.kernels.grouped.operands import ExpertWeights, Groups, Taken

    take_any_device()
    ends = itertools.cycle((10, 200, 256))

    def tokens() -> dict[str, torch.Tensor]:
        x = torch.randn(256, 384).bfloat16()
        return {"x": x, "ends": torch.tensor([3, 3, next(ends)], dtype=torch.int32)}

    def taken() -> dict[str, torch.Tensor]:
        return {**tokens(), "rows": torch.randint(256, (256,)), "factors": torch.rand(256)}

    def matrices() -> dict[str, torch.Tensor]:
        return {"w": torch.randn(3, 256, 128).bfloat16()}

    for format in map(GROUP_FORMATS.get, names):
        for rowwise, columnwise in USAGES.values():
            row, col = format if rowwise else None, format if columnwise else None
            assert over_other_tensors(
                tokens,
                lambda x, ends, row=row, col=col: cuda.quantize_tokens(x, Groups.of(ends, 256), row, col, 16),
            )
        assert over_other_tensors(
            taken,
            lambda x, ends, rows, factors, f=format: cuda.quantize_computed(
                Taken(x, rows, factors), Groups.of(ends, 256), f, f, 16
            ),
        )
        if not format.is_plain:
            continue  # one group of all experts' rows, whose end is no argument

        def codes(format: Float8Format = format) -> dict[str, torch.Tensor]:
            made = cuda.quantize_experts(**matrices(), format=format)
            return {"data": made.data, "scale_inv": made.scale_inv}

        over_other_tensors(matrices, lambda w, f=format: cuda.quantize_experts(w, f))
        given = ExpertWeights(**codes(), format=format)
        assert cuda.derives_of_experts(given, format) == over_other_tensors(
            codes,
            lambda data, scale_inv, f=format: cuda.derive_columnwise_of_experts(
                ExpertWeights(data, scale_inv, f), f
            ),
        )


SHORT = "tensorwise", "1x128"
OTHERS = tuple(name for name in GROUP_FORMATS if name not in SHORT)


@needs_triton
@pytest.mark.parametrize(
    "names", [SHORT, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["short", "others"]
)
def test_casts_by_groups_launch_the_same_over_other_tensors(fresh_process, names):  # noqa: F811
    fresh_process(by_groups, names)
