"""Hooks f8sub into a trainer of torchtitan's, of any version: scales, a monitor, gradients, checkpointed blocks.

Scales are computed after each optimizer step, over all parts of the model. A monitor runs beside the trainer by the
option ``monitor_every``; torchtitan 0.3 launches the steps that it samples, though it would replay a CUDA graph of
them. Float8 reductions of gradients are set up when a model is first called.
"""

import functools
import importlib.metadata
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from f8sub.delayed.state import ScalingState
from f8sub.diagnostics.monitor import Monitor
from f8sub.diagnostics.writers import jsonl
from f8sub.errors import Float8ConfigError, first_and_more
from f8sub.gradients.reduce_gradients import GradientReduction, reduce_gradients_in_float8
from f8sub.linear.checkpointing import checkpoint_policy
from f8sub.torch_compat import fsdp_params, is_checkpointed, is_dtensor, module_of
from f8sub.weights.checks import gather_values
from f8sub.weights.layout import sharded_dims
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.precompute_scales import register_precompute_hook
from f8sub.weights.weight import is_converted, local_tensor

if TYPE_CHECKING:
    from f8sub.diagnostics.statistics import Statistics

_MODULES = ("torchtitan.distributed.cudagraph", "torchtitan.distributed.cuda_graph")
"""Of 0.3, and after."""


def launch_next() -> None:
    """Have torchtitan launch its next forward and backward, and neither capture nor replay them.

    Its wrapper launches a call while it has some to warm up with, also after a capture. A launched call accumulates
    into the gradients that the graph does, which torchtitan keeps in place, and takes memory beside the graph's.

    Raises:
        Float8ConfigError: torchtitan makes graphs in a way that is not known.
    """
    for wrapper in _wrappers():
        # Its counter of launched calls to come, which each one lowers.
        wrapper._warmup_remaining = 1


def _wrappers() -> list[Any]:
    """Return the graphs of this process; none where it was told to capture none, or knows none."""
    module = next((sys.modules[name] for name in _MODULES if name in sys.modules), None)
    if module is None:
        return []
    found = getattr(getattr(module, "_manager", None), "_wrappers", None)
    if not isinstance(found, list) or not all(hasattr(wrapper, "_warmup_remaining") for wrapper in found):
        raise Float8ConfigError(
            f"torchtitan {importlib.metadata.version('torchtitan')} makes CUDA graphs in a way that f8sub does not "
            f"know ({module.__name__}; 0.3.0 is known), so a monitor's sampled steps cannot be launched: give "
            "--training.disable_cuda_graphs, or leave monitor_every out"
        )
    return found


PRECOMPUTE = "_f8sub_precompute_scales"
"""Attribute of a converted model: whether scales are wanted after each step. Copies for pipeline stages keep it."""

_attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def attach(
    optimizers: torch.optim.Optimizer, model_parts: Sequence[torch.nn.Module], parallel_dims: Any = None
) -> None:
    """Have the scales of all ``model_parts`` computed after every step of torchtitan's container of optimizers; once.

    The signature is that of ``ModelSpec.post_optimizer_build_fn``: the parts are sharded by now, and no step is taken.

    Raises:
        Float8ConfigError: no part was converted, or what ``check_weights`` and ``check_compiled`` raise.
    """
    # A config, an override and the first step may each ask for it.
    if optimizers in _attached:
        return
    if not any(hasattr(part, PRECOMPUTE) for part in model_parts):
        raise Float8ConfigError(
            "scales are to be precomputed and the model has no float8 layers: convert it too, with the override "
            "f8sub.titan.float8, or by what f8sub.titan has in code"
        )
    check_weights(model_parts)
    check_compiled(model_parts)
    register_precompute_hook(optimizers, model_parts)
    if any(isinstance(module, ScalingState) for part in model_parts for module in part.modules()):
        _compile_before_capture(optimizers)
    _attached.add(optimizers)


def _compile_before_capture(optimizers: torch.optim.Optimizer) -> None:
    """Have the second step launched, for which blocks with amax histories are compiled once more.

    From the first step on all of their scales are computed. torchtitan captures the second step otherwise.
    """

    def after_first_step(*step: Any) -> None:
        handle.remove()
        launch_next()

    handle = optimizers.register_step_post_hook(after_first_step)


def check_at_first_forward(model: torch.nn.Module) -> None:
    """Have ``check_compiled`` look at a converted model, and at each copy for a pipeline, when it is first called.

    The check across ranks looks at the weights then. Where ``attach`` is called earlier, both are looked at earlier.
    """
    model.register_forward_pre_hook(_check_compiled_once)


def _check_compiled_once(model: torch.nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    check_compiled([model])
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _check_compiled_once:
            del model._forward_pre_hooks[key]


def check_weights(model_parts: Sequence[torch.nn.Module]) -> None:
    """Check that FSDP2 will gather every weight as it was converted to.

    Raises:
        Float8ConfigError: names the layers whose weight is not f8sub's any more.
    """
    weights = {
        fqn if name == "weight" else f"{fqn}.{name}": (module, name)
        for part in model_parts
        for fqn, module in part.named_modules()
        if is_converted(module)
        for name in module._f8sub.conversion.names_of(module)
    }
    lost = {}
    for fqn, (module, name) in weights.items():
        parameter = module._parameters.get(name)
        local = None if parameter is None else local_tensor(parameter)
        gathered = module._f8sub.conversion.record_of(module, name).gathered
        if not (isinstance(local, MasterWeight) and (hasattr(local, "fsdp_pre_all_gather") or not gathered)):
            # Another tensor took the weight's place: FSDP2 finds no hooks on it and would
            # gather high precision silently.
            lost[fqn] = type(local).__name__
    if lost:
        listed = ", ".join(f"{fqn} ({kind})" for fqn, kind in lost.items())
        raise Float8ConfigError(
            f"f8sub no longer holds {len(lost)} of the converted weights ({len(weights)} in all), which FSDP2 would "
            f"gather in high precision: {listed}. Something between conversion and fully_shard put another tensor in "
            "their place: copy into weights, do not assign them"
        )


def check_compiled(model_parts: Sequence[torch.nn.Module]) -> None:
    """Check that no weight with amax histories that parallelism cuts is gathered as float8 in a compiled block.

    Raises:
        Float8ConfigError: names the first of them; the first forward would fail, in dynamo's words.
    """
    layers = {
        layer: f"{fqn}.{name}"
        for part in model_parts
        for fqn, block in part.named_modules()
        if _is_compiled(block)
        for name, layer in block.named_modules()
        if is_converted(layer) and layer._f8sub.float8_all_gather and _is_cut_twice(layer)
        if layer._f8sub.plan.recipe.scaling is not None
    }
    plain = _gathered_as_local(layers)
    found = [fqn for layer, fqn in layers.items() if layer not in plain]
    if found:
        raise Float8ConfigError(
            f"{first_and_more(found)}: sharded by tensor or expert parallelism, gathered as float8 by FSDP2 and "
            "scaled by amax histories, which torch.compile cannot trace together, and torchtitan compiles whole blocks "
            "or nothing. Take a recipe without delayed scaling, leave out one of --compile.enable, "
            "tensor_parallel_degree, expert_parallel_degree and enable_fsdp_float8_all_gather, or take spmd_types for "
            "spmd_backend"
        )


def _is_cut_twice(layer: Any) -> bool:
    weights = [layer._parameters.get(name) for name in layer._f8sub.weights]
    return any(is_dtensor(weight) and len(sharded_dims(weight)) > 1 for weight in weights)


@functools.cache
def attach_at_first_step() -> None:
    """Attach to torchtitan's optimizers before their first step, where neither config nor override did it before."""
    register_optimizer_step_pre_hook(_attach_to_container)


def _attach_to_container(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Attach where the optimizer is torchtitan's container, which alone knows the model's parts and steps each."""
    parts = getattr(optimizer, "model_parts", ())
    if any(getattr(part, PRECOMPUTE, False) for part in parts):
        attach(optimizer, parts)


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` was called, or this is what ``torch.compile(module)`` returned."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _gathered_as_local(layers: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """Return those of ``layers`` whose DTensor parameters FSDP2 gathers as plain tensors of spmd_types' kind.

    From torch 2.14 on; what is a DTensor before it is sharded is a DTensor after it is gathered.
    """
    local = {module_of(p) for _, p in fsdp_params() if getattr(p, "is_spmd_types", False)}
    return local.intersection(layers)


WANTED = "_f8sub_monitor"
"""Attribute of a converted model: one step of how many is measured, and the file. Copies for pipelines keep it."""

FILE = "numerics.jsonl"

_begun: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[Monitor, _File]]" = weakref.WeakKeyDictionary()
"""The monitors of parts whose first step runs: an optimizer's first step settles whose statistics go together."""


_stepped: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
"""Parts whose first step ended."""

REDUCTIONS: "weakref.WeakKeyDictionary[torch.nn.Module, GradientReduction]" = weakref.WeakKeyDictionary()
"""The float8 reductions of a part's gradients, which are measured in the steps that are sampled."""


class _File:
    """Writes rows, with steps as the trainer counts them, from 1 on; ``path`` is settled in the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, step: int, rows: "Sequence[Statistics]") -> None:
        # A monitor counts from 0.
        jsonl(self.path)(step + 1, [row._replace(step=step + 1) for row in rows])


def monitor_from_first_forward(model: torch.nn.Module) -> None:
    """Have a monitor begin when the model, or a copy of it for a pipeline, is first called in training."""
    model.register_forward_pre_hook(_begin)
    _watch_first_steps()


@functools.cache
def _watch_first_steps() -> None:
    register_optimizer_step_pre_hook(_attach)


def _begin(model: torch.nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _begin:
            del model._forward_pre_hooks[key]
    if any(map(is_converted, model.modules())):
        every, path = getattr(model, WANTED)
        file = _File(Path(path))
        monitor = Monitor(model, every, to=file)
        # Never left: nothing tells which step is torchtitan's last.
        monitor.__enter__()
        _begun[model] = monitor, file


def _attach(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # The container is the one optimizer that knows the parts of the model; it steps those of each part.
    parts = [part for part in getattr(optimizer, "model_parts", ()) if hasattr(part, WANTED)]
    # Other optimizers, and later steps of the container.
    if not any(part in _begun for part in parts):
        return
    for part, (ranks, group) in zip(parts, _ranks_of_the_same_layers(parts), strict=True):
        if part not in _begun:  # which has no float8 layer
            continue
        monitor, file = _begun.pop(part)
        if ranks[0]:  # a later stage of a pipeline
            # One file per stage: its first rank writes, and stages have other layers.
            file.path = file.path.with_name(f"{file.path.stem}.{ranks[0]}{file.path.suffix}")
        monitor.group = group
        monitor.attach(optimizer)
        optimizer.register_step_post_hook(functools.partial(_launch_samples, monitor, part))


def _launch_samples(monitor: Monitor, part: torch.nn.Module, *step: Any) -> None:
    """Launch sampled steps, in a post-hook of optimizer steps that runs after the monitor's own.

    No graph is replayed in a step that is sampled. Nor is one captured in the second step: the first one is sampled and
    runs compiled blocks eagerly, so the second one compiles them, and what Triton tunes then cannot be captured.
    """
    if monitor.sampling or part not in _stepped:
        launch_next()
    _stepped.add(part)
    if monitor.sampling and part in REDUCTIONS:
        REDUCTIONS[part].measure_next()


def _ranks_of_the_same_layers(
    parts: Sequence[torch.nn.Module],
) -> list[tuple[list[int], dist.ProcessGroup | None]]:
    """Return the ranks of each part's pipeline stage, and their group; None where all ranks have the same layers."""
    if not dist.is_initialized():
        return [([0], None)] * len(parts)
    own = [[n for n, each in part.named_modules() if is_converted(each)] for part in parts]
    stages: dict[str, list[int]] = {}
    for rank, of_parts in enumerate(gather_values(own)):
        for names in of_parts:
            stages.setdefault(repr(names), []).append(rank)
    world = list(range(dist.get_world_size()))
    # Every rank makes every group, in one order: new_group is a collective of all ranks.
    groups = {stage: None if ranks == world else dist.new_group(ranks) for stage, ranks in stages.items()}
    return [(stages[repr(names)], groups[repr(names)]) for names in own]


def reduce_from_first_forward(model: torch.nn.Module) -> None:
    """Have the gradients of a model, and of each copy for a pipeline, reduced in float8 from when it is first called.

    torchtitan shards it after it was converted, and tells nobody. A job of one rank reduces nothing. Where a monitor is
    wanted, it has their errors, too.
    """
    model.register_forward_pre_hook(_reduce)


def _reduce(model: torch.nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _reduce:
            del model._forward_pre_hooks[key]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every, _ = getattr(model, WANTED, (0, ""))
        # The model is sharded by now, and no gradient was reduced yet.
        REDUCTIONS[model] = reduce_gradients_in_float8(model, measure=every > 0, measure_every=max(1, every))


KEEP = "_f8sub_checkpoint_policy"
"""Attribute of a converted model: what its policy keeps. Copies for pipelines have it, too."""


def set_policy(model: torch.nn.Module, args: Any) -> None:
    """Give checkpointed blocks their policy, in a pre-hook of the model's first forward.

    torchtitan wraps blocks after the model was converted, and tells nobody. Code is compiled in the first call.

    Raises:
        Float8ConfigError: no block is checkpointed.
    """
    if torch.compiler.is_compiling():
        return
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is set_policy:
            del model._forward_pre_hooks[key]
    # On the model, because a copy for a pipeline stage keeps attributes and hooks, and no closure of ours.
    keep = getattr(model, KEEP)
    blocks: list[Any] = [module for module in model.modules() if is_checkpointed(module)]
    if not blocks:
        raise Float8ConfigError(
            f"checkpoint_policy={keep!r} is for blocks that activation checkpointing wraps, and there is none: ask "
            "torchtitan for selective checkpointing, or leave the option out"
        )
    for block in blocks:
        # What ``checkpoint_wrapper`` would have been given, had torchtitan asked for a policy.
        block.checkpoint_fn = functools.partial(block.checkpoint_fn, context_fn=checkpoint_policy(keep))
