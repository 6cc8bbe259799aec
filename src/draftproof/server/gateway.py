"""The gateway in front of servers in other processes: checks keys, reads requests, and forwards each to one of them.

How a server is reached is left to the caller: `draftproof.integrations.ray` does it for Ray Serve.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import anyio
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftproof.server.auth import Access, ApiKeys
from draftproof.server.body import bytes_of
from draftproof.server.errors import ApiError, error_answer, stopping

_TRIES = 2  # servers that a request is sent to at most, where the first ends before it answers
# fields from which a server compiles a grammar
_COMPILED = ("structured_outputs", "response_format", "output_config", "tools")
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")
_GOES, _ENDS = "goes to another one", "is not sent to another one"
_AHEAD = 16  # messages that an application may send before the client has read them
_log = logging.getLogger(__name__)


class ServerLost(Exception):  # noqa: N818 - what became of a server, not a mistake of this one
    """A server ended before it answered."""


@dataclass(frozen=True)
class IncomingRequest:
    """An HTTP request on its way to a server: ASGI's scope, the body, and the prompt, by which routers choose."""

    prompt: str
    scope: Mapping[str, object]
    body: bytes


class Gateway:
    """An ASGI application that passes requests on, with the limits that a server has for reading them.

    A request whose server ends before it answers is sent to one more, because another request may have been the reason.
    One from which a grammar is compiled is not: compiling runs code that a request can drive to its limits, and what
    ended one server would end the next.

    Args:
        forward: from a request to the messages of its answer; raises `ServerLost`.
        metrics: the messages that answer a request for metrics.
        keys: as the other limits, see `Access`.
        max_body: bytes of a body that are read.
        at_once: requests with a body that are in work.
        read_timeout: seconds that a client has to send its body; 0 is no limit.
    """

    def __init__(
        self,
        forward: Callable[[IncomingRequest], AsyncGenerator[Message]],
        metrics: Callable[[IncomingRequest], Awaitable[Sequence[Message]]],
        *,
        keys: Sequence[str] | ApiKeys,
        max_body: int,
        at_once: int,
        read_timeout: float,
    ) -> None:
        self._forward = forward
        self._metrics = metrics
        self._max_body = max_body
        self._app = Access(self._run, ApiKeys.of(keys), max_body=max_body, at_once=at_once, seconds=read_timeout)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        await self._app(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await bytes_of(Request(scope, receive), self._max_body)
        except ApiError as error:
            await error_answer(error, scope)(scope, receive, send)
            return
        prompt, repeats = _routing_prompt(body)
        # The server behind notes the request under the same id.
        name = scope["state"]["facts"]["request_id"].encode()
        headers = [(key, value) for key, value in scope["headers"] if key != b"x-request-id"]
        sent = {key: scope[key] for key in _SCOPE if key in scope} | {"headers": [*headers, (b"x-request-id", name)]}
        asked = IncomingRequest(prompt or str(scope["path"]), sent, body)
        if (scope["method"], scope["path"]) == ("GET", "/metrics"):
            for message in await self._metrics(asked):
                await send(message)
            return
        for left in reversed(range(_TRIES if repeats else 1)):
            if await self._pass(asked, send):
                return
            _log.warning("a server was lost before it answered; the request %s", _GOES if left else _ENDS)
        await error_answer(stopping(), scope)(scope, receive, send)

    async def _pass(self, asked: IncomingRequest, send: Send) -> bool:
        """Answer by one server; False where it was lost before it began to."""
        begun = False
        try:
            async with aclosing(self._forward(asked)) as messages:
                async for message in messages:
                    begun = True
                    await send(message)
        except ServerLost:
            if begun:
                raise
            return False
        return True


def _routing_prompt(body: bytes) -> tuple[str, bool]:
    """What a body asks, as text for a router, and whether it may be sent twice; the server itself checks it."""
    if not body:
        return "", True
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return "", False
    if not isinstance(found, dict):
        return "", False
    repeats = not any(found.get(name) for name in _COMPILED)
    if isinstance(messages := found.get("messages"), list):
        return "\n".join(str(each.get("content", "")) for each in messages if isinstance(each, dict)), repeats
    prompt = found.get("prompt", "")
    return prompt if isinstance(prompt, str) else json.dumps(prompt), repeats


async def app_messages(
    app: ASGIApp, asked: IncomingRequest, headers: Sequence[tuple[bytes, bytes]]
) -> AsyncGenerator[Message]:
    """The messages of an application that answer a request, made only a little ahead of who reads them.

    So an answer that nobody reads is not held whole, and the application's own limits of time apply to it. `headers`
    are added to the answer's; closing the iterator drops the request.
    """
    body: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
    sent, found = anyio.create_memory_object_stream[Message](_AHEAD)

    async def receive() -> Message:
        if body:
            return body.pop()
        await anyio.sleep_forever()  # the client is there until this is cancelled
        raise AssertionError("sleeps for ever")

    async def run() -> None:
        async with sent:
            await app({**asked.scope, "root_path": ""}, receive, sent.send)

    task = asyncio.create_task(run())
    try:
        async with found:
            async for message in found:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], *headers]
                yield message
            await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


def whole(status: int, headers: Mapping[str, str], body: bytes) -> Sequence[Message]:
    """The messages of ASGI of an answer."""
    lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return [
        {"type": "http.response.start", "status": status, "headers": lines},
        {"type": "http.response.body", "body": body},
    ]


def refusal() -> Sequence[Message]:
    """The response when no server answers."""
    error = stopping()
    headers = {"content-type": "application/json", **(error.headers or {})}
    return whole(error.status, headers, json.dumps(error.body()).encode())
