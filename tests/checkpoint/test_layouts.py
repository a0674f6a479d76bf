"""What engines read: names, dtypes, shapes and configuration, written out here as their sources have them."""

from dataclasses import replace

import pytest
import torch

import f8sub
from f8sub.checkpoint import layouts
from tests.data_sets import gaussian, generator

N, K = 384, 256

E4M3, FLOAT, BYTE = torch.float8_e4m3fn, torch.float32, torch.uint8

SPEC = {
    ("blockwise", "fp8"): {"weight": (E4M3, (N, K)), "weight_scale_inv": (FLOAT, (3, 2))},
    ("gridquant", "fp8"): {"weight": (E4M3, (N, K)), "weight_scale_inv": (FLOAT, (3, 2))},
    ("blockwise", "compressed-tensors"): {"weight": (E4M3, (N, K)), "weight_scale": (FLOAT, (3, 2))},
    ("tensorwise", "compressed-tensors"): {"weight": (E4M3, (N, K)), "weight_scale": (FLOAT, (N, 1))},
    ("delayed", "compressed-tensors"): {"weight": (E4M3, (N, K)), "weight_scale": (FLOAT, (N, 1))},
    ("rowwise", "compressed-tensors"): {"weight": (E4M3, (N, K)), "weight_scale": (FLOAT, (N, 1))},
    ("mxfp8", "compressed-tensors"): {"weight": (E4M3, (N, K)), "weight_scale": (BYTE, (N, K // 32))},
}
"""Tensors of a layer of (384, 256): vLLM's fp8.py and compressed_tensors_w8a8_*.py create parameters of these."""

STRATEGY = {
    "tensorwise": "channel",
    "delayed": "channel",
    "rowwise": "channel",
    "mxfp8": "group",
    "blockwise": "block",
}


def operand(recipe: str, shape: tuple[int, int] = (N, K)) -> f8sub.Operand:
    return f8sub.quantize(gaussian(shape, generator(0)), recipe, "w", columnwise=False).rowwise


def values_of(tensors: dict[str, torch.Tensor], edges: tuple[int, int]) -> torch.Tensor:
    """What a reader multiplies, in float64: codes times the scale of each block of ``edges``."""
    scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    scale = torch.exp2(scale.double() - 127) if scale.dtype == BYTE else scale.double()
    spread = scale.repeat_interleave(edges[0], 0)[:N].repeat_interleave(edges[1], 1)[:, :K]
    return tensors["weight"].double() * spread


@pytest.mark.parametrize(("recipe", "layout"), SPEC, ids="-".join)
def test_tensors_are_those_that_engines_create(recipe, layout):
    made = layouts.tensors_of(operand(recipe), layout)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in made.items()} == SPEC[recipe, layout]
    assert all(tensor.is_contiguous() for tensor in made.values())
    config = layouts.quantization_config(layout, {"a.q": operand(recipe).format}, ["lm_head"])
    if layout == "fp8":
        edges = tuple(config["weight_block_size"])
    else:
        strategy = config["config_groups"]["group_0"]["weights"]["strategy"]
        assert strategy == STRATEGY[recipe]
        edges = {"channel": (1, K), "group": (1, 32), "block": (128, 128)}[strategy]
    expected = f8sub.quantize(gaussian((N, K), generator(0)), recipe, "w", columnwise=False)
    assert torch.equal(values_of(made, edges).float(), expected.dequantize().float())


def test_configuration_of_fp8():
    config = layouts.quantization_config("fp8", {"a": operand("blockwise").format}, ["z", "lm_head"])
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "float",
        "modules_to_not_convert": ["lm_head", "z"],
    }


def test_recipes_of_one_model_are_groups_by_full_names():
    formats = {name: operand(name).format for name in ("rowwise", "mxfp8", "tensorwise")}
    config = layouts.quantization_config("compressed-tensors", formats, [])
    groups = config["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["rowwise", "tensorwise"], ["mxfp8"]]
    assert [group["format"] for group in groups.values()] == ["float-quantized", "mxfp8-quantized"]
    assert config["format"] == "mixed-precision"


def test_blocks_that_do_not_divide_a_shape_take_the_layout_that_is_told_their_edge():
    format = operand("blockwise").format
    assert layouts.natural_layout({"a": (format, (256, 128))}) == "fp8"
    assert (
        layouts.natural_layout({"a": (format, (256, 128)), "b": (format, (192, 128))}) == "compressed-tensors"
    )
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"b: readers guess .* 192x128.*Try layout='compressed-tensors'"
    ):
        layouts.check("fp8", {"a": (format, (256, 128)), "b": (format, (192, 128))})


def test_blocks_of_deepseek_v3s_projection_are_written_where_the_layout_is_asked_for():
    """576 rows have 5 rows of scales, which transformers refuses and engines read."""
    weight = {"kv_a_proj_with_mqa": (operand("blockwise").format, (576, 7168))}
    assert layouts.natural_layout(weight) == "compressed-tensors"
    with pytest.warns(f8sub.Float8Warning, match=r"kv_a_proj_with_mqa.* transformers refuses"):
        layouts.check("fp8", weight)


@pytest.mark.parametrize(
    ("recipe", "layout", "reason"),
    [
        ("nvfp4", "compressed-tensors", "a static scale of the inputs"),
        ("rowwise", "fp8", "it holds squares of 128"),
        ("rowwise", "gguf", "unknown layout 'gguf'; choose one of auto, fp8, compressed-tensors"),
    ],
)
def test_what_engines_cannot_read_is_refused(recipe, layout, reason):
    with pytest.raises(f8sub.Float8ConfigError, match=reason):
        layouts.check(layout, {"a": (operand(recipe).format, (N, K))})


def test_weights_in_e5m2_are_refused():
    format = replace(operand("blockwise").format, dtype=torch.float8_e5m2)
    with pytest.raises(f8sub.Float8ConfigError, match=r"engines read e4m3 .* not 128x128 e5m2"):
        layouts.check("fp8", {"a": (format, (N, K))})


def test_squares_that_no_engine_reads_are_refused():
    format = f8sub.get_recipe("gridquant", block=64).fprop.b
    with pytest.raises(f8sub.Float8ConfigError, match="squares of 128s"):
        layouts.check("compressed-tensors", {"a": (format, (N, K))})
