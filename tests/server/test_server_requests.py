"""How requests are read: limits by what they cost, nothing kept that nobody reads, what ends an answer, and errors."""

import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from draftproof import Engine, SamplingParams, UserError
from draftproof.engine.request import Request
from draftproof.sampling import TokenLogprob
from draftproof.server import schemas
from draftproof.server.api.answer import Answer, TokenText
from draftproof.server.auth import allowed_hosts, is_allowed_host, read_keys
from draftproof.server.errors import ApiError
from draftproof.server.parse_request import ParsedRequest
from draftproof.server.settings import Settings
from support.raw_http import Slow
from support.serving import STORY, error_of, post, running, small_engine, until
from support.tools import ASK, CHAT, TOOLS, stories

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLS = [{"type": "function", "function": {"name": "get", "parameters": CITY}}]


@pytest.fixture(scope="module")
def engine():
    return small_engine()


@pytest.fixture(scope="module")
def base(engine):
    with running(engine) as (address, _):
        yield address


# --- bad words --------------------------------------------------------------------------------------------------------


def test_bad_words_are_encoded_once_and_never_in_the_engines_thread(engine, base, monkeypatch):
    """They were encoded for each prompt again, between two rounds: one request stopped all streams for 17 s."""
    read, plain = [], engine.prompts.plain
    monkeypatch.setattr(
        engine.prompts, "plain", lambda text: read.append((threading.current_thread().name, text)) or plain(text)
    )
    words = [f"word number {each}" for each in range(50)]
    assert post(base, prompt=[STORY] * 20, bad_words=words, max_tokens=1).status_code == 200
    assert len(read) == 2 * len(words)
    assert "engine" not in {thread for thread, _ in read}


def test_bad_words_do_what_they_do_in_python(engine, base):
    words = ["upon", "little", "there was", "a girl", "He"]
    made = post(base, bad_words=words, seed=5, max_tokens=40, n=3).json()["choices"]
    params = SamplingParams(bad_words=words, seed=5, max_tokens=40, n=3)
    assert [each["text"] for each in made] == [each.text for each in small_engine().generate(STORY, params)]


# --- limits by cost ---------------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": ["abcd " * 100] * 100}, "bad_words"),
        ({"prompt": [[5] * 400] * 70, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [5] * 400, "n": 70, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [5] * 400, "n": 70, "echo": True, "logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": [[5] * 10] * 72, "n": 1, "logprobs": 20, "max_tokens": 16_384}, "logprobs"),
    ],
    ids=range(5),
)
def test_limits_are_by_what_a_request_costs(monkeypatch, fields, param):
    monkeypatch.setattr("draftproof.server.parse_request._MOST_LOGPROBS_MADE", 400_000)
    with running(small_engine()) as (base, _):
        error = error_of(post(base, **fields))
    assert error["param"] == param
    assert re.search(r"expected .*at most \d+", error["message"])


def test_log_probabilities_of_a_prompt_are_computed_once_for_all_choices(base, monkeypatch):
    scored, score = [], Request.score
    monkeypatch.setattr(
        Request, "score", lambda self, logits, first: scored.append(len(logits)) or score(self, logits, first)
    )
    made = post(base, prompt=STORY, prompt_logprobs=2, max_tokens=4, n=5, seed=1).json()
    size = made["usage"]["prompt_tokens"]
    assert sum(scored) == size - 1
    assert all(each["prompt_logprobs"] == made["choices"][0]["prompt_logprobs"] for each in made["choices"])
    alone = post(base, prompt=STORY, prompt_logprobs=2, max_tokens=4, seed=1).json()["choices"][0]
    assert alone["prompt_logprobs"] == made["choices"][0]["prompt_logprobs"]
    assert len(alone["prompt_logprobs"]) == size


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    "options", [{}, {"prefix_reuse": False}, {"max_batch": 2}], ids=["usual", "anew", "small batch"]
)
@pytest.mark.parametrize("size", [3, 300])
def test_choices_get_the_scores_of_their_prompt_also_where_the_first_one_leaves(options, size):
    engine = small_engine(drafter="none", **options)
    prompt = [1, *(5 + place % 90 for place in range(size - 1))]
    params = SamplingParams(n=3, prompt_logprobs=1, max_tokens=3, seed=1)
    expected = engine.generate([prompt], params)
    for rounds in range(3):
        first, *others = engine.add(prompt, params)
        for _ in range(rounds):
            engine.step()
        engine.abort(first)
        while not all(each.finished for each in others):
            engine.step()
        for each, known in zip(others, expected[1:], strict=True):
            assert tuple(each.output_ids) == known.token_ids
            assert [one.token_id for one in each.prompt_logprobs] == prompt[1:]
            assert [one.logprob for one in each.prompt_logprobs] == pytest.approx(
                [one.logprob for one in known.prompt_logprobs[1:]], abs=1e-4
            )


# --- memory -----------------------------------------------------------------------------------------------------------

UNREAD = "[" + ",".join(["{}"] * 500_000) + "]"  # 1.5 MB of JSON, 36 MB of objects
BODIES = {
    "parsed": f'{{"messages": [{{"role": "user", "content": "x", "parsed": {UNREAD}}}], "max_tokens": 2}}',
    "provider_specific_fields": (
        f'{{"messages": [{{"role": "user", "content": "x", "provider_specific_fields": {UNREAD}}}], "max_tokens": 2}}'
    ),
    "parsed_arguments": (
        '{"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}",'
        f' "parsed_arguments": {UNREAD}}}}}]}}], "max_tokens": 2}}'
    ),
    "parameters": (
        f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 2, "tool_choice": "none", "tools": '
        f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {UNREAD}}}}}}}]}}'
    ),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_an_open_request_holds_no_memory_for_its_body(name, stream):
    """A body of 4 MB took 100 MB for as long as its request lived."""
    slow = Slow(engine := stories(drafter="none"))
    body = BODIES[name][:-1] + (', "stream": true}' if stream else "}")
    with running(engine) as (base, server), ThreadPoolExecutor(3) as pool:
        headers = {"content-type": "application/json"}

        def ask():
            return httpx.post(base + CHAT, content=body, headers=headers, timeout=60).status_code

        assert ask() == 200
        slow.may.clear()
        before = sys.getallocatedblocks()
        asked = [pool.submit(ask) for _ in range(3)]
        until(lambda: len(server.worker._open) == 3, 30)
        until(lambda: sys.getallocatedblocks() - before < 300_000, 5)  # each body has more than 500 000 objects
        slow.may.set()
        assert [each.result() for each in asked] == [200] * 3


def test_no_field_keeps_what_it_does_not_read():
    """Whatever is typed as anything is dropped while a body is checked."""
    kinds = [each for each in vars(schemas).values() if isinstance(each, type) and issubclass(each, schemas.Body)]
    found = {(kind.__name__, name) for kind in kinds for name, each in kind.model_fields.items() if "Any" in str(each)}
    read = {
        ("Schema", "schema_"),
        ("StructuredOutputs", "json_"),
        ("Function", "parameters"),
        ("ChatBody", "chat_template_kwargs"),
    }
    for kind, name in found - read:
        shape = {
            "role": "user",
            "content": "x",
            "name": "f",
            "arguments": "",
            "id": "a",
            "function": {"name": "f", "arguments": ""},
            "prompt": "x",
            "messages": [{"role": "user", "content": "x"}],
        }
        model = getattr(schemas, kind)
        fields = {key: value for key, value in shape.items() if key in model.model_fields}
        assert getattr(model.model_validate({**fields, name: [{"a": [1]}]}), name) is None
    assert len(found) > 5


# --- fields -----------------------------------------------------------------------------------------------------------

IGNORED = {
    "documents": [{"text": "x"}],
    "mm_processor_kwargs": {"a": 1},
    "chat_template": "x",
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "guided_json": {},
    "guided_regex": "a",
    "best_of": 2,
    "length_penalty": 2.0,
    "use_beam_search": True,
    "truncate_prompt_tokens": 4,
    "allowed_token_ids": [1],
    "logits_processors": ["x"],
    "priority": 1,
    "web_search_options": {},
    "modalities": ["audio"],
    "suffix": "x",
}


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_field_that_would_change_the_answer_is_never_ignored(base, path, name):
    shape = {"messages": ASK} if path == CHAT else {}
    answer = post(base, path, **shape, **{name: IGNORED[name]}, max_tokens=1)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name


WITHOUT_EFFECT = {
    "user": "u1",
    "store": True,
    "metadata": {"a": {"b": 1}},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
}


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_fields_without_effect_on_the_text_are_taken(base, path):
    shape = {"messages": ASK} if path == CHAT else {}
    plain = post(base, path, **shape, max_tokens=4, seed=1).json()["choices"]
    assert post(base, path, **shape, **WITHOUT_EFFECT, max_tokens=4, seed=1).json()["choices"] == plain


def test_tokenize_ignores_nothing(base):
    assert error_of(post(base, "/tokenize", messages=ASK, add_special_tokens=True))["param"] == "messages"
    assert post(base, "/tokenize", messages=ASK, add_special_tokens=False).status_code == 200


def test_empty_lists_are_as_good_as_none(base):
    """Frameworks send their lists of tools and calls also where they are empty."""
    plain = post(base, CHAT, messages=ASK, max_tokens=4, seed=1).json()["choices"]
    for fields in (
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [], "tool_choice": "none"},
        {"messages": [{**ASK[0], "tool_calls": []}]},
        {"stop": [], "bad_words": [], "logit_bias": {}, "stop_token_ids": []},
    ):
        answer = post(base, CHAT, **{"messages": ASK, "max_tokens": 4, "seed": 1, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain
    assert error_of(post(base, CHAT, messages=ASK, tools=[], tool_choice="required"))["param"] == "tool_choice"
    assert post(base, "/tokenize", messages=ASK, tools=[]).status_code == 200
    assert post(base, "/tokenize", prompt="x", tools=[]).status_code == 200


# --- what ends an answer ----------------------------------------------------------------------------------------------


def streamed(base, path, body):
    """Text, arguments of calls and reason of a stream."""
    answer = httpx.post(base + path, json={**body, "stream": True}, timeout=60)
    choices = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [part for each in choices for part in each.get("delta", {}).get("tool_calls", ())]
    text = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)
    return text, "".join(each["function"]["arguments"] for each in parts), choices[-1]["finish_reason"]


def whole(base, path, body):
    """The same of an answer that is not streamed."""
    (choice,) = post(base, path, **body).json()["choices"]
    if "text" in choice:
        return choice["text"], "", choice["finish_reason"]
    calls = choice["message"]["tool_calls"] or ()
    text = choice["message"]["content"] or ""
    return text, "".join(each["function"]["arguments"] for each in calls), choice["finish_reason"]


@pytest.fixture(scope="module", params=["drafts", "plain"])
def told(request):
    options = {"drafter": "none"} if request.param == "plain" else {"drafter": "model", "stopper": "fixed:4"}
    with running(stories(**options)) as (address, _):
        yield address


STOPS = ['"', "city", "{", ":", "a", "e", " "]


@pytest.mark.grid(2)
@pytest.mark.parametrize("read", [streamed, whole])
@pytest.mark.parametrize("seed", range(3))
def test_no_stop_string_cuts_a_call(told, read, seed):
    """The arguments were cut to `{"city": "`, and the reason still said that there was a call."""
    body = {"messages": ASK, "tools": CALLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    bare = read(told, CHAT, {**body, "max_tokens": 100})
    assert bare[2] == "tool_calls"
    assert set(json.loads(bare[1])) == {"city"}
    assert read(told, CHAT, {**body, "max_tokens": 100, "stop": STOPS, "stop_token_ids": [*range(300, 500)]}) == bare


@pytest.mark.grid(11)
@pytest.mark.parametrize("read", [streamed, whole])
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}},
        {"structured_outputs": {"regex": "[a-f]{3}: [a-f]{4}"}},
        {"structured_outputs": {"choice": ["a city", "a, e"]}},
        {"structured_outputs": {"grammar": 'start: "a " /[b-z]{4}/'}},
    ],
    ids=["schema", "regex", "choice", "grammar"],
)
def test_no_stop_string_cuts_a_form(told, read, form):
    body = {"prompt": "Once", "seed": 2, "max_tokens": 100, **form}
    bare = read(told, "/v1/completions", body)
    assert bare[2] == "stop"
    assert read(told, "/v1/completions", {**body, "stop": STOPS, "stop_token_ids": [*range(300, 500)]}) == bare


@pytest.mark.parametrize("read", [streamed, whole])
def test_stop_strings_count_in_the_text_before_a_call(told, read):
    body = {"messages": ASK, "tools": TOOLS, "seed": 1, "max_tokens": 30}
    text, calls, _ = read(told, CHAT, body)
    assert not calls
    stop = text.split()[3]
    assert read(told, CHAT, {**body, "stop": stop}) == (text[: text.index(stop)], "", "stop")


def test_python_has_the_same_rule():
    engine = Engine.load("embedded:stories", drafter="none")
    params = {"grammar": "regex:[ab]{3} [cd]{3}", "seed": 1, "max_tokens": 40}
    bare = engine.generate("Once", SamplingParams(**params))[0]
    assert re.fullmatch("[ab]{3} [cd]{3}", bare.text)
    assert engine.generate("Once", SamplingParams(**params, stop=["a", "b", " "]))[0].text == bare.text


# --- errors -----------------------------------------------------------------------------------------------------------

LONG = 10**4299
WHOLE = sorted(
    {
        name
        for kind in (schemas.CompletionBody, schemas.ChatBody)
        for name, each in kind.model_fields.items()
        if "int" in str(each.annotation)
    }
    - {"prompt", "stop", "logprobs"}
)


@pytest.mark.parametrize("name", WHOLE)
def test_numbers_of_thousands_of_digits_are_a_400(base, name):
    value = [LONG] if "stop_token" in name else LONG
    chat = name not in schemas.CompletionBody.model_fields
    for sign in (1, -1):
        sent = [sign * each for each in value] if isinstance(value, list) else sign * value
        for shape in ({"prompt": ["a", "b"]}, {"messages": ASK}):
            if "prompt" in shape and chat:
                continue
            path = CHAT if "messages" in shape else "/v1/completions"
            answer = (
                post(base, path, **{**shape, name: sent})
                if "prompt" not in shape
                else post(base, **{**shape, name: sent})
            )
            assert answer.status_code == 400, answer.text
            assert error_of(answer)["param"].startswith(name)
            assert len(error_of(answer)["message"]) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": LONG},
        {"logit_bias": {"5": LONG}},
        {"logit_bias": {str(LONG): 1}},
        {"prompt": [LONG]},
        {"prompt": [[1], [LONG]]},
        {"structured_outputs": {"json": {"maximum": LONG}}},
        {"structured_outputs": {"json": "[" * 60_000}},
        {"structured_outputs": {"json": '{"a":' * 60_000}},
        {"structured_outputs": {"json": "no json"}},
    ],
    ids=range(9),
)
def test_odd_values_are_a_400(base, fields):
    answer = post(base, **fields)
    assert answer.status_code == 400, answer.text
    assert len(error_of(answer)["message"]) < 500


def places(kind, found=()):
    """Paths to the texts of a body, by a value that is legal there otherwise."""
    huge = "q" * 100_000
    yield {"model": huge}
    yield {"response_format": {"type": huge}}
    yield {"response_format": {huge: huge}}
    yield {"structured_outputs": {"regex": "(" + huge}}
    yield {"structured_outputs": {"grammar": "start: " + huge}}
    yield {"structured_outputs": {huge: 1}}
    yield {"logit_bias": {huge: 1}}
    yield {"logprobs_mode": huge}
    yield {"stop": huge}
    yield {"bad_words": [huge]}
    yield {"prediction": {"type": huge, "content": "x"}}
    yield {huge: 1}
    yield {"n": huge}
    if kind == CHAT:
        yield {"messages": [{"role": huge, "content": "x"}]}
        yield {"messages": [{"role": "user", "content": [{"type": huge, "text": "x"}]}]}
        yield {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": huge, "arguments": "["}}]}
            ]
        }
        yield {"tools": [{"type": huge, "function": {"name": "f"}}]}
        yield {"tools": [{"type": "function", "function": {"name": huge}}]}
        yield {"tools": CALLS, "tool_choice": huge}
        yield {"tools": CALLS, "tool_choice": {"type": "function", "function": {"name": huge}}}
        yield {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": huge}}}]}
    else:
        yield {"prompt": {huge: huge}}


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_no_error_repeats_what_is_long(path):
    with running(stories(drafter="none")) as (base, _):
        for fields in places(path):
            shape = {"messages": ASK} if path == CHAT else {"prompt": "x"}
            answer = httpx.post(base + path, json={**shape, "max_tokens": 1, **fields}, timeout=60)
            assert answer.status_code in (400, 404), answer.text[:300]
            assert "q" * 120 not in answer.text
            assert len(answer.text) < 800


def test_long_messages_keep_their_beginning_and_end():
    error = ApiError("begin " + "x" * 10_000 + " end")
    assert len(error.message) <= 400
    assert error.message.startswith("begin ")
    assert error.message.endswith(" end")


@pytest.mark.parametrize(
    "key", ["sk-0123456789abcdéf", "sk-0123456789abcdef\N{ZERO WIDTH SPACE}", "sk-0123456789abcde\x7f"]
)
def test_keys_that_no_header_can_carry_are_refused_at_the_start(tmp_path, monkeypatch, key):
    monkeypatch.setenv("DRAFTPROOF_KEYS", key)
    with pytest.raises(UserError, match="DRAFTPROOF_KEYS holds an API key with other characters"):
        read_keys(None)
    monkeypatch.delenv("DRAFTPROOF_KEYS")
    file = tmp_path / "keys"
    file.write_text(key, encoding="utf-8")
    with pytest.raises(UserError, match="other characters than those of ASCII"):
        read_keys(file)


# --- tokens with one text ---------------------------------------------------------------------------------------------


def test_byte_tokens_keep_their_own_entries_in_the_top():
    """Bytes that are a part of a character all have the text U+FFFD: of two of them one was left out."""
    tokenizer = Engine.load("embedded:target", drafter="none").tokenizer
    text = TokenText(tokenizer)
    broken = [each for each in range(len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" in text(each)][:4]
    assert len({text(each) for each in broken}) == 1, "else the test says nothing"
    (letter,) = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    parsed = ParsedRequest(((1,),), (None,), SamplingParams(logprobs=5))
    answer = Answer("x", "y", parsed, text, with_ids=False)
    names = answer.keys_of([*broken, letter])
    assert len(set(names)) == 5
    assert all(re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", each) for each in names[:4])
    assert names[4] == text(letter)
    entry = TokenLogprob(broken[0], -3.0, 9, tuple((each, -1.0 - place) for place, each in enumerate(broken[1:])))
    from draftproof.server.api.completions import _completion_logprobs

    made = _completion_logprobs(answer, [entry], 0)
    assert len(made.top_logprobs[0]) == 4
    assert made.top_logprobs[0][made.tokens[0]] == -3.0


def test_tokens_of_one_text_have_names_of_their_own(engine):
    class Same(TokenText):
        def __call__(self, token):  # noqa: ARG002
            return "same"

    parsed = ParsedRequest(((1,),), (None,), SamplingParams(logprobs=5))
    answer = Answer("x", "y", parsed, Same(engine.tokenizer), with_ids=False)
    assert answer.keys_of([7, 5, 7, 6]) == ["same", "token_id:5", "same", "token_id:6"]


# --- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80", ""]
)
def test_a_local_server_answers_at_its_own_names_only(base, path, host):
    """A page of another site can make its name point to 127.0.0.1; to a browser it may read the answers then."""
    answer = httpx.get(base + path, headers={"host": host})
    assert answer.status_code == 421
    assert "--allowed-host" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "a.localhost", "localhost."]
)
def test_names_of_the_machine_itself(base, host):
    assert httpx.get(f"{base}/health", headers={"host": host}).status_code == 200


def test_further_names_may_be_allowed(engine):
    with running(small_engine(), allowed_host=("Box.example", "[fe80::1]")) as (base, _):
        for host, status in (("box.example:8000", 200), ("BOX.EXAMPLE", 200), ("other.example", 421)):
            assert httpx.get(f"{base}/health", headers={"host": host}).status_code == status


def test_with_keys_or_for_other_machines_every_name_is_good():
    assert allowed_hosts(Settings(), ["k" * 16]) is None
    assert allowed_hosts(Settings(host="0.0.0.0"), ()) is None  # noqa: S104 - nothing listens
    assert allowed_hosts(Settings(host="box.example"), ()) is None
    for host in ("127.0.0.1", "localhost", "::1", "127.3.4.5"):
        assert allowed_hosts(Settings(host=host, allowed_host=("a",)), ()) == ("a",)
    with running(small_engine(), keys=("k" * 16,)) as (base, _):
        assert httpx.get(f"{base}/health", headers={"host": "evil.example"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["a@localhost", "localhost:x", "localhost:80:80", "[::1", "::1", "local host", "localhost/a", "\\localhost"]
)
def test_what_is_no_host(host):
    assert not is_allowed_host(host, ())


# --- texts of tokens --------------------------------------------------------------------------------------------------


def test_detokenize_is_limited_by_the_context(engine, base):
    """690 000 ids of blanks made a text of 39 MB, in the event loop's way."""
    most = engine.target.max_positions
    assert post(base, "/detokenize", tokens=[5] * most).status_code == 200
    error = error_of(post(base, "/detokenize", tokens=[5] * (most + 1)))
    assert error["param"] == "tokens"
    assert f"expected at most {most}" in error["message"]


def test_tokens_become_text_outside_the_event_loop(base, monkeypatch):
    seen, joined = [], TokenText.joined
    monkeypatch.setattr(
        TokenText, "joined", lambda self, tokens: seen.append(threading.current_thread().name) or joined(self, tokens)
    )
    assert post(base, "/detokenize", tokens=[5, 6, 7]).status_code == 200
    assert post(base, "/tokenize", prompt="a b c", return_token_strs=True).status_code == 200
    assert seen
    assert all(name == "reading" or "worker" in name.lower() for name in seen), seen
