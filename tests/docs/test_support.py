"""The support matrix says what the code does, for the rows that a CPU can tell."""

import re

import pytest
import torch
from torch import nn

import f8sub
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "support.md").read_text()
TABLE = PAGE.partition("## Feature x recipe")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def row(start: str) -> dict[str, str]:
    """Recipe -> cell of the row whose first cell has some words."""
    (found,) = (cells(line) for line in TABLE[2:] if start in cells(line)[0])
    columns = [re.findall(r"`(\w+)`", column) for column in cells(TABLE[0])[1:]]
    return {name: cell for names, cell in zip(columns, found[1:], strict=True) for name in names}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).bfloat16()


def test_every_recipe_has_a_column():
    assert row("primary weights").keys() == set(f8sub.recipe_names())


@pytest.mark.parametrize("recipe", f8sub.recipe_names())
def test_primary_weights(recipe):
    if row("primary weights")[recipe] == "yes":
        f8sub.convert_to_float8(model(), recipe, primary_weights=True)
    else:
        with pytest.raises(f8sub.Float8ConfigError, match="primary_weights"):
            f8sub.convert_to_float8(model(), recipe, primary_weights=True)


@pytest.mark.filterwarnings("ignore:.*scales of blocks that are no powers:f8sub.Float8Warning")
@pytest.mark.parametrize("recipe", f8sub.recipe_names())
def test_export_to_engines(recipe, tmp_path):
    pytest.importorskip("safetensors")
    trained = f8sub.convert_to_float8(model(), recipe)
    trained(torch.randn(32, 128).bfloat16()).square().mean().backward()
    f8sub.precompute_scales(trained)
    if row("export to engines")[recipe] == "no":
        with pytest.raises(f8sub.Float8ConfigError, match="cannot hold these layers"):
            f8sub.save_float8(trained, str(tmp_path / "served"), dtype=torch.bfloat16)
    else:
        f8sub.save_float8(trained, str(tmp_path / "served"), dtype=torch.bfloat16)
