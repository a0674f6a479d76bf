"""The operands that forward multiplies, gathered one FSDP2 block after the other.

An exporter that casts a float32 master instead of what forward casts has other codes for 2 to 3 % of the weights. So
nothing is cast here: each operand comes from the function that forward itself calls.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist

from f8sub.checkpoint.names import Pieces, pieces_of, without_wrappers
from f8sub.errors import Float8ConfigError, Float8NumericsError
from f8sub.formats import ALL, Float8Format, Operand
from f8sub.linear.dtensor import place
from f8sub.linear.float8_linear import Float8Linear, sources_of, weight_rowwise
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import TrainingState, is_dtensor, is_fsdp_module
from f8sub.weights.weight import STATE, is_converted, local_tensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from f8sub.experts.module import Float8Experts
    from f8sub.linear.converted import LayerState


class NamedTensor(NamedTuple):
    """A parameter or a persistent buffer, by its name.

    Attributes:
        name: without the segments of wrappers.
        module: the module that has it.
        attribute: its name there.
    """

    name: str
    module: torch.nn.Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that the module has there now."""
        found: torch.Tensor = getattr(self.module, self.attribute)
        return found

    @property
    def format(self) -> Float8Format | None:
        """The format that fprop reads a layer's weight in, or one expert's; None for all that is not in float8."""
        return None if (state := self.state) is None else state.plan.recipe.fprop.b

    @property
    def state(self) -> "LayerState | None":
        """The ``LayerState`` of the converted module whose weight it is; None for any other tensor."""
        state: LayerState | None = vars(self.module)[STATE] if is_converted(self.module) else None
        return state if state is not None and self.attribute in state.weights else None

    @property
    def is_of_experts(self) -> bool:
        """Whether it is a weight of converted experts."""
        return (state := self.state) is not None and state.plan.grouped

    @property
    def is_transposed(self) -> bool:
        """Whether it is a converted weight that is stored as (E, K, N)."""
        return (state := self.state) is not None and state.weights[self.attribute]

    @property
    def fqn(self) -> str:
        """The module's name."""
        return self.name.rpartition(".")[0]


def blocks_of(model: torch.nn.Module) -> Iterator[tuple["FSDPModule | None", list[NamedTensor]]]:
    """Yield what FSDP2 gathers together, with the module that gathers it, in the model's order.

    A tied tensor comes once, by its first name. None gathers what FSDP2 does not shard.
    """
    owner: dict[torch.nn.Module, FSDPModule | None] = {}
    found: dict[FSDPModule | None, list[NamedTensor]] = {}
    seen: set[torch.Tensor] = set()
    layer = "\n"  # begins no name
    for fqn, module in model.named_modules():
        parent = fqn.rpartition(".")[0]
        # A module without ``fully_shard`` of its own is gathered by the nearest module above that has it.
        above = owner.get(model.get_submodule(parent)) if fqn else None
        owner[module] = module if is_fsdp_module(module) else above
        if fqn.startswith(layer) or isinstance(module, TrainingState):
            continue  # what a recipe keeps of a float8 layer or of experts, and attention, which no engine reads
        if isinstance(module, Float8Linear):
            layer = f"{fqn}." if fqn else ""
        tensors = dict(module._parameters)
        tensors |= {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for attribute, tensor in tensors.items():
            if tensor is None or tensor in seen:
                continue
            seen.add(tensor)
            name = f"{fqn}.{attribute}" if fqn else attribute
            found.setdefault(owner[module], []).append(NamedTensor(without_wrappers(name), module, attribute))
    yield from found.items()


def tied_layers(model: torch.nn.Module) -> list[str]:
    """Return names of linear layers in high precision whose weight goes by another name, such as a tied head's.

    Readers have a layer there, of which they have to know that it is not in float8.
    """
    named = {part.name for _, parts in blocks_of(model) for part in parts}
    layers = [
        NamedTensor(f"{without_wrappers(fqn)}.weight", module, "weight")
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.nn.Linear) and not isinstance(module, Float8Linear)
    ]
    pieces = names_of(model, [part for part in layers if part.name not in named])
    return [piece.name.removesuffix(".weight") for of_layer in pieces.values() for piece in of_layer]


def names_of(model: torch.nn.Module, parts: Iterable[NamedTensor]) -> Pieces:
    """Return what a checkpoint calls the tensors of each part, by the part's name; see ``pieces_of``."""
    parts = list(parts)
    # Experts that are stored as (E, K, N) are no linear layers as they are: only a model's
    # own rule can name their parts.
    experts = {part.name: part.attribute for part in parts if part.is_of_experts and not part.is_transposed}
    return pieces_of(model, {part.name: tuple(part.tensor.shape) for part in parts}, experts)


def experts_of(part: NamedTensor, dtype: torch.dtype | None) -> Iterator[Operand]:
    """Yield the weights of all experts as fprop reads them, one after the other: views of what was gathered."""
    weight, module = part.tensor, cast("Float8Experts", part.module)
    if not part.is_of_experts:
        raise RuntimeError(f"{part.name} is not a weight of experts")
    # [E, N, K], by the function that the experts' forward calls.
    found = module._f8sub.rowwise(module, part.attribute, _dtype_of(part, local_tensor(weight), dtype))
    if is_dtensor(weight):
        shape, placements = (weight.shape[0], *found.data.shape[1:]), weight.placements
        if any(not placement.is_replicate() and not placement.is_shard(0) for placement in placements):
            raise Float8ConfigError(
                f"{part.name}: experts are exported that ranks have whole, and its placements are {placements}"
            )
        data, scale_inv = (_gathered(each, weight, shape[0]) for each in (found.data, found.scale_inv))
        found = found._replace(data=data, scale_inv=scale_inv)
    _check_finite(part, found[:2])
    for index in range(len(found.data)):
        yield found.of_group(index)


def _gathered(part: torch.Tensor, weight: "DTensor", count: int) -> torch.Tensor:
    """Gather all experts' data or scales from those of this rank's experts."""
    # Collectives do not take float8 everywhere; bytes are sent as they are.
    plain = part.contiguous().view(torch.uint8) if part.itemsize == 1 else part.contiguous()
    shape = torch.Size((count, *plain.shape[1:]))
    stride = (plain.shape[1] * plain.shape[2], plain.shape[2], 1)
    whole = torch.distributed.tensor.DTensor.from_local(
        plain, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )
    return whole.full_tensor().view(part.dtype)


def _dtype_of(part: NamedTensor, local: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that fprop computes in; Float8ConfigError where ``dtype`` is None and nothing tells it."""
    if dtype is None and local.dtype == torch.float32 and not isinstance(local, Float8Tensor):
        raise Float8ConfigError(
            f"{part.fqn}: its weight is float32, and its codes depend on the dtype of the forward; give "
            "dtype=torch.bfloat16 for a forward under torch.autocast, or dtype=torch.float32"
        )
    return dtype or local.dtype


def _check_finite(part: NamedTensor, tensors: Iterable[torch.Tensor]) -> None:
    if any(bool(tensor.float().isnan().any()) for tensor in tensors):
        raise Float8NumericsError(
            f"{part.fqn}: its float8 weight has NaN, which an engine would serve; restore the weights from a "
            "checkpoint before they are exported"
        )


def operand_of(part: NamedTensor, dtype: torch.dtype | None) -> Operand:
    """Return a float8 layer's weight as its fprop reads it, whole, in memory of its own.

    Args:
        part: its weight, gathered.
        dtype: what fprop computes in, where weights of float32 are not gathered in float8.

    Raises:
        Float8ConfigError: ``dtype`` is not given and nothing tells it.
        Float8NumericsError: an element or a scale is NaN.
    """
    layer, weight = part.module, part.tensor
    if not isinstance(layer, Float8Linear):
        raise RuntimeError(f"{part.name} is not the weight of a float8 layer")
    recipe = layer._f8sub.plan.recipe
    sources = sources_of(layer, recipe)
    local: torch.Tensor = weight
    if is_dtensor(weight):
        # Tensor parallelism makes scales global in ``place``, together with x: an x [0, K]
        # of no rows stands for it here.
        nothing = torch.empty(0, weight.shape[1], dtype=weight.dtype, device=weight.device)
        replicated = [torch.distributed.tensor.Replicate()]
        x = weight.from_local(nothing, weight.device_mesh, replicated, run_check=False)
        sources = place(layer, layer._f8sub.plan, weight, x, None, sources).sources
        local = weight.to_local()
    operand = weight_rowwise(local, (layer._f8sub.plan, _dtype_of(part, local, dtype), sources))
    if not isinstance(operand, Operand):
        raise RuntimeError(f"{part.name}: a weight whose fprop is in float8 has no codes")
    operand = _whole(operand, weight) if is_dtensor(weight) else operand
    _check_finite(part, operand.tensors)
    # FSDP2 frees or overwrites the gathered memory that these are views of.
    return Operand.of(operand.format, *(tensor.clone() for tensor in operand.tensors))


def _whole(part: Operand, weight: "DTensor") -> Operand:
    """Return the operand of the whole weight, from this rank's tensor-parallel part."""
    (placement,), mesh = weight.placements, weight.device_mesh
    if placement.is_replicate():
        return part
    dim, format = placement.dim, part.format  # type: ignore[attr-defined]
    # This rank's part [N / world, K] or [N, K / world], as bytes.
    local = part.data.view(torch.uint8).contiguous()
    shape = weight.shape
    codes = weight.from_local(
        local, mesh, weight.placements, run_check=False, shape=shape, stride=(shape[1], 1)
    ).full_tensor()
    edge = (format.tile.rows, format.tile.cols)[dim]
    stored = part.scale_inv.view(torch.uint8) if part.scale_inv.itemsize == 1 else part.scale_inv
    scales = stored.new_zeros(format.tile.scale_shape((shape[0], shape[1])))
    # torch.chunk's rule, by which DTensor shards. A part may begin within a tile, whose scale both ranks have.
    chunk = -(-shape[dim] // mesh.size())
    first = 0 if edge == ALL else min(mesh.get_local_rank() * chunk, shape[dim] - 1) // edge
    # An empty part has scales that stand for nothing.
    if part.data.numel():
        scales.narrow(dim, first, stored.shape[dim]).copy_(stored)
    # Scales are positive, and equal where several ranks have a tile: so the maximum puts them together.
    dist.all_reduce(scales, dist.ReduceOp.MAX, group=mesh.get_group())
    return Operand(codes.view(format.dtype), scales.view(part.scale_inv.dtype), format)
