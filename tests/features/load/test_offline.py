"""A finished checkpoint exported on a CPU has the codes that training's own export has."""

import copy
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file

import f8sub
from f8sub.features.load.offline import export_checkpoint
from tests.features.export.models import BF16, trained
from tests.selection import long_but


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(copy.deepcopy(model.config))


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
@pytest.mark.parametrize("recipe", long_but(("blockwise",), ("blockwise", "tensorwise", "mxfp8")))
def test_codes_are_those_of_the_training(recipe, kind, tmp_path):
    model = trained(recipe)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    config = {"architectures": ["LlamaForCausalLM"], **model.config.to_dict()}
    if kind == "dcp":
        dcp.save({"model": state, "step": torch.tensor(3)}, checkpoint_id=tmp_path / "in", no_dist=True)
    else:
        (tmp_path / "in").mkdir()
        save_file(
            {k: torch.tensor(v.numpy()) for k, v in state.items()}, tmp_path / "in" / "model.safetensors"
        )
        (tmp_path / "in" / "config.json").write_text(json.dumps(config, default=str))
    prefix = "model." if kind == "dcp" else ""
    given = config if kind == "dcp" else None
    export_checkpoint(
        tmp_path / "in", tmp_path / "out", on_meta(model), recipe=recipe, prefix=prefix, config=given
    )
    f8sub.save_float8(model, tmp_path / "own", dtype=BF16)
    found, own = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "own"))
    assert found.keys() == own.keys()
    assert all(torch.equal(found[k].view(torch.uint8), own[k].view(torch.uint8)) for k in own)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "own")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert configs[0]["hidden_size"] == 256


def test_a_checkpoint_of_another_model(tmp_path):
    model = trained("blockwise", steps=0)
    dcp.save({"net": {"a.weight": torch.ones(2, 2)}}, checkpoint_id=tmp_path / "in", no_dist=True)
    with pytest.raises(f8sub.Float8ConfigError, match=r"lacks lm_head.weight, .* It has a\.weight"):
        export_checkpoint(tmp_path / "in", tmp_path / "out", on_meta(model), recipe="rowwise", prefix="net.")
    assert not (tmp_path / "out").exists()


def test_infinite_weights_and_recipes_with_histories_are_refused(tmp_path):
    model = trained("blockwise", steps=0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    with pytest.raises(
        f8sub.Float8NumericsError, match=r"layers\.0\.mlp\.up_proj\.weight .* NaN or infinity"
    ):
        export_checkpoint(tmp_path / "in", tmp_path / "out", on_meta(model), recipe="rowwise")
    with pytest.raises(f8sub.Float8ConfigError, match="amaxes of past steps"):
        export_checkpoint(tmp_path / "in", tmp_path / "out", on_meta(model), recipe="delayed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
