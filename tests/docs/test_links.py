"""Links, anchors, paths and names of f8sub on the pages lead to something that is there."""

import importlib
import re

import pytest

import f8sub
from tests.docs.pages import PAGES, ROOT, anchors, links, paths

MARKER = re.compile(r"^<!-- (begin|end) (\w+) -->$", re.MULTILINE)
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_links_lead_to_files_and_headings_that_are_there(page):
    wrong = []
    for link in links(page):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


@by_page
def test_paths_that_are_named_are_there(page):
    assert not [path for path in sorted(paths(page)) if not any(ROOT.glob(path))]


@by_page
def test_a_table_that_a_script_writes_stands_between_two_markers(page):
    found = MARKER.findall(page.read_text())
    names = dict.fromkeys(name for _, name in found)
    assert found == [(end, name) for name in names for end in ("begin", "end")]


def test_every_page_is_reached_from_the_readme():
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        seen.add(page)
        targets = {
            (page.parent / link.partition("#")[0]).resolve() for link in links(page) if ":" not in link
        }
        left += [target for target in targets - seen if target.suffix == ".md" and target.exists()]
    assert set(PAGES) - seen == set()


COMMAND = re.compile(
    r"(?:python|nproc-per-node \S+|^) ?((?:scripts|recipes|tests)/[\w/]+\.py)((?: [^`\n|]*)?)", re.MULTILINE
)


def takes(source: str, option: str) -> bool:
    """Whether a script says an option by its name, or has tyro make it of a parameter or a field."""
    parameter = rf"\b{option.strip('-').replace('-', '_')}: "
    return option in source or ("tyro.cli(" in source and re.search(parameter, source) is not None)


@by_page
def test_options_of_commands_are_there(page):
    """Those of the repository's scripts; a name with a dot is torchtitan's or a setting of recipes/pretrain.py."""
    shared = "".join((ROOT / "scripts" / name).read_text() for name in ("table.py", "bench/titan.py"))
    wrong = []
    for script, rest in COMMAND.findall(page.read_text()):
        source = (ROOT / script).read_text() + shared
        options = re.findall(r"--[\w-]+\b(?!\.)", rest)
        wrong += [f"{script} {option}" for option in options if not takes(source, option)]
    assert not wrong


NAME = re.compile(r"(?<![\w/.-])f8sub((?:\.[A-Za-z_]\w*)+)")
FILES = re.compile(r"\.(json|svg|md)$")


def is_there(name: str) -> bool:
    """Whether ``.titan.float8`` is a module of f8sub, or a name in one."""
    found = f8sub
    for i, part in enumerate(parts := name.split(".")[1:]):
        try:
            if not hasattr(found, part):
                importlib.import_module(".".join(("f8sub", *parts[: i + 1])))
        except ImportError as error:
            return error.name == "axolotl"  # installed by scripts/test_versions.sh axolotl alone
        except f8sub.Float8ConfigError:  # for another torchtitan than the installed one
            return True
        found = getattr(found, part)
    return True


@by_page
def test_names_are_there(page):
    names = {name for name in NAME.findall(page.read_text()) if not FILES.search(name)}
    names -= {f".{recipe}" for recipe in f8sub.recipe_names()}  # runs of scripts/bench/graphed.py
    assert not [f"f8sub{name}" for name in sorted(names) if not is_there(name)]
