"""The table of faults names tests that are there."""

import re

import pytest

from scripts.table import ROOT
from scripts.tables.faults import FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_tests_that_exist(fault):
    _, tests = FAULTS[fault]
    assert tests
    for test in tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test
