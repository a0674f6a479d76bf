"""Which recipes there are, and where a backend's sums round."""

import f8sub
from f8sub.kernels.reference import PROMOTION

RECIPES = f8sub.recipe_names()


def promoted(backend: str | None, fast_accum: bool, depth: int) -> int | None:
    """Elements of K in a tensor core's accumulator; the reference has none, high precision a wider one."""
    if backend == "reference":
        return None
    return depth if fast_accum or backend is None else PROMOTION
