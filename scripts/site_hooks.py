"""Pages that mkdocs adds to the files in docs/: the front page, the pages of the command line, and lists of pages.

The front page is README.md, the changelog and the notices are the files of the repository, and the pages of commands
are made from the commands, so that none of them can go out of date.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from draftproof.cli import COMMANDS, app

ROOT = Path(__file__).resolve().parent.parent
# files of the repository that are in the site, most of them as pages
PAGES = {
    "CITATION.cff": "CITATION.cff",
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "THIRD_PARTY_NOTICES.md": "notices.md",
}
COMMAND_PAGES = "reference/cli"
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
# These are the same everywhere, and named on the first page.
_HIDDEN = {"help", "debug", "offline", "install_completion", "show_completion"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace `folder/*` by the pages of the folder."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=site_links(text)))
    for page, text in command_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def site_links(text: str) -> str:
    """The text of a file at the root of the repository, with its links changed to those of the site."""

    def moved(match: re.Match[str]) -> str:
        goal = match[2]
        if goal.startswith(("http:", "https:", "mailto:")):
            return match[0]
        return f"{match[1]}{PAGES.get(goal, goal.removeprefix('docs/'))}{match[3] or ''}{match[4]}"

    return _LINK.sub(moved, text)


# --- lists of pages -----------------------------------------------------------------------------------------------


def _expanded(nav: Any, docs: Path) -> Any:
    """`nav` with every `folder/*` replaced by the folder's pages."""
    if isinstance(nav, dict):
        return {title: _expanded(inside, docs) for title, inside in nav.items()}
    if isinstance(nav, str):
        return pages_of(nav, docs) if nav.endswith("/*") else nav
    made: list[Any] = []
    for entry in nav:
        found = _expanded(entry, docs)
        made.extend(found if isinstance(entry, str) and isinstance(found, list) else [found])
    return made


def pages_of(pattern: str, docs: Path) -> list[Any]:
    """The pages of a folder, its README first, with the names of their files or folders."""
    folder = pattern.removesuffix("/*")
    if folder == COMMAND_PAGES:
        return list(command_paths())
    found = sorted(path.relative_to(docs) for path in (docs / folder).rglob("*.md"))
    found.sort(key=lambda path: (len(path.parts), path.name != "README.md"))
    depth = len(Path(folder).parts) + 1
    return [str(path) if path.name == "README.md" else {_title(path, depth): str(path)} for path in found]


def _title(path: Path, depth: int) -> str:
    return path.stem if len(path.parts) == depth else path.parent.name


# --- the command line ---------------------------------------------------------------------------------------------


def command_paths() -> dict[str, str]:
    """The page of each command."""
    return {f"{COMMAND_PAGES}/index.md": "", **{f"{COMMAND_PAGES}/{name}.md": name for name in COMMANDS}}


def command_pages() -> dict[str, str]:
    """Every page of the command line: its path and its text."""
    root: Any = typer.main.get_command(app)  # a group
    context = root.make_context("draftproof", ["--debug", "generate"])
    made = {}
    for page, name in command_paths().items():
        command = root.resolve_command(context, [name])[1] if name else root
        made[page] = _page(f"draftproof {name}".strip(), command, context)
    return made


def _page(name: str, command: Any, context: Any) -> str:
    """A command, and the commands below it."""
    parts = [f"# {name}", _said(command.help), _usage(name, command, context)]
    below = getattr(command, "commands", {})
    if name == "draftproof":
        rows = [f"| [`draftproof {each}`]({each}.md) | {_cell(line)} |" for each, line in COMMANDS.items()]
        parts += [_table(("command", "what it does"), rows), *_options(command, context, hidden=set())]
        parts.append("`--help`, `--debug` and `--offline` also follow every command.")
    else:
        parts += _options(command, context)
        for each in below.values():
            inner = f"{name} {each.name}"
            parts += [f"## {inner}", _said(each.help), _usage(inner, each, context), *_options(each, context)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _said(text: str | None) -> str:
    return html.escape((text or "").replace("\f", "").strip(), quote=False)


def _usage(name: str, command: Any, context: Any) -> str:
    return f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```"


def _options(command: Any, context: Any, *, hidden: set[str] = _HIDDEN) -> list[str]:
    """A table for each group of options."""
    groups: dict[str, list[str]] = {}
    for each in command.params:
        if each.name in hidden or getattr(each, "hidden", False):
            continue
        title = getattr(each, "rich_help_panel", None)
        title = title or ("Arguments" if each.param_type_name == "argument" else "Options")
        groups.setdefault(title, []).append(_row(each, context))
    heads = {"Arguments": "argument"}
    return [
        f"**{_cell(title)}**\n\n{_table((heads.get(title, 'option'), 'value', 'meaning'), rows)}"
        for title, rows in groups.items()
    ]


def _row(parameter: Any, context: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [parameter.display_name_raw]
    flag = getattr(parameter, "is_flag", False)
    value = "" if flag else str(parameter.display_type_rich(context) or "").strip("<>")
    said = [parameter.help or "", "Required." if parameter.required else "", _default(parameter, flag=flag)]
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {_code(value)} | {_cell(' '.join(filter(None, said)))} |"


def _default(parameter: Any, *, flag: bool) -> str:
    """The default of an option in words; empty if it has none."""
    value = parameter.default
    if callable(value) or value in (None, [], ()):
        return ""
    if flag:  # of --this/--no-this; an option without an opposite is off
        sides = (parameter.opts if value else parameter.secondary_opts) if parameter.secondary_opts else []
        return f"Default: {sides[0]}." if sides else ""
    return f"Default: {value}."


def _code(text: str) -> str:
    return f"<code>{_cell(text)}</code>" if text else ""


def _table(head: tuple[str, ...], rows: list[str]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(html.escape(text, quote=False).replace("|", "&#124;").split())
