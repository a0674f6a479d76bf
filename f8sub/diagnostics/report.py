"""Reports what a conversion did, what it takes in bytes, and what it gains.

Every linear layer is told of, converted or with the reason why not, and all other weights. So are converted layers
whose weights the code of other modules reads, as a fused kernel does that multiplies by them itself. Mamba's layers in
transformers do so on a GPU alone, where such a kernel is installed, so a count on meta or on a CPU does not see it.
"""

import dataclasses
import functools
import inspect
import math
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from f8sub.convert.attention import AttentionModule, attention_modules
from f8sub.convert.products import (
    NOT_REGISTERED,
    ROOT,
    SAVED_INPUTS,
    SHARED_INPUTS,
    SKIP_REASON,
    OtherWeights,
    active_share_of_linear,
    expert_products,
    kind_of,
    kinds,
    name_of,
    other_weights,
    pretrained,
    products_of,
    refuse_without_shapes,
    unknown_weights,
)
from f8sub.convert.selection import MIN_DIM, is_small
from f8sub.convert.swiglu_input import KeptInput, kept_inputs
from f8sub.diagnostics.bytes import byte_account
from f8sub.errors import refuse_other_than_a_module
from f8sub.estimator.counted_forward import Batch, Count, count, count_of_made_up
from f8sub.estimator.experts import Gains
from f8sub.experts.seams import seam_of
from f8sub.linear.float8_linear import Float8Linear
from f8sub.recipe import Recipe, get_recipe
from f8sub.recipes import DEFAULT
from f8sub.text_table import plural, text_table
from f8sub.weights.conversion import Conversion
from f8sub.weights.weight import is_converted

READ = re.compile(
    r"(?<!isinstance\()self\.(\w+)\.weight\b"
    r"(?!\s*(?:=[^=]|\.(?:data|device|dtype|shape|size|ndim|dim|numel|element_size|requires_grad|is_\w+)\b))"
)
"""A weight that is read, not one of its properties, its class or its place."""

NOT_IN_FORWARD = re.compile(r"init|reset|load|save|tie|resize|from_pretrained|repr")
"""Names of methods that no forward calls."""


def read_in_code(model: torch.nn.Module, known: Container[str]) -> Iterator[str]:
    """Yield a sentence for each method of the model's modules that reads weights of converted layers.

    Args:
        model: the model.
        known: layers whose weights a count saw others multiply by.
    """
    found: dict[tuple[type, str], list[str]] = defaultdict(list)
    for fqn, module in model.named_modules():
        kind: Any = type(module)
        for method, name in _reads(kind):
            layer = f"{fqn}.{name}" if fqn else name
            if isinstance(module._modules.get(name), Float8Linear) and layer not in known:
                found[kind, method].append(layer)
    for (cls, method), fqns in found.items():
        named = kinds(fqns)
        yield (
            f"{cls.__name__}.{method} reads weights of converted layers ({', '.join(named)}): where that runs, it "
            "multiplies by them in high precision, as a fused kernel on a GPU does. A count with batch= shows whether "
            f"it does; skip={named} leaves them as they are."
        )


@functools.cache
def _reads(cls: Any) -> tuple[tuple[str, str], ...]:
    """Return methods of a class, each with a child whose weight it reads; none if the source is not there."""
    found: dict[tuple[str, str], None] = {}
    if cls.__module__.startswith("torch."):
        return ()
    # A method may be inherited.
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, member in vars(base).items():
            if not inspect.isfunction(member) or NOT_IN_FORWARD.search(name):
                continue
            try:
                source = inspect.getsource(member)
            # Compiled or typed-in code has no source.
            except (OSError, TypeError):
                continue
            found.update(dict.fromkeys((name, child) for child in READ.findall(source)))
    return tuple(found)


NOT_SEEN = "convert_to_float8 has not seen it"

WIDTH, NAME_WIDTH, SHAPE_WIDTH = 100, 46, 22
"""Columns of a report, and of the names and shapes in it; what is longer is wrapped or shortened."""

HEADER = ("", "layers", "(experts x) N x K", "FLOPs", "params")
"""Weights of experts have three dimensions."""

ASSUMED_ONCE = "assumed: every layer once per token"
"""Of FLOPs that were not counted."""

LEAST_SHARE, MOST_NAMES = 0.01, 4
"""Share of a model's parameters below which the summary does not say that nothing tells what they multiply; names in a
list."""

MOST_ROWS = 16
"""Rows that a report shows of layers with one reason; the largest come first where there are more."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Reports one linear layer.

    Attributes:
        fqn: its name in the model.
        in_features: K.
        out_features: N.
        converted: whether it is a ``Float8Linear``.
        detail: recipe and backend of a converted layer and what deviates from defaults; the reason of any other.
        multiplications: by its weight, of the forward that was counted. Where none was, of one token: K * N; of a layer
            in a list of experts that times the share of these that a token is sent to.
        in_float8: how many of them are in float8: those of its own forward, where it is converted.
        runs: how often its forward ran; None where no forward was counted.
        read_by: the module whose forward multiplies by its weight, in high precision; empty where none does.
    """

    fqn: str
    in_features: int
    out_features: int
    converted: bool
    detail: str
    multiplications: float
    in_float8: float = 0.0
    runs: int | None = None
    read_by: str = ""

    @property
    def title(self) -> str:
        """A sentence that says what became of the layer."""
        if self.converted and self.read_by:
            part = "in part" if self.in_float8 else "none of it"
            return f"converted, {part} in float8: {self.read_by}, multiplies by its weight in high precision"
        if self.converted and self.runs == 0:
            return f"converted, and did not run: {self.detail}"
        title = f"{'' if self.converted else 'not '}in float8: {self.detail}"
        return f"{title}; did not run" if self.runs == 0 and not self.multiplications else title


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Holds what runs in float8. ``str()`` is a page: the summary, then rows of equal layers, by what became of them.

    FLOPs are those of products with weights: of linear layers, experts, recurrent layers, convolutions, and whatever
    else multiplies by a parameter. Products of activations, such as attention's, are none. FLOPs are counted in one
    forward, or assumed: every layer multiplies each token once, experts as often as ``top_k`` says, and those of
    convolutions are not known. Shares are of the whole model's.

    Attributes:
        layers: every linear layer, in the model's order.
        idle_patterns: of options given by patterns, those that do nothing, with the reason.
        bytes: the ``ByteAccount``, where a number of tokens was given; ``str()`` of it is a table.
        others: what multiplies by weights and is no nn.Linear; experts alone may be converted.
        counted: the forward in which FLOPs were counted, in words; empty where they are assumed.
        assumed_because: what a forward of made-up inputs raised; empty where none was tried, or it counted.
        not_counted: where FLOPs are assumed names of other parameters that may multiply; where they were counted
            operators of other libraries that took weights.
        not_counted_share: share of those parameters in all, 0 to 1.
        of_activations: multiplications of activations by each other in that forward, over those by weights.
        read_in_code: layers whose weights other modules' code reads, and that code.
        attention: modules that call ``scaled_dot_product_attention``, in float8 or why not.
        swiglu: layers whose results ``keep_swiglu_input_in_float8`` rounds.
        parameters: how many the model has.
        parameters_in_float8: how many of them are weights of converted layers and experts.
        experts: what float8 gains of each kind of experts, one sentence each.
    """

    layers: tuple[LayerReport, ...]
    idle_patterns: tuple[str, ...] = ()
    bytes: Any = None
    others: tuple[OtherWeights, ...] = ()
    parameters: int = 0
    parameters_in_float8: int = 0
    experts: tuple[str, ...] = ()
    counted: str = ""
    assumed_because: str = ""
    not_counted: tuple[str, ...] = ()
    not_counted_share: float = 0.0
    of_activations: float = 0.0
    read_in_code: tuple[str, ...] = ()
    attention: tuple[AttentionModule, ...] = ()
    swiglu: tuple[KeptInput, ...] = ()

    @property
    def flops_share(self) -> float:
        """The share of the model's FLOPs that run in float8, 0 to 1; ``counted`` says how that is known."""
        in_float8 = sum(layer.in_float8 for layer in self.layers) + sum(
            other.in_float8 for other in self.others
        )
        # A model without products has a share of 0.
        return in_float8 / max(self._multiplications, 1)

    @property
    def parameters_share(self) -> float:
        """The share of the model's parameters that are weights of converted layers, 0 to 1."""
        return self.parameters_in_float8 / max(self.parameters, 1)

    @property
    def summary(self) -> str:
        """One line for a log."""
        converted = [layer for layer in self.layers if layer.converted]
        others = [other for other in self.others if other.converted]
        and_others = f" and {plural(len(others), 'module')} of experts" if others else ""
        line = (
            f"{len(converted)} of {plural(len(self.layers), 'linear layer')}{and_others} in float8, "
            f"{self.flops_share:.1%} of FLOPs ({f'counted in {self.counted}' if self.counted else ASSUMED_ONCE}), "
            f"{self.parameters_share:.1%} of parameters"
        )
        if details := {layer.detail for layer in converted} | {other.detail for other in others}:
            line += f" ({'; '.join(sorted(details))})"
        clauses = (
            *self._of_experts(),
            self._of_read(converted),
            self._of_idle(converted),
            self._of_attention(),
            self._of_swiglu(),
            self._of_not_counted(),
        )
        line = "; ".join([line, *filter(None, clauses)])
        return line + (f"; idle patterns: {', '.join(self.idle_patterns)}" if self.idle_patterns else "")

    def _of_experts(self) -> Iterator[str]:
        """Yield what stays in high precision of modules with weights of three dimensions, by the reason."""
        for reason, modules in Counter(other.reason for other in self.others if other.reason).items():
            what = " with weights of 3 dimensions" if reason == NOT_REGISTERED else ""
            of_experts = "" if reason == NOT_REGISTERED else "experts: "
            stay = "stays" if modules == 1 else "stay"
            yield f"{of_experts}{plural(modules, 'module')}{what} {stay} in high precision: {reason}"

    @staticmethod
    def _of_read(converted: list[LayerReport]) -> str:
        read = [layer.fqn for layer in converted if layer.read_by]
        if not read:
            return ""
        return (
            f"other code multiplies by the weights of {plural(len(read), 'converted layer')}, in high precision: "
            f"skip={kinds(read)} leaves them as they are"
        )

    @staticmethod
    def _of_idle(converted: list[LayerReport]) -> str:
        idle = [layer.fqn for layer in converted if layer.runs == 0 and not layer.read_by]
        return f"{plural(len(idle), 'converted layer')} did not run ({_some(kinds(idle))})" if idle else ""

    def _of_attention(self) -> str:
        if all(each.state is None for each in self.attention):
            return ""
        hows = Counter(each.how for each in self.attention if each.converted)
        line = f"attention: {hows.total()} of {plural(len(self.attention), 'module')} in float8"
        told = [how if len(hows) == 1 else f"{count} by {how}" for how, count in hows.items()]
        reasons = Counter(each.reason for each in self.attention if not each.converted)
        told += [f"{count} not: {reason}" for reason, count in reasons.items()]
        return f"{line} ({'; '.join(told)})"

    def _of_swiglu(self) -> str:
        kept = len(_modules_around(each.fqn for each in self.swiglu))
        return f"SwiGLU's input of {plural(kept, 'module')} kept in float8" if kept else ""

    def _of_not_counted(self) -> str:
        if self.counted or self.not_counted_share < LEAST_SHARE:
            return ""
        return f"not counted: what {self.not_counted_share:.1%} of parameters may multiply; batch= counts it"

    @property
    def _multiplications(self) -> float:
        others = sum(other.multiplications or 0.0 for other in self.others)
        return others + sum(layer.multiplications for layer in self.layers)

    def __str__(self) -> str:
        sections = self._sections()
        lines = [self.summary, *(_table([HEADER]) if sections else [])]
        for title, rows in sections.items():
            lines += [*_wrapped(title), *rows]
        return "\n".join([*lines, *(line for note in self._notes() for line in _wrapped(note))])

    def _sections(self) -> dict[str, list[str]]:
        """Return rows by what became of their layers, converted ones first."""
        found: dict[str, list[_Weights]] = defaultdict(list)
        # False sorts before True.
        for layer in sorted(self.layers, key=lambda layer: not layer.converted):
            shape = layer.out_features, layer.in_features
            weights = _Weights(layer.fqn, _shown(shape), math.prod(shape), layer.multiplications)
            found[layer.title].append(weights)
        for other in sorted(self.others, key=lambda other: not other.converted):
            shown = _shown(other.shapes[0]) + (", ..." if len(other.shapes) > 1 else "")
            weights = _Weights(other.fqn, shown, other.parameters, other.multiplications)
            found[f"{'' if other.converted else 'not '}in float8: {other.detail}"].append(weights)
        return {title: self._rows(weights) for title, weights in found.items()}

    def _rows(self, weights: list["_Weights"]) -> list[str]:
        """Return one line for all weights of one kind and shape, and one that counts the smaller kinds."""
        rows: dict[tuple[str, str], list[_Weights]] = defaultdict(list)
        for each in weights:
            rows[kind_of(each.fqn), each.shape].append(each)
        # The largest kinds; they are shown in the order of the model.
        largest = sorted(rows, key=lambda key: -sum(each.elements for each in rows[key]))[:MOST_ROWS]
        shown = []
        for alike in (rows[key] for key in rows if key in largest):
            # None: not known from shapes, as for convolutions.
            known = [each.multiplications for each in alike if each.multiplications is not None]
            flops = f"{sum(known) / max(self._multiplications, 1):.1%}" if known else "?"
            elements = f"{sum(each.elements for each in alike) / max(self.parameters, 1):.1%}"
            name = name_of([each.fqn for each in alike])
            if len(name) > NAME_WIDTH:
                # The end of a name tells layers apart.
                name = f"...{name[3 - NAME_WIDTH :]}"
            shown.append((name, str(len(alike)), alike[0].shape, flops, elements))
        lines, more = _table(shown), len(rows) - len(largest)
        return [*lines, f"  and {plural(more, 'kind')} of smaller layers"] if more else lines

    def _notes(self) -> list[str]:
        notes = [*self.experts, *self._of_each_attention(), *self._of_each_swiglu()]
        notes += [*self._of_flops(), *self.read_in_code]
        if any("(default)" in layer.detail for layer in self.layers if not layer.converted):
            notes.append("(default): skip_defaults=False converts these too.")
        if is_small([(la.in_features, la.out_features) for la in self.layers if la.converted]):
            notes.append(
                f"Layers with fewer than {MIN_DIM} features in or out gain no time in float8 on a GPU; much of this "
                "model is such layers."
            )
        return notes

    def _of_each_attention(self) -> list[str]:
        """Return a sentence for each outcome, where any module was to attend in float8."""
        if all(each.state is None for each in self.attention):
            return []
        found: dict[str, list[str]] = defaultdict(list)
        for each in self.attention:
            found[each.title].append(each.fqn or ROOT)
        return [f"Attention {title}: {len(fqns)} x {_some(kinds(fqns))}." for title, fqns in found.items()]

    def _of_each_swiglu(self) -> list[str]:
        """Return a sentence for all layers whose results are kept in float8, and what compiled code saves of them."""
        if not self.swiglu:
            return []
        modules = _modules_around(each.fqn for each in self.swiglu)
        saved = sum(each.bytes for each in self.swiglu)
        plain = sum(2 * each.features for each in self.swiglu)
        line = (
            f"SwiGLU's input is rounded to float8: the results of {_some(kinds(each.fqn for each in self.swiglu))}. Of "
            f"{plural(len(modules), 'module')} compiled code saves {saved:,} bytes per token, in bf16 {plain:,}."
        )
        return [line]

    def _of_flops(self) -> list[str]:
        """Return sentences that say how the FLOPs are known."""
        listed = _some(list(self.not_counted))
        if not self.counted:
            because = f", because {self.assumed_because}" if self.assumed_because else ""
            known = (
                f"FLOPs are assumed{because}: every layer once per token. batch= counts them in one forward."
            )
            return [known, *([f"These may multiply, too, and are not counted: {listed}."] if listed else [])]
        if not (self.of_activations or listed):
            return []
        known = (
            "FLOPs are those of products with weights. Products of activations, such as attention's, are not "
            f"in these shares; they had {self.of_activations:.1%} as many FLOPs in that forward."
        )
        return [known, *([f"Weights went to operators that f8sub cannot count: {listed}."] if listed else [])]


class _Weights(NamedTuple):
    """Holds what a row shows of one layer or module; ``multiplications`` is None if they are not known."""

    fqn: str
    shape: str
    elements: int
    multiplications: float | None


def layers_report(model: torch.nn.Module, counted: Count | str) -> ConversionReport:
    """Report what of ``model``, converted or not, sharded or not, runs in float8, and why the rest does not.

    Args:
        model: the model.
        counted: what a forward multiplied; a string where FLOPs are assumed, with the reason or empty.
    """
    # Parts of a model may be converted by calls of their own.
    converted: list[Any] = list(filter(is_converted, model.modules()))
    conversions = dict.fromkeys(module._f8sub.conversion for module in converted)
    idle = [pattern for conversion in conversions for pattern in conversion.options["idle_patterns"]]
    layers = {fqn: module for fqn, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    # A set: a tied weight counts once.
    weights = {product.weight for module in converted for product in products_of(module)}
    count = None if isinstance(counted, str) else counted
    others = other_weights(model, count)
    # Lazy parameters have no size yet.
    parameters = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    known: dict[str, Any] = {}
    if count is None:
        unknown = unknown_weights(model)
        known["assumed_because"] = counted
        known["not_counted"] = tuple(kinds(unknown))
        known["not_counted_share"] = sum(unknown.values()) / max(parameters, 1)
    else:
        known["counted"] = count.of
        known["not_counted"] = tuple(
            f"{name} ({_some(kinds(fqns))})" for name, fqns in count.not_known.items()
        )
        # products of activations are compared with all products with weights
        by_weights = sum((*count.own.values(), *count.elsewhere.values()))
        known["of_activations"] = count.of_activations / max(by_weights, 1)
    # Layers that other libraries put in the place of converted ones.
    replaced = Conversion.replaced(model)
    rows = tuple(_of_layer(model, fqn, layer, count, replaced.get(fqn)) for fqn, layer in layers.items())
    if count is None or count.device in ("cpu", "meta"):  # on a GPU the count saw what kernels read there
        known["read_in_code"] = tuple(read_in_code(model, {row.fqn for row in rows if row.read_by}))
    return ConversionReport(
        rows,
        tuple(dict.fromkeys(idle)),
        others=others,
        parameters=parameters,
        parameters_in_float8=sum(weight.numel() for weight in weights),
        attention=tuple(attention_modules(model)),
        swiglu=tuple(kept_inputs(model)),
        **known,
    )


def _of_layer(
    model: torch.nn.Module, fqn: str, layer: torch.nn.Linear, count: Count | None, replaced_by: str | None
) -> LayerReport:
    converted = isinstance(layer, Float8Linear)
    unseen = NOT_SEEN if replaced_by is None else f"it was converted, and replaced since by {replaced_by}"
    detail = (
        layer._f8sub.how(layer) if isinstance(layer, Float8Linear) else getattr(layer, SKIP_REASON, unseen)
    )
    sizes = layer.in_features, layer.out_features
    if count is None:
        assumed = sizes[0] * sizes[1] * active_share_of_linear(model, fqn)
        return LayerReport(fqn or ROOT, *sizes, converted, detail, assumed, assumed if converted else 0.0)
    # Other code that multiplies by the weight does so in high precision.
    own, elsewhere = count.of_module(fqn)
    readers = dict.fromkeys(reader for (name, _), reader in count.readers.items() if name == fqn)
    return LayerReport(
        fqn or ROOT,
        *sizes,
        converted,
        detail,
        own + elsewhere,
        own if converted else 0.0,
        count.runs.get(fqn, 0),
        _some([kind_of(reader) for reader in readers]),
    )


def _modules_around(fqns: Iterable[str]) -> list[str]:
    """Return the modules of which layers are children, each once."""
    return list(dict.fromkeys(fqn.rpartition(".")[0] for fqn in fqns))


def _some(names: list[str]) -> str:
    """Join the first few of some names, each once."""
    found = list(dict.fromkeys(names))
    return ", ".join(found[:MOST_NAMES]) + (", ..." if len(found) > MOST_NAMES else "")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return text_table((), rows, "lrlrr", widths=(NAME_WIDTH, 6, SHAPE_WIDTH, 7, 7), gap=1, indent=2)


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)


def told_of_experts(model: torch.nn.Module, tokens: int | None) -> Iterator[str]:
    """Yield a sentence for each kind of experts in ``model``, those of equal names and sizes together.

    Args:
        model: converted or not. Experts that are not converted are told about with the recipe of the first module that
            is, or the default one.
        tokens: tokens of one forward; None for those that ``convert_to_float8`` was given.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    first = next(filter(is_converted, modules.values()), None)
    other: Recipe = get_recipe(DEFAULT) if first is None else first._f8sub.plan.recipe
    options = {} if first is None else first._f8sub.conversion.options
    gains, seen = Gains.of_options(options, tokens), set()
    for fqn, module in modules.items():
        if seam_of(module) is None or not (products := expert_products(model, fqn, None)):
            continue
        recipe = module._f8sub.plan.recipe if is_converted(module) else other
        sizes = tuple((product.experts, product.rows, product.cols) for product in products)
        # one sentence for equal modules
        if (key := (kind_of(fqn), sizes, recipe.name)) in seen:
            continue
        seen.add(key)
        shown = ", ".join(f"{rows} x {cols}" for _, rows, cols in sizes)
        yield f"{kind_of(fqn) or ROOT}, {sizes[0][0]} experts of {shown}: {gains.of(products, recipe)}."


def conversion_report(
    model: torch.nn.Module,
    tokens: int | None = None,
    *,
    batch: Batch | None = None,
    dtype: torch.dtype = torch.bfloat16,
    shared_inputs: Iterable[Sequence[str]] = SHARED_INPUTS,
    saved_inputs: Iterable[str] = SAVED_INPUTS,
) -> ConversionReport:
    """Report what of ``model`` runs in float8, and why the rest does not; with ``tokens``, its bytes, too.

    FLOPs are counted in one forward of ``batch``. It runs without gradients, without hooks and in high precision, on a
    copy of the modules that shares the weights. No buffer, random number, amax history or state of FSDP2 changes, and
    no rank waits for another, so one may count alone. Where the batch or the weights are on meta, or the weights are
    sharded, everything runs on meta: shapes decide, and a forward that asks for values is an error.

    Without a batch, a model of transformers is counted on meta with inputs that are made up, which takes less than a
    second for most. Of any other model FLOPs are assumed: every layer once per token. ``summary`` says which it was.

    Args:
        model: converted or not, sharded or not.
        tokens: rows of x in one forward, see ``byte_account``, as for the arguments below ``batch``. What experts gain
            depends on it, too.
        batch: what the model's forward takes: a mapping by name, a tuple or list by position, or one tensor.
        dtype: the high precision.
        shared_inputs: groups of names of siblings that read one x.
        saved_inputs: names of layers whose x is saved by what makes it.

    Raises:
        Float8ConfigError: the forward of ``batch`` fails, a lazy module has no shapes for it yet, or ``model`` is no
            module.
    """
    refuse_other_than_a_module("conversion_report", model)
    if batch is not None:
        refuse_without_shapes(model)
        counted: Count | str = count(model, batch)
    else:
        counted = "" if (inner := pretrained(model)) is None else count_of_made_up(model, inner)
    told = tuple(told_of_experts(model, tokens))
    report = dataclasses.replace(layers_report(model, counted), experts=told)
    if tokens is None:
        return report
    account = byte_account(model, tokens, dtype, shared_inputs, saved_inputs)
    return dataclasses.replace(report, bytes=account)
