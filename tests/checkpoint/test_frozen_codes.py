"""Frozen layers are a file's own codes, at one byte an element, whatever its scales are; and multiply them."""

import gc
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import f8sub
from tests.checkpoint.files import file_of
from tests.data_sets import gaussian, generator
from tests.models import seed_weights

LAYERS = ["up", "down"]


class Net(nn.Module):
    """Two layers whose blocks of 128 the second shape cuts, and a norm that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 384, bias=False)
        self.down = nn.Linear(384, 160, bias=False)
        self.norm = nn.LayerNorm(160)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


def frozen(recipe: str = "blockwise") -> nn.Module:
    model = f8sub.convert_to_float8(seed_weights(Net()), recipe=recipe, primary_weights=True)
    for layer in LAYERS:
        model.get_submodule(layer).requires_grad_(False)
    return model


def operand(layer: nn.Module) -> f8sub.Operand:
    return layer.weight.primary.codes.rowwise


@pytest.mark.parametrize("power_of_2", [True, False])
def test_codes_and_scales_are_the_files(tmp_path, power_of_2):
    model = frozen()
    tensors, values = file_of(tmp_path / "in", model, LAYERS, power_of_2=power_of_2)
    f8sub.load_float8(model, tmp_path / "in")
    f8sub.precompute_scales(model)
    for layer in LAYERS:
        found = operand(model.get_submodule(layer))
        assert torch.equal(found.data.view(torch.uint8), tensors[f"{layer}.weight"].view(torch.uint8))
        assert torch.equal(found.scale_inv, tensors[f"{layer}.weight_scale_inv"])
        assert torch.equal(model.get_submodule(layer).weight.detach().clone(), values[layer].float())
    assert torch.equal(model.norm.weight, tensors["norm.weight"])


@pytest.mark.parametrize("power_of_2", [True, False])
def test_forward_and_backward_multiply_the_files_values(tmp_path, power_of_2):
    """x is a power of two everywhere, so its own cast is exact, and sums in float32 of few terms are too."""
    model = frozen()
    _, values = file_of(tmp_path / "in", model, LAYERS, power_of_2=power_of_2)
    f8sub.load_float8(model, tmp_path / "in")
    eye = torch.eye(256)
    assert torch.equal(model.up(eye), values["up"].t().float())
    x = torch.zeros(384, 256, requires_grad=True)
    model.up(x).backward(torch.eye(384))
    assert torch.equal(x.grad, values["up"].float())
    assert model.up.weight.grad is None


def test_one_byte_an_element_is_held_and_no_value_in_high_precision(tmp_path):
    model = frozen()
    masters = [StorageWeakRef(model.get_submodule(layer).weight.untyped_storage()) for layer in LAYERS]
    file_of(tmp_path / "in", model, LAYERS, power_of_2=False)
    f8sub.load_float8(model, tmp_path / "in")
    gc.collect()
    assert all(master.expired() for master in masters)
    for layer in LAYERS:
        weight = model.get_submodule(layer).weight
        assert weight.primary.codes.columnwise is None
        assert operand(model.get_submodule(layer)).data.untyped_storage().nbytes() == weight.numel()


def test_a_model_on_meta_gets_no_values_in_high_precision(tmp_path):
    source = frozen()
    file_of(tmp_path / "in", source, LAYERS, power_of_2=False)
    with torch.device("meta"):
        model = Net()
    f8sub.convert_to_float8(model, "blockwise", primary_weights=True)
    model.up.requires_grad_(False)
    model.down.requires_grad_(False)
    with pytest.raises(f8sub.Float8ConfigError, match=r"on meta, .* give load_float8 device="):
        f8sub.load_float8(model, tmp_path / "in")
    f8sub.load_float8(model, tmp_path / "in", device="cpu")
    f8sub.load_float8(source, tmp_path / "in")
    x = torch.randn(8, 256)
    assert torch.equal(model(x), source(x))
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_scales_that_a_recipe_cannot_store_are_cast_again(tmp_path):
    """A recipe with other tiles has no place for the file's scales."""
    model = frozen("rowwise")
    file_of(tmp_path / "in", model, LAYERS, power_of_2=True)
    with pytest.warns(f8sub.Float8Warning, match="a second time"):
        f8sub.load_float8(model, tmp_path / "in")
    f8sub.drop_high_precision(model)
    assert operand(model.up).scale_inv.shape == (384, 1)


LEARNING = [("power of two", True), ("float", False)]


@pytest.mark.parametrize(("rule", "power_of_2"), LEARNING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_of_layers_that_learn_are_cast_to_the_files_codes(tmp_path, rule, power_of_2, dtype):
    """Powers of two: the same values, and codes but where a block's largest is at most half of 448, which doubles.

    Float32 scales: the same codes, and scales that differ by the rounding of the block's amax to float32 or bfloat16.
    """
    recipe = f8sub.get_recipe("blockwise", power_of_2_scales=power_of_2)
    model = f8sub.convert_to_float8(seed_weights(Net()), recipe=recipe)
    tensors, values = file_of(tmp_path / "in", model, LAYERS, power_of_2=power_of_2)
    f8sub.load_float8(model, tmp_path / "in")
    for layer in LAYERS:
        weight, codes = model.get_submodule(layer).weight, tensors[f"{layer}.weight"]
        found = f8sub.quantize(weight.detach().clone().to(dtype), recipe, "w", columnwise=False)
        if power_of_2:
            assert torch.equal(found.dequantize().double(), values[layer].to(dtype).double())
            continue
        assert torch.equal(found.rowwise.data.view(torch.uint8), codes.view(torch.uint8))
        off = (found.rowwise.scale_inv / tensors[f"{layer}.weight_scale_inv"] - 1).abs().max()
        assert off <= (2**-23 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8", "blockwise"])
def test_codes_of_an_export_are_held_as_they_are(tmp_path, recipe):
    source = f8sub.convert_to_float8(seed_weights(Net()), recipe=recipe)
    f8sub.save_float8(source, tmp_path / "out", layout="compressed-tensors", dtype=torch.bfloat16)
    model = frozen(recipe)
    f8sub.load_float8(model, tmp_path / "out")
    for layer in LAYERS:
        values = source.get_submodule(layer).weight.detach().clone().to(torch.bfloat16)
        expected, found = f8sub.quantize(values, recipe, "w").rowwise, operand(model.get_submodule(layer))
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert found.scale_inv.dtype == expected.scale_inv.dtype
        assert torch.equal(found.scale_inv.float(), expected.scale_inv.float())


def test_float32_scales_of_rows_are_cast_again_where_dgrad_could_not_read_them(tmp_path):
    """Columns with scales of their own are made of rows only where both are powers of two."""
    floats = replace(f8sub.get_recipe("rowwise").fprop.b, scale_rule=f8sub.ScaleRule.FLOAT)
    model, tensors = frozen("rowwise"), {"norm.weight": torch.ones(160), "norm.bias": torch.zeros(160)}
    for layer in LAYERS:
        shape = tuple(model.get_submodule(layer).weight.shape)
        made = f8sub.quantize(gaussian(shape, generator(3)), floats, columnwise=False).rowwise
        tensors |= {f"{layer}.weight": made.data, f"{layer}.weight_scale": made.scale_inv}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    group = {"targets": ["Linear"], "weights": {"strategy": "channel"}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.warns(f8sub.Float8Warning, match="a second time"):
        f8sub.load_float8(model, tmp_path / "in")
    expected = tensors["up.weight"].float() * tensors["up.weight_scale"]
    assert torch.equal(model.up.weight.detach().clone(), expected)
