"""Write the map of files in docs/architecture.md from the first line of every module: `python scripts/architecture.py`.

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


def rooms() -> str:
    """A heading for each folder with its sentence, and a line for each module with the first line of its docstring."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        folders.setdefault(path.parent.relative_to(PACKAGE), []).append(path)
    parts = []
    for folder, modules in sorted(folders.items(), key=lambda item: item[0].parts):
        own = [path for path in modules if path.name != "__init__.py"]
        title = f"{folder}/" if folder != Path() else "draftproof/"
        said = first_line(PACKAGE / folder / "__init__.py")
        width = max((len(path.name) for path in own), default=0)
        lines = "\n".join(f"{path.name.ljust(width)}  {first_line(path)}" for path in own)
        parts.append(f"### {title}\n\n{said}.\n" + (f"\n```text\n{lines}\n```\n" if own else ""))
    return "\n".join(parts)


def page_with_tree(text: str) -> str:
    """The page with a new tree."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rooms()}\n{END}{after}"


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
