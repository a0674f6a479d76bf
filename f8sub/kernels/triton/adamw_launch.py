"""One step of AdamW of many tensors by one launch for each combination of dtypes, and the amaxes of what it writes.

And the sum of the squares of many tensors, which clipping by their norm needs before.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from f8sub.capture import Place, addresses_on, keep_for_replays, place_of, programs_on
from f8sub.formats import HIGH_PRECISION
from f8sub.kernels.triton import support
from f8sub.kernels.triton.support import ALIGNMENT

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch

BLOCK, SPAN, WARPS = 1024, support.STEP_SPAN, 4
"""Elements that a program has in registers, 8 of each tensor in each of its threads, and that it steps in all.

With as many in all as in registers it has 0.99 of a copy's speed on an H200, with eight times as many 0.95."""


SQUARES = 1024, 16384, 4
"""The same of the sum of squares."""


class Stepped(NamedTuple):
    """A tensor that is stepped: plain, contiguous tensors of one size.

    ``made`` is the number of its steps, float32, ().
    ``slot`` is the parameter's entry in the amaxes, -1 where nobody asks for its amax; the first of several where each
    ``every`` elements, a multiple of ``SPAN``, have one.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    made: torch.Tensor
    slot: int
    every: int = 0


class Options(NamedTuple):
    """A parameter group's options, by torch's names; ``lr`` is a number, or a float32 tensor of one element."""

    lr: float | torch.Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool


class Scalars(NamedTuple):
    """Float32 tensors of one element on the device, or None.

    Attributes:
        clip: what gradients are multiplied by.
        found_inf: 1 where the step is to change nothing.
    """

    clip: torch.Tensor | None
    found_inf: torch.Tensor | None


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of contiguous tensors that ``why_not_of`` lets pass; float64, ()."""
    from f8sub.kernels.triton import adamw, launch
    from f8sub.kernels.triton.quantize_launch import INPUTS

    kinds: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
    for tensor in tensors:
        aligned = tensor.numel() % ALIGNMENT == 0 and tensor.data_ptr() % ALIGNMENT == 0
        kinds.setdefault((tensor.dtype, aligned), []).append(tensor)
    sums = []
    for (dtype, aligned), some in kinds.items():
        # Of what a table has the kernel reads the sizes alone.
        rows = tuple((0, 0, 0, tensor.numel(), -1, 0) for tensor in some)
        tables = table, of_program = _tables(rows, SQUARES[1], place_of(some[0]))
        keep_for_replays(*tables)
        sums.append(torch.empty(of_program.numel(), dtype=torch.float32, device=some[0].device))
        arguments = {
            "tensors_ptr": table,
            "tensor_of_program_ptr": of_program,
            "gradients_ptr": addresses_on(some[0], tuple(tensor.data_ptr() for tensor in some)),
            "sums_ptr": sums[-1],
            "OF_GRADIENTS": INPUTS[dtype],
            "BLOCK": SQUARES[0],
            "SPAN": SQUARES[1],
            "ALIGNED": aligned,
        }
        with support.device_of(some[0]):
            launch.Launch(
                adamw.squares_of_many, of_program.numel(), arguments, {"num_warps": SQUARES[2]}
            ).run()
    return torch.cat(sums).sum(dtype=torch.float64)


def why_not_of(values: Sequence[torch.Tensor]) -> str | None:
    """Return why the kernel runs on none of these tensors; None where it does."""
    first = next((v for v in values if not (support.takes(v) and v.dtype in HIGH_PRECISION)), None)
    if first is None:
        return None
    if first.is_cuda and first.dtype not in HIGH_PRECISION:
        return f"a parameter is in {first.dtype}"
    if first.is_cuda and type(first) is not torch.Tensor:
        return f"a parameter is a {type(first).__name__}"
    return f"a parameter is on {first.device}, where f8sub has no kernels"


def why_not(tensor: Stepped) -> str | None:
    """Return why the kernel does not step a tensor that ``why_not_of`` lets pass; None where it does."""
    values = tensor[:4]
    if not all(value.is_contiguous() for value in values):
        return "a parameter, its gradient or its state is not contiguous"
    if (
        not all(value.dtype in HIGH_PRECISION for value in values)
        or tensor.first.dtype is not tensor.second.dtype
    ):
        return "a parameter, its gradient or its state is of another dtype than float32, bfloat16 and float16"
    return None


def step(tensors: Sequence[Stepped], options: Options, scalars: Scalars, amaxes: torch.Tensor) -> None:
    """Run ``launches``."""
    with support.device_of(amaxes):
        for launch in launches(tensors, options, scalars, amaxes):
            launch.run()


def launches(
    tensors: Sequence[Stepped], options: Options, scalars: Scalars, amaxes: torch.Tensor
) -> "list[Launch]":
    """Return the launches of one step of tensors that have elements, and whose ``made`` counts this step.

    The amax of each new parameter is the maximum of it and of what its entry of ``amaxes``, float32, has before:
    infinity for NaN or infinity. Numbers are those of ``torch.optim.AdamW(fused=True)`` of torch 2.13.
    """
    kinds: dict[tuple[torch.dtype | bool, ...], list[Stepped]] = {}
    for tensor in tensors:
        aligned = tensor.parameter.numel() % ALIGNMENT == 0
        aligned = aligned and all(value.data_ptr() % ALIGNMENT == 0 for value in tensor[:4])
        kind = tensor.parameter.dtype, tensor.gradient.dtype, tensor.first.dtype, aligned
        kinds.setdefault(kind, []).append(tensor)
    return [_launch(chosen, options, scalars, amaxes, aligned) for (*_, aligned), chosen in kinds.items()]


def _launch(
    chosen: list[Stepped], options: Options, scalars: Scalars, amaxes: torch.Tensor, aligned: object
) -> "Launch":
    from f8sub.kernels.triton import adamw, launch
    from f8sub.kernels.triton.quantize_launch import INPUTS

    first = chosen[0]
    rows = tuple(
        (
            t.parameter.data_ptr(),
            t.first.data_ptr(),
            t.second.data_ptr(),
            t.parameter.numel(),
            t.slot,
            t.every,
        )
        for t in chosen
    )
    tables = table, of_program = _tables(rows, SPAN, place_of(first.parameter))
    keep_for_replays(*tables)
    (beta1, beta2), lr = options.betas, options.lr
    counts = torch.stack([t.made for t in chosen])
    arguments = {
        "tensors_ptr": table,
        "tensor_of_program_ptr": of_program,
        "gradients_ptr": addresses_on(first.parameter, tuple(t.gradient.data_ptr() for t in chosen)),
        # As in torch's kernel in float32, where beta**count is CUDA's pow.
        "correction1_ptr": 1 - torch.pow(beta1, counts),
        "correction2_ptr": (1 - torch.pow(beta2, counts)).sqrt_(),
        "amax_ptr": amaxes.view(torch.int32),
        "lr_ptr": lr if isinstance(lr, torch.Tensor) else None,
        "clip_ptr": scalars.clip,
        "found_inf_ptr": scalars.found_inf,
        "lr": 0.0 if isinstance(lr, torch.Tensor) else float(lr),
        # A whole number would be another type to Triton.
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(options.eps),
        "weight_decay": float(options.weight_decay),
        "OF_PARAMETERS": INPUTS[first.parameter.dtype],
        "OF_GRADIENTS": INPUTS[first.gradient.dtype],
        "OF_STATES": INPUTS[first.first.dtype],
        "MAXIMIZE": options.maximize,
        "DECAY": options.weight_decay != 0,
        "BLOCK": BLOCK,
        "SPAN": SPAN,
        "ALIGNED": aligned,
    }
    return launch.Launch(adamw.step_many, of_program.numel(), arguments, {"num_warps": WARPS})


@functools.lru_cache(maxsize=64)
def _tables(rows: tuple[tuple[int, ...], ...], span: int, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernels read of tensors, and the tensor of each program; int64 and int32."""
    programs = [-(-size // span) for *_, size, _, _ in rows]
    table, first_program = [], 0
    for (*addresses, size, slot, every), count in zip(rows, programs, strict=True):
        table += [*addresses, first_program, size, slot, every]
        first_program += count
    return programs_on(place, tuple(table), programs)
