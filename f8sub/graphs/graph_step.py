"""graph_step: a training step that is captured as a CUDA graph and replayed, which the host launches by one call."""

import gc
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from f8sub.capture import Capture, entered, why_launched
from f8sub.errors import Float8ConfigError, Float8Warning, shown
from f8sub.graphs.dependencies import Dependencies, Numbers, innermost
from f8sub.graphs.optimizers import Rates, why_not_captured
from f8sub.graphs.recorded import GraphMemory, Recorded, records
from f8sub.graphs.waits import noticed_waits
from f8sub.torch_compat import (
    GRAPHS,
    forget_pass,
    is_dtensor,
    is_fsdp_module,
    require,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)
from f8sub.weights.conversion import Conversion
from f8sub.weights.precompute_scales import conversions_of, parts_of, precompute_scales

_DDP_WARMUP = 11
"""Steps that DistributedDataParallel takes to settle; from PyTorch's notes on CUDA graphs."""


def graph_step(
    function: Callable[..., Any],
    model: torch.nn.Module | Iterable[torch.nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    warmup: int = 3,
    other_batches: Literal["launch", "capture"] = "launch",
) -> "GraphedStep":
    """Make a training step of a function, which a GPU runs as a CUDA graph from the fourth call on.

        def forward_backward(tokens, targets):
            loss = loss_of(model(tokens), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        step = f8sub.graph_step(forward_backward, model, optimizer)
        for tokens, targets in batches:
            loss = step(tokens, targets)

    Each call is one whole step: ``precompute_scales`` of the weights as they are, the function, ``optimizer.step()``,
    and gradients set to None. Losses and weights are those of launched steps, bitwise. Weights that are loaded, or
    changed in another way, between two calls are read by the next one. What a graph has as a constant is looked at
    before each replay; where it changed, the step is captured again. On a CPU every step is launched.

    Args:
        function: forward and backward of one batch, several where gradients are accumulated, and what comes before the
            optimizer, such as clipping. It returns tensors, or any nest of them. It may not wait for the GPU.
        model: converted or not; sharded by FSDP2, a replica of DDP's, or on one GPU; or its parts.
        optimizer: of its parameters; None where the caller steps one after each call. Gradients are then in place after
            a call, and the next one begins with none. One that is neither fused nor capturable is launched.
        warmup: launched steps before the capture, 1 or more. Delayed scaling needs 2 and DDP 11, and they get them.
        other_batches: what to do with a batch whose shapes, dtypes or constants differ from the first one's: launch it,
            or capture a graph for each.

    Raises:
        Float8ConfigError: an argument of another type, or one that is no option.
    """
    parts = parts_of(model)
    for part in parts or [model]:  # type: ignore[list-item]
        if not isinstance(part, torch.nn.Module):
            raise Float8ConfigError(f"graph_step takes a model or a list of its parts, got {shown(part)}")
    if not callable(function):
        raise Float8ConfigError(f"graph_step takes a function of a batch, got {shown(function)}")
    if type(warmup) is not int or warmup < 1:
        raise Float8ConfigError(f"warmup is a number of launched steps, 1 or more, got {shown(warmup)}")
    if other_batches not in ("launch", "capture"):
        raise Float8ConfigError(f'other_batches is "launch" or "capture", got {shown(other_batches)}')
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise Float8ConfigError(f"graph_step takes an optimizer or None, got {shown(optimizer)}")
    require(GRAPHS)
    return GraphedStep(function, parts, optimizer, warmup, captures_others=other_batches == "capture")


class _Graph:
    """Holds a captured step, what it reads, and what the host has to do for it."""

    def __init__(self, step: "GraphedStep", leaves: Sequence[Any]) -> None:
        optimizer = step._captured_optimizer
        self.dependencies = Dependencies(step._parts, step._conversions, optimizer, step._changing)
        self.host = Capture(step._device, 2 * sum(map(_table_bytes, step._conversions)))
        # Copies, because a replay reads the addresses of the batch that was captured.
        self.given = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def capture(self, step: "GraphedStep", structure: Any) -> None:
        """Capture a step; nothing of it runs."""
        args, kwargs = tree_unflatten(self.given, structure)
        self._recorded = Recorded(step._stream, step._pool)
        with entered(self.host):
            self._found = self._recorded.capture(lambda: step._run(args, kwargs))
        # Without an optimizer in the graph each replay writes gradients to the same memory.
        self._gradients = [
            (p, p.grad) for part in step._parts for p in part.parameters() if p.grad is not None
        ]

    def take(self, leaves: Sequence[Any]) -> None:
        """Copy a batch to where the graph reads it."""
        for given, leaf in zip(self.given, leaves, strict=True):
            if isinstance(given, torch.Tensor):
                given.copy_(leaf, non_blocking=True)

    def replay(self) -> Any:
        """Run the captured step, and return what the function returned, for the caller to keep."""
        self._recorded.replay()
        for parameter, gradient in self._gradients:
            # The caller, or the step before, may have set it to None.
            parameter.grad = gradient
        # The next replay overwrites the graph's own results.
        return tree_map_only(torch.Tensor, torch.clone, self._found)


class GraphedStep:
    """Runs the step of ``graph_step``; calling it takes the function's arguments and returns what it returns.

    Tensors of a batch come to the function on the model's device.

    Attributes:
        how: what the last call did: "launched", "captured" (and replayed) or "replayed".
        why_launched: why the last call was launched; None where it was not.
        why_optimizer_launched: why the optimizer's step is no part of the graph; None where it is, or there is none.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parts: list[torch.nn.Module],
        optimizer: torch.optim.Optimizer | None,
        warmup: int,
        *,
        captures_others: bool,
    ) -> None:
        self.how: Literal["launched", "captured", "replayed"] = "launched"
        self.why_launched: str | None = None
        self.why_optimizer_launched = None if optimizer is None else why_not_captured(optimizer)
        self._parts, self._function, self._optimizer = parts, function, optimizer
        self._captures_others = captures_others
        self._warmup = warmup
        self._sharded: list[Any] = []
        self._device = torch.device("meta")
        self._conversions: list[Conversion] = []
        self._stream: Any = None
        self._pool: Any = None
        self._rates: Rates | None = None
        self._memory = GraphMemory(self._device)
        self._graphs: dict[Hashable, _Graph] = {}
        self._launched: Counter[Hashable] = Counter()
        self._given_up: str | None = None
        self._place: Literal["function", "optimizer"] | None = None
        self._looks: dict[str, list[str]] | None = None
        self._changing: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do one step.

        Raises:
            Float8ConfigError: a constant of the batch has no hash.
            Float8NumericsError: as of ``precompute_scales``.
        """
        if self._device.type == "meta":
            self._begin()
        leaves, structure = tree_flatten((args, kwargs))
        leaves = [_sent(leaf, self._device) for leaf in leaves]
        # A graph has shapes, dtypes and constants built in: each combination is another graph.
        key = structure, tuple(map(_key_of, leaves))
        self.why_launched = self._reason(key)
        graph = self._graphs.get(key)
        if self.why_launched is None and graph is None:
            graph = self._captured(key, leaves, structure)
            if graph is not None:
                return self._replay(graph)
        if self.why_launched is None and graph is not None:
            self.how = "replayed"
            # Before the batch is copied: it may raise what the replay before found, and leaves the step undone.
            graph.host.prepare()
            graph.take(leaves)
            self._send_rates()
            found = self._replay(graph)
            graph.host.replayed()
            return found
        self.how = "launched"
        del graph
        if self._graphs and (reason := self._memory.too_little()) is not None:
            self.close()
            self.why_launched = f"{self.why_launched}; {reason}"
        return self._launch(key, *tree_unflatten(leaves, structure))

    def _begin(self) -> None:
        """Look at the model when the first step begins: until then it may be moved, sharded and wrapped."""
        modules = [module for part in self._parts for module in part.modules()]
        self._sharded = [module for module in modules if is_fsdp_module(module)]
        if any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in modules):
            self._warmup = max(self._warmup, _DDP_WARMUP)
        self._device = _device_of(self._parts)
        self._memory = GraphMemory(self._device)
        if self._device.type == "cuda":
            # The default stream cannot be captured.
            self._stream = torch.cuda.Stream(self._device)
        if self._optimizer is not None:
            self._rates = Rates(self._optimizer, self._device)
        if not records(self._device):
            self._given_up = f"there are no graphs on the {self._device.type}"

    def close(self) -> None:
        """Free the graphs and their memory; a step is captured again after launched ones.

        Call it before ``dist.destroy_process_group()``: NCCL frees no communicator that a graph still uses.
        """
        self._graphs.clear()
        self._launched.clear()
        self._pool = None
        self._memory.freed()

    @property
    def _captured_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose step is a part of the graph."""
        return None if self.why_optimizer_launched else self._optimizer

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run what a graph holds: scales of the weights as they are, the function, and the optimizer if possible."""
        self._drop_gradients()
        if self._conversions:
            # At the beginning, so that weights that were loaded or changed since the last step are read as they are.
            precompute_scales(self._parts)
            # What is gathered between two steps, as in an evaluation, is no sign of a call that was forgotten. Here,
            # because exchanges are made with the first scales.
            for exchange in itertools.chain.from_iterable(c.exchanges.values() for c in self._conversions):
                exchange.expect_late_scales()
        with self._looking_at("function"):
            found = self._function(*args, **kwargs)
        if self._captured_optimizer is not None and self._rates is not None:
            if not innermost(self._captured_optimizer).state and self._stream is not None:
                # States that lie among freed activations would keep that memory from the graph.
                torch.cuda.empty_cache()
            with self._looking_at("optimizer"), self._rates.on_device():
                self._captured_optimizer.step()
            self._drop_gradients()
        # A caller that keeps losses would keep their graphs, too.
        return tree_map_only(torch.Tensor, torch.Tensor.detach, found)

    def _reason(self, key: Hashable) -> str | None:
        """Return why this call is launched; None where it is captured or replayed."""
        reason = self._given_up or why_launched()
        graph = self._graphs.get(key)
        raised = any(conversion.raised for conversion in self._conversions)
        # The usual case first: FSDP2 takes some time to find that its parameters are sharded.
        if reason is None and graph is not None and not raised and graph.dependencies.difference() is None:
            return graph.host.why_launched()
        for module in self._sharded:
            # A forward without a backward leaves the root's parameters whole, which replays do not write to.
            module.reshard()
        if reason is not None:
            return reason
        if raised:
            # A replay tells one call later: it would train on in between.
            return (
                "the call before raised Float8NumericsError, and a launched step looks at the weights at once"
            )
        if graph is not None:
            if (difference := graph.dependencies.difference()) is not None:
                self.close()
                return f"the step is captured again: {difference}"
            return graph.host.why_launched()
        if self._graphs and not self._captures_others:
            return "the batch has another shape, dtype or constant than the captured one"
        before = self._launched_before(key)
        if self._launched[key] < before:
            return f"launched step {self._launched[key] + 1} of {before} before the capture"
        return None

    def _launched_before(self, key: Hashable) -> int:
        """Return the launched steps before a capture; one for further shapes, which compiled code is compiled for."""
        return 1 if self._graphs else self._warmup

    def _prepare(self) -> None:
        seen = [part for part in self._parts if Conversion.saw(part)]
        self._conversions = conversions_of(seen) if seen else []
        for conversion in self._conversions:
            self._warmup = max(self._warmup, *(guest.launched_before_capture for guest in conversion.guests))
        self._send_rates()

    def _send_rates(self) -> None:
        if self._rates is not None and self._captured_optimizer is not None:
            self._rates.send()

    def _drop_gradients(self) -> None:
        for part in self._parts:
            for parameter in part.parameters():
                # None and not zero: backward then makes gradients in memory of the graph.
                parameter.grad = None

    def _launch(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Launch a step from the host; the last one before a capture shows what a graph could not hold."""
        self._prepare()
        self._launched[key] += 1
        # The last launched step is looked at for what a capture would fail on.
        is_last = self._given_up is None and self._launched[key] == self._launched_before(key)
        self._looks = {} if is_last else None
        numbers = Numbers(self._parts, self._changing) if is_last else None
        # On the stream of the capture: autograd's and FSDP2's streams are then the ones that a graph records.
        with _beside(self._stream):
            found = self._run(args, kwargs)
        self._step_launched()
        looks, self._looks = self._looks or {}, None
        if numbers is not None:
            self._warn_of_numbers(numbers.changed())
        # A step that waits and can be captured all the same takes another way there: libraries ask.
        if waits := looks.get("function"):
            self._give_up(waits[0])
        elif waits := looks.get("optimizer"):
            self._launch_optimizer(waits[0])
        return found

    def _warn_of_numbers(self, changed: dict[str, tuple[Any, Any]]) -> None:
        self._changing |= changed.keys()
        if changed:
            some = [f"{name}: {shown(old)} to {shown(new)}" for name, (old, new) in changed.items()][:4]
            warnings.warn(
                f"graph_step: a launched step changed numbers of modules ({', '.join(some)}). A "
                "replay runs no Python, so there they stay what they are in the captured step. Keep what the step "
                "counts in a tensor of the model's device that it changes in place",
                Float8Warning,
                stacklevel=4,
            )

    @contextmanager
    def _looking_at(self, place: Literal["function", "optimizer"]) -> Iterator[None]:
        """Note which part of the step runs: for the error of a capture, and in a step that is looked at."""
        self._place = place
        if self._looks is None:
            yield
        else:
            with noticed_waits(self._device) as self._looks[place]:
                yield
        self._place = None

    def _step_launched(self) -> None:
        """Step an optimizer that is no part of the graph."""
        if self._optimizer is not None and self._captured_optimizer is None:
            self._optimizer.step()
            self._drop_gradients()

    def _captured(self, key: Hashable, leaves: Sequence[Any], structure: Any) -> _Graph | None:
        """Return the graph of a step, of which nothing has run; None where it cannot be captured."""
        self._prepare()
        for conversion in self._conversions:
            conversion.before_capture()
        gc.collect()  # graphs and tensors of a cycle have memory that the new graph needs
        if self._pool is None and self._stream is not None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = _Graph(self, leaves)
        try:
            with self._memory.counted():
                graph.capture(self, structure)
        except Exception as error:
            graph.host.failed()
            for part in self._parts:
                # FSDP2 is in the middle of a pass that never ran: the next forward begins a new one.
                forget_pass(part)
            self._drop_gradients()
            reason = _first_error(error)
            if self._place != "optimizer":
                self._give_up(reason)
                return None
            self._launch_optimizer(reason)
            # Once more, without the optimizer in the graph.
            return self._captured(key, leaves, structure)
        self._graphs[key] = graph
        self.how = "captured"
        return graph

    def _replay(self, graph: _Graph) -> Any:
        found = graph.replay()
        self._step_launched()
        return found

    def _give_up(self, reason: str) -> None:
        self._given_up = self.why_launched = f"the step cannot be captured: {reason}"
        self.close()
        warnings.warn(
            f"graph_step launches every step: {reason}. A captured function may neither wait for the GPU (.item(), "
            "print, .cpu(), nonzero, shapes that depend on values) nor send to single ranks, and DDP has to be created "
            "within torch.cuda.stream(torch.cuda.Stream()). A model of transformers waits without "
            "f8sub.integrations.transformers.attend_causally(model)",
            Float8Warning,
            stacklevel=4,
        )

    def _launch_optimizer(self, reason: str) -> None:
        self.why_optimizer_launched = reason
        warnings.warn(
            f"graph_step captures forward and backward and launches the optimizer: {reason}",
            Float8Warning,
            stacklevel=4,
        )


@contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on another stream, in the order of the current one."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    # The caller's stream reads what the step wrote.
    current.wait_stream(stream)


def _device_of(parts: Iterable[torch.nn.Module]) -> torch.device:
    """Return the device where the parts run: CPU offload keeps shards elsewhere."""
    first = next(parameter for part in parts for parameter in part.parameters())
    if is_dtensor(first) and first.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return first.device


def _sent(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device.type != device.type:
        return leaf.to(device, non_blocking=True)
    return leaf


def _key_of(leaf: Any) -> Hashable:
    """Return a key that is equal for what one graph takes."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    if not isinstance(leaf, Hashable):
        raise Float8ConfigError(
            f"graph_step was given {shown(leaf)} in a batch; give tensors, constants that have a hash, or lists, "
            "tuples and dicts of these"
        )
    return leaf


def _table_bytes(conversion: Conversion) -> int:
    """Return the bytes that ``precompute_scales`` copies to the host."""
    return sum(exchange.table.whole.nbytes for exchange in conversion.exchanges.values())


def _first_error(error: BaseException) -> str:
    """Class and first line of what went wrong first: a capture that is broken fails once more when it ends."""
    while error.__context__ is not None:
        error = error.__context__
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
