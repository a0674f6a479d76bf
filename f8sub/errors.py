"""What can go wrong, by kind. Each message says what was asked, what was found, and what to do."""


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


def jit_error(fqn: str, how: str) -> Float8ConfigError:
    """The error of a layer that torch.jit is asked to take; ``how`` is "traced" or "scripted"."""
    return Float8ConfigError(
        f"{fqn}: a float8 layer cannot be {how} by torch.jit, which would record the scales of one input as constants; "
        "export the model with torch.export.export(model.eval(), ...), or call f8sub.convert_from_float8(model) first"
    )
