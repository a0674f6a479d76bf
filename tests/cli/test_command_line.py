"""The command line: its commands, its help, its exit statuses, its colours."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import f8sub.__main__
from f8sub import cli
from f8sub.cli import main

ROOT = Path(__file__).parents[2]


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


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"f8sub {f8sub.__version__}, torch {torch.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspect", "m", "--gpu", "h10"], "--gpu: unknown GPU 'h10' (nearest: H100); choose one of H200,"),
        (
            ["estimate", "m", "--gpu", "mi300x"],
            "--gpu: MI300X gains nothing by f8sub: it multiplies e4m3fnuz,",
        ),
        (
            ["estimate", "m", "--reduction", "e4m3flat"],
            "--reduction: unknown reduction 'e4m3flat' (nearest: e4m3-flat",
        ),
        (["inspect", "m", "--recipe", "rowise"], "--recipe: unknown recipe 'rowise' (nearest: rowwise"),
        (["export", "a", "b", "--recipe", "row"], "--recipe: unknown recipe 'row' (nearest: rowwise)"),
        (
            ["inspect", "m", "--checkpoint", "some"],
            "--checkpoint: unknown checkpoint 'some'; choose one of none, ",
        ),
    ],
)
def test_a_name_that_there_is_not_is_told_in_two_lines(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: f8sub {arguments[0]} ")
    assert usage.endswith("[options]")
    assert error.startswith(f"f8sub {arguments[0]}: error: argument {told}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["estmate", "m"],
            "f8sub: error: unknown command 'estmate' (nearest: estimate); choose one of doctor, ",
        ),
        (
            ["estimate", "m", "--gpu-per-host", "4"],
            "unknown argument '--gpu-per-host' (nearest: --gpus-per-host",
        ),
        (["inspect", "m", "--jsn"], "f8sub inspect: error: unknown argument '--jsn' (nearest: --json"),
        (["doctor", "zebra"], "f8sub doctor: error: unknown argument 'zebra'\n"),
    ],
)
def test_the_nearest_command_or_option_is_told(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_names_may_have_any_case(capsys):
    assert main(["INSPECT", "LLAMA3-8b", "--gpu", "h200", "--recipe", "RowWise", "--checkpoint", "None"]) == 0
    shown = capsys.readouterr().out
    assert main(["inspect", "llama3-8b", "--gpu", "H200", "--recipe", "rowwise", "--checkpoint", "none"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--gpus", "0"], "gpus (--gpus) is a whole number from 1 on, got 0"),
        (["--gpus-per-host", "0"], "gpus_per_host (--gpus-per-host) is a whole number from 1 on, got 0"),
        (["--network", "-1"], "network (--network) is more than 0 Gbit/s, got -1.0"),
    ],
)
def test_a_number_that_cannot_be_names_its_option(option, told, capsys):
    assert main(["estimate", "llama3-8b", *option]) == 2
    assert capsys.readouterr().err == f"f8sub: {told}\n"


@pytest.mark.parametrize("arguments", [[], ["heal"], ["inspect"], ["inspect", "llama", "--gpu", "A100"]])
def test_wrong_use_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: f8sub" in capsys.readouterr().err


def test_the_console_script_is_this():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"f8sub": "f8sub.__main__:run"}
    assert f8sub.__main__.run is cli.run


def test_it_runs_as_a_module_and_its_status_is_the_process(tmp_path):
    """Warnings of f8sub's are one line; what is logged while a model's module is imported is not shown, nor is code."""
    (tmp_path / "loud.py").write_text(
        "import logging\nlogging.getLogger('loud').warning('cannot load a kernel')\n"
        "from torch import nn\ndef net(): return nn.Linear(1024, 1024)\n"
    )
    command = [sys.executable, "-m", "f8sub", "inspect", "loud:net", "--gpu", "H200", "--skip", "lay"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "f8sub: warning: skip='lay' matches nothing\n"
    assert "1.05M parameters" in done.stdout
    assert "\x1b" not in done.stdout
    missing = subprocess.run(
        [*command[:-5], "loud:no"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert missing.returncode == 2
    assert missing.stderr.startswith("f8sub: loud has no function 'no'")


def test_without_rich_a_terminal_shows_plain_text(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    cli._show("Machine\n  GPUs  none native")
    assert capsys.readouterr().out == "Machine\n  GPUs  none native\n"


def test_with_rich_the_text_is_the_same(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    page = "Recipes [not markup]\n  rowwise  native\n  mxfp8  slow"
    cli._show(page)
    shown = capsys.readouterr().out
    for code in ("\x1b[1m", "\x1b[0m", "\x1b[31m", "\x1b[32m"):
        shown = shown.replace(code, "")
    assert shown == f"{page}\n"
