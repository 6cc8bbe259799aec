"""Dialects of tool calls: what is written fits the grammar and is read back; what the grammar makes fits the schema."""

import itertools
import json
import random
import re

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftproof.server.dialects.families import DIALECTS, Call
from draftproof.server.dialects.json_schema import without_idle_names
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
    for begin, end in itertools.pairwise(edges):
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


@pytest.mark.grid(9)
@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
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


@pytest.mark.parametrize("name", DIALECTS)
def test_equal_references_into_different_definitions(name):
    """Each function has definitions of its own, whatever they are called."""
    functions = [
        {
            "name": each,
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/A"}},
                "required": ["a"],
                "$defs": {"A": {"type": "array", "items": {"type": kind}}},
            },
        }
        for each, kind in (("f", "integer"), ("g", "boolean"))
    ]
    tools = tools_of(DIALECTS[name], functions)
    for name_of, value, legal in (("f", 7, True), ("f", True, False), ("g", True, True), ("g", 7, False)):
        assert fits(tools, DIALECTS[name].written([Call(name_of, {"a": [value]})])) is legal


def test_names_that_all_fit_are_left_out_of_schemas():
    """As generators write them for maps; a property of that name is none, and others stay."""
    idle = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    kept = {"type": "object", "additionalProperties": {"type": "integer"}}
    named = {"propertyNames": {"type": "string"}}
    schema = {**idle, "properties": {**named, "a": idle, "b": {"anyOf": [idle, {"items": idle}]}}, "default": named}
    assert without_idle_names(schema) == {
        **kept,
        "properties": {**named, "a": kept, "b": {"anyOf": [kept, {"items": kept}]}},
        "default": named,
    }
    binding = {"propertyNames": {"pattern": "x"}}
    assert without_idle_names(binding) == binding


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"o": {"k": [true, null]}, "s": "it\'s"}}\n</tool_call>'),
        (
            "qwen-xml",
            (
                '<tool_call>\n<function=f>\n<parameter=o>\n{"k": [true, null]}\n</parameter>\n<parameter=s>\nit\'s\n'
                "</parameter>\n</function>\n</tool_call>"
            ),
        ),
        (
            "glm",
            (
                '<tool_call>f\n<arg_key>o</arg_key>\n<arg_value>{"k": [true, null]}</arg_value>\n<arg_key>s</arg_key>\n'
                "<arg_value>it's</arg_value>\n</tool_call>"
            ),
        ),
        ("lfm2", '<|tool_call_start|>[f(o={"k": [True, None]}, s="it\'s")]<|tool_call_end|>'),
        ("olmo", '<function_calls>f(o={"k": [true, null]}, s="it\'s")</function_calls>'),
        ("gemma", '<|tool_call>call:f{o:{k:[true,null]},s:<|"|>it\'s<|"|>}<tool_call|>'),
        ("functiongemma", "<start_function_call>call:f{o:{k:[true,null]},s:<escape>it's<escape>}<end_function_call>"),
        (
            "minimax",
            (
                '<minimax:tool_call>\n<invoke name="f">\n<parameter name="o">{"k": [true, null]}</parameter>\n'
                '<parameter name="s">it\'s</parameter>\n</invoke>\n</minimax:tool_call>'
            ),
        ),
        (
            "dsml",
            (
                '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
                '<｜DSML｜parameter name="o" string="false">{"k": [true, null]}</｜DSML｜parameter>\n'
                '<｜DSML｜parameter name="s" string="true">it\'s</｜DSML｜parameter>\n'
                "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
            ),
        ),
        (
            "harmony",
            (
                "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
                '{"o": {"k": [true, null]}, "s": "it\'s"}'
            ),
        ),
        ("mistral-args", '[TOOL_CALLS]f[ARGS]{"o": {"k": [true, null]}, "s": "it\'s"}'),
        (
            "kimi",
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
                '{"o": {"k": [true, null]}, "s": "it\'s"}<|tool_call_end|><|tool_calls_section_end|>'
            ),
        ),
        (
            "deepseek",
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
                '{"o": {"k": [true, null]}, "s": "it\'s"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            ),
        ),
    ],
)
def test_what_is_written(name, text):
    """The texts themselves: the other tests would pass if writing, grammar and reading were wrong in the same way."""
    call = Call("f", {"o": {"k": [True, None]}, "s": "it's"})
    assert DIALECTS[name].written([call]) == text


def test_single_quotes_are_read_and_allowed():
    dialect = DIALECTS["lfm2"]
    tools = tools_of(dialect, [{"name": "get_weather", "parameters": WEATHER}])
    text = dialect.marker + "[get_weather(city='O\\'s \"lo\"', days=3)]<|tool_call_end|>"
    assert fits(tools, text)
    assert [json.loads(arguments) for _, arguments in read(tools, text)[1]] == [{"city": 'O\'s "lo"', "days": 3}]


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
            value = json.loads(arguments, parse_float=lambda _: 0.5)  # 7e777 is a number, but Python has none for it
            assert jsonschema_rs.is_valid(schema, value), (schema, text, arguments)
            count += len(arguments) > 2
    return count


@pytest.mark.grid(5)
@pytest.mark.parametrize("name", DIALECTS)
def test_whatever_the_grammar_allows_fits_the_schema(name):
    assert check_wandering(DIALECTS[name], range(40)) > 10


TAG = re.compile(r"<[^<>=\s]+>|\[[A-Z_]{2,}\]")


def with_special_tokens(dialect):
    """A tokenizer of bytes in which the dialect's tags are special tokens, and their ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={each: place for place, each in enumerate([*letters, "<eos>"])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tags = sorted({tag for text in dialect.texts for tag in TAG.findall(text)})
    made.add_special_tokens(["<eos>", *tags])
    return made, {tag: made.token_to_id(tag) for tag in tags}


@pytest.mark.grid(18)
@pytest.mark.parametrize("name", [name for name, each in DIALECTS.items() if any(map(TAG.search, each.texts))])
def test_special_tokens_as_tags(name):
    """Tags that are tokens are drawn as these tokens, and their letters by themselves are none."""
    dialect = DIALECTS[name]
    tokenizer, specials = with_special_tokens(dialect)
    reads = from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"))  # noqa: S106 - no password
    function = {"name": "get_weather", "parameters": WEATHER}
    calls = [Call("get_weather", {"city": "<b>O's\n", "days": 3}), Call("get_weather", {"city": "", "days": 4})]
    calls = calls if dialect.parallel else calls[:1]
    text = dialect.written(calls)
    for must in (True, False):
        tools = tools_of(dialect, [function], must=must, specials=specials)
        said = "" if must or dialect.plain else "Well <b> "

        def fits_as(ids, tools=tools):
            matcher = LLMatcher(reads, LLMatcher.grammar_from_lark(tools.grammar(None)), log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

        ids = tokenizer.encode(said + text).ids
        assert specials[TAG.search(text)[0]] in ids
        assert fits_as(ids)
        assert read(tools, said + text)[0] == said
        assert pairs(read(tools, said + text)[1]) == as_pairs(calls)
        for place, token in enumerate(ids):
            if token in specials.values():
                tag = next(tag for tag, each in specials.items() if each == token)
                spelt = [own for letter in tag for own in tokenizer.encode(letter).ids]
                assert not fits_as([*ids[:place], *spelt, *ids[place + 1 :]])


@pytest.mark.parametrize("name", DIALECTS)
def test_text_before_calls(name):
    dialect = DIALECTS[name]
    tools = tools_of(dialect, [{"name": "get_weather", "parameters": WEATHER}], must=False)
    call = dialect.written([Call("get_weather", {"city": "Oslo", "days": 3})])
    said = "Let me look < [ { now. " if dialect.marker and not dialect.plain else ""
    assert fits(tools, said + call)
    whole = read(tools, said + call)
    assert (whole[0], pairs(whole[1])) == (said, [("get_weather", '{"city": "Oslo", "days": 3}')])
    assert read(tools, said + call, range(1, len(said + call))) == whole
    plain = f"{dialect.plain}No call."
    assert fits(tools, plain)
    assert read(tools, plain, range(1, len(plain))) == ("No call.", [])
    assert fits(tools, "No call.") is not bool(dialect.plain)
    assert not fits(tools, said + call.replace("3", "2"))
