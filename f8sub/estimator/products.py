"""The products of a model: their shapes, which siblings share an x, their blocks, and those of experts."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from f8sub.convert.other_weights import active_share
from f8sub.experts.seams import EXPERTS, seam_of

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

HEAD_SIZE = 128
"""Features of an attention head where a module does not tell: those of Llama 3, whose attention was timed."""


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

    @property
    def module(self) -> str:
        """The name of the module that has the weight."""
        return self.fqn.rpartition(".")[0] if self.experts else self.fqn

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
    """

    products: tuple[Product, ...]
    other_parameters: int
    logits: int
    not_counted: tuple[str, ...]
    experts: bool | str | None = None
    undecided: bool = False
    other_frozen: int = 0

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
        return f", tokens={tokens:.0f}" if self.experts == EXPERTS else f", experts={self.experts!r}"

    @property
    def outside(self) -> list[Product]:
        """The products outside of numbered blocks."""
        return [product for product in self.products if product.block is None]

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.other_parameters + sum(product.elements for product in self.products)


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


def expert_products(model: torch.nn.Module, fqn: str, reason: str | None) -> list[Product]:
    """Return the weights of a module of experts whose seam is known, in the order of its parameters.

    Args:
        model: the model.
        fqn: the module's name in it.
        reason: why it is not converted; None where it is.
    """
    module = model.get_submodule(fqn)
    seam = seam_of(module)
    found: list[Product] = []
    first: dict[tuple[str, ...], str] = {}
    for name, transposed in {} if seam is None else seam.weights_of(module).items():
        weight = module._parameters.get(name)
        if weight is None or weight.dim() != 3:
            continue
        experts, rows, cols = weight.shape
        # stored as [E, K, N]
        if transposed:
            rows, cols = cols, rows
        full = f"{fqn}.{name}" if fqn else name
        short = name.partition("_E")[0]  # torchtitan's w1_EFD
        reads = first.setdefault(GROUPS.get(short, (name,)), full)
        # Matrices per token: top_k if the model says so, else all of them.
        uses = experts * (active_share(model, fqn, experts) or 1.0)
        sizes = rows, cols, uses, weight.numel()
        places = reason, reads, False, block_of(full)
        frozen = are_frozen(model, [weight])
        found.append(Product(full, *sizes, *places, experts=experts, transposed=transposed, frozen=frozen))
    return found


def are_frozen(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether these parameters take no gradient while others of the model do."""
    # If all parameters are frozen, none counts as frozen: adapters may be added later.
    return not any(p.requires_grad for p in parameters) and any(p.requires_grad for p in model.parameters())
