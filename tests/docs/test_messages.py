"""docs/troubleshooting.md has an entry for each error and warning of f8sub, by the words that it always begins with."""

from tests.docs.messages import messages
from tests.docs.pages import ROOT

PAGE = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().replace("`", "").split())


def test_every_error_and_warning_has_an_entry():
    assert not [f"{each.where}: {each.opening}" for each in messages() if each.opening not in PAGE]


def test_messages_are_found():
    """The walk sees what is raised, what is warned, and what functions make; with and without names in front."""
    found = {each.opening for each in messages()}
    assert {"is already sharded", "a GEMM takes both operands", "ranks were converted differently"} <= found
    assert "precompute_scales(model) was not called after" in found
    assert "no native float8 GEMM on" in found
    assert len(found) > 120
