"""What the pages hold: fenced blocks, links, anchors, paths; and what their examples take for given."""

import contextlib
import dataclasses
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from tests.integrations.torchtitan.runs import installed
from tests.models import FeedForward

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
)

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
WORDS = {"gpu", "continue"}
"""After ``python``: the example needs a GPU; it goes on in the names of the one before."""
RANKS = re.compile(r"ranks=([1-9]\d*)")


@dataclass(frozen=True)
class Example:
    """Python blocks of a page that run one after another in the same names."""

    where: str  # page and line of the first block
    words: tuple[str, ...]  # what stands after ``python`` in the first block's info string
    source: str
    output: tuple[str, ...] = ()  # lines of a block marked ``output`` below them, without "..."

    @property
    def world(self) -> int | None:
        """Ranks that it needs; None for an example of one process."""
        found = [int(match[1]) for word in self.words if (match := RANKS.fullmatch(word))]
        return found[0] if found else None

    @property
    def needs_gpu(self) -> bool:
        return "gpu" in self.words


def examples(page: Path) -> list[Example]:
    """The Python examples of a page."""
    text, found = page.read_text(), []
    for block in FENCE.finditer(text):
        words = block["info"].split()
        if words == ["output"]:
            lines = tuple(line for line in block["text"].splitlines() if line.strip() != "...")
            found[-1] = dataclasses.replace(found[-1], output=found[-1].output + lines)
        if words[:1] != ["python"]:
            continue
        words = words[1:]
        if unknown := [word for word in words if word not in WORDS and not RANKS.fullmatch(word)]:
            raise ValueError(f"{page.name}: ```python takes {sorted(WORDS)} and ranks=N, got {unknown}")
        source = re.sub(f"^{block['indent']}", "", block["text"], flags=re.MULTILINE)
        if "continue" in words:
            before = found.pop()
            found.append(dataclasses.replace(before, source=f"{before.source}\n{source}"))
        else:
            line = text.count("\n", 0, block.start()) + 1
            found.append(Example(f"{page.relative_to(ROOT)}:{line}", tuple(words), source))
    return found


EXAMPLES = [example for page in PAGES for example in examples(page)]


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


class Output(NamedTuple):
    """What the examples' model returns."""

    loss: torch.Tensor
    logits: torch.Tensor


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        linears = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = linears

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.self_attn, self.mlp = Attention(width), FeedForward(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A small decoder of tokens with the names of transformers' layers: the ``model`` of the pages' examples."""

    def __init__(self, tokens: int = 96, width: int = 64, hidden: int = 128, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.lm_head = nn.Linear(width, tokens, bias=False)

    def forward(self, batch: torch.Tensor) -> Output:
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x).float()
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()), logits)


def given(rank: int = 0, world: int = 1) -> dict[str, Any]:
    """The names that examples take for given: a model and batches of tokens, and what a training script imports."""
    torch.manual_seed(0)
    model = Decoder()
    torch.manual_seed(rank)
    names = {
        "torch": torch,
        "nn": nn,
        "f8sub": f8sub,
        "fully_shard": fully_shard,
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "Decoder": Decoder,
        "model": model,
        "data": [torch.randint(96, (2, 16)) for _ in range(3)],
        "batch": torch.randint(96, (2, 16)),
    }
    if world == 4:
        names["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return names


def shows_other_torchtitan(text: str) -> bool:
    """Whether an example is of torchtitan 0.3, as all on the pages are, and another version is installed."""
    return ("torchtitan" in text or "f8sub.titan" in text) and installed() != "0.3"


def skip_other_torchtitan(text: str) -> None:
    """Skip an example of torchtitan where it cannot run."""
    if shows_other_torchtitan(text):
        pytest.skip(f"shows torchtitan 0.3, here is {installed()}")


def run(example: Example, rank: int = 0, world: int = 1) -> None:
    """Run an example, and see that it prints what the page says."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(example.source, example.where, "exec"), given(rank, world))
    missing = set(example.output) - set(printed.getvalue().splitlines())
    assert not missing, f"{printed.getvalue()}\nlacks {missing}"


def run_on_rank(rank: int, world: int, example: Example) -> None:
    """The same, on one of the ranks that it needs."""
    run(example, rank, world)
    dist.barrier()
