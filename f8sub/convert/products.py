"""The products of a model with weights, converted or not: one account for estimates, reports and tools.

A module has products, see ``products_of``; a model has those of its modules with their sizes, blocks, shared inputs and
uses. Weights that are multiplied in no nn.Linear and by no known experts are attention's, Conv1D's, routers' and
convolutions'.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from f8sub.errors import Float8ConfigError
from f8sub.experts.seams import AUTO, EXPERTS, seam_of
from f8sub.weights.weight import MADE_OF, STATE, is_converted, own_parameter, parameters_of

if TYPE_CHECKING:
    from f8sub.estimator.counted_forward import Count

SKIP_REASON = "_f8sub_skip_reason"
"""Attribute that ``convert_to_float8`` leaves on a linear layer it did not convert."""

ROOT = "(root)"
"""What the model itself is called among its modules."""


def without_shape(module: torch.nn.Module, name: str) -> str:
    """Say of a parameter or buffer of a lazy module what it lacks, and what to do."""
    return f"the {name} of this {type(module).__name__} has no shape yet; run a batch through the model first"


def refuse_without_shapes(model: torch.nn.Module) -> None:
    """Refuse a model of which a parameter or buffer has no shape yet, such as those of ``nn.LazyLinear``.

    Raises:
        Float8ConfigError: it has one; the message names it.
    """
    for fqn, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if is_lazy(tensor):
                raise Float8ConfigError(f"{fqn}: {without_shape(module, name)}")


def kind_of(fqn: str) -> str:
    """Return the name with ``*`` for every number: equal layers of a stack of blocks have one kind."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def kinds(fqns: Iterable[str]) -> list[str]:
    """Return each kind once, and the name of a layer that is the only one of its kind."""
    found: dict[str, list[str]] = {}
    for fqn in fqns:
        found.setdefault(kind_of(fqn), []).append(fqn)
    return list(map(name_of, found.values()))


def name_of(fqns: list[str]) -> str:
    """Return the name of one layer, or the kind of several."""
    return fqns[0] if len(fqns) == 1 else kind_of(fqns[0])


ATTENTION_OUTPUTS = ("out_proj", "c_proj", "proj", "dense")
"""Names of layers that read what attention makes, besides ``SAVED_INPUTS``, in modules called attn or attention."""


SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("wq", "wk", "wv"),
    ("w1", "w3"),
    ("q", "k", "v"),
    ("gate", "up"),
)
"""Names of siblings that read one x: those of Llama in transformers and torchtitan, and their short forms."""

SAVED_INPUTS = ("o_proj", "wo", "o")
"""Names of layers whose x is saved anyway by what makes it: attention's results."""

GROUPS = {name: group for group in SHARED_INPUTS for name in group}
"""The siblings of ``SHARED_INPUTS`` by the name of each."""


def reads_attention(fqn: str) -> bool:
    """Return whether a layer's x is the result of attention, judged by its name."""
    *parents, name = fqn.split(".")
    # "proj" and "dense" name many layers: they count in a module of attention only.
    own = any(word in part for part in parents for word in ("attn", "attention"))
    return name in SAVED_INPUTS or (own and name in ATTENTION_OUTPUTS)


def block_of(fqn: str) -> str | None:
    """Return the block's name: ``model.layers.3`` for ``model.layers.3.mlp.up_proj``; None outside of blocks."""
    parts = fqn.split(".")
    # The first number is that of the outermost list: experts in a list have a second one.
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


class ModuleProduct(NamedTuple):
    """A product that a module makes in its forward, converted or not: of rows with one of its weights.

    Attributes:
        name: a linear layer's own; of experts with the weight's.
        attribute: the weight's name in the module.
        weight: (N, K); of experts (E, N, K), or (E, K, N) where ``transposed``; whatever parametrizations make of it.
        groups: how many groups of rows have a matrix of their own, E; None for one that all rows read.
        transposed: how the weight is stored.
    """

    name: str
    attribute: str
    weight: torch.Tensor
    groups: int | None
    transposed: bool


def products_of(module: torch.nn.Module, fqn: str = "") -> Iterator[ModuleProduct]:
    """Yield the products of a linear layer, or of a module of experts whose seam is known; none of any other module.

    A converted module has those that it was converted with, any other those that a conversion would find.

    Args:
        module: converted or not.
        fqn: its name in the model.
    """
    if is_converted(module):
        state = vars(module)[STATE]
        weights, grouped = state.weights, state.plan.grouped
    elif isinstance(module, torch.nn.Linear):
        weights, grouped = {"weight": False}, False
    elif (seam := seam_of(module)) is not None:
        weights, grouped = seam.weights_of(module), True
        # Whatever else has such a name is no weight of experts.
        weights = {name: how for name, how in weights.items() if _is_stacked_in(module, name)}
    else:
        return
    for attribute, transposed in weights.items():
        weight = own_parameter(module, attribute)
        name = f"{fqn}.{attribute}".lstrip(".") if grouped else fqn
        yield ModuleProduct(name, attribute, weight, weight.shape[0] if grouped else None, transposed)


def is_stacked(weight: object) -> bool:
    """Return whether a weight has three dimensions, one matrix for each expert."""
    return isinstance(weight, torch.Tensor) and weight.dim() == 3


def _is_stacked_in(module: torch.nn.Module, name: str) -> bool:
    made_of = parameters_of(module, name)
    return any(map(is_stacked, made_of)) if made_of else is_stacked(getattr(module, name, None))


HEAD_SIZE = 128
"""Features of an attention head where a module does not tell: those of Llama 3, whose attention was timed."""


RESULT, GRADIENTS = "result", "gradients"


@dataclass(frozen=True, slots=True)
class Product:
    """Describes a weight, and how much multiplies by it.

    Attributes:
        fqn: the module's name; of a weight of experts that weight's.
        rows: N.
        cols: K.
        uses: how many (N, K) matrices of it one token is multiplied by: 1 of a layer, fewer of one expert.
        elements: how many the weight has.
        reason: why it is not converted; None where it is.
        reads: the first of the siblings that read its x, by name; itself where no other does.
        reads_attention: whether its x is what attention made.
        block: the name of the numbered block that it is in; None outside of blocks.
        head: features of an attention head, where its x is what attention made.
        experts: how many (N, K) matrices the weight has, each for tokens of its own; 0 of a layer.
        transposed: whether such a weight is stored as (experts, K, N).
        frozen: whether it takes no gradient, while others do.
        swiglu: ``RESULT`` where the cast of its x computes SwiGLU, ``GRADIENTS`` where that of its dy computes
            SwiGLU's gradients; empty for neither.
    """

    fqn: str
    rows: int
    cols: int
    uses: float
    elements: int
    reason: str | None
    reads: str
    reads_attention: bool
    block: str | None
    head: int = HEAD_SIZE
    experts: int = 0
    transposed: bool = False
    frozen: bool = False
    swiglu: str = ""

    @property
    def module(self) -> str:
        """The name of the module that has the weight."""
        return self.fqn.rpartition(".")[0] if self.experts else self.fqn

    @property
    def attribute(self) -> str:
        """The name of the weight in its module."""
        return self.fqn.rpartition(".")[2] if self.experts else "weight"

    @property
    def stored(self) -> tuple[int, int]:
        """Rows and columns of the weight as it is stored, those of all experts as one matrix."""
        rows, cols = (self.cols, self.rows) if self.transposed else (self.rows, self.cols)
        return rows * max(1, self.experts), cols

    @property
    def shares_x(self) -> bool:
        """True if a sibling before it reads the same x."""
        return self.reads != self.fqn

    @property
    def multiplications(self) -> float:
        """Multiplications of one token."""
        return self.rows * self.cols * self.uses


@dataclass(frozen=True, slots=True)
class Shapes:
    """Holds the shapes of a model.

    Attributes:
        products: all that it multiplies by, in its order.
        other_parameters: elements of embeddings, norms and biases.
        logits: of a token, of all output heads.
        not_counted: classes whose work depends on more than tokens, such as convolutions.
        experts: as ``convert_to_float8`` takes it; None of a converted model, whose experts are as they are.
        undecided: whether recipe, GPU and tokens decide which of the experts are converted.
        other_frozen: how many of the other parameters take no gradient, while something does.
        exchanged: whether tokens travel to experts on GPUs of their own.
    """

    products: tuple[Product, ...]
    other_parameters: int
    logits: int
    not_counted: tuple[str, ...]
    experts: bool | str | None = None
    undecided: bool = False
    other_frozen: int = 0
    exchanged: bool = False

    @property
    def learning(self) -> int:
        """Elements of the weights that take a gradient."""
        frozen = sum(product.elements for product in self.products if product.frozen)
        return self.parameters - frozen - self.other_frozen

    @property
    def blocks(self) -> dict[str, list[Product]]:
        """The products of each numbered block, by its name."""
        found: dict[str, list[Product]] = {}
        for product in self.products:
            if product.block is not None:
                found.setdefault(product.block, []).append(product)
        return found

    def option_of_experts(self, tokens: float) -> str:
        """Return the argument by which ``convert_to_float8`` converts these experts; empty where there is none."""
        if self.experts is None or not any(product.experts for product in self.products):
            return ""
        asked = "" if self.experts == EXPERTS else f", experts={self.experts!r}"
        return f"{asked}, tokens={tokens:.0f}" if self.experts in AUTO else asked

    @property
    def experts_by_module(self) -> dict[str, list[Product]]:
        """The weights of experts, by the name of their module."""
        found: dict[str, list[Product]] = {}
        for product in self.products:
            if product.experts:
                found.setdefault(product.module, []).append(product)
        return found

    @property
    def outside(self) -> list[Product]:
        """The products outside of numbered blocks."""
        return [product for product in self.products if product.block is None]

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.other_parameters + sum(product.elements for product in self.products)


def linear_products(
    model: torch.nn.Module,
    reasons: Mapping[str, str | None],
    groups: Mapping[str, tuple[str, ...]] = GROUPS,
) -> list[Product]:
    """Return the weights of all linear layers, in the order of the model.

    Args:
        model: the model.
        reasons: why each layer is not converted, by its name; None, or no entry, where it is.
        groups: by a layer's name, the names of siblings that read one x with it.
    """
    modules = dict(model.named_modules())
    first: dict[tuple[str, tuple[str, ...]], str] = {}
    found: list[Product] = []
    seen = set()
    for fqn, layer in modules.items():
        # A lazy layer has no sizes yet.
        if not isinstance(layer, torch.nn.Linear) or any(map(is_lazy, layer.parameters(recurse=False))):
            continue
        (weight,) = (product.weight for product in products_of(layer, fqn))
        layer_name = fqn.removesuffix(".base_layer")  # which PEFT puts under an adapter
        parent, _, name = layer_name.rpartition(".")
        # A tied weight multiplies in two places and is stored once.
        elements = 0 if weight in seen else weight.numel()
        seen.add(weight)
        sizes = layer.out_features, layer.in_features, active_share_of_linear(model, fqn), elements
        # The first of the siblings that read one x stands for it.
        reads = first.setdefault((parent, groups.get(name, (name,))), fqn)
        head = getattr(modules.get(parent), "head_dim", None)
        places = reasons.get(fqn), reads, reads_attention(layer_name), block_of(fqn)
        head = head if isinstance(head, int) else HEAD_SIZE
        found.append(
            Product(fqn, *sizes, *places, head, frozen=are_frozen(model, parameters_of(layer, "weight")))
        )
    return found


def expert_products(model: torch.nn.Module, fqn: str, reason: str | None) -> list[Product]:
    """Return the weights of a module of experts whose seam is known.

    Args:
        model: the model.
        fqn: the module's name in it.
        reason: why it is not converted; None where it is.
    """
    module = model.get_submodule(fqn)
    seam = seam_of(module)
    down = None if seam is None else seam.down
    found: list[Product] = []
    first: dict[tuple[str, ...], str] = {}
    for full, name, weight, groups, transposed in products_of(module, fqn):
        if groups is None:
            continue
        experts, rows, cols = weight.shape
        # stored as [E, K, N]
        if transposed:
            rows, cols = cols, rows
        short = name.partition("_E")[0]  # torchtitan's w1_EFD
        reads = first.setdefault(GROUPS.get(short, (name,)), full)
        # Matrices per token: top_k if the model says so, else all of them.
        uses = experts * (active_share(model, fqn, experts) or 1.0)
        sizes = rows, cols, uses, weight.numel()
        places = reason, reads, False, block_of(full)
        frozen = are_frozen(model, parameters_of(module, name))
        swiglu = "" if down is None else RESULT if name == down else GRADIENTS
        found.append(
            Product(
                full,
                *sizes,
                *places,
                experts=experts,
                transposed=transposed,
                frozen=frozen,
                swiglu=swiglu,
            )
        )
    return found


def model_products(
    model: torch.nn.Module, reasons: Mapping[str, str | None], counted: "Count | None" = None
) -> tuple[list[Product], tuple[str, ...]]:
    """Return all products of a model with weights, and the classes whose work depends on more than tokens.

    Linear layers come first, then experts, torch's attention, Conv1D and routers.

    Args:
        model: converted or not.
        reasons: why each linear layer and each module of experts is not converted, by its name; None where it is.
        counted: of a forward of integers; of layers that do not run in it, and without one, uses are assumed.
    """
    found = linear_products(model, reasons)
    linears = {product.fqn for product in found}
    not_counted: dict[str, None] = {}
    for other in other_weights(model):
        fqn = "" if other.fqn == ROOT else other.fqn
        module = model.get_submodule(fqn)
        if other.multiplications is None:
            not_counted[other.detail.partition(":")[0]] = None
        elif experts := expert_products(model, fqn, None if reasons.get(fqn, "") is None else other.detail):
            found += experts
        else:
            for shape in other.shapes:
                # [E, N, K]: one token is multiplied by some of the E matrices.
                matrices = shape[0] if len(shape) == 3 else 1
                share = (active_share(model, fqn, matrices) or 1.0) if len(shape) == 3 else 1.0
                sizes = shape[-2], shape[-1], matrices * share, math.prod(shape)
                places = other.detail, other.fqn, reads_attention(other.fqn), block_of(other.fqn)
                fixed = are_frozen(model, module.parameters(recurse=False))
                found.append(Product(other.fqn, *sizes, *places, frozen=fixed))
    if counted is not None and counted.tokens:
        found = [_as_counted(product, counted, counted.tokens, linears) for product in found]
    return found, tuple(not_counted)


def _as_counted(product: Product, counted: "Count", tokens: int, linears: Container[str]) -> Product:
    """Return the product with the uses that a forward of so many tokens counted, where it counted any."""
    # The key of a count: the name of the module, and that of its parameter.
    keys = [(product.module, product.attribute)] if product.experts else []
    if product.fqn in linears:
        keys = [(product.fqn, name) for name in counted.names(product.fqn)]
    multiplied = sum(counted.own.get(key, 0.0) + counted.elsewhere.get(key, 0.0) for key in keys)
    # 0 for a layer that did not run in that forward: the assumed uses stay.
    uses = multiplied / (product.rows * product.cols * tokens) or product.uses
    return replace(product, uses=uses)


def are_frozen(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether these parameters take no gradient while others of the model do."""
    # If all parameters are frozen, none counts as frozen: adapters may be added later.
    return not any(p.requires_grad for p in parameters) and any(p.requires_grad for p in model.parameters())


TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")
"""Attributes of modules, and of their configs, that say how many experts a token is sent to."""

CONFIGS = ("config", "text_config")
"""Attributes that hold a model's config, and a config's that holds that of its text model."""


def active_share(model: torch.nn.Module, fqn: str, experts: int) -> float | None:
    """Return the share of a module's experts that one token is sent to: top_k over their number.

    ``top_k`` is looked for in the module itself, then in each module around it, in that module's children (a router is
    one) and in its config.

    Args:
        model: the model.
        fqn: name of the module that holds the experts.
        experts: how many there are.

    Returns:
        None where nothing says how many experts a token is sent to.
    """
    path = fqn.split(".") if fqn else []
    for depth in range(len(path), -1, -1):
        module = model.get_submodule(".".join(path[:depth]))
        around = [module] if depth == len(path) else [module, *module.children()]
        for holder in (*around, *_configs(module)):
            for name in TOP_K:
                value = getattr(holder, name, None)
                if type(value) is int and 0 < value <= experts:
                    return value / experts
    return None


def active_share_of_linear(model: torch.nn.Module, fqn: str) -> float:
    """Return ``active_share`` of a linear layer in a numbered list of experts; 1 of any other layer."""
    segments = fqn.split(".")
    for i in range(1, len(segments)):
        if segments[i].isdigit() and "expert" in segments[i - 1]:
            holder = ".".join(segments[:i])
            experts = sum(1 for _ in model.get_submodule(holder).children())
            return active_share(model, holder, experts) or 1.0
    return 1.0


def _configs(module: torch.nn.Module) -> Iterator[Any]:
    holder: Any = module
    for name in CONFIGS:
        holder = getattr(holder, name, None)
        if holder is not None:
            yield holder


def pretrained(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the model of transformers in a model, which says what it takes; None where there are other parameters."""
    inner = next((each for each in model.modules() if _is_pretrained(each)), None)
    # The inputs of the inner model would not reach weights outside of it.
    if inner is None or len(list(inner.parameters())) < len(list(model.parameters())):
        return None
    return inner


def _is_pretrained(module: torch.nn.Module) -> bool:
    return any(
        (cls.__module__, cls.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
        for cls in type(module).__mro__
    )


NOT_MULTIPLIED = ("embedding", "norm")
"""Classes with these words in their names have weights of two dimensions that no GEMM reads."""


NOT_REGISTERED = "if these are experts, f8sub.register_experts lets them be converted"
"""Why weights of three dimensions stay in high precision whose class is not known."""


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """Describes the weights of one module that is no nn.Linear.

    Attributes:
        fqn: its name in the model.
        shapes: of its weights.
        parameters: how many elements they have.
        multiplications: of the forward that was counted, or of one token; None where nothing says how many.
        detail: recipe and backend of a converted module; why it is not converted of any other.
        converted: whether a feature converted it.
        reason: why weights of three dimensions were not converted; empty for others.
        in_float8: how many of the multiplications are in float8.
    """

    fqn: str
    shapes: tuple[tuple[int, ...], ...]
    parameters: int
    multiplications: float | None
    detail: str
    converted: bool = False
    reason: str = ""
    in_float8: float = 0.0


def other_weights(model: torch.nn.Module, counted: "Count | None" = None) -> tuple[OtherWeights, ...]:
    """Return all modules of ``model`` that multiply by weights of their own and are no nn.Linear.

    Found are those that were counted, whatever they are. By their shapes and classes, counted or not, are found weights
    of three dimensions, as experts have them, unless the first is 1, as position embeddings have it; those of
    ``nn.MultiheadAttention``, of recurrent layers and of convolutions; and a parameter ``weight`` of two dimensions, as
    Conv1D and routers of transformers have it, unless the class is an embedding or a norm. What computes the weight of
    a linear layer or of experts multiplies by it where that was counted.
    """
    found = []
    computing = _parametrizations(model)
    for fqn, module, own in _own_weights(model):
        # Their parameters are those of the layer's own product.
        if fqn in computing and (counted is None or not any(counted.of_module(fqn))):
            continue
        # Of experts the products that they make; a weight that something computes is no parameter of theirs.
        products = {product.attribute: product.weight for product in products_of(module, fqn)}
        read = {name: w for name, w in products.items() if name in own or name not in module._parameters}
        if not products:
            read = {name: own[name] for name in _read_by_gemms(module, own)}
        if counted is not None:
            known = {*read, *(f"{name}{end}" for name in products.keys() - own.keys() for end in MADE_OF)}
            read |= {name: own[name] for name in counted.names(fqn) if name in own and name not in known}
        if read:
            found.append(_described(model, fqn, module, list(read.values()), counted))
    return tuple(found)


def unknown_weights(model: torch.nn.Module) -> dict[str, int]:
    """Return names and sizes of parameters whose shapes and classes do not tell how often they are multiplied by."""
    known = _parametrizations(model)
    return {
        f"{fqn}.{name}" if fqn else name: parameter.numel()
        for fqn, module, own in _own_weights(model)
        for name, parameter in own.items()
        if parameter.dim() > 1
        and fqn not in known
        and not any(word in type(module).__name__.lower() for word in NOT_MULTIPLIED)
        and (name not in _read_by_gemms(module, own) or isinstance(module, CONVOLUTIONS))
    }


def _own_weights(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, dict[str, torch.nn.Parameter]]]:
    """Yield each module that is no nn.Linear, with the parameters that no module before it has."""
    seen: set[int] = set()
    for fqn, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            continue
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_floating_point() and not is_lazy(parameter) and id(parameter) not in seen
        }
        seen.update(map(id, own.values()))
        yield fqn, module, own


def _parametrizations(model: torch.nn.Module) -> set[str]:
    """Return the names of the modules that compute weights of linear layers and experts.

    Their parameters are those of these layers' products.
    """
    return {
        f"{fqn}.parametrizations.{product.attribute}".lstrip(".")
        for fqn, module in model.named_modules()
        for product in products_of(module)
    }


CONVOLUTIONS = (
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
)


MATRICES = (torch.nn.MultiheadAttention, torch.nn.RNNBase, torch.nn.RNNCellBase, torch.nn.Bilinear)
"""Of these all weights of two dimensions or more are multiplied by, once per token."""


def _read_by_gemms(module: torch.nn.Module, own: dict[str, torch.nn.Parameter]) -> list[str]:
    """Return names of the parameters among a module's own that it multiplies by."""
    if isinstance(module, CONVOLUTIONS):
        return [name for name in own if name == "weight"]
    if isinstance(module, MATRICES):
        return [name for name, parameter in own.items() if parameter.dim() > 1]
    # A known class of experts may have one; of others a first dimension of 1 is that of position embeddings.
    least = 1 if seam_of(module) is not None else 2
    stacked = [name for name, p in own.items() if p.dim() == 3 and p.shape[0] >= least]
    if stacked or any(word in type(module).__name__.lower() for word in NOT_MULTIPLIED):
        return stacked
    return [name for name, parameter in own.items() if name == "weight" and parameter.dim() == 2]


def _described(
    model: torch.nn.Module,
    fqn: str,
    module: torch.nn.Module,
    weights: list[torch.Tensor],
    counted: "Count | None",
) -> OtherWeights:
    shapes = tuple(tuple(weight.shape) for weight in weights)
    parameters = sum(math.prod(shape) for shape in shapes)
    name, reason, in_float8 = type(module).__name__, "", 0.0
    multiplications, detail = float(parameters), f"{name}: not an nn.Linear"
    if isinstance(module, CONVOLUTIONS) and counted is None:
        detail = f"{detail}; its FLOPs depend on its input and are not counted"
        return OtherWeights(fqn or ROOT, shapes, parameters, None, detail)
    computes = torch.nn.utils.parametrize.ParametrizationList
    if len(shapes[0]) == 3 and not isinstance(module, (*CONVOLUTIONS, *MATRICES, computes)):
        experts = shapes[0][0]
        share = active_share(model, fqn, experts)
        used = f"{round(share * experts)} of {experts} used by a token" if share else f"all {experts} counted"
        used = used if counted is None else ""
        # One multiplication per element and token, of the experts that a token is sent to.
        multiplications *= share or 1.0
        if is_converted(module):
            in_float8, state = multiplications, vars(module)["_f8sub"]
            detail = "; ".join(filter(None, (f"{name}: {state.how(module)}", used)))
        else:
            reason = getattr(module, SKIP_REASON, "")
            if seam_of(module) is None:
                reason = NOT_REGISTERED
            stay = f"{name}: weights of 3 dimensions stay in high precision, and are all-gathered in high precision"
            detail = "; ".join(filter(None, (stay, used, reason)))
    if counted is not None:
        own, elsewhere = counted.of_module(fqn)
        multiplications, in_float8 = own + elsewhere, own if is_converted(module) else 0.0
        if not multiplications:
            detail += "; no product with it was counted"
    return OtherWeights(
        fqn or ROOT, shapes, parameters, multiplications, detail, is_converted(module), reason, in_float8
    )
