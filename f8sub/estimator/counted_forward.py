"""count: the multiplications of one forward, by whose weights; of a batch that is given, or of one that is made up."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from f8sub.errors import Float8ConfigError
from f8sub.estimator.counted_products import Key, Products, Running
from f8sub.estimator.model_copy import Copies, on_meta, why_not_as_it_is
from f8sub.torch_compat import fake_tensors, tree_map_only

Batch = torch.Tensor | Mapping[str, Any] | Sequence[Any]

TOKENS = 64
"""Length of the sequence that is made up; recurrent models take it step by step."""

SAMPLES = 16_000
"""Of a sound that is made up: one second."""


@dataclass(frozen=True)
class Count:
    """What one forward multiplied.

    Attributes:
        of: what it was given, in words.
        device: the type of the device where it ran.
        tokens: how many it was given, where it was given integers first; None where not.
        own: multiplications by each weight in its module's forward; a weight's key is its module's name and its own.
        elsewhere: those in forwards of others.
        readers: the modules whose forwards made those, in words.
        runs: how often each module's forward ran, by its name.
        of_activations: multiplications of activations by each other, such as attention's.
        not_known: modules whose weights operators of other libraries took, by the operator's name.
    """

    of: str
    device: str
    tokens: int | None
    own: Mapping[Key, float]
    elsewhere: Mapping[Key, float] = field(default_factory=dict)
    readers: Mapping[Key, str] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)
    of_activations: float = 0.0
    not_known: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of_module(self, fqn: str) -> tuple[float, float]:
        """Multiplications by a module's weights: in its own forward, and in forwards of others."""
        return tuple(
            sum(each.get((fqn, name), 0.0) for name in self.names(fqn)) for each in (self.own, self.elsewhere)
        )  # type: ignore[return-value]

    def names(self, fqn: str) -> list[str]:
        """Of a module's weights that something was multiplied by."""
        return self._by_module.get(fqn, [])

    @functools.cached_property
    def _by_module(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for fqn, name in dict.fromkeys([*self.own, *self.elsewhere]):
            found.setdefault(fqn, []).append(name)
        return found


def count(model: torch.nn.Module, batch: Batch) -> Count:
    """Count what one forward of ``batch`` multiplies.

    The forward is that of a copy without hooks, without gradients and in high precision. It multiplies by the model's
    own weights where these are whole and the batch has values; else everything runs on meta, by shapes alone. Random
    numbers, buffers and FSDP2's state are left as they were, and no rank waits for another.

    Raises:
        Float8ConfigError: the forward fails, or needs values that there are not.
    """
    inputs = [each for each in _leaves(batch) if isinstance(each, torch.Tensor)]
    why = "its tensors are on meta" if any(each.is_meta for each in inputs) else why_not_as_it_is(model)
    what = _shown(batch)
    try:
        if why is None:
            batch = tree_map_only(torch.Tensor, torch.clone, _plain(batch))
            return _count(model, Copies(model, with_values=True), model, batch, f"one forward of {what}")
        batch = tree_map_only(torch.Tensor, on_meta, _plain(batch))
        return _count(
            model, Copies(model, with_values=False), model, batch, f"one forward of {what}, on meta"
        )
    except Exception as error:  # a user's forward raises what it likes
        advice = (
            f"it ran on meta, because {why}, where a forward that looks at values fails; count before the model is "
            "sharded, with weights and a batch that have values"
            if why
            else "give it as model.forward takes it: a mapping by name, a tuple, or one tensor"
        )
        raise Float8ConfigError(
            f"the forward that was to be counted raised {_words(error)}: {advice}"
        ) from error


def count_of_made_up(model: torch.nn.Module) -> Count | str:
    """Count a forward of a batch that is made up, on meta; of models of transformers, which say what they take.

    Returns:
        A string where there is no count, empty or with the reason.
    """
    inner = next((each for each in model.modules() if _is_of_transformers(each)), None)
    if inner is None or len(list(inner.parameters())) < len(list(model.parameters())):
        return ""
    try:
        made = functools.partial(made_up_batch, inner)
        return _count_on_meta(
            model, inner, made, f"one forward of {_shown(made())}, made up, on meta", training=False
        )
    except Exception as error:  # the forward of any architecture
        return f"a forward of made-up inputs raised {_words(error)}"


def made_up_batch(model: Any) -> dict[str, torch.Tensor]:
    """Inputs on meta that a model of transformers takes."""
    config, name = model.config, model.main_input_name
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text, "max_position_embeddings", None)
    tokens = min(TOKENS, longest) if isinstance(longest, int) and longest > 0 else TOKENS
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    dtype = next(p.dtype for p in model.parameters())
    empty = functools.partial(torch.empty, dtype=dtype, device="meta")
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, Sequence) else (size, size)
        found = {name: empty(1, getattr(vision, "num_channels", 3), height, width)}
    elif name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", TOKENS)
        found = {name: empty(1, getattr(config, "num_mel_bins", 80), frames)}
    elif name == "input_values":
        found = {name: empty(1, SAMPLES)}
    else:
        found = {name: ids}
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = ids
    return found


def _count_on_meta(
    model: torch.nn.Module,
    module: torch.nn.Module,
    batch: Callable[[], Any],
    what: str,
    training: bool | None = None,
) -> Count:
    """By shapes alone. Where a forward asks for values, once more with fake tensors, which take several times as long.

    Code that looks for padding or for packed sequences asks whether it is traced, and of these it knows that.
    """
    try:
        return _count(model, Copies(model, with_values=False, training=training), module, batch(), what)
    except Exception as error:
        with fake_tensors():
            try:
                return _count(
                    model, Copies(model, with_values=False, training=training), module, batch(), what
                )
            except Exception:  # the first one tells more
                raise error from None


def _count(model: torch.nn.Module, copies: Copies, module: torch.nn.Module, batch: Any, what: str) -> Count:
    """The count of ``module``'s forward, under the names that ``model`` has for its modules."""
    running = Running()
    weights = []
    for fqn, each in model.named_modules():
        made = copies.of(each)
        made.__dict__["forward"] = functools.wraps(made.forward)(running.wrap(fqn, made.forward))
        weights += [((fqn, name), weight) for name, weight in made.named_parameters(recurse=False)]
    inputs = [each for each in _leaves(batch) if isinstance(each, torch.Tensor)]
    mode = Products(weights, inputs, running)
    with _one_forward(model), mode:
        _call(copies.of(module), batch)
    device = next((weight.device.type for _, weight in weights), "cpu")
    tokens = inputs[0].numel() if inputs and not inputs[0].is_floating_point() else None
    return Count(what, device, tokens, **_by_module(model, mode, running))


def _by_module(model: torch.nn.Module, mode: Products, running: Running) -> dict[str, Any]:
    own: dict[Key, float] = defaultdict(float)
    elsewhere: dict[Key, float] = defaultdict(float)
    readers: dict[Key, str] = {}
    for (fqn, name), found in mode.own.items():
        own[fqn, name] += found
    for (key, reader), found in mode.elsewhere.items():
        parametrized = _parametrized(key)
        if parametrized[0] == reader:
            own[parametrized] += found
        else:
            elsewhere[parametrized] += found
            readers[parametrized] = f"{reader or 'the model'}, a {type(model.get_submodule(reader)).__name__}"
    not_known = {
        name: tuple(sorted({fqn for fqn, _ in keys})) for name, keys in mode.not_known.items() if keys
    }
    return {
        "own": own,
        "elsewhere": elsewhere,
        "readers": readers,
        "runs": dict(running.calls),
        "of_activations": mode.of_activations,
        "not_known": not_known,
    }


def _parametrized(key: Key) -> Key:
    """The layer and its weight, of a parameter that a weight is computed of."""
    fqn, *rest = f".{key[0]}".split(".parametrizations.")
    return (fqn.removeprefix("."), rest[0]) if rest else key


@contextlib.contextmanager
def _one_forward(model: torch.nn.Module) -> Iterator[None]:
    """Neither gradients nor fused forwards, which hide products; random numbers are as they were after it."""
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    fused = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as exits:
        exits.callback(torch.backends.mha.set_fastpath_enabled, fused)
        torch.backends.mha.set_fastpath_enabled(False)
        if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
            backend: Any
            for backend in (torch.backends.mkldnn, torch.backends.cudnn):
                exits.callback(setattr, backend, "enabled", backend.enabled)
                backend.enabled = False
        exits.enter_context(torch.random.fork_rng([]))
        for device in devices:
            exits.enter_context(torch.random.fork_rng([device], device_type=device.type))
        exits.enter_context(torch.compiler.set_stance("force_eager"))
        exits.enter_context(torch.no_grad())
        yield


def _call(module: torch.nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        module(**batch)
    elif isinstance(batch, torch.Tensor):
        module(batch)
    else:
        module(*batch)


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _leaves(given: Any) -> Iterator[Any]:
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for each in given:
            yield from _leaves(each)
    else:
        yield given


def _shown(batch: Any) -> str:
    """The first tensor's name and shape."""
    named = batch.items() if isinstance(batch, Mapping) else (("", each) for each in _leaves(batch))
    for name, value in named:
        if isinstance(value, torch.Tensor):
            return f"{' x '.join(map(str, value.shape))} {name or str(value.dtype).removeprefix('torch.')}"
    return "a batch without tensors"


def _is_of_transformers(module: torch.nn.Module) -> bool:
    return any(
        (cls.__module__, cls.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
        for cls in type(module).__mro__
    )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
