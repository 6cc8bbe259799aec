"""A framework on the official client, where one is installed: pip install litellm mcp; no part of the extra dev."""

import asyncio
import json

import pytest

from draftproof import SamplingParams
from support.serving import running
from support.tools import ASK, TOOLS, Weather, stories

litellm = pytest.importorskip("litellm", reason="litellm is not installed")


@pytest.fixture(scope="module")
def options():
    with running(stories()) as (base, _):
        yield {"model": "openai/story", "api_base": f"{base}/v1", "api_key": "none", "messages": ASK, "max_retries": 0}


@pytest.fixture(scope="module")
def expected():
    return stories().generate(ASK, SamplingParams(seed=5, max_tokens=16))[0]


def test_a_chat(options, expected):
    made = litellm.completion(**options, seed=5, max_tokens=16)
    assert made.choices[0].message.content == expected.text
    assert made.choices[0].finish_reason == expected.finish_reason
    assert made.usage.completion_tokens == len(expected.token_ids)


def test_a_stream(options, expected):
    chunks = litellm.completion(**options, seed=5, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text


def test_asynchronously(options, expected):
    async def ask():
        whole = await litellm.acompletion(**options, seed=5, max_tokens=16)
        stream = await litellm.acompletion(**options, seed=5, max_tokens=16, stream=True)
        return whole.choices[0].message.content, "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(ask()) == (expected.text, expected.text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(options, choice):
    given = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1, "max_tokens": 150}
    made = litellm.completion(**options, **given)
    (call,) = made.choices[0].message.tool_calls
    assert made.choices[0].finish_reason == "tool_calls"
    if call.function.name == "get_weather":
        Weather.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(**options, **given, stream=True))
    built = litellm.stream_chunk_builder(chunks)
    (streamed,) = built.choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    more = litellm.completion(**{**options, "messages": [*ASK, made.choices[0].message, result]}, max_tokens=8)
    assert more.choices[0].message.content


def test_a_form(options):
    properties = {"ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    made = litellm.completion(**options, response_format=form, seed=1, max_tokens=60)
    assert set(json.loads(made.choices[0].message.content)) == {"ok"}


def test_an_error(options):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**options, temperature=-1)
