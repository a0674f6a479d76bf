"""The table of faults and the list of planted ones name tests that are there, and each can be planted."""

import re

import pytest

from scripts import planted_faults
from scripts.table import ROOT
from scripts.tables.faults import FAULTS

PLANTED = {fault.name: fault for fault in planted_faults.faults()}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_tests_that_exist(fault):
    _, tests = FAULTS[fault]
    assert tests
    for test in tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_can_be_planted(name):
    fault = PLANTED[name]
    source = (ROOT / fault.file).read_text()
    assert fault.planted(source) != source
    files = [argument.partition("::")[0] for argument in fault.tests if argument.startswith("tests/")]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
