"""Output heads of transformers' models stay in high precision, whatever they are called and whether the models tell."""

import functools

import pytest
import torch

import f8sub
from f8sub.convert.selection import HEAD, default_reasons
from tests.estimator.zoo import OTHER, WIDTH, names_of, small

transformers = pytest.importorskip("transformers")
# Models whose layers are all of classes with a forward of their own.
pytestmark = pytest.mark.filterwarnings("ignore:convert_to_float8 found nothing:f8sub.Float8Warning")

TASKS = (
    *("PRETRAINING", "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CTC"),
    *("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "RNNT", "TDT"),
)
VOCABULARY = 208
"""No other size of a small model."""

UNNAMED = {
    "FSMTForConditionalGeneration": {"model.decoder.output_projection"},
    "FlavaForPreTraining": {
        "mim_head.decoder",
        "mlm_head.decoder",
        "mmm_image_head.decoder",
        "mmm_text_head.decoder",
    },
    "LukeForMaskedLM": {"entity_predictions.decoder", "lm_head.decoder"},
    "LxmertForPreTraining": {"cls.predictions.decoder"},
    "OmniASRForCTC": {"ctc_head"},
    "Qwen2_5OmniForConditionalGeneration": {"talker.codec_head", "thinker.lm_head"},
}
"""Models that name no output embeddings, or one of several, or the embedding that a head is tied to; their heads."""

FEW = (
    *("FSMTForConditionalGeneration", "LukeForMaskedLM", "LxmertForPreTraining", "OmniASRForCTC"),
    *("AlbertForMaskedLM", "BartForConditionalGeneration", "BertForPreTraining", "BloomForCausalLM"),
    *(
        "DistilBertForMaskedLM",
        "ElectraForMaskedLM",
        "FalconForCausalLM",
        "FunnelForMaskedLM",
        "GPT2LMHeadModel",
    ),
    *("GPTNeoXForCausalLM", "GptOssForCausalLM", "HubertForCTC", "LlamaForCausalLM", "MambaForCausalLM"),
    *("MixtralForCausalLM", "ModernBertForMaskedLM", "MoonshineForConditionalGeneration", "OPTForCausalLM"),
    *(
        "ParakeetForRNNT",
        "ProphetNetForCausalLM",
        "SEWForCTC",
        "T5ForConditionalGeneration",
        "TrOCRForCausalLM",
    ),
    *("WhisperForConditionalGeneration", "XLMWithLMHeadModel", "XLNetLMHeadModel"),
)


@functools.cache
def makers_of_logits() -> dict[str, str]:
    """The classes of models that make logits of a vocabulary, and their model types."""
    from transformers.models.auto import modeling_auto as auto

    mappings = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS]
    return {
        name: kind
        for mapping in mappings
        for kind, names in mapping.items()
        for name in ((names,) if isinstance(names, str) else names)
    }


def created(name: str, vocabulary: int, *, tied: bool) -> torch.nn.Module:
    """A small model on meta."""
    cls, kind = getattr(transformers, name), makers_of_logits()[name]
    config_class = transformers.CONFIG_MAPPING[kind]
    if not issubclass(config_class, cls.config_class):  # a model of a part
        config_class = cls.config_class
    given = {"vocab_size": vocabulary} if "vocab_size" in names_of(config_class) else {}
    config = small(config_class, **OTHER.get(kind, {}), **given)
    for each in (config, *vars(config).values()):
        if isinstance(each, transformers.PretrainedConfig) and not tied:
            each.tie_word_embeddings = False
    with torch.device("meta"):
        model: torch.nn.Module = cls(config)
    return model


def heads_of(model: torch.nn.Module) -> set[str]:
    """The heads that a conversion finds in a model."""
    modules = dict(model.named_modules())
    linears = {fqn: module for fqn, module in modules.items() if isinstance(module, torch.nn.Linear)}
    return {fqn for fqn, why in default_reasons(modules, linears).items() if why == HEAD}


def converted_logits(model: torch.nn.Module) -> set[str]:
    """The layers of a vocabulary's logits that a conversion takes."""
    of_logits = {
        fqn
        for fqn, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == VOCABULARY
    }
    f8sub.convert_to_float8(model, min_dim=0, strict=False, experts=False)
    return {fqn for fqn in of_logits if isinstance(model.get_submodule(fqn), f8sub.Float8Linear)}


def check(model: torch.nn.Module, name: str, *, tied: bool) -> None:
    heads = heads_of(model)
    assert not converted_logits(model)
    # A hidden layer is no head where as many features make a vocabulary.
    for vocabulary in (WIDTH, 2 * WIDTH):
        assert heads_of(created(name, vocabulary, tied=tied)) <= heads


@pytest.mark.parametrize("name", UNNAMED)
def test_heads_that_models_do_not_name(name):
    model = created(name, VOCABULARY, tied=False)
    assert heads_of(model) >= UNNAMED[name]
    assert not converted_logits(model)


@pytest.mark.parametrize("name", FEW)
def test_heads_of_some_models(name):
    for tied in (True, False):
        check(created(name, VOCABULARY, tied=tied), name, tied=tied)


@pytest.mark.long
def test_heads_of_all_models():
    found, without = [], []
    for name in makers_of_logits():
        if name in FEW:
            continue  # in the test of some
        try:
            model = created(name, VOCABULARY, tied=False)
        except Exception:  # defaults that do not fit each other, or a package that is not there
            without.append(name)
        else:
            check(model, name, tied=False)
            found.append(name)
    assert len(found) > 330
    assert len(without) < 30


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("JanusForConditionalGeneration", "model.generation_head.vision_head"),
        ("HiggsAudioV2ForConditionalGeneration", "audio_lm_head"),
    ],
)
def test_heads_of_images_and_sounds_are_heads(name, head):
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class())
    linears = {fqn: m for fqn, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert default_reasons(dict(model.named_modules()), linears)[head] == HEAD
