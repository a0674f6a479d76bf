"""Compares a model in float8 and in bf16 on the same batches, beside the noise that bf16 has by itself.

The noise is that of linear layers whose sums run in another order, which are as exact as before.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from f8sub.convert.convert import convert_to_float8
from f8sub.diagnostics.comparison import NOISE, REFERENCE, Comparison, Gradient
from f8sub.errors import Float8ConfigError, refuse_other_than_a_module, shown
from f8sub.recipe import Recipe
from f8sub.recipes import DEFAULT
from f8sub.torch_compat import is_dtensor
from f8sub.weights.precompute_scales import precompute_scales
from f8sub.weights.weight import is_converted


def checked_loss(loss: object) -> torch.Tensor:
    """Return the loss unchanged, once it is checked.

    Raises:
        Float8ConfigError: it is no tensor of one element, or has no gradient.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        is_what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise Float8ConfigError(f"loss_of returns a loss, a tensor of one element, and returned {is_what}")
    if not loss.requires_grad:
        raise Float8ConfigError(
            "the loss has no gradient: no parameter learns, or loss_of detaches it or runs under torch.no_grad"
        )
    return loss


class OtherOrder(TorchFunctionMode):
    """Permutes rows, columns and features around ``F.linear``, so that all three GEMMs add in another order.

    On paper nothing changes. In bfloat16 the loss moves as far as another kernel or another GPU would move it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch; ``F.linear`` on permuted operands."""
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        return _permuted(*args, **(kwargs or {}))


def _permuted(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    x = input.reshape(-1, input.shape[-1])  # [M, K]
    rows, features, columns = (_order(size, x.device) for size in (*x.shape, weight.shape[0]))
    # Both operands are permuted along K: the same terms, added in another order.
    y = torch.nn.functional.linear(x[rows][:, features], weight[columns][:, features])
    # argsort of a permutation is its inverse.
    y = y[rows.argsort()][:, columns.argsort()]
    y = y if bias is None else y + bias.to(y.dtype)
    return y.view(*input.shape[:-1], weight.shape[0])


def _order(size: int, device: torch.device) -> torch.Tensor:
    """Return a permutation, int64, that is the same at every call and draws nothing from torch's global generators."""
    generator = torch.Generator("cpu").manual_seed(size)
    return torch.randperm(size, generator=generator, dtype=torch.int64, device="cpu").to(device)


LossOf = Callable[[torch.nn.Module, Any], torch.Tensor]


def compare(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    batches: Iterable[Any],
    recipes: str | Recipe | Sequence[str | Recipe] | Mapping[str, Any] = DEFAULT,
    *,
    loss_of: LossOf | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[list[Any]], Iterable[Any]] | None = None,
    **options: Any,
) -> Comparison:
    """Run a model in float8 and in bf16 on the same batches, and compare losses and gradients.

    Each run has a copy of the model, the same batches and the same random numbers, under ``torch.autocast`` to
    ``dtype``. A second run in bf16 adds in another order; a difference of float8 that is no larger means nothing.
    Compiled code runs eagerly. The model, its gradients and torch's generators are as before.

    Args:
        model: plain, before ``convert_to_float8`` and ``fully_shard``, on its device; or a function that makes it.
        batches: a few, as the model takes them, on its device; they are stored in a list.
        recipes: a recipe, several, or a mapping from labels to what ``convert_to_float8`` takes as a recipe.
        loss_of: from model and batch to a loss, a scalar. None calls ``model(**batch)`` of a mapping, ``model(*batch)``
            of a tuple or list, else ``model(batch)``, and takes its ``loss``, or what it returned.
        optimizer: from the parameters to an optimizer. Each run then takes a step after each batch, so that losses are
            curves, and gradients are those of the first batch. None leaves the weights as they are and adds the
            gradients of all batches.
        dtype: that of the runs beside float8, and of what float8 leaves.
        progress: given the batches of a run, it returns them again; to show how far it is, such as ``tqdm.tqdm``.
        options: more arguments of ``convert_to_float8``, such as ``skip``.

    Raises:
        Float8ConfigError: a model that is converted, sharded or of DDP, no batch, or a loss without a gradient.
    """
    made = model if isinstance(model, torch.nn.Module) else _made_by(model)
    _check(made)
    has_many = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if not has_many or isinstance(batches, Mapping | str):
        raise Float8ConfigError(
            f"compare was given no batches but a {type(batches).__name__}; give a list of a few"
        )
    # Every run reads them; an iterator would be empty after the first.
    seen = list(batches)
    if not seen:
        raise Float8ConfigError("compare was given no batches; a few are enough")
    run = _Runs(made, seen, loss_of or _loss_of, optimizer, dtype, progress or iter)
    losses: dict[str, list[float]] = {}
    losses[REFERENCE], reference = run(None)
    losses[NOISE], found = run(OtherOrder())
    gradients = _differences(NOISE, found, reference)
    for label, recipe in _labelled(recipes).items():
        convert = functools.partial(convert_to_float8, recipe=recipe, **options)
        losses[label], found = run(None, convert)
        gradients += _differences(label, found, reference)
    return Comparison(losses, tuple(gradients), trained=optimizer is not None)


def _made_by(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    # A class is a function, too, where it takes no arguments.
    if isinstance(make, type) and any(
        each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in inspect.signature(make).parameters.values()
    ):
        raise Float8ConfigError(
            f"compare takes a model, or a function without arguments that makes one; got {shown(make)}"
        )
    made = make() if callable(make) else make
    refuse_other_than_a_module("compare", made)
    return made


def _check(model: torch.nn.Module) -> None:
    if next(model.parameters(), None) is None:
        raise Float8ConfigError("compare was given a model without parameters, which has no gradients")
    if isinstance(model, DistributedDataParallel) or any(map(is_dtensor, model.parameters())):
        raise Float8ConfigError(
            "compare copies the model, and this one is spread over ranks; call it before fully_shard, "
            "parallelize_module and DistributedDataParallel"
        )
    if any(map(is_converted, model.modules())):
        raise Float8ConfigError(
            "compare converts copies of the model, and this one is converted already; call it before "
            "convert_to_float8, or convert_from_float8 first"
        )


def _labelled(recipes: Any) -> dict[str, Any]:
    if isinstance(recipes, Mapping):
        labelled = dict(recipes)
    else:
        several = [recipes] if isinstance(recipes, str | Recipe) else recipes
        labelled = {recipe if isinstance(recipe, str) else recipe.name: recipe for recipe in several}
    if taken := labelled.keys() & {REFERENCE, NOISE}:
        raise Float8ConfigError(
            f"{sorted(taken)[0]!r} is the label of a run without float8; give another label"
        )
    return labelled


def _loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        found = model(**batch)
    else:
        found = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = getattr(found, "loss", found)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise Float8ConfigError(
            f"the model returned no loss but {kind}; give loss_of=, which makes one of a batch"
        )
    return loss


class _Runs(NamedTuple):
    """Runs copies of a model, which differ only in what is done to them and around their forward."""

    model: torch.nn.Module
    batches: list[Any]
    loss_of: LossOf
    optimizer: Callable[[Any], torch.optim.Optimizer] | None
    dtype: torch.dtype
    progress: Callable[[list[Any]], Iterable[Any]]

    def __call__(
        self, mode: OtherOrder | None, change: Callable[[torch.nn.Module], Any] | None = None
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Run one copy; return the losses by batch, and the gradients by parameter."""
        # All runs begin with the same weights.
        model = copy.deepcopy(self.model)
        model.zero_grad()
        if change is not None:
            change(model)
        optimizer = None if self.optimizer is None else self.optimizer(model.parameters())
        device = next(model.parameters()).device
        losses, gradients = [], {}
        with ExitStack() as exits:
            on_cpu = device.type == "cpu"
            # The generators of the user are as before afterwards.
            generators = torch.random.fork_rng(
                [] if on_cpu else [device], device_type="cuda" if on_cpu else device.type
            )
            exits.enter_context(generators)
            exits.enter_context(torch.compiler.set_stance("force_eager"))
            for number, batch in enumerate(self.progress(self.batches)):
                # the same dropout in every run
                torch.manual_seed(number)
                loss = self._loss(model, batch, mode, device)
                loss.backward()
                # Read at the end, so that the host does not wait for each batch.
                losses.append(loss.detach())
                # After a step weights differ, and gradients of later batches with them.
                if optimizer is None or number == 0:
                    gradients = _gradients(model)
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
                    if change is not None:
                        precompute_scales(model)
        return [float(loss) for loss in losses], gradients

    def _loss(
        self, model: torch.nn.Module, batch: Any, mode: OtherOrder | None, device: torch.device
    ) -> torch.Tensor:
        with ExitStack() as exits:
            exits.enter_context(torch.autocast(device.type, self.dtype))
            if mode is not None:
                exits.enter_context(mode)
            loss = self.loss_of(model, batch)
        return checked_loss(loss)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _differences(
    run: str, found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> list[Gradient]:
    """Return the cosine and relative error of each gradient that is not 0."""
    rows = []
    for name, exact in reference.items():
        # The cosine is so near 1 that float32 loses the difference.
        a, b = found[name].flatten().double(), exact.flatten().double()
        size = b.norm()
        if not float(size):
            continue
        cosine = a @ b / (a.norm() * size)
        rows.append(Gradient(run, name, float(cosine), float((a - b).norm() / size)))
    return rows
