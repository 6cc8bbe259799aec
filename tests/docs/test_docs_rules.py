"""The pages about the rules are complete and say which rules are lossy, and their code runs."""

import re
from pathlib import Path

import pytest

from draftproof.engine.verifier_parts import LOSSY, VERIFIERS
from support.each import for_each

PAGES = Path(__file__).parents[2] / "docs" / "rules"
INDEX = PAGES / "README.md"
RULES = sorted(path for path in PAGES.glob("*.md") if path != INDEX)
SECTIONS = [
    "What it does",
    "Equations",
    "Output distribution",
    "Cost",
    "When to use it",
    "Common mistakes",
    "How to call it",
    "Source",
]
ROW = re.compile(r"^\| \[(\w+)\]\((\w+)\.md\) \| [^|]+ \| (lossless|lossy) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")

by_name = for_each(RULES, lambda page: page.stem)


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
def test_a_page_begins_with_lossless_or_lossy_the_drafts_and_the_name(page):
    found = re.match(r"# (\w+): .+\n\n\*\*(Lossless|Lossy)\.?\*\*", text(page))
    assert found, "a page begins with its name, and with Lossless or Lossy in bold"
    assert " Drafts: " in text(page).partition("## ")[0]
    assert found.group(1) == page.stem
    assert (found.group(2) == "Lossy") == (page.stem in LOSSY)


@by_name
def test_pages_have_the_same_sections(page):
    assert re.findall(r"^## (.+)$", text(page), re.MULTILINE) == SECTIONS


@for_each(VERIFIERS)
def test_pages_say_how_the_engine_calls_the_rule(name):
    assert f"--verifier {name}" in text(PAGES / f"{name}.md")


@for_each([INDEX, *RULES], lambda page: page.stem)
def test_links_have_a_target(page):
    for file, anchor in LINK.findall(text(page)):
        goal = PAGES / file if file else page
        assert goal.is_file(), f"{page.name} links to {file}"
        assert not anchor or anchor in anchors(goal), f"{page.name} links to {file}#{anchor}"


@pytest.mark.parametrize("page", RULES, ids=lambda page: page.stem)
def test_snippets_run(page):
    snippets = SNIPPET.findall(text(page))
    assert snippets, f"{page.name} shows no Python"
    if page.stem == "otm":
        pytest.importorskip("scipy")
    for snippet in snippets:
        exec(compile(snippet, page.name, "exec"), {})  # noqa: S102 - our own page
