"""inspect and f8sub.estimate: models by name, the page, the figures, bad input, and a model that stays as it is."""

import json
import sys

import pytest
import torch
from torch import nn

import f8sub
from f8sub.__main__ import main
from f8sub.estimator import models
from f8sub.estimator.gpus import GPUS
from f8sub.estimator.models import load
from f8sub.recipes import DEFAULT
from tests.models import Transformer

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
BLOCK = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096


def on_meta(hidden: int = 4096, ffn: int = 14336, blocks: int = 2) -> nn.Module:
    with torch.device("meta"):
        return Transformer(hidden, ffn, blocks=blocks, classes=32000)


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "models_of_a_user.py").write_text(
        "from torch import nn\n"
        "def mlp(): return nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))\n"
        "def number(): return 3\n"
        "def relu(): return nn.ReLU()\n"
        "def lazy(): return nn.Sequential(nn.LazyLinear(2048), nn.Linear(2048, 2048))\n"
        "def fails(): raise RuntimeError('no weights here')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "models_of_a_user"
    sys.modules.pop("models_of_a_user", None)


def test_a_page_fits_80_columns(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 65
    assert "8.03B parameters, 32 blocks" in text
    assert "224 linear layers in float8: 93.0% of the FLOPs" in text
    assert "lm_head                    1  128256x4096   7.0%" in text
    assert "* B200: from data sheets, not measured." in text
    assert 'f8sub.convert_to_float8(model, recipe="tensorwise")' in text
    assert "rowwise is more precise and 1.37 times as fast" in " ".join(text.split())


@pytest.mark.parametrize("gpu", ["H200", "H100", "B200"])
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_the_first_recipe_is_the_default_everywhere(gpu, tokens):
    """README, inspect and estimate recommend one; none that is predicted to be slower than another by more than 3 %."""
    found = f8sub.estimate("llama3-8b", gpus=gpu, tokens=tokens)
    assert found.recipe == DEFAULT
    fastest = max(each.replayed for each in found.predictions if each.native)
    assert found.of(gpu, DEFAULT).replayed >= 0.97 * fastest


def test_without_the_default_the_most_precise_is_recommended():
    assert f8sub.estimate("llama3-8b", ["delayed", "rowwise"], gpus="H200").recipe == "rowwise"


def test_json_has_all_figures(folder, capsys):
    assert (
        main(["inspect", str(folder / "config.json"), "--json", "--mesh", "2", "--checkpoint", "none"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 32 * BLOCK + 2 * 128256 * 4096 + 65 * 4096
    assert len(found["predictions"]) == len(GPUS) * len(f8sub.recipe_names())
    assert [gpu["name"] for gpu in found["gpus"] if gpu["measured"]] == ["H200"]
    row = next(row for row in found["predictions"] if (row["gpu"], row["recipe"]) == ("H200", "tensorwise"))
    assert 1.25 < row["step"] < 1.4
    assert len(row["groups"]) == len(found["groups"]) == 8
    assert sum(group["flops_share"] for group in found["groups"]) == pytest.approx(1)
    assert found["policies"][0]["bf16"]["total"] / 2**30 == pytest.approx(84.0, rel=0.1)


def test_bytes_on_the_wire():
    """Of a block twice, once a gather; the codes of a weight are a byte an element, all else is bf16."""
    hidden, ffn, shards = 1024, 4096, 4
    model = on_meta(hidden, ffn, blocks=3)
    found = f8sub.estimate(model, ["tensorwise"], mesh=(2, shards))
    layers = [p for p in model.blocks.parameters() if p.dim() == 2]
    elements = sum(p.numel() for p in layers)
    rest = sum(p.numel() for p in model.parameters()) - elements
    away = (shards - 1) / shards
    assert found.wire.gathered == pytest.approx((2 * elements + 2 * rest) * away)
    assert found.wire_bf16.gathered == pytest.approx((4 * elements + 2 * rest) * away)
    assert found.wire.reduced == found.wire_bf16.reduced == pytest.approx(4 * (elements + rest) * away)
    assert found.wire.replicated == pytest.approx(4 * (elements + rest) / shards)
    assert found.wire.amaxes == 4 * len(layers)
    assert "2 copies of the weights on 4 GPUs each (HSDP)" in " ".join(str(found).split())


def test_bytes_of_all_gathers_are_those_of_the_quick_start():
    """Counted there in a step of two ranks: 7,102,976 and 13,918,720. Norms of blocks are counted once too few."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 272}
    with torch.device("meta"):
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
        found = f8sub.estimate(transformers.LlamaForCausalLM(config), ["tensorwise"], mesh=(2,))
    norms = 8 * 256 * 2
    assert (2 * found.wire.gathered + norms, 2 * found.wire_bf16.gathered + norms) == (7_102_976, 13_918_720)


def test_the_model_stays_as_it_is():
    model = Transformer(64, 128, blocks=1, classes=32)
    before = {name: (value.data_ptr(), type(value)) for name, value in model.named_parameters()}
    attributes = {fqn: set(vars(m)) for fqn, m in model.named_modules()}
    f8sub.estimate(model, skip="q")
    assert {name: (value.data_ptr(), type(value)) for name, value in model.named_parameters()} == before
    assert {fqn: set(vars(m)) for fqn, m in model.named_modules()} == attributes


def test_a_converted_model_is_read_as_it_was_converted():
    plain = f8sub.estimate(on_meta(), ["rowwise"], skip="up")
    converted = f8sub.estimate(f8sub.convert_to_float8(on_meta(), "rowwise", skip="up"), ["rowwise"])
    assert [group.reason for group in plain.groups] == [group.reason for group in converted.groups]
    assert plain.predictions == converted.predictions
    with pytest.warns(f8sub.Float8Warning, match=r"skip=\['up'\] does nothing to a model that is converted"):
        f8sub.estimate(f8sub.convert_to_float8(on_meta(), "rowwise"), ["rowwise"], skip="up")


def test_what_is_converted_is_what_convert_converts():
    """Ties, heads and sizes included."""
    model = on_meta(1024, 4096)
    model.blocks[0].up.weight = model.blocks[1].up.weight
    model.embedding_of_rows = nn.Embedding(4096, 1024, device="meta")
    model.embedding_of_rows.weight = model.blocks[0].gate.weight
    kinds = {group.name: group for group in f8sub.estimate(model).groups if group.reason is None}
    report = f8sub.conversion_report(f8sub.convert_to_float8(model))
    assert sum(group.count for group in kinds.values()) == sum(layer.converted for layer in report.layers)
    assert sum(group.flops_share for group in kinds.values()) == pytest.approx(report.flops_share)


def test_speed_is_of_the_layers_and_never_of_what_stays_in_bf16():
    found = f8sub.estimate(on_meta(), gpus=["H200"])
    for group, ratio in zip(found.groups, found.of("H200", "tensorwise").groups, strict=True):
        assert (ratio > 1.2) if group.reason is None else (ratio == 1)


def test_recipes_without_kernels():
    found = f8sub.estimate(on_meta(), ["mxfp8", "nvfp4", "tensorwise"])
    native = {(each.gpu, each.recipe) for each in found.predictions if each.native}
    assert native == {(gpu, "tensorwise") for gpu in GPUS} | {("B200", "mxfp8"), ("B200", "nvfp4")}
    assert found.of("H200", "mxfp8").step < 0.1
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"it has gpu of 'H200', .*; recipe of 'mxfp8', 'nvfp4'"
    ):
        found.of("H200", "rowwise")
    alone = f8sub.estimate(on_meta(), "mxfp8", gpus="H200")
    assert alone.recipe is None
    assert "No recipe has native kernels on H200" in str(alone)


def test_layers_that_lose_are_named():
    with torch.device("meta"):
        narrow = nn.ModuleDict({f"layers_{i}": nn.Linear(8192, 512) for i in range(2)})
        model = nn.Sequential(nn.Linear(8192, 8192), narrow, nn.Linear(8192, 8192))
    found = f8sub.estimate(model, gpus=["H200"], tokens=2048)
    assert any("skip=['*.layers_0', '*.layers_1']" in sentence for sentence in found.advice)


def test_a_model_that_gains_little_is_told_so():
    found = f8sub.estimate(on_meta(512, 1024), gpus="H200")
    assert "Float8 loses time here" in found.advice[0]


def test_a_model_that_stays_in_bf16_has_bf16s_speed():
    """That of the host, too, which launches layers in bf16 as in bf16."""
    with pytest.warns(f8sub.Float8Warning, match="'lay' matches nothing"):
        found = f8sub.estimate(on_meta(512, 1024), gpus=["H200"], skip=["*", "lay"])
    assert {(each.blocks, each.step) for each in found.predictions if each.native} == {(1.0, 1.0)}
    assert all(policy.bf16_seconds == policy.float8_seconds for policy in found.policies)


def test_a_step_that_the_host_may_not_keep_ahead_of():
    few, many = (f8sub.estimate(on_meta(), gpus=["H200"], tokens=tokens) for tokens in (1024, 16384))
    assert any("the GPU waits" in sentence for sentence in few.advice)
    assert not any("the GPU waits" in sentence for sentence in many.advice)


def test_memory_that_no_gpu_has():
    found = f8sub.estimate(on_meta(16384, 65536, blocks=20), gpus=["H100"])
    assert not any(policy.fits for policy in found.policies)
    assert any("No policy fits" in sentence for sentence in found.advice)
    assert "over 75 GiB" in str(found)


def test_checkpointing_that_does_not_fit_has_another_in_its_place():
    found = f8sub.estimate(
        load("llama3-8b"), "tensorwise", gpus="H100", checkpoint="none", tokens=16384, mesh=(8,)
    )
    assert "Checkpointing 'none' does not fit; checkpointing 'gemms' does." in found.advice
    fits = {policy.checkpoint: policy.fits for policy in found.policies}
    assert (fits["none"], fits["gemms"]) == (False, True)


@pytest.mark.parametrize("checkpoint", ["none", "selective", "gemms", "full"])
def test_checkpointing_trades_time_for_memory(checkpoint):
    policies = {each.checkpoint: each for each in f8sub.estimate(on_meta(blocks=8)).policies}
    one, all_saved = policies[checkpoint], policies["none"]
    assert one.float8.activations <= all_saved.float8.activations
    assert one.float8_seconds >= all_saved.float8_seconds
    assert one.float8_seconds < one.bf16_seconds


def test_experts_and_what_is_not_counted():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 32000}
    with torch.device("meta"):
        mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
        images = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Linear(1024, 1024))
    found = f8sub.estimate(mixtral)
    report = f8sub.conversion_report(f8sub.convert_to_float8(mixtral))
    converted = sum(group.flops_share for group in found.groups if group.reason is None)
    assert converted == pytest.approx(report.flops_share)
    assert found.shapes.parameters == report.parameters
    assert any(sentence.startswith("Experts have") for sentence in found.advice)
    assert "not counted: Conv2d" in str(f8sub.estimate(images))


def test_one_layer_without_blocks():
    found = f8sub.estimate(nn.Linear(4096, 4096, device="meta"))
    assert found.predictions[0].blocks is None
    json.dumps(found.as_dict(), allow_nan=False)
    assert [group.name for group in found.groups] == ["(root)"]
    assert "(root)" in str(found)


def test_a_function_of_a_module(module, capsys):
    assert main(["inspect", f"{module}:mlp", "--gpu", "H200", "--recipe", "tensorwise"]) == 0
    text = capsys.readouterr().out
    assert "Sequential: 33.6M parameters" in text
    assert "H100" not in text


@pytest.mark.parametrize("config", ["llama3/llama3_8b", "deepseek_v3/deepseek_v3_16b"])
@pytest.mark.long
def test_a_config_of_torchtitan(config):
    pytest.importorskip("torchtitan")
    model = load(f"torchtitan:{config}")
    assert next(model.parameters()).is_meta
    assert any(group.reason is None for group in f8sub.estimate(model).groups)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", "LlamaForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("bert", "BertLMHeadModel"),
    ],
)
def test_a_model_type_of_transformers(kind, expected):
    pytest.importorskip("transformers")
    with pytest.warns(f8sub.Float8Warning, match=f"^{kind} is a type of models, and this is its default"):
        model = load(kind)
    assert type(model).__name__ == expected
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_may_be_named_where_one_is_given():
    named, given = f8sub.estimate("Llama3-8B", "rowwise", gpus="h200"), load("llama3-8b")
    assert str(named) == str(f8sub.estimate(given, "rowwise", gpus="H200"))
    steps = [
        f8sub.estimate_step(model, 8, gpu=gpu) for model, gpu in (("llama3-8b", "b200"), (given, "B200"))
    ]
    assert str(steps[0]) == str(steps[1])
    for estimate in (f8sub.estimate, f8sub.estimate_step):
        with pytest.raises(
            f8sub.Float8ConfigError, match=r"a model is a torch.nn.Module, or a folder .*; got 8$"
        ):
            estimate(8)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("lama3-8b", "llama3-8b, llama3-70b, llama3-405b"),
        ("qwen3moe", "qwen3_moe, .*"),
        ("GPT_NEO_XX", "gpt_neox, .*"),
    ],
)
def test_names_that_are_near_are_told(name, nearest):
    pytest.importorskip("transformers")
    with pytest.raises(
        f8sub.Float8ConfigError, match=rf"no model '{name}' on this machine \(nearest: {nearest}\),"
    ):
        load(name)


def test_a_model_of_which_nothing_is_converted_has_no_figures_of_float8():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv1d(512, 512, 3), nn.Linear(50, 50))
    text = str(f8sub.estimate(model))
    assert "0 linear layers in float8" in text
    assert "have to be multiples of 16" in text
    assert "What to do\n  - No layer would be converted" in text
    assert not any(
        words in text for words in ("Predicted speed", "Memory and speed", "Bytes on the wire", "H200")
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{module}:nothing"], "has no function 'nothing'"),
        (["{module}:number"], "returned 3, neither a module nor a torchtitan config"),
        (["{module}:fails"], "on the meta device, raised RuntimeError: no weights here ("),
        (["{module}:relu"], "multiplies by no weights"),
        (
            ["{module}:lazy"],
            "0: the weight of this LazyLinear has no shape yet; run a batch through the model",
        ),
        (["no_such_module_here:f"], "set PYTHONPATH"),
        (["torchtitan:llama3_8b"], "torchtitan:MODULE/CONFIG"),
        (["no-such-model"], "nothing is downloaded"),
        (["{folder}"], "has no config.json"),
        (["{module}:mlp", "--tokens", "0"], "positive whole numbers"),
        (["{module}:mlp", "--mesh", "2xa"], "--mesh is a number of GPUs"),
        (["{module}:mlp", "--mesh", "2x2x2"], "positive whole numbers"),
        (["{module}:mlp", "--sequence", "9999999"], "hold no sequence of 9999999"),
    ],
)
def test_what_there_is_not_is_an_error_of_one_line(arguments, words, module, tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    given = [text.format(module=module, folder=tmp_path / "empty") for text in arguments]
    assert main(["inspect", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("f8sub: ")
    assert words in error


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(("", ""), ("{", ""), ("[1]", ""), ('{"hidden_size": 1}', ""), ("\x00\x01", "")),
        ('{"model_type": "lama"}', r"it knows no model_type 'lama' \(nearest: llama, mllama, llama4\)"),
        ('{"model_type": "llama", "hidden_size": "x"}', "expected int, got str"),
        ('{"model_type": "llama", "hidden_size": 250, "num_attention_heads": 3}', "not a multiple"),
        ('{"model_type": "llama", "hidden_size": 0}', "ZeroDivisionError"),
    ],
)
def test_a_config_that_is_damaged(text, why, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        f8sub.Float8ConfigError, match=f"transformers (reads|builds no model of .*): .*{why}.*$"
    ):
        load(str(tmp_path))


def test_a_config_that_is_cached_and_damaged_is_named(monkeypatch):
    transformers = pytest.importorskip("transformers")

    def damaged(*_: object, **__: object) -> None:
        raise TypeError("hidden_size:\n  expected int")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", damaged)
    told = "^owner/name is no config that transformers reads: hidden_size: expected int$"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.estimate("owner/name")


def test_a_package_that_is_missing_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(f8sub.Float8ConfigError, match="pip install transformers"):
        load(str(folder))
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(f8sub.Float8ConfigError, match="pip install torchtitan"):
        load("torchtitan:llama3/llama3_8b")


def test_nothing_is_downloaded(monkeypatch):
    pytest.importorskip("transformers")
    import socket

    def refuse(*given, **named):
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(f8sub.Float8ConfigError, match="nothing is downloaded"):
        load("some-owner/some-model")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": ["L40S"]}, "unknown GPU 'L40S'; choose one of H200"),
        ({"gpus": "a100"}, "A100 gains nothing by f8sub: it has no float8 tensor cores; choose one of H200"),
        ({"gpus": "MI300X"}, "MI300X gains nothing by f8sub: it multiplies e4m3fnuz, .*; choose one of H200"),
        ({"gpus": "H20"}, r"unknown GPU 'H20' \(nearest: H200\)"),
        ({"gpus": []}, "gpus is empty"),
        ({"recipes": ["fp8"]}, "unknown recipe 'fp8'"),
        ({"checkpoint": "op"}, "unknown checkpoint policy 'op'"),
        *(({"mesh": ()}, "positive whole numbers"), ({"mesh": 8}, r"mesh=8; \(8,\) is 8 GPUs")),
        ({"tokens": 8.0}, "positive whole numbers"),
    ],
)
def test_options_of_estimate(options, words):
    with pytest.raises(f8sub.Float8ConfigError, match=words):
        f8sub.estimate(on_meta(512, 1024, blocks=1), **options)


def test_what_a_model_is_named_by_is_told():
    assert all(word in models.FORMS for word in ("config.json", "torchtitan:", "module:function"))
