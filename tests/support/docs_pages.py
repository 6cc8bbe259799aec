"""What the tests of the documentation read: pages, their blocks of code, and the commands in them.

A comment on the line above a block says how it is tested:

    <!-- slow -->          it takes minutes: run by `pytest -m slow`
    <!-- needs: NAME -->   run by `pytest -m slow` where the registered model NAME is on this machine; what needs
                           anything else (a clone, a model of the reader's) is not run, only read
    <!-- exit code: N -->  the last command ends with this code
"""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from draftproof import models
from draftproof.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
# Run elsewhere (rules), or made by long runs of their own; commands in them are read, as on every page.
NOT_RUN = ("results", "rules", "bench.md", "compositions.md", "memory.md", "reproduce.md", "stoppers.md")

_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- ((?:(?!-->).)*) -->\s*\Z", re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_HERE = re.compile(r"<<\s*'?(\w+)'?")
_REDIRECTS = {"<", ">", ">>", "<<"}


@dataclass(frozen=True)
class Block:
    """A block of code: where it stands, its language, its text, and the comment above it."""

    page: Path
    line: int
    language: str
    text: str
    comment: str = ""

    @property
    def where(self):
        return f"{name_of(self.page)}:{self.line}"

    @property
    def needs(self):
        """What has to be there before it can run."""
        found = re.search(r"needs: ([^\n]*)", self.comment)
        return [] if found is None else [each.strip() for each in found[1].split(" and ")]

    @property
    def slow(self):
        return "slow" in self.comment.split() or bool(self.needs)

    @property
    def exit_code(self):
        found = re.search(r"exit code: (\d+)", self.comment)
        return 0 if found is None else int(found[1])

    @property
    def runnable(self):
        """Whether all that it needs is on this machine."""
        return all(each in models.REGISTRY and models.pulled(each) for each in self.needs)


@dataclass(frozen=True)
class Command:
    """One command as it is typed: its lines, and the text that it is given on stdin by <<."""

    text: str
    here: str | None = None


def name_of(page):
    return str(page.relative_to(ROOT))


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    text, found = text_of(page), []
    for match in _BLOCK.finditer(text):
        comment = _COMMENT.search(text, 0, match.start())
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[1], match[2], "" if comment is None else comment[1]))
    return found


def indented(page):
    """Blocks that are marked by four blanks, as text."""
    text = _BLOCK.sub("", text_of(page))
    return [
        Block(page, 0, "", re.sub(r"^ {4}", "", match[0], flags=re.MULTILINE)) for match in _INDENTED.finditer(text)
    ]


def spans(page):
    """Code inside sentences and tables."""
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    return [span.replace(r"\|", "|") for span in _SPAN.findall(text)]


def commands(block):
    """The commands of a block: lines with "$ ", continued by "> ", in console blocks; every line in others."""
    found, lines = [], block.text.splitlines()
    while lines:
        line = lines.pop(0)
        if block.language == "console" and not line.startswith("$ "):
            continue
        text = line.removeprefix("$ ")
        while text.endswith("\\") and lines:
            text = text.removesuffix("\\") + lines.pop(0).removeprefix("> ").strip()
        here, end = None, _HERE.search(text)
        if end:
            here = ""
            while (following := re.sub(r"^> ?", "", lines.pop(0))) != end[1]:
                here += following + "\n"
        if text.strip() and not text.startswith("#"):
            found.append(Command(text, here))
    return found


def words(text):
    """The words of a command line, with |, <, > and their like as words; a comment at its end is left out."""
    found = shlex.shlex(re.sub(r"\s# .*", "", text), posix=True, punctuation_chars=True)
    found.whitespace_split = True
    found.commenters = ""
    return list(found)


def calls(command):
    """The arguments of every call of draftproof in a command."""
    found, simple, skip = [], [], False
    for word in [*words(command.text), ";"]:
        if skip or word in _REDIRECTS:
            skip = word in _REDIRECTS
        elif set(word) <= set("|&;()"):
            while simple and "=" in simple[0] and not simple[0].startswith("-"):
                simple.pop(0)  # variables that are set for one command
            if simple and Path(simple[0]).name == "draftproof":
                found.append(simple[1:])
            simple = []
        else:
            simple.append(word)
    return found


def parse(arguments):
    """The context of the innermost command that these arguments call; nothing is run.

    Raises what typer raises for an unknown command or option, a missing argument or a bad value.
    """
    command = typer.main.get_command(app)
    context = command.make_context("draftproof", list(arguments))
    while isinstance(command, TyperGroup):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return context


def every_command():
    """Every command by its words: ("bench", "run") and so on."""
    root = typer.main.get_command(app)
    context = root.make_context("draftproof", ["generate"])
    found = {(): root}
    for name in root.list_commands(context):
        command = root.resolve_command(context, [name])[1]
        found[name,] = command
        for below, inner in getattr(command, "commands", {}).items():
            found[name, below] = inner
    return found


def options_of(*commands):
    names = [(*each.opts, *each.secondary_opts) for command in commands for each in command.params]
    return {name for pair in names for name in pair}


def run(command, folder, code=0):
    """Run a command as a reader would: draftproof in this process, everything else by bash. Returns its stdout."""
    if not calls(command):
        text = (
            command.text if command.here is None else f"{command.text}\n{command.here}{_HERE.search(command.text)[1]}"
        )
        return _bash(text, folder, None)
    stages = _stages(command.text)
    (place,) = [i for i, stage in enumerate(stages) if calls(Command(stage))]
    given = command.here if place == 0 else _bash(" | ".join(stages[:place]), folder, None)
    (arguments,) = calls(Command(stages[place]))
    targets = dict(zip(all_words := words(stages[place]), all_words[1:], strict=False))
    if "<" in targets:
        given = (folder / targets["<"]).read_text(encoding="utf-8")
    result = CliRunner().invoke(app, arguments, input=given, prog_name="draftproof")
    assert result.exit_code == code, f"{command.text}\n{result.output}"
    made = result.stdout
    if ">" in targets:
        (folder / targets[">"]).write_text(made, encoding="utf-8")
        made = ""
    return _bash(" | ".join(stages[place + 1 :]), folder, made) if place + 1 < len(stages) else made


def _bash(text, folder, given):
    done = subprocess.run(
        ["/bin/bash", "-ec", text], cwd=folder, input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


def _stages(text):
    """The commands of a pipe, as they are written."""
    found, quote = [""], ""
    for char in text:
        if char == "|" and not quote:
            found.append("")
            continue
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        found[-1] += char
    return [stage.strip() for stage in found]
