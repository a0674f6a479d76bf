"""What the kernels compile to for sm_90a: neither spills nor narrow accesses."""

import pytest

from tests.kernels.interpreted import needs_triton


@needs_triton
@pytest.mark.long
def test_every_kernel():
    from tests.kernels.compiled import compiler, gradients

    found = compiler.of_all(gradients.report, gradients.cases())
    assert len(found) == 2 * 3 * 2 * 2
    assert [row for row in found if row["missed"]] == []
