"""How well one pass of ``f8sub.sensitivity`` ranks layers, beside one run for each layer.

    python scripts/tables/sensitivity.py --write-readme

A Llama of 3.5M parameters is trained a little on the standard library's source. Then each layer alone is put in float8,
and its harm is measured: how far the gradient of all parameters turns, and how far the loss moves.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import f8sub
from f8sub.kernels.gemm.select import Plan
from scripts.table import ROOT, Table, finish, parser

sys.path.insert(0, str(ROOT / "recipes"))

from f8sub_pretrain.data import ByteTokenizer
from f8sub_pretrain.documents import open_source
from f8sub_pretrain.model import SIZES

RECIPES = ("tensorwise", "blockwise", "mxfp8")
LENGTH, BATCH = 256, 4


def batches(count: int) -> list[torch.Tensor]:
    """Tokens of the standard library's source, (``BATCH``, ``LENGTH``) each."""
    tokenizer, tokens = ByteTokenizer(), []
    source, wanted = open_source("stdlib", "text"), count * BATCH * LENGTH
    for index in range(len(source)):
        for text in source.documents(index):
            tokens += tokenizer.encode(text).tolist()
        if len(tokens) >= wanted:
            break
    return list(torch.tensor(tokens[:wanted]).view(count, BATCH, LENGTH))


def gradient(model: Any, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def ranks(values: list[float]) -> torch.Tensor:
    order = torch.tensor(values, dtype=torch.float64).argsort()
    found = torch.empty(len(values), dtype=torch.float64)
    found[order] = torch.arange(len(values), dtype=torch.float64)
    return found


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    return torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1].item()


def measured(recipe: str, state: dict[str, torch.Tensor], tokens: list[torch.Tensor]) -> dict[str, float]:
    model = f8sub.convert_to_float8(llama(), recipe=recipe)
    model.load_state_dict(state)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, f8sub.Float8Linear)}
    plans = {name: layer._f8sub.plan for name, layer in layers.items()}
    begin = time.perf_counter()
    cheap = dict.fromkeys(layers, 0.0)
    for batch in tokens:
        for row in f8sub.sensitivity(
            model, lambda model, batch=batch: model(batch, labels=batch).loss
        ).layers:
            cheap[row.fqn] += row.harm**2
    one_pass = time.perf_counter() - begin
    high = {
        name: Plan.make(plan.recipe.with_high_precision(fprop=True, dgrad=True, wgrad=True), plan.device)
        for name, plan in plans.items()
    }
    begin = time.perf_counter()
    turned, moved = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    for batch in tokens:
        for name, layer in layers.items():
            layer._f8sub.plan = high[name]
        loss, exact = gradient(model, batch)
        for name, layer in layers.items():
            layer._f8sub.plan = plans[name]
            own_loss, own = gradient(model, batch)
            layer._f8sub.plan = high[name]
            turned[name] += 1 - torch.nn.functional.cosine_similarity(own, exact, 0).item()
            moved[name] += (own_loss - loss) ** 2
    each = time.perf_counter() - begin
    names = list(layers)
    of = lambda found: [found[name] for name in names]  # noqa: E731
    return {
        "gradient": rank_correlation(of(cheap), of(turned)),
        "loss": rank_correlation(of(cheap), of(moved)),
        "layers": len(names),
        "times": each / one_pass,
    }


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=260, max_position_embeddings=LENGTH, use_cache=False, **SIZES["debug"])
    return LlamaForCausalLM(config)


def trained(steps: int, tokens: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        gradient(model, tokens[step % len(tokens)])
        optimizer.step()
    return model.state_dict()


def main() -> None:
    options = parser(__doc__, "sensitivity")
    options.add_argument("--steps", type=int, default=60, help="of training")
    options.add_argument("--batches", type=int, default=4, help="that the harm is measured on")
    args = options.parse_args()
    torch.set_num_threads(1)
    tokens = batches(args.steps + args.batches)
    state = trained(args.steps, tokens[: args.steps])
    found = [(recipe, measured(recipe, state, tokens[-args.batches :])) for recipe in RECIPES]
    columns = [
        ("layers", "{layers}"),
        ("rank correlation with how far the gradient turns", "{gradient:.2f}"),
        ("with how far the loss moves", "{loss:.2f}"),
        ("one run a layer takes times as long", "{times:.0f}"),
    ]
    finish(args, found, Table.of("Layers ranked by one pass", found, columns))


if __name__ == "__main__":
    main()
