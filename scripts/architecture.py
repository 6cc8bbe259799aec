"""Write the file tree in docs/architecture.md from the first line of every module: `python scripts/architecture.py`.

With --check nothing is written, and the exit code is 1 if the page is out of date.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "draftproof"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree: made by scripts/architecture.py -->", "<!-- end of tree -->"


def first_line(path: Path) -> str:
    """The first line of a module's docstring, without the full stop."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0].removesuffix(".")


def tree() -> str:
    """A line for each folder and module, with the first line of its docstring."""
    rows = []
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: path.relative_to(PACKAGE).parts):
        inside = path.relative_to(PACKAGE)
        if inside.name == "__init__.py":
            if inside.parent != Path():
                rows.append((f"{inside.parent}/", first_line(path)))
        else:
            rows.append((str(inside), first_line(path)))
    rows.sort(key=lambda row: [(part != "", part) for part in row[0].split("/")])
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {said}" for name, said in rows)


def page_with_tree(text: str) -> str:
    """The page with a new tree."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n```text\n{tree()}\n```\n\n{END}{after}"


def main() -> int:
    """Write or check the page."""
    text = PAGE.read_text(encoding="utf-8")
    made = page_with_tree(text)
    if "--check" in sys.argv[1:]:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
