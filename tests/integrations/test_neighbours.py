"""What libraries beside f8sub do where one would guess otherwise: docs/behaviour.md has a row for each test."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import f8sub
from tests.checkpoint.models import BF16, llama, multiplied
from tests.data_sets import gaussian, generator

NAME = "model.layers.0.self_attn.q_proj.weight"


def by_torchs_reader(folder: Path, shape: tuple[int, int] = (256, 256)) -> torch.Tensor:
    state = {NAME: torch.zeros(shape)}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(folder)), no_dist=True)
    return state[NAME]


LAYOUTS = [("blockwise", "fp8"), *((r, "compressed-tensors") for r in ("blockwise", "rowwise", "mxfp8"))]


@pytest.mark.parametrize(("recipe", "layout"), LAYOUTS)
def test_torchs_reader_knows_the_scales_of_the_layout_fp8_alone(tmp_path, recipe, layout):
    """Of other layouts it returns the codes, as if they were weights."""
    model = f8sub.convert_to_float8(llama(), recipe=recipe)
    f8sub.save_float8(model, tmp_path / "served", layout=layout, dtype=BF16)
    found = by_torchs_reader(tmp_path / "served")
    codes, scales = multiplied(model)[NAME.removesuffix(".weight")]
    if layout == "fp8":
        spread = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(found, codes.float() * spread)
    else:
        assert torch.equal(found, codes.float())


def test_torchs_reader_refuses_scales_that_safetensors_reads(tmp_path):
    """Scales of one byte, as in DeepSeek-V4's files, are a dtype that safetensors has, and its table of names lacks."""
    scale = torch.ones(2, 2).to(torch.float8_e8m0fnu)
    tensors = {NAME: torch.ones(256, 256).to(torch.float8_e4m3fn), f"{NAME}_scale_inv": scale}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    index = {"weight_map": dict.fromkeys(tensors, file.name)}
    (tmp_path / f"{file.name}.index.json").write_text(json.dumps(index))
    assert load_file(file)[f"{NAME}_scale_inv"].dtype == torch.float8_e8m0fnu
    # Torch 2.11 goes on without what it could not read.
    said = "metadata is None" if torch.__version__.startswith("2.11.") else "F8_E8M0"
    with pytest.raises(BaseException, match=said):
        by_torchs_reader(tmp_path)


def test_slices_of_four_bits_cannot_be_read(tmp_path):
    """A whole tensor can; its header and its slices count elements, and torch's dtype has two in each."""
    pairs = torch.arange(32, dtype=torch.uint8).view(4, 8).view(torch.float4_e2m1fn_x2)
    save_file({"w": pairs}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.get_slice("w").get_shape() == [4, 16]
        assert file.get_tensor("w").shape == (4, 8)
        with pytest.raises(RuntimeError, match="is invalid for input of size 32"):
            file.get_slice("w")[0:2]


def test_a_getter_steps_a_new_optimizer():
    """With a rate of zero and gradients of zero, which changes no weight; hooks of the step run."""
    model, calls = nn.Linear(8, 8), []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    get_optimizer_state_dict(model, optimizer)
    assert calls == ["stepped"]


def test_groups_that_became_one_have_the_options_of_any_of_them():
    """Not the new optimizer's, and no error."""
    model = nn.Linear(8, 8)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.1, "weight_decay": 0.0}]
    state = get_optimizer_state_dict(model, torch.optim.AdamW(groups))
    one = torch.optim.AdamW(model.parameters(), lr=0.9)
    set_optimizer_state_dict(model, one, state)
    assert one.param_groups[0]["lr"] in (0.5, 0.1)


def test_weights_in_one_autocast_are_those_from_before_the_step():
    layer, x = nn.Linear(8, 8), gaussian((4, 8), generator(0))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with torch.autocast("cpu", BF16):
        before = layer(x)
        before.backward(gaussian((4, 8), generator(1)).to(before.dtype))
        optimizer.step()
        assert torch.equal(layer(x), before)
    with torch.autocast("cpu", BF16):
        assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("first", ["adapter", "conversion"])
def test_glora_takes_plain_layers_alone(first):
    """By their exact class, so its adapters come before a conversion."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(64, 64))
    config = peft.GloraConfig(target_modules=["0"])
    if first == "conversion":
        f8sub.convert_to_float8(model)
        with pytest.raises(ValueError, match=r"not a plain torch\.nn\.Linear"):
            peft.get_peft_model(model, config)
        return
    adapted = peft.get_peft_model(model, config)
    f8sub.convert_to_float8(adapted)
    assert sum(isinstance(module, f8sub.Float8Linear) for module in adapted.modules()) == 1
    adapted(gaussian((4, 64), generator(0))).backward(gaussian((4, 64), generator(1)))


def test_a_second_training_goes_on_with_the_optimizer(tmp_path):
    """The states of AdamW count on, and the rate begins at its peak again."""
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (8, 16))]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(model=llama(), args=arguments, train_dataset=data)
    steps, rates = [], []
    for _ in range(2):
        trainer.train()
        optimizer = trainer.optimizer
        steps += [int(state["step"]) for state in list(optimizer.state.values())[:1]]
        rates.append(trainer.lr_scheduler.base_lrs)
    assert steps == [3, 6]
    assert rates[0] == rates[1] == [arguments.learning_rate] * len(rates[0])
