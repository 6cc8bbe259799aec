"""What the documentation shows is true: commands exist and run, snippets run, links and figures are right."""

import ast
import importlib
import importlib.util
import inspect
import json
import re

import pytest
import typer
from typer.testing import CliRunner

from draftproof import Engine, SamplingParams
from draftproof.cli import app
from draftproof.cli._chat_commands import COMMANDS as CHAT_COMMANDS
from draftproof.engine.drafter_parts import DRAFTERS
from draftproof.engine.stopper_parts import STOPPERS
from draftproof.engine.verifier_parts import VERIFIERS
from draftproof.native.build import LEVELS
from support.docs_pages import (
    DOCS,
    NOT_RUN,
    PAGES,
    README,
    ROOT,
    Block,
    blocks,
    calls,
    commands,
    every_command,
    indented,
    name_of,
    options_of,
    parse,
    run,
    spans,
    text_of,
)
from support.each import for_each

SHELL = ("sh", "console")
# Options of other programs that pages name.
OTHERS = {
    "--strict",
    "--speculative-config",
    "--additional-config",
    "--guidellm",
    "--lengths",
    "--serve",
    "--shape",
    "--files",
    "--dry-run",
    "--minutes",
    "--turns",
    "--resolution",
    "--cpus",
    "--cpunodebind",
    "--membind",
    "--interleave",
}  # of vLLM, mkdocs, our scripts, uv, docker and numactl
COMMANDS = every_command()
EVERY_OPTION = options_of(*COMMANDS.values()) | {"--help"}
NAMES = {
    "drafter": {name.partition(":")[0] for name in DRAFTERS},
    "stopper": set(STOPPERS),
    "verifier": set(VERIFIERS),
}

by_page = for_each(PAGES, name_of)


def is_run(page):
    return page == README or page.relative_to(DOCS).parts[0] not in NOT_RUN


def check(block, command):
    """A command line that the real commands can parse, with names of parts that exist."""
    for arguments in calls(command):
        try:
            found = parse(arguments).params
        except typer.Exit:  # --help and --version end there
            continue
        except typer.TyperException as error:
            pytest.fail(f"{block.where}: {command.text}\n{error.format_message()}")
        for part, known in NAMES.items():
            given = found.get(part) or []
            for name in [given] if isinstance(given, str) else given:
                assert name.partition(":")[0] in known, f"{block.where}: {part} {name}"


@by_page
def test_commands_parse(page):
    for block in [*blocks(page), *indented(page)]:
        if block.language in (*SHELL, ""):
            for command in commands(block):
                if re.match(r"\S*draftproof ", command.text) or block.language in SHELL:
                    check(block, command)


@by_page
def test_commands_inside_sentences_exist(page):
    for span in spans(page):
        if not span.startswith("draftproof "):
            continue
        words = span.split()[1:]
        path = ()
        while words and (*path, words[0]) in COMMANDS:
            path = (*path, words.pop(0))
        assert path or words[0] in ("...", "--version", "--help"), f"{name_of(page)}: {span}"
        below = [command for name, command in COMMANDS.items() if name[: len(path)] == path and "..." in words]
        known = options_of(COMMANDS[path], *below) | {"--help", "--version"}
        unknown = {word for word in words if re.fullmatch(r"--[a-z][\w-]*", word)} - known
        assert not unknown, f"{name_of(page)}: {span} has no {unknown}"


@by_page
def test_options_inside_sentences_exist(page):
    named = {found[0] for span in spans(page) for found in re.finditer(r"(?<![\w-])--[a-z][\w-]*", span)}
    if page.parent.name == "results" or "results" in page.parts:
        return  # commands of their day
    assert named <= EVERY_OPTION | OTHERS, f"{name_of(page)} names options that no command has"


def test_all_pages_are_looked_at_and_all_failures_reported():
    """Negative control of the tests of many pages in one case."""
    seen = []

    @for_each([1, 2, 3])
    def look(item):
        seen.append(item)
        assert item == 2, "not two"
        pytest.fail("by pytest")

    with pytest.raises(
        AssertionError, match=r"(?s)3 of 3 failed:\n1: AssertionError: not two.*\n2: Failed: by pytest\n3: "
    ):
        look()
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("wrong", ["generat x", "generate --no-such x", "generate --n x", "generate x --verifier best"])
def test_a_command_that_does_not_exist_is_noticed(wrong):
    block = Block(README, 0, "console", f"$ echo | draftproof {wrong} > out.txt\n")
    with pytest.raises((AssertionError, pytest.fail.Exception), match=r"README\.md:0: "):
        check(block, *commands(block))


def run_page(page, folder, *, slow):
    """Every block of a page in order, in one folder and one Python namespace; returns how many were run."""
    done, names = 0, {"__name__": "docs"}
    for block in blocks(page):
        if block.language not in ("python", *SHELL) or not block.runnable or (block.slow and not slow):
            continue
        if block.language == "python":
            exec(compile(block.text, block.where, "exec"), names)  # noqa: S102 - our own page
        else:
            asked = commands(block)
            for place, command in enumerate(asked):
                run(command, folder, code=block.exit_code if place + 1 == len(asked) else 0)
        done += 1
    return done


def pages_with(*, slow):
    found = {page: [block for block in blocks(page) if block.language in ("python", *SHELL)] for page in PAGES}
    return [page for page, parts in found.items() if is_run(page) and any(part.slow == slow for part in parts)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DRAFTPROOF_CHECKED", "1")  # as readers have it
    return tmp_path


@pytest.mark.parametrize("page", pages_with(slow=False), ids=name_of)
def test_what_is_shown_runs(page, folder):
    assert run_page(page, folder, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(slow=True), ids=name_of)
def test_what_is_shown_runs_where_it_takes_long(page, folder):
    if not any(block.slow and block.runnable for block in blocks(page)):
        pytest.skip("what it needs is not here")
    assert run_page(page, folder, slow=True)


@by_page
def test_python_that_is_not_run_uses_names_that_exist(page):
    for block in blocks(page):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("draftproof"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, each.name) for each in node.names), f"{block.where}: {ast.unparse(node)}"
            if isinstance(node, ast.Call):
                called = {"Engine.load": Engine.load, "SamplingParams": SamplingParams}.get(ast.unparse(node.func))
                known = inspect.signature(called).parameters if called else ()
                wrong = [each.arg for each in node.keywords if called and each.arg not in known]
                assert not wrong, f"{block.where}: {ast.unparse(node)} has no {wrong}"


def table_after(page, comment):
    """The first cells of the table below a comment."""
    rows = text_of(page).partition(f"<!-- {comment} -->")[2].split("\n\n")[1].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_the_fields_of_json_are_all_explained():
    asked = ["generate", "Once upon a time", "--max-tokens", "4", "--logprobs", "1", "--json", "--compare"]
    made = json.loads(CliRunner().invoke(app, [*asked, "--stopper", "fixed:2"]).stdout)
    page = DOCS / "guide" / "prompts.md"
    assert table_after(page, "fields of generate --json") == [
        *[name for name in made if name not in (*_LAST, "rounding")],
        *_LAST,
    ]
    assert table_after(page, "fields of stats") == list(made["stats"])


_LAST = ("logprobs", "compare")


def test_the_commands_of_a_conversation_are_all_explained():
    table = text_of(DOCS / "guide" / "chat.md").partition("<!-- commands of chat -->")[2].split("\n\n")[1]
    named = [name for row in table.splitlines() for name in re.findall(r"`/(\w+)", row.split("|")[1])]
    assert named == list(CHAT_COMMANDS)


def test_variables_that_are_named_are_read():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for page in PAGES:
        for name in set(re.findall(r"DRAFTPROOF_[A-Z_]+", text_of(page))):
            assert f'"{name}"' in sources, f"{name_of(page)} names {name}, which nothing reads"


def results_that_are_listed(index):
    """Pages and folders in the first column of the list of results."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", index, re.MULTILINE)
    return sorted(set(re.findall(r"[a-z]\w*(?:\.md|/)", " ".join(rows))))


def test_the_levels_of_processors_are_all_listed():
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    listed = page.split("| level |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)`", listed, re.MULTILINE) == [level.name for level in LEVELS]


def test_every_result_that_is_listed_exists_and_every_page_is_listed():
    folder = DOCS / "results"
    listed = results_that_are_listed(text_of(folder / "README.md"))
    there = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()}
    assert listed == sorted(name for name in there if name.endswith(("/", ".md")) and name != "README.md")
    assert results_that_are_listed("| gone.md, old/ | a | b | c |\n") == ["gone.md", "old/"]


def raw_figures(paths):
    """Those that are too large to lie there as they are, and those that lie there twice."""
    sizes = {path.name: path.stat().st_size for path in paths if path.suffix in {".json", ".gz"}}
    return [name for name, size in sizes.items() if name.endswith(".json") and (size > 30_000 or f"{name}.gz" in sizes)]


def test_raw_figures_are_compressed(tmp_path):
    """A search of the repository should not find a thousand lines of numbers."""
    assert not raw_figures((DOCS / "results").rglob("*"))
    for name, size in (("large.json", 30_001), ("twice.json", 1), ("twice.json.gz", 1), ("small.json", 30_000)):
        (tmp_path / name).write_bytes(b"1" * size)
    assert sorted(raw_figures(tmp_path.iterdir())) == ["large.json", "twice.json"]


# --- the front page -----------------------------------------------------------------------------------------------


def anchors(page):
    """Anchors as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


@for_each([README, ROOT / "CHANGELOG.md", ROOT / "THIRD_PARTY_NOTICES.md"], name_of)
def test_links_lead_somewhere(page):
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text_of(page)):
        goal = page.parent / file if file else page
        assert goal.exists(), f"{name_of(page)} links to {file}"
        assert not anchor or anchor in anchors(goal), f"{name_of(page)} links to {file}#{anchor}"


def test_the_front_page_is_one_screen():
    """60 lines and 600 words, of which few are figures: what was measured is on the pages of results."""
    prose = re.sub(r"```.*?```", "", text_of(README), flags=re.DOTALL)
    assert len(text_of(README).splitlines()) <= 60
    assert len(text_of(README).split()) <= 600
    assert len(re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.-])", prose)) <= 10


def test_the_front_page_begins_with_the_two_commands():
    first, second = [block for block in blocks(README) if block.language == "sh"][:2]
    assert "draftproof generate" in first.text
    assert second.text.strip().endswith("pytest -n auto")


def test_the_chart_on_the_front_page_shows_what_was_measured():
    spec = importlib.util.spec_from_file_location("speed_chart", ROOT / "scripts" / "speed_chart.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.CHART.read_text(encoding="utf-8") == made.chart(), "run python scripts/speed_chart.py"
    measured = text_of(ROOT / "docs" / "results" / "throughput.md")
    plain, drafts = (
        float(re.search(rf"^\| 1 \| 0 \| draftproof, {name} \| [\d.]+ \| ([\d.]+) \[", measured, re.MULTILINE)[1])
        for name in ("plain", "auto")
    )
    shown = dict(made.bars(made.KINDS["16-bit weights"], 0.0))
    assert shown[made.DRAFTS] == pytest.approx(drafts / plain, rel=0.05)
    assert shown["transformers"] == pytest.approx(
        1 / plain, rel=0.1
    )  # one is a mean of ratios, the other a geometric one
