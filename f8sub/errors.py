"""The errors of f8sub, by kind, and its warning. Each message says what was asked, what was found, and what to do."""

import difflib
from collections.abc import Iterable

import torch

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


def no_attribute(module: str, name: str, known: Iterable[str], meant: str | None = None) -> AttributeError:
    """Return the error for an attribute that a module lacks.

    Args:
        module: its name.
        name: that was asked for.
        known: the module's own names.
        meant: what stands for a name of another library; None for the nearest names.
    """
    near = ", ".join(nearest(name, known))
    told = f"; there is {meant}" if meant else f" (nearest: {near})" if near else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{told}", name=name)


def shown(value: object) -> str:
    """A plain value itself; of any other its class, and the package that this is of."""
    if isinstance(value, str | int | float | bool | type(None)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    # Letters of an abbreviation are spoken by their names: an SGD.
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOaeio"
    return f"{'an' if name[0] in vowels else 'a'} {name} of {type(value).__module__.partition('.')[0]}"


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
