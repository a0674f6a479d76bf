"""The one file where f8sub reaches past torch's documented interface, and looks for what torch's versions differ in.

[Note: what is checked] Names without an underscore stay for years; those with one change without a word. So they are
bound or wrapped here, and each ``Need`` lists what f8sub has to find for one purpose: names, the parameters of
functions and operators, the attributes of FSDP2's objects. ``require`` looks at a need once, when a model is first
converted (``CONVERSION``) or sharded (``GATHER``), or gradients are to be reduced (``REDUCTION``), in 0.3 ms or less.
What is missing is one ``Float8ConfigError``; nothing is gathered or reduced in a way that was only guessed.

A name that is missing when f8sub is imported is a stand-in until then, which raises the same error when it is used.

torch's public ``scaled_mm`` and ``scaled_grouped_mm`` are other operators (``_scaled_mm_v2``) and do not serve. A call
takes the host 3 us more (17 instead of 14 on a CPU, torch 2.13 to 2.15). torch 2.11 has them neither on CPUs nor in
dynamo, no version to 2.15 counts their FLOPs, and checkpointing policies that others wrote name ``aten._scaled_mm``.
``torch.nn.functional.grouped_mm`` is the private operator, and is used.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
import itertools
import logging
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from typing_extensions import TypeIs, override

from f8sub.errors import Float8ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Function = TypeVar("Function", bound=Callable[..., Any])

WORKS_WITH = "2.11 to 2.15"
"""The versions of torch that all of f8sub's tests passed with."""


@dataclass(frozen=True, eq=False)
class Need:
    """The names and attributes that f8sub has to find in torch for one purpose.

    Attributes:
        purpose: for the error.
        instead: what works without, for the error; empty where nothing does.
        names: dotted paths, each with the parameters that are given to what is there, "" where it is only to be there.
            After "exactly" they are all that there are: f8sub takes the place of such an operator.
        attributes: those of FSDP2's and DDP's objects, by the name of their class.
    """

    purpose: str
    instead: str
    names: dict[str, str]
    attributes: dict[str, str] = field(default_factory=dict)


CONVERSION = Need(
    "converting a model",
    "",
    {
        "torch.ops.aten._scaled_mm.default": "self mat2 scale_a scale_b out_dtype use_fast_accum",
        "torch._scaled_mm": "",
        "torch._foreach_copy_": "",
        "torch._foreach_mul_": "",
        "torch._foreach_norm": "",
        "torch._foreach_sub_": "",
        "torch._foreach_zero_": "",
        "torch.Tensor._make_subclass": "",
        "torch.Tensor._make_wrapper_subclass": "",
        "torch._C.DisableTorchFunctionSubclass": "",
        "torch._C._DisableTorchDispatch": "",
        "torch._C._are_functorch_transforms_active": "",
        "torch._C._autograd._top_saved_tensors_default_hooks": "",
        "torch._C._current_autograd_node": "",
        "torch._C._current_graph_task_id": "",
        "torch._C._disabled_torch_function_impl": "",
        "torch._C._increment_version": "",
        "torch._C._dynamo.guards._empty_strided_cpu": "",
        "torch._C._dynamo.guards._empty_strided_cuda": "",
        "torch._C._dynamo.guards._reinterpret_tensor": "",
        "torch._C._len_torch_dispatch_stack": "",
        "torch._C._storage_Use_Count": "",
        "torch._C._will_engine_execute_node": "",
        "torch.autograd.grad_mode._unsafe_preserve_version_counter": "tensors",
        "torch.cpu._is_amx_fp16_supported": "",
        "torch.cpu._is_amx_tile_supported": "",
        "torch._subclasses.FakeTensorMode": "",
        "torch.utils._python_dispatch.TorchDispatchMode": "",
        "torch.utils._python_dispatch._disable_current_modes": "",
        "torch.utils._python_dispatch.return_and_correct_aliasing": "func args kwargs out",
        "torch.utils._pytree.tree_leaves": "tree",
        "torch.utils._pytree.tree_map_only": "",
    },
)

COMPILATION = Need(
    "torch.compile",
    "train without torch.compile",
    {
        "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx": "",
        "torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer": "fn",
        "torch._higher_order_ops.wrap.TagActivationCheckpoint": "",
        "torch.compiler._is_compiling_flag": "",
        "torch.fx.experimental.proxy_tensor.get_proxy_mode": "",
        "torch.fx.traceback.get_current_meta": "",
        "torch.ops._c10d_functional.all_reduce.default": "input reduce_op group_name",
        "torch.ops._c10d_functional.all_to_all_single.default": "",
        "torch.ops._c10d_functional.reduce_scatter_tensor.default": "",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "",
        "torch.utils.checkpoint._CachingTorchDispatchMode": "",
    },
)

GRAPHS = Need(
    "graph_step",
    "launch each step",
    {
        "torch.utils._pytree.tree_flatten": "tree",
        "torch.utils._pytree.tree_unflatten": "leaves treespec",
        "torch.nn.modules.module._global_forward_pre_hooks": "",
        "torch.nn.modules.module._global_forward_hooks": "",
        "torch.nn.modules.module._global_backward_pre_hooks": "",
        "torch.nn.modules.module._global_backward_hooks": "",
    },
    {
        "FSDPState": "_comm_ctx _modules_to_run_forward _state_ctx _training_state",
        "FSDPParamGroup": "_all_gather_result _post_forward_indices _to_sharded _training_state fsdp_params",
    },
)

TENSOR_PARALLELISM = Need(
    "tensor parallelism",
    "shard the model by fully_shard alone",
    {
        "torch.distributed._functional_collectives.all_reduce": "self reduceOp group",
        "torch.distributed._functional_collectives.wait_tensor": "tensor",
    },
)

LOADING = Need(
    "loading checkpoints into sharded weights",
    "load them before the model is sharded",
    {
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": (
            "global_shape mesh placements"
        ),
    },
)

EXPERTS = Need(
    "experts' products by cuBLASLt",
    "take another backend",
    {
        "torch.ops.aten._scaled_grouped_mm.default": "self mat2 scale_a scale_b offs out_dtype use_fast_accum",
        "torch._scaled_grouped_mm": "",
    },
)

EXCHANGES = Need(
    "tokens that cross between ranks in float8",
    "send them as they are",
    {
        "torch.distributed._functional_collectives.all_to_all_single": (
            "self output_split_sizes input_split_sizes group"
        ),
        "torch.distributed._functional_collectives.wait_tensor": "tensor",
    },
)

GATHER = Need(
    "FSDP2's all-gather of weights in float8",
    "convert with float8_all_gather=False",
    {
        "torch.distributed._composable_state._module_state_mapping": "",
        "torch.distributed.distributed_c10d._get_default_store": "",
        "torch.distributed.distributed_c10d._get_object_coll_device": "group",
        "torch.distributed.distributed_c10d._world.pg_map": "",
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "self",
        "torch.ops.fsdp.all_gather_copy_in.default": (
            "exactly all_gather_inputs all_gather_output inp_split_sizes all_gather_input_numel rank"
        ),
    },
    {
        "FSDPParam": "_module_info _sharded_param_data mp_policy sharded_param",
        "FSDPParamGroup": (
            "_all_gather_result device fsdp_params is_unsharded mesh_info post_backward post_forward_mesh_info "
            "reduce_grads"
        ),
        "ParamModuleInfo": "module param_name shared_modules shared_param_names",
    },
)

REDUCTION = Need(
    "reduce_gradients_in_float8",
    "do without reduce_gradients_in_float8",
    {
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "self",
        "torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter": "self comm",
        "torch.ops.fsdp.chunk_cat.default": "exactly tensors dim num_chunks out",
    },
    {
        "DDPMeshInfo": "replicate_process_group",
        "FSDPMeshInfo": "shard_process_group",
        "FSDPParam": "mp_policy sharded_param",
        "FSDPParamGroup": "_reduce_scatter_comm device fsdp_params mesh_info",
    },
)

IN_PLACE = Need(
    "all-gathers into the weights' own memory, and reductions of gradients where they lie",
    "let FSDP2 copy what it gathers and reduces",
    {
        "torch.ops.fsdp.all_gather_copy_in.default": (
            "exactly all_gather_inputs all_gather_output inp_split_sizes all_gather_input_numel rank"
        ),
        "torch.ops.fsdp.split_with_sizes_copy.default": (
            "exactly all_gather_output all_gather_input_split_sizes dim out"
        ),
        "torch.distributed.ProcessGroup._get_backend": "",
        "torch.distributed.ProcessGroup.allgather_into_tensor_coalesced": "",
        "torch.distributed.ProcessGroup.reduce_scatter_tensor_coalesced": "",
        "torch.distributed.distributed_c10d.AllgatherOptions": "",
        "torch.distributed.distributed_c10d.ReduceScatterOptions": "",
    },
    {
        "FSDPCommContext": "get_all_gather_streams",
        "FSDPMeshInfo": "shard_process_group",
        "FSDPParam": (
            "_orig_size _sharded_local_tensor _sharded_param_data all_gather_outputs alloc_all_gather_outputs "
            "free_unsharded_param fsdp_placement mp_policy sharded_param"
        ),
        "FSDPParamGroup": (
            "_all_gather_comm _all_gather_result _reduce_scatter_comm _training_state comm_ctx device "
            "finalize_backward fsdp_params is_sharded mesh_info pre_forward reduce_grads unshard"
        ),
    },
)

REPLICAS = Need(
    "amax histories of DistributedDataParallel's replicas",
    "take a recipe with current scaling",
    {
        "torch.nn.parallel.DistributedDataParallel._assign_modules_buffers": "self",
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module": "",
    },
    {"DistributedDataParallel": "_join_config parameters_to_ignore"},
)

GROUPS = Need(
    "process groups of the ranks that share a model",
    "train on one rank",
    {"torch.distributed.distributed_c10d._process_group_name": "ranks use_hashed_name"},
)

NEEDS = (
    CONVERSION,
    COMPILATION,
    TENSOR_PARALLELISM,
    LOADING,
    EXPERTS,
    EXCHANGES,
    GATHER,
    REDUCTION,
    IN_PLACE,
    REPLICAS,
    GROUPS,
    GRAPHS,
)


def problems(need: Need) -> tuple[str, ...]:
    """Return what of a need's names is missing or takes other parameters; empty where nothing is.

    It is looked at once in a process.
    """
    if (found := _found.get(need)) is None:
        of_names = (_problem(path, given) for path, given in need.names.items())
        found = _found[need] = tuple(problem for problem in of_names if problem is not None)
    return found


def require(need: Need) -> None:
    """Look whether torch has what is needed.

    Raises:
        Float8ConfigError: it has not.
    """
    if found := problems(need):
        raise _error(need, found)


def require_attributes(need: Need, *objects: object) -> None:
    """Look once for each class whether torch's objects have what is needed of them.

    Raises:
        Float8ConfigError: they have not.
    """
    for each in objects:
        kind = type(each)
        # A model has thousands of parameters, and a few classes of them.
        if (need, kind) in _known:
            continue
        wanted = [need.attributes[cls.__name__] for cls in kind.__mro__ if cls.__name__ in need.attributes]
        missing = [f"{kind.__name__}.{name}" for name in " ".join(wanted).split() if not hasattr(each, name)]
        if not wanted:
            missing = [f"{kind.__module__}.{kind.__name__} in the place of a class that it knows"]
        if missing:
            raise _error(need, [f"{name} is missing" for name in missing] if wanted else missing)
        _known.add((need, kind))


_found: dict[Need, tuple[str, ...]] = {}
_known: set[tuple[Need, type]] = set()
"""The needs and classes that ``require_attributes`` found to be right."""


def _error(need: Need, found: Iterable[str]) -> Float8ConfigError:
    instead = f", or {need.instead}" if need.instead else ""
    return Float8ConfigError(
        f"torch {torch.__version__} is not known to f8sub for {need.purpose}: {'; '.join(found)}. All of f8sub works "
        f"with torch {WORKS_WITH}: install one of those{instead}"
    )


def _problem(path: str, given: str) -> str | None:
    names = given.split()
    try:
        found = _at(path)
        taken = parameters_of(found) if names else {}
    except (AttributeError, ImportError):
        return f"{path} is missing"
    except (TypeError, ValueError):
        return f"{path} is no function with a signature any more"
    if not names:
        return None
    exact = names[0] == "exactly"
    # The word itself is no parameter; True counts as 1.
    names = names[exact:]
    # What is not given has to be optional, and what is given by position to be where it was.
    in_order = [name for name in taken if name in names] == names
    others = [name for name, is_needed in taken.items() if name not in names and (exact or is_needed)]
    if in_order and not others:
        return None
    return f"{path} takes ({', '.join(taken)}), and f8sub knows it with ({', '.join(names)})"


def parameters_of(found: Any) -> dict[str, bool]:
    """Names of the parameters of an operator or a function, and whether they are needed."""
    if (schema := getattr(found, "_schema", None)) is not None:
        return {argument.name: not argument.has_default_value() for argument in schema.arguments}
    # Variadic parameters take whatever else is given.
    parameters = inspect.signature(found).parameters.values()
    return {
        p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def _at(path: str) -> Any:
    """Return what is at a dotted path; modules on the way are imported."""
    first, *rest = path.split(".")
    found: Any = sys.modules[first]
    for name in rest:
        # A submodule becomes an attribute of its package once somebody imported it.
        if not hasattr(found, name) and inspect.ismodule(found):
            importlib.import_module(f"{found.__name__}.{name}")
        found = getattr(found, name)
    return found


class _Missing:
    """Stands for a private name that this torch has not, until ``require`` or its use raises."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _error(CONVERSION, [f"{self._path} is missing"])

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        # A class that derives from what is missing can still be defined.
        return ()


def _private(path: str) -> Any:
    try:
        return _at(path)
    except (AttributeError, ImportError):
        return _Missing(path)


# Bound as they are: a wrapper would be one more Python call in every layer.
aten_scaled_mm: Callable[..., torch.Tensor] = _private("torch._scaled_mm")
aten_scaled_grouped_mm: Callable[..., torch.Tensor] = _private("torch._scaled_grouped_mm")
_FakeTensorMode = _private("torch._subclasses.FakeTensorMode")
DispatchMode: Any = _private("torch.utils._python_dispatch.TorchDispatchMode")
no_torch_function = _private("torch._C._disabled_torch_function_impl")
no_torch_function_of_subclasses = _private("torch._C.DisableTorchFunctionSubclass")
no_torch_dispatch = _private("torch._C._DisableTorchDispatch")
_HOOKS_OF_ALL_MODULES = [
    _private("torch.nn.modules.module._global_forward_pre_hooks"),
    _private("torch.nn.modules.module._global_forward_hooks"),
    _private("torch.nn.modules.module._global_backward_pre_hooks"),
    _private("torch.nn.modules.module._global_backward_hooks"),
]
dispatch_stack_size = _private("torch._C._len_torch_dispatch_stack")
graph_task = _private("torch._C._current_graph_task_id")
autograd_node = _private("torch._C._current_autograd_node")
is_to_be_executed = _private("torch._C._will_engine_execute_node")
preserve_version_counter = _private("torch.autograd.grad_mode._unsafe_preserve_version_counter")
_empty_strided_cpu = _private("torch._C._dynamo.guards._empty_strided_cpu")
_empty_strided_cuda = _private("torch._C._dynamo.guards._empty_strided_cuda")
_reinterpret_tensor = _private("torch._C._dynamo.guards._reinterpret_tensor")
dispatch_modes = _private("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
return_and_correct_aliasing = _private("torch.utils._python_dispatch.return_and_correct_aliasing")
tree_flatten = _private("torch.utils._pytree.tree_flatten")
tree_leaves = _private("torch.utils._pytree.tree_leaves")
tree_map_only = _private("torch.utils._pytree.tree_map_only")
tree_unflatten = _private("torch.utils._pytree.tree_unflatten")
SelectiveCheckpoint = _private("torch.utils.checkpoint._CachingTorchDispatchMode")
_in_functorch = _private("torch._C._are_functorch_transforms_active")
_storage_use_count = _private("torch._C._storage_Use_Count")
_saved_tensors_hooks = _private("torch._C._autograd._top_saved_tensors_default_hooks")
_no_modes = _private("torch.utils._python_dispatch._disable_current_modes")
all_reduce_node = _private("torch.ops._c10d_functional.all_reduce.default")
all_to_all_node = _private("torch.ops._c10d_functional.all_to_all_single.default")
reduce_scatter_node = _private("torch.ops._c10d_functional.reduce_scatter_tensor.default")
running_ddp = _private("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module")
_AllgatherOptions: Any = _private("torch.distributed.distributed_c10d.AllgatherOptions")
_ReduceScatterOptions: Any = _private("torch.distributed.distributed_c10d.ReduceScatterOptions")
_torchs_group_name = _private("torch.distributed.distributed_c10d._process_group_name")
_fsdp_states = _private("torch.distributed._composable_state._module_state_mapping")


class PlainToDynamo(type(torch.Tensor)):  # type: ignore[misc]
    """Of a class of tensors with memory and a ``__torch_dispatch__``: dynamo takes one for the tensor that it is.

    Dynamo (2.11 to 2.15) looks at ``type(tensor).__torch_dispatch__``. Where that is ``torch.Tensor``'s it traces a
    plain tensor and puts a guard on the class; others have to name tensors within them, which AOTAutograd looks up at
    each call. Operators look at the tensor's own attribute, and so still find the method of the class.

    A subclass that does name tensors, by ``__tensor_flatten__``, is traced so.
    """

    @property
    def __torch_dispatch__(cls) -> Any:
        if not hasattr(cls, "__tensor_flatten__"):
            return torch.Tensor.__torch_dispatch__
        (own, *_) = (
            vars(base)["__torch_dispatch__"] for base in cls.__mro__ if "__torch_dispatch__" in vars(base)
        )
        return own.__get__(None, cls)


def after_counted_writes(call: Callable[[torch.Tensor], None]) -> None:
    """Have ``call`` be given each tensor that torch says was written to when no operator of the tensor's own said so.

    Inductor's code writes to memory. AOTAutograd (2.11 to 2.15) then counts a version of each tensor that the code was
    called with, by ``torch.autograd.graph.increment_version``: of a DTensor, and not of the tensor within it.
    """
    own = torch._C._increment_version

    def counted(tensors: Iterable[torch.Tensor]) -> None:
        written = tuple(tensors)  # AOTAutograd gives a generator
        own(written)
        for tensor in written:
            call(tensor)

    # What the public function calls, and looks up at each call: compiled code may hold that function already.
    torch._C._increment_version = counted


def is_dtensor(x: object) -> "TypeIs[DTensor]":
    """``isinstance(x, DTensor)`` without an import of its module, which takes half a second.

    What made a DTensor imported it. So where one is at hand ``torch.distributed.tensor`` is there, by this name.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_fsdp_class(cls: type) -> bool:
    """Return whether ``cls`` is ``FSDPModule`` or one that ``fully_shard`` made, without an import of it."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and issubclass(cls, module.FSDPModule)


def is_fsdp_module(x: object) -> "TypeIs[FSDPModule]":
    """``isinstance(x, FSDPModule)``, likewise."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(x, module.FSDPModule)


def is_fsdp1_module(x: object) -> bool:
    """``isinstance(x, FullyShardedDataParallel)``, likewise: FSDP1, which wraps modules."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(x, module.FullyShardedDataParallel)


def flattened_by_fsdp1(model: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return those of a model's modules whose parameters FSDP1 flattened; asked while the model is called.

    FSDP1 and FSDP2 mark what they manage alike. So a wrapper of FSDP1 has to be in the model, or to be calling it.
    """
    marked = [module for module in modules if vars(module).get("_is_fsdp_managed_module", False)]
    if marked and (any(map(is_fsdp1_module, model.modules())) or _is_called_by_fsdp1()):
        return marked
    return []


def _is_called_by_fsdp1() -> bool:
    # A module does not know what wraps it, but the wrapper's forward is on the stack.
    code = torch.distributed.fsdp.FullyShardedDataParallel.forward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def default_store() -> Any:
    """The key-value store that the default process group was made with."""
    return distributed_c10d._get_default_store()


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether the group was destroyed neither by itself nor with the default one."""
    # Torch takes a destroyed group out of this map; the group object itself looks as before.
    return group in distributed_c10d._world.pg_map


_name_of_next: ContextVar[str | None] = ContextVar("name_of_next_group", default=None)
_groups_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""How many groups of the same ranks there were since the default group was made, by that."""


def new_group(ranks: Iterable[int]) -> dist.ProcessGroup:
    """Return a process group of ranks that call this together, in an order that they share; no other rank has to.

    ``dist.new_group(use_local_synchronization=True)`` (2.11 to 2.15) makes a group's name of the number of groups that
    the rank is in. Members that are in different numbers of groups would wait for each other under two names, until the
    time is out; and after ``destroy_process_group(group)`` a name comes back, with an old group's keys in the store.
    Where ``init_process_group`` was given a ``device_id``, it also splits NCCL's communicator, which all ranks of the
    job would have to do.
    """
    require(GROUPS)
    members = sorted(ranks)
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    if distributed_c10d._process_group_name is not _group_name:
        distributed_c10d._process_group_name = _group_name
    names = _groups_made.setdefault(world, Counter())
    names[name := f"f8sub-{hashlib.sha256(str(members).encode()).hexdigest()[:16]}"] += 1
    before, device = _name_of_next.set(f"{name}-{names[name]}"), world.bound_device_id
    try:
        if len(members) < world.size():
            world.bound_device_id = None
        return dist.new_group(members, use_local_synchronization=True)  # type: ignore[no-any-return]
    finally:
        world.bound_device_id = device
        _name_of_next.reset(before)


@functools.wraps(_torchs_group_name)
def _group_name(*args: Any, **kwargs: Any) -> Any:
    """Return a group's name: f8sub's where ``new_group`` makes it, torch's own otherwise."""
    name = _name_of_next.get()
    return _torchs_group_name(*args, **kwargs) if name is None else name


def all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """``dist.all_gather_single``, which torch before 2.13 calls ``all_gather_into_tensor``."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(output, input, group=group)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sums by ``dist.reduce_scatter_single``, which torch before 2.13 calls ``reduce_scatter_tensor``."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, name)(output, input, group=group)


def device_of_objects(group: dist.ProcessGroup | None) -> Any:
    """The device that a group's collectives of small things take."""
    return distributed_c10d._get_object_coll_device(group)


def leave_buffers(ddp: torch.nn.parallel.DistributedDataParallel, names: Iterable[str]) -> None:
    """Have DDP synchronize these buffers no more.

    Raises:
        Float8ConfigError: this torch's DDP is not as ``REPLICAS`` has it.
    """
    require(REPLICAS)
    require_attributes(REPLICAS, ddp)
    ddp.parameters_to_ignore.update(names)
    ddp._assign_modules_buffers()  # it fails where it finds at a forward that there are none left


def is_joining(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether this is within ``ddp.join()``."""
    return bool(ddp._join_config.enable)


@functools.cache
def cpu_has_amx() -> bool:
    """Return whether this CPU has AMX: tiles of bf16 and int8 at the least."""
    return torch.cpu._is_amx_tile_supported()


@functools.cache
def cpu_has_amx_fp16() -> bool:
    """Return whether the CPU's tiles take float16 too."""
    return torch.cpu._is_amx_fp16_supported()


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` without its look for functorch's dead wrappers.

    Inside a transform, which takes functions with a ``setup_context`` alone, it is a ``Float8ConfigError``.
    """
    if torch.compiler.is_compiling():
        return function.apply(*args)
    if _in_functorch():
        raise Float8ConfigError(
            "a float8 layer was called inside a transform of torch.func (grad, vjp, jvp, vmap, jacrev, ...), and only "
            "plain autograd differentiates it: call loss.backward() or torch.autograd.grad, for gradients of each "
            "sample in a loop over samples, or transform the model before convert_to_float8"
        )
    # What ``Function.apply`` calls after that look.
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of ``torch.autocast`` on a type of device; None where it is off, and on meta, where torch raises."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def param_dtypes(
    modules: Iterable[torch.nn.Module], *, needed: bool = True
) -> dict[tuple[torch.nn.Module, str], torch.dtype | None]:
    """The ``param_dtype`` of every parameter of ``modules`` that FSDP2 gathers, by module and name.

    Of no other module: there may be models that nothing else holds any more.

    Raises:
        Float8ConfigError: torch's FSDP2 is not as ``GATHER`` has it, or a policy not resolved, and they are ``needed``.
    """
    found: dict[tuple[torch.nn.Module, str], torch.dtype | None] = {}
    asked = set(modules)
    try:
        for _, param in fsdp_params():
            info = param._module_info
            owners = [(info.module, info.param_name)]
            # A tied weight is one parameter to FSDP2, whose other owners stand beside.
            owners += zip(info.shared_modules, info.shared_param_names, strict=True)
            if ours := [owner for owner in owners if owner[0] in asked]:
                found.update(dict.fromkeys(ours, _policy_of(param).param_dtype))
    except Float8ConfigError:
        if needed:
            raise
        return {}
    return found


def _policy_of(param: Any) -> Any:
    """FSDP2's mixed precision of a parameter, which since torch 2.15 may be another one than that of its group."""
    policy = param.mp_policy
    dtypes = [getattr(policy, name, "missing") for name in ("param_dtype", "reduce_dtype")]
    is_open = getattr(policy, "param_dtype_override_fn", None) is not None  # then FSDP2 asks it later
    if is_open or not all(dtype is None or isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise _error(GATHER, [f"the policy of {param._module_info.param_name} is not resolved: {policy}"])
    return policy


def module_of(param: Any) -> torch.nn.Module:
    """The module that has a parameter of ``fsdp_params``."""
    owner: torch.nn.Module = param._module_info.module
    return owner


def reduce_dtype(group: Any) -> torch.dtype:
    """The dtype that FSDP2 reduces the gradients of a group in, if all of them are there.

    Where the policy has no ``reduce_dtype`` it is ``param_dtype`` until torch 2.14. From 2.15 on it is what the
    parameters' ``grad_dtype`` promote to, which is the sharded parameter's own dtype unless it was set.
    """
    # Frozen parameters have no gradient.
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad] or group.fsdp_params
    found = []
    for param in trained:
        policy, sharded = _policy_of(param), param.sharded_param
        computed = policy.param_dtype or sharded.dtype
        if hasattr(type(param), "unsharded_grad_dtype"):
            computed = sharded.grad_dtype or computed  # None: whatever backward makes
        found.append(policy.reduce_dtype or computed)
    promoted: torch.dtype = functools.reduce(torch.promote_types, found)
    return promoted


ALL_GATHER_COPY_IN = "fsdp::all_gather_copy_in"
"""FSDP2's operator that copies the inputs of an all-gather into the memory that is sent; see ``GATHER``."""


def unknown_operator(name: str) -> Float8ConfigError:
    """The error where FSDP2 gives weights to another operator of its own."""
    return _error(GATHER, [f"{name} is called, and f8sub knows {ALL_GATHER_COPY_IN}"])


def fsdp_params() -> Iterator[tuple[Any, Any]]:
    """Every parameter that FSDP2 shards, after the group that it is gathered with.

    Raises:
        Float8ConfigError: torch's FSDP2 is not as ``GATHER`` has it.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    require(GATHER)
    # A list, because garbage collection may take modules out of it meanwhile.
    for module, reference in list(_fsdp_states.items()):
        if is_fsdp_module(module) and (state := reference()) is not None:
            for group in _groups_of(state, GATHER):
                for param in group.fsdp_params:
                    require_attributes(GATHER, param, param._module_info)
                    yield group, param


def gathered_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer that FSDP2 has for a forward alone: it reduces no gradient to them.

    After a forward without a backward the root's parameters are those until ``reshard``, and ``model.parameters()``
    gives them.
    """
    return gathered_among(p for group in optimizer.param_groups for p in group["params"])


def gathered_among(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of ``parameters`` that FSDP2 gathered for a forward."""
    found: dict[int, Any] = {}
    with contextlib.suppress(Float8ConfigError):  # raised where weights are gathered
        found = {id(getattr(param, "unsharded_param", None)): param for _, param in fsdp_params()}
    # ``found`` may have the id of None, which is no parameter.
    return [parameter for parameter in parameters if id(parameter) in found]


def reshard(model: torch.nn.Module) -> None:
    """Put the shards of a model's parameters back where a forward without a backward left gathered ones."""
    modules = set(model.modules())
    for module in filter(is_fsdp_module, modules):
        module.reshard()
    with contextlib.suppress(Float8ConfigError):  # raised where weights are gathered
        # A part of a model is gathered by a module above it, where it has no ``fully_shard`` of its own.
        groups = {id(group): group for group, param in fsdp_params() if module_of(param) in modules}
        for group in groups.values():
            group.reshard()


def keep_padded_shards(modules: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """Have FSDP2 keep the memory of uneven shards, and so the state dicts from before the first forward.

    That pads them again, into other memory, unless FSDP2 has the padded shard as a plain tensor; it looks at the class
    alone.

    Returns:
        Those of ``modules`` that FSDP2 shards weights of.
    """
    found, asked = set(), set(modules)
    with contextlib.suppress(Float8ConfigError):  # told where weights are gathered
        for _, param in fsdp_params():
            if (owner := module_of(param)) in asked:
                found.add(owner)
                padded = getattr(param, "_sharded_param_data", None)
                if getattr(padded, "master", None) is padded and padded is not None:  # no codes
                    param._sharded_param_data = padded.plain
    return found


Value = TypeVar("Value")


def parameter_groups(
    of: Mapping[tuple[torch.nn.Module, str], Value],
) -> list[tuple[Any, list[tuple[Any, Value]]]]:
    """Return FSDP2's groups of parameters that are gathered together, each with its parameters that have a value.

    Args:
        of: by module and name of parameters that FSDP2 shards; those that it does not are left out.
    """
    found: dict[int, tuple[Any, list[tuple[Any, Value]]]] = {}
    for group, param in fsdp_params():
        info = param._module_info
        owners = [(info.module, info.param_name)]
        owners += zip(info.shared_modules, info.shared_param_names, strict=True)
        if values := [(param, of[owner]) for owner in owners if owner in of]:
            found.setdefault(id(group), (group, []))[1].extend(values)
    return list(found.values())


gathered_of = operator.attrgetter("is_unsharded", "_all_gather_result")
"""What is true or not None while FSDP2 has a group's parameters gathered, or gathers them."""


def after_reductions(
    of: Mapping[tuple[torch.nn.Module, str], Callable[[], None]],
) -> None:
    """Have FSDP2, each time it has reduced gradients, call what the reduced parameters have in ``of``.

    Every rank that holds a shard then knows it, because FSDP2 reduces them together. No call where a group has no
    gradients, or is told to wait for more of them.

    Args:
        of: by module and name of parameters that FSDP2 shards; those that it does not are left out.
    """
    for group, params in parameter_groups(of):
        # FSDP2 has no hook for this, and looks the method up on the group at each call: what the object has of its
        # own comes before its class.
        group.post_backward = functools.partial(_post_backward, group.post_backward, group, params)


def _post_backward(own: Callable[..., None], group: Any, params: Sequence[Any], *args: Any) -> None:
    # Before FSDP2's own, which takes the gradients away.
    calls = [call for param, call in params if _has_gradient(param)] if group.reduce_grads else []
    own(*args)
    # Weights of one exchange have one call: FSDP2 reduced them together.
    for call in dict.fromkeys(calls):
        call()


def _has_gradient(param: Any) -> bool:
    """Return whether FSDP2 has a gradient of the unsharded parameter, which it did not reduce yet."""
    unsharded = getattr(param, "unsharded_param", None)  # none before the first all-gather
    if unsharded is None:
        return False
    return unsharded.grad is not None or getattr(param, "unsharded_accumulated_grad", None) is not None


def reduced_groups(module: "FSDPModule") -> list[Any]:
    """The parameters that ``fully_shard`` put together for a module: one group for each mesh.

    Raises:
        Float8ConfigError: torch's FSDP2 is not as ``REDUCTION`` has it.
    """
    require(REDUCTION)
    groups = _groups_of(module._get_fsdp_state(), REDUCTION)
    for group in groups:
        require_attributes(REDUCTION, group.mesh_info, *group.fsdp_params)
    return groups


def _groups_of(state: Any, need: Need) -> list[Any]:
    """An FSDP2 module's groups of parameters: one until torch 2.11, one for each mesh from 2.12 on."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        if not hasattr(state, "_fsdp_param_group"):
            raise _error(need, [f"{type(state).__name__}._fsdp_param_groups is missing"])
        groups = [state._fsdp_param_group]
    # None stands for a module without parameters of its own.
    found = [group for group in groups if group is not None]
    require_attributes(need, *found)
    return found


_OF_A_PASS = (
    *("_all_gather_result", "_all_reduce_state", "_partial_reduce_output", "_post_reduce_event"),
    *(
        "_reshard_after_forward_event",
        "all_gather_state",
        "active_gradient_reduction",
        "reduce_scatter_state",
    ),
)
"""Attributes of a group and of what the groups share (2.11 to 2.15) that are None outside of a pass."""


_SHARDING_OPTIONS = (
    "all_reduce_grads",
    "force_sum_reduction_for_comms",
    "gradient_divide_factor",
    "mp_policy",
    "post_forward_mesh_info",
    "reduce_grads",
    "reduce_scatter_unused_params",
    "reshard_after_backward",
    "unshard_in_backward",
    "_all_gather_comm",
    "_all_reduce_hook",
    "_reduce_scatter_comm",
)
"""What ``FSDPModule``'s setters write to a group and a pass reads, where the version of torch has it."""


def hooks_of_all_modules() -> list[Any]:
    """Return what ``torch.nn.modules.module.register_module_forward_hook`` and its siblings registered."""
    return [hook for hooks in _HOOKS_OF_ALL_MODULES for hook in hooks.values()]


def sharding_options(
    modules: Iterable[torch.nn.Module],
) -> tuple[list[str], Callable[[], list[tuple[Any, ...]]]]:
    """Return names of options, and a function that returns those of each group of parameters that FSDP2 shards.

    Raises:
        Float8ConfigError: torch's FSDP2 is not as ``GRAPHS`` has it.
    """
    states = [module._get_fsdp_state() for module in filter(is_fsdp_module, modules)]
    groups = [group for state in states for group in _groups_of(state, GRAPHS)]
    names = [name for name in _SHARDING_OPTIONS if all(hasattr(group, name) for group in groups)]
    read = operator.attrgetter(*names)
    return names, lambda: list(map(read, groups))


def forget_pass(model: torch.nn.Module) -> None:
    """Have FSDP2 forget a forward and backward that an error ended in a CUDA graph's capture: nothing of it ran.

    ``FSDPModule.reset_iter_state`` (2.14) waits for events of the capture, which never happened.

    Raises:
        Float8ConfigError: torch's FSDP2 is not as ``GRAPHS`` has it.
    """
    for module in filter(is_fsdp_module, model.modules()):
        state: Any = module._get_fsdp_state()
        require_attributes(GRAPHS, state)
        idle = type(state._training_state).IDLE
        for group in _groups_of(state, GRAPHS):
            _set_none(group)
            if (reset := getattr(group, "_reset_iter_state", None)) is not None:
                # From 2.14 on, where it knows of more than is listed here; no events are left that it would wait for.
                reset()
            group._training_state = idle
            group._post_forward_indices.clear()
            # The forward that was cut short left the unsharded parameters in the modules.
            group._to_sharded()
            for param in group.fsdp_params:
                # In 2.15 a property: the gradient below is the only one.
                if "unsharded_accumulated_grad" in vars(param):
                    param.unsharded_accumulated_grad = None
                # There is none before the first all-gather.
                if (unsharded := getattr(param, "unsharded_param", None)) is not None:
                    unsharded.grad = None
        state._training_state = idle
        state._modules_to_run_forward.clear()
        # Else no module takes itself for the root of the next forward, and the next backward queues no callback.
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        if hasattr(state._state_ctx, "gradient_reduction_pending"):  # 2.15
            state._state_ctx.gradient_reduction_pending = False
            state._state_ctx.manual_backward_finalization_active = None
        _set_none(state._comm_ctx)
        for several in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
            if (found := getattr(state._comm_ctx, several, None)) is not None:
                found.clear()


def _set_none(holder: Any) -> None:
    for name in _OF_A_PASS:
        if hasattr(holder, name):
            setattr(holder, name, None)


def shard_ranks(group: Any) -> dist.ProcessGroup | None:
    """The ranks that a group's parameters are sharded over; None where they are replicated alone."""
    return getattr(group.mesh_info, "shard_process_group", None)


def reduce_scatter_of(group: Any) -> tuple[Any, bool]:
    """A group's ``ReduceScatter``, and whether that is torch's own."""
    comm = group._reduce_scatter_comm
    # By name: the class lives in a private module of FSDP2.
    return comm, type(comm).__name__ == "DefaultReduceScatter"


CHUNK_CATS = ("fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype")
"""FSDP2's operators that copy gradients into the memory of a reduction; the second one since torch 2.15."""


def chunk_cat(gradients: Sequence[torch.Tensor], ranks: int, out: torch.Tensor) -> None:
    """The one of ``CHUNK_CATS`` that takes most: gradients of several dtypes, if torch has it."""
    name = "chunk_cat_mixed_dtype" if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype") else "chunk_cat"
    getattr(torch.ops.fsdp, name)(gradients, dim=0, num_chunks=ranks, out=out)


Around = Callable[[Sequence[torch.Tensor]], Callable[[], AbstractContextManager[Any]]]
"""Given shards that FSDP2 is to cast, returns what makes the context in which it casts and gathers them."""


def gather_in_place(
    weights: Iterable[tuple[torch.nn.Module, str]], takes: Callable[[torch.device], bool], casts: Around
) -> None:
    """Have FSDP2 gather parameters where they are read, with no flat memory that it copies out of.

    FSDP2 gathers into a flat output and copies each parameter out of it. Values are the same without that copy.

    The memory may be that of parameters that were just freed, so the all-gather waits for all that is launched before
    it. In a backward pass, and with ``set_modules_to_forward_prefetch``, that is the layer before last, and the
    all-gather runs beside the last one. In a group's own forward it would be the last one, too, and nothing would hide
    the all-gather: there FSDP2's copy stays.

    A group keeps an all-gather that is not torch's own or that another backend than torch's NCCL or gloo runs, and
    parameters that are not sharded along dimension 0; each keeps its own where torch's FSDP2 is not as ``IN_PLACE`` has
    it.

    Args:
        weights: modules and names of parameters, each of which FSDP2 shards or does not. All groups of a model gather
            so that any of these is a parameter of, from its first forward on.
        takes: whether parameters on a device are gathered so.
        casts: see ``Around``; of the groups' shards in high precision that are gathered in another dtype.
    """
    if problems(IN_PLACE):
        return
    for group, _ in parameter_groups(dict.fromkeys(weights)):
        if takes(group.device):
            _gather_in_place(group, casts)


def _gather_in_place(group: Any, casts: Around) -> None:
    comm, params = group._all_gather_comm, group.fsdp_params
    default: Any = type(comm)
    kind: Any = type(group)
    # By name: the class lives in a private module of FSDP2.
    if default.__name__ != "DefaultAllGather" or hasattr(comm, "places"):
        return
    with contextlib.suppress(Float8ConfigError):
        require_attributes(IN_PLACE, group, group.comm_ctx, group.mesh_info, *params)
        if _gathers_several(group) and all(param.fsdp_placement.dim == 0 for param in params):
            group._all_gather_comm = _comm_in_place(default)()
            group.__class__ = _group_in_place(kind)
            group.casts = casts


_GATHER_SEVERAL = {"cpu": "ProcessGroupGloo", "cuda": "ProcessGroupNCCL"}
"""By type of device, the backend that gathers several tensors at once.

``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps it in another one, which cannot do that in torch 2.11, and later does it
without the checks that it is there for.
"""


def _gathers_several(group: Any) -> bool:
    among = shard_ranks(group)
    kinds = () if among is None else type(among._get_backend(group.device)).__mro__
    return _GATHER_SEVERAL.get(group.device.type) in [kind.__name__ for kind in kinds]


@functools.cache
def _comm_in_place(default: Any) -> Any:
    """Return torch's own all-gather, which gathers into ``places`` while there are any."""

    # By the name and the class, code that looks for torch's own finds that.
    class DefaultAllGather(default):  # type: ignore[misc]
        places: Sequence[torch.Tensor] | None = None

        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> torch.Tensor:
            if self.places is None:
                plain: torch.Tensor = super().allocate(size, dtype=dtype, device=device)
                return plain
            return Places(self.places, dtype)

        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *how: Any, **named: Any
        ) -> Any:
            if not isinstance(output_tensor, Places):
                return super().__call__(output_tensor, input_tensor, group, *how, **named)
            options = _AllgatherOptions()
            options.asyncOp = False
            places = [place.flatten() for place in output_tensor.places]
            own = [place[group.rank()] for place in output_tensor.places]
            # Tensors of inference mode have no version.
            with preserve_version_counter(tuple(place for place in places if not place.is_inference())):
                work = group.allgather_into_tensor_coalesced(places, own, options)
                # NCCL has nothing to wait for: it ran on this stream.
                if work is not None:
                    work.wait()
            return None

    return DefaultAllGather


@functools.cache
def _group_in_place(default: Any) -> Any:
    """Return torch's own group of parameters, which gives its all-gather their places but in its own forward."""

    class FSDPParamGroup(default):  # type: ignore[misc]
        casts: Around
        in_own_forward = accumulates = False
        reduced_in: torch.dtype | None = None
        gradient_dtype: torch.dtype | None = None

        def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
            # The groups of one model share it since the root's first forward began.
            if self.comm_ctx not in _in_place:
                _in_place.add(self.comm_ctx)
                groups = {id(group): group for group, _ in fsdp_params() if group.comm_ctx is self.comm_ctx}
                copy = getattr(self._reduce_scatter_comm, "copies_by", None)
                for group in groups.values():
                    _gather_in_place(group, self.casts)
                    if copy is not None:
                        _copy_gradients_by(copy, group)
                        _reduce_in_place(group)
            self.in_own_forward = True
            try:
                found = super().pre_forward(*args, **kwargs)
            finally:
                self.in_own_forward = False
            self.gradient_dtype = _gradients_chosen(self)
            return found

        def unshard(self, async_op: bool = False) -> None:
            with self.around():
                self._unshard(async_op)

        def finalize_backward(self) -> None:
            is_unread = self._all_gather_result is not None
            super().finalize_backward()
            if is_unread:
                # A prefetch that no part of the backward asked for: FSDP2 forgets it, and knows of no memory of it.
                for param in self.fsdp_params:
                    param.free_unsharded_param()

        @functools.cached_property
        def around(self) -> Callable[[], AbstractContextManager[Any]]:
            # Looked at once: it is time of the host, and shards keep their sizes.
            return self.casts([param._sharded_param_data for param in filter(_is_cast, self.fsdp_params)])

        def _unshard(self, async_op: bool) -> None:
            comm, params, among = self._all_gather_comm, self.fsdp_params, shard_ranks(self)
            ranks = 1 if among is None else among.size()
            # The first all-gather of all makes the tensors.
            has_outputs = all(param.all_gather_outputs for param in params)
            is_due = self.is_sharded and self._all_gather_result is None and ranks > 1
            is_ours = hasattr(comm, "places")  # and no other that the user has set since
            if async_op or self.in_own_forward or not (is_ours and is_due and has_outputs):
                super().unshard(async_op)
                return
            for param in params:
                param.alloc_all_gather_outputs()
            stream, _ = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
            stream.wait_stream(torch.get_device_module(self.device).current_stream())
            outputs = [tensor for param in params for tensor in param.all_gather_outputs]
            comm.places = [tensor.view(torch.uint8).view(ranks, -1) for tensor in outputs]
            try:
                super().unshard(async_op)
            finally:
                comm.places = None
                if self._all_gather_result is None:
                    # FSDP2 was told not to gather in backward.
                    for param in params:
                        param.free_unsharded_param()

    return FSDPParamGroup


def _reduce_in_place(group: Any) -> None:
    """Have a group reduce gradients where they lie, if it gathers in place.

    Decided before any gradient is there, and by what all ranks know: the two ways are different collectives.
    """
    comm, among = group._reduce_scatter_comm, shard_ranks(group)
    ranks = 1 if among is None else among.size()
    if not hasattr(group, "casts") or not hasattr(comm, "copies_by"):
        return
    comm.is_in_place = ranks > 1 and not any(param._orig_size[0] % ranks for param in group.fsdp_params)
    with contextlib.suppress(Float8ConfigError):  # a policy that FSDP2 itself asks later
        group.reduced_in = reduce_dtype(group)


def _gradients_chosen(group: Any) -> torch.dtype | None:
    """Have the layers of a group that reduces gradients where they lie give them in that dtype, and return it."""
    # For good, because compiled code is compiled for each dtype. Sums over micro-batches cost more in float32.
    group.accumulates = group.accumulates or not group.reduce_grads
    is_in_place = getattr(group._reduce_scatter_comm, "is_in_place", False)
    dtype = group.reduced_in if is_in_place and not group.accumulates else None
    if dtype != torch.float32:
        dtype = None
    if dtype is not group.gradient_dtype:
        for param in group.fsdp_params:
            weight: Any = getattr(param, "unsharded_param", None)
            # A DTensor has no such attribute, and its gradient would be rounded on its way.
            if hasattr(weight, "gradient_dtype") and weight.dtype != dtype:
                weight.gradient_dtype = dtype
    return dtype


def _is_cast(param: Any) -> bool:
    """Return whether FSDP2 casts a parameter itself, which gathers no bytes of its own."""
    dtype = param.mp_policy.param_dtype
    is_plain = not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
    return is_plain and dtype not in (None, param._sharded_param_data.dtype)


_in_place: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""What the groups of a model share, of the models all of whose groups were looked at."""


class Places(torch.Tensor):
    """Stands for the flat output of an all-gather, where each parameter is gathered into memory of its own.

    Attributes:
        places: that memory, each uint8, (ranks, bytes of a rank).
    """

    __torch_function__ = no_torch_function

    places: Sequence[torch.Tensor]

    @staticmethod
    def __new__(cls: type["Places"], places: Sequence[torch.Tensor], dtype: torch.dtype) -> "Places":
        """Stand for all of them together, in ``dtype``."""
        numel = sum(place.numel() for place in places) // dtype.itemsize
        self: Places = torch.Tensor._make_wrapper_subclass(
            cls, (numel,), dtype=dtype, device=places[0].device
        )
        self.places = places
        return self

    def pieces(self, rank: int) -> list[torch.Tensor]:
        """Return where the inputs of a rank lie, which the all-gather sends from in place."""
        return [place[rank].view(self.dtype) for place in self.places]

    @override
    def view(self, *shape: Any) -> "Places":
        """Return itself: FSDP2 asks for a row for each rank, before the operator that copies out of them."""
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() == ALL_GATHER_COPY_IN:
            inputs, gathered, _, _, rank = args
            torch._foreach_copy_(gathered.pieces(rank), inputs)
            return gathered, gathered
        if func.name() == _COPY_OUT:
            begin = torch.Tensor.data_ptr
            if list(map(begin, (kwargs or {})["out"])) == list(map(begin, args[0].places)):
                return None  # they are there
        raise unknown_operator(func.name())


_COPY_OUT = "fsdp::split_with_sizes_copy"


Copy = Callable[[Sequence[torch.Tensor], torch.Tensor], bool]
"""Copies gradients as ``chunk_cat`` does along dimension 0 into (ranks, elements of a rank), or returns False."""


def copy_gradients(
    weights: Iterable[tuple[torch.nn.Module, str]], takes: Callable[[torch.device], bool], copy: Copy
) -> None:
    """Have FSDP2 copy the gradients that it reduces with those of ``weights`` by ``copy``, and all else as before.

    FSDP2 asks its reduce-scatter for a flat input, copies gradients into it by one of ``CHUNK_CATS``, asks for the
    output and has the one reduced into the other. A group keeps a reduce-scatter that is not torch's own, and each
    keeps its own where torch's FSDP2 is not as ``REDUCTION`` has it.

    Groups that ``gather_in_place`` reduce gradients where they lie, if ranks divide the rows of all: only those of
    another dtype than the sum's are copied. One that is not rounded to its dtype yet has its values in an attribute
    ``exact``.

    Args:
        weights: modules and names of parameters, each of which FSDP2 shards or does not.
        takes: whether gradients on a device are copied so.
        copy: see ``Copy``.
    """
    if problems(REDUCTION):
        return
    for group, _ in parameter_groups(dict.fromkeys(weights)):
        if takes(group.device):
            _copy_gradients_by(copy, group)


def _copy_gradients_by(copy: Copy, group: Any) -> None:
    comm, is_default = reduce_scatter_of(group)
    if is_default and not hasattr(comm, "copies_by"):
        default: Any = type(comm)
        group._reduce_scatter_comm = _copying(default)()
        group._reduce_scatter_comm.copies_by = copy


@functools.cache
def _copying(default: Any) -> Any:
    """Return torch's own reduce-scatter with another copy of gradients, or none."""

    # By the name and the class, code that looks for torch's own finds that.
    class DefaultReduceScatter(default):  # type: ignore[misc]
        copies_by: Copy
        is_filled = is_in_place = False

        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> torch.Tensor:
            """Return the input; once that is filled, the output, also where a pass failed in between."""
            filled, self.is_filled = self.is_filled, False
            make = functools.partial(super().allocate, size, dtype=dtype, device=device)
            if filled:
                plain: torch.Tensor = make()
                return plain
            return _InputBuffer(_Input(self, make), tuple(size), dtype, device)

        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, **how: Any
        ) -> Any:
            held = input_tensor.held if isinstance(input_tensor, _InputBuffer) else None
            if held is None or not held.gradients:
                plain = input_tensor if held is None else held.memory
                return super().__call__(output_tensor, plain, group, op, **how)
            options = _ReduceScatterOptions()
            options.reduceOp, options.asyncOp = op, False
            inputs = [gradient.view(-1) for gradient in held.gradients]
            outputs = list(output_tensor.split([each.numel() // group.size() for each in inputs]))
            work = group.reduce_scatter_tensor_coalesced(outputs, inputs, options)
            # NCCL has nothing to wait for: it ran on this stream.
            if work is not None:
                work.wait()
            return None

    return DefaultReduceScatter


class _Input:
    """Holds the flat input of a reduce-scatter, or the gradients that are reduced where they lie.

    Attributes:
        gradients: those, until something asks for the memory.
    """

    def __init__(self, comm: Any, make: Callable[[], torch.Tensor]) -> None:
        self.comm, self._make = comm, make
        self.gradients: list[torch.Tensor] = []
        # Kept until the reduction is done: they may be copied on its stream, and are of another.
        self._copied: list[torch.Tensor] = []
        self._ranks = 1

    @functools.cached_property
    def memory(self) -> torch.Tensor:
        """The flat input, with the gradients in it if there are any."""
        flat, self._copied, self.gradients = self._make(), self.gradients, []
        if self._copied:
            self._copy(self._copied, flat.view(self._ranks, -1))
        return flat

    def fill(self, gradients: Sequence[torch.Tensor], dtype: torch.dtype, ranks: int) -> None:
        """Take gradients that FSDP2 has cut along dimension 0."""
        exact = [getattr(gradient, "exact", gradient) for gradient in gradients]
        if self.comm.is_in_place:
            self.gradients, self._ranks = self._of_one_dtype(exact, dtype), ranks
        else:
            self._copy(exact, self.memory.view(ranks, -1))

    def _copy(self, gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if not self.comm.copies_by(gradients, out):
            dtypes = {gradient.dtype for gradient in gradients}
            uniform = gradients if len(dtypes) == 1 else [each.to(out.dtype) for each in gradients]
            chunk_cat(uniform, len(out), out)

    def _of_one_dtype(self, gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return contiguous ones of ``dtype`` as they are, and copies of others side by side."""
        is_other = [each.dtype != dtype or not each.is_contiguous() for each in gradients]
        others = list(itertools.compress(gradients, is_other))
        if not others:
            return list(gradients)
        flat = others[0].new_empty(sum(map(torch.Tensor.numel, others)), dtype=dtype)
        pieces = flat.split([each.numel() for each in others])
        copies = [piece.view(each.shape) for piece, each in zip(pieces, others, strict=True)]
        if not self.comm.copies_by(others, flat.view(1, -1)):
            torch._foreach_copy_(copies, others)
        of_others = iter(copies)
        return [next(of_others) if other else each for each, other in zip(gradients, is_other, strict=True)]


class _InputBuffer(torch.Tensor):
    """FSDP2's flat input of a reduce-scatter, or its view that is filled; other operators see memory.

    Attributes:
        held: what is in it.
        takes_unrounded: gradients that are not rounded yet leave operators to this class.
    """

    __torch_function__ = no_torch_function

    held: _Input
    takes_unrounded = True

    @staticmethod
    def __new__(
        cls: type["_InputBuffer"], held: _Input, shape: tuple[int, ...], dtype: torch.dtype, device: Any
    ) -> "_InputBuffer":
        """Stand for ``held`` in one of its shapes."""
        self: _InputBuffer = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # The view that FSDP2 fills has a row for each rank.
        if func is torch.ops.aten.view.default and len(args[1]) == 2:
            flat, (ranks, _) = args
            return _InputBuffer(flat.held, (ranks, flat.numel() // ranks), flat.dtype, flat.device)
        if func.name() in CHUNK_CATS and isinstance(out := kwargs.get("out"), _InputBuffer):
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if dim == 0:
                out.held.fill(args[0], out.dtype, len(out))
            else:
                func(*args, **{**kwargs, "out": out.held.memory.view(out.shape)})
            # Last: a copy that raises fills nothing, and FSDP2 asks for an input next.
            out.held.comm.is_filled = True
            return None
        args, kwargs = tree_map_only(
            _InputBuffer, lambda each: each.held.memory.view(each.shape), (args, kwargs)
        )
        return func(*args, **kwargs)


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Outside of all dispatch modes, FakeTensorMode among them: tensors made here are real and may be kept."""
    modes: AbstractContextManager[Any] = _no_modes()
    return modes


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Enter a context in which tensors are made without values.

    Code that asks whether it is traced is told that it is. An operator that raises is the caller's to report: torch
    would log its whole trace as well.
    """
    logger = logging.getLogger(_FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        with _FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        logger.disabled = before


def empty_strided(
    device: torch.device,
) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """Return ``torch.empty_strided`` on a GPU, which has to be the current device, or on the CPU.

    It is what Inductor's code calls, and takes the host two thirds of the time of the public function.
    """
    found: Callable[..., torch.Tensor] = _empty_strided_cuda if device.type == "cuda" else _empty_strided_cpu
    return found


def in_same_memory(tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of torch's own class, from where ``tensor`` begins.

    By what Inductor's code calls for views, which neither autograd nor a tensor's own dispatch sees.
    """
    found: torch.Tensor = _reinterpret_tensor(tensor, shape, stride, 0)
    return found


def tensors_in_storage(tensor: torch.Tensor) -> int:
    """How many tensors, itself among them, and NumPy arrays lie in a tensor's storage."""
    storage = tensor.untyped_storage()  # the Python object counts, too
    return int(_storage_use_count(storage._cdata)) - 1


def bound_hook(form: Callable[..., Any]) -> Callable[..., Any]:
    """A class whose instances bind an FSDP2 hook to its tensor: ``bound_hook(form)(form, tensor)``.

    They have their signature stored: FSDP2 (2.11 to 2.15) inspects it on every call, 0.8 us, and 30 us else.
    """
    _, *parameters = inspect.signature(form).parameters.values()
    # On a class, because each time that FSDP2 reads the hook there is a new instance.
    made: Callable[..., Any] = type(
        form.__name__, (functools.partial,), {"__signature__": inspect.Signature(parameters)}
    )
    return made


def is_metadata_inference() -> bool:
    """Return whether this runs in a forward by which a stage of ``torch.distributed.pipelining`` learns shapes.

    From torch 2.13 on it precedes the first micro-batch, with gradients. A later stage is given uninitialized memory,
    and no stage steps by the gradients; torch 2.14 puts the buffers back. It has no mark but the name of torch's
    function. Compiled code does not know.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_forward_metadata_inference":
        frame = frame.f_back
    return frame is not None


def is_swapped_with_itself(tensor: torch.Tensor) -> bool:
    """Return whether this runs inside of ``torch.utils.swap_tensors(tensor, tensor)``.

    A tensor's first parametrization calls it so.
    """
    # ``swap_tensors`` asks each tensor for its own count, and only its frame knows both.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "swap_tensors":
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("t1") is frame.f_locals.get("t2") is tensor


def constant_result(function: Function) -> Function:
    """``torch.compiler.assume_constant_result`` without its ``import torch._dynamo``, which takes a second.

    While ``torch.compile`` traces, the function is called with the values of its arguments, and those are guarded on.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result
def is_one_graph() -> bool:
    """Return whether the code that ``torch.compile`` traces now has to be one graph, as ``fullgraph`` asks."""
    return bool(_traced_frame().one_graph)


def _traced_frame() -> Any:
    tracer: Any = _at("torch._dynamo.symbolic_convert.InstructionTranslator")
    return tracer.current_tx()


@constant_result
def stays_in_graph() -> bool:
    """Return whether what a parallel style's hook returns cannot leave the graph that ``torch.compile`` traces now.

    It leaves where graphs may break, and where the hook is traced by itself: of a module that is compiled with its own
    hooks.
    """
    frame, hooks = _traced_frame(), cast(Any, _at("torch.distributed.tensor.parallel.style"))
    return bool(frame.one_graph and frame.f_code.co_filename != hooks.__file__)


def call_directly(operator: str, maker: str, *, by_place: bool) -> None:
    """Have the code that Inductor generates call an operator's function, past the dispatcher.

    Where Inductor (2.11 to 2.15) has no such registry any more, and in graphs within graphs, the operator is called as
    any other.

    Args:
        operator: "f8sub.quantize.default"; it changes no argument, which Inductor would write in another way.
        maker: the dotted path of what makes the function of one call in the code, of ``operator``, the operator itself,
            and what its tensors are each time, in words; None where they differ.
        by_place: whether there is such a function, of results that lie as the operator's fake says. Inductor's code
            looks at those of others, which takes the host a third of the time of the call.
    """
    try:
        registry: Any = _at("torch._inductor.codegen.custom_extern_kernel_codegen")
        wrapper_module: Any = _at("torch._inductor.codegen.wrapper")
        graph: Any = _at("torch._inductor.virtualized.V")
        entry, registered = registry.CustomCodegen, registry.CUSTOM_EXTERN_KERNEL_CODEGEN
        wrapper_class, line_of = wrapper_module.PythonWrapperCodegen, wrapper_module.ExternKernelAllocLine
    except (AttributeError, ImportError):
        return
    name, prefix = f"torch.ops.{operator}", operator.replace(".", "_")
    module, _, attribute = maker.rpartition(".")
    # Code that is kept on disk may meet a version of f8sub that has no such function.
    make = f"getattr(__import__({module!r}, fromlist=['']), {attribute!r}, lambda name, otherwise, of: otherwise)"

    def write(node: Any, writeline: Callable[[Any], None]) -> None:
        wrapper = graph.graph.wrapper_code
        # Subclasses write the code of subgraphs and of C++, in other forms.
        if type(wrapper) is not wrapper_class:
            writeline(line_of(wrapper, node))
            return
        callee, of = f"{prefix}_{node.get_name()}", _in_words(node) if by_place else None
        # In words, because Inductor loads equal code once, and what is called keeps launches for tensors of one kind.
        wrapper.add_import_once(f"{callee} = {make}({operator!r}, {name}, {of!r})")
        for output in () if of is None else node.outputs:
            output.skip_size_stride_alignment_checks = True
        arguments = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
        writeline(f"{node.get_name()} = {callee}({arguments})")

    registered[name] = entry(python=write)


def _in_words(node: Any) -> str | None:
    """Return what one of Inductor's nodes reads; None where a size or a stride of it is a symbol."""
    words = []
    for each in node.inputs:
        size, stride = list(each.get_size()), list(each.get_stride())
        if any(getattr(number, "free_symbols", ()) for number in (*size, *stride)):
            return None
        words.append(f"{each.get_dtype()} {size} {stride} {each.get_device()}")
    return ", ".join(words)


def change_and_restore(function: Callable[..., Any], *args: Any) -> Any:
    """Call, while dynamo traces, what writes to an object from before, and is undone before the trace is done.

    In functions that compiled code checkpoints dynamo refuses to write to what is outside of them.
    """
    return torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function, *args)


def untraced(function: Function) -> Function:
    """``torch.compiler.disable`` that does not import ``torch._dynamo`` before something else did."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return torch.compiler.disable(function)(*args, **kwargs)

    # The mark of ``torch.compiler.disable``, for dynamo that traces a call.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(Function, call)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Have ``torch.compiler.is_compiling()`` true, which it is not in torch 2.11 while AOTAutograd traces."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def traced(function: type[torch.autograd.Function]) -> Any:
    """Return ``function`` for a node that AOTAutograd runs; its backward runs after the node's own code has ended."""

    class Traced(function):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            with compiling():
                found: torch.Tensor = function.forward(ctx, *args)
                return found

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            with compiling():
                return function.backward(ctx, dy)

    return Traced


def largest_over_ranks(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The elementwise maximum over a group, as nodes of a graph that is traced."""
    require(TENSOR_PARALLELISM)
    collectives = torch.distributed._functional_collectives
    reduced = collectives.all_reduce(values.contiguous(), "max", group)
    done: torch.Tensor = collectives.wait_tensor(reduced)
    return done


@constant_result
def _look_for_exchanges() -> None:
    require(EXCHANGES)


def rows_over_ranks(
    x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: Any
) -> torch.Tensor:
    """An all-to-all of rows, by operators that write to no argument.

    Not by ``dist.all_to_all_single``: compiled backward code of torch 2.11 reads the memory as it was before. And what
    these operators return selective checkpoints keep, so that a forward that runs again sends nothing.
    """
    _look_for_exchanges()
    collectives = torch.distributed._functional_collectives
    done: torch.Tensor = collectives.wait_tensor(
        collectives.all_to_all_single(x.contiguous(), output_splits, input_splits, group)
    )
    return done


def tag_of_checkpoints() -> Any:
    """The operator by which dynamo's graphs have checkpointed functions; to import it takes a while."""
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    return TagActivationCheckpoint


def is_checkpointed(module: torch.nn.Module) -> bool:
    """Return whether a module is what ``checkpoint_wrapper`` returned."""
    wrapper = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return wrapper is not None and isinstance(module, wrapper.CheckpointWrapper)


def saved_tensors_hook() -> Any:
    """The hook that packs what is saved for backward now; None without one. Non-reentrant checkpoints push theirs."""
    hooks = _saved_tensors_hooks(False)
    return None if hooks is None else hooks[0]


def place_in_whole(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a DTensor, and where in the whole it begins."""
    require(LOADING)
    utils = torch.distributed.tensor._utils
    shape, offset = utils.compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return shape, offset


def cuda_version() -> tuple[int, ...]:
    """Return the version of CUDA that torch was built for; empty where it was for none, as for ROCm."""
    return tuple(map(int, torch.version.cuda.split("."))) if torch.version.cuda else ()


def makes_optimizer_state() -> bool:
    """Return whether a step of torch's own ends or begins, at rates of 0, for a state dict of an optimizer.

    Torch steps so where a state dict is taken of a new optimizer, or loaded into it.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


def computing_device(parameter: torch.Tensor) -> torch.device:
    """Return the device that computes with a parameter: under CPU offload its shards are elsewhere."""
    return torch.device(parameter.device_mesh.device_type) if is_dtensor(parameter) else parameter.device


class TrainingState(torch.nn.Module):
    """Holds what a training keeps besides weights, in float32 buffers: state dicts have it, and no engine reads it.

    The buffers stay float32 under ``model.to(dtype)``, and ``to_empty`` never leaves them uninitialized. A state dict
    without them is of a model that kept none, and is no error. Loaded into a model on meta with ``assign=True`` it
    gives the other tensors memory, and ``come_to`` has these follow.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "TrainingState":
        """Follow ``fn`` to its device and nothing else: neither to its dtype, nor into uninitialized memory."""
        for name, buffer in self.named_buffers():
            try:
                device = fn(buffer).device
            except NotImplementedError:
                # ``to`` copies nothing from meta, as ``to_empty`` does: a tensor without elements shows where it leads.
                device = fn(torch.empty(0, dtype=buffer.dtype, device="cpu")).device
            # From meta there is nothing to move: zeros are an empty past.
            if device != buffer.device:
                moved = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                self._buffers[name] = moved
        return self

    def come_to(self, device: torch.device) -> None:
        """Give what is on meta memory on a device: zeros, an empty past."""
        missing = {name: buffer for name, buffer in self.named_buffers() if buffer.is_meta}
        if missing and device.type != "meta":
            with torch.inference_mode(mode=False):
                self._buffers.update({n: torch.zeros_like(b, device=device) for n, b in missing.items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)
            # A state dict has no flags, and ``assign=True`` brings memory for what it has.
            devices = {buffer.device for buffer in self.buffers() if not buffer.is_meta}
            for device in devices:
                self.come_to(device)


def states_follow_parameters(module: torch.nn.Module, *_: Any) -> None:
    """Give the training states in a module that are on meta memory, each where the nearest parameter has it.

    A hook after ``load_state_dict``: one that assigned a state dict without them moved the parameters alone.
    """
    devices = {name: computing_device(p) for name, p in module.named_parameters() if not p.is_meta}
    for fqn, state in module.named_modules():
        part = fqn
        while isinstance(state, TrainingState) and part and any(b.is_meta for b in state.buffers()):
            part = part.rpartition(".")[0]
            within = f"{part}." if part else ""
            near = (device for name, device in devices.items() if name.startswith(within))
            state.come_to(next(near, torch.device("meta")))


def call_first(hook: "torch.utils.hooks.RemovableHandle") -> None:
    """Have a hook called before the others that were registered at the same place."""
    hooks: Any = hook.hooks_dict_ref()
    hooks.move_to_end(hook.id, last=False)


def remove_hook(function: Callable[..., Any], module: torch.nn.Module) -> None:
    """Remove a hook from before or after a module's forward; its arguments may be bound by ``functools.partial``."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "func", hook) is function]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
