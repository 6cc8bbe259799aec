"""OpenAI's Responses API: the same answers as for chats, whole and streamed, by the official client and by hand."""

import json
import re
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from draftproof.sampling import SamplingParams, TokenLogprob
from draftproof.server.api.answer import Answer, TokenText
from draftproof.server.api.chat import CHAT as CHATS
from draftproof.server.api.responses import RESPONSES
from draftproof.server.dialects.families import DIALECTS
from draftproof.server.errors import ApiError
from draftproof.server.parse_request import ParsedRequest, validated
from draftproof.server.tools import ToolSet
from draftproof.server.worker import Piece
from support.raw_http import Slow
from support.response_events import events_of, item_text, replayed
from support.serving import error_of, post, running, until
from support.tools import ASK, CHAT, TOOLS, Weather, stories

PATH = "/v1/responses"
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
QUESTION = ASK[0]["content"]


@pytest.fixture(scope="module")
def served():
    with running(stories(drafter="model", stopper="fixed:4")) as found:
        yield found


@pytest.fixture(scope="module")
def base(served):
    return served[0]


@pytest.fixture(scope="module")
def client(base):
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


def streamed(base, **body):
    """The events of a stream."""
    answer = post(base, PATH, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def same(response):
    """What two responses to one request have in common."""
    items = [
        {name: value for name, value in each.items() if name not in ("id", "call_id")} for each in response["output"]
    ]
    kept = {name: value for name, value in response.items() if name not in ("id", "created_at", "output", "usage")}
    return items, kept, {**response["usage"], "input_tokens_details": None}


# --- the official client ----------------------------------------------------------------------------------------------


def test_an_answer(client):
    made = client.responses.create(
        model="story", input=QUESTION, instructions="Be kind.", max_output_tokens=8, temperature=0, metadata={"a": "b"}
    )
    assert made.id.startswith("resp_")
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (message,) = made.output
    assert message.id.startswith("msg_")
    assert message.status == "incomplete"
    assert made.output_text == message.content[0].text != ""
    assert made.usage.output_tokens == 8
    assert made.usage.total_tokens == made.usage.input_tokens + 8
    assert made.usage.output_tokens_details.reasoning_tokens == 0
    assert (made.instructions, made.metadata, made.tools, made.tool_choice) == ("Be kind.", {"a": "b"}, [], "auto")
    assert (made.max_output_tokens, made.text.format.type, made.to_dict()["store"]) == (8, "text", False)


def test_an_answer_that_ends_by_itself_is_complete(base):
    made = post(base, PATH, input="x", structured_outputs={"choice": ["yes", "no"]}).json()
    assert (made["status"], made["incomplete_details"]) == ("completed", None)
    assert made["output"][0]["status"] == "completed"
    assert item_text(made["output"][0]) in ("yes", "no")


def test_tokens_that_are_known_are_counted(base):
    body = {"input": QUESTION * 8, "max_output_tokens": 2, "temperature": 0}
    post(base, PATH, **body)
    assert post(base, PATH, **body).json()["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_a_stream_is_the_whole_answer(client):
    asked = {"model": "story", "input": QUESTION, "temperature": 0, "max_output_tokens": 20}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text


class Verdict(pydantic.BaseModel):
    """A form."""

    verdict: Literal["yes", "no"]


def test_a_form(client):
    made = client.responses.parse(model="story", input=QUESTION, text_format=Verdict, max_output_tokens=40)
    assert isinstance(made.output_parsed, Verdict)
    assert made.to_dict()["text"]["format"]["schema"]["properties"].keys() == {"verdict"}
    with client.responses.stream(model="story", input=QUESTION, text_format=Verdict, max_output_tokens=40) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Verdict)
    loose = client.responses.create(
        model="story", input="x", text={"format": {"type": "json_object"}}, max_output_tokens=10
    )
    assert loose.output_text.startswith("{")


def test_a_round_trip_of_a_tool(client):
    asked = {"model": "story", "tools": FLAT, "parallel_tool_calls": False, "max_output_tokens": 120}
    items = [{"role": "user", "content": QUESTION}]
    made = client.responses.create(input=items, tool_choice={"type": "function", "name": "get_weather"}, **asked)
    (call,) = made.output
    assert (call.type, call.status, call.name) == ("function_call", "completed", "get_weather")
    Weather.model_validate_json(call.arguments)
    assert made.output_text == ""
    assert [tool.name for tool in made.tools] == ["get_weather", "now"]
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    asked |= {"max_output_tokens": 8, "temperature": 0}  # a drawn text may end before
    with client.responses.stream(input=items, tool_choice="none", **asked) as stream:
        last = list(stream)[-1]
    assert (last.type, last.response.output[0].type) == ("response.incomplete", "message")


def test_pydantic_tools_are_parsed(client):
    class Order(pydantic.BaseModel):
        """An order."""

        size: Literal["small", "large"]

    asked = {
        "model": "story",
        "input": QUESTION,
        "tools": [openai.pydantic_function_tool(Order)["function"] | {"type": "function"}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    (call,) = client.responses.parse(**asked).output
    assert json.loads(call.arguments).keys() == {"size"}
    with client.responses.stream(**asked) as stream:
        (call,) = stream.get_final_response().output
    assert call.parsed_arguments["size"] in ("small", "large")


def test_log_probabilities(client, base):
    asked = {"input": QUESTION, "max_output_tokens": 6, "temperature": 0, "top_logprobs": 2}
    made = client.responses.create(model="story", include=["message.output_text.logprobs"], **asked)
    found = made.output[0].content[0].logprobs
    assert len(found) == 6
    assert all(len(each.top_logprobs) == 2 and each.logprob == each.top_logprobs[0].logprob for each in found)
    chat = post(base, CHAT, messages=ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2).json()
    assert [each.token for each in found] == [each["token"] for each in chat["choices"][0]["logprobs"]["content"]]
    deltas = [data for name, data in streamed(base, **asked) if name == "response.output_text.delta"]
    assert [one["token"] for each in deltas for one in each["logprobs"]] == [each.token for each in found]


# --- the chat that is asked -------------------------------------------------------------------------------------------


def text_parts(*texts, kind="input_text"):
    return [{"type": kind, "text": text} for text in texts]


CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "now",
    "arguments": '{"a": 1}',
    "status": "completed",
}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
SAME_CHATS = {
    "a text": ({"input": "Hi"}, [{"role": "user", "content": "Hi"}]),
    "instructions": (
        {"input": "Hi", "instructions": "Be kind."},
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
    ),
    "instructions and messages of developers are one system message": (
        {
            "instructions": "Be kind.",
            "input": [
                {"type": "message", "role": "developer", "content": text_parts("Be brief.", "Be quick.")},
                {"role": "user", "content": "Hi"},
                {"role": "developer", "content": "Be slow."},
            ],
        },
        [
            {"role": "system", "content": "Be kind.\nBe brief.\nBe quick."},
            {"role": "user", "content": "Hi"},
            {"role": "developer", "content": "Be slow."},
        ],
    ),
    "items of the model are one message": (
        {
            "input": [
                {"role": "user", "content": text_parts("Hi")},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": text_parts("Hm.", kind="reasoning_text"),
                 "encrypted_content": None},
                {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                 "content": text_parts("Wait.", kind="output_text")},
                CALL,
                {**CALL, "call_id": "c2"},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                {"type": "function_call_output", "call_id": "c2", "output": text_parts("rainy")},
                {"role": "assistant", "content": "Good."},
                {"role": "user", "content": "And?"},
            ]
        },
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.",
             "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "c2", "content": "rainy"},
            {"role": "assistant", "content": "Good."},
            {"role": "user", "content": "And?"},
        ],
    ),
    "calls of a custom tool": (
        {
            "input": [
                {"type": "custom_tool_call", "call_id": "c1", "name": "now", "input": "*** Begin\n"},
                {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            ]
        },
        [
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "c1", "function": {"name": "now", "arguments": '{"input": "*** Begin\\n"}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ],
    ),
    "a summary in place of thoughts, and two calls of two turns": (
        {
            "input": [
                {"type": "reasoning", "summary": text_parts("Hm.", kind="summary_text")},
                CALL,
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                {**CALL, "call_id": "c2"},
                {"type": "function_call_output", "call_id": "c2", "output": ""},
            ]
        },
        [
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CHAT_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "assistant", "content": "", "tool_calls": [{**CHAT_CALL, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c2", "content": ""},
        ],
    ),
}  # fmt: skip
TEMPLATE = """{% for t in tools or [] %}{{ t.function.name }}{{ t.function.parameters.type }}{% endfor %}<tool_call>
{{- enable_thinking }}{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}|
{{- m.tool_call_id }}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}
{%- endfor %}{% endfor %}"""


@pytest.fixture(scope="module")
def parser():
    """A parser whose template writes all that it is given."""
    engine = stories(drafter="none")
    engine.tokenizer.chat_template = TEMPLATE
    with running(engine, tool_format="hermes") as (_, server):
        yield server._parser


def prompt_of(parser, endpoint, body):
    """Token ids of the prompt of a body."""
    (ids,) = parser.parse(endpoint.asked(validated(endpoint.body, body))).prompts
    return ids


@pytest.mark.parametrize("name", SAME_CHATS)
def test_prompts_are_those_of_chats(parser, name):
    fields, messages = SAME_CHATS[name]
    tools = {"tool_choice": "auto"}
    assert prompt_of(parser, RESPONSES, {**fields, "tools": FLAT, **tools}) == prompt_of(
        parser, CHATS, {"messages": messages, "tools": TOOLS, **tools}
    )
    effort = prompt_of(parser, RESPONSES, {**fields, "tools": FLAT, "reasoning": {"effort": "none", "summary": "auto"}})
    assert effort == prompt_of(parser, CHATS, {"messages": messages, "tools": TOOLS, "reasoning_effort": "none"})
    assert effort != prompt_of(parser, CHATS, {"messages": messages, "tools": TOOLS}), "else the template shows nothing"


def test_every_message_counts_in_that_comparison(parser):
    """The template shows each part: chats with one thing left out have other prompts."""
    _, messages = SAME_CHATS["items of the model are one message"]
    whole = prompt_of(parser, CHATS, {"messages": messages, "tools": TOOLS})
    for place, message in enumerate(messages):
        for field in {*message} & {"content", "reasoning_content", "tool_calls"}:
            less = {**message, "content": message["content"] or "x"} | {field: "y" if field != "tool_calls" else None}
            changed = [*messages[:place], less, *messages[place + 1 :]]
            assert prompt_of(parser, CHATS, {"messages": changed, "tools": TOOLS}) != whole


@pytest.mark.parametrize("speculation", [True, False])
def test_answers_are_those_of_chats(base, speculation):
    options = {"temperature": 0, "speculation": speculation}
    made = post(base, PATH, input=QUESTION, max_output_tokens=40, **options).json()
    chat = post(base, CHAT, messages=ASK, max_tokens=40, **options).json()
    assert item_text(made["output"][0]) == chat["choices"][0]["message"]["content"]
    assert (made["usage"]["input_tokens"], made["usage"]["output_tokens"]) == (
        chat["usage"]["prompt_tokens"],
        chat["usage"]["completion_tokens"],
    )
    asked = {"tool_choice": "required", "parallel_tool_calls": False, **options}
    made = post(base, PATH, input=QUESTION, tools=FLAT, max_output_tokens=120, **asked).json()
    chat = post(base, CHAT, messages=ASK, tools=TOOLS, max_tokens=120, **asked).json()
    (call,) = chat["choices"][0]["message"]["tool_calls"]
    assert [(each["name"], each["arguments"]) for each in made["output"]] == [
        (call["function"]["name"], call["function"]["arguments"])
    ]


def test_sampling_fields_of_chats(base):
    fields = {"seed": 5, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "stop": ["z"], "temperature": 0.9}
    made = post(base, PATH, input=QUESTION, max_output_tokens=20, **fields).json()
    chat = post(base, CHAT, messages=ASK, max_tokens=20, **fields).json()
    assert item_text(made["output"][0]) == chat["choices"][0]["message"]["content"]
    assert made["temperature"] == 0.9


# --- tools ------------------------------------------------------------------------------------------------------------

OTHERS = [{"type": "web_search", "external_web_access": False}, {"type": "mcp", "server_label": "x"}]


def test_tools_that_are_not_called_here_are_left_out(base, caplog):
    with caplog.at_level("INFO", "draftproof.server"):
        made = post(base, PATH, input="x", tools=[*OTHERS, FLAT[1]], tool_choice="auto", max_output_tokens=2).json()
    assert [each["name"] for each in made["tools"]] == ["now"]
    assert "mcp, web_search" in caplog.text
    assert post(base, PATH, input="x", tools=OTHERS, max_output_tokens=2).json()["tools"] == []
    for choice in (
        "required",
        {"type": "function", "name": "now"},
        {"type": "custom", "name": "now"},
        {"type": "web_search"},
    ):
        answer = post(base, PATH, input="x", tools=OTHERS, tool_choice=choice)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "tool_choice"


def test_functions_of_a_namespace(base):
    space = {"type": "namespace", "name": "clock", "description": "Time.", "tools": [FLAT[1], OTHERS[1]]}
    asked = {"input": "x", "tools": [space, FLAT[0]], "tool_choice": {"type": "function", "name": "now"}}
    made = post(base, PATH, **asked).json()
    (call,) = made["output"]
    assert (call["name"], call["namespace"]) == ("now", "clock")
    assert [each["name"] for each in made["tools"][0]["tools"]] == ["now"]
    items = [
        {"role": "user", "content": "x"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": ""},
    ]
    assert post(base, PATH, **{**asked, "input": items}).status_code == 200
    twice = post(base, PATH, **{**asked, "tools": [space, FLAT[1]]})
    assert error_of(twice)["param"] == "tools"


def test_allowed_tools(base):
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    for seed in range(4):
        made = post(base, PATH, input="x", tools=FLAT, tool_choice=allowed, seed=seed, max_output_tokens=40).json()
        assert {each["name"] for each in made["output"]} == {"now"}
    assert made["tool_choice"] == allowed
    for tools in ([{"type": "function", "name": "other"}], [{"type": "web_search"}]):
        answer = post(base, PATH, input="x", tools=FLAT, tool_choice={**allowed, "tools": tools})
        assert error_of(answer)["param"] == "tool_choice"


def custom(name="patch", syntax=None, definition=""):
    form = {"type": "grammar", "syntax": syntax, "definition": definition} if syntax else {"type": "text"}
    return {"type": "custom", "name": name, "description": "Changes files.", "format": form}


PATCH = """start: "*** Begin" LF line{1,2} "*** End"
line: ("+" | "-") /["a-z]{0,3}/ LF
%import common.LF
"""
IS_PATCH = re.compile(r"\*\*\* Begin\n([+-][\"a-z]{0,3}\n){1,2}\*\*\* End")


def test_a_round_trip_of_a_custom_tool(client):
    tools = [custom(syntax="regex", definition='\\+["a-c\\n\\\\]{2,9}'), FLAT[1]]
    asked = {"model": "story", "tools": tools, "temperature": 0}
    items = [{"role": "user", "content": QUESTION}]
    choice = {"type": "custom", "name": "patch"}
    made = client.responses.create(input=items, tool_choice=choice, max_output_tokens=60, **asked)
    (call,) = made.output
    assert (call.type, call.name) == ("custom_tool_call", "patch")
    assert re.fullmatch(r'\+["a-c\n\\]{2,9}', call.input)
    assert [each.type for each in made.tools] == ["custom", "function"]
    with client.responses.stream(input=items, tool_choice=choice, max_output_tokens=60, **asked) as stream:
        events = list(stream)
    deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
    (done,) = [each.input for each in events if each.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done == call.input
    items += [call, {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}]
    assert client.responses.create(input=items, max_output_tokens=4, tool_choice="none", **asked).output_text


@pytest.mark.parametrize("kept", [True, False])
def test_the_grammar_of_a_custom_tool(kept, caplog):
    """A tagged dialect keeps to it; one that writes JSON cannot, and a line in the log says so."""
    tools = [custom(syntax="lark", definition=PATCH)]
    body = {"input": "x", "tools": tools, "tool_choice": "required", "max_output_tokens": 60}
    caplog.set_level("INFO", "draftproof.server")
    with running(stories(drafter="model"), tool_format="qwen-xml" if kept else "hermes") as (base, _):
        for seed in range(3):
            made = replayed(streamed(base, **body, seed=seed, parallel_tool_calls=False))
            assert bool(IS_PATCH.fullmatch(made["output"][0]["input"])) is kept
    assert ("is not kept to" in caplog.text) is not kept


def test_grammars_of_custom_tools_that_cannot_be_read():
    wrong = ["", "x", "start: x", 'start: "a" }', "}\nstart: /a/", "start: /(/", "%llguidance {}", "start: %lark {"]
    legal = ['start: "}"', "start: /[{}]+/ // }", 'start: "a" | b\nb: %json {"type": "null"}']
    with running(stories(drafter="none"), tool_format="qwen-xml") as (base, _):
        for definition in (*wrong, *legal):
            tools = [custom(syntax="lark", definition=definition)]
            answer = post(base, PATH, input="x", tools=tools, tool_choice="required", max_output_tokens=40)
            assert answer.status_code == (200 if definition in legal else 400), (definition, answer.text)
            if definition in wrong:
                assert error_of(answer)["param"] == "tools"


def test_inputs_of_custom_tools_come_in_any_pieces():
    body = validated(RESPONSES.body, {"input": "x", "tools": [custom()]})
    tools = ToolSet(DIALECTS["hermes"], (RESPONSES.asked(body).tools[0].function,), True, True, {})
    text = 'a "b" \\ \n\u0001x'
    call = f'<tool_call>\n{{"name": "patch", "arguments": {{"input": {json.dumps(text)}}}}}\n</tool_call>'
    pieces = [Piece(letter, (place,)) for place, letter in enumerate(call)]
    pieces.append(Piece("", (0,), finish_reason="stop"))
    whole, stream = by_hand(pieces, tools=tools, tools_given=[custom()])
    assert [each["input"] for each in whole["output"]] == [text]
    assert same(whole) == same(stream)
    whole, stream = by_hand([*pieces[:60], pieces[-1]], tools=tools, tools_given=[custom()])
    assert text.startswith(whole["output"][0]["input"])
    assert same(whole) == same(stream)


# --- streams ----------------------------------------------------------------------------------------------------------

CODEX = {
    "model": "story",
    "input": [
        {"type": "message", "id": "msg_a", "role": "developer", "content": text_parts("You write code.", "Be brief.")},
        {"type": "message", "id": "msg_b", "role": "developer", "content": text_parts("Skills: none.")},
        {"type": "message", "id": "msg_c", "role": "user", "content": text_parts("<cwd>/home</cwd>")},
        {"type": "message", "id": "msg_d", "role": "user", "content": text_parts("say hello")},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": text_parts("hm", kind="reasoning_text"),
         "encrypted_content": None},
        {"type": "function_call", "status": "completed", "id": "fc", "name": "now", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "Exit code: 0\nOutput:\nhi\n"},
    ],
    "tools": [
        {"type": "custom", "name": "apply_patch"},
        {"type": "namespace", "name": "clock", "description": "Time.", "tools": [{**FLAT[1], "strict": False}]},
        *OTHERS,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"turn_id": "01a2", "x-codex-installation-id": "cb46"},
}  # fmt: skip


def test_what_codex_sends(base):
    made = replayed(streamed(base, **CODEX, max_output_tokens=12, seed=1))
    assert made["status"] == "incomplete"
    assert made["reasoning"] == {"effort": "medium", "summary": None}


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    "fields",
    [
        {"max_output_tokens": 20},
        {"max_output_tokens": 200, "tools": FLAT, "tool_choice": "required"},
        {"max_output_tokens": 16, "tools": FLAT, "tool_choice": "required"},
        {"max_output_tokens": 20, "tools": FLAT},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
    ids=["text", "calls", "a call that is cut off", "text beside tools", "a form"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_streams_are_legal_and_are_the_whole_answer(base, fields, seed):
    body = {"input": QUESTION, "seed": seed, **fields}
    made = replayed(streamed(base, **body))
    assert same(made) == same(post(base, PATH, **body).json())


def test_the_state_machine_refuses_what_is_illegal(base):
    """A stream without one of its events, with two of them swapped or with one that says something else is refused."""
    events = streamed(base, input=QUESTION, tools=FLAT, tool_choice="required", seed=1, max_output_tokens=60)
    assert replayed(events)

    def refused(changed):
        numbered = [(name, {**data, "sequence_number": place}) for place, (name, data) in enumerate(changed)]
        with pytest.raises(AssertionError):
            replayed(numbered)

    for place, (name, data) in enumerate(events):
        if data.get("delta") != "":
            refused(events[:place] + events[place + 1 :])
        if place and (name, data.get("delta")) != (events[place - 1][0], events[place - 1][1].get("delta")):
            refused([*events[: place - 1], events[place], events[place - 1], *events[place + 1 :]])
        refused([*events[:place], ("response.other", data | {"type": "response.other"}), *events[place + 1 :]])
        for field in {"delta", "text", "arguments", "item_id", "output_index"} & {*data}:
            refused([*events[:place], (name, {**data, field: f"{data[field]}?"}), *events[place + 1 :]])
    with pytest.raises(AssertionError):
        replayed([(name, {**data, "sequence_number": 0}) for name, data in events])


def test_a_stream_that_fails_says_why():
    engine = stories(drafter="none")
    with running(engine, request_timeout=0.5) as (base, server):
        post(base, PATH, input="x", max_output_tokens=2)
        Slow(engine, 0.05)
        made = replayed(streamed(base, input="x", max_output_tokens=400, ignore_eos=True))
        until(lambda: not server.worker._open)
    assert made["status"] == "failed"
    assert made["error"]["code"] == "timeout"


# --- pieces that are made by hand: what the model reasons -------------------------------------------------------------


def by_hand(pieces, *, tools=None, fail=None, tools_given=(), **fields):
    """The answer to pieces, whole and as events."""
    body = validated(RESPONSES.body, {"input": "x", "tools": [*tools_given], **fields})
    engine = stories(drafter="none")
    logprobs = RESPONSES.asked(body).top_logprobs
    parsed = ParsedRequest(((1, 2),), (None,), SamplingParams(logprobs=logprobs, max_tokens=50), tools=tools)

    def answer():
        return Answer("resp_1", "story", parsed, TokenText(engine.tokenizer), with_ids=False)

    made, form = answer(), RESPONSES.form(body)
    sent = form.opening(made)
    for piece in pieces:
        sent += form.piece(made, piece, made.add(piece))
    sent += form.closing(made) if fail is None else form.failure(made, fail)
    whole = answer()
    for piece in pieces:
        whole.add(piece)
    return RESPONSES.form(body).whole(whole).model_dump(), replayed(events_of(sent.decode()))


THOUGHT = [
    Piece("", (3,), reasoning="Let me ", reasoning_tokens=1),
    Piece("", (4, 5), reasoning="see.", reasoning_tokens=2),
    Piece("Yes", (6, 7, 8), reasoning=" Good.", reasoning_tokens=2),
    Piece(".", (9,), finish_reason="stop"),
]


def test_reasoning_is_an_item_of_its_own():
    whole, stream = by_hand(THOUGHT)
    reasoning, message = whole["output"]
    assert (reasoning["type"], item_text(reasoning), reasoning["summary"]) == ("reasoning", "Let me see. Good.", [])
    assert (message["type"], item_text(message)) == ("message", "Yes.")
    assert (reasoning["id"], message["id"]) == ("rs_1_0", "msg_1_1")
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    assert whole["usage"]["output_tokens"] == 7
    assert same(whole) == same(stream)
    assert [each["id"] for each in stream["output"]] == ["rs_1_0", "msg_1_1"]


def test_reasoning_that_is_cut_off():
    whole, stream = by_hand([THOUGHT[0], Piece("", (4,), reasoning="s", reasoning_tokens=1, finish_reason="length")])
    (item,) = whole["output"]
    assert (whole["status"], item["status"], item_text(item)) == ("incomplete", "incomplete", "Let me s")
    assert same(whole) == same(stream)


def test_an_empty_answer_has_a_message():
    whole, stream = by_hand([Piece("", (3,), finish_reason="stop")])
    assert [item_text(each) for each in whole["output"]] == [""]
    assert same(whole) == same(stream)


def test_reasoning_and_text_before_calls():
    functions = RESPONSES.asked(validated(RESPONSES.body, {"input": "x", "tools": FLAT})).tools
    tools = ToolSet(
        DIALECTS["hermes"], tuple(each.function for each in functions), must=False, several=True, specials={}
    )
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    pieces = [*THOUGHT[:3], Piece(f" {call}\n{call[:20]}", (10,)), Piece(call[20:], (11,), finish_reason="stop")]
    whole, stream = by_hand(pieces, tools=tools)
    assert [each["type"] for each in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert same(whole) == same(stream)
    assert len({each["id"] for each in whole["output"]}) == 4


def test_log_probabilities_are_those_of_the_answer():
    entries = [TokenLogprob(token, -float(token), 1, ()) for token in (3, 4, 5)]
    pieces = [
        Piece("", (3,), logprobs=tuple(entries[:1]), reasoning="a", reasoning_tokens=1),
        Piece("b", (4, 5), logprobs=tuple(entries[1:]), finish_reason="stop"),
    ]
    whole, _ = by_hand(pieces, include=["message.output_text.logprobs"], top_logprobs=0)
    assert [each["logprob"] for each in whole["output"][1]["content"][0]["logprobs"]] == [-4.0, -5.0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError("too long", code="context_length_exceeded"), "context_length_exceeded"),
        (ApiError("broken", status=500), "server_error"),
        (ApiError("no token is legal"), "invalid_prompt"),
    ],
)
def test_failures_have_codes(error, code):
    _, stream = by_hand(THOUGHT[:3], fail=error)
    assert stream["error"] == {"code": code, "message": error.message}
    assert [each["type"] for each in stream["output"]] == ["reasoning"], "of the items that have ended"


# --- what is refused --------------------------------------------------------------------------------------------------

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,"}
REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send all earlier items"),
    ({"conversation": "conv_1"}, "conversation", "send all earlier items"),
    ({"background": True}, "background", "leave it out"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "send input and instructions"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "item_reference"),
    ({"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, "input.0", "expected an item"),
    ({"input": [{"content": "x"}]}, "input.0", "expected an item"),
    ({"input": [7]}, "input.0", "expected an item"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0.type", "reads text only"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type", "reads text only"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "Input should be"),
    ({"input": [{"role": "user", "content": "x", "foo": 1}]}, "foo", "input.0.foo is not supported"),
    ({"input": [{"role": "user", "content": "x", "model": "m"}]}, "model", "input.0.model is not supported"),
    ({"input": []}, "input", "at least 1"),
    ({"input": None}, "input", "required"),
    ({"foo": 1}, "foo", "not supported"),
    ({"messages": []}, "messages", "not supported"),
    ({"n": 2}, "n", "not supported"),
    ({"max_tokens": 2}, "max_tokens", "not supported"),
    ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens: expected"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format", ""),
    ({"temperature": -1}, "temperature", "expected"),
    ({"top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "pattern"),
    ({"tools": [{"name": "now"}]}, "tools.0", "expected an object with a type"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": FLAT, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not among the tools"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format", "expected"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "Input should be"),
    ({"truncation": "some"}, "truncation", "Input should be"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "needs stream true"),
    ({"metadata": {"a": 1}}, "metadata", "string"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(base, fields, param, words):
    answer = post(base, PATH, **{"input": "x", **fields})
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
    assert words in error_of(answer)["message"]


def test_what_is_taken_without_effect(base):
    plain = post(base, PATH, input="x", seed=1, max_output_tokens=8).json()
    unread = {
        "store": True,
        "user": "u",
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "truncation": "auto",
        "max_tool_calls": 3,
        "background": False,
        "previous_response_id": None,
        "include": ["file_search_call.results"],
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "detailed"},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    made = post(base, PATH, input="x", seed=1, max_output_tokens=8, **unread).json()
    assert same(made) == same(plain)


def test_a_text_that_is_too_long(base):
    for fields in ({}, {"stream": True}):
        answer = post(base, PATH, input="long " * 3000, truncation="auto", **fields)
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "context_length_exceeded"


def test_what_an_answer_could_not_repeat_is_refused(base):
    deep = {}
    for _ in range(300):
        deep = {"a": deep}
    for wrong in (deep, {"a": "\ud800"}):
        body = {"input": "x", "tool_choice": "none", "max_output_tokens": 2}
        for extra, status in (({}, 200), ({"x-more": wrong}, 400)):
            tool = {"type": "function", "name": "f", "parameters": {"type": "object", **extra}}
            content = json.dumps({**body, "tools": [tool]})
            headers = {"content-type": "application/json"}
            answer = httpx.post(f"{base}{PATH}", content=content, headers=headers)
            assert answer.status_code == status, answer.text
