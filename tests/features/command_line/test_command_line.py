"""The command line: its commands, its help, its exit statuses, its colours."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import f8sub.__main__
from f8sub.features.command_line import command_line
from f8sub.features.command_line.command_line import main

ROOT = Path(__file__).parents[3]


def test_each_command_has_help(capsys):
    for arguments, words in (
        (["--help"], ["doctor", "inspect"]),
        (["doctor", "--help"], ["--json"]),
        (["inspect", "--help"], ["--mesh", "--checkpoint", "config.json"]),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)


@pytest.mark.parametrize("arguments", [[], ["heal"], ["inspect"], ["inspect", "llama", "--gpu", "A100"]])
def test_wrong_use_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: f8sub" in capsys.readouterr().err


def test_the_console_script_is_this():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"f8sub": "f8sub.__main__:run"}
    assert f8sub.__main__.run is command_line.run


def test_it_runs_as_a_module_and_its_status_is_the_process(tmp_path):
    (tmp_path / "mine.py").write_text("from torch import nn\ndef net(): return nn.Linear(1024, 1024)\n")
    command = [sys.executable, "-m", "f8sub", "inspect", "mine:net", "--gpu", "H200"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "1.05M parameters" in done.stdout
    assert "\x1b" not in done.stdout
    missing = subprocess.run(
        [*command[:-3], "mine:no"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert missing.returncode == 2
    assert missing.stderr.startswith("f8sub: mine has no function 'no'")


def test_without_rich_a_terminal_shows_plain_text(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    command_line._show("Machine\n  GPUs  none native")
    assert capsys.readouterr().out == "Machine\n  GPUs  none native\n"


def test_with_rich_the_text_is_the_same(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    page = "Recipes [not markup]\n  rowwise  native\n  mxfp8  slow"
    command_line._show(page)
    shown = capsys.readouterr().out
    for code in ("\x1b[1m", "\x1b[0m", "\x1b[31m", "\x1b[32m"):
        shown = shown.replace(code, "")
    assert shown == f"{page}\n"


def test_a_command_shows_no_code_and_nothing_that_libraries_log(tmp_path):
    """Warnings of f8sub's are one line; what is logged while a model's module is imported is not shown."""
    (tmp_path / "loud.py").write_text(
        "import logging\nlogging.getLogger('loud').warning('cannot load a kernel')\n"
        "from torch import nn\ndef net(): return nn.Linear(1024, 1024)\n"
    )
    command = [sys.executable, "-m", "f8sub", "inspect", "loud:net", "--gpu", "H200", "--skip", "lay"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stderr == "f8sub: warning: skip='lay' matches nothing\n"
