"""Reasoning through the server: divided from the answer, switched by the template, limited, before tools and forms."""

import json

import httpx
import pytest

from draftproof import UserError
from draftproof.server.settings import Settings
from support.reasoning_models import MARKERS, OPENED, QWEN, thinking_engine
from support.serving import error_of, post, running
from support.tools import HERMES

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Who is there?"}]
TOOLS = [{"type": "function", "function": {"name": "now"}}]
END = MARKERS["</think>"]


@pytest.fixture(scope="module", params=["none", "model"])
def base(request):
    with running(thinking_engine(request.param, template=OPENED)) as (made, _):
        yield made


def asked(base, **fields):
    answer = post(base, CHAT, **{"messages": ASK, "max_tokens": 24, "seed": 1, "thinking_token_budget": 5, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(base, **fields):
    body = {"messages": ASK, "max_tokens": 24, "seed": 1, "thinking_token_budget": 5, "stream": True, **fields}
    lines = httpx.post(f"{base}{CHAT}", json=body, timeout=60).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_the_answer_is_divided(base):
    made = asked(base, return_token_ids=True)
    message, ids = made["choices"][0]["message"], made["choices"][0]["token_ids"]
    assert message["reasoning_content"]
    assert message["content"]
    assert "think>" not in message["reasoning_content"] + message["content"]
    spent = ids.index(END) + 1
    assert spent == 5  # the prompt has one more
    assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] == spent
    assert made["usage"]["completion_tokens"] == len(ids) == 24


def test_a_stream_says_the_same(base):
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(base)]
    message = asked(base)["choices"][0]["message"]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == message["reasoning_content"]
    assert "".join(each.get("content") or "" for each in deltas) == message["content"]
    last = max(place for place, each in enumerate(deltas) if each.get("reasoning_content"))
    assert all(not each.get("content") for each in deltas[:last])


def test_logprobs_are_of_the_answer(base):
    made = asked(base, logprobs=True, return_token_ids=True)["choices"][0]
    assert len(made["logprobs"]["content"]) == len(made["token_ids"]) - made["token_ids"].index(END) - 1
    found = [chunk["choices"][0]["logprobs"] for chunk in streamed(base, logprobs=True)]
    assert sum(len(each["content"]) for each in found if each) == len(made["logprobs"]["content"])


def test_stop_strings_are_meant_for_the_answer(base):
    free = asked(base)["choices"][0]["message"]
    letter = next(each for each in free["reasoning_content"] if each in free["content"])
    message = asked(base, stop=[letter])["choices"][0]["message"]
    assert message["reasoning_content"] == free["reasoning_content"]
    assert message["content"] == free["content"].partition(letter)[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_form_begins_after_the_reasoning(base, seed):
    message = asked(base, structured_outputs={"regex": "[a-z]{4,6}"}, seed=seed)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"].isalpha()
    assert 4 <= len(message["content"]) <= 6


def test_a_limit_of_all_tokens_leaves_an_empty_answer(base):
    choice = asked(base, max_tokens=3)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"]


def test_reasoning_of_earlier_turns_goes_into_the_prompt(base):
    for name in ("reasoning_content", "reasoning"):
        turn = {"role": "assistant", "content": "A cat.", name: "I see a cat."}
        made = post(base, "/tokenize", messages=[*ASK, turn, *ASK], return_token_strs=True).json()
        assert "<think>\nI see a cat.\n</think>\n\nA cat." in "".join(made["token_strs"])
    only = {"role": "assistant", "reasoning_content": "I see a cat."}
    assert post(base, CHAT, messages=[*ASK, only, *ASK], max_tokens=1).status_code == 200
    assert error_of(post(base, CHAT, messages=[{"role": "user", "content": "x", "reasoning": "y"}]))


def test_a_prompt_that_is_no_chat_is_not_divided(base):
    choice = post(base, prompt="a <think>", max_tokens=4).json()["choices"][0]
    assert "reasoning" not in json.dumps(choice)
    limited = post(base, prompt="a <think>", max_tokens=6, thinking_token_budget=2, return_token_ids=True, logprobs=0)
    limited = limited.json()["choices"][0]
    assert limited["token_ids"].index(END) == 2
    assert limited["text"].partition("</think>")[0]
    assert len(limited["logprobs"]["tokens"]) == 6


# --- the switch -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def switched():
    with running(thinking_engine(template=QWEN)) as (made, _):
        yield made


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, True),
        ({"chat_template_kwargs": {"no_such_name": 1}}, True),
    ],
)
def test_the_template_switches_it(switched, fields, reasons):
    made = asked(switched, logit_bias={str(MARKERS["<think>"]): 100}, max_tokens=6, **fields)
    message = made["choices"][0]["message"]
    assert (made["usage"]["completion_tokens_details"] or {}).get("reasoning_tokens", 0) == (6 if reasons else 0)
    assert ("think" in message["content"]) == (not reasons)


def test_a_model_may_begin_by_itself_before_a_form(switched):
    def content(**fields):
        made = asked(switched, structured_outputs={"regex": "[a-z]{4,6}"}, **fields)
        return made["choices"][0]["message"], made["usage"]["completion_tokens_details"]["reasoning_tokens"]

    message, spent = content(logit_bias={str(MARKERS["<think>"]): 100})
    assert spent == 7  # the markers are not counted
    assert message["content"].isalpha()
    message, spent = content(logit_bias={str(MARKERS["<think>"]): -100})
    assert spent == 0
    assert message["content"].isalpha()


# --- the operator -----------------------------------------------------------------------------------------------------


def test_an_operator_sets_a_limit_and_leaves_requests_their_own():
    with running(thinking_engine(template=OPENED), reasoning_budget=3) as (base, _):
        spent = [
            asked(base, **fields)["usage"]["completion_tokens_details"]["reasoning_tokens"]
            for fields in ({"thinking_token_budget": None}, {"thinking_token_budget": 6})
        ]
        assert spent == [3, 6]
        assert httpx.get(f"{base}/v1/models").json()["data"][0]["reasoning"] is True


def test_an_operator_can_leave_it_in_the_text():
    with running(thinking_engine(template=OPENED), reasoning="none") as (base, _):
        made = asked(base, thinking_token_budget=None, logit_bias={str(END): 100}, max_tokens=4)
        assert made["choices"][0]["message"]["reasoning_content"] is None
        assert "</think>" in made["choices"][0]["message"]["content"]
        assert error_of(post(base, CHAT, messages=ASK, thinking_token_budget=1))["param"] == "thinking_token_budget"
        assert httpx.get(f"{base}/v1/models").json()["data"][0]["reasoning"] is False


@pytest.mark.parametrize(
    "options", [{"reasoning": "x"}, {"reasoning_budget": -1}, {"reasoning": "none", "reasoning_budget": 1}]
)
def test_settings_that_make_no_sense(options):
    with pytest.raises(UserError, match="reasoning"):
        Settings(**options)


@pytest.mark.grid(2)
@pytest.mark.parametrize("drafter", ["none", "model", "model+suffix:8"])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_begin_after_the_reasoning(drafter, choice):
    template = HERMES + "{{ '<think>\\n' }}{# ends with </think> #}"
    with running(thinking_engine(drafter, template=template)) as (base, _):
        for seed in range(3):
            made = asked(base, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed, max_tokens=60)[
                "choices"
            ][0]
            message = made["message"]
            assert message["reasoning_content"]
            assert "<tool_call>" not in message["reasoning_content"]
            if choice == "required":
                assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
                assert made["finish_reason"] == "tool_calls"
