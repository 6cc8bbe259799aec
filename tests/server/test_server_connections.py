"""What is stuck or never ends: rounds, templates, clients that do not read or say nothing, a log that is full."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from starlette.responses import Response

from draftproof import SamplingParams, UserError
from draftproof.engine import loop
from draftproof.server import logs, parse_request, run
from draftproof.server.background import BackgroundCalls, TimeOver, time_limit
from draftproof.server.errors import ApiError
from draftproof.server.metrics import Metrics
from draftproof.server.parse_request import ParsedRequest, RequestParser
from draftproof.server.settings import Settings
from draftproof.server.worker import EngineWorker, Job, Piece
from support.raw_http import KEY, OTHER, Slow, address, connected, held, raw, serve
from support.serving import CHAT, STORY, error_of, post, running, small_engine, until, waits

HELLO = [{"role": "user", "content": "x"}]
ONE_TOKEN = ParsedRequest(((1,),), (None,), SamplingParams())
ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}" + CHAT


class Panic(BaseException):
    """As the panics of Rust libraries, which are no Exceptions."""


@pytest.fixture
def engine():
    return small_engine(max_batch=2)


# --- errors that are no Exceptions ----------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("error", [Panic, SystemExit])
@pytest.mark.parametrize("name", ["step", "add"])
def test_a_panic_in_the_engines_thread_ends_its_requests_and_not_the_server(engine, monkeypatch, name, error):
    def failing(*_, **__):
        raise error("broken")

    with running(engine) as (base, server):
        with monkeypatch.context() as patch:
            patch.setattr(engine, name, failing)
            assert error_of(post(base))["type"] == "server_error"
        assert not engine.busy
        assert post(base, max_tokens=2).status_code == 200
        assert httpx.get(f"{base}/health").status_code == 200
        assert server.worker.ready


def test_a_panic_while_parameters_are_bound_is_the_requests(engine, monkeypatch):
    bind = SamplingParams.bind

    def failing(params, **options):
        if params.seed == 13:
            raise Panic("broken")
        return bind(params, **options)

    monkeypatch.setattr(SamplingParams, "bind", failing)
    with running(engine) as (base, _):
        assert post(base, seed=13).status_code == 500
        assert post(base, seed=1, max_tokens=2).status_code == 200


def test_a_panic_over_one_request_leaves_the_others_alone(engine, monkeypatch):
    inner = loop.probabilities

    def failing(logits, transforms, *rest):
        if transforms.params.seed == 13:
            raise Panic("broken")
        return inner(logits, transforms, *rest)

    expected = small_engine().generate(STORY, SamplingParams(seed=1, max_tokens=60))[0].text
    monkeypatch.setattr(loop, "probabilities", failing)
    with running(engine) as (base, _), ThreadPoolExecutor(1) as pool:
        other = pool.submit(post, base, seed=1, max_tokens=60)
        assert post(base, seed=13).status_code == 500
        assert other.result().json()["choices"][0]["text"] == expected


def test_a_panic_while_a_request_is_read_is_an_answer_of_the_api(engine, monkeypatch):
    def failing(*_):
        raise Panic("broken")

    with running(engine) as (base, _):
        monkeypatch.setattr(RequestParser, "parse", failing)
        answer = post(base)
        assert answer.status_code == 500
        error_of(answer)
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize("error", [Panic, SystemExit, RuntimeError])
def test_a_thread_that_ends_fails_what_is_open(engine, error):
    def failing():
        raise error("broken")

    slow = Slow(engine)
    with running(engine) as (base, server), ThreadPoolExecutor(2) as pool:
        slow.may.clear()
        asked = [pool.submit(post, base, max_tokens=50) for _ in range(2)]
        until(lambda: len(server.worker._open) == 2)
        server.worker._deliver = failing
        slow.may.set()
        assert {each.result().status_code for each in asked} == {503}
        until(lambda: server.worker.dead)
        assert server.worker.failed
        assert httpx.get(f"{base}/health").status_code == 503
        assert post(base).status_code == 503


# --- what is stuck --------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_whose_round_is_stuck(engine):
    slow = Slow(engine)
    with running(engine, request_timeout=2.0, stuck_timeout=1.0) as (base, server):
        until(lambda: waits(server))  # a step of what drafts need may take longer than these limits on a busy machine
        slow.may.clear()
        try:
            start = time.monotonic()
            answer = post(base)
            assert answer.status_code == 504
            assert error_of(answer)["code"] == "timeout"
            assert 1.9 < time.monotonic() - start < 20, "while the round went on"
            assert not server.worker._open
            health = httpx.get(f"{base}/health")
            assert health.status_code == 503
            assert error_of(health)["code"] == "stuck"
            assert httpx.get(f"{base}/ready").status_code == 503
            assert post(base).status_code == 503
        finally:
            slow.may.set()
        until(lambda: httpx.get(f"{base}/health").status_code == 200)
        assert post(base, max_tokens=2).status_code == 200


def test_a_server_without_requests_is_not_stuck(engine):
    engine.generate([STORY], SamplingParams(max_tokens=1))  # what only a first round does takes longer than the limit
    with running(engine, stuck_timeout=0.5) as (base, server):
        until(lambda: waits(server))
        assert post(base, max_tokens=1).status_code == 200
        time.sleep(0.8)
        assert httpx.get(f"{base}/health").status_code == 200


def test_an_answer_that_is_complete_is_not_too_late():
    async def run():
        job = Job(ONE_TOKEN)
        job.put([Piece("", (), finish_reason="stop")], None)
        worker = EngineWorker(small_engine(), Metrics("x"))
        worker._open[job] = None
        worker._expire(job)
        return [pieces async for pieces in job.pieces()]

    assert len(asyncio.run(run())) == 1


def test_a_template_that_never_ends_holds_up_nobody(engine, monkeypatch):
    monkeypatch.setattr(parse_request, "_TEMPLATE_SECONDS", 1.0)
    engine.tokenizer.chat_template = ENDLESS
    with running(engine) as (base, server), ThreadPoolExecutor(1) as pool:
        chat = pool.submit(post, base, "/v1/chat/completions", messages=HELLO)
        until(lambda: server._reading_calls.busy)
        assert post(base, max_tokens=2).status_code == 200
        assert post(base, "/tokenize", prompt=STORY).status_code == 200
        answer = chat.result()
        assert answer.status_code == 504
        assert "chat template did not end within 1 s" in error_of(answer)["message"]
        until(lambda: not server._reading_calls.busy)
        engine.tokenizer.chat_template = CHAT
        assert post(base, "/v1/chat/completions", messages=HELLO, max_tokens=2).status_code == 200


def test_the_time_of_a_request_counts_while_it_is_read(engine, monkeypatch):
    engine.tokenizer.chat_template = ENDLESS
    monkeypatch.setattr(parse_request, "_TEMPLATE_SECONDS", 3.0)
    with running(engine, request_timeout=0.3) as (base, server):
        for path in ("/v1/chat/completions", "/tokenize"):
            start = time.monotonic()
            assert error_of(post(base, path, messages=HELLO))["code"] == "timeout"
            assert time.monotonic() - start < 3.0, "reading goes on until then"
        until(lambda: not server._reading_calls.busy)


@pytest.mark.parametrize("seconds", [0.05, 0.0])
def test_time_over_is_raised_once_and_in_its_thread(seconds):
    def spin():
        while True:
            pass

    def work():
        with pytest.raises(TimeOver), time_limit(seconds):
            spin()
        with time_limit(60.0):
            return sum(range(200_000))

    with ThreadPoolExecutor(4) as pool:
        assert len({each.result() for each in [pool.submit(work) for _ in range(8)]}) == 1


def test_time_that_is_over_at_the_very_end_is_raised_there_or_never():
    over = 0
    for turn in range(200):
        try:
            with time_limit(0.001 + turn * 1e-6):
                time.sleep(0.001)
        except TimeOver:
            over += 1
        sum(range(2000))  # a late exception would come here
    assert over <= 200


def test_background_calls_have_places_and_may_be_left():
    def most():
        now.append(1)
        peaks.append(len(now))
        time.sleep(0.02)
        now.pop()

    now, peaks, may = [], [], threading.Event()

    async def run():
        calls = BackgroundCalls(2, "test")
        await asyncio.gather(*[calls.run(most) for _ in range(8)])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(calls.run(may.wait), 0.05)
        assert calls.busy == 1, "it goes on without its caller"
        with pytest.raises(ZeroDivisionError):
            await calls.run(lambda: 1 / 0)
        may.set()
        await asyncio.to_thread(until, lambda: not calls.busy)

    asyncio.run(run())
    assert max(peaks) == 2


STUCK = """
import sys, time
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.prompts import PromptReader
from draftproof.server import worker
worker._JOIN = 0.5
{patch}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "path", "body", "thread"),
    [
        (
            "DecodingLoop.step = lambda self: time.sleep(90)",
            "/v1/completions",
            {"prompt": STORY},
            "the engine's thread",
        ),
        (
            "PromptReader.chat_text = lambda *_: time.sleep(90)",
            "/v1/chat/completions",
            {"messages": HELLO},
            "a thread that reads requests",
        ),
    ],
    ids=["round", "template"],
)
def test_sigterm_wins_over_what_is_stuck(patch, path, body, thread):
    options = ["--target", "embedded:target", "--drain-timeout", "1", "--request-timeout", "2"]
    process = serve(*options, before=STUCK.format(patch=patch))
    try:
        base = address(process)
        assert httpx.post(base + path, json=body, timeout=60).status_code == 504
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert log.splitlines()[-1].startswith(f"draftproof: error: {thread} did not end")
    if "engine" in thread:
        assert "in <lambda>" in log, "where it was"


# --- answers that nobody reads ----------------------------------------------------------------------------------------

LARGE = 8_000_000


def large(app):
    @app.get("/large")
    async def route() -> Response:
        return Response(b"x" * LARGE)


def read_all(connection):
    """Bytes until the connection is cut."""
    size = 0
    with suppress(ConnectionError):
        while made := connection.recv(1 << 20):
            size += len(made)
    return size


ASK = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_an_answer_that_nobody_reads_is_dropped(engine):
    with running(engine, extend=large, write_timeout=0.5) as (base, _):
        idle = connected(base)
        idle.settimeout(20)
        idle.sendall(ASK)
        until(lambda: held(idle))
        until(lambda: not held(idle), seconds=20)
        assert post(base, max_tokens=1).status_code == 200
        assert read_all(idle) < LARGE
        idle.close()


def test_an_answer_that_is_read_slowly_comes_whole(engine):
    """More slowly than the time limit, but never nothing."""
    with running(engine, extend=large, write_timeout=3.0) as (base, _), socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        slow.connect(("127.0.0.1", int(base.rpartition(":")[2])))
        slow.settimeout(20)
        slow.sendall(ASK)
        size, start = 0, time.monotonic()
        while size < LARGE:
            made = slow.recv(1 << 20)
            assert made, f"the connection was closed after {size} bytes"
            size += len(made)
            time.sleep(0.15 if time.monotonic() - start < 4 else 0)
        assert time.monotonic() - start > 3


def test_more_tokens_than_the_context_are_not_made_a_text(engine):
    with running(engine) as (base, server):
        answer = post(base, "/detokenize", tokens=[1] * (server.context + 1))
        assert error_of(answer)["code"] == "context_length_exceeded"
        assert post(base, "/detokenize", tokens=[1] * server.context).status_code == 200


# --- many connections -------------------------------------------------------------------------------------------------


def test_idle_connections_make_room_for_others(engine):
    with running(engine, max_connections=20) as (base, _), ExitStack() as stack:
        idle = [stack.enter_context(connected(base)) for _ in range(100)]
        for each in idle[::2]:
            each.sendall(b"GET /health HT")  # a head that does not end is idle, too
        for _ in range(3):
            assert httpx.get(f"{base}/health").status_code == 200
            assert post(base, max_tokens=1).status_code == 200
        idle[0].settimeout(10)
        assert read_all(idle[0]) == 0, "the oldest one is closed"


def test_requests_in_work_keep_their_connections_and_health_is_answered(engine, monkeypatch):
    monkeypatch.setattr("draftproof.server.connection.RESERVE", 2)
    slow = Slow(engine)
    slow.may.clear()
    with running(engine, max_connections=4) as (base, server), ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        asked = [pool.submit(post, base, max_tokens=2) for _ in range(4)]
        until(lambda: len(server.worker._open) == 4)
        answer = post(base)
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "too_many_connections"
        assert httpx.get(f"{base}/health").status_code == 200
        spare = [stack.enter_context(connected(base)) for _ in range(6)]
        assert httpx.get(f"{base}/health").status_code == 200, "idle ones of the reserve make room"
        slow.may.set()
        assert [each.result().status_code for each in asked] == [200] * 4
        assert post(base, max_tokens=1).status_code == 200
        assert len(spare) == 6


def test_a_connection_beyond_the_reserve_is_closed(engine, monkeypatch):
    monkeypatch.setattr("draftproof.server.connection.RESERVE", 0)
    slow = Slow(engine)
    slow.may.clear()
    with running(engine, max_connections=1) as (base, server), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, base, max_tokens=2)
        until(lambda: server.worker._open)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{base}/health")
        slow.may.set()
        assert asked.result().status_code == 200


class Limits:
    """Stands for the module resource."""

    RLIMIT_NOFILE, RLIM_INFINITY = 7, -1

    def __init__(self, soft, hard):
        self.now = (soft, hard)

    def getrlimit(self, _):
        return self.now

    def setrlimit(self, _, limits):
        self.now = limits


@pytest.mark.parametrize(
    ("limits", "expected", "raised"),
    [((1024, 4096), 1000, 1152), ((1024, 1100), 948, 1100), ((-1, -1), 1000, -1), ((5000, 5000), 1000, 5000)],
)
def test_descriptors_are_raised_to_what_is_needed(monkeypatch, caplog, limits, expected, raised):
    limits_of = Limits(*limits)
    monkeypatch.setitem(sys.modules, "resource", limits_of)
    with caplog.at_level(logging.WARNING, "draftproof"):
        assert run.descriptors_for(1000) == expected
    assert limits_of.now == (raised, limits[1])
    assert bool(caplog.records) == (expected < 1000)


FEW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (320, 320))
"""


@pytest.mark.slow
def test_a_system_with_few_descriptors_serves_on():
    process = serve("--target", "embedded:target", before=FEW)
    try:
        base = address(process)
        with ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(connected(base))
            assert httpx.get(f"{base}/health", timeout=30).status_code == 200
            assert post(base, max_tokens=1).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert len(log.splitlines()) < 20


def test_a_system_without_descriptors_is_said_once(caplog):
    unhandled, event_loop = run._Unhandled(), asyncio.new_event_loop()
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            unhandled(event_loop, {"message": "accept", "exception": OSError(24, "Too many open files")})
        unhandled(event_loop, {"message": "something else", "exception": ValueError("x")})
    event_loop.close()
    assert len(caplog.records) == 2


# --- the queue --------------------------------------------------------------------------------------------------------


def key(value):
    return {"authorization": f"Bearer {value}"}


def ask(base, value, **body):
    return httpx.post(f"{base}/v1/completions", json={"prompt": STORY, **body}, headers=key(value), timeout=60)


def test_keys_take_turns():
    slow = Slow(engine := small_engine(max_batch=1))
    slow.may.clear()
    done = []

    def one(value, number):
        assert ask(base, value, max_tokens=1).status_code == 200
        done.append((value, number))

    with running(engine, keys=(KEY, OTHER)) as (base, server), ThreadPoolExecutor(16) as pool:
        asked = []
        for number in range(10):
            asked.append(pool.submit(one, KEY, number))
            until(lambda: len(server.worker._open) == len(asked))
        for number in range(2):
            asked.append(pool.submit(one, OTHER, number))
            until(lambda: len(server.worker._open) == len(asked))
        slow.seconds = 0.05
        slow.may.set()
        for each in asked:
            each.result()
    # Of one place the running request's key holds all: the other key is next, each time.
    assert max(place for place, (value, _) in enumerate(done) if value == OTHER) < 8


def test_a_key_may_have_a_limit_of_its_own(engine):
    slow = Slow(engine)
    slow.may.clear()
    with running(engine, keys=(KEY, OTHER), max_per_key=2) as (base, server), ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, base, KEY, max_tokens=1) for _ in range(2)]
        until(lambda: len(server.worker._open) == 2)
        assert ask(base, KEY).status_code == 429
        asked.append(pool.submit(ask, base, OTHER, max_tokens=1))
        until(lambda: len(server.worker._open) == 3)
        slow.may.set()
        assert [each.result().status_code for each in asked] == [200] * 3
        assert ask(base, KEY, max_tokens=1).status_code == 200
        until(lambda: not server.worker._sizes)


@pytest.mark.slow
def test_thousands_may_wait():
    """Submitting and cancelling cost as much for the last one as for the first one."""
    command = [sys.executable, "-m", "support.queue_work", "50", "800"]
    folder = Path(__file__).parent.parent
    made = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=folder)
    small, large = map(int, made.stdout.split())
    assert small > 50 * 5, "it counts"
    assert large < 32 * small, "16 times as many; quadratic would be 256"


def test_a_queue_that_is_full_for_one_client_says_so_at_once(engine):
    worker = EngineWorker(engine, Metrics("x"), max_per_client=1)

    async def run():
        worker.start()
        try:
            worker.submit(
                Job(ParsedRequest(((1,),), (None,), SamplingParams(n=3)), client="a")
            )  # one request may have more than that
            with pytest.raises(ApiError):
                worker.submit(Job(ONE_TOKEN, client="a"))
            worker.submit(Job(ONE_TOKEN, client="b"))
        finally:
            await asyncio.to_thread(worker.stop)

    asyncio.run(run())


# --- start, end, and the log ------------------------------------------------------------------------------------------

LATE = """
import asyncio, uvicorn
startup = uvicorn.Server.startup
async def late(self, sockets=None):
    await asyncio.sleep(1)
    await startup(self, sockets)
uvicorn.Server.startup = late
"""


@pytest.mark.slow
def test_serving_is_said_when_it_listens():
    process = serve("--target", "embedded:target", before=LATE)
    try:
        assert httpx.get(f"{address(process)}/health").status_code == 200
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.slow
def test_a_log_that_nobody_reads_stops_nothing():
    process = serve("--json-logs", "--target", "embedded:target")
    try:
        base = address(process)
        with httpx.Client() as client:
            for _ in range(700):  # a pipe holds 64 KiB
                assert client.get(f"{base}/version", timeout=20).status_code == 200
        assert post(base, max_tokens=2).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_lines_that_do_not_fit_are_counted():
    read, write = os.pipe()
    handler = logs.Unblocked(write, most=50)
    handler.setFormatter(logs.JsonLines())
    logger = logging.getLogger("test of a full log")
    logger.propagate = False
    logger.addHandler(handler)
    start = time.monotonic()
    for number in range(3000):
        logger.warning("line %d %s", number, "x" * 200)
    assert time.monotonic() - start < 20
    with os.fdopen(read, "rb") as file:
        shown = missing = 0
        while shown + missing < 3000:
            line = json.loads(file.readline())["message"]
            shown, missing = shown + line.startswith("line"), missing + ("missing" in line and int(line.split()[0]))
        handler.flush()
    assert shown + missing == 3000
    assert missing > 1000
    os.close(write)


@pytest.mark.parametrize("name", ["max_per_key", "max_connections", "stuck_timeout"])
def test_limits_out_of_range_are_refused(name):
    with pytest.raises(UserError, match=f"{name}: expected .* or more, got -1"):
        Settings(**{name: -1.0 if name == "stuck_timeout" else -1})


def test_a_request_body_in_pieces_is_no_idle_connection(engine):
    """Its place is not taken by others."""
    with running(engine, max_connections=3) as (base, _), connected(base) as one, ExitStack() as stack:
        request = raw(prompt=STORY, max_tokens=1)
        one.sendall(request[:-5])
        time.sleep(0.1)
        for _ in range(6):
            stack.enter_context(connected(base))
        assert httpx.get(f"{base}/health").status_code == 200
        one.settimeout(20)
        one.sendall(request[-5:])
        assert b"200" in one.recv(4000).split(b"\r\n")[0]
