"""Holds what was estimated: of recipes on GPUs, of layers, of checkpoint policies, of ways to train on many GPUs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from f8sub.convert.products import Shapes
from f8sub.errors import Float8ConfigError
from f8sub.estimator.bytes import Memory, Wire
from f8sub.estimator.cluster import Cluster, Speed, Timeline
from f8sub.estimator.gpus import Gpu
from f8sub.estimator.page import page, step_page
from f8sub.estimator.seconds import Run

P = TypeVar("P")


def one_of(predictions: Sequence[P], **asked: object) -> P:
    """Return the prediction with these values; Float8ConfigError, which lists what there is, if there is none."""
    for each in predictions:
        if all(getattr(each, name) == value for name, value in asked.items()):
            return each
    # each value once, in order
    there = {name: dict.fromkeys(getattr(each, name) for each in predictions) for name in asked}
    lists = (f"{name} of {', '.join(map(repr, values))}" for name, values in there.items())
    words = ", ".join(f"{name}={value!r}" for name, value in asked.items())
    raise Float8ConfigError(f"this estimate has no prediction with {words}; it has {'; '.join(lists)}")


@dataclass(frozen=True, slots=True)
class Prediction(Speed):
    """Predicts one recipe on one GPU.

    Attributes:
        gpu: its name.
        recipe: its name.
        native: whether every float8 product has a kernel there; the others' figures are of the reference backend.
        measured: whether measured runs on this GPU are held to the estimate; else it is from data sheets.
        blocks: bf16's time over float8's of all blocks, forward and backward; None without numbered blocks.
        step: the same of a whole step that Python launches.
        step_seconds: seconds of a launched step in float8.
        bf16_seconds: seconds of a launched step in bf16.
        groups: the same ratio of each kind of layer, in the order of ``Estimate.groups``.
    """

    gpu: str
    recipe: str
    native: bool
    measured: bool
    blocks: float | None
    step: float
    step_seconds: float
    bf16_seconds: float
    groups: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Describes layers of one kind and shape.

    Attributes:
        name: of the layers, with ``*`` for numbers.
        count: how many they are.
        shape: (N, K) of one.
        flops_share: of the model's products with weights, 0 to 1.
        reason: why they are not converted; None where they are.
    """

    name: str
    count: int
    shape: tuple[int, int]
    flops_share: float
    reason: str | None


@dataclass(frozen=True, slots=True)
class Policy:
    """Predicts one checkpoint policy on the first GPU, with the recommended recipe.

    Attributes:
        checkpoint: its name.
        bf16: bytes at the peak, in bf16.
        float8: the same in float8.
        bf16_seconds: seconds of a launched step in bf16.
        float8_seconds: the same in float8.
        fits: whether float8's bytes are at most 95 % of the GPU's memory.
    """

    checkpoint: str
    bf16: Memory
    float8: Memory
    bf16_seconds: float
    float8_seconds: float
    fits: bool


@dataclass(frozen=True, slots=True)
class StepPrediction(Speed):
    """Predicts one way to train on so many GPUs.

    Attributes:
        gpus: how many.
        way: what is in float8, added to the ways before.
        seconds: seconds of a step that Python launches.
        tokens_per_second: tokens per second on one GPU.
        over_bf16: speed as a multiple of bf16's, both launched.
        timeline: what of the step is compute, waiting, and slowed by collectives.
        loss: seconds of softmax and cross entropy.
        optimizer: seconds of AdamW and of the all-reduce of scales.
        fits: whether a GPU's memory holds it.
    """

    gpus: int
    way: str
    seconds: float
    tokens_per_second: float
    over_bf16: float
    timeline: Timeline
    loss: float
    optimizer: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """Holds an estimate of recipes on GPUs. ``str()`` is a page of 80 columns, ``as_dict()`` is for JSON.

    Times are of code compiled block by block. An H200's are fitted to measured runs,
    which they hit within 10 % but for those that ``docs/measurements/predictions.md`` names.

    Attributes:
        title: the model's class.
        shapes: what was read of the model.
        run: how it is trained.
        gpus: the GPUs, the first one first.
        groups: layers by kind.
        predictions: each recipe on each GPU.
        recipe: the name of the recommended recipe; None where no recipe is native on the first GPU.
        policies: memory and speed by checkpoint policy.
        wire: bytes by the recommended recipe.
        wire_bf16: bytes in bf16.
        advice: sentences.
    """

    title: str
    shapes: Shapes
    run: Run
    gpus: tuple[Gpu, ...]
    groups: tuple[LayerGroup, ...]
    predictions: tuple[Prediction, ...]
    recipe: str | None
    policies: tuple[Policy, ...]
    wire: Wire
    wire_bf16: Wire
    advice: tuple[str, ...]

    def of(self, gpu: str, recipe: str) -> Prediction:
        """Return one prediction; Float8ConfigError where there is none, which lists those that there are."""
        return one_of(self.predictions, gpu=gpu, recipe=recipe)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, in seconds, bytes and ratios, as JSON takes them."""
        found = asdict(self)
        found["parameters"] = self.shapes.parameters
        found["blocks"] = len(self.shapes.blocks)
        found["not_counted"] = list(self.shapes.not_counted)
        # Every product of the model; ``groups`` has what a reader needs of them.
        del found["shapes"]
        found["gpus"] = [{"name": g.name, "measured": g.measured, "source": g.source} for g in self.gpus]
        for policy, row in zip(self.policies, found["policies"], strict=True):
            # asdict leaves properties out.
            row["bf16"]["total"], row["float8"]["total"] = policy.bf16.total, policy.float8.total
        return found

    def __str__(self) -> str:
        return page(self)


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Holds an estimate of steps on several numbers of GPUs. ``str()`` is a table, ``as_dict()`` is for JSON.

    Attributes:
        title: the model's class.
        shapes: what was read of the model.
        clusters: one for each number of GPUs.
        run: how it is trained, on the first of them.
        recipe: the recipe's name.
        reduction: how gradients are reduced but in the last way.
        predictions: every way on every number of GPUs.
        native: whether the recipe has kernels on the GPU; else its products are those of the reference backend.
    """

    title: str
    shapes: Shapes
    clusters: tuple[Cluster, ...]
    run: Run
    recipe: str
    reduction: str
    predictions: tuple[StepPrediction, ...]
    native: bool

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways to train, in their order."""
        return tuple(dict.fromkeys(each.way for each in self.predictions))

    def of(self, gpus: int, way: str) -> StepPrediction:
        """Return one prediction; Float8ConfigError where there is none, which lists those that there are."""
        return one_of(self.predictions, gpus=gpus, way=way)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, in seconds and ratios, as JSON takes them."""
        # Clusters differ in the number of GPUs alone.
        first = self.clusters[0]
        return {
            "title": self.title,
            "parameters": self.shapes.parameters,
            "gpu": first.gpu.name,
            "gpus_per_host": first.per_host,
            "network_gbit": first.network / 1e9,
            "replicas": first.replicas,
            "tensor_parallel": first.parts,
            "tokens": self.run.tokens,
            "sequence": self.run.sequence,
            "checkpoint": self.run.checkpoint,
            "recipe": self.recipe,
            "reduction": self.reduction,
            "native": self.native,
            "predictions": [asdict(each) for each in self.predictions],
        }

    def __str__(self) -> str:
        return step_page(self)
