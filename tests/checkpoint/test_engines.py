"""What engines do to weights and inputs, by rules written out here as their sources have them, and what it changes."""

import pytest
import torch

import f8sub
from f8sub.checkpoint import layouts
from tests.data_sets import gaussian, generator

BF16, E4M3, MOST = torch.bfloat16, torch.float8_e4m3fn, 448
FLOAT_SCALES = f8sub.get_recipe("blockwise", power_of_2_scales=False)


def exported(recipe, layout: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return layouts.tensors_of(f8sub.quantize(weight, recipe, "w", columnwise=False).rowwise, layout)


def exponents_of(amax: torch.Tensor) -> torch.Tensor:
    """The factor of codes that DeepGEMM's ``ceil_to_ue8m0`` makes."""
    return torch.exp2(torch.ceil(torch.log2(amax.float().clamp(min=1e-10) / MOST)))


def cast(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values.float() / scale).clamp(-MOST, MOST).to(E4M3).float() * scale


@pytest.mark.parametrize("recipe", ["blockwise", FLOAT_SCALES], ids=["powers of two", "float scales"])
def test_blocks_that_are_cast_again_to_powers_of_two(recipe):
    """SGLang's ``requant_weight_ue8m0`` and vLLM's ``requant_weight_ue8m0_inplace``: to bf16, then each block anew."""
    made = exported(recipe, "fp8", gaussian((384, 256), generator(0)).to(BF16))
    scale = made["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = (made["weight"].float() * scale).to(BF16)
    amax = values.float().view(3, 128, 2, 128).abs().amax((1, 3))
    again = cast(values, exponents_of(amax).repeat_interleave(128, 0).repeat_interleave(128, 1))
    changed = (again != made["weight"].float() * scale).float().mean()
    assert changed == 0 if recipe == "blockwise" else changed > 0.9


def test_layers_that_are_fused_keep_their_values_with_a_scale_a_row():
    """``requantize_with_max_scale`` of both casts fused layers of one scale each by the largest, and leaves rows."""
    weights = [gaussian((128, 256), generator(i)).to(BF16) * size for i, size in enumerate((1.0, 0.3))]
    values = [f8sub.quantize(w, "tensorwise", "w", columnwise=False).dequantize() for w in weights]
    made = [exported("tensorwise", "compressed-tensors", weight) for weight in weights]
    codes, rows = (torch.cat([each[name] for each in made]) for name in ("weight", "weight_scale"))
    assert torch.equal((codes.float() * rows).to(BF16), torch.cat(values))
    assert (cast(values[1], rows.max()).to(BF16) != values[1]).float().mean() > 0.5


def test_inputs_of_blocks_have_the_trainings_codes_where_an_engine_has_powers_of_two():
    """``per_token_group_quant_fp8`` of both with ``use_ue8m0``: a scale for 128 elements of a token."""
    x = gaussian((64, 512), generator(0)).to(BF16)
    trained = f8sub.quantize(x, "blockwise", "x", columnwise=False).dequantize().float()
    amax = x.view(64, 4, 128).abs().amax(2)
    assert torch.equal(cast(x, exponents_of(amax).repeat_interleave(128, 1)), trained)
