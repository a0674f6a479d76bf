"""Kernels run interpreted, in one process for all test modules."""

from tests.kernels.interpreted import interpreter  # noqa: F401
