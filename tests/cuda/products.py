"""Where a backend's sums round."""

from f8sub.kernels.reference import PROMOTION


def promoted(backend: str | None, fast_accum: bool, depth: int) -> int | None:
    """Elements of K in a tensor core's accumulator; the reference has none, high precision a wider one."""
    if backend == "reference":
        return None
    return depth if fast_accum or backend is None else PROMOTION
