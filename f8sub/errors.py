"""The errors of f8sub, by kind, and its warning. Each message says what was asked, what was found, and what to do."""

import difflib
import dis
import sys
from collections.abc import Iterable, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch

MOST_SHOWN = 4
"""Elements of a container that an error shows."""

MOST_NEAREST = 3
"""Names like an unknown one that an error tells."""


class Float8ConfigError(ValueError):
    """A recipe, format, filter or option that cannot be used as asked."""


class Float8ShapeError(ValueError):
    """A tensor whose shape a float8 operand or GEMM cannot take."""


class Float8RankMismatchError(RuntimeError):
    """Ranks of one job that were converted, configured or changed differently."""


class Float8NumericsError(RuntimeError):
    """NaN or infinity in a master weight."""


class Float8Warning(UserWarning):
    """Works, but not as the caller probably meant."""


def nearest(name: str, known: Iterable[str], most: int = MOST_NEAREST) -> list[str]:
    """The known names that look like one that there is not, whatever its case and its hyphens; the nearest first."""
    spelled = {_plain(each): each for each in known}
    found = difflib.get_close_matches(_plain(name), list(spelled), most)
    return [spelled[each] for each in found]


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


def unknown(what: str, name: object, known: Iterable[str], also: str = "") -> Float8ConfigError:
    """The error of a name that there is not.

    Args:
        what: it is a name of.
        name: that was given.
        known: names that there are.
        also: what else could be given, for the end of the message.
    """
    names = list(known)
    near = ", ".join(nearest(str(name), names))
    told = f" (nearest: {near})" if near else ""
    return Float8ConfigError(f"unknown {what} {name!r}{told}; choose one of {', '.join(names)}{also}")


def no_attribute(
    module: str, name: str, known: Iterable[str], meant: str | None = None
) -> AttributeError | ImportError:
    """Return the error for an attribute that a module lacks; for ``from module import name`` an ImportError.

    Python turns an AttributeError of the latter into an ImportError without its text.

    Args:
        module: its name.
        name: that was asked for.
        known: the module's own names.
        meant: what stands for a name of another library; None for the nearest names.
    """
    near = ", ".join(nearest(name, known))
    told = f"; there is {meant}" if meant else f" (nearest: {near})" if near else ""
    if _is_import():
        return ImportError(f"cannot import name {name!r} from {module!r}{told}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}{told}", name=name)


def _is_import() -> bool:
    """Return whether the code that asks f8sub for a name is at the ``import name`` of a ``from f8sub import name``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "f8sub":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]


def shown(value: object) -> str:
    """A plain value itself, the first elements of a plain container; of any other its class and package."""
    if isinstance(value, str | int | float | bool | type(None) | torch.dtype):
        return repr(value)
    kind: Any = type(value)
    if kind in (list, tuple, set, dict) and value:
        items: Any = value
        of_dict = items.items() if isinstance(value, dict) else ()
        each = [f"{shown(key)}: {shown(item)}" for key, item in of_dict] or [shown(item) for item in items]
        first = ", ".join(each[:MOST_SHOWN]) + (", ..." if len(each) > MOST_SHOWN else "")
        if isinstance(value, tuple) and len(each) == 1:
            first += ","
        left, right = {list: ("[", "]"), tuple: ("(", ")")}.get(kind, ("{", "}"))
        return f"{left}{first}{right}"
    if kind in (list, tuple, set, dict):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    name, package = type(value).__name__, type(value).__module__.partition(".")[0]
    # Letters of an abbreviation are spoken by their names: an SGD.
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOaeio"
    return f"{'an' if name[0] in vowels else 'a'} {name}{'' if package == 'builtins' else f' of {package}'}"


def first_and_more(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are: "a", "a and 2 more"."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def refuse_other_than_a_module(call: str, model: object) -> None:
    """Raise Float8ConfigError where a function of that name was given something else than a model."""
    if not isinstance(model, torch.nn.Module):
        raise Float8ConfigError(f"{call} takes a model, a torch.nn.Module; got {shown(model)}")


def refuse_other_than_an_optimizer(call: str, optimizer: object) -> None:
    """Raise Float8ConfigError where a function of that name was given something else than an optimizer."""
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise Float8ConfigError(f"{call} takes an optimizer; got {shown(optimizer)}")


def jit_error(fqn: str, how: str) -> Float8ConfigError:
    """The error of a layer that torch.jit is asked to take; ``how`` is "traced" or "scripted"."""
    return Float8ConfigError(
        f"{fqn}: a float8 layer cannot be {how} by torch.jit, which would record the scales of one input as constants; "
        "export the model with torch.export.export(model.eval(), ...), or call f8sub.convert_from_float8(model) first"
    )
