"""Which attention kernels run on Hopper, by their names in a profile: cuDNN's under prefer_cudnn_attention."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.attention.kernel_order import preferred_order
from tests.data_sets import gaussian, generator
from tests.docs.pages import ROOT

HEADS, KV_HEADS, WIDTH = 8, 2, 128
OTHERS = ("pytorch_flash", "flash_fwd", "flash_bwd", "fmha_cutlass")


@pytest.fixture(autouse=True)
def on_hopper():
    if not preferred_order():
        pytest.skip(f"needs Hopper and cuDNN 9.15.1 or newer, here is {torch.backends.cudnn.version()}")


def inputs(length: int = 1024) -> list[torch.Tensor]:
    """q, k and v, as queries in groups have them."""
    shapes = ((1, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [
        gaussian(shape, generator(i)).to("cuda", torch.bfloat16).requires_grad_()
        for i, shape in enumerate(shapes)
    ]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def kernels_of(call) -> set[str]:
    """Which attention ran: "cudnn", "others", both or none."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    found = {"cudnn" for name in names if "cudnn" in name.lower() and "sdpa" in name.lower()}
    return found | {"others" for name in names if any(other in name for other in OTHERS)}


@pytest.mark.parametrize("way", ["eager", "compiled", "checkpointed", "compiled and checkpointed"])
def test_forward_and_backward_are_cudnns(way):
    torch._dynamo.reset()
    called = attention
    if "checkpointed" in way:

        def called(*given):
            return checkpoint(attention, *given, use_reentrant=False)

    if "compiled" in way:
        called = torch.compile(called, fullgraph=True)
    given = inputs()
    with f8sub.prefer_cudnn_attention() as by_cudnn:
        assert by_cudnn
        called(*given).float().square().sum().backward()
        assert kernels_of(lambda: called(*given).float().square().sum().backward()) == {"cudnn"}


@pytest.mark.parametrize("length", [64, 100, 200, 1000])
def test_of_any_length_it_is_as_close_as_flash(length):
    given = inputs(length)
    exact = [each.detach().double().cpu() for each in given]
    expected = attention(*exact)
    errors = []
    for context in (f8sub.prefer_cudnn_attention(), sdpa_kernel(SDPBackend.FLASH_ATTENTION)):
        with context:
            errors.append((attention(*given).detach().double().cpu() - expected).abs().max())
    assert errors[0] <= 2 * errors[1] + 1e-3


def test_transformers_llama_is_cudnns():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=HEADS * WIDTH,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    model = f8sub.convert_to_float8(model)
    tokens = torch.randint(512, (2, 512), device="cuda")

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    with f8sub.prefer_cudnn_attention():
        step()
        assert kernels_of(step) == {"cudnn"}


FRESH = """
import torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
import f8sub
from tests.cuda.test_attention import attention, inputs, kernels_of
call = lambda: attention(*inputs())
"""


def in_a_new_process(code: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FRESH + code], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_torch_by_itself_takes_cudnns():
    """What docs/performance.md says of torch's own order."""
    assert in_a_new_process("print(*kernels_of(call))") == ["cudnn"]


def test_after_a_first_call_under_another_order_the_block_still_has_cudnns():
    code = """
with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
    call()
print(*kernels_of(call))
with f8sub.prefer_cudnn_attention():
    print(*kernels_of(call))
print(*kernels_of(call))
"""
    before, inside, after = in_a_new_process(code)
    assert inside == "cudnn"
    assert before == after == "others"


def test_after_the_block_torchs_own_order_returns():
    code = """
with f8sub.prefer_cudnn_attention():
    print(*kernels_of(call))
print(*kernels_of(call))
"""
    assert in_a_new_process(code) == ["cudnn", "cudnn"]
