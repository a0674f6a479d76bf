"""A Hadamard transform with random signs, which cancels in a product whose operands both have it."""

import functools

import torch

from f8sub.kernels import fp4 as e2m1
from f8sub.torch_compat import no_dispatch_modes


def rotate(x: torch.Tensor, size: int, *, inverse: bool = False) -> torch.Tensor:
    """Multiply every ``size`` neighbours of a row by a random orthogonal matrix: it spreads outliers over them.

    ``x`` is (rows, K), of any float dtype, K a multiple of ``size``; the result is float32. ``inverse`` undoes it.
    """
    parts = x.float().unflatten(1, (-1, size))
    # A tensor of a subclass, such as a FakeTensor, is multiplied by no plain matrix.
    is_plain = type(parts) is torch.Tensor
    matrix = _hadamard_on(parts.device, size) if is_plain else parts.new_tensor(_hadamard_rows(size))
    rotated: torch.Tensor = parts @ (matrix.t() if inverse else matrix)
    return rotated.flatten(1)


@functools.cache
def _hadamard_on(device: torch.device, size: int) -> torch.Tensor:
    # Kept, because a copy from the host waits for the stream; made outside of all modes, which it outlives.
    with torch.inference_mode(mode=False), no_dispatch_modes():
        return torch.tensor(_hadamard_rows(size), dtype=torch.float32, device=device)


@functools.cache
def _hadamard_rows(size: int) -> list[list[float]]:
    """A Hadamard matrix with random signs, the same in every process: both operands of a GEMM need one matrix."""
    with no_dispatch_modes():
        matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        while matrix.shape[0] < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        generator = torch.Generator("cpu").manual_seed(size)
        drawn = torch.randint(0, 2, (size, 1), generator=generator, dtype=torch.int64, device="cpu")
        transform: torch.Tensor = (drawn * 2 - 1) * matrix / size**0.5
        return transform.tolist()


e2m1.rotate = rotate
