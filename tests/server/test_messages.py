"""Anthropic's Messages API: the same answers as a chat's, in Anthropic's words, for its official client and others."""

import itertools
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import pydantic
import pytest

from draftproof import SamplingParams
from draftproof.errors import RequestError
from draftproof.server.api.answer import Answer, TokenText
from draftproof.server.api.messages import MessagesForm
from draftproof.server.api.messages_request import CountBody, MessagesBody, chat_to_answer, chat_to_count
from draftproof.server.dialects.families import DIALECTS
from draftproof.server.errors import ApiError, crowded, error_answer
from draftproof.server.parse_request import ParsedRequest, validated
from draftproof.server.tools import ToolSet
from draftproof.server.worker import Piece
from support.message_events import message_of, read_events
from support.raw_http import KEY, Slow
from support.reasoning_models import OPENED, QWEN, thinking_engine
from support.serving import post, running, small_engine, until
from support.tools import ASK, CHAT, TOOLS, WEATHER, Weather, stories

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
OWN_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
GIVEN = [
    {"name": "get_weather", "description": "Of a place.", "input_schema": WEATHER, "cache_control": {"type": "x"}},
    {"name": "now", "input_schema": TOOLS[1].get("parameters") or {"type": "object", "additionalProperties": False}},
]


@pytest.fixture(scope="module")
def base():
    with running(stories(drafter="model", stopper="fixed:4")) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(base):
    return anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)


def ask(client, **options):
    return client.messages.create(**{"model": "story", "max_tokens": 120, "messages": ASK, **options})


def sent(base, path=PATH, **fields):
    """The body of an answer, which is none of an error."""
    limit = {"max_tokens": 24} if path == PATH else {}
    answer = post(base, path, **{**limit, "messages": ASK, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def refused(base, path=PATH, **fields):
    """What is said of a request that is a mistake."""
    limit = {"max_tokens": 24} if path == PATH else {}
    answer = post(base, path, **{**limit, "messages": ASK, **fields})
    assert answer.status_code == 400
    return anthropic_error(answer)["message"]


def anthropic_error(answer):
    """The error of an answer, whose body has Anthropic's form and nothing else."""
    body = answer.json()
    assert list(body) == ["type", "error", "request_id"]
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert set(body["error"]) == {"type", "message"}
    return body["error"]


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("system", [None, "Be short."])
def test_an_answer_is_that_of_a_chat(base, speculation, system):
    before = [] if system is None else [{"role": "system", "content": system}]
    limits = {"temperature": 0, "max_tokens": 40, "speculation": speculation}
    chat = post(base, CHAT, messages=before + ASK, **limits).json()
    found = sent(base, system=system, **limits).json()
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "story")
    assert found["stop_reason"] == "max_tokens"
    assert found["stop_sequence"] is None
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == 40
    streamed = message_of(read_events(sent(base, system=system, stream=True, **limits).text))
    assert streamed["content"] == found["content"]
    assert streamed["usage"]["output_tokens"] == 40


def test_tokens_that_were_known_are_counted_apart(base):
    long = [{"role": "user", "content": "Tell me of the old bridge, the miller and his seven dogs. " * 5}]
    size = sent(base, COUNT, messages=long).json()["input_tokens"]
    first = sent(base, messages=long, cache_salt="apart").json()["usage"]
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (size, 0)
    events = read_events(sent(base, messages=long, cache_salt="apart", stream=True).text)
    for usage in (events[0]["message"]["usage"], events[-2]["usage"]):
        assert usage["cache_read_input_tokens"] > size // 2
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == size


def test_a_stop_sequence_is_named(base):
    text = sent(base, temperature=0).json()["content"][0]["text"]
    word = text.split()[3]
    found = sent(base, temperature=0, stop_sequences=["no such text", word]).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", word)
    assert found["content"][0]["text"] == text[: text.index(word)]


def test_an_answer_is_ended_by_its_limit_or_by_the_context(base):
    long = [{"role": "user", "content": "Once upon a time " * 100}]  # which leaves room for few tokens
    for most, reason in ((1, "max_tokens"), (4000, "model_context_window_exceeded")):
        assert sent(base, messages=long, temperature=0, max_tokens=most).json()["stop_reason"] == reason


def test_a_form_of_the_answer(client):
    class Verdict(pydantic.BaseModel):
        right: bool

    made = client.messages.parse(model="story", max_tokens=60, messages=ASK, output_format=Verdict)
    assert isinstance(made.parsed_output, Verdict)
    assert made.stop_reason == "end_turn"


def test_the_official_client_reads_a_stream(client):
    options = {"model": "story", "max_tokens": 16, "messages": ASK, "extra_body": {"temperature": 0}}
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text
    assert [each.text for each in final.content] == [text]
    assert [each.text for each in client.messages.create(**options).content] == [text]
    assert final.usage.output_tokens == 16


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", None])
def test_versions_and_fields_that_are_not_known_change_nothing(base, version):
    expected = sent(base, temperature=0).json()["content"]
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14"} | (
        {} if version is None else {"anthropic-version": version}
    )
    marked = {"type": "text", "text": ASK[0]["content"], "cache_control": {"type": "ephemeral"}, "citations": None}
    body = {
        "model": "story",
        "max_tokens": 24,
        "temperature": 0,
        "messages": [{"role": "user", "content": [marked], "id": "x"}],
        "metadata": {"user_id": "x"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "thinking": {"type": "adaptive", "budget_tokens": 0, "display": "omitted"},
        "service_tier": "auto",
        "diagnostics": {},
        "no_such_field": [1],
    }
    answer = httpx.post(f"{base}{PATH}?beta=true", json=body, headers=headers, timeout=60)
    assert answer.json()["content"] == expected
    counted = httpx.post(f"{base}{COUNT}?beta=true", json=body, headers=headers, timeout=60)
    assert counted.json() == {"input_tokens": sent(base, COUNT).json()["input_tokens"]}
    assert counted.headers["request-id"]


# --- events -----------------------------------------------------------------------------------------------------------


def test_every_event_has_its_place():
    """Without any of the events that structure a stream, or with one twice, it is found to be wrong."""
    with running(stories(drafter="none")) as (base, _):
        choice = {"type": "tool", "name": "get_weather"}
        events = read_events(sent(base, stream=True, tools=GIVEN, tool_choice=choice, max_tokens=200, seed=1).text)
    kinds = [each["type"] for each in events]
    message_of(json.loads(json.dumps(events)))
    for place, kind in enumerate(kinds):
        if kind != "content_block_delta":
            for wrong in (events[:place] + events[place + 1 :], events[: place + 1] + events[place:]):
                with pytest.raises(AssertionError):
                    message_of(json.loads(json.dumps(wrong)))
    for wrong in (events[::-1], [*events[:-1], {"type": "ping?"}], [events[0], *events[2:4], events[1], *events[4:]]):
        with pytest.raises((AssertionError, KeyError)):
            message_of(json.loads(json.dumps(wrong)))


def answer_to(*pieces, tools=None, **params):
    """The form, the answer, and the events of a stream of some pieces."""
    parsed = ParsedRequest(((1, 2, 3),), (None,), SamplingParams(**params), tools=tools)
    answer = Answer("msg-1", "story", parsed, TokenText(None), with_ids=False)
    form = MessagesForm()
    made = form.opening(answer) + b"".join(form.piece(answer, each, answer.add(each)) for each in pieces)
    return form, answer, (made + form.closing(answer)).decode()


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": [1, '


def parts_of(text):
    return [Piece(text[place : place + 7], (5,), reused=2) for place in range(0, len(text), 7)]


@pytest.mark.parametrize(
    ("more", "finish", "reason", "found"),
    [
        ("2]}}\n</tool_call>", "stop", "tool_use", {"city": "Oslo", "days": [1, 2]}),
        ("", "length", "max_tokens", {"city": "Oslo", "days": [1]}),
    ],
)
def test_reasoning_text_and_calls_are_blocks(more, finish, reason, found):
    tools = ToolSet(DIALECTS["hermes"], (), must=False, several=True, specials={})
    thoughts = [Piece("", (9, 9), reasoning=text, reasoning_tokens=2, reused=2) for text in ("Let me ", "think.")]
    said = parts_of("Well. " + CALL + more)
    last = Piece("", (1,), finish_reason=finish, reused=2)
    size = 2 * len(thoughts) + len(said) + 1
    form, answer, text = answer_to(*thoughts, *said, last, tools=tools, max_tokens=size)
    whole = form.whole(answer).model_dump()
    assert [each["type"] for each in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][0]["thinking"] == "Let me think."
    assert whole["content"][0]["signature"]
    assert whole["content"][1]["text"].strip() == "Well."
    assert (whole["content"][2]["name"], whole["content"][2]["input"]) == ("get_weather", found)
    assert whole["stop_reason"] == reason
    assert whole["usage"]["input_tokens"] == 1
    assert whole["usage"]["cache_read_input_tokens"] == 2
    if finish == "stop":
        assert message_of(read_events(text))["content"] == whole["content"]


def test_a_call_may_be_cut_off_anywhere():
    tools = ToolSet(DIALECTS["hermes"], (), must=False, several=True, specials={})
    text, found = CALL + "2]}}\n</tool_call>", []
    for size in range(len(text) + 1):
        form, answer, _ = answer_to(*parts_of(text[:size]), Piece("", (1,), finish_reason="length"), tools=tools)
        blocks = form.whole(answer).model_dump()["content"]
        found.append([each["input"] for each in blocks if each["type"] == "tool_use"])
    assert [each for each, _ in itertools.groupby(found)] == [
        [],
        [{}],
        [{"city": "Oslo"}],
        [{"city": "Oslo", "days": []}],
        [{"city": "Oslo", "days": [1]}],
        [{"city": "Oslo", "days": [1, 2]}],
    ]


@pytest.mark.parametrize("speculation", [True, False])
def test_a_limit_may_end_an_answer_anywhere_in_a_call(base, speculation):
    limits = {"temperature": 0, "speculation": speculation, "tools": GIVEN[:1], "tool_choice": {"type": "any"}}
    found = [sent(base, max_tokens=most, **limits).json()["content"] for most in range(24, 48)]
    assert [] in found
    assert any(each and each[0]["input"] for each in found)
    assert all(each["type"] == "tool_use" for blocks in found for each in blocks)


def test_a_length_below_the_limit_is_the_context():
    for most, reason in ((2, "max_tokens"), (3, "model_context_window_exceeded")):
        form, answer, _ = answer_to(Piece("x", (1, 2), finish_reason="length"), max_tokens=most)
        assert form.whole(answer).stop_reason == reason


def test_an_answer_without_text_has_no_blocks():
    form, answer, text = answer_to(Piece("", (1,), finish_reason="stop"))
    assert form.whole(answer).content == message_of(read_events(text))["content"] == []
    assert form.whole(answer).stop_reason == "end_turn"


def test_arguments_that_cannot_be_read_are_an_error():
    tools = ToolSet(DIALECTS["hermes"], (), must=False, several=True, specials={})
    text = '<tool_call>\n{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}\n</tool_call>"
    form, answer, _ = answer_to(Piece(text, (1,), finish_reason="stop"), tools=tools)
    with pytest.raises(ApiError, match="ask for a stream"):
        form.whole(answer)


def test_an_error_in_a_stream_is_an_event():
    engine = small_engine()
    inner, rounds = engine._target_probs, []

    def probs(row, draft, output):
        rounds.append(row.id)
        if len(rounds) > 2:
            raise RequestError(row.id, "NaN")
        return inner(row, draft, output)

    engine._target_probs = probs
    with running(engine) as (base, _):
        events = read_events(sent(base, stream=True, max_tokens=200).text)
        client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
        rounds.clear()
        with (
            pytest.raises(anthropic.APIStatusError, match="api_error"),
            client.messages.stream(model="story", max_tokens=200, messages=ASK) as stream,
        ):
            stream.get_final_message()
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert set(events[-1]) == {"type", "error"}
    assert events[-1]["error"]["type"] == "api_error"


# --- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_reasoning_is_a_block_with_a_limit(drafter):
    with running(thinking_engine(drafter, template=OPENED)) as (base, _):
        thinking = {"type": "enabled", "budget_tokens": 12}
        chat = post(base, CHAT, messages=ASK, max_tokens=30, temperature=0, thinking_token_budget=12).json()
        found = sent(base, max_tokens=30, temperature=0, thinking=thinking).json()
        assert [each["type"] for each in found["content"]] == ["thinking", "text"]
        message = chat["choices"][0]["message"]
        assert found["content"][0]["thinking"] == message["reasoning_content"]
        assert found["content"][1]["text"] == message["content"]
        counted = found["usage"]["output_tokens_details"]["thinking_tokens"]
        assert counted == chat["usage"]["completion_tokens_details"]["reasoning_tokens"]
        events = read_events(sent(base, max_tokens=30, temperature=0, thinking=thinking, stream=True).text)
        assert message_of(events)["content"] == found["content"]
        client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
        turns = [*ASK, {"role": "assistant", "content": found["content"]}, ASK[0]]
        more = client.messages.create(model="story", max_tokens=3, messages=turns)
        read = more.usage.input_tokens + more.usage.cache_read_input_tokens
        written = {
            "role": "assistant",
            "content": message["content"],
            "reasoning_content": message["reasoning_content"],
        }
        again = post(base, CHAT, messages=[*ASK, written, ASK[0]], max_tokens=3).json()
        assert read == again["usage"]["prompt_tokens"]


def test_reasoning_can_be_switched_off():
    with running(thinking_engine(template=QWEN)) as (base, _):
        sizes = {
            kind: sent(base, COUNT, thinking={"type": kind, "budget_tokens": 0}).json()["input_tokens"]
            for kind in ("enabled", "adaptive", "between_tools", "disabled")
        }
        plain = sent(base, COUNT).json()["input_tokens"]
        assert sizes == dict.fromkeys(sizes, plain) | {"disabled": sizes["disabled"]}
        assert sizes["disabled"] > plain, "the template writes that there is none"
        none = sent(base, COUNT, output_config={"effort": "none"}).json()["input_tokens"]
        assert none == sizes["disabled"]


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_call_and_its_result(client):
    made = ask(client, tools=GIVEN, tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=200)
    assert made.stop_reason == "tool_use"
    (call,) = made.content
    Weather.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny", "is_error": False}
    turns = [
        *ASK,
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And tomorrow?"}]},
    ]
    final = ask(client, messages=turns, tools=GIVEN, tool_choice={"type": "none"}, max_tokens=8)
    assert [each.type for each in final.content] == ["text"]
    size = client.messages.count_tokens(model="story", messages=turns, tools=GIVEN, tool_choice={"type": "none"})
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == size.input_tokens
    more = client.messages.count_tokens(model="story", messages=turns, tools=GIVEN)
    assert more.input_tokens > size.input_tokens, "without a choice the model is shown the tools"


def test_calls_are_those_of_a_chat(base):
    limits = {"temperature": 0, "max_tokens": 150}
    chat = post(base, CHAT, messages=ASK, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, **limits)
    calls = [each["function"] for each in chat.json()["choices"][0]["message"]["tool_calls"]]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    found = sent(base, tools=GIVEN[:1], tool_choice=choice, **limits).json()
    assert [(each["name"], each["input"]) for each in found["content"]] == [
        (each["name"], json.loads(each["arguments"])) for each in calls
    ]
    streamed = message_of(read_events(sent(base, tools=GIVEN[:1], tool_choice=choice, stream=True, **limits).text))
    assert [each["input"] for each in streamed["content"]] == [each["input"] for each in found["content"]]
    assert streamed["stop_reason"] == found["stop_reason"] == "tool_use"


def test_a_tool_without_a_schema_is_left_out_or_refused(base, caplog):
    only = sent(base, COUNT, tools=GIVEN).json()
    with caplog.at_level(logging.INFO):
        assert sent(base, COUNT, tools=[*GIVEN, OWN_TOOL]).json() == only
    assert "left out: 'web_search_20250305'" in caplog.text
    assert sent(base, COUNT, tools=[OWN_TOOL]).json() == sent(base, COUNT).json()
    for fields in (
        {"tools": [*GIVEN, OWN_TOOL], "tool_choice": {"type": "tool", "name": "web_search"}},
        {"tools": [OWN_TOOL], "tool_choice": {"type": "any"}},
    ):
        assert "expected a tool with an input_schema" in refused(base, **fields)


# --- what a request becomes -------------------------------------------------------------------------------------------


def chat_of(**fields):
    body = validated(MessagesBody, {"max_tokens": 5, "messages": ASK, **fields}, lenient=True)
    return chat_to_answer(body).model_dump(exclude_unset=True, by_alias=True)


def test_messages_of_a_chat():
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "\u00e9", "b": [1]}},
        {"type": "tool_use", "id": "2", "name": "g", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True, "content": "failed"},
        {"type": "tool_result", "tool_use_id": "3"},
    ]
    made = chat_of(
        system=[{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        messages=[
            {"role": "user", "content": "Do."},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
            {"role": "system", "content": "Now be short."},
            {"role": "user", "content": results[1:2]},
        ],
    )
    assistant = made["messages"].pop(2)
    assert [json.loads(each["function"].pop("arguments")) for each in assistant["tool_calls"]] == [
        {"a": "\u00e9", "b": [1]},
        {},
    ]
    assert assistant == {
        "role": "assistant",
        "content": "I ask.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f"}},
            {"id": "2", "type": "function", "function": {"name": "g"}},
        ],
    }
    assert made["messages"] == [
        {"role": "system", "content": "One.\nTwo."},
        {"role": "user", "content": "Do."},
        {"role": "tool", "content": "a\nb", "tool_call_id": "1"},
        {"role": "tool", "content": "failed", "tool_call_id": "2"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Now be short."},
        {"role": "tool", "content": "failed", "tool_call_id": "2"},
    ]


ON, OFF = ({"enable_thinking": each, "thinking": each} for each in (True, False))
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"thinking_token_budget": 1024, "chat_template_kwargs": ON},
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": OFF}),
        ({"thinking": {"type": "adaptive", "budget_tokens": 0}}, {}),
        ({"thinking": {"type": "between_tools"}}, {}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
        ({"stream": True, "speculation": False}, {"stream": True, "speculation": False}),
        ({"tool_choice": {"type": "auto"}}, {}),
        ({"tool_choice": {"type": "none"}, "tools": []}, {}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),  # which is refused where tools are read
    ],
)
def test_fields_of_a_chat(fields, expected):
    plain = {"max_tokens": 5, "stream": False, "speculation": True, "messages": ASK}
    assert chat_of(**fields) == plain | expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, {"tool_choice": "auto", "parallel_tool_calls": True}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required", "parallel_tool_calls": True}),
        ({"type": "none"}, {"tool_choice": "none", "parallel_tool_calls": True}),
        ({"type": "tool", "name": "now"}, {"tool_choice": NAMED, "parallel_tool_calls": True}),
    ],
)
def test_choices_of_tools(choice, expected):
    made = chat_of(tools=GIVEN, tool_choice=choice)
    assert {name: made[name] for name in expected} == expected
    assert [each["function"]["name"] for each in made["tools"]] == ["get_weather", "now"]
    assert made["tools"][0]["function"]["parameters"] == WEATHER


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "got image: only text is read here"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}
                ]
            },
            "got image: only text is read here",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "got tool_use: it belongs to messages of another role",
        ),
        ({"messages": [*ASK, {"role": "assistant", "content": "It"}]}, "an answer that has begun is not continued"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "expected 'type' to be one of 'text'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"max_tokens": -1}, "max_tokens: expected an integer >= 0"),
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"tools": [{"name": "f"}]}, "input_schema is missing"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "name"),
        ({"tools": [*GIVEN, GIVEN[0]]}, "got one name twice"),
        ({"tools": GIVEN, "tool_choice": {"type": "tool"}}, "name belongs to type tool"),
        ({"tools": GIVEN, "tool_choice": {"type": "tool", "name": "f"}}, "not among the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "deep"}}, "expected 'type' to be one of"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens: expected"),
        ({"stop_sequences": [""]}, "stop_sequences: expected"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"messages": [{"role": "user", "content": "x " * 20_000}]}, "prompt is too long: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(base, fields, said):
    assert said in refused(base, **fields)


@pytest.mark.parametrize(("value", "status"), [("[[1]]", 200), ("[" * 900 + "]" * 900, 400), ("NaN", 400)])
def test_arguments_of_earlier_calls(base, value, status):
    """What JSON cannot hold, or a template cannot write, is a mistake of the client."""
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "VALUE"}}
    turns = [*ASK, {"role": "assistant", "content": [call]}, *ASK]
    content = json.dumps({"max_tokens": 3, "messages": turns}).replace('"VALUE"', value)
    answer = httpx.post(base + PATH, content=content, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == status, answer.text


THINKING = [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}]


@pytest.mark.parametrize("thinking", THINKING, ids=lambda given: given["type"])
def test_models_that_do_not_reason_answer(base, without_reasoning, thinking):
    """One without markers, and one whose reasoning is left in its text."""
    for each in (base, without_reasoning):
        made = sent(each, thinking=thinking, max_tokens=8, temperature=0).json()
        assert [block["type"] for block in made["content"]] == ["text"]
        assert made["usage"]["output_tokens"] == 8
    answer = post(without_reasoning, CHAT, messages=ASK, thinking_token_budget=1024)
    assert answer.status_code == 400, "the field of OpenAI's API is this server's own"


@pytest.fixture(scope="module")
def without_reasoning():
    with running(thinking_engine(template=OPENED), reasoning="none") as (base, _):
        yield base


def test_what_is_counted_needs_no_user_at_the_end(base):
    turns = [*ASK, {"role": "assistant", "content": "It is"}]
    assert sent(base, COUNT, messages=turns).json()["input_tokens"] > sent(base, COUNT).json()["input_tokens"]
    body = validated(CountBody, {"messages": turns, "max_tokens": 5, "stream": True}, lenient=True)
    assert not chat_to_count(body).stream


# --- errors and keys --------------------------------------------------------------------------------------------------


def test_errors_are_classes_of_the_official_client(client):
    for kind, fields in (
        (anthropic.NotFoundError, {"model": "another"}),
        (anthropic.BadRequestError, {"max_tokens": -1}),
        (anthropic.RequestTooLargeError, {"messages": [{"role": "user", "content": "x" * 5_000_000}]}),
    ):
        with pytest.raises(kind) as raised:
            ask(client, **fields)
        assert raised.value.body["type"] == "error"
        assert raised.value.request_id == raised.value.body["request_id"]


def test_a_full_queue_and_an_end_are_errors_in_anthropics_words():
    engine = small_engine(max_batch=1)
    slow = Slow(engine)
    slow.may.clear()
    with running(engine, max_waiting=0) as (base, server), ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, base, PATH, messages=ASK, max_tokens=2)
        until(lambda: len(server.worker._open) == 1)
        client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
        with pytest.raises(anthropic.RateLimitError) as raised:
            ask(client)
        assert raised.value.body["error"]["type"] == "rate_limit_error"
        assert int(raised.value.response.headers["retry-after"]) >= 1
        slow.may.set()
        assert first.result().status_code == 200


@pytest.mark.parametrize("headers", [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}])
def test_a_key_comes_in_either_header(headers):
    with running(small_engine(), keys=[KEY]) as (base, _):
        for path in (PATH, COUNT):
            body = {"max_tokens": 2, "messages": ASK}
            assert httpx.post(base + path, json=body, headers=headers, timeout=60).status_code == 200
            without = httpx.post(base + path, json=body, timeout=60)
            assert without.status_code == 401
            assert anthropic_error(without)["type"] == "authentication_error"
            wrong = httpx.post(base + path, json=body, headers=dict.fromkeys(headers, "Bearer wrong"), timeout=60)
            assert wrong.status_code == 401
        assert httpx.get(f"{base}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{base}/v1/models").json()["error"]["code"] == "invalid_api_key"
        both = {"x-api-key": KEY, "authorization": "Basic of a proxy"}
        assert httpx.get(f"{base}/v1/models", headers=both).status_code == 200
        named = [
            anthropic.Anthropic(base_url=base, api_key=KEY),
            anthropic.Anthropic(base_url=base, api_key=None, auth_token=KEY),
        ]
        assert all(ask(each, max_tokens=2).usage.output_tokens == 2 for each in named)
        with pytest.raises(anthropic.AuthenticationError):
            ask(anthropic.Anthropic(base_url=base, api_key="another key of them", max_retries=0))


def test_other_paths_keep_openais_words(base):
    other = post(base, "/v1/messages/batches", requests=[])
    assert (other.status_code, anthropic_error(other)["type"]) == (404, "not_found_error")
    method = httpx.get(base + PATH)
    assert (method.status_code, anthropic_error(method)["type"]) == (405, "invalid_request_error")
    for path in ("/v1/messagesx", "/v1/chat/completions", "/v1/none"):
        answer = post(base, path, messages=[])
        assert list(answer.json()) == ["error"]
        assert "request-id" not in answer.headers


def test_types_of_errors():
    scope = {"path": PATH, "state": {"facts": {"request_id": "7"}}}
    for error, kind in (
        (crowded(), "overloaded_error"),
        (ApiError("x", status=500), "api_error"),
        (ApiError("x", status=504), "timeout_error"),
        (ApiError("x", status=408), "invalid_request_error"),
    ):
        answer = error_answer(error, scope)
        assert answer.status_code == error.status
        assert json.loads(answer.body)["error"]["type"] == kind
        assert json.loads(answer.body)["request_id"] == "7"
        assert json.loads(error_answer(error, {**scope, "path": "/v1/completions"}).body) == error.body()
