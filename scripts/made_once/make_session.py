"""Make the editing session that `scripts/replay_session.py` sends: an agent mends and renames in a small repository.

    python scripts/made_once/make_session.py scripts/data/session.jsonl

The repository and the agent's turns are written here. Tools are carried out in a temporary folder, so results are what
an agent would see; times and paths of the folder are left out of them. A line of the file holds what one request adds:
messages, the number of tokens that its answer may have, and the answer. The first line has the tools besides.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENTRIES = '''"""Entries of a household's account book, one a line: date; category; value in cents; remark."""

from dataclasses import dataclass
from datetime import date


class EntryError(ValueError):
    """A line that is no entry; the text says which and why."""


@dataclass(frozen=True)
class Entry:
    """One payment.

    Attributes:
        day: when it was made.
        category: what for, in lower case.
        value: in cents; negative for what was paid back.
        remark: any text, which may be empty.
    """

    day: date
    category: str
    value: int
    remark: str = ""


def parse_line(line: str, number: int) -> Entry:
    """Read a line such as `2026-03-01; food; 1250; bakery`."""
    parts = [part.strip() for part in line.split(";")]
    if len(parts) not in (3, 4):
        raise EntryError(f"line {number}: expected 3 or 4 parts, got {len(parts)}")
    try:
        day = date.fromisoformat(parts[0])
        value = int(parts[2])
    except ValueError as error:
        raise EntryError(f"line {number}: {error}") from error
    remark = parts[3] if len(parts) == 4 else ""
    return Entry(day=day, category=parts[1].lower(), value=value, remark=remark)


def read_entries(text: str) -> list[Entry]:
    """Read a whole book; empty lines and lines that begin with # are left out."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            entries.append(parse_line(line, number))
    return entries
'''

REPORT = '''"""Reports on the entries of an account book."""

from collections import defaultdict

from book.entries import Entry


def totals(entries: list[Entry]) -> dict[str, int]:
    """The sum of each category in cents, the largest first."""
    sums: dict[str, int] = defaultdict(int)
    for index in range(len(entries) - 1):
        entry = entries[index]
        sums[entry.category] += entry.value
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def by_month(entries: list[Entry]) -> dict[str, int]:
    """The sum of each month in cents, the earliest first."""
    sums: dict[str, int] = defaultdict(int)
    for entry in entries:
        sums[entry.day.strftime("%Y-%m")] += entry.value
    return dict(sorted(sums.items()))


def share(entries: list[Entry], category: str) -> float:
    """The part of all payments that a category has, between 0 and 1."""
    whole = sum(entry.value for entry in entries)
    part = sum(entry.value for entry in entries if entry.category == category)
    return part / whole


def as_euros(value: int) -> str:
    """Cents as a number with two digits after the point."""
    sign = "-" if value < 0 else ""
    return f"{sign}{abs(value) // 100}.{abs(value) % 100:02d}"


def table(entries: list[Entry]) -> str:
    """A table of all categories with their sums and shares."""
    sums = totals(entries)
    width = max((len(category) for category in sums), default=0)
    lines = []
    for category, value in sums.items():
        percent = round(100 * share(entries, category))
        lines.append(f"{category:<{width}}  {as_euros(value):>9}  {percent:>3} %")
    return "\\n".join(lines)
'''

TESTS = '''from datetime import date

import pytest

from book.entries import Entry, EntryError, read_entries
from book.report import as_euros, by_month, share, table, totals

BOOK = """# March
2026-03-01; Food; 1250; bakery
2026-03-02; rent; 61000
2026-03-09; food; 2350; market

2026-04-01; rent; 61000
2026-04-03; books; 1799; "A long walk"
"""


def test_lines_are_read():
    entries = read_entries(BOOK)
    assert len(entries) == 5
    assert entries[0] == Entry(day=date(2026, 3, 1), category="food", value=1250, remark="bakery")
    assert entries[1].remark == ""


def test_a_wrong_line_is_named():
    with pytest.raises(EntryError, match="line 2"):
        read_entries("2026-03-01; food; 1\\n2026-03-01; food")


def test_totals_of_categories():
    assert totals(read_entries(BOOK)) == {"rent": 122000, "food": 3600, "books": 1799}


def test_totals_of_months():
    assert by_month(read_entries(BOOK)) == {"2026-03": 64600, "2026-04": 62799}


def test_shares():
    entries = [Entry(date(2026, 1, 1), "food", value=25), Entry(date(2026, 1, 2), "rent", value=75)]
    assert share(entries, "food") == 0.25
    assert share([], "food") == 0.0


@pytest.mark.parametrize(("value", "text"), [(5, "0.05"), (-1250, "-12.50"), (100, "1.00")])
def test_euros(value, text):
    assert as_euros(value) == text


def test_a_table():
    assert table(read_entries(BOOK)).splitlines()[1] == "food       36.00    3 %"
'''

NAME = "test_book.py"
TEST_FILE = f"tests/{NAME}"  # of that repository, not of this one

SYSTEM = """You are a careful coding assistant. You work in a repository on the user's computer, and you change it only
with the tools that you are given.

How you work:
- Look before you change anything: list the files, read those that matter, and run the tests to see what fails.
- Make the smallest change that does what the user asks. Keep the style of the code around it: names, quotes, line
  lengths, docstrings.
- Write a file as a whole with write_file when several places of it change; the content is the complete new file, not a
  part of it. Use replace_text when one place changes; the old text must stand in the file exactly once.
- Run the tests after each change. If they fail, read the message, find the cause, and mend it; never change a test so
  that a fault is hidden.
- Do not add files, dependencies, comments or features that were not asked for.
- Paths are relative to the repository's folder and use forward slashes.

How you answer:
- Say in one short sentence what you do next, then call the tool. You may call several tools at once if none of them
  needs the result of another.
- When the work is done, say in a few sentences what was wrong, what you changed, and how you know that it works.
- If something cannot be done, say so and say why. Do not invent the content of files or the output of commands.

The repository is a Python package. It is tested with pytest and formatted with lines of up to 100 characters."""


def _tool(
    name: str, description: str, required: dict[str, str], optional: dict[str, Any] | None = None
) -> dict[str, Any]:
    properties: dict[str, Any] = {key: {"type": "string", "description": about} for key, about in required.items()}
    schema = {
        "type": "object",
        "properties": properties | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_PATH = "Path of the file, relative to the repository's folder."
TOOLS = [
    _tool(
        "list_files",
        "List the files of the repository, one path a line.",
        {},
        {"folder": {"type": "string", "description": "Only files below this folder."}},
    ),
    _tool(
        "read_file",
        "Read a text file of the repository.",
        {"path": _PATH},
        {
            "first_line": {"type": "integer", "minimum": 1, "description": "Where to begin; 1 without it."},
            "lines": {
                "type": "integer",
                "minimum": 1,
                "maximum": 2000,
                "description": "How many lines; all without it.",
            },
        },
    ),
    _tool(
        "write_file",
        "Write a whole file; what was in it is replaced.",
        {"path": _PATH, "content": "The complete new content."},
    ),
    _tool(
        "replace_text",
        "Replace a text that stands in a file exactly once.",
        {"path": _PATH, "old": "The text to replace, with its blanks.", "new": "What to write in its place."},
    ),
    _tool(
        "search",
        "Find lines that contain a text, as path:line: content.",
        {"text": "What to look for; upper and lower case are different."},
    ),
    _tool(
        "run_tests",
        "Run the tests with pytest and return what it prints.",
        {},
        {"select": {"type": "string", "description": "Only tests whose name contains this."}},
    ),
]

FIRST = "The tests of the report module fail. Find out why and mend the code, not the tests."
SECOND = "Good. Now rename the field `value` of Entry to `amount` everywhere, with what is named after it."

MENDED = REPORT.replace(
    """    for index in range(len(entries) - 1):
        entry = entries[index]
        sums""",
    """    for entry in entries:
        sums""",
)
SHARE, SAFE_SHARE = "    return part / whole\n", "    return part / whole if whole else 0.0\n"
_NAME = r"\bvalue\b"
MENDED_WELL = (
    "All tests pass. Two things were wrong in book/report.py: totals counted up to one entry before the last, so the "
    "last one was missing from its sums, and share divided by zero for an empty book. totals now goes over all "
    "entries, and share is 0.0 where nothing was paid. The tests are unchanged."
)
RENAMED_WELL = (
    "The field is now called amount: in Entry, in parse_line and in all functions of book/report.py that had a value "
    "of cents, such as as_euros. The tests use the new name, too, and all of them pass."
)
Call = tuple[str, dict[str, str]]
# What the agent says, the calls that it makes, and the tokens that it may write; a user's message comes between.
STEPS: list[tuple[str, list[Call], int] | str] = [
    FIRST,
    ("I will look at the files first.", [("list_files", {})], 64),
    (
        "I will read the report, the entries that it uses, and the tests.",
        [("read_file", {"path": path}) for path in ("book/report.py", "book/entries.py", TEST_FILE)],
        128,
    ),
    ("I will run the tests to see what fails.", [("run_tests", {})], 64),
    (
        "The loop in totals leaves out the last entry. I will write the file with a loop over all entries.",
        [("write_file", {"path": "book/report.py", "content": MENDED})],
        640,
    ),
    ("I will run the tests again.", [("run_tests", {})], 64),
    (
        "An empty book has no payments to divide by. I will give it a share of zero.",
        [("replace_text", {"path": "book/report.py", "old": SHARE, "new": SAFE_SHARE})],
        128,
    ),
    ("I will run the tests again.", [("run_tests", {})], 64),
    (
        MENDED_WELL,
        [],
        160,
    ),
    SECOND,
    (
        "I will write both modules with the new name.",
        [
            ("write_file", {"path": "book/entries.py", "content": re.sub(_NAME, "amount", ENTRIES)}),
            (
                "write_file",
                {"path": "book/report.py", "content": re.sub(_NAME, "amount", MENDED.replace(SHARE, SAFE_SHARE))},
            ),
        ],
        1280,
    ),
    (
        "The tests make entries with the old name. I will write them with the new one.",
        [("write_file", {"path": TEST_FILE, "content": TESTS.replace("value=", "amount=")})],
        768,
    ),
    ("I will run the tests again.", [("run_tests", {})], 64),
    (
        RENAMED_WELL,
        [],
        128,
    ),
]


def carried_out(folder: Path, name: str, arguments: dict[str, str]) -> str:
    """The result of a call."""
    path = folder / arguments.get("path", "")
    if name == "list_files":
        return "\n".join(str(file.relative_to(folder)) for file in sorted(folder.rglob("*.py")))
    if name == "read_file":
        return path.read_text(encoding="utf-8")
    if name == "write_file":
        path.write_text(arguments["content"], encoding="utf-8")
        return f"Wrote {len(arguments['content'].splitlines())} lines."
    if name == "replace_text":
        text = path.read_text(encoding="utf-8")
        if text.count(arguments["old"]) != 1:
            sys.exit(f"the text is {text.count(arguments['old'])} times in {path}")
        path.write_text(text.replace(arguments["old"], arguments["new"]), encoding="utf-8")
        return "Replaced 1 text."
    command = [sys.executable, "-B", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["--rootdir", ".", "tests"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return re.sub(r" in [\d.]+s", "", done.stdout.replace(str(folder), ".")).strip()


def session(folder: Path) -> list[dict[str, Any]]:
    """The lines of the session, while its calls are carried out."""
    new: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    lines: list[dict[str, Any]] = []
    count = 0
    for step in STEPS:
        if isinstance(step, str):
            new.append({"role": "user", "content": step})
            continue
        text, asked, tokens = step
        calls = []
        for name, arguments in asked:
            count += 1
            function = {"name": name, "arguments": json.dumps(arguments)}
            calls.append({"id": f"call_{count}", "type": "function", "function": function})
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            answer["tool_calls"] = calls
        lines.append({"messages": new, "max_tokens": tokens, "answer": answer})
        new = [
            {"role": "tool", "tool_call_id": call["id"], "content": carried_out(folder, name, arguments)}
            for call, (name, arguments) in zip(calls, asked, strict=True)
        ]
    lines[0]["tools"] = TOOLS
    return lines


def main() -> None:
    """Write the session."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        files = {"book/__init__.py": "", "book/entries.py": ENTRIES, "book/report.py": REPORT}
        for path, text in {**files, TEST_FILE: TESTS, "tests/conftest.py": ""}.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        lines = session(folder)
    Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
