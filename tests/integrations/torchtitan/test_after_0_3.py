"""f8sub in torchtitan after 0.3, by a stand-in of its own process; and in one that it does not know."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import f8sub
from f8sub.integrations.torchtitan import layout
from tests.processes import PYTHONPATH, ROOT
from tests.selection import long_but

STAND_IN = Path(__file__).with_name("after_0_3")


def python(stand_in: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A Python that finds the stand-in before what is installed."""
    path = os.pathsep.join((str(stand_in), PYTHONPATH))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *words], env=environment, cwd=ROOT, capture_output=True, text=True)


def test_the_checks_of_the_stand_in_pass():
    done = python(STAND_IN, "-m", "pytest", "-v", STAND_IN / "checks.py")
    assert done.returncode == 0, done.stdout + done.stderr


def broken(folder: Path, *files: str) -> Path:
    """The stand-in without some of its files."""
    shutil.copytree(STAND_IN, folder)
    for file in files:
        (folder / "torchtitan" / file).unlink()
    return folder


def test_a_torchtitan_that_is_laid_out_otherwise_is_told_when_a_name_is_asked_for(tmp_path):
    stand_in = broken(tmp_path / "other", "config/transform/__init__.py")
    code = "import f8sub.titan; print(dir(f8sub.titan)); f8sub.titan.float8"
    done = python(stand_in, "-c", code)
    assert "Float8Transform" not in done.stdout
    for part in (
        f"torchtitan 0.4.0.dev0 in {stand_in / 'torchtitan'} is laid out in a way",
        "0.2 (0.2.2), of which protocols/model_converter.py, protocols/train_spec.py is missing",
        "0.3 (0.3.0), of which protocols/model_spec.py, components/quantization/__init__.py is missing",
        "of which config/transform/__init__.py is missing",
    ):
        assert part in done.stderr


@pytest.mark.parametrize(
    "first", long_but(["import torchtitan.config; "], ["", "import torchtitan.config; "])
)
def test_what_is_not_where_it_was_is_told_when_it_is_asked_for_or_by_torchtitan_itself(tmp_path, first):
    stand_in = broken(tmp_path / "moved", "models/common/linear.py")
    done = python(
        stand_in, "-c", f"{first}import f8sub.titan; print('imported'); f8sub.titan.Float8Transform"
    )
    assert ("imported" in done.stdout) == (not first)
    assert "Float8ConfigError: f8sub.titan." in done.stderr
    assert "cannot be had of torchtitan 0.4.0.dev0" in done.stderr
    assert "No module named 'torchtitan.models.common.linear'" in done.stderr


def test_without_torchtitan_names_say_so(monkeypatch):
    monkeypatch.setattr(layout, "_folder", lambda: None)
    monkeypatch.delitem(sys.modules, "torchtitan.config", raising=False)  # a test before may have imported it
    assert layout.names() == []
    layout.register()
    with pytest.raises(f8sub.Float8ConfigError, match="pip install torchtitan"):
        layout.attribute("float8")
    with pytest.raises(AttributeError, match="float9"):
        layout.attribute("float9")


@pytest.mark.parametrize("known", layout.LAYOUTS, ids=lambda known: known.name)
def test_layouts_are_known_by_their_files(tmp_path, monkeypatch, known):
    for file in known.has:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(layout, "_folder", lambda: tmp_path)
    assert layout.installed() is known


@pytest.mark.usefixtures("titan")
def test_ready_made_configs_are_listed_once():
    from f8sub import titan
    from f8sub.integrations.torchtitan import configs

    assert set(configs.__all__) == set(layout.READY_MADE)
    assert set(layout.READY_MADE) < set(dir(titan))
