"""A copy of a model to run one forward of: its modules in high precision, on meta or with the model's own weights.

The copy has the modules' attributes and none of their hooks, so neither FSDP2 nor f8sub takes notice of its forward.
Lists and dicts are copied, and buffers cloned, so that a forward that writes to them leaves the model as it was.
"""

import copy
import functools
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from f8sub.convert.class_swap import plain_class_of
from f8sub.experts.module import Float8Experts, plain_class
from f8sub.linear.float8_linear import Float8Linear
from f8sub.torch_compat import is_fsdp_class
from f8sub.weights.weight import Weight, local_tensor, master_of

HOOKS_THAT_MAKE_WEIGHTS = "torch.nn.utils."
"""Where hooks before a forward are from that compute a weight: prune, and the older weight_norm and spectral_norm."""

META_CHOICES = {"_attn_implementation_internal": "eager", "_experts_implementation_internal": "batched_mm"}
"""Attributes of a config of transformers, and their values with which a forward looks at no value of a tensor.

Products with weights are the same with all values.
"""

PADDING_WARNING = "warn_if_padding_and_no_attention_mask"
"""What models of transformers call to look for padding in their inputs' values, and to warn."""


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, the whole one of a shard, without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def why_not_as_it_is(model: torch.nn.Module) -> str | None:
    """Why a model's weights cannot be multiplied by on this rank; None where they can."""
    for fqn, parameter in model.named_parameters():
        local = local_tensor(parameter)
        if local is not parameter:
            return f"{fqn} is sharded"
        if parameter.is_meta:
            return f"{fqn} is on meta"
        if isinstance(local, Weight) and master_of(local) is None:
            return f"{fqn} has float8 codes alone"
    return None


def _as_it_is(parameter: torch.Tensor) -> torch.Tensor:
    local = local_tensor(parameter)
    master = master_of(local) if isinstance(local, Weight) else None
    return (local if master is None else master.plain).detach()


class Copies:
    """Modules of a model and their copies.

    Args:
        model: converted or not, sharded or not.
        with_values: whether the copy multiplies by the model's own weights; else everything is on meta.
        training: whether modules are in training; None for as they are.
    """

    def __init__(self, model: torch.nn.Module, *, with_values: bool, training: bool | None = None) -> None:
        self._with_values = with_values
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []  # alive, so that no other object gets an id of theirs
        self._modules = {id(module): module for module in model.modules()}
        values = {p: _as_it_is(p) if with_values else on_meta(p) for p in model.parameters()}
        storages = Counter(value.untyped_storage()._cdata for value in values.values())
        for parameter, value in values.items():
            # Told apart by its storage, which torch's recurrent layers have one of for all of their weights.
            apart = value.clone() if storages[value.untyped_storage()._cdata] > 1 else value
            self._keep(parameter, torch.nn.Parameter(apart, requires_grad=False))
        for module in self._modules.values():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(f"a {type(module).__name__} has no Python forward")
            cls: Any = _plain(module)
            self._keep(module, cls.__new__(cls))
        for module in self._modules.values():
            self._fill(module, training)

    def of(self, module: torch.nn.Module) -> Any:
        """The copy of a module; of one that ``torch.compile`` wrapped that of what is in it."""
        return self._made[id(module)]

    def _keep(self, original: Any, made: Any) -> None:
        self._originals.append(original)
        self._made[id(original)] = made

    def _fill(self, module: torch.nn.Module, training: bool | None) -> None:
        made = self.of(module)
        state = dict(vars(module))
        for name in ("_parameters", "_buffers", "_modules"):
            state[name] = {key: self._copied(each) for key, each in state[name].items()}
        for name, value in state.items():
            if "_hooks" in name and isinstance(value, OrderedDict):
                state[name] = OrderedDict(
                    (key, hook)
                    for key, hook in value.items()
                    if name == "_forward_pre_hooks" and _makes(hook)
                )
            elif name not in ("_parameters", "_buffers", "_modules"):
                state[name] = self._copied(value)
        if not self._with_values and hasattr(module, PADDING_WARNING):
            state[PADDING_WARNING] = _nothing
        state["_compiled_call_impl"] = None
        if training is not None:
            state["training"] = training
        if (
            isinstance(module, Float8Experts)
            and module.seam.forward is not None
            and not _is_of_transformers(module)
        ):
            state["forward"] = functools.partial(module.seam.forward, made)
        if "_orig_mod" in state["_modules"]:  # torch.compile's wrapper, whose forward is compiled
            state["forward"] = state["_modules"]["_orig_mod"].__call__
        made.__dict__.update(state)

    def _copied(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, torch.Tensor):
            self._keep(value, local_tensor(value).detach().clone() if self._with_values else on_meta(value))
        elif isinstance(value, types.MethodType) and id(value.__self__) in self._modules:
            return types.MethodType(value.__func__, self._made[id(value.__self__)])
        elif type(value) is functools.partial:
            given = {name: self._copied(each) for name, each in value.keywords.items()}
            return functools.partial(self._copied(value.func), *map(self._copied, value.args), **given)
        elif type(value) in (list, tuple, set):
            return type(value)(map(self._copied, value))
        elif type(value) in (dict, OrderedDict):
            return type(value)((key, self._copied(each)) for key, each in value.items())
        elif not self._with_values and any(name in getattr(value, "__dict__", ()) for name in META_CHOICES):
            made = copy.copy(value)
            vars(made).update({name: META_CHOICES[name] for name in META_CHOICES if name in vars(made)})
            self._keep(value, made)
        else:
            return value
        return self._made[id(value)]


def _nothing(*args: Any) -> None:
    pass


def _plain(module: torch.nn.Module) -> type[torch.nn.Module]:
    """A module's class without what FSDP2 and f8sub put before it."""
    if isinstance(module, Float8Experts):
        return plain_class(module)
    cls: Any = next(cls for cls in type(module).__mro__ if not is_fsdp_class(cls))
    return plain_class_of(cls) if issubclass(cls, Float8Linear) else cls


def _makes(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(HOOKS_THAT_MAKE_WEIGHTS)


def _is_of_transformers(module: torch.nn.Module) -> bool:
    return plain_class(module).__module__.startswith("transformers.")  # type: ignore[arg-type]
