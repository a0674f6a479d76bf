"""Where the core reaches past torch's documented interface, and looks for what torch's versions differ in."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import _composable_state, distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import TypeIs

from f8sub.errors import Float8ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Function = TypeVar("Function", bound=Callable[..., Any])


def is_dtensor(x: object) -> "TypeIs[DTensor]":
    """``isinstance(x, DTensor)`` without an import of its module, which takes half a second.

    What made a DTensor imported it. So where one is at hand ``torch.distributed.tensor`` is there, by this name.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_fsdp_module(x: object) -> "TypeIs[FSDPModule]":
    """``isinstance(x, FSDPModule)``, likewise."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(x, module.FSDPModule)


def default_store() -> Any:
    """The key-value store that the default process group was made with."""
    return distributed_c10d._get_default_store()


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether the group was destroyed neither by itself nor with the default one."""
    return group in distributed_c10d._world.pg_map


def all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """``dist.all_gather_single``, which torch before 2.13 calls ``all_gather_into_tensor``."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(output, input, group=group)


@functools.cache
def cpu_has_amx() -> bool:
    """Whether this CPU has AMX: tiles of bf16 and int8 at the least."""
    return torch.cpu._is_amx_tile_supported()


@functools.cache
def cpu_has_amx_fp16() -> bool:
    """Whether the CPU's tiles take float16 too."""
    return torch.cpu._is_amx_fp16_supported()


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` without its look for functorch's dead wrappers.

    Inside a transform, which takes functions with a ``setup_context`` alone, it is a ``Float8ConfigError``.
    """
    if torch.compiler.is_compiling():
        return function.apply(*args)
    if torch._C._are_functorch_transforms_active():
        raise Float8ConfigError(
            "a float8 layer was called inside a transform of torch.func (grad, vjp, jvp, vmap, jacrev, ...), and only "
            "plain autograd differentiates it: call loss.backward() or torch.autograd.grad, for gradients of each "
            "sample in a loop over samples, or transform the model before convert_to_float8"
        )
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of ``torch.autocast`` on a type of device; None where it is off, and on meta, where torch raises."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def param_dtypes(
    modules: Iterable[torch.nn.Module],
) -> dict[tuple[torch.nn.Module, str], torch.dtype | None]:
    """The ``param_dtype`` of every parameter of ``modules`` that FSDP2 gathers, by module and name.

    Of no other module: there may be models that nothing else holds any more.
    """
    found: dict[tuple[torch.nn.Module, str], torch.dtype | None] = {}
    asked = set(modules)
    for _, param in fsdp_params():
        info = param._module_info
        owners = [(info.module, info.param_name)]
        owners += zip(info.shared_modules, info.shared_param_names, strict=True)
        ours = [owner for owner in owners if owner[0] in asked]
        # The policy is the parameter's: since torch 2.15 those of one group may have several.
        found.update(dict.fromkeys(ours, param.mp_policy.param_dtype))
    return found


def reduce_dtype(group: Any) -> torch.dtype:
    """The dtype that FSDP2 reduces the gradients of a group in, if all of them are there.

    Where the policy has no ``reduce_dtype`` it is ``param_dtype`` until torch 2.14. From 2.15 on it is what the
    parameters' ``grad_dtype`` promote to, which is the sharded parameter's own dtype unless it was set.
    """
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad] or group.fsdp_params
    found = []
    for param in trained:
        policy, sharded = param.mp_policy, param.sharded_param
        computed = policy.param_dtype or sharded.dtype
        if hasattr(type(param), "unsharded_grad_dtype"):
            computed = sharded.grad_dtype or computed  # None: whatever backward makes
        found.append(policy.reduce_dtype or computed)
    promoted: torch.dtype = functools.reduce(torch.promote_types, found)
    return promoted


def fsdp_params() -> Iterator[tuple[Any, Any]]:
    """Every parameter that FSDP2 shards, after the group that it is gathered with."""
    for module, reference in list(_composable_state._module_state_mapping.items()):
        if is_fsdp_module(module) and (state := reference()) is not None:
            yield from ((group, param) for group in param_groups(state) for param in group.fsdp_params)


def param_groups(state: Any) -> list[Any]:
    """An FSDP2 module's groups of parameters: one until torch 2.11, one for each mesh from 2.12 on."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Outside of all dispatch modes, FakeTensorMode among them: tensors made here are real and may be kept."""
    return _disable_current_modes()


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether what is done to ``tensor`` now is recorded in a CUDA graph, and done when that is replayed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def tensors_in_storage(tensor: torch.Tensor) -> int:
    """How many tensors, itself among them, and NumPy arrays lie in a tensor's storage."""
    storage = tensor.untyped_storage()  # the Python object counts, too
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def bound_hook(form: Callable[..., Any]) -> Callable[..., Any]:
    """A class whose instances bind an FSDP2 hook to its tensor: ``bound_hook(form)(form, tensor)``.

    They have their signature stored: FSDP2 (2.11 to 2.15) inspects it on every call, 0.8 us, and 30 us else.
    """
    _, *parameters = inspect.signature(form).parameters.values()
    made: Callable[..., Any] = type(
        form.__name__, (functools.partial,), {"__signature__": inspect.Signature(parameters)}
    )
    return made


def constant_result(function: Function) -> Function:
    """``torch.compiler.assume_constant_result`` without its ``import torch._dynamo``, which takes a second.

    While ``torch.compile`` traces, the function is called with the values of its arguments, and those are guarded on.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(function: Function) -> Function:
    """``torch.compiler.disable`` that does not import ``torch._dynamo`` before something else did."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return torch.compiler.disable(function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(Function, call)
