"""Holds what compare found: losses and gradients by run, a table of them, and a page with plots."""

import html
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from f8sub.errors import Float8ConfigError
from f8sub.text_table import text_table

WIDTH = 100
"""Columns of what stands under the tables."""

REFERENCE = "bf16"
NOISE = "bf16, other order of sums"
"""Labels of the runs without float8."""


USUAL = (
    "Usual with 8 bits, as the median over a Llama's parameters: a gradient is 5 to 10 % off, its cosine is 0.995 or "
    "more, and x noise is 5 to 200. With nvfp4: 30 to 40 %, 0.93, and five times as much noise. Look at one that is "
    "far above the others with f8sub.Monitor."
)
"""Medians over the parameters of Llamas of 4 and 8 layers, 20 steps trained, 2 batches, by every recipe."""


class Gradient(NamedTuple):
    """Compares a parameter's gradient with that in bf16.

    Attributes:
        run: label of the run.
        name: full name of the parameter.
        cosine: of the angle between both; 1 is no difference.
        error: norm of the difference over the norm in bf16.
    """

    run: str
    name: str
    cosine: float
    error: float


class LossDifference(NamedTuple):
    """Compares the losses of a run with those in bf16.

    Attributes:
        loss: mean over the batches, or the last one's where each run was trained.
        difference: of that, signed.
        rms: root of the mean square of the differences of all batches.
        times_noise: ``rms`` over that of bf16 with another order of sums; infinite where that is 0.
    """

    loss: float
    difference: float
    rms: float
    times_noise: float


@dataclass(frozen=True)
class Comparison:
    """Compares runs in float8 with one in bf16. ``str()`` is a table.

    Attributes:
        losses: by run, a number a batch; ``"bf16"`` and ``"bf16, other order of sums"`` are the first two.
        gradients: of each run but bf16, by parameter.
        trained: whether the runs took a step after each batch.
    """

    losses: dict[str, list[float]]
    gradients: tuple[Gradient, ...]
    trained: bool

    @property
    def runs(self) -> list[str]:
        """The labels of the runs in float8."""
        return [run for run in self.losses if run not in (REFERENCE, NOISE)]

    def loss(self, run: str) -> LossDifference:
        """Return how far a run's losses are from bf16's, also as a multiple of bf16's own noise."""
        self._check(run)
        exact, found = self.losses[REFERENCE], self.losses[run]
        # The last loss of a curve; the mean over batches where weights do not change.
        told = slice(-1, None) if self.trained else slice(None)
        means = [sum(values[told]) / len(values[told]) for values in (found, exact)]
        rms, noise = (_rms(self.losses[each], exact) for each in (run, NOISE))
        # Without noise any difference is infinitely larger, and none is 0.
        times = rms / noise if noise else float("inf") if rms else 0.0
        return LossDifference(means[0], means[0] - means[1], rms, times)

    def worst(self, count: int = 8, run: str | None = None) -> list[Gradient]:
        """Return the gradients with the largest error, of one run or of all in float8."""
        if run is not None:
            self._check(run)
        chosen = [row for row in self.gradients if row.run == run or (run is None and row.run != NOISE)]
        return sorted(chosen, key=lambda row: -row.error)[:count]

    def _check(self, run: str) -> None:
        if run not in self.losses:
            raise Float8ConfigError(f"no run is called {run!r}; there is {', '.join(map(repr, self.losses))}")

    def __str__(self) -> str:
        """Return a table of the losses, one of the worst gradients, and what is usual."""
        losses, worst = (
            "\n".join(text_table((), table, "l" + "r" * (len(table[0]) - 1)))
            for table in (self._losses(), self._worst())
        )
        return "\n\n".join([losses, _wrapped(self._words()), worst, _wrapped(USUAL)])

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``index.html`` with both tables, ``loss.png`` and ``gradients.png``.

        Returns:
            The page.

        Raises:
            Float8ConfigError: matplotlib is not installed.
        """
        target = Path(folder)
        # Drawn first: without matplotlib no folder is left behind.
        figures = {"loss.png": self._draw_losses(), "gradients.png": self._draw_gradients()}
        target.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(target / name, dpi=120)
        pictures = "".join(f'<p><img src="{name}" alt="{name}"></p>\n' for name in figures)
        page = target / "index.html"
        page.write_text(
            "<!doctype html><meta charset='utf-8'><title>float8 beside bf16</title>\n"
            "<style>body{font-family:sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em .8em;"
            "text-align:right}td:first-child{text-align:left}img{max-width:100%}</style>\n"
            f"<h1>float8 beside bf16</h1>\n<p>{html.escape(self._words())}</p>\n"
            f"{_html(self._losses())}{_html(self._worst(16))}"
            f"<p>{html.escape(USUAL)}</p>\n{pictures}"
        )
        return page

    def _words(self) -> str:
        batches = len(self.losses[REFERENCE])
        trained = "a step after each" if self.trained else "weights unchanged"
        return (
            f"{batches} batches, {trained}. A difference of about 1 x noise means nothing: bf16 itself moves that "
            "far when its sums run in another order."
        )

    def _losses(self) -> list[list[str]]:
        rows = [
            ["run", "last loss" if self.trained else "loss", "minus bf16", "rms", "x noise", "median cosine"]
        ]
        for run in self.losses:
            found = self.loss(run)
            cosines = sorted(row.cosine for row in self.gradients if row.run == run)
            median = f"{cosines[len(cosines) // 2]:.5f}" if cosines else ""
            numbers = [f"{found.difference:+.2e}", f"{found.rms:.2e}", f"{found.times_noise:.1f}", median]
            rows.append([run, f"{found.loss:.5f}", *(numbers if run != REFERENCE else [""] * 4)])
        return rows

    def _worst(self, count: int = 8) -> list[list[str]]:
        noise = {row.name: row.error for row in self.gradients if row.run == NOISE}
        rows = [["gradient", "run", "cosine", "error", "bf16's noise"]]
        return rows + [
            [row.name, row.run, f"{row.cosine:.5f}", f"{row.error:.2%}", f"{noise[row.name]:.2%}"]
            for row in self.worst(count)
        ]

    def _draw_losses(self) -> Any:
        figure = _figure((8, 6))
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for run, values in self.losses.items():
            # black for bf16
            style = {REFERENCE: "k-", NOISE: "k:"}.get(run, "-")
            above.plot(values, style, label=run, marker=".")
            if run != REFERENCE:
                gaps = [a - b for a, b in zip(values, self.losses[REFERENCE], strict=True)]
                below.plot(gaps, style, label=run, marker=".")
        above.set_ylabel("loss")
        above.legend()
        below.axhline(0, color="tab:gray", linewidth=0.8)
        below.set_ylabel("minus bf16")
        below.set_xlabel("batch")
        return figure

    def _draw_gradients(self) -> Any:
        names = list(dict.fromkeys(row.name for row in self.gradients))
        figure = _figure((8, 1.5 + 0.16 * len(names)))
        axes = figure.subplots()
        for run in (NOISE, *self.runs):
            errors = {row.name: row.error for row in self.gradients if row.run == run}
            axes.plot(
                [errors[name] for name in names], range(len(names)), "k." if run == NOISE else "o", label=run
            )
        axes.set_yticks(range(len(names)), names, fontsize=6)
        # the first parameter on top
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel("relative error of the gradient")
        axes.legend()
        return figure


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def _rms(values: list[float], exact: list[float]) -> float:
    squares = [(a - b) ** 2 for a, b in zip(values, exact, strict=True)]
    return float((sum(squares) / len(squares)) ** 0.5)


def _html(table: list[list[str]]) -> str:
    lines = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        # the header, then as many rows as there are
        for row, tag in zip(table, ["th"] + ["td"] * len(table), strict=False)
    ]
    return "<table>\n" + "\n".join(lines) + "\n</table>\n"


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Float8ConfigError(
            "a comparison is drawn with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return Figure(figsize=size, layout="constrained")
