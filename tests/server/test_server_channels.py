"""A model that writes in channels (gpt-oss): reasoning, answers and calls through the server."""

import json

import pytest

from draftproof.server.schemas import Message
from support.message_events import message_of, read_events
from support.reasoning_models import CHANNELS, channel_engine
from support.response_events import events_of, replayed
from support.serving import post, running
from support.tools import CHAT, TOOLS, WEATHER

ASK = [{"role": "user", "content": "Who is there?"}]
JUNK = ("analysis", "final", "commentary", "assistant", "<|")
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}


@pytest.fixture(scope="module", params=[pytest.param("none", marks=pytest.mark.slow), "model"])
def base(request):
    with running(channel_engine(request.param)) as (made, _):
        yield made


def asked(base, **fields):
    body = {"messages": ASK, "max_tokens": 40, "thinking_token_budget": 6, "return_token_ids": True, **fields}
    answer = post(base, CHAT, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.fixture(scope="module")
def reasoned(base):
    """Fields with which the model reasons, which by itself it does not."""
    tokens = post(base, "/tokenize", prompt="<|channel|>analysis<|message|>", add_special_tokens=False).json()["tokens"]
    return {"logit_bias": {str(tokens[1]): 100}}


def clean(message):
    return not any(junk in (message["content"] or "") + (message["reasoning_content"] or "") for junk in JUNK)


def test_headers_are_in_no_text(base, reasoned):
    for fields in ({}, reasoned):
        for seed in range(4):
            made = asked(base, seed=seed, **fields)
            assert clean(made["message"]), made["message"]
            assert made["message"]["content"]
            assert bool(made["message"]["reasoning_content"]) is bool(fields)
            if fields:
                first = made["token_ids"].index(CHANNELS["<|message|>"])
                assert made["token_ids"][first + 7] == CHANNELS["<|end|>"]


def test_a_stream_is_the_whole_answer(base, reasoned):
    for fields in ({}, reasoned):
        message = asked(base, seed=1, **fields)["message"]
        body = {"messages": ASK, "max_tokens": 40, "thinking_token_budget": 6, "seed": 1, **fields}
        lines = post(base, CHAT, **body, stream=True).text.splitlines()
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
        assert "".join(each.get("content") or "" for each in deltas) == message["content"]
        assert "".join(each.get("reasoning_content", "") for each in deltas) == (message["reasoning_content"] or "")


def test_log_probabilities_are_of_the_answer(base, reasoned):
    for fields in ({}, reasoned):
        made = asked(base, seed=1, logprobs=True, **fields)
        shown = [each["token"] for each in made["logprobs"]["content"]]
        assert "".join(shown).strip() == made["message"]["content"].strip()


@pytest.mark.parametrize("seed", range(3))
def test_a_form_has_its_header(base, reasoned, seed):
    for fields in ({}, reasoned):
        made = asked(base, structured_outputs={"regex": "[a-z]{4,6}"}, seed=seed, **fields)
        assert 4 <= len(made["message"]["content"]) <= 6
        assert made["message"]["content"].isalpha()
        assert bool(made["message"]["reasoning_content"]) is bool(fields)


@pytest.mark.parametrize("seed", range(3))
def test_calls_follow_the_reasoning(base, reasoned, seed):
    for fields in ({}, reasoned):
        made = asked(base, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=200, **fields)
        (call,) = made["message"]["tool_calls"]
        assert made["finish_reason"] == "tool_calls"
        assert clean(made["message"])
        assert bool(made["message"]["reasoning_content"]) is bool(fields)
    named = asked(
        base, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=160
    )
    arguments = json.loads(named["message"]["tool_calls"][0]["function"]["arguments"])
    assert set(arguments) == set(WEATHER["required"])
    assert json.loads(call["function"]["arguments"]) is not None


def test_a_model_that_may_call_answers_without_header(base, reasoned):
    for seed in range(4):
        made = asked(base, tools=TOOLS, seed=seed, max_tokens=80, **(reasoned if seed % 2 else {}))
        assert clean(made["message"]), made["message"]
        assert made["message"]["content"] or made["message"]["tool_calls"]


def test_other_apis(base):
    body = {"max_tokens": 40, "messages": ASK, "temperature": 0, "thinking": {"type": "enabled", "budget_tokens": 6}}
    whole = post(base, "/v1/messages", **body).json()
    assert message_of(read_events(post(base, "/v1/messages", **body, stream=True).text))["content"] == whole["content"]
    asked_for = {"input": ASK, "temperature": 0, "max_output_tokens": 40, "thinking_token_budget": 6}
    made = replayed(events_of(post(base, "/v1/responses", **asked_for, stream=True).text))
    texts = [each["content"][0]["text"] for each in made["output"]]
    assert texts == [each.get("text") or each["thinking"] for each in whole["content"]]


def test_calls_and_thoughts_of_earlier_turns():
    engine = channel_engine()
    with running(engine) as (base, server):
        turns = [*ASK, {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]}]
        turns += [{"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
        text = engine.tokenizer.decode(server._parser.chat_prompt([Message.model_validate(each) for each in turns], []))
        assert "analysis<|message|>Hm.<|end|>" in text
        assert 'to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>' in text
        assert asked(base, messages=turns, tools=TOOLS)["message"]
