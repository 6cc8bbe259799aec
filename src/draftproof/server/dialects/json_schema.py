"""What a JSON schema allows, where a dialect writes values in another notation than JSON."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.errors import UserError

KINDS = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
ANY_LETTER = r"(.|\n)"
ANY_TEXT = f"{ANY_LETTER}*"
NO_LEAST = f"{ANY_LETTER}{{0,"  # how the pattern of a text begins that may be as short as it likes
_NOT_TEXT = {
    "null": "null",
    "boolean": "true|false",
    "integer": "-?(0|[1-9][0-9]*)",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "array": r"\[(.|\n)*",
    "object": r"\{(.|\n)*",
}  # what is read as another kind of value than a text, where values have no quotes
_MOST_LEVELS = 32  # of references and alternatives without a value between them
_MOST_STEPS = 512
_MOST_ALTERNATIVES = 64
_TYPES: dict[str, type | tuple[type, ...]] = {
    "type": (str, list),
    "properties": Mapping,
    "pattern": str,
    **dict.fromkeys(("enum", "required", "allOf", "anyOf", "oneOf"), list),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), int),
}
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_UNREADABLE = frozenset({"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "unevaluatedProperties"})
_IDLE = [("propertyNames", each) for each in ({"type": "string"}, {}, True)]
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_INNER = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_UNREADABLE_OBJECT = frozenset({"patternProperties", "propertyNames", "minProperties", "maxProperties"})

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Alternative:
    """Schemas without references and alternatives, which a value fits all of."""

    parts: tuple[Schema, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of JSON values that may fit."""
        made = KINDS
        for part in self.parts:
            made &= _kinds_of(part)
        return made

    @property
    def choices(self) -> list[Any] | None:
        """The values that are named one by one; None where they are not."""
        named = [part for part in self.parts if "enum" in part or "const" in part]
        if not named:
            return None
        first, *others = [_values(part, key) for part in named for key in ("enum", "const") if key in part]
        made = [each for each in first if all(_among(each, other) for other in others)]
        return [each for each in made if not self.kinds.isdisjoint(_kinds_fit(each))]

    @property
    def patterns(self) -> list[str]:
        """Regular expressions that a text fits all of, where its letters are not in quotes."""
        made = []
        for part in self.parts:
            least, most = part.get("minLength", 0), part.get("maxLength")
            if least or most is not None:
                made.append(f"{ANY_LETTER}{{{least},{'' if most is None else most}}}")
            if "pattern" in part:
                made.append(_whole(str(part["pattern"])))
        return made

    @property
    def bounded(self) -> bool:
        """Whether not all numbers fit."""
        return any(not _BOUNDS.isdisjoint(part) for part in self.parts)

    def value(self, key: str, default: Any) -> Any:
        """The value of a keyword that stands in one of the schemas; a UserError where it stands in several."""
        found = [part[key] for part in self.parts if key in part]
        if len(found) > 1:
            raise UserError(f"the schema of a tool has {key} in several parts of allOf: put them together")
        return found[0] if found else default


@dataclass(frozen=True)
class Member:
    """A named value of an object, and whether it must be there."""

    name: str
    schema: Schema
    required: bool


def alternatives(schema: Schema, root: Schema) -> list[Alternative]:
    """The ways in which a value may fit a schema; a UserError where a reference or keyword cannot be followed."""
    return _alternatives(schema, root, 0, itertools.count())


def _alternatives(schema: Schema, root: Schema, depth: int, steps: Iterator[int]) -> list[Alternative]:
    if depth > _MOST_LEVELS or next(steps) > _MOST_STEPS:
        raise UserError(
            f"the schema of a tool: expected at most {_MOST_LEVELS} references in a row and {_MOST_STEPS} references "
            "and alternatives for one value, got more"
        )
    _check(schema)
    if unread := sorted(_UNREADABLE & schema.keys()):
        raise unwritable(unread[0])
    inner = depth + 1
    own = {key: value for key, value in schema.items() if key not in {"$ref", "allOf", "anyOf", "oneOf"}}
    parts: list[list[Alternative]] = [[Alternative((own,))]]
    if "$ref" in schema:
        parts.append(_alternatives(referred(str(schema["$ref"]), root), root, inner, steps))
    parts += [_alternatives(as_schema(each), root, inner, steps) for each in schema.get("allOf", ())]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            found = (_alternatives(as_schema(each), root, inner, steps) for each in schema[key])
            parts.append([*itertools.chain.from_iterable(found)])
    made = [
        Alternative(tuple(itertools.chain.from_iterable(each.parts for each in chosen)))
        for chosen in itertools.islice(itertools.product(*parts), _MOST_ALTERNATIVES + 1)
    ]
    if len(made) > _MOST_ALTERNATIVES:
        raise UserError(f"the schema of a tool: expected at most {_MOST_ALTERNATIVES} alternatives, got more")
    return [each for each in made if each.kinds]


def kinds(schema: Schema, root: Schema) -> frozenset[str]:
    """Kinds of JSON values that a schema allows."""
    return frozenset().union(*(each.kinds for each in alternatives(schema, root)))


def members(given: Alternative, root: Schema) -> list[Member]:
    """The members of an object in the order of its schema; others may be left out always."""
    found: dict[str, list[Schema]] = {}
    required: dict[str, None] = {}
    for part in given.parts:
        if unread := sorted(_UNREADABLE_OBJECT & part.keys()):
            raise unwritable(unread[0])
        for name, schema in part.get("properties", {}).items():
            found.setdefault(name, []).append(as_schema(schema))
        required |= dict.fromkeys(part.get("required", ()))
    for name in required:
        found.setdefault(name, [as_schema(given.value("additionalProperties", default=True))])
    made = [
        Member(name, schemas[0] if len(schemas) == 1 else {"allOf": schemas}, name in required)
        for name, schemas in found.items()
    ]
    return [each for each in made if each.required or kinds(each.schema, root)]


def arguments(parameters: Schema) -> list[Member]:
    """The arguments of a function; a UserError where the schema of all of them has alternatives."""
    made = [each for each in alternatives(parameters, parameters) if "object" in each.kinds]
    if len(made) != 1:
        raise UserError(
            f"the parameters of a tool: expected one object, got {len(made)} alternatives, which this model's way to "
            "write calls cannot tell apart"
        )
    return members(made[0], parameters)


def without_idle_names(schema: Any) -> Any:
    """A schema without `propertyNames` that all names fit: generators write them, and grammars know none."""
    if not isinstance(schema, Mapping):
        return schema
    made = {key: value for key, value in schema.items() if (key, value) not in _IDLE}
    for key, value in made.items():
        if key in _MAPS and isinstance(value, Mapping):
            made[key] = {name: without_idle_names(each) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            made[key] = [without_idle_names(each) for each in value]
        elif key in _INNER:
            made[key] = without_idle_names(value)
    return made


def referred(reference: str, root: Schema) -> Schema:
    """The schema that a reference names; a UserError where it is not in the schema's own definitions."""
    where: Any = root
    if not reference.startswith(("#/$defs/", "#/definitions/")):
        raise UserError(f"the schema of a tool: expected $ref to begin with #/$defs/, got {reference[:80]!r}")
    for step in reference.removeprefix("#/").split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(where, Mapping) or key not in where:
            raise UserError(f"the schema of a tool: {reference[:80]!r} is not in it")
        where = where[key]
    return as_schema(where)


def definitions(root: Schema) -> dict[str, Any]:
    """What references point to."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def as_schema(given: Any) -> Schema:
    """A schema as an object; the schema `true` allows everything."""
    if given is True:
        return {}
    if given is False:
        return {"enum": []}
    if not isinstance(given, Mapping):
        raise UserError(f"the schema of a tool: expected objects as schemas, got {type(given).__name__}")
    return given


def not_texts(allowed: frozenset[str]) -> dict[str, str]:
    """Patterns of what is read as another value than a text where values of these kinds may stand without quotes."""
    return {kind: pattern for kind, pattern in _NOT_TEXT.items() if kind in allowed}


def unwritable(what: str) -> UserError:
    """The error for what a dialect has no text for."""
    return UserError(f"the schema of a tool has {what}, which this model's way to write calls cannot hold")


def regex_of(text: str) -> str:
    """A regular expression for a text, between the slashes that Lark puts around it."""
    return "".join(
        each if each.isalnum() or not each.isascii() else r"\n" if each == "\n" else f"\\x{ord(each):02x}"
        for each in text
    )


def _check(schema: Schema) -> None:
    """Refuse keywords whose values are not of their type."""
    for key, kind in _TYPES.items():
        if key in schema and not isinstance(schema[key], kind):
            raise UserError(f"the schema of a tool: {key} cannot be a value of type {type(schema[key]).__name__}")
    for key in ("type", "required"):
        given = schema.get(key, ())
        if not all(isinstance(each, str) for each in given):
            raise UserError(f"the schema of a tool: expected names in {key}, got other values")


def _kinds_of(part: Schema) -> frozenset[str]:
    given = part.get("type", sorted(KINDS))
    named = {given} if isinstance(given, str) else {*given}
    made = frozenset(named | ({"integer"} if "number" in named else set()))
    for key in ("enum", "const"):
        if key in part:
            made &= frozenset(itertools.chain.from_iterable(map(_kinds_fit, _values(part, key))))
    return made & KINDS


def _values(part: Schema, key: str) -> Sequence[Any]:
    return [part[key]] if key == "const" else part[key]


def _kinds_fit(value: Any) -> Iterator[str]:
    if value is None:
        yield "null"
    elif isinstance(value, bool):
        yield "boolean"
    elif isinstance(value, int):
        yield from ("integer", "number")
    elif isinstance(value, float):
        yield "number"
    elif isinstance(value, str):
        yield "string"
    else:
        yield "object" if isinstance(value, Mapping) else "array"


def _among(value: Any, others: Sequence[Any]) -> bool:
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in others)


def _whole(pattern: str) -> str:
    """A pattern that is found somewhere in a text, as one that the whole text fits."""
    end = pattern.endswith("$") and not pattern.endswith(r"\$")
    body = pattern[pattern.startswith("^") : len(pattern) - end]
    escaped = re.sub(
        r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), body, flags=re.DOTALL
    )
    return f"{'' if pattern.startswith('^') else ANY_TEXT}({escaped}){'' if end else ANY_TEXT}"
