"""Readers of arguments: the text of a dialect into JSON, as it comes."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from draftproof.finish import overlap
from draftproof.server.dialects.json_schema import not_texts

_WORDS = {"True": "true", "False": "false", "None": "null"}
_SCALAR = re.compile(r"[\w.+-]+")
_ATOM = re.compile(r"([^\s,:()\[\]{}<>]+)(?=[\s,:()\[\]{}<>])")
_MAY_BE_WORD = re.compile(r"n(ul?)?|null|t(ru?)?|true|f(a(ls?)?)?|false|-?[0-9]*\.?[0-9]*([eE][+-]?[0-9]*)?")
_DOUBLE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_SINGLE = re.compile(r"(?:[^'\\]|\\.)*", re.DOTALL)
_ESCAPED = re.compile(r"\\.|\"", re.DOTALL)
_QUOTED_NAME = re.compile(r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')\s*:""", re.DOTALL)


class Reader(ABC):
    """Turns the text of one call's arguments into JSON.

    Attributes:
        rest: what has come and is not read yet; after the end, what follows the arguments.
        done: whether the arguments have ended.
    """

    def __init__(self) -> None:
        self.rest = ""
        self.done = False
        self._made = ""
        self._read: Callable[[], bool] = self._begin  # reads a part of the rest; whether there was enough of it

    def read(self, text: str) -> str:
        """The JSON that a piece of text adds."""
        self.rest += text
        self._made = ""
        while not self.done and self._read():
            pass
        return self._made

    @abstractmethod
    def _begin(self) -> bool:
        """Read the beginning."""

    def _emit(self, made: str, size: int) -> bool:
        """Add JSON, and take what it stands for away."""
        self._made += made
        self.rest = self.rest[size:]
        return True


class JsonScanner:
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def take(self, text: str) -> int:
        """How many characters of a piece belong to the value."""
        for place, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = letter == "\\"
                self._quoted = letter != '"'
                self.done = not self._quoted and not self._depth
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]" and self._depth:
                self._depth -= 1
                self.done = not self._depth
            elif not self._depth and not _SCALAR.match(letter):  # after a number or a word
                self.done = True
                return place
            if self.done:
                return place + 1
        return len(text)


class JsonReader(Reader):
    """Arguments that are JSON already."""

    def __init__(self) -> None:
        super().__init__()
        self._scanner = JsonScanner()

    @override
    def _begin(self) -> bool:
        size = self._scanner.take(self.rest)
        self.done = self._scanner.done
        return bool(size) and self._emit(self.rest[:size], size)


@dataclass(frozen=True)
class Tags:
    """What stands before a name, between it and its value, and after that."""

    before: str
    between: str
    after: str


class TaggedReader(Reader):
    """Arguments between tags: texts without quotes, other values as JSON."""

    def __init__(self, tags: Tags, about: Callable[[str], tuple[str, frozenset[str]]]) -> None:
        super().__init__()
        self._tags = tags
        self._about = about
        self._allowed = frozenset[str]()
        self._first = True
        self._scanner = JsonScanner()

    @override
    def _begin(self) -> bool:
        """The name of an argument, or the end."""
        before, between = self._tags.before, self._tags.between
        if not self.rest.startswith(before):
            if before.startswith(self.rest):
                return False
            self.done = True
            return self._emit("{}" if self._first else "}", 0)
        label, found, _ = self.rest[len(before) :].partition(between)
        if not found:
            return False
        name, self._allowed = self._about(label)
        self._scanner = JsonScanner()
        self._read = self._value
        if "string" in self._allowed:
            self._read = self._text if len(self._allowed) == 1 else self._either
        self._emit(f"{'{' if self._first else ', '}{json.dumps(name, ensure_ascii=False)}: ", 0)
        self._first = False
        return self._emit('"' if self._read == self._text else "", len(before) + len(label) + len(between))

    def _either(self) -> bool:
        """Whether a value is a text, where it may be something else."""
        value, found, _ = self.rest.partition(self._tags.after)
        held = 0 if found else overlap(value, self._tags.after)
        value = value[: len(value) - held]
        if not found and (not value or _MAY_BE_WORD.fullmatch(value)):
            return False
        patterns = not_texts(self._allowed).values()
        self._read = self._value if any(re.fullmatch(each, value) for each in patterns) else self._text
        return self._emit('"' if self._read == self._text else "", 0)

    def _value(self) -> bool:
        size = self._scanner.take(self.rest)
        self._emit(self.rest[:size], size)
        if self._scanner.done:
            self._read = self._end
        return self._scanner.done

    def _text(self) -> bool:
        """A text, up to what ends it; what may be the beginning of that is held back."""
        value, found, _ = self.rest.partition(self._tags.after)
        size = len(value) - (0 if found else overlap(value, self._tags.after))
        self._emit(json.dumps(value[:size], ensure_ascii=False)[1:-1], size)
        if found:
            self._read = self._end
            self._emit('"', 0)
        return bool(found)

    def _end(self) -> bool:
        if len(self.rest) < len(self._tags.after):
            return False
        self._read = self._begin
        return self._emit("", len(self._tags.after))


@dataclass(frozen=True)
class Notation:
    """How values are written that are no JSON."""

    # Around texts: Python's, in which letters are escaped, or one that cannot stand in a text. The first one is
    # written, all are read.
    quotes: tuple[str, ...]
    sign: str  # between the name of an argument and its value
    colon: str  # between a name and its value in an object
    comma: str  # between two of anything
    quoted_names: bool  # whether names in objects are texts, too
    words: bool  # whether these are Python's: True, False, None


class LiteralReader(Reader):
    """Arguments in another notation: `a=1, b='x', c=[True]`, with a letter after them."""

    def __init__(self, notation: Notation, end: str) -> None:
        super().__init__()
        self._notation = notation
        self._closers = [end]
        self._fresh = True
        self._quote = ""

    @override
    def _begin(self) -> bool:
        self._read = self._item
        return self._emit("{", 0)

    def _item(self) -> bool:
        """What follows in an array or object: its end, or one more."""
        gap = len(self.rest) - len(self.rest.lstrip(", \n"))
        letter = self.rest[gap : gap + 1]
        if letter == self._closers[-1]:
            self._closers.pop()
            self.done = not self._closers
            self._fresh = False
            return self._emit("]" if letter == "]" else "}", gap if self.done else gap + 1)
        if letter:
            self._emit("" if self._fresh else ", ", gap)
            self._read = self._value if self._closers[-1] == "]" else self._name
        return bool(letter)

    def _name(self) -> bool:
        inner = len(self._closers) > 1
        if inner and self._notation.quoted_names:
            found = _QUOTED_NAME.match(self.rest)
            if not found:
                return False
            name = f'"{found[1]}"' if found[2] is None else f'"{_unquoted(found[2])}"'
            size = found.end()
        else:
            bare, sign, _ = self.rest.partition(self._notation.colon if inner else self._notation.sign)
            if not sign:
                return False
            name = json.dumps(bare, ensure_ascii=False)
            size = len(bare) + len(sign)
        self._read = self._value
        return self._emit(f"{name}: ", size)

    def _value(self) -> bool:
        """The beginning of a value, or all of a number or word."""
        self.rest = self.rest.lstrip()
        if self.rest[:1] and self.rest[0] in "[{":
            self._closers.append("]" if self.rest[0] == "[" else "}")
            self._fresh = True
            self._read = self._item
            return self._emit(self.rest[0], 1)
        for quote in self._notation.quotes:
            if self.rest.startswith(quote):
                self._quote = quote
                self._read = self._text
                return self._emit('"', len(quote))
            if quote.startswith(self.rest):
                return False
        found = _ATOM.match(self.rest)
        if not found:
            return False
        self._fresh = False
        self._read = self._item
        return self._emit(_WORDS.get(found[1], found[1]) if self._notation.words else found[1], found.end())

    def _text(self) -> bool:
        """A text, up to the quote that ends it."""
        if self._quote in ("'", '"'):
            found = (_DOUBLE if self._quote == '"' else _SINGLE).match(self.rest)
            value = found[0] if found else ""
            made = value if self._quote == '"' else _unquoted(value)
        else:
            value, ended, _ = self.rest.partition(self._quote)
            value = value[: len(value) - (0 if ended else overlap(value, self._quote))]
            made = json.dumps(value, ensure_ascii=False)[1:-1]
        self._emit(made, len(value))
        if not self.rest.startswith(self._quote):
            return False
        self._fresh = False
        self._read = self._item
        return self._emit('"', len(self._quote))


def _unquoted(text: str) -> str:
    """What stands between single quotes, as it stands between JSON's."""
    return _ESCAPED.sub(lambda found: {"\\'": "'", '"': '\\"'}.get(found[0], found[0]), text)
