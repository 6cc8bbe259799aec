"""Random functions with calls of them that fit, for dialects of tool calls."""

import json
import random

LETTERS = ["a", "Z", "7", " ", "\n", '"', "'", "\\", "{", "}", "[", "]", "<", ">", "/", "é", "漢", ",", ":", "=", "|", "-"]
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


def _schema(rng, depth):
    kinds = ["text", "short", "enum", "integer", "number", "boolean", "nullable", "mixed", "const", "tree"]
    kind = rng.choice(kinds + ["array", "object", "either"] * (depth > 0))
    if kind == "text":
        return {"type": "string", "description": "A text."}
    if kind == "short":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)}
    if kind == "enum":
        return {"enum": ["C", "F", 'a "b"', "it's"]}
    if kind == "integer":
        return {"type": "integer", "minimum": -5, "maximum": 300}
    if kind in ("number", "boolean"):
        return {"type": kind}
    if kind == "nullable":
        return {"anyOf": [{"type": rng.choice(["string", "integer", "boolean"])}, {"type": "null"}], "default": None}
    if kind == "mixed":
        return {"type": rng.choice([["string", "integer"], ["string", "null"], ["string", "array"], ["number", "null"]])}
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, True, None])}
    if kind == "tree":
        return {"$ref": "#/$defs/Tree"}
    if kind == "array":
        return {"type": "array", "items": _schema(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 3}
    if kind == "object":
        inner = {f"in {place}": _schema(rng, depth - 1) for place in range(rng.randint(1, 3))}
        required = [each for each in inner if rng.random() < 0.6]
        return {"type": "object", "properties": inner, "required": required, "additionalProperties": False}
    return {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "array", "items": {"type": "string"}, "maxItems": 2}]}


def random_value(rng, schema):
    """A value that fits one of the schemas made here."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    if "$ref" in schema:
        return {"size": rng.randint(0, 9)} | ({"left": random_value(rng, schema)} if rng.random() < 0.3 else {})
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return random_value(rng, rng.choice(schema[key]))
    kind = rng.choice(schema["type"]) if isinstance(schema["type"], list) else schema["type"]
    if kind == "string":
        made = random_text(rng, schema.get("minLength", 0), schema.get("maxLength", 12))
        return f"a{made}"[: schema.get("maxLength", 12)] or "a"  # no text that is read as another kind of value
    if kind == "integer":
        return rng.randint(schema.get("minimum", -9), schema.get("maximum", 99))
    if kind == "array":
        items = schema.get("items", {"type": "integer"})
        size = rng.randint(schema.get("minItems", 0), schema.get("maxItems", 2))
        return [random_value(rng, items) for _ in range(size)]
    if kind == "object":
        found = schema["properties"].items()
        return {key: random_value(rng, own) for key, own in found if key in schema["required"] or rng.random() < 0.5}
    return {"number": rng.choice([0, -1.5, 2e10, 7]), "boolean": rng.random() < 0.5, "null": None}[kind]


def as_pairs(calls):
    """Names and arguments, to compare."""
    return [(each.name, json.dumps(each.arguments, sort_keys=True)) for each in calls]


def rng_of(seed):
    """A generator of its own for a seed."""
    return random.Random(seed)
