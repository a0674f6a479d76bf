"""prefer_cudnn_attention: which of torch's attention kernels come first on Hopper."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HOPPER = 9
"""Major compute capability."""

LAST_WRONG_CUDNN = 91500
"""Up to cuDNN 9.15.0 lengths that are no multiple of 128 are read out of bounds (pytorch issue 169849); 9.15.1 is the
first that torch prefers itself."""


@contextlib.contextmanager
def prefer_cudnn_attention() -> Iterator[bool]:
    """Have ``F.scaled_dot_product_attention`` take cuDNN's kernels in the block, on Hopper, where it can.

    They take about half of FlashAttention-2's time there, in forward and backward. From 2.11 on torch prefers them by
    itself where its cuDNN is 9.15.1 or newer, unless the process's first call of attention ran under an
    ``sdpa_kernel(..., set_priority=True)`` that has ended: then FlashAttention-2 comes first. Put all of a training
    into one block, and each arm of a comparison: forward, backward, what checkpointing recomputes, and what
    ``torch.compile`` traces, which keeps the kernels of that moment.

    Nothing changes on other devices, with an older cuDNN, or where ``torch.backends.cuda.enable_cudnn_sdp(False)`` was
    called; and what cuDNN cannot do goes to the others, in torch's order: dtypes but bfloat16 and float16, heads wider
    than 128, or than 256 for some newer versions, and ``torch.use_deterministic_algorithms(True)``.

    Yields:
        Whether cuDNN's kernels come first by this.
    """
    order = preferred_order()
    if not order:
        yield False
        return
    settle_order()
    with sdpa_kernel(order, set_priority=True):
        yield True


def preferred_order() -> list[SDPBackend]:
    """The kernels that are enabled, cuDNN's first; none where torch's own order stays."""
    # ROCm has no cuDNN.
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return []
    cuda = torch.backends.cuda
    enabled = {
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    is_hopper = torch.cuda.get_device_capability()[0] == HOPPER
    is_right = (torch.backends.cudnn.version() or 0) > LAST_WRONG_CUDNN
    fastest = is_hopper and is_right and enabled[SDPBackend.CUDNN_ATTENTION]
    return [kernel for kernel, is_on in enabled.items() if is_on] if fastest else []


def settle_order() -> None:
    """Make the process's first call of attention, in which torch sets its own order.

    Made inside of the block instead, it would replace the block's order, and the one from before it would return after.
    """
    # A capture would record the call.
    if not torch.cuda.is_current_stream_capturing():
        with torch.no_grad():
            q = torch.zeros(1, 1, 8, 8, device="cuda", dtype=torch.bfloat16)
            F.scaled_dot_product_attention(q, q, q)
