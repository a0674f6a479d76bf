"""What the kernels compile to for sm_90a, by the script that prints it: neither spills nor narrow accesses."""

import pytest

from tests.kernels.interpreted import needs_triton
from tests.kernels.test_compiled import reported


@needs_triton
@pytest.mark.long
def test_every_kernel(tmp_path):
    found = reported(tmp_path, "gradients.py")
    assert len(found) == 2 * 3 * 2 * 2
    for row in found:
        assert row["missed"] == []
        assert row["spilled"] == row["flushes"] == 0
