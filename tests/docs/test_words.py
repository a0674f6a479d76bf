"""The pages are in plain English and short: words and phrases to avoid, and limits that may only be lowered."""

import re

import pytest

from tests.docs.pages import FENCE, PAGES, ROOT
from tests.docs.test_messages import PACKAGE, _texts, literals

UNITS = "GPU|element|tensor|row|block|step|token|host|layer|parameter|weight|second|expert|rank|node|launch|replica"
QUANTITIES = (
    "bytes?|tokens(?:/s)?|scales?|GiB|GB|MB|kB|ms|us|all-reduces?|all-gathers?|sequences?|launches|parts?|one"
)
INSTEAD = {
    rf"\b(?:{QUANTITIES}) an? (?:{UNITS})\b": "per GPU, per element",
    r"\btold\b": "reported, identified",
    r"\btells?\b": "shows, reports, names",
    r"\bmade\b(?!-| up)": "created, computed, built",
    r"\bkept\b": "stored, saved, unchanged",
    r"\balike\b": "the same",
    r"\blikewise\b": "the same",
    r"\banew\b": "again",
    r"\bmend(?:s|ed)?\b": "fix",
    r"\bstands? in\b": "is in",
    r"\bas it stands\b": "unchanged",
    r"\bbesides\b": "other than",
    r"\bthere are not\b": "do not exist",
    r"\bgoes? together with\b": "combines with",
    r"\bleaves nobody waiting\b": "cannot cause a hang",
    r"\bto be had\b": "available",
    r"\bcomes? with torch\b": "ships with",
}
"""A pattern in dialect, and what a native speaker writes."""

API = ROOT / "docs" / "api.md"
READERS = [
    page for page in PAGES if page.name != "CHANGELOG.md" and page != API and "recipes" not in page.parts
]
by_page = pytest.mark.parametrize("page", READERS, ids=lambda page: str(page.relative_to(ROOT)))

MOST_LINES_OF_README, MOST_WORDS_OF_README = 180, 1400
MOST_WORDS_OF_DOCS = 30_000
"""Of README and docs/ without docs/measurements and the generated docs/api.md, borders of tables not counted."""
MOST_WORDS_OF_A_PAGE = 1_600
LONGER = {"troubleshooting.md": 7_000, "architecture.md": 2_250}
"""An entry for each error and warning; tables that a script writes."""
MOST_IN_MESSAGES, MOST_IN_API = 0, 0


def prose(text: str) -> str:
    """A text without code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def found_in(text: str) -> list[str]:
    """Each phrase to avoid, with what stands around it."""
    return [
        f"{text[max(0, match.start() - 30) : match.end() + 30]!r}: {better}"
        for pattern, better in INSTEAD.items()
        for match in re.finditer(pattern, text)
    ]


@by_page
def test_a_page_is_in_plain_english(page):
    assert not found_in(prose(page.read_text()))


def test_docstrings_on_the_api_page_are_in_plain_english():
    assert len(found_in(prose(API.read_text()))) <= MOST_IN_API


def test_messages_are_in_plain_english():
    """Errors and warnings of the library."""
    texts = [" ".join(literals(text)) for path in sorted(PACKAGE.rglob("*.py")) for text in _texts(path)]
    found = [each for text in texts for each in found_in(text)]
    assert len(found) <= MOST_IN_MESSAGES, "\n".join(found)


def test_the_list_finds_what_it_is_for():
    assert len(found_in("8192 tokens a GPU, kept with 1 byte an element")) == 3
    assert not found_in("8192 tokens per GPU, in a GPU's memory, one per element")


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_LINES_OF_README
    assert len(text.split()) <= MOST_WORDS_OF_README


def test_the_documentation_is_short():
    docs = ROOT / "docs"
    pages = [page for page in docs.rglob("*.md") if page != API and docs / "measurements" not in page.parents]
    pages.append(ROOT / "README.md")
    words = {page: sum(bool(re.search(r"\w", word)) for word in page.read_text().split()) for page in pages}
    assert sum(words.values()) <= MOST_WORDS_OF_DOCS
    assert not {page for page, count in words.items() if count > LONGER.get(page.name, MOST_WORDS_OF_A_PAGE)}
