"""A step of AdamW of many tensors in one launch, interpreted: against float64, and torch's own steps."""

import re
from itertools import product

import numpy as np
import pytest
import torch

from f8sub.kernels.triton import adamw_launch
from f8sub.kernels.triton.adamw_launch import Options, Scalars, Stepped
from tests.data_sets import generator
from tests.kernels.interpreted import interpreted, needs_triton
from tests.selection import long_but

DTYPES = {
    "float32": (torch.float32,) * 3,
    "bfloat16": (torch.bfloat16,) * 3,
    "bfloat16 states": (torch.float32, torch.float32, torch.bfloat16),
    "float16 gradients": (torch.float32, torch.float16, torch.float32),
}
"""Of parameters, gradients and states."""
SIZES = [(33, 40), (5,), (128, 160), (16,), (1,)]
"""Of several programs and of one; of lines that are multiples of 16 elements, and of others."""
OPTIONS = {
    "usual": Options(3e-2, (0.9, 0.95), 1e-8, 0.1, False),
    "no-decay": Options(1e-3, (0.9, 0.999), 1e-6, 0.0, False),
    "maximize": Options(1e-2, (0.5, 0.9), 1e-8, 0.01, True),
}


CLIPS = 1.0, 0.37
SHORT = [(name, "usual", clip) for name in ("float32", "bfloat16 states") for clip in CLIPS]
SHORT += [("float32", "no-decay", 1.0), ("bfloat16 states", "maximize", 0.37)]


def drawn(dtypes: tuple[torch.dtype, ...], device: str, made: float) -> list[Stepped]:
    """Tensors after ``made - 1`` steps; every second one has an entry for its amax."""
    found = []
    of_parameters, of_gradients, of_states = dtypes
    for number, size in enumerate(SIZES):
        source = generator(number)
        p, g, m, v = (torch.randn(size, generator=source) for _ in range(4))
        values = p.to(of_parameters), g.to(of_gradients), m.to(of_states), v.square().to(of_states)
        count = torch.tensor(made, dtype=torch.float32)
        slot = number // 2 if number % 2 == 0 else -1
        found.append(Stepped(*(each.to(device) for each in (*values, count)), slot))
    return found


def exact(tensor: Stepped, options: Options, clip: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """The parameter and both moments after the step, in float64, and what float32 may lose of each.

    Of betas that float32 rounds, as torch's kernel does, which takes the powers of them in float32.
    """
    p, g, m, v = (each.double().cpu().numpy() for each in tensor[:4])
    # The gradient that torch clips is of its own dtype again.
    g = (tensor.gradient * clip).double().cpu().numpy() if clip != 1.0 else g
    g = -g if options.maximize else g
    beta1, beta2 = map(np.float64, map(np.float32, options.betas))
    made, unit = float(tensor.made), 2.0**-24
    kept, decay = beta1 * m, options.lr * options.weight_decay * p
    m, v = kept + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    corrections = 1 - beta1**made, 1 - beta2**made
    step = options.lr / corrections[0] * m / (np.sqrt(v / corrections[1]) + options.eps)
    lost_of_m = 4 * unit * (np.abs(kept) + np.abs(m))
    lost = np.abs(step) * unit * (16 + 2 / corrections[0] + 2 / corrections[1]) + 4 * unit * (
        np.abs(p) + np.abs(decay)
    )
    lost = lost + np.abs(step / np.where(m == 0, 1, m)) * lost_of_m
    return [(p - decay - step, lost), (m, lost_of_m), (v, 8 * unit * v)]


def run(tensors, options, scalars, device) -> torch.Tensor:
    amaxes = torch.zeros(3, device=device)
    launches = adamw_launch.launches(tensors, options, scalars, amaxes)
    assert {launch.arguments["ALIGNED"] for launch in launches} == {True, False}
    for launch in launches:
        launch.run()
    return amaxes.cpu()


@pytest.mark.parametrize(("name", "usage", "clip"), long_but(SHORT, product(DTYPES, OPTIONS, CLIPS)))
@interpreted
def test_a_step(name, usage, clip, device):
    options = OPTIONS[usage]
    tensors, dtypes = drawn(DTYPES[name], device, 3.0), DTYPES[name]
    expected = [exact(tensor, options, clip) for tensor in tensors]
    factor = None if clip == 1.0 else torch.tensor(clip, device=device)
    amaxes = run(tensors, options, Scalars(factor, None), device)
    for tensor, right in zip(tensors, expected, strict=True):
        found = tensor.parameter, tensor.first, tensor.second
        for each, (exactly, lost), dtype in zip(found, right, (dtypes[0], dtypes[2], dtypes[2]), strict=True):
            bound = torch.finfo(dtype).eps / 2 * (np.abs(exactly) + lost) + lost
            assert (np.abs(each.double().cpu().numpy() - exactly) <= bound).all()
        if tensor.slot >= 0:
            assert amaxes[tensor.slot] == tensor.parameter.abs().amax().float().cpu()


@interpreted
def test_parts_have_amaxes_of_their_own(device):
    """Each so many elements, as experts have; with one of a tensor beside them."""
    sizes, found = [(3, 2 * adamw_launch.SPAN), (40,), (5, adamw_launch.SPAN)], []
    for number, (size, slot) in enumerate(zip(sizes, (0, 3, 4), strict=True)):
        values = [torch.randn(size, generator=generator(number + at)) for at in range(4)]
        values[3].square_()
        made = torch.tensor(2.0)
        every = size[-1] if len(size) == 2 else 0
        found.append(Stepped(*(each.to(device) for each in (*values, made)), slot, every))
    found[0].parameter[1, 7] = torch.inf
    amaxes = torch.zeros(9, device=device)
    for launch in adamw_launch.launches(found, OPTIONS["usual"], Scalars(None, None), amaxes):
        launch.run()
    right = [tensor.parameter.cpu().abs() for tensor in found]
    # The decay of infinity is NaN, for which infinity stands.
    right = torch.cat([right[0].amax(1), right[1].amax()[None], right[2].amax(1)])
    assert torch.equal(amaxes.cpu(), right.nan_to_num(nan=torch.inf, posinf=torch.inf))
    assert amaxes[1] == torch.inf


@interpreted
def test_the_steps_are_torchs(device):
    """Many of them, with another learning rate each; the CPU's fused kernel rounds otherwise, by some last bits."""
    tensors, options = drawn(DTYPES["float32"], device, 1.0), OPTIONS["usual"]
    parameters = [torch.nn.Parameter(tensor.parameter.cpu().clone()) for tensor in tensors]
    optimizer = torch.optim.AdamW(
        parameters, lr=1.0, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    for tensor in tensors:
        tensor.first.zero_()
        tensor.second.zero_()
    for step in range(6):
        lr = 1e-2 / (step + 1)
        optimizer.param_groups[0]["lr"] = lr
        for tensor, parameter in zip(tensors, parameters, strict=True):
            tensor.gradient.copy_(torch.randn(tensor.gradient.shape, generator=generator(50 + step)))
            parameter.grad = tensor.gradient.cpu().clone()
            tensor.made.fill_(step + 1.0)
        optimizer.step()
        # On the device, as a captured step has it, or a number.
        rate = torch.tensor(lr, device=device) if step % 2 else lr
        run(tensors, options._replace(lr=rate), Scalars(None, None), device)
    for tensor, parameter in zip(tensors, parameters, strict=True):
        torch.testing.assert_close(tensor.parameter.cpu(), parameter.data, rtol=2e-6, atol=2e-6)


@interpreted
def test_a_skipped_step_writes_nothing_but_the_amax_of_what_is_there(device):
    tensors = drawn(DTYPES["float32"], device, 2.0)
    before = [[each.clone() for each in tensor[:4]] for tensor in tensors]
    found_inf = torch.ones((), device=device)
    amaxes = run(tensors, OPTIONS["usual"], Scalars(None, found_inf), device)
    for tensor, values in zip(tensors, before, strict=True):
        assert all(map(torch.equal, tensor[:4], values))
        if tensor.slot >= 0:
            assert amaxes[tensor.slot] == tensor.parameter.abs().amax().cpu()
    found_inf.zero_()
    run(tensors, OPTIONS["usual"], Scalars(None, found_inf), device)
    assert not any(
        torch.equal(tensor.parameter, values[0]) for tensor, values in zip(tensors, before, strict=True)
    )


@interpreted
def test_nan_infinity_and_an_eps_of_zero(device):
    """The amax is infinity for NaN and infinity, and knows nothing of what lies beyond a tensor."""
    tensors = drawn(DTYPES["float32"], device, 2.0)
    tensors[0].gradient.view(-1)[7], tensors[2].parameter.view(-1)[9] = torch.nan, -torch.inf
    amaxes = run(tensors, OPTIONS["usual"]._replace(eps=0.0), Scalars(None, None), device)
    assert amaxes[:2].isinf().all()
    assert amaxes[2].isfinite()
    assert int(tensors[0].parameter.isnan().sum()) == 1


def test_what_the_kernel_does_not_step():
    tensor = drawn(DTYPES["float32"], "cpu", 1.0)[0]
    assert adamw_launch.why_not(tensor) is None
    assert "not contiguous" in adamw_launch.why_not(tensor._replace(gradient=tensor.gradient.t()))
    assert "another dtype" in adamw_launch.why_not(tensor._replace(parameter=tensor.parameter.double()))
    assert "another dtype" in adamw_launch.why_not(tensor._replace(second=tensor.second.bfloat16()))


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize("name", DTYPES)
def test_what_it_compiles_to_for_hopper(name):
    """No spilled register, and tensors that are aligned read and written by 128 bits, 64 where elements are half."""
    from tests.kernels.compiled import compiler

    tensors = [tensor._replace(slot=0) for tensor in drawn(DTYPES[name], "cpu", 1.0)]
    scalars = Scalars(torch.ones(()), torch.zeros(()))
    for launch in adamw_launch.launches(tensors, OPTIONS["usual"], scalars, torch.zeros(4)):
        made = compiler.compiled(launch)
        sass, usage = compiler.disassembled(made.asm["cubin"])
        assert "STACK:0" in usage
        assert not re.search(r"\b(LDL|STL)\b", sass)
        assert made.asm["ptx"].count(".ftz.") == 0
        if launch.arguments["ALIGNED"]:
            wide = re.findall(r"\b(LDG|STG)\S*\.128", sass)
            assert wide.count("LDG") >= 4
            assert wide.count("STG") >= 3
