"""The pages about the rules are complete, tell lossless from lossy, and their snippets run."""

import re
from pathlib import Path

import pytest

from draftproof.engine.registry import LOSSY, VERIFIERS

PAGES = Path(__file__).parent.parent / "docs" / "rules"
INDEX = PAGES / "README.md"
RULES = sorted(path for path in PAGES.glob("*.md") if path != INDEX)
SECTIONS = [
    "What it does",
    "Equations",
    "Law",
    "Cost",
    "When to use it, and when not",
    "Traps",
    "How to call it",
    "Source",
]
ROW = re.compile(r"^\| \[(\w+)\]\((\w+)\.md\) \| [^|]+ \| (lossless|lossy) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")

by_name = pytest.mark.parametrize("page", RULES, ids=lambda page: page.stem)


def text(page):
    return page.read_text(encoding="utf-8")


def anchors(page):
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)
    }


def test_every_rule_has_a_page():
    assert set(VERIFIERS) <= {page.stem for page in RULES}


def test_the_index_lists_every_page_and_marks_exactly_the_lossy_rules():
    rows = ROW.findall(text(INDEX))
    assert all(name == file for name, file, _ in rows)
    assert sorted(name for name, _, _ in rows) == [page.stem for page in RULES]
    assert {name for name, _, mark in rows if mark == "lossy"} == set(LOSSY)


@by_name
def test_a_page_opens_with_what_it_loses(page):
    found = re.match(r"# (\w+): .+\n\n\*\*(Lossless|Lossy)\*?", text(page).replace(".**", "**"))
    assert found, "a page opens with its name, and with Lossless or Lossy in bold"
    assert found.group(1) == page.stem
    assert (found.group(2) == "Lossy") == (page.stem in LOSSY)


@by_name
def test_pages_have_one_order(page):
    assert re.findall(r"^## (.+)$", text(page), re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("name", VERIFIERS)
def test_pages_say_how_the_engine_calls_the_rule(name):
    assert f"--verifier {name}" in text(PAGES / f"{name}.md")


@pytest.mark.parametrize("page", [INDEX, *RULES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for file, anchor in LINK.findall(text(page)):
        goal = PAGES / file if file else page
        assert goal.is_file(), f"{page.name} links to {file}"
        assert not anchor or anchor in anchors(goal), f"{page.name} links to {file}#{anchor}"


@by_name
def test_snippets_run(page):
    snippets = SNIPPET.findall(text(page))
    assert snippets, f"{page.name} shows no Python"
    if page.stem == "otm":
        pytest.importorskip("scipy")
    for snippet in snippets:
        exec(compile(snippet, page.name, "exec"), {})  # noqa: S102 - our own page
