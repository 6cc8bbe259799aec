"""Tools: calls are legal and are read back whole, whole and streamed, for each format; and what is refused."""

import json
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from draftproof import Engine, SamplingParams
from draftproof.errors import UserError
from draftproof.server.dialects.families import DIALECTS
from draftproof.server.parse_request import messages_of
from draftproof.server.schemas import Function, Message
from draftproof.server.settings import Settings
from draftproof.server.tools import ToolReader, ToolSet, template_tools
from support.serving import error_of, post, running, small_engine
from support.tools import ASK, CHAT, TOOLS, WEATHER, Weather, stories


@pytest.fixture(scope="module")
def base():
    with running(stories(drafter="model", stopper="fixed:4")) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(base):
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


def ask(client, **options):
    return client.chat.completions.create(
        **{"model": "story", "messages": ASK, "tools": TOOLS, "max_tokens": 120, **options}
    )


def read_stream(chunks):
    """Text, calls and reason of a stream; every first part of a call has its id and name, and no other has."""
    text, calls, reason = "", [], None
    for chunk in chunks:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                assert part.id.startswith("call_")
                assert part.type == "function"
                calls.append([part.function.name, ""])
            else:
                assert part.index == len(calls) - 1
                assert part.id is part.function.name is None
            calls[part.index][1] += part.function.arguments
        reason = choice.finish_reason or reason
    return text, [tuple(call) for call in calls], reason


def read_whole(answer):
    message = answer.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", calls, answer.choices[0].finish_reason


@pytest.mark.grid(2)
@pytest.mark.parametrize("seed", range(4))
def test_required_calls_fit_their_schemas_streamed_as_whole(client, seed):
    made = ask(client, tool_choice="required", seed=seed, temperature=0.7)
    text, calls, reason = read_whole(made)
    assert text == ""
    assert made.choices[0].message.content is None
    assert len({call.id for call in made.choices[0].message.tool_calls}) == len(calls) >= 1
    complete = len(calls) - (reason == "length")
    assert reason == "tool_calls" or complete
    for name, arguments in calls[:complete]:
        if name == "get_weather":
            Weather.model_validate_json(arguments)
        else:
            assert (name, json.loads(arguments)) == ("now", {})
    assert read_stream(ask(client, tool_choice="required", seed=seed, temperature=0.7, stream=True)) == (
        text,
        calls,
        reason,
    )


def test_a_named_tool_is_called_once(client):
    made = ask(client, tool_choice={"type": "function", "function": {"name": "now"}}, seed=1)
    assert read_whole(made) == ("", [("now", "{}")], "tool_calls")


def test_a_map_as_generators_of_schemas_write_it(client):
    counts = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}}
    parameters = {"type": "object", "properties": {"counts": counts}, "required": ["counts"]}
    tool = {"type": "function", "function": {"name": "count", "parameters": parameters}}
    asked = {"model": "story", "messages": ASK, "tool_choice": "required", "max_tokens": 40, "seed": 1}
    assert client.chat.completions.create(tools=[tool], **asked).choices[0].message.tool_calls
    counts["propertyNames"]["pattern"] = "^a"
    with pytest.raises(openai.BadRequestError, match="propertyNames"):
        client.chat.completions.create(tools=[tool], **asked)


@pytest.mark.slow
def test_definitions_are_referred_to_without_a_sign(client):
    """As LiteLLM writes references, in the arguments of a tool and in a form beside tools."""
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "/$defs/A"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"A": {"enum": [41, 42]}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": parameters}}
    fields = {"model": "story", "messages": ASK, "max_tokens": 100, "seed": 1, "tools": tools}
    called = client.chat.completions.create(**fields, tool_choice="required").choices[0].message.tool_calls
    either = client.chat.completions.create(**fields, response_format=form).choices[0].message
    for text in [*(each.function.arguments for each in [*called, *(either.tool_calls or ())]), either.content or ""]:
        assert not text or json.loads(text)["a"] in (41, 42)


def test_calls_one_at_a_time(client):
    seeds = range(12)
    several = [len(read_whole(ask(client, tool_choice="required", seed=seed, max_tokens=200))[1]) for seed in seeds]
    assert max(several) > 1, "else the test says nothing"
    for seed in seeds:
        made = ask(client, tool_choice="required", seed=seed, max_tokens=200, parallel_tool_calls=False)
        assert len(read_whole(made)[1]) == 1


BEGIN = '<tool_call>\n{"name": "now", "arguments": '


def towards(client, text):
    """A bias that makes a model write this text, by an answer of one form that begins with it."""
    ids = httpx.post(str(client.base_url).removesuffix("/v1/") + "/tokenize", json={"prompt": text}).json()["tokens"]
    return {str(each): 60 for each in ids}


def test_the_model_may_choose(client):
    text, calls, reason = read_whole(ask(client, seed=1, max_tokens=20))
    assert text
    assert (calls, reason) == ([], "length")
    pushed = towards(client, "<tool_call>")
    made = ask(client, temperature=0, logit_bias=pushed, max_tokens=400)
    found = read_stream(ask(client, temperature=0, logit_bias=pushed, max_tokens=400, stream=True))
    assert found == read_whole(made)
    assert "<tool_call>" not in found[0]


def test_none_is_text_without_tools(client):
    made = ask(client, tool_choice="none", seed=1, max_tokens=20)
    bare = client.chat.completions.create(model="story", messages=ASK, seed=1, max_tokens=20)
    assert read_whole(made) == read_whole(bare)


def test_calls_and_results_go_back_to_the_model(client, base):
    made = ask(client, tool_choice="required", seed=2, parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "sunny"}
    answer = ask(client, messages=[*ASK, made, result], seed=3, max_tokens=8)
    assert answer.choices[0].message.content
    shown = post(base, "/tokenize", messages=[*ASK, json.loads(made.to_json()), result], tools=TOOLS)
    assert shown.status_code == 200, shown.text
    assert answer.usage.prompt_tokens == shown.json()["count"]


def test_what_the_template_is_given():
    call = {"id": "c1", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [
        Message.model_validate({"role": "assistant", "tool_calls": [call]}),
        Message.model_validate({"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]}),
    ]
    assert messages_of(messages) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
    ]
    (shown,) = template_tools([Function(name="now")])
    assert shown["function"]["parameters"]["type"] == "object"


def test_a_call_that_is_cut_off(client):
    text, calls, reason = read_whole(ask(client, tool_choice="required", seed=1, max_tokens=16))
    assert (text, reason) == ("", "length")
    assert len(calls) <= 1


def test_pydantic_tools_are_parsed(client):
    class Order(pydantic.BaseModel):
        """An order."""

        size: Literal["small", "large"]
        count: Literal[1, 2, 3]

    made = client.chat.completions.parse(
        model="story",
        messages=ASK,
        tools=[openai.pydantic_function_tool(Order)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
        max_tokens=100,
    )
    (call,) = made.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Order)
    with client.chat.completions.stream(
        model="story",
        messages=[*ASK, made.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}],
        tools=[openai.pydantic_function_tool(Order)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=2,
        max_tokens=100,
    ) as stream:
        final = stream.get_final_completion()
    answer = final.choices[0].message
    assert all(isinstance(each.function.parsed_arguments, Order) for each in answer.tool_calls)
    # What the client has put together from a stream is sent back as it is, with the numbers of its deltas.
    results = [{"role": "tool", "tool_call_id": each.id, "content": "ok"} for each in answer.tool_calls]
    assert "index" in answer.to_dict()["tool_calls"][0]
    client.chat.completions.create(model="story", messages=[*ASK, answer.to_dict(), *results], max_tokens=1)


class Verdict(pydantic.BaseModel):
    """A form for an answer that is no call."""

    verdict: Literal["yes", "no"]


def test_a_form_beside_tools(client):
    forms = set()
    for seed in range(6):
        made = client.chat.completions.parse(
            model="story",
            messages=ASK,
            tools=[openai.pydantic_function_tool(Verdict)],
            response_format=Verdict,
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=100,
        )
        message = made.choices[0].message
        forms.add(message.parsed is not None)
        assert message.parsed is not None or message.tool_calls
    assert forms


@pytest.mark.grid(1)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}])
def test_calls_are_those_of_plain_decoding(client, options):
    """Drafts change nothing: greedy as with a seed, where the rule promises the same text."""
    with running(stories(drafter="none", verifier="gumbel")) as (base, _):
        plain = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        expected = [read_whole(ask(plain, tool_choice=choice, **options)) for choice in ("required", "auto")]
    with running(stories(drafter="model", stopper="fixed:3", verifier="gumbel")) as (base, _):
        drafted = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        assert [read_whole(ask(drafted, tool_choice=choice, **options)) for choice in ("required", "auto")] == expected


def with_template(template, **settings):
    engine = stories(drafter="none")
    engine.tokenizer.chat_template = template
    return running(engine, **settings)


FUNCTIONS = tuple(Function.model_validate(tool["function"]) for tool in TOOLS)


@pytest.fixture(scope="module")
def looking_up():
    return Engine.load("embedded:stories", drafter="suffix")


@pytest.mark.grid(10)
@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("must", [True, False])
def test_each_format_makes_and_reads_its_calls(name, must, looking_up):
    """Answers of the engine by the format's grammar, read in pieces of every size."""
    made = DIALECTS[name]
    tools = ToolSet(made, FUNCTIONS, must=must, several=made.parallel, specials={})
    bias = None if must else dict.fromkeys(looking_up.prompts.plain(made.marker or "{"), 50)
    params = SamplingParams(grammar=f"lark:{tools.grammar(None)}", max_tokens=150, logit_bias=bias, seed=3, n=2)
    outputs = looking_up.generate("The weather", params)
    for output in outputs:
        reader = ToolReader(tools)
        text, parts = reader.read(output.text, last=True)
        if output.finish_reason == "stop" and must:
            assert text == ""
            assert parts
            for part in parts:
                assert json.loads(part.arguments).keys() == ({*WEATHER["required"]} if "w" in part.name[4:] else set())
        for size in (1, 2, 3, 7):
            pieces = [output.text[place : place + size] for place in range(0, len(output.text), size)]
            reader, said, calls = ToolReader(tools), "", {}
            for place, piece in enumerate(pieces):
                more, found = reader.read(piece, last=place == len(pieces) - 1)
                said += more
                for part in found:
                    old = calls.setdefault(part.place, [part.name, ""])
                    old[1] += part.arguments
            assert said == text
            assert [tuple(each) for each in calls.values()] == [(part.name, part.arguments) for part in parts]


def test_braces_and_quotes_in_arguments():
    tools = ToolSet(DIALECTS["mistral"], FUNCTIONS, must=True, several=True, specials={})
    arguments = ['{"a": "}\\"{]", "b": [{"c": "\\\\"}]}', "{}"]
    calls = (f'{{"name": "f", "arguments": {each}, "id": "abcdefghi"}}' for each in arguments)
    text = f"[TOOL_CALLS] [{', '.join(calls)}]"
    _, parts = ToolReader(tools).read(text, last=True)
    assert [part.arguments for part in parts] == arguments


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        (
            '{{ tools }} Respond {"name": function name, "parameters": dictionary of argument name and its value}',
            "llama",
        ),
    ],
)
def test_the_template_says_which_format(template, name):
    with with_template(template + "{% for m in messages %}{{ m.content }}{% endfor %}") as (base, _):
        made = post(base, CHAT, messages=ASK, tools=TOOLS, tool_choice="required", seed=1, max_tokens=120)
        assert made.status_code == 200, made.text
        text = post(base, CHAT, messages=ASK, tools=TOOLS, tool_choice="required", seed=1, max_tokens=120).json()
    assert text["choices"][0]["message"]["tool_calls"]
    assert DIALECTS[name]


def test_a_special_token_as_marker():
    engine = small_engine(drafter="none")
    number = engine.tokenizer.convert_tokens_to_ids("<unk>")
    tools = ToolSet(DIALECTS["mistral"], FUNCTIONS, must=False, several=True, specials={"[TOOL_CALLS]": number})
    grammar = tools.grammar(None)
    assert f"<[{number}]>" in grammar
    assert "[TOOL_CALLS]" not in grammar
    constraint = engine.grammars.constraint(f"lark:{grammar}")
    text = engine.prompts.plain("Well.")
    assert constraint.allowed(text, [()])[0, number]
    after = constraint.allowed([*text, number], [()])[0]
    assert 0 < after.sum() < 10
    assert constraint.allowed([*text, number, *engine.prompts.plain("[")], [()])[0].sum() < 10


def test_a_template_without_tools_is_refused():
    with with_template("{% for m in messages %}{{ m.content }}{% endfor %}") as (base, _):
        for fields in (
            {"tools": TOOLS},
            {"messages": [*ASK, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
        ):
            answer = post(base, CHAT, **{"messages": ASK, **fields})
            assert answer.status_code == 400
            assert "no chat template that knows tools" in error_of(answer)["message"]
            assert error_of(answer)["param"] == "tools"


def test_a_template_whose_format_is_unknown_needs_a_word_of_the_operator():
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with with_template(template) as (base, _):
        assert "--tool-format" in error_of(post(base, CHAT, messages=ASK, tools=TOOLS))["message"]
    with with_template(template, tool_format="hermes") as (base, _):
        assert post(base, CHAT, messages=ASK, tools=TOOLS, max_tokens=4).status_code == 200
    with pytest.raises(UserError, match="expected one of auto, deepseek"):
        Settings(tool_format="morse")


REFUSED = [
    ({"tools": TOOLS + TOOLS[:1]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$ref": "#/x"}}}]},
        "tools",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": TOOLS * 65}, "tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"ignore_eos": True}, "ignore_eos"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "a", "function": {}}]}]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    ({"messages": [{"role": "assistant"}]}, "messages.0"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(base, fields, param):
    answer = post(base, CHAT, **{"messages": ASK, "tools": TOOLS, **fields})
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"].startswith(param), answer.text


@pytest.mark.parametrize("name", ["tool_choice", "parallel_tool_calls"])
def test_fields_that_need_tools(base, name):
    value = "auto" if name == "tool_choice" else True
    assert error_of(post(base, CHAT, messages=ASK, **{name: value}))["param"] == name


def test_a_form_beside_calls_without_a_marker_is_refused():
    template = '{{ tools }}"parameters": dictionary{% for m in messages %}{{ m.content }}{% endfor %}'
    with with_template(template) as (base, _):
        answer = post(base, CHAT, messages=ASK, tools=TOOLS, response_format={"type": "json_object"})
    assert error_of(answer)["param"] == "response_format"
