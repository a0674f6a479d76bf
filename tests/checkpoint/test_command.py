"""python -m f8sub export: a finished checkpoint becomes one for engines, or one line says why not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import f8sub
from f8sub import cli
from f8sub.__main__ import main
from tests.checkpoint.models import BF16, llama, trained
from tests.checkpoint.nets import NETS


def write(model: torch.nn.Module, folder: Path, kind: str = "safetensors", prefix: str = "") -> None:
    """A finished checkpoint of a model, with transformers' ``config.json``."""
    state = {prefix + name: torch.tensor(v.detach().numpy()) for name, v in model.state_dict().items()}
    if kind == "dcp":
        dcp.save({**state, "step": torch.tensor(3), "epoch": 1}, checkpoint_id=folder, no_dist=True)
    else:
        folder.mkdir()
        save_file(state, folder / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config, default=str))


def same_files(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(
        torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a
    )


def export(*arguments: Any) -> int:
    return main(["export", *map(str, arguments)])


@pytest.mark.parametrize(
    ("recipe", "kind", "prefix"),
    [("blockwise", "safetensors", ""), ("blockwise", "dcp", "model."), ("tensorwise", "safetensors", "net.")],
)
def test_codes_are_those_of_the_training_whatever_stands_before_the_names(
    recipe, kind, prefix, tmp_path, capsys
):
    model = trained(recipe)
    write(model, tmp_path / "in", kind, prefix)
    assert export(tmp_path / "in", tmp_path / "out", "--recipe", recipe) == 0
    assert f"14 layers in float8 ({recipe}, layout " in capsys.readouterr().out
    f8sub.save_float8(model, tmp_path / "own", dtype=BF16)
    assert same_files(tmp_path / "out", tmp_path / "own")
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "own")]
    assert {config["dtype"] for config in configs} == {"bfloat16"}
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_the_options_say_what_training_did(tmp_path, capsys):
    model = trained("rowwise", steps=1)
    write(model, tmp_path / "in")
    options = ["--recipe", "rowwise", "--dtype", "float32", "--skip", "*.mlp.*", "--json"]
    assert export(tmp_path / "in", tmp_path / "out", *options, "--layout", "compressed-tensors") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "float32"
    assert len(found["float8"]) == 8
    assert "model.layers.0.mlp.up_proj" in found["high_precision"]
    assert found["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    expected, _ = f8sub.float8_state_dict(model, dtype=torch.float32)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(stored[name].view(torch.uint8), expected[name].view(torch.uint8))


def test_a_head_that_training_had_in_float8(tmp_path):
    model = f8sub.convert_to_float8(llama(), recipe="rowwise", skip_defaults=False)
    write(model, tmp_path / "in")
    assert export(tmp_path / "in", tmp_path / "out", "--recipe", "rowwise", "--no-skip-defaults") == 0
    f8sub.save_float8(model, tmp_path / "own", dtype=BF16)
    assert same_files(tmp_path / "out", tmp_path / "own")


def test_a_model_of_a_function_needs_no_config(tmp_path, capsys):
    model = f8sub.convert_to_float8(NETS["plain"](), recipe="blockwise")
    dcp.save({"net": dict(model.state_dict())}, checkpoint_id=tmp_path / "in", no_dist=True)
    arguments = [tmp_path / "in", tmp_path / "out", "--recipe", "blockwise"]
    assert export(*arguments) == 2
    assert "has no config.json that says what model it is of; give --model" in capsys.readouterr().err
    assert export(*arguments, "--model", "tests.checkpoint.nets:Net") == 0
    f8sub.save_float8(model, tmp_path / "own", dtype=BF16)
    assert same_files(tmp_path / "out", tmp_path / "own")


def test_errors_are_one_line_and_a_status(tmp_path, capsys, monkeypatch):
    model = trained("blockwise", steps=0)
    write(model, tmp_path / "in")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for arguments, words in (
        ((tmp_path / "no", tmp_path / "out"), "no is no folder"),
        ((tmp_path / "in", tmp_path / "full"), "exists and is not an empty folder"),
        ((tmp_path / "in", tmp_path / "out", "--prefix", "net."), "lacks lm_head.weight"),
        ((tmp_path / "in", tmp_path / "out", "--model", "tests.checkpoint.nets:Net"), "lacks down.weight"),
        ((tmp_path / "in", tmp_path / "out", "--skip", "model.layers.*"), "found nothing to convert"),
    ):
        assert export(*arguments, "--recipe", "blockwise") == 2, arguments
        shown = capsys.readouterr().err
        assert words in shown
        assert shown.startswith("f8sub: ")
        assert shown.count("\n") == 1
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    write(model, tmp_path / "broken")
    assert export(tmp_path / "broken", tmp_path / "out", "--recipe", "blockwise") == 1
    assert "has NaN or infinity" in capsys.readouterr().err
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("f8sub.checkpoint.save._write_files", lambda *_: (_ for _ in ()).throw(full))
    assert export(tmp_path / "in", tmp_path / "out", "--recipe", "blockwise") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_bar_where_a_terminal_looks_on(tmp_path, monkeypatch, capsys):
    assert cli._progress() is iter
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli._progress() is iter
    monkeypatch.undo()
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    write(trained("blockwise", steps=0), tmp_path / "in")
    assert export(tmp_path / "in", tmp_path / "out", "--recipe", "blockwise", "--json") == 0
    shown = capsys.readouterr()
    assert "Casting" in shown.err
    assert json.loads(shown.out)["files"] == 1
