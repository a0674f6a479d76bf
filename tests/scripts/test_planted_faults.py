"""The list of planted faults fits the library as it is: each fault's line is there, and so are its tests."""

import pytest

from scripts import planted_faults
from scripts.table import ROOT

FAULTS = {fault.name: fault for fault in planted_faults.faults()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_planted(name):
    fault = FAULTS[name]
    source = (ROOT / fault.file).read_text()
    assert fault.planted(source) != source
    files = [argument.partition("::")[0] for argument in fault.tests if argument.startswith("tests/")]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
