"""What stays in high precision by default: heads, routers, adapters and small layers, and what only looks like one."""

import contextlib
import inspect
import os
from unittest import mock

import pytest
import torch
from torch import nn

import f8sub
from f8sub.convert.selection import default_reasons
from tests.convert.models import K, reasons

HEADS = [
    *("lm_head", "output", "head", "heads", "score", "classifier", "classification_head", "embed_out"),
    *("ctc_head", "value_head", "v_head", "reward_head"),
]


class Holder(nn.Module):
    pass


def model_of(*names: str, **widths: int) -> nn.Module:
    """Square linear layers of these names, in this order; a number is a place in a list."""
    model = Holder()
    for fqn in names:
        at, segments = model, fqn.split(".")
        for segment, following in zip(segments, [*segments[1:], ""], strict=True):
            if not following:
                child = nn.Linear(K, widths.get(segment, K))
            elif segment in at._modules:
                child = at._modules[segment]
            else:
                child = nn.ModuleList() if following.isdigit() else Holder()
            at._modules[segment] = child
            at = child
    return model


def left(model: nn.Module, **options) -> list[str]:
    return list(reasons(f8sub.convert_to_float8(model, **options)))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_the_last_layer_outside_of_blocks(name):
    names = "blocks.0.up", "blocks.1.up", f"decoder.{name}"
    assert left(model_of(*names)) == [f"decoder.{name}"]
    assert left(model_of(*names), skip_defaults=False) == []
    if name != "lm_head":
        assert left(model_of(f"decoder.{name}", "decoder.up")) == []
        assert left(model_of(f"blocks.0.{name}", f"blocks.1.{name}")) == []
        assert left(model_of(f"blocks.0.{name}")) == []
        assert left(model_of(f"my_{name}s")) == []


BERT = [
    f"encoder.layer.{i}.{name}"
    for i in range(2)
    for name in ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
]
OUTPUTS = {
    "lm_head-first": (["lm_head", "blocks.0.up"], ["lm_head"]),
    "lm_head-of-layers": (["up", "lm_head.dense", "lm_head.decoder"], ["lm_head.dense", "lm_head.decoder"]),
    "bert": (BERT, []),
    "bert-of-one-layer": (BERT[:4], []),
    "a-block-alone": (["attention.output.dense", "output.dense"], []),
    "bert-with-a-classifier": ([*BERT, "pooler.dense", "classifier"], ["classifier"]),
    "two-heads": (["model.up", "score", "value_head"], ["score", "value_head"]),
    "trl": (
        ["pretrained_model.up", "pretrained_model.lm_head", "v_head.summary"],
        ["pretrained_model.lm_head", "v_head.summary"],
    ),
    "hidden-layers": (["up", "classifier.0", "classifier.3"], ["classifier.3"]),
    "two-towers": (["visual.up", "visual.head", "text.up", "text.head"], ["visual.head", "text.head"]),
}


class Told(nn.Module):
    """A head of a name that other layers have, which the model tells; or a method that tells none."""

    def __init__(self, told) -> None:
        super().__init__()
        self.encoder, self.decoder, self.out = nn.Linear(K, K), nn.Linear(K, K), nn.Linear(K, K)
        self.told = told

    def get_output_embeddings(self):
        return self.told(self)


TOLD = {
    "a layer": (lambda m: m.decoder, ["decoder"]),
    "a module of several": (lambda m: nn.ModuleList([m.decoder, m.out]), ["decoder", "out"]),
    "none": (lambda m: None, []),
    "an embedding": (lambda m: nn.Embedding(4, K), []),
    "no such attribute": (lambda m: m.lm_head, []),
    "another method of that name": (lambda: None, []),
}


@pytest.mark.parametrize("case", TOLD)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_head_that_the_model_tells(case, wrapped):
    told, expected = TOLD[case]
    names = [f"0.{name}" if wrapped else name for name in expected]

    def made() -> nn.Module:
        return nn.Sequential(Told(told)) if wrapped else Told(told)

    assert left(model := made()) == names
    assert set(reasons(model).values()) <= {"output head (default)"}
    assert left(made(), skip_defaults=False) == []


@pytest.mark.parametrize(
    ("kind", "head"),
    [("Bert", "cls.predictions.decoder"), ("DistilBert", "vocab_projector"), ("XLNet", "lm_loss")],
)
def test_heads_of_transformers_under_other_names(kind, head):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, tie_word_embeddings=False)
    config.num_hidden_layers = config.n_layers = config.n_layer = 1
    cls = getattr(transformers, f"{kind}ForMaskedLM", None) or getattr(transformers, f"{kind}LMHeadModel")
    with torch.device("meta"):
        model = cls(config)
    assert left(model) == [head]


def test_heads_beside_each_other_in_one_module_are_all_outputs():
    """As PEFT keeps the old and the new one: neither takes what the other makes."""
    names = "model.up", "score.original_module", "score.modules_to_save.default"
    assert left(model_of(*names, original_module=16, default=16)) == list(names[1:])


ROUTERS = {
    "torchtitan": (["moe.router.gate", "moe.experts.0.up"], ["moe.router.gate"]),
    "switch": (["mlp.router.classifier", "mlp.experts.0.wi"], ["mlp.router.classifier"]),
    "mixtral-4": (["moe.gate", "moe.experts.0.w1", "moe.experts.0.gate"], ["moe.gate"]),
    "hunyuan": (["mlp.gate.wg", "mlp.experts.0.up", "mlp.shared_mlp.gate"], ["mlp.gate.wg"]),
    "qwen2": (["mlp.shared_expert.gate_proj", "mlp.shared_expert_gate"], ["mlp.shared_expert_gate"]),
    "gating": (["mlp.gating", "mlp.experts.up"], ["mlp.gating"]),
    "ffn": (["mlp.gate", "mlp.gate_proj", "mlp.up", "attention.output_gate", "mlp.routers"], []),
}
ADAPTERS = ["lora_A.default", "lora_B.default", "lora_a", "lora_b", "lora_up", "lora_down"]
ADAPTERS += ["lora_embedding_A.default", "lora_magnitude_vector.default"]
ADAPTERS += ["lily_A.default", "lily_router.default", "peanut_B.default", "shadow_update_transform.default.0"]
CASES = {
    **{name: (*case, "output head (default)") for name, case in OUTPUTS.items()},
    **{name: (*case, "router of experts (default)") for name, case in ROUTERS.items()},
    **{
        name: (
            ["layers.0.q.base_layer", f"layers.0.q.{name}", "layers.0.up"],
            [f"layers.0.q.{name}"],
            "LoRA adapter (default)",
        )
        for name in ADAPTERS
    },
    "no adapters": (["lora_model.q", "lora.q", "q_lora_A"], [], ""),
}


@pytest.mark.parametrize("case", CASES)
def test_which_layers_stay_and_why(case):
    names, expected, why = CASES[case]
    model = model_of(*names)
    assert left(model) == expected
    assert set(reasons(model).values()) <= {why}
    assert left(model_of(*names), skip_defaults=False) == []


WANTED = {"feedforward_modules": ["1"], "total_step": 10, "block_size": 16, "vector_length": 16}
"""Options without which some kinds cannot be created, or not for layers so small."""
TRAINS_A_COPY = {"LN_TUNING"}
"""Kinds whose adapter is another linear layer in the place of the frozen one."""


def adapted() -> dict[str, nn.Module]:
    """A small model with each kind of PEFT's adapters that it can have."""
    peft = pytest.importorskip("peft")
    found = {}
    for kind, config in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        options = inspect.signature(config).parameters
        if "target_modules" not in options or kind.name in TRAINS_A_COPY:
            continue
        given = {"target_modules": ["0", "1"], **{n: v for n, v in WANTED.items() if n in options}}
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        with contextlib.suppress(Exception):  # kinds for certain models, and those that need more packages
            found[kind.name] = peft.get_peft_model(model, config(**given))
    return found


def test_of_all_kinds_of_adapters_the_frozen_layers_alone_are_converted():
    # BOFT leaves CXX=gcc there, with which Inductor's code cannot be loaded.
    with mock.patch.dict(os.environ):
        models = adapted()
    assert len(models) > 25
    assert {"LORA", "LILY", "PEANUT"} <= models.keys()
    for kind, model in models.items():
        frozen = {name.removesuffix(".base_layer").rpartition(".")[2] for name in converted(model)}
        assert frozen == {"0", "1"}, kind
        assert len(converted(model)) == 2, kind


def converted(model: nn.Module) -> list[str]:
    linears = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    return [name for name in linears if name not in default_reasons(dict(model.named_modules()), linears)]


def sized(*shapes: tuple[int, int]) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(*shape) for shape in shapes))


def test_small_layers_of_a_large_model_stay():
    shapes = (512, 2048), (1024, 256), (256, 1024), (2048, 512)
    model = sized(*shapes)
    assert left(model) == ["1", "2"]
    assert set(reasons(model).values()) == {"smaller dimension below min_dim=512 (default)"}
    assert left(sized(*shapes), skip_defaults=False) == []


def test_a_model_of_small_layers_is_converted_and_its_report_says_what_that_gains():
    for model in (sized((496, 2048), (2048, 16)), sized((1024, 1024), (256, 1408))):
        assert left(model) == []
        assert "Layers with fewer than 512 features in or out" in str(f8sub.conversion_report(model))
    assert "fewer than" not in str(f8sub.conversion_report(f8sub.convert_to_float8(sized((512, 512)))))


def test_a_limit_that_was_asked_for_has_no_exceptions():
    assert left(sized((64, 64), (64, 48)), min_dim=64) == ["1"]
    assert left(sized((64, 64), (64, 48)), min_dim=64, skip_defaults=False) == ["1"]
    assert left(sized((1024, 1024), (1024, 16)), min_dim=0) == []
    with pytest.raises(f8sub.Float8ConfigError, match=r"below min_dim=128.*Pass a smaller min_dim"):
        f8sub.convert_to_float8(sized((64, 64)), min_dim=128)
