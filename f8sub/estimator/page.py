"""Prints an estimate as a page of 80 columns, and a step's estimate as tables of the same width."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterable, Iterator
from string import ascii_lowercase
from typing import TYPE_CHECKING

from f8sub.estimator.advice import host_measured
from f8sub.estimator.gpus import BY_REFERENCE
from f8sub.text_table import plural, text_table

if TYPE_CHECKING:
    from f8sub.estimator.results import Estimate, LayerGroup, StepEstimate, StepPrediction


WIDTH, NAME, COUNT, SHAPE, FLOPS, RATIO, MOST_LETTERS = 80, 22, 6, 13, 7, 5, 6
"""Columns: of the page, and in it of names, counts, shapes, shares and ratios; how many recipes have their own."""

MOST_ROWS = 16
"""Kinds of layers that a page shows, those of most FLOPs; ``as_dict`` has all."""

GIB, GB = 2**30, 1e9

_PEFTS = re.compile(r"\.base_layer$|(?<=\.lora_[AB])\.\w+$")
"""What PEFT puts behind the names of layers."""


def page(estimate: Estimate) -> str:
    """Return the whole page of an estimate."""
    todo = ["What to do", *_bullets(estimate.advice)]
    if all(group.reason is not None for group in estimate.groups):  # float8 would change no figure
        sections = [_head(estimate), _layers(estimate, {}), todo]
    else:
        letters = _letters(estimate)
        sections = [_head(estimate), _steps(estimate, letters), _layers(estimate, letters)]
        sections += [_memory(estimate), _wire(estimate), todo]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _letters(estimate: Estimate) -> dict[str, str]:
    """Return a letter for each recipe that has kernels on the first GPU, the fastest first."""
    first = [each for each in estimate.predictions if each.gpu == estimate.gpus[0].name and each.native]
    fastest = sorted(first, key=lambda each: -each.step)[:MOST_LETTERS]
    return dict(zip((each.recipe for each in fastest), ascii_lowercase, strict=False))


def _head(estimate: Estimate) -> list[str]:
    run, shapes = estimate.run, estimate.shapes
    converted = [product for product in shapes.products if product.reason is None]
    share = sum(group.flops_share for group in estimate.groups if group.reason is None)
    experts = len({product.module for product in converted if product.experts})
    and_experts = f" and {plural(experts, 'module')} of experts" if experts else ""
    has_experts = any(product.experts for product in shapes.products)
    option = "" if shapes.experts is None or not has_experts else f" (experts={shapes.experts!r})"
    mesh = f"{plural(run.shards, 'GPU')} share the weights (fully_shard)" if run.shards > 1 else "one GPU"
    if run.replicas > 1:
        mesh = f"{run.replicas} copies of the weights on {plural(run.shards, 'GPU')} each (HSDP)"
    learn = "" if shapes.learning == shapes.parameters else f", of which {_count(shapes.learning)} learn"
    model = (
        f"{estimate.title}: {_count(shapes.parameters)} parameters{learn}, {plural(len(shapes.blocks), 'block')}. A "
        f"step trains {run.tokens:,} tokens per GPU in sequences of {run.sequence:,}; {mesh}; checkpointing: "
        f"{run.checkpoint}."
    )
    covered = (
        f"{plural(sum(not p.experts for p in converted), 'linear layer')}{and_experts} in float8{option}: "
        f"{share:.1%} of the FLOPs of products with weights (attention scores not counted)."
    )
    return [*_wrapped(model), *_wrapped(covered)]


def _steps(estimate: Estimate, letters: dict[str, str]) -> list[str]:
    names = list(dict.fromkeys(each.recipe for each in estimate.predictions))
    # "~" sorts behind all letters.
    names.sort(key=lambda name: letters.get(name, "~"))
    gpus = estimate.gpus
    rows: list[list[str]] = [["recipe", *["blocks", "step", "graph"] * len(gpus)]]
    for name in names:
        cells = [f"{letters.get(name, ' ')}  {name}"]
        for gpu in gpus:
            found = estimate.of(gpu.name, name)
            # Figures of the reference backend say nothing of float8.
            own = (found.blocks, found.step, found.replayed) if found.native else (None, None, None)
            cells += map(_ratio, own)
        rows.append(cells)
    lines = [
        "Predicted speed, as a multiple of bf16's: of all blocks, of a whole step that",
        "Python launches, and of one that f8sub.graph_step replays",
        *text_table(
            ["", *(gpu.name + ("" if gpu.measured else "*") for gpu in gpus)],
            [],
            "l" + "r" * len(gpus),
            widths=(24, *[18] * len(gpus)),
            gap=0,
            indent=2,
        ),
        *text_table((), rows, "l" + "rrr" * len(gpus), widths=(24, *(7, 5, 6) * len(gpus)), gap=0, indent=2),
    ]
    notes = []
    if any(gpu.measured for gpu in gpus):
        shown = ", ".join(gpu.name for gpu in gpus if gpu.measured)
        notes.append(
            f"{shown}: fitted to measured runs of Llamas, nearly all within 10 %. All are of compiled blocks."
        )
    others: dict[str, list[str]] = {}
    for gpu in gpus:
        if not gpu.measured:
            others.setdefault(gpu.source, []).append(gpu.name)
    notes += [f"* {', '.join(own)}: {source}." for source, own in others.items()]
    if any(not each.native for each in estimate.predictions):
        notes.append(f"-: no native kernel; {BY_REFERENCE}.")
    return [*lines, *(line for note in notes for line in _wrapped(note, "  "))]


def _layers(estimate: Estimate, letters: dict[str, str]) -> list[str]:
    first = estimate.gpus[0].name
    columns = {name: estimate.of(first, name).groups for name in letters}
    speeds = f"; speed on {first}, recipes by letter" if letters else ""
    # The kinds with most FLOPs; they are shown in the order of the model.
    ranked = sorted(range(len(estimate.groups)), key=lambda i: -estimate.groups[i].flops_share)[:MOST_ROWS]
    titles: dict[str, list[list[str]]] = {}
    for i, group in sorted(enumerate(estimate.groups), key=lambda pair: pair[1].reason is not None):
        title = "in float8" if group.reason is None else f"in bf16: {group.reason}"
        if i in ranked:
            cells = [_ratio(own[i]) for own in columns.values()] if group.reason is None else []
            titles.setdefault(title, []).append([*_row(group), *cells])
    align, widths = "lrrr" + "r" * len(letters), (NAME, COUNT, SHAPE, FLOPS, *[RATIO] * len(letters))
    layout = functools.partial(text_table, align=align, widths=widths, gap=0, indent=2)
    lines = [f"Layers: share of all products with weights{speeds}"]
    lines += layout(["", "layers", "N x K", "share", *letters.values()], [])
    for title, rows in titles.items():
        lines += [*_wrapped(title, ""), *layout((), rows)]
    if len(ranked) < len(estimate.groups):
        lines.append(
            f"  and {plural(len(estimate.groups) - len(ranked), 'kind')} of smaller layers: --json has them"
        )
    if estimate.shapes.not_counted:
        lines += _wrapped(f"not counted: {', '.join(estimate.shapes.not_counted)}", "  ")
    return lines


def _row(group: LayerGroup) -> list[str]:
    name = group.name
    # All layers of a model share these prefixes.
    for prefix in ("base_model.model.", "model.layers.*.", "layers.*."):
        name = name.removeprefix(prefix)
    name = _PEFTS.sub("", name)
    # The end of a name tells more than its beginning.
    name = name if len(name) <= NAME else f"..{name[2 - NAME :]}"
    return [name, str(group.count), "{}x{}".format(*group.shape), f"{group.flops_share:.1%}"]


def _memory(estimate: Estimate) -> list[str]:
    gpu = estimate.gpus[0]
    rows = []
    for policy in estimate.policies:
        bytes_of = [f"{each.total / GIB:.1f}" for each in (policy.bf16, policy.float8)]
        speeds = [
            f"{estimate.run.tokens / each:,.0f}" for each in (policy.bf16_seconds, policy.float8_seconds)
        ]
        note = [] if policy.fits else [f"  over {gpu.memory / GIB:.0f} GiB"]
        rows.append([policy.checkpoint, *bytes_of, *speeds, *note])
    header = ("", "bf16 GiB", "float8 GiB", "bf16 tok/s", "float8 tok/s")
    return [
        f"Memory and speed of one {gpu.name} by checkpoint policy, in {estimate.recipe or 'bf16'} and bf16",
        *text_table(header, rows, "lrrrrl", widths=(14, 10, 12, 13, 14), gap=0, indent=2),
    ]


def _wire(estimate: Estimate) -> list[str]:
    plain, own = estimate.wire_bf16, estimate.wire
    rows = [
        ("all-gathers of weights", f"{own.gathered / GB:.2f}", f"GB   in bf16 {plain.gathered / GB:.2f} GB"),
        ("reduce-scatters of gradients", f"{own.reduced / GB:.2f}", "GB   float32, the same in bf16"),
    ]
    if own.replicated:
        rows.append(("all-reduces between replicas", f"{own.replicated / GB:.2f}", "GB   the same in bf16"))
    rows.append(("the all-reduce of amaxes", f"{own.amaxes / 1e6:.3f}", "MB"))
    lines = text_table((), rows, "lrl", widths=(33, 9), gap=1, indent=2)
    return ["Bytes on the wire, per step and GPU", *lines]


def _bullets(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        yield from _wrapped(sentence, "  - ", "    ")


def _wrapped(text: str, first: str = "", others: str = "  ") -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, first, others, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _count(parameters: int) -> str:
    for size, word in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if parameters >= size:
            return f"{parameters / size:.3g}{word}"
    return f"{parameters:,}"


STEP_WIDTH, STEP_NAME, CELL, COLUMNS = 80, 40, 13, 3
"""Columns of the page, of a way's name and of a cell; numbers of GPUs beside one another."""

WHOLE_RUNS, SPEED_UPS, RATES = 0.06, 0.07, 0.07
"""The largest errors: of tokens/s of runs on one to four H200s; of published speed-ups, and of their tokens/s. Source:
docs/measurements/predictions.md, "How near estimate is"."""

ERRORS = (
    f"Accuracy: tokens/s of whole runs of Llama 3 8B on one to four H200s are within {WHOLE_RUNS:.0%}, published "
    f"speed-ups and tokens/s on 8 to 256 H100s within {max(SPEED_UPS, RATES):.0%} (those of the 8B with --gpu "
    "H100-500W, which they ran on). On two and four GPUs gradients in e4m3 gained less than predicted. f8sub has "
    "measured no run across hosts."
)


def step_page(estimate: StepEstimate) -> str:
    """Return the whole page of a step's estimate."""
    return "\n\n".join(
        "\n".join(lines) for lines in (_step_head(estimate), _speeds(estimate), _parts(estimate))
    )


def _step_head(estimate: StepEstimate) -> list[str]:
    run, first = estimate.run, estimate.clusters[0]
    mesh = "fully_shard over all of them"
    if first.replicas > 1:
        mesh = f"{first.replicas} copies of the weights (HSDP)"
    if first.parts > 1:
        mesh += f", {first.parts} share each layer (tensor parallelism)"
    text = (
        f"{estimate.title}: {estimate.shapes.parameters / 1e9:.3g}B parameters, "
        f"{plural(len(estimate.shapes.blocks), 'block')}, on {first.gpu.name}s, {first.per_host} per host, "
        f"{first.network / 1e9:g} Gbit/s per GPU; {mesh}. {run.tokens:,} tokens per data-parallel rank in sequences "
        f"of {run.sequence:,}; checkpointing: {run.checkpoint}; recipe: {estimate.recipe}; gradients: "
        f"{estimate.reduction}."
    )
    return textwrap.wrap(text, STEP_WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _speeds(estimate: StepEstimate) -> list[str]:
    first, found = estimate.clusters[0], estimate.predictions
    lines = ["Tokens/s per GPU, and as a multiple of bf16's", *_ways(estimate, replayed=False)]
    if not all(each.fits for each in found):
        lines.append("  x: more than a GPU's memory")
    if any(each.host_binds for each in found):
        hosts = [max(each.host_seconds for each in found if each.way == way) for way in estimate.ways]
        replayed = max(each.replayed for each in found)
        measured = host_measured(len(estimate.shapes.blocks), replayed, first.parts)
        words = (
            f"h: the host is the limit: launching a step takes it {hosts[0] * 1e3:.0f} ms in bf16 and "
            f"{hosts[-1] * 1e3:.0f} ms in {estimate.recipe}. {measured}"
        )
        lines += _wrapped(words, "  ", "     ")
        if first.parts == 1:
            lines += [
                "",
                "The same replayed as a CUDA graph by f8sub.graph_step",
                *_ways(estimate, replayed=True),
            ]
    if not estimate.native:
        note = f"{estimate.recipe} has no native kernels on {first.gpu.name}: {BY_REFERENCE}."
        lines += _wrapped(note, "  ")
    return lines


def _ways(estimate: StepEstimate, *, replayed: bool) -> list[str]:
    lines, counts = [], [cluster.gpus for cluster in estimate.clusters]
    for start in range(0, len(counts), COLUMNS):
        shown = counts[start : start + COLUMNS]
        rows = [
            [way, *(_speed(estimate.of(count, way), replayed) for count in shown)] for way in estimate.ways
        ]
        header = ["GPUs", *(f"{count:,}" for count in shown)]
        widths = (STEP_NAME - 2, *[CELL] * len(shown))
        lines += text_table(header, rows, "l" + "r" * len(shown), widths=widths, gap=0, indent=2)
    return lines


def _speed(found: StepPrediction, replayed: bool) -> str:
    if replayed:
        rate, ratio = found.tokens_per_second * found.seconds / found.replayed_seconds, found.replayed
    else:
        rate, ratio = found.tokens_per_second, found.over_bf16
    mark = "x" if not found.fits else "h" if found.host_binds and not replayed else " "
    return f" {rate:,.0f} {ratio:.2f}{mark}"


def _parts(estimate: StepEstimate) -> list[str]:
    # bf16, and everything in float8
    ways = estimate.ways[0], estimate.ways[-1]
    rows = []
    for cluster in estimate.clusters:
        pair = [estimate.of(cluster.gpus, way) for way in ways]
        parts = [
            (e.timeline.compute, e.timeline.waiting, e.timeline.tax, e.replayed_seconds, e.host_seconds)
            for e in pair
        ]
        # seconds to ms
        cells = [f"{a * 1e3:,.0f}, {b * 1e3:,.0f}" for a, b in zip(*parts, strict=True)]
        rows.append([f"{cluster.gpus:,}", *cells])
    header = ("GPUs", "compute", "waiting", "overlap cost", "total", "host launches")
    lines = [
        f"Milliseconds per step, {ways[0]} and {ways[1].strip('+ ')}",
        *text_table(header, rows, "r" * 6, widths=(6, 13, 12, 15, 13, 17), gap=0, indent=2),
        "  overlap cost: what collectives that hide behind compute add to it",
    ]
    return [*lines, "", *textwrap.wrap(ERRORS, STEP_WIDTH, break_on_hyphens=False)]
