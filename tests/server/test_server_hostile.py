"""What a hostile client can send: everything has a limit, and nothing that one client does costs others."""

import gc
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof import Engine, UserError
from draftproof.errors import NoTokenError, RequestError
from draftproof.finish import overlap
from draftproof.server.api.answer import TokenText
from draftproof.server.schemas import ChatBody, CompletionBody
from draftproof.server.settings import read_text
from support.raw_http import Slow, address, connected, raw, serve
from support.serving import STORY, error_of, post, running, small_engine, until


@pytest.fixture(scope="module")
def engine():
    return small_engine()


@pytest.fixture(scope="module")
def base(engine):
    with running(engine, read_timeout=2.0) as (address, _):
        yield address


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [1.5] * 10_000}),
        (CompletionBody, {"prompt": [[]] + [[1.5]] * 10_000}),
        (CompletionBody, {"prompt": ["x"] + [1] * 10_000}),
        (CompletionBody, {"prompt": "x", "stop": [1] * 10_000}),
        (CompletionBody, {"prompt": "x", "bad_words": [1] * 10_000}),
        (ChatBody, {"messages": [1] * 10_000}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 10_000}]}),
    ],
)
def test_a_million_mistakes_are_not_collected(kind, body):
    """Errors of each item took 39 s for a body of 3 MB, in the event loop's thread."""
    with pytest.raises(pydantic.ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() < 5


LARGE = [
    ({"prompt": "a" * 100_000}, "prompt"),
    ({"prompt": [5] * 100_000}, "prompt"),
    ({"prompt": ["a", "a" * 100_000]}, "prompt"),
    ({"prediction": {"type": "content", "content": "a" * 100_000}}, "prediction"),
    ({"stop": "a" * 600}, "stop"),
    ({"stop": ["a" * 600]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"bad_words": ["a" * 600]}, "bad_words"),
    ({"structured_outputs": {"regex": "a" * 140_000}}, "structured_outputs"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "a" * 140_000}}}},
        "response_format",
    ),
    ({"logit_bias": {str(each): 1 for each in range(5000)}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"n": 10**18}, "n"),
]


@pytest.mark.parametrize(("fields", "param"), LARGE, ids=range(len(LARGE)))
def test_everything_has_a_limit(base, fields, param):
    answer = post(base, **fields)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert (error["param"] or "").startswith(param or "")
    assert len(error["message"]) < 300
    assert "should be a valid string" not in error["message"], "the wrong branch of a union"


def test_long_texts_are_refused_before_they_are_tokenized(engine, base, monkeypatch):
    read = []
    monkeypatch.setattr(engine.prompts, "_ids", lambda text, **_: read.append(text) or [1])
    for path, fields in (
        ("/v1/completions", {"prompt": "a" * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 100_000}]}),
        ("/tokenize", {"prompt": "a" * 100_000, "add_special_tokens": False}),
        ("/v1/completions", {"prediction": {"type": "content", "content": "a" * 100_000}}),
    ):
        assert error_of(post(base, path, **fields))["code"] == "context_length_exceeded"
    assert set(read) <= {STORY}


def test_numbers_that_json_has_not_are_refused(base):
    for value in ("NaN", "Infinity"):
        body = f'{{"prompt": "x", "structured_outputs": {{"json": {{"const": {value}}}}}}}'
        answer = httpx.post(f"{base}/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "structured_outputs"


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", None])
def test_other_content_types_are_refused(base, kind):
    """Also those that a page of another site may send without asking."""
    headers = {} if kind is None else {"content-type": kind}
    answer = httpx.post(f"{base}/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 400
    assert "Content-Type" in error_of(answer)["message"]


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=6))
def test_overlap_is_the_longest_one(text, stop):
    sizes = [size for size in range(len(stop)) if text.endswith(stop[:size])]
    assert overlap(text, stop) == max(sizes)


# --- time of others ---------------------------------------------------------------------------------------------------


def test_a_grammar_that_takes_long_holds_up_nobody(engine, base, monkeypatch):
    """Neither a request without one, nor one whose grammar is known, nor the engine's thread."""
    known = {"structured_outputs": {"regex": "[ab]{3}"}, "max_tokens": 8}
    assert post(base, **known).status_code == 200
    new, go, began = engine.grammars._new, threading.Event(), threading.Event()

    def slow(spec):
        if "xy" in spec:
            began.set()
            assert go.wait(30)
        return new(spec)

    monkeypatch.setattr(engine.grammars, "_new", slow)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, base, structured_outputs={"regex": "[xy]{4}"})
        assert began.wait(10)
        try:
            assert post(base, **known).status_code == 200
            assert post(base, max_tokens=2).status_code == 200
            assert post(base, structured_outputs={"regex": "[ab]{5}c"}, max_tokens=8).status_code == 200
        finally:
            go.set()
        assert asked.result().status_code == 200


def test_grammars_are_compiled_once_and_never_in_the_engines_thread(engine, base, monkeypatch):
    """Not even where one is forgotten before its request reaches the engine."""
    new, made = engine.grammars._new, []

    def noting(spec):
        made.append((spec, threading.current_thread().name))
        return new(spec)

    monkeypatch.setattr("draftproof.grammar._KEPT", 0)
    monkeypatch.setattr(engine.grammars, "_new", noting)
    prompts = [STORY, "The dog"]
    answer = post(base, prompt=prompts, n=2, structured_outputs={"regex": "[ab]{4}"}, max_tokens=8)
    assert len(answer.json()["choices"]) == 4
    assert [spec for spec, _ in made] == ["regex:[ab]{4}"]
    assert made[0][1] != "engine"


GRAMMARS_THAT_TAKE_TOO_MUCH = {
    "rules": {"grammar": "start: r0\n" + "".join(f'r{n}: r{n + 1} | "a"\n' for n in range(7000)) + 'r7000: "b"\n'},
    "references": {
        "json": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2500)},
        }
    },
    "memory": {"regex": "a?" * 60_000},
    "time": {"regex": "a*b*" * 30_000},
    "panic": {"regex": r"(é|\w)|\w"},
    "levels": {"json": "[" * 60_000},
}


@pytest.mark.parametrize("kind", GRAMMARS_THAT_TAKE_TOO_MUCH)
def test_a_grammar_that_takes_too_much_is_400_in_a_few_words(base, kind):
    answer = post(base, structured_outputs=GRAMMARS_THAT_TAKE_TOO_MUCH[kind], max_tokens=2)
    if answer.status_code != 200:  # some are only long
        assert answer.status_code == 400
        found = error_of(answer)
        assert found["param"] == "structured_outputs"
        assert len(found["message"]) < 250
    else:
        assert kind in ("rules", "references")
    assert httpx.get(f"{base}/health").status_code == 200


def test_grammars_that_were_used_last_are_kept(engine, monkeypatch):
    monkeypatch.setattr("draftproof.grammar._KEPT", 2)
    for spec in ("regex:a", "regex:b", "regex:a", "regex:c"):
        engine.grammars.constraint(spec)
    assert set(engine.grammars._compiled) == {"regex:a", "regex:c"}


def test_grammars_of_ended_requests_are_freed_at_once(engine, base):
    """Also after an error, whose traceback is a part of cycles: a lexer can take 30 MB, and the collector is slow."""
    assert post(base, max_tokens=2).status_code == 200
    gc.collect()
    gc.disable()
    try:
        before, kept = len(engine.grammars._held), 0
        for size in range(900, 905):
            heavy = {"regex": f"((a{{{size}}}){{1000}}){{10}}"}
            answer = post(base, structured_outputs=heavy, max_tokens=4)
            assert answer.status_code in (200, 400), answer.text
            kept += answer.status_code == 200  # for later requests
        until(lambda: len(engine.grammars._held) <= before + kept)
    finally:
        gc.enable()


def test_a_body_that_does_not_come_is_408(base):
    with connected(base) as connection:
        connection.settimeout(20)
        request = raw(prompt=STORY)
        connection.sendall(request[:-5])
        start = time.monotonic()
        answer = connection.recv(4000)
        assert b"408" in answer.split(b"\r\n")[0]
        assert 1.0 < time.monotonic() - start < 15


def test_a_connection_that_says_nothing_is_closed(base):
    for begin in (b"", b"POST /v1/completions HTTP/1.1\r\n"):
        with connected(base) as connection:
            connection.settimeout(20)
            connection.sendall(begin)
            assert connection.recv(100) == b""


def test_a_second_request_on_a_connection_may_be_late_too(base):
    with connected(base) as connection:
        connection.settimeout(20)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # its head and its body may come one after the other
            answer += connection.recv(4000)
        assert b"200" in answer
        connection.sendall(b"GET /heal")
        assert connection.recv(4000) == b""


def test_more_requests_than_are_read_at_once_are_429_before_their_body(monkeypatch):
    monkeypatch.setattr("draftproof.server.app._BODIES_AT_ONCE", -3)
    with running(small_engine(max_batch=2), max_waiting=2) as (base, _), connected(base) as one:
        one.sendall(raw(prompt=STORY)[:-5])
        until(lambda: post(base).status_code == 429)
        assert httpx.get(f"{base}/health").status_code == 200


# --- failures of the engine -----------------------------------------------------------------------------------------


def test_requests_that_wait_are_not_blamed_for_a_round():
    engine = small_engine(max_batch=1)
    slow, ids = Slow(engine, 0.02), engine.encode("The dog")[1]
    step = slow.step

    def failing():
        if any(row.tokens[: len(ids)] == ids and row.round > 2 for row in engine.scheduler.running):
            raise RuntimeError("broken by it, later")
        step()

    slow.step = failing
    with running(engine) as (base, server), ThreadPoolExecutor(2) as pool:
        slow.may.clear()
        first = pool.submit(post, base, prompt="The dog", max_tokens=30)
        until(lambda: len(server.worker._open) == 1)
        other = pool.submit(post, base, max_tokens=4)
        until(lambda: len(server.worker._open) == 2)
        slow.may.set()
        assert first.result().status_code == 500
        assert other.result().status_code == 200


def test_requests_that_the_thread_never_saw_are_answered_when_it_ends():
    engine = small_engine()
    slow = Slow(engine)
    with running(engine) as (base, server), ThreadPoolExecutor(2) as pool:
        slow.may.clear()
        asked = [pool.submit(post, base, max_tokens=2)]
        until(lambda: server.worker._rows)
        asked.append(pool.submit(post, base, max_tokens=2))
        until(lambda: len(server.worker._open) == 2)
        server.worker._take = lambda: 1 / 0
        slow.may.set()
        assert {each.result().status_code for each in asked} <= {200, 503}
        assert asked[1].result().status_code == 503


DIES = """
def end(self):
    raise {error}("x")

from draftproof.server.worker import EngineWorker
EngineWorker._admit = end
"""


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ZeroDivisionError", "SystemExit"])
def test_a_server_whose_engine_died_ends_with_an_error(error):
    """So that a supervisor starts it again."""
    process = serve("--target", "embedded:target", before=DIES.format(error=error))
    assert post(address(process)).status_code == 503
    _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert log.splitlines()[-1].startswith("draftproof: error: the engine's thread ended")


def test_parameters_that_leave_no_token_are_the_clients_mistake():
    engine = small_engine()

    def none_left(row, *_):
        raise RequestError(row.id, "a row") from NoTokenError("every token is masked in embedded:target")

    engine._target_probs = none_left
    with running(engine, hidden=["/embedded:target"]) as (base, _):
        answer = post(base)
        assert answer.status_code == 400
        assert "every token is masked" in error_of(answer)["message"]


def test_logits_that_are_not_numbers_are_the_servers_mistake():
    engine = small_engine()
    inner = engine._target_probs

    def broken(row, draft, output):
        output.logits[:] = float("nan")
        return inner(row, draft, output)

    engine._target_probs = broken
    with running(engine) as (base, _):
        assert post(base).status_code == 500


def test_nobody_writes_lines_into_the_log(base, caplog):
    with caplog.at_level(logging.INFO, "draftproof.access"):
        httpx.get(f"{base}/%0adraftproof:%20fake%1b[31m")
        until(lambda: caplog.records)
    (record,) = [each for each in caplog.records if "fake" in str(each.facts)]
    assert record.facts["path"] == "/%0Adraftproof%3A%20fake%1B%5B31m"


# --- what tokens are called -----------------------------------------------------------------------------------------


def test_offsets_of_a_stream_are_those_of_the_whole_answer(base):
    """Text that could be the beginning of a stop string is held back; tokens are not."""
    body = {"max_tokens": 40, "seed": 4, "logprobs": 1, "stop": ["zzzz", "a little girl named Zoe", " and then he"]}
    whole = post(base, **body).json()["choices"][0]["logprobs"]["text_offset"]
    lines = post(base, **body, stream=True).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert [each for chunk in chunks for each in chunk["logprobs"]["text_offset"]] == whole


def test_log_probabilities_may_name_tokens_by_id(base):
    body = {"max_tokens": 6, "seed": 1, "logprobs": 3, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = post(base, **body).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    for token, top in zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True):
        assert len(top) in (3, 4)
        assert f"token_id:{token}" in top, "the chosen token is among them"
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    made = post(base, "/v1/chat/completions", **chat, return_tokens_as_token_ids=True, return_token_ids=True).json()
    (choice,) = made["choices"]
    assert [each["token"] for each in choice["logprobs"]["content"]] == [
        f"token_id:{each}" for each in choice["token_ids"]
    ]


def test_bytes_of_tokens_are_those_of_the_text():
    for target in ("embedded:stories", "embedded:target"):
        tokenizer = Engine.load(target, drafter="none").tokenizer
        text = TokenText(tokenizer)
        said = "Zoë ate crème brûlée: 你好 🙂"
        ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        assert any("\N{REPLACEMENT CHARACTER}" in text(each) for each in ids), "else the test says nothing"
        assert b"".join(text.content(each) for each in ids).decode().strip() == said


def test_a_chat_template_may_be_given(tmp_path):
    engine = Engine.load("embedded:stories", drafter="none")
    file = tmp_path / "template"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    engine.prompts.use_template(read_text(file, "the chat template"))
    assert engine.prompts.chat_text([{"role": "user", "content": "x"}]) == "<x>"
    assert engine.prompts.chat_text([{"role": "user", "content": "x"}], [{"type": "function"}]) == "<x>"
    with pytest.raises(UserError, match="cannot read the chat template"):
        read_text(tmp_path / "none", "the chat template")


def test_a_chat_template_with_a_mistake_is_refused_before_the_first_chat():
    prompts = Engine.load("embedded:stories", drafter="none").prompts
    for template, said in (
        ("{{ messages", "has a mistake in line 1: unexpected end of template"),
        ("x\n{% for m in messages %}{{ m.content }}", "has a mistake in line 2: "),
        ("{{ messages | nothing }}", "No filter named 'nothing'"),
        (" \n", "is empty"),
    ):
        with pytest.raises(UserError, match=said):
            prompts.use_template(template)
    assert not prompts.has_template
    loop = "{% for m in messages %}{%- generation -%}{{ m.content | tojson }}{% endgeneration %}{% break %}{% endfor %}"
    prompts.use_template(loop)  # what transformers takes beyond jinja's own
    assert prompts.chat_text([{"role": "user", "content": "x"}]) == '"x"'


def test_one_client_of_openai_at_a_full_server_waits_and_is_served():
    """The official client repeats after Retry-After."""
    slow = Slow(engine := small_engine(max_batch=1), 0.05)
    with running(engine, max_waiting=0) as (base, _), ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, base, max_tokens=12)
        until(lambda: slow.rounds)
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=5)
        assert client.completions.create(model="story", prompt=STORY, max_tokens=2).choices[0].text
        assert first.result().status_code == 200
