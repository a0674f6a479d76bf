"""Published float8 checkpoints are loaded, trained for a step, saved, and loaded again; transformers is the oracle."""

import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import f8sub
from tests.checkpoint.published import (
    BF16,
    FORMS,
    MXFP4,
    UNREAD,
    model_of,
    read_by_transformers,
    written,
)

NOT_READ = "(?s).*issues during automatic conversion of the weights.*"
"""What transformers says of codes that it cannot dequantize."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*are cast to float8 a second time:f8sub.Float8Warning"),
    pytest.mark.filterwarnings("ignore:.*already has a `quantization_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*scales of blocks that are no powers of two:f8sub.Float8Warning"),
]


def converted(model: nn.Module, recipe: str) -> nn.Module:
    return f8sub.convert_to_float8(model, recipe, min_dim=0, experts=True)


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights after a step, which changes those in float8."""
    before = {name: w.detach().clone() for name, w in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    f8sub.precompute_scales(model)
    ids = torch.arange(32, dtype=torch.int64).view(2, 16) * 5 % 64
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    f8sub.precompute_scales(model)
    assert torch.isfinite(loss)
    layers = [
        m for m in model.modules() if isinstance(m, f8sub.Float8Linear) and "indexer" not in m._f8sub.fqn
    ]
    assert layers
    assert not any(torch.equal(m.weight, before[f"{m._f8sub.fqn}.weight"]) for m in layers)
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of what differs."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name].to(BF16), b[name].to(BF16))]


def check_saved(model: nn.Module, form, names: set[str], folder) -> None:
    """What a trained model is saved as is read by transformers and by f8sub, and both have the training's codes."""
    values = trained(model)
    state, _ = f8sub.float8_state_dict(model, dtype=BF16)
    scales = [name for name in state if re.search("_scale(_inv)?$", name)]
    assert state.keys() - set(scales) == names
    f8sub.save_float8(model, folder / "float8", dtype=BF16)
    reader, told = read_by_transformers(folder / "float8")
    assert not any(told.values())
    read = reader.state_dict()
    for name, value in values.items():
        error = (read[name].float() - value.float()).norm()
        assert error <= 0.04 * value.float().norm(), name
    again = converted(model_of(form), form.recipe)
    f8sub.load_float8(again, folder / "float8")
    assert not same(again.state_dict(), read)
    model.save_pretrained(folder / "own")
    own, told = read_by_transformers(folder / "own")
    assert not any(told.values())
    assert not same(own.state_dict(), values)


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name].quantization is not MXFP4])
def test_from_the_file(name, tmp_path):
    form = FORMS[name]
    folder, _, names = written(form, tmp_path)
    model = converted(model_of(form), form.recipe)
    f8sub.load_float8(model, folder)
    if name not in UNREAD:
        reader, told = read_by_transformers(folder)
        assert not told["missing_keys"]
        assert not same(model.state_dict(), reader.state_dict())
    check_saved(model, form, names, tmp_path)


@pytest.mark.filterwarnings("ignore:.*came from a quantized checkpoint:f8sub.Float8Warning")
@pytest.mark.parametrize("name", [name for name in FORMS if name not in UNREAD])
def test_from_the_model_that_transformers_dequantized(name, tmp_path):
    form = FORMS[name]
    folder, _, names = written(form, tmp_path)
    model, told = read_by_transformers(folder)
    assert not told["missing_keys"]
    check_saved(converted(model, form.recipe), form, names, tmp_path)


@pytest.mark.parametrize("name", UNREAD)
def test_values_of_forms_that_transformers_does_not_read(name, tmp_path):
    form = UNREAD[name]
    folder, values, _ = written(form, tmp_path)
    if form.quantization["quant_method"] == "compressed-tensors":
        with pytest.raises(RuntimeError, match=NOT_READ):  # when it reads them, they move to the others
            read_by_transformers(folder)
    model = converted(model_of(form), form.recipe)
    f8sub.load_float8(model, folder)
    trained(model)
    f8sub.load_float8(model, folder)
    model.save_pretrained(tmp_path / "own")
    own = load_file(tmp_path / "own" / "model.safetensors")
    assert values
    for layer, value in values.items():
        assert torch.equal(own[layer], value.to(BF16)), layer


@pytest.mark.parametrize("strict", [True, False])
def test_mxfp4_is_read_by_transformers(strict, tmp_path):
    form = FORMS["gpt-oss-20b"]
    folder, _, _ = written(form, tmp_path)
    model = converted(model_of(form), form.recipe)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told = r"the method 'mxfp4', .*Mxfp4Config\(dequantize=True\)"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.load_float8(model, folder, strict=strict)
    assert not same(model.state_dict(), before)
