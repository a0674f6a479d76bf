"""What keeping x in each way costs where attention saved it already: a Llama's attention, its last layer's x.

In eager code: bytes per element of that x which the graph holds beside what it holds for attention, run on the CPU at
a small size. Compiled: what is saved for backward and what the kernels around the GEMMs move, of the code that
Inductor generates for an H200 (see byte_lab.py), 8192 tokens, 4096 wide, weights gathered in float8. No GPU needed.
"auto" is high_precision in eager code and float8 compiled.

    python scripts/tables/keep_x.py --only tensorwise
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from rich.progress import track
from torch import nn

import f8sub
from f8sub.convert.keep_x import why_not_kept
from f8sub.convert.messages import reencodes
from f8sub.linear.saved_input import KEEP_X
from scripts.table import Table, cell, finish, parser
from scripts.tables import byte_lab

HEADS = 32
SMALL = 64
"""Tokens and width of what is run."""


COLUMNS = {
    "recipe, keep_x of the last layer": "{recipe}, {keep_x}",
    "eager: bytes per element": "{eager:.2f}",
    "compiled: MB saved": "{saved/1e6:,.0f}",
    "MB moved": "{moved/1e6:,.0f}",
}


class Attention(nn.Module):
    """Llama's, with the norm before it and the sum after it; x has no batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        h = self.norm(x)
        q, k, v = (layer(h).view(1, len(x), HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).reshape(x.shape))


def converted(width: int, recipe: str, keep_x: str) -> Attention:
    with torch.device("meta"):
        model = Attention(width).to(torch.bfloat16)
    model.to_empty(device="cpu")
    return f8sub.convert_to_float8(model, recipe=recipe, keep_x={"o": keep_x, "*": "auto"})


def held(node: Any, seen: set[Any]) -> dict[int, int]:
    """Bytes by storage of all that a graph saves."""
    if node is None or node in seen:
        return {}
    seen.add(node)
    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    tensors = [v for v in (*values, *getattr(node, "saved_tensors", ())) if isinstance(v, torch.Tensor)]
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    for following, _ in node.next_functions:
        found |= held(following, seen)
    return found


def in_eager_code(recipe: str, keep_x: str) -> float:
    """Bytes an element of o's x beside what attention holds: of the whole graph, o frozen or not."""
    total = []
    for trains in (True, False):
        model = converted(SMALL, recipe, keep_x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        model.o.weight.requires_grad_(trains)
        y = model(torch.ones(SMALL, SMALL, dtype=torch.bfloat16, requires_grad=True))
        total.append(sum(held(y.grad_fn, set()).values()))
    return (total[0] - total[1]) / SMALL**2


def measured(recipe: str, keep_x: str) -> dict[str, Any]:
    """Of one way of keeping the x of ``o``; the others' is "auto". Bytes, but an element's in eager code."""
    model = converted(byte_lab.WIDTH, recipe, keep_x)
    byte_lab.plan_for_the_device(model)
    byte_lab.gather(model)
    made = byte_lab.generated(model)
    figures = {"eager": in_eager_code(recipe, keep_x), "saved": made.saved_bytes, "moved": made.moved}
    return {"recipe": recipe, "keep_x": keep_x, **figures}


def cases() -> list[tuple[str, str]]:
    """Where "recompute" has the numbers of the others. The lab takes no codes of four bits, nor scales of a byte."""
    recipes = map(f8sub.get_recipe, ("tensorwise", "delayed", "rowwise", "blockwise", "gridquant"))
    return [
        (recipe.name, keep_x)
        for recipe in recipes
        for keep_x in KEEP_X[1:]
        if why_not_kept(recipe, keep_x) is None and not (keep_x == "recompute" and reencodes(recipe))
    ]


def main() -> None:
    options = parser(__doc__, "keep_x_table")
    options.add_argument("--only", nargs="+", help="these recipes alone")
    arguments = options.parse_args()
    chosen = [case for case in cases() if arguments.only is None or case[0] in arguments.only]
    found = [measured(*case) for case in track(chosen, "generating", disable=not sys.stderr.isatty())]
    rows = [[cell(text, of) for text in COLUMNS.values()] for of in found]
    finish(
        arguments,
        found,
        Table(f"x of attention's last layer, torch {torch.__version__}", list(COLUMNS), rows),
    )


if __name__ == "__main__":
    main()
