"""What a hostile client sends: grammars, schemas and fields of any size. The fuzz, the soak and tests use it."""

import json

MOST_GRAMMAR = 131_072  # characters that the server reads
HUGE = 10**4299  # 4300 digits, the most that Python writes as text
PANIC = r"(é|\w)|\w"  # a panic inside a library of 2026


def _fitting(made, size):
    """The largest grammar of a kind that is not larger than what a server reads."""
    while len(json.dumps(found := made(size))) > MOST_GRAMMAR - 1024 and size:
        size = size * 7 // 8
    return found


def clipped(kinds, name, size):
    """One of LARKS, REGEXES or SCHEMAS: at most as long as a server reads."""
    return _fitting(kinds[name], size)


# --- Lark -----------------------------------------------------------------------------------------------------------


def _rules(size, body, last='"a"', first="start: r0"):
    """A chain of rules, each made from the name of the next one."""
    rules = [f"r{each:x}: {body.format(next=f'r{each + 1:x}')}" for each in range(size)]
    return "\n".join([first, *rules, f"r{size:x}: {last}"])


def _terminals(size, body):
    rules = [f"R{each:X}: {body.format(next=f'R{each + 1:X}')}" for each in range(size)]
    return "\n".join(["start: R0", *rules, f'R{size:X}: "a"'])


LARKS = {
    "chain": lambda size: _rules(size, '{next} | "a"'),
    "chain, shortest": lambda size: _rules(size, "{next}"),
    "circle": lambda size: _rules(size, '{next} | "a"', "r0"),
    "doubled": lambda size: _rules(min(size, 40), "{next} {next}"),
    "optional": lambda size: _rules(size, "{next}? {next}*"),
    "repeated": lambda size: _rules(min(size, 6), "{next}{{1,900}}"),
    "terminals": lambda size: _terminals(size, '{next} | "b"'),
    "terminals, doubled": lambda size: _terminals(min(size, 40), "{next} {next}"),
    "brackets": lambda size: f'start: {"(" * size}"a"{")" * size}',
    "nested lists": lambda size: f'start: {"[" * size}"a"{"]" * size}',
    "wide": lambda size: "start: " + " | ".join(f'"{each:x}"' for each in range(size + 1)),
    "long": lambda size: "start: " + " ".join(['"a"'] * (size + 1)),
    "left recursion": lambda size: 'start: start start | "a" | ""' + "\n" * size,
    "lazy": lambda size: (
        "start: a b c\n" + "\n".join(f"{each}[lazy]: /(.|\\n)*{each}(.|\\n){{{size % 40}}}/" for each in "abc")
    ),
    "most tokens": lambda size: f'start: a "!"\na[max_tokens={size}]: /.*/',
    "stop": lambda size: f'start: a "!"\na[stop="{"x" * size}"]: /.*/',
    "capture": lambda size: f'start: a\na[capture="{"x" * size}", temperature=0.5]: /.*/',
    "token": lambda size: f"start: <[{size}]> | <[0-{size}]> | <[^{size}]>",
    "special": lambda size: f"start: <|{'x' * size}|>",
    "regex": lambda size: f"start: /(a{{{size}}}){{100}}/",
    "json": lambda size: f"start: %json {json.dumps(SCHEMAS['objects'](size))}",
    "imports": lambda size: "%import common.WORD\n%ignore /x/\n" * size + "start: WORD",
    "numbers": lambda size: f'start: "a"{{{"9" * size}}}',
    "comment": lambda size: 'start: "a"\n//' + "x" * size,
    "empty": lambda size: "\n" * size,
    "no rule": lambda size: "x" * size,
    "no letters": lambda size: "\x00\ud7ff🙂{}" * size,
    "panic": lambda size: f"start: /{PANIC}/" + " " * size,
}

# --- regexes --------------------------------------------------------------------------------------------------------

REGEXES = {
    "empty": lambda size: "a" * min(size, 0),
    "letters": lambda size: "a" * size,
    "brackets": lambda size: "(" * size + "a" + ")" * size,
    "unclosed": lambda size: "(" * size,
    "alternatives": lambda size: "|".join(f"a{each:x}" for each in range(size + 1)),
    "classes": lambda size: f"[{''.join(chr(256 + 2 * each) for each in range(min(size, 8000)))}a]",
    "words": lambda size: f"\\w{{{size}}}\\W{{{size}}}",
    "letters of all scripts": lambda size: f"(\\p{{L}}|\\p{{N}}){{{size}}}",
    "counted": lambda size: f"a{{{size * 4000}}}",
    "counted thrice": lambda size: f"((a{{{size}}}){{1000}}){{10}}",
    "late choice": lambda size: f"(.|\\n)*a(.|\\n){{{size % 64}}}",
    "stars": lambda size: "(" * min(size, 300) + "a*" + ")*" * min(size, 300),
    "optional": lambda size: "a?" * size + "a" * size,
    "huge count": lambda size: f"a{{{'9' * size}}}",
    "words of any length": lambda size: "|".join(["(\\w+ )*x"] * (size % 200 + 1)),
    "look around": lambda size: f"(?=a{{{size}}})(?<!b)\\b(?P<x>a)\\1",
    "flags": lambda size: "(?isx-u)" * size + "a",
    "panic": lambda size: PANIC + "a" * (size % 3),
    "panics": lambda size: f"(({PANIC}){{{size % 9}}}|[^é]\\w)",
    "no letters": lambda size: "\\x{10FFFF}\\u{0}\\Q\x00" * size,
}

# --- JSON schemas ---------------------------------------------------------------------------------------------------


def _chain(size, form):
    """References that follow each other, each inside a part of a schema."""
    names = {f"d{each:x}": form({"$ref": f"#/$defs/d{each + 1:x}"}) for each in range(size)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{size:x}": {"type": "integer"}}}


def _deep(size, form):
    """Schemas inside each other; as deep as Python writes JSON; fewer where each holds two of the next."""
    made = {"type": "integer"}
    most = 8 if json.dumps(form({"x": 1})).count('"x"') > 1 else 250
    for _ in range(min(size, most)):
        made = form(made)
    return made


_FORMS = {
    "objects": lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
    "optional": lambda inner: {"type": "object", "properties": {"a": inner, "b": inner}},
    "anyOf": lambda inner: {"anyOf": [inner, {"type": "string"}]},
    "oneOf": lambda inner: {"oneOf": [inner, {"type": "null"}]},
    "allOf": lambda inner: {"allOf": [inner, inner]},
    "items": lambda inner: {"type": "array", "items": inner},
    "pair": lambda inner: {"type": "array", "prefixItems": [inner, inner], "minItems": 2},
    "others": lambda inner: {"type": "object", "additionalProperties": inner},
    "patterns": lambda inner: {"type": "object", "patternProperties": {"^a+$": inner}},
    "reference": lambda inner: inner,
    "not": lambda inner: {"not": inner},
    "if": lambda inner: {"if": inner, "then": inner, "else": inner},
}

SCHEMAS = {
    **{name: lambda size, form=form: _chain(size, form) for name, form in _FORMS.items()},
    **{f"{name}, deep": lambda size, form=form: _deep(size, form) for name, form in _FORMS.items()},
    "doubled": lambda size: _chain(min(size, 40), _FORMS["pair"]),
    "nothing": lambda _: {},
    "circle": lambda _: {"$ref": "#"},
    "wide": lambda size: wide(size),  # noqa: PLW0108 - defined below
    "wide, any": lambda size: {"type": "object", "properties": {f"p{each:x}": {} for each in range(size)}},
    "enum": lambda size: {"enum": [f"{each:x}" for each in range(size + 1)]},
    "const": lambda size: {"const": "a" * size},
    "any of many": lambda size: {"anyOf": [{"const": each} for each in range(size + 1)]},
    "all of many": lambda size: {"allOf": [{"type": "integer", "minimum": each} for each in range(size + 1)]},
    "pattern": lambda size: {"type": "string", "pattern": f"^((a{{{size}}}){{1000}}){{10}}$"},
    "late choice": lambda size: {"type": "string", "pattern": f"^(.|\n)*a(.|\n){{{size % 40}}}$"},
    "pattern that panics": lambda size: {"type": "string", "pattern": PANIC, "maxLength": size},
    "lengths": lambda size: {"type": "string", "minLength": size * 4000, "maxLength": size * 5000},
    "counts": lambda size: {"type": "array", "minItems": size * 4000, "items": {"type": "boolean"}},
    "numbers": lambda size: {"type": "number", "minimum": -(10 ** (size % 4000)), "multipleOf": 1 / (size + 1)},
    "integers": lambda size: {"type": "integer", "exclusiveMaximum": 10 ** (size % 4000), "multipleOf": size + 1},
    "formats": lambda size: {"type": "string", "format": ["date-time", "uuid", "email", "x" * size][size % 4]},
    "unique": lambda size: {"type": "array", "uniqueItems": True, "contains": {"const": 1}, "minContains": size},
    "needed": lambda size: {"type": "object", "required": [f"p{each:x}" for each in range(size)]},
    "far reference": lambda size: {"$ref": ["file:///etc/hosts", "http://127.0.0.1:1/x", "#/a", "x"][size % 4]},
    "types": lambda size: {"type": ["string", "object", "array", "null"] * (size % 50 + 1)},
    "wrong": lambda size: {"type": size, "properties": [], "items": "x", "enum": {}},
    "unknown": lambda size: {"x-guidance": {"whitespace_pattern": f"(a{{{size}}}){{10}}"}, f"x{size}": None},
}


def wide(size, name="p"):
    """A schema of many properties, which takes long to compile."""
    return {"type": "object", "properties": {f"{name}{each}": {} for each in range(size)}}


def nested(size, kind="array"):
    """The text of a JSON value that is too deep for most readers."""
    return "[" * size + "]" * size if kind == "array" else '{"a":' * size + "{}" + "}" * size


# --- places where a grammar stands ----------------------------------------------------------------------------------


def tool(schema, name="f"):
    """A tool with these parameters."""
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def schema_format(schema):
    """A field response_format."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def with_needed(path, fields):
    """A legal body with these fields."""
    if path == "/v1/completions":
        return {"prompt": "x", "max_tokens": 2, **fields}
    if path == "/v1/chat/completions" or path.startswith("/v1/messages"):
        return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    if path == "/v1/responses":
        return {"input": "x", "max_output_tokens": 2, **fields}
    return {("tokens" if path == "/detokenize" else "prompt"): [], **fields}


def body_bytes(path, fields):
    """The same as bytes."""
    return json.dumps(with_needed(path, fields)).encode()
