"""The server under load and under attack: limits, deadlines, clients that leave, failures, keys, and how it ends."""

import json
import logging
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from draftproof import Engine, SamplingParams, UserError
from draftproof.cli import app
from draftproof.errors import RequestError
from draftproof.server import schemas
from draftproof.server.api.completions import CompletionForm
from draftproof.server.app import Stream
from draftproof.server.auth import OPEN, ApiKeys, read_keys
from draftproof.server.run import bind
from draftproof.server.settings import Settings, served_name
from support.raw_http import KEY, OTHER, Slow, address, connected, descriptors, raw, serve
from support.serving import STORY, error_of, post, running, small_engine, until

LONG = {"max_tokens": 300, "ignore_eos": True, "seed": 1}
MARK = "my-own-prompt"
BODIES = {
    "/v1/completions": schemas.CompletionBody,
    "/v1/chat/completions": schemas.ChatBody,
    "/tokenize": schemas.TokenizeBody,
    "/detokenize": schemas.DetokenizeBody,
}
FIELDS = {"type", "text", "content", "role", "regex", "schema", "json_schema", "include_usage", "1"}


@pytest.fixture
def engine():
    return small_engine(max_batch=2)


def events_of(answer):
    return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]


# --- the queue ----------------------------------------------------------------------------------------------------


def test_a_full_queue_is_429_with_a_time(engine):
    slow = Slow(engine)
    slow.may.clear()
    with running(engine, max_waiting=1) as (base, server), ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(post, base, max_tokens=4) for _ in range(3)]
        until(lambda: len(server.worker._open) == 3)
        answer = post(base)
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert error_of(answer)["type"] == "rate_limit_error"
        slow.may.set()
        assert [each.result().status_code for each in asked] == [200] * 3
        assert post(base, max_tokens=1).status_code == 200


def test_more_continuations_than_ever_fit_are_refused_at_once(engine):
    with running(engine, max_waiting=1) as (base, _):
        assert error_of(post(base, n=4))["param"] == "n"
        assert post(base, n=3, max_tokens=1).status_code == 200


def test_many_at_once_get_the_engines_own_answers():
    alone = small_engine()
    expected = {seed: alone.generate(STORY, SamplingParams(seed=seed, max_tokens=20))[0].text for seed in range(16)}
    with running(small_engine(max_batch=4)) as (base, _), ThreadPoolExecutor(16) as pool:
        made = pool.map(lambda seed: post(base, seed=seed, max_tokens=20).json()["choices"][0]["text"], expected)
        assert dict(zip(expected, made, strict=True)) == expected


# --- time ---------------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request(engine):
    Slow(engine, 0.05)
    with running(engine, request_timeout=0.3) as (base, server):
        answer = post(base, **LONG)
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        assert "0.3 s" in error_of(answer)["message"]
        until(lambda: not server.worker._rows)
        assert not engine.busy


def test_a_deadline_ends_a_stream_with_an_error_in_it(engine):
    Slow(engine, 0.05)
    body = {"prompt": STORY, "stream": True, **LONG}
    with (
        running(engine, request_timeout=0.4) as (base, _),
        httpx.stream("POST", f"{base}/v1/completions", json=body) as answer,
    ):
        events = events_of(answer)
    assert "choices" in events[0]
    assert events[-1]["error"]["code"] == "timeout"


def test_waiting_counts_towards_the_deadline():
    engine = small_engine(max_batch=1)
    Slow(engine, 0.05)
    with running(engine, request_timeout=0.5) as (base, _), ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(post, base, **LONG) for _ in range(2)]
        assert [each.result().status_code for each in asked] == [504, 504]


# --- clients that leave, or do not read -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_dropped_within_a_round(engine, stream):
    slow = Slow(engine)
    slow.seconds = 0.05
    with running(engine) as (base, server):
        with connected(base) as connection:
            connection.sendall(raw(prompt=STORY, stream=stream, **LONG))
            until(lambda: slow.rounds >= 2)
            assert engine.busy
        until(lambda: not server.worker._open)
        left = slow.rounds
        until(lambda: not engine.busy and not server.worker._rows)
        assert slow.rounds - left <= 1


def test_a_client_that_does_not_read_holds_up_nobody(engine):
    with running(engine) as (base, server), connected(base) as idle:
        idle.sendall(raw(prompt=STORY, stream=True, n=2, logprobs=20, **LONG))
        until(lambda: server.worker._open)
        assert post(base, max_tokens=8).status_code == 200
        until(lambda: not engine.busy)  # the answer is made though nobody reads it


def test_the_building_of_a_large_answer_holds_up_nobody(engine, monkeypatch):
    """Such as one with log-probabilities of a long prompt."""
    begun, released, build = threading.Event(), threading.Event(), CompletionForm.whole

    def slow(form, answer):
        if answer.prompt_top is not None:
            begun.set()
            released.wait(10)
        return build(form, answer)

    monkeypatch.setattr(CompletionForm, "whole", slow)
    with running(engine) as (base, _), ThreadPoolExecutor(1) as pool:
        large = pool.submit(post, base, max_tokens=1, prompt_logprobs=2)
        assert begun.wait(60)
        assert post(base, max_tokens=4).status_code == 200
        assert not large.done(), "it was still being built"
        released.set()
        assert len(large.result().json()["choices"][0]["prompt_logprobs"]) == len(engine.encode(STORY)[1])


def test_a_stream_that_nobody_reads_is_given_up():
    closed = []

    async def events():
        while True:
            yield b"data: x\n\n"

    async def run(kind):
        async def send(message):
            if message["type"] == kind:
                await anyio.sleep_forever()

        with anyio.fail_after(5):
            await Stream(events(), lambda: closed.append(kind), seconds=0.05).stream_response(send)

    for kind in ("http.response.start", "http.response.body"):
        anyio.run(run, kind)
    assert closed == ["http.response.start", "http.response.body"]


@pytest.mark.slow
def test_a_mixed_crowd_leaves_nothing_behind():
    """Answers, streams, clients that leave, errors and forms at once: every answer is right, and all is given back."""
    alone, engine = small_engine(), small_engine(max_batch=4)
    expected = {seed: alone.generate(STORY, SamplingParams(seed=seed, max_tokens=30))[0].text for seed in range(8)}
    wrong = []

    def one(base, number):
        seed = number % 8
        body = {"prompt": STORY, "seed": seed, "max_tokens": 30}
        kind = number % 5
        if kind == 0 and post(base, **body, temperature=-1).status_code != 400:
            wrong.append(number)
        elif kind == 1:
            with connected(base) as connection:
                connection.sendall(raw(**body, stream=True))
                connection.recv(200)
        elif kind == 2:
            made = post(base, seed=seed, structured_outputs={"regex": "[0-9]{3}"}).json()["choices"][0]["text"]
            if not (len(made) == 3 and made.isdigit()):
                wrong.append(number)
        elif kind == 3:
            made = post(base, **body, stream=True)
            chunks = [json.loads(line[6:]) for line in made.text.splitlines() if line.startswith("data: {")]
            if "".join(chunk["choices"][0]["text"] for chunk in chunks) != expected[seed]:
                wrong.append(number)
        elif kind == 4 and post(base, **body).json()["choices"][0]["text"] != expected[seed]:
            wrong.append(number)

    with running(engine) as (base, server):
        before = descriptors()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda number: one(base, number), range(120)))
        until(lambda: not (engine.busy or server.worker._open or server.worker._rows))
        engine.forget()
        assert engine.target.cache.in_use == 0
        until(lambda: descriptors() <= before + 2)
    assert wrong == []


# --- failures -----------------------------------------------------------------------------------------------------


def failing_for(engine, prompt, error):
    """Make requests with this prompt fail when the target has been read."""
    ids, inner = engine.encode(prompt)[1], engine._target_probs

    def probs(row, draft, output):
        if row.tokens[: len(ids)] == ids:
            raise error(row)
        return inner(row, draft, output)

    engine._target_probs = probs


def test_a_request_that_fails_is_alone_with_it(engine, caplog):
    failing_for(engine, "The dog", lambda row: RequestError(row.id, "NaN in /home/me/model.bin"))
    expected = small_engine().generate(STORY, SamplingParams(**LONG))[0].text
    with running(engine) as (base, _), ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO, "draftproof"):
        other = pool.submit(post, base, **LONG)
        answer = post(base, prompt="The dog")
        assert other.result().json()["choices"][0]["text"] == expected
    assert answer.status_code == 500
    assert "/home" not in answer.text
    assert error_of(answer)["type"] == "server_error"
    assert "NaN in /home/me/model.bin" in caplog.text


def test_a_round_that_fails_once_is_repeated(engine):
    step, calls = engine.step, []

    def step_failing():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("once")
        step()

    engine.step = step_failing
    expected = small_engine().generate(STORY, SamplingParams(**LONG))[0].text
    with running(engine) as (base, _):
        assert post(base, **LONG).json()["choices"][0]["text"] == expected


def test_a_new_request_that_breaks_rounds_goes_and_the_others_stay(engine):
    ids, inner = engine.encode("The dog")[1], engine._round

    def round_failing(plan, start):
        if any(row.tokens[: len(ids)] == ids for row in (*plan.rows, *(part.row for part in plan.chunks))):
            raise RuntimeError("broken by it")
        time.sleep(0.01)
        inner(plan, start)

    engine._round = round_failing
    expected = small_engine().generate(STORY, SamplingParams(**LONG))[0].text
    with running(engine) as (base, server), ThreadPoolExecutor(1) as pool:
        other = pool.submit(post, base, **LONG)
        until(lambda: any(row.request.round for row in server.worker._rows))
        assert post(base, prompt="The dog").status_code == 500
        assert other.result().json()["choices"][0]["text"] == expected


def test_rounds_that_always_fail_end_their_requests_and_not_the_server(engine):
    step = engine.step

    def failing():
        raise RuntimeError("always")

    with running(engine) as (base, server):
        engine.step = failing
        assert post(base).status_code == 500
        assert not engine.busy
        engine.step = step
        assert post(base, max_tokens=2).status_code == 200
        assert server.worker.ready


def test_a_thread_that_ends_is_not_ready(engine):
    with running(engine) as (base, server):
        server.worker._admit = lambda: 1 / 0
        assert post(base).status_code == 503
        assert httpx.get(f"{base}/ready").status_code == 503
        assert httpx.get(f"{base}/health").status_code == 503
        assert post(base).status_code == 503


def test_drafts_are_prepared_before_the_first_request():
    engine = Engine.load("embedded:stories", check=False)
    (source,) = engine.drafter.sources
    with running(engine):
        until(lambda: source.drafter)


def test_requests_come_before_what_is_prepared(engine):
    steps = []

    def prepare(seconds):
        steps.append(seconds)
        time.sleep(0.01)
        return len(steps) == 1000

    engine.prepare = prepare
    with running(engine) as (base, _):
        until(lambda: steps)
        assert post(base, max_tokens=2).status_code == 200
        assert set(steps) == {0.0}, "one step at a time"
        until(lambda: len(steps) > 20)
        assert post(base, max_tokens=2).status_code == 200
    assert len(steps) < 1000, "the server ends between two steps, too"


def test_drafts_that_cannot_be_prepared_stop_nothing(engine, caplog):
    engine.prepare = lambda _: 1 / 0
    with running(engine) as (base, _):
        assert post(base, max_tokens=2).status_code == 200
    assert caplog.text.count("drafts could not be prepared") == 1


# --- limits, keys, names, logs --------------------------------------------------------------------------------------


def test_bodies_and_prompts_have_a_limit(engine):
    with running(engine, max_body=2000, max_prompt_tokens=10, max_tokens_limit=20) as (base, _):
        large = post(base, prompt="a" * 3000)
        assert large.status_code == 413
        error_of(large)
        assert error_of(post(base, prompt="a b c d e f g h i j k l"))["code"] == "context_length_exceeded"
        for given, most in ((21, 20), (10**9, 20), (20, 20), (3, 3)):  # clients ask for what their own tables say
            made = post(base, prompt="a", max_tokens=given, ignore_eos=True).json()
            assert made["usage"]["completion_tokens"] == most
            assert made["choices"][0]["finish_reason"] == "length"
        assert httpx.get(f"{base}/v1/models").json()["data"][0]["max_output_tokens"] == 20


def test_a_prompt_beyond_the_context_has_openais_code(engine):
    with running(engine) as (base, _):
        assert error_of(post(base, prompt="a " * 2000))["code"] == "context_length_exceeded"


def test_keys(engine):
    with running(engine, keys=(KEY, OTHER)) as (base, _):
        for given in ({}, {"authorization": "Bearer nothing"}, {"authorization": KEY}, {"authorization": "Bearer"}):
            answer = httpx.get(f"{base}/v1/models", headers=given)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            error_of(answer)
        for key in (KEY, OTHER):
            assert httpx.get(f"{base}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert httpx.get(f"{base}/metrics").status_code == 401
        assert httpx.get(f"{base}/ready").status_code == 200


def test_every_path_asks_for_a_key_and_the_right_name_and_takes_no_large_body(engine):
    def methods(base, **headers):
        paths = httpx.get(f"{base}/openapi.json", headers=headers).json()["paths"]
        found = [(method, path.replace("{name}", "story")) for path, each in paths.items() for method in each]
        assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"} < {
            path for _, path in found
        }
        return [*found, ("get", "/"), ("get", "/openapi.json"), ("post", "/v1/other")]

    allowed = {"authorization": f"Bearer {KEY}"}
    large = {"content": b"x" * 3000, "headers": {**allowed, "content-type": "application/json"}}
    with running(engine, keys=(KEY,), max_body=2000) as (base, _):
        for method, path in methods(base, **allowed):
            for wrong in ({}, {"x-api-key": OTHER}, {"authorization": OTHER}):
                status = httpx.request(method, base + path, headers=wrong).status_code
                assert (status == 401) is (path not in OPEN), path
            if method == "post":
                assert httpx.post(base + path, **large).status_code == 413, path
    with running(engine) as (base, _):
        for method, path in methods(base):
            assert httpx.request(method, base + path, headers={"host": "other.example"}).status_code == 421, path


def test_keys_are_compared_in_constant_time(monkeypatch):
    import hmac

    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        "draftproof.server.auth.hmac.compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b)
    )
    assert ApiKeys([KEY, OTHER]).owner(f"Bearer {KEY}")
    assert len(compared) == 2, "every key is compared, also after the one that fits"
    assert {len(each) for pair in compared for each in pair} == {32}


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n")
    monkeypatch.setenv("DRAFTPROOF_KEYS", f" {OTHER} ")
    assert read_keys(file) == (OTHER, KEY)
    file.write_text("\n")
    with pytest.raises(UserError, match="expected one API key per line"):
        read_keys(file)
    file.write_text("short")
    with pytest.raises(UserError, match="expected API keys of 16 or more characters"):
        read_keys(file)
    with pytest.raises(UserError, match="cannot read API keys"):
        read_keys(tmp_path / "none")
    file.write_text(KEY)
    for words, said in (("", "expected API keys with spaces"), (" ", "got none"), ("short", "16 or more characters")):
        monkeypatch.setenv("DRAFTPROOF_KEYS", words)  # an empty one would serve everybody
        with pytest.raises(UserError, match=f"^the variable DRAFTPROOF_KEYS.*{said}"):
            read_keys(file)


def test_no_prompt_is_in_the_log_or_in_an_error(engine, caplog):
    failing_for(engine, MARK, lambda row: RequestError(row.id, "NaN"))
    with running(engine) as (base, _), caplog.at_level(logging.DEBUG):
        answers = [
            post(base, prompt=MARK),
            post(base, prompt=[MARK, "ok"], max_tokens=1),
            post(base, prompt=MARK, temperature=-1),
            post(base, prompt={"text": MARK}),
            post(base, prompt=MARK * 1000),
            post(base, "/v1/chat/completions", messages=[{"role": "user", "content": MARK, "names": MARK}]),
            post(base, "/tokenize", prompt=MARK, other=MARK),
        ]
    assert [each.status_code for each in answers] == [500, 500, 400, 400, 400, 400, 400]
    assert all(MARK not in each.text for each in answers)
    assert MARK not in caplog.text
    assert all(MARK not in str(vars(record)) for record in caplog.records if record.name.startswith("draftproof"))


def test_names_of_files_stay_here(engine):
    engine.tokenizer.chat_template = None
    with running(engine, hidden=[engine.target.name]) as (base, _):
        message = error_of(post(base, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}]))["message"]
    assert "embedded:target" not in message
    assert "story" in message
    assert served_name("/tmp", None) == "tmp"  # noqa: S108 - no file is made there
    assert served_name("some/model", None) == "some/model"


def test_requests_have_an_id_that_the_client_may_choose(engine, caplog):
    with running(engine) as (base, _), caplog.at_level(logging.INFO, "draftproof.access"):
        answer = httpx.get(f"{base}/v1/models", headers={"x-request-id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        assert len(httpx.get(f"{base}/v1/models", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32
        made = httpx.post(f"{base}/v1/completions", json={"prompt": STORY}, headers={"x-request-id": "abc-2"}).json()
        assert made["id"] == "cmpl-abc-2"
        until(lambda: len(caplog.records) >= 3)
    facts = caplog.records[-1].facts
    assert facts["request_id"] == "abc-2"
    assert facts["completion_tokens"] == 16
    assert facts["status"] == 200


# --- start and end --------------------------------------------------------------------------------------------------


def test_sigterm_lets_running_requests_end():
    process = serve("--json-logs", "--target", "embedded:target")
    base = address(process)
    options = {"prompt": STORY, "stream": True, "max_tokens": 400, "ignore_eos": True, "n": 2}
    with httpx.stream("POST", f"{base}/v1/completions", json=options, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{base}/health")
    records = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (request,) = [each for each in records if each.get("path") == "/v1/completions"]
    assert request["completion_tokens"] == 800
    assert request["request_id"]


@pytest.mark.slow
def test_sigterm_gives_up_requests_that_take_too_long():
    process = serve("--drain-timeout", "0", "--target", "embedded:target")
    base = address(process)
    options = {"prompt": STORY, "stream": True, "max_tokens": 400, "ignore_eos": True, "n": 64}
    with httpx.stream("POST", f"{base}/v1/completions", json=options) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.slow
def test_ctrl_c_ends_it_with_the_usual_code():
    process = serve("--target", "embedded:target")
    address(process)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in log


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--target", "no/such-model"], "no/such-model"),
        (["--api-key-file", "/no/such/file"], "cannot read API keys"),
    ],
)
def test_a_process_that_cannot_start_says_why_in_one_line(options, cause):
    process = serve(*options)
    made, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert made == ""
    last = log.splitlines()[-1]
    assert last.startswith("draftproof: error: ")
    assert cause in last
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--port", "99999"], "port: expected 0 to 65535, got 99999"),
        (["--max-waiting", "-1"], "max_waiting: expected 0 or more, got -1"),
        (["--max-body", "0"], "max_body: expected 1 or more, got 0"),
        (["--request-timeout", "-1"], "request_timeout: expected 0 or more, got -1"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(options, cause):
    done = CliRunner().invoke(app, ["serve", "--target", "embedded:target", *options])
    assert done.exit_code == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("draftproof: error: ")
    assert cause in line


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UserError, match=r"cannot listen on .*--port"):
            bind(Settings(port=other.getsockname()[1]))


# --- anything at all ------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["content", "text", "json_object", "json_schema", "system", "user", "regex"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(FIELDS)), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def fuzzed():
    with running(small_engine()) as (base, server):
        yield base, server


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": STORY, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("/tokenize", {"prompt": STORY}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
    ids=["completions", "chat", "tokenize", "detokenize"],
)
def test_no_body_breaks_the_server(fuzzed, path, body):
    base, server = fuzzed
    names = sorted(BODIES[path].model_fields)

    @settings(max_examples=40)
    @given(st.dictionaries(st.sampled_from([*names, "x"]), VALUES, max_size=3))
    def send(fields):
        answer = httpx.post(base + path, json={**body, **fields}, timeout=60)
        assert answer.status_code in (200, 400, 404, 429), answer.text
        if answer.status_code != 200:
            assert len(error_of(answer)["message"]) < 500

    send()
    until(lambda: not server.worker._open)
    assert server.worker.ready
