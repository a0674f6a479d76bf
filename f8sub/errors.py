"""Layer 0. What can go wrong, by kind. Each message says what was asked, what was found, and what to do."""


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
