"""Figures of the house: sizes of the source, and how often a model's name climbs while an engine is loaded.

    python scripts/house_figures.py [ROOT]      figures of a checkout, of this one by default
    python scripts/house_figures.py --climbs    follows the target's name through `Engine.load`, in this checkout

Lines are of Python, with docstrings and blanks. A window of six lines is six lines in a row that are not blank, without
their indentation. A climb is a call from a lower floor or room (tests/support/floors.py) to a higher one with the
target's name among its arguments, or in a field of one; floors and rooms hold for imports, so such a call goes through
a function or an object that was handed down.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.floors import FLOOR, ROOM

ROOT = Path(__file__).resolve().parent.parent
WINDOW, LONG = 6, 40  # lines


def sizes(root: Path) -> Iterator[tuple[str, object]]:
    """The figures of a checkout, in the order of the table."""
    source = root / "src" / "draftproof"
    texts = {path.relative_to(source): path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    lines = {path: text.count("\n") for path, text in texts.items()}
    yield "lines of src", sum(lines.values())
    rooms: Counter[str] = Counter()
    for path, count in lines.items():
        rooms[path.parts[0] if len(path.parts) > 1 else "top level"] += count
    yield from ((f"  {room}", count) for room, count in rooms.most_common())
    native = [path for path in source.rglob("*") if path.suffix in {".c", ".h"}]
    yield "lines of C", sum(path.read_text(encoding="utf-8").count("\n") for path in native)
    yield "files", len(texts)
    folder, count = Counter(path.parent for path in texts).most_common(1)[0]
    yield "most files in one folder", f"{count} ({folder})"
    long = [size for text in texts.values() for size in function_sizes(text)]
    yield f"functions of more than {LONG} lines; the longest", f"{sum(size > LONG for size in long)}; {max(long)}"
    yield f"windows of {WINDOW} lines that occur again", repeated_windows(texts)
    tests = [path.read_text(encoding="utf-8") for path in (root / "tests").rglob("test_*.py")]
    yield "test functions", sum(len(re.findall(r"^ *(?:async )?def test_", text, re.MULTILINE)) for text in tests)
    yield "words of the README", len((root / "README.md").read_text(encoding="utf-8").split())


def function_sizes(text: str) -> Iterator[int]:
    """Lines of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or 0) - node.lineno + 1


def repeated_windows(texts: Mapping[Path, str]) -> int:
    """Different windows of lines that occur more than once."""
    windows: Counter[tuple[str, ...]] = Counter()
    for text in texts.values():
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        windows.update(tuple(lines[at : at + WINDOW]) for at in range(len(lines) - WINDOW + 1))
    return sum(times > 1 for times in windows.values())


# --- climbs ---------------------------------------------------------------------------------------------------------


@functools.cache
def floor_of(file: str) -> tuple[int, int] | None:
    """Floor of a source file, and its room's among those of backends; None for other people's files."""
    try:
        path = Path(file).resolve().relative_to(ROOT / "src" / "draftproof")
    except ValueError:
        return None
    first = path.parts[0].removesuffix(".py")
    room = ROOM[".".join(path.parts[1:-1])] if first == "backends" else 0
    return FLOOR.get(first, len(FLOOR)), room


def holds(value: Any, name: str) -> bool:
    """Whether a value is the name, or a record with it in a field."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(getattr(value, each.name, None) == name for each in dataclasses.fields(value))
    return isinstance(value, str) and value == name


def calls_with(name: str) -> list[tuple[str, str, bool]]:
    """Calls between our modules that get the name while an engine is loaded: caller, callee, whether it climbs."""
    from draftproof import Engine

    found: list[tuple[str, str, bool]] = []

    def seen(frame: FrameType, event: str, _: object) -> None:
        code, before = frame.f_code, frame.f_back
        if event != "call" or (here := floor_of(code.co_filename)) is None or code.co_name.startswith("<"):
            return
        count = code.co_argcount + code.co_kwonlyargcount
        if not any(holds(frame.f_locals.get(each), name) for each in code.co_varnames[:count]):
            return
        there = None
        while before is not None and (there := floor_of(before.f_code.co_filename)) is None:
            before = before.f_back
        if before is not None and there is not None and before.f_code.co_filename != code.co_filename:
            found.append((place(before), place(frame), here > there))

    sys.setprofile(seen)
    try:
        Engine.load(name)
    finally:
        sys.setprofile(None)
    return found


def place(frame: FrameType) -> str:
    """Module and function of a frame."""
    path = Path(frame.f_code.co_filename).resolve().relative_to(ROOT / "src" / "draftproof")
    return f"{path}:{frame.f_code.co_qualname}"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--climbs", action="store_true", help="follow the target's name through Engine.load")
    parser.add_argument("--target", default="embedded:stories", help="the name that is followed")
    options = parser.parse_args()
    if not options.climbs:
        for what, figure in sizes(options.root):
            print(f"{what:50} {figure}")
        return
    calls = calls_with(options.target)
    for caller, callee, climbs in calls:
        print(f"{'climb' if climbs else '     '}  {caller} -> {callee}")
    print(f"{len(calls)} calls from one file to another, {sum(climbs for *_, climbs in calls)} climbs")


if __name__ == "__main__":
    main()
