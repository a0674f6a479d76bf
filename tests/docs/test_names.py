"""Names of f8sub that the pages use are there."""

import importlib
import re

import pytest

import f8sub
from tests.docs.pages import PAGES, ROOT

NAME = re.compile(r"(?<![\w/.-])f8sub((?:\.[A-Za-z_]\w*)+)")
FILES = re.compile(r"\.(json|svg|md)$")


def is_there(name: str) -> bool:
    """Whether ``.titan.float8`` is a module of f8sub, or a name in one."""
    found = f8sub
    for i, part in enumerate(parts := name.split(".")[1:]):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(("f8sub", *parts[: i + 1])))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_are_there(page):
    names = {name for name in NAME.findall(page.read_text()) if not FILES.search(name)}
    assert not [f"f8sub{name}" for name in sorted(names) if not is_there(name)]
