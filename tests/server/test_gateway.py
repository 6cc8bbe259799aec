"""The gateway before servers in other processes: keys and limits first, and no request ends all servers."""

import asyncio
import json
import pickle

import anyio
import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from draftproof.server.auth import ApiKeys
from draftproof.server.gateway import Gateway, IncomingRequest, ServerLost, app_messages

KEY = "a key of this test"
ALLOWED = {"Authorization": f"Bearer {KEY}"}


class Servers:
    """Servers behind a gateway: the first ones are lost, the next answers."""

    def __init__(self, lost=0, *, begins=False):
        self.asked, self._lost, self._begins = [], lost, begins

    async def passed(self, asked):
        self.asked.append(asked)
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
        if len(self.asked) <= self._lost:
            if self._begins:
                yield start
            raise ServerLost("a server was lost")
        yield start
        yield {"type": "http.response.body", "body": b"fine"}

    async def shown(self, asked):
        self.asked.append(asked)
        return [message async for message in Servers().passed(asked)]


def gateway(servers, keys=(), **limits):
    given = {"max_body": 1000, "at_once": 4, "read_timeout": 5.0, **limits}
    return Gateway(servers.passed, servers.shown, keys=keys, **given)


def post(app, body, *, path="/v1/completions", headers=None, **more):
    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=headers, **more)

    return asyncio.run(send())


def get(app, path, headers=None):
    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(send())


# --- a server that is lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_a_request_whose_server_is_lost_is_answered_by_another(lost):
    servers = Servers(lost)
    answer = post(gateway(servers), {"prompt": "Once"})
    assert (answer.status_code, answer.text) == (200, "fine")
    assert len(servers.asked) == lost + 1


def test_a_request_that_ends_servers_ends_two_at_most():
    servers = Servers(lost=9)
    answer = post(gateway(servers), {"prompt": "Once"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert len(servers.asked) == 2


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        b"[" * 900,
        b"no JSON",
        [],
    ],
    ids=str,
)
def test_a_request_with_a_grammar_or_of_no_known_form_ends_one(more):
    servers = Servers(lost=9)
    answer = post(gateway(servers), {"prompt": "Once", **more} if isinstance(more, dict) else more)
    assert answer.status_code == 503
    assert len(servers.asked) == 1


def test_an_answer_that_has_begun_is_not_begun_again():
    servers = Servers(lost=9, begins=True)
    with pytest.raises(ServerLost):
        post(gateway(servers), {"prompt": "Once"})
    assert len(servers.asked) == 1


def test_errors_are_in_the_words_of_a_path():
    app = gateway(Servers(lost=9), keys=[KEY])
    for body, headers, status, kind in (
        ({}, None, 401, "authentication_error"),
        ({}, {"x-api-key": KEY}, 503, "overloaded_error"),
        ({"system": "x" * 1000}, ALLOWED, 413, "request_too_large"),
    ):
        answer = post(app, body, path="/v1/messages", headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert answer.json()["request_id"] == answer.headers["request-id"]


# --- keys and limits --------------------------------------------------------------------------------------------------


def scope(path="/v1/completions", method="POST", **headers):
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    found = {"type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path}
    return found | {"raw_path": path.encode(), "query_string": b"", "headers": lines, "client": None, "server": None}


def test_a_key_is_checked_before_a_body_is_read():
    servers, sent = Servers(), []

    async def receive():
        pytest.fail("the body was read")

    async def send(message):
        sent.append(message)

    asyncio.run(gateway(servers, [KEY])(scope(), receive, send))
    assert sent[0]["status"] == 401
    assert servers.asked == []


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
def test_pages_need_a_key_as_on_the_server(path):
    servers = Servers()
    assert get(gateway(servers, [KEY]), path).status_code == 401
    assert servers.asked == []
    assert get(gateway(servers, [KEY]), path, ALLOWED).text == "fine"
    assert get(gateway(servers, [KEY]), "/health").text == "fine"


def test_keys_travel_as_digests():
    keys = pickle.loads(pickle.dumps(ApiKeys([KEY])))  # noqa: S301 - made here
    assert KEY.encode() not in pickle.dumps(keys)
    servers = Servers()
    assert post(gateway(servers, keys), {"prompt": "a"}, headers=ALLOWED).text == "fine"
    assert (
        post(gateway(servers, keys), {"prompt": "a"}, headers={"Authorization": "Bearer another key"}).status_code
        == 401
    )


def test_a_body_that_does_not_come_is_given_up():
    servers, sent = Servers(), []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(gateway(servers, read_timeout=0.1)(scope(), receive, send), 10))
    assert sent[0]["status"] == 408
    assert servers.asked == []


def test_a_client_that_leaves_is_passed_on_to_nobody():
    servers = Servers()

    async def receive():
        return {"type": "http.disconnect"}

    async def send(_):
        return

    asyncio.run(gateway(servers)(scope(), receive, send))
    assert servers.asked == []


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long_is_refused_while_it_is_read(declared):
    servers = Servers()

    async def parts():
        for _ in range(100):
            yield b"x" * 100

    body = b"x" * 10_000 if declared else parts()

    async def send():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(gateway(servers)), base_url="http://server"
        ) as client:
            return await client.post("/v1/completions", content=body)

    assert asyncio.run(send()).status_code == 413
    assert servers.asked == []


def test_more_requests_than_can_be_held_are_refused():
    servers = Servers()
    answer = post(gateway(servers, at_once=0), {"prompt": "a"})
    assert answer.status_code == 429
    assert servers.asked == []


def test_what_is_passed_on():
    servers = Servers()
    post(gateway(servers), {"messages": [{"content": "a"}, {"content": "b"}]}, headers={"x-request-id": "mine"})
    post(gateway(servers), {"prompt": ["a", "b"]})
    get(gateway(servers), "/v1/models")
    first, second, third = servers.asked
    assert (first.prompt, second.prompt, third.prompt) == ("a\nb", '["a", "b"]', "/v1/models")
    assert json.loads(first.body)["messages"][0] == {"content": "a"}
    assert [value for name, value in first.scope["headers"] if name == b"x-request-id"] == [b"mine"]
    (given,) = [value for name, value in second.scope["headers"] if name == b"x-request-id"]
    assert len(given) == 32, "the server's log has the id of the gateway's"
    assert pickle.loads(pickle.dumps(first)) == first  # noqa: S301 - made here


# --- an application behind it -----------------------------------------------------------------------------------------


def test_an_application_is_only_a_little_ahead_of_its_reader():
    """So an answer that nobody reads is not held whole, and the application's limit of time sees that."""
    made = []

    async def app(scope, receive, send):
        assert (await receive())["body"] == b"asked"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        with anyio.move_on_after(0.3) as late:
            for number in range(1000):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                made.append(number)
        assert late.cancelled_caught
        await anyio.sleep(60)

    async def read():
        messages = app_messages(app, IncomingRequest("", scope(), b"asked"), [(b"x-replica", b"r")])
        first = await anext(messages)
        await asyncio.sleep(1.0)
        await messages.aclose()
        return first

    first = asyncio.run(asyncio.wait_for(read(), 20))
    assert first["headers"] == [(b"a", b"b"), (b"x-replica", b"r")]
    assert len(made) < 50


def test_a_reader_that_leaves_ends_the_application_and_its_errors_are_raised():
    ended = []

    async def waits(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await receive()
            await receive()  # there is no end of the client until this ends
        finally:
            ended.append(1)

    async def fails(scope, receive, send):
        raise ZeroDivisionError

    async def read(app):
        messages = app_messages(app, IncomingRequest("", scope(), b""), [])
        try:
            await anext(messages)
        finally:
            await messages.aclose()

    asyncio.run(asyncio.wait_for(read(waits), 20))
    assert ended
    with pytest.raises(ZeroDivisionError):
        asyncio.run(read(fails))
