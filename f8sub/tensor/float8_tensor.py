"""Float8Tensor: a matrix quantized for one or both of the directions a GEMM can contract it in.

UnroundedGradient: the gradient of a weight, in bfloat16, whose values stay in float32 until something reads them.

[Note: unrounded gradients] Autograd wants the gradient of a weight in the weight's dtype, which under FSDP2 is
bfloat16. FSDP2 reduces gradients in float32. Rounded for autograd, a gradient would be written, read and written again
before it is reduced. Products in float8 make it in float32, so it stays what they made, and the reduction reads it
where they wrote it.
"""

from collections.abc import Callable, Sequence
from itertools import compress, product
from typing import Any

import torch

from f8sub.errors import Float8ConfigError, Float8ShapeError
from f8sub.formats import Float8Format, Operand, present, why_not_derivable
from f8sub.kernels import cuda, reference
from f8sub.tensor.op_schema import describe
from f8sub.torch_compat import no_torch_function, return_and_correct_aliasing, tree_leaves, tree_map_only

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

OPS: dict[Any, Handler] = {}
"""The operators that keep codes or read them: at the end those that training itself runs; features have others."""

ANY_OTHER = "any other operator"
"""The entry of ``OPS`` for those that are not there."""

_PARTS = ("data", "scale_inv", "global_scale_inv")
_BUFFERS = tuple(f"{usage}_{part}" for usage in ("rowwise", "columnwise") for part in _PARTS)
_FORMATS = ("rowwise_format", "columnwise_format")
_THERE = {
    (row, row_global, col, col_global): [*compress(_BUFFERS, (row, row, row_global, col, col, col_global))]
    for row, row_global, col, col_global in product((False, True), repeat=4)
}
"""Names of the buffers that are there, by which are: compiled code asks three times a call for each weight."""


class Float8Tensor(torch.Tensor):
    """A (rows, cols) matrix in float8; or one of shape (..., cols), whose rows its operands have one after the other.

    A value: float8 data, scales, formats and the dtype it stands for, nothing else. ``A @ B`` reads ``A.rowwise`` and
    ``B.columnwise``; ``t()`` swaps the two and moves no bytes.

    Attributes:
        rowwise: operand stored as it is, (rows, cols), contracted along cols; None when that usage is absent.
        columnwise: operand stored transposed, (cols, rows), contracted along rows; None when absent.
        dtype: the high-precision dtype it stands for: of ``dequantize()`` and of a matmul's result.
        gradient_dtype: of the values that layers give as the gradient of this weight; None for ``dtype``.

    Raises:
        Float8ConfigError: neither usage given.
    """

    # Operators decide the class of their results: torch would make all of them Float8Tensors.
    __torch_function__ = no_torch_function

    # What torch.compile sees, by the names of _BUFFERS. All of a usage that is absent is None.
    rowwise_data: Any
    rowwise_scale_inv: Any
    rowwise_global_scale_inv: torch.Tensor | None
    rowwise_format: Float8Format | None
    columnwise_data: Any
    columnwise_scale_inv: Any
    columnwise_global_scale_inv: torch.Tensor | None
    columnwise_format: Float8Format | None
    gradient_dtype: torch.dtype | None = None

    @staticmethod
    def __new__(
        cls: type["Float8Tensor"],
        rowwise: Operand | None,
        columnwise: Operand | None,
        dtype: torch.dtype,
        leading: Sequence[int] | None = None,
    ) -> "Float8Tensor":
        """Wrap operands; ``leading`` dims take the place of the rows in their shape."""
        shape: Sequence[int]
        if rowwise is not None:
            data, shape = rowwise.data, rowwise.shape
        elif columnwise is not None:
            data, shape = columnwise.data, columnwise.shape[::-1]
        else:
            raise Float8ConfigError("a Float8Tensor has a rowwise or a columnwise operand, got neither")
        shape = shape if leading is None else (*leading, shape[1])
        # Without storage of its own: the operands' tensors have the memory.
        self: Float8Tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=data.device)
        self._set_usages(rowwise, columnwise)
        return self

    @property
    def rowwise(self) -> Operand | None:
        """The operand contracted along the last dimension, stored (rows, cols)."""
        if self.rowwise_format is None:
            return None
        return Operand(*(getattr(self, f"rowwise_{part}") for part in Operand._fields))

    @property
    def columnwise(self) -> Operand | None:
        """The operand contracted along the first dimension, stored transposed: (cols, rows)."""
        if self.columnwise_format is None:
            return None
        return Operand(*(getattr(self, f"columnwise_{part}") for part in Operand._fields))

    @property
    def wgrad_dtype(self) -> torch.dtype:
        """The dtype in which a product in float8 makes the gradient of this weight, see ``UnroundedGradient``."""
        # Dynamo traces no tensor of a class that it has not seen as an input.
        if self.gradient_dtype is None or torch.compiler.is_dynamo_compiling():
            return self.dtype
        return self.gradient_dtype

    def dequantize(self) -> torch.Tensor:
        """Return high-precision values, of its shape in ``dtype``; from the rowwise data where both are there.

        Raises:
            Float8ConfigError: FSDP2 freed the memory of a gathered weight, which something holds on to.
        """
        self._check_memory()
        if (rowwise := self.rowwise) is not None:
            return reference.dequantize(rowwise, self.dtype).view(self.shape)
        # The columnwise operand is (cols, rows).
        return reference.dequantize(present(self.columnwise), self.dtype).t().reshape(self.shape)

    def _check_memory(self) -> None:
        data = present(self.rowwise or self.columnwise).data
        # Of a traced tensor there is none to look at.
        if torch.compiler.is_compiling() or type(data) is not torch.Tensor or data.numel() == 0:
            return
        # A float8 view of freed memory has an address that torch does not check.
        if data.untyped_storage().nbytes() == 0:
            raise Float8ConfigError(
                f"{self!r} is a weight that FSDP2 gathered, and its memory is freed since; read the module's own "
                "parameter, which is the sharded one now"
            )

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Derive or drop a usage, in place.

        Args:
            rowwise: True to have it, derived from the columnwise codes where absent; False to drop it; None to
                leave it as it is.
            columnwise: the same the other way round.

        Raises:
            Float8ConfigError: both would be dropped, or deriving would round a second time.
            Float8ShapeError: the rows of the usage to derive cannot be packed as the format asks.
        """
        row, col = self.rowwise, self.columnwise
        new_row = None if rowwise is False else row
        new_col = None if columnwise is False else col
        if rowwise and row is None:
            # The same function both ways: a usage is the other one of the transposed matrix.
            new_row = _derive(present(col), "rowwise", "columnwise")
        if columnwise and col is None:
            new_col = _derive(present(row), "columnwise", "rowwise")
        if new_row is None and new_col is None:
            raise Float8ConfigError(
                f"{self!r}: dropping the last usage would leave no data; keep one of the two"
            )
        self._set_usages(new_row, new_col)

    def map_buffers(
        self, fn: Callable[[torch.Tensor], torch.Tensor], leading: Sequence[int] | None = None
    ) -> "Float8Tensor":
        """Return the tensor with ``fn`` applied to every inner buffer, and other ``leading`` dims where they are given.

        The one way handlers rebuild a tensor.
        """
        row, col = (
            None if op is None else Operand.of(op.format, *map(fn, op.tensors))
            for op in (self.rowwise, self.columnwise)
        )
        return Float8Tensor(row, col, self.dtype, self.shape[:-1] if leading is None else leading)

    def _set_usages(self, rowwise: Operand | None, columnwise: Operand | None) -> None:
        # Attributes by usage and part, because torch.compile asks for inner tensors by name.
        for usage, operand in (("rowwise", rowwise), ("columnwise", columnwise)):
            for part, value in zip(Operand._fields, operand or (None, None, None, None), strict=True):
                setattr(self, f"{usage}_{part}", value)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        row = self.rowwise_data is not None, self.rowwise_global_scale_inv is not None
        col = self.columnwise_data is not None, self.columnwise_global_scale_inv is not None
        # compiled code calls this three times per weight and call, so the lists of names are made once
        return _THERE[row + col], (
            self.rowwise_format,
            self.columnwise_format,
            self.dtype,
            self.gradient_dtype,
        )

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> "Float8Tensor":
        rowwise_format, columnwise_format, dtype, gradient_dtype = context
        row, col = (
            None if format is None else Operand.of(format, *(inner[n] for n in names if n in inner))
            for names, format in ((_BUFFERS[:3], rowwise_format), (_BUFFERS[3:], columnwise_format))
        )
        made = Float8Tensor(row, col, dtype, outer_size[:-1])
        made.gradient_dtype = gradient_dtype
        return made

    def __getstate__(self) -> dict[str, Any]:
        # Formats by name, so that ``torch.load(weights_only=True)`` needs no class but this one.
        state = dict(vars(self))
        # What layers give is of FSDP2's own parameter alone.
        state.pop("gradient_dtype", None)
        for name in _FORMATS:
            state[name] = None if state[name] is None else state[name].name
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> "Float8Tensor":
        copied: Float8Tensor = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.gradient_dtype = None
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            is_named = name in _FORMATS and value is not None
            setattr(self, name, Float8Format.parse(value) if is_named else value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        usages = [f"rowwise={self.rowwise_format.name}"] if self.rowwise_format is not None else []
        usages += [f"columnwise={self.columnwise_format.name}"] if self.columnwise_format is not None else []
        return f"Float8Tensor({tuple(self.shape)}, {', '.join(usages)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = OPS.get(func) or OPS[ANY_OTHER]
        if torch.is_inference_mode_enabled() and describe(func).is_view:
            # There too a view of a tensor that was made outside is no inference tensor.
            with torch.inference_mode(mode=False), torch.no_grad():
                return handler(func, args, kwargs or {})
        return handler(func, args, kwargs or {})


def _derive(source: Operand, wanted: str, have: str) -> Operand:
    if reason := why_not_derivable(source.format, source.format):
        raise Float8ConfigError(
            f"cannot derive the {wanted} usage from the {have} codes: {reason}; quantize the high-precision "
            f"tensor with {wanted}=True instead"
        )
    if (depth := source.shape[0]) % source.format.depth_multiple:
        raise Float8ShapeError(
            f"cannot derive the {wanted} usage: {source.format} takes rows of a multiple of "
            f"{source.format.depth_multiple} elements, and they would have {depth}"
        )
    return cuda.derive_columnwise(source, source.format)


# It makes tensors of what a file holds and runs nothing.
torch.serialization.add_safe_globals([Float8Tensor])

aten = torch.ops.aten


def implements(*ops: Any) -> Callable[[Handler], Handler]:
    """Register a handler in the table; one operator has one handler."""

    def register(handler: Handler) -> Handler:
        for op in ops:
            if op in OPS:
                raise RuntimeError(f"{op} is already handled by {OPS[op]}")
            OPS[op] = handler
        return handler

    return register


@implements(aten.detach.default, aten.alias.default, aten.clone.default)
def _same_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = args[0].map_buffers(lambda buffer: func(buffer, *args[1:], **kwargs))
    return return_and_correct_aliasing(func, args, kwargs, out)


@implements(aten._to_copy.default)
def _to_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move to another device; another dtype gives high-precision values."""
    tensor: Float8Tensor = args[0]
    if kwargs.get("dtype") not in (None, tensor.dtype):
        return OPS[ANY_OTHER](func, args, kwargs)
    moved = {name: value for name, value in kwargs.items() if name != "dtype"}
    return tensor.map_buffers(lambda buffer: func(buffer, **moved))


@implements(aten.view.default, aten.as_strided.default)
def _view_of_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View the same rows under other leading dims. FSDP2 asks for an unsharded parameter's own, with its strides."""
    tensor, shape, *strided = args
    # On meta: torch computes the shape, with its -1, and the strides that such a view would have.
    viewed = torch.empty(shape if strided else tensor.shape, dtype=tensor.dtype, device="meta")
    viewed = viewed if strided else viewed.view(shape)
    apart = strided and (
        tuple(strided[0]) != viewed.stride() or any(strided[1:]) or kwargs.get("storage_offset")
    )
    # A view that cuts rows apart, or begins elsewhere, is none of whole rows.
    if viewed.shape[-1:] != tensor.shape[-1:] or viewed.numel() != tensor.numel() or apart:
        return OPS[ANY_OTHER](func, args, kwargs)
    out = tensor.map_buffers(aten.alias.default, leading=viewed.shape[:-1])
    return return_and_correct_aliasing(func, args, kwargs, out)


_SAME = aten.detach.default, aten.alias.default, aten.clone.default


class UnroundedGradient(torch.Tensor):
    """A gradient of ``dtype`` to all that looks at it. Sums of gradients, and casts to float32, do not round it.

    Attributes:
        exact: the values, in float32.
    """

    __torch_function__ = no_torch_function

    exact: torch.Tensor

    @staticmethod
    def __new__(
        cls: type["UnroundedGradient"], exact: torch.Tensor, dtype: torch.dtype
    ) -> "UnroundedGradient":
        """Wrap values of another dtype than ``dtype``."""
        self: UnroundedGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            exact.shape,
            strides=exact.stride(),
            storage_offset=exact.storage_offset(),
            dtype=dtype,
            device=exact.device,
        )
        self.exact = exact
        return self

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["exact"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: torch.dtype, outer_size: Sequence[int], outer_stride: Any
    ) -> "UnroundedGradient":
        return UnroundedGradient(inner["exact"], context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rounded(self).__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the rounded values as a NumPy array."""
        return _rounded(self).numpy(force=force)

    def tolist(self) -> Any:
        """Return the rounded values as lists."""
        return _rounded(self).tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnroundedGradient({tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(getattr(kind, "takes_unrounded", False) for kind in types):
            return NotImplemented  # torch asks that class next
        operator = describe(func)
        if operator.is_view or func in _SAME:
            made = func(args[0].exact, *args[1:], **kwargs)
            parts = made if isinstance(made, list | tuple) else (made,)
            if all(part.dtype == args[0].exact.dtype for part in parts):  # else it reads bits
                same = tree_map_only(torch.Tensor, lambda part: UnroundedGradient(part, args[0].dtype), made)
                return return_and_correct_aliasing(func, args, kwargs, same)
        if func is aten._to_copy.default:
            made = func(args[0].exact, **kwargs)
            return UnroundedGradient(made, args[0].dtype) if kwargs.get("dtype") is None else made
        if func is aten.new_empty_strided.default and kwargs.get("dtype") in (None, args[0].dtype):
            # Autograd copies into it where something else holds the gradient.
            made = func(args[0].exact, *args[1:], **{**kwargs, "dtype": None})
            return UnroundedGradient(made, args[0].dtype)
        if func is aten.add.Tensor and args[0].dtype is getattr(args[1], "dtype", None):
            return UnroundedGradient(func(*map(exact, args), **kwargs), torch.result_type(*args))
        return _call(func, operator.written, args, kwargs)


def _call(
    func: Any, written: Sequence[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call an operator as on tensors of the gradients' dtype, and return what it would."""
    places = {place for each in written for place in each}
    given = [*enumerate(args), *kwargs.items()]
    targets = tree_leaves([value for place, value in given if place in places])
    gradients = [each for each in targets if isinstance(each, UnroundedGradient)]
    keep = func is aten.add_.Tensor or (bool(gradients) and _keeps_exact(func, [value for _, value in given]))
    values = {id(each): exact(each) if keep else _rounded(each) for each in gradients}

    def read(gradient: torch.Tensor) -> torch.Tensor:
        return values[id(gradient)] if id(gradient) in values else (exact if keep else _rounded)(gradient)

    returned = func(*_with(read, args), **_with(read, kwargs))
    if not keep:
        for each in gradients:
            exact(each).copy_(values[id(each)])
    # What is written and returned, the dispatcher itself takes from the arguments.
    return returned


def _keeps_exact(func: Any, given: Sequence[Any]) -> bool:
    """Return whether an operator that writes to gradients takes their float32 values in their place."""
    if func.namespace != "aten":
        return True  # collectives
    # Many refuse tensors of two dtypes, but in one list; others would change the shape of the values alone.
    leaves = [tree_leaves(each) for each in given]
    others = (
        each
        for among in leaves
        for each in among
        if isinstance(each, torch.Tensor) and not any(isinstance(one, UnroundedGradient) for one in among)
    )
    return torch.Tag.inplace_view not in func.tags and not any(
        each.dim() and each.is_floating_point() for each in others
    )


def exact(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values without a rounding that is still to come."""
    return gradient.exact if isinstance(gradient, UnroundedGradient) else gradient


def _with(values: Callable[[torch.Tensor], torch.Tensor], given: Any) -> Any:
    return tree_map_only(UnroundedGradient, values, given)


def _rounded(gradient: torch.Tensor) -> torch.Tensor:
    return exact(gradient).to(gradient.dtype)
