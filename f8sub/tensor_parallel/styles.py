"""Styles for ``parallelize_module`` with which a sequence-parallel input crosses the wire as float8.

    x (..., K), Shard(tokens) --quantize--> data, and scales of rows --all-gather, 1 byte/element--> Float8Tensor

With torch's own styles layers multiply in float8 too, of inputs that are sent in high precision. The float8 data are
those of the whole x: one scale per tensor is of the largest amax of all ranks, scales of rows are sent with the rows.
"""

import copy
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from f8sub.errors import Float8ConfigError
from f8sub.formats import HIGH_PRECISION, Float8Format, Operand, why_not_derivable
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph
from f8sub.kernels.quantize import quantize
from f8sub.kernels.scales import CURRENT_SOURCES, LayerSource, Sources
from f8sub.linear.converted import plan_of
from f8sub.linear.dtensor import Cut, Named, histories_left_alone
from f8sub.linear.float8_linear import Float8Linear, Unnamed, sources_of
from f8sub.recipe import Recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import apply, autocast_dtype, compiling, stays_in_graph, untraced


class Float8ColwiseParallel(ColwiseParallel):
    """torch's ``ColwiseParallel`` for a ``Float8Linear``: with ``input_layouts=Shard(1)`` x is gathered as float8.

    Arguments are torch's. dx is reduced in high precision.

    Raises:
        Float8ConfigError: in ``parallelize_module``, a layer that is not converted, or one whose input is to be
            gathered and whose recipe's x cannot be sent in float8; the message says why.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: tuple[Placement],
        desired_input_layouts: tuple[Placement],
        mod: Float8Linear,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> torch.Tensor:
        x = _as_dtensor(inputs[0], device_mesh, input_layouts[0])
        return gather(x, mod, shared=False) if _is_of_tokens(x) else _placed(x, desired_input_layouts[0])

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer = _converted(module, self)
        # A replicated input is not gathered, so any recipe will do.
        if self.input_layouts[0].is_shard():
            check_can_be_sent(layer._f8sub.plan.recipe, layer._f8sub.fqn, shared=False)
        with histories_left_alone(layer):
            return super()._apply(module, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """torch's ``RowwiseParallel`` for a ``Float8Linear``; arguments are torch's.

    Its x stays where it is, with scales of the rank's part; y and dy are sent in high precision.

    Raises:
        Float8ConfigError: in ``parallelize_module``, a layer that is not converted.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        with histories_left_alone(_converted(module, self)):
            return super()._apply(module, device_mesh)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """torch's ``PrepareModuleInput`` that gathers token-sharded inputs as float8, once for all layers that read them.

    The module gets a DTensor of ``Float8Tensor``, of x's shape: to be read by its converted layers alone.

    Args:
        input_layouts: see ``PrepareModuleInput``.
        desired_input_layouts: see ``PrepareModuleInput``.
        input_kwarg_layouts: see ``PrepareModuleInput``.
        desired_input_kwarg_layouts: see ``PrepareModuleInput``.
        use_local_output: see ``PrepareModuleInput``.
        float8_dtype: what the layers read x as; None for whatever that is.
        fwd_config_submodule_fqn: the layer that reads the input, or one of those; where it is not given, all converted
            layers in the module have to read their x with the same formats.

    Raises:
        Float8ConfigError: in ``parallelize_module``, no such layer, several that differ, another ``float8_dtype``, or a
            recipe whose x cannot be sent in float8; the message says why.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        float8_dtype: torch.dtype | None = None,
        fwd_config_submodule_fqn: str | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.float8_dtype = float8_dtype
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn
        self._reader: Float8Linear | None = None

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        # Masks, positions and inputs that are in float8 already go torch's way.
        if input_layout is None or not isinstance(input, torch.Tensor) or input.dtype not in HIGH_PRECISION:
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        x = _as_dtensor(input, mesh, input_layout)
        if self._reader is not None and _is_of_tokens(x) and desired_layout == Replicate():
            x = gather(x, self._reader, shared=True)
        elif desired_layout is not None:
            x = _placed(x, desired_layout)
        return x.to_local() if self.use_local_output else x

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        of_module = copy.copy(self)  # a plan may give one style to many modules
        of_module._reader = self._find_reader(module)
        return super(PrepareFloat8ModuleInput, of_module)._apply(module, device_mesh)

    def _find_reader(self, module: torch.nn.Module) -> Float8Linear:
        if self.fwd_config_submodule_fqn is not None:
            layers = [_converted(module.get_submodule(self.fwd_config_submodule_fqn), self)]
        else:
            layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear)]
        if not layers:
            raise Float8ConfigError(
                f"{type(self).__name__}: {type(module).__name__} has no converted layers; call convert_to_float8 "
                "before parallelize_module, or take torch's PrepareModuleInput"
            )
        # One x is sent once, so all that read it have to take the same float8.
        first, recipe = layers[0], layers[0]._f8sub.plan.recipe
        name = first._f8sub.fqn
        for layer in layers:
            if layer._f8sub.plan.recipe.formats("x") != recipe.formats("x"):
                raise Float8ConfigError(
                    f"{type(self).__name__}: {name} with recipe {recipe.name!r} and {layer._f8sub.fqn} with recipe "
                    f"{layer._f8sub.plan.recipe.name!r} read their inputs differently; name a layer that reads this "
                    "one with fwd_config_submodule_fqn"
                )
        format = check_can_be_sent(recipe, name, shared=True)
        if self.float8_dtype not in (None, format.dtype):
            raise Float8ConfigError(
                f"{name}: float8_dtype={self.float8_dtype}, and recipe {recipe.name!r} reads x as {format}; leave "
                "float8_dtype out"
            )
        return first


def check_can_be_sent(recipe: Recipe, fqn: str, *, shared: bool) -> Float8Format:
    """Return the format that x crosses the wire in, of which both of its operands can be derived.

    Args:
        recipe: of the layer that reads it.
        fqn: the layer's name.
        shared: whether other layers may read it too.

    Raises:
        Float8ConfigError: there is none.
    """
    rowwise, columnwise = recipe.formats("x")
    reason = None
    if shared and recipe.delayed is not None:
        raise Float8ConfigError(
            f"{fqn}: recipe {recipe.name!r} scales x by each layer's own past, and this x is sent before it is known "
            "which layers read it; take Float8ColwiseParallel(input_layouts=...) for each of them"
        )
    if rowwise is None or columnwise is None:
        reason = "a GEMM reads x in high precision"
    elif rowwise.scale_rule.has_global or rowwise.codes_per_byte > 1:
        reason = f"{rowwise} has scales that rows on other ranks have a part in, or two elements in a byte"
    elif not (rowwise.tile.is_whole or rowwise.tile.rows == 1):
        reason = f"a scale of {rowwise} is of several tokens, not all, and they come in another order"
    else:
        reason = why_not_derivable(rowwise, columnwise)
    if reason is not None or rowwise is None:
        raise Float8ConfigError(
            f"{fqn}: recipe {recipe.name!r} cannot have its x gathered in float8, because {reason}; take torch's own "
            "style, which gathers it in high precision, for this layer"
        )
    return rowwise


def gather(x: DTensor, layer: Float8Linear, *, shared: bool) -> DTensor:
    """Gather a token-sharded x, (..., K), as the float8 that a layer reads it in; differentiable.

    Args:
        x: in high precision, on a mesh of one dimension.
        layer: whose recipe is used, or the context's.
        shared: whether other layers may read it too.

    Returns:
        A replicated DTensor of ``Float8Tensor``, of x's shape; of x itself where all GEMMs of the context's recipe read
        it in high precision.

    Raises:
        Float8ConfigError: see ``check_can_be_sent``.
    """
    plan = plan_of(layer, layer.weight)
    if plan.recipe.formats("x") == (None, None):
        return _placed(x, Replicate())
    device = "cpu" if x.is_cpu else x.device.type
    dtype = autocast_dtype(device) or x.dtype
    if not torch.compiler.is_compiling():
        return _gathered(x, plan, dtype, layer._f8sub, sources_of(layer, plan.recipe), shared)
    if plan.recipe.scaling is not None or (shared and not stays_in_graph()):
        # To a graph that a shared x leaves its gradient would be a DTensor of float8.
        return _eagerly(x, layer, shared)
    enter_graph_functions()
    return _node(x, plan.key, dtype, shared)


def _gathered(
    x: DTensor, plan: Plan, dtype: torch.dtype, layer: Named, sources: Sources, shared: bool
) -> DTensor:
    format = check_can_be_sent(plan.recipe, layer.fqn, shared=shared)
    # A scale of the whole x needs the largest amax of all ranks, each of which has some of the tokens.
    tokens = Cut.of(x.device_mesh, 0, 0)
    gathered: DTensor = apply(_Gather, x, format, dtype, sources.x.over(tokens.across))
    return gathered


@in_graph
def _node(x: DTensor, key: str, dtype: torch.dtype, shared: bool) -> DTensor:
    """Gather as one node of compiled code, see ``float8_linear.py``."""
    with compiling():
        return _gathered(x, Plan.made[key], dtype, Unnamed, CURRENT_SOURCES, shared)


@untraced
def _eagerly(x: DTensor, layer: Float8Linear, shared: bool) -> DTensor:
    return gather(x, layer, shared=shared)


class _Gather(torch.autograd.Function):
    """Sends float8 data one way, and gradients in high precision the other."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, format: Float8Format, dtype: torch.dtype, source: LayerSource
    ) -> DTensor:
        # backward reduces dx [..., K], a partial sum on each rank, to the shards that x came in.
        ctx.placements = x.placements
        local = x._local_tensor.to(dtype)
        # x [tokens of this rank, K]
        matrix = local.reshape(-1, local.shape[-1])
        operand, _, amax = quantize(matrix, format, None, source)
        if operand is None:
            raise RuntimeError("quantize returned no rowwise operand for a rowwise format")
        if amax is not None:
            source.keep(amax)
        # Rowwise alone: wgrad's columnwise operand is derived from these data, on each rank.
        whole = Float8Tensor(_gathered_rows(operand, x), None, dtype, x.shape[:-1])
        return DTensor.from_local(
            whole, x.device_mesh, (Replicate(),), run_check=False, shape=x.shape, stride=x.stride()
        )

    @staticmethod
    def backward(ctx: Any, dx: DTensor) -> tuple[DTensor, None, None, None]:
        return dx.redistribute(placements=ctx.placements), None, None, None


def _gathered_rows(operand: Operand, x: DTensor) -> Operand:
    """Return the operand of all tokens, from this rank's: one all-gather, with the scales that belong to rows."""
    data, scale_inv, format, _ = operand
    parts = [data.view(torch.uint8)]
    if not format.tile.is_whole:
        # Not contiguous(): one column of scales counts as that with any strides.
        parts.append(scale_inv.clone(memory_format=torch.contiguous_format).view(torch.uint8))
    # bytes [tokens of this rank, K + bytes of a row's scales]
    matrix = torch.cat(parts, 1)
    rows = matrix.view(*x._local_tensor.shape[:-1], matrix.shape[1])
    shape = torch.Size((*x.shape[:-1], rows.shape[-1]))
    stride = torch.empty(shape, dtype=rows.dtype, device="meta").stride()
    sent = DTensor.from_local(rows, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)
    received = sent.redistribute(placements=(Replicate(),)).to_local().reshape(-1, shape[-1])
    # [tokens of all ranks, K]: the gathered rows split into data and scales again.
    codes = received[:, : data.shape[1]].contiguous().view(data.dtype)
    if not format.tile.is_whole:
        scale_inv = received[:, data.shape[1] :].contiguous().view(scale_inv.dtype)
    return Operand(codes, scale_inv, format)


def _as_dtensor(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (placement,), run_check=False)


def _placed(x: DTensor, placement: Placement) -> DTensor:
    return x if x.placements == (placement,) else x.redistribute(placements=(placement,), async_op=True)


def _is_of_tokens(x: DTensor) -> bool:
    """Return whether each rank has some of the rows, whole."""
    (placement,) = x.placements
    return placement.is_shard() and not placement.is_shard(x.dim() - 1)


def _converted(module: torch.nn.Module, style: Any) -> Float8Linear:
    if not isinstance(module, Float8Linear):
        raise Float8ConfigError(
            f"{type(style).__name__} is for a Float8Linear, got {module}; call convert_to_float8 before "
            "parallelize_module, or take torch's style of that name for a layer that stays in high precision"
        )
    return module
