"""Held-out losses by how gradients are added over 8 ranks: float32, a bfloat16 ring, e4m3 on the wire, and a control.

One process plays the ranks: each has its own sequences of a step's batch, and its gradients go through f8sub's own
packing and sums, as through an exchange. All arms of a seed start from the same weights and see the same batches; the
learning rate decays to zero. The gap is that of the logarithms of the held-out losses, in per cent, paired by seeds,
and its interval 95 % by Student's t. What rounding alone does is told by float32 sums in another order of the ranks.
The control, 4-bit integers with one scale a tensor, has to fail: it tells what the runs would notice.

``gradient_losses.json`` holds what was measured, and the table is made of it. ``--record FILE`` trains first what FILE,
of JSON lines, does not have: a minute a run on one core.

    python scripts/tables/gradient_losses.py --record runs/gradient_losses.jsonl --seeds 12
    python scripts/tables/gradient_losses.py --write-docs
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from f8sub.gradients import wire
from f8sub.gradients.wire import BLOCK, chunk_size, decode, encode, layout_of
from scripts.loss_compare import CONFIDENCE, student_t_quantile
from scripts.table import ROOT, Table, parser, processor, write_between_markers
from scripts.tables import gradient_errors

sys.path.insert(0, str(ROOT / "recipes"))

DATA = Path(__file__).with_suffix(".json")
RANKS, SEQUENCES, LENGTH = 8, 2, 128
"""Ranks, sequences of each in a step, tokens of a sequence."""

MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": LENGTH,
}
STEPS, WARMUP, LEARNING_RATE, HELD_OUT = 200, 20, 1e-3, 256
DECIBELS_EVERY = 20
"""Steps from one whose reduction is compared with a sum in float64 to the next."""

Gradients = list[list[Tensor]]
"""Of each rank, those of each parameter."""


def in_order(gradients: Gradients) -> list[Tensor]:
    return [sum(rest, start) for start, *rest in zip(*gradients, strict=True)]


def ring(gradients: Gradients) -> list[Tensor]:
    """Rounded to bfloat16 at every rank."""
    return [gradient_errors.ring(parts) for parts in zip(*gradients, strict=True)]


def exchanged(gradients: Gradients) -> list[Tensor]:
    """What each rank packs for each other, and what each adds of what it receives."""
    shapes = [gradient.shape for gradient in gradients[0]]
    layout = layout_of(tuple(chunk_size(shape, RANKS) for shape in shapes))
    sent = []
    for of_rank in gradients:
        sources = [
            wire.GradientChunks(gradient.view(-1), chunk.size, gradient.numel())
            for gradient, chunk in zip(of_rank, layout.chunks, strict=True)
        ]
        sent.append(wire.pack(sources, layout, RANKS))
    kept = torch.empty(RANKS, layout.numel)
    for rank, received in enumerate(torch.stack(sent, 1)):
        wire.add(received, layout, 1.0, kept[rank])
    chunks = kept.split([chunk.size for chunk in layout.chunks], 1)
    return [c.reshape(-1)[: s.numel()].view(s) for c, s in zip(chunks, shapes, strict=True)]


def stochastic(gradients: Gradients) -> list[Tensor]:
    """e4m3 that is rounded up as often as the digits behind it say, for blocks of 128 elements."""

    def rounded(x: Tensor) -> Tensor:
        rows = x.reshape(1, -1)
        _, exponents = encode(rows)
        scaled = rows * power_of_2(127 - exponents.int()).repeat_interleave(BLOCK, 1)[:, : rows.shape[1]]
        step = power_of_2(torch.frexp(scaled).exponent.clamp(min=-5) - 4)
        codes = (scaled / step + torch.rand_like(scaled)).floor() * step
        codes = codes.clamp(-416, 416).to(torch.float8_e4m3fn).view(torch.uint8)
        return decode(codes, exponents).view(x.shape)

    return in_order([[rounded(gradient) for gradient in of_rank] for of_rank in gradients])


def power_of_2(exponent: Tensor) -> Tensor:
    return (exponent + 127 << 23).view(torch.float32)


def control(gradients: Gradients) -> list[Tensor]:
    def rounded(x: Tensor) -> Tensor:
        step = x.abs().max().clamp(min=1e-30) / 7
        return (x / step).round() * step

    return in_order([[rounded(gradient) for gradient in of_rank] for of_rank in gradients])


CONTROL = "int4, one scale per tensor (control)"
ARMS: dict[str, Callable[[Gradients], list[Tensor]]] = {
    "float32": in_order,
    "float32, other order": lambda gradients: in_order(gradients[::-1]),
    "bf16 ring": ring,
    "e4m3": exchanged,
    "e4m3, stochastic": stochastic,
    CONTROL: control,
}
BASELINE = next(iter(ARMS))


class Text:
    """Bytes of the standard library's sources: the last twentieth is held out."""

    def __init__(self) -> None:
        from f8sub_pretrain.documents import open_source

        source = open_source("stdlib", "text")
        text = "\0".join(t for index in range(len(source)) for t in source.documents(index))
        self.tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.cut = len(self.tokens) * 19 // 20

    def windows(self, rng: torch.Generator, count: int, held_out: bool = False) -> Tensor:
        """(count, ``LENGTH``) tokens from anywhere."""
        first, last = (self.cut, len(self.tokens)) if held_out else (0, self.cut)
        begins = torch.randint(first, last - LENGTH, (count, 1), generator=rng)
        return self.tokens[begins + torch.arange(LENGTH)].long()


def llama(seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **MODEL))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(arm: str, seed: int, text: Text) -> dict[str, Any]:
    """One run: the loss of each step, the held-out loss, and the reductions' mean dB."""
    begin, model, add = time.perf_counter(), llama(seed), ARMS[arm]
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rng, losses, decibels = torch.Generator().manual_seed(seed), [], []
    torch.manual_seed(seed)  # of stochastic rounding
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, 1 - step / STEPS)
        gradients, own = [], []
        for tokens in text.windows(rng, RANKS * SEQUENCES).split(SEQUENCES):
            loss = loss_of(model, tokens)
            gradients.append(list(torch.autograd.grad(loss, parameters)))
            own.append(loss.detach())
        total = add(gradients)
        if step % DECIBELS_EVERY == 0:
            decibels.append(decibels_of(total, gradients))
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient / RANKS
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(round(float(torch.stack(own).mean()), 5))
    held_out = text.windows(torch.Generator().manual_seed(1), HELD_OUT, held_out=True)
    with torch.no_grad():
        final = torch.stack([loss_of(model, tokens) for tokens in held_out.split(32)]).mean()
    found = {"arm": arm, "seed": seed, "steps": STEPS, "held_out": round(float(final), 6), "losses": losses}
    return {**found, "decibels": sum(decibels) / len(decibels), "seconds": time.perf_counter() - begin}


def decibels_of(total: list[Tensor], gradients: Gradients) -> float:
    exact = [torch.stack(parts).double().sum(0) for parts in zip(*gradients, strict=True)]
    signal = sum(x.square().sum() for x in exact)
    error = sum((a - b).square().sum() for a, b in zip(total, exact, strict=True))
    return float(10 * torch.log10(signal / error))


def record(file: Path, seeds: int) -> dict[str, Any]:
    """Train what ``file`` lacks, seed by seed, and put together what it has of these seeds."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    runs = {(run["arm"], run["seed"]): run for run in map(json.loads, lines)}
    text = Text()
    for seed in range(seeds):
        for arm in ARMS:
            if (arm, seed) not in runs:
                runs[arm, seed] = train(arm, seed, text)
                with file.open("a") as opened:
                    opened.write(json.dumps(runs[arm, seed]) + "\n")
                print(f"{arm}, seed {seed}: {runs[arm, seed]['held_out']:.4f}", flush=True)
    torch_version = importlib.metadata.version("torch").partition("+")[0]
    return {
        "command": f"python scripts/tables/gradient_losses.py --record runs/gradient_losses.jsonl --seeds {seeds}",
        "machine": f"one core of an {processor()}, torch {torch_version}",
        "date": datetime.date.today().isoformat(),
        "held_out": {arm: [runs[arm, seed]["held_out"] for seed in range(seeds)] for arm in ARMS},
        "decibels": {
            arm: round(sum(runs[arm, seed]["decibels"] for seed in range(seeds)) / seeds, 1) for arm in ARMS
        },
        "mean_training_loss": {
            arm: [
                round(sum(each) / seeds, 4)
                for each in zip(*(runs[arm, seed]["losses"] for seed in range(seeds)), strict=True)
            ]
            for arm in ARMS
        },
    }


def gap(losses: list[float], baseline: list[float]) -> tuple[float, float]:
    """The mean gap in per cent, and half of its interval."""
    gaps = [100 * math.log(a / b) for a, b in zip(losses, baseline, strict=True)]
    mean, count = sum(gaps) / len(gaps), len(gaps)
    variance = sum((each - mean) ** 2 for each in gaps) / (count - 1)
    return mean, student_t_quantile((1 + CONFIDENCE) / 2, count - 1) * math.sqrt(variance / count)


def table(data: dict[str, Any]) -> Table:
    rows = []
    for arm, losses in data["held_out"].items():
        mean, half = gap(losses, data["held_out"][BASELINE])
        decibels = f"{data['decibels'][arm]:.1f}" if data["decibels"][arm] < 100 else ">100"
        told = "" if arm == BASELINE else f"{round(mean, 3) + 0.0:+.3f} ± {half:.3f} %"
        rows.append([arm, decibels, f"{sum(losses) / len(losses):.4f}", told])
    return Table("Losses by how gradients are added", ["", "dB", "held-out loss", "gap, 95% interval"], rows)


def main() -> None:
    made = parser(__doc__, "gradient_losses")
    made.add_argument("--record", type=Path, metavar="FILE", help="of the runs, in JSON lines")
    made.add_argument("--seeds", type=int, default=12)
    arguments = made.parse_args()
    if arguments.record:
        torch.set_num_threads(1)
        DATA.write_text(json.dumps(record(arguments.record, arguments.seeds)) + "\n")
    data = json.loads(DATA.read_text())
    found = table(data)
    found.show()
    if arguments.write_docs:
        seeds = len(data["held_out"][BASELINE])
        where = f"<sub>`{data['command']}` · {data['machine']}, {seeds} seeds · {data['date']}</sub>"
        write_between_markers(arguments.marker, f"{found.markdown()}\n\n{where}")


if __name__ == "__main__":
    main()
