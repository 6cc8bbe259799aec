"""The server's API: OpenAI's official client unchanged, what each field does, and what is refused."""

import gzip
import json
import re
from pathlib import Path
from typing import Annotated, Literal

import httpx
import openai
import pydantic
import pytest

import draftproof.server
from draftproof import SamplingParams
from draftproof.sampling import SamplingParams as Params
from draftproof.server import schemas
from draftproof.server.metrics import Metrics, together
from support.serving import STORY, error_of, post, running, small_engine

pytest.importorskip("fastapi", reason="the extra serve is not installed")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell a story."}]


@pytest.fixture(scope="module")
def engine():
    return small_engine()


@pytest.fixture(scope="module")
def base(engine):
    with running(engine) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(base):
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def alone():
    """The same engine for direct calls."""
    return small_engine()


def text(alone, prompt=STORY, **params):
    return alone.generate(prompt, SamplingParams(**params))[0].text


# --- the official client ----------------------------------------------------------------------------------------------


def test_models(client, alone):
    (card,) = client.models.list().data
    assert card.id == "story"
    assert (card.same_bits, card.rounding) == (not alone.rounding, alone.rounding)
    assert client.models.retrieve("story") == card


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}, {"seed": 3, "top_p": 0.9}])
def test_a_completion_is_the_engines_own(client, alone, options):
    made = client.completions.create(model="story", prompt=STORY, max_tokens=24, **options)
    assert made.choices[0].text == text(alone, max_tokens=24, **options)
    assert made.choices[0].finish_reason == "length"
    assert made.usage.completion_tokens == 24
    assert made.usage.prompt_tokens == len(alone.encode(STORY)[1])


def test_a_chat_is_the_engines_own(client, alone):
    made = client.chat.completions.create(model="story", messages=MESSAGES, max_completion_tokens=16, seed=5)
    assert made.choices[0].message.content == text(alone, MESSAGES, max_tokens=16, seed=5)
    assert made.choices[0].message.role == "assistant"


def test_a_stream_has_the_same_text_and_counts(client, alone):
    options = {"max_tokens": 24, "seed": 5}
    chunks = list(
        client.completions.create(
            model="story", prompt=STORY, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text(alone, **options)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24


def test_a_chat_streams(client, alone):
    chunks = list(client.chat.completions.create(model="story", messages=MESSAGES, max_tokens=16, seed=5, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    found = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert found == text(alone, MESSAGES, max_tokens=16, seed=5)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.usage for chunk in chunks} == {None}


def test_several_prompts_and_continuations(client, alone):
    prompts = [STORY, "The little dog"]
    made = client.completions.create(model="story", prompt=prompts, n=2, max_tokens=8, seed=9)
    expected = [each.text for each in alone.generate(prompts, SamplingParams(n=2, max_tokens=8, seed=9))]
    assert [choice.text for choice in made.choices] == expected
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]


def test_several_continuations_stream_with_their_index(client, alone):
    found = [""] * 3
    for chunk in client.completions.create(model="story", prompt=STORY, n=3, max_tokens=8, seed=9, stream=True):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == [each.text for each in alone.generate(STORY, SamplingParams(n=3, max_tokens=8, seed=9))]


def test_token_ids_as_a_prompt(client, alone):
    ids = alone.encode(STORY)[1]
    made = client.completions.create(
        model="story", prompt=ids, max_tokens=8, seed=1, extra_body={"return_token_ids": True}
    )
    expected = alone.generate(STORY, SamplingParams(max_tokens=8, seed=1))[0]
    assert made.choices[0].token_ids == list(expected.token_ids)
    assert made.choices[0].prompt_token_ids == ids


def test_logprobs_of_a_completion(client, alone):
    made = client.completions.create(model="story", prompt=STORY, max_tokens=6, seed=1, logprobs=2).choices[0]
    expected = alone.generate(STORY, SamplingParams(max_tokens=6, seed=1, logprobs=2))[0].logprobs
    assert made.logprobs.token_logprobs == pytest.approx([each.logprob for each in expected], abs=1e-4)
    for token, top in zip(made.logprobs.tokens, made.logprobs.top_logprobs, strict=True):
        assert len(top) in (2, 3), "the chosen token may be a further one"
        assert token in top
    assert "".join(made.logprobs.tokens) == made.text
    assert [
        made.text[at : at + len(t)] for at, t in zip(made.logprobs.text_offset, made.logprobs.tokens, strict=True)
    ] == (made.logprobs.tokens)


def test_logprobs_of_a_prompt(client, base, alone):
    """As lm-eval asks for them (echo), and as vLLM's users do (prompt_logprobs)."""
    options = {"model": "story", "prompt": alone.encode(STORY)[1], "max_tokens": 2, "seed": 1}
    made = client.completions.create(**options, logprobs=2, echo=True).choices[0]
    params = SamplingParams(max_tokens=2, seed=1, logprobs=2, prompt_logprobs=3)
    expected = alone.generate(STORY, params)[0]
    _, *of_prompt = expected.prompt_logprobs
    given = made.logprobs
    assert given.token_logprobs[0] is given.top_logprobs[0] is None
    both = [each.logprob for each in (*of_prompt, *expected.logprobs)]
    assert given.token_logprobs[1:] == pytest.approx(both, abs=1e-4)
    assert all(2 <= len(top) <= 3 for top in given.top_logprobs[1:])
    assert "".join(given.tokens) == made.text
    assert [made.text[at : at + len(t)] for at, t in zip(given.text_offset, given.tokens, strict=True)] == given.tokens
    for path, shape in (("/v1/completions", {}), ("/v1/chat/completions", {"messages": MESSAGES})):
        body = post(base, path, prompt_logprobs=3, max_tokens=2, seed=1, **shape).json()
        entries = (body if shape else body["choices"][0])["prompt_logprobs"]
        assert entries[0] is None
        assert all({1, 2, 3} <= {one["rank"] for one in entry.values()} for entry in entries[1:])
    body = post(base, prompt_logprobs=3, max_tokens=2, seed=1).json()
    for entry, each in zip(body["choices"][0]["prompt_logprobs"][1:], of_prompt, strict=True):
        assert entry[str(each.token_id)]["logprob"] == pytest.approx(each.logprob, abs=1e-4)
        assert entry[str(each.token_id)]["rank"] == each.rank


def test_a_prompt_is_scored_without_an_answer(client):
    options = {"model": "story", "prompt": [STORY, "The dog"], "temperature": 0, "logprobs": 1, "echo": True}
    scored = client.completions.create(**options, max_tokens=0)
    longer = client.completions.create(**options, max_tokens=1)
    for none, one in zip(scored.choices, longer.choices, strict=True):
        assert none.finish_reason == "length"
        assert none.text == options["prompt"][none.index]
        assert none.logprobs.tokens == one.logprobs.tokens[:-1]
        assert none.logprobs.token_logprobs[1:] == pytest.approx(one.logprobs.token_logprobs[1:-1], abs=1e-4)
    assert (scored.usage.completion_tokens, longer.usage.completion_tokens) == (0, 2)
    chunks = list(client.completions.create(model="story", prompt=STORY, max_tokens=0, stream=True))
    assert [(each.choices[0].text, each.choices[0].finish_reason) for each in chunks] == [("", "length")]


def test_logprobs_of_a_chat_and_of_its_stream(client):
    options = {"model": "story", "messages": MESSAGES, "max_tokens": 6, "seed": 1, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [len(each.top_logprobs) for each in whole] == [3] * 6
    streamed = []
    for chunk in client.chat.completions.create(stream=True, **options):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [each.token for each in streamed] == [each.token for each in whole]
    assert [each.logprob for each in streamed] == pytest.approx([each.logprob for each in whole], abs=1e-4)


async def asked(base):
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="story", prompt=STORY, max_tokens=8, seed=2, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])


def test_the_asynchronous_client(base, alone):
    import asyncio

    assert asyncio.run(asked(base)) == text(alone, max_tokens=8, seed=2)


class Pet(pydantic.BaseModel):
    """A form for answers."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["Tom", "Ada", "Rex"]
    age: Annotated[int, pydantic.Field(ge=0, le=20)]


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_parsed_by_the_official_client(client, seed):
    made = client.chat.completions.parse(
        model="story", messages=MESSAGES, response_format=Pet, max_tokens=60, seed=seed
    )
    assert isinstance(made.choices[0].message.parsed, Pet)
    assert made.choices[0].finish_reason == "stop"


class Pets(pydantic.BaseModel):
    """A form with definitions."""

    model_config = pydantic.ConfigDict(extra="forbid")
    first: Pet
    second: Pet


@pytest.mark.parametrize("references", ["#/$defs/{model}", "/$defs/{model}"])
def test_definitions_are_referred_to_with_and_without_a_sign(client, references):
    """LiteLLM leaves the sign out where it makes a schema of a pydantic class."""
    schema = Pets.model_json_schema(ref_template=references)
    assert references.format(model="Pet") in json.dumps(schema)
    form = {"type": "json_schema", "json_schema": {"name": "pets", "schema": schema}}
    made = client.chat.completions.create(
        model="story", messages=MESSAGES, response_format=form, max_tokens=120, seed=1
    )
    Pets.model_validate_json(made.choices[0].message.content)


def test_forms_of_a_completion(base):
    def made(**fields):
        return post(base, **{"max_tokens": 80, "seed": 1, **fields}).json()["choices"][0]["text"]

    assert made(response_format={"type": "json_object"}).startswith("{")
    assert re.fullmatch("[0-9]{4}", made(structured_outputs={"regex": "[0-9]{4}"}))
    assert made(structured_outputs={"choice": ["a+b", "c.d"]}) in ("a+b", "c.d")
    assert made(structured_outputs={"grammar": 'start: "x" "y"'}) == "xy"
    assert json.loads(made(structured_outputs={"json": {"enum": [1, 2]}})) in (1, 2)
    assert made(response_format={"type": "text"})


def test_a_form_in_a_stream(client, alone):
    schema = {"name": "pet", "schema": Pet.model_json_schema()}
    options = {"max_tokens": 60, "seed": 4}
    stream = client.chat.completions.create(
        model="story",
        messages=MESSAGES,
        stream=True,
        response_format={"type": "json_schema", "json_schema": schema},
        **options,
    )
    found = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    Pet.model_validate_json(found)
    assert found == text(alone, MESSAGES, grammar=f"json_schema:{json.dumps(schema['schema'])}", **options)


def test_a_prediction(client, alone):
    options = {"model": "story", "prompt": STORY, "max_tokens": 60, "temperature": 0}
    plain = client.completions.create(**options)
    body = {"prediction": {"type": "content", "content": plain.choices[0].text}}
    made = client.completions.create(**options, extra_body=body)
    assert made.choices[0].text == plain.choices[0].text
    assert plain.usage.completion_tokens_details is None
    details, size = made.usage.completion_tokens_details, len(alone.prompts.plain(plain.choices[0].text))
    assert details.accepted_prediction_tokens > 30
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == size
    stream = client.completions.create(**options, extra_body=body, stream=True, stream_options={"include_usage": True})
    streamed = list(stream)[-1].usage.completion_tokens_details  # lengths of drafts depend on the clock
    assert streamed.accepted_prediction_tokens > 30
    assert streamed.accepted_prediction_tokens + streamed.rejected_prediction_tokens == size


def test_a_prediction_of_a_chat(client, alone):
    options = {"model": "story", "messages": MESSAGES, "max_tokens": 30, "seed": 3}
    expected = text(alone, MESSAGES, max_tokens=30, seed=3)
    parts = [{"type": "text", "text": expected}]
    made = client.chat.completions.create(**options, prediction={"type": "content", "content": parts})
    assert made.choices[0].message.content == expected, "a seed gives one text, whatever is predicted"
    assert made.usage.completion_tokens_details.accepted_prediction_tokens > 5


def test_a_drafter_that_cannot_use_a_prediction():
    with running(small_engine(drafter="none")) as (base, _):
        answer = post(base, prediction={"type": "content", "content": "x"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "prediction"


# --- fields -----------------------------------------------------------------------------------------------------------

FIELDS = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.7,
    "min_p": 0.2,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "bad_words": ["there"],
    "stop": [" was"],
    "min_tokens": 3,
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "stop_token_ids": [5, 6],
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_sampling_field_does_what_it_does_in_python(base, alone, name):
    options = {name: FIELDS[name], **({"stop": " was"} if name.startswith("include") else {})}
    made = post(base, seed=4, max_tokens=20, **options)
    assert made.status_code == 200, made.text
    assert made.json()["choices"][0]["text"] == text(alone, seed=4, max_tokens=20, **options)


def test_logit_bias_has_token_ids_as_keys(base, alone):
    made = post(base, temperature=0, max_tokens=4, logit_bias={"5": 100})
    assert made.json()["choices"][0]["text"] == text(alone, temperature=0, max_tokens=4, logit_bias={5: 100})


def test_every_sampling_parameter_is_a_field():
    assert set(Params.__dataclass_fields__) - {"grammar"} <= set(schemas.CompletionBody.model_fields)


def test_echo_gives_the_prompt_too(base, alone):
    made = post(base, echo=True, temperature=0, max_tokens=4)
    assert made.json()["choices"][0]["text"] == STORY + text(alone, temperature=0, max_tokens=4)
    events = httpx.post(
        f"{base}/v1/completions",
        json={"prompt": STORY, "echo": True, "temperature": 0, "max_tokens": 4, "stream": True},
    ).text
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == made.json()["choices"][0]["text"]


def test_a_stop_string_says_which_it_was(base):
    choice = post(base, temperature=0, stop=[" was", "zzz"]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " was")


def test_nulls_are_not_given(base):
    assert post(base, stop=None, seed=None, logit_bias=None, user="u1", suffix=None).status_code == 200


def test_parts_of_a_message_and_developer_messages(base, alone):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Tell"}, {"type": "text", "text": "me"}]},
    ]
    made = post(base, "/v1/chat/completions", messages=messages, seed=1, max_tokens=5)
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell\nme"}]
    assert made.json()["choices"][0]["message"]["content"] == text(alone, same, seed=1, max_tokens=5)


REFUSED = [
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"seed": 1 << 70}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 1, "echo": True, "stream": True}, "echo"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, None),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, None),
    ({"prompt": [-1]}, None),
    ({"prompt": 5}, "prompt"),
    ({"prompt": "a" * 20_000}, "prompt"),
    ({"stop": [""]}, "stop"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "blub"}}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"chunks": 1}}, "chunks"),
    ({"stream": False, "return_drafts": True}, "return_drafts"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_used_is_a_400_that_names_it(base, fields, param, stream):
    answer = post(base, **({"stream": stream} if "stream_options" not in fields else {}) | fields)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300


CHAT_REFUSED = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"audio": {}}, "audio"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages.0"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content",
    ),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSED, ids=range(len(CHAT_REFUSED)))
def test_what_a_chat_cannot_use(base, fields, param):
    answer = post(base, "/v1/chat/completions", **{"messages": MESSAGES, **fields})
    assert answer.status_code == 400, answer.text
    assert (error_of(answer)["param"] or "").startswith(param)


def test_another_model_is_not_found(base):
    answer = post(base, model="gpt-9")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"


def test_compressed_bodies_are_refused_by_their_encoding(base):
    content = gzip.compress(json.dumps({"prompt": "Once", "max_tokens": 1}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx.post(f"{base}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert error_of(answer)["message"] == "expected a body without Content-Encoding, got 'gzip'"
    headers["content-encoding"] = "identity"
    answer = httpx.post(f"{base}/v1/completions", json={"prompt": "Once", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200


BODIES = [b"{", b"[]", b"", b'{"prompt": "\\ud800"}', b"\xff", b"[" * 100_000]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_bodies_that_are_none(base, body):
    answer = httpx.post(f"{base}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error_of(answer)


def test_unknown_paths_and_methods_have_the_same_form_of_error(base):
    for method, path, status in (("POST", "/v1/embeddings", 404), ("GET", "/v1/completions", 405)):
        answer = httpx.request(method, base + path)
        assert answer.status_code == status
        assert error_of(answer)["message"].startswith(f"{method} '{path}' is not served: /openapi.json lists ")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(("path", "hint"), [("/chat/completions", True), ("/models", True), ("/v1/chat", False)])
def test_a_base_url_without_v1_is_noticed(base, path, hint):
    """As a client asks that appends its paths to an address without /v1."""
    answer = httpx.post(base + path, json={})
    assert answer.status_code == 404
    assert ("end the client's base URL with /v1" in error_of(answer)["message"]) is hint


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("max_token", "did you mean max_tokens?"),
        ("qqqq", "/openapi.json lists the fields that are"),
        ("instructions", "/openapi.json lists the fields that are"),  # of another API
    ],
)
def test_a_field_that_is_misspelt(base, field, said):
    answer = error_of(post(base, **{field: 1}))
    assert answer["param"] == field
    assert answer["message"] == f"{field} is not supported: {said}"


@pytest.mark.parametrize(
    ("value", "said"),
    [(5.5, "5.5"), (True, "true"), ("5 private", "a text"), ([7], "a list"), ({"a": 7}, "an object"), (10**400, None)],
)
def test_a_value_of_another_type_is_said_without_its_text(base, value, said):
    answer = error_of(post(base, max_tokens=value))
    assert answer["param"] == "max_tokens"
    assert len(answer["message"]) < 200
    if said is not None:
        assert answer["message"] == f"max_tokens: Input should be a valid integer, got {said}"


@pytest.mark.parametrize("count", [-1, 21])
def test_an_error_names_the_field_that_counts_log_probabilities(base, count):
    chat = error_of(post(base, "/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=count))
    text = error_of(post(base, prompt="Once", logprobs=count))
    for answer, field in ((chat, "top_logprobs"), (text, "logprobs")):
        assert answer["param"] == field
        assert answer["message"].startswith(f"{field}: expected ")


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/v1/models", 200), ("/v1/completions", 405)])
def test_head_answers_as_get_without_a_body(base, path, status):
    answers = [httpx.request(method, base + path) for method in ("HEAD", "GET")]
    assert [answer.status_code for answer in answers] == [status, status]
    assert [len(answer.content) > 0 for answer in answers] == [False, True]
    assert answers[0].headers["content-type"] == answers[1].headers["content-type"]


def test_a_model_without_a_chat_template_says_so():
    engine = small_engine()
    engine.tokenizer.chat_template = None
    with running(engine) as (base, _):
        answer = post(base, "/v1/chat/completions", messages=MESSAGES)
    assert answer.status_code == 400
    assert "has no chat template" in error_of(answer)["message"]


# --- tokens and state -------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize(base, alone):
    made = post(base, "/tokenize", prompt=STORY, return_token_strs=True).json()
    assert made["tokens"] == alone.encode(STORY)[1]
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    plain = post(base, "/tokenize", prompt=STORY, add_special_tokens=False).json()["tokens"]
    assert post(base, "/detokenize", tokens=plain).json()["prompt"] == STORY
    chat = post(base, "/tokenize", messages=MESSAGES).json()["tokens"]
    assert chat == alone.encode(MESSAGES)[1]
    assert post(base, "/detokenize", tokens=[10**6]).status_code == 400
    assert post(base, "/tokenize").status_code == 400


def test_state(base):
    for path in ("/health", "/ready", "/version"):
        assert httpx.get(base + path).status_code == 200
    described = httpx.get(f"{base}/openapi.json").json()
    assert "/v1/chat/completions" in described["paths"]


def test_metrics_count_what_was_decoded(engine):
    with running(small_engine()) as (base, _):
        before = metrics_of(base)
        made = post(base, max_tokens=12, n=2).json()
        after = metrics_of(base)
    assert made["usage"]["completion_tokens"] == 24
    gained = {name: value - before.get(name, 0) for name, value in after.items()}
    assert gained["generation_tokens_total"] == 24
    assert gained["prompt_tokens_total"] == 2 * made["usage"]["prompt_tokens"]
    assert gained["time_to_first_token_seconds_count"] == 2
    assert gained["request_queue_time_seconds_count"] == 2
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    drafted, accepted = gained["spec_decode_num_draft_tokens_total"], gained["spec_decode_num_accepted_tokens_total"]
    assert 0 <= accepted <= drafted
    assert gained["num_target_calls_total"] + accepted >= 24
    places = [
        value for name, value in after.items() if name.startswith("spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(places) == accepted
    by_source = {name: value for name, value in after.items() if name.startswith("generation_tokens_by_source_total")}
    assert sum(by_source.values()) == 24
    target = next((value for name, value in by_source.items() if 'source="target"' in name), 0)
    assert 24 - target == accepted


def test_metrics_show_memory_and_what_was_reused():
    with running(small_engine(kv_memory="8MiB")) as (base, _):
        prompt = "Once upon a time there was a little dog. " * 6
        first = post(base, prompt=prompt, max_tokens=2).json()
        between = metrics_of(base)
        post(base, prompt=prompt + "It", max_tokens=2)
        after = metrics_of(base)
    assert between["prefix_cache_hits_total"] == between["kv_cache_used_bytes"] == 0
    assert between["prefix_cache_queries_total"] == first["usage"]["prompt_tokens"]
    assert after["prefix_cache_hits_total"] > first["usage"]["prompt_tokens"] / 2
    assert after["kv_cache_usage_perc"] == after["kv_cache_kept_bytes"] / 2**23 > 0


def test_pages_of_several_servers_are_one_page_that_keeps_every_sample():
    pages = {}
    for number, name in enumerate(("one", "two")):
        metrics = Metrics('a "name"')
        metrics.generation_tokens.inc(3 + number)
        metrics.first_token.observe(0.01)
        metrics.ended("stop", 1.0, 3)
        pages[name] = metrics.page().decode()
    page = together(pages, "replica").decode()
    kinds = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert sorted(kinds) == sorted(line for line in pages["one"].splitlines() if line.startswith("# TYPE"))
    for name, alone in pages.items():
        of_one = [line.replace(f',replica="{name}"', "") for line in page.splitlines() if f'replica="{name}"' in line]
        assert sorted(of_one) == sorted(line for line in alone.splitlines() if not line.startswith("#"))


def metrics_of(base):
    """Values by name, without the prefix and without the label of the model."""
    found = {}
    for line in httpx.get(f"{base}/metrics").text.splitlines():
        if line.startswith("draftproof:"):
            name, value = line.rsplit(" ", 1)
            found[name.removeprefix("draftproof:").replace('{model_name="story"}', "")] = float(value)
    return found


def test_the_dashboard_shows_metrics_that_exist(base):
    known = post(base, max_tokens=40, temperature=0).json()["choices"][0]["text"]
    post(base, max_tokens=40, temperature=0, prediction={"type": "content", "content": known})  # accepted tokens
    file = Path(draftproof.server.__file__).parent / "grafana.json"
    shown = set(re.findall(r"draftproof:(\w+)", file.read_text(encoding="utf-8")))
    known = {name.partition("{")[0] for name in metrics_of(base)}
    assert len(shown) > 10
    assert shown <= known


def test_a_stream_says_what_was_drafted(base, alone):
    known = text(alone, max_tokens=40, temperature=0)
    body = {"prompt": STORY, "max_tokens": 40, "temperature": 0, "stream": True, "return_drafts": True}
    answer = httpx.post(f"{base}/v1/completions", json={**body, "prediction": {"type": "content", "content": known}})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    drafts = [json.loads(line[6:])["choices"][0]["draft"] for line in lines]
    assert "".join(token for draft in drafts for token in draft["tokens"]) == known
    assert sum(draft["accepted"] for draft in drafts if draft["origin"] == "prediction") > 10
    assert all(draft["accepted"] <= min(draft["drafted"], len(draft["tokens"])) for draft in drafts)


def test_a_request_may_be_decoded_plainly(base, alone):
    body = {"prompt": STORY, "max_tokens": 20, "seed": 4, "stream": True, "return_drafts": True, "speculation": False}
    lines = httpx.post(f"{base}/v1/completions", json=body).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert {choice["draft"]["drafted"] for choice in choices} == {0}
    assert len(choices) == 20
    assert "".join(choice["text"] for choice in choices) == text(alone, max_tokens=20, seed=4)


def test_the_page_loads_nothing_from_elsewhere(base):
    answer = httpx.get(base)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert not re.findall(r"https?://|(?:src|href)=\"(?!data:)", answer.text)
    asked = set(re.findall(r"<(?:input|select|textarea) name=\"(\w+)\"", answer.text))
    assert asked
    assert asked <= set(schemas.CompletionBody.model_fields)
    assert asked <= set(schemas.ChatBody.model_fields)
