"""Converted layers whose weights the code of other modules reads: a fused kernel multiplies by them itself.

Mamba's layers in transformers do so on a GPU alone, where such a kernel is installed, so a count on meta or on a CPU
does not see it.
"""

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Container, Iterator
from typing import Any

import torch

from f8sub.convert.filters import kinds
from f8sub.linear.float8_linear import Float8Linear

READ = re.compile(
    r"(?<!isinstance\()self\.(\w+)\.weight\b"
    r"(?!\s*(?:=[^=]|\.(?:data|device|dtype|shape|size|ndim|dim|numel|element_size|requires_grad|is_\w+)\b))"
)
"""A weight that is read, not one of its properties, its class or its place."""

NOT_IN_FORWARD = re.compile(r"init|reset|load|save|tie|resize|from_pretrained|repr")
"""Names of methods that no forward calls."""


def read_in_code(model: torch.nn.Module, known: Container[str]) -> Iterator[str]:
    """A sentence for each method of the model's modules that reads weights of converted layers, for a report.

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
    """Methods of a class and the children whose weights they read; none where the source is not there."""
    found: dict[tuple[str, str], None] = {}
    if cls.__module__.startswith("torch."):
        return ()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, member in vars(base).items():
            if not inspect.isfunction(member) or NOT_IN_FORWARD.search(name):
                continue
            try:
                source = inspect.getsource(member)
            except (OSError, TypeError):
                continue
            found.update(dict.fromkeys((name, child) for child in READ.findall(source)))
    return tuple(found)
