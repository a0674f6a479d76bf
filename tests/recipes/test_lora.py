"""LoRA over a float8 base: converted before or after PEFT, frozen as codes alone, merged, and sharded."""

import copy

import lora
import peft
import pytest
import torch
from f8sub_example import Tokens, build_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import default_collate

import f8sub
from tests.models import update
from tests.wire import Wire

BF16 = torch.bfloat16


def batch() -> dict[str, torch.Tensor]:
    return default_collate([Tokens()[i] for i in range(8)])


def losses(model, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for _ in range(steps):
        loss = model(**batch()).loss
        loss.backward()
        update(model, optimizer)
        found.append(loss.item())
    return found


def adapted(order: str, **options):
    model = build_model().bfloat16()
    convert = lambda m: f8sub.convert_to_float8(m, recipe="rowwise")  # noqa: E731
    if order == "convert first":
        model = convert(model)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", **options))
    return model if order == "convert first" else convert(model)


def base_of(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, f8sub.Float8Linear)}


def codes(layer) -> torch.Tensor:
    operand = f8sub.quantize(layer.weight, "rowwise", "w", columnwise=False).rowwise
    return operand.data.view(torch.uint8).clone()


def test_the_order_of_conversion_and_peft_does_not_matter():
    models = [adapted(order) for order in ("convert first", "adapt first")]
    assert [base_of(model).keys() for model in models] == [base_of(models[0]).keys()] * 2
    assert len(base_of(models[0])) == 14
    assert not any("lora_" in name for name in base_of(models[1]))
    before = [codes(layer) for layer in base_of(models[0]).values()]
    found = [losses(model) for model in models]
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]
    assert all(map(torch.equal, before, map(codes, base_of(models[0]).values())))


def test_merging_into_masters_casts_the_sum():
    model = adapted("convert first")
    losses(model)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    expected = layer.base_layer.weight.detach().clone().add_(layer.get_delta_weight("default"))
    merged = model.merge_and_unload().model.layers[0].mlp.up_proj
    assert type(merged) is type(layer.base_layer)
    assert torch.equal(merged.weight, expected)
    assert torch.equal(codes(merged), f8sub.quantize(expected, "rowwise", "w").rowwise.data.view(torch.uint8))


def test_the_script_trains_over_codes_alone_and_merges(tmp_path):
    model = lora.build()
    base = base_of(model)
    assert not any(p.requires_grad for layer in base.values() for p in layer.parameters(recurse=False))
    found = lora.train(model, 8, str(tmp_path))
    assert found[-1] < found[0]
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    values = layer.base_layer.weight.plain.clone()
    expected = values.add_(layer.get_delta_weight("default"))
    merged = lora.merge(model)
    weight = merged.model.layers[1].mlp.down_proj.weight
    assert torch.equal(weight.plain, expected)
    assert not any("lora" in name for name, _ in merged.named_modules())
    merged.save_pretrained(tmp_path / "merged")
    saved = type(merged).from_pretrained(tmp_path / "merged", dtype="auto")
    assert torch.equal(saved.model.layers[1].mlp.down_proj.weight, expected)
    assert saved.dtype == BF16


def test_merging_without_values_is_refused_with_the_way_out():
    model = lora.build()
    with pytest.raises(f8sub.Float8ConfigError, match="restore_high_precision"):
        model.merge_and_unload()
    assert len(base_of(f8sub.convert_to_float8(build_model()))) == 14
    with pytest.raises(f8sub.Float8ConfigError, match="found no weight whose values"):
        f8sub.restore_high_precision(build_model())


def test_dora_trains_over_codes_alone_and_merges_as_peft_does():
    config = peft.LoraConfig(r=8, target_modules="all-linear", use_dora=True)
    base = f8sub.convert_to_float8(build_model().bfloat16(), recipe="rowwise", primary_weights=True)
    base.requires_grad_(False)
    f8sub.drop_high_precision(base)
    plain = f8sub.convert_from_float8(copy.deepcopy(base))
    model, plain = peft.get_peft_model(base, config), peft.get_peft_model(plain, config)
    found = losses(model)
    assert found[-1] < found[0]
    with pytest.warns(f8sub.Float8Warning, match="adapters that are not merged"):
        f8sub.float8_state_dict(model)
    peft.set_peft_model_state_dict(plain, peft.get_peft_model_state_dict(model))
    expected = dict(plain.merge_and_unload().named_parameters())
    f8sub.restore_high_precision(model)
    for name, parameter in model.merge_and_unload().named_parameters():
        assert torch.equal(getattr(parameter, "plain", parameter), expected[name]), name


def test_the_frozen_base_crosses_the_wire_at_one_byte(rank, world):
    """Bytes gathered in one forward and backward, and those that the float8 base has."""
    model = f8sub.convert_to_float8(build_model().bfloat16(), recipe="tensorwise", primary_weights=True)
    model.requires_grad_(False)
    torch.manual_seed(1)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules="all-linear"), autocast_adapter_dtype=False
    )
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    for block in model.base_model.model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    f8sub.precompute_scales(model)
    f8sub.drop_high_precision(model)
    losses(model, 1)  # the masters go with the first gather
    with Wire() as wire:
        found = losses(model, 2)
    float8 = {id(layer.weight): layer.weight for layer in base_of(model).values()}
    block = sum(
        p.numel() * (1 if id(p) in float8 else 2) for p in model.base_model.model.model.layers.parameters()
    )
    rest = sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for p in model.base_model.model.model.layers.parameters()
    )
    assert wire.gathered == (2 * (2 * block + 2 * rest))
    assert found[1] < found[0]
