"""cuDNN's kernels for attention in float8, by graphs that the package nvidia-cudnn-frontend builds.

A graph is built for one problem on one device, and kept. It takes bytes, and scales in memory of the device, so nothing
is read on the host.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from f8sub.attention.problem import E4M3, E5M2, HIGH_PRECISION, Problem
from f8sub.attention.scaling import BackwardScales, ForwardScales, O
from f8sub.errors import Float8ConfigError

if TYPE_CHECKING:
    from f8sub.formats import Float8Format

PACKAGE = "nvidia-cudnn-frontend"
KNOWN = "1.23.0"
"""The version that ran on an H200, with cuDNN 9.19. Newer ones (1.32) need nvidia-cutlass-dsl and apache-tvm-ffi."""

OLDEST = (9, 0)
"""Hopper, as a compute capability. Source: ``sdpa_support_surface.h`` of cudnn-frontend 1.23.0."""

FIRST_CUDNN, WRONG_CUDNN = 90800, 91000
"""The first cuDNN that float8 attention was tried with, and one whose float8 attention is wrong. Source of the latter:
``sdpa_fp8_bwd.h`` of cudnn-frontend 1.23.0."""

WIDTHS = range(16, 257, 16)
"""Head dims that forward takes on Hopper, and backward in bf16."""
BLACKWELLS_WIDTHS = range(16, 129, 16)
FLOAT8_BACKWARDS_WIDTHS = (128,)
"""Head dims of backward in float8 on Hopper. Source of all three: the checks of cudnn-frontend 1.23.0."""

FLOAT8_BACKWARDS_MULTIPLE = 128
"""Lengths that backward in float8 takes. Source: tests/cuda/test_float8_attention.py with cuDNN 9.19 on an H200: dq was
right at 256 to 1024 rows that are multiples of it, 0.7 dB worse at 1000 rows, and 12 dB worse at 40."""

# Numbers by which a graph knows its tensors; a tensor of both graphs has one number.
_UIDS = {
    name: number
    for number, name in enumerate(
        (
            *("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV", "scale_s", "descale_s", "scale_o"),
            *("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_dP"),
            *("scale_dP", "scale_dQ", "scale_dK", "scale_dV"),
            *("amax_s", "amax_o", "amax_dP", "amax_dQ", "amax_dK", "amax_dV"),
        ),
        start=1,
    )
}


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Return why no float8 attention runs on a device; None where it does."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"runs on NVIDIA's GPUs from Hopper on, not on {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        return f"runs on GPUs from Hopper (SM 9.0) on, found SM {found[0]}.{found[1]}"
    return why_no_package()


@functools.cache
def why_no_package() -> str | None:
    """Return why the package or its cuDNN cannot be used; None where they can."""
    install = f"pip install {PACKAGE}=={KNOWN}"
    if importlib.util.find_spec("cudnn") is None:
        return f"needs the package {PACKAGE}: {install}"
    try:
        version = _frontend().backend_version()
    # What a missing library of CUDA raises differs by the library.
    except Exception as error:
        return f"{PACKAGE} {_version()} cannot be imported ({error}); known to work: {install}"
    if version < FIRST_CUDNN or version == WRONG_CUDNN:
        return f"needs cuDNN 9.8 or newer, other than 9.10.0, found {version}"
    return None


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "(of no known version)"


def why_not_width(width: int, device: torch.device, backward: str) -> str | None:
    """Return why a head dim is not taken; None where it is. ``backward`` is one of ``BACKWARDS``."""
    # Blackwell's kernels take fewer widths forward, and more backward.
    is_hopper = torch.cuda.get_device_capability(device)[0] == OLDEST[0]
    forwards = WIDTHS if is_hopper else BLACKWELLS_WIDTHS
    if width not in forwards:
        return f"head dim {width}: the kernels take multiples of 16 up to {forwards[-1]}"
    if is_hopper and backward != HIGH_PRECISION and width not in FLOAT8_BACKWARDS_WIDTHS:
        return f"head dim {width}: backward in float8 takes 128 on Hopper; backward='bf16' takes it"
    return None


def why_not_lengths(rows: int, cols: int, backward: str) -> str | None:
    """Return why lengths of q and of k are not taken; None where they are. Forward takes any."""
    multiple = FLOAT8_BACKWARDS_MULTIPLE
    if backward == HIGH_PRECISION or (rows % multiple == 0 and cols % multiple == 0):
        return None
    return (
        f"a length that is no multiple of {multiple}, at which cuDNN's dq is wrong; backward='bf16' takes any"
    )


@functools.cache
def _frontend() -> Any:
    import cudnn

    return cudnn


class _Graph(NamedTuple):
    """A graph that is ready to run; ``workspace`` in bytes."""

    graph: Any
    workspace: int


_local = threading.local()
"""A handle serves one thread at a time, and autograd runs backward in threads of its own."""


@dataclasses.dataclass
class _Handle:
    """A handle of cuDNN's, and the stream that it was given last."""

    handle: Any
    stream: int | None = None


def _handle(device: torch.device) -> Any:
    handles = _local.__dict__.setdefault("handles", {})
    if (found := handles.get(device)) is None:
        found = handles[device] = _Handle(_frontend().create_handle())
    # The stream may be another one at each call, as that of a capture is.
    stream = torch.cuda.current_stream(device).cuda_stream
    if stream != found.stream:
        _frontend().set_stream(handle=found.handle, stream=stream)
        found.stream = stream
    return found.handle


_graphs: dict[Any, _Graph] = {}
_building = threading.Lock()


def _graph(
    kind: str, problem: Problem, format: "Float8Format", dtype: torch.dtype, device: torch.device
) -> _Graph:
    # By value: a graph serves all layers of one shape.
    key = kind, problem, format.name, dtype, device
    if key not in _graphs:
        with _building:
            if key in _graphs:
                # Autograd's threads may have come here together.
                return _graphs[key]
            target = {"handle": _handle(device), "sm_version": _compute_capability(device)}
            made = build(kind, problem, format, dtype, target)
            # Compiled and loaded here, so a graph that is captured was to run before.
            made.build_plans()
            _graphs[key] = _Graph(made, max(1, made.get_workspace_size()))
    return _graphs[key]


def _compute_capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def build(
    kind: str, problem: Problem, format: "Float8Format", dtype: torch.dtype, target: dict[str, Any]
) -> Any:
    """Return a graph for which cuDNN has a kernel, without the plan that runs it.

    Args:
        kind: "forward", "backward", or "bf16 backward".
        problem: the call.
        format: of dO and dP.
        dtype: of what the last kind reads and writes.
        target: of ``cudnn.pygraph``: the device.

    Raises:
        Float8ConfigError: cuDNN has none.
    """
    cudnn = _frontend()
    # In backward in float8 dq, dk and dv are e4m3: cuDNN writes bf16 from Blackwell on.
    io = _high_precision(cudnn, dtype) if kind == "bf16 backward" else cudnn.data_type.FP8_E4M3
    floats = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=floats, compute_data_type=floats, **target)
    {"forward": _forward, "backward": _backward, "bf16 backward": _bf16_backward}[kind](
        cudnn, graph, problem, format, io
    )
    try:
        graph.validate()
        graph.build_operation_graph()
        # The heuristic knows the fastest plans; the fallback has some where it knows none.
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
    # An own class of the package, which may be another one in the next version.
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise Float8ConfigError(
            f"attend_in_float8: cuDNN has no kernel, version {cudnn.backend_version_string()}, for the {kind} of "
            f"{problem}: {said[0]}; leave these modules out with skip=, or take backward='bf16'"
        ) from error
    return graph


def _high_precision(cudnn: Any, dtype: torch.dtype) -> Any:
    return cudnn.data_type.HALF if dtype == torch.float16 else cudnn.data_type.BFLOAT16


def _lie(batch: int, heads: int, rows: int, width: int, by_heads: bool) -> dict[str, Any]:
    strides = (rows * width, width) if by_heads else (width, heads * width)
    return {"dim": (batch, heads, rows, width), "stride": (heads * rows * width, *strides, 1)}


def _layouts(problem: Problem) -> dict[str, dict[str, Any]]:
    """Return shapes and strides of the tensors; o and dO lie by rows first."""
    p = problem
    q, k, v = p.by_heads
    of_q = _lie(p.batch, p.heads, p.rows, p.width, q)
    of_k, of_v = (_lie(p.batch, p.kv_heads, p.cols, p.width, by_heads) for by_heads in (k, v))
    of_o = _lie(p.batch, p.heads, p.rows, p.width, False)
    stats = {"dim": (p.batch, p.heads, p.rows, 1), "stride": (p.heads * p.rows, p.rows, 1, 1)}
    layouts = {"q": of_q, "k": of_k, "v": of_v, "o": of_o, "dO": of_o, "stats": stats}
    return layouts | {"dQ": of_q, "dK": of_k, "dV": of_v}


_ONE = {"dim": (1, 1, 1, 1), "stride": (1, 1, 1, 1)}


class _Tensors:
    """Declares the tensors of a graph."""

    def __init__(self, cudnn: Any, graph: Any, problem: Problem) -> None:
        self._floats, self._graph, self._layouts = cudnn.data_type.FLOAT, graph, _layouts(problem)

    def given(self, io: Any, *names: str, **other: Any) -> dict[str, Any]:
        """Declare inputs of dtype ``io``, or of those in ``other``."""
        kinds = dict.fromkeys(names, io) | other
        return {
            name: self._graph.tensor(uid=_UIDS[name], name=name, data_type=kind, **self._layouts[name])
            for name, kind in kinds.items()
        }

    def numbers(self, *names: str) -> dict[str, Any]:
        return {
            name: self._graph.tensor(uid=_UIDS[name], name=name, data_type=self._floats, **_ONE)
            for name in names
        }

    def made(self, tensor: Any, name: str, io: Any) -> None:
        """Declare an output."""
        lie = self._layouts.get(name, _ONE)
        tensor.set_uid(_UIDS[name]).set_output(True).set_data_type(io)
        tensor.set_dim(lie["dim"]).set_stride(lie["stride"])

    def made_numbers(self, tensors: Any, *names: str) -> None:
        for tensor, name in zip(tensors, names, strict=True):
            self.made(tensor, name, self._floats)


def _forward(cudnn: Any, graph: Any, problem: Problem, format: "Float8Format", io: Any) -> None:
    tensors = _Tensors(cudnn, graph, problem)
    o, stats, *amaxes = graph.sdpa_fp8(
        **tensors.given(io, "q", "k", "v"),
        **tensors.numbers("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"),
        # the logarithms of the softmax's sums, which backward reads
        generate_stats=True,
        attn_scale=problem.scale,
        use_causal_mask=problem.causal,
    )
    tensors.made(o, "o", io)
    tensors.made(stats, "stats", cudnn.data_type.FLOAT)
    tensors.made_numbers(amaxes, "amax_s", "amax_o")


def _backward(cudnn: Any, graph: Any, problem: Problem, format: "Float8Format", io: Any) -> None:
    tensors = _Tensors(cudnn, graph, problem)
    # dP has the dtype of dO.
    of_do = cudnn.data_type.FP8_E5M2 if format == E5M2 else io
    *grads, dq, dk, dv, dp = graph.sdpa_fp8_backward(
        **tensors.given(io, "q", "k", "v", "o", dO=of_do, stats=cudnn.data_type.FLOAT),
        **tensors.numbers(
            *("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP"),
            *("scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"),
        ),
        attn_scale=problem.scale,
        use_causal_mask=problem.causal,
    )
    for tensor, name in zip(grads, ("dQ", "dK", "dV"), strict=True):
        tensors.made(tensor, name, io)
    tensors.made_numbers((dq, dk, dv, dp), "amax_dQ", "amax_dK", "amax_dV", "amax_dP")


def _bf16_backward(cudnn: Any, graph: Any, problem: Problem, format: "Float8Format", io: Any) -> None:
    tensors = _Tensors(cudnn, graph, problem)
    grads = graph.sdpa_backward(
        **tensors.given(io, "q", "k", "v", "o", dO=io, stats=cudnn.data_type.FLOAT),
        attn_scale=problem.scale,
        use_causal_mask=problem.causal,
    )
    for tensor, name in zip(grads, ("dQ", "dK", "dV"), strict=True):
        tensors.made(tensor, name, io)


def _run(made: _Graph, pointers: dict[int, int], device: torch.device) -> None:
    # Of torch's allocator: freed for later kernels of this stream as soon as this call returns.
    workspace = torch.empty(made.workspace, dtype=torch.uint8, device=device)
    # Addresses: the package would ask each tensor for its own through DLPack, which has no float8.
    made.graph.execute(pointers, workspace.data_ptr(), handle=_handle(device))


def _numbers(*names: str) -> tuple[int, ...]:
    return tuple(_UIDS[name] for name in names)


_OF_FORWARD = _numbers("q", "k", "v", "o", "stats", "scale_o")
_OF_BACKWARD = _numbers("dO", "q", "k", "v", "o", "stats", "dQ", "dK", "dV", "descale_dO", "descale_dP")
_OF_BF16_BACKWARD = _numbers("dO", "q", "k", "v", "o", "stats", "dQ", "dK", "dV")
_OF_INVERSE = _numbers("descale_q", "descale_k", "descale_v", "descale_o")
_OF_S = _numbers("scale_s", "descale_s")
_OF_GRADIENTS = _numbers("scale_dP", "scale_dQ", "scale_dK", "scale_dV")
_OF_MADE = _numbers("amax_s", "amax_o")
_OF_AMAXES = _numbers("amax_dP", "amax_dQ", "amax_dK", "amax_dV")


def _pointers(
    numbers: tuple[int, ...],
    tensors: tuple[torch.Tensor, ...],
    *vectors: tuple[tuple[int, ...], torch.Tensor],
) -> dict[int, int]:
    """Return addresses by a graph's numbers: of tensors, and of the elements of vectors of float32."""
    pointers = {number: tensor.data_ptr() for number, tensor in zip(numbers, tensors, strict=True)}
    # By counting: a view of each element costs the host as much as a launch.
    for of_elements, vector in vectors:
        first = vector.data_ptr()
        pointers.update(zip(of_elements, range(first, first + 4 * len(of_elements), 4), strict=True))
    return pointers


def forward(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: ForwardScales
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.forward``."""
    batch, heads, rows, width = q.shape
    # By rows first, as the linear layer after it reads o.
    o = q.new_empty((batch, rows, heads, width), dtype=E4M3.dtype).transpose(1, 2)
    stats = q.new_empty((batch, heads, rows, 1), dtype=torch.float32)
    # The graph has these results, which nobody reads.
    unread = stats.new_empty(2)
    pointers = _pointers(
        _OF_FORWARD,
        (q, k, v, o, stats, scales.of_o),
        (_OF_INVERSE[:O], scales.inverse),
        (_OF_S, scales.of_s),
        (_OF_MADE, unread),
    )
    _run(_graph("forward", problem, E4M3, q.dtype, q.device), pointers, q.device)
    return o, stats


def backward(
    problem: Problem,
    given: tuple[torch.Tensor, ...],
    inverse: torch.Tensor,
    inverse_do: torch.Tensor,
    scales: BackwardScales,
    format: "Float8Format",
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """``reference.backward``."""
    _, q, k, v, _, stats = given
    grads = tuple(torch.empty_like(x, dtype=E4M3.dtype) for x in (q, k, v))
    amaxes = stats.new_zeros(4)
    pointers = _pointers(
        _OF_BACKWARD,
        (*given, *grads, inverse_do, scales.inverse),
        (_OF_INVERSE, inverse),
        (_OF_S, scales.of_s),
        (_OF_GRADIENTS, scales.gradients),
        (_OF_AMAXES, amaxes),
    )
    _run(_graph("backward", problem, format, q.dtype, q.device), pointers, q.device)
    return grads, amaxes


def backward_in_high_precision(
    problem: Problem, given: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``reference.backward_in_high_precision``, with results of the dtype of what is given."""
    _, q, k, v, *_ = given
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    pointers = _pointers(_OF_BF16_BACKWARD, (*given, dq, dk, dv))
    _run(_graph("bf16 backward", problem, E4M3, q.dtype, q.device), pointers, q.device)
    return dq, dk, dv
