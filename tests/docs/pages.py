"""What the pages hold: fenced blocks, links, anchors, paths. Each Python block runs as a reader would paste it."""

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.integrations.torchtitan.runs import installed
from tests.processes import PYTHONPATH, ROOT

PAGES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
)

FENCE = re.compile(
    r"(?:^<!-- run: (?P<run>[^\n]*) -->\n)?"
    r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
CONTINUE = "continue"
"""In ``<!-- run: continue -->`` above a Python block: it continues in the names of the block before."""
RANKS = re.compile(r"ranks=([1-9]\d*)")


@dataclass(frozen=True)
class Example:
    """Python blocks of a page that run one after another in the same names."""

    where: str  # page and line of the first block
    words: tuple[str, ...]  # of the comment above the first block
    source: str
    output: tuple[str, ...] = ()  # lines of a block marked ``output`` below them, without "..."

    @property
    def world(self) -> int | None:
        """Ranks that it needs; None for an example of one process."""
        found = [int(match[1]) for word in self.words if (match := RANKS.fullmatch(word))]
        return found[0] if found else None


def examples(page: Path) -> list[Example]:
    """The Python examples of a page."""
    text, found = page.read_text(), []
    for block in FENCE.finditer(text):
        info, words = block["info"].split(), (block["run"] or "").split()
        if info == ["output"]:
            lines = tuple(line for line in block["text"].splitlines() if line.strip() != "...")
            found[-1] = dataclasses.replace(found[-1], output=found[-1].output + lines)
        if info[:1] != ["python"]:
            continue
        unknown = [word for word in words if word != CONTINUE and not RANKS.fullmatch(word)]
        if unknown or len(info) > 1:
            raise ValueError(f"{page.name}: a comment takes {CONTINUE} and ranks=N, got {unknown or info}")
        source = re.sub(f"^{block['indent']}", "", block["text"], flags=re.MULTILINE)
        if CONTINUE in words:
            before = found.pop()
            found.append(dataclasses.replace(before, source=f"{before.source}\n{source}"))
        else:
            line = text.count("\n", 0, block.start()) + 1
            found.append(Example(f"{page.relative_to(ROOT)}:{line}", tuple(words), source))
    return found


TUTORIAL = ROOT / "docs" / "tutorial.md"
EXAMPLES = [example for page in PAGES if page != TUTORIAL for example in examples(page)]
"""Without the tutorial's, whose script tests/docs/test_tutorial.py runs."""


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of Markdown links and images, and of HTML's src and href."""
    text = prose(page)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", prose(page), re.MULTILINE)
    slugs: list[str] = []
    for heading in headings:
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        slugs.append(slug if slug not in slugs else f"{slug}-{slugs.count(slug)}")
    return set(slugs)


PLACEHOLDER = re.compile(r"\b(NAME|GPU)\b")
PATH = re.compile(r"(?<![\w/.-])(?:\./)?((?:scripts|recipes|tests|f8sub|docs)/[\w./*{},-]*[\w*])")


def paths(page: Path) -> set[str]:
    """Paths of the repository that a page names, in commands and in prose."""
    found = PATH.findall(page.read_text())
    return {path for path in found if not set("{},") & set(path) and not PLACEHOLDER.search(path)}


def shows_other_torchtitan(text: str) -> bool:
    """Whether an example is of torchtitan 0.3, as all on the pages are, and another version is installed."""
    return ("torchtitan" in text or "f8sub.titan" in text) and installed() != "0.3"


def skip_other_torchtitan(text: str) -> None:
    """Skip an example of torchtitan where it cannot run."""
    if shows_other_torchtitan(text):
        pytest.skip(f"shows torchtitan 0.3, here is {installed()}")


def check_output(example: Example, printed: str) -> None:
    """Assert that an example printed what the page says."""
    missing = set(example.output) - set(printed.splitlines())
    assert not missing, f"{printed}\nlacks {missing}"


def run(example: Example) -> None:
    """Run an example in names of its own, and see that it prints what the page says."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(example.source, example.where, "exec"), {"__name__": "__main__"})
    check_output(example, printed.getvalue())


def printed_as_script(rank: int, world: int, example: Example, folder: Path) -> str:
    """What an example prints that starts a process group, on a rank that has one, in place of torchrun's process."""
    of_torchrun = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, of_torchrun),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        exec(compile(example.source, example.where, "exec"), {"__name__": "__main__"})
    dist.barrier()
    return printed.getvalue()


def run_on_rank(rank: int, world: int, example: Example) -> None:
    """The same, on one of the ranks that it needs."""
    run(example)
    dist.barrier()


def on_a_cpu(folder: Path) -> dict[str, Any]:
    """Arguments of ``subprocess.run`` for a script that finds f8sub and no GPU."""
    own = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {"capture_output": True, "text": True, "cwd": folder, "env": os.environ | own}


def run_as_file(example: Example, folder: Path) -> None:
    """Run an example as a script that a reader saved, by torchrun where it starts a process group."""
    script = folder / "train.py"
    script.write_text(example.source)
    command = [sys.executable, "-P"]
    if example.world:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(example.world)]
    done = subprocess.run([*command, str(script)], **on_a_cpu(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    check_output(example, done.stdout)
