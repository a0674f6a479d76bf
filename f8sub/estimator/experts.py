"""Predicts whether float8 makes a module of experts faster than bf16, by the sizes of its weights and its tokens."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from f8sub.convert.products import Product, Shapes, expert_products
from f8sub.estimator.gpus import GPUS, H200, Gpu
from f8sub.estimator.seconds import NONE, Run, linear_seconds

if TYPE_CHECKING:
    from f8sub.recipe import Recipe

LEAST = 1.1
"""Experts gain where the formula says so many times as fast as bf16: of a measured step it says up to 9 % too much.

The steps are those of docs/measurements/experts.md.
"""

LEAST_EXCHANGED = 1.25
"""The same where tokens travel to experts of other GPUs, which a step waits for in bf16 as in float8.

Qwen3-30B-A3B's were predicted 1.10 times as fast there, and runs were measured at 0.96 to 1.01 (docs/experts.md).
"""

USUAL = 2048
"""Tokens per expert that training usually has: each of Mixtral 8x7B's 8 experts gets so many of 8,192 sent to two each.

Where the tokens are not known, experts are converted that need no more than these.
"""

MANY = 2**17
"""Tokens of an expert beyond which more of them change nothing: its weights' casts are less than 1 % of the time."""


NO_TOKENS = "pass tokens= for this job's"
NO_TOP_K = "how many an expert gets is not known, because nothing says how many experts a token is sent to"


@dataclass(frozen=True, slots=True)
class ExpertGain:
    """Holds the predicted speed-up of one module of experts in float8, forward and backward, casts included.

    Attributes:
        recipe: its name.
        gpu: its name.
        tokens: the tokens per expert in one forward; None if not known, and ``speedup`` is then for ``USUAL``.
        speedup: bf16's time over float8's.
        enough: the fewest tokens per expert with which ``speedup`` is ``least``, where each rank casts all weights;
            None where no number is enough.
        enough_gathered: the same where FSDP2 gathers float8 data, so that each rank casts its shard alone.
        unknown: where ``tokens`` is None, why, or what to do about it.
        gathered: whether ``speedup`` is for weights that are gathered as float8 data.
        least: the ``speedup`` from which on the experts should be converted.
    """

    recipe: str
    gpu: str
    tokens: float | None
    speedup: float
    enough: int | None
    enough_gathered: int | None
    unknown: str = ""
    gathered: bool = False
    least: float = LEAST

    @property
    def gains(self) -> bool:
        """True if the experts should be converted: ``speedup`` is at least ``least``."""
        return self.speedup >= self.least

    @property
    def needs(self) -> str:
        """How many tokens per expert are enough, in words."""
        if self.enough is None:
            enough = f"float8 would not be {self.least} times as fast at any number of tokens"
        else:
            # 1.1 is what the documentation says of the default.
            what = "" if self.least == LEAST else f" for {self.least}"
            enough = f"{self.enough:,} tokens per expert are enough{what}"
        if self.enough_gathered is None:
            return enough
        return f"{enough}, {self.enough_gathered:,} where FSDP2 gathers float8 data"

    def __str__(self) -> str:
        tokens = USUAL if self.tokens is None else self.tokens
        unknown = f"; {self.unknown}" if self.unknown else ""
        how = " and gathered float8 data" if self.gathered else ""
        return (
            f"{self.recipe} is predicted {self.speedup:.2f} times as fast as bf16 with {tokens:,.0f} tokens per expert"
            f"{how} ({self.gpu}); {self.needs}{unknown}"
        )


def gain_of(
    products: Sequence[Product],
    recipe: "Recipe",
    gpu: Gpu,
    tokens: float | None,
    *,
    gathered: bool = False,
    least: float = LEAST,
) -> ExpertGain:
    """Predict the speed-up of the weights of one module of experts.

    The formula is in docs/experts.md.

    Args:
        products: all of its weights.
        recipe: the recipe of the three products.
        gpu: the GPU that they run on.
        tokens: tokens of one forward, before they are sent to experts; None if not known. Where nothing says how many
            experts a token is sent to, those of each expert are not known either.
        gathered: whether FSDP2 gathers the weights as float8 data; else each rank casts all of them in each forward.
        least: see ``ExpertGain``.
    """
    # The share of the tokens that one expert gets when they are spread evenly; 1 where ``top_k`` is not known.
    share = products[0].uses / products[0].experts
    each = None if tokens is None or share == 1 else tokens * share
    # Rows are then ``of_each`` times the number of experts.
    whole = [replace(product, uses=product.experts, reason=None) for product in products]

    def speedup(of_each: float, gathered: bool = False) -> float:
        run = Run(of_each, checkpoint=NONE)
        times = [
            sum(linear_seconds(product, r, gpu, run, False, gathered).total for product in whole)
            for r in (None, recipe)
        ]
        return times[0] / times[1]

    enough = _least(speedup, least), _least(functools.partial(speedup, gathered=True), least)
    predicted = speedup(USUAL if each is None else each, gathered)
    unknown = NO_TOP_K if each is None else ""
    if each is None and tokens is None:
        # Where no number is enough, this job's is not either.
        unknown = "" if enough == (None, None) else NO_TOKENS
    return ExpertGain(recipe.name, gpu.name, each, predicted, *enough, unknown, gathered, least)


def _least(speedup: Callable[[float], float], least: float) -> int | None:
    """Return the fewest tokens per expert with which ``speedup`` is ``least``, by bisection; None beyond ``MANY``."""
    # The speed-up grows with the tokens: if so many are not enough, no number is.
    if speedup(MANY) < least:
        return None
    # ``few`` tokens are never enough, and ``enough`` always are.
    few, enough = 0, MANY
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if speedup(middle) >= least else (middle, enough)
    return enough


class Gains:
    """Predicts the speed-up of a model's modules of experts; of those that differ in names alone once.

    Args:
        gpu: the GPU that they run on; None for this machine's, or an H200 if that is not known.
        tokens: see ``gain_of``.
        gathered: see there.
        least: see there.
    """

    def __init__(
        self, gpu: Gpu | None, tokens: float | None, *, gathered: bool = False, least: float = LEAST
    ) -> None:
        self._gpu, self._tokens = gpu or gpu_here(), tokens
        self._how: Any = {"gathered": gathered, "least": least}
        self._found: dict[tuple[Recipe, tuple[Product, ...]], ExpertGain] = {}

    @classmethod
    def of_options(cls, options: Mapping[str, Any], tokens: float | None = None) -> "Gains":
        """Return what predicts for a conversion with these options of ``ExpertsChoice``, or for other ``tokens``."""
        least = LEAST_EXCHANGED if options.get("exchanged") else LEAST
        gathered = options.get("gathered", False)
        return cls(None, tokens or options.get("tokens"), gathered=gathered, least=least)

    @classmethod
    def of_shapes(cls, shapes: Shapes, gpu: Gpu, gpus: int, tokens: float) -> "Gains":
        """Return what predicts for a job of so many GPUs, whose experts FSDP2 gathers unless tokens travel to them."""
        least = LEAST_EXCHANGED if shapes.exchanged else LEAST
        return cls(gpu, tokens, gathered=gpus > 1 and not shapes.exchanged, least=least)

    def of(self, products: Sequence[Product], recipe: "Recipe") -> ExpertGain:
        """Return ``gain_of`` the weights of one module."""
        alike = tuple(replace(p, fqn="", reads=str(p.shares_x), block=None) for p in products)
        if (recipe, alike) not in self._found:
            self._found[recipe, alike] = gain_of(products, recipe, self._gpu, self._tokens, **self._how)
        return self._found[recipe, alike]

    def of_module(self, model: torch.nn.Module, fqn: str, recipe: "Recipe") -> ExpertGain:
        """Return that of the module of a name in a model, converted or not."""
        return self.of(expert_products(model, fqn, None), recipe)


def why_left(gain: ExpertGain, experts: bool | str | None) -> str:
    """Return the reason that reports give for experts that ``experts``, one of ``AUTO``, does not convert."""
    return f'experts="{experts}": {gain}'


def gpu_here() -> Gpu:
    """Return the GPU of this machine by its name, or an H200, whose figures were measured."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    # The driver has longer names, such as "NVIDIA H100 80GB HBM3".
    return next((gpu for gpu in GPUS.values() if gpu.name in name), H200)
