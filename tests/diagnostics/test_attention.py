"""prefer_cudnn_attention: where it changes torch's order of attention kernels, and that it puts everything back."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.attention import kernel_order
from tests.data_sets import gaussian, generator
from tests.models import transformer

CUDNN, FLASH, EFFICIENT, MATH = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


@contextmanager
def gpu(monkeypatch, *, major: int = 9, cudnn: int | None = 91900, hip: str | None = None):
    """As if there were one; what is settled is counted."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
        patched.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        patched.setattr(torch.version, "hip", hip)
        settled = SimpleNamespace(calls=0)
        patched.setattr(kernel_order, "settle_order", lambda: vars(settled).update(calls=settled.calls + 1))
        yield settled


@contextmanager
def preferring(monkeypatch):
    """The block of a GPU, without one inside."""
    with gpu(monkeypatch):
        block = f8sub.prefer_cudnn_attention()
        assert block.__enter__()
    try:
        yield
    finally:
        block.__exit__(None, None, None)


def order() -> list[SDPBackend]:
    return _cur_sdpa_kernel_backends(with_priority=True)


def test_on_hopper_cudnn_comes_first_and_the_order_returns(monkeypatch):
    before = order()
    assert before[0] != CUDNN
    with gpu(monkeypatch) as settled:
        with f8sub.prefer_cudnn_attention() as by_cudnn:
            assert by_cudnn
            assert settled.calls == 1
            assert order() == [CUDNN, FLASH, EFFICIENT, MATH]
        assert order() == before
        with pytest.raises(KeyError), f8sub.prefer_cudnn_attention():
            raise KeyError
    assert order() == before


@pytest.mark.parametrize(
    "other",
    [{"major": 8}, {"major": 10}, {"cudnn": 91500}, {"cudnn": 91002}, {"cudnn": None}, {"hip": "7.0"}],
    ids=str,
)
def test_elsewhere_nothing_changes(monkeypatch, other):
    before = order()
    with gpu(monkeypatch, **other) as settled, f8sub.prefer_cudnn_attention() as by_cudnn:
        assert not by_cudnn
        assert not settled.calls
        assert order() == before


def test_without_a_gpu_nothing_changes():
    before = order()
    with f8sub.prefer_cudnn_attention() as by_cudnn:
        assert order() == before
        assert not by_cudnn or torch.cuda.is_available()


def test_what_was_switched_off_stays_off(monkeypatch):
    priority = torch._C._get_sdp_priority_order()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with gpu(monkeypatch), f8sub.prefer_cudnn_attention():
            assert order() == [CUDNN, EFFICIENT, MATH]
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with gpu(monkeypatch), f8sub.prefer_cudnn_attention() as by_cudnn:
            assert not by_cudnn
            assert CUDNN not in order()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch._C._set_sdp_priority_order(priority)  # sdpa_kernel puts last what is switched off


class Recomputed(torch.nn.Module):
    """A block whose forward runs again in backward."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_checkpointed_step_has_the_same_bits_on_a_cpu(monkeypatch, compiled, fresh_compiler):
    x = gaussian((2, 16, 32), generator(1))
    gradients = []
    for prefers in (False, True):
        torch._dynamo.reset()
        model = transformer("tensorwise")
        for index, block in enumerate(model.blocks):
            block = Recomputed(block)
            compile_ = torch.compile(block, backend="aot_eager", fullgraph=True)
            model.blocks[index] = compile_ if compiled else block
        if prefers:
            with preferring(monkeypatch):
                model(x).square().mean().backward()
        else:
            model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_grouped_queries_and_masks_have_the_same_bits_on_a_cpu(monkeypatch):
    q, k, v = (gaussian((1, heads, 32, 16), generator(heads + 1)) for heads in (4, 2, 2))
    mask = torch.ones(32, 32, dtype=torch.bool).tril()
    ways = ({"is_causal": True}, {"attn_mask": mask})

    def run():
        return [F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **way) for way in ways]

    expected = run()
    with preferring(monkeypatch):
        assert order()[0] == CUDNN
        assert all(map(torch.equal, run(), expected))
