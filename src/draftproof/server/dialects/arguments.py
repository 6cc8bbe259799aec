"""The arguments of a call in a dialect: as JSON, between tags, or in a notation of its own."""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from draftproof.server.dialects.grammar import Grammar, choice
from draftproof.server.dialects.json_schema import (
    ANY_LETTER,
    KINDS,
    Alternative,
    Member,
    Schema,
    alternatives,
    arguments,
    as_schema,
    definitions,
    kinds,
    members,
    not_texts,
    unwritable,
)
from draftproof.server.dialects.readers import JsonReader, LiteralReader, Notation, Reader, TaggedReader, Tags

_log = logging.getLogger(__name__)
_TEXT = "text7301"  # stands for a text in what is written
_UNREADABLE_ARRAY = ("uniqueItems", "contains", "prefixItems", "unevaluatedItems")
_BARE_NAME = r"/[A-Za-z_][A-Za-z0-9_-]*/"
_SINGLE_QUOTED = r"([^'\\\x00-\x1f\x7f]|\\['\\nrt\x22])"


class Arguments(ABC):
    """How a dialect writes the arguments of a call; `texts` are fixed ones, among which special tokens may be."""

    texts: tuple[str, ...] = ()

    @abstractmethod
    def written(self, given: Mapping[str, Any]) -> str:
        """Arguments as text."""

    @abstractmethod
    def terms(self, grammar: Grammar, parameters: Schema) -> str:
        """Terms of Lark for arguments that fit a schema; a UserError for one that the dialect cannot keep to."""

    def free(self, grammar: Grammar, parameters: Schema, lark: str) -> str:
        """Terms of Lark for a text as the only argument, by its grammar where it stands without quotes and escapes."""
        (name,) = parameters["properties"]
        before, _, after = self.written({name: _TEXT}).partition(_TEXT)
        if self.written({name: '"\n'}) != f'{before}"\n{after}':
            _log.info("the grammar of a custom tool is not kept to: this model writes arguments with escapes")
            return self.terms(grammar, parameters)
        return f"{grammar.text(before)} {grammar.lark(lark)} {grammar.text(after)}"

    @abstractmethod
    def reader(self, parameters: Schema) -> Reader:
        """A reader of arguments that were made by the grammar."""


class JsonArguments(Arguments):
    """One JSON object."""

    @override
    def written(self, given: Mapping[str, Any]) -> str:
        return _json(given)

    @override
    def terms(self, grammar: Grammar, parameters: Schema) -> str:
        return grammar.json({"type": "object", **parameters}, parameters)

    @override
    def reader(self, parameters: Schema) -> Reader:
        return JsonReader()


class TaggedArguments(Arguments):
    """Each argument between tags: a text as it is, and any other value as JSON."""

    _labels: Mapping[bool, str] = MappingProxyType({True: "", False: ""})  # after a name, by whether a text follows

    def __init__(self, before: str, between: str, after: str) -> None:
        self._tags = Tags(before, between, after)
        self.texts = (before, between, after)

    @override
    def written(self, given: Mapping[str, Any]) -> str:
        tags = self._tags
        return "".join(
            f"{tags.before}{name}{self._labels[isinstance(value, str)]}{tags.between}"
            f"{value if isinstance(value, str) else _json(value)}{tags.after}"
            for name, value in given.items()
        )

    @override
    def terms(self, grammar: Grammar, parameters: Schema) -> str:
        made = []
        for member in arguments(parameters):
            if self._tags.between in member.name:
                raise unwritable(f"a parameter named {member.name[:80]!r}")
            rule = grammar.rule(self._member(grammar, member, parameters))
            made.append(rule if member.required else f"{rule}?")
        return " ".join(made)

    @override
    def reader(self, parameters: Schema) -> Reader:
        found = {member.name: member.schema for member in arguments(parameters)}
        return TaggedReader(self._tags, lambda label: (label, kinds(found.get(label, {}), parameters)))

    def _member(self, grammar: Grammar, member: Member, root: Schema) -> str:
        return f"{self._head(grammar, member, text=False)} {self._value(grammar, member.schema, root)}"

    def _head(self, grammar: Grammar, member: Member, *, text: bool) -> str:
        """Terms for what stands before a value."""
        return grammar.text(f"{self._tags.before}{member.name}{self._labels[text]}{self._tags.between}")

    def _value(self, grammar: Grammar, schema: Schema, root: Schema) -> str:
        """Terms for a value and what stands after it."""
        end, allowed = self._tags.after, kinds(schema, root)
        if "string" not in allowed:
            return f"{grammar.json(schema, root)} {grammar.text(end)}"
        others = not_texts(allowed)
        made = []
        for each in alternatives(schema, root):
            if each.choices is not None:
                fit = [value for value in each.choices if not isinstance(value, str) or _is_text(value, end, others)]
                made += [grammar.text((value if isinstance(value, str) else _json(value)) + end) for value in fit]
                continue
            for kind in sorted(each.kinds):
                made += self._kind(grammar, each, kind, others, root)
        if not made:
            raise unwritable("a parameter without any value that fits it")
        return choice(list(dict.fromkeys(made)))

    def _kind(
        self, grammar: Grammar, given: Alternative, kind: str, others: Mapping[str, str], root: Schema
    ) -> list[str]:
        """Terms for values of one kind, where there may be a text; none for numbers that are not all legal.

        A word or number and what ends it are one lexeme: a text could go on after the word.
        """
        end = self._tags.after
        if kind == "string":
            return [grammar.raw(given.patterns, end, without=[*others.values()])]
        if kind in ("array", "object"):
            return [f"{grammar.json({'allOf': [*given.parts, {'type': kind}]}, root)} {grammar.text(end)}"]
        if kind in ("null", "boolean"):
            return [grammar.text(word + end) for word in others[kind].split("|")]
        return [] if given.bounded else [grammar.ended(others[kind], end)]


class LabelledArguments(TaggedArguments):
    """The same with a label after the name that says whether the value is a text: `{}` in it is true or false."""

    def __init__(self, before: str, label: str, between: str, after: str) -> None:
        super().__init__(before, between, after)
        self._labels = {text: label.format(str(text).lower()) for text in (True, False)}

    @override
    def reader(self, parameters: Schema) -> Reader:
        others = KINDS - {"string"}

        def about(label: str) -> tuple[str, frozenset[str]]:
            text = label.endswith(self._labels[True])
            return label.removesuffix(self._labels[text]), frozenset({"string"}) if text else others

        return TaggedReader(self._tags, about)

    @override
    def _member(self, grammar: Grammar, member: Member, root: Schema) -> str:
        end = self._tags.after
        texts, others = list[str](), list[str]()
        for each in alternatives(member.schema, root):
            if each.choices is not None:
                texts += [grammar.text(value + end) for value in _texts(each) if end not in value]
                others += [grammar.text(_json(value) + end) for value in each.choices if not isinstance(value, str)]
                continue
            if "string" in each.kinds:
                texts.append(grammar.raw(each.patterns, end))
            kept = each.kinds - {"string"} - ({"integer"} if "number" in each.kinds else set())
            if kept:
                schema = {"allOf": [*each.parts, {"type": sorted(kept)}]}
                others.append(f"{grammar.json(schema, root)} {grammar.text(end)}")
        made = [
            f"{self._head(grammar, member, text=text)} {choice(list(dict.fromkeys(terms)))}"
            for text, terms in ((True, texts), (False, others))
            if terms
        ]
        if not made:
            raise unwritable("a parameter without any value that fits it")
        return choice(made)


class LiteralArguments(Arguments):
    """Arguments in a notation of their own, such as Python's, with a letter after them; `by_name` sorts them."""

    def __init__(self, notation: Notation, end: str, *, by_name: bool = False) -> None:
        self._notation = notation
        self._end = end
        self._by_name = by_name
        self.texts = notation.quotes

    @override
    def written(self, given: Mapping[str, Any]) -> str:
        items = self._ordered(given)
        return self._notation.comma.join(f"{name}{self._notation.sign}{self._shown(value)}" for name, value in items)

    @override
    def terms(self, grammar: Grammar, parameters: Schema) -> str:
        return self._members(grammar, arguments(parameters), parameters, inner=False)

    @override
    def reader(self, parameters: Schema) -> Reader:
        return LiteralReader(self._notation, self._end)

    def _shown(self, value: Any) -> str:
        comma = self._notation.comma
        if isinstance(value, str):
            return _between(self._notation.quotes[0], value) or ""
        if isinstance(value, Mapping):
            shown = (f"{self._named(key)}{self._notation.colon}{self._shown(own)}" for key, own in self._ordered(value))
            return f"{{{comma.join(shown)}}}"
        if isinstance(value, Sequence):
            return f"[{comma.join(map(self._shown, value))}]"
        if self._notation.words and (value is None or isinstance(value, bool)):
            return str(value)
        return _json(value)

    def _ordered(self, given: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Names and values in the order in which they are written."""
        return sorted(given.items(), key=lambda each: each[0].lower()) if self._by_name else [*given.items()]

    def _named(self, name: str) -> str:
        return _json(name) if self._notation.quoted_names else name

    def _members(self, grammar: Grammar, found: Sequence[Member], root: Schema, *, inner: bool) -> str:
        """Terms for the members of an object with commas between them."""
        sign = self._notation.colon if inner else self._notation.sign
        comma = grammar.text(self._notation.comma)
        first, later = "", ""  # terms for what follows, without and with a member before it
        for _, member in reversed(self._ordered({each.name: each for each in found})):
            name = self._named(member.name) if inner else member.name
            if sign in member.name and name == member.name:
                raise unwritable(f"a property named {member.name[:80]!r}")
            value = grammar.rule(f"{grammar.text(name + sign)} {self._value(grammar, member.schema, root)}")
            begun = f"{value} {later}"
            if member.required:
                first, later = begun, f"{comma} {begun}"
            else:
                first = grammar.rule(f"{begun} | {first}") if first else f"({begun})?"
                later = f"({comma} {value})? {later}"
            later = grammar.rule(later)
        return first

    def _value(self, grammar: Grammar, schema: Schema, root: Schema) -> str:
        """The rule for a value; one that contains itself is one rule."""

        def body() -> str:
            made = [
                term
                for each in alternatives(schema, root)
                for kind in sorted(each.kinds)
                for term in self._kind(grammar, each, kind, root)
            ]
            if not made:
                raise unwritable("a value that nothing fits")
            return " | ".join(dict.fromkeys(made))

        key = _json(schema)
        return grammar.recursive(f"{key} {_json(definitions(root))}" if '"$ref"' in key else key, body)

    def _kind(self, grammar: Grammar, given: Alternative, kind: str, root: Schema) -> list[str]:
        named = given.choices
        if kind == "string":
            return self._strings(grammar, given)
        if kind in ("array", "object"):
            if named is not None:
                same = [each for each in named if isinstance(each, Mapping if kind == "object" else list)]
                return [grammar.text(self._shown(each)) for each in same]
            made = self._array(grammar, given, root) if kind == "array" else self._object(grammar, given, root)
            return [grammar.rule(made)]
        if kind in ("boolean", "null"):
            values = [True, False] if kind == "boolean" else [None]
            allowed = [each for each in values if named is None or any(each is one for one in named)]
            return [grammar.text(self._shown(each)) for each in allowed]
        if kind == "integer" and "number" in given.kinds:
            return []  # numbers are these, too
        return [grammar.json({"allOf": [*given.parts, {"type": kind}]}, {})]

    def _strings(self, grammar: Grammar, given: Alternative) -> list[str]:
        """Terms for texts between quotes of any kind that is read."""
        made = []
        for quote in self._notation.quotes:
            if given.choices is not None:
                made += [grammar.text(shown) for text in _texts(given) if (shown := _between(quote, text)) is not None]
            elif quote == '"':
                made.append(grammar.json({"allOf": [*given.parts, {"type": "string"}]}, {}))
            elif quote != "'":
                made.append(f"{grammar.text(quote)} {grammar.raw(given.patterns, quote)}")
            elif not any("pattern" in part or "format" in part for part in given.parts):
                sizes = [each.removeprefix(ANY_LETTER) for each in given.patterns] or ["*"]
                made.append(grammar.terminal(" & ".join(f"/'{_SINGLE_QUOTED}{size}'/" for size in sizes)))
        return made

    def _array(self, grammar: Grammar, given: Alternative, root: Schema) -> str:
        for key in _UNREADABLE_ARRAY:
            if any(part.get(key) for part in given.parts):
                raise unwritable(key)
        least, most = given.value("minItems", 0), given.value("maxItems", None)
        if most is not None and most < least:
            raise unwritable("an array with fewer items than it must have")
        if most == 0:
            return grammar.text("[]")
        item = self._value(grammar, as_schema(given.value("items", default=True)), root)
        more = (
            f"({grammar.text(self._notation.comma)} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        )
        inner = f"{item} {more}" if least else f"({item} {more})?"
        return f'"[" {inner} "]"'

    def _object(self, grammar: Grammar, given: Alternative, root: Schema) -> str:
        found = members(given, root)
        if found:
            return f'"{{" {self._members(grammar, found, root, inner=True)} "}}"'
        other = as_schema(given.value("additionalProperties", default=True))
        if other == {"enum": []}:
            return grammar.text("{}")
        name = grammar.json({"type": "string"}, {}) if self._notation.quoted_names else grammar.terminal(_BARE_NAME)
        member = f"{name} {grammar.text(self._notation.colon)} {self._value(grammar, other, root)}"
        return f'"{{" ({member} ({grammar.text(self._notation.comma)} {member})*)? "}}"'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _between(quote: str, text: str) -> str | None:
    """A text between quotes; None where it cannot stand there."""
    if quote == '"':
        return _json(text)
    if quote == "'":
        inner = _json(text)[1:-1].replace(r"\"", '"').replace("'", r"\'")
        return f"'{inner}'"
    return None if quote in text else f"{quote}{text}{quote}"


def _texts(given: Alternative) -> list[str]:
    """The texts among the values that are named one by one."""
    return [each for each in given.choices or () if isinstance(each, str)]


def _is_text(text: str, end: str, others: Mapping[str, str]) -> bool:
    """Whether a text without quotes is read as one, and whole."""
    return end not in text and not any(re.fullmatch(each, text) for each in others.values())
