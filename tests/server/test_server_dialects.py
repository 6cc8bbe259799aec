"""Dialects of tool calls: what is written fits the grammar and is read back, and what the grammar makes fits its schema."""

import json
import random

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from draftproof.server.dialects.families import DIALECTS, Call
from draftproof.server.schemas import Function
from draftproof.server.tools import ToolReader, ToolSet
from support.call_schemas import LETTERS, as_pairs, random_arguments, random_function

BYTES = LLTokenizer("byte")
NAMES = ["f", "get_weather", "a.b:c/d-e"]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tools_of(dialect, functions, **options):
    made = tuple(Function.model_validate(each) for each in functions)
    return ToolSet(dialect, made, **{"must": True, "several": dialect.parallel, "specials": {}, **options})


def matcher_of(tools):
    made = LLMatcher(BYTES, LLMatcher.grammar_from_lark(tools.grammar(None)), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def fits(tools, text):
    matcher, tokens = matcher_of(tools), BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def read(tools, text, cuts=()):
    """Text and calls of an answer that comes in pieces."""
    reader, said, calls = ToolReader(tools), "", []
    edges = [0, *cuts, len(text)]
    for begin, end in zip(edges, edges[1:], strict=False):
        more, parts = reader.read(text[begin:end], last=end == len(text))
        said += more
        for part in parts:
            if part.place == len(calls):
                calls.append([part.name, ""])
            calls[part.place][1] += part.arguments
    assert reader.count == len(calls)
    return said, calls


def pairs(calls):
    return [(name, json.dumps(json.loads(arguments), sort_keys=True)) for name, arguments in calls]


def check_random(dialect, seed):
    """Calls of random functions are written, allowed and read back, in whatever pieces they come."""
    rng = random.Random(seed)
    functions = [random_function(rng, name) for name in rng.sample(NAMES, rng.randint(1, 3))]
    tools = tools_of(dialect, functions)
    chosen = [rng.choice(functions) for _ in range(rng.randint(1, 3) if dialect.parallel else 1)]
    calls = [Call(each["name"], random_arguments(rng, each)) for each in chosen]
    text = dialect.written(calls)
    assert fits(tools, text), (functions, text)
    whole = read(tools, text)
    assert whole[0] == ""
    assert pairs(whole[1]) == as_pairs(calls)
    assert read(tools, text, range(1, len(text))) == whole
    assert read(tools, text, sorted(rng.sample(range(len(text)), min(5, len(text))))) == whole


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("part", range(4))
def test_written_calls_are_allowed_and_read_back(name, part):
    for seed in range(part * 25, part * 25 + 25):
        check_random(DIALECTS[name], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIALECTS)
def test_more_written_calls_are_allowed_and_read_back(name):
    for seed in range(1000, 1500):
        check_random(DIALECTS[name], seed)


@pytest.mark.parametrize("name", DIALECTS)
def test_what_the_grammar_refuses(name):
    dialect = DIALECTS[name]
    tools = tools_of(dialect, [{"name": "get_weather", "parameters": WEATHER}])
    assert fits(tools, dialect.written([Call("get_weather", {"city": "Oslo", "days": 3})]))
    for call in (
        Call("get_weather", {"city": "Oslo", "days": 2}),
        Call("get_weather", {"city": "Oslo", "days": "x"}),
        Call("get_weather", {"city": "Oslo", "days": 3.5}),
        Call("get_weather", {"city": "Oslo"}),
        Call("get_weather", {"days": 3}),
        Call("get_weather", {}),
        Call("get_weather", {"city": "Oslo", "days": 3, "other": 1}),
        Call("get_news", {"city": "Oslo", "days": 3}),
    ):
        assert not fits(tools, dialect.written([call])), call
    two = dialect.written([Call("get_weather", {"city": "Oslo", "days": 3})] * 2)
    assert fits(tools, two) is dialect.parallel
    assert not fits(tools_of(dialect, [{"name": "get_weather", "parameters": WEATHER}], several=False), two)


def wander(tools, rng, most):
    """A text that the grammar allows, by a random walk; None where it does not end."""
    matcher, text = matcher_of(tools), b""
    moves = [*filter(None, tools.format.texts), *NAMES, "p0", "p1", "null", "7", "-1", '"', "', ", "]", "}", ")"]
    for _ in range(most):
        if matcher.is_accepting():
            return text.decode()
        forced = matcher.compute_ff_tokens()
        tries = [forced] if forced else [BYTES.tokenize_str(each) for each in rng.choices([*moves, *LETTERS], k=40)]
        found = next((each for each in tries if matcher.validate_tokens(each) == len(each)), None)
        if found is None:
            allowed = [place for place, each in enumerate(matcher.compute_logit_bias()[:256]) if each]
            found = [rng.choice([each for each in allowed if 32 <= each < 127] or allowed)]
        assert matcher.try_consume_tokens(found) == len(found)
        text += bytes(found)
    return None


def check_wandering(dialect, seeds):
    """Whatever the grammar allows is read as calls whose arguments fit their schemas; how many there were."""
    count = 0
    for seed in seeds:
        rng = random.Random(seed)
        functions = [random_function(rng, name) for name in NAMES[: rng.randint(1, 3)]]
        tools = tools_of(dialect, functions)
        text = wander(tools, rng, 200)
        if text is None:
            continue
        said, calls = read(tools, text)
        assert said == ""
        assert calls
        for name, arguments in calls:
            schema = next(each["parameters"] for each in functions if each["name"] == name)
            assert jsonschema_rs.is_valid(schema, json.loads(arguments)), (schema, text, arguments)
            count += len(arguments) > 2
    return count


@pytest.mark.parametrize("name", DIALECTS)
def test_whatever_the_grammar_allows_fits_the_schema(name):
    assert check_wandering(DIALECTS[name], range(40)) > 10
