"""What is installed: wheel and sdist, their metadata, and an f8sub that runs from the wheel."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import f8sub
from tests.docs.pages import ROOT

RUN = """
import f8sub, torch
from f8sub.kernels.gemm import tuning
recipe = f8sub.get_recipe("blockwise")
assert tuning.of("NVIDIA H200", recipe.fprop.a, recipe.fprop.b)
model = f8sub.convert_to_float8(torch.nn.Sequential(torch.nn.Linear(64, 64)))
model(torch.randn(16, 64)).backward(torch.randn(16, 64))
print(f8sub.__file__, f8sub.__version__)
"""


def python(code: str, folder: Path, *paths: Path) -> str:
    """What another Python prints that finds ``paths`` before anything that is installed."""
    inserted = f"import sys; sys.path[:0] = {list(map(str, paths))!r}\n"
    how = {"capture_output": True, "text": True, "cwd": folder}
    done = subprocess.run([sys.executable, "-P", "-c", inserted + code], **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_needs_numpy():
    """torch alone does not bring it, and collectives of objects need it."""
    calls = ("_object(", "_object_list(")
    sources = {path: path.read_text() for path in (ROOT / "f8sub").rglob("*.py")}
    users = [path for path, text in sources.items() if any(call in text for call in calls)]
    assert not users


def test_the_support_matrix_names_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "support.md").read_text()
    assert not [extra for extra in extras if f"| `{extra}` |" not in page]


def test_the_citation_has_the_version():
    found = dict(re.findall(r"^([\w-]+): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert found["version"] == f8sub.__version__
    assert found["license"] == "BSD-3-Clause"


def test_the_module_prints_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "f8sub", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"f8sub {f8sub.__version__}, torch ")


@pytest.mark.long
def test_wheel_and_sdist_pass_twine(tmp_path):
    pytest.importorskip("build")
    pytest.importorskip("twine")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)], check=True)
    files = sorted(map(str, tmp_path.iterdir()))
    assert [Path(file).suffix for file in files] == [".whl", ".gz"]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


@pytest.mark.long
def test_the_wheel_runs_and_holds_types_and_measured_tables(tmp_path):
    options = ("--quiet", "--no-deps", "--wheel-dir", str(tmp_path))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("f8sub-*.whl")
    assert wheel.name.startswith(f"f8sub-{f8sub.__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in (ROOT / "f8sub").rglob("*") if path.suffix in (".py", ".json"))
    package = {str(path.relative_to(ROOT)) for path in files}
    assert {*package, "f8sub/py.typed"} == {name for name in names if not name.startswith("f8sub-")}
    assert "f8sub/kernels/gemm/gemm_tables/nvidia_h200.json" in names
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    place, version = python(RUN, tmp_path, tmp_path / "installed").split()
    assert place.startswith(str(tmp_path / "installed"))
    assert version == f8sub.__version__
