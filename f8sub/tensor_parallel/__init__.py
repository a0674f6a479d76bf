"""Styles for ``parallelize_module`` with which a sequence-parallel input crosses the wire as float8."""

from typing import TYPE_CHECKING, Any

from f8sub.errors import no_attribute

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]

if TYPE_CHECKING:
    from f8sub.tensor_parallel.styles import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )
else:

    def __getattr__(name: str) -> Any:
        # torch's styles, which these are, take half a second to import.
        if name not in __all__:
            raise no_attribute(__name__, name, __all__)
        from f8sub.tensor_parallel import styles

        return getattr(styles, name)
