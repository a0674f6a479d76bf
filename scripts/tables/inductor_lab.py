"""What Inductor generates for an H200 that is not there: kernels, the bytes they move, what is saved for backward.

A module is compiled on the CPU as always, up to the joint graph of its forward and backward; from there on every tensor
is said to be on the device, and code is generated and never run. A buffer that a kernel reads or writes is counted once
a kernel, which flatters kernels that go over a matrix in loops. Operators of f8sub are counted by the launches of the
Triton kernels that are behind them on a GPU, each of which counts what it is handed. GEMMs, with what they read and
write, are not counted: they are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from scripts.bench.fake_h200 import fake_h200

DEVICE = torch.device("cuda", 0)

GEMMS = ("mm", "addmm", "bmm", "_scaled_mm", "_scaled_mm_v2", "gemm_nt")
"""What the names of operators that multiply matrices end with."""


@dataclass(frozen=True)
class Buffer:
    """What of a tensor a kernel reads or writes."""

    dtype: str
    shape: tuple[int, ...]
    moved: int
    written: bool

    def __str__(self) -> str:
        return f"{'= ' * self.written}{self.dtype}{list(self.shape)} {self.moved / 1e6:.1f}"


@dataclass(frozen=True)
class Kernel:
    """One launch, or an operator of several; its ``kind`` is "generated", "operator" or "GEMM".

    A generated one is named by Inductor's buffers that it fills. ``moved`` are bytes read and written, 0 of a GEMM.
    """

    name: str
    kind: str
    launches: int
    moved: int
    buffers: tuple[Buffer, ...]

    def __str__(self) -> str:
        return f"{self.kind:9} {self.moved / 1e6:8.1f} MB  {self.name}: {', '.join(map(str, self.buffers))}"


@dataclass(frozen=True)
class Saved:
    """A tensor kept from forward to backward; ``given`` where it is an input of the graph or a view of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    given: bool

    def __str__(self) -> str:
        kind = "given" if self.given else "saved"
        return f"{kind:9} {self.nbytes / 1e6:8.1f} MB  {self.name}: {self.dtype}{list(self.shape)}"


@dataclass
class Generated:
    """What was generated of one module: kernels in order, and tensors that live from forward to backward."""

    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)

    @property
    def kernels(self) -> list[Kernel]:
        """Of both, GEMMs left out."""
        return [kernel for kernel in (*self.forward, *self.backward) if kernel.kind != "GEMM"]

    @property
    def launches(self) -> int:
        """Of all of them."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def moved(self) -> int:
        """Bytes read and written by all of them."""
        return sum(kernel.moved for kernel in self.kernels)

    @property
    def saved_bytes(self) -> int:
        """Bytes that are alive between forward and backward for no other reason."""
        return sum(tensor.nbytes for tensor in self.saved if not tensor.given)


def generate(module: torch.nn.Module, *args: torch.Tensor) -> Generated:
    """Compile ``module(*args)`` and its backward for an H200.

    Args:
        module: on the CPU; its tensors need no values.
        args: on the CPU. The result is one tensor.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering

    found = Generated()

    def generate_only(graph: Any) -> Any:
        graph.codegen()
        kernels = found.backward if graph.is_backward else found.forward
        kernels += [kernel for node in graph.scheduler.nodes for kernel in _kernels(node)]
        results = [_result(output) for output in graph.graph_outputs]
        return mock.Mock(call=lambda inputs: results, runner=None)

    def compile_graph(graph: Any, inputs: Any, **options: Any) -> Any:
        _move(graph.graph)
        for tensor in pytree.tree_leaves(inputs):
            _move_tensor(tensor)
        if not options.get("is_backward"):
            found.saved = list(_saved(graph.graph))
        with fake_h200(), mock.patch.object(GraphLowering, "compile_to_module", generate_only):
            return compile_fx_inner(graph, inputs, **options)

    torch._dynamo.reset()
    compiled = torch.compile(
        module, backend=lambda graph, inputs: compile_fx(graph, inputs, compile_graph), fullgraph=True
    )
    with (
        inductor_config.patch(joint_custom_post_pass=_move, force_disable_caches=True, compile_threads=1),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        y = compiled(*args)
        y.backward(torch.empty_like(y))
    if not found.forward or not found.backward:
        raise RuntimeError("the module has no forward or no backward that Inductor would generate code for")
    return found


def _move(graph: torch.fx.Graph) -> None:
    """Say of everything in a graph that it is on the device."""
    for node in graph.nodes:
        for tensor in pytree.tree_leaves(node.meta.get("val")):
            _move_tensor(tensor)
        node.args, node.kwargs = pytree.tree_map(
            lambda value: DEVICE if isinstance(value, torch.device) else value, (node.args, node.kwargs)
        )


def _move_tensor(tensor: Any) -> None:
    if isinstance(tensor, torch._subclasses.FakeTensor):
        tensor.fake_device = DEVICE


def _result(output: Any) -> torch.Tensor | None:
    """A tensor without values in the place of what the code would return."""
    from torch._inductor import ir

    if isinstance(output, ir.NoneAsConstantBuffer | ir.ShapeAsConstantBuffer):
        return None
    size, stride = (tuple(map(int, numbers)) for numbers in (output.get_size(), output.get_stride()))
    return torch.empty_strided(size, stride, dtype=output.get_dtype())


def _saved(forward: torch.fx.Graph) -> Iterable[Saved]:
    """Outputs of a forward graph but its own result, which is the first, and what it writes to its inputs."""
    (outputs,) = next(node.args for node in forward.nodes if node.op == "output")
    results = [node for node in outputs if isinstance(node, torch.fx.Node)]
    for node in dict.fromkeys(results):
        value = node.meta.get("val")
        if node is results[0] or not isinstance(value, torch.Tensor) or node.name.startswith("copy_"):
            continue
        source = node
        while source.op == "call_function" and _is_view(source.target):
            source = source.all_input_nodes[0]
        dtype = str(value.dtype).removeprefix("torch.")
        yield Saved(node.name, dtype, tuple(value.shape), value.nbytes, source.op == "placeholder")


def _is_view(target: Any) -> bool:
    results = target._schema.returns if hasattr(target, "_schema") else ()
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)


def _kernels(node: Any) -> Iterable[Kernel]:
    """What one node of a schedule launches."""
    from torch._inductor import scheduler

    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return
    buffers = _buffers(node)
    if not isinstance(node, scheduler.ExternKernelSchedulerNode):
        names = ", ".join(inner.node.get_name() for inner in node.get_nodes() if inner.node is not None)
        yield Kernel(names, "generated", 1, node.get_read_write_buffers_sizes(), buffers)
        return
    made = node.node
    if type(made).__name__ == "MultiOutput":
        return
    name = made.python_kernel_name or str(made.op_overload)
    operator = name.removesuffix(".default").rpartition("::")[2].rpartition(".")[2]
    if operator.endswith(GEMMS):
        yield Kernel(operator, "GEMM", 1, 0, buffers)
    elif operator in OPERATORS:
        yield Kernel(operator, "operator", *OPERATORS[operator](made), buffers)
    else:
        yield Kernel(operator, "operator", 1, node.get_read_write_buffers_sizes(), buffers)


def _buffers(node: Any) -> tuple[Buffer, ...]:
    from torch._inductor.virtualized import V

    sizes = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    written = {dep.name for dep in node.read_writes.writes}
    found = []
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        buffer = V.graph.try_get_buffer(name)
        if buffer is not None and buffer.maybe_get_dtype() is not None:
            dtype = str(buffer.get_dtype()).removeprefix("torch.")
            found.append(Buffer(dtype, tuple(map(int, buffer.get_size())), size, name in written))
    return tuple(found)


def _meta(buffer: Any) -> torch.Tensor:
    return torch.empty([int(n) for n in buffer.get_size()], dtype=buffer.get_dtype(), device="meta")


def _of_launches(launches: Sequence[Any]) -> tuple[int, int]:
    """How many they are, and bytes of all tensors that they are handed."""
    arguments = (value for launch in launches for value in launch.taken.values())
    return len(launches), sum(value.nbytes for value in arguments if isinstance(value, torch.Tensor))


def _formats(node: Any) -> list[Any]:
    from f8sub import Float8Format

    return [Float8Format.parse(value) for value in node.constant_args if isinstance(value, str)]


def _of_quantization(node: Any) -> tuple[int, int]:
    from f8sub import Float8Format
    from f8sub.kernels.triton import quantize_launch

    (x, amax, *names), _ = node.unflatten_args(node.inputs, node.constant_args)
    row, col = (None if name is None else Float8Format.parse(name) for name in names)
    known = None if amax is None else _meta(amax)
    return _of_launches(quantize_launch.quantization(_meta(x), row, col, amax=known).launches)


def _of_derivation(node: Any) -> tuple[int, int]:
    from f8sub import Operand
    from f8sub.formats import share_scale
    from f8sub.kernels.triton import quantize_launch

    rowwise, columnwise = _formats(node)
    if share_scale(rowwise, columnwise):
        return _of_transposition(node)
    operand = Operand(*map(_meta, node.inputs[:2]), rowwise)
    return _of_launches(quantize_launch.derivation(operand, columnwise)[0])


def _of_transposition(node: Any) -> tuple[int, int]:
    from f8sub.kernels.triton import quantize_launch

    codes = _meta(node.inputs[0])
    return _of_launches([quantize_launch.transposition(codes, codes.new_empty(codes.shape[::-1]))])


OPERATORS: dict[str, Callable[[Any], tuple[int, int]]] = {
    "quantize": _of_quantization,
    "derive_columnwise": _of_derivation,
    "transpose": _of_transposition,
}
"""From an operator of f8sub in Inductor's schedule to its launches on a GPU and the bytes that they move."""
