"""One scale for a square block of every operand, 256x256: e4m3 for x and w, e5m2 for dy.

A square block seen in the transposed matrix is the same block, so one cast serves both usages of a tensor.

Source: the two-dimensional block quantization of Meta's and IBM's Triton kernels for pretraining on H100; dy is e5m2
because a block spans 256 tokens (see ``tensorwise``).
"""

import torch

from f8sub.errors import Float8ConfigError
from f8sub.formats import MULTIPLE, Float8Format, Tile
from f8sub.recipe import GemmSpec, Recipe


def recipe(*, block: int = 256, dy: torch.dtype = torch.float8_e5m2) -> Recipe:
    """Blocks of another edge, a multiple of 16; or dy in ``torch.float8_e4m3fn``: a bit more precision, less range.

    GPUs multiply blocks whose edge is a multiple of 128; others run on the reference backend.
    """
    if type(block) is not int or block < 1 or block % MULTIPLE:
        raise Float8ConfigError(
            f"block={block!r} is no positive multiple of {MULTIPLE}: the dimensions of float8 GEMMs are multiples of "
            f"{MULTIPLE}, so other blocks fit none of them; GPUs multiply blocks of multiples of 128"
        )
    if dy not in (torch.float8_e5m2, torch.float8_e4m3fn):
        raise Float8ConfigError(f"dy={dy!r} is neither torch.float8_e5m2 nor torch.float8_e4m3fn")
    e4m3, grad = (Float8Format(dtype, Tile(block, block)) for dtype in (torch.float8_e4m3fn, dy))
    backward = GemmSpec(a=grad, b=e4m3)
    return Recipe(name="gridquant", fprop=GemmSpec(a=e4m3, b=e4m3), dgrad=backward, wgrad=backward)


RECIPE = recipe()
