"""Predicts speed, memory and bytes in float8, on one GPU or many: f8sub.estimate and estimate_step."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from f8sub.convert.products import (
    SKIP_REASON,
    Product,
    Shapes,
    are_frozen,
    kind_of,
    model_products,
    name_of,
    pretrained,
    refuse_without_shapes,
)
from f8sub.convert.selection import HEAD, Selection, default_reasons, idle_patterns
from f8sub.errors import Float8ConfigError, Float8Warning, shown, unknown
from f8sub.estimator.advice import advice, fits, recommended
from f8sub.estimator.bytes import Adapters, adapters_of, memory, wire
from f8sub.estimator.cluster import (
    E4M3,
    FLOAT32,
    H100_500W,
    REDUCTIONS,
    Arm,
    Cluster,
    Step,
    blocks_seconds,
    divided,
    step_of,
)
from f8sub.estimator.counted_forward import count_of_made_up
from f8sub.estimator.experts import Gains, why_left
from f8sub.estimator.gpus import GPUS, Gpu, gpu_of
from f8sub.estimator.models import FORMS, load
from f8sub.estimator.results import (
    Estimate,
    LayerGroup,
    Policy,
    Prediction,
    StepEstimate,
    StepPrediction,
)
from f8sub.estimator.seconds import CHECKPOINTS, SELECTIVE, Run, by_product
from f8sub.experts.seams import AUTO, AUTO_EXCHANGED, EXPERTS, refuse_unknown_experts
from f8sub.recipe import Recipe, get_recipe, recipe_names
from f8sub.recipes import DEFAULT
from f8sub.weights.weight import is_converted

PER_HOST = 8
"""GPUs that NVLink joins: data sheets of HGX H100, H200 and B200."""

KINDS = {**GPUS, H100_500W.name: H100_500W}
"""GPUs by name; the last one is that of published runs."""

BF16_WAY, COMPUTE = "bf16", "float8 compute"
BY_WEIGHT, GATHERS = "+ float8 all-gather, a scale at a time", "+ one all-reduce of all scales"
"""The first ways to train, each with what the one before has."""


def estimate(  # noqa: PLR0913  (a model, and how it is trained)
    model: torch.nn.Module | str,
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    *,
    gpus: str | Sequence[str] = tuple(GPUS),
    tokens: int = 8192,
    sequence: int | None = None,
    mesh: Sequence[int] = (8,),
    checkpoint: str = SELECTIVE,
    skip: str | Sequence[str] = (),
    experts: bool | str = EXPERTS,
) -> Estimate:
    """Predict what float8 gains of a model, before anything runs; the model is read, not changed.

    Args:
        model: on any device, meta included; converted or not. Of one that is not, what ``convert_to_float8`` would
            convert. Or what ``python -m f8sub inspect`` takes for it, such as "llama3-8b". Where some parameters are
            frozen and others are not, memory is that of adapters over a frozen base.
        recipes: names or recipes, or one; None for all that come with f8sub.
        gpus: names, or one; the layers' figures and the advice are those of the first.
        tokens: tokens per GPU in one step.
        sequence: tokens that attend to each other; None for ``tokens``.
        mesh: GPUs that shard the weights, (shards,), or (replicas, shards) for HSDP.
        checkpoint: "none", "selective", "gemms" or "full", see ``f8sub.checkpoint_policy``: "selective" is what its
            ``"bf16"`` and torchtitan do.
        skip: glob patterns of layers that stay in high precision, as for ``convert_to_float8``.
        experts: whether experts of a mixture are converted, as for ``convert_to_float8``.

    Raises:
        Float8ConfigError: an unknown GPU, recipe or policy, a size that is no positive number, or a model without
            products with weights.
    """
    run = _run(tokens, tokens if sequence is None else sequence, mesh, checkpoint)
    found = tuple(gpu_of(name) for name in ([gpus] if isinstance(gpus, str) else gpus))
    if not found:
        raise Float8ConfigError(f"gpus is empty; choose of {', '.join(GPUS)}")
    model = _named_or_given(model)
    shapes = shapes_of(model, [skip] if isinstance(skip, str) else skip, experts)
    if not shapes.products:
        raise Float8ConfigError("the model multiplies by no weights that f8sub could convert or count")
    asked = [recipes] if isinstance(recipes, str | Recipe) else recipe_names() if recipes is None else recipes
    chosen = [get_recipe(recipe) for recipe in asked]
    # Grouped before recipes decide on experts, so that all recipes have the same rows.
    kinds = alike(shapes.products)
    clusters = [_cluster_of(gpu, run) for gpu in found]
    predictions = tuple(
        _predict(_decided(shapes, recipe, cluster, tokens), kinds, recipe, cluster, run)
        for cluster in clusters
        for recipe in chosen
    )
    # Advice and the figures of layers are for the first GPU.
    best = recommended(chosen, [each for each in predictions if each.gpu == found[0].name])
    # The page shows experts as the recommended recipe has them.
    shapes = _decided(shapes, best or chosen[0], clusters[0], tokens)
    adapters = adapters_of(model, shapes)
    policies = tuple(_policy(shapes, best, clusters[0], run, name, adapters) for name in CHECKPOINTS)
    own = tuple(each for each in predictions if each.gpu == found[0].name)
    todo = tuple(advice(shapes, best, chosen, clusters[0], run, own, policies))
    wires = wire(shapes, best, run), wire(shapes, None, run)
    name = None if best is None else best.name
    groups = _groups(shapes, kinds)
    return Estimate(
        type(model).__name__, shapes, run, found, groups, predictions, name, policies, *wires, todo
    )


def shapes_of(model: torch.nn.Module, skip: Sequence[str] = (), experts: bool | str = EXPERTS) -> Shapes:
    """Read a model, converted or not, on any device; it is not changed.

    How often a layer or an expert multiplies a token is counted of a model of transformers that takes tokens, see
    ``count_of_made_up``; of layers that do not run there, and of any other model, it is assumed.

    Args:
        model: of one that is not converted, told is what ``convert_to_float8(model, skip=skip, experts=experts)``
            would convert; where ``experts`` is one of ``AUTO`` all experts, which ``Shapes.undecided`` says.
        skip: glob patterns; of a converted model they do nothing, with a ``Float8Warning``.
        experts: as ``convert_to_float8`` takes it.
    """
    refuse_unknown_experts(experts, None)
    refuse_without_shapes(model)
    modules = dict(model.named_modules())
    linears = {fqn: m for fqn, m in modules.items() if isinstance(m, torch.nn.Linear)}
    # The reasons of a converted model stand on its modules; for a plain one they are those of a conversion.
    is_plain = not any(map(is_converted, modules.values()))
    reasons: dict[str, str | None]
    if is_plain:
        selection = Selection(skip=skip)
        # One of ``AUTO`` counts as True here: recipe, GPU and tokens decide later.
        of_experts = selection.reasons_of_experts(modules, wanted=experts is not False)
        reasons = selection.reasons(modules, linears) | of_experts
        if skip:
            idle_patterns(list(modules), reasons, selection, linears)
    else:
        if skip:
            warnings.warn(
                f"skip={list(skip)} does nothing to a model that is converted already; give it to convert_to_float8",
                Float8Warning,
                stacklevel=3,
            )
        reasons = {
            fqn: None if is_converted(m) else getattr(m, SKIP_REASON, "not converted")
            for fqn, m in modules.items()
        }
    counted = None if (inner := pretrained(model)) is None else count_of_made_up(model, inner)
    products, not_counted = model_products(model, reasons, None if isinstance(counted, str) else counted)
    total = sum(p.numel() for p in model.parameters())
    # Output heads make logits, whether they would be converted or not.
    heads = [fqn for fqn, reason in default_reasons(modules, linears).items() if reason == HEAD]
    fixed = sum(p.numel() for p in model.parameters() if are_frozen(model, [p]))
    return Shapes(
        tuple(products),
        total - sum(product.elements for product in products),
        sum(linears[fqn].out_features for fqn in heads),
        not_counted,
        experts if is_plain else None,
        is_plain and experts in AUTO and any(product.experts for product in products),
        # What remains are frozen parameters that multiply nothing.
        fixed - sum(product.elements for product in products if product.frozen),
        is_plain and experts == AUTO_EXCHANGED,
    )


def _named_or_given(model: torch.nn.Module | str) -> torch.nn.Module:
    """Return a model itself, or the one that a name stands for; Float8ConfigError for anything else."""
    if isinstance(model, str):
        return load(model)
    if not isinstance(model, torch.nn.Module):
        raise Float8ConfigError(f"a model is a torch.nn.Module, or {FORMS}; got {shown(model)}")
    return model


def _run(tokens: int, sequence: int, mesh: Sequence[int], checkpoint: str) -> Run:
    shards = tuple(mesh) if isinstance(mesh, Sequence) else ()
    sizes = (tokens, sequence, *shards)
    # ``isinstance`` would take True for a size.
    if any(type(size) is not int or size < 1 for size in sizes) or len(shards) not in (1, 2):
        raise Float8ConfigError(
            f"tokens, sequence and the one or two sizes of a mesh are positive whole numbers, got {tokens!r}, "
            f"{sequence!r} and mesh={mesh!r}; (8,) is 8 GPUs that share the weights"
        )
    if sequence > tokens:
        raise Float8ConfigError(f"a GPU's {tokens} tokens hold no sequence of {sequence}: give more tokens")
    if checkpoint not in CHECKPOINTS:
        raise unknown("checkpoint policy", checkpoint, CHECKPOINTS)
    return Run(tokens, sequence, mesh[-1], mesh[0] if len(mesh) == 2 else 1, checkpoint)


def _cluster_of(gpu: Gpu, run: Run) -> Cluster:
    """Return the GPUs of a run, on hosts of eight, or of as many as divide the shards."""
    per_host = PER_HOST if run.shards <= PER_HOST else math.gcd(run.shards, PER_HOST)
    return Cluster(gpu, run.shards * run.replicas, per_host, replicas=run.replicas)


Kinds = Mapping[tuple[str, int, int, str | None], Sequence[Product]]


def alike(products: Sequence[Product]) -> Kinds:
    """Group the products by kind, N, K and reason."""
    found: dict[tuple[str, int, int, str | None], list[Product]] = {}
    for product in products:
        key = kind_of(product.fqn), product.rows, product.cols, product.reason
        found.setdefault(key, []).append(product)
    return found


def _groups(shapes: Shapes, kinds: Kinds) -> tuple[LayerGroup, ...]:
    whole = sum(product.multiplications for product in shapes.products)
    reasons = {product.fqn: product.reason for product in shapes.products}
    return tuple(
        LayerGroup(
            name_of([product.fqn for product in products]) or "(root)",
            len(products),
            (rows, cols),
            sum(product.multiplications for product in products) / whole,
            reasons[products[0].fqn],
        )
        for (_, rows, cols, _), products in kinds.items()
    )


def _decided(shapes: Shapes, recipe: Recipe, cluster: Cluster, tokens: float) -> Shapes:
    """Return ``shapes`` as an ``experts`` of ``AUTO`` decides with so many tokens in one forward; else unchanged."""
    if not shapes.undecided:
        return shapes
    left: dict[str, str] = {}
    gains = Gains.of_shapes(shapes, cluster.gpu, cluster.gpus, tokens)
    for module, products in shapes.experts_by_module.items():
        if products[0].reason is None and not (gain := gains.of(products, recipe)).gains:
            left[module] = why_left(gain, shapes.experts)
    kept = (
        replace(each, reason=left[each.module]) if each.module in left else each for each in shapes.products
    )
    return replace(shapes, products=tuple(kept), undecided=False)


def _predict(shapes: Shapes, kinds: Kinds, recipe: Recipe, cluster: Cluster, run: Run) -> Prediction:
    gpu, arms = cluster.gpu, (Arm(), Arm(recipe))
    plain, own = (step_of(shapes, arm, cluster, run) for arm in arms)
    blocks = [blocks_seconds(shapes, arm, cluster, run) for arm in arms]
    # seconds by weight, in bf16 and in float8
    times = [by_product(shapes, arm.recipe, gpu, run) for arm in arms]
    groups = tuple(
        sum(times[0][product.fqn, product.rows] for product in products)
        / sum(times[1][product.fqn, product.rows] for product in products)
        for products in kinds.values()
    )
    return Prediction(
        gpu.name,
        recipe.name,
        _is_native(recipe, gpu),
        gpu.measured,
        blocks[0] / blocks[1] if shapes.blocks else None,
        plain.launched / own.launched,
        own.launched,
        plain.launched,
        groups,
        replayed=plain.replayed / own.replayed,
        replayed_seconds=own.replayed,
        host_seconds=own.host,
    )


def _is_native(recipe: Recipe, gpu: Gpu) -> bool:
    return all(map(gpu.is_native, (recipe.fprop, recipe.dgrad, recipe.wgrad)))


def _policy(
    shapes: Shapes, recipe: Recipe | None, cluster: Cluster, run: Run, name: str, adapters: Adapters | None
) -> Policy:
    run = replace(run, checkpoint=name)
    plain, own = (memory(shapes, each, run, adapters) for each in (None, recipe))
    times = [step_of(shapes, Arm(each), cluster, run).launched for each in (None, recipe)]
    return Policy(name, plain, own, times[0], times[1], fits(own, cluster.gpu))


def estimate_step(  # noqa: PLR0913  (a model, a cluster, and how it is trained)
    model: torch.nn.Module | str,
    gpus: int | Sequence[int] = (8, 64, 128, 1024),
    *,
    gpu: str = "H100",
    gpus_per_host: int = 8,
    network: float = 400,
    tokens: int = 8192,
    sequence: int | None = None,
    replicas: int = 1,
    tensor_parallel: int = 1,
    recipe: str | Recipe = DEFAULT,
    reduction: str = FLOAT32,
    checkpoint: str = SELECTIVE,
    skip: str | Sequence[str] = (),
    experts: bool | str = EXPERTS,
) -> StepEstimate:
    """Predict a step's time under FSDP2 on several numbers of GPUs; the model is read, not changed.

    Compute is ``f8sub.estimate``'s. All-gathers and reductions take their bytes over NVLink and over the hosts'
    NICs, and hide behind compute as FSDP2 lets them: one block is gathered ahead, gathers and reductions queue.

    Args:
        model: on any device, meta included; converted or not. Or what ``python -m f8sub estimate`` takes for it, such
            as "llama3-8b".
        gpus: how many, or several such numbers.
        gpu: "H200", "H100", "B200", or "H100-500W", which published runs had.
        gpus_per_host: how many GPUs NVLink joins.
        network: Gbit/s of a GPU's NIC.
        tokens: tokens per data-parallel rank in one step.
        sequence: tokens that attend to each other; None for ``tokens``.
        replicas: copies of the weights, for HSDP.
        tensor_parallel: GPUs that share each layer.
        recipe: a name or a recipe.
        reduction: of gradients but in the last way, which has e4m3: "float32", as torchtitan, "bf16", "e4m3" or
            "e4m3-flat", which is one exchange over all hosts.
        checkpoint: "none", "selective", "gemms" or "full".
        skip: glob patterns of layers that stay in high precision.
        experts: whether experts of a mixture are converted, as for ``convert_to_float8``.

    Raises:
        Float8ConfigError: an unknown GPU, recipe, policy or reduction, a size that is no positive number, GPUs that
            replicas and tensor parallelism do not divide, or a model without numbered blocks.
    """
    kind = gpu_of(gpu, KINDS)
    if reduction not in REDUCTIONS:
        raise unknown("reduction", reduction, REDUCTIONS)
    if checkpoint not in CHECKPOINTS:
        raise unknown("checkpoint policy", checkpoint, CHECKPOINTS)
    counts = (gpus,) if isinstance(gpus, int) else tuple(gpus)
    sequence = tokens if sequence is None else sequence
    clusters = tuple(
        _cluster(kind, count, gpus_per_host, network, replicas, tensor_parallel) for count in counts
    )
    if not clusters or min(tokens, sequence) < 1 or sequence > tokens:
        raise Float8ConfigError(
            f"give one number of GPUs or more, and tokens that hold a sequence; got gpus={gpus}, tokens={tokens}, "
            f"sequence={sequence}"
        )
    model = _named_or_given(model)
    chosen = get_recipe(recipe)
    shapes = shapes_of(model, [skip] if isinstance(skip, str) else skip, experts)
    shapes = _decided(shapes, chosen, clusters[0], tokens)
    if not shapes.blocks:
        raise Float8ConfigError("the model has no numbered blocks, which fully_shard gathers in turn")
    run = Run(tokens, sequence, clusters[0].shards, replicas, checkpoint)
    found: list[StepPrediction] = []
    for cluster in clusters:
        own = replace(run, shards=cluster.shards)
        steps = {
            name: (arm, step_of(shapes, arm, cluster, own))
            for name, arm in _ways(shapes, chosen, reduction, run)
        }
        # Ways are compared with bf16 under the same reduction of gradients.
        plain = steps[BF16_WAY][1]
        found += [_of_way(shapes, way, arm, cluster, own, step, plain) for way, (arm, step) in steps.items()]
    title, native = type(model).__name__, _is_native(chosen, kind)
    return StepEstimate(title, shapes, clusters, run, chosen.name, reduction, tuple(found), native)


def _cluster(gpu: Gpu, gpus: int, per_host: int, network: float, replicas: int, parts: int) -> Cluster:
    counts = {"gpus": gpus, "gpus_per_host": per_host, "replicas": replicas, "tensor_parallel": parts}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise Float8ConfigError(
                f"{name} (--{name.replace('_', '-')}) is a whole number from 1 on, got {count!r}"
            )
    if not network > 0:
        raise Float8ConfigError(f"network (--network) is more than 0 Gbit/s, got {network!r}")
    # Gbit/s to bit/s
    made = Cluster(gpu, gpus, per_host, network * 1e9, replicas, parts)
    if gpus % (replicas * parts) or made.shards % made.neighbours or parts > per_host:
        raise Float8ConfigError(
            f"{gpus} GPUs on hosts of {per_host} do not divide into replicas={replicas} and tensor_parallel={parts}: "
            "GPUs that share a layer lie on one host, and a copy of the weights within one host or on whole ones; take "
            "another number of GPUs, or say how many a host has (gpus_per_host, --gpus-per-host)"
        )
    return made


def _ways(shapes: Shapes, recipe: Recipe, reduction: str, run: Run) -> list[tuple[str, Arm]]:
    made = [
        (BF16_WAY, Arm(reduction=reduction)),
        (COMPUTE, Arm(recipe, gathers=False, reduction=reduction)),
        (BY_WEIGHT, Arm(recipe, scales_by_weight=True, reduction=reduction)),
        (GATHERS, Arm(recipe, reduction=reduction)),
    ]
    if not wire(shapes, recipe, run).amaxes:  # scales that stay in their rows travel with the codes
        made[2:] = [("+ float8 all-gather", Arm(recipe, reduction=reduction))]
    if reduction == FLOAT32:
        made.append(("  gradients in bf16 instead", Arm(recipe, reduction="bf16")))
    return made if reduction == E4M3 else [*made, ("+ gradients in e4m3", Arm(recipe, reduction=E4M3))]


def _of_way(
    shapes: Shapes, way: str, arm: Arm, cluster: Cluster, run: Run, step: Step, plain: Step
) -> StepPrediction:
    return StepPrediction(
        cluster.gpus,
        way,
        step.launched,
        # GPUs that share layers share the tokens.
        run.tokens / cluster.parts / step.launched,
        plain.launched / step.launched,
        step.timeline,
        step.loss,
        step.optimizer,
        fits(memory(divided(shapes, cluster.parts), arm.recipe, run), cluster.gpu),
        replayed=plain.replayed / step.replayed,
        replayed_seconds=step.replayed,
        host_seconds=step.host,
    )
