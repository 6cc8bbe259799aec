"""Random functions with calls of them that fit, for dialects of tool calls."""

import json

LETTERS = [*"aZ7 \n\"'\\{}[]<>/é漢,:=|-"]
PIECES = ["null", "true", "</param", "</arg_val", '<|"', "<esc", "\\n", "{}", "[1]", "5"]  # nearly markers, nearly JSON


def random_text(rng, least=0, most=8):
    """A text that may look like something else; it holds no marker of a dialect."""
    size = rng.randint(least, most)
    if size >= 8 and rng.random() < 0.5:
        return rng.choice(PIECES).ljust(least, "a")[:most]
    return "".join(rng.choice(LETTERS) for _ in range(size))


def random_function(rng, name):
    """The name and parameters of a function."""
    names = [f"p{place}" for place in range(rng.randint(0, 5))]
    return {
        "name": name,
        "parameters": {
            "type": "object",
            "properties": {each: _schema(rng, 2) for each in names},
            "required": [each for each in names if rng.random() < 0.6],
            "additionalProperties": False,
            "$defs": {
                "Tree": {
                    "type": "object",
                    "properties": {"size": {"type": "integer"}, "left": {"$ref": "#/$defs/Tree"}},
                    "required": ["size"],
                    "additionalProperties": False,
                }
            },
        },
    }


def random_arguments(rng, function):
    """Arguments that fit a function."""
    given = function["parameters"]
    return {
        name: random_value(rng, schema)
        for name, schema in given["properties"].items()
        if name in given["required"] or rng.random() < 0.5
    }


_TREE = {"$ref": "#/$defs/Tree"}
_LEAF = {"type": ["string", "number", "null", "boolean"]}
_LISTS = {"type": "array", "items": {"type": "string"}, "maxItems": 2}
_SCHEMAS = {
    "text": lambda _: {"type": "string", "description": "A text."},
    "short": lambda rng: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)},
    "enum": lambda _: {"enum": ["C", "F", 'a "b"', "it's"]},
    "integer": lambda _: {"type": "integer", "minimum": -5, "maximum": 300},
    "number": lambda _: {"type": "number"},
    "boolean": lambda _: {"type": "boolean"},
    "nullable": lambda rng: {
        "anyOf": [{"type": rng.choice(["string", "integer", "boolean"])}, {"type": "null"}],
        "default": None,
    },
    "mixed": lambda rng: {"type": [rng.choice(["string", "number"]), rng.choice(["integer", "null", "array"])]},
    "const": lambda rng: {"const": rng.choice(["fixed", 7, True, None])},
    "tree": lambda _: _TREE,
    "map": lambda rng: {"type": "object", **rng.choice([{}, {"additionalProperties": {"type": "integer"}}])},
    "any": lambda _: {"description": "Any value."},
    "either": lambda _: {"oneOf": [{"type": "string", "maxLength": 4}, _LISTS]},
}


def _schema(rng, depth):
    kind = rng.choice([*_SCHEMAS, *["array", "object"] * (depth > 0)])
    if kind == "array":
        return {"type": "array", "items": _schema(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 3}
    if kind == "object":
        inner = {f"in {place}": _schema(rng, depth - 1) for place in range(rng.randint(1, 3))}
        required = [each for each in inner if rng.random() < 0.6]
        return {"type": "object", "properties": inner, "required": required, "additionalProperties": False}
    return _SCHEMAS[kind](rng)


def random_value(rng, schema):
    """A value that fits one of the schemas made here."""
    if "enum" in schema or "const" in schema:
        return rng.choice(schema["enum"]) if "enum" in schema else schema["const"]
    if "$ref" in schema:
        return {"size": rng.randint(0, 9)} | ({"left": random_value(rng, schema)} if rng.random() < 0.3 else {})
    if either := schema.get("anyOf") or schema.get("oneOf"):
        return random_value(rng, rng.choice(either))
    kinds = schema.get("type", [*_VALUES])
    kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
    return _VALUES[kind](rng, schema)


def _text_of(rng, schema):
    most = schema.get("maxLength", 12)
    made = random_text(rng, schema.get("minLength", 0), most)
    return f"a{made}"[:most]  # no text that is read as another kind of value


def _array_of(rng, schema):
    size = rng.randint(schema.get("minItems", 0), schema.get("maxItems", 2))
    return [random_value(rng, schema.get("items", _LEAF)) for _ in range(size)]


def _object_of(rng, schema):
    if "properties" not in schema:
        return {f"k{place}": random_value(rng, schema.get("additionalProperties", _LEAF)) for place in range(2)}
    found = schema["properties"].items()
    return {name: random_value(rng, own) for name, own in found if name in schema["required"] or rng.random() < 0.5}


_VALUES = {
    "string": _text_of,
    "array": _array_of,
    "object": _object_of,
    "integer": lambda rng, schema: rng.randint(schema.get("minimum", -9), schema.get("maximum", 99)),
    "number": lambda rng, _: rng.choice([0, -1.5, 2e10, 7]),
    "boolean": lambda rng, _: rng.random() < 0.5,
    "null": lambda *_: None,
}


def as_pairs(calls):
    """Names and arguments, to compare."""
    return [(each.name, json.dumps(each.arguments, sort_keys=True)) for each in calls]
