"""Grammars in Lark's notation as llguidance reads it, made rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftproof.errors import UserError
from draftproof.server.dialects.json_schema import ANY_TEXT, NO_LEAST, Schema, definitions, regex_of

SPACED = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",  # as json.dumps writes it
    "coerce_one_of": True,  # an answer that fits one of several schemas may fit a second one, too
}


class Grammar:
    """Rules of one grammar; equal ones are one rule. Special tokens that stand for texts of the dialect have ids."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self._specials = specials
        self._special = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")
        self._names: dict[str, str] = {}  # of rules, by what they are
        self.lines: list[str] = []

    def rule(self, body: str, *, attribute: str = "") -> str:
        """The name of a rule."""
        return self._named("r", f"{attribute}: {body}")

    def terminal(self, body: str) -> str:
        """The name of a terminal, which is a regular expression."""
        return self._named("T", f": {body}")

    def recursive(self, key: str, body: Callable[[], str]) -> str:
        """The name of a rule that may contain itself; equal rules have one key, and `body` makes a new one."""
        if key not in self._names:
            self._names[key] = name = f"v{len(self._names)}"
            self.lines.append(f"{name}: {body()}")
        return self._names[key]

    def text(self, text: str) -> str:
        """Terms for a text; empty for the empty one."""
        terms, end = [], 0
        for found in self._special.finditer(text):
            terms += [json.dumps(text[end : found.start()])] if found.start() > end else []
            terms.append(f"<[{self._specials[found[0]]}]>")
            end = found.end()
        return " ".join([*terms, *([json.dumps(text[end:])] if text[end:] else [])])

    def json(self, schema: Schema, root: Schema, style: Mapping[str, Any] = SPACED) -> str:
        """A rule for JSON that fits a schema with references into `root`; `style` says how it is written."""
        own = schema.get("x-guidance")
        made = {**schema, "x-guidance": {**style, **(own if isinstance(own, dict) else {})}}
        text = dumped(made)
        if '"$ref"' in text:
            text = dumped({**definitions(root), **made})
        return self.rule(f"%json {text}")

    def lark(self, text: str) -> str:
        """A rule for a grammar of its own."""
        return self.rule(f"%lark {{\n{text}\n}}")

    def raw(self, patterns: Sequence[str], end: str, *, without: Sequence[str] = ()) -> str:
        """Terms for a text that fits all patterns and none of those in `without`, up to `end`, and for that."""
        special = self._special.search(end)
        lazy = special is None and not without and all(each.startswith(NO_LEAST) for each in patterns)
        inner = [] if lazy else [f"~/{ANY_TEXT}{regex_of(end)}{ANY_TEXT}/"]
        wanted = [f"/{each}/" for each in patterns or [ANY_TEXT]]
        text = self.terminal(" & ".join([*wanted, *inner, *(f"~/{each}/" for each in without)]))
        if special:
            return self._ended(text, end)
        return self.rule(text, attribute=f"[suffix={json.dumps(end)}]")

    def ended(self, pattern: str, end: str) -> str:
        """Terms for a pattern and what ends it, as one lexeme as far as that has no special token."""
        return self._ended(f"/{pattern}/", end)

    def _ended(self, body: str, end: str) -> str:
        special = self._special.search(end)
        before = end[: special.start()] if special else end
        text = self.terminal(f"{body} /{regex_of(before)}/" if before else body)
        return f"{text} {self.text(end[len(before) :])}"

    def _named(self, kind: str, rule: str) -> str:
        if rule not in self._names:
            self._names[rule] = f"{kind}{len(self._names)}"
            self.lines.append(f"{self._names[rule]}{rule}")
        return self._names[rule]


def choice(terms: Sequence[str]) -> str:
    """One of several terms."""
    return terms[0] if len(terms) == 1 else f"({' | '.join(terms)})"


def dumped(schema: Schema) -> str:
    """A schema as JSON; a UserError where it holds what JSON cannot."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise UserError("a schema holds what JSON cannot: numbers that are none, or too many levels") from None
