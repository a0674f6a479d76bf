"""Counts the multiplications of one forward, by whose weights; of a batch that is given, or of one that is made up.

The forward runs in a copy of the model: its modules in high precision, on meta or with the model's own weights. The
copy has the modules' attributes and none of their hooks, so neither FSDP2 nor f8sub takes notice of its forward. Lists
and dicts are copied, and buffers cloned, so that a forward that writes to them leaves the model as it was.

[Note: whose weights] An operand is of a weight where it lies in the weight's storage, or was computed of it without
the model's inputs: cast, transposed, normalized, or taken expert by expert. What depends on the inputs is an
activation, but for matrices that are picked out of a stack of them. A product of activations is nobody's.
"""

import contextlib
import copy
import functools
import math
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.convert.class_swap import plain_class_of
from f8sub.errors import Float8ConfigError
from f8sub.experts.module import Float8Experts, plain_class
from f8sub.linear.float8_linear import Float8Linear
from f8sub.torch_compat import DispatchMode, fake_tensors, is_fsdp_class, tree_leaves, tree_map_only
from f8sub.weights.weight import Weight, local_tensor, master_of

HOOKS_THAT_MAKE_WEIGHTS = "torch.nn.utils."
"""Where hooks before a forward are from that compute a weight: prune, and the older weight_norm and spectral_norm."""

PARAMETRIZATIONS = "parametrizations."
"""What the names of modules that compute a weight have before the weight's name."""

HOOK = "a hook of "
"""Before the name of a module whose weight a hook before its forward computes, while that runs."""

META_CHOICES = {"_attn_implementation_internal": "eager", "_experts_implementation_internal": "batched_mm"}
"""Attributes of a config of transformers, and their values with which a forward looks at no value of a tensor.

Products with weights are the same with all values.
"""

PADDING_WARNING = "warn_if_padding_and_no_attention_mask"
"""What models of transformers call to look for padding in their inputs' values, and to warn."""


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape and dtype; for a shard, of the whole tensor's shape."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def why_not_as_it_is(model: torch.nn.Module) -> str | None:
    """Return why this rank cannot multiply by a model's weights; None if it can."""
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
    """Holds the modules of a model and their copies.

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
        # Masters take the place of float8 weights: the copy multiplies in high precision.
        values = {p: _as_it_is(p) if with_values else on_meta(p) for p in model.parameters()}
        storages = Counter(value.untyped_storage()._cdata for value in values.values())
        for parameter, value in values.items():
            # Told apart by its storage, which torch's recurrent layers have one of for all of their weights.
            apart = value.clone() if storages[value.untyped_storage()._cdata] > 1 else value
            self._keep(parameter, torch.nn.Parameter(apart, requires_grad=False))
        for module in self._modules.values():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(f"a {type(module).__name__} has no Python forward")
            cls: Any = _plain_class_of(module)
            # Attributes are filled in below, when every module has a copy that they can refer to.
            self._keep(module, cls.__new__(cls))
        for module in self._modules.values():
            self._fill(module, training)

    def of(self, module: torch.nn.Module) -> Any:
        """Return the copy of a module; for one that ``torch.compile`` wrapped, the copy of what is in it."""
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
            # No hooks but those that compute a weight.
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
        # ``module.compile()`` puts a compiled forward there, which would hide operators.
        state["_compiled_call_impl"] = None
        if training is not None:
            state["training"] = training
        if (
            isinstance(module, Float8Experts)
            and module._f8sub.seam.forward is not None
            and not _is_of_transformers(module)
        ):
            state["forward"] = functools.partial(module._f8sub.seam.forward, made)
        if "_orig_mod" in state["_modules"]:  # torch.compile's wrapper, whose forward is compiled
            state["forward"] = state["_modules"]["_orig_mod"].__call__
        made.__dict__.update(state)

    def _copied(self, value: Any) -> Any:
        # What attributes share in the model they share in the copy.
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


def _plain_class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return a module's class without what FSDP2 and f8sub put before it."""
    cls: Any = type(module)
    if isinstance(module, Float8Experts):
        plain = plain_class(module)
    elif isinstance(module, Float8Linear):
        plain = plain_class_of(cls)
    else:
        plain = next(each for each in cls.__mro__ if not is_fsdp_class(each))
    # A weight that is parametrized since is a property of the class that torch derived.
    lists: Any = module._modules.get("parametrizations", ())
    computed = {name: getattr(cls, name) for name in lists if not hasattr(plain, name)}
    return type(plain.__name__, (plain,), computed) if computed else plain


def _makes(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(HOOKS_THAT_MAKE_WEIGHTS)


def _is_of_transformers(module: torch.nn.Module) -> bool:
    return plain_class(module).__module__.startswith("transformers.")  # type: ignore[arg-type]


MATRIX_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "matmul", "_scaled_mm"), 0),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), 1),
}
"""Operators that contract the last dimension of an argument with the next one's; that argument's place."""

GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback")

PICKED = ("index", "index_select", "gather", "embedding")
"""Operators that take some of the matrices of a stack."""

NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")
"""Of operators that are known, whether they multiply or not."""

Key = tuple[str, str]
"""A module's name and that of its parameter."""


class Running:
    """Holds the names of the modules whose forwards run, the innermost last, and how often each ran."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.calls: dict[str, int] = defaultdict(int)

    def wrap(self, fqn: str, forward: Any) -> Any:
        """Wrap ``forward``, of the module of that name, so that its name is known while it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls[fqn] += 1
            return self._within(fqn, forward, *args, **kwargs)

        return run

    def wrap_hook(self, fqn: str, hook: Any) -> Any:
        """Wrap a hook of the module of that name, so that what it multiplies is no forward's."""
        return functools.partial(self._within, f"{HOOK}{fqn}", hook)

    def _within(self, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        self.names.append(name)
        try:
            return call(*args, **kwargs)
        finally:
            self.names.pop()


class Products(DispatchMode):  # type: ignore[misc]
    """Counts multiplications while it is entered.

    Args:
        weights: names of parameters and the tensors; several names of one that is tied.
        inputs: what a forward is given.
        running: what runs.

    Attributes:
        own: multiplications by each weight while its module's forward runs.
        elsewhere: by each weight while another one's does, by the name of that one.
        of_activations: multiplications of activations by each other.
        not_known: operators of other libraries that took a weight, and the weights' names.
    """

    # flex_attention is one.
    supports_higher_order_operators = True

    def __init__(
        self, weights: Iterable[tuple[Key, torch.Tensor]], inputs: Iterable[torch.Tensor], running: Running
    ) -> None:
        super().__init__()
        self._running = running
        self._active: dict[int, StorageWeakRef] = {}
        self._names: dict[int, tuple[StorageWeakRef, list[Key]]] = {}
        for key, weight in weights:
            # Biases and norms are no operands of products.
            if weight.dim() > 1:
                storage = StorageWeakRef(weight.untyped_storage())
                self._names.setdefault(storage.cdata, (storage, []))[1].append(key)
        for tensor in inputs:
            self._activate(tensor)
        self.own: dict[Key, float] = defaultdict(float)
        self.elsewhere: dict[tuple[Key, str], float] = defaultdict(float)
        self.of_activations = 0.0
        self.not_known: dict[str, set[Key]] = defaultdict(set)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and look at it."""
        out = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        space, _, name = ("" if schema is None else schema.name).partition("::")
        given = list(_tensors((args, kwargs)))
        product = _operands(name or str(func), args, given, out)
        if product is not None:
            self._count(*product)
        elif space and space not in NAMESPACES:
            for tensor in given:
                self.not_known[f"{space}.{name}"].update(self._names_of(tensor) or ())
        self._follow(name, given, out, is_product=product is not None)
        return out

    def _count(self, multiplications: float, operands: tuple[torch.Tensor, ...]) -> None:
        # The second operand first: layers have their weight there.
        names = next(filter(None, map(self._names_of, reversed(operands))), None)
        if names is None:
            self.of_activations += multiplications
            return
        running = self._running.names
        # A tied weight has several names: that of the innermost module that runs counts.
        own = max(names, key=lambda key: running.index(_owner(key)) if _owner(key) in running else -1)
        if _owner(own) in running:
            self.own[own] += multiplications
        else:
            self.elsewhere[own, running[-1] if running else ""] += multiplications

    def _follow(self, name: str, given: list[torch.Tensor], out: Any, *, is_product: bool) -> None:
        """Remember what came out: an activation, something computed from a weight, or neither."""
        active = any(_id(tensor) in self._active for tensor in given)
        known = next(filter(None, map(self._names_of, given)), None)
        # Matrices that inputs pick from a stack of weights, such as those of one expert, are weights still.
        if active and known and name in PICKED:
            active = given[0].dim() < 3 or not self._names_of(given[0])
        for tensor in _tensors(out):
            if self._names_of(tensor) is not None or _id(tensor) in self._active:
                continue
            if active:
                self._activate(tensor)
            elif known is not None and (not is_product or self._is_computing(known)):
                storage = StorageWeakRef(tensor.untyped_storage())
                self._names[storage.cdata] = storage, known

    def _is_computing(self, names: list[Key]) -> bool:
        """Return whether what computes the weight of these names runs, whose products are weights still."""
        return any(PARAMETRIZATIONS in _owner(key) and _owner(key) in self._running.names for key in names)

    def _activate(self, tensor: torch.Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        self._active[storage.cdata] = storage

    def _names_of(self, tensor: torch.Tensor) -> list[Key] | None:
        found = self._names.get(_id(tensor))
        return None if found is None else found[1]


def _owner(key: Key) -> str:
    return key[0]


def _id(tensor: torch.Tensor) -> int:
    # References to a storage, although weak ones, keep its address from becoming another one's.
    cdata: int = tensor.untyped_storage()._cdata
    return cdata


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(given) if isinstance(each, torch.Tensor))


def _operands(
    name: str, args: tuple[Any, ...], given: list[torch.Tensor], out: Any
) -> tuple[float, tuple[torch.Tensor, ...]] | None:
    """Return an operator's multiplications, and its operands; None if it is no product of matrices."""
    if name in MATRIX_PRODUCTS:
        a, b = given[MATRIX_PRODUCTS[name] :][:2]
        # Each element of a is multiplied by every column of b.
        rows = float(a.numel())
        if name in GROUPED and a.dim() == 2 and b.dim() == 3:
            rows = float(_rows_of_groups(a, given) * a.shape[1])
        return rows * (b.shape[-1] if b.dim() > 1 else 1), (a, b)
    if "convolution" in name and "backward" not in name:
        x, w = args[:2]
        # the seventh argument of aten.convolution
        transposed = len(args) > 6 and args[6] is True
        # Every position multiplies the whole filter: positions of x if transposed, else of y.
        positions = x.numel() // x.shape[1] if transposed else out.numel() // w.shape[0]
        return float(positions * w.numel()), (x, w)
    # nn.Bilinear
    if name == "_trilinear":
        return float(out.numel() * math.prod(args[1].shape[1:])), (args[0], args[2], args[1])
    if "scaled_dot_product" in name or "flex_attention" in name:
        q, k, v = args[:3]
        # q by k, and scores by v; a causal mask leaves out nothing here.
        return float(math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])), ()
    return None


def _rows_of_groups(a: torch.Tensor, given: list[torch.Tensor]) -> int:
    """Return the rows up to the last group's end; on meta all of them, as ends have no values there."""
    ends = next((each for each in given if each.dim() == 1 and each.dtype == torch.int32), None)
    if ends is None or ends.is_meta or not ends.numel():
        return a.shape[0]
    return int(ends[-1])


Batch = torch.Tensor | Mapping[str, Any] | Sequence[Any]

TOKENS = 64
"""Length of the sequence that is made up; recurrent models take it step by step."""

SAMPLES = 16_000
"""Of a sound that is made up: one second."""


@dataclass(frozen=True)
class Count:
    """Holds the multiplications of one forward.

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
        """Return the multiplications by a module's weights: in its own forward, and in forwards of others."""
        return tuple(
            sum(each.get((fqn, name), 0.0) for name in self.names(fqn)) for each in (self.own, self.elsewhere)
        )  # type: ignore[return-value]

    def names(self, fqn: str) -> list[str]:
        """Return the names of a module's weights that something was multiplied by."""
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
            # A forward may write into its inputs.
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


def count_of_made_up(model: torch.nn.Module, inner: torch.nn.Module) -> Count | str:
    """Count a forward of a batch that is made up, on meta.

    Args:
        model: what is counted.
        inner: the model of transformers in it, which says what it takes, see ``pretrained``.

    Returns:
        A string where there is no count, with the reason.
    """
    try:
        made = functools.partial(made_up_batch, inner)
        return _count_on_meta(
            model, inner, made, f"one forward of made-up {_shown(made())} on meta", training=False
        )
    except Exception as error:  # the forward of any architecture
        return f"a forward of made-up inputs raised {_words(error)}"


def made_up_batch(model: Any) -> dict[str, torch.Tensor]:
    """Return inputs on meta that a model of transformers takes, by their names."""
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
        # The encoder of Whisper halves the frames.
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
    """Count by shapes alone; if a forward asks for values, once more with fake tensors, several times slower.

    Code that looks for padding or packed sequences first asks whether it is traced, which fake tensors answer.
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
    """Count ``module``'s forward, under the names that ``model`` has for its modules."""
    running = Running()
    weights = []
    for fqn, each in model.named_modules():
        made = copies.of(each)
        # ``wraps`` keeps the signature, which libraries inspect.
        made.__dict__["forward"] = functools.wraps(made.forward)(running.wrap(fqn, made.forward))
        # A hook runs before its module's forward, and would be the forward's around it.
        for number, hook in made._forward_pre_hooks.items():
            made._forward_pre_hooks[number] = running.wrap_hook(fqn, hook)
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
            continue
        elsewhere[parametrized] += found
        if not reader.startswith(HOOK):
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
    """Return the layer and weight that a parameter is for: ``a``, ``weight`` of ``a.parametrizations.weight``."""
    fqn, *rest = f".{key[0]}".split(f".{PARAMETRIZATIONS}")
    return (fqn.removeprefix("."), rest[0]) if rest else key


@contextlib.contextmanager
def _one_forward(model: torch.nn.Module) -> Iterator[None]:
    """Turn off gradients and fused forwards, which hide products; restore the random generators afterwards."""
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    fused = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as exits:
        exits.callback(torch.backends.mha.set_fastpath_enabled, fused)
        # The fast path of torch's transformer layers is one operator.
        torch.backends.mha.set_fastpath_enabled(False)
        # Fused recurrent layers hide their products.
        if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
            backend: Any
            for backend in (torch.backends.mkldnn, torch.backends.cudnn):
                exits.callback(setattr, backend, "enabled", backend.enabled)
                backend.enabled = False
        exits.enter_context(torch.random.fork_rng([]))
        for device in devices:
            exits.enter_context(torch.random.fork_rng([device], device_type=device.type))
        # Compiled code would hide operators.
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
    """Describe a batch by its first tensor's shape and name."""
    named = batch.items() if isinstance(batch, Mapping) else (("", each) for each in _leaves(batch))
    for name, value in named:
        if isinstance(value, torch.Tensor):
            return f"{' x '.join(map(str, value.shape))} {name or str(value.dtype).removeprefix('torch.')}"
    return "a batch without tensors"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
