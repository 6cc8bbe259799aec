"""Which dialect a chat template teaches: templates in the style of each family, and what is said where none fits."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from draftproof.server.dialects import detection
from draftproof.server.dialects.detection import detect_format, fitted, format_of
from draftproof.server.dialects.families import DIALECTS, Call
from draftproof.server.errors import ApiError
from draftproof.server.parse_request import messages_of
from draftproof.server.schemas import Function, Message
from draftproof.server.settings import TOOL_FORMATS
from draftproof.server.tools import ToolSet
from support.call_templates import NO_HISTORY, TEMPLATES, UNKNOWN, template
from support.serving import error_of, post, running
from support.tools import ASK, CHAT, TOOLS, WEATHER, Weather, stories


def tokenizer_of(text):
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    made.chat_template = text
    return made


@pytest.fixture
def unsigned(monkeypatch):
    """No template is known by a marker in it."""
    found = {name: replace(each, signs=("no such text",)) for name, each in DIALECTS.items()}
    monkeypatch.setattr(detection, "DIALECTS", found)


@pytest.mark.usefixtures("unsigned")
@pytest.mark.parametrize("name", DIALECTS)
def test_a_template_in_the_style_of_each_family(name):
    assert format_of(tokenizer_of(TEMPLATES[name]), "auto").name == name


def test_the_guide_lists_every_dialect():
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "serve.md").read_text(encoding="utf-8")
    table = guide[guide.index("| `--tool-format` |") :].partition("\n\n")[0]
    listed = [re.match(r"\| `([^`]+)` \| ([^|]+) \|", line).groups() for line in table.splitlines()[2:]]
    assert sorted(listed) == sorted((each.name, each.models) for each in DIALECTS.values())
    assert {name for name, _ in listed} == {*TOOL_FORMATS} - {"auto"}


@pytest.mark.usefixtures("unsigned")
def test_three_dialects_with_one_marker():
    """What told them apart before, the marker in the template, is the same in all of them."""
    for name in ("hermes", "qwen-xml", "glm"):
        assert "<tool_call>" in TEMPLATES[name]
        assert detect_format(tokenizer_of(TEMPLATES[name])).dialect.name == name


@pytest.mark.usefixtures("unsigned")
def test_a_template_may_write_words_as_python_has_them():
    words = TEMPLATES["qwen-xml"].replace("{{ v }}", "{{ v | string }}")
    assert detect_format(tokenizer_of(words)).dialect.name == "qwen-xml"


def test_arguments_as_text_only_where_the_template_needs_it():
    assert detect_format(tokenizer_of(TEMPLATES["deepseek"])).as_text
    assert not detect_format(tokenizer_of(TEMPLATES["hermes"])).as_text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (UNKNOWN, "writes them in none of the known ways"),
        (NO_HISTORY, "leaves the calls of earlier messages out and names no known marker"),
        (template("{{ raise_exception('no calls') }}", hint="JSON"), "refuses messages with calls and names no"),
        (TEMPLATES["hermes"].replace('"arguments"', '"args"'), "writes them in none of the known ways"),
    ],
)
def test_a_template_that_no_dialect_reproduces(text, why):
    with pytest.raises(ApiError, match="--tool-format") as caught:
        format_of(tokenizer_of(text), "auto")
    assert why in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert format_of(tokenizer_of(text), "glm").name == "glm"


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        ("<tool_call>", "hermes"),
        ("<tool_call>\n<function=NAME>\n<parameter=KEY>", "qwen-xml"),
        ("<tool_call>NAME\n<arg_key>K</arg_key>\n<arg_value>V</arg_value>", "glm"),
        ("<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>", "glm-compact"),
        ('{"name": NAME, "parameters": dictionary}', "llama"),
        ("<|tool_list_start|>", "lfm2"),
    ],
)
def test_signs_count_where_the_template_leaves_calls_out(hint, name):
    assert detect_format(tokenizer_of(NO_HISTORY.replace("HINT", hint))).dialect is DIALECTS[name]


def test_signs_do_not_count_where_the_template_writes_calls():
    assert "<tool_call>" in UNKNOWN
    assert detect_format(tokenizer_of(UNKNOWN)).dialect is None


def test_it_is_found_out_once(monkeypatch):
    counted = []
    monkeypatch.setattr(detection, "_rendered", lambda *args, **_: counted.append(args))
    tokenizer = tokenizer_of(TEMPLATES["hermes"])
    for _ in range(3):
        detect_format(tokenizer)
    once = len(counted)
    assert once
    tokenizer.chat_template = TEMPLATES["glm"]
    detect_format(tokenizer)
    assert len(counted) == 2 * once


def test_a_template_that_never_ends(monkeypatch):
    monkeypatch.setattr(detection, "_SECONDS", 0.2)
    loop = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    with pytest.raises(ApiError, match=r"did not end within 0\.2 s") as caught:
        format_of(tokenizer_of(TEMPLATES["hermes"] + loop), "auto")
    assert caught.value.status == 504


HISTORY = [
    Message.model_validate(each)
    for each in (
        {"role": "user", "content": "Both?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "call_0123456789", "function": {"name": "now", "arguments": "{}"}},
                {"id": "abcdefghi", "function": {"name": "look", "arguments": '{"at": "é"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "noon"},
        {"role": "tool", "tool_call_id": "elsewhere", "content": "?"},
    )
]


def shown(name, given="auto"):
    _, said, first, second = fitted(messages_of(HISTORY), tokenizer_of(TEMPLATES[name]), given)
    assert (first["name"], second.get("name")) == ("now", None)
    return [each["id"] for each in said["tool_calls"]], first["tool_call_id"], said["tool_calls"][1]["function"]


def test_earlier_calls_as_each_template_takes_them():
    ids = ["call_0123456789", "abcdefghi"]
    assert shown("hermes") == (ids, ids[0], {"name": "look", "arguments": {"at": "é"}})
    assert shown("deepseek") == (ids, ids[0], {"name": "look", "arguments": '{"at": "é"}'})
    assert shown("kimi")[:2] == (["functions.now:0", "functions.look:1"], "functions.now:0")
    (first, second), result, _ = shown("mistral")
    assert len(first) == 9
    assert first.isalnum()
    assert (second, result) == ("abcdefghi", first)
    assert shown("hermes", "mistral")[0] == [first, second]


def test_calls_that_the_template_leaves_out_are_content():
    tokenizer = tokenizer_of(NO_HISTORY.replace("HINT", "<tool_call>"))
    _, said, first, _ = fitted(messages_of(HISTORY), tokenizer, "auto")
    assert "tool_calls" not in said
    written = DIALECTS["hermes"].written([Call("now", {}), Call("look", {"at": "é"})])
    assert (said["content"], first["name"]) == (written, "now")
    text = tokenizer.apply_chat_template([said], tools=TOOLS, tokenize=False)
    assert written in text
    bare = tokenizer.apply_chat_template([messages_of(HISTORY)[1]], tools=TOOLS, tokenize=False)
    assert written not in bare, "else the test says nothing"


def test_messages_without_calls_stay_as_they_are():
    said = [{"role": "user", "content": "hello"}]
    assert fitted(said, None, "auto") == said


SERVED = ["qwen-xml", "glm", "gemma", "lfm2", "mistral-id"]


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", SERVED)
def test_served_calls_fit_their_schemas_with_and_without_drafts(name):
    engine = stories(drafter="model", stopper="fixed:4")
    engine.tokenizer.chat_template = TEMPLATES[name].replace("{{ tools | tojson }}", "")  # the context is short
    complete = []
    with running(engine) as (base, _):
        for seed in range(2):
            for speculation in (True, False):
                fields = {"temperature": 1.0, "seed": seed, "speculation": speculation, "max_tokens": 220}
                made = post(base, CHAT, messages=ASK, tools=TOOLS, tool_choice="required", **fields)
                assert made.status_code == 200, made.text
                (choice,) = made.json()["choices"]
                calls = choice["message"]["tool_calls"]
                complete += calls[: len(calls) - (choice["finish_reason"] == "length")]
                for call in complete:
                    if call["function"]["name"] == "get_weather":
                        Weather.model_validate_json(call["function"]["arguments"])
                    else:
                        assert json.loads(call["function"]["arguments"]) == {}
        result = {"role": "tool", "tool_call_id": complete[0]["id"], "content": "sunny"}
        again = [*ASK, {"role": "assistant", "tool_calls": complete[:1]}, result]
        answer = post(base, CHAT, messages=again, max_tokens=2)
        assert answer.status_code == 200, answer.text
    assert len(complete) > 3


def chain(end, size):
    """Definitions that each refer to the next one twice: as many ways as a power of two."""
    made = {f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}] * 2} for place in range(size)}
    return {**made, f"d{size}": end}


def city(schema, **options):
    return {**WEATHER, "properties": {"city": schema}, "required": ["city"], **options}


UNWRITABLE = [
    ({**WEATHER, "minProperties": 1}, "minProperties"),
    ({**WEATHER, "anyOf": [{"required": ["city"]}, {"required": ["days"]}]}, "2 alternatives"),
    (city({"$ref": "#/none"}), "#/$defs/"),
    (city({"$ref": "#/$defs/a"}), "not in it"),
    (city({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"$ref": "#/$defs/a"}}}), "32 references"),
    (city({"$ref": "#/$defs/d0"}, **{"$defs": chain({"type": "string"}, 7)}), "64 alternatives"),
    (city({"$ref": "#/$defs/d0"}, **{"$defs": chain({"enum": []}, 12)}), "512 references"),
    ({**WEATHER, "properties": []}, "properties"),
    (city({"type": "string", "not": {}}), "not"),
    (city({"type": [["a"]]}), "type"),
    (city(7), "int"),
    (city({"type": "string", "minLength": 9, "maxLength": 2}), "grammar"),
    (city({"enum": []}), "grammar"),
    (city({"enum": ["x\n</parameter>"]}), "without any value"),
]


@pytest.mark.parametrize(("parameters", "said"), UNWRITABLE, ids=range(len(UNWRITABLE)))
def test_a_schema_that_a_dialect_cannot_keep_to(parameters, said):
    function = Function.model_validate({"name": "f", "parameters": parameters})
    tools = ToolSet(DIALECTS["qwen-xml"], (function,), must=True, several=True, specials={})
    if said == "grammar":  # only llguidance knows
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(tools.grammar(None)))
        return
    with pytest.raises(ApiError, match=re.escape(said)) as caught:
        tools.grammar(None)
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_an_unwritable_schema_is_a_400():
    engine = stories(drafter="none")
    engine.tokenizer.chat_template = TEMPLATES["qwen-xml"]
    with running(engine) as (base, _):
        for parameters in (UNWRITABLE[0][0], city({"type": "string", "minLength": 9, "maxLength": 2})):
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
            answer = post(base, CHAT, messages=ASK, tools=[tool], tool_choice="required", max_tokens=2)
            assert answer.status_code == 400, answer.text
            assert error_of(answer)["param"] == "tools"
