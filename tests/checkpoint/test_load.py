"""A float8 checkpoint comes back as the values that its codes stand for, or as an error before anything is written."""

import copy
import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import f8sub
from f8sub import ALL, Tile
from f8sub.checkpoint.quantization_config import tile_of
from f8sub.kernels import reference
from tests.checkpoint.models import (
    BF16,
    llama,
    multiplied,
    trained,
)
from tests.checkpoint.nets import NETS, Tied
from tests.models import equal, seed_weights
from tests.selection import long_but

FLOAT_SCALES = f8sub.get_recipe("blockwise", power_of_2_scales=False)


def other(recipe) -> torch.nn.Module:
    """Other values than the checkpoint's."""
    return f8sub.convert_to_float8(seed_weights(llama(), seed=5), recipe=recipe)


@pytest.fixture
def saved(tmp_path):
    def save(recipe, **options) -> tuple[torch.nn.Module, Path]:
        model = trained(recipe)
        f8sub.save_float8(model, tmp_path / "out", dtype=BF16, **options)
        return model, tmp_path / "out"

    return save


@pytest.mark.parametrize("recipe", long_but(("blockwise",), ("blockwise", "rowwise", "mxfp8")))
def test_forward_multiplies_the_values_of_the_file(saved, recipe):
    model, folder = saved(recipe)
    loaded = other(recipe)
    names = []
    f8sub.load_float8(loaded, folder, progress=lambda all: (names.append(name) or name for name in all))
    assert set(names) == dict(loaded.named_parameters()).keys()
    f8sub.precompute_scales(loaded)
    expected, found = multiplied(model), multiplied(loaded)
    format = f8sub.get_recipe(recipe).fprop.b
    for fqn, operand in expected.items():
        right = reference.dequantize(f8sub.Operand(*operand, format), torch.float32)
        assert torch.equal(reference.dequantize(f8sub.Operand(*found[fqn], format), torch.float32), right), (
            fqn
        )
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.to(BF16).float())


@pytest.mark.filterwarnings("ignore:.*no powers of two:f8sub.Float8Warning")
@pytest.mark.parametrize("recipe", ["tensorwise", FLOAT_SCALES], ids=["tensorwise", "float scales"])
def test_masters_have_the_values_of_any_layout(saved, recipe):
    _, folder = saved(recipe)
    loaded = llama()
    f8sub.load_float8(loaded, folder)
    stored = load_file(folder / "model.safetensors")
    codes = stored["model.layers.1.mlp.up_proj.weight"].double()
    if recipe == "tensorwise":
        scale = stored["model.layers.1.mlp.up_proj.weight_scale"].double()
    else:
        scale = stored["model.layers.1.mlp.up_proj.weight_scale_inv"].double()
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight.detach(), (codes * scale).float())


def test_a_second_cast_is_a_warning(saved):
    _, folder = saved("blockwise")
    with pytest.warns(f8sub.Float8Warning, match=r"layers.0.self_attn.q_proj and 13 more: .* a second time"):
        f8sub.load_float8(other("rowwise"), folder)


def broken(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_amax_histories_of_the_values_from_before_end(saved):
    """A scale that was made of smaller values would cut the loaded ones off."""
    _, folder = saved("tensorwise")
    broken(folder, lambda t: t.update({n: 100 * v for n, v in t.items() if n.endswith("weight_scale")}))
    loaded, expected = trained("delayed"), trained("delayed")
    with pytest.warns(f8sub.Float8Warning, match="a second time"):
        f8sub.load_float8(loaded, folder)
    values = {name: value for name, value in loaded.state_dict().items() if "scaling_states" not in name}
    expected.load_state_dict(values, strict=False)
    tokens = torch.arange(32, dtype=torch.int64).view(2, 16)
    assert torch.equal(loaded(tokens).logits, expected(tokens).logits)


UP = "model.layers.0.mlp.up_proj"
CHANGES = {
    "no scales": (
        lambda t: t.pop(f"{UP}.weight_scale_inv"),
        "Config",
        f"{UP}.weight is float8, and .* no scales",
    ),
    "a block size of 64": (
        lambda t: t.update({f"{UP}.weight_scale_inv": torch.ones(6, 4)}),
        "Shape",
        r"scales of 128x128 has \(3, 2\) of them, .* has \(6, 4\)",
    ),
    "another shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(7)}),
        "Shape",
        r"model.norm.weight: the model has \(256,\), .* has \(7,\)",
    ),
    "a name too few": (
        lambda t: t.pop("model.norm.weight"),
        "Config",
        "lacks model.norm.weight and has nothing",
    ),
    "a name too many": (
        lambda t: t.update({"b": torch.ones(1)}),
        "Config",
        "lacks nothing and has b, which the model has not",
    ),
    "a prefix": (
        lambda t: [t.update({f"base.{name}": t.pop(name)}) for name in list(t)],
        "Config",
        r"give rename=lambda name: 'base\.' \+ name, or",
    ),
    "a negative scale": (
        lambda t: t[f"{UP}.weight_scale_inv"][0].neg_(),
        "Numerics",
        "negative or not finite",
    ),
    "an infinite scale": (
        lambda t: t[f"{UP}.weight_scale_inv"][0].fill_(torch.inf),
        "Numerics",
        "negative or not finite",
    ),
    "experts in float8": (
        lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][None]}),
        "Shape",
        r"up_proj.weight: the model has \(384, 256\), .* has \(1, 384, 256\)",
    ),
    "whole numbers as scales": (
        lambda t: t.update({f"{UP}.weight_scale_inv": t[f"{UP}.weight_scale_inv"].long()}),
        "Config",
        "weight_scale_inv is stored as torch.int64",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_foreign_checkpoint_is_an_error_and_writes_nothing(saved, change):
    _, folder = saved("blockwise")
    edit, kind, text = CHANGES[change]
    broken(folder, edit)
    model = other("blockwise")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(getattr(f8sub, f"Float8{kind}Error"), match=text):
        f8sub.load_float8(model, folder)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_without_safetensors(saved, monkeypatch, tmp_path):
    model, folder = saved("blockwise")
    for name, call in (
        ("safetensors", lambda: f8sub.load_float8(model, folder)),
        ("safetensors.torch", lambda: f8sub.save_float8(model, tmp_path / "other")),
    ):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            with pytest.raises(f8sub.Float8ConfigError, match="with safetensors, which is not installed"):
                call()
    assert not (tmp_path / "other").exists()


def test_a_file_that_is_cut_short(saved):
    _, folder = saved("blockwise")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(f8sub.Float8ConfigError, match="cut short or no safetensors file"):
        f8sub.load_float8(other("blockwise"), folder)
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(f8sub.Float8ConfigError, match="git lfs pull"):
        f8sub.load_float8(other("blockwise"), folder)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(f8sub.Float8ConfigError, match="it has a pickled checkpoint"):
        f8sub.load_float8(other("blockwise"), folder)


def test_a_file_that_the_index_names_is_missing(saved):
    _, folder = saved("blockwise", shard_bytes=300_000)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"lacks model-00002-of-\d+.safetensors, which its index names"
    ):
        f8sub.load_float8(other("blockwise"), folder)


def test_no_checkpoint(tmp_path):
    with pytest.raises(f8sub.Float8ConfigError, match=r"has no config\.json"):
        f8sub.load_float8(llama(), tmp_path)
    with pytest.raises(f8sub.Float8ConfigError, match=r"no folder .* nothing is downloaded"):
        f8sub.load_float8(llama(), "Qwen/Qwen3-8B-FP8")


def compressed(format: str | None = None, **weights):
    group = {
        "targets": ["Linear"],
        "weights": {"strategy": "block", "block_structure": [128, 128], **weights},
    }
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"a": group}}


@pytest.mark.parametrize(
    ("quantization", "told"),
    [
        ({"quant_method": "modelopt"}, "quant_method 'modelopt'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "a tile edge is a positive"),
        ({"quant_method": "fp8", "weight_block_size": [-1, 128]}, "blocks of -1x128;"),
        (compressed(strategy="group", group_size=-1), "blocks of 1x-1;"),
        (compressed(num_bits=4, type="int"), "num_bits 4, type 'int';"),
        (
            compressed("nvfp4-pack-quantized", symmetric=False),
            "symmetric False, format 'nvfp4-pack-quantized';",
        ),
    ],
)
def test_a_layout_that_is_not_read(saved, quantization, told):
    _, folder = saved("blockwise")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(f8sub.Float8ConfigError, match=rf"/config\.json: model.*_proj.* {told}"):
        f8sub.load_float8(other("blockwise"), folder)


def rotate(folder: Path, *places: str) -> None:
    """Describe rotations as compressed-tensors does."""
    config = json.loads((folder / "config.json").read_text())
    applied = [{"targets": ["Linear"], "location": place} for place in places]
    scheme = {"type": "hadamard", "apply": applied}
    config["quantization_config"]["transform_config"] = {"config_groups": {"R": scheme}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (("weight_input", "input"), "input"),
        (("weight_output", "output"), "output"),
        (("input", "output"), "input and output"),
    ],
)
def test_weights_of_a_model_that_rotates_activations_are_refused(saved, places, told):
    """Such a file's weights stand for the model's only beside rotations that training does not do."""
    _, folder = saved("blockwise")
    rotate(folder, *places)
    model = other("blockwise")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(f8sub.Float8ConfigError, match=f"transform_config rotates each {told} of layers"):
        f8sub.load_float8(model, folder)
    assert equal(model.state_dict(), before)


@pytest.mark.parametrize("places", [(), ("weight_input", "weight_output"), ("q_attn", "k_cache")])
def test_rotations_that_cancel_are_read(saved, places):
    """Those of weights alone, on both sides of a layer, and of queries with keys leave the model's function."""
    _, folder = saved("blockwise")
    rotate(folder, *places)
    f8sub.load_float8(other("blockwise"), folder)


GROUP = {"weights": {"strategy": "group"}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    "quantization",
    [
        "fp8",
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP}},
    ],
)
def test_a_damaged_description(quantization):
    with pytest.raises(f8sub.Float8ConfigError, match=r"a\.q: its weight is float8, and the .* is damaged"):
        tile_of("a.q", {"quantization_config": quantization})


def test_codes_with_nan(saved):
    _, folder = saved("blockwise")
    broken(folder, lambda t: t[f"{UP}.weight"].view(torch.uint8)[3].fill_(0x7F))
    with pytest.raises(f8sub.Float8NumericsError, match=f"{UP}.weight: the checkpoint's codes have NaN"):
        f8sub.load_float8(other("blockwise"), folder)


def test_what_both_have_is_loaded_if_not_strict(saved):
    model, folder = saved("blockwise")
    broken(folder, lambda t: t.pop("model.norm.weight"))
    loaded = other("blockwise")
    norm = loaded.model.norm.weight.detach().clone()
    with pytest.warns(f8sub.Float8Warning, match=r"lacks model\.norm\.weight, which keep"):
        f8sub.load_float8(loaded, folder, strict=False)
    assert torch.equal(loaded.model.norm.weight, norm)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(BF16).float())


def test_targets_of_groups():
    group = {"targets": ["re:.*mlp.*"], "weights": {"strategy": "channel"}}
    named = {"targets": ["a.q"], "weights": {"strategy": "group", "group_size": 32}}
    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"0": group, "1": named},
        }
    }
    assert tile_of("a.mlp.up", config) == Tile(1, ALL)
    assert tile_of("a.q", config) == Tile(1, 32)
    with pytest.raises(f8sub.Float8ConfigError, match=r"a\.k: its weight is float8"):
        tile_of("a.k", config)


@pytest.mark.parametrize(
    "there", [("embed.weight",), ("lm_head.weight",), ("embed.weight", "lm_head.weight")]
)
def test_a_tied_weight_may_have_any_of_its_names_or_all(saved, tmp_path, there):
    net = NETS["tied"]()
    f8sub.save_float8(f8sub.convert_to_float8(net, recipe="blockwise"), tmp_path / "out", dtype=BF16)

    def change(tensors):
        values = tensors.pop("embed.weight")
        tensors.update({name: values.clone() for name in there})

    broken(tmp_path / "out", change)
    loaded = seed_weights(NETS["tied"](), seed=5)
    f8sub.load_float8(loaded, tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, net.embed.weight.detach().to(BF16).float())
    assert loaded.lm_head.weight is loaded.embed.weight


def test_a_model_on_meta_is_refused(saved):
    _, folder = saved("blockwise")
    model = llama().to("meta")
    with pytest.raises(f8sub.Float8ConfigError, match=r"and 18 more on meta, .*to_empty"):
        f8sub.load_float8(model, folder)


def test_a_parameter_on_meta_that_something_holds_is_named(saved):
    _, folder = saved("blockwise")
    with torch.device("meta"):
        model = llama()
    held = weakref.ref(model.model.norm.weight)
    told = r"model\.norm\.weight: it is on meta, and something holds on to it as it is; call model\.to_empty"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.load_float8(model, folder, device="cpu")
    assert held().is_meta
    f8sub.load_float8(model.to_empty(device="cpu"), folder)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8])
def test_codes_of_other_dtypes_are_not_read_as_values(saved, dtype):
    _, folder = saved("blockwise")
    name = "model.layers.0.mlp.up_proj.weight"
    broken(folder, lambda tensors: tensors.update({name: tensors[name].float().to(dtype)}))
    with pytest.raises(f8sub.Float8ConfigError, match=r"up_proj\.weight is stored as (F8_E5M2|I8), which"):
        f8sub.load_float8(other("blockwise"), folder, strict=False)


def test_an_index_that_names_what_a_file_lacks(saved):
    _, folder = saved("blockwise", shard_bytes=300_000)
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    files = found["weight_map"]
    files["model.norm.weight"] = next(f for f in files.values() if f != files["model.norm.weight"])
    index.write_text(json.dumps(found))
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"has no model\.norm\.weight, which the index says it has"
    ):
        f8sub.load_float8(other("blockwise"), folder)
    for damaged in ({}, {"weight_map": []}, {"weight_map": {"a": 3}}):
        index.write_text(json.dumps(damaged))
        with pytest.raises(f8sub.Float8ConfigError, match="has no weight_map from names to files"):
            f8sub.load_float8(other("blockwise"), folder)


def test_a_config_of_other_json_and_a_file_for_a_folder(saved, tmp_path):
    _, folder = saved("blockwise")
    (folder / "config.json").write_text("[]")
    with pytest.raises(f8sub.Float8ConfigError, match="is no JSON object but a list"):
        f8sub.load_float8(other("blockwise"), folder)
    with pytest.raises(f8sub.Float8ConfigError, match=r"has no config\.json"):
        f8sub.load_float8(other("blockwise"), folder / "model.safetensors")


def test_tied_weights_on_meta_stay_tied(saved, tmp_path):
    net = NETS["tied"]()
    f8sub.save_float8(f8sub.convert_to_float8(net, recipe="blockwise"), tmp_path / "out", dtype=BF16)
    with torch.device("meta"):
        loaded = Tied()
    f8sub.convert_to_float8(loaded, recipe="blockwise")
    optimizer = torch.optim.SGD(loaded.parameters(), lr=1.0)
    f8sub.load_float8(loaded, tmp_path / "out", device="cpu")
    assert loaded.lm_head.weight is loaded.embed.weight
    assert torch.equal(loaded.lm_head.weight, net.embed.weight.detach().to(BF16).float())
    loaded.up(torch.randn(4, 256)).square().sum().backward()
    before = loaded.up.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(loaded.up.weight, before)
