"""A checkpoint holds the codes that forward multiplies, and those who read it get the values that training had."""

import errno
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

import f8sub
from f8sub.checkpoint import save
from tests.checkpoint.models import (
    BF16,
    llama,
    multiplied,
    trained,
)
from tests.selection import long_but

FLOAT_SCALES = f8sub.get_recipe("blockwise", power_of_2_scales=False)
RECIPES = ("blockwise", "gridquant", "rowwise", "tensorwise", "delayed", "mxfp8")


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.filterwarnings("ignore:.*no powers of two:f8sub.Float8Warning")
@pytest.mark.parametrize("recipe", long_but(("blockwise", "tensorwise", "mxfp8"), RECIPES))
def test_the_file_has_forwards_codes_and_transformers_reads_their_values(recipe, tmp_path):
    model = trained(recipe)
    expected = multiplied(model)
    f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    stored = tensors_in(tmp_path / "out")
    assert len(expected) == 14
    for fqn, (codes, _) in expected.items():
        assert torch.equal(stored[f"{fqn}.weight"].view(torch.uint8), codes.view(torch.uint8)), fqn
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    reads = {}
    if config["quantization_config"]["quant_method"] != "fp8":
        reads["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=BF16, **reads)
    exported = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        fqn = name.removesuffix(".weight")
        if fqn in expected:
            codes, scale_inv = expected[fqn]
            right = f8sub.Float8Tensor(
                f8sub.Operand(codes, scale_inv, model.get_submodule(fqn)._f8sub.plan.recipe.fprop.b),
                None,
                BF16,
            ).dequantize()
        else:
            right = parameter.detach().to(BF16)
        assert torch.equal(exported[name], right), name


def test_files_of_limited_size_have_an_index_that_names_each_tensor_once(tmp_path):
    model = trained("blockwise", steps=0)
    f8sub.save_float8(model, tmp_path / "one", dtype=BF16)
    told = []
    shown = lambda names: ((told.append(name), name)[1] for name in [*names, "the end"])  # noqa: E731
    f8sub.save_float8(model, tmp_path / "many", dtype=BF16, shard_bytes=300_000, progress=shown)
    assert told == [*(name for name, _ in model.named_parameters()), "the end"]
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    one, many = tensors_in(tmp_path / "one"), tensors_in(tmp_path / "many")
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[k].view(torch.uint8), many[k].view(torch.uint8)) for k in one)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "many" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118  (no mapping)
            assert opened.metadata() == {"format": "pt"}


def test_one_file_has_an_index_too_and_torchs_reader_of_blocks_opens_it(tmp_path):
    model = trained("blockwise", steps=0)
    f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert (
        len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    )  # other users read all or none
    assert index["weight_map"] == dict.fromkeys(stored, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    name = "model.layers.1.mlp.up_proj.weight"
    found = {name: torch.empty(stored[name].shape)}
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path / "out"))
    dcp.load(found, storage_reader=reader, no_dist=True)
    scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(found[name], stored[name].float() * scale[: len(stored[name])])


def test_ties_are_written_once_and_read_back(tmp_path):
    model = trained("blockwise", tie_word_embeddings=True)
    f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    assert "lm_head.weight" not in tensors_in(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=BF16)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.detach().to(BF16))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_head_that_is_tied_to_the_embedding_is_named_and_read_in_high_precision(recipe, tmp_path):
    """A reader has a linear layer there, and would look for its scales."""
    model = trained(recipe, tie_word_embeddings=True)
    f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config.get("ignore", config.get("modules_to_not_convert")) == ["lm_head"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=BF16)
    assert [name for name in loaded.state_dict() if "lm_head" in name] == ["lm_head.weight"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.detach().to(BF16))


def test_a_state_dict_has_what_the_file_has(tmp_path):
    model = trained("delayed")
    assert any("scaling_states" in name for name in model.state_dict())
    f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    state, config = f8sub.float8_state_dict(model, dtype=BF16)
    stored = tensors_in(tmp_path / "out")
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[k].view(torch.uint8), stored[k].view(torch.uint8)) for k in stored)
    assert config == json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert not any("scaling_states" in name for name in state)


def test_names_of_engines():
    model = trained("mxfp8", steps=0)
    rename = lambda name: name.replace("model.layers", "h")  # noqa: E731
    state, config = f8sub.float8_state_dict(model, dtype=BF16, rename=rename)
    assert "h.0.mlp.up_proj.weight_scale" in state
    assert config["ignore"] == ["lm_head"]
    assert not any(name.startswith("model.layers") for name in state)


def test_layers_whose_fprop_is_in_high_precision_are_stored_so(tmp_path):
    high = f8sub.get_recipe("blockwise").with_high_precision(fprop=True)
    model = f8sub.convert_to_float8(llama(), recipe={"model.layers.0.mlp": high, "*": "blockwise"})
    state, config = f8sub.float8_state_dict(model, dtype=BF16)
    ignored = [f"model.layers.0.mlp.{leaf}_proj" for leaf in ("down", "gate", "up")]
    assert config["modules_to_not_convert"] == ["lm_head", *ignored]
    assert all(state[f"{fqn}.weight"].dtype == BF16 for fqn in ignored)


def test_dtype_is_asked_for_where_nothing_tells_it():
    model = trained("blockwise", steps=0)
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"layers.0.self_attn.q_proj: its weight is float32.*dtype="
    ):
        f8sub.float8_state_dict(model)
    for wrong in ("bfloat16", torch.int8, torch.float8_e4m3fn):
        with pytest.raises(f8sub.Float8ConfigError, match="dtype is the dtype of the forward"):
            f8sub.float8_state_dict(model, dtype=wrong)
    state, _ = f8sub.float8_state_dict(model.to(BF16))
    assert state["model.norm.weight"].dtype == BF16


def test_codes_depend_on_what_forward_computes_in():
    model = trained("tensorwise")
    assert multiplied(model, BF16).keys() == multiplied(model, BF16).keys()
    rounded, _ = f8sub.float8_state_dict(model, dtype=BF16)
    exact, _ = f8sub.float8_state_dict(model, dtype=torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    different = (rounded[name].view(torch.uint8) != exact[name].view(torch.uint8)).float().mean()
    assert 0.005 < different < 0.05


def test_warnings_that_readers_would_not_give(tmp_path):
    with pytest.warns(f8sub.Float8Warning, match="no powers of two"):
        f8sub.float8_state_dict(trained(FLOAT_SCALES, steps=0), dtype=BF16)
    apart = f8sub.convert_to_float8(llama(), recipe="blockwise", skip="*.k_proj")
    with pytest.warns(f8sub.Float8Warning, match="k_proj: not in float8, while its siblings are"):
        f8sub.float8_state_dict(apart, dtype=BF16)
    two = f8sub.convert_to_float8(llama(), recipe={"*.mlp.*": "rowwise", "*": "blockwise"})
    with pytest.warns(f8sub.Float8Warning, match="these layers have 2 formats"):
        f8sub.save_float8(two, tmp_path / "out", dtype=BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f8sub.float8_state_dict(trained("blockwise", steps=0), dtype=BF16)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("model.layers.1.mlp.down_proj.weight", torch.nan, "down_proj: its float8 weight has NaN"),
        ("model.norm.weight", torch.inf, "model.norm.weight has NaN or infinity"),
    ],
)
def test_a_weight_that_is_not_finite_is_refused_and_nothing_is_left(tmp_path, name, value, told):
    model = trained("rowwise")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = value
    with pytest.raises(f8sub.Float8NumericsError, match=told):
        f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    assert list(tmp_path.iterdir()) == []


WRONG = {
    "config": ({"config": [1]}, r"config is a mapping, .* got \[1\]"),
    "a set": ({"config": {"a": {1}}}, r"config has \{1\}"),
    "size": ({"shard_bytes": "5GB"}, "shard_bytes is a number of bytes, 1 or more, got '5GB'"),
    "no size": ({"shard_bytes": 0}, "shard_bytes is"),
    "rename": ({"rename": {}}, "rename is a function"),
}


@pytest.mark.parametrize(("options", "told"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused_before_anything_is_gathered(tmp_path, options, told):
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.save_float8(trained("blockwise", steps=0), tmp_path / "out", dtype=BF16, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    for folder in (".", tmp_path / "link"):
        with pytest.raises(f8sub.Float8ConfigError, match="is a link or the working folder"):
            f8sub.save_float8(trained("blockwise", steps=0), folder, dtype=BF16)


def test_a_bar_that_fails_is_told_and_the_save_goes_on(tmp_path):
    def progress(names: list[str]) -> Iterator[str]:
        yield names[0]
        raise ValueError("no terminal")

    with pytest.warns(f8sub.Float8Warning, match="progress raised ValueError"):
        f8sub.save_float8(trained("blockwise", steps=0), tmp_path / "out", dtype=BF16, progress=progress)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_model_on_meta_is_refused(tmp_path):
    model = f8sub.convert_to_float8(llama().to("meta"), recipe="blockwise")
    with pytest.raises(f8sub.Float8ConfigError, match="on meta, where a tensor has no values"):
        f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_float8_is_refused(tmp_path):
    with pytest.raises(f8sub.Float8ConfigError, match="no layer whose forward multiplies in float8"):
        f8sub.save_float8(llama(), tmp_path / "out")


def test_a_disk_that_fills_leaves_nothing(tmp_path):
    model, written = trained("blockwise", steps=0), []

    def full(tensors: object, path: Path, metadata: object) -> None:
        written.append(path)
        path.write_bytes(b"half of a file")
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch("safetensors.torch.save_file", full), pytest.raises(OSError, match="No space left"):
        f8sub.save_float8(model, tmp_path / "out", dtype=BF16, shard_bytes=300_000)
    assert len(written) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_interrupted_leaves_nothing(tmp_path):
    model = trained("blockwise", steps=0)
    with (
        mock.patch.object(save, "_write_file", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    model = trained("blockwise", steps=0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(f8sub.Float8ConfigError, match="is not an empty folder"):
        f8sub.save_float8(model, tmp_path, dtype=BF16)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_primary_weights_without_masters(tmp_path):
    model = f8sub.convert_to_float8(llama(), recipe="blockwise", primary_weights=True).requires_grad_(False)
    f8sub.drop_high_precision(model)
    expected = multiplied(model)
    state, _ = f8sub.float8_state_dict(model, dtype=BF16)
    for fqn, (codes, _) in expected.items():
        assert torch.equal(state[f"{fqn}.weight"].view(torch.uint8), codes.view(torch.uint8)), fqn


def test_two_tensors_of_one_name_are_an_error(tmp_path):
    model = trained("blockwise", steps=0)
    rename = lambda name: name.replace("layers.1", "layers.0")  # noqa: E731
    with pytest.raises(f8sub.Float8ConfigError, match=r"rename gives 'model\.layers\.0\..*' to two tensors"):
        f8sub.save_float8(model, tmp_path / "out", dtype=BF16, rename=rename)
    with pytest.raises(f8sub.Float8ConfigError, match="rename returned None for 'model"):
        f8sub.save_float8(model, tmp_path / "out", dtype=BF16, rename=lambda name: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["auto", "fp8", "compressed-tensors"])
def test_nvfp4_is_refused_with_its_reason_and_nothing_is_left(tmp_path, layout):
    model = f8sub.convert_to_float8(
        torch.nn.Sequential(torch.nn.Linear(64, 128)), "nvfp4", skip_defaults=False
    )
    takers = {
        "save": lambda: f8sub.save_float8(model, tmp_path / "out", layout=layout, dtype=torch.bfloat16),
        "state": lambda: f8sub.float8_state_dict(model, layout=layout, dtype=torch.bfloat16),
        "stream": lambda: list(f8sub.float8_weights(model, layout=layout, dtype=torch.bfloat16)),
    }
    for take in takers.values():
        with pytest.raises(f8sub.Float8ConfigError, match="a static scale of the inputs") as refused:
            take()
        assert "Try" not in str(refused.value)
    assert not list(tmp_path.iterdir())
